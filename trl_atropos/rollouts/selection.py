"""Which of the spooled rows are trained: `AtroposSource.poll` takes them here, in order. The books are kept here."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from trl_atropos.rollouts.advantages import teaches_nothing
from trl_atropos.rollouts.books import STALE, ZERO_VARIANCE, Books
from trl_atropos.rollouts.feed import Feed
from trl_atropos.rollouts.lineage import Lineage
from trl_atropos.rollouts.schema import Row
from trl_atropos.rollouts.shares import OVER_SHARE, Shares
from trl_atropos.rollouts.spool import Part


@dataclass(frozen=True)
class Rules:
    """What rows must be to be trained."""

    max_staleness: int | None  # versions; None = any
    replace_zero_variance_groups: bool
    policy_version: Callable[[], int]  # that a row taken now is trained at
    shares: Shares | None = None  # of the environments, where their weights are to hold
    distils: bool = False  # whether a teacher that a row brings is learned from


class Selection:
    """
    Args:
        feed: where rows come from.
        cursor: index of the first row that has not been handed out; what comes before is in `books`.
        lineage: the path of this run, to tell the age of rows.
    """

    def __init__(self, feed: Feed, rules: Rules, lineage: Lineage, books: Books, cursor: int):
        self._feed = feed
        self._rules = rules
        self._lineage = lineage
        self._books = books
        self._cursor = cursor
        self._selected: list[Row] = []  # passed, and not handed out yet
        self._state: dict[str, Any] = {}
        self._snapshot()
        self._clear()

    # ---------------------------------------------------------------------------------------------------------- taking

    def take(self, num_rows: int, timeout: float) -> list[Row] | None:
        """Exactly `num_rows` rows, or None when there were not that many within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        with self._feed.changed:
            try:
                while not self._select(num_rows):
                    self._feed.ask(num_rows - len(self._selected))
                    remaining = deadline - time.monotonic()
                    if remaining <= 0:
                        return None
                    self._feed.wait(remaining)
            finally:
                self._feed.ask(0)
        rows, self._selected = self._selected, []
        self._books.trained += len(rows)
        self._snapshot()
        self._measure(rows)
        return rows

    def _select(self, num_rows: int) -> bool:
        """Pass over rows until there are enough. What is dropped is dropped for good: it only grows older."""
        queue, now = self._feed.queue, self._rules.policy_version()
        while queue:
            loaded = queue[0]
            if not loaded.booked:
                self._book(loaded.part)
                loaded.booked = True
            born = Lineage.from_json(loaded.part.lineage)
            while loaded.rows and len(self._selected) < num_rows:
                row = loaded.rows.popleft()
                self._feed.usable -= 1
                self._cursor += 1
                reason = self._useless(row, born, loaded.part.version, now)
                if reason is None:
                    self._selected.append(row)
                else:
                    self._books.dropped[reason] += 1
                    self._dropped[reason] += 1
            if loaded.rows:
                break
            queue.popleft()
        return len(self._selected) >= num_rows

    def _book(self, part: Part) -> None:
        self._books.dropped.update(part.dropped)
        self._books.lost_with_api += part.lost_with_api
        self._dropped.update(part.dropped)
        self._cursor += part.missing

    def _useless(self, row: Row, born: Lineage, heard_at: int, now: int) -> str | None:
        """Why a row is not to be trained, if it is not. It was pulled on path `born`, at version `heard_at`."""
        oldest = self._rules.max_staleness
        row_age = self._age(row, born, heard_at, now)
        if oldest is not None and row_age is not None and row_age > oldest:
            return STALE
        if self._rules.replace_zero_variance_groups and teaches_nothing(row, self._rules.distils):
            return ZERO_VARIANCE
        if self._rules.shares is not None and not self._rules.shares.admits(row):
            return OVER_SHARE
        if row_age is None:
            self._unknown += 1
        else:
            self._ages.append(row_age)
        return None

    def _age(self, row: Row, born: Lineage, heard_at: int, now: int) -> int | None:
        """Optimizer steps since the oldest version that sampled it, None if that is unknown."""
        if row.policy_version is None:
            return None
        path = born.seen(row.policy_version, heard_at)
        return path.distance(row.policy_version, self._lineage, now)

    # ----------------------------------------------------------------------------------------------------------- books

    def state(self) -> dict[str, Any]:
        """Cursor, books and path as of the rows handed out so far."""
        return self._state

    def _snapshot(self) -> None:
        assert self._books.produced == self._cursor, f"{self._books} at {self._cursor}"
        self._state = {
            "cursor": self._cursor,
            "books": self._books.as_json(),
            "lineage": self._lineage.as_json(),
        }

    # --------------------------------------------------------------------------------------------------------- metrics

    def _clear(self) -> None:
        self._dropped: Counter[str] = Counter()
        self._ages: list[int] = []
        self._unknown = 0
        self._handed = 0
        self._waited = 0.0
        self._environments: Counter[str | int | None] = Counter()  # by name, or by number

    def _measure(self, rows: list[Row]) -> None:
        now = time.monotonic()
        self._handed += len(rows)
        self._waited += sum(now - row.arrived for row in rows)
        self._environments.update(row.environment or row.env_id for row in rows)

    def dropped(self, reason: str) -> int:
        """Rows dropped since the last `metrics()`."""
        return self._dropped[reason]

    def metrics(self) -> dict[str, float]:
        """See `AtroposSource.metrics`."""
        metrics = {f"rollouts/dropped_{reason}": float(count) for reason, count in self._dropped.items()}
        dropped = self._dropped.total()
        if self._handed + dropped:
            metrics["rollouts/share_dropped"] = dropped / (self._handed + dropped)
        if self._handed:
            metrics["rollouts/queue_seconds"] = self._waited / self._handed
        known = len(self._ages)
        if known:
            metrics["rollouts/staleness_mean"] = float(np.mean(self._ages))
            metrics["rollouts/staleness_max"] = float(max(self._ages))
        if known + self._unknown:
            metrics["rollouts/share_unknown_version"] = self._unknown / (known + self._unknown)
        for environment, count in self._environments.items():
            if environment is not None:
                metrics[f"rollouts/rows_env_{environment}"] = float(count)
        self._clear()
        return metrics
