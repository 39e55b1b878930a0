"""`trl-atropos bench loop`: whether sampling and training overlap.

The Atropos API, an environment that is Atropos' own but for its sampling, which is a sleep, and the
trainer run as
they would (`loop_roles.py`), once with the default staleness and once strictly on-policy. There is
no inference server: a file stands in for it (`loop_sampler.py`).
"""

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from benchmarks import against_trl
from benchmarks.models import dtype, make_model
from benchmarks.options import (
    aligned,
    give_result,
    list_of,
    model_size,
    new_parser,
    one_of,
    positive,
    require_whole,
)
from benchmarks.processes import run_to_end
from trl_atropos import __version__
from trl_atropos.errors import ServiceError
from trl_atropos.services.addresses import free_port
from trl_atropos.services.manager import Services
from trl_atropos.services.signals import install_handlers

DESCRIPTION = """\
Measure whether sampling and training overlap: seconds per optimizer step, with sampling that takes 0 to 2 times as
long as training.

  sampling   what the environment takes for a batch, from a train step that is measured first, with rollouts at hand
  train      of these steps, all but the wait for rollouts: ingest, forward, backward, optimizer, logging; and
             `--device_seconds` in which the processor idles, as it does while a GPU computes
  step       with the default staleness: sampling and training go on at the same time
  ratio      step / max(sampling, train)
  staleness  versions that the oldest rollout was old
  strict     the same with `max_staleness: 0`, where a batch is sampled only when its policy is there: one after the
             other; its ratio is strict / (sampling + train)

With `--against trl`, the whole loop with real sampling instead, beside TRL's own GRPOTrainer with vLLM in its process
(which needs a GPU: on the CPU, TRL samples by Transformers):

  side       ours: the recipe for one GPU as shipped; turns: with `mps: false`; two_servers: each with a copy of the
             weights; one_ahead: with one batch in flight and without `hold_requests`; strict: with `max_staleness: 0`;
             no_logprobs: ours with an engine that makes no log-probabilities, where nothing is learnt from made-up
             ones; trl: its defaults
  sampled    tokens of completions per second; trained counts prompts, too
  publish    median; waits and computing are means
  speedup, of no logprobs   sampled tokens per second over those of the sides trl and no_logprobs, if they run
  memory     most that was taken of the GPU, by all processes
"""
COLUMNS = {  # of the table: field, and how it is written
    "latency": "{:g}",
    **dict.fromkeys(("sampling_s", "train_s", "step_s", "ratio"), "{:.2f}"),
    "staleness_max": "{:.0f}",
    **dict.fromkeys(
        ("strict_sampling_s", "strict_train_s", "strict_step_s", "strict_ratio"), "{:.2f}"
    ),
}
LIMIT = 1.1  # of both ratios
TIMEOUT = 1800.0  # seconds for the trainer
START_TIMEOUT = 120.0  # seconds for the Atropos API
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


def build_parser() -> argparse.ArgumentParser:
    parser = new_parser("loop", DESCRIPTION)
    add = parser.add_argument
    add(
        "--latencies",
        type=list_of(_seconds),
        default=[0, 0.5, 1, 1.5, 2],
        help="in train steps (default: 0,0.5,1,1.5,2)",
    )
    add(
        "--device_seconds",
        type=_seconds,
        default=1.5,
        help="of a train step (default: %(default)s)",
    )
    add(
        "--params",
        type=model_size,
        default="0.5M",
        help="size of the model, such as 2M (default: %(default)s)",
    )
    add("--sequences", type=positive, default=16, help="of a batch (default: %(default)s)")
    add(
        "--group_size", type=positive, default=4, help="sequences of a group (default: %(default)s)"
    )
    add(
        "--micro_batch",
        type=positive,
        default=8,
        help="sequences of a micro-batch (default: %(default)s)",
    )
    add(
        "--tokens",
        type=positive,
        default=64,
        help="median length of a completion (default: %(default)s)",
    )
    add(
        "--steps",
        type=positive,
        default=4,
        help="optimizer steps measured at each latency (default: %(default)s)",
    )
    add("--seed", type=int, default=0, help="of the rollouts (default: %(default)s)")
    add("--against", choices=["trl"], help="measure the whole loop beside that of TRL")
    add(
        "--sides",
        type=list_of(one_of(against_trl.SIDES)),
        default="trl,strict,ours",
        metavar="LIST",
        help="of --against (default: %(default)s)",
    )
    add(
        "--timeout",
        type=positive,
        default=1800,
        metavar="SECONDS",
        help="of a side (default: %(default)s)",
    )
    add("--check", action="store_true", help=f"exit with code 1 if a ratio is above {LIMIT}")
    return parser


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 0 or more: write it like 1.5")
    return seconds


def main(argv: list[str] | None = None) -> None:
    parser = build_parser()
    options = parser.parse_args(argv)
    require_whole(parser, options, "group_size", "micro_batch")
    if options.against:
        give_result(against_trl.run, options, against_trl.table)
        return
    result = give_result(run, options, table)
    slow = [
        row["latency"] for row in result["rows"] if max(row["ratio"], row["strict_ratio"]) > LIMIT
    ]
    if options.check and slow:
        sys.exit(f"trl-atropos bench loop: above {LIMIT} with sampling of {slow} train steps")


def run(options: argparse.Namespace) -> dict:
    """Measures. Returns versions, sizes, and a row for each latency, with times in seconds."""
    install_handlers()  # SIGTERM as well ends the processes and removes the folder
    with tempfile.TemporaryDirectory(prefix="trl_atropos_bench_") as name:
        make_model(Path(name) / "model", options.params, dtype())
        overlapped = _measure(Path(name), options, None)
        strict = _measure(Path(name), options, 0)
    return {
        "trl_atropos": __version__,
        **{package: version(package) for package in ("atroposlib", "torch", "trl")},
        "cpus": len(os.sched_getaffinity(0)),
        "params": options.params,
        "sequences": options.sequences,
        "tokens": options.tokens,
        "device_s": options.device_seconds,
        "train_s": overlapped["train_s"],
        "strict_train_s": strict["train_s"],
        "rows": [
            {
                "latency": latency,
                **row,
                "ratio": row["step_s"] / max(row["sampling_s"], row["train_s"]),
                **{f"strict_{name}": value for name, value in other.items()},
                "strict_ratio": other["step_s"] / (other["sampling_s"] + other["train_s"]),
            }
            for latency, row, other in zip(
                options.latencies, overlapped["rows"], strict["rows"], strict=True
            )
        ],
    }


def _measure(shared: Path, options: argparse.Namespace, max_staleness: int | None) -> dict:
    """What the trainer measured, with services of its own: an API knows one trainer in its life."""
    from benchmarks.loop_roles import Settings  # imports torch, for which the help need not wait
    from benchmarks.loop_sampler import Sampler

    folder = shared / ("overlapped" if max_staleness is None else "strict")
    folder.mkdir()
    (folder / "model").symlink_to(shared / "model")
    names = (
        "sequences",
        "group_size",
        "tokens",
        "steps",
        "latencies",
        "seed",
        "micro_batch",
        "device_seconds",
    )
    settings = Settings(
        **{name: getattr(options, name) for name in names}, max_staleness=max_staleness
    )
    (folder / "settings.json").write_text(json.dumps(asdict(settings)))
    Sampler(folder / "sampler.bin", make=True)
    url = f"http://127.0.0.1:{free_port()}"
    with Services(folder / "logs") as services:
        host, port = url.removeprefix("http://").split(":")
        api = [sys.executable, "-m", "atroposlib.cli.run_api", "--host", host, "--port", port]
        services.start("atropos", api, health_url=f"{url}/")
        services.wait_healthy("atropos", START_TIMEOUT)
        services.start("environment", _command("environment", folder, url), env=ONE_THREAD)
        try:
            run_to_end(
                "trl-atropos bench loop: the trainer",
                _command("trainer", folder, url),
                folder / "logs" / "trainer.log",
                TIMEOUT,
                ONE_THREAD,
            )
        except SystemExit:
            _require_alive(services)  # a service that died is the reason
            raise
    return json.loads((folder / "result.json").read_text())


def _require_alive(services: Services) -> None:
    try:
        services.check()
    except ServiceError as error:
        sys.exit(f"trl-atropos bench loop: {error}")


def _command(role: str, folder: Path, url: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.loop_roles", role, str(folder), url]


def table(result: dict) -> str:
    """The result as lines of text."""
    names = ("trl_atropos", "atroposlib", "torch", "trl", "cpus")
    lines = [
        " ".join(f"{name}={result[name]}" for name in names),
        f"{result['params']} parameters, {result['sequences']} sequences with a median of "
        f"{result['tokens']} tokens",
        f"train step {result['train_s']:.2f} s, strict {result['strict_train_s']:.2f}, idle "
        f"{result['device_s']:g}",
        "",
        *aligned(result["rows"], COLUMNS),
    ]
    return "\n".join(lines) + "\n"
