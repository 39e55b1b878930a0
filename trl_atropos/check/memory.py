"""How much memory trainer and server of a run take at their peaks, by its recipe and its model's config alone: what
`trace.py` finds of a forward and backward pass, and sums."""

import math
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig
from trl import get_peft_config

from trl_atropos.batches.micro_batches import FIRST
from trl_atropos.check.launch import GIB, UTILIZATION, Plan
from trl_atropos.check.trace import GRADIENTS, Sizes, shadow_model, trace
from trl_atropos.protocol import server_flags
from trl_atropos.recipe import Recipe
from trl_atropos.server.launch import vllm_arguments
from trl_atropos.weights.probe import drops_soft_cap

# vLLM's defaults for a server: (bytes of the device, tokens of a batch, sequences of a batch)
# (vllm/engine/arg_utils.py, `get_batch_defaults`).
BATCH_DEFAULTS = ((160 << 30, 16384, 1024), (70 << 30, 8192, 1024), (0, 2048, 256))
CPU_BATCH = (2048, 128)
PADDING = 64  # vLLM pads a vocabulary to a multiple of it (vllm `vocab_parallel_embedding.py`)
# What a process takes before it has a model. CUDA: context, workspaces, NCCL, CUDA graphs. CPU: the libraries.
TRAINER_RUNTIME = {"cuda": int(0.7 * GIB), "cpu": int(0.75 * GIB)}
SERVER_RUNTIME = {"cuda": int(1.5 * GIB), "cpu": GIB}
BUCKET = 500_000_000  # values in DeepSpeed's `reduce_bucket_size`, of which `overlap_comm` has two
# Tensors of the parameter's size that each family keeps (torch.optim; bitsandbytes.optim; transformers.optimization).
BUFFERS = {"ademamix": 3, "adam": 2, "lion": 1, "rmsprop": 1, "adagrad": 1, "sgd": 0, "lomo": 0, "adafactor": 0}
BLOCK = 256  # values that share one fp32 scale (bitsandbytes/optim/optimizer.py, `blocksize`)
SMALLEST = 4096  # values below which bitsandbytes keeps fp32 (its `min_8bit_size`)
UNITS = {"k": 10**3, "K": 1 << 10, "m": 10**6, "M": 1 << 20, "g": 10**9, "G": 1 << 30}  # of numbers in vLLM's flags


@dataclass(frozen=True)
class Case:
    """What is estimated."""

    recipe: Recipe
    plan: Plan
    config: PretrainedConfig
    flags: dict[str, str] | None  # of the server, if the run starts it; `None` where recorded rollouts are replayed
    peft_config: Any
    traces: dict = field(default_factory=dict, repr=False)  # shared by cases that differ in few settings

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

    def whole(self, flag: str, default: int) -> int:
        """A flag of the server as vLLM takes it: `16k` is 16,000, `16K` 16,384. It chooses `auto` and -1 itself."""
        text = (self.flags or {}).get(f"--{flag}", "auto")
        if text in ("auto", "-1"):
            return default
        return int(float(text[:-1]) * UNITS[text[-1]]) if text[-1:] in UNITS else int(float(text))

    @property
    def max_model_len(self) -> int:
        return self.whole("max-model-len", self.config.get_text_config().max_position_embeddings)

    @property
    def parts(self) -> int:
        """Among how many GPUs the server's weights are divided."""
        return self.whole("tensor-parallel-size", 1) * self.whole("pipeline-parallel-size", 1)

    @property
    def kv_cache_bytes(self) -> int | None:
        """The size of the server's KV cache, if it is given."""
        return self.whole("kv-cache-memory-bytes", 0) or self.whole("kv-cache-memory", 0) or None

    @property
    def dtype(self) -> torch.dtype:
        """The trainer's, as TRL chooses it; with `colocate` the server's, with DeepSpeed what it computes in."""
        if self.plan.sharding.startswith("zero") and self.plan.mixed_precision is not None:
            return self.plan.mixed_precision
        if self.flags is not None and self.training.vllm_mode == "colocate":
            return self.served_dtype
        kwargs = self.training.model_init_kwargs or {}
        stated = str(kwargs.get("dtype", self.recipe.model.dtype)).removeprefix("torch.")
        return self.config.dtype or torch.float32 if stated == "auto" else getattr(torch, stated)

    @property
    def served_dtype(self) -> torch.dtype:
        """`auto` is the checkpoint's, and 16-bit for float32 ones (vllm/config/model.py, `_resolve_auto_dtype`)."""
        stated = self.flags.get("--dtype", "auto")
        if stated == "auto":
            own = self.config.get_text_config().dtype or self.config.dtype or torch.float32
            return torch.bfloat16 if own == torch.float32 else own
        return {"half": torch.float16, "float": torch.float32}.get(stated) or getattr(torch, stated)

    @property
    def length(self) -> int:
        """Tokens of the longest rollout."""
        return self.training.max_sequence_length or self.max_model_len

    @property
    def chooses_token_budget(self) -> bool:
        return self.plan.device == "cuda" and self.training.chooses_token_budget

    @property
    def rollouts(self) -> int:
        """How many the largest micro-batch has."""
        rollouts, tokens = self.training.per_device_train_batch_size, self.training.max_tokens_per_micro_batch
        if self.chooses_token_budget:
            tokens = FIRST
        return rollouts if tokens is None else max(1, min(rollouts, tokens // self.length))

    @property
    def autocast(self) -> torch.dtype | None:
        """What operators compute in, if not the parameters' dtype."""
        return self.plan.mixed_precision if self.plan.mixed_precision != self.dtype else None

    @property
    def plain_attention(self) -> bool:
        """Whether attention keeps its weights. CUDA's kernels for float32 know no groups of heads, which transformers
        leaves to them for rollouts of one length (transformers/integrations/sdpa_attention.py, `use_gqa_in_sdpa`)."""
        text = self.config.get_text_config()
        shared, heads = (getattr(text, name, None) for name in ("num_key_value_heads", "num_attention_heads"))
        in_float32 = self.plan.device == "cuda" and (self.autocast or self.dtype) == torch.float32
        return in_float32 and shared not in (None, heads)

    @property
    def shares_weights(self) -> bool:
        """Whether the trainer's parameters are the server's memory, as far as the settings tell."""
        return self.training.vllm_mode == "colocate" and self.flags is not None and self.parts == 1


def case_of(recipe: Recipe, plan: Plan) -> Case:
    """Raises `OSError` or `ValueError` if the model's config cannot be read."""
    training, model = recipe.training, recipe.model
    config = AutoConfig.from_pretrained(
        model.model_name_or_path, revision=model.model_revision, trust_remote_code=training.trust_remote_code
    )
    flags = None
    if training.replay_paths is None:
        cpu = plan.device == "cpu"
        own = recipe.vllm_flags() if recipe.services.start_vllm else []  # another server has flags of its own
        given = vllm_arguments(model.model_name_or_path, own, cpu=cpu, mode=training.vllm_mode)
        flags = server_flags(given)
        if cpu and os.environ.get("VLLM_CPU_KVCACHE_SPACE"):  # comes first, and is GiB
            flags["--kv-cache-memory-bytes"] = str(int(os.environ["VLLM_CPU_KVCACHE_SPACE"]) << 30)
    return Case(recipe, plan, config, flags, get_peft_config(model))


@dataclass(frozen=True)
class Process:
    name: str
    items: dict[str, int]  # bytes on the device at the peak, by name
    host: dict[str, int]  # bytes of host memory besides
    when: str = "always"  # the phase of the peak

    @property
    def total(self) -> int:
        return sum(self.items.values())


# ------------------------------------------------------------------------------------------------------- the trainer


def trainer_memory(case: Case) -> Process:
    args, plan = case.training, case.plan
    half = case.dtype in (torch.bfloat16, torch.float16)
    # As `AtroposGRPOTrainer` does; PEFT keeps adapters in float32.
    exact = args.master_weights and half and case.peft_config is None and plan.sharding == "none"
    size = case.rollouts, args.per_device_train_batch_size, args.gradient_accumulation_steps
    key = (size, args.gradient_checkpointing, repr(case.peft_config))
    if key not in case.traces:
        model, mode = shadow_model(case.config, case.dtype, case.peft_config, **case.model_settings)
        case.traces[key] = (Sizes.of(model), trace(model, mode, case, exact))
    sizes, peak = case.traces[key]
    constant, host = _state(case, sizes, exact)
    gradients = sum(one.numel() * (4 if exact else one.itemsize) for one in sizes.trained)
    if plan.sharding in ("zero2", "zero3", "fsdp"):
        gradients //= plan.processes
        peak = peak | {GRADIENTS: min(peak[GRADIENTS], gradients)}
    step = {GRADIENTS: gradients}
    if "optimizer state" not in host:
        step["temporaries"] = _step_bytes(args.optim, sizes.trained, exact, plan.device) // plan.shards
    phases = {"forward and backward": constant | peak, "the optimizer's step": constant | step}
    if plan.device == "cpu":  # which is the host
        phases = {when: Counter(items) + Counter(host) for when, items in phases.items()}
        # The checkpoint is loaded before it is exchanged for the server's memory.
        phases["loading"] = {"runtime": TRAINER_RUNTIME["cpu"], "weights": sizes.weights}
        host = {}
    when = max(phases, key=lambda name: sum(phases[name].values()))
    return Process("trainer", {name: size for name, size in phases[when].items() if size}, host, when)


def _state(case: Case, sizes: Sizes, exact: bool) -> tuple[dict[str, int], dict[str, int]]:
    """What is there from step to step, on the device and in host memory."""
    args, plan, adapts = case.training, case.plan, case.peft_config is not None
    sharded = plan.sharding in ("zero3", "fsdp")
    weights = sizes.weights // (plan.processes if sharded else 1)
    items = {"runtime": TRAINER_RUNTIME[plan.device], "weights": weights}
    if case.shares_weights:  # the base model's are the server's
        items["weights"] = sizes.own if adapts else 0
    host = {"weights": items.pop("weights")} if plan.offloads_weights else {}
    if sharded:
        items["gathered weights"] = sizes.gathered
    if args.beta != 0 and not adapts:  # TRL loads the model once more
        items["reference model"] = weights
    if plan.processes > 1 and plan.sharding == "none":  # a copy of all (torch's `gradient_as_bucket_view` is off)
        items["buckets of DDP"] = sizes.own
    elif plan.processes > 1 and plan.sharding != "fsdp":
        items["buckets of DeepSpeed"] = 2 * min(sizes.number, BUCKET) * case.dtype.itemsize
    # DeepSpeed has its own for 16-bit parameters (ZeRO, arXiv:1910.02054, section 3.1).
    masters = exact or (plan.sharding.startswith("zero") and case.dtype.itemsize == 2)
    of_optimizer = {
        "master weights": 4 * sizes.number // plan.shards if masters else 0,
        "optimizer state": state_bytes(args.optim, sizes.trained, masters, sizes.embeddings) // plan.shards,
    }
    if (exact and args.offload_master_weights) or plan.offloads:
        host |= of_optimizer
        if plan.device == "cuda":
            host["gradients for the step"] = 4 * sizes.number // plan.shards
        return items, host
    if "paged" in args.optim:  # the driver moves it to the host when the device is full
        host["optimizer state"] = of_optimizer.pop("optimizer state")
    return items | of_optimizer, host


def state_bytes(optim: str, parameters: Iterable[torch.Tensor], masters: bool, embeddings: set[int]) -> int:
    """Bytes of the optimizer's state, by default AdamW's. With `masters`, it works on fp32 copies of 16-bit ones.
    bitsandbytes keeps `embeddings` (their `id`s) in 32 bits."""
    buffers = next((number for name, number in BUFFERS.items() if name in optim), 2)
    total = 0.0
    for parameter in parameters:
        if "adafactor" in optim:  # one value per row and one per column
            total += 4 * sum(parameter.shape[-2:]) * math.prod(parameter.shape[:-2])
        elif "8bit" in optim and parameter.numel() >= SMALLEST and id(parameter) not in embeddings:
            total += buffers * parameter.numel() * (1 + 4 / BLOCK)
        else:
            # torch's are of the parameter's dtype, bitsandbytes' always 4 bytes.
            wide = masters or "bit" in optim or "bnb" in optim
            total += buffers * parameter.numel() * (4 if wide else parameter.itemsize)
    return int(total)


def _step_bytes(optim: str, parameters: list[torch.Tensor], masters: bool, device: str) -> int:
    """Bytes that a step allocates besides. Only torch's plain AdamW does: the roots of the second moments, of all
    parameters at once on a GPU (`foreach`), of one after the other on the CPU (torch/optim/adam.py)."""
    sizes = [one.numel() * (4 if masters else one.itemsize) for one in parameters if optim == "adamw_torch"]
    return sum(sizes) if device == "cuda" else 2 * max(sizes, default=0)


# -------------------------------------------------------------------------------------------------------- the server


def server_memory(case: Case) -> Process:
    """With `gpu_memory_utilization`, the KV cache gets what is left of that share of the device."""
    plan, text, size = case.plan, case.config.get_text_config(), case.served_dtype.itemsize
    on_gpu = next((tokens, sequences) for memory, tokens, sequences in BATCH_DEFAULTS if plan.total >= memory)
    tokens, sequences = on_gpu if plan.device == "cuda" else CPU_BATCH
    tokens, sequences = case.whole("max-num-batched-tokens", tokens), case.whole("max-num-seqs", sequences)
    if "server" not in case.traces:
        case.traces["server"] = _served_sizes(case)
    weights, adapter = case.traces["server"]
    adapter *= ("--enable-lora" in case.flags) * case.whole("max-lora-rank", 16)
    # In a layer's MLP: the hidden states and their sum, gate, up and their product.
    width = 2 * text.hidden_size + 3 * (getattr(text, "intermediate_size", None) or 4 * text.hidden_size)
    items = {
        "runtime": SERVER_RUNTIME[plan.device],
        "weights": weights // case.parts,
        # Sampling makes float32 of the logits, and their log-probabilities (vllm/v1/sample/sampler.py).
        "activations": tokens * width * size // case.whole("tensor-parallel-size", 1)
        + 2 * 4 * sequences * text.vocab_size,
        "places for adapters": case.whole("max-loras", 1) * adapter // case.parts,
    }
    host = {"adapters": case.whole("max-cpu-loras", 1) * adapter}
    if plan.device == "cpu":
        items["places for adapters"] += host.pop("adapters")
    elif case.training.vllm_enable_sleep_mode and case.training.vllm_sleep_level == 1:
        host["weights, asleep"] = items["weights"]
    share = float(case.flags.get("--gpu-memory-utilization", UTILIZATION))
    left = max(0, int(share * plan.total) - sum(items.values()))
    items["KV cache"] = left if case.kv_cache_bytes is None else case.kv_cache_bytes
    return Process("server", {name: size for name, size in items.items() if size}, host)


def _served_sizes(case: Case) -> tuple[int, int]:
    """Bytes of the model's weights as vLLM keeps them, and of an adapter for each of its ranks."""
    model, _mode = shadow_model(case.config, case.served_dtype, **case.model_settings)
    head = model.get_output_embeddings()
    ends = {id(one.weight): one.weight for one in (model.get_input_embeddings(), head)}
    padding = sum(-weight.shape[0] % PADDING * weight.shape[1] * weight.itemsize for weight in ends.values())
    # Of every linear layer but the head (vllm/lora/layers/base_linear.py, `create_lora_weights`).
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    adapter = sum(m.in_features + m.out_features for m in linear) * case.served_dtype.itemsize
    return padding + sum(parameter.nbytes for parameter in model.parameters()), adapter


def smallest_cache(case: Case) -> int:
    """Bytes of KV cache per device that one rollout of the greatest length takes, below which vLLM does not start."""
    text = case.config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads  # only some configs have it
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * heads * head * case.served_dtype.itemsize * case.max_model_len // case.parts
