import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rollouts.conftest import DATA, make_group
from trl_atropos.errors import RolloutError
from trl_atropos.rollouts.schema import RejectedGroup, Row, parse_group, rows_of


def rows(group, max_sequence_length=64, temperature=1.0, single_row_groups="refuse") -> list[Row]:
    return rows_of(
        parse_group(group),
        max_sequence_length=max_sequence_length,
        temperature=temperature,
        single_row_groups=single_row_groups,
    )


def recorded(name: str) -> list[dict]:
    return json.loads((DATA / f"{name}.json").read_text())["batch"]


def is_unknown(logprobs: list[float]) -> list[bool]:
    return [math.isnan(value) for value in logprobs]


def test_a_recorded_group_splits_into_prompt_and_completion_at_the_first_trained_token():
    group = recorded("single_turn")[0]
    row = rows(group)[0]
    assert row.prompt_ids == group["tokens"][0][:4]
    assert row.completion_ids == group["tokens"][0][4:]
    assert row.mask == [1] * 16
    assert row.logprobs == group["inference_logprobs"][0][4:]
    assert (row.score, row.env_id, row.policy_version) == (0.015, 0, None)


def test_a_masked_gap_between_turns_stays_in_the_completion_as_context_without_logprobs():
    group = recorded("multi_turn")[0]
    trained = [mask != -100 for mask in group["masks"][0]]
    first, last = trained.index(True), len(trained) - 1 - trained[::-1].index(True)
    row = rows(group, max_sequence_length=256)[0]
    assert row.mask == [int(entry) for entry in trained[first : last + 1]]
    assert 0 in row.mask
    assert is_unknown(row.logprobs) == [entry == 0 for entry in row.mask]


def test_a_masked_tail_is_cut_off():
    row = rows(make_group(0, 1, masks=[[-100, -100, 10, -100], [-100, -100, 11, 9]]))[0]
    assert row.completion_ids == [10]
    assert len(row.mask) == len(row.logprobs) == 1


def test_a_sequence_trained_from_its_first_token_keeps_one_token_as_prompt():
    row = rows(make_group(0, 1, masks=[[7, 8, 10, 9], [7, 8, 11, 9]]))[0]
    assert (row.prompt_ids, row.completion_ids, row.mask) == ([7], [8, 10, 9], [1, 1, 1])


def test_empty_lists_and_null_both_mean_absent():
    group = recorded("no_logprobs")[0]
    assert group["advantages"] == [] and group["inference_logprobs"] is None
    row = rows(group)[0]
    assert row.token_advantages is None
    assert all(is_unknown(row.logprobs))


@pytest.mark.parametrize("value", [1.0, math.nan, -math.inf, math.inf, None])
def test_a_logprob_that_cannot_be_one_is_unknown(value):
    row = rows(make_group(0, 1, inference_logprobs=[[1.0, 1.0, -0.5, value], [1.0, 1.0, -0.5, -0.1]]))[0]
    assert row.logprobs[0] == -0.5
    assert math.isnan(row.logprobs[1])


def test_logprobs_sent_for_context_tokens_are_not_taken_over():
    row = rows(make_group(0, 1, masks=[[-100, 8, -100, 9]] * 2, inference_logprobs=[[-0.1, -0.2, -0.3, -0.4]] * 2))[0]
    assert is_unknown(row.logprobs) == [False, True, False]


def test_unknown_keys_are_ignored():
    assert len(rows(make_group(0, 1, something_new={"a": 1}))) == 2


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"masks": [[-100, -100, 10, 9], [-100, -100, 11]]}, r"masks\[1\] has 3 entries for 4 tokens"),
        ({"masks": [[-100, -100, 10, 9], [-100, -100, 12, 9]]}, r"masks\[1\]\[2\] is 12, neither -100 nor"),
        ({"masks": [[-100, -100, 10, 9]]}, "masks has 1 entries for 2 sequences"),
        ({"inference_logprobs": [[1.0, -0.5], [1.0, -0.5]]}, r"inference_logprobs\[0\] has 2 entries for 4"),
        ({"advantages": [[0.0, 0.0, 1.0, 1.0], [0.0]]}, r"advantages\[1\] has 1 entries for 4"),
        ({"advantages": [[0.0, 0.0, 1.0, math.nan], [0.0] * 4]}, "advantages.0.3: .*finite"),
        ({"scores": [0.0, math.nan]}, "scores.1: .*finite"),
        ({"scores": [3e38, -3e38]}, "overflow float32"),
        ({"scores": [0.0]}, "scores has 1 entries for 2"),
        ({"tokens": [[7, 8, -1, 9], [7, 8, 11, 9]]}, r"tokens.0.2: .*\(got -1\)"),
        ({"tokens": [[7, 8, 2**31, 9], [7, 8, 11, 9]]}, r"tokens.0.2: .*\(got 2147483648\)"),
        ({"tokens": []}, "tokens: .*at least 1"),
        ({"overrides": [{}]}, "overrides has 1 entries for 2"),
        ({"overrides": [{"sft": True}, {}]}, "supervised step"),
        ({"group_overrides": {"sft": True}}, "supervised step"),
    ],
)
def test_a_bad_group_is_rejected_with_what_is_wrong(fields, reason):
    with pytest.raises(RejectedGroup, match=reason):
        rows(make_group(0, 1, **fields))


def test_a_dropped_row_still_counts_in_its_groups_statistics():
    group = make_group(0, 1, 5)
    group["masks"][2] = [-100] * 4
    kept = rows(group)
    assert len(kept) == 2
    assert kept[0].group_mean == 2.0


def test_a_sequence_of_the_maximum_length_is_kept_and_one_token_more_is_dropped():
    assert len(rows(make_group(0, 1), max_sequence_length=4)) == 2
    assert rows(make_group(0, 1), max_sequence_length=3) == []


def test_a_sequence_whose_only_trained_token_is_its_first_is_dropped():
    assert len(rows(make_group(0, 1, masks=[[7, -100, -100, -100], [-100, -100, 11, 9]]))) == 1


def test_a_group_of_one_is_refused_with_the_settings_that_allow_it():
    with pytest.raises(RolloutError, match=r"single_row_groups` to 'raw' .* or 'zero'"):
        rows(make_group(1))


def test_a_group_of_one_with_an_empty_list_of_token_advantages_is_refused_too():
    with pytest.raises(RolloutError, match="single_row_groups"):
        rows(make_group(1, advantages=[[]]))


def test_a_group_of_one_with_its_own_token_advantages_needs_no_setting():
    assert rows(make_group(1, advantages=[[0.0, 0.0, 0.5, 0.25]]))[0].token_advantages == [0.5, 0.25]


def test_set_advantage_to_zero_marks_only_its_row():
    group = make_group(0, 1, overrides=[{}, {"set_advantage_to_zero": True}])
    assert [row.zero_advantage for row in rows(group)] == [False, True]


def test_token_advantages_are_cut_like_the_completion():
    row = rows(make_group(0, 1, advantages=[[0.0, 0.0, 0.5, -0.5], [0.0, 0.0, 1.5, 2.5]]))[1]
    assert row.token_advantages == [1.5, 2.5]


@pytest.mark.parametrize(
    "fields",
    [
        {"generation_params": {"temperature": 0.7, "max_tokens": 16}},
        {"group_overrides": {"temperature": 0.7}},
        {"overrides": [{}, {"temperature": 0.7}]},
    ],
)
def test_another_temperature_is_refused_with_both_numbers(fields):
    with pytest.raises(RolloutError, match=r"temperature 0\.7, .* temperature 1\.0\. Set `temperature: 0\.7`"):
        rows(make_group(0, 1, **fields))


def test_the_trainers_own_temperature_is_accepted():
    assert len(rows(make_group(0, 1, generation_params={"temperature": 0.7}), temperature=0.7)) == 2


def test_images_are_refused():
    with pytest.raises(RolloutError, match="images"):
        rows(make_group(0, 1, images=[None, ["aGk="]]))


def test_a_list_of_no_images_is_accepted():
    assert len(rows(make_group(0, 1, images=[None, []]))) == 2


def test_placeholder_tokens_are_refused():
    tokens = [list(range(128))] * 2
    masks = [[-100, *range(1, 128)]] * 2
    with pytest.raises(RolloutError, match=r"placeholder tokens .*--openai\.server_type vllm"):
        rows(make_group(0, 1, tokens=tokens, masks=masks, inference_logprobs=None), max_sequence_length=128)


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)
FIELDS = [*make_group(0), "advantages", "overrides", "group_overrides", "generation_params", "images"]
overrides = st.fixed_dictionaries({}, optional={"sft": junk, "temperature": junk, "set_advantage_to_zero": junk})


@settings(max_examples=200, deadline=None)
@given(
    whole=st.none() | junk,
    changes=st.dictionaries(st.sampled_from(FIELDS), junk | overrides | st.lists(overrides, max_size=2)),
    single=st.sampled_from(["refuse", "raw", "zero"]),
)
def test_no_malformed_group_gets_past_the_door_or_breaks_it(whole, changes, single):
    group = make_group(0, 1) | changes if whole is None else whole
    try:
        admitted = rows(group, single_row_groups=single)
    except (RejectedGroup, RolloutError):
        return
    for row in admitted:
        assert row.prompt_ids and row.completion_ids and row.mask[-1] == 1
        assert len(row.mask) == len(row.logprobs) == len(row.completion_ids)
        assert all(map(math.isfinite, (row.score, row.group_mean, row.group_std)))
