"""Why no batch comes: what the Atropos API tells about its queue and its environments, put together with what came.

`BatchPuller` notes every batch and asks `why_quiet` after a minute of silence; the trainer asks it, through the
source, when it gives up. The API has no heartbeat and tells neither the names nor the group sizes of environments, so
a message says what is known, what cannot be known from here, and what to look for in which log.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from trl_atropos.rollouts.api import (
    UNREGISTERED,
    ApiUnreachable,
    AtroposClient,
    EnvironmentStatus,
    Registration,
    ReplyLost,
    Status,
    label_of,
)
from trl_atropos.rollouts.wire import RejectedGroup, ScoredGroup

NEARLY = 0.95  # of the length limit: what follows will have been dropped by its environment


@dataclass
class Deliveries:
    """What this run has received from one environment."""

    groups: int = 0
    last: float = 0.0  # time.monotonic()
    sizes: set[int] = field(default_factory=set)  # rollouts per group
    longest: int = 0  # tokens of the longest rollout of its latest batch


class Diagnosis:
    """
    Args:
        client: of the API.
        registration: this trainer's, for the batch size and the length limit.
        names: gives the names of environments by their numbers at the API.
    """

    def __init__(self, client: AtroposClient, registration: Registration, names: Callable[[], Mapping[int, str]]):
        self._client = client
        self._names = names
        self._batch_size = registration.batch_size
        self._max_token_len = registration.max_token_len
        self._deliveries: dict[int, Deliveries] = {}
        self._restarted: float | None = None

    def note(self, batch: list[ScoredGroup | RejectedGroup]) -> None:
        """A batch came: remember who sent what."""
        now, longest = time.monotonic(), {}
        for group in batch:
            if group.env_id is None:
                continue
            lengths = [len(tokens) for tokens in group.tokens] if isinstance(group, ScoredGroup) else []
            seen = self._deliveries.setdefault(group.env_id, Deliveries())
            seen.groups, seen.last = seen.groups + 1, now
            seen.sizes |= {len(lengths) or group.size} - {0}
            longest[group.env_id] = max([longest.get(group.env_id, 0), *lengths])
        for env_id, length in longest.items():
            self._deliveries[env_id].longest = length

    def note_restart(self) -> None:
        """The API was restarted or reset: it numbers its environments anew."""
        self._deliveries.clear()
        self._restarted = time.monotonic()

    def why_quiet(self) -> str:
        """Why no batch comes, as far as the API tells, and what to do about it."""
        try:
            if self._client.info().batch_size == UNREGISTERED:
                return (
                    f"The Atropos API at {self._client.url} was restarted or reset and holds no trainer. This run "
                    "registers again by itself; what was queued there is lost, and environments that were registered "
                    "end and must be started again."
                )
            status = self._client.status()
            environments = self._client.environments()
        except (ApiUnreachable, ReplyLost) as error:
            return f"The Atropos API at {self._client.url} does not answer: {error}."
        if status.queue_size:
            return self._why_no_batch(status, environments)
        return self._why_nothing_queued(environments) if environments else self._why_nobody()

    # -------------------------------------------------------------------------------------------- something is queued

    def _why_no_batch(self, status: Status, environments: list[EnvironmentStatus]) -> str:
        api, batch = f"The Atropos API at {self._client.url}", self._batch_size
        largest = environments[0].max_group_size if environments else None
        holds = f"{api} holds {status.queue_size} groups" + (f" of at most {largest} rollouts" if largest else "")
        reserved = 1 - environments[0].unallocated_fraction if environments else 0
        idle = [env_id for env_id, one in enumerate(environments) if one.self_queue_size == 0]
        if reserved > 1e-9 and idle:
            return (
                f"{holds}, but {reserved:.0%} of every batch is reserved by `min_batch_allocation`, and "
                f"{self._named(idle)} {'has' if len(idle) == 1 else 'have'} nothing queued: while one that reserves "
                f"has nothing, no batch is assembled for anybody. {self._last_heard(idle)} Start it again, or take "
                f"its reservation away: {disconnect_command(self._client.url, idle)}."
            )
        if largest and status.queue_size * largest < batch and not self._cannot_be_filled(status.queue_size, largest):
            return (
                f"{holds}, less than a batch of {batch}: the environments are slow or have stopped. "
                f"{self._last_heard(range(len(environments)))} Look at their logs; raise `rollout_timeout` if they "
                "are at work."
            )
        return (
            f"{holds} but cannot assemble exactly {batch} rollouts from them. {self._sizes(largest)}Make the batch "
            "size (`per_device_train_batch_size` x processes x `gradient_accumulation_steps`) a multiple of every "
            "group size, and the group sizes powers of two of each other. What is queued there stays in the way: set "
            "`reset_atropos: true` for the next run, or restart the API, and start the environments again."
        )

    def _cannot_be_filled(self, queued: int, largest: int) -> bool:
        """Whether no further group fits into what is left of the batch, as all groups that are known have one size."""
        known = set().union(*self._known_sizes().values(), {largest})
        return len(known) == 1 and queued * largest + largest > self._batch_size

    def _known_sizes(self) -> dict[int, set[int]]:
        """By environment: of what came, and of the latest group that was queued."""
        sizes = {env_id: set(seen.sizes) for env_id, seen in self._deliveries.items()}
        latest = self._client.latest_example()
        if latest is not None and latest.env_id is not None:
            sizes.setdefault(latest.env_id, set()).add(len(latest.tokens))
        return sizes

    def _sizes(self, largest: int | None) -> str:
        """The group sizes that are known, and the largest."""
        sizes = self._known_sizes()
        told = [f"{self._named([env_id])} sends groups of {_list(sorted(sizes[env_id]))}" for env_id in sorted(sizes)]
        if largest and largest not in set().union(*sizes.values()):
            told.append(f"the largest group queued is of {largest}")
        return f"{_sentence(told)} " if told else ""

    # ---------------------------------------------------------------------------------------------- nothing is queued

    def _why_nobody(self) -> str:
        since = ""
        if self._restarted is not None:
            since = f" since it was restarted {time.monotonic() - self._restarted:.0f} s ago"
        return (
            f"No environment has registered with the Atropos API at {self._client.url}{since}. Start one with "
            f"`--env.rollout_server_url {self._client.url}`, or name it under `environments` in the recipe; if one "
            "runs, its log says what it waits for. (Environments do not register again by themselves.)"
        )

    def _why_nothing_queued(self, environments: list[EnvironmentStatus]) -> str:
        count, limit = len(environments), self._max_token_len
        has = "has an environment, but its queue is empty" if count == 1 else f"has {count} environments, but its"
        has += "" if count == 1 else " queue is empty"
        near = [env_id for env_id, seen in sorted(self._deliveries.items()) if seen.longest >= NEARLY * limit]
        growing = (
            f" The rollouts of {self._named(near)} had grown to {max(self._deliveries[i].longest for i in near)} "
            "tokens, close to the limit: later ones were probably longer."
            if near
            else ""
        )
        return (
            f"The Atropos API at {self._client.url} {has}: nothing that was sampled is delivered. "
            f"{self._last_heard(range(count))}{growing} The API cannot tell a dead environment from one that delivers "
            "nothing. Look at the environment's log: it may have ended, may not reach the inference server, may send "
            "groups of another size than its `group_size` (the API holds those back), or may drop groups whose scores "
            'are all equal (ensure_scores_are_not_same; its log says "Scores are the same in a group, skipping") or '
            f'that have a rollout of {limit} tokens or more ("Token length is too long in a group, skipping").'
        )

    def _named(self, env_ids: Iterable[int]) -> str:
        labels = [label_of(env_id, self._names()) for env_id in sorted(env_ids)]
        return f"environment{'s' if len(labels) > 1 else ''} {_list(labels)}"

    def _last_heard(self, env_ids) -> str:
        """Per environment, what it delivered to this run, and how long ago."""
        now, told = time.monotonic(), []
        for env_id in env_ids:
            seen = self._deliveries.get(env_id)
            if seen is None:
                told.append(f"{self._named([env_id])} has delivered nothing to this run")
            else:
                told.append(
                    f"{self._named([env_id])} has delivered {seen.groups} groups of {_list(sorted(seen.sizes))}, the "
                    f"last {now - seen.last:.0f} s ago"
                )
        return _sentence(told)


def disconnect_command(url: str, env_ids: list[int]) -> str:
    """What to type to have the API no longer count on an environment."""
    which = env_ids[0] if len(env_ids) == 1 else "ID"
    return f"`curl -X POST {url}/disconnect-env -H 'Content-Type: application/json' -d '{{\"env_id\": {which}}}'`"


def _list(entries) -> str:
    *before, last = map(str, entries)
    return f"{', '.join(before)} and {last}" if before else last


def _sentence(parts: list[str]) -> str:
    text = "; ".join(parts)
    return text[:1].upper() + text[1:] + "."
