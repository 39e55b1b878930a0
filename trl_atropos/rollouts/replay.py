"""Rollouts from files instead of a live API, in the order in which they were recorded: to debug a
run without environments, or to compare two runs on the same rollouts.

The files of a spool (`<output_dir>/rollouts/*.arrow` of another run) hold rollouts. JSON files hold
what the Atropos API delivers: `{"batch": [group, ...]}` or one bare group, in `.jsonl` on each
line, in `.json` once.
"""

import json
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from trl_atropos.activity import activity
from trl_atropos.errors import RolloutError
from trl_atropos.rollouts.intake import Intake, SingleRowGroups
from trl_atropos.rollouts.rollout import Rollout
from trl_atropos.rollouts.source import RolloutSource, RunInfo
from trl_atropos.rollouts.spool import read_rollouts
from trl_atropos.rollouts.wire import read_group

logger = logging.getLogger(__name__)

SUFFIXES = (".json", ".jsonl", ".arrow")


class ReplaySource(RolloutSource):
    """
    Replays recorded rollouts.

    Args:
        paths: a file or directory, or a list of them. A directory stands for its `.json`, `.jsonl`
            and `.arrow` files by name.
        loop: begin again when the recording is used up.
        single_row_groups: what a group of one means, see `Intake`.
    """

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        *,
        loop: bool = False,
        single_row_groups: SingleRowGroups = "refuse",
    ):
        if isinstance(paths, str | Path):
            paths = [paths]
        self._paths = list(paths)
        self._loop = loop
        self._single_row_groups: SingleRowGroups = single_row_groups

    def start(self, run: RunInfo) -> None:
        """Opens the recording, and skips what the run has been trained on."""
        self._run = run
        self._intake = Intake(
            run.max_sequence_length,
            run.temperature,
            self._single_row_groups,
            vocab_size=run.vocab_size,
        )
        self._files = recorded_files(self._paths)
        self._reader = self._read()
        self._ready: deque[Rollout] = deque()
        self._recorded = 0  # usable rollouts read since the recording began
        logger.info("Replaying rollouts from %d files, first %s.", len(self._files), self._files[0])
        if run.rows_consumed:
            with activity("Skipping the rollouts that the run has been trained on"):
                self.poll(run.rows_consumed, 0.0)
            self._intake.metrics()
            logger.info(
                "Skipped the %d rollouts that the run has been trained on.", run.rows_consumed
            )

    def poll(self, num_rollouts: int, timeout: float) -> list[Rollout] | None:
        """Returns the next `num_rollouts`. Never waits, so `timeout` has no effect and None is
        never returned."""
        while len(self._ready) < num_rollouts:
            rollouts = next(self._reader, None)
            if rollouts is not None:
                self._recorded += len(rollouts)
                self._ready += rollouts
                continue
            self._require_more(num_rollouts)
            self._recorded = 0
            self._reader = self._read()
        return [self._ready.popleft() for _ in range(num_rollouts)]

    def _require_more(self, num_rollouts: int) -> None:
        """Raises `RolloutError` if nothing comes after the end of the recording."""
        if not self._recorded:
            files = ", ".join(map(str, self._files))
            raise RolloutError(
                f"The recording ({files}) has no rollout that can be trained on. Record another."
            )
        if not self._loop:
            raise RolloutError(
                f"The recording is used up: it has {self._recorded} rollouts, and "
                f"{len(self._ready)} are left for a batch of {num_rollouts}. Train fewer steps "
                "(`max_steps`), record more, or (in code) replay it with `loop=True`."
            )

    def metrics(self) -> dict[str, float]:
        """Returns counts since the last call, see `Intake.metrics`."""
        return self._intake.metrics()

    def _read(self) -> Iterator[list[Rollout]]:
        for file in self._files:
            if file.suffix == ".arrow":
                yield self._rollouts_of_spool(file)
                continue
            for text, place in _records(file):
                groups = map(read_group, _groups(text, place))
                yield self._intake.admit(groups)

    def _rollouts_of_spool(self, file: Path) -> list[Rollout]:
        """Returns the rollouts of a spool's file that this run can train on."""
        rollouts = read_rollouts(file)
        max_length = self._run.max_sequence_length
        vocab_size = self._run.vocab_size
        fitting = []
        for rollout in rollouts:
            rollout.index = -1  # it was the number in another run
            largest = max(rollout.prompt_ids.max(), rollout.completion_ids.max())
            if vocab_size is not None and largest >= vocab_size:
                raise RolloutError(
                    f"{file} has the token id {largest}, but the model knows ids below "
                    f"{vocab_size}: it was recorded with another model. Correct `replay_paths`."
                )
            if rollout.longest_path <= max_length:
                fitting.append(rollout)
        if len(fitting) < len(rollouts):
            left_out = len(rollouts) - len(fitting)
            message = "Left out %d rollouts of %s: at most %d tokens fit."
            logger.warning(message, left_out, file, max_length)
        return fitting


def recorded_files(paths: Sequence[str | Path]) -> list[Path]:
    """Returns the files that `paths` name, a directory standing for its `.json`, `.jsonl` and
    `.arrow` files sorted by name. Raises `RolloutError` for a path that does not exist, or a
    directory without such a file."""
    if not paths:
        fix = "Name a file or a folder, or leave it out to train on a live API."
        raise RolloutError("`replay_paths` is empty", "replay_paths: []", fix, "replay")
    files: list[Path] = []
    for path in map(Path, paths):
        fault = ""
        if path.is_dir():
            in_folder = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
            files += in_folder
            if not in_folder:
                fault = "holds no .json, .jsonl or .arrow file"
        else:
            files.append(path)
            if not path.exists():
                fault = "does not exist"
        if fault:
            what = f"{path} {fault}, so there are no recorded rollouts to replay"
            seen = f"replay_paths: {list(paths)}"
            raise RolloutError(what, seen, "Correct the path.", "replay")
    return files


def _records(file: Path) -> Iterator[tuple[str, str]]:
    """Yields the JSON texts of a file, each with the place to name in messages."""
    with file.open(encoding="utf-8") as lines:
        if file.suffix == ".json":
            text = lines.read()
            if text.strip():
                yield text, str(file)
            return
        for number, text in enumerate(lines, start=1):
            if text.strip():
                yield text, f"{file}, line {number}"


def _groups(text: str, place: str) -> list[object]:
    """Returns the groups of one JSON text."""
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise RolloutError(
            f"{place} is not JSON ({error}). A recording that was cut off ends like this: delete "
            "that line."
        ) from error
    if isinstance(record, dict):
        if "tokens" in record:
            return [record]
        if isinstance(record.get("batch"), list):
            return record["batch"]
    raise RolloutError(
        f'{place} is neither a batch ({{"batch": [...]}}) nor a group ({{"tokens": ...}}), but '
        f"{text.strip()[:80]!r}. "
        "Leave this file out."
    )
