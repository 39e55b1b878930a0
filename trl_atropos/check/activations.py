"""What a forward and backward pass hold in memory, found by running them on tensors that have shapes but no data.

`shadow_model` builds the model that would be trained, of any architecture, without loading or allocating anything.
`trace_backward` and `trace_forward` run its body under torch's `FakeTensorMode` and count the bytes of every storage
while it lives; `_Head` stands for TRL's fused head, and allocates what that does. (torch's own `MemTracker` counts the
same bytes in eight times the time.) What torch's operators allocate within themselves is not seen.
"""

import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel, get_peft_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PretrainedConfig

from trl_atropos.weights.probe import silence

ACTIVATIONS, GRADIENTS = "activations", "gradients"
TILE = (4096, 32768)  # tokens and entries of the vocabulary that TRL's head works on at once (trl/kernels)


@dataclass(frozen=True)
class Setup:
    """What a micro-batch's memory depends on."""

    rows: int
    length: int  # tokens of each, of which all but the first are scored
    autocast: torch.dtype | None = None  # what operators compute in, if not the parameters' dtype
    checkpointing: bool = False
    exact_gradients: bool = False  # fp32 whatever the parameters are (`weights/masters.py`)
    accumulates: bool = False  # there are gradients already, of the micro-batches before
    kernels: bool = False  # CUDA's: TRL's Triton kernel folds the log-probabilities in place
    plain_attention: bool = False  # attention keeps its weights: torch's kernels without them take none of the inputs
    distills: bool = False  # one more forward, for logits over the whole vocabulary (`distillation.py`)


class LiveBytes(TorchDispatchMode):
    """
    Counts the storages that operators make, from then until they are freed.

    Attributes:
        peak (`dict[str, int]`): Bytes of activations and of gradients, at the moment when both together were most.
    """

    def __init__(self, existing: list[torch.Tensor]):
        super().__init__()
        self.now = {ACTIVATIONS: 0, GRADIENTS: 0}
        self.peak = dict(self.now)
        self._kinds: dict[int, tuple[str | None, int, weakref.ref]] = {}
        for tensor in existing:
            self._enter(tensor, None)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._enter(leaf, ACTIVATIONS)
        return result

    def is_gradient(self, tensor: torch.Tensor) -> None:
        """From now on, this storage counts as a gradient."""
        self._enter(tensor, GRADIENTS)
        key = tensor.untyped_storage()._cdata
        kind, size, reference = self._kinds[key]
        if kind == ACTIVATIONS:
            self._kinds[key] = (GRADIENTS, size, reference)
            self.now[ACTIVATIONS] -= size
            self.now[GRADIENTS] += size

    def _enter(self, tensor: torch.Tensor, kind: str | None) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._kinds:
            reference = weakref.ref(storage, lambda _: self._count(*self._kinds.pop(key)[:2], -1))
            self._kinds[key] = (kind, storage.nbytes(), reference)
            self._count(kind, storage.nbytes(), 1)

    def _count(self, kind: str | None, size: int, sign: int) -> None:
        if kind is not None:
            self.now[kind] += sign * size
            if sum(self.now.values()) > sum(self.peak.values()):
                self.peak = dict(self.now)


class _Head(torch.autograd.Function):
    """
    In place of `ChunkedLogProbFunction` (trl/kernels/chunked_logprob.py): a tile of logits in the dtype that is
    computed in, what folds it where there is no Triton (3 tiles in float32 forward, 7.25 backward), and float32
    gradients.
    """

    @staticmethod
    def forward(ctx, hidden: torch.Tensor, weight: torch.Tensor, setup: Setup) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.setup = setup
        _Head.fold(hidden, weight, setup, 3)
        return hidden.new_empty(len(hidden), dtype=torch.float32)

    @staticmethod
    def backward(ctx, _gradient: torch.Tensor):
        hidden, weight = ctx.saved_tensors
        of_hidden = torch.empty_like(hidden, dtype=torch.float32)
        of_weight = torch.empty_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        _logits = _Head.fold(hidden, weight, ctx.setup, 7.25)
        return of_hidden.to(hidden.dtype), None if of_weight is None else of_weight.to(weight.dtype), None

    @staticmethod
    def fold(hidden: torch.Tensor, weight: torch.Tensor, setup: Setup, tiles: float) -> torch.Tensor:
        """The tile of logits. What folds it is counted, and gone at once."""
        dtype = setup.autocast or hidden.dtype
        width = min(weight.shape[0], TILE[1])
        # Of a tile that is wider than the vocabulary, host memory has what is written to.
        tile = min(len(hidden), TILE[0]) * (TILE[1] if setup.kernels else width)
        logits = torch.empty(tile, dtype=dtype)
        scratch = 0 if setup.kernels else int(4 * tiles * tile)
        torch.empty(scratch + (weight.dtype != dtype) * width * weight.shape[1] * dtype.itemsize, dtype=torch.uint8)
        return logits


def shadow_model(config: PretrainedConfig, dtype: torch.dtype, peft_config: Any = None, **settings: Any):
    """
    The model that would be trained, with its adapter, with parameters that take no memory, and their `FakeTensorMode`.
    `settings` are further arguments of `from_config`.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, **settings)
        if peft_config is not None:
            model = get_peft_model(model, peft_config)
        silence(model)
        plain = model.get_base_model() if isinstance(model, PeftModel) else model
        if plain.base_model is plain:  # Llama 4 names a backbone that it does not have
            plain.base_model_prefix = "model"
    mode = FakeTensorMode()
    taken: dict[torch.Tensor, torch.Tensor] = {}  # tied parameters stay one
    with mode:  # operators choose their kernels by the device, and have none to choose from on meta
        for own in (own for module in model.modules() for own in (module._parameters, module._buffers)):
            for name, tensor in own.items():
                if tensor is not None and tensor not in taken:
                    here = torch.empty(tensor.shape, dtype=tensor.dtype)
                    is_parameter = isinstance(tensor, torch.nn.Parameter)
                    taken[tensor] = torch.nn.Parameter(here, tensor.requires_grad) if is_parameter else here
                own[name] = taken.get(tensor)
    return model.train(), mode


def trace_backward(model: torch.nn.Module, mode: FakeTensorMode, setup: Setup) -> dict[str, int]:
    """Bytes at the peak of a micro-batch's forward and backward, besides the parameters, by kind."""
    plain = model.get_base_model() if isinstance(model, PeftModel) else model
    plain.gradient_checkpointing_disable()
    if setup.checkpointing:
        plain.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if model is not plain:
            plain.enable_input_require_grads()  # as TRL does
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    live = LiveBytes([*model.parameters(), *model.buffers()])
    hooks = [one.register_post_accumulate_grad_hook(lambda one: live.is_gradient(one.grad)) for one in trained]
    with mode:
        for parameter in trained:
            parameter.grad_dtype = torch.float32 if setup.exact_gradients else parameter.dtype
            if setup.accumulates:
                parameter.grad = torch.empty_like(parameter, dtype=parameter.grad_dtype)
                live.is_gradient(parameter.grad)
        autocast = nullcontext() if setup.autocast is None else torch.autocast("cpu", setup.autocast)
        attention = sdpa_kernel(SDPBackend.MATH) if setup.plain_attention else nullcontext()
        with live, autocast, attention:
            _score(plain, setup).backward()
    for hook in hooks:
        hook.remove()
    model.zero_grad(set_to_none=True)
    return live.peak


def trace_forward(model: torch.nn.Module, mode: FakeTensorMode, tokens: int, length: int) -> int:
    """Bytes at the peak of a forward over sequences of `length`, without gradients and without log-probabilities."""
    live = LiveBytes([*model.parameters(), *model.buffers()])
    with mode, torch.no_grad():
        ids = torch.ones(max(1, tokens // length), min(tokens, length), dtype=torch.long)
        with live:
            model.base_model(input_ids=ids, use_cache=False)
    return sum(live.peak.values())


def _score(model: torch.nn.Module, setup: Setup) -> torch.Tensor:
    """
    A sum of log-probabilities, as TRL's `_get_per_token_logps_and_entropies` computes them: the loss itself has a few
    floats per token. Rows differ in length, so there is an attention mask, unless attention takes more memory without.
    """
    ids = torch.ones(setup.rows, setup.length, dtype=torch.long)
    inputs = {"input_ids": ids}
    if not setup.plain_attention:
        inputs["attention_mask"] = torch.ones_like(ids)
    hidden = model.base_model(**inputs, use_cache=False)[0][:, :-1]
    loss = _Head.apply(hidden.reshape(-1, hidden.shape[-1]), model.get_output_embeddings().weight, setup).sum()
    if setup.distills:
        logits = model(**inputs, logits_to_keep=setup.length, use_cache=False).logits[:, :-1]
        loss = loss + logits.gather(-1, ids[:, :-1, None]).float().sum()
    return loss
