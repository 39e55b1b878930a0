"""What every control plane of the inference server needs: the token, the lease, and answers to requests that fail.

`control.py` uses it inside vLLM's server, `front/serve.py` in the process before that server. Runs without vLLM.
"""

import asyncio
import hmac
import json
import logging
import socket
from collections.abc import Awaitable

import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

logger = logging.getLogger("vllm.trl_atropos")

LEASE_WAIT = 1.0  # seconds that a new trainer waits for the connection of a former one, which may be closing just now
LEASE_POLL = 0.5  # seconds between two looks at whether the server is shutting down
KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4}
"""Seconds of silence, seconds between probes, unanswered probes: a trainer's machine counts as gone after 30 s."""


class Refused(RuntimeError):
    """A request that cannot be served. The client gets the message, with this HTTP status."""

    def __init__(self, message: str, status: int = 409) -> None:
        super().__init__(message)
        self.status = status


def error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": message}, status)


def has_token(request: Request, token: str) -> bool:
    given = request.headers.get("authorization", "")
    return hmac.compare_digest(given.encode(), f"Bearer {token}".encode())


async def body_of(request: Request) -> dict:
    """The JSON body of a control request; empty if there is none."""
    return json.loads(await request.body() or b"{}")


async def answer(
    work: Awaitable[Response], what: str, through: type[Exception] | tuple[type[Exception], ...] = ()
) -> Response:
    """
    The response that `work` returns. An exception becomes an error response, except those of the types in `through`,
    which are raised. `what` names the request in the log.
    """
    try:
        return await work
    except Refused as problem:
        logger.warning("refused %s: %s", what, problem)
        return error(problem.status, str(problem))
    except through:
        raise
    except ValueError as problem:  # includes pydantic's
        return error(400, str(problem))
    except Exception as problem:  # the boundary of the process: the client gets the reason, the log the traceback
        logger.exception("%s failed", what)
        cause = problem.__cause__ or problem  # the message of vLLM's own exception says nothing
        return error(500, f"{type(cause).__name__}: {cause}")


async def disconnected(receive) -> None:
    """Returns when the client has gone away. Read the body of its request before."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Lease:
    """At most one trainer holds the server, by one response that stays open as long as the trainer lives."""

    def __init__(self) -> None:
        self.held = False

    async def hold(self, request: Request, send, server: uvicorn.Server, at_end) -> None:
        """
        Grants the lease. Returns when the kernel has closed the connection (the trainer is gone), when `server` shuts
        down, which would wait for open responses, or at once if another trainer holds the lease. `at_end()` is awaited
        before another trainer may take the lease.
        """
        scope, receive = request.scope, request.receive
        patience = asyncio.get_running_loop().time() + LEASE_WAIT
        while self.held:
            if asyncio.get_running_loop().time() >= patience:
                refused = error(
                    409,
                    "another trainer holds this server: stop it, or start a server for this run (a trainer whose "
                    "machine is gone loses the lease after 30 s)",
                )
                return await refused(scope, receive, send)
            await asyncio.sleep(0.05)
        self.held = True
        gone = asyncio.create_task(disconnected(receive))
        try:
            headers = [(b"content-type", b"text/plain")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"held\n", "more_body": True})
            _keep_alive(server, scope["client"])
            while not gone.done() and not server.should_exit:
                await asyncio.wait({gone}, timeout=LEASE_POLL)
            await send({"type": "http.response.body", "body": b""})
        finally:
            gone.cancel()
            try:
                await at_end()
            finally:
                self.held = False


def _keep_alive(server: uvicorn.Server, client: tuple[str, int]) -> None:
    """
    Has the kernel close the connection of a client whose machine or network vanished without a word. Otherwise the
    server would wait for it for ever, and no other trainer could take the lease.
    """
    for connection in server.server_state.connections:
        if connection.transport.get_extra_info("peername")[:2] == tuple(client):
            with connection.transport.get_extra_info("socket").dup() as same:
                same.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, value in KEEPALIVE.items():
                    same.setsockopt(socket.IPPROTO_TCP, option, value)
