"""`trl-atropos bench sampling`: how fast the server samples, and what log-probabilities cost.

The same model stands in several processes side by side: vLLM's engine without a server, and `trl-atropos
serve`, each with the fast path of log-probabilities and without it. One after the other is asked
for the same number of tokens, in a random order in each round.
"""

import argparse
import random
import statistics
import sys
import tempfile
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

from benchmarks import sampling_equality
from benchmarks.models import dtype, make_model
from benchmarks.options import Parser, aligned, give_result, positive, writable
from benchmarks.sampling_targets import Question, start_targets
from trl_atropos import __version__
from trl_atropos.services.signals import install_handlers

DESCRIPTION = """\
Measure how fast the server samples, and what log-probabilities cost.

Rows: the engine without a server (vLLM's AsyncLLM), and the server's routes with N clients that
take whole completions. "vLLM's" has `--fast_logprobs false`. "no engine" is a route that answers at
once: what HTTP and JSON cost. Medians of rounds that take turns in a random order.

  tokens_per_s  tokens sampled per second
  ratio         of the first row's, in the same round: an engine without log-probabilities
  front_us      processor time of the process with the API, or with AsyncLLM, in microseconds a token
  engine_us     processor time of the engine's process, likewise
"""
FLOOR = "engine, no log-probabilities"
COLUMNS = {
    "clients": "{}",
    "row": "{}",
    "tokens_per_s": "{:.0f}",
    "ratio": "{:.2f}",
    "front_us": "{:.1f}",
    "engine_us": "{:.1f}",
}


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="trl-atropos bench sampling",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--params",
        default="tiny",
        metavar="SIZE",
        help="of a model with random weights (default: %(default)s, so small that Python shows)",
    )
    add("--model", type=Path, metavar="FOLDER", help="a model that is there, in its place")
    add(
        "--clients",
        type=_numbers,
        default=[128],
        metavar="N,...",
        help="requests in flight (default: 128)",
    )
    add(
        "--tokens",
        type=positive,
        default=192,
        metavar="N",
        help="of each completion (default: %(default)s)",
    )
    add("--rounds", type=positive, default=5, metavar="N", help="that count (default: %(default)s)")
    add(
        "--equal",
        type=positive,
        metavar="TOKENS",
        help="measure nothing, and compare so many log-probabilities of the fast path with vLLM's "
        "own, bit for bit",
    )
    add("--json", action="store_true", help="print one JSON object in place of the table")
    add("--output", type=writable, metavar="FILE", help="also write the JSON object to a file")
    return parser


def _numbers(text: str) -> list[int]:
    return [positive(word) for word in text.split(",")]


def main(argv: list[str] | None = None) -> None:
    options = build_parser().parse_args(argv)
    if options.equal:
        result = give_result(sampling_equality.measure, options, _table_of_equality)
        wrong = [row[name] for row in result["rows"] for name in row if name.startswith("wrong")]
        sys.exit(1 if any(wrong) else 0)
    give_result(_measure, options, _table)


def _table_of_equality(result: dict) -> str:
    lines = []
    for row in result["rows"]:
        fields = [f"{name.replace('_', ' ')} {value}" for name, value in row.items()]
        lines.append("; ".join(fields))
    return "\n".join(lines)


def _table(result: dict) -> str:
    return "\n".join(aligned(result["rows"], COLUMNS))


# ---------------------------------------------------------------------------- what is asked of whom


LOGPROBS = {"logprobs": 0}
CHAT_LOGPROBS = {"logprobs": True, "top_logprobs": 0}
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
ROWS = [
    Question(FLOOR, "engine", {}),
    Question("engine, no log-probabilities, no text", "engine", {"detokenize": False}),
    Question("engine, log-probabilities, vLLM's", "vLLM's engine", LOGPROBS),
    Question("engine, log-probabilities", "engine", LOGPROBS),
    Question("/generate, no log-probabilities", "server", {}, "/generate"),
    Question("/generate, vLLM's", "vLLM's server", LOGPROBS, "/generate"),
    Question("/generate", "server", LOGPROBS, "/generate"),
    Question("/v1/completions, no log-probabilities", "server", {}, COMPLETIONS),
    Question("/v1/completions, vLLM's", "vLLM's server", LOGPROBS, COMPLETIONS),
    Question("/v1/completions", "server", LOGPROBS, COMPLETIONS),
    Question("chat, no log-probabilities", "server", {}, CHAT),
    Question("chat, vLLM's", "vLLM's server", CHAT_LOGPROBS, CHAT),
    Question("chat", "server", CHAT_LOGPROBS, CHAT),
    Question("no engine", "echo", LOGPROBS, "/generate"),
]


def _measure(options: argparse.Namespace) -> dict:
    import torch

    install_handlers()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trl_atropos_bench_")))
        model = options.model
        if model is None:
            model = folder / "model"
            make_model(model, options.params, dtype(), words=True)
        targets = start_targets(stack, folder, model, max(options.clients), options.tokens)
        vllm_version = targets["server"].info()["vllm_version"]
        rows = []
        for clients in options.clients:
            rows += _rounds(targets, clients, options)
    return {
        "trl_atropos": __version__,
        **{package: version(package) for package in ("torch", "transformers")},
        "vllm": vllm_version,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "params": options.params if options.model is None else str(options.model),
        "tokens": options.tokens,
        "rows": rows,
    }


def _rounds(targets: dict, clients: int, options: argparse.Namespace) -> list[dict]:
    """Asks everybody in each round, in a random order. The first round does not count."""
    measured: dict[str, list[dict]] = {row.name: [] for row in ROWS}
    rng = random.Random(0)
    for number in range(options.rounds + 1):
        for row in rng.sample(ROWS, len(ROWS)):
            figures = targets[row.target].measure(row, clients, options.tokens)
            if number:
                measured[row.name].append(figures)
        sys.stderr.write(f"{clients} clients: round {number} of {options.rounds}\n")
    floors = [figures["tokens_per_s"] for figures in measured[FLOOR]]
    rows = []
    for name, rounds in measured.items():
        ratios = []
        for figures, floor in zip(rounds, floors, strict=True):
            ratios.append(figures["tokens_per_s"] / floor)
        row = {"clients": clients, "row": name, "ratio": statistics.median(ratios)}
        row["ratios"] = ratios
        for field in ("tokens_per_s", "front_us", "engine_us"):
            values = [figures[field] for figures in rounds if figures[field] is not None]
            row[field] = statistics.median(values) if values else None
        rows.append(row)
    return rows
