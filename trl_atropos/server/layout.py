"""Where vLLM keeps each parameter of the Hugging Face model, in memory that the trainer can share.

On the CPU, vLLM packs the weights of layers after the first load, and a parameter that changes
later would never reach the logits. `SharedArenaLoader` moves the parameters into one shared arena
before they are loaded, and has each layer compute with the parameter itself. On a GPU, vLLM's
default loader leaves unquantised weights where they are.

`trace` finds the place of each parameter by watching vLLM's own loader: `model.load_weights` is
called with one probe tensor per parameter, cut as the checkpoint cuts it, while a dispatch mode
swallows every write into the model's memory and notes where a copy of the probe would have gone.
That works for any architecture, without a table of names.
"""

import bisect
import dataclasses
import itertools
import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch.nn.functional import linear
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from trl_atropos.protocol import ParameterSpec, View
from trl_atropos.server import compat
from trl_atropos.tensors.fingerprint import Part, rectangles
from trl_atropos.tensors.shared_memory import allocate_arena, export_storage

# of the modules whose buffers are tables of cosines and sines
ROTARY = "vllm.model_executor.layers.rotary_embedding"
LOAD_FORMAT = "trl_atropos_shared"
ALIGNMENT = 256  # bytes; at least what vectorised kernels assume
# writes into the padding of a vocabulary
HARMLESS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)


@register_model_loader(LOAD_FORMAT)
class SharedArenaLoader(DefaultModelLoader):
    def __init__(self, load_config):
        super().__init__(
            dataclasses.replace(load_config, load_format="auto", model_loader_extra_config={})
        )

    def load_weights(self, model: torch.nn.Module, model_config) -> None:
        packed_layers.extend(compute_in_place(model, model_config))
        move_to_arena(model)
        super().load_weights(model, model_config)


packed_layers: list[str] = []
"""Layers of this process's model that compute with a packed copy of their weights, which new ones
would not reach."""


def compute_in_place(model: torch.nn.Module, model_config) -> list[str]:
    """Has the layers of a model compute with their parameters themselves. Returns the names of
    those that may not: a class which vLLM moved or replaced must lead to a refusal, and not to old
    weights."""
    found = set()
    packed = []
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        kind = type(method)  # exactly: a subclass may compute with a copy
        if kind in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
            method.process_weights_after_loading = _multiply_with_the_weight
        elif kind is UnquantizedFusedMoEMethod and compat.cpu_experts() is not None:
            method.experts_cls = InPlaceExperts
        elif isinstance(method, QuantizeMethodBase):
            packed.append(name)
        found.add(kind)
    if UnquantizedLinearMethod not in found:
        packed.append("the linear layers")
    if UnquantizedFusedMoEMethod not in found and model_config.get_num_experts() > 1:
        packed.append("the experts")
    # `extension.py` loads quantised models anew
    return [] if model_config.quantization is not None else packed


def refusal_of_packed_layers() -> str | None:
    if not packed_layers:
        return None
    return (
        f"vLLM {compat.VLLM_VERSION} packs the weights of {len(packed_layers)} layers for the CPU "
        f"once (the first is {packed_layers[0]}), so that new ones would not reach them: use "
        "`vllm_mode: restart`, another version of vLLM (0.32 is known to work), or a GPU"
    )


def _multiply_with_the_weight(layer: torch.nn.Module) -> None:
    """In place of the method by which vLLM packs the weight of a linear layer or an embedding."""
    layer.cpu_linear = linear


class InPlaceExperts(compat.cpu_experts() or object):
    """vLLM's, on tensors: `w1` is (experts, gate and up, hidden), `w2` (experts, hidden,
    intermediate), as loaded."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Packs nothing."""

    def apply(
        self,
        output,
        hidden_states,
        w1,
        w2,
        topk_weights,
        topk_ids,
        activation,
        *_,
        apply_router_weight_on_input,
        **__,
    ) -> None:
        output.zero_()
        for expert in topk_ids.unique().tolist():
            tokens, choices = (topk_ids == expert).nonzero(as_tuple=True)
            both = linear(
                hidden_states[tokens],
                w1[expert],
                None if self.w1_bias is None else self.w1_bias[expert],
            )
            inner = self._activate(activation, both)
            result = linear(
                inner, w2[expert], None if self.w2_bias is None else self.w2_bias[expert]
            )
            if not apply_router_weight_on_input:
                result *= topk_weights[tokens, choices, None].to(result.dtype)
            output.index_add_(0, tokens, result)

    def _activate(self, activation: MoEActivation, both: torch.Tensor) -> torch.Tensor:
        # as vLLM's SwigluOAIAndMul, for which the CPU build has no kernel
        if activation is MoEActivation.SWIGLUOAI:
            gate = both[:, ::2].clamp(max=7.0)
            up = both[:, 1::2].clamp(min=-7.0, max=7.0)
            return (up + 1) * gate * torch.sigmoid(1.702 * gate)
        inner = both.new_empty(len(both), both.shape[-1] // 2)
        self.activation(activation, inner, both)
        return inner


def move_to_arena(model: torch.nn.Module) -> None:
    """Moves the memory of all parameters of `model` into one new shared arena. Values are not
    copied. Views of that memory move along: Mamba-2 layers read the weights of their convolution
    through such a buffer."""
    parameters = list(model.parameters())
    places = {}
    end = 0
    for storage in (parameter.untyped_storage() for parameter in parameters):
        if storage.data_ptr() not in places:
            places[storage.data_ptr()] = slice(end, end + storage.nbytes())
            end += -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
    arena = allocate_arena(end)
    views = [buffer for buffer in model.buffers() if buffer.untyped_storage().data_ptr() in places]
    for tensor in (*parameters, *views):
        piece = arena[places[tensor.untyped_storage().data_ptr()]].view(tensor.dtype)
        offset = piece.storage_offset() + tensor.storage_offset()
        tensor.data = piece.as_strided(tensor.size(), tensor.stride(), offset)


class CopyTracer(TorchDispatchMode):
    """
    Notes every copy out of one storage: of `memory` (the data pointers of storages) only copies
    into it, and `others` are the operations besides that write there. While it `swallows`, nothing
    is written there.

    Where it does not, `others` are also those that read the source and make neither a view nor such
    a copy. If there are none, the copies that were noted do all that was done.
    """

    def __init__(self, source: torch.Tensor, memory: set[int] | None = None, swallows: bool = True):
        super().__init__()
        self.memory = memory
        self.swallows = swallows
        self.pointer = source.untyped_storage().data_ptr()
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.others: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        target = kwargs["out"] if "out" in kwargs else args[0] if args else ()
        written = (
            self.memory is not None
            and func._schema.is_mutable
            and not self.memory.isdisjoint(_storages(target))
        )
        is_copy = func is torch.ops.aten.copy_.default and self.pointer in _storages(args[1])
        noted = is_copy and (written or self.memory is None)
        if noted:
            self.copies.append((args[0], args[1]))
        elif written and func not in HARMLESS:
            self.others.append(str(func))
        if written and self.swallows:
            return args[0]
        result = func(*args, **kwargs)
        if not (noted or self.swallows) and self.pointer in _storages(*args) - _storages(result):
            self.others.append(str(func))
        return result


def _storages(*values: Any) -> set[int]:
    """The data pointers of the storages of tensors and lists of tensors, among other arguments of
    an operation."""
    flat = itertools.chain.from_iterable(
        one if isinstance(one, list | tuple) else [one] for one in values
    )
    return {one.untyped_storage().data_ptr() for one in flat if isinstance(one, torch.Tensor)}


def memory_of(model: torch.nn.Module) -> set[int]:
    """The data pointers of the storages of all parameters and buffers."""
    return _storages(*model.parameters(), *model.buffers())


def memory_of_adapters(adapters: Any) -> set[int]:
    """The data pointers of the storages behind vLLM's buffers of all adapters' tensors."""
    buffers = [
        value
        for module in adapters.modules.values()
        for name, value in vars(module).items()
        if name.startswith("lora_") and "stacked" in name
    ]
    return _storages(*buffers)


def unique_storages(model: torch.nn.Module) -> dict[int, torch.UntypedStorage]:
    """The storages behind the model's parameters that another process can open, by data pointer, in
    order."""
    found: dict[int, torch.UntypedStorage] = {}
    for storage in (parameter.untyped_storage() for parameter in model.parameters()):
        # on the CPU, only the loader's arena can be shared, not what vLLM packs afterwards
        with suppress(ValueError):
            if storage.device.type == "cpu":
                export_storage(storage)
            found.setdefault(storage.data_ptr(), storage)
    return found


def trace(
    model: torch.nn.Module, specs: list[ParameterSpec], device: torch.device
) -> tuple[dict[str, View], dict[str, str]]:
    """Returns (views, refused): the place of each parameter that is one strided view of the model's
    memory, and for each other parameter the reason why it is not. `View.storage` counts the
    storages of `unique_storages`."""
    shared = {pointer: index for index, pointer in enumerate(unique_storages(model))}
    views: dict[str, View] = {}
    refused: dict[str, str] = {}
    for spec, copies, trouble in _traced(model, specs, device):
        outcome = trouble or _place(spec, copies, shared)
        (views if isinstance(outcome, View) else refused)[spec.name] = outcome
    return views, refused


def parts_of(
    model: torch.nn.Module, specs: list[ParameterSpec]
) -> tuple[list[list[tuple[torch.Tensor, Part]]], dict[str, str]]:
    """Returns (parts, refused): this worker's memory of each parameter, and where that stands in
    the trainer's; and by name why vLLM does not keep a parameter bit for bit."""
    parts = []
    refused = {}
    # As from a checkpoint: in the machine's memory, of which nothing is taken, because nothing is
    # written or read.
    for spec, copies, trouble in _traced(model, specs, torch.device("cpu")):
        kept = next(
            (str(target.dtype) for target, source in copies if target.dtype is not source.dtype),
            None,
        )
        if trouble or kept:
            refused[spec.name] = trouble or f"vLLM keeps it as {kept}"
        found = (
            [] if spec.name in refused else [(target, Part.of(source)) for target, source in copies]
        )
        try:
            for target, part in found:
                list(rectangles(target, part, spec.shape))
        except ValueError as error:
            found, refused[spec.name] = [], str(error)
        parts.append(found)
    return parts, refused


def places_of(model: torch.nn.Module) -> dict[str, tuple]:
    """Address, shape and strides of each parameter by its names: other ones once another parameter
    has replaced it."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: (one.data_ptr(), tuple(one.shape), one.stride()) for name, one in named}


def unnamed(model: torch.nn.Module, parts: list[list[tuple[torch.Tensor, Part]]]) -> dict[str, str]:
    """The parameters of the server's model in which no part of a trainer's parameter is kept, each
    with the reason."""
    begins = sorted(target.data_ptr() for some in parts for target, _ in some)
    found = {}
    for name, parameter in model.named_parameters():
        begin = parameter.data_ptr()
        last = bisect.bisect_left(begins, begin + parameter.nbytes)
        if parameter.numel() and bisect.bisect_left(begins, begin) == last:
            found[f"the server's own {name}"] = (
                "nothing of it is compared with a parameter of the trainer"
            )
    return found


def numbers_of(model: torch.nn.Module) -> dict[str, float]:
    """What modules and the implementations of attention compute with besides tensors (scales, caps,
    epsilons)."""
    found: dict[str, float] = {}
    for path, module in model.named_modules():
        owners: dict[str, Any] = {path: module}
        # layers with a state have none
        if isinstance(module, AttentionLayerBase) and hasattr(module, "impl"):
            owners[f"{path}.impl"] = module.impl
        for owner, values in owners.items():
            found.update(
                {
                    f"{owner}.{name}": one
                    for name, one in vars(values).items()
                    if isinstance(one, float)
                }
            )
    return found


def tables_of(model: torch.nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
    """The tables of rotary embeddings, which a config determines."""
    return {
        f"{path}.{name}": buffer
        for path, module in model.named_modules()
        if type(module).__module__.startswith(ROTARY)
        for name, buffer in module.named_buffers(recurse=False)
        if buffer.device.type == device.type
    }


def _traced(
    model: torch.nn.Module, specs: list[ParameterSpec], device: torch.device
) -> Iterator[tuple[ParameterSpec, list[tuple[torch.Tensor, torch.Tensor]], str | None]]:
    """Yields each parameter with what vLLM's loader would copy, (vLLM's memory, part of the
    parameter), and what else it would do, or why it cannot be known. Nothing is written."""
    memory = memory_of(model)
    for spec in specs:
        if spec.pieces == []:
            yield spec, [], "transformers computes it from the tensors of the checkpoint"
            continue
        probe = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
        parts = [
            (piece.name, probe.as_strided(piece.size, piece.stride, piece.offset))
            for piece in spec.pieces or ()
        ]
        tracer = CopyTracer(probe, memory)
        trouble = None
        try:
            with torch.no_grad(), tracer, _parameters_kept(tracer):
                model.load_weights(parts or [(spec.name, probe)])
        except Exception as error:  # noqa: BLE001 - any architecture's own loader may raise anything
            trouble = f"vLLM's loader refused it: {type(error).__name__}: {error}"[:300]
        if tracer.others:
            trouble = f"vLLM transforms it while loading ({tracer.others[0]})"
        yield spec, tracer.copies, trouble


def _parameters_kept(tracer: CopyTracer) -> RemovableHandle:
    """Some loaders put a new parameter in the place of the old one. The old one stays, and the
    tracer notes it."""

    def keep(
        module: torch.nn.Module, name: str, parameter: torch.nn.Parameter
    ) -> torch.nn.Parameter | None:
        old = module._parameters.get(name)
        if old is not None and old.untyped_storage().data_ptr() in tracer.memory:
            tracer.others.append("a new parameter each time")
            return old
        return None

    return register_module_parameter_registration_hook(keep)


def _place(
    spec: ParameterSpec, copies: list[tuple[torch.Tensor, torch.Tensor]], shared: dict[int, int]
) -> View | str:
    """The parameter's view, or why there is none. `copies` are (vLLM's memory, part of the
    probe)."""
    if not copies:
        return "vLLM's loader does not keep it"
    pointer = copies[0][0].untyped_storage().data_ptr()
    for target, source in copies:
        if target.dtype is not source.dtype:
            return f"vLLM keeps it as {target.dtype}, the trainer as {source.dtype}"
        if target.untyped_storage().data_ptr() != pointer:
            return f"vLLM keeps it in {len(copies)} pieces, in different memory"
    if pointer not in shared:
        return (
            "vLLM keeps it in memory that cannot be shared: it packs or transforms it after loading"
        )
    place = _one_view(spec.shape, copies)
    if place is None:
        return "vLLM keeps only a part of it, or in another order"
    offset, strides = place
    return View(
        storage=shared[pointer], offset=offset, size=spec.shape, stride=strides, dtype=spec.dtype
    )


def _one_view(
    shape: list[int], copies: list[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[int, list[int]] | None:
    """Offset and strides of the view of vLLM's memory that the copies, (target, part of a
    contiguous probe), make up together; None if they are not the whole parameter or do not lie that
    way."""
    contiguous = torch.empty(shape, device="meta").stride()
    strides: list[int | None] = [None] * len(shape)
    # of each copy: offset of the first element in the probe -> in vLLM's memory
    starts: dict[int, int] = {}
    for target, source in copies:
        if target.numel() != source.numel() or (
            source.numel() > 1 and target.shape != source.shape
        ):
            return None
        for size, step, stride in zip(source.shape, source.stride(), target.stride()):
            if size > 1:
                dim = next(
                    (
                        dim
                        for dim, length in enumerate(shape)
                        if length > 1 and contiguous[dim] == step
                    ),
                    None,
                )
                if dim is None or stride < 0 or strides[dim] not in (None, stride):
                    return None
                strides[dim] = stride
        starts[source.storage_offset()] = target.storage_offset()
    if len(starts) != len(copies) or sum(source.numel() for _, source in copies) != math.prod(
        shape
    ):
        return None
    for dim, length in enumerate(shape):
        # every copy is one element wide here: it is the step between two
        if strides[dim] is None and length > 1:
            if not {0, contiguous[dim]} <= starts.keys() or starts[contiguous[dim]] < starts[0]:
                return None
            strides[dim] = starts[contiguous[dim]] - starts[0]
    found = [1 if stride is None else stride for stride in strides]
    dims = list(zip(shape, contiguous, found, strict=True))
    origins = {
        there - sum(here // step % length * stride for length, step, stride in dims)
        for here, there in starts.items()
    }
    return (origins.pop(), found) if len(origins) == 1 else None
