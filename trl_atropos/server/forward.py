"""The way of an environment's request through the front: held while the engine is away, then passed on to it.

`trl_atropos.server.front` makes one `Forwarder` and tells it when to hold and when to release.
"""

import asyncio
import time
from collections.abc import Callable

import aiohttp
from multidict import CIMultiDict
from starlette.requests import ClientDisconnect, Request
from yarl import URL

from trl_atropos.server.engine import Engine
from trl_atropos.server.routes import disconnected, error
from trl_atropos.services.guard import KILL_DEADLINE
from trl_atropos.services.manager import GRACE

# Of one connection, not of the message; and what the client library writes itself.
NOT_PASSED_ON = {"connection", "content-length", "expect", "host", "keep-alive", "te", "transfer-encoding", "upgrade"}
NOT_PASSED_BACK = {b"connection", b"keep-alive", b"transfer-encoding"}
# Seconds between a connection that a dying engine broke and the news of its death, which its guard gives when all of
# its processes are gone.
WHY_WITHIN = GRACE + KILL_DEADLINE
DRAIN_POLL = 0.01


def make_session() -> aiohttp.ClientSession:
    """For requests to the engine. No timeouts: how long sampling may take is the client's business."""
    return aiohttp.ClientSession(
        # Each request gets a connection of its own: the engine may close an idle one just as it is used again.
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("accept", "accept-encoding", "content-type", "user-agent"),
    )


class Forwarder:
    """
    Args:
        engine (`Engine`): Where requests go.
        session (`aiohttp.ClientSession`): Of `make_session`.
        ended (`asyncio.Future[str]`): Done with the reason once nothing may be served any more.

    Attributes:
        policy_version (`int`): Version that the requests which go through now are sampled from.
        in_flight (`int`): Requests that have been passed on and not answered yet.
    """

    def __init__(self, engine: Engine, session: aiohttp.ClientSession, ended: "asyncio.Future[str]") -> None:
        self._engine = engine
        self._session = session
        self._ended = ended
        self._open = asyncio.Event()
        self.policy_version = 0
        self.in_flight = 0

    def release(self, policy_version: int) -> None:
        self.policy_version = policy_version
        self._open.set()

    async def hold(self, timeout: float, wanted: Callable[[], bool]) -> int:
        """Holds what arrives from now on, and waits `timeout` seconds, or while `wanted`, for what is in flight.

        Returns the number of requests that are still in flight.
        """
        self._open.clear()
        deadline = time.monotonic() + timeout
        while self.in_flight and wanted() and time.monotonic() < deadline:
            await asyncio.sleep(DRAIN_POLL)
        return self.in_flight

    async def __call__(self, request: Request, send) -> None:
        """Answers one request. One whose client goes away is dropped, and the engine stops working for it."""
        try:
            body = await request.body()  # wholly, because the end of the client is seen only behind it
        except ClientDisconnect:
            return
        started = False

        async def noted(message) -> None:
            nonlocal started
            started = True
            await send(message)

        work = asyncio.create_task(self._pass_on(request, body, noted))
        gone = asyncio.create_task(disconnected(request.receive))
        try:
            await asyncio.wait({work, gone, self._ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            work.cancel()
        if gone.done():
            return
        try:
            return await work
        except aiohttp.ClientError as problem:
            reason = await self._why(problem)
        except asyncio.CancelledError:
            if not self._ended.done():
                raise
            reason = self._ended.result()
        if not started:  # otherwise the connection is cut, which tells the client that the answer is not whole
            await error(503, reason)(request.scope, request.receive, send)

    async def _pass_on(self, request: Request, body: bytes, send) -> None:
        while not self._open.is_set():  # it may be closed again between the event and this task's turn
            await self._open.wait()
        self.in_flight += 1
        version = f"{self.policy_version}-{self.policy_version}".encode()  # it cannot change while one is in flight
        try:
            async with self._session.request(
                request.method,
                self._url(request.scope),
                data=body or None,
                headers=CIMultiDict((k, v) for k, v in request.headers.items() if k not in NOT_PASSED_ON),
                allow_redirects=False,
            ) as reply:
                headers = [
                    (name, version if name.lower() == b"x-policy-version" else value)
                    for name, value in reply.raw_headers
                    if name.lower() not in NOT_PASSED_BACK
                ]
                await send({"type": "http.response.start", "status": reply.status, "headers": headers})
                async for chunk in reply.content.iter_any():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self.in_flight -= 1

    def _url(self, scope) -> URL:
        query = f"?{scope['query_string'].decode()}" if scope["query_string"] else ""
        return URL(f"{self._engine.url}{scope['raw_path'].decode()}{query}", encoded=True)

    async def _why(self, problem: aiohttp.ClientError) -> str:
        await asyncio.wait({self._ended}, timeout=WHY_WITHIN)
        if self._ended.done():
            return self._ended.result()
        return f"the engine broke the connection off ({type(problem).__name__}: {problem})"
