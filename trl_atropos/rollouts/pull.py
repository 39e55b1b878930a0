"""Pulls batches from a live Atropos API.

`feed.Feed` calls `BatchPuller.pull` in its thread. Each call sends at most one `GET /batch`
and returns `Arrival`s: batches with their place in the run, or places whose rollouts are lost.
`deliveries.py` finds the places.

The API hands out each batch at most once, and forgets it before it answers. So we repeat a `GET
/batch` only if it surely never left this machine.

`pull` only fetches a batch. The next `pull` asks for the API's step and places the batch: that
second request may fail by itself.
"""

import logging
import math
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto

import msgspec

from trl_atropos.errors import RolloutError
from trl_atropos.rollouts.api import (
    RETRY_PAUSE,
    UNREGISTERED,
    AtroposClient,
    NoAnswer,
    RateLimited,
    Registration,
    ReplyLost,
    join,
)
from trl_atropos.rollouts.deliveries import Arrival, Deliveries, next_delivery
from trl_atropos.rollouts.diagnosis import QUIET_WARNING, Batch, Diagnosis
from trl_atropos.rollouts.spool import Spool
from trl_atropos.rollouts.versions import RequestGate
from trl_atropos.rollouts.wire_format import BatchReply

logger = logging.getLogger(__name__)

# seconds without a batch after which the API is asked to remove groups that are in its way
STRAYS = 2.0
LOOK_AGAIN = 1.0  # seconds without a `GET /batch`, at most


class _Api(Enum):
    """Compares the API that `BatchPuller.join` finds with that of the current delivery. See
    `BatchPuller._identify`."""

    SAME = auto()
    NEW_WITH_SAME_NAME = auto()
    FOREIGN = auto()
    NEW = auto()


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
        batch_size = self.registration.batch_size
        self.deliveries = Deliveries(
            next_delivery(self.spool.last_delivery(), self.begin, batch_size),
            batch_size,
            self.client.url,
            self.diagnosis,
        )
        self._unplaced: Batch | None = None  # pulled, and its place is not known yet
        # The API may have been restarted, or its step may have risen.
        self._must_verify = False
        self._can_remove_strays = True

        # Times, by time.monotonic().
        self._request_since: float | None = None  # of the `GET /batch` in flight
        self._last_request = 0.0
        self._failing_since: float | None = None
        self._last_stray_search = 0.0
        self._last_hang_warning = 0.0

    # ---------------------------------------------------------------------------------- registering

    def join(self, *, reset: bool = False) -> list[Arrival]:
        """Becomes the API's trainer, unless this run is it already. Returns what was lost with an
        earlier API. Raises as `api.join` does."""
        deliveries = self.deliveries
        name = self.client.trainer()
        is_new = reset or name not in self.spool.registrations
        # Environments go on from the API's step, which counts batches, including those of this
        # run's earlier APIs.
        batches_before = math.ceil(deliveries.current.end / self.registration.batch_size)
        step = max(self.registration.starting_step, batches_before)
        if is_new:
            name = f"{self.registration.wandb_group}-{uuid.uuid4().hex[:8]}"
            self.spool.note_registration(name, step)
        registration = msgspec.structs.replace(
            self.registration, wandb_group=name, starting_step=step
        )
        status = join(self.client, registration, reset=reset)
        # The API may keep an earlier registration: then its trainer has another name than `name`.
        holder = self.client.trainer() or ""
        # The API may have handed out a batch that the spool does not have.
        self._must_verify = not is_new
        deliveries.reply_was_lost = not is_new

        api = self._identify(holder, status.current_step)
        registered_step = self.spool.registrations.get(holder)
        if api is _Api.SAME:
            # If the API's step is still the one at which this run registered, it may still hold
            # batches that it had assembled before.
            deliveries.may_hold_older = deliveries.current.step == registered_step
            return []
        if api is not _Api.NEW:
            message = (
                "Continuing on the Atropos API at %s, where %s had registered before: %d groups "
                "queued, %d batches assembled. If that run is not over, the two take rollouts from "
                "each other."
            )
            logger.info(message, self.client.url, holder, status.queue_size, status.current_step)
            registered_step = status.current_step
            self.spool.note_registration(holder, registered_step)
        has_just_registered = is_new and holder == name
        deliveries.may_hold_older = not has_just_registered
        return deliveries.change_api(holder, registered_step)

    def _identify(self, holder: str, step: int) -> _Api:
        """
        Returns which API this is, by its trainer's name and its step. The first line that fits
        counts:

            holder                             step         API
            the current delivery's trainer     not lower    SAME
            the current delivery's trainer     lower        NEW_WITH_SAME_NAME
            unknown to this run                any          FOREIGN
            another name of this run           any          NEW

        A program that registers this run's trainer may always use one name, also at a new API. An
        API is FOREIGN if another run registered first, and the API kept that registration. The name
        of a NEW one was sent just now, or earlier: by a life of this run that pulled no batch, say.
        """
        current = self.deliveries.current
        if holder == current.registration:
            if step >= current.step:
                return _Api.SAME
            return _Api.NEW_WITH_SAME_NAME
        if holder not in self.spool.registrations:
            return _Api.FOREIGN
        return _Api.NEW

    def _rejoin(self) -> list[Arrival]:
        """Registers again, because the API holds no trainer or another: it was restarted, or
        somebody else reset it."""
        try:
            lost = self.join()
        except NoAnswer as error:
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

    # -------------------------------------------------------------------------------------- pulling

    def pull(self) -> list[Arrival]:
        """Sends at most one `GET /batch`. Returns what has a place now, often nothing. Raises
        `RolloutError` if the API has failed for `api_down_timeout` seconds, or came back with
        another registration."""
        arrivals = self._pull_or_place()
        if self.deliveries.pop_repeated():
            self.pause = self.poll_interval
        return arrivals

    def _pull_or_place(self) -> list[Arrival]:
        try:
            if self._unplaced is not None:
                return self._place_pulled()
            if self._must_verify:
                return self._verify()
            reply = self._request_batch()
            if reply.batch and not self._has_registered_size(reply.batch):
                return self._discard_of_other_size(reply.batch)
        except NoAnswer as error:
            if isinstance(error, ReplyLost):
                self.deliveries.reply_was_lost = True
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
        """Returns the reply to `GET /batch`. If too few rollouts are queued, sends no request and
        returns the reply that the API would give: no batch.

        The request lets environments begin the next batch. If the next policy must sample it, their
        requests wait from before a batch is handed out until the policy is new.
        """
        if self.gate.enabled and self._too_few_queued():
            self.gate.open()
            return BatchReply(batch=None)
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
        """Returns True if the API cannot assemble a batch even if all groups in its queue are as
        large as the largest that came. Then the environments' requests need not wait."""
        largest = self.diagnosis.largest_group()
        if largest is None or self.deliveries.current.left or self.deliveries.reply_was_lost:
            return False
        if time.monotonic() - self._last_request > LOOK_AGAIN:
            return False
        with suppress(NoAnswer):  # `GET /batch` finds out what is wrong
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
        if self.client.trainer() == self.deliveries.current.registration:
            # The API assembles batches of the size that this run registered. So an HTTP cache gave
            # out a batch of an earlier run, in answer to this run's request.
            self.deliveries.note_repeat()
            # If the API answered as well, its step counts a batch that did not arrive and is lost.
            self._must_verify = True
            return []
        message = (
            "The Atropos API at %s answered with a batch of %d rollouts, and this run registered "
            "for %d: it was restarted or reset, and another trainer registered first. They are not "
            "trained on."
        )
        rollouts = sum(group.size for group in batch)
        logger.warning(message, self.client.url, rollouts, self.registration.batch_size)
        return self._rejoin()

    # ------------------------------------------------------------------------ verifying and placing

    def _verify(self) -> list[Arrival]:
        """Asks the API whether this trainer's registration still holds, and how many batches it has
        assembled."""
        rise = self._rise_of_step()
        if rise is None:
            return self._rejoin()
        self._must_verify = False
        if rise == 0:
            return []
        # A lost request made the API assemble these batches, so at least one of them is lost.
        self._failing_since = None
        self.deliveries.reply_was_lost = True
        return self.deliveries.begin(rise)

    def _rise_of_step(self) -> int | None:
        """Returns by how many batches the API's step has risen, or None if this trainer did not
        register there."""
        delivery = self.deliveries.current
        if self._must_verify and self.client.trainer() != delivery.registration:
            return None
        rise = self.client.status().current_step - delivery.step
        if rise < 0:
            return None
        return rise

    def _place_pulled(self) -> list[Arrival]:
        """Places the batch that the last call pulled."""
        assert self._unplaced is not None
        rise = self._rise_of_step()
        self._must_verify = rise is None
        batch = self._unplaced
        self._unplaced = None
        return self.deliveries.place(batch, rise)

    def place_last(self) -> list[Arrival]:
        """Places the batch that the last call pulled, if any, without asking the API. Called when
        the run ends."""
        batch = self._unplaced
        self._unplaced = None
        if batch is None:
            return []
        return self.deliveries.place_last(batch)

    # -------------------------------------------------------------------------------------- silence

    def _note_no_batch(self) -> list[Arrival]:
        """Ends the delivery, because the API has no batch. After every minute of silence, the log
        says why."""
        self.pause = self.poll_interval
        arrivals = self.deliveries.end()
        self.deliveries.note_empty()
        self._remove_strays()
        if self.diagnosis.warning_is_due():
            if self._trainer_is_forgotten():
                return arrivals + self._rejoin()
            self.diagnosis.warn()
        return arrivals

    def _trainer_is_forgotten(self) -> bool:
        with suppress(NoAnswer):  # the next pull finds out what is wrong
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

    def _note_failure(self, error: NoAnswer) -> list[Arrival]:
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
