"""What the estimate is made from: a recipe, a model's config and a plan, brought to the same terms."""

import os
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig
from trl import get_peft_config

from trl_atropos.flags import server_flags as flags_of
from trl_atropos.memory.plan import Plan
from trl_atropos.recipe import Recipe
from trl_atropos.server.launch import vllm_arguments
from trl_atropos.weights.probe import drops_soft_cap

# vLLM's defaults for a server: (bytes of the device, tokens of a batch, sequences of a batch)
# (vllm/engine/arg_utils.py, `get_batch_defaults`).
BATCH_DEFAULTS = ((160 << 30, 16384, 1024), (70 << 30, 8192, 1024), (0, 2048, 256))
CPU_BATCH = (2048, 128)
UTILIZATION = 0.92  # vllm/config/cache.py


@dataclass(frozen=True)
class Process:
    """
    Attributes:
        items: Bytes on the device at the peak, by name.
        host: Bytes of host memory besides.
        when: In which phase the peak is.
    """

    name: str
    items: dict[str, int]
    host: dict[str, int]
    when: str

    @property
    def total(self) -> int:
        return sum(self.items.values())


@dataclass(frozen=True)
class ServerFlags:
    """Of the server that the recipe starts, or one started by hand with the same flags."""

    dtype: torch.dtype
    max_model_len: int
    utilization: float
    kv_cache_bytes: int | None  # where the size is given
    tensor_parallel: int
    pipeline_parallel: int
    batched_tokens: int
    sequences: int
    max_loras: int  # 0 without adapters
    max_cpu_loras: int
    max_lora_rank: int


@dataclass(frozen=True)
class Case:
    recipe: Recipe
    plan: Plan
    config: PretrainedConfig
    server: ServerFlags | None  # None where recorded rollouts are replayed
    dtype: torch.dtype  # of the trainer's parameters
    peft_config: Any

    @property
    def training(self):
        return self.recipe.training

    @property
    def model_settings(self) -> dict[str, Any]:
        """Arguments of `from_config`. Attention is torch's own, which keeps what FlashAttention's kernels keep."""
        asked = self.recipe.model.attn_implementation or "sdpa"
        eager = asked == "eager" or drops_soft_cap(self.config, asked)
        options = {"attn_implementation": "eager"} if eager else {}
        return {"trust_remote_code": self.training.trust_remote_code, **options}

    @property
    def groups_heads(self) -> bool:
        """Whether several heads of the attention share their keys and values."""
        text = self.config.get_text_config()
        # Not every config has them.
        shared, heads = (getattr(text, name, None) for name in ("num_key_value_heads", "num_attention_heads"))
        return shared not in (None, heads)

    @property
    def length(self) -> int:
        """Tokens of the longest sequence (`AtroposGRPOTrainer._max_sequence_length`)."""
        served = None if self.server is None else self.server.max_model_len
        return self.training.max_sequence_length or served or _longest(self.config)

    @property
    def rows(self) -> int:
        """Of the largest micro-batch."""
        rows, tokens = self.training.per_device_train_batch_size, self.training.max_tokens_per_micro_batch
        return rows if tokens is None else max(1, min(rows, tokens // self.length))

    @property
    def several_micro_batches(self) -> bool:
        return self.rows < self.training.per_device_train_batch_size

    @property
    def shares_weights(self) -> bool:
        """Whether the trainer's parameters are the server's memory, as far as the settings tell."""
        flags = self.server
        alone = flags is not None and flags.tensor_parallel * flags.pipeline_parallel == 1
        return self.training.vllm_mode == "colocate" and alone

    @property
    def starts_server(self) -> bool:
        """One that is started by hand may have other flags than the recipe's `vllm_args`, and other devices."""
        return self.server is not None and self.recipe.services.start_vllm


def case_of(recipe: Recipe, plan: Plan) -> Case:
    """Raises `OSError` or `ValueError` where the model's config cannot be had."""
    config = AutoConfig.from_pretrained(
        recipe.model.model_name_or_path,
        revision=recipe.model.model_revision,
        trust_remote_code=recipe.training.trust_remote_code,
    )
    server = None if recipe.training.replay_paths is not None else server_flags(recipe, plan, config)
    return Case(recipe, plan, config, server, _dtype(recipe, plan, config, server), get_peft_config(recipe.model))


def _longest(config: PretrainedConfig) -> int:
    return config.get_text_config().max_position_embeddings


def _dtype(recipe: Recipe, plan: Plan, config: PretrainedConfig, server: ServerFlags | None) -> torch.dtype:
    """As `train.train` and TRL choose it; with `colocate` it is the server's, with DeepSpeed what it computes in."""
    if plan.sharding.startswith("zero") and plan.mixed_precision is not None:
        return plan.mixed_precision
    kwargs = recipe.training.model_init_kwargs or {}
    stated = str(kwargs.get("dtype", recipe.model.dtype)).removeprefix("torch.")
    if server is not None and recipe.training.vllm_mode == "colocate":
        return server.dtype
    if stated == "auto":
        return config.dtype or torch.float32
    return getattr(torch, stated)


def server_flags(recipe: Recipe, plan: Plan, config: PretrainedConfig) -> ServerFlags:
    cpu = plan.device == "cpu"
    arguments = vllm_arguments(
        recipe.model.model_name_or_path, recipe.vllm_flags(), cpu=cpu, mode=recipe.training.vllm_mode
    )
    flags = {name.removeprefix("--"): value for name, value in flags_of(arguments).items()}
    tokens, sequences = next(pair for size, *pair in BATCH_DEFAULTS if plan.total >= size)
    if cpu:
        tokens, sequences = CPU_BATCH
    kv_cache = flags.get("kv-cache-memory-bytes") or flags.get("kv-cache-memory")
    if cpu and os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        kv_cache = int(os.environ["VLLM_CPU_KVCACHE_SPACE"]) << 30
    loras = "enable-lora" in flags
    return ServerFlags(
        dtype=_served_dtype(flags.get("dtype", "auto"), config),
        max_model_len=_whole(flags.get("max-model-len"), _longest(config)),
        utilization=float(flags.get("gpu-memory-utilization", UTILIZATION)),
        kv_cache_bytes=None if kv_cache is None else _whole(kv_cache, 0),
        tensor_parallel=int(flags.get("tensor-parallel-size", 1)),
        pipeline_parallel=int(flags.get("pipeline-parallel-size", 1)),
        batched_tokens=_whole(flags.get("max-num-batched-tokens"), tokens),
        sequences=_whole(flags.get("max-num-seqs"), sequences),
        max_loras=int(flags.get("max-loras", 1)) if loras else 0,
        max_cpu_loras=int(flags.get("max-cpu-loras", 1)) if loras else 0,
        max_lora_rank=int(flags.get("max-lora-rank", 16)),
    )


def _served_dtype(stated: str, config: PretrainedConfig) -> torch.dtype:
    """`auto` is the checkpoint's, and 16-bit for float32 ones (vllm/config/model.py, `_resolve_auto_dtype`)."""
    if stated == "auto":
        own = config.get_text_config().dtype or config.dtype or torch.float32
        return torch.bfloat16 if own == torch.float32 else own
    return {"half": torch.float16, "float": torch.float32}.get(stated) or getattr(torch, stated)


def _whole(value: Any, default: int) -> int:
    """A number as vLLM takes it: `16k` is 16,000, `16K` 16,384. It chooses `auto` and -1 itself."""
    if value is None or value in ("auto", "-1"):
        return default
    text = str(value)
    units = {"k": 10**3, "K": 1 << 10, "m": 10**6, "M": 1 << 20, "g": 10**9, "G": 1 << 30}
    return int(float(text[:-1]) * units[text[-1]]) if text[-1:] in units else int(float(text))
