"""`trl-atropos bench sampling`: how fast the server samples, and what log-probabilities cost.

The same model stands in several processes side by side: vLLM's engine without a server, and `trl-atropos
serve`, each with the fast path of log-probabilities and without it. One after the other is asked
for completions of the same length, in a random order in each round.
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
from benchmarks.options import (
    add_rounds,
    aligned,
    give_result,
    list_of,
    model_size,
    new_parser,
    one_of,
    positive,
)
from benchmarks.sampling_targets import Question, start_targets
from trl_atropos import __version__
from trl_atropos.protocol import ANSWER_HEADER, NUMBERS
from trl_atropos.services.signals import install_handlers

DESCRIPTION = """\
Measure how fast the server samples, and what log-probabilities cost.

Rows: the engine without a server (vLLM's AsyncLLM), and the server's routes, with N clients that
take whole completions and ask again at once. "vLLM's" has `--fast_logprobs false`. "numbers" asks
as environments do that have a `path`. "no engine" is a route that answers at once: what HTTP and
JSON cost. Medians of rounds that take turns in a random
order; a round counts as many answers as there are clients.

  tokens_per_s  tokens sampled per second
  ratio         of the first row's, in the same round: an engine without log-probabilities
  of_none       of the same route's, in the same round, asked for no log-probabilities
  front_us      processor time of the process with the API, or with AsyncLLM, in microseconds a token
  engine_us     processor time of the engine's process, likewise
  of_plain      both together, of the same route's without a session, in the same round, asked for
                log-probabilities: what a session costs
"""
FLOOR = "engine, no log-probabilities"
ENGINE = "engine, log-probabilities"
COLUMNS = {
    "clients": "{}",
    "row": "{}",
    "tokens_per_s": "{:.0f}",
    "ratio": "{:.2f}",
    "of_none": "{:.2f}",
    "front_us": "{:.1f}",
    "engine_us": "{:.1f}",
    "of_plain": "{:.2f}",
}


def build_parser() -> argparse.ArgumentParser:
    parser = new_parser("sampling", DESCRIPTION)
    add = parser.add_argument
    add(
        "--params",
        type=model_size,
        default="tiny",
        metavar="SIZE",
        help="of a model with random weights (default: %(default)s, so small that Python shows)",
    )
    add("--model", type=Path, metavar="FOLDER", help="a model that is there, in its place")
    add(
        "--clients",
        type=list_of(positive),
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
    add_rounds(parser, 5)
    add(
        "--routes",
        type=list_of(one_of(ROUTES)),
        metavar="NAME,...",
        help=f"of {', '.join(ROUTES)}: measure only these and the engine, with log-probabilities and "
        "without",
    )
    add(
        "--equal",
        type=positive,
        metavar="TOKENS",
        help="measure nothing, and compare so many log-probabilities of the fast path with vLLM's "
        "own, bit for bit",
    )
    return parser


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
ROUTES = {  # each with the fields that ask for log-probabilities
    "/generate": ("/generate", LOGPROBS),
    "/v1/completions": ("/v1/completions", LOGPROBS),
    "chat": ("/v1/chat/completions", CHAT_LOGPROBS),
}
# those below which a session has calls, with the fields that ask for a stream
STREAMS = {
    "/v1/completions": {"stream": True} | LOGPROBS,
    "chat": {"stream": True} | CHAT_LOGPROBS,
}


def _rows(routes: list[str] | None = None) -> list[Question]:
    """Returns what is asked of whom: everything, or only what log-probabilities cost on some
    routes."""
    rows = _all_rows()
    if routes is None:
        return rows
    names = {ENGINE, *routes}
    compared = {row.without for row in rows if row.name in names}
    return [row for row in rows if row.name in names | compared]


def _all_rows() -> list[Question]:
    rows = [
        Question(FLOOR, "engine", {}),
        Question("engine, no log-probabilities, no text", "engine", {"detokenize": False}),
        Question("engine, log-probabilities, vLLM's", "vLLM's engine", LOGPROBS, without=FLOOR),
        Question(ENGINE, "engine", LOGPROBS, without=FLOOR),
    ]
    for name, (route, fields) in ROUTES.items():
        without = f"{name}, no log-probabilities"
        rows.append(Question(without, "server", {}, route))
        rows.append(Question(f"{name}, vLLM's", "vLLM's server", fields, route, without))
        rows.append(Question(name, "server", fields, route, without))
    without = "/generate, no log-probabilities"
    headers = {ANSWER_HEADER: NUMBERS}
    rows.append(
        Question("/generate, numbers", "server", LOGPROBS, "/generate", without, headers=headers)
    )
    rows += _session_rows()
    rows.append(Question("no engine", "echo", LOGPROBS, "/generate"))
    return rows


def _session_rows() -> list[Question]:
    """Returns the rows of calls below a session, which notes log-probabilities for a client that
    asks for none, and their plain rows if `_rows` has not got these."""
    rows = []
    for name, fields in STREAMS.items():
        route, _ = ROUTES[name]
        rows.append(Question(f"{name}, stream", "server", fields, route))
    for name in STREAMS:
        route, fields = ROUTES[name]
        streams = {"stream": True}
        below = {"target": "server", "route": route, "in_session": True}
        rows.append(Question(f"session {name}", fields={}, plain=name, **below))
        rows.append(
            Question(f"session {name}, log-probabilities", fields=fields, plain=name, **below)
        )
        plain = f"{name}, stream"
        rows.append(Question(f"session {plain}", fields=streams, plain=plain, **below))
    return rows


def _measure(options: argparse.Namespace) -> dict:
    import torch

    install_handlers()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trl_atropos_bench_")))
        model = options.model
        if model is None:
            model = folder / "model"
            make_model(model, options.params, dtype(), words=True)
        questions = _rows(options.routes)
        names = {question.target for question in questions}
        targets = start_targets(stack, folder, model, max(options.clients), options.tokens, names)
        vllm_version = targets["server"].info()["vllm_version"]
        rows = []
        for clients in options.clients:
            rows += _rounds(questions, targets, clients, options)
    return {
        "trl_atropos": __version__,
        **{package: version(package) for package in ("torch", "transformers")},
        "vllm": vllm_version,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "params": options.params if options.model is None else str(options.model),
        "tokens": options.tokens,
        "rows": rows,
    }


def _rounds(
    questions: list[Question], targets: dict, clients: int, options: argparse.Namespace
) -> list[dict]:
    """Asks everybody in each round, in a random order. The first round does not count. After each
    of the others, the medians so far are printed: a run may be cut off."""
    measured: dict[str, list[dict]] = {question.name: [] for question in questions}
    rng = random.Random(0)
    rows = []
    for number in range(options.rounds + 1):
        for question in _in_random_order(questions, rng):
            figures = targets[question.target].measure(question, clients, options.tokens)
            if number:
                measured[question.name].append(figures)
        lines = [f"{clients} clients: round {number} of {options.rounds}"]
        if number:
            rows = _medians(questions, measured, clients)
            lines.append(_table({"rows": rows}))
        sys.stderr.write("\n".join(lines) + "\n")
    return rows


def _medians(
    questions: list[Question], measured: dict[str, list[dict]], clients: int
) -> list[dict]:
    """Returns a row for each question: the medians of its rounds, and its ratios to others."""
    rows = []
    for question in questions:
        rounds = measured[question.name]
        ratios = _ratios(rounds, measured[FLOOR])
        row = {"clients": clients, "row": question.name}
        row["ratio"] = statistics.median(ratios)
        row["ratios"] = ratios
        if question.without is not None:
            row["of_none"] = statistics.median(_ratios(rounds, measured[question.without]))
        for field in ("tokens_per_s", "front_us", "engine_us"):
            values = [figures[field] for figures in rounds if figures[field] is not None]
            row[field] = statistics.median(values) if values else None
        if question.plain is not None:
            row["times_of_plain"] = _times(rounds, measured[question.plain])
            row["of_plain"] = statistics.median(row["times_of_plain"])
        rows.append(row)
    return rows


def _in_random_order(questions: list[Question], rng: random.Random) -> list[Question]:
    """Returns the questions in a random order, in which those that are compared with another stand
    beside it: what else a machine does changes from second to second."""

    def family(question: Question) -> list[Question]:
        order = [question]
        compared = [other for other in questions if question.name in (other.without, other.plain)]
        for other in rng.sample(compared, len(compared)):
            order += family(other)
        return order if rng.random() < 0.5 else order[::-1]

    firsts = [question for question in questions if not (question.without or question.plain)]
    order = []
    for question in rng.sample(firsts, len(firsts)):
        order += family(question)
    return order


def _ratios(rounds: list[dict], floors: list[dict]) -> list[float]:
    """Returns the ratio of two rows' rates, in each round."""
    ratios = []
    for figures, floor in zip(rounds, floors, strict=True):
        ratios.append(figures["tokens_per_s"] / floor["tokens_per_s"])
    return ratios


def _times(rounds: list[dict], plain: list[dict]) -> list[float]:
    """Returns the ratio of two rows' processor times, of front and engine together, in each
    round."""
    ratios = []
    for figures, other in zip(rounds, plain, strict=True):
        time = figures["front_us"] + figures["engine_us"]
        ratios.append(time / (other["front_us"] + other["engine_us"]))
    return ratios
