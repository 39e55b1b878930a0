"""Whole parameters out of a trainer that may be sharded and may have adapters, one layer at a time.

Comes in: the trainer's model, wrapped or not, as it is now (references taken before training began go stale). Goes
out: (name, whole tensor) in the order of the plain model, on every rank, for one process, DDP, ZeRO-1 to 3 and FSDP2,
and LoRA over each of them. The transfers that move weights to a server call this.

Gathering is a collective: every rank iterates, to the end, also those that send nothing, and a rank whose server has
died drains the rest. Between two items nothing is gathered and nothing is merged but the tensor that was handed out,
so an iterator may be closed or abandoned anywhere, as long as all ranks do. Merging happens in copies, so the model's
own tensors are never written. A consumer that drops a tensor before it asks for the next has one layer in memory
beyond the shards, or two while adapters are being merged into it.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import extract_model_from_parallel
from peft import PeftModel, PeftType, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from trl_atropos.errors import GatherError
from trl_atropos.protocol import ParameterSpec

ADAPTER = "default"  # peft's name of the adapter that TRL trains
# Modules that activation checkpointing and torch.compile put around others: no part of a checkpoint's names.
TRANSPARENT = ("_checkpoint_wrapped_module", "_orig_mod")


class Sharding(StrEnum):
    """How a trainer's parameters lie over its processes."""

    NONE = "none"
    DDP = "ddp"
    ZERO12 = "zero1/2"  # optimizer states and gradients are sharded, parameters are whole
    ZERO3 = "zero3"
    FSDP2 = "fsdp2"


WHOLE = (Sharding.NONE, Sharding.DDP, Sharding.ZERO12)
"""Where each rank has all parameters, so that what `iter_*_parameters` yields are the parameters themselves."""


@dataclass(frozen=True)
class Unit:
    """What is gathered at once: one parameter, or all of a layer with an adapter."""

    entries: list[tuple[str, torch.nn.Parameter]]
    layer: LoraLayer | None

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for _, parameter in self.entries]


def sharding_of(accelerator: Accelerator) -> Sharding:
    """How the parameters lie over the processes. Raises `GatherError` where whole ones cannot be had."""
    kind = accelerator.distributed_type
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise GatherError(
            "The trainer is sharded with FSDP version 1, whose root parameters cannot be reached by name before the "
            "first forward pass. Use FSDP2: set `fsdp_version: 2` in the configuration of `accelerate launch`, or "
            "`version: 2` in `fsdp_config`."
        )
    if kind in (DistributedType.MEGATRON_LM, DistributedType.XLA):
        raise GatherError(
            f"The trainer is distributed by {kind.value}, from which weights cannot be sent to a server: use DDP, "
            "DeepSpeed or FSDP2."
        )
    if kind == DistributedType.DEEPSPEED:
        return Sharding.ZERO3 if accelerator.state.deepspeed_plugin.zero_stage == 3 else Sharding.ZERO12
    if kind == DistributedType.FSDP:
        return Sharding.FSDP2
    return Sharding.NONE if kind == DistributedType.NO else Sharding.DDP


def iter_full_parameters(
    model: torch.nn.Module, accelerator: Accelerator, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """
    Every parameter whole, on the training device, under its name in the plain model; tied ones once.

    Adapters are merged and have no names of their own. To be exhausted on every rank (see the top of this file); the
    tensors may be the model's own memory, so they are for reading, and before the next optimizer step.

    Args:
        model: The trainer's model, wrapped or not.
        accelerator: The trainer's accelerator.
        dtype: To convert to what has the model's own dtype, as most parameters have. What transformers keeps in
            another one (ERNIE's routers, in float32) stays as it is. `None` converts nothing.

    Raises `GatherError`, before anything is gathered, for FSDP1, quantised models, adapters other than LoRA, and
    adapters on one side of a pair of tied weights.
    """
    sharding, units = sharding_of(accelerator), units_of(unwrap(model))
    return _stream(units, sharding, accelerator.device, _conversions(units, dtype))


def iter_adapter_parameters(model: torch.nn.Module, accelerator: Accelerator) -> Iterator[tuple[str, torch.Tensor]]:
    """
    The adapter's tensors whole, under the names of PEFT's checkpoints (`base_model.model.X.lora_A.weight`).

    As with `iter_full_parameters`, to be exhausted on every rank. Raises `GatherError` if whole modules are trained
    besides the adapter (`modules_to_save`), which would be missing.
    """
    sharding, entries = sharding_of(accelerator), _adapter_entries(unwrap(model))
    return _stream([Unit([entry], None) for entry in entries], sharding, accelerator.device, {})


def shapes_of(
    model: torch.nn.Module, accelerator: Accelerator, dtype: torch.dtype | None = None
) -> list[ParameterSpec]:
    """What `iter_full_parameters` yields, in its order: names, whole shapes and dtypes. Gathers nothing."""
    sharding_of(accelerator)  # refuses what cannot be gathered
    units = units_of(unwrap(model))
    conversions = _conversions(units, dtype)
    return [_spec(name, parameter, conversions) for unit in units for name, parameter in unit.entries]


def adapter_shapes_of(model: torch.nn.Module, accelerator: Accelerator) -> list[ParameterSpec]:
    """What `iter_adapter_parameters` yields, in its order. Gathers nothing."""
    sharding_of(accelerator)  # refuses what cannot be gathered
    return [_spec(name, parameter, {}) for name, parameter in _adapter_entries(unwrap(model))]


def _conversions(units: list[Unit], dtype: torch.dtype | None) -> dict[torch.dtype, torch.dtype]:
    """What becomes of each dtype that does not stay."""
    if dtype is None:
        return {}
    counts = Counter(parameter.dtype for unit in units for parameter in unit.parameters)
    return {counts.most_common(1)[0][0]: dtype}


def _spec(name: str, parameter: torch.nn.Parameter, conversions: dict[torch.dtype, torch.dtype]) -> ParameterSpec:
    # DeepSpeed leaves an empty tensor behind, and the shape in an attribute; parameters that it has not met have none.
    shape = getattr(parameter, "ds_shape", parameter.shape)
    dtype = conversions.get(parameter.dtype, parameter.dtype)
    return ParameterSpec(name=name, shape=list(shape), dtype=str(dtype).removeprefix("torch."))


# ----------------------------------------------------------------------------------------------------------- gathering


def _stream(
    units: list[Unit], sharding: Sharding, device: torch.device, conversions: dict[torch.dtype, torch.dtype]
) -> Iterator[tuple[str, torch.Tensor]]:
    for unit in units:
        tensors = _gather(unit.parameters, sharding, device) if unit.layer is None else _merge(unit, sharding, device)
        for name, parameter in unit.entries:
            # No reference is kept here: the consumer decides when the tensor goes.
            yield name, tensors.pop(0).to(conversions.get(parameter.dtype, parameter.dtype))


def _gather(parameters: list[torch.nn.Parameter], sharding: Sharding, device: torch.device) -> list[torch.Tensor]:
    """The whole tensors. Sharded parameters are sharded again when this returns; others are handed out themselves."""
    if sharding is Sharding.ZERO3:
        import deepspeed  # installed only where it is used

        with deepspeed.zero.GatheredParameters(parameters):
            return [parameter.data for parameter in parameters]  # keeps the storage that the parameter lets go of
    return [
        parameter.detach().to(device).full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
        for parameter in parameters
    ]


@torch.no_grad()
def _merge(unit: Unit, sharding: Sharding, device: torch.device) -> list[torch.Tensor]:
    """
    The unit's parameters with the active adapters in them.

    PEFT merges in place, and its way back is not exact. So whole copies stand in for the layer's parameters while it
    does: the parameters themselves are never written, and are back when this returns or raises.
    """
    places = [
        (module, leaf, parameter)
        for module in unit.layer.modules()
        for leaf, parameter in module.named_parameters(recurse=False)
    ]
    tensors = _gather([parameter for _, _, parameter in places], sharding, device)
    written = {id(parameter) for parameter in unit.parameters}
    layers = [module for module in unit.layer.modules() if isinstance(module, LoraLayer)]
    before = [(layer, list(layer.merged_adapters), dict(layer._caches)) for layer in layers]
    try:
        for module, leaf, parameter in places:
            tensor = tensors.pop(0)
            copy = tensor.clone() if id(parameter) in written else tensor
            setattr(module, leaf, torch.nn.Parameter(copy, requires_grad=False))
        for layer in reversed(layers):  # an adapted layer may be the base of another
            layer.merge()
        merged = {id(parameter): getattr(module, leaf).detach() for module, leaf, parameter in places}
    finally:
        for module, leaf, parameter in places:
            setattr(module, leaf, parameter)
        for layer, adapters, caches in before:
            layer.merged_adapters[:], layer._caches = adapters, caches
    return [merged[id(parameter)] for parameter in unit.parameters]


# --------------------------------------------------------------------------------------- parameters of the plain model


def base_model(model: torch.nn.Module) -> PreTrainedModel:
    """The model itself, without wrappers and adapters."""
    model = extract_model_from_parallel(model, recursive=True)
    return model.get_base_model() if isinstance(model, PeftModel) else model


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


def _adapter_entries(model: PeftModel) -> list[tuple[str, torch.nn.Parameter]]:
    """The adapter's parameters under the names of PEFT's checkpoints."""
    whole = [name for name, module in model.named_modules() if isinstance(module, ModulesToSaveWrapper)]
    if whole:
        raise GatherError(
            f"Besides the adapter, {whole[0]!r} is trained as a whole (`modules_to_save`), and would be missing where "
            "only the adapter is sent. Send merged weights, or remove `modules_to_save`."
        )
    parameters = dict(model.named_parameters(remove_duplicate=False))
    # PEFT selects and renames; the values pass through untouched. Embeddings of the base model are not the adapter.
    chosen = get_peft_model_state_dict(model, parameters, ADAPTER, save_embedding_layers=False)
    return [
        (".".join(part for part in name.split(".") if part not in TRANSPARENT), parameter)
        for name, parameter in chosen.items()
    ]
