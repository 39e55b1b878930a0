"""Calls a function of somebody else's file in processes of its own: `score.py:score`, say.

The function's interpreter needs nothing of this package, and the two sides exchange lines of JSON
(`function_worker.py`). An `async def` has one process, which runs all calls side by side. A plain
function may do what it likes with its process, such as to change the folder: it has one call at a
time, in as many processes as there are cores, at most eight. A function that crashes or hangs takes
its process along and nothing else.
"""

import asyncio
import contextlib
import itertools
import json
import os
import sys
from asyncio.subprocess import Process
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trl_atropos.agents.guarded_process import end_guarded, start_guarded
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
        self._idle: list[_Worker] = []  # of a plain function
        self._shared: _Worker | None = None  # of an `async def`
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
            return await worker.ask(request, timeout + LATE)
        async with self._slots:
            worker = self._idle.pop() if self._idle else await self._new_worker()
            try:
                value = await worker.ask(request, timeout)
            except FunctionFailed:
                if worker.is_alive:  # it raised an exception
                    self._idle.append(worker)
                raise
            except BaseException:
                await worker.end()  # it is in the midst of a call
                raise
            self._idle.append(worker)
            return value

    async def _shared_worker(self) -> "_Worker":
        async with self._starting:
            if self._shared is None or not self._shared.is_alive:
                self._shared = await self._new_worker()
            return self._shared

    async def _new_worker(self) -> "_Worker":
        process = await start_guarded(
            self._command, env=self._env, cwd=self._folder, has_input=True, has_errors=False
        )
        worker = _Worker(self.place, process)
        try:
            self._is_async = await worker.load()
        except BaseException:
            await worker.end()
            raise
        return worker


class _Worker:
    """One process of a function, and the calls in it."""

    def __init__(self, place: str, process: Process) -> None:
        self.is_alive = True
        self._place = place
        self._process = process
        self._ids = itertools.count(1)
        self._calls: dict[int, asyncio.Future] = {}
        self._reader: asyncio.Task | None = None

    async def load(self) -> bool:
        """Waits until the file is loaded. Returns whether its function is an `async def`."""
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), LOAD_TIMEOUT)
        except TimeoutError:
            what = f"The file of {self._place} was not loaded within {LOAD_TIMEOUT:.0f} s"
            raise FunctionFailed(what, fix="See what it does at its top level.") from None
        if not line:
            await end_guarded(self._process)
            what = f"The process of {self._place} ended with exit code {self._process.returncode}"
            raise FunctionFailed(what, fix="See the environment's log.")
        answer = json.loads(line)
        if "error" in answer:
            raise _failure(f"{self._place} cannot be loaded", answer)
        self._reader = asyncio.create_task(self._read())
        return answer["async"]

    async def ask(self, request: dict[str, Any], timeout: float) -> Any:
        """Returns the value of a request. Ends the process if it gives no answer in time. Raises
        `FunctionFailed`."""
        number = next(self._ids)
        call = asyncio.get_running_loop().create_future()
        self._calls[number] = call
        line = json.dumps({**request, "id": number}) + "\n"
        try:
            self._process.stdin.write(line.encode())
            with contextlib.suppress(ConnectionError):  # the reader says that it has ended
                await self._process.stdin.drain()
            answer = await asyncio.wait_for(call, timeout)
        except TimeoutError:
            await self.end()
            what = f"{self._place} gave no answer within {timeout:.0f} s"
            raise FunctionFailed(what, fix="Raise `timeout`, or have it do less.") from None
        finally:
            self._calls.pop(number, None)
        if "error" in answer:
            raise _failure(f"{self._place} failed", answer)
        return answer["value"]

    async def _read(self) -> None:
        """Gives each answer to its call. If the process ends, ends the calls."""
        while line := await self._process.stdout.readline():
            answer = json.loads(line)
            call = self._calls.get(answer["id"])
            if call is not None and not call.done():
                call.set_result(answer)
        self.is_alive = False
        await end_guarded(self._process)
        code = self._process.returncode
        for call in self._calls.values():
            if not call.done():
                call.set_result({"error": f"its process ended with exit code {code}"})

    async def end(self) -> None:
        self.is_alive = False
        await end_guarded(self._process)


def _failure(what: str, answer: dict[str, str]) -> FunctionFailed:
    error = FunctionFailed(f"{what}: {answer['error']}", fix="Correct it there.")
    if "traceback" in answer:
        error.add_note(answer["traceback"])
    return error
