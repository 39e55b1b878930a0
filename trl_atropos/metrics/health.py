"""A run that learns nothing, or learns from the wrong data, must say so.

`AtroposGRPOTrainer` measures every generation batch with the functions below and gives the results
to its `Health` on rank 0. When one stays above its threshold for some batches in a row, the log
says what that means and what to do.
"""

import logging
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


class Signal(NamedTuple):
    """One thing that goes wrong in runs. `text` is formatted with `value`, the measure of the last
    batch."""

    threshold: float
    patience: int
    text: str


# a signal warns above a value, after that many batches in a row: one batch may be an accident
THRESHOLDS = {
    "zero_variance": (0.9, 5),
    "identical_rows": (0.9, 5),
    "repeated_token": (0.5, 3),
    "placeholder_tokens": (0.0, 1),
    "constant_rewards": (10, 1),
    "reward_stalled": (200, 1),
    "advantage_explosion": (10.0, 1),
    "tiny_group_std": (0.1, 3),
    "unmoved_weights": (2, 1),
    "truncated": (0.9, 5),
    "loss_divisor": (2.0, 5),
    "logprob_gap_fresh": (0.1, 3),
    "logprob_gap": (0.5, 3),
    "importance_ratio": (2.0, 3),
    "tokens_corrected": (0.3, 3),
    "stale": (2.0, 3),
    "unknown_version": (0.5, 3),
    "dropped": (0.5, 3),
    "gradient_not_finite": (0, 1),  # of steps, and always stops the run (`metrics/gradients.py`)
}
TEXTS = {
    "zero_variance": "{value:.0%} of the rollouts are in groups whose scores are all alike, which "
    "teach nothing. Change the tasks or the reward, or take only groups with "
    "variance (`replace_zero_variance_groups: true`).",
    "identical_rows": "{value:.0%} of the rollouts are in groups whose completions are identical. "
    "Check the environment's temperature and caches; if the policy has lost its "
    "variety, lower `learning_rate`, or set `entropy_coef` or `beta`.",
    "repeated_token": "{value:.0%} of the rollouts are one and the same token, repeated. If the "
    "policy has collapsed, lower `learning_rate`, raise `beta`, or take an "
    "earlier checkpoint; if the environment sends dummies, have its server give "
    "it tokens (`--openai.server_type vllm`).",
    "placeholder_tokens": "{value:.0%} of the rollouts have the token ids 0, 1, 2, ..., which "
    "Atropos sends where the inference server gives none. Sample through a "
    "managed server with `--openai.server_type vllm`, and unset "
    "ATROPOS_ALLOW_DUMMY_MANAGED_SERVER.",
    "constant_rewards": "For {value:.0f} batches every rollout has had the same score, so that "
    "there is nothing to learn. Unless the task is learned, look at the "
    "completions (`log_completions: true`) and the scoring function.",
    "reward_stalled": "The reward has not risen beyond its noise for {value:.0f} batches. If it is "
    "where you want it, the run is done; otherwise look at the completions, "
    "change `learning_rate`, or take other tasks.",
    "advantage_explosion": "An advantage has reached {value:.3g}, where normalised ones stay below "
    "10 for groups of up to 100. Bring the environment's `advantages` or "
    "raw scores to a spread of about 1, or set `scale_rewards: group`.",
    "tiny_group_std": "{value:.0%} of the rollouts are in groups whose scores differ by less than "
    "0.001: noise gets full advantages. Round the scores in the environment, or "
    "set `scale_rewards: batch` or `none`.",
    "unmoved_weights": "For {value:.0f} batches the weights have not moved, though the learning "
    "rate was above 0, and the same policy was published again: up to 1,024 "
    "values of every trained tensor are what they were. If a 16-bit model is "
    "trained, keep `master_weights: true`, or raise `learning_rate`: updates "
    "below the weights' rounding are lost. Else compare `trainer.optimizer` "
    "with the parameters that have a gradient.",
    "truncated": "{value:.0%} of the rollouts do not end with an end-of-sequence token. Raise the "
    "environment's token limit (and the server's `--max-model-len`), or keep the last "
    "token of a completion.",
    "loss_divisor": "`loss_type: dr_grpo` divides by `max_completion_length`, which is {value:.3g} "
    "times as long as the longest completion so far, and gradients are smaller by "
    "as much. Set it to the environments' limit.",
    "logprob_gap_fresh": "For rollouts sampled from the very weights that are trained, server and "
    "trainer differ by {value:.3g} nats per token in the mean, where rounding "
    "explains about 0.02. Have the environment sample at the trainer's "
    "temperature without top_p or penalties, and start the server with "
    "`--logprobs-mode processed_logprobs`.",
    "logprob_gap": "Sampler and trainer differ by {value:.3g} nats per token in the mean. Lower "
    "`max_staleness`, the environments' `max_batches_offpolicy`, or "
    "`learning_rate`, and check that the server samples from this model.",
    "importance_ratio": "The mean ratio between the trainer's and the sampler's probabilities is "
    "{value:.3g}, where 1 is expected: a few tokens carry the whole update. "
    "Use fresher rollouts (`max_staleness`), or a token level correction "
    "(`vllm_importance_sampling_mode: token_truncate`).",
    "tokens_corrected": "{value:.0%} of the trained tokens are truncated or masked by the "
    "correction for the sampler. Use fresher rollouts (`max_staleness`), a "
    "token level `vllm_importance_sampling_mode`, or a wider "
    "`vllm_importance_sampling_clip_max`.",
    "stale": "Rollouts are {value:.1f} generation batches old when they are trained on. If this "
    "run has just resumed from an earlier checkpoint, they are left over from the "
    "abandoned steps. Else lower the environments' `max_batches_offpolicy` to 1, and keep "
    "`prefetch_batches` at 0.",
    "unknown_version": "For {value:.0%} of the rollouts it is not known which version of the "
    "weights sampled them, so that their staleness is not limited. If the "
    "environment has a `collect_trajectory` and leaves the group to Atropos' "
    "own `collect_trajectories`, that drops `inference_logprobs`: name the "
    "script by `path:` in the recipe, which keeps them. Otherwise sample from "
    "this run's server through a managed server (`--openai.server_type vllm`), "
    "and send `inference_logprobs`.",
    "dropped": "{value:.0%} of the rollouts that arrived were dropped. The metrics "
    "`rollouts/dropped_*` count the reasons, and the warnings in this log explain them.",
    "gradient_not_finite": "{value:.0f} optimizer steps had a gradient that is not finite, and "
    "were left out.",
}
SIGNALS = {name: Signal(*numbers, TEXTS[name]) for name, numbers in THRESHOLDS.items()}


def check_names(field: str, names: Sequence[str]) -> None:
    """Raises `RecipeError` for a name that is no signal's; `field` is the setting that it came
    from."""
    for name in names:
        if name not in SIGNALS:
            what = f"`{field}` names {name!r}, which is no warning"
            fix = f"Known are: {', '.join(SIGNALS)}."
            raise RecipeError(what, f"{field}: {name}", fix)


class Health:
    """Warns when a signal rises, and again only after it has been below its threshold for 20
    batches. `thresholds` has those that differ from `SIGNALS`; the signals of `stop_on` end the run
    when they warn."""

    def __init__(self, thresholds: Mapping[str, float], stop_on: Sequence[str]):
        self._thresholds = {name: signal.threshold for name, signal in SIGNALS.items()} | dict(
            thresholds
        )
        self._stop_on = set(stop_on)
        # batches in a row above the threshold, or negative, below it
        self._streak = dict.fromkeys(SIGNALS, 0)
        self._warned: set[str] = set()

    def check(self, measures: Mapping[str, float]) -> None:
        """Looks at what was measured of one generation batch. A signal that is not measured in it
        stays as it was. Raises `AtroposTrainingError` if one of `stop_on` warns."""
        stopping = None
        for name, value in measures.items():
            threshold = self._thresholds[name]
            patience = SIGNALS[name].patience
            before = self._streak[name]
            self._streak[name] = max(before, 0) + 1 if value > threshold else min(before, 0) - 1
            if self._streak[name] <= -FINE_AGAIN:
                self._warned.discard(name)
            if self._streak[name] < patience or name in self._warned:
                continue
            self._warned.add(name)
            batches = f" for {patience} batches in a row" if patience > 1 else ""
            above = f"`{name}`: above {threshold:g}{batches}; `warning_thresholds` changes that."
            message = f"{SIGNALS[name].text.format(value=value)} ({above})"
            logger.warning(message)
            if name in self._stop_on and stopping is None:
                stopping = f"{message} The run stops, because `stop_on_warnings` lists {name!r}."
        if stopping is not None:
            raise AtroposTrainingError(stopping)


def rollout_measures(
    rollouts: Sequence[Rollout], scale_rewards: ScaleRewards, distils: bool
) -> dict[str, float]:
    """Measures of `rollouts`, the generation batch of all ranks, by the name of their signal."""
    tiny = [
        scale_rewards == "group" and ZERO_STD < rollout.group_std < TINY_STD for rollout in rollouts
    ]
    return {
        "zero_variance": fmean(rollout.teaches_nothing(distils) for rollout in rollouts),
        "identical_rows": _share_identical(rollouts),
        "repeated_token": _share_repeated_token(rollouts),
        "placeholder_tokens": fmean(map(_is_placeholder, rollouts)),
        "advantage_explosion": _largest_advantage(rollouts, scale_rewards),
        "tiny_group_std": fmean(tiny),
        "unknown_version": fmean(rollout.policy_version is None for rollout in rollouts),
    }


def _share_identical(rollouts: Sequence[Rollout]) -> float:
    """Share of rollouts in groups of at least two whose completions are all the same."""
    groups: defaultdict[Hashable, list[bytes]] = defaultdict(list)
    for rollout in rollouts:
        # A source that does not number groups still sends the rollouts of one with one prompt and
        # one mean.
        unnumbered = (rollout.prompt_ids.tobytes(), rollout.group_mean, rollout.group_std)
        groups[rollout.group if rollout.group >= 0 else unnumbered].append(
            rollout.completion_ids.tobytes()
        )
    return sum(
        len(said) for said in groups.values() if len(said) > 1 and len(set(said)) == 1
    ) / len(rollouts)


def _share_repeated_token(rollouts: Sequence[Rollout]) -> float:
    """Share of rollouts whose trained tokens, except for the last (maybe the end token), are all
    the same one id."""
    trained = [rollout.completion_ids[rollout.mask][:-1] for rollout in rollouts]
    counts = Counter(
        int(said[0]) for said in trained if len(said) >= SHORTEST and (said == said[0]).all()
    )
    return max(counts.values(), default=0) / len(rollouts)


def _is_placeholder(rollout: Rollout) -> bool:
    tokens = np.concatenate([rollout.prompt_ids, rollout.completion_ids])
    return len(tokens) >= SHORTEST and bool((tokens == np.arange(len(tokens))).all())


def _largest_advantage(rollouts: Sequence[Rollout], scale_rewards: ScaleRewards) -> float:
    scalars = abs(scalar_advantages(rollouts, scale_rewards)).tolist()
    return max(
        float(np.abs(rollout.token_advantages[rollout.mask]).max())
        if rollout.trains_on_token_advantages
        else scalar
        for rollout, scalar in zip(rollouts, scalars, strict=True)
    )


def share_dropped(metrics: Mapping[str, float], trained: int) -> float:
    """The share of rollouts that a source dropped, by its metrics, when it handed out `trained`
    rollouts."""
    dropped = sum(value for name, value in metrics.items() if name.startswith("rollouts/dropped_"))
    # which were not meant to be trained on
    dropped -= metrics.get("rollouts/dropped_evaluation", 0.0)
    return dropped / (dropped + trained)


class History:
    """What only shows over several batches. The loss divides every completion by `divisor` tokens,
    if it is given."""

    def __init__(self, divisor: int | None = None):
        self._divisor = divisor
        self._longest = 1
        self._constant = 0
        self._value: float | None = None
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._best = -float("inf")
        self._since_best = 0

    def add(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """`constant_rewards`: batches in a row in which every score was the same number.
        `reward_stalled`: batches since the mean of the last 20 was above the best one so far by
        more than two standard errors. `loss_divisor`, where there is one: its ratio to the longest
        completion so far."""
        scores = {rollout.score for rollout in rollouts}
        value = scores.pop() if len(scores) == 1 else None
        self._constant = 0 if value is None else self._constant + 1 if value == self._value else 1
        self._value = value
        self._recent.append(fmean(rollout.score for rollout in rollouts))
        if len(self._recent) == WINDOW:
            self._since_best += 1
            mean = fmean(self._recent)
            noise = stdev(self._recent) / WINDOW**0.5
            if mean > self._best + 2 * noise:
                self._best = mean
                self._since_best = 0
        measures = {
            "constant_rewards": float(self._constant),
            "reward_stalled": float(self._since_best),
        }
        if self._divisor is not None:
            self._longest = max(
                self._longest, *(len(rollout.completion_ids) for rollout in rollouts)
            )
            measures["loss_divisor"] = self._divisor / self._longest
        return measures


class Movement:
    """
    Counts the batches in a row whose optimizer steps have left all trained weights as they were.

    Some values of every tensor are compared on its device. The result is read one batch later, when
    TRL has just read values of the next batch, so that nothing waits for it.
    """

    def __init__(self) -> None:
        self._before: torch.Tensor | None = None
        self._steps = 0
        self._should_move = False
        self._moved: torch.Tensor | None = None  # of the last comparison
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
        now = torch.cat([_grid(tensor) for tensor in tensors])
        # a callback may unfreeze more
        is_comparable = self._before is not None and self._before.shape == now.shape
        is_due = is_comparable and steps > self._steps and self._should_move
        self._moved = (now != self._before).any() if is_due else None
        self._before = now
        self._steps = steps
        self._should_move = should_move
        return {"unmoved_weights": float(self._unmoved)}


def _grid(tensor: torch.Tensor) -> torch.Tensor:
    """Returns up to `SAMPLED` values that are spread over a tensor, in float32, which holds every
    trained dtype."""
    side = int(SAMPLED ** (1 / max(1, tensor.dim())))
    places = tuple(slice(None, None, -(-size // side) or 1) for size in tensor.shape)
    return tensor.detach()[places].flatten().float()


def trl_metrics(
    batch: dict[str, torch.Tensor], sequence_level: bool, accelerator: Accelerator
) -> dict[str, float]:
    """What TRL logs of a batch that it scores, from what `sampling_measures` takes. Means are of
    the ranks' means."""
    trained = (batch["completion_mask"] * batch["tool_mask"]).bool()
    gaps = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"]).abs()
    gaps = gaps[trained & ~gaps.isnan()]
    ratios = batch["importance_sampling_ratio"]
    ratios = ratios.flatten() if sequence_level else ratios[trained]
    gaps, ratios = (values if values.numel() else values.new_zeros(1) for values in (gaps, ratios))
    own = torch.stack([gaps.mean(), gaps.max(), ratios.min(), ratios.mean(), ratios.max()])
    of_ranks = accelerator.gather(own[None])  # (ranks, 5)
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
    How far the policy that is trained is from the one that sampled, over the trained tokens of all
    ranks whose log-probability under the sampler is known. Call it on every rank.

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
    log_ratio = gap.where(known, 0.0)
    if sequence_level:
        log_ratio = log_ratio.sum(-1, keepdim=True)
    before = log_ratio.exp()
    after = output["importance_sampling_ratio"]
    changed = (before != after).expand_as(known) & known
    ratios = log_ratio.double().clamp(max=80.0).exp()  # above, the mean would be infinite
    ratios = ratios if sequence_level else ratios[known]
    distance = gap.double().abs().where(known, 0.0)
    staleness = [
        3 if rollout.staleness is None else min(rollout.staleness, 2) for rollout in rollouts
    ]
    classes = torch.nn.functional.one_hot(
        torch.tensor(staleness, device=gap.device), len(STALENESS)
    ).double()
    of_ratios = torch.stack(
        [changed.sum().double(), ratios.sum(), ratios.new_tensor(ratios.numel())]
    )
    sums = torch.cat([distance.sum(-1) @ classes, known.sum(-1).double() @ classes, of_ratios])
    peaks = torch.stack([distance.max(), ratios.max() if ratios.numel() else ratios.new_zeros(())])
    of_ranks = accelerator.gather(torch.cat([sums, peaks])[None])  # (ranks, 13)
    totals = of_ranks[:, : len(sums)].sum(0).tolist()
    worst_gap, worst_ratio = of_ranks[:, len(sums) :].amax(0).tolist()
    gaps, tokens, (num_changed, ratio_sum, num_ratios) = totals[:4], totals[4:8], totals[8:]
    if not sum(tokens):
        return {}, {}
    metrics = {
        f"sampling/logprob_gap/staleness_{name}": gap / n
        for name, gap, n in zip(STALENESS, gaps, tokens)
        if n
    }
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
