"""`Transfer`: how one mode moves the bytes of a new policy between pause and resume (`publisher.py`). What the modes
share is here, too: views of a server's memory, and the trainer's end of a channel to the servers.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
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
    """What one publish moved. The time is that of the slowest server."""

    num_bytes: int = 0
    apply_ms: float = 0.0  # of putting what arrived where the server samples from it


class Transfer(ABC):
    """One subclass per mode. All methods are called on every rank."""

    in_place = False  # this process writes into the server's memory, so that its death would leave the weights torn
    steps_in_place = False  # the optimizer's step is what writes there, so that the pause is around the step
    clear_cache = True  # requests in flight recompute what they cached, because the weights that they use change

    def __init__(self, servers: Servers):
        self.servers = servers

    def load(self, model: Any, args: Any, peft_config: Any) -> tuple["Transfer", Any]:
        """Connects to the servers. Returns the transfer to use, which may be another one, and the trainer's model."""
        self.servers.connect()
        return self, model

    @abstractmethod
    def attach(self, trainer: Any) -> None:
        """Called once the trainer is built, with the leases held."""

    def check(self) -> None:  # noqa: B027 - not every mode has something to check
        """Raises if the trainer's parameters are no longer what they were at `attach`. Called before every pause."""

    def pause(self) -> None:
        in_place = self.in_place or self.steps_in_place
        self.servers.each(lambda client: client.pause(self.clear_cache, in_place))

    @abstractmethod
    def send(self, policy_version: int) -> Moved:
        """Moves the weights of a version that the paused servers do not have yet."""

    def resume(self, policy_version: int) -> None:
        self.servers.each(lambda client: client.resume(policy_version))


def open_views(
    parameters: Iterable[tuple[str, torch.Tensor]], attachment: Attachment
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """
    Opens the server's memory and compares it, bit for bit, with the values that the trainer has loaded.

    Returns (views, refused): by parameter name, the server's memory, or why there is no such view. A few parameters
    differ where vLLM transforms them after loading. If most do, the server has other weights: an `AttachError`.
    """
    storages = [open_storage(handle) for handle in attachment.storages]
    views, differing = {}, []
    for name, parameter in parameters:
        if name in attachment.refused:
            continue
        place = attachment.views[name]
        view = storages[place.storage].view(parameter.dtype).as_strided(place.size, place.stride, place.offset)
        if torch.equal(view, parameter.detach().to(view.device)):
            views[name] = view
        else:
            differing.append(name)
    if len(differing) > len(views):
        raise AttachError(
            f"The server's weights differ from the trainer's model at {differing[0]!r}. Either the server serves "
            "another model or another checkpoint, or an earlier run has trained it: start it again on the model that "
            "the trainer loads."
        )
    return views, attachment.refused | dict.fromkeys(differing, "vLLM transforms it, or has another value")


# -------------------------------------------------------------------------------------- the trainer's end of a channel


def choose_transport(asked: str, servers: Servers, device: torch.device) -> str:
    """`"nccl"`, `"gloo"` or `"memory"`, for the servers of rank 0, a trainer on `device`, and a `weight_transport`."""
    here = all(info.machine == machine_id() for info in servers.infos)
    on_gpu = device.type == "cuda"
    own = str(torch.cuda.get_device_properties(device).uuid) if on_gpu else ""
    on_own = any(own in info.device_uuids for info in servers.infos)
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
    if asked == "nccl" and not on_gpu:
        raise AttachError("`weight_transport: nccl` goes from GPU to GPU, but this run is on the CPU: set it to auto.")
    # With NCCL_HOSTID set, NCCL takes two processes on one GPU for two machines, and goes through sockets.
    if asked == "nccl" and on_own and "NCCL_HOSTID" not in os.environ:
        raise AttachError(
            f"`weight_transport: nccl` connects GPUs, but a server shares the trainer's GPU {own}: set it to auto."
        )
    if asked == "auto" and on_own and not here:
        raise AttachError(
            f"A server shares the trainer's GPU {own} while another server is on another machine: NCCL cannot reach "
            "the first and shared memory not the second. Give the trainer a GPU of its own."
        )
    if asked != "auto":
        return asked
    return "gloo" if not on_gpu else "memory" if on_own else "nccl"


def open_channel(transport: str, servers: Servers, device: torch.device, num_bytes: int) -> Channel:
    """Opens a channel to all of this rank's servers, for messages of up to `num_bytes`."""
    if transport == "memory":
        channel, specification = open_memory(device, num_bytes)
        servers.each_here(lambda client: client.open_channel(specification))
        return channel
    clients = servers.clients
    members = [(client.host, info.num_workers) for client, info in zip(clients, servers.infos, strict=True)]
    try:
        return open_group(
            transport, device, members, lambda index, spec: clients[index].open_channel(spec), servers.timeout
        )
    except ServerError:
        raise
    except RuntimeError as error:  # the channel's own, or torch's
        raise AttachError(
            f"The servers at {', '.join(client.url for client in clients)} were asked to join a {transport} group "
            f"with the trainer, and did not: {error}. Look at their logs; behind a firewall, the servers must reach "
            "the trainer's machine on any port."
        ) from error


def send_message(
    channel: Channel, message: torch.Tensor, servers: Servers, call: Callable[[ServerClient], Any]
) -> list[Any]:
    """Sends one message while `call` lets every server receive it. Returns their replies, or raises `ServerError`."""
    names = ", ".join(client.url for client in servers.clients)
    if channel.broken:
        raise ServerError(
            f"A transfer to the server at {names} broke off before, and its rest could be taken for the next: build "
            "the trainer again (its last checkpoint can be resumed)."
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
        with suppress(ChannelError):
            wait_for(lambda: has_ended(replies), 1.0, "the server's own error, which says more")
        raise ServerError(
            f"The transfer of weights to the server at {names} broke off: {error}. If the server died, its log says "
            "why; if it hangs, raise `publish_timeout` or restart it."
        ) from error
    channel.broken = False
    return replies.result()
