"""Computes how many bytes an optimizer keeps."""

import math
from collections.abc import Iterable

import torch

# Tensors of the parameter's size that each family keeps (torch.optim; bitsandbytes.optim;
# transformers.optimization).
BUFFERS = {
    "ademamix": 3,
    "adam": 2,
    "lion": 1,
    "rmsprop": 1,
    "adagrad": 1,
    "sgd": 0,
    "lomo": 0,
    "adafactor": 0,
}
BLOCK = 256  # values that share one fp32 scale (bitsandbytes/optim/optimizer.py, `blocksize`)
TORCHS_OWN = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
SMALLEST = 4096  # values below which bitsandbytes keeps fp32 (its `min_8bit_size`)


def state_bytes(
    optim: str, parameters: Iterable[torch.Tensor], masters: bool, embeddings: set[int]
) -> int:
    """Returns the bytes of the optimizer's state.

    An optimizer that is not in `BUFFERS` counts as AdamW. With `masters`, it works on fp32 copies
    of 16-bit parameters. bitsandbytes keeps `embeddings` (their `id`s) in 32 bits.
    """
    buffers = _buffers_of(optim)
    # torch's state is of the parameter's dtype, bitsandbytes' always of 4 bytes.
    is_wide = masters or "bit" in optim or "bnb" in optim
    total = 0.0
    for parameter in parameters:
        values = parameter.numel()
        if "adafactor" in optim:  # one value per row and one per column
            matrices = math.prod(parameter.shape[:-2])
            total += 4 * sum(parameter.shape[-2:]) * matrices
        elif "8bit" in optim and values >= SMALLEST and id(parameter) not in embeddings:
            total += buffers * values * (1 + 4 / BLOCK)
        else:
            total += buffers * values * (4 if is_wide else parameter.itemsize)
    return int(total)


def _buffers_of(optim: str) -> int:
    for family, buffers in BUFFERS.items():
        if family in optim:
            return buffers
    return BUFFERS["adam"]
