"""The main job: starts the services that a recipe names, trains, saves, and stops what it started.

    accelerate launch --quiet --config_file configs/accelerate/cpu.yaml -m trl_atropos.train
    --config recipe.yaml

`main` runs in every process of the trainer. It handles signals and the death of the launcher from
the first line on, before anything heavy is imported.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from trl_atropos.activity import activity
from trl_atropos.logging import speak
from trl_atropos.privacy import close_to_others
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
RESTARTS = 3  # of an environment, and of the Atropos API, within an hour
MPS_TIMEOUT = 30.0  # seconds until the first process of NVIDIA's MPS has begun
# In a folder of its own, where no other program gets to it.
MPS_COMMAND = (
    "CUDA_MPS_PIPE_DIRECTORY=$TMPDIR CUDA_MPS_LOG_DIRECTORY=$TMPDIR exec nvidia-cuda-mps-control -f"
)
BEGIN_CUDA = """import ctypes
cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
result = cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
raise SystemExit(min(255, result))"""
# Parts of the errors by which gloo and NCCL report that another process is gone.
LOST_CONTACT = ("/gloo/", "Application timeout caused pair closure", "ncclRemoteError")

USAGE = "accelerate launch ... -m trl_atropos.train --config RECIPE [--SETTING VALUE ...]"
DESCRIPTION = """\
Trains by a recipe, a YAML file of `setting: value` lines: starts the services
that it names, trains, saves the model in `output_dir`, and stops what it
started. Overlays (`--overlay FILE`, several times) change settings of it; later
ones win, flags win over all.

  trl-atropos train recipes/quickstart/colocate.yaml --max_steps 100
  trl-atropos train my.yaml --num_processes 8 --resume_from_checkpoint true

runs accelerate's launcher, with its flags among the settings. The same by hand:

  accelerate launch -m trl_atropos.train --config my.yaml --max_steps 100

`trl-atropos check` takes the same command line, starts nothing, and says what
is wrong.
"""
EPILOG = """\
settings of TRL and Transformers:
  All of GRPOConfig, TrainingArguments and ModelConfig. Those that most runs
  set: model_name_or_path, output_dir, max_steps, per_device_train_batch_size,
  gradient_accumulation_steps, learning_rate, temperature, loss_type, beta,
  num_iterations, epsilon_high, max_completion_length, save_steps,
  logging_steps, log_completions, report_to, run_name, seed, bf16,
  gradient_checkpointing, use_peft, lora_r, lora_target_modules, push_to_hub,
  hub_model_id, resume_from_checkpoint. `--help_all` lists every one with its
  meaning.

environment variables:
  TRL_ATROPOS_VERBOSITY   debug, info (the default), warning, error or critical;
                          the setting `log_level` comes first
  TRL_ATROPOS_TOKEN       control token of an inference server that the run does
                          not start itself
  HF_HOME, HF_TOKEN, HF_HUB_OFFLINE, WANDB_MODE ...
                          as everywhere; the services of the run get them too

exit codes: 0 when the model is saved, 1 after an error, 130 after Ctrl-C,
143 after SIGTERM.
"""


def main() -> None:
    die_with_launcher()
    install_handlers()
    speak()
    stated = apply_recipe_environment(sys.argv[1:])
    warnings.showwarning = _show_warning
    if {"-h", "--help"} & set(sys.argv[1:]):
        return print_help()
    prepare_mps(stated)
    with activity("Importing PyTorch, Transformers and TRL"), without_vllm():
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
        _tell_how_to_go_on(recipe, f"Interrupted ({end.signum.name}).")
        raise
    except Exception as error:
        message = _message(error)
        if message is None:
            raise
        _print_error(message)
        _tell_how_to_go_on(recipe)
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


def prepare_mps(stated: Mapping[str, Any]) -> None:
    """Starts NVIDIA's Multi-Process Service if the `stated` settings have `mps: true`, and gives
    this process its place under it, below the server. Warns if CUDA has begun without it."""
    os.environ.setdefault("CUDA_MPS_CLIENT_PRIORITY", "1")
    if str(stated.get("mps")).lower() not in ("", "1", "t", "true", "y", "yes"):
        return
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        warnings.warn(
            "the run goes on without NVIDIA's MPS (`mps: true`): this program has used CUDA "
            "before. Start it again (in a notebook: restart the kernel), and use CUDA only after "
            "the run has begun",
            stacklevel=1,
        )
        return
    log_dir = os.path.join(str(stated.get("output_dir", "trainer_output")), "logs")
    start_mps(log_dir)


def start_mps(log_dir: str) -> None:
    """Starts NVIDIA's Multi-Process Service for this process and its services, unless one runs.

    It ends with this process. CUDA looks for it only once, when it begins, so this comes before.
    Warns if the service cannot be started, and the run goes on without it.
    """
    from trl_atropos.errors import ServiceError
    from trl_atropos.services.manager import MPS_FOLDER, Services, mps_runs

    if mps_runs():
        return
    services = Services(log_dir)
    variables = os.environ.copy()
    try:
        with activity("Starting NVIDIA's MPS"):
            _start_mps(services)
    except (ServiceError, OSError, subprocess.TimeoutExpired) as error:
        services.stop()
        os.environ.pop(MPS_FOLDER, None)
        os.environ.update(variables)
        warnings.warn(f"the run goes on without NVIDIA's MPS (`mps: true`): {error}", stacklevel=1)


def _start_mps(services: "Services") -> None:
    """Raises `ServiceError`, `OSError` or `TimeoutExpired` if CUDA does not begin under MPS."""
    from trl_atropos.errors import ServiceError
    from trl_atropos.services.manager import MPS_FOLDER, mps_runs, tail

    deadline = time.monotonic() + MPS_TIMEOUT
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1:
        what = "with several processes it must be started before the run, to outlive each of them"
        raise ServiceError(what, f"{processes} processes", "Run `nvidia-cuda-mps-control -d`.")
    service = services.start("mps", ["sh", "-c", MPS_COMMAND], scratch=True)
    os.environ[MPS_FOLDER] = service.scratch
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        # its processes count from 0 what it sees
        numbers = range(len(visible.split(",")))
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, numbers))
    while not mps_runs():
        if services.exit_code(service) is not None or time.monotonic() > deadline:
            raise ServiceError(
                f"it did not start. The end of {service.log_path}:\n{tail(service.log_path, 1)}"
            )
        time.sleep(0.05)
    begin = [sys.executable, "-I", "-S", "-c", BEGIN_CUDA]
    code = subprocess.run(begin, stderr=subprocess.DEVNULL, timeout=MPS_TIMEOUT).returncode
    if code:
        raise ServiceError(f"CUDA does not begin under it (error {code})")


def print_help(usage: str = USAGE) -> None:
    """Prints the settings that this package adds to TRL's, in groups. `--help_all` lists TRL's,
    too."""
    from trl_atropos.config import AtroposGRPOConfig, described
    from trl_atropos.recipe import ServicesConfig

    parser = argparse.ArgumentParser(
        usage=usage,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    for config in (ServicesConfig, AtroposGRPOConfig):
        defaults = {setting.name: setting.default for setting in fields(config)}
        for title, settings in groupby(described(config), key=itemgetter(0)):
            group = parser.add_argument_group(title)
            for _, name, text in settings:
                default = defaults[name]
                if default is not None:
                    # as in YAML
                    shown = str(default).lower() if isinstance(default, bool) else default
                    text += f" Default: {shown}."
                group.add_argument(f"--{name}", metavar="", help=text.replace("%", "%%"))
    parser.print_help()


def _show_warning(message: Warning | str, *where: Any) -> None:
    """Prints a warning above the progress bar, without the line of code that warns."""
    from tqdm.auto import tqdm

    with contextlib.suppress(OSError):  # as Python's own
        tqdm.write(fitted(f"warning: {message}"), file=sys.stderr)


def _print_error(message: str) -> None:
    _close_progress_bars()
    sys.stderr.write(fitted(f"\ntrl_atropos: error: {message}\n"))


def _close_progress_bars() -> None:
    """Closes them before a last message: at exit they would be drawn once more, below it."""
    from tqdm.auto import tqdm

    for bar in list(getattr(tqdm, "_instances", ())):
        bar.close()
    sys.stdout.flush()


def _tell_how_to_go_on(recipe: "Recipe | None", reason: str = "") -> None:
    """Says what a run has saved before it was interrupted, or ended by an error, and how to go on.
    Says nothing if an error ended it before its first checkpoint."""
    if os.environ.get("RANK", "0") != "0":
        return
    saved = None if recipe is None else _last_checkpoint(recipe)
    if saved is not None:
        told = (
            f"The last checkpoint is {saved}, of {recipe.training.max_steps} steps: the same "
            "command with `--resume_from_checkpoint true` goes on there."
        )
    elif reason:
        told = "Nothing is saved: there was no checkpoint yet (`save_steps`)."
    else:
        return
    _close_progress_bars()
    message = f"{reason} {told}".lstrip()
    sys.stderr.write(fitted(f"\ntrl_atropos: {message}\n"))


def _last_checkpoint(recipe: "Recipe") -> str | None:
    """Returns the folder of the last checkpoint that is whole, or `None`."""
    from trl_atropos.weights.checkpoint import checkpoint_folders, state_of

    last = None
    for _step, folder in checkpoint_folders(recipe.training.output_dir):
        if state_of(folder) is not None:
            last = str(folder)
    return last


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error, the one that it was raised from, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _message(error: Exception) -> str | None:
    """Returns the message for the person who started the run, or `None` for an error that was not
    written for people."""
    from trl_atropos.errors import AtroposTrainingError, ServerTimeout

    # The error of a service that died may be wrapped by the library that was at work then.
    errors = [cause for cause in _chain(error) if isinstance(cause, AtroposTrainingError)]
    if not errors:
        return _lost_contact(error)
    for cause in errors:
        if isinstance(cause, ServerTimeout):  # a server that hangs ends because its trainer does
            return str(cause)
    return str(errors[0])


def _lost_contact(error: Exception) -> str | None:
    """Returns the message for an error that means that another process of the trainer is gone, or
    `None` for any other."""
    from torch.distributed import DistNetworkError, DistStoreError

    for cause in _chain(error):
        is_network_error = isinstance(cause, DistNetworkError | DistStoreError)
        if isinstance(cause, RuntimeError):
            is_network_error |= any(text in str(cause) for text in LOST_CONTACT)
        if is_network_error:
            reason = " ".join(str(cause).split()).split(". ")[0].rstrip(".")
            return (
                "Another process of this trainer, on this machine or on another one, has ended or "
                f"cannot be reached any more ({reason}). Look at the output of all machines for "
                "the first error, then start the run again on all of them, with "
                "`--resume_from_checkpoint true` if it has saved a checkpoint."
            )
    return None


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


def start_services(
    recipe: "Recipe", services: "Services", evaluator: "Evaluator | None" = None
) -> None:
    """Starts the API, the server, the environments and evaluations, and waits until the first two
    are healthy."""
    from trl_atropos.errors import RolloutError
    from trl_atropos.protocol import TOKEN_VARIABLE
    from trl_atropos.rollouts.api import AtroposClient
    from trl_atropos.services.manager import ATROPOS, ENVIRONMENT

    config = recipe.services
    atropos = recipe.training.atropos_url
    require_room(recipe)
    if config.start_atropos:
        services.start(
            ATROPOS,
            _module("trl_atropos.rollouts.api", atropos),
            env={TOKEN_VARIABLE: ""},  # which it need not know
            health_url=f"{atropos}/",
            restarts=RESTARTS,
            scratch=True,
        )
    names = start_servers(
        recipe, services, recipe.training.vllm_mode, recipe.model.model_name_or_path
    )
    if config.start_atropos:
        services.wait_healthy(ATROPOS, config.service_timeout)
    # before the environments register there, which would end without their place
    elif recipe.training.reset_atropos:
        # the trainer waits for the API, and says what is wrong
        with contextlib.suppress(RolloutError), activity(f"Resetting the Atropos API at {atropos}"):
            AtroposClient(atropos, config.service_timeout, config.service_timeout).reset()
    # Environments load while the server starts. They sample nothing before the trainer asks for a
    # first batch, and evaluations not before they are told to.
    for spec in recipe.environments:
        recipe.write_environment_file(spec)
        services.start(
            f"{ENVIRONMENT}{spec.name}",
            recipe.environment_command(spec),
            env=spec.variables(),
            cwd=spec.cwd,
            restarts=RESTARTS,
            scratch=True,
        )
    if evaluator is not None:
        evaluator.prepare()
    for name in names:
        services.wait_healthy(name, config.service_timeout)


def start_servers(recipe: "Recipe", services: "Services", mode: str, model: str) -> list[str]:
    """Starts the inference servers of a recipe that starts any. Returns the names of the
    services."""
    from trl_atropos.protocol import TOKEN_VARIABLE, keep_token

    if not recipe.services.start_vllm:
        return []
    training = recipe.training
    urls = training.vllm_server_urls
    names = ["vllm"]
    if len(urls) > 1:
        names = [f"vllm-{index}" for index in range(len(urls))]
    token = control_token()
    keep_token(token)
    flags = ["--vllm_mode", mode, "--seed", str(training.seed), *recipe.vllm_flags()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    for index, (name, url) in enumerate(zip(names, urls, strict=True)):
        command = [*_module("trl_atropos.server.launch", url, model), *flags]
        env = {TOKEN_VARIABLE: token}
        if training.mode.shares_memory and len(urls) > 1:
            # each process trains where its server is
            device = visible.split(",")[index] if visible else str(index)
            env["CUDA_VISIBLE_DEVICES"] = device
        services.start(name, command, env=env, health_url=f"{url}/health", scratch=True)
    return names


def control_token() -> str:
    """Returns the control token of this process, or a new one."""
    import secrets

    from trl_atropos.protocol import environment_token

    return environment_token() or secrets.token_urlsafe(24)


def require_room(recipe: "Recipe") -> None:
    """Raises `ServiceError` if a service that is to be started finds no port, sockets or shared
    memory."""
    from trl_atropos.flags import parallel
    from trl_atropos.services.manager import (
        require_free_port,
        require_shared_memory,
        require_sockets,
    )

    fix = "Stop what runs there, set `{}` to a free port, or use it with `{}: false`."
    if recipe.services.start_vllm:
        require_sockets()
        require_shared_memory(parallel(recipe.vllm_flags())[0])
        for url in recipe.training.vllm_server_urls:
            require_free_port(
                url, "the vLLM server", fix.format("vllm_server_base_url", "start_vllm")
            )
    if recipe.services.start_atropos:
        url = recipe.training.atropos_url
        require_free_port(url, "the Atropos API", fix.format("atropos_url", "start_atropos"))


def _module(name: str, url: str, *arguments: str) -> list[str]:
    """Returns the command that runs a module as the server at `url`, whose port is free."""
    place = urlsplit(url)
    address = ["--host", place.hostname, "--port", str(place.port)]
    return [sys.executable, "-m", name, *arguments, *address]


def train(
    recipe: "Recipe",
    services: "Services",
    evaluator: "Evaluator | None",
    callbacks: Sequence["TrainerCallback"] = (),
) -> "AtroposGRPOTrainer":
    """Builds the trainer, trains, saves, and writes the run's summary. Returns the trainer."""
    with activity("Importing the trainer"), without_vllm():
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
