"""From the spool to the trainer: a thread keeps rollouts ready, and `Selection` takes those that are to be trained.

`AtroposSource.poll` calls `Selection.take`. The thread (`Feed`) pulls batches into the spool while the trainer
computes, and reads rollouts back from it, oldest first: nothing is handed out that does not lie on the disk. What
became of every rollout is counted in `Books`.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trl_atropos.errors import RolloutError
from trl_atropos.rollouts.advantages import teaches_nothing
from trl_atropos.rollouts.api import ApiUnreachable, AtroposClient, ReplyLost
from trl_atropos.rollouts.pull import LOST_IN_DELIVERY, Arrival, BatchPuller
from trl_atropos.rollouts.row import Rollout
from trl_atropos.rollouts.spool import Part, Spool, staleness

logger = logging.getLogger(__name__)

STALE, ZERO_VARIANCE, OVER_SHARE = "stale", "zero_variance", "over_share"
RESUMED_MID_BATCH = "resumed_mid_batch"
REFRESH = 10.0  # seconds after which the environments' weights are asked for again
FORGET = 120.0  # seconds without a rollout after which an environment no longer counts


@dataclass
class Books:
    """
    Rollouts that were handed out, dropped by reason, or lost with an API that was restarted. Their sum is the number
    that was produced up to the last one handed out: each was trained once, or is in one of the other counts.
    """

    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    lost_with_api: int = 0

    @property
    def produced(self) -> int:
        return self.trained + self.dropped.total() + self.lost_with_api

    def unfinished(self, rollouts: int) -> None:
        """Rollouts that were handed out, and not trained before the checkpoint from which the run goes on."""
        self.trained -= rollouts
        if rollouts:
            self.dropped[RESUMED_MID_BATCH] += rollouts

    def as_json(self) -> dict[str, Any]:
        return {"trained": self.trained, "dropped": dict(self.dropped), "lost_with_api": self.lost_with_api}

    @classmethod
    def from_json(cls, books: dict[str, Any]) -> "Books":
        return cls(books["trained"], Counter(books["dropped"]), books["lost_with_api"])


@dataclass
class Loaded:
    """A file of the spool and those of its rollouts that are still to be handed out."""

    part: Part
    rollouts: deque[Rollout]
    booked: bool = False  # whether what it counts as dropped or lost is in the books


class Feed(threading.Thread):
    """
    Args:
        puller: joined to its API.
        spool: what is in it from `begin` on is handed out first.
        keep: puts an arrival into the spool.
        begin: index of the first rollout to hand out.
        ahead: rollouts to have ready while nobody waits for any.

    `queue` holds what is loaded, oldest first; it and `usable` belong to whoever holds `changed`.
    """

    def __init__(self, puller: BatchPuller, spool: Spool, keep: Callable[[Arrival], None], *, begin: int, ahead: int):
        super().__init__(name="rollouts", daemon=True)
        self.changed = threading.Condition()
        self.queue: deque[Loaded] = deque()
        self.usable = 0  # rollouts in the queue that have not been found useless
        self._puller = puller
        self._spool = spool
        self._keep = keep
        self._position = begin
        self._ahead = ahead
        self._wanted = 0
        self._stopping = False
        self._error: BaseException | None = None

    def ask(self, num_rollouts: int) -> None:
        """Somebody waits for that many usable rollouts, or (0) for none. Call with `changed` held."""
        self._wanted = num_rollouts
        self.changed.notify_all()

    def wait(self, timeout: float) -> None:
        """Until there is something new. Call with `changed` held. Raises what ended the thread, if anything did."""
        if self._error is not None:
            raise self._error
        self.changed.wait(timeout)

    def stop(self, grace: float, abort: Callable[[], None]) -> None:
        """Ends the thread. A request under way gets `grace` seconds first, because giving up on one loses a batch."""
        with self.changed:
            self._stopping = True
            self.changed.notify_all()
        if not self.is_alive():
            return
        self.join(grace)
        if self.is_alive():
            abort()
            self.join(grace)

    # ------------------------------------------------------------------------------------------------- in the thread

    def run(self) -> None:
        try:
            while self._wait_for_demand():
                if not self._load_next():
                    self._pull()
        except BaseException as error:  # noqa: BLE001 - whatever it is, `wait` raises it in the trainer
            with self.changed:
                self._error = error
                self.changed.notify_all()
        try:
            for arrival in self._puller.give_back():
                self._keep(arrival)
        except RolloutError as error:  # the disk is full, say: `_error` told of it, if anybody is there to hear
            logger.warning("%s", error)

    def _wait_for_demand(self) -> bool:
        """Until more rollouts are wanted. Returns False when the thread shall end."""
        with self.changed:
            while not self._stopping and self.usable >= max(self._wanted, self._ahead):
                self.changed.wait()
            return not self._stopping

    def _load_next(self) -> bool:
        """Append the next file to the queue, if it is there and nothing older can come any more."""
        part = self._spool.next_part(self._position, self._puller.complete_until)
        if part is None:
            return False
        loaded = []
        if part.start > self._position:
            size = part.start - self._position
            logger.warning("A file of %d rollouts is missing in %s: they are lost.", size, self._spool.folder)
            loaded = [_gap(part, self._position, size)]
        try:
            rollouts = deque(one for one in self._spool.read(part) if one.index >= self._position)
            loaded.append(Loaded(part, rollouts, booked=part.start < self._position))
        except RolloutError as error:
            rollouts, begin = deque(), max(part.start, self._position)
            logger.warning("%s Its %d rollouts are lost.", error, part.end - begin)
            loaded.append(_gap(part, begin, part.end - begin))
        with self.changed:
            self._position = part.end
            self.queue += loaded
            self.usable += len(rollouts)
            self.changed.notify_all()
        return True

    def _pull(self) -> None:
        for arrival in self._puller.pull():
            self._keep(arrival)
        if self._puller.pause:
            with self.changed:
                if not self._stopping:
                    self.changed.wait(self._puller.pause)


def _gap(part: Part, start: int, size: int) -> Loaded:
    """Rollouts that cannot be handed out any more, at `part` or right before it."""
    return Loaded(Part(start, size, part.region, {LOST_IN_DELIVERY: size}), deque())


class Shares:
    """
    Keeps what is trained in the proportion of the environments' weights, which the Atropos API does not do.

    The API tells an environment its weight, and the environment limits by it how many requests it has at the inference
    server at once. Where that is no limit, as with short rollouts or fast servers, two environments of weights 1 and 3
    deliver alike. `min_batch_allocation` does not hold either: one group meets it. So rollouts of an environment that
    is ahead of its share are passed over. To waste fewer, have such environments sample less
    (`--env.max_num_workers`).

    Args:
        client: asks for the weights, in the thread that pulls.
        slack: rollouts by which an environment may be ahead, for those that deliver in bursts.
    """

    def __init__(self, client: AtroposClient, slack: int):
        self._client = client
        self._slack = slack
        self._last_seen: dict[int, float] = {}
        self._asked = 0.0
        self._weights: dict[int, float] = {}  # replaced as a whole: another thread reads it
        self._counted: tuple[int, ...] = ()  # environments that the counts are about
        self._taken: Counter[int] = Counter()
        self._group = (-1, True)  # the group of the latest rollout, and what was decided of it

    def note(self, env_ids: set[int]) -> None:
        """Rollouts of these environments came in: have their weights at hand. Called by the thread that pulls."""
        now = time.monotonic()
        self._last_seen |= dict.fromkeys(env_ids, now)
        active = [env_id for env_id, seen in self._last_seen.items() if now - seen < FORGET]
        if set(active) == set(self._weights) and now - self._asked < REFRESH:
            return
        try:
            states = {env_id: self._client.environment(env_id) for env_id in active}
        except (ApiUnreachable, ReplyLost):
            return  # the pull finds out what is wrong
        self._asked = now
        self._weights = {env_id: state.env_weight for env_id, state in states.items() if state is not None}

    def admits(self, rollout: Rollout) -> bool:
        """Whether a rollout may be trained now: all of a group, or none. Called for every rollout, in order."""
        weights, env_id = self._weights, rollout.env_id
        if env_id not in weights:
            return True
        if tuple(sorted(weights)) != self._counted:  # one came or went: what was before says nothing of the shares
            self._counted = tuple(sorted(weights))
            self._taken.clear()
        if rollout.group != self._group[0]:
            ahead = self._taken[env_id] - self._taken.total() * weights[env_id] / sum(weights.values())
            self._group = (rollout.group, ahead < self._slack)
        if self._group[1]:
            self._taken[env_id] += 1
        return self._group[1]


@dataclass(frozen=True)
class Rules:
    """What rollouts must be to be trained."""

    max_staleness: int | None  # optimizer steps; None = any
    replace_zero_variance_groups: bool
    policy_version: Callable[[], int]  # that a rollout taken now is trained at
    shares: Shares | None = None  # of the environments, where their weights are to hold
    distils: bool = False  # whether a teacher that a rollout brings is learned from


class Selection:
    """
    Args:
        feed: where rollouts come from.
        path: of this run, see `spool.staleness`.
        books: of what comes before `cursor`, the index of the first rollout that has not been handed out.
    """

    def __init__(self, feed: Feed, rules: Rules, path: list[list], books: Books, cursor: int):
        self._feed = feed
        self._rules = rules
        self._path = path
        self._books = books
        self._cursor = cursor
        self._selected: list[Rollout] = []  # passed, and not handed out yet
        self._snapshot()
        self._clear()

    def take(self, num_rollouts: int, timeout: float) -> list[Rollout] | None:
        """Exactly `num_rollouts` rollouts, or None when there were not that many within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        with self._feed.changed:
            try:
                while not self._select(num_rollouts):
                    self._feed.ask(num_rollouts - len(self._selected))
                    remaining = deadline - time.monotonic()
                    if remaining <= 0:
                        return None
                    self._feed.wait(remaining)
            finally:
                self._feed.ask(0)
        rollouts, self._selected = self._selected, []
        self._books.trained += len(rollouts)
        self._snapshot()
        self._handed += len(rollouts)
        self._waited += sum(time.monotonic() - one.arrived for one in rollouts)
        self._environments.update(one.environment or one.env_id for one in rollouts)
        return rollouts

    def _select(self, num_rollouts: int) -> bool:
        """Pass over rollouts until there are enough. What is dropped is dropped for good: it only grows older."""
        queue, now = self._feed.queue, self._rules.policy_version()
        while queue:
            loaded, part = queue[0], queue[0].part
            if not loaded.booked:
                loaded.booked = True
                self._books.dropped.update(part.dropped)
                self._books.lost_with_api += part.lost_with_api
                self._dropped.update(part.dropped)
                self._cursor += part.missing
            while loaded.rollouts and len(self._selected) < num_rollouts:
                rollout = loaded.rollouts.popleft()
                self._feed.usable -= 1
                self._cursor += 1
                rollout.staleness = staleness(rollout.policy_version, part.lineage, part.version, self._path, now)
                reason = self._useless(rollout)
                if reason is None:
                    self._selected.append(rollout)
                    self._ages[rollout.staleness] += 1
                else:
                    self._books.dropped[reason] += 1
                    self._dropped[reason] += 1
            if loaded.rollouts:
                break
            queue.popleft()
        return len(self._selected) >= num_rollouts

    def _useless(self, rollout: Rollout) -> str | None:
        """Why a rollout is not to be trained, if it is not."""
        rules = self._rules
        if None not in (rules.max_staleness, rollout.staleness) and rollout.staleness > rules.max_staleness:
            return STALE
        if rules.replace_zero_variance_groups and teaches_nothing(rollout, rules.distils):
            return ZERO_VARIANCE
        if rules.shares is not None and not rules.shares.admits(rollout):
            return OVER_SHARE
        return None

    def _snapshot(self) -> None:
        assert self._books.produced == self._cursor, f"{self._books} at {self._cursor}"
        self.state = {"cursor": self._cursor, "books": self._books.as_json(), "lineage": self._path}

    # --------------------------------------------------------------------------------------------------------- metrics

    def _clear(self) -> None:
        self._dropped: Counter[str] = Counter()
        self._ages: Counter[int | None] = Counter()
        self._handed = 0
        self._waited = 0.0
        self._environments: Counter[str | int | None] = Counter()  # by name, or by number

    def dropped(self, reason: str) -> int:
        """Rollouts dropped since the last `metrics()`."""
        return self._dropped[reason]

    def metrics(self) -> dict[str, float]:
        """See `AtroposSource.metrics`."""
        metrics = {f"rollouts/dropped_{reason}": float(count) for reason, count in self._dropped.items()}
        dropped = self._dropped.total()
        if self._handed + dropped:
            metrics["rollouts/share_dropped"] = dropped / (self._handed + dropped)
        if self._handed:
            metrics["rollouts/queue_seconds"] = self._waited / self._handed
        if self._ages:
            metrics["rollouts/share_unknown_version"] = self._ages[None] / self._ages.total()
        known = [age for age in self._ages.elements() if age is not None]
        if known:
            metrics["rollouts/staleness_mean"] = float(np.mean(known))
            metrics["rollouts/staleness_max"] = float(max(known))
        for environment, count in self._environments.items():
            if environment is not None:
                metrics[f"rollouts/rows_env_{environment}"] = float(count)
        self._clear()
        return metrics
