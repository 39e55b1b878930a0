"""Measures every generation batch of a run, logs the measures, and corrects what TRL logs of it.

`AtroposGRPOTrainer` has one `BatchMonitor` and calls it on every rank: `correct_logs` and
`check_rollouts` once TRL has scored a batch, `compare_with_sampler` when the policy's
log-probabilities of it are known. `measures.py` has what is measured, and `health.py` what of it is
to be warned of.
"""

import logging
from collections.abc import Callable, MutableSequence, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from accelerate import Accelerator
from torch import Tensor

from trl_atropos.batches.generation_batch import GenerationBatch
from trl_atropos.batches.inputs import importance_ratio, logged_advantages, share_zero_variance
from trl_atropos.batches.micro_batches import Batch
from trl_atropos.distributed import on_main
from trl_atropos.metrics.health import Health
from trl_atropos.metrics.measures import (
    History,
    Movement,
    rollout_measures,
    sampling_measures,
    share_dropped,
    trl_metrics,
)
from trl_atropos.rollouts.reward_parts import Count, part_means
from trl_atropos.rollouts.rollout import Rollout
from trl_atropos.rollouts.trainer_logprobs import TrainerLogprobs

if TYPE_CHECKING:
    from trl_atropos.config import AtroposGRPOConfig

logger = logging.getLogger(__name__)

WORST_PROBE = "policy/probe_max_abs_diff"


class BatchMonitor:
    """
    Args:
        args: the settings of the run.
        accelerator: of this rank.
        metrics: TRL's lists of values that will be logged, by name.
    """

    def __init__(
        self,
        args: "AtroposGRPOConfig",
        accelerator: Accelerator,
        metrics: dict[str, list[float]],
    ):
        self._args = args
        self._accelerator = accelerator
        self._metrics = metrics
        divisor = args.max_completion_length if args.loss_type == "dr_grpo" else None
        self._history = History(divisor)
        self._movement = Movement()
        self._health = Health(args.warning_thresholds, args.stop_on_warnings)
        self._logprobs = TrainerLogprobs(Path(args.output_dir, "rollouts"))
        self._has_seen_branches = False

    def begin(self) -> None:
        """Forgets the weights of an earlier training."""
        self._movement = Movement()

    def log(self, values: dict[str, float]) -> None:
        """Adds values to those that are averaged at the next log."""
        for name, value in values.items():
            self._metrics[name].append(value)

    def correct_logs(
        self,
        batch: GenerationBatch,
        tables: dict[str, Any],
        decode: Callable[[Sequence[np.ndarray]], list[str]],
    ) -> None:
        """Replaces what TRL logged from its one big group by the values of the rollouts' own
        groups. `tables` are TRL's columns of the completions table, which shows rollouts in the
        order in which they came, by group. `decode` makes texts of token ids."""
        rollouts = batch.rollouts
        for name, value in batch.completion_metrics().items():
            self._metrics[name][-1] = value
        _show_branches(rollouts, tables["completion"], decode)
        self._warn_of_branches(batch)
        self._metrics["frac_reward_zero_std"][-1] = share_zero_variance(rollouts)
        advantages = tables["advantages"]
        for _ in range(min(len(rollouts), len(advantages))):
            advantages.pop()
        advantages.extend(logged_advantages(rollouts, self._args.scale_rewards))
        if batch.plan is None:
            return
        columns = [tables["prompt"], tables["completion"], advantages]
        columns += tables["rewards"].values()
        columns += tables["extra"].values()
        for column in columns:
            batch.plan.undo(column)

    def _warn_of_branches(self, batch: GenerationBatch) -> None:
        """Warns once if a ratio of probabilities is over all calls of an episode."""
        if self._has_seen_branches or not batch.branches:
            return
        self._has_seen_branches = True
        settings = []
        if self._args.importance_sampling_level == "sequence":
            settings.append("importance_sampling_level: sequence")
        mode = self._args.vllm_importance_sampling_mode
        if mode.startswith("sequence"):
            settings.append(f"vllm_importance_sampling_mode: {mode}")
        if settings and self._accelerator.is_main_process:
            logger.warning(
                "Episodes branch, and `%s` takes one ratio of probabilities over all calls of an "
                "episode: over ten thousand tokens, tiny differences add up to a ratio that is "
                "clipped or masked. Set it to a mode of tokens (`token`, `token_truncate`). This "
                "is said once.",
                "`, `".join(settings),
            )

    def log_policy(self, version: int, measured: dict[str, float]) -> None:
        """Logs the policy version and what the publisher and the source `measured`. Some of these
        are not averaged over the logging window: a mean is no version, and would hide the worst
        probe. Counts are added up, so that all entries of a log have their total."""
        self._metrics["policy/version"] = [float(version)]
        worst = measured.pop(WORST_PROBE, None)
        if worst is not None:
            self._metrics[WORST_PROBE] = [max([worst, *self._metrics[WORST_PROBE]])]
        averaged = {}
        for name, value in measured.items():
            if isinstance(value, Count):
                self._metrics[name] = [sum(self._metrics[name], start=value)]
            else:
                averaged[name] = value
        self.log(averaged)

    def check_rollouts(
        self,
        batch: GenerationBatch,
        measured: dict[str, float],
        moved: dict[str, float],
        optimizer_steps: float,
    ) -> None:
        """Logs the parts of a batch's rewards, the health of its rollouts, and that of the weights
        as `weights_moved` returns it. `measured` are the metrics of the source, and
        `optimizer_steps` are taken on a batch."""
        measures = dict(moved)
        if self._accelerator.is_main_process:
            rollouts = batch.rollouts
            self.log(part_means(rollouts))
            distils = self._args.distillation_coef > 0
            measures |= rollout_measures(rollouts, self._args.scale_rewards, distils)
            measures |= self._history.add(rollouts)
            measures["truncated"] = self._metrics["completions/clipped_ratio"][-1]
            measures["dropped"] = share_dropped(measured, len(rollouts))
            staleness = measured.get("rollouts/staleness_mean")
            if staleness is not None:
                measures["stale"] = staleness / optimizer_steps
        self._check_health(measures)

    def weights_moved(
        self,
        batch: GenerationBatch,
        weights: Sequence[Tensor],
        optimizer_steps: int,
        learning_rate: float,
    ) -> dict[str, float]:
        """Returns for how many batches the trained weights have stayed as they were. Every rank
        passes its own part of the `weights`; the health is that of rank 0."""
        distils = self._args.distillation_coef > 0
        teaches = not all(rollout.teaches_nothing(distils) for rollout in batch.rollouts)
        if not weights:
            return {}
        return self._movement.measure(weights, optimizer_steps, teaches and learning_rate > 0)

    def compare_with_sampler(
        self, batch: GenerationBatch, scores: Batch, scored_by_trl: bool, corrects: bool
    ) -> None:
        """
        Measures and keeps how likely this rank's rollouts are under the policy.

        Args:
            scores: this rank's tensors by TRL's names, with `old_per_token_logps`.
            scored_by_trl: whether TRL has scored the batch, and so logged its own measures.
            corrects: whether the loss corrects for the sampler.
        """
        sequence_level = self._args.vllm_importance_sampling_mode.startswith("sequence")
        if not scored_by_trl:
            ratio = importance_ratio(scores["old_per_token_logps"], scores, self._args)
            scores = scores | {"importance_sampling_ratio": ratio}
            self.log(trl_metrics(scores, sequence_level, self._accelerator))
        if corrects:
            measures, metrics = sampling_measures(
                scores, batch.own_rollouts, sequence_level, self._accelerator
            )
            self.log(metrics)
            self._check_health(measures)
        self._logprobs.keep(batch.rollouts, scores, self._accelerator)

    def _check_health(self, measures: dict[str, float]) -> None:
        """Logs the health of the batch. Warns if it does not look right, or stops all ranks
        together."""
        is_main = self._accelerator.is_main_process
        if is_main:
            self.log({f"health/{name}": value for name, value in measures.items()})
        if self._args.stop_on_warnings:  # only then can it raise: else no rank waits for rank 0
            on_main(lambda: self._health.check(measures))
        elif is_main:
            self._health.check(measures)


def _show_branches(
    rollouts: Sequence[Rollout],
    texts: MutableSequence[str],
    decode: Callable[[Sequence[np.ndarray]], list[str]],
) -> None:
    """Marks where branches begin in the texts of TRL's table, whose last entries are those of
    `rollouts`: TRL decodes a completion as one text."""
    for number, rollout in enumerate(reversed(rollouts), start=1):
        if rollout.tree is None or number > len(texts):
            continue
        first, *branches = decode(rollout.completion_parts)
        lines = [first]
        for part, text in enumerate(branches, start=1):
            lines.append(f"[{rollout.tree.origin(part)}]")
            lines.append(text)
        texts[-number] = "\n".join(lines)
