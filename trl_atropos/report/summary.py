"""What a person reads of a run: a line per log while it goes on; `summary.json`, a curve and samples at its end."""

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


def draw_reward_curve(output_dir: str, rewards: Sequence[float], steps: Sequence[int] | None = None) -> None:
    """Draws the reward of every batch, or of every log at the optimizer steps `steps`, with a running mean."""
    from matplotlib.figure import Figure

    window = min(WINDOW, max(1, len(rewards) // 10))
    running = [_mean(rewards[max(0, i + 1 - window) : i + 1]) for i in range(len(rewards))]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    at = steps or range(1, len(rewards) + 1)
    each, unit = ("batch", "generation batch") if steps is None else ("log", "optimizer step")
    axes.plot(at, rewards, color="#9db7d5", linewidth=1, label=f"each {each}")
    axes.plot(at, running, color="#1f4e79", linewidth=2, label=f"mean of {window}")
    axes.set(xlabel=unit, ylabel="mean reward")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(os.path.join(output_dir, CURVE), dpi=130)


def closing_lines(summary: dict, log: RunLog, decode, curve: str, replayed: bool) -> list[str]:
    """
    What is printed at the end. `decode` turns token ids into text. Rollouts that are `replayed` were sampled by
    another policy, so they show nothing of this training.
    """
    lines = [""]
    when = ("of the first batch", "of the last batch") if replayed else ("before training", "after training")
    for title, rollouts in zip(when, (log.first_rollouts, log.last_rollouts), strict=True):
        lines.append(f"Sample completions {title} (prompt -> completion, reward):")
        lines += [
            f"  {decode(one.prompt_ids)!r} -> {decode(one.completion_ids)!r}  {one.score:.3f}" for one in rollouts
        ]
    lines.append(
        f"Mean reward: first {WINDOW} batches {summary['reward_first']:.3f}, "
        f"last {WINDOW} batches {summary['reward_last']:.3f}"
    )
    if (probe := summary["probe_max_abs_diff"]) is not None:  # between the log-probabilities of server and trainer
        lines.append(f"Largest probe difference: {probe:.1e} nats")
    return [*lines, f"Wall time: {summary['wall_s']:.0f} s", f"Reward curve: {curve}"]


# --------------------------------------------------------------------------------------------------- the progress line

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
            # `disable=None` shows the bar only on a terminal.
            self.training_bar = tqdm(total=state.max_steps, dynamic_ncols=True, disable=None, bar_format=BAR)
        self.current_step = 0

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or self.training_bar is None or "reward" not in (logs or {}):
            return
        self.training_bar.set_postfix_str(format_postfix(logs), refresh=False)
        self.training_bar.write(format_line(state.global_step, state.max_steps, logs))
        sys.stdout.flush()  # into a file, lines would go only by the page
        if args.log_completions:
            self.training_bar.clear()  # TRL prints its table next, which would begin in the middle of the bar


def show_lines(handler: CallbackHandler) -> None:
    """Puts a `LineCallback` in the place of Transformers' own bar, if there is one. A notebook keeps its table."""
    for index, callback in enumerate(handler.callbacks):
        if type(callback) is ProgressCallback:
            handler.callbacks[index] = LineCallback()


def format_line(step: int, max_steps: int, logs: dict[str, float]) -> str:
    """One line: the step, every column that was logged, and what the run waits for if that is one thing."""
    waits_for = bottleneck(logs)
    cells = "  ".join(_cells(logs, COLUMNS))
    return f"step {step:>{len(str(max_steps))}}/{max_steps}  {cells}" + (f"  ({waits_for})" if waits_for else "")


def format_postfix(logs: dict[str, float]) -> str:
    """What stands behind the bar: the reward, the staleness, and the bottleneck without its share."""
    waits_for = (bottleneck(logs) or "").partition(":")[0]
    return ", ".join([*_cells(logs, IN_BAR), *([waits_for] if waits_for else [])])


def _cells(logs: dict[str, float], names: Iterable[str]) -> list[str]:
    shown = [name for name in names if logs.get(name) is not None and (logs[name] or name not in SHOWN_ABOVE_ZERO)]
    return [f"{COLUMNS[name][0]} {COLUMNS[name][1].format(float(logs[name]))}" for name in shown]
