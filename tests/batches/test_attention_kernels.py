"""Kernels of other libraries, chosen by what they compute and how fast. No library is at hand whose
kernels run on a CPU, so these tests give torch some: its dispatcher calls them as it calls those."""

import logging
from collections.abc import Callable, Collection
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn import attention
from torch.nn.attention import _fa3, _fa4

from tests.batches.compiling import compile_by
from tests.batches.exact_attention import attend_to_parts
from tests.rollout_factory import make_trainer, step_logs, uniform_batch
from trl_atropos.batches import attention_kernels, long_attention, packed_attention
from trl_atropos.batches.attention_kernels import TORCH, AttentionShape, Chosen
from trl_atropos.errors import RecipeError

CPU = torch.device("cpu")
PLAIN = AttentionShape(4, 2, 8, 8, None, 8**-0.5)
WINDOWED = PLAIN._replace(window=70)
SHAPES = {PLAIN, WINDOWED}
BY_TORCH = Chosen("torch", long_in_turn=False)
OWN_FA = {"FA3": _fa3.register_flash_attention_fa3, "FA4": _fa4.register_flash_attention_fa4}


class Kernel(NamedTuple):
    """A kernel's own departures from what is right."""

    of_results: float = 0.0
    of_gradients: float = 0.0
    knows_windows: bool = True
    too_wide: int = 0  # tokens, of windows
    error: str = ""


class Dispatched:
    """What torch computes by, and how often it did."""

    def __init__(self):
        self.active = Kernel()
        self.calls = 0

    def window(self, left: int, is_causal: bool) -> int | None:
        """In tokens, of a kernel that is told to look so far to the left."""
        assert is_causal or left >= 0
        if left < 0 or not self.active.knows_windows:
            return None
        return left + 1 + self.active.too_wide

    def forward(self, q, k, v, cum_q, cum_k, max_q, max_k, dropout, is_causal, debug, **options):
        self.calls += 1
        if self.active.error:
            raise RuntimeError(self.active.error)
        window = self.window(options["window_size_left"], is_causal)
        out = attend_to_parts(q, k, v, cum_q, cum_k, options["scale"], window)
        out = out + self.active.of_results
        lse = torch.zeros(q.size(1), q.size(0))
        state = torch.zeros(2, dtype=torch.uint64)
        return out, lse, state, torch.zeros((), dtype=torch.uint64), torch.zeros(0)

    def backward(
        self, gradient, q, k, v, out, lse, cum_q, cum_k, mq, mk, drop, is_causal, rng, x, **options
    ):
        self.calls += 1
        # Below autograd, as a library's kernels are: so the derivatives are taken step by step.
        states = [states.detach().requires_grad_() for states in (q, k, v)]
        window = self.window(options["window_size_left"], is_causal)

        def attend(*states):
            return attend_to_parts(*states, cum_q, cum_k, options["scale"], window)

        _, gradients = torch.func.vjp(attend, *states)
        return tuple(each + self.active.of_gradients for each in gradients(gradient))


@pytest.fixture(scope="module")
def dispatched():
    """Gives the dispatcher kernels for the CPU, where it has none of its own."""
    kernels = Dispatched()
    library = torch.library.Library("aten", "IMPL", "CPU")
    library.impl("_flash_attention_forward", kernels.forward, "CPU")
    library.impl("_flash_attention_backward", kernels.backward, "CPU")
    yield kernels
    library._destroy()


@pytest.fixture
def install(dispatched, monkeypatch) -> Callable[..., None]:
    """Installs kernels by the names of libraries."""
    monkeypatch.setattr(attention_kernels, "TIMED", 64)
    monkeypatch.setattr(attention_kernels, "MODULES", dict.fromkeys(OWN_FA, "no_such_module"))

    def install(**kernels: Kernel) -> None:
        for name, kernel in kernels.items():

            def register(kernel=kernel):
                dispatched.active = kernel
                return Handle()

            monkeypatch.setitem(attention_kernels.MODULES, name, "json")
            attention.register_flash_attention_impl(name, register_fn=register)

    class Handle:
        def remove(self):
            dispatched.active = Kernel()

    yield install
    attention_kernels.activate(TORCH)
    for name, register in OWN_FA.items():
        attention.register_flash_attention_impl(name, register_fn=register)


def use(wanted: str, shapes: Collection[AttentionShape] = SHAPES, longest: int = 4095) -> Chosen:
    used = attention_kernels.use(wanted, lambda: shapes, CPU, torch.float32, longest)
    library = used.kernel if used.kernel in attention_kernels.MODULES else None
    assert attention.current_flash_attention_impl() == library
    return used


@pytest.fixture
def slower(monkeypatch) -> Callable[[str, float], None]:
    """Makes rows of a kernel take so many seconds: tests cannot rely on a machine's speed."""
    seconds = {TORCH: 1.0}
    monkeypatch.setattr(
        attention_kernels, "seconds_of_row", lambda name, *_: seconds.get(name, 0.5)
    )
    return seconds.__setitem__


def test_fastest_right_kernel_is_used(install, slower, caplog):
    install(FA3=Kernel(), FA4=Kernel())
    slower("FA3", 0.4)
    with caplog.at_level(logging.INFO, "trl_atropos"):
        assert use("auto") == Chosen("FA3", long_in_turn=False)
    assert "FA3 takes 0.40 times as long as torch's own" in caplog.text
    slower("FA3", 2.0)
    slower("FA4", 1.5)
    assert use("auto") == BY_TORCH
    assert use("FA4").kernel == "FA4"  # since it is named
    assert use("torch") == BY_TORCH


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (Kernel(of_results=1e-3), "ArithmeticError: its results are"),
        (Kernel(of_gradients=1e-3), "ArithmeticError: its gradients of queries are"),
        (Kernel(of_results=float("nan")), "ArithmeticError: its results are nan from"),
        (Kernel(knows_windows=False), "ArithmeticError: its results are"),
        (Kernel(too_wide=1), "ArithmeticError: its results are"),
        (Kernel(error="unsupported head size"), "RuntimeError: unsupported head size"),
    ],
)
def test_wrong_kernel_is_named_and_not_used(kernel, reason, install, slower, caplog):
    install(FA4=kernel)
    assert use("auto") == BY_TORCH
    (line,) = [record.message for record in caplog.records if "FA4" in record.message]
    assert f"FA4 is installed, but not used: {reason}" in line
    with pytest.raises(RecipeError, match="`attention_kernel: FA4` is no choice for this model"):
        use("FA4")


def test_absent_kernel_is_refused_by_name_of_its_package(install):
    install()
    assert attention_kernels.installed() == []
    with pytest.raises(RecipeError, match=r"pip install trl_atropos\[flash\]"):
        attention_kernels.require_installed("FA4")
    install(FA4=Kernel())
    assert attention_kernels.installed() == ["FA4"]
    attention_kernels.require_installed("FA4")


def test_kernel_without_effect_is_named(tiny_model, tmp_path, caplog):
    trainer = make_trainer(
        tiny_model,
        tmp_path,
        uniform_batch(tiny_model, 4, 4, 0),
        attention_kernel="FA4",
        per_device_train_batch_size=16,
        max_steps=1,
    )
    trainer.train()
    assert "`attention_kernel: FA4` has no effect" in caplog.text


def test_run_trains_by_chosen_kernel(tiny_model, tmp_path, install, dispatched, monkeypatch):
    """On the CPU, with what layers get on a GPU."""
    install(FA4=Kernel())
    settings = {"per_device_train_batch_size": 16, "max_steps": 2, "attention_kernel": "FA4"}
    logs = []
    for has_one_kernel in (False, True):
        batches = [uniform_batch(tiny_model, 4, 4, seed) for seed in range(2)]
        monkeypatch.setattr(packed_attention.RowFormat, "has_one_kernel", has_one_kernel)
        dispatched.calls = 0
        trainer = make_trainer(tiny_model, tmp_path / str(has_one_kernel), *batches, **settings)
        trainer.train()
        assert (dispatched.calls > 0) == has_one_kernel
        active = "FA4" if has_one_kernel else None
        assert attention.current_flash_attention_impl() == active
        logs.append([(entry["loss"], entry["grad_norm"]) for entry in step_logs(trainer)])
    assert logs[1] == [pytest.approx(step, rel=1e-4, abs=1e-7) for step in logs[0]]


def test_each_kind_of_row_is_compiled_in_one_piece(tiny_model, tmp_path, dispatched, monkeypatch):
    """On the CPU, with what layers get on a GPU. Rows that share prompts get more inputs than
    others, so that the second kind is compiled when the weights have gradients in float32."""
    graphs = []

    def note(graph, inputs, **_):
        graphs.append(graph)
        return graph

    compile_by(note, monkeypatch)
    monkeypatch.setattr(packed_attention.RowFormat, "has_one_kernel", True)
    torch._dynamo.reset()
    counters.clear()
    trainer = make_trainer(
        tiny_model,
        tmp_path,
        *(uniform_batch(tiny_model, 4, 4, seed) for seed in range(3)),
        per_device_train_batch_size=16,
        max_steps=3,
        max_tokens_per_micro_batch=64,
        model_init_kwargs={"dtype": "bfloat16"},
        compile_layers=True,
    )
    shares = []
    compute_loss = trainer._micro_batch_loss

    def note_kind(model, micro_batch):
        shares.append("rollout_keys" in micro_batch["layout"].inputs)
        return compute_loss(model, micro_batch)

    monkeypatch.setattr(trainer, "_micro_batch_loss", note_kind)
    with torch._dynamo.config.patch(specialize_float=False):  # torch's default
        trainer.train()
    assert set(shares) == {True, False}
    assert not counters["graph_break"]
    assert len(graphs) == 2


def test_wider_window_is_seen_in_16_bits(install, slower):
    install(FA4=Kernel(too_wide=1))
    shape = WINDOWED._replace(window=300)
    attention_kernels.require_exact("torch", shape, CPU, torch.bfloat16)
    with pytest.raises(ArithmeticError, match="its results are"):
        attention_kernels.require_exact("FA4", shape, CPU, torch.bfloat16)


@pytest.mark.parametrize(
    ("length", "padded"), [(1, 64), (64, 64), (4097, 4352), (40_000, 40_960), (65_536, 65_536)]
)
def test_few_lengths_are_planned(length, padded):
    assert long_attention.padded_length(length) == padded


def test_long_rollouts_are_computed_in_turn(tiny_model, tmp_path, dispatched, slower, monkeypatch):
    """On the CPU, where torch chooses another backend, with rollouts that are called long."""
    monkeypatch.setattr(packed_attention.RowFormat, "has_one_kernel", True)
    monkeypatch.setattr(long_attention, "LONG", 8)
    slower("cudnn", 0.6)
    lengths = []

    def attend_in_turn(query, key, value, sizes, scaling):
        lengths.append(sizes[0].tolist())
        return long_attention.attend_in_turn(query, key, value, sizes, scaling)

    monkeypatch.setattr(packed_attention, "attend_in_turn", attend_in_turn)
    settings = {
        "per_device_train_batch_size": 16,
        "max_steps": 2,
        "share_prompts": False,
        "max_completion_length": 4096,
    }
    logs = []
    for kernel in ("torch", "cudnn", "auto"):
        lengths.clear()
        batches = [uniform_batch(tiny_model, 4, 4, seed) for seed in range(2)]
        trainer = make_trainer(
            tiny_model, tmp_path / kernel, *batches, attention_kernel=kernel, **settings
        )
        trainer.train()
        in_turn = kernel != "torch"
        assert trainer.computation.packs.long_in_turn == bool(lengths) == in_turn
        assert all(np.mean(sizes) >= 8 for sizes in lengths)
        logs.append([(entry["loss"], entry["grad_norm"]) for entry in step_logs(trainer)])
    for other in logs[1:]:
        assert other == [pytest.approx(step, rel=1e-4, abs=1e-7) for step in logs[0]]


def test_fastest_kernel_of_long_rollouts_is_used(install, slower):
    install(FA4=Kernel())
    slower("FA4", 0.4)
    slower("cudnn", 0.6)
    assert use("auto", {PLAIN}, longest=4096) == Chosen("FA4", long_in_turn=False)
    slower("FA4", 1.5)
    assert use("auto", {PLAIN}, longest=4096) == Chosen("torch", long_in_turn=True)
    slower("FA4", 0.8)
    assert use("auto", {PLAIN}, longest=4096) == Chosen("FA4", long_in_turn=True)
    assert use("auto", {PLAIN}, longest=4095) == Chosen("FA4", long_in_turn=False)
    assert use("torch", {PLAIN}, longest=4096) == BY_TORCH
    slower("cudnn", 2.0)
    assert use("auto", {PLAIN}, longest=4096) == Chosen("FA4", long_in_turn=False)
    assert use("cudnn", {PLAIN}) == Chosen("torch", long_in_turn=True)  # since it is named


def test_windows_are_not_for_cudnn(install, slower, caplog):
    install()
    with pytest.raises(RecipeError, match="it knows no windows, which some layers have"):
        use("cudnn")
    with caplog.at_level(logging.INFO, "trl_atropos"):
        assert use("auto", longest=4096) == BY_TORCH
    (line,) = [record for record in caplog.records if "cudnn" in record.message]
    assert "it knows no windows" in line.message
    assert line.levelno == logging.INFO  # nothing that a user could change


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["FA3", "FA4", "cudnn"])
def test_kernel_computes_as_torch_does(name):
    """Of a model like Qwen3, and of one with windows."""
    if name not in (*attention_kernels.installed(), "cudnn"):
        pytest.skip(f"{name} is not installed")
    device = torch.device("cuda")
    windows = [None] if name == "cudnn" else [None, 300]
    for window in windows:
        shape = AttentionShape(16, 8, 128, 128, window, None)
        attention_kernels.require_exact(name, shape, device, torch.bfloat16)
