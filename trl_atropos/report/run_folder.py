"""Reads a run's folder for `page.py`: the log, the settings, the warnings, and the fate of every
rollout.

`run_log.py` writes the log. A run may be writing while we read: a line may be cut off, and a file
may be gone. This module imports neither torch nor transformers.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyarrow import feather

from trl_atropos.activity import activity
from trl_atropos.errors import AtroposTrainingError, RolloutError
from trl_atropos.protocol import SESSION_METRICS
from trl_atropos.rollouts.reward_parts import ENVIRONMENT
from trl_atropos.rollouts.rollout import Rollout, normalised, staleness
from trl_atropos.rollouts.spool import META, FileHeader, read_header, read_rollouts

LOG = "run_log.jsonl"
EPISODE_COUNTS = "/episodes/"  # between an environment's name and what became of an episode


class ReportError(AtroposTrainingError):
    """The folder holds nothing to report."""


@dataclass
class Batch:
    """A generation batch, as it was handed to the trainer (`run_log.py` describes the fields)."""

    first_step: int
    last_step: int
    spool: str
    spans: list[list[int]]
    version: int
    lineage: list[list]


@dataclass
class Run:
    """Holds the log of a run, in the order of steps, without what a resumed run had abandoned."""

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
        steps = [self.ended or 0, *self.logs]
        if self.batches:
            steps.append(self.batches[-1].first_step - 1)
        return max(steps)

    @property
    def config(self) -> dict[str, Any]:
        return self.began.get("config", {})


def read_run(folder: Path) -> Run:
    """Raises `ReportError` if there is no such folder, or no run has left anything in it yet."""
    if not folder.is_dir():
        raise ReportError(f"{folder} is no folder. Name a run's `output_dir`.")
    if not (folder / LOG).exists():
        if (folder / "rollouts").is_dir():
            return Run(folder)
        what = f"{folder} is no run's `output_dir`: it has no {LOG} and no rollouts"
        fix = "Name the recipe's `output_dir`, or wait until the run has begun."
        raise ReportError(what, fix=fix)
    run = Run(folder, LOG)
    text = (folder / LOG).read_text(encoding="utf-8", errors="replace")
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except ValueError:  # the machine stopped, or the run is writing it right now
            continue
        # another run had this folder before
        if record.get("begin") == 0:
            run = Run(folder, LOG, began_at=record["at"], whole=True)
        _add(run, record)
    return run


def _add(run: Run, record: dict[str, Any]) -> None:
    run.last_at = record.get("at", run.last_at)
    if "begin" in record:
        _begin(run, record)
    elif "logs" in record:
        numbers = run.logs.setdefault(record["step"], {})
        for name, value in record["logs"].items():
            if isinstance(value, int | float):
                numbers[name] = value
    elif "batch" in record:
        first_step, last_step = record["batch"]
        batch = Batch(
            first_step,
            last_step,
            spool=record["spool"],
            spans=record["rows"],
            version=record["version"],
            lineage=record["lineage"],
        )
        run.batches.append(batch)
        run.books = record["books"]
    elif "evaluation" in record:
        run.evaluations.append(record)
    elif "warning" in record:
        run.warnings.append(record)
    elif "end" in record:
        run.ended = record["end"]


def _begin(run: Run, record: dict[str, Any]) -> None:
    """Discards the records of later steps than the one from which the run now goes on."""
    step = record["begin"]
    if step:
        run.resumed.append(step)
    run.began_at = run.began_at or record["at"]
    run.began = record
    run.ended = None
    run.logs = {at: values for at, values in run.logs.items() if at <= step}
    run.evaluations = [record for record in run.evaluations if record["step"] <= step]
    run.warnings = [record for record in run.warnings if record["step"] <= step]
    run.batches = [batch for batch in run.batches if batch.first_step <= step]
    for batch in run.batches:
        batch.last_step = min(batch.last_step, step)  # its remaining rollouts were dropped


def session_counts(run: Run) -> dict[str, int]:
    """Returns what the sessions of a run did, by the end of the metric's name: `{"opened": 80,
    "tokens": 9600, "ended_deleted": 80}`. Returns nothing for a run without sessions."""
    counts: Counter[str] = Counter()
    for logged in run.logs.values():
        for name, value in logged.items():
            if name.startswith(SESSION_METRICS):
                counts[name.removeprefix(SESSION_METRICS)] += round(value)
    return dict(sorted(counts.items()))


def episode_counts(run: Run) -> dict[str, dict[str, int]]:
    """Returns what became of the episodes of agents and of tasksets of verifiers, by environment:
    `{"agent": {"ended": 75, "timeout": 5}}`."""
    counts: dict[str, Counter[str]] = {}
    for logged in run.logs.values():
        for name, value in logged.items():
            environment, is_count, outcome = name.partition(EPISODE_COUNTS)
            if is_count and environment.startswith(ENVIRONMENT):
                environment = environment.removeprefix(ENVIRONMENT)
                counts.setdefault(environment, Counter())[outcome] += round(value)
    return {environment: dict(counts[environment]) for environment in sorted(counts)}


def series(run: Run, limit: int) -> dict[str, Any]:
    """Returns every metric over the steps at which it was logged: `{name: [steps, values]}`.

    If there are more than `limit` points, neighbours are joined: into their mean, or their largest
    value if the metric is a maximum.
    """
    steps = defaultdict(list)  # by metric
    values = defaultdict(list)
    for step, logged in sorted(run.logs.items()):
        for name, value in logged.items():
            if name not in ("step", "epoch"):
                steps[name].append(step)
                values[name].append(value)
    curves = {}
    for name in sorted(steps):
        join = max if "max" in name else fmean
        curves[name] = _joined(steps[name], values[name], limit, join)
    return curves


def _joined(
    steps: list[int], values: list[float], limit: int, join: Callable[[list[float]], float]
) -> list[list]:
    """Returns at most `limit` points. With a limit of 2, four values become two, at the second and
    the fourth step."""
    size = math.ceil(len(steps) / limit)
    last_steps = []
    joined_values = []
    for begin in range(0, len(steps), size):
        end = min(begin + size, len(steps))
        last_steps.append(steps[end - 1])
        joined_values.append(join(values[begin:end]))
    return [last_steps, joined_values]


# ------------------------------------------------------------------------------------- its rollouts

UNKNOWN = -1
TAKEN_OVER = (  # attributes of a rollout
    "index",
    "group",
    "env_id",
    "policy_version",
    "newest_version",
    "score",
    "group_mean",
    "group_std",
    "zero_advantage",
    "raw_advantage",
    "sft",
)


class Fate(IntEnum):
    """The fate of a rollout, as far as the run's log tells."""

    UNKNOWN = 0
    TRAINED = 1
    IN_TRAINING = 2  # handed to the trainer, whose step is not known to be over
    WAITING = 3  # on disk, not handed out
    # never handed out, but newer ones were: it was stale, without variance, or over its share
    PASSED_OVER = 4


def rollouts_of(run: Run) -> tuple[pd.DataFrame, list[str]]:
    """
    Returns all `n` rollouts in the run's folder by index, and the files that cannot be read, each
    with the reason.

    Beside `TAKEN_OVER`, columns are `environment`, `prompt_tokens`, `completion_tokens`, `path` (of
    the file), `fate`, `first_step` and `last_step` (optimizer steps that the rollout was taken
    for), `stale` (steps between the version that sampled it and the one that it was trained at) and
    `batch`, if all of that is there. A value is `UNKNOWN` if the log does not tell it.
    """
    folder = run.folder / "rollouts"
    tables = []
    headers = {}
    unreadable = []
    # the file below knows it before the first batch, too
    spool = run.batches[-1].spool if run.batches else ""
    try:
        meta = (folder / META).read_text(encoding="utf-8")
        spool = json.loads(meta)["name"]
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError) as error:
        unreadable.append(f"{META}: it is not what a run wrote ({error!r})")
    paths = sorted(folder.glob("rows-*.arrow"))
    with activity(f"Reading the rollouts in {folder}", len(paths)) as reading:
        for path in paths:
            reading.advance()
            try:
                header = read_header(path, spool)
                rollouts = read_rollouts(path)
            except RolloutError as error:
                # unless the run has just removed it
                if not isinstance(error.__cause__, FileNotFoundError):
                    unreadable.append(f"{path.name}: {error.__cause__}")
                continue
            if rollouts:  # all of a file's may have been rejected
                headers[str(path)] = header
                tables.append(_table(rollouts, str(path)))
    table = pd.concat(tables or [_table([], "")], ignore_index=True)
    batches = [batch for batch in run.batches if batch.spool == spool]
    traced = _traced(table, headers, run, batches)
    return table.assign(**traced), unreadable


def _table(rollouts: list[Rollout], path: str) -> pd.DataFrame:
    columns = {name: [] for name in TAKEN_OVER}
    for rollout in rollouts:
        for name in TAKEN_OVER:
            value = getattr(rollout, name)
            if value is None:
                value = UNKNOWN
            columns[name].append(value)
    columns["prompt_tokens"] = [len(rollout.prompt_ids) for rollout in rollouts]
    columns["completion_tokens"] = [len(rollout.completion_ids) for rollout in rollouts]
    columns["environment"] = [_environment(rollout) for rollout in rollouts]
    return pd.DataFrame(columns).assign(path=path)


def _environment(rollout: Rollout) -> str:
    if rollout.environment:
        return rollout.environment
    if rollout.env_id is None:
        return "environment not named"
    return f"environment {rollout.env_id}"


def _traced(
    table: pd.DataFrame, headers: dict[str, FileHeader], run: Run, batches: list[Batch]
) -> dict[str, np.ndarray]:
    """Returns columns with the fate of every rollout, and the steps at which it was trained."""
    fate = np.full(len(table), Fate.UNKNOWN)
    batch_number = np.full(len(table), UNKNOWN)
    first_step = np.full(len(table), UNKNOWN)
    last_step = np.full(len(table), UNKNOWN)
    stale = np.full(len(table), UNKNOWN)
    indices = table["index"].to_numpy()
    sampled = table["policy_version"].to_numpy()
    if batches:
        if run.whole:
            fate[:] = Fate.PASSED_OVER
        end_of_last = max(end for _, end in batches[-1].spans)
        fate[indices >= end_of_last] = Fate.WAITING
    for number, batch in enumerate(batches):
        places = _places_of(batch, indices)
        is_over = batch.last_step <= run.steps
        fate[places] = Fate.TRAINED if is_over else Fate.IN_TRAINING
        size = sum(end - first for first, end in batch.spans)
        if len(places) == size:
            batch_number[places] = number
        first_step[places] = batch.first_step
        last_step[places] = batch.last_step
        is_sampled = sampled[places] != UNKNOWN
        for place in places[is_sampled]:
            path = table["path"].iat[place]
            header = headers[path]
            stale[place] = staleness(
                sampled[place], header.policy_branches, header.version, batch.lineage, batch.version
            )
    return {
        "batch": batch_number,
        "first_step": first_step,
        "last_step": last_step,
        "stale": stale,
        "fate": fate,
    }


def _places_of(batch: Batch, indices: np.ndarray) -> np.ndarray:
    """Returns the places in sorted `indices` of those that a batch has. Its span [3, 5] of the
    indices 2, 3, 4 and 7 has the places 1 and 2."""
    places = []
    for span in batch.spans:
        first, end = np.searchsorted(indices, span)
        places.append(np.arange(first, end))
    return np.concatenate(places)


def advantages(rollouts: pd.DataFrame, scale_rewards: str | None) -> np.ndarray:
    """Returns the advantages that the trainer trains with, but for those of single tokens.

    They are `(n,)` float32, NaN if not known. `scale_rewards` is the run's setting, None if that is
    not known.
    """
    scores = rollouts["score"].astype(np.float32)
    if scale_rewards == "none":
        stds = None
    elif scale_rewards == "group":
        stds = rollouts["group_std"].to_numpy()
    elif scale_rewards == "batch":
        by_batch = scores.groupby(rollouts["batch"])
        stds = by_batch.transform("std")
        stds = stds.mask(by_batch.transform("size") == 1, 0.0)
        stds = stds.mask(rollouts["batch"] == UNKNOWN).to_numpy()
    else:
        stds = np.full(len(rollouts), np.nan)
    return normalised(
        scores.to_numpy(),
        rollouts["group_mean"].to_numpy(),
        stds,
        rollouts["raw_advantage"].to_numpy(bool),
        rollouts["sft"].to_numpy(bool),
        rollouts["zero_advantage"].to_numpy(bool),
    )


def trainer_logprobs(
    folder: Path, wanted: Container[int]
) -> tuple[dict[int, np.ndarray], list[str]]:
    """Returns the trainer's log-probabilities (`rollouts/trainer_logprobs.py` writes them) by index
    of the rollout, and the files that cannot be read, each with the reason.

    Log-probabilities are `(c,)` float32 in nats, NaN for tokens that were not trained.
    """
    logprobs = {}
    unreadable = []
    for path in sorted(folder.glob("trainer-[0-9]*.feather")):
        try:
            table = feather.read_table(path, memory_map=True)
            lists = table.column("logprobs").combine_chunks()
            for place, index in enumerate(table.column("index").to_pylist()):
                if index in wanted:
                    logprobs[index] = lists[place].values.to_numpy()
        except FileNotFoundError:  # the run has just removed it
            continue
        except (OSError, pa.ArrowException, KeyError) as error:
            unreadable.append(f"{path.name}: {error}")
    return logprobs, unreadable
