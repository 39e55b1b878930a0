"""Keeps the trainer's log-probabilities beside the rollouts, for the trainer-sampler gap of the
report.

`BatchMonitor` (`metrics/monitor.py`) writes them, and `report/run_folder.py` reads them. The files
stand in the spool's folder. They end in `.feather`, so that whoever reads all `.arrow` files of the
folder reads rollouts.
"""

import logging
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from trl_atropos.rollouts.rollout import Rollout
from trl_atropos.rollouts.spool import file_content, write_file

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

logger = logging.getLogger(__name__)


class TrainerLogprobs:
    """
    Writes one Feather file per generation batch into the spool's `folder`.

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
        write_file(new_path, file_content(table), sync=False)
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
