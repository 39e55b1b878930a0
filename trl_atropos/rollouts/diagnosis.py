"""Explains why no batch comes.

`deliveries.py` notes what comes, `pull.py` asks for a warning after every minute of silence, and
`source.py` asks when the trainer has waited for too long. The answer is from what has come so far,
from the Atropos API, which has no heartbeat, and from the run's environments, inference servers and
publisher.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from trl_atropos.rollouts.api import (
    UNREGISTERED,
    AtroposClient,
    EnvironmentStatus,
    LatestExample,
    NoAnswer,
    Registration,
    disconnect_command,
    label_of,
)
from trl_atropos.rollouts.versions import VersionBook
from trl_atropos.rollouts.wire import ScoredGroup
from trl_atropos.rollouts.wire_values import RejectedGroup

logger = logging.getLogger(__name__)

# Seconds without a batch after which the log says what may be wrong, and until it says so again.
QUIET_WARNING = 30.0
WARNED_AGAIN = 60.0
# Share of the length limit. An environment that came so close probably drops its next rollouts.
NEARLY = 0.95
RESERVED = 1e-9  # a share of the batch above rounding errors

Batch = list[ScoredGroup | RejectedGroup]


class Environments:
    """Stands for the environments of a run that started none. `services.environments.Supervisor`
    stands for those that a run started."""

    def start(self) -> None: ...

    def names(self) -> Mapping[int, str]:
        """Returns their names by their numbers at the API."""
        return {}

    def explain(self, reason: str) -> str:
        """Returns why no batch comes, with what the logs of the environments say."""
        return reason

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...


@dataclass
class EnvironmentHistory:
    """Numbers of what came from one environment."""

    groups: int = 0
    last_time: float = 0.0  # time.monotonic()
    sizes: set[int] = field(default_factory=set)  # rollouts per group
    longest: int = 0  # tokens of its longest rollout


@dataclass(eq=False)
class Diagnosis:
    """
    Knows why no batch comes, and for how long none has.

    Args:
        client: of the API.
        registration: this trainer's, for the batch size and the length limit.
        environments: those that the run started.
        versions: the inference servers.
        explain_publisher: adds what the publisher knows to a reason.
    """

    client: AtroposClient
    registration: Registration
    environments: Environments = field(default_factory=Environments)
    versions: VersionBook = field(default_factory=VersionBook)
    explain_publisher: Callable[[str], str] = str

    def __post_init__(self):
        self._begin_silence()
        self._histories: dict[int, EnvironmentHistory] = {}  # by number at the API
        self._restarted: float | None = None  # when the API was restarted last

    def note(self, batch: Batch) -> None:
        """Remembers which environments sent the batch that has just come."""
        self._begin_silence()
        for group in batch:
            if group.env_id is None:
                continue
            history = self._histories.setdefault(group.env_id, EnvironmentHistory())
            history.groups += 1
            history.last_time = time.monotonic()
            if group.size:  # 0: the group is unreadable
                history.sizes.add(group.size)
            if isinstance(group, ScoredGroup):
                longest = max(len(tokens) for tokens in group.tokens)
                history.longest = max(history.longest, longest)

    def note_restart(self) -> None:
        """Forgets the environments of an API that was restarted or reset: it numbers them anew."""
        self._histories.clear()
        self._restarted = time.monotonic()
        self._begin_silence()

    def note_demand(self) -> None:
        """Restarts the silence, because only now somebody waits for a batch."""
        self._begin_silence()

    def _begin_silence(self) -> None:
        self.quiet_since = time.monotonic()  # since when somebody waits for a batch
        self._messages = 0  # about this silence
        self._next_message = QUIET_WARNING  # seconds after its begin

    def warning_is_due(self) -> bool:
        """Returns whether the log should say why no batch comes: after half a minute of silence,
        and each minute from then on."""
        silence = time.monotonic() - self.quiet_since
        if silence < self._next_message:
            return False
        self._next_message = silence + WARNED_AGAIN
        return True

    def warn(self) -> None:
        """Logs why no batch comes. The first message of a silence is no warning: an environment's
        first group takes long, and so do long completions."""
        seconds = time.monotonic() - self.quiet_since
        level = logging.INFO if self._messages == 0 else logging.WARNING
        logger.log(level, "No batch for %.0f s. %s", seconds, self.explain(self.why_quiet()))
        self._messages += 1

    def explain(self, reason: str) -> str:
        """Returns `reason`, and what the inference servers refused to sample, and what the
        environments and the publisher know."""
        reason = f"{reason} {self.versions.refusals()}".rstrip()
        return self.explain_publisher(self.environments.explain(reason))

    def largest_group(self) -> int | None:
        """Returns the size of the largest group that has come, in rollouts, or None."""
        all_sizes = set().union(*self._sizes().values())
        return max(all_sizes, default=None)

    def names(self) -> dict[int, str]:
        """Returns the environments' names by their numbers at the API: as the recipe names them, or
        else as they registered. For example, a second environment of the name `sums` is
        `sums-2`."""
        recipe_names = self.environments.names()
        registered_names = {}
        counts = Counter()
        for number, name in enumerate(self.client.names()):
            if name not in recipe_names.values():  # else the run has started it again
                counts[name] += 1
            registered_names[number] = name
            if counts[name] > 1:
                registered_names[number] = f"{name}-{counts[name]}"
        return registered_names | recipe_names

    def why_quiet(self) -> str:
        """Returns why no batch comes, as far as the API tells, and what to do about it."""
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
                return self._why_no_batch(status.queue_size, environments)
        except NoAnswer as error:
            return f"{api} does not answer: {error}."
        if environments:
            return self._why_nothing_queued(len(environments))
        return self._why_no_environment()

    def _why_no_batch(self, queued: int, environments: list[EnvironmentStatus]) -> str:
        """Returns why the API assembles no batch of the `queued` groups."""
        holds = f"The Atropos API at {self.client.url} holds {queued} groups"
        largest = 0
        reserved = 0.0
        if environments:
            largest = environments[0].max_group_size
            reserved = 1 - environments[0].unallocated_fraction
            holds += f" of at most {largest} rollouts"
        idle = []
        for env_id, status in enumerate(environments):
            if status.self_queue_size == 0:
                idle.append(env_id)
        if reserved > RESERVED and idle:
            return f"{holds}, but {self._why_reserved(reserved, idle)}"
        latest = self.client.latest_example()
        sizes = self._sizes()
        if latest is not None and latest.env_id is not None:
            sizes.setdefault(latest.env_id, set()).add(len(latest.tokens))
        batch_size = self.registration.batch_size
        too_few = queued * largest < batch_size
        all_sizes = set().union(*sizes.values())
        # For example groups of 3 and a batch of 4: one group is too few, and two do not fit.
        next_does_not_fit = all_sizes <= {largest} and (queued + 1) * largest > batch_size
        if largest and too_few and not next_does_not_fit:
            return (
                f"{holds}, less than a batch of {batch_size}: the environments are slow or have "
                f"stopped. {self._deliveries_of(range(len(environments)))} Look at their logs; "
                "raise `rollout_timeout` if they are at work."
            )
        return f"{holds} {self._why_sizes_do_not_fit(sizes, largest, latest)}"

    def _why_reserved(self, reserved: float, idle: list[int]) -> str:
        verb = "have"
        if len(idle) == 1:
            verb = "has"
        return (
            f"{reserved:.0%} of every batch is reserved by `min_batch_allocation`, and "
            f"{self._named(idle)} {verb} nothing queued, so that no batch is assembled. "
            f"{self._deliveries_of(idle)} Start it again, or take its reservation away: "
            f"{disconnect_command(self.client.url, idle)}."
        )

    def _why_sizes_do_not_fit(
        self, sizes: dict[int, set[int]], largest: int, latest: LatestExample | None
    ) -> str:
        facts = []
        for env_id in sorted(sizes):
            facts.append(f"{self._named([env_id])} sends groups of {_listed(sizes[env_id])}")
        if largest and largest not in set().union(*sizes.values()):
            facts.append(f"the largest group queued is of {largest}")
        if latest is not None and latest.env_id is None and latest.tokens:
            facts.append(
                f"the group that was queued last is of {len(latest.tokens)} and has no `env_id`"
            )
        return (
            f"but cannot assemble exactly {self.registration.batch_size} rollouts from them. "
            f"{_sentence(facts)} "
            "Make the batch size (`per_device_train_batch_size` x processes x "
            "`gradient_accumulation_steps`) a multiple of every group size, and the group sizes "
            "powers of two of each other. What is queued there stays in the way: set "
            "`reset_atropos: true` for the next run, or restart the API, and start the "
            "environments again."
        )

    def _why_nothing_queued(self, count: int) -> str:
        limit = self.registration.max_token_len
        has = f"has {count} environments, but its queue is empty"
        if count == 1:
            has = "has an environment, but its queue is empty"
        return (
            f"The Atropos API at {self.client.url} {has}: nothing that was sampled is delivered. "
            f"{self._deliveries_of(range(count))}{self._near_the_limit(limit)} "
            "The API cannot tell a dead environment from one that delivers nothing. "
            "Look at the environment's log: it may have ended, may not reach the inference "
            "server, may send groups of another size than its `group_size` (the API holds those "
            "back), or may drop groups whose scores are all equal (`ensure_scores_are_not_same`; "
            'its log says "Scores are the same in a group, skipping") or that have a '
            f'rollout of {limit} tokens or more ("Token length is too long in a group, skipping").'
        )

    def _near_the_limit(self, limit: int) -> str:
        near = {}
        for env_id, history in self._histories.items():
            if history.longest >= NEARLY * limit:
                near[env_id] = history.longest
        if not near:
            return ""
        return (
            f" The rollouts of {self._named(near)} had grown to {max(near.values())} tokens, "
            "close to the limit: later ones were probably longer."
        )

    def _why_no_environment(self) -> str:
        since = ""
        if self._restarted is not None:
            since = f" since it was restarted {time.monotonic() - self._restarted:.0f} s ago"
        return (
            f"No environment has registered with the Atropos API at {self.client.url}{since}. "
            f"Start one with `--env.rollout_server_url {self.client.url}`, or name it under "
            "`environments` in the recipe; if one runs, its log says what it waits for. "
            "(Environments do not register again by themselves.)"
        )

    def _sizes(self) -> dict[int, set[int]]:
        """Returns the sizes of the groups that came from each environment."""
        return {env_id: set(history.sizes) for env_id, history in self._histories.items()}

    def _deliveries_of(self, env_ids: Iterable[int]) -> str:
        """Returns a sentence on what each environment has delivered to this run, and how long
        ago."""
        facts = []
        for env_id in env_ids:
            delivered = "nothing to this run"
            history = self._histories.get(env_id)
            if history is not None:
                seconds = time.monotonic() - history.last_time
                sizes = _listed(history.sizes)
                delivered = f"{history.groups} groups of {sizes}, the last {seconds:.0f} s ago"
            facts.append(f"{self._named([env_id])} has delivered {delivered}")
        return _sentence(facts)

    def _named(self, env_ids: Iterable[int]) -> str:
        """Returns for example "environment sums" or "environments 1, 2"."""
        names = self.names()
        labels = [label_of(env_id, names) for env_id in sorted(env_ids)]
        noun = "environment"
        if len(labels) > 1:
            noun = "environments"
        return f"{noun} {', '.join(labels)}"


def _listed(sizes: Iterable[int]) -> str:
    return ", ".join(str(size) for size in sorted(sizes)) or "unknown size"


def _sentence(facts: list[str]) -> str:
    text = "; ".join(facts)
    if not text:
        return ""
    return f"{text[0].upper()}{text[1:]}."
