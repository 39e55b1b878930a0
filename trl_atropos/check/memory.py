"""Estimates the memory that a run's trainer and server take at their peaks, by its recipe and its
model's config alone.

`fit.py` calls `trainer_memory`, `server_memory` and `smallest_cache`. Most of it is sums. What a
forward and backward pass takes is traced (`shadow.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trl_atropos.check.launch import GIB, UTILIZATION, Case, Plan
from trl_atropos.check.shadow import (
    ACTIVATIONS,
    GRADIENTS,
    OFFLOADED,
    Items,
    Sizes,
    checkpointing_options,
    shadow_model,
    total_bytes,
    trace,
)
from trl_atropos.weights.masters import HALF, gradients_in_flight
from trl_atropos.weights.optimizer_state import TORCHS_OWN, state_bytes

TEMPORARIES = "temporaries"
PASSING = (ACTIVATIONS, GRADIENTS, TEMPORARIES)  # items that are gone when a step is over

# vLLM's defaults for a server with a device of so many GiB, or more: (tokens, sequences) of a batch
# (vllm/engine/arg_utils.py, `get_batch_defaults`).
BATCH_DEFAULTS = {
    160: (16384, 1024),
    70: (8192, 1024),
    0: (2048, 256),
}
CPU_BATCH = (2048, 128)
PADDING = 64  # vLLM pads a vocabulary to a multiple of it (vllm `vocab_parallel_embedding.py`)
# What a process takes before it has a model. CUDA: context, workspaces, NCCL, CUDA graphs. CPU: the
# libraries.
TRAINER_RUNTIME = {
    "cuda": int(0.7 * GIB),
    "cpu": int(0.75 * GIB),
}
SERVER_RUNTIME = {
    "cuda": int(1.5 * GIB),
    "cpu": GIB,
}
BUCKET = 500_000_000  # values in DeepSpeed's `reduce_bucket_size`, of which `overlap_comm` has two


@dataclass(frozen=True)
class Process:
    """Holds what one process takes, in bytes by name."""

    name: str
    items: Items  # on the device, at the peak
    host: Items  # host memory besides
    when: str = "always"  # the phase of the peak

    @property
    def total(self) -> int:
        return sum(self.items.values())

    @property
    def host_total(self) -> int:
        return sum(self.host.values())

    @property
    def resting(self) -> int:
        """Bytes on the device that are left when a step is over."""
        left = self.total
        for name in PASSING:
            left -= self.items.get(name, 0)
        return left


# -------------------------------------------------------------------------------------- the trainer


def trainer_memory(case: Case) -> Process:
    """Returns the trainer's items in the phase in which it takes most."""
    # float32 masters and gradients
    exact = case.dtype in HALF and case.trains_with_masters
    sizes, traced = _traced(case, exact)
    constant, host = _constant_items(case, sizes, exact)
    peak = dict(traced)  # that of other cases, too
    host[OFFLOADED] = peak.pop(OFFLOADED)
    gradient_sizes = _gradient_sizes(sizes.trained, exact)
    gradients = sum(gradient_sizes)
    if case.plan.divides_gradients:
        gradients //= case.plan.processes
        peak[GRADIENTS] = min(peak[GRADIENTS], gradients)
    step = {GRADIENTS: gradients}
    if "optimizer state" not in host and case.training.optim == "adamw_torch":
        roots = _roots(gradient_sizes, case.plan)
        step[TEMPORARIES] = roots // case.plan.shards
    phases = {
        "forward and backward": constant | peak,
        "the optimizer's step": constant | step,
    }
    if case.plan.device == "cpu":  # which is the host
        for items in phases.values():
            _add(items, host)
        host = {}
        # The checkpoint is loaded before it is exchanged for the server's memory.
        phases["loading"] = {
            "runtime": TRAINER_RUNTIME["cpu"],
            "weights": sizes.weights,
        }
    when = _largest(phases)
    items = _without_zeros(phases[when])
    host = _without_zeros(host)
    return Process("trainer", items, host, when)


def _add(items: Items, others: Items) -> None:
    for name, size in others.items():
        items.setdefault(name, 0)
        items[name] += size


def _largest(phases: dict[str, Items]) -> str:
    """Returns the name of the phase that takes most."""
    totals = {}
    for name, items in phases.items():
        totals[name] = sum(items.values())
    return max(totals, key=totals.get)


def _without_zeros(items: Items) -> Items:
    kept = {}
    for name, size in items.items():
        if size:
            kept[name] = size
    return kept


def _traced(case: Case, exact: bool) -> tuple[Sizes, Items]:
    """Returns the model's sizes and the peak of a micro-batch, traced once for cases that have them
    in common."""
    args = case.training
    key = (
        case.rollouts,
        args.per_device_train_batch_size,
        args.gradient_accumulation_steps,
        args.gradient_checkpointing,
        repr(checkpointing_options(args)),
        repr(case.peft_config),
    )
    if key not in case.traces:
        model, mode = shadow_model(case, case.dtype, case.peft_config)
        sizes = Sizes.of(model)
        peak = trace(model, mode, case, exact)
        case.traces[key] = (sizes, peak)
    return case.traces[key]


def _constant_items(case: Case, sizes: Sizes, exact: bool) -> tuple[Items, Items]:
    """Returns the items that stay from step to step, on the device and in host memory."""
    args = case.training
    plan = case.plan
    items = {"runtime": TRAINER_RUNTIME[plan.device]}
    host = {}
    _add_weights(case, sizes, items, host)
    _add_buckets(case, sizes, items)
    optimizer = _optimizer_items(case, sizes, exact)
    has_masters_in_host = exact and args.offload_master_weights
    if has_masters_in_host or plan.offloads:
        host |= optimizer
        if plan.device == "cuda":
            staged = _staged_values(case, sizes, exact)
            size = 4 * staged  # float32
            host["gradients for the step"] = size // plan.shards
        return items, host
    if "paged" in args.optim:  # the driver moves it to the host when the device is full
        host["optimizer state"] = optimizer.pop("optimizer state")
    return items | optimizer, host


def _add_weights(case: Case, sizes: Sizes, items: Items, host: Items) -> None:
    """Adds the weights of the policy and of the reference model, on the device or in host
    memory."""
    plan = case.plan
    adapts = case.peft_config is not None
    weights = sizes.weights
    if plan.divides_weights:
        weights //= plan.processes
    own_weights = weights
    if case.shares_weights:  # the base model's are the server's
        own_weights = 0
        if adapts:
            own_weights = sizes.trained_bytes
    if plan.offloads_weights:
        host["weights"] = own_weights
    else:
        items["weights"] = own_weights
    if plan.divides_weights:
        items["gathered weights"] = sizes.gathered
    if case.training.beta != 0 and not adapts:  # TRL loads the model once more
        items["reference model"] = weights


def _add_buckets(case: Case, sizes: Sizes, items: Items) -> None:
    """Adds the buffers in which processes average their gradients."""
    plan = case.plan
    if plan.processes == 1 or plan.sharding == "fsdp":
        return
    if plan.sharding == "none":
        # a copy of all (torch's `gradient_as_bucket_view` is off)
        items["buckets of DDP"] = sizes.trained_bytes
    else:
        bucket = min(sizes.values, BUCKET)
        size = bucket * case.dtype.itemsize
        items["buckets of DeepSpeed"] = 2 * size


def _staged_values(case: Case, sizes: Sizes, exact: bool) -> int:
    """Returns how many gradients are in host memory at once, if the optimizer steps there."""
    steps_in_parts = exact and case.training.optim in TORCHS_OWN  # by `MasterOptimizer`
    if not steps_in_parts:
        return sizes.values
    counts = []
    for parameter in sizes.trained:
        counts.append(parameter.numel())
    return gradients_in_flight(counts)


def _optimizer_items(case: Case, sizes: Sizes, exact: bool) -> Items:
    plan = case.plan
    optim = case.training.optim
    # DeepSpeed has its own for 16-bit parameters (ZeRO, arXiv:1910.02054, section 3.1).
    of_deepspeed = plan.sharding.startswith("zero") and case.dtype.itemsize == 2
    has_masters = exact or of_deepspeed
    masters = 0
    if has_masters:
        masters = 4 * sizes.values
    state = state_bytes(optim, sizes.trained, has_masters, sizes.embeddings)
    return {
        "master weights": masters // plan.shards,
        "optimizer state": state // plan.shards,
    }


def _gradient_sizes(parameters: Sequence[torch.Tensor], exact: bool) -> list[int]:
    """Returns the bytes of each parameter's gradient."""
    sizes = []
    for parameter in parameters:
        size = parameter.nbytes
        if exact:
            size = 4 * parameter.numel()
        sizes.append(size)
    return sizes


def _roots(sizes: Sequence[int], plan: Plan) -> int:
    """Returns the bytes that a step of torch's plain AdamW, and of no other optimizer, allocates
    besides.

    These are the roots of the second moments: of all parameters at once on a GPU (`foreach`), of
    one after the other on the CPU (torch/optim/adam.py).
    """
    if plan.device == "cuda":
        return sum(sizes)
    largest = max(sizes, default=0)
    return 2 * largest


# --------------------------------------------------------------------------------------- the server


def server_memory(case: Case) -> Process:
    """Returns the server's items. With `--gpu-memory-utilization`, its KV cache gets what is left
    of that share of the device."""
    plan = case.plan
    if "server" not in case.traces:
        case.traces["server"] = _served_sizes(case)
    weights, of_rank = case.traces["server"]
    adapter = 0
    if "--enable-lora" in case.flags:
        rank = case.whole("max-lora-rank", 16)
        adapter = rank * of_rank
    adapters = case.whole("max-loras", 1) * adapter
    adapters_in_host = case.whole("max-cpu-loras", 1) * adapter
    items = {
        "runtime": SERVER_RUNTIME[plan.device],
        "weights": weights // case.parts,
        "activations": _served_activations(case),
        "places for adapters": adapters // case.parts,
    }
    host = {"adapters": adapters_in_host}
    if plan.device == "cpu":
        items["places for adapters"] += host.pop("adapters")
    elif case.training.vllm_enable_sleep_mode and case.training.vllm_sleep_level == 1:
        host["weights, asleep"] = items["weights"]
    cache = case.kv_cache_bytes
    if cache is None:
        share = case.flags.get("--gpu-memory-utilization", UTILIZATION)
        granted = int(float(share) * plan.total)
        rest = granted - sum(items.values())
        cache = max(0, rest)
    items["KV cache"] = cache
    return Process("server", _without_zeros(items), host)


def _served_sizes(case: Case) -> tuple[int, int]:
    """Returns the bytes of the model's weights as vLLM keeps them, and of an adapter for each of
    its ranks."""
    model, _mode = shadow_model(case, case.served_dtype)
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    weights = total_bytes(model.parameters())
    embeddings = {embedding.weight, head.weight}  # one, if they are tied
    for weight in embeddings:
        rows, width = weight.shape
        padding = -rows % PADDING  # of 151,937 rows, it is 63
        of_row = width * weight.itemsize
        weights += padding * of_row
    # Of every linear layer but the head (vllm/lora/layers/base_linear.py, `create_lora_weights`).
    values = 0
    for module in model.modules():
        is_linear = isinstance(module, torch.nn.Linear)
        if is_linear and module is not head:
            values += module.in_features
            values += module.out_features
    of_rank = values * case.served_dtype.itemsize
    return weights, of_rank


def _served_activations(case: Case) -> int:
    text = case.config.get_text_config()
    default_tokens, default_sequences = _default_batch(case.plan)
    tokens = case.whole("max-num-batched-tokens", default_tokens)
    sequences = case.whole("max-num-seqs", default_sequences)
    hidden = text.hidden_size
    inner = getattr(text, "intermediate_size", None)
    if not inner:
        inner = 4 * hidden
    # In a layer's MLP: the hidden states and their sum, gate, up and their product.
    width = 2 * hidden + 3 * inner
    of_token = width * case.served_dtype.itemsize
    in_mlp = tokens * of_token
    parts = case.whole("tensor-parallel-size", 1)
    in_mlp //= parts
    # Sampling makes float32 of the logits, and their log-probabilities (vllm/v1/sample/sampler.py).
    of_sequence = 2 * 4 * text.vocab_size
    in_sampling = sequences * of_sequence
    return in_mlp + in_sampling


def _default_batch(plan: Plan) -> tuple[int, int]:
    """Returns the tokens and the sequences of vLLM's batches."""
    if plan.device == "cpu":
        return CPU_BATCH
    device_gib = plan.total // GIB
    reached = [gib for gib in BATCH_DEFAULTS if gib <= device_gib]
    largest = max(reached)
    return BATCH_DEFAULTS[largest]


def smallest_cache(case: Case) -> int:
    """Returns the bytes of KV cache per device that one rollout of the greatest length takes. With
    less, vLLM does not start."""
    text = case.config.get_text_config()
    heads = text.num_attention_heads
    head_size = text.hidden_size // heads
    # only some configs have these
    heads = getattr(text, "num_key_value_heads", None) or heads
    head_size = getattr(text, "head_dim", None) or head_size
    of_layer = 2 * heads * head_size  # keys and values
    of_token = of_layer * text.num_hidden_layers
    values = of_token * case.max_model_len
    size = values * case.served_dtype.itemsize
    return size // case.parts
