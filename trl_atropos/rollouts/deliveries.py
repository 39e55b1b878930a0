"""Finds the place of each batch in the order of the run.

`BatchPuller` (`pull.py`) pulls a batch, asks the API for its step, and gives both to
`Deliveries.place`. It gets `Arrival`s back: batches with their place in the run, or places whose
rollouts are lost.

How the API delivers: it cuts its whole queue into batches at once, raises its step by their number,
and hands them out newest first. We call the batches of one cut a *delivery*. For example, with
batches of 4 rollouts, the API finds 12 rollouts in its queue and raises its step from 7 to 10. The
first `GET /batch` returns rollouts 8 to 11 of this delivery, the second 4 to 7, the third 0 to 3.
The API cuts its queue again only when it holds no batch of the last delivery.

It hands out each batch at most once. A batch that was handed out and did not arrive leaves a gap in
its delivery. We find the gap as soon as the API surely holds no batch: when it says so, or when its
step rises.

An HTTP cache before the API may answer with a batch that came before. The API's step reveals this,
because it does not count such a batch.
"""

import hashlib
import logging
import time
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from trl_atropos.rollouts.diagnosis import Batch, Diagnosis
from trl_atropos.rollouts.drop_reasons import LOST_IN_DELIVERY
from trl_atropos.rollouts.spool import Delivery, FileHeader
from trl_atropos.rollouts.wire_values import RejectedGroup

logger = logging.getLogger(__name__)

PROGRESS = 10.0  # seconds between two lines about a long delivery


class Arrival(NamedTuple):
    """A batch and its place in the run, or, if `batch` is None, rollouts that are known to be
    lost."""

    header: FileHeader
    batch: Batch | None


@dataclass(eq=False)
class Deliveries:
    """
    Knows which batch of which delivery comes next.

    Args:
        current: the delivery of the next batch. Its step is the API's when we last asked for it.
        batch_size: rollouts per batch of this run. The run from which it resumes may have had
            another, so `current` may have it, too.
        url: of the API, for messages.
        diagnosis: remembers what came.
    """

    current: Delivery
    batch_size: int
    url: str
    diagnosis: Diagnosis

    def __post_init__(self):
        # Doubts about the API, until it surely holds no batch (`note_empty`).
        self.reply_was_lost = False  # and a batch may have been in it
        self.may_hold_older = False  # batches that its step counted before this run joined
        # Seconds in which batches of a delivery came while older ones of it were still to come.
        self.catching_up = 0.0
        self._fingerprints: set[bytes] = set()  # of the batches that came
        # Equal to a batch that came before, while the API held others of the delivery.
        self._possible_repeats: list[Batch] = []
        self._has_repeated = False  # since the last `pop_repeated`

        # Times, by time.monotonic().
        self._last_placed = 0.0
        self._last_progress = 0.0  # when the log showed progress, or had no need to

        # What the log has said, which it says once.
        self._reported_cache = False
        self._reported_rival = False

    @property
    def complete_until(self) -> int:
        """Index below which nothing more will come."""
        if self.current.left:
            return self.current.base
        return self.current.end

    # ----------------------------------------------------------------------------- a batch has come

    def place(self, batch: Batch, rise: int | None) -> list[Arrival]:
        """
        Places a batch that has just been pulled.

        The API assembles batches, and raises its step, only when a pull finds none. So if the step
        has risen, the batch is the first of a new delivery.

        Args:
            batch: what the API answered.
            rise: of the API's step since we last asked for it; None if another API answered.
        """
        if rise is not None and rise > 0:
            arrivals = self.begin(rise)
            self.note_empty()
            return [*arrivals, self._place(batch)]
        came_before = _fingerprint(batch) in self._fingerprints
        if self.current.left and came_before:
            # Only the end of the delivery shows whether it is a repeat or an equal batch.
            self._possible_repeats.append(batch)
            return []
        if self.current.left:
            return [self._place(batch)]
        # Another API cannot tell whether it counted the batch: take it. The puller registers anew.
        is_counted = rise is None or self.may_hold_older
        if came_before or not is_counted:
            self.note_repeat()
            return []
        if rise is None:
            return [self._place_unverified(batch)]
        # The API assembled it before this run joined, so its step counts it already.
        self._follow(self.current.registration, self.current.step, 1)
        return [self._place(batch)]

    def place_last(self, batch: Batch) -> list[Arrival]:
        """Places a batch without the API's step, because the run ends."""
        if _fingerprint(batch) in self._fingerprints:
            # If the API's step counts it all the same, the next life of the run finds that it is
            # lost.
            return []
        return [self._place_unverified(batch)]

    def _place_unverified(self, batch: Batch) -> Arrival:
        """Places a batch of an API that was not asked for its step, or is gone. Unless the delivery
        lacks a batch, this one begins the next: then the API has counted at least this one."""
        if not self.current.left:
            self._follow(self.current.registration, self.current.step + 1, 1)
        return self._place(batch)

    def _place(self, batch: Batch) -> Arrival:
        """Returns the batch with its place: it is the newest that is left of the delivery."""
        self.diagnosis.note(batch)
        self._fingerprints.add(_fingerprint(batch))
        self._note_progress()
        left = self.current.left - 1
        self.current = replace(self.current, left=left)
        size = self.current.batch_size
        start = self.current.base + left * size
        return Arrival(FileHeader(start, size, self.current), batch)

    # ------------------------------------------------------------- deliveries, from one to the next

    def begin(self, batches: int) -> list[Arrival]:
        """Begins a delivery of `batches`, because the API holds nothing of the last one any more.
        Returns the arrivals with which that ends, as `end` does."""
        arrivals = self.end()
        self._follow(self.current.registration, self.current.step + batches, batches)
        return arrivals

    def end(self) -> list[Arrival]:
        """Ends the delivery, because the API holds no batch: what is left of it was lost on its
        way. Returns equal batches that are placed after all, and what is lost."""
        arrivals = self._place_possible_repeats()
        if self.current.left:
            num_lost = self._lose_rest()
            self._warn_of_loss(num_lost)
            dropped = {LOST_IN_DELIVERY: num_lost}
            header = FileHeader(self.current.base, num_lost, self.current, dropped=dropped)
            arrivals.append(Arrival(header, None))
        return arrivals

    def change_api(self, registration: str, step: int) -> list[Arrival]:
        """Goes on with another API, whose step is `step`. Returns what is lost with the last
        one."""
        # Nobody can tell any more whether these are repeats.
        self._possible_repeats.clear()
        arrivals = []
        if self.current.left:
            num_lost = self._lose_rest()
            header = FileHeader(self.current.base, num_lost, self.current, lost_with_api=num_lost)
            arrivals.append(Arrival(header, None))
        self._follow(registration, step, 0)
        return arrivals

    def note_empty(self) -> None:
        """Notes that the API surely held no batch just now: no doubt from before is left."""
        self.reply_was_lost = False
        self.may_hold_older = False

    def _follow(self, registration: str, step: int, batches: int) -> None:
        """Makes the delivery after this one the current one, with this run's batch size."""
        self.current = Delivery(
            registration,
            step,
            base=self.current.end,
            batch_size=self.batch_size,
            batches=batches,
            left=batches,
        )

    def _lose_rest(self) -> int:
        """Gives up the batches that are left of the delivery. Returns how many rollouts they
        have."""
        num_lost = self.current.left * self.current.batch_size
        self.current = replace(self.current, left=0)
        return num_lost

    def _place_possible_repeats(self) -> list[Arrival]:
        """Places as many equal batches as the delivery, which has ended, still lacks: the others
        are repeats."""
        placed = []
        for batch in self._possible_repeats:
            if self.current.left:
                placed.append(self._place(batch))
            else:
                self.note_repeat()
        self._possible_repeats.clear()
        return placed

    # ---------------------------------------------------------------------------- what the log says

    def note_repeat(self) -> None:
        """Notes a batch that the API's step does not count. The log warns of the first."""
        self._has_repeated = True
        if self._reported_cache:
            return
        self._reported_cache = True
        message = (
            "The Atropos API at %s answered with a batch that it had given out before, as its step "
            "tells: an HTTP cache stands before it. Batches that come twice are not trained on "
            "again, but a cache costs time and may lose others: exempt the API from it, or set "
            "`atropos_url` to the API itself. This is said once."
        )
        logger.warning(message, self.url)

    def pop_repeated(self) -> bool:
        """Returns whether a batch was repeated since the last call."""
        has_repeated = self._has_repeated
        self._has_repeated = False
        return has_repeated

    def _warn_of_loss(self, num_lost: int) -> None:
        if self.reply_was_lost:
            message = (
                "%d rollouts are lost: the Atropos API gave them out, and its reply did not "
                "arrive. If it answered 500, a score, log-probability or advantage in them is NaN "
                "or infinite: correct the environment."
            )
            logger.warning(message, num_lost)
        elif not self._reported_rival:
            self._reported_rival = True
            message = (
                "%d rollouts are lost: another trainer asks the Atropos API at %s for batches, "
                "too, and got them. Stop it, or give it an API of its own (`atropos_url`). Later "
                "losses are only counted in the metrics."
            )
            logger.warning(message, num_lost, self.url)

    def _note_progress(self) -> None:
        """Logs how much of a long delivery has come. Its oldest batches come last, and nothing is
        handed out before them."""
        now = time.monotonic()
        delivery = self.current
        if 0 < delivery.left < delivery.batches:
            self.catching_up += now - self._last_placed
        else:
            self._last_progress = now
        self._last_placed = now
        if now - self._last_progress < PROGRESS:
            return
        self._last_progress = now
        message = (
            "Pulled %d of %d batches that were queued at the Atropos API. The oldest comes last."
        )
        logger.info(message, delivery.batches - delivery.left + 1, delivery.batches)


def next_delivery(last: Delivery | None, begin: int, batch_size: int) -> Delivery:
    """Returns the delivery of the next batch: the `last` that the spool knows, if any. `begin` is
    the index of the first rollout that the run needs."""
    if last is None:
        last = Delivery("", 0, 0, batch_size, 0, 0)
    if not last.left and last.end < begin:  # files of the spool were deleted
        return replace(last, base=begin, batches=0)
    return last


def _fingerprint(batch: Batch) -> bytes:
    """Returns 16 bytes, equal for batches of equal tokens, log-probabilities and scores."""
    digest = hashlib.blake2b(digest_size=16)
    for group in batch:
        if isinstance(group, RejectedGroup):
            digest.update(repr((str(group), group.env_id, group.size)).encode())
            continue
        lengths = np.array([len(tokens) for tokens in group.tokens])
        digest.update(lengths.tobytes())
        digest.update(np.array(group.scores).tobytes())
        for values in (*group.tokens, *group.logprobs):
            if values is not None:
                digest.update(values.tobytes())
    return digest.digest()
