"""Averages over tokens what TRL averages over micro-batches.

TRL appends a mean for each micro-batch, and logs the mean of these. That is right if all
micro-batches have as many tokens. Here short rollouts share one micro-batch, and long ones another,
so a token of a short rollout would count for more.
"""

from collections import defaultdict
from typing import Any

import numpy as np

TOKEN_MEANS = (
    "kl",
    "entropy",
    "cispo_clip_ratio",
    "clip_ratio/low_mean",
    "clip_ratio/high_mean",
    "clip_ratio/region_mean",
)


class TokenMeans:
    """
    Takes TRL's means of the micro-batches of an optimizer step, and gives their mean back.

    Args:
        metrics: TRL's lists of values, by name; the last value of each is of the last micro-batch.
        clips_sequences: whether TRL counts clipped sequences, not clipped tokens.
    """

    def __init__(self, metrics: dict[str, list[float]], clips_sequences: bool):
        self._metrics = metrics
        self._clips_sequences = clips_sequences
        # means, and over how many tokens or sequences each is
        self._means: dict[str, list[tuple[float, int]]] = defaultdict(list)

    def take(self, micro_batch: dict[str, Any]) -> None:
        """Takes the means of a micro-batch out of the metrics. One that TRL has drawn itself has no
        `trained_tokens`: its means stay."""
        if "trained_tokens" not in micro_batch:
            return
        for name in TOKEN_MEANS:
            values = self._metrics.pop(name, [])
            if not values:
                continue
            weight = micro_batch["trained_tokens"]
            if self._clips_sequences and "clip" in name:
                weight = len(micro_batch["completion_ids"])
            self._means[name].append((values.pop(), weight))
            if values:  # of earlier optimizer steps
                self._metrics[name] = values

    def end_step(self) -> None:
        """Gives the means of an optimizer step to the metrics."""
        for name, means in self._means.items():
            values, weights = zip(*means)
            self._metrics[name].append(float(np.average(values, weights=weights)))
        self._means.clear()
