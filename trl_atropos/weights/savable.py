"""Whatever the saving of a checkpoint would refuse is found before the first step.

`trl_atropos.recipe.check_files` calls `require_writable` and `require_savable_generation` before a
run starts its servers. `AtroposGRPOTrainer` calls `require_savable` when it is built: it saves all
that is small into a folder that it removes again, and compares the tensors with the room on the
disk.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
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
from trl_atropos.weights.masters import HALF, TORCHS_OWN, MasterOptimizer, state_bytes

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
    """Saves what is small of a checkpoint, and looks whether the rest has room. Called on every
    rank. Raises `RecipeError` if some part refuses to be saved, or if there is too little room on
    the disk."""
    together(lambda: _try_to_save(trainer) if trainer.args.should_save else None)


def _try_to_save(trainer: Any) -> None:
    folder = Path(trainer.args.output_dir)
    with tempfile.TemporaryDirectory(dir=folder, prefix=TRIAL) as trial:
        for what, save, fix in _small_parts(trainer, trial):
            _refuse_unsavable(what, save, fix)
    _require_room(trainer, folder)


def _small_parts(trainer: Any, folder: str) -> Iterator[tuple[str, Callable[[], Any], str]]:
    """Yields each small part of a checkpoint: what it is called, how it is saved, and what to do if
    it refuses."""
    model = trainer.model
    policy = base_model(trainer.model)
    if isinstance(model, PeftModel):
        for name, config in model.peft_config.items():
            fix = (
                "Give the adapter a configuration whose values are plain numbers, texts and lists."
            )
            yield (
                f"The configuration of the adapter {name!r}",
                lambda one=config: one.save_pretrained(folder),
                fix,
            )
    # which merges the adapter
    whole = not isinstance(model, PeftModel) or trainer.args.vllm_mode == "restart"
    if whole and isinstance(policy, PreTrainedModel):
        fix = f"Correct the model's config.json, or {PYTHON.format('model.config')}."
        yield "The model's config", lambda: policy.config.save_pretrained(folder), fix
        if policy.can_generate():
            name = policy.config.name_or_path
            yield "", lambda: save_generation(policy.generation_config, folder, name), ""
        if not trainer.is_sharded:
            fix = (
                "Give each parameter memory of its own, or name those that are one in "
                "`model._tied_weights_keys`."
            )
            check = remove_tied_weights_from_state_dict
            yield "Weights that share memory", lambda: check(policy.state_dict(), policy), fix
    if trainer.processing_class is not None:
        fix = (
            "Take a tokenizer that `save_pretrained` can write, or pass one as `processing_class`."
        )
        yield "The tokenizer", lambda: trainer.processing_class.save_pretrained(folder), fix
    fix = "Leave out settings that are functions or open files, such as in `model_init_kwargs`."
    yield (
        "The settings of the run",
        lambda: torch.save(trainer.args, Path(folder, "training_args.bin")),
        fix,
    )
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, ExportableState):
            fix = "Have its `state()` return what JSON can hold, or leave the callback out."
            what = f"The state of the callback {type(callback).__name__}"
            yield what, lambda one=callback: json.dumps(one.state()), fix


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
        )
        fix += f"{GENERATION_CONFIG_NAME}, and set `model_name_or_path: FOLDER`"
    fix += f"; {PYTHON.format('model.generation_config')}. Training does not use it."
    _refuse_unsavable(
        f"The generation config {place}", lambda: generation.save_pretrained(folder), fix
    )


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
    weights, rest = checkpoint_bytes(trainer)
    saves = trainer.args.save_strategy != "no"
    needed = weights + (rest if saves else 0)
    # Those that are there may be replaced one by one.
    there = sum(
        file.stat().st_size
        for file in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*/**/*")
        if file.is_file()
    )
    free = shutil.disk_usage(folder).free + there
    if needed <= free:
        return
    kind = "one checkpoint" if saves else "the trained model"
    what = f"There is too little room for {kind} on the disk of `output_dir`"
    fix = "Make room, set `output_dir` to a larger disk"
    fix += ", or save without the optimizer (`save_only_model: true`)." if saves else "."
    raise RecipeError(what, f"{needed / GIB:.1f} GiB needed, {free / GIB:.1f} free", fix, "disk")


def checkpoint_bytes(trainer: Any) -> tuple[int, int]:
    """Returns the bytes of a checkpoint's weights, and of its masters and optimizer's state, if
    they are known."""
    args = trainer.args
    model = trainer.model
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    kept = trained if isinstance(model, PeftModel) else parameters
    weights = sum(_numel(parameter) * parameter.itemsize for parameter in kept)
    if args.save_only_model:
        return weights, 0
    has_masters = (trainer.optimizer_cls_and_kwargs or [None])[0] is MasterOptimizer
    own = trainer.is_deepspeed_enabled and any(parameter.dtype in HALF for parameter in trained)
    masters = 4 * sum(map(_numel, trained)) if has_masters or own else 0
    # Others than torch's own may keep less than the families that they are named after.
    known = trainer.optimizer is None and args.optim.value in TORCHS_OWN and not trainer.is_sharded
    state = state_bytes(args.optim.value, trained, has_masters, set()) if known else 0
    return weights, masters + state


def _numel(parameter: torch.nn.Parameter) -> int:
    """Returns the number of values, all ranks' together where DeepSpeed divides them."""
    return getattr(parameter, "ds_numel", parameter.numel())
