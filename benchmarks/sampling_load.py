"""Keeps a steady number of requests in flight, and measures while it does: `trl-atropos bench
sampling` asks a server so, and `sampling_roles.py` an engine without one.

Each client asks again as soon as its answer has come. Their first completions have different
lengths, so that answers come evenly, as they do in a run, and not all at the same time. With four
clients that ask for 100 tokens:

    client 0   |25 |100         |100         |
    client 1   |50    |100         |100         |
    client 2   |75       |100         |100
    client 3   |100         |100         |100
                            |window      |

The window begins when every client has had its first answer. Behind it, the requests in flight are
aborted.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import psutil

# Processor times come in hundredths of a second, so a shorter window measures nothing.
SHORTEST_WINDOW = 1.0  # seconds

# Samples one completion for a client: `ask(client, tokens)`
Ask = Callable[[int, int], Awaitable[None]]


def engine_below(process: psutil.Process) -> psutil.Process | None:
    """Returns the engine's process: of the processes below, the one that is no tracker."""
    for child in process.children():
        if "resource_tracker" not in " ".join(child.cmdline()):
            return child
    return None


async def measure(
    ask: Ask, clients: int, tokens: int, front: psutil.Process
) -> dict[str, float | None]:
    """Keeps `clients` requests for `tokens` tokens in flight, until as many answers have come in the
    window as there are clients. Returns tokens per second, and the processor time of `front` and of
    the engine's process below it, in microseconds a token."""
    window = _Window(clients, front)

    async def ask_again_and_again(client: int) -> None:
        await ask(client, max(1, tokens * (client + 1) // clients))
        window.note_first_answer()
        while True:
            await ask(client, tokens)
            window.note_answer()

    tasks = [asyncio.create_task(ask_again_and_again(client)) for client in range(clients)]
    full = asyncio.create_task(window.full.wait())
    # a client ends by an error alone
    await asyncio.wait([full, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for task in [full, *tasks]:
        task.cancel()
    for ended in await asyncio.gather(full, *tasks, return_exceptions=True):
        if isinstance(ended, Exception):
            raise ended
    return window.figures(tokens)


class Clocks(NamedTuple):
    """The time, and the processor times of two processes, in seconds."""

    time: float
    front: float
    engine: float


class _Window:
    """Counts answers, and reads clocks at the beginning and the end."""

    def __init__(self, clients: int, front: psutil.Process) -> None:
        self.full = asyncio.Event()
        self._clients = clients
        self._front = front
        self._engine = engine_below(front)
        self._without_answer = clients
        self._answers = 0
        self._begin: Clocks | None = None
        self._end: Clocks | None = None

    def note_first_answer(self) -> None:
        """Begins the window when all clients have had one."""
        self._without_answer -= 1
        if not self._without_answer:
            self._begin = self._clocks()

    def note_answer(self) -> None:
        """Counts an answer, and ends the window when it has enough."""
        if self._begin is None or self.full.is_set():
            return
        self._answers += 1
        seconds = time.perf_counter() - self._begin.time
        if self._answers >= self._clients and seconds >= SHORTEST_WINDOW:
            self._end = self._clocks()
            self.full.set()

    def _clocks(self) -> "Clocks":
        return Clocks(
            time.perf_counter(), processor_seconds(self._front), processor_seconds(self._engine)
        )

    def figures(self, tokens: int) -> dict[str, float | None]:
        """Returns what the window measured, with `tokens` tokens in each answer."""
        begin = self._begin
        end = self._end
        total = self._answers * tokens
        front_us = (end.front - begin.front) / total * 1e6
        engine_us = None
        if self._engine is not None:
            engine_us = (end.engine - begin.engine) / total * 1e6
        rate = total / (end.time - begin.time)
        return {"tokens_per_s": rate, "front_us": front_us, "engine_us": engine_us}


def processor_seconds(process: psutil.Process | None) -> float:
    """Returns how long a process has worked, 0 for none."""
    if process is None:
        return 0.0
    times = process.cpu_times()
    return times.user + times.system
