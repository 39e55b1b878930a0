"""`trl-atropos serve MODEL --vllm_mode restart`: one address for a vLLM server that restarts on new
weights.

    python -m trl_atropos.front.serve MODEL [--host H] [--port P] [--drain_timeout S] [any flag of
    `vllm serve`]

`trl_atropos.server.launch` runs this. The front passes requests on to the engine, a vLLM server in
a child process, and holds them while the engine is away, so no client sees an error. A publish is

    pause (hold what arrives, let what is in flight finish) -> restart on a checkpoint -> resume
    (release)

under the same token, lease and routes as in `server/control.py`. If the trainer dies in between,
the front goes back to the model of the last version and releases the requests. If the engine dies
by itself, the front answers 503 with the reason, and exits with code 1; after SIGTERM and SIGINT,
with 143 and 130.
"""

import argparse
import asyncio
import contextlib
import itertools
import logging
import os
import secrets
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

import aiohttp
import uvicorn
from multidict import CIMultiDict
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from yarl import URL

from trl_atropos import protocol
from trl_atropos.errors import AtroposTrainingError, ServiceError
from trl_atropos.flags import server_flags
from trl_atropos.server.launch import DEFAULTS, READY_VARIABLE, build_parser, url_of
from trl_atropos.server.plane import (
    EVALUATION,
    Change,
    ControlPlane,
    Refused,
    error,
    while_connected,
)
from trl_atropos.services.guard import KILL_DEADLINE
from trl_atropos.services.manager import GRACE, Services, free_port, require_free_port
from trl_atropos.services.signals import install_handlers

logger = logging.getLogger(__name__)

NAME = "engine"
POLL = 0.2  # seconds
START_TIMEOUT = 1800.0  # seconds; large models take minutes to load and to compile
TRACE_TIMEOUT = 600.0  # seconds: a loader is asked about one parameter after the other
# seconds between the engine's death and the front's exit, in which clients get the reason
LEAVE_GRACE = 2.0
# seconds until the guard of a dying engine, which broke a connection, reports
WHY_WITHIN = GRACE + KILL_DEADLINE
# Headers that belong to one connection, not to the message; and those that the client library
# writes itself.
NOT_PASSED_ON = {
    "connection",
    "content-length",
    "expect",
    "host",
    "keep-alive",
    "te",
    "transfer-encoding",
    "upgrade",
}
NOT_PASSED_BACK = {b"connection", b"keep-alive", b"transfer-encoding"}
NOT_TO_ATTACH = (
    "it was started with `--vllm_mode restart`: set `vllm_mode: restart`, or start it "
    "with another mode"
)


class Engine:
    """`trl_atropos.server.launch` in a child process under a guard, on another loopback port at
    each start."""

    def __init__(
        self, first_model: str, flags: list[str], seed: int, session: aiohttp.ClientSession
    ) -> None:
        self.model: str | None = None  # what is served now; None while the engine is away
        self.url = ""
        self.description: dict = {}  # the answer to `GET /trl_atropos/info` after the last start
        # Clients know the first model's name, whatever is served.
        named = "--served-model-name" in server_flags(flags)
        self._flags = flags if named else [*flags, "--served-model-name", first_model]
        # one for each start, or it would draw the same numbers again
        self._seeds = itertools.count(seed)
        self.session = session
        # not the trainer's, who must not reach behind the front
        self._token = secrets.token_urlsafe(24)
        self.log = Path(tempfile.mkdtemp(prefix="trl_atropos_")) / f"{NAME}.log"
        self.log.touch()
        self.services = Services(self.log.parent)
        self._stopping = threading.Lock()

    async def serve(self, model: str) -> None:
        """Stops the engine and starts it on `model`, from the main thread. Returns when it answers.
        Raises `ServiceError` with the end of the log; then the engine is away."""
        self.model = None
        await asyncio.to_thread(self.stop)
        port = free_port("127.0.0.1")
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "trl_atropos.server.launch", model, "--host", "127.0.0.1"]
        command += ["--port", str(port), "--seed", str(next(self._seeds)), *self._flags]
        env = {protocol.TOKEN_VARIABLE: self._token, READY_VARIABLE: ""}
        self.services.start(NAME, command, env=env, health_url=f"{self.url}/health")
        await asyncio.to_thread(self.services.wait_healthy, NAME, START_TIMEOUT)
        try:
            # it hashes the vocabulary
            self.description = await self.ask("GET", "/info", timeout=120.0)
        except (aiohttp.ClientError, TimeoutError) as problem:
            raise ServiceError(
                f"the engine became healthy but did not say what it serves ({problem!r})"
            ) from problem
        self.model = model

    async def ask(
        self, method: str, route: str, body: dict | None = None, timeout: float = 10.0
    ) -> dict:
        """The answer of one of the engine's control routes. Raises `aiohttp.ClientError` or
        `TimeoutError`."""
        url = f"{self.url}{protocol.ROUTE_PREFIX}{route}"
        headers = {"authorization": f"Bearer {self._token}"}
        limit = aiohttp.ClientTimeout(total=timeout)
        async with self.session.request(
            method, url, json=body, headers=headers, timeout=limit
        ) as reply:
            reply.raise_for_status()
            return await reply.json()

    async def trouble(self) -> str | None:
        """What is wrong with the engine by its own health check, which gives it 10 s; `None` if
        nothing is."""
        try:
            async with self.session.get(
                f"{self.url}/health", timeout=aiohttp.ClientTimeout(total=15.0)
            ) as reply:
                return None if reply.status == 200 else (await reply.text())[:500]
        except (aiohttp.ClientError, TimeoutError) as problem:
            return f"the engine's server does not answer ({problem!r})"

    def stop(self) -> None:
        """Returns when nothing of the engine is left, at most 12 s later."""
        with self._stopping:  # when the front exits, a restart's call may be at work in its thread
            self.services.stop()

    async def show_log(self) -> None:
        """Copies to stderr what the engine writes."""
        with open(self.log, encoding="utf-8", errors="replace") as log:
            while True:
                sys.stderr.write(log.read())
                await asyncio.sleep(POLL)


class Front(ControlPlane):
    """The ASGI app that environments and the trainer talk to."""

    def __init__(
        self, options: argparse.Namespace, flags: list[str], session: aiohttp.ClientSession
    ) -> None:
        super().__init__()
        self.engine = Engine(options.model, flags, options.seed, session)
        # seconds that a pause waits for the requests in flight
        self.drain_timeout = options.drain_timeout
        self.policy_version = 0  # the requests that go through now are sampled from it
        self.model = options.model  # what `policy_version` stands for
        self.in_flight = 0  # requests that have been passed on and not answered yet
        self.ended = asyncio.get_running_loop().create_future()  # when `broken` is known
        self.exit_code = 1
        self.server = _Server(self, options.host, options.port)
        self.questions = {
            ("GET", "/info"): self.info,
            ("POST", "/versions"): self.versions,
            ("POST", "/evaluation"): self.evaluations.answer,
            ("GET", "/refusals"): self.refusals,
        }
        self.changes = {
            "/attach": Change(self.attach),
            "/hold": Change(self.hold, lease=True),
            "/pause": Change(self.pause, lease=True),
            "/restart": Change(self.restart),
            "/fingerprints/trace": Change(
                lambda body: self._of_engine("/fingerprints/trace", body)
            ),
            "/fingerprints": Change(self.fingerprints),
            "/resume": Change(self.resume),
        }

    async def __call__(self, scope, receive, send) -> None:
        request = Request(scope, receive)
        if scope["path"] == "/health":
            trouble = await self._trouble()
            response = JSONResponse({}) if trouble is None else error(503, trouble)
            await response(scope, receive, send)
        elif scope["path"].startswith(f"{protocol.ROUTE_PREFIX}/"):
            await self.control(request, send)
        else:
            await self._forward(request, send)

    async def _trouble(self) -> str | None:
        """None during a restart too, or a supervisor would take the server for dead."""
        if self.broken or not self.engine.description:
            return self.broken or "the engine is starting"
        trouble = None if self.engine.model is None else await self.engine.trouble()
        # it may have been stopped for a restart meanwhile
        return trouble if self.engine.model is not None else None

    async def info(self, _body: dict) -> dict:
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
            "lease_held": self.lease.locked(),
        }
        return protocol.ServerInfo.model_validate(self.engine.description | own).model_dump()

    async def refusals(self, _body: dict) -> dict:
        """Those since the last restart; none while the engine is away."""
        if self.engine.model is None:
            return protocol.RefusalsReply(total=0, latest=[]).model_dump()
        return await self.engine.ask("GET", "/refusals")

    async def attach(self, _body: dict) -> dict:
        raise Refused(NOT_TO_ATTACH)

    async def fingerprints(self, body: dict) -> dict:
        return await self._of_engine("/fingerprints", body) | {
            "policy_version": self.policy_version
        }

    async def _of_engine(self, route: str, body: dict) -> dict:
        if self.engine.model is None:
            raise Refused("the engine is away")
        return await self.engine.ask("POST", route, body, TRACE_TIMEOUT)

    async def pause(self, _body: dict) -> dict:
        """Returns when nothing is in flight; what arrives is held until `resume`. An engine starts
        with empty caches and whole weights, whatever the body asks for."""
        self.open.clear()
        deadline = time.monotonic() + self.drain_timeout
        while self.in_flight and self.lease.locked() and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        if left := self.in_flight:
            self._release(self.policy_version)
            told = (
                f"{left} requests were still in flight after {self.drain_timeout:g} s, so the "
                "server goes on"
            )
            raise Refused(
                f"{told}: raise its `--drain_timeout`, or have environments ask for fewer tokens"
            )
        await self._keep_versions()
        return {}

    async def restart(self, body: dict) -> dict:
        """Puts the engine on a checkpoint, or back on the last one. `restart_s`: seconds that it
        was away."""
        model = body["model"]
        if not self.paused:
            raise Refused("restart needs a pause: requests in flight would be lost")
        if not (Path(model) / "config.json").is_file():
            raise Refused(f"{model} is not the folder of a model: there is no config.json")
        began = time.monotonic()
        try:
            await self.engine.serve(model)
        except ServiceError as problem:
            await self._go_back()
            raise Refused(
                f"the engine did not start on {model} and is back on {self.model}. {problem}"
            ) from problem
        return {"model": model, "restart_s": time.monotonic() - began}

    async def resume(self, body: dict) -> dict:
        version = int(body["policy_version"])
        if not self.paused:
            raise Refused("resume without a pause")
        self._release(version)
        return {"policy_version": version}

    def _release(self, policy_version: int) -> None:
        assert self.engine.model is not None, "requests would go to an engine that is away"
        self.model = self.engine.model
        self.policy_version = policy_version
        self.open.set()

    async def trainer_left(self) -> None:
        """Recovers in a task of its own, so that another trainer can take the lease now: its calls
        wait."""
        if self.paused and self.broken is None:
            self.recovery = asyncio.create_task(self._recover())

    async def _recover(self) -> None:
        async with self.changing:
            if not self.paused:  # the trainer left while its pause waited, which has given up since
                return
            logger.warning(
                "the trainer left in a publish: going on with version %d", self.policy_version
            )
            with contextlib.suppress(Refused):  # which has ended the front
                if self.engine.model != self.model:
                    await self._go_back()
                self._release(self.policy_version)

    async def _go_back(self) -> None:
        try:
            await self.engine.serve(self.model)
        except ServiceError as problem:
            reason = (
                f"the engine does not start on {self.model} any more, which it has served "
                f"before: {problem}"
            )
            self.end(reason, problem.exit_code)
            raise Refused(self.broken, 503) from problem

    async def versions(self, body: dict) -> dict:
        """At any time, also while the engine is away. The engine knows which completions it has
        sampled, the front of which version: no version changes while a request is in flight."""
        keys = protocol.VersionsQuery.model_validate(body).keys
        version = self.policy_version
        new: list[protocol.Note | None] = [None] * len(keys)
        if self.engine.model is not None:
            # It may be going away just now; then what it knew is in the ledger.
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                new = await self._notes_of_engine(keys, version)
        kept = self.ledger.find(keys)  # later, so that nothing slips between
        return protocol.VersionsReply.of(
            note or other for note, other in zip(kept, new, strict=True)
        ).model_dump()

    async def _keep_versions(self) -> None:
        """Before the engine goes away, with nothing in flight. A key that is in the ledger keeps
        its version."""
        try:
            keys = (await self.engine.ask("GET", "/versions"))["keys"]
            notes = await self._notes_of_engine(keys, self.policy_version)
        except (aiohttp.ClientError, TimeoutError) as problem:
            logger.warning(
                "the versions of the last rollouts are lost: the engine did not tell them (%s)",
                problem,
            )
            return
        for key, note in zip(keys, notes, strict=True):
            self.ledger.note(bytes.fromhex(key), note)

    async def _notes_of_engine(self, keys: list[str], version: int) -> list[protocol.Note | None]:
        reply = await self.engine.ask(
            "POST", "/versions", protocol.VersionsQuery(keys=keys).model_dump()
        )
        notes = protocol.VersionsReply.model_validate(reply).notes()
        return [note and note._replace(span=(version, version)) for note in notes]

    async def _forward(self, request: Request, send) -> None:
        """Passes on one request. If its client goes away it is dropped, and the engine stops
        working for it."""
        try:
            body = await request.body()  # all of it, because a disconnect is seen only after it
        except ClientDisconnect:
            return
        request.state.answered = False
        work = await while_connected(
            self._pass_on(request, body, send), request.receive, self.ended
        )
        try:
            return work and work.result()
        except aiohttp.ClientError as problem:
            await asyncio.wait({self.ended}, timeout=WHY_WITHIN)
            reason = self.broken or f"the engine broke the connection off ({problem!r})"
        except (asyncio.CancelledError, Refused):
            reason = self.broken
        # else the connection is cut: the client sees that the answer is not whole
        if not request.state.answered:
            await error(503, reason)(request.scope, request.receive, send)

    async def _pass_on(self, request: Request, body: bytes, send) -> None:
        await self.until_admitted(request)
        await self.until_open()
        self.in_flight += 1
        # it cannot change while one is in flight
        version = f"{self.policy_version}-{self.policy_version}".encode()
        query = (
            f"?{request.scope['query_string'].decode()}" if request.scope["query_string"] else ""
        )
        try:
            async with self.engine.session.request(
                request.method,
                URL(f"{self.engine.url}{request.scope['raw_path'].decode()}{query}", encoded=True),
                data=body or None,
                headers=CIMultiDict(
                    (k, v) for k, v in request.headers.items() if k not in NOT_PASSED_ON
                ),
                allow_redirects=False,
            ) as reply:
                headers = [
                    (name, version if name.lower() == b"x-policy-version" else value)
                    for name, value in reply.raw_headers
                    if name.lower() not in NOT_PASSED_BACK
                ]
                request.state.answered = True
                await send(
                    {"type": "http.response.start", "status": reply.status, "headers": headers}
                )
                async for chunk in reply.content.iter_any():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                if (evaluation := EVALUATION.get()) is not None and reply.status == 200:
                    self.evaluations.note(evaluation, (self.policy_version, self.policy_version))
        finally:
            self.in_flight -= 1

    async def supervise(self) -> None:
        """Starts the engine and watches over it."""
        try:
            async with self.changing:
                await self.engine.serve(self.model)
                self._release(0)
            sys.stderr.write(os.environ.get(READY_VARIABLE, ""))
            while True:
                if self.engine.model is not None:  # otherwise a restart looks after it
                    # may have to end what a killed guard left
                    await asyncio.to_thread(self.engine.services.check)
                await asyncio.sleep(POLL)
        except ServiceError as problem:
            self.end(str(problem), problem.exit_code)
        except Exception as problem:  # a front must not go on without its watch
            logger.exception("the watch over the engine failed")
            self.end(f"{type(problem).__name__}: {problem}")

    def end(self, reason: str, exit_code: int | None = None) -> None:
        """Answers only `reason` from now on, and exits soon: with the code of an engine that died,
        or 1."""
        if self.broken is None:
            self.broken = reason
            self.exit_code = exit_code or 1
            self.ended.set_result(None)
            asyncio.get_running_loop().call_later(
                LEAVE_GRACE, setattr, self.server, "should_exit", True
            )


class _Server(uvicorn.Server):
    """Has the front answer the requests that it holds as soon as a signal comes, instead of waiting
    for them."""

    def __init__(self, front: Front, host: str, port: int) -> None:
        options = {
            "log_config": None,
            "log_level": "warning",
            "access_log": False,
            "server_header": False,
        }
        options |= {
            "date_header": False,
            "ws": "none",
            "lifespan": "off",
            "timeout_graceful_shutdown": 1,
        }
        # Clients drop idle connections earlier than this; if the server did, a request could meet a
        # closing one.
        super().__init__(uvicorn.Config(front, host, port, timeout_keep_alive=600, **options))
        self._front = front
        self.interrupted = False

    def handle_exit(self, sig, frame) -> None:
        self.interrupted = True
        asyncio.get_running_loop().call_soon_threadsafe(
            self._front.end, "the server was asked to shut down"
        )
        super().handle_exit(sig, frame)


async def run(options: argparse.Namespace, flags: list[str]) -> tuple[str, int]:
    """Serves until the engine dies. Returns the reason for the end and the exit code, which tells
    whoever started the front of the signal that ended the engine; a signal to the front raises
    `Interrupted` instead."""
    async with aiohttp.ClientSession(
        # Each request gets a connection of its own: the engine may close an idle one just as it is
        # used again.
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        # how long sampling may take is up to the client
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("accept", "accept-encoding", "content-type", "user-agent"),
    ) as session:
        front = Front(options, flags, session)
        watch = asyncio.create_task(front.supervise())
        log = asyncio.create_task(front.engine.show_log())
        try:
            await front.server.serve()
        finally:
            watch.cancel()
            front.engine.stop()  # holds up the loop, where there is nothing left to do
            await asyncio.sleep(2 * POLL)  # in which the end of the log is shown
            log.cancel()
            if front.server.interrupted:  # else the reason for the end names the log
                shutil.rmtree(front.engine.log.parent)
        return front.broken, front.exit_code


def main(argv: list[str] | None = None) -> None:
    parser = build_parser()
    parser.prog = "trl-atropos serve --vllm_mode restart"
    parser.add_argument("--host", default=DEFAULTS["--host"], help="default: %(default)s")
    parser.add_argument(
        "--port", type=int, default=int(DEFAULTS["--port"]), help="default: %(default)s"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of sampling; one more at each restart (default: 0)"
    )
    drain = "seconds that a publish waits for requests in flight (default: %(default)s)"
    parser.add_argument("--drain_timeout", type=float, default=600.0, help=drain)
    options, flags = parser.parse_known_args(argv)
    flags += ["--numerics", options.numerics]
    try:
        require_free_port(
            url_of(options.host, options.port), "the server", "give another one with `--port`"
        )
    except AtroposTrainingError as problem:
        sys.exit(f"trl-atropos serve: {problem}")
    install_handlers()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    reason, exit_code = asyncio.run(run(options, flags))
    sys.stderr.write(f"trl-atropos serve: {reason}\n")
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
