"""What is measured of every generation batch: numbers from its rows, and from the tensors that TRL made of them.

`health.py` says what they mean. Rows are the same on every rank, so `row_measures` needs no communication; tensors are
each rank's own, so `sampling_measures` is called on every rank and gathers.
"""

from collections import defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence
from statistics import fmean, stdev

import numpy as np
import torch
from accelerate import Accelerator

from trl_atropos.rollouts.advantages import (
    ZERO_STD,
    ScaleRewards,
    brings_advantages,
    scalar_advantages,
    teaches_nothing,
)
from trl_atropos.rollouts.row import Row

TINY_STD = 1e-3  # ten times the epsilon that TRL adds: from here on, the difference is scaled up in full
SHORTEST = 4  # tokens; shorter rows repeat a token, or count from 0, by chance
WINDOW = 20  # batches whose mean is the reward to be improved on
STALENESS = ("0", "1", "2_or_more", "unknown")


def row_measures(rows: Sequence[Row], scale_rewards: ScaleRewards, distils: bool) -> dict[str, float]:
    """
    Shares of `rows`, the generation batch of all ranks, by the name of their signal, and the largest advantage.
    `distils` is whether a teacher that a row brings is learned from.
    """
    return {
        "zero_variance": fmean(teaches_nothing(row, distils) for row in rows),
        "identical_rows": _share_identical(rows),
        "repeated_token": _share_repeated_token(rows),
        "placeholder_tokens": fmean(map(_is_placeholder, rows)),
        "advantage_explosion": _largest_advantage(rows, scale_rewards),
        "tiny_group_std": fmean(scale_rewards == "group" and ZERO_STD < row.group_std < TINY_STD for row in rows),
        "unknown_version": fmean(row.policy_version is None for row in rows),
    }


def _share_identical(rows: Sequence[Row]) -> float:
    """Share of rows whose group has at least two rows, all with the same completion."""
    groups: defaultdict[Hashable, list[bytes]] = defaultdict(list)
    for row in rows:
        # A source that does not number its groups still sends their rows with one prompt and one mean.
        key = row.group if row.group >= 0 else (row.prompt_ids.tobytes(), row.group_mean, row.group_std)
        groups[key].append(row.completion_ids.tobytes())
    return sum(len(said) for said in groups.values() if len(said) > 1 and len(set(said)) == 1) / len(rows)


def _share_repeated_token(rows: Sequence[Row]) -> float:
    """Share of rows whose trained tokens (but for the last, which may end the sequence) are all one id, the most
    frequent such id: an environment may well ask for a repetition, but seldom for the same one everywhere."""
    counts: defaultdict[int, int] = defaultdict(int)
    for row in rows:
        said = row.completion_ids[row.mask][:-1]
        if len(said) >= SHORTEST and (said == said[0]).all():
            counts[int(said[0])] += 1
    return max(counts.values(), default=0) / len(rows)


def _is_placeholder(row: Row) -> bool:
    tokens = np.concatenate([row.prompt_ids, row.completion_ids])
    return len(tokens) >= SHORTEST and bool((tokens == np.arange(len(tokens))).all())


def _largest_advantage(rows: Sequence[Row], scale_rewards: ScaleRewards) -> float:
    scalars = abs(scalar_advantages(rows, scale_rewards)).tolist()
    return max(
        float(np.abs(row.token_advantages[row.mask]).max()) if brings_advantages(row) else scalar
        for row, scalar in zip(rows, scalars, strict=True)
    )


def share_dropped(metrics: Mapping[str, float], trained: int) -> float:
    """Of the rows that came in, the share that did not become one of `trained` rows, by a source's own counts."""
    dropped = sum(value for name, value in metrics.items() if name.startswith("rollouts/dropped_"))
    return dropped / (dropped + trained)


class History:
    """
    What only shows over several batches: scores that never differ, a mean that no longer rises, and completions that
    never become as long as the loss takes them to be.

    Args:
        divisor: tokens that the loss takes every completion to have, if it divides by them.
    """

    def __init__(self, divisor: int | None = None):
        self._divisor = divisor
        self._longest = 1
        self._constant = 0
        self._value: float | None = None
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._best = -float("inf")
        self._since_best = 0

    def add(self, rows: Sequence[Row]) -> dict[str, float]:
        """
        `constant_rewards`: batches in a row in which every score was the same number. `reward_stalled`: batches since
        the mean of the last 20 was above the best one so far by more than two standard errors. `loss_divisor`, where
        there is one: how many times it is as long as the longest completion so far.
        """
        scores = {row.score for row in rows}
        value = scores.pop() if len(scores) == 1 else None
        self._constant = 0 if value is None else self._constant + 1 if value == self._value else 1
        self._value = value
        self._recent.append(fmean(row.score for row in rows))
        if len(self._recent) == WINDOW:
            self._since_best += 1
            mean, noise = fmean(self._recent), stdev(self._recent) / WINDOW**0.5
            if mean > self._best + 2 * noise:
                self._best, self._since_best = mean, 0
        measures = {"constant_rewards": float(self._constant), "reward_stalled": float(self._since_best)}
        if self._divisor is not None:
            self._longest = max(self._longest, *(len(row.completion_ids) for row in rows))
            measures["loss_divisor"] = self._divisor / self._longest
        return measures


def staleness_classes(rows: Sequence[Row]) -> torch.Tensor:
    """`(n,)` int64 indices into `STALENESS`, by the staleness that the source has told."""
    return torch.tensor([3 if row.staleness is None else min(row.staleness, 2) for row in rows])


@torch.no_grad()
def sampling_measures(
    output: dict[str, torch.Tensor], staleness: torch.Tensor, sequence_level: bool, accelerator: Accelerator
) -> tuple[dict[str, float], dict[str, float]]:
    """
    How far the policy that is trained is from the one that sampled, over the trained tokens of all ranks whose
    log-probability under the sampler is known.

    Args:
        output: this rank's `(B, C)` tensors `completion_mask`, `tool_mask`, `old_per_token_logps` and
            `sampling_per_token_logps`, and `importance_sampling_ratio`, `(B, C)` or `(B, 1)`, as TRL made them.
        staleness: `(B,)`, from `staleness_classes`.
        sequence_level: whether the correction multiplies the ratios of a sequence's tokens.

    Returns:
        Measures by the name of their signal, and further metrics; in nats, ratios and shares. Both are empty when no
        log-probability is known.
    """
    gap = output["old_per_token_logps"] - output["sampling_per_token_logps"]  # (B, C)
    trained = (output["completion_mask"] * output["tool_mask"]).bool()
    known = trained & ~gap.isnan()
    log_ratio = gap.where(known, 0.0)
    if sequence_level:
        log_ratio = log_ratio.sum(-1, keepdim=True)
    before, after = log_ratio.exp(), output["importance_sampling_ratio"]
    changed = (before != after).expand_as(known) & known
    ratios = log_ratio.double().clamp(max=80.0).exp()  # above, the mean would be infinite
    ratios = ratios if sequence_level else ratios[known]
    distance = gap.double().abs().where(known, 0.0)
    classes = torch.nn.functional.one_hot(staleness.to(gap.device), len(STALENESS)).double()  # (B, 4)
    sums = torch.cat(
        [
            distance.sum(-1) @ classes,
            known.sum(-1).double() @ classes,
            torch.stack([changed.sum().double(), ratios.sum(), ratios.new_tensor(ratios.numel())]),
        ]
    )
    peaks = torch.stack([distance.max(), ratios.max() if ratios.numel() else ratios.new_zeros(())])
    of_ranks = accelerator.gather(torch.cat([sums, peaks])[None])  # (ranks, 13)
    totals = of_ranks[:, : len(sums)].sum(0).tolist()
    worst_gap, worst_ratio = of_ranks[:, len(sums) :].amax(0).tolist()
    gaps, tokens, (num_changed, ratio_sum, num_ratios) = totals[:4], totals[4:8], totals[8:]
    if not sum(tokens):
        return {}, {}
    metrics = {f"sampling/logprob_gap/staleness_{name}": gap / n for name, gap, n in zip(STALENESS, gaps, tokens) if n}
    metrics |= {
        "sampling/logprob_gap/max": worst_gap,
        "sampling/importance_ratio_before/max": worst_ratio,
    }
    measures = {
        "logprob_gap": sum(gaps) / sum(tokens),
        "importance_ratio": ratio_sum / num_ratios,
        "tokens_corrected": num_changed / sum(tokens),
    }
    if tokens[0]:
        measures["logprob_gap_fresh"] = gaps[0] / tokens[0]
    return measures, metrics
