"""Reads flags off command lines that no parser of ours reads, or none has read yet.

Recipe, check, commands and server use it on lists of words: a vLLM server's flags, the command of
an environment, and the arguments of a run before its parser is imported. It imports neither torch
nor numpy, because a recipe may set variables that those read on import: `train.py` finds them by
`stated_settings` first.
"""

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values that vLLM's `--max-lora-rank` takes
# The flags that divide a vLLM server among GPUs, by vLLM's short names.
# `tests/server/test_launch.py` compares them with vLLM's own, and checks that the other flags which
# we look for have no short names.
PARALLEL = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-dp": "--data-parallel-size",
}
SHORT_NAMES = PARALLEL | {"-sc": "--speculative-config"}


def stated_flags(argv: Iterable[str]) -> dict[str, str]:
    """Returns the flags of a command line with their last values. A flag without a value has an
    empty text: `--a 1 --b --c=2 --a 3` is read as `{"--a": "3", "--b": "", "--c": "2"}`."""
    stated = {}
    open_flag = None  # whose value the next word may be
    for word in argv:
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            stated[name] = value
            open_flag = None if equals else name
        elif open_flag is not None:
            stated[open_flag] = word
            open_flag = None
    return stated


def server_flags(argv: Iterable[str]) -> dict[str, str]:
    """Returns a vLLM server's flags by their long names, whatever their spelling: `--max_model_len
    8` is `--max-model-len`, `-tp 2` and `-tp=2` are `--tensor-parallel-size`."""
    words = []
    for word in argv:
        name, equals, value = word.partition("=")
        long_name = SHORT_NAMES.get(name, name)
        words.append(f"{long_name}{equals}{value}")
    flags = {}
    for name, value in stated_flags(words).items():
        flag = name.replace("_", "-")
        flags[flag] = value
    return flags


def values_of(flag: str, argv: Iterable[str]) -> tuple[list[str], list[str]]:
    """Returns all values of a flag that may be given several times, and the command line without
    it."""
    values = []
    rest = []
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if name != flag:
            rest.append(word)
            continue
        if not equals:
            value = next(words, None)
        if value is None:  # the last word is the flag
            rest.append(word)
        else:
            values.append(value)
    return values, rest


def stated_settings(argv: Iterable[str]) -> dict[str, Any]:
    """Returns the settings as they are written: those of the recipe, then of its overlays, then of
    the command line. A later one replaces an earlier one."""
    recipes, argv = values_of("--config", argv)
    overlays, argv = values_of("--overlay", argv)
    settings = {}
    for path in [*recipes, *overlays]:
        # the parser reports a file that cannot be read
        with contextlib.suppress(OSError, UnicodeError, yaml.YAMLError, TypeError, ValueError):
            text = Path(path).read_text(encoding="utf-8")
            settings |= yaml.safe_load(text)
    for flag, value in stated_flags(argv).items():
        name = flag.removeprefix("--")
        settings[name] = value
    return settings


def number_of(value: Any) -> float | None:
    """Returns the number that a setting is, which is text in a flag. Returns `None` for anything
    else."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def parallel(flags: Iterable[str]) -> tuple[int, str]:
    """Returns the number of GPUs that a server with these flags takes, and the flags that say so:
    `(2, "--tensor-parallel-size 2")`."""
    stated = server_flags(flags)
    gpus = 1
    words = []
    for flag in PARALLEL.values():
        size = stated.get(flag, "")
        if size.isdigit():
            gpus *= int(size)
            words.append(f"{flag} {size}")
    return gpus, " ".join(words)


def served_rank(rank: int) -> int:
    """Returns the least `--max-lora-rank` with which vLLM serves adapters of `rank`."""
    for allowed in LORA_RANKS:
        if allowed >= rank:
            return allowed
    return rank
