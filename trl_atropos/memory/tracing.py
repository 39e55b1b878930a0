"""What a forward and backward pass hold in memory, found by running them on tensors that have shapes but no data.

`shadow_model` builds the model that TRL would train, of any architecture, without loading or allocating anything.
`trace_backward` and `trace_forward` run it under torch's `FakeTensorMode` and count the bytes of every storage while
it lives. So nothing here depends on an architecture; what torch's operators allocate within themselves is not seen.
"""

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from peft import PeftModel, get_peft_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PretrainedConfig
from trl.kernels import chunked_logprob
from trl.trainer import utils as trl_utils

from trl_atropos.weights.probe import silence

ACTIVATIONS, HEAD, GRADIENTS = "activations", "log-probabilities", "gradients"


@dataclass(frozen=True)
class Setup:
    """
    What a micro-batch's memory depends on.

    Attributes:
        rows: Of the micro-batch, each of `length` tokens, of which all but the first are scored.
        dtype: Of the parameters.
        autocast: Dtype that operators compute in, if another one.
        exact_gradients: Gradients are fp32 whatever the parameters are (`weights/masters.py`).
        accumulates: There are gradients already, of the micro-batches before.
        kernels: CUDA's: TRL's Triton kernel folds the log-probabilities in place.
        plain_attention: Attention keeps its weights: torch's kernels without them take none of the inputs.
        distills: There is one more forward, for logits over the whole vocabulary (`distillation.py`).
    """

    rows: int
    length: int
    dtype: torch.dtype
    autocast: torch.dtype | None = None
    checkpointing: bool = False
    exact_gradients: bool = False
    accumulates: bool = False
    kernels: bool = False
    plain_attention: bool = False
    distills: bool = False


class LiveBytes(TorchDispatchMode):
    """
    Counts the storages that operators make, from then until they are freed.

    Attributes:
        peak (`dict[str, int]`): Bytes of each kind, at the moment when all together were most.
    """

    def __init__(self, existing: list[torch.Tensor]):
        super().__init__()
        self.kind = ACTIVATIONS  # of what is made now
        self.total, self.most = 0, -1
        self.now = {ACTIVATIONS: 0, HEAD: 0, GRADIENTS: 0}
        self.peak = dict(self.now)
        self._kinds: dict[int, tuple[str | None, int, weakref.ref]] = {}
        for tensor in existing:
            self._enter(tensor, None)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._enter(leaf, self.kind)
        return result

    def _enter(self, tensor: torch.Tensor, kind: str | None) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._kinds:
            return
        self._kinds[key] = (kind, storage.nbytes(), weakref.ref(storage, lambda _: self._leave(key)))
        if kind is not None:
            self._count(kind, storage.nbytes())

    def _leave(self, key: int) -> None:
        kind, size, _ = self._kinds.pop(key)
        if kind is not None:
            self._count(kind, -size)

    def _count(self, kind: str, size: int) -> None:
        self.now[kind] += size
        self.total += size
        if self.total > self.most:
            self.most, self.peak = self.total, dict(self.now)

    def is_gradient(self, tensor: torch.Tensor) -> None:
        """From now on, this storage counts as a gradient."""
        self._enter(tensor, GRADIENTS)
        key = tensor.untyped_storage()._cdata
        kind, size, reference = self._kinds[key]
        if kind not in (None, GRADIENTS):
            self._kinds[key] = (GRADIENTS, size, reference)
            self.now[kind] -= size
            self.now[GRADIENTS] += size

    @contextmanager
    def counted_as(self, kind: str) -> Iterator[None]:
        before, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = before


def shadow_model(config: PretrainedConfig, dtype: torch.dtype, peft_config: Any = None, **settings: Any):
    """
    The model that would be trained, with its adapter, with parameters that take no memory, and their `FakeTensorMode`.
    `settings` are further arguments of `from_config`.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, **settings)
        trl_utils.add_fused_lm_head(model, outputs=("log_probs", "entropy"))  # as `GRPOTrainer` does
        if peft_config is not None:
            model = get_peft_model(model, peft_config)
        silence(model)
    mode = FakeTensorMode()
    with mode:
        _take_from_meta(model)
    return model.train(), mode


def _take_from_meta(model: torch.nn.Module) -> None:
    """Operators choose their kernels by the device, and have none to choose from on meta."""
    taken: dict[torch.Tensor, torch.Tensor] = {}  # tied parameters stay one
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is None:
                    continue
                if tensor not in taken:
                    here = torch.empty(tensor.shape, dtype=tensor.dtype)
                    if isinstance(tensor, torch.nn.Parameter):
                        here = torch.nn.Parameter(here, requires_grad=tensor.requires_grad)
                    taken[tensor] = here
                own[name] = taken[tensor]


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
    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda one: live.is_gradient(one.grad)) for parameter in trained
    ]
    with mode:
        for parameter in trained:
            parameter.grad_dtype = torch.float32 if setup.exact_gradients else parameter.dtype
            if setup.accumulates:
                parameter.grad = torch.empty_like(parameter, dtype=parameter.grad_dtype)
                live.is_gradient(parameter.grad)
        with (
            live,
            _autocast(setup),
            _attention(setup),
            _traced_head(live, setup.kernels, model.config),
        ):
            _score(model, setup).backward()
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
    return live.most


def _score(model: torch.nn.Module, setup: Setup) -> torch.Tensor:
    """
    The call of TRL's `_get_per_token_logps_and_entropies`, and its sum: the loss itself has a few floats per token.
    Rows differ in length, so there is an attention mask, unless attention takes more memory without.
    """
    ids = torch.ones(setup.rows, setup.length, dtype=torch.long)
    inputs = {"input_ids": ids}
    if not setup.plain_attention:
        inputs["attention_mask"] = torch.ones_like(ids)
    loss = model(**inputs, labels=ids, fused_lm_head=True).log_probs.sum()
    if setup.distills:
        logits = model(**inputs, logits_to_keep=setup.length, use_cache=False).logits[:, :-1]
        loss = loss + logits.gather(-1, ids[:, :-1, None]).float().sum()
    return loss


def _autocast(setup: Setup):
    return nullcontext() if setup.autocast is None else torch.autocast("cpu", setup.autocast)


def _attention(setup: Setup):
    return sdpa_kernel(SDPBackend.MATH) if setup.plain_attention else nullcontext()


@contextmanager
def _traced_head(live: LiveBytes, kernels: bool, config: PretrainedConfig) -> Iterator[None]:
    """Counts what TRL's fused head allocates as such, and leaves out what its Triton kernels do without."""
    original = chunked_logprob.ChunkedLogProbFunction

    class Traced(original):
        @staticmethod
        def forward(ctx, *args):
            with live.counted_as(HEAD):
                return original.forward(ctx, *args)

        @staticmethod
        def backward(ctx, *gradients):
            with live.counted_as(HEAD):
                return original.backward(ctx, *gradients)

    with ExitStack() as stack:
        stack.enter_context(patch.object(trl_utils, "_ChunkedLogProbFunction", Traced))
        for name in ("_forward_tile", "_backward_tile", "_addmm_fp32") if kernels else ():
            stack.enter_context(patch.object(chunked_logprob, name, lambda *args, **kwargs: None))
        if not kernels:  # of a tile that is wider than the vocabulary, host memory has what is written to
            width = min(trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE, config.get_text_config().vocab_size)
            stack.enter_context(patch.object(trl_utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", width))
        yield
