"""What the control planes of the inference server share: the token, the lease, answers to requests
that fail, and what the server remembers for the trainer: which policy versions sampled each
completion, and which requests failed.

`control.py` subclasses `ControlPlane` inside vLLM's server, `front/serve.py` in the process before
that server. Runs without vLLM.
"""

import asyncio
import hmac
import inspect
import json
import logging
import math
import os
import re
import socket
import time
import uuid
from bisect import bisect_right
from collections import deque
from collections.abc import Awaitable, Coroutine, Iterable
from contextvars import ContextVar
from operator import itemgetter

import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from trl_atropos.protocol import (
    LEASE_BEGINNING,
    ROUTE_PREFIX,
    TOKEN_VARIABLE,
    EvaluationReply,
    Note,
    Refusal,
    RefusalsReply,
    Span,
    evaluation_key,
    reason_in,
)

logger = logging.getLogger("vllm.trl_atropos")

# seconds that a new trainer waits for the connection of a former one, which may be closing just now
LEASE_WAIT = 1.0
POLL = 0.5  # seconds between two looks at whether the server is shutting down
# Seconds of silence, seconds between probes, unanswered probes: a trainer's machine counts as gone
# after 30 s.
KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4}
# API key of the request being served
EVALUATION: ContextVar[str | None] = ContextVar("evaluation", default=None)
HELD = (
    "another trainer holds this server: stop it, or start a server for this run (a trainer whose "
    "machine is gone loses the lease after 30 s)"
)


class Refused(RuntimeError):
    """A request that cannot be served. The client gets the message, with this HTTP status."""

    def __init__(self, message: str, status: int = 409) -> None:
        super().__init__(message)
        self.status = status


class Body(dict):
    """The JSON body of a control request."""

    def __missing__(self, name: str):
        raise Refused(f"the body of the request lacks `{name}`", 400)


def error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": message}, status)


async def answer(
    work: Awaitable[Response], what: str, fatal: tuple[type[Exception], ...] = ()
) -> Response:
    """The response that `work` returns, or an error response for what it raises, but for the types
    in `fatal`."""
    try:
        return await work
    except Refused as problem:
        logger.warning("refused %s: %s", what, problem)
        return error(problem.status, str(problem))
    except fatal:
        raise
    except ValueError as problem:  # includes pydantic's
        return error(400, str(problem))
    # the boundary of the process: the client gets the reason, the log the traceback
    except Exception as problem:
        logger.exception("%s failed", what)
        cause = problem.__cause__ or problem  # the message of vLLM's own exception says nothing
        return error(500, f"{type(cause).__name__}: {cause}")


async def while_connected(work: Coroutine, receive, *ends: asyncio.Future) -> asyncio.Task | None:
    """Runs `work` until it is done, its client goes away or one of `ends` is done; in the last two
    cases it is cancelled. Returns its task, None if the client went away. Read the body of the
    request before."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, gone, *ends}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        task.cancel()  # does nothing if it is done
        await asyncio.wait({task})
    return None if gone.done() and not gone.cancelled() else task


async def _disconnected(receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class ControlPlane:
    """
    The routes under `/trl_atropos/`, for the trainer. At most one trainer holds the server, by a
    lease.

    A subclass has `server`, which runs this app, `trainer_left`, which is called when a lease ends,
    before another trainer may take it, and the handlers, which take the body of a request and
    return the answer: `questions`, by method and path, answer at any time; `changes`, by path of
    POST requests, run one after the other.
    """

    def __init__(self) -> None:
        self.token = os.environ[TOKEN_VARIABLE]
        self.instance = uuid.uuid4().hex
        self.open = asyncio.Event()  # set: requests for samples go through
        self.holding = False  # whether those of others than the trainer wait
        self.waiting: deque[asyncio.Future] = deque()  # they do, first come first
        self.broken: str | None = None  # why nothing can be served any more
        self.ledger, self.evaluations = Ledger(), Evaluations()
        self.lease = asyncio.Lock()
        self.changing = asyncio.Lock()

    @property
    def paused(self) -> bool:
        return not self.open.is_set()

    async def hold(self, body: dict) -> dict:
        """Lets requests for samples wait that come from now on, or not, and lets in a share of
        those that do. Those in flight go on, and so do the trainer's own and those of evaluations.
        Returns how many wait after that."""
        self.hold_back(body["held"], body["let_in"])
        return {"waiting": len(self.waiting)}

    def hold_back(self, held: bool, let_in: float) -> None:
        self.holding = held
        # A client that has gone has cancelled its turn: it takes no place in the share.
        self.waiting = deque(turn for turn in self.waiting if not turn.done())
        for _ in range(math.ceil(let_in * len(self.waiting))):
            self.waiting.popleft().set_result(None)

    async def until_admitted(self, request: Request) -> None:
        EVALUATION.set(evaluation_key(request.headers.get("authorization", "")))
        if self.holding and EVALUATION.get() is None and not self.has_token(request):
            self.waiting.append(asyncio.get_running_loop().create_future())
            await self.waiting[-1]

    async def until_open(self) -> None:
        while self.paused:  # it may be paused again between the event and this task's turn
            await self.open.wait()
        if self.broken is not None:
            raise Refused(self.broken, 503)

    def has_token(self, request: Request) -> bool:
        given = request.headers.get("authorization", "")
        return hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode())

    async def control(
        self, request: Request, send, fatal: tuple[type[Exception], ...] = ()
    ) -> None:
        path = request.scope["path"].removeprefix(ROUTE_PREFIX)
        if not self.has_token(request):
            response = error(401, "the control token is missing or wrong")
        elif self.broken is not None:
            response = error(503, self.broken)
        elif path == "/lease" and request.method == "POST":
            return await self._hold_lease(request, send)
        else:
            response = await answer(self._call(request, path), f"the control request {path}", fatal)
        await response(request.scope, request.receive, send)

    async def _call(self, request: Request, path: str) -> JSONResponse:
        body = Body(json.loads(await request.body() or b"{}"))
        if (question := self.questions.get((request.method, path))) is not None:
            reply = question(body)
            return JSONResponse(await reply if inspect.isawaitable(reply) else reply)
        if request.method != "POST" or path not in self.changes:
            raise Refused(f"no control route {request.method} {path}", 404)
        handler, needs = self.changes[path]
        async with self.changing:
            if "lease" in needs and not self.lease.locked():
                raise Refused(
                    f"{path} needs a lease, or nothing would notice if the trainer died: open it "
                    "first"
                )
            if "pause" in needs and not self.paused:
                raise Refused(
                    f"{path} needs a pause, or requests would sample from weights in the making"
                )
            return JSONResponse(await handler(body) or {})

    async def _hold_lease(self, request: Request, send) -> None:
        """Returns when the kernel has closed the connection (the trainer is gone), when the server
        shuts down, which would wait for open responses, or soon if another trainer holds the
        lease."""
        try:
            await asyncio.wait_for(self.lease.acquire(), LEASE_WAIT)
        except TimeoutError:
            return await error(409, HELD)(request.scope, request.receive, send)
        gone = asyncio.create_task(_disconnected(request.receive))
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": 200,
                    "headers": [(b"content-type", b"text/plain")],
                }
            )
            await send({"type": "http.response.body", "body": LEASE_BEGINNING, "more_body": True})
            _keep_alive(self.server, request.scope["client"])
            while not gone.done() and not self.server.should_exit:
                await asyncio.wait({gone}, timeout=POLL)
            await send({"type": "http.response.body", "body": b""})
        finally:
            gone.cancel()
            self.hold_back(False, 1.0)
            try:
                await self.trainer_left()
            finally:
                self.lease.release()


def _keep_alive(server: uvicorn.Server, client: tuple[str, int]) -> None:
    """Has the kernel close the connection of a client whose machine or network vanished without a
    word: otherwise no other trainer could take the lease."""
    for connection in server.server_state.connections:
        if connection.transport.get_extra_info("peername")[:2] == tuple(client):
            with connection.transport.get_extra_info("socket").dup() as same:
                same.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, value in KEEPALIVE.items():
                    same.setsockopt(socket.IPPROTO_TCP, option, value)


# -------------------------------------------------------- what the server remembers for the trainer

MAX_REASONS = 20  # the latest reasons of errors are kept
MAX_MESSAGE = 400  # characters


class Ledger:
    """
    What sampled the last `capacity` completions, by `protocol.completion_key`.

    Equal keys are rare (greedy repeats on the same weights, or tokens of probability one). A key
    that is noted again keeps the oldest of its versions: the answer may be too old, but never too
    new. It is forgotten by when it came first, so that an old version does not stick to it for
    ever.
    """

    def __init__(self, capacity: int = 262_144) -> None:  # about 50 MB
        self.capacity = capacity
        self._notes: dict[bytes, Note] = {}  # in the order in which they were first noted

    def note(self, key: bytes, note: Note) -> None:
        known = self._notes.get(key)
        if known is not None:
            note = note.merged(known)
        elif len(self._notes) >= self.capacity:
            del self._notes[next(iter(self._notes))]
        self._notes[key] = note

    def find(self, keys: Iterable[str]) -> list[Note | None]:
        """What is known of each key, which is given in hexadecimal."""
        return [self._notes.get(bytes.fromhex(key)) for key in keys]

    def keys(self) -> list[str]:
        """All keys in hexadecimal, in the order in which they were first noted."""
        return [key.hex() for key in self._notes]


class Evaluations:
    """Which policy versions have sampled for each evaluation, by the API key of its requests."""

    def __init__(self, capacity: int = 256) -> None:
        self.capacity = capacity
        self._known: dict[str, Span] = {}  # the oldest and the newest

    def note(self, key: str, span: Span) -> None:
        """The versions at the first and last token of a completion."""
        oldest, newest = self._known.get(key, span)
        self._known[key] = min(oldest, *span), max(newest, *span)
        if len(self._known) > self.capacity:
            del self._known[next(iter(self._known))]

    def answer(self, body: dict) -> dict:
        """`POST /trl_atropos/evaluation`."""
        oldest, newest = self._known.get(body["key"], (None, None))
        return EvaluationReply(oldest=oldest, newest=newest).model_dump()


class History:
    """Which version was sampled from at which time. Time is counted in publishes, because a version
    may come again: a new trainer begins at any version."""

    def __init__(self) -> None:
        self.publishes = 0  # so far
        # By adapter id, None for the model itself: (publish, version from then on).
        self._held: dict[int | None, list[tuple[int, int]]] = {None: [(0, 0)]}

    def publish(self, version: int, adapter_id: int | None) -> None:
        """From now on, the adapter with this id holds `version`; if it is None, the model itself
        does."""
        self.publishes += 1
        self._held.setdefault(adapter_id, []).append((self.publishes, version))

    def version(self, publishes: int, adapter_id: int | None) -> int | None:
        """The version that the model or an adapter held after that many publishes; None for an
        adapter that was never published. Before its first publish, an adapter counts as what it
        held first: a request may have looked it up just before."""
        if (held := self._held.get(adapter_id)) is None:
            return None
        return held[max(0, bisect_right(held, publishes, key=itemgetter(0)) - 1)][1]


class Refusals:
    """Counts the requests of environments that were answered with an error, by reason. The client
    of an environment discards the reason, so without this neither its log nor the trainer would
    ever show it."""

    def __init__(self) -> None:
        self._total = 0
        # By the message without its numbers, the latest last: count, time of the last one, its
        # message.
        self._reasons: dict[str, tuple[int, float, str]] = {}

    def watched(self, send):
        """The same `send`, which notes an answer that is an error, except 503: the server is
        shutting down."""
        status = 200

        async def watching(message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif status >= 400 and status != 503 and message.get("body"):
                self._note(f"HTTP {status}: {reason_in(message['body'].decode(errors='replace'))}")
                status = 200  # an answer counts once
            await send(message)

        return watching

    def _note(self, message: str) -> None:
        kind = re.sub(r"\d+", "N", message)
        count, *_ = self._reasons.pop(kind, (0,))
        self._reasons[kind] = count + 1, time.monotonic(), message[:MAX_MESSAGE]
        self._total += 1
        if len(self._reasons) > MAX_REASONS:
            del self._reasons[next(iter(self._reasons))]

    def answer(self) -> dict:
        """`GET /trl_atropos/refusals`."""
        now = time.monotonic()
        reasons = reversed(self._reasons.values())
        latest = [
            Refusal(count=count, seconds_ago=now - last, message=text)
            for count, last, text in reasons
        ]
        return RefusalsReply(total=self._total, latest=latest).model_dump()
