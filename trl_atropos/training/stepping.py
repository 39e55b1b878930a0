"""Takes one training step: the passes of its micro-batches, their loss, and the gradient's norm.

`SteppingTrainer` overrides what TRL's trainer does for this. `AtroposGRPOTrainer` gives it a
generation batch first, which is in `_batch`.

TRL's own micro-batch is called a *training step* here: one call of `training_step`. It trains on
one or several *micro-batches*, each of which is one forward and backward pass.

The loss corrects for the sampler by the ratio of the policy's probabilities to the sampler's. For
this, TRL computes the policy's log-probabilities of every batch before training. We do so only if
we must:

- If the weights change while the batch is trained on, TRL computes them before training, as
  `old_per_token_logps` (`_scores_first`).
- Otherwise each training pass finds the same values. The `GenerationBatch` keeps them as
  `scores_of_passes`, and they are compared with the sampler's when the batch is used up.

Without correction (`vllm_importance_sampling_correction: false`), no values of passes are kept.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module

from trl_atropos.batches.generation_batch import GenerationBatch, computed_tokens
from trl_atropos.batches.micro_batches import Batch, Scores, TokenBudget, loss_share
from trl_atropos.metrics.gradients import GRADIENT_NOT_FINITE, GradientCheck
from trl_atropos.metrics.monitor import BatchMonitor
from trl_atropos.metrics.timing import COMPUTE, INGEST, OPTIMIZER, settle
from trl_atropos.metrics.token_means import TokenMeans
from trl_atropos.training.computation import Computation, explained_out_of_memory, gathered_once
from trl_atropos.training.saving import SavingTrainer
from trl_atropos.weights import masters


class SteppingTrainer(SavingTrainer):
    """Trains on the batch in `_batch`. `AtroposGRPOTrainer` sets its attributes."""

    computation: Computation
    _batch: GenerationBatch
    _monitor: BatchMonitor
    _token_means: TokenMeans
    _gradient_check: GradientCheck
    # None if the configuration says how large micro-batches are.
    _token_budget: TokenBudget | None
    # Norm in this optimizer step, before clipping: a number or a tensor of one.
    _gradient_norm: Any

    @property
    def _scores_first(self) -> bool:
        """True if TRL scores a generation batch before training, because the weights change while
        it is trained on."""
        return self._schedule.changes_weights_within_batch

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, **kwargs
    ):
        """Scores as TRL does, in the micro-batches that are trained, and without their padding."""
        forward = partial(super()._get_per_token_logps_and_entropies, **kwargs)
        with self.stopwatch.part(COMPUTE):
            scores = self._batch.score(
                forward, model, input_ids, attention_mask, logits_to_keep, batch_size
            )
            if self._batch.current_micro_batch is None:  # TRL reads values of the batch next
                settle(self.accelerator.device)
        self._note_scores_of_pass(scores)
        return scores

    def _note_scores_of_pass(self, scores: Scores) -> None:
        """Notes the log-probabilities of a training pass, whose ratio to the sampler's goes into
        the loss. Before training, when TRL scores the batch, there is no pass."""
        micro_batch = self._batch.current_micro_batch
        if micro_batch is None:
            return
        logprobs, _, _ = scores
        self._gradient_check.note_logprobs(micro_batch, logprobs)
        self._batch.correct(logprobs)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Returns the loss of a training step. Does the backward pass of all its micro-batches but
        the last, whose backward pass TRL does."""
        if return_outputs:
            raise ValueError("GRPO's loss has no outputs to return")
        self.policy_publisher.judge_last_publish()
        *others, last = inputs.get("micro_batches", [inputs])
        losses = []
        divergences = []
        for index, micro_batch in enumerate(others):
            with self._measuring_memory(micro_batch, index):
                loss, divergence = self._backward_on(model, micro_batch)
            losses.append(loss)
            divergences.append(divergence)
        loss, divergence = self._micro_batch_loss(model, last)
        scores = self._batch.scores_of_passes
        ends_batch = self._schedule.ends_batch(self._step + 1)
        if scores is not None and ends_batch:
            # Here and no later: a warning may stop the run (`stop_on_warnings`), and should before
            # the weights change, which DeepSpeed does within the backward pass that follows. TRL
            # has just waited for the device, so reading the scores does not wait.
            with self.stopwatch.part(INGEST):
                self._compare_with_sampler(scores)
        if divergence is not None:
            self._monitor.log({"distillation/kl": divergence + sum(divergences)})
        if self.accelerator.sync_gradients:
            self._token_means.end_step()
        total = loss + sum(losses)
        self._gradient_check.note_loss(total)
        return total

    def _measuring_memory(self, micro_batch: Batch, index: int) -> AbstractContextManager[None]:
        """Has the token budget measure the memory of a micro-batch whose backward pass is done
        within. Two of a training step are not measured: the first, which also allocates the
        gradients, and the last, whose backward pass TRL does elsewhere."""
        budget = self._token_budget
        if index == 0 or budget is None or not budget.measures:
            return nullcontext()
        if micro_batch.get("exceeds_budget"):  # it takes less memory a token than others
            return nullcontext()
        return budget.measured(computed_tokens(micro_batch))

    def _backward_on(self, model: Module, micro_batch: Batch) -> tuple[Tensor, float | None]:
        """Does the backward pass of a micro-batch, and returns what `_micro_batch_loss` does. The
        loss comes without its graph, which would keep memory."""
        with masters.accumulate_gradients(self.accelerator, model) as backward:
            loss, divergence = self._micro_batch_loss(model, micro_batch)
            backward(loss)
        return loss.detach(), divergence

    def _micro_batch_loss(self, model: Module, micro_batch: Batch) -> tuple[Tensor, float | None]:
        """Returns the loss, and the divergence from the teacher if there is one."""
        with (
            self._batch.computing_loss_of(micro_batch),
            self.computation.saving_memory(micro_batch),
            self._gathered_once(),
        ):
            loss = super().compute_loss(model, micro_batch)
        self._token_means.take(micro_batch)
        loss = loss * loss_share(self.args, len(micro_batch["completion_ids"]))
        if "distill_ids" not in micro_batch:
            return loss, None
        term, divergence = self._batch.distillation_loss(
            model, micro_batch, self.current_gradient_accumulation_steps
        )
        return loss + self.args.distillation_coef * term, divergence

    def training_step(self, model: Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Clips the gradient of an optimizer step and proves that it is finite, before the step."""
        ends_step = self.accelerator.sync_gradients
        with self.stopwatch.part(COMPUTE):
            with masters.exact_gradients(self, model):
                with explained_out_of_memory():
                    loss = super().training_step(model, inputs, num_items_in_batch)
                if ends_step:
                    self.policy_publisher.before_step()
            # Queued before the wait below, so that the norm is known when the backward pass ends.
            if ends_step:
                self._clip_gradients(model)
            # A value is read next: the norm here, or the loss by Transformers. To wait for it is
            # part of computing it.
            if ends_step or self.args.logging_nan_inf_filter:
                settle(self.accelerator.device)
        if ends_step:
            self._require_finite_gradient()
            self.stopwatch.rest_is(OPTIMIZER)
        return loss

    def _clip_gradients(self, model: Module) -> None:
        """Finds the gradient's norm, and clips by it if `max_grad_norm` is set."""
        clipped = None
        if self.args.max_grad_norm > 0:
            clipped = super()._clip_grad_norm(model)
        norm = super()._get_grad_norm(model, clipped)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        self._gradient_norm = norm

    def _require_finite_gradient(self) -> None:
        """If the gradient is not finite, raises `GradientError`, or empties the gradient, so that
        the step does nothing."""
        norm = None
        if self._gradient_norm is not None:
            norm = float(self._gradient_norm)
        if not self._gradient_check.allows_step(norm, self.state.global_step + 1, self.accelerator):
            self.optimizer.zero_grad()  # optimizers skip parameters without a gradient
        if self.accelerator.is_main_process:
            left_out = float(self._gradient_check.left_out)
            self._monitor.log({f"health/{GRADIENT_NOT_FINITE}": left_out})

    def _clip_grad_norm(self, model: Module) -> Any:
        """Returns the norm by which `training_step` has clipped."""
        return self._gradient_norm

    def _get_grad_norm(self, model: Module, grad_norm: Any = None) -> Any:
        """Returns the norm by which `training_step` has clipped, for the log."""
        return self._gradient_norm

    def _compare_with_sampler(self, scores: Batch) -> None:
        """Compares the policy's log-probabilities, `old_per_token_logps` of `scores`, with the
        sampler's."""
        with self._gathered_once():
            self._monitor.compare_with_sampler(
                self._batch, scores, self._scores_first, self.use_vllm
            )

    def _gathered_once(self) -> AbstractContextManager[None]:
        """Has what is gathered within take each rollout once."""
        return gathered_once(self.accelerator, self.args.sp_size)
