"""Finds the calls of a rollout that were cut off before they ended.

TRL looks at a rollout's last token: if that ends no completion, the rollout is truncated. An
episode that branches (`rollouts/tree.py`) has several last tokens, one for each path. So for a
batch in which any rollout branches, the functions here take the place of what TRL does.
"""

from collections.abc import Collection, Sequence

import numpy as np

from trl_atropos.rollouts.rollout import Rollout


def cut_parts(rollout: Rollout, end_tokens: Collection[int]) -> np.ndarray:
    """
    Returns which parts of a rollout were cut off, (parts,) bool: those that end with a sampled
    token which is no end token, and that no other part continues. A rollout that does not branch
    has one part.

    Args:
        end_tokens: ids that end a completion.
    """
    last = np.array([-1])  # in the row, of each part
    if rollout.tree is not None:
        last = rollout.tree.begins + rollout.tree.lengths - 1
    ended = np.isin(rollout.row[last], list(end_tokens))
    return rollout.ends_with_call & ~ended


def uncut_mask(rollout: Rollout, end_tokens: Collection[int]) -> np.ndarray:
    """Returns the rollout's mask, (c,) bool, without the tokens of parts that were cut off."""
    is_cut = cut_parts(rollout, end_tokens)
    lengths = [len(rollout.prompt_ids) + len(rollout.completion_ids)]
    if rollout.tree is not None:
        lengths = rollout.tree.lengths
    token_is_cut = np.repeat(is_cut, lengths)
    return rollout.mask & ~token_is_cut[len(rollout.prompt_ids) :]


def completion_metrics(
    rollouts: Sequence[Rollout], end_tokens: Collection[int]
) -> dict[str, float]:
    """Returns TRL's metrics of completions, in sampled tokens. A rollout is cut off (counts for
    `completions/clipped_ratio`) if any of its calls was, and otherwise terminated."""
    lengths = np.array([rollout.mask.sum() for rollout in rollouts])
    is_cut = np.array([cut_parts(rollout, end_tokens).any() for rollout in rollouts])
    terminated = lengths[~is_cut]
    if not len(terminated):
        terminated = np.zeros(1)
    return {
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(is_cut.mean()),
        "completions/mean_terminated_length": float(terminated.mean()),
        "completions/min_terminated_length": float(terminated.min()),
        "completions/max_terminated_length": float(terminated.max()),
    }
