"""Every pulled batch on disk before any rollout of it is trained: one Arrow file per batch in `<output_dir>/rollouts`.

`AtroposSource` appends to it, reads back from it what it hands out, and begins with what is there after a crash.
`datasets.load_dataset("arrow", data_files="<output_dir>/rollouts/*.arrow")` reads it, too, and so does `replay_paths`.

All rollouts that the environments produced in a run are numbered from 0, in their order. A file covers `size` numbers
from `start` on: first those that were dropped or lost, which it only counts, then the rollouts that it holds. So the
index of a rollout is how many were trained, dropped or lost before it.
"""

import json
import logging
import os
import re
import time
import uuid
import zlib
from bisect import insort
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from trl_atropos.errors import RolloutError
from trl_atropos.rollouts.row import Rollout, from_table, to_table

logger = logging.getLogger(__name__)

HEADER = b"trl_atropos"  # key of the metadata in a file's schema
FORMAT = 1
META = "spool.meta"
SEAL = b'"crc32": "%08x"'  # in the header; of the whole file as if the sum were 0
SEALED = re.compile(rb'"crc32": "([0-9a-f]{8})"')
ABANDONED = "abandoned"  # branch of a version that a path has not reached yet, and nobody says which it was
STATE_NAME = "RolloutState"
"""Under which the source's state is among the `stateful_callbacks` of a checkpoint's `trainer_state.json`."""


@dataclass(frozen=True)
class Region:
    """Batches that the API assembled at once, and how far they have been delivered: newest first."""

    registration: str  # of the trainer, as the API knows it
    step: int  # of the API, after it had assembled them
    base: int  # index of the first rollout of the oldest
    batch_size: int
    batches: int
    left: int  # not yet delivered, all older than those that were

    @property
    def end(self) -> int:
        return self.base + self.batches * self.batch_size


@dataclass(frozen=True)
class Part:
    """What one file says about itself."""

    start: int
    size: int
    region: Region
    dropped: dict[str, int] = field(default_factory=dict)  # rollouts by reason, on the way from the API to here
    lost_with_api: int = 0
    lineage: list[list] = field(default_factory=list)  # path of the run when the batch was pulled, see `staleness`
    version: int = 0  # that the trainer then had

    @property
    def end(self) -> int:
        return self.start + self.size

    @property
    def missing(self) -> int:
        return sum(self.dropped.values()) + self.lost_with_api


def new_branch(version: int) -> list:
    """An entry of a run's path, for a run that begins or resumes at `version`."""
    return [uuid.uuid4().hex[:8], version]


def staleness(sampled: int | None, born: list[list], heard_at: int, path: list[list], now: int) -> int | None:
    """
    Optimizer steps from the version that sampled a rollout to version `now` of the run on `path`, None if that version
    is unknown.

    Versions count optimizer steps, and a run that resumes from the checkpoint of version c abandons the versions above
    c, and makes other ones of the same numbers. So a version is a number on a *branch*, and the path of a run is the
    list of its branches, each `[name, version that it began from]`. The way leads over the last version in common.

    Args:
        sampled: `Rollout.policy_version`.
        born: path of the run that pulled the rollout, at its version `heard_at`.
    """
    if sampled is None:
        return None
    if sampled > heard_at:  # it lay in the future: what the last resume abandoned sampled it
        born = [*born[:-1], [ABANDONED, born[-1][1]]]
    common = 0
    while common < min(len(born), len(path)) and born[common] == path[common]:
        common += 1
    shared = min([sampled, now, *(began for _, began in (*born[common:], *path[common:]))])
    return (sampled - shared) + (now - shared)


class Spool:
    """
    Args:
        folder: made if missing.
        max_bytes: see `trim`.

    `parts` are the files that are there, oldest first.

    Raises:
        RolloutError: The folder cannot be written to, or holds something that was not written by this class.
    """

    def __init__(self, folder: str | Path, max_bytes: float):
        self.folder = Path(folder)
        self._max_bytes = max_bytes
        self.parts: list[Part] = []
        self._bytes: dict[int, int] = {}  # of each file, by start
        self._arrived: dict[int, float] = {}  # time.monotonic() of those that this process wrote, by start
        with _writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            _sync_folder(self.folder.parent)
            for torn in self.folder.glob(".*.tmp"):
                torn.unlink()
            self._read_meta()
        for path in sorted(self.folder.glob("rows-*.arrow")):
            self._take(path)
        self.parts.sort(key=lambda part: part.start)

    def _read_meta(self) -> None:
        """`spool.meta` has this spool's name, and which registrations at which API step are its run's."""
        path = self.folder / META
        if not path.exists():
            self.name = uuid.uuid4().hex
            self.registrations: dict[str, int] = {}
            self._write_meta()
            return
        try:
            meta = json.loads(path.read_text(encoding="utf-8"))
            self.name, self.registrations = meta["name"], meta["registrations"]
        except (ValueError, KeyError, TypeError) as error:
            raise RolloutError(
                f"{path} is not what this program wrote ({error!r}). Move {self.folder} away to begin without the "
                "rollouts in it."
            ) from error

    def _write_meta(self) -> None:
        meta = {"name": self.name, "format": FORMAT, "registrations": self.registrations}
        self._put(META, json.dumps(meta).encode())

    def note_registration(self, registration: str, step: int) -> None:
        """On disk before the API hears of it, so that after a crash its rollouts are known to be this run's."""
        self.registrations[registration] = step
        with _writing(self.folder):
            self._write_meta()

    # --------------------------------------------------------------------------------------------------------- writing

    @property
    def end(self) -> int:
        """The index that the next rollout will get."""
        return self.parts[-1].end if self.parts else 0

    def append(self, part: Part, rollouts: Sequence[Rollout]) -> None:
        """
        Write one batch. When this returns, it survives a power cut. Sets the `index` of each rollout.

        Raises:
            RolloutError: It could not be written; everything that was there before still is.
        """
        for position, rollout in enumerate(rollouts):
            rollout.index = part.start + part.missing + position
        assert part.missing + len(rollouts) == part.size, f"{part} with {len(rollouts)} rollouts"
        header = json.dumps({"format": FORMAT, "spool": self.name, "crc32": f"{0:08x}", **asdict(part)})
        table = to_table(rollouts, time.time()).replace_schema_metadata({HEADER: header})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        content = sink.getvalue().to_pybytes()
        content = _replace_seal(content, SEAL % 0, SEAL % zlib.crc32(content))
        with _writing(self.folder):
            self._put(_name(part.start), content)
        self._bytes[part.start] = len(content)
        self._arrived[part.start] = time.monotonic()
        insort(self.parts, part, key=lambda each: each.start)

    def _put(self, name: str, content: bytes) -> None:
        """The whole file under its name, or nothing."""
        draft = self.folder / f".{name}.tmp"
        try:
            with draft.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self.folder / name)
        except BaseException:  # also on Ctrl-C: half a file must not stay
            draft.unlink(missing_ok=True)
            raise
        _sync_folder(self.folder)

    # --------------------------------------------------------------------------------------------------------- reading

    def _take(self, path: Path) -> None:
        try:
            part = read_part(path, self.name)
        except RolloutError as error:
            logger.warning("%s It is passed over.", error)
            return
        if part.start in self._bytes:
            raise RolloutError(f"{path} has the same rollouts as another file in {self.folder}. Delete one of them.")
        self._bytes[part.start] = path.stat().st_size
        self.parts.append(part)

    def next_part(self, position: int, limit: int) -> Part | None:
        """The first file with a rollout at index `position` or beyond, if it begins below `limit`."""
        found = next((part for part in self.parts if part.end > position), None)
        return found if found is not None and found.start < limit else None

    def read(self, part: Part) -> list[Rollout]:
        """The rollouts of one file. Raises `RolloutError` if they cannot be read any more."""
        return read_rollouts(self.folder / _name(part.start), self._arrived.get(part.start))

    # -------------------------------------------------------------------------------------------------------- trimming

    def excess(self) -> float:
        """Bytes above the limit."""
        return sum(self._bytes.values()) - self._max_bytes

    def trim(self, floor: int) -> bool:
        """
        Remove the oldest files whose rollouts are all below index `floor`, until the rest is within the limit. Returns
        whether there was one.
        """
        before = len(self.parts)
        while self.parts and self.excess() > 0 and self.parts[0].end <= floor:
            part = self.parts.pop(0)
            del self._bytes[part.start]
            self._arrived.pop(part.start, None)
            with _writing(self.folder):
                (self.folder / _name(part.start)).unlink(missing_ok=True)
        return len(self.parts) < before

    def last_region(self) -> Region | None:
        """The one that was being delivered when the last file was written."""
        if not self.parts:
            return None
        base = max(part.region.base for part in self.parts)
        return min((part.region for part in self.parts if part.region.base == base), key=lambda region: region.left)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turns what the operating system says into what the user can do."""
    try:
        yield
    except OSError as error:
        raise RolloutError(
            f"Rollouts cannot be kept in {folder}: {error.strerror}. Nothing that is there is lost. Make room (or "
            "lower `max_spool_gb`), or let this user write there, and resume from the last checkpoint."
        ) from error


def read_part(path: Path, spool: str) -> Part:
    """What the file at `path` says about itself. Raises `RolloutError` if it is torn, or not of the spool so named."""
    try:
        with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
            header = json.loads((reader.schema.metadata or {}).get(HEADER, b"{}"))
        header.pop("crc32", None)
        region = Region(**header.pop("region"))
        if (header.pop("spool"), header.pop("format")) != (spool, FORMAT):
            raise ValueError("it is of another run")
        return Part(**header, region=region)
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError) as error:
        raise _unreadable(path, error) from error


def read_rollouts(path: Path, arrived: float | None = None) -> list[Rollout]:
    """
    The rollouts in the file at `path`, which arrive now if it is not said when.

    Raises:
        RolloutError: it is torn or damaged, or not a spool's.
    """
    try:
        content = path.read_bytes()
        seal = SEALED.search(content)  # files of earlier versions have none
        if seal is not None and SEAL % zlib.crc32(_replace_seal(content, seal[0], SEAL % 0)) != seal[0]:
            raise ValueError("its checksum is wrong: the disk has changed it")
        with pa.ipc.open_file(pa.py_buffer(content)) as reader:
            return from_table(reader.read_all(), time.monotonic() if arrived is None else arrived)
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> RolloutError:
    return RolloutError(f"{path} is not a whole file of rollouts ({type(error).__name__}: {error}).")


def _replace_seal(content: bytes, old: bytes, new: bytes) -> bytes:
    """Arrow writes the header first, and once more at the end; what is between may look like it."""
    first, last = content.find(old), content.rfind(old)
    between = content[first + len(old) : last]
    return b"".join((content[:first], new, between, new, content[last + len(old) :]))


def _name(start: int) -> str:
    return f"rows-{start:012d}.arrow"


def _sync_folder(folder: Path) -> None:
    """A new name is on disk only when its folder is."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_spool(folder: Path, state: dict[str, Any] | None, max_bytes: float) -> Spool:
    """
    The spool of the run that goes on from `state` (see `RunInfo`). One of another run in its place gets another name,
    beside its own.
    """
    spool = Spool(folder, max_bytes)
    ours = state is not None and state.get("spool", spool.name) == spool.name
    if ours or not spool.parts:
        return spool
    number = 1
    while (aside := folder.with_name(f"{folder.name}-before-{number}")).exists():
        number += 1
    try:
        folder.rename(aside)
    except OSError as error:
        raise RolloutError(
            f"{folder} has the rollouts of an earlier run and cannot be renamed ({error.strerror}). Set `output_dir` "
            "to another folder, or move it away."
        ) from error
    logger.warning(
        "%s has the rollouts of an earlier run, and this one %s. They are now in %s: delete that if you do not need "
        "it.",
        folder,
        "begins anew" if state is None else "resumes from a checkpoint of another",
        aside,
    )
    return Spool(folder, max_bytes)


# --------------------------------------------------------------------------------------------------------- checkpoints


def source_state(stateful_callbacks: dict[str, Any] | None) -> tuple[dict[str, Any] | None, int]:
    """The source's state in a checkpoint, None if it has none, and how many of its last batch are untrained."""
    saved = (stateful_callbacks or {}).get(STATE_NAME)
    return (saved["attributes"]["source"], saved["attributes"]["unfinished_rows"]) if saved else (None, 0)


def oldest_cursor(output_dir: str | Path, spool: str) -> int | None:
    """
    How far back the spool of that name must reach: the smallest cursor into it of all whole checkpoints in
    `output_dir`, None if there is none.
    """
    return min(
        (
            cursor
            for path in Path(output_dir).glob("checkpoint-*/trainer_state.json")
            if (cursor := _cursor(path, spool)) is not None
        ),
        default=None,
    )


def _cursor(path: Path, spool: str) -> int | None:
    try:
        state, _ = source_state(json.loads(path.read_text(encoding="utf-8"))["stateful_callbacks"])
    except (OSError, ValueError, KeyError, TypeError):  # half written: no run can resume from it
        return None
    return state["cursor"] if state and state.get("spool") == spool else None
