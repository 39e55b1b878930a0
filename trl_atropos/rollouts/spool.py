"""Every pulled batch on disk before any rollout of it is trained: one Arrow file per batch in
`<output_dir>/rollouts`.

`datasets.load_dataset("arrow", data_files="<output_dir>/rollouts/*.arrow")` reads it, too, and so
does `replay_paths`.

All rollouts that the environments produced in a run are numbered from 0, in their order. A file
covers `size` numbers from `start` on: first those that were dropped or lost, which it only counts,
then the rollouts that it holds. So the index of a rollout is the number of rollouts that were
trained, dropped or lost before it. For example, a file with `start` 8 and `size` 4 that counts 2
dropped rollouts holds the rollouts 10 and 11.

Beside them, `TrainerLogprobs` keeps the trainer's own log-probabilities. These files end in
`.feather`, so that whoever reads all `.arrow` files of the folder reads rollouts.
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
from dataclasses import asdict, dataclass, field
from itertools import count, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from trl_atropos.errors import RolloutError
from trl_atropos.rollouts.rollout import Rollout, from_table, to_table

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

logger = logging.getLogger(__name__)

HEADER = b"trl_atropos"  # key of the metadata in a file's schema
FORMAT = 1
META = "spool.meta"
SEAL = b'"crc32": "%08x"'  # in the header; of the whole file as if the sum were 0
SEALED = re.compile(rb'"crc32": "([0-9a-f]{8})"')
# of the source's state in the `stateful_callbacks` of a checkpoint's `trainer_state.json`
STATE_NAME = "RolloutState"


@dataclass(frozen=True)
class Delivery:
    """Batches that the API assembled at once. It hands them out newest first."""

    registration: str  # of the trainer, as the API knows it
    step: int  # of the API, after it had assembled them
    base: int  # index of the first rollout of the oldest
    batch_size: int
    batches: int
    left: int  # not yet handed out, the oldest of them

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
            "format": FORMAT,
            "spool": spool,
            "crc32": f"{0:08x}",
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
        if (record["spool"], record["format"]) != (spool, FORMAT):
            raise ValueError("it is of another run")
        return cls(
            start=record["start"],
            size=record["size"],
            delivery=Delivery(**record["region"]),
            dropped=record["dropped"],
            lost_with_api=record["lost_with_api"],
            policy_branches=record["lineage"],
            version=record["version"],
        )


class Spool:
    """
    The files in `folder`, which is made if missing.

    `headers` are those of the files, oldest first. `registrations` are the names under which this
    run has been the API's trainer, with the API's step at that time. Raises `RolloutError` if the
    folder cannot be written to, or its `spool.meta` was not written by this class.
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
        for path in sorted(self.folder.glob("rows-*.arrow")):
            self._add_file(path)
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
        first_index = header.start + header.missing
        for position, rollout in enumerate(rollouts):
            rollout.index = first_index + position
        counts = [*header.dropped.values(), header.lost_with_api]
        assert min(counts) >= 0, f"{header} counts less than nothing"
        size = header.missing + len(rollouts)
        assert size == header.size, f"{header} with {len(rollouts)} rollouts"
        metadata = {HEADER: header.to_json(self.name)}
        content = _file_content(to_table(rollouts).replace_schema_metadata(metadata))
        seal = SEAL % zlib.crc32(content)
        content = _replace_seal(content, SEAL % 0, seal)
        with _writing(self.folder):
            write_file(self._file(header), content)
        self._bytes[header.start] = len(content)
        insort(self.headers, header, key=_start)

    def next_header(self, position: int, limit: int) -> FileHeader | None:
        """Returns the header of the first file with a rollout at index `position` or beyond, if the
        file begins below `limit`."""
        for header in self.headers:
            if header.end > position:
                return header if header.start < limit else None
        return None

    def read(self, header: FileHeader) -> list[Rollout]:
        """Returns the rollouts of one file. Raises `RolloutError` if they cannot be read any
        more."""
        return read_rollouts(self._file(header))

    def excess(self) -> float:
        """Returns the bytes above the limit."""
        return sum(self._bytes.values()) - self.max_bytes

    def trim(self, floor: int) -> bool:
        """Removes the oldest files below index `floor`, down to the limit. Returns whether there
        was one."""
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
        if seal is None or not _is_sealed(content, seal[0]):
            raise ValueError("its checksum is wrong: the disk has changed it")
        with pa.ipc.open_file(pa.py_buffer(content)) as reader:
            return from_table(reader.read_all())


def _is_sealed(content: bytes, seal: bytes) -> bool:
    """Returns whether the checksum in a file's header is that of the file."""
    unsealed = _replace_seal(content, seal, SEAL % 0)
    return SEAL % zlib.crc32(unsealed) == seal


def _file_content(table: pa.Table) -> bytes:
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
    try:
        yield
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError) as error:
        raise RolloutError(
            f"{path} is not a whole file of rollouts ({type(error).__name__}: {error})."
        ) from error


# -------------------------------------------------------------------------- the runs of one folder


def open_spool(folder: Path, state: dict[str, Any] | None, max_bytes: float) -> Spool:
    """Returns the spool of the run that goes on from `state` (see `RunInfo`). Renames the folder of
    another run."""
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
    """Returns the source's state in a checkpoint, None if it has none, and the number of untrained
    rollouts of its last batch."""
    saved = (stateful_callbacks or {}).get(STATE_NAME)
    if not saved:
        return None, 0
    attributes = saved["attributes"]
    return attributes["source"], attributes["unfinished_rows"]


def oldest_cursor(output_dir: str | Path, spool: str) -> int | None:
    """Returns the smallest cursor into the spool of that name in the checkpoints of `output_dir`,
    None if there is none."""
    cursors = []
    for path in Path(output_dir).glob("checkpoint-*/trainer_state.json"):
        # A file that is half written counts for nothing: no run can resume from it.
        with suppress(OSError, ValueError, KeyError, TypeError):
            checkpoint = json.loads(path.read_text(encoding="utf-8"))
            state, _ = source_state(checkpoint["stateful_callbacks"])
            if state and state.get("spool") == spool:
                cursors.append(state["cursor"])
    return min(cursors, default=None)


# ------------------------------------------------------------------------------ for the run's page


class TrainerLogprobs:
    """
    Keeps the trainer's log-probabilities, for the trainer-sampler gap of the report: one Feather
    file per generation batch in the spool's `folder`.

    The column `index` is that of the spool's rollouts. `logprobs` has a float32 per completion
    token, in nats, NaN if it was not trained. When the spool has removed the rollouts of a file,
    the next write removes the file.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._failed = False

    def keep(
        self,
        rollouts: Sequence[Rollout],
        output: "dict[str, torch.Tensor]",
        accelerator: "Accelerator",
    ) -> None:
        """Writes the log-probabilities of one generation batch. Call it on every rank, with the
        rollouts of all ranks, rank 0 first, and this rank's `(B, C)` tensors of TRL. Ignores
        rollouts that are not in this run's spool."""
        import torch

        if any(rollout.index < 0 for rollout in rollouts):
            return
        trained = (output["completion_mask"] * output["tool_mask"]).bool()
        values = output["old_per_token_logps"].float().where(trained, torch.nan)
        # Each rank pads to its own longest completion.
        width = max(len(rollout.completion_ids) for rollout in rollouts)
        padding = width - values.size(1)
        values = torch.nn.functional.pad(values, (0, padding), value=torch.nan)
        values = accelerator.gather(values)  # (rollouts of all ranks, width)
        if accelerator.is_main_process:
            self.write(rollouts, values.cpu().numpy())

    def write(self, rollouts: Sequence[Rollout], values: np.ndarray) -> None:
        """Writes one generation batch: `values` is `(n, width)` float32, right-padded. Removes what
        the run had written of these and later rollouts before it was resumed. If it cannot write,
        the log says so, and it stops."""
        if self._failed:
            return
        pairs = sorted(zip(rollouts, values, strict=True), key=_index)
        indexes = []
        logprobs = []
        for rollout, row in pairs:
            indexes.append(rollout.index)
            length = len(rollout.completion_ids)
            logprobs.append(row[:length])
        schema = pa.schema({"index": pa.int64(), "logprobs": pa.large_list(pa.float32())})
        table = pa.table({"index": indexes, "logprobs": logprobs}, schema=schema)
        try:
            self._replace_files(table, indexes[0])
        # Only a report needs these. If the spool cannot be written, it ends the run itself.
        except OSError as error:
            self._failed = True
            message = (
                "The trainer's log-probabilities cannot be kept in %s (%s). Training goes on; a "
                "report of this run has no trainer-sampler gap from here on. Make room, or let "
                "this user write there."
            )
            logger.warning(message, self._folder, error.strerror)

    def _replace_files(self, table: pa.Table, first_index: int) -> None:
        """Writes the file, and removes those of abandoned and of removed rollouts."""
        files = sorted(self._folder.glob("trainer-[0-9]*.feather"))
        for path in files:
            if _start_of(path) >= first_index:
                path.unlink()
        new_path = self._folder / f"trainer-{first_index:012d}.feather"
        write_file(new_path, _file_content(table), sync=False)
        spool_files = self._folder.glob("rows-*.arrow")
        oldest = min(map(_start_of, spool_files), default=0)
        for path, next_path in pairwise(files):
            if _start_of(next_path) <= oldest:
                path.unlink(missing_ok=True)


def _index(pair: tuple[Rollout, np.ndarray]) -> int:
    return pair[0].index


def _start_of(path: Path) -> int:
    """Returns the index in a file's name, such as 12 of `rows-000000000012.arrow`."""
    return int(path.stem.rpartition("-")[2])
