"""Finds before the first step whatever the saving of a checkpoint would refuse.

`recipe_checks.check_files` calls `require_writable` and `require_savable_generation` before a
run starts its servers. `AtroposGRPOTrainer` calls `require_savable` when it is built: it saves all
that is small into a folder that it removes again, and compares the tensors with the room on the
disk.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import GenerationConfig, PreTrainedModel
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import GENERATION_CONFIG_NAME
from trl import ModelConfig

from trl_atropos.distributed import together
from trl_atropos.errors import RecipeError
from trl_atropos.weights.gather import base_model
from trl_atropos.weights.masters import HALF, MasterOptimizer
from trl_atropos.weights.optimizer_state import TORCHS_OWN, state_bytes

GIB = 1 << 30
TRIAL = ".trial-save-"  # begins the name of the folder that is written to
PYTHON = "in Python, change `{}` before you pass the model to the trainer"


def require_writable(folder: str) -> None:
    """Makes the output folder. Raises `RecipeError` if nothing can be written there."""
    try:
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        what = f"`output_dir` is {folder!r}, where nothing can be written ({error.strerror})"
        raise RecipeError(
            what, f"output_dir: {folder}", "Set it to another folder.", "output-dir"
        ) from error


def require_savable_generation(model: ModelConfig) -> None:
    """Raises `RecipeError` if Transformers would not save the generation config that comes with the
    model."""
    name = model.model_name_or_path
    try:
        generation = GenerationConfig.from_pretrained(name, revision=model.model_revision)
    except OSError:  # it has none: one is made of the model's config
        return
    with tempfile.TemporaryDirectory() as folder:
        save_generation(generation, folder, name)


def require_savable(trainer: Any) -> None:
    """Saves the small parts of a checkpoint, and looks whether the rest has room. Called on every
    rank.

    Raises `RecipeError` if some part refuses to be saved, or if there is too little room on the
    disk.
    """
    together(lambda: _try_to_save(trainer))


def _try_to_save(trainer: Any) -> None:
    if not trainer.args.should_save:
        return
    folder = Path(trainer.args.output_dir)
    with tempfile.TemporaryDirectory(dir=folder, prefix=TRIAL) as trial:
        for what, save, fix in _small_parts(trainer, trial):
            _refuse_unsavable(what, save, fix)
    _require_room(trainer, folder)


def _small_parts(trainer: Any, folder: str) -> Iterator[tuple[str, Callable[[], Any], str]]:
    """Yields each small part of a checkpoint: its name, the call that saves it, and a fix if it
    refuses."""
    model = trainer.model
    if isinstance(model, PeftModel):
        for name, config in model.peft_config.items():
            yield (
                f"The configuration of the adapter {name!r}",
                partial(config.save_pretrained, folder),
                "Give the adapter a configuration whose values are plain numbers, texts and lists.",
            )
    # With `restart`, the adapter is merged into it.
    saves_base = not isinstance(model, PeftModel) or trainer.args.mode.restarts_engine
    if saves_base and isinstance(base_model(model), PreTrainedModel):
        yield from _parts_of_base(base_model(model), trainer.is_sharded, folder)
    if trainer.processing_class is not None:
        yield (
            "The tokenizer",
            lambda: trainer.processing_class.save_pretrained(folder),
            "Take a tokenizer that `save_pretrained` can write, or pass one as `processing_class`.",
        )
    yield (
        "The settings of the run",
        partial(torch.save, trainer.args, Path(folder, "training_args.bin")),
        "Leave out settings that are functions or open files, such as in `model_init_kwargs`.",
    )
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, ExportableState):
            yield (
                f"The state of the callback {type(callback).__name__}",
                partial(_dump_state, callback),
                "Have its `state()` return what JSON can hold, or leave the callback out.",
            )


def _parts_of_base(
    model: PreTrainedModel, is_sharded: bool, folder: str
) -> Iterator[tuple[str, Callable[[], Any], str]]:
    yield (
        "The model's config",
        partial(model.config.save_pretrained, folder),
        f"Correct the model's config.json, or {PYTHON.format('model.config')}.",
    )
    if model.can_generate():
        name = model.config.name_or_path
        yield "", partial(save_generation, model.generation_config, folder, name), ""
    if not is_sharded:
        yield (
            "Weights that share memory",
            partial(_check_tied_weights, model),
            "Give each parameter memory of its own, or name those that are one in "
            "`model._tied_weights_keys`.",
        )


def _dump_state(callback: ExportableState) -> None:
    json.dumps(callback.state())


def _check_tied_weights(model: PreTrainedModel) -> None:
    remove_tied_weights_from_state_dict(model.state_dict(), model)


def save_generation(generation: GenerationConfig, folder: str, name: str) -> None:
    """Raises `RecipeError` if Transformers refuses to save the generation config of the model
    `name`."""
    sampling = '`"do_sample": true`, or remove the entries that it names'
    place = str(Path(name, GENERATION_CONFIG_NAME))
    if Path(name).is_dir():
        fix = f"In {place}, set {sampling}"
    else:
        fix = (
            f"Download the model (`hf download {name} --local-dir FOLDER`), set {sampling} in its "
            f"{GENERATION_CONFIG_NAME}, and set `model_name_or_path: FOLDER`"
        )
    fix += f"; {PYTHON.format('model.generation_config')}. Training does not use it."
    save = partial(generation.save_pretrained, folder)
    _refuse_unsavable(f"The generation config {place}", save, fix)


def _refuse_unsavable(what: str, save: Callable[[], Any], fix: str) -> None:
    try:
        save()
    except RecipeError:
        raise
    # a tokenizer or a callback may bring its own code, which raises anything
    except Exception as error:
        reason = " ".join(str(error).split())
        raise RecipeError(f"{what} cannot be saved: {reason}", reason, fix, "unsavable") from error


def _require_room(trainer: Any, folder: Path) -> None:
    """Raises `RecipeError` if there is no room for one checkpoint, or for the model if no
    checkpoint is saved."""
    needed, state = checkpoint_bytes(trainer)
    subject = "the trained model"
    fix = "Make room, set `output_dir` to a larger disk"
    if trainer.args.save_strategy != "no":
        needed += state
        subject = "one checkpoint"
        fix += ", or save without the optimizer (`save_only_model: true`)"
    free = free_bytes(folder)
    if needed <= free:
        return
    what = f"There is too little room for {subject} on the disk of `output_dir`"
    seen = f"{needed / GIB:.1f} GiB needed, {free / GIB:.1f} free"
    raise RecipeError(what, seen, f"{fix}.", "disk")


def free_bytes(folder: Path) -> int:
    """Returns the free bytes of a folder's disk, and those of the checkpoints there, which may be
    replaced one by one."""
    free = shutil.disk_usage(folder).free
    for file in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*/**/*"):
        if file.is_file():
            free += file.stat().st_size
    return free


def checkpoint_bytes(trainer: Any) -> tuple[int, int]:
    """Returns the bytes of a checkpoint's weights, and of its masters and optimizer's state, if
    they are known."""
    args = trainer.args
    optim = args.optim.value
    parameters = list(trainer.model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    saved = trained if isinstance(trainer.model, PeftModel) else parameters
    weights = sum(_numel(parameter) * parameter.itemsize for parameter in saved)
    if args.save_only_model:
        return weights, 0
    state = 0
    has_masters = (trainer.optimizer_cls_and_kwargs or [None])[0] is MasterOptimizer
    in_16_bits = any(parameter.dtype in HALF for parameter in trained)
    if has_masters or (trainer.is_deepspeed_enabled and in_16_bits):
        state += 4 * sum(_numel(parameter) for parameter in trained)
    # Other optimizers than torch's own may keep less than the families that they are named after.
    if trainer.optimizer is None and optim in TORCHS_OWN and not trainer.is_sharded:
        state += state_bytes(optim, trained, has_masters, set())
    return weights, state


def _numel(parameter: torch.nn.Parameter) -> int:
    """Returns the number of values, of all ranks together if DeepSpeed divides them."""
    return getattr(parameter, "ds_numel", parameter.numel())
