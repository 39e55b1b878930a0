import numpy as np
import pytest
import torch
from trl.trainer.utils import nanstd

from tests.rollouts.conftest import make_group
from trl_atropos.batches.inputs import advantage_tensor, logged_advantages, share_zero_variance
from trl_atropos.rollouts.intake import Intake
from trl_atropos.rollouts.rollout import Rollout, scalar_advantages
from trl_atropos.rollouts.wire import parse_group


def rows(group, single_row_groups="refuse") -> list[Rollout]:
    parsed = parse_group(group)
    rollouts, _ = Intake(64, 1.0, single_row_groups).rollouts_of(parsed, "0")
    return rollouts


def trl_advantages(rewards: torch.Tensor, num_generations: int, scale_rewards: str) -> torch.Tensor:
    """The operations of GRPOTrainer._generate_and_score_completions in TRL 1.16, in its order."""
    mean_grouped_rewards = torch.nanmean(rewards.view(-1, num_generations), dim=1)
    mean_grouped_rewards = mean_grouped_rewards.repeat_interleave(num_generations, dim=0)
    if scale_rewards in ["group", "none"]:
        std_rewards = nanstd(rewards.view(-1, num_generations), dim=1)
        std_rewards = std_rewards.repeat_interleave(num_generations, dim=0)
    else:
        std_rewards = nanstd(rewards).expand_as(rewards)
    advantages = rewards - mean_grouped_rewards
    if scale_rewards != "none":
        advantages = advantages / (std_rewards + 1e-4)
    return advantages


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
@pytest.mark.parametrize("num_generations", [2, 3, 8, 16, 37])
def test_advantages_of_uniform_groups_equal_trl(num_generations, scale_rewards):
    generator = torch.Generator().manual_seed(num_generations)
    scores = torch.randn(64, num_generations, generator=generator, dtype=torch.float64)
    batch = [row for group in scores.tolist() for row in rows(make_group(*group))]
    expected = trl_advantages(scores.float().view(-1), num_generations, scale_rewards)
    assert torch.equal(torch.from_numpy(scalar_advantages(batch, scale_rewards)), expected)


def test_groups_of_any_size_use_own_statistics():
    small, large = rows(make_group(0, 1)), rows(make_group(5, 6, 9, 2))
    apart = np.concatenate([scalar_advantages(small, "group"), scalar_advantages(large, "group")])
    assert np.array_equal(scalar_advantages(small + large, "group"), apart)


def test_zero_advantage_overrides_score():
    group = make_group(0, 1, overrides=[{}, {"set_advantage_to_zero": True}])
    first, second = scalar_advantages(rows(group), "group").tolist()
    assert first < 0 and second == 0.0


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_raw_group_of_one_gets_unscaled_score(scale_rewards):
    batch = rows(make_group(3), "raw") + rows(make_group(0, 1))
    assert scalar_advantages(batch, scale_rewards)[0] == 3.0


def test_zeroed_group_of_one_gets_nothing():
    assert scalar_advantages(rows(make_group(3), "zero"), "batch").tolist() == [0.0]


def test_row_advantages_give_rank_one_value_per_row():
    batch = rows(make_group(0, 1, 2, 3))
    expected = torch.from_numpy(scalar_advantages(batch, "group")[2:])
    assert torch.equal(advantage_tensor(batch, slice(2, 4), "group", 5), expected)


def test_token_advantages_on_one_rank_shape_all_ranks():
    with_tokens = rows(make_group(0, 1, advantages=[[0.0, 0.0, 0.5, -0.5], [0.0, 0.0, 1.5, 2.5]]))
    batch = with_tokens + rows(make_group(0, 1))
    plain = scalar_advantages(batch, "none")
    assert advantage_tensor(batch, slice(0, 2), "none", 3).tolist() == [
        [0.5, -0.5, 0.0],
        [1.5, 2.5, 0.0],
    ]
    assert advantage_tensor(batch, slice(2, 4), "none", 3).tolist() == [
        [plain[2].item()] * 2 + [0.0],
        [plain[3].item()] * 2 + [0.0],
    ]


def test_zero_advantage_overrides_token_advantages():
    group = make_group(
        0,
        1,
        advantages=[[0.0, 0.0, 0.5, -0.5]] * 2,
        overrides=[{"set_advantage_to_zero": True}, {}],
    )
    assert advantage_tensor(rows(group), slice(0, 2), "group", 2).tolist() == [
        [0.0, 0.0],
        [0.5, -0.5],
    ]


def test_logged_advantage_is_mean_of_trained_tokens():
    """The last but one is context between two turns, which nothing is learned from."""
    tokens = [[7, 8, 10, 11, 12], [7, 8, 10, 11]]
    masks = [[-100, -100, 10, -100, 12], [-100, -100, 10, 11]]
    advantages = [[0.0, 0.0, 1.0, 100.0, 3.0], [0.0, 0.0, 1.0, 2.0]]
    zeroed = {"overrides": [{}, {"set_advantage_to_zero": True}]}
    sent = {
        "tokens": tokens,
        "masks": masks,
        "advantages": advantages,
        "inference_logprobs": None,
    } | zeroed
    assert logged_advantages(rows(make_group(0, 1, **sent)), "none") == [2.0, 0.0]
    assert logged_advantages(rows(make_group(0, 1)), "none") == [-0.5, 0.5]


def test_share_zero_variance_counts_rows_not_groups():
    assert share_zero_variance(rows(make_group(1, 1)) + rows(make_group(0, 1, 2, 3, 4, 5))) == 0.25
