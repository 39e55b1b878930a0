"""All weights go to the servers, as all ranks gather them.

`FullWeights` (`vllm_mode: server`, which `colocate` falls back to): rank 0 packs tensors into messages for vLLM's
loader, and sends them through a channel. On one device, parameters that vLLM keeps as they are get written straight
into the server's memory, and only the others go through its loader.

`Restart` (`vllm_mode: restart`): the slowest way, and the one that needs the least of vLLM. Environments talk to a
front (`trl_atropos.front.serve`), which holds their requests while its engine starts again on a checkpoint.
"""

import itertools
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from trl_atropos.distributed import on_main, together
from trl_atropos.errors import AttachError
from trl_atropos.protocol import ParameterSpec
from trl_atropos.server_client import Servers
from trl_atropos.tensors.channel import ALIGNMENT, message_layout
from trl_atropos.weights import gather
from trl_atropos.weights.transfer import Transfer, choose_transport, open_channel, open_views, send_message

logger = logging.getLogger(__name__)

CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}  # of one message: memory on both sides against calls to the server
KEPT_CHECKPOINTS = 2  # the one that is served, and the one before, to go back to


class FullWeights(Transfer):
    def __init__(self, servers: Servers, transport: str):
        super().__init__(servers)
        self.transport = transport
        self.chunk_bytes: int | None = None  # of one message, in place of `CHUNK_BYTES`
        self.views: list[dict[str, torch.Tensor]] = []  # of each server's memory, by parameter name

    def attach(self, trainer: Any) -> None:
        self._trainer = trainer
        self._dtype = getattr(torch, self.servers.info.dtype)
        model, device = gather.base_model(trainer.model), trainer.accelerator.device
        specs = gather.shapes_of(trainer.model, trainer.accelerator, self._dtype)
        shapes = {spec.name: (torch.Size(spec.shape), getattr(torch, spec.dtype)) for spec in specs}
        transport = on_main(lambda: choose_transport(self.transport, self.servers, device))
        if transport == "memory" and gather.sharding_of(trainer.accelerator) in gather.WHOLE:
            pieces = gather.CheckpointPlan(model, shapes).specs()
            together(lambda: self._open_views(pieces))
        self.in_place = bool(self.views)
        shapes |= {name: (buffer.shape, buffer.dtype) for name, buffer in self._buffers()}
        self._plan = gather.CheckpointPlan(model, shapes)
        self._direct = self._all_direct(trainer.model)
        together(lambda: self._connect(transport, specs, device))

    def _open_views(self, specs: list[ParameterSpec]) -> None:
        """Opens the parameters that the servers keep as they are, as views of their memory."""
        if not any(info.refusals for info in self.servers.infos):
            self.views = [open_views(self._parameters(), client.attach(specs))[0] for client in self.servers.clients]

    def _parameters(self) -> Iterator[gather.Named]:
        return gather.iter_full_parameters(self._trainer.model, self._trainer.accelerator, self._dtype)

    def _buffers(self) -> list[gather.Named]:
        """The checkpoint's buffers, for servers that take all of it through their loader."""
        return [] if self.views else gather.buffers_of(self._trainer.model)

    def _all_direct(self, model: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]] | None:
        """Returns all views, and the parameter that goes into each, if that is all that there is to send."""
        parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
        if not self.views or isinstance(model, PeftModel) or any(v.keys() != parameters.keys() for v in self.views):
            return None
        pairs = [(view, parameters[name]) for views in self.views for name, view in views.items()]
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
            "%d of %d parameters (%.1f MB) go straight into the servers' memory, the others through %s",
            *(len(direct), len(specs), message_layout(specs)[1] / 1e6, transport),
        )

    @torch.no_grad()
    def send(self, policy_version: int) -> int:
        written = sum(view.nbytes for views in self.views for view in views.values())
        if self._direct is not None:
            torch._foreach_copy_(*self._direct)
            together(lambda: None)  # all ranks have written
            return written
        tensors = self._plan.tensors(itertools.chain(self._write_views(), self._buffers()))
        return written + together(lambda: self._send_messages(tensors))

    def _write_views(self) -> Iterator[gather.Named]:
        """Writes what can be written into the servers' memory, and passes on the rest."""
        for name, tensor in self._parameters():
            held = [views[name] for views in self.views if name in views]
            for view in held:
                view.copy_(tensor)
            if len(held) < max(len(self.servers.clients), 1):
                yield name, tensor

    def _send_messages(self, tensors: Iterator[gather.Named]) -> int:
        """Sends all tensors, on rank 0; every rank gathers them to the end, also after rank 0 has failed to send."""
        sent = 0
        try:
            for specs, message in self._pack(tensors) if self.servers.clients else ():
                send_message(
                    self._channel, message, self.servers, lambda client, specs=specs: client.load_weights(specs)
                )
                sent += message.numel()
            missing = self.servers.each_here(lambda client: client.finish_weights()) if sent else []
        finally:
            for _ in tensors:
                pass
        if any(missing) and not self.views:  # without views, all of the server's parameters come this way
            names = sorted(set().union(*missing))
            raise AttachError(
                f"{len(names)} of the server's parameters got no value from the trainer (first: {names[:3]}): they "
                f"are different models. The server has {self.servers.info.model}."
            )
        return sent

    def _pack(self, tensors: Iterator[gather.Named]) -> Iterator[tuple[list[ParameterSpec], torch.Tensor]]:
        """Copies tensors into messages. Yields what is in each, and its bytes, which the next message overwrites."""
        specs, filled, buffer = [], 0, None
        for name, tensor in tensors:
            size = -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
            if specs and filled + size > self._room:
                yield specs, buffer[:filled]
                specs, filled = [], 0
            if not specs:
                buffer = self._channel.staging(max(size, self._room))
            buffer[filled : filled + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            specs.append(ParameterSpec.of(name, tensor.shape, tensor.dtype))
            filled += size
        if specs:
            yield specs, buffer[:filled]


class Restart(Transfer):
    """For servers that were started by `trl-atropos serve --vllm_mode restart`. Writes below `folder`."""

    def __init__(self, servers: Servers, folder: str):
        super().__init__(servers)
        self.folder = Path(folder).absolute()

    def attach(self, trainer: Any) -> None:
        self._trainer = trainer
        self._published: list[Path] = []

    def pause(self) -> None:
        """Takes as long as the requests in flight need to end."""
        self.servers.each(lambda client: client.drain())

    @torch.no_grad()
    def send(self, policy_version: int) -> int:
        model, dtype = self._trainer.model, getattr(torch, self.servers.info.dtype)
        parameters = gather.iter_full_parameters(model, self._trainer.accelerator, dtype)
        named = itertools.chain(parameters, gather.buffers_of(model))  # gathered on every rank, kept on rank 0
        state = {name: tensor.detach().cpu().clone() for name, tensor in named if self.servers.clients}
        together(lambda: self._save_and_restart(state, policy_version))
        return sum(tensor.nbytes for tensor in state.values())

    def _save_and_restart(self, state: dict[str, torch.Tensor], version: int) -> None:
        if not self.servers.clients:
            return
        path = self.folder / f"v{version}"
        shutil.rmtree(path, ignore_errors=True)  # the same version twice: training began again
        gather.base_model(self._trainer.model).save_pretrained(path, state_dict=state)
        self._trainer.processing_class.save_pretrained(path)
        self.servers.each_here(lambda client: client.restart(str(path)))
        self._published = [*self._published, path][-KEPT_CHECKPOINTS:]
        for older in set(self.folder.glob("v*")) - set(self._published):  # of earlier runs, too
            shutil.rmtree(older, ignore_errors=True)
