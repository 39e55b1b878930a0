"""Decides after which publishes the probe (`probe.py`) runs, so that it takes a small share of the
time."""

import math
from dataclasses import dataclass

# Share of a run's time on a GPU that probes may take, and publishes between two probes, unless the
# configuration says how often to probe.
MAX_SHARE = 0.02
LEAST_APART = 4
LONG_EVERY = 8  # one of so many probes has a prompt near the run's longest rollouts


@dataclass
class Schedule:
    """Decides after which publishes the probe runs: the first, the last, and some between them."""

    every: int | None  # publishes between two probes; 0: no probe; None: as `MAX_SHARE` allows
    publishes: int = 0
    probed: int = 0  # number of the last publish that was probed
    probes: int = 0
    seconds: float = 0.0  # of the trainer's time that the last probe took
    ended: float = -math.inf  # when it ended, in seconds

    def count_publish(self, now: float, last: bool) -> bool:
        """Counts a publish that ended at `now`. Returns whether to probe it."""
        self.publishes += 1
        if self.every == 0:
            return False
        if last or self.publishes == 1:
            return True
        if self.every is None:
            has_rested = now - self.ended >= self.seconds / MAX_SHARE
            return has_rested and self.publishes - self.probed >= LEAST_APART
        return (self.publishes - 1) % self.every == 0

    def ran(self, seconds: float, ended: float) -> None:
        """Notes how many seconds of the trainer's time a probe took, and when it ended."""
        self.probed = self.publishes
        self.seconds = seconds
        self.ended = ended
        self.probes += 1

    @property
    def long(self) -> bool:
        """True if a probe that is due now has a long prompt. The probe after it waits for the time
        that it takes."""
        return self.probes % LONG_EVERY == LONG_EVERY - 1
