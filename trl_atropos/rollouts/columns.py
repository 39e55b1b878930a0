"""Rows in, columns out: what TRL's `rollout_func` hook takes, for `AtroposGRPOTrainer` and `trl-atropos bench ingest`.

TRL makes a tensor of every entry with `torch.tensor`, which takes a NumPy array as it is, in its own type, and goes
through a list number by number. So ids and masks are arrays of the type that the tensors are to have. Of the entries
of `logprobs`, TRL makes lists first: Python's own arrays give it plain numbers for that as it asks for them, NumPy's
would give scalars, which take several times as long.
"""

from array import array
from collections.abc import Sequence

import numpy as np

from trl_atropos.rollouts.schema import Row


def columns(rows: Sequence[Row]) -> dict[str, list]:
    """`prompt_ids`, `completion_ids` and `env_mask` (TRL's tool mask), int64 arrays; `logprobs`, `array`s; `score`."""
    return {
        "prompt_ids": [row.prompt_ids.astype(np.int64) for row in rows],
        "completion_ids": [row.completion_ids.astype(np.int64) for row in rows],
        "logprobs": [array("f", row.logprobs.tobytes()) for row in rows],
        "env_mask": [row.mask.astype(np.int64) for row in rows],
        "score": [row.score for row in rows],
    }
