"""Opens and ends sessions at inference servers: a URL for any OpenAI-shaped program, and what was
sampled below it as a tree of tokens.

    sessions = SessionClient(["http://127.0.0.1:9001"])
    async with sessions.session(settings={"temperature": 1.0}) as session:
        await run_agent(session.openai)   # its base URL; any API key will do
        episode = await session.read()

For environments and commands: imports no torch. A session stays on the server that opened it, and a
new one goes to the server with the fewest calls in flight.
"""

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from trl_atropos.errors import ServerError
from trl_atropos.protocol import (
    ROUTE_PREFIX,
    SESSION_TOKEN_VARIABLE,
    TOKEN_VARIABLE,
    LoadReply,
    SessionOpened,
    SessionQuery,
    SessionReply,
    SessionsReply,
    environment_token,
    reason_in,
)

TIMEOUT = 60.0  # seconds; while a trainer holds requests, a new session waits without a bound


class SessionClient:
    """Client of the servers of one run.

    Args:
        urls: of the servers, without `/v1`.
        token: of sessions or of all control routes; by default, the one in the environment.
        timeout: seconds that an answer may take.
    """

    def __init__(
        self, urls: Sequence[str], token: str | None = None, timeout: float = TIMEOUT
    ) -> None:
        self.urls = [url.rstrip("/").removesuffix("/v1") for url in urls]
        self.timeout = timeout
        self._token = _token_here() if token is None else token
        self._open: Counter[str] = Counter()  # sessions of this client, by server

    @asynccontextmanager
    async def session(self, **query: Any) -> AsyncIterator["OpenSession"]:
        """Opens a session, and ends it behind the block, whatever happened in it. `query` has the
        fields of `protocol.SessionQuery`. Raises `ServerError` if no server opens one."""
        session = await self.open(**query)
        try:
            yield session
        finally:
            await session.end()

    async def open(self, **query: Any) -> "OpenSession":
        """Opens a session, which lives until its `end` or its deadline."""
        body = SessionQuery.model_validate(query).model_dump()
        url = await self._freest()
        self._open[url] += 1
        try:
            reply = await self._call(url, "POST", "/sessions", body, timeout=None)
        except BaseException:
            self._open[url] -= 1
            raise
        return OpenSession(self, url, SessionOpened.model_validate_json(reply))

    async def list(self) -> dict[str, SessionsReply]:
        """Returns the sessions of each server, by its URL."""
        replies = {}
        for url in self.urls:
            reply = await self._call(url, "GET", "/sessions")
            replies[url] = SessionsReply.model_validate_json(reply)
        return replies

    async def read(self, url: str, session_id: str) -> SessionReply:
        """Returns what the session with this id, at the server with this URL, has kept so far."""
        reply = await self._call(url, "GET", f"/sessions/{session_id}")
        return SessionReply.model_validate_json(reply)

    async def end(self, url: str, session_id: str) -> SessionReply:
        """Ends a session, and returns what it has kept."""
        reply = await self._call(url, "DELETE", f"/sessions/{session_id}")
        self._open[url] -= 1
        return SessionReply.model_validate_json(reply)

    async def _freest(self) -> str:
        """Returns the URL of the server with the fewest calls in flight, or with the fewest open
        sessions if these are more: they will call soon."""
        if len(self.urls) == 1:
            return self.urls[0]
        loads = await asyncio.gather(*map(self._load, self.urls), return_exceptions=True)
        candidates = []
        for url, load in zip(self.urls, loads, strict=True):
            if isinstance(load, int):
                candidates.append((max(load, self._open[url]), random.random(), url))
        if not candidates:
            raise loads[0]
        _, _, url = min(candidates)
        return url

    async def _load(self, url: str) -> int:
        reply = LoadReply.model_validate_json(await self._call(url, "GET", "/load"))
        return max(reply.in_flight, reply.sessions)

    async def _call(
        self,
        url: str,
        method: str,
        route: str,
        body: dict | None = None,
        timeout: float | None = TIMEOUT,
    ) -> bytes:
        """Returns the answer of a control route. Raises `ServerError`."""
        limit = aiohttp.ClientTimeout(total=timeout and self.timeout, sock_connect=self.timeout)
        headers = {"authorization": f"Bearer {self._token}"}
        try:
            async with (
                aiohttp.ClientSession(timeout=limit) as http,
                http.request(
                    method, f"{url}{ROUTE_PREFIX}{route}", json=body, headers=headers
                ) as reply,
            ):
                content = await reply.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as problem:
            raise ServerError(
                f"The server at {url} gave no answer about sessions",
                seen=type(problem).__name__,
                fix="See that `trl-atropos serve` runs there, that this machine reaches it, and "
                "that nothing blocks the event loop of this program.",
                code="session-server",
            ) from problem
        if reply.status == 200:
            return content
        reason = reason_in(content.decode(errors="replace"))
        fix = "Correct the request, or see the server's log."
        if reply.status == 401:
            fix = (
                f"Set {TOKEN_VARIABLE} to the token that the server was started with. If it was "
                "started with none, the last lines of its start name the file of its token."
            )
            if os.environ.get(SESSION_TOKEN_VARIABLE):
                fix = f"Unset {SESSION_TOKEN_VARIABLE}, which is of another server. {fix}"
        raise ServerError(
            f"The server at {url} refused a request about sessions: {reason}",
            seen=f"HTTP {reply.status}",
            fix=fix,
            code="session-refused",
        )


def _token_here() -> str:
    """Returns the token in the environment: that of sessions, which a run gives its environments,
    or else the control token."""
    return os.environ.get(SESSION_TOKEN_VARIABLE) or environment_token()


@dataclass
class OpenSession:
    """A session that this program has opened."""

    client: SessionClient
    url: str  # of its server
    opened: SessionOpened
    _ended: SessionReply | None = None

    @property
    def openai(self) -> str:
        """The base URL for OpenAI's clients, which ends with `/v1`."""
        return self.opened.openai

    @property
    def anthropic(self) -> str:
        """The base URL for Anthropic's clients, which add `/v1` themselves."""
        return self.opened.anthropic

    async def read(self) -> SessionReply:
        """Returns what the session has kept so far."""
        if self._ended is not None:
            return self._ended
        return await self.client.read(self.url, self.opened.id)

    async def end(self) -> SessionReply:
        """Ends the session: aborts its calls in flight, refuses later ones. Returns what it has
        kept. The second call returns the same."""
        if self._ended is None:
            self._ended = await self.client.end(self.url, self.opened.id)
        return self._ended
