"""The `trl-atropos` command."""

import sys
from collections.abc import Callable
from importlib import import_module
from typing import NoReturn

USAGE = """usage: trl-atropos check --config recipe.yaml [--any_field value] [--json]
       trl-atropos serve MODEL [--vllm_mode MODE] [any flag of `vllm serve`]
       trl-atropos report RUN_DIR [--output FILE] [--max_rollouts N]
       trl-atropos bench NAME [options]
       trl-atropos --version

commands:
  check   find what is wrong with a recipe and its environments before a run, and what to do about it; starts nothing
  serve   start the vLLM server that environments sample from and a trainer keeps in step with
  report  write one HTML file about a run: curves, warnings, settings, and its rollouts token by token
  bench   measure this machine; `trl-atropos bench --help` lists what

`trl-atropos COMMAND --help` says more. Training is started with accelerate:
  accelerate launch --config_file configs/accelerate/cpu.yaml -m trl_atropos.train --config recipes/NAME/X.yaml
  python -m trl_atropos.train --help

Exit codes: 0 when all is well, 1 after an error or with findings of `check`, 2 after wrong use, 130 after Ctrl-C.
"""


# A module of `trl_atropos.bench` each.
BENCHMARKS = {
    "weights": "how long new weights take to reach the server, for every mode, model size and adapter rank",
    "ingest": "how long a batch of rollouts takes from the socket to the tensors that are trained on",
    "loop": "whether sampling and training overlap, with sampling that takes up to twice as long as training",
    "step": "how many useful tokens a training step works off, beside TRL's own trainer on the same rows",
}


def main() -> None:
    try:
        _run(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)


def _run(words: list[str]) -> None:
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        sys.exit(0 if words else 2)
    command, arguments = words[0], words[1:]
    if command == "--version":
        return _print_version()
    if command == "check":
        from trl_atropos.check import main as run
    elif command == "serve":
        from trl_atropos.server.launch import main as run
    elif command == "report":
        from trl_atropos.report.page import main as run
    elif command == "bench":
        run, arguments = _benchmark(arguments)
    else:
        _refuse(f"trl-atropos: unknown command {command!r}\n\n{USAGE}")
    run(arguments)


def _print_version() -> None:
    from trl_atropos import __version__

    sys.stdout.write(f"trl_atropos {__version__}\n")


def _refuse(message: str) -> NoReturn:
    sys.stderr.write(f"{message}\n")
    sys.exit(2)


def _benchmark(arguments: list[str]) -> tuple[Callable[[list[str]], None], list[str]]:
    """The benchmark that the first of `arguments` names, and the rest of them."""
    name, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if name in ("", "-h", "--help"):
        lines = [f"  {benchmark:<8} {text}" for benchmark, text in BENCHMARKS.items()]
        sys.stdout.write("usage: trl-atropos bench NAME [options]\n\nbenchmarks:\n" + "\n".join(lines))
        sys.stdout.write("\n\n`trl-atropos bench NAME --help` says more.\n")
        sys.exit(0 if name else 2)
    if name not in BENCHMARKS:
        _refuse(f"trl-atropos bench: unknown benchmark {name!r}. There are: {', '.join(BENCHMARKS)}")
    return import_module(f"trl_atropos.bench.{name}").main, rest


if __name__ == "__main__":
    main()
