"""Ends a run when something asks for it: Ctrl-C, SIGTERM, a launcher that died, or a service that
died.

`trl_atropos.train` calls `die_with_launcher` before anything else and `install_handlers` before it
starts a service. From then on every request to end arrives as one exception in the main thread,
once; `finally` blocks do the rest. This file imports the standard library only: a signal that comes
while torch is being imported must find its handler.
"""

import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from trl_atropos.services.guard import PR_SET_PDEATHSIG, prctl

LAUNCHER_SCRIPTS = ("accelerate", "accelerate-launch", "torchrun", "trl-atropos")
LAUNCHER_MODULES = ("accelerate", "torch.distributed", "trl_atropos.cli")
LAUNCHER_FOLDERS = ("/accelerate/commands/", "/torch/distributed/")

# Signals within this time after the first count as part of it. One Ctrl-C sends several: the
# terminal's, the one that torchrun passes on, and SIGTERM when `accelerate launch` is gone (about 1
# s later).
ECHO_SECONDS = 5.0
DROPPED_AGAIN_AFTER = 0.05  # seconds after which an exception that Python dropped is raised again


class Interrupted(SystemExit):
    """A signal asked the run to end. Exit code 130 for SIGINT, 143 for SIGTERM."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signum = signal.Signals(signum)


@dataclass
class _State:
    installed: bool = False
    raised: BaseException | None = None  # once it is, nothing may disturb the clean-up
    depth: int = 0  # of nested `deferred` blocks
    kept: BaseException | None = None  # raised when the outermost `deferred` block ends
    kept_at: float = 0.0
    from_thread: BaseException | None = None  # given to `interrupt_main_with`


_state = _State()  # one for the process, to which signal handlers belong
_others_hook = sys.unraisablehook  # the one before ours


def die_with_launcher() -> None:
    """Makes the kernel send SIGTERM to this process when the launcher that started it dies:
    `accelerate launch` passes no signals on. Does nothing under another parent, such as `nohup ...
    &`. Call it first, from the main thread."""
    parent = os.getppid()
    try:
        command = Path(f"/proc/{parent}/cmdline").read_text(errors="replace")
    except OSError:  # it is gone, or another user's
        return
    if _runs_launcher(command.rstrip("\0").split("\0")):
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the line above
            os.kill(os.getpid(), signal.SIGTERM)


def _runs_launcher(argv: list[str]) -> bool:
    """Returns whether a command line runs a launcher, as a script, a module or one of their
    files."""
    if "python" in os.path.basename(argv[0]):
        argv = argv[1:]
    while argv and argv[0].startswith("-") and argv[0] != "-m":
        takes_value = argv[0] in ("-X", "-W")
        argv = argv[2:] if takes_value else argv[1:]
    if not argv:
        return False
    if argv[0] == "-m" and len(argv) > 1:
        module = argv[1]
        return any(module == name or module.startswith(f"{name}.") for name in LAUNCHER_MODULES)
    if os.path.basename(argv[0]) in LAUNCHER_SCRIPTS:
        return True
    return any(folder in argv[0] for folder in LAUNCHER_FOLDERS)


def install_handlers() -> None:
    """Makes the first SIGINT or SIGTERM raise `Interrupted` in the main thread, even if a shell's
    `&` left SIGINT ignored. Ignores later signals: that of `die_with_launcher` would break the
    clean-up after a Ctrl-C."""
    global _state, _others_hook
    _state = _State(installed=True)
    if sys.unraisablehook is not _see_dropped:
        _others_hook = sys.unraisablehook
        sys.unraisablehook = _see_dropped
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, _handle)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))


@contextmanager
def handlers() -> Iterator[None]:
    """Installs the handlers during the block, in a program that has its own before and after.
    Raises `RuntimeError` outside the main thread, which gets no signals."""
    global _state
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("a run must be started from the main thread of its program")
    usual_state = _state
    usual_handlers = {}
    for signum in (signal.SIGINT, signal.SIGTERM):
        usual_handlers[signum] = signal.getsignal(signum)
    usual_hook = sys.unraisablehook
    install_handlers()
    try:
        yield
    finally:
        for signum, handler in usual_handlers.items():
            if handler is not None:  # it was set from outside of Python, and cannot be set again
                signal.signal(signum, handler)
        sys.unraisablehook = usual_hook
        _state = usual_state


def _handle(signum: int, _frame: FrameType | None) -> None:
    state = _state
    if state.raised is not None:
        return
    error = state.from_thread or Interrupted(signum)
    state.from_thread = None
    if state.depth > 0:
        if state.kept is None:
            state.kept = error
            state.kept_at = time.monotonic()
            return
        if time.monotonic() - state.kept_at < ECHO_SECONDS:
            return
    _raise(error)


def _raise(error: BaseException) -> None:
    _state.raised = error
    raise error


def _see_dropped(unraisable: "sys.UnraisableHookArgs") -> None:
    """Called by Python with an exception that it drops, as those of finalizers and of callbacks of
    the garbage collector. A signal may arrive in one: its exception is raised again afterwards."""
    error = unraisable.exc_value
    if error is None or error is not _state.raised:
        _others_hook(unraisable)
        return
    _state.raised = None
    # No `threading.Thread`, of which the finalizer may have interrupted the making.
    _thread.start_new_thread(_raise_again, (_state, error))


def _raise_again(state: _State, error: BaseException) -> None:
    time.sleep(DROPPED_AGAIN_AFTER)
    if _state is state:  # else the block of `handlers` has ended
        interrupt_main_with(error)


@contextmanager
def deferred() -> Iterator[None]:
    """Keeps signals that arrive inside the block until it ends. A second signal, at least
    `ECHO_SECONDS` after the first, raises at once: the way out of a block that hangs."""
    state = _state
    if threading.current_thread() is not threading.main_thread():  # which gets no signals
        yield
        return
    if not state.installed:
        with _ctrl_c_deferred():
            yield
        return
    state.depth += 1
    try:
        yield
    finally:
        state.depth -= 1
        if state.depth == 0 and state.kept is not None and state.raised is None:
            _raise(state.kept)


@contextmanager
def _ctrl_c_deferred() -> Iterator[None]:
    """Keeps a first Ctrl-C until the block ends, in a program without our handlers. A second one
    reaches the program at once."""
    usual_handler = signal.getsignal(signal.SIGINT)
    if not callable(usual_handler):  # ignored, left to the system, or set from outside of Python
        yield
        return
    interrupts: list[int] = []

    def keep(signum: int, frame: FrameType | None) -> None:
        interrupts.append(signum)
        if len(interrupts) > 1:
            usual_handler(signum, frame)

    signal.signal(signal.SIGINT, keep)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual_handler)
        if len(interrupts) == 1:
            usual_handler(signal.SIGINT, None)


def interrupt_main_with(error: BaseException) -> None:
    """Raises `error` in the main thread as a signal would: after a `deferred` block, and not during
    a clean-up."""
    assert _state.installed, "call install_handlers() first: without it, SIGTERM ends the process"
    _state.from_thread = error
    # A signal to the main thread itself also ends the system call that it is blocked in.
    signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
