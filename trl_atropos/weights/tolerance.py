"""Bounds on the differences between server and trainer, by which a probe (`probe.py`) is judged.

All differences are in nats: natural logarithms of probabilities.

Lost weights and stale caches show on most tokens. Rounding does not: a residual stream may nearly
cancel before it is normalised, and then one token in many thousands differs a thousand times more
than the others. Such a token is an *outlier*: it is beyond the bound, and the mean is not.
"""

import math
from typing import NamedTuple

import torch

from trl_atropos.errors import ProbeError

FULL_PRECISION = {torch.float32, torch.float64}


class ProbeResult(NamedTuple):
    """Differences between server and trainer, in nats."""

    max_abs_diff: float
    mean_abs_diff: float
    p99_abs_diff: float = 0.0  # of all servers and tokens

    @classmethod
    def of(cls, sampled: torch.Tensor, scored: torch.Tensor) -> "ProbeResult":
        """Compares log-probabilities of shape (num_servers, num_samples, num_tokens). The mean is
        that of the worst server."""
        differences = (sampled - scored).abs()
        return cls(
            max_abs_diff=differences.max().item(),
            mean_abs_diff=differences.mean((1, 2)).max().item(),
            p99_abs_diff=differences.flatten().quantile(0.99).item(),
        )


class Outlier(ProbeError):
    """Single tokens are beyond the tolerance, and the mean is not."""


class Tolerance(NamedTuple):
    """Bounds on |server - trainer| in nats: on any token, and in the mean."""

    max_abs: float
    mean_abs: float

    @classmethod
    def of(cls, device: str, *dtypes: torch.dtype) -> "Tolerance":
        """Returns the bounds of the first probe, for a server on `device` ("cpu" or "cuda") if
        these dtypes are involved."""
        if not rounds_to_16_bits(set(dtypes)):
            if device == "cpu":
                return cls(max_abs=1e-4, mean_abs=1e-4)
            # On a GPU, vLLM's attention kernels multiply float32 in TF32 (2e-3 was seen).
            return cls(max_abs=2e-2, mean_abs=2e-3)
        # Other kernels round otherwise, in every layer. On a GPU, with random weights of Qwen3's
        # shapes and 12 nats per token: 0.07 and 0.02 at 0.6B, 0.23 and 0.06 at 8B.
        if device == "cpu":
            return cls(max_abs=0.2, mean_abs=3e-2)
        return cls(max_abs=0.6, mean_abs=0.15)

    def after(self, first: ProbeResult) -> "Tolerance":
        """Returns the bounds of later probes: three times the rounding that the first one has
        shown."""
        # Rounding in 16 bits grows with the logits, which grow as a policy becomes sure of itself:
        # hence the floors.
        return Tolerance(
            max_abs=min(self.max_abs, max(0.2, 3 * first.max_abs_diff)),
            mean_abs=min(self.mean_abs, max(3e-2, 3 * first.mean_abs_diff)),
        )

    def admits(self, result: ProbeResult) -> bool:
        """Returns whether a result is within both bounds. NaN never is."""
        return result.max_abs_diff <= self.max_abs and result.mean_abs_diff <= self.mean_abs

    def describe_breach(
        self, result: ProbeResult, tokens: torch.Tensor, sampled: torch.Tensor, scored: torch.Tensor
    ) -> str:
        """Returns a sentence with the worst token of tensors of one shape, and the bounds."""
        differences = (sampled - scored).abs()
        worst = int(differences.nan_to_num(nan=math.inf).argmax())
        token = tokens.flatten()[worst]
        on_server = sampled.flatten()[worst]
        in_trainer = scored.flatten()[worst]
        return (
            f"token {token} has log-probability {on_server:.6f} on the server and {in_trainer:.6f} "
            f"in the trainer (max difference {result.max_abs_diff:.2e}, mean "
            f"{result.mean_abs_diff:.2e}, allowed {self.max_abs:.0e} and {self.mean_abs:.0e})."
        )


EXACT = Tolerance(0.0, 0.0)
NO_TOLERANCE = Tolerance(math.inf, math.inf)  # allows any difference


def rounds_to_16_bits(dtypes: set[torch.dtype]) -> bool:
    return not dtypes <= FULL_PRECISION


def rounding_limit(dtypes: set[torch.dtype], first_mean: float) -> float:
    """
    Returns by how many nats in the mean equal weights may make server and trainer differ after the
    first probe, whose mean was `first_mean`. A larger difference is no rounding.

    Rounding is a share of the logits, so it grows as a policy becomes sure of itself, from a spread
    of a few nats to tens: by a factor of 2.5 in 120 steps of the quickstart on a GPU, to 0.013 nats
    in 150 steps of the arithmetic recipe. Ten times the first probe, and 0.1 nats in any case, is
    more than was ever seen. It cannot grow for ever: if a token is certain, its log-probability
    hardly depends on the logits. From 0.3 nats on, a ratio of probabilities is off by a third on
    the usual token, so that such rollouts are of no use even if it were rounding.

    The mean decides and not the largest difference: in a sound model, one token in thousands may
    differ by nats, where a sum that nearly cancels is normalised, while other weights, scales or
    positions move nearly all tokens.
    """
    if rounds_to_16_bits(dtypes):
        least, most = 0.1, 0.3
    else:
        # In TF32, 2e-3 is the bound of the first probe.
        least, most = 5e-3, 2e-2
    return min(most, max(least, 10 * first_mean))


class RoundingWarnings:
    """Decides which differences between equal weights the log mentions: the first after a probe
    within the tolerance, and one that is twice or half of the last one mentioned. So a large one
    does not hide smaller ones for ever."""

    def __init__(self):
        self._last: float | None = None  # mean, in nats; None: a probe has agreed since

    def agreed(self) -> None:
        self._last = None

    def is_new(self, mean: float) -> bool:
        new = self._last is None or not self._last / 2 <= mean <= 2 * self._last
        if new:
            self._last = mean
        return new
