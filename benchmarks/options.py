"""How the benchmarks read their command lines, and give their results."""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 1 or more")
    return int(text)


def writable(text: str) -> Path:
    if not Path(text).absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"the folder of {text} does not exist: make it first")
    return Path(text)


def give_result(
    run: Callable[[argparse.Namespace], dict], options: argparse.Namespace, table: Callable[[dict], str]
) -> dict:
    """Measures, and gives the result as `options.json` and `options.output` ask for it."""
    with contextlib.redirect_stdout(sys.stderr):  # what libraries print is not the result
        result = run(options)
    text = json.dumps(result, indent=2) + "\n"
    if options.output is not None:
        options.output.write_text(text)
    sys.stdout.write(text if options.json else table(result))
    return result
