"""`AtroposGRPOTrainer`: TRL's `GRPOTrainer` with rollouts from a `RolloutSource` in place of a
prompt dataset.

The seam is one method: `_generate_and_score_completions` is wrapped. TRL's own body still pads,
scores under the reference policy, and logs. It gets the rollouts through its `rollout_func` hook
and their scores through a reward function. Only the advantages are set here, because Atropos groups
have sizes of their own. `tests/trainer/test_trl_seam.py` fails when a private name of TRL or
Transformers that is used here moves.

To correct for the sampler, TRL scores every batch under the policy before training. Here it does so
only where a batch is for several optimizer steps; where the weights stay as they are, the passes
that train find the same.
"""

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from peft import PeftConfig, PeftModel
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer_callback import ExportableState
from trl import GRPOTrainer

from trl_atropos import distributed as ranks
from trl_atropos.batches import inputs as batch_inputs
from trl_atropos.batches import micro_batches, numerics, packing, trial
from trl_atropos.batches.micro_batches import Batch, join, lengths_of, take, trim, without_padding
from trl_atropos.config import AtroposGRPOConfig
from trl_atropos.errors import RecipeError, RolloutError
from trl_atropos.metrics.gradients import SIGNAL, GradientCheck
from trl_atropos.metrics.health import (
    Health,
    History,
    Movement,
    rollout_measures,
    sampling_measures,
    share_dropped,
    trl_metrics,
)
from trl_atropos.metrics.timing import (
    COMPUTE,
    EVALUATE,
    INGEST,
    OPTIMIZER,
    SAVE,
    WAIT,
    StepTimes,
    Stopwatch,
    flops_per_token,
    peak_flops,
    settle,
)
from trl_atropos.protocol import environment_token
from trl_atropos.report.run_log import RunLog
from trl_atropos.report.summary import complete_card, model_only, repository_made, show_lines
from trl_atropos.rollouts.intake import VersionBook
from trl_atropos.rollouts.replay import ReplaySource
from trl_atropos.rollouts.rollout import Rollout
from trl_atropos.rollouts.source import AtroposSource, Environments, RolloutSource, RunInfo
from trl_atropos.rollouts.spool import TrainerLogprobs, source_state
from trl_atropos.services.evaluations import Evaluator, Result
from trl_atropos.services.output_lock import locked
from trl_atropos.weights import adapters, masters
from trl_atropos.weights import checkpoint as checkpoints
from trl_atropos.weights.gather import base_model, local_parts, shape_of, unwrap
from trl_atropos.weights.probe import (
    keep_soft_cap,
    name_backbone,
    num_positions,
    prepare_model,
    restore_what_changes,
)
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

# optimizer steps after which the draw of a run with the next seed would begin
NUM_SEEDS = 1_000_003
EVALUATION_POLL = 0.1  # seconds
# of a rollout, where neither a server nor the model says how long it may be
MOST_TOKENS = 2**31 - 2
# how often the other ranks hear from rank 0, well below any process group's timeout
POLL_SECONDS = 1.0

# What TRL appends for each micro-batch, and averages: here short rollouts share one, and long ones
# another.
TOKEN_MEANS = (
    "kl",
    "entropy",
    "cispo_clip_ratio",
    *(f"clip_ratio/{part}_mean" for part in ("low", "high", "region")),
)
OUT_OF_MEMORY = (  # what a user of the trainer reads below torch's message
    "Give the trainer less to keep at a time (`max_tokens_per_micro_batch: 4096`, "
    "`gradient_checkpointing: true`) or a server on its GPU less memory "
    "(`--gpu-memory-utilization`). `trl-atropos check` says what a run takes."
)
NOT_SUPPORTED = {
    "reward_funcs": "rewards come with the rollouts: score them in the environment",
    "reward_processing_classes": "rewards come with the rollouts: score them in the environment",
    "train_dataset": "prompts come with the rollouts: pass a `rollout_source`, or nothing to use "
    "`args.atropos_url`",
    "eval_dataset": "prompts come with the rollouts: list `evaluations` in the recipe, or pass an "
    "`evaluator`",
    "rollout_func": "pass a `rollout_source` instead",
    "environment_factory": "Atropos environments run in processes of their own",
    "tools": "tools are called by the environment",
}


def atropos_score(prompts, completions, score, log_extra, messages=None, **kwargs) -> list[float]:
    """The reward function that TRL calls. Returns the scores of the environment; the messages go to
    TRL's table."""
    if messages is not None:
        log_extra("messages", messages)
    return score


def source_of(args: AtroposGRPOConfig, environments: Environments | None = None) -> RolloutSource:
    """The rollout source that the configuration names; `environments` are those that the run
    started."""
    if args.replay_paths is not None:
        return ReplaySource(args.replay_paths, single_row_groups=args.single_row_groups)
    return AtroposSource(
        args.atropos_url,
        reset_api=args.reset_atropos,
        single_row_groups=args.single_row_groups,
        versions=VersionBook(
            args.vllm_server_urls, environment_token(), args.publish_timeout, args.temperature
        ),
        environments=environments,
        prefetch_batches=args.prefetch_batches,
        max_staleness=args.max_staleness,
        hold_requests=args.hold_requests,
        max_spool_gb=args.max_spool_gb,
        replace_zero_variance_groups=args.replace_zero_variance_groups,
        enforce_environment_weights=args.enforce_environment_weights,
    )


def _refuse_arguments(
    args: AtroposGRPOConfig, evaluator: Evaluator | None, kwargs: dict[str, Any]
) -> None:
    """Raises `ValueError` for arguments that this trainer does not take, and drops those that are
    `None`."""
    for name, reason in NOT_SUPPORTED.items():
        if kwargs.pop(name, None) is not None:
            raise ValueError(f"`{name}` was given, but {reason}.")
    if not isinstance(args, AtroposGRPOConfig):
        right = "`AtroposGRPOConfig(output_dir=..., max_steps=...)`"
        raise ValueError(f"`args` is a {type(args).__name__}: pass {right}.")
    if args.eval_strategy != "no" and evaluator is None:
        raise ValueError(
            "`eval_strategy` is set: list `evaluations` in the recipe, or pass an `evaluator`."
        )


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
        _refuse_arguments(args, evaluator, kwargs)
        ranks.together(lambda: require_writable(args.output_dir))
        self.evaluator = evaluator
        self.rollout_source = rollout_source if rollout_source is not None else source_of(args)
        self.policy_publisher = (
            policy_publisher if policy_publisher is not None else publisher_of(args)
        )
        self._refuse_adapters(model, args, kwargs.get("peft_config"))
        self.stopwatch = self.policy_publisher.stopwatch = Stopwatch()
        self.environment_commands: dict[str, str] = {}  # by name, for the model card
        self._batch: list[Rollout] = []  # the current generation batch, rank by rank
        self._rollouts: list[Rollout] = []  # this rank's share of it
        self._caught_up = 0.0  # `rollout_source.catching_up()` at the last batch
        # of that batch; None where TRL draws the micro-batches
        self._plan: micro_batches.Plan | None = None
        # Of the micro-batches of this optimizer step: means over tokens or sequences, and over how
        # many.
        self._token_means: dict[str, list[tuple[float, int]]] = defaultdict(list)
        # which of `_rollouts` have the same prompt, where they may share it
        self._alike: np.ndarray | None = None
        # of this rank's share, what the training passes find; None where TRL scores
        self._found: Batch | None = None
        self._packs: packing.How | None = None  # None where rollouts are padded
        self._trained: Batch | None = None  # the micro-batch that is trained on
        # None where the configuration says how large they are
        self._budget: micro_batches.TokenBudget | None = None
        self._source_started = False
        self._said_what_is_lost = False  # by checkpoints in the middle of a batch
        self._shows_messages = False  # whether the completions table has a column of messages
        self._history = History(args.max_completion_length if args.loss_type == "dr_grpo" else None)
        self._movement = Movement()
        self._health = Health(args.warning_thresholds, args.stop_on_warnings)
        self._gradients = GradientCheck(args.warning_thresholds.get(SIGNAL, 0))
        # of this optimizer step, before clipping: a number or a tensor of one
        self._gradient_norm: Any = None
        try:
            super().__init__(
                self.policy_publisher.load(model, args, kwargs.get("peft_config")),
                reward_funcs=[atropos_score],
                args=args,
                train_dataset=Dataset.from_dict({"prompt": [""]}),
                eval_dataset=None if evaluator is None else Dataset.from_dict({"prompt": [""]}),
                **kwargs,
            )
            self._refuse_what_cannot_be_trained()
            self._prepare_models()
            self._regroups = args.group_by_length and not (
                args.loss_depends_on_micro_batches or self.aux_loss_enabled
            )
            if args.max_tokens_per_micro_batch is not None and not self._regroups:
                raise ValueError(
                    "The load-balancing loss of this mixture of experts is a mean over each "
                    "micro-batch: set `router_aux_loss_coef: 0`, or leave "
                    "`max_tokens_per_micro_batch` out."
                )
            has_masters = args.master_weights and not self.is_sharded
            if has_masters and masters.can_round_adapter(self):
                masters.round_adapter(self.model)
            self.policy_publisher.attach(self)
            if has_masters:
                masters.use_masters(self, offload=args.offload_master_weights)
            require_savable(self)
        # also on Ctrl-C: a lease that stayed open would keep others from the server
        except BaseException:
            self.policy_publisher.close()
            raise
        self._logprobs = TrainerLogprobs(Path(args.output_dir, "rollouts"))
        self.rollout_func = self._columns
        # TRL corrects for the sampler only where it believes that vLLM sampled. Its constructor
        # would start a vLLM.
        self.use_vllm = args.vllm_importance_sampling_correction
        self.vllm_generation = None
        self._last_loaded_step = self.state.global_step
        show_lines(self.callback_handler)
        self.run_log = RunLog(args.output_dir)
        self._times = StepTimes(self.stopwatch, self._metrics["train"])
        self._run_path = RunPath()
        for callback in (self.run_log, _rollout_state(self), self._times, self._run_path):
            self.add_callback(callback)

    def _prepare_models(self) -> None:
        """Sets how the policy and the reference model compute."""
        if (
            isinstance(self.model, PeftModel)
            and adapters.REFERENCE in self.model.peft_config
            and self.args.beta
        ):
            adapters.complete_reference(self.model)
        for model in self._models():
            computed = base_model(model)
            name_backbone(computed)
            keep_soft_cap(computed)
            packing.use_packed_attention(computed)
            numerics.use(self.args, model, self.accelerator.device, self.is_sharded)
        self._silenced = prepare_model(self.model, warn=self.accelerator.is_main_process)

    def _refuse_adapters(self, model: Any, args: AtroposGRPOConfig, new: PeftConfig | None) -> None:
        """Raises `RecipeError` for an adapter that cannot be trained, or not be published in this
        mode."""
        adapters.require_trainable(model, args.beta)
        way = self.policy_publisher.adapter_way
        if new is not None:
            adapters.require_supported(new, way)
            adapters.require_reference(new, args.beta)
        elif isinstance(model, PeftModel):
            adapters.require_supported(model.peft_config[adapters.trained_adapter(model)], way)

    def _refuse_what_cannot_be_trained(self) -> None:
        adapters.require_served(self.model, self.policy_publisher.adapter_way)
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            what = (
                f"None of the {self.model.num_parameters():,} parameters of the model is trainable"
            )
            fix = "Call `model.requires_grad_(True)`, or train an adapter (`peft_config`)."
            raise RecipeError(what, "requires_grad: False", fix, "model")
        if self.is_model_parallel:
            raise ValueError(
                "The model is divided among several GPUs, as TRL does it where a process sees more "
                "than one: set `CUDA_VISIBLE_DEVICES` to one GPU, or start the run by `accelerate "
                "launch`."
            )
        if self.aux_loss_enabled and not hasattr(
            self.model.config.get_text_config(), "num_experts"
        ):
            kind = base_model(self.model).config.model_type
            raise ValueError(
                f"TRL has no load-balancing loss for {kind}: set `router_aux_loss_coef: 0`."
            )
        limit = trial.longest_alike(base_model(self.model).config)
        if math.isfinite(limit) and (longest := self._longest_rollout()) > limit:
            what = (
                f"Rollouts may have {longest} tokens, and one of more than {limit} changes how "
                "this model computes the others of its batch (its rotary embedding goes by the "
                "longest), which no server does"
            )
            fix = (
                f"Set `max_sequence_length: {limit}`, and start the server with `--max-model-len "
                f"{limit}`."
            )
            raise RecipeError(what, f"max_sequence_length: {longest}", fix)

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ):
        """As in [`~transformers.Trainer`]. The server samples nothing before it has the weights to
        begin with."""
        with ranks.held_on_main(lambda: locked(self.args.output_dir)):
            try:
                checkpoint = starting_checkpoint(self.args, resume_from_checkpoint)
                self._run_path.path = path_of(checkpoint)
                if checkpoint is None:
                    move_aside(self.args)
                elif self.accelerator.is_main_process:
                    say_which(checkpoint)
                self.policy_publisher.hold()
                return super().train(checkpoint, trial, ignore_keys_for_eval)
            finally:
                self.policy_publisher.close()
                if self.accelerator.is_main_process:
                    self.rollout_source.close()
                self.run_log.close()

    def _begin(self, optimizer: Any) -> None:
        """Called when training begins, after a checkpoint was loaded."""
        # `save_steps` and the like are this run's
        self.state.compute_steps(self.args, self.args.max_steps)
        self._check_computation()
        self._set_up_layers()  # before the probe, which scores as training does
        self.policy_publisher.begin(optimizer, self.state.global_step)
        self._movement = Movement()
        device = self.accelerator.device
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if self.args.chooses_token_budget and self._regroups and device.type == "cuda":
            # with masters, they are float32
            gradients = sum(4 * parameter.numel() for parameter in trained)
            self._budget = micro_batches.TokenBudget(device, gradients)
        if self.args.sync_ref_model and self.state.global_step:
            logger.warning(
                "`sync_ref_model`: checkpoints lack the reference model, which begins as the base "
                "model again."
            )
        peak = peak_flops(self.accelerator.device)
        flops = flops_per_token(self.model)
        if peak is not None and flops is not None:
            self._times.most_tokens_per_second = peak * self.accelerator.num_processes / flops
        source, unfinished_rows = source_state(self.state.stateful_callbacks)
        if unfinished_rows and self.accelerator.is_main_process:
            message = (
                "The checkpoint falls into the middle of a generation batch: %d rollouts of "
                "it are not trained."
            )
            logger.warning(message, unfinished_rows)
        # nothing is resumed, or a checkpoint from before the first step
        if not self.state.global_step:
            source = {} if self.args.resume_from_checkpoint else None
        model = self.accelerator.unwrap_model(self.model)
        run = RunInfo(
            batch_size=self.args.generation_batch_size,
            max_sequence_length=self._longest_rollout(),
            temperature=self.args.temperature,
            starting_step=self.state.global_step,
            max_steps=self.args.max_steps,
            output_dir=self.args.output_dir,
            save_steps=int(self.args.save_steps) if self.args.save_strategy == "steps" else 0,
            run_name=self.args.run_name or "trl_atropos",
            rows_consumed=self._consumed(),
            distils=self.args.distillation_coef > 0,
            vocab_size=shape_of(model.get_input_embeddings().weight)[0],
            policy_version=lambda: self.policy_publisher.trainer_version,
            when_wanted_soon=self._when_wanted_soon,
            state=source,
            unfinished_rows=unfinished_rows,
            explain=lambda reason: f"{self.policy_publisher.why_silent()} {reason}".lstrip(),
        )
        self._source_started = True
        ranks.on_main(lambda: self.rollout_source.start(run))
        if self.evaluator is not None:
            ranks.on_main(lambda: self.evaluator.start(self.state.global_step))
        self.stopwatch.start()

    def _models(self) -> list[torch.nn.Module]:
        """The policy, and the reference model if it is a model of its own."""
        return [model for model in (self.model, self.ref_model) if model is not None]

    def _check_computation(self) -> None:
        """Compares what is trained with what the models compute by themselves, on one short row.
        All ranks do, because the forward pass of a sharded model is one of all ranks."""
        policy = base_model(self.model)
        is_main = self.accelerator.is_main_process
        autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(
            self.accelerator.mixed_precision
        )
        dtype = autocast or next(parameter.dtype for parameter in policy.parameters())
        row = numerics.Row(
            policy.config,
            num_positions(policy.config),
            self.accelerator.device,
            self.accelerator.autocast,
            dtype,
            self.args.temperature,
        )
        restore_what_changes(self._silenced, partial(row.logits, self.model), warn=is_main)
        noise = numerics.noise_left(self.model, row)
        if noise is not None and is_main:
            logger.warning(
                "%s computes log-probabilities that differ by %.2g nats in the mean between "
                "training mode and evaluation mode, which the server samples from. It has noise "
                "that is not called dropout or jitter: turn it off in the model's configuration.",
                *(type(policy).__name__, noise),
            )
        for computed in self._models():
            numerics.check_head(computed, row)

    def _set_up_layers(self) -> None:
        """Finds out whether rollouts are packed, and compiles the layers if that is to be."""
        args = self.args
        policy = base_model(self.model)
        computed = [base_model(model) for model in self._models()]
        if args.padding_free:
            for model in computed:
                packing.use_packed_attention(model)
            self._packs = self._how_packed()
        if self._packs is None:
            for model in computed:
                packing.use_own_attention(model)
        worth = not self.is_sharded and packing.worth_compiling(policy, self.accelerator.device)
        if worth if args.compile_layers is None else args.compile_layers:
            for model in computed:
                packing.compile_layers(model)

    def _how_packed(self) -> packing.How | None:
        """How rollouts are packed; `None` if this model must be padded."""
        args = self.args
        policy = base_model(self.model)
        autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(
            self.accelerator.mixed_precision
        )
        how = packing.How.of(
            policy, self.accelerator.device, autocast, self.pad_to_multiple_of or 1
        )
        why = (
            "it has a load-balancing loss"
            if self.aux_loss_enabled
            else self._first_reason(trial.why_padded, how)
        )
        if why and args.numerics == "bitwise":
            what = (
                "`numerics: bitwise` needs rollouts in one row, and this model has them padded: "
                f"{why}"
            )
            raise RecipeError(what, "numerics: bitwise", "Leave `numerics` out.")
        if why and self.accelerator.is_main_process:
            logger.warning(
                "Rollouts are padded, not packed (`padding_free`), because of this model: %s.", why
            )
        if why:
            return None
        asked = args.share_prompts
        # on GPUs it has not been measured
        if not (how.device.type == "cpu" if asked is None else asked):
            return how
        why = self._first_reason(trial.why_unshared, how)
        if why and asked and self.accelerator.is_main_process:
            logger.warning(
                "Rollouts do not share their prompts (`share_prompts`) because of this model: %s.",
                why,
            )
        return how._replace(shares=why is None)

    def _first_reason(self, why_not: Callable[..., str | None], how: packing.How) -> str | None:
        """What one of `trial.py`'s tests finds against the policy or the reference model, which
        both score rows."""
        with self.accelerator.autocast():
            reasons = [why_not(model, base_model(model), how) for model in self._models()]
        return next(filter(None, reasons), None)

    def _longest_rollout(self) -> int:
        """Most tokens of a rollout. A publisher refuses what its server cannot take."""
        config = base_model(self.model).config
        asked = self.args.max_sequence_length or self.policy_publisher.server_max_length()
        return asked or int(min(num_positions(config), MOST_TOKENS))

    def _when_wanted_soon(self, pull: Callable[[], None]) -> None:
        """A pull lets the environments begin another batch. In the pause of the last publish before
        the next batch is due, they begin it with the new policy, as if it were pulled when due."""

        def paused() -> None:
            if (
                self._step % self._steps_per_batch == 0
                and self.state.global_step + 1 < self.args.max_steps
            ):
                pull()

        self.policy_publisher.on_pause = paused

    @property
    def is_sharded(self) -> bool:
        """Whether DeepSpeed or FSDP trains: both divide among ranks, and have masters of their
        own."""
        return self.is_deepspeed_enabled or self.is_fsdp_enabled

    @property
    def _steps_per_batch(self) -> int:
        """Training steps (micro-batches of TRL) that are taken on one generation batch."""
        return self.args.steps_per_generation * self.args.num_iterations

    @property
    def _scores_first(self) -> bool:
        """Whether the weights change while a generation batch is trained on, so that it is scored
        before."""
        return self.args.gradient_accumulation_steps % self._steps_per_batch != 0

    def _unfinished(self) -> int:
        """Rollouts of the current generation batch that no step has taken. A run that resumes here
        takes new ones."""
        taken = self._step % self._steps_per_batch or self._steps_per_batch
        left = max(0, self.args.steps_per_generation - taken)
        return left * self.args.generation_batch_size // self.args.steps_per_generation

    def _say_what_a_resume_loses(self) -> None:
        """Warns of the run's first checkpoint in the middle of a generation batch, which a resume
        does not finish."""
        taken = self._step % self._steps_per_batch
        if not taken or self._said_what_is_lost or not self.accelerator.is_main_process:
            return
        self._said_what_is_lost = True
        rollouts = self._unfinished()
        size = self.args.generation_batch_size
        lost = [f"{rollouts} of its {size} rollouts"] if rollouts else []
        if self.args.num_iterations > 1:
            passes = (self._steps_per_batch - taken) / self.args.steps_per_generation
            lost.append(
                f"the last {passes:.3g} of its {self.args.num_iterations} passes (`num_iterations`)"
            )
        logger.warning(
            "The checkpoint of step %d falls into the middle of a generation batch: a run that "
            "resumes from it does not train %s. Nothing is lost between two batches: set "
            "`save_steps` to a multiple of %d. Later checkpoints do not say this again.",
            self.state.global_step,
            " and ".join(lost),
            self.args.steps_between_batches,
        )

    def _consumed(self) -> int:
        """Rollouts that the steps so far took. A batch that a checkpoint fell into the middle of
        counts as a whole."""
        steps = self.state.global_step * self.args.gradient_accumulation_steps
        return math.ceil(steps / self._steps_per_batch) * self.args.generation_batch_size

    def training_step(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        ends_step = self.accelerator.sync_gradients
        with self.stopwatch.part(COMPUTE):
            with masters.exact_gradients(self, model):
                try:
                    loss = super().training_step(model, *args, **kwargs)
                except torch.OutOfMemoryError as error:
                    error.add_note(OUT_OF_MEMORY)
                    raise
                if ends_step:
                    self.policy_publisher.before_step()
            # queued now, so that the norm is known as soon as the backward pass is over
            if ends_step:
                clipped = super()._clip_grad_norm(model) if self.args.max_grad_norm > 0 else None
                norm = super()._get_grad_norm(model, clipped)
                self._gradient_norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            # Transformers looks at the loss next, which waits for the device, if it is told to.
            if ends_step or self.args.logging_nan_inf_filter:
                settle(self.accelerator.device)
        if ends_step:
            self._require_finite_gradient()
            self.stopwatch.rest_is(OPTIMIZER)
        return loss

    def _require_finite_gradient(self) -> None:
        """Ends the training before a step on a gradient that is not finite, or leaves the step
        out."""
        norm = self._gradient_norm
        norm = None if norm is None else float(norm)
        if not self._gradients.takes(norm, self.state.global_step + 1, self.accelerator):
            self.optimizer.zero_grad()  # optimizers pass over parameters without a gradient
        if self.accelerator.is_main_process:
            self._log({f"health/{SIGNAL}": float(self._gradients.left_out)})

    def _clip_grad_norm(self, model: torch.nn.Module) -> Any:
        """Returns the norm that `training_step` has found, and clipped by."""
        return self._gradient_norm

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        return self._gradient_norm

    def _maybe_log_save_evaluate(self, tr_loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """As in Transformers, whose reset of the logged loss, by subtraction, would keep what is
        not finite."""
        logs = self.control.should_log
        super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)
        if logs:
            tr_loss.zero_()

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        write = super()._save_checkpoint
        # a run that resumes here cannot make them any more
        self._await_evaluations(before=self.state.global_step)
        self._say_what_a_resume_loses()
        with self.stopwatch.part(SAVE):
            checkpoints.save_whole(self, lambda: write(model, trial))

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        if (
            self.args.save_on_each_node
            and not self.is_sharded
            and isinstance(self.model, PreTrainedModel)
        ):
            # By itself, a model is written by rank 0 only: the other machines could not resume.
            self.model.should_save_on_this_rank = lambda is_main_process: self.args.should_save
        super()._save(output_dir, state_dict)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: torch.nn.Module | None = None
    ) -> None:
        policy = self.accelerator.unwrap_model(self.model)
        if self.is_fsdp_enabled:  # DeepSpeed does not come here
            return super()._load_from_checkpoint(resume_from_checkpoint, model)
        checkpoints.require_whole(resume_from_checkpoint)
        checkpoints.require_same_weights(resume_from_checkpoint, isinstance(policy, PeftModel))
        if isinstance(policy, PreTrainedModel):
            return checkpoints.load_weights(policy, resume_from_checkpoint)
        checkpoints.load_adapters(policy, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        """As a run that resumes loads it: Transformers would pass over what some families save
        under other names, and over one of several adapters."""
        load = partial(self._load_from_checkpoint, self.state.best_model_checkpoint)
        self.policy_publisher.replace(super()._load_best_model if self.is_sharded else load)
        self._require_adapter_loaded(self.state.best_model_checkpoint)

    def _require_adapter_loaded(self, checkpoint: str) -> None:
        if self.is_sharded and isinstance(self.accelerator.unwrap_model(self.model), PeftModel):
            checkpoints.require_adapter_loaded(self.model, self.accelerator, checkpoint)

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        optimizer = super().create_optimizer(model)
        if not masters.steps_in_backward(self):
            adapters.require_all_optimized(optimizer, self.model if model is None else model)
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        # The optimizer is final now, and its state is not loaded yet.
        self._fresh_groups = checkpoints.groups_of(
            self.optimizer if optimizer is None else optimizer
        )
        return scheduler

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        with checkpoints.optimizer_resumed(self, checkpoint, self._fresh_groups):
            super()._load_optimizer_and_scheduler(checkpoint)
        # of DeepSpeed and FSDP, which have loaded it before
        self._require_adapter_loaded(checkpoint)

    def get_train_dataloader(self) -> DataLoader:
        """One empty item per micro-batch: the rollouts come from `rollout_source`. Not prepared by
        accelerate, whose loader reads one batch ahead, which needs the next policy. As long as the
        run: the end of an epoch would end a gradient accumulation in the middle."""
        length = self.args.max_steps * self.args.gradient_accumulation_steps
        return DataLoader(range(length), batch_size=1, collate_fn=lambda items: [{"prompt": ""}])

    # ------------------------------------------------------------------------------------- the seam

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if not self.model.training:
            raise RuntimeError(
                "prompts come with the rollouts: the trainer has none to predict with"
            )
        rollouts = self._next_batch()
        self._plan = alike = None
        if self._regroups:
            seed = self.args.seed * NUM_SEEDS + self.state.global_step
            budget = self.args.max_tokens_per_micro_batch
            if self._budget is not None:
                budget = self._budget.of_next_batch(self.accelerator.gather)
            packed = self._packs is not None
            alike = packing.alike(rollouts) if packed and self._packs.shares else None
            self._plan = micro_batches.plan_rollouts(
                rollouts, self.args, self.accelerator.num_processes, seed, packed, budget, alike
            )
            rollouts = [rollouts[index] for index in self._plan.order]
            alike = None if alike is None else alike[self._plan.order]
        local = len(rollouts) // self.accelerator.num_processes
        here = slice(
            self.accelerator.process_index * local, (self.accelerator.process_index + 1) * local
        )
        self._batch = rollouts
        self._rollouts = rollouts[here]
        self._alike = None if alike is None else alike[here]
        # Once there, the column stays: TRL would show the messages of the batch before in place of
        # none.
        self._shows_messages |= self.log_completions and any(
            rollout.messages is not None for rollout in rollouts
        )
        prompts = self.processing_class.batch_decode(
            [rollout.prompt_ids for rollout in self._rollouts]
        )
        # the publisher has sent the weights: TRL must not
        self._last_loaded_step = self.state.global_step
        # TRL groups by a fixed size. One group of all rollouts keeps its statistics defined for any
        # batch; what it derives from them is replaced below. And it scores wherever it corrects for
        # a vLLM.
        asked = self.num_generations, self.use_vllm
        self.num_generations = len(rollouts)
        self.use_vllm = self.use_vllm and self._scores_first
        try:
            output = super()._generate_and_score_completions(
                [{"prompt": prompt} for prompt in prompts]
            )
        finally:
            self.num_generations, self.use_vllm = asked
        length = output["completion_ids"].size(1)
        advantages = batch_inputs.advantage_tensor(rollouts, here, self.scale_rewards, length)
        output["advantages"] = advantages.to(self.accelerator.device)
        if self.args.distillation_coef:
            output |= batch_inputs.distillation_inputs(rollouts, here, output, self.accelerator)
        self._check_rollouts(rollouts, self._correct_logs(rollouts))
        self._count_tokens(rollouts)
        if "old_per_token_logps" in output:
            self._compare_with_sampler(output)
        elif self.use_vllm:
            kept = {
                name: output[name]
                for name in ("completion_mask", "tool_mask", "sampling_per_token_logps")
            }
            self._found = kept | {
                "old_per_token_logps": torch.zeros_like(kept["sampling_per_token_logps"])
            }
        # TRL shuffles the batch next
        output["row_index"] = torch.arange(local, device=self.accelerator.device)
        return output

    def _prepare_inputs(self, generation_batch: Any) -> Batch:
        """As in TRL, with the planned micro-batches in place of those that it draws, and without
        their padding."""
        before = self._buffered_inputs
        with self.stopwatch.part(INGEST):
            super()._prepare_inputs(generation_batch)
            if self._buffered_inputs is not before:
                self._buffered_inputs = self._planned(self._buffered_inputs)
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def _planned(self, batches: list[Batch]) -> list[Batch]:
        if self._plan is None:
            return [self._trimmed(batch, lengths_of(batch)) for batch in batches]
        batch = join(batches)
        batch = take(batch, batch["row_index"].argsort())
        lengths = lengths_of(batch)
        steps = self._plan.micro_batches()
        divided = [
            [self._trimmed(take(batch, part), lengths[part], part) for part in step]
            for step in steps
        ]
        return [step[0] if len(step) == 1 else {"micro_batches": step} for step in divided]

    def _trimmed(self, micro_batch: Batch, lengths: np.ndarray, part: slice | None = None) -> Batch:
        micro_batch = trim(micro_batch, lengths, self.pad_to_multiple_of or 1)
        if part is not None:
            micro_batch["trained_tokens"] = sum(
                int(rollout.mask.sum()) for rollout in self._rollouts[part]
            )
        if self._packs is not None:
            widths = micro_batch["prompt_ids"].size(1), micro_batch["completion_ids"].size(1)
            alike = None if part is None or self._alike is None else self._alike[part]
            micro_batch["layout"] = packing.Layout.of(*lengths.T, *widths, self._packs, alike)
        return micro_batch

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, **kwargs
    ):
        """As in TRL, in the micro-batches that are trained, and without their padding."""
        forward = partial(super()._get_per_token_logps_and_entropies, **kwargs)
        size = batch_size or len(input_ids)
        trained = self._trained
        packs = self._packs
        parts = [slice(start, start + size) for start in range(0, len(input_ids), size)]
        alike = None
        if batch_size is not None and self._plan is not None:
            parts = [micro_batch for step in self._plan.micro_batches() for micro_batch in step]
            alike = self._alike
        with self.stopwatch.part(COMPUTE):
            if packs is None:
                score = partial(forward, model)
                multiple = self.pad_to_multiple_of or 1
                scored = without_padding(
                    score, input_ids, attention_mask, logits_to_keep, parts, multiple
                )
            elif trained is not None:
                scored = packing.score_packed(
                    forward, model, input_ids, logits_to_keep, trained["layout"]
                )
            else:
                batch = input_ids, attention_mask, logits_to_keep, parts
                scored = packing.score_all(forward, model, *batch, packs, alike)
            if trained is None:  # TRL reads values of the batch next
                settle(self.accelerator.device)
        return self._corrected(scored)

    def _corrected(self, scored: micro_batches.Scores) -> micro_batches.Scores:
        """Keeps what a training pass has found, of which the ratio to the sampler goes into the
        loss."""
        if self._trained is not None:
            self._gradients.note_logprobs(self._trained, scored[0])
        if self._trained is not None and self._found is not None:
            logprobs = scored[0].detach().float()
            rows = self._trained["row_index"]
            self._found["old_per_token_logps"][rows, : logprobs.size(1)] = logprobs
            ratio = batch_inputs.importance_ratio(logprobs, self._trained, self.args)
            self._trained["importance_sampling_ratio"] = ratio
        return scored

    def _columns(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, list]:
        """TRL's `rollout_func` hook. `env_mask` becomes TRL's tool mask; other columns go to the
        reward function."""
        messages = (
            {"messages": [rollout.messages for rollout in self._rollouts]}
            if self._shows_messages
            else {}
        )
        return batch_inputs.columns(self._rollouts) | messages

    def _next_batch(self) -> list[Rollout]:
        """The next generation batch, the same on every rank. Rank 0 pulls it and hands it to the
        others."""
        started = time.monotonic()
        rollouts = None
        while rollouts is None:
            # Rank 0 waits for rollouts in `_poll`, and computes for the rest of the time. The
            # others wait for rank 0.
            with self.stopwatch.part(INGEST if self.accelerator.is_main_process else WAIT):
                rollouts = ranks.on_main(lambda: self._poll(time.monotonic() - started))
        self.policy_publisher.before_backward()  # here too, for the logs of this step
        self.policy_publisher.computing()
        return rollouts

    def _poll(self, waited: float) -> list[Rollout] | None:
        """The next generation batch, or `None` if it is not complete yet."""
        self._poll_evaluations()
        with self.stopwatch.part(WAIT):
            rollouts = self.rollout_source.poll(self.args.generation_batch_size, POLL_SECONDS)
        if rollouts is not None:
            self.run_log.batch(
                rollouts, self.policy_publisher.trainer_version, self.rollout_source.state()
            )
            self._caught_up = self.rollout_source.catching_up()
            return rollouts
        waited -= self.rollout_source.catching_up() - self._caught_up
        if waited > self.args.rollout_timeout:
            what = (
                f"No batch of {self.args.generation_batch_size} rollouts for {waited:.0f} s "
                "(`rollout_timeout`)."
            )
            raise RolloutError(what, fix=self.rollout_source.diagnose())
        return rollouts

    def _correct_logs(self, rollouts: list[Rollout]) -> dict[str, float]:
        """Replaces what TRL logged from its one big group by the values of the rollouts' own
        groups. Adds and returns the metrics of the publisher and, on rank 0, of the source."""
        metrics = self._metrics["train"]
        metrics["frac_reward_zero_std"][-1] = batch_inputs.share_zero_variance(rollouts)
        logged = self._logs["advantages"]
        for _ in range(min(len(rollouts), len(logged))):
            logged.pop()
        logged.extend(batch_inputs.logged_advantages(rollouts, self.scale_rewards))
        # the table shows rollouts in the order in which they came, by group
        if self._plan is not None:
            tables = (self._logs["rewards"].values(), self._logs["extra"].values())
            for column in (self._logs["prompt"], self._logs["completion"], logged, *chain(*tables)):
                self._plan.undo(column)
        # These two are not averaged over the logging window: a mean is no version, and would hide
        # the worst probe.
        metrics["policy/version"] = [float(self.policy_publisher.policy_version)]
        own = self.policy_publisher.pop_metrics()
        worst = own.pop("policy/probe_max_abs_diff", None)
        if worst is not None:
            metrics["policy/probe_max_abs_diff"] = [
                max([worst, *metrics["policy/probe_max_abs_diff"]])
            ]
        if self.accelerator.is_main_process:
            own |= self.rollout_source.metrics()
        self._log(own)
        return own

    def _log(self, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._metrics["train"][name].append(value)

    def _count_tokens(self, rollouts: list[Rollout]) -> None:
        """What an optimizer step takes of this batch."""
        # the rest is of tools, or of a user
        sampled = sum(int(rollout.mask.sum()) for rollout in rollouts)
        trained = sum(len(rollout.prompt_ids) + len(rollout.completion_ids) for rollout in rollouts)
        accumulated = self.args.gradient_accumulation_steps
        self._times.tokens = {
            "sampled": sampled * accumulated / self._steps_per_batch,
            "trained": trained * accumulated / self.args.steps_per_generation,
        }

    def _check_rollouts(self, rollouts: list[Rollout], own: dict[str, float]) -> None:
        measures = self._weight_measures(rollouts)
        if self.accelerator.is_main_process:
            measures |= rollout_measures(
                rollouts, self.scale_rewards, self.args.distillation_coef > 0
            )
            measures |= self._history.add(rollouts)
            measures["truncated"] = self._metrics["train"]["completions/clipped_ratio"][-1]
            measures["dropped"] = share_dropped(own, len(rollouts))
            if "rollouts/staleness_mean" in own:
                optimizer_steps = self._steps_per_batch / self.args.gradient_accumulation_steps
                measures["stale"] = own["rollouts/staleness_mean"] / optimizer_steps
        self._check_health(measures)

    def _weight_measures(self, rollouts: list[Rollout]) -> dict[str, float]:
        """Whether the weights move. Every rank looks at its own part; the health is that of rank
        0."""
        policy = unwrap(self.model)  # sharded again, where FSDP2 left layers whole
        trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        parts = [values for one in trained for values, _ in local_parts(one, self.accelerator)]
        rate = max(float(group["lr"]) for group in self.optimizer.param_groups)
        teaches = not all(
            rollout.teaches_nothing(self.args.distillation_coef > 0) for rollout in rollouts
        )
        steps = self.policy_publisher.trainer_version
        return self._movement.measure(parts, steps, teaches and rate > 0) if parts else {}

    def _compare_with_sampler(self, batch: Batch) -> None:
        """Measures and keeps how likely this rank's rollouts are under the policy; `batch` has that
        by TRL's names."""
        sequence_level = self.vllm_importance_sampling_mode.startswith("sequence")
        if not self._scores_first:  # else TRL has done this
            ratio = batch_inputs.importance_ratio(batch["old_per_token_logps"], batch, self.args)
            batch = batch | {"importance_sampling_ratio": ratio}
            self._log(trl_metrics(batch, sequence_level, self.accelerator))
        if self.use_vllm:
            measures, further = sampling_measures(
                batch, self._rollouts, sequence_level, self.accelerator
            )
            self._log(further)
            self._check_health(measures)
        self._logprobs.keep(self._batch, batch, self.accelerator)

    def _check_health(self, measures: dict[str, float]) -> None:
        """Logs the health of the batch. Warns where it does not look right, or stops all ranks
        together."""
        if self.accelerator.is_main_process:
            self._log({f"health/{name}": value for name, value in measures.items()})
        if self.args.stop_on_warnings:  # only then can it raise: else no rank waits for rank 0
            ranks.on_main(lambda: self._health.check(measures))
        elif self.accelerator.is_main_process:
            self._health.check(measures)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The loss of a training step. Backward is done here for all its micro-batches but the
        last."""
        if return_outputs:
            raise ValueError("GRPO's loss has no outputs to return")
        self.policy_publisher.before_backward()
        *others, last = inputs.get("micro_batches", [inputs])
        losses = []
        divergences = []

        def train_on(micro_batch: Batch) -> None:
            with masters.accumulate_gradients(self.accelerator, model) as backward:
                loss, divergence = self._micro_batch_loss(model, micro_batch)
                backward(loss)
            losses.append(loss.detach())
            divergences.append(divergence)

        for micro_batch in others:
            if losses and self._budget is not None and self._budget.measures:
                size = micro_batch["prompt_ids"].numel() + micro_batch["completion_ids"].numel()
                size = size if self._packs is None else micro_batch["layout"].tokens.numel()
                with self._budget.measured(size):
                    train_on(micro_batch)
            else:
                train_on(micro_batch)
        loss, divergence = self._micro_batch_loss(model, last)
        if self._found is not None and (self._step + 1) % self._steps_per_batch == 0:
            # TRL has just read values from the device, and the weights change after, or with
            # DeepSpeed in, backward.
            with self.stopwatch.part(INGEST):
                self._compare_with_sampler(self._found)
        if divergence is not None:
            self._metrics["train"]["distillation/kl"].append(divergence + sum(divergences))
        if self.accelerator.sync_gradients:
            for name, means in self._token_means.items():
                values, weights = zip(*means)
                self._log({name: float(np.average(values, weights=weights))})
            self._token_means.clear()
        total = loss + sum(losses)
        self._gradients.note_loss(total)
        return total

    def _micro_batch_loss(
        self, model: torch.nn.Module, inputs: Batch
    ) -> tuple[torch.Tensor, float | None]:
        """The loss, and the divergence from the teacher if there is one."""
        self._trained = inputs
        try:
            loss = super().compute_loss(model, inputs)
        finally:
            self._trained = None
        for name in TOKEN_MEANS if "trained_tokens" in inputs else ():
            if means := self._metrics["train"].pop(name, []):
                of_sequences = self.importance_sampling_level == "sequence" and "clip" in name
                weight = len(inputs["completion_ids"]) if of_sequences else inputs["trained_tokens"]
                self._token_means[name].append((means.pop(), weight))
            if means:
                self._metrics["train"][name] = means
        loss = loss * micro_batches.loss_share(self.args, len(inputs["completion_ids"]))
        if "distill_ids" not in inputs:
            return loss, None
        layout = inputs.get("layout")
        if layout is None:
            masks = inputs["prompt_mask"], inputs["completion_mask"]
            layout = packing.Layout.padded(*masks, self.pad_to_multiple_of or 1)
        term, divergence = batch_inputs.distillation_loss(
            model,
            inputs,
            layout,
            self.accelerator,
            self.args.steps_per_generation,
            self.current_gradient_accumulation_steps,
        )
        return loss + self.args.distillation_coef * term, divergence

    # ----------------------------------------------------------------------------------- evaluation

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Begins the evaluations that are due. Returns the metrics that are known of this step: all
        of them if
        training waits for them (`eval_hold`, before the first step and after the last); the others
        are logged when they come."""
        if not self._source_started:
            raise RuntimeError(
                "the servers have the policy only within `train`: use `trl-atropos eval` elsewhere"
            )
        step = self.state.global_step
        first = step == 0
        last = step >= self.state.max_steps or self.control.should_training_stop
        self._await_evaluations()
        with self.stopwatch.part(EVALUATE):
            while not ranks.on_main(lambda: self.evaluator.ready(step, first, last, POLL_SECONDS)):
                pass  # so that the other ranks hear from rank 0
            results = ranks.on_main(lambda: self.evaluator.begin(step, first, last))
        if first or last or self.args.eval_hold:
            results += self._await_evaluations()
        metrics = {name: value for result in results for name, value in result.logs().items()}
        if self.accelerator.is_main_process:
            logged = {
                name for entry in self.state.log_history if entry["step"] == step for name in entry
            }
            for result in results:  # of a run that was resumed
                if logged.isdisjoint(result.logs()):
                    self._log_evaluation(result)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    @property
    def evaluations(self) -> list[Result]:
        """What the evaluations of the run have found so far, on rank 0."""
        return [] if self.evaluator is None else self.evaluator.results

    def _await_evaluations(self, before: float = math.inf) -> list[Result]:
        """Waits for the evaluations of steps before `before`, on all ranks. Returns what they
        found."""
        ended: list[Result] = []
        with self.stopwatch.part(EVALUATE):
            busy = self.evaluator is not None
            while busy:
                found, busy = ranks.on_main(lambda: self._poll_evaluations(POLL_SECONDS, before))
                ended += found
        return ended

    def _poll_evaluations(
        self, timeout: float = 0.0, before: float = math.inf
    ) -> tuple[list[Result], bool]:
        """On rank 0: the evaluations that have ended, which are logged, and whether one of a step
        before `before` goes on. Waits for it, `timeout` seconds at most."""
        if self.evaluator is None:
            return [], False
        deadline = time.monotonic() + timeout
        ended = self.evaluator.poll()
        while self.evaluator.busy(before) and time.monotonic() < deadline:
            self.evaluator.tell_progress(before)
            time.sleep(EVALUATION_POLL)
            ended += self.evaluator.poll()
        for result in ended:
            self._log_evaluation(result)
        return ended, self.evaluator.busy(before)

    def _log_evaluation(self, result: Result) -> None:
        """Logs what was found at the step of the weights, which may be a while ago."""
        logger.info("Evaluated %s", result.line())
        self.run_log.evaluation(result)
        now = self.state.global_step
        self.state.global_step = result.step
        try:
            # GRPO's own would log the metrics of half a step with it
            super(GRPOTrainer, self).log(result.logs())
        finally:
            self.state.global_step = now

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags=None
    ) -> None:
        """As in TRL, with the reward, environments, settings and versions of the run."""
        model_name = model_name or Path(self.hub_model_id or self.args.output_dir).name
        super().create_model_card(model_name=model_name, dataset_name=dataset_name, tags=tags)
        if not self.is_world_process_zero():
            return
        model = self.accelerator.unwrap_model(self.model)
        adapters = list(model.peft_config.values()) if isinstance(model, PeftModel) else []
        # nobody sees it before the end, and drawing takes as long as a small step
        if self.hub_model_id is None:
            draw = (
                self.state.global_step >= self.state.max_steps or self.control.should_training_stop
            )
        else:  # an upload that is under way would fail if the picture changed
            draw = self.push_in_progress is None or self.push_in_progress.is_done()
        own = self.environment_commands, self.evaluations
        complete_card(self.args, self.state, model.config.name_or_path, adapters, *own, draw)

    def init_hf_repo(self, token: str | None = None) -> None:
        """As in [`~transformers.Trainer`]. Raises `PushError` for errors of the network or the
        Hub."""
        with repository_made(self.args):
            super().init_hf_repo(token)

    def push_to_hub(self, *args: Any, **kwargs: Any):
        """As in [`~transformers.Trainer`], without rollouts, logs and tokens of the run
        (`report/summary.py`)."""
        # no repository yet: the model is saved even if none can be made
        if self.hub_model_id is None:
            self.save_model(_internal_call=True)
        with model_only():
            return super().push_to_hub(*args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        with model_only():
            super()._push_from_checkpoint(checkpoint_folder)


def _rollout_state(trainer: AtroposGRPOTrainer) -> TrainerCallback:
    """The callback that starts the rollouts, and saves their place in every checkpoint."""

    # A class per trainer, named `spool.STATE_NAME`: to restore one, transformers makes it anew
    # without arguments.
    class RolloutState(TrainerCallback, ExportableState):
        def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
            trainer._begin(optimizer)
            # A checkpoint of another source has no such entry, and without one, nothing is saved.
            state.stateful_callbacks.setdefault(type(self).__name__, self.state())

        def on_step_end(self, args, state, control, **kwargs):
            if trainer.evaluator is not None and (
                state.global_step >= args.max_steps or control.should_training_stop
            ):
                control.should_evaluate = True

        def state(self) -> dict[str, Any]:
            """Asked when `trainer_state.json` is written, so that both are of one moment."""
            source = trainer.rollout_source.state() if trainer._source_started else {}
            return {
                "args": {},
                "attributes": {"source": source, "unfinished_rows": trainer._unfinished()},
            }

    return RolloutState()
