"""Loads checkpoints and writes the model card: the trainer's glue to `weights/checkpoint.py` and
`report/summary.py`."""

from typing import Any

from peft import PeftModel
from transformers import PreTrainedModel

from trl_atropos.report.model_card import complete_card, correct_adapter_card
from trl_atropos.weights import checkpoint_adapters
from trl_atropos.weights.checkpoint import load_weights, require_whole


def save_on_each_node(trainer: Any) -> None:
    """Has every machine write the model, if `save_on_each_node` is set. By itself, a model is
    written by rank 0 only, and the other machines could not resume."""
    model = trainer.model
    args = trainer.args

    def should_save(is_main_process: bool) -> bool:
        return args.should_save

    if args.save_on_each_node and not trainer.is_sharded and isinstance(model, PreTrainedModel):
        model.should_save_on_this_rank = should_save


def correct_card(trainer: Any, folder: str | None) -> None:
    """Keeps the folder of the base model out of the card that PEFT has written with an adapter."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if trainer.args.should_save and isinstance(model, PeftModel):
        correct_adapter_card(folder or trainer.args.output_dir, model.config.name_or_path)


def load_policy(trainer: Any, checkpoint: str) -> None:
    """Loads the policy of a checkpoint. Raises `CheckpointError` if it is not whole, or is of
    another kind of model."""
    policy = trainer.accelerator.unwrap_model(trainer.model)
    require_whole(checkpoint)
    checkpoint_adapters.require_same_weights(checkpoint, isinstance(policy, PeftModel))
    if isinstance(policy, PreTrainedModel):
        load_weights(policy, checkpoint)
    else:
        checkpoint_adapters.load_adapters(policy, checkpoint)


def require_adapter_loaded(trainer: Any, checkpoint: str) -> None:
    """Raises `CheckpointError` if DeepSpeed or FSDP did not load the adapter of a checkpoint."""
    policy = trainer.accelerator.unwrap_model(trainer.model)
    if trainer.is_sharded and isinstance(policy, PeftModel):
        checkpoint_adapters.require_adapter_loaded(trainer.model, trainer.accelerator, checkpoint)


def complete_model_card(trainer: Any) -> None:
    """Adds the reward, environments, settings and versions of the run to the card that TRL has
    written."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    adapters = []
    if isinstance(model, PeftModel):
        adapters = list(model.peft_config.values())
    complete_card(
        trainer.args,
        trainer.state,
        model.config.name_or_path,
        adapters,
        trainer.environment_commands,
        trainer.evaluations,
        _draws_curve(trainer),
    )


def _draws_curve(trainer: Any) -> bool:
    """Returns whether the card gets a new picture of the rewards."""
    # Without the Hub, nobody sees it before the end, and drawing takes as long as a small step.
    if trainer.hub_model_id is None:
        is_last_step = trainer.state.global_step >= trainer.state.max_steps
        return is_last_step or trainer.control.should_training_stop
    # An upload that is under way would fail if the picture changed.
    push = trainer.push_in_progress
    return push is None or push.is_done()
