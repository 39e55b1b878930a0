"""Rows in, advantages out: TRL's group-relative normalisation, over the groups the environments really sent.

Upstream derives groups from their position in the batch, all of one size. Here every row carries the mean and standard
deviation of its own group, so groups may differ in size and may be split between ranks. The trainer calls these on the
rows of all ranks and slices its own part.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from trl.trainer.utils import nanstd

from trl_atropos.rollouts.schema import Row

ScaleRewards = Literal["group", "batch", "none"]
EPSILON = 1e-4  # TRL's
ZERO_STD = 1e-8  # what `torch.isclose` calls zero


def row_advantages(rows: Sequence[Row], scale_rewards: ScaleRewards) -> torch.Tensor:
    """
    One advantage per row, `(n,)` float32, bit-equal to TRL's on the same groups.

    `(score - group mean) / (std + 1e-4)`, where std is of the row's group (`"group"`), of the scores of all `rows`
    (`"batch"`), or not divided by (`"none"`): `GRPOTrainer._generate_and_score_completions` in TRL 1.16. A row with
    `zero_advantage` gets 0, a row with `sft` 1, a row with `raw_advantage` its score, unscaled. `token_advantages` are
    not looked at.

    An advantage of 1 on a row whose log-probabilities are unknown, so that every ratio is 1, has the gradient of the
    log-likelihood of its trained tokens at the trainer's temperature, averaged as `loss_type` averages. (With several
    `num_iterations`, the ratio to the first one is clipped here as elsewhere.)
    """
    scores = torch.tensor([row.score for row in rows], dtype=torch.float32)
    centred = scores - torch.tensor([row.group_mean for row in rows], dtype=torch.float32)
    if scale_rewards == "group":
        advantages = centred / (_group_stds(rows) + EPSILON)
    elif scale_rewards == "batch":
        std = nanstd(scores) if len(rows) > 1 else torch.zeros(())
        advantages = centred / (std.expand_as(scores) + EPSILON)
    else:
        advantages = centred
    advantages = torch.where(torch.tensor([row.raw_advantage for row in rows]), scores, advantages)
    advantages = advantages.masked_fill(torch.tensor([row.sft for row in rows]), 1.0)
    return advantages.masked_fill(torch.tensor([row.zero_advantage for row in rows]), 0.0)


def brings_advantages(row: Row) -> bool:
    """Whether the row is trained with the environment's own token-level advantages."""
    return row.token_advantages is not None and not (row.zero_advantage or row.sft)


def teaches_nothing(row: Row, distils: bool) -> bool:
    """
    Whether the advantage of a row is 0 because the scores of its group are alike, and nothing else is learned from it.

    Args:
        distils: whether a teacher that the row brings is learned from.
    """
    if row.group_std > ZERO_STD or (distils and row.distill_ids is not None):
        return False
    own = row.sft or row.raw_advantage or row.token_advantages is not None
    return row.zero_advantage or not own


def advantage_tensor(
    rows: Sequence[Row], local_slice: slice, scale_rewards: ScaleRewards, completion_length: int
) -> torch.Tensor:
    """
    The advantages of one rank's rows, in the form TRL's loss takes.

    Args:
        rows: the rows of all ranks, so that every rank decides alike between the two forms.
        local_slice: which of `rows` are this rank's.
        scale_rewards: see `row_advantages`.
        completion_length: to how many tokens this rank's completions are right-padded.

    Returns:
        `(n_local,)` float32, or `(n_local, completion_length)` float32 if any of `rows` brought token-level
        advantages: those as they came, the other rows' advantage on all their tokens, 0.0 on padding.
    """
    scalars = row_advantages(rows, scale_rewards)[local_slice]
    if all(row.token_advantages is None for row in rows):
        return scalars
    advantages = torch.zeros(len(scalars), completion_length)
    for i, row in enumerate(rows[local_slice]):
        length = len(row.completion_ids)
        if brings_advantages(row):
            advantages[i, :length] = torch.from_numpy(row.token_advantages)
        else:
            advantages[i, :length] = scalars[i]
    return advantages


def logged_advantages(rows: Sequence[Row], scale_rewards: ScaleRewards) -> list[float]:
    """One number per row for the completions table: the mean over the trained tokens of what it is trained with."""
    scalars = row_advantages(rows, scale_rewards).tolist()
    return [
        float(row.token_advantages[row.mask].mean(dtype=np.float64)) if brings_advantages(row) else scalar
        for row, scalar in zip(rows, scalars, strict=True)
    ]


def share_zero_variance(rows: Sequence[Row]) -> float:
    """The share of `rows` (at least one) whose group's scores are all alike: `frac_reward_zero_std`."""
    stds = _group_stds(rows)
    return torch.isclose(stds, torch.zeros_like(stds)).float().mean().item()


def _group_stds(rows: Sequence[Row]) -> torch.Tensor:
    return torch.tensor([row.group_std for row in rows], dtype=torch.float32)
