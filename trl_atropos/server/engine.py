"""The engine server behind the front: a child process on a loopback port of its own, started, stopped and watched.

The front (`trl_atropos.server.front`) makes one `Engine`. The child is `trl_atropos.server.launch` under a guard
(`trl_atropos.services.manager`), which ends it whatever becomes of the front.
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
from trl_atropos.flags import server_flags
from trl_atropos.protocol import ROUTE_PREFIX, TOKEN_VARIABLE
from trl_atropos.services.manager import Services, free_port, tail

NAME = "engine"
HOST = "127.0.0.1"
START_TIMEOUT = 1800.0  # seconds; large models take minutes to load and to compile
HEALTH_TIMEOUT = aiohttp.ClientTimeout(total=2.0)
SILENCE_TIMEOUT = aiohttp.ClientTimeout(total=15.0)  # the engine's server itself gives its engine 10 s
DESCRIBE_TIMEOUT = aiohttp.ClientTimeout(total=120.0)  # hashes the whole vocabulary
POLL = 0.2


class Engine:
    """
    Args:
        first_model (`str`): Name of the model that clients know; it stays so whatever is served.
        flags (`list[str]`): Further flags of the engine's command line.
        seed (`int`): Of the first start; each further one takes the next, or it would draw the same numbers again.
        session (`aiohttp.ClientSession`): What it is asked with.

    Attributes:
        model (`str`, *optional*): What is served now; `None` while the engine is away.
        url (`str`): Where it answers; another one after each start.
        description (`dict`): Its answer to `GET /trl_atropos/info` after the last start; empty before the first.
    """

    def __init__(self, first_model: str, flags: list[str], seed: int, session: aiohttp.ClientSession) -> None:
        named = "--served-model-name" in server_flags(flags)
        self._flags = flags if named else [*flags, "--served-model-name", first_model]
        self._next_seed = seed
        self._session = session
        self._token = secrets.token_urlsafe(24)  # not the trainer's, who has no business behind the front
        self._log = Path(tempfile.mkdtemp(prefix="trl_atropos_")) / f"{NAME}.log"
        self._log.touch()
        self._shown = 0  # bytes of the log
        self._services = Services(self._log.parent)
        self._stopping = threading.Lock()
        self.model: str | None = None
        self.url = ""
        self.description: dict = {}

    async def serve(self, model: str) -> None:
        """Stops the engine if there is one and starts it on `model`; returns when that answers.

        From the main thread. Raises `ServiceError` with the reason and the end of the log; the engine is away then.
        """
        self.model = None
        await asyncio.to_thread(self.stop)
        port = free_port(HOST)
        self.url = f"http://{HOST}:{port}"
        command = [sys.executable, "-m", "trl_atropos.server.launch", model, "--host", HOST, "--port", str(port)]
        command += ["--seed", str(self._next_seed), *self._flags]
        self._next_seed += 1
        self._services.start(NAME, command, env={TOKEN_VARIABLE: self._token})
        await self._until_healthy()
        self.description = await self._describe()
        self.model = model

    async def _until_healthy(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while time.monotonic() < deadline:
            self.show_log()
            await self.check()
            try:
                async with self._session.get(f"{self.url}/health", timeout=HEALTH_TIMEOUT) as reply:
                    if reply.status == 200:
                        return
            except (aiohttp.ClientError, TimeoutError):
                pass  # it does not listen yet
            await asyncio.sleep(POLL)
        raise ServiceError(
            f"the engine did not become healthy within {START_TIMEOUT:.0f} s. The end of its log:\n{tail(self._log)}"
        )

    async def ask(self, method: str, route: str, timeout: aiohttp.ClientTimeout, body: dict | None = None) -> dict:
        """Its answer on one of its control routes. Raises `aiohttp.ClientError` or `TimeoutError`."""
        url, headers = f"{self.url}{ROUTE_PREFIX}{route}", {"authorization": f"Bearer {self._token}"}
        async with self._session.request(method, url, json=body, headers=headers, timeout=timeout) as reply:
            reply.raise_for_status()
            return await reply.json()

    async def silence(self) -> str | None:
        """What is wrong with an engine that is served from, by its own health check; `None` if nothing is."""
        try:
            async with self._session.get(f"{self.url}/health", timeout=SILENCE_TIMEOUT) as reply:
                return None if reply.status == 200 else (await reply.text())[:500]
        except (aiohttp.ClientError, TimeoutError) as problem:
            if self.model is None:  # it has been stopped since, for a restart
                return None
            return f"the engine's server does not answer ({type(problem).__name__}: {problem})"

    async def _describe(self) -> dict:
        try:
            return await self.ask("GET", "/info", DESCRIBE_TIMEOUT)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ServiceError(
                f"the engine became healthy but did not say what it serves ({type(error).__name__}: {error}). The end "
                f"of its log:\n{tail(self._log)}"
            ) from error

    async def check(self) -> None:
        """Raises `ServiceError` if the engine died by itself."""
        await asyncio.to_thread(self._services.check)  # which may have to end what a killed guard left behind

    def stop(self) -> None:
        """Returns when nothing of the engine is left, at most 12 s later."""
        with self._stopping:  # when the front ends, a restart's call may be at work in its thread
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
