"""Distillation from a teacher's top-k log-probabilities, which an environment may send with its rollouts.

The trainer adds `distillation_inputs` to a generation batch, TRL shuffles and splits them with the rest, and the
trainer's `compute_loss` adds `distillation_loss` to the loss of every micro-batch.
"""

from collections.abc import Sequence

import torch
from accelerate import Accelerator

from trl_atropos.rollouts.row import Row

ABSENT = -1e9  # a logit that no other one notices, and of which differences are finite


def distillation_tensors(rows: Sequence[Row], local_slice: slice, completion_length: int) -> dict[str, torch.Tensor]:
    """
    The teacher's distributions for one rank's rows; empty if no row of any rank has one, so that all ranks agree.

    Args:
        rows: the rows of all ranks.
        local_slice: which of `rows` are this rank's.
        completion_length: to how many tokens this rank's completions are right-padded.

    Returns:
        `distill_ids`, `(n_local, completion_length, k)` int64, -1 where absent, and `distill_logprobs`, float32 of the
        same shape, NaN there. Entry `i` is the teacher's distribution of completion token `i`.
    """
    width = max((row.distill_ids.shape[1] for row in rows if row.distill_ids is not None), default=0)
    if not width:
        return {}
    local = rows[local_slice]
    ids = torch.full((len(local), completion_length, width), -1)
    logprobs = torch.full((len(local), completion_length, width), torch.nan)
    for i, row in enumerate(local):
        if row.distill_ids is not None:
            length, k = row.distill_ids.shape
            ids[i, :length, :k] = torch.tensor(row.distill_ids)
            logprobs[i, :length, :k] = torch.tensor(row.distill_logprobs)
    return {"distill_ids": ids, "distill_logprobs": logprobs}


def distillation_inputs(
    rows: Sequence[Row], local_slice: slice, output: dict[str, torch.Tensor], accelerator: Accelerator
) -> dict[str, torch.Tensor]:
    """`distillation_tensors` on the device, and `num_distilled_tokens`, `()` int64: trained ones, of all ranks."""
    tensors = distillation_tensors(rows, local_slice, output["completion_ids"].size(1))
    if not tensors:
        return {}
    tensors = {name: tensor.to(accelerator.device) for name, tensor in tensors.items()}
    count = distilled_tokens(output | tensors).sum()
    return tensors | {"num_distilled_tokens": accelerator.gather(count).sum()}


def distilled_tokens(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """`(B, C)` bool: the trained tokens for which there is a teacher's distribution."""
    trained = inputs["completion_mask"] * inputs["tool_mask"]
    return trained.bool() & (inputs["distill_ids"] >= 0).any(-1)


def top_k_divergence(logits: torch.Tensor, ids: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    """
    KL(teacher || student) over the teacher's top-k tokens, both renormalised over them; 0 where there are none.

    Args:
        logits: `(B, C, V)`, the student's, at temperature 1.
        ids: `(B, C, k)`, -1 where absent.
        logprobs: `(B, C, k)` float32, the teacher's; anything where absent.

    Returns:
        `(B, C)` float32, in nats.
    """
    student = logits.gather(-1, ids.clamp(min=0)).float().where(ids >= 0, ABSENT).log_softmax(-1)
    teacher = logprobs.where(ids >= 0, ABSENT).log_softmax(-1)
    return (teacher.exp() * (teacher - student)).sum(-1)


def distillation_loss(
    model: torch.nn.Module, inputs: dict[str, torch.Tensor], accelerator: Accelerator, micro_batches: int, of_step: int
) -> tuple[torch.Tensor, float]:
    """
    The term of one micro-batch, at the price of one forward of `model` with the logits of all completion tokens.

    Args:
        inputs: a micro-batch, with what `distillation_inputs` added.
        micro_batches: into how many the generation batch is split.
        of_step: how many of them one optimizer step takes.

    Returns:
        `()`, such that its gradients, added over an optimizer step's micro-batches and averaged over ranks, are those
        of the mean over all distilled tokens (as TRL has it for `dapo`). And, the same on all ranks, a number whose
        mean over the micro-batches is that mean, in nats.
    """
    length = inputs["completion_ids"].size(1)
    with accelerator.autocast():
        logits = model(
            input_ids=torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            attention_mask=torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            logits_to_keep=length + 1,
            use_cache=False,
        ).logits[:, :-1]  # the one before a token predicts it
    distilled = distilled_tokens(inputs)
    total = (top_k_divergence(logits, inputs["distill_ids"], inputs["distill_logprobs"]) * distilled).sum()
    of_micro_batch = inputs["num_distilled_tokens"].clamp(min=1) / micro_batches
    divergence = accelerator.reduce(total.detach()) / of_micro_batch
    return total * accelerator.num_processes / (of_micro_batch * of_step), divergence.item()
