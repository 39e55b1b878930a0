"""From the bytes of a reply to groups: what msgspec reads by type must be what `json` reads."""

import json
import math
from dataclasses import fields
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.rollouts.conftest import DATA, make_group, text_of
from trl_atropos.rollouts.wire import (
    RejectedGroup,
    ScoredGroup,
    decode_reply,
    parse_group,
    read_group,
)
from trl_atropos.rollouts.wire_values import MASKED


def body_of(*groups, **options) -> bytes:
    return json.dumps({"batch": groups}, **options).encode()


def plain(value: Any) -> Any:
    """Arrays as lists, to compare."""
    if isinstance(value, np.ndarray):
        return [value.dtype.name, value.tolist()]
    if isinstance(value, list):
        return [plain(entry) for entry in value]
    if hasattr(value, "__dataclass_fields__"):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, RejectedGroup):
        return [str(value), value.env_id, value.size]
    return msgspec.to_builtins(value) if isinstance(value, msgspec.Struct) else value


def same(group: Any, other: Any) -> bool:
    return json.dumps(plain(group)) == json.dumps(plain(other))  # where NaN equals NaN


@pytest.mark.parametrize("name", ["single_turn", "multi_turn", "no_logprobs"])
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_recorded_batch_is_read_to_last_bit(name, separators):
    batch = json.loads((DATA / f"{name}.json").read_text())["batch"]
    for group, sent in zip(
        decode_reply(body_of(*batch, separators=separators)).batch, batch, strict=True
    ):
        assert [ids.tolist() for ids in group.tokens] == sent["tokens"]
        trained = [[entry != MASKED for entry in mask] for mask in sent["masks"]]
        assert [mask.tolist() for mask in group.trained] == trained
        assert group.scores == sent["scores"]
        for logprobs, given in zip(
            group.logprobs, sent["inference_logprobs"] or [None] * len(group.tokens)
        ):
            expected = (
                None
                if given is None
                else [np.float32(x) if x <= 0 else np.float32(np.nan) for x in given]
            )
            assert (
                plain(logprobs) == plain(None)
                if given is None
                else np.array_equal(logprobs, expected, True)
            )
        assert same(group, parse_group(sent))


def test_fields_become_arrays_of_their_type():
    ids, logprobs = [[[], [4], [1, 2], [3]]] * 2, [[[], [-4], [-1, 2], [-3]]] * 2
    group = make_group(
        0, 1, advantages=[[0, 0.5, 1, -1]] * 2, distill_token_ids=ids, distill_logprobs=logprobs
    )
    (read,) = decode_reply(body_of(group)).batch
    assert {one.dtype.name for one in read.tokens} == {"int32"} and {
        one.dtype.name for one in read.trained
    } == {"bool"}
    assert {one.dtype.name for one in read.logprobs} == {"float32"}
    assert read.advantages[0].tolist() == [0, 0.5, 1, -1]
    # 2 is above 0: unknown
    assert plain(read.distill_ids[0]) == ["int32", [[-1, -1], [4, -1], [1, -1], [3, -1]]]
    assert read.distill_logprobs[0].dtype == np.float32
    assert np.nan_to_num(read.distill_logprobs[0], nan=9).tolist() == [
        [9, 9],
        [-4, 9],
        [-1, 9],
        [-3, 9],
    ]


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
    (read,) = decode_reply(body_of(group)).batch
    assert isinstance(read, RejectedGroup) and same(read, read_group(group))
    assert str(read).startswith(name) and (read.env_id, read.size) == (0, 2)


def test_escaped_bracket_counts_as_bracket():
    group = make_group(0, 1, messages=[["[ALMOST"], []])
    body = body_of(group).replace(b"[ALMOST", b"\\u005bALMOST")
    assert same(decode_reply(body).batch[0], parse_group(group))


def test_repeated_field_has_last_value_as_in_json():
    body = body_of(make_group(0, 1)).replace(
        b'{"tokens"', b'{"scores": [5, 6], "tokens": [[1], [2]], "tokens"'
    )
    assert same(decode_reply(body).batch[0], parse_group(make_group(0, 1)))
    wrong = body_of(make_group(0, 1)).replace(b'{"tokens"', b'{"tokens": 5, "tokens"')
    assert same(decode_reply(wrong).batch[0], parse_group(make_group(0, 1)))


@pytest.mark.parametrize("value", [2**64, 10**30, -(10**30)])
def test_integer_of_any_size_is_read_exactly(value):
    group = make_group(0, 1, tokens=[[7, 8, value, 9], [7, 8, 11, 9]])
    assert decode_reply(body_of(group)).batch[0].args[0].startswith(f"tokens[0][2] is {value}: ")
    kept = parse_group(text_of(make_group(0, 1, messages=[[value], [0.1]])))
    assert kept.messages == [json.dumps([value]), "[0.1]"]


@pytest.mark.parametrize(
    "text", [b'"\xff"', b'"\\ud83d"', b"9" * 5000, b"[" * 995 + b"]" * 995, b"NaN", b"1e999"]
)
def test_unreadable_group_costs_no_other(text):
    body = body_of(
        make_group(0, 1), make_group(8, 9, images="HERE"), make_group(2, 3), separators=(",", ":")
    )
    first, broken, last = decode_reply(body.replace(b'"HERE"', text)).batch
    assert same([first, last], [parse_group(make_group(0, 1)), parse_group(make_group(2, 3))])
    assert isinstance(broken, RejectedGroup) or broken.scores == [8, 9]


def test_non_json_group_is_rejected_with_reason():
    assert (
        read_group(b'{"tokens": [[1]]').args[0].startswith("the group is not JSON that can be read")
    )


@pytest.mark.parametrize(
    ("body", "groups"),
    [
        (b'{"batch": null}', None),
        (b'{"batch":null}', None),
        (b'{"batch":[]}', []),
        (b'{"batch":[],"batch":[5]}', [5]),
        (b'{"batch":[{"a":1},{"tokens":2}]}', [{"a": 1}, {"tokens": 2}]),
        (
            b'{"batch":[{"a":{"b":[{"c":3},{"tokens":2}]}}]}',
            [{"a": {"b": [{"c": 3}, {"tokens": 2}]}}],
        ),
        (b'{"batch":[{"a":"},{\\"tokens\\":"}]}', [{"a": '},{"tokens":'}]),
        (b'{"batch":[{"a":NaN}, 5]}', [{"a": float("nan")}, 5]),
        (
            b'{"batch":[-Infinity,{"tokens":[[1]]},{"tokens":2}]}',
            [-math.inf, {"tokens": [[1]]}, {"tokens": 2}],
        ),
        (b' {"step": 1, "batch" : [ {} , 5, "x" ] } ', [{}, 5, "x"]),
    ],
)
def test_groups_are_found_in_any_reply_layout(body, groups):
    read = decode_reply(body).batch
    assert (read is None) == (groups is None)
    assert [repr(group) for group in read or []] == [
        repr(read_group(group)) for group in groups or []
    ]
    assert all(isinstance(group, RejectedGroup) for group in read or [])


def test_missing_trainer_answer_is_told_from_batch():
    assert (
        decode_reply(b'{"status":"error","message":"Trainer not registered","batch":[]}').status
        == "error"
    )
    assert decode_reply(b'{"batch":[]}').status is None


def test_unknown_field_is_ignored():
    assert isinstance(read_group(text_of(make_group(0, 1, new={"a": [1]}))), ScoredGroup)


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
    + [b'{"batch":[' + b"[" * 10**6 + b"]" * 10**6 + b"]}", b"<html>502</html>"],
)
def test_non_batch_raises_only_value_error(body):
    with pytest.raises(ValueError):
        decode_reply(body)


def test_lone_surrogate_in_key_costs_no_group():
    body = json.dumps(
        {"batch": [make_group(0, 1, generation_params={"\ud83d": 1}), make_group(2, 3)]}
    ).encode()
    for text in (
        body,
        body.replace(b'{"batch": [', b'{"batch":[').replace(b', {"tokens": ', b',{"tokens":'),
    ):
        assert [group.scores for group in decode_reply(text).batch] == [[0, 1], [2, 3]]
