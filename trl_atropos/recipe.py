"""Reads a command line and the recipe that it names into a `Recipe`, and checks it.

A recipe is one flat YAML file, which TRL's parser reads into three dataclasses: `ServicesConfig`
here, `AtroposGRPOConfig`, and TRL's `ModelConfig`. Overlays (`--overlay FILE`) change settings of
it: later ones win, and command-line flags win over all. All commands call `parse`, which checks the
settings (`recipe_checks.py`). A `Recipe` does not change: whoever needs another one calls
`dataclasses.replace` or `Recipe.with_training`.

An environment learns the rest from a file that the run writes, and that Atropos' own `--config`
reads.
"""

import copy
import math
import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from transformers.trainer_utils import IntervalStrategy
from trl import ModelConfig, TrlParser

from trl_atropos.config import AtroposGRPOConfig, with_help
from trl_atropos.environment_entry import EnvironmentSpec, EvaluationSpec, parse_entries
from trl_atropos.errors import RecipeError
from trl_atropos.flags import number_of, served_rank, server_flags, stated_flags, values_of
from trl_atropos.modes import AdapterWay
from trl_atropos.recipe_checks import check_best_model, check_settings
from trl_atropos.recipe_files import HELP, check_content, load_checked, suggest
from trl_atropos.rollouts.spool import write_file
from trl_atropos.services.evaluation_results import GROUPS


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
            mapping with `path`, `command` or `agent`, and optionally `name`, `config` (its
            settings), `env`, `cwd`, `python` and `servers`. A command may have {python}, {model},
            {atropos_url}, {vllm_url}, {vllm_urls}, {temperature}, {seed}, {output_dir}. An
            environment that ends (or the Atropos API of the run) is started again, up to 3 times in
            an hour. One that ends within 30 seconds of its start, or before it has ever registered
            at the API, ends the run.
        evaluations (`list[dict]`, *optional*):
            Environments to evaluate the policy with, beside the training (in the recipe file only):
            entries like those of `environments`, but none with a `command`, and optionally
            `problems` (how many
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
# One overlay is for many recipes, which differ in these.
NOT_IN_OVERLAYS = {"env", "environments", "evaluations"}
KEYWORDS = "the keyword arguments"  # where the settings of a Python program stand
QUOTED = '`--vllm_args "--max-model-len 512 --dtype bfloat16"`'
HOW_TO_QUOTE = (
    "Flags of the server are a list in a recipe, and one quoted text on the command "
    f"line: {QUOTED}."
)
NO_KEY = "none"  # servers of the run ask for no API key
# Seed of the environments of evaluations, whatever that of the run: the same problems for all runs.
EVALUATION_SEED = 0
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
        stated = server_flags(flags)
        numerics = self.training.numerics
        if numerics != "default" and "--numerics" not in stated:
            flags += ["--numerics", numerics]
        if not self.model.use_peft or self.adapter_way != "alone":
            return flags
        if "--enable-lora" not in stated and "--no-enable-lora" not in stated:
            flags.append("--enable-lora")
        if "--max-lora-rank" not in stated:
            rank = served_rank(self.model.lora_r)
            flags += ["--max-lora-rank", str(rank)]
        return flags

    @property
    def adapter_way(self) -> AdapterWay:
        """Way of the run's adapter to the servers, or `None` if recorded rollouts are replayed."""
        if self.training.replay_paths is not None:
            return None
        return self.training.mode.adapter_way

    @property
    def runs_agents(self) -> bool:
        """True if entries of `environments` or `evaluations` run programs that nobody knows beside
        the run: those of `environment_kinds.py`."""
        specs = [*self.environments, *self.evaluations]
        return any(spec.kind is not None for spec in specs)

    def placeholders(self) -> dict[str, str]:
        """Returns the values of the placeholders in commands: `{python}`, `{model}`, and so on."""
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
        """Returns the command that starts an environment."""
        command = spec.start_command(self.placeholders())
        if self.environment_content(spec) is not None:
            file = self._file_of(spec)
            command += ["--config", str(file)]
        return command

    def environment_content(self, spec: EnvironmentSpec) -> dict[str, Any] | None:
        """Returns the content of the file that the run writes for Atropos' `--config`, or `None`
        for a command without `servers`. Atropos drops settings that the environment does not
        have."""
        if spec.path is None and spec.servers is None:
            return None
        servers = self._servers_of(spec)
        if spec.path is None:
            return {"openai": servers}
        training = self.training
        offpolicy_batches = spec.config.get("max_batches_offpolicy", 1)
        known = {
            "rollout_server_url": training.atropos_url,
            "tokenizer_name": str(self.model.model_name_or_path),
            "temperature": training.temperature,
            "seed": training.seed,
            "total_steps": -1,  # as many as the trainer takes
            "max_batches_offpolicy": offpolicy_batches,
            # Each worker samples one group. By itself, Atropos starts no more workers than fill
            # `max_batches_offpolicy` batches. This bound is as many as those batches have rollouts,
            # so it is never the lower one.
            "max_num_workers": training.generation_batch_size * max(1, offpolicy_batches),
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
            # `environment_site/run.py` refuses those that the environment does not have.
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
        """Writes the file for an evaluation's `--config` into `folder`. Returns the command that
        evaluates, whose requests have `key` as their API key."""
        content = self.environment_content(spec)
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
        content["env"] |= {"state_file": None, "seed": EVALUATION_SEED, **fixed}
        content["env"] |= spec.config  # again, because it wins over what is fixed here
        path = folder / "config.yaml"
        path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
        return [*spec.groups_command(kind, self.placeholders()), "--config", str(path)]

    def write_environment_file(self, spec: EnvironmentSpec) -> Path:
        """Writes the file for an environment's `--config` and returns its path. A new run, unlike
        one that is resumed, begins without the environment's `state_file`."""
        if self.training.resume_from_checkpoint is None:
            self._file_of(spec, "state").unlink(missing_ok=True)
        content = self.environment_content(spec)
        path = self._file_of(spec)
        if content is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            text = yaml.safe_dump(content, sort_keys=False)
            write_file(path, text.encode(), sync=False)
        return path

    def stated(self, spec: EnvironmentSpec) -> dict[str, Any]:
        """Returns the settings of an environment that the recipe states: its `config`, or the
        `--env.` flags of its command."""
        settings = dict(spec.config)
        flags = stated_flags(self.environment_command(spec))
        for flag, value in flags.items():
            if flag.startswith("--env."):
                setting = flag.removeprefix("--env.")
                settings[setting] = value
        return settings

    def stated_number(self, spec: EnvironmentSpec, setting: str) -> float | None:
        """Returns a setting of an environment that the recipe states as a number, or `None`."""
        return number_of(self.stated(spec).get(setting))

    def _file_of(self, spec: EnvironmentSpec, kind: str = "yaml") -> Path:
        """Returns the path of the environment's file for `--config`, or of its `state`."""
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
        message = re.sub(r"^argument --([^/:]+)[^:]*", r"`\1`", message).rstrip(".")
        raise RecipeError(message, _seen_by_parser(message), HELP)


def _seen_by_parser(message: str) -> str:
    """Returns the setting and value of an error of the parser, such as `max_steps: many` for
    "`max_steps`: invalid int value: 'many'". Returns the message if it quotes none."""
    setting = re.match(r"`(\w+)`", message)
    value = re.search(r"(?:value|choice): '(.*?)'", message)
    if setting is None:
        return message
    if value is None:
        return setting[1]
    return f"{setting[1]}: {value[1]}"


def parse(argv: list[str], settings: Mapping[str, Any] | None = None) -> Recipe:
    """Reads the command line and the recipe that it names. `settings` are those of a Python program
    and replace the recipe's. Raises `RecipeError` for anything that you can mend."""
    overlays, argv = values_of("--overlay", argv)
    recipes, argv = values_of("--config", argv)
    if not recipes:
        _refuse_missing_recipe(argv)
    path = recipes[0] if recipes else None  # the parser refuses a second one
    config_flags = []
    for recipe in recipes:
        config_flags += ["--config", recipe]
    argv = [*config_flags, *argv]
    parser = _Parser(PARTS)
    types = _types_of_settings(parser)
    if path is not None:
        load_checked(path, types)  # only for its errors: the parser reads the file itself
    for overlay in overlays:
        parser.overlaid |= _overlay_settings(overlay, path, types)
    sources = list(overlays)
    if settings:
        sources.append(KEYWORDS)
        parser.overlaid |= _keyword_settings(settings, types)
    try:
        services, training, model, rest = parser.parse_args_and_config(
            argv, return_remaining_strings=True
        )
    except (ValueError, TypeError) as error:
        raise _located(error, argv, path, sources) from error
    if rest:
        raise _unknown_arguments(rest, argv, types)
    services = replace(services, vllm_args=_vllm_args(services.vllm_args))
    folder = os.path.dirname(os.path.abspath(path)) if path else None
    environments = parse_entries("environments", services.environments, EnvironmentSpec, folder)
    evaluations = parse_entries("evaluations", services.evaluations, EvaluationSpec, folder)
    parsed = Recipe(services, training, model, environments, evaluations)
    check_settings(parsed)
    return _scheduled(parsed)


def _types_of_settings(parser: TrlParser) -> dict[str, Any]:
    """Returns the types of all settings, by their names."""
    hints: dict[str, Any] = {}
    for part in PARTS:
        hints |= get_type_hints(part)
    return {action.dest: hints.get(action.dest, Any) for action in parser._actions}


def _refuse_missing_recipe(argv: list[str]) -> None:
    """Raises `RecipeError` for a command line that was meant to name a recipe, and does not."""
    strays = [word for word in argv if word.endswith((".yaml", ".yml"))]
    if argv and argv[-1] != "--config" and not strays:
        return
    example = strays[0] if strays else EXAMPLE
    fix = f"Name one with `--config`, as in `--config {example}`."
    raise RecipeError("No recipe", " ".join(argv), fix, "no-recipe")


def _unknown_arguments(words: list[str], argv: list[str], types: Mapping[str, Any]) -> RecipeError:
    """Returns the error of a command line with `words` that the parser does not know."""
    if "--vllm_args" in argv:
        fix = HOW_TO_QUOTE
    else:
        flag, _, _ = words[0].partition("=")
        fix = suggest(flag.lstrip("-"), types)
    unknown = " ".join(words)
    return RecipeError(f"Unknown arguments: {unknown}", unknown, fix, "unknown-flag")


def _located(
    error: Exception, argv: list[str], path: str | None, overlays: list[str]
) -> RecipeError:
    """Returns the error of a configuration. It begins with the names of the recipe and of what
    changes it, unless a flag of the command line is wrong."""
    place = ""
    if path is not None and not _is_about_flag(error, argv):
        files = " with ".join([path, *overlays])
        place = f"{files}: "
    if not isinstance(error, RecipeError):  # of TRL or Transformers
        return RecipeError(f"{place}{error}")
    located = RecipeError(f"{place}{error.what}", error.seen, error.fix, error.code)
    located.further = error.further
    return located


def _is_about_flag(error: Exception, argv: list[str]) -> bool:
    """Returns whether the message names a setting that the command line sets."""
    message = str(error)
    for flag in stated_flags(argv):
        name = flag.lstrip("-").replace("-", "_")
        if f"`{name}`" in message:
            return True
    return False


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


def _overlay_settings(path: str, recipe: str | None, types: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of an overlay. Raises `RecipeError` for those that it may not have."""
    if recipe is None:
        what = f"`--overlay {path}` changes a recipe, and there is none"
        raise RecipeError(what, path, "Name one with `--config`.", "no-recipe")
    settings = load_checked(path, types, "--overlay")
    for key in settings.keys() & NOT_IN_OVERLAYS:
        what = f"{path}: `{key}` cannot be in an overlay, which is for many recipes"
        fix = f"Set it in the recipe, {recipe}."
        raise RecipeError(what, f"{key} in {path}", fix)
    return settings


def _keyword_settings(settings: Mapping[str, Any], types: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keyword arguments of a Python program as a recipe would state them. Raises
    `RecipeError` for names and types that are wrong."""
    if "env" in settings:
        what = f"`env` cannot be among {KEYWORDS}: the libraries have read their variables"
        fix = "Set them in `os.environ` before you import anything, or in the recipe."
        raise RecipeError(what, f"env: {settings['env']}", fix)
    stated = {key: _as_in_yaml(value) for key, value in settings.items()}
    check_content(stated, KEYWORDS, types)
    return stated


def _as_in_yaml(value: Any) -> Any:
    """Returns a Python value as YAML would give it: paths are text, tuples are lists."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, list | tuple):
        return [_as_in_yaml(entry) for entry in value]
    if isinstance(value, Mapping):
        return {key: _as_in_yaml(entry) for key, entry in value.items()}
    return value


def _scheduled(recipe: Recipe) -> Recipe:
    """Returns the recipe with its evaluations scheduled. Transformers calls the evaluator at the
    start, and so often that no evaluation is missed: every 10 optimizer steps, if one evaluation is
    due every 20 and another every 30.
    """
    if not recipe.evaluations:
        return recipe
    training = recipe.training
    default_every = None  # optimizer steps, for evaluations without `every`
    if training.eval_strategy == "steps":
        default_every = training.eval_steps
        if default_every < 1:  # a share of the run: 0.2 of 100 steps is every 20
            default_every *= training.max_steps
        # Rounded up as by Transformers. It is a float also if the command line says 1.
        default_every = math.ceil(default_every)
    evaluations = []
    for spec in recipe.evaluations:
        every = spec.every or default_every
        evaluations.append(spec.model_copy(update={"every": every}))
    steps = [spec.every for spec in evaluations if spec.every]
    eval_steps = training.max_steps  # at the start and at the end only, if none is due between
    if steps:
        eval_steps = math.gcd(*steps)
    check_best_model(training, evaluations, eval_steps)
    scheduled = replace(recipe, evaluations=evaluations)
    return scheduled.with_training(
        eval_strategy=IntervalStrategy.STEPS, eval_on_start=True, eval_steps=eval_steps
    )
