"""`python -m benchmarks.on_gpus`: its commands are right, and each GPU has one job at a time."""

import re
import socket
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks import on_gpus
from benchmarks.on_gpus import JOBS, Job, Queue, command_of, ended_well
from tests import ROOT
from trl_atropos.services.manager import Services

# Notes when it begins and ends, and on which GPUs.
WORK = """
import os, pathlib, sys, time
folder, name, seconds, code = sys.argv[1:]
gpus = os.environ["CUDA_VISIBLE_DEVICES"]
began = time.monotonic()
time.sleep(float(seconds))
pathlib.Path(folder, name).write_text(f"{began} {time.monotonic()} {gpus}")
sys.exit(int(code))
"""


def run(folder: Path, gpus: list[str], jobs: list[Job], **works: tuple[float, int]) -> list[str]:
    """Runs jobs that take so many seconds and end with such a code. Returns those that failed."""
    commands = {}
    for name, (seconds, code) in works.items():
        commands[name] = [sys.executable, "-c", WORK, str(folder), name, str(seconds), str(code)]
    with Services(folder) as services:
        return Queue(services, folder / "jobs.txt", gpus, jobs, commands).run()


def test_each_gpu_has_one_job_at_a_time(tmp_path):
    jobs = [Job("a", (), 1), Job("both", (), 1, gpus=2), Job("b", (), 1), Job("c", (), 1)]
    works = dict.fromkeys("abc", (0.5, 0)) | {"both": (0.5, 0)}
    assert run(tmp_path, ["3", "5"], jobs, **works) == []
    times = {}
    for name in works:
        began, ended, gpus = (tmp_path / name).read_text().split()
        times[name] = (float(began), float(ended), set(gpus.split(",")))
    assert times["both"][2] == {"3", "5"}
    assert times["a"][1] <= times["both"][0]  # which nothing that comes later may pass
    for name, (began, ended, gpus) in times.items():
        for other, (other_began, other_ended, other_gpus) in times.items():
            if name != other and gpus & other_gpus:
                assert ended <= other_began or other_ended <= began, (name, other)


def test_jobs_that_fail_or_take_too_long_do_not_stop_others(tmp_path, capfd):
    jobs = [
        Job("fails", (), 1),
        Job("hangs", (), 0.02),
        Job("after", (), 1, needs="fails"),
        Job("lonely", (), 1, needs="nobody"),
        Job("good", (), 1),
    ]
    works = {"fails": (0, 3), "hangs": (60, 0), "after": (0, 0), "lonely": (0, 0), "good": (0, 0)}
    began = time.monotonic()
    assert set(run(tmp_path, ["0"], jobs, **works)) == {"fails", "hangs", "after", "lonely"}
    assert time.monotonic() - began < 30
    told = (tmp_path / "jobs.txt").read_text()
    assert "fails: ended with exit code 3\n" in told
    assert "hangs: was ended after 0.02 minutes\n" in told
    assert "after: is not run, because fails has not ended well\n" in told
    assert "lonely: is not run, because nobody has not ended well\n" in told
    assert ended_well(tmp_path / "jobs.txt") == {"good"}
    # the second call goes on where the first was
    assert set(run(tmp_path, ["0"], jobs, **works | {"fails": (0, 0), "hangs": (0, 0)})) == {
        "lonely"
    }
    assert (tmp_path / "jobs.txt").read_text().count("good: began") == 1


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
@pytest.mark.parametrize("rehearse", [False, True])
def test_command_of_job_is_accepted(job, rehearse, tmp_path):
    _, _, module, *words = command_of(job, tmp_path, rehearse)
    if module == "pytest":
        files = [word for word in words if word.endswith(".py")]
        assert files
        for file in files:
            assert "pytest.mark.gpu" in (ROOT / file).read_text()
        return
    _bench, name, *rest = words
    benchmark = import_module(f"benchmarks.{name}")
    options = benchmark.build_parser().parse_args(rest)
    if hasattr(options, "params"):
        assert not rehearse or options.params == "2M"
    assert job.needs is None or job.needs in {other.name for other in JOBS}


def test_list_names_commands_and_unknown_job_is_refused(capsys):
    on_gpus.main(["--list", "--only", "attention,step"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("attention: python -m trl_atropos.cli bench attention")
    assert len(lines) == 2
    with pytest.raises(SystemExit):
        on_gpus.main(["--only", "steps"])
    assert re.search("steps: there are target_model, long", capsys.readouterr().err)


def test_end_of_queue_is_end_of_its_jobs(tmp_path, monkeypatch):
    """As somebody starts it, and ends it with Ctrl-C. What a job prints is in its log at once."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    program = (
        "from benchmarks.on_gpus import Job, main\n"
        "from trl_atropos.services.signals import install_handlers\n"
        "install_handlers()\n"
        f"job = Job('long', ('http.server', '--bind', '127.0.0.1', '0'), 1)\n"
        f"main(['--output', {str(tmp_path)!r}, '--gpus', '0'], [job])\n"
    )
    queue = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, start_new_session=True)
    log = tmp_path / "long.log"
    deadline = time.monotonic() + 60
    while not (log.exists() and "Serving" in log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    (port,) = re.findall(r"port (\d+)", log.read_text())
    queue.terminate()
    assert queue.wait(30) != 0
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(port))) != 0


def test_make_runs_all_tests_that_need_a_gpu():
    (command,) = re.findall(
        r"^test-gpu:\n\t(.*?[^\\])\n", (ROOT / "Makefile").read_text(), re.M | re.S
    )
    named = [ROOT / word for word in command.split() if word.startswith("tests/")]
    mark = "pytest.mark." + "gpu"
    for file in (ROOT / "tests").rglob("test_*.py"):
        if mark in file.read_text() and file != Path(__file__):
            assert any(file == place or place in file.parents for place in named), file
