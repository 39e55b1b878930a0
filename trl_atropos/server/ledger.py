"""Which policy versions sampled each completion, with which settings: written below the routes, read by the trainer.

`recorder.py` (or `front.py`, for an engine that is restarted) notes completions in a `Ledger`; what a token's version
is, it takes from a `History`. Runs without vLLM.
"""

from bisect import bisect_right
from collections.abc import Iterable
from operator import itemgetter

from trl_atropos.protocol import Note, VersionsQuery, VersionsReply

CAPACITY = 262_144  # completions; about 50 MB


class Ledger:
    """
    What sampled the last `capacity` completions, by `protocol.completion_key`.

    A key that is noted again keeps the oldest of its versions, and has the settings that it came with last. Equal keys
    are rare (they have equal log-probabilities to the last bit: greedy repeats on the same weights, or tokens of
    probability one), and nothing tells which of them a rollout came from: some never come, and one may be in several
    rollouts. So the answer may be too old, but never too new. A key is forgotten by when it came first, so that an old
    version does not stick to it for ever.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity = capacity
        self._notes: dict[bytes, Note] = {}  # in the order in which they were noted first

    def note(self, key: bytes, note: Note) -> None:
        known = self._notes.get(key)
        if known is not None:
            note = note.merged(known)
        elif len(self._notes) >= self.capacity:
            del self._notes[next(iter(self._notes))]
        self._notes[key] = note

    def find(self, keys: Iterable[bytes]) -> list[Note | None]:
        return [self._notes.get(key) for key in keys]

    def answer(self, body: dict) -> dict:
        """`POST /trl_atropos/versions`. Raises `ValueError` if the body is not a `VersionsQuery`."""
        keys = [bytes.fromhex(key) for key in VersionsQuery.model_validate(body).keys]
        return VersionsReply.of(self.find(keys)).model_dump()

    def keys(self) -> list[str]:
        """All of them, in hexadecimal, in the order in which they came."""
        return [key.hex() for key in self._notes]


class History:
    """
    What sampled at which time. Time is counted in publishes, because a version may come again: a new trainer begins
    where it likes.

    Attributes:
        publishes (`int`): How many there have been.
    """

    def __init__(self) -> None:
        self.publishes = 0
        # By adapter id, None for the model itself: from which publish on it held which version.
        self._held: dict[int | None, list[tuple[int, int]]] = {None: [(0, 0)]}

    def publish(self, version: int, adapter_id: int | None) -> None:
        """From here on, the adapter with this id holds `version`; the model itself, if it is None."""
        self.publishes += 1
        self._held.setdefault(adapter_id, []).append((self.publishes, version))

    def version(self, publishes: int, adapter_id: int | None) -> int | None:
        """What the model, or an adapter, held after that many publishes; None for an adapter that never came by one.

        An adapter that was not held yet had been looked up before its publish, and is used behind it.
        """
        held = self._held.get(adapter_id)
        if held is None:
            return None
        return held[max(0, bisect_right(held, publishes, key=itemgetter(0)) - 1)][1]
