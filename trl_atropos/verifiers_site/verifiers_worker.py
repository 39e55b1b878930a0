"""Plays episodes of a taskset of verifiers (version 0.4), in the interpreter that has it installed.

    python verifiers_worker.py

`agents/verifiers_process.py` starts it. Requests and answers are lines of JSON, on standard input
and output. What the taskset itself prints goes to standard error.

    {"id": 1, "taskset": "wordle", "args": {...}, "select": {...}, "peek": false}
    {"id": 1, "value": {"tasks": 1000, "is_endless": false, "harnesses": {"agent": "null"}}}
    {"id": 2, "task": 5, "base_url": "http://.../s/ID/v1", "timeout": 600}
    {"id": 2, "value": {"failure": "", "reason": "", "score": 1.0, "parts": {...}, "messages": []}}

The first request opens the taskset; all others play episodes. With `peek`, only the first task is
read, and no episodes can be played. A request that cannot be met is answered with what happened,
the value seen, and the fix:

    {"id": 1, "refusal": {"what": "...", "seen": "...", "fix": "...", "traceback": "..."}}

`verifiers_episodes.py` is the part that needs verifiers. This file has the rest, so that it can
say what is wrong with the interpreter. Standard library only, and nothing newer than Python 3.8:
this package is not installed here.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import sys
import traceback
from importlib import metadata

OLDEST_PYTHON = (3, 11)  # that verifiers 0.4 runs on
VERSION = "0.4"  # of verifiers
REQUIREMENT = "verifiers>=0.4,<0.5"


class Refusal(Exception):
    """A request that cannot be met, for the person who wrote the recipe.

    Args:
        what: what happened, without a full stop.
        seen: the value that was seen.
        fix: what to do about it, in sentences.
    """

    def __init__(self, what, seen, fix):
        super().__init__(what)
        self.what = what
        self.seen = seen
        self.fix = fix

    def fields(self):
        """Returns what is answered."""
        fields = {"what": self.what, "seen": self.seen, "fix": self.fix}
        cause = self.__cause__
        if cause is not None:
            kind = type(cause)
            lines = traceback.format_exception(kind, cause, cause.__traceback__)
            fields["traceback"] = "".join(lines)
        return fields


def check_interpreter():
    """Raises `Refusal` if this interpreter cannot run tasksets of verifiers 0.4."""
    if sys.version_info < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        here = ".".join(map(str, sys.version_info[:2]))
        what = f"verifiers {VERSION} needs Python {oldest} or newer, and {sys.executable} is {here}"
        fix = f"Make a virtual environment with a newer Python, and install {REQUIREMENT!r} there."
        raise Refusal(what, f"Python {here}", fix)
    install = f"{sys.executable} -m pip install {REQUIREMENT!r}"
    try:
        version = metadata.version("verifiers")
    except metadata.PackageNotFoundError:
        what = f"verifiers is not installed for {sys.executable}"
        fix = f"Run `{install}`, or name the interpreter that has it: `python: VENV/bin/python`."
        raise Refusal(what, f"python: {sys.executable}", fix) from None
    if version != VERSION and not version.startswith(f"{VERSION}."):
        what = f"verifiers {version} is installed for {sys.executable}, and {VERSION} is needed"
        raise Refusal(what, f"verifiers {version}", f"Run `{install}`.")


class Worker:
    """Answers requests, and writes the answers to the file `answers`. The first one opens the
    taskset. Episodes are played side by side."""

    def __init__(self, answers):
        self.answers = answers

    async def serve(self):
        """Answers requests until standard input ends."""
        request = await read_request()
        if request is None:
            return
        async with contextlib.AsyncExitStack() as stack:
            try:
                taskset = open_taskset(request)
                value = taskset.peek()
                if not request["peek"]:
                    await taskset.start(stack)
                    value["tasks"] = taskset.count()
            except (Exception, SystemExit) as error:  # noqa: BLE001 - somebody else's code
                self.refuse(request, error)
                return
            self.send(request, {"value": value})
            await self.play_episodes(taskset)

    async def play_episodes(self, taskset):
        """Plays episodes until standard input ends."""
        running = set()
        while True:
            request = await read_request()
            if request is None:
                break
            episode = asyncio.create_task(self.play(taskset, request))
            running.add(episode)
            episode.add_done_callback(running.discard)
        # before the servers end that the episodes use
        for episode in running:
            episode.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def play(self, taskset, request):
        try:
            result = await taskset.play(request["task"], request["base_url"], request["timeout"])
        except (Exception, SystemExit) as error:  # noqa: BLE001 - somebody else's code
            self.refuse(request, error)
        else:
            self.send(request, {"value": result})

    def refuse(self, request, error):
        refusal = error
        if not isinstance(error, Refusal):
            refusal = Refusal(said(error), type(error).__name__, "See the traceback.")
            refusal.__cause__ = error
        self.send(request, {"refusal": refusal.fields()})

    def send(self, request, answer):
        fields = {"id": request["id"], **answer}
        line = json.dumps(fields)
        self.answers.write(f"{line}\n")
        self.answers.flush()


async def read_request():
    """Returns the next request, or None if there will be none."""
    line = await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    return json.loads(line) if line else None


def open_taskset(request):
    """Returns the opened taskset of the first request. Raises `Refusal`."""
    check_interpreter()
    try:
        from verifiers_episodes import OpenTaskset
    except ImportError as error:
        what = f"verifiers is installed for {sys.executable}, and cannot be imported: {error}"
        fix = f"Run `{sys.executable} -m pip check`, and install what it misses."
        raise Refusal(what, f"python: {sys.executable}", fix) from error
    return OpenTaskset(request["taskset"], request["args"], request["select"])


def said(error):
    """Returns an exception's words in one line."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}"


def close_to_others():
    """Closes this process to other programs of the same user: it knows the URL of each episode's
    session. As `trl_atropos/privacy.py`."""
    pr_set_dumpable = 4
    ctypes.CDLL(None).prctl(pr_set_dumpable, 0, 0, 0, 0)


def main():
    close_to_others()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the taskset prints must not stand between the answers
    asyncio.run(Worker(answers).serve())


if __name__ == "__main__":
    # `verifiers_episodes` raises the `Refusal` of this module, not of a second copy of it.
    sys.modules["verifiers_worker"] = sys.modules["__main__"]
    main()
