"""Refuses optimizer steps on a gradient that is not finite. Such a step makes every weight NaN, for
good.

`AtroposGRPOTrainer` finds the norm of each step's gradient before it waits for the device, and
gives it to `GradientCheck`, which raises `GradientError` or says that the step is to be left out.
Until then, the check keeps on the device what the loss was computed from. It looks at that only if
the norm is not finite.
"""

import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from trl_atropos.errors import GradientError

logger = logging.getLogger(__name__)

GRADIENT_NOT_FINITE = "gradient_not_finite"
# Above it, the square of the norm is not finite in float32, nor are Adam's second moments.
LARGEST_NORM = torch.finfo(torch.float32).max ** 0.5
# Smallest loss scale of float16, as in DeepSpeed. A gradient that overflows at a smaller one is too
# large itself.
SMALLEST_SCALE = 1.0
# Inputs of a loss, and how a message names the largest value of each
CAUSES = {
    "advantages": "advantage {:.3g}",
    "old_per_token_logps": "log-ratio to the policy that began the batch {:.3g} nats",
    "sampling_per_token_logps": "log-ratio to the sampler {:.3g} nats",
    "ref_per_token_logps": "log-ratio to the reference policy {:.3g} nats",
}
LOWER = (
    "Resume from a checkpoint before it (`resume_from_checkpoint`) and bound what is too large: "
    "with a lower `learning_rate`, `max_grad_norm: 1`, rewards or advantages of about 1, `delta` "
    "or `vllm_importance_sampling_clip_max` for ratios, or a lower `beta` for the reference policy."
)
DAMAGED = (
    "The weights were damaged before this step, or the model overflows in its dtype: begin with "
    "other weights or an earlier checkpoint (`resume_from_checkpoint`), or set `dtype: float32`."
)


class GradientCheck:
    """
    Judges the gradient of each optimizer step before the step is taken.

    Args:
        tolerated (`float`): How many steps of the run may be left out before it stops.
    """

    def __init__(self, tolerated: float):
        self.left_out = 0  # number of steps
        self._tolerated = tolerated
        # Micro-batches of this optimizer step, each with its log-probabilities.
        self._passes: list[tuple[dict[str, Any], torch.Tensor]] = []
        self._losses: list[torch.Tensor] = []

    def note_logprobs(self, inputs: dict[str, Any], logprobs: torch.Tensor) -> None:
        """Keeps a micro-batch and the `(B, C)` log-probabilities that the policy has for it, in
        nats."""
        self._passes.append((inputs, logprobs.detach()))

    def note_loss(self, loss: torch.Tensor) -> None:
        """Keeps the loss of a micro-batch."""
        self._losses.append(loss.detach())

    def allows_step(self, norm: float | None, step: int, accelerator: Accelerator) -> bool:
        """
        Returns whether optimizer step number `step` may be taken: the same on all ranks, whose
        norms are the same.

        Args:
            norm: Norm of the whole gradient, before clipping, or `None` if DeepSpeed computes none.

        Raises:
            GradientError: The norm is not finite, and more steps than are tolerated had such a
                gradient.
        """
        finite = norm is None or 0 <= norm <= LARGEST_NORM  # DeepSpeed writes -1 for NaN
        if not finite:
            self._judge(norm, step, accelerator)
        self._passes.clear()
        self._losses.clear()
        return finite

    def _judge(self, norm: float, step: int, accelerator: Accelerator) -> None:
        """Warns that the step is left out, or raises `GradientError`."""
        inspections = gather_object([self._inspect()])
        loss = max((inspection.loss for inspection in inspections), key=_badness)
        if math.isfinite(loss) and _can_scale_down(accelerator):
            logger.warning(
                "Step %d is left out: the gradient overflows in float16, and the loss scale is "
                "halved.",
                step,
            )
            return
        self.left_out += 1
        overflows = "gradient is not finite"
        if norm < math.inf:
            overflows = "square of the gradient is not finite in float32"
        what = f"Step {step}: the {overflows} (norm {norm:.3g}, loss {loss:.3g})"
        seen = f"the largest in its loss: {_name_causes(inspections)}"
        fix = LOWER
        if any(inspection.damaged for inspection in inspections):
            seen = "log-probabilities of the policy that are not finite"
            fix = DAMAGED
        # DeepSpeed steps within the backward pass, and leaves such a step out by itself.
        has_stepped = (
            accelerator.distributed_type == "DEEPSPEED"
            and not accelerator.optimizer_step_was_skipped
        )
        if has_stepped:
            what += ", and DeepSpeed has taken the step; nothing of it was published or saved"
        if has_stepped or self.left_out > self._tolerated:
            setting = f"warning_thresholds: {{{GRADIENT_NOT_FINITE}: N}}"
            fix += f" Or leave out up to N such steps with `{setting}`."
            raise GradientError(what, seen, fix)
        logger.warning(
            "%s (seen: %s). The step is left out, as `warning_thresholds` allows for %g steps of a "
            "run.",
            what,
            seen,
            self._tolerated,
        )

    def _inspect(self) -> "_Inspection":
        """Looks at what this rank's loss was computed from."""
        loss = sum(loss.item() for loss in self._losses)
        damaged = False
        largest: dict[str, float] = {}
        for inputs, logprobs in self._passes:
            trained = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
            damaged |= not bool(logprobs[trained].isfinite().all())
            for name, values in _causes(inputs, logprobs):
                sizes = values.abs().expand_as(trained)[trained]
                largest[name] = max(largest.get(name, 0.0), _largest(sizes.tolist()))
        return _Inspection(loss, damaged, largest)


@dataclass
class _Inspection:
    """Holds what one rank found in the inputs of its loss."""

    loss: float
    damaged: bool  # a log-probability of the policy is not finite
    largest: dict[str, float]  # size of each of `CAUSES` that the loss has


def _causes(inputs: dict[str, Any], logprobs: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields each of `CAUSES` that the micro-batch has, as `(B, C)` or `(B, 1)`."""
    for name in CAUSES:
        values = inputs.get(name)
        if values is None:
            continue
        if name != "advantages":
            yield name, logprobs - values
        elif values.dim() == 2:
            yield name, values
        else:
            yield name, values[:, None]


def _largest(values: Iterable[float]) -> float:
    """Returns the largest value that is known: NaN stands for a log-probability that nobody
    sent."""
    known = [value for value in values if not math.isnan(value)]
    return max(known, default=0.0)


def _name_causes(inspections: list[_Inspection]) -> str:
    """Returns the largest of each of `CAUSES` on all ranks, as a message names them."""
    names = []
    for name, text in CAUSES.items():
        sizes = [
            inspection.largest[name] for inspection in inspections if name in inspection.largest
        ]
        if sizes:
            names.append(text.format(max(sizes)))
    return ", ".join(names)


def _badness(loss: float) -> tuple[bool, float]:
    """Returns a key that sorts NaN above infinity above all else."""
    if math.isnan(loss):
        return True, 0.0
    return False, abs(loss)


def _can_scale_down(accelerator: Accelerator) -> bool:
    """Returns whether a smaller loss scale may heal an overflow in float16. Its scaler then skips
    the step by itself."""
    if accelerator.mixed_precision != "fp16":
        return False
    # DeepSpeed has a scaler of its own, and raises when its scale cannot become smaller.
    return accelerator.scaler is None or accelerator.scaler.get_scale() >= SMALLEST_SCALE
