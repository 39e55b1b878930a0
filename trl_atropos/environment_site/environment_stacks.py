"""Writes down where an environment's code stands, each time that a run asks.

A run asks by the signal SIGUSR2, after nothing has come of the environment for a while. The answer
is appended to the file PID in the folder that the variable `TRL_ATROPOS_STACKS` names: the stack of
each thread, as `faulthandler` writes it, and after it the stack of each asyncio task that waits:

    Task (most recent call first):
      File "environment.py", line 76 in score
    end of answer

`faulthandler` answers also while a library holds the interpreter, such as a regular expression that
never ends. `trl_atropos.services.stacks` reads the file. `sitecustomize.py` and `groups.py` of this
folder call `install`. Standard library only.
"""

import asyncio
import faulthandler
import os
import signal
import threading

FOLDER = "TRL_ATROPOS_STACKS"
END = "end of answer"
DEEPEST = 100  # frames of a task

_answers = None  # the file that this process writes to


def install():
    """Makes this process answer, unless nobody will ask or the environment uses the signal
    itself."""
    global _answers
    folder = os.environ.get(FOLDER)
    if not folder or _answers is not None:
        return
    if threading.current_thread() is not threading.main_thread():
        return  # Python sets handlers in the main thread only
    if signal.getsignal(signal.SIGUSR2) is not signal.SIG_DFL:
        return
    faulthandler.enable()  # a crash of the interpreter shows where it was
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, str(os.getpid()))
    _answers = open(path, "w", buffering=1)  # noqa: SIM115 - open as long as the process lives
    signal.signal(signal.SIGUSR2, _write_tasks)
    # `chain` calls the handler above afterwards, as soon as the interpreter is free.
    faulthandler.register(signal.SIGUSR2, _answers, all_threads=True, chain=True)


def _write_tasks(_signum, _frame):
    """Writes the stacks of the tasks that wait. The one that runs is in the stack of its thread."""
    for task in _waiting_tasks():
        _answers.write("Task (most recent call first):\n")
        for frame in reversed(_frames_of(task)):
            code = frame.f_code
            place = f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}'
            _answers.write(f"{place}\n")
    _answers.write(f"{END}\n")


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
