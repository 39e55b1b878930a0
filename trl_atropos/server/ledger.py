"""What the server remembers for the trainer: which policy versions sampled each completion, and which requests failed.
Runs without vLLM: the front of the mode `restart` keeps a `Ledger`, too."""

import re
import time
from bisect import bisect_right
from collections.abc import Iterable
from operator import itemgetter

from trl_atropos.protocol import EvaluationReply, Note, Refusal, RefusalsReply, Span, reason_in

MAX_REASONS = 20  # the latest reasons of errors are kept
MAX_MESSAGE = 400  # characters


class Ledger:
    """
    What sampled the last `capacity` completions, by `protocol.completion_key`.

    Equal keys are rare (greedy repeats on the same weights, or tokens of probability one). A key that is noted again
    keeps the oldest of its versions: the answer may be too old, but never too new. It is forgotten by when it came
    first, so that an old version does not stick to it for ever.
    """

    def __init__(self, capacity: int = 262_144) -> None:  # about 50 MB
        self.capacity = capacity
        self._notes: dict[bytes, Note] = {}  # in the order in which they were first noted

    def note(self, key: bytes, note: Note) -> None:
        known = self._notes.get(key)
        if known is not None:
            note = note.merged(known)
        elif len(self._notes) >= self.capacity:
            del self._notes[next(iter(self._notes))]
        self._notes[key] = note

    def find(self, keys: Iterable[str]) -> list[Note | None]:
        """What is known of each key, which is given in hexadecimal."""
        return [self._notes.get(bytes.fromhex(key)) for key in keys]

    def keys(self) -> list[str]:
        """All keys in hexadecimal, in the order in which they were first noted."""
        return [key.hex() for key in self._notes]


class Evaluations:
    """Which policy versions have sampled for each evaluation, by the API key of its requests."""

    def __init__(self, capacity: int = 256) -> None:
        self.capacity = capacity
        self._known: dict[str, Span] = {}  # the oldest and the newest

    def note(self, key: str, span: Span) -> None:
        """The versions at the first and last token of a completion."""
        oldest, newest = self._known.get(key, span)
        self._known[key] = min(oldest, *span), max(newest, *span)
        if len(self._known) > self.capacity:
            del self._known[next(iter(self._known))]

    def answer(self, body: dict) -> dict:
        """`POST /trl_atropos/evaluation`."""
        oldest, newest = self._known.get(body["key"], (None, None))
        return EvaluationReply(oldest=oldest, newest=newest).model_dump()


class History:
    """Which version was sampled from at which time. Time is counted in publishes, because a version may come again: a
    new trainer begins at any version."""

    def __init__(self) -> None:
        self.publishes = 0  # so far
        # By adapter id, None for the model itself: (publish, version from then on).
        self._held: dict[int | None, list[tuple[int, int]]] = {None: [(0, 0)]}

    def publish(self, version: int, adapter_id: int | None) -> None:
        """From now on, the adapter with this id holds `version`; if it is None, the model itself does."""
        self.publishes += 1
        self._held.setdefault(adapter_id, []).append((self.publishes, version))

    def version(self, publishes: int, adapter_id: int | None) -> int | None:
        """The version that the model or an adapter held after that many publishes; None for an adapter that was never
        published. Before its first publish, an adapter counts as what it held first: a request may have looked it up
        just before."""
        if (held := self._held.get(adapter_id)) is None:
            return None
        return held[max(0, bisect_right(held, publishes, key=itemgetter(0)) - 1)][1]


class Refusals:
    """Counts the requests of environments that were answered with an error, by reason. The client of an environment
    discards the reason, so without this neither its log nor the trainer would ever show it."""

    def __init__(self) -> None:
        self._total = 0
        # By the message without its numbers, the latest last: count, time of the last one, its message.
        self._reasons: dict[str, tuple[int, float, str]] = {}

    def watched(self, send):
        """The same `send`, which notes an answer that is an error, except 503: the server is shutting down."""
        status = 200

        async def watching(message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif status >= 400 and status != 503 and message.get("body"):
                self._note(f"HTTP {status}: {reason_in(message['body'].decode(errors='replace'))}")
                status = 200  # an answer counts once
            await send(message)

        return watching

    def _note(self, message: str) -> None:
        kind = re.sub(r"\d+", "N", message)
        count, *_ = self._reasons.pop(kind, (0,))
        self._reasons[kind] = count + 1, time.monotonic(), message[:MAX_MESSAGE]
        self._total += 1
        if len(self._reasons) > MAX_REASONS:
            del self._reasons[next(iter(self._reasons))]

    def answer(self) -> dict:
        """`GET /trl_atropos/refusals`."""
        now, reasons = time.monotonic(), reversed(self._reasons.values())
        latest = [Refusal(count=count, seconds_ago=now - last, message=text) for count, last, text in reasons]
        return RefusalsReply(total=self._total, latest=latest).model_dump()
