"""The machine and the processes that a run is planned for: the device's memory, and how the trainer is sharded."""

import json
from dataclasses import dataclass
from typing import Any

import psutil
import torch
import yaml

GIB = 1 << 30


@dataclass(frozen=True)
class Plan:
    """
    Attributes:
        device: `"cuda"` or `"cpu"`.
        total: Bytes of one device's memory; on the CPU, of the machine's.
        processes: Of the trainer, one per device.
        sharding: `"none"` (or DDP), `"zero1"`, `"zero2"`, `"zero3"`, or `"fsdp"`.
        offloads: The optimizer's state is in host memory, as DeepSpeed or FSDP are told to.
        offloads_weights: The weights, too, but for those that are gathered.
        mixed_precision: What accelerate makes operators compute in, if not the parameters' dtype.
    """

    device: str
    total: int
    processes: int = 1
    sharding: str = "none"
    offloads: bool = False
    offloads_weights: bool = False
    mixed_precision: torch.dtype | None = None


def plan_of(
    training: Any,
    device_memory_gb: float | None = None,
    accelerate_file: str | None = None,
    processes: int | None = None,
) -> Plan | None:
    """
    `None` if the run is for a GPU, of which nothing is known: none is here, though torch could use one.

    Args:
        training (`AtroposGRPOConfig`): The recipe's settings.
        device_memory_gb (`float`, *optional*): GiB of a device of another machine. Defaults to what is here.
        accelerate_file (`str`, *optional*): What the run will give to `accelerate launch` as `--config_file`.
        processes (`int`, *optional*): As `--num_processes` of `accelerate launch`.

    Raises:
        ValueError: The file cannot be read.
    """
    launch = _read(accelerate_file)
    on_cpu = training.use_cpu or bool(launch.get("use_cpu"))
    if device_memory_gb is None and not (on_cpu or torch.cuda.is_available() or torch.version.cuda is None):
        return None
    device = "cpu" if on_cpu or (device_memory_gb is None and not torch.cuda.is_available()) else "cuda"
    if device_memory_gb is not None:
        total = int(device_memory_gb * GIB)
    else:
        total = psutil.virtual_memory().total if device == "cpu" else torch.cuda.get_device_properties(0).total_memory
    precision = str(launch.get("mixed_precision", "no"))
    if training.bf16 or training.fp16:
        precision = "bf16" if training.bf16 else "fp16"
    return Plan(
        device,
        total,
        processes or int(launch.get("num_processes") or training.world_size),
        *_sharding(launch, training),
        {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision),
    )


def _read(path: str | None) -> dict:
    if path is None:
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            return dict(yaml.safe_load(file) or {})
    except (OSError, UnicodeError, yaml.YAMLError, TypeError, ValueError) as error:
        raise ValueError(
            f"`--config_file` is {path!r}, which cannot be read as accelerate's YAML ({error}). Name the file that "
            "`accelerate launch` will be given."
        ) from error


def _sharding(launch: dict, training: Any) -> tuple[str, bool, bool]:
    """`Plan.sharding`, `offloads` and `offloads_weights`: what accelerate's file says, or else the recipe."""
    kind = launch.get("distributed_type")
    if kind == "FSDP" or training.fsdp:
        offloads = bool(launch.get("fsdp_config", {}).get("fsdp_offload_params"))
        return "fsdp", offloads, offloads
    stated = launch.get("deepspeed_config", {}) if kind == "DEEPSPEED" else {}
    stage = stated.get("zero_stage", 0)
    devices = [stated.get(f"offload_{what}_device", "none") for what in ("optimizer", "param")]
    own = stated.get("deepspeed_config_file") or training.deepspeed
    if own:  # DeepSpeed's own format
        zero = (own if isinstance(own, dict) else _json(own)).get("zero_optimization", {})
        stage = zero.get("stage", 0)
        devices = [zero.get(f"offload_{what}", {}).get("device", "none") for what in ("optimizer", "param")]
    optimizer, weights = (device not in (None, "none") for device in devices)
    return (f"zero{stage}", optimizer, weights) if stage else ("none", False, False)


def _json(path: str) -> dict:
    with open(path, encoding="utf-8") as file:
        return json.load(file)
