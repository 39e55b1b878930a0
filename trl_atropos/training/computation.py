"""Sets up how the policy and the reference model compute, and proves it before the first batch.

`AtroposGRPOTrainer` makes a `Computation` when its models are built. When training begins, it calls
`check` (the models must compute in training what the server samples from) and `set_up_layers`,
which finds out whether rollouts may share a row (`batches/trial.py`) and sets `packs`.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import accelerate.accelerator as accelerate_gathers
import torch
from accelerate import Accelerator
from accelerate.utils import other as accelerate_models
from peft import PeftModel
from torch import Tensor
from torch.nn import Module
from trl.trainer import grpo_trainer

from trl_atropos.batches import (
    attention_kernels,
    compiled_layers,
    model_checks,
    numerics,
    packed_attention,
    trial,
)
from trl_atropos.batches.attention_kernels import AUTO, TORCH, AttentionShape
from trl_atropos.batches.generation_batch import computed_tokens
from trl_atropos.batches.micro_batches import Batch
from trl_atropos.batches.packed_attention import RowFormat
from trl_atropos.batches.sequence_parallel import SequenceGroup
from trl_atropos.errors import RecipeError
from trl_atropos.training.gpu_share import GpuShare
from trl_atropos.weights import adapters
from trl_atropos.weights.gather import base_model, local_parts, unwrap
from trl_atropos.weights.model_setup import (
    OF_TRANSFORMERS,
    checkpoint_layers,
    keep_soft_cap,
    name_backbone,
    num_positions,
    prepare_model,
    restore_what_changes,
)

logger = logging.getLogger(__name__)

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
# `accelerate launch` sets it to "true" if its configuration has a `parallelism_config`.
PARALLELISM_LAUNCHED = "ACCELERATE_USE_PARALLELISM_CONFIG"
OUT_OF_MEMORY = (
    "Give the trainer less to keep at a time (`max_tokens_per_micro_batch: 4096`, "
    "`gradient_checkpointing: true`) or a server on its GPU less memory "
    "(`--gpu-memory-utilization`). `trl-atropos check` says what a run takes."
)


class Computation:
    """
    The policy and the reference model, prepared for training on what a server samples.

    Args:
        trainer: the `AtroposGRPOTrainer`, whose models are built.

    Attributes:
        packs (`RowFormat`, *optional*): Format of the row that rollouts are packed into; `None` if
            they are padded, and before training begins.
        compiles (`bool`): Whether the layers are compiled, in the first step.
        gpu_share (`GpuShare`): What the trainer computes on.
    """

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self.packs: RowFormat | None = None
        self.compiles = False
        self.gpu_share = GpuShare(
            trainer.args.gpu_share,
            trainer.accelerator.device,
            warn=trainer.accelerator.is_local_main_process,  # machines may differ in it
        )
        self._has_saved_memory = False  # in any micro-batch so far
        self._sequence_group: SequenceGroup | None = None
        if trainer.args.sp_size > 1:
            self._sequence_group = SequenceGroup(trainer.args.sp_size, trainer.args.ddp_timeout)
        policy = trainer.model
        accelerator = trainer.accelerator
        has_adapters = isinstance(policy, PeftModel)
        if has_adapters and adapters.REFERENCE in policy.peft_config and trainer.args.beta:
            adapters.complete_reference(policy)
        for model in self._models():
            base = base_model(model)
            name_backbone(base)
            keep_soft_cap(base)
            packed_attention.use_packed_attention(base)
            numerics.use(trainer.args, model, accelerator.device, trainer.is_sharded)
        self._silenced = prepare_model(policy, warn=accelerator.is_main_process)

    def check(self) -> None:
        """Compares, on one short row, what is trained with what the models compute by themselves.
        Call it on every rank: all ranks take part in a sharded model's forward pass."""
        trainer = self._trainer
        accelerator = trainer.accelerator
        policy = base_model(trainer.model)
        dtype = self._autocast_dtype() or next(policy.parameters()).dtype
        row = model_checks.Row(
            policy.config,
            num_positions(policy.config),
            accelerator.device,
            accelerator.autocast,
            dtype,
            trainer.args.temperature,
        )
        is_main = accelerator.is_main_process
        restore_what_changes(self._silenced, partial(row.logits, trainer.model), warn=is_main)
        noise = model_checks.noise_left(trainer.model, row)
        if noise is not None and is_main:
            logger.warning(
                "%s computes log-probabilities that differ by %.2g nats in the mean between "
                "training mode and evaluation mode, which the server samples from. It has noise "
                "that is not called dropout or jitter: turn it off in the model's configuration.",
                type(policy).__name__,
                noise,
            )
        for model in self._models():
            model_checks.check_head(model, row)
        is_slow = numerics.is_slow(accelerator.device, dtype)
        if is_slow and trainer.args.numerics != "bitwise" and is_main:
            logger.warning("%s. %s", numerics.SLOW_ON_GPUS, numerics.IN_16_BITS)

    def set_up_layers(self) -> None:
        """Finds out whether rollouts are packed, and compiles the layers if that is worth it."""
        trainer = self._trainer
        models = [base_model(model) for model in self._models()]
        if trainer.args.padding_free:
            for model in models:
                packed_attention.use_packed_attention(model)
            self.packs = self.how_packed()
        self._use_attention_kernel()
        if self.packs is None:
            for model in models:
                packed_attention.use_own_attention(model)
        self.compiles = compiled_layers.are_compiled(
            trainer.args.compile_layers,
            base_model(trainer.model),
            trainer.accelerator.device,
            trainer.is_sharded,
        )
        if self.compiles:
            for model in models:
                compiled_layers.compile_layers(model)

    def how_packed(self) -> RowFormat | None:
        """Returns how rollouts are packed; `None` if these models must be padded."""
        trainer = self._trainer
        how = RowFormat.of(
            base_model(trainer.model),
            trainer.accelerator.device,
            self._autocast_dtype(),
            trainer.pad_to_multiple_of or 1,
            self._sequence_group,
        )
        if trainer.aux_loss_enabled:
            why_padded = "it has a load-balancing loss"
        else:
            why_padded = self._first_reason(trial.why_padded, how)
        if why_padded:
            self._pad_or_refuse(why_padded)
            return None
        is_wanted = trainer.args.share_prompts
        if is_wanted is False:
            return how
        why_unshared = self._first_reason(trial.why_unshared, how)
        if why_unshared and is_wanted and trainer.accelerator.is_main_process:
            logger.warning(
                "Rollouts do not share their prompts (`share_prompts`) because of this model: %s.",
                why_unshared,
            )
        return how._replace(shares=why_unshared is None)

    def _use_attention_kernel(self) -> None:
        """Has packed rows attended to by the kernel that `attention_kernel` names."""
        trainer = self._trainer
        wanted = trainer.args.attention_kernel
        if self.packs is None or not self.packs.has_one_kernel:
            if wanted not in (AUTO, TORCH) and trainer.accelerator.is_main_process:
                logger.warning(
                    "`attention_kernel: %s` has no effect: it is for packed rollouts on a GPU in "
                    "16 bits.",
                    wanted,
                )
            return
        longest = max(trainer.args.max_sequence_length or 0, trainer.args.max_completion_length)
        used = attention_kernels.use(
            wanted, self._attention_shapes, self.packs.device, self.packs.dtype, longest
        )
        self.packs = self.packs._replace(long_in_turn=used.long_in_turn)

    def _attention_shapes(self) -> set[AttentionShape]:
        """Returns the shapes of the attention in the layers of all models."""
        shapes: set[AttentionShape] = set()
        with self._trainer.accelerator.autocast():
            for model in self._models():
                shapes |= trial.attention_shapes(model, base_model(model), self.packs)
        return shapes

    @contextmanager
    def saving_memory(self, micro_batch: Batch) -> Iterator[None]:
        """Has layers computed again in the backward pass, in place of keeping what they compute, if
        the micro-batch whose forward pass runs within exceeds its token budget."""
        args = self._trainer.args
        is_wanted = micro_batch.get("exceeds_budget", False) and not args.gradient_checkpointing
        if not is_wanted or args.numerics == "bitwise":
            yield
            return
        policy = base_model(self._trainer.model)
        if not policy.supports_gradient_checkpointing:
            yield
            return
        if not self._has_saved_memory and self._trainer.accelerator.is_main_process:
            self._has_saved_memory = True
            logger.info(
                "An episode takes %d tokens at once, more than a micro-batch may have. Its layers "
                "are computed again in the backward pass, to save memory. This is said once.",
                computed_tokens(micro_batch),
            )
        checkpoint_layers(policy, args.gradient_checkpointing_kwargs)
        try:
            yield
        finally:
            policy.gradient_checkpointing_disable()

    def restore_checkpointing(self) -> None:
        """Checkpoints layers as `gradient_checkpointing_kwargs` says. TRL stops that while it
        scores a batch, and then takes all of these options for torch's."""
        policy = base_model(self._trainer.model)
        options = self._trainer.args.gradient_checkpointing_kwargs or {}
        if policy.is_gradient_checkpointing and OF_TRANSFORMERS & options.keys():
            checkpoint_layers(policy, options)
            policy.disable_input_require_grads()  # TRL has added such a hook, too: one is enough

    def trained_parts(self) -> list[Tensor]:
        """Returns this rank's part of each trained weight."""
        policy = unwrap(self._trainer.model)  # sharded again, if FSDP2 left layers whole
        parts = []
        for parameter in policy.parameters():
            if parameter.requires_grad:
                for values, _ in local_parts(parameter, self._trainer.accelerator):
                    parts.append(values)
        return parts

    def _pad_or_refuse(self, why_padded: str) -> None:
        """Warns that rollouts are padded. Raises `RecipeError` if `numerics` or `sp_size` does not
        allow it."""
        if self._trainer.args.numerics == "bitwise":
            what = (
                "`numerics: bitwise` needs rollouts in one row, and this model has them padded: "
                f"{why_padded}"
            )
            raise RecipeError(what, "numerics: bitwise", "Leave `numerics` out.")
        if self._sequence_group is not None:
            what = (
                "`sp_size` divides packed rows among processes, and this model has its rollouts "
                f"padded: {why_padded}"
            )
            fix = "Launch without `sp_size`, such as with configs/accelerate/ddp.yaml."
            raise RecipeError(what, f"sp_size: {self._sequence_group.size}", fix)
        if self._trainer.accelerator.is_main_process:
            logger.warning(
                "Rollouts are padded, not packed (`padding_free`), because of this model: %s.",
                why_padded,
            )

    def _first_reason(
        self, why_not: Callable[..., str | None], row_format: RowFormat
    ) -> str | None:
        """Returns the first reason that a test of `trial.py` finds against the policy or the
        reference model, which both score rows."""
        with self._trainer.accelerator.autocast():
            reasons = [why_not(model, base_model(model), row_format) for model in self._models()]
        for reason in reasons:
            if reason:
                return reason
        return None

    def _models(self) -> list[Module]:
        """Returns the policy, and the reference model if it is a model of its own."""
        models = [self._trainer.model, self._trainer.ref_model]
        return [model for model in models if model is not None]

    def _autocast_dtype(self) -> torch.dtype | None:
        return AUTOCAST.get(self._trainer.accelerator.mixed_precision)


@contextmanager
def deepspeed_looked_up_once() -> Iterator[None]:
    """
    Answers accelerate's question whether DeepSpeed is installed once for a whole training.

    accelerate asks it whenever it unwraps a model, several times in a step, and parses DeepSpeed's
    metadata each time, 6 ms on a CPU.
    """
    usual = accelerate_models.is_deepspeed_available
    answer = usual()

    def known() -> bool:
        return answer

    accelerate_models.is_deepspeed_available = known
    try:
        yield
    finally:
        accelerate_models.is_deepspeed_available = usual


@contextmanager
def explained_out_of_memory() -> Iterator[None]:
    """Adds to torch's message what a user can do about it."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        error.add_note(OUT_OF_MEMORY)
        raise


@contextmanager
def parallelism_concealed() -> Iterator[None]:
    """Conceals `sp_size` from accelerate, which would have DeepSpeed divide the rows of a data
    loader (`batches/sequence_parallel.py` says why that does not fit)."""
    launched = os.environ.pop(PARALLELISM_LAUNCHED, None)
    try:
        yield
    finally:
        if launched is not None:
            os.environ[PARALLELISM_LAUNCHED] = launched


@contextmanager
def gathered_once(accelerator: Accelerator, sp_size: int) -> Iterator[None]:
    """
    Has accelerate's and TRL's gathers take each rollout once within.

    The `sp_size` ranks that divide rows among them have the same rollouts. So of these ranks, a
    gather takes what the first one has.
    """
    if sp_size == 1:
        yield
        return
    gather_all = accelerate_gathers.gather
    gather_objects = grpo_trainer.gather_object

    def gather(values: Tensor) -> Tensor:
        by_rank = gather_all(values).unflatten(0, (accelerator.num_processes, -1))
        return by_rank[::sp_size].flatten(0, 1)

    def gather_object(values: list[Any]) -> list[Any]:
        is_first = accelerator.process_index % sp_size == 0
        return gather_objects(values if is_first else [])

    with (
        _replaced(accelerate_gathers, "gather", gather),
        _replaced(grpo_trainer, "gather", gather),
        _replaced(grpo_trainer, "gather_object", gather_object),
    ):
        yield


@contextmanager
def _replaced(module: ModuleType, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Has a function stand in the place of a module's within."""
    usual = getattr(module, name)
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, usual)
