"""A guard: the small process between the trainer and one service. It leaves nothing behind.

`trl_atropos.services.manager` runs this file by its path, once per service: `guard.py [options] --
command ...`. The guard starts the command, waits for it and passes its exit code on (128 + n for
signal n). When it is asked to stop (SIGTERM, SIGINT, SIGHUP), when the process `--parent` is gone,
or when the command ends while its children live on, the guard sends SIGTERM to every process of the
service, SIGKILL `--grace` seconds later, and removes the files in /dev/shm that only they had
mapped: a killed process unlinks neither its shared memory nor its semaphores.

With `--restarts N`, a command that ends by itself is started again, after 1, 2, 4 ... seconds, up
to N times within an hour, unless it lived less than `--settled` seconds, or the file `--stage` says
that it has never come further than `starting`. The guard writes to the file descriptor `--report`
the line `ended CODE LIVED WAIT` before the wait, and `started` after it.
The folder `--scratch` is removed at the end. With `--user`, a name or a number, the command runs as
that user, which only root may ask for. The guard stays as it is: the command cannot end it.

Linux reports the death of the *thread* that started a process: start guards from the main thread.
This file imports the standard library only: a guard is up in some 20 ms.
"""

import argparse
import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36

SHM = "/dev/shm"
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# blocked, so that they wait until the guard asks for them
WAITED_FOR = (*STOP_SIGNALS, signal.SIGCHLD)

LOOK_EVERY = 2.0  # seconds between two looks at the parent and at the mapped files
LOOK_SHARE = 0.01  # of one core, at most, on a machine with very many processes
POLL = 0.05  # seconds
RESTART_WINDOW = 3600.0  # seconds within which `--restarts` counts
FIRST_WAIT = 1.0  # seconds before the first restart; doubles with each within the window
KILL_DEADLINE = 5.0  # seconds that the kernel may take to tear down what was killed

STARTING = "starting"  # as in `environment_site/environment_stage.py`

EXIT_PARENT_GONE = 125
EXIT_CANNOT_START = 127


def prctl(option: int, value: int) -> None:
    """Calls Linux' `prctl(2)`."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")


def close_to_others() -> None:
    """Closes this process' variables, memory and open files in /proc to all but root. Programs that
    it starts are open again, once they are executed."""
    prctl(PR_SET_DUMPABLE, 0)


def members(guard: int) -> list[int]:
    """Returns the living processes of a guard's service: those in the guard's session, and those
    that descend from it."""
    living = set()
    parents = {}
    service = {guard}
    for pid in _all_processes():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
            # The command's name, in parentheses, may hold anything: the fields begin after the last
            # one.
            _pid_and_name, _, fields = file.read().rpartition(b")")
            state, parent, _group, session, *_ = fields.split()
            parents[pid] = int(parent)
            if int(session) == guard:
                service.add(pid)
            if state not in b"ZX":
                living.add(pid)
    known = 0
    while known < len(service):  # children, then grandchildren, until there are no more
        known = len(service)
        service |= {pid for pid, parent in parents.items() if parent in service}
    service.remove(guard)
    return sorted(living & service)


def _all_processes() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def signal_all(pids: list[int], signum: int) -> None:
    """Sends a signal to each of the processes that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)


class SharedFiles:
    """The files in /dev/shm that a service mapped. Removes them once no process has them mapped.

    It knows them by inode: `sem_open` maps a semaphore under a temporary name. Files that existed
    before this object belong to others, and so do files in folders of /dev/shm: people keep models
    there.
    """

    def __init__(self) -> None:
        self._noted: set[int] = set()
        self._others = {inode for _path, inode in _shm_files()}

    def note(self, pids: list[int]) -> None:
        """Remembers what these processes have mapped now. A process that crashed cannot be asked
        any more."""
        for pid in pids:
            self._noted |= _mapped(pid) - self._others

    def remove(self) -> None:
        """Unlinks the remembered files that still exist and are mapped by no living process."""
        left = [(path, inode) for path, inode in _shm_files() if inode in self._noted]
        if not left:
            return
        in_use = set()
        for pid in _all_processes():
            in_use |= _mapped(pid)
        for path, inode in left:
            if inode not in in_use:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)


def _shm_files() -> list[tuple[str, int]]:
    """Returns path and inode of this user's files in /dev/shm, POSIX semaphores included."""
    files = []
    with contextlib.suppress(FileNotFoundError), os.scandir(SHM) as entries:
        for entry in entries:
            if not entry.is_file(follow_symlinks=False):
                continue
            with contextlib.suppress(FileNotFoundError):
                owner = entry.stat(follow_symlinks=False).st_uid
                if owner == os.getuid():
                    files.append((entry.path, entry.inode()))
    return files


def _mapped(pid: int) -> set[int]:
    """Returns the inodes of the files in /dev/shm that a process has mapped."""
    inodes = set()
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", "rb") as maps:
        device = os.stat(SHM).st_dev
        for line in maps:
            if b" /dev/shm/" in line:
                _range, _mode, _offset, number, inode, _path = line.split(maxsplit=5)
                major, minor = number.split(b":")
                if os.makedev(int(major, 16), int(minor, 16)) == device:
                    inodes.add(int(inode))
    return inodes


def _pause() -> None:
    time.sleep(POLL)


def end_service(
    guard: int, grace: float, shared: SharedFiles, pause: Callable[[], None] = _pause
) -> list[int]:
    """Ends every process of a guard's service, but not the guard, with SIGTERM and `grace` seconds
    later SIGKILL, and removes its files in /dev/shm. Calls `pause` between two looks. Returns the
    processes that are left."""
    pids = members(guard)
    shared.note(pids)
    signal_all(pids, signal.SIGTERM)
    kill_at = time.monotonic() + grace
    while pids and time.monotonic() < kill_at:
        pause()
        pids = members(guard)
    shared.note(pids)
    give_up_at = time.monotonic() + KILL_DEADLINE
    while pids and time.monotonic() < give_up_at:
        signal_all(pids, signal.SIGKILL)  # again each time: a process may have forked in between
        pause()
        pids = members(guard)
    shared.remove()
    return pids


class Guard:
    """Keeps one service, from its first start to its last process."""

    def __init__(self, options: argparse.Namespace, command: list[str]) -> None:
        self._options = options
        self._command = command
        self._service = 0  # process id
        self._exit_code: int | None = None  # None while the service runs
        self._stop_requested = False
        signal.pthread_sigmask(signal.SIG_SETMASK, WAITED_FOR)
        # A process that ignores SIGCHLD learns no exit codes.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def run(self) -> int:
        """Runs the service, again if it may be restarted. Returns the exit code to pass on."""
        options = self._options
        program = self._command[0]
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if self._orphaned():
            _say(f"the parent, process {options.parent}, is gone: {program} is not started")
            return EXIT_PARENT_GONE
        # Grandchildren whose parent ends become children of the guard, whatever session they are
        # in.
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        restarts = []  # when, within RESTART_WINDOW
        while True:
            lived, left = self._live()
            code = self._exit_code
            if code is None:
                code = 128 + signal.SIGKILL
            now = time.monotonic()
            restarts = [moment for moment in restarts if now - moment < RESTART_WINDOW]
            has_settled = lived >= options.settled
            may_restart = has_settled and len(restarts) < options.restarts
            if left or self._unwanted() or not may_restart:
                return code
            if self._never_registered():
                _say(f"{program} ended before it had ever registered, and is not started again")
                return code
            wait = FIRST_WAIT * 2 ** len(restarts)
            restarts.append(now)
            _say(f"{program} ended with exit code {code}; starting it again in {wait:g} s")
            self._report(f"ended {code} {lived:.1f} {wait:g}")
            while not self._unwanted():
                seconds = now + wait - time.monotonic()
                if seconds <= 0:
                    break
                self._wait(seconds)
            if self._unwanted():
                return code
            self._report("started")

    def _orphaned(self) -> bool:
        return os.getppid() != self._options.parent

    def _unwanted(self) -> bool:
        return self._stop_requested or self._orphaned()

    def _never_registered(self) -> bool:
        """Returns whether the service is known to have ended in its set-up each time. Only
        environments that load our `sitecustomize.py` write the file."""
        with contextlib.suppress(OSError), open(self._options.stage) as file:
            return file.read() == STARTING
        return False

    def _report(self, line: str) -> None:
        with contextlib.suppress(OSError):  # there is no descriptor, or the parent is gone
            os.write(self._options.report, f"{line}\n".encode())

    def _live(self) -> tuple[float, list[int]]:
        """Runs the service once. Returns the seconds that it lived, and those of its processes that
        could not be ended."""
        shared = SharedFiles()
        self._exit_code = None
        self._service = _start(self._command, self._options.user)
        started = time.monotonic()
        while self._exit_code is None and not self._unwanted():
            look_began = time.monotonic()
            shared.note(members(os.getpid()))
            look_ended = time.monotonic()
            seconds = look_ended - look_began
            pause = max(LOOK_EVERY, seconds / LOOK_SHARE)
            self._wait_for_next_look(look_ended + pause)
        lived = time.monotonic() - started
        if self._orphaned():
            parent = self._options.parent
            _say(f"the parent, process {parent}, is gone: stopping {self._command[0]}")
        grace = self._options.grace
        left = end_service(os.getpid(), grace, shared, self._pause)
        if left:
            _say(f"processes {left} are still there {KILL_DEADLINE:.0f} s after SIGKILL")
        return lived, left

    def _wait_for_next_look(self, moment: float) -> None:
        """Waits until `moment`, or until the service ends or a stop is requested. Orphans that end
        wake the guard, too, but are no reason for a look."""
        while self._exit_code is None and not self._stop_requested:
            seconds = moment - time.monotonic()
            if seconds <= 0:
                return
            self._wait(seconds)

    def _pause(self) -> None:
        self._wait(POLL)

    def _wait(self, seconds: float) -> None:
        """Sleeps until a signal comes or the time is over, then reaps the children that ended."""
        info = signal.sigtimedwait(WAITED_FOR, seconds)
        if info is not None and info.si_signo in STOP_SIGNALS:
            self._stop_requested = True
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._service:
                    code = os.waitstatus_to_exitcode(status)
                    if code < 0:
                        code = 128 - code
                    self._exit_code = code


def _start(command: list[str], user: str) -> int:
    """Starts the service in a process group of its own, in the guard's session, as another `user`
    if one is named. Returns its process id."""
    guard = os.getpid()
    pid = os.fork()
    if pid != 0:
        return pid
    try:
        # A shell's `&` leaves SIGINT and SIGQUIT ignored, nohup SIGHUP, Python SIGPIPE: an ignored
        # signal stays so.
        for signum in (*WAITED_FOR, signal.SIGQUIT, signal.SIGPIPE):
            signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.setpgid(0, 0)
        if user:
            _become(user)
        # after that: the kernel forgets it when a process becomes another user's
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # the guard itself may be killed
        if os.getppid() == guard:
            os.execvp(command[0], command)
    except OSError as error:
        _say(f"cannot start {command[0]}: {error.strerror}")
    os._exit(EXIT_CANNOT_START)


def _become(user: str) -> None:
    """Makes this process another user's, with that user's groups, or none for a mere number."""
    import pwd

    if user.isdigit():
        number = int(user)
        os.setgroups([])
        os.setgid(number)
        os.setuid(number)
        return
    entry = pwd.getpwnam(user)
    os.initgroups(user, entry.pw_gid)
    os.setgid(entry.pw_gid)
    os.setuid(entry.pw_uid)


def _say(text: str) -> None:
    """Writes a line to the service's log, if that can be: the disk may be full, and the reader of a
    pipe ends with the parent."""
    with contextlib.suppress(OSError):
        os.write(2, f"guard: {text}\n".encode())


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="guard.py", usage="guard.py --parent PID --grace SECONDS -- command ..."
    )
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--grace", type=float, required=True)
    parser.add_argument("--restarts", type=int, default=0)
    parser.add_argument("--settled", type=float, default=0.0)
    parser.add_argument("--report", type=int, default=-1)
    parser.add_argument("--scratch", default="")
    parser.add_argument("--stage", default="")
    parser.add_argument("--user", default="")
    if "--" not in argv[:-1]:
        parser.error("the command to guard is missing: put it after `--`")
    split = argv.index("--")
    options = parser.parse_args(argv[:split])
    close_to_others()  # its variables may hold a token or the URL of a session
    if os.getsid(0) != os.getpid():
        os.setsid()  # the session is what is ended: it must hold the service and nothing else
    if options.report >= 0:
        os.set_inheritable(options.report, False)  # the service must not inherit it
    code = Guard(options, argv[split + 1 :]).run()
    if options.scratch:
        import shutil  # takes as long as all other imports

        shutil.rmtree(options.scratch, ignore_errors=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
