"""What a run's folder tells of the run, for `page.py`: its log, settings, warnings, and which rows each step took.

From `run_log.jsonl` (written by `page_log.py`), or else from the newest checkpoint, which has the log alone. Read
while a run goes on, so a file that is cut off in mid-line is nothing unusual. Imports nothing heavy.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from trl_atropos.errors import AtroposTrainingError

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
