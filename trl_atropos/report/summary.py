"""Writes what is left of a run at its end: `summary.json`, the reward curve, and the last lines of
`trl_atropos.train`.

The run's log (`run_log.py`) and the results of its evaluations come in. `model_card.py` shows the
same curve and the same evaluations.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path

from trl_atropos.report.run_log import RunLog
from trl_atropos.rollouts.rollout import Rollout
from trl_atropos.rollouts.spool import write_file
from trl_atropos.services.evaluation_results import Result
from trl_atropos.terminal import columns, cut

# batches whose mean is the reward at the start and at the end, but no more than half of them
WINDOW = 10
CURVE = "reward_curve.png"
WIDTH_OF_FILE = 400  # characters of a sample, if stdout is no terminal


def write_summary(
    output_dir: str,
    log: RunLog,
    steps: int,
    probe_difference: float | None,
    wall_s: float,
    evaluations: Sequence[Result],
) -> dict:
    """Writes `summary.json` into `output_dir`. Returns its content."""
    results = []
    for result in evaluations:
        entry = {"name": result.name, "step": result.step}
        results.append(entry | result.metrics)
    window = _batches_of_mean(log.rewards)
    summary = {
        "steps": steps,
        "reward_first": _mean(log.rewards[:window]),
        "reward_last": _mean(log.rewards[-window:]),
        "probe_max_abs_diff": probe_difference,
        "wall_s": round(wall_s, 2),
        "evaluations": results,
        "rewards": [round(reward, 6) for reward in log.rewards],
    }
    content = json.dumps(summary, indent=1).encode()
    write_file(Path(output_dir, "summary.json"), content, sync=False)
    return summary


def _batches_of_mean(rewards: Sequence[float]) -> int:
    """Returns how many batches are the start of a run, and how many its end: 2 of 5, 10 of 300."""
    return max(1, min(WINDOW, len(rewards) // 2))


def _mean(values: Sequence[float]) -> float | None:
    if not values:
        return None
    return sum(values) / len(values)


def draw_reward_curve(
    output_dir: str, rewards: Sequence[float], steps: Sequence[int] | None = None
) -> None:
    """Draws the rewards and their running mean.

    `rewards` are those of every generation batch, or with `steps`, of the logs at these optimizer
    steps.
    """
    from matplotlib.figure import Figure

    label = "each log"
    unit = "optimizer step"
    if steps is None:
        steps = range(1, len(rewards) + 1)
        label = "each batch"
        unit = "generation batch"
    window = min(WINDOW, max(1, len(rewards) // 10))
    running = []
    for end in range(1, len(rewards) + 1):
        begin = max(0, end - window)
        running.append(_mean(rewards[begin:end]))
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, rewards, color="#9db7d5", linewidth=1, label=label)
    axes.plot(steps, running, color="#1f4e79", linewidth=2, label=f"mean of {window}")
    axes.set(xlabel=unit, ylabel="mean reward")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(Path(output_dir, CURVE), dpi=130)


def evaluation_lines(evaluations: Sequence[Result]) -> list[str]:
    """Returns a line for the first and for the last result of each evaluation.

    Both lines begin with the same measure: with the mean score, if any sample was graded.
    """
    by_name = defaultdict(list)
    for result in sorted(evaluations, key=attrgetter("step")):
        by_name[result.name].append(result)
    lines = []
    for results in by_name.values():
        graded = any(result.graded for result in results)
        lines.append(results[0].line(graded))
        if len(results) > 1:
            lines.append(results[-1].line(graded))
    return lines


def closing_lines(
    summary: dict,
    log: RunLog,
    decode: Callable[[Sequence[int]], str],
    curve: str,
    replayed: bool,
    evaluations: Sequence[Result],
) -> list[str]:
    """Returns the lines that end a run: samples, rewards, evaluations, and the path of the curve.

    `decode` turns token ids into text. If the run was resumed, its first samples, its rewards and
    its time count from that step, and the lines say so.
    """
    since = ""
    first_title = "before training"
    last_title = "after training"
    if log.resumed_at:
        since = f" since step {log.resumed_at}"
        first_title = f"at step {log.resumed_at}"
    if replayed:
        # Another policy sampled these rollouts, so they show nothing of this training.
        first_title = "of the first batch"
        last_title = "of the last batch"
    lines = [""]
    lines += _sample_lines(first_title, log.first_rollouts, decode)
    lines += _sample_lines(last_title, log.last_rollouts, decode)
    first = summary["reward_first"]
    last = summary["reward_last"]
    window = _batches_of_mean(log.rewards)
    batches = "batch" if window == 1 else f"{window} batches"
    lines.append(f"Mean reward{since}: first {batches} {first:.3f}, last {batches} {last:.3f}")
    for line in evaluation_lines(evaluations):
        lines.append(f"Evaluated {line}")
    # between the log-probabilities of server and trainer; None if no probe ran
    probe_difference = summary["probe_max_abs_diff"]
    if probe_difference is not None:
        lines.append(f"Largest probe difference: {probe_difference:.1e} nats")
    lines.append(f"Wall time{since}: {summary['wall_s']:.0f} s")
    lines.append(f"Reward curve: {curve}")
    return lines


def _sample_lines(
    title: str, rollouts: Sequence[Rollout], decode: Callable[[Sequence[int]], str]
) -> list[str]:
    """Returns one line per rollout below a title. In it, ` | ` stands before each branch. On a
    terminal, no line is wider than that."""
    lines = [f"Sample completions {title} (prompt -> completion, reward):"]
    width = columns() or WIDTH_OF_FILE
    room = width - len("   ->   0.000")
    for rollout in rollouts:
        prompt = repr(decode(rollout.prompt_ids))
        prompt = cut(prompt, room // 2)
        texts = [repr(decode(tokens)) for tokens in rollout.completion_parts]
        completion = cut(" | ".join(texts), room - len(prompt))
        lines.append(f"  {prompt} -> {completion}  {rollout.score:.3f}")
    return lines
