"""The `trl-atropos` command: finds the command that the first word names, and gives it the others.

Every command reads its own words and prints its own help. What is imported for one is imported only
when it is called: `trl-atropos --help` waits for nothing.
"""

import argparse
import difflib
import sys
from collections.abc import Callable
from pathlib import Path

from trl_atropos import __version__
from trl_atropos.commands.words import with_recipe
from trl_atropos.logging import speak
from trl_atropos.terminal import CommandParser, fitted

COMMANDS = {
    "train": "train by a recipe: `accelerate launch ... -m trl_atropos.train` in one command",
    "check": "find what is wrong with a recipe and its environments before a run, and what to do "
    "about it; starts nothing",
    "try": "run one group through environment, server and checks, and show its rollouts, or the "
    "traceback of the environment",
    "init": "write a recipe and an environment to change into a new folder",
    "eval": "make the evaluations of a recipe, of a checkpoint or of the model that the recipe "
    "begins with",
    "serve": "start the vLLM server that environments sample from and a trainer keeps in step with",
    "sessions": "list, show and end the sessions of servers: what clients sample below a URL of "
    "their own",
    "report": "write one HTML file about a run: curves, warnings, settings, and its rollouts token "
    "by token",
    "slurm": "write a batch script for a run over several nodes of a SLURM cluster",
    "bench": "measure this machine, in a checkout; `trl-atropos bench --help` lists what",
}
EPILOG = (
    "`trl-atropos COMMAND --help` says more. Exit codes: 0 when all is well, 1 after an error or "
    "when `check` finds one, 2 after wrong use, 130 after Ctrl-C."
)


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser("trl-atropos", epilog=EPILOG, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"trl_atropos {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    return parser


def main() -> None:
    try:
        _run(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)


def _run(words: list[str]) -> None:
    parser = build_parser()
    if not words:
        parser.print_help()
        sys.exit(2)
    command = words[0]
    if command not in COMMANDS and not command.startswith("-"):
        close = difflib.get_close_matches(command, COMMANDS, n=1)
        fix = f"Did you mean `{close[0]}`?" if close else "`trl-atropos --help` lists the commands."
        sys.stderr.write(fitted(f"trl-atropos: unknown command {command!r}. {fix}\n"))
        sys.exit(2)
    parser.parse_args([command])  # prints what `--help` and `--version` ask for
    speak()
    _call(command, words[1:])


def _call(command: str, words: list[str]) -> None:
    """Runs a command with the words behind it."""
    if command == "train":
        from trl_atropos.commands.train import train

        train(words)
    elif command == "init":
        from trl_atropos.commands.init import init

        init(words)
    elif command == "serve":
        from trl_atropos.server.launch import main

        main(words)
    elif command == "sessions":
        from trl_atropos.commands.sessions import sessions

        sessions(words)
    elif command == "report":
        from trl_atropos.report.page import main

        main(words)
    elif command == "bench":
        _benchmarks()(words)
    else:
        _call_with_recipe(command, with_recipe(words))


def _call_with_recipe(command: str, words: list[str]) -> None:
    """Runs a command that reads a recipe in this process, with the variables that it sets."""
    from trl_atropos.train import apply_recipe_environment, without_vllm

    apply_recipe_environment(words)
    with without_vllm():
        if command == "check":
            from trl_atropos.check import main

            main(words)
        elif command == "eval":
            from trl_atropos.commands.evaluate import evaluate

            evaluate(words)
        elif command == "try":
            from trl_atropos.commands.try_command import try_recipe

            try_recipe(words)
        else:
            from trl_atropos.commands.batch_script import slurm

            slurm(words)


def _benchmarks() -> Callable[[list[str]], None]:
    """Returns the command of the folder `benchmarks`, which is beside the package in a checkout and
    in no wheel."""
    checkout = Path(__file__).parents[1]
    if not (checkout / "benchmarks").is_dir():
        message = (
            "trl-atropos bench: the benchmarks are not installed with the package "
            f"({checkout} has no folder `benchmarks`). Run this with a checkout of the "
            "repository: `pip install --editable .` in it."
        )
        sys.exit(fitted(message))
    sys.path.insert(0, str(checkout))
    from benchmarks import main

    return main


if __name__ == "__main__":
    main()
