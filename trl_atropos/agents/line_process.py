"""Talks to a program in another interpreter by lines of JSON: it reads requests and writes answers,
in any order. A request and its answer have the same `id`.

    process = await LineProcess.start(command, env=variables, cwd=folder)
    answer = await process.ask({"task": 5}, timeout=60.0)
"""

import asyncio
import contextlib
import itertools
import json
from asyncio.subprocess import Process
from collections.abc import Mapping
from typing import Any

from trl_atropos.agents.guarded_process import end_guarded, start_guarded


class ProcessEnded(Exception):
    """The program has ended."""


class NoAnswer(ProcessEnded):
    """The program gave no answer in time, and was ended."""


class LineProcess:
    """A running program. Its standard error is this process' own."""

    def __init__(self, guard: Process) -> None:
        self.is_alive = True
        self._guard = guard
        self._ids = itertools.count(1)
        self._calls: dict[int, asyncio.Future] = {}
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, command: list[str], env: Mapping[str, str], cwd: str) -> "LineProcess":
        """Starts a program, which ends with this process. `env` has all of its variables."""
        guard = await start_guarded(command, env=env, cwd=cwd, has_input=True, has_errors=False)
        return cls(guard)

    async def ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Returns the answer to a request. Raises `ProcessEnded` if the program ends before, and
        `NoAnswer` after `timeout` seconds: then the program is ended, and with it all calls."""
        number = next(self._ids)
        call = asyncio.get_running_loop().create_future()
        self._calls[number] = call
        content = {"id": number, **request}
        line = f"{json.dumps(content)}\n"
        try:
            self._guard.stdin.write(line.encode())
            with contextlib.suppress(ConnectionError):  # the reader says that it has ended
                await self._guard.stdin.drain()
            return await asyncio.wait_for(call, timeout)
        except TimeoutError:
            await self.end()
            raise NoAnswer(f"it gave no answer within {timeout:.0f} s") from None
        finally:
            self._calls.pop(number, None)

    async def end(self) -> None:
        """Ends the program and all that it has started."""
        self.is_alive = False
        await end_guarded(self._guard)

    async def _read(self) -> None:
        """Gives each answer to its call. If the program ends, ends the calls."""
        while line := await self._guard.stdout.readline():
            answer = json.loads(line)
            call = self._calls.get(answer["id"])
            if call is not None and not call.done():
                call.set_result(answer)
        await self.end()
        code = self._guard.returncode
        ended = ProcessEnded(f"its process ended with exit code {code}")
        for call in self._calls.values():
            if not call.done():
                call.set_exception(ended)
