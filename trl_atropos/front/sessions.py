"""Keeps the sessions of the server behind the front over its restarts.

The server has them while it is there. When a publish begins and no call is in flight, the front
takes them all. It answers for them until the next server gets them, under the same ids, so that
neither their clients nor who opened them notice the restart.
"""

import logging
import re

import aiohttp

from trl_atropos.front.engine import Engine
from trl_atropos.protocol import SESSION_PREFIX, LoadReply, SessionQuery
from trl_atropos.server.plane import ControlPlane, Refused
from trl_atropos.server.sessions import SessionRoutes, Sessions

logger = logging.getLogger(__name__)

TIMEOUT = 120.0  # seconds: trees of many sessions are large
MAX_EVALUATIONS = 100_000  # sessions of evaluations that are remembered
CALL = re.compile(f"{SESSION_PREFIX}/([^/]*)/")


class FrontSessions(SessionRoutes):
    """The control routes of sessions at the front.

    Args:
        plane: the front.
        engine: the server behind it.
    """

    def __init__(self, plane: ControlPlane, engine: Engine) -> None:
        super().__init__(plane)
        self.engine = engine
        self._kept = Sessions(plane, _abort_nothing)
        self._are_here = False  # whether the front has them, and not the server
        self._evaluations: dict[str, str] = {}  # id of a session -> its evaluation's API key

    # ------------------------------------------------------------------------------------- restarts

    async def take(self) -> None:
        """Takes all sessions from the server, while no call is in flight."""
        try:
            self._kept.thaw(await self.engine.ask("GET", "/front/sessions", timeout=TIMEOUT))
            self._are_here = True
        except (aiohttp.ClientError, TimeoutError) as problem:
            kind = type(problem).__name__  # the messages of some have the URL
            logger.warning("the sessions are lost: the engine did not tell them (%s)", kind)

    async def give_back(self, policy_version: int) -> None:
        """Tells the server which version it serves, and gives it the sessions. Raises `Refused` if
        it does not take them."""
        sessions = self._kept.freeze() if self._are_here else None
        await self._ask("/front/begin", {"policy_version": policy_version, "sessions": sessions})
        self._are_here = False
        self._kept.clear()

    async def _ask(self, route: str, body: dict) -> dict:
        try:
            return await self.engine.ask("POST", route, body, TIMEOUT)
        except aiohttp.ClientResponseError as problem:
            raise Refused(
                f"the engine answered {problem.status} ({problem.message})", problem.status
            ) from None  # the problem itself has the URL
        except (aiohttp.ClientError, TimeoutError) as problem:
            kind = type(problem).__name__
            raise Refused(f"the engine did not answer about sessions ({kind})", 503) from None

    # ------------------------------------------------------------------------------- control routes

    async def open(self, query: SessionQuery) -> str:
        """Returns the id of a new session. Waits for a server."""
        await self.plane.close()
        await self.plane.until_open()
        reply = await self._ask("/front/open", query.model_dump())
        session_id = reply["id"]
        if query.evaluation is not None:
            self._evaluations[session_id] = query.evaluation
            if len(self._evaluations) > MAX_EVALUATIONS:
                oldest_id = next(iter(self._evaluations))
                del self._evaluations[oldest_id]
        return session_id

    async def content(self, session_id: str, ends: bool) -> dict | None:
        """Returns what a session has kept."""
        if self._are_here:
            return await self._kept.content(session_id, ends)
        reply = await self._ask("/front/session", {"id": session_id, "ends": ends})
        return reply["session"]

    async def load(self, _body: dict) -> dict:
        """Returns the fields of `LoadReply`."""
        if self._are_here:
            counts = dict(self._kept.counts)
            reply = LoadReply(in_flight=0, sessions=self._kept.num_open, counts=counts)
            return reply.model_dump()
        try:
            return await self.engine.ask("GET", "/load")
        except (aiohttp.ClientError, TimeoutError) as problem:
            kind = type(problem).__name__
            raise Refused(f"the engine did not say how busy it is ({kind})", 503) from None

    async def summary(self) -> dict:
        """Returns the list of sessions."""
        if self._are_here:
            return await self._kept.summary()
        return await self._ask("/front/summary", {})

    # ---------------------------------------------------------------------------------------- calls

    def is_call(self, path: str) -> bool:
        """Returns whether a request to this path is a call of a session."""
        return path.startswith(f"{SESSION_PREFIX}/")

    def evaluation_of(self, path: str) -> str | None:
        """Returns the API key of the evaluation that a call of this path is made for, if it is."""
        match = CALL.match(path)
        return None if match is None else self._evaluations.get(match[1])


async def _abort_nothing(_request_ids: list[str]) -> None:
    """Ends no requests: none is in flight while the front has the sessions."""
