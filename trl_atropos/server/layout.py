"""Finds where vLLM keeps each parameter of the Hugging Face model, by watching vLLM's own loader.

`model.load_weights` is called with one probe tensor per parameter while a dispatch mode swallows every write into the
model's memory and notes where a copy of the probe would have gone. That gives the exact place of fused, padded,
transposed and sliced weights for any architecture, without a table of names.
"""

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
    if len(tracer.copies) > 1:
        return f"vLLM keeps it in {len(tracer.copies)} pieces"
    target, source = tracer.copies[0]
    if target.dtype is not source.dtype:
        return f"vLLM keeps it as {target.dtype}, the trainer as {source.dtype}"
    strides = _strides_in_target(list(spec.shape), target, source)
    if strides is None:
        return "vLLM keeps only a part of it, or in another order"
    return View(
        storage=tracer.storages[target.untyped_storage().data_ptr()],
        offset=target.storage_offset(),
        size=list(spec.shape),
        stride=strides,
        dtype=spec.dtype,
    )


def _strides_in_target(shape: list[int], target: torch.Tensor, source: torch.Tensor) -> list[int] | None:
    """Strides over `target`'s memory that read it in the order of the contiguous probe behind `source`."""
    if source.storage_offset() != 0 or sorted(source.shape) != sorted(shape):
        return None
    if list(source.shape) == shape and source.is_contiguous():
        return list(target.stride())
    # The loader copied a permuted view of the probe (a transposed Conv1D): undo the permutation on the target.
    contiguous = torch.empty(shape, device="meta").stride()
    strides = []
    for size, stride in zip(shape, contiguous, strict=True):
        matches = [i for i in range(source.dim()) if source.size(i) == size and source.stride(i) == stride]
        if len(matches) != 1:
            return None
        strides.append(target.stride(matches[0]))
    return strides
