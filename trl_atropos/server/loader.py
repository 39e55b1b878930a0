"""A vLLM model loader for the CPU that puts every parameter into one shared arena and keeps it there.

vLLM's CPU backend packs the weights of linear layers after loading and drops the originals, so that a change of a
parameter would never reach the logits. Here the parameters are moved into shared memory before they are loaded (there
are never two copies), and each layer's quantisation method is replaced by one that multiplies with the parameter
itself. On the GPU neither is needed: vLLM's default loader leaves unquantised weights where they are.
"""

import dataclasses
import logging

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from trl_atropos.tensors.shared_memory import allocate_arena

logger = logging.getLogger("vllm.trl_atropos")

LOAD_FORMAT = "trl_atropos_shared"
ALIGNMENT = 256  # bytes; at least what vectorised kernels assume


class InPlaceLinearMethod(UnquantizedLinearMethod):
    """Multiplies with `layer.weight` itself on every call."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.cpu_linear = torch.nn.functional.linear


class InPlaceEmbeddingMethod(UnquantizedEmbeddingMethod):
    """The same for the embedding, whose weight the language modeling head shares in tied models."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.cpu_linear = torch.nn.functional.linear


@register_model_loader(LOAD_FORMAT)
class SharedArenaLoader(DefaultModelLoader):
    def __init__(self, load_config):
        super().__init__(dataclasses.replace(load_config, load_format="auto", model_loader_extra_config={}))

    def load_weights(self, model: torch.nn.Module, model_config) -> None:
        for module in model.modules():
            if type(module).__name__ == "UnquantizedFusedMoEMethod":  # itself a module
                keep_experts(module)
            method = module.__dict__.get("quant_method")
            if type(method) is UnquantizedLinearMethod:
                module.quant_method = InPlaceLinearMethod()
            elif type(method) is UnquantizedEmbeddingMethod:
                module.quant_method = InPlaceEmbeddingMethod()
        move_to_arena(model)
        super().load_weights(model, model_config)


def keep_experts(method: torch.nn.Module) -> None:
    """Makes a mixture-of-experts layer's method multiply with the experts as they were loaded."""
    try:
        from trl_atropos.server.experts import InPlaceExperts
    except ImportError as error:  # vLLM 0.26 is made otherwise
        logger.warning(
            "This vLLM packs the experts of the model for the CPU, once (%s): new ones reach it with `vllm_mode: "
            "restart` only. Install vLLM 0.32, or train on a GPU.",
            error,
        )
        return
    method.experts_cls = InPlaceExperts


def move_to_arena(model: torch.nn.Module) -> None:
    """
    Moves the memory of all parameters of `model` into one new shared arena. Values are not copied.

    Whatever else looks into that memory moves along: Mamba-2 layers read the weights of their convolution through a
    buffer that is a view of the parameter.
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
