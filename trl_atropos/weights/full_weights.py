"""All weights go to the servers, as all ranks gather them.

`FullWeights` (`vllm_mode: server`, which `colocate` falls back to): rank 0 packs tensors into
messages for vLLM's loader, and sends them through a channel. On one device, parameters that vLLM
keeps as they are get written straight into the server's memory, and only the others go through its
loader.

`Restart` (`vllm_mode: restart`): the slowest way, and the one that needs the least of vLLM.
Environments talk to a
front (`trl_atropos.front.serve`), which holds their requests while its engine starts again on a
    checkpoint.
"""

import itertools
import logging
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import PeftModel

from trl_atropos.distributed import on_main, together
from trl_atropos.errors import AttachError
from trl_atropos.protocol import ParameterSpec
from trl_atropos.server_client import Servers
from trl_atropos.tensors.channel import Copies, message_layout, unpack
from trl_atropos.weights import gather
from trl_atropos.weights.fingerprints import Fingerprinted, fingerprinted_weights
from trl_atropos.weights.transfer import (
    Transfer,
    choose_transport,
    open_channel,
    open_views,
    send_messages,
)

logger = logging.getLogger(__name__)

# of one message: memory on both sides against calls to the server
CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
KEPT_CHECKPOINTS = 2  # the one that is served, and the one before, to go back to


class Message(NamedTuple):
    """What a message has, and its bytes, which the message after the next overwrites."""

    tensors: list[ParameterSpec]
    content: torch.Tensor


@dataclass
class FixedMessage:
    """A message whose tensors lie in memory that stays where it is."""

    tensors: list[ParameterSpec] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)
    copies: tuple[int, Copies] | None = None  # to the channel's buffer, and its address

    @cached_property  # asked once all tensors are in it
    def num_bytes(self) -> int:
        return message_layout(self.tensors)[1]


class FullWeights(Transfer):
    """In the first publish, the servers take one message after the other through vLLM's loader, and
    note what it copies. In those that follow they make the same copies, and all messages flow in
    one call. Where nothing is gathered, merged or computed, the trainer notes its copies, too."""

    def __init__(self, servers: Servers, transport: str):
        super().__init__(servers)
        self.transport = transport
        self.chunk_bytes: int | None = None  # of one message, in place of `CHUNK_BYTES`
        self.views: list[dict[str, torch.Tensor]] = []  # of each server's memory, by parameter name
        self._known: list[list[ParameterSpec]] = []  # the messages that the servers know
        self._tensors: list[torch.Tensor] = []  # the trainer's
        self._addresses: list[int] = []  # of those, when their copies were noted
        self._fixed: list[FixedMessage] = []

    def attach(self, trainer: Any) -> None:
        self._trainer = trainer
        self._dtype = getattr(torch, self.servers.info.dtype)
        model = gather.base_model(trainer.model)
        device = trainer.accelerator.device
        shapes = gather.shapes_of(trainer.model, trainer.accelerator, self._dtype)
        transport = on_main(lambda: choose_transport(self.transport, self.servers, device))
        whole = gather.sharding_of(trainer.accelerator) in gather.WHOLE
        if transport == "memory" and whole:
            pieces = gather.CheckpointPlan(model, shapes).specs()
            together(lambda: self._open_views(pieces))
        self.in_place = bool(self.views)
        buffers = {name: (buffer.shape, buffer.dtype) for name, buffer in self._buffers()}
        self._plan = gather.CheckpointPlan(model, shapes | buffers)
        self._specs = self._plan.specs()[: len(shapes)]  # without the buffers
        self._stays = whole and not self._plan.groups and not isinstance(trainer.model, PeftModel)
        self.servers.on_connected_ranks(lambda: self._connect(transport, device))

    def fingerprinted(self) -> list[Fingerprinted]:
        return [fingerprinted_weights(self._trainer, self.servers)]

    def _open_views(self, specs: list[ParameterSpec]) -> None:
        """Opens the parameters that the servers keep as they are, as views of their memory."""
        if not any(info.refusals for info in self.servers.infos):
            self.views = [
                open_views(self._parameters(), client.attach(specs))[0]
                for client in self.servers.clients
            ]

    def _parameters(self) -> Iterator[gather.Named]:
        return gather.iter_full_parameters(
            self._trainer.model, self._trainer.accelerator, self._dtype
        )

    def _buffers(self) -> list[gather.Named]:
        """The checkpoint's buffers, for servers that take all of it through their loader."""
        return [] if self.views else gather.buffers_of(self._trainer.model)

    def _connect(self, transport: str, device: torch.device) -> None:
        direct = set.intersection(*(set(views) for views in self.views)) if self.views else set()
        sizes = [message_layout([spec])[1] for spec in self._specs if spec.name not in direct]
        if sizes:
            chunk = self.chunk_bytes or CHUNK_BYTES[device.type]
            # Some checkpoint tensors are computed from several parameters.
            self._room = max((2 if self._plan.groups else 1) * max(sizes), min(chunk, sum(sizes)))
            self._channel = open_channel(transport, self.servers, device, self._room)
        logger.info(
            "%d of %d parameters (%.1f MB) go straight into the servers' memory, the others "
            "through %s",
            *(len(direct), len(self._specs), message_layout(self._specs)[1] / 1e6, transport),
        )

    @torch.no_grad()
    def send(self, policy_version: int) -> int:
        if self._stays and self._copy_to_views():
            messages = (self._fill(number, fixed) for number, fixed in enumerate(self._fixed))
            return self._written + together(lambda: self._send_messages(messages))
        written = sum(view.nbytes for views in self.views for view in views.values())
        tensors = self._plan.tensors(itertools.chain(self._write_views(), self._buffers()))
        return written + together(lambda: self._send_messages(self._pack(tensors), tensors))

    def _copy_to_views(self) -> bool:
        """Makes the copies that are noted, or notes them first. Returns whether that is possible.
        On a GPU, they are made while it is asked whether all tensors are where they were: DeepSpeed
        moves parameters once, when training begins, and then the copies are noted and made anew."""
        if self._addresses:
            self._to_views()
        if (
            not self._addresses
            or [tensor.data_ptr() for tensor in self._tensors] != self._addresses
        ):
            if not self._note_copies():
                return False
            self._to_views()
        return True

    def _note_copies(self) -> bool:
        """Notes what is copied where. Returns whether that is possible."""
        model = self._trainer.model
        self._tensors = [*model.parameters(), *model.buffers()]
        # not converted: the memory itself
        parameters = gather.iter_full_parameters(model, self._trainer.accelerator)
        tensors = dict(itertools.chain(parameters, self._buffers()))
        if not all(tensor.is_contiguous() for tensor in tensors.values()):
            return False
        written = [(view, tensors[name]) for views in self.views for name, view in views.items()]
        self._to_views = Copies(written)
        self._written = sum(view.nbytes for view, _ in written)
        self._fixed = []
        room = 0
        for name, tensor in tensors.items():
            if len(self._views_of(name)) == len(self.servers.clients):  # also where there are none
                continue
            for piece_name, source in self._plan.tensors([(name, tensor)]):
                spec = ParameterSpec.of(piece_name, source.shape, self._plan.shapes[name][1])
                size = message_layout([spec])[1]
                if not self._fixed or size > room:
                    self._fixed.append(FixedMessage())
                    room = self._room
                room -= size
                self._fixed[-1].tensors.append(spec)
                self._fixed[-1].sources.append(source)
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        return True

    def _fill(self, number: int, fixed: FixedMessage) -> Message:
        """Copies the tensors of a message to where it is sent from, all at once."""
        content = self._channel.staging(self._room, number)[: fixed.num_bytes]
        if fixed.copies is None or fixed.copies[0] != content.data_ptr():
            pairs = zip(unpack(content, fixed.tensors), fixed.sources, strict=True)
            fixed.copies = content.data_ptr(), Copies(pairs)
        fixed.copies[1]()
        return Message(fixed.tensors, content)

    def _write_views(self) -> Iterator[gather.Named]:
        """Writes what can be written into the servers' memory, and passes on the rest."""
        for name, tensor in self._parameters():
            views = self._views_of(name)
            for view in views:
                view.copy_(tensor)
            if len(views) < max(len(self.servers.clients), 1):
                yield name, tensor

    def _views_of(self, name: str) -> list[torch.Tensor]:
        return [views[name] for views in self.views if name in views]

    def _pack(self, tensors: Iterator[gather.Named]) -> Iterator[Message]:
        """Copies tensors to where they are sent from, one by one as they come."""
        specs = []
        filled = 0
        numbers = itertools.count()
        buffer = None
        for name, tensor in tensors:
            spec = ParameterSpec.of(name, tensor.shape, tensor.dtype)
            size = message_layout([spec])[1]
            if specs and filled + size > self._room:
                yield Message(specs, buffer[:filled])
                specs = []
                filled = 0
            if not specs:
                buffer = self._channel.staging(max(size, self._room), next(numbers))
            unpack(buffer[filled:], [spec])[0].copy_(tensor)
            specs.append(spec)
            filled += size
        if specs:
            yield Message(specs, buffer[:filled])

    def _send_messages(
        self, messages: Iterator[Message], gathered: Iterable[gather.Named] = ()
    ) -> int:
        """Sends all messages, on ranks with a server; every rank gathers to the end, also after one
        failed to send."""
        try:
            if not self.servers.clients:
                return 0
            return self._send_again(messages) if self._known else self._introduce(messages)
        finally:
            for _ in gathered:
                pass

    def _introduce(self, messages: Iterator[Message]) -> int:
        known = []
        sent = 0
        for tensors, content in messages:
            send_messages(
                self._channel,
                iter([content]),
                self.servers,
                lambda client, known=tensors: client.load_weights(known),
            )
            known.append(tensors)
            sent += content.numel()
        missing = self.servers.each_here(lambda client: client.finish_weights()) if known else []
        # without views, all of the server's parameters come this way
        if any(missing) and not self.views:
            names = sorted(set().union(*missing))
            raise AttachError(
                f"{len(names)} of the server's parameters got no value from the trainer (first: "
                f"{names[:3]}): they are different models. The server has "
                f"{self.servers.info.model}."
            )
        self._known = known
        return sent

    def _send_again(self, messages: Iterator[Message]) -> int:
        sent = []

        def contents(numbers: range) -> Iterator[torch.Tensor]:
            for number, (tensors, content) in zip(numbers, messages):
                if tensors != self._known[number]:
                    raise AttachError(
                        "The model has other parameters than in the first publish: they cannot be "
                        "added, resized or converted while a run goes on. Change the model first, "
                        "then resume from a checkpoint."
                    )
                sent.append(content.numel())
                yield content

        everything = range(len(self._known))
        for numbers in (
            [everything] if self._channel.streams else [range(n, n + 1) for n in everything]
        ):
            send_messages(
                *(self._channel, contents(numbers), self.servers),
                lambda client, numbers=list(numbers): client.load_weights_again(numbers),
            )
        return sum(sent)


class Restart(Transfer):
    """For servers that were started by `trl-atropos serve --vllm_mode restart`. Writes below
    `folder`."""

    def __init__(self, servers: Servers, folder: str):
        super().__init__(servers)
        self.folder = Path(folder).absolute()

    def attach(self, trainer: Any) -> None:
        self._trainer = trainer
        self._published: list[Path] = []

    def fingerprinted(self) -> list[Fingerprinted]:
        return [fingerprinted_weights(self._trainer, self.servers)._replace(moves=True)]

    def pause(self) -> Future:
        """Takes as long as the requests in flight need to end."""
        return self.servers.each_in_background(lambda client: client.drain())

    @torch.no_grad()
    def send(self, policy_version: int) -> int:
        model = self._trainer.model
        dtype = getattr(torch, self.servers.info.dtype)
        parameters = gather.iter_full_parameters(model, self._trainer.accelerator, dtype)
        # gathered on every rank, kept on rank 0
        named = itertools.chain(parameters, gather.buffers_of(model))
        state = {
            name: tensor.detach().cpu().clone() for name, tensor in named if self.servers.clients
        }
        self.servers.on_connected_ranks(lambda: self._save_and_restart(state, policy_version))
        return sum(tensor.nbytes for tensor in state.values())

    def _save_and_restart(self, state: dict[str, torch.Tensor], version: int) -> None:
        path = self.folder / f"v{version}"
        shutil.rmtree(path, ignore_errors=True)  # the same version twice: training began again
        gather.base_model(self._trainer.model).save_pretrained(path, state_dict=state)
        self._trainer.processing_class.save_pretrained(path)
        self.servers.each_here(lambda client: client.restart(str(path)))
        self._published = [*self._published, path][-KEPT_CHECKPOINTS:]
        for older in set(self.folder.glob("v*")) - set(self._published):  # of earlier runs, too
            shutil.rmtree(older, ignore_errors=True)
