"""Reads the log of a service: its last lines, the error that ended it, what it does now.

`manager.py` quotes these in errors and warnings, `evaluations.py` while something waits for an
evaluation.
"""

import contextlib
import logging
import os
import re
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from trl_atropos.errors import reason_of
from trl_atropos.services.stacks import places_of
from trl_atropos.terminal import columns

if TYPE_CHECKING:
    from trl_atropos.services.manager import Service

logger = logging.getLogger(__name__)

TAIL_LINES = 20  # that a message quotes
SEARCHED_LINES = 200  # for an error, or for what a service does
TAIL_BYTES = 64 * 1024
TAIL_WIDTH = 500  # characters
# Some fifty lines of triton's bindings at the end of a vLLM process; the reason for its end is
# above them.
NOISE = re.compile(
    r"nanobind: | - leaked | - \.\.\. skipped |See https://nanobind\.|Extension modules: "
)
# What vLLM writes before each line of its processes, also of their tracebacks.
VLLM_PREFIX = re.compile(r"^\(\w+ pid=\d+\) ([A-Z]+ \d\d-\d\d [\d:]+ \[[^\]]+\] )?")
# Of Python. The line of code that it names is below it, indented.
WARNING_LINE = re.compile(r"\S+:\d+: \w*Warning: ")
ERROR_LINE = re.compile(r"([A-Za-z_]\w*\.)*[A-Z]\w*(Error|Exception): \S|guard: cannot start ")
# By which an environment says why it ends, as in `environment_site/environment_words.py`.
LAST_WORDS = "environment: "
RESTARTED = re.compile(r"guard: .*; starting it again in ")
# by vLLM's API server: the engine's own error stands above
RELAYED = "Engine core initialization failed"


def tail(path: str | Path, lines: int = TAIL_LINES, start: int = 0) -> str:
    """Returns the last lines of a log file from byte `start` on, without `NOISE`. Returns an empty
    text if the file does not exist."""
    text = ""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(start, size - TAIL_BYTES))
        text = file.read().decode(errors="replace")
    kept = [line for line in text.splitlines() if not NOISE.match(line)]
    return "\n".join(kept[-lines:])


def tell_work(service: "Service", doing: str) -> None:
    """Logs in one line of the terminal's width what a service is doing: `doing`, and the last line
    with words in its log, such as the present state of a progress bar. Python's warnings do not
    say what it is doing."""
    work = "no output yet"
    is_warning = False
    lines = tail(service.log_path, SEARCHED_LINES, service.log_start).splitlines()
    for line in lines[1:]:  # the first is that of the command
        text = VLLM_PREFIX.sub("", line)
        is_code = is_warning and text.startswith("  ")
        is_warning = WARNING_LINE.match(text) is not None
        if re.search("[a-z]{3}", text) and not (is_warning or is_code):
            work = text
    width = columns(sys.stderr) or TAIL_WIDTH
    room = width - len("[trl_atropos] ")
    logger.info(textwrap.shorten(f"{doing}: {work}", room, placeholder=" …"))


def cause_of_end(log_path: Path, start: int = 0) -> str:
    """Returns the error that ended a service, whose log begins at byte `start`: a colon and a
    sentence or two, or an empty text. An environment's own last words win."""
    cause = ""
    last_words = ""
    is_validation_error = False
    for line in tail(log_path, SEARCHED_LINES, start).splitlines():
        text = VLLM_PREFIX.sub("", line)
        if is_validation_error:
            # The first line of pydantic's error says nothing, the next one does.
            cause = text.strip()
            is_validation_error = False
        elif RESTARTED.match(text):
            cause = ""
            last_words = ""
        elif text.startswith(LAST_WORDS):
            last_words = text.removeprefix(LAST_WORDS).replace(f"{os.getcwd()}{os.sep}", "")
        elif ERROR_LINE.match(text) and RELAYED not in text:
            cause = text
            is_validation_error = "validation error" in text
    reason = last_words.rstrip(".") or reason_of(cause)
    return f": {reason[:TAIL_WIDTH]}" if reason else ""


def cause_of_crash(log_path: Path, start: int = 0) -> str:
    """Returns what Python's `faulthandler` wrote as a service crashed, such as `: Segmentation
    fault (environment.py:31 in score)`, or an empty text."""
    _, crash, stacks = tail(log_path, SEARCHED_LINES, start).rpartition("Fatal Python error: ")
    if not crash:
        return ""
    reason = stacks.splitlines()[0]
    places = places_of(stacks)
    if not places:
        return f": {reason}"
    function, _, place = places[0].partition(", ")  # of the thread that crashed
    return f": {reason} ({place} in {function})"


def end_of(log_path: Path, start: int = 0) -> str:
    """Returns the last lines of a service's log from byte `start` on, of tracebacks only the
    innermost frames."""
    lines = []
    frame = []  # the lines of the innermost frame of a traceback
    innermost_first = False  # as `faulthandler` writes it
    for line in tail(log_path, SEARCHED_LINES, start).splitlines():
        text = VLLM_PREFIX.sub("", line)
        if len(line) > TAIL_WIDTH:
            line = line[:TAIL_WIDTH] + " ..."
        if text.startswith('  File "'):
            if not innermost_first or not frame:
                frame = [line]
        elif frame and text.startswith("    "):
            frame.append(line)
        else:
            lines += [*frame, line]
            frame = []
            innermost_first = "(most recent call first)" in text
    lines += frame
    end = "\n".join(lines[-TAIL_LINES:])
    return f"The last lines of {log_path}:\n{end}"
