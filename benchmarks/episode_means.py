"""Shows why a group's mean counts episodes, on a task that one parameter decides.

    python -m benchmarks.episode_means

An agent's episode succeeds by luck, in half of all cases. After a success, the agent may hand the
rest to four subagents, which are four further rows. It does so with the probability that it learns,
and its score does not depend on it: nothing is to be learned. With a mean over rows, episodes that
branch pull the mean towards their own score, so whoever branches gets a lower advantage than whoever
does not. The agent unlearns to branch. With a mean over episodes, it stays where it was.

Prints a table of the probability to branch, over seeds. It takes seconds.
"""

import argparse
import sys

import numpy as np

from trl_atropos.rollouts.rollout import normalised

SUBAGENTS = 4
GROUP = 8  # episodes
GROUPS = 32  # of a batch
LEARNING_RATE = 0.05
SHOWN = (0, 100, 200, 300, 400, 500)  # optimizer steps


def branching(steps: int, seed: int, *, mean_over_rows: bool) -> np.ndarray:
    """Returns the probability to branch before each step and after the last, `(steps + 1,)`."""
    rng = np.random.default_rng(seed)
    logit = 0.0
    probabilities = []
    for _ in range(steps):
        probability = _sigmoid(logit)
        probabilities.append(probability)
        scores = rng.integers(0, 2, (GROUPS, GROUP)).astype(np.float32)
        wants_to_branch = rng.random((GROUPS, GROUP)) < probability
        branches = wants_to_branch & (scores > 0)
        rows = 1 + SUBAGENTS * branches
        weights = rows if mean_over_rows else np.ones_like(rows)
        advantages = _advantages(scores, weights)
        # REINFORCE on the one decision, which is trained once in every episode
        gradient = advantages * (wants_to_branch - probability)
        logit += LEARNING_RATE * float(gradient.sum(axis=1).mean())
    return np.array([*probabilities, _sigmoid(logit)])


def _sigmoid(logit: float) -> float:
    return float(1 / (1 + np.exp(-logit)))


def _advantages(scores: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Returns GRPO's advantages, `(groups, n)`, if each episode counts `weights` times."""
    totals = weights.sum(axis=1)
    means = (weights * scores).sum(axis=1) / totals
    deviations = scores - means[:, None]
    variances = (weights * deviations**2).sum(axis=1) / (totals - 1)
    no = np.zeros(scores.size, bool)
    flat = normalised(
        scores.ravel(),
        np.repeat(means, scores.shape[1]),
        np.repeat(np.sqrt(variances), scores.shape[1]),
        raw=no,
        sft=no,
        zero=no,
    )
    return flat.reshape(scores.shape)


def table(seeds: int) -> list[str]:
    """Returns the lines of a Markdown table: the mean over seeds, and the lowest and the highest of
    them."""
    columns = " | ".join(f"step {step}" for step in SHOWN)
    lines = [f"| mean over | {columns} |", "|---" * (1 + len(SHOWN)) + "|"]
    for name, mean_over_rows in (("rows", True), ("episodes", False)):
        runs = []
        for seed in range(seeds):
            runs.append(branching(SHOWN[-1], seed, mean_over_rows=mean_over_rows))
        shown = np.array(runs)[:, SHOWN]  # (seeds, steps)
        cells = []
        for mean, lowest, highest in zip(shown.mean(0), shown.min(0), shown.max(0)):
            cells.append(f"{mean:.2f} ({lowest:.2f} to {highest:.2f})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=100)
    options = parser.parse_args()
    sys.stdout.write("\n".join(table(options.seeds)) + "\n")


if __name__ == "__main__":
    main()
