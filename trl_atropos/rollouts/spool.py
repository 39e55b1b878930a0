"""Every pulled batch on disk before any row of it is trained: one Arrow file per batch in `<output_dir>/rollouts`.

`AtroposSource` appends to it, reads back from it what it hands out, and begins with what is there after a crash.
`datasets.load_dataset("arrow", data_files="<output_dir>/rollouts/*.arrow")` reads it, too.

All rows that the environments produced in a run, in their order, are numbered from 0. A file covers `size` numbers
from `start` on: first those that were dropped or lost, which it only counts, then the rows that it holds. So for any
row, its index is how many were trained, dropped or lost before it.
"""

import json
import logging
import os
import re
import time
import uuid
import zlib
from bisect import insort
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from trl_atropos.errors import RolloutError
from trl_atropos.rollouts import tables
from trl_atropos.rollouts.schema import Row

logger = logging.getLogger(__name__)

HEADER = b"trl_atropos"  # key of the metadata in a file's schema
FORMAT = 1
ABOUT = "spool.meta"
SEAL = b'"crc32": "%08x"'  # in the header; of the whole file as if the sum were 0
SEALED = re.compile(rb'"crc32": "([0-9a-f]{8})"')


@dataclass(frozen=True)
class Region:
    """Batches that the API assembled at once, and how far they have been delivered: newest first."""

    registration: str  # of the trainer, as the API knows it
    step: int  # of the API, after it had assembled them
    base: int  # index of the first row of the oldest
    batch_size: int
    batches: int
    left: int  # not yet delivered, all older than those that were


@dataclass(frozen=True)
class Part:
    """What one file says about itself."""

    start: int
    size: int
    region: Region
    dropped: dict[str, int] = field(default_factory=dict)  # rows by reason, on the way from the API to here
    lost_with_api: int = 0
    lineage: list[list] = field(default_factory=list)  # see `lineage.Lineage`, when the batch was pulled
    version: int = 0  # that the trainer then had

    @property
    def end(self) -> int:
        return self.start + self.size

    @property
    def missing(self) -> int:
        return sum(self.dropped.values()) + self.lost_with_api


class Spool:
    """
    Args:
        folder: made if missing.
        max_bytes: see `trim`.

    `end` is the index that the next row will get, `parts` are the files that are there, oldest first.

    Raises:
        RolloutError: The folder cannot be written to, or holds something that was not written by this class.
    """

    def __init__(self, folder: str | Path, max_bytes: float):
        self.folder = Path(folder)
        self._max_bytes = max_bytes
        self.parts: list[Part] = []
        self._bytes: dict[int, int] = {}  # of each file, by start
        self._arrived: dict[int, float] = {}  # time.monotonic() of those that this process wrote, by start
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            _sync_folder(self.folder.parent)
            for torn in self.folder.glob(".*.tmp"):
                torn.unlink()
            self._read_about()
        for path in sorted(self.folder.glob("rows-*.arrow")):
            self._take(path)
        self.parts.sort(key=lambda part: part.start)

    # ------------------------------------------------------------------------------------------------------- who it is

    def _read_about(self) -> None:
        """`spool.meta` has this spool's name, and which registrations at which API step are its run's."""
        path = self.folder / ABOUT
        if not path.exists():
            self.name = uuid.uuid4().hex
            self.registrations: dict[str, int] = {}
            self._write_about()
            return
        try:
            about = json.loads(path.read_text(encoding="utf-8"))
            self.name, self.registrations = about["name"], about["registrations"]
        except (ValueError, KeyError, TypeError) as error:
            raise RolloutError(
                f"{path} is not what this program wrote ({error!r}). Move {self.folder} away to begin without the "
                "rollouts in it."
            ) from error

    def note_registration(self, registration: str, step: int) -> None:
        """On disk before the API hears of it, so that after a crash its rows are known for this run's."""
        self.registrations[registration] = step
        with self._writing():
            self._write_about()

    def _write_about(self) -> None:
        about = {"name": self.name, "format": FORMAT, "registrations": self.registrations}
        self._put(ABOUT, json.dumps(about).encode())

    # --------------------------------------------------------------------------------------------------------- writing

    @property
    def end(self) -> int:
        return self.parts[-1].end if self.parts else 0

    def append(self, part: Part, rows: Sequence[Row]) -> None:
        """
        Write one batch. When this returns, it survives a power cut. Sets `index` of each row.

        Raises:
            RolloutError: It could not be written; everything that was there before still is.
        """
        for position, row in enumerate(rows):
            row.index = part.start + part.missing + position
        assert part.missing + len(rows) == part.size, f"{part} with {len(rows)} rows"
        header = json.dumps({"format": FORMAT, "spool": self.name, "crc32": f"{0:08x}", **asdict(part)})
        table = tables.encode(rows, time.time()).replace_schema_metadata({HEADER: header})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        content = _with_seal(sink.getvalue().to_pybytes())
        with self._writing():
            self._put(_name(part.start), content)
        self._bytes[part.start] = len(content)
        self._arrived[part.start] = time.monotonic()
        insort(self.parts, part, key=lambda each: each.start)

    def _put(self, name: str, content: Any) -> None:
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

    def _writing(self) -> "_Writing":
        return _Writing(self.folder)

    # --------------------------------------------------------------------------------------------------------- reading

    def _take(self, path: Path) -> None:
        try:
            part = read_part(path, self.name)
        except RolloutError as error:
            logger.warning("%s It is passed over.", error)
            return
        if part.start in self._bytes:
            raise RolloutError(f"{path} has the same rows as another file in {self.folder}. Delete one of them.")
        self._bytes[part.start] = path.stat().st_size
        self.parts.append(part)

    def next_part(self, position: int, limit: int) -> Part | None:
        """The first file with a row at index `position` or beyond, if it begins below `limit`."""
        found = next((part for part in self.parts if part.end > position), None)
        return found if found is not None and found.start < limit else None

    def read(self, part: Part) -> list[Row]:
        """The rows of one file. Raises `RolloutError` if they cannot be read any more."""
        return read_rows(self.folder / _name(part.start), self._arrived.get(part.start))

    # -------------------------------------------------------------------------------------------------------- trimming

    def excess(self) -> float:
        """Bytes above the limit."""
        return sum(self._bytes.values()) - self._max_bytes

    def trim(self, floor: int) -> bool:
        """
        Remove the oldest files whose rows are all below index `floor`, until the rest is within the limit. Returns
        whether there was one.
        """
        before = len(self.parts)
        while self.parts and self.excess() > 0 and self.parts[0].end <= floor:
            part = self.parts.pop(0)
            del self._bytes[part.start]
            self._arrived.pop(part.start, None)
            with self._writing():
                (self.folder / _name(part.start)).unlink(missing_ok=True)
        return len(self.parts) < before

    def last_region(self) -> Region | None:
        """The one that was being delivered when the last file was written."""
        if not self.parts:
            return None
        base = max(part.region.base for part in self.parts)
        return min((part.region for part in self.parts if part.region.base == base), key=lambda region: region.left)


class _Writing:
    """Turns what the operating system says into what the user can do."""

    def __init__(self, folder: Path):
        self._folder = folder

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, OSError):
            raise RolloutError(
                f"Rollouts cannot be kept in {self._folder}: {error.strerror}. Nothing that is there is lost. Make "
                "room (or lower `max_spool_gb`), or let this user write there, and resume from the last checkpoint."
            ) from error


def read_part(path: Path, spool: str) -> Part:
    """What the file at `path` says about itself. Raises `RolloutError` if it is torn, or not of the spool so named."""
    header = {}
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


def read_rows(path: Path, arrived: float | None = None) -> list[Row]:
    """
    The rows in the file at `path`, which arrive now if it is not said when.

    Raises:
        RolloutError: it is torn or damaged, or not a spool's.
    """
    try:
        content = path.read_bytes()
        _require_seal(content)
        with pa.ipc.open_file(pa.py_buffer(content)) as reader:
            return tables.decode(reader.read_all(), time.monotonic() if arrived is None else arrived)
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> RolloutError:
    return RolloutError(f"{path} is not a whole file of rollouts ({type(error).__name__}: {error}).")


def _with_seal(content: bytes) -> bytes:
    """A file with its checksum in the place that is kept for it."""
    return _replace_seal(content, SEAL % 0, SEAL % zlib.crc32(content))


def _require_seal(content: bytes) -> None:
    """Raises `ValueError` if the file is not what was written. Those of earlier versions have no checksum."""
    seal = SEALED.search(content)
    if seal is not None and SEAL % zlib.crc32(_replace_seal(content, seal[0], SEAL % 0)) != seal[0]:
        raise ValueError("its checksum is wrong: the disk has changed it")


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


def move_aside(folder: Path) -> Path:
    """Give the folder another name, beside its own. Returns the new path."""
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
    return aside
