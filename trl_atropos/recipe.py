"""What a recipe says besides the training settings: which services to start, and the checks that need both.

A recipe is one flat YAML file, read by TRL's parser into three dataclasses: `ServicesConfig` here,
`AtroposGRPOConfig`, and TRL's `ModelConfig`. Overlays (`--overlay FILE`, any number) change settings of it: a later
one wins over an earlier one, and command-line flags win over all.
"""

import difflib
import os
import re
import shlex
import sys
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, get_args, get_type_hints

import yaml
from pydantic import ValidationError
from trl import ModelConfig, TrlParser

from trl_atropos.config import REMOVED, AtroposGRPOConfig
from trl_atropos.environments import EnvironmentSpec, RecipeError
from trl_atropos.flags import server_flags, stated_flags
from trl_atropos.protocol import ADAPTER_MODES, LORA_RANKS
from trl_atropos.rollouts.replay import recorded_files


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
            Environments to start, each with `name`, `command`, and optionally `env` (variables), `cwd`, `python` (the
            interpreter that stands for `{python}`, of another virtual environment) and `servers` (settings of the
            inference servers it samples from, see `EnvironmentSpec`). In the command and in `servers`, `{python}`,
            `{model}`, `{atropos_url}`, `{vllm_url}`, `{vllm_urls}`, `{temperature}`, `{seed}` and `{output_dir}` are
            filled in.
        restart_environments (`int`, *optional*, defaults to `3`):
            How often within an hour an environment that ends is started again, and likewise the Atropos API if the
            run started it. One that ends within 30 seconds of its start is not: the run ends with its log. `0` ends
            the run at the first end.
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
            "`env`, `cwd`, `python` and `servers`. {python}, {model}, {atropos_url}, {vllm_url}, {vllm_urls}, "
            "{temperature}, {seed} and {output_dir} in a command are filled in."
        },
    )
    restart_environments: int = field(
        default=3,
        metadata={
            "help": "How often within an hour an environment, or the Atropos API of this run, is started again when "
            "it ends. One that ends within 30 seconds of its start is not. 0 ends the run at the first end."
        },
    )
    service_timeout: float = field(
        default=300.0, metadata={"help": "Seconds that a service may take to become healthy."}
    )


ALSO_FALSE = ("resume_from_checkpoint", "fsdp", "scale_rewards")  # words by their type, but `false` is understood
ALSO_LISTS = ("vllm_server_base_url",)  # one word by its type, but several servers are understood
NOT_IN_OVERLAYS = ("env", "environments")  # one overlay is for many recipes, which differ in these
PARTS = (ServicesConfig, AtroposGRPOConfig, ModelConfig)
HOW_TO_QUOTE = (
    " Flags of the server are a list in a recipe, and one quoted text on the command line: `--vllm_args "
    '"--max-model-len 512 --dtype bfloat16"`.'
)


@dataclass
class Recipe:
    services: ServicesConfig
    training: AtroposGRPOConfig
    model: ModelConfig
    environments: list[EnvironmentSpec]

    def vllm_flags(self) -> list[str]:
        """Flags of the vLLM server: those of the recipe, and those that the run's adapter needs."""
        given = list(self.services.vllm_args or [])
        stated = server_flags(given).keys()
        sends_adapter = self.model.use_peft and self.training.vllm_mode in ("colocate", *ADAPTER_MODES)
        if sends_adapter and not {"--enable-lora", "--no-enable-lora"} & stated:
            given.append("--enable-lora")
        if sends_adapter and "--max-lora-rank" not in stated:
            rank = next((rank for rank in LORA_RANKS if rank >= self.model.lora_r), self.model.lora_r)
            given += ["--max-lora-rank", str(rank)]
        return given

    def placeholders(self) -> dict[str, str]:
        return {
            "python": sys.executable,
            "model": str(self.model.model_name_or_path),
            "atropos_url": self.training.atropos_url,
            "vllm_url": self.training.vllm_server_urls[0],
            "vllm_urls": self.training.vllm_server_base_url,
            "temperature": str(self.training.temperature),
            "seed": str(self.training.seed),
            "output_dir": str(self.training.output_dir),
        }


class _Parser(TrlParser):
    """Says what is wrong in one line, without the usage of several hundred flags."""

    def __init__(self, parts: tuple[type, ...]) -> None:
        super().__init__(parts)
        self.overlaid: dict[str, Any] = {}  # settings that come over those of the recipe

    def set_defaults_with_config(self, **recipe: Any) -> list[str]:
        return super().set_defaults_with_config(**(recipe | self.overlaid))

    def error(self, message: str) -> None:
        message = re.sub(r"^argument --([^/:]+)[^:]*", r"`\1`", message)
        raise ValueError(f"{message.rstrip('.')}. See `python -m trl_atropos.train --help`.")


def config_path(argv: list[str]) -> str | None:
    """The file named by `--config`."""
    return next(iter(_named("--config", argv)[0]), None)


def _named(flag: str, argv: list[str]) -> tuple[list[str], list[str]]:
    """The values of a flag that may be given several times, and the command line without it."""
    values, rest, words = [], [], iter(argv)
    for word in words:
        if word.startswith(f"{flag}="):
            values.append(word.removeprefix(f"{flag}="))
        elif word == flag and (value := next(words, None)) is not None:
            values.append(value)
        else:
            rest.append(word)
    return values, rest


def parse(argv: list[str]) -> Recipe:
    """Reads the command line and the recipe it names. Raises `RecipeError` for anything a user can mend."""
    overlays, argv = _named("--overlay", argv)
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
    for overlay in overlays:
        parser.overlaid |= _overlay_settings(overlay, path, known)
    read = " with ".join([path, *overlays]) if path else ""
    try:
        services, training, model, rest = parser.parse_args_and_config(argv, return_remaining_strings=True)
    except (ValueError, TypeError) as error:
        named_flag = any(f"`{flag.lstrip('-').replace('-', '_')}`" in str(error) for flag in stated_flags(argv))
        raise RecipeError(str(error) if named_flag or not read else f"{read}: {error}") from error
    if rest:
        hint = HOW_TO_QUOTE if "--vllm_args" in argv else _suggest(rest[0].lstrip("-").split("=")[0], known)
        raise RecipeError(f"Unknown arguments: {' '.join(rest)}.{hint}")
    try:
        if isinstance(services.vllm_args, str):
            services.vllm_args = shlex.split(services.vllm_args)
        services.vllm_args = [flag for word in services.vllm_args or [] for flag in _flags_in(str(word))]
    except ValueError as error:
        raise RecipeError(f"`vllm_args` cannot be split into flags: {error}. Correct its quotes.") from error
    if services.vllm_args and not services.vllm_args[0].startswith("-"):  # vLLM would ignore it without a word
        raise RecipeError(f"`vllm_args` begins with {services.vllm_args[0]!r}, which is no flag.{HOW_TO_QUOTE}")
    recipe = Recipe(services, training, model, _environments(services))
    _check(recipe)
    return recipe


def _flags_in(word: str) -> list[str]:
    """Of one of `vllm_args`. On the command line flags come quoted, `"--max-num-seqs 8"`, or they would be taken for
    the run's; a value, `--flag={"a": 1}` too, may hold blanks."""
    return shlex.split(word) if re.match(r"--[\w.-]+\s", word) else [word]


def _overlay_settings(path: str, recipe: str | None, known: set[str]) -> dict[str, Any]:
    if recipe is None:
        raise RecipeError(f"`--overlay {path}` changes a recipe, and there is none: name one with `--config`.")
    settings = _check_keys(path, known, "--overlay")
    for key in NOT_IN_OVERLAYS:
        if key in settings:
            raise RecipeError(
                f"{path}: `{key}` cannot be in an overlay, which is for many recipes. Set it in the recipe, {recipe}."
            )
    return settings


def _check_keys(path: str, known: set[str], flag: str = "--config") -> dict[str, Any]:
    """What a recipe says, or an overlay, after a look at its keys and the types of their values."""
    what = flag.removeprefix("--").replace("config", "recipe")
    if not os.path.isfile(path):
        raise RecipeError(f"The {what} {path!r} does not exist (looked in {os.getcwd()}). Check `{flag}`.")
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except yaml.YAMLError as error:
        raise RecipeError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    except (OSError, UnicodeError) as error:
        raise RecipeError(f"The {what} {path} cannot be read: {error}. Check `{flag}`.") from error
    if not isinstance(content, dict):
        raise RecipeError(f"{path} must hold `key: value` lines at its top level.")
    unknown = [key for key in content if key not in known | {"env"}]
    if unknown:
        raise RecipeError(f"{path}: unknown key `{unknown[0]}`.{_suggest(str(unknown[0]), known)}")
    hints = {name: hint for part in PARTS for name, hint in get_type_hints(part).items()}
    for key, value in content.items():
        wanted = _wanted(value, hints.get(key, Any))
        if key in ALSO_LISTS and isinstance(value, list):
            continue  # of what, is checked with the other settings
        if wanted and not (value is False and key in ALSO_FALSE):
            raise RecipeError(f"{path}: `{key}` is {value!r}. Write {wanted}.")
    return content


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
    if key in REMOVED:
        return f" It is no setting any more: {REMOVED[key]}."
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
    elif training.vllm_mode in ADAPTER_MODES and not recipe.model.use_peft:
        raise RecipeError(
            f"`vllm_mode: {training.vllm_mode}` sends a LoRA adapter, but the run has none: set `use_peft: true` "
            "(with `lora_r` and `lora_target_modules: all-linear`), or use `vllm_mode: colocate` or `server`."
        )
    _check_patience(recipe)
    if recipe.services.restart_environments < 0:
        raise RecipeError(
            f"`restart_environments` is {recipe.services.restart_environments}. Set it to 0 (never) or more."
        )
    for spec in recipe.environments:
        argv = spec.argv(recipe.placeholders())
        stated = stated_flags(argv)
        spec.check(argv)
        spec.filled_servers(recipe.placeholders())
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


def _check_patience(recipe: Recipe) -> None:
    """The other processes wait for the first one, which waits for one service after the other."""
    services, training = recipe.services, recipe.training
    waits = services.start_atropos + len(training.vllm_server_urls) * services.start_vllm
    if training.world_size > 1 and waits * services.service_timeout >= training.ddp_timeout:
        raise RecipeError(
            f"{waits} services may take {services.service_timeout:g} s each to become healthy (`service_timeout`), "
            f"but the trainer's processes wait for each other for only {training.ddp_timeout} s (`ddp_timeout`). "
            "Raise `ddp_timeout`, or lower `service_timeout`."
        )


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
