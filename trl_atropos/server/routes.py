"""What every control plane of the inference server shares: the token, the lease, and how a route answers.

`control.py` uses it inside of vLLM's server, `front.py` in the process that restarts that server.
"""

import asyncio
import hmac
import json
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping

import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse

logger = logging.getLogger("vllm.trl_atropos")

LEASE_WAIT = 1.0  # seconds that a new trainer waits for a former one's connection, which may be closing just now
LEASE_POLL = 0.5  # seconds between two looks at whether the server shuts down
KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4}
"""Seconds of silence, seconds between questions, unanswered questions: after 30 s a trainer's machine is gone."""

Handler = Callable[[dict], Awaitable[dict]]


class ControlError(RuntimeError):
    """A control request that cannot be done; the message goes to the trainer, with this HTTP status."""

    def __init__(self, message: str, status: int = 409) -> None:
        super().__init__(message)
        self.status = status


def error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": message}, status)


def has_token(request: Request, token: str) -> bool:
    given = request.headers.get("authorization", "")
    return hmac.compare_digest(given.encode(), f"Bearer {token}".encode())


async def answer(
    request: Request,
    path: str,
    routes: Mapping[tuple[str, str], Handler],
    through: type[Exception] | tuple[type[Exception], ...] = (),
) -> JSONResponse:
    """
    Calls the handler of a control route with the request's JSON body. What it raises becomes an error response, but
    for errors of the kind `through`, which are the caller's.
    """
    handler = routes.get((request.method, path))
    if handler is None:
        return error(404, f"no control route {request.method} {path}")
    try:
        body = json.loads(await request.body() or b"{}")
        return JSONResponse(await handler(body))
    except ControlError as problem:
        return error(problem.status, str(problem))
    except ValueError as problem:  # pydantic's included
        return error(400, str(problem))
    except through:
        raise
    except Exception as problem:  # the boundary of the process: the trainer is told, and the log has the traceback
        logger.exception("control request %s failed", path)
        return error(500, f"{type(problem).__name__}: {problem}")


async def disconnected(receive) -> None:
    """Returns when the client has gone away. Whoever needs the request's body reads it before."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Lease:
    """At most one trainer holds the server, by one response that stays open for the trainer's whole life."""

    def __init__(self) -> None:
        self.held = False

    async def hold(
        self, scope, receive, send, server: uvicorn.Server, at_end: Callable[[], Awaitable[None]] | None = None
    ) -> bool:
        """Grants the lease and returns once the kernel has closed the connection (the trainer is gone) or `server`
        shuts down, which waits for open responses. Returns `False` at once if another trainer holds the lease.
        `at_end` is done before another trainer may have it."""
        patience = asyncio.get_running_loop().time() + LEASE_WAIT
        while self.held:
            if asyncio.get_running_loop().time() >= patience:
                refused = "another trainer holds this server: stop it, or start a server for this run"
                gone = "a trainer whose machine is gone is let go of after 30 s"
                await error(409, f"{refused} ({gone})")(scope, receive, send)
                return False
            await asyncio.sleep(0.05)
        self.held = True
        gone = asyncio.create_task(disconnected(receive))
        try:
            headers = [(b"content-type", b"text/plain")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"held\n", "more_body": True})
            _notice_silence(server, scope["client"])
            while not gone.done() and not server.should_exit:
                await asyncio.wait({gone}, timeout=LEASE_POLL)
            await send({"type": "http.response.body", "body": b""})
        finally:
            gone.cancel()
            try:
                if at_end is not None:
                    await at_end()
            finally:
                self.held = False
        return True


def _notice_silence(server: uvicorn.Server, client: tuple[str, int]) -> None:
    """
    Lets the kernel close the connection of a client that vanished without a word, with its machine or its network.
    Without, nothing would be heard of it for ever, and no other trainer could have the lease.
    """
    for connection in server.server_state.connections:
        if connection.transport.get_extra_info("peername")[:2] == tuple(client):
            with connection.transport.get_extra_info("socket").dup() as same:
                same.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, seconds_or_count in KEEPALIVE.items():
                    same.setsockopt(socket.IPPROTO_TCP, option, seconds_or_count)
