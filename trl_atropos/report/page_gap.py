"""The gap between trainer and sampler on every token of a rollout, for `page.py`.

Reads what `rollouts/trainer_logprobs.py` left beside the spool's files, in numpy and pyarrow alone.
"""

from bisect import bisect_right
from pathlib import Path

import numpy as np
import pyarrow as pa

from trl_atropos.report.page_rows import Fate, Rows
from trl_atropos.report.page_run import Run

CORRECTION = "vllm_importance_sampling_correction"
NOT_TRAINED = (Fate.WAITING, Fate.PASSED_OVER)  # what is kept of them is of a life of the run that was given up


class TrainerLogprobs:
    """What there is in a run's `rollouts/`. Each file is read once if rows are asked for in their order."""

    def __init__(self, folder: Path):
        self._paths = sorted(folder.glob("trainer-[0-9]*.feather"))
        self._starts = [int(path.stem.rpartition("-")[2]) for path in self._paths]
        self._opened = -1
        self._rows: dict[int, np.ndarray] = {}  # of the file that was opened last, by index
        self.unreadable: list[str] = []

    def __len__(self) -> int:
        return len(self._paths)

    def of(self, index: int) -> np.ndarray | None:
        """`(c,)` float32 in nats, NaN where a token was not trained; None if it was not kept."""
        place = bisect_right(self._starts, index) - 1
        if place < 0:
            return None
        if place != self._opened:
            self._opened, self._rows = place, self._read(self._paths[place])
        return self._rows.get(index)

    def _read(self, path: Path) -> dict[int, np.ndarray]:
        try:
            with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
                table = reader.read_all()
            lists = table.column("logprobs").combine_chunks()
            ends, values = lists.offsets.to_numpy(), lists.values.to_numpy()
            indices = table.column("index").to_pylist()
        except FileNotFoundError:
            return {}  # the run has just removed it
        except (OSError, pa.ArrowException, KeyError) as error:
            self.unreadable.append(f"{path.name}: {error}")
            return {}
        return {index: values[ends[i] : ends[i + 1]] for i, index in enumerate(indices)}


def gap_of(trainer: TrainerLogprobs, index: int, fate: int, logprobs: np.ndarray) -> np.ndarray | None:
    """
    Trainer's minus sampler's log-probability of each token of a rollout, `(c,)` in nats, NaN where one of them is not
    known; None if none is.

    Args:
        fate: what became of the rollout.
        logprobs: the sampler's.
    """
    own = trainer.of(index) if fate not in NOT_TRAINED else None
    if own is None or len(own) != len(logprobs):
        return None
    gap = own - logprobs
    gap = np.where(np.isfinite(gap), gap, np.float32(np.nan))  # a policy that has diverged has infinite ones
    return gap if not np.isnan(gap).all() else None


def why_none(run: Run, rows: Rows, trainer: TrainerLogprobs) -> str:
    """Of a page without any gap, in words."""
    if not len(rows):
        return "there is no rollout in this run's folder"
    if len(trainer):
        return "none of these rollouts is known to have been trained, or its sampler's log-probabilities are not known"
    if run.config.get(CORRECTION) is False:
        return f"with `{CORRECTION}: false`, the trainer's log-probabilities of what was sampled are not computed"
    return (
        "the trainer's log-probabilities are not in this run's folder: no batch has been trained yet, or the run is "
        "older than this version of trl_atropos, or they could not be written (then the warnings say so)"
    )
