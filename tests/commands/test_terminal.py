"""What commands print fits the terminal, and breaks between words only."""

import os
import pty
import random
import subprocess
import sys
import termios

import pytest

from tests.forge import TRAINER
from trl_atropos.cli import COMMANDS
from trl_atropos.terminal import columns, cut, fitted, lines_within

PATH = "runs/a-task-with-a-long-name-cpu/logs/environment-a-task-with-a-long-name.log"
SPEAK = """
import sys
from trl_atropos import logging
from trl_atropos.terminal import CommandParser, fitted
text = "one two three four five six seven"
sys.stdout.write(fitted(text, sys.stdout) + "\\n")
logging.set_verbosity_info()
logging._root.info(text)
CommandParser(prog="p", usage="p").error(text)
"""


def test_path_stays_whole_on_line_of_its_own():
    text = f"[trl_atropos] Started environment-a (process 12345), log: {PATH} (new)"
    assert lines_within(text, 80) == [
        "[trl_atropos] Started environment-a (process 12345), log:",
        f"  {PATH}",
        "  (new)",
    ]
    assert lines_within(f"log: {PATH}", 30) == ["log:", f"  {PATH}"]  # nothing else is possible


def test_quoted_command_is_not_broken_if_it_fits_line():
    text = "Restart it with `trl-atropos serve MODEL`, or not"
    assert lines_within(text, 35) == ["Restart it with", "  `trl-atropos serve MODEL`, or not"]
    narrow = ["Restart it with", "  `trl-atropos serve", "  MODEL`, or not"]
    assert lines_within(text, 20) == lines_within(text, 26) == narrow


def test_line_that_fits_is_left_as_it_is():
    table = "\n".join(["", "  a     b", "  1.0   2.0  ", ""])
    assert lines_within(table, 14) == table.split("\n")


def test_further_lines_keep_indentation():
    frame = '    File "environment.py", line 7, in score'
    assert lines_within(frame, 30) == ['    File "environment.py",', "      line 7, in score"]


@pytest.mark.parametrize("width", [20, 40, 80])
def test_no_line_is_too_long_and_no_word_lost(width):
    draw = random.Random(width)
    for _ in range(300):
        words = ["x" * draw.randint(1, 12) for _ in range(draw.randint(1, 40))]
        indent = " " * draw.randint(0, 4)
        lines = lines_within(indent + " ".join(words), width)
        assert max(map(len, lines)) <= width
        assert " ".join(lines).split() == words
        assert all(line.startswith(indent) for line in lines)


def test_middle_of_long_text_is_cut():
    assert (cut("abcdefg", 5), cut("abcde", 5)) == ("ab…fg", "abcde")


def test_file_gets_whole_lines(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "20")
    text = "one two three four five six seven"
    with (tmp_path / "log").open("w") as file:
        assert columns(file) is None
        assert fitted(text, file) == text
    assert columns() == 20  # who sets `COLUMNS` wants it


def test_terminal_gets_lines_of_its_width():
    """Also in log records, and in what a parser refuses."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (50, 24))
    env = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    command = [sys.executable, "-c", SPEAK]
    done = subprocess.run(command, env=env, stdout=slave, stderr=slave, timeout=60)
    os.close(slave)
    lines = os.read(master, 65536).decode().splitlines()
    os.close(master)
    assert done.returncode == 2
    assert max(map(len, lines)) <= 24
    said = " ".join(" ".join(lines).split())
    text = "one two three four five six seven"
    assert said == f"{text} [trl_atropos] {text} usage: p p: error: {text}"


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_eighty_columns(command, tmp_path):
    words = ["-m", "trl_atropos.cli", *filter(None, [command]), "--help"]
    done = TRAINER.run(words, os.environ | {"COLUMNS": "80"}, tmp_path)
    assert done.returncode == 0
    assert [line for line in done.stdout.splitlines() if len(line) > 80] == []
