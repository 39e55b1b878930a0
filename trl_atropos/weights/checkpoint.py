"""Writes a checkpoint to its end or not at all, and loads the one that a run resumes from.

`AtroposGRPOTrainer` saves with `save_whole`. On a resume, `trl_atropos.train` calls `require_whole`
before anything that takes long. Then the trainer calls `load_weights` or `load_adapters`, and loads
the optimizer's state within `optimizer_resumed`.
"""

import errno
import json
import logging
import os
import shutil
import tempfile
import textwrap
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from peft import (
    AutoPeftModelForCausalLM,
    PeftConfig,
    PeftModel,
    get_peft_model_state_dict,
    load_peft_weights,
    set_peft_model_state_dict,
)
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import AutoTokenizer, PreTrainedModel
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import ADAPTER_CONFIG_NAME, ADAPTER_SAFE_WEIGHTS_NAME, ADAPTER_WEIGHTS_NAME

from trl_atropos.activity import activity, written
from trl_atropos.distributed import on_main, together
from trl_atropos.errors import CheckpointError, SaveError
from trl_atropos.weights.adapters import trained_adapter
from trl_atropos.weights.gather import iter_adapter_parameters, unwrap
from trl_atropos.weights.masters import MasterOptimizer
from trl_atropos.weights.savable import save_generation

logger = logging.getLogger(__name__)

ANOTHER = "Resume from another checkpoint (`resume_from_checkpoint`)."
TORCH_WRITES = "PytorchStreamWriter"  # in torch's errors about a file that it writes
PEFT_DEFAULT = "default"  # the adapter that PEFT saves in the folder itself, and others below it
# Settings of an adapter that change what the same tensors compute.
SCALING = ("peft_type", "lora_alpha", "alpha_pattern", "alpha", "scaling", "use_rslora", "use_dora")
# entries of an optimizer's groups that are set by a run's settings, and the names of those
SETTINGS = {
    "initial_lr": "learning_rate",
    "weight_decay": "weight_decay",
    "betas": "adam_beta1, adam_beta2",
    "eps": "adam_epsilon",
}


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
    if _sharded(folder):
        return
    for lacking, other in ((OPTIMIZER_NAME, SCHEDULER_NAME), (SCHEDULER_NAME, OPTIMIZER_NAME)):
        if (folder / other).exists() and not (folder / lacking).exists():
            what = f"{folder} has {other}, but no {lacking}: it was damaged"
            raise CheckpointError(what, other, ANOTHER, "checkpoint")


def _sharded(folder: Path) -> bool:
    """Returns whether DeepSpeed or FSDP saved the checkpoint: they keep the optimizer's state in
    folders."""
    folders = [path for path in folder.iterdir() if path.is_dir()]
    return any(not (path / ADAPTER_CONFIG_NAME).exists() for path in folders)


def require_same_weights(checkpoint: str | Path, adapter: bool) -> None:
    """Raises `CheckpointError` if a run that trains an adapter resumes from a whole model, or the
    other way round."""
    folder = Path(checkpoint)
    of_adapter = bool(adapters_in(folder))
    of_model = any(folder.glob("model*.safetensors"))
    if of_adapter in (of_model, adapter):
        return
    saved = "an adapter"
    trained = "the whole model"
    fix = "Set `use_peft: true` and the adapter's settings"
    if adapter:
        saved = "a whole model"
        trained = "an adapter"
        fix = "Leave `use_peft` out"
    what = f"The checkpoint in {folder} is of {saved}, and this run trains {trained}"
    fix += " as in the run that saved it, or leave `resume_from_checkpoint` out to begin anew."
    raise CheckpointError(what, seen=saved, fix=fix, code="checkpoint")


def groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Returns the optimizer's groups without their parameters: the learning rate and other
    hyperparameters."""
    groups = []
    for group in optimizer.param_groups:
        group = dict(group)
        del group["params"]
        groups.append(group)
    return groups


@contextmanager
def optimizer_resumed(
    trainer: Any, checkpoint: str | Path, fresh: Sequence[Mapping[str, Any]]
) -> Iterator[None]:
    """Puts the settings of this run in force, after the state of optimizer and schedule was loaded
    within.

    The state brings the settings of the run that saved it. `fresh` are `groups_of` the optimizer
    before. Raises `CheckpointError` if the state is that of another optimizer or model.
    """
    try:
        yield
        has_state = _sharded(Path(checkpoint)) or Path(checkpoint, OPTIMIZER_NAME).exists()
        if trainer.is_world_process_zero() and not has_state:
            message = (
                "%s holds no state of the optimizer and its schedule (`save_only_model: "
                "true`): both begin anew."
            )
            logger.warning(message, checkpoint)
        optimizer = trainer.optimizer.optimizer  # within accelerate's
        if isinstance(optimizer, MasterOptimizer):
            optimizer = optimizer.inner
        # Torch takes the state of any optimizer for its own. A newer version of one optimizer only
        # adds entries.
        for fresh_group, loaded_group in zip(fresh, groups_of(optimizer), strict=True):
            lacking = sorted(fresh_group.keys() - loaded_group.keys())
            foreign = sorted(loaded_group.keys() - fresh_group.keys())
            if lacking and foreign:
                raise ValueError(f"it has {', '.join(foreign)} in place of {', '.join(lacking)}")
    except (KeyError, ValueError) as error:
        raise CheckpointError(
            f"The optimizer's state in {checkpoint} is not that of `optim: "
            f"{trainer.args.optim.value}` on this model ({error}). Resume with the `optim` and the "
            "trained parameters of the run that saved it, or begin anew with it as "
            "`model_name_or_path`, without `resume_from_checkpoint`."
        ) from error
    _put_in_force(fresh, trainer.optimizer, trainer.lr_scheduler, trainer.args.optim_args or "")


def _put_in_force(
    fresh: Sequence[Mapping[str, Any]],
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler,
    optim_args: str,
) -> None:
    """Replaces the hyperparameters that the state brought by those of this run's settings, and of
    its `optim_args`."""
    stated = {part.split("=")[0].strip() for part in optim_args.split(",")}
    stated |= SETTINGS.keys()
    changed = {}  # setting -> its value in the checkpoint, and now
    for fresh_group, group in zip(fresh, optimizer.param_groups, strict=True):
        for name in stated & fresh_group.keys() & group.keys():
            if fresh_group[name] != group[name]:
                setting = SETTINGS.get(name, name)
                changed.setdefault(setting, (group[name], fresh_group[name]))
                group[name] = fresh_group[name]
    if isinstance(scheduler, LambdaLR):
        scheduler.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
        rates = []
        for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
            rates.append(base * factor(scheduler.last_epoch))
        scheduler._last_lr = rates
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
    elif "learning_rate" in changed:
        saved, value = changed["learning_rate"]
        raise CheckpointError(
            f"`learning_rate: {value}`, but the checkpoint was saved with {saved}, from which a "
            f"{type(scheduler).__name__} goes on. Set `learning_rate: {saved}`, or another "
            "`lr_scheduler_type`."
        )
    for name, (saved, value) in changed.items():
        logger.info("Resuming with %s %s in place of the checkpoint's %s.", name, value, saved)


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
            f"{_named(lacking)}. It is of another model, or was damaged. {ANOTHER}"
        )
    model.load_state_dict(saved.state_dict())


def _named(names: Sequence[str]) -> str:
    """Returns the first three names, and how many more there are."""
    text = ", ".join(names[:3])
    if len(names) > 3:
        text += f" and {len(names) - 3} more"
    return text


# ----------------------------------------------------------------------------------------- adapters


def adapters_in(checkpoint: str | Path) -> list[str]:
    """Returns the names of the adapters that a checkpoint holds."""
    names = [PEFT_DEFAULT]
    for path in sorted(Path(checkpoint).iterdir()):
        if path.is_dir():
            names.append(path.name)
    return [
        name for name in names if (adapter_folder(checkpoint, name) / ADAPTER_CONFIG_NAME).exists()
    ]


def adapter_folder(checkpoint: str | Path, name: str) -> Path:
    """Returns the folder to which `PeftModel.save_pretrained` writes an adapter."""
    if name == PEFT_DEFAULT:
        return Path(checkpoint)
    return Path(checkpoint, name)


@torch.no_grad()
def load_adapters(model: PeftModel, checkpoint: str) -> None:
    """
    Loads every adapter of the model by its name, in place: parameters stay where they are, on any
    device, in any dtype. Nothing is written unless all adapters fit.

    As soon as a folder below the checkpoint holds an adapter (TRL's reference, `ref`),
    Transformers' own trainer reads those folders only. It passes over `default`, which is trained
    and lies in the checkpoint itself.

    Raises:
        CheckpointError: An adapter is missing, or is another one than the model's. Or after the
            load, a tensor of the model is not that of the file, bit for bit in the model's dtype.
    """
    saved = {name: _read_adapter(model, name, checkpoint) for name in model.peft_config}
    for name, tensors in saved.items():
        places = _places(model, name, tensors)
        _require_equal_names(places, tensors, name, checkpoint)
    for name, tensors in saved.items():
        _write_adapter(model, name, tensors)
        for key, place in _places(model, name, tensors).items():
            if not _equal_in(place, tensors[key]):
                raise CheckpointError(
                    f"After loading the adapter {name!r} from {checkpoint}, {key} is not what the "
                    f"file holds: an adapter of type {model.peft_config[name].peft_type.value} "
                    "cannot be resumed. Begin anew from it, without `resume_from_checkpoint`."
                )
    further = sorted(set(adapters_in(checkpoint)) - saved.keys())
    if further:
        message = "%s also holds adapters that this model does not have: %s."
        logger.info(message, checkpoint, ", ".join(further))


def _equal_in(place: torch.Tensor, saved: torch.Tensor) -> bool:
    """Returns whether a saved tensor is that of the model, in the model's dtype."""
    return torch.equal(place, saved.to(device=place.device, dtype=place.dtype))


def require_adapter_loaded(
    model: torch.nn.Module, accelerator: Accelerator, checkpoint: str
) -> None:
    """Raises `CheckpointError`, on every rank, unless the trained adapter is that of the
    checkpoint, bit for bit.

    DeepSpeed and FSDP load it by themselves, from files of their own, and pass over names that they
    do not find.
    """
    name = trained_adapter(unwrap(model))
    file = adapter_folder(checkpoint, name) / ADAPTER_SAFE_WEIGHTS_NAME
    if not file.exists():  # FSDP may save shards alone
        return
    with weight_errors(checkpoint):
        saved = load_file(file)
    different = []
    # to the end, because all ranks gather
    for key, tensor in iter_adapter_parameters(model, accelerator):
        if key not in saved or not _equal_in(tensor, saved[key]):
            different.append(key)
    if different:
        raise CheckpointError(
            f"After loading the checkpoint in {checkpoint}, {len(different)} tensors of the "
            f"adapter {name!r} are not those of its file: {_named(different)}. Resume with the "
            "adapter and sharding of the run that saved it."
        )


def _read_adapter(model: PeftModel, name: str, checkpoint: str) -> dict[str, torch.Tensor]:
    """Returns the saved tensors of an adapter by PEFT's names, on the CPU."""
    folder = adapter_folder(checkpoint, name)
    files = [folder / file for file in (ADAPTER_SAFE_WEIGHTS_NAME, ADAPTER_WEIGHTS_NAME)]
    if not any(file.exists() for file in files):
        names = ", ".join(adapters_in(checkpoint)) or "none"
        raise CheckpointError(
            f"The checkpoint in {checkpoint} lacks the adapter {name!r} of this model: {files[0]} "
            "is not there",
            seen=f"adapters in the checkpoint: {names}",
            fix="Give the model the adapters of the run that saved it, under the same names, and "
            "the same `beta` (above 0, TRL adds the adapter `ref` to a `PeftModel`).",
            code="checkpoint",
        )
    with weight_errors(checkpoint):
        saved_config = vars(PeftConfig.from_pretrained(str(folder)))
        tensors = load_peft_weights(str(folder), device="cpu")
    config = vars(model.peft_config[name])
    for field in SCALING:
        saved = saved_config.get(field)
        value = config.get(field)
        if (saved or None) != (value or None):  # a pattern may be empty or absent
            raise CheckpointError(
                f"The adapter {name!r} in {checkpoint} was saved with `{field}: {saved}`, and "
                f"this run has `{field}: {value}`: the same tensors would be another policy. "
                "Resume with the saved value, or begin anew from the adapter, without "
                "`resume_from_checkpoint`."
            )
    return tensors


def _places(
    model: PeftModel, name: str, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Returns the model's own tensors of an adapter, by the names that PEFT saves them under."""
    state = model.state_dict(keep_vars=True)
    places = get_peft_model_state_dict(model, state, name, save_embedding_layers=False)
    # PEFT also saves embeddings that an adapter is on, or that were resized.
    with_embeddings = get_peft_model_state_dict(model, state, name, save_embedding_layers=True)
    embeddings = with_embeddings.keys() - places.keys()
    if embeddings & tensors.keys():
        return with_embeddings
    return places


def _require_equal_names(
    places: Mapping[str, torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    name: str,
    checkpoint: str,
) -> None:
    """Raises `CheckpointError` unless the model and the file have tensors of the same names and
    shapes."""
    reshaped = []
    for key in sorted(places.keys() & tensors.keys()):
        saved_shape = list(tensors[key].shape)
        own_shape = list(places[key].shape)
        if saved_shape != own_shape:
            reshaped.append(f"{key} ({saved_shape} there, {own_shape} here)")
    problems = {
        f"lacks tensors of the adapter {name!r}": sorted(places.keys() - tensors.keys()),
        f"has tensors for the adapter {name!r} that this model does not have": sorted(
            tensors.keys() - places.keys()
        ),
        f"has the adapter {name!r} in other shapes": reshaped,
    }
    for problem, keys in problems.items():
        if keys:
            raise CheckpointError(
                f"The checkpoint in {checkpoint} {problem}: {_named(keys)}. "
                "Resume with the base model, target modules and ranks of the run that saved it."
            )


def _write_adapter(model: PeftModel, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
    places = _places(model, name, tensors)
    own_ids = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    if all(id(place) in own_ids for place in places.values()):
        for key, place in places.items():
            place.copy_(tensors[key])
    else:  # PEFT computes what it saves, for example of prompts
        set_peft_model_state_dict(model, dict(tensors), name)
