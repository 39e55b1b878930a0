"""What a run's folder tells of the run, for `page.py`: its log, settings, warnings, and which rows each step took.

From `run_log.jsonl` (written by `run_log.py`), or else from the newest checkpoint, which has the log alone. Read
while a run goes on, so a file that is cut off in mid-line is nothing unusual. Imports nothing heavy.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trl_atropos.errors import AtroposTrainingError
from trl_atropos.rollouts.rollout import normalised, staleness
from trl_atropos.rollouts.spool import HEADER

LOG = "run_log.jsonl"


class ReportError(AtroposTrainingError):
    """A folder of which no report can be made."""


@dataclass
class Batch:
    """A generation batch, as it was handed to the trainer."""

    first_step: int  # optimizer steps that it was taken for
    last_step: int
    spool: str
    spans: list[list[int]]  # [first, end) of the numbers of its rows
    version: int
    lineage: list[list]


@dataclass
class Run:
    """`logs` and `warnings` are in the order of steps; what a resumed run had abandoned is not among them."""

    folder: Path
    source: str | None = None  # file that the log is from
    began: dict[str, Any] = field(default_factory=dict)  # last `begin`: settings, versions
    began_at: float | None = None  # seconds since 1970
    last_at: float | None = None
    ended: int | None = None  # optimizer steps, if the run has come to its end
    resumed: list[int] = field(default_factory=list)  # steps at which it went on from a checkpoint
    logs: dict[int, dict[str, float]] = field(default_factory=dict)  # by step
    warnings: list[dict[str, Any]] = field(default_factory=list)  # at, step, warning
    batches: list[Batch] = field(default_factory=list)
    whole: bool = False  # whether `batches` are all that there were since step 0
    books: dict[str, Any] | None = None  # of the last batch

    @property
    def steps(self) -> int:
        """Optimizer steps that are known to be done."""
        taken = self.batches[-1].first_step - 1 if self.batches else 0
        return max([self.ended or 0, taken, *self.logs])

    @property
    def config(self) -> dict[str, Any]:
        return self.began.get("config", {})


def read_run(folder: Path) -> Run:
    """
    Raises:
        ReportError: There is no such folder, or no run has left anything in it yet.
    """
    if not folder.is_dir():
        raise ReportError(f"{folder} is no folder. Name a run's `output_dir`.")
    run = Run(folder)
    if (folder / LOG).exists():
        run.source = LOG
        for record in _records(folder / LOG):
            if record.get("begin") == 0:  # anew: what an earlier run left in this folder is not its own
                run = Run(folder, LOG, began_at=record["at"], whole=True)
            _add(run, record)
    else:
        _take_checkpoint(run)
    if run.source is None and not (folder / "rollouts").is_dir():
        raise ReportError(
            f"{folder} is no run's `output_dir`: it has no {LOG}, no rollouts and no checkpoint-N/trainer_state.json. "
            "Name the folder that the recipe's `output_dir` names, or wait until the run has begun."
        )
    return run


def _records(path: Path) -> Iterable[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:  # the machine stopped, or the run is writing it right now
            continue
        if isinstance(record, dict):
            yield record


def _add(run: Run, record: dict[str, Any]) -> None:
    if "begin" in record:
        _begin(run, record)
    elif "logs" in record:
        numbers = {name: value for name, value in record["logs"].items() if isinstance(value, int | float)}
        run.logs.setdefault(record["step"], {}).update(numbers)
    elif "batch" in record:
        first, last = record["batch"]
        place = record["spool"], record["rows"], record["version"], record["lineage"]
        run.batches.append(Batch(first, last, *place))
        run.books = record["books"]
    elif "warning" in record:
        run.warnings.append(record)
    elif "end" in record:
        run.ended = record["end"]
    run.last_at = record.get("at", run.last_at)


def _begin(run: Run, record: dict[str, Any]) -> None:
    """What an earlier life of the run did after the step from which it now goes on is not its own any more."""
    step = record["begin"]
    if step:
        run.resumed.append(step)
    run.began_at = run.began_at or record["at"]
    run.began, run.ended = record, None
    run.logs = {at: values for at, values in run.logs.items() if at <= step}
    run.warnings = [warning for warning in run.warnings if warning["step"] <= step]
    run.batches = [batch for batch in run.batches if batch.first_step <= step]
    for batch in run.batches:
        batch.last_step = min(batch.last_step, step)  # its remaining rows were dropped


def _take_checkpoint(run: Run) -> None:
    """The log of the newest checkpoint that is whole."""
    paths = run.folder.glob("checkpoint-*/trainer_state.json")
    numbered = [(int(path.parent.name[11:]), path) for path in paths if path.parent.name[11:].isdigit()]
    for _, path in sorted(numbered, reverse=True):
        try:
            history = json.loads(path.read_text(encoding="utf-8"))["log_history"]
        except (OSError, ValueError, KeyError):  # half written, or just being removed
            continue
        run.source = f"{path.parent.name}/{path.name}"
        run.last_at = path.stat().st_mtime
        for entry in history:
            _add(run, {"logs": entry, "step": entry["step"]})
        return


def series(run: Run, limit: int) -> dict[str, Any]:
    """
    Every metric over the steps at which it was logged: `{name: [steps, values]}`. Of more than `limit` points, means
    (of a largest value, the largest) of as many neighbours as bring them below.
    """
    names = sorted({name for values in run.logs.values() for name in values} - {"step", "epoch"})
    found = {}
    for name in names:
        points = [(step, values[name]) for step, values in sorted(run.logs.items()) if name in values]
        size = -(-len(points) // limit)
        buckets = [points[at : at + size] for at in range(0, len(points), size)]
        join = max if "max" in name else fmean
        found[name] = [
            [bucket[-1][0] for bucket in buckets],
            [join(value for _, value in bucket) for bucket in buckets],
        ]
    return found


# -------------------------------------------------------------------------------------------------------- its rollouts

UNKNOWN = -1
SCALARS = ("index", "group", "env_id", "policy_version", "newest_version", "score", "group_mean", "group_std")
FLAGS = ("zero_advantage", "raw_advantage", "sft")


class Fate(IntEnum):
    """What became of a row, as far as the run's log tells."""

    UNKNOWN = 0
    TRAINED = 1
    IN_TRAINING = 2  # handed to the trainer, whose step is not known to be over
    WAITING = 3  # on disk, not handed out
    PASSED_OVER = 4  # older than rows that were handed out, and never was: stale, without variance, over its share


@dataclass
class Rows:
    """`n` rows in the order of their numbers. Every array is `(n,)`; `UNKNOWN` stands for what is not known."""

    columns: dict[str, np.ndarray]  # SCALARS, FLAGS, environment, prompt_tokens, completion_tokens
    file: np.ndarray  # index into `paths`
    position: np.ndarray  # within the file
    paths: list[Path]
    headers: list[dict[str, Any]]
    spool: str
    unreadable: list[str]  # names of files
    fate: np.ndarray = None  # these five are set by `trace`
    batch: np.ndarray = None  # number of the generation batch, if all of it is there
    first_step: np.ndarray = None
    last_step: np.ndarray = None
    staleness: np.ndarray = None  # optimizer steps between the version that sampled it and the one it was trained at

    def __len__(self) -> int:
        return len(self.file)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    @property
    def length(self) -> np.ndarray:
        return self["prompt_tokens"] + self["completion_tokens"]


def read_all(folder: Path) -> Rows:
    """
    The rows in `folder`, which may be missing. A file that cannot be read is named in `unreadable`.

    Raises:
        ReportError: the folder is no spool's.
    """
    try:
        spool = json.loads((folder / "spool.meta").read_text(encoding="utf-8"))["name"]
    except FileNotFoundError:
        spool = ""
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ReportError(
            f"{folder / 'spool.meta'} is not what a run writes ({error!r}). Move {folder} away for a report without "
            "the rollouts in it."
        ) from error
    tables, paths, headers, unreadable = [], [], [], []
    for path in sorted(folder.glob("rows-*.arrow")):
        try:
            with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
                header = json.loads((reader.schema.metadata or {})[HEADER])
                tables.append(_columns(reader.read_all()))
        except FileNotFoundError:
            continue  # the run has just trimmed it
        except (OSError, pa.ArrowException, ValueError, KeyError) as error:
            unreadable.append(f"{path.name}: {error}")
            continue
        paths.append(path)
        headers.append(header)
    return _joined(tables, paths, headers, spool, unreadable)


def _columns(table: pa.Table) -> dict[str, np.ndarray]:
    found = {name: _numbers(table.column(name)) for name in (*SCALARS, *FLAGS)}
    found["environment"] = _environments(table, found["env_id"])
    for name in ("prompt", "completion"):
        found[f"{name}_tokens"] = pc.list_value_length(table.column(f"{name}_ids")).to_numpy().astype(np.int64)
    return found


def _environments(table: pa.Table, numbers: np.ndarray) -> np.ndarray:
    """What the page calls the environment of each row. Rollouts of earlier versions have no names."""
    named = "environment" in table.column_names
    names = table.column("environment").to_pylist() if named else [None] * len(table)
    unnamed = {number: f"environment {number}" for number in set(numbers.tolist())} | {
        UNKNOWN: "environment not named"
    }
    return np.array([name or unnamed[number] for name, number in zip(names, numbers.tolist())], dtype=np.str_)


def _numbers(column: pa.ChunkedArray) -> np.ndarray:
    absent = False if pa.types.is_boolean(column.type) else UNKNOWN
    return column.fill_null(absent).to_numpy()


def _joined(tables: list[dict[str, np.ndarray]], paths, headers, spool, unreadable) -> Rows:
    names = (*SCALARS, *FLAGS, "environment", "prompt_tokens", "completion_tokens")
    columns = {name: np.concatenate([t[name] for t in tables] or [np.empty(0)]) for name in names}
    sizes = [len(table["index"]) for table in tables]
    file = np.repeat(np.arange(len(sizes)), sizes)
    position = np.concatenate([np.arange(size) for size in sizes] or [np.empty(0, np.int64)])
    order = np.argsort(columns["index"], kind="stable")
    columns = {name: values[order] for name, values in columns.items()}
    return Rows(columns, file[order], position[order], paths, headers, spool, unreadable)


# ----------------------------------------------------------------------------------------------- what became of it


def trace(rows: Rows, run: Run) -> None:
    """Sets for every row what became of it, and at which step, where the run's log tells."""
    n = len(rows)
    rows.fate = np.full(n, Fate.UNKNOWN)
    rows.batch, rows.first_step, rows.last_step, rows.staleness = (np.full(n, UNKNOWN) for _ in range(4))
    batches = [batch for batch in run.batches if batch.spool == rows.spool]
    if not batches:
        return
    ahead = rows["index"] >= max(end for _, end in batches[-1].spans)
    rows.fate[ahead] = Fate.WAITING
    if run.whole:
        rows.fate[~ahead] = Fate.PASSED_OVER
    for number, batch in enumerate(batches):
        done = batch.last_step <= run.steps
        parts = [slice(*np.searchsorted(rows["index"], span)) for span in batch.spans]
        whole = sum(part.stop - part.start for part in parts) == sum(end - first for first, end in batch.spans)
        for part in parts:
            rows.fate[part] = Fate.TRAINED if done else Fate.IN_TRAINING
            rows.batch[part] = number if whole else UNKNOWN
            rows.first_step[part], rows.last_step[part] = batch.first_step, batch.last_step
            _set_staleness(rows, part, batch.lineage, batch.version)


def _set_staleness(rows: Rows, part: slice, path: list[list], version: int) -> None:
    of_rows, files = rows["policy_version"][part], rows.file[part]
    for sampled, file in {*zip(of_rows.tolist(), files.tolist())}:
        if sampled == UNKNOWN:
            continue
        header = rows.headers[file]
        same = (of_rows == sampled) & (files == file)
        rows.staleness[part][same] = staleness(sampled, header["lineage"], header["version"], path, version)


def advantages(rows: Rows, scale_rewards: str | None) -> np.ndarray:
    """
    `(n,)` float32, NaN = not known: what the trainer trains with, but for advantages that an environment sent for each
    token.

    Args:
        scale_rewards: the run's setting, None if that is not known.
    """
    scores = rows["score"].astype(np.float32)
    if scale_rewards == "batch":
        stds = _batch_stds(rows, scores)
    elif scale_rewards in ("group", "none"):
        stds = rows["group_std"] if scale_rewards == "group" else None
    else:
        stds = np.full(len(rows), np.nan, np.float32)
    raw, sft, zero = (rows[name].astype(bool) for name in ("raw_advantage", "sft", "zero_advantage"))
    return normalised(scores, rows["group_mean"], stds, raw, sft, zero)


def _batch_stds(rows: Rows, scores: np.ndarray) -> np.ndarray:
    """Standard deviation (ddof=1) of the scores that were trained together; NaN where that is not known."""
    stds = np.full(len(rows), np.nan, np.float32)
    order = np.argsort(rows.batch, kind="stable")
    for together in np.split(order, np.flatnonzero(np.diff(rows.batch[order])) + 1):
        if len(together) and rows.batch[together[0]] != UNKNOWN:
            stds[together] = scores[together].std(ddof=1) if len(together) > 1 else 0.0
    return stds
