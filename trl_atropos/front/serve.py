"""`trl-atropos serve MODEL --vllm_mode restart`: one address for a vLLM server that restarts on new weights.

    python -m trl_atropos.front.serve MODEL [--host H] [--port P] [--drain_timeout S] [any flag of `vllm serve`]

`trl_atropos.server.launch` runs this. Environments sample from the front as from the server itself: it passes their
requests on to the engine, a vLLM server in a child process, and holds them while the engine is away, so no client sees
an error. A publish is

    pause (hold what arrives, let what is in flight finish) -> restart on a checkpoint -> resume (release)

under the same token, lease and routes as in `server/control.py`. A policy version is the model that is served after a
resume: if the trainer dies in between, the front goes back to the model of the last version and releases the requests.
If the engine dies by itself, the front answers 503 with the reason, and exits.

Exit codes: 143 and 130 after SIGTERM and SIGINT, 1 if the engine died by itself, with the reason on stderr.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import sys
import time
import uuid
from pathlib import Path

import aiohttp
import uvicorn
from multidict import CIMultiDict
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from yarl import URL

from trl_atropos.errors import AtroposTrainingError, ServiceError
from trl_atropos.front.engine import Engine
from trl_atropos.protocol import (
    ROUTE_PREFIX,
    TOKEN_VARIABLE,
    Note,
    RefusalsReply,
    ServerInfo,
    Strict,
    VersionsQuery,
    VersionsReply,
)
from trl_atropos.server.launch import DEFAULTS, READY_VARIABLE
from trl_atropos.server.lease import Lease, Refused, answer, body_of, disconnected, error, has_token
from trl_atropos.server.ledger import Ledger
from trl_atropos.services.guard import KILL_DEADLINE
from trl_atropos.services.manager import GRACE, require_free_port
from trl_atropos.services.signals import install_handlers

logger = logging.getLogger(__name__)

WATCH_EVERY = 0.2  # seconds
DRAIN_POLL = 0.01  # seconds
LEAVE_GRACE = 2.0  # seconds between the engine's death and the front's exit, in which clients are told why
# Seconds between a connection that a dying engine broke and the news of its death, which its guard gives when all of
# the engine's processes are gone.
WHY_WITHIN = GRACE + KILL_DEADLINE
# Headers that belong to one connection, not to the message; and those that the client library writes itself.
NOT_PASSED_ON = {"connection", "content-length", "expect", "host", "keep-alive", "te", "transfer-encoding", "upgrade"}
NOT_PASSED_BACK = {b"connection", b"keep-alive", b"transfer-encoding"}
NOT_TO_ATTACH = (
    "this server was started with `--vllm_mode restart`, so its memory cannot be shared: set `vllm_mode: restart`, or "
    "start the server with `--vllm_mode colocate`"
)


class RestartBody(Strict):
    model: str


class ResumeBody(Strict):
    policy_version: int


class Front:
    """The ASGI app that environments and the trainer talk to."""

    def __init__(self, engine: Engine, session: aiohttp.ClientSession, first_model: str, drain_timeout: float) -> None:
        self.engine = engine
        self.session = session
        self.drain_timeout = drain_timeout  # seconds that a pause waits for the requests in flight
        self.token = os.environ[TOKEN_VARIABLE]
        self.instance = uuid.uuid4().hex
        self.policy_version = 0  # the requests that go through now are sampled from it
        self.model = first_model  # what `policy_version` stands for
        self.ledger = Ledger()  # what earlier engines sampled: an engine forgets it, and knows no versions
        self.lease = Lease()
        self.paused = False
        self.open = asyncio.Event()  # requests go through
        self.in_flight = 0  # requests that have been passed on and not answered yet
        self.changing = asyncio.Lock()  # start, pause, restart, resume and recovery take it in the order they came
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # why nothing is served any more
        self.server: uvicorn.Server  # the one that serves this front, set when it is made

    async def __call__(self, scope, receive, send) -> None:
        request, path = Request(scope, receive), scope["path"]
        if path == "/health":
            response = await self._health()
        elif not path.startswith(f"{ROUTE_PREFIX}/"):
            return await self._forward(request, send)
        elif not has_token(request, self.token):
            response = error(401, "the control token is missing or wrong")
        elif self.ended.done():
            response = error(503, self.ended.result())
        elif path == f"{ROUTE_PREFIX}/lease" and request.method == "POST":
            return await self.lease.hold(request, send, self.server, at_end=self._trainer_left)
        else:
            response = await answer(self._control(request, path.removeprefix(ROUTE_PREFIX)), path)
        await response(scope, receive, send)

    async def _health(self) -> JSONResponse:
        """Healthy during a restart too, or a supervisor would take the server for dead."""
        if self.ended.done():
            return error(503, self.ended.result())
        if not self.engine.description:
            return error(503, "the engine is starting")
        trouble = None if self.engine.model is None else await self.engine.trouble()
        # Without a model by now, it has been stopped for a restart since.
        return JSONResponse({}) if trouble is None or self.engine.model is None else error(503, trouble)

    # ----------------------------------------------------------------------------------------------- for the trainer

    async def _control(self, request: Request, path: str) -> JSONResponse:
        body = await body_of(request)
        match request.method, path:
            case "GET", "/info":
                return JSONResponse(self.info())
            case "POST", "/versions":
                return JSONResponse(await self.versions(body))
            case "GET", "/refusals":  # those since the last restart; none while the engine is away
                nothing = RefusalsReply(total=0, latest=[]).model_dump()
                away = self.engine.model is None
                return JSONResponse(nothing if away else await self.engine.ask("GET", "/refusals"))
            case "POST", "/attach":
                raise Refused(NOT_TO_ATTACH)
        handlers = {"/pause": self.pause, "/restart": self.restart, "/resume": self.resume}
        if request.method != "POST" or path not in handlers:
            raise Refused(f"no control route {request.method} {path}", 404)
        async with self.changing:
            return JSONResponse(await handlers[path](body))

    def info(self) -> dict:
        if not self.engine.description:
            raise Refused("the engine is starting", 503)
        own = {
            "instance": self.instance,
            "refusals": [NOT_TO_ATTACH],
            "lora": None,  # there are no routes for adapters
            "sleep": False,
            "policy_version": self.policy_version,
            "oldest_version_in_flight": self.policy_version,
            "paused": self.paused,
            "lease_held": self.lease.held,
        }
        return ServerInfo.model_validate(self.engine.description | own).model_dump()

    async def pause(self, body: dict) -> dict:
        """Returns when nothing is in flight; what arrives is held until `resume`. Nothing that the body can ask for
        makes a difference: an engine starts with empty caches and whole weights."""
        if not self.lease.held:
            raise Refused("pause needs a lease: nothing would resume the server if the trainer died")
        self.paused = True
        self.open.clear()
        deadline = time.monotonic() + self.drain_timeout
        while self.in_flight and self.lease.held and time.monotonic() < deadline:
            await asyncio.sleep(DRAIN_POLL)
        if left := self.in_flight:
            self._release(self.policy_version)
            raise Refused(
                f"{left} requests were still in flight after {self.drain_timeout:g} s, so the server goes on as "
                "it was: start it with a larger `--drain_timeout`, or have the environments ask for fewer tokens"
            )
        await self._keep_versions()
        return {}

    async def restart(self, body: dict) -> dict:
        """Puts the engine on a checkpoint, or back on the last one. `restart_s`: seconds that it was away."""
        model = RestartBody.model_validate(body).model
        if not self.paused:
            raise Refused("restart needs a pause: requests in flight would be lost")
        if not (Path(model) / "config.json").is_file():
            raise Refused(f"{model} is not the folder of a model: there is no config.json")
        began = time.monotonic()
        try:
            await self.engine.serve(model)
        except ServiceError as problem:
            logger.error("the engine did not start on %s: going back to %s", model, self.model)
            await self._go_back()
            raise Refused(f"the engine did not start on {model} and is back on {self.model}. {problem}") from problem
        return {"model": model, "restart_s": time.monotonic() - began}

    async def resume(self, body: dict) -> dict:
        version = ResumeBody.model_validate(body).policy_version
        if not self.paused:
            raise Refused("resume without a pause")
        self._release(version)
        return {"policy_version": version}

    def _release(self, policy_version: int) -> None:
        assert self.engine.model is not None, "requests would go to an engine that is away"
        self.model, self.policy_version, self.paused = self.engine.model, policy_version, False
        self.open.set()

    async def _trainer_left(self) -> None:
        """Recovers in a task of its own, so that another trainer can take the lease now: its calls wait."""
        if self.paused and not self.ended.done():
            self.recovery = asyncio.create_task(self._recover())

    async def _recover(self) -> None:
        async with self.changing:
            if not self.paused:  # the trainer left while its pause waited, which has given up since
                return
            logger.warning("the trainer left in a publish: going on with version %d", self.policy_version)
            with contextlib.suppress(Refused):  # which has ended the front
                if self.engine.model != self.model:
                    await self._go_back()
                self._release(self.policy_version)

    async def _go_back(self) -> None:
        try:
            await self.engine.serve(self.model)
        except ServiceError as problem:
            self.end(f"the engine does not start on {self.model} any more, which it has served before: {problem}")
            raise Refused(self.ended.result(), 503) from problem

    # --------------------------------------------------------------------------------------- versions of completions

    async def versions(self, body: dict) -> dict:
        """
        `POST /trl_atropos/versions`, at any time, also while the engine is away. The engine knows which completions it
        has sampled, the front of which version: no version changes while a request is in flight.
        """
        query, version = VersionsQuery.model_validate(body), self.policy_version
        asked: list[Note | None] = [None] * len(query.keys)
        if self.engine.model is not None:
            # It may be going away just now; then what it knew is in the ledger.
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                asked = await self._notes_of_engine(query.keys, version)
        kept = self.ledger.find(bytes.fromhex(key) for key in query.keys)  # later, so that nothing slips between
        return VersionsReply.of(old or new for old, new in zip(kept, asked, strict=True)).model_dump()

    async def _keep_versions(self) -> None:
        """Before the engine goes away, when nothing is in flight. A key that is in the ledger keeps its version."""
        try:
            keys = (await self.engine.ask("GET", "/versions"))["keys"]
            notes = await self._notes_of_engine(keys, self.policy_version)
        except (aiohttp.ClientError, TimeoutError) as problem:
            logger.warning("the versions of the last rollouts are lost: the engine did not tell them (%s)", problem)
            return
        for key, note in zip(keys, notes, strict=True):
            self.ledger.note(bytes.fromhex(key), note)

    async def _notes_of_engine(self, keys: list[str], version: int) -> list[Note | None]:
        reply = await self.engine.ask("POST", "/versions", VersionsQuery(keys=keys).model_dump())
        notes = VersionsReply.model_validate(reply).notes()
        return [note and note._replace(span=(version, version)) for note in notes]

    # ------------------------------------------------------------------------------------------ for the environments

    async def _forward(self, request: Request, send) -> None:
        """Passes on one request. If its client goes away it is dropped, and the engine stops working for it."""
        try:
            body = await request.body()  # all of it, because a disconnect is seen only after it
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
            await asyncio.wait({work, gone, self.ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            work.cancel()
        if gone.done():
            return
        try:
            return await work
        except aiohttp.ClientError as problem:
            reason = f"the engine broke the connection off ({type(problem).__name__}: {problem})"
            await asyncio.wait({self.ended}, timeout=WHY_WITHIN)
        except asyncio.CancelledError:
            if not self.ended.done():
                raise
        if self.ended.done():
            reason = self.ended.result()
        if not started:  # otherwise the connection is cut, which tells the client that the answer is not whole
            await error(503, reason)(request.scope, request.receive, send)

    async def _pass_on(self, request: Request, body: bytes, send) -> None:
        while not self.open.is_set():  # it may be closed again between the event and this task's turn
            await self.open.wait()
        self.in_flight += 1
        version = f"{self.policy_version}-{self.policy_version}".encode()  # it cannot change while one is in flight
        query = f"?{request.scope['query_string'].decode()}" if request.scope["query_string"] else ""
        try:
            async with self.session.request(
                request.method,
                URL(f"{self.engine.url}{request.scope['raw_path'].decode()}{query}", encoded=True),
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

    # ---------------------------------------------------------------------------------------------- life and its end

    async def supervise(self) -> None:
        """Starts the engine, shows its log and watches over it."""
        start = asyncio.create_task(self._start())
        try:
            while True:
                self.engine.show_log()
                if start.done():
                    start.result()
                if self.engine.model is not None:  # otherwise a restart looks after it
                    await self.engine.check()
                await asyncio.sleep(WATCH_EVERY)
        except ServiceError as problem:
            self.end(str(problem))
        except Exception as problem:  # a front must not go on without its watch
            logger.exception("the watch over the engine failed")
            self.end(f"{type(problem).__name__}: {problem}")
        finally:
            start.cancel()

    async def _start(self) -> None:
        async with self.changing:
            await self.engine.serve(self.model)
            self._release(0)
        sys.stderr.write(os.environ.get(READY_VARIABLE, ""))

    def end(self, reason: str) -> None:
        """Answers only `reason` from now on, and exits soon."""
        if not self.ended.done():
            self.ended.set_result(reason)
            asyncio.get_running_loop().call_later(LEAVE_GRACE, setattr, self.server, "should_exit", True)


class _Server(uvicorn.Server):
    """Has the front answer the requests that it holds as soon as a signal comes, instead of waiting for them."""

    def __init__(self, front: Front, host: str, port: int) -> None:
        options = {"log_config": None, "log_level": "warning", "access_log": False, "server_header": False}
        options |= {"date_header": False, "ws": "none", "lifespan": "off", "timeout_graceful_shutdown": 1}
        # Clients drop idle connections earlier than this; if the server did, a request could meet a closing one.
        super().__init__(uvicorn.Config(front, host, port, timeout_keep_alive=600, **options))
        self._front = front
        self._loop = asyncio.get_running_loop()
        self.interrupted = False

    def handle_exit(self, sig, frame) -> None:
        self.interrupted = True
        self._loop.call_soon_threadsafe(self._front.end, "the server was asked to shut down")
        super().handle_exit(sig, frame)


async def run(options: argparse.Namespace, flags: list[str]) -> str:
    """Serves until the engine dies. Returns the reason for the end; a signal raises `Interrupted` instead."""
    async with aiohttp.ClientSession(
        # Each request gets a connection of its own: the engine may close an idle one just as it is used again.
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),  # how long sampling may take is up to the client
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("accept", "accept-encoding", "content-type", "user-agent"),
    ) as session:
        engine = Engine(options.model, flags, options.seed, session)
        front = Front(engine, session, options.model, options.drain_timeout)
        front.server = _Server(front, options.host, options.port)
        watch = asyncio.create_task(front.supervise())
        try:
            await front.server.serve()
        finally:
            watch.cancel()
            engine.stop()  # holds up the loop, where there is nothing left to do
            engine.show_log()
            if front.server.interrupted:  # else the reason for the end names the log
                engine.remove_log()
        return front.ended.result()


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trl-atropos serve --vllm_mode restart",
        description="Serve a model and restart the server on each checkpoint of a trainer, unseen by its clients.",
        epilog="Every other flag goes to vLLM: see `vllm serve --help`.",
        allow_abbrev=False,
    )
    parser.add_argument("model", help="Hub name or folder of the first model")
    parser.add_argument("--host", default=DEFAULTS["--host"], help="default: %(default)s")
    parser.add_argument("--port", type=int, default=int(DEFAULTS["--port"]), help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of sampling; one more at each restart (default: 0)")
    parser.add_argument(
        "--drain_timeout",
        type=float,
        default=600.0,
        help="seconds that a publish waits for requests in flight (default: %(default)s)",
    )
    return parser


def main(argv: list[str] | None = None) -> None:
    options, flags = build_parser().parse_known_args(argv)
    try:
        require_free_port(f"http://{options.host}:{options.port}", "the server", "give another one with `--port`")
    except AtroposTrainingError as problem:
        sys.exit(f"trl-atropos serve: {problem}")
    install_handlers()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    sys.exit(f"trl-atropos serve: {asyncio.run(run(options, flags))}")


if __name__ == "__main__":
    main()
