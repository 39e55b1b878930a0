"""What a person sees while a run goes on: a progress bar, and one line per logging step.

`AtroposGRPOTrainer` gives `show_lines` its callbacks. In a file, there are the lines alone.
"""

import sys
from collections.abc import Iterable

from tqdm.auto import tqdm
from transformers import ProgressCallback
from transformers.trainer_callback import CallbackHandler

from trl_atropos.timing import bottleneck

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
