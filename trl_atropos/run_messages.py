"""Prints what a run tells the person who started it: the help, warnings, errors, and how to go on.

Nothing heavy is imported before it is needed: `--help` and an early Ctrl-C are answered at once.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import fields
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from trl_atropos.terminal import fitted

if TYPE_CHECKING:
    from trl_atropos.recipe import Recipe

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


def show_warning(message: Warning | str, *where: Any) -> None:
    """Prints a warning above the progress bar, without the line of code that warns."""
    from tqdm.auto import tqdm

    with contextlib.suppress(OSError):  # as Python's own
        tqdm.write(fitted(f"warning: {message}"), file=sys.stderr)


def print_error(message: str) -> None:
    _close_progress_bars()
    sys.stderr.write(fitted(f"\ntrl_atropos: error: {message}\n"))


def _close_progress_bars() -> None:
    """Closes them before a last message: at exit they would be drawn once more, below it."""
    from tqdm.auto import tqdm

    for bar in list(getattr(tqdm, "_instances", ())):
        bar.close()
    sys.stdout.flush()


def tell_how_to_go_on(recipe: "Recipe | None", reason: str = "") -> None:
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


def message_of(error: Exception) -> str | None:
    """Returns the message for the person who started the run, or `None` for an error that was not
    written for people."""
    from trl_atropos.errors import AtroposTrainingError, ServerTimeout

    # The error of a service that died may be wrapped by the library that was at work then.
    errors = [cause for cause in _chain(error) if isinstance(cause, AtroposTrainingError)]
    if not errors:
        return lost_contact(error)
    for cause in errors:
        if isinstance(cause, ServerTimeout):  # a server that hangs ends because its trainer does
            return str(cause)
    return str(errors[0])


def lost_contact(error: Exception) -> str | None:
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
