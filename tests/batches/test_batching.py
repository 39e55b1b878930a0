"""Which rows share a micro-batch and a rank: as many tokens everywhere, little padding, and the
same gradients."""

from collections import Counter, deque

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from tests.rollout_factory import (
    AsDrawnConfig,
    make_group,
    make_rollout,
    make_trainer,
    step_logs,
    uniform_batch,
)
from trl_atropos.batches.micro_batches import (
    FIRST_TOKENS,
    MOST_TOKENS,
    SHARE,
    TokenBudget,
    lengths_of,
    plan,
    tokens_that_fit,
    trim,
    without_padding,
)
from trl_atropos.batches.sharing import BatchTokens
from trl_atropos.config import LOSS_TYPES

ADDS_UP = [name for name in LOSS_TYPES if name != "bnpo"]


def spread(generator: np.random.Generator, number: int) -> np.ndarray:
    """Lengths as completions have them: log-normal, sigma 1, after prompts of 32 tokens."""
    return 32 + np.rint(np.exp(generator.normal(np.log(256), 1, number))).astype(int)


def tokens(lengths: np.ndarray, a_plan, rank: int, ranks: int = 1) -> tuple[int, int]:
    """Of one rank: worked on, padding included, and useful."""
    local = len(lengths) // ranks
    rows = lengths[a_plan.order][rank * local : (rank + 1) * local]
    micro_batches = [rows[part] for step in a_plan.micro_batches() for part in step]
    return sum(one.max() * len(one) for one in micro_batches), int(rows.sum())


@pytest.mark.parametrize("max_tokens", [None, 700, 3000])
@pytest.mark.parametrize(
    ("ranks", "steps", "together"), [(1, 1, 1), (1, 8, 8), (4, 2, 2), (3, 6, 2), (2, 4, 1)]
)
def test_plan_has_each_row_once_and_equal_ranks(ranks, steps, together, max_tokens):
    generator = np.random.default_rng(0)
    lengths = spread(generator, ranks * steps * 8)
    a_plan = plan(lengths, ranks, steps, together, max_tokens, seed=1)
    assert sorted(a_plan.order) == list(range(len(lengths)))
    assert [sum(step) for step in a_plan.sizes] == [8] * steps
    parts = [part for step in a_plan.micro_batches() for part in step]
    assert [index for part in parts for index in range(part.start, part.stop)] == list(
        range(steps * 8)
    )
    if max_tokens is None:
        assert a_plan.sizes == [[8]] * steps
        return
    for rank in range(ranks):
        rows = lengths[a_plan.order][rank * steps * 8 :]
        assert all(
            len(rows[part]) == 1 or len(rows[part]) * rows[part].max() <= max_tokens
            for part in parts
        )


def test_logs_return_to_order_of_arrival():
    a_plan = plan([5, 9, 1, 7], 2, 1, 1)
    assert a_plan.order != [0, 1, 2, 3]
    column = deque(["from before", *(f"row {index}" for index in a_plan.order)], maxlen=5)
    a_plan.undo(column)
    assert list(column) == ["from before", "row 0", "row 1", "row 2", "row 3"]


def test_step_of_row_is_drawn_regardless_of_length():
    lengths = np.arange(1, 65)
    means = [
        lengths[plan(lengths, 1, 8, 2, seed=seed).order].reshape(4, 16).mean(1)
        for seed in range(50)
    ]
    assert len({tuple(mean) for mean in means}) == 50
    # with 2 as the standard error; sorted, it were 24
    assert np.abs(np.mean(means, 0) - lengths.mean()).max() < 3
    assert plan(lengths, 1, 8, 2, seed=3) == plan(lengths, 1, 8, 2, seed=3)


def test_order_is_drawn_anew_per_batch_and_seed(tiny_model, tmp_path):
    # the same one each time, so that only the draw can differ
    batch = uniform_batch(tiny_model, 4, 4, 0)

    def orders(folder: str, **settings) -> list[list[int]]:
        trainer = make_trainer(
            tiny_model, tmp_path / folder, batch, batch, steps_per_generation=2, **settings
        )
        drawn = []

        class Draws(TrainerCallback):
            def on_step_end(self, *_, **__):
                drawn.append(trainer._batch.plan.order)

        trainer.add_callback(Draws())
        trainer.train()
        return drawn

    first, same, second = orders("one", max_steps=3, seed=1)
    assert first == same != second
    assert [first] != orders("other", max_steps=1, seed=2)


def test_rows_of_like_length_leave_little_padding():
    """TRL works on 7 tokens for each useful one of this spread."""
    generator = np.random.default_rng(0)
    batches = [spread(generator, 64) for _ in range(200)]
    padded = np.mean([len(lengths) * lengths.max() / lengths.sum() for lengths in batches])
    fixed, budget = (
        np.mean([np.divide(*tokens(lengths, plan(lengths, 1, *shape), 0)) for lengths in batches])
        for shape in ((8, 8, None), (1, 1, 4096))
    )
    assert padded > 5
    assert fixed < 1.65
    assert budget < 1.1


def groups_with_prompts(*lengths: int) -> BatchTokens:
    """Three groups, each with a prompt of 12 tokens, whose rollouts came in turns."""
    rollouts = []
    for number, length in enumerate(lengths):
        group = number % 3
        prompt = np.full(12, group, np.int32)
        completion = np.full(length, 100 + number, np.int32)
        rollout = make_rollout(prompt, completion, group=group)
        rollouts.append(rollout)
    return BatchTokens(rollouts, shares=True)


@pytest.mark.parametrize("ranks", [1, 3])
def test_groups_stay_together_if_they_share(ranks):
    sharing = groups_with_prompts(5, 30, 6, 31, 7, 32)
    assert sharing.lengths.tolist() == [17, 42, 18, 43, 19, 44]
    a_plan = plan(sharing.lengths, ranks, 1, 1, packed=True, sharing=sharing)
    pairs = np.array(a_plan.order).reshape(3, 2).tolist()
    assert sorted(pairs) == [[0, 3], [1, 4], [2, 5]]


def test_group_is_divided_if_no_rank_has_room():
    sharing = groups_with_prompts(5, 5, 5, 5, 5, 5)
    a_plan = plan(sharing.lengths, 2, 1, 1, packed=True, sharing=sharing)
    assert sorted(a_plan.order) == list(range(6))
    groups = sharing.groups[a_plan.order].reshape(2, 3).tolist()
    assert all(hand == sorted(hand) for hand in groups)
    assert [len(set(hand)) for hand in groups] == [2, 2]


def test_shared_tokens_count_once_in_micro_batch():
    """Each group takes 12 + 5 tokens, and 1 + 5 more: the last token of a prompt stands twice."""
    sharing = groups_with_prompts(5, 5, 5, 5, 5, 5)
    sizes = plan(sharing.lengths, 1, 1, 1, 23, packed=True, sharing=sharing).sizes
    assert sizes == [[2, 2, 2]]
    sizes = plan(sharing.lengths, 1, 1, 1, 22, packed=True, sharing=sharing).sizes
    assert sizes == [[1] * 6]
    assert plan(sharing.lengths, 1, 1, 1, 23, packed=True).sizes == [[1] * 6]


def test_further_micro_batch_must_save_its_cost():
    assert plan([100, 99, 98, 97], 1, 1, 1, max_tokens=1600).sizes == [[4]]
    assert plan([400, 10, 10, 10], 1, 1, 1, max_tokens=1600).sizes == [[1, 3]]
    # It costs 1600 / 16 = 100 tokens. Here it would save 3 * 30, and then 3 * 35.
    assert plan([400, 370, 370, 370], 1, 1, 1, max_tokens=1600).sizes == [[4]]
    assert plan([400, 365, 365, 365], 1, 1, 1, max_tokens=1600).sizes == [[1, 3]]


def test_packed_rollouts_fill_micro_batch():
    """Padded, nothing fits beside one of 300 tokens; packed, whatever adds up to the bound."""
    lengths = [300, 100, 100, 100, 100, 100]
    assert plan(lengths, 1, 1, 1, max_tokens=400).sizes in ([[1, 4, 1]], [[1, 1, 4]])
    assert plan(lengths, 1, 1, 1, max_tokens=400, packed=True).sizes == [[2, 4]]
    assert plan([500, 10, 10], 1, 1, 1, max_tokens=400, packed=True).sizes == [[1, 2]]


def test_micro_batch_size_follows_gpu_memory():
    gib = 1 << 30
    assert tokens_that_fit(10 * gib, per_token=1 << 20) == 6144  # 60 % of it
    assert tokens_that_fit(10 * gib, per_token=1 << 10) == MOST_TOKENS
    assert tokens_that_fit(gib, per_token=1 << 20) == FIRST_TOKENS  # that have been seen to fit
    assert (
        tokens_that_fit(10 * gib, per_token=0.0) == FIRST_TOKENS
    )  # too few micro-batches to measure one


def test_server_memory_is_not_for_micro_batches(monkeypatch):
    """Of 80 GB, the server takes 30 and the trainer 10, of which it uses 8, and it may have 46: so
    46 - 8 are left."""
    gib = 1 << 30
    told = {
        "mem_get_info": (40 * gib, 80 * gib),
        "memory_reserved": 10 * gib,
        "memory_allocated": 8 * gib,
    }
    told |= {"get_per_process_memory_fraction": 46 / 80, "empty_cache": None}
    for name, value in told.items():
        monkeypatch.setattr(torch.cuda, name, lambda *device, value=value: value)
    budget = TokenBudget(torch.device("cpu"), gradients=2 * gib)
    assert budget.of_next_batch(gather=lambda tokens: tokens) == FIRST_TOKENS
    budget._per_token = 4 << 20
    assert budget.of_next_batch(gather=lambda tokens: tokens) == int(SHARE * 36 * 256)


def test_largest_need_and_poorest_rank_set_budget(monkeypatch):
    """Two micro-batches of 1,000 tokens take 4 and 1 MiB each, on top of the 1 GiB that was
    allocated before."""
    gib, mib = 1 << 30, 1 << 20
    calls: list[str] = []
    peaks: list[int] = []
    told = {"mem_get_info": (40 * gib, 80 * gib), "memory_reserved": gib, "memory_allocated": gib}
    told |= {"get_per_process_memory_fraction": 1.0, "empty_cache": None}
    for name, value in told.items():
        monkeypatch.setattr(torch.cuda, name, lambda *device, value=value: value)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peaks.pop(0))
    budgets = []
    for other_rank in (10_000, 5000):
        budget = TokenBudget(torch.device("cpu"), gradients=0)
        assert budget.of_next_batch(gather=lambda tokens: tokens) == FIRST_TOKENS
        peaks += [gib + 4000 * mib, gib + 1000 * mib]
        for _ in range(2):
            with budget.measured(1000):
                calls.append("forward and backward")
        budgets.append(
            budget.of_next_batch(
                lambda tokens, other=other_rank: torch.cat([tokens, tokens * 0 + other])
            )
        )
    assert budgets == [int(SHARE * 40 * 256), 5000]
    # or an earlier peak would be taken for this one's
    assert calls == ["reset", "forward and backward"] * 4


def test_eight_ranks_get_nearly_equal_tokens():
    generator = np.random.default_rng(0)
    excess = {"ours": [], "trl": []}
    for _ in range(200):
        lengths = spread(generator, 8 * 64)
        loads = {
            "ours": np.array(
                [tokens(lengths, plan(lengths, 8, 8, 8), rank, 8)[1] for rank in range(8)]
            ),
            "trl": lengths.reshape(8, 64).sum(1),
        }
        for name, load in loads.items():
            excess[name].append(load.max() / load.mean() - 1)
    assert np.median(excess["ours"]) < 0.05 < np.median(excess["trl"])


# ------------------------------------------------------------------------------------------ tensors


def padded_batch(prompts: list[int], completions: list[int]) -> dict[str, torch.Tensor]:
    """TRL's tensors for rows of these lengths; every token has an id of its own, padding has 0."""
    P, C = max(prompts), max(completions)
    ids = torch.arange(1, len(prompts) * (P + C) + 1).reshape(len(prompts), P + C)
    prompt_mask = torch.tensor([[0] * (P - length) + [1] * length for length in prompts])
    completion_mask = torch.tensor([[1] * length + [0] * (C - length) for length in completions])
    return {
        "prompt_ids": ids[:, :P] * prompt_mask,
        "prompt_mask": prompt_mask,
        "completion_ids": ids[:, P:] * completion_mask,
        "completion_mask": completion_mask,
        "advantages": torch.arange(len(prompts)).float(),
        "importance_sampling_ratio": torch.ones(len(prompts), 1),
        "distill_ids": ids[:, P:, None].expand(-1, -1, 3),
        "num_items_in_batch": torch.tensor(7),
    }


def test_trimming_removes_only_common_padding():
    whole = padded_batch([5, 2, 3], [4, 9, 1])
    rows = torch.tensor([1, 2])
    batch = {name: value[rows] if value.ndim else value for name, value in whole.items()}
    trimmed = trim(batch, lengths_of(batch))
    assert {name: tuple(value.shape) for name, value in trimmed.items()} == {
        "prompt_ids": (2, 3), "prompt_mask": (2, 3), "completion_ids": (2, 9), "completion_mask": (2, 9),
        "advantages": (2,), "importance_sampling_ratio": (2, 1), "distill_ids": (2, 9, 3), "num_items_in_batch": (),
    }  # fmt: skip
    for ids, mask in (("prompt_ids", "prompt_mask"), ("completion_ids", "completion_mask")):
        assert torch.equal(trimmed[ids][trimmed[mask].bool()], batch[ids][batch[mask].bool()])
    assert trim(batch, lengths_of(batch), multiple=4)["prompt_ids"].shape == (2, 4)
    # no wider than it was
    assert trim(batch, lengths_of(batch), multiple=8)["prompt_ids"].shape == (2, 5)
    masked = {**batch, "completion_mask": torch.zeros_like(batch["completion_mask"])}
    nothing = trim(masked, lengths_of(masked))
    assert nothing["completion_ids"].shape == (2, 1)


def test_unpadded_forward_returns_scores_to_tokens():
    batch = padded_batch([5, 2, 3, 1], [4, 9, 1, 2])
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    seen = []

    def forward(input_ids, attention_mask, logits_to_keep):
        seen.append((tuple(input_ids.shape), logits_to_keep))
        for row, row_mask in zip(input_ids, attention_mask):
            assert row_mask.tolist() == sorted(row_mask.tolist(), reverse=True)
            assert (row[row_mask.bool()] > 0).all()
        scores = (input_ids * attention_mask)[:, -logits_to_keep:].float()
        return scores, -scores, torch.tensor(float(len(seen)))

    scores, entropies, loss = without_padding(forward, ids, mask, 9, [slice(0, 2), slice(2, 4)])
    assert torch.equal(scores, batch["completion_ids"].float())
    assert torch.equal(entropies, -scores)
    assert loss == 1.5
    assert seen == [((2, 11), 9), ((2, 4), 3)]
    seen.clear()
    scores, _, _ = without_padding(forward, ids, mask, 9, [slice(0, 2), slice(2, 4)], multiple=8)
    assert torch.equal(scores, batch["completion_ids"].float())
    assert [shape for shape, _ in seen] == [(2, 16), (2, 8)]


@pytest.mark.parametrize("empty", [[0, 1], [0]])
def test_fully_masked_completion_is_not_scored(empty):
    batch = padded_batch([3, 3], [4, 2])
    batch["completion_mask"][empty] = 0
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    scores, _, _ = without_padding(
        lambda ids, mask, keep: (ids[:, -keep:].float(), None, None), ids, mask, 4, [slice(0, 2)]
    )
    assert torch.equal(scores, (batch["completion_ids"] * batch["completion_mask"]).float())


# ----------------------------------------------------------------------------------------- training


def batches_of(model):
    return [uniform_batch(model, 4, 4, seed, logprobs="some") for seed in range(3)]


def train(model, folder, **settings) -> tuple[list[tuple[float, float]], list]:
    """Loss and gradient norm of each step, and the shapes that the model was given in training."""
    trainer = make_trainer(model, folder, *batches_of(model), max_steps=3, **settings)
    shapes = []
    trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: (
            shapes.append(tuple(kwargs["input_ids"].shape)) if torch.is_grad_enabled() else None
        ),
        with_kwargs=True,
    )
    trainer.train()
    return [(entry["loss"], entry["grad_norm"]) for entry in step_logs(trainer)], shapes


def test_token_means_weigh_all_tokens_equally(tiny_model, tmp_path):
    # of two lengths
    batch = [make_group(tiny_model, 4, seed, turns=1 + 3 * (seed % 2)) for seed in range(4)]
    logs = []
    for name, settings in {
        "whole": {"per_device_train_batch_size": 16, "config_class": AsDrawnConfig},
        "parts": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4},
    }.items():
        trainer = make_trainer(
            tiny_model, tmp_path / name, batch, beta=0.05, max_steps=1, **settings
        )
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.mul_(1.5)  # so that tokens differ, and the policy from its reference
        trainer.train()
        logs.append(
            {
                key: step_logs(trainer)[0][key]
                for key in ("loss", "entropy", "kl", "clip_ratio/region_mean")
            }
        )
    assert logs[1] == pytest.approx(logs[0], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("loss_type", ADDS_UP)
def test_micro_batches_by_tokens_take_same_steps(tiny_model, tmp_path, loss_type):
    settings = {"loss_type": loss_type, "beta": 0.05, "per_device_train_batch_size": 16}
    padded = settings | {"padding_free": False}
    expected, whole = train(tiny_model, tmp_path / "whole", config_class=AsDrawnConfig, **padded)
    steps, parts = train(tiny_model, tmp_path / "parts", max_tokens_per_micro_batch=64, **padded)
    assert steps == [pytest.approx(step, rel=1e-4, abs=1e-6) for step in expected]
    assert [rows for rows, _ in whole] == [16] * 3
    assert len(parts) > 6
    assert all(rows * width <= 64 or rows == 1 for rows, width in parts)
    assert sum(rows for rows, _ in parts) == 48

    steps, packed = train(
        tiny_model, tmp_path / "packed", max_tokens_per_micro_batch=64, **settings
    )
    assert steps == [pytest.approx(step, rel=1e-4, abs=1e-6) for step in expected]
    assert {rows for rows, _ in packed} == {1}
    assert len(packed) < len(parts)
    useful = sum(width for _, width in packed)
    assert useful < sum(rows * width for rows, width in parts)
    assert useful / 64 <= len(packed)


def test_grouping_rows_by_length_takes_same_steps(tiny_model, tmp_path):
    settings = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "padding_free": False,
    }
    expected, drawn = train(tiny_model, tmp_path / "drawn", config_class=AsDrawnConfig, **settings)
    steps, grouped = train(tiny_model, tmp_path / "grouped", **settings)
    assert steps == [pytest.approx(step, rel=1e-4, abs=1e-6) for step in expected]
    assert Counter(rows for rows, _ in grouped) == Counter(rows for rows, _ in drawn) == {4: 12}
    assert sum(rows * width for rows, width in grouped) < sum(rows * width for rows, width in drawn)


def test_bnpo_keeps_micro_batches_of_trl(tiny_model, tmp_path):
    settings = {
        "loss_type": "bnpo",
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
    }
    drawn, _ = train(tiny_model, tmp_path / "drawn", config_class=AsDrawnConfig, **settings)
    assert train(tiny_model, tmp_path / "usual", **settings)[0] == drawn


def test_rollout_beyond_token_limit_is_trained(tiny_model, tmp_path):
    batch = [make_group(tiny_model, 4, 0, turns=1), make_group(tiny_model, 4, 1, turns=3)]
    longest = max(len(row) for group in batch for row in group["tokens"])
    trainer = make_trainer(
        tiny_model,
        tmp_path,
        batch,
        per_device_train_batch_size=8,
        max_tokens_per_micro_batch=longest - 1,
    )
    trainer.train()
    assert step_logs(trainer)[0]["grad_norm"] > 0
