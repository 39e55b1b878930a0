"""Rollouts that branch: from the wire to the row that is trained, and to disk and back."""

import json
import random
from itertools import groupby
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rollouts.conftest import admitted, assert_same_rows, make_group
from tests.rollouts.malformed import junk
from tests.rollouts.trees import (
    group_of,
    item_of,
    random_episode,
    trained_by,
    trained_in,
    whole,
)
from trl_atropos.protocol import completion_key
from trl_atropos.rollouts.intake import Intake
from trl_atropos.rollouts.rollout import Rollout, from_table, to_table
from trl_atropos.rollouts.tree import NO_PARENT
from trl_atropos.rollouts.versions import turn_keys
from trl_atropos.rollouts.wire import read_group
from trl_atropos.rollouts.wire_values import RejectedGroup

FIRST = {"tokens": [7, 8, 1, 2], "masks": [-100, -100, 1, 2]}
BRANCH = {"of": 0, "at": 2, "tokens": [9, 3], "masks": [-100, 3]}


def rollouts_of(*branches: dict, **fields) -> list[Rollout]:
    group = make_group(0, 1, overrides=[{"branches": list(branches)}, {}])
    return admitted(group | fields)


def branching(*branches: dict, **fields) -> Rollout:
    return rollouts_of(*branches, **fields)[0]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32))
def test_each_sent_token_is_trained_once_in_its_context(seed):
    rng = random.Random(seed)
    episodes = [random_episode(rng) for _ in range(2)]
    rollouts = admitted(group_of(map(item_of, episodes)), max_sequence_length=1000)
    by_score = {rollout.score: rollout for rollout in rollouts}
    for score, paths in enumerate(episodes):
        expected = trained_by(paths)
        if not expected:
            assert score not in by_score
            continue
        rollout = by_score[score]
        assert trained_in(rollout) == expected
        assert_is_tight(rollout)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32))
def test_turn_has_path_as_prompt(seed):
    paths = random_episode(random.Random(seed))
    rollouts = admitted(group_of([item_of(paths)] * 2), max_sequence_length=1000)
    expected = []
    for path in whole(paths):
        trained = [place > 0 and mark for place, mark in enumerate(path.trained)]
        for is_call, places in groupby(range(len(trained)), trained.__getitem__):
            if is_call:
                numbers = list(places)
                begin = numbers[0]
                call = slice(begin, numbers[-1] + 1)
                logprobs = np.float32(path.logprobs[call])
                expected.append(completion_key(path.tokens[:begin], path.tokens[call], logprobs))
    for rollout in rollouts:
        assert sorted(turn_keys(rollout)) == sorted(expected)


def test_turns_are_unknown_if_one_logprob_is():
    assert turn_keys(branching(BRANCH)) == []
    assert len(turn_keys(branching(BRANCH | {"inference_logprobs": [1.0, -0.5]}))) == 2


def assert_is_tight(rollout: Rollout) -> None:
    """As `Rollout` and `Tree` promise, and nothing in the row that nobody needs."""
    assert len(rollout.prompt_ids) >= 1
    assert rollout.mask[-1]
    assert np.isnan(rollout.logprobs[~rollout.mask]).all()
    for name in ("mask", "logprobs"):
        assert len(getattr(rollout, name)) == len(rollout.completion_ids)
    tree = rollout.tree
    if tree is None:
        return
    assert len(tree) > 1
    assert tree.lengths.min() >= 1
    assert tree.lengths.sum() == len(rollout.row)
    trained = np.concatenate([np.zeros(len(rollout.prompt_ids), bool), rollout.mask])
    assert not trained[tree.roots].any()
    first = trained[: tree.lengths[0]]
    most = np.flatnonzero(first)[0] if first.any() else len(first)
    # 1 if the environment trains the context's first token
    assert len(rollout.prompt_ids) in (1, most)
    for part in range(len(tree)):
        parent, shared = tree.parents[part], tree.shared[part]
        assert parent < part
        assert (parent == NO_PARENT) == (shared == 0)
        if parent != NO_PARENT:
            assert tree.shared[parent] < shared <= tree.path_lengths[parent]
        own = trained[tree.begins[part] : tree.begins[part] + tree.lengths[part]]
        leaves = tree.shared[tree.parents == part]
        is_left_at_end = tree.path_lengths[part] in leaves
        assert own[-1] or is_left_at_end


def test_branch_becomes_part_of_row():
    rollout = branching(BRANCH | {"inference_logprobs": [1.0, -0.75]})
    assert rollout.prompt_ids.tolist() == [7, 8]
    assert rollout.completion_ids.tolist() == [10, 9, 9, 3]
    assert rollout.mask.tolist() == [True, True, False, True]
    assert rollout.logprobs.tolist()[:2] == [-0.5, -0.25]
    assert np.isnan(rollout.logprobs[2])
    assert rollout.logprobs[3] == -0.75
    tree = rollout.tree
    assert tree.lengths.tolist() == [4, 2]
    assert tree.parents.tolist() == [NO_PARENT, 0]
    assert tree.shared.tolist() == [0, 2]


def test_rollout_with_empty_branches_is_a_plain_one():
    (plain, other) = admitted(make_group(0, 1))
    assert_same_rows(rollouts_of(), [plain, other])


def test_branch_that_trains_nothing_leaves_a_plain_rollout():
    (plain, _) = admitted(make_group(0, 1))
    assert_same_rows([branching(BRANCH | {"masks": [-100, -100]})], [plain])


def test_parts_end_where_nobody_needs_them_any_more():
    """Path 1 trains nothing, and path 2 needs one of its tokens; the tail of path 2 trains
    nothing."""
    context = {"of": 0, "at": 3, "tokens": [4, 5, 6], "masks": [-100] * 3}
    call = {"of": 1, "at": 4, "tokens": [11, 12], "masks": [11, -100]}
    rollout = branching(context, call)
    assert rollout.completion_ids.tolist() == [10, 9, 4, 11]
    assert rollout.tree.lengths.tolist() == [4, 1, 1]
    assert rollout.tree.shared.tolist() == [0, 3, 4]


def test_first_path_without_trained_token_is_the_prompt():
    rollout = branching(BRANCH | {"at": 4}, masks=[[-100] * 4, [-100, -100, 11, 9]])
    assert rollout.prompt_ids.tolist() == [7, 8, 10, 9]
    assert rollout.mask.tolist() == [False, True]


def test_first_path_that_nobody_needs_is_no_part():
    alone = {"of": 0, "at": 0, "tokens": [5, 6], "masks": [5, 6]}
    rollout = branching(alone, masks=[[-100] * 4, [-100, -100, 11, 9]])
    assert rollout.prompt_ids.tolist() == [5]
    assert rollout.completion_ids.tolist() == [6]
    assert rollout.tree is None


def test_first_token_of_context_is_never_trained():
    alone = {"of": 0, "at": 0, "tokens": [5, 6], "masks": [5, 6]}
    rollout = branching(alone)
    assert rollout.mask.tolist() == [True, True, False, True]
    assert rollout.tree.roots.tolist() == [0, 4]


def test_first_path_may_bring_logprobs_in_its_overrides():
    """Atropos' `collect_trajectories` drops those of the group."""
    overrides = [{"inference_logprobs": [1.0, 1.0, -0.125, None]}, {}]
    first, second = admitted(make_group(0, 1, inference_logprobs=None, overrides=overrides))
    assert first.logprobs[0] == -0.125
    assert np.isnan([first.logprobs[1], *second.logprobs]).all()


def test_longest_path_is_bounded():
    """Not the row: 4 + 2 tokens, of which no context has more than 4."""
    branch = BRANCH | {"at": 2}
    group = make_group(0, 1, overrides=[{"branches": [branch]}, {}])
    assert len(admitted(group, max_sequence_length=4)) == 2
    group["overrides"][0]["branches"][0] = BRANCH | {"at": 3}
    assert [rollout.score for rollout in admitted(group, max_sequence_length=4)] == [1]


def test_branch_brings_its_advantages():
    rollout = branching(
        BRANCH | {"advantages": [0, 2]}, advantages=[[0, 0, 1, 1], [0.0, 0.0, 1.0, 1.0]]
    )
    assert rollout.token_advantages.tolist() == [1, 1, 0, 2]


def test_teachers_of_paths_are_joined():
    first = {"distill_token_ids": [[[], [], [5], []], []]}
    first |= {"distill_logprobs": [[[], [], [-0.5], []], []]}
    branch = BRANCH | {"distill_token_ids": [[], [5, 6]], "distill_logprobs": [[], [-1, -2]]}
    rollout = branching(branch, **first)
    assert rollout.distill_ids.tolist() == [[5, -1], [-1, -1], [-1, -1], [5, 6]]
    assert rollout.distill_logprobs[3].tolist() == [-1, -2]
    assert np.isnan(rollout.distill_logprobs[1]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"of": 1}, ".of is 1, and the paths before this branch are 0 to 0"),
        ({"of": -1}, ".of is -1"),
        ({"at": 5}, ".at is 5, and path 0 has 4 tokens"),
        ({"at": -1}, ".at is -1"),
        ({"at": 2.0}, ".at is 2.0: expected `int`, got `float`"),
        ({"tokens": [], "masks": []}, ".tokens is empty"),
        ({"tokens": [9, True]}, ".tokens[1] is True: expected `int`, got `bool`"),
        ({"tokens": [9, -3]}, ".tokens[1] is -3"),
        ({"masks": [-100]}, ".masks has 1 entries for 2 tokens"),
        ({"masks": [-100, 4]}, ".masks[1] is 4, neither -100 nor the token id 3"),
        ({"masks": None}, ".masks is None"),
        ({"inference_logprobs": [-1]}, ".inference_logprobs has 1 entries for 2 tokens"),
        ({"inference_logprobs": ["-1", 0]}, ".inference_logprobs[0] is '-1'"),
        ({"advantages": [1e30, 0]}, ".advantages[0] is 1e+30, not a finite number"),
        ({"advantages": [1, 0]}, "advantages[0] is missing, and other paths"),
        ({"distill_token_ids": [[5]]}, ".distill_token_ids has 1 entries for 2 tokens"),
        ({"distill_token_ids": [[5], []]}, ".distill_logprobs has 0 entries for 2 tokens"),
        ({"tokens": [9, 300], "masks": [-100, -100]}, "sent token id 300"),
    ],
)
def test_wrong_branch_is_refused_with_its_place(change, message):
    place = "overrides[0].branches[0]" if message.startswith(".") else ""
    group = make_group(0, 1, overrides=[{"branches": [BRANCH | change]}, {}])
    with pytest.raises(RejectedGroup) as refusal:
        admitted(group, vocab_size=256)
    assert f"{place}{message}" in str(refusal.value)


@settings(max_examples=600, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32))
def test_spoilt_branches_are_refused_or_read_as_json_reads_them(seed):
    """One to three values anywhere in the overrides are junk. Nothing but a refusal comes of it, the
    same for bytes and for objects, and nothing is trained that a refused group has."""
    rng = random.Random(seed)
    group = group_of([item_of(random_episode(rng)) for _ in range(2)])
    for _ in range(rng.randint(1, 3)):
        spoil(rng, group["overrides"])
    outcomes = []
    for raw in (json.loads(json.dumps(group)), json.dumps(group).encode()):
        outcomes.append(read_group(raw))
    first, second = outcomes
    assert type(first) is type(second)
    if isinstance(first, RejectedGroup):
        assert str(first) == str(second)
        return
    intakes = [Intake(1000, 1.0, "raw", vocab_size=256) for _ in outcomes]
    rollouts = [intake.admit([read]) for intake, read in zip(intakes, outcomes)]
    assert_same_rows(*rollouts, but=("arrived",))
    for rollout in rollouts[0]:
        assert_is_tight(rollout)
    for intake in intakes:
        assert len(rollouts[0]) + intake.total_dropped.total() == 2


def spoil(rng: random.Random, value: Any) -> None:
    """Puts junk somewhere into lists and objects."""
    while True:
        places = list(value) if isinstance(value, dict) else range(len(value))
        if not places:
            return
        place = rng.choice(places)
        inner = value[place]
        if not isinstance(inner, list | dict) or not inner or rng.random() < 0.1:
            value[place] = junk(rng, -1, 2, [5], [], {"of": 0})
            return
        value = inner


def test_branch_without_field_is_refused():
    for name in BRANCH:
        branch = {field: value for field, value in BRANCH.items() if field != name}
        with pytest.raises(RejectedGroup, match=f"missing required field `{name}`"):
            branching(branch)


def test_placeholders_on_all_paths_are_refused():
    counted = {"tokens": [[0, 1, 2], [0, 1, 2]], "masks": [[-100, 1, 2]] * 2}
    branch = {"of": 0, "at": 2, "tokens": [2, 3], "masks": [2, 3]}
    with pytest.raises(RejectedGroup, match="placeholder tokens"):
        rollouts_of(branch, **counted, inference_logprobs=None)
    rollouts_of(branch | {"tokens": [2, 5], "masks": [2, 5]}, **counted, inference_logprobs=None)


def test_table_keeps_trees():
    rng = random.Random(0)
    episodes = [random_episode(rng) for _ in range(20)]
    rollouts = admitted(group_of(map(item_of, episodes)), max_sequence_length=1000)
    rollouts += admitted(make_group(0, 1))
    assert_same_rows(from_table(to_table(rollouts)), rollouts, but=("arrived",))


def test_table_without_trees_is_read():
    rollouts = admitted(make_group(0, 1))
    table = to_table(rollouts).drop_columns(["tree"])
    assert_same_rows(from_table(table), rollouts, but=("arrived",))
