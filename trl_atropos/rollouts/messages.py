"""The conversation of a rollout, as text for human readers: it ends up in the table of completions, and on disk."""

import json
from typing import Any

from trl_atropos.rollouts.values import is_absent

MAX_BYTES = 64 * 1024  # of one rollout's text


def messages_of(value: Any, size: int) -> list[str | None]:
    """
    The JSON text of each sequence's messages, of at most `MAX_BYTES` bytes in UTF-8, or None where there are none.
    Longer ones lose messages at their end. Nothing is trained on them, so that no shape of theirs is an error.
    """
    if not isinstance(value, list) or len(value) != size:
        return [None] * size
    return [None if is_absent(messages) else _text(messages) for messages in value]


def _text(messages: Any) -> str | None:
    try:
        text = _dumps(messages)
    except RecursionError:  # nested a thousand times: for no reader
        return None
    if len(text) * 4 <= MAX_BYTES or _size(text) <= MAX_BYTES:  # no character takes more than four bytes
        return text
    entries = messages if isinstance(messages, list) else [messages]
    kept: list[Any] = []
    room = MAX_BYTES - 200  # for the note
    for entry in entries:
        room -= _size(_dumps(entry)) + 2
        if room < 0:
            break
        kept.append(entry)
    left_out = f"{len(entries) - len(kept)} more messages; {_size(text)} bytes in all"
    return _dumps([*kept, {"role": "note", "content": left_out}])


def _dumps(value: Any) -> str:
    """Readable JSON. Half a surrogate pair, which JSON can escape and UTF-8 cannot hold, becomes a question mark."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace").decode()


def _size(text: str) -> int:
    return len(text.encode())
