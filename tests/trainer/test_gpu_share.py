"""`gpu_share`: what is computed on a part of a GPU is computed by that part alone, and is the same."""

from contextlib import contextmanager

import pytest
import torch
from transformers import TrainerCallback

from tests.rollout_factory import make_trainer, uniform_batch
from trl_atropos.training import gpu_share
from trl_atropos.training.gpu_share import GpuShare

SHARE = 0.65
ROUNDED_TO = 8  # multiprocessors, by the driver on Hopper GPUs
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Watched:
    """Stands for a share, and knows whether it is in use."""

    def __init__(self):
        self.depth = 0

    @contextmanager
    def computing(self):
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1


class Passes(TrainerCallback):
    """
    Watches the passes of a training.

    Attributes:
        forward: of each forward pass, whether it is on the share, and whether it keeps its graph.
        backward: of each backward pass, whether it is on the share.
    """

    def __init__(self, model: torch.nn.Module, share: Watched):
        self.forward: list[tuple[bool, bool]] = []
        self.backward: list[bool] = []
        self._model = model
        self._share = share

    def on_train_begin(self, args, state, control, **kwargs):
        """Before this, the trainer tries how the model computes."""
        self._model.register_forward_pre_hook(self._on_forward)
        parameter = next(self._model.parameters())
        parameter.register_post_accumulate_grad_hook(self._on_backward)

    def _on_forward(self, module, arguments):
        self.forward.append((self._share.depth > 0, torch.is_grad_enabled()))

    def _on_backward(self, parameter):
        self.backward.append(self._share.depth > 0)


@pytest.mark.parametrize("num_iterations", [1, 2], ids=["trained alone", "scored before"])
def test_all_passes_are_computed_on_the_share(num_iterations, tiny_model, tmp_path):
    trainer = make_trainer(
        tiny_model,
        tmp_path,
        uniform_batch(tiny_model, 4, 2, seed=1),
        num_iterations=num_iterations,
        max_steps=num_iterations,
        gpu_share=SHARE,
    )
    share = Watched()
    trainer.computation.gpu_share = share
    passes = Passes(trainer.model, share)
    trainer.add_callback(passes)
    trainer.train()
    assert passes.backward and all(passes.backward)
    assert passes.forward and all(on_share for on_share, _ in passes.forward)
    scored_before = any(not keeps_graph for _, keeps_graph in passes.forward)
    assert scored_before == (num_iterations > 1)
    assert share.depth == 0


def test_share_changes_nothing_on_the_cpu(caplog):
    share = GpuShare(SHARE, torch.device("cpu"))
    with share.computing():
        assert torch.ones(2).sum() == 2
    assert not caplog.records


@pytest.mark.parametrize("warn", [True, False])
def test_without_mps_the_share_is_not_used(warn, monkeypatch, caplog):
    monkeypatch.setattr(gpu_share, "mps_runs", lambda: False)
    share = GpuShare(SHARE, torch.device("cuda", 0), warn)
    with share.computing():
        assert share._stream is None
    told = "`gpu_share: 0.65` has no effect without NVIDIA's MPS" in caplog.text
    assert told == warn


@pytest.fixture
def share(monkeypatch):
    monkeypatch.setattr(gpu_share, "mps_runs", lambda: True)
    share = GpuShare(SHARE, torch.device("cuda", 0))
    assert share._stream is not None
    return share


@pytest.mark.gpu
@needs_gpu
def test_share_computes_on_its_multiprocessors_alone(share):
    total = torch.cuda.get_device_properties(0).multi_processor_count
    assert len(multiprocessors()) == total
    with share.computing():
        used = multiprocessors()
    assert len(used) <= SHARE * total + ROUNDED_TO
    assert len(used) > SHARE * total - ROUNDED_TO
    assert len(multiprocessors()) == total


@pytest.mark.gpu
@needs_gpu
def test_share_computes_the_same_bits_in_order(share):
    """Each pass reads what was computed before it, on the whole GPU or on the share."""
    generator = torch.Generator("cuda").manual_seed(0)
    options = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    weight = torch.randn(4096, 4096, **options, requires_grad=True)
    x = torch.randn(4096, 4096, **options)

    def passes(on_share: bool) -> torch.Tensor:
        values = x
        for number in range(6):
            if on_share and number % 2:
                with share.computing():
                    values = one_pass(values)
            else:
                values = one_pass(values)
        return values

    def one_pass(values: torch.Tensor) -> torch.Tensor:
        product = values @ weight
        (gradient,) = torch.autograd.grad(product.float().square().mean(), weight)
        return torch.nn.functional.normalize(product.detach() + gradient, dim=1)

    expected = passes(on_share=False)
    for _ in range(5):
        assert torch.equal(passes(on_share=True), expected)


def multiprocessors() -> set[int]:
    """Returns the numbers of the multiprocessors that a kernel of many blocks runs on."""
    import triton
    import triton.language as tl

    @triton.jit
    def where(numbers, work):
        number = tl.inline_asm_elementwise(
            "mov.u32 $0, %smid;", "=r,r", [tl.program_id(0)], tl.int32, is_pure=False, pack=1
        )
        total = 0.0
        for _ in range(2000):  # long enough that no multiprocessor takes the blocks of another
            total += tl.sum(tl.load(work + tl.arange(0, 1024)))
        tl.store(work + 1024 + tl.program_id(0), total)
        tl.store(numbers + tl.program_id(0), number)

    blocks = 4096
    numbers = torch.empty(blocks, dtype=torch.int32, device="cuda")
    work = torch.zeros(1024 + blocks, device="cuda")
    where[(blocks,)](numbers, work)
    return set(numbers.tolist())
