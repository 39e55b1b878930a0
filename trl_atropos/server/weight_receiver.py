"""Loads the weights that the trainer sends into a worker's model, through vLLM's own loader.

`extension.py` makes a `WeightReceiver` for the first message. A model whose weights vLLM transforms
after loading them goes all the way of it again at each publish; of any other model, the copies that
the loader makes are noted the first time, and made again from then on.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from trl_atropos.protocol import ParameterSpec
from trl_atropos.server import compat, layout, shared_arena
from trl_atropos.server.layout import Copy
from trl_atropos.tensors.channel import Channel, Copies, message_layout, synchronize, unpack


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
                view = _same_view(source, buffer)
                copies.append((target, view))
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
        packed = shared_arena.refusal_of_packed_layers()
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
        synchronize(self.channel.device)

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
        synchronize(self.channel.device)

    def finish(self) -> list[str]:
        """Returns the names of vLLM's parameters that nothing was loaded into since the first
        `load`."""
        self._finish_reload()
        synchronize(self.channel.device)
        if self.reloads or self.loaded is None:
            return []
        with compat.without_adapters(self.model):
            return unloaded(self.model, self.loaded)

    def _load_and_note_copies(
        self, buffer: Tensor, tensors: list[ParameterSpec]
    ) -> list[Copy] | None:
        """Returns the copies that the loader made, or `None` if it did more than to copy."""
        memory_before = layout.memory_of(self.model)
        tracer = layout.CopyTracer(buffer, memory_before, swallows=False)
        with tracer:
            self._load(buffer, tensors)
        # With other memory, a new parameter took the place of an old one.
        memory = layout.memory_of(self.model)
        if tracer.others or memory != tracer.memory:
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
            weights = zip(names, values, strict=True)
            loaded = self.model.load_weights(weights)
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
        address = parameter.data_ptr()
        addresses[name] = address
        if name in loaded:
            filled.add(address)
    missing = []
    for name, address in addresses.items():
        if address not in filled:
            missing.append(name)
    return sorted(missing)
