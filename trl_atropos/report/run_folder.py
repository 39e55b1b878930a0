"""Reads a run's folder for `page.py`: the log, the settings, the warnings, and what became of every rollout.

The log is `run_log.jsonl`, which `run_log.py` writes, or that of the newest checkpoint, which has metrics alone. A run
may be writing while this reads: a line may be cut off, and a file may be gone. Imports neither torch nor transformers.
"""

import json
from collections.abc import Container
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow as pa

from trl_atropos.errors import AtroposTrainingError, RolloutError
from trl_atropos.rollouts.advantages import normalised
from trl_atropos.rollouts.row import Rollout
from trl_atropos.rollouts.spool import META, Part, read_part, read_rollouts, staleness

LOG = "run_log.jsonl"


class ReportError(AtroposTrainingError):
    """A folder of which no report can be made."""


@dataclass
class Batch:
    """A generation batch, as it was handed to the trainer."""

    first_step: int  # optimizer steps that it was taken for
    last_step: int
    spool: str
    spans: list[list[int]]  # [first, end) of the indices of its rollouts
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
    books: dict[str, Any] | None = None  # counts of trained, dropped and lost rollouts at the last batch

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
        for line in (folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
            except ValueError:  # the machine stopped, or the run is writing it right now
                continue
            if record.get("begin") == 0:  # what an earlier run left in this folder is not part of this one
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


def _add(run: Run, record: dict[str, Any]) -> None:
    if "begin" in record:
        _begin(run, record)
    elif "logs" in record:
        numbers = {name: value for name, value in record["logs"].items() if isinstance(value, int | float)}
        run.logs.setdefault(record["step"], {}).update(numbers)
    elif "batch" in record:
        place = record["spool"], record["rows"], record["version"], record["lineage"]
        run.batches.append(Batch(*record["batch"], *place))
        run.books = record["books"]
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
    run.began, run.ended = record, None
    run.logs = {at: values for at, values in run.logs.items() if at <= step}
    run.warnings = [warning for warning in run.warnings if warning["step"] <= step]
    run.batches = [batch for batch in run.batches if batch.first_step <= step]
    for batch in run.batches:
        batch.last_step = min(batch.last_step, step)  # its remaining rollouts were dropped


def _take_checkpoint(run: Run) -> None:
    """The log of the newest checkpoint that is whole."""
    paths = run.folder.glob("checkpoint-*/trainer_state.json")
    paths = [path for path in paths if path.parent.name[11:].isdigit()]
    for path in sorted(paths, key=lambda path: int(path.parent.name[11:]), reverse=True):
        try:
            history = json.loads(path.read_text(encoding="utf-8"))["log_history"]
        except (OSError, ValueError, KeyError):  # half written, or just being removed
            continue
        run.source, run.last_at = f"{path.parent.name}/{path.name}", path.stat().st_mtime
        for entry in history:
            _add(run, {"logs": entry, "step": entry["step"]})
        return


def series(run: Run, limit: int) -> dict[str, Any]:
    """
    Every metric over the steps at which it was logged: `{name: [steps, values]}`. More than `limit` points are joined:
    of neighbours the mean, or the largest where the metric is a maximum.
    """
    found = {}
    for name in sorted({name for values in run.logs.values() for name in values} - {"step", "epoch"}):
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
    """What became of a rollout, as far as the run's log tells."""

    UNKNOWN = 0
    TRAINED = 1
    IN_TRAINING = 2  # handed to the trainer, whose step is not known to be over
    WAITING = 3  # on disk, not handed out
    PASSED_OVER = 4  # never handed out, but newer ones were: it was stale, without variance, or over its share


@dataclass
class Rollouts:
    """
    The `n` rollouts in a run's folder, by index.

    Attributes:
        columns: Arrays of `(n,)`, in which `UNKNOWN` stands for what is not known: `SCALARS`, `FLAGS`, `environment`,
            `prompt_tokens`, `completion_tokens`, `file` (place in `paths`), `fate`, `first_step` and `last_step` that
            it was trained at, `stale` (optimizer steps between the version that sampled it and the one that it was
            trained at), and `batch` (number of the generation batch, if all of that is there).
        parts: What each of `paths` says about itself.
        unreadable: Names of files, each with the reason.
    """

    folder: Path
    spool: str = ""
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    paths: list[Path] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self["index"])

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]


def rollouts_of(run: Run) -> Rollouts:
    """
    All rollouts in the run's folder, and what became of them. A file that cannot be read is named in `unreadable`.

    Raises:
        ReportError: Something else has written to the folder of the rollouts.
    """
    found = Rollouts(run.folder / "rollouts")
    try:
        found.spool = json.loads((found.folder / META).read_text(encoding="utf-8"))["name"]
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ReportError(
            f"{found.folder / META} is not what a run writes ({error!r}). Move {found.folder} away for a report "
            "without the rollouts in it."
        ) from error
    tables = [_columns([], 0)]
    for path in sorted(found.folder.glob("rows-*.arrow")):
        try:
            part, rollouts = read_part(path, found.spool), read_rollouts(path)
        except RolloutError as error:
            if not isinstance(error.__cause__, FileNotFoundError):  # the run has just removed it
                found.unreadable.append(f"{path.name}: {error.__cause__}")
            continue
        tables.append(_columns(rollouts, len(found.paths)))
        found.paths.append(path)
        found.parts.append(part)
    found.columns = {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}
    _trace(found, run)
    return found


def _columns(rollouts: list[Rollout], file: int) -> dict[str, np.ndarray]:
    found = {name: [getattr(one, name) for one in rollouts] for name in (*SCALARS, *FLAGS)}
    found = {name: [UNKNOWN if value is None else value for value in values] for name, values in found.items()}
    numbers = {"prompt_tokens": [len(one.prompt_ids) for one in rollouts], "file": [file] * len(rollouts)}
    numbers["completion_tokens"] = [len(one.completion_ids) for one in rollouts]
    kinds = dict.fromkeys(("score", "group_mean", "group_std"), np.float64)
    arrays = {name: np.array(values, kinds.get(name, np.int64)) for name, values in (found | numbers).items()}
    return arrays | {"environment": np.array([_environment(one) for one in rollouts], np.str_)}


def _environment(rollout: Rollout) -> str:
    """What the page calls its environment."""
    unnamed = "environment not named" if rollout.env_id is None else f"environment {rollout.env_id}"
    return rollout.environment or unnamed


def _trace(rollouts: Rollouts, run: Run) -> None:
    """Sets for every rollout what became of it, and at which step, where the run's log tells."""
    names = ("batch", "first_step", "last_step", "stale")
    of = {name: np.full(len(rollouts), UNKNOWN) for name in names} | {"fate": np.full(len(rollouts), Fate.UNKNOWN)}
    rollouts.columns |= of
    batches = [batch for batch in run.batches if batch.spool == rollouts.spool]
    if not batches:
        return
    ahead = rollouts["index"] >= max(end for _, end in batches[-1].spans)
    of["fate"][ahead] = Fate.WAITING
    if run.whole:
        of["fate"][~ahead] = Fate.PASSED_OVER
    for number, batch in enumerate(batches):
        places = [range(*np.searchsorted(rollouts["index"], span)) for span in batch.spans]
        whole = sum(map(len, places)) == sum(end - first for first, end in batch.spans)
        for place in (place for span in places for place in span):
            of["fate"][place] = Fate.TRAINED if batch.last_step <= run.steps else Fate.IN_TRAINING
            of["batch"][place] = number if whole else UNKNOWN
            of["first_step"][place], of["last_step"][place] = batch.first_step, batch.last_step
            sampled, part = rollouts["policy_version"][place], rollouts.parts[rollouts["file"][place]]
            if sampled != UNKNOWN:
                age = staleness(sampled, part.lineage, part.version, batch.lineage, batch.version)
                of["stale"][place] = age


def advantages(rollouts: Rollouts, scale_rewards: str | None) -> np.ndarray:
    """
    `(n,)` float32: what the trainer trains with, except for advantages that an environment sent for each token. NaN
    where it is not known.

    Args:
        scale_rewards: The run's setting, None if that is not known.
    """
    scores = rollouts["score"].astype(np.float32)
    if scale_rewards == "batch":
        stds = _batch_stds(rollouts, scores)
    elif scale_rewards in ("group", "none"):
        stds = rollouts["group_std"] if scale_rewards == "group" else None
    else:
        stds = np.full(len(rollouts), np.nan, np.float32)
    raw, sft, zero = (rollouts[name].astype(bool) for name in ("raw_advantage", "sft", "zero_advantage"))
    return normalised(scores, rollouts["group_mean"], stds, raw, sft, zero)


def _batch_stds(rollouts: Rollouts, scores: np.ndarray) -> np.ndarray:
    """Standard deviation (ddof=1) of the scores that were trained together; NaN where that is not known."""
    stds = np.full(len(rollouts), np.nan, np.float32)
    order = np.argsort(rollouts["batch"], kind="stable")
    for together in np.split(order, np.flatnonzero(np.diff(rollouts["batch"][order])) + 1):
        if len(together) and rollouts["batch"][together[0]] != UNKNOWN:
            stds[together] = scores[together].std(ddof=1) if len(together) > 1 else 0.0
    return stds


def trainer_logprobs(folder: Path, wanted: Container[int]) -> tuple[dict[int, np.ndarray], list[str]]:
    """
    The trainer's log-probabilities of rollouts, which `rollouts/trainer_logprobs.py` keeps beside them: by index,
    `(c,)` float32 in nats, NaN where a token was not trained. And the files that cannot be read, each with the reason.
    """
    found, unreadable = {}, []
    for path in sorted(folder.glob("trainer-[0-9]*.feather")):
        try:
            with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
                table = reader.read_all()
            lists = table.column("logprobs").combine_chunks()
            for place, index in enumerate(table.column("index").to_pylist()):
                if index in wanted:
                    found[index] = lists[place].values.to_numpy()
        except FileNotFoundError:  # the run has just removed it
            continue
        except (OSError, pa.ArrowException, KeyError) as error:
            unreadable.append(f"{path.name}: {error}")
    return found, unreadable
