"""What runs inside every worker of the vLLM server: it shares the model's memory, and receives
weights and adapters.

vLLM mixes `WorkerExtension` into its worker (`--worker-extension-cls`), so that `self` is the
worker. `control.py` calls its methods through `collective_rpc`; they take and return plain JSON
values. Importing this module also registers the loader of `layout.py`, before the model is built.
"""

from bisect import bisect_right
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from trl_atropos.protocol import Attachment, ParameterSpec
from trl_atropos.server import compat, layout
from trl_atropos.tensors.channel import Channel, Copies, message_layout, open_receiver, unpack
from trl_atropos.tensors.fingerprint import Fingerprints, Part, joined
from trl_atropos.tensors.shared_memory import export_storage

# the engine, too, runs in this process, unless the server has several workers
compat.reset_only_cached_blocks()
if compat.is_batch_invariant():
    compat.keep_batch_invariant()


class WorkerExtension:
    def trl_atropos_describe(self) -> dict:
        """What only the worker knows for certain about the engine."""
        config = self.vllm_config
        cuda = self.device.type == "cuda"
        if (lora := config.lora_config) is not None:
            dtype = str(lora.lora_dtype).removeprefix("torch.")
            lora = {"max_rank": lora.max_lora_rank, "max_loras": lora.max_loras, "dtype": dtype}
        return {
            "device": self.device.type,
            "device_uuid": str(torch.cuda.get_device_properties(self.device).uuid)
            if cuda
            else None,
            "num_workers": config.parallel_config.world_size,
            "block_size": config.cache_config.block_size,
            "lora": lora,
            "sleep": config.model_config.enable_sleep_mode,
            "refusals": _refusals(config, self.device.type),
        }

    def trl_atropos_attach(self, specs: list[dict]) -> dict:
        """Finds where each of the trainer's parameters lives here, and exports the memory behind
        them."""
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config), compat.without_adapters(model):
            views, refused = layout.trace(model, _parsed(specs), self.device)
        storages = [export_storage(storage) for storage in layout.unique_storages(model).values()]
        return Attachment(storages=storages, views=views, refused=refused).model_dump()

    def trl_atropos_trace(self, of: str, specs: list[dict], adapter: list | None) -> dict:
        """Finds which parts of the trainer's parameters this worker keeps, or of the adapter that
        it has loaded."""
        specs = _parsed(specs)
        refused = {}
        if of == "adapter":
            receiver = getattr(self, "_trl_atropos_adapter", None)
            if receiver is None or receiver.tensors != specs:  # the adapter came as files
                receiver = self._trl_atropos_adapter = AdapterReceiver(
                    self, specs, {"target_modules": []}
                )
            parts = receiver.parts(LoRARequest(*adapter))
        elif reason := layout.refusal_of_packed_layers() or _refusal_to_compare(
            self.vllm_config, self.device
        ):
            parts = [[] for _ in specs]
            refused = dict.fromkeys((spec.name for spec in specs), reason)
        else:
            model = self.model_runner.get_model()
            with set_current_vllm_config(self.vllm_config), compat.without_adapters(model):
                parts, refused = layout.parts_of(model, specs)
                refused |= layout.unnamed(model, parts)
                self._trl_atropos_places = layout.places_of(model)
                if not hasattr(self, "_trl_atropos_constants"):
                    self._trl_atropos_constants = Constants(model, self.device)
        if of == "weights":
            self._trl_atropos_fingerprints = fingerprints_of(parts, specs)
        return {"parts": [[part for _, part in some] for some in parts], "refused": refused}

    def trl_atropos_inspect(self) -> dict:
        """Whether the model's parameters are no longer where they were traced, and names of
        constants that changed."""
        if not hasattr(self, "_trl_atropos_constants"):  # nothing of this model can be compared
            return {"moved": False, "changed": []}
        model = self.model_runner.get_model()
        with compat.without_adapters(model):
            moved = layout.places_of(model) != self._trl_atropos_places
            return {"moved": moved, "changed": self._trl_atropos_constants.changed(model)}

    def trl_atropos_fingerprints(self, of: str, adapter: list | None) -> list[int]:
        """Of each part that was found, in that order."""
        if of == "adapter":
            return joined(self._trl_atropos_adapter.fingerprints(LoRARequest(*adapter)).compute())
        return joined(self._trl_atropos_fingerprints.compute())

    def trl_atropos_open_channel(self, specification: dict) -> None:
        """Joins the trainer's channel, in place of an earlier one."""
        parallel = self.vllm_config.parallel_config
        # Not `data_parallel_rank`, which is 0 in every replica of a dense model.
        rank = parallel.data_parallel_index * parallel.world_size + self.rank
        self._trl_atropos_channel = open_receiver(specification, rank, self.device)
        self._trl_atropos_weights = None
        self._trl_atropos_adapter = None

    def trl_atropos_load_weights(self, tensors: list[dict]) -> None:
        if self._trl_atropos_weights is None:
            model = self.model_runner.get_model()
            self._trl_atropos_weights = WeightReceiver(
                model, self.vllm_config, self._trl_atropos_channel
            )
        self._trl_atropos_weights.load(_parsed(tensors))

    def trl_atropos_load_weights_again(self, messages: list[int]) -> None:
        self._trl_atropos_weights.load_again(messages)

    def trl_atropos_finish_weights(self) -> list[str]:
        return self._trl_atropos_weights.finish()

    def trl_atropos_set_up_adapter(self, tensors: list[dict], config: dict) -> str | None:
        """Returns why vLLM cannot serve such an adapter, or None."""
        try:
            self._trl_atropos_adapter = AdapterReceiver(self, _parsed(tensors), config)
        except ValueError as error:
            return str(error)

    def trl_atropos_load_adapter(self, adapter_id: int) -> None:
        self._trl_atropos_adapter.load(adapter_id)


def _parsed(specs: list[dict]) -> list[ParameterSpec]:
    return [ParameterSpec.model_validate(spec) for spec in specs]


def _refusals(config: VllmConfig, device: str) -> list[str]:
    """Why this engine's weights cannot be trained in place, each with the way out."""
    parallel = config.parallel_config
    model = config.model_config
    found = []
    if parallel.tensor_parallel_size > 1 or parallel.pipeline_parallel_size > 1:
        found.append(
            f"it splits the model over {parallel.tensor_parallel_size} x "
            f"{parallel.pipeline_parallel_size} devices (start it with --tensor-parallel-size 1 "
            "--pipeline-parallel-size 1)"
        )
    if model.quantization is not None:
        found.append(
            f"its weights are quantised ({model.quantization}); serve an unquantised model"
        )
    if model.enable_sleep_mode:
        found.append(
            "it was started with --enable-sleep-mode, whose memory cannot be shared; leave the "
            "flag out"
        )
    if model.use_mla:
        found.append(
            "multi-head latent attention keeps transformed copies of its weights; use another model"
        )
    if device == "cpu" and config.load_config.load_format != layout.LOAD_FORMAT:
        found.append(
            f"it was not started with --load-format {layout.LOAD_FORMAT}; start it by `trl-atropos "
            "serve`"
        )
    packed = layout.refusal_of_packed_layers()
    return found if packed is None else [*found, packed]


def _refusal_to_compare(config: VllmConfig, device: torch.device) -> str | None:
    return (
        "vLLM transforms its weights after loading them" if needs_reload(config, device) else None
    )


def fingerprints_of(
    parts: list[list[tuple[torch.Tensor, Part]]], specs: list[ParameterSpec]
) -> Fingerprints:
    """One fingerprint for each part, parameter by parameter."""
    flat = [
        (values, part, spec.shape)
        for some, spec in zip(parts, specs, strict=True)
        for values, part in some
    ]
    return Fingerprints([(*one, number) for number, one in enumerate(flat)], len(flat))


class Constants:
    """What a config determines and no publish changes: numbers of a model's modules, and its rotary
    tables."""

    def __init__(self, model: torch.nn.Module, device: torch.device):
        self.device = device
        self.numbers = layout.numbers_of(model)
        self._addresses: list[int] = []
        self.fingerprints = self._fingerprints_of(layout.tables_of(model, device))

    def changed(self, model: torch.nn.Module) -> list[str]:
        """Names of those that are not what they were at first."""
        numbers = layout.numbers_of(model)
        fingerprints = self._fingerprints_of(layout.tables_of(model, self.device))
        found = [name for name, value in self.numbers.items() if numbers.get(name) != value]
        return found + [
            name for name, value in self.fingerprints.items() if fingerprints.get(name) != value
        ]

    def _fingerprints_of(self, tables: dict[str, torch.Tensor]) -> dict[str, int]:
        addresses = [table.data_ptr() for table in tables.values()]
        if addresses != self._addresses:
            parts = [
                (one, Part.whole(one.shape), one.shape, number)
                for number, one in enumerate(tables.values())
            ]
            self._addresses, self._of_tables = addresses, Fingerprints(parts, len(parts))
        return dict(zip(tables, joined(self._of_tables.compute()), strict=True)) if tables else {}


def _synchronize(device: torch.device) -> None:
    """Waits for the copies that are queued: an answer to the trainer means that they are done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


@dataclass
class Message:
    """A message of weights that was loaded once. `copies` are what vLLM's loader made of it: into
    which memory, and from where in the message. `None` if it did more than to copy."""

    tensors: list[ParameterSpec]
    copies: list[tuple[torch.Tensor, torch.Tensor]] | None
    buffer: torch.Tensor  # that it came in, as long as the message
    all_copies: Copies | None = None  # from that buffer

    def copy_from(self, buffer: torch.Tensor) -> None:
        """Makes the copies, from a buffer with the same message anew."""
        if buffer.data_ptr() != self.buffer.data_ptr():
            for number, (target, source) in enumerate(self.copies):
                place = source.size(), source.stride(), source.storage_offset()
                self.copies[number] = target, buffer.view(source.dtype).as_strided(*place)
            self.buffer = buffer
            self.all_copies = None
        if self.all_copies is None:
            self.all_copies = Copies(self.copies)
        self.all_copies()


class WeightReceiver:
    """Loads what the trainer sends through vLLM's own loader, which takes tensors under the names
    of a checkpoint and does the fusing, slicing and padding for this worker. The first time, any
    number of `load`, then `finish`. What the loader copies where is noted, and from then on
    `load_again` makes the same copies, all of a message at once. Raises `ValueError` if new weights
    would not reach some layers."""

    def __init__(self, model: torch.nn.Module, config: VllmConfig, channel: Channel):
        if packed := layout.refusal_of_packed_layers():
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
            self.messages, self.loaded = [], set()
        buffer = self.channel.receive(message_layout(tensors)[1])
        tracer = layout.CopyTracer(buffer, layout.memory_of(self.model), swallows=False)
        with tracer if not self.reloads else nullcontext():
            self._load(buffer, tensors)
        # else a new parameter took the place of an old one
        same = layout.memory_of(self.model) == tracer.memory
        only_copies = same and not self.reloads and not tracer.others
        self.messages.append(Message(tensors, tracer.copies if only_copies else None, buffer))
        _synchronize(self.channel.device)

    def load_again(self, numbers: list[int]) -> None:
        """Receives messages that were loaded before, and loads them. The last of all finishes."""
        known = [self.messages[number] for number in numbers]
        buffers = self.channel.messages([message.buffer.numel() for message in known])
        for message, buffer in zip(known, buffers, strict=True):
            if message.copies is None:
                self._load(buffer, message.tensors)
            else:
                with torch.no_grad():
                    message.copy_from(buffer)
        if numbers[-1] == len(self.messages) - 1:
            self._finish_reload()
        _synchronize(self.channel.device)

    def _load(self, buffer: torch.Tensor, tensors: list[ParameterSpec]) -> None:
        if self.reloads and not self.loading:
            # loaded weights are kept until a layer is whole
            initialize_layerwise_reload(self.model)
        self.loading = True
        values = unpack(buffer, tensors)
        if self.reloads:
            # kept until a layer is complete; the buffer is not
            values = [value.clone() for value in values]
        named = zip([tensor.name for tensor in tensors], values, strict=True)
        with (
            torch.no_grad(),
            set_current_vllm_config(self.config),
            compat.without_adapters(self.model),
        ):
            loaded = self.model.load_weights(named)
        self.loaded = None if loaded is None or self.loaded is None else self.loaded | loaded

    def finish(self) -> list[str]:
        """Names of vLLM's parameters that nothing was loaded into since the first `load`."""
        self._finish_reload()
        _synchronize(self.channel.device)
        if self.reloads or self.loaded is None:
            return []
        with compat.without_adapters(self.model):
            return unloaded(self.model, self.loaded)

    def _finish_reload(self) -> None:
        self.loading = False
        if self.reloads:
            with torch.no_grad(), set_current_vllm_config(self.config):
                finalize_layerwise_reload(self.model, self.config.model_config)


def needs_reload(config: VllmConfig, device: torch.device) -> bool:
    """Whether vLLM transforms weights after loading them, so that new ones must go all the way of
    it again. On a GPU, some kernels keep the experts in an order of their own; our loader for the
    CPU keeps them as they are."""
    model = config.model_config
    return (
        model.quantization is not None
        or model.use_mla
        or (device.type != "cpu" and model.get_num_experts() > 0)
    )


def unloaded(model: torch.nn.Module, loaded: set[str]) -> list[str]:
    """Names of the parameters that are not among the loaded ones. A module of vLLM's may have
    several names."""
    places = {
        name: parameter.data_ptr()
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    filled = {places[name] for name in loaded & places.keys()}  # a loader may name buffers, too
    return sorted(name for name, place in places.items() if place not in filled)


@dataclass
class AdapterPlan:
    """What vLLM copies to put an adapter into a slot: into its stacked buffers, and from where in
    the message."""

    slot: int
    copies: list[tuple[torch.Tensor, torch.Tensor]]
    fingerprints: Fingerprints | None = None

    @cached_property
    def copy(self) -> Copies:
        return Copies(self.copies)


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
        self.channel = getattr(worker, "_trl_atropos_channel", None)
        self.tensors = tensors
        self.offsets, self.num_bytes = message_layout(tensors)
        self.splits = worker.vllm_config.parallel_config.world_size > 1
        # a bias has none
        rank = max(min(tensor.shape) for tensor in tensors if len(tensor.shape) > 1)
        # B comes scaled, so that alpha equals the rank here; the other fields are for vLLM to
        # refuse.
        self.helper = PEFTHelper.from_dict(
            {**config, "r": rank, "lora_alpha": rank, "use_rslora": False}
        )
        self.helper.rank_pattern = {}
        self.helper.alpha_pattern = {}
        self.helper.validate_legal(self.manager.lora_config)
        self.values: dict[int, torch.Tensor] = {}  # by adapter id: the message
        self.plans: dict[int, AdapterPlan] = {}

    def load(self, adapter_id: int) -> None:
        """Receives the adapter and puts it into the buffers of `adapter_id`, which no request may
        be using."""
        message = self.channel.receive(self.num_bytes)
        if adapter_id not in self.values:
            self.values[adapter_id] = torch.empty(
                self.num_bytes, dtype=torch.uint8, device=self.device
            )
        self.values[adapter_id].copy_(message)
        plan = self.plans.get(adapter_id)
        with torch.no_grad():
            if plan is not None and self.adapters.lora_index_to_id[plan.slot] == adapter_id:
                plan.copy()
            else:
                self._activate(adapter_id)
        _synchronize(self.device)

    def _activate(self, adapter_id: int) -> None:
        """The slow way, through vLLM's own code."""
        values = self.values[adapter_id]
        lora = self._lora_model(adapter_id, values)
        self.adapters.remove_adapter(adapter_id)
        if len(self.adapters) >= self.adapters.capacity:
            self.adapters.remove_oldest_adapter()
        self.adapters.add_adapter(lora)
        with layout.CopyTracer(values) as tracer:
            self.adapters.activate_adapter(adapter_id)
        plan = AdapterPlan(self.adapters.lora_index_to_id.index(adapter_id), tracer.copies)
        self._check_coverage(self._parts(plan))
        self.plans[adapter_id] = plan

    def _lora_model(self, adapter_id: int, values: torch.Tensor) -> LoRAModel:
        model = self.adapters.model
        return LoRAModel.from_lora_tensors(
            lora_model_id=adapter_id,
            tensors=dict(
                zip([t.name for t in self.tensors], unpack(values, self.tensors), strict=True)
            ),
            peft_helper=self.helper,
            device=str(self.device),
            dtype=self.manager.lora_config.lora_dtype,
            model_vocab_size=self.manager.vocab_size,
            weights_mapper=compat.adapter_name_mapper(model),
            skip_prefixes=getattr(model, "lora_skip_prefixes", None),
        )

    def _plan(self, adapter: LoRARequest) -> AdapterPlan:
        """Of an adapter that vLLM serves. If it came as files, vLLM's code is watched as it fills
        that slot with another adapter, which never arrives there."""
        adapter_id = adapter.lora_int_id
        # Others may be in the slots. What the engine's next step needs of those, it takes back.
        if adapter_id not in self.adapters.lora_index_to_id:
            if adapter_id in self.values:
                self._activate(adapter_id)
            else:
                self.worker.add_lora(adapter)
        slot = self.adapters.lora_index_to_id.index(adapter_id)
        plan = self.plans.get(adapter_id)
        if plan is None or plan.slot != slot:
            values = torch.empty(self.num_bytes, dtype=torch.uint8, device=self.device)
            tracer = layout.CopyTracer(values, layout.memory_of_adapters(self.adapters))
            with torch.no_grad(), compat.as_if_empty(self.adapters, slot):
                self.adapters.add_adapter(self._lora_model(adapter_id, values))
                with tracer:
                    self.adapters.activate_adapter(adapter_id)
            plan = self.plans[adapter_id] = AdapterPlan(slot, tracer.copies)
        return plan

    def parts(self, adapter: LoRARequest) -> list[list[tuple[torch.Tensor, Part]]]:
        """The memory behind each of the adapter's tensors, and which parts of it are there."""
        return self._parts(self._plan(adapter))

    def _parts(self, plan: AdapterPlan) -> list[list[tuple[torch.Tensor, Part]]]:
        found: list[list[tuple[torch.Tensor, Part]]] = [[] for _ in self.tensors]
        for target, source in plan.copies:
            begins = [offset // source.element_size() for offset in self.offsets]
            number = bisect_right(begins, source.storage_offset()) - 1
            found[number].append((target, Part.of(source).moved(-begins[number])))
        return found

    def fingerprints(self, adapter: LoRARequest) -> Fingerprints:
        plan = self._plan(adapter)
        if plan.fingerprints is None:
            plan.fingerprints = fingerprints_of(self._parts(plan), self.tensors)
        return plan.fingerprints

    def _check_coverage(self, parts: list[list[tuple[torch.Tensor, Part]]]) -> None:
        """Raises `ValueError` if a tensor of the trainer did not arrive whole."""
        arrived = [sum(target.numel() for target, _ in some) for some in parts]
        lost = [
            tensor.name
            for tensor, count in zip(self.tensors, arrived, strict=True)
            if count == 0 or (not self.splits and count != tensor.shape[0] * tensor.shape[1])
        ]
        if lost:
            raise ValueError(
                f"vLLM has no place for {len(lost)} of {len(self.tensors)} tensors (first: "
                f"{lost[:3]})"
            )
