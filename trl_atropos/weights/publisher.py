"""`PolicyPublisher`: how a new policy reaches the sampler, as the trainer sees it.

The trainer calls `load` on its model, `attach` once it is built, and `hold`, `begin` and `close` around training, on
every rank. `begin` wraps `optimizer.step`. `fence.py` has the publisher for vLLM servers; this file the protocol, and
the publisher for nobody.
"""

import functools
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from trl_atropos.metrics.timing import Stopwatch


class PolicyPublisher(ABC):
    """
    Attributes:
        policy_version (`int`): Version of the weights that the server samples from: one per optimizer step.
        probe_max_abs_diff (`float`, *optional*): Largest difference that any probe has seen, in nats; `None` before
            the first one, and where there is none.
        stopwatch (`Stopwatch`): The trainer's. What a publisher does beyond the optimizer's step is to be in its part
            `publish`.
        on_pause (`Callable`): Called on every rank in a publish, once or twice, while the servers are paused: who asks
            them now begins with the next version.
    """

    def __init__(self):
        self.policy_version = 0
        self.probe_max_abs_diff: float | None = None
        self.stopwatch = Stopwatch()
        self.on_pause: Callable[[], None] = lambda: None
        self._unwrap: Callable[[], None] = lambda: None
        self._metrics: dict[str, list[float]] = defaultdict(list)

    @property
    def trainer_version(self) -> int:
        """Version of the weights that the trainer has: a batch that it is given now is trained at this one."""
        return self.policy_version

    def load(self, model: Any, args: Any, peft_config: Any = None) -> Any:
        """Called with the trainer's arguments before it is built. Returns the model that it shall use."""
        return model

    def attach(self, trainer: Any) -> None:  # noqa: B027 - not every mode has something to do
        """Called once the trainer is built. `trainer` is the `AtroposGRPOTrainer`."""

    def hold(self) -> None:  # noqa: B027
        """From here to `begin`, nothing may be sampled: a checkpoint may be loaded into the weights."""

    @abstractmethod
    def begin(self, optimizer: Any, policy_version: int) -> None:
        """Publishes the weights that training starts with, and wraps `optimizer.step` for all that follow."""

    def computing(self) -> None:  # noqa: B027
        """Called when the trainer has a batch and needs no samples before the next publish."""

    def close(self) -> None:
        """Ends what `begin` began. Called on every way out, also after an error; may be called twice."""
        self._unwrap()
        self._unwrap = self.on_pause = lambda: None

    def server_max_length(self) -> int | None:
        """Longest sequence of the server in tokens, or `None` if there is no server."""
        return None

    def why_silent(self) -> str:
        """What is wrong with servers that sample nothing now. Called on rank 0 where no rows come, from any thread."""
        return ""

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
