"""Computes the inputs of TRL's loss from a generation batch: columns, advantages, the correction
for the sampler, and a teacher's top-k log-probabilities.

TRL derives groups from positions in the batch, all of one size. Here every rollout carries the mean
and standard deviation of its own group, so groups may differ in size and may be split between
ranks. `GenerationBatch` calls these functions.
"""

import math
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn import Module

from trl_atropos.batches.micro_batches import Batch
from trl_atropos.batches.packing import Layout
from trl_atropos.rollouts.rollout import ZERO_STD, Rollout, ScaleRewards, scalar_advantages

if TYPE_CHECKING:
    from trl_atropos.config import AtroposGRPOConfig

ABSENT = -1e9  # as good as -inf for a softmax, but differences between two of them are finite


def columns(rollouts: Sequence[Rollout]) -> dict[str, list]:
    """Returns the columns that TRL's `rollout_func` hook takes; `env_mask` is TRL's tool mask.

    TRL makes a tensor of each array in the array's own type, but of `logprobs` it makes lists
    first. `array` gives plain numbers for those. NumPy would give scalars, which take several times
    as long."""
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
) -> Tensor:
    """
    Returns the advantages of this rank's rollouts, `local_slice` of `rollouts`, in the form that
    TRL's loss takes.

    Returns:
        `(n_local,)` float32, or `(n_local, completion_length)` float32 if any of `rollouts`, on
        whatever rank, has token-level advantages: those unchanged, the others' advantage at each of
        their tokens, 0.0 on padding.
    """
    advantages = scalar_advantages(rollouts, scale_rewards)[local_slice]
    if all(rollout.token_advantages is None for rollout in rollouts):
        return torch.from_numpy(advantages)
    local = rollouts[local_slice]
    per_token = np.zeros((len(local), completion_length), dtype=np.float32)
    for row, rollout, advantage in zip(per_token, local, advantages):
        length = len(rollout.completion_ids)
        if rollout.trains_on_token_advantages:
            row[:length] = rollout.token_advantages
        else:
            row[:length] = advantage
    return torch.from_numpy(per_token)


def logged_advantages(rollouts: Sequence[Rollout], scale_rewards: ScaleRewards) -> list[float]:
    """Returns one number per rollout for the completions table: the mean advantage of its trained
    tokens."""
    advantages = scalar_advantages(rollouts, scale_rewards).tolist()
    for index, rollout in enumerate(rollouts):
        if rollout.trains_on_token_advantages:
            trained = rollout.token_advantages[rollout.mask]
            mean = trained.mean(dtype=np.float64)
            advantages[index] = float(mean)
    return advantages


def share_zero_variance(rollouts: Sequence[Rollout]) -> float:
    """Returns the share of `rollouts` (at least one) in groups whose scores are all equal:
    `frac_reward_zero_std`."""
    is_zero = [rollout.group_std <= ZERO_STD for rollout in rollouts]
    share = np.mean(is_zero, dtype=np.float32)
    return share.item()


def importance_ratio(logprobs: Tensor, batch: Batch, args: "AtroposGRPOConfig") -> Tensor:
    """
    Returns by how much likelier the policy makes each trained token, or each rollout, than its
    sampler did, within the bounds of `args`: the formula of TRL's
    `_generate_and_score_completions`.

    Args:
        logprobs: `(B, C)`, the policy's, in nats, without gradients.
        batch: `(B, C)` tensors `completion_mask`, `tool_mask`, and `sampling_per_token_logps`, NaN
            if not known.

    Returns:
        `(B, C)`, or `(B, 1)` for a mode of sequences; 1 if nothing is known or trained.

    Raises:
        ValueError: The mode of `args` is not known.
    """
    mode = args.vllm_importance_sampling_mode
    level, _, bound = mode.partition("_")
    if level not in ("token", "sequence") or bound not in ("truncate", "mask"):
        raise ValueError(
            f"`vllm_importance_sampling_mode` is {mode!r}: set it to one of token_truncate, "
            "token_mask, sequence_truncate, sequence_mask."
        )
    mask = batch["completion_mask"] * batch["tool_mask"]
    log_ratio = logprobs - batch["sampling_per_token_logps"]
    log_ratio = log_ratio * mask
    log_ratio = log_ratio.nan_to_num(nan=0.0)
    if level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True)
    low = args.vllm_importance_sampling_clip_min
    if low is None:
        low = -math.inf
    high = args.vllm_importance_sampling_clip_max
    if high is None:
        high = math.inf
    ratio = log_ratio.exp()
    if bound == "truncate":
        return ratio.clamp(low, high)
    is_outside = (ratio < low) | (ratio > high)  # `bound` is "mask"
    return ratio.masked_fill(is_outside, 0.0)


# ------------------------------------------------------------------------------------- distillation


def distillation_inputs(
    rollouts: Sequence[Rollout], local_slice: slice, output: Batch, accelerator: Accelerator
) -> Batch:
    """
    Returns the teacher's distributions for this rank's rollouts, `local_slice` of `rollouts`; empty
    if no rollout of any rank has one. `output` has this rank's `(B, C)` tensors `completion_mask`
    and `tool_mask`.

    Returns:
        `distill_ids`, `(B, C, k)` int64, -1 if absent; `distill_logprobs`, `(B, C, k)` float32, NaN
        if absent; and `num_distilled_tokens`, `()` int64: of all ranks. Entry `i` is about
        completion token `i`.
    """
    most = 0  # k of any rank
    for rollout in rollouts:
        if rollout.distill_ids is not None:
            most = max(most, rollout.distill_ids.shape[1])
    if not most:
        return {}
    shape = (*output["completion_mask"].shape, most)
    ids = torch.full(shape, -1)
    logprobs = torch.full(shape, torch.nan)
    for i, rollout in enumerate(rollouts[local_slice]):
        if rollout.distill_ids is not None:
            length, k = rollout.distill_ids.shape
            place = (i, slice(length), slice(k))
            ids[place] = torch.tensor(rollout.distill_ids)
            logprobs[place] = torch.tensor(rollout.distill_logprobs)
    device = accelerator.device
    inputs = {"distill_ids": ids.to(device), "distill_logprobs": logprobs.to(device)}
    count = distilled_tokens(output | inputs).sum()
    inputs["num_distilled_tokens"] = accelerator.gather(count).sum()
    return inputs


def distilled_tokens(inputs: Batch) -> Tensor:
    """Returns `(B, C)` bool: the trained tokens for which there is a teacher's distribution."""
    trained = inputs["completion_mask"] * inputs["tool_mask"]
    has_teacher = (inputs["distill_ids"] >= 0).any(-1)
    return trained.bool() & has_teacher


def top_k_divergence(logits: Tensor, ids: Tensor, logprobs: Tensor) -> Tensor:
    """
    Returns KL(teacher || student) over the teacher's top-k tokens, both renormalised over them; 0
    if there are none.

    Args:
        logits: `(..., k)`, the student's logits of these tokens, at temperature 1.
        ids: `(..., k)`, -1 if absent.
        logprobs: `(..., k)` float32, the teacher's; anything if absent.

    Returns:
        `(...)` float32, in nats (units of the natural logarithm).
    """
    is_present = ids >= 0
    student = logits.float().where(is_present, ABSENT)
    student = student.log_softmax(-1)
    teacher = logprobs.where(is_present, ABSENT)
    teacher = teacher.log_softmax(-1)
    divergences = teacher.exp() * (teacher - student)
    return divergences.sum(-1)


def distillation_loss(
    model: Module,
    inputs: Batch,
    layout: Layout,
    accelerator: Accelerator,
    micro_batches: int,
    of_step: int,
) -> tuple[Tensor, float]:
    """
    Returns the distillation term of one micro-batch. It costs one forward of `model` with the
    logits of all completion tokens.

    Args:
        inputs: a micro-batch, with the tensors of `distillation_inputs`.
        layout: of the rows that the model computes, as for TRL's loss.
        micro_batches: number of them in the generation batch; `of_step`: in an optimizer step.

    Returns:
        `()`, the loss: its gradients, summed over an optimizer step's micro-batches and averaged
        over ranks, are those of the mean over all distilled tokens, as TRL has it for `dapo`. And a
        number that is the same on all ranks: the mean of it over the micro-batches is that mean, in
        nats.
    """
    tokens = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    rows = tokens.flatten()[layout.tokens]  # (R, T)
    predicts = layout.predicts  # (N,)
    completion_places = layout.columns  # (N,)
    group = layout.sequence_group
    if group is not None:  # this rank computes a slice of the row, and what is predicted in it
        rows = group.own(rows)
        is_own = predicts // rows.size(1) == group.index
        predicts = predicts[is_own] % rows.size(1)
        completion_places = completion_places[is_own]
    width = rows.size(1)
    # The logits of only those columns are made in which any row has something to predict. Two rows
    # of 4 tokens that predict at 1, 2 and 5 have `columns` 1, 2 and the `number`s 0, 1, 0.
    column = predicts % width
    columns, number = column.unique(return_inverse=True)
    row = predicts // width
    with accelerator.autocast():
        output = model(input_ids=rows, **layout.inputs, logits_to_keep=columns, use_cache=False)

    # Without any of the teacher's tokens, both sides have the same distribution, and no divergence.
    is_distilled = distilled_tokens(inputs)[..., None]
    ids = inputs["distill_ids"].where(is_distilled, -1)
    ids = ids.flatten(0, 1)[completion_places]  # (N, k)
    logprobs = inputs["distill_logprobs"].flatten(0, 1)[completion_places]
    # Of the logits, (R, len(columns), V), only those of the teacher's tokens. One place may predict
    # a token of several rollouts that share what is before it.
    student = output.logits[row[:, None], number[:, None], ids.clamp(min=0)]
    divergences = top_k_divergence(student, ids, logprobs)
    total = divergences.sum()
    if group is not None:
        total = group.joined(total[None, None]).sum()
    per_micro_batch = inputs["num_distilled_tokens"].clamp(min=1) / micro_batches
    divergence = accelerator.reduce(total.detach()) / per_micro_batch
    per_step = per_micro_batch * of_step
    loss = total * accelerator.num_processes / per_step
    return loss, divergence.item()
