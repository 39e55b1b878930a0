"""The reply of `GET /batch`, from bytes to groups, with lists of numbers as arrays: as fast as memory, and exact.

`AtroposClient.batch` calls `decode_reply`; `wire.py` checks what comes out. Each group is read by itself, so that one
that cannot be read costs no other. simdjson copies a list of numbers into one buffer without making a Python object of
each. It flattens lists within lists on the way, without a word. So the opening brackets of the text are counted; where
there is one too many, `json` reads the group, slowly and surely.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
import simdjson

INTEGERS, FLOATS = ("i", np.int64), ("d", np.float64)
PER_TOKEN = {"tokens": INTEGERS, "masks": INTEGERS, "inference_logprobs": FLOATS, "advantages": FLOATS}
PER_TOKEN_LISTS = {"distill_token_ids": INTEGERS, "distill_logprobs": FLOATS}
HEAD, BETWEEN, TAIL = b'{"batch":[', b'},{"tokens":', b"]}"  # of a reply, as atroposlib 0.4 writes it
ESCAPED_BRACKET = b"\\u005"  # how JSON may write "[" without the character


@dataclass(frozen=True, eq=False)
class Ragged:
    """A list of lists of numbers: `values` end to end, `lengths[i]` of them in the list at `i`."""

    values: np.ndarray  # (sum of lengths,) int64 or float64
    lengths: np.ndarray  # (length,) int64

    def tolist(self) -> list[list[int | float]]:
        return [part.tolist() for part in np.split(self.values, np.cumsum(self.lengths)[:-1])]


@dataclass(frozen=True)
class Unreadable:
    """Stands for a group whose text is not JSON, or nested too deeply to be read."""

    reason: str

    def tolist(self) -> str:
        return self.reason


class _Reply(msgspec.Struct):
    batch: list[msgspec.Raw] | None
    status: Literal["error"] | None = None


@dataclass(frozen=True)
class BatchReply:
    """`batch` is None while no batch can be assembled; `status` is "error" when no trainer is registered."""

    batch: list[Any] | None
    status: Literal["error"] | None


def decode_reply(body: bytes) -> BatchReply:
    """
    Groups in `batch` are as `json.loads` reads them, but for the fields in `PER_TOKEN` and `PER_TOKEN_LISTS`: of each
    sequence, a list of nothing but numbers is an array of int64 or float64 `(length,)`, or a `Ragged`.

    Raises:
        ValueError: the body is not the JSON of such a reply, or has a group nested so deeply that nobody can read it.
    """
    parser = simdjson.Parser()  # one, because its memory is several times a group's
    groups = [decode_group(text, parser) for text in _presumed_groups(body)]
    if groups and all(isinstance(group, dict) for group in groups):
        return BatchReply(groups, None)
    try:
        reply = msgspec.json.decode(body, type=_Reply)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    batch = None if reply.batch is None else [decode_group(bytes(text), parser) for text in reply.batch]
    return BatchReply(batch, reply.status)


def _presumed_groups(body: bytes) -> Iterator[bytes]:
    """
    The texts of the groups, if the reply is written as the API writes it: looked for with `memchr`, not read. They are
    the groups if each of them is an object by itself, because what is between them is a comma.
    """
    if not (body.startswith(HEAD) and body.endswith(TAIL)):
        return
    start = len(HEAD)
    at = body.find(b"{", start + 1)
    while at > 0:
        if body.startswith(BETWEEN, at - 2):
            yield body[start : at - 1]
            start = at
        at = body.find(b"{", at + 1)
    yield body[start : -len(TAIL)]


def decode_group(text: bytes, parser: simdjson.Parser) -> Any:
    """One group, see `decode_reply`. Anything else than an object comes back as `json.loads` reads it."""
    try:
        group = _decode_fast(text, parser)
    except (ValueError, RuntimeError):  # more than simdjson takes, such as integers of 65 bits or a depth of 1024
        group = None
    if group is not None:
        return group
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # also for text that is not UTF-8, and integers of 4301 digits
        return Unreadable(f"{type(error).__name__}: {error}")


def jsonable(value: Any) -> Any:
    """The `default` of `json.dumps` that writes groups from here as they were."""
    return value.tolist()


def _decode_fast(text: bytes, parser: simdjson.Parser) -> dict[str, Any] | None:
    """The group, or None where only `json` can tell what it is."""
    document = parser.parse(text)
    if not isinstance(document, simdjson.Object):
        return None
    names = list(document.keys())
    if len(set(names)) < len(names):  # it would give the first of them, and `json` the last
        return None
    group: dict[str, Any] = {}
    flat = inside = 0  # opening brackets: of lists that were copied as numbers, and of everything else
    for name in names:
        value = document[name]
        inside += name.count("[")
        if isinstance(value, simdjson.Array) and name in PER_TOKEN:
            group[name] = sequences = [_numbers(entry, *PER_TOKEN[name]) for entry in value]
        elif isinstance(value, simdjson.Array) and name in PER_TOKEN_LISTS:
            group[name] = sequences = [_ragged(entry, *PER_TOKEN_LISTS[name]) for entry in value]
        else:
            group[name] = _plain(value)
            inside += _brackets(value)
            continue
        flat += 1
        for entry, sequence in zip(value, sequences, strict=True):
            if isinstance(sequence, np.ndarray):
                flat += 1
            elif isinstance(sequence, Ragged):
                flat += 1 + len(sequence.lengths)
            else:
                inside += _brackets(entry)
    if text.count(b"[") != flat + inside or (inside and b"\\" in text and ESCAPED_BRACKET in text):
        return None
    return group


def _numbers(value: Any, kind: str, dtype: type) -> Any:
    if not isinstance(value, simdjson.Array):
        return _plain(value)
    try:
        return np.frombuffer(value.as_buffer(of_type=kind), dtype=dtype)
    except (TypeError, ValueError):  # something else than numbers of this kind is in it
        return value.as_list()


def _ragged(value: Any, kind: str, dtype: type) -> Any:
    if not isinstance(value, simdjson.Array) or not len(value):
        return _plain(value)
    try:
        lengths = np.array([len(entry) for entry in value], dtype=np.int64)
        values = np.frombuffer(value.as_buffer(of_type=kind), dtype=dtype)
    except (TypeError, ValueError):
        return value.as_list()
    return Ragged(values, lengths)


def _plain(value: Any) -> Any:
    if isinstance(value, simdjson.Array):
        return value.as_list()
    return value.as_dict() if isinstance(value, simdjson.Object) else value


def _brackets(value: Any) -> int:
    """Opening brackets in the text of `value`, but for those that it escapes."""
    if isinstance(value, str):
        return value.count("[")
    return value.mini.count(b"[") if isinstance(value, simdjson.Array | simdjson.Object) else 0
