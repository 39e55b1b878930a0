"""Calls a function of somebody else's file in processes of its own: `score.py:score`, say.

The function's interpreter needs nothing of this package, and the two sides exchange lines of JSON
(`function_worker.py`). An `async def` has one process, which runs all calls side by side. A plain
function may do what it likes with its process, such as to change the folder: it has one call at a
time, in as many processes as there are cores, at most eight. A function that crashes or hangs takes
its process along and nothing else.
"""

import asyncio
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trl_atropos.agents.line_process import LineProcess, NoAnswer, ProcessEnded
from trl_atropos.errors import AtroposTrainingError

WORKER = str(Path(__file__).resolve().with_name("function_worker.py"))
MOST_PROCESSES = 8
LOAD_TIMEOUT = 600.0  # seconds that a file may take to import what it needs
LATE = 5.0  # seconds after which a call that should have timed out by itself is ended


class FunctionFailed(AtroposTrainingError):
    """A function raised, returned what it must not, took too long, or ended its process."""

    usual_code = "function"


class FunctionPool:
    """
    Calls one function.

    Args:
        place: `FILE.py:FUNCTION`.
        python: interpreter; by default, this process' own.
        env: all variables of the function's processes.
    """

    def __init__(self, place: str, python: str | None, env: Mapping[str, str]) -> None:
        path, _, name = place.rpartition(":")
        self.place = place
        self._command = [python or sys.executable, "-u", WORKER, path, name]
        self._folder = os.path.dirname(path)
        self._env = env
        self._is_async = False
        self._idle: list[LineProcess] = []  # of a plain function
        self._shared: LineProcess | None = None  # of an `async def`
        self._starting = asyncio.Lock()
        self._slots = asyncio.Semaphore(min(MOST_PROCESSES, os.cpu_count() or 1))

    async def start(self) -> None:
        """Loads the file once, so that a mistake in it shows. Raises `FunctionFailed`."""
        worker = await self._new_worker()
        if self._is_async:
            self._shared = worker
        else:
            self._idle.append(worker)

    async def close(self) -> None:
        workers = self._idle
        if self._shared is not None:
            workers = [*workers, self._shared]
        self._idle = []
        self._shared = None
        for worker in workers:
            await worker.end()

    async def call(self, request: dict[str, Any], timeout: float) -> Any:
        """Returns the value of a request (`function_worker.py`), for which there are `timeout`
        seconds. Raises `FunctionFailed`."""
        request = {**request, "timeout": timeout}
        if self._is_async:
            worker = await self._shared_worker()
            return await self._value_of(worker, request, timeout + LATE)
        async with self._slots:
            worker = self._idle.pop() if self._idle else await self._new_worker()
            try:
                value = await self._value_of(worker, request, timeout)
            except FunctionFailed:
                if worker.is_alive:  # it raised an exception
                    self._idle.append(worker)
                raise
            except BaseException:
                await worker.end()  # it is in the midst of a call
                raise
            self._idle.append(worker)
            return value

    async def _value_of(self, worker: LineProcess, request: dict[str, Any], timeout: float) -> Any:
        try:
            answer = await worker.ask(request, timeout)
        except NoAnswer as error:
            fix = "Raise `timeout`, or have it do less."
            raise FunctionFailed(f"{self.place}: {error}", fix=fix) from None
        except ProcessEnded as error:
            raise FunctionFailed(f"{self.place}: {error}", fix="Correct it there.") from None
        if "error" in answer:
            raise _failure(f"{self.place} failed", answer)
        return answer["value"]

    async def _shared_worker(self) -> LineProcess:
        async with self._starting:
            if self._shared is None or not self._shared.is_alive:
                self._shared = await self._new_worker()
            return self._shared

    async def _new_worker(self) -> LineProcess:
        worker = await LineProcess.start(self._command, self._env, self._folder)
        try:
            answer = await worker.ask({"call": "load"}, LOAD_TIMEOUT)
        except ProcessEnded as error:
            what = f"{self.place} cannot be loaded: {error}"
            fix = "See what it does at its top level, and the environment's log."
            raise FunctionFailed(what, fix=fix) from None
        except BaseException:
            await worker.end()
            raise
        if "error" in answer:
            await worker.end()
            raise _failure(f"{self.place} cannot be loaded", answer)
        self._is_async = answer["value"]["async"]
        return worker


def _failure(what: str, answer: dict[str, str]) -> FunctionFailed:
    error = FunctionFailed(f"{what}: {answer['error']}", fix="Correct it there.")
    if "traceback" in answer:
        error.add_note(answer["traceback"])
    if "place" in answer:
        error.environment_place = answer["place"]
    return error
