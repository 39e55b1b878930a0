"""What takes long is said: after ten seconds, by its innermost name, and never in the middle of a
bar."""

import gc
import logging
import re
import sys
import threading
import time
from collections.abc import Callable

import pytest
from tqdm.auto import tqdm

from tests.report.test_progress import terminal
from tests.rollout_factory import make_trainer, uniform_batch
from trl_atropos import activity as module
from trl_atropos.activity import Pacer, activity, duration, importing, written
from trl_atropos.logging import (
    ACTIVITY,
    disable_propagation,
    enable_propagation,
    set_verbosity,
    speak,
)
from trl_atropos.metrics.timing import COMPUTE, EVALUATE, WAIT, StepWatch, Stopwatch

SOON = 0.05  # seconds, in place of ten


@pytest.fixture
def spoken(monkeypatch, caplog) -> Callable[[], list[str]]:
    """Returns what was said so far. Something is long soon."""
    monkeypatch.setattr(module, "FIRST_MESSAGE", SOON)
    monkeypatch.delenv("COLUMNS", raising=False)
    caplog.set_level("INFO", "trl_atropos")

    def messages() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == ACTIVITY]

    return messages


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_messages_come_ever_more_rarely():
    pacer = Pacer()
    due = [seconds for seconds in range(1300) if pacer.is_due(seconds)]
    assert due == [10, 20, 40, 80, 160, 320, 620, 920, 1220]


def test_long_activity_is_said_with_its_time_and_short_one_is_not(spoken):
    with activity("Blinking"):
        pass
    with activity("Loading the model"):
        wait_until(lambda: len(spoken()) == 2)
    assert spoken() == ["Loading the model: 0 s"] * 2 + ["Loading the model took 0 s"]
    assert not [thread for thread in threading.enumerate() if thread.name == "activity"]


def test_innermost_activity_speaks_alone(spoken, monkeypatch):
    # on a busy machine, the inner one begins later
    monkeypatch.setattr(module, "FIRST_MESSAGE", 10 * SOON)
    with activity("Training"), activity("Saving"):
        wait_until(lambda: len(spoken()) == 2)
        time.sleep(6 * SOON)  # or the outer one would be due just when the inner one has ended
    without_times = {re.sub(r"\d+", "N", line) for line in spoken()}
    assert without_times == {"Saving: N s", "Saving took N s"}


def test_failed_activity_says_no_last_words(spoken):
    with pytest.raises(KeyError), activity("Loading"):
        wait_until(spoken)
        raise KeyError
    assert set(spoken()) == {"Loading: 0 s"}


@pytest.mark.parametrize("hidden", ["another rank", "a higher level"])
def test_activity_is_silent(hidden, spoken, monkeypatch, caplog):
    if hidden == "another rank":
        monkeypatch.setenv("RANK", "1")
    else:
        caplog.set_level("WARNING", "trl_atropos")
    with activity("Loading") as loading:
        time.sleep(3 * SOON)
        loading.advance()
    assert spoken() == []


def test_command_speaks_until_recipe_sets_level(monkeypatch):
    monkeypatch.delenv("TRL_ATROPOS_VERBOSITY", raising=False)
    package = logging.getLogger("trl_atropos")
    level = package.level
    try:
        speak()
        assert logging.getLogger(ACTIVITY).isEnabledFor(logging.INFO)
        set_verbosity(logging.WARNING)
        assert not logging.getLogger(ACTIVITY).isEnabledFor(logging.INFO)
    finally:
        set_verbosity(level)


def test_file_gets_counts_and_details_in_lines(spoken, tmp_path):
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(300_000_000)
    with activity("Saving", total=4000, detail=lambda: written(tmp_path)) as saving:
        saving.advance(1200)
        wait_until(spoken)
    assert spoken()[0] == "Saving: 1,200 of 4,000, 0.3 GB written, 0 s"


def test_long_path_loses_its_middle(spoken, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with activity(f"Saving {'folder/' * 20}checkpoint-7"):
        wait_until(spoken)
    line = f"[trl_atropos] {spoken()[0]}"
    assert len(line) == 80 and line.startswith("[trl_atropos] Saving folder/")
    assert line.endswith("/checkpoint-7: 0 s")


def test_time_is_given_in_minutes_from_two_on():
    assert [duration(seconds) for seconds in (9.6, 119, 120, 3600)] == [
        "10 s",
        "119 s",
        "2 min",
        "60 min",
    ]


@pytest.fixture
def own_console():
    """The package writes itself, though pytest has given the root logger handlers."""
    disable_propagation()
    yield
    enable_propagation()


def test_terminal_shows_lines_above_another_bar_and_own_bar_for_counts(spoken, own_console):
    with terminal() as screen, tqdm(total=8, desc="training", file=sys.stderr) as training:
        training.update(3)
        with activity("Loading the model"):
            wait_until(lambda: b"Loading the model: 0 s" in screen._read)
        with activity("Looking at the rollouts", total=10) as looking:
            looking.advance(4)
            wait_until(lambda: b"Looking at the rollouts:  40%|" in screen._read)
            looking.advance(6)
        training.update(5)
    lines = [line for line in screen.lines() if line]
    assert lines[0] == "[trl_atropos] Loading the model: 0 s"
    assert lines[-2] == "[trl_atropos] Looking at the rollouts took 0 s"
    assert lines[-1].startswith("training: 100%|") and "8/8" in lines[-1]
    assert all(line.startswith("[trl_atropos] ") for line in lines[:-1])


# --------------------------------------------------------------------------------- a step that lasts


def test_long_step_says_what_it_does(spoken):
    stopwatch = Stopwatch()
    watch = StepWatch(stopwatch)
    watch.compiles = True
    watch.begin_at(7)
    try:
        with stopwatch.part(WAIT):
            wait_until(lambda: "Step 7 has taken 0 s so far: waiting for rollouts" in spoken())
        with stopwatch.part(COMPUTE):
            text = "Step 7 has taken 0 s so far: computing, and compiling the layers"
            wait_until(lambda: text in spoken())
        before = len(spoken())
        with stopwatch.part(EVALUATE):  # which speaks for itself
            time.sleep(4 * SOON)
            assert len(spoken()) <= before + 1
        watch.next_step(1.0)
        with stopwatch.part(COMPUTE):
            wait_until(lambda: "Step 8 has taken 0 s so far: computing" in spoken())
    finally:
        watch.end()
    assert spoken()[-1].startswith("Step ")


def test_step_is_long_if_it_takes_twice_as_long_as_others():
    watch = StepWatch(Stopwatch())
    watch.next_step(300.0)  # the first one compiles
    assert watch.pacer.next == 10.0
    watch.next_step(4.0)
    assert watch.pacer.next == 10.0
    watch.next_step(50.0)
    watch.next_step(4.0)
    assert watch.pacer.next == 100.0


def test_training_says_what_it_does(spoken, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FIRST_MESSAGE", 0.001)
    batches = [uniform_batch(tiny_model, 4, 2, seed) for seed in range(2)]
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    make_trainer(tiny_model, tmp_path, *batches, **settings).train()
    again = make_trainer(tiny_model, tmp_path, *batches, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-1"))
    begun = {line.rpartition(": ")[0] for line in spoken()}
    run = tmp_path / "run"
    assert begun >= {
        f"Loading the model {tiny_model}",
        "Preparing the training",
        "Testing how the model computes",
        f"Saving {run}/checkpoint-2",
        f"Loading the weights of {run}/checkpoint-1",
    }
    assert [line for line in begun if line.startswith("Step 2 has taken ")]
    assert not [thread for thread in threading.enumerate() if thread.name == "activity"]


@pytest.mark.parametrize("collects", [True, False])
def test_imports_are_said_and_leave_garbage_alone(collects, spoken):
    """And whoever collects garbage does so again, also if an import fails."""
    if not collects:
        gc.disable()
    try:
        with pytest.raises(ModuleNotFoundError), importing("a module"):
            wait_until(spoken)
            assert not gc.isenabled()
            raise ModuleNotFoundError
        assert gc.isenabled() == collects
    finally:
        gc.enable()
    assert spoken()[0].startswith("Importing a module: ")
