"""All weights go to the servers, as all ranks gather them.

`FullWeights` (`vllm_mode: server`, and what `colocate` falls back to): rank 0 packs tensors into
messages for vLLM's loader, and sends them through a channel. On one device, parameters that vLLM
keeps unchanged are written straight into the server's memory, and only the others go through its
loader.

`Restart` (`vllm_mode: restart`): the slowest way, and the one that needs the least of vLLM.
Environments talk to a front (`trl_atropos.front.serve`), which holds their requests while its
engine starts again on a checkpoint.
"""

import itertools
import logging
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from operator import methodcaller
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import PeftModel

from trl_atropos.distributed import on_main, together
from trl_atropos.errors import AttachError, OtherWeightsError
from trl_atropos.modes import RESTART, SERVER
from trl_atropos.protocol import ParameterSpec
from trl_atropos.server_client import Servers
from trl_atropos.tensors.channel import Copies, message_layout, unpack
from trl_atropos.weights.checkpoint_plan import CheckpointPlan
from trl_atropos.weights.fingerprints import Fingerprinted, fingerprinted_weights
from trl_atropos.weights.gather import (
    Named,
    Tensors,
    base_model,
    buffers_of,
    is_whole,
    iter_full_parameters,
    shapes_of,
)
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
    """The tensors of a message, and its bytes, which the message after the next overwrites."""

    tensors: list[ParameterSpec]
    content: torch.Tensor


@dataclass
class FixedMessage:
    """A message whose tensors lie in memory that stays where it is."""

    tensors: list[ParameterSpec] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)
    copies: Copies | None = None  # to the channel's buffer
    address: int = 0  # of that buffer

    @cached_property  # asked once all tensors are in it
    def num_bytes(self) -> int:
        _, num_bytes = message_layout(self.tensors)
        return num_bytes


class FullWeights(Transfer):
    """Sends all weights. In the first publish, the servers take one message after the other through
    vLLM's loader, and note its copies. In later publishes they make the same copies, and all
    messages flow in one call. If nothing is gathered, merged or computed, the trainer notes its
    copies, too."""

    mode = SERVER

    def __init__(self, servers: Servers, transport: str):
        super().__init__(servers)
        self.transport = transport
        self.chunk_bytes: int | None = None  # of one message, in place of `CHUNK_BYTES`
        self.views: list[Tensors] = []  # of each server's memory
        self._view_bytes = 0  # of all of them
        self._known: list[list[ParameterSpec]] = []  # the messages that the servers know
        self._tensors: list[torch.Tensor] = []  # the trainer's
        self._addresses: list[int] = []  # of those, when their copies were noted
        self._fixed: list[FixedMessage] = []

    def attach(self, trainer: Any) -> None:
        self._trainer = trainer
        self._dtype = getattr(torch, self.servers.info.dtype)
        accelerator = trainer.accelerator
        device = accelerator.device
        model = base_model(trainer.model)
        shapes = shapes_of(trainer.model, accelerator, self._dtype)
        transport = on_main(lambda: choose_transport(self.transport, self.servers, device))
        whole = is_whole(accelerator)
        if transport == "memory" and whole:
            specs = CheckpointPlan(model, shapes).specs()
            together(lambda: self._open_views(specs))
        self.in_place = bool(self.views)
        num_parameters = len(shapes)
        for name, buffer in self._buffers():
            shapes[name] = (buffer.shape, buffer.dtype)
        self._plan = CheckpointPlan(model, shapes)
        self._specs = self._plan.specs()[:num_parameters]
        is_computed = bool(self._plan.groups) or isinstance(trainer.model, PeftModel)
        self._stays = whole and not is_computed
        self.servers.on_connected_ranks(lambda: self._connect(transport, device))

    def fingerprinted(self) -> list[Fingerprinted]:
        return [fingerprinted_weights(self._trainer, self.servers)]

    def _open_views(self, specs: list[ParameterSpec]) -> None:
        """Opens the parameters that the servers keep unchanged, as views of their memory. Only
        equal values prove where a parameter is. So a server that an earlier run has trained gets
        all of them through its loader."""
        if any(info.refusals for info in self.servers.infos):
            return
        opened = []
        num_bytes = 0
        for client in self.servers.clients:
            attachment = client.attach(specs)
            try:
                views, _ = open_views(self._parameters(), attachment)
            except OtherWeightsError:
                logger.info(
                    "The server at %s has other weights than the trainer: they are replaced, and "
                    "each publish goes through the server's loader. A server that was just started "
                    "on the trainer's model spares that.",
                    client.url,
                )
                return
            opened.append(views)
            num_bytes += sum(view.nbytes for view in views.values())
        self.views = opened
        self._view_bytes = num_bytes

    def _parameters(self) -> Iterator[Named]:
        return iter_full_parameters(self._trainer.model, self._trainer.accelerator, self._dtype)

    def _buffers(self) -> list[Named]:
        """Returns the checkpoint's buffers, for servers that take all of it through their
        loader."""
        return [] if self.views else buffers_of(self._trainer.model)

    def _connect(self, transport: str, device: torch.device) -> None:
        num_servers = len(self.servers.clients)
        num_direct = 0
        sizes = []  # bytes of the parameters that do not go straight into every server's memory
        for spec in self._specs:
            if len(self._views_of(spec.name)) == num_servers:
                num_direct += 1
            else:
                sizes.append(_num_bytes(spec))
        if sizes:
            chunk = self.chunk_bytes or CHUNK_BYTES[device.type]
            largest = max(sizes)
            if self._plan.groups:  # some checkpoint tensors are computed from several parameters
                largest *= 2
            self._room = max(largest, min(chunk, sum(sizes)))
            self._channel = open_channel(transport, self.servers, device, self._room)
        _, num_bytes = message_layout(self._specs)
        logger.info(
            "%d of %d parameters (%.1f MB) go straight into the servers' memory, the others "
            "through %s",
            num_direct,
            len(self._specs),
            num_bytes / 1e6,
            transport,
        )

    @torch.no_grad()
    def send(self, policy_version: int) -> int:
        gathered: Iterable[Named] = ()
        if self._stays and self._copy_to_views():
            messages = self._fill_messages()
        else:
            parameters = itertools.chain(self._write_views(), self._buffers())
            gathered = self._plan.tensors(parameters)
            messages = self._pack(gathered)
        sent_bytes = together(lambda: self._send_messages(messages, gathered))
        return self._view_bytes + sent_bytes

    # ------------------------------------------------------------------------ copies that are noted

    def _copy_to_views(self) -> bool:
        """Makes the copies that are noted, or notes them first. Returns whether that is possible.
        On a GPU, they are made while the CPU compares addresses: DeepSpeed moves parameters once,
        when training begins, and then the copies are noted and made anew."""
        if self._addresses:
            self._to_views()
            if _addresses_of(self._tensors) == self._addresses:
                return True
        if not self._note_copies():
            return False
        self._to_views()
        return True

    def _note_copies(self) -> bool:
        """Notes the source and the target of every copy. Returns whether that is possible."""
        model = self._trainer.model
        self._tensors = [*model.parameters(), *model.buffers()]
        # not converted: the memory itself
        parameters = iter_full_parameters(model, self._trainer.accelerator)
        tensors = dict(itertools.chain(parameters, self._buffers()))
        if not all(tensor.is_contiguous() for tensor in tensors.values()):
            return False
        copies = []
        for views in self.views:
            for name, view in views.items():
                copies.append((view, tensors[name]))
        self._to_views = Copies(copies)
        self._note_messages(tensors)
        self._addresses = _addresses_of(self._tensors)
        return True

    def _note_messages(self, tensors: Tensors) -> None:
        """Divides the tensors that a server has no view of into messages."""
        self._fixed = []
        room = 0  # left in the last message
        num_servers = len(self.servers.clients)
        for name, tensor in tensors.items():
            if len(self._views_of(name)) == num_servers:  # also on ranks without servers
                continue
            _, dtype = self._plan.shapes[name]
            for piece, source in self._plan.tensors([(name, tensor)]):
                spec = ParameterSpec.of(piece, source.shape, dtype)
                size = _num_bytes(spec)
                if not self._fixed or size > room:
                    self._fixed.append(FixedMessage())
                    room = self._room
                room -= size
                message = self._fixed[-1]
                message.tensors.append(spec)
                message.sources.append(source)

    def _fill_messages(self) -> Iterator[Message]:
        """Copies the tensors of each message to the buffer that is sent, all at once."""
        for number, fixed in enumerate(self._fixed):
            buffer = self._channel.staging(self._room, number)
            content = buffer[: fixed.num_bytes]
            address = content.data_ptr()
            if fixed.copies is None or fixed.address != address:
                slots = unpack(content, fixed.tensors)
                fixed.address = address
                fixed.copies = Copies(zip(slots, fixed.sources, strict=True))
            fixed.copies()
            yield Message(fixed.tensors, content)

    # ----------------------------------------------------------------- tensors as they are gathered

    def _write_views(self) -> Iterator[Named]:
        """Writes parameters into the servers' memory, and yields those that a server has no view
        of."""
        num_servers = len(self.servers.clients)
        for name, tensor in self._parameters():
            views = self._views_of(name)
            for view in views:
                view.copy_(tensor)
            if not views or len(views) < num_servers:
                yield name, tensor

    def _views_of(self, name: str) -> list[torch.Tensor]:
        return [views[name] for views in self.views if name in views]

    def _pack(self, tensors: Iterator[Named]) -> Iterator[Message]:
        """Copies tensors to the buffer that is sent, one by one as they come."""
        specs = []
        filled = 0
        number = 0  # of the message
        buffer = None
        for name, tensor in tensors:
            spec = ParameterSpec.of(name, tensor.shape, tensor.dtype)
            size = _num_bytes(spec)
            if specs and filled + size > self._room:
                yield Message(specs, buffer[:filled])
                specs = []
                filled = 0
            if not specs:
                buffer = self._channel.staging(max(size, self._room), number)
                number += 1
            (slot,) = unpack(buffer[filled:], [spec])
            slot.copy_(tensor)
            specs.append(spec)
            filled += size
        if specs:
            yield Message(specs, buffer[:filled])

    # -------------------------------------------------------------------------------------- sending

    def _send_messages(self, messages: Iterator[Message], gathered: Iterable[Named] = ()) -> int:
        """Sends all messages, on ranks with a server. Every rank gathers to the end, also after one
        failed to send."""
        try:
            if not self.servers.clients:
                return 0
            if not self._known:
                return self._introduce(messages)
            return self._send_again(messages)
        finally:
            for _ in gathered:
                pass

    def _introduce(self, messages: Iterator[Message]) -> int:
        """Sends messages that the servers do not know yet, through vLLM's loader."""
        known = []
        num_bytes = 0
        for tensors, content in messages:
            receive = methodcaller("load_weights", tensors)
            send_messages(self._channel, iter([content]), self.servers, receive)
            known.append(tensors)
            num_bytes += content.numel()
        if known:
            missing = self.servers.each_here(lambda client: client.finish_weights())
            # without views, all of the server's parameters come this way
            if any(missing) and not self.views:
                names = sorted(set().union(*missing))
                raise AttachError(
                    f"{len(names)} of the server's parameters got no value from the trainer "
                    f"(first: {names[:3]}): they are different models. The server has "
                    f"{self.servers.info.model}."
                )
        self._known = known
        return num_bytes

    def _send_again(self, messages: Iterator[Message]) -> int:
        """Sends messages that the servers know, in one call if the channel streams."""
        num_bytes = 0

        def contents(numbers: list[int]) -> Iterator[torch.Tensor]:
            nonlocal num_bytes
            for number, (tensors, content) in zip(numbers, messages):
                if tensors != self._known[number]:
                    raise AttachError(
                        "The model has other parameters than in the first publish: they cannot be "
                        "added, resized or converted while a run goes on. Change the model first, "
                        "then resume from a checkpoint."
                    )
                num_bytes += content.numel()
                yield content

        count = len(self._known)
        calls = [[number] for number in range(count)]
        if self._channel.streams:
            calls = [list(range(count))]
        for call in calls:
            receive = methodcaller("load_weights_again", call)
            send_messages(self._channel, contents(call), self.servers, receive)
        return num_bytes


def _num_bytes(spec: ParameterSpec) -> int:
    """Returns the bytes of a message with this tensor alone."""
    _, num_bytes = message_layout([spec])
    return num_bytes


def _addresses_of(tensors: list[torch.Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


class Restart(Transfer):
    """Writes checkpoints below `folder`, for servers that were started by `trl-atropos serve
    --vllm_mode restart`."""

    mode = RESTART

    def __init__(self, servers: Servers, folder: str):
        super().__init__(servers)
        self.folder = Path(folder).absolute()

    def attach(self, trainer: Any) -> None:
        self._trainer = trainer
        self._published: list[Path] = []

    def fingerprinted(self) -> list[Fingerprinted]:
        return [fingerprinted_weights(self._trainer, self.servers)._replace(moves=True)]

    def pause(self) -> Future:
        """Lets the requests in flight end, however long they take, and holds others."""
        return self.servers.each_in_background(lambda client: client.drain())

    @torch.no_grad()
    def send(self, policy_version: int) -> int:
        model = self._trainer.model
        dtype = getattr(torch, self.servers.info.dtype)
        parameters = iter_full_parameters(model, self._trainer.accelerator, dtype)
        # gathered on every rank, kept on rank 0
        named = itertools.chain(parameters, buffers_of(model))
        state = {}
        for name, tensor in named:
            if self.servers.clients:
                state[name] = tensor.detach().cpu().clone()
        self.servers.on_connected_ranks(lambda: self._save_and_restart(state, policy_version))
        return sum(tensor.nbytes for tensor in state.values())

    def _save_and_restart(self, state: dict[str, torch.Tensor], version: int) -> None:
        path = self.folder / f"v{version}"
        shutil.rmtree(path, ignore_errors=True)  # the same version twice: training began again
        model = base_model(self._trainer.model)
        model.save_pretrained(path, state_dict=state)
        self._trainer.processing_class.save_pretrained(path)
        self.servers.each_here(lambda client: client.restart(str(path)))
        self._published.append(path)
        kept = self._published[-KEPT_CHECKPOINTS:]
        for folder in list(self.folder.glob("v*")):  # of earlier runs, too
            if folder not in kept:
                shutil.rmtree(folder, ignore_errors=True)
