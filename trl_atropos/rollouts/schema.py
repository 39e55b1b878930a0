"""The door: one scored group comes in, rows a trainer can use go out.

`intake.py` calls `parse_group` and `rows_of` on every group of a pulled batch. What leaves here is whole and finite;
nobody downstream checks it again.

An error here is one of two kinds. `RejectedGroup` is one bad group: it is dropped, counted, and the run goes on.
`RolloutError` is a setting that makes every group wrong, which only the user can mend: the run stops.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from trl.trainer.utils import nanstd

from trl_atropos.errors import RolloutError
from trl_atropos.rollouts.refusals import (
    refuse_images,
    refuse_other_temperature,
    refuse_placeholder_tokens,
    refuse_sft,
    refuse_unknown_tokens,
)
from trl_atropos.rollouts.wire import MASKED, RejectedGroup, ScoredGroup, parse_group

__all__ = ["RejectedGroup", "Row", "ScoredGroup", "SingleRowGroups", "group_statistics", "parse_group", "rows_of"]

SingleRowGroups = Literal["refuse", "raw", "zero"]


@dataclass(slots=True)
class Row:
    """One rollout, ready for the trainer. Every list but `prompt_ids` has the length of `completion_ids`."""

    prompt_ids: list[int]  # at least one token
    completion_ids: list[int]  # at least one token; ends at the last trained token
    mask: list[int]  # 1 = trained, 0 = context (tool output, later user turns)
    logprobs: list[float]  # log-probabilities under the policy that sampled, NaN = unknown and wherever mask is 0
    score: float  # raw reward
    group_mean: float  # of the scores of the row's whole group, computed in float32; 0.0 with `raw_advantage`
    group_std: float  # the same, ddof=1; 0.0 for a group of one
    token_advantages: list[float] | None  # final, from the environment; None = normalise the score
    zero_advantage: bool  # overrides.set_advantage_to_zero, or a group of one under "zero"
    env_id: int | None
    policy_version: int | None = None  # None = unknown
    raw_advantage: bool = False  # the advantage is the raw score: a group of one under "raw"


def rows_of(
    group: ScoredGroup,
    *,
    max_sequence_length: int,
    temperature: float,
    single_row_groups: SingleRowGroups,
    vocab_size: int | None = None,
) -> list[Row]:
    """
    Turn one group into rows, in the group's order.

    Sequences longer than `max_sequence_length` tokens and sequences without a trained token are left out; their scores
    still count in the group's mean and standard deviation, as the environment meant them to.

    Args:
        group: what `parse_group` returned.
        max_sequence_length: longest prompt plus completion that the trainer takes, in tokens.
        temperature: the sampling temperature that the trainer divides its logits by.
        single_row_groups: what a group of one means, since it has no mean to compare with: `"refuse"` raises, `"raw"`
            takes the score itself as the advantage, `"zero"` an advantage of 0.
        vocab_size: how many token ids the model knows, if that is to be checked.

    Raises:
        RejectedGroup: this group asks for something that is not supported, or its statistics are not finite.
        RolloutError: images, placeholder tokens, token ids that the model does not know, another temperature, or a
            group of one under `"refuse"`.
    """
    refuse_sft(group)
    refuse_images(group)
    refuse_placeholder_tokens(group)
    refuse_unknown_tokens(group, vocab_size)
    refuse_other_temperature(group, temperature)
    # Token-level advantages are final, so a group of one that has them needs no mean.
    single = len(group.tokens) == 1 and not (group.advantages and group.advantages[0])
    if single and single_row_groups == "refuse":
        raise RolloutError(
            f"Environment {group.env_id} sent a group of 1 sequence, which has no group mean to compare its score "
            f"({group.scores[0]}) with. Set `single_row_groups` to 'raw' (the score is the advantage) or 'zero' (do "
            "not learn from it) instead of 'refuse', or give the environment a `group_size` of at least 2."
        )
    mean, std = group_statistics(group.scores)
    fitting = [i for i, tokens in enumerate(group.tokens) if len(tokens) <= max_sequence_length]
    rows = [row for row in (_row(group, i, mean, std) for i in fitting) if row is not None]
    if single:
        for row in rows:
            row.raw_advantage = single_row_groups == "raw"
            row.group_mean = 0.0 if row.raw_advantage else mean
            row.zero_advantage |= single_row_groups == "zero"
    return rows


def group_statistics(scores: list[float]) -> tuple[float, float]:
    """
    Mean and standard deviation (ddof=1; 0.0 for one score) with the float32 operations of TRL's
    `GRPOTrainer._generate_and_score_completions`, so that advantages equal TRL's bit for bit.
    """
    rewards = torch.tensor([scores], dtype=torch.float32)  # (1, n)
    mean = torch.nanmean(rewards, dim=1).item()
    std = nanstd(rewards, dim=1).item() if len(scores) > 1 else 0.0
    if not (math.isfinite(mean) and math.isfinite(std)):
        extremes = f"scores between {min(scores)} and {max(scores)}"
        raise RejectedGroup("malformed", f"{extremes} overflow float32: mean {mean}, standard deviation {std}")
    return mean, std


def _row(group: ScoredGroup, i: int, mean: float, std: float) -> Row | None:
    """Sequence `i` as a row, or None if it has no token to train on."""
    tokens, masks = group.tokens[i], group.masks[i]
    trained = [position for position, mask in enumerate(masks) if mask != MASKED]
    if not trained or trained[-1] == 0:  # the first token has nothing before it to be predicted from
        return None
    first = max(1, trained[0])
    # A masked tail changes no loss, and TRL would take a row that does not end in EOS for a truncated one.
    part = slice(first, trained[-1] + 1)
    mask = [int(entry != MASKED) for entry in masks[part]]
    known = group.inference_logprobs[i] if group.inference_logprobs else None
    advantages = group.advantages[i] if group.advantages else None
    overrides = [group.group_overrides, group.overrides[i] if group.overrides else None]
    return Row(
        prompt_ids=tokens[:first],
        completion_ids=tokens[part],
        mask=mask,
        logprobs=_behaviour_logprobs(known[part], mask) if known else [math.nan] * len(mask),
        score=group.scores[i],
        group_mean=mean,
        group_std=std,
        token_advantages=advantages[part] if advantages else None,
        zero_advantage=any(override is not None and bool(override.set_advantage_to_zero) for override in overrides),
        env_id=group.env_id,
    )


def _behaviour_logprobs(logprobs: list[float | None], mask: list[int]) -> list[float]:
    """NaN where context, missing, or above 0: Atropos pads masked positions and missing tails with 1.0."""
    return [
        value if trained and value is not None and -math.inf < value <= 0.0 else math.nan
        for value, trained in zip(logprobs, mask)
    ]
