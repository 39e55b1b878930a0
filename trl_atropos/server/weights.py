"""Receives full weights in a worker: what the trainer sends through a channel goes through vLLM's own loader.

The lifecycle is vLLM's: a first load, any number of further ones, `finish`. vLLM's loader takes tensors under the
names of a checkpoint and does the fusing, slicing and padding for this worker.
"""

import time

import torch
from vllm.config import VllmConfig, set_current_vllm_config

from trl_atropos.protocol import LoadReply, ParameterSpec
from trl_atropos.server import compat
from trl_atropos.server.adapters import without_adapters
from trl_atropos.tensors.channel import Channel, message_layout, unpack


class WeightReceiver:
    """
    Args:
        model (`torch.nn.Module`): vLLM's model.
        config (`VllmConfig`): The engine's configuration.
        channel (`Channel`): Where the trainer's bytes come from.
    """

    def __init__(self, model: torch.nn.Module, config: VllmConfig, channel: Channel):
        self.model = model
        self.config = config
        self.channel = channel
        self.reloads = _needs_reload(model, config, channel.device)
        self.loading = False
        self.loaded: set[str] | None = set()  # vLLM's names; None: this model's loader does not tell

    def load(self, tensors: list[ParameterSpec]) -> LoadReply:
        """Receives one message and loads it. The worker's weights are neither old nor new until `finish`."""
        if not self.loading:
            self.loading = True
            self.loaded = set()
            if self.reloads:
                compat.begin_reload(self.model)
        started = time.perf_counter()
        _, num_bytes = message_layout(tensors)
        message = self.channel.receive(num_bytes)
        received = time.perf_counter()
        values = unpack(message, tensors)
        if self.reloads:
            values = [value.clone() for value in values]  # kept until a layer is complete; the buffer is not
        names = [tensor.name for tensor in tensors]
        with torch.no_grad(), set_current_vllm_config(self.config), without_adapters(self.model):
            told = self.model.load_weights(zip(names, values, strict=True))
        self.loaded = None if told is None or self.loaded is None else self.loaded | told
        _synchronize(self.channel.device)
        return LoadReply(receive_ms=(received - started) * 1e3, apply_ms=(time.perf_counter() - received) * 1e3)

    def finish(self) -> list[str]:
        """Names of vLLM's parameters that nothing was loaded into since the first `load`."""
        self.loading = False
        if self.reloads:
            with torch.no_grad(), set_current_vllm_config(self.config):
                compat.finish_reload(self.model, self.config.model_config)
            _synchronize(self.channel.device)
            return []
        if self.loaded is None:
            return []
        with without_adapters(self.model):
            return unloaded(self.model, self.loaded)


def unloaded(model: torch.nn.Module, loaded: set[str]) -> list[str]:
    """Names of the parameters that are not among the loaded ones. A module of vLLM's may have several names."""
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters(remove_duplicate=False)}
    filled = {places[name] for name in loaded & places.keys()}  # a loader may name buffers, too
    return sorted(name for name, place in places.items() if place not in filled)


def _needs_reload(model: torch.nn.Module, config: VllmConfig, device: torch.device) -> bool:
    """Whether vLLM transforms weights after loading, so that they must go through the whole of it again."""
    if config.model_config.quantization is not None or config.model_config.use_mla:
        return True
    # On a GPU, some kernels keep the experts in an order of their own; our loader for the CPU keeps them as they are.
    return device.type != "cpu" and any("FusedMoE" in type(module).__name__ for module in model.modules())


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
