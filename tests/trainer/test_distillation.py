"""The distillation term is the formula: KL over a teacher's top k, renormalised, added to the loss
of any batch."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rollout_factory import Group, load_policy, make_group, make_trainer, step_logs
from tests.weights.architectures import FAMILIES, make_model
from trl_atropos.batches.inputs import top_k_divergence
from trl_atropos.rollouts.wire_values import MASKED

RATE = 0.1
STEP = {
    "optim": "sgd",
    "learning_rate": RATE,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
}
COEF = 0.7
VOCABULARY = 256


def taught(group: Group, seed: int, k: int = 5) -> Group:
    """The group with a teacher's top `k`, at some positions `k + 1`, as prompt log-probabilities
    have it: nothing for the first token."""
    rng = random.Random(seed)
    ids, logprobs = [], []
    for tokens in group["tokens"]:
        widths = [0] + [k + rng.randrange(2) for _ in tokens[1:]]
        ids.append([rng.sample(range(VOCABULARY), width) for width in widths])
        logprobs.append(
            [
                sorted((-rng.expovariate(0.5) for _ in range(width)), reverse=True)
                for width in widths
            ]
        )
    return group | {"distill_token_ids": ids, "distill_logprobs": logprobs}


def batch(model: Path, seed: int = 0) -> list[Group]:
    """16 rows of several turns; of every two groups one has a teacher, with a `k` of its own."""
    groups = [make_group(model, 4, 300 + 10 * seed + i, turns=1 + i % 3) for i in range(4)]
    return [taught(groups[0], seed), groups[1], taught(groups[2], seed + 1, k=3), groups[3]]


def divergence(model: torch.nn.Module, groups: list[Group]) -> tuple[torch.Tensor, int]:
    """The mean over the trained tokens that have a teacher, token by token, and their number."""
    terms = []
    for group in groups:
        if "distill_token_ids" not in group:
            continue
        for i, (tokens, mask) in enumerate(zip(group["tokens"], group["masks"])):
            logits = model(torch.tensor([tokens])).logits[0]
            for position in range(1, len(tokens)):
                ids, values = (
                    group[name][i][position] for name in ("distill_token_ids", "distill_logprobs")
                )
                if mask[position] != MASKED and ids:
                    student = logits[position - 1, ids].double().softmax(0)
                    teacher = torch.tensor(values, dtype=torch.float64).softmax(0)
                    terms.append((teacher * (teacher / student).log()).sum())
    return torch.stack(terms).mean(), len(terms)


def step(
    model: Path, folder: Path, groups: list[Group], **settings: Any
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The gradient that one step of plain descent followed, and what it logged."""
    folder.mkdir(exist_ok=True)
    trainer = make_trainer(
        model, folder, groups, **{"per_device_train_batch_size": 16} | STEP | settings
    )
    trainer.train()
    steps = zip(load_policy(model).parameters(), trainer.model.parameters(), strict=True)
    gradient = torch.cat([((before - after) / RATE).detach().flatten() for before, after in steps])
    return gradient, step_logs(trainer)[0]


def compare(model: Path, folder: Path, groups: list[Group], **settings: Any) -> None:
    """Checks that the term adds `COEF` times the formula to the loss, and its gradient to the
    gradient."""
    without, plain = step(model, folder / "without", groups, **settings)
    with_term, log = step(model, folder / "with", groups, distillation_coef=COEF, **settings)
    value, _ = divergence(load_policy(model), groups)
    gradients = torch.autograd.grad(value, list(load_policy(model).parameters()))
    expected = COEF * torch.cat([gradient.flatten() for gradient in gradients])
    assert expected.norm() > 0.05
    assert (with_term - without - expected).norm() < 1e-4 * expected.norm()
    assert log["loss"] - plain["loss"] == pytest.approx(COEF * value.item(), rel=1e-5)
    assert log["distillation/kl"] == pytest.approx(value.item(), rel=1e-5)


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo", "vespo"])
def test_term_and_gradient_equal_formula(tiny_model, tmp_path, loss_type):
    compare(tiny_model, tmp_path, batch(tiny_model), loss_type=loss_type)


@pytest.mark.parametrize("padding_free", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("name", ["GPT-2", "OPT", "Ministral"])
def test_term_has_positions_of_each_rollout_alone(tmp_path, name, padding_free):
    """Learned ones (GPT-2), learned ones that begin at 2 (OPT), and a window (Ministral)."""
    folder = tmp_path / "model"
    make_model(FAMILIES[name], folder)
    # whose prompts differ in length
    groups = [taught(make_group(folder, 4, 300 + i), i) for i in range(4)]
    compare(folder, tmp_path, groups, padding_free=padding_free)


@pytest.mark.parametrize("padding_free", [True, False], ids=["packed", "padded"])
def test_every_pass_restarts_positions_per_rollout(tmp_path, padding_free):
    """The passes that train, those that score for later steps, of the reference model, and of the
    teacher's term."""
    folder = tmp_path / "model"
    make_model(FAMILIES["GPT-2"], folder)
    several = {
        "num_iterations": 2,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 2,
        "max_steps": 2,
    }
    settings = several | {"per_device_train_batch_size": 8, "beta": 0.1, "distillation_coef": COEF}
    trainer = make_trainer(folder, tmp_path, batch(folder), padding_free=padding_free, **settings)
    passes = {"policy": 0, "reference": 0}

    def watch(name: str, model: torch.nn.Module) -> None:
        def positions(module, inputs, options):
            mask = options.get("attention_mask")
            rows = inputs[0] if inputs else options["input_ids"]
            places = options.get("position_ids")
            passes[name] += 1
            if places is None:
                assert mask is None or bool(mask[:, 0].all()), "a row begins with padding"
            else:
                assert rows.size(0) == 1 and int((places == 0).sum()) > 1, (
                    "rollouts that share a row"
                )

        model.transformer.register_forward_pre_hook(positions, with_kwargs=True)

    watch("policy", trainer.model)
    watch("reference", trainer.ref_model)
    trainer.train()
    assert passes["policy"] > 8 and passes["reference"] > 0


def test_term_is_always_at_temperature_1(tiny_model, tmp_path):
    compare(tiny_model, tmp_path, batch(tiny_model), temperature=0.6)


def test_accumulated_term_equals_whole_batch_term(tiny_model, tmp_path):
    accumulated = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
    _, log = step(tiny_model, tmp_path / "plain", batch(tiny_model), **accumulated)
    gradient, summed = step(
        tiny_model, tmp_path / "sum", batch(tiny_model), distillation_coef=COEF, **accumulated
    )
    whole, of_whole = step(
        tiny_model, tmp_path / "whole", batch(tiny_model), distillation_coef=COEF
    )
    assert (gradient - whole).norm() < 1e-4 * whole.norm()
    assert summed["loss"] == pytest.approx(of_whole["loss"], rel=1e-5)
    assert abs(summed["loss"] - log["loss"]) > 0.1


def divergence_of(logits: torch.Tensor, ids: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """From all logits, `(..., V)`."""
    return top_k_divergence(logits.gather(-1, ids.clamp(min=0)), ids, teacher)


def test_gradient_matches_finite_differences():
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 20, requires_grad=True)
    ids = torch.stack([torch.randperm(20)[:4] for _ in range(6)]).view(2, 3, 4)
    ids[0, 1, 3] = ids[1, 2, 0] = ids[1, 2, 1] = -1
    teacher = torch.randn(2, 3, 4)
    divergence_of(logits, ids, teacher).sum().backward()
    for place in ((0, 1, int(ids[0, 1, 0])), (1, 2, int(ids[1, 2, 2])), (1, 0, int(ids[1, 0, 1]))):
        nudge = torch.zeros_like(logits)
        nudge[place] = 1e-2
        up, down = (
            divergence_of(logits.detach() + sign * nudge, ids, teacher).sum() for sign in (1, -1)
        )
        assert logits.grad[place].item() == pytest.approx((up - down).item() / 2e-2, abs=1e-3)
    assert logits.grad[0, 1].count_nonzero() == 3  # only the teacher's tokens


def test_student_agreeing_on_top_k_is_not_moved():
    logits = torch.randn(1, 4, 20, requires_grad=True)
    values, ids = logits.detach().log_softmax(-1).topk(6)
    divergences = divergence_of(logits, ids, values)
    divergences.sum().backward()
    assert divergences.abs().max() < 1e-6 and logits.grad.abs().max() < 1e-6


def test_position_without_teacher_adds_nothing():
    logits = torch.randn(1, 2, 20, requires_grad=True)
    divergences = divergence_of(logits, torch.full((1, 2, 3), -1), torch.full((1, 2, 3), -1e9))
    divergences.sum().backward()
    assert divergences.tolist() == [[0.0, 0.0]] and logits.grad.count_nonzero() == 0


def forwards(model: Path, folder: Path, groups: list[Group], coef: float) -> int:
    """How often one step calls the model."""
    folder.mkdir(exist_ok=True)
    trainer = make_trainer(
        model, folder, groups, per_device_train_batch_size=16, distillation_coef=coef
    )
    calls: list[None] = []
    trainer.model.register_forward_hook(lambda *_: calls.append(None))
    trainer.train()
    return len(calls)


def test_extra_forward_needs_coefficient_and_teacher(tiny_model, tmp_path):
    untaught = [make_group(tiny_model, 4, i) for i in range(4)]
    usual = forwards(tiny_model, tmp_path / "plain", untaught, 0.0)
    assert forwards(tiny_model, tmp_path / "off", batch(tiny_model), 0.0) == usual
    assert forwards(tiny_model, tmp_path / "untaught", untaught, COEF) == usual
    assert forwards(tiny_model, tmp_path / "on", batch(tiny_model), COEF) == usual + 1


def test_rows_without_advantage_follow_teacher(tiny_model, tmp_path):
    groups = [
        taught(make_group(tiny_model, 8, 5, overrides=[{"set_advantage_to_zero": True}] * 8), 1)
    ] * 2
    compare(tiny_model, tmp_path, groups)


def test_steps_bring_policy_to_teacher(tiny_model, tmp_path):
    groups = [taught(make_group(tiny_model, 8, 5, scores=[0.5] * 8), 1)] * 2
    trainer = make_trainer(
        tiny_model,
        tmp_path,
        *[groups] * 30,
        max_steps=30,
        per_device_train_batch_size=16,
        distillation_coef=1.0,
    )
    trainer.train()
    told = [log["distillation/kl"] for log in step_logs(trainer)]
    assert told[-1] < 0.5 * told[0]
