"""Checks of what a model computes of one short row, before the first batch.

`check_head` compares its log-probabilities with those of TRL's head, `noise_left` training with
evaluation mode. `training/computation.py` calls both.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from trl_atropos.errors import RecipeError

ROW = 64  # tokens that a model's own forward pass is compared on
# nats that two computations of that row may differ by in the mean, if nothing is rounded to 16 bits
APART = 1e-3


class Row:
    """
    Holds a short row of tokens, and computes it by a model.

    Args:
        config: of the model.
        longest: tokens that the model has positions for.
        autocast: the context that the trainer computes in.
        dtype: of products in there.
        temperature: that logits are divided by.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        longest: float,
        device: torch.device,
        autocast: Callable[[], AbstractContextManager],
        dtype: torch.dtype,
        temperature: float = 1.0,
    ):
        length = int(min(ROW, longest))
        vocabulary = config.get_text_config().vocab_size - 1
        ids = torch.arange(length, device=device) * 7919 % vocabulary
        self.ids = ids[None]  # (1, T)
        self.autocast = autocast
        self.dtype = dtype
        self.temperature = temperature

    @torch.no_grad()
    def outputs(self, model: torch.nn.Module, training: bool = False, **inputs: Any) -> Any:
        """Returns what a forward pass does, in evaluation mode or in training mode."""
        mode = model.training
        mask = torch.ones_like(self.ids)
        model.train(training)
        try:
            with self.autocast():
                return model(input_ids=self.ids, attention_mask=mask, **inputs)
        finally:
            model.train(mode)

    def logits(self, model: torch.nn.Module, training: bool = False) -> Tensor:
        """Returns float32 (1, T, V), by the model's own head."""
        outputs = self.outputs(model, training, use_cache=False)
        return outputs.logits.float() / self.temperature

    def logprobs(self, logits: Tensor) -> Tensor:
        """Returns the log-probability of each token after the one before it, (1, T - 1), in
        nats."""
        logprobs = logits[:, :-1].log_softmax(-1)
        next_ids = self.ids[:, 1:, None]
        return logprobs.gather(-1, next_ids)[..., 0]

    def difference(self, logprobs: Tensor, logits: Tensor) -> float | None:
        """Returns by how many nats `logprobs`, (1, T - 1), differ in the mean from those of
        `logits`. `None` stands for a difference that rounding to the row's dtype explains."""
        difference = logprobs.float() - self.logprobs(logits)
        mean = difference.abs().mean().item()
        largest = logits.abs().amax(-1).mean().item()
        rounding = torch.finfo(self.dtype).eps * largest
        if mean <= max(APART, rounding):  # false for NaN
            return None
        return mean


def check_head(model: torch.nn.Module, row: Row) -> None:
    """Raises `RecipeError` if TRL's head computes other log-probabilities than the model. It takes
    hidden states and leaves out the model's own code, which may cap or scale the logits."""
    logits = row.logits(model)
    if not logits.isfinite().all():  # damaged weights: the first step's gradient says so
        return
    fused = row.outputs(model, labels=row.ids, fused_lm_head=True).log_probs
    difference = row.difference(fused, logits)
    if difference is None:
        return
    family = model.config.get_text_config().model_type
    raise RecipeError(
        f"TRL's fused head computes other log-probabilities for models of the family {family} than "
        f"their own forward pass ({difference:.2g} nats apart in the mean): it leaves out, or "
        "adds, a cap or a scale of their logits",
        f"model_type: {family}",
        "Train a model of another family, or use a version of TRL whose `add_fused_lm_head` knows "
        "this one.",
    )


def noise_left(model: torch.nn.Module, row: Row) -> float | None:
    """Returns by how many nats in the mean a model computes something else in training mode than in
    evaluation mode, which the server samples from. `None` stands for rounding."""
    logits = row.logits(model)
    in_training = row.logits(model, training=True)
    return row.difference(row.logprobs(in_training), logits)
