"""Memory that two processes share, and messages: what is opened is what was meant, what is packed
is unpacked."""

import os
from types import SimpleNamespace

import pytest
import torch

from trl_atropos.errors import AttachError
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
from trl_atropos.tensors.fingerprint import Part, rectangles
from trl_atropos.tensors.shared_memory import allocate_arena, export_storage, open_storage
from trl_atropos.weights.colocate import replace
from trl_atropos.weights.full_weights import FullWeights
from trl_atropos.weights.transfer import open_channel, send_messages


def test_opened_arena_is_same_memory():
    arena = allocate_arena(512)
    opened = open_storage(export_storage(arena.untyped_storage()))
    arena[7] = 42
    assert opened.numel() == 512 and opened[7] == 42


@pytest.mark.parametrize(("name", "size"), [("trl_atropos", 100), ("another", 512)])
def test_memory_of_other_size_or_owner_is_refused(name, size):
    handle = export_storage(allocate_arena(512).untyped_storage())
    descriptor = os.memfd_create(name) if name == "another" else handle["descriptor"]
    try:
        if name == "another":
            os.ftruncate(descriptor, size)
        with pytest.raises(ValueError, match="is not the server's weight memory"):
            open_storage(handle | {"descriptor": descriptor, "num_bytes": size})
    finally:
        if name == "another":
            os.close(descriptor)


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
