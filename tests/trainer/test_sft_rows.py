"""Rows with the `sft` override are trained as supervised: the step is that of cross-entropy on
their tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rollout_factory import Group, load_policy, make_group, make_trainer, step_logs
from trl_atropos.rollouts.wire_values import MASKED

SFT = {"group_overrides": {"sft": True}}
LONGEST = 16  # `max_completion_length`, by which dr_grpo divides
RATE = 0.1
STEP = {
    "optim": "sgd",
    "learning_rate": RATE,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
}


def gradient_of_training(
    model: Path, folder: Path, groups: list[Group], **settings: Any
) -> torch.Tensor:
    """What one step of plain gradient descent on `groups` took away from the weights, over its
    rate."""
    rows = sum(len(group["tokens"]) for group in groups)
    folder.mkdir(exist_ok=True)
    trainer = make_trainer(
        model,
        folder,
        groups,
        **{"per_device_train_batch_size": rows, "max_completion_length": LONGEST} | STEP | settings,
    )
    trainer.train()
    steps = zip(load_policy(model).parameters(), trainer.model.parameters(), strict=True)
    return torch.cat([((before - after) / RATE).detach().flatten() for before, after in steps])


def likelihoods(model: Path, groups: list[Group], temperature: float = 1.0) -> list[torch.Tensor]:
    """The log-likelihoods of the trained tokens of every sequence."""
    found = []
    for group in groups:
        for tokens, mask in zip(group["tokens"], group["masks"]):
            logits = load_policy(model)(torch.tensor([tokens])).logits[0, :-1] / temperature
            of_tokens = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
            found.append(of_tokens[torch.tensor(mask[1:]) != MASKED])
    return found


MEANS: dict[str, Callable[[list[torch.Tensor]], torch.Tensor]] = {
    "grpo": lambda found: torch.stack([of_row.mean() for of_row in found]).mean(),
    "dr_grpo": lambda found: torch.cat(found).sum() / (len(found) * LONGEST),
    "dapo": lambda found: torch.cat(found).mean(),
    "bnpo": lambda found: torch.cat(found).mean(),
}


def gradient_of_cross_entropy(
    model: Path, groups: list[Group], loss_type: str, **options: Any
) -> torch.Tensor:
    loss = -MEANS[loss_type](likelihoods(model, groups, **options))
    gradients = torch.autograd.grad(loss, list(load_policy(model).parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients])


def assert_same(gradient: torch.Tensor, expected: torch.Tensor) -> None:
    assert expected.norm() > 0.1
    assert (gradient - expected).norm() < 1e-4 * expected.norm()


def supervised(model: Path) -> list[Group]:
    """With log-probabilities and scores as of a rollout, which must not matter."""
    return [
        make_group(model, size, 40 + size, turns=turns, **SFT) for size, turns in ((6, 1), (2, 3))
    ]


@pytest.mark.parametrize("loss_type", MEANS)
def test_supervised_batch_has_cross_entropy_gradient(tiny_model, tmp_path, loss_type):
    groups = supervised(tiny_model)
    gradient = gradient_of_training(tiny_model, tmp_path, groups, loss_type=loss_type)
    assert_same(gradient, gradient_of_cross_entropy(tiny_model, groups, loss_type))


@pytest.mark.parametrize("mode", ["token_mask", "sequence_mask", "sequence_truncate", "off"])
def test_supervised_rows_escape_sampler_correction(tiny_model, tmp_path, mode):
    groups = supervised(tiny_model)
    settings = {"vllm_importance_sampling_mode": mode} if mode != "off" else {}
    gradient = gradient_of_training(
        tiny_model, tmp_path, groups, vllm_importance_sampling_correction=mode != "off", **settings
    )
    assert_same(gradient, gradient_of_cross_entropy(tiny_model, groups, "dapo"))


def test_likelihood_is_at_temperature_of_run(tiny_model, tmp_path):
    groups = supervised(tiny_model)
    gradient = gradient_of_training(tiny_model, tmp_path, groups, temperature=0.6)
    assert_same(gradient, gradient_of_cross_entropy(tiny_model, groups, "dapo", temperature=0.6))


def test_single_rows_of_group_may_be_supervised(tiny_model, tmp_path):
    """The others of the group are left without an advantage, so that the step is that of the
    supervised ones."""
    group = make_group(tiny_model, 4, 7)
    mixed = group | {
        "overrides": [{"sft": i in (1, 2), "set_advantage_to_zero": i in (0, 3)} for i in range(4)]
    }
    only = {name: group[name][1:3] for name in ("tokens", "masks")}
    gradient = gradient_of_training(tiny_model, tmp_path, [mixed], loss_type="dr_grpo")
    assert_same(2 * gradient, gradient_of_cross_entropy(tiny_model, [only], "dr_grpo"))


def test_supervised_group_of_one_needs_no_setting(tiny_model, tmp_path):
    groups = [make_group(tiny_model, 1, 50 + i, **SFT) for i in range(4)]
    gradient = gradient_of_training(tiny_model, tmp_path, groups)
    assert_same(gradient, gradient_of_cross_entropy(tiny_model, groups, "dapo"))


def test_advantages_of_supervised_row_are_ignored(tiny_model, tmp_path):
    groups = [make_group(tiny_model, 8, 60, token_advantages=True, **SFT)]
    gradient = gradient_of_training(tiny_model, tmp_path, groups)
    assert_same(gradient, gradient_of_cross_entropy(tiny_model, groups, "dapo"))


def test_zeroed_supervised_row_is_not_trained(tiny_model, tmp_path):
    groups = [
        make_group(tiny_model, 8, 1, group_overrides={"sft": True, "set_advantage_to_zero": True})
    ]
    trainer = make_trainer(tiny_model, tmp_path, groups)
    trainer.train()
    assert step_logs(trainer)[0]["grad_norm"] == 0.0


@pytest.mark.parametrize("loss_type", ["dr_grpo", "grpo"])
def test_supervised_and_other_rows_add_up(tiny_model, tmp_path, loss_type):
    """Both losses are means over rows, so that the gradient of a batch is the mean of its
    halves'."""
    halves = [[make_group(tiny_model, 4, 70, turns=2, **SFT)], [make_group(tiny_model, 4, 71)]]
    first, second, both = (
        gradient_of_training(tiny_model, tmp_path / str(i), groups, loss_type=loss_type)
        for i, groups in enumerate([*halves, halves[0] + halves[1]])
    )
    assert_same(both, (first + second) / 2)
