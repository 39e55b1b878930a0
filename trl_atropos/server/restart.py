"""The control plane of `vllm_mode: restart`: an ASGI app in front of a vLLM server that is restarted on new weights.

Environments sample from it as from the server itself: their requests go through to an engine server, and are held
while that is away (`forward.py`), so no client sees an error. A publish is

    pause (hold what arrives, let what is in flight finish) -> restart on a checkpoint -> resume (release)

under the same token, lease and routes as `control.py`. A version is the model that was served at a resume: if the
trainer leaves in between, the front goes back to that model and releases the requests. If the engine dies by itself,
the front answers 503 with the reason, and leaves.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from pathlib import Path

import aiohttp
import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse

from trl_atropos.errors import ServiceError
from trl_atropos.protocol import ROUTE_PREFIX, RefusalsReply, ServerInfo, Strict
from trl_atropos.server.carried import CarriedLedger
from trl_atropos.server.engine import HEALTH_TIMEOUT, Engine
from trl_atropos.server.forward import Forwarder
from trl_atropos.server.routes import ControlError, Lease, answer, error, has_token

logger = logging.getLogger(__name__)

LEAVE_GRACE = 2.0  # seconds between the engine's death and the front's end, in which clients are told why
WATCH_EVERY = 0.2  # seconds
NOT_TO_ATTACH = (
    "this server was started with `--vllm_mode restart`, so its memory cannot be shared: set `vllm_mode: restart`, or "
    "start the server with `--vllm_mode colocate`"
)


class RestartBody(Strict):
    model: str


class ResumeBody(Strict):
    policy_version: int


class Front:
    """
    Args:
        engine (`Engine`): The server behind, not started yet.
        session (`aiohttp.ClientSession`): Of `make_session`.
        first_model (`str`): What the engine serves first.
        drain_timeout (`float`): Seconds that a pause waits for the requests in flight.
    """

    def __init__(
        self, engine: Engine, session: aiohttp.ClientSession, first_model: str, token: str, drain_timeout: float
    ) -> None:
        self.engine = engine
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # why nothing is served any more
        self.requests = Forwarder(engine, session, self.ended)
        self.ledger = CarriedLedger(engine)
        self.model = first_model  # that `policy_version` stands for
        self.token = token
        self.drain_timeout = drain_timeout
        self.instance = uuid.uuid4().hex
        self.lease = Lease()
        self.paused = False
        self.changing = asyncio.Lock()  # start, pause, restart, resume and recovery, in the order in which they came
        self.server: uvicorn.Server  # the one that serves this front, set when it is made
        self.routes = {
            ("GET", "/info"): self.info,
            ("POST", "/attach"): self.attach,
            ("POST", "/pause"): self.pause,
            ("POST", "/restart"): self.restart,
            ("POST", "/resume"): self.resume,
            ("POST", "/versions"): self.versions,
            ("GET", "/refusals"): self.refused,
        }

    async def __call__(self, scope, receive, send) -> None:
        request, path = Request(scope, receive), scope["path"]
        if path == "/health":
            response = await self._health()
        elif not path.startswith(f"{ROUTE_PREFIX}/"):
            return await self.requests(request, send)
        elif not has_token(request, self.token):
            response = error(401, "the control token is missing or wrong")
        elif self.ended.done():
            response = error(503, self.ended.result())
        elif path == f"{ROUTE_PREFIX}/lease" and request.method == "POST":
            return await self._hold_lease(scope, receive, send)
        else:
            response = await answer(request, path.removeprefix(ROUTE_PREFIX), self.routes)
        await response(scope, receive, send)

    async def _health(self) -> JSONResponse:
        """Healthy in a restart too, lest a supervisor take the server for dead."""
        if self.ended.done():
            return error(503, self.ended.result())
        if not self.engine.description:
            return error(503, "the engine is starting")
        silence = None if self.engine.model is None else await self.engine.silence()
        return JSONResponse({}) if silence is None else error(503, silence)

    # ----------------------------------------------------------------------------------------------- for the trainer

    async def info(self, body: dict) -> dict:
        if not self.engine.description:
            raise ControlError("the engine is starting", 503)
        version = self.requests.policy_version
        own = {
            "instance": self.instance,
            "refusals": [NOT_TO_ATTACH],
            "lora": None,  # there are no routes for adapters
            "sleep": False,
            "policy_version": version,
            "oldest_version_in_flight": version,
            "paused": self.paused,
            "lease_held": self.lease.held,
        }
        return ServerInfo.model_validate(self.engine.description | own).model_dump()

    async def attach(self, body: dict) -> dict:
        raise ControlError(NOT_TO_ATTACH)

    async def pause(self, body: dict) -> dict:
        """Returns when nothing is in flight; all that arrives is held until `resume`. Of what the body can ask for,
        nothing makes a difference: an engine starts with empty caches and whole weights."""
        async with self.changing:
            if not self.lease.held:
                raise ControlError("pause needs a lease: nothing would resume the server if the trainer died")
            self.paused = True
            left = await self.requests.hold(self.drain_timeout, lambda: self.lease.held)
            if left:
                self._resume(self.requests.policy_version)
                raise ControlError(
                    f"{left} requests were still in flight after {self.drain_timeout:g} s, so the server goes on as "
                    "it was: start it with a larger `--drain_timeout`, or have the environments ask for fewer tokens"
                )
            await self.ledger.carry(self.requests.policy_version)
        return {}

    async def restart(self, body: dict) -> dict:
        """Puts the engine on a checkpoint, or back on the last one. `restart_s`: seconds that it was away."""
        model = RestartBody.model_validate(body).model
        async with self.changing:
            if not self.paused:
                raise ControlError("restart needs a pause: requests in flight would be lost")
            if not (Path(model) / "config.json").is_file():
                raise ControlError(f"{model} is not the folder of a model: there is no config.json")
            began = time.monotonic()
            try:
                await self.engine.serve(model)
            except ServiceError as problem:
                logger.error("the engine did not start on %s: going back to %s", model, self.model)
                await self._go_back()
                raise ControlError(
                    f"the engine did not start on {model} and is back on {self.model}. {problem}"
                ) from problem
        return {"model": model, "restart_s": time.monotonic() - began}

    async def resume(self, body: dict) -> dict:
        version = ResumeBody.model_validate(body).policy_version
        async with self.changing:
            if not self.paused:
                raise ControlError("resume without a pause")
            self._resume(version)
        return {"policy_version": version}

    async def versions(self, body: dict) -> dict:
        """Answers at any time, also while the engine is away."""
        return await self.ledger.answer(body, self.requests.policy_version)

    async def refused(self, body: dict) -> dict:
        """Those since the last restart; none while the engine is away."""
        if self.engine.model is None:
            return RefusalsReply(total=0, latest=[]).model_dump()
        return await self.engine.ask("GET", "/refusals", HEALTH_TIMEOUT)

    def _resume(self, policy_version: int) -> None:
        assert self.engine.model is not None, "requests would go to an engine that is away"
        self.model = self.engine.model
        self.paused = False
        self.requests.release(policy_version)

    async def _hold_lease(self, scope, receive, send) -> None:
        if await self.lease.hold(scope, receive, send, self.server) and self.paused and not self.ended.done():
            await self._recover()

    async def _recover(self) -> None:
        async with self.changing:
            if not self.paused:  # the trainer left while its pause waited, which has given up since
                return
            logger.warning("the trainer left in a publish: going on with version %d", self.requests.policy_version)
            with contextlib.suppress(ControlError):  # which has ended the front
                if self.engine.model != self.model:
                    await self._go_back()
                self._resume(self.requests.policy_version)

    async def _go_back(self) -> None:
        try:
            await self.engine.serve(self.model)
        except ServiceError as problem:
            self.end(f"the engine does not start on {self.model} any more, which it has served before: {problem}")
            raise ControlError(self.ended.result(), 503) from problem

    # ---------------------------------------------------------------------------------------------- life and its end

    async def supervise(self) -> None:
        """Starts the engine and watches over it."""
        try:
            async with self.changing:
                await self.engine.serve(self.model)
                self._resume(0)
            logger.info("serving %s", self.model)
            while True:
                self.engine.show_log()
                if self.engine.model is not None:  # otherwise a restart looks after it
                    await self.engine.check()
                await asyncio.sleep(WATCH_EVERY)
        except ServiceError as problem:
            self.end(str(problem))
        except Exception as problem:  # a front must not go on without its watch
            logger.exception("the watch over the engine failed")
            self.end(f"{type(problem).__name__}: {problem}")

    def end(self, reason: str) -> None:
        """Answers nothing but `reason` from now on, and leaves soon."""
        if self.ended.done():
            return
        self.ended.set_result(reason)
        asyncio.get_running_loop().call_later(LEAVE_GRACE, setattr, self.server, "should_exit", True)
