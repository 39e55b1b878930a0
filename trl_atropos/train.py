"""The main job: starts the services a recipe names, trains, saves, and stops only what it started.

    accelerate launch --quiet --config_file configs/accelerate/cpu.yaml -m trl_atropos.train --config recipe.yaml

Signals and the death of the launcher are handled from the first line on, before anything heavy is imported.
"""

import itertools
import os
import sys
import tempfile
import time
import warnings

from trl_atropos.signals import die_with_launcher, install_handlers, interrupt_main_with

STARTED = time.monotonic()
DYING_SECONDS = 5.0  # between a server's first failed answer and its last process


def main() -> None:
    die_with_launcher()
    install_handlers()
    _apply_recipe_environment(sys.argv[1:])
    # TRL warns of every vLLM beyond 0.31, three times over; its own vLLM client is not used here.
    warnings.filterwarnings("ignore", message="TRL currently supports vLLM versions")
    from trl_atropos.errors import AtroposTrainingError
    from trl_atropos.recipe import RecipeError, parse

    try:
        run(parse(sys.argv[1:]))
    except Exception as error:
        # A service may die while some library is at work, which then wraps the error that was raised in its midst.
        told = next((e for e in _chain(error) if isinstance(e, AtroposTrainingError | RecipeError)), None)
        if told is None:
            raise
        _say_error(str(told))
        sys.exit(1)


def _chain(error: BaseException | None):
    """The error and everything that led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _apply_recipe_environment(argv: list[str]) -> None:
    """Sets the variables under `env:` of the recipe now: torch and huggingface_hub read theirs on import."""
    import yaml

    words = [part for word in argv for part in word.split("=", 1)]
    for before, path in itertools.pairwise(words):
        if before == "--config" and os.path.isfile(path):
            try:
                with open(path, encoding="utf-8") as file:
                    content = yaml.safe_load(file)
            except (OSError, UnicodeError, yaml.YAMLError):
                return  # the parser says what is wrong with it
            if isinstance(content, dict) and isinstance(content.get("env"), dict):
                os.environ.update({str(key): str(value) for key, value in content["env"].items()})


def run(recipe) -> None:
    """Trains by `recipe` (a `trl_atropos.recipe.Recipe`)."""
    from accelerate import PartialState

    from trl_atropos.errors import AttachError, ServerError
    from trl_atropos.services import Services

    _set_up_logging()
    check_files(recipe)
    with Services(os.path.join(recipe.training.output_dir, "logs")) as services:
        if PartialState().is_main_process:
            start_services(recipe, services)
            services.watch(interrupt_main_with)
        PartialState().wait_for_everyone()
        try:
            train(recipe)
        except ServerError as error:
            if not isinstance(error, AttachError):
                services.await_death(DYING_SECONDS)  # if it is a service that dies, its name and log say more
            raise


def check_files(recipe) -> None:
    """What a run reads and writes, before it starts anything that takes long."""
    from transformers import AutoConfig

    from trl_atropos.recipe import RecipeError

    model, folder = recipe.model, recipe.training.output_dir
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RecipeError(
            f"`output_dir` is {folder!r}, where nothing can be written ({error.strerror}). Set it to another folder."
        ) from error
    recipe.training.resume_from_checkpoint = _checkpoint(recipe.training)
    try:
        AutoConfig.from_pretrained(
            model.model_name_or_path,
            revision=model.model_revision,
            trust_remote_code=recipe.training.trust_remote_code,
        )
    except (OSError, ValueError) as error:  # not there, or of an architecture that transformers does not know
        raise RecipeError(
            f"The model {model.model_name_or_path!r} cannot be loaded: {_first_sentence(error)}. Set "
            "`model_name_or_path` to a folder with a config.json (the quickstart's is made by `python "
            "recipes/quickstart/make_model.py FOLDER`), or to a Hub name that this machine can download or has cached."
        ) from error


def _first_sentence(error: Exception) -> str:
    return " ".join(str(error).split()).split(". ")[0].rstrip(".")


def start_services(recipe, services) -> None:
    """Starts the API, the server and the environments, and waits until the first two are healthy."""
    import secrets

    from trl_atropos.protocol import TOKEN_VARIABLE
    from trl_atropos.services import require_free_port

    training, config = recipe.training, recipe.services
    atropos, vllm = training.atropos_url, training.vllm_server_base_url
    if config.start_atropos:
        fix = "stop what runs there, set `atropos_url` to a free port, or use it with `start_atropos: false`"
        require_free_port(atropos, "the Atropos API", fix)
    if config.start_vllm:
        fix = "stop what runs there, set `vllm_server_base_url` to a free port, or use it with `start_vllm: false`"
        require_free_port(vllm, "the vLLM server", fix)
    if config.start_atropos:
        services.start("atropos", _module("atroposlib.cli.run_api", atropos), health_url=f"{atropos}/")
    if config.start_vllm:
        os.environ.setdefault(TOKEN_VARIABLE, secrets.token_urlsafe(24))
        command = _module("trl_atropos.server.launch", vllm, recipe.model.model_name_or_path)
        command += ["--seed", str(training.seed), *(config.vllm_args or [])]
        services.start("vllm", command, health_url=f"{vllm}/health")
    if config.start_atropos:
        services.wait_healthy("atropos", config.service_timeout)
    # Environments load while the server starts. They sample nothing before the trainer asks for a first batch.
    hidden = {TOKEN_VARIABLE: ""}
    for spec in recipe.environments:
        env = {**hidden, **{name: str(value) for name, value in spec.env.items()}}
        services.start(f"environment-{spec.name}", spec.argv(recipe.placeholders()), env=env, cwd=spec.cwd)
    if config.start_vllm:
        services.wait_healthy("vllm", config.service_timeout)


def _module(name: str, url: str, *arguments: str) -> list[str]:
    from urllib.parse import urlsplit

    from trl_atropos.services import port_of

    host = urlsplit(url).hostname
    return [sys.executable, "-m", name, *arguments, "--host", host, "--port", str(port_of(url))]


def train(recipe) -> None:
    """Builds the trainer, trains, saves, and writes the run's summary."""
    from transformers import ProgressCallback
    from trl import get_peft_config, get_quantization_config

    from trl_atropos.report.progress import LineCallback
    from trl_atropos.report.summary import RecordingSource, closing_lines, draw_reward_curve, write_summary
    from trl_atropos.trainer import AtroposGRPOTrainer, source_of

    training, model = recipe.training, recipe.model
    stated = {"revision": model.model_revision, "attn_implementation": model.attn_implementation, "dtype": model.dtype}
    usual = {"revision": "main", "attn_implementation": None, "dtype": "float32"}
    stated = {name: value for name, value in stated.items() if value != usual[name]}
    training.model_init_kwargs = {**stated, **(training.model_init_kwargs or {})} or None
    recorded = RecordingSource(source_of(training))
    trainer = AtroposGRPOTrainer(
        model=model.model_name_or_path,
        args=training,
        rollout_source=recorded,
        peft_config=get_peft_config(model),
        quantization_config=get_quantization_config(model),
    )
    if not training.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(LineCallback)
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model(training.output_dir)
    trainer.create_model_card()
    if training.push_to_hub:
        trainer.push_to_hub()
    if trainer.accelerator.is_main_process:
        summary = write_summary(
            training.output_dir,
            recorded,
            trainer.state.global_step,
            trainer.policy_publisher.probe_max_abs_diff,
            time.monotonic() - STARTED,
        )
        if recorded.rewards:
            curve = draw_reward_curve(training.output_dir, recorded.rewards)
            lines = closing_lines(summary, recorded, trainer.processing_class.decode, curve)
            sys.stdout.write("\n".join(lines) + "\n")
    trainer.end()


def _checkpoint(training) -> str | None:
    """`resume_from_checkpoint: true` means the last whole one in `output_dir`; a folder means that one."""
    from trl_atropos.recipe import RecipeError

    asked = training.resume_from_checkpoint
    if asked is None or str(asked).lower() in ("false", "none", ""):
        return None
    path = _last_whole_checkpoint(training.output_dir) if str(asked).lower() == "true" else str(asked)
    if path is None or not os.path.isdir(path):
        raise RecipeError(
            f"`resume_from_checkpoint: {asked}`, but there is no checkpoint in {path or training.output_dir}. Leave "
            "it out to begin anew, or name a folder `checkpoint-N`."
        )
    return path


def _last_whole_checkpoint(output_dir: str) -> str | None:
    """Without those whose saving was interrupted: the trainer's state is what is written last."""
    import json
    from pathlib import Path

    folders = [path for path in Path(output_dir).glob("checkpoint-*") if path.name[11:].isdigit()]
    for folder in sorted(folders, key=lambda path: int(path.name[11:]), reverse=True):
        try:
            json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            _say(f"Passed over {folder}: its saving was interrupted.")
        else:
            return str(folder)
    return None


def _set_up_logging() -> None:
    import logging

    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("[trl_atropos] %(message)s"))
    logger = logging.getLogger("trl_atropos")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


def _say(message: str) -> None:
    sys.stderr.write(f"[trl_atropos] {message}\n")


def _say_error(message: str) -> None:
    from tqdm.auto import tqdm

    for bar in list(getattr(tqdm, "_instances", ())):
        bar.close()  # at exit it would be drawn once more, below the message
    sys.stdout.flush()
    sys.stderr.write(f"\ntrl_atropos: error: {message}\n")


if __name__ == "__main__":
    main()
