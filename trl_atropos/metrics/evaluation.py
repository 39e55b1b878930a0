"""What an evaluation found: pass@k, the mean score, how sure both are, and the gain since the first evaluation.

All of them are means over problems. Their errors are computed over problems, too, because the samples of one problem
are alike (Miller 2024, "Adding Error Bars to Evals").
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, variance

CONFIDENCE = 1.96  # standard errors to either side: 95 %
Scores = Mapping[str, Sequence[float]]  # of every sample, by problem


def pass_at(k: int, num_samples: int, num_passed: int) -> float:
    """The probability that at least one of `k` samples passes, unbiased (Chen et al. 2021, "Evaluating Large Language
    Models Trained on Code", equation 1)."""
    return 1 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def measures(scores: Scores, passes_above: float, first: Scores | None = None) -> dict[str, float]:
    """The metrics of an evaluation by name. `first` are the scores of the run's first one, of the same problems."""
    if not scores:
        return {}
    passed = {problem: sum(one > passes_above for one in given) for problem, given in scores.items()}
    shares = {problem: count / len(scores[problem]) for problem, count in passed.items()}
    low, high = interval(list(shares.values()))
    found = {"pass@1": fmean(shares.values()), "pass@1_low": low, "pass@1_high": high}
    fewest = min(len(given) for given in scores.values())
    for k in _sizes(fewest):
        found[f"pass@{k}"] = fmean(pass_at(k, len(scores[problem]), count) for problem, count in passed.items())
    found[f"avg@{fewest}"] = fmean(fmean(given) for given in scores.values())
    both = shares.keys() & (first or {}).keys()
    if both:
        gains = [shares[problem] - fmean(one > passes_above for one in first[problem]) for problem in both]
        error = CONFIDENCE * _standard_error(gains)
        found |= {"gain": fmean(gains), "gain_low": fmean(gains) - error, "gain_high": fmean(gains) + error}
    return found


def _sizes(num_samples: int) -> Iterator[int]:
    """2, 4, 8 and so on, and the number of samples."""
    k = 2
    while k < num_samples:
        yield k
        k *= 2
    if num_samples > 1:
        yield num_samples


def interval(shares: Sequence[float]) -> tuple[float, float]:
    """
    The 95 % interval of a mean of shares, one per problem: Wilson's, for as many independent trials as would have the
    standard error that the problems have. So it has a width where all or none pass.
    """
    mean, error = fmean(shares), _standard_error(shares)
    trials = mean * (1 - mean) / error**2 if error else len(shares)
    z = CONFIDENCE**2 / trials
    middle, width = (mean + z / 2) / (1 + z), math.sqrt(z * mean * (1 - mean) + z**2 / 4) / (1 + z)
    return max(0.0, middle - width), min(1.0, middle + width)


def _standard_error(values: Sequence[float]) -> float:
    return math.sqrt(variance(values) / len(values)) if len(values) > 1 else 0.0
