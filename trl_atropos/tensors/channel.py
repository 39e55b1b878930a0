"""How tensors travel from the trainer (rank 0) to the workers of its servers, as flat byte buffers.

- `gloo` and `nccl`: one process group of the trainer and every worker of every server; to send is
  to broadcast.
- `memory`: one buffer of shared memory, which the trainer fills and the workers of the same machine
  read.

`Copies` makes the many copies of a publish, from and to messages, or straight from one side's
memory to the other's.

The trainer opens a channel with `open_group` or `open_memory`, a worker joins with `open_receiver`.
Both ends are here, because they must agree byte for byte. What a worker must know to join is JSON;
nothing is pickled.
"""

import base64
import contextlib
import math
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from trl_atropos.protocol import ParameterSpec
from trl_atropos.tensors.shared_memory import allocate_arena, export_storage, open_storage

try:
    import triton
    import triton.language as tl
except ImportError:  # builds of torch for the CPU do without
    triton = None

# bytes: each tensor of a message begins at a multiple, so that any dtype can be viewed in place
ALIGNMENT = 16
POLL = 2e-4  # seconds between two checks of a transfer in flight
# bytes that the kernel counts in, and that it moves at a time
WORD = 4
UNIT = 16
# bytes of each of several runs. A program of the kernel moves one, and at most `MOST` words of it
SHORTEST = 1024
# words
MOST = 1 << 12
AT_ONCE = 1 << 11


def message_layout(tensors: list[ParameterSpec]) -> tuple[list[int], int]:
    """Returns the offset of each tensor in a message, and the message's length, in bytes."""
    offsets = []
    end = 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-_num_bytes(tensor) // ALIGNMENT) * ALIGNMENT
    return offsets, end


def unpack(message: torch.Tensor, tensors: list[ParameterSpec]) -> list[torch.Tensor]:
    """Returns views of a message (flat `uint8`), one per tensor."""
    return [
        message[offset : offset + _num_bytes(tensor)]
        .view(getattr(torch, tensor.dtype))
        .view(tensor.shape)
        for offset, tensor in zip(message_layout(tensors)[0], tensors, strict=True)
    ]


def _num_bytes(tensor: ParameterSpec) -> int:
    return math.prod(tensor.shape) * getattr(torch, tensor.dtype).itemsize


class ChannelError(RuntimeError):
    """A transfer failed, or did not end in time. The message names what was waited for."""


class Channel(ABC):
    """One end of a channel. Buffers are flat `uint8` tensors on `device`."""

    device: torch.device
    broken = False  # whether a message may have been sent in part, or not received
    streams = False  # whether a message may follow before the last one was used

    @abstractmethod
    def staging(self, num_bytes: int, number: int = 0) -> torch.Tensor:
        """Returns a buffer of `num_bytes` to fill with the message `number`. Two of them may travel
        at a time."""

    @abstractmethod
    def send(self, buffer: torch.Tensor) -> Callable[[], bool]:
        """Starts to send a buffer of `staging`. Returns a function that says whether it has
        arrived."""

    @abstractmethod
    def messages(self, sizes: list[int]) -> Iterator[torch.Tensor]:
        """Yields what the trainer sends, of each message (bytes in `sizes`) a buffer to use before
        the next. On a GPU it is there for what is queued from now on."""

    def receive(self, num_bytes: int) -> torch.Tensor:
        """Returns one message, in a buffer that the next call overwrites."""
        (buffer,) = self.messages([num_bytes])
        if buffer.is_cuda:
            torch.cuda.current_stream(buffer.device).synchronize()
        return buffer


class GroupChannel(Channel):
    """A group in which to send is to broadcast. Of two buffers, one is filled or used while the
    other travels."""

    streams = True

    def __init__(self):
        self._buffers: dict[int, torch.Tensor] = {}  # for messages of even and of odd numbers

    @abstractmethod
    def _broadcast(self, buffer: torch.Tensor) -> Any:
        """Starts to broadcast from the trainer, once what is queued for the buffer is done."""

    @abstractmethod
    def _wait(self, travel: Any) -> None:
        """Has what follows wait for the end of a broadcast."""

    @abstractmethod
    def _has_arrived(self, travel: Any) -> bool:
        """Whether a broadcast has ended. Raises a `RuntimeError` if it has failed."""

    def staging(self, num_bytes: int, number: int = 0) -> torch.Tensor:
        buffer = self._buffers.get(number % 2)
        if buffer is None or buffer.numel() < num_bytes:
            buffer = self._buffers[number % 2] = torch.empty(
                num_bytes, dtype=torch.uint8, device=self.device
            )
        return buffer[:num_bytes]

    def send(self, buffer: torch.Tensor) -> Callable[[], bool]:
        return partial(self._has_arrived, self._broadcast(buffer))

    def messages(self, sizes: list[int]) -> Iterator[torch.Tensor]:
        coming: deque[tuple[torch.Tensor, Any]] = deque()
        for number, size in enumerate([*sizes, None, None]):
            if len(coming) == 2 or (size is None and coming):
                buffer, travel = coming.popleft()
                self._wait(travel)
                yield buffer
            if size is not None:
                buffer = self.staging(size, number)
                coming.append((buffer, self._broadcast(buffer)))


class GlooChannel(GroupChannel):
    """A gloo group over TCP, bound to the address by which the two sides reach each other."""

    device = torch.device("cpu")

    def __init__(self, store: dist.Store, rank: int, world_size: int, address: str, timeout: float):
        super().__init__()
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        self._group = dist.ProcessGroupGloo(
            dist.PrefixStore("trl_atropos", store), rank, world_size, options
        )

    def _broadcast(self, buffer: torch.Tensor) -> dist.Work:
        return self._group.broadcast([buffer], dist.BroadcastOptions())  # from rank 0, the trainer

    def _wait(self, work: dist.Work) -> None:
        work.wait()

    def _has_arrived(self, work: dist.Work) -> bool:
        # `wait` raises an error if the other side is gone
        return work.is_completed() and work.wait()


class NcclChannel(GroupChannel):
    """An NCCL communicator made from an id that came over HTTP, so that it needs no store and no
    port, by vLLM's binding, which both sides have. It is never destroyed, because that would wait
    for the other side, which may be gone."""

    def __init__(self, device: torch.device, rank: int, world_size: int, unique_id: bytes):
        from vllm.distributed.device_communicators.pynccl_wrapper import (
            NCCLLibrary,
            buffer_type,
            cudaStream_t,
        )

        super().__init__()
        self.device = device
        self._nccl = NCCLLibrary()
        self._buffer_type = buffer_type
        self._stream_type = cudaStream_t
        with torch.cuda.device(device), _without_vllms_nccl_variables():
            identity = self._nccl.unique_id_from_bytes(unique_id)
            self._communicator = self._nccl.ncclCommInitRank(world_size, identity, rank)
            self._stream = torch.cuda.Stream(device)
            # NCCL connects in the first broadcast, which waits for all ranks: here, where the
            # trainer has a deadline.
            self._broadcast(torch.zeros(1, dtype=torch.uint8, device=device)).synchronize()

    @staticmethod
    def unique_id() -> bytes:
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

        return bytes(NCCLLibrary().ncclGetUniqueId().internal)

    def _broadcast(self, buffer: torch.Tensor) -> torch.cuda.Event:
        pointer = self._buffer_type(buffer.data_ptr())
        event = torch.cuda.Event()
        stream = self._stream_type(self._stream.cuda_stream)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            # 1 is ncclUint8, 0 the trainer's rank.
            self._nccl.ncclBroadcast(
                pointer, pointer, buffer.numel(), 1, 0, self._communicator, stream
            )
            event.record(self._stream)
        return event

    def _wait(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(event)

    def _has_arrived(self, event: torch.cuda.Event) -> bool:
        return event.query()


class MemoryChannel(Channel):
    """A buffer that both ends map. It is as large as the largest message and cannot grow."""

    def __init__(self, buffer: torch.Tensor):
        self.device = buffer.device
        self._whole = buffer

    def staging(self, num_bytes: int, number: int = 0) -> torch.Tensor:
        if num_bytes > self._whole.numel():
            raise ChannelError(
                f"{num_bytes} bytes do not fit into the shared buffer of {self._whole.numel()}"
            )
        return self._whole[:num_bytes]

    def send(self, buffer: torch.Tensor) -> Callable[[], bool]:
        if buffer.is_cuda:
            # the readers are not in our stream
            torch.cuda.current_stream(buffer.device).synchronize()
        return lambda: True

    def messages(self, sizes: list[int]) -> Iterator[torch.Tensor]:
        yield from map(self.staging, sizes)


# -------------------------------------------------------------------------------- opening a channel


def open_memory(device: torch.device, num_bytes: int) -> tuple[MemoryChannel, dict]:
    """Returns the sender's end, and the JSON that `open_receiver` takes on the other."""
    on_gpu = device.type == "cuda"
    buffer = (
        torch.empty(num_bytes, dtype=torch.uint8, device=device)
        if on_gpu
        else allocate_arena(num_bytes)
    )
    return MemoryChannel(buffer), {
        "kind": "memory",
        "handle": export_storage(buffer.untyped_storage()),
    }


def open_group(
    kind: str,
    device: torch.device,
    servers: list[tuple[str, int, Callable[[dict], Any]]],
    timeout: float,
) -> Channel:
    """Opens the sender's end of a "gloo" or "nccl" group with the workers of `servers`: of each the
    host, the number of workers, and a function that asks it to join with a specification and
    returns when it has. The functions run in threads. All servers have joined within `timeout`
    seconds, and a transfer takes no longer."""
    world_size = 1 + sum(workers for _, workers, _ in servers)
    common: dict[str, Any] = {"kind": kind, "world_size": world_size, "timeout": timeout}
    if kind == "nccl":
        identity = NcclChannel.unique_id()
        common["unique_id"] = base64.b64encode(identity).decode()
        make_own = partial(NcclChannel, device, 0, world_size, identity)
    else:
        address = _own_address([host for host, *_ in servers])
        store, port = _bound_store(address, world_size, timeout)
        common |= {"host": address, "port": port}
        make_own = partial(GlooChannel, store, 0, world_size, address, timeout)
    calls = []
    first = 1
    for _, workers, join in servers:
        calls.append(in_background(partial(join, {**common, "rank_offset": first})))
        first += workers
    own = in_background(make_own)
    wait_for(
        lambda: all(map(has_ended, [*calls, own])),
        timeout,
        f"{world_size - 1} workers to join {kind}",
    )
    return own.result()


def open_receiver(specification: dict, rank: int, device: torch.device) -> Channel:
    """Opens a worker's end. `rank` counts the workers of this server from 0."""
    kind = specification["kind"]
    if kind == "memory":
        return MemoryChannel(open_storage(specification["handle"]))
    own_rank = specification["rank_offset"] + rank
    world_size = specification["world_size"]
    if kind == "nccl":
        return NcclChannel(
            device, own_rank, world_size, base64.b64decode(specification["unique_id"])
        )
    host = specification["host"]
    port = specification["port"]
    timeout = specification["timeout"]
    store = dist.TCPStore(
        host, port, world_size, False, timedelta(seconds=timeout), wait_for_workers=False
    )
    return GlooChannel(store, own_rank, world_size, _own_address([host]), timeout)


def wait_for(done: Callable[[], bool], timeout: float, what: str) -> None:
    """Waits until `done()` is true. Raises `ChannelError` that names `what` after `timeout`
    seconds."""
    deadline = time.monotonic() + timeout
    while not done():
        if time.monotonic() > deadline:
            raise ChannelError(f"waited {timeout:.0f} s for {what}")
        time.sleep(POLL)


def in_background(call: Callable[[], Any]) -> Future:
    """Makes a call in a daemon thread: where the call hangs, an executor's thread would keep the
    process alive."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:  # noqa: BLE001 - raised again where the result is taken
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def has_ended(future: Future) -> bool:
    """Whether the call has ended. Raises its error."""
    if future.done():
        future.result()
    return future.done()


def _own_address(hosts: list[str]) -> str:
    """The address from which this machine reaches the given hosts: loopback if all of them are this
    machine."""
    addresses = []
    for host in hosts:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unsent:
            unsent.connect((socket.gethostbyname(host), 9))  # chooses a route and sends nothing
            addresses.append(unsent.getsockname()[0])
    return next((address for address in addresses if not address.startswith("127.")), "127.0.0.1")


def _bound_store(address: str, world_size: int, timeout: float) -> tuple[dist.TCPStore, int]:
    """A store that listens on one address. Torch's own would listen on all."""
    listener = socket.create_server((address, 0))
    port = listener.getsockname()[1]
    options = {"wait_for_workers": False, "master_listen_fd": listener.detach()}
    return dist.TCPStore(
        address, port, world_size, True, timedelta(seconds=timeout), **options
    ), port


def _without_vllms_nccl_variables() -> contextlib.AbstractContextManager:
    """vLLM 0.32 sets NCCL variables in its processes; a communicator with a process without them
    would hang."""
    try:
        from vllm.utils.nccl import unpinned_nccl_env
    except ImportError:  # 0.26 sets none
        return contextlib.nullcontext()
    return unpinned_nccl_env()


# ------------------------------------------------------------------------------ many copies at once


class Copies:
    """
    Copies many tensors, again and again between the same places. On a GPU, one kernel makes all
    copies that move runs of whole 16 bytes: to queue one for each tensor takes the CPU longer than
    the device needs for small models, 2.8 ms for the 310 tensors of the shape of Qwen3-0.6B on an
    H100. The kernel takes 0.79 ms, as does one copy of as many bytes. Copies that convert, that
    move a few bytes at a time, or that go from one device to another are torch's.

    Args:
        pairs: of tensors of equal shapes, the target first. Sources are on one device; both stay
        where they are.
    """

    def __init__(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]):
        # So that no memory in the table is freed, also where a parameter gets another one.
        self._kept = [(target.detach(), source.detach()) for target, source in pairs]
        runs = [
            runs_of(target, source) if target.is_cuda else None for target, source in self._kept
        ]
        rest = [pair for pair, run in zip(self._kept, runs, strict=True) if run is None]
        self._rest = [list(side) for side in zip(*rest)]
        found = [run for run in runs if run is not None]
        self._table = (
            torch.from_numpy(np.concatenate(found)).to(self._kept[0][1].device) if found else None
        )

    def __call__(self) -> None:
        """Makes the copies, which on a GPU are only queued."""
        if self._table is not None:
            with torch.cuda.device(self._table.device):
                _copy_runs[(len(self._table),)](self._table, MOST, AT_ONCE, num_warps=16)
        if self._rest:
            torch._foreach_copy_(*self._rest)


def runs_of(target: torch.Tensor, source: torch.Tensor) -> np.ndarray | None:
    """Where the kernel reads and writes to copy a tensor, and how many words: (runs, 3), or `None`
    if it cannot."""
    if target.dtype != source.dtype or target.device != source.device or not target.numel():
        return None
    length = 1
    outer = []
    for size, to, of in reversed(
        list(zip(target.shape, target.stride(), source.stride(), strict=True))
    ):
        if not outer and (size == 1 or to == of == length):
            length *= size
        else:
            outer.append((size, to, of))
    num_bytes = length * target.element_size()
    # before all are listed, which may be each element
    if num_bytes % UNIT or (outer and num_bytes < SHORTEST):
        return None
    begins = np.array([[source.data_ptr(), target.data_ptr()]])
    for size, to, of in outer:
        steps = np.arange(size)[:, None] * np.array([of, to]) * target.element_size()
        begins = (begins[:, None] + steps).reshape(-1, 2)
    if (begins % UNIT).any():
        return None
    offsets = np.arange(0, num_bytes // WORD, MOST)
    counts = np.minimum(MOST, num_bytes // WORD - offsets)
    places = (begins[:, None] + offsets[:, None] * WORD).reshape(-1, 2)
    return np.column_stack([places, np.tile(counts, len(begins))])


if triton is not None:

    @triton.jit
    def _copy_runs(table, MOST: tl.constexpr, AT_ONCE: tl.constexpr):
        entry = table + tl.program_id(0).to(tl.int64) * 3
        # Multiples, which let the compiler move 16 bytes at a time.
        source = tl.multiple_of(tl.load(entry).to(tl.pointer_type(tl.int32)), 16)
        target = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(tl.int32)), 16)
        count = tl.multiple_of(tl.load(entry + 2).to(tl.int32), 4)
        for begin in range(0, MOST, AT_ONCE):
            words = begin + tl.arange(0, AT_ONCE)
            tl.store(
                target + words, tl.load(source + words, mask=words < count), mask=words < count
            )
