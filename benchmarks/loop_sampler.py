"""What stands in for the inference server in `trl-atropos bench loop`: a file that its processes
map into memory.

The trainer tells which version of the policy may be sampled, and how long sampling takes; the
environment notes which version each of its groups began with.
"""

from pathlib import Path
from typing import Any

import numpy as np

from trl_atropos.metrics.timing import PUBLISH
from trl_atropos.rollouts.rollout import Rollout
from trl_atropos.rollouts.versions import VersionBook
from trl_atropos.weights.publisher import PolicyPublisher

BASE = 256  # of the digits in which a group's number begins its prompt: token ids of any model
DIGITS = 3
GROUPS = 1 << 16  # that a run can have
# positions
VERSION = 0
LATENCY = 1
LEDGER = 2


class Sampler:
    """
    Args:
        path: the file; made by whoever says so, opened by all others.

    `version` is the policy that is sampled, `latency` the seconds that a batch takes.
    """

    def __init__(self, path: Path, make: bool = False):
        mode = "w+" if make else "r+"
        self._numbers = np.memmap(path, np.float64, mode, shape=(LEDGER + GROUPS,))

    @property
    def version(self) -> int:
        return int(self._numbers[VERSION])

    @version.setter
    def version(self, version: int) -> None:
        self._numbers[VERSION] = version

    @property
    def latency(self) -> float:
        return float(self._numbers[LATENCY])

    @latency.setter
    def latency(self, seconds: float) -> None:
        self._numbers[LATENCY] = seconds

    def note(self, group: int, version: int) -> None:
        self._numbers[LEDGER + group] = version

    def version_of(self, group: int) -> int:
        return int(self._numbers[LEDGER + group])


def digits_of(group: int) -> list[int]:
    """The token ids that stand for a group's number."""
    return [group // BASE**power % BASE for power in reversed(range(DIGITS))]


class Versions(VersionBook):
    """Tells the source which version each row's group began with. There are no servers to ask."""

    def __init__(self, sampler: Sampler):
        super().__init__()
        self._sampler = sampler

    def tag(self, rows: list[Rollout]) -> None:
        for row in rows:
            group = 0
            for digit in row.prompt_ids[:DIGITS].tolist():
                group = group * BASE + digit
            row.policy_version = row.newest_version = self._sampler.version_of(group)


class SamplerPublisher(PolicyPublisher):
    """Publishes the number of the version, and nothing else."""

    def __init__(self, sampler: Sampler):
        super().__init__()
        self._sampler = sampler

    def begin(self, optimizer: Any, policy_version: int) -> None:
        self.policy_version = self._sampler.version = policy_version
        step = optimizer.step

        def published(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            with self.stopwatch.part(PUBLISH):
                self.on_pause()  # and no request comes before the next line
                self.policy_version += 1
                self._sampler.version = self.policy_version
            return result

        self._wrap_step(optimizer, published)
