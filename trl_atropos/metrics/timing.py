"""Measures where the time of an optimizer step goes, and how many tokens it processes.

Every moment on this process belongs to exactly one part of the step. `AtroposGRPOTrainer` and its
publisher enter the parts. A part that is entered inside another interrupts it. A step lasts from
the end of one optimizer step to the end of the next.

Work that is queued on a GPU counts where it was queued: `settle` waits for it at the end of each
computation, just before TRL or Transformers would wait anyway.
"""

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence

import torch
from transformers import TrainerCallback

from trl_atropos.activity import Activity, duration
from trl_atropos.metrics.flops import BatchFlops
from trl_atropos.rollouts.rollout import Rollout

WAIT = "wait_for_rollouts"
INGEST = "ingest"  # rollouts to tensors: to the other ranks, padding, advantages, health
# clipping included; also of the reference policy, and of the old one if it is scored
COMPUTE = "forward_backward"
OPTIMIZER = "optimizer"
PUBLISH = "publish"  # pause, transfer, resume, probe
# These two are parts of `other`, and logged by themselves.
SAVE = "save"  # of a checkpoint
EVALUATE = "evaluate"  # begin an evaluation, and wait for it
OTHER = "other"

PARTS = (WAIT, INGEST, COMPUTE, OPTIMIZER, PUBLISH, OTHER)
# what a step is said to do while it takes long; evaluations speak for themselves
DOING = {
    WAIT: "waiting for rollouts",
    INGEST: "preparing the batch",
    COMPUTE: "computing",
    OPTIMIZER: "in the optimizer's step",
    PUBLISH: "publishing the policy",
    SAVE: "saving a checkpoint",
    OTHER: "in logs and callbacks",
}
REMEMBERED = 16  # steps that say what is usual
UNUSUAL = 2.0  # times as long as the longest of these

DOMINATES = 0.5  # share of the step from which on a part is the bottleneck


class Stopwatch:
    """Attributes time to the innermost part that was entered; outside of all parts, to `rest`."""

    def __init__(self):
        self.start()

    def start(self) -> None:
        """Begins the first step."""
        self.rest = OTHER
        self._inside: list[str] = []  # the parts that were entered, the innermost last
        self._spent = dict.fromkeys((*PARTS, SAVE, EVALUATE), 0.0)  # seconds in this step
        self._began = time.perf_counter()
        self._since = self._began  # from when on time is not attributed yet

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._attribute()
        self._inside.append(name)
        try:
            yield
        finally:
            self._attribute()
            self._inside.pop()

    @property
    def current(self) -> str:
        """The part that time belongs to now. May be asked by any thread."""
        inside = self._inside.copy()
        return inside[-1] if inside else self.rest

    def rest_is(self, name: str) -> None:
        """Attributes time outside of all parts to `name`, until the end of the step."""
        self._attribute()
        self.rest = name

    def lap(self) -> dict[str, float]:
        """Ends a step and begins the next. Returns the seconds of `step`, its `PARTS`, `save` and
        `evaluate`."""
        self._attribute()
        times = self._spent
        times[OTHER] = times[OTHER] + times[SAVE] + times[EVALUATE]
        times["step"] = self._since - self._began
        self._spent = dict.fromkeys((*PARTS, SAVE, EVALUATE), 0.0)
        self.rest = OTHER
        self._began = self._since
        return times

    def _attribute(self) -> None:
        now = time.perf_counter()
        part = self._inside[-1] if self._inside else self.rest
        self._spent[part] += now - self._since
        self._since = now


class StepWatch(Activity):
    """
    Says what an optimizer step does that takes long: more than ten seconds, and twice as long as
    any of the last 16. The first step, in which kernels are compiled, says nothing of what is
    usual.

    Attributes:
        compiles: whether layers are compiled in the first step.
    """

    def __init__(self, stopwatch: Stopwatch):
        super().__init__("")
        self.compiles = False
        self._stopwatch = stopwatch
        self._step = 0
        self._is_first = True
        self._lately: deque[float] = deque(maxlen=REMEMBERED)  # seconds of steps

    def begin_at(self, step: int) -> None:
        """Begins with an optimizer step, counted from 1."""
        self._step = step
        self._is_first = True
        self._lately.clear()
        self.begin()

    def next_step(self, seconds: float) -> None:
        """Goes on to the next step, after one that took so many seconds."""
        if not self._is_first:
            self._lately.append(seconds)
        self._is_first = False
        self._step += 1
        self.restart()
        usual = max(self._lately, default=0.0)
        self.pacer.next = max(self.pacer.next, UNUSUAL * usual)

    def words(self, seconds: float) -> str:
        part = self._stopwatch.current
        if part == EVALUATE:
            self.restart()
            return ""
        doing = DOING[part]
        if part == COMPUTE and self._is_first and self.compiles:
            doing = "computing, and compiling the layers"
        return f"Step {self._step} has taken {duration(seconds)} so far: {doing}"

    def last_words(self, seconds: float) -> str:
        return ""


class StepTimes(TrainerCallback):
    """
    Ends a step of the stopwatch with each optimizer step. Adds its parts to `metrics` as
    `time/NAME`, and tokens per second as `speed/NAME`.

    Attributes:
        tokens: of a step on the batch at hand: `sampled` ones, and those that it has `trained` on,
            prompts included.
        flops: operations of such a step, by `metrics/flops.py`: those of the weights as `mfu`, and
            with attention as `mfu_with_attention`, if they are known.
        peak_flops: of all GPUs, per second in bfloat16, if it is known.
        batch_flops: of training the model on rollouts, if they are known.
        watch: says what a step does that takes long.
    """

    def __init__(self, stopwatch: Stopwatch, metrics: dict[str, list[float]]):
        self._stopwatch = stopwatch
        self._metrics = metrics
        self.tokens: dict[str, float] = {}
        self.flops: dict[str, float] = {}
        self.peak_flops: float | None = None
        self.batch_flops: BatchFlops | None = None
        self.watch = StepWatch(stopwatch)

    def flops_of(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Returns the operations of a pass over the rollouts, as far as they are known."""
        if self.batch_flops is None:
            return {}
        return self.batch_flops.of_rollouts(rollouts)

    def on_train_begin(self, args, state, control, **kwargs):
        self.watch.begin_at(state.global_step + 1)

    def on_train_end(self, args, state, control, **kwargs):
        self.watch.end()

    def on_optimizer_step(self, args, state, control, **kwargs):
        self._stopwatch.rest_is(OTHER)  # callbacks that end their step before this one

    def on_step_end(self, args, state, control, **kwargs):
        times = self._stopwatch.lap()
        self.watch.next_step(times["step"])
        for name, seconds in times.items():
            self._metrics[f"time/{name}"].append(seconds)
        step = times["step"]
        for name, tokens in self.tokens.items():
            speed = tokens / step
            self._metrics[f"speed/{name}_tokens_per_second"].append(speed)
        if self.peak_flops is None:
            return
        for name, flops in self.flops.items():
            self._metrics[f"speed/{name}"].append(flops / step / self.peak_flops)


def settle(device: torch.device) -> None:
    """Waits for the work that is queued on the device."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def bottleneck(logs: dict[str, float]) -> str | None:
    """Names the part that takes at least half of the step, if one does. `logs` has `time/NAME` in
    seconds."""
    step = logs.get("time/step")
    if not step:
        return None
    share = {name: logs[f"time/{name}"] / step for name in PARTS}
    computing = share[COMPUTE] + share[OPTIMIZER]
    evaluating = logs.get(f"time/{EVALUATE}", 0.0) / step
    other = share[OTHER] - evaluating
    shares = {
        "the environments cannot keep up: {} of the step is waiting": share[WAIT],
        "the trainer is the bottleneck: {} of the step is computing": computing,
        "publishing is the bottleneck: {} of the step": share[PUBLISH],
        "taking rollouts in is the bottleneck: {} of the step": share[INGEST],
        "saving, logging and callbacks are the bottleneck: {} of the step": other,
        "training waits for evaluations: {} of the step": evaluating,
    }
    text = max(shares, key=shares.__getitem__)
    if shares[text] < DOMINATES:
        return None
    return text.format(f"{round(100 * shares[text])} %")
