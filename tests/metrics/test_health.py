"""A run that learns nothing, or from the wrong data, says so: every signal, on rollouts that raise
it and on rollouts that do not."""

import json
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch.optim.optimizer import register_optimizer_step_pre_hook
from trl import TrlParser

from tests.rollout_factory import (
    Group,
    arguments,
    make_group,
    policy_logprobs,
    record,
    step_logs,
)
from tests.trainer.test_distillation import taught
from trl_atropos import AtroposGRPOConfig, AtroposGRPOTrainer, ReplaySource
from trl_atropos.errors import AtroposTrainingError
from trl_atropos.metrics.health import FINE_AGAIN, SIGNALS, Health
from trl_atropos.metrics.measures import SAMPLED, History, Movement, rollout_measures, share_dropped
from trl_atropos.report.progress import format_line
from trl_atropos.rollouts.intake import Intake
from trl_atropos.rollouts.rollout import Rollout
from trl_atropos.rollouts.wire import parse_group
from trl_atropos.rollouts.wire_values import MASKED

ROWS = 16
SIZE = 4  # of a group
LETTER = 65


class AgedSource(ReplaySource):
    """Replays rows as if `ages[i % len(ages)]` publishes had passed since group `i` of a batch was
    sampled."""

    ages: list[int | None] = [0]
    trainer: AtroposGRPOTrainer

    def poll(self, num_rows, timeout):
        rows = super().poll(num_rows, timeout)
        for i, row in enumerate(rows):
            age = self.ages[i // SIZE % len(self.ages)]
            row.policy_version = (
                None if age is None else self.trainer.policy_publisher.trainer_version - age
            )
            row.staleness = age
        return rows

    def metrics(self):
        known = [age for age in self.ages if age is not None]
        return super().metrics() | (
            {"rollouts/staleness_mean": sum(known) / len(known)} if known else {}
        )


def run(
    model: Path, folder: Path, batches: list[list[Group]], ages: list[int | None], **settings: Any
):
    """A trainer that has been trained on `batches`, and nearly kept its weights."""
    recording = record(folder / "rollouts.jsonl", *batches)
    few = {"max_steps": len(batches), "per_device_train_batch_size": ROWS, "learning_rate": 1e-9}
    source = AgedSource([recording], single_row_groups=settings.get("single_row_groups", "refuse"))
    source.ages = ages
    config = AtroposGRPOConfig(
        **arguments(folder / "run", **few | settings), replay_paths=[recording]
    )
    trainer = AtroposGRPOTrainer(str(model), args=config, rollout_source=source)
    source.trainer = trainer
    trainer.train()
    return trainer


def shifted(model: Path, group: Group, shift: float) -> Group:
    """The group with the policy's own log-probabilities, less `shift` nats."""
    logprobs = []
    for tokens in group["tokens"]:
        own = torch.tensor(policy_logprobs(model, tuple(tokens))[1:])
        logprobs.append([1.0, *(own - shift).tolist()])
    return group | {"inference_logprobs": logprobs}


def groups(model: Path, seed: int, **fields: Any) -> list[Group]:
    return [
        shifted(model, make_group(model, SIZE, 100 * seed + i), 0.01) | fields
        for i in range(ROWS // SIZE)
    ]


def spoken(model: Path, seed: int, say: Callable[[int], list[int]]) -> list[Group]:
    """Groups whose row `i` of `SIZE` says `say(i)` after a prompt of one token."""
    batch = groups(model, seed)
    for g, group in enumerate(batch):
        group["tokens"] = [[200 + g, *say(i)] for i in range(SIZE)]
        group["masks"] = [[MASKED, *say(i)] for i in range(SIZE)]
    return [shifted(model, group, 0.01) for group in batch]


def mostly_too_long(model: Path, seed: int) -> list[Group]:
    """20 rows of 41 tokens beside the 16 that fit."""
    return [
        *spoken(model, seed, lambda i: [LETTER + i] * 40),
        make_group(model, SIZE, seed, turns=12),
        *groups(model, seed),
    ]


def without_end(model: Path, seed: int) -> list[Group]:
    batch = groups(model, seed)
    for group in batch:
        for name in ("tokens", "masks"):
            group[name] = [[*sequence[:-1], LETTER] for sequence in group[name]]
    return [shifted(model, group, 0.01) for group in batch]


def placeholders(model: Path, seed: int) -> list[Group]:
    """As Atropos makes them up, of lengths of their own."""
    batch = groups(model, seed)
    for group in batch:
        group["tokens"] = [list(range(6 + i)) for i in range(SIZE)]
        group["masks"] = [[MASKED, *range(1, 6 + i)] for i in range(SIZE)]
    return [shifted(model, group, 0.01) for group in batch]


def scored(model: Path, seed: int, scores: Callable[[int], list[float]]) -> list[Group]:
    return [group | {"scores": scores(g)} for g, group in enumerate(groups(model, seed))]


def sampled_elsewhere(model: Path, seed: int, shift: float) -> list[Group]:
    return [shifted(model, group, shift) for group in groups(model, seed)]


# signal -> (the batch of a seed, number of batches, ages, settings)
SICK: dict[str, tuple[Callable[[Path, int], list[Group]], int, list[int | None], dict[str, Any]]] = {
    "zero_variance": (lambda m, s: scored(m, s, lambda g: [0.1 * g + 0.01 * s] * SIZE), 5, [0], {}),
    "identical_rows": (lambda m, s: spoken(m, s, lambda i: [LETTER, s, 66]), 5, [0], {}),
    "repeated_token": (lambda m, s: spoken(m, s, lambda i: [LETTER] * (5 + i)), 3, [0], {}),
    "placeholder_tokens": (placeholders, 1, [0], {}),
    "constant_rewards": (lambda m, s: scored(m, s, lambda g: [0.5] * SIZE), 11, [0], {}),
    "reward_stalled": (groups, 40, [0], {"warning_thresholds": {"reward_stalled": 15}}),
    "advantage_explosion": (
        lambda m, s: scored(m, s, lambda g: [0.0, 0.0, 0.0, 20.0]), 1, [0], {"scale_rewards": "none"}
    ),
    "tiny_group_std": (lambda m, s: scored(m, s, lambda g: [0.5, 0.5, 0.5, 0.5008]), 3, [0], {}),
    "unmoved_weights": (groups, 5, [0], {"learning_rate": 1e-30}),
    "truncated": (without_end, 5, [0], {}),
    "loss_divisor": (groups, 5, [0], {"loss_type": "dr_grpo", "max_completion_length": 64}),
    "logprob_gap_fresh": (lambda m, s: sampled_elsewhere(m, s, 0.2), 3, [0], {}),
    "logprob_gap": (lambda m, s: sampled_elsewhere(m, s, -0.6), 3, [3], {}),
    "importance_ratio": (lambda m, s: sampled_elsewhere(m, s, 0.8), 3, [2], {}),
    "tokens_corrected": (lambda m, s: sampled_elsewhere(m, s, 1.2), 3, [2], {}),
    "stale": (groups, 3, [3], {}),
    "unknown_version": (groups, 3, [None], {}),
    "dropped": (mostly_too_long, 3, [0], {"max_sequence_length": 30}),
}  # fmt: skip


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """The names of the signals that have warned so far."""
    caplog.set_level(logging.WARNING, logger="trl_atropos.metrics.health")

    def names() -> list[str]:
        messages = [
            entry.getMessage()
            for entry in caplog.records
            if entry.name == "trl_atropos.metrics.health"
        ]
        return [name for message in messages for name in SIGNALS if f"(`{name}`: above" in message]

    return names


def test_signals_are_all_tried_here():
    assert {*SICK, "gradient_not_finite"} == set(
        SIGNALS
    )  # which tests/metrics/test_gradients.py tries


@pytest.mark.parametrize("name", SICK)
def test_sick_run_is_warned_of_once(tiny_model, tmp_path, warned, name):
    batch, number, ages, settings = SICK[name]
    batches = [batch(tiny_model, seed) for seed in range(number + 2)]
    trainer = run(tiny_model, tmp_path, batches, ages, **settings)
    assert warned().count(name) == 1
    threshold = settings.get("warning_thresholds", {}).get(name, SIGNALS[name].threshold)
    assert step_logs(trainer)[number - 1][f"health/{name}"] > threshold


@pytest.mark.parametrize("name", [name for name in SICK if SIGNALS[name].patience > 1])
def test_few_bad_batches_are_no_warning_yet(tiny_model, tmp_path, warned, name):
    batch, number, ages, settings = SICK[name]
    assert number == SIGNALS[name].patience
    run(
        tiny_model,
        tmp_path,
        [batch(tiny_model, seed) for seed in range(number - 1)],
        ages,
        **settings,
    )
    assert name not in warned()


def test_healthy_run_measures_all_without_warning(tiny_model, tmp_path, warned):
    batches = [groups(tiny_model, seed) for seed in range(12)]
    trainer = run(tiny_model, tmp_path, batches, [0], loss_type="dr_grpo", max_completion_length=12)
    assert warned() == []
    for log in step_logs(trainer):
        for name, signal in SIGNALS.items():
            assert 0.0 <= log[f"health/{name}"] <= signal.threshold, name


@pytest.mark.parametrize(
    ("steps", "should_move", "expected"),
    [
        ([0, 1, 2, 3, 4], [True] * 5, [0, 0, 1, 2, 3]),
        ([0, 0, 0, 0, 0], [True] * 5, [0, 0, 0, 0, 0]),
        ([0, 1, 1, 2, 3], [True] * 5, [0, 0, 1, 1, 2]),
        ([0, 1, 2, 3, 4], [False] * 5, [0, 0, 0, 0, 0]),
        ([0, 1, 2, 3, 4], [False, False, True, True, True], [0, 0, 0, 0, 1]),
    ],
    ids=["stuck", "every step skipped", "one step skipped", "nothing to learn", "a warm-up"],
)
def test_unmoved_weights_count_only_if_meant_to_move(steps, should_move, expected):
    movement, weights = Movement(), [torch.ones(3, 4), torch.ones(5)]
    counts = [
        movement.measure(weights, *batch)["unmoved_weights"]
        for batch in zip(steps, should_move, strict=True)
    ]
    assert counts == expected


@pytest.mark.parametrize(
    "quiet",
    [
        (groups, {"learning_rate": 0.0}),
        (
            lambda m, s: scored(m, s, lambda g: [0.1 * g + 0.01 * s] * SIZE),
            {"learning_rate": 1e-30},
        ),
    ],
    ids=["a learning rate of 0", "groups without variance"],
)
def test_weights_meant_to_stay_are_no_warning(tiny_model, tmp_path, warned, quiet):
    batch, settings = quiet
    run(tiny_model, tmp_path, [batch(tiny_model, seed) for seed in range(7)], [0], **settings)
    assert "unmoved_weights" not in warned()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (SAMPLED,), (32, 32), (8, 10, 10), (0, 4)])
def test_single_move_is_seen_in_any_small_tensor(shape, dtype):
    """By the smallest step that the dtype has."""
    movement, still, weights = (
        Movement(),
        torch.ones(5, dtype=dtype),
        torch.ones(shape, dtype=dtype),
    )
    for step in range(3):
        assert (
            movement.measure([still, weights.T if weights.dim() == 2 else weights], step, True)[
                "unmoved_weights"
            ]
            <= 1
        )
        if step == 1 and weights.numel():
            weights.view(-1)[-1] = torch.nextafter(
                weights.view(-1)[-1], torch.tensor(2.0, dtype=dtype)
            )
    assert movement.measure([still, weights], 3, True)["unmoved_weights"] == (
        0 if weights.numel() else 2
    )


def test_large_tensor_movement_is_seen_by_few_values():
    movement, weights = Movement(), torch.zeros(1000, 3000)
    for step in range(4):
        assert movement.measure([weights], step, True)["unmoved_weights"] == 0
        weights += 1


@pytest.mark.slow
def test_slowly_rising_reward_is_not_stalled(tiny_model, tmp_path, warned):
    def rising(seed: int) -> list[Group]:
        return [
            group | {"scores": [s + 0.02 * seed for s in group["scores"]]}
            for group in groups(tiny_model, seed)
        ]

    run(
        tiny_model,
        tmp_path,
        [rising(s) for s in range(40)],
        [0],
        warning_thresholds={"reward_stalled": 15},
    )
    assert warned() == []


@pytest.mark.parametrize(("coef", "share"), [(0.0, 0.5), (0.1, 0.25)])
def test_rows_learned_otherwise_need_no_variance(tiny_model, tmp_path, coef, share):
    batch = groups(tiny_model, 0, scores=[1.0] * SIZE)
    batch[0] |= {"group_overrides": {"sft": True}}
    batch[1] |= {"advantages": [[0.5] * len(tokens) for tokens in batch[1]["tokens"]]}
    batch[2] = taught(batch[2], 0)
    log = step_logs(run(tiny_model, tmp_path, [batch], [0], distillation_coef=coef))[0]
    assert log["health/zero_variance"] == share
    assert log["frac_reward_zero_std"] == 1.0


# ------------------------------------------------------------------------------ trainer and sampler


def test_sampler_gap_is_told_by_staleness(tiny_model, tmp_path):
    shifts = [0.125, -0.25, 0.5, -1.0]
    batch = [
        shifted(tiny_model, group, shift) for group, shift in zip(groups(tiny_model, 0), shifts)
    ]
    log = step_logs(run(tiny_model, tmp_path, [batch], [0, 1, None, 4]))[0]
    expected = dict(zip(("0", "1", "unknown", "2_or_more"), (0.125, 0.25, 0.5, 1.0)))
    for name, gap in expected.items():
        assert log[f"sampling/logprob_gap/staleness_{name}"] == pytest.approx(gap, abs=1e-5)
    tokens = [sum(m != MASKED for mask in group["masks"] for m in mask) for group in batch]
    mean = sum(abs(shift) * n for shift, n in zip(shifts, tokens)) / sum(tokens)
    assert log["health/logprob_gap"] == pytest.approx(mean, abs=1e-5)
    assert log["health/logprob_gap"] == pytest.approx(
        log["sampling/sampling_logp_difference/mean"], abs=1e-5
    )
    assert log["sampling/logprob_gap/max"] == pytest.approx(1.0, abs=1e-5)
    assert log["health/logprob_gap_fresh"] == log["sampling/logprob_gap/staleness_0"]


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask"])
def test_ratios_are_told_before_correction(tiny_model, tmp_path, mode):
    shifts = (0.0, 1.0, 2.0, -0.5)
    batch = [
        shifted(tiny_model, group, shift) for group, shift in zip(groups(tiny_model, 0), shifts)
    ]
    bounds = {"vllm_importance_sampling_clip_min": 0.8, "vllm_importance_sampling_clip_max": 3.0}
    log = step_logs(
        run(tiny_model, tmp_path, [batch], [0], vllm_importance_sampling_mode=mode, **bounds)
    )[0]
    tokens = [sum(m != MASKED for mask in group["masks"] for m in mask) for group in batch]
    ratios = [math.exp(shift) for shift in shifts]
    mean = sum(ratio * n for ratio, n in zip(ratios, tokens)) / sum(tokens)
    assert log["health/tokens_corrected"] == pytest.approx((tokens[2] + tokens[3]) / sum(tokens))
    assert log["health/importance_ratio"] == pytest.approx(mean, rel=1e-4)
    assert log["sampling/importance_ratio_before/max"] == pytest.approx(ratios[2], rel=1e-4)


def test_masked_sequence_counts_with_all_its_tokens(tiny_model, tmp_path):
    shifts = (0.0, 0.15, 0.0, 0.0)
    batch = [
        shifted(tiny_model, group, shift) for group, shift in zip(groups(tiny_model, 0), shifts)
    ]
    settings = {"vllm_importance_sampling_mode": "sequence_mask"}
    log = step_logs(run(tiny_model, tmp_path, [batch], [0], **settings))[0]
    lengths = [[sum(m != MASKED for m in mask) for mask in group["masks"]] for group in batch]
    products = torch.tensor([[shift * n for n in of] for shift, of in zip(shifts, lengths)]).exp()
    masked = sum(n for n, product in zip(lengths[1], products[1]) if product > 3.0)
    assert 0 < masked < sum(lengths[1])
    assert log["health/tokens_corrected"] == pytest.approx(masked / sum(map(sum, lengths)))
    assert log["health/importance_ratio"] == pytest.approx(products.mean().item(), rel=1e-4)


@pytest.mark.parametrize("settings", [{"vllm_importance_sampling_correction": False}, {}])
def test_unknown_sampler_gives_no_metric_or_warning(tiny_model, tmp_path, warned, settings):
    missing = [make_group(tiny_model, SIZE, i, logprobs="absent") for i in range(4)]
    batch = groups(tiny_model, 0) if settings else missing
    log = step_logs(run(tiny_model, tmp_path, [batch] * 3, [0], **settings))[2]
    assert not [name for name in log if "logprob_gap" in name or "importance_ratio_before" in name]
    assert warned() == []


# -------------------------------------------------------------------------------- thresholds, stops


def test_warning_may_end_run(tiny_model, tmp_path):
    batch, number, ages, _ = SICK["zero_variance"]
    batches = [batch(tiny_model, seed) for seed in range(number + 2)]
    with pytest.raises(
        AtroposTrainingError,
        match=r"100% of the rollouts are in groups .* because `stop_on_warnings`",
    ):
        run(tiny_model, tmp_path, batches, ages, stop_on_warnings=["truncated", "zero_variance"])


@pytest.mark.parametrize("iterations", [1, 2])
def test_sampler_warning_ends_run_before_next_step(tiny_model, tmp_path, iterations):
    """Also where only the passes that train find it out."""
    steps: list[int] = []
    batches, patience = (
        [groups(tiny_model, seed) for seed in range(4)],
        SIGNALS["logprob_gap"].patience,
    )
    settings = {"num_iterations": iterations, "max_steps": 4 * iterations}
    stop = {"stop_on_warnings": ["logprob_gap"], "warning_thresholds": {"logprob_gap": 0.0}}
    handle = register_optimizer_step_pre_hook(lambda *_: steps.append(1))
    try:
        with pytest.raises(AtroposTrainingError, match="`stop_on_warnings` lists 'logprob_gap'"):
            run(tiny_model, tmp_path, batches, [0], **settings, **stop)
    finally:
        handle.remove()
    assert len(steps) == (patience - 1) * iterations


def test_unnamed_warning_does_not_end_run(tiny_model, tmp_path, warned):
    batch, number, ages, _ = SICK["zero_variance"]
    batches = [batch(tiny_model, seed) for seed in range(number)]
    run(tiny_model, tmp_path, batches, ages, stop_on_warnings=["truncated"])
    assert warned() == ["zero_variance"]


def test_raised_threshold_silences_warning(tiny_model, tmp_path, warned):
    batch, number, ages, _ = SICK["zero_variance"]
    batches = [batch(tiny_model, seed) for seed in range(number)]
    run(tiny_model, tmp_path, batches, ages, warning_thresholds={"zero_variance": 1})
    assert warned() == []


@pytest.mark.parametrize(("fine", "times"), [(FINE_AGAIN - 1, 1), (FINE_AGAIN, 2)])
def test_signal_warns_again_only_after_long_health(warned, fine, times):
    health = Health({}, [])
    for value in [1.0] * 40 + [0.0] * fine + [1.0] * 40:
        health.check({"zero_variance": value})
    assert warned() == ["zero_variance"] * times


def test_bad_batches_among_good_are_no_warning(warned):
    health = Health({}, [])
    for value in [1.0, 0.0] * 20:
        health.check({"zero_variance": value})
    assert warned() == []


def test_unmeasured_batch_leaves_signal_unchanged(warned):
    health = Health({}, [])
    for _ in range(SIGNALS["logprob_gap"].patience):
        health.check({"logprob_gap": 5.0})
        health.check({})
    assert warned() == ["logprob_gap"]


def test_thresholds_are_read_from_recipe_and_flags(tmp_path):
    settings = {
        "warning_thresholds": {"truncated": 0.5, "reward_stalled": 30},
        "stop_on_warnings": "zero_variance",
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(arguments(tmp_path) | settings))
    (tmp_path / "plain.yaml").write_text(yaml.safe_dump(arguments(tmp_path)))
    flags = [
        "--warning_thresholds",
        json.dumps(settings["warning_thresholds"]),
        "--stop_on_warnings",
        "zero_variance",
    ]
    parser = TrlParser((AtroposGRPOConfig,))
    for given in (
        ["--config", str(tmp_path / "recipe.yaml")],
        ["--config", str(tmp_path / "plain.yaml"), *flags],
    ):
        config = parser.parse_args_and_config(given)[0]
        assert config.warning_thresholds == settings["warning_thresholds"]
        assert config.stop_on_warnings == ["zero_variance"]


@pytest.mark.parametrize(
    ("logs", "cells"),
    [
        ({"rollouts/staleness_mean": 1.25, "health/dropped": 0.5}, "stale 1.2  dropped 50%"),
        ({"rollouts/staleness_mean": 0.0, "health/dropped": 0.0}, "stale 0.0"),
        ({}, ""),
    ],
)
def test_step_line_shows_staleness_and_dropped_share(logs, cells):
    assert format_line(7, 10, logs) == f"step  7/10  {cells}"


def test_dropped_share_is_of_all_received_rows():
    metrics = {
        "rollouts/dropped_too_long": 1.0,
        "rollouts/dropped_stale": 2.0,
        "rollouts/waiting_rows": 5.0,
    }
    assert share_dropped(metrics, 9) == 0.25


def branching(*branches: dict[str, Any], sizes: int = 2) -> list[Rollout]:
    """Rollouts with one row, each with a branch of its own."""
    group = {
        "tokens": [[7, 8, 10, 9]] * sizes,
        "masks": [[MASKED, MASKED, 10, 9]] * sizes,
        "scores": [float(i) for i in range(sizes)],
        "overrides": [{"branches": [branch]} for branch in branches],
    }
    return Intake(64, 1.0, "refuse").admit([parse_group(group)])


def test_rollouts_of_one_row_and_other_trees_are_not_identical():
    branch = {"of": 0, "at": 2, "tokens": [5, 6], "masks": [MASKED, 6]}
    alike = branching(branch, branch)
    assert rollout_measures(alike, "group", False)["identical_rows"] == 1.0
    others = branching(branch, branch | {"at": 4})
    assert (others[0].row == others[1].row).all()
    assert rollout_measures(others, "group", False)["identical_rows"] == 0.0


def test_placeholders_of_branches_count_their_places():
    (rollout, _) = branching(*[{"of": 0, "at": 2, "tokens": [2, 3], "masks": [2, 3]}] * 2)
    measured = rollout_measures([rollout], "group", False)
    assert measured["placeholder_tokens"] == 0.0
    rollout.prompt_ids = np.array([0, 1], np.int32)
    rollout.completion_ids = np.array([2, 3, 2, 3], np.int32)
    assert rollout_measures([rollout], "group", False)["placeholder_tokens"] == 1.0


def test_loss_divisor_is_compared_with_trained_tokens():
    """Not with the row, of which much may be context."""
    branch = {"of": 0, "at": 2, "tokens": [5, 6, 7, 8], "masks": [MASKED, MASKED, MASKED, 8]}
    assert History(divisor=30).add(branching(branch, branch))["loss_divisor"] == 10.0
