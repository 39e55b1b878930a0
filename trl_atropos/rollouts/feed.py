"""Gets rollouts from the API and has them ready for the trainer, in a thread.

The thread of `Feed` carries each batch along one line: it pulls the batch from the API (`pull.py`),
makes rollouts of it (`intake.py`), has the servers tell which policy versions sampled them
(`versions.py`), and writes them to disk (`spool.py`). Then it reads the rollouts back, oldest
first, into a queue: nothing is handed out that is not on disk.

The trainer's thread calls `Feed.take`, which goes through the queue and takes the rollouts that
`selection.py` admits. `AtroposSource` (`source.py`) builds the feed.
"""

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, replace

from trl_atropos.errors import RolloutError
from trl_atropos.rollouts.deliveries import Arrival
from trl_atropos.rollouts.diagnosis import Batch
from trl_atropos.rollouts.drop_reasons import LOST_IN_DELIVERY, REJECTED
from trl_atropos.rollouts.intake import Intake
from trl_atropos.rollouts.pull import BatchPuller
from trl_atropos.rollouts.rollout import Rollout
from trl_atropos.rollouts.selection import Selection
from trl_atropos.rollouts.spool import FileHeader, Spool, oldest_cursor
from trl_atropos.rollouts.versions import VersionBook

logger = logging.getLogger(__name__)

CLOSE_GRACE = 0.5  # seconds
GIGABYTE = 1e9


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
        prefetch: rollouts to have ready while nobody waits for any.
    """

    puller: BatchPuller
    intake: Intake
    versions: VersionBook
    spool: Spool
    selection: Selection
    output_dir: str
    saves: bool
    prefetch: int

    def __post_init__(self):
        self.thread = threading.Thread(target=self._run, name="rollouts", daemon=True)
        self.gate = self.puller.gate
        self.diagnosis = self.puller.diagnosis
        self._position = self.selection.cursor  # index of the first rollout that is not loaded
        self._reported_full = False
        # Both threads use what follows, and hold `_changed` to do so.
        self._changed = threading.Condition()
        # Rollouts, each with the header of its file. An entry without a rollout stands before those
        # of a file, or in place of lost ones: there, the accounting gets what the header counts.
        self._queue: deque[tuple[FileHeader, Rollout | None]] = deque()
        self._ready = 0  # rollouts in the queue
        self._wanted = 0  # rollouts that somebody waits for
        self._stopping = False
        self._error: BaseException | None = None
        self._selected: list[Rollout] = []  # what `take` will hand out; only `take` uses it

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
        self._want(self.gate.batch_size)

    def metrics(self) -> dict[str, float]:
        """Returns the counts since the last call, see `AtroposSource.metrics`."""
        metrics = self.selection.metrics() | self.intake.metrics()
        metrics |= self.versions.sessions.metrics()
        metrics["rollouts/waiting_rows"] = float(self._ready)
        return metrics

    def stop(self) -> None:
        """Ends the thread. A `GET /batch` in flight first gets some time, because aborting it loses
        a batch."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self.thread.is_alive():
            self.thread.join(CLOSE_GRACE)
        if self.thread.is_alive():
            self.puller.client.abort()
            self.thread.join(CLOSE_GRACE)

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
        return self._ready >= max(self._wanted, self.prefetch)

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
        dropped = header.dropped
        rollouts: list[Rollout] = []
        if arrival.batch is not None:
            rollouts, dropped = self._admit(arrival.batch, header)
            self.versions.tag(rollouts)
            self.versions.sessions.read()
            if self.selection.shares is not None:
                env_ids = {rollout.env_id for rollout in rollouts}
                self.selection.shares.note(env_ids - {None})
        header = replace(
            header,
            dropped=dropped,
            policy_branches=self.selection.policy_branches,
            version=self.selection.policy_version(),
        )
        self.spool.append(header, rollouts)
        if self.spool.excess() > 0:
            self._trim()

    def _admit(self, batch: Batch, header: FileHeader) -> tuple[list[Rollout], dict[str, int]]:
        """Returns the usable rollouts of a batch, and the number of the others by reason."""
        total_before = self.intake.total_dropped
        # Groups are numbered from their batch's start: no other batch has these numbers.
        names = self.diagnosis.names()
        rollouts = self.intake.admit(batch, names, first_group=header.start)
        dropped = self.intake.total_dropped - total_before
        # The rest are of groups that are unreadable: the intake does not know how many they have.
        num_unreadable = header.size - len(rollouts) - dropped.total()
        if num_unreadable:
            dropped[REJECTED] += num_unreadable
        return rollouts, dict(dropped)

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
