"""Tells the words of a command apart: its own flags, accelerate's, and settings of the recipe."""

import argparse
from itertools import islice

from trl_atropos.terminal import CommandParser

# flags of accelerate that are settings, too, and here only that
OF_BOTH = {"debug", "gradient_accumulation_steps"}


def with_recipe(words: list[str]) -> list[str]:
    """Returns `RECIPE --flag ...` as `--config RECIPE --flag ...`."""
    if not words or words[0].startswith("-"):
        return words
    return ["--config", *words]


def command_parser(command: str, arguments: str, description: str = "") -> argparse.ArgumentParser:
    """Returns the parser of a command's own flags. All others are settings of the recipe."""
    return CommandParser(
        f"trl-atropos {command}",
        f"trl-atropos {command} {arguments}",
        description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def require_words(
    parser: argparse.ArgumentParser,
    words: list[str],
    missing: str = "a recipe, a YAML file such as recipes/quickstart/colocate.yaml",
) -> None:
    """Exits with 2, and says what is missing, if a command got no words."""
    if not words:
        parser.error(f"name {missing}; `{parser.prog} --help` says more")


def divide(words: list[str]) -> tuple[list[str], list[str]]:
    """Returns the flags of accelerate's launcher with their values, by its own parser, and the
    other words, which are settings."""
    from accelerate.commands.launch import launch_command_parser

    takes_value = {}
    for action in launch_command_parser()._actions:
        if action.dest not in OF_BOTH:
            for flag in action.option_strings:
                takes_value[flag] = action.nargs != 0
    launcher = []
    settings = []
    rest = iter(words)
    for word in rest:
        flag, equals, _value = word.partition("=")
        if flag not in takes_value:
            settings.append(word)
            continue
        launcher.append(word)
        if takes_value[flag] and not equals:
            launcher += islice(rest, 1)
    return launcher, settings
