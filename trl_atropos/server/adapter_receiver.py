"""Puts the adapters that the trainer sends into the buffers from which a worker's model reads them.

`extension.py` makes an `AdapterReceiver` for each kind of adapter: its tensors, and what peft says
of it.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from trl_atropos.protocol import ParameterSpec
from trl_atropos.server import compat, layout
from trl_atropos.server.layout import Copy, Piece
from trl_atropos.server.proof import fingerprints_of
from trl_atropos.tensors.channel import Copies, message_layout, synchronize, unpack
from trl_atropos.tensors.fingerprint import Fingerprints
from trl_atropos.tensors.rectangles import Part

if TYPE_CHECKING:
    from trl_atropos.server.extension import WorkerExtension


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
            smaller_side = min(tensor.shape)
            rank = max(rank, smaller_side)
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

    def __init__(self, worker: "WorkerExtension", tensors: list[ParameterSpec], config: dict):
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
        synchronize(self.device)

    def pieces(self, adapter: LoRARequest) -> list[list[Piece]]:
        """Returns the memory behind each of the adapter's tensors, with the parts of it that are
        there."""
        plan = self._plan(adapter)
        return self._pieces(plan)

    def fingerprints(self, adapter: LoRARequest) -> Fingerprints:
        """Returns the fingerprints of `pieces`."""
        plan = self._plan(adapter)
        if plan.fingerprints is None:
            pieces = self._pieces(plan)
            plan.fingerprints = fingerprints_of(pieces, self.tensors)
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
            memory = layout.memory_of_adapters(self.adapters)
            tracer = layout.CopyTracer(message, memory)
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
        values = unpack(message, self.tensors)
        tensors = {}
        for tensor, value in zip(self.tensors, values, strict=True):
            tensors[tensor.name] = value
        skipped = getattr(model, "lora_skip_prefixes", None)
        return LoRAModel.from_lora_tensors(
            lora_model_id=adapter_id,
            tensors=tensors,
            peft_helper=self.helper,
            device=str(self.device),
            dtype=self.manager.lora_config.lora_dtype,
            model_vocab_size=self.manager.vocab_size,
            weights_mapper=compat.adapter_name_mapper(model),
            skip_prefixes=skipped,
        )

    def _pieces(self, plan: AdapterPlan) -> list[list[Piece]]:
        pieces = [[] for _ in self.tensors]
        for target, source in plan.copies:
            # With tensors at bytes 0, 256 and 512, the float16 element 150 of the message is of the
            # second tensor, which begins at element 128: it is that one's element 22.
            part = Part.of(source)
            itemsize = source.element_size()
            first_byte = part.offset * itemsize
            number = bisect_right(self.offsets, first_byte) - 1
            begin = self.offsets[number] // itemsize
            moved = part.moved(-begin)
            pieces[number].append((target, moved))
        return pieces

    def _check_coverage(self, plan: AdapterPlan) -> None:
        """Raises `ValueError` if a tensor of the trainer did not arrive whole. If several workers
        divide the model, each has only a part."""
        lost = []
        pieces = self._pieces(plan)
        for tensor, parameter_pieces in zip(self.tensors, pieces, strict=True):
            arrived = 0
            for target, _ in parameter_pieces:
                arrived += target.numel()
            sent = math.prod(tensor.shape)
            is_whole = arrived == sent
            if not arrived or not (is_whole or self.splits):
                lost.append(tensor.name)
        if lost:
            raise ValueError(
                f"vLLM has no place for {len(lost)} of {len(self.tensors)} tensors (first: "
                f"{lost[:3]})"
            )
