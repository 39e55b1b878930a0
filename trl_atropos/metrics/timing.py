"""Where the time of an optimizer step goes, and how many tokens it works off.

Every moment on this process belongs to exactly one part of the step.

`AtroposGRPOTrainer` and its publisher enter the parts; a part that is entered inside another
interrupts it. A step lasts from the end of one optimizer step to the end of the next. Work that is
queued on a GPU counts where it was queued: `settle` waits for it at the end of what computes, just
before TRL or Transformers would wait anyway.
"""

import contextlib
import time
from collections.abc import Iterator

import torch
from transformers import TrainerCallback

WAIT = "wait_for_rollouts"
INGEST = "ingest"  # rollouts to tensors: to the other ranks, padding, advantages, health
# clipping included; also of the reference policy, and of the old one if it is scored
COMPUTE = "forward_backward"
OPTIMIZER = "optimizer"
PUBLISH = "publish"  # pause, transfer, resume, probe
SAVE = "save"  # of a checkpoint; this and the next are parts of `other`, and logged by themselves
EVALUATE = "evaluate"  # begin an evaluation, and wait for it
OTHER = "other"

PARTS = (WAIT, INGEST, COMPUTE, OPTIMIZER, PUBLISH, OTHER)
DOMINATES = 0.5  # share of the step from which on a part is the bottleneck
# dense bfloat16, from the data sheets of the SXM parts
PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0}


class Stopwatch:
    """Attributes time to the innermost part that was entered; outside of all parts, to `rest`."""

    def __init__(self):
        self.start()

    def start(self) -> None:
        """The first step begins now."""
        self.rest = OTHER
        self._inside: list[str] = []
        self._spent = dict.fromkeys((*PARTS, SAVE, EVALUATE), 0.0)
        self._began = self._since = time.perf_counter()

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._attribute()
        self._inside.append(name)
        try:
            yield
        finally:
            self._attribute()
            self._inside.pop()

    def rest_is(self, name: str) -> None:
        """Until the end of the step, time outside of all parts belongs to `name`."""
        self._attribute()
        self.rest = name

    def lap(self) -> dict[str, float]:
        """Ends a step and begins the next. Returns the seconds of `step`, its `PARTS`, `save` and
        `evaluate`."""
        self._attribute()
        spent = self._spent
        step = self._since - self._began
        self._spent = dict.fromkeys(spent, 0.0)
        self.rest = OTHER
        self._began = self._since
        return spent | {OTHER: spent[OTHER] + spent[SAVE] + spent[EVALUATE], "step": step}

    def _attribute(self) -> None:
        now = time.perf_counter()
        self._spent[self._inside[-1] if self._inside else self.rest] += now - self._since
        self._since = now


class StepTimes(TrainerCallback):
    """Ends a step of the stopwatch with each optimizer step. Adds its parts to `metrics` as
    `time/NAME`, and as `speed/NAME` what `tokens` says of the batch at hand: how many tokens a step
    takes that were sampled, and how many it trains on, prompts included."""

    def __init__(self, stopwatch: Stopwatch, metrics: dict[str, list[float]]):
        self._stopwatch = stopwatch
        self._metrics = metrics
        self.tokens: dict[str, float] = {}
        # by all GPUs' peak in bfloat16, where it is known
        self.most_tokens_per_second: float | None = None

    def on_step_end(self, args, state, control, **kwargs):
        times = self._stopwatch.lap()
        for name, seconds in times.items():
            self._metrics[f"time/{name}"].append(seconds)
        for name, tokens in self.tokens.items():
            self._metrics[f"speed/{name}_tokens_per_second"].append(tokens / times["step"])
        if self.tokens and self.most_tokens_per_second is not None:
            self._metrics["speed/mfu"].append(
                self.tokens["trained"] / times["step"] / self.most_tokens_per_second
            )


def peak_flops(device: torch.device) -> float | None:
    """Operations per second of one device in bfloat16, if they are known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((1e12 * value for known, value in PEAK_TFLOPS.items() if known in name), None)


def flops_per_token(model: torch.nn.Module) -> float | None:
    """Of a forward and a backward pass through the weights: 6 per parameter, 4 if it is not
    trained. `None` for a mixture of experts, of which a token passes only some."""
    if any("expert" in name for name, _ in model.named_modules()):
        return None
    # DeepSpeed's shards know the size of the whole.
    sizes = [
        (getattr(one, "ds_numel", one.numel()), one.requires_grad) for one in model.parameters()
    ]
    return float(sum(number * (6 if trained else 4) for number, trained in sizes))


def settle(device: torch.device) -> None:
    """Waits for the work that is queued on the device."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def bottleneck(logs: dict[str, float]) -> str | None:
    """The part that takes at least half of the step, if one does, in words. `logs` has `time/NAME`
    in seconds."""
    if not (step := logs.get("time/step")):
        return None
    share = {name: logs[f"time/{name}"] / step for name in PARTS}
    evaluating = logs.get(f"time/{EVALUATE}", 0.0) / step
    shares = {
        "the environments cannot keep up: {} of the step is waiting": share[WAIT],
        "the trainer is the bottleneck: {} of the step is computing": share[COMPUTE]
        + share[OPTIMIZER],
        "publishing is the bottleneck: {} of the step": share[PUBLISH],
        "taking rollouts in is the bottleneck: {} of the step": share[INGEST],
        "saving, logging and callbacks are the bottleneck: {} of the step": share[OTHER]
        - evaluating,
        "training waits for evaluations: {} of the step": evaluating,
    }
    text, largest = max(shares.items(), key=lambda item: item[1])
    return text.format(f"{round(100 * largest)} %") if largest >= DOMINATES else None
