"""Parts of rewards: from an environment through the real Atropos server to the metrics, and what is
dropped of odd ones."""

import json
import logging
import math
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.rollouts.conftest import admitted, assert_same_rows, make_group
from tests.rollouts.test_spool import make_row
from trl_atropos.environment_entry import RUNNER, EnvironmentSpec
from trl_atropos.rollouts.intake import Intake
from trl_atropos.rollouts.reward_parts import (
    LONGEST_NAME,
    MOST_NAMES,
    NamedNumbers,
    part_means,
)
from trl_atropos.rollouts.source import AtroposSource
from trl_atropos.rollouts.wire import read_group
from trl_atropos.rollouts.wire_values import LARGEST
from trl_atropos.services.environments import Supervisor
from trl_atropos.services.manager import Services

ENVIRONMENT = str(Path(__file__).parent / "parts_environment.py")
WAIT = 120.0  # seconds; the environment imports Atropos
STYLES = [
    # of `collect_trajectories`, in the order of scores
    {0.0: {"correct": 0.0, "length": 0.5}, 1.0: {"correct": 1.0}},
    # of `collect_trajectory`
    {0.0: None, 1.0: {"alone": 2.0}},
]
DROPPED = "rollouts/parts_dropped_not_a_number"
DROPPED_METRICS = "services/metrics_dropped_env_parts_not_a_number"


def parted(*rewards: Any, **fields: Any) -> dict[str, Any]:
    """A group of as many rollouts, each with these rewards in its overrides."""
    overrides = [{"rewards": each} for each in rewards]
    return make_group(*range(len(rewards)), overrides=overrides, **fields)


def rewards_of(group: dict[str, Any]) -> list[dict[str, float] | None]:
    return [rollout.rewards for rollout in admitted(group)]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_parts_and_metrics_pass_real_server_in_both_styles(api, run_info, tiny_model, tmp_path):
    spec = EnvironmentSpec(path=ENVIRONMENT)
    with Services(tmp_path / "logs") as services:
        command = [sys.executable, RUNNER, ENVIRONMENT, api.url, str(tiny_model)]
        service = services.start("environment-parts", command, env=spec.variables())
        source = AtroposSource(api.url, environments=Supervisor(services, pytest.fail))
        source.start(run_info())
        groups: dict[int, dict[float, Any]] = {}
        metrics: dict[str, float] = {}
        dropped = 0.0
        dropped_metrics = 0.0
        deadline = time.monotonic() + WAIT
        while len(groups) < 6 or "environment/parts/train/share" not in metrics:
            assert time.monotonic() < deadline, service.log_path.read_text()[-5000:]
            for rollout in source.poll(4, 1.0) or []:
                groups.setdefault(rollout.group, {})[rollout.score] = rollout.rewards
            latest = source.metrics()
            metrics |= latest
            dropped += latest.get(DROPPED, 0.0)
            dropped_metrics += latest.get(DROPPED_METRICS, 0.0)
        source.close()
    assert {json.dumps(group, sort_keys=True) for group in groups.values()} == {
        json.dumps(style, sort_keys=True) for style in STYLES
    }
    assert dropped >= 2 * len(groups) - 6
    assert metrics["environment/parts/train/share"] == 0.25
    assert dropped_metrics > 0
    assert [name for name in metrics if name.startswith("environment/")] == [
        "environment/parts/train/share"
    ]
    assert metrics["rollouts/lost_batches"] == 0.0


def test_parts_are_numbers_and_truth_values():
    group = parted({"format": 1, "correct": False}, {"format": 0.25, "correct": None}, {})
    assert rewards_of(group) == [{"format": 1.0, "correct": 0.0}, {"format": 0.25}, None]


def test_parts_of_group_are_those_of_each_rollout():
    group = parted({"own": 1.0}, {"shared": 2.0}, group_overrides={"rewards": {"shared": 3.0}})
    assert rewards_of(group) == [{"shared": 3.0, "own": 1.0}, {"shared": 2.0}]


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        ({"x": math.nan}, "not_a_number"),
        ({"x": -math.inf}, "not_a_number"),
        ({"x": "1.0"}, "not_a_number"),
        ({"x": [1.0]}, "not_a_number"),
        ({"x": 10**400}, "not_a_number"),
        ({"x": 1.01 * LARGEST}, "not_a_number"),
        ([1.0], "not_a_mapping"),
        (0.5, "not_a_mapping"),
        ({"": 1.0}, "bad_name"),
        ({"a\nb": 1.0}, "bad_name"),
        ({"/x": 1.0}, "bad_name"),
        ({"`x`": 1.0}, "bad_name"),
        ({"x" * (LONGEST_NAME + 1): 1.0}, "bad_name"),
    ],
)
def test_impossible_part_is_dropped_counted_and_explained(sent, reason, caplog):
    intake = Intake(64, 1.0, "refuse")
    groups = [parted(sent, {"good": 1.0}), parted(sent, sent)]
    rollouts = intake.admit([read_group(group) for group in groups])
    assert [rollout.rewards for rollout in rollouts] == [None, {"good": 1.0}, None, None]
    metrics = intake.metrics()
    assert metrics[f"rollouts/parts_dropped_{reason}"] == 3.0
    assert metrics["rollouts/rejected_groups"] == 0.0
    assert intake.metrics()[f"rollouts/parts_dropped_{reason}"] == 0.0  # since the last call
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("Dropped a part of a reward from environment 0: ")
    assert f"({reason.replace('_', ' ')}). " in warning
    assert warning.endswith(f"only counted, in `rollouts/parts_dropped_{reason}`.")


@pytest.mark.parametrize(
    "name", ["format", "pass@1", "train/loss (mean)", "größe", "a.b-c:d=e+f%", "0", "x" * 100]
)
def test_usual_name_is_kept(name):
    assert rewards_of(parted({name: 1.0}, {name: 0.0})) == [{name: 1.0}, {name: 0.0}]


def test_first_names_are_kept_and_further_ones_dropped(caplog):
    numbers = NamedNumbers("part of a reward", "dropped")
    names = [f"task {number}" for number in range(MOST_NAMES + 3)]
    admitted_numbers = [numbers.admit({name: 1.0}, "one") for name in names]
    assert admitted_numbers == [{name: 1.0} for name in names[:MOST_NAMES]] + [{}] * 3
    assert numbers.admit({names[0]: 2.0, names[-1]: 2.0}, "one") == {names[0]: 2.0}
    assert numbers.metrics() == {"dropped_too_many_names": 4.0}
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "environment one: {'task 32': 1.0} (too many names). Use at most 32 names: " in warning


def test_mean_is_over_rollouts_that_have_the_part():
    first = [make_row(rewards={"format": 1.0, "tests": 0.5}), make_row(rewards={"format": 0.0})]
    second = [make_row(rewards={"answer": 3.0}), make_row()]
    means = {"reward/format": 0.5, "reward/tests": 0.5, "reward/answer": 3.0}
    assert part_means(first + second) == means
    assert part_means([make_row()]) == {}


# ------------------------------------------------------------------------------------- odd contents

NUMBERS = st.one_of(st.floats(), st.integers(), st.booleans(), st.sampled_from([10**400, -LARGEST]))
NAMES = st.one_of(st.sampled_from([f"part {n}" for n in range(40)]), st.text(max_size=5))
ODD = st.recursive(
    st.one_of(st.none(), NUMBERS, st.text(max_size=5)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=5,
)
REWARDS = st.one_of(ODD, st.dictionaries(NAMES, st.one_of(NUMBERS, ODD), max_size=45))


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(groups=st.lists(st.lists(REWARDS, min_size=2, max_size=3), min_size=1, max_size=3))
def test_odd_parts_cost_no_rollout_and_all_are_counted(groups, caplog):
    caplog.set_level(logging.ERROR)
    intake = Intake(64, 1.0, "refuse")
    sent = [json.dumps(parted(*rewards)).encode() for rewards in groups]
    rollouts = intake.admit(map(read_group, sent))
    usual = [make_group(*range(len(rewards))) for rewards in groups]
    expected = Intake(64, 1.0, "refuse").admit(map(read_group, usual))
    assert_same_rows(rollouts, expected, but=("rewards", "arrived"))

    kept = Counter()
    for rollout in rollouts:
        for name, value in (rollout.rewards or {}).items():
            assert isinstance(value, float) and abs(value) <= LARGEST
            kept[name] += 1
    metrics = intake.metrics()
    dropped = sum(
        count for name, count in metrics.items() if name.startswith("rollouts/parts_dropped")
    )
    assert len(kept) <= MOST_NAMES
    assert kept.total() + dropped == sum(_parts_in(json.loads(text)) for text in sent)
    assert all(math.isfinite(mean) for mean in part_means(rollouts).values())


def _parts_in(group: dict[str, Any]) -> int:
    """Returns how many parts a group has that are not null. Rewards that are no mapping are one."""
    count = 0
    for overrides in group["overrides"]:
        rewards = overrides["rewards"]
        if isinstance(rewards, dict):
            count += sum(value is not None for value in rewards.values())
        elif rewards is not None:
            count += 1
    return count
