"""A rollout in memory, and as a row of an Arrow table.

`intake.py` makes rollouts, and `spool.py` keeps them as tables that `datasets` or pandas can read. This file imports
neither torch nor TRL, so the report's page can read rollouts quickly.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa


@dataclass(slots=True, eq=False)
class Rollout:
    """One rollout of `p` prompt tokens and `c` completion tokens: whole and finite, nobody checks it again."""

    prompt_ids: np.ndarray  # (p,) int32, p >= 1
    completion_ids: np.ndarray  # (c,) int32, c >= 1; ends at the last trained token
    mask: np.ndarray  # (c,) bool; False = context (tool output, later user turns)
    logprobs: np.ndarray  # (c,) float32 under the policy that sampled; NaN = unknown, and wherever mask is False
    score: float  # raw reward
    group_mean: float  # of the scores of its whole group, computed in float32; 0.0 with `raw_advantage`
    group_std: float  # the same, ddof=1; 0.0 for a group of one
    token_advantages: np.ndarray | None  # (c,) float32, final, from the environment; None = normalise the score
    zero_advantage: bool  # overrides.set_advantage_to_zero, or a group of one under "zero"
    env_id: int | None  # number of the environment at the API
    environment: str | None = None  # its name, where that is known
    policy_version: int | None = None  # oldest version that sampled any token of it; None = unknown
    newest_version: int | None = None  # version at its last sampled token
    staleness: int | None = None  # optimizer steps from `policy_version` to the version it trains on, set when taken
    raw_advantage: bool = False  # the advantage is the raw score: a group of one under "raw"
    group: int = -1  # number of its group within the run
    index: int = -1  # its number within the run, in order of arrival; -1 = not in this run's spool
    arrived: float = 0.0  # time.monotonic() when its batch was pulled, or read again
    sft: bool = False  # the `sft` override: train as supervised, with advantage 1; logprobs are NaN
    distill_ids: np.ndarray | None = None  # (c, k) int32, the teacher's tokens at each position; -1 = absent
    distill_logprobs: np.ndarray | None = None  # (c, k) float32, NaN = absent
    messages: str | None = None  # JSON of the conversation, for human readers


Row = Rollout  # its former name


# ------------------------------------------------------------------------------------------------------- Arrow tables

SCALARS = {
    "index": pa.int64(),
    "group": pa.int64(),
    "env_id": pa.int64(),
    "environment": pa.large_string(),  # files of earlier versions do not have it
    "score": pa.float64(),
    "group_mean": pa.float64(),
    "group_std": pa.float64(),
    "zero_advantage": pa.bool_(),
    "raw_advantage": pa.bool_(),
    "sft": pa.bool_(),
    "policy_version": pa.int64(),
    "newest_version": pa.int64(),
    "messages": pa.large_string(),
}
VECTORS = {  # one value per token
    "prompt_ids": np.int32,
    "completion_ids": np.int32,
    "mask": np.bool_,
    "logprobs": np.float32,
    "token_advantages": np.float32,
}
MATRICES = {"distill_ids": np.int32, "distill_logprobs": np.float32}  # k values per token, k the same in a rollout


def to_table(rollouts: Sequence[Rollout], pulled_at: float) -> pa.Table:
    """
    Args:
        pulled_at: seconds since 1970, for the column of that name, which is for human readers only.
    """
    table: dict[str, pa.Array] = {
        name: pa.array([getattr(one, name) for one in rollouts], type=kind) for name, kind in SCALARS.items()
    }
    table |= {name: _lists([getattr(one, name) for one in rollouts], kind) for name, kind in VECTORS.items()}
    for name, kind in MATRICES.items():
        matrices = [getattr(one, name) for one in rollouts]
        widths = [np.full(len(matrix), matrix.shape[1]) for matrix in matrices if matrix is not None]
        flat = _lists([None if matrix is None else matrix.ravel() for matrix in matrices], kind)
        ends = np.cumsum(np.concatenate([[0], *widths]), dtype=np.int64)
        inner = pa.LargeListArray.from_arrays(ends, flat.values)
        table[name] = pa.LargeListArray.from_arrays(_offsets(matrices), inner, mask=flat.is_null())
    table["pulled_at"] = pa.array([int(pulled_at * 1e6)] * len(rollouts), type=pa.timestamp("us", tz="UTC"))
    return pa.table(table)


def from_table(table: pa.Table, arrived: float) -> list[Rollout]:
    """
    The rollouts of a table that `to_table` made. Their arrays are views of the table's memory, and read-only.

    Args:
        arrived: what goes into `Rollout.arrived`.

    Raises:
        KeyError, ValueError, pyarrow.ArrowException: a column is missing or has other values.
    """
    names = [name for name in SCALARS if name != "environment" or name in table.column_names]
    columns: dict[str, list] = {name: table.column(name).to_pylist() for name in names}
    for name, kind in VECTORS.items():
        column = table.column(name).combine_chunks()
        values = _values(column, kind)
        columns[name] = [None if span is None else values[slice(*span)] for span in _spans(column)]
    for name, kind in MATRICES.items():
        column = table.column(name).combine_chunks()
        values, ends = _values(column.values, kind), column.values.offsets.to_numpy()
        columns[name] = [
            None if span is None else values[ends[span[0]] : ends[span[1]]].reshape(span[1] - span[0], -1)
            for span in _spans(column)
        ]
    return [Rollout(**dict(zip(columns, values)), arrived=arrived) for values in zip(*columns.values(), strict=True)]


def _lists(arrays: list[np.ndarray | None], kind: type) -> pa.Array:
    """`large_list`, because a batch may have more values than 32-bit offsets reach."""
    values = np.concatenate([np.empty(0, kind), *(array for array in arrays if array is not None)], dtype=kind)
    missing = pa.array([array is None for array in arrays], type=pa.bool_())
    return pa.LargeListArray.from_arrays(_offsets(arrays), pa.array(values), mask=missing)


def _offsets(arrays: list[np.ndarray | None]) -> np.ndarray:
    return np.cumsum([0, *(0 if array is None else len(array) for array in arrays)], dtype=np.int64)


def _values(column: pa.Array, kind: type) -> np.ndarray:
    return column.values.to_numpy(zero_copy_only=False).astype(kind, copy=False)


def _spans(column: pa.Array) -> list[tuple[int, int] | None]:
    """Where each entry's values begin and end; None for a null."""
    ends = column.offsets.to_numpy().tolist()
    valid = column.is_valid().to_pylist()
    return [(ends[i], ends[i + 1]) if valid[i] else None for i in range(len(column))]
