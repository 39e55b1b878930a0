"""What of a run's rollouts goes into the page: rewards by step over all of them, and a bounded selection in full.

The page unpacks nothing of a rollout's tokens before somebody opens it: they are in chunks of their own.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from trl_atropos.report.run_folder import UNKNOWN, Fate, Rows, Run

CHUNK_TOKENS = 50_000  # of the rollouts that are unpacked together
NATS = 1000  # log-probabilities, gaps and advantages are in thousandths


# --------------------------------------------------------------------------------------------- trainer against sampler

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


# ------------------------------------------------------------------------------------------------ rewards and rollouts


def rewards(rows: Rows, limit: int) -> list[dict[str, Any]]:
    """
    For every environment, over the steps at which its rows are known to have been taken: mean, standard deviation
    over rollouts (ddof=0), and count. Steps are joined to at most `limit` points.
    """
    known = np.flatnonzero(rows.first_step != UNKNOWN)
    if not len(known):
        return []
    steps, environments = rows.first_step[known], rows["environment"][known]
    size = -(-int(steps.max()) // limit)
    steps = -(-steps // size) * size  # the last step of each point
    found = []
    for environment in np.unique(environments):
        of_it = known[environments == environment]
        points, place = np.unique(steps[environments == environment], return_inverse=True)
        scores, counts = rows["score"][of_it], np.bincount(place)
        mean = np.bincount(place, scores) / counts
        variance = np.bincount(place, (scores - mean[place]) ** 2) / counts
        found.append(
            {
                "environment": str(environment),
                "steps": points.tolist(),
                "mean": mean.round(6).tolist(),
                "std": np.sqrt(variance).round(6).tolist(),
                "count": counts.tolist(),
            }
        )
    return found


def select(rows: Rows, max_rollouts: int, max_tokens: int) -> np.ndarray:
    """Indices of whole groups, evenly spread over the run, first and last included, within both limits."""
    if not len(rows) or not max_rollouts:
        return np.empty(0, np.int64)
    _, first, group = np.unique(rows["group"], return_index=True, return_inverse=True)
    order = np.argsort(first)  # groups as they arrived
    sizes, tokens = np.bincount(group)[order], np.bincount(group, rows.length)[order]
    count = len(order)
    while True:
        chosen = np.unique(np.linspace(0, len(order) - 1, count).round().astype(int))
        over = max(sizes[chosen].sum() / max_rollouts, tokens[chosen].sum() / max_tokens)
        if over <= 1 or count == 1:
            break
        count = max(1, min(count - 1, int(count / over)))
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return np.flatnonzero(np.isin(rank[group], chosen))


@dataclass
class Packed:
    """Rollouts as the page reads them."""

    columns: dict[str, list]  # one value per rollout, see `pack`
    chunks: list[dict[str, Any]]  # {"prompts": [ids ...], "rows": [[...] ...]}
    token_ids: np.ndarray  # every id that occurs


def pack(rows: Rows, chosen: np.ndarray, advantage: np.ndarray, trainer: TrainerLogprobs) -> Packed:
    """
    The chosen rollouts. In a chunk, a row is `[number of its prompt, completion ids, lengths of its trained and
    masked stretches in turn, log-probabilities, token-level advantages or null, messages or null, gaps or null]`; it
    begins with a trained stretch, and null stands for an unknown log-probability or gap.
    """
    packed = Packed({}, [], np.empty(0, np.int64))
    logprob, trained, mean_advantage, place, mean_gap, largest_gap = [], [], [], [], [], []
    ids: set[int] = set()
    prompts: dict[bytes, int] = {}
    filled = CHUNK_TOKENS
    for index, row in zip(chosen, _read(rows, chosen)):
        if filled >= CHUNK_TOKENS:
            packed.chunks.append({"prompts": [], "rows": []})
            prompts, filled = {}, 0
        chunk = packed.chunks[-1]
        key = row["prompt_ids"].tobytes()
        if key not in prompts:
            prompts[key] = len(prompts)
            chunk["prompts"].append(row["prompt_ids"].tolist())
            filled += len(row["prompt_ids"])
        mask, known = row["mask"], row["logprobs"][row["mask"]]
        own = row["token_advantages"] if not (rows["zero_advantage"][index] or rows["sft"][index]) else None
        gap = gap_of(trainer, int(rows["index"][index]), int(rows.fate[index]), row["logprobs"])
        mean_gap.append(float(np.nanmean(np.abs(gap))) if gap is not None else np.nan)
        largest_gap.append(float(np.nanmax(np.abs(gap))) if gap is not None else np.nan)
        place.append([len(packed.chunks) - 1, len(chunk["rows"])])
        chunk["rows"].append(
            [
                prompts[key],
                row["completion_ids"].tolist(),
                _stretches(mask),
                _thousandths(row["logprobs"]),
                _thousandths(own) if own is not None else None,
                row["messages"],
                _thousandths(gap) if gap is not None else None,
            ]
        )
        filled += len(mask)
        ids.update(row["prompt_ids"].tolist(), row["completion_ids"].tolist())
        known = known[~np.isnan(known)]
        logprob.append(float(known.mean()) if len(known) else np.nan)
        trained.append(int(mask.sum()))
        mean_advantage.append(float(own[mask].mean()) if own is not None else float(advantage[index]))
    packed.token_ids = np.array(sorted(ids), np.int64)
    packed.columns = _columns(rows, chosen) | {
        "logprob": logprob,
        "advantage": mean_advantage,
        "trained_tokens": trained,
        "gap": mean_gap,
        "gap_max": largest_gap,
        "place": place,
    }
    return packed


def _columns(rows: Rows, chosen: np.ndarray) -> dict[str, list]:
    names = ("index", "group", "environment", "policy_version", "newest_version", "score", "group_mean", "group_std")
    columns = {name: rows[name][chosen].tolist() for name in (*names, "prompt_tokens", "completion_tokens")}
    columns |= {name: rows[name][chosen].astype(int).tolist() for name in ("zero_advantage", "raw_advantage", "sft")}
    traced = {"fate": rows.fate, "first_step": rows.first_step, "last_step": rows.last_step, "stale": rows.staleness}
    return columns | {name: values[chosen].tolist() for name, values in traced.items()}


def _read(rows: Rows, chosen: np.ndarray) -> Iterator[dict[str, Any]]:
    """The vectors of each chosen row, in order. Rows of one file follow each other, so each is opened once."""
    opened, table = None, None
    for index in chosen:
        if rows.file[index] != opened:
            opened = rows.file[index]
            with pa.memory_map(str(rows.paths[opened])) as source, pa.ipc.open_file(source) as reader:
                table = reader.read_all()
        position = int(rows.position[index])
        names = ("prompt_ids", "completion_ids", "mask", "logprobs", "token_advantages")
        row = {name: _vector(table.column(name)[position]) for name in names}
        yield row | {"messages": table.column("messages")[position].as_py()}


def _vector(entry: pa.Scalar) -> np.ndarray | None:
    return entry.values.to_numpy(zero_copy_only=False) if entry.is_valid else None


def _stretches(mask: np.ndarray) -> list[int]:
    """Lengths of the trained and the masked stretches in turn."""
    return np.diff(np.flatnonzero(np.diff(mask, prepend=~mask[:1], append=~mask[-1:]))).tolist()


def _thousandths(values: np.ndarray) -> list[int | None]:
    return [None if np.isnan(value) else round(float(value) * NATS) for value in values]
