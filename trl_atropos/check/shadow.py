"""Runs a model without data, to learn its sizes and what a forward and backward pass takes.

`memory.py` calls `trace` for the trainer, and it and `disk.py` read the `Sizes` of a
`shadow_model`. For any architecture, the pass runs under torch's `FakeTensorMode`, on tensors that
have shapes but no data, and `LiveBytes` counts the bytes of every storage while it lives. (torch's
`MemTracker` counts the same bytes in five times the time, and cannot count frozen parameters.) It
does not see what operators allocate within themselves.
"""

import math
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft import get_peft_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from trl_atropos.batches.compiled_layers import are_compiled
from trl_atropos.batches.sequence_parallel import RankHeads, SequenceGroup
from trl_atropos.check.compiled import LayerCalls
from trl_atropos.check.launch import Case
from trl_atropos.weights.gather import base_model
from trl_atropos.weights.masters import round_adapter
from trl_atropos.weights.model_setup import checkpoint_layers, prepare_model

Items = dict[str, int]  # bytes by name

ACTIVATIONS = "activations"
GRADIENTS = "gradients"
OFFLOADED = "activations of checkpoints"  # in host memory, by `offload`
ATTENTION = "sdpa_without_mask"  # `attn_implementation` of a model whose rows are packed
# tokens and entries of the vocabulary that TRL's head works on at once (trl/kernels)
TILE = (4096, 32768)


# ---------------------------------------------------------------------------------------- the model


def shadow_model(
    case: Case, dtype: torch.dtype, peft_config: Any = None
) -> tuple[Any, FakeTensorMode]:
    """Returns the model with its adapter, whose parameters take no memory, and the mode to run it
    in."""
    settings = case.model_settings
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(case.config, dtype=dtype, **settings)
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
    shape = tensor.shape
    return torch.empty(shape, dtype=tensor.dtype)


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
        trained = []
        for parameter in parameters:
            if parameter.requires_grad:
                trained.append(parameter)
        embeddings = set()
        blocks = []
        block_names = base_model(model)._no_split_modules or ()  # slow: it looks at every module
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding):
                embeddings.add(id(module.weight))
            if type(module).__name__ in block_names:
                size = total_bytes(module.parameters())
                blocks.append(size)
        weights = total_bytes(parameters)
        # FSDP2 keeps what is outside of the blocks whole from forward to backward, and fetches one
        # block ahead.
        outside = weights - sum(blocks)
        largest = max(blocks, default=0)
        at_once = outside + 2 * largest
        gathered = min(weights, at_once)
        return cls(weights, total_bytes(trained), trained, embeddings, gathered)

    @property
    def values(self) -> int:
        """Number of values that are trained."""
        number = 0
        for parameter in self.trained:
            number += parameter.numel()
        return number


def total_bytes(tensors: Iterable[torch.Tensor]) -> int:
    total = 0
    for tensor in tensors:
        total += tensor.nbytes
    return total


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operators make, until they are freed."""

    def __init__(self, existing: Iterable[torch.Tensor]):
        super().__init__()
        self._now = 0
        self.gradients = 0  # of these bytes
        self.peak = {ACTIVATIONS: 0, GRADIENTS: 0}  # at the moment when both together were most
        self._alive = set()  # addresses of storages
        for tensor in existing:
            storage = tensor.untyped_storage()
            self._alive.add(storage._cdata)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:  # more than half of all calls
            return args[0].fake_device
        options = kwargs or {}
        result = func(*args, **options)
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
        highest = sum(self.peak.values())
        if self._now > highest:
            activations = self._now - self.gradients
            self.peak = {
                ACTIVATIONS: activations,
                GRADIENTS: self.gradients,
            }

    def note_gradient(self, parameter: torch.nn.Parameter) -> None:
        gradient = parameter.grad
        self.gradients += gradient.nbytes

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
    existing = list(model.parameters())
    existing += model.buffers()
    live = LiveBytes(existing)
    accumulates = args.gradient_accumulation_steps > 1
    if case.rollouts < args.per_device_train_batch_size:  # micro-batches in each of TRL's
        accumulates = True
    if args.gradient_checkpointing:
        options = checkpointing_options(args)
        options["offload"] = False  # here, there is none
        checkpoint_layers(plain, options)
        if model is not plain:
            plain.enable_input_require_grads()  # as TRL does
    with mode:
        for parameter in model.parameters():
            if parameter.requires_grad:
                _expect_gradient(parameter, live, exact_gradients, accumulates)
        calls = LayerCalls(plain)
        with ExitStack() as contexts:
            contexts.enter_context(live)
            contexts.enter_context(_autocast(case))
            if case.plain_attention:
                contexts.enter_context(sdpa_kernel(SDPBackend.MATH))
            _loss(plain, case).backward()
        calls.close()
        spared = _spared(calls, plain, case)
    offloaded = _offloaded(plain, case)
    away = sum(offloaded[1:])  # what one layer keeps is on the device while its backward runs
    activations = live.peak[ACTIVATIONS] - away - spared
    return {
        ACTIVATIONS: max(0, activations),
        GRADIENTS: live.peak[GRADIENTS],
        OFFLOADED: sum(offloaded),
    }


def _autocast(case: Case) -> AbstractContextManager:
    if case.autocast is None:
        return nullcontext()
    return torch.autocast("cpu", case.autocast)


def _spared(calls: LayerCalls, policy: Any, case: Case) -> int:
    """Returns the bytes by which activations at the peak are fewer if layers are compiled."""
    compiles = are_compiled(
        case.training.compile_layers,
        policy,
        torch.device(case.plan.device),
        is_sharded=case.plan.sharding != "none",
    )
    if not compiles or case.plain_attention:
        return 0
    spared = calls.spared_bytes(partial(_autocast, case), case.spared)
    if case.training.gradient_checkpointing:  # a group of layers keeps something at a time
        every = checkpointing_options(case.training).get("every_n_layers", 1)
        spared = sorted(spared)[-every:]
    return sum(spared)


def _expect_gradient(
    parameter: torch.nn.Parameter, live: LiveBytes, exact: bool, accumulates: bool
) -> None:
    """Has `live` count the gradient of a parameter, of which there is one already if gradients
    accumulate."""
    parameter.grad_dtype = parameter.dtype
    if exact:
        parameter.grad_dtype = torch.float32
    if accumulates:  # earlier micro-batches have left it
        parameter.grad = torch.empty_like(parameter, dtype=parameter.grad_dtype)
        live.note_gradient(parameter)
        live.count(parameter.grad)
    else:
        parameter.register_post_accumulate_grad_hook(live.note_gradient)


def checkpointing_options(args: Any) -> dict[str, Any]:
    """Returns `gradient_checkpointing_kwargs`; nothing if no layer is checkpointed."""
    if not args.gradient_checkpointing:
        return {}
    return dict(args.gradient_checkpointing_kwargs or {})


def _offloaded(policy: Any, case: Case) -> list[int]:
    """Returns the bytes that each checkpointed layer keeps in host memory in place of the device's:
    the hidden states that go into it."""
    options = checkpointing_options(case.training)
    if not options.get("offload"):
        return []
    config = policy.config.get_text_config()
    layers = config.num_hidden_layers
    every = options.get("every_n_layers", 1)
    kept = math.ceil(layers / every)
    tokens = case.rollouts * case.slice_length
    of_token = config.hidden_size * policy.dtype.itemsize
    of_layer = tokens * of_token
    return kept * [of_layer]


def _loss(model: Any, case: Case) -> torch.Tensor:
    """Runs the body of the model, and allocates what TRL's `_get_per_token_logps_and_entropies`
    makes of its result. The loss itself has a few floats per token, which do not count.

    Rollouts differ in length, so there is an attention mask, unless attention takes more without.
    """
    shape = (case.rollouts, case.slice_length)
    ids = torch.ones(shape, dtype=torch.long)
    inputs = {"input_ids": ids, "use_cache": False}
    if not case.plain_attention:
        inputs["attention_mask"] = torch.ones_like(ids)
    if model.config._attn_implementation == "sdpa" and case.packs:
        inputs |= _packed(model, ids, case)
    output = model.base_model(**inputs)
    hidden = output[0]
    head = model.get_output_embeddings()
    loss = hidden.sum()
    loss = loss + head.weight.sum()
    head_bytes = _head_bytes(hidden, head.weight, case)
    torch.empty(head_bytes, dtype=torch.uint8)  # is gone before the body's backward
    # one more forward, for logits over the whole vocabulary
    if case.training.distillation_coef > 0:
        output = model(**inputs, logits_to_keep=hidden.size(1))
        logits = output.logits[:, :-1]
        next_ids = inputs["input_ids"][:, 1:]
        logprobs = logits.gather(-1, next_ids[..., None])
        logprobs = logprobs.float()
        loss = loss + logprobs.sum()
    return loss


def _packed(model: Any, ids: torch.Tensor, case: Case) -> dict[str, Any]:
    """Returns the inputs that a model gets in place of padded ones, and has it attend to packed
    rows. These have no mask of all tokens by all tokens, which takes 12 GiB for 65,536 tokens."""
    AttentionInterface.register(ATTENTION, _attend)
    AttentionMaskInterface.register(ATTENTION, _smallest_mask)
    model.set_attn_implementation(ATTENTION)
    if case.plan.sp_size == 1:
        return {}
    row = ids.flatten()
    return {
        "input_ids": row[None],
        "attention_mask": None,
        "sequence_group": SilentGroup(case.plan.sp_size),
        "rollouts": case.rollouts,
    }


def _smallest_mask(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Returns a mask of one entry in place of one for all tokens by all tokens. With a mask,
    Transformers repeats key heads, as the kernel of torch 2.11 needs it."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool)


class SilentGroup(SequenceGroup):
    """Stands in for the ranks that divide a row. What would come from them has a shape and no
    data."""

    def __init__(self, size: int):
        self.size = size
        self.index = 0

    def all_to_all(self, parts: torch.Tensor) -> torch.Tensor:
        parts = parts.contiguous()
        return torch.empty_like(parts)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    sequence_group: SequenceGroup | None = None,
    rollouts: int = 1,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Computes attention as `packed_attention.attend` does, to rollouts of one length. In a
    `sequence_group`, they are parts of one row."""
    if sequence_group is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    by_rollout = []
    for states in sequence_group.by_heads(query, key, value):
        parts = states[0].unflatten(1, (rollouts, -1))  # (heads, rollouts, length, head_dim)
        by_rollout.append(parts.transpose(0, 1))
    query, key, value = by_rollout
    groups = query.size(1) // key.size(1)
    heads = RankHeads(groups)
    attended, _ = sdpa_attention_forward(heads, query, key, value, attention_mask, **options)
    row = attended.flatten(0, 1)
    return sequence_group.by_tokens(row[None]), None


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
    predicted = length - 1  # all tokens of a rollout but its first
    tokens = rollouts * predicted
    entries = min(vocabulary, most_entries)
    tile_weights = entries * width
    # Of a tile that is wider than the vocabulary, host memory has what is written to.
    tile_width = most_entries if on_gpu else entries
    tile = min(tokens, most_tokens) * tile_width

    scratch = 0  # on a GPU, TRL's Triton kernel folds, and 16 bits are multiplied into float32
    if not on_gpu:
        scratch = int(4 * 7.25 * tile)  # float32
        if dtype != torch.float32:  # tile and weights are made float32 first (`_addmm_fp32`)
            made = tile + tile_weights
            scratch = max(scratch, 4 * made)
    if weight.dtype != dtype:
        scratch += tile_weights * dtype.itemsize
    gradients = tokens * width
    if weight.requires_grad:
        gradients += weight.numel()
    in_float32 = 4 * gradients
    rounded = 0
    if hidden.dtype != torch.float32:
        rounded = gradients * hidden.dtype.itemsize
    logits = tile * dtype.itemsize
    besides = max(scratch, rounded)
    return logits + in_float32 + besides
