"""What a recipe says besides the training settings: which services to start, and the checks that need both.

A recipe is one flat YAML file, read by TRL's parser into three dataclasses: `ServicesConfig` here,
`AtroposGRPOConfig`, and TRL's `ModelConfig`. Command-line flags override it.
"""

import difflib
import os
import re
import shlex
import shutil
import sys
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, get_args, get_type_hints

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from trl import ModelConfig, TrlParser

from trl_atropos.config import AtroposGRPOConfig
from trl_atropos.flags import stated_flags
from trl_atropos.rollouts.recording import recorded_files


class RecipeError(ValueError):
    """The recipe or the command line is wrong; the message says where and what to write instead."""


@dataclass
class ServicesConfig:
    """
    Which services the run starts and stops. Those it does not start are used by their URL and never touched.

    Parameters:
        start_atropos (`bool`, *optional*, defaults to `False`):
            Start the Atropos API at `atropos_url`.
        start_vllm (`bool`, *optional*, defaults to `False`):
            Start the vLLM server at `vllm_server_base_url` on the model of the run.
        vllm_args (`list[str]`, *optional*):
            Further flags for the vLLM server, as `trl-atropos serve` takes them.
        environments (`list[dict]`, *optional*):
            Environments to start, each with `name`, `command`, and optionally `env` (variables) and `cwd`. In the
            command, `{python}`, `{model}`, `{atropos_url}`, `{vllm_url}`, `{temperature}`, `{seed}` and
            `{output_dir}` are filled in.
        service_timeout (`float`, *optional*, defaults to `300.0`):
            Seconds that a service may take to become healthy.
    """

    start_atropos: bool = field(default=False, metadata={"help": "Start the Atropos API at `atropos_url`."})
    start_vllm: bool = field(
        default=False,
        metadata={"help": "Start the vLLM server at `vllm_server_base_url` on the model of the run."},
    )
    vllm_args: list[str] | None = field(
        default=None, metadata={"help": "Further flags for the vLLM server, as `trl-atropos serve` takes them."}
    )
    environments: list[dict] | None = field(
        default=None,
        metadata={
            "help": "Environments to start (in the recipe file only): each has `name`, `command`, and optionally "
            "`env` and `cwd`. {python}, {model}, {atropos_url}, {vllm_url}, {temperature}, {seed} and {output_dir} "
            "in a command are filled in."
        },
    )
    service_timeout: float = field(
        default=300.0, metadata={"help": "Seconds that a service may take to become healthy."}
    )


class EnvironmentSpec(BaseModel):
    """One entry of `environments`."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(pattern=r"^[\w.-]+$")  # names the log file
    command: str | list[str] = Field(min_length=1)
    env: dict[str, str | int | float] = {}
    cwd: str | None = None

    def argv(self, values: dict[str, str]) -> list[str]:
        """The command with its placeholders filled in."""
        try:
            words = shlex.split(self.command) if isinstance(self.command, str) else list(self.command)
        except ValueError as error:
            raise RecipeError(f"The command of environment {self.name!r} is cut short: {error}.") from error
        try:
            return [word.format_map(values) for word in words]
        except (KeyError, IndexError, ValueError) as error:
            raise RecipeError(
                f"The command of environment {self.name!r} has an unknown placeholder ({error}). Known ones: "
                f"{', '.join('{' + name + '}' for name in values)}; write a literal brace twice."
            ) from error


ALSO_FALSE = ("resume_from_checkpoint", "fsdp", "scale_rewards")  # words by their type, but `false` is understood
PARTS = (ServicesConfig, AtroposGRPOConfig, ModelConfig)


@dataclass
class Recipe:
    services: ServicesConfig
    training: AtroposGRPOConfig
    model: ModelConfig
    environments: list[EnvironmentSpec]

    def placeholders(self) -> dict[str, str]:
        return {
            "python": sys.executable,
            "model": str(self.model.model_name_or_path),
            "atropos_url": self.training.atropos_url,
            "vllm_url": self.training.vllm_server_base_url,
            "temperature": str(self.training.temperature),
            "seed": str(self.training.seed),
            "output_dir": str(self.training.output_dir),
        }


class _Parser(TrlParser):
    """Says what is wrong in one line, without the usage of several hundred flags."""

    def error(self, message: str) -> None:
        message = re.sub(r"^argument --([^/:]+)[^:]*", r"`\1`", message)
        raise ValueError(f"{message.rstrip('.')}. See `python -m trl_atropos.train --help`.")


def config_path(argv: list[str]) -> str | None:
    """The file named by `--config`."""
    for index, word in enumerate(argv):
        if word == "--config" and index + 1 < len(argv):
            return argv[index + 1]
        if word.startswith("--config="):
            return word.removeprefix("--config=")
    return None


def parse(argv: list[str]) -> Recipe:
    """Reads the command line and the recipe it names. Raises `RecipeError` for anything a user can mend."""
    path = config_path(argv)
    if path is None:
        stray = next((word for word in argv if word.endswith((".yaml", ".yml"))), "recipes/quickstart/colocate.yaml")
        if not argv or argv[-1] == "--config" or stray in argv:
            raise RecipeError(f"No recipe: name one with `--config`, as in `--config {stray}`.")
    argv = [part for word in argv for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
    parser = _Parser(PARTS)
    known = {action.dest for action in parser._actions}
    if path is not None:
        _check_keys(path, known)
    try:
        services, training, model, rest = parser.parse_args_and_config(argv, return_remaining_strings=True)
    except (ValueError, TypeError) as error:
        raise RecipeError(f"{f'{path}: ' if path else ''}{error}") from error
    if rest:
        raise RecipeError(f"Unknown arguments: {' '.join(rest)}.{_suggest(rest[0].lstrip('-').split('=')[0], known)}")
    if isinstance(services.vllm_args, str):
        services.vllm_args = shlex.split(services.vllm_args)
    services.vllm_args = [str(word) for word in services.vllm_args or []]  # YAML makes a number of `512`
    recipe = Recipe(services, training, model, _environments(services))
    _check(recipe)
    return recipe


def _check_keys(path: str, known: set[str]) -> None:
    if not os.path.isfile(path):
        raise RecipeError(f"The recipe {path!r} does not exist (looked in {os.getcwd()}). Check `--config`.")
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except yaml.YAMLError as error:
        raise RecipeError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    except (OSError, UnicodeError) as error:
        raise RecipeError(f"The recipe {path} cannot be read: {error}. Check `--config`.") from error
    if not isinstance(content, dict):
        raise RecipeError(f"{path} must hold `key: value` lines at its top level.")
    unknown = [key for key in content if key not in known | {"env"}]
    if unknown:
        raise RecipeError(f"{path}: unknown key `{unknown[0]}`.{_suggest(str(unknown[0]), known)}")
    hints = {name: hint for part in PARTS for name, hint in get_type_hints(part).items()}
    for key, value in content.items():
        wanted = _wanted(value, hints.get(key, Any))
        if wanted and not (value is False and key in ALSO_FALSE):
            raise RecipeError(f"{path}: `{key}` is {value!r}. Write {wanted}.")


def _wanted(value: Any, hint: Any) -> str | None:
    """What to write in place of a YAML value of the wrong type; `None` if it may be right. Text is checked later."""
    allowed = set(get_args(hint) or (hint,))
    if value is None:
        return None if allowed & {NoneType, Any} else "a value behind the colon, or leave the line out"
    if value is False and str in allowed and bool not in allowed:  # where YAML reads a bare `no`
        return 'the word in quotes ("no", say): without them YAML reads `no` as false'
    if isinstance(value, str) or type(value) in allowed:
        return None
    numbers = allowed & {int, float}
    if allowed <= {int, NoneType}:
        return "a whole number"
    if numbers and allowed <= {int, float, NoneType}:
        return None if type(value) in (int, float) else "a number"
    if allowed <= {str, NoneType} and value is not True:
        return "text, in quotes if it looks like a number"
    if allowed <= {bool, NoneType}:
        return "true or false"
    return None


def _suggest(key: str, known: set[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    return f" Did you mean `{close[0]}`?" if close else " See `python -m trl_atropos.train --help`."


def _environments(services: ServicesConfig) -> list[EnvironmentSpec]:
    parsed = []
    if isinstance(services.environments, dict):
        raise RecipeError("`environments` is one mapping, not a list: begin each entry with `- name: ...`.")
    for number, entry in enumerate(services.environments or [], start=1):
        try:
            parsed.append(EnvironmentSpec.model_validate(entry))
        except ValidationError as error:
            first = error.errors()[0]
            where = "".join(f"{part}: " for part in first["loc"])
            raise RecipeError(
                f"`environments` entry {number}: {where}{first['msg']}. An entry has `name`, `command`, and "
                "optionally `env` and `cwd`."
            ) from error
    names = [spec.name for spec in parsed]
    if len(set(names)) != len(names):
        raise RecipeError(f"`environments` names must differ, but they are: {', '.join(names)}.")
    return parsed


def _check(recipe: Recipe) -> None:
    """Checks that need more than one of the three parts."""
    training = recipe.training
    if not recipe.model.model_name_or_path:
        raise RecipeError("No model: set `model_name_or_path` to a Hub name or a folder.")
    model = recipe.model.model_name_or_path
    if (model.startswith((".", "/", "~")) or model.count("/") > 1) and not os.path.isdir(model):
        raise RecipeError(
            f"The model folder {model!r} does not exist (looked in {os.getcwd()}). Set `model_name_or_path` to a Hub "
            "name or to a folder with a config.json; the quickstart's is made by "
            "`python recipes/quickstart/make_model.py FOLDER`."
        )
    if training.replay_paths is not None:
        recorded_files(training.replay_paths)
    elif recipe.model.use_peft:
        raise RecipeError(
            "`use_peft` trains an adapter, which the server would never see: with vllm_mode='colocate' the server's "
            "own weights are trained. Remove `use_peft`."
        )
    for spec in recipe.environments:
        argv = spec.argv(recipe.placeholders())
        stated = stated_flags(argv)
        _check_command(spec, argv)
        for flag, value in stated.items():
            if flag.endswith("temperature") and _number(value) not in (None, training.temperature):
                raise RecipeError(
                    f"Environment {spec.name!r} samples at temperature {value} ({flag}), but `temperature` is "
                    f"{training.temperature}. The trainer scores every token at `temperature`: make the two equal."
                )
        size = _number(stated.get("--env.group_size", ""))
        if size is not None and size > training.generation_batch_size:
            raise RecipeError(
                f"Environment {spec.name!r} sends groups of {size:.0f} rollouts, but a generation batch has only "
                f"{training.generation_batch_size} rows. Raise `per_device_train_batch_size` or "
                "`gradient_accumulation_steps`, or lower the group size."
            )
        if size and training.generation_batch_size % size:
            raise RecipeError(
                f"Environment {spec.name!r} sends groups of {size:.0f} rollouts, which do not fill a generation batch "
                f"of {training.generation_batch_size} rows: the Atropos API would never deliver one. Make the batch "
                "a multiple of the group size."
            )


def _check_command(spec: EnvironmentSpec, argv: list[str]) -> None:
    if spec.cwd is not None and not os.path.isdir(spec.cwd):
        raise RecipeError(f"Environment {spec.name!r}: its `cwd`, {spec.cwd!r}, is no folder. Correct it.")
    program = argv[0] if argv else ""
    place = os.path.join(spec.cwd or "", program) if "/" in program else program
    if not shutil.which(place, path=str(spec.env["PATH"]) if "PATH" in spec.env else None):
        raise RecipeError(
            f"Environment {spec.name!r}: there is no program {program!r} to run. Correct its `command`; a Python "
            "script is run by `{python} path/to/script.py`."
        )


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
