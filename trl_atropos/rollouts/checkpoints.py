"""How far back the spool must reach: to where the oldest checkpoint in the run's folder would go on from."""

import json
from pathlib import Path
from typing import Any

STATE_NAME = "RolloutState"
"""Under which the source's state is among the `stateful_callbacks` of a checkpoint's `trainer_state.json`."""


def source_state(stateful_callbacks: dict[str, Any] | None) -> tuple[dict[str, Any] | None, int]:
    """The source's state in a checkpoint, None if it has none, and how many rows of its last batch are untrained."""
    saved = (stateful_callbacks or {}).get(STATE_NAME)
    return (saved["attributes"]["source"], saved["attributes"]["unfinished_rows"]) if saved else (None, 0)


class Checkpoints:
    """Those of one run. What it has read of one is not read again."""

    def __init__(self, output_dir: str | Path, spool: str):
        self._output_dir = Path(output_dir)
        self._spool = spool
        self._cursors: dict[str, int | None] = {}

    def oldest_cursor(self) -> int | None:
        """The smallest cursor into this run's spool of all whole checkpoints, None if there is none."""
        paths = [str(path) for path in self._output_dir.glob("checkpoint-*/trainer_state.json")]
        self._cursors = {path: self._cursors.get(path) or self._cursor(path) for path in paths}
        return min((cursor for cursor in self._cursors.values() if cursor is not None), default=None)

    def _cursor(self, path: str) -> int | None:
        try:
            state, _ = source_state(json.loads(Path(path).read_text(encoding="utf-8"))["stateful_callbacks"])
        except (OSError, ValueError, KeyError, TypeError):  # half written: no run can resume from it
            return None
        return state["cursor"] if state and state.get("spool") == self._spool else None
