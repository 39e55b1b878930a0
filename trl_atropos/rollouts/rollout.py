"""A rollout: its tokens and score, its advantage, its staleness, and its columns in an Arrow table.

A rollout is an episode. If the episode branches, `tree.py` says how its parts hang together.

`intake.py` makes rollouts, `spool.py` writes and reads them, and `batches/` trains on them.

Functions import torch themselves, so that the report's page can read rollouts quickly.
"""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from trl_atropos.rollouts.tree import Tree, make_tree

ScaleRewards = Literal["group", "batch", "none"]
ABANDONED = "abandoned"  # in place of the name of a branch that the last resume abandoned
EPSILON = np.float32(1e-4)  # TRL's
ZERO_STD = 1e-8  # `torch.isclose` takes it for zero


@dataclass(slots=True, eq=False)
class Rollout:
    """One rollout of `p` prompt tokens and `c` completion tokens, validated by `intake.py`. The
    *row* of a rollout is its prompt, then its completion, `(p + c,)`."""

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
    newest_version: int | None = None  # newest version that sampled any token of it
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
    rewards: dict[str, float] | None = None  # named parts of the score, for metrics alone
    # The parts of a row that branches; None = each token of the row precedes the next. The prompt
    # is the beginning of the first part, and the completion is all other tokens of the tree.
    tree: Tree | None = None

    @property
    def row(self) -> np.ndarray:
        """Prompt and completion, `(p + c,)` int32."""
        return np.concatenate([self.prompt_ids, self.completion_ids])

    @property
    def longest_path(self) -> int:
        """Tokens of the longest context that the row has, with what was sampled in it: of prompt
        and completion, if it does not branch."""
        if self.tree is None:
            return len(self.prompt_ids) + len(self.completion_ids)
        return int(self.tree.path_lengths.max())

    @property
    def ends_with_call(self) -> np.ndarray:
        """`(parts,)` bool: the parts that end with a sampled token, behind which nothing goes on.
        One part, if the rollout does not branch."""
        if self.tree is None:
            return self.mask[-1:]
        is_sampled = np.concatenate([np.zeros(len(self.prompt_ids), bool), self.mask])
        last = self.tree.begins + self.tree.lengths - 1
        return is_sampled[last] & ~self.tree.continued

    @property
    def last_tokens(self) -> np.ndarray:
        """The tokens at which calls end, and behind which nothing goes on: `(n,)` ids of the ends
        of parts. A rollout that does not branch has one."""
        if self.tree is None:
            return self.completion_ids[-1:]
        last = self.tree.begins + self.tree.lengths - 1
        return self.row[last[self.ends_with_call]]

    @property
    def completion_parts(self) -> list[np.ndarray]:
        """The completion's tokens by parts of the row. The first part is without the prompt, and
        may be empty. One part, if the rollout does not branch."""
        if self.tree is None:
            return [self.completion_ids]
        begins = self.tree.begins[1:] - len(self.prompt_ids)
        return np.split(self.completion_ids, begins)

    @property
    def trains_on_token_advantages(self) -> bool:
        """True if it is trained with the token-level advantages that the environment sent."""
        if self.zero_advantage or self.sft:
            return False
        return self.token_advantages is not None

    def teaches_nothing(self, distils: bool) -> bool:
        """Returns whether its advantage is 0 because the scores of its group are equal, and nothing
        else is learned from it. `distils`: the run learns from the teacher that a rollout may
        bring."""
        if self.group_std > ZERO_STD:
            return False
        if distils and self.distill_ids is not None:
            return False
        if self.zero_advantage:
            return True
        has_other_advantage = self.sft or self.raw_advantage
        return not has_other_advantage and self.token_advantages is None


# --------------------------------------------------------------------------------------- advantages


def group_statistics(scores: Sequence[float]) -> tuple[float, float]:
    """Returns mean and standard deviation (ddof=1; 0.0 for one score) by the float32 operations of
    TRL's `GRPOTrainer._generate_and_score_completions`, so that advantages equal TRL's bit for
    bit."""
    import torch
    from trl.trainer.utils import nanstd

    rewards = torch.tensor([scores], dtype=torch.float32)  # (1, n)
    mean = torch.nanmean(rewards, dim=1).item()
    if len(scores) < 2:
        return mean, 0.0
    return mean, nanstd(rewards, dim=1).item()


def normalised(
    scores: np.ndarray,
    means: np.ndarray,
    stds: np.ndarray | None,
    raw: np.ndarray,
    sft: np.ndarray,
    zero: np.ndarray,
) -> np.ndarray:
    """
    Returns `(n,)` float32: `(score - mean) / (std + 1e-4)`, or `score - mean` without `stds`; the
    score if `raw`, 1 if `sft`, 0 if `zero`.

    On a rollout whose log-probabilities are unknown, so that every ratio is 1, an advantage of 1
    has the gradient of the log-likelihood of its trained tokens at the trainer's temperature,
    averaged as `loss_type` averages.
    """
    scores = scores.astype(np.float32)
    advantages = scores - means.astype(np.float32)
    if stds is not None:
        divisors = stds.astype(np.float32) + EPSILON
        advantages = advantages / divisors
    conditions = [zero, sft, raw]
    replacements = [np.float32(0), np.float32(1), scores]
    return np.select(conditions, replacements, advantages)


def scalar_advantages(rollouts: Sequence[Rollout], scale_rewards: ScaleRewards) -> np.ndarray:
    """Returns one advantage per rollout, `(n,)` float32, bit-equal to TRL's on the same groups:
    `normalised` by the standard deviation of each group (`"group"`), of the scores of all
    `rollouts` (`"batch"`), or not divided (`"none"`). Does not look at `token_advantages`."""
    scores = _values(rollouts, "score", np.float32)
    stds = None
    if scale_rewards == "group":
        stds = _values(rollouts, "group_std", np.float32)
    elif scale_rewards == "batch":
        std = _std(scores)
        stds = np.full(len(rollouts), std, np.float32)
    return normalised(
        scores,
        means=_values(rollouts, "group_mean", np.float32),
        stds=stds,
        raw=_values(rollouts, "raw_advantage", bool),
        sft=_values(rollouts, "sft", bool),
        zero=_values(rollouts, "zero_advantage", bool),
    )


def _values(rollouts: Sequence[Rollout], name: str, dtype: type) -> np.ndarray:
    values = [getattr(rollout, name) for rollout in rollouts]
    return np.array(values, dtype)


def _std(scores: np.ndarray) -> float:
    """Returns the standard deviation of a whole batch, as TRL computes it."""
    import torch
    from trl.trainer.utils import nanstd

    if len(scores) < 2:
        return 0.0
    return nanstd(torch.from_numpy(scores)).item()


# ---------------------------------------------------------------------------------------- staleness


def new_branch(version: int) -> list:
    """Returns the branch of a run that begins or resumes at `version`, see `staleness`."""
    return [uuid.uuid4().hex[:8], version]


def staleness(
    sampled_version: int | None,
    pulled_branches: list[list],
    pulled_version: int,
    run_branches: list[list],
    current_version: int,
) -> int | None:
    """
    Returns the optimizer steps from the version that sampled a rollout to the version that trains
    it, None if `sampled_version` is unknown.

    Versions count optimizer steps. A run that resumes from the checkpoint of version c abandons the
    versions above c and makes others with the same numbers. So a version is a number on a *branch*,
    and a run is the list of its branches, each `[name, version at which it began]`. The steps lead
    back to the last version that both runs have in common, and from there to the current one.

    For example, version 7 of `[["a", 0]]` sampled a rollout. The run resumed from version 4, so its
    branches are `[["a", 0], ["b", 4]]`, and it trains version 6. Back from 7 to 4 are 3 steps,
    forth from 4 to 6 are 2: the staleness is 5.

    Args:
        sampled_version: oldest version that sampled a token of the rollout.
        pulled_branches: branches of the run when it pulled the rollout.
        pulled_version: its version then.
        run_branches: branches of the run now.
        current_version: its version now.
    """
    if sampled_version is None:
        return None
    if sampled_version > pulled_version:
        # A version that the last resume abandoned sampled it.
        _, began = pulled_branches[-1]
        abandoned_branch = [ABANDONED, began]
        pulled_branches = [*pulled_branches[:-1], abandoned_branch]
    common = 0
    for pulled_branch, run_branch in zip(pulled_branches, run_branches):
        if pulled_branch != run_branch:
            break
        common += 1
    shared_version = min(sampled_version, current_version)
    differing = [*pulled_branches[common:], *run_branches[common:]]
    for _, began in differing:
        shared_version = min(shared_version, began)
    back = sampled_version - shared_version
    forth = current_version - shared_version
    return back + forth


# ------------------------------------------------------------------------------------------- tables


# Columns of a spool's files. `from_table` needs them all, so a file without one of them cannot be
# read. Whoever changes them raises `FORMAT` in `spool.py`: then files of other versions are passed
# over with a warning. Lists have 64-bit offsets, because a batch may have more values than 32 bits
# count.
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


# Columns that came later. Files of earlier versions lack them, and earlier versions do not look at
# them: both read each other's files.
PART = pa.struct({"name": pa.large_string(), "value": pa.float64()})
TREE = pa.struct(
    {
        "lengths": pa.large_list(pa.int64()),
        "parents": pa.large_list(pa.int64()),
        "shared": pa.large_list(pa.int64()),
    }
)
LATER_COLUMNS: dict[str, pa.DataType] = {
    "rewards": pa.large_list(PART),
    # Rows with a tree mean something else to earlier versions. `spool.py` keeps these from them.
    "tree": TREE,
}


def to_table(rollouts: Sequence[Rollout]) -> pa.Table:
    """Returns a table of one row per rollout. `arrived` is the column `pulled_at`, in
    microseconds."""
    columns = {name: [] for name in [*COLUMNS, "pulled_at", *LATER_COLUMNS]}
    for rollout in rollouts:
        for name in COLUMNS:
            value = getattr(rollout, name)
            if isinstance(value, np.ndarray) and value.ndim == 2:
                value = list(value)  # as Arrow takes it
            columns[name].append(value)
        columns["pulled_at"].append(int(rollout.arrived * 1e6))
        columns["rewards"].append(_parts(rollout.rewards))
        columns["tree"].append(_tree_fields(rollout.tree))
    pulled_at = pa.timestamp("us", tz="UTC")
    schema = pa.schema(COLUMNS | {"pulled_at": pulled_at} | LATER_COLUMNS)
    return pa.table(columns, schema=schema)


def _parts(rewards: dict[str, float] | None) -> list[dict[str, Any]] | None:
    if rewards is None:
        return None
    return [{"name": name, "value": value} for name, value in rewards.items()]


def _tree_fields(tree: Tree | None) -> dict[str, np.ndarray] | None:
    if tree is None:
        return None
    return {"lengths": tree.lengths, "parents": tree.parents, "shared": tree.shared}


def from_table(table: pa.Table) -> list[Rollout]:
    """Returns the rollouts of a table that `to_table` made, in this version or an earlier one.
    Their arrays are read-only views of the table's memory. Raises `KeyError`, `ValueError`,
    `TypeError` or `pyarrow.ArrowException` if a column is missing or has other values."""
    columns = {}
    for name, kind in COLUMNS.items():
        column = table.column(name).cast(kind)
        if pa.types.is_large_list(kind):
            columns[name] = [_array(entry) for entry in column.combine_chunks()]
        else:
            columns[name] = column.to_pylist()
    pulled_at = table.column("pulled_at").cast(pa.int64())
    columns["arrived"] = [microseconds / 1e6 for microseconds in pulled_at.to_pylist()]
    columns["rewards"] = _rewards(table)
    columns["tree"] = _trees(table)
    rollouts = []
    for values in zip(*columns.values(), strict=True):
        fields = dict(zip(columns, values))
        rollouts.append(Rollout(**fields))
    return rollouts


def _rewards(table: pa.Table) -> list[dict[str, float] | None]:
    if "rewards" not in table.column_names:
        return [None] * len(table)
    column = table.column("rewards").cast(LATER_COLUMNS["rewards"])
    rewards = []
    for parts in column.to_pylist():
        if parts is not None:
            parts = {part["name"]: part["value"] for part in parts}
        rewards.append(parts)
    return rewards


def _trees(table: pa.Table) -> list[Tree | None]:
    if "tree" not in table.column_names:
        return [None] * len(table)
    column = table.column("tree").cast(TREE)
    trees = []
    for fields in column.to_pylist():
        tree = None
        if fields is not None:
            tree = make_tree(fields["lengths"], fields["parents"], fields["shared"])
        trees.append(tree)
    return trees


def _array(entry: pa.LargeListScalar) -> np.ndarray | None:
    if not entry.is_valid:
        return None
    values = entry.values
    if pa.types.is_large_list(values.type):  # as many values for each token
        flat = values.flatten().to_numpy()
        return flat.reshape(len(values), -1)
    return values.to_numpy(zero_copy_only=False)


def end_tokens(generation_config: Any, tokenizer: Any) -> list[int]:
    """Returns the ids that end a completion which was not cut off, as TRL's trainer has them: all
    end tokens of the model, and the tokenizer's end and padding tokens."""
    model_tokens = generation_config.eos_token_id
    if model_tokens is None:
        model_tokens = []
    elif isinstance(model_tokens, int):
        model_tokens = [model_tokens]
    tokens = {*model_tokens, tokenizer.eos_token_id, tokenizer.pad_token_id}
    return sorted(tokens - {None})
