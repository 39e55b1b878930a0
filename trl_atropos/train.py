"""The main job: starts the services a recipe names, trains, saves, and stops only what it started.

    accelerate launch --quiet --config_file configs/accelerate/cpu.yaml -m trl_atropos.train --config recipe.yaml

Signals and the death of the launcher are handled from the first line on, before anything heavy is imported.
"""

import contextlib
import os
import sys
import tempfile
import time
import warnings

from trl_atropos.services.signals import die_with_launcher, install_handlers, interrupt_main_with

STARTED = time.monotonic()
DYING_SECONDS = 5.0  # between a server's first failed answer and its last process
LOST_CONTACT = ("/gloo/", "Application timeout caused pair closure", "ncclRemoteError")  # in errors of gloo and NCCL


def main() -> None:
    die_with_launcher()
    install_handlers()
    apply_recipe_environment(sys.argv[1:])
    warnings.showwarning = _show_warning
    if {"-h", "--help"} & set(sys.argv[1:]):
        from trl_atropos.train_help import print_help

        return print_help()
    with without_vllm():
        from trl_atropos.recipe import parse

    try:
        run(parse(["--help" if word == "--help_all" else word for word in sys.argv[1:]]))
    except Exception as error:
        message = _message(error)
        if message is None:
            raise
        _say_error(message)
        sys.exit(1)


@contextlib.contextmanager
def without_vllm():
    """
    TRL imports vLLM where it is installed, warns of its version, and sets the level of its log. In here it finds none:
    a rank does without, 8 seconds of a CPU and 150 MB sooner, because its engines are other processes.
    """
    hidden = "vllm" not in sys.modules
    if hidden:
        sys.modules["vllm"] = None  # type: ignore[assignment] - Python's way to say that there is no such module
    try:
        yield
    finally:
        if hidden:
            del sys.modules["vllm"]


def _show_warning(message: Warning | str, *where) -> None:
    """In plain words: not the line of code that warns, and above the progress bar."""
    from tqdm.auto import tqdm

    with contextlib.suppress(OSError):  # as Python's own
        tqdm.write(f"warning: {message}", file=sys.stderr)


def _chain(error: BaseException | None):
    """The error and everything that led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _message(error: Exception) -> str | None:
    """What to tell the person who started the run; `None` of an error that was not written for people."""
    from trl_atropos.errors import AtroposTrainingError, ServerTimeout

    # A service may die while some library is at work, which then wraps the error that was raised in its midst.
    told = [e for e in _chain(error) if isinstance(e, AtroposTrainingError)]
    # A server that hangs loses its trainer and then leaves: that it ended is a consequence.
    told.sort(key=lambda e: not isinstance(e, ServerTimeout))
    return str(told[0]) if told else _lost_contact(error)


def _lost_contact(error: Exception) -> str | None:
    """What to say of an error that means that another process of the trainer is gone; `None` of any other."""
    from torch.distributed import DistNetworkError, DistStoreError

    for one in _chain(error):
        by_text = isinstance(one, RuntimeError) and any(text in str(one) for text in LOST_CONTACT)
        if by_text or isinstance(one, DistNetworkError | DistStoreError):
            return (
                "Another process of this trainer, on this machine or on another one, has ended or cannot be reached "
                f"any more ({_first_sentence(one)}). If it says why, that comes first: look at the output of all "
                "machines. Then start the run again on all of them, with `--resume_from_checkpoint true` if it has "
                "saved a checkpoint."
            )
    return None


def apply_recipe_environment(argv: list[str]) -> None:
    """Sets the variables under `env:` of the recipe now: torch and huggingface_hub read theirs on import."""
    import yaml

    from trl_atropos.flags import values_of

    for path in values_of("--config", argv)[0]:
        if os.path.isfile(path):
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

    from trl_atropos import distributed as ranks
    from trl_atropos.errors import AttachError, ServerError, ServerTimeout
    from trl_atropos.output_lock import locked
    from trl_atropos.report.card import make_repository
    from trl_atropos.services.manager import Services

    _set_up_logging(recipe.training)
    _heed_ddp_timeout(recipe.training)
    check_files(recipe)
    ranks.together(lambda: check_reports(recipe.training))
    if recipe.training.push_to_hub:
        ranks.on_main(lambda: make_repository(recipe.training))
    services = Services(os.path.join(recipe.training.output_dir, "logs"))
    with ranks.held_on_main(lambda: locked(recipe.training.output_dir)), services:
        if recipe.training.replay_paths is None:
            ranks.on_main(lambda: start_services(recipe, services))
        if PartialState().is_main_process:
            from trl_atropos.supervision import Disconnector

            services.watch(interrupt_main_with, Disconnector(services, recipe.training.atropos_url).ended)
        try:
            train(recipe, services)
        except ServerError as error:
            if not isinstance(error, AttachError | ServerTimeout):
                services.await_death(DYING_SECONDS)  # if it is a service that dies, its name and log say more
            raise


def _heed_ddp_timeout(training) -> None:
    """Transformers sees to it on GPUs only."""
    from torch import distributed

    if training.use_cpu and distributed.is_initialized():
        distributed.distributed_c10d._set_pg_timeout(training.ddp_timeout_delta)


def check_files(recipe) -> None:
    """What a run reads and writes, before it starts anything that takes long. What one rank lacks ends all of them."""
    from trl_atropos import distributed as ranks
    from trl_atropos.protocol import environment_token

    environment_token()  # raises if no header can carry it
    ranks.together(lambda: _check_folder_and_model(recipe))
    recipe.training.resume_from_checkpoint = checkpoint = _checkpoint(recipe.training)
    if checkpoint is not None:
        from trl_atropos.weights.checkpoint import require_same_weights, require_whole

        ranks.together(lambda: require_whole(checkpoint))
        ranks.together(lambda: require_same_weights(checkpoint, recipe.model.use_peft))


def _check_folder_and_model(recipe) -> None:
    from transformers import AutoConfig

    from trl_atropos.errors import RecipeError

    model, folder = recipe.model, recipe.training.output_dir
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RecipeError(
            f"`output_dir` is {folder!r}, where nothing can be written ({error.strerror})",
            seen=f"output_dir: {folder}",
            fix="Set it to another folder.",
            code="output-dir",
        ) from error
    try:
        loaded = AutoConfig.from_pretrained(
            model.model_name_or_path,
            revision=model.model_revision,
            trust_remote_code=recipe.training.trust_remote_code,
        )
    except (OSError, ValueError) as error:  # not there, or of an architecture that transformers does not know
        raise RecipeError(
            f"The model {model.model_name_or_path!r} cannot be loaded: {_first_sentence(error)}",
            seen=f"model_name_or_path: {model.model_name_or_path}",
            fix="Set `model_name_or_path` to a folder with a config.json (the quickstart's is made by `python "
            "recipes/quickstart/make_model.py FOLDER`), or to a Hub name that this machine can download or has "
            "cached.",
            code="model",
        ) from error
    problem = _why_not_trained(loaded, model, recipe.training.trust_remote_code)
    if problem is not None:
        what = f"The model {model.model_name_or_path!r} cannot be trained: {problem[0]}"
        raise RecipeError(what, seen=f"model_name_or_path: {model.model_name_or_path}", fix=problem[1], code="model")


def _why_not_trained(config, model, trusted: bool) -> tuple[str, str] | None:
    """Why the trainer cannot train the model of this configuration, and what to do. `None`: it can."""
    quantised = getattr(config, "quantization_config", None)  # only quantised checkpoints have one
    if config.is_encoder_decoder:
        return (
            f"{config.model_type} has an encoder, and rollouts are for a decoder alone",
            "Take a causal language model.",
        )
    if quantised is not None and not model.use_peft:
        return (
            f"its weights are quantised ({quantised.get('quant_method', '4 or 8 bits')}), and take no gradient",
            "Take the checkpoint that it was made from, or train an adapter beside them (`use_peft: true`).",
        )
    if not config.architectures:
        return "its config.json names no architecture", 'Add `"architectures"`, such as ["Qwen3ForCausalLM"].'
    return _missing_class(config, model.model_name_or_path, model.model_revision, trusted)


def _missing_class(config, name: str, revision: str | None, trusted: bool) -> tuple[str, str] | None:
    import transformers
    from transformers.dynamic_module_utils import get_class_from_dynamic_module
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known = hasattr(transformers, config.architectures[0])
    code = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")  # a class that the checkpoint brings
    try:
        if code is not None and trusted and not known:
            get_class_from_dynamic_module(code, name, revision=revision)
            return None
    except (ImportError, OSError, ValueError, AttributeError) as error:
        return (
            f"the code that comes with it does not run with transformers {transformers.__version__} "
            f"({_first_sentence(error)})",
            "Take a model whose class transformers has.",
        )
    try:
        if known and config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            transformers.AutoProcessor.from_pretrained(name, revision=revision)  # TRL's trainer needs that of images
    except (ImportError, OSError, ValueError) as error:
        return (
            f"transformers has no causal language model for {config.model_type}, and no processor of images is with "
            f"it ({_first_sentence(error)})",
            "Take the whole checkpoint, or one of the language model alone.",
        )
    return None


def _first_sentence(error: Exception) -> str:
    return " ".join(str(error).split()).split(". ")[0].rstrip(".")


def check_reports(training) -> None:
    """Raises `RecipeError` if what `report_to` names is not there. The trainer is made only when the server is up."""
    from transformers.integrations import get_reporting_integration_callbacks

    from trl_atropos.errors import RecipeError

    try:
        for callback in get_reporting_integration_callbacks(training.report_to):
            callback()
    except (ImportError, RuntimeError, ValueError) as error:
        reports = ", ".join(training.report_to)
        raise RecipeError(
            f"`report_to` is {training.report_to}: {error}",
            seen=f"report_to: {reports}",
            fix="Or set `report_to: none`.",
            code="report-to",
        ) from error


def start_services(recipe, services) -> None:
    """Starts the API, the server and the environments, and waits until the first two are healthy."""
    import secrets

    from trl_atropos.protocol import TOKEN_VARIABLE, environment_token
    from trl_atropos.services.manager import ATROPOS, ENVIRONMENT
    from trl_atropos.supervision import variables_of_environment

    training, config = recipe.training, recipe.services
    atropos, servers = training.atropos_url, training.vllm_server_urls
    require_room(recipe)
    if config.start_atropos:
        command, again = _module("atroposlib.cli.run_api", atropos), config.restart_environments
        services.start(ATROPOS, command, health_url=f"{atropos}/", restarts=again, scratch=True)
    names = ["vllm"] if len(servers) == 1 else [f"vllm-{index}" for index in range(len(servers))]
    if config.start_vllm:
        os.environ[TOKEN_VARIABLE] = environment_token() or secrets.token_urlsafe(24)
        flags = ["--vllm_mode", training.vllm_mode, "--seed", str(training.seed), *recipe.vllm_flags()]
        for index, (name, url) in enumerate(zip(names, servers, strict=True)):
            command = [*_module("trl_atropos.server.launch", url, recipe.model.model_name_or_path), *flags]
            # With `colocate`, each process trains on its own device, and its server is there.
            shares = training.vllm_mode == "colocate" and len(servers) > 1
            env = {"CUDA_VISIBLE_DEVICES": _device(index)} if shares else {}
            services.start(name, command, env=env, health_url=f"{url}/health", scratch=True)
    if config.start_atropos:
        services.wait_healthy(ATROPOS, config.service_timeout)
    # Environments load while the server starts. They sample nothing before the trainer asks for a first batch.
    hidden = {TOKEN_VARIABLE: ""}
    for spec in recipe.environments:
        env = variables_of_environment({**hidden, **{name: str(value) for name, value in spec.env.items()}})
        recipe.write_environment_file(spec)
        command, again = recipe.environment_command(spec), config.restart_environments
        services.start(f"{ENVIRONMENT}{spec.name}", command, env=env, cwd=spec.cwd, restarts=again, scratch=True)
    for name in names if config.start_vllm else []:
        services.wait_healthy(name, config.service_timeout)


def require_room(recipe) -> None:
    """Raises `ServiceError` if a service that is to be started finds no port, sockets or shared memory."""
    from trl_atropos.flags import parallel
    from trl_atropos.services.manager import require_free_port, require_shared_memory, require_sockets

    training, config = recipe.training, recipe.services
    if config.start_vllm:
        require_sockets()
        require_shared_memory(parallel(recipe.vllm_flags())[0])
    if config.start_atropos:
        fix = "Stop what runs there, set `atropos_url` to a free port, or use it with `start_atropos: false`."
        require_free_port(training.atropos_url, "the Atropos API", fix)
    fix = "Stop what runs there, set `vllm_server_base_url` to a free port, or use it with `start_vllm: false`."
    for url in training.vllm_server_urls if config.start_vllm else []:
        require_free_port(url, "the vLLM server", fix)


def _device(index: int) -> str:
    """What `CUDA_VISIBLE_DEVICES` calls the device of the process `index` of this machine."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[index] if visible else str(index)


def _module(name: str, url: str, *arguments: str) -> list[str]:
    from urllib.parse import urlsplit

    from trl_atropos.services.manager import port_of

    host = urlsplit(url).hostname
    return [sys.executable, "-m", name, *arguments, "--host", host, "--port", str(port_of(url))]


def train(recipe, services) -> None:
    """Builds the trainer, trains, saves, and writes the run's summary."""
    from dataclasses import asdict

    with without_vllm():
        from trl import get_peft_config, get_quantization_config

        from trl_atropos.trainer import AtroposGRPOTrainer, source_of
    from trl_atropos.errors import PushError
    from trl_atropos.report.summary import CURVE, closing_lines, draw_reward_curve, write_summary
    from trl_atropos.supervision import Supervisor
    from trl_atropos.weights.checkpoint import disk_errors

    training, model = recipe.training, recipe.model
    stated = {"revision": model.model_revision, "attn_implementation": model.attn_implementation, "dtype": model.dtype}
    usual = {"revision": "main", "attn_implementation": None, "dtype": "float32"}
    stated = {name: value for name, value in stated.items() if value != usual[name]}
    training.model_init_kwargs = {**stated, **(training.model_init_kwargs or {})} or None
    trainer = AtroposGRPOTrainer(
        model=model.model_name_or_path,
        args=training,
        rollout_source=source_of(training, Supervisor(services, interrupt_main_with)),
        peft_config=get_peft_config(model),
        quantization_config=get_quantization_config(model),
    )
    trainer.run_log.model = asdict(model)
    trainer.environment_commands = {spec.name: spec.line for spec in recipe.environments}
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    not_pushed = None
    with disk_errors(training.output_dir, "The model"):
        if training.push_to_hub:
            try:
                trainer.push_to_hub()  # saves, and writes the card, before
            except PushError as error:
                not_pushed = error
        else:
            trainer.save_model(training.output_dir)
            trainer.create_model_card()
    if trainer.accelerator.is_main_process:
        summary = write_summary(
            training.output_dir,
            trainer.run_log,
            trainer.state.global_step,
            trainer.policy_publisher.probe_max_abs_diff,
            time.monotonic() - STARTED,
        )
        if trainer.run_log.rewards:
            curve = os.path.join(training.output_dir, CURVE)
            if sum("reward" in entry for entry in trainer.state.log_history) < 2:  # of which the card draws none
                draw_reward_curve(training.output_dir, trainer.run_log.rewards)
            replayed = training.replay_paths is not None
            lines = closing_lines(summary, trainer.run_log, trainer.processing_class.decode, curve, replayed)
            lines.append(f"All of it on one page: trl-atropos report {training.output_dir}")
            sys.stdout.write("\n".join(lines) + "\n")
    if not_pushed is not None:
        raise not_pushed
    trainer.accelerator.end_training()


def _checkpoint(training) -> str | None:
    """
    `resume_from_checkpoint: true` means the last one in `output_dir` that is whole, on every machine if each has an
    `output_dir` of its own; a folder means that one.
    """
    from accelerate.utils import gather_object

    from trl_atropos import distributed as ranks
    from trl_atropos.errors import RecipeError

    asked = training.resume_from_checkpoint
    if asked is None or str(asked).lower() in ("false", "none", ""):
        return None
    path = str(asked)
    if path.lower() == "true":
        steps = set.intersection(*gather_object([set(whole_checkpoints(training.output_dir))]))
        path = os.path.join(training.output_dir, f"checkpoint-{max(steps)}") if steps else ""

    def require() -> None:
        if not os.path.isdir(path):
            raise RecipeError(
                f"`resume_from_checkpoint: {asked}`, but there is no checkpoint in {path or training.output_dir}",
                seen=f"resume_from_checkpoint: {asked}",
                fix="Leave it out to begin anew, or name a folder `checkpoint-N`. On several machines, all must see "
                "it: put `output_dir` on a file system that they share, or train with `save_on_each_node: true`.",
                code="checkpoint",
            )

    ranks.together(require)
    return path


def whole_checkpoints(output_dir: str) -> list[int]:
    """Steps of those whose saving was not interrupted: the trainer's state is what is written last."""
    from pathlib import Path

    from trl_atropos.weights.checkpoint import has_state

    steps = []
    for folder in Path(output_dir).glob("checkpoint-*"):
        if not folder.name[11:].isdigit():
            continue
        if has_state(folder):
            steps.append(int(folder.name[11:]))
        else:
            _say(f"Passed over {folder}: its saving was interrupted.")
    return steps


def _set_up_logging(training) -> None:
    """The recipe's `log_level` comes before the environment's `TRL_ATROPOS_VERBOSITY`, as with transformers'."""
    from transformers.utils.logging import disable_progress_bar

    from trl_atropos import logging

    if not sys.stderr.isatty():
        disable_progress_bar()
    logging.disable_propagation()
    if training.log_level != "passive":
        logging.set_verbosity(training.get_process_log_level())
    else:
        asked = logging.verbosity_of_environment()  # the recipe's `env`, too, which came after the import
        logging.set_verbosity(logging.INFO if asked is None else asked)


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
