"""Estimates the memory that a run's trainer and server take at their peaks, and the room that its
checkpoints take on the disk, by its recipe and its model's config alone.

`fit.py` calls `trainer_memory`, `server_memory` and `smallest_cache`, and `check` calls `disk`.
Most of it is sums. A forward and backward pass is run, for any architecture, under torch's
`FakeTensorMode`, on tensors that have shapes but no data, and `LiveBytes` counts the bytes of every
storage while it lives. (torch's `MemTracker` counts the same bytes in five times the time, and
cannot count frozen parameters.) It does not see what operators allocate within themselves.
"""

import math
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
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

from trl_atropos.check.launch import GIB, UTILIZATION, Case, Plan
from trl_atropos.errors import ERROR, WARNING
from trl_atropos.errors import AtroposTrainingError as Finding
from trl_atropos.weights.gather import base_model
from trl_atropos.weights.masters import (
    HALF,
    TORCHS_OWN,
    gradients_in_flight,
    round_adapter,
    state_bytes,
)
from trl_atropos.weights.model_setup import checkpoint_layers, prepare_model
from trl_atropos.weights.savable import free_bytes

Items = dict[str, int]  # bytes by name

ACTIVATIONS = "activations"
GRADIENTS = "gradients"
OFFLOADED = "activations of checkpoints"  # in host memory, by `offload`
TEMPORARIES = "temporaries"
PASSING = (ACTIVATIONS, GRADIENTS, TEMPORARIES)  # items that are gone when a step is over
# tokens and entries of the vocabulary that TRL's head works on at once (trl/kernels)
TILE = (4096, 32768)

# vLLM's defaults for a server with a device of so many GiB, or more: (tokens, sequences) of a batch
# (vllm/engine/arg_utils.py, `get_batch_defaults`).
BATCH_DEFAULTS = {160: (16384, 1024), 70: (8192, 1024), 0: (2048, 256)}
CPU_BATCH = (2048, 128)
PADDING = 64  # vLLM pads a vocabulary to a multiple of it (vllm `vocab_parallel_embedding.py`)
# What a process takes before it has a model. CUDA: context, workspaces, NCCL, CUDA graphs. CPU: the
# libraries.
TRAINER_RUNTIME = {"cuda": int(0.7 * GIB), "cpu": int(0.75 * GIB)}
SERVER_RUNTIME = {"cuda": int(1.5 * GIB), "cpu": GIB}
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
    args = case.training
    plan = case.plan
    exact = case.dtype in HALF and case.trains_with_masters  # float32 masters and gradients
    sizes, peak = _traced(case, exact)
    constant, host = _constant_items(case, sizes, exact)
    peak = dict(peak)  # that of other cases, too
    host[OFFLOADED] = peak.pop(OFFLOADED)
    gradient_sizes = _gradient_sizes(sizes.trained, exact)
    gradients = sum(gradient_sizes)
    if plan.sharding in ("zero2", "zero3", "fsdp"):
        gradients //= plan.processes
        divided = min(peak[GRADIENTS], gradients)
        peak = peak | {GRADIENTS: divided}
    step = {GRADIENTS: gradients}
    if "optimizer state" not in host and args.optim == "adamw_torch":
        roots = _roots(gradient_sizes, plan)
        step[TEMPORARIES] = roots // plan.shards
    phases = {
        "forward and backward": constant | peak,
        "the optimizer's step": constant | step,
    }
    if plan.device == "cpu":  # which is the host
        for items in phases.values():
            for name, size in host.items():
                items[name] = items.get(name, 0) + size
        host = {}
        # The checkpoint is loaded before it is exchanged for the server's memory.
        phases["loading"] = {
            "runtime": TRAINER_RUNTIME["cpu"],
            "weights": sizes.weights,
        }
    totals = {name: sum(items.values()) for name, items in phases.items()}
    when = max(totals, key=totals.get)
    return Process("trainer", _without_zeros(phases[when]), _without_zeros(host), when)


def _without_zeros(items: Items) -> Items:
    return {name: size for name, size in items.items() if size}


def _traced(case: Case, exact: bool) -> "tuple[Sizes, Items]":
    """Returns the model's sizes and the peak of a micro-batch, traced once for cases that have them
    in common."""
    args = case.training
    key = (
        case.rollouts,
        args.per_device_train_batch_size,
        args.gradient_accumulation_steps,
        args.gradient_checkpointing,
        repr(_checkpointing(args)),
        repr(case.peft_config),
    )
    if key not in case.traces:
        model, mode = shadow_model(case, case.dtype, case.peft_config)
        sizes = Sizes.of(model)
        peak = trace(model, mode, case, exact)
        case.traces[key] = (sizes, peak)
    return case.traces[key]


def _constant_items(case: Case, sizes: "Sizes", exact: bool) -> tuple[Items, Items]:
    """Returns the items that stay from step to step, on the device and in host memory."""
    args = case.training
    plan = case.plan
    adapts = case.peft_config is not None
    items = {"runtime": TRAINER_RUNTIME[plan.device]}
    host = {}

    weights = sizes.weights
    is_sharded = plan.sharding in ("zero3", "fsdp")
    if is_sharded:
        weights //= plan.processes
    own_weights = weights
    if case.shares_weights:  # the base model's are the server's
        own_weights = sizes.trained_bytes if adapts else 0
    if plan.offloads_weights:
        host["weights"] = own_weights
    else:
        items["weights"] = own_weights
    if is_sharded:
        items["gathered weights"] = sizes.gathered
    if args.beta != 0 and not adapts:  # TRL loads the model once more
        items["reference model"] = weights

    if plan.processes > 1 and plan.sharding == "none":
        # a copy of all (torch's `gradient_as_bucket_view` is off)
        items["buckets of DDP"] = sizes.trained_bytes
    elif plan.processes > 1 and plan.sharding != "fsdp":
        bucket = min(sizes.values, BUCKET)
        items["buckets of DeepSpeed"] = 2 * bucket * case.dtype.itemsize

    optimizer = _optimizer_items(case, sizes, exact)
    if (exact and args.offload_master_weights) or plan.offloads:
        host |= optimizer
        if plan.device == "cuda":
            staged = sizes.values
            if exact and args.optim in TORCHS_OWN:  # `MasterOptimizer` steps part by part
                values = [parameter.numel() for parameter in sizes.trained]
                staged = gradients_in_flight(values)
            host["gradients for the step"] = 4 * staged // plan.shards
        return items, host
    if "paged" in args.optim:  # the driver moves it to the host when the device is full
        host["optimizer state"] = optimizer.pop("optimizer state")
    return items | optimizer, host


def _optimizer_items(case: Case, sizes: "Sizes", exact: bool) -> Items:
    plan = case.plan
    optim = case.training.optim
    # DeepSpeed has its own for 16-bit parameters (ZeRO, arXiv:1910.02054, section 3.1).
    of_deepspeed = plan.sharding.startswith("zero") and case.dtype.itemsize == 2
    has_masters = exact or of_deepspeed
    masters = 4 * sizes.values if has_masters else 0
    state = state_bytes(optim, sizes.trained, has_masters, sizes.embeddings)
    return {
        "master weights": masters // plan.shards,
        "optimizer state": state // plan.shards,
    }


def _gradient_sizes(parameters: list[torch.Tensor], exact: bool) -> list[int]:
    """Returns the bytes of each parameter's gradient."""
    if exact:
        return [4 * parameter.numel() for parameter in parameters]
    return [parameter.nbytes for parameter in parameters]


def _roots(sizes: list[int], plan: Plan) -> int:
    """Returns the bytes that a step of torch's plain AdamW, and of no other optimizer, allocates
    besides.

    These are the roots of the second moments: of all parameters at once on a GPU (`foreach`), of
    one after the other on the CPU (torch/optim/adam.py).
    """
    if plan.device == "cuda":
        return sum(sizes)
    return 2 * max(sizes, default=0)


# ---------------------------------------------------------------------- a forward and backward pass


def shadow_model(
    case: Case, dtype: torch.dtype, peft_config: Any = None
) -> tuple[Any, FakeTensorMode]:
    """Returns the model with its adapter, whose parameters take no memory, and the mode to run it
    in."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(case.config, dtype=dtype, **case.model_settings)
        if peft_config is not None:
            model = get_peft_model(model, peft_config)
            if case.trains_with_masters:
                round_adapter(model)
        prepare_model(model, warn=False)
    # operators choose their kernels by the device, and have none for meta
    with FakeTensorMode() as mode:
        model._apply(_on_the_cpu)
        base_model(model).tie_weights()
    return model.train(), mode


def _on_the_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


@dataclass(frozen=True)
class Sizes:
    """Holds the sizes of the model that is trained, adapter included, in bytes."""

    weights: int
    trained_bytes: int  # of them; all but the base under an adapter
    trained: list[torch.Tensor]  # without data
    embeddings: set[int]  # `id`s of the trained ones that are embeddings
    gathered: int  # whole at once if parameters are sharded

    @classmethod
    def of(cls, model: Any) -> "Sizes":
        parameters = list(model.parameters())
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        embeddings = set()
        blocks = []
        block_names = base_model(model)._no_split_modules or ()  # slow: it looks at every module
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding):
                embeddings.add(id(module.weight))
            if type(module).__name__ in block_names:
                blocks.append(_nbytes(module.parameters()))
        weights = _nbytes(parameters)
        # FSDP2 keeps what is outside of the blocks whole from forward to backward, and fetches one
        # block ahead.
        outside = weights - sum(blocks)
        largest = max(blocks, default=0)
        gathered = min(weights, outside + 2 * largest)
        return cls(weights, _nbytes(trained), trained, embeddings, gathered)

    @property
    def values(self) -> int:
        """Number of values that are trained."""
        return sum(parameter.numel() for parameter in self.trained)


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


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
            activations = self._now - self.gradients
            self.peak = {ACTIVATIONS: activations, GRADIENTS: self.gradients}

    def note_gradient(self, parameter: torch.nn.Parameter) -> None:
        self.gradients += parameter.grad.nbytes

    def _free(self, key: int, size: int) -> None:
        self._alive.remove(key)
        self._now -= size


def trace(model: Any, mode: FakeTensorMode, case: Case, exact_gradients: bool) -> Items:
    """Returns the bytes at the peak of a micro-batch's forward and backward, by kind. Parameters do
    not count.

    With `exact_gradients`, gradients are in float32 whatever the parameters are
    (`weights/masters.py`).
    """
    args = case.training
    plain = base_model(model)
    existing = [*model.parameters(), *model.buffers()]
    live = LiveBytes(existing)
    several = case.rollouts < args.per_device_train_batch_size  # micro-batches in each of TRL's
    accumulates = args.gradient_accumulation_steps > 1 or several
    if args.gradient_checkpointing:
        on_the_device = _checkpointing(args) | {"offload": False}  # here, there is none
        checkpoint_layers(plain, on_the_device)
        if model is not plain:
            plain.enable_input_require_grads()  # as TRL does
    with mode:
        for parameter in model.parameters():
            if not parameter.requires_grad:
                continue
            parameter.grad_dtype = torch.float32 if exact_gradients else parameter.dtype
            if accumulates:  # earlier micro-batches have left a gradient
                parameter.grad = torch.empty_like(parameter, dtype=parameter.grad_dtype)
                live.note_gradient(parameter)
                live.count(parameter.grad)
            else:
                parameter.register_post_accumulate_grad_hook(live.note_gradient)
        with ExitStack() as contexts:
            contexts.enter_context(live)
            if case.autocast is not None:
                contexts.enter_context(torch.autocast("cpu", case.autocast))
            if case.plain_attention:
                contexts.enter_context(sdpa_kernel(SDPBackend.MATH))
            _loss(plain, case).backward()
    offloaded = _offloaded(plain, case)
    away = sum(offloaded[1:])  # what one layer keeps is on the device while its backward runs
    activations = max(0, live.peak[ACTIVATIONS] - away)
    return live.peak | {ACTIVATIONS: activations, OFFLOADED: sum(offloaded)}


def _checkpointing(args: Any) -> dict[str, Any]:
    """Returns `gradient_checkpointing_kwargs`; nothing if no layer is checkpointed."""
    if not args.gradient_checkpointing:
        return {}
    return dict(args.gradient_checkpointing_kwargs or {})


def _offloaded(policy: Any, case: Case) -> list[int]:
    """Returns the bytes that each checkpointed layer keeps in host memory in place of the device's:
    the hidden states that go into it."""
    options = _checkpointing(case.training)
    if not options.get("offload"):
        return []
    config = policy.config.get_text_config()
    layers = math.ceil(config.num_hidden_layers / options.get("every_n_layers", 1))
    tokens = case.rollouts * case.length
    return layers * [tokens * config.hidden_size * policy.dtype.itemsize]


def _loss(model: Any, case: Case) -> torch.Tensor:
    """Runs the body of the model, and allocates what TRL's `_get_per_token_logps_and_entropies`
    makes of its result. The loss itself has a few floats per token, which do not count.

    Rollouts differ in length, so there is an attention mask, unless attention takes more without.
    """
    ids = torch.ones(case.rollouts, case.length, dtype=torch.long)
    inputs = {"input_ids": ids, "use_cache": False}
    if not case.plain_attention:
        inputs["attention_mask"] = torch.ones_like(ids)
    output = model.base_model(**inputs)
    hidden = output[0]
    weight = model.get_output_embeddings().weight
    loss = hidden.sum() + weight.sum()
    head = _head_bytes(hidden, weight, case)
    torch.empty(head, dtype=torch.uint8)  # is gone before the body's backward
    # one more forward, for logits over the whole vocabulary
    if case.training.distillation_coef > 0:
        output = model(**inputs, logits_to_keep=case.length)
        logits = output.logits[:, :-1]
        next_ids = ids[:, :-1, None]
        logprobs = logits.gather(-1, next_ids)
        loss = loss + logprobs.float().sum()
    return loss


def _head_bytes(hidden: torch.Tensor, weight: torch.Tensor, case: Case) -> int:
    """Returns what TRL's fused head holds in its backward (`ChunkedLogProbFunction` in
    trl/kernels/chunked_logprob.py): a tile of logits in the dtype that is computed in, what folds
    it, and float32 gradients, which are then rounded.

    `hidden` is (rollouts, length, width), and `weight` (vocabulary, width).
    """
    dtype = case.autocast or hidden.dtype
    on_gpu = case.plan.device == "cuda"
    rollouts, length, width = hidden.shape
    vocabulary, _ = weight.shape
    most_tokens, most_entries = TILE
    tokens = rollouts * (length - 1)
    entries = min(vocabulary, most_entries)
    tile_weights = entries * width
    # Of a tile that is wider than the vocabulary, host memory has what is written to.
    tile_width = most_entries if on_gpu else entries
    tile = min(tokens, most_tokens) * tile_width

    scratch = 0  # on a GPU, TRL's Triton kernel folds, and 16 bits are multiplied into float32
    if not on_gpu:
        scratch = int(4 * 7.25 * tile)  # float32
        if dtype != torch.float32:  # tile and weights are made float32 first (`_addmm_fp32`)
            scratch = max(scratch, 4 * (tile + tile_weights))
    if weight.dtype != dtype:
        scratch += tile_weights * dtype.itemsize
    gradients = tokens * width
    if weight.requires_grad:
        gradients += weight.numel()
    rounded = 0
    if hidden.dtype != torch.float32:
        rounded = gradients * hidden.dtype.itemsize
    logits = tile * dtype.itemsize
    return logits + 4 * gradients + max(scratch, rounded)


# --------------------------------------------------------------------------------------- the server


def server_memory(case: Case) -> Process:
    """Returns the server's items. With `--gpu-memory-utilization`, its KV cache gets what is left
    of that share of the device."""
    plan = case.plan
    if "server" not in case.traces:
        case.traces["server"] = _served_sizes(case)
    weights, adapter_rank = case.traces["server"]
    adapter = 0
    if "--enable-lora" in case.flags:
        adapter = adapter_rank * case.whole("max-lora-rank", 16)
    items = {
        "runtime": SERVER_RUNTIME[plan.device],
        "weights": weights // case.parts,
        "activations": _served_activations(case),
        "places for adapters": case.whole("max-loras", 1) * adapter // case.parts,
    }
    host = {"adapters": case.whole("max-cpu-loras", 1) * adapter}
    if plan.device == "cpu":
        items["places for adapters"] += host.pop("adapters")
    elif case.training.vllm_enable_sleep_mode and case.training.vllm_sleep_level == 1:
        host["weights, asleep"] = items["weights"]
    cache = case.kv_cache_bytes
    if cache is None:
        share = float(case.flags.get("--gpu-memory-utilization", UTILIZATION))
        granted = int(share * plan.total)
        cache = max(0, granted - sum(items.values()))
    items["KV cache"] = cache
    return Process("server", _without_zeros(items), host)


def _served_sizes(case: Case) -> tuple[int, int]:
    """Returns the bytes of the model's weights as vLLM keeps them, and of an adapter for each of
    its ranks."""
    model, _mode = shadow_model(case, case.served_dtype)
    head = model.get_output_embeddings()
    weights = _nbytes(model.parameters())
    embeddings = {model.get_input_embeddings().weight, head.weight}  # one, if they are tied
    for weight in embeddings:
        rows, width = weight.shape
        padding = -rows % PADDING  # of 151,937 rows, it is 63
        weights += padding * width * weight.itemsize
    # Of every linear layer but the head (vllm/lora/layers/base_linear.py, `create_lora_weights`).
    values = 0
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module is not head:
            values += module.in_features + module.out_features
    return weights, values * case.served_dtype.itemsize


def _served_activations(case: Case) -> int:
    text = case.config.get_text_config()
    default_tokens, default_sequences = _default_batch(case.plan)
    tokens = case.whole("max-num-batched-tokens", default_tokens)
    sequences = case.whole("max-num-seqs", default_sequences)
    hidden = text.hidden_size
    inner = getattr(text, "intermediate_size", None) or 4 * hidden
    # In a layer's MLP: the hidden states and their sum, gate, up and their product.
    width = 2 * hidden + 3 * inner
    in_mlp = tokens * width * case.served_dtype.itemsize
    in_mlp //= case.whole("tensor-parallel-size", 1)
    # Sampling makes float32 of the logits, and their log-probabilities (vllm/v1/sample/sampler.py).
    in_sampling = 2 * 4 * sequences * text.vocab_size
    return in_mlp + in_sampling


def _default_batch(plan: Plan) -> tuple[int, int]:
    """Returns the tokens and the sequences of vLLM's batches."""
    if plan.device == "cpu":
        return CPU_BATCH
    device_gib = plan.total // GIB
    largest = max(gib for gib in BATCH_DEFAULTS if gib <= device_gib)
    return BATCH_DEFAULTS[largest]


def smallest_cache(case: Case) -> int:
    """Returns the bytes of KV cache per device that one rollout of the greatest length takes. With
    less, vLLM does not start."""
    text = case.config.get_text_config()
    # only some configs have these
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    usual_size = text.hidden_size // text.num_attention_heads
    head_size = getattr(text, "head_dim", None) or usual_size
    of_token = 2 * text.num_hidden_layers * heads * head_size  # keys and values
    values = of_token * case.max_model_len
    return values * case.served_dtype.itemsize // case.parts


# ----------------------------------------------------------------------------------------- the disk

RESTART_COPIES = 3  # the version that is served, the one before, and the one that is being written


def disk(case: Case, elsewhere: bool) -> Iterator[Finding]:
    """Yields a finding if what the run saves does not fit on the disk. If the run will be
    `elsewhere`, this machine's disk is a hint only."""
    args = case.training
    model, _mode = shadow_model(case, case.dtype, case.peft_config)
    sizes = Sizes.of(model)
    final = sizes.weights if case.peft_config is None else sizes.trained_bytes
    checkpoint = final
    if not args.save_only_model:
        checkpoint += _saved_state(case, sizes)
    number = checkpoints(args)
    restarts = RESTART_COPIES * sizes.weights if args.mode.restarts_engine else 0
    needed = number * checkpoint + final + restarts

    folder = Path(args.output_dir).absolute()
    while not folder.is_dir():
        folder = folder.parent
    free = free_bytes(folder)
    if needed <= free:
        return
    what = "What the run saves does not fit on the disk of `output_dir`"
    level = ERROR
    if elsewhere:
        what += " of this machine"
        level = WARNING
    parts = f"{number} checkpoints of {_gib(checkpoint)}"
    if restarts:
        parts += f", {_gib(restarts)} for the server's restarts"
    seen = f"{_gib(needed)} GiB ({parts}), free are {_gib(free)}"
    fix = (
        "Set `save_total_limit`, save less often (`save_steps`) or without the optimizer "
        "(`save_only_model`), or set `output_dir` to a larger disk."
    )
    yield Finding(what, seen, fix, "disk", level)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}"


def _saved_state(case: Case, sizes: Sizes) -> int:
    """Returns the bytes of the optimizer's state in a checkpoint, masters included."""
    args = case.training
    has_masters = case.trains_with_masters
    if case.peft_config is None:
        has_masters |= args.master_weights or case.plan.sharding.startswith("zero")
    has_masters &= case.dtype in HALF
    state = state_bytes(args.optim, sizes.trained, has_masters, sizes.embeddings)
    if has_masters:
        state += 4 * sizes.values
    return state


def checkpoints(training: Any) -> int:
    """Returns how many checkpoints there are at once. An old one is removed when the new one is
    there."""
    if training.save_strategy == "no":
        return 0
    number = 1
    if training.save_strategy == "steps":
        every = training.save_steps
        if every < 1:  # a share of the run
            every = math.ceil(every * training.max_steps) or training.max_steps
        number = math.ceil(training.max_steps / every)  # the last step's, too
        number = max(1, number)
    if training.save_total_limit is not None:
        number = min(number, training.save_total_limit + 1)
    return number
