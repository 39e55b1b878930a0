"""Fits what the commands print to the terminal: no line wraps there, and none breaks inside a word.

Whatever is written for people goes through `fitted` or `lines_within`, and a command's own parser
is a `CommandParser`. Files get lines as long as they are, so that a message can be searched for.
"""

import argparse
import os
import re
import sys
import textwrap
from typing import TextIO

USUAL_WIDTH = 80  # of a terminal that does not tell its width
HANGING = "  "  # before what follows in a message that takes several lines
# A command or setting, whose words stay together because you may want to copy it; and the place in
# a traceback.
QUOTED = re.compile(r'`[^`\n]+`|File "[^"\n]+",')
GLUE = "\0"  # stands for a space at which no line ends


def columns(stream: TextIO | None = None) -> int | None:
    """Returns the width of the terminal that `stream`, by default stdout, writes to, or the one
    that `COLUMNS` states. Returns `None` for a file, whose lines may be long; with `COLUMNS` set,
    stdout counts as a terminal."""
    if stream is None:
        stream = sys.stdout
    stated = os.environ.get("COLUMNS", "")
    is_terminal = stream.isatty()
    if stated.isdigit() and (is_terminal or stream is sys.stdout):
        return int(stated) or USUAL_WIDTH
    if is_terminal:
        return os.get_terminal_size(stream.fileno()).columns or USUAL_WIDTH
    return None


def cut(text: str, room: int) -> str:
    """Returns the text without its middle if it is longer than `room` characters: `abcdefg` becomes
    `ab…fg` in a room of 5."""
    if len(text) <= room:
        return text
    kept = max(2, room) - 1
    behind = kept // 2
    before = kept - behind
    return f"{text[:before]}…{text[len(text) - behind :]}"


def lines_within(text: str, width: int, hanging: str = HANGING) -> list[str]:
    """Returns the lines of a text, of at most `width` characters each.

    Where a line goes on in the next one, that has `hanging` behind its indentation. Lines end
    between words only, and not inside of backquotes if these fit a line. A path stays whole, on a
    line of its own if need be, even if it is longer than `width`.
    """
    lines = []
    for line in text.split("\n"):
        if len(line) <= width:
            lines.append(line)
        else:
            lines += _broken(line, width, hanging)
    return lines


def _broken(line: str, width: int, hanging: str) -> list[str]:
    """Returns the lines that one long line becomes. They keep its indentation."""
    first_indent, _words, _ = line.partition(line.lstrip())
    indent = first_indent + hanging
    room = width - len(indent)

    def glued(quoted: re.Match) -> str:
        if len(quoted[0]) > room:
            return quoted[0]
        return quoted[0].replace(" ", GLUE)

    parts = textwrap.wrap(
        QUOTED.sub(glued, line),
        width,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    lines = []
    for part in parts:
        lines.append(part.replace(GLUE, " "))
    return lines


def fitted(text: str, stream: TextIO | None = None) -> str:
    """Returns a text as it is written to `stream`, by default stderr: if that is a terminal, with
    lines that fit it."""
    if stream is None:
        stream = sys.stderr
    width = columns(stream)
    if width is None:
        return text
    return "\n".join(lines_within(text, width))


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors fit the terminal, as its help does."""

    def exit(self, status: int = 0, message: str | None = None):
        super().exit(status, message and fitted(message))
