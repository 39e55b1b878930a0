"""`episode`, which makes one rollout of the rows of an episode, and rows that are sent as rows."""

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import trl_atropos
from benchmarks.episode_means import branching
from tests.rollouts.conftest import admitted, assert_same_rows, make_group
from tests.rollouts.trees import (
    Path,
    group_of,
    masks_of,
    random_episode,
    trained_by,
    trained_in,
    whole,
)
from trl_atropos import episode
from trl_atropos.errors import RolloutError
from trl_atropos.rollouts.intake import Intake
from trl_atropos.rollouts.wire import parse_group
from trl_atropos.rollouts.wire_values import RejectedGroup

Row = tuple[list[int], list[int], list[float]]


def rows_of(rng: random.Random, paths: Sequence[Path]) -> list[Row]:
    """The paths as rows, in any order, some twice. A row trains again what it goes on from, or does
    not; but if a call goes on from within another one, rows that train both cannot be told from two
    calls that begin alike."""
    rows: list[Row] = []
    for path, complete in zip(paths, whole(paths)):
        masks = masks_of(complete)
        if path.at and rng.random() < 0.5:
            masks_before = rows[path.of][1][: path.at]
            is_within_a_call = path.trained[0] and masks_before[-1] != -100
            if not is_within_a_call:
                masks = masks_before + masks[path.at :]
        rows.append((complete.tokens, masks, complete.logprobs))
    rows += rng.sample(rows, rng.randint(0, len(rows)))
    rng.shuffle(rows)
    return rows


def draw(seed: int) -> tuple[list[Path], list[Row]]:
    """An episode, and rows of it. No two of its calls sampled the same: no function of rows can
    know that they are two."""
    rng = random.Random(seed)
    paths = random_episode(rng)
    contexts = [(context, token) for context, token, _ in trained_by(paths).elements()]
    assume(len(set(contexts)) == len(contexts) > 0)
    return paths, rows_of(rng, paths)


def trained_by_item(item: dict[str, Any]) -> Any:
    (rollout, *_) = admitted(group_of([item, item]), max_sequence_length=1000)
    return trained_in(rollout)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32))
def test_rows_in_any_order_train_each_token_once(seed):
    paths, rows = draw(seed)
    assert trained_by_item(episode(rows)) == trained_by(paths)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32))
def test_rows_that_are_sent_make_the_same_rollout(seed):
    """As `episode` makes, among rows of others."""
    _, rows = draw(seed)
    item = episode(rows)
    expected = admitted(group_of([item, item]), max_sequence_length=1000)[0]
    group: dict[str, Any] = make_group(0, 1, overrides=[{}, {}])
    for tokens, masks, logprobs in rows:
        group["tokens"].append(tokens)
        group["masks"].append(masks)
        group["inference_logprobs"].append(logprobs)
        group["scores"].append(0)
        group["overrides"].append({"episode": 5})
    rollouts = admitted(group, max_sequence_length=1000)
    assert [rollout.score for rollout in rollouts] == [0, 1, 0]
    rollouts[2].group_mean, rollouts[2].group_std = expected.group_mean, expected.group_std
    assert_same_rows([rollouts[2]], [expected])


def row(tokens: list[int], *trained: int) -> Row:
    """The tokens at these places are trained."""
    masks = [token if place in trained else -100 for place, token in enumerate(tokens)]
    return tokens, masks, [-0.5] * len(tokens)


def test_row_that_goes_on_lengthens_the_path():
    item = episode([row([1, 2, 3, 4], 2, 3), row([1, 2, 3, 4, 5, 6], 5)])
    assert item == {
        "tokens": [1, 2, 3, 4, 5, 6],
        "masks": [-100, -100, 3, 4, -100, 6],
        "inference_logprobs": [-0.5] * 6,
        "overrides": {"branches": []},
    }


def test_row_leaves_where_it_differs():
    item = episode([row([1, 2, 3, 4], 2, 3), row([1, 2, 9, 5, 6], 4)])
    assert item["overrides"]["branches"] == [
        {
            "of": 0,
            "at": 2,
            "tokens": [9, 5, 6],
            "masks": [-100, -100, 6],
            "inference_logprobs": [-0.5] * 3,
        }
    ]


def test_calls_that_begin_alike_are_two():
    """The third leaves the second one at the start of its call, too."""
    item = episode([row([1, 3, 4, 5], 1, 2, 3), row([1, 3, 4, 6], 1, 2, 3), row([1, 3, 7], 1, 2)])
    branches = item["overrides"]["branches"]
    assert [(branch["at"], branch["masks"]) for branch in branches] == [(1, [3, 4, 6]), (1, [3, 7])]


def test_equal_calls_are_one():
    item = episode([row([1, 3, 4], 1, 2), row([1, 3, 4], 1, 2)])
    assert item["overrides"]["branches"] == []


def test_call_right_behind_another_stays_a_call():
    item = episode([row([1, 3], 1), row([1, 3, 4], 2)])
    (branch,) = item["overrides"]["branches"]
    assert (branch["of"], branch["at"], branch["masks"]) == (0, 2, [4])


def test_context_of_its_own_shares_nothing():
    (branch,) = episode([row([1, 3], 1), row([2, 3], 1)])["overrides"]["branches"]
    assert (branch["at"], branch["tokens"]) == (0, [2, 3])


def test_advantages_ride_with_their_tokens():
    first, second = row([1, 3, 4], 1, 2), row([1, 5], 1)
    item = episode([(*first, [0.0, 1.0, 2.0]), (*second, [0.0, 3.0])])
    assert item["advantages"] == [0.0, 1.0, 2.0]
    assert item["overrides"]["branches"][0]["advantages"] == [3.0]


@dataclass
class Node:
    """As Atropos' managed server has them."""

    tokens: list[int]
    masked_tokens: list[int]
    logprobs: list[float]


def test_nodes_of_managed_server_are_rows():
    rows = [row([1, 2, 3, 4], 2, 3), row([1, 2, 9, 5, 6], 4)]
    assert episode(Node(*each) for each in rows) == episode(rows)


def test_arrays_become_lists():
    tokens, masks, logprobs = row([1, 2, 3], 2)
    item = episode([(np.array(tokens), np.array(masks), np.array(logprobs))])
    assert json.dumps(item) == json.dumps(episode([(tokens, masks, logprobs)]))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "`episode` got no rows"),
        ([([1], [1])], "Row 0 of the episode has 2 lists"),
        ([row([1, 2], 1), ([1, 2], [1], [0, 0])], "`masks` of row 1 of the episode has 1 entries"),
        ([([1, 2], [-100, 3], [0, 0])], r"masks\[1\] of row 0 of the episode is 3"),
        ([(*row([1, 2], 1), [0, 1]), row([1, 3], 1)], "Some rows of the episode have advantages"),
    ],
)
def test_wrong_rows_are_refused(rows, message):
    with pytest.raises(RolloutError, match=message):
        episode(rows)


def test_authors_need_no_torch():
    code = "import sys, trl_atropos; trl_atropos.episode; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert "episode" in trl_atropos.__all__


# -------------------------------------------------------------------------------- rows sent as rows


def group_of_rows(*scores: float, **fields: Any) -> dict[str, Any]:
    """Each score is of a row; the first half are of the episode `a`, the others of `b`."""
    names = ["a"] * (len(scores) // 2) + ["b"] * (len(scores) - len(scores) // 2)
    group = make_group(*range(len(scores)), overrides=[{"episode": name} for name in names])
    return group | {"scores": list(scores)} | fields


def test_mean_counts_episodes():
    rows = admitted(group_of_rows(0, 3, 3, 3) | {"overrides": [{}, *[{"episode": 1}] * 3]})
    assert [(each.score, each.group_mean) for each in rows] == [(0, 1.5), (3, 1.5)]
    assert rows[1].tree.lengths.tolist() == [4, 2, 2]


def test_mean_over_rows_unlearns_to_branch():
    """The figure in the docs, of fewer seeds and steps."""
    last = {}
    for mean_over_rows in (True, False):
        runs = [branching(200, seed, mean_over_rows=mean_over_rows) for seed in range(5)]
        assert all(run[0] == 0.5 for run in runs)
        last[mean_over_rows] = [run[-1] for run in runs]
    assert max(last[True]) < 0.35
    assert 0.4 < np.mean(last[False]) < 0.6


def test_joined_rows_are_counted_beside_what_is_dropped():
    intake = Intake(64, 1.0, "refuse")
    rollouts = intake.admit([parse_group(group_of_rows(1, 1, 2, 2, 2))])
    assert len(rollouts) == 2
    assert intake.total_dropped["joined"] == 3
    metrics = intake.metrics()
    assert metrics["rollouts/joined_rows"] == 3
    assert not any("dropped" in name and value for name, value in metrics.items())


def test_dropped_episode_is_one():
    """Of five rows two are of an episode that is too long."""
    group = group_of_rows(1, 1, 2, 2, 2)
    group["tokens"][1] += [1, 2, 3]
    group["masks"][1] += [1, 2, 3]
    group["inference_logprobs"][1] += [-1, -1, -1]
    intake = Intake(5, 1.0, "refuse")
    assert len(intake.admit([parse_group(group)])) == 1
    dropped = {reason: count for reason, count in intake.total_dropped.items() if count}
    assert dropped == {"joined": 3, "too_long": 1}


def test_only_episode_of_group_is_a_group_of_one():
    group = group_of_rows(1, 1, overrides=[{"episode": 7}] * 2)
    with pytest.raises(RejectedGroup, match="a group of 1 rollout"):
        admitted(group)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": [1, 2, 3, 3]}, r"scores\[1\] is 2.0, but 1.0 for row 0 .*'a'"),
        (
            {"overrides": [{"episode": 1}, {"episode": 1, "sft": True}, {}, {}]},
            r"`sft` of overrides\[1\] is True, but False",
        ),
        (
            {"overrides": [{"episode": 1, "set_advantage_to_zero": True}, {"episode": 1}, {}, {}]},
            r"`set_advantage_to_zero` of overrides\[1\] is False, but True",
        ),
        ({"advantages": [[1] * 4, [], [1] * 4, [1] * 4]}, r"presence of advantages\[1\] is False"),
        (
            {
                "overrides": [
                    {"episode": 1},
                    {
                        "episode": 1,
                        "branches": [{"of": 0, "at": 1, "tokens": [5], "masks": [5]}],
                    },
                    {},
                    {},
                ]
            },
            r"overrides\[1\] has both `branches` and an `episode`",
        ),
        ({"overrides": [{"episode": True}, {}, {}, {}]}, r"overrides\[0\].episode is True"),
    ],
)
def test_rows_that_do_not_agree_are_refused(change, message):
    with pytest.raises(RejectedGroup, match=message):
        admitted(group_of_rows(1, 1, 3, 3) | change)


def test_unknown_overrides_are_named_once(caplog):
    intake = Intake(64, 1.0, "refuse")
    branch = {"of": 0, "at": 2, "tokens": [5], "masks": [5], "logprobs": [-1]}
    overrides = [{"brnaches": []}, {"branches": [branch]}]
    group = make_group(0, 1, overrides=overrides, group_overrides={"group_size": 2, "top": 1})
    for _ in range(2):
        assert len(intake.admit([parse_group(json.dumps(group).encode())])) == 2
        assert len(intake.admit([parse_group(group)])) == 2
    for name in ("'brnaches'", "'branches[].logprobs'", "'top'"):
        assert caplog.text.count(name) == 1
    assert "group_size" not in caplog.text


def test_endless_unknown_overrides_fill_no_log(caplog):
    intake = Intake(64, 1.0, "refuse")
    for number in range(100):
        overrides = [{f"key {number}": 1}, {"\ud83d": 1}]
        assert (
            len(
                intake.admit(
                    [parse_group(json.dumps(make_group(0, 1, overrides=overrides)).encode())]
                )
            )
            == 2
        )
    assert 0 < len(caplog.records) <= 32
