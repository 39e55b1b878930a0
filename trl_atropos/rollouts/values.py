"""Lists of numbers off the wire: whole-array checks that name the first entry that is wrong.

Each takes what `decode.py` made of a list, an array of int64 or float64, or the Python list that `json` reads where
something else than numbers is in it. `wire.py` and `teacher.py` call these.
"""

import json
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

INT32_MAX = np.iinfo(np.int32).max
FLOAT32_MAX = float(np.finfo(np.float32).max)
SHOWN = 60  # characters of a value in a message
SHOWN_BITS = 256


class RejectedGroup(ValueError):
    """One group cannot be used. `kind` is a short constant to count by, the message has the values seen."""

    def __init__(self, kind: str, reason: str):
        super().__init__(reason)
        self.kind = kind


def reject(reason: str) -> NoReturn:
    raise RejectedGroup("malformed", reason)


def short(value: Any) -> str:
    """A value for a message, whatever its size and depth."""
    if isinstance(value, list | np.ndarray):
        return f"a list of {len(value)} entries"
    if isinstance(value, dict):
        return f"an object of {len(value)} entries"
    if isinstance(value, str):
        return repr(value[:SHOWN]) + ("..." if len(value) > SHOWN else "")
    if isinstance(value, int) and value.bit_length() > SHOWN_BITS:
        return f"an integer of {value.bit_length()} bits"
    return json.dumps(value) if value is None or isinstance(value, bool) else repr(value)


def is_absent(value: Any) -> bool:
    """Atropos's collectors send empty lists and objects for what they do not have."""
    return value is None or (isinstance(value, list | dict | np.ndarray) and len(value) == 0)


def list_of(name: str, value: Any) -> list:
    if not isinstance(value, list):
        reject(f"{name} is {short(value)}, not a list")
    return value


def token_ids(name: str, value: Any) -> np.ndarray:
    """`(length,)` int32. Rejects anything but integers from 0 to 2147483647."""
    expected = f"not a token id from 0 to {INT32_MAX}"
    if not isinstance(value, np.ndarray):
        entries = list_of(name, value)
        _check_each(name, entries, lambda entry: type(entry) is int and 0 <= entry <= INT32_MAX, expected)
        return np.array(entries, dtype=np.int32)
    _check_all(name, value, (value >= 0) & (value <= INT32_MAX), expected)
    return value.astype(np.int32)


def finite_floats(name: str, value: Any) -> np.ndarray:
    """`(length,)` float64. Rejects anything but numbers that float32 can hold."""
    expected = "not a finite number that float32 can hold"
    if not isinstance(value, np.ndarray):
        entries = list_of(name, value)
        # Comparisons, which also sort out NaN and integers beyond float64.
        _check_each(name, entries, lambda entry: _is_number(entry) and abs(entry) <= FLOAT32_MAX, expected)
        return np.array(entries, dtype=np.float64)
    _check_all(name, value, np.abs(value) <= FLOAT32_MAX, expected)
    return value


def log_probabilities(name: str, value: Any) -> np.ndarray:
    """
    `(length,)` float32, NaN where there is none: null, infinite, not a number, or above 0, as Atropos pads with 1.0.
    Rejects anything but numbers and null.
    """
    if not isinstance(value, np.ndarray):
        entries = list_of(name, value)
        _check_each(name, entries, lambda entry: entry is None or _is_number(entry), "neither a number nor null")
        known = [entry if entry is not None and abs(entry) <= FLOAT32_MAX else np.nan for entry in entries]
        value = np.array(known, dtype=np.float64)
    return np.where((value <= 0.0) & (value >= -FLOAT32_MAX), value, np.nan).astype(np.float32)


def _is_number(entry: Any) -> bool:
    return type(entry) is int or type(entry) is float


def _check_each(name: str, entries: list, is_good: Callable[[Any], bool], expected: str) -> None:
    for position, entry in enumerate(entries):
        if not is_good(entry):
            reject(f"{name}[{position}] is {short(entry)}, {expected}")


def _check_all(name: str, values: np.ndarray, good: np.ndarray, expected: str) -> None:
    if not good.all():
        position = int(np.argmin(good))
        reject(f"{name}[{position}] is {values[position].item()}, {expected}")
