"""What a run leaves behind: `summary.json`, a reward curve, and sample completions from its start and its end."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from trl_atropos.rollouts.row import Row
from trl_atropos.rollouts.source import RolloutSource, RunInfo

WINDOW = 10  # batches whose mean is the reward at the start and at the end
NUM_SAMPLES = 3
CURVE = "reward_curve.png"


@dataclass
class RecordingSource:
    """A rollout source that notes what the trainer took from the one it wraps."""

    source: RolloutSource
    rewards: list[float] = field(default_factory=list)  # mean score of each batch
    first_rows: list[Row] = field(default_factory=list)
    last_rows: list[Row] = field(default_factory=list)

    def start(self, run: RunInfo) -> None:
        self.source.start(run)

    def poll(self, num_rows: int, timeout: float) -> list[Row] | None:
        rows = self.source.poll(num_rows, timeout)
        if rows is not None:
            self.rewards.append(sum(row.score for row in rows) / len(rows))
            self.last_rows = _spread(rows)
            self.first_rows = self.first_rows or self.last_rows
        return rows

    def metrics(self) -> dict[str, float]:
        return self.source.metrics()

    def diagnose(self) -> str:
        return self.source.diagnose()

    def state(self) -> dict:
        return self.source.state()

    def close(self) -> None:
        self.source.close()


def _spread(rows: Sequence[Row]) -> list[Row]:
    """A few rows from across the batch, so that they come from different groups."""
    stride = max(1, len(rows) // NUM_SAMPLES)
    return list(rows[::stride][:NUM_SAMPLES])


def write_summary(
    output_dir: str, recorded: RecordingSource, steps: int, probe_max_abs_diff: float | None, wall_s: float
) -> dict:
    """Writes `summary.json` into `output_dir`. Returns what it holds."""
    rewards = recorded.rewards
    summary = {
        "steps": steps,
        "reward_first": _mean(rewards[:WINDOW]),
        "reward_last": _mean(rewards[-WINDOW:]),
        "probe_max_abs_diff": probe_max_abs_diff,
        "wall_s": round(wall_s, 2),
        "rewards": [round(reward, 6) for reward in rewards],
    }
    with open(os.path.join(output_dir, "summary.json"), "w", encoding="utf-8") as file:
        json.dump(summary, file, indent=1)
    return summary


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def draw_reward_curve(output_dir: str, rewards: Sequence[float], steps: Sequence[int] | None = None) -> str:
    """Draws the reward of every batch, or of every log at the optimizer steps `steps`, with a running mean. Returns
    the PNG's path."""
    from matplotlib.figure import Figure

    window = min(WINDOW, max(1, len(rewards) // 10))
    running = [_mean(rewards[max(0, i + 1 - window) : i + 1]) for i in range(len(rewards))]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    at = steps or range(1, len(rewards) + 1)
    each = "batch" if steps is None else "log"
    axes.plot(at, rewards, color="#9db7d5", linewidth=1, label=f"each {each}")
    axes.plot(at, running, color="#1f4e79", linewidth=2, label=f"mean of {window}")
    axes.set(xlabel="generation batch" if steps is None else "optimizer step", ylabel="mean reward")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    path = os.path.join(output_dir, CURVE)
    figure.savefig(path, dpi=130)
    return path


def closing_lines(summary: dict, recorded: RecordingSource, decode, curve: str, replayed: bool) -> list[str]:
    """What a person reads at the end. `decode` turns token ids into text. Rows that are `replayed` were sampled by
    another policy, and say nothing of this training."""
    lines = [""]
    when = ("of the first batch", "of the last batch") if replayed else ("before training", "after training")
    for title, rows in zip(when, (recorded.first_rows, recorded.last_rows), strict=True):
        lines.append(f"Sample completions {title} (prompt -> completion, reward):")
        lines += [f"  {decode(row.prompt_ids)!r} -> {decode(row.completion_ids)!r}  {row.score:.3f}" for row in rows]
    lines.append(
        f"Mean reward: first {WINDOW} batches {summary['reward_first']:.3f}, "
        f"last {WINDOW} batches {summary['reward_last']:.3f}"
    )
    if (probe := summary["probe_max_abs_diff"]) is not None:
        lines.append(f"Largest probe difference: {probe:.1e} nats")
    return [*lines, f"Wall time: {summary['wall_s']:.0f} s", f"Reward curve: {curve}"]
