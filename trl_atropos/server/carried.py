"""The versions of completions behind the front, whose engine forgets them at each restart.

An engine that is restarted knows no versions: it samples from what it was started on. So the front asks it which
completions it has seen, and says itself what they were sampled by, since no version changes while a request is in
flight. `restart.py` owns one `CarriedLedger`.
"""

import contextlib
import logging

import aiohttp

from trl_atropos.protocol import Note, VersionsQuery, VersionsReply
from trl_atropos.server.engine import Engine
from trl_atropos.server.ledger import Ledger

logger = logging.getLogger(__name__)

ASK_TIMEOUT = aiohttp.ClientTimeout(total=10.0)


class CarriedLedger:
    """Takes over what the engine has noted before it goes away, and asks the engine about what came since."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ledger = Ledger()

    async def carry(self, version: int) -> None:
        """Before the engine goes away, when nothing is in flight: all that it has noted was sampled by `version`, but
        for what was carried before."""
        try:
            keys = (await self._engine.ask("GET", "/versions", ASK_TIMEOUT))["keys"]
            notes = await self._ask_engine(VersionsQuery(keys=keys))
        except (aiohttp.ClientError, TimeoutError) as problem:
            logger.warning("the versions of the last rollouts are lost: the engine did not tell them (%s)", problem)
            return
        for key, note in zip(keys, notes, strict=True):
            self._ledger.note(bytes.fromhex(key), note._replace(span=(version, version)))

    async def answer(self, body: dict, version: int) -> dict:
        """`POST /trl_atropos/versions`. `version` is what is sampled from at the time of the call."""
        query = VersionsQuery.model_validate(body)
        asked = [None] * len(query.keys)
        if self._engine.model is not None:
            # It may be going away just now; then what it knew has been carried over.
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                asked = await self._ask_engine(query)
        carried = self._ledger.find(bytes.fromhex(key) for key in query.keys)  # later, so that nothing slips between
        pairs = zip(carried, asked, strict=True)
        notes = [old or (new and new._replace(span=(version, version))) for old, new in pairs]
        return VersionsReply.of(notes).model_dump()

    async def _ask_engine(self, query: VersionsQuery) -> list[Note | None]:
        reply = await self._engine.ask("POST", "/versions", ASK_TIMEOUT, query.model_dump())
        return VersionsReply.model_validate(reply).notes()
