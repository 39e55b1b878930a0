"""No optimizer step is taken on a gradient that is not finite: it would make every weight NaN, for
good.

`AtroposGRPOTrainer` finds the norm of each step's gradient before it waits for the device, and
gives it to `GradientCheck`, which raises `GradientError` or says that the step is to be left out.
What the loss was computed from is kept on the device until then, and looked at only if the norm is
not finite.
"""

import logging
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from trl_atropos.errors import GradientError

logger = logging.getLogger(__name__)

SIGNAL = "gradient_not_finite"
# Above it, the square of the norm is not finite in float32, nor are Adam's second moments.
LARGEST_NORM = torch.finfo(torch.float32).max ** 0.5
# of float16's loss scaling, as in DeepSpeed: below it, the values themselves overflow
SMALLEST_SCALE = 1.0
CAUSES = {  # what a loss is computed from, and how a message names the largest of it
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
        self.left_out = 0  # steps
        self._tolerated = tolerated
        # micro-batches and their log-probabilities
        self._passes: list[tuple[dict[str, Any], torch.Tensor]] = []
        self._losses: list[torch.Tensor] = []

    def note_logprobs(self, inputs: dict[str, Any], logprobs: torch.Tensor) -> None:
        """Keeps a micro-batch and the `(B, C)` log-probabilities that the policy has for it, in
        nats."""
        self._passes.append((inputs, logprobs.detach()))

    def note_loss(self, loss: torch.Tensor) -> None:
        self._losses.append(loss.detach())

    def takes(self, norm: float | None, step: int, accelerator: Accelerator) -> bool:
        """
        Returns whether optimizer step number `step` may be taken: the same on all ranks, whose
        norms are the same.

        Args:
            norm: Norm of the whole gradient, before clipping; `None` where DeepSpeed computes none.

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
        of_ranks = gather_object([self._found()])
        loss = max((found["loss"] for found in of_ranks), key=_badness)
        causes = _largest_of_all(of_ranks)
        if math.isfinite(loss) and _can_scale_down(accelerator):
            logger.warning(
                "Step %d is left out: the gradient overflows in float16, and the loss scale is "
                "halved.",
                step,
            )
            return
        self.left_out += 1
        damaged = any(found["damaged"] for found in of_ranks)
        overflows = (
            "square of the gradient is not finite in float32"
            if norm < math.inf
            else "gradient is not finite"
        )
        what = f"Step {step}: the {overflows} (norm {norm:.3g}, loss {loss:.3g})"
        named = [text.format(causes[name]) for name, text in CAUSES.items() if name in causes]
        seen = f"the largest in its loss: {', '.join(named)}"
        if damaged:
            seen = "log-probabilities of the policy that are not finite"
        # DeepSpeed steps within the backward pass, and leaves such a step out by itself.
        taken = (
            accelerator.distributed_type == "DEEPSPEED"
            and not accelerator.optimizer_step_was_skipped
        )
        if taken:
            what += ", and DeepSpeed has taken the step; nothing of it was published or saved"
        if taken or self.left_out > self._tolerated:
            fix = DAMAGED if damaged else LOWER
            fix += f" Or leave out up to N such steps with `warning_thresholds: {{{SIGNAL}: N}}`."
            raise GradientError(what, seen, fix)
        message = (
            "%s (seen: %s). The step is left out, as `warning_thresholds` allows for %g "
            "steps of a run."
        )
        logger.warning(message, what, seen, self._tolerated)

    def _found(self) -> dict[str, Any]:
        """Returns this rank's loss, the largest of each of `CAUSES`, and whether a log-probability
        is not finite."""
        losses = [loss.item() for loss in self._losses]
        found: dict[str, Any] = {"loss": sum(losses), "damaged": False}
        for inputs, logprobs in self._passes:
            trained = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
            found["damaged"] |= not bool(logprobs[trained].isfinite().all())
            for name, values in _compared(inputs, logprobs):
                largest = _largest(values.abs().expand_as(trained)[trained].tolist())
                found[name] = max(found.get(name, 0.0), largest)
        return found


def _compared(inputs: dict[str, Any], logprobs: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields each of `CAUSES` that the micro-batch has, as `(B, C)` or `(B, 1)`."""
    for name in CAUSES:
        values = inputs.get(name)
        if values is None:
            continue
        if name == "advantages":
            yield name, values if values.dim() == 2 else values[:, None]
        else:
            yield name, logprobs - values


def _largest(values: Iterable[float]) -> float:
    """Returns the largest value that is known: NaN stands for a log-probability that nobody
    sent."""
    return max((value for value in values if not math.isnan(value)), default=0.0)


def _largest_of_all(of_ranks: list[dict[str, Any]]) -> dict[str, float]:
    names = [name for name in CAUSES if any(name in found for found in of_ranks)]
    return {name: max(found.get(name, 0.0) for found in of_ranks) for name in names}


def _badness(loss: float) -> tuple[bool, float]:
    """Sorts NaN above infinity above all else."""
    return math.isnan(loss), 0.0 if math.isnan(loss) else abs(loss)


def _can_scale_down(accelerator: Accelerator) -> bool:
    """Whether a smaller loss scale may heal an overflow in float16. Its scaler then skips the step
    by itself."""
    if accelerator.mixed_precision != "fp16":
        return False
    # DeepSpeed has a scaler of its own, and raises when its scale cannot become smaller.
    return accelerator.scaler is None or accelerator.scaler.get_scale() >= SMALLEST_SCALE
