"""From the bytes of a reply to groups: what is as fast as memory must read as `json` does."""

import json

import numpy as np
import pytest

from tests.rollouts.conftest import DATA, make_group
from trl_atropos.rollouts.decode import Ragged, Unreadable, decode_reply, jsonable

PER_TOKEN = ("tokens", "masks", "inference_logprobs", "advantages", "distill_token_ids", "distill_logprobs")


def body_of(*groups, **options) -> bytes:
    return json.dumps({"batch": groups}, **options).encode()


def plain(groups) -> object:
    """As `json` reads them."""
    return json.loads(json.dumps(groups, default=jsonable))


@pytest.mark.parametrize("name", ["single_turn", "multi_turn", "no_logprobs"])
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_a_recorded_batch_reads_as_json_reads_it(name, separators):
    batch = json.loads((DATA / f"{name}.json").read_text())["batch"]
    assert plain(decode_reply(body_of(*batch, separators=separators)).batch) == batch


def test_lists_of_numbers_become_arrays_without_an_object_per_number():
    teacher = [[[], [4], [1, 2], [3]]] * 2
    group = make_group(0, 1, advantages=[[0, 0.5, 1, -1]] * 2, distill_token_ids=teacher, distill_logprobs=teacher)
    decoded = decode_reply(body_of(group)).batch[0]
    for name in ("tokens", "masks"):
        assert [entry.dtype for entry in decoded[name]] == [np.int64] * 2
    for name in ("inference_logprobs", "advantages"):
        assert [entry.dtype for entry in decoded[name]] == [np.float64] * 2
    assert all(isinstance(entry, Ragged) for name in PER_TOKEN[4:] for entry in decoded[name])
    assert plain([decoded]) == [group]


@pytest.mark.parametrize("name", ["tokens", "inference_logprobs", "distill_token_ids"])
@pytest.mark.parametrize(
    "sequence",
    [
        [[7], [8], [10], [9]],
        [7, [8, 10], [], 9],
        [[7, 8, 10, 9]],
        [[[7]], [[8]], [[10]], [[9]]],
        [[], [[7], [8]], [9], []],
    ],
)
def test_lists_within_lists_are_not_flattened(name, sequence):
    group = make_group(0, 1)
    group[name] = [sequence, [7, 8, 11, 9]]
    assert plain(decode_reply(body_of(group)).batch) == [group]


def test_an_escaped_bracket_hides_no_list():
    """The parser counts one bracket in the text of the message, where the bytes have none."""
    group = make_group(0, 1, messages=[["[ALMOST"], []], tokens=[[7, [8], 10], [7, 8, 11, 9]])
    body = body_of(group).replace(b"[ALMOST", b"\\u005bALMOST")
    assert plain(decode_reply(body).batch) == [group]


def test_of_a_field_that_is_there_twice_the_last_one_counts_as_for_json():
    body = body_of(make_group(0, 1)).replace(b'{"tokens"', b'{"scores": [5, 6], "tokens": [[1], [2]], "tokens"')
    assert plain(decode_reply(body).batch) == [make_group(0, 1)]


@pytest.mark.parametrize("value", [2**64, 10**30, -(10**30)])
def test_an_integer_of_any_size_is_read_exactly(value):
    group = make_group(0, 1, tokens=[[7, 8, value, 9], [7, 8, 11, 9]])
    assert decode_reply(body_of(group)).batch[0]["tokens"][0] == [7, 8, value, 9]


@pytest.mark.parametrize("text", [b'"\xff"', b'"\\ud83d"', b"9" * 5000, b"[" * 995 + b"]" * 995])
def test_a_group_that_cannot_be_read_costs_no_other(text):
    body = body_of(make_group(0, 1), make_group(8, 9, images="HERE"), make_group(2, 3), separators=(",", ":"))
    first, broken, last = decode_reply(body.replace(b'"HERE"', text)).batch
    assert plain([first, last]) == [make_group(0, 1), make_group(2, 3)]
    if not isinstance(broken, Unreadable):
        assert plain(broken["scores"]) == [8, 9]


@pytest.mark.parametrize(
    ("body", "batch"),
    [
        (b'{"batch": null}', None),
        (b'{"batch":null}', None),
        (b'{"batch":[]}', []),
        (b'{"batch":[],"batch":[5]}', [5]),
        (b'{"batch":[{"a":1},{"tokens":2}]}', [{"a": 1}, {"tokens": 2}]),
        (b'{"batch":[{"a":{"b":[{"c":3},{"tokens":2}]}}]}', [{"a": {"b": [{"c": 3}, {"tokens": 2}]}}]),
        (b'{"batch":[{"a":"},{\\"tokens\\":"}]}', [{"a": '},{"tokens":'}]),
        (b' {"step": 1, "batch" : [ {} , 5, "x" ] } ', [{}, 5, "x"]),
    ],
)
def test_groups_are_found_however_the_reply_is_written(body, batch):
    assert decode_reply(body).batch == batch


def test_an_answer_that_there_is_no_trainer_is_told_from_a_batch():
    assert decode_reply(b'{"status":"error","message":"Trainer not registered","batch":[]}').status == "error"
    assert decode_reply(b'{"batch":[]}').status is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"5",
        b"{}",
        b'{"batch":5}',
        b'{"batch":[1,]}',
        b'{"batch":[{}]',
        b'{"batch":[{}]}}',
        b'{"batch":[{}{}]}',
    ]
    + [b'{"batch":[{"a":NaN}, 5]}', b'{"batch":[' + b"[" * 10**6 + b"]" * 10**6 + b"]}", b"<html>502</html>"],
)
def test_what_is_no_batch_raises_nothing_but_a_value_error(body):
    with pytest.raises(ValueError):
        decode_reply(body)
