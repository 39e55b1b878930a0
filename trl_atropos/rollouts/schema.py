"""The door: one scored group comes in, rows a trainer can use go out.

`intake.py` calls `parse_group` and `rows_of` on every group of a pulled batch. What leaves here is whole and finite;
nobody downstream checks it again.

An error here is one of two kinds. `RejectedGroup` is one bad group: it is dropped, counted, and the run goes on.
`RolloutError` is a setting that makes every group wrong, which only the user can mend: the run stops.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from trl.trainer.utils import nanstd

from trl_atropos.errors import RolloutError
from trl_atropos.rollouts.refusals import (
    refuse_images,
    refuse_other_temperature,
    refuse_placeholder_tokens,
    refuse_unknown_tokens,
)
from trl_atropos.rollouts.values import RejectedGroup
from trl_atropos.rollouts.wire import ScoredGroup, parse_group

__all__ = ["RejectedGroup", "Row", "ScoredGroup", "SingleRowGroups", "group_statistics", "parse_group", "rows_of"]

SingleRowGroups = Literal["refuse", "raw", "zero"]


@dataclass(slots=True, eq=False)
class Row:
    """One rollout of `p` prompt tokens and `c` completion tokens, ready for the trainer."""

    prompt_ids: np.ndarray  # (p,) int32, p >= 1
    completion_ids: np.ndarray  # (c,) int32, c >= 1; ends at the last trained token
    mask: np.ndarray  # (c,) bool; False = context (tool output, later user turns)
    logprobs: np.ndarray  # (c,) float32 under the policy that sampled; NaN = unknown, and wherever mask is False
    score: float  # raw reward
    group_mean: float  # of the scores of the row's whole group, computed in float32; 0.0 with `raw_advantage`
    group_std: float  # the same, ddof=1; 0.0 for a group of one
    token_advantages: np.ndarray | None  # (c,) float32, final, from the environment; None = normalise the score
    zero_advantage: bool  # overrides.set_advantage_to_zero, or a group of one under "zero"
    env_id: int | None  # number of the environment at the API
    environment: str | None = None  # its name, where that is known
    policy_version: int | None = None  # oldest version that sampled any token of it; None = unknown
    newest_version: int | None = None  # version at its last sampled token
    raw_advantage: bool = False  # the advantage is the raw score: a group of one under "raw"
    group: int = -1  # number of its group within the run; rows of one group share it
    index: int = -1  # number of the row within the run, in order of arrival
    arrived: float = 0.0  # time.monotonic() when its batch was pulled, or read again
    sft: bool = False  # the `sft` override: train as supervised, with advantage 1; logprobs are NaN
    distill_ids: np.ndarray | None = None  # (c, k) int32, the teacher's tokens at each position; -1 = absent
    distill_logprobs: np.ndarray | None = None  # (c, k) float32, NaN = absent
    messages: str | None = None  # JSON of the conversation, for human readers


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
        RejectedGroup: token ids that the model does not know, an override that says that another temperature was
            sampled at, or statistics that are not finite.
        RolloutError: images, placeholder tokens, another temperature in `generation_params`, or a group of one under
            `"refuse"`.
    """
    refuse_images(group)
    refuse_placeholder_tokens(group)
    refuse_unknown_tokens(group, vocab_size)
    refuse_other_temperature(group, temperature)
    # Token-level advantages are final, and supervised rows have none, so a group of one with them needs no mean.
    single = len(group.tokens) == 1 and group.advantages[0] is None and not group.asks("sft", 0)
    if single and single_row_groups == "refuse":
        raise RolloutError(
            f"Environment {group.label} sent a group of 1 sequence, which has no group mean to compare its score "
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
    trained = np.flatnonzero(group.trained[i])
    if not len(trained) or trained[-1] == 0:  # the first token has nothing before it to be predicted from
        return None
    first = max(1, int(trained[0]))
    # A masked tail changes no loss, and TRL would take a row that does not end in EOS for a truncated one.
    part = slice(first, int(trained[-1]) + 1)
    mask = group.trained[i][part]
    sft = group.asks("sft", i)
    logprobs, advantages, teacher = group.logprobs[i], group.advantages[i], group.teachers[i]
    distill = teacher.padded(part) if teacher is not None else None
    unknown = logprobs is None or sft
    return Row(
        prompt_ids=group.tokens[i][:first],
        completion_ids=group.tokens[i][part],
        mask=mask,
        logprobs=np.where(mask, np.float32(np.nan) if unknown else logprobs[part], np.float32(np.nan)),
        score=group.scores[i],
        group_mean=mean,
        group_std=std,
        token_advantages=advantages[part].astype(np.float32) if advantages is not None and not sft else None,
        zero_advantage=group.asks("set_advantage_to_zero", i),
        env_id=group.env_id,
        environment=group.environment,
        sft=sft,
        distill_ids=distill[0] if distill else None,
        distill_logprobs=distill[1] if distill else None,
        messages=group.messages[i],
    )
