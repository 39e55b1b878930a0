"""Reads what an evaluation left behind, and computes its metrics.

`evaluations.py` runs the process of an evaluation. From the files that it leaves, this module makes
a `Result`, which the trainer logs and `report` shows.

The metrics (pass@k, the mean score, their 95 % intervals, the gain since the first evaluation) are
means over problems, and so are their errors, because the samples of one problem are alike (Miller
2024, "Adding Error Bars to Evals").

The files are somebody else's output: one that cannot be read raises `EvaluationError`.
"""

import hashlib
import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as short
from statistics import fmean, variance
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from trl_atropos.errors import EvaluationError
from trl_atropos.rollouts.episodes import join_rows
from trl_atropos.rollouts.wire import ScoredGroup, parse_group

logger = logging.getLogger(__name__)

FOLDER = "evaluations"  # below the output folder of a run
GROUPS = "groups.jsonl"  # what came of the problems, one line for each
METRICS = "metrics.json"  # what the environment's own `evaluate` found
RESULT = "result.json"

CONFIDENCE = 1.96  # standard errors to either side: 95 %
MEAN_SCORE = re.compile(r"avg@\d+")  # metric that is the mean score
Scores = Mapping[str, Sequence[float]]  # of every sample, by problem
Samples = Annotated[list[float], msgspec.Meta(min_length=1)]  # scores of one problem
Kind = TypeVar("Kind")


@dataclass
class Result:
    """
    Result of an evaluation at an optimizer step.

    Attributes:
        name: Name of the evaluation.
        step: Optimizer step.
        metrics: Values by name, such as `pass@1`.
        versions: Oldest and newest policy version that sampled for it; `None` if unknown.
        seconds: Time that the evaluation took.
        scores: Scores of all samples, by problem.
        passes_above: A sample with a higher score has passed. `None` if the environment's own
            `evaluate` ran.
        graded: Whether its scores, or those of an earlier evaluation, are not only 0 and 1. Their
            mean then says more than pass@1.
    """

    name: str
    step: int
    metrics: dict[str, float]
    versions: tuple[int, int] | None
    seconds: float
    scores: dict[str, Samples] = field(default_factory=dict)
    passes_above: float | None = None
    graded: bool = False

    @property
    def policy(self) -> str:
        """Policy that was evaluated, in words."""
        if self.versions is None:
            return "unknown policy versions"
        oldest, newest = self.versions
        if oldest == newest:
            return f"step {oldest}"
        return f"steps {oldest} to {newest}"

    def logs(self) -> dict[str, float]:
        """Returns the metrics by the names that Transformers knows them by, such as
        `eval_gsm8k_pass@1`."""
        values = dict(self.metrics)
        if self.versions is not None:
            values["oldest_version"], values["newest_version"] = self.versions
        values["seconds"] = self.seconds
        logs = {}
        for metric, value in values.items():
            logs[f"eval_{self.name}_{metric}"] = float(value)
        return logs

    def line(self, graded: bool | None = None) -> str:
        """Returns one line for a person. If `graded`, the mean score comes first; by default, if
        `self.graded`."""
        if graded is None:
            graded = self.graded
        if "pass@1" not in self.metrics:
            metrics = [f"{name} {value:.4g}" for name, value in self.metrics.items()]
            outcome = ", ".join(metrics)
        elif graded:
            outcome = self._mean_score_in_words()
        else:
            outcome = self._pass_rate_in_words()
        return f"{self.name}: {outcome} ({self.policy}, {self.seconds:.0f} s)"

    def _pass_rate_in_words(self) -> str:
        """Returns pass@1 and its gain. If all or none pass, it has no interval: the samples show
        no spread."""
        share = self.metrics["pass@1"]
        text = f"pass@1 {share:.3f}"
        if 0 < share < 1:
            text += self._interval("pass@1")
        return text + self._gain("gain")

    def _mean_score_in_words(self) -> str:
        """Returns the mean score and its gain, then how many pass."""
        name = next(filter(MEAN_SCORE.fullmatch, self.metrics))
        text = f"mean score {self.metrics[name]:.3f}"
        text += self._interval(name)
        text += self._gain("mean_gain")
        text += f"; pass@1 {self.metrics['pass@1']:.3f}"
        if self.passes_above is not None:
            text += f" (scores above {self.passes_above:g})"
        return text

    def _gain(self, name: str) -> str:
        if name not in self.metrics:
            return ""
        interval = self._interval(name, "+")
        return f", {self.metrics[name]:+.3f}{interval} since step 0"

    def _interval(self, name: str, sign: str = "") -> str:
        """Returns the 95 % interval of a metric, behind a space. Returns an empty text if all
        values are equal, so that the interval has no width."""
        low = self.metrics.get(f"{name}_low", 0.0)
        high = self.metrics.get(f"{name}_high", 0.0)
        if low >= high:
            return ""
        return f" [{low:{sign}.3f}, {high:{sign}.3f}]"


# ------------------------------------------------------------------------------------------ results


def read_result(folder: Path) -> Result | None:
    """Returns the result in the folder of an evaluation. Returns `None` if there is none, or, with
    a warning, if it cannot be read."""
    path = folder / RESULT
    try:
        return _parse(path.read_bytes(), Result)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be read (%s): this evaluation counts as not made.", path, error)
        return None


def results_of(folder: str | Path, step: int) -> list[Result]:
    """Returns the results of an optimizer step below the output folder of a run, by name."""
    results = []
    paths = Path(folder, FOLDER).glob(f"*/step-{step:06d}/{RESULT}")
    for path in sorted(paths):
        result = read_result(path.parent)
        if result is not None:
            results.append(result)
    return results


def _parse(content: bytes, kind: type[Kind]) -> Kind:
    """Returns JSON as an object of `kind`. Raises `ValueError` with what is wrong."""
    try:
        return msgspec.convert(json.loads(content), kind)
    except (RecursionError, msgspec.ValidationError) as error:
        raise ValueError(str(error)) from error


# ---------------------------------------------------------------------------- files of environments


@dataclass(frozen=True)
class Answer:
    """Outcome of one problem.

    Attributes:
        item: Number of the problem.
        groups: Scored groups; none if the environment returned nothing or raised an exception.
        failure: The exception and its place, in words.
    """

    item: int
    groups: list[ScoredGroup]
    failure: str | None


class _Group(msgspec.Struct):
    """Parts of a scored group that an evaluation needs, as the environment made them."""

    tokens: Any
    masks: Any
    scores: Any
    overrides: Any = None  # which rows are one episode


class _Line(msgspec.Struct):
    """One line of `GROUPS`, as `environment_site/groups.py` writes it: `groups` or an `error`."""

    item: int
    groups: list[_Group] | None = None
    error: str | None = None
    place: str = ""


class _Logged(msgspec.Struct):
    all: dict[str, Any]


class _OwnMetrics(msgspec.Struct):
    """Content of `METRICS`, as Atropos' `evaluate_log` writes it."""

    results: _Logged


def read_answers(path: Path) -> list[Answer]:
    """Returns one answer for each line of the file at `path`. Raises `EvaluationError` if a line is
    torn, or is not what `environment_site/groups.py` writes."""
    content = path.read_bytes() if path.exists() else b""
    answers = {}
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
    """Returns one answer. Raises `ValueError` with what is wrong."""
    content = _parse(line, _Line)
    if (content.groups is None) == (content.error is None):
        raise ValueError("it has neither `groups` nor `error`, or both")
    if content.groups is None:
        failure = f"{content.error} ({content.place})"
        return Answer(content.item, [], failure)
    groups = []
    for group in content.groups:
        fields = msgspec.structs.asdict(group)
        fields["overrides"] = _episodes(group)
        groups.append(join_rows(parse_group(fields)))
    return Answer(content.item, groups, None)


def _episodes(group: _Group) -> list[dict[str, str | int]] | None:
    """Returns the overrides that say which rows are one episode. An evaluation needs no others, and
    fails for nothing that is wrong in them."""
    if not isinstance(group.overrides, list) or not isinstance(group.scores, list):
        return None
    if len(group.overrides) != len(group.scores):
        return None
    episodes = []
    for overrides in group.overrides:
        name = None
        if isinstance(overrides, dict):
            name = overrides.get("episode")
        is_name = isinstance(name, str | int) and not isinstance(name, bool)
        episodes.append({"episode": name} if is_name else {})
    return episodes


def problem_key(item: int, number: int, group: ScoredGroup) -> str:
    """Returns the key of group `number` of a problem in `Result.scores`, such as `3.0-5f2a90c1`.
    The hash is that of the prompt: the tokens before the first sampled one."""
    prompt = group.tokens[0]
    trained = group.trained[0]
    if trained.any():
        prompt = prompt[: np.argmax(trained)]
    text = repr(prompt.tolist())
    digest = hashlib.blake2b(text.encode(), digest_size=4)
    return f"{item}.{number}-{digest.hexdigest()}"


def read_own_metrics(folder: Path) -> dict[str, float]:
    """Returns the numbers that the environment's own `evaluate` wrote by Atropos' `evaluate_log`.
    Raises `EvaluationError` if there are none."""
    path = folder / METRICS
    fix = "Have it call `evaluate_log`, or set `problems` to evaluate rollouts."
    if not path.exists():
        raise EvaluationError(f"its own `evaluate` left no {METRICS}", fix=fix)
    metrics = {}
    try:
        content = _parse(path.read_bytes(), _OwnMetrics)
        for name, value in content.results.all.items():
            if isinstance(value, int | float):
                metrics[name.removeprefix("eval/")] = float(value)
    except (ValueError, OverflowError) as error:
        what = f"{METRICS} of its own `evaluate` cannot be read: {error}"
        raise EvaluationError(what, fix=fix) from error
    if not metrics:
        raise EvaluationError(f"{METRICS} of its own `evaluate` has no number", fix=fix)
    return metrics


# ------------------------------------------------------------------------------------------ metrics


def measures(scores: Scores, passes_above: float, first: Scores | None = None) -> dict[str, float]:
    """Returns the metrics of an evaluation by name. `first` are the scores of the run's first
    evaluation, for the gain on the problems that both have."""
    fewest = min(len(samples) for samples in scores.values())
    passed = {}
    shares = {}
    means = {}
    for problem, samples in scores.items():
        passed[problem] = _count_passed(samples, passes_above)
        shares[problem] = passed[problem] / len(samples)
        means[problem] = fmean(samples)
    low, high = interval(list(shares.values()))
    metrics = {"pass@1": fmean(shares.values()), "pass@1_low": low, "pass@1_high": high}
    for k in _numbers_of_tries(fewest):
        chances = []
        for problem, samples in scores.items():
            chances.append(pass_at(k, len(samples), passed[problem]))
        metrics[f"pass@{k}"] = fmean(chances)
    metrics |= _with_interval(f"avg@{fewest}", list(means.values()))
    gains = []
    mean_gains = []
    for problem, samples in (first or {}).items():
        if problem in scores:
            first_share = _count_passed(samples, passes_above) / len(samples)
            gains.append(shares[problem] - first_share)
            mean_gains.append(means[problem] - fmean(samples))
    if gains:
        metrics |= _with_interval("gain", gains)
        metrics |= _with_interval("mean_gain", mean_gains)
    return metrics


def _count_passed(samples: Sequence[float], passes_above: float) -> int:
    return sum(score > passes_above for score in samples)


def _numbers_of_tries(fewest: int) -> list[int]:
    """Returns each k of pass@k besides 1: of 5 samples, they are 2, 4 and 5."""
    tries = {2**power for power in range(1, fewest.bit_length())}
    tries.add(fewest)
    tries.discard(1)
    return sorted(tries)


def pass_at(k: int, num_samples: int, num_passed: int) -> float:
    """Returns the probability that at least one of `k` samples passes, unbiased (Chen et al. 2021,
    "Evaluating Large Language Models Trained on Code", equation 1)."""
    draws_that_fail = math.comb(num_samples - num_passed, k)
    draws = math.comb(num_samples, k)
    return 1 - draws_that_fail / draws


def _with_interval(name: str, values: Sequence[float]) -> dict[str, float]:
    """Returns the mean of `values`, one per problem, as the metric `name`, and its 95 %
    interval."""
    mean = fmean(values)
    error = CONFIDENCE * _standard_error(values)
    low = mean - error
    high = mean + error
    return {name: mean, f"{name}_low": low, f"{name}_high": high}


def interval(shares: Sequence[float]) -> tuple[float, float]:
    """Returns the 95 % interval of a mean of shares, one per problem.

    It is Wilson's interval for as many independent trials as would have the standard error that
    the problems have. So it has a width even if all or none pass.

    For example, shares 1, 1, 0, 0 have the mean 0.5 and the standard error 0.29, as 3 trials have.
    Their interval is 0.13 to 0.87.
    """
    mean = fmean(shares)
    error = _standard_error(shares)
    trials = len(shares)
    if error:
        trials = mean * (1 - mean) / error**2
    z = CONFIDENCE**2 / trials
    middle = (mean + z / 2) / (1 + z)
    spread = z * mean * (1 - mean) + z**2 / 4
    width = math.sqrt(spread) / (1 + z)
    low = max(0.0, middle - width)
    high = min(1.0, middle + width)
    return low, high


def _standard_error(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    return math.sqrt(variance(values) / len(values))
