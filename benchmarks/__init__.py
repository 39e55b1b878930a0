"""Benchmarks of the package's own parts. `trl-atropos bench NAME` runs one, `make bench` all of
them.

They are not installed with the package. A process that a benchmark starts finds this folder by
`PYTHONPATH`.
"""

import os
import sys
from importlib import import_module
from pathlib import Path

BENCHMARKS = {  # one module each
    "weights": "how long new weights take to reach the server, by mode and size",
    "ingest": "how long a batch of rollouts takes from the socket to tensors",
    "delivery": "how long a batch takes from a server's answers to the trainer",
    "loop": "whether sampling and training overlap; the whole loop beside TRL's",
    "step": "how many useful tokens a training step works off, beside TRL's own",
    "episodes": "how long a step takes on episodes that branch, and on shared prompts",
    "attention": "how fast the kernels that could attend to a long rollout are",
    "long": "how fast runs on long rollouts are, by one process and by more",
    "sampling": "how fast the server samples, and what log-probabilities cost",
    "target": "GPU-seconds until held-out problems are solved, beside TRL",
    "numerics": "by how much trainer and server disagree, and what it costs to agree",
}


def main(arguments: list[str]) -> None:
    """Runs the benchmark that the first argument names; the others are its own."""
    name, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if name in ("", "-h", "--help"):
        lines = [f"  {benchmark:<9} {text}" for benchmark, text in BENCHMARKS.items()]
        sys.stdout.write(
            "usage: trl-atropos bench NAME [options]\n\nbenchmarks:\n" + "\n".join(lines)
        )
        sys.stdout.write("\n\n`trl-atropos bench NAME --help` says more.\n")
        sys.exit(0 if name else 2)
    if name not in BENCHMARKS:
        sys.stderr.write(
            f"trl-atropos bench: unknown benchmark {name!r}. There are: {', '.join(BENCHMARKS)}\n"
        )
        sys.exit(2)
    checkout = str(Path(__file__).parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (checkout, os.environ.get("PYTHONPATH")))
    )
    import_module(f"benchmarks.{name}").main(rest)
