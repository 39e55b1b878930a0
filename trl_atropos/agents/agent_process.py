"""Runs one agent: a command in a folder of its own, which may take so long and print so much.

Nothing that the agent has started outlives it, whatever it was (`guarded_process.py`). At most
`max_output` bytes of what it prints are kept, in memory: an agent that prints more is ended.
"""

import asyncio
import os
import re
import time
from asyncio import StreamReader
from collections.abc import Mapping
from dataclasses import dataclass

from trl_atropos.agents.guarded_process import end_guarded, start_guarded, until_ended

CHUNK = 1 << 16  # bytes
LAST_WORDS = 1.0  # seconds for what is left in a pipe when nobody writes to it any more
# in what Python prints of an exception
PYTHON_PLACE = re.compile(r'File "(.+)", line (\d+)')
# What became of an agent that did not end well.
FAILED = "failed"  # with an exit code that is not 0
TIMEOUT = "timeout"
FLOODED = "flooded"  # it printed more than it may


@dataclass
class AgentRun:
    """Describes how an agent ended, and what it printed."""

    failure: str | None  # FAILED, TIMEOUT or FLOODED; None: it ended by itself with exit code 0
    exit_code: int  # 128 + n for signal n
    output: str  # what it printed to its standard output
    errors: str  # and to its standard error
    seconds: float

    @property
    def reason(self) -> str:
        """Returns how it ended, for people: `it ended with exit code 1: KeyError: 'task'`."""
        if self.failure == TIMEOUT:
            return f"it was ended after {self.seconds:.0f} s (`timeout`)"
        if self.failure == FLOODED:
            return "it printed more than `max_output` bytes, and was ended"
        reason = f"it ended with exit code {self.exit_code}"
        lines = self.errors.strip().splitlines()
        if self.failure == FAILED and lines:
            reason += f": {lines[-1][:200]}"
            places = PYTHON_PLACE.findall(self.errors)
            if places:
                path, line = places[-1]
                reason += f" ({os.path.basename(path)}:{line})"
        return reason


class _Output:
    """Keeps what an agent prints, up to a number of bytes of each stream."""

    def __init__(self, most: int) -> None:
        self.is_too_much = asyncio.Event()
        self.agent_has_ended = asyncio.Event()
        self._most = most

    async def read(self, stream: StreamReader, kept: bytearray) -> None:
        """Reads a stream to its end into `kept`. If there is too much in it, waits until the agent
        was ended, instead of being kept busy, and drops the rest."""
        while len(kept) <= self._most:
            chunk = await stream.read(CHUNK)
            if not chunk:
                return
            kept += chunk
        del kept[self._most :]
        self.is_too_much.set()
        await self.agent_has_ended.wait()
        while await stream.read(CHUNK):
            pass


async def run_agent(
    command: list[str],
    *,
    env: Mapping[str, str],
    folder: str,
    timeout: float,
    max_output: int,
    user: str | None = None,
) -> AgentRun:
    """
    Runs an agent to its end, or ends it. Returns what it did.

    Args:
        command: words, without placeholders.
        env: all variables of the agent.
        folder: in which it is started.
        timeout: seconds that it may take.
        max_output: bytes that it may print to each of its two streams.
        user: whose processes the agent's are; only root can name one.
    """
    began = time.monotonic()
    guard = await start_guarded(command, env=env, cwd=folder, user=user)
    output = _Output(max_output)
    printed = bytearray()
    errors = bytearray()
    readers = [
        asyncio.create_task(output.read(guard.stdout, printed)),
        asyncio.create_task(output.read(guard.stderr, errors)),
    ]
    watchers = [
        asyncio.create_task(until_ended(guard)),
        asyncio.create_task(output.is_too_much.wait()),
    ]
    try:
        await asyncio.wait(watchers, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        ended_by_itself = guard.returncode is not None
        seconds = time.monotonic() - began
    finally:
        await end_guarded(guard)
        output.agent_has_ended.set()
        await asyncio.wait(readers, timeout=LAST_WORDS)
        for task in (*readers, *watchers):
            task.cancel()
    failure = None
    if output.is_too_much.is_set():
        failure = FLOODED
    elif not ended_by_itself:
        failure = TIMEOUT
    elif guard.returncode != 0:
        failure = FAILED
    return AgentRun(
        failure=failure,
        exit_code=guard.returncode,
        output=printed.decode(errors="replace"),
        errors=errors.decode(errors="replace"),
        seconds=seconds,
    )
