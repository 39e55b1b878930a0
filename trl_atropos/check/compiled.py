"""Estimates how much less compiled layers keep for the backward pass.

Torch's operators keep what each of them needs. A compiled layer keeps less: its norms, rotary
embeddings and activations are computed again in the backward pass. torch decides that on a graph of
both passes (`min_cut_rematerialization_partition`), and so does `LayerCalls.spared_bytes`, which
compiles nothing.
"""

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.func import functional_call
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

from trl_atropos.batches.compiled_layers import decoder_layers

logger = logging.getLogger(__name__)

Autocast = Callable[[], AbstractContextManager]
Parameters = dict[str, torch.Tensor]
Kind = tuple[Any, ...]  # of layers that are alike


class Shape(NamedTuple):
    """Describes a tensor, which it does not keep alive."""

    size: torch.Size
    dtype: torch.dtype
    requires_grad: bool


class LayerCall(NamedTuple):
    """Holds a layer and what it is called with."""

    layer: torch.nn.Module
    leaves: list[Any]  # of its arguments; a `Shape` for each tensor
    structure: TreeSpec

    def kind(self) -> Kind:
        """Returns what layers have in common that keep as much as each other."""
        kind = [type(self.layer)]
        for parameter in self.layer.parameters():
            kind.append((parameter.shape, parameter.dtype, parameter.requires_grad))
        for leaf in self.leaves:
            if isinstance(leaf, Shape):
                kind.append((leaf.size, leaf.dtype))
        return tuple(kind)

    def tensors(self) -> list[torch.Tensor]:
        """Makes tensors of these shapes."""
        made = []
        for leaf in self.leaves:
            if isinstance(leaf, Shape):
                size, dtype, requires_grad = leaf
                made.append(torch.empty(size, dtype=dtype, requires_grad=requires_grad))
        return made

    def run(self, parameters: Parameters, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Returns the layer's hidden states."""
        following = iter(tensors)
        leaves = []
        for leaf in self.leaves:
            leaves.append(next(following) if isinstance(leaf, Shape) else leaf)
        args, kwargs = tree_unflatten(leaves, self.structure)
        result = functional_call(self.layer, parameters, args, kwargs)
        return result[0] if isinstance(result, tuple) else result


class LayerCalls:
    """Notes how a model calls its decoder layers, until it is closed."""

    def __init__(self, model: torch.nn.Module):
        self._calls: dict[torch.nn.Module, LayerCall] = {}
        self._handles: list[RemovableHandle] = []
        for layer in decoder_layers(model):
            handle = layer.register_forward_pre_hook(self._note, with_kwargs=True)
            self._handles.append(handle)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _note(self, layer: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if layer in self._calls:  # a checkpointed one is called again in the backward pass
            return
        leaves, structure = tree_flatten((args, kwargs))
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                leaves[place] = Shape(leaf.shape, leaf.dtype, leaf.requires_grad)
        self._calls[layer] = LayerCall(layer, leaves, structure)

    def spared_bytes(self, autocast: Autocast, known: dict[Kind, int]) -> list[int]:
        """Returns for each layer how many bytes less it keeps from its forward to its backward pass
        if it is compiled. Call this in the model's `FakeTensorMode`.

        Most layers of a model are alike, and `known` holds the bytes of those that were looked at.
        """
        spared = []
        # Without an adapter's gradients in its hidden states, the first layer is no example.
        for call in reversed(self._calls.values()):
            kind = call.kind()
            if kind not in known:
                known[kind] = _spared_bytes(call, autocast)
            spared.append(known[kind])
        return spared


def _spared_bytes(call: LayerCall, autocast: Autocast) -> int:
    """Returns 0 for a layer that torch cannot trace: such a layer is estimated as if it were not
    compiled."""
    checkpointed = call.layer.gradient_checkpointing
    call.layer.gradient_checkpointing = False
    try:
        by_operators = _kept_for_backward(call, autocast)
        by_graph = _kept_by_graph(call, autocast)
    except Exception as error:  # noqa: BLE001 - whatever a layer raises
        logger.debug("%s cannot be traced: %s", type(call.layer).__name__, error)
        return 0
    finally:
        call.layer.gradient_checkpointing = checkpointed
    return max(0, by_operators - by_graph)


def _kept_for_backward(call: LayerCall, autocast: Autocast) -> int:
    """Returns the bytes that autograd keeps of a forward pass."""
    parameters = dict(call.layer.named_parameters())
    tensors = call.tensors()
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast():
        call.run(parameters, tensors)
    return _bytes_besides(kept, [*parameters.values(), *tensors])


def _kept_by_graph(call: LayerCall, autocast: Autocast) -> int:
    # takes a second, for which checks of runs on the CPU need not wait
    from functorch.compile import aot_function, min_cut_rematerialization_partition

    kept_bytes = 0

    def look(graph: torch.fx.GraphModule, inputs: Any) -> Callable:
        nonlocal kept_bytes
        given = []
        kept = []
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                given.append(node.meta["val"])
            elif node.op == "output":
                _, *kept_nodes = node.args[0]  # after the hidden states
                kept = [kept_node.meta["val"] for kept_node in kept_nodes]
        kept_bytes = _bytes_besides(kept, given)
        return graph.forward

    def forward(parameters: Parameters, tensors: list[torch.Tensor]) -> torch.Tensor:
        with autocast():
            return call.run(parameters, tensors)

    both_passes = aot_function(
        forward,
        fw_compiler=look,
        bw_compiler=lambda graph, inputs: graph.forward,
        partition_fn=min_cut_rematerialization_partition,
    )
    both_passes(dict(call.layer.named_parameters()), call.tensors())
    return kept_bytes


def _bytes_besides(kept: Iterable[Any], given: Iterable[Any]) -> int:
    """Returns the bytes of all storages of `kept` that are none of `given`."""
    sizes = _storages(kept)
    for key in _storages(given):
        sizes.pop(key, None)
    return sum(sizes.values())


def _storages(values: Iterable[Any]) -> dict[int, int]:
    """Returns the bytes of the storages of these tensors, by their address."""
    sizes = {}
    for value in values:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    return sizes
