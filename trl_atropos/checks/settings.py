"""The recipe, read as the main job reads it, for as many processes as there will be; and its dead fields."""

import itertools
import os
import warnings
from collections.abc import Iterator
from typing import Any

import yaml

from trl_atropos.checks.finding import WARNING, Finding, from_message
from trl_atropos.checks.launch import Launch
from trl_atropos.environments import RecipeError
from trl_atropos.errors import RolloutError
from trl_atropos.flags import stated_flags

NO_EFFECT = "These settings have no effect"  # how the configuration's own warning begins
NEEDS_GPU = "setup doesn't support bf16/gpu"  # in what transformers says
FILES = ("--config", "--overlay")
TRL_SERVER = {  # fields of TRL's own vLLM, and what to use here
    "vllm_gpu_memory_utilization": "`--gpu-memory-utilization` in `vllm_args`",
    "vllm_max_model_length": "`--max-model-len` in `vllm_args`",
    "vllm_tensor_parallel_size": "`--tensor-parallel-size` in `vllm_args`",
    "vllm_server_host": "`vllm_server_base_url`",
    "vllm_server_timeout": "`service_timeout`",
    "vllm_group_port": "`weight_transport`, which finds a port itself",
}


def stated_settings(argv: list[str]) -> dict[str, Any]:
    """The settings as they are written: of the recipe, its overlays, and the command line, each over those before."""
    flags = {flag.removeprefix("--"): value for flag, value in stated_flags(argv).items() if flag not in FILES}
    return of_files(argv) | flags


def of_files(argv: list[str]) -> dict[str, Any]:
    """Those of the recipe and its overlays."""
    words, settings = [part for word in argv for part in word.split("=", 1)], {}
    for flag in FILES:
        for word, path in itertools.pairwise(words):
            if word == flag and os.path.isfile(path):
                settings |= _content(path)
    return settings


def _content(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except (OSError, UnicodeError, yaml.YAMLError):
        return {}  # the parser says what is wrong with it
    return content if isinstance(content, dict) else {}


def read(argv: list[str], stated: dict[str, Any], launch: Launch) -> tuple[Any, list[Finding]]:
    """The `trl_atropos.recipe.Recipe`, `None` if there is none that can be run; and what is wrong with it."""
    from trl_atropos.recipe import parse

    for_gpus = _for_gpus(stated) if launch.elsewhere else []
    without = [word for name in for_gpus for word in (f"--{name}", "false")]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            recipe = parse([*argv, *_for_processes(stated, launch.processes), *without])
        except RecipeError as error:
            if NEEDS_GPU in str(error):
                return None, [_no_gpu(stated)]
            return None, [from_message(error, stated)]
        except RolloutError as error:
            seen = f"replay_paths: {stated.get('replay_paths')}"
            return None, [from_message(str(error), stated, name="replay", seen=seen)]
    for name in for_gpus:
        setattr(recipe.training, name, True)
    told = {str(one.message) for one in caught if str(one.message).startswith(NO_EFFECT)}
    return recipe, [_without_effect(text, stated) for text in told]


def _for_processes(stated: dict[str, Any], processes: int | None) -> list[str]:
    """
    This one process stands for all: a generation batch has as many rows as with them if it is gathered over as many
    more steps.
    """
    if (processes or 1) <= int(os.environ.get("WORLD_SIZE", 1)) or "generation_batch_size" in stated:
        return []
    steps = stated.get("steps_per_generation") or stated.get("gradient_accumulation_steps") or 1
    return ["--steps_per_generation", str(int(steps) * processes)] if str(steps).isdigit() else []


def _for_gpus(stated: dict[str, Any]) -> list[str]:
    """What transformers refuses on a machine without a GPU, where one is planned for that has some."""
    asked = [name for name in ("bf16", "fp16", "tf32") if str(stated.get(name)).lower() == "true"]
    return [] if str(stated.get("use_cpu")).lower() == "true" else asked


def _no_gpu(stated: dict[str, Any]) -> Finding:
    what = "`bf16` is for a GPU, and this machine has none"
    fix = (
        "For a run on another machine, add `--device_memory_gb N` (GiB of its GPU); for one here, set `use_cpu: true`."
    )
    return Finding("no-gpu", what, f"bf16: {stated.get('bf16')}", fix)


def _without_effect(text: str, stated: dict[str, Any]) -> Finding:
    names = [name for name in stated if f" {name}," in text or f" {name}." in text]
    seen = ", ".join(f"{name}: {stated[name]}" for name in names)
    what = "Settings of generation have no effect here, because the environments generate"
    return Finding("dead-setting", what, seen, "Remove them, and set what they mean in the environment.", WARNING)


def dead(recipe, stated: dict[str, Any]) -> Iterator[Finding]:
    """Settings that are stated and have no effect with the others."""
    for is_dead, reason, fix, names in _conditions(recipe):
        lora = [name for name in stated if name.startswith("lora_")] if names == ["lora_*"] else names
        found = [name for name in lora if is_dead and stated.get(name) not in (None, False, "false", "False", [])]
        if found:
            instead = [f"in its place there is {TRL_SERVER[name]}" for name in found if name in TRL_SERVER]
            them = "it" if len(found) == 1 else "them"
            way = "; ".join([f"{fix}, or remove {them}" if fix else f"Remove {them}", *instead])
            seen = ", ".join(f"{name}: {_short(stated[name])}" for name in found)
            yield Finding("dead-setting", f"A setting has no effect, because {reason}", seen, f"{way}.", WARNING)


def _conditions(recipe) -> list[tuple[bool, str, str, list[str]]]:
    """Whether settings are dead, why, what would make them live, and their names."""
    services, training = recipe.services, recipe.training
    replays, starts = training.replay_paths is not None, services.start_atropos or services.start_vllm
    own, sends = f"`vllm_mode: {training.vllm_mode}` has a transport of its own", ("server", "nccl_lora")
    keeps = training.save_strategy != "no"
    return [
        (replays, "recorded rollouts are replayed", "", ["start_atropos", "start_vllm", "environments"]),
        (not services.start_vllm, "the run starts no server", "Set `start_vllm: true`", ["vllm_args"]),
        (not starts, "the run starts no service", "", ["service_timeout"]),
        (not starts and not recipe.environments, "the run starts no service", "", ["restart_environments"]),
        (services.start_atropos, "an API that the run starts is empty", "", ["reset_atropos"]),
        (training.vllm_mode not in sends, own, "Use `vllm_mode: server` or `nccl_lora`", ["weight_transport"]),
        (not recipe.model.use_peft, "the run has no adapter", "Set `use_peft: true`", ["lora_*"]),
        (not training.vllm_enable_sleep_mode, "the server does not sleep", "", ["vllm_sleep_level"]),
        (not training.master_weights, "there are no master weights", "", ["offload_master_weights"]),
        (not keeps, "nothing is saved on the way", "Set `save_strategy: steps`", ["save_steps", "save_total_limit"]),
        (True, "the server is no part of TRL", "", list(TRL_SERVER)),
    ]


def _short(value: Any) -> str:
    return f"{len(value)} of them" if isinstance(value, list) and value and isinstance(value[0], dict) else str(value)
