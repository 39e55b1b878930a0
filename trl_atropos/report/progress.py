"""What a person sees while a run goes on: a progress bar, and one line per logging step."""

from transformers import ProgressCallback

# metric -> (label, format)
COLUMNS = {
    "reward": ("reward", "{:.3f}"),
    "reward_std": ("std", "{:.3f}"),
    "loss": ("loss", "{:+.4f}"),
    "grad_norm": ("grad", "{:.2f}"),
    "completions/mean_length": ("length", "{:.1f}"),
    "time/wait_for_rollouts": ("wait", "{:.2f}s"),
    "time/publish": ("publish", "{:.3f}s"),
    "policy/probe_max_abs_diff": ("probe", "{:.1e}"),
}


class LineCallback(ProgressCallback):
    """Transformers' progress bar, with the metrics that matter here on one line in place of the whole dictionary."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and self.training_bar is not None and "reward" in (logs or {}):
            self.training_bar.write(format_line(state.global_step, state.max_steps, logs))


def format_line(step: int, max_steps: int, logs: dict[str, float]) -> str:
    """One line: the step, then every column that was logged."""
    cells = [
        f"{label} {text.format(float(logs[name]))}"
        for name, (label, text) in COLUMNS.items()
        if logs.get(name) is not None
    ]
    return f"step {step:>{len(str(max_steps))}}/{max_steps}  " + "  ".join(cells)
