"""`vllm_mode: nccl_lora`: only the adapter moves, from memory to memory, in one message.

The server has two places for it, so that requests in flight finish on the version that they began with while new ones
get the next. With `colocate` and a `peft_config`, the frozen base is one copy that both processes share, and the
adapter takes this way through shared memory.
"""

import logging
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer

from trl_atropos.channel import message_layout, unpack
from trl_atropos.errors import AttachError
from trl_atropos.protocol import ParameterSpec
from trl_atropos.weights import ranks
from trl_atropos.weights.gather import WHOLE, adapter_shapes_of, iter_adapter_parameters, sharding_of
from trl_atropos.weights.links import choose_transport, open_channel, send_message
from trl_atropos.weights.servers import Servers
from trl_atropos.weights.transfer import Moved, Transfer

logger = logging.getLogger(__name__)

ADAPTER = "default"  # peft's name of the adapter that TRL trains


class MemoryLora(Transfer):
    """
    Args:
        servers (`Servers`): Started with `--enable-lora`.
        transport (`str`): `"nccl"`, `"gloo"`, `"memory"`, or `"auto"`.
        base (`Transfer`, *optional*): What shares the frozen base with the servers.
    """

    clear_cache = False  # what is in flight keeps its adapter, and new requests have prefixes of their own

    def __init__(self, servers: Servers, transport: str = "auto", base: Transfer | None = None):
        super().__init__(servers)
        self.transport = transport
        self.base = base

    def load(self, model: Any, args: Any, peft_config: Any) -> tuple[Transfer, Any]:
        self.servers.connect()
        check_is_adapter(model, peft_config)
        return self, model

    def attach(self, trainer: Any) -> None:
        self._trainer = trainer
        if self.base is not None:
            self.base.attach(trainer)
        check_servable(trainer.model, self.servers)
        dtype = self.servers.info.lora.dtype
        shapes = adapter_shapes_of(trainer.model, trainer.accelerator)
        self._tensors = [spec.model_copy(update={"dtype": dtype}) for spec in shapes]
        scales = scales_of(trainer.model)
        self._scales = [scales.get(spec.name, 1.0) for spec in shapes]
        self._values: list[torch.Tensor] | None = None  # where nothing is sharded, the same tensors every time
        ranks.together(lambda: self._connect(trainer))

    def _connect(self, trainer: Any) -> None:
        if not self.servers.clients:
            return
        device = trainer.accelerator.device
        transport = choose_transport(self.transport, self.servers, device)
        _, num_bytes = message_layout(self._tensors)
        self._channel = open_channel(transport, self.servers, device, num_bytes)
        self._message = self._channel.staging(num_bytes)
        self._slots = unpack(self._message, self._tensors)
        config = trainer.model.peft_config[ADAPTER].to_dict()
        announce(self.servers, self._tensors, config)
        logger.info(
            "the adapter's %d tensors (%.2f MB) go to %d server(s) through %s",
            len(self._tensors),
            num_bytes / 1e6,
            len(self.servers.clients),
            transport,
        )

    def check(self) -> None:
        if self.base is not None:
            self.base.check()

    @torch.no_grad()
    def send(self, policy_version: int) -> Moved:
        values = self._values
        if values is None:
            model, accelerator = self._trainer.model, self._trainer.accelerator
            values = [tensor for _, tensor in iter_adapter_parameters(model, accelerator)]
            if sharding_of(accelerator) in WHOLE:  # then these are the parameters themselves
                self._values = values
        return ranks.together(lambda: self._push(values)) or Moved()

    def _push(self, values: list[torch.Tensor]) -> Moved | None:
        if not self.servers.clients:
            return None
        # The scaling goes into B while it still has the trainer's precision.
        scaled = [i for i, scale in enumerate(self._scales) if scale != 1.0]
        values = list(values)
        for i, product in zip(
            scaled,
            torch._foreach_mul([values[i] for i in scaled], [self._scales[i] for i in scaled]) if scaled else [],
            strict=True,
        ):
            values[i] = product
        torch._foreach_copy_(self._slots, values)
        replies = send_message(self._channel, self._message, self.servers, lambda client: client.load_adapter())
        return Moved(self._message.numel(), max(reply.apply_ms for reply in replies))


def check_is_adapter(model: Any, peft_config: Any) -> None:
    """Raises if the run trains the whole model."""
    if peft_config is None and not isinstance(model, PeftModel):
        raise AttachError(
            "This `vllm_mode` sends a LoRA adapter, but the run has none: set `use_peft: true` (or pass a "
            "`peft_config`), or use `vllm_mode: colocate` or `server` to train all weights."
        )


def check_servable(model: PeftModel, servers: Servers) -> None:
    """Raises for what no vLLM server can serve as an adapter, or not these."""
    if servers.info.lora is None:
        raise AttachError(
            "The server was started without adapters: add `--enable-lora --max-lora-rank R` (in a recipe, to "
            "`vllm_args`), or start it by `trl-atropos serve --vllm_mode nccl_lora`."
        )
    if servers.info.lora.max_loras < 2:
        raise AttachError(
            "The server has a place for one adapter, but requests in flight need their own while the next version "
            "comes: start it with `--max-loras 2`."
        )
    config = model.peft_config[ADAPTER]
    kind = getattr(config.peft_type, "value", config.peft_type)
    if kind != "LORA":
        raise AttachError(f"The adapter is of type {kind}; vLLM serves LORA only: use a `LoraConfig`.")
    if config.modules_to_save:
        raise AttachError(
            f"`modules_to_save` ({', '.join(config.modules_to_save)}) trains whole modules besides the adapter, which "
            "a vLLM server cannot take with it: remove it, or use `vllm_mode: server`, which sends merged weights."
        )
    others = [
        name for name, parameter in model.named_parameters() if parameter.requires_grad and f".{ADAPTER}" not in name
    ]
    if others:
        raise AttachError(
            f"{len(others)} parameters outside of the adapter are trained (first: {others[0]!r}), which would never "
            "reach the server: use `vllm_mode: server`, which sends merged weights."
        )
    rank = max([config.r, *config.rank_pattern.values()])
    if rank > servers.info.lora.max_rank:
        raise AttachError(
            f"The adapter's rank is {rank}, the server's largest {servers.info.lora.max_rank}: start the server with "
            f"`--max-lora-rank {rank}` or more, or lower `lora_r`."
        )


def announce(servers: Servers, tensors: list[ParameterSpec], config: dict) -> None:
    """Lets the servers refuse the adapter before training begins."""
    plain = {
        name: sorted(value) if isinstance(value, set) else value
        for name, value in config.items()
        if isinstance(value, str | int | float | bool | list | dict | set | None)
    }
    for client, refused in zip(
        servers.clients, servers.each_here(lambda client: client.set_up_adapter(tensors, plain)), strict=True
    ):
        if refused is not None:
            raise AttachError(
                f"The server at {client.url} cannot serve this adapter: {refused}. Change the adapter, or use "
                "`vllm_mode: server`, which sends merged weights."
            )


def scales_of(model: PeftModel) -> dict[str, float]:
    """What each B is multiplied by, under its name in a checkpoint: alpha over rank, or as rsLoRA and patterns say."""
    scales = {}
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer) and ADAPTER in module.scaling:
            for leaf in ("lora_B.weight", "lora_embedding_B"):
                scales[f"{name}.{leaf}"] = float(module.scaling[ADAPTER])
    return scales
