"""The trainer's own log-probabilities of every rollout that it trains on, beside the sampler's in the spool.

Where TRL has scored a generation batch under the current policy, `AtroposGRPOTrainer` calls `keep` on every rank;
rank 0 writes the values into the spool's folder, one Feather file per batch, for the trainer-sampler gap in
`trl-atropos report`. `pandas.read_feather` reads one, too: `index` is that of the spool's rollouts, `logprobs` has a
float32 per token of the completion, in nats, NaN where it was not trained.

They are not `.arrow` files, so that whoever reads all of those in the folder reads rollouts.
"""

import logging
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from trl_atropos.rollouts.row import Rollout

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

logger = logging.getLogger(__name__)


class TrainerLogprobs:
    """
    The files in a spool's folder. Those of rollouts that the spool has removed are removed with the next write.

    Args:
        folder: the spool's, `<output_dir>/rollouts`.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._failed = False

    def keep(self, rollouts: Sequence[Rollout], output: "dict[str, torch.Tensor]", accelerator: "Accelerator") -> None:
        """
        The same call on every rank. Does nothing for rollouts that are not in this run's spool.

        Args:
            rollouts: of all ranks, in the order in which they have them, rank 0 first.
            output: this rank's `(B, C)` tensors `completion_mask`, `tool_mask` and `old_per_token_logps`.
        """
        import torch

        if any(rollout.index < 0 for rollout in rollouts):
            return
        trained = (output["completion_mask"] * output["tool_mask"]).bool()
        values = output["old_per_token_logps"].float().where(trained, torch.nan)
        width = max(len(one.completion_ids) for one in rollouts)  # each rank has padded to the longest of its own
        values = torch.nn.functional.pad(values, (0, width - values.size(1)), value=torch.nan)
        values = accelerator.gather(values)  # (rollouts of all ranks, width)
        if accelerator.is_main_process:
            self.write(rollouts, values.cpu().numpy())

    def write(self, rollouts: Sequence[Rollout], values: np.ndarray) -> None:
        """
        One generation batch. A run takes its rollouts in the order of their indices: what it had written of these and
        all after them before it was resumed from a checkpoint is removed.

        If the batch cannot be written, the log says so once, and nothing is written any more.

        Args:
            values: `(n, width)` float32; of each rollout, as many columns as its completion has tokens are its own.
        """
        if self._failed:
            return
        try:
            self._write(sorted(zip(rollouts, values, strict=True), key=lambda pair: pair[0].index))
        except OSError as error:  # a report is no reason to end a run; a spool that cannot be written does so itself
            self._failed = True
            logger.warning(
                "The trainer's log-probabilities cannot be kept in %s (%s). Training goes on; from here on, a report "
                "of this run has no trainer-sampler gap for each token. Make room, or let this user write there, "
                "before the run is resumed.",
                self._folder,
                error.strerror,
            )

    def _write(self, pairs: list[tuple[Rollout, np.ndarray]]) -> None:
        lists = [values[: len(rollout.completion_ids)] for rollout, values in pairs]
        offsets = np.cumsum([0, *map(len, lists)], dtype=np.int64)
        table = pa.table(
            {
                "index": pa.array([rollout.index for rollout, _ in pairs], type=pa.int64()),
                "logprobs": pa.LargeListArray.from_arrays(offsets, pa.array(np.concatenate(lists))),
            }
        )
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        first = pairs[0][0].index
        files = sorted(self._folder.glob("trainer-[0-9]*.feather"))
        for abandoned in [path for path in files if start_of(path) >= first]:
            abandoned.unlink()
        draft = self._folder / f".trainer-{first:012d}.feather.tmp"
        try:
            draft.write_bytes(sink.getvalue())
            draft.replace(self._folder / f"trainer-{first:012d}.feather")
        finally:
            draft.unlink(missing_ok=True)
        oldest = min(map(start_of, self._folder.glob("rows-*.arrow")), default=0)
        for path, after in pairwise(files):
            if start_of(after) <= oldest:
                path.unlink(missing_ok=True)


def start_of(path: Path) -> int:
    """The index in the name of a file, of the spool or of the trainer's log-probabilities."""
    return int(path.stem.rpartition("-")[2])
