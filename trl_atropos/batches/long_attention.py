"""Attends to long rollouts one after the other, by cuDNN (`attention_kernel: cudnn`).

On a GPU, one kernel usually attends to all rollouts of a row (`packed_attention.py`). Rollouts of
thousands of tokens keep a GPU busy by themselves. So they need no kernel that knows borders, and
`scaled_dot_product_attention` has a faster one.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

# tokens, in the mean of a row's rollouts; below, there are too many kernels to start
LONG = 4096
# The first one that can compute a rollout does.
BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
# cuDNN plans each length anew, which takes long. So lengths are rounded up to one of so many
# between 0 and the next power of two.
LENGTHS = 32
SMALLEST_STEP = 64  # tokens


def are_long(lengths: np.ndarray) -> bool:
    """Returns whether rollouts of these lengths, in tokens, are worth a kernel each."""
    return len(lengths) > 0 and lengths.mean() >= LONG


@torch.compiler.disable
def attend_in_turn(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, scaling: float | None
) -> Tensor:
    """
    Attends to each rollout of a row by itself.

    Args:
        query: (1, heads, T, head_dim).
        key: (1, key_heads, T, head_dim), and so is `value`.
        lengths: (2, rollouts), their tokens, as queries and as keys, on the CPU.

    Returns:
        (1, T, heads, head_dim).
    """
    sizes = lengths[0].tolist()
    parts = (states.split(sizes, dim=2) for states in (query, key, value))
    attended = []
    with sdpa_kernel(BACKENDS, set_priority=True):
        for states in zip(*parts, strict=True):
            attended.append(_attend(*states, scaling))
    return torch.cat(attended, dim=2).transpose(1, 2)


def _attend(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Attends to one rollout. Tokens that fill up its length stand behind it, where no query of the
    rollout sees them, and their own results are cut off."""
    length = query.size(2)
    missing = padded_length(length) - length
    if missing:
        query, key, value = (pad(states, (0, 0, 0, missing)) for states in (query, key, value))
    attended = scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=True
    )
    return attended[:, :, :length]


def padded_length(length: int) -> int:
    """Returns the length, in tokens, at which cuDNN computes a rollout: 40,960 for 40,000."""
    power_of_two = 1 << (length - 1).bit_length()
    step = max(SMALLEST_STEP, power_of_two // LENGTHS)
    return -(-length // step) * step
