"""Reads the YAML file of a recipe or of an overlay, and refuses keys and types that are wrong.

`recipe.py` calls this before TRL's parser reads the recipe.
"""

import difflib
import os
from collections.abc import Iterable, Mapping
from types import NoneType
from typing import Any, get_args

import yaml

from trl_atropos.config import REMOVED
from trl_atropos.errors import RecipeError

# Settings whose type is text, and which also take `false`.
ALSO_FALSE = ("resume_from_checkpoint", "fsdp", "scale_rewards")
# A setting whose type is text, and which also takes a list, of several servers.
ALSO_LISTS = ("vllm_server_base_url",)
# Settings by which other programs of TRL name their prompts and rewards.
PROMPT_DATASET = (
    "dataset_name",
    "dataset_config",
    "dataset_train_split",
    "dataset_test_split",
    "dataset_streaming",
    "reward_funcs",
    "reward_model_name_or_path",
)
HELP = "See `python -m trl_atropos.train --help`."


def read_yaml(path: str) -> Any:
    """Returns the content of a recipe or an overlay. Raises `OSError`, `UnicodeError` or
    `yaml.YAMLError`."""
    with open(path, encoding="utf-8") as file:
        return yaml.safe_load(file)


def load_checked(path: str, types: Mapping[str, Any], flag: str = "--config") -> dict[str, Any]:
    """Returns the settings in the recipe or overlay that `flag` names. Raises `RecipeError` for
    keys that are not in `types`, and for values of another type."""
    content = _load(path, flag)
    check_content(content, path, types)
    return content


def check_content(content: dict[str, Any], place: str, types: Mapping[str, Any]) -> None:
    """Raises `RecipeError` as `load_checked` does. `place` says where the settings stand."""
    for key, value in content.items():
        if key not in types and key != "env":
            what = f"{place}: unknown key `{key}`"
            fix = suggest(str(key), types)
            raise RecipeError(what, f"{key}: {value}", fix, "unknown-key")
    for key, value in content.items():
        wanted = _wanted(key, value, types.get(key, Any))
        if wanted is not None:
            what = f"{place}: `{key}` is {value!r}"
            raise RecipeError(what, f"{key}: {value}", f"Write {wanted}.")


def _load(path: str, flag: str) -> dict[str, Any]:
    """Returns the `key: value` lines of the file that `flag` names. Raises `RecipeError` if it has
    none."""
    kind = "recipe" if flag == "--config" else "overlay"
    fix = f"Check `{flag}`."
    if not os.path.isfile(path):
        what = f"The {kind} {path!r} does not exist (looked in {os.getcwd()})"
        if os.path.isdir(path):
            what = f"The {kind} {path!r} is a folder, not a YAML file"
        raise RecipeError(what, path, fix, "no-recipe")
    try:
        content = read_yaml(path)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        what = f"{path} is not valid YAML: {reason}"
        raise RecipeError(what, path, "Correct it there.", "recipe-format") from error
    except (OSError, UnicodeError) as error:
        what = f"The {kind} {path} cannot be read: {error}"
        raise RecipeError(what, path, fix, "no-recipe") from error
    if not isinstance(content, dict):
        what = f"{path} must hold `key: value` lines at its top level"
        type_name = type(content).__name__
        fix = "Write one setting a line there, such as `max_steps: 100`."
        raise RecipeError(what, f"{path}: {type_name}", fix, "recipe-format")
    return content


def _wanted(key: str, value: Any, hint: Any) -> str | None:
    """Returns what to write in place of a YAML value of the wrong type, or `None` if the value may
    be right. Text is checked later."""
    if key in ALSO_LISTS and isinstance(value, list):
        return None
    if key in ALSO_FALSE and value is False:
        return None
    allowed = set(get_args(hint) or (hint,))
    if value is None:
        if allowed & {NoneType, Any}:
            return None
        return "a value behind the colon, or leave the line out"
    if value is False and str in allowed and bool not in allowed:  # YAML reads a bare `no` as false
        return 'the word in quotes ("no", say): without them YAML reads `no` as false'
    if isinstance(value, str) or type(value) in allowed:
        return None
    kinds = allowed - {NoneType}
    if float in kinds and type(value) is int:
        return None
    if kinds <= {int, float}:
        return "a number" if float in kinds else "a whole number"
    if kinds == {str} and value is not True:
        return "text, in quotes if it looks like a number"
    if kinds == {bool}:
        return "true or false"
    return None


def suggest(key: str, known: Iterable[str]) -> str:
    """Returns what to do about a setting that does not exist."""
    if key in REMOVED:
        return f"It is no setting any more. {REMOVED[key]}"
    if key in PROMPT_DATASET:
        return (
            "Leave it out: prompts and rewards come from `environments:`, as in "
            "`environments: [my_task/environment.py]`."
        )
    close = difflib.get_close_matches(key, known, n=1)
    if not close:
        return HELP
    return f"Did you mean `{close[0]}`?"
