"""A guard: the small process between the trainer and one service, which leaves nothing behind.

`trl_atropos.services.manager` runs this file by its path, once per service:

    python -I -S guard.py --parent PID --grace SECONDS [--restarts N --settled SECONDS --report FD] -- command ...

The guard starts the command, waits for it and passes its exit code on (128 + n for signal n). When it is told to stop
(SIGTERM, SIGINT, SIGHUP), when the parent is gone (SIGKILL included), or when the command ends while its children live
on, the guard sends SIGTERM to every process of the service, SIGKILL `--grace` seconds later, and then removes the
files in /dev/shm that only they had mapped: a killed process unlinks neither its shared memory nor its semaphores.

With `--restarts`, a command that ends by itself is started again, after 1, 2, 4 ... seconds, up to N times within an
hour; one that ended in less than `--settled` seconds is not, because it would only do so again. It is the guard that
does this, because of what comes next. What it does is written to the file descriptor `--report`, one line each:
`ended CODE LIVED WAIT` before it waits to start again, `started` when it has. The folder `--scratch` is removed at the
end.

Linux reports the death of the *thread* that started a process, not of the process: guards must be started from the
main thread, or they end their service when the starting thread does. Standard library only: a guard is up in some
20 ms, and importing the package is not its business.
"""

import argparse
import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

SHM = "/dev/shm"
LINUX = sys.platform == "linux"
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

LOOK_EVERY = 2.0  # seconds between two looks at the parent and at the mapped files
LOOK_SHARE = 0.01  # of one core, at most, on a machine with very many processes
POLL = 0.05
RESTART_WINDOW = 3600.0  # seconds within which restarts count against what is allowed
FIRST_WAIT = 1.0  # seconds before the first restart; doubles with each within the window
KILL_DEADLINE = 5.0  # seconds that the kernel may take to tear down what was killed

EXIT_PARENT_GONE = 125
EXIT_CANNOT_START = 127


def prctl(option: int, value: int) -> None:
    """Call Linux' `prctl(2)`; does nothing on other systems, where the guard's look at its parent has to do."""
    if not LINUX:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")


def process_table() -> dict[int, tuple[str, int, int]]:
    """State, parent and session of every process, by process id."""
    table = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as file:
            # The command's name, in parentheses, may hold anything: the fields begin after the last one.
            state, parent, _group, session = file.read().rpartition(b")")[2].split()[:4]
            table[int(entry)] = (state.decode(), int(parent), int(session))
    return table


def members(root: int, group: int | None = None) -> list[int]:
    """Living processes of the service whose guard is `root`: those in its session, and those descending from it.

    Where there is no /proc, the answer is the negative `group` while that process group lives, which `os.kill` takes.
    """
    if not LINUX:
        return [-group] if group is not None and _exists(-group) else []
    table = process_table()
    children: dict[int, list[int]] = {}
    for pid, (_state, parent, _session) in table.items():
        children.setdefault(parent, []).append(pid)
    found = {pid for pid, (_state, _parent, session) in table.items() if session == root}
    pending = [root, *found]
    while pending:
        born = [pid for pid in children.get(pending.pop(), ()) if pid not in found]
        found.update(born)
        pending.extend(born)
    return sorted(pid for pid in found - {root} if table[pid][0] not in "ZX")


def signal_all(pids: list[int], signum: int) -> None:
    """Send a signal to each of the processes that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class SharedFiles:
    """The files in /dev/shm that a service mapped, and their removal once nobody has them mapped.

    Files are known by inode: `sem_open` maps a semaphore under a temporary name, which is gone when it returns. Files
    that were there when this object was made are somebody else's, and so are those in folders of /dev/shm: people keep
    models there.
    """

    def __init__(self) -> None:
        self._noted: set[int] = set()
        self._others = {inode for _path, inode in _shm_files()}

    def note(self, pids: list[int]) -> None:
        """Remember what these processes have mapped now; a crashed process can no longer be asked."""
        for pid in pids:
            self._noted |= _mapped(pid) - self._others

    def remove(self) -> None:
        """Unlink the remembered files that are still there, are ours, and are mapped by no living process."""
        left = [(path, inode) for path, inode in _shm_files() if inode in self._noted]
        in_use = set().union(*(_mapped(pid) for pid in process_table())) if left else set()
        for path, inode in left:
            if inode not in in_use:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)


def _shm_files() -> list[tuple[str, int]]:
    """Path and inode of this user's files in /dev/shm, POSIX semaphores included."""
    files = []
    with contextlib.suppress(FileNotFoundError), os.scandir(SHM) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                if entry.is_file(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.getuid():
                    files.append((entry.path, entry.inode()))
    return files


def _mapped(pid: int) -> set[int]:
    """Inodes of the files in /dev/shm that a process has mapped."""
    found = set()
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", "rb") as maps:
        device = os.stat(SHM).st_dev
        for line in maps:
            if b" /dev/shm/" in line:
                _range, _mode, _offset, number, inode, _path = line.split(maxsplit=5)
                if os.makedev(*(int(part, 16) for part in number.split(b":"))) == device:
                    found.add(int(inode))
    return found


def end_service(
    root: int,
    grace: float,
    shared: SharedFiles,
    group: int | None = None,
    pause: Callable[[], object] = lambda: time.sleep(POLL),
) -> list[int]:
    """End every process of the service guarded by `root` and remove its files in /dev/shm.

    Args:
        root: Process id of the guard; it is itself spared.
        grace: Seconds between SIGTERM and SIGKILL.
        shared: What the service has mapped so far.
        group: The service's process group, for systems without /proc.
        pause: Called between two looks; the guard reaps its children here.

    Returns:
        Processes that were still there `KILL_DEADLINE` seconds after SIGKILL.
    """
    pids = members(root, group)
    shared.note(pids)
    signal_all(pids, signal.SIGTERM)
    kill_at = time.monotonic() + grace
    while pids and time.monotonic() < kill_at:
        pause()
        pids = members(root, group)
    shared.note(pids)
    give_up_at = time.monotonic() + KILL_DEADLINE
    while pids and time.monotonic() < give_up_at:
        signal_all(pids, signal.SIGKILL)  # again each time: a process may have forked in between
        pause()
        pids = members(root, group)
    shared.remove()
    return pids


class Restarts:
    """When a service that ended is started again.

    Args:
        allowed: Restarts within `RESTART_WINDOW` seconds.
        settled: Seconds that it must have lived.
        report: File descriptor that is told of them, -1 for none.
    """

    def __init__(self, allowed: int = 0, settled: float = 0.0, report: int = -1) -> None:
        self._allowed = allowed
        self._settled = settled
        self._report = report
        self._times: list[float] = []
        if report >= 0:
            os.set_inheritable(report, False)  # it is the guard's, not the service's

    def wait_after(self, lived: float) -> float | None:
        """Seconds to wait before the restart that is due now; `None` if there is to be none."""
        now = time.monotonic()
        self._times = [moment for moment in self._times if now - moment < RESTART_WINDOW]
        if lived < self._settled or len(self._times) >= self._allowed:
            return None
        self._times.append(now)
        return FIRST_WAIT * 2 ** (len(self._times) - 1)

    def tell(self, line: str) -> None:
        """Write a line to who asked for reports. The parent may be gone: then nobody wants to know."""
        if self._report >= 0:
            with contextlib.suppress(OSError):
                os.write(self._report, f"{line}\n".encode())


class Guard:
    """One service, from its first start to its last process."""

    def __init__(self, parent: int, grace: float, command: list[str], restarts: Restarts) -> None:
        self._parent = parent
        self._grace = grace
        self._command = command
        self._restarts = restarts
        self._shared = SharedFiles()
        self._service = 0
        self._lived = 0.0  # seconds, the last time it ran
        self._exit_code: int | None = None
        self._asked_to_stop = False
        self._wake, wake_end = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(wake_end, False)
        for signum in (*STOP_SIGNALS, signal.SIGCHLD):
            signal.signal(signum, lambda *_: None)  # the byte in the pipe is the message
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the mask is inherited; a blocked SIGTERM would never come

    def run(self) -> int:
        """Run the service; returns the exit code to pass on."""
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != self._parent:
            _say(f"process {self._parent}, which was to be the parent, is gone: {self._command[0]} is not started")
            return EXIT_PARENT_GONE
        # Grandchildren whose parent dies become children of the guard, wherever they moved to: none is lost sight of.
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        while self._live() and self._comes_back():
            pass
        return 128 + signal.SIGKILL if self._exit_code is None else self._exit_code

    def _over(self) -> bool:
        """Whether the service is no longer wanted."""
        return self._asked_to_stop or os.getppid() != self._parent

    def _comes_back(self) -> bool:
        """After the service has ended: wait until it is to be started again. False if it is not."""
        wait = None if self._over() else self._restarts.wait_after(self._lived)
        if wait is None:
            return False
        _say(f"{self._command[0]} ended with exit code {self._exit_code}; starting it again in {wait:g} s")
        self._restarts.tell(f"ended {self._exit_code} {self._lived:.1f} {wait:g}")
        deadline = time.monotonic() + wait
        while not self._over() and (left := deadline - time.monotonic()) > 0:
            self._wait(left)
        if self._over():
            return False
        self._restarts.tell("started")
        return True

    def _live(self) -> bool:
        """One life of the service, from its start to its last process. Whether nothing of it is left."""
        self._exit_code, self._shared = None, SharedFiles()
        self._service, started = _start(self._command), time.monotonic()
        look_every = LOOK_EVERY
        while self._exit_code is None and not self._over():
            began = time.monotonic()
            self._shared.note(members(os.getpid(), self._service))
            look_every = max(LOOK_EVERY, (time.monotonic() - began) / LOOK_SHARE)
            self._wait_until(time.monotonic() + look_every)
        self._lived = time.monotonic() - started
        if os.getppid() != self._parent:
            _say(f"the parent, process {self._parent}, is gone: stopping {self._command[0]}")
        left = end_service(os.getpid(), self._grace, self._shared, self._service, lambda: self._wait(POLL))
        if left:
            _say(f"processes {left} are still there {KILL_DEADLINE:.0f} s after SIGKILL")
        return not left

    def _wait_until(self, deadline: float) -> None:
        """Sleep until the next look, or until there is something to do; orphans that end are nothing to do."""
        while self._exit_code is None and not self._asked_to_stop and (left := deadline - time.monotonic()) > 0:
            self._wait(left)

    def _wait(self, seconds: float) -> None:
        """Sleep until a signal comes or the time is over, then reap whoever ended."""
        select.select([self._wake], [], [], seconds)
        with contextlib.suppress(BlockingIOError):
            if set(os.read(self._wake, 4096)) & set(STOP_SIGNALS):
                self._asked_to_stop = True
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid == self._service:
                    code = os.waitstatus_to_exitcode(status)
                    self._exit_code = code if code >= 0 else 128 - code


def _start(command: list[str]) -> int:
    """Start the service in a process group of its own, in the guard's session."""
    guard = os.getpid()
    pid = os.fork()
    if pid != 0:
        return pid
    try:
        # A shell's `&` leaves SIGINT and SIGQUIT ignored, nohup SIGHUP, Python SIGPIPE: an ignored signal stays so.
        for signum in (*STOP_SIGNALS, signal.SIGQUIT, signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(signum, signal.SIG_DFL)
        os.setpgid(0, 0)
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # the guard itself may be killed
        if os.getppid() == guard:
            os.execvp(command[0], command)
    except OSError as error:
        _say(f"cannot start {command[0]}: {error.strerror}")
    os._exit(EXIT_CANNOT_START)


def _say(text: str) -> None:
    sys.stderr.write(f"guard: {text}\n")
    sys.stderr.flush()


def main(argv: list[str]) -> int:
    """Parse the command line and guard one service."""
    parser = argparse.ArgumentParser(prog="guard.py", usage="guard.py --parent PID --grace SECONDS -- command ...")
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--grace", type=float, required=True)
    parser.add_argument("--restarts", type=int, default=0)
    parser.add_argument("--settled", type=float, default=0.0)
    parser.add_argument("--report", type=int, default=-1)
    parser.add_argument("--scratch", default="")
    if "--" not in argv[:-1]:
        parser.error("the command to guard is missing: put it after `--`")
    split = argv.index("--")
    options = parser.parse_args(argv[:split])
    if os.getsid(0) != os.getpid():
        os.setsid()  # the session is what is ended: it must hold the service and nothing else
    restarts = Restarts(options.restarts, options.settled, options.report)
    code = Guard(options.parent, options.grace, argv[split + 1 :], restarts).run()
    if options.scratch:
        import shutil  # takes as long as all of the start

        shutil.rmtree(options.scratch, ignore_errors=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
