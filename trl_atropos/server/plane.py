"""The base of both control planes of the inference server: the token, the lease, the door at which
requests for samples wait, and answers to requests that fail.

`control.py` subclasses `ControlPlane` inside vLLM's server, `front/serve.py` in the process before
that server. The classes at the end remember things for the trainer: which policy versions sampled
each completion and each evaluation, and which requests failed. Runs without vLLM.
"""

import asyncio
import hmac
import inspect
import json
import logging
import math
import re
import socket
import time
import uuid
from bisect import bisect_right
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from trl_atropos.privacy import close_to_others
from trl_atropos.protocol import (
    LEASE_BEGINNING,
    ROUTE_PREFIX,
    TOKEN_VARIABLE,
    EvaluationReply,
    Note,
    Refusal,
    RefusalsReply,
    Span,
    environment_token,
    evaluation_key,
    reason_in,
    session_token,
)

logger = logging.getLogger("vllm.trl_atropos")

# seconds that a new trainer waits for the lease: a former one's connection may just be closing
LEASE_WAIT = 1.0
HIDDEN = "SESSION"  # stands for the id of a session in a path
POLL = 0.5  # seconds between two looks at whether the server is shutting down
# Seconds of silence, seconds between probes, unanswered probes: a trainer's machine counts as gone
# after 10 + 4 * 5 = 30 s.
KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4}
# API key of the request being served, if it is an evaluation's
EVALUATION: ContextVar[str | None] = ContextVar("evaluation", default=None)
LEASE_TAKEN = (
    "another trainer holds this server: stop it, or start a server for this run (a trainer whose "
    "machine is gone loses the lease after 30 s)"
)


class Refused(RuntimeError):
    """The request cannot be served. The client gets the message, with this HTTP status."""

    def __init__(self, message: str, status: int = 409) -> None:
        super().__init__(message)
        self.status = status


class Body(dict):
    """The JSON body of a control request."""

    def __missing__(self, name: str):
        raise Refused(f"the body of the request lacks `{name}`", 400)


def error(status: int, message: str) -> JSONResponse:
    """Returns a response that `protocol.reason_in` reads the message of."""
    return JSONResponse({"error": message}, status)


async def answer(
    work: Awaitable[Response], what: str, fatal: tuple[type[Exception], ...] = ()
) -> Response:
    """Returns the response of `work`, or an error response if it raises. Raises only the types in
    `fatal`. The log names the request by `what`."""
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
    """Runs `work` until it is done, its client goes away or one of `ends` is done. In the last two
    cases it is cancelled. Returns its task, or `None` if the client went away. Read the body of the
    request first: a disconnect is seen only behind it."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, gone, *ends}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        task.cancel()  # does nothing if it is done
        await asyncio.wait({task})
    client_left = gone.done() and not gone.cancelled()
    return None if client_left else task


async def _disconnected(receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Change(NamedTuple):
    """A control request that changes the server: its handler, and what it requires."""

    handler: Callable[[Body], Awaitable[dict | None]]
    lease: bool = False
    pause: bool = False


class ControlPlane:
    """
    Serves the routes under `/trl_atropos/`, for the trainer. At most one trainer holds the server,
    by a lease.

    A subclass has `server`, which runs this app, and `trainer_left`, which is called when a lease
    ends, before another trainer may take it. It also has the handlers, which take the body of a
    request and return the answer: `questions`, by method and path, answer at any time; `changes`,
    by path of POST requests, run one after the other. `answer_about_sessions` answers requests to
    `/trl_atropos/sessions`, from whose path the id of a session has been taken.
    """

    def __init__(self) -> None:
        self.token = environment_token()
        if not self.token:  # which anybody would have
            raise RuntimeError(f"a server cannot run without a control token in {TOKEN_VARIABLE}")
        self.instance = uuid.uuid4().hex
        self.open = asyncio.Event()  # set: requests for samples go through
        self.holding = False  # whether the requests of environments wait
        self.waiting: deque[asyncio.Future] = deque()  # their turns, the first that came first
        self.broken: str | None = None  # why nothing can be served any more
        self.ledger = Ledger()
        self.evaluations = Evaluations()
        self.lease = asyncio.Lock()
        self.changing = asyncio.Lock()

    @property
    def paused(self) -> bool:
        """True while requests for samples wait for the next policy version."""
        return not self.open.is_set()

    async def hold(self, body: dict) -> dict:
        """Holds new requests for samples (`held`) and admits a fraction (`let_in`) of those
        waiting. Requests in flight go on, and so do the trainer's own and those of evaluations.
        Returns how many wait afterwards."""
        self.hold_back(body["held"], body["let_in"])
        return {"waiting": len(self.waiting)}

    def hold_back(self, held: bool, let_in: float) -> None:
        """Does what `hold` says. A fraction of 0.3 of two waiting requests admits one."""
        self.holding = held
        # A client that has gone has cancelled its turn: it does not count.
        self.waiting = deque(turn for turn in self.waiting if not turn.done())
        for _ in range(math.ceil(let_in * len(self.waiting))):
            self.waiting.popleft().set_result(None)

    async def close(self) -> None:
        """Closes this server's processes to others of the same user. Called before a session is
        opened, because nobody knows what runs in it."""
        close_to_others()

    async def until_admitted(self, request: Request) -> None:
        """Waits while requests of environments are held. Sets `EVALUATION` for this request."""
        evaluation = evaluation_key(request.headers.get("authorization", ""))
        EVALUATION.set(evaluation)
        if self.holding and evaluation is None and not self.has_token(request):
            await self.until_turn()

    async def until_turn(self) -> None:
        """Waits until a hold ends or admits this one of those that wait."""
        turn = asyncio.get_running_loop().create_future()
        self.waiting.append(turn)
        await turn

    async def until_open(self) -> None:
        """Waits out a pause. Raises `Refused` if the server cannot serve any more."""
        while self.paused:  # it may be paused again between the event and this task's turn
            await self.open.wait()
        if self.broken is not None:
            raise Refused(self.broken, 503)

    def has_token(self, request: Request) -> bool:
        """Returns whether the request has the control token."""
        return _has(request, self.token)

    def _may_ask(self, request: Request, path: str) -> bool:
        """Returns whether the request has a token for a control route."""
        if self.has_token(request):
            return True
        opens = path == "/sessions" and request.method == "POST"
        # all of them together would tell one environment the sessions of another
        if not opens and path not in ("/load", f"/sessions/{HIDDEN}"):
            return False
        return _has(request, session_token(self.token))

    async def control(
        self, request: Request, send, fatal: tuple[type[Exception], ...] = ()
    ) -> None:
        """Answers a request to a route under `/trl_atropos/`."""
        path = request.scope["path"].removeprefix(ROUTE_PREFIX)
        if not self._may_ask(request, path):
            response = error(401, "the control token is missing or wrong")
        elif self.broken is not None:
            response = error(503, self.broken)
        elif path == "/lease" and request.method == "POST":
            await self._hold_lease(request, send)
            return
        elif path.startswith("/sessions"):
            work = self.answer_about_sessions(request)
            response = await answer(work, f"the control request {path}", fatal)
        else:
            response = await answer(self._call(request, path), f"the control request {path}", fatal)
        await response(request.scope, request.receive, send)

    async def _call(self, request: Request, path: str) -> JSONResponse:
        content = await request.body()
        body = Body(json.loads(content or b"{}"))
        question = self.questions.get((request.method, path))
        if question is not None:
            reply = question(body)
            if inspect.isawaitable(reply):
                reply = await reply
            return JSONResponse(reply)
        change = self.changes.get(path)
        if change is None or request.method != "POST":
            raise Refused(f"no control route {request.method} {path}", 404)
        async with self.changing:
            if change.lease and not self.lease.locked():
                raise Refused(
                    f"{path} needs a lease, or nothing would notice if the trainer died: open it "
                    "first"
                )
            if change.pause and not self.paused:
                raise Refused(
                    f"{path} needs a pause, or requests would sample from weights in the making"
                )
            reply = await change.handler(body)
            return JSONResponse(reply or {})

    async def _hold_lease(self, request: Request, send) -> None:
        """Keeps the response open until the kernel has closed the connection (the trainer is gone)
        or the server shuts down, which would wait for open responses. Answers 409 if another
        trainer holds the lease."""
        try:
            await asyncio.wait_for(self.lease.acquire(), LEASE_WAIT)
        except TimeoutError:
            response = error(409, LEASE_TAKEN)
            await response(request.scope, request.receive, send)
            return
        gone = asyncio.create_task(_disconnected(request.receive))
        headers = [(b"content-type", b"text/plain")]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
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


def _has(request: Request, token: str) -> bool:
    given = request.headers.get("authorization", "")
    return hmac.compare_digest(given.encode(), f"Bearer {token}".encode())


def _keep_alive(server: uvicorn.Server, client: tuple[str, int]) -> None:
    """Makes the kernel close the connection of a client whose machine or network vanished without a
    word: otherwise no other trainer could take the lease."""
    for connection in server.server_state.connections:
        transport = connection.transport
        if transport.get_extra_info("peername")[:2] != tuple(client):
            continue
        with transport.get_extra_info("socket").dup() as duplicate:
            duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in KEEPALIVE.items():
                duplicate.setsockopt(socket.IPPROTO_TCP, option, value)


# ----------------------------------------------------------- what the server remembers for trainers

MAX_REASONS = 20  # the latest reasons of errors are kept
MAX_MESSAGE = 400  # characters


class Ledger:
    """
    Remembers the versions and settings of the last `capacity` completions, by
    `protocol.completion_key`.

    Equal keys are rare (greedy repeats on the same weights, or tokens of probability one). A key
    that is noted again keeps the oldest of its versions: the answer may be too old, but never too
    new. The key that was noted first is forgotten first, so that an old version does not stick to a
    key for ever.
    """

    def __init__(self, capacity: int = 262_144) -> None:  # about 50 MB
        self.capacity = capacity
        self._notes: dict[bytes, Note] = {}  # in the order in which they were first noted

    def note(self, key: bytes, note: Note) -> None:
        """Adds a completion. Forgets another one if there are too many."""
        known = self._notes.get(key)
        if known is not None:
            note = note.merged(known)
        elif len(self._notes) >= self.capacity:
            oldest_key = next(iter(self._notes))
            del self._notes[oldest_key]
        self._notes[key] = note

    def find(self, keys: Iterable[str]) -> list[Note | None]:
        """Returns the note of each key, which is given in hexadecimal."""
        return [self._notes.get(bytes.fromhex(key)) for key in keys]

    def keys(self) -> list[str]:
        """Returns all keys in hexadecimal, in the order in which they were first noted."""
        return [key.hex() for key in self._notes]


class Evaluations:
    """Remembers which policy versions sampled for the last `capacity` evaluations, by the API key
    of their requests."""

    def __init__(self, capacity: int = 256) -> None:
        self.capacity = capacity
        self._known: dict[str, Span] = {}  # the oldest and the newest

    def note(self, key: str, span: Span) -> None:
        """Adds the versions at the first and last token of a completion."""
        oldest, newest = self._known.get(key, span)
        self._known[key] = (min(oldest, *span), max(newest, *span))
        if len(self._known) > self.capacity:
            first_key = next(iter(self._known))
            del self._known[first_key]

    def answer(self, body: dict) -> dict:
        """Answers `POST /trl_atropos/evaluation`."""
        oldest, newest = self._known.get(body["key"], (None, None))
        reply = EvaluationReply(oldest=oldest, newest=newest)
        return reply.model_dump()


class History:
    """Remembers which version was sampled from at which time. Time is counted in publishes, because
    a version may come again: a new trainer begins at any version."""

    def __init__(self, first_version: int = 0) -> None:
        self.publishes = 0  # so far
        # By adapter id, `None` for the model itself: (publish, version from then on).
        self._published: dict[int | None, list[tuple[int, int]]] = {None: [(0, first_version)]}

    def publish(self, version: int, adapter_id: int | None) -> None:
        """Notes that from now on, the adapter with this id holds `version`, or the model itself if
        there is none."""
        self.publishes += 1
        self._published.setdefault(adapter_id, []).append((self.publishes, version))

    def version(self, publishes: int, adapter_id: int | None) -> int | None:
        """Returns the version that the model or an adapter held after that many publishes, or
        `None` for an adapter that was never published. Before its first publish, an adapter counts
        as what it held first: a request may have looked it up just before."""
        published = self._published.get(adapter_id)
        if published is None:
            return None
        # With publishes 2 and 5 of an adapter, the first one is in force after 4 publishes.
        index = bisect_right(published, publishes, key=itemgetter(0)) - 1
        _, version = published[max(0, index)]
        return version


@dataclass
class _Reason:
    """Requests that failed for one reason, with the time and message of the last one."""

    count: int = 0
    time: float = 0.0
    message: str = ""


class Refusals:
    """Counts the requests of environments that were answered with an error, by reason. The client
    of an environment discards the reason, so without this neither its log nor the trainer would
    ever show it."""

    def __init__(self) -> None:
        self._total = 0
        # By the message without its numbers, the latest last.
        self._reasons: dict[str, _Reason] = {}

    def watched(self, send):
        """Returns a `send` that also notes an answer that is an error, except 503: the server is
        shutting down."""
        status = 200

        async def watching(message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif status >= 400 and status != 503 and message.get("body"):
                text = message["body"].decode(errors="replace")
                self._note(f"HTTP {status}: {reason_in(text)}")
                status = 200  # an answer counts once
            await send(message)

        return watching

    def _note(self, message: str) -> None:
        kind = re.sub(r"\d+", "N", message)
        reason = self._reasons.pop(kind, _Reason())
        reason.count += 1
        reason.time = time.monotonic()
        reason.message = message[:MAX_MESSAGE]
        self._reasons[kind] = reason
        self._total += 1
        if len(self._reasons) > MAX_REASONS:
            oldest_kind = next(iter(self._reasons))
            del self._reasons[oldest_kind]

    def answer(self) -> dict:
        """Answers `GET /trl_atropos/refusals`."""
        now = time.monotonic()
        latest = []
        for reason in reversed(self._reasons.values()):
            seconds_ago = now - reason.time
            refusal = Refusal(count=reason.count, seconds_ago=seconds_ago, message=reason.message)
            latest.append(refusal)
        return RefusalsReply(total=self._total, latest=latest).model_dump()
