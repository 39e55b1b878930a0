"""A teacher's top-k log-probabilities, as environments send them for distillation.

`wire.py` checks them with `teachers`, `schema.py` cuts them to the completion with `Teacher.padded`.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from trl_atropos.rollouts.decode import Ragged
from trl_atropos.rollouts.values import is_absent, list_of, log_probabilities, reject, token_ids


@dataclass(frozen=True, eq=False)
class Teacher:
    """Of one sequence: entry `i` of each is about token `i`, with as many entries as the teacher gave there."""

    ids: Ragged  # of int32
    logprobs: Ragged  # of float32, with the same lengths; NaN = none

    def padded(self, part: slice) -> tuple[np.ndarray, np.ndarray] | None:
        """
        The tokens of `part` as ids `(c, k)` int32, -1 = absent, and log-probabilities `(c, k)` float32, NaN = absent,
        where k is the most that one of them has; None if none has any.
        """
        counts = self.ids.lengths[part]
        before = int(self.ids.lengths[: part.start].sum())
        end = before + int(counts.sum())
        known = ~np.isnan(self.logprobs.values[before:end])
        if not known.any():
            return None
        present = np.arange(counts.max()) < counts[:, None]
        ids = np.full(present.shape, -1, dtype=np.int32)
        logprobs = np.full(present.shape, np.nan, dtype=np.float32)
        ids[present] = np.where(known, self.ids.values[before:end], -1)
        logprobs[present] = self.logprobs.values[before:end]
        return ids, logprobs


def teachers(ids: Any, logprobs: Any, lengths: list[int]) -> list[Teacher | None]:
    """
    One for each sequence, or None where the environment sent nothing.

    Args:
        ids: `distill_token_ids` of the group, `[sequence][token][k]`.
        logprobs: `distill_logprobs`, of the same shape.
        lengths: of the sequences, in tokens.

    Raises:
        RejectedGroup: one of them has another shape, or something else than numbers in it.
    """
    absent = [is_absent(ids), is_absent(logprobs)]
    if all(absent):
        return [None] * len(lengths)
    if any(absent):
        there, missing = ("distill_logprobs", "distill_token_ids")[:: 1 if absent[0] else -1]
        reject(f"{there} came without {missing}")
    per_sequence = []
    for name, value in (("distill_token_ids", ids), ("distill_logprobs", logprobs)):
        entries = list_of(name, value)
        if len(entries) != len(lengths):
            reject(f"{name} has {len(entries)} entries for {len(lengths)} sequences")
        per_sequence.append(entries)
    return [_teacher(i, *of_one) for i, of_one in enumerate(zip(*per_sequence, lengths))]


def _teacher(i: int, ids: Any, logprobs: Any, length: int) -> Teacher | None:
    if is_absent(ids) and is_absent(logprobs):
        return None
    ids = _ragged(f"distill_token_ids[{i}]", ids, token_ids, length)
    logprobs = _ragged(f"distill_logprobs[{i}]", logprobs, log_probabilities, length)
    same = ids.lengths == logprobs.lengths
    if not same.all():
        position = int(np.argmin(same))
        counts = f"{logprobs.lengths[position]} entries for {ids.lengths[position]} token ids"
        reject(f"distill_logprobs[{i}][{position}] has {counts}")
    return Teacher(ids, logprobs)


def _ragged(name: str, value: Any, check: Any, length: int) -> Ragged:
    if not isinstance(value, Ragged):
        entries = [[] if is_absent(entry) else entry for entry in list_of(name, value)]
        parts = [check(f"{name}[{position}]", entry) for position, entry in enumerate(entries)]
        lengths = np.array([len(part) for part in parts], dtype=np.int64)
        value = Ragged(np.concatenate(parts or [np.array([])]), lengths)
    else:
        value = Ragged(check(name, value.values), value.lengths)
    if len(value.lengths) != length:
        reject(f"{name} has {len(value.lengths)} entries for {length} tokens")
    return value
