"""Compares the benchmarks' ratios with those in `benchmarks/baseline.json`, and fails where one has
got worse.

`make bench` runs it. Both sides of a ratio are measured in one run, so that a slow machine does not
count; a busy one does. After a change that is meant to cost something: `python -m
benchmarks.baseline --write`, and say why.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BASELINE = Path(__file__).with_suffix(".json")
WORSE = 1.15  # times, above which the run fails
TIMEOUT = 3600.0  # seconds for one benchmark
COMMANDS = {
    "step": ["step"],
    "ingest": ["ingest"],
    "sampling": ["sampling", "--routes", "/generate", "--clients", "32", "--rounds", "5"],
    "loop": ["loop"],
    "weights": [
        "weights",
        "--modes",
        "colocate,server,nccl_lora,lora",
        "--params",
        "20M",
        "--ranks",
        "8",
    ],
}


@dataclass(frozen=True)
class Ratio:
    benchmark: str
    read: Callable[[dict[str, Any]], float]
    more_is_better: bool


def _speedup(shape: str, trainer: str) -> Callable[[dict[str, Any]], float]:
    def read(result: dict[str, Any]) -> float:
        (row,) = [
            row for row in result["rows"] if (row["shape"], row["trainer"]) == (shape, trainer)
        ]
        return row["speedup"]

    return read


def _publish(result: dict[str, Any], mode: str) -> float:
    (row,) = [row for row in result["rows"] if row["mode"] == mode]
    return row["publish_ms"]


def _front_us(result: dict[str, Any], name: str) -> float:
    (row,) = [row for row in result["rows"] if row["row"] == name]
    return row["front_us"]


RATIOS = {
    "useful tokens per second over TRL's, fixed rows": Ratio(
        "step", _speedup("spread", "rows"), True
    ),
    "useful tokens per second over TRL's, token budget": Ratio(
        "step", _speedup("spread", "tokens"), True
    ),
    "useful tokens per second over TRL's, equal lengths": Ratio(
        "step", _speedup("equal", "rows"), True
    ),
    "ingest over orjson": Ratio("ingest", lambda result: result["ratio"], False),
    "memory of ingest over the reply": Ratio(
        "ingest", lambda result: result["memory_ratio"], False
    ),
    "step over max(sampling, training)": Ratio(
        "loop", lambda r: max(row["ratio"] for row in r["rows"]), False
    ),
    "on-policy step over sampling + training": Ratio(
        "loop", lambda r: max(row["strict_ratio"] for row in r["rows"]), False
    ),
    "processor time of log-probabilities over none": Ratio(
        "sampling",
        lambda result: (
            _front_us(result, "engine, log-probabilities")
            / _front_us(result, "engine, no log-probabilities")
        ),
        False,
    ),
    "publish of nccl_lora over lora": Ratio(
        "weights", lambda result: _publish(result, "nccl_lora") / _publish(result, "lora"), False
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        choices=COMMANDS,
        action="append",
        help="benchmarks to run; all of them by default",
    )
    parser.add_argument("--write", action="store_true", help="make what is measured the baseline")
    options = parser.parse_args()
    baseline = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    chosen = options.only or list(COMMANDS)
    results = {name: _run(name) for name in chosen}
    worse = []
    print(f"{'ratio':<55} baseline      now")
    for name, ratio in RATIOS.items():
        if ratio.benchmark not in chosen:
            continue
        now = ratio.read(results[ratio.benchmark])
        before = baseline.get(name)
        change = 1.0 if before is None else (before / now if ratio.more_is_better else now / before)
        print(
            f"{name:<55} {'-' if before is None else f'{before:.3f}':>8} "
            f"{now:8.3f}{'  WORSE' * (change > WORSE)}"
        )
        worse += [name] * (change > WORSE)
        baseline[name] = round(now, 3)
    if options.write:
        BASELINE.write_text(json.dumps(baseline, indent=2) + "\n")
    elif worse:
        sys.exit(
            f"worse by more than {WORSE - 1:.0%}: {'; '.join(worse)}. Is the machine idle? If so, "
            "look for why."
        )


def _run(name: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "trl_atropos.cli", "bench", *COMMANDS[name], "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT)
    if done.returncode:
        sys.exit(f"`{' '.join(command[1:])}` ended with exit code {done.returncode}, see above")
    return json.loads(done.stdout)


if __name__ == "__main__":
    main()
