"""Saves and loads checkpoints, writes the model card, and pushes to the Hub.

`SavingTrainer` overrides what TRL's trainer does for this, with `weights/checkpoint.py`,
`report/model_card.py` and `report/hub.py`.
"""

from functools import partial
from pathlib import Path
from typing import Any

from peft import PeftModel
from torch.nn import Module
from transformers import PreTrainedModel
from trl import GRPOTrainer

from trl_atropos.activity import activity
from trl_atropos.batches.schedule import BatchSchedule
from trl_atropos.metrics.timing import SAVE, Stopwatch
from trl_atropos.report.hub import model_only, repository_made
from trl_atropos.report.model_card import complete_card, correct_adapter_card
from trl_atropos.training.evaluation import EvaluationCallback
from trl_atropos.weights import checkpoint as checkpoints
from trl_atropos.weights.publisher import PolicyPublisher


class SavingTrainer(GRPOTrainer):
    """Saves whole checkpoints, and goes on from them. `AtroposGRPOTrainer` sets its attributes."""

    stopwatch: Stopwatch
    evaluation: EvaluationCallback
    policy_publisher: PolicyPublisher
    _schedule: BatchSchedule
    # Hyperparameters of the optimizer's groups, as this run's settings have made them.
    _configured_groups: list[dict[str, Any]]

    @property
    def is_sharded(self) -> bool:
        """True if DeepSpeed or FSDP trains: both divide the model among ranks, and have masters of
        their own."""
        return self.is_deepspeed_enabled or self.is_fsdp_enabled

    # ---------------------------------------------------------------------------------- checkpoints

    def _save_checkpoint(self, model: Module, trial: Any) -> None:
        """Saves a whole checkpoint, or none."""
        # A run that resumes here cannot make the earlier evaluations any more.
        self.evaluation.wait(before=self.state.global_step)
        if self.accelerator.is_main_process:
            self._schedule.warn_of_unfinished_batch(self._step, self.state.global_step)
        write = partial(super()._save_checkpoint, model, trial)
        with self.stopwatch.part(SAVE):
            checkpoints.save_whole(self, write)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Saves the model, on every machine if `save_on_each_node` is set."""
        save_on_each_node(self)
        super()._save(output_dir, state_dict)
        correct_card(self, output_dir)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: Module | None = None
    ) -> None:
        """Loads the weights of a checkpoint, once it is known to be whole."""
        with activity(f"Loading the weights of {resume_from_checkpoint}"):
            if self.is_fsdp_enabled:  # DeepSpeed does not come here
                super()._load_from_checkpoint(resume_from_checkpoint, model)
            else:
                load_policy(self, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        """Loads the best checkpoint as a run that resumes does: Transformers would pass over what
        some families save under other names, and over one of several adapters."""
        best = self.state.best_model_checkpoint
        load = super()._load_best_model
        if not self.is_sharded:
            load = partial(self._load_from_checkpoint, best)
        with activity(f"Loading the best checkpoint, {best}"):
            self.policy_publisher.replace(load)
        require_adapter_loaded(self, best)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Loads the optimizer of a checkpoint, with the settings of this run."""
        if checkpoint is None:
            return
        with (
            activity(f"Loading the optimizer's state of {checkpoint}"),
            checkpoints.optimizer_resumed(self, checkpoint, self._configured_groups),
        ):
            super()._load_optimizer_and_scheduler(checkpoint)
        # DeepSpeed and FSDP have loaded the adapter before this method is called.
        require_adapter_loaded(self, checkpoint)

    # --------------------------------------------------------------------------- model card and Hub

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags=None
    ) -> None:
        """Writes TRL's card, with the reward, environments, settings and versions of the run."""
        if not model_name:
            model_name = Path(self.hub_model_id or self.args.output_dir).name
        super().create_model_card(model_name=model_name, dataset_name=dataset_name, tags=tags)
        if self.is_world_process_zero():
            complete_model_card(self)

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
    checkpoints.require_whole(checkpoint)
    checkpoints.require_same_weights(checkpoint, isinstance(policy, PeftModel))
    if isinstance(policy, PreTrainedModel):
        checkpoints.load_weights(policy, checkpoint)
    else:
        checkpoints.load_adapters(policy, checkpoint)


def require_adapter_loaded(trainer: Any, checkpoint: str) -> None:
    """Raises `CheckpointError` if DeepSpeed or FSDP did not load the adapter of a checkpoint."""
    policy = trainer.accelerator.unwrap_model(trainer.model)
    if trainer.is_sharded and isinstance(policy, PeftModel):
        checkpoints.require_adapter_loaded(trainer.model, trainer.accelerator, checkpoint)


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
