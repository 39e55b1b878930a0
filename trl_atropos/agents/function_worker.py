"""Calls one function of somebody else's file, in the interpreter that has what the file needs.

    python function_worker.py FILE FUNCTION

`function_pool.py` starts it. Requests and answers are lines of JSON, on standard input and output.
What the function itself prints goes to standard error.

    {"id": 1, "call": "load"}                           the first request: the file is run
    {"id": 1, "value": {"async": false}}
    {"id": 2, "call": "tasks"}                          the function's items, as a list
    {"id": 2, "value": [...]}
    {"id": 3, "call": "score", "timeout": 60, "task": ..., "folder": "/...", "output": "...",
     "episode": {...}}
    {"id": 3, "value": {"score": 1.0, "parts": {"format": 0.5}}}
    {"id": 3, "error": "KeyError: 'x'", "traceback": "..."}

Standard library only, and nothing newer than Python 3.10: this package is not installed here.
"""

import asyncio
import ctypes
import dataclasses
import importlib.util
import inspect
import json
import math
import os
import sys
import traceback
from pathlib import Path


def load(path, name):
    """Returns the function of a file, which is run as a module of that name."""
    folder = os.path.dirname(os.path.abspath(path))
    sys.path[0] = folder  # in place of this file's own
    module_name = os.path.splitext(os.path.basename(path))[0]
    spec = importlib.util.spec_from_file_location(module_name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


def scored(value):
    """Returns what a score function has returned as its number and its named parts."""
    fields = value
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif hasattr(value, "_asdict"):  # a named tuple
        fields = value._asdict()
    elif not isinstance(value, dict):
        fields = {"score": value}
        if not hasattr(value, "__float__") and hasattr(value, "__dict__"):
            fields = vars(value)
    if "score" not in fields:
        raise TypeError(f"it returned {value!r}: return a number, or something with a `score`")
    parts = {}
    for name, part in fields.items():
        if name != "score" and part is not None:
            parts[str(name)] = number(part, name)
    return {"score": number(fields["score"], "score"), "parts": parts}


def number(value, name):
    is_number = hasattr(value, "__float__") or hasattr(value, "__index__")
    if not is_number:
        raise TypeError(f"its {name} is {value!r}, and no number")
    result = float(value)
    if not math.isfinite(result):
        raise ValueError(f"its {name} is {result}, and no finite number")
    return result


def failure(error):
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    answer = {"error": f"{type(error).__name__}: {error}", "traceback": text}
    frames = traceback.extract_tb(error.__traceback__)
    in_file = [frame for frame in frames if frame.filename.startswith(sys.path[0])]
    if in_file:
        answer["place"] = f"{in_file[-1].filename}:{in_file[-1].lineno} in {in_file[-1].name}"
    return answer


class Worker:
    """Answers requests by calls of a function, and writes the answers to `answers`."""

    def __init__(self, function, answers):
        self.function = function
        self.answers = answers
        self.is_async = inspect.iscoroutinefunction(function)

    def send(self, answer):
        self.answers.write(json.dumps(answer) + "\n")
        self.answers.flush()

    def start(self, request):
        """Calls the function. Returns its value, or what is to be awaited for it."""
        if request["call"] == "tasks":
            return self.function()
        folder = Path(request["folder"])
        return self.function(request["task"], folder, request["output"], request["episode"])

    def send_value(self, request, value):
        value = list(value) if request["call"] == "tasks" else scored(value)
        self.send({"id": request["id"], "value": value})

    def answer(self, request):
        """Answers by a plain function, in the main thread and without a running loop: functions
        may set alarms, or begin a loop of their own."""
        try:
            self.send_value(request, self.start(request))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - somebody else's code
            self.send({"id": request["id"], **failure(error)})

    async def answer_async(self, request):
        try:
            value = await asyncio.wait_for(self.start(request), request["timeout"])
            self.send_value(request, value)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - somebody else's code
            self.send({"id": request["id"], **failure(error)})

    def serve(self):
        for line in sys.stdin:
            self.answer(json.loads(line))

    async def serve_async(self):
        loop = asyncio.get_running_loop()
        running = set()
        while True:
            line = await loop.run_in_executor(None, sys.stdin.readline)
            if not line:
                return
            answer = loop.create_task(self.answer_async(json.loads(line)))
            running.add(answer)
            answer.add_done_callback(running.discard)


def close_to_others():
    """Closes this process to other agents of the same user, which could read its tasks or write an
    answer in its place. As `trl_atropos/privacy.py`."""
    pr_set_dumpable = 4
    ctypes.CDLL(None).prctl(pr_set_dumpable, 0, 0, 0, 0)


def main():
    close_to_others()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the function prints must not stand between the answers
    _, path, name = sys.argv
    request = json.loads(sys.stdin.readline())
    try:
        function = load(path, name)
    except BaseException as error:  # noqa: BLE001 - somebody else's code
        answer = {"id": request["id"], **failure(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        raise SystemExit(1) from None
    worker = Worker(function, answers)
    worker.send({"id": request["id"], "value": {"async": worker.is_async}})
    if worker.is_async:
        asyncio.run(worker.serve_async())
    else:
        worker.serve()


if __name__ == "__main__":
    main()
