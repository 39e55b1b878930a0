"""`Transfer`: how one mode moves a new policy to the servers.

`publisher.py` calls `load` and `attach` once, then `pause`, `send` and `resume` for every publish,
and compares what `fingerprinted` names. The modes share two more things: views of a server's memory
(`open_views`), and the trainer's end of a channel to the servers (`open_channel`, `send_messages`).
"""

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from trl_atropos.errors import AttachError, OtherWeightsError, ServerError
from trl_atropos.modes import Mode
from trl_atropos.protocol import Attachment, ParameterSpec, machine_id
from trl_atropos.server_client import ServerClient, Servers
from trl_atropos.tensors import channel as channels
from trl_atropos.tensors.shared_memory import open_storage

ROOM = 0.05  # share of a GPU's memory that `leave_room` leaves


class Fingerprinted(NamedTuple):
    """A part of the policy whose fingerprints trainer and servers compare."""

    of: str  # "weights" or "adapter"
    specs: list[ParameterSpec]
    # Returns the trainer's fingerprints, int64 of shape (len(specs), 2). Called on every rank.
    compute: Callable[[], torch.Tensor]
    times: int | None = None  # compared in so many publishes; None: in all
    moves: bool = False  # every publish moves it to other memory of the servers
    left_out: str = ""  # reason why nothing of it can be compared


class Transfer(ABC):
    """
    Moves weights to the servers, one subclass per mode. All methods are called on every rank.

    `pause`, `send` and `resume` are those of TRL's `WeightTransferProtocol`
    (`trl.experimental.async_grpo`). `load` and `attach` do the work of its `init_weight_transfer`.

    Attributes:
        mode (`Mode`): The `vllm_mode` that moves weights in this way.
        in_place (`bool`): This process writes into the server's memory, so that its death would
            leave the weights torn.
        steps_in_place (`bool`): The optimizer's step writes there, so that the server is paused
            around the step.
        clear_cache (`bool`): Requests in flight recompute what they cached, because the weights
            that they use change.
    """

    mode: Mode
    in_place = False
    steps_in_place = False
    clear_cache = True
    _channel: channels.Channel | None = None  # to the servers, if the mode needs one

    def __init__(self, servers: Servers):
        self.servers = servers

    @property
    def memory_is_opened(self) -> bool:
        """True if servers open GPU memory of this process: that of a channel."""
        return self._channel is not None and self._channel.device.type == "cuda"

    def load(self, model: Any, args: Any, peft_config: Any) -> tuple["Transfer", Any]:
        """Connects to the servers. Returns the transfer to use, which may be another one, and the
        trainer's model."""
        self.servers.connect()
        return self, model

    @abstractmethod
    def attach(self, trainer: Any) -> None:
        """Prepares publishing. Called once the trainer is built, with the leases held."""

    def check(self) -> None:  # noqa: B027 - not every mode has something to check
        """Raises if the trainer's parameters are no longer what they were at `attach`. Called
        before every pause."""

    def pause(self) -> Future:
        """Lets this rank's servers pause, in the background."""
        in_place = self.in_place or self.steps_in_place
        return self.servers.each_in_background(
            lambda client: client.pause(self.clear_cache, in_place)
        )

    def fingerprinted(self) -> list["Fingerprinted"]:
        """Returns the parts of the policy that the servers must have bit for bit. Called once the
        trainer is built."""
        return []

    @abstractmethod
    def send(self, policy_version: int) -> int:
        """Moves the weights of a new version to the paused servers. Returns the number of bytes."""

    def resume(self, policy_version: int) -> Future:
        """Lets the servers sample from this version, in the background."""
        return self.servers.each_in_background(lambda client: client.resume(policy_version))


def open_views(
    parameters: Iterable[tuple[str, torch.Tensor]], attachment: Attachment
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """
    Opens the server's memory and compares it, bit for bit, with the values that the trainer has
    loaded.

    Returns:
        `(views, refused)`, both by parameter name: the server's memory, and the reason if a
        parameter has no view. A few parameters differ because vLLM transforms them after loading.

    Raises:
        OtherWeightsError: Most parameters differ.
    """
    storages = [open_storage(handle) for handle in attachment.storages]
    views = {}
    differing = []
    for name, parameter in parameters:
        if name in attachment.refused:
            continue
        place = attachment.views[name]
        storage = storages[place.storage].view(parameter.dtype)
        view = storage.as_strided(place.size, place.stride, place.offset)
        if torch.equal(view, parameter.detach().to(view.device)):
            views[name] = view
        else:
            differing.append(name)
    if len(differing) > len(views):
        raise OtherWeightsError(
            f"The server's weights differ from the trainer's model at {differing[0]!r}. The server "
            "serves another model, or an earlier run has trained it: start it again on the model "
            "that the trainer loads."
        )
    transformed = dict.fromkeys(differing, "vLLM transforms it, or has another value")
    return views, attachment.refused | transformed


# ------------------------------------------------------------------- the trainer's end of a channel


def choose_transport(setting: str, servers: Servers, device: torch.device) -> str:
    """Returns "nccl", "gloo" or "memory", for the servers of rank 0, a trainer on `device`, and a
    `weight_transport`. Raises `AttachError` if the setting cannot work."""
    on_gpu = device.type == "cuda"
    gpu = uuid_of(device)
    shares = shares_gpu(servers, device)
    same_machine = all(info.machine == machine_id() for info in servers.infos)
    kinds = {info.device for info in servers.infos}
    if kinds != {device.type}:
        raise AttachError(
            f"The trainer computes on {device.type}, the servers on {', '.join(sorted(kinds))}: "
            "weights go from GPU to GPU or from CPU to CPU."
        )
    if setting == "auto":
        if shares and not same_machine:
            raise AttachError(
                f"A server shares the trainer's GPU {gpu}, which NCCL cannot reach, and another "
                "server is on another machine, which shared memory cannot reach. Give the trainer "
                "a GPU of its own."
            )
        if not on_gpu:
            return "gloo"
        return "memory" if shares else "nccl"
    problem = ""
    if setting == "memory" and not same_machine:
        problem = "shares memory, but a server runs on another machine (or in another container)"
    elif setting == "nccl" and not on_gpu:
        problem = "goes from GPU to GPU, but this run is on the CPU"
    # With NCCL_HOSTID set, NCCL takes two processes on one GPU for two machines, and goes through
    # sockets.
    elif setting == "nccl" and shares and "NCCL_HOSTID" not in os.environ:
        problem = f"connects GPUs, but a server shares the trainer's GPU {gpu}"
    if problem:
        raise AttachError(f"`weight_transport: {setting}` {problem}: set it to auto.")
    return setting


def uuid_of(device: torch.device) -> str:
    """Returns the UUID of a GPU, or `""` for the CPU."""
    if device.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def shares_gpu(servers: Servers, device: torch.device) -> bool:
    """Returns whether one of this rank's servers computes on the trainer's GPU."""
    uuid = uuid_of(device)
    return any(uuid in info.device_uuids for info in servers.infos)


def leave_room(device: torch.device) -> None:
    """Limits this process to a part of the GPU's memory that leaves `ROOM` free. At the limit,
    torch gives back memory that it keeps for later. Without the limit, the server would not find
    the memory of its next step, and die."""
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    room = ROOM * total
    allowed = max(reserved, reserved + free - room)
    torch.cuda.set_per_process_memory_fraction(allowed / total, device.index)


def open_channel(
    transport: str, servers: Servers, device: torch.device, num_bytes: int
) -> channels.Channel:
    """Opens a channel to all of this rank's servers, for messages of up to `num_bytes`. Raises
    `AttachError` if they do not join, or if there is no such `transport`."""
    if transport == "memory":
        channel, specification = channels.open_memory(device, num_bytes)
        servers.each_here(lambda client: client.open_channel(specification))
        return channel
    if transport not in ("nccl", "gloo"):
        raise AttachError(
            f"`weight_transport` is {transport!r}: set it to auto, nccl, gloo or memory."
        )
    members = []
    for client, info in zip(servers.clients, servers.infos, strict=True):
        members.append((client.host, info.num_workers, client.open_channel))
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
    """Sends messages one after the other while `receive` lets every server take them. Raises
    `ServerError` if a server does not take all.

    Each message is a buffer of the channel, which the iterator fills when it yields the message. By
    then, the last but one has arrived: message 3 may lie where message 1 lay.
    """
    names = ", ".join(client.url for client in servers.clients)
    if channel.broken:
        raise ServerError(
            f"A transfer to the server at {names} broke off before, and its rest could be taken "
            "for the next: build the trainer again (its last checkpoint can be resumed)."
        )
    first = next(messages)
    channel.broken = True  # until all messages have arrived
    num_bytes = first.numel()
    receiving: Future | None = None

    def begin_to_receive() -> Future:
        return channels.in_background(lambda: servers.each_here(receive))

    def oldest_has_arrived() -> bool:
        channels.has_ended(receiving)  # raises the error of a server
        has_arrived = traveling[0]
        return has_arrived()

    def all_have_arrived() -> bool:
        if not channels.has_ended(receiving):
            return False
        return all(has_arrived() for has_arrived in traveling)

    def wait_until(done: Callable[[], bool]) -> None:
        what = f"{names} to receive {num_bytes} bytes"
        channels.wait_for(done, servers.timeout, what)

    # A broadcast may wait for its receivers. A message in shared memory must be there before they
    # look.
    if channel.streams:
        receiving = begin_to_receive()
    try:
        traveling = deque([channel.send(first)])
        if receiving is None:
            receiving = begin_to_receive()
        for message in messages:
            num_bytes += message.numel()
            traveling.append(channel.send(message))
            wait_until(oldest_has_arrived)
            traveling.popleft()
        wait_until(all_have_arrived)
    except ServerError:
        raise
    except RuntimeError as error:  # the channel's own, or torch's
        # The server's own error says more: it gets a second to come.
        with suppress(channels.ChannelError):
            channels.wait_for(
                lambda: receiving is not None and channels.has_ended(receiving),
                1.0,
                "the server's own error",
            )
        raise ServerError(
            f"The transfer of weights to the server at {names} broke off: {error}. If the server "
            "died, its log says why; if it hangs, raise `publish_timeout` or restart it."
        ) from error
    channel.broken = False
