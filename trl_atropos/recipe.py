"""Reads a command line and the recipe that it names into a `Recipe`, and checks it.

A recipe is one flat YAML file, which TRL's parser reads into three dataclasses: `ServicesConfig`
here, `AtroposGRPOConfig`, and TRL's `ModelConfig`. Overlays (`--overlay FILE`) change settings of
it: later ones win, and command-line flags win over all. `trl_atropos.train` and `trl-atropos check`
call `parse`, then `check_files` and `check_reports`. A `Recipe` does not change: who needs another
one calls `dataclasses.replace` or `Recipe.with_training`.

An environment learns the rest from a file that the run writes, and that Atropos' own `--config`
reads.
"""

import copy
import difflib
import math
import os
import re
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import yaml
from transformers.trainer_utils import IntervalStrategy
from trl import ModelConfig, TrlParser

from trl_atropos.config import REMOVED, AtroposGRPOConfig, with_help
from trl_atropos.environment_entry import (
    EnvironmentSpec,
    EvaluationSpec,
    parse_entries,
    require_program,
)
from trl_atropos.errors import RecipeError
from trl_atropos.flags import served_rank, server_flags, stated_flags, values_of
from trl_atropos.protocol import ADAPTER_MODES, environment_token
from trl_atropos.rollouts.replay import recorded_files
from trl_atropos.rollouts.spool import write_file
from trl_atropos.services.environment_source import setting_names
from trl_atropos.services.evaluation_results import GROUPS

if TYPE_CHECKING:
    from trl_atropos.weights.adapters import Way


@dataclass(frozen=True)
@with_help
class ServicesConfig:
    """
    The services that the run starts and stops. The run uses the others by their URL, and never
    touches them.

    Parameters:
        > Services

        start_atropos (`bool`, *optional*, defaults to `False`):
            Whether to start the Atropos API at `atropos_url`.
        start_vllm (`bool`, *optional*, defaults to `False`):
            Whether to start the vLLM server at `vllm_server_base_url`.
        vllm_args (`list[str]`, *optional*):
            Flags of the vLLM server (see `trl-atropos serve`).
        mps (`bool`, *optional*, defaults to `False`):
            Whether to start NVIDIA's MPS, so that a GPU computes for trainer and server at once.
        environments (`list[dict]`, *optional*):
            Environments to start (in the recipe file only): each the path of its script, or a
            mapping with `path` or `command`, and optionally `name`, `config` (its settings), `env`,
            `cwd`, `python` and `servers`. A command may have {python}, {model}, {atropos_url},
            {vllm_url}, {vllm_urls}, {temperature}, {seed}, {output_dir}. An environment that ends
            (or the Atropos API of the run) is started again, up to 3 times in an hour. One that
            ends within 30 seconds of its start ends the run.
        evaluations (`list[dict]`, *optional*):
            Environments to evaluate the policy with, beside the training (in the recipe file only):
            entries like those of `environments` with a `path`, and optionally `problems` (how many
            are asked; by default, the environment's own `evaluate` runs), `samples` of each,
            `temperature`, `passes_above` (a score) and `every` (optimizer steps; by default
            `eval_steps`).
        service_timeout (`float`, *optional*, defaults to `300.0`):
            Seconds that a service may take to become healthy.
    """

    start_atropos: bool = False
    start_vllm: bool = False
    vllm_args: list[str] | None = None
    mps: bool = False
    environments: list[dict] | None = None
    evaluations: list[dict] | None = None
    service_timeout: float = 300.0


PARTS = (ServicesConfig, AtroposGRPOConfig, ModelConfig)
# Settings whose type is text, and which take `false`, too.
ALSO_FALSE = ("resume_from_checkpoint", "fsdp", "scale_rewards")
# A setting whose type is text, and which takes a list of several servers, too.
ALSO_LISTS = ("vllm_server_base_url",)
# One overlay is for many recipes, which differ in these.
NOT_IN_OVERLAYS = {"env", "environments", "evaluations"}
QUOTED = '`--vllm_args "--max-model-len 512 --dtype bfloat16"`'
HOW_TO_QUOTE = (
    "Flags of the server are a list in a recipe, and one quoted text on the command "
    f"line: {QUOTED}."
)
NO_KEY = "none"  # servers of the run ask for no API key
# Seed of the environments of evaluations, whatever that of the run: the same problems for all runs.
EVALUATION_SEED = 0
HELP = "See `python -m trl_atropos.train --help`."
EXAMPLE = "recipes/quickstart/colocate.yaml"


@dataclass(frozen=True)
class Recipe:
    """A recipe that was read and checked."""

    services: ServicesConfig
    training: AtroposGRPOConfig
    model: ModelConfig
    environments: list[EnvironmentSpec]
    evaluations: list[EvaluationSpec]

    def with_training(self, **settings: Any) -> "Recipe":
        """Returns the recipe with other training settings, without checking them.

        `dataclasses.replace` would check them: TRL refuses what its first check has filled in.
        """
        training = copy.copy(self.training)
        for name, value in settings.items():
            setattr(training, name, value)
        return replace(self, training=training)

    def vllm_flags(self) -> list[str]:
        """Returns the vLLM server's flags: the recipe's, and those that numerics and adapter
        need."""
        flags = list(self.services.vllm_args or [])
        stated = server_flags(flags).keys()
        if self.training.numerics != "default" and "--numerics" not in stated:
            flags += ["--numerics", self.training.numerics]
        sends_adapter = self.model.use_peft and self.adapter_way == "alone"
        if sends_adapter and not {"--enable-lora", "--no-enable-lora"} & stated:
            flags.append("--enable-lora")
        if sends_adapter and "--max-lora-rank" not in stated:
            flags += ["--max-lora-rank", str(served_rank(self.model.lora_r))]
        return flags

    @property
    def adapter_way(self) -> "Way":
        """Way of an adapter to the servers."""
        if self.training.replay_paths is not None:
            return None
        if self.training.vllm_mode in ("colocate", *ADAPTER_MODES):
            return "alone"
        return "merged"

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

    def environment_command(self, spec: EnvironmentSpec) -> list[str]:
        """The command that starts an environment."""
        command = spec.start_command(self.placeholders())
        if self.environment_file(spec) is not None:
            command += ["--config", str(self._file_of(spec))]
        return command

    def environment_file(self, spec: EnvironmentSpec) -> dict[str, Any] | None:
        """Returns what the run writes for Atropos' `--config`, or `None` for a command without
        `servers`. Atropos drops settings that the environment does not have."""
        if spec.path is None and spec.servers is None:
            return None
        servers = self._servers_of(spec)
        if spec.path is None:
            return {"openai": servers}
        training = self.training
        ahead = spec.config.get("max_batches_offpolicy", 1)
        known = {
            "rollout_server_url": training.atropos_url,
            "tokenizer_name": str(self.model.model_name_or_path),
            "temperature": training.temperature,
            "seed": training.seed,
            "total_steps": -1,  # as many as the trainer takes
            "max_batches_offpolicy": ahead,
            # Groups in flight, of which Atropos never has more than fill `max_batches_offpolicy`
            # batches.
            "max_num_workers": training.generation_batch_size * max(1, ahead),
            # the trainer counts groups without variance, or replaces them
            "ensure_scores_are_not_same": False,
            "use_wandb": False,
            "wandb_name": spec.name,  # under which the environment registers
            # where it may keep what it needs for its next start
            "state_file": str(self._file_of(spec, "state")),
        }
        return {
            "env": {**known, **spec.config},
            "openai": servers,
            "slurm": False,
            # for `environment_site/run.py`, which refuses unknown ones
            "stated": list(spec.config),
        }

    def _servers_of(self, spec: EnvironmentSpec) -> list[dict[str, Any]]:
        """Returns the servers of an environment, as Atropos' server configs."""
        placeholders = self.placeholders()
        stated = spec.servers
        if stated is None:
            stated = [{"base_url": f"{url}/v1"} for url in self.training.vllm_server_urls]
        servers = []
        for settings in stated:
            server = {
                "base_url": "{vllm_url}/v1",
                "model_name": "{model}",
                "server_type": "vllm",
                "api_key": NO_KEY,
                **settings,
            }
            for key, value in server.items():
                if isinstance(value, str):
                    server[key] = spec.fill_in(value, placeholders)
            servers.append(server)
        if len(servers) == 1:
            # Atropos ignores the URL of a single server unless the environment has a list itself.
            # It heeds those of two.
            servers.append(dict(servers[0]))
        return servers

    def evaluation_command(self, spec: EvaluationSpec, folder: Path, key: str) -> list[str]:
        """Writes the file of an evaluation into `folder`. Returns the command that makes it, whose
        requests have `key` as their API key."""
        content = self.environment_file(spec)
        for server in content["openai"]:
            if server["api_key"] == NO_KEY:
                server["api_key"] = key
        if spec.problems is None:
            kind = "evaluate"
            fixed = {"data_dir_to_save_evals": str(folder)}
        else:
            kind = "process"
            temperature = spec.temperature
            if temperature is None:
                temperature = self.training.temperature
            fixed = {
                "total_steps": spec.problems,
                "group_size": spec.samples,
                "temperature": temperature,
                "data_path_to_save_groups": str(folder / GROUPS),
                "include_messages": False,
            }
        content["env"] |= {"state_file": None, "seed": EVALUATION_SEED, **fixed, **spec.config}
        path = folder / "config.yaml"
        path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
        return [*spec.groups_command(kind, self.placeholders()), "--config", str(path)]

    def write_environment_file(self, spec: EnvironmentSpec) -> Path:
        """Writes the file for an environment's `--config` and returns its path. A new run, unlike
        one that is resumed, begins without the environment's `state_file`."""
        if self.training.resume_from_checkpoint is None:
            self._file_of(spec, "state").unlink(missing_ok=True)
        content = self.environment_file(spec)
        path = self._file_of(spec)
        if content is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, yaml.safe_dump(content, sort_keys=False).encode(), sync=False)
        return path

    def stated(self, spec: EnvironmentSpec) -> dict[str, Any]:
        """Returns the settings of an environment that the recipe states: its `config`, or the
        `--env.` flags of its command."""
        settings = dict(spec.config)
        for flag, value in stated_flags(self.environment_command(spec)).items():
            if flag.startswith("--env."):
                settings[flag.removeprefix("--env.")] = value
        return settings

    def _file_of(self, spec: EnvironmentSpec, kind: str = "yaml") -> Path:
        folder = os.path.abspath(self.training.output_dir)
        return Path(folder, "environments", f"{spec.name}.{kind}")


class _Parser(TrlParser):
    """TRL's parser. It reports an error in one line, without the usage of several hundred flags."""

    def __init__(self, parts: tuple[type, ...]) -> None:
        super().__init__(parts)
        self.overlaid: dict[str, Any] = {}  # settings that win over those of the recipe

    def set_defaults_with_config(self, **recipe: Any) -> list[str]:
        return super().set_defaults_with_config(**(recipe | self.overlaid))

    def error(self, message: str) -> None:
        message = re.sub(r"^argument --([^/:]+)[^:]*", r"`\1`", message)
        raise RecipeError(message.rstrip("."), fix=HELP)


def parse(argv: list[str]) -> Recipe:
    """Reads the command line and the recipe that it names. Raises `RecipeError` for anything that
    you can mend."""
    overlays, argv = values_of("--overlay", argv)
    recipes, argv = values_of("--config", argv)
    if not recipes:
        _refuse_missing_recipe(argv)
    path = recipes[0] if recipes else None
    for recipe in reversed(recipes):
        argv = ["--config", recipe, *argv]
    parser = _Parser(PARTS)
    known = {action.dest for action in parser._actions}
    if path is not None:
        _check_keys(path, known)
    for overlay in overlays:
        parser.overlaid |= _overlay_settings(overlay, path, known)
    try:
        services, training, model, rest = parser.parse_args_and_config(
            argv, return_remaining_strings=True
        )
    except (ValueError, TypeError) as error:
        raise _located(error, argv, path, overlays) from error
    if rest:
        if "--vllm_args" in argv:
            fix = HOW_TO_QUOTE
        else:
            fix = _suggest(rest[0].lstrip("-").split("=")[0], known)
        words = " ".join(rest)
        raise RecipeError(f"Unknown arguments: {words}", words, fix, "unknown-flag")
    services = replace(services, vllm_args=_vllm_args(services.vllm_args))
    environments = parse_entries("environments", services.environments, EnvironmentSpec)
    evaluations = parse_entries("evaluations", services.evaluations, EvaluationSpec)
    recipe = Recipe(services, training, model, environments, evaluations)
    _check(recipe)
    return _scheduled(recipe)


def _refuse_missing_recipe(argv: list[str]) -> None:
    """Raises `RecipeError` for a command line that was meant to name a recipe, and does not."""
    stray = next((word for word in argv if word.endswith((".yaml", ".yml"))), None)
    if not argv or argv[-1] == "--config" or stray is not None:
        fix = f"Name one with `--config`, as in `--config {stray or EXAMPLE}`."
        raise RecipeError("No recipe", " ".join(argv), fix, "no-recipe")


def _located(
    error: Exception, argv: list[str], path: str | None, overlays: list[str]
) -> RecipeError:
    """Returns the error of a configuration with the file that is wrong, unless a flag is."""
    names = [flag.lstrip("-").replace("-", "_") for flag in stated_flags(argv)]
    is_about_flag = any(f"`{name}`" in str(error) for name in names)
    place = ""
    if path is not None and not is_about_flag:
        place = f"{' with '.join([path, *overlays])}: "
    if not isinstance(error, RecipeError):  # of TRL or Transformers
        return RecipeError(f"{place}{error}")
    return RecipeError(f"{place}{error.what}", error.seen, error.fix, error.code)


def _vllm_args(given: list[str] | str | None) -> list[str]:
    """Returns the flags for vLLM as words.

    The command line has them as one quoted text. An entry of a recipe's list may be a flag with its
    value: `--seed 1` becomes two words, and `--a={"b": 1}`, whose value has a blank, stays one.
    """
    flags = []
    try:
        if isinstance(given, str):
            given = shlex.split(given)
        for word in map(str, given or []):
            if re.match(r"--[\w.-]+\s", word):
                flags += shlex.split(word)
            else:
                flags.append(word)
    except ValueError as error:
        what = f"`vllm_args` cannot be split into flags: {error}"
        raise RecipeError(what, f"vllm_args: {given}", "Correct its quotes.") from error
    if flags and not flags[0].startswith("-"):  # vLLM would ignore it without a word
        what = f"`vllm_args` begins with {flags[0]!r}, which is no flag"
        raise RecipeError(what, f"vllm_args: {given}", HOW_TO_QUOTE)
    return flags


def _overlay_settings(path: str, recipe: str | None, known: set[str]) -> dict[str, Any]:
    """Returns the settings of an overlay. Raises `RecipeError` for those that it may not have."""
    if recipe is None:
        what = f"`--overlay {path}` changes a recipe, and there is none"
        raise RecipeError(what, path, "Name one with `--config`.", "no-recipe")
    settings = _check_keys(path, known, "--overlay")
    for key in settings.keys() & NOT_IN_OVERLAYS:
        what = f"{path}: `{key}` cannot be in an overlay, which is for many recipes"
        raise RecipeError(what, f"{key} in {path}", f"Set it in the recipe, {recipe}.")
    return settings


def read_yaml(path: str) -> Any:
    """Returns the content of a recipe or an overlay. Raises `OSError`, `UnicodeError` or
    `yaml.YAMLError`."""
    with open(path, encoding="utf-8") as file:
        return yaml.safe_load(file)


def _check_keys(path: str, known: set[str], flag: str = "--config") -> dict[str, Any]:
    """Returns the settings in a recipe, or in an overlay. Raises `RecipeError` for keys and types
    that are wrong."""
    content = _load(path, flag)
    for key in content:
        if key not in known | {"env"}:
            fix = _suggest(str(key), known)
            what = f"{path}: unknown key `{key}`"
            raise RecipeError(what, f"{key}: {content[key]}", fix, "unknown-key")
    hints: dict[str, Any] = {}
    for part in PARTS:
        hints |= get_type_hints(part)
    for key, value in content.items():
        if key in ALSO_LISTS and isinstance(value, list):
            continue
        if key in ALSO_FALSE and value is False:
            continue
        wanted = _wanted(value, hints.get(key, Any))
        if wanted is not None:
            what = f"{path}: `{key}` is {value!r}"
            raise RecipeError(what, f"{key}: {value}", f"Write {wanted}.")
    return content


def _load(path: str, flag: str) -> dict[str, Any]:
    """Returns the `key: value` lines of the file that `flag` names. Raises `RecipeError` if it has
    none."""
    kind = "recipe" if flag == "--config" else "overlay"
    fix = f"Check `{flag}`."
    if not os.path.isfile(path):
        what = f"The {kind} {path!r} does not exist (looked in {os.getcwd()})"
        raise RecipeError(what, path, fix, "no-recipe")
    try:
        content = read_yaml(path)
    except yaml.YAMLError as error:
        what = f"{path} is not valid YAML: {' '.join(str(error).split())}"
        raise RecipeError(what, path, "Correct it there.", "recipe-format") from error
    except (OSError, UnicodeError) as error:
        what = f"The {kind} {path} cannot be read: {error}"
        raise RecipeError(what, path, fix, "no-recipe") from error
    if not isinstance(content, dict):
        what = f"{path} must hold `key: value` lines at its top level"
        raise RecipeError(what, f"{path}: {type(content).__name__}", "Correct it.", "recipe-format")
    return content


def _wanted(value: Any, hint: Any) -> str | None:
    """Returns what to write in place of a YAML value of the wrong type, or `None` if the value may
    be right. Text is checked later."""
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


def _suggest(key: str, known: set[str]) -> str:
    """Returns what to do about a setting that there is not."""
    if key in REMOVED:
        return f"It is no setting any more. {REMOVED[key]}"
    close = difflib.get_close_matches(key, known, n=1)
    return f"Did you mean `{close[0]}`?" if close else HELP


# ----------------------------------------------------------------- checks of settings between parts


def _check(recipe: Recipe) -> None:
    """Raises `RecipeError` for settings that do not fit each other."""
    training = recipe.training
    _check_model(recipe.model.model_name_or_path)
    if training.replay_paths is not None:
        recorded_files(training.replay_paths)
    elif training.vllm_mode in ADAPTER_MODES and not recipe.model.use_peft:
        what = f"`vllm_mode: {training.vllm_mode}` sends a LoRA adapter, but the run has none"
        fix = (
            "Set `use_peft: true` and `lora_target_modules: all-linear`, or use `vllm_mode: "
            "colocate` or `server`."
        )
        raise RecipeError(what, f"vllm_mode: {training.vllm_mode}", fix, "no-adapter")
    _check_adapter(recipe)
    _check_patience(recipe.services, training)
    for spec in recipe.environments:
        require_program(spec, recipe.environment_command(spec))
        _check_environment(recipe, spec)
    for spec in recipe.evaluations:
        require_program(spec, recipe.environment_command(spec))
    for spec in (*recipe.environments, *recipe.evaluations):
        _check_setting_names(spec)


def _check_model(model: str | None) -> None:
    """Raises `RecipeError` if no model is named, or a folder that is not there."""
    seen = f"model_name_or_path: {model}"
    if not model:
        fix = "Set `model_name_or_path` to a Hub name or a folder."
        raise RecipeError("No model", seen, fix, "model")
    is_folder = model.startswith((".", "/", "~")) or model.count("/") > 1
    if is_folder and not os.path.isdir(model):
        what = f"The model folder {model!r} does not exist (looked in {os.getcwd()})"
        fix = (
            "Set `model_name_or_path`; recipes/quickstart/make_model.py FOLDER makes the "
            "quickstart's."
        )
        raise RecipeError(what, seen, fix, "model")


def _check_adapter(recipe: Recipe) -> None:
    from trl import get_peft_config

    from trl_atropos.weights.adapters import require_supported

    config = get_peft_config(recipe.model)
    if config is not None:
        require_supported(config, recipe.adapter_way, in_recipe=True)


def _scheduled(recipe: Recipe) -> Recipe:
    """Returns the recipe with its evaluations scheduled: Transformers asks as often as any of them
    is due.

    With evaluations every 20 and every 30 optimizer steps, it asks every 10.
    """
    training = recipe.training
    by_steps = training.eval_strategy == "steps"
    if not recipe.evaluations:
        if by_steps or training.eval_on_start or training.metric_for_best_model is not None:
            seen = f"eval_strategy: {training.eval_strategy}"
            fix = "List `evaluations` in the recipe, each with the `path` of an environment."
            raise RecipeError("There is nothing to evaluate", seen, fix)
        return recipe
    if training.replay_paths is not None:
        what = (
            "`evaluations` need a server, and a run on recorded rollouts (`replay_paths`) has none"
        )
        raise RecipeError(what, "evaluations, replay_paths", "Leave one out.")
    usual = training.eval_steps if by_steps else None
    if usual is not None:  # as Transformers, which leaves a 1 of the command line as a float
        usual = math.ceil(usual * training.max_steps if usual < 1 else usual)
    evaluations = []
    for spec in recipe.evaluations:
        evaluations.append(spec.model_copy(update={"every": spec.every or usual}))
    steps = [spec.every for spec in evaluations if spec.every]
    eval_steps = math.gcd(*steps) or training.max_steps
    if training.metric_for_best_model is not None:
        _check_best_model(training, evaluations, eval_steps)
    scheduled = replace(recipe, evaluations=evaluations)
    return scheduled.with_training(
        eval_strategy=IntervalStrategy.STEPS, eval_on_start=True, eval_steps=eval_steps
    )


def _check_best_model(
    training: AtroposGRPOConfig, evaluations: list[EvaluationSpec], eval_steps: int
) -> None:
    """Raises `RecipeError` if `metric_for_best_model` is not known whenever a checkpoint is
    saved."""
    metric = training.metric_for_best_model
    if metric.removeprefix("eval_").removesuffix("loss") == "":
        what = f"`metric_for_best_model` is {metric!r}"
        names = ", ".join(f"eval_{spec.name}_pass@1" for spec in evaluations)
        fix = f"Name one of an evaluation, such as {names}."
        raise RecipeError(what, f"metric_for_best_model: {metric}", fix)
    seen = f"eval_steps: {eval_steps}"
    for spec in evaluations:
        if spec.every != eval_steps:
            what = (
                f"`metric_for_best_model` is needed every {eval_steps} steps, but "
                f"{spec.name!r} is not made then"
            )
            raise RecipeError(what, seen, "Give all evaluations the same `every`.")
    if eval_steps % training.sync_every_n_steps:
        what = (
            f"`sync_every_n_steps` is {training.sync_every_n_steps}: other weights are "
            "evaluated than are saved"
        )
        raise RecipeError(what, seen, "Make `eval_steps` a multiple of it.")


def _check_patience(services: ServicesConfig, training: AtroposGRPOConfig) -> None:
    """Raises `RecipeError` if the other processes of the trainer do not wait until the services are
    there. The first process waits for one service after the other, and the others wait for it."""
    waits = services.start_atropos + len(training.vllm_server_urls) * services.start_vllm
    seconds = services.service_timeout
    patience = training.ddp_timeout
    if training.world_size > 1 and waits * seconds >= patience:
        what = (
            f"{waits} services may take {seconds:g} s each to become healthy "
            "(`service_timeout`), but the trainer's processes wait for the first one for only "
            f"{patience} s (`ddp_timeout`)"
        )
        seen = f"service_timeout: {seconds:g}, ddp_timeout: {patience}"
        raise RecipeError(what, seen, "Raise `ddp_timeout`, or lower `service_timeout`.")


def _check_environment(recipe: Recipe, spec: EnvironmentSpec) -> None:
    """Raises `RecipeError` for settings of an environment that do not go with those of the run."""
    stated = recipe.stated(spec)
    for setting, value in stated.items():
        if setting.endswith("temperature"):
            place = f"`config: {setting}`" if setting in spec.config else f"--env.{setting}"
            _check_temperature(recipe, spec, value, place)
    size = number_of(stated.get("group_size"))
    batch = recipe.training.generation_batch_size
    if not size or batch % size == 0:
        return
    if size < batch:
        what = (
            f"which do not fill a generation batch of {batch} rollouts: the Atropos API "
            "would never deliver one"
        )
        fix = "Change `per_device_train_batch_size` to make the batch a multiple of the group size."
    else:
        what = f"but a generation batch has only {batch} rollouts"
        fix = (
            "Raise `per_device_train_batch_size` or `gradient_accumulation_steps`, or lower the "
            "group size."
        )
    what = f"Environment {spec.name!r} sends groups of {size:.0f} rollouts, {what}"
    seen = f"group_size: {size:.0f}, a generation batch of {batch} rollouts"
    raise RecipeError(what, seen, fix, "group-size")


def _check_temperature(recipe: Recipe, spec: EnvironmentSpec, value: Any, place: str) -> None:
    """Raises `RecipeError` if an environment samples at another temperature than the trainer's."""
    trained = recipe.training.temperature
    if number_of(value) not in (None, trained):
        sampled = f"{value} ({place})"
        what = (
            f"Environment {spec.name!r} samples at temperature {sampled}, but `temperature` is "
            f"{trained}, at which every token is scored"
        )
        seen = f"temperature {sampled}, temperature: {trained}"
        raise RecipeError(what, seen, "Make the two equal.", "temperature")


def _check_setting_names(spec: EnvironmentSpec) -> None:
    """Raises `RecipeError` for settings that the environment's class does not have, as far as its
    script tells."""
    if not spec.config:
        return
    names = setting_names(spec.script)
    if names is None:
        return
    for setting, value in spec.config.items():
        if setting not in names:
            close = difflib.get_close_matches(setting, names, n=1)
            if close:
                fix = f"Did you mean `{close[0]}`?"
            else:
                fix = f"Its settings are: {', '.join(sorted(names))}."
            what = (
                f"Environment {spec.name!r} has no setting `{setting}`, and Atropos would "
                "ignore it silently"
            )
            raise RecipeError(what, f"{setting}: {value} (`config:`)", fix, "environment-setting")


def number_of(value: Any) -> float | None:
    """Returns the number that a setting of an environment is, which is text in a flag. Returns
    `None` for anything else."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def check_files(recipe: Recipe) -> Recipe:
    """Checks on all ranks what a run reads and writes. Returns the recipe with the checkpoint's
    folder as `resume_from_checkpoint`, or with `None`."""
    from trl_atropos.distributed import together
    from trl_atropos.weights import checkpoint as checkpoints
    from trl_atropos.weights import trainable
    from trl_atropos.weights.run_path import starting_checkpoint
    from trl_atropos.weights.savable import require_savable_generation, require_writable

    training = recipe.training
    model = recipe.model
    environment_token()  # raises if no header can carry it
    together(lambda: require_writable(training.output_dir))
    together(lambda: trainable.require_trainable(model, training.trust_remote_code))
    # otherwise, an adapter alone is saved
    if not model.use_peft or training.vllm_mode == "restart":
        together(lambda: require_savable_generation(model))
    if model.use_peft and recipe.adapter_way is not None:
        together(lambda: trainable.require_untied(model, training.trust_remote_code))
    folder = starting_checkpoint(training, training.resume_from_checkpoint)
    if folder is not None:
        together(lambda: checkpoints.require_whole(folder))
        together(lambda: checkpoints.require_same_weights(folder, model.use_peft))
    return recipe.with_training(resume_from_checkpoint=folder)


def check_reports(training: AtroposGRPOConfig) -> None:
    """Raises `RecipeError` if a reporting package that `report_to` names is missing. Otherwise you
    would learn it only when the server is up and the trainer is made."""
    from transformers.integrations import get_reporting_integration_callbacks

    try:
        for callback in get_reporting_integration_callbacks(training.report_to):
            callback()
    except (ImportError, RuntimeError, ValueError) as error:
        seen = f"report_to: {', '.join(training.report_to)}"
        what = f"`report_to` is {training.report_to}: {error}"
        fix = "Or set `report_to: none`."
        raise RecipeError(what, seen, fix, "report-to") from error
