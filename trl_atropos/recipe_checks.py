"""Checks a recipe that was read: do its settings fit each other, and can the machine run it?

`recipe.parse` calls `check_settings` and `check_best_model`. `trl_atropos.train` and `trl-atropos
check` then call `check_files` and `check_reports`, which look at the machine. All of them raise
`RecipeError`.
"""

import difflib
import importlib.util
import inspect
import os
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from trl_atropos.config import AtroposGRPOConfig
from trl_atropos.environment_entry import EnvironmentSpec, EvaluationSpec, require_program
from trl_atropos.errors import RecipeError, reason_of
from trl_atropos.flags import number_of
from trl_atropos.protocol import environment_token
from trl_atropos.rollouts.replay import recorded_files
from trl_atropos.rollouts.versions import settings_differ
from trl_atropos.services.environment_source import setting_names

if TYPE_CHECKING:
    from trl_atropos.recipe import Recipe, ServicesConfig

# of those whose callbacks, if they miss them, end with an error that hides ours
REPORTING_PACKAGES = {
    "mlflow": ("mlflow",),
    "neptune": ("neptune",),
    "dagshub": ("dagshub", "mlflow"),
}


def check_settings(recipe: "Recipe") -> None:
    """Raises `RecipeError` for settings that do not fit each other."""
    training = recipe.training
    _check_model(recipe.model.model_name_or_path)
    if training.replay_paths is not None:
        recorded_files(training.replay_paths)
    elif training.mode.needs_adapter and not recipe.model.use_peft:
        what = f"`vllm_mode: {training.vllm_mode}` sends a LoRA adapter, but the run has none"
        fix = (
            "Set `use_peft: true` and `lora_target_modules: all-linear`, or use `vllm_mode: "
            "colocate` or `server`."
        )
        raise RecipeError(what, f"vllm_mode: {training.vllm_mode}", fix, "no-adapter")
    _check_adapter(recipe)
    _check_patience(recipe.services, training)
    for spec in recipe.environments:
        require_program(spec, recipe.environment_command(spec))
        _check_temperature(recipe, spec)
        _check_group_size(recipe, spec)
    for spec in recipe.evaluations:
        require_program(spec, recipe.environment_command(spec))
    for spec in (*recipe.environments, *recipe.evaluations):
        _check_setting_names(spec)
    _check_evaluations(recipe)


def _check_model(model: str | None) -> None:
    """Raises `RecipeError` if no model is named, or a folder that is not there."""
    seen = f"model_name_or_path: {model}"
    if not model:
        fix = "Set `model_name_or_path` to a Hub name or a folder."
        raise RecipeError("No model", seen, fix, "model")
    is_folder = model.startswith((".", "/", "~")) or model.count("/") > 1
    if is_folder and not os.path.isdir(model):
        what = f"The model folder {model!r} does not exist (looked in {os.getcwd()})"
        fix = (
            "Set `model_name_or_path`; recipes/quickstart/make_model.py FOLDER makes the "
            "quickstart's."
        )
        raise RecipeError(what, seen, fix, "model")


def _check_adapter(recipe: "Recipe") -> None:
    from trl import get_peft_config

    from trl_atropos.weights.adapters import require_supported

    config = get_peft_config(recipe.model)
    if config is not None:
        require_supported(config, recipe.adapter_way, in_recipe=True)


def _check_patience(services: "ServicesConfig", training: AtroposGRPOConfig) -> None:
    """Raises `RecipeError` if the other processes of the trainer do not wait until the services are
    there. The first process waits for one service after the other, and the others wait for it."""
    waits = services.start_atropos + len(training.vllm_server_urls) * services.start_vllm
    seconds = services.service_timeout
    patience = training.ddp_timeout
    if training.world_size > 1 and waits * seconds >= patience:
        what = (
            f"{waits} services may take {seconds:g} s each to become healthy "
            "(`service_timeout`), but the trainer's processes wait for the first one for only "
            f"{patience} s (`ddp_timeout`)"
        )
        seen = f"service_timeout: {seconds:g}, ddp_timeout: {patience}"
        raise RecipeError(what, seen, "Raise `ddp_timeout`, or lower `service_timeout`.")


# ------------------------------------------------------------------------------------- environments


def _check_temperature(recipe: "Recipe", spec: EnvironmentSpec) -> None:
    """Raises `RecipeError` if an environment samples at another temperature than the trainer's."""
    trained = recipe.training.temperature
    for setting, value in recipe.stated(spec).items():
        sampled = number_of(value)
        if not setting.endswith("temperature") or sampled is None:
            continue
        if settings_differ(sampled, trained):
            place = f"--env.{setting}"
            if setting in spec.config:
                place = f"`config: {setting}`"
            what = (
                f"Environment {spec.name!r} samples at temperature {value} ({place}), but "
                f"`temperature` is {trained}, at which every token is scored"
            )
            seen = f"temperature {value} ({place}), temperature: {trained}"
            raise RecipeError(what, seen, "Make the two equal.", "temperature")


def _check_group_size(recipe: "Recipe", spec: EnvironmentSpec) -> None:
    """Raises `RecipeError` if the groups of an environment do not fill a generation batch."""
    size = recipe.stated_number(spec, "group_size")
    batch = recipe.training.generation_batch_size
    if size is None:
        return
    seen = f"group_size: {size:g}, a generation batch of {batch} rollouts"
    if size < 1 or size % 1:
        what = f"Environment {spec.name!r} has groups of {size:g} rollouts"
        fix = f"Set its `group_size` to a whole number that divides {batch}."
        raise RecipeError(what, seen, fix, "group-size")
    if batch % size == 0:
        return
    if size < batch:
        problem = (
            f"which do not fill a generation batch of {batch} rollouts: the Atropos API "
            "would never deliver one"
        )
        fix = "Change `per_device_train_batch_size` to make the batch a multiple of the group size."
    else:
        problem = f"but a generation batch has only {batch} rollouts"
        fix = (
            "Raise `per_device_train_batch_size` or `gradient_accumulation_steps`, or lower the "
            "group size."
        )
    what = f"Environment {spec.name!r} sends groups of {size:.0f} rollouts, {problem}"
    raise RecipeError(what, seen, fix, "group-size")


def _check_setting_names(spec: EnvironmentSpec) -> None:
    """Raises `RecipeError` for settings that the environment's class does not have, as far as its
    script tells."""
    if not spec.config:
        return
    names = setting_names(spec.script)
    if names is None:
        return
    for setting, value in spec.config.items():
        if setting in names:
            continue
        fix = f"Its settings are: {', '.join(sorted(names))}."
        close = difflib.get_close_matches(setting, names, n=1)
        if close:
            fix = f"Did you mean `{close[0]}`?"
        what = (
            f"Environment {spec.name!r} has no setting `{setting}`, and Atropos would "
            "ignore it silently"
        )
        raise RecipeError(what, f"{setting}: {value} (`config:`)", fix, "environment-setting")


# -------------------------------------------------------------------------------------- evaluations


def _check_evaluations(recipe: "Recipe") -> None:
    """Raises `RecipeError` for an evaluation of nothing, and for one without a server."""
    training = recipe.training
    if not recipe.evaluations:
        by_steps = training.eval_strategy == "steps"
        if by_steps or training.eval_on_start or training.metric_for_best_model is not None:
            seen = f"eval_strategy: {training.eval_strategy.value}"
            fix = "List `evaluations` in the recipe, each with the `path` of an environment."
            raise RecipeError("There is nothing to evaluate", seen, fix)
    elif training.replay_paths is not None:
        what = (
            "`evaluations` need a server, and a run on recorded rollouts (`replay_paths`) has none"
        )
        raise RecipeError(what, "evaluations, replay_paths", "Leave one out.")


def check_best_model(
    training: AtroposGRPOConfig, evaluations: Sequence[EvaluationSpec], eval_steps: int
) -> None:
    """Raises `RecipeError` if `metric_for_best_model` is not known whenever a checkpoint is saved.
    `evaluations` are due every `eval_steps` optimizer steps, or more rarely."""
    metric = training.metric_for_best_model
    if metric is None:
        return
    if metric in ("", "eval_", "loss", "eval_loss"):  # no evaluation reports a loss
        what = f"`metric_for_best_model` is {metric!r}"
        names = ", ".join(f"eval_{spec.name}_pass@1" for spec in evaluations)
        fix = f"Name one of an evaluation, such as {names}."
        raise RecipeError(what, f"metric_for_best_model: {metric}", fix)
    seen = f"eval_steps: {eval_steps}"
    for spec in evaluations:
        if spec.every != eval_steps:
            what = (
                f"`metric_for_best_model` is needed every {eval_steps} steps, but "
                f"{spec.name!r} is not made then"
            )
            raise RecipeError(what, seen, "Give all evaluations the same `every`.")
    if eval_steps % training.sync_every_n_steps:
        what = (
            f"`sync_every_n_steps` is {training.sync_every_n_steps}: other weights are "
            "evaluated than are saved"
        )
        raise RecipeError(what, seen, "Make `eval_steps` a multiple of it.")


# -------------------------------------------------------------------------------------- the machine


def _probe_kinds(recipe: "Recipe") -> None:
    """Raises `RecipeError` if an entry of this package's kinds cannot run in its interpreter."""
    for spec in (*recipe.environments, *recipe.evaluations):
        if spec.kind is not None:
            spec.kind.probe(f"Environment {spec.name!r}")


def check_files(recipe: "Recipe") -> "Recipe":
    """Checks on all ranks what a run reads and writes. Returns the recipe with the checkpoint's
    folder as `resume_from_checkpoint`, or with `None`."""
    from trl_atropos.distributed import on_main, together
    from trl_atropos.weights import trainable
    from trl_atropos.weights.checkpoint import require_whole
    from trl_atropos.weights.checkpoint_adapters import require_same_weights
    from trl_atropos.weights.run_path import starting_checkpoint
    from trl_atropos.weights.savable import require_savable_generation, require_writable

    training = recipe.training
    model = recipe.model
    environment_token()  # raises if no header can carry it
    together(lambda: require_writable(training.output_dir))
    together(lambda: trainable.require_causal_model(model, training.trust_remote_code))
    # otherwise, an adapter alone is saved
    if not model.use_peft or training.mode.restarts_engine:
        together(lambda: require_savable_generation(model))
    if model.use_peft and recipe.adapter_way is not None:
        together(lambda: trainable.require_untied(model, training.trust_remote_code))
    if training.replay_paths is None:
        on_main(lambda: _probe_kinds(recipe))
    folder = starting_checkpoint(training, training.resume_from_checkpoint)
    if folder is not None:
        together(lambda: require_whole(folder))
        together(lambda: require_same_weights(folder, model.use_peft))
    return recipe.with_training(resume_from_checkpoint=folder)


def check_reports(training: AtroposGRPOConfig) -> None:
    """Raises `RecipeError` if a reporting package that `report_to` names is missing, or could log
    nothing. Otherwise you would learn it only when the server is up and the trainer is made, or
    never."""
    from transformers.integrations import get_reporting_integration_callbacks

    try:
        for name in training.report_to:
            for package in REPORTING_PACKAGES.get(name, ()):
                if importlib.util.find_spec(package) is None:
                    raise ImportError(f"{package} is not installed. Run `pip install {package}`.")
        for callback in get_reporting_integration_callbacks(training.report_to):
            callback()
    except (ImportError, RuntimeError, ValueError) as error:
        seen = f"report_to: {', '.join(training.report_to)}"
        what = f"`report_to` is {training.report_to}: {error}"
        fix = "Or set `report_to: none`."
        raise RecipeError(what, seen, fix, "report-to") from error
    if "trackio" in training.report_to:
        _require_trackio_folder()
    if "wandb" in training.report_to and training.process_index == 0:  # which alone reports
        _require_wandb_login()
    if "mlflow" in training.report_to:
        from mlflow import get_tracking_uri

        require_mlflow_store(get_tracking_uri())


def _require_wandb_login() -> None:
    """Raises `RecipeError` if Weights & Biases would ask for a login, or refuse the key. It asks
    when everything has started, and only at a terminal. Asks nobody over the network."""
    import wandb

    if wandb.setup().settings.mode not in ("online", "shared", "run"):
        return
    if "prompt" not in inspect.signature(wandb.login).parameters:  # older ones cannot tell
        return
    what = "`report_to` has wandb, but nobody is logged in to Weights & Biases"
    try:
        if wandb.login(prompt=False, verify=False):
            return
    except wandb.Error as error:
        what = f"`report_to` has wandb, whose login cannot be used ({reason_of(error)})"
    fix = (
        "Run `wandb login`, set WANDB_API_KEY, keep the run on this machine with "
        "`WANDB_MODE: offline` (both also under `env`), or set `report_to: none`."
    )
    raise RecipeError(what, "report_to: wandb", fix, "report-to")


def require_mlflow_store(uri: str) -> None:
    """Raises `RecipeError` if MLflow would keep each metric in a file of its name. Beside the file
    `reward`, there can be no folder of that name for `reward/NAME`, a part of the rewards."""
    if urlsplit(uri).scheme not in ("", "file") or uri.startswith("databricks"):
        return
    what = (
        "`report_to` has mlflow, which keeps each metric in a file of its name here, and cannot "
        "have both `reward` and its parts, `reward/NAME`: the run would end at their first log"
    )
    fix = (
        "Set MLFLOW_TRACKING_URI (also under `env`) to a database, such as "
        "sqlite:///mlflow.db, or to a server."
    )
    raise RecipeError(what, f"MLFLOW_TRACKING_URI: {uri}", fix, "report-to")


def _require_trackio_folder() -> None:
    """Raises `RecipeError` if trackio cannot write where it keeps its runs. Trackio itself would
    only warn, and log no step. It writes there before it sends anything elsewhere, too."""
    from trackio.utils import TRACKIO_DIR

    try:
        os.makedirs(TRACKIO_DIR, exist_ok=True)
        tempfile.TemporaryFile(dir=TRACKIO_DIR).close()
    except OSError as error:
        what = (
            f"`report_to` has trackio, which keeps its runs in {TRACKIO_DIR}, where nothing can be "
            f"written ({error.strerror})"
        )
        fix = "Set `TRACKIO_DIR` to another folder (also under `env`), or `report_to: none`."
        raise RecipeError(what, f"TRACKIO_DIR: {TRACKIO_DIR}", fix, "report-to") from error
