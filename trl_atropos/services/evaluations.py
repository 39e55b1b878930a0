"""Runs the evaluations of a run: decides which are due, and keeps the process that makes one.

An evaluation is an Atropos environment that is run once, beside the training. With `problems`,
`environment_site/groups.py` takes it through exactly these. Its rollouts go to a file, never to the
Atropos API. Without `problems`, its own `evaluate` runs, which leaves `metrics.json`. Its process
is started ahead of time and waits until it may begin, so that the policy of the right step answers.
The servers recognize its requests by their API key, and note which policy versions sampled them.

`trainer.py` and `trl-atropos eval` call `Evaluator`. `evaluation_results.py` reads the files that a
process leaves. They are moved to `<output_dir>/evaluations/NAME/step-000400/` once `result.json` is
there, by which a resumed run knows its earlier evaluations. Files that cannot be read make an
`EvaluationError`, and so does an evaluation that failed.
"""

import contextlib
import json
import logging
import math
import re
import shutil
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from trl_atropos.activity import Pacer, bar_of
from trl_atropos.environment_entry import EvaluationSpec
from trl_atropos.errors import EvaluationError, ServerError
from trl_atropos.protocol import EVALUATION_KEY
from trl_atropos.rollouts.spool import write_file
from trl_atropos.server_client import ServerClient
from trl_atropos.services.evaluation_results import (
    GROUPS,
    RESULT,
    Answer,
    Result,
    measures,
    problem_key,
    read_answers,
    read_own_metrics,
    read_result,
)
from trl_atropos.services.manager import Service, Services
from trl_atropos.services.service_log import cause_of_end, tell_work
from trl_atropos.services.stacks import where_is

if TYPE_CHECKING:
    from tqdm import tqdm

logger = logging.getLogger(__name__)

NEXT = "next"  # folder of the evaluation that comes next
GO = "go"  # file in it that lets the evaluation begin
READY_TIMEOUT = 600.0  # seconds that a process may take to import and set up what it needs
POLL = 0.02  # seconds
ASK_TIMEOUT = 30.0  # seconds that a server may take to say which versions sampled
STEP_FOLDER = re.compile(r"step-(\d+)")


@dataclass
class _Process:
    """Process of an evaluation, which waits for its step (`step` is `None`) or has begun."""

    spec: EvaluationSpec
    folder: Path
    key: str
    service: Service
    step: int | None = None
    began: float = field(default_factory=time.monotonic)  # the process, and later the evaluation
    pacer: Pacer = field(default_factory=Pacer)  # of messages, from `began` on
    bar: "tqdm | None" = None  # on a terminal, once something has waited for long
    _answered: int = 0
    _bytes_read: int = 0

    def answered(self) -> int:
        """Returns how many problems the environment is done with. Reads only what is new."""
        with contextlib.suppress(FileNotFoundError), open(self.folder / GROUPS, "rb") as file:
            file.seek(self._bytes_read)
            content = file.read()
            self._bytes_read += len(content)
            self._answered += content.count(b"\n")
        return self._answered

    def has_begun(self, before: float = math.inf) -> bool:
        """Returns whether an evaluation of a step before `before` is under way."""
        return self.step is not None and self.step < before


class Evaluator:
    """
    Makes the evaluations of a run, on rank 0. An evaluation that fails is warned about. The first
    one, and all if they are `needed`, raise `EvaluationError`.

    Parameters:
        specs: Entries of `evaluations`.
        services: Starts their processes.
        command_of: Called with an entry, a folder and an API key. Writes the configuration of one
            evaluation and returns its command.
        folder: Folder of all evaluations.
        urls: Servers that they sample from.
        timeout: Seconds that one evaluation may take.
        needed: Whether the training depends on them.
    """

    def __init__(
        self,
        specs: list[EvaluationSpec],
        services: Services,
        command_of: Callable[[EvaluationSpec, Path, str], list[str]],
        folder: str | Path,
        urls: list[str],
        timeout: float,
        needed: bool = False,
    ):
        self.specs = specs
        self.results: list[Result] = []  # of this run, in the order in which they ended
        self._services = services
        self._command_of = command_of
        # the token must be known by now
        self._servers = [ServerClient(url, ASK_TIMEOUT) for url in urls]
        self._folder = Path(folder)
        self._timeout = timeout
        self._needed = needed
        self._processes: dict[str, _Process] = {}
        self._is_last = False  # no further evaluation comes

    # ------------------------------------------------------------------------- before an evaluation

    def prepare(self) -> None:
        """Starts the processes of the first evaluations, which import while the servers start."""
        for spec in self.specs:
            self._prepare(spec)

    def start(self, step: int) -> None:
        """Begins a training after `step` optimizer steps. Reads the results of earlier steps, and
        removes those of later steps or of another run."""
        self.results = []
        self._is_last = False
        for spec in self.specs:
            for folder in sorted((self._folder / spec.name).glob("step-*")):
                made_at = STEP_FOLDER.fullmatch(folder.name)
                if made_at is None:
                    continue  # somebody else's
                if step == 0 or int(made_at[1]) > step:
                    shutil.rmtree(folder)
                    continue
                result = read_result(folder)
                if result is not None:
                    self.results.append(result)
            if spec.name not in self._processes:
                self._prepare(spec)
            self._processes[spec.name].began = time.monotonic()

    def _prepare(self, spec: EvaluationSpec) -> None:
        """Starts the process of the next evaluation, which waits. Raises `EvaluationError` if the
        disk refuses."""
        folder = (self._folder / spec.name / NEXT).absolute()
        key = f"{EVALUATION_KEY}{uuid.uuid4().hex}"
        env = spec.variables(TRL_ATROPOS_GO=str(folder / GO))
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            name = f"evaluation-{spec.name}"
            command = self._command_of(spec, folder, key)
            service = self._services.start(
                name, command, env=env, cwd=spec.cwd, scratch=True, ends=True
            )
        except OSError as error:
            what = f"The next evaluation {spec.name!r} cannot be prepared in {folder} ({error})"
            fix = (
                "Make room, or let this user write there; the run makes it again once it is "
                "resumed."
            )
            raise EvaluationError(what, fix=fix) from error
        self._processes[spec.name] = _Process(spec, folder, key, service)

    def ready(self, step: int, first: bool, last: bool, timeout: float = math.inf) -> bool:
        """Waits at most `timeout` seconds until the evaluations that `begin` would begin can do so
        at once. Returns whether they can."""
        deadline = time.monotonic() + timeout
        while True:
            processes = self._due(step, first, last)
            late = [process for process in processes if not self._is_ready(process)]
            if not late:
                return True
            for process in late:
                self._tell(process, f"is starting for step {step}")
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL)

    def _is_ready(self, process: _Process) -> bool:
        """Returns whether a process waits for its step. Also returns `True` if it never will, for
        `poll` to say why."""
        if time.monotonic() - process.began > READY_TIMEOUT:
            return True
        if process.folder.joinpath(f"{GO}.awaited").exists():
            return True
        return self._services.exit_code(process.service) is not None

    def begin(self, step: int, first: bool, last: bool) -> list[Result]:
        """Begins the evaluations that are due after `step` optimizer steps: all of them before the
        `first` step and after the `last`. Returns the results of this step that a resumed run has
        already."""
        self._is_last = last
        for process in self._due(step, first, last):
            process.step = step
            process.began = time.monotonic()
            process.pacer = Pacer()
            try:
                process.folder.joinpath(GO).touch()
            except OSError as error:
                self._end(process, _refused_by_disk(error))
        return [result for result in self.results if result.step == step]

    def _due(self, step: int, first: bool, last: bool) -> list[_Process]:
        """Returns the processes of the evaluations that are due and not made yet."""
        finished = {result.name for result in self.results if result.step == step}
        due = []
        for spec in self.specs:
            process = self._processes.get(spec.name)
            regular = spec.every and step % spec.every == 0
            if process is None or spec.name in finished:
                continue
            if first or last or regular:
                due.append(process)
        return due

    # ------------------------------------------------------------------------- during an evaluation

    def busy(self, before: float = math.inf) -> bool:
        """Returns whether an evaluation of a step before `before` is under way."""
        return any(process.has_begun(before) for process in self._processes.values())

    def tell_progress(self, before: float = math.inf) -> None:
        """Shows what the evaluations of steps before `before` do, ten seconds after each began, and
        then ever less often. Called again and again while something waits for them."""
        for process in self._processes.values():
            if process.has_begun(before):
                self._tell(process, f"at step {process.step}", process.spec.problems)

    def _tell(self, process: _Process, doing: str, problems: int | None = None) -> None:
        """Logs what a process does, when that is due. If it has `problems`, a terminal shows a bar
        from then on."""
        if process.bar is not None:
            process.bar.update(process.answered() - process.bar.n)
        seconds = time.monotonic() - process.began
        if process.bar is not None or not process.pacer.is_due(seconds):
            return
        evaluation = f"Evaluation {process.spec.name!r} {doing}"
        process.bar = bar_of(evaluation, problems, seconds)
        if process.bar is not None:
            return
        if problems is not None:
            evaluation += f", {process.answered()} of {problems} problems"
        tell_work(process.service, f"{evaluation}, {seconds:.0f} s")

    # -------------------------------------------------------------------------- after an evaluation

    def poll(self) -> list[Result]:
        """Returns the results of the evaluations that have ended since the last call."""
        results = []
        for process in list(self._processes.values()):
            if not process.has_begun():
                continue
            code = self._services.exit_code(process.service)
            seconds = time.monotonic() - process.began
            if code is None and seconds < self._timeout:
                continue
            failure = None
            try:
                results.append(self._read(process, code))
            except EvaluationError as error:
                failure = error
            except OSError as error:
                failure = _refused_by_disk(error)
            self._end(process, failure)
        self.results += results
        return results

    def _end(self, process: _Process, failure: EvaluationError | None) -> None:
        """Ends a process, reports the `failure` of its evaluation if there is one, and prepares the
        next one if it may come."""
        if process.bar is not None:
            process.bar.close()
        self._services.end(process.service)
        del self._processes[process.spec.name]
        if failure is not None:
            name = process.spec.name
            what = f"Evaluation {name!r} at step {process.step} failed: {failure.what}"
            fix = f"{failure.fix} Its log: {process.service.log_path}"
            error = EvaluationError(what, failure.seen, fix, failure.code)
            self._warn_or_raise(error, is_first=process.step == 0)
        if not self._is_last:
            try:
                self._prepare(process.spec)
            except EvaluationError as error:
                self._warn_or_raise(error)

    def _warn_or_raise(self, error: EvaluationError, is_first: bool = False) -> None:
        """Raises the error of a first evaluation, in which a mistake shows. A later one must not
        end a training, unless the training depends on it."""
        if self._needed or is_first:
            raise error from None
        logger.warning("%s", error)

    def _read(self, process: _Process, code: int | None) -> Result:
        """Reads the files of a process that ended with exit code `code`, or that is late (`None`),
        and moves them to their final folder."""
        spec = process.spec
        seconds = time.monotonic() - process.began
        if code is None:
            what = f"it did not end within {self._timeout:g} s (`eval_timeout`)"
            place = where_is(process.service, self._services.stacks_dir)
            if place:
                what += f": its code is {place}"
            raise EvaluationError(what, fix="Ask fewer problems, or raise `eval_timeout`.")
        if code:
            service = process.service
            cause = cause_of_end(service.log_path, service.log_start)
            what = f"it ended with exit code {code}{cause}"
            raise EvaluationError(what, fix="Correct what the end of its log says.")
        result = Result(
            name=spec.name,
            step=process.step,
            metrics={},
            versions=None,
            seconds=round(seconds, 2),
        )
        if spec.problems is None:
            result.metrics = read_own_metrics(process.folder)
        else:
            self._measure(result, process)
        result.versions = self._versions(process.key)
        content = json.dumps(asdict(result))
        write_file(process.folder / RESULT, content.encode())
        for file in process.folder.glob(f"{GO}*"):
            file.unlink()
        folder = process.folder.with_name(f"step-{process.step:06d}")
        shutil.rmtree(folder, ignore_errors=True)
        process.folder.rename(folder)
        return result

    def _measure(self, result: Result, process: _Process) -> None:
        """Fills in the scores and metrics of an evaluation with `problems`."""
        spec = process.spec
        first_scores = None
        for earlier in self.results:
            if earlier.name == spec.name:
                result.graded |= earlier.graded
                if earlier.step == 0 and first_scores is None:
                    first_scores = earlier.scores
        answers = read_answers(process.folder / GROUPS)
        result.scores, lengths = _scores_and_lengths(answers, spec)
        _require_rollouts(answers, lengths)
        counts = self._count(answers, process)
        result.metrics = measures(result.scores, spec.passes_above, first_scores)
        result.metrics |= counts | {"mean_length": fmean(lengths)}
        result.passes_above = spec.passes_above
        for scores in result.scores.values():
            result.graded |= not {0.0, 1.0}.issuperset(scores)

    def _count(self, answers: list[Answer], process: _Process) -> dict[str, int]:
        """Returns how many problems are known, and how many of these failed. Warns if any failed
        or are missing. A problem for which the environment returned nothing is left out, since
        nothing is known of it."""
        spec = process.spec
        failures = [answer.failure for answer in answers if answer.failure is not None]
        if failures:
            logger.warning(
                "Evaluation %r at step %d failed on %d of %d problems, which count as not solved: "
                "%s. The tracebacks are in %s.",
                spec.name,
                process.step,
                len(failures),
                len(answers),
                failures[0],
                process.folder / GROUPS,
            )
        known = len(failures)
        for answer in answers:
            if answer.groups:
                known += 1
        if known < spec.problems:
            logger.warning(
                "Evaluation %r at step %d has %d of %d problems: the environment has no more, or "
                "returned nothing for some (most return nothing if all scores of a group are "
                "alike).",
                spec.name,
                process.step,
                known,
                spec.problems,
            )
        return {"problems": known, "failed": len(failures)}

    def _versions(self, key: str) -> tuple[int, int] | None:
        """Returns the oldest and the newest policy version with which the servers answered requests
        that had the API key `key`. Returns `None` if that is unknown."""
        try:
            replies = [server.evaluation(key) for server in self._servers]
        except (ServerError, ValueError) as error:
            logger.warning("Which policy versions sampled an evaluation is unknown: %s", error)
            return None
        replies = [reply for reply in replies if reply.oldest is not None]
        if not replies:
            return None
        oldest = min(reply.oldest for reply in replies)
        newest = max(reply.newest for reply in replies)
        return oldest, newest


def _scores_and_lengths(
    answers: list[Answer], spec: EvaluationSpec
) -> tuple[dict[str, list[float]], list[int]]:
    """Returns the scores by problem, and the trained tokens of each rollout. All samples of a
    problem on which the environment failed count as not solved."""
    scores = {}
    lengths = []
    for answer in answers:
        if answer.failure is not None:
            not_solved = min(0.0, spec.passes_above)
            scores[f"{answer.item}"] = [not_solved] * spec.samples
    for answer in answers:
        for number, group in enumerate(answer.groups):
            key = problem_key(answer.item, number, group)
            scores[key] = group.scores
            lengths += [int(trained.sum()) for trained in group.trained]
    return scores, lengths


def _require_rollouts(answers: list[Answer], lengths: list[int]) -> None:
    """Raises `EvaluationError` if no problem gave a rollout."""
    if lengths:
        return
    what = f"none of {len(answers)} problems gave a rollout"
    fix = "Have `get_next_item` give problems, and `collect_trajectories` groups."
    failures = [answer.failure for answer in answers if answer.failure is not None]
    if failures:
        what += f": {failures[0]}"
        fix = "Correct it there."
    raise EvaluationError(what, fix=fix)


def _refused_by_disk(error: OSError) -> EvaluationError:
    what = f"its files cannot be read or written ({error})"
    return EvaluationError(what, fix="Make room, or let this user write there.")
