"""The thread that fetches rollouts while the trainer computes: batches into the spool, and rows out of it, in order.

`AtroposSource` starts one and takes rows from it. Nothing is handed out that was not read back from the disk.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from trl_atropos.errors import RolloutError
from trl_atropos.rollouts.delivery import LOST_IN_DELIVERY, Arrival
from trl_atropos.rollouts.pull import BatchPuller
from trl_atropos.rollouts.schema import Row
from trl_atropos.rollouts.spool import Part, Spool

logger = logging.getLogger(__name__)


@dataclass
class Loaded:
    """A file of the spool and those of its rows that are still to be handed out."""

    part: Part
    rows: deque[Row]
    booked: bool = False  # whether what it counts as dropped or lost is in the books


class Feed(threading.Thread):
    """
    Args:
        puller: joined to its API.
        spool: what is in it from `begin` on is handed out first.
        keep: puts an arrival into the spool.
        begin: index of the first row to hand out.
        ahead: rows to have ready while nobody waits for any.

    `queue` holds what is loaded, oldest first; it and `usable` belong to whoever holds `changed`.
    """

    def __init__(self, puller: BatchPuller, spool: Spool, keep: Callable[[Arrival], None], *, begin: int, ahead: int):
        super().__init__(name="rollouts", daemon=True)
        self.changed = threading.Condition()
        self.queue: deque[Loaded] = deque()
        self.usable = 0  # rows in the queue that have not been found useless
        self._puller = puller
        self._spool = spool
        self._keep = keep
        self._position = begin
        self._ahead = ahead
        self._wanted = 0
        self._stopping = False
        self._error: BaseException | None = None

    # ---------------------------------------------------------------------------------------------- the trainer's side

    def ask(self, num_rows: int) -> None:
        """Somebody waits for that many usable rows, or (0) for none. Call with `changed` held."""
        self._wanted = num_rows
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

    # ---------------------------------------------------------------------------------------------- the thread's side

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
        """Until more rows are wanted. Returns False when the thread shall end."""
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
            loaded = [self._gap(part, self._position, size)]
        try:
            rows = deque(row for row in self._spool.read(part) if row.index >= self._position)
            loaded.append(Loaded(part, rows, booked=part.start < self._position))
        except RolloutError as error:
            rows, begin = deque(), max(part.start, self._position)
            logger.warning("%s Its %d rollouts are lost.", error, part.end - begin)
            loaded.append(self._gap(part, begin, part.end - begin))
        with self.changed:
            self._position = part.end
            self.queue += loaded
            self.usable += len(rows)
            self.changed.notify_all()
        return True

    def _gap(self, part: Part, start: int, size: int) -> Loaded:
        """Rows that cannot be handed out any more, at `part` or right before it."""
        return Loaded(Part(start, size, part.region, {LOST_IN_DELIVERY: size}), deque())

    def _pull(self) -> None:
        for arrival in self._puller.pull():
            self._keep(arrival)
        if self._puller.pause:
            with self.changed:
                if not self._stopping:
                    self.changed.wait(self._puller.pause)
