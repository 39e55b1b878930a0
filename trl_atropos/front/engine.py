"""The engine behind the front: a vLLM server in a child process, started, stopped and watched.

`serve.py` makes one `Engine`. Each start listens on a loopback port of its own and samples with another seed.
"""

import asyncio
import secrets
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

import aiohttp

from trl_atropos.errors import ServiceError
from trl_atropos.protocol import ROUTE_PREFIX, TOKEN_VARIABLE, server_flags
from trl_atropos.server.launch import READY_VARIABLE
from trl_atropos.services.manager import Services, free_port, tail

NAME = "engine"
HOST = "127.0.0.1"
START_TIMEOUT = 1800.0  # seconds; large models take minutes to load and to compile
ASK_TIMEOUT = 10.0  # seconds for one of the engine's control routes
DESCRIBE_TIMEOUT = 120.0  # seconds: it hashes the whole vocabulary
HEALTH_TIMEOUT = 15.0  # seconds; the engine's server itself gives its engine 10 s
POLL = 0.2  # seconds


class Engine:
    """`trl_atropos.server.launch` in a child process, under a guard that ends it whatever becomes of the front."""

    def __init__(self, first_model: str, flags: list[str], seed: int, session: aiohttp.ClientSession) -> None:
        self.model: str | None = None  # what is served now; None while the engine is away
        self.url = ""  # another one after each start
        self.description: dict = {}  # the answer to `GET /trl_atropos/info` after the last start
        named = "--served-model-name" in server_flags(flags)
        # Clients know the first model's name, whatever is served.
        self._flags = flags if named else [*flags, "--served-model-name", first_model]
        self._next_seed = seed  # each start takes the next one, or it would draw the same numbers again
        self._session = session
        self._token = secrets.token_urlsafe(24)  # another one than the trainer's, who has no business behind the front
        self._log = Path(tempfile.mkdtemp(prefix="trl_atropos_")) / f"{NAME}.log"
        self._log.touch()
        self._shown = 0  # bytes of the log
        self._services = Services(self._log.parent)
        self._stopping = threading.Lock()

    async def serve(self, model: str) -> None:
        """
        Stops the engine if it runs and starts it on `model`; returns when it answers. From the main thread.

        Raises:
            ServiceError: With the reason and the end of the log. The engine is away then.
        """
        self.model = None
        await asyncio.to_thread(self.stop)
        port = free_port(HOST)
        self.url = f"http://{HOST}:{port}"
        command = [sys.executable, "-m", "trl_atropos.server.launch", model, "--host", HOST, "--port", str(port)]
        command += ["--seed", str(self._next_seed), *self._flags]
        self._next_seed += 1
        self._services.start(NAME, command, env={TOKEN_VARIABLE: self._token, READY_VARIABLE: ""})
        deadline = time.monotonic() + START_TIMEOUT
        while (trouble := await self.trouble()) is not None:
            await self.check()
            if time.monotonic() > deadline:
                raise self._failed(f"did not become healthy within {START_TIMEOUT:.0f} s ({trouble})")
            await asyncio.sleep(POLL)
        try:
            self.description = await self.ask("GET", "/info", timeout=DESCRIBE_TIMEOUT)
        except (aiohttp.ClientError, TimeoutError) as problem:
            reason = f"{type(problem).__name__}: {problem}"
            raise self._failed(f"became healthy but did not say what it serves ({reason})") from problem
        self.model = model

    def _failed(self, what: str) -> ServiceError:
        return ServiceError(f"the engine {what}. The end of its log:\n{tail(self._log)}")

    async def ask(self, method: str, route: str, body: dict | None = None, timeout: float = ASK_TIMEOUT) -> dict:
        """The answer of one of its control routes. Raises `aiohttp.ClientError` or `TimeoutError`."""
        url, headers = f"{self.url}{ROUTE_PREFIX}{route}", {"authorization": f"Bearer {self._token}"}
        limit = aiohttp.ClientTimeout(total=timeout)
        async with self._session.request(method, url, json=body, headers=headers, timeout=limit) as reply:
            reply.raise_for_status()
            return await reply.json()

    async def trouble(self) -> str | None:
        """What is wrong with the engine by its own health check; `None` if nothing is."""
        limit = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT)
        try:
            async with self._session.get(f"{self.url}/health", timeout=limit) as reply:
                return None if reply.status == 200 else (await reply.text())[:500]
        except (aiohttp.ClientError, TimeoutError) as problem:
            return f"the engine's server does not answer ({type(problem).__name__}: {problem})"

    async def check(self) -> None:
        """Raises `ServiceError` if the engine died by itself."""
        await asyncio.to_thread(self._services.check)  # which may have to end what a killed guard left behind

    def stop(self) -> None:
        """Returns when nothing of the engine is left, at most 12 s later."""
        with self._stopping:  # when the front exits, a restart's call may be at work in its thread
            self._services.stop()

    def show_log(self) -> None:
        """Copies to stderr what the engine has written since the last call."""
        with open(self._log, "rb") as log:
            log.seek(self._shown)
            sys.stderr.write(log.read().decode(errors="replace"))
            sys.stderr.flush()
            self._shown = log.tell()

    def remove_log(self) -> None:
        shutil.rmtree(self._log.parent)
