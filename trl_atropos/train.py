"""The main job: starts the services that a recipe names, trains, saves, and stops what it started.

    accelerate launch --quiet --config_file configs/accelerate/cpu.yaml -m trl_atropos.train
    --config recipe.yaml

`main` runs in every process of the trainer. It handles signals and the death of the launcher from
the first line on, before anything heavy is imported.
"""

import contextlib
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from trl_atropos.activity import activity, importing
from trl_atropos.logging import speak
from trl_atropos.privacy import close_to_others
from trl_atropos.run_messages import (
    message_of,
    print_error,
    print_help,
    show_warning,
    tell_how_to_go_on,
)
from trl_atropos.services.signals import (
    Interrupted,
    die_with_launcher,
    install_handlers,
    interrupt_main_with,
)
from trl_atropos.terminal import fitted

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from trl_atropos.config import AtroposGRPOConfig
    from trl_atropos.recipe import Recipe
    from trl_atropos.services.evaluations import Evaluator
    from trl_atropos.services.manager import Services
    from trl_atropos.trainer import AtroposGRPOTrainer

STARTED = time.monotonic()
DYING_SECONDS = 5.0  # between a server's first failed answer and its last process


def main() -> None:
    die_with_launcher()
    install_handlers()
    speak()
    stated = apply_recipe_environment(sys.argv[1:])
    warnings.showwarning = show_warning
    if {"-h", "--help"} & set(sys.argv[1:]):
        return print_help()
    from trl_atropos.services.mps import prepare_mps

    prepare_mps(stated)
    with importing("PyTorch, Transformers and TRL"), without_vllm():
        from trl_atropos.protocol import hide_token
        from trl_atropos.recipe import parse

    hide_token()
    # TRL's parser prints its own help, which has every setting
    words = ["--help" if word == "--help_all" else word for word in sys.argv[1:]]
    recipe = None
    try:
        with activity("Reading the recipe"):
            recipe = parse(words)
        run(recipe)
    except Interrupted as end:
        tell_how_to_go_on(recipe, f"Interrupted ({end.signum.name}).")
        raise
    except Exception as error:
        message = message_of(error)
        if message is None:
            raise
        print_error(message)
        tell_how_to_go_on(recipe)
        sys.exit(1)


@contextlib.contextmanager
def without_vllm():
    """Hides vLLM from TRL, which would import it: 8 seconds of a CPU and 150 MB, for engines in
    other processes."""
    hides = "vllm" not in sys.modules
    if hides:
        sys.modules["vllm"] = None  # type: ignore[assignment] - Python's way to say that there is no such module
    try:
        yield
    finally:
        if hides:
            del sys.modules["vllm"]


def apply_recipe_environment(argv: list[str]) -> dict[str, Any]:
    """Sets the variables under `env:` of the recipe, and returns all settings that are stated.
    Comes before every import: torch, numpy and huggingface_hub read their variables then."""
    from trl_atropos.flags import stated_settings

    stated = stated_settings(argv)
    variables = stated.get("env")
    if isinstance(variables, dict):
        for name, value in variables.items():
            os.environ[str(name)] = str(value)
    return stated


def run(recipe: "Recipe", callbacks: Sequence["TrainerCallback"] = ()) -> "AtroposGRPOTrainer":
    """Starts the services of a recipe, trains, saves the model, and stops the services. Returns the
    trainer."""
    from trl_atropos.errors import AttachError, ServerError, ServerTimeout

    with running_services(recipe) as (recipe, services, evaluator):
        try:
            return train(recipe, services, evaluator, callbacks)
        except ServerError as error:
            if not isinstance(error, AttachError | ServerTimeout):
                # if it is a service that dies, its name and log say more
                services.await_death(DYING_SECONDS)
            raise


@contextlib.contextmanager
def running_services(
    recipe: "Recipe",
) -> Iterator[tuple["Recipe", "Services", "Evaluator | None"]]:
    """Checks the files of a recipe, and runs its services during the block. Yields the recipe as it
    is after the checks."""
    from accelerate import PartialState

    from trl_atropos import distributed as ranks
    from trl_atropos.protocol import keep_token
    from trl_atropos.recipe_checks import check_files, check_reports
    from trl_atropos.report.hub import make_repository
    from trl_atropos.services.environments import Disconnector
    from trl_atropos.services.manager import Services
    from trl_atropos.services.output_lock import locked
    from trl_atropos.services.starting import control_token, start_services

    set_up_logging(recipe.training)
    _heed_ddp_timeout(recipe.training)
    with activity("Checking the model and the checkpoints"):
        recipe = check_files(recipe)
    training = recipe.training
    with activity(f"Loading what reports to {', '.join(training.report_to)}"):
        ranks.together(lambda: check_reports(training))
    if training.push_to_hub:
        with activity("Making the repository on the Hub"):
            ranks.on_main(lambda: make_repository(training))
    # before anything that talks to the servers is made, on every rank
    if recipe.services.start_vllm:
        keep_token(ranks.on_main(control_token))
    # On a GPU, `train` knows whether other processes open the memory of this one.
    if recipe.runs_agents and PartialState().device.type == "cpu":
        close_to_others()
    services = Services(os.path.join(training.output_dir, "logs"), recipe.runs_agents)
    evaluator = evaluator_of(recipe, services, training.output_dir)
    with ranks.held_on_main(lambda: locked(training.output_dir)), services:
        if training.replay_paths is None:
            ranks.on_main(lambda: start_services(recipe, services, evaluator))
        if PartialState().is_main_process:
            services.watch(interrupt_main_with, Disconnector(services, training.atropos_url).ended)
        yield recipe, services, evaluator


def set_up_logging(training: "AtroposGRPOConfig") -> None:
    """Sets the verbosity: the recipe's `log_level`, or else `TRL_ATROPOS_VERBOSITY`, as with
    transformers'."""
    from transformers.utils.logging import disable_progress_bar

    from trl_atropos import logging

    if not sys.stderr.isatty():
        disable_progress_bar()
    logging.disable_propagation()
    if training.log_level == "passive":
        # the recipe's `env` may set it, too
        logging.set_verbosity(logging.verbosity_of_environment() or logging.INFO)
    else:
        logging.set_verbosity(training.get_process_log_level())


def _heed_ddp_timeout(training: "AtroposGRPOConfig") -> None:
    """Sets `ddp_timeout` on the CPU, too. Transformers does so on GPUs only."""
    from torch import distributed

    if training.use_cpu and distributed.is_initialized():
        distributed.distributed_c10d._set_pg_timeout(training.ddp_timeout_delta)


def train(
    recipe: "Recipe",
    services: "Services",
    evaluator: "Evaluator | None",
    callbacks: Sequence["TrainerCallback"] = (),
) -> "AtroposGRPOTrainer":
    """Builds the trainer, trains, saves, and writes the run's summary. Returns the trainer."""
    with importing("the trainer"), without_vllm():
        from trl_atropos.trainer import AtroposGRPOTrainer
    from trl_atropos.errors import PushError
    from trl_atropos.weights.checkpoint import disk_errors

    arguments = trainer_arguments(recipe, services, evaluator)
    trainer = AtroposGRPOTrainer(**arguments, callbacks=list(callbacks))
    training = trainer.args
    if recipe.runs_agents and not _memory_is_opened(trainer):
        close_to_others()
    trainer.run_log.model = asdict(recipe.model)
    trainer.environment_commands = {spec.name: spec.line for spec in recipe.environments}
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    try:
        with disk_errors(training.output_dir, "The model"):
            if training.push_to_hub:
                trainer.push_to_hub()  # saves, and writes the card, before
            else:
                with activity(f"Saving the model in {training.output_dir}"):
                    trainer.save_model(training.output_dir)
                trainer.create_model_card()
    except PushError:
        _summarise(trainer)
        raise
    _summarise(trainer)
    trainer.accelerator.end_training()
    return trainer


def _memory_is_opened(trainer: "AtroposGRPOTrainer") -> bool:
    """Returns whether other processes open GPU memory of this one: other ranks, or servers. A
    process that closes itself may refuse them that (`privacy.py`)."""
    accelerator = trainer.accelerator
    if accelerator.device.type == "cpu":
        return False
    return accelerator.num_processes > 1 or trainer.policy_publisher.memory_is_opened


def trainer_arguments(
    recipe: "Recipe", services: "Services", evaluator: "Evaluator | None"
) -> dict[str, Any]:
    """Returns the keyword arguments of a trainer for a recipe whose services run: `model`, `args`,
    `rollout_source`, `evaluator`, `peft_config` and `quantization_config`."""
    with without_vllm():
        from trl import get_peft_config, get_quantization_config

        from trl_atropos.trainer import source_of
    from trl_atropos.services.environments import Supervisor

    training = recipe.with_training(model_init_kwargs=_model_init_kwargs(recipe)).training
    return {
        "model": recipe.model.model_name_or_path,
        "args": training,
        "rollout_source": source_of(training, Supervisor(services, interrupt_main_with)),
        "evaluator": evaluator,
        "peft_config": get_peft_config(recipe.model),
        "quantization_config": get_quantization_config(recipe.model),
    }


def _model_init_kwargs(recipe: "Recipe") -> dict[str, Any] | None:
    """Returns the arguments that load the model: what the recipe says of it, if that differs from
    TRL's defaults, and the recipe's own `model_init_kwargs`, which win."""
    model = recipe.model
    kwargs = {}
    if model.model_revision != "main":
        kwargs["revision"] = model.model_revision
    if model.attn_implementation is not None:
        kwargs["attn_implementation"] = model.attn_implementation
    if model.dtype != "float32":
        kwargs["dtype"] = model.dtype
    return {**kwargs, **(recipe.training.model_init_kwargs or {})} or None


def evaluator_of(
    recipe: "Recipe", services: "Services", output_dir: str, needed: bool = False
) -> "Evaluator | None":
    """Returns the `Evaluator` of a recipe that has evaluations, which writes below `output_dir`.
    If they are `needed`, one that fails is an error."""
    from trl_atropos.services.evaluation_results import FOLDER
    from trl_atropos.services.evaluations import Evaluator

    if not recipe.evaluations:
        return None
    training = recipe.training
    return Evaluator(
        recipe.evaluations,
        services,
        recipe.evaluation_command,
        os.path.join(output_dir, FOLDER),
        training.vllm_server_urls,
        training.eval_timeout,
        needed or training.metric_for_best_model is not None,
    )


def _summarise(trainer: Any) -> None:
    """Writes the run's summary, draws its rewards, and prints its end, on rank 0."""
    from trl_atropos.report.summary import CURVE, closing_lines, draw_reward_curve, write_summary

    if not trainer.accelerator.is_main_process:
        return
    folder = trainer.args.output_dir
    log = trainer.run_log
    evaluations = trainer.evaluations
    seconds = time.monotonic() - STARTED
    probed = trainer.policy_publisher.probe_max_abs_diff
    summary = write_summary(folder, log, trainer.state.global_step, probed, seconds, evaluations)
    if log.rewards:
        # if the log has less than two rewards, the card has drawn none
        if sum("reward" in entry for entry in trainer.state.log_history) < 2:
            draw_reward_curve(folder, log.rewards)
        replayed = trainer.args.replay_paths is not None
        curve = os.path.join(folder, CURVE)
        lines = closing_lines(
            summary, log, trainer.processing_class.decode, curve, replayed, evaluations
        )
        lines.append(f"All of it on one page: trl-atropos report {folder}")
        lines.append("")
        sys.stdout.write(fitted("\n".join(lines), sys.stdout))


if __name__ == "__main__":
    main()
