"""Whole parameters out of a trainer that may be sharded and may have adapters, one layer at a time.

`iter_full_parameters` and `iter_adapter_parameters` take the trainer's model as it is now, wrapped
or not, and yield (name, whole tensor) on every rank, for one process, DDP, ZeRO-1 to 3 and FSDP2,
with or without LoRA. `CheckpointPlan` makes of these what a checkpoint holds, which vLLM's
`load_weights` reads.

Gathering is a collective: every rank iterates to the end, also a rank whose server has died.
Adapters are merged in copies: the model is never written to. A consumer that drops each tensor
before it asks for the next has one layer in memory beyond the shards, or two while adapters are
merged.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
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
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from trl_atropos.errors import GatherError
from trl_atropos.protocol import CheckpointTensor, ParameterSpec
from trl_atropos.tensors.fingerprint import Part
from trl_atropos.weights.adapters import trained_adapter

WHOLE = ("none", "ddp", "zero1/2")  # kinds of sharding where each rank has all parameters
# Modules that activation checkpointing and torch.compile put around others: they are no part of a
# checkpoint's names.
TRANSPARENT = ("_checkpoint_wrapped_module", "_orig_mod")

Named = tuple[str, torch.Tensor]
Shapes = dict[str, tuple[torch.Size, torch.dtype]]  # by parameter name


class Entry(NamedTuple):
    name: str
    parameter: torch.nn.Parameter
    dtype: torch.dtype  # to yield it in


class Unit(NamedTuple):
    """What is gathered at once: one parameter, or all parameters of a layer with an adapter."""

    entries: list[Entry]
    layer: LoraLayer | None


def sharding_of(accelerator: Accelerator) -> str:
    """How the parameters lie over the processes: "none", "ddp", "zero1/2", "zero3" or "fsdp2"."""
    kind = accelerator.distributed_type
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise GatherError(
            "The trainer is sharded with FSDP version 1, whose parameters have no names before the "
            "first forward. Use FSDP2: `fsdp_version: 2` in the configuration of `accelerate "
            "launch`, or `version: 2` in `fsdp_config`."
        )
    if kind == DistributedType.DEEPSPEED:
        return "zero3" if accelerator.state.deepspeed_plugin.zero_stage == 3 else "zero1/2"
    return {DistributedType.FSDP: "fsdp2", DistributedType.NO: "none"}.get(kind, "ddp")


def iter_full_parameters(
    model: torch.nn.Module, accelerator: Accelerator, dtype: torch.dtype | None = None
) -> Iterator[Named]:
    """
    Yields every parameter whole, with adapters merged, under its name in the plain model; tied
    parameters once.

    The tensors are on the training device and may be the model's own memory: read them before the
    next optimizer step. Parameters of the model's own dtype, which most have, are converted to
    `dtype`; those that transformers keeps in another (ERNIE's routers) stay. Raises `GatherError`
    for what cannot be gathered.
    """
    return _stream(_full_units(model, accelerator, dtype), accelerator)


def shapes_of(
    model: torch.nn.Module, accelerator: Accelerator, dtype: torch.dtype | None = None
) -> Shapes:
    """Names, whole shapes and dtypes of what `iter_full_parameters` yields, in its order. Gathers
    nothing."""
    return {
        name: (shape_of(parameter), dtype)
        for name, parameter, dtype in entries_of(model, accelerator, dtype)
    }


def entries_of(
    model: torch.nn.Module, accelerator: Accelerator, dtype: torch.dtype | None = None
) -> list[Entry]:
    """The parameters of the plain model, without what an adapter adds to them, and the dtype of
    each in a publish."""
    return [entry for unit in _full_units(model, accelerator, dtype) for entry in unit.entries]


def shape_of(parameter: torch.nn.Parameter) -> torch.Size:
    """Of the whole parameter. DeepSpeed leaves an empty tensor behind and keeps the shape in an
    attribute, once it has met the parameter."""
    return getattr(parameter, "ds_shape", parameter.shape)


def local_parts(
    parameter: torch.nn.Parameter, accelerator: Accelerator
) -> Iterator[tuple[torch.Tensor, Part]]:
    """Yields what this rank holds of a parameter, and where that stands in it. If they are sharded,
    the parts of all ranks make up the parameter once."""
    kind = sharding_of(accelerator)
    whole = Part.whole(shape_of(parameter))
    if kind == "zero3":
        shard = parameter.ds_tensor.detach().flatten()
        begin = shard.numel() * dist.get_rank(parameter.ds_process_group)
        count = min(shard.numel(), parameter.ds_numel - begin)  # the last ones are padded
        if count > 0:
            yield shard[:count], Part(begin, [count], [1])
    elif isinstance(parameter, DTensor) and all(
        one.is_replicate() or one.is_shard(0) for one in parameter.placements
    ):
        local = parameter.detach().to_local()
        begin = 0
        first = True
        for placement, size, rank in zip(
            parameter.placements,
            parameter.device_mesh.shape,
            parameter.device_mesh.get_coordinate(),
            strict=True,
        ):
            if placement.is_replicate():
                first &= rank == 0
            else:
                begin = -(-parameter.shape[0] // size) * rank
        if first:
            yield local, Part(begin * whole.stride[0], list(local.shape), whole.stride)
    else:
        tensor = _gather([parameter], accelerator)[0]
        if kind in WHOLE or accelerator.is_main_process:
            yield tensor, whole


def iter_adapter_parameters(model: torch.nn.Module, accelerator: Accelerator) -> Iterator[Named]:
    """Yields the trained adapter's tensors whole, by PEFT's checkpoint names
    (`base_model.model.X.lora_A.weight`)."""
    model = unwrap(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    # PEFT selects and renames; the values pass through untouched. Embeddings of the base model are
    # not the adapter.
    name = trained_adapter(model)
    chosen = get_peft_model_state_dict(model, parameters, name, save_embedding_layers=False)
    units = [Unit([Entry(plain_name(name), p, p.dtype)], None) for name, p in chosen.items()]
    return _stream(units, accelerator)


def plain_name(name: str) -> str:
    """A name without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in TRANSPARENT)


def _stream(units: list[Unit], accelerator: Accelerator) -> Iterator[Named]:
    for unit in units:
        parameters = [entry.parameter for entry in unit.entries]
        tensors = (
            _gather(parameters, accelerator) if unit.layer is None else _merge(unit, accelerator)
        )
        for name, _, dtype in unit.entries:
            # No reference is kept here: the consumer decides when the tensor is freed.
            yield name, tensors.pop(0).to(dtype)


def _gather(parameters: list[torch.nn.Parameter], accelerator: Accelerator) -> list[torch.Tensor]:
    """Returns whole tensors: of sharded parameters new ones, of others the parameters' own."""
    if sharding_of(accelerator) == "zero3":
        import deepspeed  # installed only where it is used

        with deepspeed.zero.GatheredParameters(parameters):
            # keeps the storage that DeepSpeed would free
            return [parameter.data for parameter in parameters]
    whole = [parameter.detach() for parameter in parameters]
    return [
        part.to(accelerator.device).full_tensor() if isinstance(part, DTensor) else part
        for part in whole
    ]


@torch.no_grad()
def _merge(unit: Unit, accelerator: Accelerator) -> list[torch.Tensor]:
    """Returns the unit's parameters with the active adapters merged into them. PEFT merges in
    place, and unmerging is not exact: so whole copies stand in for the layer's parameters
    meanwhile."""
    places = [
        (module, leaf, parameter)
        for module in unit.layer.modules()
        for leaf, parameter in module.named_parameters(recurse=False)
    ]
    tensors = _gather([parameter for _, _, parameter in places], accelerator)
    written = {entry.parameter for entry in unit.entries}
    layers = [module for module in unit.layer.modules() if isinstance(module, LoraLayer)]
    before = [(layer, list(layer.merged_adapters), dict(layer._caches)) for layer in layers]
    try:
        for module, leaf, parameter in places:
            tensor = tensors.pop(0)
            copy = tensor.clone() if parameter in written else tensor
            setattr(module, leaf, torch.nn.Parameter(copy, requires_grad=False))
        for layer in reversed(layers):  # an adapted layer may be the base of another
            layer.merge()
        merged = {parameter: getattr(module, leaf).detach() for module, leaf, parameter in places}
    finally:
        for module, leaf, parameter in places:
            setattr(module, leaf, parameter)
        for layer, adapters, caches in before:
            layer.merged_adapters[:], layer._caches = adapters, caches
    return [merged[entry.parameter] for entry in unit.entries]


# -------------------------------------------------------------------- parameters of the plain model


def base_model(model: torch.nn.Module) -> PreTrainedModel:
    """The model itself, without wrappers and adapters."""
    return _without_adapters(extract_model_from_parallel(model, recursive=True))


def _without_adapters(model: torch.nn.Module) -> PreTrainedModel:
    return model.get_base_model() if isinstance(model, PeftModel) else model


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The Hugging Face or PEFT model inside the wrappers of DDP, DeepSpeed and the compiler,
    sharded again."""
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
    """All parameters of the plain model, in its order, tied parameters once."""
    sharding_of(accelerator)  # refuses what cannot be gathered
    model = unwrap(model)
    for config in model.peft_config.values() if isinstance(model, PeftModel) else ():
        if (kind := config.peft_type) != PeftType.LORA:
            raise GatherError(
                f"An adapter of type {kind.value} cannot be merged for a server: use a "
                "`LoraConfig`."
            )
    model = _without_adapters(model)
    # only models that went through a quantiser have the attribute
    if getattr(model, "is_quantized", False):
        raise GatherError(
            "An adapter cannot be merged into quantised weights without rounding them. Load the "
            "model without quantisation (`quantization_config`, `load_in_4bit`)."
        )
    found = {
        prefix + leaf: (parameter, layer)
        for prefix, module, layer in _walk(model)
        for leaf, parameter in module.named_parameters(recurse=False)
    }
    _check_ties(model, found)
    own = Counter(parameter.dtype for parameter, _ in found.values()).most_common(1)[0][0]
    units: list[Unit] = []
    first_names = {parameter: name for name, (parameter, _) in reversed(found.items())}
    for name, (parameter, layer) in found.items():
        if first_names[parameter] == name:
            if layer is None or not units or units[-1].layer is not layer:
                units.append(Unit([], layer))
            converts = dtype is not None and parameter.dtype == own
            units[-1].entries.append(Entry(name, parameter, dtype if converts else parameter.dtype))
    return units


def buffers_of(model: torch.nn.Module) -> list[Named]:
    """The buffers that a checkpoint of the plain model holds, such as the bias of DeepSeek's and
    GLM's routers."""
    return [
        (prefix + leaf, buffer)
        for prefix, module, _ in _walk(_without_adapters(unwrap(model)))
        for leaf, buffer in module.named_buffers(recurse=False)
        if leaf not in module._non_persistent_buffers_set
    ]


def _walk(
    module: torch.nn.Module, name: str = "", layer: LoraLayer | None = None
) -> Iterator[tuple[str, torch.nn.Module, LoraLayer | None]]:
    """Yields every module in use, with the prefix of its names in the plain model and the outermost
    adapted layer."""
    if isinstance(module, LoraLayer):
        yield from _walk(module.base_layer, name, layer or module)
        return
    if isinstance(module, ModulesToSaveWrapper):
        active = [
            adapter for adapter in module.active_adapters if adapter in module.modules_to_save
        ]
        yield from _walk(
            module.modules_to_save[active[0]] if active else module.original_module, name, layer
        )
        return
    if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
        raise GatherError(
            f"{name!r} is trained by PEFT's {type(module).__name__}, which cannot be merged for a "
            "server. Use LoRA with `target_modules` and `modules_to_save` only (no "
            "`trainable_token_indices`)."
        )
    prefix = f"{name}." if name else ""
    yield prefix, module, layer
    for child_name, child in module.named_children():
        yield from _walk(child, name if child_name in TRANSPARENT else prefix + child_name, layer)


def _check_ties(
    model: torch.nn.Module, used: dict[str, tuple[torch.nn.Parameter, LoraLayer | None]]
) -> None:
    """A server holds one tensor for a tied pair: an adapter on one side would make them two."""
    for target, source in model.all_tied_weights_keys.items():
        if (
            target in used
            and source in used
            and any(a is not b for a, b in zip(used[target], used[source]))
        ):
            raise GatherError(
                f"{target!r} and {source!r} are one tensor in the checkpoint, but the adapter "
                f"trains one of them alone. Remove {source.split('.')[-2]!r} from the adapter's "
                "modules, or train it whole and tied: "
                f"`modules_to_save=[{source.split('.')[-2]!r}]` with `ensure_weight_tying=True`."
            )


# -------------------------------------------------------------------- the tensors of the checkpoint


class CheckpointPlan:
    """
    How a model's parameters become the tensors of its checkpoint. `shapes` are the parameters'
    whole shapes and dtypes by name, where the model itself is sharded or has others.

    When transformers loads a checkpoint it renames some modules and joins the experts of a layer to
    one parameter. Its own `revert_weight_conversion`, with which it saves, undoes that. Here it
    runs on the meta device first, to show what every checkpoint tensor comes from. Most are views
    of one parameter, and cost nothing to make.
    """

    def __init__(self, model: PreTrainedModel, shapes: Shapes | None = None):
        self.model = model
        self.shapes = shapes or {
            name: (tensor.shape, tensor.dtype) for name, tensor in model.named_parameters()
        }
        markers = {
            name: torch.empty(size, dtype=dtype, device="meta")
            for name, (size, dtype) in self.shapes.items()
        }
        owners = {marker.untyped_storage()._cdata: name for name, marker in markers.items()}
        found: dict[str, list[CheckpointTensor]] = {name: [] for name in markers}
        for name, tensor in self._convert(markers).items():
            if (owner := owners.get(tensor.untyped_storage()._cdata)) is not None:
                size = list(tensor.shape)
                stride = list(tensor.stride())
                piece = CheckpointTensor(
                    name=name, size=size, stride=stride, offset=tensor.storage_offset()
                )
                found[owner].append(piece)
        covered = {
            name: sum(math.prod(piece.size) for piece in pieces) for name, pieces in found.items()
        }
        # The views that make up a parameter; and for each other parameter, all that are converted
        # together with it: two belong together if each of them alone would be converted to a tensor
        # of the same name.
        self.pieces = {
            name: found[name] for name, marker in markers.items() if covered[name] == marker.numel()
        }
        self.groups: dict[str, list[str]] = {}
        by_result: dict[str, list[str]] = {}
        for name in [name for name in markers if name not in self.pieces]:
            group = [name]
            for result in self._convert({name: markers[name]}):
                for member in by_result.get(result, []):
                    group += [other for other in self.groups[member] if other not in group]
                by_result.setdefault(result, []).append(name)
            self.groups.update(dict.fromkeys(group, group))

    def _convert(self, markers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        with torch.no_grad(), _CopiesAreViews():
            return revert_weight_conversion(self.model, dict(markers))

    def specs(self) -> list[ParameterSpec]:
        """The parameters, with the checkpoint tensors of each that consists of views."""
        return [
            ParameterSpec.of(name, *shape, self.pieces.get(name, []))
            for name, shape in self.shapes.items()
        ]

    def tensors(self, named_tensors: Iterable[Named]) -> Iterator[Named]:
        """Yields a checkpoint's tensors for parameters that come one at a time, and wait only for
        those they need."""
        waiting: dict[str, torch.Tensor] = {}
        for name, tensor in named_tensors:
            if name in self.pieces:
                whole = tensor.contiguous()
                for piece in self.pieces[name]:
                    yield (
                        piece.name,
                        whole.as_strided(
                            piece.size, piece.stride, whole.storage_offset() + piece.offset
                        ),
                    )
                continue
            waiting[name] = tensor
            if all(member in waiting for member in self.groups[name]):
                group = {member: waiting.pop(member) for member in self.groups[name]}
                yield from revert_weight_conversion(self.model, group).items()
        if waiting:
            raise ValueError(
                f"parameters that the checkpoint stores together with {sorted(waiting)} never came"
            )


class _CopiesAreViews(TorchDispatchMode):
    """Leaves out the copies that only make a tensor contiguous, so that the result still shows
    where it came from."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.clone.default:
            return torch.ops.aten.alias.default(args[0])
        # reshapes the clone of what has no view of that shape
        if func is torch.ops.aten._unsafe_view.default:
            return args[0].new_empty(args[1])
        return func(*args, **(kwargs or {}))
