"""What a run leaves behind: `summary.json`, a reward curve, and sample completions from its start and its end."""

import json
import os
import sys
from collections.abc import Iterable, Sequence

from tqdm.auto import tqdm
from transformers import ProgressCallback
from transformers.trainer_callback import CallbackHandler

from trl_atropos.metrics.timing import bottleneck
from trl_atropos.report.run_log import RunLog

WINDOW = 10  # batches whose mean is the reward at the start and at the end
CURVE = "reward_curve.png"


def write_summary(output_dir: str, log: RunLog, steps: int, probe_max_abs_diff: float | None, wall_s: float) -> dict:
    """Writes `summary.json` into `output_dir`. Returns what it holds."""
    rewards = log.rewards
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


def closing_lines(summary: dict, log: RunLog, decode, curve: str, replayed: bool) -> list[str]:
    """What a person reads at the end. `decode` turns token ids into text. Rows that are `replayed` were sampled by
    another policy, and say nothing of this training."""
    lines = [""]
    when = ("of the first batch", "of the last batch") if replayed else ("before training", "after training")
    for title, rows in zip(when, (log.first_rows, log.last_rows), strict=True):
        lines.append(f"Sample completions {title} (prompt -> completion, reward):")
        lines += [f"  {decode(row.prompt_ids)!r} -> {decode(row.completion_ids)!r}  {row.score:.3f}" for row in rows]
    lines.append(
        f"Mean reward: first {WINDOW} batches {summary['reward_first']:.3f}, "
        f"last {WINDOW} batches {summary['reward_last']:.3f}"
    )
    if (probe := summary["probe_max_abs_diff"]) is not None:
        lines.append(f"Largest probe difference: {probe:.1e} nats")
    return [*lines, f"Wall time: {summary['wall_s']:.0f} s", f"Reward curve: {curve}"]


# ---------------------------------------------------------------------------------------------------- while it goes on

# metric -> (label, format)
COLUMNS = {
    "reward": ("reward", "{:.3f}"),
    "reward_std": ("std", "{:.3f}"),
    "loss": ("loss", "{:+.4f}"),
    "grad_norm": ("grad", "{:.2f}"),
    "completions/mean_length": ("length", "{:.1f}"),
    "rollouts/staleness_mean": ("stale", "{:.1f}"),
    "health/dropped": ("dropped", "{:.0%}"),
    "time/wait_for_rollouts": ("wait", "{:.2f}s"),
    "time/publish": ("publish", "{:.3f}s"),
    "policy/probe_max_abs_diff": ("probe", "{:.1e}"),
}
SHOWN_ABOVE_ZERO = ("health/dropped",)
IN_BAR = ("reward", "rollouts/staleness_mean")
BAR = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"


class LineCallback(ProgressCallback):
    """Transformers' progress bar, with the metrics that matter here on one line in place of the whole dictionary."""

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            # `disable=None` is tqdm's word for: only on a terminal.
            self.training_bar = tqdm(total=state.max_steps, dynamic_ncols=True, disable=None, bar_format=BAR)
        self.current_step = 0

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or self.training_bar is None or "reward" not in (logs or {}):
            return
        self.training_bar.set_postfix_str(format_postfix(logs), refresh=False)
        self.training_bar.write(format_line(state.global_step, state.max_steps, logs))
        sys.stdout.flush()  # a file would get it only when there are pages of them
        if args.log_completions:
            self.training_bar.clear()  # TRL prints its table next, which would begin in the middle of the bar


def show_lines(handler: CallbackHandler) -> None:
    """Puts a `LineCallback` in the place of transformers' own bar, if there is one. A notebook keeps its table."""
    for index, callback in enumerate(handler.callbacks):
        if type(callback) is ProgressCallback:
            handler.callbacks[index] = LineCallback()


def format_line(step: int, max_steps: int, logs: dict[str, float]) -> str:
    """One line: the step, every column that was logged, and what the run waits for if that is one thing."""
    told = bottleneck(logs)
    cells = "  ".join(_cells(logs, COLUMNS))
    return f"step {step:>{len(str(max_steps))}}/{max_steps}  {cells}" + (f"  ({told})" if told else "")


def format_postfix(logs: dict[str, float]) -> str:
    """What stands behind the bar: the reward, the staleness, and the bottleneck without its share."""
    told = bottleneck(logs)
    return ", ".join([*_cells(logs, IN_BAR), *([told.partition(":")[0]] if told else [])])


def _cells(logs: dict[str, float], names: Iterable[str]) -> list[str]:
    shown = [name for name in names if logs.get(name) is not None and (logs[name] or name not in SHOWN_ABOVE_ZERO)]
    return [f"{COLUMNS[name][0]} {COLUMNS[name][1].format(float(logs[name]))}" for name in shown]
