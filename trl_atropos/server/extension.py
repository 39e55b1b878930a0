"""Runs inside every worker of the vLLM server: shares the model's memory, receives weights and
adapters, and computes their fingerprints.

vLLM mixes `WorkerExtension` into its worker (`--worker-extension-cls`), so that `self` is the
worker. `control.py` calls its methods through `collective_rpc`; they take and return plain JSON
values. Importing this module also registers the loader of `layout.py`, before the model is built.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from trl_atropos.privacy import close_to_others
from trl_atropos.protocol import Attachment, ParameterSpec
from trl_atropos.server import compat, layout
from trl_atropos.server.layout import Copy, Piece
from trl_atropos.server.plugin import patch_engine
from trl_atropos.tensors.channel import Channel, Copies, message_layout, open_receiver, unpack
from trl_atropos.tensors.fingerprint import Fingerprints, Part, PlacedPart, joined
from trl_atropos.tensors.shared_memory import export_storage

# The engine, too, runs in this process, unless the server has several workers. Then its own process
# loads the plugin, which needs an installed package.
patch_engine()
if compat.is_batch_invariant():
    compat.keep_batch_invariant()


class WorkerExtension:
    """Methods that vLLM's worker gets, whose attributes are used here. No constructor runs."""

    _trl_atropos_channel: Channel | None = None
    _trl_atropos_weights: "WeightReceiver | None" = None
    _trl_atropos_adapter: "AdapterReceiver | None" = None
    _trl_atropos_fingerprints: Fingerprints | None = None  # of the weights
    _trl_atropos_places: dict[str, tuple] | None = None  # of the parameters when they were traced
    _trl_atropos_constants: "Constants | None" = None

    def trl_atropos_describe(self) -> dict:
        """Returns facts about the engine that only a worker knows for certain."""
        config = self.vllm_config
        device_uuid = None
        if self.device.type == "cuda":
            properties = torch.cuda.get_device_properties(self.device)
            device_uuid = str(properties.uuid)
        lora = None
        lora_config = config.lora_config
        if lora_config is not None:
            lora = {
                "max_rank": lora_config.max_lora_rank,
                "max_loras": lora_config.max_loras,
                "dtype": str(lora_config.lora_dtype).removeprefix("torch."),
            }
        return {
            "device": self.device.type,
            "device_uuid": device_uuid,
            "num_workers": config.parallel_config.world_size,
            "block_size": config.cache_config.block_size,
            "lora": lora,
            "sleep": config.model_config.enable_sleep_mode,
            "refusals": _refusals(config, self.device.type),
        }

    def trl_atropos_close(self) -> None:
        """Closes this process to others of the same user. On a GPU it stays open: the trainer, or
        another worker, may have to open its memory."""
        if self.device.type == "cpu":
            close_to_others()

    def trl_atropos_attach(self, specs: list[dict]) -> dict:
        """Finds where each of the trainer's parameters lives here, and exports the memory behind
        them."""
        model = self.model_runner.get_model()
        parameters = _parsed(specs)
        with set_current_vllm_config(self.vllm_config), compat.without_adapters(model):
            views, refused = layout.trace(model, parameters, self.device)
        storages = layout.unique_storages(model)
        handles = [export_storage(storage) for storage in storages.values()]
        attachment = Attachment(storages=handles, views=views, refused=refused)
        return attachment.model_dump()

    def trl_atropos_trace(self, of: str, specs: list[dict], adapter: list | None) -> dict:
        """Finds the parts of the trainer's weights that this worker keeps, or those of the adapter
        that it has loaded. Returns them parameter by parameter, and by name why it keeps none."""
        specs = _parsed(specs)
        if of == "adapter":
            receiver = self._trl_atropos_adapter
            if receiver is None or receiver.tensors != specs:  # the adapter came as files
                receiver = AdapterReceiver(self, specs, {"target_modules": []})
                self._trl_atropos_adapter = receiver
            request = LoRARequest(*adapter)
            pieces = receiver.pieces(request)
            refused = {}
        else:
            pieces, refused = self._trl_atropos_trace_weights(specs)
            self._trl_atropos_fingerprints = fingerprints_of(pieces, specs)
        parts = []
        for parameter_pieces in pieces:
            parts.append([part for _, part in parameter_pieces])
        return {"parts": parts, "refused": refused}

    def _trl_atropos_trace_weights(
        self, specs: list[ParameterSpec]
    ) -> tuple[list[list[Piece]], dict[str, str]]:
        reason = layout.refusal_of_packed_layers()
        if reason is None and needs_reload(self.vllm_config, self.device):
            reason = "vLLM transforms its weights after loading them"
        if reason is not None:
            pieces = [[] for _ in specs]
            refused = {spec.name: reason for spec in specs}
            return pieces, refused
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config), compat.without_adapters(model):
            pieces, refused = layout.pieces_of(model, specs)
            refused |= layout.unnamed(model, pieces)
            self._trl_atropos_places = layout.places_of(model)
            if self._trl_atropos_constants is None:
                self._trl_atropos_constants = Constants(model, self.device)
        return pieces, refused

    def trl_atropos_inspect(self) -> dict:
        """Returns whether the model's parameters have `moved` since they were traced, and the names
        of constants that `changed`."""
        if self._trl_atropos_constants is None:  # nothing of this model can be compared
            return {"moved": False, "changed": []}
        model = self.model_runner.get_model()
        with compat.without_adapters(model):
            moved = layout.places_of(model) != self._trl_atropos_places
            changed = self._trl_atropos_constants.changed(model)
        return {"moved": moved, "changed": changed}

    def trl_atropos_fingerprints(self, of: str, adapter: list | None) -> list[int]:
        """Returns the fingerprint of each part that `trl_atropos_trace` found, in that order."""
        fingerprints = self._trl_atropos_fingerprints
        if of == "adapter":
            request = LoRARequest(*adapter)
            fingerprints = self._trl_atropos_adapter.fingerprints(request)
        sums = fingerprints.compute()
        return joined(sums)

    def trl_atropos_open_channel(self, specification: dict) -> None:
        """Joins the trainer's channel, in place of an earlier one."""
        parallel = self.vllm_config.parallel_config
        # Not `data_parallel_rank`, which is 0 in every replica of a dense model.
        rank = parallel.data_parallel_index * parallel.world_size + self.rank
        self._trl_atropos_channel = open_receiver(specification, rank, self.device)
        self._trl_atropos_weights = None
        self._trl_atropos_adapter = None

    def trl_atropos_load_weights(self, tensors: list[dict]) -> None:
        """Receives one message of weights and loads it."""
        if self._trl_atropos_weights is None:
            model = self.model_runner.get_model()
            self._trl_atropos_weights = WeightReceiver(
                model, self.vllm_config, self._trl_atropos_channel
            )
        self._trl_atropos_weights.load(_parsed(tensors))

    def trl_atropos_load_weights_again(self, messages: list[int]) -> None:
        """Receives messages that were loaded before, and loads them."""
        self._trl_atropos_weights.load_again(messages)

    def trl_atropos_finish_weights(self) -> list[str]:
        """Returns vLLM's names of the parameters that nothing was loaded into."""
        return self._trl_atropos_weights.finish()

    def trl_atropos_set_up_adapter(self, tensors: list[dict], config: dict) -> str | None:
        """Returns why vLLM cannot serve such an adapter, or None."""
        try:
            self._trl_atropos_adapter = AdapterReceiver(self, _parsed(tensors), config)
        except ValueError as error:
            return str(error)
        return None

    def trl_atropos_load_adapter(self, adapter_id: int) -> None:
        """Receives the adapter's next version under `adapter_id`."""
        self._trl_atropos_adapter.load(adapter_id)


def _parsed(specs: list[dict]) -> list[ParameterSpec]:
    return [ParameterSpec.model_validate(spec) for spec in specs]


def _refusals(config: VllmConfig, device: str) -> list[str]:
    """Returns why this engine's weights cannot be trained in place, each with the way out."""
    parallel = config.parallel_config
    model = config.model_config
    refusals = []
    if parallel.tensor_parallel_size > 1 or parallel.pipeline_parallel_size > 1:
        refusals.append(
            f"it splits the model over {parallel.tensor_parallel_size} x "
            f"{parallel.pipeline_parallel_size} devices (start it with --tensor-parallel-size 1 "
            "--pipeline-parallel-size 1)"
        )
    if model.quantization is not None:
        refusals.append(
            f"its weights are quantised ({model.quantization}); serve an unquantised model"
        )
    if model.enable_sleep_mode:
        refusals.append(
            "it was started with --enable-sleep-mode, whose memory cannot be shared; leave the "
            "flag out"
        )
    if model.use_mla:
        refusals.append(
            "multi-head latent attention keeps transformed copies of its weights; use another model"
        )
    if device == "cpu" and config.load_config.load_format != layout.LOAD_FORMAT:
        refusals.append(
            f"it was not started with --load-format {layout.LOAD_FORMAT}; start it by `trl-atropos "
            "serve`"
        )
    packed = layout.refusal_of_packed_layers()
    if packed is not None:
        refusals.append(packed)
    return refusals


def fingerprints_of(pieces: list[list[Piece]], specs: list[ParameterSpec]) -> Fingerprints:
    """Returns one fingerprint for each piece, parameter by parameter."""
    parts = []
    for spec, parameter_pieces in zip(specs, pieces, strict=True):
        for values, part in parameter_pieces:
            number = len(parts)
            parts.append(PlacedPart(values, part, spec.shape, number))
    return Fingerprints(parts, len(parts))


class Constants:
    """Values that a config determines and no publish changes: numbers of a model's modules, and its
    rotary tables."""

    def __init__(self, model: nn.Module, device: torch.device):
        self.device = device
        self._addresses: list[int] = []  # of the tables that `_table_fingerprints` is for
        self._table_fingerprints: Fingerprints | None = None
        self.values = self._values_of(model)

    def changed(self, model: nn.Module) -> list[str]:
        """Returns the names of those that are not what they were at first."""
        values = self._values_of(model)
        names = []
        for name, value in self.values.items():
            if values.get(name) != value:
                names.append(name)
        return names

    def _values_of(self, model: nn.Module) -> dict[str, float]:
        """Returns the numbers, and the fingerprints of the tables."""
        values = layout.numbers_of(model)
        tables = layout.tables_of(model, self.device)
        return values | self._fingerprints_of(tables)

    def _fingerprints_of(self, tables: dict[str, Tensor]) -> dict[str, int]:
        if not tables:
            return {}
        addresses = [table.data_ptr() for table in tables.values()]
        if addresses != self._addresses:
            parts = []
            for number, table in enumerate(tables.values()):
                parts.append(PlacedPart.whole(table, number))
            self._addresses = addresses
            self._table_fingerprints = Fingerprints(parts, len(parts))
        sums = self._table_fingerprints.compute()
        return dict(zip(tables, joined(sums), strict=True))


def _synchronize(device: torch.device) -> None:
    """Waits for the copies that are queued: an answer to the trainer means that they are done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


# ------------------------------------------------------------------------------------- all weights


@dataclass
class Message:
    """A message of weights that was loaded once.

    `copies` are those that vLLM's loader made of it: into which memory, and from which view of the
    message. `None` if it did more than to copy.
    """

    tensors: list[ParameterSpec]
    copies: list[Copy] | None
    buffer: Tensor  # that it came in, as long as the message
    all_copies: Copies | None = None  # from that buffer

    def copy_from(self, buffer: Tensor) -> None:
        """Makes the copies, from a buffer that holds the same tensors with new values."""
        if buffer.data_ptr() != self.buffer.data_ptr():
            copies = []
            for target, source in self.copies:
                copies.append((target, _same_view(source, buffer)))
            self.copies = copies
            self.buffer = buffer
            self.all_copies = None
        if self.all_copies is None:
            self.all_copies = Copies(self.copies)
        self.all_copies()


def _same_view(view: Tensor, buffer: Tensor) -> Tensor:
    """Returns the elements of `buffer` that stand where `view` stands in its own buffer."""
    values = buffer.view(view.dtype)
    return values.as_strided(view.size(), view.stride(), view.storage_offset())


class WeightReceiver:
    """
    Loads the weights that the trainer sends, through vLLM's own loader.

    The loader takes tensors under the names of a checkpoint and does the fusing, slicing and
    padding for this worker. The first time, any number of `load`, then `finish`. The copies that
    the loader makes are noted, and from then on `load_again` makes the same copies, all of a
    message at once. Raises `ValueError` if new weights would not reach some layers.
    """

    def __init__(self, model: nn.Module, config: VllmConfig, channel: Channel):
        packed = layout.refusal_of_packed_layers()
        if packed is not None:
            raise ValueError(packed)
        self.model = model
        self.config = config
        self.channel = channel
        self.reloads = needs_reload(config, channel.device)
        self.loading = False
        # vLLM's names; None: this model's loader does not name them
        self.loaded: set[str] | None = set()
        self.messages: list[Message] = []

    def load(self, tensors: list[ParameterSpec]) -> None:
        """Receives one message and loads it. The worker's weights are neither old nor new until
        `finish`."""
        if not self.loading:
            self.messages = []
            self.loaded = set()
        _, num_bytes = message_layout(tensors)
        buffer = self.channel.receive(num_bytes)
        if self.reloads:
            self._load(buffer, tensors)
            copies = None
        else:
            copies = self._load_and_note_copies(buffer, tensors)
        self.messages.append(Message(tensors, copies, buffer))
        _synchronize(self.channel.device)

    def load_again(self, numbers: list[int]) -> None:
        """Receives messages that were loaded before, and loads them. The last of all finishes."""
        known = [self.messages[number] for number in numbers]
        lengths = [message.buffer.numel() for message in known]
        buffers = self.channel.messages(lengths)
        for message, buffer in zip(known, buffers, strict=True):
            if message.copies is None:
                self._load(buffer, message.tensors)
            else:
                with torch.no_grad():
                    message.copy_from(buffer)
        if numbers[-1] == len(self.messages) - 1:
            self._finish_reload()
        _synchronize(self.channel.device)

    def finish(self) -> list[str]:
        """Returns the names of vLLM's parameters that nothing was loaded into since the first
        `load`."""
        self._finish_reload()
        _synchronize(self.channel.device)
        if self.reloads or self.loaded is None:
            return []
        with compat.without_adapters(self.model):
            return unloaded(self.model, self.loaded)

    def _load_and_note_copies(
        self, buffer: Tensor, tensors: list[ParameterSpec]
    ) -> list[Copy] | None:
        """Returns the copies that the loader made, or `None` if it did more than to copy."""
        tracer = layout.CopyTracer(buffer, layout.memory_of(self.model), swallows=False)
        with tracer:
            self._load(buffer, tensors)
        # With other memory, a new parameter took the place of an old one.
        if tracer.others or layout.memory_of(self.model) != tracer.memory:
            return None
        return tracer.copies

    def _load(self, buffer: Tensor, tensors: list[ParameterSpec]) -> None:
        if self.reloads and not self.loading:
            # vLLM keeps loaded weights until a layer is whole
            initialize_layerwise_reload(self.model)
        self.loading = True
        values = unpack(buffer, tensors)
        if self.reloads:
            # it keeps these, but the buffer is used again
            values = [value.clone() for value in values]
        names = [tensor.name for tensor in tensors]
        with (
            torch.no_grad(),
            set_current_vllm_config(self.config),
            compat.without_adapters(self.model),
        ):
            loaded = self.model.load_weights(zip(names, values, strict=True))
        if loaded is None or self.loaded is None:
            self.loaded = None
        else:
            self.loaded = self.loaded | loaded

    def _finish_reload(self) -> None:
        self.loading = False
        if self.reloads:
            with torch.no_grad(), set_current_vllm_config(self.config):
                finalize_layerwise_reload(self.model, self.config.model_config)


def needs_reload(config: VllmConfig, device: torch.device) -> bool:
    """Returns whether vLLM transforms weights after loading them, so that new ones must go all the
    way of it again. On a GPU, some kernels keep the experts in an order of their own; our loader
    for the CPU keeps them as they are."""
    model = config.model_config
    return (
        model.quantization is not None
        or model.use_mla
        or (device.type != "cpu" and model.get_num_experts() > 0)
    )


def unloaded(model: nn.Module, loaded: set[str]) -> list[str]:
    """Returns the names of the parameters that are not among the loaded ones. A module of vLLM's
    may have several names."""
    addresses = {}
    filled = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        addresses[name] = parameter.data_ptr()
        if name in loaded:
            filled.add(addresses[name])
    missing = [name for name, address in addresses.items() if address not in filled]
    return sorted(missing)


# ---------------------------------------------------------------------------------------- adapters


@dataclass
class AdapterPlan:
    """The copies by which vLLM puts an adapter into a slot: into its stacked buffers, from views of
    the message."""

    slot: int
    copies: list[Copy]
    fingerprints: Fingerprints | None = None

    @cached_property
    def copy(self) -> Copies:
        """All copies, which a call makes at once."""
        return Copies(self.copies)


def _rank_of(tensors: list[ParameterSpec]) -> int:
    """Returns the largest rank of an adapter's matrices. It is the smaller side of each: 8 for
    shapes (8, 512) and (512, 8). A bias has none."""
    rank = 0
    for tensor in tensors:
        if len(tensor.shape) > 1:
            rank = max(rank, min(tensor.shape))
    return rank


class AdapterReceiver:
    """
    Receives LoRA adapters from memory to memory: no file, and no request waits for one.

    An adapter's tensors arrive as one message and are kept per adapter id. The first time, vLLM's
    own code puts them into its stacked buffers while a dispatch mode notes every copy; from then on
    the same copies are made directly. The first time also proves that nothing is lost: vLLM
    silently drops tensors of modules that it does not know. `tensors` are in the order of every
    message, under peft's names, in vLLM's LoRA dtype, the scaling already in B. Raises `ValueError`
    if vLLM does not serve such adapters.
    """

    def __init__(self, worker: WorkerExtension, tensors: list[ParameterSpec], config: dict):
        self.worker = worker
        self.manager = worker.model_runner.lora_manager
        self.adapters = self.manager._adapter_manager
        self.device = worker.device
        self.channel = worker._trl_atropos_channel
        self.tensors = tensors
        self.offsets, self.num_bytes = message_layout(tensors)
        self.splits = worker.vllm_config.parallel_config.world_size > 1
        rank = _rank_of(tensors)
        # B comes scaled, so alpha equals the rank here. vLLM judges the other fields.
        unscaled = {**config, "r": rank, "lora_alpha": rank, "use_rslora": False}
        self.helper = PEFTHelper.from_dict(unscaled)
        self.helper.rank_pattern = {}
        self.helper.alpha_pattern = {}
        self.helper.validate_legal(self.manager.lora_config)
        self.messages: dict[int, Tensor] = {}  # by adapter id
        self.plans: dict[int, AdapterPlan] = {}  # by adapter id

    def load(self, adapter_id: int) -> None:
        """Receives the adapter and puts it into the buffers of `adapter_id`, which no request may
        be using."""
        message = self.channel.receive(self.num_bytes)
        if adapter_id not in self.messages:
            self.messages[adapter_id] = self._empty_message()
        self.messages[adapter_id].copy_(message)
        plan = self.plans.get(adapter_id)
        slots = self.adapters.lora_index_to_id
        with torch.no_grad():
            if plan is not None and slots[plan.slot] == adapter_id:
                plan.copy()
            else:
                self._activate(adapter_id)
        _synchronize(self.device)

    def pieces(self, adapter: LoRARequest) -> list[list[Piece]]:
        """Returns the memory behind each of the adapter's tensors, with the parts of it that are
        there."""
        return self._pieces(self._plan(adapter))

    def fingerprints(self, adapter: LoRARequest) -> Fingerprints:
        """Returns the fingerprints of `pieces`."""
        plan = self._plan(adapter)
        if plan.fingerprints is None:
            plan.fingerprints = fingerprints_of(self._pieces(plan), self.tensors)
        return plan.fingerprints

    def _empty_message(self) -> Tensor:
        return torch.empty(self.num_bytes, dtype=torch.uint8, device=self.device)

    def _activate(self, adapter_id: int) -> None:
        """Puts a message into vLLM's buffers the slow way, through vLLM's own code."""
        message = self.messages[adapter_id]
        lora = self._lora_model(adapter_id, message)
        self.adapters.remove_adapter(adapter_id)
        if len(self.adapters) >= self.adapters.capacity:
            self.adapters.remove_oldest_adapter()
        self.adapters.add_adapter(lora)
        with layout.CopyTracer(message) as tracer:
            self.adapters.activate_adapter(adapter_id)
        slot = self.adapters.lora_index_to_id.index(adapter_id)
        plan = AdapterPlan(slot, tracer.copies)
        self._check_coverage(plan)
        self.plans[adapter_id] = plan

    def _plan(self, adapter: LoRARequest) -> AdapterPlan:
        """Returns the plan of an adapter that vLLM serves. If the adapter came as files, vLLM's
        code is watched as it fills the adapter's slot with another one, which never arrives
        there."""
        adapter_id = adapter.lora_int_id
        # Others may be in the slots. What the engine's next step needs of those, it takes back.
        if adapter_id not in self.adapters.lora_index_to_id:
            if adapter_id in self.messages:
                self._activate(adapter_id)
            else:
                self.worker.add_lora(adapter)
        slot = self.adapters.lora_index_to_id.index(adapter_id)
        plan = self.plans.get(adapter_id)
        if plan is None or plan.slot != slot:
            message = self._empty_message()
            tracer = layout.CopyTracer(message, layout.memory_of_adapters(self.adapters))
            with torch.no_grad(), compat.as_if_empty(self.adapters, slot):
                lora = self._lora_model(adapter_id, message)
                self.adapters.add_adapter(lora)
                with tracer:
                    self.adapters.activate_adapter(adapter_id)
            plan = AdapterPlan(slot, tracer.copies)
            self.plans[adapter_id] = plan
        return plan

    def _lora_model(self, adapter_id: int, message: Tensor) -> LoRAModel:
        model = self.adapters.model
        names = [tensor.name for tensor in self.tensors]
        values = unpack(message, self.tensors)
        return LoRAModel.from_lora_tensors(
            lora_model_id=adapter_id,
            tensors=dict(zip(names, values, strict=True)),
            peft_helper=self.helper,
            device=str(self.device),
            dtype=self.manager.lora_config.lora_dtype,
            model_vocab_size=self.manager.vocab_size,
            weights_mapper=compat.adapter_name_mapper(model),
            skip_prefixes=getattr(model, "lora_skip_prefixes", None),
        )

    def _pieces(self, plan: AdapterPlan) -> list[list[Piece]]:
        pieces = [[] for _ in self.tensors]
        for target, source in plan.copies:
            # With tensors at bytes 0, 256 and 512, the float16 element 150 of the message is of the
            # second tensor, which begins at element 128: it is that one's element 22.
            part = Part.of(source)
            itemsize = source.element_size()
            number = bisect_right(self.offsets, part.offset * itemsize) - 1
            begin = self.offsets[number] // itemsize
            pieces[number].append((target, part.moved(-begin)))
        return pieces

    def _check_coverage(self, plan: AdapterPlan) -> None:
        """Raises `ValueError` if a tensor of the trainer did not arrive whole. If several workers
        divide the model, each has only a part."""
        lost = []
        for tensor, parameter_pieces in zip(self.tensors, self._pieces(plan), strict=True):
            arrived = sum(target.numel() for target, _ in parameter_pieces)
            is_whole = arrived == math.prod(tensor.shape)
            if not arrived or not (is_whole or self.splits):
                lost.append(tensor.name)
        if lost:
            raise ValueError(
                f"vLLM has no place for {len(lost)} of {len(self.tensors)} tensors (first: "
                f"{lost[:3]})"
            )
