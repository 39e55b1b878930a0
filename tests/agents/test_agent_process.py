"""One agent: how it ended is known, it sees nothing of the run, and nothing of it stays behind."""

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from trl_atropos.agents.agent_process import FAILED, FLOODED, TIMEOUT, AgentRun, run_agent
from trl_atropos.agents.guarded_process import start_guarded
from trl_atropos.errors import AtroposTrainingError

VARIABLES = {"PATH": os.environ["PATH"]}
# Starts a grandchild that leaves the session, ignores SIGTERM, and writes down its process id.
FORKS = """
import os, signal, sys, time
if not os.fork():
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if not os.fork():
        open("grandchild", "w").write(str(os.getpid()))
        time.sleep(600)
    time.sleep(600)
while not os.path.exists("grandchild") or not open("grandchild").read():
    time.sleep(0.01)
"""


def run(folder: Path, program: str, timeout: float = 30.0, max_output: int = 1000) -> AgentRun:
    command = [sys.executable, "-c", program]
    call = run_agent(
        command, env=VARIABLES, folder=str(folder), timeout=timeout, max_output=max_output
    )
    return asyncio.run(call)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("program", "failure", "reason"),
    [
        ("print('hello')", None, "it ended with exit code 0"),
        (
            "raise KeyError('task')",
            FAILED,
            "it ended with exit code 1: KeyError: 'task' (<string>:1)",
        ),
        ("import os; os.kill(os.getpid(), 9)", FAILED, "it ended with exit code 137"),
        ("while True: print('no' * 1000)", FLOODED, "it printed more than `max_output` bytes"),
        ("import time; time.sleep(60)", TIMEOUT, "it was ended after 2 s (`timeout`)"),
    ],
)
def test_end_of_agent_is_known(tmp_path, program, failure, reason):
    # only one is meant to be ended: a busy machine starts a Python in several seconds
    result = run(tmp_path, program, timeout=2.0 if failure == TIMEOUT else 30.0)
    assert result.failure == failure
    assert result.reason.startswith(reason)
    assert len(result.output) <= 1000


def test_program_that_is_missing_is_a_failure(tmp_path):
    call = run_agent(
        ["no_such_program"], env=VARIABLES, folder=str(tmp_path), timeout=9.0, max_output=100
    )
    result = asyncio.run(call)
    assert result.failure == FAILED
    assert "cannot start no_such_program: No such file" in result.reason


def test_agent_sees_nothing_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_ATROPOS_TOKEN", "secret")
    result = run(tmp_path, "import json, os; print(json.dumps([os.getcwd(), [*os.environ]]))")
    folder, names = json.loads(result.output)
    assert folder == str(tmp_path)
    assert set(names) <= {*VARIABLES, "LC_CTYPE"}


@pytest.mark.parametrize("ends", ["", "time.sleep(600)"])
def test_grandchildren_end_with_agent(tmp_path, ends):
    written = tmp_path / "grandchild"
    for timeout in (1.5, 6.0, 24.0) if ends else (30.0,):
        result = run(tmp_path, FORKS + ends, timeout)
        assert result.failure == (TIMEOUT if ends else None)
        if written.exists():  # a busy machine may not get that far in a short time
            break
    assert not is_alive(int(written.read_text()))


def test_cancelled_agent_is_ended(tmp_path):
    async def cancelled() -> None:
        task = asyncio.create_task(
            run_agent(
                [sys.executable, "-c", FORKS + "time.sleep(600)"],
                env=VARIABLES,
                folder=str(tmp_path),
                timeout=60.0,
                max_output=100,
            )
        )
        while not (tmp_path / "grandchild").exists():
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert not is_alive(int((tmp_path / "grandchild").read_text()))


def test_agent_that_kills_its_guard_is_ended(tmp_path):
    program = FORKS + (
        "open('left', 'w').write(str(os.getpgid(int(open('grandchild').read()))))\n"
        "open('agent', 'w').write(str(os.getpid()))\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "os.kill(os.getppid(), signal.SIGKILL); time.sleep(600)"
    )
    result = run(tmp_path, program, timeout=20.0)
    assert result.failure == FAILED
    assert not is_alive(int((tmp_path / "agent").read_text()))
    # What has left the session and has no guard any more belongs to the nearest guard above, that
    # of the environment. Here, there is none.
    os.killpg(int((tmp_path / "left").read_text()), signal.SIGKILL)


def test_agents_end_when_their_environment_is_killed(tmp_path):
    """The environment's process is killed outright: the guards notice it."""
    program = f"""
import asyncio, sys
from trl_atropos.agents.agent_process import run_agent
call = run_agent(
    [sys.executable, "-c", {FORKS + "time.sleep(600)"!r}],
    env={VARIABLES!r}, folder={str(tmp_path)!r}, timeout=60.0, max_output=100,
)
asyncio.run(call)
"""
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", program], os.environ)
    grandchild = tmp_path / "grandchild"
    wait_for(lambda: grandchild.exists() and grandchild.read_text())
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    wait_for(lambda: not is_alive(int(grandchild.read_text())))


def wait_for(condition, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_task_that_is_too_long_for_a_command_has_a_fix(tmp_path):
    start = start_guarded(["true", "x" * (1 << 18)], env=VARIABLES, cwd=str(tmp_path))
    with pytest.raises(AtroposTrainingError) as caught:
        asyncio.run(start)
    assert "{task_file}" in caught.value.fix
