"""Evaluations of a run: which are due, the process that makes one, and what it found.

An evaluation is an Atropos environment that is run once, beside the training. With `problems`,
`environment_site/groups.py` takes it through exactly these, and its rollouts go to a file, never to the Atropos API.
Without, its own `evaluate` runs, which leaves `metrics.json`. Its process is started ahead and begins when it is told,
so that the policy which is meant answers. By the API key of its requests, the servers note which versions did.

Its measures (pass@k, the mean score, how sure both are, the gain since the first evaluation) are means over problems,
and so are their errors, because the samples of one problem are alike (Miller 2024, "Adding Error Bars to Evals").

What it leaves is moved to `<output_dir>/evaluations/NAME/step-000400/` once `result.json` is there, by which a run
that resumes knows which evaluations it has.
"""

import hashlib
import json
import logging
import math
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path
from statistics import fmean, variance
from typing import Any

from trl_atropos.errors import EvaluationError, ServerError
from trl_atropos.protocol import EVALUATION_KEY
from trl_atropos.server_client import ServerClient
from trl_atropos.services.environments import EvaluationSpec
from trl_atropos.services.manager import Service, Services

logger = logging.getLogger(__name__)

FOLDER = "evaluations"
GROUPS, METRICS, RESULT = "groups.jsonl", "metrics.json", "result.json"
NEXT, GO = "next", "go"  # folder of the evaluation that comes next, and the file that lets it begin
READY_TIMEOUT, POLL = 600.0, 0.02  # seconds that a process may take to import and set up what it needs
CONFIDENCE = 1.96  # standard errors to either side: 95 %
ASK_TIMEOUT = 30.0  # seconds that a server may take to say which versions sampled
Scores = Mapping[str, Sequence[float]]  # of every sample, by problem


@dataclass
class Result:
    """What an evaluation found at an optimizer step. `versions`: the oldest and the newest that sampled for it."""

    name: str
    step: int
    metrics: dict[str, float]
    versions: tuple[int, int] | None
    seconds: float
    scores: dict[str, list[float]] = field(default_factory=dict)  # by problem

    @property
    def policy(self) -> str:
        """The policy that was evaluated, in words."""
        if self.versions is None:
            return "unknown policy versions"
        oldest, newest = self.versions
        return f"step {oldest}" if oldest == newest else f"steps {oldest} to {newest}"

    def logs(self) -> dict[str, float]:
        """The metrics by the names that Transformers knows them by, such as `eval_gsm8k_pass@1`."""
        versions = {} if self.versions is None else dict(zip(("oldest_version", "newest_version"), self.versions))
        named = self.metrics | versions | {"seconds": self.seconds}
        return {f"eval_{self.name}_{metric}": float(value) for metric, value in named.items()}

    def line(self) -> str:
        """One line for a person."""
        found = ", ".join(f"{name} {value:.4g}" for name, value in self.metrics.items())
        if "pass@1" in self.metrics:
            found = "pass@1 {pass@1:.3f} [{pass@1_low:.3f}, {pass@1_high:.3f}]"
            if "gain" in self.metrics:
                found += ", {gain:+.3f} [{gain_low:+.3f}, {gain_high:+.3f}] since step 0"
            found = found.format_map(self.metrics)
        return f"{self.name}: {found} ({self.policy}, {self.seconds:.0f} s)"


@dataclass
class _Process:
    """An evaluation that waits or is under way."""

    spec: EvaluationSpec
    folder: Path
    key: str
    service: Service
    step: int | None = None  # None: it waits
    began: float = field(default_factory=time.monotonic)  # the process, and later the evaluation


class Evaluator:
    """Makes the evaluations `specs` of a run, on rank 0. `command_of(spec, folder, key)` writes the configuration of
    one and returns its command; `urls` are the servers that it samples from; none takes more than `timeout` seconds.
    One that fails is warned about; the first, and all if they are `needed`, raise `EvaluationError`."""

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
        self._services, self._command_of = services, command_of
        self._servers = [ServerClient(url, ASK_TIMEOUT) for url in urls]
        self._folder, self._timeout, self._needed = Path(folder), timeout, needed
        self._processes: dict[str, _Process] = {}
        self._over = False  # no evaluation comes any more

    def prepare(self) -> None:
        """Starts the processes of the first evaluations, which import while the servers start."""
        for spec in self.specs:
            self._prepare(spec)

    def start(self, step: int) -> None:
        """Training begins after `step` optimizer steps. What was found after more, or by another run, is removed."""
        self.results, self._over = [], False
        for spec in self.specs:
            for folder in sorted((self._folder / spec.name).glob("step-*")):
                result = read_result(folder)
                if result is None or result.step > step or step == 0:
                    shutil.rmtree(folder)
                else:
                    self.results.append(result)
            if spec.name not in self._processes:
                self._prepare(spec)
            self._processes[spec.name].began = time.monotonic()

    def _prepare(self, spec: EvaluationSpec) -> None:
        """Starts the process of the next evaluation, which waits."""
        folder = (self._folder / spec.name / NEXT).absolute()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        key = f"{EVALUATION_KEY}{spec.name}-{uuid.uuid4().hex}"
        name, command = f"evaluation-{spec.name}", self._command_of(spec, folder, key)
        env = spec.variables(TRL_ATROPOS_GO=str(folder / GO))
        service = self._services.start(name, command, env=env, cwd=spec.cwd, scratch=True, ends=True)
        self._processes[spec.name] = _Process(spec, folder, key, service)

    def begin(self, step: int, first: bool, last: bool) -> list[Result]:
        """Begins those that are due after `step` optimizer steps, all of them before the `first` and after the `last`.
        Returns those of this step that a run which was resumed has already."""
        self._over = last
        for process in self._due(step, first, last):
            process.step, process.began = step, time.monotonic()
            process.folder.joinpath(GO).touch()
        return [result for result in self.results if result.step == step]

    def ready(self, step: int, first: bool, last: bool, timeout: float = math.inf) -> bool:
        """Waits `timeout` seconds at most until those that `begin` would begin can do so at once. Whether they can."""
        deadline = time.monotonic() + timeout
        while not (ready := all(map(self._is_ready, self._due(step, first, last)))) and time.monotonic() < deadline:
            time.sleep(POLL)
        return ready

    def _due(self, step: int, first: bool, last: bool) -> list[_Process]:
        known = {result.name for result in self.results if result.step == step}
        due = (s.name for s in self.specs if first or last or (s.every and step % s.every == 0))
        return [self._processes[name] for name in due if name in self._processes.keys() - known]

    def _is_ready(self, process: _Process) -> bool:
        """Whether a process waits for its step, or there is nothing to wait for: `poll` says why."""
        late, awaited = time.monotonic() - process.began > READY_TIMEOUT, process.folder.joinpath(f"{GO}.awaited")
        return late or awaited.exists() or self._services.exit_code(process.service) is not None

    def poll(self) -> list[Result]:
        """Those that have ended since the last call."""
        ended = []
        for process in [process for process in self._processes.values() if process.step is not None]:
            code = self._services.exit_code(process.service)
            if code is None and time.monotonic() - process.began < self._timeout:
                continue
            self._services.end(process.service)
            del self._processes[process.spec.name]
            try:
                ended.append(self._read(process, code))
            except EvaluationError as error:
                what = f"Evaluation {process.spec.name!r} at step {process.step} failed: {error.what}"
                fix = f"{error.fix} Its log: {process.service.log_path}"
                error = EvaluationError(what, error.seen, fix, error.code)
                if self._needed or process.step == 0:
                    raise error from None
                logger.warning("%s", error)
            if not self._over:
                self._prepare(process.spec)
        self.results += ended
        return ended

    def busy(self, before: float = math.inf) -> bool:
        """Whether an evaluation of a step before `before` is under way."""
        return any(process.step is not None and process.step < before for process in self._processes.values())

    def _read(self, process: _Process, code: int | None) -> Result:
        """Reads what the process left, and moves it to where it stays. `code`: its exit code, `None` if it is late."""
        spec, seconds = process.spec, time.monotonic() - process.began
        if code is None:
            what = f"it did not end within {self._timeout:g} s (`eval_timeout`)"
            raise EvaluationError(what, fix="Ask fewer problems, or raise `eval_timeout`.")
        if code:
            raise EvaluationError(f"it ended with exit code {code}", fix="Correct what the end of its log says.")
        if spec.problems is None:
            scores, metrics = {}, _own_metrics(process.folder)
        else:
            scores, further = self._scores(process)
            before = [result.scores for result in self.results if result.name == spec.name and result.step == 0]
            metrics = measures(scores, spec.passes_above, before[0] if before else None) | further
        result = Result(spec.name, process.step, metrics, self._versions(process.key), round(seconds, 2), scores)
        (process.folder / RESULT).write_text(json.dumps(asdict(result)))
        for file in process.folder.glob(f"{GO}*"):
            file.unlink()
        folder = process.folder.with_name(f"step-{process.step:06d}")
        shutil.rmtree(folder, ignore_errors=True)
        process.folder.rename(folder)
        return result

    def _scores(self, process: _Process) -> tuple[dict[str, list[float]], dict[str, float]]:
        """The scores by problem, and what else is known of them. A problem on which the environment failed has not
        been solved; one for which it returned nothing is left out, since nothing is known of it."""
        spec, path = process.spec, process.folder / GROUPS
        items = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
        failed = [item for item in items if "error" in item]
        silent = sum(item.get("groups") == [] for item in items)
        scores = {f"{item['item']}": [min(0.0, spec.passes_above)] * spec.samples for item in failed}
        lengths = []
        for item in items:
            for number, group in enumerate(item.get("groups", ())):
                prompt = list(takewhile(lambda pair: pair[1] == -100, zip(group["tokens"][0], group["masks"][0])))
                asked = hashlib.blake2b(repr([token for token, _ in prompt]).encode(), digest_size=4).hexdigest()
                scores[f"{item['item']}.{number}-{asked}"] = [float(score) for score in group["scores"]]
                lengths += [sum(token != -100 for token in mask) for mask in group["masks"]]
        where = f"{failed[0]['error']} ({failed[0]['place']})" if failed else ""
        if not lengths:
            what = f"none of {len(items)} problems gave a rollout" + (f": {where}" if failed else "")
            otherwise = "Have `get_next_item` give problems, and `collect_trajectories` groups."
            raise EvaluationError(what, fix="Correct it there." if failed else otherwise)
        if failed:
            logger.warning(
                "Evaluation %r at step %d failed on %d of %d problems, which count as not solved: %s. The tracebacks "
                "are in %s.",
                *(spec.name, process.step, len(failed), len(items), where, path),
            )
        if silent or len(items) < spec.problems:
            logger.warning(
                "Evaluation %r at step %d has %d of %d problems: the environment has no more, or returned nothing for "
                "some (most return nothing where all scores of a group are alike).",
                *(spec.name, process.step, len(items) - silent, spec.problems),
            )
        return scores, {"problems": len(items) - silent, "failed": len(failed), "mean_length": fmean(lengths)}

    def _versions(self, key: str) -> tuple[int, int] | None:
        try:
            replies = [server.evaluation(key) for server in self._servers]
        except (ServerError, ValueError) as error:
            logger.warning("Which policy versions sampled an evaluation is unknown: %s", error)
            return None
        known = [(reply.oldest, reply.newest) for reply in replies if reply.oldest is not None]
        return (min(oldest for oldest, _ in known), max(newest for _, newest in known)) if known else None


def read_result(folder: Path) -> Result | None:
    """The result in the folder of an evaluation; `None` if it did not end."""
    try:
        content = json.loads((folder / RESULT).read_text())
    except FileNotFoundError:
        return None
    versions = content.pop("versions")
    return Result(**content, versions=versions and tuple(versions))


def results_of(folder: str | Path, step: int) -> list[Result]:
    """The results of an optimizer step below the output folder of a run, by name."""
    return [read_result(path.parent) for path in sorted(Path(folder, FOLDER).glob(f"*/step-{step:06d}/{RESULT}"))]


def _own_metrics(folder: Path) -> dict[str, float]:
    """What the environment's own `evaluate` has written by Atropos' `evaluate_log`."""
    path = folder / METRICS
    if not path.exists():
        what = f"its own `evaluate` left no {METRICS}"
        raise EvaluationError(what, fix="Have it call `evaluate_log`, or set `problems` to evaluate rollouts.")
    metrics: Iterable[tuple[str, Any]] = json.loads(path.read_text())["results"]["all"].items()
    return {name.removeprefix("eval/"): value for name, value in metrics if isinstance(value, int | float)}


def pass_at(k: int, num_samples: int, num_passed: int) -> float:
    """The probability that at least one of `k` samples passes, unbiased (Chen et al. 2021, "Evaluating Large Language
    Models Trained on Code", equation 1)."""
    return 1 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def measures(scores: Scores, passes_above: float, first: Scores | None = None) -> dict[str, float]:
    """The metrics of an evaluation by name. `first` are the scores of the run's first one, of the same problems."""
    passed = {problem: sum(one > passes_above for one in given) for problem, given in scores.items()}
    shares = {problem: count / len(scores[problem]) for problem, count in passed.items()}
    low, high = interval(list(shares.values()))
    found = {"pass@1": fmean(shares.values()), "pass@1_low": low, "pass@1_high": high}
    fewest = min(len(given) for given in scores.values())
    sizes = {2**power for power in range(1, fewest.bit_length())} | {fewest}
    for k in sorted(sizes - {1}):
        found[f"pass@{k}"] = fmean(pass_at(k, len(scores[problem]), count) for problem, count in passed.items())
    found[f"avg@{fewest}"] = fmean(fmean(given) for given in scores.values())
    both = shares.keys() & (first or {}).keys()
    if both:
        gains = [shares[problem] - fmean(one > passes_above for one in first[problem]) for problem in both]
        error = CONFIDENCE * _standard_error(gains)
        found |= {"gain": fmean(gains), "gain_low": fmean(gains) - error, "gain_high": fmean(gains) + error}
    return found


def interval(shares: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of a mean of shares, one per problem: Wilson's, for as many independent trials as would have
    the standard error that the problems have. So it has a width where all or none pass."""
    mean, error = fmean(shares), _standard_error(shares)
    trials = mean * (1 - mean) / error**2 if error else len(shares)
    z = CONFIDENCE**2 / trials
    middle, width = (mean + z / 2) / (1 + z), math.sqrt(z * mean * (1 - mean) + z**2 / 4) / (1 + z)
    return max(0.0, middle - width), min(1.0, middle + width)


def _standard_error(values: Sequence[float]) -> float:
    return math.sqrt(variance(values) / len(values)) if len(values) > 1 else 0.0
