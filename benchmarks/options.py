"""How the benchmarks read their command lines, and give their results."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.models import config_fields
from trl_atropos.activity import activity


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def new_parser(benchmark: str, description: str, epilog: str | None = None) -> Parser:
    """Returns the parser of `trl-atropos bench BENCHMARK`, with the options for its result."""
    parser = Parser(
        prog=f"trl-atropos bench {benchmark}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object in place of the table"
    )
    parser.add_argument(
        "--output", type=writable, metavar="FILE", help="also write the JSON object to a file"
    )
    return parser


def add_rounds(parser: Parser, default: int) -> None:
    """Adds the option for how many rounds count."""
    parser.add_argument(
        "--rounds",
        type=positive,
        default=default,
        metavar="N",
        help="that count (default: %(default)s)",
    )


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 1 or more")
    return int(text)


def one_of(names: Collection[str]) -> Callable[[str], str]:
    """Returns what parses one of these names."""

    def parse(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(names)}")
        return text

    return parse


def model_size(text: str) -> str:
    """Parses what `config_fields` takes, such as `20M` or `0.6b`, and returns it as `PRESETS` writes
    it."""
    try:
        config_fields(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text if text == "tiny" else text.upper()


def list_of(parse: Callable[[str], Any]) -> Callable[[str], list]:
    """Returns what parses values between commas, each of which `parse` does."""

    def parse_all(text: str) -> list:
        return [parse(part.strip()) for part in text.split(",")]

    return parse_all


def add_batch_size(parser: argparse.ArgumentParser, sequences: int, tokens: int) -> None:
    """Adds the size of a batch of groups, with these defaults: `require_whole` checks it."""
    sizes = {
        "--sequences": (sequences, "in a batch"),
        "--tokens": (tokens, "in each of them"),
        "--group_size": (8, "sequences per group"),
    }
    for flag, (default, text) in sizes.items():
        text += " (default: %(default)s)"
        parser.add_argument(flag, type=positive, default=default, metavar="N", help=text)


def require_whole(
    parser: argparse.ArgumentParser, options: argparse.Namespace, *names: str
) -> None:
    """Exits with 2 if a batch cannot be divided into parts of the sizes with these names."""
    for name in names:
        size = getattr(options, name)
        if options.sequences % size:
            parser.error(f"--sequences {options.sequences} is not a multiple of --{name} {size}")


def visible_gpus(chosen: str | None) -> list[str]:
    """Returns the names of the GPUs that may be used, as in CUDA_VISIBLE_DEVICES: the chosen ones, or
    all; none on a machine without any."""
    import torch

    chosen = chosen or os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name for name in chosen.split(",") if name]
    return [str(index) for index in range(torch.cuda.device_count())]


def writable(text: str) -> Path:
    if not Path(text).absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"the folder of {text} does not exist: make it first")
    return Path(text)


def aligned(rows: list[dict], columns: dict[str, str]) -> list[str]:
    """A line of the columns' names, and one for each row. `columns` are fields of a row, and how
    each is written."""
    cells = [[name.replace("_", " ") for name in columns]]
    for row in rows:
        cells.append(
            [
                "-" if row.get(name) is None else form.format(row[name])
                for name, form in columns.items()
            ]
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in cells
    ]


def see_one_gpu() -> None:
    """Hides all GPUs but the first from this process and from those that it starts: with more, TRL
    would divide the model among them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[0]


def give_result(
    run: Callable[[argparse.Namespace], dict],
    options: argparse.Namespace,
    table: Callable[[dict], str],
) -> dict:
    """Measures on the first GPU, and gives the result as `options.json` and `options.output` ask
    for it."""
    see_one_gpu()
    # what libraries print is not the result
    with contextlib.redirect_stdout(sys.stderr), activity("Measuring"):
        result = run(options)
    text = json.dumps(result, indent=2) + "\n"
    if options.output is not None:
        options.output.write_text(text)
    sys.stdout.write(text if options.json else table(result))
    return result
