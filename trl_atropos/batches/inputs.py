"""What TRL's loss takes of a generation batch: columns, advantages, the correction for the sampler,
and a teacher's top-k log-probabilities.

TRL derives groups from positions in the batch, all of one size. Here every rollout carries the mean
and standard deviation of its own group, so groups may differ in size and may be split between
ranks.
"""

import math
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from accelerate import Accelerator

from trl_atropos.batches.micro_batches import Batch
from trl_atropos.batches.packing import Layout
from trl_atropos.rollouts.rollout import ZERO_STD, Rollout, ScaleRewards, scalar_advantages

if TYPE_CHECKING:
    from trl_atropos.config import AtroposGRPOConfig

ABSENT = -1e9  # as good as -inf for a softmax, but differences between two of them are finite


def columns(rollouts: Sequence[Rollout]) -> dict[str, list]:
    """What TRL's `rollout_func` hook takes; `env_mask` is TRL's tool mask.

    TRL makes a tensor of each array in the array's own type, but of `logprobs` it makes lists
    first. `array` gives plain numbers for those, where NumPy would give scalars, which take several
    times as long."""
    return {
        "prompt_ids": [rollout.prompt_ids.astype(np.int64) for rollout in rollouts],
        "completion_ids": [rollout.completion_ids.astype(np.int64) for rollout in rollouts],
        "logprobs": [array("f", rollout.logprobs.tobytes()) for rollout in rollouts],
        "env_mask": [rollout.mask.astype(np.int64) for rollout in rollouts],
        "score": [rollout.score for rollout in rollouts],
    }


def advantage_tensor(
    rollouts: Sequence[Rollout],
    local_slice: slice,
    scale_rewards: ScaleRewards,
    completion_length: int,
) -> torch.Tensor:
    """
    The advantages of this rank's rollouts, `local_slice` of `rollouts`, in the form that TRL's loss
    takes.

    Returns:
        `(n_local,)` float32, or `(n_local, completion_length)` float32 if any of `rollouts`, on
        whatever rank, has token-level advantages: those unchanged, the others' advantage at each of
        their tokens, 0.0 on padding.
    """
    advantages = scalar_advantages(rollouts, scale_rewards)[local_slice]
    if any(rollout.token_advantages is not None for rollout in rollouts):
        per_token = np.zeros((len(advantages), completion_length), dtype=np.float32)
        for filled, rollout, advantage in zip(per_token, rollouts[local_slice], advantages):
            own = rollout.token_advantages if rollout.trains_on_token_advantages else advantage
            filled[: len(rollout.completion_ids)] = own
        advantages = per_token
    return torch.from_numpy(advantages)


def logged_advantages(rollouts: Sequence[Rollout], scale_rewards: ScaleRewards) -> list[float]:
    """One number per rollout for the completions table: the mean advantage of its trained
    tokens."""
    scalars = scalar_advantages(rollouts, scale_rewards).tolist()
    return [
        float(each.token_advantages[each.mask].mean(dtype=np.float64))
        if each.trains_on_token_advantages
        else scalar
        for each, scalar in zip(rollouts, scalars, strict=True)
    ]


def share_zero_variance(rollouts: Sequence[Rollout]) -> float:
    """The share of `rollouts` (at least one) in groups whose scores are all equal:
    `frac_reward_zero_std`."""
    return np.mean([rollout.group_std <= ZERO_STD for rollout in rollouts], dtype=np.float32).item()


def importance_ratio(
    logprobs: torch.Tensor, batch: Batch, args: "AtroposGRPOConfig"
) -> torch.Tensor:
    """
    By how much likelier the policy makes each trained token, or each rollout, than its sampler did,
    within the bounds that `args` has for it: the formula of TRL's
    `_generate_and_score_completions`.

    Args:
        logprobs: `(B, C)`, the policy's, in nats, without gradients.
        batch: `(B, C)` tensors `completion_mask`, `tool_mask`, and `sampling_per_token_logps`, NaN
        where not known.

    Returns:
        `(B, C)`, or `(B, 1)` for a mode of sequences; 1 where nothing is known or trained.
    """
    mask = batch["completion_mask"] * batch["tool_mask"]
    log_ratio = ((logprobs - batch["sampling_per_token_logps"]) * mask).nan_to_num(nan=0.0)
    if args.vllm_importance_sampling_mode.startswith("sequence"):
        log_ratio = log_ratio.sum(-1, keepdim=True)
    low = args.vllm_importance_sampling_clip_min
    high = args.vllm_importance_sampling_clip_max
    low = -math.inf if low is None else low
    high = math.inf if high is None else high
    ratio = log_ratio.exp()
    if args.vllm_importance_sampling_mode.endswith("truncate"):
        return ratio.clamp(low, high)
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


def distillation_inputs(
    rollouts: Sequence[Rollout], local_slice: slice, output: Batch, accelerator: Accelerator
) -> Batch:
    """
    The teacher's distributions for this rank's rollouts, `local_slice` of `rollouts`; empty if no
    rollout of any rank has one. `output` has this rank's `(B, C)` tensors `completion_mask` and
    `tool_mask`.

    Returns:
        `distill_ids`, `(B, C, k)` int64, -1 where absent; `distill_logprobs`, `(B, C, k)` float32,
        NaN where absent; and `num_distilled_tokens`, `()` int64: of all ranks. Entry `i` is about
        completion token `i`.
    """
    width = max(
        (each.distill_ids.shape[1] for each in rollouts if each.distill_ids is not None), default=0
    )
    if not width:
        return {}
    shape = (*output["completion_mask"].shape, width)
    ids = torch.full(shape, -1)
    logprobs = torch.full(shape, torch.nan)
    for i, rollout in enumerate(rollouts[local_slice]):
        if rollout.distill_ids is not None:
            length, k = rollout.distill_ids.shape
            ids[i, :length, :k] = torch.tensor(rollout.distill_ids)
            logprobs[i, :length, :k] = torch.tensor(rollout.distill_logprobs)
    added = {
        "distill_ids": ids.to(accelerator.device),
        "distill_logprobs": logprobs.to(accelerator.device),
    }
    count = distilled_tokens(output | added).sum()
    return added | {"num_distilled_tokens": accelerator.gather(count).sum()}


def distilled_tokens(inputs: Batch) -> torch.Tensor:
    """`(B, C)` bool: the trained tokens for which there is a teacher's distribution."""
    trained = inputs["completion_mask"] * inputs["tool_mask"]
    return trained.bool() & (inputs["distill_ids"] >= 0).any(-1)


def top_k_divergence(
    logits: torch.Tensor, ids: torch.Tensor, logprobs: torch.Tensor
) -> torch.Tensor:
    """
    KL(teacher || student) over the teacher's top-k tokens, both renormalised over them; 0 where
    there are none.

    Args:
        logits: `(..., V)`, the student's, at temperature 1.
        ids: `(..., k)`, -1 where absent.
        logprobs: `(..., k)` float32, the teacher's; anything where absent.

    Returns:
        `(...)` float32, in nats (units of the natural logarithm).
    """
    student = logits.gather(-1, ids.clamp(min=0)).float().where(ids >= 0, ABSENT).log_softmax(-1)
    teacher = logprobs.where(ids >= 0, ABSENT).log_softmax(-1)
    return (teacher.exp() * (teacher - student)).sum(-1)


def distillation_loss(
    model: torch.nn.Module,
    inputs: Batch,
    layout: Layout,
    accelerator: Accelerator,
    micro_batches: int,
    of_step: int,
) -> tuple[torch.Tensor, float]:
    """
    The distillation term of one micro-batch. It costs one forward of `model` with the logits of all
    completion tokens.

    Args:
        inputs: a micro-batch, with what `distillation_inputs` added.
        layout: of the rows that the model computes, as for TRL's loss.
        micro_batches: number of them in the generation batch; `of_step`: in an optimizer step.

    Returns:
        `()`, the loss: its gradients, summed over an optimizer step's micro-batches and averaged
        over ranks, are those of the mean over all distilled tokens, as TRL has it for `dapo`. And a
        number that is the same on all ranks: the mean of it over the micro-batches is that mean, in
        nats.
    """
    tokens = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1).flatten()
    rows = tokens[layout.tokens]
    # The logits of only those columns are made in which any row has something to predict.
    columns, column = (layout.predicts % rows.size(1)).unique(return_inverse=True)
    places = layout.predicts // rows.size(1) * len(columns) + column
    with accelerator.autocast():
        logits = model(
            input_ids=rows, **layout.inputs, logits_to_keep=columns, use_cache=False
        ).logits

    def placed(values: torch.Tensor) -> torch.Tensor:
        """(B, C, k) to (R, len(columns), k), where the logits predict; -1 where they predict
        nothing."""
        flat = values.new_full((len(rows) * len(columns), values.size(-1)), -1)
        flat = flat.index_copy(0, places, values.flatten(0, 1)[layout.columns])
        return flat.view(len(rows), len(columns), -1)

    ids = inputs["distill_ids"].where(distilled_tokens(inputs)[..., None], -1)
    # Without any of the teacher's tokens, both sides have the same distribution, and no divergence.
    total = top_k_divergence(logits, placed(ids), placed(inputs["distill_logprobs"])).sum()
    of_micro_batch = inputs["num_distilled_tokens"].clamp(min=1) / micro_batches
    divergence = accelerator.reduce(total.detach()) / of_micro_batch
    return total * accelerator.num_processes / (of_micro_batch * of_step), divergence.item()
