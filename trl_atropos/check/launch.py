"""Where the run will be launched, as `check` is told besides the recipe; whether processes and servers fit that; ports
and room for what the run starts, and what answers already where it starts nothing."""

import argparse
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

import psutil
import torch
import yaml

from trl_atropos.errors import AtroposTrainingError as Finding
from trl_atropos.errors import RolloutError, ServerError, ServiceError
from trl_atropos.protocol import ADAPTER_MODES, parallel, server_flags
from trl_atropos.recipe import Recipe
from trl_atropos.rollouts.api import UNREGISTERED, AtroposClient
from trl_atropos.server_client import ServerClient
from trl_atropos.services.manager import port_of, require_free_port, require_shared_memory, require_sockets

GIB = 1 << 30
ANSWER = 5.0  # seconds
CONNECT = 1.0  # seconds; nobody there is no finding: services may be started later
UTILIZATION = 0.92  # vLLM's default of `--gpu-memory-utilization` (vllm/config/cache.py)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trl-atropos check", add_help=False, allow_abbrev=False)
    parser.add_argument("--device_memory_gb", type=float)
    parser.add_argument("--devices", type=int)
    parser.add_argument("--config_file")
    parser.add_argument("--num_processes", type=int)
    parser.add_argument("--num_machines", type=int)
    return parser


@dataclass(frozen=True)
class Launch:
    """
    What `options` were given, and what they and accelerate's file say.

    Raises:
        AtroposTrainingError: The file cannot be read.
    """

    device_memory_gb: float | None = None
    devices: int | None = None
    config_file: str | None = None
    num_processes: int | None = None
    num_machines: int | None = None

    def __post_init__(self) -> None:
        self.content  # noqa: B018 - is read now

    @cached_property
    def content(self) -> dict[str, Any]:
        return _read(self.config_file)

    @property
    def processes(self) -> int | None:
        """Of the trainer, on all machines; `None` if nothing says how many."""
        world = int(os.environ.get("WORLD_SIZE", 1))
        return self.num_processes or self.content.get("num_processes") or (world if world > 1 else None)

    @property
    def machines(self) -> int:
        return self.num_machines or self.content.get("num_machines") or 1

    @property
    def gpus(self) -> int | None:
        """Of one machine; `None` if that is not known."""
        return self.devices or torch.cuda.device_count() or None

    @property
    def elsewhere(self) -> bool:
        """Whether the run will be on another machine than this one, which has no GPU."""
        return bool(self.device_memory_gb or self.devices) and not torch.cuda.is_available()

    @property
    def sharding(self) -> str | None:
        """What accelerate shards by."""
        kind = self.content.get("distributed_type")
        return kind if kind in ("DEEPSPEED", "FSDP") else None


def _read(path: str | None) -> dict[str, Any]:
    """The only reader of accelerate's YAML."""
    if path is None:
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            content = dict(yaml.safe_load(file) or {})
        return content | {name: int(content.get(name) or 0) for name in ("num_processes", "num_machines")}
    except (OSError, UnicodeError, yaml.YAMLError, TypeError, ValueError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: str, error: Exception) -> Finding:
    what, seen = "`--config_file` cannot be read as accelerate's YAML", f"{path}: {' '.join(str(error).split())}"
    return Finding(what, seen, "Name the file that `accelerate launch` will be given.", "launch-file")


@dataclass(frozen=True)
class Plan:
    """
    The machine and the processes that a run is planned for.

    Attributes:
        total: Bytes of one device's memory; on the CPU, of the machine's.
        processes: Of the trainer, one per device.
        offloads: The optimizer's state is in host memory, `offloads_weights` the weights, but for those gathered.
        mixed_precision: What accelerate makes operators compute in, if not the parameters' dtype.
    """

    device: str  # "cuda" or "cpu"
    total: int
    processes: int = 1
    sharding: str = "none"  # or DDP; "zero1", "zero2", "zero3", "fsdp"
    offloads: bool = False
    offloads_weights: bool = False
    mixed_precision: torch.dtype | None = None


def plan_of(training: Any, launch: Launch) -> Plan | None:
    """
    `None` if the run is for a GPU, of which nothing is known: none is here, though torch could use one.

    Raises:
        AtroposTrainingError: A file that accelerate's names cannot be read.
    """
    gib, content = launch.device_memory_gb, launch.content
    on_cpu = training.use_cpu or bool(content.get("use_cpu"))
    if gib is None and not (on_cpu or torch.cuda.is_available() or torch.version.cuda is None):
        return None
    device = "cpu" if on_cpu or (gib is None and not torch.cuda.is_available()) else "cuda"
    if gib is not None:
        total = int(gib * GIB)
    else:
        total = psutil.virtual_memory().total if device == "cpu" else torch.cuda.get_device_properties(0).total_memory
    own = "bf16" if training.bf16 else "fp16" if training.fp16 else None
    precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(own or str(content.get("mixed_precision")))
    return Plan(device, total, launch.processes or training.world_size, *_sharding(content, training), precision)


def _sharding(content: dict[str, Any], training: Any) -> tuple[str, bool, bool]:
    """`Plan.sharding`, `offloads` and `offloads_weights`: what accelerate's file says, or else the recipe."""
    kind = content.get("distributed_type")
    if kind == "FSDP" or training.fsdp:
        offloads = bool(content.get("fsdp_config", {}).get("fsdp_offload_params"))
        return "fsdp", offloads, offloads
    stated = content.get("deepspeed_config", {}) if kind == "DEEPSPEED" else {}
    stage = stated.get("zero_stage", 0)
    devices = [stated.get(f"offload_{what}_device", "none") for what in ("optimizer", "param")]
    own = stated.get("deepspeed_config_file") or training.deepspeed
    if own:  # DeepSpeed's own format
        zero = (own if isinstance(own, dict) else _json(own)).get("zero_optimization", {})
        stage = zero.get("stage", 0)
        devices = [zero.get(f"offload_{what}", {}).get("device", "none") for what in ("optimizer", "param")]
    optimizer, weights = (device not in (None, "none") for device in devices)
    return (f"zero{stage}", optimizer, weights) if stage else ("none", False, False)


def _json(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def layout(recipe: Recipe, launch: Launch) -> Iterator[Finding]:
    """Whether processes and servers fit each other and the devices. The latter only of what is known to use a GPU."""
    training, servers = recipe.training, recipe.training.vllm_server_urls
    if training.replay_paths is not None:
        return
    colocated = training.vllm_mode == "colocate"
    if colocated and launch.sharding is not None:
        yield Finding(
            "`vllm_mode: colocate` trains the server's own memory in place, which cannot be sharded",
            f"distributed_type: {launch.sharding} in {launch.config_file}",
            "Launch with a configuration that does not shard (configs/accelerate/ddp.yaml), or use `vllm_mode: "
            "server`.",
            "sharded-colocate",
        )
    elif colocated and launch.processes is not None and launch.processes != len(servers):
        yield Finding(
            "With `vllm_mode: colocate` every process trains the memory of a server of its own",
            f"{launch.processes} processes, {len(servers)} servers",
            f"List one URL per process in `vllm_server_base_url`, or launch with `--num_processes {len(servers)}`.",
            "processes-servers",
        )
    if launch.gpus is not None and not training.use_cpu:
        yield from _devices(recipe, launch)


def _devices(recipe: Recipe, launch: Launch) -> Iterator[Finding]:
    here, servers = launch.gpus, recipe.training.vllm_server_urls
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
            f"A server of the recipe is spread over more GPUs than it can have: {place}",
            f"{flags} in `vllm_args`",
            "Lower it, or start the servers by hand with `trl-atropos serve` where there are enough GPUs.",
            "gpu-layout",
        )
    try:
        share = float(server_flags(recipe.vllm_flags()).get("--gpu-memory-utilization", UTILIZATION))
    except ValueError:  # vLLM says what is wrong with it
        return
    if len(servers) > 1 and not each_its_own and share * len(servers) > 1:
        yield Finding(
            "All servers that the recipe starts are on the same GPU, which has too little memory for them",
            f"{len(servers)} servers x `--gpu-memory-utilization` {share:g}",
            "Start them by hand with `trl-atropos serve`, each with a `CUDA_VISIBLE_DEVICES` of its own, or lower "
            "`--gpu-memory-utilization` in `vllm_args`.",
            "gpu-layout",
        )


def _too_few(what: str, here: int, fix: str) -> Finding:
    fix = f"{fix}, or tell `--devices` how many GPUs the machine of the run has."
    return Finding("There are fewer GPUs than the run needs", f"{what}, {here} GPUs", fix, "gpu-layout")


# ----------------------------------------------------------------------------------------------------------- services


def services(recipe: Recipe, launch: Launch) -> Iterator[Finding]:
    config, training = recipe.services, recipe.training
    if config.start_atropos:
        yield from _port("The Atropos API", "atropos_url", training.atropos_url, "start_atropos")
    elif training.replay_paths is None and _answers(training.atropos_url):
        yield from _api(recipe, launch)
    for url in training.vllm_server_urls:
        if config.start_vllm:
            yield from _port("The vLLM server", "vllm_server_base_url", url, "start_vllm")
        elif training.replay_paths is None and _answers(url):
            yield from _server(recipe, url)
    if config.start_vllm and not launch.elsewhere:
        for require, given in ((require_sockets, ()), (require_shared_memory, parallel(recipe.vllm_flags())[:1])):
            try:
                require(*given)
            except ServiceError as error:
                yield error


def _port(what: str, setting: str, url: str, start: str) -> Iterator[Finding]:
    fix = f"Stop what runs there, set `{setting}` to a free port, or use it with `{start}: false`."
    try:
        require_free_port(url, what, fix)
    except ServiceError as error:
        yield Finding(error.what, f"{setting}: {url}, {error.seen}", error.fix, error.code)


def _answers(url: str) -> bool:
    try:
        with socket.create_connection((urlsplit(url).hostname, port_of(url)), timeout=CONNECT):
            return True
    except (OSError, ServiceError):
        return False


def _api(recipe: Recipe, launch: Launch) -> Iterator[Finding]:
    training = recipe.training
    client = AtroposClient(training.atropos_url, ANSWER, ANSWER)
    try:
        client.greet()
        held = client.info()
    except RolloutError as error:
        seen = f"atropos_url: {training.atropos_url}"
        yield Finding(error.what, seen, error.fix, "not-atropos")
        return
    wanted = training.generation_batch_size
    # Without being told how many processes there will be, any multiple may be right.
    fits = held.batch_size % wanted == 0 if launch.processes is None else held.batch_size == wanted
    if held.batch_size != UNREGISTERED and not fits and not training.reset_atropos:
        yield Finding(
            "The Atropos API holds an earlier run's registration, which it does not change",
            f"{training.atropos_url} has batch_size {held.batch_size}, this run {wanted}",
            "Set `reset_atropos: true` to throw away the rollouts queued there, or restart the API; restart the "
            "environments in both cases.",
            "atropos-registered",
        )


def _server(recipe: Recipe, url: str) -> Iterator[Finding]:
    try:
        info = ServerClient(url, ANSWER).info()
    except ServerError as error:
        yield Finding(error.what, f"vllm_server_base_url: {url}", error.fix, error.code)
        return
    training, model, mode = recipe.training, str(recipe.model.model_name_or_path), recipe.training.vllm_mode
    start = f"Start it as `trl-atropos serve {model} --vllm_mode {mode}"
    there = os.path.isdir(model) and os.path.isdir(info.model) and os.path.samefile(model, info.model)
    that = "The server that is running"
    if info.model != model and not there and mode != "restart":  # which serves one checkpoint after the other
        seen, fix = f"{url} has {info.model}, the run {model}", f"{start}`, or set `model_name_or_path: {info.model}`."
        yield Finding(f"{that} serves another model", seen, fix, "server-model")
    if mode in ADAPTER_MODES and info.lora is None:
        what = f"{that} was started without adapters, and the run sends one"
        yield Finding(what, f"{url}, vllm_mode: {mode}", f"{start}`.", "server-mode")
    longest = training.max_sequence_length
    if longest and longest > info.max_model_len:
        yield Finding(
            f"The trainer is to take longer sequences than {that[0].lower()}{that[1:]} samples",
            f"max_sequence_length: {longest}, {url} has max_model_len {info.max_model_len}",
            f"Lower `max_sequence_length`, or start the server with `--max-model-len {longest}`.",
            "sequence-length",
        )
