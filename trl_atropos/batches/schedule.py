"""Computes which training steps belong to which generation batch.

TRL counts in training steps: calls of `training_step`, each on one share of a generation batch. A
generation batch is for `steps_per_generation * num_iterations` training steps, and
`gradient_accumulation_steps` of them make an optimizer step. A checkpoint can therefore fall into
the middle of a generation batch, whose rest a run that resumes does not train.
"""

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trl_atropos.config import AtroposGRPOConfig

logger = logging.getLogger(__name__)


class BatchSchedule:
    """The generation batches of a run, by the number of its training step or optimizer step."""

    def __init__(self, args: "AtroposGRPOConfig"):
        self._args = args
        self._has_warned = False

    @property
    def steps_per_batch(self) -> int:
        """Training steps that are taken on one generation batch."""
        return self._args.steps_per_generation * self._args.num_iterations

    @property
    def optimizer_steps_per_batch(self) -> float:
        """Optimizer steps that are taken on one generation batch; 0.5 if one takes two batches."""
        return self.steps_per_batch / self._args.gradient_accumulation_steps

    @property
    def changes_weights_within_batch(self) -> bool:
        """True if an optimizer step is taken before a generation batch is used up."""
        return self._args.gradient_accumulation_steps % self.steps_per_batch != 0

    def ends_batch(self, steps: int) -> bool:
        """Returns whether a generation batch is used up after so many training steps."""
        return steps % self.steps_per_batch == 0

    def unfinished_rollouts(self, steps: int) -> int:
        """
        Returns how many rollouts of the current generation batch no training step has taken. A run
        that resumes here takes new ones.

        For example, a batch of 8 rollouts is for 4 training steps, twice (`num_iterations`). After
        3 of these 8 steps, 2 rollouts are left; after 4 to 8 of them, none.
        """
        taken = steps % self.steps_per_batch or self.steps_per_batch
        left = max(0, self._args.steps_per_generation - taken)
        return left * self._args.generation_batch_size // self._args.steps_per_generation

    def consumed_rollouts(self, optimizer_steps: int) -> int:
        """Returns how many rollouts the optimizer steps so far took. A batch that a checkpoint fell
        into the middle of counts as a whole."""
        steps = optimizer_steps * self._args.gradient_accumulation_steps
        return math.ceil(steps / self.steps_per_batch) * self._args.generation_batch_size

    def tokens_per_step(self, sampled: int, trained: int) -> dict[str, float]:
        """Returns how many tokens of a generation batch an optimizer step takes: of the `sampled`
        ones, and of the `trained` ones, which every iteration trains on again."""
        accumulated = self._args.gradient_accumulation_steps
        per_step = {"sampled": sampled * accumulated / self.steps_per_batch}
        return per_step | self.trained_per_step({"trained": trained})

    def trained_per_step(self, amounts: Mapping[str, float]) -> dict[str, float]:
        """Returns which part of what a pass over a generation batch takes falls to one optimizer
        step."""
        accumulated = self._args.gradient_accumulation_steps
        share = accumulated / self._args.steps_per_generation
        return {name: amount * share for name, amount in amounts.items()}

    def warn_of_unfinished_batch(self, steps: int, optimizer_steps: int) -> None:
        """Warns of the run's first checkpoint in the middle of a generation batch. `steps` counts
        training steps."""
        taken = steps % self.steps_per_batch
        if not taken or self._has_warned:
            return
        self._has_warned = True
        lost = []
        rollouts = self.unfinished_rollouts(steps)
        if rollouts:
            lost.append(f"{rollouts} of its {self._args.generation_batch_size} rollouts")
        iterations = self._args.num_iterations
        if iterations > 1:
            passes = (self.steps_per_batch - taken) / self._args.steps_per_generation
            lost.append(f"the last {passes:.3g} of its {iterations} passes (`num_iterations`)")
        logger.warning(
            "The checkpoint of step %d falls into the middle of a generation batch: a run that "
            "resumes from it does not train %s. Nothing is lost between two batches: set "
            "`save_steps` to a multiple of %d. Later checkpoints do not say this again.",
            optimizer_steps,
            " and ".join(lost),
            self._args.steps_between_batches,
        )
