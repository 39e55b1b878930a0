"""Runs a recipe inside of a Python program or a notebook.

    import trl_atropos

    trainer = trl_atropos.run("recipe.yaml", max_steps=20)

does what `trl-atropos train recipe.yaml --max_steps 20` does, in this process. `start_services`
starts what the recipe names, for a trainer that the program makes itself. Both stop the services
when they end, also by an error or by Ctrl-C.
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from signal import SIGINT
from typing import TYPE_CHECKING, Any

from trl_atropos import train as main_job
from trl_atropos.activity import activity
from trl_atropos.logging import speak
from trl_atropos.services.signals import Interrupted, handlers

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import BitsAndBytesConfig, TrainerCallback

    from trl_atropos.config import AtroposGRPOConfig
    from trl_atropos.recipe import Recipe
    from trl_atropos.rollouts.source import RolloutSource
    from trl_atropos.services.evaluations import Evaluator
    from trl_atropos.trainer import AtroposGRPOTrainer


@dataclass(frozen=True)
class RunningServices:
    """
    What a trainer of your own needs while the services of a recipe run.

    Attributes:
        model (`str`):
            The recipe's `model_name_or_path`.
        args (`AtroposGRPOConfig`):
            All settings of the recipe, with the URLs of the services.
        rollout_source (`RolloutSource`):
            Where the rollouts come from.
        evaluator (`Evaluator` or `None`):
            Makes the recipe's `evaluations`, if it has any.
        peft_config (`PeftConfig` or `None`):
            The adapter, with `use_peft: true`.
        quantization_config (`BitsAndBytesConfig` or `None`):
            With `load_in_4bit` or `load_in_8bit`.
    """

    model: str
    args: "AtroposGRPOConfig"
    rollout_source: "RolloutSource"
    evaluator: "Evaluator | None"
    peft_config: "PeftConfig | None"
    quantization_config: "BitsAndBytesConfig | None"

    @property
    def trainer_arguments(self) -> dict[str, Any]:
        """All attributes by their names: `AtroposGRPOTrainer(**services.trainer_arguments)`."""
        return dict(vars(self))


def run(
    recipe: str | os.PathLike[str],
    *,
    callbacks: "Sequence[TrainerCallback]" = (),
    **settings: Any,
) -> "AtroposGRPOTrainer":
    """
    Trains by a recipe: starts its services, trains, saves the model, and stops the services.

    Args:
        recipe (`str` or `os.PathLike`):
            A YAML file, as for `trl-atropos train`.
        callbacks (sequence of `TrainerCallback`, *optional*):
            Added to the trainer's own.
        **settings:
            Settings that replace those of the recipe, such as `max_steps=20` or
            `environments=["my_environment.py"]`. All but `env`, whose variables are read before.

    Returns:
        `AtroposGRPOTrainer`: The trainer after the run. Its services have ended.

    Raises:
        AtroposTrainingError: If something is wrong with the recipe, a service or the rollouts. Its
            text names the cause and the fix.
        KeyboardInterrupt: After Ctrl-C, when everything is stopped.

    Example:

    ```python
    trainer = trl_atropos.run("recipes/quickstart/colocate.yaml", max_steps=20)
    print(trainer.state.log_history[-1]["reward"])
    ```
    """
    with _signals():
        return main_job.run(_parse(recipe, settings), callbacks)


@contextmanager
def start_services(recipe: str | os.PathLike[str], **settings: Any) -> Iterator[RunningServices]:
    """
    Runs the services of a recipe during a `with` block, for a trainer that you make yourself.

    Args:
        recipe (`str` or `os.PathLike`):
            A YAML file, as for `trl-atropos train`.
        **settings:
            Settings that replace those of the recipe.

    Yields:
        `RunningServices`: The arguments of a trainer.

    Raises:
        AtroposTrainingError: As `run`.
        KeyboardInterrupt: After Ctrl-C, when everything is stopped.

    Example:

    ```python
    with trl_atropos.start_services("recipes/quickstart/colocate.yaml", max_steps=20) as services:
        trainer = AtroposGRPOTrainer(**services.trainer_arguments, callbacks=[MyCallback()])
        trainer.train()
    ```
    """
    with (
        _signals(),
        main_job.running_services(_parse(recipe, settings)) as (checked, services, evaluator),
    ):
        yield RunningServices(**main_job.trainer_arguments(checked, services, evaluator))


def _parse(recipe: str | os.PathLike[str], settings: Mapping[str, Any]) -> "Recipe":
    """Returns the recipe with the settings, after what comes before CUDA begins: the recipe's
    variables, and NVIDIA's MPS."""
    speak()
    argv = ["--config", os.fspath(recipe)]
    stated = main_job.apply_recipe_environment(argv)
    from trl_atropos.services.mps import prepare_mps

    prepare_mps(stated | dict(settings))
    with activity("Reading the recipe"), main_job.without_vllm():
        from trl_atropos.recipe import parse

        return parse(argv, settings)


@contextmanager
def _signals() -> Iterator[None]:
    """Has Ctrl-C, SIGTERM and services that die end the block in order, and Ctrl-C end it by
    `KeyboardInterrupt`."""
    try:
        with handlers():
            yield
    except Interrupted as end:
        sys.stdout.flush()
        if end.signum == SIGINT:
            raise KeyboardInterrupt from None
        raise
