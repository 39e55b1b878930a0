"""What a check tells: a `Finding`, and how the message of one of our errors becomes one."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trl_atropos.environments import RecipeError

ERROR = "error"
WARNING = "warning"
WRONG_USE = ("no-recipe", "unknown-flag")  # the command line itself is wrong


@dataclass(frozen=True)
class Finding:
    """
    Attributes:
        name: Stable, for scripts, such as `port-taken`.
        what: What is wrong, in one sentence without its full stop.
        seen: The value that was seen.
        fix: What to do, in sentences.
        level: `"error"`: the run would fail, or train on something else than is meant. `"warning"`: it would go on,
            and lose something. Errors alone decide the exit code.
    """

    name: str
    what: str
    seen: str
    fix: str
    level: str = ERROR

    def __str__(self) -> str:
        return f"{self.what} (seen: {self.seen}). {self.fix}"


# Our errors say what happened, then the way out, which begins with one of these.
WAY_OUT = re.compile(
    r"[.;:,] +(?=(?:(?:and|or) )?(?:Set|Write|Remove|Resume|Use|Correct|Leave|Make|Raise|Lower|Change|Give|List|Check|"
    r"Did you|See|Name|Rename|Stop|Install|Put|Start|Take|Add|Load|Restart|Train|Evaluate|Keep|Begin|Run|Known|"
    r"An entry)\b)",
    re.IGNORECASE,
)
# Fragments of the messages of the recipe's parser and of the run's first checks, and how a script knows them.
NAMES = (
    ("No recipe", "no-recipe"),
    ("The recipe", "no-recipe"),
    ("The overlay", "no-recipe"),
    ("Unknown arguments", "unknown-flag"),
    ("unknown key", "unknown-key"),
    ("is not valid YAML", "recipe-format"),
    ("must hold `key: value` lines", "recipe-format"),
    ("at temperature", "temperature"),
    ("temperature`", "temperature"),
    ("groups of", "group-size"),
    ("must be even", "batch-size"),
    ("there is no program", "environment-program"),
    ("has an unknown placeholder", "environment-command"),
    ("sends a LoRA adapter, but the run has none", "no-adapter"),
    ("cannot be sharded", "sharded-colocate"),
    ("The model", "model"),
    ("No model", "model"),
    ("there is no checkpoint", "checkpoint"),
    ("The control token", "token"),
    ("The checkpoint in", "checkpoint"),
    ("it was damaged", "checkpoint"),
    ("`output_dir`", "output-dir"),
)


def from_message(
    message: str | Exception, stated: Mapping[str, Any], name: str | None = None, seen: str | None = None
) -> Finding:
    """
    A finding from an error or its message, which is cut where its way out begins unless the error has it apart.

    Args:
        stated: The recipe's settings. Those that the message names are what was seen.
        name: The finding's. Defaults to what `NAMES` says of the message, or `"setting"`.
        seen: What was seen. Defaults to the settings that the message names, or the message.
    """
    error, message = message, str(message)
    cut = WAY_OUT.search(message)
    if isinstance(error, RecipeError) and error.fix is not None:
        what, fix = error.what, error.fix
    elif cut:
        what, fix = message[: cut.start()], message[cut.end() :]
    else:
        what, fix = message, "Correct it in the recipe."
    if name is None:
        name = next((name for text, name in NAMES if text in what), "setting")
    if seen is None:
        named = [key for key in re.findall(r"`(\w+)[`:=]", what) if key in stated]
        named = named or [key for key in re.findall(r"`(\w+)[`:=]", message) if key in stated]
        seen = ", ".join(f"{key}: {stated[key]}" for key in dict.fromkeys(named)) or what
    fix = re.sub("^(and|or) ", "", fix, flags=re.IGNORECASE)
    fix = f"{fix[:1].upper()}{fix[1:].rstrip('.')}"
    return Finding(name, what.rstrip("."), seen, fix if fix.endswith("?") else f"{fix}.")
