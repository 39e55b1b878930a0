"""Where a step's time goes: the parts add up to what a clock beside them measures, and each has
what it is to have.

Nothing here says that a part is short, which it is not on a busy machine. Either the stopwatch
reads a clock of the test's own, `ticking`, and what it says is exact, or each side is made to take
its time, and must have that: as a moment belongs to one part only, none has what the other must
have.
"""

import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import (
    TrainerCallback,
)

from tests.rollout_factory import (
    arguments,
    make_trainer,
    record,
    step_logs,
    uniform_batch,
)
from tests.rollouts.conftest import Api, restartable_api  # noqa: F401 - a fixture
from tests.weights import trainers
from trl_atropos import AtroposGRPOConfig, AtroposGRPOTrainer, ReplaySource
from trl_atropos.metrics import timing
from trl_atropos.metrics.flops import flops_per_token
from trl_atropos.metrics.timing import (
    COMPUTE,
    EVALUATE,
    INGEST,
    OPTIMIZER,
    OTHER,
    PARTS,
    PUBLISH,
    SAVE,
    WAIT,
    Stopwatch,
    bottleneck,
)
from trl_atropos.report.progress import STAYS, LineCallback
from trl_atropos.rollouts.source import AtroposSource
from trl_atropos.server_client import ServerClient
from trl_atropos.weights.probe import Probe
from trl_atropos.weights.publisher import NullPublisher, PolicyPublisher

PAUSE = 0.3  # seconds, that a part is made to take
PULLED_WITHIN = 30.0  # seconds
STEPS = 4
Sleep = Callable[[float], None]


@pytest.fixture
def ticking(monkeypatch) -> Sleep:
    """The stopwatch's clock stands still. Returns what moves it on, as a sleep of that many seconds
    would."""
    now = [0.0]

    def move_on(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return move_on


class Clock(TrainerCallback):
    """Looks at the time where a step ends."""

    def __init__(self):
        self.ends: list[float] = []

    def on_step_end(self, args, state, control, **kwargs):
        self.ends.append(time.perf_counter())


class Clocks:
    """
    One before all callbacks of a trainer and one behind them, the stopwatch's among them: steps as
    long as they see. However busy the machine is, the stopwatch looks at the time between the two.
    """

    def __init__(self, trainer: AtroposGRPOTrainer):
        self._before, self._behind = Clock(), Clock()
        trainer.callback_handler.callbacks.insert(0, self._before)
        trainer.add_callback(self._behind)

    def assert_between(self, seconds: float, first: int, last: int) -> None:
        """That from the end of step `first` to that of step `last`, counted from 0, it may be that
        many seconds."""
        least = self._before.ends[last] - self._behind.ends[first]
        most = self._behind.ends[last] - self._before.ends[first]
        assert least - 1e-6 <= seconds <= most + 1e-6  # floating-point sums


class SlowCallback(TrainerCallback):
    def __init__(self, sleep: Sleep = time.sleep):
        self._sleep = sleep

    def on_step_end(self, args, state, control, **kwargs):
        self._sleep(2 * PAUSE)

    def on_log(self, args, state, control, **kwargs):
        self._sleep(PAUSE)


class SlowClipping(TrainerCallback):
    def __init__(self, sleep: Sleep = time.sleep):
        self._sleep = sleep

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self._sleep(PAUSE)


class SlowSource(ReplaySource):
    """Has nothing when it is first asked, as a live source."""

    asked = 0

    def __init__(self, recording: str, sleep: Sleep):
        super().__init__(recording)
        self._sleep = sleep

    def poll(self, num_rows, timeout):
        self._sleep(PAUSE / 2)
        self.asked += 1
        return None if self.asked % 2 else super().poll(num_rows, timeout)


class SlowPublisher(PolicyPublisher):
    """As a publisher is written: what it does beyond the step is in the part `publish`."""

    def __init__(self, sleep: Sleep = time.sleep):
        super().__init__()
        self._sleep = sleep

    def begin(self, optimizer, policy_version):
        self.policy_version = policy_version
        step = optimizer.step

        def published(*args, **kwargs):
            with self.stopwatch.part(PUBLISH):
                self.on_pause()
                self._sleep(PAUSE / 2)
            result = step(*args, **kwargs)
            with self.stopwatch.part(PUBLISH):
                self._sleep(PAUSE / 2)
            self.policy_version += 1
            return result

        self._wrap_step(optimizer, published)


def batches(model: Path, number: int = STEPS, groups: int = 4) -> list:
    return [uniform_batch(model, 8, groups, seed) for seed in range(number)]


def parts(trainer: AtroposGRPOTrainer) -> list[dict[str, float]]:
    """Of each step, by name without `time/`."""
    return [
        {
            name.removeprefix("time/"): value
            for name, value in log.items()
            if name.startswith("time/")
        }
        for log in step_logs(trainer)
    ]


def medians(trainer: AtroposGRPOTrainer) -> dict[str, float]:
    """Of all steps but the first."""
    later = parts(trainer)[1:]
    return {name: statistics.median(step[name] for step in later) for name in later[0]}


@contextmanager
def slow_forward(trainer: AtroposGRPOTrainer, seconds: float, sleep: Sleep = time.sleep):
    """Each forward takes that much longer."""
    handle = trainer.model.register_forward_pre_hook(lambda *_: sleep(seconds))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def slow_optimizer(seconds: float, sleep: Sleep = time.sleep):
    """Each step of an optimizer takes that much longer, inside of all that a publisher wraps around
    it."""
    handle = register_optimizer_step_pre_hook(lambda *_: sleep(seconds))
    try:
        yield
    finally:
        handle.remove()


def assert_steps_are(trainer: AtroposGRPOTrainer, **seconds: float) -> None:
    """That each step but the first is made of just these parts, with a clock that stands still
    otherwise."""
    wanted = dict.fromkeys((*PARTS, SAVE), 0.0) | seconds | {"step": sum(seconds.values())}
    steps = parts(trainer)[1:]
    assert len(steps) == STEPS - 1
    for step in steps:
        assert {name: step[name] for name in wanted} == pytest.approx(wanted)


# ---------------------------------------------------------------------------------------- the speed


def test_tokens_of_step_are_counted_once(tiny_model, tmp_path):
    """Of two optimizer steps on each batch, in two rounds: a token is sampled once and trained on
    twice."""
    numbers = [
        [
            (len(row), sum(m != -100 for m in mask))
            for g in batch
            for row, mask in zip(g["tokens"], g["masks"])
        ]
        for batch in batches(tiny_model, 1, 4)
    ]
    settings = {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
    }
    trainer = make_trainer(
        tiny_model, tmp_path, *batches(tiny_model, 1, 4), num_iterations=2, max_steps=4, **settings
    )
    trainer._times.peak_flops = 1e6
    trainer.train()
    whole = sum(length for length, _ in numbers[0])
    sampled = sum(number for _, number in numbers[0])  # without holes in the mask
    for log in step_logs(trainer):
        worked_off = {
            name: log[f"speed/{name}_tokens_per_second"] * log["time/step"]
            for name in ("sampled", "trained")
        }
        assert worked_off["trained"] == pytest.approx(whole / 2)
        assert worked_off["sampled"] == pytest.approx(sampled / 4)
        weights = log["speed/trained_tokens_per_second"] * flops_per_token(trainer.model) / 1e6
        assert log["speed/mfu"] == pytest.approx(weights)
        assert log["speed/mfu_with_attention"] > log["speed/mfu"]


# ------------------------------------------------------------------------------------ the stopwatch


def test_nested_part_is_taken_out_of_outer_one(ticking):
    stopwatch = Stopwatch()
    with stopwatch.part(COMPUTE):
        ticking(2)
        with stopwatch.part(INGEST), stopwatch.part(WAIT):
            ticking(5)
        ticking(1)
    lap = stopwatch.lap()
    assert {name: seconds for name, seconds in lap.items() if seconds} == {
        COMPUTE: 3,
        WAIT: 5,
        "step": 8,
    }


def test_raising_part_is_left(ticking):
    stopwatch = Stopwatch()
    with pytest.raises(KeyError), stopwatch.part(COMPUTE):
        raise KeyError
    ticking(2)
    assert {name: seconds for name, seconds in stopwatch.lap().items() if seconds} == {
        OTHER: 2,
        "step": 2,
    }


def test_optimizer_gets_rest_only_until_step_ends(ticking):
    stopwatch = Stopwatch()
    stopwatch.rest_is(OPTIMIZER)
    ticking(2)
    assert stopwatch.lap()[OPTIMIZER] == 2
    ticking(3)
    lap = stopwatch.lap()
    assert lap[OPTIMIZER] == 0 and lap[OTHER] == 3


# -------------------------------------------------------------------------------------- the trainer


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 8},
        {
            "gradient_accumulation_steps": 4,
            "per_device_train_batch_size": 8,
            "steps_per_generation": 1,
        },
        {"steps_per_generation": 4, "per_device_train_batch_size": 8},
        {"num_iterations": 2, "beta": 0.1},
    ],
    ids=[
        "plain",
        "accumulated",
        "several batches a step",
        "several steps a batch",
        "iterations and a reference",
    ],
)
def test_parts_add_up_to_wall_time_of_step(tiny_model, tmp_path, settings):
    settings = {"per_device_train_batch_size": 32, "max_steps": STEPS} | settings
    trainer = make_trainer(tiny_model, tmp_path, *batches(tiny_model), **settings)
    clocks = Clocks(trainer)
    with slow_forward(trainer, 0.2):
        trainer.train()
    steps = parts(trainer)
    assert len(steps) == STEPS
    clocks.assert_between(sum(step[name] for step in steps[1:] for name in PARTS), 0, STEPS - 1)
    for index, step in enumerate(steps[1:]):
        assert sum(step[name] for name in PARTS) == pytest.approx(step["step"])
        clocks.assert_between(step["step"], index, index + 1)
        assert step[COMPUTE] >= 0.2


def test_parts_are_means_over_logged_steps(tiny_model, tmp_path):
    trainer = make_trainer(
        tiny_model,
        tmp_path,
        *batches(tiny_model, 3),
        callbacks=[SlowCallback()],
        per_device_train_batch_size=8,
        steps_per_generation=2,
        logging_steps=2,
        max_steps=6,
    )
    clocks = Clocks(trainer)
    trainer.train()
    logged = parts(trainer)
    assert len(logged) == 3
    for index in (1, 2):  # steps 3 and 4, 5 and 6
        clocks.assert_between(2 * logged[index]["step"], 2 * index - 1, 2 * index + 1)


def test_source_wait_counts_as_waiting_only(ticking, tiny_model, tmp_path):
    recording = record(tmp_path / "rollouts.jsonl", *batches(tiny_model))
    args = AtroposGRPOConfig(
        **arguments(
            tmp_path / "run",
            max_steps=STEPS,
            per_device_train_batch_size=32,
            replay_paths=[recording],
        )
    )
    trainer = AtroposGRPOTrainer(
        str(tiny_model), args, rollout_source=SlowSource(recording, ticking)
    )
    with slow_forward(trainer, PAUSE, ticking):
        trainer.train()
    assert_steps_are(trainer, **{WAIT: PAUSE, COMPUTE: PAUSE})


def test_publishing_is_not_counted_as_optimizer(ticking, tiny_model, tmp_path):
    recording = record(tmp_path / "rollouts.jsonl", *batches(tiny_model))
    args = AtroposGRPOConfig(
        **arguments(
            tmp_path / "run",
            max_steps=STEPS,
            per_device_train_batch_size=32,
            replay_paths=[recording],
        )
    )
    trainer = AtroposGRPOTrainer(str(tiny_model), args, policy_publisher=SlowPublisher(ticking))
    with slow_optimizer(2 * PAUSE, ticking):
        trainer.train()
    assert_steps_are(trainer, **{PUBLISH: PAUSE, OPTIMIZER: 2 * PAUSE})


def test_time_after_backward_counts_as_optimizer(ticking, tiny_model, tmp_path):
    trainer = make_trainer(
        tiny_model,
        tmp_path,
        *batches(tiny_model),
        callbacks=[SlowClipping(ticking), SlowCallback(ticking)],
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,
        max_steps=STEPS,
    )
    with slow_optimizer(2 * PAUSE, ticking), slow_forward(trainer, 1.0, ticking):
        trainer.train()
    assert_steps_are(trainer, **{COMPUTE: 4.0, OPTIMIZER: 3 * PAUSE, OTHER: 3 * PAUSE})


def test_old_policy_forward_counts_as_compute(ticking, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(AtroposGRPOTrainer, "_scores_first", True)
    trainer = make_trainer(
        tiny_model, tmp_path, *batches(tiny_model), per_device_train_batch_size=32, max_steps=STEPS
    )
    with slow_forward(trainer, PAUSE, ticking):
        trainer.train()
    # of the old policy, and of the one that is trained
    assert_steps_are(trainer, **{COMPUTE: 2 * PAUSE})


def test_saving_and_callbacks_count_as_other(tiny_model, tmp_path):
    trainer = make_trainer(
        tiny_model,
        tmp_path,
        *batches(tiny_model),
        callbacks=[SlowCallback()],
        per_device_train_batch_size=32,
        max_steps=STEPS,
        save_strategy="steps",
        save_steps=2,
    )
    trainer.train()
    steps = parts(trainer)
    # of the step before, which is logged after it has ended
    assert all(step[OTHER] > PAUSE for step in steps[1:])
    assert [step[SAVE] > 0 for step in steps] == [False, False, True, False]
    assert steps[2][OTHER] > PAUSE + steps[2][SAVE]


class Deliveries(TrainerCallback):
    """Gives the API a batch for the first step, and one more before the end of each; looks what is
    left of that."""

    def __init__(self, api: Api, model: Path, expected: list[int]):
        self.api, self.model, self.expected = api, model, expected
        self.left: list[int] = []  # groups

    def deliver(self) -> None:
        self.api.deliver(
            *[group | {"env_id": None} for group in uniform_batch(self.model, 8, 2, len(self.left))]
        )

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            self.deliver()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.deliver()

    def on_step_end(self, args, state, control, **kwargs):
        to_be_pulled = not self.expected[len(self.left)]
        # nobody polls in it
        deadline = time.monotonic() + (PULLED_WITHIN if to_be_pulled else 3 * PAUSE)
        while self.api.get("/status")["queue_size"] and time.monotonic() < deadline:
            time.sleep(0.02)
        self.left.append(self.api.get("/status")["queue_size"])


@pytest.mark.parametrize(
    ("publisher", "left"), [(SlowPublisher, [0, 0, 2]), (NullPublisher, [2, 2, 2])]
)
def test_next_batch_is_pulled_from_pause_on(
    restartable_api,  # noqa: F811
    tiny_model,
    tmp_path,
    publisher,
    left,
):
    deliveries = Deliveries(restartable_api, tiny_model, left)
    trainer = AtroposGRPOTrainer(
        str(tiny_model),
        AtroposGRPOConfig(
            **arguments(
                tmp_path,
                max_steps=3,
                per_device_train_batch_size=16,
                atropos_url=restartable_api.url,
            )
        ),
        rollout_source=AtroposSource(restartable_api.url),
        policy_publisher=publisher(),
        callbacks=[deliveries],
    )
    trainer.train()
    assert deliveries.left == left


def after_a_pause(function):
    """`function`, which begins `PAUSE` seconds after it is called."""

    def paused(*args):
        time.sleep(PAUSE)
        return function(*args)

    return paused


@pytest.mark.server
def test_fence_around_optimizer_counts_as_publishing(server, tiny_model, tmp_path, monkeypatch):
    recording = record(tmp_path / "rollouts.jsonl", *batches(tiny_model))
    publisher = trainers.make_publisher(server, tmp_path)
    monkeypatch.setattr(publisher.transfer, "send", after_a_pause(publisher.transfer.send))
    monkeypatch.setattr(Probe, "judge", after_a_pause(Probe.judge))
    trainer = trainers.make_trainer(
        publisher, recording, server.model, tmp_path / "run", learning_rate=0.0, max_steps=STEPS
    )
    with slow_optimizer(PAUSE):
        trainer.train()
    logs = medians(trainer)
    # Only lower bounds: a busy machine adds to each of them.
    assert logs[OPTIMIZER] >= PAUSE
    assert logs["probe"] >= PAUSE
    assert logs[PUBLISH] >= 2 * PAUSE  # sending and probing
    for step in parts(trainer):
        assert sum(step[name] for name in PARTS) == pytest.approx(step["step"])
    client = ServerClient(server.url, 30, server.token)  # other tests expect version 0
    client.hold_lease()
    client.pause()
    client.resume(0)
    client.release_lease()


# ----------------------------------------------------------------------------------- the bottleneck


def logged(**seconds: float) -> dict[str, float]:
    spent = dict.fromkeys(PARTS, 0.0) | seconds
    return {f"time/{name}": value for name, value in spent.items()} | {
        "time/step": sum(spent[part] for part in PARTS)
    }


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        ({WAIT: 6.1, COMPUTE: 3.9}, "the environments cannot keep up: 61 % of the step is waiting"),
        (
            {WAIT: 2, COMPUTE: 7, OPTIMIZER: 1},
            "the trainer is the bottleneck: 80 % of the step is computing",
        ),
        ({PUBLISH: 3, COMPUTE: 2}, "publishing is the bottleneck: 60 % of the step"),
        ({OTHER: 7, EVALUATE: 6, COMPUTE: 3}, "training waits for evaluations: 60 % of the step"),
        (
            {OTHER: 7, EVALUATE: 1, COMPUTE: 3},
            "saving, logging and callbacks are the bottleneck: 60 % of the step",
        ),
        ({INGEST: 3, COMPUTE: 2}, "taking rollouts in is the bottleneck: 60 % of the step"),
        (
            {OTHER: 3, COMPUTE: 2},
            "saving, logging and callbacks are the bottleneck: 60 % of the step",
        ),
        ({WAIT: 4.5, COMPUTE: 4.5, OTHER: 1}, None),
    ],
)
def test_bottleneck_is_named_from_half_of_step_on(seconds, text):
    assert bottleneck(logged(**seconds)) == text


def test_logs_without_step_name_no_bottleneck():
    assert bottleneck({"reward": 1.0}) is None


def test_bottleneck_is_told_once_after_it_has_stayed():
    waiting, computing = {WAIT: 6.1, COMPUTE: 3.9}, {WAIT: 3.9, COMPUTE: 6.1}
    neither = {WAIT: 4.0, COMPUTE: 4.0, PUBLISH: 2.0}
    lines = LineCallback()

    def told(*seen: dict[str, float]) -> list[str]:
        return [lines.changed_bottleneck(logged(**log)).partition(":")[0] for log in seen]

    quiet = [""] * (STAYS - 1)
    assert told(*[waiting] * STAYS) == [*quiet, "the environments cannot keep up"]
    assert told(*[waiting, computing] * 10, waiting) == [""] * 21
    assert told(*[computing] * STAYS) == [*quiet, "the trainer is the bottleneck"]
    assert told(*[computing] * 10, waiting, *[computing] * 10) == [""] * 21
    assert told(*[neither] * STAYS) == [*quiet, "nothing takes half of the step any more"]


def test_absent_bottleneck_is_no_news_at_first():
    lines = LineCallback()
    logs = logged(**{WAIT: 4.0, COMPUTE: 4.0, PUBLISH: 2.0})
    assert [lines.changed_bottleneck(logs) for _ in range(2 * STAYS)] == [""] * 2 * STAYS
