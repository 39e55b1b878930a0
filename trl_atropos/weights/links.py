"""The trainer's end of a channel to its servers: which kind, how it is opened, and one message over it."""

import os
from collections.abc import Callable
from typing import Any

import torch

from trl_atropos.channel import Background, Channel, ChannelError, open_group, open_memory, wait_for
from trl_atropos.errors import AttachError, ServerError
from trl_atropos.protocol import machine_id
from trl_atropos.weights.client import ServerClient
from trl_atropos.weights.servers import Servers

TRANSPORTS = ("auto", "nccl", "gloo", "memory")


def choose_transport(asked: str, servers: Servers, device: torch.device) -> str:
    """
    `"nccl"`, `"gloo"` or `"memory"`, for the servers of rank 0 and a trainer on `device`.

    Raises:
        AttachError: What was asked for cannot reach these servers.
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
    replies = Background(lambda: servers.each_here(call))
    channel.broken = True  # until all of the message has arrived
    try:
        sent = channel.send(message)
        # The servers' answer says most about what went wrong, so that an error of the channel waits for it a little.
        wait_for(lambda: replies.done() and sent(), servers.timeout, f"{names} to receive {message.numel()} bytes")
    except ServerError:
        raise
    except RuntimeError as error:  # the channel's own, or torch's
        raise _explained(replies, names, error) from error
    channel.broken = False
    return replies.result()


def _explained(replies: Background, names: str, error: Exception) -> Exception:
    """The server's own error, where there is one within a second; else the channel's."""
    try:
        wait_for(replies.done, 1.0, "the server's answer")
    except ServerError as answered:
        return answered
    except ChannelError:
        pass
    return ServerError(
        f"The transfer of weights to the server at {names} broke off: {error}. If the server died, its log says why; "
        "if it hangs, raise `publish_timeout` or restart it."
    )
