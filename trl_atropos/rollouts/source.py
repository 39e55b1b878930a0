"""Where rollouts come from: the `RolloutSource` protocol, and `AtroposSource`, which pulls from a
live Atropos API.

In `AtroposSource`, a thread (`selection.Feed`) pulls batches (`pull.py`), makes rollouts of them,
    tagged with the
policy versions that sampled them (`intake.py`), and puts them on disk (`spool.py`). `poll` takes
them from there, oldest first.
"""

import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from trl_atropos.rollouts.api import AtroposClient, Registration, wait_for_api
from trl_atropos.rollouts.intake import (
    REJECTED,
    TOO_LONG,
    UNTRAINED,
    Intake,
    SingleRowGroups,
    VersionBook,
)
from trl_atropos.rollouts.pull import LOST_IN_DELIVERY, Arrival, BatchPuller
from trl_atropos.rollouts.rollout import Rollout, new_branch
from trl_atropos.rollouts.selection import OVER_SHARE, STALE, ZERO_VARIANCE, Books, Feed, Shares
from trl_atropos.rollouts.spool import oldest_cursor, open_spool

logger = logging.getLogger(__name__)

BATCH_TIMEOUT = 300.0  # seconds; long, because giving up on GET /batch loses the batch
RESUMED_MID_BATCH = "resumed_mid_batch"
DROPPED = {  # what these rollouts are, and what to do where a run waits for others
    STALE: "too old (`max_staleness`: raise it, or lower "
    "the environments' `max_batches_offpolicy`)",
    ZERO_VARIANCE: "of equal scores (`replace_zero_variance_groups`: give tasks of the right "
    "difficulty)",
    OVER_SHARE: "ahead of their environment's share (`enforce_environment_weights`: look at the "
    "logs of the others)",
    REJECTED: "of groups that cannot be trained on",
    TOO_LONG: "longer than `max_sequence_length`",
    UNTRAINED: "without a token to train on",
}
CLOSE_GRACE = 0.5  # seconds
# An environment with total_steps=-1 stops when the API's step passes this. That step also counts
# batches that are dropped or wait here, so a limit near the trainer's own would leave the end of a
# run without rollouts.
NO_STEP_LIMIT = 2**31 - 1


@dataclass(frozen=True)
class RunInfo:
    """What a source needs to know about the run it feeds."""

    batch_size: int  # rollouts per generation batch, over all ranks
    max_sequence_length: int  # tokens, prompt plus completion, inclusive
    temperature: float  # by which the trainer divides its logits
    starting_step: int  # optimizer steps already taken, when a run resumes
    max_steps: int
    output_dir: str
    save_steps: int  # 0 = never
    run_name: str
    # rollouts that the steps before `starting_step` took, for a source that can skip them
    rows_consumed: int = 0
    distils: bool = False  # whether the teachers that rollouts bring are learned from
    # ids that the model's embedding has; None = token ids are not checked
    vocab_size: int | None = None
    policy_version: Callable[[], int] = lambda: 0  # at which a rollout polled now will be trained
    # Takes a function to call when the next batch will be asked for soon, and what is sampled from
    # then on is of the policy version that it is trained at, or newer.
    when_wanted_soon: Callable[[Callable[[], None]], None] = lambda call: None
    # `state()` in the checkpoint from which the run resumes; `{}` if it resumes without, None if it
    # begins anew.
    state: dict[str, Any] | None = None
    # Number of the rollouts handed out before that checkpoint that are not trained yet: it was
    # written mid-batch.
    unfinished_rows: int = 0
    # Takes why no batch comes, as far as the source knows, and returns it with what the publisher
    # knows.
    explain: Callable[[str], str] = lambda why: why


class RolloutSource(Protocol):
    """Gives the trainer validated rollouts, oldest first. Every method is called on rank 0 only. A
    source that inherits from this class need only define `start` and `poll`."""

    def start(self, run: RunInfo) -> None:
        """Called once, when the sampler is healthy."""

    def poll(self, num_rollouts: int, timeout: float) -> list[Rollout] | None:
        """Exactly `num_rollouts` rollouts, with their `staleness` where that is known, or None when
        `timeout` seconds passed without that many; then call again."""

    def catching_up(self) -> float:
        """Seconds since `start` in which rollouts came that are handed out after older ones, which
        come later. They do not count towards `rollout_timeout`."""
        return 0.0

    def metrics(self) -> dict[str, float]:
        """What happened since the last call, to be logged."""
        return {}

    def diagnose(self) -> str:
        """Why `poll` has returned nothing for so long, as far as the source can tell, and what to
        do about it."""
        return ""

    def state(self) -> dict[str, Any]:
        """JSON for a checkpoint: where to go on after the rollouts handed out so far. `{}` for
        nothing."""
        return {}

    def close(self) -> None:
        """Closes connections and files. May be called more than once."""


class Environments:
    """What a run knows of the environments that it started, here none; see
    `services.environments.Supervisor`."""

    def start(self) -> None: ...

    def names(self) -> Mapping[int, str]:  # by their numbers at the API
        return {}

    # `why` no batch comes, with what the logs of the environments say
    def explain(self, why: str) -> str:
        return why

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...


@dataclass(eq=False)
class AtroposSource:
    """
    Pulls batches from a live Atropos API.

    Every rollout is in `<output_dir>/rollouts` before it is handed out, so that a run that resumes
    from a checkpoint goes on after its last rollout and loses none. A run that begins anew renames
    the folder of an earlier one.

    Args:
        url: root of the API, such as `http://127.0.0.1:8000`.
        reset_api: throw away what the API holds from an earlier run (queued rollouts, environments)
        at the start. request_timeout: seconds for one request other than `GET /batch`.
        poll_interval: seconds between two pulls while the API has no batch. start_timeout: seconds
        that `start` waits for the API to answer. api_down_timeout: seconds that the API may fail in
        mid-run before `poll` raises. versions: tells which policy versions sampled a rollout;
        without, they are unknown. environments: those that the run started. single_row_groups,
        prefetch_batches, max_staleness, hold_requests, max_spool_gb, replace_zero_variance_groups,
            enforce_environment_weights: as the settings of these names in `AtroposGRPOConfig`.

    Raises:
        RolloutError: from `start` and `poll`; the message has the fix.
    """

    url: str
    _: KW_ONLY
    reset_api: bool = False
    single_row_groups: SingleRowGroups = "refuse"
    request_timeout: float = 10.0
    poll_interval: float = 0.03
    start_timeout: float = 30.0
    api_down_timeout: float = 60.0
    versions: VersionBook | None = None
    environments: Environments | None = None
    prefetch_batches: int = 0
    max_staleness: int | None = None
    hold_requests: bool | None = None
    max_spool_gb: float = 10.0
    replace_zero_variance_groups: bool = False
    enforce_environment_weights: bool = False

    def __post_init__(self):
        if self.hold_requests is None:  # what else environments sampled were stale
            self.hold_requests = self.max_staleness == 0 and not self.prefetch_batches
        self._client = AtroposClient(
            self.url, request_timeout=self.request_timeout, batch_timeout=BATCH_TIMEOUT
        )
        self._versions = self.versions or VersionBook([], "", 0.0)
        self._environments = self.environments or Environments()
        self._shares: Shares | None = None
        self._feed: Feed | None = None
        self._restarts = 0  # of the API, that `metrics` has returned
        self._full = False  # whether the log says that the spool is full

    def start(self, run: RunInfo) -> None:
        """Registers and verifies. Asks for no batch: environments are let in by the first `GET
        /batch`."""
        fix = (
            "`python -m atroposlib.cli.run_api --port PORT`, correct `atropos_url`, or set "
            "`start_atropos: true`."
        )
        absent = (
            f"No Atropos API answered at {self._client.url} within {self.start_timeout:g} s. "
            f"Start one with {fix}"
        )
        wait_for_api(self._client.greet, self.start_timeout, absent)
        self._run = run
        self._spool = open_spool(
            Path(run.output_dir, "rollouts"), run.state, self.max_spool_gb * 1e9
        )
        cursor, books = self._resume(run)
        names = self._names
        limits = (run.max_sequence_length, run.temperature)
        self._intake = Intake(
            *limits, self.single_row_groups, vocab_size=run.vocab_size, names=names
        )
        self._puller = BatchPuller(
            self._client,
            _registration(run),
            self._spool,
            begin=cursor,
            poll_interval=self.poll_interval,
            api_down_timeout=self.api_down_timeout,
            explain=self._explain,
            names=names,
            hold_requests=self._versions.hold_requests if self.hold_requests else None,
        )
        if self.enforce_environment_weights:
            self._shares = Shares(self._client, slack=run.batch_size)
        self._feed = Feed(
            self._puller,
            self._spool,
            keep=self._keep,
            reason_to_drop=self._reason_to_drop,
            policy_version=run.policy_version,
            path=self._path,
            books=books,
            cursor=cursor,
            ahead=self.prefetch_batches * run.batch_size,
        )
        silent = (
            f"The Atropos API at {self._client.url} stopped answering during registration. "
            "Restart it."
        )
        lost = wait_for_api(
            lambda: self._puller.join(reset=self.reset_api), self.start_timeout, silent
        )
        for arrival in lost:
            self._keep(arrival)
        run.when_wanted_soon(self._pull_soon)
        self._environments.start()

    def _pull_soon(self) -> None:
        self._puller.policy_is_new = True
        self._feed.ask(self._run.batch_size)

    def _resume(self, run: RunInfo) -> tuple[int, Books]:
        """Sets the path of the run's versions. Returns the index of the first rollout to hand out,
        and the books."""
        branch = new_branch(run.policy_version())
        if not run.state:
            self._path = [branch]
            return 0, Books()
        self._path = [*run.state["lineage"], branch]
        cursor = run.state["cursor"]
        books = Books(**run.state["books"])
        if run.unfinished_rows:
            books.trained -= run.unfinished_rows
            books.dropped[RESUMED_MID_BATCH] += run.unfinished_rows
        if run.state["spool"] == self._spool.name:
            return cursor, books
        lost = run.state["pulled"] - cursor
        if lost:
            books.dropped[LOST_IN_DELIVERY] += lost
        message = (
            "The rollouts that this checkpoint goes on from are not in %s: %d that had been pulled "
            "and not yet trained are lost, and those that were pulled after it was saved. If you "
            "still have that folder, put it back and resume again."
        )
        logger.warning(message, self._spool.folder, lost)
        return cursor + lost, books

    def _names(self) -> dict[int, str]:
        """By number: as the recipe names them, or as they registered, where a second one of a name
        is `name-2`."""
        own = self._environments.names()
        names = {}
        seen = Counter()
        for number, name in enumerate(self._client.names()):
            seen[name] += name not in own.values()  # it was started again
            names[number] = f"{name}-{seen[name]}" if seen[name] > 1 else name
        return names | own

    def _reason_to_drop(self, rollout: Rollout) -> str | None:
        """Why a rollout is not to be trained, if it is not."""
        if (
            None not in (self.max_staleness, rollout.staleness)
            and rollout.staleness > self.max_staleness
        ):
            return STALE
        if self.replace_zero_variance_groups and rollout.teaches_nothing(self._run.distils):
            return ZERO_VARIANCE
        if self._shares is not None and not self._shares.admits(rollout):
            return OVER_SHARE
        return None

    def _keep(self, arrival: Arrival) -> None:
        """Puts what came into the spool. Called by the thread; nothing of it is handed out before
        this returns."""
        part, batch = arrival
        dropped = Counter(part.dropped)
        rollouts: list[Rollout] = []
        if batch is not None:
            before = self._intake.total_dropped
            self._intake.next_group = part.start  # no group of another batch has such a number
            rollouts = self._intake.admit(batch)
            dropped = self._intake.total_dropped - before
            # of groups that could not be read
            dropped[REJECTED] += part.size - len(rollouts) - dropped.total()
            self._versions.tag(rollouts)
            if self._shares is not None:
                self._shares.note(
                    {rollout.env_id for rollout in rollouts if rollout.env_id is not None}
                )
        counts = {reason: count for reason, count in dropped.items() if count}
        part = replace(part, dropped=counts, lineage=self._path, version=self._run.policy_version())
        self._spool.append(part, rollouts)
        if self._spool.excess() > 0:
            self._trim()

    def _trim(self) -> None:
        floor = oldest_cursor(self._run.output_dir, self._spool.name)
        # a run that never saves cannot resume, and needs nothing that it has been trained on
        if floor is None:
            floor = 0 if self._run.save_steps else self._feed.state["cursor"]
        if not self._spool.trim(floor) and not self._full:
            self._full = True
            message = (
                "The rollouts in %s take more than `max_spool_gb` (%g), and none can be removed "
                "before they are in a checkpoint. Save more often (`save_steps`), keep fewer "
                "checkpoints (`save_total_limit`) or raise it."
            )
            logger.warning(message, self._spool.folder, self.max_spool_gb)

    def poll(self, num_rollouts: int, timeout: float) -> list[Rollout] | None:
        """The next rollouts that are to be trained. What was pulled is kept for the next call."""
        rollouts = self._feed.take(num_rollouts, timeout)
        if rollouts is None:
            self._puller.warn_if_hung()
        return rollouts

    def catching_up(self) -> float:
        """Seconds in which the API gave out what was queued there, of which the oldest comes
        last."""
        return self._puller.catching_up

    def metrics(self) -> dict[str, float]:
        """Since the last call, of the rollouts that came in: the counts of `Intake.metrics`. Of
        those that were dropped: `rollouts/dropped_REASON`, `rollouts/share_dropped` and
        `rollouts/lost_batches`. Of those handed out: `rollouts/staleness_mean` and `_max`
        (optimizer steps), `rollouts/share_unknown_version`, `rollouts/queue_seconds` (mean time
        since the pull) and `rollouts/rows_env_NAME` (the number at the API for an environment whose
        name is not known). `rollouts/waiting_rows`: pulled, and not yet handed out.
        `rollouts/api_restarts`, and the metrics of `environments`."""
        metrics = {f"rollouts/dropped_{reason}": 0.0 for reason in (*DROPPED, LOST_IN_DELIVERY)}
        metrics |= {
            f"rollouts/rows_env_{name}": 0.0 for name in self._environments.names().values()
        }
        metrics |= self._environments.metrics() | self._feed.metrics() | self._intake.metrics()
        metrics["rollouts/lost_batches"] = (
            metrics[f"rollouts/dropped_{LOST_IN_DELIVERY}"] / self._run.batch_size
        )
        restarts = self._puller.api_restarts - self._restarts
        self._restarts = self._puller.api_restarts
        metrics["rollouts/api_restarts"] = float(restarts)
        return metrics

    def diagnose(self) -> str:
        """What was dropped here, if anything was; else what the API tells (see `pull.Diagnosis`),
        explained."""
        dropped = [
            f"{count} {DROPPED[reason]}"
            for reason, count in self._feed.dropped.items()
            if reason in DROPPED
        ]
        if not dropped:
            return self._explain(self._puller.why_quiet())
        counts = (
            f"Rollouts arrive, but since the last step these were dropped: {', '.join(dropped)}."
        )
        return self._explain(f"{counts} The warnings in this log say more.")

    def _explain(self, why: str) -> str:
        """`why`, with what the inference servers refused to sample and what the publisher and
        environments know."""
        return self._run.explain(
            self._environments.explain(f"{why} {self._versions.refusals()}".rstrip())
        )

    def state(self) -> dict[str, Any]:
        """The spool's name and end, the cursor into it, the books, and the path of the run's
        versions."""
        if self._feed is None:
            return {}
        state = self._feed.state
        return {"spool": self._spool.name, "pulled": max(self._spool.end, state["cursor"]), **state}

    def close(self) -> None:
        self._environments.close()
        if self._feed is not None:
            self._feed.stop(CLOSE_GRACE, self._client.abort)
            if self.hold_requests:
                self._versions.hold_requests(False, 1.0)


def _registration(run: RunInfo) -> Registration:
    return Registration(
        wandb_group=run.run_name,
        # that of the trainer's own W&B run
        wandb_project=os.environ.get("WANDB_PROJECT", "huggingface"),
        batch_size=run.batch_size,
        # environments drop rollouts of this length or longer
        max_token_len=run.max_sequence_length + 1,
        checkpoint_dir=os.path.abspath(run.output_dir),
        save_checkpoint_interval=run.save_steps,
        starting_step=run.starting_step,
        num_steps=NO_STEP_LIMIT,
    )
