"""Finds where vLLM keeps each parameter of the Hugging Face model, by watching vLLM's own loader.

`model.load_weights` is called with one probe tensor per parameter while a dispatch mode swallows every write into the
model's memory and notes where a copy of the probe would have gone. That gives the exact place of fused, padded,
transposed and sliced weights for any architecture, without a table of names.
"""

import math
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trl_atropos.protocol import ParameterSpec, View


class WriteTracer(TorchDispatchMode):
    """Records copies from `probe` into the given storages, and names every other write, while none takes place."""

    HARMLESS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)  # padding rows of a vocabulary

    def __init__(self, storages: dict[int, int], probe: torch.Tensor):
        super().__init__()
        self.storages = storages  # data pointer of a storage -> its index
        self.probe_pointer = probe.untyped_storage().data_ptr()
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.other_writes: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.is_mutable and args and isinstance(args[0], torch.Tensor):
            target = args[0]
            if target.untyped_storage().data_ptr() in self.storages:
                is_copy = func is torch.ops.aten.copy_.default
                if is_copy and args[1].untyped_storage().data_ptr() == self.probe_pointer:
                    self.copies.append((target, args[1]))
                elif func not in self.HARMLESS:
                    self.other_writes.append(str(func))
                return target
        return func(*args, **(kwargs or {}))


def unique_storages(model: torch.nn.Module) -> dict[int, torch.UntypedStorage]:
    """The storages behind the model's parameters, by data pointer, in order of first use."""
    found: dict[int, torch.UntypedStorage] = {}
    for parameter in model.parameters():
        storage = parameter.untyped_storage()
        found.setdefault(storage.data_ptr(), storage)
    return found


def trace(
    model: torch.nn.Module, specs: list[ParameterSpec], device: torch.device
) -> tuple[dict[str, View], dict[str, str]]:
    """
    Returns (views, refused): the place of each parameter that is one strided view of the model's memory, and for each
    other parameter the reason why it is not.
    """
    storages = {pointer: index for index, pointer in enumerate(unique_storages(model))}
    views: dict[str, View] = {}
    refused: dict[str, str] = {}
    for spec in specs:
        probe = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
        tracer = WriteTracer(storages, probe)
        try:
            with torch.no_grad(), tracer:
                model.load_weights([(spec.name, probe)])
        except Exception as error:  # noqa: BLE001 - any architecture's own loader may raise anything
            refused[spec.name] = f"vLLM's loader refused it: {type(error).__name__}: {error}"[:300]
            continue
        outcome = _place(spec, tracer)
        if isinstance(outcome, View):
            views[spec.name] = outcome
        else:
            refused[spec.name] = outcome
    return views, refused


def _place(spec: ParameterSpec, tracer: WriteTracer) -> View | str:
    """The parameter's view, or why there is none."""
    if tracer.other_writes:
        return f"vLLM transforms it while loading ({tracer.other_writes[0]})"
    if not tracer.copies:
        return "vLLM's loader does not keep it"
    first = tracer.copies[0][0]
    for target, source in tracer.copies:
        if target.dtype is not source.dtype:
            return f"vLLM keeps it as {target.dtype}, the trainer as {source.dtype}"
        if target.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return f"vLLM keeps it in {len(tracer.copies)} pieces, in different memory"
    place = _merge(spec.shape, [_piece(spec.shape, target, source) for target, source in tracer.copies])
    if place is None:
        return "vLLM keeps only a part of it, or in another order"
    offset, strides = place
    storage = tracer.storages[first.untyped_storage().data_ptr()]
    return View(storage=storage, offset=offset, size=spec.shape, stride=strides, dtype=spec.dtype)


@dataclass(frozen=True)
class Piece:
    """A rectangular part of a parameter, and where vLLM puts it. One entry per dimension of the parameter."""

    start: list[int]
    size: list[int]
    stride: list[int | None]  # in the server's memory; None where the piece is one element wide
    offset: int  # of its first element in the server's memory


def _piece(shape: list[int], target: torch.Tensor, source: torch.Tensor) -> Piece | None:
    """Reads one copy as a piece of the contiguous probe behind `source`, whatever its dimensions were permuted to."""
    contiguous = torch.empty(shape, device="meta").stride()
    size, stride = [1] * len(shape), [None] * len(shape)
    for dim in range(source.dim()):
        if source.size(dim) == 1:
            continue
        matches = [d for d in range(len(shape)) if shape[d] > 1 and contiguous[d] == source.stride(dim)]
        if not matches or target.shape != source.shape:
            return None
        size[matches[0]], stride[matches[0]] = source.size(dim), target.stride(dim)
    start, rest = [], source.storage_offset()
    for step in contiguous:
        start.append(rest // step)
        rest %= step
    return Piece(start, size, stride, target.storage_offset())


def _merge(shape: list[int], pieces: list[Piece | None]) -> tuple[int, list[int]] | None:
    """Offset and strides by which one view reads all pieces, if they are the whole parameter and lie that way."""
    if None in pieces or len({tuple(piece.start) for piece in pieces}) != len(pieces):
        return None
    if sum(math.prod(piece.size) for piece in pieces) != math.prod(shape):
        return None
    strides = []
    for dim, length in enumerate(shape):
        known = {piece.stride[dim] for piece in pieces} - {None}
        if len(known) > 1 or (not known and length > 1):
            return None
        strides.append(known.pop() if known else 1)
    origins = {p.offset - sum(s * step for s, step in zip(p.start, strides, strict=True)) for p in pieces}
    return (origins.pop(), strides) if len(origins) == 1 else None
