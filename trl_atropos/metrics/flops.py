"""Counts the operations that training a model on rollouts takes, to compare with a GPU's peak.

An operation is a multiplication or an addition of two numbers. What is computed again in the
backward pass to save memory does not count: it is no use to anybody.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trl_atropos.batches.compiled_layers import has_experts
from trl_atropos.rollouts.rollout import Rollout

# dense bfloat16, from the data sheets of the SXM parts
PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0}


def peak_flops(device: torch.device) -> float | None:
    """Returns the operations per second of one device in bfloat16, if they are known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    for known, tflops in PEAK_TFLOPS.items():
        if known in name:
            return 1e12 * tflops
    return None


def flops_per_token(model: torch.nn.Module) -> float | None:
    """
    Returns the operations of a forward and a backward pass of a token through the weights: 6 per
    parameter, 4 if it is not trained. Returns `None` for a mixture of experts, of which a token
    passes only some.

    A token meets each weight in one multiplication and one addition. The forward pass does this
    once, the backward pass twice: for the gradient of its input, and for that of the weight, which
    a frozen weight does not need.
    """
    if has_experts(model):
        return None
    flops = 0
    for parameter in model.parameters():
        # DeepSpeed's shards know the size of the whole.
        size = getattr(parameter, "ds_numel", parameter.numel())
        flops += size * (6 if parameter.requires_grad else 4)
    return float(flops)


@dataclass(frozen=True)
class AttentionFlops:
    """
    The operations of attention itself, for each pair of a query and a key that it sees.

    The forward pass multiplies each query with each key that it sees, and weights that key's value:
    `2 * heads * (head_dim + value_dim)` operations in a layer. The backward pass takes twice as
    many. A query sees the tokens of its path up to itself: `n * (n + 1) / 2` pairs in a rollout of
    `n` tokens, of which a layer with a window of `w` tokens sees at most `w` for each query.
    """

    # of all layers with this window, in tokens; None = no window
    per_pair: dict[int | None, int]

    @classmethod
    def of(cls, config: Any) -> "AttentionFlops | None":
        """Returns those of a model with this configuration, or None if some layers attend in
        another way, or not at all."""
        try:
            return cls._of_text(config.get_text_config())
        # a field that the family does not have, or that differs from layer to layer
        except (AttributeError, RuntimeError):
            return None

    @classmethod
    def _of_text(cls, text: Any) -> "AttentionFlops | None":
        head_dim = getattr(text, "head_dim", None)
        if head_dim is None:
            head_dim = text.hidden_size // text.num_attention_heads
        key_dim = getattr(text, "qk_head_dim", None) or head_dim
        value_dim = getattr(text, "v_head_dim", None) or head_dim
        of_layer = 6 * text.num_attention_heads * (key_dim + value_dim)
        windows = _windows(text)
        if windows is None:
            return None
        per_pair: dict[int | None, int] = {}
        for window in windows:
            per_pair[window] = per_pair.get(window, 0) + of_layer
        return cls(per_pair)

    def of_rollouts(self, rollouts: Iterable[Rollout]) -> float:
        """Returns those of a forward and a backward pass of all tokens of these rollouts, each
        once."""
        pairs = dict.fromkeys(self.per_pair, 0)
        for rollout in rollouts:
            stretches = [(0, len(rollout.prompt_ids) + len(rollout.completion_ids))]
            if rollout.tree is not None:
                shared = rollout.tree.shared.tolist()
                stretches = list(zip(shared, rollout.tree.path_lengths.tolist()))
            for window in pairs:
                pairs[window] += _pairs(stretches, window)
        return float(sum(self.per_pair[window] * count for window, count in pairs.items()))


@dataclass(frozen=True)
class BatchFlops:
    """The operations of training a model on rollouts."""

    per_token: float  # of the weights
    attention: AttentionFlops | None

    @classmethod
    def of(cls, model: torch.nn.Module) -> "BatchFlops | None":
        """Returns those of a model, or None if a token does not pass all of its weights."""
        per_token = flops_per_token(model)
        if per_token is None:
            return None
        return cls(per_token, AttentionFlops.of(model.config))

    def of_rollouts(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Returns those of one pass over the rollouts: of the weights alone as `mfu`, as most
        papers count, and with attention, if that is known, as `mfu_with_attention`."""
        tokens = 0
        for rollout in rollouts:
            tokens += len(rollout.prompt_ids) + len(rollout.completion_ids)
        of_weights = tokens * self.per_token
        flops = {"mfu": of_weights}
        if self.attention is not None:
            flops["mfu_with_attention"] = of_weights + self.attention.of_rollouts(rollouts)
        return flops


def _windows(text: Any) -> list[int | None] | None:
    """Returns the window of each layer, or None if they are not known."""
    window = getattr(text, "sliding_window", None)
    if getattr(text, "use_sliding_window", True) is False:
        window = None
    layer_types = getattr(text, "layer_types", None)
    if layer_types is None:
        return [window] * text.num_hidden_layers
    of_type = {"full_attention": None, "sliding_attention": window}
    if not set(layer_types) <= set(of_type):
        return None
    return [of_type[name] for name in layer_types]


def _pairs(stretches: Sequence[tuple[int, int]], window: int | None) -> int:
    """Returns the pairs of queries and keys of tokens at the positions of each stretch, end
    excluded: the token at position 4 sees 5 keys, itself included, or the last `window` of
    them."""
    pairs = 0
    for begin, end in stretches:
        keys = np.arange(begin, end) + 1
        if window is not None:
            keys = keys.clip(max=window)
        pairs += int(keys.sum())
    return pairs
