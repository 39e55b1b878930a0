"""Whole parameters out of a trainer that may be sharded and may have adapters, one layer at a time.

`iter_full_parameters` and `iter_adapter_parameters` take the trainer's model as it is now, wrapped
or not, and yield (name, whole tensor) on every rank, for one process, DDP, ZeRO-1 to 3 and FSDP2,
with or without LoRA. `checkpoint_plan.py` converts these to the tensors of a checkpoint.

Gathering is a collective: every rank iterates to the end, also a rank whose server has died.
Adapters are merged in copies: the model is never written to. A consumer that drops each tensor
before it asks for the next has one layer in memory beyond the shards, or two while adapters are
merged.
"""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
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
from trl_atropos.tensors.rectangles import Part
from trl_atropos.weights.adapters import trained_adapter

# Modules that activation checkpointing and torch.compile put around others: they are no part of a
# checkpoint's names.
TRANSPARENT = ("_checkpoint_wrapped_module", "_orig_mod")

Named = tuple[str, torch.Tensor]
Tensors = dict[str, torch.Tensor]  # by parameter name
Shapes = dict[str, tuple[torch.Size, torch.dtype]]  # by parameter name


class Entry(NamedTuple):
    name: str
    parameter: torch.nn.Parameter
    dtype: torch.dtype  # to yield it in


class Unit(NamedTuple):
    """Parameters that are gathered at once: one, or all those of a layer with an adapter."""

    entries: list[Entry]
    layer: LoraLayer | None


class UsedModule(NamedTuple):
    """A module of the plain model."""

    prefix: str  # of its parameters' names
    module: torch.nn.Module
    layer: LoraLayer | None  # the outermost adapted layer around it


class UsedParameter(NamedTuple):
    """A parameter of the plain model."""

    parameter: torch.nn.Parameter
    layer: LoraLayer | None  # the outermost adapted layer around it


class Place(NamedTuple):
    """The attribute of a module that holds a parameter."""

    module: torch.nn.Module
    attribute: str
    parameter: torch.nn.Parameter

    def put(self, parameter: torch.nn.Parameter) -> None:
        setattr(self.module, self.attribute, parameter)

    def current(self) -> torch.Tensor:
        return getattr(self.module, self.attribute).detach()


def sharding_of(accelerator: Accelerator) -> str:
    """Returns how the processes share the parameters: "none", "ddp", "zero1/2", "zero3" or
    "fsdp2"."""
    kind = accelerator.distributed_type
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise GatherError(
            "The trainer is sharded with FSDP version 1, whose parameters have no names before the "
            "first forward. Use FSDP2: `fsdp_version: 2` in the configuration of `accelerate "
            "launch`, or `version: 2` in `fsdp_config`."
        )
    if kind == DistributedType.DEEPSPEED:
        stage = accelerator.state.deepspeed_plugin.zero_stage
        return "zero3" if stage == 3 else "zero1/2"
    if kind == DistributedType.FSDP:
        return "fsdp2"
    if kind == DistributedType.NO:
        return "none"
    return "ddp"


def is_whole(accelerator: Accelerator) -> bool:
    """Returns whether every process has all parameters whole."""
    return sharding_of(accelerator) in ("none", "ddp", "zero1/2")


def iter_full_parameters(
    model: torch.nn.Module, accelerator: Accelerator, dtype: torch.dtype | None = None
) -> Iterator[Named]:
    """
    Yields every parameter whole, with adapters merged, under its name in the plain model; tied
    parameters once.

    The tensors are on the training device and may be the model's own memory: read them before the
    next optimizer step. Parameters of the model's own dtype, which most have, are converted to
    `dtype`; those that Transformers keeps in another (ERNIE's routers) stay. Raises `GatherError`
    for a model that cannot be gathered.
    """
    return _stream(_full_units(model, accelerator, dtype), accelerator)


def shapes_of(
    model: torch.nn.Module, accelerator: Accelerator, dtype: torch.dtype | None = None
) -> Shapes:
    """Returns the names, whole shapes and dtypes of the tensors that `iter_full_parameters` yields,
    in its order. Gathers nothing."""
    shapes = {}
    for name, parameter, entry_dtype in entries_of(model, accelerator, dtype):
        shapes[name] = (shape_of(parameter), entry_dtype)
    return shapes


def entries_of(
    model: torch.nn.Module, accelerator: Accelerator, dtype: torch.dtype | None = None
) -> list[Entry]:
    """Returns the parameters of the plain model, without adapters, and the dtype of each in a
    publish."""
    entries = []
    for unit in _full_units(model, accelerator, dtype):
        entries += unit.entries
    return entries


def shape_of(parameter: torch.nn.Parameter) -> torch.Size:
    """Returns the shape of the whole parameter. Once DeepSpeed has met a parameter, it leaves an
    empty tensor behind and keeps the shape in an attribute."""
    return getattr(parameter, "ds_shape", parameter.shape)


def local_parts(
    parameter: torch.nn.Parameter, accelerator: Accelerator
) -> Iterator[tuple[torch.Tensor, Part]]:
    """Yields this rank's part of a parameter, and where it stands in the parameter. If parameters
    are sharded, the parts of all ranks make up the parameter once."""
    whole = Part.whole(shape_of(parameter))
    if sharding_of(accelerator) == "zero3":
        shard = parameter.ds_tensor.detach().flatten()
        rank = dist.get_rank(parameter.ds_process_group)
        begin = shard.numel() * rank
        count = min(shard.numel(), parameter.ds_numel - begin)  # the last ones are padded
        if count > 0:
            yield shard[:count], Part(begin, [count], [1])
    elif _is_split_by_rows(parameter):
        first_row = _first_row(parameter)
        if first_row is not None:
            local = parameter.detach().to_local()
            offset = first_row * whole.stride[0]
            yield local, Part(offset, list(local.shape), whole.stride)
    else:
        (tensor,) = _gather([parameter], accelerator)
        if is_whole(accelerator) or accelerator.is_main_process:
            yield tensor, whole


def _is_split_by_rows(parameter: torch.nn.Parameter) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    for placement in parameter.placements:
        if not placement.is_replicate() and not placement.is_shard(0):
            return False
    return True


def _first_row(parameter: DTensor) -> int | None:
    """Returns the row at which this rank's rows begin, or `None` if another rank has the same rows
    and comes first.

    FSDP2 gives each rank ceil(rows / ranks) rows: of 10 rows, 4 ranks get rows 0-2, 3-5, 6-8 and 9.
    """
    row = 0
    is_first = True
    mesh = parameter.device_mesh
    places = zip(parameter.placements, mesh.shape, mesh.get_coordinate(), strict=True)
    for placement, num_ranks, rank in places:
        if placement.is_replicate():
            is_first &= rank == 0
        else:
            rows_per_rank = -(-parameter.shape[0] // num_ranks)  # rounded up
            row = rows_per_rank * rank
    return row if is_first else None


def iter_adapter_parameters(model: torch.nn.Module, accelerator: Accelerator) -> Iterator[Named]:
    """Yields the trained adapter's tensors whole, by PEFT's checkpoint names
    (`base_model.model.X.lora_A.weight`)."""
    model = unwrap(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    adapter = trained_adapter(model)
    # PEFT selects and renames; the values pass through untouched. Embeddings of the base model are
    # not the adapter.
    selected = get_peft_model_state_dict(model, parameters, adapter, save_embedding_layers=False)
    units = []
    for name, parameter in selected.items():
        entry = Entry(plain_name(name), parameter, parameter.dtype)
        units.append(Unit([entry], None))
    return _stream(units, accelerator)


def plain_name(name: str) -> str:
    """Returns a name without the parts that wrappers add."""
    parts = [part for part in name.split(".") if part not in TRANSPARENT]
    return ".".join(parts)


def _stream(units: list[Unit], accelerator: Accelerator) -> Iterator[Named]:
    for unit in units:
        if unit.layer is None:
            parameters = [entry.parameter for entry in unit.entries]
            tensors = _gather(parameters, accelerator)
        else:
            tensors = _merge(unit, accelerator)
        for name, _, dtype in unit.entries:
            # No reference is kept here: the consumer decides when the tensor is freed.
            yield name, tensors.pop(0).to(dtype)


def _gather(parameters: list[torch.nn.Parameter], accelerator: Accelerator) -> list[torch.Tensor]:
    """Returns whole tensors: new ones for sharded parameters, the parameters' own for others."""
    if sharding_of(accelerator) == "zero3":
        import deepspeed  # installed only where it is used

        with deepspeed.zero.GatheredParameters(parameters):
            # keeps the storage that DeepSpeed would free
            return [parameter.data for parameter in parameters]
    tensors = []
    for parameter in parameters:
        tensor = parameter.detach()
        if isinstance(tensor, DTensor):
            tensor = tensor.to(accelerator.device).full_tensor()
        tensors.append(tensor)
    return tensors


@torch.no_grad()
def _merge(unit: Unit, accelerator: Accelerator) -> list[torch.Tensor]:
    """Returns the unit's parameters with the active adapters merged into them. PEFT merges in
    place, and unmerging is not exact: so whole copies stand in for the layer's parameters
    meanwhile."""
    places = []
    layers = []
    states = []
    for module in unit.layer.modules():
        if isinstance(module, LoraLayer):
            layers.append(module)
            states.append((list(module.merged_adapters), dict(module._caches)))
        for attribute, parameter in module.named_parameters(recurse=False):
            places.append(Place(module, attribute, parameter))
    tensors = _gather([place.parameter for place in places], accelerator)
    changing = {entry.parameter for entry in unit.entries}
    try:
        for place in places:
            tensor = tensors.pop(0)
            if place.parameter in changing:
                tensor = tensor.clone()
            place.put(torch.nn.Parameter(tensor, requires_grad=False))
        for layer in reversed(layers):  # an adapted layer may be the base of another
            layer.merge()
        merged = {place.parameter: place.current() for place in places}
    finally:
        for place in places:
            place.put(place.parameter)
        for layer, (adapters, caches) in zip(layers, states, strict=True):
            layer.merged_adapters[:] = adapters
            layer._caches = caches
    return [merged[entry.parameter] for entry in unit.entries]


# -------------------------------------------------------------------- parameters of the plain model


def base_model(model: torch.nn.Module) -> PreTrainedModel:
    """Returns the model itself, without wrappers and adapters."""
    return _without_adapters(extract_model_from_parallel(model, recursive=True))


def _without_adapters(model: torch.nn.Module) -> PreTrainedModel:
    return model.get_base_model() if isinstance(model, PeftModel) else model


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """Returns the Hugging Face or PEFT model inside the wrappers of DDP, DeepSpeed and the
    compiler, sharded again."""
    model = extract_model_from_parallel(model, keep_torch_compile=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # a forward without a backward leaves the last modules whole, in the dtype of the
            # compute
            module.reshard()
    return model


def _full_units(
    model: torch.nn.Module, accelerator: Accelerator, dtype: torch.dtype | None
) -> list[Unit]:
    """Returns all parameters of the plain model, in its order, tied parameters once."""
    sharding_of(accelerator)  # refuses FSDP version 1
    model = unwrap(model)
    if isinstance(model, PeftModel):
        _require_lora(model)
    model = _without_adapters(model)
    # only models that went through a quantiser have the attribute
    if getattr(model, "is_quantized", False):
        raise GatherError(
            "An adapter cannot be merged into quantised weights without rounding them. Load the "
            "model without quantisation (`quantization_config`, `load_in_4bit`)."
        )
    used = {}
    dtypes = Counter()
    for prefix, module, layer in _walk(model):
        for leaf, parameter in module.named_parameters(recurse=False):
            used[prefix + leaf] = UsedParameter(parameter, layer)
            dtypes[parameter.dtype] += 1
    _check_ties(model, used)
    usual_dtype, _ = dtypes.most_common(1)[0]
    units = []
    seen = set()
    for name, (parameter, layer) in used.items():
        if parameter in seen:
            continue
        seen.add(parameter)
        if layer is None or not units or units[-1].layer is not layer:
            units.append(Unit([], layer))
        published_dtype = parameter.dtype
        if dtype is not None and parameter.dtype == usual_dtype:
            published_dtype = dtype
        units[-1].entries.append(Entry(name, parameter, published_dtype))
    return units


def _require_lora(model: PeftModel) -> None:
    for config in model.peft_config.values():
        if config.peft_type != PeftType.LORA:
            raise GatherError(
                f"An adapter of type {config.peft_type.value} cannot be merged for a server: use a "
                "`LoraConfig`."
            )


def buffers_of(model: torch.nn.Module) -> list[Named]:
    """Returns the buffers that a checkpoint of the plain model holds, such as the bias of
    DeepSeek's and GLM's routers."""
    buffers = []
    model = _without_adapters(unwrap(model))
    for prefix, module, _ in _walk(model):
        for leaf, buffer in module.named_buffers(recurse=False):
            if leaf not in module._non_persistent_buffers_set:
                buffers.append((prefix + leaf, buffer))
    return buffers


def _walk(
    module: torch.nn.Module, name: str = "", layer: LoraLayer | None = None
) -> Iterator[UsedModule]:
    """Yields every module that the plain model uses, below one of this `name`."""
    if isinstance(module, LoraLayer):
        yield from _walk(module.base_layer, name, layer or module)
        return
    if isinstance(module, ModulesToSaveWrapper):
        used = module.original_module
        for adapter in module.active_adapters:
            if adapter in module.modules_to_save:
                used = module.modules_to_save[adapter]
                break
        yield from _walk(used, name, layer)
        return
    if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
        raise GatherError(
            f"{name!r} is trained by PEFT's {type(module).__name__}, which cannot be merged for a "
            "server. Use LoRA with `target_modules` and `modules_to_save` only (no "
            "`trainable_token_indices`)."
        )
    prefix = f"{name}." if name else ""
    yield UsedModule(prefix, module, layer)
    for leaf, child in module.named_children():
        child_name = name if leaf in TRANSPARENT else prefix + leaf
        yield from _walk(child, child_name, layer)


def _check_ties(model: torch.nn.Module, used: dict[str, UsedParameter]) -> None:
    """Raises `GatherError` if an adapter is on one side of a tied pair: a server holds one tensor
    for both, and the adapter would make them two."""
    for target, source in model.all_tied_weights_keys.items():
        if target not in used or source not in used:
            continue
        at_target = used[target]
        at_source = used[source]
        same_parameter = at_target.parameter is at_source.parameter
        if not same_parameter or at_target.layer is not at_source.layer:
            module = source.split(".")[-2]
            raise GatherError(
                f"{target!r} and {source!r} are one tensor in the checkpoint, but the adapter "
                f"trains one of them alone. Remove {module!r} from the adapter's modules, or train "
                f"it whole and tied: `modules_to_save=[{module!r}]` with "
                "`ensure_weight_tying=True`."
            )
