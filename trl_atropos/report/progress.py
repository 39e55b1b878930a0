"""Shows a run while it goes on: a line for every log, and below them a progress bar.

`AtroposGRPOTrainer` calls `show_lines` when it is built. From then on, the trainer's logs come in.
"""

import sys
from collections.abc import Iterable

from tqdm.auto import tqdm
from transformers import ProgressCallback
from transformers.trainer_callback import CallbackHandler

from trl_atropos.metrics.timing import bottleneck
from trl_atropos.terminal import columns, fitted

# metric -> (label, format), in the order of a line
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
    "speed/trained_tokens_per_second": ("tokens/s", "{:,.0f}"),
    "speed/mfu": ("MFU", "{:.1%}"),
}
HIDDEN_AT_ZERO = ("health/dropped",)
# columns that a terminal without room for all of them lacks
LEFT_OUT_FIRST = (
    "speed/mfu",
    "policy/probe_max_abs_diff",
    "time/publish",
    "grad_norm",
    "loss",
    "reward_std",
    "time/wait_for_rollouts",
    "rollouts/staleness_mean",
    "speed/trained_tokens_per_second",
    "completions/mean_length",
)
STAYS = 5  # logs in a row that have a bottleneck before it is news, so that noise is none
IN_BAR = ("reward", "rollouts/staleness_mean")
BAR = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"


def show_lines(handler: CallbackHandler) -> None:
    """Replaces Transformers' own bar by a `LineCallback`. A notebook keeps its table."""
    for place, callback in enumerate(handler.callbacks):
        if type(callback) is ProgressCallback:
            handler.callbacks[place] = LineCallback()


class LineCallback(ProgressCallback):
    """Transformers' progress bar, with our metrics on one line instead of the whole dictionary."""

    last_shown: str | None = None  # bottleneck; empty if the last news was that there is none
    previous = ""  # bottleneck in the previous log
    repeated = 0  # logs in a row that had it

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            # `disable=None` shows the bar only on a terminal.
            self.training_bar = tqdm(
                total=state.max_steps, dynamic_ncols=True, disable=None, bar_format=BAR
            )
        self.current_step = 0

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or self.training_bar is None:
            return
        if "reward" not in (logs or {}):
            return
        self.training_bar.set_postfix_str(format_postfix(logs), refresh=False)
        remark = self.changed_bottleneck(logs)
        line = format_line(state.global_step, state.max_steps, logs, remark, columns())
        self.training_bar.write(fitted(line, sys.stdout))
        sys.stdout.flush()  # Python writes to a file only by the page
        if args.log_completions:
            # TRL prints its table next, which would begin in the middle of the bar
            self.training_bar.clear()

    def changed_bottleneck(self, logs: dict[str, float]) -> str:
        """Returns the bottleneck if it is news, else an empty text.

        It is news when `STAYS` logs in a row have it.
        """
        text = bottleneck(logs) or ""
        kind = text.partition(":")[0]  # without its share of the step
        if kind != self.previous:
            self.previous = kind
            self.repeated = 0
        self.repeated += 1
        if self.repeated < STAYS or kind == (self.last_shown or ""):
            return ""
        self.last_shown = kind
        return text or "nothing takes half of the step any more"


def format_line(
    step: int, max_steps: int, logs: dict[str, float], remark: str = "", width: int | None = None
) -> str:
    """Returns one line: the step, every column that was logged, and a remark.

    If `width` characters are too few, columns are left out in the order of `LEFT_OUT_FIRST`, and
    the remark gets a line of its own.
    """
    if width is None:
        width = sys.maxsize
    digits = len(str(max_steps))
    start = f"step {step:>{digits}}/{max_steps}  "
    shown = list(COLUMNS)
    line = start + "  ".join(_cells(logs, shown))
    for name in LEFT_OUT_FIRST:
        if len(line) <= width:
            break
        shown.remove(name)
        line = start + "  ".join(_cells(logs, shown))
    if not remark:
        return line
    whole = f"{line}  ({remark})"
    if len(whole) <= width:
        return whole
    return f"{line}\n  ({remark})"


def format_postfix(logs: dict[str, float]) -> str:
    """Returns the text behind the bar: reward and staleness."""
    return ", ".join(_cells(logs, IN_BAR))


def _cells(logs: dict[str, float], names: Iterable[str]) -> list[str]:
    cells = []
    for name in names:
        value = logs.get(name)
        if value is None or (value == 0 and name in HIDDEN_AT_ZERO):
            continue
        label, value_format = COLUMNS[name]
        cells.append(f"{label} {value_format.format(float(value))}")
    return cells
