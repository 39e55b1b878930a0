"""Places of parameters in another model's memory, found by watching its loader: small loaders with known answers."""

import pytest
import torch

from trl_atropos.protocol import ParameterSpec
from trl_atropos.server.layout import trace

CPU = torch.device("cpu")


class Model(torch.nn.Module):
    """A loader that puts one checkpoint weight into `self.weight` the way `write` says."""

    def __init__(self, weight: torch.Tensor, write):
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.write = write

    def load_weights(self, weights):
        for _, tensor in weights:
            self.write(self.weight.data, tensor)


def place(model: Model, *shape: int, dtype: str = "float32"):
    views, refused = trace(model, [ParameterSpec(name="w", shape=list(shape), dtype=dtype)], CPU)
    return views.get("w"), refused.get("w")


def view_of(model: Model, *shape: int) -> torch.Tensor:
    """Loads a numbered weight for real, and reads it back through the traced view."""
    found, reason = place(model, *shape)
    assert reason is None, reason
    value = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    model.load_weights([("w", value)])
    flat = model.weight.data.flatten() if model.weight.is_contiguous() else model.weight.data
    read = flat.as_strided(found.size, found.stride, found.offset)
    assert torch.equal(read, value)
    return read


def test_a_slice_of_a_fused_weight_is_a_view():
    view_of(Model(torch.zeros(12, 4), lambda memory, w: memory[4:8].copy_(w)), 4, 4)


def test_a_padded_vocabulary_is_a_view_of_its_first_rows():
    view_of(Model(torch.zeros(64, 4), lambda memory, w: (memory[:50].copy_(w), memory[50:].fill_(0))), 50, 4)


def test_a_transposed_weight_is_a_view_with_swapped_strides():
    view_of(Model(torch.zeros(6, 4), lambda memory, w: memory.copy_(w.t())), 4, 6)


def test_chunks_that_lie_side_by_side_are_one_view():
    def write(memory, weight):  # fused and transposed: three chunks of columns become three blocks of rows
        for index, chunk in enumerate(weight.chunk(3, dim=1)):
            memory[index * 4 : index * 4 + 4].copy_(chunk.t())

    view_of(Model(torch.zeros(12, 5), write), 5, 12)


def test_chunks_in_another_order_are_refused():
    def write(memory, weight):
        for index, chunk in enumerate(reversed(weight.chunk(3))):
            memory[index * 2 : index * 2 + 2].copy_(chunk)

    assert "another order" in place(Model(torch.zeros(6, 4), write), 6, 4)[1]


def test_a_weight_of_which_only_a_shard_is_kept_is_refused():
    assert "a part" in place(Model(torch.zeros(2, 4), lambda memory, w: memory.copy_(w[2:])), 4, 4)[1]


def test_a_weight_that_is_computed_from_is_refused():
    model = Model(torch.zeros(4, 4), lambda memory, w: memory.copy_(-w.exp()))
    assert "transforms" in place(model, 4, 4)[1]


def test_a_cast_weight_is_refused():
    model = Model(torch.zeros(4, 4, dtype=torch.bfloat16), lambda memory, w: memory.copy_(w))
    assert "bfloat16" in place(model, 4, 4)[1]


def test_a_weight_the_loader_ignores_is_refused():
    assert "does not keep" in place(Model(torch.zeros(4, 4), lambda memory, w: None), 4, 4)[1]


@pytest.mark.parametrize("error", [KeyError("w"), ValueError("tied")])
def test_a_loader_that_raises_is_a_reason(error):
    def write(memory, weight):
        raise error

    assert type(error).__name__ in place(Model(torch.zeros(2), write), 2)[1]


def test_tracing_writes_nothing():
    model = Model(torch.ones(4, 4), lambda memory, w: (memory.fill_(0), memory.copy_(w)))
    place(model, 4, 4)
    assert torch.equal(model.weight.data, torch.ones(4, 4))
