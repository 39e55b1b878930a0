"""Decides which rollouts are trained.

`Feed` (`feed.py`) asks `Selection` about each rollout, in order, when the trainer wants rollouts.
`Selection` drops those that are too old, teach nothing, or are ahead of their environment's share
(`Shares`), and `Accounting` counts what became of each.
"""

import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from trl_atropos.rollouts.api import AtroposClient, NoAnswer
from trl_atropos.rollouts.drop_reasons import JOINED, OVER_SHARE, STALE, ZERO_VARIANCE
from trl_atropos.rollouts.rollout import Rollout, staleness
from trl_atropos.rollouts.spool import FileHeader

REFRESH = 10.0  # seconds after which the environments' weights are asked for again
FORGET = 120.0  # seconds without a rollout after which an environment no longer counts


@dataclass
class Accounting:
    """Numbers of rollouts that were handed out, dropped, or lost with an API that was restarted.
    Their sum is the number that was produced up to the last one handed out: each of those is in
    exactly one of the counts. Rows that were joined to others of their episode are among the
    dropped, with a reason of their own (`JOINED`), because the API counts rows."""

    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # by reason
    lost_with_api: int = 0

    def __post_init__(self):
        self.dropped = Counter(self.dropped)  # JSON has a dict

    @property
    def produced(self) -> int:
        return self.trained + self.dropped.total() + self.lost_with_api


@dataclass(eq=False)
class Shares:
    """
    Keeps what is trained in the proportion of the environments' weights: drops rollouts of one that
    is ahead.

    By its weight, an environment only limits how many requests it has at the inference server at
    once. With short rollouts or fast servers that is no limit, and environments of weights 1 and 3
    deliver alike.
    """

    client: AtroposClient
    slack: int  # rollouts by which an environment may be ahead, for those that deliver in bursts

    def __post_init__(self):
        # The thread that pulls uses these, by the environment's number at the API.
        self._last_seen: dict[int, float] = {}
        self._last_refresh = 0.0
        # Replaced as a whole, because the trainer's thread reads it.
        self._weights: dict[int, float] = {}
        # The trainer's thread uses these.
        self._trained: Counter[int] = Counter()  # rollouts, by environment
        self._counted: set[int] = set()  # the environments that `_trained` counts
        self._group = -1  # the latest group
        self._group_is_admitted = True

    def note(self, env_ids: set[int]) -> None:
        """Asks for the weights of the environments from which rollouts came. Called by the thread
        that pulls."""
        now = time.monotonic()
        for env_id in env_ids:
            self._last_seen[env_id] = now
        active = [env_id for env_id, seen in self._last_seen.items() if now - seen < FORGET]
        is_fresh = now - self._last_refresh < REFRESH
        is_complete = set(active) == self._weights.keys()
        if is_fresh and is_complete:
            return
        with suppress(NoAnswer):  # the next pull finds out what is wrong
            weights = {}
            for env_id in active:
                status = self.client.environment(env_id)
                if status is not None:
                    weights[env_id] = status.env_weight
            self._weights = weights
            self._last_refresh = now

    def admits(self, rollout: Rollout) -> bool:
        """Returns whether a rollout may be trained now. The rollouts of a group all may, or none.
        Called for every rollout, in order."""
        weights = self._weights
        env_id = rollout.env_id
        if env_id not in weights:
            return True
        # An environment joined or left: earlier shares say nothing.
        if weights.keys() != self._counted:
            self._counted = set(weights)
            self._trained.clear()
        if rollout.group != self._group:
            total_weight = sum(weights.values())
            due = self._trained.total() * weights[env_id] / total_weight
            ahead = self._trained[env_id] - due
            self._group = rollout.group
            self._group_is_admitted = ahead < self.slack
        if self._group_is_admitted:
            self._trained[env_id] += 1
        return self._group_is_admitted


@dataclass(eq=False)
class Selection:
    """
    Decides whether each rollout is trained, and counts it.

    The trainer's thread decides and counts. The feed's thread reads `cursor` and `state`, and tells
    `shares` which environments sent something.

    Args:
        policy_version: returns the version at which a rollout selected now is trained.
        policy_branches: of this run, see `rollout.staleness`.
        accounting: of the rollouts before `cursor`.
        cursor: index of the first rollout that has not been handed out or dropped.
        max_staleness: in optimizer steps; None = any.
        replace_zero_variance: drop groups of equal scores.
        distils: the run learns from the teachers that rollouts bring.
        shares: None = rollouts are trained as environments deliver them.
    """

    policy_version: Callable[[], int]
    policy_branches: list[list]
    accounting: Accounting
    cursor: int
    max_staleness: int | None = None
    replace_zero_variance: bool = False
    distils: bool = False
    shares: Shares | None = None

    def __post_init__(self):
        self.dropped: Counter[str] = Counter()  # rollouts by reason, since the last `metrics`
        # For each rollout handed out since then: its staleness, environment, and time in the queue.
        self._staleness: list[int | None] = []
        self._environments: list[str | int | None] = []
        self._queue_seconds: list[float] = []
        # Environments that ever sent a rollout: without any, their count is 0, not absent.
        self._known_environments: set[str | int] = set()
        self._update_state()

    def count_missing(self, header: FileHeader) -> None:
        """Counts what a file does not hold, because it was dropped or lost before."""
        self.accounting.dropped.update(header.dropped)
        self.accounting.lost_with_api += header.lost_with_api
        self.dropped.update(header.dropped)
        del self.dropped[JOINED]  # They are trained, in their episode's rollout.
        self.cursor += header.missing

    def admits(self, rollout: Rollout, header: FileHeader, version: int) -> bool:
        """Returns whether a rollout is trained, at policy version `version`. One that is dropped
        stays dropped: it only grows older."""
        self.cursor += 1
        rollout.staleness = staleness(
            rollout.policy_version,
            header.policy_branches,
            header.version,
            self.policy_branches,
            version,
        )
        reason = self._reason_to_drop(rollout)
        if reason is None:
            return True
        self.accounting.dropped[reason] += 1
        self.dropped[reason] += 1
        return False

    def _reason_to_drop(self, rollout: Rollout) -> str | None:
        is_bounded = self.max_staleness is not None and rollout.staleness is not None
        if is_bounded and rollout.staleness > self.max_staleness:
            return STALE
        if self.replace_zero_variance and rollout.teaches_nothing(self.distils):
            return ZERO_VARIANCE
        if self.shares is not None and not self.shares.admits(rollout):
            return OVER_SHARE
        return None

    def hand_out(self, rollouts: list[Rollout]) -> None:
        """Counts rollouts that the trainer gets now."""
        self.accounting.trained += len(rollouts)
        self._update_state()
        now = time.time()
        for rollout in rollouts:
            self._staleness.append(rollout.staleness)
            environment = rollout.environment or rollout.env_id
            self._environments.append(environment)
            seconds = now - rollout.arrived
            self._queue_seconds.append(seconds)

    def _update_state(self) -> None:
        """Sets `state`, which a checkpoint saves, to this moment."""
        accounting = self.accounting
        assert accounting.produced == self.cursor, f"{accounting} at {self.cursor}"
        books = {
            "trained": accounting.trained,
            "dropped": dict(accounting.dropped),  # Transformers cannot copy a Counter
            "lost_with_api": accounting.lost_with_api,
        }
        self.state: dict[str, Any] = {
            "cursor": self.cursor,
            "books": books,
            "lineage": self.policy_branches,
        }

    def metrics(self) -> dict[str, float]:
        """Returns the counts since the last call, see `AtroposSource.metrics`."""
        metrics = {}
        for reason, count in self.dropped.items():
            metrics[f"rollouts/dropped_{reason}"] = float(count)
        handed_out = len(self._staleness)
        dropped = self.dropped.total()
        total = handed_out + dropped
        if total:
            metrics["rollouts/share_dropped"] = dropped / total
        if handed_out:
            metrics |= self._metrics_of_handed_out()
        self.dropped = Counter()
        self._staleness = []
        self._environments = []
        self._queue_seconds = []
        return metrics

    def _metrics_of_handed_out(self) -> dict[str, float]:
        metrics = {"rollouts/queue_seconds": fmean(self._queue_seconds)}
        known = [steps for steps in self._staleness if steps is not None]
        unknown = self._staleness.count(None)
        metrics["rollouts/share_unknown_version"] = unknown / len(self._staleness)
        if known:
            metrics["rollouts/staleness_mean"] = fmean(known)
            metrics["rollouts/staleness_max"] = float(max(known))
        counts = Counter(self._environments)
        del counts[None]  # of rollouts for which the API sent no number
        self._known_environments |= counts.keys()
        for name in self._known_environments:
            metrics[f"rollouts/rows_env_{name}"] = float(counts[name])
        return metrics
