"""Places of parameters in another model's memory, found by watching its loader: small loaders with
known answers."""

import pytest
import torch

from trl_atropos.protocol import CheckpointTensor, ParameterSpec
from trl_atropos.server import shared_arena
from trl_atropos.server.extension import WorkerExtension
from trl_atropos.server.layout import (
    CopyTracer,
    memory_of,
    numbers_of,
    places_of,
    trace,
    unique_storages,
    unnamed,
)
from trl_atropos.server.shared_arena import ALIGNMENT, move_to_arena
from trl_atropos.server.weight_receiver import unloaded
from trl_atropos.tensors.rectangles import Part
from trl_atropos.tensors.shared_memory import allocate_arena

CPU = torch.device("cpu")


class Model(torch.nn.Module):
    """A loader that puts one checkpoint weight into `self.weight`, which can be shared, the way
    `write` says."""

    def __init__(self, weight: torch.Tensor, write):
        super().__init__()
        arena = allocate_arena(weight.nbytes).view(weight.dtype).view(weight.shape)
        self.weight = torch.nn.Parameter(arena.copy_(weight), requires_grad=False)
        self.write = write

    def load_weights(self, weights):
        for _, tensor in weights:
            self.write(self.weight.data, tensor)


class Experts(Model):
    """A loader that gets gate and up of every expert by name, as "1.up"."""

    def load_weights(self, weights):
        for name, tensor in weights:
            expert, part = name.split(".")
            self.write(self.weight.data[int(expert)], tensor, part)


def place(
    model: torch.nn.Module,
    *shape: int,
    dtype: str = "float32",
    pieces: list[CheckpointTensor] | None = None,
):
    spec = ParameterSpec(name="w", shape=list(shape), dtype=dtype, pieces=pieces)
    views, refused = trace(model, [spec], CPU)
    return views.get("w"), refused.get("w")


def view_of(model: Model, *shape: int) -> torch.Tensor:
    """Loads a numbered weight for real, and reads it back through the traced view."""
    found, reason = place(model, *shape)
    assert reason is None, reason
    value = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    model.load_weights([("w", value)])
    read = model.weight.data.flatten().as_strided(found.size, found.stride, found.offset)
    assert torch.equal(read, value)
    return read


def test_slice_of_fused_weight_is_view():
    view_of(Model(torch.zeros(12, 4), lambda memory, w: memory[4:8].copy_(w)), 4, 4)


def test_padded_vocabulary_is_view_of_first_rows():
    view_of(
        Model(torch.zeros(64, 4), lambda memory, w: (memory[:50].copy_(w), memory[50:].fill_(0))),
        50,
        4,
    )


def test_transposed_weight_is_view():
    view_of(Model(torch.zeros(6, 4), lambda memory, w: memory.copy_(w.t())), 4, 6)


def test_adjacent_chunks_are_one_view():
    # fused and transposed: three chunks of columns become three blocks of rows
    def write(memory, weight):
        for index, chunk in enumerate(weight.chunk(3, dim=1)):
            memory[index * 4 : index * 4 + 4].copy_(chunk.t())

    view_of(Model(torch.zeros(12, 5), write), 5, 12)


def test_chunks_in_another_order_are_refused():
    def write(memory, weight):
        for index, chunk in enumerate(reversed(weight.chunk(3))):
            memory[index * 2 : index * 2 + 2].copy_(chunk)

    assert "another order" in place(Model(torch.zeros(6, 4), write), 6, 4)[1]


def test_weight_kept_as_shard_is_refused():
    assert (
        "a part" in place(Model(torch.zeros(2, 4), lambda memory, w: memory.copy_(w[2:])), 4, 4)[1]
    )


def test_transformed_weight_is_refused():
    model = Model(torch.zeros(4, 4), lambda memory, w: memory.copy_(-w.exp()))
    assert "transforms" in place(model, 4, 4)[1]


def test_cast_weight_is_refused():
    model = Model(torch.zeros(4, 4, dtype=torch.bfloat16), lambda memory, w: memory.copy_(w))
    assert "bfloat16" in place(model, 4, 4)[1]


def test_ignored_weight_is_refused():
    assert "does not keep" in place(Model(torch.zeros(4, 4), lambda memory, w: None), 4, 4)[1]


@pytest.mark.parametrize("error", [KeyError("w"), ValueError("tied")])
def test_loader_error_becomes_reason(error):
    def write(memory, weight):
        raise error

    assert type(error).__name__ in place(Model(torch.zeros(2), write), 2)[1]


def test_tracing_writes_nothing():
    model = Model(torch.ones(4, 4), lambda memory, w: (memory.fill_(0), memory.copy_(w)))
    place(model, 4, 4)
    assert torch.equal(model.weight.data, torch.ones(4, 4))


def expert_pieces(experts: int, rows: int, columns: int) -> list[CheckpointTensor]:
    """Gate and up of every expert, as one parameter of transformers has them: (experts, 2 x rows,
    columns)."""
    return [
        CheckpointTensor(
            name=f"{expert}.{part}",
            size=[rows, columns],
            stride=[columns, 1],
            offset=(2 * expert + (part == "up")) * rows * columns,
        )
        for expert in range(experts)
        for part in ("gate", "up")
    ]


def place_experts(write) -> tuple:
    """Three experts with two rows and five columns per part, in memory that is padded to eight
    columns."""
    return place(Experts(torch.zeros(3, 4, 8), write), 3, 4, 5, pieces=expert_pieces(3, 2, 5))


def test_separate_experts_are_one_view():
    def write(memory, weight, part):
        memory[{"gate": slice(0, 2), "up": slice(2, 4)}[part], :5].copy_(weight)

    found, reason = place_experts(write)
    assert reason is None
    assert (found.offset, found.size, found.stride) == (0, [3, 4, 5], [32, 8, 1])


def test_experts_with_swapped_halves_are_refused():
    def write(memory, weight, part):
        memory[{"up": slice(0, 2), "gate": slice(2, 4)}[part], :5].copy_(weight)

    assert "another order" in place_experts(write)[1]


def test_experts_lacking_one_half_are_refused():
    def write(memory, weight, part):
        if part == "gate":
            memory[:2, :5].copy_(weight)

    assert "a part" in place_experts(write)[1]


def test_parameter_outside_checkpoint_is_refused():
    model = Model(torch.zeros(4, 4), lambda memory, w: memory.copy_(w))
    assert "computes" in place(model, 4, 4, pieces=[])[1]


def write_into_a_list(memory, weight):
    torch._foreach_mul_([memory], 2.0)
    memory.copy_(weight)


REPEATABLE = {
    "slices": lambda memory, w: (memory[1:].copy_(w[:3]), memory[:1].copy_(w.view(4, 4)[3:])),
    "transposed": lambda memory, w: memory.copy_(w.t()),
    "converted by the copy": lambda memory, w: memory.copy_(w),
    "padded": lambda memory, w: (memory.fill_(0), memory[:2].copy_(w.narrow(0, 1, 2))),
    "left out": lambda memory, w: w.chunk(2),
}
NOT_REPEATABLE = {
    "computed": lambda memory, w: memory.copy_(w + 1),
    "through other memory": lambda memory, w: memory.copy_(torch.empty(4, 4).copy_(w)),
    "kept elsewhere": lambda memory, w: w.clone(),
    "looked at": lambda memory, w: memory.copy_(w) if w[0, 0].item() >= 0 else None,
    "in place": lambda memory, w: memory.copy_(w).neg_(),
    "into out": lambda memory, w: torch.exp(w, out=memory),
    "into a list": write_into_a_list,
}


@pytest.mark.parametrize("kind", [*REPEATABLE, *NOT_REPEATABLE])
def test_copies_repeat_only_where_loader_just_copies(kind):
    model = Model(torch.ones(4, 4), (REPEATABLE | NOT_REPEATABLE)[kind])
    message = torch.arange(
        16.0, dtype=torch.float64 if "converted" in kind else torch.float32
    ).view(4, 4)
    tracer = CopyTracer(message, memory_of(model), swallows=False)
    with torch.no_grad(), tracer:
        model.load_weights([("w", message)])
    assert bool(tracer.others) == (kind in NOT_REPEATABLE), tracer.others
    if kind in REPEATABLE:
        message += 100
        for target, source in tracer.copies:
            target.copy_(source)
        repeated = model.weight.clone()
        model.load_weights([("w", message)])
        assert torch.equal(repeated, model.weight)
        assert kind == "left out" or repeated.max() > 100


def test_unshareable_memory_is_refused():
    model = Model(torch.zeros(4, 4), lambda memory, w: memory.copy_(w))
    # as if it had been packed
    model.weight = torch.nn.Parameter(torch.zeros(4, 4), requires_grad=False)
    assert "cannot be shared" in place(model, 4, 4)[1]
    assert unique_storages(model) == {}


def test_loader_making_new_parameter_is_refused():
    model = Model(torch.ones(4), lambda memory, w: None)

    def load_weights(weights):
        for _, tensor in weights:
            model.weight = torch.nn.Parameter(tensor, requires_grad=False)

    model.load_weights = load_weights
    before = model.weight
    assert "new parameter" in place(model, 4)[1]
    assert model.weight is before
    assert torch.equal(before, torch.ones(4))


def test_tracing_writes_no_buffer():
    class WithBuffer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("bias", torch.ones(4))

        def load_weights(self, weights):
            for _, tensor in weights:
                self.bias.copy_(tensor)

    model = WithBuffer()
    assert "cannot be shared" in place(model, 4)[1]
    assert torch.equal(model.bias, torch.ones(4))


def test_views_of_parameter_move_to_arena_with_it():
    model = torch.nn.Module()
    model.whole = torch.nn.Parameter(torch.zeros(4, 1, 3), requires_grad=False)
    model.other = torch.nn.Parameter(torch.zeros(5), requires_grad=False)
    model.register_buffer("view", model.whole.view(4, 3).t(), persistent=False)
    model.register_buffer("own", torch.ones(2))
    move_to_arena(model)
    model.whole.copy_(torch.arange(12.0).view(4, 1, 3))
    assert torch.equal(model.view, torch.arange(12.0).view(4, 3).t())
    assert torch.equal(model.own, torch.ones(2)) and torch.equal(model.other, torch.zeros(5))
    assert len(unique_storages(model)) == 1
    assert all(parameter.data_ptr() % ALIGNMENT == 0 for parameter in model.parameters())


def test_parameter_loads_under_any_of_its_names():
    model = torch.nn.Module()
    model.one, model.left = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False)
    model.again = model.one
    assert unloaded(model, {"again.weight", "again.bias", "a_buffer"}) == ["left.weight"]
    assert unloaded(model, {"one.weight", "left.weight"}) == ["again.bias", "one.bias"]


def test_unfilled_parameter_is_named():
    model = torch.nn.Module()
    model.fused = torch.nn.Parameter(torch.zeros(6), requires_grad=False)
    model.own = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
    model.empty = torch.nn.Parameter(torch.zeros(0), requires_grad=False)
    parts = [[(model.fused.data[4:], Part.whole([2]))]]
    assert list(unnamed(model, parts)) == ["the server's own own"]


def test_places_tell_replacement_and_numbers_tell_eps():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2, eps=1e-3))
    before = places_of(model)
    with torch.no_grad():
        model[0].weight.add_(1)
    assert places_of(model) == before
    model[0].weight = torch.nn.Parameter(model[0].weight.detach().clone())
    changed = {name for name, place in places_of(model).items() if place != before[name]}
    assert changed == {"0.weight"}
    assert numbers_of(model) == {"1.eps": 1e-3}


def test_incomparable_worker_tells_why(monkeypatch):
    monkeypatch.setattr(shared_arena, "packed_layers", ["model.layers.0.mlp"])
    worker, spec = WorkerExtension(), ParameterSpec.of("w", [2, 3], torch.float32)
    told = worker.trl_atropos_trace("weights", [spec.model_dump()], None)
    assert told["parts"] == [[]] and "the first is model.layers.0.mlp" in told["refused"]["w"]
    assert worker.trl_atropos_fingerprints("weights", None) == []
