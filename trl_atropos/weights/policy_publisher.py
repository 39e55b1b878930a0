"""`PolicyPublisher`: what the trainer calls to give the servers its policy.

The trainer calls it on every rank: `load` and `attach` while it is built, `hold`, `begin` and
`close` around training. `begin` wraps `optimizer.step` itself, because callbacks and torch's step
hooks are skipped when a step raises. `publisher.py` has the publisher to vLLM servers.
"""

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from trl_atropos.metrics.timing import Stopwatch
from trl_atropos.modes import AdapterWay


def do_nothing() -> None:
    """Stands for a call that is not needed."""


class PolicyPublisher:
    """
    Counts versions and publishes nothing. `ServerPublisher` publishes.

    Attributes:
        policy_version (`int`): Version of the weights that the servers sample from. Every optimizer
            step makes a version.
        probe_max_abs_diff (`float`, *optional*): Largest difference between server and trainer in
            any probe, in nats (natural logarithm of a probability).
        stopwatch (`Stopwatch`): The trainer's. The publisher books all its time as `publish`,
            except the optimizer's step.
        on_pause (`Callable`): Called on every rank once in a publish, while the servers are paused.
            Requests that arrive then begin with the next version.
    """

    def __init__(self):
        self.policy_version = 0
        self.probe_max_abs_diff: float | None = None
        self.stopwatch = Stopwatch()
        self.on_pause: Callable[[], None] = do_nothing
        self._unwrap: Callable[[], None] = do_nothing
        self._metrics: dict[str, list[float]] = defaultdict(list)

    @property
    def adapter_way(self) -> AdapterWay:
        """The way in which an adapter reaches the servers."""
        return None

    @property
    def memory_is_opened(self) -> bool:
        """True if servers open GPU memory of this process."""
        return False

    @property
    def trainer_version(self) -> int:
        """Version of the trainer's weights. A batch that arrives now is trained at this version."""
        return self.policy_version

    def load(self, model: Any, args: Any, peft_config: Any = None) -> Any:
        """Returns the model to train. The trainer calls it with its own arguments before it is
        built."""
        return model

    def attach(self, trainer: Any) -> None:
        """Prepares publishing from `trainer`, an `AtroposGRPOTrainer` that has just been built."""

    def hold(self) -> None:
        """Stops sampling until `begin`, so that a checkpoint may be loaded into the weights."""

    def begin(self, optimizer: Any, first_version: int) -> None:
        """Publishes the weights that training starts with as `first_version`, and wraps
        `optimizer.step` to publish all that follow."""
        self.policy_version = first_version
        step = optimizer.step

        def counted(*args, **kwargs):
            result = step(*args, **kwargs)
            if optimizer.gradient_state.sync_gradients and not optimizer.step_was_skipped:
                self.policy_version += 1
            return result

        self._wrap_step(optimizer, counted)

    def let_servers_sleep(self) -> None:
        """Called when the trainer has a batch, and needs no samples before the next publish: the
        servers may sleep until then."""

    def judge_last_publish(self) -> None:
        """Raises on every rank if the last publish went wrong. Called before a backward pass, in
        which DeepSpeed changes the weights, and before this step's metrics are logged."""

    def before_step(self) -> None:
        """Called on every rank when all work before an optimizer step is queued on the device."""

    def replace(self, load: Callable[[], None]) -> None:
        """Calls `load`, which replaces the trainer's weights after the last step."""
        load()

    def close(self) -> None:
        """Ends publishing. Called on every way out, also after an error; may be called twice."""
        self._unwrap()
        self._unwrap = do_nothing
        self.on_pause = do_nothing

    def server_max_length(self) -> int | None:
        """Returns the longest rollout of the server, in tokens, or `None` if there is no server."""
        return None

    def why_silent(self) -> str:
        """Returns a description of servers that sample nothing, or `""`. Called on rank 0, from any
        thread, when no rollouts arrive."""
        return ""

    def pop_metrics(self) -> dict[str, float]:
        """Returns the mean of each metric since the last call."""
        means = {name: sum(values) / len(values) for name, values in self._metrics.items()}
        self._metrics.clear()
        return means

    def _wrap_step(self, optimizer: Any, wrapper: Callable[..., Any]) -> None:
        """Puts `wrapper` in place of `optimizer.step` until `close`."""
        step = optimizer.step

        def unwrap() -> None:
            optimizer.step = step

        # Keeps the mark by which torch's schedulers recognise a step that they count.
        optimizer.step = functools.update_wrapper(wrapper, step)
        self._unwrap = unwrap


class NullPublisher(PolicyPublisher):
    """Publishes nothing and counts versions, for a policy that nothing samples from (recorded
    rollouts, for example)."""
