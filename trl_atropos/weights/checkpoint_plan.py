"""Converts a model's parameters (`gather.py`) to the tensors of its checkpoint, which vLLM's
`load_weights` reads."""

import math
from collections.abc import Iterable, Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from trl_atropos.protocol import CheckpointTensor, ParameterSpec
from trl_atropos.weights.gather import Named, Shapes, Tensors


class CheckpointPlan:
    """
    Converts a model's parameters to the tensors of its checkpoint.

    When Transformers loads a checkpoint it renames some modules and joins the experts of a layer to
    one parameter. Its own `revert_weight_conversion`, with which it saves, undoes that. Here it
    runs on the meta device first, to show which parameter every checkpoint tensor comes from. Most
    are views of one parameter, and cost nothing to make.

    Args:
        model: the plain model.
        shapes: the parameters' whole shapes and dtypes by name, if the model itself is sharded or
            has others.

    Attributes:
        pieces: the checkpoint tensors of each parameter that consists of views.
        groups: for each other parameter, all that are converted together with it.
    """

    def __init__(self, model: PreTrainedModel, shapes: Shapes | None = None):
        self.model = model
        if shapes is None:
            shapes = {}
            for name, tensor in model.named_parameters():
                shapes[name] = (tensor.shape, tensor.dtype)
        self.shapes = shapes
        markers: Tensors = {}
        for name, (shape, dtype) in shapes.items():
            markers[name] = torch.empty(shape, dtype=dtype, device="meta")
        self.pieces = self._find_pieces(markers)
        for name in self.pieces:
            del markers[name]
        self.groups = self._find_groups(markers)

    def _find_pieces(self, markers: Tensors) -> dict[str, list[CheckpointTensor]]:
        """Returns the views of each parameter that views cover."""
        owners = {}  # by storage
        views: dict[str, list[CheckpointTensor]] = {}
        for name, marker in markers.items():
            owners[_storage_of(marker)] = name
            views[name] = []
        for name, tensor in self._convert(markers).items():
            owner = owners.get(_storage_of(tensor))
            if owner is not None:
                piece = CheckpointTensor(
                    name=name,
                    size=list(tensor.shape),
                    stride=list(tensor.stride()),
                    offset=tensor.storage_offset(),
                )
                views[owner].append(piece)
        pieces = {}
        for name, candidates in views.items():
            covered = 0  # elements
            for piece in candidates:
                covered += math.prod(piece.size)
            if covered == markers[name].numel():
                pieces[name] = candidates
        return pieces

    def _find_groups(self, markers: Tensors) -> dict[str, list[str]]:
        """Returns for each parameter all that are converted together with it. Two belong together
        if each of them alone would be converted to a tensor of the same name."""
        groups = {}
        sources = {}  # of each tensor
        for name, marker in markers.items():
            group = [name]
            for tensor in self._convert({name: marker}):
                partners = sources.setdefault(tensor, [])
                for partner in partners:
                    for member in groups[partner]:
                        if member not in group:
                            group.append(member)
                partners.append(name)
            for member in group:
                groups[member] = group
        return groups

    def _convert(self, markers: Tensors) -> Tensors:
        with torch.no_grad(), _CopiesAreViews():
            return revert_weight_conversion(self.model, dict(markers))

    def specs(self) -> list[ParameterSpec]:
        """Returns the parameters, with the checkpoint tensors of each that consists of views."""
        specs = []
        for name, (shape, dtype) in self.shapes.items():
            pieces = self.pieces.get(name, [])
            specs.append(ParameterSpec.of(name, shape, dtype, pieces))
        return specs

    def tensors(self, named_tensors: Iterable[Named]) -> Iterator[Named]:
        """Yields a checkpoint's tensors for parameters that come one at a time. Those of a group
        wait for each other."""
        waiting: Tensors = {}
        for name, tensor in named_tensors:
            if name in self.pieces:
                whole = tensor.contiguous()
                for piece in self.pieces[name]:
                    offset = whole.storage_offset() + piece.offset
                    yield piece.name, whole.as_strided(piece.size, piece.stride, offset)
                continue
            waiting[name] = tensor
            members = self.groups[name]
            if all(member in waiting for member in members):
                group = {member: waiting.pop(member) for member in members}
                yield from revert_weight_conversion(self.model, group).items()
        if waiting:
            raise ValueError(
                f"parameters that the checkpoint stores together with {sorted(waiting)} never came"
            )


def _storage_of(tensor: torch.Tensor) -> int:
    """Returns a number that identifies the memory of a tensor, also on the meta device."""
    return tensor.untyped_storage()._cdata


class _CopiesAreViews(TorchDispatchMode):
    """Leaves out the copies that only make a tensor contiguous, so that the result still shows
    where it came from."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.clone.default:
            return torch.ops.aten.alias.default(args[0])
        # reshapes the clone of what has no view of that shape
        if func is torch.ops.aten._unsafe_view.default:
            return args[0].new_empty(args[1])
        return func(*args, **(kwargs or {}))
