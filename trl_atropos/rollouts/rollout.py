"""What a rollout is: its tokens and score, its advantage, its staleness, and its place in an Arrow
table.

torch is imported only where it is used, so that the report's page can read rollouts quickly.
"""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa

ScaleRewards = Literal["group", "batch", "none"]
ABANDONED = "abandoned"  # stands for the name of a branch that the last resume abandoned
EPSILON = np.float32(1e-4)  # TRL's
ZERO_STD = 1e-8  # what `torch.isclose` calls zero


@dataclass(slots=True, eq=False)
class Rollout:
    """One rollout of `p` prompt tokens and `c` completion tokens, validated by `intake.py`."""

    prompt_ids: np.ndarray  # (p,) int32, p >= 1
    completion_ids: np.ndarray  # (c,) int32, c >= 1; ends at the last trained token
    mask: np.ndarray  # (c,) bool; False = context (tool output, later user turns)
    # (c,) float32 under the policy that sampled; NaN = unknown, and wherever mask is False
    logprobs: np.ndarray
    score: float  # raw reward
    # of the scores of its whole group, computed in float32; 0.0 with `raw_advantage`
    group_mean: float
    group_std: float  # the same, ddof=1; 0.0 for a group of one
    # (c,) float32, final, from the environment; None = normalise the score
    token_advantages: np.ndarray | None
    zero_advantage: bool  # overrides.set_advantage_to_zero, or a group of one under "zero"
    env_id: int | None  # number of the environment at the API
    environment: str | None = None  # its name, where that is known
    policy_version: int | None = None  # oldest version that sampled any token of it; None = unknown
    newest_version: int | None = None  # version at its last sampled token
    # optimizer steps from `policy_version` to the version it trains on
    staleness: int | None = None
    raw_advantage: bool = False  # the advantage is the raw score: a group of one under "raw"
    group: int = -1  # number of its group within the run
    index: int = -1  # its number within the run, in order of arrival; -1 = not in this run's spool
    arrived: float = 0.0  # when its batch was pulled, in seconds since 1970
    sft: bool = False  # the `sft` override: train as supervised, with advantage 1; logprobs are NaN
    # (c, k) int32, the teacher's tokens at each position; -1 = absent
    distill_ids: np.ndarray | None = None
    distill_logprobs: np.ndarray | None = None  # (c, k) float32, NaN = absent
    messages: str | None = None  # JSON of the conversation, for human readers

    @property
    def trains_on_token_advantages(self) -> bool:
        """Whether it is trained with the token-level advantages that the environment sent."""
        return self.token_advantages is not None and not (self.zero_advantage or self.sft)

    def teaches_nothing(self, distils: bool) -> bool:
        """Whether its advantage is 0 because the scores of its group are equal, and nothing else is
        learned from it; `distils` is whether the run learns from the teacher that a rollout may
        bring."""
        if self.group_std > ZERO_STD or (distils and self.distill_ids is not None):
            return False
        has_other_advantage = self.sft or self.raw_advantage or self.token_advantages is not None
        return self.zero_advantage or not has_other_advantage


def group_statistics(scores: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation (ddof=1; 0.0 for one score) with the float32 operations of TRL's
    `GRPOTrainer._generate_and_score_completions`, so that advantages equal TRL's bit for bit."""
    import torch
    from trl.trainer.utils import nanstd

    rewards = torch.tensor([scores], dtype=torch.float32)  # (1, n)
    std = nanstd(rewards, dim=1).item() if len(scores) > 1 else 0.0
    return torch.nanmean(rewards, dim=1).item(), std


def normalised(
    scores: np.ndarray,
    means: np.ndarray,
    stds: np.ndarray | None,
    raw: np.ndarray,
    sft: np.ndarray,
    zero: np.ndarray,
) -> np.ndarray:
    """
    `(n,)` float32: `(score - mean) / (std + 1e-4)`, or `score - mean` without `stds`. Where `raw`,
    the score; where `sft`, 1; where `zero`, 0.

    On a rollout whose log-probabilities are unknown, so that every ratio is 1, an advantage of 1
    has the gradient of the log-likelihood of its trained tokens at the trainer's temperature,
    averaged as `loss_type` averages.
    """
    scores = scores.astype(np.float32)
    means = means.astype(np.float32)
    centred = scores - means
    divided = centred if stds is None else centred / (stds.astype(np.float32) + EPSILON)
    return np.select([zero, sft, raw], [np.float32(0), np.float32(1), scores], divided)


def scalar_advantages(rollouts: Sequence[Rollout], scale_rewards: ScaleRewards) -> np.ndarray:
    """One advantage per rollout, `(n,)` float32, bit-equal to TRL's on the same groups:
    `normalised` by the standard
    deviation of each group (`"group"`), of the scores of all `rollouts` (`"batch"`), or not divided
    (`"none"`). `token_advantages` are not looked at."""

    def values(dtype: type, *names: str) -> list[np.ndarray]:
        return [np.array([getattr(rollout, name) for rollout in rollouts], dtype) for name in names]

    scores, means, stds = values(np.float32, "score", "group_mean", "group_std")
    if scale_rewards == "batch":
        import torch
        from trl.trainer.utils import nanstd

        stds[:] = nanstd(torch.from_numpy(scores)).item() if len(scores) > 1 else 0.0
    raw, sft, zero = values(bool, "raw_advantage", "sft", "zero_advantage")
    return normalised(scores, means, None if scale_rewards == "none" else stds, raw, sft, zero)


def new_branch(version: int) -> list:
    """An entry of a run's path, for a run that begins or resumes at `version`."""
    return [uuid.uuid4().hex[:8], version]


def staleness(
    sampled: int | None, born: list[list], pulled_at: int, path: list[list], now: int
) -> int | None:
    """
    Optimizer steps from the version that sampled a rollout to version `now` of the run on `path`,
    None if that version is unknown.

    Versions count optimizer steps. A run that resumes from the checkpoint of version c abandons the
    versions above c and makes others with the same numbers. So a version is a number on a *branch*,
    and the path of a run is the list of its branches, each `[name, version at which it began]`. The
    steps lead back to the last version that both paths have in common, and from there to `now`.
    `born` is the path of the run that pulled the rollout, at `pulled_at`.
    """
    if sampled is None:
        return None
    if sampled > pulled_at:  # a version that the last resume abandoned sampled it
        born = [*born[:-1], [ABANDONED, born[-1][1]]]
    common = 0
    while common < min(len(born), len(path)) and born[common] == path[common]:
        common += 1
    shared = min([sampled, now, *(began for _, began in (*born[common:], *path[common:]))])
    return (sampled - shared) + (now - shared)


# Lists have 64-bit offsets, because a batch may have more values than 32 bits count.
COLUMNS: dict[str, pa.DataType] = {
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
    "prompt_ids": pa.large_list(pa.int32()),
    "completion_ids": pa.large_list(pa.int32()),
    "mask": pa.large_list(pa.bool_()),
    "logprobs": pa.large_list(pa.float32()),
    "token_advantages": pa.large_list(pa.float32()),
    "distill_ids": pa.large_list(pa.large_list(pa.int32())),
    "distill_logprobs": pa.large_list(pa.large_list(pa.float32())),
}


def to_table(rollouts: Sequence[Rollout]) -> pa.Table:
    """One row per rollout. `arrived` is the column `pulled_at`, in microseconds."""
    columns = {
        name: [_for_arrow(getattr(rollout, name)) for rollout in rollouts] for name in COLUMNS
    }
    columns["pulled_at"] = [int(rollout.arrived * 1e6) for rollout in rollouts]
    return pa.table(
        columns, schema=pa.schema(COLUMNS | {"pulled_at": pa.timestamp("us", tz="UTC")})
    )


def _for_arrow(value: Any) -> Any:
    return list(value) if isinstance(value, np.ndarray) and value.ndim == 2 else value


def from_table(table: pa.Table) -> list[Rollout]:
    """The rollouts of a table that `to_table` made. Their arrays are read-only views of the table's
    memory. Raises `KeyError`, `ValueError`, `TypeError` or `pyarrow.ArrowException` if a column is
    missing or has other values."""
    columns: dict[str, list] = {}
    for name, kind in COLUMNS.items():
        column = table.column(name).cast(kind)
        is_list = pa.types.is_large_list(kind)
        columns[name] = (
            [_array(entry) for entry in column.combine_chunks()] if is_list else column.to_pylist()
        )
    columns["arrived"] = [
        time / 1e6 for time in table.column("pulled_at").cast(pa.int64()).to_pylist()
    ]
    return [Rollout(**dict(zip(columns, values))) for values in zip(*columns.values(), strict=True)]


def _array(entry: pa.LargeListScalar) -> np.ndarray | None:
    if not entry.is_valid:
        return None
    values = entry.values
    if pa.types.is_large_list(values.type):  # as many values for each token
        return values.flatten().to_numpy().reshape(len(values), -1)
    return values.to_numpy(zero_copy_only=False)


def end_tokens(generation_config: Any, tokenizer: Any) -> list[int]:
    """Returns the ids that end a completion which was not cut off, as TRL's trainer has them: all
    end tokens of the model, and the tokenizer's end and padding tokens."""
    of_model = generation_config.eos_token_id
    if of_model is None:
        of_model = []
    elif isinstance(of_model, int):
        of_model = [of_model]
    ids = [*of_model, tokenizer.eos_token_id, tokenizer.pad_token_id]
    return sorted({token for token in ids if token is not None})
