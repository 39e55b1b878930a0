"""Pulls batches from a live Atropos API, and finds the place of each in the order of the run.

`selection.Feed` calls `BatchPuller.pull` in its thread. Each call sends at most one `GET /batch`
and returns `Arrival`s: batches with their place in the run, or places whose rollouts are lost.

How the API delivers: it cuts its whole queue into batches at once, raises its step by their number,
and hands them out newest first. We call the batches of one cut a *delivery*. For example, with
batches of 4 rollouts, the API finds 12 rollouts in its queue and raises its step from 7 to 10. The
first `GET /batch` returns rollouts 8 to 11 of this delivery, the second 4 to 7, the third 0 to 3.
The API cuts its queue again only when it holds no batch of the last delivery.

It hands out each batch at most once, and forgets it before it answers. So we repeat a `GET /batch`
only if it surely never left this machine. A batch that was handed out and did not arrive leaves a
gap in its delivery. We find the gap as soon as the API surely holds no batch: when it says so, or
when its step rises.

An HTTP cache before the API may answer with a batch that came before. The API's step reveals this,
because it does not count such a batch.
"""

import hashlib
import logging
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
import numpy as np

from trl_atropos.errors import RolloutError
from trl_atropos.rollouts.api import (
    RETRY_PAUSE,
    UNREGISTERED,
    ApiUnreachable,
    AtroposClient,
    RateLimited,
    Registration,
    ReplyLost,
    join,
)
from trl_atropos.rollouts.diagnosis import QUIET_WARNING, Batch, Diagnosis
from trl_atropos.rollouts.spool import Delivery, FileHeader, Spool
from trl_atropos.rollouts.versions import RequestGate
from trl_atropos.rollouts.wire import BatchReply, RejectedGroup

logger = logging.getLogger(__name__)

LOST_IN_DELIVERY = "lost_in_delivery"
# seconds without a batch after which the API is asked to remove groups that are in its way
STRAYS = 2.0
PROGRESS = 10.0  # seconds between two lines about a long delivery
LOOK_AGAIN = 1.0  # seconds without a `GET /batch`, at most
ANOTHER_API = -1  # in place of a rise of the step


class Arrival(NamedTuple):
    """A batch and its place in the run, or, if `batch` is None, rollouts that are known to be
    lost."""

    header: FileHeader
    batch: Batch | None


@dataclass(eq=False)
class BatchPuller:
    """
    Pulls batches. After each `pull`, wait `pause` seconds before the next.

    Args:
        client: of the API.
        registration: this run's; its `wandb_group` gets a suffix that tells this run's
            registrations from those of others.
        spool: knows the earlier registrations of this run, and how far they had been delivered.
        begin: index of the first rollout, if the spool holds none.
        poll_interval: seconds between two pulls while the API has no batch.
        api_down_timeout: seconds that the API may fail before `pull` raises.
        diagnosis: remembers what came, and says why nothing comes.
        gate: holds the environments' sampling requests while a batch is trained.
    """

    client: AtroposClient
    registration: Registration
    spool: Spool
    begin: int
    poll_interval: float
    api_down_timeout: float
    diagnosis: Diagnosis
    gate: RequestGate

    def __post_init__(self):
        self.pause = 0.0
        self.api_restarts = 0
        # seconds in which batches of a delivery came while older ones of it were still to come
        self.catching_up = 0.0

        # The place of the next batch. The delivery's step is the API's when we last asked for it.
        batch_size = self.registration.batch_size
        self._delivery = self.spool.last_delivery() or Delivery("", 0, 0, batch_size, 0, 0)
        if not self._delivery.left and self._delivery.end < self.begin:
            # files of the spool were deleted
            self._delivery = replace(self._delivery, base=self.begin, batches=0)
        self._unplaced: Batch | None = None  # pulled, and its place is not known yet
        self._seen: set[bytes] = set()  # fingerprints of the batches that came
        # Equal to a batch that came before, while the API held others of the delivery.
        self._possible_repeats: list[Batch] = []

        # What we do not know about the API.
        self._must_verify = False  # it may have been restarted, or its step may have risen
        self._reply_was_lost = False  # since the API was known to hold no batch
        self._may_hold_older = False  # batches that its step counted before this run joined
        self._can_remove_strays = True

        # Times, by time.monotonic().
        self._request_since: float | None = None  # of the `GET /batch` in flight
        self._last_request = 0.0
        self._failing_since: float | None = None
        self._last_placed = 0.0
        self._last_progress = 0.0  # when the log showed progress, or had no need to
        self._last_stray_search = 0.0
        self._last_hang_warning = 0.0

        # What the log has said, which it says once.
        self._reported_cache = False
        self._reported_rival = False

    @property
    def complete_until(self) -> int:
        """Index below which nothing more will come."""
        if self._delivery.left:
            return self._delivery.base
        return self._delivery.end

    # ---------------------------------------------------------------------------------- registering

    def join(self, *, reset: bool = False) -> list[Arrival]:
        """Becomes the API's trainer, unless this run is it already. Returns what was lost with an
        earlier API. Raises as `api.join` does."""
        our_registrations = self.spool.registrations
        name = self.client.trainer()
        is_new = reset or name not in our_registrations
        # Environments go on from the API's step, which counts batches, including those of this
        # run's earlier APIs.
        batches_before = -(-self._delivery.end // self.registration.batch_size)  # rounded up
        step = max(self.registration.starting_step, batches_before)
        if is_new:
            name = f"{self.registration.wandb_group}-{uuid.uuid4().hex[:8]}"
            self.spool.note_registration(name, step)
        registration = msgspec.structs.replace(
            self.registration, wandb_group=name, starting_step=step
        )
        status = join(self.client, registration, reset=reset)
        holder = self.client.trainer() or ""
        # The API may have handed out a batch that the spool does not have.
        self._must_verify = not is_new
        self._reply_was_lost = not is_new
        is_same_name = holder == self._delivery.registration
        # A program that always registers under one name may have registered at a new API, whose
        # step is lower.
        if is_same_name and status.current_step >= self._delivery.step:
            # True if the API has assembled nothing since it was registered at.
            self._may_hold_older = self._delivery.step == our_registrations.get(holder)
            return []
        if is_same_name or holder not in our_registrations:
            message = (
                "Continuing on the Atropos API at %s, where %s had registered before: %d groups "
                "queued, %d batches assembled. If that run is not over, the two take rollouts from "
                "each other."
            )
            logger.info(message, self.client.url, holder, status.queue_size, status.current_step)
            self.spool.note_registration(holder, status.current_step)
        self._may_hold_older = holder != name or not is_new
        lost = self._lose_with_api()
        self._delivery = self._next_delivery(holder, our_registrations[holder], 0)
        return lost

    def _rejoin(self) -> list[Arrival]:
        """Registers again, because the API holds no trainer or another: it was restarted, or
        somebody else reset it."""
        try:
            lost = self.join()
        except (ApiUnreachable, ReplyLost) as error:
            return self._note_failure(error)
        message = (
            "The Atropos API at %s was restarted or reset, and this trainer has registered again. "
            "The rollouts queued there are lost. Environments do not register again by themselves: "
            "restart them."
        )
        logger.warning(message, self.client.url)
        self.api_restarts += 1
        self.diagnosis.note_restart()
        self.pause = self.poll_interval
        self._failing_since = None
        return lost

    # ---------------------------------------------------------------------------------- pulling

    def pull(self) -> list[Arrival]:
        """Sends at most one `GET /batch`. Returns what has a place now, often nothing. Raises
        `RolloutError` if the API has failed for `api_down_timeout` seconds, or came back with
        another registration."""
        try:
            if self._unplaced is not None:
                return self._place_pulled()
            if self._must_verify:
                return self._verify()
            reply = self._request_batch()
            if reply.batch and not self._has_registered_size(reply.batch):
                return self._discard_of_other_size(reply.batch)
        except ReplyLost as error:
            self._reply_was_lost = True
            return self._note_failure(error)
        except ApiUnreachable as error:
            return self._note_failure(error)
        if reply.status == "error":
            return self._rejoin()
        self._failing_since = None
        if not reply.batch:
            return self._note_no_batch()
        self.pause = 0.0
        self._unplaced = reply.batch  # the next call asks for the API's step and places it
        return []

    def _request_batch(self) -> BatchReply:
        """Returns the reply to `GET /batch`.

        The request lets environments begin the next batch. If the next policy must sample it, their
        requests wait from before a batch is handed out until the policy is new.
        """
        if self.gate.enabled and self._too_few_queued():
            self.gate.open()
            return BatchReply(None)
        self.gate.close()
        has_batch = False
        self._request_since = time.monotonic()
        self._last_request = self._request_since
        try:
            reply = self.client.batch()
            has_batch = bool(reply.batch)
        finally:
            self._request_since = None
            if not has_batch:
                self.gate.open()
        return reply

    def _too_few_queued(self) -> bool:
        """Returns whether the API cannot assemble a batch from its queue, if the groups there are
        no larger than those that came. Then no request need wait."""
        largest = self.diagnosis.largest_group()
        if largest is None or self._delivery.left or self._reply_was_lost:
            return False
        if time.monotonic() - self._last_request > LOOK_AGAIN:
            return False
        with suppress(ApiUnreachable, ReplyLost):  # `GET /batch` finds out what is wrong
            return self.client.status().queue_size * largest < self.registration.batch_size
        return False

    def _has_registered_size(self, batch: Batch) -> bool:
        """Returns whether a batch may be of the size that this run registered. An unreadable group
        has size 0, and may be what is missing."""
        sizes = [group.size for group in batch]
        missing = self.registration.batch_size - sum(sizes)
        return missing == 0 or (missing > 0 and 0 in sizes)

    def _discard_of_other_size(self, batch: Batch) -> list[Arrival]:
        """Discards a batch that has no place in this run. Usually the API was restarted and another
        trainer registered first: then `_rejoin` raises `RolloutError` with its name."""
        if self.client.trainer() == self._delivery.registration:
            self._note_repeat()
            self._must_verify = True  # if the API's step counts that batch, it is lost
            return []
        message = (
            "The Atropos API at %s answered with a batch of %d rollouts, and this run registered "
            "for %d: it was restarted or reset, and another trainer registered first. They are not "
            "trained on."
        )
        rollouts = sum(group.size for group in batch)
        logger.warning(message, self.client.url, rollouts, self.registration.batch_size)
        return self._rejoin()

    # ---------------------------------------------------------------------------------- verifying

    def _verify(self) -> list[Arrival]:
        """Asks the API whether this trainer's registration still holds, and how many batches it has
        assembled."""
        rise = self._rise_of_step()
        if rise == ANOTHER_API:
            return self._rejoin()
        self._must_verify = False
        if rise == 0:
            return []
        # A lost request made the API assemble these batches, so at least one of them is lost.
        self._failing_since = None
        self._reply_was_lost = True
        return self._begin_delivery(rise)

    def _rise_of_step(self) -> int:
        """Returns by how many batches the API's step has risen, or `ANOTHER_API` if this trainer
        did not register there."""
        if self._must_verify and self.client.trainer() != self._delivery.registration:
            return ANOTHER_API
        rise = self.client.status().current_step - self._delivery.step
        if rise < 0:
            return ANOTHER_API
        return rise

    # ---------------------------------------------------------------------------------- placing

    def _place_pulled(self) -> list[Arrival]:
        """Places the batch that the last call pulled. The API assembles batches, and raises its
        step, only when a pull finds none: if the step has risen, the batch is of a new delivery."""
        assert self._unplaced is not None
        rise = self._rise_of_step()
        self._must_verify = rise == ANOTHER_API
        batch = self._unplaced
        self._unplaced = None
        came_before = _fingerprint(batch) in self._seen
        if rise > 0:
            lost = self._begin_delivery(rise)
            self._reply_was_lost = False
            self._may_hold_older = False
            return [*lost, self._place(batch)]
        if self._delivery.left:
            if not came_before:
                return [self._place(batch)]
            # Only the end of the delivery shows whether it is a repeat or an equal batch.
            self._possible_repeats.append(batch)
            return []
        # Another API cannot tell whether it counted the batch: take it, and `_verify` registers
        # anew.
        is_counted = rise == ANOTHER_API or self._may_hold_older
        if came_before or not is_counted:
            self._note_repeat()
            return []
        if rise == 0:  # the API assembled it before this run joined
            self._delivery = self._next_delivery(
                self._delivery.registration, self._delivery.step, 1
            )
        return [self._place(batch)]

    def place_last(self) -> list[Arrival]:
        """Places the batch that the last call pulled, if any, without asking the API. Called when
        the run ends."""
        batch = self._unplaced
        self._unplaced = None
        if batch is None or _fingerprint(batch) in self._seen:
            # If the API's step counts it all the same, the next life of the run finds that it is
            # lost.
            return []
        return [self._place(batch)]

    def _place(self, batch: Batch) -> Arrival:
        """Returns the batch with its place: it is the newest that is left of the delivery."""
        self.diagnosis.note(batch)
        self._seen.add(_fingerprint(batch))
        self._note_progress()
        if not self._delivery.left:  # the API was not asked for its step, or is gone
            self._delivery = self._next_delivery(
                self._delivery.registration, self._delivery.step + 1, 1
            )
        size = self._delivery.batch_size
        left = self._delivery.left - 1
        self._delivery = replace(self._delivery, left=left)
        start = self._delivery.base + left * size
        return Arrival(FileHeader(start, size, self._delivery), batch)

    def _begin_delivery(self, batches: int) -> list[Arrival]:
        """Begins a delivery of `batches`, because the API holds nothing of the last one any more.
        Returns the arrivals with which that ends: equal batches that are placed after all, and what
        is lost."""
        arrivals = self._end_delivery()
        registration = self._delivery.registration
        step = self._delivery.step + batches
        self._delivery = self._next_delivery(registration, step, batches)
        return arrivals

    def _end_delivery(self) -> list[Arrival]:
        """Ends the delivery, because the API holds no batch: what is left of it was lost on its
        way."""
        placed = self._place_possible_repeats()
        if not self._delivery.left:
            return placed
        lost = self._left_rollouts()
        self._delivery = replace(self._delivery, left=0)
        if self._reply_was_lost:
            message = (
                "%d rollouts are lost: the Atropos API gave them out, and its reply did not "
                "arrive. If it answered 500, a score, log-probability or advantage in them is NaN "
                "or infinite: correct the environment."
            )
            logger.warning(message, lost)
        elif not self._reported_rival:
            self._reported_rival = True
            message = (
                "%d rollouts are lost: another trainer asks the Atropos API at %s for batches, "
                "too, and got them. Stop it, or give it an API of its own (`atropos_url`). Later "
                "losses are only counted in the metrics."
            )
            logger.warning(message, lost, self.client.url)
        header = FileHeader(
            self._delivery.base, lost, self._delivery, dropped={LOST_IN_DELIVERY: lost}
        )
        return [*placed, Arrival(header, None)]

    def _lose_with_api(self) -> list[Arrival]:
        """Ends the delivery of an API that is gone, and what is left of it with it."""
        # Nobody can tell any more whether these are repeats.
        self._possible_repeats.clear()
        if not self._delivery.left:
            return []
        lost = self._left_rollouts()
        self._delivery = replace(self._delivery, left=0)
        header = FileHeader(self._delivery.base, lost, self._delivery, lost_with_api=lost)
        return [Arrival(header, None)]

    def _left_rollouts(self) -> int:
        return self._delivery.left * self._delivery.batch_size

    def _next_delivery(self, registration: str, step: int, batches: int) -> Delivery:
        """Returns the delivery after this one, with this run's batch size; the run from which this
        one resumes may have had another."""
        return Delivery(
            registration,
            step,
            base=self._delivery.end,
            batch_size=self.registration.batch_size,
            batches=batches,
            left=batches,
        )

    def _place_possible_repeats(self) -> list[Arrival]:
        """Places as many equal batches as the delivery, which has ended, still lacks: the others
        are repeats."""
        placed = []
        for batch in self._possible_repeats:
            if self._delivery.left:
                placed.append(self._place(batch))
            else:
                self._note_repeat()
        self._possible_repeats.clear()
        return placed

    def _note_repeat(self) -> None:
        """Warns once that a batch came which the API's step does not count."""
        self.pause = self.poll_interval
        if self._reported_cache:
            return
        self._reported_cache = True
        message = (
            "The Atropos API at %s answered with a batch that it had given out before, as its step "
            "tells: an HTTP cache stands before it. Batches that come twice are not trained on "
            "again, but a cache costs time and may lose others: exempt the API from it, or set "
            "`atropos_url` to the API itself. This is said once."
        )
        logger.warning(message, self.client.url)

    def _note_progress(self) -> None:
        """Logs how much of a long delivery has come. Its oldest batches come last, and nothing is
        handed out before them."""
        now = time.monotonic()
        delivery = self._delivery
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

    # ---------------------------------------------------------------------------------- silence

    def _note_no_batch(self) -> list[Arrival]:
        """Ends the delivery, because the API has no batch. After every minute of silence, the log
        says why."""
        self.pause = self.poll_interval
        arrivals = self._end_delivery()
        self._reply_was_lost = False
        self._may_hold_older = False
        self._remove_strays()
        if self.diagnosis.warning_is_due():
            if self._trainer_is_forgotten():
                return arrivals + self._rejoin()
            self.diagnosis.warn()
        return arrivals

    def _trainer_is_forgotten(self) -> bool:
        with suppress(ApiUnreachable, ReplyLost):  # the next pull finds out what is wrong
            return self.client.info().batch_size == UNREGISTERED
        return False

    def _remove_strays(self) -> None:
        """Has the API remove groups that fit into no batch: while they are queued, it assembles
        none."""
        now = time.monotonic()
        quiet_since = max(self.diagnosis.quiet_since, self._last_stray_search)
        if not self._can_remove_strays or now - quiet_since < STRAYS:
            return
        self._last_stray_search = now
        sizes = self.client.remove_strays()
        self._can_remove_strays = sizes is not None
        if not sizes:
            return
        message = (
            "Removed %d groups of %s rollouts from the queue of the Atropos API at %s: no batch of "
            "%d can be assembled while they are there, and no environment has registered with such "
            "a `group_size`. Have who sends them register and set `env_id`, and make the batch "
            "size a multiple of every group size."
        )
        shown = ", ".join(str(size) for size in sorted(set(sizes)))
        batch_size = self.registration.batch_size
        logger.warning(message, len(sizes), shown, self.client.url, batch_size)

    def _note_failure(self, error: RolloutError) -> list[Arrival]:
        """Has the next call try again. Raises `RolloutError` if the API has failed for too long."""
        self._must_verify = True
        self.pause = RETRY_PAUSE
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
            if isinstance(error, ReplyLost):
                self.pause = 0.0
            message = "The Atropos API gave no usable answer; trying for another %g s. %s"
            logger.warning(message, self.api_down_timeout, error)
            return []
        seconds = now - self._failing_since
        if seconds <= self.api_down_timeout:
            return []
        if isinstance(error, RateLimited):
            raise error
        raise RolloutError(
            f"The Atropos API at {self.client.url} has given no usable answer for "
            f"{seconds:.0f} s. Start it again (`python -m atroposlib.cli.run_api`), then the "
            f"environments, and resume from the last checkpoint. Last try: {error}"
        ) from error

    def warn_if_hung(self) -> None:
        """Warns once a minute of a `GET /batch` without an answer. The trainer's thread calls it
        while it waits for rollouts."""
        now = time.monotonic()
        since = self._request_since
        if since is None or now - max(since, self._last_hang_warning) < QUIET_WARNING:
            return
        self._last_hang_warning = now
        message = (
            "The Atropos API at %s has accepted a request for a batch, and has not answered for "
            "%.0f s: it hangs. This run waits up to %g s, because giving up loses the batch. Then "
            "restart the API and the environments."
        )
        logger.warning(message, self.client.url, now - since, self.client.batch_timeout)


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
