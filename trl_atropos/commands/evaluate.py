"""Runs `trl-atropos eval`: the evaluations of a recipe, without training."""

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trl_atropos.activity import activity, importing
from trl_atropos.commands.words import command_parser, require_words
from trl_atropos.errors import AtroposTrainingError, EvaluationError
from trl_atropos.privacy import close_to_others
from trl_atropos.services.signals import install_handlers
from trl_atropos.terminal import fitted

if TYPE_CHECKING:
    from trl_atropos.recipe import Recipe
    from trl_atropos.services.evaluation_results import Result
    from trl_atropos.services.evaluations import Evaluator
    from trl_atropos.services.manager import Services

POLL = 0.1  # seconds
EVAL = """\
Makes the `evaluations` of a recipe, without training: of a checkpoint, or of
the model that the recipe begins with. With `start_vllm: true`, it starts the
inference server for it; otherwise it evaluates what the running one serves."""


def evaluate(words: list[str]) -> None:
    """Prints a line for each evaluation. Exits with 1 after an error."""
    usage = "RECIPE [--checkpoint FOLDER] [--SETTING VALUE ...]"
    parser = command_parser("eval", usage, EVAL)
    parser.add_argument("--checkpoint", metavar="FOLDER", help="default: the recipe's model")
    require_words(parser, words)
    options, settings = parser.parse_known_args(words)
    install_handlers()
    with importing("PyTorch, Transformers and TRL"):
        from trl_atropos.protocol import hide_token
        from trl_atropos.recipe import parse

    hide_token()
    try:
        with activity("Reading the recipe"):
            recipe = parse(settings)
        _evaluate(recipe, options.checkpoint)
    except AtroposTrainingError as error:
        sys.exit(fitted(f"\ntrl-atropos eval: {error}"))


def _evaluate(recipe: "Recipe", checkpoint: str | None) -> None:
    """Evaluates a checkpoint, or the model that the recipe begins with, with servers of its own or
    those that run."""
    from trl_atropos.services.manager import Services
    from trl_atropos.services.starting import require_room, start_servers
    from trl_atropos.train import evaluator_of, set_up_logging
    from trl_atropos.weights.checkpoint import merged_model, step_of

    training = recipe.training
    set_up_logging(training)
    _require_possible(recipe, checkpoint)
    model = checkpoint or recipe.model.model_name_or_path
    step = step_of(checkpoint)
    name = os.path.basename(os.path.abspath(model))  # also of "." or ".."
    folder = os.path.join(training.output_dir, "eval", name)
    recipe = replace(recipe, services=replace(recipe.services, start_atropos=False))
    if recipe.runs_agents:
        close_to_others()
    with (
        tempfile.TemporaryDirectory() as scratch,
        Services(os.path.join(folder, "logs"), recipe.runs_agents) as services,
    ):
        require_room(recipe)
        mode = "server" if training.mode.restarts_engine else training.vllm_mode
        with activity(f"Merging the adapter {model} into its base"):
            served = merged_model(model, scratch)
        servers = start_servers(recipe, services, mode, served)
        evaluator = evaluator_of(recipe, services, folder, needed=True)
        evaluator.start(0)
        for server in servers:
            services.wait_healthy(server, recipe.services.service_timeout)
        for result in _results(evaluator, services, training.output_dir, step):
            if servers:  # those that this command started serve the checkpoint
                result = replace(result, versions=(step, step))
            sys.stdout.write(fitted(f"{model}: {result.line()}\n", sys.stdout))
            sys.stdout.flush()
    sys.stdout.write(fitted(f"Answers and results: {folder}\n", sys.stdout))


def _results(
    evaluator: "Evaluator", services: "Services", output_dir: str, step: int
) -> Iterator["Result"]:
    """Makes the evaluations at a step, and yields each result when it is there. Those of the run's
    step 0 are what the results of a later step are compared with."""
    from trl_atropos.services.evaluation_results import results_of

    evaluator.results = results_of(output_dir, step=0) if step else []
    evaluator.ready(step, first=True, last=True)
    evaluator.begin(step, first=True, last=True)
    while evaluator.busy():
        services.check()
        evaluator.tell_progress()
        yield from evaluator.poll()
        time.sleep(POLL)


def _require_possible(recipe: "Recipe", checkpoint: str | None) -> None:
    """Raises `EvaluationError` if there is nothing to evaluate, or no server could serve it."""
    if not recipe.evaluations:
        fix = "List some: docs/evaluation.md shows how."
        raise EvaluationError("The recipe has no `evaluations`", fix=fix)
    if checkpoint is None:
        return
    if not recipe.services.start_vllm:
        what = (
            "`--checkpoint` needs a server that this command starts, and the recipe has "
            "`start_vllm: false`"
        )
        fix = "Start a server on it, and leave `--checkpoint` out."
        raise EvaluationError(what, f"checkpoint: {checkpoint}", fix)
    _require_model(checkpoint)


def _require_model(checkpoint: str) -> None:
    """Raises `EvaluationError` for a checkpoint that no server could load, before one is
    started."""
    seen = f"--checkpoint {checkpoint}"
    folder = Path(checkpoint)
    if not folder.is_dir():
        what = f"There is no checkpoint {checkpoint!r} (looked in {os.getcwd()})"
        raise EvaluationError(what, seen, "Name the folder of one.", "checkpoint")
    configs = [folder / "config.json", folder / "adapter_config.json"]
    if not any(config.is_file() for config in configs):
        what = f"The folder {checkpoint!r} holds neither a model nor an adapter"
        fix = "Name a checkpoint: a folder with a config.json or an adapter_config.json in it."
        inner = sorted(folder.glob("checkpoint-*"))
        if inner:
            fix += f" It has {inner[-1]}."
        raise EvaluationError(what, seen, fix, "checkpoint")
