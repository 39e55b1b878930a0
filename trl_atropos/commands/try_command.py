"""Runs `trl-atropos try`. What it shows is made in `rehearsal.py`, which is imported once the
recipe's variables are set."""

from trl_atropos.activity import importing
from trl_atropos.commands.words import command_parser, divide, require_words, with_recipe
from trl_atropos.services.signals import install_handlers

TRY = """\
Takes each environment of a recipe through one problem: starts the server if the
recipe does (or uses the one that runs), lets the environment sample and score a
group, checks it as a run would, and shows the rollouts. An exception of the
environment is shown with its traceback. Trains nothing; what it writes is in
the folder `try` of the recipe's `output_dir`.

Exit codes: 0 when a run would train on every group, 1 otherwise, 2 after wrong
use."""


def try_recipe(words: list[str]) -> None:
    """Shows one group of each environment. Exits with the code that the help names."""
    usage = "RECIPE [accelerate's flags] [--SETTING VALUE ...]"
    parser = command_parser("try", usage, TRY)
    require_words(parser, words)
    parser.parse_known_args(words)  # prints the help
    install_handlers()
    from trl_atropos.train import apply_recipe_environment

    launcher, settings = divide(words)
    settings = with_recipe(settings)  # the recipe may stand behind accelerate's flags
    apply_recipe_environment(settings)
    with importing("PyTorch, Transformers and TRL"):
        from trl_atropos.commands.rehearsal import main

    main(launcher, settings)
