"""Puts the settings of a run in force when the optimizer and its schedule are resumed.

`AtroposGRPOTrainer` loads their state within `optimizer_resumed`.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers.trainer import OPTIMIZER_NAME

from trl_atropos.errors import CheckpointError
from trl_atropos.weights.checkpoint import is_sharded
from trl_atropos.weights.masters import MasterOptimizer

logger = logging.getLogger(__name__)

# entries of an optimizer's groups that are set by a run's settings, and the names of those
SETTINGS = {
    "initial_lr": "learning_rate",
    "weight_decay": "weight_decay",
    "betas": "adam_beta1, adam_beta2",
    "eps": "adam_epsilon",
}


def groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Returns the optimizer's groups without their parameters: the learning rate and other
    hyperparameters."""
    groups = []
    for group in optimizer.param_groups:
        group = dict(group)
        del group["params"]
        groups.append(group)
    return groups


@contextmanager
def optimizer_resumed(
    trainer: Any, checkpoint: str | Path, fresh: Sequence[Mapping[str, Any]]
) -> Iterator[None]:
    """Puts the settings of this run in force, after the state of optimizer and schedule was loaded
    within.

    The state brings the settings of the run that saved it. `fresh` are `groups_of` the optimizer
    before. Raises `CheckpointError` if the state is that of another optimizer or model.
    """
    try:
        yield
        has_state = is_sharded(Path(checkpoint)) or Path(checkpoint, OPTIMIZER_NAME).exists()
        if trainer.is_world_process_zero() and not has_state:
            message = (
                "%s holds no state of the optimizer and its schedule (`save_only_model: "
                "true`): both begin anew."
            )
            logger.warning(message, checkpoint)
        optimizer = trainer.optimizer.optimizer  # within accelerate's
        if isinstance(optimizer, MasterOptimizer):
            optimizer = optimizer.inner
        # Torch takes the state of any optimizer for its own. A newer version of one optimizer only
        # adds entries.
        for fresh_group, loaded_group in zip(fresh, groups_of(optimizer), strict=True):
            lacking = sorted(fresh_group.keys() - loaded_group.keys())
            foreign = sorted(loaded_group.keys() - fresh_group.keys())
            if lacking and foreign:
                raise ValueError(f"it has {', '.join(foreign)} in place of {', '.join(lacking)}")
    except (KeyError, ValueError) as error:
        raise CheckpointError(
            f"The optimizer's state in {checkpoint} is not that of `optim: "
            f"{trainer.args.optim.value}` on this model ({error}). Resume with the `optim` and the "
            "trained parameters of the run that saved it, or begin anew with it as "
            "`model_name_or_path`, without `resume_from_checkpoint`."
        ) from error
    _put_in_force(fresh, trainer.optimizer, trainer.lr_scheduler, trainer.args.optim_args or "")


def _put_in_force(
    fresh: Sequence[Mapping[str, Any]],
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler,
    optim_args: str,
) -> None:
    """Replaces the hyperparameters that the state brought by those of this run's settings, and of
    its `optim_args`."""
    stated = {part.split("=")[0].strip() for part in optim_args.split(",")}
    stated |= SETTINGS.keys()
    changed = {}  # setting -> its value in the checkpoint, and now
    for fresh_group, group in zip(fresh, optimizer.param_groups, strict=True):
        for name in stated & fresh_group.keys() & group.keys():
            if fresh_group[name] != group[name]:
                setting = SETTINGS.get(name, name)
                changed.setdefault(setting, (group[name], fresh_group[name]))
                group[name] = fresh_group[name]
    if isinstance(scheduler, LambdaLR):
        scheduler.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
        rates = []
        for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
            rates.append(base * factor(scheduler.last_epoch))
        scheduler._last_lr = rates
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
    elif "learning_rate" in changed:
        saved, value = changed["learning_rate"]
        raise CheckpointError(
            f"`learning_rate: {value}`, but the checkpoint was saved with {saved}, from which a "
            f"{type(scheduler).__name__} goes on. Set `learning_rate: {saved}`, or another "
            "`lr_scheduler_type`."
        )
    for name, (saved, value) in changed.items():
        logger.info("Resuming with %s %s in place of the checkpoint's %s.", name, value, saved)
