"""Writes down where an environment's code stands, each time that a run asks.

A run asks by the signal `QUESTION`, after nothing has come of the environment for a while. The
answer is appended to the file PID in the folder that the variable `TRL_ATROPOS_STACKS` names: the
stack of each thread, and of each asyncio task that waits:

    Thread (most recent call first):
      File "environment.py", line 76 in score
    Task (most recent call first):
      File "environment.py", line 40 in collect_trajectories
    end of answer

Python writes it between two of its instructions. There is no such moment while a library holds the
interpreter, such as a regular expression that does not end. Then the run sends `LAST_QUESTION`, and
`faulthandler` writes the stacks of the threads at once. It is not asked first, because it reads
stacks also while threads change them, which crashes a process that is at work.

`trl_atropos.services.stacks` reads the file. `sitecustomize.py` and `groups.py` of this folder call
`install`. Standard library only.
"""

import asyncio
import contextlib
import faulthandler
import os
import signal
import sys
import threading

FOLDER = "TRL_ATROPOS_STACKS"
QUESTION = signal.SIGUSR2
LAST_QUESTION = getattr(signal, "SIGRTMAX", None)  # of Linux, where runs ask
END = "end of answer"
DEEPEST = 100  # frames of a stack

_answers = None  # descriptor of the file that this process writes to


def install():
    """Makes this process answer, unless nobody will ask or the environment uses the signals
    itself."""
    global _answers
    folder = os.environ.get(FOLDER)
    if not folder or _answers is not None or LAST_QUESTION is None:
        return
    if threading.current_thread() is not threading.main_thread():
        return  # Python sets handlers in the main thread only
    if any(signal.getsignal(each) is not signal.SIG_DFL for each in (QUESTION, LAST_QUESTION)):
        return
    faulthandler.enable()  # a crash of the interpreter shows where it was
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, str(os.getpid()))
    _answers = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    signal.signal(QUESTION, _answer)
    faulthandler.register(LAST_QUESTION, _answers, all_threads=True)


def _answer(_signum, frame):
    """Writes the stack of each thread, of which the main one is at `frame`, and of each task that
    waits. The task that runs is in the stack of its thread."""
    # An error would be raised in the environment's code, wherever that is.
    with contextlib.suppress(Exception):
        frames = sys._current_frames()
        frames[threading.get_ident()] = frame
        lines = []
        for innermost in frames.values():
            lines += _stack("Thread", _callers(innermost))
        for task in _waiting_tasks():
            lines += _stack("Task", reversed(_frames_of(task)))
        text = "\n".join([*lines, END, ""])
        os.write(_answers, text.encode(errors="replace"))


def _stack(kind, frames):
    """Returns the lines of a stack, as `faulthandler` writes it. `frames` begin with the innermost
    one."""
    lines = [f"{kind} (most recent call first):"]
    for frame in frames:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
    return lines


def _callers(frame):
    """Returns a frame and those that called it, innermost first."""
    frames = []
    while frame is not None and len(frames) < DEEPEST:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _waiting_tasks():
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return []
    running = asyncio.current_task(loop)
    return [task for task in asyncio.all_tasks(loop) if task is not running]


def _frames_of(task):
    """Returns the frame of each coroutine that a task is inside of, outermost first."""
    frames = []
    awaited = task.get_coro()
    # What a coroutine awaits in the end, such as a future, has no frame.
    while getattr(awaited, "cr_frame", None) is not None and len(frames) < DEEPEST:
        frames.append(awaited.cr_frame)
        awaited = awaited.cr_await
    return frames
