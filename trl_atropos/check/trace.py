"""What a forward and backward pass hold in memory, of a model of any architecture: found by running them under torch's
`FakeTensorMode`, on tensors that have shapes but no data, and counting the bytes of every storage while it lives.

(torch's own `MemTracker` counts the same bytes in five times the time, and cannot count frozen parameters.) What
torch's operators allocate within themselves is not seen.
"""

import weakref
from collections.abc import Iterable
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


def shadow_model(
    config: PretrainedConfig, dtype: torch.dtype, peft_config: Any = None, **settings: Any
) -> tuple[Any, FakeTensorMode]:
    """The model with its adapter, whose parameters take no memory. `settings` are arguments of `from_config`."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, **settings)
        if peft_config is not None:
            model = get_peft_model(model, peft_config)
        silence(model)
        plain = _plain(model)
        if plain.base_model is plain:  # Llama 4 names a backbone that it does not have
            plain.base_model_prefix = "model"
    with FakeTensorMode() as mode:  # operators choose their kernels by the device, and have none for meta
        model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
        plain.tie_weights()
    return model.train(), mode


def _plain(model: Any) -> Any:
    return model.get_base_model() if isinstance(model, PeftModel) else model


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
        blocks = [m for m in model.modules() if type(m).__name__ in (_plain(model)._no_split_modules or ())]
        inside = [sum(p.nbytes for p in block.parameters()) for block in blocks]
        weights = sum(p.nbytes for p in parameters)
        # FSDP2 keeps what is outside of the blocks whole from forward to backward, and fetches one block ahead.
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
        key, size = storage._cdata, storage.nbytes()
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


def trace(model: Any, mode: FakeTensorMode, case: Any, exact_gradients: bool) -> dict[str, int]:
    """
    Bytes at the peak of a micro-batch's forward and backward, besides the parameters, by kind. `case` is a
    `memory.Case`. With `exact_gradients`, they are in float32 whatever the parameters are (`weights/masters.py`).
    """
    args, plain, live = case.training, _plain(model), LiveBytes([*model.parameters(), *model.buffers()])
    # Is there a gradient already, of the micro-batches before?
    accumulates = args.gradient_accumulation_steps > 1 or case.rollouts < args.per_device_train_batch_size
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


def _score(model: Any, case: Any) -> torch.Tensor:
    """
    The body of the model, and what TRL's `_get_per_token_logps_and_entropies` makes of it: the loss itself has a few
    floats per token. Rollouts differ in length, so there is an attention mask, unless attention takes more without.
    """
    ids = torch.ones(case.rollouts, case.length, dtype=torch.long)
    mask = {} if case.plain_attention else {"attention_mask": torch.ones_like(ids)}
    hidden, weight = model.base_model(input_ids=ids, **mask, use_cache=False)[0], model.get_output_embeddings().weight
    loss = hidden.sum() + weight.sum()
    torch.empty(_head_bytes(hidden, weight, case), dtype=torch.uint8)  # is gone before the body's backward
    if case.training.distillation_coef > 0:  # one more forward, for logits over the whole vocabulary
        logits = model(input_ids=ids, **mask, logits_to_keep=case.length, use_cache=False).logits[:, :-1]
        loss = loss + logits.gather(-1, ids[:, :-1, None]).float().sum()
    return loss


def _head_bytes(hidden: torch.Tensor, weight: torch.Tensor, case: Any) -> int:
    """
    What TRL's fused head holds in its backward (`ChunkedLogProbFunction` in trl/kernels/chunked_logprob.py): a tile of
    logits in the dtype that is computed in, what folds it where there is no Triton (7.25 tiles in float32), and
    float32 gradients, which are then rounded.
    """
    dtype, on_gpu = case.autocast or hidden.dtype, case.plan.device == "cuda"  # there, TRL's Triton kernel folds
    tokens, width = hidden.shape[0] * (hidden.shape[1] - 1), min(weight.shape[0], TILE[1])
    # Of a tile that is wider than the vocabulary, host memory has what is written to.
    tile = min(tokens, TILE[0]) * (TILE[1] if on_gpu else width)
    scratch = 0 if on_gpu else int(4 * 7.25 * tile)
    scratch += (weight.dtype != dtype) * width * weight.shape[1] * dtype.itemsize
    gradients = tokens * hidden.shape[-1] + weight.requires_grad * weight.numel()
    rounded = gradients * hidden.dtype.itemsize if hidden.dtype != torch.float32 else 0
    return tile * dtype.itemsize + 4 * gradients + max(scratch, rounded)
