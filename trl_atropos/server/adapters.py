"""Receives LoRA adapters in a worker, from memory to memory: no file, and no request waits for one.

An adapter's tensors arrive as one message and are kept per adapter id. The first time, vLLM's own code puts them into
its stacked buffers while a dispatch mode notes every copy; from then on the same copies are made directly. That first
time also proves that nothing is lost: vLLM drops tensors of modules that it does not know without a word.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper

from trl_atropos.protocol import LoadReply, ParameterSpec
from trl_atropos.server import compat
from trl_atropos.tensors.channel import Channel, message_layout, unpack


@contextmanager
def without_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Takes vLLM's LoRA layers from around the base layers, where some versions do not find a checkpoint's names."""
    wrapped = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, BaseLayerWithLoRA) and isinstance(getattr(child, "base_layer", None), torch.nn.Module)
    ]
    for parent, name, child in wrapped:
        setattr(parent, name, child.base_layer)
    try:
        yield
    finally:
        for parent, name, child in wrapped:
            setattr(parent, name, child)


class CopyTracer(TorchDispatchMode):
    """Notes every copy out of one storage, and lets it take place."""

    def __init__(self, source: torch.Tensor):
        super().__init__()
        self.pointer = source.untyped_storage().data_ptr()
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default and args[1].untyped_storage().data_ptr() == self.pointer:
            self.copies.append((args[0], args[1]))
        return func(*args, **(kwargs or {}))


class AdapterReceiver:
    """
    Args:
        worker: vLLM's worker, started with `--enable-lora`.
        channel (`Channel`): Where the trainer's bytes come from.
        tensors (`list[ParameterSpec]`): The adapter's tensors, in the order of every message, under peft's names and
            in vLLM's LoRA dtype. The scaling is already in B.
        config (`dict`): The adapter's `LoraConfig` as JSON.

    Raises:
        ValueError: vLLM does not serve such adapters; the message says why.
    """

    def __init__(self, worker, channel: Channel, tensors: list[ParameterSpec], config: dict):
        self.manager = worker.model_runner.lora_manager
        self.adapters = self.manager._adapter_manager
        self.device = worker.device
        self.channel = channel
        self.tensors = tensors
        self.splits = worker.vllm_config.parallel_config.world_size > 1
        rank = max(min(tensor.shape) for tensor in tensors)
        # B comes scaled, so that alpha equals the rank here; the other fields are for vLLM to refuse.
        self.helper = PEFTHelper.from_dict({**config, "r": rank, "lora_alpha": rank, "use_rslora": False})
        self.helper.rank_pattern, self.helper.alpha_pattern = {}, {}
        self.helper.validate_legal(self.manager.lora_config)
        self.values: dict[int, torch.Tensor] = {}
        self.plans: dict[int, tuple[int, list[torch.Tensor], list[torch.Tensor]]] = {}

    def load(self, adapter_id: int) -> LoadReply:
        """Receives the adapter and puts it into the buffers of `adapter_id`, which no request may be using."""
        started = time.perf_counter()
        _, num_bytes = message_layout(self.tensors)
        message = self.channel.receive(num_bytes)
        received = time.perf_counter()
        if adapter_id not in self.values:
            self.values[adapter_id] = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        self.values[adapter_id].copy_(message)
        with torch.no_grad():
            if self._is_active(adapter_id):
                _, targets, sources = self.plans[adapter_id]
                torch._foreach_copy_(targets, sources)
            else:
                self._activate(adapter_id)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return LoadReply(receive_ms=(received - started) * 1e3, apply_ms=(time.perf_counter() - received) * 1e3)

    def _is_active(self, adapter_id: int) -> bool:
        plan = self.plans.get(adapter_id)
        return plan is not None and self.adapters.lora_index_to_id[plan[0]] == adapter_id

    def _activate(self, adapter_id: int) -> None:
        """The slow way, through vLLM's own code."""
        values = self.values[adapter_id]
        model = self.adapters.model
        lora = LoRAModel.from_lora_tensors(
            lora_model_id=adapter_id,
            tensors=dict(zip([t.name for t in self.tensors], unpack(values, self.tensors), strict=True)),
            peft_helper=self.helper,
            device=str(self.device),
            dtype=self.manager.lora_config.lora_dtype,
            model_vocab_size=self.manager.vocab_size,
            weights_mapper=compat.adapter_name_mapper(model),
            skip_prefixes=getattr(model, "lora_skip_prefixes", None),
        )
        self.adapters.remove_adapter(adapter_id)
        if len(self.adapters) >= self.adapters.capacity:
            self.adapters.remove_oldest_adapter()
        self.adapters.add_adapter(lora)
        with CopyTracer(values) as tracer:
            self.adapters.activate_adapter(adapter_id)
        slot = self.adapters.lora_index_to_id.index(adapter_id)
        self._check_coverage(tracer.copies, slot)
        self.plans[adapter_id] = (slot, [t for t, _ in tracer.copies], [s for _, s in tracer.copies])

    def _check_coverage(self, copies: list[tuple[torch.Tensor, torch.Tensor]], slot: int) -> None:
        """Every tensor of the trainer must have arrived whole, and nothing else may be in the slot."""
        offsets, _ = message_layout(self.tensors)
        itemsize = copies[0][1].element_size() if copies else 1
        arrived = dict.fromkeys(offsets, 0)
        for _, source in copies:
            begin = source.storage_offset() * itemsize
            arrived[max(offset for offset in offsets if offset <= begin)] += source.numel()
        lost = [
            tensor.name
            for tensor, offset in zip(self.tensors, offsets, strict=True)
            if arrived[offset] == 0 or (not self.splits and arrived[offset] != tensor.shape[0] * tensor.shape[1])
        ]
        if lost:
            raise ValueError(
                f"vLLM has no place for {len(lost)} of the adapter's {len(self.tensors)} tensors (first: {lost[:3]})"
            )
        inside = sum(int(torch.count_nonzero(buffer[slot])) for buffer in self._buffers())
        expected = sum(int(torch.count_nonzero(target)) for target, _ in copies)
        if inside != expected:
            raise ValueError(
                f"the server's buffers of this adapter hold {inside} values, of which {expected} are the trainer's"
            )

    def _buffers(self) -> list[torch.Tensor]:
        found = []
        for module in self.adapters.modules.values():
            for stacked in (module.lora_a_stacked, module.lora_b_stacked):
                found += list(stacked) if isinstance(stacked, tuple | list) else [stacked]
        return found
