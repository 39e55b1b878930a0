"""Evaluates the policy while it is trained, as a callback of the trainer.

The `Evaluator` (`services/evaluations.py`) runs the evaluations, on rank 0. `EvaluationCallback`
decides when they begin and who waits for them: all ranks before the first step, after the last one,
before a checkpoint, and with `eval_hold` always. It logs each result at the step of the weights
that were evaluated.
"""

import logging
import math
import time
from typing import Any

from transformers import TrainerCallback
from trl import GRPOTrainer

from trl_atropos.distributed import on_main
from trl_atropos.metrics.timing import EVALUATE
from trl_atropos.services.evaluations import Evaluator, Result

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
# how often the other ranks hear from rank 0, well below any process group's timeout
WAIT_SECONDS = 1.0


class EvaluationCallback(TrainerCallback):
    """
    Args:
        trainer: the `AtroposGRPOTrainer`.
        evaluator: makes the evaluations; None for a run without any.
    """

    def __init__(self, trainer: Any, evaluator: Evaluator | None):
        self._trainer = trainer
        self._evaluator = evaluator
        self._has_begun = False

    @property
    def results(self) -> list[Result]:
        """Results of the run so far, on rank 0."""
        if self._evaluator is None:
            return []
        return self._evaluator.results

    def begin(self, step: int) -> None:
        """Starts the evaluations' processes. Called on all ranks when training begins after `step`
        optimizer steps."""
        self._has_begun = True
        if self._evaluator is not None:
            on_main(lambda: self._evaluator.start(step))

    def on_step_end(self, args, state, control, **kwargs):
        if self._evaluator is None:
            return
        is_last = state.global_step >= args.max_steps or control.should_training_stop
        if is_last:
            control.should_evaluate = True

    def evaluate(self) -> dict[str, float]:
        """Begins the evaluations that are due. Returns the metrics that are known of this step: all
        of them if training waits for them; the others are logged when they come."""
        if not self._has_begun:
            raise RuntimeError(
                "the servers have the policy only within `train`: use `trl-atropos eval` elsewhere"
            )
        trainer = self._trainer
        step = trainer.state.global_step
        is_first = step == 0
        is_last = step >= trainer.state.max_steps or trainer.control.should_training_stop
        self.wait()
        results = self._begin_due(step, is_first, is_last)
        if is_first or is_last or trainer.args.eval_hold:
            results += self.wait()
        metrics: dict[str, float] = {}
        for result in results:
            metrics |= result.logs()
        if trainer.accelerator.is_main_process:
            self._log_unlogged(results)
        return metrics

    def _begin_due(self, step: int, is_first: bool, is_last: bool) -> list[Result]:
        """Begins the evaluations that are due, as soon as the evaluator is ready. Returns results
        that a run which was resumed has already."""
        evaluator = self._evaluator
        with self._trainer.stopwatch.part(EVALUATE):
            is_ready = False
            # Rank 0 waits a second at a time, so that the other ranks hear from it.
            while not is_ready:
                is_ready = on_main(lambda: evaluator.ready(step, is_first, is_last, WAIT_SECONDS))
            return on_main(lambda: evaluator.begin(step, is_first, is_last))

    def wait(self, before: float = math.inf) -> list[Result]:
        """Waits on all ranks for the evaluations of steps before `before`. Returns their
        results."""
        results: list[Result] = []
        with self._trainer.stopwatch.part(EVALUATE):
            is_busy = self._evaluator is not None
            while is_busy:
                ended, is_busy = on_main(lambda: self.poll(WAIT_SECONDS, before))
                results += ended
        return results

    def poll(self, timeout: float = 0.0, before: float = math.inf) -> tuple[list[Result], bool]:
        """Logs and returns the evaluations that have ended, and returns whether one of a step
        before `before` goes on. Waits for that one, `timeout` seconds at most. Called on rank
        0."""
        evaluator = self._evaluator
        if evaluator is None:
            return [], False
        deadline = time.monotonic() + timeout
        ended = evaluator.poll()
        while evaluator.busy(before) and time.monotonic() < deadline:
            evaluator.tell_progress(before)
            time.sleep(POLL_SECONDS)
            ended += evaluator.poll()
        for result in ended:
            self._log(result)
        return ended, evaluator.busy(before)

    def _log_unlogged(self, results: list[Result]) -> None:
        """Logs the results that an earlier life of the run has left, but has not logged."""
        state = self._trainer.state
        logged: set[str] = set()
        for entry in state.log_history:
            if entry["step"] == state.global_step:
                logged.update(entry)
        for result in results:
            if logged.isdisjoint(result.logs()):
                self._log(result)

    def _log(self, result: Result) -> None:
        """Logs a result at the step of the evaluated weights, which may be a while ago."""
        logger.info("Evaluated %s", result.line())
        self._trainer.run_log.evaluation(result)
        state = self._trainer.state
        current_step = state.global_step
        state.global_step = result.step
        try:
            # GRPO's own `log` would log the metrics of half a step with it.
            super(GRPOTrainer, self._trainer).log(result.logs())
        finally:
            state.global_step = current_step
