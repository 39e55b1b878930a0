"""What a session has sampled is one rollout, with each sampled token once."""

import json

import pytest

from trl_atropos.protocol import SessionReply
from trl_atropos.rollouts.episodes import session_episode
from trl_atropos.rollouts.intake import Intake
from trl_atropos.rollouts.wire import read_group


def call(segment: int, reason: str | None = None) -> dict:
    return {
        "call": segment,
        "segment": segment,
        "route": "/v1/chat/completions",
        "settings": {"temperature": 1.0},
        "finish": "stop",
        "reason": reason,
        "versions_known": True,
    }


def segment(parent: int, at: int, context: list[int], sampled: list[int]) -> dict:
    start, end = len(context), len(context) + len(sampled)
    return {
        "parent": parent,
        "at": at,
        "tokens": context + sampled,
        "sampled": [(start, end)],
        "logprobs": [-0.1 * token for token in sampled],
        "versions": [(7, start, end)],
    }


def reply(reason: str | None = None) -> SessionReply:
    """A call, one that leaves it inside of its prompt, one that goes on from that, and a context of
    its own, whose call may be marked with a reason."""
    content = {
        "segments": [
            segment(-1, 0, [1, 2, 3], [4, 5]),
            segment(0, 2, [6], [7]),
            segment(1, 4, [8], [9]),
            segment(-1, 0, [10], [11]),
        ],
        "calls": [call(0), call(1), call(2), call(3, reason)],
        "counts": {},
        "ended": "deleted",
    }
    return SessionReply.model_validate(content)


@pytest.mark.parametrize("reason", [None, "min_tokens"])
def test_session_is_rollout_with_branches(reason):
    item = session_episode(reply(reason))
    group = {field: [value] * 2 for field, value in item.items()} | {"scores": [0.0, 1.0]}
    body = json.dumps(group).encode()
    rollout, _ = Intake(100, 1.0, "refuse").admit([read_group(body)])
    assert rollout.prompt_ids.tolist() == [1, 2, 3]
    trained = [4, 5, 7, 9] if reason else [4, 5, 7, 9, 11]
    assert rollout.completion_ids[rollout.mask].tolist() == trained
    known = rollout.logprobs[rollout.mask]
    assert known.tolist() == pytest.approx([-0.1 * token for token in trained])
    paths = [rollout.row[path].tolist() for path in rollout.tree.paths]
    expected = [[1, 2, 3, 4, 5], [1, 2, 6, 7], [1, 2, 6, 7, 8, 9], [10, 11]]
    assert paths == expected[: len(paths)]
    assert len(paths) == (3 if reason else 4)


def test_session_without_calls_is_no_rollout():
    content = {"segments": [], "calls": [], "counts": {}, "ended": None}
    assert session_episode(SessionReply.model_validate(content)) is None
