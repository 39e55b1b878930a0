"""Refuses what cannot be trained while the trainer is built, before it costs anybody time."""

import math
from typing import Any

from peft import PeftConfig, PeftModel

from trl_atropos.batches import attention_kernels, trial
from trl_atropos.batches.sequence_parallel import require_shared_heads
from trl_atropos.config import AtroposGRPOConfig
from trl_atropos.errors import RecipeError
from trl_atropos.modes import AdapterWay
from trl_atropos.services.evaluations import Evaluator
from trl_atropos.weights import adapters
from trl_atropos.weights.gather import base_model
from trl_atropos.weights.model_setup import num_positions

# Length of a rollout, if neither a server nor the model says how long it may be.
MOST_TOKENS = 2**31 - 2
# Arguments of TRL's trainer, each with the reason why this one does not take it.
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


def require_arguments(
    args: AtroposGRPOConfig, evaluator: Evaluator | None, kwargs: dict[str, Any]
) -> None:
    """Raises `ValueError` for arguments that the trainer does not take, and drops those that are
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


def require_adapter(
    model: Any, args: AtroposGRPOConfig, new: PeftConfig | None, way: AdapterWay
) -> None:
    """Raises `RecipeError` for an adapter that cannot be trained, or not be published this way.
    `new` is the adapter that TRL will make."""
    adapters.require_trainable_adapter(model, args.beta)
    if new is not None:
        adapters.require_supported(new, way)
        adapters.require_reference(new, args.beta)
    elif isinstance(model, PeftModel):
        adapters.require_supported(model.peft_config[adapters.trained_adapter(model)], way)


def require_trainable_model(trainer: Any) -> None:
    """Raises `RecipeError` or `ValueError` for a model that cannot be trained, or not be served."""
    model = trainer.model
    adapters.require_served(model, trainer.policy_publisher.adapter_way)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        what = f"None of the {model.num_parameters():,} parameters of the model is trainable"
        fix = "Call `model.requires_grad_(True)`, or train an adapter (`peft_config`)."
        raise RecipeError(what, "requires_grad: False", fix, "model")
    if trainer.is_model_parallel:
        raise ValueError(
            "The model is divided among several GPUs, as TRL does if a process sees more than one: "
            "set `CUDA_VISIBLE_DEVICES` to one GPU, or start the run by `accelerate launch`."
        )
    on_gpu = trainer.accelerator.device.type == "cuda"
    if on_gpu and trainer.args.attention_kernel in attention_kernels.MODULES:
        attention_kernels.require_installed(trainer.args.attention_kernel)
    checkpointing = trainer.args.gradient_checkpointing_kwargs or {}
    if checkpointing.get("offload") and not on_gpu:
        raise ValueError(
            "`gradient_checkpointing_kwargs` has `offload`, which moves activations from a GPU to "
            "host memory, and the run has no GPU: remove it."
        )
    if checkpointing.get("selective") and checkpointing.get("use_reentrant"):
        raise ValueError(
            "`gradient_checkpointing_kwargs` has `selective`, which needs `use_reentrant: false`, "
            "and `use_reentrant: true`, which TRL also sets for an adapter with ZeRO-3: leave "
            "`selective` out."
        )
    if trainer.aux_loss_enabled and not hasattr(model.config.get_text_config(), "num_experts"):
        kind = base_model(model).config.model_type
        raise ValueError(
            f"TRL has no load-balancing loss for {kind}: set `router_aux_loss_coef: 0`."
        )
    if trainer.args.max_tokens_per_micro_batch is not None and not trainer.regroups:
        raise ValueError(
            "The load-balancing loss of this mixture of experts is a mean over each "
            "micro-batch: set `router_aux_loss_coef: 0`, or leave "
            "`max_tokens_per_micro_batch` out."
        )
    require_shared_heads(base_model(model).config, trainer.args.sp_size)
    _require_short_rollouts(trainer)


def _require_short_rollouts(trainer: Any) -> None:
    """Raises `RecipeError` if a long rollout would change how the model computes the others of its
    batch."""
    limit = trial.longest_alike(base_model(trainer.model).config)
    if not math.isfinite(limit):
        return
    longest = longest_rollout(trainer)
    if longest <= limit:
        return
    what = (
        f"Rollouts may have {longest} tokens, and one of more than {limit} changes how "
        "this model computes the others of its batch (its rotary embedding goes by the "
        "longest), which no server does"
    )
    fix = (
        f"Set `max_sequence_length: {limit}`, and start the server with `--max-model-len {limit}`."
    )
    raise RecipeError(what, f"max_sequence_length: {longest}", fix)


def longest_rollout(trainer: Any) -> int:
    """Returns the most tokens of a rollout. A publisher refuses what its server cannot take."""
    limit = trainer.args.max_sequence_length or trainer.policy_publisher.server_max_length()
    if limit:
        return limit
    return int(min(num_positions(base_model(trainer.model).config), MOST_TOKENS))
