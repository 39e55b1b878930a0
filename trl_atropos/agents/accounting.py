"""Counts what became of the episodes and the sampled tokens of an environment.

The counts go to the file of the environment's metrics, each time since the time before, and from
there to the run's log as `environment/NAME/...`, where they are summed up:

    episodes/ended, episodes/timeout, ...     episodes, by what became of them
    tokens/sampled                            delivered by the sessions of these episodes
    tokens/sent                               of them, in groups that were sent, and trained
    tokens/dropped_REASON                     all the others

So `tokens/sampled` is the sum of the others.
"""

import json
import logging
import os
from collections import Counter

from trl_atropos.services.environment_metrics import COUNTS, FILE_VARIABLE

logger = logging.getLogger(__name__)

MARKED = "marked"  # sampled in a way that the trainer cannot compute again


class Accounting:
    """Counts of one environment since its process began."""

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()
        self._new: Counter[str] = Counter()  # since the last `write`

    def count_episode(self, outcome: str) -> None:
        self._add(f"episodes/{outcome}", 1)

    @property
    def failures_alone(self) -> int:
        """The number of episodes so far, without those that were cancelled, if none of them ended
        well. Otherwise 0."""
        if self.totals["episodes/ended"]:
            return 0
        episodes = 0
        for name, count in self.totals.items():
            if name.startswith("episodes/") and name != "episodes/cancelled":
                episodes += count
        return episodes

    def drop_tokens(self, reason: str, tokens: int) -> None:
        """Counts the sampled tokens of an episode that is not sent."""
        self._add("tokens/sampled", tokens)
        self._add(f"tokens/dropped_{reason}", tokens)

    def send_tokens(self, tokens: int, trained: int) -> None:
        """Counts the sampled tokens of an episode that is sent, of which some are trained."""
        self._add("tokens/sampled", tokens)
        self._add("tokens/sent", trained)
        self._add(f"tokens/dropped_{MARKED}", tokens - trained)

    def write(self) -> None:
        """Appends the counts since the last call to the metrics of this process."""
        path = os.environ.get(FILE_VARIABLE)
        if path and self._new:
            line = json.dumps({COUNTS: self._new})
            try:
                with open(path, "a") as file:
                    file.write(f"{line}\n")
            except OSError as error:  # a count is no reason to end an environment
                logger.warning("Its counts cannot be written to %s (%s).", path, error.strerror)
        self._new.clear()

    def _add(self, name: str, number: int) -> None:
        if number:
            self.totals[name] += number
            self._new[name] += number
