"""Fingerprints: what they see, that parts add up, and that no fault in a publish to a real server
gets past them."""

import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig

from tests.server_process import Server, running_server
from tests.weights import trainers
from tests.weights.live import (
    CUDA,
    GPU_FLAGS,
    Weights,
    act_as,
    assert_proven,
    disturb,
    publish,
    restore,
    snapshot,
)
from trl_atropos import AtroposGRPOTrainer
from trl_atropos.errors import FingerprintError, ProbeError
from trl_atropos.protocol import FingerprintsReply, ParameterSpec
from trl_atropos.server_client import ServerClient, Servers
from trl_atropos.tensors import fingerprint as fingerprints
from trl_atropos.tensors.channel import unpack
from trl_atropos.tensors.fingerprint import Assembly, Fingerprints, fingerprint, joined
from trl_atropos.tensors.rectangles import Part
from trl_atropos.weights import colocate, gather
from trl_atropos.weights.fingerprints import OwnFingerprints, Proof
from trl_atropos.weights.probe import Probe
from trl_atropos.weights.tolerance import Tolerance
from trl_atropos.weights.transfer import Fingerprinted

NUMBER = 250  # publishes that must be found right, in each of 8 ways
SHAPES = [(5, 7), (3, 4, 5), (11,), (), (6, 1), (1, 6), (130, 1030)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float64]
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


def sum_of(parts: list[tuple[torch.Tensor, torch.Tensor]], shape: tuple[int, ...]) -> int:
    """Of (values, the view of a parameter on "meta" where they stand)."""
    return joined(
        Fingerprints([(values, Part.of(place), shape, 0) for values, place in parts], 1).compute()
    )[0]


def in_python(values: torch.Tensor) -> int:
    """By the formula of the module's docstring, element by element, in Python's unbounded
    integers."""
    width = values.shape[-1] if values.dim() else 1
    size = values.element_size()
    per_element = max(1, size // 2)  # entries
    bits = values.flatten().view(INTEGERS[size]).tolist()
    entries = [
        (one >> 16 * place) % 2**16 if size > 1 else one % 2**8
        for one in bits
        for place in range(per_element)
    ]
    half = 2 ** (8 * min(size, 2) - 1)
    signed = [one - 2 * half if one >= half else one for one in entries]
    columns = width * per_element
    found = []
    for of_row, of_column in zip(fingerprints.ROW_SALTS, fingerprints.COLUMN_SALTS):
        by_row = fingerprints._weights(0, 1, -(-len(signed) // columns), of_row).tolist()
        by_column = fingerprints._weights(0, 1, columns, of_column).tolist()
        terms = (
            (one + 2**15 + 1) * by_row[i // columns] * by_column[i % columns]
            for i, one in enumerate(signed)
        )
        found.append(sum(terms) % (2**31 - 1))
    return found[0] * 2**32 + found[1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_fingerprint_equals_its_formula(shape, dtype):
    values = torch.randn(shape).to(dtype)
    assert joined(fingerprint(values)[None]) == [in_python(values)]


def test_parts_add_up_to_whole_in_any_cut():
    whole, place = torch.randn(6, 10), torch.empty(6, 10, device="meta")
    expected = joined(fingerprint(whole)[None])[0]

    def cut(*views: Callable[[torch.Tensor], torch.Tensor]) -> int:
        return sum_of([(view(whole).clone(), view(place)) for view in views], (6, 10))

    assert cut(lambda t: t[:2], lambda t: t[2:]) == expected
    assert cut(lambda t: t[:, :3], lambda t: t[:, 3:]) == expected
    assert cut(lambda t: t.t()) == expected  # as GPT-2's linear layers are kept
    assert cut(lambda t: t.view(6, 2, 5).transpose(0, 1)) == expected
    assert cut(lambda t: t[::2], lambda t: t[1::2]) == expected
    assert cut(lambda t: t.view(2, 3, 10)[0], lambda t: t.view(2, 3, 10)[1]) == expected
    # as ZeRO-3 has them, without heed to rows
    for first, second in itertools.combinations(range(0, 61, 7), 2):
        pieces = ((0, first), (first, second), (second, 60))
        assert (
            cut(*(lambda t, begin=begin, end=end: t.view(-1)[begin:end] for begin, end in pieces))
            == expected
        )


@pytest.mark.parametrize(
    ("where", "new"),
    {
        "one unit in the last place": ((3, 4), lambda t: t.view(torch.int16) + 1),
        "two elements in each other's place": (
            (2, slice(5, 7)),
            lambda t: t.view(torch.int16).flip(0),
        ),
        "two rows in each other's place": (slice(3, 5), lambda t: t.view(torch.int16).flip(0)),
        "two columns in each other's place": (
            (slice(None), slice(3, 5)),
            lambda t: t.view(torch.int16).flip(1),
        ),
        "another sign": ((7, 7), lambda t: (-t).view(torch.int16)),
        "minus zero": ((0, 0), lambda t: (-t).view(torch.int16)),
        "half of all": (slice(None), lambda t: (t / 2).view(torch.int16)),
    }.values(),
)
def test_any_change_is_seen(where, new):
    values = torch.randn(8, 9).bfloat16()
    values[0, 0] = 0
    changed = values.clone()
    changed.view(torch.int16)[where] = new(values[where])
    assert not torch.equal(changed.view(torch.int16), values.view(torch.int16))
    assert not torch.equal(fingerprint(changed), fingerprint(values))


def integers(
    dtype: torch.dtype, rows: int, columns: int, generator: torch.Generator
) -> torch.Tensor:
    """Random bits of a matrix in a dtype of floats, as integers of the same width."""
    size = dtype.itemsize
    return (
        torch.randint(256, (rows, columns * size), generator=generator)
        .to(torch.uint8)
        .view(INTEGERS[size])
    )


def sign(bits: torch.Tensor) -> torch.Tensor:
    return bits ^ torch.iinfo(bits.dtype).min


# What is done to some elements of a matrix, as integers, with a generator of random numbers.
CHANGES = {
    "the lowest bit of an element": lambda bits, _: bits[3:4, 5:6].bitwise_xor_(1),
    "the sign of an element": lambda bits, _: bits[3:4, 5:6].copy_(sign(bits[3:4, 5:6])),
    "the signs of 2 elements": lambda bits, _: bits[3:4, 5:7].copy_(sign(bits[3:4, 5:7])),
    "the signs of 2 rows": lambda bits, _: bits[3:5].copy_(sign(bits[3:5])),
    "all signs": lambda bits, _: bits.copy_(sign(bits)),
    "signs here and there": lambda bits, g: bits.copy_(
        torch.where(torch.rand(bits.shape, generator=g) < 0.5, sign(bits), bits)
    ),
    "2 elements of a row change places": lambda bits, _: bits[3, 5:7].copy_(bits[3, 5:7].flip(0)),
    "2 elements of a column change places": lambda bits, _: bits[3:5, 5].copy_(
        bits[3:5, 5].flip(0)
    ),
    "4 elements change places crosswise": lambda bits, _: bits[3:5, 5:7].copy_(
        bits[3:5, 5:7].flip(0, 1)
    ),
    "2 rows change places": lambda bits, _: bits[3:5].copy_(bits[3:5].flip(0)),
    "2 columns change places": lambda bits, _: bits[:, 3:5].copy_(bits[:, 3:5].flip(1)),
    "all rows are in another order": lambda bits, g: bits.copy_(
        bits[torch.randperm(len(bits), generator=g)]
    ),
    "all elements are in another order": lambda bits, g: bits.copy_(
        bits.flatten()[torch.randperm(bits.numel(), generator=g)].view_as(bits)
    ),
    "the matrix is transposed": lambda bits, _: bits.copy_(bits.t().clone()),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("change", CHANGES)
def test_random_change_is_seen_in_every_width(change, dtype):
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        bits = integers(dtype, 8, 8, generator)
        changed = bits.clone()
        CHANGES[change](changed, generator)
        same = torch.equal(changed, bits)
        assert torch.equal(fingerprint(changed.view(dtype)), fingerprint(bits.view(dtype))) == same


def weights_of_both_sums(salts: tuple[int, int], count: int) -> list[torch.Tensor]:
    return [fingerprints._weights(0, 1, count, salt) for salt in salts]


@pytest.mark.parametrize(
    "salts", [fingerprints.ROW_SALTS, fingerprints.COLUMN_SALTS], ids=["rows", "columns"]
)
def test_million_rows_or_columns_share_no_weight(salts):
    for weights in weights_of_both_sums(salts, 1 << 20):
        assert weights.min() >= 1 and weights.max() <= 2**30
        assert len(weights.unique()) == len(weights)


@pytest.mark.parametrize(
    ("salt", "multipliers"), [(salt, (0x21F0AAAD, 0x135A2D97)) for salt in fingerprints.ROW_SALTS]
)
def test_position_weights_are_invertible(salt, multipliers):
    modulus = 2**30
    first, second = (pow(multiplier, -1, modulus) for multiplier in multipliers)
    positions = torch.randint(modulus, (1 << 16,), generator=torch.Generator().manual_seed(0))
    weights = torch.cat(
        [fingerprints._weights(one, 1, 1, salt) for one in positions[:2000].tolist()]
    )
    x = weights - 1
    x = x ^ x >> 15
    x = x * second % modulus
    x = x ^ x >> 14 ^ x >> 28
    x = x * first % modulus
    x = x ^ x >> 15
    assert torch.equal((x - salt) % modulus, positions[:2000])


def test_4_byte_change_is_seen_in_million_columns():
    """Its halves change by less than 2**16. Both sums would have to miss that, for which the two
    ratios of the halves' weights would have to be the same."""
    first, second = (
        weights.view(-1, 2) for weights in weights_of_both_sums(fingerprints.COLUMN_SALTS, 1 << 21)
    )
    determinants = (first[:, 0] * second[:, 1] % fingerprints.P) - (
        first[:, 1] * second[:, 0] % fingerprints.P
    )
    assert (determinants != 0).all()


@pytest.mark.parametrize(("one", "other"), [(6001, 56237), (0, 151_935), (12_345, 128_255)])
def test_swapped_rows_of_large_vocabulary_are_seen(one, other):
    """The first two had one weight when weights were hashes of 32 bits."""
    values = torch.randn(151_936, 4).bfloat16()
    changed = values.clone()
    changed[[one, other]] = values[[other, one]]
    assert not torch.equal(fingerprint(changed), fingerprint(values))


def test_missing_or_doubled_zero_elements_are_seen():
    whole, place = torch.zeros(4, 4), torch.empty(4, 4, device="meta")
    expected = joined(fingerprint(whole)[None])[0]
    assert sum_of([(whole[:3], place[:3])], (4, 4)) != expected
    assert sum_of([(whole, place), (whole[:1], place[:1])], (4, 4)) != expected


def test_worker_parts_add_up_and_copies_must_agree():
    whole, place = torch.randn(4, 6), torch.empty(4, 6, device="meta")
    shapes = {"split": (4, 6), "everywhere": (4, 6), "lost": (4, 6)}
    halves = [[Part.of(place[:, :3])], [Part.of(place[:, 3:])]]
    both = [[half, [Part.of(place)], [Part.of(place[:2])]] for half in halves]
    assembly = Assembly(shapes, both)
    assert list(assembly.refused) == ["lost"] and "12 of its 24" in assembly.refused["lost"]
    expected = joined(fingerprint(whole)[None])[0]
    left, right = (
        sum_of([(whole[:, some], place[:, some])], (4, 6)) for some in (slice(3), slice(3, 6))
    )
    assert assembly.sum([[left, expected, 0], [right, expected, 0]]) == [expected, expected, None]
    assert assembly.sum([[left, expected, 0], [right, expected + 1, 0]]) == [expected, None, None]
    # sums do not say whose they are
    assert assembly.sum([[right, expected, 0], [left, expected, 0]])[0] == expected


KERNEL = """
import sys, torch
from trl_atropos.tensors import fingerprint as f

def by_kernel(prints):
    sums = torch.zeros(prints.count, 2, dtype=torch.int64)
    for kind, table in f._tables_of(prints.rectangles, prints.device).items():
        f._add_parts[(len(table),)](table, sums, *kind)
    return (sums % f.P).tolist()

for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float64):
    for shape in [(5, 7), (3, 4, 5), (11,), (), (6, 1), (66, 1030), (3, 2064), (3, 4096)]:
        values = torch.randn(shape).to(dtype)
        whole = f.Part.whole(shape)
        numbers = [1] if len(values.flatten()) > 10_000 else [1, 1, 0]  # the interpreter is slow
        prints = f.Fingerprints([(values, whole, shape, number) for number in numbers], 2)
        assert by_kernel(prints) == prints.compute().tolist(), (dtype, shape)
lowest = torch.full((70, 48), -(2**15), dtype=torch.int16)  # the largest sums that there can be
for values in (lowest, -1 - lowest):
    prints = f.Fingerprints([(values, f.Part.whole(values.shape), values.shape, 0)], 1)
    assert by_kernel(prints) == prints.compute().tolist()
values, place = torch.randn(70, 100), torch.empty(70, 100, device="meta")
transposed = f.Fingerprints([(values.t().contiguous(), f.Part.of(place.t()), (70, 100), 0)], 1)
assert by_kernel(transposed) == [f.fingerprint(values).tolist()]
"""


@pytest.mark.slow
def test_gpu_kernel_computes_same_in_interpreter():
    """Triton's interpreter runs it on the CPU."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", KERNEL], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (4096, 1024), (3, 151_936), (151_936, 8)])
def test_gpu_computes_same_as_cpu(shape, dtype):
    bits = integers(dtype, 1, max(1, math.prod(shape)), torch.Generator().manual_seed(0)).view(
        shape
    )
    values, place = bits.view(dtype), torch.empty(shape, device="meta")
    expected = fingerprint(values).tolist()
    on_gpu = values.cuda()
    assert fingerprint(on_gpu).tolist() == expected
    if len(shape) == 2:  # neither contiguous nor whole
        turned, cut = (
            torch.cat([on_gpu.t().contiguous()] * 2, dim=1)[:, : shape[0]],
            shape[1] // 2,
        )
        pieces = [(turned[:cut], place.t()[:cut]), (turned[cut:], place.t()[cut:])]
        assert sum_of(pieces, shape) == joined(torch.tensor([expected]))[0]


# ------------------------------------------------------------------------ what the trainer compares

NAMES = ("first", "second", "third")


class Small(torch.nn.Module):
    """Three parameters, the largest in the middle."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in zip(NAMES, [(3, 4), (5, 6), (7,)]):
            setattr(self, name, torch.nn.Parameter(torch.randn(shape, generator=generator)))


def one_by_one(model: torch.nn.Module, *dtypes: torch.dtype) -> list[int]:
    values = [
        parameter.detach().to(dtype)
        for parameter, dtype in zip(model.parameters(), dtypes, strict=True)
    ]
    return joined(torch.stack([fingerprint(value) for value in values]))


@pytest.mark.parametrize(
    "dtypes",
    [(torch.float32,) * 3, (torch.bfloat16,) * 3, (torch.bfloat16, torch.float32, torch.bfloat16)],
    ids=["as they are", "converted", "some converted"],
)
def test_trainer_fingerprints_follow_moved_weights(dtypes):
    model, accelerator = Small(), Accelerator(cpu=True)
    named = dict(model.named_parameters())
    own = OwnFingerprints(
        lambda: [gather.Entry(name, named[name], dtype) for name, dtype in zip(NAMES, dtypes)],
        lambda: [],
        accelerator,
        here=True,
    )
    assert joined(own()) == one_by_one(model, *dtypes)
    model.second.data[4, 5] += 1  # as a step does
    assert joined(own()) == one_by_one(model, *dtypes)
    moved = model.first.data  # which something else may still have
    model.first.data = moved + 1
    moved.zero_()
    assert joined(own()) == one_by_one(model, *dtypes)
    named["third"].data = torch.randn(70)  # larger than what there was memory for
    assert joined(own()) == one_by_one(model, *dtypes)


def test_rank_without_servers_has_no_fingerprints():
    def entries() -> list[gather.Entry]:
        raise AssertionError("nobody needs them")

    assert OwnFingerprints(entries, lambda: [], Accelerator(cpu=True), here=False)().numel() == 0


class Memory(ServerClient):
    """The weights of a server, in this process."""

    def __init__(self, url: str, timeout: float, token: str | None = None):
        super().__init__(url, timeout, "")
        self.weights, self.policy_version = Small(), 5
        self.refused: dict[str, str] = {}
        self.traced = 0

    def trace(self, of: str, specs: list[ParameterSpec]) -> dict[str, str]:
        self.traced += 1
        return self.refused

    def fingerprints(self, of: str) -> FingerprintsReply:
        sums = one_by_one(self.weights, *[torch.float32] * 3)
        known = [None if name in self.refused else value for name, value in zip(NAMES, sums)]
        return FingerprintsReply(policy_version=self.policy_version, fingerprints=known)


class Compared:
    """A trainer and two servers that have its weights."""

    def __init__(self, **subject):
        self.trainer, self.computed = Small(), 0
        servers = Servers(["http://one", "http://two"], timeout=10.0, client=Memory)
        self.one, self.two = servers.clients = [Memory(url, 10.0) for url in servers.urls]
        specs = [
            ParameterSpec.of(name, one.shape, one.dtype)
            for name, one in self.trainer.named_parameters()
        ]
        self.proof = Proof(servers, [Fingerprinted("weights", specs, self._compute, **subject)])

    def _compute(self) -> torch.Tensor:
        self.computed += 1
        return torch.stack(
            [fingerprint(parameter.detach()) for parameter in self.trainer.parameters()]
        )

    def publish(self, version: int = 5) -> None:
        self.proof.begin(version)
        self.proof.judge()


def test_servers_with_equal_weights_are_proven():
    compared = Compared()
    assert not compared.proof.complete  # nothing has been compared
    for _ in range(2):
        compared.publish()
    assert compared.proof.complete and not compared.proof.begun
    assert (compared.computed, compared.one.traced, compared.two.traced) == (2, 1, 1)


def test_differing_server_and_parameters_are_named():
    compared = Compared()
    compared.publish()
    for name in ("first", "third"):
        getattr(compared.two.weights, name).data.view(-1)[2] += 1
    with pytest.raises(
        FingerprintError, match=r"version 5, 2 of 3 parameters of .* http://two .*: first, third\."
    ):
        compared.publish()
    compared.one.weights.second.data[0, 0] += 1
    with pytest.raises(FingerprintError, match=r"1 of 3 parameters of .* http://one .*: second\."):
        compared.publish()


@pytest.mark.parametrize("version", [4, 6])
def test_server_of_other_version_is_named(version):
    compared = Compared()
    compared.two.policy_version = version
    told = (
        f"The server at http://two samples from policy version {version} but the trainer "
        "published 5"
    )
    with pytest.raises(FingerprintError, match=told):
        compared.publish()


def test_incomparable_weights_leave_proof_incomplete(caplog):
    compared = Compared()
    compared.two.refused = {"second": "it is computed"}
    compared.two.weights.second.data.zero_()
    for _ in range(2):
        compared.publish()
    assert not compared.proof.complete
    told = (
        "1 parameters of the server at http://two cannot be compared bit for bit: second (it is "
        "computed)."
    )
    assert caplog.text.count(told) == 1


def test_fixed_memory_is_compared_once_per_training():
    compared = Compared(times=1)
    for _ in range(3):
        compared.publish()
    assert compared.computed == 1
    compared.proof.begin(5)
    compared.proof.forget()  # another training begins
    assert not compared.proof.begun
    compared.one.weights.first.data.zero_()
    with pytest.raises(FingerprintError, match="first"):
        compared.publish()
    assert compared.computed == 2


def test_moved_weights_are_traced_after_each_publish():
    compared = Compared(moves=True)
    for _ in range(3):
        compared.publish()
    assert (compared.one.traced, compared.two.traced) == (3, 3)


# -------------------------------------------------------------------------- faults on a real server

# what is about to be sent, or the server's own memory, by the name of a checkpoint
Served = dict[str, torch.Tensor]


def stale(*parts: str) -> Callable[[Served, Served], None]:
    """Tensors with these in their names keep the values of the version before."""

    def plant(served: Served, before: Served) -> None:
        for name, value in served.items():
            if any(part in name for part in parts):
                value.copy_(before[name])

    return plant


def swapped(served: Served, _before: Served) -> None:
    """The parts of a fused tensor change places."""
    names = [
        name
        for name in served
        if "layers.1.self_attn.k_proj" in name or "layers.1.self_attn.v_proj" in name
    ]
    if names:
        first, second = (served[name] for name in names)
        values = first.clone()
        first.copy_(second)
        second.copy_(values)


def one_unit(served: Served, _before: Served) -> None:
    """One element changes by one unit in the last place."""
    for name, value in served.items():
        if "layers.0.mlp.up_proj" in name:
            value.view(INTEGERS[value.element_size()])[3, 5] += 1


FAULTS = {
    "a tensor is not sent": (
        stale("layers.0.mlp.down_proj"),
        {"model.layers.0.mlp.down_proj.weight"},
    ),
    "a layer is stale": (stale("layers.1."), "layers.1."),
    "k and v are swapped": (
        swapped,
        {"model.layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn.v_proj.weight"},
    ),
    "one unit in the last place": (one_unit, {"model.layers.0.mlp.up_proj.weight"}),
}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def typed_server(request, server_model, tmp_path_factory) -> Iterator[Server]:
    # what `server` needs, and adapters, too
    mode = "server" if CUDA and request.param == "float32" else "lora"
    flags = ["--vllm_mode", mode, "--dtype", request.param, *(GPU_FLAGS if CUDA else ())]
    act_as("server")
    with running_server(server_model, tmp_path_factory.mktemp("typed"), *flags) as server:
        act_as("trainer")
        yield server


@pytest.fixture
def trainer_to(typed_server, recording, tmp_path) -> Iterator[Callable[..., AtroposGRPOTrainer]]:
    """Builds a trainer, and has it publish version 7."""
    built: list[tuple[AtroposGRPOTrainer, Weights]] = []

    def build(**settings) -> AtroposGRPOTrainer:
        mode = settings.setdefault("mode", "server")
        if CUDA and "lora" in mode and typed_server.control("GET", "/info").json()["lora"] is None:
            pytest.skip("vLLM's kernels for adapters take 16 bits")
        transport = settings.pop("transport", "auto")
        publisher = trainers.make_publisher(
            typed_server, tmp_path, mode, transport, probe_every_n_steps=0
        )
        trainer = trainers.make_trainer(
            publisher, recording, typed_server.model, tmp_path / "run", **settings
        )
        built.append((trainer, snapshot(trainer.model)))
        publisher.hold()
        publisher._trainer_version = 6
        publish(trainer, lambda: disturb(trainer.model, 0.01))
        publisher.judge_last_publish()
        return trainer

    yield build
    for trainer, original in built:  # the server gets back what it started with
        publisher = trainer.policy_publisher
        transfer = publisher.transfer
        for name in ("send", "resume", "_introduce", "_send_again"):
            vars(transfer).pop(name, None)
        publisher.servers.hold_leases()
        publisher._proof.subjects = []
        publish(
            trainer, lambda trainer=trainer, original=original: restore(trainer.model, original)
        )
        publisher.close()


def served_as(trainer: AtroposGRPOTrainer) -> Served:
    dtype = getattr(torch, trainer.policy_publisher.servers.info.dtype)
    return {
        name: value.detach().to(dtype, copy=True)
        for name, value in trainer.model.named_parameters()
    }


def plant(trainer: AtroposGRPOTrainer, fault: Callable[[Served, Served], None]) -> None:
    """Has the fault happen in every publish from now on."""
    transfer, before = trainer.policy_publisher.transfer, served_as(trainer)
    send, introduce, again = transfer.send, transfer._introduce, transfer._send_again

    def sent(version: int) -> int:
        count = send(version)
        for views in transfer.views:
            fault(views, before)
        return count

    def faulty(messages):
        for message in messages:
            named = zip(
                [spec.name for spec in message.tensors], unpack(message.content, message.tensors)
            )
            fault(dict(named), before)
            yield message

    transfer.send = sent
    transfer._introduce = lambda messages: introduce(faulty(messages))
    transfer._send_again = lambda messages: again(faulty(messages))


def assert_found(trainer: AtroposGRPOTrainer, names: set[str]) -> None:
    publisher = trainer.policy_publisher
    publish(trainer, lambda: disturb(trainer.model, 0.01))
    with pytest.raises(FingerprintError) as caught:
        publisher.judge_last_publish()
    told = str(caught.value)
    assert "policy version 8" in told and publisher.servers.clients[0].url in told
    assert f" {len(names)} of " in told
    assert sum(name in told for name in names) == min(3, len(names))


@pytest.mark.server
@pytest.mark.slow(20)
@pytest.mark.parametrize("transport", ["nccl" if CUDA else "gloo", "memory"])
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_in_publish_is_found_and_named(trainer_to, fault, transport):
    trainer = trainer_to(transport=transport)
    act, names = FAULTS[fault]
    if isinstance(names, str):
        names = {name for name, _ in trainer.model.named_parameters() if names in name}
    plant(trainer, act)
    assert_found(trainer, names)


@pytest.mark.server
@pytest.mark.full
@pytest.mark.slow(60)
@pytest.mark.parametrize(
    "settings", [{}, {"transport": "memory"}, {"mode": "nccl_lora"}, {"mode": "lora"}], ids=str
)
def test_thousands_of_right_publishes_pass(trainer_to, settings):
    if "lora" in settings.get("mode", ""):
        settings = settings | {
            "peft_config": LoraConfig(r=8, lora_alpha=24, target_modules="all-linear")
        }
    trainer = trainer_to(**settings)
    for _ in range(NUMBER):
        publish(trainer, lambda: disturb(trainer.model, 1e-3))
        trainer.policy_publisher.judge_last_publish()
    assert_proven(trainer.policy_publisher, NUMBER + 1)


@pytest.mark.server
@pytest.mark.slow(20)
@pytest.mark.parametrize("transport", ["nccl" if CUDA else "gloo", "memory"])
def test_moved_parameters_are_copied_from_new_place(trainer_to, transport):
    """DeepSpeed moves them when training begins."""
    trainer = trainer_to(transport=transport)
    publish(trainer, lambda: disturb(trainer.model, 1e-3))
    trainer.policy_publisher.judge_last_publish()
    for parameter in trainer.model.parameters():
        parameter.data = parameter.data.clone()
    for _ in range(2):
        publish(trainer, lambda: disturb(trainer.model, 1e-3))
        trainer.policy_publisher.judge_last_publish()
    assert_proven(trainer.policy_publisher, 4)


@pytest.mark.server
@pytest.mark.slow(10)
@pytest.mark.parametrize("transport", ["nccl" if CUDA else "gloo", "memory"])
def test_lost_publish_of_smallest_change_is_found(trainer_to, transport):
    trainer = trainer_to(transport=transport)
    publisher = trainer.policy_publisher
    publisher.transfer.send = lambda version: 0
    name, parameter = next(
        (n, p) for n, p in trainer.model.named_parameters() if "layers.1.mlp.gate_proj" in n
    )
    step = 1 << (
        16 * (parameter.dtype is torch.float32 and publisher.servers.info.dtype == "bfloat16")
    )
    publish(
        trainer, lambda: parameter.data.view(INTEGERS[parameter.element_size()])[1, 1].add_(step)
    )
    with pytest.raises(FingerprintError, match=f"version 8, 1 of .*{name}"):
        publisher.judge_last_publish()


@pytest.mark.server
@pytest.mark.slow(10)
def test_live_server_of_other_version_is_found(trainer_to):
    """As one does after a publish was lost, or when another trainer publishes to it."""
    publisher = trainer_to().policy_publisher
    resume = publisher.transfer.resume
    publisher.transfer.resume = lambda version: resume(version + 1)
    publish(publisher._trainer, lambda: None)
    with pytest.raises(
        FingerprintError, match="samples from policy version 9 but the trainer published 8"
    ):
        publisher.judge_last_publish()


@pytest.mark.server
@pytest.mark.slow(10)
def test_shared_memory_is_compared_twice_in_training(trainer_to, typed_server):
    trainer = trainer_to(mode="colocate")
    proof = trainer.policy_publisher._proof
    for _ in range(3):
        publish(trainer, lambda: disturb(trainer.model, 1e-3))
        trainer.policy_publisher.judge_last_publish()
    assert proof._compared == {"weights": 2} and proof.compare_all_anew()
    proof.forget()
    publish(trainer, lambda: disturb(trainer.model, 1e-3))
    trainer.policy_publisher.judge_last_publish()
    assert proof._compared == {"weights": 1}


@pytest.mark.parametrize("left_out", ["", "the frozen base is quantised in the trainer"])
def test_proof_with_omissions_is_incomplete(left_out):
    subject = Fingerprinted("weights", [], lambda: torch.zeros(0, 2, dtype=torch.int64))
    no_servers = SimpleNamespace(clients=[])
    assert Proof(no_servers, [subject, subject._replace(left_out=left_out)]).complete == (
        not left_out
    )
    assert not Proof(no_servers, []).complete
    traced = Proof(
        SimpleNamespace(clients=[SimpleNamespace(url="one"), SimpleNamespace(url="other")]),
        [subject],
    )
    for refused, complete in (({}, True), ({"w": "vLLM keeps it as torch.float32"}, False)):
        traced._refused = {("one", "weights"): {}, ("other", "weights"): refused}
        assert traced.complete == complete
    traced._refused = {("one", "weights"): {}}  # the other one was not asked
    assert not traced.complete


@pytest.mark.server
@pytest.mark.slow(20)
@pytest.mark.parametrize("fault", ["a tensor is stale", "half of the scaling"])
def test_fault_in_adapter_files_is_found(trainer_to, fault):
    config = LoraConfig(r=8, lora_alpha=24, target_modules="all-linear")
    trainer = trainer_to(mode="lora", peft_config=config)
    transfer = trainer.policy_publisher.transfer
    push, before = (
        transfer._push,
        dict(gather.iter_adapter_parameters(trainer.model, trainer.accelerator)),
    )
    before = {name: tensor.clone() for name, tensor in before.items()}
    wrong = {
        name for name in before if "layers.1" in name and "o_proj" in name and "lora_B" in name
    }

    def faulty(tensors: Served, version: int) -> None:
        for name in wrong:
            tensors[name] = before[name] if fault == "a tensor is stale" else tensors[name] / 2
        push(tensors, version)

    transfer._push = faulty
    assert_found(trainer, wrong)


@pytest.mark.server
@pytest.mark.slow(20)
@pytest.mark.parametrize("fault", ["not sent", "of another module", "the scaling twice"])
def test_fault_in_adapter_publish_is_found(trainer_to, fault):
    config = LoraConfig(r=8, lora_alpha=24, target_modules="all-linear")
    trainer = trainer_to(mode="nccl_lora", peft_config=config)
    transfer = trainer.policy_publisher.transfer
    names = [spec.name for spec in transfer._tensors]
    chosen = [
        number for number, name in enumerate(names) if "layers.0" in name and "lora_B" in name
    ]
    first, second = [
        number for number in chosen if "k_proj" in names[number] or "v_proj" in names[number]
    ]
    fill, wrong = transfer._fill, {names[first], names[second]}

    def faulty(slots, values) -> None:
        fill(slots, values)
        if slots is not transfer._slots:
            return
        if fault == "of another module":
            values = slots[first].clone()
            slots[first].copy_(slots[second])
            slots[second].copy_(values)
        elif fault == "the scaling twice":
            slots[first].mul_(3)
            slots[second].mul_(3)

    transfer._fill = faulty
    if fault == "not sent":
        transfer._push, wrong = lambda values: None, set(names)
    assert_found(trainer, wrong)


@pytest.mark.server
@pytest.mark.slow(20)
def test_block_cached_by_old_weights_is_found(trainer_to):
    trainer = trainer_to()
    publisher = trainer.policy_publisher
    publisher._probe = Probe(publisher.servers, trainer, 1, one_memory=False)
    publish(trainer, lambda: disturb(trainer.model, 0.01))
    publisher.judge_last_publish()
    publisher.transfer.clear_cache = False
    publish(trainer, lambda: disturb(trainer.model, 0.01))
    block = publisher.servers.info.block_size
    # the last token is always computed
    cached = (len(publisher._probe.prompt_ids) - 1) // block * block
    told = rf"version 9, the server at .* took {cached} tokens of a prompt from its cache"
    with pytest.raises(ProbeError, match=told):
        publisher.judge_last_publish()


@pytest.mark.server
@pytest.mark.slow(20)
def test_rounding_in_16_bits_only_warns(trainer_to, typed_server, caplog):
    trainer = trainer_to()
    publisher = trainer.policy_publisher
    rounds = CUDA or publisher.servers.info.dtype == "bfloat16"
    publisher._probe = Probe(
        publisher.servers, trainer, 1, one_memory=False, prove=publisher._proof.compare_all_anew
    )
    publish(trainer, lambda: disturb(trainer.model, 0.01))
    publisher._probe.tolerance = Tolerance(1e-9, 1e-9)  # which no probe can meet
    for _ in range(2):
        publish(trainer, lambda: disturb(trainer.model, 0.01))
        if rounds:
            publisher.judge_last_publish()
            assert publisher.probe_max_abs_diff > 0
        else:
            with pytest.raises(ProbeError, match="the server and the trainer disagree"):
                publisher.judge_last_publish()
    assert ("have the same weights bit for bit" in caplog.text) == rounds
    publisher._proof._left_out = publisher._proof.subjects  # as if something could not be compared
    publish(trainer, lambda: disturb(trainer.model, 0.01))
    with pytest.raises(ProbeError, match="the server and the trainer disagree"):
        publisher.judge_last_publish()


@pytest.mark.server
@pytest.mark.slow(20)
def test_foreign_memory_is_found_after_first_step(trainer_to, monkeypatch):
    replace = colocate.replace

    def replaced(model, views) -> None:
        name = "model.layers.0.mlp.up_proj.weight"
        views[name] = views[name].clone()
        replace(model, views)

    monkeypatch.setattr(colocate, "replace", replaced)
    with pytest.raises(FingerprintError, match=r"1 of .*layers\.0\.mlp\.up_proj"):
        trainer_to(mode="colocate")
