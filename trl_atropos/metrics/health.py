"""Warns of a run that learns nothing, or learns from the wrong data.

`AtroposGRPOTrainer` measures every generation batch with the functions below and gives the results
to its `Health` on rank 0. If a signal stays above its threshold for some batches in a row, the log
says what that means and what to do.
"""

import logging
import math
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np
import torch
from accelerate import Accelerator

from trl_atropos.errors import AtroposTrainingError, RecipeError
from trl_atropos.rollouts.rollout import ZERO_STD, Rollout, ScaleRewards, scalar_advantages

logger = logging.getLogger(__name__)

FINE_AGAIN = 20  # batches in a row below the threshold after which a signal may warn again
# ten times the epsilon that TRL adds: from here on, the difference is scaled up in full
TINY_STD = 1e-3
SAMPLED = 1024  # values of a tensor, at most, that show whether it moves
SHORTEST = 4  # tokens; shorter rollouts repeat a token, or count from 0, by chance
WINDOW = 20  # batches over which the reward is averaged
STALENESS = ("0", "1", "2_or_more", "unknown")
LARGEST_LOG_RATIO = 80.0  # of importance ratios: above, their mean would be infinite


class Signal(NamedTuple):
    """
    Describes one thing that goes wrong in runs.

    It warns above `threshold`, after `patience` batches in a row, because one batch may be an
    accident. `what` says what has happened, formatted with `value`, the measure of the last batch.
    `fix` says what to do about it.
    """

    threshold: float
    patience: int
    what: str
    fix: str


SIGNALS = {
    "zero_variance": Signal(
        0.9,
        5,
        "{value:.0%} of the rollouts are in groups whose scores are all alike, which teach nothing",
        "Change the tasks or the reward, or take only groups with variance "
        "(`replace_zero_variance_groups: true`).",
    ),
    "identical_rows": Signal(
        0.9,
        5,
        "{value:.0%} of the rollouts are in groups whose completions are identical",
        "Check the environment's temperature and caches. If the policy has lost its variety, lower "
        "`learning_rate`, or set `entropy_coef` or `beta`.",
    ),
    "repeated_token": Signal(
        0.5,
        3,
        "{value:.0%} of the rollouts are one and the same token, repeated",
        "If the policy has collapsed, lower `learning_rate`, raise `beta`, or take an earlier "
        "checkpoint. If the environment sends dummies, have its server give it tokens "
        "(`--openai.server_type vllm`).",
    ),
    "placeholder_tokens": Signal(
        0.0,
        1,
        "{value:.0%} of the rollouts have the token ids 0, 1, 2, ..., which Atropos sends if the "
        "inference server gives none",
        "Sample through a managed server with `--openai.server_type vllm`, and unset "
        "ATROPOS_ALLOW_DUMMY_MANAGED_SERVER.",
    ),
    "constant_rewards": Signal(
        10,
        1,
        "For {value:.0f} batches every rollout has had the same score, so that there is nothing to "
        "learn",
        "Unless the task is learned, look at the completions (`log_completions: true`) and the "
        "scoring function.",
    ),
    "reward_stalled": Signal(
        200,
        1,
        "The reward has not risen beyond its noise for {value:.0f} batches",
        "If it is where you want it, the run is done. Otherwise look at the completions, change "
        "`learning_rate`, or take other tasks.",
    ),
    "advantage_explosion": Signal(
        10.0,
        1,
        "An advantage has reached {value:.3g}, but normalised ones stay below 10 for groups of up "
        "to 100",
        "Bring the environment's `advantages` or raw scores to a spread of about 1, or set "
        "`scale_rewards: group`.",
    ),
    "tiny_group_std": Signal(
        0.1,
        3,
        "{value:.0%} of the rollouts are in groups whose scores differ by less than 0.001: noise "
        "gets full advantages",
        "Round the scores in the environment, or set `scale_rewards: batch` or `none`.",
    ),
    "unmoved_weights": Signal(
        2,
        1,
        "For {value:.0f} batches the weights have not moved, though the learning rate was above 0, "
        "and the same policy was published again: up to 1,024 values of every trained tensor are "
        "what they were",
        "If a 16-bit model is trained, keep `master_weights: true`, or raise `learning_rate`: "
        "updates below the weights' rounding are lost. Otherwise compare `trainer.optimizer` with "
        "the parameters that have a gradient.",
    ),
    "truncated": Signal(
        0.9,
        5,
        "{value:.0%} of the rollouts do not end with an end-of-sequence token",
        "Raise the environment's token limit (and the server's `--max-model-len`), or keep the "
        "last token of a completion.",
    ),
    "loss_divisor": Signal(
        2.0,
        5,
        "`loss_type: dr_grpo` divides by `max_completion_length`, which is {value:.3g} times the "
        "most tokens that any rollout so far trains, and gradients are smaller by as much",
        "Set it to the most tokens that the environments sample for a rollout.",
    ),
    "logprob_gap_fresh": Signal(
        0.1,
        3,
        "For rollouts sampled from the very weights that are trained, server and trainer differ by "
        "{value:.3g} nats per token in the mean, of which rounding explains about 0.02",
        "Have the environment sample at the trainer's temperature without top_p or penalties, and "
        "start the server with `--logprobs-mode processed_logprobs`.",
    ),
    "logprob_gap": Signal(
        0.5,
        3,
        "Sampler and trainer differ by {value:.3g} nats per token in the mean",
        "Lower `max_staleness`, the environments' `max_batches_offpolicy`, or `learning_rate`, and "
        "check that the server samples from this model.",
    ),
    "importance_ratio": Signal(
        2.0,
        3,
        "The mean ratio between the trainer's and the sampler's probabilities is {value:.3g}, not "
        "the expected 1: a few tokens carry the whole update",
        "Use fresher rollouts (`max_staleness`), or a token level correction "
        "(`vllm_importance_sampling_mode: token_truncate`).",
    ),
    "tokens_corrected": Signal(
        0.3,
        3,
        "{value:.0%} of the trained tokens are truncated or masked by the correction for the "
        "sampler",
        "Use fresher rollouts (`max_staleness`), a token level `vllm_importance_sampling_mode`, or "
        "a wider `vllm_importance_sampling_clip_max`.",
    ),
    "stale": Signal(
        2.0,
        3,
        "Rollouts are {value:.1f} generation batches old when they are trained on",
        "If this run has just resumed from an earlier checkpoint, they are left over from the "
        "abandoned steps. Otherwise lower the environments' `max_batches_offpolicy` to 1, and keep "
        "`prefetch_batches` at 0.",
    ),
    "unknown_version": Signal(
        0.5,
        3,
        "For {value:.0%} of the rollouts it is not known which version of the weights sampled "
        "them, so that their staleness is not limited",
        "If the environment has a `collect_trajectory` and leaves the group to Atropos' own "
        "`collect_trajectories`, that drops `inference_logprobs`: name the script by `path:` in "
        "the recipe, which keeps them. Otherwise sample from this run's server through a managed "
        "server (`--openai.server_type vllm`), and send `inference_logprobs`.",
    ),
    "dropped": Signal(
        0.5,
        3,
        "{value:.0%} of the rollouts that arrived were dropped",
        "Look at the metrics `rollouts/dropped_*`, which count the reasons, and at the warnings in "
        "this log, which explain them.",
    ),
    # This one is of steps, and always stops the run (`metrics/gradients.py`).
    "gradient_not_finite": Signal(
        0,
        1,
        "{value:.0f} optimizer steps had a gradient that is not finite, and were left out",
        "Look at the warnings in this log, which name the largest values in their losses.",
    ),
}


def check_names(field: str, names: Sequence[str]) -> None:
    """Raises `RecipeError` if one of the names is no signal's. `field` is the setting that they
    come from."""
    for name in names:
        if name not in SIGNALS:
            raise RecipeError(
                f"`{field}` names {name!r}, which is no warning",
                f"{field}: {name}",
                f"Known are: {', '.join(SIGNALS)}.",
            )


class Health:
    """
    Warns if a signal rises, and again only after it has been below its threshold for 20 batches.

    Args:
        thresholds: those that differ from `SIGNALS`, by name.
        stop_on: names of the signals that end the run when they warn.
    """

    def __init__(self, thresholds: Mapping[str, float], stop_on: Sequence[str]):
        self._thresholds = {name: signal.threshold for name, signal in SIGNALS.items()}
        self._thresholds.update(thresholds)
        self._stop_on = set(stop_on)
        # batches in a row above the threshold, or negative, below it
        self._streak = dict.fromkeys(SIGNALS, 0)
        self._warned: set[str] = set()

    def check(self, measures: Mapping[str, float]) -> None:
        """Looks at the measures of one generation batch. A signal that is not measured in it stays
        as it was. Raises `AtroposTrainingError` if one of `stop_on` warns."""
        error = None
        for name, value in measures.items():
            if not self._is_to_warn(name, value):
                continue
            signal = SIGNALS[name]
            what = signal.what.format(value=value)
            above = f"above {self._thresholds[name]:g}"
            if signal.patience > 1:
                above += f" for {signal.patience} batches in a row"
            logger.warning(
                f"{what}. {signal.fix} (`{name}`: {above}; `warning_thresholds` changes that.)"
            )
            if name in self._stop_on and error is None:
                stops = f"The run stops, because `stop_on_warnings` lists {name!r}."
                error = AtroposTrainingError(what, f"`{name}` {above}", f"{signal.fix} {stops}")
        if error is not None:
            raise error

    def _is_to_warn(self, name: str, value: float) -> bool:
        """Counts a batch for a signal. Returns whether the signal is to warn now."""
        if value > self._thresholds[name]:
            self._streak[name] = max(self._streak[name], 0) + 1
        else:
            self._streak[name] = min(self._streak[name], 0) - 1
        streak = self._streak[name]
        if streak <= -FINE_AGAIN:
            self._warned.discard(name)
        if streak < SIGNALS[name].patience or name in self._warned:
            return False
        self._warned.add(name)
        return True


# ----------------------------------------------------------------------------- measures of a batch


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


# --------------------------------------------------------------------------- trainer and sampler


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
