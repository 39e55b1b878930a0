"""Describes a run as it will be launched: its processes and devices, its model, and the flags of
its server.

`check/__init__.py` calls `plan_of` for the machine and `case_of` for what the estimate of memory
needs, and collects the findings of `layout`. `settings.py` looks at the recipe itself.
"""

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import psutil
import torch
import yaml
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from transformers import AutoConfig, PretrainedConfig
from trl import get_peft_config

from trl_atropos.batches.micro_batches import FIRST_TOKENS
from trl_atropos.errors import AtroposTrainingError as Finding
from trl_atropos.flags import number_of, parallel, server_flags
from trl_atropos.recipe import Recipe
from trl_atropos.recipe_files import read_yaml
from trl_atropos.server.launch import vllm_arguments
from trl_atropos.weights.model_setup import drops_soft_cap

# Defaults of vLLM, which need not be installed here. tests/check/test_check.py compares them.
UTILIZATION = 0.92  # of `--gpu-memory-utilization`
LENGTH_WITHOUT_POSITIONS = 2048  # tokens: `max_model_len` for BLOOM or Mamba
# of the numbers in its flags
UNITS = {"k": 10**3, "K": 1 << 10, "m": 10**6, "M": 1 << 20, "g": 10**9, "G": 1 << 30}
SHORT_NAMES = {"half": torch.float16, "float": torch.float32}  # of its `--dtype`
GIB = 1 << 30


def refused(look: Callable[[], Any], seen: str = "") -> Iterator[Finding]:
    """Yields the error of a check that the run makes, too. `seen` is for an error that has seen
    nothing itself."""
    try:
        look()
    except Finding as error:
        error.seen = error.seen or seen
        yield error


@dataclass(frozen=True)
class Launch:
    """The options of `check`."""

    device_memory_gb: float | None = None
    host_memory_gb: float | None = None
    devices: int | None = None
    config_file: str | None = None
    num_processes: int | None = None
    num_machines: int | None = None

    @cached_property
    def content(self) -> dict[str, Any]:
        """Accelerate's YAML. Raises `AtroposTrainingError` if it cannot be read."""
        if self.config_file is None:
            return {}
        try:
            content = dict(read_yaml(self.config_file) or {})
            for name in ("num_processes", "num_machines"):
                content[name] = int(content.get(name) or 0)
            parallelism = dict(content.get("parallelism_config") or {})
            content["sp_size"] = int(parallelism.get("parallelism_config_sp_size") or 1)
        except (OSError, UnicodeError, yaml.YAMLError, TypeError, ValueError) as error:
            what = "`--config_file` cannot be read as accelerate's YAML"
            seen = f"{self.config_file}: {' '.join(str(error).split())}"
            fix = "Name the file that `accelerate launch` gets."
            raise Finding(what, seen, fix, "launch-file") from error
        return content

    @property
    def processes(self) -> int | None:
        """Processes of the trainer on all machines, or `None` if nothing says it."""
        stated = self.num_processes or self.content.get("num_processes")
        if stated:
            return stated
        world = int(os.environ.get("WORLD_SIZE", 1))
        return world if world > 1 else None

    @property
    def sp_size(self) -> int:
        """Processes that divide rows among them."""
        return self.content.get("sp_size", 1)

    @property
    def shares(self) -> int | None:
        """Shares of a generation batch, or `None` if nothing says how many. Processes that divide
        rows have one share."""
        if self.processes is None:
            return None
        return self.processes // self.sp_size

    @property
    def machines(self) -> int:
        return self.num_machines or self.content.get("num_machines") or 1

    @property
    def elsewhere(self) -> bool:
        """True if the run will be on another machine than this one, which has no GPU."""
        return bool(self.device_memory_gb or self.devices) and not torch.cuda.is_available()


@dataclass(frozen=True)
class Plan:
    """The machine and the processes that a run is planned for."""

    device: str  # "cuda" or "cpu"
    total: int  # bytes of one device's memory; on the CPU, of the machine's
    processes: int = 1  # of the trainer, one per device
    local: int = 1  # processes of the trainer on one machine
    sharding: str = "none"  # or DDP; "zero1", "zero2", "zero3", "fsdp"
    offloads: bool = False  # the optimizer's state is in host memory
    offloads_weights: bool = False  # so are the weights, but for those that are gathered
    # what operators compute in, if not the parameters' dtype
    mixed_precision: torch.dtype | None = None
    # bytes of a machine's own memory, if that is known and is not the device's
    host: int | None = None
    sp_size: int = 1  # processes that divide each row

    @property
    def shards(self) -> int:
        """Processes among which the optimizer's state is divided."""
        return 1 if self.sharding == "none" else self.processes

    @property
    def divides_gradients(self) -> bool:
        return self.sharding in ("zero2", "zero3", "fsdp")

    @property
    def divides_weights(self) -> bool:
        return self.sharding in ("zero3", "fsdp")


def plan_of(training: Any, launch: Launch) -> Plan | None:
    """Returns the plan of a run, or `None` if it is for a GPU of which nothing is known: none is
    here, though torch could use one."""
    content = launch.content
    gib = launch.device_memory_gb
    on_cpu = training.use_cpu or bool(content.get("use_cpu"))
    if gib is not None:
        device = "cpu" if on_cpu else "cuda"
        total = int(gib * GIB)
    elif torch.cuda.is_available() and not on_cpu:
        device = "cuda"
        total = torch.cuda.get_device_properties(0).total_memory
    elif on_cpu or torch.version.cuda is None:
        device = "cpu"
        total = psutil.virtual_memory().total
    else:
        return None
    host = None
    if device == "cuda" and launch.host_memory_gb:
        host = int(launch.host_memory_gb * GIB)
    elif device == "cuda" and not launch.elsewhere:
        host = psutil.virtual_memory().total
    processes = launch.processes or training.world_size
    sharding, offloads, offloads_weights = _sharding(content, training)
    return Plan(
        device=device,
        total=total,
        processes=processes,
        local=_local(processes, launch),
        sharding=sharding,
        offloads=offloads,
        offloads_weights=offloads_weights,
        mixed_precision=_mixed_precision(content, training),
        host=host,
        sp_size=launch.sp_size,
    )


def _local(processes: int, launch: Launch) -> int:
    """Returns the most processes of the trainer that one machine has."""
    return math.ceil(processes / launch.machines)


def _mixed_precision(content: dict[str, Any], training: Any) -> torch.dtype | None:
    name = content.get("mixed_precision")
    if training.bf16:
        name = "bf16"
    elif training.fp16:
        name = "fp16"
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name)


def _sharding(content: dict[str, Any], training: Any) -> tuple[str, bool, bool]:
    """Returns `Plan.sharding`, `offloads` and `offloads_weights`: what accelerate's file says, or
    else the recipe."""
    kind = content.get("distributed_type")
    if kind == "FSDP" or training.fsdp:
        settings = content.get("fsdp_config", {})
        offloads = bool(settings.get("fsdp_offload_params"))
        return "fsdp", offloads, offloads
    stated = {}
    if kind == "DEEPSPEED":
        stated = content.get("deepspeed_config", {})
    file = stated.get("deepspeed_config_file") or training.deepspeed
    if file:
        config = HfDeepSpeedConfig(file).config
        zero = config.get("zero_optimization", {})
        stage = zero.get("stage", 0)
        optimizer = zero.get("offload_optimizer", {}).get("device")
        weights = zero.get("offload_param", {}).get("device")
    else:
        stage = stated.get("zero_stage", 0)
        optimizer = stated.get("offload_optimizer_device")
        weights = stated.get("offload_param_device")
    if not stage:
        return "none", False, False
    offloads = optimizer not in (None, "none")
    offloads_weights = weights not in (None, "none")
    return f"zero{stage}", offloads, offloads_weights


def layout(recipe: Recipe, launch: Launch) -> Iterator[Finding]:
    """Yields a finding if processes and servers do not fit each other, or need more GPUs than
    there are."""
    training = recipe.training
    if training.replay_paths is not None:
        return
    if training.mode.shares_memory and launch.sp_size == 1:  # otherwise it is refused
        yield from _colocated(training, launch)
    gpus = launch.devices or torch.cuda.device_count()
    if training.use_cpu or not gpus:  # nothing is known of the GPUs
        return
    for seen, fix in _too_few(recipe, launch, gpus):
        what = "There are fewer GPUs than the run needs"
        fix = f"{fix}, or tell `--devices` how many GPUs the machine of the run has."
        yield Finding(what, f"{seen}, {gpus} GPUs", fix, "gpu-layout")


def _colocated(training: Any, launch: Launch) -> Iterator[Finding]:
    """Yields what does not fit `vllm_mode: colocate`."""
    servers = len(training.vllm_server_urls)
    kind = launch.content.get("distributed_type")
    if kind in ("DEEPSPEED", "FSDP"):
        what = (
            "`vllm_mode: colocate` trains the server's own memory in place, which cannot be sharded"
        )
        seen = f"distributed_type: {kind} in {launch.config_file}"
        fix = (
            "Launch with configs/accelerate/ddp.yaml, which does not shard, or use `vllm_mode: "
            "server`."
        )
        yield Finding(what, seen, fix, "sharded-colocate")
    elif launch.processes not in (None, servers):
        what = "With `vllm_mode: colocate` every process trains the memory of a server of its own"
        seen = f"{launch.processes} processes, {servers} servers"
        fix = (
            "List one URL per process in `vllm_server_base_url`, or launch with `--num_processes "
            f"{servers}`."
        )
        yield Finding(what, seen, fix, "processes-servers")


def _too_few(recipe: Recipe, launch: Launch, gpus: int) -> Iterator[tuple[str, str]]:
    """Yields what needs more than the `gpus` of a machine, and what to do about it."""
    local = _local(launch.processes or 1, launch)
    if local > gpus:
        seen = f"{local} processes of the trainer on a machine"
        yield seen, "Launch with fewer `--num_processes`"
    if not recipe.services.start_vllm:
        return
    flags = recipe.vllm_flags()
    servers = len(recipe.training.vllm_server_urls)
    each_has_a_gpu = recipe.training.mode.shares_memory and servers > 1
    if each_has_a_gpu and servers > gpus:
        yield f"{servers} servers, each on a GPU", "List fewer servers"
    parts, part_flags = parallel(flags)
    allowed = 1 if each_has_a_gpu else gpus
    if parts > allowed:
        yield f"{part_flags} in `vllm_args`", "Lower it"
    stated = server_flags(flags).get("--gpu-memory-utilization")
    share = number_of(stated) or UTILIZATION
    if not each_has_a_gpu and servers > 1 and share * servers > 1:
        seen = f"{servers} servers x `--gpu-memory-utilization` {share:g} on one GPU"
        fix = (
            "Start them by hand with `trl-atropos serve`, each with a `CUDA_VISIBLE_DEVICES` of "
            "its own"
        )
        yield seen, fix


# ------------------------------------------------------------------------- the model and its server


@dataclass(frozen=True)
class Case:
    """A run whose memory is estimated."""

    recipe: Recipe
    plan: Plan
    config: PretrainedConfig
    # of the server, if the run starts it; `None` if recorded rollouts are replayed
    flags: dict[str, str] | None
    peft_config: Any
    # shared by cases that differ in few settings
    traces: dict = field(default_factory=dict, repr=False)
    # by kind of layer: what it keeps less if it is compiled, whether it is checkpointed or not
    spared: dict = field(default_factory=dict, repr=False)

    @property
    def training(self):
        return self.recipe.training

    @property
    def trains_with_masters(self) -> bool:
        """True if float32 masters are kept for a model in 16 bits, as `AtroposGRPOTrainer`
        decides."""
        if not self.training.master_weights or self.plan.sharding != "none":
            return False
        return self.peft_config is None or self.plan.mixed_precision is None

    @property
    def model_settings(self) -> dict[str, Any]:
        """Arguments of `from_config`. Attention is torch's own, which keeps what FlashAttention's
        kernels keep."""
        settings = {"trust_remote_code": self.training.trust_remote_code}
        attention = self.recipe.model.attn_implementation or "sdpa"
        if attention == "eager" or drops_soft_cap(self.config, attention):
            settings["attn_implementation"] = "eager"
        return settings

    def whole(self, flag: str, default: int) -> int:
        """Returns a flag of the server as vLLM takes it: `16k` is 16,000, `16K` 16,384. For `auto`
        and -1, which leave the number to vLLM, returns the default."""
        if self.flags is None:
            return default
        text = self.flags.get(f"--{flag}", "auto")
        if text in ("auto", "-1"):
            return default
        unit = text[-1:]
        if unit in UNITS:
            number = float(text[:-1])
            return int(number * UNITS[unit])
        return int(float(text))

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest rollout that the server samples."""
        positions = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        if positions is None:
            positions = LENGTH_WITHOUT_POSITIONS
        return self.whole("max-model-len", positions)

    @property
    def parts(self) -> int:
        """GPUs among which the server's weights are divided."""
        tensor_parallel = self.whole("tensor-parallel-size", 1)
        pipeline_parallel = self.whole("pipeline-parallel-size", 1)
        return tensor_parallel * pipeline_parallel

    @property
    def kv_cache_bytes(self) -> int | None:
        """Size of the server's KV cache, if a flag gives it."""
        return self.whole("kv-cache-memory-bytes", 0) or self.whole("kv-cache-memory", 0) or None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the trainer's weights, as TRL chooses it. With `colocate` it is the server's,
        with DeepSpeed the one that it computes in."""
        if self.plan.sharding.startswith("zero") and self.plan.mixed_precision is not None:
            return self.plan.mixed_precision
        if self.flags is not None and self.training.mode.shares_memory:
            return self.served_dtype
        kwargs = self.training.model_init_kwargs or {}
        stated = kwargs.get("dtype", self.recipe.model.dtype)
        name = str(stated).removeprefix("torch.")
        if name == "auto":
            return self.config.dtype or torch.float32
        return getattr(torch, name)

    @property
    def served_dtype(self) -> torch.dtype:
        """Dtype of the server's weights. `auto` is the checkpoint's, and 16-bit for float32 ones
        (vllm/config/model.py, `_resolve_auto_dtype`)."""
        stated = self.flags.get("--dtype", "auto")
        if stated != "auto":
            return SHORT_NAMES.get(stated) or getattr(torch, stated)
        dtype = self.config.get_text_config().dtype or self.config.dtype
        if dtype in (None, torch.float32):
            return torch.bfloat16
        return dtype

    @property
    def length(self) -> int:
        """Tokens of the longest rollout."""
        return self.training.max_sequence_length or self.max_model_len

    @property
    def slice_length(self) -> int:
        """Tokens of the longest rollout that one process computes. With `sp_size`, others compute
        the rest."""
        return math.ceil(self.length / self.plan.sp_size)

    @property
    def chooses_token_budget(self) -> bool:
        return self.plan.device == "cuda" and self.training.chooses_token_budget

    @property
    def rollouts(self) -> int:
        """Rollouts of the largest micro-batch."""
        rollouts = self.training.per_device_train_batch_size
        tokens = self.training.max_tokens_per_micro_batch
        if self.chooses_token_budget:
            tokens = FIRST_TOKENS
        if tokens is None:
            return rollouts
        return max(1, min(rollouts, tokens // self.length))

    @property
    def autocast(self) -> torch.dtype | None:
        """Dtype that operators compute in, if it is not the parameters'."""
        if self.plan.mixed_precision == self.dtype:
            return None
        return self.plan.mixed_precision

    @property
    def plain_attention(self) -> bool:
        """True if attention keeps its weights. CUDA's kernels for float32 know no groups of heads,
        which transformers leaves to them for rollouts of one length
        (transformers/integrations/sdpa_attention.py, `use_gqa_in_sdpa`)."""
        text = self.config.get_text_config()
        heads = getattr(text, "num_attention_heads", None)
        shared = getattr(text, "num_key_value_heads", None)
        computes_in = self.autocast or self.dtype
        in_float32 = self.plan.device == "cuda" and computes_in == torch.float32
        return in_float32 and shared not in (None, heads)

    @property
    def packs(self) -> bool:
        """True if rollouts are packed into rows, as far as the settings tell."""
        if self.plan.sp_size > 1:
            return True
        return self.training.padding_free and not self.plain_attention

    @property
    def shares_weights(self) -> bool:
        """True if the trainer's parameters are the server's memory, as far as the settings tell."""
        return self.training.mode.shares_memory and self.flags is not None and self.parts == 1


def case_of(recipe: Recipe, plan: Plan) -> Case:
    """Returns the case of a recipe. Raises `OSError` or `ValueError` if the model's config cannot
    be read."""
    model = recipe.model.model_name_or_path
    config = AutoConfig.from_pretrained(
        model,
        revision=recipe.model.model_revision,
        trust_remote_code=recipe.training.trust_remote_code,
    )
    flags = None
    if recipe.training.replay_paths is None:
        cpu = plan.device == "cpu"
        stated = []  # a server that the run does not start has flags of its own
        if recipe.services.start_vllm:
            stated = recipe.vllm_flags()
        arguments = vllm_arguments(model, stated, cpu=cpu, mode=recipe.training.vllm_mode)
        flags = server_flags(arguments)
        cache = os.environ.get("VLLM_CPU_KVCACHE_SPACE")
        if cpu and cache:  # comes first, and is GiB
            flags["--kv-cache-memory-bytes"] = str(int(cache) << 30)
    peft_config = get_peft_config(recipe.model)
    return Case(recipe, plan, config, flags, peft_config)
