"""Training on fp32 masters of 16-bit parameters: as exact as fp32, in the same memory, through
checkpoints.

Nothing here needs a server: two parameters of the tiny model are strided views of larger memory, as
they are where vLLM has fused or transposed them. The two processes of the last test are real;
`main` is what they run.
"""

import sys
from pathlib import Path

import pytest
import torch
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments

from tests.launching import launch_two
from trl_atropos.errors import AtroposTrainingError
from trl_atropos.weights import masters
from trl_atropos.weights.masters import MasterOptimizer, exact_gradients, use_masters

VIEWS = ("q_proj", "down_proj")  # transposed; half of a larger matrix, transposed
DATA = torch.randint(256, (64, 24), generator=torch.Generator().manual_seed(1))


def load(folder: Path, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """The tiny model, with values that bfloat16 can hold."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(dtype)
    for name, module in model.named_modules():
        if name.endswith(VIEWS[0]):
            module.weight = torch.nn.Parameter(module.weight.detach().t().contiguous().t())
        if name.endswith(VIEWS[1]):
            wide = torch.cat([module.weight.detach()] * 2).t().contiguous()
            module.weight = torch.nn.Parameter(wide.t()[: module.weight.shape[0]])
    model.register_state_dict_post_hook(
        lambda module, state, *_: state.update({k: v.contiguous() for k, v in state.items()})
    )
    return model


def groups_of(model: PreTrainedModel) -> list[dict]:
    return [{"params": list(model.parameters()), "weight_decay": 0.1}]


def backward(model: PreTrainedModel, rows: torch.Tensor) -> None:
    model(input_ids=rows, labels=rows).loss.backward()


def flat(tensors) -> torch.Tensor:
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


def assert_rounded(model: PreTrainedModel, optimizer: MasterOptimizer) -> None:
    params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert {id(parameter) for parameter in params} == {
        id(parameter) for parameter in model.parameters()
    }
    for parameter, master in zip(params, optimizer.state_dict()["masters"], strict=True):
        assert torch.equal(parameter, master.to(parameter))


# ---------------------------------------------------------------------------------------- exactness


def relative_error_of_update(optimizer_of, model: PreTrainedModel, gradients=None) -> float:
    """|update - update in fp32| / |update in fp32| after 50 steps of AdamW; on own gradients if
    none are given."""
    exact = load(Path(model.name_or_path), torch.float32)
    exact_optimizer = AdamW(groups_of(exact), lr=1e-6)
    optimizer = optimizer_of(groups_of(model))
    start = flat(exact.parameters())
    for step in range(50):
        rows = DATA[4 * (step % 16) :][:4]
        backward(exact, rows)
        if gradients == "of fp32":
            for parameter, other in zip(model.parameters(), exact.parameters(), strict=True):
                parameter.grad = other.grad.to(parameter.grad_dtype)
        else:
            backward(model, rows)
        for one in (optimizer, exact_optimizer):
            one.step()
            one.zero_grad()
    trained = (
        optimizer.state_dict()["masters"]
        if isinstance(optimizer, MasterOptimizer)
        else model.parameters()
    )
    expected = flat(exact.parameters()) - start
    return ((flat(trained) - start - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_masters_take_fp32_updates_lost_in_16_bits(tiny_model, dtype):
    masters = relative_error_of_update(
        lambda groups: MasterOptimizer(groups, AdamW, lr=1e-6, fused=True),
        load(tiny_model, dtype),
        "of fp32",
    )
    plain = relative_error_of_update(
        lambda groups: AdamW(groups, lr=1e-6), load(tiny_model, dtype), "of fp32"
    )
    print(f"relative error of the update: masters {masters:.1e}, plain {plain:.2f}")
    assert masters < 1e-3
    assert not plain < 0.3  # NaN in float16, where Adam's epsilon is 0


def test_masters_stay_near_fp32_on_own_gradients(tiny_model):
    masters = relative_error_of_update(
        lambda groups: MasterOptimizer(groups, AdamW, lr=1e-6), load(tiny_model)
    )
    plain = relative_error_of_update(lambda groups: AdamW(groups, lr=1e-6), load(tiny_model))
    print(f"relative error of the update: masters {masters:.1e}, plain {plain:.2f}")
    assert masters < 0.1  # what a forward pass in bfloat16 costs
    assert plain > 0.9


@pytest.mark.parametrize("checkpointing", [None, "reentrant", "not reentrant"])
def test_gradients_of_micro_batches_add_up_in_fp32(tiny_model, checkpointing):
    model, plain = load(tiny_model), load(tiny_model)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        model.enable_input_require_grads()
        model.train()
    optimizer = MasterOptimizer(groups_of(model), SGD, lr=1.0)
    exact = torch.zeros_like(flat(model.parameters()))
    for rows in DATA.split(8):
        backward(model, rows)
        exact += flat(parameter.grad for parameter in model.parameters())
        optimizer.zero_grad()
    for rows in DATA.split(8):
        backward(model, rows)
        backward(plain, rows)

    def error(of: PreTrainedModel) -> float:
        return ((flat(one.grad for one in of.parameters()) - exact).norm() / exact.norm()).item()

    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    assert error(model) < 1e-6
    assert error(plain) > 1e-3
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
    assert norm.item() == pytest.approx(exact.norm().item(), rel=1e-6)
    before = flat(optimizer.state_dict()["masters"])
    optimizer.param_groups[0]["weight_decay"] = 0.0
    optimizer.step()
    assert (flat(optimizer.state_dict()["masters"]) - before).norm().item() == pytest.approx(
        1e-2, rel=1e-4
    )


def test_gradients_set_aside_come_back_as_the_same_sums(tiny_model):
    model, other = load(tiny_model), load(tiny_model)
    optimizer = MasterOptimizer(groups_of(model), SGD, lr=1.0)
    MasterOptimizer(groups_of(other), SGD, lr=1.0)
    for training_step in DATA.split(32):
        with optimizer.gradients_aside():
            for rows in training_step.split(8):
                assert all(parameter.grad is None for parameter in model.parameters())
                backward(model, rows)
    for rows in DATA.split(8):
        backward(other, rows)
    for one, expected in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad, expected.grad)


# ---------------------------------------------------------------------------------- as an optimizer


def test_step_writes_rounded_masters_in_place(tiny_model):
    model = load(tiny_model)
    views = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert (
        sum(not view.is_contiguous() for view in views.values())
        == 2 * model.config.num_hidden_layers
    )
    optimizer = MasterOptimizer(groups_of(model), AdamW, lr=1e-2)
    backward(model, DATA[:4])
    optimizer.step()
    assert_rounded(model, optimizer)
    for name, parameter in model.named_parameters():
        assert (
            parameter.data_ptr() == views[name].data_ptr()
            and parameter.stride() == views[name].stride()
        )
        assert torch.equal(parameter, views[name])


def test_step_evaluates_given_loss_closure(tiny_model):
    model = load(tiny_model)
    optimizer = MasterOptimizer(groups_of(model), SGD, lr=0.1)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = model(input_ids=DATA[:4], labels=DATA[:4]).loss
        value.backward()
        return value

    before = optimizer.step(loss)
    assert optimizer.step(loss) < before


def test_scheduler_and_zero_grad_reach_inner_optimizer(tiny_model):
    model = load(tiny_model)
    optimizer = MasterOptimizer(groups_of(model), AdamW, lr=1e-2)
    scheduler = LambdaLR(optimizer, lambda step: 1.0 if step == 0 else 0.0)
    backward(model, DATA[:4])
    optimizer.step()
    scheduler.step()
    masters = optimizer.inner.param_groups[0]["params"]
    after_one = flat(masters)
    optimizer.step()  # at a learning rate of 0
    assert torch.equal(flat(masters), after_one)
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in [*model.parameters(), *masters])


def test_fp32_parameters_step_as_without_masters(tiny_model):
    mixed, exact = load(tiny_model), load(tiny_model)
    for model in (mixed, exact):
        model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight.detach().float())
    optimizers = (
        MasterOptimizer(groups_of(mixed), AdamW, lr=1e-3),
        AdamW([exact.model.norm.weight], lr=1e-3, weight_decay=0.1),
    )
    for model, optimizer in zip((mixed, exact), optimizers, strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            backward(model, DATA[:4])
        optimizer.step()
    assert torch.equal(mixed.model.norm.weight, exact.model.norm.weight)
    assert optimizers[0].inner.param_groups[0]["params"][-1] is mixed.model.norm.weight


def test_foreign_write_to_parameters_is_kept(tiny_model):
    model = load(tiny_model)
    optimizer = MasterOptimizer(groups_of(model), AdamW, lr=1e-2)
    backward(model, DATA[:4])
    optimizer.step()
    untouched = optimizer.state_dict()["masters"][1].clone()
    first, second, *_ = model.parameters()
    with torch.no_grad():
        first.fill_(3.0)
        # writes what is there, as DDP's broadcast does: the master keeps what was rounded away
        second.mul_(1.0)
    masters = optimizer.state_dict()["masters"]
    assert masters[0].unique().tolist() == [3.0]
    assert torch.equal(masters[1], untouched)
    optimizer.step()
    assert abs(next(model.parameters()).float().mean().item() - 3.0) < 0.1


class Counting(SGD):
    """Keeps state in its groups, as Prodigy and D-Adaptation do: how often it has stepped."""

    def __init__(self, params, **kwargs):
        super().__init__(params, **kwargs)
        for group in self.param_groups:
            group["k"] = 0

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
        return super().step(closure)


def test_optimizer_group_state_survives_checkpoint(tiny_model):
    model = load(tiny_model)
    optimizer = MasterOptimizer(groups_of(model), Counting, lr=0.1)
    for _ in range(3):
        backward(model, DATA[:4])
        optimizer.step()
    assert optimizer.param_groups[0]["k"] == 3
    optimizer.param_groups[0]["lr"] = 0.01  # as by a scheduler, after the step
    saved = optimizer.state_dict()
    assert saved["inner"]["param_groups"][0]["lr"] == 0.01
    resumed = MasterOptimizer(groups_of(load(tiny_model)), Counting, lr=0.1)
    resumed.load_state_dict(saved)
    resumed.step()
    assert (resumed.param_groups[0]["k"], resumed.param_groups[0]["lr"]) == (4, 0.01)


def test_offloaded_masters_step_on_own_cores(tiny_model, monkeypatch):
    stepped_by = []

    class Noting(SGD):
        def step(self, closure=None):
            stepped_by.append(torch.get_num_threads())
            return super().step(closure)

    model = load(tiny_model)
    optimizer = MasterOptimizer(groups_of(model), Noting, offload=True, lr=0.1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    usual = torch.get_num_threads()
    try:
        torch.set_num_threads(1)  # as accelerate's launcher has it
        for cores in (8, 128, 2):
            monkeypatch.setattr(
                "os.sched_getaffinity", lambda process, cores=cores: set(range(cores))
            )
            optimizer.step()
            assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(usual)
    assert stepped_by == [2, masters.THREADS, 1]


@pytest.mark.parametrize(
    ("sizes", "parts", "in_flight"),
    [
        ([6, 4, 1], [[0, 1], [2]], 20),  # as many as fit
        ([4, 25, 4], [[0], [1], [2]], 50),  # a parameter is not divided
        ([10, 10, 10], [[0], [1], [2]], 20),  # of one part while another one is stepped
        ([3, 4], [[0, 1]], 7),
    ],
)
def test_offloaded_masters_are_stepped_in_parts(sizes, parts, in_flight, monkeypatch):
    monkeypatch.setattr(masters, "PART", 10)
    assert masters.parts_of(sizes) == parts
    assert masters.gradients_in_flight(sizes) == in_flight


def test_gradient_scaler_works_on_fp16_with_masters(tiny_model):
    scaled, exact = load(tiny_model, torch.float16), load(tiny_model, torch.float16)
    optimizer, reference = (MasterOptimizer(groups_of(one), SGD, lr=0.1) for one in (scaled, exact))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    rows = DATA[:4]
    scaler.scale(scaled(input_ids=rows, labels=rows).loss).backward()
    scaler.unscale_(optimizer)
    backward(exact, rows)
    reference.step()
    scaler.step(optimizer)
    scaler.update()
    trained = flat(optimizer.state_dict()["masters"])
    assert trained == pytest.approx(flat(reference.state_dict()["masters"]), abs=1e-4)
    scaler.scale(scaled(input_ids=rows, labels=rows).loss * float("inf")).backward()
    scaler.step(optimizer)
    assert torch.equal(flat(optimizer.state_dict()["masters"]), trained)


@pytest.mark.parametrize("part", [masters.PART, 2000], ids=["at once", "in parts"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_offloaded_masters_take_same_steps(tiny_model, device, part, monkeypatch):
    monkeypatch.setattr(masters, "PART", part)
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    here, away = models = [load(tiny_model).to(device) for _ in range(2)]
    for model in models:
        model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight.detach().float())
    optimizers = [
        MasterOptimizer(groups_of(model), AdamW, offload=offload, lr=1e-3)
        for model, offload in zip(models, (False, True), strict=True)
    ]
    assert (len(optimizers[1]._parts) > 5) == (part == 2000) and len(optimizers[0]._parts) == 1
    for step in range(3):
        with torch.autocast(device, torch.bfloat16):
            backward(here, DATA[4 * step :][:4].to(device))
        next(here.parameters()).grad = None  # what has none stays as it is
        for parameter, other in zip(away.parameters(), here.parameters(), strict=True):
            parameter.grad = None if other.grad is None else other.grad.clone()
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            assert_rounded(model, optimizer)
    expected, found = (optimizer.state_dict()["masters"] for optimizer in optimizers)
    assert {master.device.type for master in found} == {"cpu"}
    assert not {id(master) for master in optimizers[1].inner.param_groups[0]["params"]} & set(
        map(id, away.parameters())
    )
    tolerance = {"cpu": 0.0, "cuda": 1e-6}[device]
    for master, one in zip(found, expected, strict=True):
        torch.testing.assert_close(master, one.cpu(), rtol=tolerance, atol=tolerance)


# --------------------------------------------------------------------------------- with the Trainer


class MasterTrainer(Trainer):
    """What a trainer has to do: name the optimizer, and wrap its training step."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        use_masters(self)

    def training_step(self, model, *args, **kwargs):
        with exact_gradients(self, model):
            return super().training_step(model, *args, **kwargs)


def make_trainer(model: Path, folder: Path, **settings) -> MasterTrainer:
    settings = {"max_steps": 6, "per_device_train_batch_size": 4, "learning_rate": 1e-4, **settings}
    args = TrainingArguments(
        str(folder),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
        seed=0,
        weight_decay=0.1,
        **settings,
    )
    return MasterTrainer(
        load(model), args, train_dataset=[{"input_ids": row, "labels": row} for row in DATA]
    )


def masters_of(trainer: MasterTrainer) -> MasterOptimizer:
    return trainer.optimizer.optimizer


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adafactor", "sgd"])
def test_resumed_run_ends_like_unbroken_one(tiny_model, tmp_path, optim):
    straight = make_trainer(tiny_model, tmp_path, optim=optim, save_steps=3)
    straight.train()
    resumed = make_trainer(tiny_model, tmp_path, optim=optim, save_strategy="no")
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    expected, state = masters_of(straight).state_dict(), masters_of(resumed).state_dict()
    assert all(
        torch.equal(*pair) for pair in zip(state["masters"], expected["masters"], strict=True)
    )
    torch.testing.assert_close(state["inner"], expected["inner"], rtol=0, atol=0)
    assert all(
        torch.equal(*pair)
        for pair in zip(resumed.model.parameters(), straight.model.parameters(), strict=True)
    )
    assert_rounded(resumed.model, masters_of(resumed))
    assert masters_of(straight).param_groups[0]["weight_decay"] == 0.1
    # as transformers groups them
    assert masters_of(straight).param_groups[1]["weight_decay"] == 0.0


def test_loading_rounds_masters_into_parameters(tiny_model):
    model = load(tiny_model)
    optimizer = MasterOptimizer(groups_of(model), AdamW, lr=1e-2)
    saved = {
        **optimizer.state_dict(),
        "masters": [master + 1 / 3 for master in optimizer.state_dict()["masters"]],
    }
    optimizer.load_state_dict(saved)
    assert_rounded(model, optimizer)
    assert all(
        torch.equal(*pair)
        for pair in zip(optimizer.state_dict()["masters"], saved["masters"], strict=True)
    )


def test_checkpoint_without_masters_is_taken_over(tiny_model, caplog):
    model = load(tiny_model)
    plain = AdamW(groups_of(model), lr=1e-2)
    backward(model, DATA[:4])
    plain.step()
    plain.zero_grad()
    optimizer = MasterOptimizer(groups_of(model), AdamW, lr=1e-3)
    optimizer.load_state_dict(plain.state_dict())
    assert "without fp32 master weights" in caplog.text
    assert optimizer.param_groups[0]["lr"] == 1e-2
    first = optimizer.inner.state[optimizer.inner.param_groups[0]["params"][0]]
    assert first["exp_avg"].dtype == torch.float32 and first["exp_avg"].any()
    assert_rounded(model, optimizer)


def test_checkpoint_of_other_model_is_wholly_refused(tiny_model):
    optimizer = MasterOptimizer(groups_of(load(tiny_model)), AdamW, lr=1e-2)
    before = flat(optimizer.state_dict()["masters"])
    saved = optimizer.state_dict()
    with pytest.raises(AtroposTrainingError, match=r"shape \[32, 256\].*\[256, 32\]|\[2, 2\]"):
        optimizer.load_state_dict({**saved, "masters": [torch.zeros(2, 2), *saved["masters"][1:]]})
    with pytest.raises(AtroposTrainingError, match="master weights of 1 parameters"):
        optimizer.load_state_dict({**saved, "masters": saved["masters"][:1]})
    assert torch.equal(flat(optimizer.state_dict()["masters"]), before)


def test_optimizers_unfit_for_masters_are_refused(tiny_model, tmp_path):
    model = load(tiny_model)
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    finished = Trainer(model, args, optimizers=(SGD(model.parameters(), lr=1.0), None))
    with pytest.raises(AtroposTrainingError, match="`optimizers` has a finished SGD"):
        use_masters(finished)
    layer_wise = Trainer(model, args, optimizer_cls_and_kwargs=(SGD, {"optimizer_dict": {}}))
    with pytest.raises(AtroposTrainingError, match="outside of `step`"):
        use_masters(layer_wise)

    class ScheduleFree(SGD):
        def eval(self):
            """Moves the weights to the average of those it has had."""

    schedule_free = Trainer(model, args, optimizer_cls_and_kwargs=(ScheduleFree, {}))
    with pytest.raises(AtroposTrainingError, match="outside of `step`"):
        use_masters(schedule_free)


# ------------------------------------------------------------------------------------ two processes

SUM_OF_FOUR = {"max_steps": 3, "optim": "sgd", "learning_rate": 0.05, "save_strategy": "no"}


def main(model: Path, folder: Path) -> None:
    """What each of the two processes does: two of the four micro-batches of each step."""
    reduce, reductions = MasterOptimizer.all_reduce_gradients, []
    MasterOptimizer.all_reduce_gradients = lambda optimizer: reductions.append(reduce(optimizer))
    trainer = make_trainer(model, folder / "two", gradient_accumulation_steps=2, **SUM_OF_FOUR)
    trainer.train()
    rank = trainer.accelerator.process_index
    optimizer, reductions_of_steps = masters_of(trainer), len(reductions)
    optimizer.zero_grad()
    one, other = optimizer.param_groups[0]["params"][:2]
    if rank == 0:  # as of an expert that no row of the other process came to
        one.grad = torch.ones_like(one, dtype=torch.float32)
    optimizer.all_reduce_gradients()
    norms = [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log]
    told = {
        "masters": optimizer.state_dict()["masters"],
        "norms": norms,
        "one-sided": (one.grad, other.grad),
        "reductions": reductions_of_steps,
        "wrapped": type(trainer.model_wrapped),
    }
    torch.save({**told, "wrapped": told["wrapped"].__name__}, folder / f"rank{rank}.pt")


@pytest.mark.slow
def test_two_processes_end_with_weights_of_one(tiny_model, tmp_path):
    launch_two(tmp_path, __name__, tiny_model)
    alone = make_trainer(tiny_model, tmp_path / "one", gradient_accumulation_steps=4, **SUM_OF_FOUR)
    alone.train()
    expected = flat(masters_of(alone).state_dict()["masters"])
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1)]
    assert [told["wrapped"] for told in ranks] == ["DistributedDataParallel"] * 2
    # not at every micro-batch
    assert [told["reductions"] for told in ranks] == [SUM_OF_FOUR["max_steps"]] * 2
    assert torch.equal(*(flat(told["masters"]) for told in ranks))
    for told in ranks:
        one, other = told["one-sided"]
        assert one.unique().tolist() == [0.5] and other is None
    moved = (expected - flat(load(tiny_model).parameters())).norm()
    assert (flat(ranks[0]["masters"]) - expected).norm() / moved < 1e-5
    norms = [log["grad_norm"] for log in alone.state.log_history if "grad_norm" in log]
    assert ranks[0]["norms"] == pytest.approx(norms, rel=1e-5)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
