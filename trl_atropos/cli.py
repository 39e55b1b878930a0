"""The `trl-atropos` command."""

import sys
from collections.abc import Callable
from pathlib import Path

from trl_atropos import __version__

USAGE = """usage: trl-atropos train RECIPE [accelerate's flags] [--SETTING VALUE ...]
       trl-atropos check RECIPE [--SETTING VALUE ...] [--json]
       trl-atropos try RECIPE [accelerate's flags] [--SETTING VALUE ...]
       trl-atropos init NAME
       trl-atropos eval RECIPE [--checkpoint FOLDER] [--SETTING VALUE ...]
       trl-atropos serve MODEL [--vllm_mode MODE] [any flag of `vllm serve`]
       trl-atropos report RUN_DIR [--output FILE] [--max_rollouts N]
       trl-atropos slurm RECIPE --nodes N [--output FILE] [--SETTING VALUE ...]
       trl-atropos bench NAME [options]
       trl-atropos --version

commands:
  train   train by a recipe: `accelerate launch ... -m trl_atropos.train` in one
          command
  check   find what is wrong with a recipe and its environments before a run,
          and what to do about it; starts nothing
  try     run one group through environment, server and checks, and show its
          rollouts, or the traceback of the environment
  init    write a recipe and an environment to change into a new folder
  eval    make the evaluations of a recipe, of a checkpoint or of the model that
          the recipe begins with
  serve   start the vLLM server that environments sample from and a trainer
          keeps in step with
  report  write one HTML file about a run: curves, warnings, settings, and its
          rollouts token by token
  slurm   write a batch script for a run over several nodes of a SLURM cluster
  bench   measure this machine, in a checkout; `trl-atropos bench --help` lists
          what

`trl-atropos COMMAND --help` says more.

Exit codes: 0 when all is well, 1 after an error or when `check` finds one,
2 after wrong use, 130 after Ctrl-C.
"""


def main() -> None:
    try:
        _run(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)


def _run(words: list[str]) -> None:
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        sys.exit(0 if words else 2)
    command = words[0]
    arguments = words[1:]
    if command == "--version":
        sys.stdout.write(f"trl_atropos {__version__}\n")
        return
    from trl_atropos import commands

    around_a_run = {"train": commands.train, "eval": commands.evaluate, "try": commands.rehearse}
    around_a_run |= {"init": commands.init, "slurm": commands.slurm}
    if command in around_a_run:
        run = around_a_run[command]
    elif command == "check":
        from trl_atropos.check import main as run
    elif command == "serve":
        from trl_atropos.server.launch import main as run
    elif command == "report":
        from trl_atropos.report.page import main as run
    elif command == "bench":
        run = _benchmarks()
    else:
        sys.stderr.write(f"trl-atropos: unknown command {command!r}\n\n{USAGE}\n")
        sys.exit(2)
    if command in ("check", "eval", "slurm", "try"):
        from trl_atropos.train import apply_recipe_environment, without_vllm

        arguments = commands.with_recipe(arguments)
        apply_recipe_environment(arguments)
        run = without_vllm()(run)
    run(arguments)


def _benchmarks() -> Callable[[list[str]], None]:
    """The command of the folder `benchmarks`, which is beside the package in a checkout and in no
    wheel."""
    checkout = Path(__file__).parents[1]
    if not (checkout / "benchmarks").is_dir():
        what = (
            f"the benchmarks are not installed with the package ({checkout} has no folder "
            "`benchmarks`)"
        )
        fix = "Run this with a checkout of the repository: `pip install --editable .` in it."
        sys.exit(f"trl-atropos bench: {what}. {fix}")
    sys.path.insert(0, str(checkout))
    from benchmarks import main

    return main


if __name__ == "__main__":
    main()
