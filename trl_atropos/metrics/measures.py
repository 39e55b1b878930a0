"""Measures what shows whether a run learns: in a generation batch, over several, and between the
trainer and the sampler.

`monitor.py` measures every batch, and gives the results to a `Health` (`health.py`).
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence
from statistics import fmean, stdev

import numpy as np
import torch
from accelerate import Accelerator

from trl_atropos.rollouts.rollout import ZERO_STD, Rollout, ScaleRewards, scalar_advantages

# ten times the epsilon that TRL adds: from here on, the difference is scaled up in full
TINY_STD = 1e-3
SAMPLED = 1024  # values of a tensor, at most, that show whether it moves
SHORTEST = 4  # tokens; shorter rollouts repeat a token, or count from 0, by chance
WINDOW = 20  # batches over which the reward is averaged
STALENESS = ("0", "1", "2_or_more", "unknown")
LARGEST_LOG_RATIO = 80.0  # of importance ratios: above, their mean would be infinite


def rollout_measures(
    rollouts: Sequence[Rollout], scale_rewards: ScaleRewards, distils: bool
) -> dict[str, float]:
    """Returns measures of `rollouts`, the generation batch of all ranks, by the name of their
    signal."""
    return {
        "zero_variance": fmean(rollout.teaches_nothing(distils) for rollout in rollouts),
        "identical_rows": _share_identical(rollouts),
        "repeated_token": _share_repeated_token(rollouts),
        "placeholder_tokens": fmean(_is_placeholder(rollout) for rollout in rollouts),
        "advantage_explosion": _largest_advantage(rollouts, scale_rewards),
        "tiny_group_std": _share_tiny_std(rollouts) if scale_rewards == "group" else 0.0,
        "unknown_version": fmean(rollout.policy_version is None for rollout in rollouts),
    }


def _share_identical(rollouts: Sequence[Rollout]) -> float:
    """Returns the share of rollouts in groups of at least two whose completions are all the
    same."""
    groups: defaultdict[Hashable, list[tuple[bytes, ...]]] = defaultdict(list)
    for rollout in rollouts:
        group: Hashable = rollout.group
        if rollout.group < 0:
            # A source that does not number groups still sends the rollouts of one with one prompt
            # and one mean.
            group = (rollout.prompt_ids.tobytes(), rollout.group_mean, rollout.group_std)
        groups[group].append(_identity(rollout))
    identical = 0
    for completions in groups.values():
        if len(completions) > 1 and len(set(completions)) == 1:
            identical += len(completions)
    return identical / len(rollouts)


def _identity(rollout: Rollout) -> tuple[bytes, ...]:
    """Returns what is equal for two rollouts of a group that sampled the same. If they branch, the
    parts of their rows must hang together alike, too."""
    completion = rollout.completion_ids.tobytes()
    if rollout.tree is None:
        return (completion,)
    tree = rollout.tree
    arrays = (tree.lengths, tree.parents, tree.shared)
    return (completion, *(array.tobytes() for array in arrays))


def _share_repeated_token(rollouts: Sequence[Rollout]) -> float:
    """Returns the share of rollouts whose trained tokens are all the same one id. The last one does
    not count: it may be the end token."""
    counts: Counter[int] = Counter()
    for rollout in rollouts:
        tokens = rollout.completion_ids[rollout.mask][:-1]
        if len(tokens) >= SHORTEST and (tokens == tokens[0]).all():
            counts[int(tokens[0])] += 1
    return max(counts.values(), default=0) / len(rollouts)


def _is_placeholder(rollout: Rollout) -> bool:
    tokens = rollout.row
    counted = np.arange(len(tokens))  # places in a context
    if rollout.tree is not None:
        tree = rollout.tree
        counted += np.repeat(tree.shared - tree.begins, tree.lengths)
    return len(tokens) >= SHORTEST and bool((tokens == counted).all())


def _largest_advantage(rollouts: Sequence[Rollout], scale_rewards: ScaleRewards) -> float:
    scalars = scalar_advantages(rollouts, scale_rewards).tolist()
    sizes = []
    for rollout, scalar in zip(rollouts, scalars, strict=True):
        if rollout.trains_on_token_advantages:
            trained = rollout.token_advantages[rollout.mask]
            sizes.append(float(np.abs(trained).max()))
        else:
            sizes.append(abs(scalar))
    return max(sizes)


def _share_tiny_std(rollouts: Sequence[Rollout]) -> float:
    return fmean(ZERO_STD < rollout.group_std < TINY_STD for rollout in rollouts)


def share_dropped(metrics: Mapping[str, float], trained: int) -> float:
    """Returns the share of rollouts that a source dropped, by its metrics, when it handed out
    `trained` rollouts."""
    dropped = 0.0
    for name, value in metrics.items():
        # Rollouts of evaluations were not meant to be trained on.
        if name.startswith("rollouts/dropped_") and name != "rollouts/dropped_evaluation":
            dropped += value
    return dropped / (dropped + trained)


class History:
    """
    Measures what only shows over several batches.

    Args:
        divisor: tokens by which the loss divides every completion, if it does.
    """

    def __init__(self, divisor: int | None = None):
        self._divisor = divisor
        self._longest = 1
        self._constant = 0
        self._value: float | None = None
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._best = -float("inf")
        self._since_best = 0

    def add(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """
        Returns measures by the name of their signal.

        `constant_rewards`: batches in a row in which every score was the same number.
        `reward_stalled`: batches since the mean of the last 20 was above the best one so far by
        more than two standard errors. `loss_divisor`, if there is one: its ratio to the most
        trained tokens of a rollout so far.
        """
        scores = [rollout.score for rollout in rollouts]
        self._count_constant(set(scores))
        self._count_stalled(fmean(scores))
        measures = {
            "constant_rewards": float(self._constant),
            "reward_stalled": float(self._since_best),
        }
        if self._divisor is not None:
            longest = max(int(rollout.mask.sum()) for rollout in rollouts)
            self._longest = max(self._longest, longest)
            measures["loss_divisor"] = self._divisor / self._longest
        return measures

    def _count_constant(self, values: set[float]) -> None:
        value = None
        if len(values) == 1:
            (value,) = values
        if value is None:
            self._constant = 0
        elif value == self._value:
            self._constant += 1
        else:
            self._constant = 1
        self._value = value

    def _count_stalled(self, mean_score: float) -> None:
        self._recent.append(mean_score)
        if len(self._recent) < WINDOW:
            return
        self._since_best += 1
        mean = fmean(self._recent)
        noise = stdev(self._recent) / WINDOW**0.5
        if mean > self._best + 2 * noise:
            self._best = mean
            self._since_best = 0


class Movement:
    """
    Counts the batches in a row whose optimizer steps have left all trained weights as they were.

    Some values of every tensor are compared on its device. The result is read one batch later, when
    TRL has just read values of the next batch, so that nothing waits for it.
    """

    def __init__(self) -> None:
        self._last: torch.Tensor | None = None  # values of the last batch
        self._steps = 0
        self._should_move = False
        self._moved: torch.Tensor | None = None  # result of the last comparison
        self._unmoved = 0

    def measure(
        self, tensors: Sequence[torch.Tensor], steps: int, should_move: bool
    ) -> dict[str, float]:
        """
        Returns the count as `unmoved_weights`. Steps that were not to move anything do not count.

        Args:
            tensors: This rank's part of the trained weights.
            steps: Optimizer steps so far that were not skipped.
            should_move: Whether the next batch should move the weights: it teaches something, and
                the learning rate is above 0.
        """
        if self._moved is not None:
            self._unmoved = 0 if self._moved.item() else self._unmoved + 1
        values = torch.cat([_grid(tensor) for tensor in tensors])
        # a callback may unfreeze more
        is_comparable = self._last is not None and self._last.shape == values.shape
        self._moved = None
        if is_comparable and steps > self._steps and self._should_move:
            self._moved = (values != self._last).any()
        self._last = values
        self._steps = steps
        self._should_move = should_move
        return {"unmoved_weights": float(self._unmoved)}


def _grid(tensor: torch.Tensor) -> torch.Tensor:
    """Returns up to `SAMPLED` values that are spread over a tensor, in float32, which holds every
    trained dtype. Of (64, 3000) they are every second row and every 94th column."""
    side = int(SAMPLED ** (1 / max(1, tensor.dim())))
    places = []
    for size in tensor.shape:
        step = math.ceil(size / side)
        places.append(slice(None, None, max(1, step)))
    return tensor.detach()[tuple(places)].flatten().float()


def trl_metrics(
    batch: dict[str, torch.Tensor], sequence_level: bool, accelerator: Accelerator
) -> dict[str, float]:
    """Returns what TRL logs of a batch that it scores, from the batch that `sampling_measures`
    takes. Means are of the ranks' means."""
    trained = (batch["completion_mask"] * batch["tool_mask"]).bool()
    gaps = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"]).abs()
    gaps = gaps[trained & ~gaps.isnan()]
    ratios = batch["importance_sampling_ratio"]
    ratios = ratios.flatten() if sequence_level else ratios[trained]
    if not gaps.numel():
        gaps = gaps.new_zeros(1)
    if not ratios.numel():
        ratios = ratios.new_zeros(1)
    local = torch.stack([gaps.mean(), gaps.max(), ratios.min(), ratios.mean(), ratios.max()])
    of_ranks = accelerator.gather(local[None])  # (ranks, 5)
    mean, least, most = torch.stack([of_ranks.mean(0), of_ranks.amin(0), of_ranks.amax(0)]).tolist()
    return {
        "sampling/sampling_logp_difference/mean": mean[0],
        "sampling/sampling_logp_difference/max": most[1],
        "sampling/importance_sampling_ratio/min": least[2],
        "sampling/importance_sampling_ratio/mean": mean[3],
        "sampling/importance_sampling_ratio/max": most[4],
    }


@torch.no_grad()
def sampling_measures(
    output: dict[str, torch.Tensor],
    rollouts: Sequence[Rollout],
    sequence_level: bool,
    accelerator: Accelerator,
) -> tuple[dict[str, float], dict[str, float]]:
    """
    Measures how far the policy that is trained is from the one that sampled, over the trained
    tokens of all ranks whose log-probability under the sampler is known. Call it on every rank.

    Args:
        output: this rank's `(B, C)` tensors `completion_mask`, `tool_mask`, `old_per_token_logps`
            and `sampling_per_token_logps`, and `importance_sampling_ratio`, `(B, C)` or `(B, 1)`,
            as TRL has them.
        rollouts: this rank's `B`.
        sequence_level: whether the correction multiplies the ratios of a rollout's tokens.

    Returns:
        Measures by the name of their signal, and further metrics; in nats, ratios and shares. Both
        are empty when no log-probability is known.
    """
    gap = output["old_per_token_logps"] - output["sampling_per_token_logps"]  # (B, C)
    trained = (output["completion_mask"] * output["tool_mask"]).bool()
    known = trained & ~gap.isnan()
    distance = gap.double().abs().where(known, 0.0)
    log_ratio = gap.where(known, 0.0)
    if sequence_level:
        log_ratio = log_ratio.sum(-1, keepdim=True)
    corrected = output["importance_sampling_ratio"]
    changed = (log_ratio.exp() != corrected).expand_as(known) & known
    ratios = log_ratio.double().clamp(max=LARGEST_LOG_RATIO).exp()
    if not sequence_level:
        ratios = ratios[known]

    classes = _staleness_classes(rollouts, gap.device)  # (B, 4)
    local = [
        distance.sum(-1) @ classes,
        known.sum(-1).double() @ classes,
        changed.sum().double()[None],
        ratios.sum()[None],
        ratios.new_tensor([ratios.numel()]),
        distance.max()[None],
        ratios.max()[None] if ratios.numel() else ratios.new_zeros(1),
    ]
    of_ranks = accelerator.gather(torch.cat(local)[None])  # (ranks, 13): 11 sums and 2 maxima
    sums = of_ranks[:, :-2].sum(0).tolist()
    worst_gap, worst_ratio = of_ranks[:, -2:].amax(0).tolist()
    gaps = sums[:4]  # by staleness
    tokens = sums[4:8]  # by staleness
    num_changed, ratio_sum, num_ratios = sums[8:]
    if not sum(tokens):
        return {}, {}

    measures = {
        "logprob_gap": sum(gaps) / sum(tokens),
        "importance_ratio": ratio_sum / num_ratios,
        "tokens_corrected": num_changed / sum(tokens),
    }
    if tokens[0]:
        measures["logprob_gap_fresh"] = gaps[0] / tokens[0]
    metrics = {}
    for name, gap_sum, count in zip(STALENESS, gaps, tokens):
        if count:
            metrics[f"sampling/logprob_gap/staleness_{name}"] = gap_sum / count
    metrics["sampling/logprob_gap/max"] = worst_gap
    metrics["sampling/importance_ratio_before/max"] = worst_ratio
    return measures, metrics


def _staleness_classes(rollouts: Sequence[Rollout], device: torch.device) -> torch.Tensor:
    """Returns float64 (B, 4), with a 1 in the place that a rollout's staleness has in
    `STALENESS`."""
    places = []
    for rollout in rollouts:
        unknown = rollout.staleness is None
        places.append(3 if unknown else min(rollout.staleness, 2))
    places = torch.tensor(places, device=device)
    return torch.nn.functional.one_hot(places, len(STALENESS)).double()
