"""How much memory trainer and server of a run take at their peaks, and its checkpoints on disk, by
its recipe and its model's config alone.

What a forward and backward pass hold is found, for any architecture, by running them under torch's
`FakeTensorMode`, on tensors that have shapes but no data, and counting the bytes of every storage
while it lives. (torch's `MemTracker` counts the same bytes in five times the time, and cannot count
frozen parameters.) What operators allocate within themselves is not seen. The rest is sums.
"""

import math
import shutil
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from trl_atropos.check.launch import GIB, UTILIZATION, Case
from trl_atropos.errors import ERROR, WARNING
from trl_atropos.errors import AtroposTrainingError as Finding
from trl_atropos.weights.gather import base_model
from trl_atropos.weights.masters import (
    HALF,
    TORCHS_OWN,
    round_adapter,
    state_bytes,
    values_on_their_way,
)
from trl_atropos.weights.model_setup import prepare_model

PASSING = ACTIVATIONS, GRADIENTS, TEMPORARIES = "activations", "gradients", "temporaries"
# tokens and entries of the vocabulary that TRL's head works on at once (trl/kernels)
TILE = (4096, 32768)

# vLLM's defaults for a server: (bytes of the device, tokens of a batch, sequences of a batch)
# (vllm/engine/arg_utils.py, `get_batch_defaults`).
BATCH_DEFAULTS = ((160 << 30, 16384, 1024), (70 << 30, 8192, 1024), (0, 2048, 256))
CPU_BATCH = (2048, 128)
PADDING = 64  # vLLM pads a vocabulary to a multiple of it (vllm `vocab_parallel_embedding.py`)
# What a process takes before it has a model. CUDA: context, workspaces, NCCL, CUDA graphs. CPU: the
# libraries.
TRAINER_RUNTIME = {"cuda": int(0.7 * GIB), "cpu": int(0.75 * GIB)}
SERVER_RUNTIME = {"cuda": int(1.5 * GIB), "cpu": GIB}
BUCKET = 500_000_000  # values in DeepSpeed's `reduce_bucket_size`, of which `overlap_comm` has two


@dataclass(frozen=True)
class Process:
    name: str
    items: dict[str, int]  # bytes on the device at the peak, by name
    host: dict[str, int]  # bytes of host memory besides
    when: str = "always"  # the phase of the peak

    @property
    def total(self) -> int:
        return sum(self.items.values())

    @property
    def resting(self) -> int:
        """What is left of it when a step is over."""
        return sum(size for name, size in self.items.items() if name not in PASSING)


# ---------------------------------------------------------------------- a forward and backward pass


def shadow_model(
    case: Case, dtype: torch.dtype, peft_config: Any = None
) -> tuple[Any, FakeTensorMode]:
    """The model with its adapter, whose parameters take no memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(case.config, dtype=dtype, **case.model_settings)
        if peft_config is not None:
            model = get_peft_model(model, peft_config)
            if case.trains_with_masters:
                round_adapter(model)
        prepare_model(model, warn=False)
    # operators choose their kernels by the device, and have none for meta
    with FakeTensorMode() as mode:
        model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
        base_model(model).tie_weights()
    return model.train(), mode


@dataclass(frozen=True)
class Sizes:
    """Of the model that is trained, adapter included. Bytes, unless they say otherwise."""

    weights: int
    own: int  # of them, those that are not the base under an adapter
    trained: list[torch.Tensor]  # without data
    embeddings: set[int]  # `id`s of the trained ones that are embeddings
    gathered: int  # whole at once where parameters are sharded

    @classmethod
    def of(cls, model: Any) -> "Sizes":
        parameters = list(model.parameters())
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
        blocks = base_model(model)._no_split_modules or ()  # asked once: it looks at every module
        inside = [
            sum(p.nbytes for p in m.parameters())
            for m in model.modules()
            if type(m).__name__ in blocks
        ]
        weights = sum(p.nbytes for p in parameters)
        # FSDP2 keeps what is outside of the blocks whole from forward to backward, and fetches one
        # block ahead.
        gathered = min(weights, weights - sum(inside) + 2 * max(inside, default=0))
        return cls(weights, sum(p.nbytes for p in trained), trained, embeddings, gathered)

    @property
    def number(self) -> int:
        """How many values are trained."""
        return sum(one.numel() for one in self.trained)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operators make, until they are freed."""

    def __init__(self, existing: Iterable[torch.Tensor]):
        super().__init__()
        self._now = 0
        self.gradients = 0  # of these bytes
        self.peak = {ACTIVATIONS: 0, GRADIENTS: 0}  # at the moment when both together were most
        self._alive = {tensor.untyped_storage()._cdata for tensor in existing}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.count(leaf)
        return result

    def count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = storage.nbytes()
        if key in self._alive:
            return
        self._alive.add(key)
        weakref.finalize(storage, self._free, key, size)
        self._now += size
        if self._now > sum(self.peak.values()):
            self.peak = {ACTIVATIONS: self._now - self.gradients, GRADIENTS: self.gradients}

    def note_gradient(self, parameter: torch.nn.Parameter) -> None:
        self.gradients += parameter.grad.nbytes

    def _free(self, key: int, size: int) -> None:
        self._alive.remove(key)
        self._now -= size


def trace(model: Any, mode: FakeTensorMode, case: Case, exact_gradients: bool) -> dict[str, int]:
    """Bytes at the peak of a micro-batch's forward and backward, besides the parameters, by kind.
    With `exact_gradients`, they are in float32 whatever the parameters are
    (`weights/masters.py`)."""
    args = case.training
    plain = base_model(model)
    live = LiveBytes([*model.parameters(), *model.buffers()])
    # Is there a gradient already, of the micro-batches before?
    accumulates = (
        args.gradient_accumulation_steps > 1 or case.rollouts < args.per_device_train_batch_size
    )
    if args.gradient_checkpointing:
        plain.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if model is not plain:
            plain.enable_input_require_grads()  # as TRL does
    autocast = nullcontext() if case.autocast is None else torch.autocast("cpu", case.autocast)
    attention = sdpa_kernel(SDPBackend.MATH) if case.plain_attention else nullcontext()
    with mode:
        for parameter in (parameter for parameter in model.parameters() if parameter.requires_grad):
            parameter.grad_dtype = torch.float32 if exact_gradients else parameter.dtype
            if accumulates:
                parameter.grad = torch.empty_like(parameter, dtype=parameter.grad_dtype)
                live.note_gradient(parameter)
                live.count(parameter.grad)
            else:
                parameter.register_post_accumulate_grad_hook(live.note_gradient)
        with live, autocast, attention:
            _score(plain, case).backward()
    return live.peak


def _score(model: Any, case: Case) -> torch.Tensor:
    """The body of the model, and what TRL's `_get_per_token_logps_and_entropies` makes of it: the
    loss itself has a few floats per token. Rollouts differ in length, so there is an attention
    mask, unless attention takes more without."""
    ids = torch.ones(case.rollouts, case.length, dtype=torch.long)
    mask = {} if case.plain_attention else {"attention_mask": torch.ones_like(ids)}
    hidden = model.base_model(input_ids=ids, **mask, use_cache=False)[0]
    weight = model.get_output_embeddings().weight
    loss = hidden.sum() + weight.sum()
    # is gone before the body's backward
    torch.empty(_head_bytes(hidden, weight, case), dtype=torch.uint8)
    # one more forward, for logits over the whole vocabulary
    if case.training.distillation_coef > 0:
        logits = model(input_ids=ids, **mask, logits_to_keep=case.length, use_cache=False).logits[
            :, :-1
        ]
        loss = loss + logits.gather(-1, ids[:, :-1, None]).float().sum()
    return loss


def _head_bytes(hidden: torch.Tensor, weight: torch.Tensor, case: Case) -> int:
    """What TRL's fused head holds in its backward (`ChunkedLogProbFunction` in
    trl/kernels/chunked_logprob.py): a tile of logits in the dtype that is computed in, what folds
    it where there is no Triton (7.25 tiles in float32), and float32 gradients, which are then
    rounded."""
    # there, TRL's Triton kernel folds
    dtype = case.autocast or hidden.dtype
    on_gpu = case.plan.device == "cuda"
    tokens = hidden.shape[0] * (hidden.shape[1] - 1)
    width = min(weight.shape[0], TILE[1])
    # Of a tile that is wider than the vocabulary, host memory has what is written to.
    tile = min(tokens, TILE[0]) * (TILE[1] if on_gpu else width)
    folded = int(4 * 7.25 * tile)
    # A GPU multiplies 16 bits into float32; elsewhere, tile and weights are made float32 first
    # (`_addmm_fp32`).
    widened = 4 * (tile + width * weight.shape[1]) if dtype != torch.float32 else 0
    scratch = 0 if on_gpu else max(folded, widened)
    scratch += (weight.dtype != dtype) * width * weight.shape[1] * dtype.itemsize
    gradients = tokens * hidden.shape[-1] + weight.requires_grad * weight.numel()
    rounded = gradients * hidden.dtype.itemsize if hidden.dtype != torch.float32 else 0
    return tile * dtype.itemsize + 4 * gradients + max(scratch, rounded)


# -------------------------------------------------------------------------------------- the trainer


def trainer_memory(case: Case) -> Process:
    args = case.training
    plan = case.plan
    exact = case.dtype in HALF and case.trains_with_masters
    size = case.rollouts, args.per_device_train_batch_size, args.gradient_accumulation_steps
    key = (size, args.gradient_checkpointing, repr(case.peft_config))
    if key not in case.traces:
        model, mode = shadow_model(case, case.dtype, case.peft_config)
        case.traces[key] = (Sizes.of(model), trace(model, mode, case, exact))
    sizes, peak = case.traces[key]
    constant, host = _state(case, sizes, exact)
    gradients = sum(one.numel() * (4 if exact else one.itemsize) for one in sizes.trained)
    if plan.sharding in ("zero2", "zero3", "fsdp"):
        gradients //= plan.processes
        peak = peak | {GRADIENTS: min(peak[GRADIENTS], gradients)}
    step = {GRADIENTS: gradients}
    if "optimizer state" not in host:
        step[TEMPORARIES] = (
            _step_bytes(args.optim, sizes.trained, exact, plan.device) // plan.shards
        )
    phases = {"forward and backward": constant | peak, "the optimizer's step": constant | step}
    if plan.device == "cpu":  # which is the host
        phases = {when: Counter(items) + Counter(host) for when, items in phases.items()}
        # The checkpoint is loaded before it is exchanged for the server's memory.
        phases["loading"] = {"runtime": TRAINER_RUNTIME["cpu"], "weights": sizes.weights}
        host = {}
    when = max(phases, key=lambda name: sum(phases[name].values()))
    return Process(
        "trainer", {name: size for name, size in phases[when].items() if size}, host, when
    )


def _state(case: Case, sizes: Sizes, exact: bool) -> tuple[dict[str, int], dict[str, int]]:
    """What is there from step to step, on the device and in host memory."""
    args = case.training
    plan = case.plan
    adapts = case.peft_config is not None
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
    # a copy of all (torch's `gradient_as_bucket_view` is off)
    if plan.processes > 1 and plan.sharding == "none":
        items["buckets of DDP"] = sizes.own
    elif plan.processes > 1 and plan.sharding != "fsdp":
        items["buckets of DeepSpeed"] = 2 * min(sizes.number, BUCKET) * case.dtype.itemsize
    # DeepSpeed has its own for 16-bit parameters (ZeRO, arXiv:1910.02054, section 3.1).
    masters = exact or (plan.sharding.startswith("zero") and case.dtype.itemsize == 2)
    of_optimizer = {
        "master weights": 4 * sizes.number // plan.shards if masters else 0,
        "optimizer state": state_bytes(args.optim, sizes.trained, masters, sizes.embeddings)
        // plan.shards,
    }
    if (exact and args.offload_master_weights) or plan.offloads:
        host |= of_optimizer
        in_parts = exact and args.optim in TORCHS_OWN
        if plan.device == "cuda":
            staged = (
                values_on_their_way([one.numel() for one in sizes.trained])
                if in_parts
                else sizes.number
            )
            host["gradients for the step"] = 4 * staged // plan.shards
        return items, host
    if "paged" in args.optim:  # the driver moves it to the host when the device is full
        host["optimizer state"] = of_optimizer.pop("optimizer state")
    return items | of_optimizer, host


def _step_bytes(optim: str, parameters: list[torch.Tensor], masters: bool, device: str) -> int:
    """Bytes that a step allocates besides. Only torch's plain AdamW does: the roots of the second
    moments, of all
    parameters at once on a GPU (`foreach`), of one after the other on the CPU
        (torch/optim/adam.py)."""
    sizes = [
        one.numel() * (4 if masters else one.itemsize)
        for one in parameters
        if optim == "adamw_torch"
    ]
    return sum(sizes) if device == "cuda" else 2 * max(sizes, default=0)


# --------------------------------------------------------------------------------------- the server


def server_memory(case: Case) -> Process:
    """With `gpu_memory_utilization`, the KV cache gets what is left of that share of the device."""
    plan = case.plan
    text = case.config.get_text_config()
    size = case.served_dtype.itemsize
    on_gpu = next(
        (tokens, sequences) for memory, tokens, sequences in BATCH_DEFAULTS if plan.total >= memory
    )
    tokens, sequences = on_gpu if plan.device == "cuda" else CPU_BATCH
    tokens = case.whole("max-num-batched-tokens", tokens)
    sequences = case.whole("max-num-seqs", sequences)
    if "server" not in case.traces:
        case.traces["server"] = _served_sizes(case)
    weights, adapter = case.traces["server"]
    adapter *= ("--enable-lora" in case.flags) * case.whole("max-lora-rank", 16)
    # In a layer's MLP: the hidden states and their sum, gate, up and their product.
    width = 2 * text.hidden_size + 3 * (
        getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    )
    items = {
        "runtime": SERVER_RUNTIME[plan.device],
        "weights": weights // case.parts,
        # Sampling makes float32 of the logits, and their log-probabilities
        # (vllm/v1/sample/sampler.py).
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
    model, _mode = shadow_model(case, case.served_dtype)
    head = model.get_output_embeddings()
    ends = {id(one.weight): one.weight for one in (model.get_input_embeddings(), head)}
    padding = sum(
        -weight.shape[0] % PADDING * weight.shape[1] * weight.itemsize for weight in ends.values()
    )
    # Of every linear layer but the head (vllm/lora/layers/base_linear.py, `create_lora_weights`).
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    adapter = sum(m.in_features + m.out_features for m in linear) * case.served_dtype.itemsize
    return padding + sum(parameter.nbytes for parameter in model.parameters()), adapter


def smallest_cache(case: Case) -> int:
    """Bytes of KV cache per device that one rollout of the greatest length takes, below which vLLM
    does not start."""
    text = case.config.get_text_config()
    # only some configs have it
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return (
        2
        * text.num_hidden_layers
        * heads
        * head
        * case.served_dtype.itemsize
        * case.max_model_len
        // case.parts
    )


# ----------------------------------------------------------------------------------------- the disk

RESTART_COPIES = 3  # the version that is served, the one before, and the one that is being written


def disk(case: Case, elsewhere: bool) -> Iterator[Finding]:
    """Whether what the run saves fits on the disk. If the run will be `elsewhere`, this machine's
    is a hint only."""
    args = case.training
    sizes = Sizes.of(shadow_model(case, case.dtype, case.peft_config)[0])
    final = sizes.own if case.peft_config is not None else sizes.weights
    whole = case.peft_config is None and (
        args.master_weights or case.plan.sharding.startswith("zero")
    )
    masters = case.dtype in HALF and (case.trains_with_masters or whole)
    state = state_bytes(args.optim, sizes.trained, masters, sizes.embeddings) + (
        4 * sizes.number if masters else 0
    )
    checkpoint = final + (0 if args.save_only_model else state)
    number = checkpoints(args)
    restarts = RESTART_COPIES * sizes.weights if args.vllm_mode == "restart" else 0
    needed = number * checkpoint + final + restarts
    folder = Path(args.output_dir).absolute()
    while not folder.is_dir():
        folder = folder.parent
    # Those that are there count as what is needed, and are replaced one by one.
    there = sum(file.stat().st_size for file in folder.glob("checkpoint-*/**/*") if file.is_file())
    free = shutil.disk_usage(folder).free + there
    if needed > free:
        what = (
            "What the run saves does not fit on the disk of `output_dir`"
            + " of this machine" * elsewhere
        )
        copies = f", {restarts / GIB:.1f} for the server's restarts" if restarts else ""
        saved = f"{needed / GIB:.1f} GiB ({number} checkpoints of {checkpoint / GIB:.1f}{copies})"
        fix = (
            "Set `save_total_limit`, save less often (`save_steps`) or without the optimizer "
            "(`save_only_model`), "
        )
        fix += "or set `output_dir` to a larger disk."
        level = WARNING if elsewhere else ERROR
        yield Finding(what, f"{saved}, free are {free / GIB:.1f}", fix, "disk", level)


def checkpoints(training: Any) -> int:
    """How many there are at once: an old one is removed when the new one is there."""
    if training.save_strategy == "no":
        return 0
    steps = training.max_steps
    every = (
        training.save_steps
        if training.save_steps >= 1
        else math.ceil(training.save_steps * steps) or steps
    )
    # the last step's, too
    number = max(1, math.ceil(steps / every)) if training.save_strategy == "steps" else 1
    return (
        number if training.save_total_limit is None else min(number, training.save_total_limit + 1)
    )
