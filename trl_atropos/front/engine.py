"""The vLLM server behind the front: a child process that restarts on new weights. `serve.py` starts
it, asks it, and passes requests on to it."""

import asyncio
import itertools
import secrets
import sys
import tempfile
import threading
from pathlib import Path

import aiohttp

from trl_atropos.errors import ServiceError
from trl_atropos.flags import server_flags
from trl_atropos.protocol import ROUTE_PREFIX, TOKEN_VARIABLE
from trl_atropos.server.launch import READY_VARIABLE
from trl_atropos.services.addresses import free_port
from trl_atropos.services.manager import Services

NAME = "engine"
LOG_POLL = 0.2  # seconds between two looks at the log
START_TIMEOUT = 1800.0  # seconds; large models take minutes to load and to compile
INFO_TIMEOUT = 120.0  # seconds: the engine hashes its vocabulary


class Engine:
    """Runs `trl_atropos.server.launch` in a child process under a guard, on another loopback port
    at each start."""

    def __init__(
        self, first_model: str, flags: list[str], seed: int, session: aiohttp.ClientSession
    ) -> None:
        self.model: str | None = None  # that is served now; None while the engine is away
        self.url = ""
        self.description: dict = {}  # the answer to `GET /trl_atropos/info` after the last start
        self._flags = list(flags)
        if "--served-model-name" not in server_flags(flags):
            # Clients know the first model's name, whatever is served.
            self._flags += ["--served-model-name", first_model]
        # one for each start, or it would draw the same numbers again
        self._seeds = itertools.count(seed)
        self.session = session
        # not the trainer's token: the trainer must not reach behind the front
        self._token = secrets.token_urlsafe(24)
        self.log = Path(tempfile.mkdtemp(prefix="trl_atropos_")) / f"{NAME}.log"
        self.log.touch()
        self.services = Services(self.log.parent)
        self._stopping = threading.Lock()

    async def serve(self, model: str) -> None:
        """Stops the engine and starts it on `model`, from the main thread. Returns when it answers.
        Raises `ServiceError` with the end of the log; then the engine is away."""
        self.model = None
        await asyncio.to_thread(self.stop)
        port = free_port("127.0.0.1")
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "trl_atropos.server.launch", model]
        command += ["--host", "127.0.0.1", "--port", str(port), "--seed", str(next(self._seeds))]
        command += self._flags
        env = {TOKEN_VARIABLE: self._token, READY_VARIABLE: ""}
        self.services.start(NAME, command, env=env, health_url=f"{self.url}/health")
        await asyncio.to_thread(self.services.wait_healthy, NAME, START_TIMEOUT)
        try:
            self.description = await self.ask("GET", "/info", timeout=INFO_TIMEOUT)
        except (aiohttp.ClientError, TimeoutError) as problem:
            raise ServiceError(
                f"the engine became healthy but did not say what it serves ({problem!r})"
            ) from problem
        self.model = model

    async def ask(
        self, method: str, route: str, body: dict | None = None, timeout: float = 10.0
    ) -> dict:
        """Returns the answer of one of the engine's control routes. Raises `aiohttp.ClientError` or
        `TimeoutError`."""
        url = f"{self.url}{ROUTE_PREFIX}{route}"
        headers = {"authorization": f"Bearer {self._token}"}
        limit = aiohttp.ClientTimeout(total=timeout)
        async with self.session.request(
            method, url, json=body, headers=headers, timeout=limit
        ) as reply:
            reply.raise_for_status()
            return await reply.json()

    async def trouble(self) -> str | None:
        """Returns what is wrong with the engine by its own health check, or `None` if nothing is.
        That check gives the engine 10 s."""
        limit = aiohttp.ClientTimeout(total=15.0)
        try:
            async with self.session.get(f"{self.url}/health", timeout=limit) as reply:
                if reply.status == 200:
                    return None
                text = await reply.text()
                return text[:500]
        except (aiohttp.ClientError, TimeoutError) as problem:
            return f"the engine's server does not answer ({problem!r})"

    def stop(self) -> None:
        """Stops the engine. Returns when nothing of it is left, at most 12 s later."""
        with self._stopping:  # when the front exits, a restart's call may be at work in its thread
            self.services.stop()

    async def show_log(self) -> None:
        """Copies the engine's output to stderr, for ever."""
        with open(self.log, encoding="utf-8", errors="replace") as log:
            while True:
                sys.stderr.write(log.read())
                await asyncio.sleep(LOG_POLL)
