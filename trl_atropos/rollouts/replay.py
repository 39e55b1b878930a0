"""Rollouts from files instead of a live API: the same rows, in the order they were recorded. What was recorded as it
came off the wire goes through the same door; the files of a spool hold rows that have been through it.

For debugging a run without environments, and for comparing two runs on the same rollouts.
"""

import logging
from collections import deque
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from trl_atropos.errors import RolloutError
from trl_atropos.rollouts.intake import Intake
from trl_atropos.rollouts.recording import read_batches, recorded_files
from trl_atropos.rollouts.schema import Row, SingleRowGroups
from trl_atropos.rollouts.source import RunInfo
from trl_atropos.rollouts.spool import read_rows

logger = logging.getLogger(__name__)


class ReplaySource:
    """
    Replays recorded batches (format: `recording.py`), or the rows in `<output_dir>/rollouts` of another run.

    Args:
        paths: a file or directory, or a list of them. A directory stands for its `.json`, `.jsonl` and `.arrow` files
            by name.
        loop: begin again when the recording is used up.
        single_row_groups: what a group of one means, see `schema.rows_of`.

    Raises:
        RolloutError: from `start` and `poll`; the message has the way out.
    """

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        *,
        loop: bool = False,
        single_row_groups: SingleRowGroups = "refuse",
    ):
        self._paths = [paths] if isinstance(paths, str | Path) else list(paths)
        self._loop = loop
        self._single_row_groups: SingleRowGroups = single_row_groups
        self._rows: deque[Row] = deque()
        self._recorded_rows = 0  # usable rows read since the recording began
        self._files: list[Path] = []
        self._rows_read = self._read()

    def start(self, run: RunInfo) -> None:
        self._run = run
        self._intake = Intake(
            run.max_sequence_length, run.temperature, self._single_row_groups, vocab_size=run.vocab_size
        )
        self._files = recorded_files(self._paths)
        self._rows_read = self._read()
        self._rows.clear()
        logger.info("Replaying rollouts from %d files, first %s.", len(self._files), self._files[0])
        if run.rows_consumed:
            self.poll(run.rows_consumed, 0.0)
            self._intake.metrics()
            logger.info("Skipped the %d rows that the run has been trained on.", run.rows_consumed)

    def poll(self, num_rows: int, timeout: float) -> list[Row] | None:
        """The next `num_rows` recorded rows. Never waits, so `timeout` has no effect and None is never returned."""
        while len(self._rows) < num_rows:
            rows = next(self._rows_read, None)
            if rows is None:
                self._begin_again(num_rows)
                continue
            self._recorded_rows += len(rows)
            self._rows += rows
        return [self._rows.popleft() for _ in range(num_rows)]

    def metrics(self) -> dict[str, float]:
        """See `Intake.metrics`."""
        return self._intake.metrics()

    def diagnose(self) -> str:
        """Never needed: `poll` does not return None."""
        return f"{len(self._rows)} recorded rows are left."

    def close(self) -> None:
        """Closes the file being read."""
        self._rows_read.close()

    def state(self) -> dict[str, Any]:
        """Nothing: `RunInfo.rows_consumed` tells how many rows to skip."""
        return {}

    def _read(self) -> Generator[list[Row], None, None]:
        for file in self._files:
            if file.suffix == ".arrow":
                yield self._fitting(file)
            else:
                yield from map(self._intake.admit, read_batches(file))

    def _fitting(self, file: Path) -> list[Row]:
        """The rows of a spool's file that this run can train on."""
        rows, longest, vocab = read_rows(file), self._run.max_sequence_length, self._run.vocab_size
        for row in rows:
            largest = max(row.prompt_ids.max(), row.completion_ids.max())
            if vocab is not None and largest >= vocab:
                raise RolloutError(
                    f"{file} has the token id {largest}, but the model knows ids below {vocab}: it was recorded with "
                    "another model. Correct `replay_paths`."
                )
        fitting = [row for row in rows if len(row.prompt_ids) + len(row.completion_ids) <= longest]
        if len(fitting) < len(rows):
            logger.warning("Left out %d rows of %s: at most %d tokens fit.", len(rows) - len(fitting), file, longest)
        return fitting

    def _begin_again(self, num_rows: int) -> None:
        """Raises `RolloutError` unless the recording loops and has anything in it."""
        if not self._recorded_rows:
            files = ", ".join(map(str, self._files))
            raise RolloutError(f"The recording ({files}) has no row that can be trained on. Record another one.")
        if not self._loop:
            raise RolloutError(
                f"The recording is used up: it has {self._recorded_rows} rows, and {len(self._rows)} are left for a "
                f"batch of {num_rows}. Train fewer steps (`max_steps`), record more, or (in code) replay it with "
                "`loop=True`."
            )
        self._recorded_rows = 0
        self._rows_read = self._read()
