"""Checkpoints that are written while training goes on: what they hold, when they count, and what happens to them when
the training, the disk or the process fails.

Run as a module, this file is one of two processes of a trainer, or a run that hangs while a checkpoint is on its way
to the disk, to be killed there (`main` below).
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback
from trl import GRPOTrainer

from tests.launching import ROOT, launch_two
from tests.rollout_factory import arguments, make_trainer, record, step_logs, uniform_batch
from trl_atropos import AtroposGRPOConfig, AtroposGRPOTrainer, saving, staging
from trl_atropos.errors import SaveError
from trl_atropos.rollouts.spool import oldest_cursor
from trl_atropos.timing import PARTS
from trl_atropos.train import whole_checkpoints

ROWS = 16
SECONDS = 30.0  # for what takes less than one
OTHERS = set(Path(staging.SHM).glob(f"{staging.PREFIX}*"))  # of runs that have nothing to do with these
BACKGROUND = {"save_strategy": "steps", "save_in_background": True, "per_device_train_batch_size": ROWS}


@pytest.fixture(autouse=True)
def small_reserve(monkeypatch):
    """A container may have 64 MB of shared memory, and these checkpoints take less than one."""
    monkeypatch.setattr(staging, "RESERVE", 0)


@pytest.fixture
def trainer(tiny_model, tmp_path):
    def make(*callbacks: TrainerCallback, **settings: Any) -> AtroposGRPOTrainer:
        batches = [uniform_batch(tiny_model, 8, 2, seed) for seed in range(6)]
        return make_trainer(tiny_model, tmp_path, *batches, callbacks=list(callbacks), **(BACKGROUND | settings))

    return make


class SlowDisk:
    """A file that stays on its way to the disk until it is let go: the moment in which everything has to hold."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str = "optimizer.pt", checkpoint: int = 2):
        self.reached, self.let_go = threading.Event(), threading.Event()
        copy = saving._Move._copy_file

        def held(move: saving._Move, path: Path, place: Path) -> None:
            if path.name == name and path.parent.name == f"checkpoint-{checkpoint}":
                self.reached.set()
                assert self.let_go.wait(SECONDS), f"{name} was not let go: the training waits for it"
            copy(move, path, place)

        patch.setattr(saving._Move, "_copy_file", held)


class At(TrainerCallback):
    """Calls something at the end of a step."""

    def __init__(self, step: int, call):
        self.step, self.call = step, call

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.call()


def staged() -> list[Path]:
    return [path for path in Path(staging.SHM).glob(f"{staging.PREFIX}*") if path not in OTHERS]


def whole(folder: Path) -> list[int]:
    return sorted(whole_checkpoints(str(folder)))


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --------------------------------------------------------------------------------------------------- what is written


class SavedTwice(TrainerCallback):
    """Has Transformers write every checkpoint once more, at the same moment, into `beside`."""

    def __init__(self, beside: Path):
        self.beside = beside

    def on_save(self, args, state, control, model=None, **kwargs):
        args.output_dir, before = str(self.beside), args.output_dir
        control.should_save = True  # as it was, and as is written
        GRPOTrainer._save_checkpoint(self.trainer, model, None)
        args.output_dir, control.should_save = before, False


@pytest.mark.parametrize("settings", [{}, {"use_adaptive_entropy": True}, {"save_only_model": True}], ids=str)
def test_a_checkpoint_is_to_the_byte_what_is_written_while_training_waits(trainer, tmp_path, settings):
    twice = SavedTwice(tmp_path / "beside")
    twice.trainer = trainer(twice, max_steps=2, save_steps=2, **settings)
    twice.trainer.train()
    ours, theirs = files(tmp_path / "run/checkpoint-2"), files(tmp_path / "beside/checkpoint-2")
    assert ours.pop("training_args.bin") != theirs.pop("training_args.bin")  # which name the folder
    assert ours == theirs
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "run/checkpoint-2").iterdir()}
    assert modes == {path.name: path.stat().st_mode for path in (tmp_path / "beside/checkpoint-2").iterdir()}
    assert not staged()


def test_training_goes_on_while_a_checkpoint_is_on_its_way_and_the_seconds_are_told_beside_the_step(
    trainer, tmp_path, monkeypatch
):
    disk, moments = SlowDisk(monkeypatch), []

    def look() -> None:
        assert disk.reached.wait(SECONDS)
        moments.append(whole(tmp_path / "run"))
        disk.let_go.set()

    run = trainer(At(3, look), max_steps=6, save_steps=2)
    run.train()
    assert moments == [[]]
    assert whole(tmp_path / "run") == [2, 4, 6]
    logs = step_logs(run)
    told = [log[saving.SECONDS] for log in logs if saving.SECONDS in log]
    assert told and all(seconds > 0 for seconds in told)
    for log in logs:
        assert sum(log[f"time/{part}"] for part in PARTS) == pytest.approx(log["time/step"])


@pytest.mark.parametrize("name", ["optimizer.pt", "trainer_state.json"])
def test_what_is_half_written_is_no_checkpoint(trainer, tmp_path, monkeypatch, name):
    disk = SlowDisk(monkeypatch, name)

    def look() -> None:
        assert disk.reached.wait(SECONDS)
        assert (tmp_path / "run/checkpoint-2").is_dir()
        assert whole(tmp_path / "run") == []
        assert not (tmp_path / "run/checkpoint-2/trainer_state.json").exists()
        assert oldest_cursor(tmp_path / "run", "any") is None
        disk.let_go.set()

    trainer(At(3, look), max_steps=3, save_steps=2).train()
    assert whole(tmp_path / "run") == [2, 3]


def test_an_older_checkpoint_of_the_same_step_is_replaced_as_a_whole(trainer, tmp_path):
    old = tmp_path / "run/checkpoint-2"
    old.mkdir(parents=True)
    (old / "model-00001-of-00002.safetensors").write_text("of another run")
    trainer(max_steps=2, save_steps=2).train()
    assert "model-00001-of-00002.safetensors" not in files(old)
    assert whole(tmp_path / "run") == [2]


def test_old_checkpoints_go_when_the_new_one_is_whole_and_a_half_one_does_not_count(trainer, tmp_path, monkeypatch):
    half = tmp_path / "run/checkpoint-9"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_text("half")
    os.utime(half, (time.time() + 3600,) * 2)  # the newest, by its clock and by its number
    disk = SlowDisk(monkeypatch, checkpoint=4)

    def look() -> None:
        assert disk.reached.wait(SECONDS)
        assert whole(tmp_path / "run") == [2, 3]
        disk.let_go.set()

    trainer(At(5, look), max_steps=5, save_steps=1, save_total_limit=2).train()
    assert whole(tmp_path / "run") == [4, 5]
    assert not half.exists()


# ---------------------------------------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize(("every", "last"), [(2, 4), (6, 6)], ids=["in the midst of training", "at its end"])
def test_what_keeps_a_checkpoint_from_the_disk_ends_the_training(trainer, tmp_path, every, last):
    (tmp_path / "run").mkdir()
    (tmp_path / f"run/checkpoint-{every}").write_text("in the way")
    run = trainer(max_steps=6, save_steps=every)
    with pytest.raises(
        SaveError, match=rf"could not be written to .*/run/checkpoint-{every}: Not a directory .*resume"
    ):
        run.train()
    assert every <= run.state.global_step <= last
    assert not staged()


def test_a_disk_that_does_not_answer_is_not_waited_for_for_ever(trainer, monkeypatch):
    monkeypatch.setattr(saving, "STALLED_SECONDS", 0.3)
    monkeypatch.setattr(saving, "POLL_SECONDS", 0.1)
    disk = SlowDisk(monkeypatch)
    with pytest.raises(
        SaveError, match=r"nothing has been written to .*/run/checkpoint-2 for .* See whether that disk"
    ):
        trainer(max_steps=4, save_steps=2).train()
    disk.let_go.set()
    next(thread for thread in threading.enumerate() if isinstance(thread, saving._Move)).join(SECONDS)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_was_saved_before_an_error_or_ctrl_c_reaches_the_disk(trainer, tmp_path, monkeypatch, error):
    disk = SlowDisk(monkeypatch)

    def fail() -> None:
        assert disk.reached.wait(SECONDS)
        threading.Timer(0.5, disk.let_go.set).start()
        raise error("of the training")

    with pytest.raises(error, match="of the training"):
        trainer(At(3, fail), max_steps=4, save_steps=2).train()
    assert whole(tmp_path / "run") == [2]
    assert not staged()


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_what_fails_while_it_is_written_to_memory_leaves_nothing_there(trainer, tmp_path, error):
    run = trainer(max_steps=2, save_steps=2)

    def fail(*_) -> None:
        assert staged()
        raise error("while saving")

    run._save_rng_state = fail
    with pytest.raises(error, match="while saving"):
        run.train()
    assert not staged() and not (tmp_path / "run/checkpoint-2").exists()


# --------------------------------------------------------------------------------------------- where it cannot be done


def test_without_room_in_memory_the_training_waits_and_says_so_once(trainer, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(staging, "RESERVE", 1 << 60)
    monkeypatch.setattr(staging, "Staging", None)  # is not made
    trainer(max_steps=4, save_steps=2).train()
    assert whole(tmp_path / "run") == [2, 4]
    assert caplog.text.count("`save_in_background`, but the training waits while a checkpoint is written") == 1
    assert "enlarge that (docker's `--shm-size`), or leave `save_in_background` out" in caplog.text


def test_what_a_checkpoint_takes_is_not_underestimated(trainer, tmp_path):
    run = trainer(max_steps=2, save_steps=2)
    run.train()
    tensors = sum(
        (tmp_path / "run/checkpoint-2" / name).stat().st_size for name in ("model.safetensors", "optimizer.pt")
    )
    estimated = staging.saved_bytes(run.model, run.optimizer)
    assert tensors < estimated + (1 << 20)
    assert estimated < 1.3 * tensors


@pytest.mark.parametrize("engine", ["is_deepspeed_enabled", "is_fsdp_enabled"])
def test_engines_that_write_by_themselves_do_so(trainer, engine):
    run = trainer()
    setattr(run, engine, True)
    assert "write by themselves" in run._saver._obstacle()


def test_uploads_during_training_are_refused(tmp_path):
    settings = arguments(tmp_path, save_in_background=True, push_to_hub=True)
    with pytest.raises(ValueError, match=r"`hub_strategy: every_save` uploads .*: set `hub_strategy: end`, or leave"):
        AtroposGRPOConfig(**settings)
    AtroposGRPOConfig(**settings, hub_strategy="end")


# ------------------------------------------------------------------------------------------------ a run that is killed


def configuration(folder: Path, **settings: Any) -> AtroposGRPOConfig:
    given = {"max_steps": 6, "save_steps": 2, "replay_paths": [str(folder / "rollouts.jsonl")]}
    return AtroposGRPOConfig(**arguments(folder / "run", **(BACKGROUND | given | settings)))


def hang(model: Path, folder: Path) -> None:
    """A run whose second checkpoint does not get to the disk before it is killed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "RESERVE", 0)
        disk = SlowDisk(patch, checkpoint=4)

        def tell() -> None:
            assert disk.reached.wait(SECONDS)
            (folder / "reached").touch()
            time.sleep(600)

        AtroposGRPOTrainer(str(model), configuration(folder), callbacks=[At(5, tell)]).train()


@pytest.fixture(scope="module")
def killed(tiny_model, tmp_path_factory) -> tuple[Path, list[Path]]:
    """Folder of a run that was killed, and what a sweep left in memory before."""
    folder = tmp_path_factory.mktemp("killed")
    record(folder / "rollouts.jsonl", *[uniform_batch(tiny_model, 8, 2, seed) for seed in range(6)])
    command = [sys.executable, "-m", __name__, str(tiny_model), str(folder), "hang"]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 100
        while not (folder / "reached").exists():
            assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()[-3000:]
            time.sleep(0.1)
        staging.sweep()
        living = staged()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(SECONDS)
    return folder, living


def test_a_killed_run_resumes_from_the_last_whole_checkpoint_and_takes_the_same_steps(tiny_model, killed, tmp_path):
    folder, living = killed
    assert (folder / "run/checkpoint-4").is_dir()
    assert whole(folder / "run") == [2]
    assert len(living) == 1, "a sweep takes what is in use"
    resumed = AtroposGRPOTrainer(str(tiny_model), configuration(folder))
    assert not staged()
    resumed.train(resume_from_checkpoint=str(folder / "run/checkpoint-2"))
    assert whole(folder / "run") == [2, 4, 6]
    straight = AtroposGRPOTrainer(str(tiny_model), configuration(folder, output_dir=str(tmp_path), save_strategy="no"))
    straight.train()
    losses, expected = ([log["loss"] for log in step_logs(one)] for one in (resumed, straight))
    assert len(expected) == 6 and len(set(expected)) == 6
    assert losses[-4:] == pytest.approx(expected[-4:], rel=1e-6)


# ------------------------------------------------------------------------------------------------------- two processes


def main(model: Path, folder: Path) -> None:
    """What each of the two processes does."""
    staging.RESERVE = 0
    trainer = AtroposGRPOTrainer(str(model), configuration(folder, max_steps=4, per_device_train_batch_size=ROWS // 2))
    trainer.train()
    told: dict[str, Any] = {"folder": trainer._saver.folder}
    if trainer.accelerator.is_main_process:
        (folder / "blocked").mkdir()
        (folder / "blocked/checkpoint-2").write_text("in the way")
    blocked = configuration(
        folder, max_steps=6, per_device_train_batch_size=ROWS // 2, output_dir=str(folder / "blocked")
    )
    try:
        AtroposGRPOTrainer(str(model), blocked).train()
    except SaveError as error:
        told["error"] = str(error)
    (folder / f"rank{trainer.args.process_index}.json").write_text(json.dumps(told))


@pytest.mark.slow
def test_two_processes_write_one_checkpoint_and_hear_both_of_what_kept_it_from_the_disk(tiny_model, tmp_path):
    record(tmp_path / "rollouts.jsonl", *[uniform_batch(tiny_model, 8, 2, seed) for seed in range(6)])
    launch_two(tmp_path, __name__, tiny_model)
    assert whole(tmp_path / "run") == [2, 4]
    names = set(files(tmp_path / "run/checkpoint-4"))
    assert {"model.safetensors", "optimizer.pt", "rng_state_0.pth", "rng_state_1.pth"} <= names
    assert not staged()
    for rank in (0, 1):
        told = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert told["folder"] is None
        assert "blocked/checkpoint-2: Not a directory" in told["error"]


if __name__ == "__main__":
    (hang if "hang" in sys.argv[3:] else main)(Path(sys.argv[1]), Path(sys.argv[2]))
