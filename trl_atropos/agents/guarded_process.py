"""Starts foreign programs below a guard (`services/guard.py`), and ends them with all that they
have started.

A guard is the parent of all processes of its program, also of those that left its process group or
session. It ends them when the program ends, when it is asked to, and when this process is gone.
"""

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping

from trl_atropos.errors import AtroposTrainingError
from trl_atropos.services import guard as guard_script
from trl_atropos.services.guard import KILL_DEADLINE, SharedFiles, end_service

LONGEST_LINE = 1 << 26  # bytes that are read as a line
POLL = 0.02  # seconds
GRACE = 2.0  # seconds between SIGTERM and SIGKILL
LONGEST_END = GRACE + KILL_DEADLINE + 2.0  # seconds that a guard may take to end its program


async def start_guarded(
    command: list[str],
    *,
    env: Mapping[str, str],
    cwd: str,
    user: str | None = None,
    has_input: bool = False,
    has_errors: bool = True,
) -> Process:
    """
    Starts a program below a guard. Returns the guard, whose `stdout` is the program's.

    Args:
        env: all variables of the program.
        user: whose process the program is; only root can name one.
        has_input: if `stdin` is the program's; otherwise there is nothing to read for it.
        has_errors: if `stderr` is the program's; otherwise it is this process' own.

    Raises:
        AtroposTrainingError: the command is longer than the system takes.
    """
    options = ["--parent", str(os.getpid()), "--grace", str(GRACE)]
    if user is not None:
        options += ["--user", user]
    words = [sys.executable, "-I", "-S", guard_script.__file__, *options, "--", *command]
    start = asyncio.create_subprocess_exec(
        *words,
        stdin=PIPE if has_input else DEVNULL,
        stdout=PIPE,
        stderr=PIPE if has_errors else None,
        cwd=cwd,
        env=dict(env),
        start_new_session=True,
        limit=LONGEST_LINE,
    )
    starting = asyncio.ensure_future(start)
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        await end_guarded(await starting)  # asyncio would kill the guard alone
        raise
    except (OSError, ValueError) as error:
        longest = max(command, key=len)
        what = f"The command {command[0]!r} cannot be started: {error}"
        fix = "Put a long task into a file: `{task_file}` is its path."
        raise AtroposTrainingError(what, f"a word of {len(longest)} characters", fix) from error


async def end_guarded(guard: Process) -> None:
    """Ends a program and all that it has started, and returns when nothing of it is left."""
    if guard.returncode is None:
        _signal(guard, signal.SIGTERM)
        try:
            await asyncio.wait_for(until_ended(guard), LONGEST_END)
        except TimeoutError:
            _signal(guard, signal.SIGKILL)
            await until_ended(guard)
    if guard.returncode < 0:  # it was killed, and has ended nothing
        await asyncio.to_thread(end_service, guard.pid, GRACE, SharedFiles())


async def until_ended(guard: Process) -> None:
    """Waits for a guard's end. asyncio's own `wait` also waits until nobody has its pipes open."""
    while guard.returncode is None:
        await asyncio.sleep(POLL)


def _signal(guard: Process, signum: int) -> None:
    # The process' own `send_signal` would take the exit code from asyncio, if it has just ended.
    with contextlib.suppress(ProcessLookupError):
        os.kill(guard.pid, signum)
