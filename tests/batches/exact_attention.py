"""Attention of packed rows as its definition says, for tests that need a kernel on the CPU."""

import torch


def attend_to_parts(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    borders: torch.Tensor,
    key_borders: torch.Tensor,
    scale: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """
    Returns the output of each token of a row, of the shape of `query`: `(tokens, heads, head_size)`.

    The tokens between two borders are a part, which sees only the keys between the same two of
    `key_borders`. The last token of a part sees all of its keys, and the one before sees all but
    the last key. With a `window`, each sees so many of them at most, itself included.
    """
    attended = []
    for begin, end, first, last in zip(borders, borders[1:], key_borders, key_borders[1:]):
        keys = int(last - first)
        places = torch.arange(keys)
        own = places[keys - int(end - begin) :, None]  # of the queries
        sees = places <= own
        if window is not None:
            sees &= places > own - window
        q, k, v = (
            states.transpose(0, 1)[None]
            for states in (query[begin:end], key[first:last], value[first:last])
        )
        output = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, sees, scale=scale, enable_gqa=True
        )
        attended.append(output[0].transpose(0, 1))
    return torch.cat(attended)
