"""Compiles a model's decoder layers, once for rows of all lengths.

`training/computation.py` decides by `are_compiled`, and calls `compile_layers` before training.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

# parameters: a run of a smaller model may end before it has won back the time of compiling
WORTH_COMPILING = 50_000_000
# Without this option, a norm's gradient is compiled in one way for long rows and in another for
# short ones, of half a dozen lengths: a row of a new length would stop training for ten seconds.
FOR_ALL_LENGTHS = {"triton.mix_order_reduction_non_strict_mode": True}


def compile_layers(model: PreTrainedModel) -> None:
    """Compiles each decoder layer when it is first used: its norms, rotary embedding and
    activations become a few kernels."""
    # Otherwise torch passes the numbers of a layer, such as the epsilon of its norms, as tensors on
    # the CPU. For these it compiles C++, with GPUs as well: minutes before the first step.
    torch._dynamo.config.specialize_float = True
    layers = decoder_layers(model)
    for layer in layers:
        layer.compile(dynamic=True, options=FOR_ALL_LENGTHS)
    if not layers:
        return
    if any(parameter.requires_grad for parameter in layers[0].parameters()):
        # Otherwise an adapter's first layer is compiled for itself. Transformers'
        # `enable_input_require_grads` would have it compiled once more for scores.
        model.get_input_embeddings().register_forward_hook(_require_gradients)


def _require_gradients(embedding: torch.nn.Module, inputs: tuple, embedded: Tensor) -> Tensor:
    if torch.is_grad_enabled():
        embedded.requires_grad_()
    return embedded


def decoder_layers(model: torch.nn.Module) -> list[GradientCheckpointingLayer]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def are_compiled(
    setting: bool | None, model: PreTrainedModel, device: torch.device, is_sharded: bool
) -> bool:
    """Returns whether a run compiles its layers: what `compile_layers` says, or if it is `None`,
    whether that pays."""
    if setting is not None:
        return setting
    return not is_sharded and worth_compiling(model, device)


def worth_compiling(model: PreTrainedModel, device: torch.device) -> bool:
    """Returns whether compiling pays, as measured on GPUs for dense models of 0.3 M to 8 B
    parameters."""
    if device.type != "cuda" or has_experts(model):
        return False
    return model.num_parameters() >= WORTH_COMPILING


def has_experts(model: PreTrainedModel) -> bool:
    """Returns whether the model is a mixture of experts. Some families have experts in a module's
    name, Granite in that of its class only."""
    for name, module in model.named_modules():
        if "expert" in (name + type(module).__name__).lower():
            return True
    return False
