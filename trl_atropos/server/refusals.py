"""Counts the requests of environments that were answered with an error, by reason.

The client of an environment throws the reason away, so that neither its log nor the trainer would ever have it.
`Control` has every answer of a route that samples go through `Refusals.watched`, and the trainer asks for the counts
when no rollouts come.
"""

import json
import re
import time
from dataclasses import dataclass

from trl_atropos.protocol import Refusal, RefusalsReply

MAX_REASONS = 20  # that are remembered, the latest
MAX_MESSAGE = 400  # characters


@dataclass
class _Reason:
    count: int
    last: float  # time.monotonic()
    message: str


class Refusals:
    def __init__(self) -> None:
        self._total = 0
        self._reasons: dict[str, _Reason] = {}  # by a message without its numbers, the latest last

    def watched(self, send):
        """The same `send`, which notes an answer that is an error. That the server shuts down is none."""
        status = 200

        async def watching(message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif status >= 400 and status != 503 and message.get("body"):
                self.note(f"HTTP {status}: {_reason_in(message['body'])}")
                status = 200  # once
            await send(message)

        return watching

    def note(self, message: str) -> None:
        kind = re.sub(r"\d+", "N", message)
        known = self._reasons.pop(kind, None)
        count = 1 if known is None else known.count + 1
        self._reasons[kind] = _Reason(count, time.monotonic(), message[:MAX_MESSAGE])
        self._total += 1
        if len(self._reasons) > MAX_REASONS:
            del self._reasons[next(iter(self._reasons))]

    def told(self) -> dict:
        """`GET /trl_atropos/refusals`."""
        now = time.monotonic()
        latest = [
            Refusal(count=reason.count, seconds_ago=now - reason.last, message=reason.message)
            for reason in reversed(self._reasons.values())
        ]
        return RefusalsReply(total=self._total, latest=latest).model_dump()


def _reason_in(body: bytes) -> str:
    """The message in an answer of ours, or of vLLM's routes, which have it one level deeper."""
    try:
        told = json.loads(body)["error"]
        return str(told["message"] if isinstance(told, dict) else told)
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")
