"""Reads a run's folder for `page.py`: the log, the settings, the warnings, and what became of every
rollout.

`run_log.py` writes the log. A run may be writing while this reads: a line may be cut off, and a
file may be gone. Imports neither torch nor transformers.
"""

import json
from collections.abc import Container
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyarrow import feather

from trl_atropos.errors import AtroposTrainingError, RolloutError
from trl_atropos.rollouts.rollout import Rollout, normalised, staleness
from trl_atropos.rollouts.spool import META, FileHeader, read_header, read_rollouts

LOG = "run_log.jsonl"


class ReportError(AtroposTrainingError):
    """A folder of which no report can be made."""


@dataclass
class Batch:
    """A generation batch, as it was handed to the trainer (`run_log.py` says what the fields
    are)."""

    first_step: int
    last_step: int
    spool: str
    spans: list[list[int]]
    version: int
    lineage: list[list]


@dataclass
class Run:
    """`logs` and `warnings` are in the order of steps, without what a resumed run had abandoned."""

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
    # evaluation (the name), step, metrics, versions
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    # counts of trained, dropped and lost rollouts at the last batch
    books: dict[str, Any] | None = None

    @property
    def steps(self) -> int:
        """Optimizer steps that are known to be done."""
        taken = self.batches[-1].first_step - 1 if self.batches else 0
        return max([self.ended or 0, taken, *self.logs])

    @property
    def config(self) -> dict[str, Any]:
        return self.began.get("config", {})


def read_run(folder: Path) -> Run:
    """Raises `ReportError` if there is no such folder, or no run has left anything in it yet."""
    if not folder.is_dir():
        raise ReportError(f"{folder} is no folder. Name a run's `output_dir`.")
    run = Run(folder)
    if (folder / LOG).exists():
        run.source = LOG
        for line in (folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
            except ValueError:  # the machine stopped, or the run is writing it right now
                continue
            # what an earlier run left in this folder is not part of this one
            if record.get("begin") == 0:
                run = Run(folder, LOG, began_at=record["at"], whole=True)
            _add(run, record)
    elif not (folder / "rollouts").is_dir():
        what = f"{folder} is no run's `output_dir`: it has no {LOG} and no rollouts"
        raise ReportError(
            what, fix="Name the recipe's `output_dir`, or wait until the run has begun."
        )
    return run


def _add(run: Run, record: dict[str, Any]) -> None:
    if "begin" in record:
        _begin(run, record)
    elif "logs" in record:
        numbers = {
            name: value for name, value in record["logs"].items() if isinstance(value, int | float)
        }
        run.logs.setdefault(record["step"], {}).update(numbers)
    elif "batch" in record:
        others = (record[name] for name in ("spool", "rows", "version", "lineage"))
        run.batches.append(Batch(*record["batch"], *others))
        run.books = record["books"]
    elif "evaluation" in record:
        run.evaluations.append(record)
    elif "warning" in record:
        run.warnings.append(record)
    elif "end" in record:
        run.ended = record["end"]
    run.last_at = record.get("at", run.last_at)


def _begin(run: Run, record: dict[str, Any]) -> None:
    """Forgets what the run did after the step from which it now goes on."""
    step = record["begin"]
    if step:
        run.resumed.append(step)
    run.began_at = run.began_at or record["at"]
    run.began = record
    run.ended = None
    run.logs = {at: values for at, values in run.logs.items() if at <= step}
    run.evaluations = [found for found in run.evaluations if found["step"] <= step]
    run.warnings = [warning for warning in run.warnings if warning["step"] <= step]
    run.batches = [batch for batch in run.batches if batch.first_step <= step]
    for batch in run.batches:
        batch.last_step = min(batch.last_step, step)  # its remaining rollouts were dropped


def series(run: Run, limit: int) -> dict[str, Any]:
    """Every metric over the steps at which it was logged: `{name: [steps, values]}`. More than
    `limit` points are joined: of neighbours the mean, or the largest where the metric is a
    maximum."""
    found = {}
    for name in sorted(
        {name for values in run.logs.values() for name in values} - {"step", "epoch"}
    ):
        points = [
            (step, values[name]) for step, values in sorted(run.logs.items()) if name in values
        ]
        size = -(-len(points) // limit)
        buckets = [points[at : at + size] for at in range(0, len(points), size)]
        join = max if "max" in name else fmean
        values = [join(value for _, value in bucket) for bucket in buckets]
        found[name] = [[bucket[-1][0] for bucket in buckets], values]
    return found


# ------------------------------------------------------------------------------------- its rollouts

UNKNOWN = -1
TAKEN_OVER = (
    "index",
    "group",
    "env_id",
    "policy_version",
    "newest_version",
    "score",
    "group_mean",
    "group_std",
)
TAKEN_OVER += ("zero_advantage", "raw_advantage", "sft")


class Fate(IntEnum):
    """What became of a rollout, as far as the run's log tells."""

    UNKNOWN = 0
    TRAINED = 1
    IN_TRAINING = 2  # handed to the trainer, whose step is not known to be over
    WAITING = 3  # on disk, not handed out
    # never handed out, but newer ones were: it was stale, without variance, or over its share
    PASSED_OVER = 4


def rollouts_of(run: Run) -> tuple[pd.DataFrame, list[str]]:
    """
    All `n` rollouts in the run's folder by index, and the files that cannot be read, each with the
    reason.

    Beside `TAKEN_OVER`, columns are `environment`, `prompt_tokens`, `completion_tokens`, `path` (of
    the file), `fate`, `first_step` and `last_step` (optimizer steps that the rollout was taken
    for), `stale` (steps between the version that sampled it and the one that it was trained at) and
    `batch`, if all of that is there. Or `UNKNOWN`.
    """
    folder = run.folder / "rollouts"
    tables = []
    parts = {}
    unreadable = []
    # the file below knows it before the first batch, too
    spool = run.batches[-1].spool if run.batches else ""
    try:
        spool = json.loads((folder / META).read_text(encoding="utf-8"))["name"]
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError) as error:
        unreadable.append(f"{META}: it is not what a run wrote ({error!r})")
    for path in sorted(folder.glob("rows-*.arrow")):
        try:
            part = read_header(path, spool)
            rollouts = read_rollouts(path)
        except RolloutError as error:
            if not isinstance(error.__cause__, FileNotFoundError):  # the run has just removed it
                unreadable.append(f"{path.name}: {error.__cause__}")
            continue
        if rollouts:  # all of a file's may have been rejected
            parts[str(path)] = part
            tables.append(_table(rollouts, str(path)))
    rollouts = pd.concat(tables or [_table([], "")], ignore_index=True)
    _trace(rollouts, parts, run, [batch for batch in run.batches if batch.spool == spool])
    return rollouts, unreadable


def _table(rollouts: list[Rollout], path: str) -> pd.DataFrame:
    found = {name: [getattr(one, name) for one in rollouts] for name in TAKEN_OVER}
    found = {
        name: [UNKNOWN if value is None else value for value in values]
        for name, values in found.items()
    }
    found["prompt_tokens"] = [len(one.prompt_ids) for one in rollouts]
    found["completion_tokens"] = [len(one.completion_ids) for one in rollouts]
    table = pd.DataFrame(found)
    unnamed = {env_id: f"environment {env_id}" for env_id in table["env_id"]} | {
        UNKNOWN: "environment not named"
    }
    table["environment"] = [
        one.environment or unnamed[env_id] for one, env_id in zip(rollouts, table["env_id"])
    ]
    return table.assign(path=path)


def _trace(
    rollouts: pd.DataFrame, parts: dict[str, FileHeader], run: Run, batches: list[Batch]
) -> None:
    """Sets for every rollout what became of it, and at which step, where the run's log tells."""
    names = ("batch", "first_step", "last_step", "stale")
    of = {name: np.full(len(rollouts), UNKNOWN) for name in names} | {
        "fate": np.full(len(rollouts), Fate.UNKNOWN)
    }
    indices = rollouts["index"].to_numpy()
    sampled = rollouts["policy_version"].to_numpy()
    if batches:
        ahead = indices >= max(end for _, end in batches[-1].spans)
        of["fate"][:] = np.where(
            ahead, Fate.WAITING, Fate.PASSED_OVER if run.whole else Fate.UNKNOWN
        )
    for number, batch in enumerate(batches):
        places = np.concatenate(
            [np.arange(*np.searchsorted(indices, span)) for span in batch.spans]
        )
        of["fate"][places] = Fate.TRAINED if batch.last_step <= run.steps else Fate.IN_TRAINING
        if len(places) == sum(end - first for first, end in batch.spans):
            of["batch"][places] = number
        of["first_step"][places], of["last_step"][places] = batch.first_step, batch.last_step
        for place in places[sampled[places] != UNKNOWN]:
            part = parts[rollouts["path"].iat[place]]
            of["stale"][place] = staleness(
                sampled[place], part.policy_branches, part.version, batch.lineage, batch.version
            )
    for name, values in of.items():
        rollouts[name] = values


def advantages(rollouts: pd.DataFrame, scale_rewards: str | None) -> np.ndarray:
    """`(n,)` float32: what the trainer trains with, but for advantages of single tokens; NaN where
    it is not known. `scale_rewards` is the run's setting, None if that is not known."""
    scores = rollouts["score"].astype(np.float32)
    stds = pd.Series(np.nan, rollouts.index)
    if scale_rewards == "group":
        stds = rollouts["group_std"]
    elif scale_rewards == "batch":
        together = scores.groupby(rollouts["batch"])
        stds = (
            together.transform("std")
            .mask(together.transform("size") == 1, 0.0)
            .mask(rollouts["batch"] == UNKNOWN)
        )
    flags = (rollouts[name].to_numpy(bool) for name in ("raw_advantage", "sft", "zero_advantage"))
    stds = None if scale_rewards == "none" else stds.to_numpy()
    return normalised(scores.to_numpy(), rollouts["group_mean"].to_numpy(), stds, *flags)


def trainer_logprobs(
    folder: Path, wanted: Container[int]
) -> tuple[dict[int, np.ndarray], list[str]]:
    """The trainer's log-probabilities (`rollouts/spool.py` writes them) by index of the rollout:
    `(c,)` float32 in nats, NaN where a token was not trained. And the files that cannot be read,
    each with the reason."""
    found = {}
    unreadable = []
    for path in sorted(folder.glob("trainer-[0-9]*.feather")):
        try:
            table = feather.read_table(path, memory_map=True)
            lists = table.column("logprobs").combine_chunks()
            for place, index in enumerate(table.column("index").to_pylist()):
                if index in wanted:
                    found[index] = lists[place].values.to_numpy()
        except FileNotFoundError:  # the run has just removed it
            continue
        except (OSError, pa.ArrowException, KeyError) as error:
            unreadable.append(f"{path.name}: {error}")
    return found, unreadable
