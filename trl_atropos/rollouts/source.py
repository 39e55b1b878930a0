"""The trainer's view of rollouts: the `RolloutSource` protocol, and `AtroposSource`, which pulls
from a live Atropos API.

The trainer calls a source on rank 0: `start` once, then `poll` for every generation batch, and
`state` for every checkpoint. `AtroposSource` builds the parts of a run's data flow and connects
them, and its `Feed` (`feed.py`) does the work.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Protocol

from trl_atropos.rollouts.api import AtroposClient, Registration, wait_for_api
from trl_atropos.rollouts.diagnosis import Diagnosis, Environments
from trl_atropos.rollouts.drop_reasons import DESCRIPTIONS, LOST_IN_DELIVERY, RESUMED_MID_BATCH
from trl_atropos.rollouts.feed import GIGABYTE, Feed
from trl_atropos.rollouts.intake import Intake, SingleRowGroups
from trl_atropos.rollouts.pull import BatchPuller
from trl_atropos.rollouts.rollout import Rollout, new_branch
from trl_atropos.rollouts.selection import Accounting, Selection, Shares
from trl_atropos.rollouts.spool import Spool, open_spool
from trl_atropos.rollouts.versions import RequestGate, VersionBook

logger = logging.getLogger(__name__)

BATCH_TIMEOUT = 300.0  # seconds; long, because giving up on GET /batch loses the batch
# An environment with total_steps=-1 stops when the API's step passes this. That step also counts
# batches that are dropped or wait here, so a limit near the trainer's own would leave the end of a
# run without rollouts.
NO_STEP_LIMIT = 2**31 - 1


@dataclass(frozen=True)
class RunInfo:
    """The facts that a source needs about the run it feeds."""

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
    distils: bool = False  # the run learns from the teachers that rollouts bring
    # ids that the model's embedding has; None = token ids are not checked
    vocab_size: int | None = None
    policy_version: Callable[[], int] = lambda: 0  # at which a rollout polled now will be trained
    # Takes a function, and calls it whenever the next batch will soon be asked for. What is sampled
    # from then on is of the policy version at which it is trained, or newer.
    when_wanted_soon: Callable[[Callable[[], None]], None] = lambda call: None
    # `state()` in the checkpoint from which the run resumes; `{}` if it resumes without, None if it
    # begins anew.
    state: dict[str, Any] | None = None
    # Rollouts that were handed out before that checkpoint and are not trained, because it was
    # written in the middle of a batch.
    unfinished_rows: int = 0
    # Takes why no batch comes, as far as the source knows, and returns it with what the publisher
    # knows.
    explain: Callable[[str], str] = lambda reason: reason


class RolloutSource(Protocol):
    """Gives the trainer validated rollouts, oldest first. Every method is called on rank 0 only. A
    source that inherits from this class need only define `start` and `poll`."""

    def start(self, run: RunInfo) -> None:
        """Begins. Called once, when the sampler is healthy."""

    def poll(self, num_rollouts: int, timeout: float) -> list[Rollout] | None:
        """Returns exactly `num_rollouts` rollouts, with their `staleness` if that is known, or None
        if `timeout` seconds passed without that many; then call again."""

    def catching_up(self) -> float:
        """Returns the seconds since `start` in which only rollouts came that must wait for older
        ones. These seconds do not count towards `rollout_timeout`."""
        return 0.0

    def metrics(self) -> dict[str, float]:
        """Returns counts since the last call, to be logged."""
        return {}

    def diagnose(self) -> str:
        """Returns why `poll` has returned nothing for so long, as far as the source can tell, and
        what to do about it."""
        return ""

    def state(self) -> dict[str, Any]:
        """Returns JSON for a checkpoint: where to go on after the rollouts handed out so far. `{}`
        for nothing."""
        return {}

    def close(self) -> None:
        """Closes connections and files. May be called more than once."""


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
            at the start.
        single_row_groups, prefetch_batches, max_staleness, hold_requests, max_spool_gb,
            replace_zero_variance_groups, enforce_environment_weights: as the settings of these
            names in `AtroposGRPOConfig`.
        request_timeout: seconds for one request other than `GET /batch`.
        poll_interval: seconds between two pulls while the API has no batch.
        start_timeout: seconds that `start` waits for the API to answer.
        api_down_timeout: seconds that the API may fail in mid-run before `poll` raises.
        versions: tells which policy versions sampled a rollout; without it, they are unknown.
        environments: those that the run started.

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
        if self.hold_requests is None:
            # Only requests that wait for the next policy bring rollouts of staleness 0.
            self.hold_requests = self.max_staleness == 0 and not self.prefetch_batches
        self._client = AtroposClient(
            self.url, request_timeout=self.request_timeout, batch_timeout=BATCH_TIMEOUT
        )
        self._versions = self.versions or VersionBook()
        self._environments = self.environments or Environments()
        self._feed: Feed | None = None
        self._reported_restarts = 0  # of the API, which `metrics` has returned

    def start(self, run: RunInfo) -> None:
        """Registers, verifies, and starts the environments. Asks for no batch: the first `GET
        /batch` lets environments in."""
        fix = (
            "`python -m atroposlib.cli.run_api --port PORT`, correct `atropos_url`, or "
            "in a recipe set `start_atropos: true`."
        )
        absent = (
            f"No Atropos API answered at {self._client.url} within {self.start_timeout:g} s. "
            f"Start one with {fix}"
        )
        wait_for_api(self._client.greet, self.start_timeout, absent)
        self._run = run
        self._diagnosis = Diagnosis(
            self._client,
            _registration(run),
            self._environments,
            self._versions,
            explain_publisher=run.explain,
        )
        self._feed = self._build_feed(run)

        def join() -> None:
            self._feed.join(reset=self.reset_api)

        silent = (
            f"The Atropos API at {self._client.url} stopped answering during registration. "
            "Restart it."
        )
        wait_for_api(join, self.start_timeout, silent)
        self._versions.sessions.begin()
        run.when_wanted_soon(self._feed.note_new_policy)
        self._environments.start()

    def _build_feed(self, run: RunInfo) -> Feed:
        folder = Path(run.output_dir, "rollouts")
        spool = open_spool(folder, run.state, self.max_spool_gb * GIGABYTE)
        selection = self._resume(run, spool)
        puller = BatchPuller(
            self._client,
            self._diagnosis.registration,
            spool,
            begin=selection.cursor,
            poll_interval=self.poll_interval,
            api_down_timeout=self.api_down_timeout,
            diagnosis=self._diagnosis,
            gate=RequestGate(self._versions, run.batch_size, enabled=self.hold_requests),
        )
        intake = Intake(
            run.max_sequence_length, run.temperature, self.single_row_groups, run.vocab_size
        )
        return Feed(
            puller,
            intake,
            self._versions,
            spool,
            selection,
            output_dir=run.output_dir,
            saves=run.save_steps > 0,
            prefetch=self.prefetch_batches * run.batch_size,
        )

    def _resume(self, run: RunInfo, spool: Spool) -> Selection:
        """Returns the selection that goes on after the last rollout of the run's checkpoint, if it
        has one."""
        cursor = 0
        accounting = Accounting()
        branches = [new_branch(run.policy_version())]
        if run.state:
            cursor = run.state["cursor"]
            accounting = Accounting(**run.state["books"])
            branches = [*run.state["lineage"], *branches]
            if run.unfinished_rows:
                accounting.trained -= run.unfinished_rows
                accounting.dropped[RESUMED_MID_BATCH] += run.unfinished_rows
            if run.state["spool"] != spool.name:
                cursor = _go_on_elsewhere(run.state, spool, accounting)
        shares = None
        if self.enforce_environment_weights:
            shares = Shares(self._client, slack=run.batch_size)
        return Selection(
            run.policy_version,
            branches,
            accounting,
            cursor,
            max_staleness=self.max_staleness,
            replace_zero_variance=self.replace_zero_variance_groups,
            distils=run.distils,
            shares=shares,
        )

    def poll(self, num_rollouts: int, timeout: float) -> list[Rollout] | None:
        """Returns the next rollouts that are to be trained. What was pulled is kept for the next
        call."""
        rollouts = self._feed.take(num_rollouts, timeout)
        if rollouts is None:
            self._feed.puller.warn_if_hung()
        return rollouts

    def catching_up(self) -> float:
        """Returns the seconds in which the API gave out what was queued there, of which the oldest
        comes last."""
        return self._feed.puller.deliveries.catching_up

    def metrics(self) -> dict[str, float]:
        """
        Returns metrics since the last call.

        - Of the rollouts that came in: the counts of `Intake.metrics`. Rows that were joined to
          others of their episode (`rollouts/joined_rows`) are not dropped.
        - Of those that were dropped: `rollouts/dropped_REASON`, `rollouts/share_dropped` and
          `rollouts/lost_batches`.
        - Of those handed out: `rollouts/staleness_mean` and `_max` (optimizer steps),
          `rollouts/share_unknown_version`, `rollouts/queue_seconds` (mean time since the pull) and
          `rollouts/rows_env_NAME` (the number at the API if the environment's name is not known).
        - `rollouts/waiting_rows`: pulled, and not yet handed out.
        - `rollouts/api_restarts`, and the metrics of `environments`.
        - Of the servers' sessions: see `SessionMetrics.metrics`.
        """
        reasons = (*DESCRIPTIONS, LOST_IN_DELIVERY)  # reported even if nothing was dropped
        metrics = {f"rollouts/dropped_{reason}": 0.0 for reason in reasons}
        for name in self._environments.names().values():
            metrics[f"rollouts/rows_env_{name}"] = 0.0
        metrics |= self._environments.metrics()
        metrics |= self._feed.metrics()
        lost = metrics[f"rollouts/dropped_{LOST_IN_DELIVERY}"]
        metrics["rollouts/lost_batches"] = lost / self._run.batch_size
        restarts = self._feed.puller.api_restarts
        metrics["rollouts/api_restarts"] = float(restarts - self._reported_restarts)
        self._reported_restarts = restarts
        return metrics

    def diagnose(self) -> str:
        """Returns what was dropped here, if anything was, or else what the API tells. `Diagnosis`
        adds what the other parts of the run know."""
        dropped = []
        for reason, count in self._feed.selection.dropped.items():
            if reason in DESCRIPTIONS:
                dropped.append(f"{count} {DESCRIPTIONS[reason]}")
        if not dropped:
            return self._diagnosis.explain(self._diagnosis.why_quiet())
        return self._diagnosis.explain(
            "Rollouts arrive, but since the last step these were dropped: "
            f"{', '.join(dropped)}. The warnings in this log say more."
        )

    def state(self) -> dict[str, Any]:
        """Returns the spool's name and end, the cursor into it, the accounting, and the branches of
        the run's policy versions."""
        if self._feed is None:
            return {}
        spool = self._feed.spool
        state = self._feed.selection.state
        return {"spool": spool.name, "pulled": max(spool.end, state["cursor"]), **state}

    def close(self) -> None:
        self._environments.close()
        if self._feed is not None:
            self._feed.stop()


def _go_on_elsewhere(state: dict[str, Any], spool: Spool, accounting: Accounting) -> int:
    """Counts what is lost because the spool of the checkpoint is gone. Returns the new cursor."""
    num_lost = state["pulled"] - state["cursor"]
    if num_lost:
        accounting.dropped[LOST_IN_DELIVERY] += num_lost
    message = (
        "The rollouts that this checkpoint goes on from are not in %s: %d that had been pulled "
        "and not yet trained are lost, and those that were pulled after it was saved. If you "
        "still have that folder, put it back and resume again."
    )
    logger.warning(message, spool.folder, num_lost)
    return state["pulled"]


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
