"""Rows as an Arrow table and back: the one place that knows how a `Row` looks on disk.

`spool.py` writes and reads these. A table has one row per sequence and plain types, so that `datasets`, pandas or
anything else that reads Arrow can read it.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from trl_atropos.rollouts.schema import Row

SCALARS = {
    "index": pa.int64(),
    "group": pa.int64(),
    "env_id": pa.int64(),
    "environment": pa.large_string(),
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
    "prompt_ids": np.dtype(np.int32),
    "completion_ids": np.dtype(np.int32),
    "mask": np.dtype(np.bool_),
    "logprobs": np.dtype(np.float32),
    "token_advantages": np.dtype(np.float32),
}
ADDED = ("environment",)  # columns that the files of earlier versions lack
MATRICES = {  # k values per token, k the same within a row
    "distill_ids": np.dtype(np.int32),
    "distill_logprobs": np.dtype(np.float32),
}
PULLED_AT = pa.timestamp("us", tz="UTC")  # wall-clock time, for human readers only


def encode(rows: Sequence[Row], pulled_at: float) -> pa.Table:
    """
    A table of `rows`, without a copy per token in Python. Optional fields that a row lacks are null.

    Args:
        pulled_at: seconds since 1970, for the column of that name.
    """
    columns: dict[str, pa.Array] = {
        name: pa.array([getattr(row, name) for row in rows], type=kind) for name, kind in SCALARS.items()
    }
    columns |= {name: _lists([getattr(row, name) for row in rows], kind) for name, kind in VECTORS.items()}
    columns |= {name: _nested([getattr(row, name) for row in rows], kind) for name, kind in MATRICES.items()}
    columns["pulled_at"] = pa.array([int(pulled_at * 1e6)] * len(rows), type=PULLED_AT)
    return pa.table(columns)


def decode(table: pa.Table, arrived: float) -> list[Row]:
    """
    The rows of a table that `encode` made. Their arrays are views of the table's memory, and read-only.

    Args:
        arrived: what goes into `Row.arrived`.

    Raises:
        KeyError, ValueError, pyarrow.ArrowException: a column is missing or has other values.
    """
    table = table.combine_chunks()
    absent = {name: [None] * len(table) for name in ADDED if name not in table.column_names}
    columns = {name: absent[name] if name in absent else table.column(name).to_pylist() for name in SCALARS}
    columns |= {name: _arrays(_chunk(table, name), kind) for name, kind in VECTORS.items()}
    columns |= {name: _matrices(_chunk(table, name), kind) for name, kind in MATRICES.items()}
    names = list(columns)
    return [Row(**dict(zip(names, values)), arrived=arrived) for values in zip(*columns.values(), strict=True)]


def _chunk(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name)
    return column.chunk(0) if column.num_chunks else pa.array([], type=column.type)


def _lists(arrays: list[np.ndarray | None], kind: np.dtype) -> pa.Array:
    """`large_list`, because a batch may have more values than 32-bit offsets reach."""
    present = [array for array in arrays if array is not None]
    values = np.concatenate(present, dtype=kind) if present else np.empty(0, kind)
    return pa.LargeListArray.from_arrays(_offsets(arrays), pa.array(values), mask=_missing(arrays))


def _nested(matrices: list[np.ndarray | None], kind: np.dtype) -> pa.Array:
    present = [matrix for matrix in matrices if matrix is not None]
    values = np.concatenate([matrix.ravel() for matrix in present], dtype=kind) if present else np.empty(0, kind)
    widths = np.concatenate([np.full(len(m), m.shape[1]) for m in present]) if present else np.empty(0, np.int64)
    inner = pa.LargeListArray.from_arrays(np.concatenate([[0], np.cumsum(widths, dtype=np.int64)]), pa.array(values))
    return pa.LargeListArray.from_arrays(_offsets(matrices), inner, mask=_missing(matrices))


def _offsets(arrays: list[np.ndarray | None]) -> np.ndarray:
    return np.cumsum([0, *(0 if array is None else len(array) for array in arrays)], dtype=np.int64)


def _missing(arrays: list[np.ndarray | None]) -> pa.Array:
    return pa.array([array is None for array in arrays], type=pa.bool_())


def _arrays(column: pa.Array, kind: np.dtype) -> list[np.ndarray | None]:
    values = column.values.to_numpy(zero_copy_only=False).astype(kind, copy=False)
    return [None if span is None else values[slice(*span)] for span in _spans(column)]


def _matrices(column: pa.Array, kind: np.dtype) -> list[np.ndarray | None]:
    inner = column.values
    values = inner.values.to_numpy(zero_copy_only=False).astype(kind, copy=False)
    ends = inner.offsets.to_numpy()
    return [
        None if span is None else values[ends[span[0]] : ends[span[1]]].reshape(span[1] - span[0], -1)
        for span in _spans(column)
    ]


def _spans(column: pa.Array) -> list[tuple[int, int] | None]:
    """Where each entry's values begin and end; None for a null."""
    ends = column.offsets.to_numpy()
    valid = column.is_valid().to_pylist()
    return [(int(ends[i]), int(ends[i + 1])) if valid[i] else None for i in range(len(column))]
