"""`AtroposGRPOTrainer` overrides 23 methods of TRL's `GRPOTrainer` and Transformers' `Trainer`, and
trains on the rollouts of a `RolloutSource` in place of a prompt dataset.

The methods stand below in the order of a run. Each does its own work with a part of the trainer:
`training/supply.py` brings the rollouts, `batches/generation_batch.py` makes tensors and
micro-batches of them, `metrics/monitor.py` measures them, `training/computation.py` sets up how the
models compute, `training/evaluation.py` evaluates, and `weights/publisher.py` publishes.

The seam is `_generate_and_score_completions`. TRL's own body still pads, computes the reference
model's log-probabilities, and logs. It gets the rollouts through its `rollout_func` hook and their
rewards through a reward function. To TRL's tensors, the trainer adds those of a teacher, the places
of the rollouts in the batch, and the advantages, because Atropos groups vary in size.
`tests/trainer/test_trl_seam.py` fails if a private name of TRL or Transformers that is used here
moves.

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

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.utils.data import DataLoader
from trl import GRPOTrainer

from trl_atropos.activity import Activity, activity
from trl_atropos.batches.generation_batch import GenerationBatch, computed_tokens
from trl_atropos.batches.micro_batches import Batch, Scores, TokenBudget, loss_share
from trl_atropos.batches.schedule import BatchSchedule
from trl_atropos.config import AtroposGRPOConfig
from trl_atropos.distributed import held_on_main, together
from trl_atropos.metrics.flops import BatchFlops, peak_flops
from trl_atropos.metrics.gradients import GRADIENT_NOT_FINITE, GradientCheck
from trl_atropos.metrics.monitor import BatchMonitor
from trl_atropos.metrics.timing import (
    COMPUTE,
    INGEST,
    OPTIMIZER,
    SAVE,
    StepTimes,
    Stopwatch,
    settle,
)
from trl_atropos.metrics.token_means import TokenMeans
from trl_atropos.report.hub import model_only, repository_made
from trl_atropos.report.progress import show_lines
from trl_atropos.report.run_log import RunLog
from trl_atropos.rollouts.rollout import Rollout
from trl_atropos.rollouts.source import RolloutSource
from trl_atropos.services.evaluations import Evaluator, Result
from trl_atropos.services.output_lock import locked
from trl_atropos.training import requirements, saving
from trl_atropos.training.computation import (
    Computation,
    deepspeed_looked_up_once,
    explained_out_of_memory,
    gathered_once,
    parallelism_concealed,
)
from trl_atropos.training.evaluation import EvaluationCallback
from trl_atropos.training.supply import BatchSupply, source_of, state_callback
from trl_atropos.weights import adapters, masters
from trl_atropos.weights.checkpoint import save_whole
from trl_atropos.weights.checkpoint_optimizer import groups_of, optimizer_resumed
from trl_atropos.weights.publisher import PolicyPublisher, publisher_of
from trl_atropos.weights.run_path import (
    RunPath,
    move_aside,
    path_of,
    say_which,
    starting_checkpoint,
)
from trl_atropos.weights.savable import require_savable, require_writable

logger = logging.getLogger(__name__)


def atropos_score(prompts, completions, score, log_extra, messages=None, **kwargs) -> list[float]:
    """Returns the scores of the environment: the reward function that TRL calls. The messages go to
    TRL's table."""
    if messages is not None:
        log_extra("messages", messages)
    return score


def _empty_item(items: list[int]) -> list[dict[str, str]]:
    """Stands for an item of a dataset."""
    return [{"prompt": ""}]


class AtroposGRPOTrainer(GRPOTrainer):
    """
    GRPO on rollouts from Atropos environments.

    Args:
        model (`str` or [`~transformers.PreTrainedModel`]):
            As in [`~trl.GRPOTrainer`].
        args ([`AtroposGRPOConfig`]):
            The configuration; `max_steps` is required.
        rollout_source ([`RolloutSource`], *optional*):
            Where rollouts come from. Defaults to the Atropos API at `args.atropos_url`, or to
            `args.replay_paths`.
        policy_publisher ([`PolicyPublisher`], *optional*):
            How new weights reach the sampler. Defaults to what `args.vllm_mode` names.
        evaluator ([`Evaluator`], *optional*):
            What `args.eval_strategy` evaluates with.
        kwargs:
            Anything else that [`~trl.GRPOTrainer`] takes, such as `callbacks`, `optimizers` or
            `peft_config`, but no `train_dataset` and no `reward_funcs`: prompts and rewards come
            with the rollouts.
    """

    _tag_names = ["trl", "grpo", "atropos", "trl_atropos"]
    _name = "GRPO on Atropos rollouts"

    def __init__(
        self,
        model: Any,
        args: AtroposGRPOConfig,
        *,
        rollout_source: RolloutSource | None = None,
        policy_publisher: PolicyPublisher | None = None,
        evaluator: Evaluator | None = None,
        **kwargs: Any,
    ):
        requirements.require_arguments(args, evaluator, kwargs)
        together(lambda: require_writable(args.output_dir))
        if rollout_source is None:
            rollout_source = source_of(args)
        self.rollout_source = rollout_source
        if policy_publisher is None:
            policy_publisher = publisher_of(args)
        self.policy_publisher = policy_publisher
        peft_config = kwargs.get("peft_config")
        requirements.require_adapter(model, args, peft_config, self.policy_publisher.adapter_way)
        self.stopwatch = Stopwatch()
        self.policy_publisher.stopwatch = self.stopwatch
        self.environment_commands: dict[str, str] = {}  # by name, for the model card
        self._schedule = BatchSchedule(args)
        # Made when training begins. None if the configuration says how large micro-batches are.
        self._token_budget: TokenBudget | None = None
        self._gradient_check = GradientCheck(args.warning_thresholds.get(GRADIENT_NOT_FINITE, 0))
        # Norm in this optimizer step, before clipping: a number or a tensor of one.
        self._gradient_norm: Any = None
        # Hyperparameters of the optimizer's groups, as this run's settings have made them.
        self._configured_groups: list[dict[str, Any]] = []
        no_dataset = Dataset.from_dict({"prompt": [""]})
        name = model if isinstance(model, str) else type(model).__name__
        try:
            with activity(f"Loading the model {name}"), parallelism_concealed():
                super().__init__(
                    self.policy_publisher.load(model, args, peft_config),
                    reward_funcs=[atropos_score],
                    args=args,
                    train_dataset=no_dataset,
                    eval_dataset=None if evaluator is None else no_dataset,
                    **kwargs,
                )
            requirements.require_trainable_model(self)
            self.computation = Computation(self)
            # The current batch. It is empty until the first comes, and the probe scores through it.
            self._batch = self._batch_of([])
            has_masters = args.master_weights and not self.is_sharded
            if has_masters and masters.can_round_adapter(self):
                masters.round_adapter(self.model)
            with activity("Connecting the weights to the inference server"):
                self.policy_publisher.attach(self)
            if has_masters:
                with activity("Making float32 masters of the weights"):
                    masters.use_masters(self, offload=args.offload_master_weights)
            require_savable(self)
        except BaseException:
            # Also on Ctrl-C: a lease that stayed open would keep others from the server.
            self.policy_publisher.close()
            raise
        self.rollout_func = self._columns
        # `use_vllm` makes TRL correct for the sampler. It is set here because TRL's constructor
        # would also start a vLLM.
        self.use_vllm = args.vllm_importance_sampling_correction
        self.vllm_generation = None
        metrics = self._metrics["train"]
        self._monitor = BatchMonitor(args, self.accelerator, metrics)
        self._token_means = TokenMeans(metrics, self.importance_sampling_level == "sequence")
        self._supply = BatchSupply(self, self._schedule)
        self.evaluation = EvaluationCallback(self, evaluator)
        self.run_log = RunLog(args.output_dir)
        self._times = StepTimes(self.stopwatch, metrics)
        # from `train` to the first step: sharding, the optimizer, a checkpoint
        self._preparation = Activity("Preparing the training")
        self._run_path = RunPath()
        show_lines(self.callback_handler)
        rollout_state = state_callback(self._supply, self._begin)
        for callback in (self.run_log, rollout_state, self.evaluation, self._times, self._run_path):
            self.add_callback(callback)

    @property
    def is_sharded(self) -> bool:
        """True if DeepSpeed or FSDP trains: both divide the model among ranks, and have masters of
        their own."""
        return self.is_deepspeed_enabled or self.is_fsdp_enabled

    @property
    def evaluations(self) -> list[Result]:
        """Results of the run's evaluations so far, on rank 0."""
        return self.evaluation.results

    @property
    def regroups(self) -> bool:
        """True if rollouts of similar length share a micro-batch."""
        return not (self.args.loss_depends_on_micro_batches or self.aux_loss_enabled)

    @property
    def _scores_first(self) -> bool:
        """True if TRL scores a generation batch before training, because the weights change while
        it is trained on."""
        return self._schedule.changes_weights_within_batch

    # ------------------------------------------------------------------------------ training begins

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ):
        """Trains as [`~transformers.Trainer`] does. The server samples nothing before it has the
        weights to begin with."""
        with held_on_main(lambda: locked(self.args.output_dir)), deepspeed_looked_up_once():
            try:
                checkpoint = starting_checkpoint(self.args, resume_from_checkpoint)
                self._run_path.path = path_of(checkpoint)
                if checkpoint is None:
                    move_aside(self.args)
                elif self.accelerator.is_main_process:
                    say_which(checkpoint)
                self._preparation.begin()
                self.policy_publisher.hold()
                return super().train(checkpoint, trial, ignore_keys_for_eval)
            finally:
                self._preparation.end(failed=True)
                self._times.watch.end(failed=True)
                self.policy_publisher.close()
                if self.accelerator.is_main_process:
                    self.rollout_source.close()
                self.run_log.close()

    def get_train_dataloader(self) -> DataLoader:
        """
        Returns one empty item per training step: the rollouts come from `rollout_source`.

        Accelerate does not prepare it: that would divide the items among ranks. It is as long as
        the run, because the end of an epoch would end a gradient accumulation early.
        """
        length = self.args.max_steps * self.args.gradient_accumulation_steps
        return DataLoader(range(length), batch_size=1, collate_fn=_empty_item)

    def create_optimizer(self, model: Module | None = None) -> torch.optim.Optimizer:
        """Returns TRL's optimizer. Raises `RecipeError` if it leaves out a part of the adapter."""
        optimizer = super().create_optimizer(model)
        if not masters.steps_in_backward(self):
            if model is None:
                model = self.model
            adapters.require_all_optimized(optimizer, model)
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Notes the optimizer's own settings before those of a checkpoint replace them."""
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        # The optimizer is final now, and its state is not loaded yet.
        if optimizer is None:
            optimizer = self.optimizer
        self._configured_groups = groups_of(optimizer)
        return scheduler

    def _begin(self, optimizer: Any) -> None:
        """Called by a callback when training begins. A run that resumes has loaded its checkpoint
        by then."""
        # The checkpoint has brought its own `save_steps` and the like: this run's replace them.
        self.state.compute_steps(self.args, self.args.max_steps)
        self._preparation.end()
        with activity("Testing how the model computes"):
            self.computation.check()
            self.computation.set_up_layers()
        # Now that it is known whether rollouts are packed: the first probe scores as training does.
        self._batch = self._batch_of([])
        self.policy_publisher.begin(optimizer, self.state.global_step)
        self._monitor.begin()
        self._token_budget = self._new_token_budget()
        if self.args.sync_ref_model and self.state.global_step:
            logger.warning(
                "`sync_ref_model`: checkpoints lack the reference model, which begins as the base "
                "model again."
            )
        peak = peak_flops(self.accelerator.device)
        if peak is not None:
            self._times.peak_flops = peak * self.accelerator.num_processes
        self._times.batch_flops = BatchFlops.of(self.model)
        with activity("Opening the source of the rollouts"):
            self._supply.begin()
        self.evaluation.begin(self.state.global_step)
        self._times.watch.compiles = self.computation.compiles
        self.stopwatch.start()

    def _new_token_budget(self) -> TokenBudget | None:
        """Returns a budget that measures the GPU's memory, or `None` if the configuration says how
        large micro-batches are or nothing can be measured."""
        device = self.accelerator.device
        if not (self.args.chooses_token_budget and self.regroups and device.type == "cuda"):
            return None
        sizes = [p.numel() for p in self.model.parameters() if p.requires_grad]
        gradient_bytes = 4 * sum(sizes)  # with masters, gradients are float32
        return TokenBudget(device, gradient_bytes)

    # --------------------------------------------------------------------------- a generation batch

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Takes the next generation batch. TRL's own body pads and scores it."""
        if not self.model.training:
            raise RuntimeError(
                "prompts come with the rollouts: the trainer has none to predict with"
            )
        batch = self._next_batch()
        self._batch = batch
        # TRL sends weights to vLLM itself, unless this is the step of which it sent them last. The
        # publisher has sent them.
        self._last_loaded_step = self.state.global_step
        with self._settings_of_batch(), self._gathered_once():
            prompts = batch.prompts(self.processing_class)
            output = super()._generate_and_score_completions(prompts)
        self.computation.restore_checkpointing()
        output["num_items_in_batch"] *= self.args.sp_size  # TRL's loss divides by all processes
        output |= batch.loss_inputs(output)
        self._measure_batch()
        if "old_per_token_logps" in output:
            # The weights change while this batch is trained on: TRL has just scored it.
            self._compare_with_sampler(output)
        elif self.use_vllm:
            # The weights stay as they are, and the loss corrects: the passes score the batch.
            batch.keep_scores_of_passes(output)
        return output

    def _next_batch(self) -> GenerationBatch:
        """Returns the next generation batch, divided into micro-batches."""
        rollouts = self._supply.next_batch()
        # `compute_loss` judges it too, but only after `_measure_batch` has logged the metrics.
        self.policy_publisher.judge_last_publish()
        self.policy_publisher.let_servers_sleep()
        batch = self._batch_of(rollouts)
        if self.regroups:
            max_tokens = self.args.max_tokens_per_micro_batch
            if self._token_budget is not None:
                max_tokens = self._token_budget.of_next_batch(self.accelerator.gather)
            batch.regroup(self.state.global_step, max_tokens)
        return batch

    def _batch_of(self, rollouts: list[Rollout]) -> GenerationBatch:
        multiple = self.pad_to_multiple_of or 1
        packs = self.computation.packs
        ends = {*self.eos_token_ids, self.processing_class.pad_token_id}
        return GenerationBatch(rollouts, self.args, self.accelerator, packs, multiple, ends)

    @contextmanager
    def _settings_of_batch(self) -> Iterator[None]:
        """
        Sets what TRL's body reads while it prepares the generation batch.

        TRL gathers the rewards of all ranks, and then groups them by a fixed size,
        `num_generations`. Here the rollouts of all ranks are one group. This keeps its statistics
        defined for any batch, and what TRL derives from them is replaced later.

        If `use_vllm` is set, TRL's body scores every batch before training. So it is set here only
        if `_scores_first`. Afterwards it is what it was, because TRL's loss reads it too.

        TRL masks a rollout that was cut off as a whole. If any rollout branches, the batch masks
        what was cut off itself.
        """
        num_generations = self.num_generations
        use_vllm = self.use_vllm
        masks_truncated = self.mask_truncated_completions
        self.num_generations = len(self._batch.rollouts)
        self.use_vllm = use_vllm and self._scores_first
        self.mask_truncated_completions = masks_truncated and not self._batch.branches
        try:
            yield
        finally:
            self.num_generations = num_generations
            self.use_vllm = use_vllm
            self.mask_truncated_completions = masks_truncated

    def _columns(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, list]:
        """Returns the rollouts of the batch. TRL calls it as its `rollout_func` hook."""
        # Once TRL's table has the column, every batch brings it: without it, TRL would show the
        # messages of the last batch.
        has_messages = self._batch.has_messages or "messages" in self._logs["extra"]
        with_messages = self.log_completions and has_messages
        return self._batch.columns(with_messages)

    def _measure_batch(self) -> None:
        """Corrects what TRL has logged of the generation batch, and measures it."""
        batch = self._batch
        decode = partial(self.processing_class.batch_decode, skip_special_tokens=True)
        self._monitor.correct_logs(batch, self._logs, decode)
        metrics = self.policy_publisher.pop_metrics()
        if self.accelerator.is_main_process:
            metrics |= self.rollout_source.metrics()
        self._monitor.log_policy(self.policy_publisher.policy_version, metrics)
        weights = self.computation.trained_parts()
        version = self.policy_publisher.trainer_version
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        moved = self._monitor.weights_moved(batch, weights, version, max(rates))
        steps_per_batch = self._schedule.optimizer_steps_per_batch
        self._monitor.check_rollouts(batch, metrics, moved, steps_per_batch)
        self._times.tokens = self._schedule.tokens_per_step(
            batch.num_sampled_tokens, batch.num_tokens
        )
        flops = self._times.flops_of(batch.rollouts)
        self._times.flops = self._schedule.trained_per_step(flops)

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

    def _prepare_inputs(self, generation_batch: Any) -> Batch:
        """Returns what a training step trains on. For a new generation batch, TRL draws what each
        training step gets. The planned micro-batches, without their padding, take its place."""
        buffered = self._buffered_inputs
        with self.stopwatch.part(INGEST):
            super()._prepare_inputs(generation_batch)
            # TRL makes a new list when it takes a new generation batch, and only then.
            drew_new_batch = self._buffered_inputs is not buffered
            if drew_new_batch:
                self._buffered_inputs = self._batch.micro_batches(self._buffered_inputs)
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    # ------------------------------------------------------------------------------ a training step

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
        with self.stopwatch.part(COMPUTE), self.computation.gpu_share.computing():
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

    # ---------------------------------------------------------------------------- logs, evaluations

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Sets the sum of losses to 0 after a log. Transformers subtracts the sum from itself: this
        leaves NaN if it is not finite."""
        logs = self.control.should_log
        super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)
        if logs:
            tr_loss.zero_()

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Begins the evaluations that are due. Returns those of their metrics that are known now:
        all of them if training waits for evaluations (`eval_hold`, or before the first step and
        after the last). The others are logged when they come."""
        metrics = self.evaluation.evaluate()
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    # ---------------------------------------------------------------------------------- checkpoints

    def _save_checkpoint(self, model: Module, trial: Any) -> None:
        """Saves a whole checkpoint, or none."""
        # A run that resumes here cannot make the earlier evaluations any more.
        self.evaluation.wait(before=self.state.global_step)
        if self.accelerator.is_main_process:
            self._schedule.warn_of_unfinished_batch(self._step, self.state.global_step)
        write = partial(super()._save_checkpoint, model, trial)
        with self.stopwatch.part(SAVE):
            save_whole(self, write)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Saves the model, on every machine if `save_on_each_node` is set."""
        saving.save_on_each_node(self)
        super()._save(output_dir, state_dict)
        saving.correct_card(self, output_dir)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: Module | None = None
    ) -> None:
        """Loads the weights of a checkpoint, once it is known to be whole."""
        with activity(f"Loading the weights of {resume_from_checkpoint}"):
            if self.is_fsdp_enabled:  # DeepSpeed does not come here
                super()._load_from_checkpoint(resume_from_checkpoint, model)
            else:
                saving.load_policy(self, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        """Loads the best checkpoint as a run that resumes does: Transformers would pass over what
        some families save under other names, and over one of several adapters."""
        best = self.state.best_model_checkpoint
        load = super()._load_best_model
        if not self.is_sharded:
            load = partial(self._load_from_checkpoint, best)
        with activity(f"Loading the best checkpoint, {best}"):
            self.policy_publisher.replace(load)
        saving.require_adapter_loaded(self, best)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Loads the optimizer of a checkpoint, with the settings of this run."""
        if checkpoint is None:
            return
        with (
            activity(f"Loading the optimizer's state of {checkpoint}"),
            optimizer_resumed(self, checkpoint, self._configured_groups),
        ):
            super()._load_optimizer_and_scheduler(checkpoint)
        # DeepSpeed and FSDP have loaded the adapter before this method is called.
        saving.require_adapter_loaded(self, checkpoint)

    # --------------------------------------------------------------------------- model card and Hub

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags=None
    ) -> None:
        """Writes TRL's card, with the reward, environments, settings and versions of the run."""
        if not model_name:
            model_name = Path(self.hub_model_id or self.args.output_dir).name
        super().create_model_card(model_name=model_name, dataset_name=dataset_name, tags=tags)
        if self.is_world_process_zero():
            saving.complete_model_card(self)

    def init_hf_repo(self, token: str | None = None) -> None:
        """Makes the repository. Raises `PushError` for errors of the network or the Hub."""
        with repository_made(self.args):
            super().init_hf_repo(token)

    def push_to_hub(self, *args: Any, **kwargs: Any):
        """Pushes the model, without rollouts, logs and tokens of the run (`report/hub.py`)."""
        # no repository yet: the model is saved even if none can be made
        if self.hub_model_id is None:
            self.save_model(_internal_call=True)
        with activity(f"Pushing the model in {self.args.output_dir} to the Hub"), model_only():
            return super().push_to_hub(*args, **kwargs)

    def _finish_current_push(self) -> None:
        """Waits for the push of a checkpoint."""
        with activity("Waiting for the push of a checkpoint to the Hub"):
            super()._finish_current_push()

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Pushes a checkpoint, without rollouts, logs and tokens either."""
        with model_only():
            super()._push_from_checkpoint(checkpoint_folder)
