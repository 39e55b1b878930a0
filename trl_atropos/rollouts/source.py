"""Where rollouts come from: the `RolloutSource` protocol, and `AtroposSource`, which pulls from a live Atropos API.

The trainer calls a source on rank 0 only, and hands the rows on to the other ranks. Between `BatchPuller.pull` and the
queue of rows in `AtroposSource` is the place to keep pulled batches on disk and to tag rows with their policy version.
"""

import logging
import os
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trl_atropos.errors import RolloutError
from trl_atropos.rollouts.atropos import ApiUnreachable, AtroposClient, Registration, ReplyLost
from trl_atropos.rollouts.intake import Intake
from trl_atropos.rollouts.pull import BatchPuller
from trl_atropos.rollouts.recording import record_batch
from trl_atropos.rollouts.registration import join, wait_for_api
from trl_atropos.rollouts.schema import Row, SingleRowGroups

logger = logging.getLogger(__name__)

BATCH_TIMEOUT = 300.0  # seconds; long, because giving up on GET /batch loses the batch
# An environment with total_steps=-1 stops when the API's step passes this. That step counts the batches the API has
# assembled, also those that are dropped or wait here, so a limit near the trainer's own would starve the end of a run.
NO_STEP_LIMIT = 2**31 - 1


@dataclass(frozen=True)
class RunInfo:
    """What a source needs to know about the run it feeds."""

    batch_size: int  # rows per generation batch, over all ranks
    max_sequence_length: int  # tokens, prompt plus completion, inclusive
    temperature: float  # that the trainer divides its logits by
    starting_step: int  # optimizer steps already taken, when a run resumes
    max_steps: int
    output_dir: str
    save_steps: int
    run_name: str
    rows_consumed: int = 0  # rows that the steps before `starting_step` took, for a source that can skip them
    vocab_size: int | None = None  # ids that the model's embedding has; None = token ids are not checked


class RolloutSource(Protocol):
    """Gives the trainer validated rows, oldest first. Every method is called on rank 0 only."""

    def start(self, run: RunInfo) -> None:
        """Called once, when the sampler is healthy."""

    def poll(self, num_rows: int, timeout: float) -> list[Row] | None:
        """Exactly `num_rows` rows, or None when `timeout` seconds passed without that many; then call again."""

    def metrics(self) -> dict[str, float]:
        """What happened since the last call, to be logged."""

    def diagnose(self) -> str:
        """Why `poll` has returned nothing for so long, as far as the source can tell, and what to do about it."""

    def close(self) -> None:
        """Let go of connections and files. May be called more than once."""


class AtroposSource:
    """
    Pulls batches from a live Atropos API.

    Args:
        url: root of the API, such as `http://127.0.0.1:8000`.
        reset_api: throw away what the API holds from an earlier run (queued rollouts, environments) at the start.
        single_row_groups: what a group of one means, see `schema.rows_of`.
        request_timeout: seconds for one request other than `GET /batch`.
        poll_interval: seconds between two pulls while the API has no batch.
        start_timeout: seconds that `start` waits for the API to answer.
        api_down_timeout: seconds that `poll` lets the API fail in mid-run before it raises.
        record_to: file to which every pulled batch is appended, for `ReplaySource`.

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
        record_to: str | Path | None = None,
    ):
        self._client = AtroposClient(url, request_timeout=request_timeout, batch_timeout=BATCH_TIMEOUT)
        self._reset_api = reset_api
        self._single_row_groups: SingleRowGroups = single_row_groups
        self._poll_interval = poll_interval
        self._start_timeout = start_timeout
        self._api_down_timeout = api_down_timeout
        self._record_to = record_to
        self._rows: deque[Row] = deque()
        self._reported = (0, 0)  # lost batches and API restarts that metrics() has given out

    def start(self, run: RunInfo) -> None:
        """Register and verify. Asks for no batch: the first `GET /batch` is what lets environments in."""
        registration = _registration(run)
        wait_for_api(self._client, self._start_timeout)
        try:
            status = join(self._client, registration, reset=self._reset_api)
        except (ApiUnreachable, ReplyLost) as error:
            raise RolloutError(
                f"The Atropos API at {self._client.url} stopped answering during registration. Restart it and run "
                f"again. {error}"
            ) from error
        if (status.current_step, status.queue_size) != (run.starting_step, 0):
            logger.info(
                "Continuing on the Atropos API at %s, which kept its state: %d groups queued, %d batches assembled.",
                self._client.url,
                status.queue_size,
                status.current_step,
            )
        self._puller = BatchPuller(
            self._client,
            registration,
            status,
            poll_interval=self._poll_interval,
            api_down_timeout=self._api_down_timeout,
        )
        self._intake = Intake(
            run.max_sequence_length, run.temperature, self._single_row_groups, vocab_size=run.vocab_size
        )

    def poll(self, num_rows: int, timeout: float) -> list[Row] | None:
        """May overrun `timeout` by one request. What was pulled is kept for the next call."""
        deadline = time.monotonic() + timeout
        while len(self._rows) < num_rows:
            for batch in self._puller.pull():
                if self._record_to is not None:
                    record_batch(self._record_to, batch)
                self._rows += self._intake.admit(batch)
            remaining = deadline - time.monotonic()
            if len(self._rows) < num_rows:
                if remaining <= 0:
                    return None
                time.sleep(min(self._puller.pause, remaining))
        return [self._rows.popleft() for _ in range(num_rows)]

    def metrics(self) -> dict[str, float]:
        """
        The counts of `Intake.metrics`, `rollouts/lost_batches` and `rollouts/api_restarts` since the last call, and
        `rollouts/waiting_rows`, the rows pulled but not yet handed out.
        """
        seen = (self._puller.lost_batches, self._puller.api_restarts)
        lost, restarts = (now - before for now, before in zip(seen, self._reported))
        self._reported = seen
        return self._intake.metrics() | {
            "rollouts/lost_batches": float(lost),
            "rollouts/api_restarts": float(restarts),
            "rollouts/waiting_rows": float(len(self._rows)),
        }

    def diagnose(self) -> str:
        """What was dropped here, if anything was; else what the API tells (see `BatchPuller.why_quiet`)."""
        dropped = self._intake.dropped()
        return dropped or self._puller.why_quiet()

    def close(self) -> None:
        self._client.close()


def _registration(run: RunInfo) -> Registration:
    return Registration(
        wandb_group=run.run_name,
        wandb_project=os.environ.get("WANDB_PROJECT", "huggingface"),  # where the trainer's own run goes
        batch_size=run.batch_size,
        max_token_len=run.max_sequence_length + 1,  # environments drop sequences of this length or longer
        checkpoint_dir=os.path.abspath(run.output_dir),
        save_checkpoint_interval=run.save_steps,
        starting_step=run.starting_step,
        num_steps=NO_STEP_LIMIT,
    )
