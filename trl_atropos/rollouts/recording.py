"""The file format of recorded rollouts, in one place: `AtroposSource` writes it, `ReplaySource` reads it.

JSON lines, one pulled batch per line, exactly as the Atropos API delivered it: `{"batch": [group, ...]}`. Also read:
lines that are one bare group, and `.json` files with one such object in them. `.arrow` files are a spool's, and hold
rows (`spool.py`).
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from trl_atropos.errors import RolloutError
from trl_atropos.rollouts.decode import jsonable

SUFFIXES = (".json", ".jsonl", ".arrow")


def record_batch(path: str | Path, groups: Sequence[object]) -> None:
    """Append one batch, as delivered, to the file at `path`; its directory is made if missing."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"batch": list(groups)}, default=jsonable) + "\n")


class Recorder:
    """Writes batches in the order of the run, though the newest of a burst comes first."""

    def __init__(self, path: str | Path):
        self._path = path
        self._waiting: dict[int, Sequence[object]] = {}

    def add(self, start: int, groups: Sequence[object], complete_until: int) -> None:
        """A batch whose first row has index `start`; below `complete_until`, no other will come."""
        self._waiting[start] = groups
        for ready in sorted(start for start in self._waiting if start < complete_until):
            record_batch(self._path, self._waiting.pop(ready))


def recorded_files(paths: Sequence[str | Path]) -> list[Path]:
    """
    The files that `paths` name, a directory standing for its `.json`, `.jsonl` and `.arrow` files sorted by name.

    Raises:
        RolloutError: a path does not exist, or a directory has no such file.
    """
    if not paths:
        fix = "Name a file or a folder, or leave it out to train on a live API."
        raise RolloutError("`replay_paths` is empty", "replay_paths: []", fix, "replay")
    files: list[Path] = []
    for path in map(Path, paths):
        found = sorted(p for p in path.iterdir() if p.suffix in SUFFIXES) if path.is_dir() else [path]
        if not found or not path.exists():
            fault = "holds no .json, .jsonl or .arrow file" if path.exists() else "does not exist"
            what, seen = f"{path} {fault}, so there are no recorded rollouts to replay", f"replay_paths: {list(paths)}"
            raise RolloutError(what, seen, "Correct the path.", "replay")
        files += found
    return files


def read_batches(path: Path) -> Iterator[list[object]]:
    """
    The batches in `path`, in order, each a list of groups not yet validated.

    Raises:
        RolloutError: a line is not JSON, or is neither a batch nor a group; names the file and the line.
    """
    if path.suffix == ".json":
        yield _batch(path.read_text(encoding="utf-8"), str(path))
        return
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _batch(line, f"{path}, line {number}")


def _batch(text: str, place: str) -> list[object]:
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise RolloutError(
            f"{place} is not JSON ({error}). A recording that was cut off ends like this: delete that line."
        ) from error
    if isinstance(record, dict) and "tokens" in record:
        return [record]
    if isinstance(record, dict) and isinstance(record.get("batch"), list):
        return record["batch"]
    raise RolloutError(
        f'{place} is neither a batch ({{"batch": [...]}}) nor a group ({{"tokens": ...}}), but {text.strip()[:80]!r}. '
        "Record batches with `AtroposSource(record_to=...)`, or leave this file out."
    )
