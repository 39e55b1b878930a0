"""Evaluations of a run: which are due, the process that makes one, and what it found.

An evaluation is an Atropos environment that is run once, beside the training. With `problems`,
`environment_site/groups.py` takes it through exactly these, and its rollouts go to a file, never to
the Atropos API. Without, its own `evaluate` runs, which leaves `metrics.json`. Its process is
started ahead and begins when it is told, so that the policy which is meant answers. By the API key
of its requests, the servers note which versions did.

Its measures (pass@k, the mean score, how sure both are, the gain since the first evaluation) are
means over problems, and so are their errors, because the samples of one problem are alike (Miller
2024, "Adding Error Bars to Evals").

What it leaves is moved to `<output_dir>/evaluations/NAME/step-000400/` once `result.json` is there,
by which a run that resumes knows which evaluations it has. All of it is somebody else's output:
whatever cannot be read is an `EvaluationError`, and so an evaluation that failed.
"""

import hashlib
import json
import logging
import math
import re
import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from reprlib import repr as short
from statistics import fmean, variance
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from trl_atropos.environment_entry import EvaluationSpec
from trl_atropos.errors import EvaluationError, ServerError
from trl_atropos.protocol import EVALUATION_KEY
from trl_atropos.rollouts.spool import write_file
from trl_atropos.rollouts.wire import ScoredGroup, parse_group
from trl_atropos.server_client import ServerClient
from trl_atropos.services.manager import Service, Services, tell_work

logger = logging.getLogger(__name__)

FOLDER = "evaluations"
GROUPS = "groups.jsonl"
METRICS = "metrics.json"
RESULT = "result.json"
# folder of the evaluation that comes next, and the file that lets it begin
NEXT = "next"
GO = "go"
# seconds that a process may take to import and set up what it needs
READY_TIMEOUT = 600.0
POLL = 0.02
TOLD_EVERY = 60.0  # seconds between two messages of what an evaluation does that is waited for
CONFIDENCE = 1.96  # standard errors to either side: 95 %
ASK_TIMEOUT = 30.0  # seconds that a server may take to say which versions sampled
STEP_FOLDER = re.compile(r"step-(\d+)")
MEAN = re.compile(r"avg@\d+")  # name of the metric that is the mean score
Scores = Mapping[str, Sequence[float]]  # of every sample, by problem
Samples = Annotated[list[float], msgspec.Meta(min_length=1)]  # scores of one problem
Kind = TypeVar("Kind")


@dataclass
class Result:
    """What an evaluation found at an optimizer step. `versions`: the oldest and the newest that
    sampled for it."""

    name: str
    step: int
    metrics: dict[str, float]
    versions: tuple[int, int] | None
    seconds: float
    scores: dict[str, Samples] = field(default_factory=dict)  # by problem
    # a sample with a score above this has passed; None: of the environment's own
    passes_above: float | None = None
    # whether scores of it, or of an earlier one, are not only 0 and 1: their mean says more
    graded: bool = False

    @property
    def policy(self) -> str:
        """The policy that was evaluated, in words."""
        if self.versions is None:
            return "unknown policy versions"
        oldest, newest = self.versions
        return f"step {oldest}" if oldest == newest else f"steps {oldest} to {newest}"

    def logs(self) -> dict[str, float]:
        """The metrics by the names that Transformers knows them by, such as `eval_gsm8k_pass@1`."""
        versions = (
            {}
            if self.versions is None
            else dict(zip(("oldest_version", "newest_version"), self.versions))
        )
        named = self.metrics | versions | {"seconds": self.seconds}
        return {f"eval_{self.name}_{metric}": float(value) for metric, value in named.items()}

    def line(self, graded: bool | None = None) -> str:
        """One line for a person. With `graded`, the mean score comes first; by default, if
        `self.graded`."""
        if "pass@1" not in self.metrics:
            found = ", ".join(f"{name} {value:.4g}" for name, value in self.metrics.items())
        elif self.graded if graded is None else graded:
            found = self._mean_in_words()
        else:
            found = self._passes_in_words()
        return f"{self.name}: {found} ({self.policy}, {self.seconds:.0f} s)"

    def _passes_in_words(self) -> str:
        """pass@1 and its gain. Where all or none pass, the samples show no spread to make an
        interval of."""
        share = self.metrics["pass@1"]
        spread = self._interval("pass@1") if 0 < share < 1 else ""
        return f"pass@1 {share:.3f}{spread}{self._gain('gain')}"

    def _mean_in_words(self) -> str:
        """The mean score and its gain, then how many pass."""
        name = next(name for name in self.metrics if MEAN.fullmatch(name))
        mean = f"mean score {self.metrics[name]:.3f}{self._interval(name)}{self._gain('mean_gain')}"
        above = "" if self.passes_above is None else f" (scores above {self.passes_above:g})"
        return f"{mean}; pass@1 {self.metrics['pass@1']:.3f}{above}"

    def _gain(self, name: str) -> str:
        if name not in self.metrics:
            return ""
        return f", {self.metrics[name]:+.3f}{self._interval(name, '+')} since step 0"

    def _interval(self, name: str, sign: str = "") -> str:
        """The 95 % interval of a metric, behind a space; empty if it has no width: all values are
        equal."""
        low = self.metrics.get(f"{name}_low", 0.0)
        high = self.metrics.get(f"{name}_high", 0.0)
        return f" [{low:{sign}.3f}, {high:{sign}.3f}]" if low < high else ""


class _Group(msgspec.Struct):
    """What an evaluation needs of a scored group, as the environment made it."""

    tokens: Any
    masks: Any
    scores: Any


class _Line(msgspec.Struct):
    """One line of `GROUPS`, as `environment_site/groups.py` writes it: `groups`, or an `error`."""

    item: int
    groups: list[_Group] | None = None
    error: str | None = None
    place: str = ""


@dataclass(frozen=True)
class Answer:
    """What came of a problem: groups, none if the environment returned nothing, or an exception."""

    item: int
    groups: list[ScoredGroup]
    failure: str | None  # the exception and its place, in words


class _Logged(msgspec.Struct):
    all: dict[str, Any]


class _OwnMetrics(msgspec.Struct):
    """What Atropos' `evaluate_log` writes to `METRICS`."""

    results: _Logged


@dataclass
class _Process:
    """An evaluation that waits or is under way."""

    spec: EvaluationSpec
    folder: Path
    key: str
    service: Service
    step: int | None = None  # None: it waits
    began: float = field(default_factory=time.monotonic)  # the process, and later the evaluation
    told: float = 0.0  # seconds after `began` at which `_tell` last said what it does


class Evaluator:
    """Makes the evaluations `specs` of a run, on rank 0. `command_of(spec, folder, key)` writes the
    configuration of one and returns its command; `urls` are the servers that it samples from; none
    takes more than `timeout` seconds. One that fails is warned about; the first, and all if they
    are `needed`, raise `EvaluationError`."""

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
        self._over = False  # no evaluation comes any more

    def prepare(self) -> None:
        """Starts the processes of the first evaluations, which import while the servers start."""
        for spec in self.specs:
            self._prepare(spec)

    def start(self, step: int) -> None:
        """Training begins after `step` optimizer steps. What was found after more, or by another
        run, is removed."""
        self.results = []
        self._over = False
        for spec in self.specs:
            for folder in sorted((self._folder / spec.name).glob("step-*")):
                made_at = STEP_FOLDER.fullmatch(folder.name)
                if made_at is None:
                    continue  # somebody else's
                if step == 0 or int(made_at[1]) > step:
                    shutil.rmtree(folder)
                elif (result := read_result(folder)) is not None:
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

    def begin(self, step: int, first: bool, last: bool) -> list[Result]:
        """Begins those that are due after `step` optimizer steps, all of them before the `first`
        and after the `last`. Returns those of this step that a run which was resumed has
        already."""
        self._over = last
        for process in self._due(step, first, last):
            process.step, process.began, process.told = step, time.monotonic(), 0.0
            try:
                process.folder.joinpath(GO).touch()
            except OSError as error:
                self._end(process, _refused_by_disk(error))
        return [result for result in self.results if result.step == step]

    def ready(self, step: int, first: bool, last: bool, timeout: float = math.inf) -> bool:
        """Waits `timeout` seconds at most until those that `begin` would begin can do so at once.
        Whether they can."""
        deadline = time.monotonic() + timeout
        while late := [
            process for process in self._due(step, first, last) if not self._is_ready(process)
        ]:
            for process in late:
                self._tell(process, f"is starting for step {step}")
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL)
        return True

    def _due(self, step: int, first: bool, last: bool) -> list[_Process]:
        known = {result.name for result in self.results if result.step == step}
        due = (s.name for s in self.specs if first or last or (s.every and step % s.every == 0))
        return [self._processes[name] for name in due if name in self._processes.keys() - known]

    def _is_ready(self, process: _Process) -> bool:
        """Whether a process waits for its step, or there is nothing to wait for: `poll` says
        why."""
        late = time.monotonic() - process.began > READY_TIMEOUT
        awaited = process.folder.joinpath(f"{GO}.awaited")
        return late or awaited.exists() or self._services.exit_code(process.service) is not None

    def poll(self) -> list[Result]:
        """Those that have ended since the last call."""
        ended = []
        for process in [
            process for process in self._processes.values() if process.step is not None
        ]:
            code = self._services.exit_code(process.service)
            if code is None and time.monotonic() - process.began < self._timeout:
                continue
            trouble = None
            try:
                ended.append(self._read(process, code))
            except EvaluationError as error:
                trouble = error
            except OSError as error:
                trouble = _refused_by_disk(error)
            self._end(process, trouble)
        self.results += ended
        return ended

    def _end(self, process: _Process, trouble: EvaluationError | None) -> None:
        """Ends a process, and prepares the next one if there may be one. `trouble` is why its
        evaluation failed."""
        self._services.end(process.service)
        del self._processes[process.spec.name]
        if trouble is not None:
            what = f"Evaluation {process.spec.name!r} at step {process.step} failed: {trouble.what}"
            fix = f"{trouble.fix} Its log: {process.service.log_path}"
            error = EvaluationError(what, trouble.seen, fix, trouble.code)
            self._warn_or_raise(error, is_first=process.step == 0)
        if not self._over:
            try:
                self._prepare(process.spec)
            except EvaluationError as error:
                self._warn_or_raise(error)

    def _warn_or_raise(self, error: EvaluationError, is_first: bool = False) -> None:
        """A mistake shows in the first evaluation. Later ones must not end a training, unless it
        depends on them."""
        if self._needed or is_first:
            raise error from None
        logger.warning("%s", error)

    def tell_progress(self, before: float = math.inf) -> None:
        """Says what the evaluations of steps before `before` do, a minute after each began and
        every minute from then on. Called again and again while something waits for them."""
        for process in self._processes.values():
            if process.step is not None and process.step < before:
                self._tell(process, f"at step {process.step}")

    def _tell(self, process: _Process, doing: str) -> None:
        seconds = time.monotonic() - process.began
        if seconds >= process.told + TOLD_EVERY:
            process.told = seconds
            tell_work(process.service, f"Evaluation {process.spec.name!r} {doing}, {seconds:.0f} s")

    def busy(self, before: float = math.inf) -> bool:
        """Whether an evaluation of a step before `before` is under way."""
        return any(
            process.step is not None and process.step < before
            for process in self._processes.values()
        )

    def _read(self, process: _Process, code: int | None) -> Result:
        """Reads what the process left, and moves it to where it stays. `code`: its exit code,
        `None` if it is late."""
        spec = process.spec
        seconds = time.monotonic() - process.began
        if code is None:
            what = f"it did not end within {self._timeout:g} s (`eval_timeout`)"
            raise EvaluationError(what, fix="Ask fewer problems, or raise `eval_timeout`.")
        if code:
            raise EvaluationError(
                f"it ended with exit code {code}", fix="Correct what the end of its log says."
            )
        result = Result(
            spec.name, process.step, metrics={}, versions=None, seconds=round(seconds, 2)
        )
        if spec.problems is None:
            result.metrics = _own_metrics(process.folder)
        else:
            self._measure(result, process)
        result.versions = self._versions(process.key)
        write_file(process.folder / RESULT, json.dumps(asdict(result)).encode())
        for file in process.folder.glob(f"{GO}*"):
            file.unlink()
        folder = process.folder.with_name(f"step-{process.step:06d}")
        shutil.rmtree(folder, ignore_errors=True)
        process.folder.rename(folder)
        return result

    def _measure(self, result: Result, process: _Process) -> None:
        """Fills in what the answers say."""
        spec = process.spec
        earlier = [one for one in self.results if one.name == spec.name]
        first = next((one.scores for one in earlier if one.step == 0), None)
        result.scores, further = self._scores(process)
        result.metrics = measures(result.scores, spec.passes_above, first) | further
        result.passes_above = spec.passes_above
        values = {score for scores in result.scores.values() for score in scores}
        result.graded = not values <= {0.0, 1.0} or any(one.graded for one in earlier)

    def _scores(self, process: _Process) -> tuple[dict[str, list[float]], dict[str, float]]:
        """The scores by problem, and what else is known of them. A problem on which the environment
        failed has not been solved; one for which it returned nothing is left out, since nothing is
        known of it."""
        spec = process.spec
        path = process.folder / GROUPS
        answers = read_answers(path)
        failed = [answer for answer in answers if answer.failure is not None]
        silent = sum(answer.failure is None and not answer.groups for answer in answers)
        scores = {
            f"{answer.item}": [min(0.0, spec.passes_above)] * spec.samples for answer in failed
        }
        lengths: list[int] = []
        for answer in answers:
            for number, group in enumerate(answer.groups):
                scores[f"{answer.item}.{number}-{_prompt_digest(group)}"] = group.scores
                lengths += [int(trained.sum()) for trained in group.trained]
        if not lengths:
            what = f"none of {len(answers)} problems gave a rollout"
            what += f": {failed[0].failure}" if failed else ""
            otherwise = "Have `get_next_item` give problems, and `collect_trajectories` groups."
            raise EvaluationError(what, fix="Correct it there." if failed else otherwise)
        if failed:
            logger.warning(
                "Evaluation %r at step %d failed on %d of %d problems, which count as not solved: "
                "%s. The tracebacks are in %s.",
                *(spec.name, process.step, len(failed), len(answers), failed[0].failure, path),
            )
        known = len(answers) - silent
        if known < spec.problems:
            logger.warning(
                "Evaluation %r at step %d has %d of %d problems: the environment has no more, or "
                "returned nothing for some (most return nothing where all scores of a group are "
                "alike).",
                *(spec.name, process.step, known, spec.problems),
            )
        return scores, {"problems": known, "failed": len(failed), "mean_length": fmean(lengths)}

    def _versions(self, key: str) -> tuple[int, int] | None:
        try:
            replies = [server.evaluation(key) for server in self._servers]
        except (ServerError, ValueError) as error:
            logger.warning("Which policy versions sampled an evaluation is unknown: %s", error)
            return None
        known = [(reply.oldest, reply.newest) for reply in replies if reply.oldest is not None]
        return (
            (min(oldest for oldest, _ in known), max(newest for _, newest in known))
            if known
            else None
        )


def _parsed(content: bytes, kind: type[Kind]) -> Kind:
    """JSON as an object of `kind`. Raises `ValueError` with what is wrong."""
    try:
        return msgspec.convert(json.loads(content), kind)
    except (RecursionError, msgspec.ValidationError) as error:
        raise ValueError(str(error)) from error


def read_result(folder: Path) -> Result | None:
    """The result in the folder of an evaluation; `None` if it was not made, or, with a warning, if
    what is there cannot be read."""
    path = folder / RESULT
    try:
        return _parsed(path.read_bytes(), Result)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be read (%s): this evaluation counts as not made.", path, error)
        return None


def results_of(folder: str | Path, step: int) -> list[Result]:
    """The results of an optimizer step below the output folder of a run, by name."""
    paths = sorted(Path(folder, FOLDER).glob(f"*/step-{step:06d}/{RESULT}"))
    found = [read_result(path.parent) for path in paths]
    return [result for result in found if result is not None]


def read_answers(path: Path) -> list[Answer]:
    """The lines of the file at `path`, one for each problem. Raises `EvaluationError` if one is
    torn, or is not what `environment_site/groups.py` writes."""
    content = path.read_bytes() if path.exists() else b""
    answers: dict[int, Answer] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            answer = _read_answer(line)
            if answer.item in answers:
                raise ValueError(f"problem {answer.item} is there twice")
        except ValueError as error:
            what = f"line {number} of {path.name} cannot be read: {error}"
            fix = (
                "Have the environment return groups that a run could train on (`trl-atropos try` "
                "checks one)."
            )
            raise EvaluationError(what, short(line), fix) from error
        answers[answer.item] = answer
    return list(answers.values())


def _read_answer(line: bytes) -> Answer:
    """Raises `ValueError` with what is wrong."""
    sent = _parsed(line, _Line)
    if (sent.groups is None) == (sent.error is None):
        raise ValueError("it has neither `groups` nor `error`, or both")
    if sent.groups is None:
        return Answer(sent.item, [], f"{sent.error} ({sent.place})")
    groups = [parse_group(msgspec.structs.asdict(group)) for group in sent.groups]
    return Answer(sent.item, groups, None)


def _prompt_digest(group: ScoredGroup) -> str:
    """Which problem a group is of: a hash of the tokens before the first that was sampled."""
    trained = group.trained[0]
    length = int(np.argmax(trained)) if trained.any() else len(trained)
    return hashlib.blake2b(
        repr(group.tokens[0][:length].tolist()).encode(), digest_size=4
    ).hexdigest()


def _own_metrics(folder: Path) -> dict[str, float]:
    """What the environment's own `evaluate` has written by Atropos' `evaluate_log`."""
    path = folder / METRICS
    fix = "Have it call `evaluate_log`, or set `problems` to evaluate rollouts."
    if not path.exists():
        raise EvaluationError(f"its own `evaluate` left no {METRICS}", fix=fix)
    try:
        logged = _parsed(path.read_bytes(), _OwnMetrics).results.all
        metrics = {
            name: float(value) for name, value in logged.items() if isinstance(value, int | float)
        }
    except (ValueError, OverflowError) as error:
        raise EvaluationError(
            f"{METRICS} of its own `evaluate` cannot be read: {error}", fix=fix
        ) from error
    if not metrics:
        raise EvaluationError(f"{METRICS} of its own `evaluate` has no number", fix=fix)
    return {name.removeprefix("eval/"): value for name, value in metrics.items()}


def _refused_by_disk(error: OSError) -> EvaluationError:
    what = f"its files cannot be read or written ({error})"
    return EvaluationError(what, fix="Make room, or let this user write there.")


def pass_at(k: int, num_samples: int, num_passed: int) -> float:
    """The probability that at least one of `k` samples passes, unbiased (Chen et al. 2021,
    "Evaluating Large Language Models Trained on Code", equation 1)."""
    return 1 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def measures(scores: Scores, passes_above: float, first: Scores | None = None) -> dict[str, float]:
    """The metrics of an evaluation by name. `first` are the scores of the run's first one, of the
    same problems."""
    passed = {
        problem: sum(one > passes_above for one in given) for problem, given in scores.items()
    }
    shares = {problem: count / len(scores[problem]) for problem, count in passed.items()}
    low, high = interval(list(shares.values()))
    found = {"pass@1": fmean(shares.values()), "pass@1_low": low, "pass@1_high": high}
    fewest = min(len(given) for given in scores.values())
    sizes = {2**power for power in range(1, fewest.bit_length())} | {fewest}
    for k in sorted(sizes - {1}):
        found[f"pass@{k}"] = fmean(
            pass_at(k, len(scores[problem]), count) for problem, count in passed.items()
        )
    means = {problem: fmean(given) for problem, given in scores.items()}
    found |= _with_interval(f"avg@{fewest}", list(means.values()))
    both = shares.keys() & (first or {}).keys()
    if both:
        before = {problem: fmean(one > passes_above for one in first[problem]) for problem in both}
        found |= _with_interval("gain", [shares[problem] - before[problem] for problem in both])
        found |= _with_interval(
            "mean_gain", [means[problem] - fmean(first[problem]) for problem in both]
        )
    return found


def _with_interval(name: str, values: Sequence[float]) -> dict[str, float]:
    """The mean of values, one per problem, as the metric `name`, and its 95 % interval."""
    mean = fmean(values)
    error = CONFIDENCE * _standard_error(values)
    return {name: mean, f"{name}_low": mean - error, f"{name}_high": mean + error}


def interval(shares: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of a mean of shares, one per problem: Wilson's, for as many independent
    trials as would have the standard error that the problems have. So it has a width where all or
    none pass."""
    mean = fmean(shares)
    error = _standard_error(shares)
    trials = mean * (1 - mean) / error**2 if error else len(shares)
    z = CONFIDENCE**2 / trials
    middle = (mean + z / 2) / (1 + z)
    width = math.sqrt(z * mean * (1 - mean) + z**2 / 4) / (1 + z)
    return max(0.0, middle - width), min(1.0, middle + width)


def _standard_error(values: Sequence[float]) -> float:
    return math.sqrt(variance(values) / len(values)) if len(values) > 1 else 0.0
