"""The values of one path of tokens, from the lists of JSON to arrays, checked for shape and value.

`wire.py` reads a group's types with msgspec, and calls `read_path` for each path of each rollout.
Errors name the place of the value, such as `masks[2][4]` or `overrides[2].branches[0].masks[4]`.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from reprlib import repr as short
from typing import Any

import numpy as np

MASKED = -100
FLOAT32_MAX = float(np.finfo(np.float32).max)
# Largest score or advantage. Norms, standard deviations and Adam add up squares: float32 holds
# 2**48 squares of this.
LARGEST = 2.0**40
# Nats. vLLM writes -9999 for a probability of 0; float32 sums with lower values lose what the
# others add.
LOWEST_LOGPROB = -1e4

Number = float | int  # a big integer stays exact until it is checked


class RejectedGroup(ValueError):
    """One group cannot be used; the message has the value seen. In a batch, it stands for its
    group.

    Args:
        reason: what is wrong with it.
        kind: each kind is warned about once.
        fix: what to change if most groups of the environment are so, which ends the run. Empty for
        accidents.
    """

    def __init__(self, reason: str, kind: str = "malformed", fix: str = ""):
        super().__init__(reason)
        self.kind = kind
        self.fix = fix
        self.env_id: int | None = None
        self.size = 0  # rollouts


@dataclass(frozen=True, eq=False)
class ScoredPath:
    """The tokens that a path of a rollout adds to an earlier one. Entry `j` of each array is about
    token `j` of these; None: nothing was sent."""

    of: int  # number of the earlier path; -1 for the first, which adds its tokens to none
    at: int  # how many tokens of that path it shares, from its start; 0 = a context of its own
    tokens: np.ndarray  # (length,) int32
    trained: np.ndarray  # (length,) bool, False where the mask is -100
    logprobs: np.ndarray | None  # (length,) float32, NaN = unknown
    advantages: np.ndarray | None  # (length,) float64
    # (length, k) int32, a teacher's tokens at each token; -1 = absent
    distill_ids: np.ndarray | None
    distill_logprobs: np.ndarray | None  # (length, k) float32; NaN = absent

    @property
    def length(self) -> int:
        """Tokens of the whole path, with those that it shares."""
        return self.at + len(self.tokens)


def require_size(name: str, entries: Sequence, size: int, of: str = "rollouts") -> None:
    """Raises `RejectedGroup` if there are not `size` entries."""
    if len(entries) != size:
        raise RejectedGroup(f"{name} has {len(entries)} entries for {size} {of}")


def trained_tokens(name: str, mask: list[int], tokens: np.ndarray) -> np.ndarray:
    """Returns the tokens that the mask marks, `(length,)` bool. An entry is -100, or the token
    itself: `[-100, 5, 6]` marks the last two of `[4, 5, 6]`."""
    require_size(name, mask, len(tokens), "tokens")
    try:
        entries = np.fromiter(mask, np.int32, len(mask))
    except OverflowError:
        entries = np.array(mask, dtype=object)
    trained = entries != MASKED
    good = (entries == tokens) | ~trained
    if not good.all():
        wrong = int(np.argmin(good))
        seen = short(mask[wrong])
        token = tokens[wrong]
        raise RejectedGroup(f"{name}[{wrong}] is {seen}, neither {MASKED} nor the token id {token}")
    return trained


Check = Callable[[str, list], np.ndarray]


def per_token(name: str, entries: Any, length: int, check: Check) -> np.ndarray | None:
    """Returns the checked values of one path, None if it has none."""
    if not entries:
        return None
    require_size(name, entries, length, "tokens")
    return check(name, entries)


def _floats(entries: list) -> np.ndarray:
    """Returns float64, NaN for null. An integer that float64 cannot hold becomes infinite, whatever
    its sign."""
    try:
        with suppress(TypeError):  # of a null; where there is none, this is faster
            return np.fromiter(entries, np.float64, len(entries))
        return np.array(entries, dtype=np.float64)
    except OverflowError:
        return np.array([_representable(entry) for entry in entries], np.float64)


def _representable(entry: Number | None) -> Number | None:
    if entry is not None and abs(entry) > FLOAT32_MAX:
        return math.inf
    return entry


def finite(name: str, entries: list) -> np.ndarray:
    """Returns `(length,)` float64. Rejects numbers of which float32 cannot hold the squares."""
    values = _floats(entries)
    good = np.abs(values) <= LARGEST
    if not good.all():
        wrong = int(np.argmin(good))
        raise RejectedGroup(
            f"{name}[{wrong}] is {short(entries[wrong])}, not a finite number of at most "
            f"{LARGEST:.3g}, beyond which sums of squares overflow float32"
        )
    return values


def log_probabilities(name: str, entries: list) -> np.ndarray:
    """Returns `(length,)` float32, NaN for entries that are no log-probability: null, below the
    lowest, or above 0, as Atropos pads with 1.0."""
    values = _floats(entries)
    is_logprob = (values <= 0.0) & (values >= LOWEST_LOGPROB)
    values[~is_logprob] = np.nan
    return values.astype(np.float32)


def teacher(
    ids_name: str, ids: Any, logprobs_name: str, logprobs: Any, length: int
) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
    """
    Returns what a teacher sent for one path, `(length, k)` each, padded with -1 and NaN.

    For example, ids `[[], [8], [11, 12], [9]]` for four tokens become
    `[[-1, -1], [8, -1], [11, 12], [9, -1]]`.
    """
    if not ids and not logprobs:
        return None, None
    ids = _lists(ids_name, ids, length)
    logprobs = _lists(logprobs_name, logprobs, length)
    counts = np.zeros(length, dtype=np.int64)
    for position in range(length):
        count = len(ids[position])
        name = f"{logprobs_name}[{position}]"
        require_size(name, logprobs[position], count, "token ids")
        counts[position] = count
    k = counts.max(initial=0)
    present = np.arange(k) < counts[:, None]  # (length, k)
    flat_ids = np.array(list(chain.from_iterable(ids)), np.int32)
    flat_logprobs = log_probabilities("", list(chain.from_iterable(logprobs)))
    flat_ids[np.isnan(flat_logprobs)] = -1
    padded_ids = _padded(present, flat_ids, -1)
    padded_logprobs = _padded(present, flat_logprobs, np.nan)
    return padded_ids, padded_logprobs


def _padded(present: np.ndarray, values: np.ndarray, filler: float) -> np.ndarray:
    """Returns an array like `present` with the values where that is true: 5 and 6 at the true ones
    of `[[False, True], [True, False]]` are `[[-1, 5], [6, -1]]` with the filler -1."""
    padded = np.full(present.shape, filler, values.dtype)
    padded[present] = values
    return padded


def _lists(name: str, value: Any, length: int) -> list[list]:
    """Returns one list per token, an empty one for null."""
    entries = value or []
    require_size(name, entries, length, "tokens")
    return [entry or [] for entry in entries]
