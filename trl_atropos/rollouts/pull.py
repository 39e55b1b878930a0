"""Batches off a live Atropos API, each with its place in the order of the run: `AtroposSource` calls `BatchPuller`.

The API cuts its whole queue into batches at once (a *region*), raises its step by their number, and hands them out
newest first; it assembles new ones only when it holds none. It delivers each batch at most once and forgets it before
it answers, so `GET /batch` is never repeated unless it surely never left this machine. A batch that the API has popped
and nobody received leaves its place open, which is found out, to the rollout, as soon as the API is known to hold
none: when it says so, or when its step rises.
"""

import logging
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import msgspec

from trl_atropos.errors import RolloutError
from trl_atropos.rollouts.api import (
    RETRY_PAUSE,
    UNREGISTERED,
    ApiUnreachable,
    AtroposClient,
    Registration,
    ReplyLost,
    join,
)
from trl_atropos.rollouts.diagnosis import Diagnosis
from trl_atropos.rollouts.spool import Region, Spool
from trl_atropos.rollouts.wire import RejectedGroup, ScoredGroup

logger = logging.getLogger(__name__)

QUIET_WARNING = 60.0  # seconds without a batch after which the log says what may be wrong
LOST_IN_DELIVERY = "lost_in_delivery"
LOST_WITH_API = "lost_with_api"

Batch = list[ScoredGroup | RejectedGroup]


@dataclass(frozen=True)
class Arrival:
    """A batch and its place, or (`batch` None) rollouts of which it is now known that they will never come."""

    start: int
    size: int
    region: Region  # after it
    batch: Batch | None = None
    reason: str = ""


class BatchPuller:
    """
    Args:
        registration: to join with. Its `wandb_group` gets a suffix that tells this run's registrations apart.
        spool: knows the registrations of this run's earlier life, and how far they had been delivered.
        begin: index of the first rollout, where the spool holds none.
        poll_interval: seconds between two pulls while the API has no batch.
        api_down_timeout: seconds that the API may fail before `pull` raises.
        explain: puts what the API tells of a silence together with what else is known.
        names: gives the names of environments by their numbers at the API.

    `pause` is how many seconds to wait before the next pull.
    """

    def __init__(
        self,
        client: AtroposClient,
        registration: Registration,
        spool: Spool,
        *,
        begin: int,
        poll_interval: float,
        api_down_timeout: float,
        names: Callable[[], Mapping[int, str]],
        explain: Callable[[str], str],
    ):
        self.pause = 0.0
        self.api_restarts = 0
        self._client = client
        self._registration = registration
        self._spool = spool
        self._poll_interval = poll_interval
        self._api_down_timeout = api_down_timeout
        self._explain = explain
        # The one being delivered; its step is the API's when it was last asked.
        self._region = spool.last_region() or Region("", 0, 0, registration.batch_size, 0, 0)
        if not self._region.left and self._region.end < begin:  # files of the spool were deleted
            self._region = replace(self._region, base=begin, batches=0)
        self._diagnosis = Diagnosis(client, registration, names)
        self.why_quiet = self._diagnosis.why_quiet
        self._held: Batch | None = None  # pulled, and its place is not known yet
        self._unsure = False  # whether the API is still the same, and at which step
        self._losses = False  # whether a reply was lost since the API was known to hold nothing
        self._sharing = False  # whether the log says that another trainer pulls
        self._open_since: float | None = None  # when a `GET /batch` was sent that has not been answered
        self._hang_told = 0.0
        self._failing_since: float | None = None
        self._quiet_since = time.monotonic()

    @property
    def complete_until(self) -> int:
        """Below this index, nothing more will come."""
        return self._region.base if self._region.left else self._region.end

    # --------------------------------------------------------------------------------------------------------- joining

    def join(self, *, reset: bool = False) -> list[Arrival]:
        """
        Become the API's trainer, or find that this run is it already. Asks for no batch: the first `GET /batch` is
        what lets environments in.

        Returns:
            What is known to be lost with the API that there was before.

        Raises:
            ApiUnreachable, ReplyLost: the API does not answer; call again.
            RolloutError: see `api.join`.
        """
        ours, held = self._spool.registrations, self._client.trainer()
        anew = reset or held not in ours
        # Environments go on from the API's step, which counts batches, those of this run's earlier APIs included.
        step = max(self._registration.starting_step, -(-self._region.end // self._registration.batch_size))
        if anew:
            held = f"{self._registration.wandb_group}-{uuid.uuid4().hex[:8]}"
            self._spool.note_registration(held, step)
        asked = msgspec.structs.replace(self._registration, wandb_group=held, starting_step=step)
        status = join(self._client, asked, reset=reset)
        known_as = self._client.trainer() or ""
        before = self._region
        self._unsure = self._losses = not anew  # a batch may have been popped that the spool does not have
        # Programs that always register under one name may have done so at a new API: its step tells.
        if known_as == before.registration and status.current_step >= before.step:
            return []
        if known_as not in ours or known_as == before.registration:
            logger.info(
                "Continuing on the Atropos API at %s, where %s had registered before: %d groups queued, %d batches "
                "assembled. If that run is not over, the two take rollouts from each other.",
                self._client.url,
                known_as,
                status.queue_size,
                status.current_step,
            )
            self._spool.note_registration(known_as, status.current_step)
        lost = self._settle(LOST_WITH_API)
        self._region = self._next_region(known_as, self._spool.registrations[known_as], 0)
        return lost

    def _rejoin(self) -> list[Arrival]:
        """The API holds no trainer, or another: it was restarted, or reset by somebody else."""
        try:
            lost = self.join()
        except (ApiUnreachable, ReplyLost) as error:
            self._unsure = True
            self._note_failure(error)
            return []
        logger.warning(
            "The Atropos API at %s was restarted or reset, and this trainer has registered again. The rollouts queued "
            "there are lost. Environments do not register again by themselves: restart them.",
            self._client.url,
        )
        self.api_restarts += 1
        self._diagnosis.note_restart()
        self.pause = self._poll_interval
        self._failing_since = None
        self._quiet_since = time.monotonic()
        return lost

    # --------------------------------------------------------------------------------------------------------- pulling

    def pull(self) -> list[Arrival]:
        """
        At most one `GET /batch`. Returns what has a place now, often nothing.

        Raises:
            RolloutError: the API has failed for `api_down_timeout` seconds, or came back with another registration.
        """
        try:
            if self._held is not None:
                return self._place_held()
            if self._unsure:
                return self._look()
            self._open_since = time.monotonic()
            reply = self._client.batch()
        except (ApiUnreachable, ReplyLost) as error:
            self._unsure = True
            self._losses |= isinstance(error, ReplyLost)
            self._note_failure(error)
            return []
        finally:
            self._open_since = None
        if reply.status == "error":
            return self._rejoin()
        self._failing_since = None
        if not reply.batch:
            self.pause = self._poll_interval
            lost = self._told(self._settle(LOST_IN_DELIVERY))
            self._losses = False
            return lost + self._look_if_quiet()
        self.pause = 0.0
        self._quiet_since = time.monotonic()
        self._diagnosis.note(reply.batch)
        self._held = reply.batch
        return []

    def _look(self) -> list[Arrival]:
        """Ask whether the API is still the one that this trainer registered at, and what it has assembled."""
        rise = self._rise()
        if rise < 0:
            return self._rejoin()
        self._unsure = False
        if not rise:
            return []
        # A request was lost that made it assemble these, so at least one of them is gone.
        self._failing_since, self._losses = None, True
        return self._open(rise)

    def _place_held(self) -> list[Arrival]:
        """Only a pull that finds nothing left makes the API assemble batches and raise its step: the held one's."""
        rise = self._rise()
        self._unsure = rise < 0  # that API is gone
        lost = []
        if rise > 0:
            lost = self._open(rise)
            self._losses = False
        elif rise == 0 and not self._region.left:  # assembled before this run joined
            self._region = self._next_region(self._region.registration, self._region.step, 1)
        return lost + self.give_back()

    def _rise(self) -> int:
        """By how many batches the API's step has risen; -1 if it is not the API that this trainer registered at."""
        if self._unsure and self._client.trainer() != self._region.registration:
            return -1
        return max(-1, self._client.status().current_step - self._region.step)

    def give_back(self) -> list[Arrival]:
        """What was received and has no place yet gets one: nothing more is asked."""
        batch, self._held = self._held, None
        if batch is None:
            return []
        if not self._region.left:
            self._region = self._next_region(self._region.registration, self._region.step + 1, 1)
        size, left = self._region.batch_size, self._region.left - 1  # it is the newest that is left
        self._region = replace(self._region, left=left)
        return [Arrival(self._region.base + left * size, size, self._region, batch)]

    def _open(self, batches: int) -> list[Arrival]:
        """The API had nothing left of the region, and has assembled `batches` new ones."""
        lost = self._told(self._settle(LOST_IN_DELIVERY))
        self._region = self._next_region(self._region.registration, self._region.step + batches, batches)
        return lost

    def _settle(self, reason: str) -> list[Arrival]:
        """The API holds nothing: what is left of the region was lost."""
        if not self._region.left:
            return []
        size, self._region = self._region.left * self._region.batch_size, replace(self._region, left=0)
        return [Arrival(self._region.base, size, self._region, reason=reason)]

    def _next_region(self, registration: str, step: int, batches: int) -> Region:
        """A run that resumes may have had batches of another size before."""
        return Region(registration, step, self._region.end, self._registration.batch_size, batches, batches)

    def _told(self, lost: list[Arrival]) -> list[Arrival]:
        """`lost`, after a warning."""
        for arrival in lost:
            if self._losses:
                logger.warning(
                    "%d rollouts are lost: the Atropos API gave them out, and its reply did not arrive. If it "
                    "answered 500, a score, log-probability or advantage in them was NaN or infinite: look for it in "
                    "the environments.",
                    arrival.size,
                )
            elif not self._sharing:
                self._sharing = True
                logger.warning(
                    "%d rollouts are lost: another trainer asks the Atropos API at %s for batches, too, and got them. "
                    "The API gives each batch out once. Stop the other trainer, or give it an API of its own "
                    "(`atropos_url`). Later losses are only counted (`rollouts/dropped_lost_in_delivery`).",
                    arrival.size,
                    self._client.url,
                )
        return lost

    # --------------------------------------------------------------------------------------------------------- failing

    def warn_if_hung(self) -> None:
        """Called while somebody waits for rollouts: warns once a minute of a request that is not answered."""
        now, since = time.monotonic(), self._open_since
        if since is None or now - max(since, self._hang_told) < QUIET_WARNING:
            return
        self._hang_told = now
        logger.warning(
            "The Atropos API at %s has accepted a request for a batch, and has not answered for %.0f s: it hangs, or "
            "its machine does. This run waits up to %g s for the answer, because the batch is lost without it. If it "
            "does not come back, restart the API and the environments.",
            self._client.url,
            now - since,
            self._client.batch_timeout,
        )

    def _note_failure(self, error: RolloutError) -> None:
        now = time.monotonic()
        if self._failing_since is None:
            self.pause = 0.0 if isinstance(error, ReplyLost) else RETRY_PAUSE
            self._failing_since = now
            limit = self._api_down_timeout
            logger.warning("The Atropos API gave no usable answer; trying for another %g s. %s", limit, error)
            return
        self.pause = RETRY_PAUSE
        if now - self._failing_since > self._api_down_timeout:
            raise RolloutError(
                f"The Atropos API at {self._client.url} has given no usable answer for "
                f"{now - self._failing_since:.0f} s. Start it again (`python -m atroposlib.cli.run_api`), then the "
                f"environments, and resume from the last checkpoint. Last try: {error}"
            ) from error

    def _look_if_quiet(self) -> list[Arrival]:
        """After every minute without a batch, say in the log what may be wrong."""
        if time.monotonic() - self._quiet_since < QUIET_WARNING:
            return []
        self._quiet_since = time.monotonic()
        try:
            if self._client.info().batch_size == UNREGISTERED:
                return self._rejoin()
        except (ApiUnreachable, ReplyLost):
            return []  # the next pull finds out what is wrong
        logger.warning("No batch for %g s. %s", QUIET_WARNING, self._explain(self.why_quiet()))
        return []
