"""Runs `trl-atropos train`: accelerate's launcher, on `trl_atropos.train`."""

import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

from trl_atropos.activity import importing
from trl_atropos.commands.words import command_parser, divide, require_words, with_recipe
from trl_atropos.flags import stated_settings
from trl_atropos.privacy import close_to_others
from trl_atropos.terminal import fitted


def train(words: list[str]) -> None:
    """Runs accelerate's launcher in this process, on `trl_atropos.train`. Exits with its code, or
    130 after Ctrl-C. Unlike `accelerate launch`, it waits until the trainer has cleaned up."""
    from trl_atropos.run_messages import print_help
    from trl_atropos.train import apply_recipe_environment

    arguments = "RECIPE [accelerate's flags] [--SETTING VALUE ...]"
    require_words(command_parser("train", arguments), words)
    if {"-h", "--help"} & set(words):
        print_help(f"trl-atropos train {arguments}")
        sys.exit(0)
    # The terminal sends them to the trainer, too, and this process waits for that.
    interrupts: list[int] = []

    def note_interrupt(signum: int, _frame: object) -> None:
        interrupts.append(signum)

    signal.signal(signal.SIGINT, note_interrupt)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
    stated = apply_recipe_environment(with_recipe(words))
    if _names_agents(stated):
        close_to_others()
    with importing("accelerate's launcher"):
        from accelerate.commands.launch import launch_command, launch_command_parser
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    launcher, settings = divide(words)
    settings = with_recipe(settings)
    launcher += _defaults(launcher, settings)
    options = [*launcher, "--quiet", "--module", "trl_atropos.train", *settings]
    try:
        launch_command(launch_command_parser().parse_args(options))
    except (ValueError, FileNotFoundError) as error:  # how accelerate refuses its flags
        sys.exit(fitted(f"trl-atropos train: {error}"))
    except SignalException as error:
        sys.exit(128 + error.sigval)
    except ChildFailedError:  # which has said why
        sys.exit(130 if interrupts else 1)
    except SystemExit:
        if interrupts:
            sys.exit(130)
        raise


def _names_agents(stated: Mapping[str, Any]) -> bool:
    """Returns whether settings, as they are written, have entries such as `agent`. See
    `Recipe.runs_agents`."""
    from trl_atropos.environment_entry import EnvironmentSpec

    entries = []
    for setting in ("environments", "evaluations"):
        value = stated.get(setting)
        if isinstance(value, list):
            entries += value
    return any(
        isinstance(entry, dict) and entry.keys() & EnvironmentSpec.KINDS for entry in entries
    )


def _defaults(launcher: list[str], settings: list[str]) -> list[str]:
    """Returns flags for what accelerate would warn of, or guess, without a configuration: one
    process, on the first GPU or the CPU."""
    from accelerate.commands.config import default_config_file

    stated = set()
    for word in launcher:
        if word.startswith("-"):
            stated.add(word.partition("=")[0].replace("-", "_").lstrip("_"))
    if "config_file" in stated or os.path.isfile(default_config_file):
        return []
    usual = {"num_machines": ["1"], "mixed_precision": ["no"], "dynamo_backend": ["no"]}
    if not stated & {"num_processes", "multi_gpu", "use_deepspeed", "use_fsdp"}:
        usual["num_processes"] = ["1"]
        usual |= _usual_device(settings)
    flags = []
    for name, values in usual.items():
        if name not in stated:
            flags += [f"--{name}", *values]
    return flags


def _usual_device(settings: list[str]) -> dict[str, list[str]]:
    """Returns the flags, with their values, by which one process uses the first GPU, or the CPU if
    there is none or the settings say so."""
    import psutil
    import torch

    wants_cpu = str(stated_settings(settings).get("use_cpu")).lower() == "true"
    if not wants_cpu and torch.cuda.is_available():
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
        return {"gpu_ids": gpus[:1]}
    # Accelerate takes as many threads, and says so in a warning.
    cores = psutil.cpu_count(logical=False) or 1
    threads = os.environ.get("OMP_NUM_THREADS", str(cores))
    return {"cpu": [], "num_cpu_threads_per_process": [threads]}
