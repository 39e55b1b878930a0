"""`Transfer`: how one mode moves the bytes of a new policy between pause and resume
(`publisher.py`). What the modes share is here, too: views of a server's memory, and the trainer's
end of a channel to the servers."""

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch

from trl_atropos.errors import AttachError, ServerError
from trl_atropos.protocol import Attachment, ParameterSpec, machine_id
from trl_atropos.server_client import ServerClient, Servers
from trl_atropos.tensors import channel as channels
from trl_atropos.tensors.shared_memory import open_storage
from trl_atropos.weights.adapters import Way

ROOM = 0.05  # of a GPU's memory


class Fingerprinted(NamedTuple):
    """A part of the policy whose fingerprints trainer and servers compare."""

    of: str  # "weights" or "adapter"
    specs: list[ParameterSpec]
    # Int64 (len(specs), 2): the trainer's. Called on every rank
    compute: Callable[[], torch.Tensor]
    times: int | None = None  # in how many publishes it is compared; None: in all
    moves: bool = False  # to other memory of the servers with every publish
    left_out: str = ""  # why nothing of it can be compared


class Transfer(ABC):
    """One subclass per mode. All methods are called on every rank."""

    # this process writes into the server's memory, so that its death would leave the weights torn
    in_place = False
    # the optimizer's step is what writes there, so that the pause is around the step
    steps_in_place = False
    adapter_way: Way = "merged"  # how the mode brings an adapter to the servers
    # requests in flight recompute what they cached, because the weights that they use change
    clear_cache = True

    def __init__(self, servers: Servers):
        self.servers = servers

    def load(self, model: Any, args: Any, peft_config: Any) -> tuple["Transfer", Any]:
        """Connects to the servers. Returns the transfer to use, which may be another one, and the
        trainer's model."""
        self.servers.connect()
        return self, model

    @abstractmethod
    def attach(self, trainer: Any) -> None:
        """Called once the trainer is built, with the leases held."""

    def check(self) -> None:  # noqa: B027 - not every mode has something to check
        """Raises if the trainer's parameters are no longer what they were at `attach`. Called
        before every pause."""

    def pause(self) -> Future:
        """Has this rank's servers pause, in the background."""
        in_place = self.in_place or self.steps_in_place
        return self.servers.each_in_background(
            lambda client: client.pause(self.clear_cache, in_place)
        )

    def fingerprinted(self) -> list["Fingerprinted"]:
        """What the servers must have bit for bit. Called on every rank, once the trainer is
        built."""
        return []

    @abstractmethod
    def send(self, policy_version: int) -> int:
        """Moves the weights of a version that the paused servers do not have yet. Returns how many
        bytes moved."""

    def resume(self, policy_version: int) -> Future:
        """Has them go on with what was sent, in the background."""
        return self.servers.each_in_background(lambda client: client.resume(policy_version))


def open_views(
    parameters: Iterable[tuple[str, torch.Tensor]], attachment: Attachment
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Opens the server's memory and compares it, bit for bit, with the values that the trainer has
    loaded. Returns (views, refused): by parameter name, the server's memory, or why there is no
    such view. A few parameters differ where vLLM transforms them after loading. If most do, the
    server has other weights: an `AttachError`."""
    storages = [open_storage(handle) for handle in attachment.storages]
    views = {}
    differing = []
    for name, parameter in parameters:
        if name in attachment.refused:
            continue
        place = attachment.views[name]
        view = (
            storages[place.storage]
            .view(parameter.dtype)
            .as_strided(place.size, place.stride, place.offset)
        )
        if torch.equal(view, parameter.detach().to(view.device)):
            views[name] = view
        else:
            differing.append(name)
    if len(differing) > len(views):
        raise AttachError(
            f"The server's weights differ from the trainer's model at {differing[0]!r}. The server "
            "serves another model, or an earlier run has trained it: start it again on the model "
            "that the trainer loads."
        )
    return views, attachment.refused | dict.fromkeys(
        differing, "vLLM transforms it, or has another value"
    )


# ------------------------------------------------------------------- the trainer's end of a channel


def choose_transport(asked: str, servers: Servers, device: torch.device) -> str:
    """`"nccl"`, `"gloo"` or `"memory"`, for the servers of rank 0, a trainer on `device`, and a
    `weight_transport`."""
    here = all(info.machine == machine_id() for info in servers.infos)
    on_gpu = device.type == "cuda"
    own = uuid_of(device)
    on_own = shares_gpu(servers, device)
    kinds = {info.device for info in servers.infos}
    if kinds != {device.type}:
        raise AttachError(
            f"The trainer computes on {device.type}, the servers on {', '.join(sorted(kinds))}: "
            "weights go from GPU to GPU or from CPU to CPU."
        )
    if asked == "auto" and on_own and not here:
        raise AttachError(
            f"A server shares the trainer's GPU {own}, which NCCL cannot reach, and another server "
            "is on another machine, which shared memory cannot reach. Give the trainer a GPU of "
            "its own."
        )
    if asked == "auto":
        return "gloo" if not on_gpu else "memory" if on_own else "nccl"
    if asked == "memory" and not here:
        wrong = "shares memory, but a server runs on another machine (or in another container)"
    elif asked == "nccl" and not on_gpu:
        wrong = "goes from GPU to GPU, but this run is on the CPU"
    # With NCCL_HOSTID set, NCCL takes two processes on one GPU for two machines, and goes through
    # sockets.
    elif asked == "nccl" and on_own and "NCCL_HOSTID" not in os.environ:
        wrong = f"connects GPUs, but a server shares the trainer's GPU {own}"
    else:
        return asked
    raise AttachError(f"`weight_transport: {asked}` {wrong}: set it to auto.")


def uuid_of(device: torch.device) -> str:
    """Of a GPU; empty for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def shares_gpu(servers: Servers, device: torch.device) -> bool:
    """Whether one of this rank's servers computes on the trainer's GPU."""
    return any(uuid_of(device) in info.device_uuids for info in servers.infos)


def leave_room(device: torch.device) -> None:
    """Has torch give back memory that it keeps for later, before it takes the last `ROOM` of a GPU:
    the server would not find what its next step takes, and die."""
    (free, total), own = torch.cuda.mem_get_info(device), torch.cuda.memory_reserved(device)
    torch.cuda.set_per_process_memory_fraction(
        max(own, own + free - ROOM * total) / total, device.index
    )


def open_channel(
    transport: str, servers: Servers, device: torch.device, num_bytes: int
) -> channels.Channel:
    """Opens a channel to all of this rank's servers, for messages of up to `num_bytes`."""
    if transport == "memory":
        channel, specification = channels.open_memory(device, num_bytes)
        servers.each_here(lambda client: client.open_channel(specification))
        return channel
    pairs = zip(servers.clients, servers.infos, strict=True)
    members = [(client.host, info.num_workers, client.open_channel) for client, info in pairs]
    try:
        return channels.open_group(transport, device, members, servers.timeout)
    except ServerError:
        raise
    except RuntimeError as error:  # the channel's own, or torch's
        raise AttachError(
            f"The servers at {', '.join(servers.urls)} did not join a {transport} group with the "
            f"trainer: {error}. Look at their logs; behind a firewall, the servers must reach the "
            "trainer's machine on any port."
        ) from error


def send_messages(
    channel: channels.Channel,
    messages: Iterator[torch.Tensor],
    servers: Servers,
    receive: Callable[[ServerClient], None],
) -> None:
    """Sends messages one after the other while `receive` lets every server take them. Each is a
    buffer of the channel, and filled when it is asked for, which it is when the last but one has
    arrived. Raises `ServerError` if a server does not take all."""
    names = ", ".join(client.url for client in servers.clients)
    if channel.broken:
        raise ServerError(
            f"A transfer to the server at {names} broke off before, and its rest could be taken "
            "for the next: build the trainer again (its last checkpoint can be resumed)."
        )
    first = next(messages)
    channel.broken = True  # until all messages have arrived
    num_bytes = first.numel()
    ask = partial(channels.in_background, lambda: servers.each_here(receive))
    # A broadcast may wait for those that it goes to; in shared memory, the message must be there
    # when they look.
    received = ask() if channel.streams else None

    def wait_for(done: Callable[[bool], bool]) -> None:
        what = f"{names} to receive {num_bytes} bytes"
        channels.wait_for(lambda: done(channels.has_ended(received)), servers.timeout, what)

    try:
        traveling = deque([channel.send(first)])
        received = received or ask()
        for message in messages:
            num_bytes += message.numel()
            traveling.append(channel.send(message))
            wait_for(lambda _: traveling[0]())
            traveling.popleft()
        wait_for(
            lambda all_received: all_received and all(has_arrived() for has_arrived in traveling)
        )
    except ServerError:
        raise
    except RuntimeError as error:  # the channel's own, or torch's
        with suppress(channels.ChannelError):
            own = "the server's own error, which says more"
            channels.wait_for(
                lambda: received is not None and channels.has_ended(received), 1.0, own
            )
        raise ServerError(
            f"The transfer of weights to the server at {names} broke off: {error}. If the server "
            "died, its log says why; if it hangs, raise `publish_timeout` or restart it."
        ) from error
    channel.broken = False
