"""`trl-atropos bench ingest`: how long a batch of rollouts takes from the socket to the tensors
that are trained on.

A server in a process of its own (`ingest_roles.py`) answers `GET /batch` with the bytes of one
large batch, as the Atropos API would. Another process pulls it with the real client, admits it
through the real door, and makes the tensors that TRL makes of the rows. In turn with that, it has
orjson read the same bytes. A third one does it once, to see how much memory it takes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from benchmarks.options import (
    add_batch_size,
    add_rounds,
    give_result,
    new_parser,
    require_whole,
)
from trl_atropos import __version__
from trl_atropos.services.signals import install_handlers

DESCRIPTION = """\
Measure how long a batch of rollouts takes from the socket to the tensors that are trained on, validation included.

Times are medians, in milliseconds, of rounds that take turns; the first round does not count.

  orjson    `orjson.loads` of the same bytes, which makes Python objects of them and checks nothing
  socket    a bare read of the reply
  rows      from the request to the trainer's rows: read, parse, check, cut
  tensors   the tensors that TRL makes of the rows; a large part is a list of the log-probabilities that TRL makes
  total     rows + tensors
  ratio     total / orjson
  memory    most memory taken from the request to the tensors, and how many times the reply that is
"""
TIMEOUT = 600.0  # seconds for one of the processes


def build_parser() -> argparse.ArgumentParser:
    parser = new_parser("ingest", DESCRIPTION)
    add_batch_size(parser, sequences=1024, tokens=4096)
    add_rounds(parser, 5)
    return parser


def main(argv: list[str] | None = None) -> None:
    parser = build_parser()
    options = parser.parse_args(argv)
    if options.tokens < 2:
        parser.error(
            "--tokens is 1: a sequence has a prompt and a completion, so ask for 2 or more"
        )
    require_whole(parser, options, "group_size")
    if find_spec("orjson") is None:
        parser.error("orjson, which this compares with, is not installed: pip install orjson")
    give_result(run, options, table)


def run(options: argparse.Namespace) -> dict:
    """Measures. Returns one flat object: versions, sizes, times in ms, and memory in bytes."""
    # imports NumPy, for which the help need not wait
    from benchmarks.ingest_roles import write_reply

    install_handlers()  # SIGTERM as well ends the processes and removes the file
    with tempfile.TemporaryDirectory(prefix="trl_atropos_bench_") as name:
        reply = Path(name) / "reply.json"
        write_reply(reply, options.sequences, options.tokens, options.group_size)
        size = reply.stat().st_size
        server = _start("serve", str(reply), stdout=subprocess.PIPE)
        try:
            url = server.stdout.readline().strip()
            times = _result_of("times", url, str(reply), str(options.rounds))
            peak = _result_of("memory", url)["peak_bytes"]
        finally:
            server.kill()
            server.wait()
            server.stdout.close()
    return {
        "trl_atropos": __version__,
        **{package: version(package) for package in ("msgspec", "orjson", "numpy", "torch", "trl")},
        "cpus": len(os.sched_getaffinity(0)),
        "sequences": options.sequences,
        "tokens": options.tokens,
        "reply_bytes": size,
        **times,
        "total_ms": times["rows_ms"] + times["tensors_ms"],
        "rows_ratio": times["rows_ms"] / times["orjson_ms"],
        "ratio": (times["rows_ms"] + times["tensors_ms"]) / times["orjson_ms"],
        "peak_bytes": peak,
        "memory_ratio": peak / size,
    }


def _start(*arguments: str, stdout: int) -> subprocess.Popen:
    command = [sys.executable, "-m", "benchmarks.ingest_roles", *arguments]
    environment = os.environ | {"TRL_EXPERIMENTAL_SILENCE": "1"}
    return subprocess.Popen(command, stdout=stdout, text=True, env=environment)


def _result_of(*arguments: str) -> dict:
    process = _start(*arguments, stdout=subprocess.PIPE)
    try:
        output, _ = process.communicate(timeout=TIMEOUT)
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        sys.exit(
            f"trl-atropos bench ingest: `{arguments[0]}` ended with exit code "
            f"{process.returncode}, see above"
        )
    return json.loads(output.splitlines()[-1])


def table(result: dict) -> str:
    """The result as lines of text."""
    versions = ("trl_atropos", "msgspec", "orjson", "numpy", "torch", "trl", "cpus")
    times = ("orjson", "socket", "rows", "tensors", "total")
    return "\n".join(
        [
            " ".join(f"{name}={result[name]}" for name in versions),
            f"{result['sequences']} sequences of {result['tokens']} tokens, "
            f"{result['reply_bytes']:,} bytes",
            "",
            *(f"{name:>8}  {result[f'{name}_ms']:8.0f} ms" for name in times),
            f"{'ratio':>8}  {result['ratio']:8.2f}     (to the rows: {result['rows_ratio']:.2f})",
            f"{'memory':>8}  {result['peak_bytes'] / 1e6:8.0f} MB  ({result['memory_ratio']:.2f} "
            "times the reply)",
            "",
        ]
    )
