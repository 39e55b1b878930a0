"""Memory that two processes share, and messages: what is opened is what was meant, what is packed
is unpacked."""

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from tests.unprivileged import give_up_rights
from trl_atropos.errors import AttachError
from trl_atropos.privacy import close_to_others
from trl_atropos.protocol import ParameterSpec
from trl_atropos.tensors import channel
from trl_atropos.tensors.channel import (
    ChannelError,
    GlooChannel,
    MemoryChannel,
    message_layout,
    open_group,
    open_receiver,
    unpack,
)
from trl_atropos.tensors.rectangles import Part, rectangles
from trl_atropos.tensors.shared_memory import allocate_arena, export_storage, open_storage
from trl_atropos.weights.colocate import replace
from trl_atropos.weights.full_weights import FullWeights
from trl_atropos.weights.transfer import open_channel, send_messages


def test_opened_arena_is_same_memory():
    arena = allocate_arena(512)
    opened = open_storage(export_storage(arena.untyped_storage()))
    arena[7] = 42
    assert opened.numel() == 512 and opened[7] == 42


def test_memory_of_other_size_is_refused():
    handle = export_storage(allocate_arena(512).untyped_storage())
    with pytest.raises(ValueError, match="is not the server's weight memory of 100 bytes"):
        open_storage(handle | {"num_bytes": 100})


def test_handle_of_version_without_socket_is_opened():
    arena = allocate_arena(512)
    handle = export_storage(arena.untyped_storage())
    del handle["socket"], handle["key"]
    arena[7] = 42
    assert open_storage(handle)[7] == 42
    descriptor = os.memfd_create("another")
    try:
        os.ftruncate(descriptor, 512)
        with pytest.raises(ValueError, match="is not the server's weight memory"):
            open_storage(handle | {"descriptor": descriptor})
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("change", [{"key": "0" * 64}, {"key": ""}, {"socket": "nobody-there"}])
def test_memory_is_not_opened_without_key_and_owner(change):
    handle = export_storage(allocate_arena(512).untyped_storage())
    with pytest.raises(ValueError, match="the owner of shared weights passes none"):
        open_storage(handle | change)
    assert open_storage(handle).numel() == 512  # the owner goes on


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_memory_is_not_opened_by_another_user():
    handle = export_storage(allocate_arena(512).untyped_storage())

    def open_as_another() -> bool:
        os.setuid(60001)
        try:
            open_storage(handle)
        except ValueError:
            return True
        return False

    assert in_fork(open_as_another)


def test_memory_of_closed_process_is_opened_by_key_alone():
    """Neither process is root: as root, `/proc` would stay open."""
    arena = allocate_arena(512)
    arena[7] = 42
    reading, writing = os.pipe()

    def own() -> bool:
        give_up_rights()
        close_to_others()
        handle = export_storage(arena.untyped_storage())
        os.write(writing, json.dumps(handle).encode())
        deadline = time.monotonic() + 60
        while arena[8] != 43 and time.monotonic() < deadline:
            time.sleep(0.01)
        return bool(arena[8] == 43)

    def open_both_ways() -> bool:
        give_up_rights()
        handle = json.loads(os.read(reading, 4096))
        opened = open_storage(handle)
        del handle["socket"]
        with pytest.raises(PermissionError):
            open_storage(handle)
        opened[8] = 43
        return bool(opened[7] == 42)

    with ThreadPoolExecutor() as threads:
        owner = threads.submit(in_fork, own)
        assert in_fork(open_both_ways)
        assert owner.result()


def in_fork(call: Callable[[], bool]) -> bool:
    """Returns what a call returns in a fork of this process; `False` if it raises."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if call() else 1
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) == 0


def test_unknown_transport_is_refused():
    cpu = torch.device("cpu")
    message = "no transport 'rdma': it must be gloo, nccl or memory"
    with pytest.raises(ChannelError, match=message):
        open_group("rdma", cpu, [], 1.0)
    with pytest.raises(ChannelError, match=message):
        open_receiver({"kind": "rdma"}, 0, cpu)
    with pytest.raises(AttachError, match="is 'rdma': set it to auto, nccl, gloo or memory"):
        open_channel("rdma", SimpleNamespace(), cpu, 16)


def test_message_beyond_shared_buffer_is_refused():
    channel = MemoryChannel(torch.zeros(8, dtype=torch.uint8))
    assert channel.staging(8).numel() == 8
    with pytest.raises(ChannelError, match="9 bytes do not fit into the shared buffer of 8"):
        channel.receive(9)


class Connecting(GlooChannel):
    """Connects as NCCL does: in its first broadcast, which returns when all others are in
    theirs."""

    def _broadcast(self, buffer):
        work = super()._broadcast(buffer)
        work.wait()
        return work


def test_broadcast_may_wait_for_receivers(monkeypatch):
    monkeypatch.setattr(channel, "GlooChannel", Connecting)
    cpu, ends, got = torch.device("cpu"), [], []
    own = open_group(
        "gloo",
        cpu,
        [("127.0.0.1", 1, lambda to: ends.append(open_receiver(to, 0, cpu)))],
        timeout=10.0,
    )
    client = SimpleNamespace(url="http://127.0.0.1:1")
    servers = SimpleNamespace(
        clients=[client], timeout=10.0, each_here=lambda receive: [receive(client)]
    )
    message = own.staging(3).copy_(torch.tensor([1, 2, 3]))
    send_messages(own, iter([message]), servers, lambda _: got.append(ends[0].receive(3).tolist()))
    assert got == [[1, 2, 3]] and not own.broken


@pytest.mark.parametrize("room", [600, 10_000])  # bytes of a message
def test_tensors_of_any_size_unpack_as_packed(room):
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.int8, torch.float64]
    sent = {f"{n}": torch.arange(n * 7 + 3).to(dtype) for n, dtype in enumerate(dtypes)}
    transfer = FullWeights(None, "memory")
    transfer._room, transfer._channel = room, MemoryChannel(torch.zeros(room, dtype=torch.uint8))
    received = {
        spec.name: tensor.clone()
        for specs, message in transfer._pack(iter(sent.items()))
        for spec, tensor in zip(specs, unpack(message, specs), strict=True)
    }
    assert received.keys() == sent.keys()
    assert all(
        received[name].dtype == tensor.dtype and received[name].equal(tensor)
        for name, tensor in sent.items()
    )


def test_message_example_is_true():
    tensors = [
        ParameterSpec(name="a", shape=[3], dtype="bfloat16"),
        ParameterSpec(name="b", shape=[8], dtype="float32"),
    ]
    assert message_layout(tensors) == ([0, 16], 48)


def test_rectangle_examples_are_true():
    shape = (2, 2, 4)
    place = torch.empty(shape, device="meta")[:, 0, 1:3]
    (rectangle,) = rectangles(torch.zeros(2, 2).bfloat16(), Part.of(place), shape)
    assert rectangle.values.shape == (2, 2)
    assert (rectangle.row, rectangle.row_step) == (0, 2)
    assert (rectangle.column, rectangle.column_step) == (1, 1)

    run = Part(offset=2, size=[9], stride=[1])
    end, whole, beginning = rectangles(torch.zeros(9).bfloat16(), run, (3, 4))
    assert (end.row, end.column, *end.values.shape) == (0, 2, 1, 2)
    assert (whole.row, whole.column, *whole.values.shape) == (1, 0, 1, 4)
    assert (beginning.row, beginning.column, *beginning.values.shape) == (2, 0, 1, 3)


def test_transposed_view_is_saved_contiguously():
    model = torch.nn.Linear(3, 5, bias=False)
    memory = torch.arange(15.0).view(3, 5)
    replace(model, {"weight": memory.t()})
    saved = model.state_dict()["weight"]
    assert saved.is_contiguous() and saved.equal(memory.t())
    assert model.weight.data_ptr() == memory.data_ptr()
