"""Warns of a run that learns nothing, or learns from the wrong data.

`monitor.py` measures every generation batch by `measures.py` and gives the results to a `Health` on
rank 0. If a signal stays above its threshold for some batches in a row, the log says what that
means and what to do.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from trl_atropos.errors import AtroposTrainingError, RecipeError

logger = logging.getLogger(__name__)

FINE_AGAIN = 20  # batches in a row below the threshold after which a signal may warn again


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
