"""What optimizers keep for every trained parameter, and what they allocate in a step."""

import math
from collections.abc import Iterable

import torch

# Tensors of the parameter's size that each family keeps (torch.optim; bitsandbytes.optim; transformers.optimization).
BUFFERS = {"ademamix": 3, "adam": 2, "lion": 1, "rmsprop": 1, "adagrad": 1, "sgd": 0, "lomo": 0, "adafactor": 0}
BLOCK = 256  # values that share one fp32 scale (bitsandbytes/optim/optimizer.py, `blocksize`)
SMALLEST = 4096  # values below which bitsandbytes keeps fp32 (its `min_8bit_size`)


def state_bytes(optim: str, parameters: Iterable[torch.Tensor], masters: bool, embeddings: set[int]) -> int:
    """
    Bytes of the optimizer's state.

    Args:
        optim: Name as in `TrainingArguments.optim`. One that is not known counts as AdamW.
        parameters: What is trained.
        masters: The optimizer works on fp32 copies of 16-bit parameters.
        embeddings: `id`s of the parameters that bitsandbytes keeps in 32 bits.
    """
    buffers = next((number for name, number in BUFFERS.items() if name in optim), 2)
    total = 0.0
    for parameter in parameters:
        if "adafactor" in optim:  # one value per row and one per column
            total += 4 * sum(parameter.shape[-2:]) * math.prod(parameter.shape[:-2])
        elif "8bit" in optim and parameter.numel() >= SMALLEST and id(parameter) not in embeddings:
            total += buffers * parameter.numel() * (1 + 4 / BLOCK)
        elif "4bit" in optim and parameter.numel() >= SMALLEST:
            total += buffers * parameter.numel() * (0.5 + 4 / 128)  # torchao's blocks
        else:
            # torch's are of the parameter's dtype, bitsandbytes' always 4 bytes.
            wide = masters or "bit" in optim or "bnb" in optim
            total += buffers * parameter.numel() * (4 if wide else parameter.itemsize)
    return int(total)


def step_bytes(optim: str, parameters: list[torch.Tensor], masters: bool, device: str) -> int:
    """
    Bytes that a step allocates besides gradients and state.

    Fused and 8-bit kernels work in place. torch's plain AdamW takes the root of the second moments: of all parameters
    at once on a GPU (`foreach`), of one after the other on the CPU (torch/optim/adam.py).
    """
    if optim != "adamw_torch":
        return 0
    sizes = [parameter.numel() * (4 if masters else parameter.itemsize) for parameter in parameters]
    return sum(sizes) if device == "cuda" else 2 * max(sizes, default=0)
