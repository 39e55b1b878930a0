"""Asks an environment's process where its code stands.

`environments.py` and `trl-atropos try` ask if nothing has come of an environment for a while, and
say for example `in score, environment.py:76`. The process answers by `environment_site/
environment_stacks.py`. Only Linux tells which processes do.
"""

import contextlib
import os
import re
import signal
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trl_atropos.services.manager import Service

# The variable, the signals, and the last line of an answer, as in `environment_stacks.py`.
FOLDER_VARIABLE = "TRL_ATROPOS_STACKS"
QUESTION = signal.SIGUSR2
LAST_QUESTION = getattr(signal, "SIGRTMAX", None)
END = "end of answer"

ANSWER_WITHIN = 3.0  # seconds; on a busy machine, too, or the second question would be a risk
LAST_ANSWER_WITHIN = 0.5  # seconds; the end of this answer is not marked
POLL = 0.02  # seconds
SHOWN = 3  # places

STACK = re.compile(r"^(?:Current thread|Thread|Task) .*\(most recent call first\)", re.MULTILINE)
FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
LIBRARY = re.compile(
    r"^<|/(site|dist)-packages/|/lib/python3\.\d+/|/atroposlib/|/trl_atropos/environment_site/"
)
EVENT_LOOP = ("run_forever", "run_until_complete")  # of asyncio


def where_is(service: "Service", folder: Path) -> str:
    """Returns where the code of a service stands, such as `in score, environment.py:76`. If several
    tasks wait, it names the places where most of them do. Returns an empty text if nobody
    answers."""
    places: Counter[str] = Counter()
    for answer in _ask(service, folder):
        places.update(places_of(answer))
    shown = []
    for place, count in places.most_common(SHOWN):
        times = f" ({count} times)" if count > 1 else ""
        shown.append(f"in {place}{times}")
    return ", ".join(shown)


def places_of(answer: str) -> list[str]:
    """Returns the innermost place of each stack of an answer that is of no library. A thread or
    task that is inside of libraries only has none."""
    places = []
    for stack in STACK.split(answer):
        for filename, line, function in FRAME.findall(stack):
            if function in EVENT_LOOP:
                break  # the thread waits for its tasks, each of which has a stack
            if not LIBRARY.search(filename):
                path = filename.removeprefix(f"{os.getcwd()}{os.sep}")
                places.append(f"{function}, {path}:{line}")
                break
    return places


def _ask(service: "Service", folder: Path) -> list[str]:
    """Returns the answers of those processes of a service that give one."""
    answers = []
    for file in folder.glob("*"):
        pid = int(file.name)
        with contextlib.suppress(OSError):  # the process has ended
            if os.getsid(pid) == service.guard.pid and _catches(pid, QUESTION, LAST_QUESTION):
                answers.append(_answer_of(pid, file))
    return answers


def _catches(pid: int, *signals: int) -> bool:
    """Returns whether a process has a handler for each of these signals: others would end it."""
    status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    if caught is None:
        return False
    mask = int(caught[1], 16)
    return all(mask >> (signum - 1) & 1 for signum in signals)


def _answer_of(pid: int, file: Path) -> str:
    """Asks a process that has handlers, and returns what it writes to its file."""
    start = file.stat().st_size
    os.kill(pid, QUESTION)
    answer = _answer_in(file, start, ANSWER_WITHIN)
    if not answer:  # a library holds the interpreter
        os.kill(pid, LAST_QUESTION)
        answer = _answer_in(file, start, LAST_ANSWER_WITHIN)
    return answer


def _answer_in(file: Path, start: int, seconds: float) -> str:
    """Returns what is written to a file from byte `start` on, when the answer ends or after so many
    seconds."""
    deadline = time.monotonic() + seconds
    while True:
        answer = file.read_bytes()[start:].decode(errors="replace")
        if answer.endswith(f"{END}\n") or time.monotonic() > deadline:
            return answer
        time.sleep(POLL)
