"""What TRL gets of rollouts: columns, and advantages over the groups that the environments really sent.

TRL derives groups from their position in the batch, all of one size. Here every rollout carries the mean and standard
deviation of its own group, so groups may differ in size and may be split between ranks. The trainer calls these on the
rollouts of all ranks and slices its own part. torch is imported where it is used: the report's page, which calls
`normalised`, takes longer to import it than to read a run.
"""

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from trl_atropos.rollouts.row import Rollout

if TYPE_CHECKING:
    import torch

ScaleRewards = Literal["group", "batch", "none"]
EPSILON = np.float32(1e-4)  # TRL's
ZERO_STD = 1e-8  # what `torch.isclose` calls zero


def columns(rollouts: Sequence[Rollout]) -> dict[str, list]:
    """
    What TRL's `rollout_func` hook takes: `prompt_ids`, `completion_ids` and `env_mask` (TRL's tool mask), int64
    arrays; `logprobs`, `array`s; `score`.

    TRL makes a tensor of every array in the array's own type. Of `logprobs` it makes lists first: `array` gives it
    plain numbers for that, where NumPy would give scalars, which take several times as long.
    """
    return {
        "prompt_ids": [one.prompt_ids.astype(np.int64) for one in rollouts],
        "completion_ids": [one.completion_ids.astype(np.int64) for one in rollouts],
        "logprobs": [array("f", one.logprobs.tobytes()) for one in rollouts],
        "env_mask": [one.mask.astype(np.int64) for one in rollouts],
        "score": [one.score for one in rollouts],
    }


def group_statistics(scores: Sequence[float]) -> tuple[float, float]:
    """
    Mean and standard deviation (ddof=1; 0.0 for one score) with the float32 operations of TRL's
    `GRPOTrainer._generate_and_score_completions`, so that advantages equal TRL's bit for bit.
    """
    import torch
    from trl.trainer.utils import nanstd

    rewards = torch.tensor([scores], dtype=torch.float32)  # (1, n)
    std = nanstd(rewards, dim=1).item() if len(scores) > 1 else 0.0
    return torch.nanmean(rewards, dim=1).item(), std


def normalised(
    scores: np.ndarray, means: np.ndarray, stds: np.ndarray | None, raw: np.ndarray, sft: np.ndarray, zero: np.ndarray
) -> np.ndarray:
    """
    `(n,)` float32: `(score - mean) / (std + 1e-4)`, and without `stds` not divided. Where `raw`, the score; where
    `sft`, 1; where `zero`, 0.

    An advantage of 1 on a rollout whose log-probabilities are unknown, so that every ratio is 1, has the gradient of
    the log-likelihood of its trained tokens at the trainer's temperature, averaged as `loss_type` averages. (With
    several `num_iterations`, the ratio to the first one is clipped here as elsewhere.)
    """
    scores, means = scores.astype(np.float32), means.astype(np.float32)
    centred = scores - means
    found = centred if stds is None else centred / (stds.astype(np.float32) + EPSILON)
    return np.select([zero, sft, raw], [np.float32(0), np.float32(1), scores], found)


def scalar_advantages(rollouts: Sequence[Rollout], scale_rewards: ScaleRewards) -> np.ndarray:
    """
    One advantage per rollout, `(n,)` float32, bit-equal to TRL's on the same groups: `normalised` by the standard
    deviation of each group (`"group"`), of the scores of all `rollouts` (`"batch"`), or not divided (`"none"`), as in
    `GRPOTrainer._generate_and_score_completions` of TRL 1.16. `token_advantages` are not looked at.
    """
    scores, means, stds = (
        np.array([getattr(one, name) for one in rollouts], dtype=np.float32)
        for name in ("score", "group_mean", "group_std")
    )
    raw, sft, zero = (
        np.array([getattr(one, name) for one in rollouts], dtype=bool)
        for name in ("raw_advantage", "sft", "zero_advantage")
    )
    if scale_rewards == "batch" and len(rollouts) > 1:
        import torch
        from trl.trainer.utils import nanstd

        stds = np.full_like(stds, nanstd(torch.from_numpy(scores)).item())
    elif scale_rewards == "batch":
        stds = np.zeros_like(stds)
    return normalised(scores, means, None if scale_rewards == "none" else stds, raw, sft, zero)


def brings_advantages(rollout: Rollout) -> bool:
    """Whether the rollout is trained with the environment's own token-level advantages."""
    return rollout.token_advantages is not None and not (rollout.zero_advantage or rollout.sft)


def teaches_nothing(rollout: Rollout, distils: bool) -> bool:
    """
    Whether the advantage is 0 because the scores of the group are alike, and nothing else is learned from it.

    Args:
        distils: whether a teacher that the rollout brings is learned from.
    """
    if rollout.group_std > ZERO_STD or (distils and rollout.distill_ids is not None):
        return False
    own = rollout.sft or rollout.raw_advantage or rollout.token_advantages is not None
    return rollout.zero_advantage or not own


def advantage_tensor(
    rollouts: Sequence[Rollout], local_slice: slice, scale_rewards: ScaleRewards, completion_length: int
) -> "torch.Tensor":
    """
    The advantages of one rank's rollouts, in the form that TRL's loss takes.

    Args:
        rollouts: those of all ranks, so that every rank decides alike between the two forms.
        local_slice: which of them are this rank's.
        scale_rewards: see `scalar_advantages`.
        completion_length: to how many tokens this rank's completions are right-padded.

    Returns:
        `(n_local,)` float32, or `(n_local, completion_length)` float32 if any of `rollouts` brought token-level
        advantages: those as they came, the other rollouts' advantage on all their tokens, 0.0 on padding.
    """
    import torch

    advantages = scalar_advantages(rollouts, scale_rewards)[local_slice]
    if any(one.token_advantages is not None for one in rollouts):
        per_token = np.zeros((len(advantages), completion_length), dtype=np.float32)
        for filled, one, advantage in zip(per_token, rollouts[local_slice], advantages):
            filled[: len(one.completion_ids)] = one.token_advantages if brings_advantages(one) else advantage
        advantages = per_token
    return torch.from_numpy(advantages)


def logged_advantages(rollouts: Sequence[Rollout], scale_rewards: ScaleRewards) -> list[float]:
    """One number per rollout for the completions table: the mean over the trained tokens of what trains it."""
    return [
        float(one.token_advantages[one.mask].mean(dtype=np.float64)) if brings_advantages(one) else scalar
        for one, scalar in zip(rollouts, scalar_advantages(rollouts, scale_rewards).tolist(), strict=True)
    ]


def share_zero_variance(rollouts: Sequence[Rollout]) -> float:
    """The share of `rollouts` (at least one) whose group's scores are all alike: `frac_reward_zero_std`."""
    return np.mean([one.group_std <= ZERO_STD for one in rollouts], dtype=np.float32).item()
