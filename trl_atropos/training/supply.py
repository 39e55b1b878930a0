"""Supplies the trainer with generation batches: rank 0 takes them from the `RolloutSource`, and
`on_main` sends them to all ranks.

`AtroposGRPOTrainer` calls `begin` when training begins and `next_batch` for every generation batch.
The callback `state_callback(...)` calls back when training begins, and saves the place of the
source in every checkpoint.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from trl_atropos.batches.schedule import BatchSchedule
from trl_atropos.config import AtroposGRPOConfig
from trl_atropos.distributed import on_main
from trl_atropos.errors import RolloutError
from trl_atropos.metrics.timing import INGEST, WAIT
from trl_atropos.protocol import environment_token
from trl_atropos.rollouts.replay import ReplaySource
from trl_atropos.rollouts.rollout import Rollout
from trl_atropos.rollouts.source import AtroposSource, Environments, RolloutSource, RunInfo
from trl_atropos.rollouts.spool import source_state
from trl_atropos.rollouts.versions import VersionBook
from trl_atropos.training.requirements import longest_rollout
from trl_atropos.weights.gather import shape_of

logger = logging.getLogger(__name__)

# how often the other ranks hear from rank 0, well below any process group's timeout
POLL_SECONDS = 1.0


def source_of(args: AtroposGRPOConfig, environments: Environments | None = None) -> RolloutSource:
    """Returns the rollout source that the configuration names; `environments` are those that the
    run started."""
    if args.replay_paths is not None:
        return ReplaySource(args.replay_paths, single_row_groups=args.single_row_groups)
    versions = VersionBook(
        args.vllm_server_urls, environment_token(), args.publish_timeout, args.temperature
    )
    return AtroposSource(
        args.atropos_url,
        reset_api=args.reset_atropos,
        single_row_groups=args.single_row_groups,
        versions=versions,
        environments=environments,
        prefetch_batches=args.prefetch_batches,
        max_staleness=args.max_staleness,
        hold_requests=args.hold_requests,
        max_spool_gb=args.max_spool_gb,
        replace_zero_variance_groups=args.replace_zero_variance_groups,
        enforce_environment_weights=args.enforce_environment_weights,
    )


class BatchSupply:
    """
    Takes generation batches from the trainer's source, and saves its place.

    Args:
        trainer: the `AtroposGRPOTrainer`, whose `rollout_source` rank 0 asks.
        schedule: of the trainer's generation batches.
    """

    def __init__(self, trainer: Any, schedule: BatchSchedule):
        self._trainer = trainer
        self._schedule = schedule
        self._has_begun = False
        # `RolloutSource.catching_up` at the last batch, in seconds
        self._caught_up = 0.0

    @property
    def _source(self) -> RolloutSource:
        """The trainer's source, which may be replaced until training begins."""
        return self._trainer.rollout_source

    def begin(self) -> None:
        """Starts the source, where the checkpoint that the run resumes from says."""
        run = self._run_info()
        self._has_begun = True
        on_main(lambda: self._source.start(run))

    def next_batch(self) -> list[Rollout]:
        """Returns the next generation batch, the same on every rank. Raises `RolloutError` if none
        comes."""
        trainer = self._trainer
        started = time.monotonic()
        # Rank 0 waits for rollouts in `_poll`, and computes for the rest of the time. The others
        # wait for rank 0.
        part = WAIT
        if trainer.accelerator.is_main_process:
            part = INGEST
        rollouts = None
        while rollouts is None:
            with trainer.stopwatch.part(part):
                rollouts = on_main(lambda: self._poll(time.monotonic() - started))
        return rollouts

    def state(self) -> dict[str, Any]:
        """Returns what a run needs to go on after the rollouts that were handed out so far."""
        place = {}
        if self._has_begun:
            place = self._source.state()
        unfinished_rows = self._schedule.unfinished_rollouts(self._trainer._step)
        return {"source": place, "unfinished_rows": unfinished_rows}

    def _poll(self, waited: float) -> list[Rollout] | None:
        """Returns the next generation batch, or `None` if it is not complete yet. `waited` is how
        long the trainer has waited for it, in seconds. Called on rank 0."""
        trainer = self._trainer
        trainer.evaluation.poll()
        batch_size = trainer.args.generation_batch_size
        with trainer.stopwatch.part(WAIT):
            rollouts = self._source.poll(batch_size, POLL_SECONDS)
        if rollouts is not None:
            version = trainer.policy_publisher.trainer_version
            trainer.run_log.batch(rollouts, version, self._source.state())
            self._caught_up = self._source.catching_up()
            return rollouts
        waited -= self._source.catching_up() - self._caught_up
        if waited > trainer.args.rollout_timeout:
            what = f"No batch of {batch_size} rollouts for {waited:.0f} s (`rollout_timeout`)."
            raise RolloutError(what, fix=self._source.diagnose())
        return None

    def _run_info(self) -> RunInfo:
        trainer = self._trainer
        args = trainer.args
        step = trainer.state.global_step
        state, unfinished_rows = source_state(trainer.state.stateful_callbacks)
        if unfinished_rows and trainer.accelerator.is_main_process:
            message = (
                "The checkpoint falls into the middle of a generation batch: %d rollouts of "
                "it are not trained."
            )
            logger.warning(message, unfinished_rows)
        if not step:  # nothing is resumed, or a checkpoint from before the first step
            state = None
            if args.resume_from_checkpoint:
                state = {}
        save_steps = 0
        if args.save_strategy == "steps":
            save_steps = int(args.save_steps)
        model = trainer.accelerator.unwrap_model(trainer.model)
        return RunInfo(
            batch_size=args.generation_batch_size,
            max_sequence_length=longest_rollout(trainer),
            temperature=args.temperature,
            starting_step=step,
            max_steps=args.max_steps,
            output_dir=args.output_dir,
            save_steps=save_steps,
            run_name=args.run_name or "trl_atropos",
            rows_consumed=self._schedule.consumed_rollouts(step),
            distils=args.distillation_coef > 0,
            vocab_size=shape_of(model.get_input_embeddings().weight)[0],
            policy_version=self._policy_version,
            when_wanted_soon=self._when_wanted_soon,
            state=state,
            unfinished_rows=unfinished_rows,
            explain=self._explain,
        )

    def _policy_version(self) -> int:
        return self._trainer.policy_publisher.trainer_version

    def _explain(self, reason: str) -> str:
        return f"{self._trainer.policy_publisher.why_silent()} {reason}".lstrip()

    def _when_wanted_soon(self, pull: Callable[[], None]) -> None:
        """Has `pull` called in the pause of the last publish before a batch is due. A pull lets the
        environments begin another batch: they begin it with the new policy, as if it were pulled
        when due."""
        trainer = self._trainer

        def pull_in_pause() -> None:
            is_last_step = trainer.state.global_step + 1 >= trainer.args.max_steps
            if self._schedule.ends_batch(trainer._step) and not is_last_step:
                pull()

        trainer.policy_publisher.on_pause = pull_in_pause


def state_callback(supply: BatchSupply, on_begin: Callable[[Any], None]) -> TrainerCallback:
    """Returns the callback that saves the place of the rollouts in every checkpoint, and calls
    `on_begin` with the optimizer when training begins."""

    # A class per trainer, named `spool.STATE_NAME`: to restore one, transformers makes it anew
    # without arguments.
    class RolloutState(TrainerCallback, ExportableState):
        def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
            on_begin(optimizer)
            # A checkpoint of another source has no such entry, and without one, nothing is saved.
            state.stateful_callbacks.setdefault(type(self).__name__, self.state())

        def state(self) -> dict[str, Any]:
            """Called when `trainer_state.json` is written, so that both are of one moment."""
            return {"args": {}, "attributes": supply.state()}

    return RolloutState()
