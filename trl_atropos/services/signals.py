"""How a run ends when somebody wants it to end: Ctrl-C, SIGTERM, a dead launcher, a dead service.

`trl_atropos.train` calls `die_with_launcher` before anything else and `install_handlers` before it starts a service.
From then on every wish to end arrives as one exception in the main thread, once; `finally` blocks do the rest.
Standard library only: a signal that comes while torch is being imported must find its handler.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from trl_atropos.services.guard import LINUX, PR_SET_PDEATHSIG, prctl

LAUNCHER_SCRIPTS = ("accelerate", "accelerate-launch", "torchrun")
LAUNCHER_MODULES = ("accelerate", "torch.distributed")
LAUNCHER_FOLDERS = ("/accelerate/commands/", "/torch/distributed/")

ECHO_SECONDS = 5.0
"""Signals this close to a first one are taken for its echo, not for a second wish. One Ctrl-C sends several: the
terminal's, the one that torchrun passes on, and SIGTERM when `accelerate launch` is gone (about 1 s later)."""


class Interrupted(SystemExit):
    """The run was asked to end by a signal. Exit code 130 for SIGINT, 143 for SIGTERM."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signum = signal.Signals(signum)


class _State:
    """What the handler knows. There is one: signal handlers belong to the process."""

    def __init__(self) -> None:
        self.installed = False
        self.under_way = False  # an interruption was raised: the clean-up is not to be disturbed
        self.depth = 0  # of `deferred` blocks
        self.kept: BaseException | None = None  # raised when the outermost `deferred` block ends
        self.kept_at = 0.0
        self.echo = ECHO_SECONDS
        self.from_thread: BaseException | None = None  # given to `interrupt_main_with`


_state = _State()


def die_with_launcher() -> None:
    """Have the kernel send SIGTERM to this process when the launcher that started it dies.

    `accelerate launch` passes no signals on: SIGINT, SIGTERM or SIGKILL sent to it alone would leave the trainer
    running. Does nothing when the parent is no launcher (a run started with `nohup ... &` outlives its shell), and on
    systems other than Linux. Call it first thing, from the main thread.
    """
    parent = os.getppid()
    if not LINUX or not _is_launcher(parent):
        return
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before the line above
        os.kill(os.getpid(), signal.SIGTERM)


def _is_launcher(pid: int) -> bool:
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it is gone, or another user's
        return False
    return _runs_launcher(line.decode(errors="replace").rstrip("\0").split("\0"))


def _runs_launcher(argv: list[str]) -> bool:
    """Whether a command line runs `accelerate` or `torchrun`, as a script, a module or a file of theirs."""
    if "python" in os.path.basename(argv[0]):
        argv = argv[1:]
    while argv and argv[0].startswith("-") and argv[0] != "-m":
        argv = argv[2:] if argv[0] in ("-X", "-W") else argv[1:]
    if len(argv) > 1 and argv[0] == "-m":
        return any(argv[1] == name or argv[1].startswith(f"{name}.") for name in LAUNCHER_MODULES)
    script = argv[0] if argv else ""
    return os.path.basename(script) in LAUNCHER_SCRIPTS or any(folder in script for folder in LAUNCHER_FOLDERS)


def install_handlers() -> None:
    """Make SIGINT and SIGTERM raise `Interrupted` in the main thread, the first time; later ones are ignored.

    Also where SIGINT was ignored at start, as a shell's `&` leaves it. Later signals are ignored because a terminal's
    Ctrl-C is followed by the SIGTERM of `die_with_launcher`, which must not break the clean-up.
    """
    global _state
    _state = _State()
    _state.installed = True
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, _handle)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))


def _handle(signum: int, frame: FrameType | None) -> None:
    del frame
    state = _state
    if state.under_way:
        return
    error, state.from_thread = state.from_thread or Interrupted(signum), None
    if state.depth > 0:
        if state.kept is None:
            state.kept, state.kept_at = error, time.monotonic()
            return
        if time.monotonic() - state.kept_at < state.echo:
            return
    state.under_way = True
    raise error


@contextmanager
def deferred(echo: float = ECHO_SECONDS) -> Iterator[None]:
    """Keep signals that arrive inside the block and raise when it ends, so that nothing in it is left half done.

    A second signal, at least `echo` seconds after the first, raises at once: the way out of a block that hangs. Other
    threads than the main one get no signals, and nothing changes for them.

    Args:
        echo: Seconds within which further signals count as part of the first.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    state = _state
    if not state.installed:
        with _keeping_ctrl_c():
            yield
        return
    state.echo = echo
    state.depth += 1
    try:
        yield
    finally:
        state.depth -= 1
        if state.depth == 0 and state.kept is not None and not state.under_way:
            state.under_way = True
            raise state.kept


@contextmanager
def _keeping_ctrl_c() -> Iterator[None]:
    """The same in a program of the user's own, whose handlers are not ours: a first Ctrl-C is kept, a second not."""
    usual = signal.getsignal(signal.SIGINT)
    if not callable(usual):  # ignored, left to the system, or set from outside of Python
        yield
        return
    came: list[int] = []

    def keep(signum: int, frame: FrameType | None) -> None:
        came.append(signum)
        if len(came) > 1:
            usual(signum, frame)

    signal.signal(signal.SIGINT, keep)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if len(came) == 1:
            usual(signal.SIGINT, None)


def interrupt_main_with(error: BaseException) -> None:
    """Raise `error` in the main thread, as a signal would: after a `deferred` block, and not into a clean-up.

    Called by threads which find that the run cannot go on. `install_handlers` must have been called.
    """
    assert _state.installed, "install_handlers() comes first: without it, SIGTERM ends the process"
    _state.from_thread = error
    # To the main thread itself, so that a system call it is blocked in returns.
    signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
