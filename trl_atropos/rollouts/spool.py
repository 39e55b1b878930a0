"""Keeps every pulled batch on disk before any rollout of it is trained: one Arrow file per batch in
`<output_dir>/rollouts`.

`Feed` (`feed.py`) writes the batches to a `Spool` and reads them back.
`datasets.load_dataset("arrow", data_files="<output_dir>/rollouts/*.arrow")` reads them, too, and so
does `replay_paths`.

All rollouts that the environments produced in a run are numbered from 0, in their order. A file
covers `size` numbers from `start` on: first those that were dropped or lost, which it only counts,
then the rollouts that it holds. So the index of a rollout is the number of rollouts that were
trained, dropped or lost before it. For example, a file with `start` 8 and `size` 4 that counts 2
dropped rollouts holds the rollouts 10 and 11.
"""

import json
import logging
import os
import re
import uuid
import zlib
from bisect import insort
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa

from trl_atropos.activity import activity
from trl_atropos.errors import RolloutError
from trl_atropos.rollouts.rollout import Rollout, from_table, to_table

logger = logging.getLogger(__name__)

HEADER = b"trl_atropos"  # key of the metadata in a file's schema
FORMAT = 1
# Of files with rollouts that branch. Versions that know no trees would train their rows as plain
# sequences: they pass over files of this format, and find no checksum by the name that they know.
FORMAT_WITH_TREES = 2
META = "spool.meta"
# The name of the checksum in the header, by format. It is that of the whole file, with 0 in its
# place.
CHECKSUMS = {FORMAT: "crc32", FORMAT_WITH_TREES: "checksum"}
SEALED = re.compile(rb'"(crc32|checksum)": "([0-9a-f]{8})"')
# Key of the source's state in the `stateful_callbacks` of a checkpoint's `trainer_state.json`.
STATE_NAME = "RolloutState"


@dataclass(frozen=True)
class Delivery:
    """Batches that the API assembled at once. It hands them out newest first (`deliveries.py`)."""

    registration: str  # name of the trainer, as the API knows it
    step: int  # the API's, after it had assembled them
    base: int  # index of the first rollout of the oldest batch
    batch_size: int
    batches: int
    left: int  # batches that are not yet handed out: the oldest

    @property
    def end(self) -> int:
        return self.base + self.batches * self.batch_size


@dataclass(frozen=True)
class FileHeader:
    """The place of one batch in the run, and what is known of it beside its rollouts."""

    start: int
    size: int
    delivery: Delivery  # after this batch
    # rollouts that came in with the batch, by reason
    dropped: dict[str, int] = field(default_factory=dict)
    lost_with_api: int = 0
    # of the run when the batch was pulled, see `rollout.staleness`
    policy_branches: list[list] = field(default_factory=list)
    version: int = 0  # of the trainer when the batch was pulled
    format: int = FORMAT

    @property
    def end(self) -> int:
        return self.start + self.size

    @property
    def missing(self) -> int:
        """Number of rollouts that the file counts and does not hold."""
        return sum(self.dropped.values()) + self.lost_with_api

    def to_json(self, spool: str) -> str:
        """Returns the metadata of a file of the spool of that name, with a checksum of 0."""
        record = {
            "format": self.format,
            "spool": spool,
            CHECKSUMS[self.format]: f"{0:08x}",
            "start": self.start,
            "size": self.size,
            "region": asdict(self.delivery),
            "dropped": self.dropped,
            "lost_with_api": self.lost_with_api,
            "lineage": self.policy_branches,
            "version": self.version,
        }
        return json.dumps(record)

    @classmethod
    def from_json(cls, text: str | bytes, spool: str) -> "FileHeader":
        """Reads what `to_json` wrote. Raises `ValueError` if the file is not of the spool of that
        name."""
        record = json.loads(text)
        if record["spool"] != spool:
            raise ValueError("it is of another run")
        file_format = record["format"]
        if file_format not in CHECKSUMS:
            raise ValueError(f"another version of trl_atropos wrote it, in format {file_format}")
        return cls(
            start=record["start"],
            size=record["size"],
            delivery=Delivery(**record["region"]),
            dropped=record["dropped"],
            lost_with_api=record["lost_with_api"],
            policy_branches=record["lineage"],
            version=record["version"],
            format=file_format,
        )


class Spool:
    """
    Writes and reads the files in `folder`, which it makes if missing.

    Args:
        folder: `<output_dir>/rollouts`.
        max_bytes: limit, above which `trim` removes files.

    Attributes:
        headers: those of the files, oldest first.
        registrations: the API's step at which this run became its trainer, by the name under which
            it registered. Add one by `note_registration`.

    Raises:
        RolloutError: the folder cannot be written to, or its `spool.meta` was not written by this
            class.
    """

    def __init__(self, folder: str | Path, max_bytes: float):
        self.folder = Path(folder)
        self.max_bytes = max_bytes
        self.headers: list[FileHeader] = []
        self._bytes: dict[int, int] = {}  # of each file, by start
        with _writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            _sync_folder(self.folder.parent)
            for draft in self.folder.glob(".*.tmp"):
                draft.unlink()
            self._read_meta()
        paths = sorted(self.folder.glob("rows-*.arrow"))
        with activity(f"Looking at the rollouts in {self.folder}", len(paths)) as looking:
            for path in paths:
                self._add_file(path)
                looking.advance()
        self.headers.sort(key=_start)

    def _read_meta(self) -> None:
        path = self.folder / META
        if not path.exists():
            self.name = uuid.uuid4().hex
            self.registrations: dict[str, int] = {}
            self._write_meta()
            return
        try:
            meta = json.loads(path.read_text(encoding="utf-8"))
            self.name = meta["name"]
            self.registrations = meta["registrations"]
        except (ValueError, KeyError, TypeError) as error:
            raise RolloutError(
                f"{path} is not what this program wrote ({error!r}). Move {self.folder} away to "
                "begin without the rollouts in it."
            ) from error

    def _add_file(self, path: Path) -> None:
        """Adds a file that an earlier life of the run wrote."""
        try:
            header = read_header(path, self.name)
        except RolloutError as error:
            logger.warning("%s It is passed over.", error)
            return
        if header.start in self._bytes:
            raise RolloutError(
                f"{path} has the same rollouts as another file of {self.folder}. Delete one."
            )
        self._bytes[header.start] = path.stat().st_size
        self.headers.append(header)

    def _write_meta(self) -> None:
        meta = {"name": self.name, "format": FORMAT, "registrations": self.registrations}
        content = json.dumps(meta).encode()
        write_file(self.folder / META, content)

    def note_registration(self, registration: str, step: int) -> None:
        """Notes a registration of this run. Call it before the API hears of the registration: after
        a crash, its rollouts are then known to be this run's."""
        self.registrations[registration] = step
        with _writing(self.folder):
            self._write_meta()

    def _file(self, header: FileHeader) -> Path:
        return self.folder / f"rows-{header.start:012d}.arrow"

    @property
    def end(self) -> int:
        """Index that the next rollout will get."""
        if not self.headers:
            return 0
        return self.headers[-1].end

    def append(self, header: FileHeader, rollouts: Sequence[Rollout]) -> None:
        """Writes one batch, which then survives a power cut, and sets its rollouts' `index`."""
        counts = [*header.dropped.values(), header.lost_with_api]
        assert min(counts) >= 0, f"{header} counts less than nothing"
        index = header.start + header.missing
        for rollout in rollouts:
            rollout.index = index
            index += 1
        assert index == header.end, f"{header} with {len(rollouts)} rollouts"
        if any(rollout.tree is not None for rollout in rollouts):
            header = replace(header, format=FORMAT_WITH_TREES)
        metadata = {HEADER: header.to_json(self.name)}
        content = file_content(to_table(rollouts).replace_schema_metadata(metadata))
        name = CHECKSUMS[header.format].encode()
        seal = _seal(name, zlib.crc32(content))
        content = _replace_seal(content, _seal(name, 0), seal)
        with _writing(self.folder):
            write_file(self._file(header), content)
        self._bytes[header.start] = len(content)
        insort(self.headers, header, key=_start)

    def next_header(self, position: int, limit: int) -> FileHeader | None:
        """Returns the header of the first file with a rollout at index `position` or beyond, if the
        file begins below `limit`."""
        for header in self.headers:
            if header.end > position:
                if header.start < limit:
                    return header
                break
        return None

    def read(self, header: FileHeader) -> list[Rollout]:
        """Returns the rollouts of one file. Raises `RolloutError` if they cannot be read any
        more."""
        return read_rollouts(self._file(header))

    def excess(self) -> float:
        """Returns the bytes above the limit."""
        return sum(self._bytes.values()) - self.max_bytes

    def trim(self, floor: int) -> bool:
        """Removes the oldest files below index `floor`, until the rest is within the limit. Returns
        whether it has removed any."""
        has_removed = False
        while self.headers and self.excess() > 0 and self.headers[0].end <= floor:
            header = self.headers.pop(0)
            del self._bytes[header.start]
            with _writing(self.folder):
                self._file(header).unlink(missing_ok=True)
            has_removed = True
        return has_removed

    def last_delivery(self) -> Delivery | None:
        """Returns the delivery that was handed out when the last file was written."""
        deliveries = [header.delivery for header in self.headers]
        return max(deliveries, key=_progress, default=None)


def _start(header: FileHeader) -> int:
    return header.start


def _progress(delivery: Delivery) -> tuple[int, int]:
    """Returns a key that grows with every batch that the API hands out."""
    return delivery.base, -delivery.left


# ---------------------------------------------------------------------------- reading and writing


def read_header(path: Path, spool: str) -> FileHeader:
    """Returns the header of the file at `path`. Raises `RolloutError` if it is torn, or not of the
    spool of that name."""
    with _reading(path):
        with pa.memory_map(str(path)) as file, pa.ipc.open_file(file) as reader:
            metadata = reader.schema.metadata or {}
        return FileHeader.from_json(metadata.get(HEADER, b"{}"), spool)


def read_rollouts(path: Path) -> list[Rollout]:
    """Returns the rollouts in the file at `path`. Raises `RolloutError` if it is torn or damaged,
    or not a spool's."""
    with _reading(path):
        content = path.read_bytes()
        seal = SEALED.search(content)
        if seal is None or not _is_sealed(content, seal[0], seal[1]):
            raise ValueError("its checksum is wrong: the disk has changed it")
        with pa.ipc.open_file(pa.py_buffer(content)) as reader:
            return from_table(reader.read_all())


def _seal(name: bytes, checksum: int) -> bytes:
    """Returns a checksum as the header of a file has it."""
    return b'"%b": "%08x"' % (name, checksum)


def _is_sealed(content: bytes, seal: bytes, name: bytes) -> bool:
    """Returns whether the checksum in a file's header, which has this name there, is that of the
    file."""
    unsealed = _replace_seal(content, seal, _seal(name, 0))
    checksum = zlib.crc32(unsealed)
    return _seal(name, checksum) == seal


def file_content(table: pa.Table) -> bytes:
    """Returns the content of an Arrow file, which is a Feather file, too."""
    buffer = pa.BufferOutputStream()
    with pa.ipc.new_file(buffer, table.schema) as writer:
        writer.write_table(table)
    return buffer.getvalue().to_pybytes()


def _replace_seal(content: bytes, old: bytes, new: bytes) -> bytes:
    """Replaces a file's checksum. Arrow writes the header at the beginning and at the end; what is
    between may look like it."""
    first = content.find(old)
    last = content.rfind(old)
    head = content[:first]
    between = content[first + len(old) : last]
    tail = content[last + len(old) :]
    return b"".join((head, new, between, new, tail))


def write_file(path: Path, content: bytes, sync: bool = True) -> None:
    """Writes the whole file, or nothing."""
    draft = path.with_name(f".{path.name}.tmp")
    try:
        draft.unlink(missing_ok=True)
        with draft.open("xb") as file:  # through no symbolic link
            file.write(content)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        draft.replace(path)
    finally:  # also on Ctrl-C
        draft.unlink(missing_ok=True)
    if sync:
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Syncs a folder: a new name is on disk only when its folder is."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Raises `RolloutError` if the disk refuses what is written within."""
    try:
        yield
    except OSError as error:
        raise RolloutError(
            f"Rollouts cannot be kept in {folder}: {error.strerror}. Nothing that is there is "
            "lost. Make room (or lower `max_spool_gb`), or let this user write there, and resume "
            "from the last checkpoint."
        ) from error


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raises `RolloutError` if what is read within is not what this module wrote."""
    try:
        yield
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError) as error:
        raise RolloutError(
            f"{path} is not a whole file of rollouts ({type(error).__name__}: {error})."
        ) from error


# -------------------------------------------------------------------------- the runs of one folder


def open_spool(folder: Path, state: dict[str, Any] | None, max_bytes: float) -> Spool:
    """Returns the spool of the run that goes on from `state` (see `RunInfo`). If the folder is of
    another run, renames that and begins a new one."""
    spool = Spool(folder, max_bytes)
    is_of_this_run = state is not None and state.get("spool", spool.name) == spool.name
    if is_of_this_run or not spool.headers:
        return spool
    for number in count(1):
        new_folder = folder.with_name(f"{folder.name}-before-{number}")
        if not new_folder.exists():
            break
    try:
        folder.rename(new_folder)
    except OSError as error:
        raise RolloutError(
            f"{folder} has the rollouts of an earlier run and cannot be renamed "
            f"({error.strerror}). Set `output_dir` to another folder, or move it away."
        ) from error
    reason = "resumes from a checkpoint of another"
    if state is None:
        reason = "begins anew"
    message = (
        "%s has the rollouts of an earlier run, and this one %s. They are now in %s, which "
        "you may delete."
    )
    logger.warning(message, folder, reason, new_folder)
    return Spool(folder, max_bytes)


def source_state(stateful_callbacks: dict[str, Any] | None) -> tuple[dict[str, Any] | None, int]:
    """Returns the source's state in a checkpoint, or None if it has none, and the number of
    untrained rollouts of its last batch."""
    saved = (stateful_callbacks or {}).get(STATE_NAME)
    if not saved:
        return None, 0
    attributes = saved["attributes"]
    return attributes["source"], attributes["unfinished_rows"]


def oldest_cursor(output_dir: str | Path, spool: str) -> int | None:
    """Returns the smallest cursor into the spool of that name in the checkpoints of `output_dir`,
    or None if they have none."""
    cursors = []
    for path in Path(output_dir).glob("checkpoint-*/trainer_state.json"):
        # A file that is half written counts for nothing: no run can resume from it.
        with suppress(OSError, ValueError, KeyError, TypeError):
            checkpoint = json.loads(path.read_text(encoding="utf-8"))
            state, _ = source_state(checkpoint["stateful_callbacks"])
            if state and state.get("spool") == spool:
                cursors.append(state["cursor"])
    return min(cursors, default=None)
