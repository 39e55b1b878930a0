"""Finds where vLLM keeps each parameter of the Hugging Face model. `extension.py` calls it in every
worker.

`trace` finds the place of each parameter by watching vLLM's own loader. It calls
`model.load_weights` with one probe tensor per parameter, cut as the checkpoint cuts it. Meanwhile,
a dispatch mode swallows every write into the model's memory, and notes where a copy of the probe
would have gone. That works for any architecture, without a table of names.
"""

import bisect
import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from trl_atropos.protocol import ParameterSpec, View
from trl_atropos.tensors.rectangles import Part, rectangles
from trl_atropos.tensors.shared_memory import export_storage, pointer_of

# of the modules whose buffers are tables of cosines and sines
ROTARY = "vllm.model_executor.layers.rotary_embedding"
# writes into the padding of a vocabulary
HARMLESS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)

Copy = tuple[Tensor, Tensor]  # target in vLLM's memory, source that it is copied from
Piece = tuple[Tensor, Part]  # elements in vLLM's memory, their place in the parameter


# ------------------------------------------------------------------------------ watching a loader


class CopyTracer(TorchDispatchMode):
    """
    Notes the copies out of one storage while it is active.

    `copies` are those into `memory` (data pointers of storages), or all of them if it is `None`.
    `others` are the other operations that write into `memory`. If it `swallows`, nothing is written
    there.

    If it does not, `others` also has the operations that read the source and make neither a view
    nor such a copy. If there are none, the noted copies do all that was done.
    """

    def __init__(self, source: Tensor, memory: set[int] | None = None, swallows: bool = True):
        super().__init__()
        self.memory = memory
        self.swallows = swallows
        self.pointer = pointer_of(source)
        self.copies: list[Copy] = []
        self.others: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        target = args[0] if args else ()
        target = kwargs.get("out", target)
        is_written = (
            self.memory is not None
            and func._schema.is_mutable
            and not self.memory.isdisjoint(_pointers(target))
        )
        is_noted = False
        is_copy = func is torch.ops.aten.copy_.default
        if is_copy and (is_written or self.memory is None):
            source = args[1]
            is_noted = self.pointer in _pointers(source)
        if is_noted:
            self.copies.append((target, source))
        elif is_written and func not in HARMLESS:
            self.others.append(str(func))
        if is_written and self.swallows:
            return args[0]
        result = func(*args, **kwargs)
        if is_noted or self.swallows:
            return result
        if self.pointer in _pointers(*args) - _pointers(result):
            self.others.append(str(func))
        return result


def _pointers(*values: Any) -> set[int]:
    """Returns the data pointers of the storages of tensors and lists of tensors, among other
    arguments of an operation."""
    pointers = set()
    for value in values:
        items = value if isinstance(value, list | tuple) else [value]
        for item in items:
            if isinstance(item, Tensor):
                pointers.add(pointer_of(item))
    return pointers


def memory_of(model: nn.Module) -> set[int]:
    """Returns the data pointers of the storages of all parameters and buffers."""
    return _pointers(*model.parameters(), *model.buffers())


def memory_of_adapters(adapters: Any) -> set[int]:
    """Returns the data pointers of the storages behind vLLM's buffers of all adapters' tensors."""
    buffers = []
    for module in adapters.modules.values():
        for name, value in vars(module).items():
            if name.startswith("lora_") and "stacked" in name:
                buffers.append(value)
    return _pointers(*buffers)


def unique_storages(model: nn.Module) -> dict[int, torch.UntypedStorage]:
    """Returns the storages behind the model's parameters that another process can open, by data
    pointer, in order."""
    storages = {}
    for parameter in model.parameters():
        storage = parameter.untyped_storage()
        # on the CPU, only the loader's arena can be shared, not what vLLM packs afterwards
        with suppress(ValueError):
            if storage.device.type == "cpu":
                export_storage(storage)
            storages.setdefault(storage.data_ptr(), storage)
    return storages


def _traced(
    model: nn.Module, specs: list[ParameterSpec], device: torch.device
) -> Iterator[tuple[ParameterSpec, list[Copy], str | None]]:
    """Yields each parameter with the copies that vLLM's loader would make of it, and with its
    trouble: what else the loader would do, or why it cannot be known. Nothing is written."""
    memory = memory_of(model)
    for spec in specs:
        if spec.pieces == []:
            yield spec, [], "transformers computes it from the tensors of the checkpoint"
            continue
        dtype = getattr(torch, spec.dtype)
        probe = torch.empty(spec.shape, dtype=dtype, device=device)
        weights = []
        for piece in spec.pieces or ():
            view = probe.as_strided(piece.size, piece.stride, piece.offset)
            weights.append((piece.name, view))
        tracer = CopyTracer(probe, memory)
        trouble = None
        try:
            with torch.no_grad(), tracer, _parameters_kept(tracer):
                model.load_weights(weights or [(spec.name, probe)])
        except Exception as error:  # noqa: BLE001 - any architecture's own loader may raise anything
            trouble = f"vLLM's loader refused it: {type(error).__name__}: {error}"[:300]
        if tracer.others:
            trouble = f"vLLM transforms it while loading ({tracer.others[0]})"
        yield spec, tracer.copies, trouble


def _parameters_kept(tracer: CopyTracer) -> RemovableHandle:
    """Keeps the old parameter if a loader puts a new one in its place, and makes the tracer note
    it."""

    def keep(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        old = module._parameters.get(name)
        if old is None or pointer_of(old) not in tracer.memory:
            return None
        tracer.others.append("a new parameter each time")
        return old

    return register_module_parameter_registration_hook(keep)


# ----------------------------------------------------------------- parameters as views of memory


def trace(
    model: nn.Module, specs: list[ParameterSpec], device: torch.device
) -> tuple[dict[str, View], dict[str, str]]:
    """Returns (views, refused): the place of each parameter that is one strided view of the model's
    memory, and for each other parameter the reason why it is not. `View.storage` counts the
    storages of `unique_storages`."""
    shared = list(unique_storages(model))  # data pointers
    views = {}
    refused = {}
    for spec, copies, trouble in _traced(model, specs, device):
        place = trouble or _place(spec, copies, shared)
        if isinstance(place, View):
            views[spec.name] = place
        else:
            refused[spec.name] = place
    return views, refused


def _place(spec: ParameterSpec, copies: list[Copy], shared: list[int]) -> View | str:
    """Returns the parameter's view, or why there is none. Sources are parts of its probe."""
    if not copies:
        return "vLLM's loader does not keep it"
    pointer = pointer_of(copies[0][0])
    for target, source in copies:
        if target.dtype is not source.dtype:
            return f"vLLM keeps it as {target.dtype}, the trainer as {source.dtype}"
        if pointer_of(target) != pointer:
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
        storage=shared.index(pointer),
        offset=offset,
        size=spec.shape,
        stride=strides,
        dtype=spec.dtype,
    )


def _one_view(shape: list[int], copies: list[Copy]) -> tuple[int, list[int]] | None:
    """
    Returns offset and strides of the view of vLLM's memory that the copies make up together, or
    `None` if they are not the whole parameter or do not lie that way. Sources are parts of a
    contiguous probe.

    Example: two copies put the elements 0 and 1 of a parameter of four at 10 in vLLM's memory, and
    its elements 2 and 3 at 12. Both targets have stride 1, and both copies place element 0 at 10:
    the second because 12 - 2 * 1 is 10. So the parameter is the view with offset 10 and stride 1.
    With the second copy at 20, element 0 would be at 10 and at 18: there is no such view.
    """
    steps = torch.empty(shape, device="meta").stride()  # in the probe, by dimension
    starts = {}  # of each copy, by its offset in the probe: that in vLLM's memory
    missing = math.prod(shape)  # elements
    for target, source in copies:
        starts[source.storage_offset()] = target.storage_offset()
        missing -= source.numel()
    if missing or len(starts) != len(copies):
        return None
    strides = _strides_of_view(shape, steps, copies, starts)
    if strides is None:
        return None
    origins = set()  # where each copy places the parameter's first element
    for here, there in starts.items():
        for step, length, stride in zip(steps, shape, strides):
            index = here // step % length
            there -= index * stride
        origins.add(there)
    if len(origins) != 1:
        return None
    return origins.pop(), strides


def _strides_of_view(
    shape: list[int], steps: tuple[int, ...], copies: list[Copy], starts: dict[int, int]
) -> list[int] | None:
    """Returns the strides of the view for `_one_view`, or `None` if there are none."""
    known_strides = _strides_in_targets(shape, steps, copies)
    if known_strides is None:
        return None
    strides = []
    for dim, length in enumerate(shape):
        stride = known_strides.get(dim)
        if length <= 1:
            stride = 1
        elif stride is None:
            # every copy is one element wide here: the stride is the distance between two copies
            start = starts.get(0)
            following = starts.get(steps[dim])
            if start is None or following is None or following < start:
                return None
            stride = following - start
        strides.append(stride)
    return strides


def _strides_in_targets(
    shape: list[int], steps: tuple[int, ...], copies: list[Copy]
) -> dict[int, int] | None:
    """Returns the strides of the targets by dimension of the parameter, for the dimensions along
    which copies extend. `None` if copies differ in a stride, or change more than strides."""
    dims = {}  # by step
    for dim, step in enumerate(steps):
        if shape[dim] > 1:
            dims[step] = dim
    strides = {}
    for target, source in copies:
        if target.numel() != source.numel():
            return None
        if source.numel() > 1 and target.shape != source.shape:
            return None
        for size, step, stride in zip(source.shape, source.stride(), target.stride()):
            if size <= 1:
                continue
            dim = dims.get(step)
            if dim is None or stride < 0:
                return None
            if strides.setdefault(dim, stride) != stride:
                return None
    return strides


# ------------------------------------------------------------------- parameters, to be compared


def pieces_of(
    model: nn.Module, specs: list[ParameterSpec]
) -> tuple[list[list[Piece]], dict[str, str]]:
    """Returns (pieces, refused): for each parameter its elements in this worker's memory, and by
    name why vLLM does not keep a parameter bit for bit."""
    pieces = []
    refused = {}
    # The probes are as from a checkpoint: in the machine's memory, of which nothing is taken,
    # because nothing is written or read.
    for spec, copies, trouble in _traced(model, specs, torch.device("cpu")):
        kept = [(target, Part.of(source)) for target, source in copies]
        reason = trouble or _why_not_comparable(spec, copies)
        if reason is not None:
            kept = []
            refused[spec.name] = reason
        pieces.append(kept)
    return pieces, refused


def _why_not_comparable(spec: ParameterSpec, copies: list[Copy]) -> str | None:
    for target, source in copies:
        if target.dtype is not source.dtype:
            return f"vLLM keeps it as {target.dtype}"
    try:
        for target, source in copies:
            list(rectangles(target, Part.of(source), spec.shape))
    except ValueError as error:
        return str(error)
    return None


def places_of(model: nn.Module) -> dict[str, tuple]:
    """Returns address, shape and strides of each parameter by its names. They differ once another
    parameter has replaced it."""
    places = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        address = parameter.data_ptr()
        places[name] = (address, tuple(parameter.shape), parameter.stride())
    return places


def unnamed(model: nn.Module, pieces: list[list[Piece]]) -> dict[str, str]:
    """Returns the parameters of the server's model in which no piece of a trainer's parameter is
    kept, each with the reason."""
    addresses = []
    for parameter_pieces in pieces:
        addresses += [target.data_ptr() for target, _ in parameter_pieces]
    addresses.sort()
    reasons = {}
    for name, parameter in model.named_parameters():
        begin = parameter.data_ptr()
        first = bisect.bisect_left(addresses, begin)
        last = bisect.bisect_left(addresses, begin + parameter.nbytes)
        is_kept = first < last
        if parameter.numel() and not is_kept:
            reasons[f"the server's own {name}"] = (
                "nothing of it is compared with a parameter of the trainer"
            )
    return reasons


def numbers_of(model: nn.Module) -> dict[str, float]:
    """Returns the numbers that modules and the implementations of attention compute with besides
    tensors (scales, caps, epsilons)."""
    numbers = {}
    for path, module in model.named_modules():
        numbers |= _numbers_in(module, path)
        # layers with a state have none
        if isinstance(module, AttentionLayerBase) and hasattr(module, "impl"):
            numbers |= _numbers_in(module.impl, f"{path}.impl")
    return numbers


def _numbers_in(owner: Any, path: str) -> dict[str, float]:
    numbers = {}
    for name, value in vars(owner).items():
        if isinstance(value, float):
            numbers[f"{path}.{name}"] = value
    return numbers


def tables_of(model: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Returns the tables of rotary embeddings, which a config determines."""
    tables = {}
    for path, module in model.named_modules():
        if not type(module).__module__.startswith(ROTARY):
            continue
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.device.type == device.type:
                tables[f"{path}.{name}"] = buffer
    return tables
