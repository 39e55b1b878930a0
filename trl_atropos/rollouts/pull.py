"""Pulls batches from a live Atropos API, finds the place of each in the order of the run, and says
why none come.

The API cuts its whole queue into batches at once (a *region*), raises its step by their number, and
hands them out newest first; it assembles new ones only when it holds none. It delivers each batch
at most once and forgets it before it answers, so `GET /batch` is repeated only if it surely never
left this machine. A batch that the API handed out and nobody received leaves a gap in its region.
The gap is known as soon as the API is known to hold no batch: when it says so, or when its step
rises.

An HTTP cache before the API may answer with a batch that came before. The API's step tells: it
counts no such batch.
"""

import hashlib
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from trl_atropos.errors import RolloutError
from trl_atropos.rollouts.api import (
    RETRY_PAUSE,
    UNREGISTERED,
    ApiUnreachable,
    AtroposClient,
    EnvironmentStatus,
    RateLimited,
    Registration,
    ReplyLost,
    disconnect_command,
    join,
    label_of,
)
from trl_atropos.rollouts.spool import Part, Region, Spool
from trl_atropos.rollouts.wire import BatchReply, RejectedGroup, ScoredGroup

logger = logging.getLogger(__name__)

QUIET_WARNING = 60.0  # seconds without a batch after which the log says what may be wrong
LOST_IN_DELIVERY = "lost_in_delivery"
# seconds without a batch after which the API is asked to remove groups that are in its way
STRAYS = 2.0
PROGRESS = 10.0  # seconds between two lines about a long region
LOOK_AGAIN = 1.0  # seconds without a `GET /batch`, at most
# of the length limit: an environment that came so close probably drops its next rollouts
NEARLY = 0.95

Batch = list[ScoredGroup | RejectedGroup]
Arrival = tuple[Part, Batch | None]
"""A batch and its place in the run, or, without a batch, rollouts that are known to be lost."""


@dataclass(eq=False)
class BatchPuller:
    """Pulls batches. `pause` is how many seconds to wait before the next pull."""

    client: AtroposClient
    # its `wandb_group` gets a suffix that distinguishes this run's registrations
    registration: Registration
    # knows the registrations of this run's earlier life, and how far they had been delivered
    spool: Spool
    begin: int  # index of the first rollout, where the spool holds none
    poll_interval: float  # seconds between two pulls while the API has no batch
    api_down_timeout: float  # seconds that the API may fail before `pull` raises
    names: Callable[[], Mapping[int, str]]  # of environments by their numbers at the API
    explain: Callable[[str], str]  # adds to the reason for a silence what else is known about it
    # Lets new requests to the servers wait, or not, and lets in a share of those that do; None if
    # they may begin while the trainer trains.
    hold_requests: Callable[[bool, float], None] | None = None

    def __post_init__(self):
        self.pause = 0.0
        self.api_restarts = 0
        # The region that is being delivered; its step is the API's when it was last asked.
        self._region = self.spool.last_region() or Region(
            "", 0, 0, self.registration.batch_size, 0, 0
        )
        # files of the spool were deleted
        if not self._region.left and self._region.end < self.begin:
            self._region = replace(self._region, base=self.begin, batches=0)
        self._diagnosis = Diagnosis(self.client, self.registration, self.names)
        self.why_quiet = self._diagnosis.why_quiet
        self._held: Batch | None = None  # pulled, and its place is not known yet
        self._seen: set[bytes] = set()  # fingerprints of the batches that came
        # came when the API held others of the region, and equal to one before
        self._set_aside: list[Batch] = []
        # whether the API may hold batches that its step counted before this run joined
        self._may_hold_older = False
        # seconds in which batches of a region came while older ones of it were to come
        self.catching_up = 0.0
        # when the last batch was placed, and when the log told of progress
        self._placed = self._progress_told = 0.0
        self._removes_strays = True  # whether the API can, as far as this run knows
        self._strays_asked = 0.0  # when the API was last asked to
        self._cached = False  # whether the log says that batches come twice
        self._holding = False  # whether requests wait, because a batch was given out
        self.policy_is_new = False  # whether some of them may begin
        self._unsure = False  # whether the API may have been restarted, or its step may have risen
        self._losses = False  # whether a reply was lost since the API was known to hold no batch
        self._sharing = False  # whether the log says that another trainer pulls
        self._open_since: float | None = None  # when the `GET /batch` in flight was sent
        self._asked = 0.0  # when the last one was
        self._hang_warned = 0.0
        self._failing_since: float | None = None
        self.quiet_since = time.monotonic()  # since when somebody waits for a batch

    @property
    def complete_until(self) -> int:
        """Below this index, nothing more will come."""
        return self._region.base if self._region.left else self._region.end

    def join(self, *, reset: bool = False) -> list[Arrival]:
        """Becomes the API's trainer, or finds that this run is it already. Returns what is known to
        be lost with an earlier API. Raises as `api.join` does."""
        ours = self.spool.registrations
        name = self.client.trainer()
        anew = reset or name not in ours
        # Environments go on from the API's step, which counts batches, including those of this
        # run's earlier APIs.
        step = max(
            self.registration.starting_step, -(-self._region.end // self.registration.batch_size)
        )
        if anew:
            name = f"{self.registration.wandb_group}-{uuid.uuid4().hex[:8]}"
            self.spool.note_registration(name, step)
        asked = msgspec.structs.replace(self.registration, wandb_group=name, starting_step=step)
        status = join(self.client, asked, reset=reset)
        held = self.client.trainer() or ""
        before = self._region
        # the API may have handed out a batch that the spool does not have
        self._unsure = self._losses = not anew
        # A program that always registers under one name may have registered at a new API, whose
        # step is lower.
        if held == before.registration and status.current_step >= before.step:
            self._may_hold_older = before.step == ours.get(held)  # none has been assembled since
            return []
        if held not in ours or held == before.registration:
            message = (
                "Continuing on the Atropos API at %s, where %s had registered before: %d groups "
                "queued, %d batches assembled. If that run is not over, the two take rollouts from "
                "each other."
            )
            logger.info(message, self.client.url, held, status.queue_size, status.current_step)
            self.spool.note_registration(held, status.current_step)
        self._may_hold_older = held != name or not anew
        lost = self._settle(with_api=True)
        self._region = self._next_region(held, self.spool.registrations[held], 0)
        return lost

    def _rejoin(self) -> list[Arrival]:
        """The API holds no trainer, or another: it was restarted, or reset by somebody else."""
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
        self._diagnosis.note_restart()
        self.pause = self.poll_interval
        self._failing_since = None
        self.quiet_since = time.monotonic()
        return lost

    def pull(self) -> list[Arrival]:
        """Sends at most one `GET /batch`. Returns what has a place now, often nothing. Raises
        `RolloutError` if the API has failed for `api_down_timeout` seconds, or came back with
        another registration."""
        try:
            if self._held is not None:
                return self._place_held()
            if self._unsure:
                return self._look()
            reply = self._batch()
            if reply.batch and not self._has_registered_size(reply.batch):
                return self._discard_of_other_size(reply.batch)
        except (ApiUnreachable, ReplyLost) as error:
            self._losses |= isinstance(error, ReplyLost)
            return self._note_failure(error)
        if reply.status == "error":
            return self._rejoin()
        self._failing_since = None
        if not reply.batch:
            self.pause = self.poll_interval
            lost = self._settle()
            self._losses = self._may_hold_older = False
            return lost + self._look_if_quiet()
        self.pause = 0.0
        self._held = reply.batch
        return []

    def _has_registered_size(self, batch: Batch) -> bool:
        """Whether a batch may be of the size that this run registered: a group that is unreadable
        has size 0."""
        sizes = [group.size for group in batch]
        missing = self.registration.batch_size - sum(sizes)
        return missing == 0 or (missing > 0 and 0 in sizes)

    def _discard_of_other_size(self, batch: Batch) -> list[Arrival]:
        """Such a batch has no place in this run. Usually the API was restarted and another trainer
        registered first: then joining again raises `RolloutError` with its name."""
        if self.client.trainer() == self._region.registration:
            self._note_repeated()
            self._unsure = True  # if the API's step counts that batch, it is lost
            return []
        rollouts = sum(group.size for group in batch)
        message = (
            "The Atropos API at %s answered with a batch of %d rollouts, and this run registered "
            "for %d: it was restarted or reset, and another trainer registered first. They are not "
            "trained on."
        )
        logger.warning(message, self.client.url, rollouts, self.registration.batch_size)
        return self._rejoin()

    def let_begin(self, rollouts: int) -> None:
        """With a new policy, as many of the requests that waited may begin as are for one batch.
        `rollouts` have been pulled and not handed out: where the API gave out several batches at
        once, environments have asked for as many anew, and what begins now is trained on after all
        of these."""
        if self.policy_is_new and self._holding and self.hold_requests is not None:
            self.hold_requests(True, 1 / (1 + rollouts // self.registration.batch_size))
        self.policy_is_new = False

    def _batch(self) -> BatchReply:
        """What `GET /batch` gives. It lets environments begin the next batch: where this must be of
        the next policy, their requests wait from before a batch is given out until the policy is
        new, or none is left to train on."""
        if self.hold_requests is not None:
            if self._none_can_come():
                if self._holding:
                    self.hold_requests(False, 1.0)
                self._holding = False
                return BatchReply(None)
            if not self._holding:
                self.hold_requests(True, 0.0)
        self._holding = False
        self._open_since = self._asked = time.monotonic()
        try:
            reply = self.client.batch()
            self._holding = bool(reply.batch)
        finally:
            self._open_since = None
            if self.hold_requests is not None and not self._holding:
                self.hold_requests(False, 1.0)
        return reply

    def _none_can_come(self) -> bool:
        """Whether too few groups are queued, if they are no larger than those that came: then
        nobody need wait."""
        largest = max(
            (size for seen in self._diagnosis.deliveries.values() for size in seen.sizes),
            default=None,
        )
        if (
            largest is None
            or self._region.left
            or self._losses
            or time.monotonic() - self._asked > LOOK_AGAIN
        ):
            return False
        with suppress(ApiUnreachable, ReplyLost):  # `GET /batch` finds out what is wrong
            return self.client.status().queue_size * largest < self.registration.batch_size
        return False

    def _look(self) -> list[Arrival]:
        """Asks whether this trainer's registration still holds, and how many batches the API has
        assembled."""
        rise = self._rise()
        if rise < 0:
            return self._rejoin()
        self._unsure = False
        if not rise:
            return []
        # A lost request made the API assemble these batches, so at least one of them is lost.
        self._failing_since = None
        self._losses = True
        return self._open(rise)

    def _place_held(self) -> list[Arrival]:
        """The API assembles batches and raises its step when a pull finds none: then the held batch
        is of those."""
        assert self._held is not None
        rise = self._rise()
        self._unsure = rise < 0  # that API is gone
        batch = self._held
        self._held = None
        lost = []
        came_before = _fingerprint(batch) in self._seen
        uncounted = rise == 0 and not self._region.left
        if rise > 0:
            lost = self._open(rise)
            self._losses = self._may_hold_older = False
        elif came_before and self._region.left:
            self._set_aside.append(batch)  # until the region's end tells how many are equal
            return []
        elif came_before or (uncounted and not self._may_hold_older):
            self._note_repeated()
            return []
        elif uncounted:  # assembled before this run joined
            self._region = self._next_region(self._region.registration, self._region.step, 1)
        return [*lost, self._place(batch)]

    def _note_repeated(self) -> None:
        """A batch came that the API's step does not count."""
        self.pause = self.poll_interval
        if self._cached:
            return
        self._cached = True
        message = (
            "The Atropos API at %s answered with a batch that it had given out before, as its step "
            "tells: an HTTP cache stands before it. Batches that come twice are not trained on "
            "again, but a cache costs time and may lose others: exempt the API from it, or set "
            "`atropos_url` to the API itself. This is said once."
        )
        logger.warning(message, self.client.url)

    def _rise(self) -> int:
        """By how many batches the API's step has risen; -1 if it is not the API that this trainer
        registered at."""
        if self._unsure and self.client.trainer() != self._region.registration:
            return -1
        return max(-1, self.client.status().current_step - self._region.step)

    def give_back(self) -> list[Arrival]:
        """Places the held batch, if any, without asking the API."""
        batch = self._held
        self._held = None
        if batch is None or _fingerprint(batch) in self._seen:
            # if the API's step counts it all the same, the next life of the run finds that it is
            # lost
            return []
        return [self._place(batch)]

    def _place(self, batch: Batch) -> Arrival:
        """The batch is the newest that is left of the region."""
        self.quiet_since = time.monotonic()
        self._diagnosis.note(batch)
        self._seen.add(_fingerprint(batch))
        self._note_progress(self.quiet_since)
        if not self._region.left:  # the API was not asked for its step, or is gone
            self._region = self._next_region(self._region.registration, self._region.step + 1, 1)
        size = self._region.batch_size
        left = self._region.left - 1
        self._region = replace(self._region, left=left)
        return Part(self._region.base + left * size, size, self._region), batch

    def _note_progress(self, now: float) -> None:
        """The oldest batches of a region come last, and nothing is handed out before them."""
        region = self._region
        if 0 < region.left < region.batches:
            self.catching_up += now - self._placed
        else:
            self._progress_told = now
        self._placed = now
        if now - self._progress_told >= PROGRESS:
            self._progress_told = now
            message = (
                "Pulled %d of %d batches that were queued at the Atropos API. The oldest "
                "comes last."
            )
            logger.info(message, region.batches - region.left + 1, region.batches)

    def _place_set_aside(self) -> list[Arrival]:
        """The region has ended: as many of the batches that equal others belong to it as it still
        lacks."""
        placed = []
        for batch in self._set_aside:
            if self._region.left:
                placed.append(self._place(batch))
            else:
                self._note_repeated()
        self._set_aside.clear()
        return placed

    def _open(self, batches: int) -> list[Arrival]:
        """The API had nothing left of the region, and has assembled `batches` new ones."""
        lost = self._settle()
        self._region = self._next_region(
            self._region.registration, self._region.step + batches, batches
        )
        return lost

    def _settle(self, with_api: bool = False) -> list[Arrival]:
        """The API holds no batch: what is left of the region was lost on its way, or with an
        earlier API."""
        if with_api:  # whether it had given out a batch once or twice, nobody can tell any more
            self._set_aside.clear()
        placed = self._place_set_aside()
        if not self._region.left:
            return placed
        size = self._region.left * self._region.batch_size
        self._region = replace(self._region, left=0)
        if with_api:
            return [(Part(self._region.base, size, self._region, lost_with_api=size), None)]
        if self._losses:
            message = (
                "%d rollouts are lost: the Atropos API gave them out, and its reply did not "
                "arrive. If it answered 500, a score, log-probability or advantage in them is NaN "
                "or infinite: correct the environment."
            )
            logger.warning(message, size)
        elif not self._sharing:
            self._sharing = True
            message = (
                "%d rollouts are lost: another trainer asks the Atropos API at %s for batches, "
                "too, and got them. Stop it, or give it an API of its own (`atropos_url`). Later "
                "losses are only counted in the metrics."
            )
            logger.warning(message, size, self.client.url)
        return [
            *placed,
            (Part(self._region.base, size, self._region, {LOST_IN_DELIVERY: size}), None),
        ]

    def _next_region(self, registration: str, step: int, batches: int) -> Region:
        """Its batch size is this run's; what the run resumes from may have had another."""
        return Region(
            registration, step, self._region.end, self.registration.batch_size, batches, batches
        )

    def warn_if_hung(self) -> None:
        """Called while somebody waits for rollouts: warns once a minute of a request that is not
        answered."""
        now = time.monotonic()
        since = self._open_since
        if since is None or now - max(since, self._hang_warned) < QUIET_WARNING:
            return
        self._hang_warned = now
        message = (
            "The Atropos API at %s has accepted a request for a batch, and has not answered for "
            "%.0f s: it hangs. This run waits up to %g s, because giving up loses the batch. Then "
            "restart the API and the environments."
        )
        logger.warning(message, self.client.url, now - since, self.client.batch_timeout)

    def _note_failure(self, error: RolloutError) -> list[Arrival]:
        self._unsure = True
        self.pause = RETRY_PAUSE
        if self._failing_since is None:
            self._failing_since = time.monotonic()
            if isinstance(error, ReplyLost):
                self.pause = 0.0
            message = "The Atropos API gave no usable answer; trying for another %g s. %s"
            logger.warning(message, self.api_down_timeout, error)
        elif (seconds := time.monotonic() - self._failing_since) > self.api_down_timeout:
            if isinstance(error, RateLimited):
                raise error
            raise RolloutError(
                f"The Atropos API at {self.client.url} has given no usable answer for "
                f"{seconds:.0f} s. Start it again (`python -m atroposlib.cli.run_api`), then the "
                f"environments, and resume from the last checkpoint. Last try: {error}"
            ) from error
        return []

    def _remove_strays(self) -> None:
        """Once such groups are queued, the API assembles no batch any more."""
        now = time.monotonic()
        if not self._removes_strays or now - max(self.quiet_since, self._strays_asked) < STRAYS:
            return
        self._strays_asked = now
        sizes = self.client.remove_strays()
        self._removes_strays = sizes is not None
        if not sizes:
            return
        message = (
            "Removed %d groups of %s rollouts from the queue of the Atropos API at %s: no batch of "
            "%d can be assembled while they are there, and no environment has registered with such "
            "a `group_size`. Have who sends them register and set `env_id`, and make the batch "
            "size a multiple of every group size."
        )
        logger.warning(
            message,
            len(sizes),
            _list(sorted(set(sizes))),
            self.client.url,
            self.registration.batch_size,
        )

    def _look_if_quiet(self) -> list[Arrival]:
        """After every minute without a batch, the log says what may be wrong."""
        self._remove_strays()
        if time.monotonic() - self.quiet_since < QUIET_WARNING:
            return []
        self.quiet_since = time.monotonic()
        with suppress(ApiUnreachable, ReplyLost):  # the next pull finds out what is wrong
            if self.client.info().batch_size == UNREGISTERED:
                return self._rejoin()
        logger.warning("No batch for %g s. %s", QUIET_WARNING, self.explain(self.why_quiet()))
        return []


def _fingerprint(batch: Batch) -> bytes:
    """16 bytes, equal for batches of equal tokens, log-probabilities and scores."""
    digest = hashlib.blake2b(digest_size=16)
    for group in batch:
        if isinstance(group, RejectedGroup):
            digest.update(repr((str(group), group.env_id, group.size)).encode())
            continue
        digest.update(np.array([len(tokens) for tokens in group.tokens]).tobytes())
        digest.update(np.array(group.scores).tobytes())
        for values in (*group.tokens, *group.logprobs):
            digest.update(b"" if values is None else values.tobytes())
    return digest.digest()


@dataclass
class Deliveries:
    """What this run has received from one environment."""

    groups: int = 0
    last: float = 0.0  # time.monotonic()
    sizes: set[int] = field(default_factory=set)  # rollouts per group
    longest: int = 0  # tokens of its longest rollout


@dataclass(eq=False)
class Diagnosis:
    """Why no batch comes, from what has come so far and what the API tells, which has no
    heartbeat."""

    client: AtroposClient
    registration: Registration  # this trainer's, for the batch size and the length limit
    names: Callable[[], Mapping[int, str]]  # of environments by their numbers at the API
    deliveries: dict[int, Deliveries] = field(default_factory=dict)  # by environment
    restarted: float | None = None

    def note(self, batch: Batch) -> None:
        """A batch came: remembers which environment sent what."""
        for group in batch:
            if group.env_id is not None:
                lengths = (
                    [len(tokens) for tokens in group.tokens]
                    if isinstance(group, ScoredGroup)
                    else []
                )
                seen = self.deliveries.setdefault(group.env_id, Deliveries())
                seen.groups, seen.last = seen.groups + 1, time.monotonic()
                seen.sizes |= {group.size} - {0}
                seen.longest = max([seen.longest, *lengths])

    def note_restart(self) -> None:
        """The API was restarted or reset: it numbers its environments anew."""
        self.deliveries.clear()
        self.restarted = time.monotonic()

    def why_quiet(self) -> str:
        """Why no batch comes, as far as the API tells, and what to do about it."""
        api = f"The Atropos API at {self.client.url}"
        try:
            if self.client.info().batch_size == UNREGISTERED:
                return (
                    f"{api} was restarted or reset and holds no trainer. This run registers again "
                    "by itself; what was queued there is lost, and its environments end: start "
                    "them again."
                )
            status = self.client.status()
            environments = self.client.environments()
            if status.queue_size:
                return self._why_no_batch(
                    f"{api} holds {status.queue_size} groups", status.queue_size, environments
                )
        except (ApiUnreachable, ReplyLost) as error:
            return f"{api} does not answer: {error}."
        if environments:
            return f"{api} {self._why_nothing_queued(len(environments))}"
        ago = (
            f" since it was restarted {time.monotonic() - self.restarted:.0f} s ago"
            if self.restarted
            else ""
        )
        return (
            f"No environment has registered with the Atropos API at {self.client.url}{ago}. Start "
            f"one with `--env.rollout_server_url {self.client.url}`, or name it under "
            "`environments` in the recipe; if one runs, its log says what it waits for. "
            "(Environments do not register again by themselves.)"
        )

    def _why_no_batch(self, holds: str, queued: int, environments: list[EnvironmentStatus]) -> str:
        batch = self.registration.batch_size
        largest = 0
        reserved = 0.0
        if environments:
            largest = environments[0].max_group_size
            reserved = 1 - environments[0].unallocated_fraction
            holds += f" of at most {largest} rollouts"
        idle = [env_id for env_id, state in enumerate(environments) if state.self_queue_size == 0]
        if reserved > 1e-9 and idle:
            return (
                f"{holds}, but {reserved:.0%} of every batch is reserved by "
                f"`min_batch_allocation`, and {self._named(idle)} "
                f"{'has' if len(idle) == 1 else 'have'} nothing queued, so that no batch is "
                f"assembled. {self._last_heard(idle)} Start it again, or take its reservation "
                f"away: {disconnect_command(self.client.url, idle)}."
            )
        sizes = {env_id: set(seen.sizes) for env_id, seen in self.deliveries.items()}
        latest = self.client.latest_example()
        if latest is not None and latest.env_id is not None:
            sizes.setdefault(latest.env_id, set()).add(len(latest.tokens))
        every = set().union(*sizes.values())
        full = every <= {largest} and (queued + 1) * largest > batch  # no further group would fit
        if queued * largest < batch and largest and not full:
            return (
                f"{holds}, less than a batch of {batch}: the environments are slow or have "
                f"stopped. {self._last_heard(range(len(environments)))} Look at their logs; raise "
                "`rollout_timeout` if they are at work."
            )
        known = [
            f"{self._named([env_id])} sends groups of {_list(sorted(sizes[env_id]))}"
            for env_id in sorted(sizes)
        ]
        if largest and largest not in every:
            known.append(f"the largest group queued is of {largest}")
        if latest is not None and latest.env_id is None and latest.tokens:
            known.append(
                f"the group that was queued last is of {len(latest.tokens)} and has no `env_id`"
            )
        return (
            f"{holds} but cannot assemble exactly {batch} rollouts from them. {_sentence(known)} "
            "Make the batch size (`per_device_train_batch_size` x processes x "
            "`gradient_accumulation_steps`) a multiple of every group size, and the group sizes "
            "powers of two of each other. What is queued there stays in the way: set "
            "`reset_atropos: true` for the next run, or restart the API, and start the "
            "environments again."
        )

    def _why_nothing_queued(self, count: int) -> str:
        limit = self.registration.max_token_len
        growing = ""
        near = {
            env_id: seen.longest
            for env_id, seen in self.deliveries.items()
            if seen.longest >= NEARLY * limit
        }
        if near:
            growing = (
                f" The rollouts of {self._named(near)} had grown to {max(near.values())} tokens, "
                "close to the limit: later ones were probably longer."
            )
        has = f"has {count} environments, but its queue is empty"
        has = has if count > 1 else "has an environment, but its queue is empty"
        return (
            f"{has}: nothing that was sampled is delivered. {self._last_heard(range(count))}"
            f"{growing} The API cannot tell a dead environment from one that delivers nothing. "
            "Look at the environment's log: it may have ended, may not reach the inference "
            "server, may send groups of another size than its `group_size` (the API holds those "
            "back), or may drop groups whose scores are all equal (`ensure_scores_are_not_same`; "
            'its log says "Scores are the same in a group, skipping") or that have a '
            f'rollout of {limit} tokens or more ("Token length is too long in a group, skipping").'
        )

    def _named(self, env_ids: Iterable[int]) -> str:
        labels = [label_of(env_id, self.names()) for env_id in sorted(env_ids)]
        return f"environment{'s' if len(labels) > 1 else ''} {_list(labels)}"

    def _last_heard(self, env_ids: Iterable[int]) -> str:
        """What each environment has delivered to this run, and how long ago."""
        known = []
        for env_id in env_ids:
            delivered = "nothing to this run"
            seen = self.deliveries.get(env_id)
            if seen is not None:
                ago = f"{time.monotonic() - seen.last:.0f} s ago"
                delivered = f"{seen.groups} groups of {_list(sorted(seen.sizes))}, the last {ago}"
            known.append(f"{self._named([env_id])} has delivered {delivered}")
        return _sentence(known)


def _list(entries: Iterable) -> str:
    return ", ".join(map(str, entries)) or "unknown size"


def _sentence(parts: list[str]) -> str:
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}." if text else ""
