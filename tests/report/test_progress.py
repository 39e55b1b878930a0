"""What a person sees while a run goes on: on a terminal, in a log file, in the table of
completions."""

import contextlib
import fcntl
import os
import pty
import re
import struct
import sys
import termios
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer, ProgressCallback, TrainerCallback

from tests.rollout_factory import arguments, make_group, make_trainer, record, uniform_batch
from trl_atropos import AtroposGRPOConfig, AtroposGRPOTrainer, ReplaySource
from trl_atropos.metrics.timing import PARTS, WAIT
from trl_atropos.report.progress import LineCallback, format_line, format_postfix, show_lines

COLUMNS = 140
CONTROL = re.compile(r"\x1b\[(\d*)([A-Za-z])|\x1b\[[\d;]*m|([\r\n])")


class Screen:
    """A terminal of `COLUMNS` columns, which shows what was written to it as a person sees it."""

    def __init__(self) -> None:
        self._master, self._slave = pty.openpty()
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
        self.file = os.fdopen(self._slave, "w", buffering=1)
        self._read = bytearray()
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self._thread.start()

    def _collect(self) -> None:
        with contextlib.suppress(OSError):  # what a pseudo-terminal that was closed answers
            while data := os.read(self._master, 65536):
                self._read += data

    def lines(self) -> list[str]:
        """What is on it in the end. Closes it."""
        self.file.close()
        self._thread.join(10)
        os.close(self._master)
        return render(self._read.decode(errors="replace"))


def render(text: str) -> list[str]:
    """Lines as they stand after everything that moves the cursor: what is written over is gone."""
    lines, row, column = [""], 0, 0
    for index, part in enumerate(_parts(text)):
        if index % 2 == 0:
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + len(part) :]
            column += len(part)
        elif part == "\r":
            column = 0
        elif part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part.endswith("A"):
            row = max(0, row - int(part[2:-1] or 1))
    return [line.rstrip() for line in lines]


def _parts(text: str) -> Iterator[str]:
    """Text and control sequences in turn."""
    end = 0
    for found in CONTROL.finditer(text):
        yield text[end : found.start()]
        yield found[0]
        end = found.end()
    yield text[end:]


@contextlib.contextmanager
def terminal() -> Iterator[Screen]:
    """In the place of stdout and stderr."""
    screen = Screen()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", screen.file)
        patch.setattr(sys, "stderr", screen.file)
        patch.setenv("COLUMNS", str(COLUMNS))
        yield screen


class AgedSource(ReplaySource):
    """Whose rows are half a version old."""

    def metrics(self):
        return super().metrics() | {"rollouts/staleness_mean": 0.5}


def batches_of(model, number: int) -> list:
    return [uniform_batch(model, 4, 2, seed) for seed in range(number)]


def test_terminal_shows_one_bar_below_step_lines(tiny_model, tmp_path):
    recording = record(tmp_path / "rollouts.jsonl", *batches_of(tiny_model, 3))
    settings = arguments(
        tmp_path / "run", max_steps=3, disable_tqdm=False, replay_paths=[recording]
    )
    with terminal() as screen:
        config = AtroposGRPOConfig(**settings)
        AtroposGRPOTrainer(
            str(tiny_model), args=config, rollout_source=AgedSource(recording)
        ).train()
    lines = [line for line in screen.lines() if line]
    steps = [line for line in lines if line.startswith("step ")]
    assert [line[:9] for line in steps] == ["step 1/3 ", "step 2/3 ", "step 3/3 "]
    (bar,) = [line for line in lines if "%|" in line and "3/3" in line]
    reward = re.search(r"reward (\d\.\d{3}) ", steps[-1])[1]
    assert re.search(rf", reward {reward}, stale 0\.5(, [\w ]+)?\]$", bar)
    assert lines[-1] == bar


def test_file_gets_each_step_line_at_once_and_no_bar(tiny_model, tmp_path, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    out, err = tmp_path / "out", tmp_path / "err"
    seen: list[int] = []

    class Look(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            seen.append(out.read_text().count("\n"))

    trainer = make_trainer(
        tiny_model, tmp_path, *batches_of(tiny_model, 3), max_steps=3, disable_tqdm=False
    )
    trainer.add_callback(Look())
    with out.open("w") as stdout, err.open("w") as stderr:
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setattr(sys, "stderr", stderr)
        trainer.train()
    assert seen == [0, 1, 2]
    assert [line[:7] for line in out.read_text().splitlines()] == ["step 1/", "step 2/", "step 3/"]
    assert "%|" not in err.read_text() and "\r" not in out.read_text() + err.read_text()


def test_warning_stands_once_and_whole_above_bar(tiny_model, tmp_path, own_console):
    settings = {
        "max_steps": 5,
        "disable_tqdm": False,
        "warning_thresholds": {"unknown_version": 0.0},
    }
    with terminal() as screen:
        make_trainer(tiny_model, tmp_path, *batches_of(tiny_model, 5), **settings).train()
    lines = screen.lines()
    (number,) = [
        number for number, line in enumerate(lines) if "it is not known which version" in line
    ]
    after = next(place for place, line in enumerate(lines) if line.startswith("step 3/5"))
    warning = " ".join(" ".join(lines[number:after]).split())
    assert warning.startswith("[trl_atropos] For 100% of the rollouts") and "%|" not in warning
    assert warning.endswith("`warning_thresholds` changes that.)")
    assert max(map(len, lines)) <= COLUMNS < len(warning)


@pytest.fixture
def own_console():
    """As in the main job: the package writes itself, though pytest has given the root logger
    handlers."""
    from trl_atropos import logging

    logging.disable_propagation()
    yield
    logging.enable_propagation()


def test_completion_table_has_all_rows_and_own_line(tiny_model, tmp_path):
    encode = AutoTokenizer.from_pretrained(tiny_model).encode
    words, prompt = ["first", "second", "third", "fourth"], encode("say it")
    rows = [(len(prompt) * [-100], encode(word)) for word in words]
    group = make_group(
        tiny_model,
        4,
        1,
        scores=[0.0, 0.25, 0.5, 0.75],
        tokens=[prompt + said for _, said in rows],
        masks=[hidden + said for hidden, said in rows],
        inference_logprobs=[[1.0] * len(hidden) + [-5.0] * len(said) for hidden, said in rows],
    )
    settings = {"per_device_train_batch_size": 4, "log_completions": True, "disable_tqdm": False}
    with terminal() as screen:
        make_trainer(tiny_model, tmp_path, [group], **settings).train()
    lines = screen.lines()
    title = next(number for number, line in enumerate(lines) if "Step 1" in line)
    step, *news = (
        lines[title - 2 : title] if lines[title - 1].startswith("  (") else lines[title - 1 : title]
    )
    assert step.startswith("step 1/1") and lines[title].startswith("╭─"), news
    assert all(
        lines[title + 2].count(name) == 1
        for name in ("Prompt", "Completion", "atropos_score", "Advantage")
    )
    rows = [line for line in lines[title + 3 : title + 12] if "say it" in line]
    for row, word, reward, advantage in zip(
        rows, words, (0.0, 0.25, 0.5, 0.75), (-1.16, -0.39, 0.39, 1.16)
    ):
        cells = [cell.strip() for cell in row.split("│")]
        assert cells[2:6] == ["say it", word, f"{reward:.2f}", f"{advantage:.2f}"]
    assert len(rows) == 4


def test_users_own_bar_stays():
    class Own(ProgressCallback):
        pass

    own = Own()
    handler = SimpleNamespace(callbacks=[own, ProgressCallback()])
    show_lines(handler)
    assert handler.callbacks[0] is own and type(handler.callbacks[1]) is LineCallback


def test_transformers_prints_as_usual_without_bar(tiny_model, tmp_path, capsys):
    make_trainer(
        tiny_model, tmp_path, uniform_batch(tiny_model, 4, 2, 0), disable_tqdm=True
    ).train()
    assert "'rewards/atropos_score/mean'" in capsys.readouterr().out


def test_bar_has_room_beside_reward_and_staleness():
    logs = {"reward": 0.5, "rollouts/staleness_mean": 1.0, "loss": 0.25, "time/step": 10.0}
    logs |= {f"time/{part}": 1.0 for part in PARTS} | {f"time/{WAIT}": 8.0}
    assert format_postfix(logs) == "reward 0.500, stale 1.0"


LOGS = {
    **{
        "reward": 0.996,
        "reward_std": 0.017,
        "loss": -0.0001,
        "grad_norm": 0.11,
        "completions/mean_length": 12.0,
    },
    **{
        "rollouts/staleness_mean": 0.5,
        "health/dropped": 0.25,
        "time/wait_for_rollouts": 0.04,
        "time/publish": 0.052,
    },
    **{
        "policy/probe_max_abs_diff": 2.6e-06,
        "speed/trained_tokens_per_second": 5537.0,
        "speed/mfu": 0.4,
    },
}


@pytest.mark.parametrize("width", [60, 80, 120, 180])
def test_line_has_columns_fitting_terminal(width):
    line, *news = format_line(
        300, 300, LOGS, "the trainer is the bottleneck: 60 %", width
    ).splitlines()
    assert (
        len(line) <= width
        and line.startswith("step 300/300  reward 0.996")
        and "dropped 25%" in line
    )
    assert news == ["  (the trainer is the bottleneck: 60 %)"]
    assert ("MFU 40.0%" in line) == (width == 180) and ("loss -0.0001" in line) == (width >= 120)
    whole = format_line(300, 300, LOGS, "the trainer is the bottleneck: 60 %")
    assert whole.endswith("MFU 40.0%  (the trainer is the bottleneck: 60 %)") and len(whole) > 180


def test_dropped_share_is_shown_if_any():
    assert format_line(1, 9, {"reward": 0.0, "health/dropped": 0.0}) == "step 1/9  reward 0.000"
    assert (
        format_line(1, 9, {"reward": 0.0, "health/dropped": 0.25})
        == "step 1/9  reward 0.000  dropped 25%"
    )
