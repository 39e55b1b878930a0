"""Where rollouts come from: the `RolloutSource` protocol, and `AtroposSource`, which pulls from a live Atropos API.

The trainer calls a source on rank 0 only, and hands the rollouts on to the other ranks. In `AtroposSource`, a thread
(`selection.Feed`) pulls batches (`pull.py`), admits their rollouts (`intake.py`), tags them with the policy versions
that sampled them (`versions.py`), and puts them on disk (`spool.py`). `poll` takes them from there, oldest first
(`selection.py`).
"""

import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trl_atropos.rollouts.api import AtroposClient, Registration, wait_for_api
from trl_atropos.rollouts.intake import REJECTED, Intake, SingleRowGroups
from trl_atropos.rollouts.pull import LOST_IN_DELIVERY, LOST_WITH_API, Arrival, BatchPuller
from trl_atropos.rollouts.row import Rollout
from trl_atropos.rollouts.selection import OVER_SHARE, STALE, ZERO_VARIANCE, Books, Feed, Rules, Selection, Shares
from trl_atropos.rollouts.spool import Part, new_branch, oldest_cursor, open_spool
from trl_atropos.rollouts.versions import VersionBook

logger = logging.getLogger(__name__)

BATCH_TIMEOUT = 300.0  # seconds; long, because giving up on GET /batch loses the batch
CLOSE_GRACE = 0.5  # seconds
# An environment with total_steps=-1 stops when the API's step passes this. That step counts the batches the API has
# assembled, also those that are dropped or wait here, so a limit near the trainer's own would starve the end of a run.
NO_STEP_LIMIT = 2**31 - 1


@dataclass(frozen=True)
class RunInfo:
    """What a source needs to know about the run it feeds."""

    batch_size: int  # rollouts per generation batch, over all ranks
    max_sequence_length: int  # tokens, prompt plus completion, inclusive
    temperature: float  # that the trainer divides its logits by
    starting_step: int  # optimizer steps already taken, when a run resumes
    max_steps: int
    output_dir: str
    save_steps: int
    run_name: str
    rows_consumed: int = 0  # rollouts that the steps before `starting_step` took, for a source that can skip them
    distils: bool = False  # whether the teachers that rollouts bring are learned from
    vocab_size: int | None = None  # ids that the model's embedding has; None = token ids are not checked
    policy_version: Callable[[], int] = lambda: 0  # that a rollout polled now will be trained at
    # Takes what is to be called when the next batch will be asked for soon, and what is sampled from now on is of the
    # policy that it is trained at, or newer.
    when_wanted_soon: Callable[[Callable[[], None]], None] = lambda call: None
    # `state()` in the checkpoint from which the run resumes; `{}` if it resumes without, None if it begins anew.
    state: dict[str, Any] | None = None
    # Of the rollouts handed out before that checkpoint, how many it has not been trained on: it was written mid-batch.
    unfinished_rows: int = 0
    # Takes why no batch comes, as far as the source knows, and returns it with what the publisher tells.
    explain: Callable[[str], str] = lambda told: told


class RolloutSource(Protocol):
    """Gives the trainer validated rollouts, oldest first. Every method is called on rank 0 only."""

    def start(self, run: RunInfo) -> None:
        """Called once, when the sampler is healthy."""

    def poll(self, num_rollouts: int, timeout: float) -> list[Rollout] | None:
        """
        Exactly `num_rollouts` rollouts, with their `staleness` where that is known, or None when `timeout` seconds
        passed without that many; then call again.
        """

    def metrics(self) -> dict[str, float]:
        """What happened since the last call, to be logged."""

    def diagnose(self) -> str:
        """Why `poll` has returned nothing for so long, as far as the source can tell, and what to do about it."""

    def state(self) -> dict[str, Any]:
        """JSON for a checkpoint: where to go on after the rollouts handed out so far. `{}` for nothing."""

    def close(self) -> None:
        """Let go of connections and files. May be called more than once."""


class Environments(Protocol):
    """What the run knows of the environments that it started: `services.environments.Supervisor`."""

    def start(self) -> None: ...

    def names(self) -> Mapping[int, str]: ...  # by their numbers at the API

    def explain(self, told: str) -> str: ...  # why no batch comes, with what their logs say

    def metrics(self) -> dict[str, float]: ...

    def close(self) -> None: ...


class AtroposSource:
    """
    Pulls batches from a live Atropos API.

    Every rollout that is handed out lies in `<output_dir>/rollouts` before, so that a run which resumes from a
    checkpoint goes on after the last rollout of that checkpoint, and what was pulled from the API is not lost. A run
    that begins anew moves the folder of an earlier one aside.

    Args:
        url: root of the API, such as `http://127.0.0.1:8000`.
        reset_api: throw away what the API holds from an earlier run (queued rollouts, environments) at the start.
        request_timeout: seconds for one request other than `GET /batch`.
        poll_interval: seconds between two pulls while the API has no batch.
        start_timeout: seconds that `start` waits for the API to answer.
        api_down_timeout: seconds that the API may fail in mid-run before `poll` raises.
        versions: tells which policy versions sampled a rollout; without, they are unknown.
        environments: those that the run started, by which messages and metrics call them by their names.
        single_row_groups, prefetch_batches, max_staleness, max_spool_gb, replace_zero_variance_groups,
            enforce_environment_weights: as the settings of these names in `AtroposGRPOConfig`.

    Raises:
        RolloutError: from `start` and `poll`; the message has the way out.
    """

    def __init__(
        self,
        url: str,
        *,
        reset_api: bool = False,
        single_row_groups: SingleRowGroups = "refuse",
        request_timeout: float = 10.0,
        poll_interval: float = 0.03,
        start_timeout: float = 30.0,
        api_down_timeout: float = 60.0,
        versions: VersionBook | None = None,
        environments: Environments | None = None,
        prefetch_batches: int = 0,
        max_staleness: int | None = None,
        max_spool_gb: float = 10.0,
        replace_zero_variance_groups: bool = False,
        enforce_environment_weights: bool = False,
    ):
        self._client = AtroposClient(url, request_timeout=request_timeout, batch_timeout=BATCH_TIMEOUT)
        self._reset_api = reset_api
        self._single_row_groups: SingleRowGroups = single_row_groups
        self._poll_interval = poll_interval
        self._start_timeout = start_timeout
        self._api_down_timeout = api_down_timeout
        self._versions = versions
        self._environments = environments
        self._prefetch_batches = prefetch_batches
        self._max_staleness = max_staleness
        self._max_spool_gb = max_spool_gb
        self._replace_zero_variance_groups = replace_zero_variance_groups
        self._enforce_environment_weights = enforce_environment_weights
        self._shares: Shares | None = None
        self._feed: Feed | None = None
        self._lost = 0  # rollouts, in delivery
        self._reported: Counter[str] = Counter()  # what metrics() has given out of what counts up for ever
        self._full = False  # whether the log says that the spool is full

    def start(self, run: RunInfo) -> None:
        """Register and verify. Asks for no batch: the first `GET /batch` is what lets environments in."""
        wait_for_api(
            self._client.greet,
            self._start_timeout,
            f"No Atropos API answered at {self._client.url} within {self._start_timeout:g} s. Start one with `python "
            "-m atroposlib.cli.run_api --port PORT`, correct `atropos_url`, or let the recipe start it with "
            "`start_atropos: true`.",
        )
        self._run = run
        names = dict if self._environments is None else self._environments.names
        self._spool = open_spool(Path(run.output_dir, "rollouts"), run.state, self._max_spool_gb * 1e9)
        cursor, books = self._resume(run)
        self._intake = Intake(
            run.max_sequence_length,
            run.temperature,
            self._single_row_groups,
            vocab_size=run.vocab_size,
            names=names,
        )
        self._puller = BatchPuller(
            self._client,
            _registration(run),
            self._spool,
            begin=cursor,
            poll_interval=self._poll_interval,
            api_down_timeout=self._api_down_timeout,
            explain=self._explain,
            names=names,
        )
        ahead = self._prefetch_batches * run.batch_size
        feed = Feed(self._puller, self._spool, self._keep, begin=cursor, ahead=ahead)
        if self._enforce_environment_weights:
            self._shares = Shares(self._client, slack=run.batch_size)
        rules = Rules(
            self._max_staleness, self._replace_zero_variance_groups, run.policy_version, self._shares, run.distils
        )
        self._selection = Selection(feed, rules, self._path, books, cursor)
        lost = wait_for_api(
            lambda: self._puller.join(reset=self._reset_api),
            self._start_timeout,
            f"The Atropos API at {self._client.url} stopped answering during registration. Restart it and run again.",
        )
        for arrival in lost:
            self._keep(arrival)
        self._feed = feed
        run.when_wanted_soon(self._pull_ahead)
        if self._environments is not None:
            self._environments.start()

    def _resume(self, run: RunInfo) -> tuple[int, Books]:
        """Where the run goes on, and what is in its books. Begins the path of its versions, or goes on with it."""
        branch = new_branch(run.policy_version())
        if not run.state:
            self._path = [branch]
            return 0, Books()
        self._path = [*run.state["lineage"], branch]
        cursor, books = run.state["cursor"], Books.from_json(run.state["books"])
        books.unfinished(run.unfinished_rows)
        if run.state.get("spool", self._spool.name) == self._spool.name:
            return cursor, books
        lost = run.state.get("pulled", cursor) - cursor  # earlier versions did not note it
        if lost:
            books.dropped[LOST_IN_DELIVERY] += lost
        logger.warning(
            "The rollouts that this checkpoint goes on from are not in %s: %d that had been pulled and not yet "
            "trained are lost. Those that were pulled after it was saved are lost, too, and in no count. If you "
            "still have that folder, put it back and resume again.",
            self._spool.folder,
            lost,
        )
        return cursor + lost, books

    # ------------------------------------------------------------------------------------------------- in the thread

    def _keep(self, arrival: Arrival) -> None:
        """Put what came into the spool. Nothing of it has been handed out before this returns."""
        dropped: Counter[str] = Counter()
        rollouts: list[Rollout] = []
        if arrival.batch is not None:
            before = self._intake.total_dropped.copy()
            self._intake.next_group = arrival.start  # unlike that of any other batch's groups
            rollouts = self._intake.admit(arrival.batch)
            dropped = self._intake.total_dropped - before
            dropped[REJECTED] += arrival.size - len(rollouts) - dropped.total()  # of groups that nobody could read
            if self._versions is not None:
                self._versions.tag(rollouts)
            if self._shares is not None:
                self._shares.note({one.env_id for one in rollouts if one.env_id is not None})
        elif arrival.reason == LOST_IN_DELIVERY:
            dropped[LOST_IN_DELIVERY] = arrival.size
            self._lost += arrival.size
        part = Part(
            arrival.start,
            arrival.size,
            arrival.region,
            {reason: count for reason, count in dropped.items() if count},
            arrival.size if arrival.reason == LOST_WITH_API else 0,
            self._path,
            self._run.policy_version(),
        )
        self._spool.append(part, rollouts)
        if self._spool.excess() > 0:
            self._trim()

    def _trim(self) -> None:
        floor = oldest_cursor(self._run.output_dir, self._spool.name)
        if floor is None:  # a run that never saves cannot resume, and needs nothing that it has been trained on
            floor = 0 if self._run.save_steps else self._selection.state["cursor"]
        if not self._spool.trim(floor) and not self._full:
            self._full = True
            logger.warning(
                "The rollouts in %s take more than `max_spool_gb` (%g), and none can be removed before they are in a "
                "checkpoint. Save more often (`save_steps`), keep fewer checkpoints (`save_total_limit`) or raise it.",
                self._spool.folder,
                self._max_spool_gb,
            )

    # ------------------------------------------------------------------------------------------------ for the trainer

    def _pull_ahead(self) -> None:
        """Begin with what the next `poll` will ask for."""
        with self._feed.changed:
            self._feed.ask(self._run.batch_size)

    def poll(self, num_rollouts: int, timeout: float) -> list[Rollout] | None:
        """The next rollouts that are to be trained. What was pulled is kept for the next call."""
        if self._feed.ident is None:
            self._feed.start()
        rollouts = self._selection.take(num_rollouts, timeout)
        if rollouts is None:
            self._puller.warn_if_hung()
        return rollouts

    def metrics(self) -> dict[str, float]:
        """
        Since the last call, of the rollouts that came in: the counts of `Intake.metrics`, `rollouts/lost_batches` and
        `rollouts/api_restarts`. Of those that were passed in order to hand out others: `rollouts/dropped_REASON` and
        `rollouts/share_dropped`. Of those handed out: `rollouts/staleness_mean` and `_max` (optimizer steps),
        `rollouts/share_unknown_version`, `rollouts/queue_seconds` (mean, from the pull on) and
        `rollouts/rows_env_NAME` (the number at the API of an environment that the run did not start).
        And `rollouts/waiting_rows`: pulled, and not yet handed out; and what `environments` tell.
        """
        seen = Counter(lost=self._lost, restarts=self._puller.api_restarts)
        new = {name: count - self._reported[name] for name, count in seen.items()}
        self._reported = seen
        reasons = (STALE, ZERO_VARIANCE, OVER_SHARE, LOST_IN_DELIVERY)
        dropped = {f"rollouts/dropped_{reason}": 0.0 for reason in reasons}
        return (
            dropped
            | ({} if self._environments is None else self._environments.metrics())
            | self._selection.metrics()
            | self._intake.metrics()
            | {
                "rollouts/lost_batches": new["lost"] / self._run.batch_size,
                "rollouts/api_restarts": float(new["restarts"]),
                "rollouts/waiting_rows": float(self._feed.usable),
            }
        )

    def diagnose(self) -> str:
        """What was dropped here, if anything was; else what the API tells (see `diagnosis.py`), explained."""
        stale, constant, ahead = map(self._selection.dropped, (STALE, ZERO_VARIANCE, OVER_SHARE))
        if stale or constant or ahead:
            return self._explain(
                f"Rollouts arrive, but since the last step {stale} were dropped because they were sampled more than "
                f"`max_staleness` ({self._max_staleness}) versions ago, {constant} because all scores of their group "
                f"are alike (`replace_zero_variance_groups`), and {ahead} because their environment is ahead of its "
                "share (`enforce_environment_weights`). Raise `max_staleness`, lower the environments' "
                "`max_batches_offpolicy`, give them tasks of the right difficulty, or look at the log of the "
                "environment that delivers too little."
            )
        return self._explain(self._intake.dropped() or self._puller.why_quiet())

    def _explain(self, told: str) -> str:
        """With what the inference servers refused to sample, which no environment tells."""
        refused = "" if self._versions is None else self._versions.refusals()
        told = f"{told} {refused}".rstrip()
        return self._run.explain(told if self._environments is None else self._environments.explain(told))

    def state(self) -> dict[str, Any]:
        """The spool's name and end, the cursor into it, the books, and the path of the run's versions."""
        if self._feed is None:
            return {}
        state = self._selection.state
        return {"spool": self._spool.name, "pulled": max(self._spool.end, state["cursor"]), **state}

    def close(self) -> None:
        if self._environments is not None:
            self._environments.close()
        if self._feed is not None:
            self._feed.stop(CLOSE_GRACE, self._client.abort)


def _registration(run: RunInfo) -> Registration:
    return Registration(
        wandb_group=run.run_name,
        wandb_project=os.environ.get("WANDB_PROJECT", "huggingface"),  # where the trainer's own run goes
        batch_size=run.batch_size,
        max_token_len=run.max_sequence_length + 1,  # environments drop rollouts of this length or longer
        checkpoint_dir=os.path.abspath(run.output_dir),
        save_checkpoint_interval=run.save_steps,
        starting_step=run.starting_step,
        num_steps=NO_STEP_LIMIT,
    )
