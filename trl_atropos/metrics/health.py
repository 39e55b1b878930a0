"""A run that learns nothing, or learns from the wrong data, must say so.

Every generation batch is measured (`batch_metrics.py`). Each signal below is one of those measures: it is logged as
`health/NAME`, and when it stays above its threshold for some batches in a row, the log says what was seen, what that
means and what to do. `AtroposGRPOTrainer` owns one `Health` and asks it on rank 0.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trl_atropos.errors import AtroposTrainingError, RecipeError

logger = logging.getLogger(__name__)

FINE_AGAIN = 20  # batches in a row below the threshold after which a signal may warn a second time


@dataclass(frozen=True)
class Signal:
    """One thing that goes wrong in runs. `text` is formatted with `value`, the measure of the last batch."""

    threshold: float  # warns above it
    patience: int  # batches in a row above it until it warns: one batch may be bad luck
    text: str


SIGNALS: dict[str, Signal] = {
    "zero_variance": Signal(
        0.9,
        5,
        "{value:.0%} of the rollouts are in groups whose scores are all alike, which teach nothing. The task is "
        "learned, or too hard, or its reward too coarse: change the tasks or the reward, or take only groups with "
        "variance (`replace_zero_variance_groups: true`).",
    ),
    "identical_rows": Signal(
        0.9,
        5,
        "{value:.0%} of the rollouts are in groups whose completions are identical to the last token. The policy has "
        "lost its variety, or the environment samples greedily or from a cache: check the environment's temperature, "
        "lower `learning_rate`, or set `entropy_coef` or `beta`.",
    ),
    "repeated_token": Signal(
        0.5,
        3,
        "{value:.0%} of the rollouts are one and the same token, repeated. Either the policy has collapsed (lower "
        "`learning_rate`, raise `beta`, take an earlier checkpoint), or the tokens are dummies that the environment "
        "sends because its inference server gives it none (`--openai.server_type vllm`).",
    ),
    "placeholder_tokens": Signal(
        0.0,
        1,
        "{value:.0%} of the rollouts have the token ids 0, 1, 2, ...: placeholders that Atropos sends where the "
        "inference server gives no token ids. Sample through a managed server with `--openai.server_type vllm`, and "
        "unset ATROPOS_ALLOW_DUMMY_MANAGED_SERVER.",
    ),
    "constant_rewards": Signal(
        10,
        1,
        "For {value:.0f} batches every rollout has had the same score, so that there is nothing to learn. The task is "
        "learned, or the environment's scoring is broken or never met: look at the completions (`log_completions: "
        "true`) and at the scoring function.",
    ),
    "reward_stalled": Signal(
        200,
        1,
        "The reward has not risen beyond its noise for {value:.0f} batches. If it is where you want it, the run is "
        "done; otherwise look at the completions, change `learning_rate`, or take other tasks.",
    ),
    "advantage_explosion": Signal(
        10.0,
        1,
        "An advantage has reached {value:.3g}, where normalised ones stay below 10 for groups of up to 100. It comes "
        "from the environment's own `advantages`, or from raw scores (`scale_rewards: none`, `single_row_groups: "
        "raw`): bring them to a spread of about 1 in the environment, or set `scale_rewards: group`.",
    ),
    "tiny_group_std": Signal(
        0.1,
        3,
        "{value:.0%} of the rollouts are in groups whose scores differ by less than 0.001 but are not alike: dividing "
        "by that makes full advantages out of noise. Round the scores in the environment, or set `scale_rewards: "
        "batch` or `none`.",
    ),
    "truncated": Signal(
        0.9,
        5,
        "{value:.0%} of the rollouts do not end with an end-of-sequence token: they were cut at the length limit "
        "before they could finish, or the environment cuts that token off. Raise the environment's token limit (and "
        "the server's `--max-model-len`), or keep the last token of a completion.",
    ),
    "loss_divisor": Signal(
        2.0,
        5,
        "`loss_type: dr_grpo` divides by `max_completion_length`, which is {value:.3g} times as long as the longest "
        "completion so far, so that every gradient is smaller by that factor. Set it to the environments' limit of "
        "tokens.",
    ),
    "logprob_gap_fresh": Signal(
        0.1,
        3,
        "For rollouts sampled from the very weights that are trained, server and trainer differ by {value:.3g} nats "
        "per token in the mean, where rounding explains about 0.02. Most often the environment samples at another "
        "temperature, or with top_p or penalties, or the server was not started with `--logprobs-mode "
        "processed_logprobs`: make them agree.",
    ),
    "logprob_gap": Signal(
        0.5,
        3,
        "Sampler and trainer differ by {value:.3g} nats per token in the mean: rollouts are from a policy far from "
        "the one that is trained. They are too old (lower `max_staleness`, or `max_batches_offpolicy` of the "
        "environments), the learning rate is too high, or the server does not sample from this model.",
    ),
    "importance_ratio": Signal(
        2.0,
        3,
        "The mean ratio between the trainer's and the sampler's probabilities is {value:.3g} before it is truncated, "
        "where 1 is expected. A few tokens carry the whole update: use fresher rollouts (`max_staleness`), or a token "
        "level correction (`vllm_importance_sampling_mode: token_truncate`).",
    ),
    "tokens_corrected": Signal(
        0.3,
        3,
        "{value:.0%} of the trained tokens are truncated or masked by the correction for the sampler, so that the "
        "update is no longer that of the rollouts. Use fresher rollouts (`max_staleness`), a token level "
        "`vllm_importance_sampling_mode`, or a wider `vllm_importance_sampling_clip_max`.",
    ),
    "stale": Signal(
        2.0,
        3,
        "Rollouts are {value:.1f} generation batches old when they are trained on. Environments sample up to "
        "`max_batches_offpolicy` batches ahead of the trainer, and Atropos' default is 3: add "
        "`--env.max_batches_offpolicy 1` to their commands, and keep `prefetch_batches` at 0.",
    ),
    "unknown_version": Signal(
        0.5,
        3,
        "For {value:.0%} of the rollouts it is not known which version of the weights sampled them, so that their "
        "staleness is neither seen nor limited. The environment sends no log-probabilities, or they were not sampled "
        "by this run's server: use a managed server (`--openai.server_type vllm`) and send `inference_logprobs`.",
    ),
    "dropped": Signal(
        0.5,
        3,
        "{value:.0%} of the rollouts that arrived were dropped. The metrics `rollouts/dropped_*` count the reasons, "
        "and the warnings in this log explain them.",
    ),
}


def check_names(field: str, names: Sequence[str]) -> None:
    """Raises `RecipeError` for a name that is no signal's; `field` is the setting that it came from."""
    for name in names:
        if name not in SIGNALS:
            what, fix = f"`{field}` names {name!r}, which is no warning", f"Known are: {', '.join(SIGNALS)}."
            raise RecipeError(what, f"{field}: {name}", fix)


class Health:
    """
    Watches the measures of a run and warns: once, and again only after the signal has been fine for 20 batches.

    Args:
        thresholds: signal name -> value above which it warns, for those that differ from `SIGNALS`.
        stop_on: names of signals that end the run when they warn.
    """

    def __init__(self, thresholds: Mapping[str, float], stop_on: Sequence[str]):
        self._thresholds = {name: signal.threshold for name, signal in SIGNALS.items()} | dict(thresholds)
        self._stop_on = set(stop_on)
        self._above = dict.fromkeys(SIGNALS, 0)  # batches in a row above the threshold
        self._fine = dict.fromkeys(SIGNALS, 0)  # batches in a row below it, since it warned
        self._warned: set[str] = set()

    def check(self, measures: Mapping[str, float]) -> None:
        """
        Looks at one generation batch. A signal that is not measured in it stays as it was.

        Raises:
            AtroposTrainingError: a signal warns that the run shall stop on.
        """
        stopping = [self._warning(name, value) for name, value in measures.items() if self._rises(name, value)]
        for name, message in stopping:
            if name in self._stop_on:
                raise AtroposTrainingError(f"{message} The run stops, because `stop_on_warnings` lists {name!r}.")

    def _rises(self, name: str, value: float) -> bool:
        """Whether the signal is to warn now."""
        if value > self._thresholds[name]:
            self._above[name] += 1
            self._fine[name] = 0
        else:
            self._above[name] = 0
            self._fine[name] += 1
            if self._fine[name] >= FINE_AGAIN:
                self._warned.discard(name)
        if self._above[name] < SIGNALS[name].patience or name in self._warned:
            return False
        self._warned.add(name)
        return True

    def _warning(self, name: str, value: float) -> tuple[str, str]:
        signal, threshold = SIGNALS[name], self._thresholds[name]
        batches = f" for {signal.patience} batches in a row" if signal.patience > 1 else ""
        message = (
            f"{signal.text.format(value=value)} (`{name}`: above {threshold:g}{batches}; `warning_thresholds` changes "
            "that.)"
        )
        logger.warning(message)
        return name, message
