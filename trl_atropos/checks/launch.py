"""Where and how the run will be launched: what `check` is told besides the recipe."""

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import yaml

from trl_atropos.checks.finding import Finding
from trl_atropos.flags import parallel, server_flags


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trl-atropos check", add_help=False, allow_abbrev=False)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--device_memory_gb", type=float)
    parser.add_argument("--devices", type=int)
    parser.add_argument("--config_file")
    parser.add_argument("--num_processes", type=int)
    parser.add_argument("--num_machines", type=int)
    return parser


@dataclass
class Launch:
    """
    Attributes:
        config_file: What `accelerate launch` will be given, if that can be read.
        processes: Of the trainer, on all machines; `None` if nothing says how many.
        machines: Of the trainer.
        sharding: What accelerate shards by (`"DEEPSPEED"`, `"FSDP"`), if so.
        devices: GPUs of one machine; `None` if that is not known.
        elsewhere: The run will be on another machine than this one, which has no GPU.
        findings: What is wrong with the file.
    """

    config_file: str | None = None
    processes: int | None = None
    machines: int = 1
    sharding: str | None = None
    devices: int | None = None
    device_memory_gb: float | None = None
    elsewhere: bool = False
    findings: list[Finding] = field(default_factory=list)

    @classmethod
    def of(cls, stated: argparse.Namespace) -> "Launch":
        content, findings = _read(stated.config_file)
        world = int(os.environ.get("WORLD_SIZE", 1))
        processes = stated.num_processes or content.get("num_processes") or (world if world > 1 else None)
        kind = str(content.get("distributed_type", "NO"))
        devices = stated.devices or torch.cuda.device_count() or None
        return cls(
            None if findings else stated.config_file,
            None if processes is None else int(processes),
            stated.num_machines or content.get("num_machines") or 1,
            kind if kind in ("DEEPSPEED", "FSDP") else None,
            devices,
            stated.device_memory_gb,
            bool(stated.device_memory_gb or stated.devices) and not torch.cuda.is_available(),
            findings,
        )


def _read(path: str | None) -> tuple[dict, list[Finding]]:
    if path is None:
        return {}, []
    try:
        with open(path, encoding="utf-8") as file:
            content = dict(yaml.safe_load(file) or {})
        numbers = {name: int(content.get(name) or 0) for name in ("num_processes", "num_machines")}
        return {**content, **numbers}, []
    except (OSError, UnicodeError, yaml.YAMLError, TypeError, ValueError) as error:
        what = "`--config_file` cannot be read as accelerate's YAML"
        seen = f"{path}: {' '.join(str(error).split())}"
        return {}, [Finding("launch-file", what, seen, "Name the file that `accelerate launch` will be given.")]


def layout(recipe, launch: Launch) -> Iterator[Finding]:
    """Whether processes and servers fit each other and the devices. The latter only of what is known to use a GPU."""
    training, servers = recipe.training, recipe.training.vllm_server_urls
    if training.replay_paths is not None:
        return
    colocated = training.vllm_mode == "colocate"
    if colocated and launch.sharding is not None:
        yield Finding(
            "sharded-colocate",
            "`vllm_mode: colocate` trains the server's own memory in place, which cannot be sharded",
            f"distributed_type: {launch.sharding} in {launch.config_file}",
            "Launch with a configuration that does not shard (configs/accelerate/ddp.yaml), or use `vllm_mode: "
            "server`.",
        )
    elif colocated and launch.processes is not None and launch.processes != len(servers):
        yield Finding(
            "processes-servers",
            "With `vllm_mode: colocate` every process trains the memory of a server of its own",
            f"{launch.processes} processes, {len(servers)} servers",
            f"List one URL per process in `vllm_server_base_url`, or launch with `--num_processes {len(servers)}`.",
        )
    if launch.devices is not None and not training.use_cpu:
        yield from _devices(recipe, launch)


def _devices(recipe, launch: Launch) -> Iterator[Finding]:
    here, servers = launch.devices, recipe.training.vllm_server_urls
    local = -(-(launch.processes or 1) // launch.machines)
    if local > here:
        yield _too_few(f"{local} processes of the trainer on a machine", here, "Launch with fewer `--num_processes`")
        return
    if not recipe.services.start_vllm:
        return
    parts, flags = parallel(recipe.vllm_flags())
    each_its_own = recipe.training.vllm_mode == "colocate" and len(servers) > 1
    if each_its_own and len(servers) > here:
        yield _too_few(f"{len(servers)} servers, each on a GPU of its own", here, "List fewer servers")
    elif parts > (1 if each_its_own else here):
        place = "each server gets one GPU" if each_its_own else f"the machine has {here}"
        yield Finding(
            "gpu-layout",
            f"A server of the recipe is spread over more GPUs than it can have: {place}",
            f"{flags} in `vllm_args`",
            "Lower it, or start the servers by hand with `trl-atropos serve` where there are enough GPUs.",
        )
    share = _share(recipe.vllm_flags()) if len(servers) > 1 and not each_its_own else 0.0
    if share * len(servers) > 1:
        yield Finding(
            "gpu-layout",
            "All servers that the recipe starts are on the same GPU, which has too little memory for them",
            f"{len(servers)} servers x `--gpu-memory-utilization` {share:g}",
            "Start them by hand with `trl-atropos serve`, each with a `CUDA_VISIBLE_DEVICES` of its own, or lower "
            "`--gpu-memory-utilization` in `vllm_args`.",
        )


def _too_few(what: str, here: int, fix: str) -> Finding:
    fix = f"{fix}, or tell `--devices` how many GPUs the machine of the run has."
    return Finding("gpu-layout", "There are fewer GPUs than the run needs", f"{what}, {here} GPUs", fix)


def _share(flags: list[str]) -> float:
    """Of a GPU's memory that a server takes."""
    from trl_atropos.memory.case import UTILIZATION

    try:
        return float(server_flags(flags).get("--gpu-memory-utilization", UTILIZATION))
    except ValueError:  # vLLM says what is wrong with it
        return UTILIZATION
