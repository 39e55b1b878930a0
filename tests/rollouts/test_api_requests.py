"""How the API of a run reads the JSON of requests: as Atropos' own does, only faster."""

import asyncio
import json
import random
from typing import Any

import pytest
from starlette.requests import Request

from trl_atropos.rollouts.api import reading_quickly

READ_AS_STARLETTE = Request.json
draw = random.Random(0)
NUMBERS = [draw.uniform(-1, 1) * 10.0 ** draw.randint(-320, 300) for _ in range(5000)]
NUMBERS += [0, -0.0, 2**31, -(2**63), 2**80, 5e-324, 1e16]
GROUP = json.dumps({"tokens": [[1, 2], []], "inference_logprobs": [NUMBERS], "sft": None})
BODIES = {
    "a group": GROUP.encode(),
    "NaN": b'{"scores": [NaN, Infinity, -Infinity, 1e400]}',
    "half a character": b'{"messages": "\\ud800"}',
    "characters": '{"messages": "\u00e9\U0001f600"}'.encode(),
    "UTF-16": '{"messages": "\u00e9"}'.encode("utf-16"),
    "a name twice": b'{"scores": 1, "scores": 2}',
    "deep lists": b"[" * 300 + b"]" * 300,
    "nothing": b"",
    "half an object": b'{"tokens": [[1, 2',
    "two values": b"1 2",
    "no text": b"\xff\xfe\xfd",
}


def read_by(method: Any, body: bytes) -> str:
    """What a request with this body has read, or how that failed."""

    async def receive() -> dict:
        return {"type": "http.request", "body": body, "more_body": False}

    request = Request({"type": "http", "headers": []}, receive)
    try:
        return repr(asyncio.run(method(request)))
    except ValueError as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("name", BODIES)
def test_body_is_read_as_atropos_reads_it(name):
    expected = read_by(READ_AS_STARLETTE, BODIES[name])
    assert read_by(reading_quickly(READ_AS_STARLETTE), BODIES[name]) == expected


def test_python_reads_only_what_is_refused():
    async def fail(_request: Request) -> Any:
        raise AssertionError("the slow way")

    assert read_by(reading_quickly(fail), BODIES["a group"]).startswith("{'tokens'")
    with pytest.raises(AssertionError, match="the slow way"):
        read_by(reading_quickly(fail), BODIES["half a character"])
