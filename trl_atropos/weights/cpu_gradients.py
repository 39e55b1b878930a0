"""Has torch's CPU kernels add gradients of 16 bits in float32.

In 16 bits, torch rounds the gradient of an embedding, of a layer norm's weights and of a table that
is indexed after each token that it adds: of thousands, the last ones are lost.
"""

import warnings
from functools import cache, partial

import torch

HALF = (torch.bfloat16, torch.float16)  # dtypes of 16 bits


@cache
def sum_in_float32() -> torch.library.Library:
    """Replaces three of torch's kernels for the CPU in this process, which stay replaced while the
    returned library lives. They add in float32 and round once. Values that are not in 16 bits go
    through torch's own kernels as before."""
    replacements = {
        "embedding_dense_backward": _embedding_gradient,
        "native_layer_norm_backward": _layer_norm_gradients,
        "_index_put_impl_": _put_by_index,
    }
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        # that a kernel is replaced
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for name, compute in replacements.items():
            kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
            library.impl(name, partial(compute, kernel), "CPU", with_keyset=True)
    return library


def _embedding_gradient(kernel, keys, gradient, *arguments):
    """Returns the table's gradient. `gradient` is that of the embedded tokens, (..., width)."""
    if gradient.dtype not in HALF:
        return kernel.call_boxed(keys, gradient, *arguments)
    wide = kernel.call_boxed(keys, gradient.float(), *arguments)
    return wide.to(gradient.dtype)


def _layer_norm_gradients(kernel, keys, gradient, x, shape, mean, deviation, weight, bias, needed):
    """Returns the gradients of input, weight and bias, of which those `needed` are computed."""
    of_weights = any(needed[1:])
    if not of_weights or weight is None or weight.dtype not in HALF:
        return kernel.call_boxed(keys, gradient, x, shape, mean, deviation, weight, bias, needed)
    dtype = gradient.dtype
    if bias is not None:
        bias = bias.float()
    gradients = kernel.call_boxed(
        keys,
        gradient.float(),
        x.float(),
        shape,
        mean.float(),
        deviation.float(),
        weight.float(),
        bias,
        needed,
    )
    return tuple(None if wide is None else wide.to(dtype) for wide in gradients)


def _put_by_index(kernel, keys, table, indices, values, accumulate=False, unsafe=False):
    """Changes and returns `table`. The gradient of `table[indices]` is made by adding to a table of
    zeros."""
    if not accumulate or table.dtype not in HALF:
        return kernel.call_boxed(keys, table, indices, values, accumulate, unsafe)
    wide = kernel.call_boxed(keys, table.float(), indices, values.float(), accumulate, unsafe)
    return table.copy_(wide)
