"""What the trainer itself thinks of every rollout that it trains on, beside the sampler's view of it in the spool.

Where TRL has scored a generation batch under the current policy, `AtroposGRPOTrainer` gives the log-probabilities to
`LogprobKeeper` on every rank; rank 0 writes them into the spool's folder, one Feather file per batch, for the
trainer-sampler gap in `trl-atropos report`. `pandas.read_feather` reads one, too: `index` is that of the spool's rows,
`logprobs` has a float32 per token of the completion, in nats, NaN where it was not trained.

They are no `.arrow` files, so that whoever reads all of those in the folder reads rollouts.
"""

import logging
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from accelerate import Accelerator

from trl_atropos import distributed as ranks
from trl_atropos.rollouts.schema import Row
from trl_atropos.rollouts.source import RolloutSource

logger = logging.getLogger(__name__)


class LogprobKeeper:
    """
    Keeps them for a run whose rollouts are in a spool; a replay's are in another run's. The same calls on every rank.

    Args:
        folder: the spool's, `<output_dir>/rollouts`.
    """

    def __init__(self, folder: str | Path, source: RolloutSource, accelerator: Accelerator):
        self._files = TrainerLogprobs(Path(folder))
        self._source = source
        self._accelerator = accelerator
        self._has_spool: bool | None = None  # not asked yet

    def keep(self, rows: Sequence[Row], output: dict[str, torch.Tensor]) -> None:
        """
        Args:
            rows: of all ranks, in the order in which they have them, rank 0 first.
            output: this rank's `(B, C)` tensors `completion_mask`, `tool_mask` and `old_per_token_logps`.
        """
        if self._has_spool is None:
            self._has_spool = ranks.on_main(lambda: "spool" in self._source.state())
        if not self._has_spool:
            return
        trained = (output["completion_mask"] * output["tool_mask"]).bool()
        values = output["old_per_token_logps"].float().where(trained, torch.nan)
        width = max(len(row.completion_ids) for row in rows)  # each rank has padded to the longest of its own
        values = torch.nn.functional.pad(values, (0, width - values.size(1)), value=torch.nan)
        values = self._accelerator.gather(values)  # (rows of all ranks, width)
        if self._accelerator.is_main_process:
            self._files.write(rows, values.cpu().numpy())


class TrainerLogprobs:
    """The files in a spool's folder. Those of rows that the spool has removed are removed with the next write."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._starts: deque[int] | None = None  # lowest index in each file, ascending; before the first write, None
        self._oldest: Path | None = None  # file of the spool
        self._failed = False

    def write(self, rows: Sequence[Row], values: np.ndarray) -> None:
        """
        One generation batch. A run takes its rows in the order of their indices: what it had written of these rows
        and all after them before it was resumed from a checkpoint is removed.

        If it cannot be written, that is said once, and nothing is written any more.

        Args:
            values: `(n, width)` float32; of each row, as many columns as its completion has tokens are its own.
        """
        if self._failed:
            return
        try:
            self._write(sorted(zip(rows, values, strict=True), key=lambda pair: pair[0].index))
            self._prune()
        except OSError as error:  # a report is no reason to end a run; a spool that cannot be written does so itself
            self._failed = True
            logger.warning(
                "The trainer's log-probabilities cannot be kept in %s (%s). Training goes on; from here on, a report "
                "of this run has no trainer-sampler gap for each token. Make room, or let this user write there, "
                "before the run is resumed.",
                self._folder,
                error.strerror,
            )

    def _write(self, pairs: list[tuple[Row, np.ndarray]]) -> None:
        start = pairs[0][0].index
        if self._starts is None:
            self._starts = deque(sorted(map(start_of, self._folder.glob("trainer-[0-9]*.feather"))))
        while self._starts and self._starts[-1] >= start:
            (self._folder / _name(self._starts.pop())).unlink(missing_ok=True)
        lists = [values[: len(row.completion_ids)] for row, values in pairs]
        offsets = np.cumsum([0, *map(len, lists)], dtype=np.int64)
        table = pa.table(
            {
                "index": pa.array([row.index for row, _ in pairs], type=pa.int64()),
                "logprobs": pa.LargeListArray.from_arrays(offsets, pa.array(np.concatenate(lists))),
            }
        )
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        draft = self._folder / f".{_name(start)}.tmp"
        try:
            draft.write_bytes(sink.getvalue())
            draft.replace(self._folder / _name(start))
        finally:
            draft.unlink(missing_ok=True)
        self._starts.append(start)

    def _prune(self) -> None:
        if self._oldest is not None and self._oldest.exists():
            return  # and so are all others: the spool removes the oldest first
        self._oldest = min(self._folder.glob("rows-*.arrow"), default=None)
        if self._oldest is None:
            return
        while len(self._starts) > 1 and self._starts[1] <= start_of(self._oldest):
            (self._folder / _name(self._starts.popleft())).unlink(missing_ok=True)


def start_of(path: Path) -> int:
    """The index in the name of a file, of the spool or of the trainer's log-probabilities."""
    return int(path.stem.rpartition("-")[2])


def _name(start: int) -> str:
    return f"trainer-{start:012d}.feather"
