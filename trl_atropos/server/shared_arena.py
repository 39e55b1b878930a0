"""Loads a model on the CPU into memory that the trainer can share, in which its layers compute.

On the CPU, vLLM packs the weights of layers after the first load, and a parameter that changes
later would never reach the logits. `SharedArenaLoader` moves the parameters into one shared arena
before they are loaded, and makes each layer compute with the parameter itself. On a GPU, vLLM's
default loader leaves unquantised weights where they are.

vLLM knows the loader by `LOAD_FORMAT` once this module is imported, as `extension.py` does.
"""

import dataclasses

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from trl_atropos.server import compat
from trl_atropos.tensors.shared_memory import allocate_arena, pointer_of

LOAD_FORMAT = "trl_atropos_shared"
ALIGNMENT = 256  # bytes; at least what vectorised kernels assume
# Names of this process's layers that compute with a packed copy of their weights: new weights would
# not reach them.
packed_layers: list[str] = []


@register_model_loader(LOAD_FORMAT)
class SharedArenaLoader(DefaultModelLoader):
    """Loads a model into one shared arena, in which its layers compute."""

    def __init__(self, load_config):
        usual = dataclasses.replace(load_config, load_format="auto", model_loader_extra_config={})
        super().__init__(usual)

    def load_weights(self, model: nn.Module, model_config) -> None:
        packed_layers.extend(compute_in_place(model, model_config))
        move_to_arena(model)
        super().load_weights(model, model_config)


def compute_in_place(model: nn.Module, model_config) -> list[str]:
    """Makes the layers of a model compute with their parameters themselves. Returns the names of
    those that may not: a class which vLLM moved or replaced must lead to a refusal, and not to old
    weights."""
    kinds = set()
    packed = []
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        kind = type(method)  # exactly: a subclass may compute with a copy
        kinds.add(kind)
        if kind in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
            method.process_weights_after_loading = _multiply_with_the_weight
        elif kind is UnquantizedFusedMoEMethod and compat.cpu_experts() is not None:
            method.experts_cls = InPlaceExperts
        elif isinstance(method, QuantizeMethodBase):
            packed.append(name)
    if model_config.quantization is not None:  # `weight_receiver.py` loads them anew
        return []
    if UnquantizedLinearMethod not in kinds:
        packed.append("the linear layers")
    if UnquantizedFusedMoEMethod not in kinds and model_config.get_num_experts() > 1:
        packed.append("the experts")
    return packed


def refusal_of_packed_layers() -> str | None:
    """Returns why new weights would not reach some layers, or `None` if they would."""
    if not packed_layers:
        return None
    return (
        f"vLLM {compat.VLLM_VERSION} packs the weights of {len(packed_layers)} layers for the CPU "
        f"once (the first is {packed_layers[0]}), so that new ones would not reach them: use "
        "`vllm_mode: restart`, another version of vLLM (0.32 is known to work), or a GPU"
    )


def _multiply_with_the_weight(layer: nn.Module) -> None:
    """Takes the place of the method by which vLLM packs the weight of a linear layer or an
    embedding."""
    layer.cpu_linear = linear


class InPlaceExperts(compat.cpu_experts() or object):
    """Computes experts as vLLM's class does, on tensors as loaded: `w1` is (experts, gate and up,
    hidden), `w2` (experts, hidden, intermediate)."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
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
            up_bias = None if self.w1_bias is None else self.w1_bias[expert]
            down_bias = None if self.w2_bias is None else self.w2_bias[expert]
            both = linear(hidden_states[tokens], w1[expert], up_bias)
            inner = self._activate(activation, both)
            result = linear(inner, w2[expert], down_bias)
            if not apply_router_weight_on_input:
                weights = topk_weights[tokens, choices, None]
                result *= weights.to(result.dtype)
            output.index_add_(0, tokens, result)

    def _activate(self, activation: MoEActivation, both: Tensor) -> Tensor:
        # as vLLM's SwigluOAIAndMul, for which the CPU build has no kernel
        if activation is MoEActivation.SWIGLUOAI:
            gate = both[:, ::2].clamp(max=7.0)
            up = both[:, 1::2].clamp(min=-7.0, max=7.0)
            share = torch.sigmoid(1.702 * gate)
            return (up + 1) * gate * share
        tokens, width = both.shape
        inner = both.new_empty(tokens, width // 2)
        self.activation(activation, inner, both)
        return inner


def move_to_arena(model: nn.Module) -> None:
    """Moves the memory of all parameters of `model` into one new shared arena. Values are not
    copied. Views of that memory move along: Mamba-2 layers read the weights of their convolution
    through such a buffer."""
    parameters = list(model.parameters())
    places = {}  # bytes of the arena, by the storage's data pointer
    end = 0
    for parameter in parameters:
        storage = parameter.untyped_storage()
        pointer = storage.data_ptr()
        if pointer in places:
            continue
        num_bytes = storage.nbytes()
        places[pointer] = slice(end, end + num_bytes)
        padding = -num_bytes % ALIGNMENT
        end += num_bytes + padding
    arena = allocate_arena(end)
    views = [buffer for buffer in model.buffers() if pointer_of(buffer) in places]
    for tensor in (*parameters, *views):
        place = places[pointer_of(tensor)]
        memory = arena[place].view(tensor.dtype)
        offset = memory.storage_offset() + tensor.storage_offset()
        tensor.data = memory.as_strided(tensor.size(), tensor.stride(), offset)
