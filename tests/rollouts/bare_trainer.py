"""The least that is a trainer to an Atropos API: it registers, takes batches, and knows why none
comes."""

import time

from trl_atropos.rollouts.api import (
    AtroposClient,
    NoAnswer,
    Registration,
    join,
)
from trl_atropos.rollouts.diagnosis import Diagnosis
from trl_atropos.rollouts.wire import ScoredGroup
from trl_atropos.rollouts.wire_values import RejectedGroup

PAUSE = 0.03  # seconds between two requests while there is no batch


class BareTrainer:
    """
    Args:
        url: of the API.
        batch_size: sequences.
        max_token_len: tokens; environments drop sequences of that length.
    """

    def __init__(self, url: str, batch_size: int = 4, max_token_len: int = 65):
        self.client = AtroposClient(url, request_timeout=10.0, batch_timeout=60.0)
        self.registration = Registration(
            wandb_group="test",
            wandb_project="test",
            batch_size=batch_size,
            max_token_len=max_token_len,
            checkpoint_dir="",
            save_checkpoint_interval=0,
            starting_step=0,
            num_steps=10**6,
        )
        self.diagnosis = Diagnosis(self.client, self.registration)
        self.restarts = 0
        self._join()

    def pull(self) -> list[ScoredGroup | RejectedGroup] | None:
        """One request: a batch of groups, or None. Registers again with an API that was
        restarted."""
        try:
            reply = self.client.batch()
            if reply.status == "error":
                self._join()
                self.restarts += 1
                self.diagnosis.note_restart()
                return None
        except NoAnswer:
            return None
        if reply.batch:
            self.diagnosis.note(reply.batch)
        return reply.batch or None

    def pull_batch(self, seconds: float = 5.0) -> list[ScoredGroup | RejectedGroup]:
        """The next batch."""
        deadline = time.monotonic() + seconds
        while (batch := self.pull()) is None:
            assert time.monotonic() < deadline, self.diagnosis.why_quiet()
            time.sleep(PAUSE)
        return batch

    def close(self) -> None:
        self.client.abort()

    def _join(self) -> None:
        join(self.client, self.registration, reset=False)
