"""The guard, against real processes and real signals."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from trl_atropos.services.guard import SharedFiles, members, signal_all
from trl_atropos.services.manager import GUARD

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the kernel's parent-death signal is Linux'"
)

GONE_WITHIN = 15.0

PARENT = """
import os, subprocess, sys, time
guard = [sys.executable, "-I", "-S", {guard!r}, "--parent", str(os.getpid()), "--grace", "1"]
guard = subprocess.Popen([*guard, "--", sys.executable, *sys.argv[1:]], start_new_session=True)
open("guard.pid.part", "w").write(str(guard.pid))
os.rename("guard.pid.part", "guard.pid")
sys.exit(guard.wait())
"""

STUBBORN_FAMILY = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = "import time; time.sleep(600)"  # an ignored SIGTERM is inherited
kids = [subprocess.Popen([sys.executable, "-c", child], start_new_session=own) for own in (False, True)]
open("service.json.part", "w").write(str([os.getpid(), *(kid.pid for kid in kids)]))
os.rename("service.json.part", "service.json")
time.sleep(600)
"""

SHARING = """
import json, multiprocessing, os, sys, time
from multiprocessing import resource_tracker, shared_memory
shared = shared_memory.SharedMemory(create=True, size=4096)
lock = multiprocessing.get_context("spawn").Semaphore()
theirs = shared_memory.SharedMemory(name=sys.argv[1])
# Without the tracker, as when everything is killed at once.
resource_tracker.unregister(shared._name, "shared_memory")
resource_tracker.unregister(theirs._name, "shared_memory")
resource_tracker.unregister(lock._semlock.name, "semaphore")
paths = ["/dev/shm/" + shared.name, "/dev/shm/sem." + lock._semlock.name.lstrip("/")]
open("service.json.part", "w").write(json.dumps(paths))
os.rename("service.json.part", "service.json")
time.sleep(600)
"""


def until(condition, what: str, seconds: float = GONE_WITHIN):
    """Wait for a condition; returns what it returned."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)
    return result


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def launch(tmp_path):
    """Start a parent which starts a guard which starts a Python program; ends what a failed test
    leaves."""
    parents = []

    def launch(program: str, *arguments: str, parent: str = PARENT) -> subprocess.Popen:
        (tmp_path / "service.py").write_text(program)
        script = parent.format(guard=str(GUARD))
        parents.append(
            subprocess.Popen([sys.executable, "-c", script, "service.py", *arguments], cwd=tmp_path)
        )
        return parents[-1]

    yield launch
    for parent in parents:
        parent.kill()
        parent.wait()
    if (tmp_path / "guard.pid").exists():
        guard = int((tmp_path / "guard.pid").read_text())
        # the guard, whose parent is gone, ends them, too
        signal_all(members(guard), signal.SIGKILL)


@pytest.fixture
def their_shared_memory():
    memory = shared_memory.SharedMemory(
        create=True, size=4096, name=f"theirs-{uuid.uuid4().hex[:8]}"
    )
    yield memory
    memory.close()
    memory.unlink()


def service_says(tmp_path: Path) -> list:
    file = tmp_path / "service.json"
    return json.loads(until(lambda: file.exists() and file.read_text(), "the service is up"))


def guard_pid(tmp_path: Path) -> int:
    file = tmp_path / "guard.pid"
    until(file.exists, "the guard is up")
    return int(file.read_text())


def test_service_and_grandchildren_end_with_parent(launch, tmp_path):
    parent = launch(STUBBORN_FAMILY)
    pids = service_says(tmp_path)
    guard = guard_pid(tmp_path)
    parent.kill()
    until(
        lambda: not any(map(alive, [guard, *pids])),
        "the guard, the service and its children are gone",
    )


def test_shared_memory_of_service_goes_with_parent(launch, tmp_path, their_shared_memory):
    parent = launch(SHARING, their_shared_memory.name)
    paths = service_says(tmp_path)
    assert all(map(os.path.exists, paths))
    parent.kill()
    until(lambda: not any(map(os.path.exists, paths)), "the files in /dev/shm are gone")


def test_foreign_shared_memory_is_left_alone(launch, tmp_path, their_shared_memory):
    parent = launch(SHARING, their_shared_memory.name)
    service_says(tmp_path)
    guard = guard_pid(tmp_path)
    their_shared_memory.close()  # not even mapped by anyone but the service, only older
    parent.kill()
    until(lambda: not alive(guard), "the guard is done")
    assert os.path.exists(f"/dev/shm/{their_shared_memory.name}")


def test_file_mapped_by_living_process_stays():
    noted = SharedFiles()
    memory = shared_memory.SharedMemory(create=True, size=4096)
    try:
        noted.note([os.getpid()])
        noted.remove()
        assert os.path.exists(f"/dev/shm/{memory.name}")
        memory.close()
        noted.remove()
        assert not os.path.exists(f"/dev/shm/{memory.name}")
    finally:
        memory.close()
        with pytest.raises(FileNotFoundError):
            memory.unlink()


def test_exit_code_of_service_is_passed_on(launch):
    assert launch("import sys; sys.exit(7)").wait(GONE_WITHIN) == 7


def test_fatal_signal_becomes_128_plus_its_number(launch):
    assert launch("import os; os.kill(os.getpid(), 9)").wait(GONE_WITHIN) == 128 + 9


def test_missing_command_gives_127_and_message(tmp_path):
    command = [
        sys.executable,
        str(GUARD),
        "--parent",
        str(os.getpid()),
        "--grace",
        "1",
        "--",
        "no-such-program",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, start_new_session=True, timeout=GONE_WITHIN
    )
    assert done.returncode == 127
    assert "cannot start no-such-program: No such file or directory" in done.stderr


def test_orphaned_guard_starts_nothing(tmp_path):
    command = [
        sys.executable,
        str(GUARD),
        "--parent",
        "1999999999",
        "--grace",
        "1",
        "--",
        "touch",
        "started",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, start_new_session=True, timeout=GONE_WITHIN
    )
    assert done.returncode == 125
    assert not (tmp_path / "started").exists()


def test_children_outliving_service_are_ended(launch, tmp_path):
    parent = launch(STUBBORN_FAMILY)
    service, *children = service_says(tmp_path)
    os.kill(service, signal.SIGKILL)
    assert parent.wait(GONE_WITHIN) == 128 + signal.SIGKILL
    assert not any(map(alive, children))


def test_service_ends_with_killed_guard(launch, tmp_path):
    launch("import os, time; open('service.json', 'w').write(f'[{os.getpid()}]'); time.sleep(600)")
    [service] = service_says(tmp_path)
    os.kill(guard_pid(tmp_path), signal.SIGKILL)
    until(lambda: not alive(service), "the service is gone")


def test_service_has_no_ignored_or_blocked_signals(launch, tmp_path):
    ignoring = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    blocking = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
    report = (
        "import json, signal\n"
        "state = [signal.getsignal(signal.SIGINT) is signal.default_int_handler,"
        " len(signal.pthread_sigmask(signal.SIG_BLOCK, []))]\n"
        "open('service.json', 'w').write(json.dumps(state))\n"
    )
    launch(report, parent=ignoring + blocking + PARENT).wait(GONE_WITHIN)
    assert service_says(tmp_path) == [True, 0]


def test_waiting_guard_takes_hardly_any_cpu_time(launch, tmp_path):
    launch("import os, time; open('service.json', 'w').write(f'[{os.getpid()}]'); time.sleep(600)")
    service_says(tmp_path)
    stat = Path(f"/proc/{guard_pid(tmp_path)}/stat")

    def ticks() -> int:
        return sum(map(int, stat.read_text().rpartition(")")[2].split()[11:13]))

    before = ticks()
    time.sleep(5)
    assert ticks() - before <= 0.05 * 5 * os.sysconf("SC_CLK_TCK")
