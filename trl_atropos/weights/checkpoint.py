"""Writes a checkpoint to its end or not at all, and loads the one that a run resumes from.

`AtroposGRPOTrainer` saves with `save_whole`. On a resume, `trl_atropos.train` calls `require_whole`
before anything that takes long. Then the trainer calls `load_weights`. Adapters and the optimizer
are resumed by `checkpoint_adapters.py` and `checkpoint_optimizer.py`.
"""

import errno
import json
import logging
import os
import shutil
import tempfile
import textwrap
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import AutoPeftModelForCausalLM
from safetensors import SafetensorError
from transformers import AutoTokenizer, PreTrainedModel
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import ADAPTER_CONFIG_NAME

from trl_atropos.activity import activity, written
from trl_atropos.distributed import on_main, together
from trl_atropos.errors import CheckpointError, SaveError
from trl_atropos.weights.savable import save_generation

logger = logging.getLogger(__name__)

ANOTHER = "Resume from another checkpoint (`resume_from_checkpoint`)."
TORCH_WRITES = "PytorchStreamWriter"  # in torch's errors about a file that it writes


def save_whole(trainer: Any, write: Callable[[], None]) -> None:
    """Calls `write`, which saves a checkpoint, on every rank. An error or Ctrl-C leaves nothing
    half written."""
    name = f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
    folder = Path(trainer._get_output_dir(None), name)
    on_main(lambda: shutil.rmtree(folder, ignore_errors=True))  # of an earlier life of the run
    write = disk_errors(folder, "The checkpoint")(write)
    try:
        with activity(f"Saving {folder}", detail=partial(written, folder)):
            if trainer.is_sharded:
                write()  # in which ranks wait for each other already
            else:
                together(write)
    except BaseException:  # also Ctrl-C
        if state_of(folder) is None:
            shutil.rmtree(folder, ignore_errors=True)
        raise


@contextmanager
def disk_errors(folder: str | Path, what: str) -> Iterator[None]:
    """Raises `SaveError`, with the reason, if the operating system refuses to write `what` to
    `folder` within."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = _refusal(folder, error)
        if reason is None:
            raise
        raise SaveError(
            f"{what} could not be written to {folder}: {reason}. The checkpoints before it are "
            "whole. Make room (or lower `save_total_limit`), or let this user write there, and "
            "resume."
        ) from error


def _refusal(folder: str | Path, error: Exception) -> str | None:
    """Returns why the disk takes no more, `None` if it does. Torch only says "file write failed":
    then we write a file to learn the reason."""
    if isinstance(error, OSError):
        return _reason(error)
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())  # a network disk tells of a quota only now
    except OSError as refusal:
        return _reason(refusal)
    if isinstance(error, SafetensorError) or TORCH_WRITES in str(error):
        return str(error)
    return None


def _reason(error: OSError) -> str:
    reason = error.strerror or str(error)
    if error.errno == errno.EDQUOT:  # the disk itself has room
        reason += ": this user's share of the disk is used up, as `quota -s` shows"
    return reason


def state_of(checkpoint: str | Path) -> dict[str, Any] | None:
    """Returns the trainer's state, which is written last and so proves that the checkpoint is
    complete. Returns `None` if the checkpoint was not written to its end."""
    try:
        return json.loads(Path(checkpoint, TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def step_of(checkpoint: str | None) -> int:
    """Returns the optimizer steps that made a checkpoint; 0 for a model without a trainer's
    state."""
    if checkpoint is None:
        return 0
    state = state_of(checkpoint)
    if state is None:
        return 0
    return state["global_step"]


def merged_model(model: str, folder: str) -> str:
    """Returns `model`. If it is the folder of an adapter, merges it into its base, saves that in
    `folder`, and returns `folder`."""
    if not Path(model, ADAPTER_CONFIG_NAME).exists():
        return model
    merged = AutoPeftModelForCausalLM.from_pretrained(model, dtype="auto").merge_and_unload()
    save_generation(merged.generation_config, folder, merged.config.name_or_path)
    merged.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def whole_checkpoints(output_dir: str) -> list[int]:
    """Returns the steps of the checkpoints in `output_dir` whose saving was not interrupted."""
    steps = []
    for step, folder in checkpoint_folders(output_dir):
        if state_of(folder) is None:
            logger.warning("Passed over %s: its saving was interrupted.", folder)
        else:
            steps.append(step)
    return steps


def checkpoint_folders(output_dir: str) -> list[tuple[int, Path]]:
    """Returns the steps and folders of all checkpoints, whole or not, in the order of their
    steps."""
    folders = []
    for folder in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        step = folder.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
        if step.isdigit() and folder.is_dir():
            folders.append((int(step), folder))
    return sorted(folders)


def require_whole(checkpoint: str | Path) -> None:
    """Raises `CheckpointError` if a file to resume from is torn or missing. Reads only the ends of
    files.

    A file that you add to checkpoints must be written before `trainer_state.json`, which proves
    that all others are there (`state_of`). So do not write it after Transformers' own
    `_save_checkpoint`, which ends with that file.
    """
    folder = Path(checkpoint)
    if not folder.is_dir():
        what = f"There is no checkpoint in {folder}, which is no folder"
        raise CheckpointError(what, str(folder), "Check `resume_from_checkpoint`.", "checkpoint")
    for path in sorted([*folder.rglob("*.pt"), *folder.rglob("*.pth")]):
        try:
            # torch writes archives, which end with their table of contents
            zipfile.ZipFile(path).close()
        except (OSError, zipfile.BadZipFile) as error:
            what = f"{path} cannot be read ({error}): it was damaged, or not written to the end"
            raise CheckpointError(what, str(path), ANOTHER, "checkpoint") from error
    if is_sharded(folder):
        return
    for lacking, other in ((OPTIMIZER_NAME, SCHEDULER_NAME), (SCHEDULER_NAME, OPTIMIZER_NAME)):
        if (folder / other).exists() and not (folder / lacking).exists():
            what = f"{folder} has {other}, but no {lacking}: it was damaged"
            raise CheckpointError(what, other, ANOTHER, "checkpoint")


def is_sharded(folder: Path) -> bool:
    """Returns whether DeepSpeed or FSDP saved the checkpoint: they keep the optimizer's state in
    folders."""
    folders = [path for path in folder.iterdir() if path.is_dir()]
    return any(not (path / ADAPTER_CONFIG_NAME).exists() for path in folders)


@contextmanager
def weight_errors(checkpoint: str | Path) -> Iterator[None]:
    """Raises `CheckpointError` if weights that are loaded within cannot be read, or do not fit the
    model."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"The weights of the checkpoint in {checkpoint} cannot be read into this model "
            f"({textwrap.shorten(str(error), 300)}). It was damaged, or saved with another model "
            f"or adapter. {ANOTHER}"
        ) from error


@torch.no_grad()
def load_weights(model: PreTrainedModel, folder: str) -> None:
    """
    Loads what `save_pretrained` has written, in place: parameters stay where they are, on any
    device, in any dtype.

    Transformers' own trainer passes over names in the files that the modules do not have. Some
    families are saved under other names (GPT-NeoX' head, Mixtral's experts), and would go on with
    the weights that the model began with.
    """
    with weight_errors(folder):
        saved, info = type(model).from_pretrained(
            folder,
            config=model.config,
            local_files_only=True,
            # It holds every dtype that is trained, and `load_state_dict` copies into that.
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    lacking = [*info["missing_keys"], *info["mismatched_keys"]]
    lacking = sorted(map(str, lacking))
    if lacking:
        raise CheckpointError(
            f"The checkpoint in {folder} lacks weights of the model, or has them in other shapes: "
            f"{named(lacking)}. It is of another model, or was damaged. {ANOTHER}"
        )
    model.load_state_dict(saved.state_dict())


def named(names: Sequence[str]) -> str:
    """Returns the first three names, and how many more there are."""
    text = ", ".join(names[:3])
    if len(names) > 3:
        text += f" and {len(names) - 3} more"
    return text
