"""Keeps the sessions of a server: what any client samples below a URL of its own, as a tree.

`SessionRoutes` answers the control routes `POST /trl_atropos/sessions` and `GET` and `DELETE
/trl_atropos/sessions/ID`, for `Sessions` here and for the front of the mode `restart`.
`session_door.py` lets calls below `/s/ID` in, and `session_capture.py` adds what they sample to the
`Session`. A session ends by `DELETE`, after its deadline or after a silence, and is forgotten a
while later.

An id is a key. So `hide` takes it out of a request's path before anything can log that.

Runs without vLLM.
"""

import asyncio
import re
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import msgspec
import numpy as np
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from trl_atropos.protocol import (
    ROUTE_PREFIX,
    SESSION_PREFIX,
    SessionOpened,
    SessionQuery,
    SessionsReply,
    SessionSummary,
)
from trl_atropos.server.plane import HIDDEN, ControlPlane, Refused, while_connected
from trl_atropos.server.token_tree import TokenTree, VersionSpan

ROUTE = "/sessions"  # of the control routes
ID_BYTES = 24  # random, 192 bits
MAX_OPEN = 4096  # sessions at a time
MAX_KEPT = 8_000_000  # tokens of one session, with those of prompts: 40 MB
KEPT_AFTER_END = 300.0  # seconds in which an ended session's tree can be asked for again
ABORTED_WITHIN = 10.0  # seconds that the engine gets to end the calls of a session
POLL = 0.01  # seconds between two looks at that
CLIENT_LEFT = 499  # status that others use for it
SWEEP = 1.0  # seconds between two looks for sessions whose time is up

NO_SESSION = "there is no session with this id: it was never opened here, or it is forgotten"
SESSION_ID = "trl_atropos.session"  # the key of a request's scope that has the id
# `/s/ID/v1/models` and `/trl_atropos/sessions/ID`
PATHS_WITH_ID = re.compile(rf"({SESSION_PREFIX}/|{ROUTE_PREFIX}{ROUTE}/)([^/]*)(.*)", re.DOTALL)
# Any other place of a path or a query where one could stand
LIKE_AN_ID = re.compile(r"[\w-]{32,}", re.ASCII)


@dataclass
class Session:
    """One client's calls, and what they sampled."""

    id: str
    query: SessionQuery
    opened_at: float = field(default_factory=time.monotonic)
    last_call_at: float = field(default_factory=time.monotonic)
    ended_at: float | None = None
    ended: str | None = None  # why
    tree: TokenTree = field(default_factory=TokenTree)
    calls: list[dict] = field(default_factory=list)  # fields of `SessionCall`
    # see `SessionReply.counts`
    counts: Counter[str] = field(default_factory=Counter)
    in_flight: int = 0  # calls that the door let in
    reserved: int = 0  # tokens that these may sample
    # ids of the engine's requests -> what captures them
    requests: dict[str, Any] = field(default_factory=dict)

    def touch(self) -> None:
        """Makes the session's silence begin now."""
        self.last_call_at = time.monotonic()

    def is_overdue(self, now: float) -> str | None:
        """Returns why the session's time is up, or `None`."""
        if now > self.opened_at + self.query.deadline:
            return "deadline"
        if not self.in_flight and now > self.last_call_at + self.query.silence:
            return "silence"
        return None

    def keep(
        self,
        call: dict,
        prompt: np.ndarray,
        sampled: list[int],
        logprobs: list[float],
        versions: list[VersionSpan],
    ) -> None:
        """Keeps a completion. `call` has the fields of `SessionCall` without `segment`. The other
        arguments are those of `TokenTree.add`."""
        segment = -1
        if sampled:
            segment = self.tree.add(prompt, sampled, logprobs, versions)
        self.calls.append(call | {"segment": segment})
        self.counts["completions"] += 1
        self.counts["tokens"] += len(sampled)
        if call["reason"] is not None:
            self.counts[f"marked/{call['reason']}"] += len(sampled)

    def all_counts(self) -> dict[str, int]:
        """Returns the counts of `SessionReply`."""
        tokens = self.counts["tokens"]
        context = self.tree.num_tokens - tokens
        return {"calls": 0, "completions": 0, **self.counts, "tokens": tokens, "context": context}

    def frozen(self) -> dict:
        """Returns the whole session as JSON, for another server that goes on with it. No call may
        be in flight."""
        now = time.monotonic()
        return {
            "id": self.id,
            "query": self.query.model_dump(),
            "age": now - self.opened_at,
            "silence": now - self.last_call_at,
            "ended": self.ended,
            "segments": self.tree.as_json(),
            "calls": self.calls,
            "counts": dict(self.counts),
        }

    @classmethod
    def thawed(cls, fields: dict) -> "Session":
        """Returns the session that `frozen` was called on, just now."""
        now = time.monotonic()
        ended = fields["ended"]
        return cls(
            id=fields["id"],
            query=SessionQuery.model_validate(fields["query"]),
            opened_at=now - fields["age"],
            last_call_at=now - fields["silence"],
            ended_at=None if ended is None else now,
            ended=ended,
            tree=TokenTree.from_json(fields["segments"]),
            calls=fields["calls"],
            counts=Counter(fields["counts"]),
        )

    def as_json(self) -> dict:
        """Returns the fields of `SessionReply`."""
        return {
            "segments": self.tree.as_json(),
            "calls": self.calls,
            "counts": self.all_counts() | {"in_flight": self.in_flight},
            "ended": self.ended,
        }

    def summary(self, now: float) -> SessionSummary:
        """Returns the session's line in a list."""
        return SessionSummary(
            id=self.id,
            age=now - self.opened_at,
            silence=now - self.last_call_at,
            calls=self.counts["calls"],
            tokens=self.counts["tokens"],
            in_flight=self.in_flight,
            ended=self.ended,
        )


@dataclass
class Call:
    """A call of a session while it is served."""

    session: Session
    number: int
    route: str
    # Some completions come without a token that the client sees (`echo` with `max_tokens: 0`).
    unseen: bool = False
    # Whether sampled ids take the place of rendered ones in its prompts (`session_reuse.py`)
    reuses: bool = False


# The call that the present request is, or `None` at the plain routes. Set it for every request: a
# connection's next request may begin in a copy of the context of the one before.
CALL: ContextVar[Call | None] = ContextVar("call", default=None)


class SessionRoutes:
    """The control routes of sessions. A subclass has the sessions: `open` returns the id of a new
    one, `content` the fields of `SessionReply`, ends the session before that if it is to, and
    returns `None` for an id that it does not know. `summary` returns the fields of `SessionsReply`.

    Args:
        plane: whose hold new sessions wait for.
    """

    def __init__(self, plane: ControlPlane) -> None:
        self.plane = plane

    async def control(self, request: Request) -> Response:
        """Answers a control request, from whose path `hide` has taken the id. Raises `Refused` for
        a wrong one."""
        path = request.scope["path"].removeprefix(f"{ROUTE_PREFIX}{ROUTE}")
        if path == "" and request.method == "POST":
            return await self._open_for(request)
        if path == "" and request.method == "GET":
            return _json(await self.summary())
        if path != f"/{HIDDEN}" or request.method not in ("GET", "DELETE"):
            raise Refused(f"no control route {request.method} {ROUTE}{path}", 404)
        ends = request.method == "DELETE"
        content = await self.content(request.scope[SESSION_ID], ends)
        if content is None:
            raise Refused(NO_SESSION, 404)
        return _json(content)

    async def _open_for(self, request: Request) -> Response:
        """Opens a session. Waits while the trainer holds requests, unless it is for an
        evaluation."""
        content = await request.body()
        query = query_in(content or b"{}")
        if self.plane.holding and query.evaluation is None:
            turn = await while_connected(self.plane.until_turn(), request.receive)
            if turn is None:
                return Response(status_code=CLIENT_LEFT)  # which nobody reads
        session_id = await self.open(query)
        anthropic = f"{str(request.base_url).rstrip('/')}{SESSION_PREFIX}/{session_id}"
        opened = SessionOpened(id=session_id, openai=f"{anthropic}/v1", anthropic=anthropic)
        return _json(opened.model_dump())

    def is_known(self, session_id: str) -> bool:
        """Returns whether a text is the id of a session."""
        return False

    def hide(self, scope: dict) -> None:
        """Takes the id out of a request's path, in place, because servers log the path when they
        answer. It is kept under `SESSION_ID`."""
        match = PATHS_WITH_ID.fullmatch(scope["path"])
        if match is not None:
            scope[SESSION_ID] = match[2]
            _rewrite(scope, f"{match[1]}{HIDDEN}{match[3]}")
        path = LIKE_AN_ID.sub(self._hidden, scope["path"])
        if path != scope["path"]:
            _rewrite(scope, path)
        query = LIKE_AN_ID.sub(self._hidden, scope["query_string"].decode("latin-1"))
        scope["query_string"] = query.encode("latin-1")

    def _hidden(self, match: re.Match) -> str:
        return HIDDEN if self.is_known(match[0]) else match[0]


def query_in(content: bytes) -> SessionQuery:
    """Returns the body of `POST /trl_atropos/sessions`. Raises `Refused` with the first mistake in
    it: "`deadline`: Input should be greater than 0 (seen: 0)"."""
    try:
        return SessionQuery.model_validate_json(content)
    except ValidationError as problem:
        mistake, *_ = problem.errors(include_url=False)
        name = ".".join(map(str, mistake["loc"]))
        place = f"`{name}`" if name else "the body"
        seen = f"{mistake['input']!r:.100}"
        fields = ", ".join(SessionQuery.model_fields)
        message = f"{place}: {mistake['msg']} (seen: {seen}). A session has the fields {fields}"
        raise Refused(message, 400) from problem


def _rewrite(scope: dict, path: str) -> None:
    scope["path"] = path
    scope["raw_path"] = quote(path).encode()


class Sessions(SessionRoutes):
    """All sessions of a server, by id.

    Args:
        plane: the server's.
        abort: ends requests of the engine, given by their ids.
    """

    def __init__(self, plane: ControlPlane, abort: Callable[[list[str]], Awaitable[None]]) -> None:
        super().__init__(plane)
        self.abort = abort
        self.counts: Counter[str] = Counter()  # see `SessionsReply`
        self._sessions: dict[str, Session] = {}
        self._sweeping: asyncio.Task | None = None

    def is_known(self, session_id: str) -> bool:
        return session_id in self._sessions

    def find(self, session_id: str) -> Session | None:
        """Returns the session with this id, also if it has ended a while ago."""
        return self._sessions.get(session_id)

    @property
    def num_open(self) -> int:
        """The number of sessions that have not ended."""
        return sum(session.ended is None for session in self._sessions.values())

    async def open(self, query: SessionQuery) -> str:
        """Opens a session. Raises `Refused` if there are too many."""
        num_open = self.num_open
        if num_open >= MAX_OPEN:
            raise Refused(
                f"{num_open} sessions are open, which is the limit: end those that you have done "
                "with (`DELETE`), or give them a shorter `deadline`",
                429,
            )
        await self.plane.close()
        # not base64: an id that begins with a dash is an option to `trl-atropos sessions show`
        session = Session(secrets.token_hex(ID_BYTES), query)
        self.add(session)
        self.counts["opened"] += 1
        return session.id

    async def content(self, session_id: str, ends: bool) -> dict | None:
        """Returns what a session has kept."""
        session = self.find(session_id)
        if session is None:
            return None
        if ends:
            await self.end(session, "deleted")
        return session.as_json()

    async def summary(self) -> dict:
        """Returns the list of sessions, with those that have ended and are not forgotten."""
        now = time.monotonic()
        sessions = list(self._sessions.values())
        return SessionsReply(
            sessions=[session.summary(now) for session in sessions],
            in_flight=sum(session.in_flight for session in sessions),
            counts=dict(self.counts),
        ).model_dump()

    # -------------------------------------------------------- a front that outlives this server

    def clear(self) -> None:
        """Forgets all sessions: another server has them."""
        self._sessions = {}

    def freeze(self) -> dict:
        """Returns all sessions and counts as JSON, while no call is in flight."""
        frozen = [session.frozen() for session in self._sessions.values()]
        return {"sessions": frozen, "counts": dict(self.counts)}

    def thaw(self, fields: dict) -> None:
        """Takes in what `freeze` has returned, just now, in place of what is here."""
        self.clear()
        self.counts = Counter(fields["counts"])
        for session in fields["sessions"]:
            self.add(Session.thawed(session))

    def add(self, session: Session) -> None:
        """Takes in a session, and looks after its deadline from now on."""
        self._sessions[session.id] = session
        if self._sweeping is None:
            self._sweeping = asyncio.create_task(self._sweep())

    async def end(self, session: Session, reason: str) -> None:
        """Refuses the session's calls from now on, and aborts those in flight. Returns when what
        they sampled is kept. Raises `Refused` if the engine does not abort them in time."""
        is_first = session.ended is None
        if is_first:
            session.ended = reason
            session.ended_at = time.monotonic()
            self.counts[f"ended/{reason}"] += 1
        deadline = time.monotonic() + ABORTED_WITHIN
        while session.requests and time.monotonic() < deadline:
            # Again and again: one may just be on its way to the engine.
            await self.abort(list(session.requests))
            await asyncio.sleep(POLL)
        if session.requests:
            raise Refused(
                f"{len(session.requests)} requests of the session were still in flight "
                f"{ABORTED_WITHIN:g} s after they were aborted: the engine hangs",
                503,
            )
        if is_first:
            self.counts.update(session.all_counts())

    async def _sweep(self) -> None:
        """Ends sessions whose time is up, and forgets those that ended long ago, for ever."""
        while True:
            await asyncio.sleep(SWEEP)
            now = time.monotonic()
            for session in list(self._sessions.values()):
                overdue = session.is_overdue(now)
                if session.ended_at is not None:
                    if now > session.ended_at + KEPT_AFTER_END:
                        del self._sessions[session.id]
                elif overdue is not None:
                    await self._end_quietly(session, overdue)

    async def _end_quietly(self, session: Session, reason: str) -> None:
        try:
            await self.end(session, reason)
        except Refused:
            self.counts["ended with requests in flight"] += 1


def _json(content: dict) -> Response:
    """Returns a response. Starlette's own JSON takes five times as long."""
    return Response(msgspec.json.encode(content), media_type="application/json")
