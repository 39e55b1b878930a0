"""How a new policy reaches the sampler: the life of a publish, written once for every mode.

    hold -> (a checkpoint may be loaded) -> begin -> [pause -> optimizer.step -> version + 1 -> resume -> probe]*

A `PolicyPublisher` is given to the trainer, which calls `load` on its model, `attach` once it is built, and `hold`,
`begin` and `close` around training. `begin` wraps `optimizer.step`, because only that is left on every path, also when
the step raises; callbacks and torch's step hooks would skip the resume.
"""

import functools
import logging
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from trl_atropos.signals import deferred

logger = logging.getLogger(__name__)


class PolicyPublisher(ABC):
    """
    Attributes:
        policy_version (`int`): Version of the weights that the server samples from: one per optimizer step.
        probe_max_abs_diff (`float`): Largest difference that any probe has seen, in nats.
    """

    def __init__(self):
        self.policy_version = 0
        self.probe_max_abs_diff = 0.0
        self._unwrap: Callable[[], None] = lambda: None
        self._metrics: dict[str, list[float]] = defaultdict(list)

    def load(self, model: Any, args: Any) -> Any:
        """Called with the trainer's `model` argument before the trainer is built. Returns what it shall use."""
        return model

    def attach(self, trainer: Any) -> None:  # noqa: B027 - not every mode has something to do
        """Called once the trainer is built. `trainer` is the `AtroposGRPOTrainer`."""

    def hold(self) -> None:  # noqa: B027
        """From here to `begin`, nothing may be sampled: a checkpoint may be loaded into the weights."""

    @abstractmethod
    def begin(self, optimizer: Any, policy_version: int) -> None:
        """Publishes the weights that training starts with, and wraps `optimizer.step` for all that follow."""

    def close(self) -> None:
        """Ends what `begin` began. Called on every way out, also after an error; may be called twice."""
        self._unwrap()
        self._unwrap = lambda: None

    def server_max_length(self) -> int | None:
        """Longest sequence of the server in tokens, or `None` if there is no server."""
        return None

    def pop_metrics(self) -> dict[str, float]:
        """Mean of each metric since the last call."""
        means = {name: sum(values) / len(values) for name, values in self._metrics.items()}
        self._metrics.clear()
        return means

    def _wrap_step(self, optimizer: Any, wrapper: Callable[..., Any]) -> None:
        """Puts `wrapper` in place of `optimizer.step` until `close`."""
        step = optimizer.step
        # Keeps the mark by which torch's schedulers know a step that they count.
        optimizer.step = functools.update_wrapper(wrapper, step)
        self._unwrap = lambda: setattr(optimizer, "step", step)

    def _note(self, name: str, value: float) -> None:
        self._metrics[name].append(value)


class NullPublisher(PolicyPublisher):
    """Nothing samples from this policy (recorded rollouts, say): counts versions and publishes nothing."""

    def begin(self, optimizer: Any, policy_version: int) -> None:
        self.policy_version = policy_version
        step = optimizer.step

        def counted(*args, **kwargs):
            result = step(*args, **kwargs)
            if optimizer.gradient_state.sync_gradients and not optimizer.step_was_skipped:
                self.policy_version += 1
            return result

        self._wrap_step(optimizer, counted)


class ServerPublisher(PolicyPublisher):
    """
    The fence around a step for every mode with a server. A mode says how to pause, resume, move the bytes and probe.

    Subclasses whose trainer writes into the server's own memory set `writes_in_place`: they are paused for the whole
    step, and a step that raises leaves the server to the lease (it takes its weights for torn).
    """

    writes_in_place = False

    def __init__(self):
        super().__init__()
        self._held = False

    @abstractmethod
    def pause(self) -> None: ...

    @abstractmethod
    def transfer(self) -> None:
        """Moves the new weights. Called while the server is paused."""

    @abstractmethod
    def resume(self, policy_version: int) -> None: ...

    @abstractmethod
    def probe(self) -> None:
        """Raises `ProbeError` if the server does not sample from the trainer's weights."""

    def hold(self) -> None:
        if self.writes_in_place:
            with deferred():
                self.pause()
                self._held = True

    def begin(self, optimizer: Any, policy_version: int) -> None:
        self._publish(lambda: None, policy_version)
        step = optimizer.step

        def fenced(*args, **kwargs):
            if not optimizer.gradient_state.sync_gradients:
                return step(*args, **kwargs)
            return self._publish(lambda: step(*args, **kwargs), self.policy_version + 1, optimizer)

        self._wrap_step(optimizer, fenced)

    def _publish(self, step: Callable[[], Any], next_version: int, optimizer: Any = None) -> Any:
        started = time.perf_counter()
        with deferred():  # Ctrl-C must leave no weights half written, nor a server paused that would take them for it
            if self.writes_in_place and not self._held:
                self.pause()
            paused = time.perf_counter()
            result = step()
            if optimizer is not None and optimizer.step_was_skipped:
                next_version = self.policy_version  # a gradient scaler found no finite gradient: nothing is new
            stepped = time.perf_counter()
            if not self.writes_in_place:
                self.pause()
            self.transfer()
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # the step is queued on the device; resume must not overtake it
            self.resume(next_version)
            self._held = False
        self.policy_version = next_version
        self._note("time/publish", time.perf_counter() - started - (stepped - paused))
        self.probe()
        return result
