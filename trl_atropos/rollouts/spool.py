"""Every pulled batch on disk before any rollout of it is trained: one Arrow file per batch in
`<output_dir>/rollouts`.

`datasets.load_dataset("arrow", data_files="<output_dir>/rollouts/*.arrow")` reads it, too, and so
does `replay_paths`.

All rollouts that the environments produced in a run are numbered from 0, in their order. A file
covers `size` numbers from `start` on: first those that were dropped or lost, which it only counts,
then the rollouts that it holds. So the index of a rollout is how many were trained, dropped or lost
before it.

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
class Region:
    """Batches that the API assembled at once. It delivers them newest first."""

    registration: str  # of the trainer, as the API knows it
    step: int  # of the API, after it had assembled them
    base: int  # index of the first rollout of the oldest
    batch_size: int
    batches: int
    left: int  # not yet delivered, the oldest of them

    @property
    def end(self) -> int:
        return self.base + self.batches * self.batch_size


@dataclass(frozen=True)
class Part:
    """The header of a file."""

    start: int
    size: int
    region: Region  # after this batch
    # rollouts that came in with the batch, by reason
    dropped: dict[str, int] = field(default_factory=dict)
    lost_with_api: int = 0
    # path of the run when the batch was pulled, see `staleness`
    lineage: list[list] = field(default_factory=list)
    version: int = 0  # of the trainer when the batch was pulled

    @property
    def end(self) -> int:
        return self.start + self.size

    @property
    def missing(self) -> int:
        return sum(self.dropped.values()) + self.lost_with_api


class Spool:
    """The files in `folder`, which is made if missing: `parts` are their headers, oldest first.
    `registrations` are the names under which this run has been the API's trainer, and the API's
    step then. Raises `RolloutError` if the folder cannot be written to, or its `spool.meta` was not
    written by this class."""

    def __init__(self, folder: str | Path, max_bytes: float):
        self.folder = Path(folder)
        self._max_bytes = max_bytes
        self.parts: list[Part] = []
        self._bytes: dict[int, int] = {}  # of each file, by start
        with _writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            _sync_folder(self.folder.parent)
            for torn in self.folder.glob(".*.tmp"):
                torn.unlink()
            self._read_meta()
        for path in sorted(self.folder.glob("rows-*.arrow")):
            try:
                part = read_part(path, self.name)
            except RolloutError as error:
                logger.warning("%s It is passed over.", error)
                continue
            if part.start in self._bytes:
                raise RolloutError(
                    f"{path} has the same rollouts as another file of {self.folder}. Delete one."
                )
            self._bytes[part.start] = path.stat().st_size
            self.parts.append(part)
        self.parts.sort(key=lambda part: part.start)

    def _read_meta(self) -> None:
        path = self.folder / META
        if not path.exists():
            self.name, self.registrations = uuid.uuid4().hex, dict[str, int]()
            return self._write_meta()
        try:
            meta = json.loads(path.read_text(encoding="utf-8"))
            self.name = meta["name"]
            self.registrations = meta["registrations"]
        except (ValueError, KeyError, TypeError) as error:
            what = f"{path} is not what this program wrote ({error!r})"
            raise RolloutError(
                f"{what}. Move {self.folder} away to begin without the rollouts in it."
            ) from error

    def _write_meta(self) -> None:
        meta = {"name": self.name, "format": FORMAT, "registrations": self.registrations}
        write_file(self.folder / META, json.dumps(meta).encode())

    def note_registration(self, registration: str, step: int) -> None:
        """Call it before the API hears of the registration: after a crash, its rollouts are known
        to be this run's."""
        self.registrations[registration] = step
        with _writing(self.folder):
            self._write_meta()

    def _path(self, part: Part) -> Path:
        return self.folder / f"rows-{part.start:012d}.arrow"

    @property
    def end(self) -> int:
        """The index that the next rollout will get."""
        return self.parts[-1].end if self.parts else 0

    def append(self, part: Part, rollouts: Sequence[Rollout]) -> None:
        """Writes one batch, which then survives a power cut, and sets its rollouts' `index`."""
        for position, rollout in enumerate(rollouts):
            rollout.index = part.start + part.missing + position
        counts = [*part.dropped.values(), part.lost_with_api]
        assert min(counts) >= 0, f"{part} counts less than nothing"
        assert part.missing + len(rollouts) == part.size, f"{part} with {len(rollouts)} rollouts"
        header = json.dumps(
            {"format": FORMAT, "spool": self.name, "crc32": f"{0:08x}", **asdict(part)}
        )
        content = _file_content(to_table(rollouts).replace_schema_metadata({HEADER: header}))
        content = _replace_seal(content, SEAL % 0, SEAL % zlib.crc32(content))
        with _writing(self.folder):
            write_file(self._path(part), content)
        self._bytes[part.start] = len(content)
        insort(self.parts, part, key=lambda each: each.start)

    def next_part(self, position: int, limit: int) -> Part | None:
        """The first file with a rollout at index `position` or beyond, if it begins below
        `limit`."""
        found = next((part for part in self.parts if part.end > position), None)
        return found if found is not None and found.start < limit else None

    def read(self, part: Part) -> list[Rollout]:
        """The rollouts of one file. Raises `RolloutError` if they cannot be read any more."""
        return read_rollouts(self._path(part))

    def excess(self) -> float:
        """Bytes above the limit."""
        return sum(self._bytes.values()) - self._max_bytes

    def trim(self, floor: int) -> bool:
        """Removes the oldest files below index `floor`, down to the limit. Returns whether there
        was one."""
        before = len(self.parts)
        while self.parts and self.excess() > 0 and self.parts[0].end <= floor:
            part = self.parts.pop(0)
            del self._bytes[part.start]
            with _writing(self.folder):
                self._path(part).unlink(missing_ok=True)
        return len(self.parts) < before

    def last_region(self) -> Region | None:
        """The region that was being delivered when the last file was written."""
        regions = [part.region for part in self.parts]
        return max(regions, key=lambda region: (region.base, -region.left), default=None)


def read_part(path: Path, spool: str) -> Part:
    """The header of the file at `path`. Raises `RolloutError` if it is torn, or not of the spool of
    that name."""
    with _reading(path):
        with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
            header = json.loads((reader.schema.metadata or {}).get(HEADER, b"{}"))
        del header["crc32"]
        if (header.pop("spool"), header.pop("format")) != (spool, FORMAT):
            raise ValueError("it is of another run")
        return Part(**header | {"region": Region(**header["region"])})


def read_rollouts(path: Path) -> list[Rollout]:
    """The rollouts in the file at `path`. Raises `RolloutError` if it is torn or damaged, or not a
    spool's."""
    with _reading(path):
        content = path.read_bytes()
        seal = SEALED.search(content)
        if seal is None or SEAL % zlib.crc32(_replace_seal(content, seal[0], SEAL % 0)) != seal[0]:
            raise ValueError("its checksum is wrong: the disk has changed it")
        with pa.ipc.open_file(pa.py_buffer(content)) as reader:
            return from_table(reader.read_all())


def _file_content(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def _replace_seal(content: bytes, old: bytes, new: bytes) -> bytes:
    """Arrow writes the header at the beginning and at the end; what is between may look like it."""
    first = content.find(old)
    last = content.rfind(old)
    between = content[first + len(old) : last]
    return b"".join((content[:first], new, between, new, content[last + len(old) :]))


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
    """A new name is on disk only when its folder is."""
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


def open_spool(folder: Path, state: dict[str, Any] | None, max_bytes: float) -> Spool:
    """The spool of the run that goes on from `state` (see `RunInfo`). The folder of another run is
    renamed."""
    spool = Spool(folder, max_bytes)
    ours = state is not None and state.get("spool", spool.name) == spool.name
    if ours or not spool.parts:
        return spool
    names = (folder.with_name(f"{folder.name}-before-{number}") for number in count(1))
    aside = next(path for path in names if not path.exists())
    try:
        folder.rename(aside)
    except OSError as error:
        raise RolloutError(
            f"{folder} has the rollouts of an earlier run and cannot be renamed "
            f"({error.strerror}). Set `output_dir` to another folder, or move it away."
        ) from error
    why = "begins anew" if state is None else "resumes from a checkpoint of another"
    message = (
        "%s has the rollouts of an earlier run, and this one %s. They are now in %s, which "
        "you may delete."
    )
    logger.warning(message, folder, why, aside)
    return Spool(folder, max_bytes)


def source_state(stateful_callbacks: dict[str, Any] | None) -> tuple[dict[str, Any] | None, int]:
    """The source's state in a checkpoint, None if it has none, and how many of its last batch are
    untrained."""
    saved = (stateful_callbacks or {}).get(STATE_NAME)
    return (
        (saved["attributes"]["source"], saved["attributes"]["unfinished_rows"])
        if saved
        else (None, 0)
    )


def oldest_cursor(output_dir: str | Path, spool: str) -> int | None:
    """The smallest cursor into the spool of that name in the checkpoints of `output_dir`, None if
    there is none."""
    cursors = []
    for path in Path(output_dir).glob("checkpoint-*/trainer_state.json"):
        # half written: no run can resume from it
        with suppress(OSError, ValueError, KeyError, TypeError):
            state, _ = source_state(
                json.loads(path.read_text(encoding="utf-8"))["stateful_callbacks"]
            )
            if state and state.get("spool") == spool:
                cursors.append(state["cursor"])
    return min(cursors, default=None)


class TrainerLogprobs:
    """One Feather file per generation batch in the spool's `folder`, for the trainer-sampler gap of
    the report: `index` is that of the spool's rollouts, `logprobs` has a float32 per completion
    token, in nats, NaN where it was not trained. A file whose rollouts the spool has removed is
    removed with the next write."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._failed = False

    def keep(
        self,
        rollouts: Sequence[Rollout],
        output: "dict[str, torch.Tensor]",
        accelerator: "Accelerator",
    ) -> None:
        """Call it on every rank, with the rollouts of all ranks, rank 0 first, and this rank's `(B,
        C)` tensors of TRL. Ignores rollouts that are not in this run's spool."""
        import torch

        if any(rollout.index < 0 for rollout in rollouts):
            return
        trained = (output["completion_mask"] * output["tool_mask"]).bool()
        values = output["old_per_token_logps"].float().where(trained, torch.nan)
        # a rank pads to its own longest
        width = max(len(rollout.completion_ids) for rollout in rollouts)
        values = torch.nn.functional.pad(values, (0, width - values.size(1)), value=torch.nan)
        values = accelerator.gather(values)  # (rollouts of all ranks, width)
        if accelerator.is_main_process:
            self.write(rollouts, values.cpu().numpy())

    def write(self, rollouts: Sequence[Rollout], values: np.ndarray) -> None:
        """Writes one generation batch: `values` is `(n, width)` float32, right-padded. Removes what
        the run had written of these and later rollouts before it was resumed. If it cannot write,
        the log says so, and it stops."""
        if self._failed:
            return
        pairs = sorted(zip(rollouts, values, strict=True), key=lambda pair: pair[0].index)
        columns = {
            "index": [rollout.index for rollout, _ in pairs],
            "logprobs": [of_tokens[: len(rollout.completion_ids)] for rollout, of_tokens in pairs],
        }
        schema = pa.schema({"index": pa.int64(), "logprobs": pa.large_list(pa.float32())})
        first = pairs[0][0].index
        try:
            files = sorted(self._folder.glob("trainer-[0-9]*.feather"))
            for abandoned in [path for path in files if _start_of(path) >= first]:
                abandoned.unlink()
            write_file(
                self._folder / f"trainer-{first:012d}.feather",
                _file_content(pa.table(columns, schema=schema)),
                sync=False,
            )
            oldest = min(map(_start_of, self._folder.glob("rows-*.arrow")), default=0)
            for path, after in pairwise(files):
                if _start_of(after) <= oldest:
                    path.unlink(missing_ok=True)
        # only a report needs these; if the spool cannot be written, it ends the run itself
        except OSError as error:
            self._failed = True
            message = (
                "The trainer's log-probabilities cannot be kept in %s (%s). Training goes on; a "
                "report of this run has no trainer-sampler gap from here on. Make room, or let "
                "this user write there."
            )
            logger.warning(message, self._folder, error.strerror)


def _start_of(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])
