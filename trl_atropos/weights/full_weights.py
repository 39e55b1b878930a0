"""`vllm_mode: server`: all weights go to running servers, packed, one layer after the other.

Also what `colocate` falls back to. Rank 0 packs what all ranks gather, and sends it through a channel (NCCL between
devices, gloo on the CPU, shared memory on one device). On one device, parameters that vLLM keeps as they are get
written straight into the server's memory, and only the others go through its loader.
"""

import itertools
import logging
import time
from collections.abc import Iterator
from typing import Any

import torch
from peft import PeftModel

from trl_atropos.distributed import on_main, together
from trl_atropos.errors import AttachError
from trl_atropos.protocol import ParameterSpec
from trl_atropos.server_client import Servers
from trl_atropos.tensors.channel import ALIGNMENT, Channel, message_layout
from trl_atropos.weights.gather import WHOLE, base_model, buffers_of, iter_full_parameters, shapes_of, sharding_of
from trl_atropos.weights.names import checkpoint_tensors, parameter_specs
from trl_atropos.weights.transfer import Moved, Transfer, choose_transport, open_channel, open_views, send_message

logger = logging.getLogger(__name__)

CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}
"""Bytes of one message. A larger one costs memory on both sides, a smaller one more calls to the server."""


class FullWeights(Transfer):
    """
    Args:
        servers (`Servers`): Where the weights go.
        transport (`str`): `"nccl"`, `"gloo"`, `"memory"`, or `"auto"`.
        chunk_bytes (`int`, *optional*): Of one message; a larger parameter makes a larger one.
    """

    def __init__(self, servers: Servers, transport: str = "auto", chunk_bytes: int | None = None):
        super().__init__(servers)
        self.transport = transport
        self.chunk_bytes = chunk_bytes
        self.views: list[dict[str, torch.Tensor]] = []  # of each server's memory, by parameter name
        self._channel: Channel | None = None
        self._room = 0  # bytes of a message
        self._checked = False  # whether a publish has shown that both sides have the same parameters

    def attach(self, trainer: Any) -> None:
        self._trainer = trainer
        self._dtype = getattr(torch, self.servers.info.dtype)
        specs = shapes_of(trainer.model, trainer.accelerator, self._dtype)
        self._shapes = {spec.name: (torch.Size(spec.shape), getattr(torch, spec.dtype)) for spec in specs}
        device = trainer.accelerator.device
        transport = on_main(lambda: choose_transport(self.transport, self.servers, device))
        if transport == "memory" and sharding_of(trainer.accelerator) in WHOLE:
            together(self._open_views)
        self.in_place = bool(self.views)
        self._shapes |= {name: (buffer.shape, buffer.dtype) for name, buffer in self._buffers()}
        self._direct = self._all_direct(trainer.model)
        together(lambda: self._connect(transport, specs, device))

    def _open_views(self) -> None:
        """Opens the parameters that the servers keep as they are, as views of their memory."""
        if any(info.refusals for info in self.servers.infos):
            return
        specs = [
            spec.model_copy(update={"dtype": str(self._shapes[spec.name][1]).removeprefix("torch.")})
            for spec in parameter_specs(base_model(self._trainer.model))
        ]
        for client in self.servers.clients:
            parameters = iter_full_parameters(self._trainer.model, self._trainer.accelerator, self._dtype)
            self.views.append(open_views(parameters, client.attach(specs)).views)

    def _buffers(self) -> list[tuple[str, torch.Tensor]]:
        """Buffers that the checkpoint has, for servers that take all of it through their loader."""
        return [] if self.views else buffers_of(self._trainer.model)

    def _all_direct(self, model: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]] | None:
        """The views and the parameters that go into them, if every parameter of every server is such a view."""
        if not self.views or isinstance(model, PeftModel):
            return None
        parameters = dict(model.named_parameters())
        if any(views.keys() != parameters.keys() for views in self.views):
            return None
        pairs = [(view, parameters[name].detach()) for views in self.views for name, view in views.items()]
        return [view for view, _ in pairs], [parameter for _, parameter in pairs]

    def _connect(self, transport: str, specs: list[ParameterSpec], device: torch.device) -> None:
        if not self.servers.clients:
            return
        direct = set.intersection(*(set(views) for views in self.views)) if self.views else set()
        sizes = [message_layout([spec])[1] for spec in specs if spec.name not in direct]
        if sizes:
            chunk = self.chunk_bytes or CHUNK_BYTES[device.type]
            # Twice the largest: some checkpoint tensors are computed from several parameters.
            self._room = max(2 * max(sizes), min(chunk, sum(sizes)))
            self._channel = open_channel(transport, self.servers, device, self._room)
        logger.info(
            "%d parameters (%.1f MB) go to %d server(s): %d straight into memory, %d through %s",
            len(specs),
            sum(message_layout([spec])[1] for spec in specs) / 1e6,
            len(self.servers.clients),
            len(direct),
            len(sizes),
            transport,
        )

    # -------------------------------------------------------------------------------------------------- each publish

    @torch.no_grad()
    def send(self, policy_version: int) -> Moved:
        if self._direct is not None:
            torch._foreach_copy_(*self._direct)
            together(lambda: None)  # all ranks have written
            return Moved(sum(view.nbytes for view in self._direct[0]))
        moved, model = Moved(), self._trainer.model
        parameters = iter_full_parameters(model, self._trainer.accelerator, self._dtype)
        rest = itertools.chain(self._write_views(parameters, moved), self._buffers())
        tensors = checkpoint_tensors(base_model(model), rest, self._shapes)
        together(lambda: self._send_messages(tensors, moved))
        return moved

    def _write_views(
        self, parameters: Iterator[tuple[str, torch.Tensor]], moved: Moved
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Writes what can be written into the servers' memory, and passes on the rest."""
        for name, tensor in parameters:
            held = [views[name] for views in self.views if name in views]
            for view in held:
                view.copy_(tensor)
                moved.num_bytes += view.nbytes
            if len(held) < max(len(self.servers.clients), 1):
                yield name, tensor

    def _send_messages(self, tensors: Iterator[tuple[str, torch.Tensor]], moved: Moved) -> None:
        """Sends all tensors, on rank 0; every rank gathers them, to the end, also after rank 0 has failed to send."""
        try:
            sent = 0
            for specs, message in self._pack(tensors) if self.servers.clients else ():
                replies = send_message(
                    self._channel, message, self.servers, lambda client, specs=specs: client.load_weights(specs)
                )
                sent += message.numel()
                moved.apply_ms += max(reply.apply_ms for reply in replies)
            moved.num_bytes += sent
            if sent:
                started = time.perf_counter()
                missing = self.servers.each_here(lambda client: client.finish_weights())
                moved.apply_ms += (time.perf_counter() - started) * 1e3
                self._check_complete(sorted(set().union(*missing)))
        finally:
            for _ in tensors:
                pass

    def _pack(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[list[ParameterSpec], torch.Tensor]]:
        """Copies tensors into messages. Yields what is in each, and its bytes, which the next one overwrites."""
        specs, filled, buffer = [], 0, None
        for name, tensor in tensors:
            size = -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
            if specs and filled + size > self._room:
                yield specs, buffer[:filled]
                specs, filled = [], 0
            if not specs:
                buffer = self._channel.staging(max(size, self._room))
            target = buffer[filled : filled + tensor.nbytes]
            target.view(tensor.dtype).view(tensor.shape).copy_(tensor)
            specs.append(ParameterSpec.of(name, tensor))
            filled += size
        if specs:
            yield specs, buffer[:filled]

    def _check_complete(self, missing: list[str]) -> None:
        """`missing`: parameters of a server that nothing was loaded into. Without views, all go through its loader."""
        if missing and not self.views and not self._checked:
            raise AttachError(
                f"{len(missing)} of the server's parameters got no value from the trainer (first: {missing[:3]}): "
                f"they are different models. The server has {self.servers.info.model}."
            )
        self._checked = True
