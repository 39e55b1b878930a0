"""The processes that tests fork their programs from are shared, and leave nothing behind."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import ROOT
from tests.forge import Forge

SOON = 20.0  # seconds
# Writes the process that it was forked from, and does what it is told to.
PROGRAM = """import os, sys, time
print(os.getppid(), preloaded, flush=True)
time.sleep(float(sys.argv[1]))
sys.exit(int(sys.argv[2]))
"""
IMPORTS = "import builtins\nbuiltins.preloaded = 'yes'\n"
# As another worker of the same run of pytest: forks a program that stays, and says its number.
WORKER = f"""import os, sys, time
from pathlib import Path
from tests.forge import Forge
forge = Forge({IMPORTS!r})
child = forge.fork(["-m", "program", "600", "0"], os.environ, Path("other.log"), Path.cwd())
print(child.pid, flush=True)
time.sleep(600)
"""


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline, f"late: {what}"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path


def test_forked_program_has_imports_and_passes_its_code_on(program):
    forge = Forge(IMPORTS)
    ended = [
        forge.fork(["-m", "program", "0", code], os.environ, program / code, program)
        for code in ("0", "7")
    ]
    assert [child.wait(SOON) for child in ended] == [0, 7]
    parents = {(program / code).read_text() for code in ("0", "7")}
    (text,) = parents
    parent, preloaded = text.split()
    assert preloaded == "yes" and is_alive(int(parent))
    forge.close()
    until(lambda: not is_alive(int(parent)), "it ends when nobody is connected")


def test_forked_program_ends_as_python_does(tmp_path):
    """With text, traceback, threads and exit functions, each of its outputs apart."""
    programs = {
        "text": ("import sys; sys.exit('a text')", 1, "", "a text\n"),
        "error": ("print('before'); raise ValueError('a mistake')", 1, "before\n", "a mistake\n"),
        "exit": ("import atexit; atexit.register(print, 'late')", 0, "late\n", ""),
        "thread": (
            "import threading, time\n"
            "threading.Thread(target=lambda: (time.sleep(0.2), print('later'))).start()",
            0,
            "later\n",
            "",
        ),
        "interrupt": ("raise KeyboardInterrupt", 130, "", "KeyboardInterrupt\n"),
    }
    forge = Forge(IMPORTS)
    for name, (code, status, output, errors) in programs.items():
        (tmp_path / f"{name}.py").write_text(code)
        done = forge.run(["-m", name], cwd=tmp_path, timeout=SOON)
        assert (done.returncode, done.stdout) == (status, output), name
        assert done.stderr.endswith(errors) and bool(done.stderr) == bool(errors), name
    forge.close()


def test_workers_share_process_that_outlives_each(program, monkeypatch):
    monkeypatch.setattr("tests.forge.RUN", "the test of the forge")
    env = os.environ | {
        "PYTEST_XDIST_TESTRUNUID": "the test of the forge",
        "PYTHONPATH": str(ROOT),
    }
    with subprocess.Popen(
        [sys.executable, "-c", WORKER], cwd=program, env=env, stdout=subprocess.PIPE, text=True
    ) as worker:
        theirs = int(worker.stdout.readline())
        forge = Forge(IMPORTS)
        ours = forge.fork(["-m", "program", "600", "0"], os.environ, program / "log", program)
        for name in ("log", "other.log"):
            until(lambda name=name: (program / name).read_text() != "", f"{name} is written")
        assert (program / "log").read_text() == (program / "other.log").read_text()
        worker.kill()
    until(lambda: not is_alive(theirs), "what it forked for a worker ends with the worker")
    assert ours.poll() is None and is_alive(ours.pid)
    forge.close()
    until(lambda: not is_alive(ours.pid), "and ours with us")
