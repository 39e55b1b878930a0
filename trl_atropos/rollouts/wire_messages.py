"""The conversations that come with a group, as text for human readers."""

import json
from typing import Any

MAX_MESSAGE_BYTES = 64 * 1024  # of one rollout's messages


def message_texts(value: Any, size: int) -> list[str | None]:
    """Returns the JSON text of each rollout's messages, at most 64 KiB: longer conversations lose
    their last messages. They are for human readers only, so no shape of them is an error."""
    is_per_rollout = isinstance(value, list) and len(value) == size
    if not is_per_rollout:
        return [None] * size
    return [_message_text(messages) for messages in value]


def _message_text(messages: Any) -> str | None:
    if not messages:
        return None
    try:
        text = dumps(messages)
    except RecursionError:  # nested too deeply to be read by anybody
        return None
    total = len(text.encode())
    if total <= MAX_MESSAGE_BYTES:
        return text
    entries = [messages]
    if isinstance(messages, list):
        entries = messages
    kept = []
    left = MAX_MESSAGE_BYTES - 200  # for the note
    for entry in entries:
        text = dumps(entry)
        left -= len(text.encode()) + len(", ")
        if left < 0:
            break
        kept.append(entry)
    left_out = len(entries) - len(kept)
    note = {"role": "note", "content": f"{left_out} more messages; {total} bytes in all"}
    return dumps([*kept, note])


def dumps(value: Any) -> str:
    """Returns JSON. Half a surrogate pair, which UTF-8 cannot hold, becomes a question mark."""
    text = json.dumps(value, ensure_ascii=False)
    return text.encode("utf-8", "replace").decode()
