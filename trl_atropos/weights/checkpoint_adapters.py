"""Loads the adapters of the checkpoint that a run resumes from, and compares them with its files.

`training/saving.py` calls this.
"""

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from accelerate import Accelerator
from peft import (
    PeftConfig,
    PeftModel,
    get_peft_model_state_dict,
    load_peft_weights,
    set_peft_model_state_dict,
)
from safetensors.torch import load_file
from transformers.utils import ADAPTER_CONFIG_NAME, ADAPTER_SAFE_WEIGHTS_NAME, ADAPTER_WEIGHTS_NAME

from trl_atropos.errors import CheckpointError
from trl_atropos.weights.adapters import trained_adapter
from trl_atropos.weights.checkpoint import named, weight_errors
from trl_atropos.weights.gather import iter_adapter_parameters, unwrap

logger = logging.getLogger(__name__)

PEFT_DEFAULT = "default"  # the adapter that PEFT saves in the folder itself, and others below it
# Settings of an adapter that change what the same tensors compute.
SCALING = ("peft_type", "lora_alpha", "alpha_pattern", "alpha", "scaling", "use_rslora", "use_dora")


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
            f"adapter {name!r} are not those of its file: {named(different)}. Resume with the "
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
                f"The checkpoint in {checkpoint} {problem}: {named(keys)}. "
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
