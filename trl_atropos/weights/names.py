"""What a checkpoint calls the trainer's parameters, and how it cuts them: the form that vLLM's `load_weights` reads.

When transformers loads a checkpoint it renames some modules and joins the experts of a layer to one 3-D parameter. Its
own `revert_weight_conversion`, with which it saves, undoes that. Here it runs on the meta device first, which tells
for every checkpoint tensor what it comes from. Most are views of one parameter, and cost nothing to make.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from weakref import WeakKeyDictionary

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from trl_atropos.protocol import CheckpointTensor, ParameterSpec

Shapes = Mapping[str, tuple[torch.Size, torch.dtype]]  # by parameter name
Plan = tuple[dict[str, list[CheckpointTensor]], dict[str, list[str]]]

_plans: WeakKeyDictionary[PreTrainedModel, tuple[Shapes, Plan]] = WeakKeyDictionary()


def parameter_specs(model: PreTrainedModel) -> list[ParameterSpec]:
    """One entry per parameter, tied ones once, with the checkpoint tensors that it consists of."""
    pieces, _ = _plan(model, _shapes_of(model))
    return [ParameterSpec.of(name, parameter, pieces.get(name, [])) for name, parameter in model.named_parameters()]


def checkpoint_tensors(
    model: PreTrainedModel, named_tensors: Iterable[tuple[str, torch.Tensor]], shapes: Shapes | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """
    Yields (name, tensor) as a checkpoint has them, for parameters that come one at a time under `model`'s names.

    A checkpoint tensor that is a part of one parameter is a view of it. Parameters wait for each other only where a
    checkpoint tensor is computed from several. `shapes` are the full shapes and dtypes of all parameters that will
    come; without it they are read from the model, whose parameters must then be whole.

    Raises `KeyError` for a name that `shapes` lacks, and `ValueError` if the end comes before a tensor is complete.
    """
    pieces, groups = _plan(model, shapes or _shapes_of(model))
    waiting: dict[str, torch.Tensor] = {}
    for name, tensor in named_tensors:
        if name in pieces:
            yield from _cut(tensor, pieces[name])
            continue
        waiting[name] = tensor
        if all(member in waiting for member in groups[name]):
            group = {member: waiting.pop(member) for member in groups[name]}
            yield from revert_weight_conversion(model, group).items()
    if waiting:
        raise ValueError(f"parameters that the checkpoint stores together with {sorted(waiting)} never came")


def _shapes_of(model: PreTrainedModel) -> Shapes:
    return {name: (parameter.shape, parameter.dtype) for name, parameter in model.named_parameters()}


def _cut(tensor: torch.Tensor, pieces: list[CheckpointTensor]) -> Iterator[tuple[str, torch.Tensor]]:
    if _is_renamed(tensor, pieces):  # however it lies in memory
        yield pieces[0].name, tensor
        return
    whole = tensor.contiguous()
    for piece in pieces:
        yield piece.name, whole.as_strided(piece.size, piece.stride, whole.storage_offset() + piece.offset)


def _plan(model: PreTrainedModel, shapes: Shapes) -> Plan:
    """
    Returns (pieces, groups): the checkpoint tensors of every parameter that is nothing but those, and for each other
    parameter the names of those that must be converted together with it, itself included.
    """
    if model not in _plans or _plans[model][0] != shapes:  # takes seconds for a model with many experts
        _plans[model] = (shapes, _make_plan(model, shapes))
    return _plans[model][1]


def _make_plan(model: PreTrainedModel, shapes: Shapes) -> Plan:
    probes = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in shapes.items()}
    owners = {probe.untyped_storage()._cdata: name for name, probe in probes.items()}
    pieces: dict[str, list[CheckpointTensor]] = {name: [] for name in probes}
    for name, tensor in _convert(model, probes).items():
        owner = owners.get(tensor.untyped_storage()._cdata)
        if owner is not None:
            piece = CheckpointTensor(
                name=name, size=list(tensor.shape), stride=list(tensor.stride()), offset=tensor.storage_offset()
            )
            pieces[owner].append(piece)
    whole = {
        name: found
        for name, found in pieces.items()
        if sum(math.prod(piece.size) for piece in found) == probes[name].numel()
    }
    return whole, _groups(model, {name: probe for name, probe in probes.items() if name not in whole})


def _groups(model: PreTrainedModel, probes: dict[str, torch.Tensor]) -> dict[str, list[str]]:
    """Two parameters belong together if each of them alone would be converted to a tensor of the same name."""
    by_result: dict[str, list[str]] = {}
    groups: dict[str, list[str]] = {}
    for name, probe in probes.items():
        group = [name]
        for result in _convert(model, {name: probe}):
            for member in by_result.get(result, []):
                group += [other for other in groups[member] if other not in group]
            by_result.setdefault(result, []).append(name)
        groups.update(dict.fromkeys(group, group))
    return groups


def _convert(model: PreTrainedModel, probes: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    with torch.no_grad(), _CopiesAreViews():
        return revert_weight_conversion(model, dict(probes))


class _CopiesAreViews(TorchDispatchMode):
    """Leaves out the copies that only make a tensor contiguous, so that the result still shows where it came from."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.clone.default:
            return torch.ops.aten.alias.default(args[0])
        if func is torch.ops.aten._unsafe_view.default:  # reshapes the clone of what has no view of that shape
            return args[0].new_empty(args[1])
        return func(*args, **(kwargs or {}))


def _is_renamed(tensor: torch.Tensor, pieces: list[CheckpointTensor]) -> bool:
    """Whether the checkpoint has the parameter as it is, maybe under another name."""
    whole = list(torch.empty(tensor.shape, device="meta").stride())
    return len(pieces) == 1 and pieces[0].size == list(tensor.shape) and pieces[0].stride == whole
