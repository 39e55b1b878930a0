"""From the spool to the trainer: `Feed` is a thread that keeps rollouts ready, and takes those that
are to be trained.

The thread pulls batches into the spool while the trainer computes, and reads rollouts back from it,
oldest first: nothing is handed out that is not on disk. `Books` counts what became of every
rollout.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import fmean

from trl_atropos.errors import RolloutError
from trl_atropos.rollouts.api import ApiUnreachable, AtroposClient, ReplyLost
from trl_atropos.rollouts.pull import LOST_IN_DELIVERY, Arrival, BatchPuller
from trl_atropos.rollouts.rollout import Rollout, staleness
from trl_atropos.rollouts.spool import Part, Spool

logger = logging.getLogger(__name__)

STALE = "stale"
ZERO_VARIANCE = "zero_variance"
OVER_SHARE = "over_share"
REFRESH = 10.0  # seconds after which the environments' weights are asked for again
FORGET = 120.0  # seconds without a rollout after which an environment no longer counts


@dataclass
class Books:
    """Numbers of rollouts that were handed out, dropped, or lost with an API that was restarted.
    Their sum is the number that was produced up to the last one handed out: each of those is in
    exactly one of the counts."""

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
        self._last_seen: dict[int, float] = {}
        self._asked = 0.0
        self._weights: dict[int, float] = {}  # replaced as a whole, because another thread reads it
        self._counted: set[int] = set()  # the environments of which `_taken` counts rollouts
        self._taken: Counter[int] = Counter()
        self._group = (-1, True)  # the latest group, and whether it was admitted

    def note(self, env_ids: set[int]) -> None:
        """Rollouts of these environments came in: asks for their weights. Called by the thread that
        pulls."""
        now = time.monotonic()
        self._last_seen |= dict.fromkeys(env_ids, now)
        active = [env_id for env_id, seen in self._last_seen.items() if now - seen < FORGET]
        if set(active) == set(self._weights) and now - self._asked < REFRESH:
            return
        with suppress(ApiUnreachable, ReplyLost):  # the next pull finds out what is wrong
            states = {env_id: self.client.environment(env_id) for env_id in active}
            self._weights = {
                env_id: state.env_weight for env_id, state in states.items() if state is not None
            }
            self._asked = now

    def admits(self, rollout: Rollout) -> bool:
        """Whether a rollout may be trained now: all of a group, or none. Called for every rollout,
        in order."""
        weights = self._weights
        env_id = rollout.env_id
        if env_id not in weights:
            return True
        # an environment joined or left: earlier shares say nothing
        if weights.keys() != self._counted:
            self._counted = set(weights)
            self._taken.clear()
        if rollout.group != self._group[0]:
            ahead = self._taken[env_id] - self._taken.total() * weights[env_id] / sum(
                weights.values()
            )
            self._group = (rollout.group, ahead < self.slack)
        if self._group[1]:
            self._taken[env_id] += 1
        return self._group[1]


@dataclass(eq=False)
class Feed:
    """The thread, which runs `_run`, is started by the first `take`. `state` is for checkpoints: of
    the moment after the last `take`."""

    puller: BatchPuller  # joined to its API
    spool: Spool
    keep: Callable[[Arrival], None]  # puts an arrival into the spool
    reason_to_drop: Callable[[Rollout], str | None]  # why a rollout is not to be trained
    policy_version: Callable[[], int]  # at which a rollout taken now is trained
    path: list[list]  # of this run, see `rollout.staleness`
    books: Books  # of what comes before `cursor`
    cursor: int  # index of the first rollout that has not been handed out
    ahead: int  # rollouts to have ready while nobody waits for any

    def __post_init__(self):
        self.thread = threading.Thread(target=self._run, name="rollouts", daemon=True)
        self._position = self.cursor  # index of the first rollout that is not loaded
        self._changed = threading.Condition()  # held to use the queue and the two counts below it
        # Rollouts with the file that they are in. Before those of a file, or in place of lost ones,
        # comes None: there, the books get what the file counts as dropped or lost.
        self._queue: deque[tuple[Part, Rollout | None]] = deque()
        self._waiting = 0  # rollouts in the queue
        self._wanted = 0  # rollouts that somebody waits for
        self._selected: list[Rollout] = []  # to be handed out
        self._stopping = False
        self._error: BaseException | None = None
        self.dropped: Counter[str] = Counter()  # rollouts by reason, since the last `metrics()`
        # Of each rollout handed out since then: its staleness, its environment, and seconds since
        # it was pulled.
        self._handed: list[tuple[int | None, str | int | None, float]] = []
        # that rollouts came from: without any, the count is 0, not absent
        self._environments: set[str | int] = set()
        self._update_state()

    def _run(self) -> None:
        try:
            self.puller.quiet_since = time.monotonic()
            while self._wait_for_demand():
                self.puller.let_begin(max(0, self.spool.end - self.cursor))
                if self._has_enough():
                    continue
                if not self._load_next():
                    self._pull()
        except BaseException as error:  # noqa: BLE001 - whatever it is, `take` raises it in the trainer
            with self._changed:
                self._error = error
                self._changed.notify_all()
        try:
            for arrival in self.puller.give_back():
                self.keep(arrival)
        # for example a full disk, which `_error` may have reported already
        except RolloutError as error:
            logger.warning("%s", error)

    def _wait_for_demand(self) -> bool:
        """Waits until more rollouts are wanted, or the policy is new. Returns False when the thread
        shall end."""
        with self._changed:
            while not self._stopping and self._has_enough() and not self.puller.policy_is_new:
                self._changed.wait()
                self.puller.quiet_since = time.monotonic()
            return not self._stopping

    def _has_enough(self) -> bool:
        return self._waiting >= max(self._wanted, self.ahead)

    def _load_next(self) -> bool:
        """Appends the next file to the queue, if it is there and nothing older can come any
        more."""
        part = self.spool.next_part(self._position, self.puller.complete_until)
        position = self._position
        if part is None:
            return False
        entries: list[tuple[Part, Rollout | None]] = []
        if part.start > position:
            size = part.start - position
            logger.warning(
                "A file of %d rollouts is missing in %s: they are lost.", size, self.spool.folder
            )
            entries.append((_gap(part, position, size), None))
        try:
            rollouts = [rollout for rollout in self.spool.read(part) if rollout.index >= position]
            # else they are in the books of the checkpoint
            entries += [(part, None)] if part.start >= position else []
            entries += [(part, rollout) for rollout in rollouts]
        except RolloutError as error:
            rollouts = []
            begin = max(part.start, position)
            logger.warning("%s Its %d rollouts are lost.", error, part.end - begin)
            entries.append((_gap(part, begin, part.end - begin), None))
        with self._changed:
            self._position = part.end
            self._queue += entries
            self._waiting += len(rollouts)
            self._changed.notify_all()
        return True

    def _pull(self) -> None:
        for arrival in self.puller.pull():
            self.keep(arrival)
        if self.puller.pause:
            with self._changed:
                if not self._stopping:
                    self._changed.wait(self.puller.pause)

    def ask(self, num_rollouts: int) -> None:
        """Has the thread get that many rollouts ready."""
        with self._changed:
            self._wanted = num_rollouts
            self._changed.notify_all()

    def take(self, num_rollouts: int, timeout: float) -> list[Rollout] | None:
        """Exactly `num_rollouts` rollouts, or None when there were not that many within `timeout`
        seconds."""
        if self.thread.ident is None:
            self.thread.start()
        deadline = time.monotonic() + timeout
        with self._changed:
            try:
                while not self._select(num_rollouts):
                    self.ask(num_rollouts - len(self._selected))
                    remaining = deadline - time.monotonic()
                    if remaining <= 0:
                        return None
                    if self._error is not None:
                        raise self._error
                    self._changed.wait(remaining)
            finally:
                self.ask(0)
        rollouts = self._selected
        self._selected = []
        self.books.trained += len(rollouts)
        self._update_state()
        now = time.time()
        self._handed += [
            (each.staleness, each.environment or each.env_id, now - each.arrived)
            for each in rollouts
        ]
        return rollouts

    def _select(self, num_rollouts: int) -> bool:
        """Goes through the queue until there are enough. What is dropped stays dropped: it only
        grows older."""
        now = self.policy_version()
        while self._queue and (self._queue[0][1] is None or len(self._selected) < num_rollouts):
            part, rollout = self._queue.popleft()
            if rollout is None:
                self.books.dropped.update(part.dropped)
                self.books.lost_with_api += part.lost_with_api
                self.dropped.update(part.dropped)
                self.cursor += part.missing
                continue
            self._waiting -= 1
            self.cursor += 1
            rollout.staleness = staleness(
                rollout.policy_version, part.lineage, part.version, self.path, now
            )
            reason = self.reason_to_drop(rollout)
            if reason is None:
                self._selected.append(rollout)
            else:
                self.books.dropped[reason] += 1
                self.dropped[reason] += 1
        return len(self._selected) >= num_rollouts

    def _update_state(self) -> None:
        assert self.books.produced == self.cursor, f"{self.books} at {self.cursor}"
        # Transformers cannot copy a Counter
        books = vars(self.books) | {"dropped": dict(self.books.dropped)}
        self.state = {"cursor": self.cursor, "books": books, "lineage": self.path}

    def stop(self, grace: float, abort: Callable[[], None]) -> None:
        """Ends the thread. A request in flight first gets `grace` seconds, because aborting it
        loses a batch."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self.thread.is_alive():
            self.thread.join(grace)
        if self.thread.is_alive():
            abort()
            self.thread.join(grace)

    def metrics(self) -> dict[str, float]:
        """See `AtroposSource.metrics`."""
        metrics = {
            f"rollouts/dropped_{reason}": float(count) for reason, count in self.dropped.items()
        }
        metrics["rollouts/waiting_rows"] = float(self._waiting)
        handed = len(self._handed)
        dropped = self.dropped.total()
        if handed + dropped:
            metrics["rollouts/share_dropped"] = dropped / (handed + dropped)
        if handed:
            ages, environments, seconds = zip(*self._handed)
            metrics["rollouts/queue_seconds"] = fmean(seconds)
            metrics["rollouts/share_unknown_version"] = ages.count(None) / handed
            if known := [steps for steps in ages if steps is not None]:
                metrics["rollouts/staleness_mean"] = fmean(known)
                metrics["rollouts/staleness_max"] = float(max(known))
            counts = Counter(name for name in environments if name is not None)
            self._environments |= counts.keys()
            metrics |= {
                f"rollouts/rows_env_{name}": float(counts[name]) for name in self._environments
            }
        self.dropped = Counter()
        self._handed = []
        return metrics


def _gap(part: Part, start: int, size: int) -> Part:
    """Rollouts that cannot be handed out any more, at `part` or right before it."""
    return Part(start, size, part.region, {LOST_IN_DELIVERY: size})
