"""Sends tensors from the trainer (rank 0) to the workers of its servers, as flat byte buffers.

- `gloo` and `nccl`: one process group of the trainer and every worker of every server. To send is
  to broadcast.
- `memory`: one buffer of shared memory, which the trainer fills and the workers of the same machine
  read.

The trainer opens a channel with `open_group` or `open_memory`, a worker joins with `open_receiver`.
Both ends are here, because they must agree byte for byte. A worker gets JSON to know what to join;
nothing is pickled.

`Copies` makes the many copies of a publish: from and to messages, or straight from one side's
memory to the other's.
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
from torch import Tensor

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
WORD = 4  # bytes that the kernel counts in
UNIT = 16  # bytes that the kernel moves at a time
SHORTEST = 1024  # bytes: the kernel copies several runs only if each has as many
MOST_WORDS = 1 << 12  # that one program of the kernel moves, all of one run
WORDS_AT_ONCE = 1 << 11  # that it loads at a time


def message_layout(tensors: list[ParameterSpec]) -> tuple[list[int], int]:
    """Returns the offset of each tensor in a message, and the message's length, in bytes. Tensors
    of 6 and 32 bytes have the offsets 0 and 16, and the length is 48."""
    offsets = []
    end = 0
    for tensor in tensors:
        offsets.append(end)
        num_bytes = _num_bytes(tensor)
        padding = -num_bytes % ALIGNMENT
        end += num_bytes + padding
    return offsets, end


def unpack(message: Tensor, tensors: list[ParameterSpec]) -> list[Tensor]:
    """Returns views of a message (flat `uint8`), one per tensor."""
    offsets, _ = message_layout(tensors)
    views = []
    for begin, tensor in zip(offsets, tensors, strict=True):
        end = begin + _num_bytes(tensor)
        dtype = getattr(torch, tensor.dtype)
        values = message[begin:end].view(dtype)
        views.append(values.view(tensor.shape))
    return views


def _num_bytes(tensor: ParameterSpec) -> int:
    itemsize = getattr(torch, tensor.dtype).itemsize
    return math.prod(tensor.shape) * itemsize


def synchronize(device: torch.device) -> None:
    """Waits for the copies that are queued: an answer to the trainer means that they are done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class ChannelError(RuntimeError):
    """A transfer failed, or did not end in time. The message names the event that did not come."""


class Channel(ABC):
    """One end of a channel. Buffers are flat `uint8` tensors on `device`."""

    device: torch.device
    broken = False  # true if a message may have been sent in part, or not received
    streams = False  # true if a message may follow before the last one was used

    @abstractmethod
    def staging(self, num_bytes: int, number: int = 0) -> Tensor:
        """Returns a buffer of `num_bytes` to fill with the message `number`. Two of them may travel
        at a time."""

    @abstractmethod
    def send(self, buffer: Tensor) -> Callable[[], bool]:
        """Starts to send a buffer of `staging`. Returns a function that returns whether the buffer
        has arrived."""

    @abstractmethod
    def messages(self, sizes: list[int]) -> Iterator[Tensor]:
        """Yields the messages that the trainer sends, whose bytes `sizes` tells. Use each buffer
        before you take the next. On a GPU, the message is there for work that is queued after."""

    def receive(self, num_bytes: int) -> Tensor:
        """Returns one message, in a buffer that the next call overwrites."""
        (buffer,) = self.messages([num_bytes])
        if buffer.is_cuda:
            torch.cuda.current_stream(buffer.device).synchronize()
        return buffer


class GroupChannel(Channel):
    """A process group, in which to send is to broadcast. It has two buffers: one is filled or used
    while the other travels."""

    streams = True

    def __init__(self):
        self._buffers: dict[int, Tensor] = {}  # for messages of even and of odd numbers

    @abstractmethod
    def _broadcast(self, buffer: Tensor) -> Any:
        """Starts to broadcast from the trainer, after the work that is queued for the buffer."""

    @abstractmethod
    def _wait(self, travel: Any) -> None:
        """Makes work that is queued from now on wait for the end of a broadcast."""

    @abstractmethod
    def _has_arrived(self, travel: Any) -> bool:
        """Returns whether a broadcast has ended. Raises a `RuntimeError` if it has failed."""

    def staging(self, num_bytes: int, number: int = 0) -> Tensor:
        parity = number % 2
        buffer = self._buffers.get(parity)
        if buffer is None or buffer.numel() < num_bytes:
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
            self._buffers[parity] = buffer
        return buffer[:num_bytes]

    def send(self, buffer: Tensor) -> Callable[[], bool]:
        travel = self._broadcast(buffer)
        return partial(self._has_arrived, travel)

    def messages(self, sizes: list[int]) -> Iterator[Tensor]:
        coming: deque[tuple[Tensor, Any]] = deque()
        for number, size in enumerate(sizes):
            if len(coming) == 2:
                yield self._first_of(coming)
            buffer = self.staging(size, number)
            coming.append((buffer, self._broadcast(buffer)))
        while coming:
            yield self._first_of(coming)

    def _first_of(self, coming: deque[tuple[Tensor, Any]]) -> Tensor:
        buffer, travel = coming.popleft()
        self._wait(travel)
        return buffer


class GlooChannel(GroupChannel):
    """A gloo group over TCP. It is bound to the address by which the two sides reach each other."""

    device = torch.device("cpu")

    def __init__(self, store: dist.Store, rank: int, world_size: int, address: str, timeout: float):
        super().__init__()
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        own_keys = dist.PrefixStore("trl_atropos", store)
        self._group = dist.ProcessGroupGloo(own_keys, rank, world_size, options)

    def _broadcast(self, buffer: Tensor) -> dist.Work:
        return self._group.broadcast([buffer], dist.BroadcastOptions())  # from rank 0, the trainer

    def _wait(self, work: dist.Work) -> None:
        work.wait()

    def _has_arrived(self, work: dist.Work) -> bool:
        # `wait` raises an error if the other side is gone
        return work.is_completed() and work.wait()


class NcclChannel(GroupChannel):
    """An NCCL communicator, made by vLLM's binding, which both sides have. Its id comes over HTTP,
    so that it needs no store and no port. It is never destroyed, because that would wait for the
    other side, which may be gone."""

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
            # NCCL connects in the first broadcast, which waits for all ranks. The trainer has a
            # deadline here.
            first = torch.zeros(1, dtype=torch.uint8, device=device)
            self._broadcast(first).synchronize()

    @staticmethod
    def unique_id() -> bytes:
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

        return bytes(NCCLLibrary().ncclGetUniqueId().internal)

    def _broadcast(self, buffer: Tensor) -> torch.cuda.Event:
        pointer = self._buffer_type(buffer.data_ptr())
        event = torch.cuda.Event()
        stream = self._stream_type(self._stream.cuda_stream)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        size = buffer.numel()
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            # 1 is ncclUint8, 0 the trainer's rank.
            self._nccl.ncclBroadcast(pointer, pointer, size, 1, 0, self._communicator, stream)
            event.record(self._stream)
        return event

    def _wait(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(event)

    def _has_arrived(self, event: torch.cuda.Event) -> bool:
        return event.query()


class MemoryChannel(Channel):
    """A buffer that both ends map. It is as large as the largest message and cannot grow."""

    def __init__(self, buffer: Tensor):
        self.device = buffer.device
        self._whole = buffer

    def staging(self, num_bytes: int, number: int = 0) -> Tensor:
        if num_bytes > self._whole.numel():
            raise ChannelError(
                f"{num_bytes} bytes do not fit into the shared buffer of {self._whole.numel()}"
            )
        return self._whole[:num_bytes]

    def send(self, buffer: Tensor) -> Callable[[], bool]:
        if buffer.is_cuda:
            # the readers are not in our stream
            torch.cuda.current_stream(buffer.device).synchronize()
        return lambda: True

    def messages(self, sizes: list[int]) -> Iterator[Tensor]:
        yield from map(self.staging, sizes)


# -------------------------------------------------------------------------------- opening a channel


def open_memory(device: torch.device, num_bytes: int) -> tuple[MemoryChannel, dict]:
    """Returns the sender's end, and the JSON that `open_receiver` takes on the other."""
    if device.type == "cuda":
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    else:
        buffer = allocate_arena(num_bytes)
    handle = export_storage(buffer.untyped_storage())
    return MemoryChannel(buffer), {"kind": "memory", "handle": handle}


def open_group(
    kind: str,
    device: torch.device,
    servers: list[tuple[str, int, Callable[[dict], Any]]],
    timeout: float,
) -> Channel:
    """
    Opens the sender's end of a group with the workers of `servers`. Raises `ChannelError` if they
    have not joined within `timeout` seconds.

    Args:
        kind: "gloo" or "nccl".
        servers: for each its host, the number of its workers, and a function that asks it to join
            with a specification and returns when it has. The functions run in threads.
        timeout: in seconds, also of a transfer.
    """
    world_size = 1 + sum(workers for _, workers, _ in servers)
    common: dict[str, Any] = {"kind": kind, "world_size": world_size, "timeout": timeout}
    if kind == "nccl":
        identity = NcclChannel.unique_id()
        common["unique_id"] = base64.b64encode(identity).decode()
        make_own = partial(NcclChannel, device, 0, world_size, identity)
    elif kind == "gloo":
        address = _own_address([host for host, *_ in servers])
        store, port = _bound_store(address, world_size, timeout)
        common["host"] = address
        common["port"] = port
        make_own = partial(GlooChannel, store, 0, world_size, address, timeout)
    else:
        raise _unknown(kind)
    calls = []
    first_rank = 1
    for _, workers, join in servers:
        specification = {**common, "rank_offset": first_rank}
        calls.append(in_background(partial(join, specification)))
        first_rank += workers
    own = in_background(make_own)
    calls.append(own)

    def all_have_joined() -> bool:
        return all(has_ended(call) for call in calls)

    wait_for(all_have_joined, timeout, f"{world_size - 1} workers to join {kind}")
    return own.result()


def open_receiver(specification: dict, rank: int, device: torch.device) -> Channel:
    """Opens the end of a worker. `rank` counts the workers of this server from 0."""
    kind = specification["kind"]
    if kind == "memory":
        return MemoryChannel(open_storage(specification["handle"]))
    if kind not in ("gloo", "nccl"):
        raise _unknown(kind)
    own_rank = specification["rank_offset"] + rank
    world_size = specification["world_size"]
    if kind == "nccl":
        identity = base64.b64decode(specification["unique_id"])
        return NcclChannel(device, own_rank, world_size, identity)
    # gloo
    host = specification["host"]
    port = specification["port"]
    timeout = specification["timeout"]
    store = dist.TCPStore(
        host, port, world_size, False, timedelta(seconds=timeout), wait_for_workers=False
    )
    address = _own_address([host])
    return GlooChannel(store, own_rank, world_size, address, timeout)


def _unknown(kind: str) -> ChannelError:
    return ChannelError(f"there is no transport {kind!r}: it must be gloo, nccl or memory")


def wait_for(done: Callable[[], bool], timeout: float, what: str) -> None:
    """Waits until `done()` is true. Raises `ChannelError` that names `what` after `timeout`
    seconds."""
    deadline = time.monotonic() + timeout
    while not done():
        if time.monotonic() > deadline:
            raise ChannelError(f"waited {timeout:.0f} s for {what}")
        time.sleep(POLL)


def in_background(call: Callable[[], Any]) -> Future:
    """Makes a call in a daemon thread. An executor's thread would keep the process alive if the
    call hangs."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:  # noqa: BLE001 - raised again where the result is taken
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def has_ended(future: Future) -> bool:
    """Returns whether the call has ended, or raises its error."""
    if not future.done():
        return False
    future.result()
    return True


def _own_address(hosts: list[str]) -> str:
    """Returns the address from which this machine reaches the given hosts: loopback if all of them
    are this machine."""
    addresses = []
    for host in hosts:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unsent:
            unsent.connect((socket.gethostbyname(host), 9))  # chooses a route and sends nothing
            address, _ = unsent.getsockname()
            addresses.append(address)
    for address in addresses:
        if not address.startswith("127."):
            return address
    return "127.0.0.1"


def _bound_store(address: str, world_size: int, timeout: float) -> tuple[dist.TCPStore, int]:
    """Returns a store that listens on one address, and its port. Torch's own would listen on
    all."""
    listener = socket.create_server((address, 0))
    _, port = listener.getsockname()
    store = dist.TCPStore(
        address,
        port,
        world_size,
        True,
        timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, port


def _without_vllms_nccl_variables() -> contextlib.AbstractContextManager:
    """Takes away the NCCL variables that vLLM 0.32 sets in its processes. A communicator with a
    process that lacks them would hang."""
    try:
        from vllm.utils.nccl import unpinned_nccl_env
    except ImportError:  # 0.26 sets none
        return contextlib.nullcontext()
    return unpinned_nccl_env()


# ------------------------------------------------------------------------------ many copies at once


class Copies:
    """
    Copies many tensors, again and again between the same places.

    On a GPU, one kernel makes all copies that move runs of whole 16 bytes: to queue one for each
    tensor takes the CPU longer than the device needs for small models, 2.8 ms for the 310 tensors
    of the shape of Qwen3-0.6B on an H100. The kernel takes 0.79 ms, as does one copy of as many
    bytes. Torch makes the copies that convert, that move a few bytes at a time, or that go from one
    device to another.

    Args:
        pairs: of tensors of equal shapes, the target first. Sources are on one device; both stay
            where they are.
    """

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]]):
        # So that no memory in the table is freed, even if a parameter gets another one.
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._targets = []  # of the copies that torch makes
        self._sources = []
        tables = []
        for target, source in pairs:
            target = target.detach()
            source = source.detach()
            self._kept.append((target, source))
            runs = None
            if target.is_cuda:
                runs = runs_of(target, source)
            if runs is not None:
                tables.append(runs)
            else:
                self._targets.append(target)
                self._sources.append(source)
        self._table = None
        if tables:
            table = torch.from_numpy(np.concatenate(tables))
            self._table = table.to(source.device)

    def __call__(self) -> None:
        """Makes the copies, which on a GPU are only queued."""
        if self._table is not None:
            programs = (len(self._table),)
            with torch.cuda.device(self._table.device):
                _copy_runs[programs](self._table, MOST_WORDS, WORDS_AT_ONCE, num_warps=16)
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources)


def runs_of(target: Tensor, source: Tensor) -> np.ndarray | None:
    """
    Returns the runs of bytes by which the kernel copies a tensor, int64 (runs, 3): the addresses to
    read and to write, and the words. Returns `None` if it cannot.

    Both sides of a copy of `[:, :1024]` of (2, 4096) have the strides (4096, 1). The last dimension
    lies in one run, and the first counts 2 of them. In float32, with the source at 0 and the target
    at 65,536, the runs are (0, 65536, 1024) and (16384, 81920, 1024).
    """
    if target.dtype != source.dtype or target.device != source.device:
        return None
    if not target.numel():
        return None
    length = 1  # elements of a run
    outer = []  # dimensions that count runs, the innermost first
    dims = zip(target.shape, target.stride(), source.stride(), strict=True)
    for size, target_stride, source_stride in reversed(list(dims)):
        continues = size == 1 or target_stride == source_stride == length
        if continues and not outer:
            length *= size
        else:
            outer.append((size, target_stride, source_stride))
    itemsize = target.element_size()
    num_bytes = length * itemsize
    # before all are listed, which may be each element
    if num_bytes % UNIT or (outer and num_bytes < SHORTEST):
        return None
    begins = np.array([[source.data_ptr(), target.data_ptr()]])  # (runs, 2)
    for size, target_stride, source_stride in outer:
        strides = np.array([source_stride, target_stride]) * itemsize
        steps = np.arange(size)[:, None] * strides  # (size, 2)
        begins = (begins[:, None] + steps).reshape(-1, 2)
    if (begins % UNIT).any():
        return None
    return _cut(begins, num_bytes // WORD)


def _cut(begins: np.ndarray, words: int) -> np.ndarray:
    """Returns runs that begin at these addresses, (runs, 2), and are as many words long, in pieces
    of at most `MOST_WORDS`, (pieces, 3). A run of 5,000 words becomes two of 4,096 and 904."""
    offsets = np.arange(0, words, MOST_WORDS)  # (pieces of a run,), in words
    counts = np.minimum(MOST_WORDS, words - offsets)
    steps = offsets[:, None] * WORD  # in bytes
    piece_begins = begins[:, None] + steps  # (runs, pieces of a run, 2)
    piece_begins = piece_begins.reshape(-1, 2)
    all_counts = np.tile(counts, len(begins))
    return np.column_stack([piece_begins, all_counts])


if triton is not None:

    @triton.jit
    def _copy_runs(table, MOST_WORDS: tl.constexpr, WORDS_AT_ONCE: tl.constexpr):
        """Copies what one entry of the table says: from where, to where, and how many words."""
        program = tl.program_id(0).to(tl.int64)
        entry = table + program * 3
        source_address = tl.load(entry)
        target_address = tl.load(entry + 1)
        word_count = tl.load(entry + 2)
        source = source_address.to(tl.pointer_type(tl.int32))
        target = target_address.to(tl.pointer_type(tl.int32))
        count = word_count.to(tl.int32)
        # This lets the compiler move 16 bytes at a time.
        source = tl.multiple_of(source, 16)
        target = tl.multiple_of(target, 16)
        count = tl.multiple_of(count, 4)
        for begin in range(0, MOST_WORDS, WORDS_AT_ONCE):
            words = begin + tl.arange(0, WORDS_AT_ONCE)
            inside = words < count
            values = tl.load(source + words, mask=inside)
            tl.store(target + words, values, mask=inside)
