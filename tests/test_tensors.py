"""Memory that two processes share: what is opened is what was meant, and nothing is written beyond it."""

import os

import pytest
import torch

from trl_atropos.tensors.channel import ChannelError, MemoryChannel
from trl_atropos.tensors.shared_memory import allocate_arena, export_storage, open_storage


def test_an_arena_is_opened_as_the_same_memory():
    arena = allocate_arena(512)
    opened = open_storage(export_storage(arena.untyped_storage()))
    arena[7] = 42
    assert opened.numel() == 512 and opened[7] == 42


@pytest.mark.parametrize(("name", "size"), [("trl_atropos", 100), ("another", 512)])
def test_memory_of_another_size_or_of_somebody_else_is_refused(name, size):
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


def test_a_message_that_does_not_fit_into_the_shared_buffer_is_refused():
    channel = MemoryChannel(torch.zeros(8, dtype=torch.uint8))
    assert channel.staging(8).numel() == 8
    with pytest.raises(ChannelError, match="9 bytes do not fit into the shared buffer of 8"):
        channel.receive(9)
