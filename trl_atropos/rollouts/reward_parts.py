"""Named numbers that environments send beside the scores: parts of a rollout's reward, and metrics
of their own.

A part stands in a rollout's overrides, for example `{"rewards": {"format": 1.0, "correct": 0.0}}`,
and is logged as `reward/format`. Parts explain a score. What is trained on is the score alone.

Each name becomes a metric of the run, so `NamedNumbers` bounds the names. What it drops, it counts
and warns of, because nothing about a metric is a reason to lose a rollout or to end a run.
`intake.py` checks the parts, and `services/environment_metrics.py` the metrics.
"""

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from reprlib import repr as short
from statistics import fmean
from typing import Any

from trl_atropos.rollouts.rollout import Rollout
from trl_atropos.rollouts.wire_values import LARGEST

logger = logging.getLogger(__name__)

# How names of metrics begin.
REWARD = "reward/"
ENVIRONMENT = "environment/"

MOST_NAMES = 32
LONGEST_NAME = 100  # characters
NAME = re.compile(r"\w[\w ./@%+:=()-]*")

# Reasons for which a number is dropped. They stand in the names of the metrics that count them.
NOT_A_MAPPING = "not_a_mapping"
BAD_NAME = "bad_name"
NOT_A_NUMBER = "not_a_number"
TOO_MANY_NAMES = "too_many_names"

FIXES = {
    NOT_A_MAPPING: 'Send names with numbers, such as {"format": 1.0}.',
    BAD_NAME: (
        f"Name it with at most {LONGEST_NAME} letters, digits, spaces and any of _ . / @ % + : = "
        "( ) -, of which a letter, a digit or _ comes first."
    ),
    NOT_A_NUMBER: (
        f"Send a number of at most {LARGEST:.3g} or a truth value, or leave it out where there is "
        "none."
    ),
    TOO_MANY_NAMES: (
        f"Use at most {MOST_NAMES} names: name what is measured, not the task or the rollout."
    ),
}


class Count(float):
    """A metric that counts what happened since the entry before. Where others are averaged, it is
    added up."""


class NamedNumbers:
    """
    Keeps the named numbers that can be metrics: those with one of the first `MOST_NAMES` names.

    One thread may admit numbers while another asks for the metrics.

    Args:
        thing: what a number is, in messages, such as `part of a reward`.
        metric: how the metrics begin that count what was dropped.
    """

    def __init__(self, thing: str, metric: str):
        self._thing = thing
        self._metric = metric
        self._names: set[str] = set()
        self._dropped: Counter[str] = Counter()  # by reason
        self._reported: Counter[str] = Counter()  # `_dropped` at the last call of `metrics`

    def admit(self, sent: Any, label: str) -> dict[str, float]:
        """Returns the numbers that can be metrics, by name. `sent` is what the environment sent, as
        JSON gives it; null stands for no number. Messages call the environment `label`."""
        if not isinstance(sent, dict):
            self._drop(NOT_A_MAPPING, sent, label)
            return {}
        numbers = {}
        for name, value in sent.items():
            if value is None:
                continue
            reason = self._reason_to_drop(name, value)
            if reason is None:
                self._names.add(name)
                numbers[name] = float(value)
            else:
                self._drop(reason, {name: value}, label)
        return numbers

    def _reason_to_drop(self, name: str, value: Any) -> str | None:
        if len(name) > LONGEST_NAME or not NAME.fullmatch(name):
            return BAD_NAME
        # the comparison is also false for NaN
        if not isinstance(value, int | float) or not abs(value) <= LARGEST:
            return NOT_A_NUMBER
        if name not in self._names and len(self._names) >= MOST_NAMES:
            return TOO_MANY_NAMES
        return None

    def _drop(self, reason: str, sent: Any, label: str) -> None:
        self._dropped[reason] += 1
        if self._dropped[reason] > 1:
            return
        message = (
            "Dropped a %s from environment %s: %s (%s). %s Later ones are only counted, in `%s`."
        )
        words = reason.replace("_", " ")
        metric = f"{self._metric}_{reason}"
        logger.warning(message, self._thing, label, short(sent), words, FIXES[reason], metric)

    def metrics(self) -> dict[str, float]:
        """Returns how many were dropped since the last call, by reason. Reasons that never occurred
        are left out."""
        dropped = self._dropped.copy()
        metrics = {}
        for reason, count in dropped.items():
            metrics[f"{self._metric}_{reason}"] = float(count - self._reported[reason])
        self._reported = dropped
        return metrics


def part_means(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Returns the mean of each part of the reward as the metric `reward/NAME`, over the `rollouts`
    that have the part."""
    values = defaultdict(list)
    for rollout in rollouts:
        for name, value in (rollout.rewards or {}).items():
            values[name].append(value)
    return {f"{REWARD}{name}": fmean(parts) for name, parts in values.items()}
