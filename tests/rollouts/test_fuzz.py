"""Whatever comes off the wire, the door neither breaks nor hangs: it rejects with a reason or gives
the right rows."""

import http.server
import json
import logging
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.ingest_roles import replying
from tests.rollouts import oracle
from tests.rollouts.conftest import make_group
from tests.rollouts.malformed import malformed_bodies
from tests.tiers import FULL
from trl_atropos.rollouts.api import AtroposClient, ReplyLost
from trl_atropos.rollouts.intake import Intake
from trl_atropos.rollouts.rollout import Rollout
from trl_atropos.rollouts.wire import decode_reply, read_group
from trl_atropos.rollouts.wire_values import RejectedGroup

LONGEST, VOCABULARY, TEMPERATURE = 5, 2**31, 1.0
NO_BATCH_YET: list[Any] = []
DEEP = 100  # lists within lists, above which a parser may give up
DTYPES = {"prompt_ids": "int32", "completion_ids": "int32", "mask": "bool", "logprobs": "float32"}


def door(single: str = "raw", vocabulary: int = VOCABULARY) -> Intake:
    return Intake(LONGEST, TEMPERATURE, single, vocab_size=vocabulary)


@pytest.fixture(autouse=True)
def no_warnings(caplog):
    caplog.set_level(logging.ERROR)  # there are thousands


@pytest.mark.slow
@pytest.mark.seconds(20)
@settings(
    max_examples=10_000 if FULL else 4_000,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=not FULL,  # else other examples each time, not always the same
)
@given(body=malformed_bodies)
def test_batch_is_refused_or_admitted_as_by_oracle(body):
    single = ("raw", "zero", "refuse")[len(body) % 3]
    expected = read(body)
    try:
        groups = decode_reply(body).batch
    except ValueError as error:
        assert str(error)
        assert expected is None or not is_strict(body), f"refused ({error}), but it is a batch"
        return
    if expected is None:  # a group that cannot be read must not cost the others of its batch
        assert any(isinstance(group, RejectedGroup) for group in groups), (
            "it is no batch, but was taken for one"
        )
        assert door().admit([group for group in groups if isinstance(group, RejectedGroup)]) == []
        return
    assert (groups is None) == (expected is NO_BATCH_YET)
    for group, as_json in zip(groups or [], expected, strict=True):
        compare(group, as_json, single)


@settings(
    max_examples=2_000, deadline=None, suppress_health_check=list(HealthCheck), derandomize=not FULL
)
@given(body=malformed_bodies, evaluation=st.booleans())
def test_group_rollouts_are_all_admitted_or_dropped(body, evaluation):
    for sent in read(body) or []:
        if evaluation and isinstance(sent, dict):
            sent["group_overrides"] = {"evaluation": True}
        group = read_group(sent)
        intake = door(("raw", "zero", "refuse")[len(body) % 3])
        admitted = len(intake.admit([group]))
        tokens = sent.get("tokens") if isinstance(sent, dict) else None
        received = len(tokens) if isinstance(tokens, list) else 0
        dropped = intake.total_dropped
        assert admitted + dropped.total() == received, (sent, dropped)
        assert all(count >= 0 for count in dropped.values())
        assert dropped.pop("joined") == 0
        reported = intake.metrics()
        assert {reason: reported[f"rollouts/dropped_{reason}"] for reason in dropped} == dropped
        assert not (evaluation and admitted)


def read(body: bytes) -> list[Any] | None:
    """The groups as `json` reads them, NO_BATCH_YET for a null batch, or None if this is no
    batch."""
    try:
        reply = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if (
        not isinstance(reply, dict)
        or "batch" not in reply
        or reply.get("status") not in (None, "error")
    ):
        return None
    batch = reply["batch"]
    return NO_BATCH_YET if batch is None else batch if isinstance(batch, list) else None


def is_strict(body: bytes) -> bool:
    """Whether everybody reads this as JSON: no NaN, no half of a surrogate pair, no depth."""
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    return b"[" * DEEP not in body.replace(b" ", b"")


def compare(group: Any, as_json: Any, single: str) -> None:
    intake = door(single)
    rows: list[Rollout] | None = intake.admit([group])
    if intake.metrics()["rollouts/rejected_groups"]:
        rows = None
    try:
        expected = oracle.judge(
            as_json, longest=LONGEST, sampled_at=TEMPERATURE, single=single, vocabulary=VOCABULARY
        )
    except oracle.Rejected:
        assert rows is None, f"{as_json} must be rejected"
        return
    assert isinstance(rows, list), f"{as_json} is good, and was refused"
    assert len(rows) == len(expected), as_json
    for row, wanted in zip(rows, expected):
        compare_rows(row, wanted)


def compare_rows(row: Rollout, wanted: dict[str, Any]) -> None:
    for name, dtype in DTYPES.items():
        assert getattr(row, name).dtype == dtype
    for name in ("prompt_ids", "completion_ids", "mask"):
        assert getattr(row, name).tolist() == wanted[name], name
    assert same_floats(row.logprobs, wanted["logprobs"])
    assert (row.token_advantages is None) == (wanted["token_advantages"] is None)
    if row.token_advantages is not None:
        assert row.token_advantages.dtype == np.float32
        assert same_floats(row.token_advantages, wanted["token_advantages"])
    for name in ("score", "zero_advantage", "raw_advantage", "sft", "env_id", "rewards"):
        assert getattr(row, name) == wanted[name] and type(getattr(row, name)) is type(
            wanted[name]
        ), name
    scale = 1 + abs(wanted["score"]) + abs(wanted["group_mean"]) + wanted["group_std"]
    assert abs(row.group_mean - wanted["group_mean"]) < 1e-5 * scale
    assert abs(row.group_std - wanted["group_std"]) < 1e-3 * scale
    compare_teachers(row, wanted["distill"])
    if row.messages is not None:
        assert json.dumps(json.loads(row.messages)) == without_half_pairs(wanted["messages"])


def same_floats(values: np.ndarray, wanted: list[float]) -> bool:
    return len(values) == len(wanted) and all(
        a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(values.tolist(), wanted)
    )


def compare_teachers(row: Rollout, wanted: list[list[tuple[int, float]]] | None) -> None:
    if wanted is None or not any(wanted):
        assert row.distill_ids is None and row.distill_logprobs is None
        return
    assert row.distill_ids.shape == row.distill_logprobs.shape
    assert (row.distill_ids.dtype, row.distill_logprobs.dtype) == (np.int32, np.float32)
    got = [
        list(zip(*pair))
        for pair in zip(row.distill_ids.tolist(), row.distill_logprobs.tolist(), strict=True)
    ]
    assert all((i == -1) == math.isnan(value) for position in got for i, value in position)
    assert [[pair for pair in position if pair[0] != -1] for position in got] == wanted


def without_half_pairs(text: str) -> str:
    """The JSON of what is left when UTF-8 has no place for a half of a surrogate pair."""
    encodable = json.dumps(json.loads(text), ensure_ascii=False).encode("utf-8", "replace")
    return json.dumps(json.loads(encodable))


# --------------------------------------------------------------------------- over a real connection


@contextmanager
def answering(body: bytes) -> Iterator[AtroposClient]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), replying(body)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        client = AtroposClient(f"http://127.0.0.1:{server.server_address[1]}", 10.0, 60.0)
        yield client
        server.shutdown()


LARGE = 100_000_000  # bytes


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("no JSON", lambda: b"x" * LARGE),
        ("never closed", lambda: b'{"batch":[' + b"[" * LARGE),
        ("deep", lambda: b'{"batch":[' + b"[" * (LARGE // 2) + b"]" * (LARGE // 2) + b"]}"),
        ("cut off", lambda: b'{"batch":[{"tokens":[[' + b"7," * (LARGE // 2)),
        ("half of a string", lambda: b'{"batch":[{"messages":"' + "é".encode() * (LARGE // 2)),
        ("nothing", lambda: b""),
    ],
)
def test_huge_body_without_batch_is_lost_with_reason(name, body):
    with answering(body()) as client, pytest.raises(ReplyLost, match="which is no batch") as caught:
        client.batch()
    assert len(str(caught.value)) < 1000


def test_huge_group_does_not_cost_its_batch():
    groups = [make_group(0, 1), make_group(8, 9, tokens=["LARGE", [7]]), make_group(2, 3)]
    body = (
        json.dumps({"batch": groups})
        .encode()
        .replace(b'"LARGE"', b"[" + b"7," * (LARGE // 2) + b"7]")
    )
    with answering(body) as client:
        rows = door().admit(client.batch().batch)
    assert [row.score for row in rows] == [0, 1, 2, 3]
