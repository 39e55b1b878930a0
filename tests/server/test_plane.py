"""Who waits at the door of a server, what it remembers of errors and evaluations. Without a server
or vLLM."""

import asyncio

import pytest

from trl_atropos.protocol import TOKEN_VARIABLE, SessionQuery
from trl_atropos.server import plane
from trl_atropos.server.plane import ControlPlane, Evaluations, Refusals, Refused
from trl_atropos.server.sessions import Sessions


@pytest.fixture
def door(monkeypatch) -> ControlPlane:
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    return ControlPlane()


def test_server_closes_itself_before_a_session_is_open(door, monkeypatch):
    """Nobody knows what runs in a session."""
    open_sessions = []
    monkeypatch.setattr(plane, "close_to_others", lambda: open_sessions.append(sessions.num_open))
    sessions = Sessions(door, None)
    asyncio.run(sessions.open(SessionQuery()))
    assert open_sessions == [0]
    assert sessions.num_open == 1


def test_server_without_token_is_refused(monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "")
    with pytest.raises(RuntimeError, match=f"without a control token in {TOKEN_VARIABLE}"):
        ControlPlane()


@pytest.mark.parametrize(
    ("waiting", "share", "let_in"),
    # a part of one is one
    [(4, 0.0, 0), (4, 0.5, 2), (5, 0.5, 3), (3, 0.1, 1), (3, 1.0, 3), (0, 1.0, 0)],
)
def test_share_of_waiting_requests_enters_in_order(door, waiting, share, let_in):
    async def those_let_in() -> list[int]:
        turns = [asyncio.get_running_loop().create_future() for _ in range(waiting)]
        door.waiting.extend(turns)
        door.hold_back(True, share)
        return [number for number, turn in enumerate(turns) if turn.done()]

    assert asyncio.run(those_let_in()) == list(range(let_in))
    assert door.holding and len(door.waiting) == waiting - let_in


def test_abandoned_request_has_no_part_in_share(door):
    async def those_let_in() -> list[bool]:
        gone, gone_too, *others = turns = [
            asyncio.get_running_loop().create_future() for _ in range(4)
        ]
        door.waiting.extend(turns)
        gone.cancel(), gone_too.cancel()
        door.hold_back(True, 0.5)
        seen = [turn.done() for turn in others]
        door.hold_back(False, 1.0)
        return [*seen, *(turn.done() for turn in others)]

    assert asyncio.run(those_let_in()) == [True, False, True, True]


def test_request_waits_on_if_next_pause_comes_first(door):
    async def passed() -> list[bool]:
        seen = []
        request = asyncio.create_task(door.until_open())
        await asyncio.sleep(0)
        door.open.set()  # which wakes the request,
        door.open.clear()  # but the plane is paused again when it is its turn
        for _ in range(3):
            await asyncio.sleep(0)
        seen.append(request.done())
        door.open.set()
        await request
        return [*seen, request.done()]

    assert asyncio.run(passed()) == [False, True]


def test_broken_server_refuses_waiting_requests(door):
    door.broken = "the weights are torn"
    door.open.set()
    with pytest.raises(Refused, match="the weights are torn") as refused:
        asyncio.run(door.until_open())
    assert refused.value.status == 503


# -------------------------------------------------------------------------------- what it remembers


def answered(refusals: Refusals, status: int, *bodies: bytes) -> None:
    """A response in parts, as an application sends it through the middleware."""

    async def send(message: dict) -> None:
        pass

    async def respond() -> None:
        watched = refusals.watched(send)
        await watched({"type": "http.response.start", "status": status})
        for number, body in enumerate(bodies, start=1):
            await watched(
                {"type": "http.response.body", "body": body, "more_body": number < len(bodies)}
            )

    asyncio.run(respond())


def test_refusals_count_once_and_not_at_shutdown():
    refusals = Refusals()
    for length in (600, 601):
        answered(refusals, 400, b'{"error": "a prompt of %d tokens' % length, b' is too long"}')
    answered(refusals, 200, b"fine")
    answered(refusals, 503, b"going away")
    answered(refusals, 500, b'{"error": "NaN"}')
    told = refusals.answer()
    assert told["total"] == 3
    assert [(one["count"], one["message"][:8]) for one in told["latest"]] == [
        (1, "HTTP 500"),
        (2, "HTTP 400"),
    ]
    assert "601" in told["latest"][1]["message"]  # the last of its kind


def test_latest_refusal_reasons_are_kept():
    refusals = Refusals()
    for letter in "abcdefghijklmnopqrstuvwxyz":
        answered(refusals, 400, f'{{"error": "{letter}"}}'.encode())
        answered(refusals, 400, b'{"error": "always"}')
    told = refusals.answer()
    assert (told["total"], len(told["latest"])) == (52, plane.MAX_REASONS)
    assert (told["latest"][0]["count"], told["latest"][0]["message"]) == (26, "HTTP 400: always")
    assert told["latest"][1]["message"].endswith("z") and told["latest"][-1]["message"].endswith(
        "h"
    )


def test_evaluation_has_oldest_and_newest_version():
    evaluations = Evaluations(capacity=2)
    for span in [(4, 5), (3, 4), (5, 7), (4, 4)]:
        evaluations.note("b", span)
    assert evaluations.answer({"key": "b"}) == {"oldest": 3, "newest": 7}
    assert evaluations.answer({"key": "a"}) == {"oldest": None, "newest": None}
    for key in "cd":
        evaluations.note(key, (8, 8))
    assert evaluations.answer({"key": "b"}) == {"oldest": None, "newest": None}  # forgotten
    assert evaluations.answer({"key": "c"}) == {"oldest": 8, "newest": 8}
