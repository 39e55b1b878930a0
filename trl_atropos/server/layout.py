"""Finds where vLLM keeps each parameter of the Hugging Face model, by watching vLLM's own loader.

`model.load_weights` is called with one probe per parameter, cut as the checkpoint cuts it, while a dispatch mode
swallows every write into the model's memory and notes where a copy of the probe would have gone. That gives the exact
place of fused, padded, transposed and sliced weights for any architecture, without a table of names.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode

from trl_atropos.protocol import ParameterSpec, View
from trl_atropos.tensors.shared_memory import export_storage


class WriteTracer(TorchDispatchMode):
    """Records copies from `probe` into the given storages, and names every other write, while none takes place."""

    HARMLESS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)  # padding rows of a vocabulary

    def __init__(self, storages: set[int], probe: torch.Tensor):
        super().__init__()
        self.storages = storages  # data pointers
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
    """The storages behind the model's parameters that another process can open, by data pointer, in order."""
    found: dict[int, torch.UntypedStorage] = {}
    for parameter in model.parameters():
        storage = parameter.untyped_storage()
        if storage.data_ptr() not in found and _can_be_shared(storage):
            found[storage.data_ptr()] = storage
    return found


def _can_be_shared(storage: torch.UntypedStorage) -> bool:
    """On the CPU only the loader's arena can. What vLLM replaces after loading, as packed experts, is not there."""
    if storage.device.type != "cpu":
        return True
    try:
        export_storage(storage)
    except ValueError:
        return False
    return True


def trace(
    model: torch.nn.Module, specs: list[ParameterSpec], device: torch.device
) -> tuple[dict[str, View], dict[str, str]]:
    """
    Returns (views, refused): the place of each parameter that is one strided view of the model's memory, and for each
    other parameter the reason why it is not. `View.storage` counts the storages of `unique_storages`.
    """
    shared = {pointer: index for index, pointer in enumerate(unique_storages(model))}
    tensors = [*model.parameters(), *model.buffers()]
    own = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    views: dict[str, View] = {}
    refused: dict[str, str] = {}
    for spec in specs:
        if spec.pieces == []:
            refused[spec.name] = "transformers computes it from the tensors of the checkpoint"
            continue
        probe = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
        tracer = WriteTracer(own, probe)
        try:
            with torch.no_grad(), tracer, _parameters_kept(tracer):
                model.load_weights(_cut(probe, spec))
        except Exception as error:  # noqa: BLE001 - any architecture's own loader may raise anything
            reason = f"vLLM's loader refused it: {type(error).__name__}: {error}"[:300]
            refused[spec.name] = _transformed(tracer) or reason
            continue
        outcome = _place(spec, tracer, shared)
        if isinstance(outcome, View):
            views[spec.name] = outcome
        else:
            refused[spec.name] = outcome
    return views, refused


@contextmanager
def _parameters_kept(tracer: WriteTracer) -> Iterator[None]:
    """Some loaders put a new parameter in the place of the old one. The old one stays, and the tracer is told."""

    def keep(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> torch.nn.Parameter | None:
        old = module._parameters.get(name)
        if old is not None and old.untyped_storage().data_ptr() in tracer.storages:
            tracer.other_writes.append("a new parameter each time")
            return old
        return None

    handle = register_module_parameter_registration_hook(keep)
    try:
        yield
    finally:
        handle.remove()


def _cut(probe: torch.Tensor, spec: ParameterSpec) -> list[tuple[str, torch.Tensor]]:
    """The probe as the checkpoint tensors that vLLM's loader knows. All are views of the probe."""
    if spec.pieces is None:
        return [(spec.name, probe)]
    return [(piece.name, probe.as_strided(piece.size, piece.stride, piece.offset)) for piece in spec.pieces]


def _transformed(tracer: WriteTracer) -> str | None:
    return f"vLLM transforms it while loading ({tracer.other_writes[0]})" if tracer.other_writes else None


def _place(spec: ParameterSpec, tracer: WriteTracer, shared: dict[int, int]) -> View | str:
    """The parameter's view, or why there is none."""
    if tracer.other_writes:
        return _transformed(tracer)
    if not tracer.copies:
        return "vLLM's loader does not keep it"
    pointer = tracer.copies[0][0].untyped_storage().data_ptr()
    for target, source in tracer.copies:
        if target.dtype is not source.dtype:
            return f"vLLM keeps it as {target.dtype}, the trainer as {source.dtype}"
        if target.untyped_storage().data_ptr() != pointer:
            return f"vLLM keeps it in {len(tracer.copies)} pieces, in different memory"
    if pointer not in shared:
        return "vLLM keeps it in memory that cannot be shared: it packs or transforms it after loading"
    place = _merge(spec.shape, [_piece(spec.shape, target, source) for target, source in tracer.copies])
    if place is None:
        return "vLLM keeps only a part of it, or in another order"
    offset, strides = place
    return View(storage=shared[pointer], offset=offset, size=spec.shape, stride=strides, dtype=spec.dtype)


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
    offsets = {tuple(piece.start): piece.offset for piece in pieces}
    strides = []
    for dim, length in enumerate(shape):
        known = {piece.stride[dim] for piece in pieces} - {None}
        if not known:  # every piece is one element wide here: the step is from the first piece to the second
            first, second = (tuple(index if d == dim else 0 for d in range(len(shape))) for index in (0, 1))
            if length > 1 and not {first, second} <= offsets.keys():
                return None
            known = {offsets[second] - offsets[first] if length > 1 else 1}
        if len(known) > 1 or min(known) < 0:
            return None
        strides.append(known.pop())
    origins = {p.offset - sum(s * step for s, step in zip(p.start, strides, strict=True)) for p in pieces}
    return (origins.pop(), strides) if len(origins) == 1 else None
