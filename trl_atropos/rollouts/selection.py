"""From the API to rollouts that are ready for the trainer: `Feed` gets them, and `Selection`
decides which are trained.

The thread of `Feed` carries each batch along one line: it pulls the batch from the API (`pull.py`),
makes rollouts of it (`intake.py`), has the servers tell which policy versions sampled them
(`versions.py`), and writes them to disk (`spool.py`). Then it reads the rollouts back, oldest
first, into a queue: nothing is handed out that is not on disk.

The trainer's thread calls `Feed.take`, which goes through the queue. `Selection` drops rollouts
that are too old, teach nothing, or are ahead of their environment's share, and `Accounting` counts
what became of each.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from trl_atropos.errors import RolloutError
from trl_atropos.rollouts.api import ApiUnreachable, AtroposClient, ReplyLost
from trl_atropos.rollouts.deliveries import Arrival
from trl_atropos.rollouts.drop_reasons import (
    LOST_IN_DELIVERY,
    OVER_SHARE,
    REJECTED,
    STALE,
    ZERO_VARIANCE,
)
from trl_atropos.rollouts.intake import Intake
from trl_atropos.rollouts.pull import BatchPuller
from trl_atropos.rollouts.rollout import Rollout, staleness
from trl_atropos.rollouts.spool import FileHeader, Spool, oldest_cursor
from trl_atropos.rollouts.versions import VersionBook

logger = logging.getLogger(__name__)

CLOSE_GRACE = 0.5  # seconds
GIGABYTE = 1e9
REFRESH = 10.0  # seconds after which the environments' weights are asked for again
FORGET = 120.0  # seconds without a rollout after which an environment no longer counts


@dataclass
class Accounting:
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
        self._last_refresh = 0.0
        self._weights: dict[int, float] = {}  # replaced as a whole, because another thread reads it
        self._counted: set[int] = set()  # the environments of which `_trained` counts rollouts
        self._trained: Counter[int] = Counter()
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
        if is_fresh and set(active) == self._weights.keys():
            return
        with suppress(ApiUnreachable, ReplyLost):  # the next pull finds out what is wrong
            weights = {}
            for env_id in active:
                status = self.client.environment(env_id)
                if status is not None:
                    weights[env_id] = status.env_weight
            self._weights = weights
            self._last_refresh = now

    def admits(self, rollout: Rollout) -> bool:
        """Returns whether a rollout may be trained now: all of a group, or none. Called for every
        rollout, in order."""
        weights = self._weights
        env_id = rollout.env_id
        if env_id not in weights:
            return True
        # An environment joined or left: earlier shares say nothing.
        if weights.keys() != self._counted:
            self._counted = set(weights)
            self._trained.clear()
        if rollout.group != self._group:
            due = self._trained.total() * weights[env_id] / sum(weights.values())
            ahead = self._trained[env_id] - due
            self._group = rollout.group
            self._group_is_admitted = ahead < self.slack
        if self._group_is_admitted:
            self._trained[env_id] += 1
        return self._group_is_admitted


@dataclass(eq=False)
class Selection:
    """
    Decides of each rollout whether it is trained, and counts it.

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
        # Of each rollout handed out since then.
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
        self.cursor += header.missing

    def admits(self, rollout: Rollout, header: FileHeader, version: int) -> bool:
        """Returns whether a rollout is trained, at policy version `version`. What is dropped stays
        dropped: it only grows older."""
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
        is_known = self.max_staleness is not None and rollout.staleness is not None
        if is_known and rollout.staleness > self.max_staleness:
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
            self._environments.append(rollout.environment or rollout.env_id)
            self._queue_seconds.append(now - rollout.arrived)

    def _update_state(self) -> None:
        """Sets `state`, which a checkpoint saves, to this moment."""
        assert self.accounting.produced == self.cursor, f"{self.accounting} at {self.cursor}"
        accounting = vars(self.accounting) | {
            "dropped": dict(self.accounting.dropped)  # Transformers cannot copy a Counter
        }
        self.state: dict[str, Any] = {
            "cursor": self.cursor,
            "books": accounting,
            "lineage": self.policy_branches,
        }

    def metrics(self) -> dict[str, float]:
        """Returns the counts since the last call, see `AtroposSource.metrics`."""
        metrics = {}
        for reason, count in self.dropped.items():
            metrics[f"rollouts/dropped_{reason}"] = float(count)
        handed_out = len(self._staleness)
        dropped = self.dropped.total()
        if handed_out + dropped:
            metrics["rollouts/share_dropped"] = dropped / (handed_out + dropped)
        if handed_out:
            metrics |= self._metrics_of_handed_out(handed_out)
        self.dropped = Counter()
        self._staleness = []
        self._environments = []
        self._queue_seconds = []
        return metrics

    def _metrics_of_handed_out(self, handed_out: int) -> dict[str, float]:
        metrics = {"rollouts/queue_seconds": fmean(self._queue_seconds)}
        known = [steps for steps in self._staleness if steps is not None]
        metrics["rollouts/share_unknown_version"] = (handed_out - len(known)) / handed_out
        if known:
            metrics["rollouts/staleness_mean"] = fmean(known)
            metrics["rollouts/staleness_max"] = float(max(known))
        counts = Counter(self._environments)
        del counts[None]  # the API sent no number
        self._known_environments |= counts.keys()
        for name in self._known_environments:
            metrics[f"rollouts/rows_env_{name}"] = float(counts[name])
        return metrics


@dataclass(eq=False)
class Feed:
    """
    Owns the thread, which the first `take` starts, and everything that the thread uses.

    Args:
        puller: pulls batches.
        intake: makes rollouts of them.
        versions: knows which policy versions sampled them.
        spool: where they are written.
        selection: decides which of them are trained.
        output_dir: where the checkpoints are that need the spool.
        saves: the run saves checkpoints.
        batch_size: rollouts per generation batch.
        ahead: rollouts to have ready while nobody waits for any.
    """

    puller: BatchPuller
    intake: Intake
    versions: VersionBook
    spool: Spool
    selection: Selection
    output_dir: str
    saves: bool
    batch_size: int
    ahead: int

    def __post_init__(self):
        self.thread = threading.Thread(target=self._run, name="rollouts", daemon=True)
        self.gate = self.puller.gate
        self.diagnosis = self.puller.diagnosis
        self._position = self.selection.cursor  # index of the first rollout that is not loaded
        self._reported_full = False
        # Both threads use what follows, and hold `_changed` to do so.
        self._changed = threading.Condition()
        # Rollouts with the header of their file. Before those of a file, or in place of lost ones,
        # stands None: there, the accounting gets what the file counts as dropped or lost.
        self._queue: deque[tuple[FileHeader, Rollout | None]] = deque()
        self._ready = 0  # rollouts in the queue
        self._wanted = 0  # rollouts that somebody waits for
        self._stopping = False
        self._error: BaseException | None = None
        self._selected: list[Rollout] = []  # only `take` uses it: to be handed out

    # ---------------------------------------------------------- called by the trainer's thread

    def join(self, *, reset: bool) -> None:
        """Becomes the API's trainer, before the thread starts. Raises as `api.join` does."""
        for arrival in self.puller.join(reset=reset):
            self._keep(arrival)

    def take(self, num_rollouts: int, timeout: float) -> list[Rollout] | None:
        """Returns exactly `num_rollouts` rollouts, or None if there were not that many within
        `timeout` seconds. Raises what has ended the thread."""
        if self.thread.ident is None:
            self.thread.start()
        deadline = time.monotonic() + timeout
        with self._changed:
            try:
                while not self._select(num_rollouts):
                    self._want(num_rollouts - len(self._selected))
                    remaining = deadline - time.monotonic()
                    if remaining <= 0:
                        return None
                    if self._error is not None:
                        raise self._error
                    self._changed.wait(remaining)
            finally:
                self._want(0)
        rollouts = self._selected
        self._selected = []
        self.selection.hand_out(rollouts)
        return rollouts

    def _select(self, num_rollouts: int) -> bool:
        """Goes through the queue until enough rollouts are selected. Returns whether they are."""
        version = self.selection.policy_version()
        while self._queue:
            header, rollout = self._queue[0]
            if rollout is not None and len(self._selected) >= num_rollouts:
                break
            self._queue.popleft()
            if rollout is None:
                self.selection.count_missing(header)
                continue
            self._ready -= 1
            if self.selection.admits(rollout, header, version):
                self._selected.append(rollout)
        return len(self._selected) >= num_rollouts

    def _want(self, num_rollouts: int) -> None:
        with self._changed:
            self._wanted = num_rollouts
            self._changed.notify_all()

    def note_new_policy(self) -> None:
        """Gets the next batch ready, because the policy is new: what is sampled from now on is of
        the version at which it is trained, or newer."""
        self.gate.policy_is_new = True
        self._want(self.batch_size)

    def metrics(self) -> dict[str, float]:
        """Returns the counts since the last call, see `AtroposSource.metrics`."""
        metrics = self.selection.metrics() | self.intake.metrics()
        metrics["rollouts/waiting_rows"] = float(self._ready)
        return metrics

    def stop(self) -> None:
        """Ends the thread, and lets in the requests that wait. A `GET /batch` in flight first gets
        some time, because aborting it loses a batch."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self.thread.is_alive():
            self.thread.join(CLOSE_GRACE)
        if self.thread.is_alive():
            self.puller.client.abort()
            self.thread.join(CLOSE_GRACE)
        self.gate.release()

    # --------------------------------------------------------------------- the feed's thread

    def _run(self) -> None:
        try:
            self.diagnosis.note_demand()
            while self._wait_for_demand():
                waiting = max(0, self.spool.end - self.selection.cursor)
                self.gate.admit_next_batch(waiting)
                if self._has_enough():
                    continue
                if not self._load_next():
                    self._pull()
        except BaseException as error:  # noqa: BLE001 - whatever it is, `take` raises it in the trainer
            with self._changed:
                self._error = error
                self._changed.notify_all()
        try:
            for arrival in self.puller.place_last():
                self._keep(arrival)
        # for example a full disk, which `_error` may have reported already
        except RolloutError as error:
            logger.warning("%s", error)

    def _wait_for_demand(self) -> bool:
        """Waits until more rollouts are wanted, or the policy is new. Returns False when the thread
        shall end."""
        with self._changed:
            while not (self._stopping or self.gate.policy_is_new) and self._has_enough():
                self._changed.wait()
                self.diagnosis.note_demand()
            return not self._stopping

    def _has_enough(self) -> bool:
        return self._ready >= max(self._wanted, self.ahead)

    def _pull(self) -> None:
        """Pulls once, and waits as long as the puller asks for."""
        for arrival in self.puller.pull():
            self._keep(arrival)
        if self.puller.pause:
            with self._changed:
                if not self._stopping:
                    self._changed.wait(self.puller.pause)

    def _keep(self, arrival: Arrival) -> None:
        """Makes rollouts of what came, and puts them into the spool. Nothing of it is handed out
        before this returns."""
        header = arrival.header
        dropped = Counter(header.dropped)
        rollouts: list[Rollout] = []
        if arrival.batch is not None:
            total_before = self.intake.total_dropped
            # Groups are numbered from their batch's start: no other batch has these numbers.
            rollouts = self.intake.admit(
                arrival.batch, self.diagnosis.names(), first_group=header.start
            )
            dropped = self.intake.total_dropped - total_before
            # The intake cannot count the rollouts of a group that is unreadable. The size of the
            # batch is known.
            num_unreadable = header.size - len(rollouts) - dropped.total()
            dropped[REJECTED] += num_unreadable
            self.versions.tag(rollouts)
            if self.selection.shares is not None:
                env_ids = {rollout.env_id for rollout in rollouts}
                self.selection.shares.note(env_ids - {None})
        header = replace(
            header,
            dropped={reason: count for reason, count in dropped.items() if count},
            policy_branches=self.selection.policy_branches,
            version=self.selection.policy_version(),
        )
        self.spool.append(header, rollouts)
        if self.spool.excess() > 0:
            self._trim()

    def _trim(self) -> None:
        """Removes the oldest files that no checkpoint needs, because the spool is too large."""
        floor = oldest_cursor(self.output_dir, self.spool.name)
        if floor is None:
            floor = 0
            # A run that never saves cannot resume, and needs nothing that it has been trained on.
            if not self.saves:
                floor = self.selection.state["cursor"]
        if self.spool.trim(floor) or self._reported_full:
            return
        self._reported_full = True
        message = (
            "The rollouts in %s take more than `max_spool_gb` (%g), and none can be removed "
            "before they are in a checkpoint. Save more often (`save_steps`), keep fewer "
            "checkpoints (`save_total_limit`) or raise it."
        )
        logger.warning(message, self.spool.folder, self.spool.max_bytes / GIGABYTE)

    def _load_next(self) -> bool:
        """Appends the next file to the queue. Returns False if there is none, or if something older
        may still come."""
        header = self.spool.next_header(self._position, self.puller.deliveries.complete_until)
        if header is None:
            return False
        position = self._position
        entries: list[tuple[FileHeader, Rollout | None]] = []
        if header.start > position:
            size = header.start - position
            message = "A file of %d rollouts is missing in %s: they are lost."
            logger.warning(message, size, self.spool.folder)
            entries.append((_gap(header, position, size), None))
        rollouts = []
        try:
            for rollout in self.spool.read(header):
                if rollout.index >= position:
                    rollouts.append(rollout)
            # Otherwise the checkpoint's accounting has what the file counts.
            if header.start >= position:
                entries.append((header, None))
        except RolloutError as error:
            begin = max(header.start, position)
            size = header.end - begin
            logger.warning("%s Its %d rollouts are lost.", error, size)
            entries.append((_gap(header, begin, size), None))
        entries += [(header, rollout) for rollout in rollouts]
        with self._changed:
            self._position = header.end
            self._queue += entries
            self._ready += len(rollouts)
            self._changed.notify_all()
        return True


def _gap(header: FileHeader, start: int, size: int) -> FileHeader:
    """Returns the header of rollouts that cannot be handed out any more, at the file of `header` or
    right before it."""
    return FileHeader(start, size, header.delivery, dropped={LOST_IN_DELIVERY: size})
