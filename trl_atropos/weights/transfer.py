"""`Transfer`: how one mode moves the bytes of a new policy, and what the modes share.

That is views of the servers' memory, and the trainer's end of a channel to them.

`publisher.py` has the life of a publish, once for all modes, and calls the transfer between pause and resume.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from trl_atropos.errors import AttachError, ServerError
from trl_atropos.protocol import Attachment, machine_id
from trl_atropos.server_client import ServerClient, Servers
from trl_atropos.tensors.channel import (
    Channel,
    ChannelError,
    has_ended,
    in_background,
    open_group,
    open_memory,
    wait_for,
)
from trl_atropos.tensors.shared_memory import open_storage


@dataclass
class Moved:
    """What one publish moved. Times are those of the slowest server."""

    num_bytes: int = 0
    apply_ms: float = 0.0  # of putting what arrived into the place that the server samples from


class Transfer(ABC):
    """
    One subclass per mode. All methods are called on every rank.

    Attributes:
        in_place: This process writes into the server's memory, so that it must be paused before the first write.
        steps_in_place: The optimizer's step is what writes there, so that the pause is around the step.
        clear_cache: Requests in flight recompute what they cached, because the weights that they use change.
    """

    in_place = False
    steps_in_place = False
    clear_cache = True

    def __init__(self, servers: Servers):
        self.servers = servers

    def load(self, model: Any, args: Any, peft_config: Any) -> tuple["Transfer", Any]:
        """
        Connects to the servers, before the trainer is built from `model` and `args`.

        Returns the transfer to use (another one where this one cannot serve the case), and what the trainer shall take
        as its model.
        """
        self.servers.connect()
        return self, model

    @abstractmethod
    def attach(self, trainer: Any) -> None:
        """Called once the trainer is built, with the leases held."""

    def check(self) -> None:  # noqa: B027 - not every mode can be torn
        """Raises if the trainer's parameters are no longer what they were at `attach`. Called before every pause."""

    def pause(self) -> None:
        in_place = self.in_place or self.steps_in_place
        self.servers.each(lambda client: client.pause(self.clear_cache, in_place))

    @abstractmethod
    def send(self, policy_version: int) -> Moved:
        """Moves the weights of a version that the servers do not have yet. The servers are paused."""

    def resume(self, policy_version: int) -> None:
        self.servers.each(lambda client: client.resume(policy_version))

    def published(self, policy_version: int) -> None:  # noqa: B027
        """Called after a publish that was whole."""


# ------------------------------------------------------------------------------------------ views of a server's memory


@dataclass
class OpenedViews:
    """The server's memory, seen as the parameters of a model. Both are by parameter name."""

    views: dict[str, torch.Tensor]
    refused: dict[str, str]  # why a parameter has no view


def open_views(parameters: Iterable[tuple[str, torch.Tensor]], attachment: Attachment) -> OpenedViews:
    """
    Opens the server's memory and compares it, bit for bit, with the values that the trainer has loaded.

    A parameter that vLLM transforms after loading differs and is refused. If most do, the server has other weights,
    and that is an error.

    Raises:
        AttachError: The server has other weights.
    """
    storages = [open_storage(handle) for handle in attachment.storages]
    opened = OpenedViews({}, dict(attachment.refused))
    differing = []
    for name, parameter in parameters:
        if name in opened.refused:
            continue
        place = attachment.views[name]
        view = storages[place.storage].view(parameter.dtype).as_strided(place.size, place.stride, place.offset)
        if torch.equal(view, parameter.detach().to(view.device)):
            opened.views[name] = view
        else:
            differing.append(name)
    if len(differing) > len(opened.views):
        raise AttachError(
            f"The server's weights differ from the trainer's model at {differing[0]!r}. Either the server serves "
            "another model or another checkpoint, or an earlier run has trained it: start it again on the model that "
            "the trainer loads."
        )
    opened.refused |= dict.fromkeys(differing, "vLLM transforms it after loading, or has another value")
    return opened


# -------------------------------------------------------------------------------------- the trainer's end of a channel


def choose_transport(asked: str, servers: Servers, device: torch.device) -> str:
    """
    `"nccl"`, `"gloo"` or `"memory"`, for the servers of rank 0 and a trainer on `device`.

    Raises:
        AttachError: What `weight_transport` asks for cannot reach these servers.
    """
    here = all(info.machine == machine_id() for info in servers.infos)
    kinds = {info.device for info in servers.infos}
    if kinds != {device.type}:
        raise AttachError(
            f"The trainer computes on {device.type}, the servers on {', '.join(sorted(kinds))}: weights go from GPU "
            "to GPU or from CPU to CPU."
        )
    if asked == "memory" and not here:
        raise AttachError(
            "`weight_transport: memory` shares memory, but a server runs on another machine (or in another "
            "container): set `weight_transport: auto`."
        )
    if asked == "nccl" and device.type == "cpu":
        raise AttachError("`weight_transport: nccl` goes from GPU to GPU, but this run is on the CPU: set it to auto.")
    if asked in ("gloo", "memory"):
        return asked
    if device.type == "cpu":
        return "gloo"
    own = str(torch.cuda.get_device_properties(device).uuid)
    # With NCCL_HOSTID set, NCCL takes two processes on one GPU for two machines, and goes through sockets.
    if not any(own in info.device_uuids for info in servers.infos) or (
        asked == "nccl" and "NCCL_HOSTID" in os.environ
    ):
        return "nccl"
    if asked == "nccl":
        raise AttachError(
            f"`weight_transport: nccl` connects GPUs, but a server shares the trainer's GPU {own}: set it to auto."
        )
    if here:
        return "memory"  # NCCL refuses two processes on one GPU
    raise AttachError(
        f"A server shares the trainer's GPU {own} while another is on another machine: NCCL cannot serve the first "
        "and shared memory not the second. Give the trainer a GPU of its own."
    )


def open_channel(transport: str, servers: Servers, device: torch.device, num_bytes: int) -> Channel:
    """Opens a channel to all of this rank's servers, for messages of up to `num_bytes`."""
    if transport == "memory":
        channel, specification = open_memory(device, num_bytes)
        servers.each_here(lambda client: client.open_channel(specification))
        return channel
    members = [(client.host, info.num_workers) for client, info in zip(servers.clients, servers.infos, strict=True)]
    try:
        return open_group(
            transport,
            device,
            members,
            lambda index, specification: servers.clients[index].open_channel(specification),
            servers.timeout,
        )
    except ServerError:
        raise
    except RuntimeError as error:  # the channel's own, or torch's
        raise AttachError(
            f"The servers at {', '.join(client.url for client in servers.clients)} were asked to join a {transport} "
            f"group with the trainer, and did not: {error}. Look at their logs; behind a firewall, the servers must "
            "reach the trainer's machine on any port."
        ) from error


def send_message(
    channel: Channel, message: torch.Tensor, servers: Servers, call: Callable[[ServerClient], Any]
) -> list[Any]:
    """
    Sends one message while `call` lets every server receive it. Returns their replies.

    Raises:
        ServerError: A server refused, died, or did not receive the message within its timeout.
    """
    names = ", ".join(client.url for client in servers.clients)
    if channel.broken:
        raise ServerError(
            f"A transfer to the server at {names} broke off before, and what was left of it could be taken for the "
            "next: build the trainer again (its last checkpoint can be resumed)."
        )
    replies = in_background(lambda: servers.each_here(call))
    channel.broken = True  # until all of the message has arrived
    try:
        sent = channel.send(message)
        arrival = f"{names} to receive {message.numel()} bytes"
        wait_for(lambda: has_ended(replies) and sent(), servers.timeout, arrival)
    except ServerError:
        raise
    except RuntimeError as error:  # the channel's own, or torch's
        raise _explained(replies, names, error) from error
    channel.broken = False
    return replies.result()


def _explained(replies: Future, names: str, error: Exception) -> Exception:
    """The server's own error, which says most, if it comes within a second. Otherwise the channel's."""
    try:
        wait_for(lambda: has_ended(replies), 1.0, "the server's answer")
    except ServerError as answer:
        return answer
    except ChannelError:
        pass
    return ServerError(
        f"The transfer of weights to the server at {names} broke off: {error}. If the server died, its log says why; "
        "if it hangs, raise `publish_timeout` or restart it."
    )
