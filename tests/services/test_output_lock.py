"""One run at a time in an output folder, however the last one ended and wherever it ran."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from trl_atropos.errors import AtroposTrainingError
from trl_atropos.rollouts.spool import write_file
from trl_atropos.services import output_lock
from trl_atropos.services.output_lock import NAME, locked

HOLD = """
import sys, time
from trl_atropos.services.output_lock import locked
with locked(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process, which holds the folder `run`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path / "run"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def of_another_machine(folder: Path, age: float) -> Path:
    """The lock of a run on another machine, whose file system does not carry locks to this one."""
    path = folder / NAME
    path.write_text(
        json.dumps(
            {"process": "7", "host": "node-2", "boot": "another", "since": "2026-01-01 00:00:00"}
        )
    )
    os.utime(path, (time.time() - age,) * 2)
    return path


def test_held_folder_is_refused_naming_process(holder, tmp_path):
    told = rf"another run is using: process {holder.pid} on .*, since .* Set `output_dir` to another folder"
    with pytest.raises(AtroposTrainingError, match=told), locked(tmp_path / "run"):
        pass


@pytest.mark.parametrize("there", [True, False], ids=["to a file", "to nothing"])
def test_symlinked_lock_is_refused_and_target_kept(tmp_path, there):
    target = tmp_path / "somebody's"
    if there:
        target.write_text("a file of somebody else, longer than a lock")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / NAME).symlink_to(target)
    with (
        pytest.raises(AtroposTrainingError, match=f"symbolic link to {target}.*Remove it"),
        locked(tmp_path / "run"),
    ):
        pass
    assert target.exists() == there
    assert not there or target.read_text() == "a file of somebody else, longer than a lock"


def test_non_file_lock_is_refused_with_reason(tmp_path):
    (tmp_path / "run" / NAME).mkdir(parents=True)
    told = "cannot be locked for this run: Is a directory"
    with pytest.raises(AtroposTrainingError, match=told), locked(tmp_path / "run"):
        pass


@pytest.mark.parametrize("name", ["file", ".file.tmp"])
def test_run_files_are_written_through_no_symlink(tmp_path, name):
    target = tmp_path / "somebody's"
    target.write_text("kept")
    (tmp_path / name).symlink_to(target)
    write_file(tmp_path / "file", b"ours", sync=False)
    assert target.read_text() == "kept"
    assert (tmp_path / "file").read_text() == "ours" and not (tmp_path / "file").is_symlink()


def test_held_folder_is_refused_before_any_change(holder, tiny_model, tmp_path, monkeypatch):
    from tests.rollout_factory import make_trainer, uniform_batch
    from trl_atropos import train
    from trl_atropos.recipe import parse

    trainer = make_trainer(tiny_model, tmp_path, uniform_batch(tiny_model, 4, 2, 0))
    with pytest.raises(AtroposTrainingError, match=f"process {holder.pid} "):
        trainer.train()
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model_name_or_path: {tiny_model}\noutput_dir: {tmp_path / 'run'}\nmax_steps: 1\nuse_cpu: "
        "true\n"
    )
    # which would be that of all tests
    monkeypatch.setattr(train, "set_up_logging", lambda training: None)
    with pytest.raises(AtroposTrainingError, match=f"process {holder.pid} "):
        train.run(parse(["--config", str(recipe)]))
    assert [path.name for path in (tmp_path / "run").iterdir()] == [NAME]


def test_lock_of_killed_process_is_taken_over(holder, tmp_path):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    before = time.monotonic()
    with locked(tmp_path / "run"):
        assert json.loads((tmp_path / "run" / NAME).read_text())["process"] == str(os.getpid())
    assert time.monotonic() - before < 20  # seconds
    assert json.loads((tmp_path / "run" / NAME).read_text()) == {}


def test_lock_is_reentrant_in_one_process(tmp_path):
    with locked(tmp_path):
        with locked(tmp_path):
            pass
        assert tmp_path.resolve() in output_lock._held
    assert not output_lock._held


def test_lock_of_writing_machine_is_refused(tmp_path, caplog):
    path = of_another_machine(tmp_path, 1.0)
    threading.Timer(0.6, os.utime, [path]).start()
    with (
        pytest.raises(AtroposTrainingError, match="process 7 on node-2, since 2026"),
        locked(tmp_path),
    ):
        pass
    assert "was last used by process 7 on node-2" in caplog.text


@pytest.mark.parametrize("age", [3600, 59.3])
def test_lock_of_silent_machine_is_taken_over(tmp_path, caplog, age):
    of_another_machine(tmp_path, age)
    with locked(tmp_path):
        pass
    assert "which is dead: it wrote nothing for" in caplog.text


def test_heartbeat_replaces_missing_file_locks(tmp_path, monkeypatch):
    def refused(*_) -> None:
        raise OSError(output_lock.errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    monkeypatch.setattr(output_lock, "BEAT", 0.1)
    with locked(tmp_path):
        output_lock._held.clear()  # as another process, which does not know
        with pytest.raises(AtroposTrainingError, match=f"process {os.getpid()} "), locked(tmp_path):
            pass
        output_lock._held.add(tmp_path.resolve())
