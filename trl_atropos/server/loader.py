"""A vLLM model loader for the CPU that puts every parameter into one shared arena and computes with it there.

vLLM's CPU backend packs the weights of linear layers and experts after the first load, and does not do so again, so
that a changed parameter would never reach the logits. Here the parameters are moved into shared memory before they are
loaded (there are never two copies), and each layer's method is replaced by one that multiplies with the parameter
itself. On a GPU neither is needed: vLLM's default loader leaves unquantised weights where they are.
"""

import dataclasses
import logging

import torch
from torch.nn.functional import linear
from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from trl_atropos.server import compat
from trl_atropos.tensors.shared_memory import allocate_arena

logger = logging.getLogger("vllm.trl_atropos")

LOAD_FORMAT = "trl_atropos_shared"
ALIGNMENT = 256  # bytes; at least what vectorised kernels assume


@register_model_loader(LOAD_FORMAT)
class SharedArenaLoader(DefaultModelLoader):
    def __init__(self, load_config):
        super().__init__(dataclasses.replace(load_config, load_format="auto", model_loader_extra_config={}))

    def load_weights(self, model: torch.nn.Module, model_config) -> None:
        for module in model.modules():
            method = module.__dict__.get("quant_method")
            if type(method) is UnquantizedLinearMethod:
                module.quant_method = InPlaceLinearMethod()
            elif type(method) is UnquantizedEmbeddingMethod:
                module.quant_method = InPlaceEmbeddingMethod()
        experts = [method for method in compat.expert_methods(model) if isinstance(method, UnquantizedFusedMoEMethod)]
        if experts and compat.cpu_experts() is None:
            logger.warning(
                "vLLM %s packs the experts of the model for the CPU once, so new ones reach it with `vllm_mode: "
                "restart` only. Install vLLM 0.32, or train on a GPU.",
                compat.VLLM_VERSION,
            )
            experts = []
        for method in experts:
            method.experts_cls = InPlaceExperts
        move_to_arena(model)
        super().load_weights(model, model_config)


class InPlaceLinearMethod(UnquantizedLinearMethod):
    """Multiplies with `layer.weight` itself on every call."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.cpu_linear = linear


class InPlaceEmbeddingMethod(UnquantizedEmbeddingMethod):
    """The same for the embedding, whose weight the language modeling head shares in tied models."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.cpu_linear = linear


class InPlaceExperts(compat.cpu_experts() or object):
    """`w1` is (experts, gate and up, hidden), `w2` (experts, hidden, intermediate), as they were loaded."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Packs nothing."""

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        *unused,
        apply_router_weight_on_input: bool,
        **unused_too,
    ) -> None:
        output.zero_()
        for expert in topk_ids.unique().tolist():
            tokens, choices = (topk_ids == expert).nonzero(as_tuple=True)
            both = linear(hidden_states[tokens], w1[expert], None if self.w1_bias is None else self.w1_bias[expert])
            inner = self._activate(activation, both)
            result = linear(inner, w2[expert], None if self.w2_bias is None else self.w2_bias[expert])
            if not apply_router_weight_on_input:
                result *= topk_weights[tokens, choices, None].to(result.dtype)
            output.index_add_(0, tokens, result)

    def _activate(self, activation: MoEActivation, both: torch.Tensor) -> torch.Tensor:
        if activation is MoEActivation.SWIGLUOAI:  # as vLLM's SwigluOAIAndMul, for which the CPU build has no kernel
            gate, up = both[:, ::2].clamp(max=7.0), both[:, 1::2].clamp(min=-7.0, max=7.0)
            return (up + 1) * gate * torch.sigmoid(1.702 * gate)
        inner = both.new_empty(len(both), both.shape[-1] // 2)
        self.activation(activation, inner, both)
        return inner


def move_to_arena(model: torch.nn.Module) -> None:
    """
    Moves the memory of all parameters of `model` into one new shared arena. Values are not copied.

    Views of that memory move along: Mamba-2 layers read the weights of their convolution through a buffer that is a
    view of the parameter.
    """
    parameters = list(model.parameters())
    places, end = {}, 0
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
