"""A generation batch is the same on all ranks, and keeps what its training passes find."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.rollouts.conftest import make_group
from trl_atropos.batches.generation_batch import GenerationBatch
from trl_atropos.batches.schedule import BatchSchedule
from trl_atropos.rollouts.intake import Intake
from trl_atropos.rollouts.wire import parse_group


def settings(**fields: Any) -> SimpleNamespace:
    usual = {
        "seed": 1,
        "steps_per_generation": 1,
        "num_iterations": 1,
        "gradient_accumulation_steps": 1,
        "generation_batch_size": 8,
        "sp_size": 1,
        "scale_rewards": "group",
        "distillation_coef": 0.0,
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_min": None,
        "vllm_importance_sampling_clip_max": 2.0,
    }
    return SimpleNamespace(**usual | fields)


def batch_of_rank(rank: int, ranks: int, **fields: Any) -> GenerationBatch:
    intake = Intake(64, 1.0, "refuse")
    groups = [make_group(0, 1, 0, 1), make_group(1, 0, 0, 0)]
    rollouts = []
    for group in groups:
        usable, _ = intake.rollouts_of(parse_group(group), "0")
        rollouts += usable
    accelerator = SimpleNamespace(
        process_index=rank, num_processes=ranks, device=torch.device("cpu")
    )
    return GenerationBatch(rollouts, settings(**fields), accelerator, packs=None)


def test_ranks_share_rollouts_of_one_plan():
    batches = [batch_of_rank(rank, 2) for rank in (0, 1)]
    for batch in batches:
        batch.regroup(step=3, max_tokens=None)
    assert batches[0].plan == batches[1].plan
    scores = [[rollout.score for rollout in batch.rollouts] for batch in batches]
    assert scores[0] == scores[1]
    own = [batch.own_rollouts for batch in batches]
    assert [len(rollouts) for rollouts in own] == [4, 4]
    assert [rollout.score for rollouts in own for rollout in rollouts] == scores[0]


def test_training_pass_leaves_logprobs_and_ratio():
    batch = batch_of_rank(0, 1)
    ones = torch.ones(3, 2, dtype=torch.long)
    sampled = torch.full((3, 2), -1.0)
    masks = {"completion_mask": ones, "tool_mask": ones}
    batch.keep_scores_of_passes(masks | {"sampling_per_token_logps": sampled})
    rows = torch.tensor([2, 0])
    micro_batch = {name: mask[rows] for name, mask in masks.items()}
    micro_batch |= {"row_index": rows, "sampling_per_token_logps": sampled[rows]}
    logprobs = torch.tensor([[-1.0, 0.0], [-2.0, -1.0]])
    with batch.computing_loss_of(micro_batch):
        assert batch.current_micro_batch is micro_batch
        batch.correct(logprobs)
    assert batch.current_micro_batch is None
    found = batch.scores_of_passes["old_per_token_logps"]
    assert torch.equal(found, torch.tensor([[-2.0, -1.0], [0.0, 0.0], [-1.0, 0.0]]))
    ratio = micro_batch["importance_sampling_ratio"]  # e, bounded by 2, and 1 / e
    torch.testing.assert_close(ratio, torch.tensor([[1.0, 2.0], [1 / torch.e, 1.0]]))


def test_error_leaves_no_batch_marked_as_trained():
    batch = batch_of_rank(0, 1)
    with pytest.raises(ZeroDivisionError), batch.computing_loss_of({}):
        raise ZeroDivisionError
    assert batch.current_micro_batch is None


@pytest.mark.parametrize(
    ("fields", "steps", "unfinished", "consumed", "changes"),
    [
        ({}, 3, 0, 24, False),
        # four training steps a batch, two of which make an optimizer step
        ({"steps_per_generation": 4, "gradient_accumulation_steps": 2}, 2, 4, 8, True),
        # two batches for one optimizer step
        ({"steps_per_generation": 2, "gradient_accumulation_steps": 4}, 4, 0, 16, False),
        # in the second pass, all rollouts were trained on once
        ({"num_iterations": 2}, 1, 0, 8, True),
    ],
)
def test_schedule_counts_used_and_unfinished_rollouts(fields, steps, unfinished, consumed, changes):
    args = settings(**fields)
    schedule = BatchSchedule(args)
    assert schedule.unfinished_rollouts(steps) == unfinished
    assert schedule.consumed_rollouts(steps // args.gradient_accumulation_steps) == consumed
    assert schedule.changes_weights_within_batch is changes
