"""Finds where vLLM keeps each parameter of the Hugging Face model, by watching vLLM's own loader.

`model.load_weights` is called with one probe per parameter, cut as the checkpoint cuts it, while a dispatch mode
swallows every write into the model's memory and notes where a copy of the probe would have gone. That gives the exact
place of fused, padded, transposed and sliced weights for any architecture, without a table of names.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

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
    place = _one_view(spec.shape, tracer.copies)
    if place is None:
        return "vLLM keeps only a part of it, or in another order"
    offset, strides = place
    return View(storage=shared[pointer], offset=offset, size=spec.shape, stride=strides, dtype=spec.dtype)


def _one_view(shape: list[int], copies: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[int, list[int]] | None:
    """
    Offset and strides of the view of vLLM's memory that the copies, (target, part of a contiguous probe), make up
    together; None if they are not the whole parameter or do not lie that way.
    """
    contiguous = torch.empty(shape, device="meta").stride()
    strides: list[int | None] = [None] * len(shape)
    starts: dict[int, int] = {}  # of each copy: offset of the first element in the probe -> in vLLM's memory
    for target, source in copies:
        if target.numel() != source.numel() or (source.numel() > 1 and target.shape != source.shape):
            return None
        for size, step, stride in zip(source.shape, source.stride(), target.stride()):
            if size > 1:
                dim = next((dim for dim, length in enumerate(shape) if length > 1 and contiguous[dim] == step), None)
                if dim is None or stride < 0 or strides[dim] not in (None, stride):
                    return None
                strides[dim] = stride
        starts[source.storage_offset()] = target.storage_offset()
    if len(starts) != len(copies) or sum(source.numel() for _, source in copies) != math.prod(shape):
        return None
    for dim, length in enumerate(shape):
        if strides[dim] is None and length > 1:  # every copy is one element wide here: it is the step between two
            if not {0, contiguous[dim]} <= starts.keys() or starts[contiguous[dim]] < starts[0]:
                return None
            strides[dim] = starts[contiguous[dim]] - starts[0]
    found = [1 if stride is None else stride for stride in strides]
    dims = list(zip(shape, contiguous, found, strict=True))
    origins = {
        there - sum(here // step % length * stride for length, step, stride in dims) for here, there in starts.items()
    }
    return (origins.pop(), found) if len(origins) == 1 else None
