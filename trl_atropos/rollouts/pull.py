"""Batches off a live Atropos API, oldest first, whatever the API does: `AtroposSource` calls `BatchPuller.pull`.

The API delivers each batch at most once and forgets it before it answers, so `GET /batch` is never repeated unless it
surely never left this machine.
"""

import logging
import time

from trl_atropos.errors import RolloutError
from trl_atropos.rollouts.atropos import ApiUnreachable, AtroposClient, Registration, ReplyLost, Status
from trl_atropos.rollouts.burst import Batch, Burst
from trl_atropos.rollouts.registration import RETRY_PAUSE, UNREGISTERED, join

logger = logging.getLogger(__name__)

QUIET_WARNING = 60.0  # seconds without a batch after which the log says what may be wrong


class BatchPuller:
    """
    Args:
        client: of the API that `registration` was joined to.
        registration: to join again with, when the API forgets this trainer.
        status: what `join` returned.
        poll_interval: seconds between two pulls while the API has no batch.
        api_down_timeout: seconds that the API may fail before `pull` raises.

    `pause` is how many seconds to wait before the next pull; `lost_batches` and `api_restarts` count up for ever.
    """

    def __init__(
        self,
        client: AtroposClient,
        registration: Registration,
        status: Status,
        *,
        poll_interval: float,
        api_down_timeout: float,
    ):
        self.pause = 0.0
        self.lost_batches = 0
        self.api_restarts = 0
        self._client = client
        self._registration = registration
        self._api_step = status.current_step
        self._poll_interval = poll_interval
        self._api_down_timeout = api_down_timeout
        self._burst = Burst()
        self._failing_since: float | None = None
        self._quiet_since = time.monotonic()

    def pull(self) -> list[Batch]:
        """
        One `GET /batch`. Returns the batches that are now in order, often none.

        Raises:
            RolloutError: the API has failed for `api_down_timeout` seconds, or came back with another registration.
        """
        try:
            reply = self._client.batch()
        except ApiUnreachable as error:
            self._note_failure(error)
            return []
        except ReplyLost as error:
            return self._go_on_without(error)
        if reply.status == "error":
            return self._rejoin()
        self._failing_since = None
        if not reply.batch:
            self.pause = self._poll_interval
            return self._burst.close() + self._look_if_quiet()
        self.pause = 0.0
        self._quiet_since = time.monotonic()
        return self._burst.add(reply.batch, self._new_steps())

    def _new_steps(self) -> int:
        """By how many batches the last pull raised the API's step; only this trainer's pulls do."""
        if self._burst.is_open:
            return 0
        try:
            step = self._client.status().current_step
        except (ApiUnreachable, ReplyLost):
            return 0  # costs at most the order within one burst; the next pull finds out what is wrong
        begun, self._api_step = step - self._api_step, step
        return max(0, begun)

    def _go_on_without(self, error: ReplyLost) -> list[Batch]:
        """The API popped a batch and could not send it. It answers 500 when a number in it is NaN or infinite."""
        was_open = self._burst.is_open
        begun = self._new_steps()
        moved = was_open or begun > 0
        if not moved and self._forgotten():
            return self._rejoin()
        if moved or self._failing_since is None:
            self.lost_batches += 1
            logger.warning(
                "A batch of %d rollouts is lost: %s. A NaN or infinite score, log-probability or advantage does this; "
                "look for it in the environments.",
                self._registration.batch_size,
                error,
            )
        if not moved:
            self._note_failure(error)
            return []
        self._failing_since = None
        self.pause = 0.0
        return self._burst.add(None, begun)

    def _note_failure(self, error: RolloutError) -> None:
        self.pause = RETRY_PAUSE
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
            limit = self._api_down_timeout
            logger.warning("The Atropos API does not answer; trying for another %g s. %s", limit, error)
        elif now - self._failing_since > self._api_down_timeout:
            raise RolloutError(
                f"The Atropos API at {self._client.url} has not answered for {now - self._failing_since:.0f} s. Start "
                "it again (`python -m atroposlib.cli.run_api`), then the environments, and resume from the last "
                f"checkpoint; raise `api_down_timeout` to wait longer. Last try: {error}"
            ) from error

    def _forgotten(self) -> bool:
        """Whether the API answers that it has no trainer."""
        try:
            return self._client.info().batch_size == UNREGISTERED
        except (ApiUnreachable, ReplyLost):
            return False  # the next pull finds out what is wrong

    def _rejoin(self) -> list[Batch]:
        """The API holds no trainer: it was restarted, or reset by somebody else."""
        try:
            status = join(self._client, self._registration, reset=False)
        except (ApiUnreachable, ReplyLost) as error:
            self._note_failure(error)
            return []
        logger.warning(
            "The Atropos API at %s was restarted or reset, and this trainer has registered again. The rollouts queued "
            "there are lost. Environments do not register again by themselves: restart them.",
            self._client.url,
        )
        self.api_restarts += 1
        self.pause = self._poll_interval
        self._api_step = status.current_step
        self._failing_since = None
        self._quiet_since = time.monotonic()
        return self._burst.close()

    def _look_if_quiet(self) -> list[Batch]:
        """After every minute without a batch, say in the log what may be wrong."""
        if time.monotonic() - self._quiet_since < QUIET_WARNING:
            return []
        self._quiet_since = time.monotonic()
        if self._forgotten():
            return self._rejoin()
        logger.warning("No batch for %g s. %s", QUIET_WARNING, self.why_quiet())
        return []

    def why_quiet(self) -> str:
        """Why no batch comes, as far as the API tells, and what to do about it."""
        try:
            queued = self._client.status().queue_size
            environment = self._client.first_environment()
        except (ApiUnreachable, ReplyLost) as error:
            return f"The Atropos API at {self._client.url} does not answer: {error}."
        api, batch = f"The Atropos API at {self._client.url}", self._registration.batch_size
        if queued:
            largest = environment.max_group_size if environment else None
            sizes = f" of at most {largest} rollouts" if largest else ""
            if largest and queued * largest < batch:
                return (
                    f"{api} holds {queued} groups{sizes}, less than a batch of {batch}: the environments are slow or "
                    "have stopped. Look at their logs; raise `rollout_timeout` if they are at work."
                )
            return (
                f"{api} holds {queued} groups{sizes} but cannot assemble exactly {batch} rollouts from them. Make the "
                "batch size (`per_device_train_batch_size` x processes x `gradient_accumulation_steps`) a multiple of "
                "every group size, and the group sizes powers of two of each other; an environment with "
                "min_batch_allocation that died also blocks every batch until POST /disconnect-env."
            )
        if environment is None:
            return (
                f"No environment has registered with the Atropos API at {self._client.url}. Start one with "
                f"`--env.rollout_server_url {self._client.url}`, or name it under `environments` in the recipe; if "
                "one runs, its log says what it waits for."
            )
        return (
            f"{api} has an environment, but its queue is empty: nothing that was sampled is delivered. Look at the "
            "environment's log: it may not reach the inference server, or drop groups whose scores are all equal "
            f"(ensure_scores_are_not_same) or that have a sequence of {self._registration.max_token_len} tokens or "
            "more."
        )
