"""Which parameters a trainer's model has, under the names that they have in the plain model, and with which adapters.

Comes in: the model as the trainer wrapped it. Goes out: parameters, still sharded, in the order of the plain model.
`gather.py` calls this and makes them whole.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from accelerate.utils import extract_model_from_parallel
from peft import PeftModel, PeftType, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch.distributed.fsdp import FSDPModule

from trl_atropos.errors import GatherError

# Modules that activation checkpointing and torch.compile put around others: no part of a checkpoint's names.
TRANSPARENT = ("_checkpoint_wrapped_module", "_orig_mod")


@dataclass(frozen=True)
class Unit:
    """What is gathered at once: one parameter, or all of a layer with an adapter."""

    entries: list[tuple[str, torch.nn.Parameter]]
    layer: LoraLayer | None

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for _, parameter in self.entries]


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The Hugging Face or PEFT model inside of DDP's, DeepSpeed's and the compiler's wrappers."""
    model = extract_model_from_parallel(model, keep_torch_compile=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a forward without a backward leaves the last modules whole, in the dtype of the compute
    return model


def units_of(model: torch.nn.Module) -> list[Unit]:
    """All parameters of the plain model, in its order, tied ones once."""
    if isinstance(model, PeftModel):
        _check_adapters(model)
        model = model.get_base_model()
    if getattr(model, "is_quantized", False):  # only models that went through a quantiser have the attribute
        raise GatherError(
            "The model is quantised, and merging an adapter into quantised weights rounds them to other weights than "
            "those that are trained. Load the model without quantisation (`quantization_config`, `load_in_4bit`)."
        )
    found = [
        (prefix + leaf, parameter, layer)
        for prefix, module, layer in _walk(model)
        for leaf, parameter in module.named_parameters(recurse=False)
    ]
    _check_ties(model, {name: (parameter, layer) for name, parameter, layer in found})
    units: list[Unit] = []
    seen: set[int] = set()
    for name, parameter, layer in found:
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        if layer is None or not units or units[-1].layer is not layer:
            units.append(Unit([], layer))
        units[-1].entries.append((name, parameter))
    return units


def buffers_of(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """
    What a checkpoint of the plain model holds beside its parameters, such as the bias by which DeepSeek's and GLM's
    routers balance their experts. No optimizer trains it, and every rank has it whole.
    """
    model = unwrap(model)
    plain = model.get_base_model() if isinstance(model, PeftModel) else model
    return [
        (prefix + leaf, buffer)
        for prefix, module, _ in _walk(plain)
        for leaf, buffer in module.named_buffers(recurse=False)
        if leaf not in module._non_persistent_buffers_set
    ]


def _walk(
    module: torch.nn.Module, name: str = "", layer: LoraLayer | None = None
) -> Iterator[tuple[str, torch.nn.Module, LoraLayer | None]]:
    """Every module in use: the prefix of its tensors' names in the plain model, and the outermost adapted layer."""
    if isinstance(module, LoraLayer):
        yield from _walk(module.base_layer, name, layer or module)
        return
    if isinstance(module, ModulesToSaveWrapper):
        active = [adapter for adapter in module.active_adapters if adapter in module.modules_to_save]
        yield from _walk(module.modules_to_save[active[0]] if active else module.original_module, name, layer)
        return
    if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
        raise GatherError(
            f"{name!r} is trained by PEFT's {type(module).__name__}, which cannot be merged for a server. Use LoRA "
            "with `target_modules` and `modules_to_save` only (no `trainable_token_indices`)."
        )
    prefix = f"{name}." if name else ""
    yield prefix, module, layer
    for child_name, child in module.named_children():
        yield from _walk(child, name if child_name in TRANSPARENT else prefix + child_name, layer)


def _check_adapters(model: PeftModel) -> None:
    for adapter_name, config in model.peft_config.items():
        if config.peft_type != PeftType.LORA:
            raise GatherError(
                f"The adapter {adapter_name!r} is of the type {config.peft_type.value}, which cannot be merged for a "
                "server. Use LoRA (`peft.LoraConfig`)."
            )


def _check_ties(model: torch.nn.Module, used: dict[str, tuple[torch.nn.Parameter, LoraLayer | None]]) -> None:
    """A server holds one tensor for a tied pair: an adapter on one side would make them two."""
    for target, source in model.all_tied_weights_keys.items():
        if target in used and source in used and any(a is not b for a, b in zip(used[target], used[source])):
            raise GatherError(
                f"{target!r} and {source!r} are one tensor in the checkpoint, but the adapter trains one of them "
                f"alone. Remove {source.split('.')[-2]!r} from the adapter's modules, or train it whole and tied: "
                f"`modules_to_save=[{source.split('.')[-2]!r}]` with `ensure_weight_tying=True`."
            )


def adapter_entries(model: PeftModel, adapter_name: str) -> list[tuple[str, torch.nn.Parameter]]:
    """The adapter's parameters under the names of PEFT's checkpoints."""
    whole = [name for name, module in model.named_modules() if isinstance(module, ModulesToSaveWrapper)]
    if whole:
        raise GatherError(
            f"Besides the adapter, {whole[0]!r} is trained as a whole (`modules_to_save`), and would be missing where "
            "only the adapter is sent. Send merged weights, or remove `modules_to_save`."
        )
    parameters = dict(model.named_parameters(remove_duplicate=False))
    # PEFT selects and renames; the values pass through untouched. Embeddings of the base model are not the adapter.
    chosen = get_peft_model_state_dict(model, parameters, adapter_name, save_embedding_layers=False)
    return [(_without_wrappers(name), parameter) for name, parameter in chosen.items()]


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in TRANSPARENT)
