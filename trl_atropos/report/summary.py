"""What a person reads of a run: a line per log while it goes on; `summary.json`, a curve and
samples at its end; the model card, and which files of the run go to the Hub with it."""

import json
import logging
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard
from tqdm.auto import tqdm
from transformers import ProgressCallback, TrainerState
from transformers.trainer_callback import CallbackHandler
from transformers.utils import hf_api

from trl_atropos.config import AtroposGRPOConfig
from trl_atropos.errors import PushError
from trl_atropos.logging import columns, cut
from trl_atropos.metrics.timing import bottleneck
from trl_atropos.report.run_log import SECRET, RunLog, changed, portable, portable_value, versions
from trl_atropos.rollouts.spool import write_file
from trl_atropos.services.evaluation_results import Result

logger = logging.getLogger(__name__)

WINDOW = 10  # batches whose mean is the reward at the start and at the end
CURVE = "reward_curve.png"


def write_summary(
    output_dir: str,
    log: RunLog,
    steps: int,
    probed: float | None,
    wall_s: float,
    evaluations: Sequence[Result],
) -> dict:
    """Writes `summary.json` into `output_dir`. Returns what it holds."""
    rewards = log.rewards
    summary = {
        "steps": steps,
        "reward_first": _mean(rewards[:WINDOW]),
        "reward_last": _mean(rewards[-WINDOW:]),
        "probe_max_abs_diff": probed,
        "wall_s": round(wall_s, 2),
        "evaluations": [{"name": one.name, "step": one.step, **one.metrics} for one in evaluations],
        "rewards": [round(reward, 6) for reward in rewards],
    }
    write_file(Path(output_dir, "summary.json"), json.dumps(summary, indent=1).encode(), sync=False)
    return summary


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def draw_reward_curve(
    output_dir: str, rewards: Sequence[float], steps: Sequence[int] | None = None
) -> None:
    """Draws the reward of every batch, or of every log at the optimizer steps `steps`, with a
    running mean."""
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
    figure.savefig(Path(output_dir, CURVE), dpi=130)


def first_and_last(evaluations: Sequence[Result]) -> list[Result]:
    """The first and the last result of each evaluation, in which order they are in."""
    found: dict[str, list[Result]] = {}
    for result in sorted(evaluations, key=lambda one: one.step):
        found[result.name] = [*found.get(result.name, [])[:1], result]
    return [result for results in found.values() for result in results]


def evaluation_lines(evaluations: Sequence[Result]) -> list[str]:
    """A line for the first and the last result of each evaluation, with the same measure first in
    both."""
    graded = {result.name for result in evaluations if result.graded}
    return [result.line(result.name in graded) for result in first_and_last(evaluations)]


def closing_lines(
    summary: dict, log: RunLog, decode, curve: str, replayed: bool, evaluations: Sequence[Result]
) -> list[str]:
    """What is printed at the end. `decode` turns token ids into text. Rollouts that are `replayed`
    were sampled by another policy, so they show nothing of this training. Of a run that was
    resumed, it is said that the first ones and the time are those since then. On a terminal, each
    is one line of its width."""
    lines = [""]
    room = (columns() or 400) - len("  '' -> ''  0.000")
    since = f" since step {log.resumed_at}" if log.resumed_at else ""
    when = ("before training", "after training")
    if replayed:
        when = ("of the first batch", "of the last batch")
    elif log.resumed_at:
        when = (f"at step {log.resumed_at}", "after training")
    for title, rollouts in zip(when, (log.first_rollouts, log.last_rollouts), strict=True):
        lines.append(f"Sample completions {title} (prompt -> completion, reward):")
        for one in rollouts:
            prompt = cut(repr(decode(one.prompt_ids)), room // 2)
            completion = cut(repr(decode(one.completion_ids)), room + 4 - len(prompt))
            lines.append(f"  {prompt} -> {completion}  {one.score:.3f}")
    first = summary["reward_first"]
    last = summary["reward_last"]
    lines.append(
        f"Mean reward{since}: first {WINDOW} batches {first:.3f}, last {WINDOW} batches {last:.3f}"
    )
    lines += [f"Evaluated {line}" for line in evaluation_lines(evaluations)]
    # between the log-probabilities of server and trainer
    if (probe := summary["probe_max_abs_diff"]) is not None:
        lines.append(f"Largest probe difference: {probe:.1e} nats")
    return [*lines, f"Wall time{since}: {summary['wall_s']:.0f} s", f"Reward curve: {curve}"]


# -------------------------------------------------------------------------------- the progress line

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
    "speed/trained_tokens_per_second": ("tokens/s", "{:,.0f}"),
    "speed/mfu": ("MFU", "{:.1%}"),
}
SHOWN_ABOVE_ZERO = ("health/dropped",)
LEFT_OUT_FIRST = (
    "speed/mfu",
    "policy/probe_max_abs_diff",
    "time/publish",
    "grad_norm",
    "loss",
    "reward_std",
)
LEFT_OUT_FIRST += (
    "time/wait_for_rollouts",
    "rollouts/staleness_mean",
    "speed/trained_tokens_per_second",
)
LEFT_OUT_FIRST += ("completions/mean_length",)  # where a terminal has no room for all
IN_BAR = ("reward", "rollouts/staleness_mean")
BAR = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"


class LineCallback(ProgressCallback):
    """Transformers' progress bar, with the metrics that matter here on one line in place of the
    whole dictionary."""

    said: str | None = None  # the bottleneck that was told last; empty if there was none any more
    before = ""  # that of the last log

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            # `disable=None` shows the bar only on a terminal.
            self.training_bar = tqdm(
                total=state.max_steps, dynamic_ncols=True, disable=None, bar_format=BAR
            )
        self.current_step = 0

    def on_log(self, args, state, control, logs=None, **kwargs):
        if (
            not state.is_world_process_zero
            or self.training_bar is None
            or "reward" not in (logs or {})
        ):
            return
        self.training_bar.set_postfix_str(format_postfix(logs), refresh=False)
        self.training_bar.write(
            format_line(state.global_step, state.max_steps, logs, self._news(logs), columns())
        )
        sys.stdout.flush()  # into a file, lines would go only by the page
        if args.log_completions:
            # TRL prints its table next, which would begin in the middle of the bar
            self.training_bar.clear()

    def _news(self, logs: dict[str, float]) -> str:
        """The bottleneck, if it has changed and was the same in the last log, too; at first, at
        once."""
        told = bottleneck(logs) or ""
        kind = told.partition(":")[0]
        before = self.before
        self.before = told.partition(":")[0]
        if kind == (self.said or "") or (self.said is not None and kind != before):
            return ""
        self.said = kind
        return told or "nothing takes half of the step any more"


def show_lines(handler: CallbackHandler) -> None:
    """Puts a `LineCallback` in the place of Transformers' own bar, if there is one. A notebook
    keeps its table."""
    handler.callbacks = [
        LineCallback() if type(one) is ProgressCallback else one for one in handler.callbacks
    ]


def format_line(
    step: int, max_steps: int, logs: dict[str, float], news: str = "", width: int | None = None
) -> str:
    """One line: the step, and every column that was logged. Where `width` characters are too few,
    the columns of `LEFT_OUT_FIRST` are left out as needed, and `news` gets a line of its own."""
    shown = list(COLUMNS)
    line = ""
    for name in (None, *LEFT_OUT_FIRST):
        shown = [column for column in shown if column != name]
        line = f"step {step:>{len(str(max_steps))}}/{max_steps}  {'  '.join(_cells(logs, shown))}"
        if width is None or len(line) <= width:
            break
    if not news:
        return line
    fits = width is None or len(line) + len(news) + 4 <= width
    return f"{line}  ({news})" if fits else f"{line}\n  ({news})"


def format_postfix(logs: dict[str, float]) -> str:
    """What stands behind the bar: the reward, the staleness, and the bottleneck without its
    share."""
    waits_for = (bottleneck(logs) or "").partition(":")[0]
    return ", ".join([*_cells(logs, IN_BAR), *([waits_for] if waits_for else [])])


def _cells(logs: dict[str, float], names: Iterable[str]) -> list[str]:
    shown = [
        name
        for name in names
        if logs.get(name) is not None and (logs[name] or name not in SHOWN_ABOVE_ZERO)
    ]
    return [f"{COLUMNS[name][0]} {COLUMNS[name][1].format(float(logs[name]))}" for name in shown]


# ----------------------------------------------------------------------------------- the model card

# Settings that say where a run was, or that transformers sets by itself.
LEFT_OUT = re.compile(
    r"output_dir|logging_dir|atropos_url|vllm_server_(base_url|host|port)|accelerator_config|debug"
)


def complete_card(
    args: AtroposGRPOConfig,
    state: TrainerState,
    base: str,
    adapters: list,
    commands: Mapping[str, str],
    evaluations: Sequence[Result],
    draw: bool,
) -> None:
    """Completes the card that TRL has just written in `output_dir`, and draws the reward curve
    beside it. `base` is the model that the run began with, `adapters` are PEFT's configurations,
    `commands` those of the environments by name."""
    folder = Path(args.output_dir)
    card = ModelCard.load(folder / "README.md")
    card.data.pipeline_tag = "text-generation"
    if adapters:
        card.data.library_name = "peft"
    # What TRL's template says of a model that is not on the Hub.
    text = card.text.replace("[None](https://huggingface.co/None)", f"`{portable(base)}`")
    text = text.replace('model="None"', f'model="{portable(args.output_dir)}"')
    logs = [entry for entry in state.log_history if "reward" in entry]
    rewards = [entry["reward"] for entry in logs]
    if len(rewards) > 1 and draw:
        draw_reward_curve(args.output_dir, rewards, [entry["step"] for entry in logs])
    source = (
        "rollouts of Atropos environments" if args.replay_paths is None else "recorded rollouts"
    )
    run = portable(args.run_name or folder.name)
    steps = f"{state.global_step} of {args.max_steps} steps"
    parts = [
        f"## Atropos run\n\nTrained on {source}, run `{run}`, {steps}, "
        f"{datetime.now(UTC):%Y-%m-%d}."
    ]
    if rewards:
        parts.append(
            f"Mean reward at the first log: {rewards[0]:.3f}, at the last: {rewards[-1]:.3f}."
        )
    if len(rewards) > 1 and (folder / CURVE).exists():
        parts.append(f"![Mean reward by optimizer step]({CURVE})")
    if evaluations:
        parts += [
            "### Evaluation",
            "\n".join(f"- {line}" for line in evaluation_lines(evaluations)),
        ]
    parts += ["### Environments"] * bool(commands)
    for name, command in commands.items():
        parts.append(f"`{name}`:\n\n```bash\n{portable(' '.join(command.split()))}\n```")
    parts += ["### Settings", _settings(args, base, adapters), "### Versions"]
    parts.append("\n".join(f"- {name}: {version}" for name, version in versions().items()))
    before, heading, after = text.partition("## Citations")  # of TRL's template
    card.text = "\n\n".join([before.rstrip("\n"), *parts, heading + after])
    card.save(folder / "README.md")


def _settings(args: AtroposGRPOConfig, base: str, adapters: Sequence[Any]) -> str:
    """The settings that differ from their defaults, as YAML."""
    settings: dict[str, Any] = {"model_name_or_path": portable(base)} | _differing(args)
    if adapters:
        settings["adapters"] = [
            {"peft_type": portable_value(one.peft_type)} | _differing(one) for one in adapters
        ]
    dumped = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True, width=1000)
    title = "Every setting that differs from its default"
    return f"<details><summary>{title}</summary>\n\n```yaml\n{dumped}```\n\n</details>"


def _differing(settings: Any) -> dict[str, Any]:
    names = [
        name
        for name in changed(settings)
        if not LEFT_OUT.fullmatch(name) and not SECRET.search(name)
    ]
    values = {name: portable_value(getattr(settings, name)) for name in names}
    # transformers' form of `None`
    return {name: value for name, value in values.items() if value not in ([], {})}


# ----------------------------------------------------------------------------- what goes to the Hub

# `ignore_patterns` of `HfApi.upload_folder`. The card says what `training_args.bin` does. `runs`
# are TensorBoard's, which hold every setting as it was, and are written to during an upload.
KEPT_HERE = [
    "rollouts/*",
    "completions/*",
    "logs/*",
    "environments/*",
    "evaluations/*",
    "eval/*",
    "adapters/*",
]
KEPT_HERE += [
    "policies/*",
    "try/*",
    "runs/*",
    "rollouts-before-*",
    "rollouts.jsonl",
    "run_log.jsonl",
    ".run.lock",
]
KEPT_HERE += ["report.html", "training_args.bin", "checkpoints-before-*", ".run.json"]


@contextmanager
def model_only() -> Iterator[None]:
    """Within, Transformers uploads nothing of `KEPT_HERE`, and a failure of an upload in the
    background is logged. (With a `.gitignore`, the Hub would still be sent the names and the first
    bytes of these files.)"""
    api = hf_api()
    upload = api.upload_folder

    def upload_model(**kwargs: Any) -> Any:
        kwargs["ignore_patterns"] = [*(kwargs.get("ignore_patterns") or []), *KEPT_HERE]
        try:
            started = upload(**kwargs)
        # of the Hub, of the network, of the token: what is saved is the same
        except Exception as error:
            what = (
                f"The model is saved in {kwargs['folder_path']}, but its push to the Hub as "
                f"{kwargs['repo_id']}"
            )
            fix = (
                "Correct what it says, and push again with `trainer.push_to_hub()` or `hf upload`."
            )
            raise PushError(f"{what} failed ({_short(error)})", fix=fix) from error
        if isinstance(started, Future):
            started.add_done_callback(_warn_of_failure)
        return started

    api.upload_folder = upload_model
    try:
        yield
    finally:
        del api.upload_folder


@contextmanager
def repository_made(args: Any) -> Iterator[str]:
    """Gives the name of the run's repository on the Hub, which is made within. `args` are
    `TrainingArguments`."""
    name = args.hub_model_id or Path(args.output_dir).absolute().name
    try:
        yield name
    # of the Hub, of the network, of the token: what is saved is the same
    except Exception as error:
        what = (
            f"The Hub did not take or confirm the repository {name} for `push_to_hub` "
            f"({_short(error)})"
        )
        fix = (
            "Correct what it says (the network, HF_HUB_OFFLINE, `hub_token`, `hub_model_id`), or "
            "train with "
        )
        fix += "`push_to_hub: false` and upload the model later with `hf upload`."
        raise PushError(f"{what}. What {args.output_dir} holds is whole", fix=fix) from error


def make_repository(args: Any) -> None:
    """Does what the trainer does when it is built. Raises `PushError` before anything that takes
    long has begun."""
    with repository_made(args) as name:
        hf_api().create_repo(
            name, token=args.hub_token, private=args.hub_private_repo, exist_ok=True
        )


def _warn_of_failure(push: Future) -> None:
    """Nobody else asks how an upload in the background has ended."""
    if not push.cancelled() and (error := push.exception()) is not None:
        text = (
            "A push to the Hub failed (%s). What is saved is whole, and the next save pushes again."
        )
        logger.warning(text, _short(error))


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
