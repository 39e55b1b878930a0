"""Runs `trl-atropos serve MODEL --vllm_mode restart`: one address for a vLLM server that restarts
on new weights.

    python -m trl_atropos.front.serve MODEL [--host H] [--port P] [--drain_timeout S] [any flag of
    `vllm serve`]

`trl_atropos.server.launch` becomes this process. The front passes requests on to the engine, a vLLM
server in a child process (`engine.py`), and holds them while the engine is away, so no client sees
an error. A publish is

    pause (hold new requests, finish those in flight) -> restart on a checkpoint -> resume (release)

under the same token, lease and routes as in `server/control.py`. If the trainer dies in between,
the front goes back to the model of the last version and releases the requests. If the engine dies
by itself, the front answers 503 with the reason, and exits with code 1; after SIGTERM and SIGINT,
with 143 and 130.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import shutil
import sys
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
from trl_atropos.front.engine import LOG_POLL, Engine
from trl_atropos.front.sessions import FrontSessions
from trl_atropos.privacy import CLOSED_VARIABLE
from trl_atropos.server.launch import DEFAULTS, READY_VARIABLE, build_parser, url_of
from trl_atropos.server.plane import (
    EVALUATION,
    Change,
    ControlPlane,
    Refused,
    error,
    while_connected,
)
from trl_atropos.services.addresses import require_free_port
from trl_atropos.services.guard import KILL_DEADLINE
from trl_atropos.services.manager import GRACE
from trl_atropos.services.signals import install_handlers
from trl_atropos.terminal import fitted

logger = logging.getLogger(__name__)

POLL = 0.2  # seconds between two looks at the engine
DRAIN_POLL = 0.01  # seconds between two looks at the requests in flight
TRACE_TIMEOUT = 600.0  # seconds: a loader is watched for one parameter after the other
# seconds between the engine's death and the front's exit, in which clients get the reason
LEAVE_GRACE = 2.0
# seconds until the guard of a dying engine, which broke a connection, reports
WHY_WITHIN = GRACE + KILL_DEADLINE
# Headers that belong to one connection, not to the message, and headers that aiohttp writes itself.
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


class Front(ControlPlane):
    """Serves environments and the trainer, as an ASGI app."""

    def __init__(
        self, options: argparse.Namespace, flags: list[str], session: aiohttp.ClientSession
    ) -> None:
        super().__init__()
        self.engine = Engine(options.model, flags, options.seed, session)
        self.sessions = FrontSessions(self, self.engine)
        self.answer_about_sessions = self.sessions.control
        # seconds that a pause waits for the requests in flight
        self.drain_timeout = options.drain_timeout
        self.policy_version = 0  # requests that go through now sample from it
        self.model = options.model  # the folder or name of that version
        self.in_flight = 0  # requests that have been passed on and not answered yet
        self.ended = asyncio.get_running_loop().create_future()  # is done when `broken` is known
        self.exit_code = 1
        self.server = _Server(self, options.host, options.port)
        self.questions = {
            ("GET", "/info"): self.info,
            ("POST", "/versions"): self.versions,
            ("POST", "/evaluation"): self.evaluations.answer,
            ("GET", "/refusals"): self.refusals,
            ("GET", "/load"): self.sessions.load,
        }
        self.changes = {
            "/attach": Change(self.attach),
            "/hold": Change(self.hold, lease=True),
            "/pause": Change(self.pause, lease=True),
            "/restart": Change(self.restart),
            "/fingerprints/trace": Change(self.trace),
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
            self.sessions.hide(scope)
            await self.control(request, send)
        else:
            await self._forward(request, send)

    async def close(self) -> None:
        """Closes this process, and lets the engines to come close themselves when they start."""
        os.environ[CLOSED_VARIABLE] = "1"
        await super().close()

    async def _trouble(self) -> str | None:
        """Returns what is wrong, or `None`. A restart is no trouble: a supervisor must not take the
        server for dead."""
        if self.broken is not None:
            return self.broken
        if not self.engine.description:
            return "the engine is starting"
        if self.engine.model is None:
            return None
        trouble = await self.engine.trouble()
        if self.engine.model is None:  # it was stopped for a restart meanwhile
            return None
        return trouble

    # ------------------------------------------------------------------------------------ questions

    async def info(self, _body: dict) -> dict:
        """Returns the fields of `ServerInfo`."""
        if not self.engine.description:
            raise Refused("the engine is starting", 503)
        of_front = {
            "instance": self.instance,
            "refusals": [NOT_TO_ATTACH],
            "lora": None,  # there are no routes for adapters
            "sleep": False,
            "policy_version": self.policy_version,
            "oldest_version_in_flight": self.policy_version,
            "paused": self.paused,
            "lease_held": self.lease.locked(),
        }
        info = protocol.ServerInfo.model_validate(self.engine.description | of_front)
        return info.model_dump()

    async def refusals(self, _body: dict) -> dict:
        """Returns the refusals since the last restart, or none while the engine is away."""
        if self.engine.model is None:
            return protocol.RefusalsReply(total=0, latest=[]).model_dump()
        return await self.engine.ask("GET", "/refusals")

    async def versions(self, body: dict) -> dict:
        """Returns versions at any time, also while the engine is away. The engine knows which
        completions it has sampled, the front of which version: no version changes while a request
        is in flight."""
        keys = protocol.VersionsQuery.model_validate(body).keys
        version = self.policy_version
        notes_of_engine: list[protocol.Note | None] = [None] * len(keys)
        if self.engine.model is not None:
            # The engine may be going away just now. Then the ledger has all that it knew.
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                notes_of_engine = await self._notes_of_engine(keys, version)
        notes = self.ledger.find(keys)  # later, so that nothing slips between
        for position, note in enumerate(notes):
            if note is None:
                notes[position] = notes_of_engine[position]
        return protocol.VersionsReply.of(notes).model_dump()

    async def _notes_of_engine(self, keys: list[str], version: int) -> list[protocol.Note | None]:
        """Returns the engine's notes, with the front's version in place of the engine's."""
        query = protocol.VersionsQuery(keys=keys)
        reply = await self.engine.ask("POST", "/versions", query.model_dump())
        notes = protocol.VersionsReply.model_validate(reply).notes()
        for position, note in enumerate(notes):
            if note is not None:
                notes[position] = note._replace(span=(version, version))
        return notes

    # ------------------------------------------------------------------------------------ a publish

    async def attach(self, _body: dict) -> dict:
        """Refuses: the engine's memory goes away with it."""
        raise Refused(NOT_TO_ATTACH)

    async def trace(self, body: dict) -> dict:
        """Passes the question on to the engine."""
        return await self._ask_present_engine("/fingerprints/trace", body)

    async def fingerprints(self, body: dict) -> dict:
        """Passes the question on to the engine, which does not know the version."""
        reply = await self._ask_present_engine("/fingerprints", body)
        return reply | {"policy_version": self.policy_version}

    async def _ask_present_engine(self, route: str, body: dict) -> dict:
        if self.engine.model is None:
            raise Refused("the engine is away")
        return await self.engine.ask("POST", route, body, TRACE_TIMEOUT)

    async def pause(self, _body: dict) -> dict:
        """Holds new requests until `resume`, and returns when none is in flight. An engine starts
        with empty caches and whole weights, whatever the body asks for."""
        self.open.clear()
        deadline = time.monotonic() + self.drain_timeout
        while self.in_flight and self.lease.locked() and time.monotonic() < deadline:
            await asyncio.sleep(DRAIN_POLL)
        unfinished = self.in_flight
        if unfinished:
            self._let_through(self.policy_version)
            raise Refused(
                f"{unfinished} requests were still in flight after {self.drain_timeout:g} s, so "
                "the server goes on: raise its `--drain_timeout`, or have environments ask for "
                "fewer tokens"
            )
        await self._keep_versions()
        await self.sessions.take()
        return {}

    async def _keep_versions(self) -> None:
        """Copies the engine's notes into the ledger, before the engine goes away and while nothing
        is in flight. A key that is in the ledger keeps its version."""
        try:
            reply = await self.engine.ask("GET", "/versions")
            keys = reply["keys"]
            notes = await self._notes_of_engine(keys, self.policy_version)
        except (aiohttp.ClientError, TimeoutError) as problem:
            logger.warning(
                "the versions of the last rollouts are lost: the engine did not tell them (%s)",
                problem,
            )
            return
        for key, note in zip(keys, notes, strict=True):
            self.ledger.note(bytes.fromhex(key), note)

    async def restart(self, body: dict) -> dict:
        """Restarts the engine on a checkpoint, or back on the last one if it does not start.
        Returns the seconds that it was away as `restart_s`."""
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
        """Lets requests through, to `policy_version`."""
        version = int(body["policy_version"])
        if not self.paused:
            raise Refused("resume without a pause")
        await self._release(version)
        return {"policy_version": version}

    async def _release(self, policy_version: int) -> None:
        """Lets requests through to an engine that is new, or that nothing is in flight in. Ends the
        front if the engine does not take its sessions."""
        try:
            await self.sessions.give_back(policy_version)
        except Refused as problem:
            self.end(str(problem))
            raise
        self._let_through(policy_version)

    def _let_through(self, policy_version: int) -> None:
        assert self.engine.model is not None, "requests would go to an engine that is away"
        self.model = self.engine.model
        self.policy_version = policy_version
        self.open.set()

    async def trainer_left(self) -> None:
        """Recovers in a task of its own, so that another trainer can take the lease now. That
        trainer's calls wait."""
        if self.paused and self.broken is None:
            self.recovery = asyncio.create_task(self._recover())

    async def _recover(self) -> None:
        async with self.changing:
            if not self.paused:  # its pause was waiting for requests, and has given up since
                return
            logger.warning(
                "the trainer left in a publish: going on with version %d", self.policy_version
            )
            with contextlib.suppress(Refused):  # `_go_back` has ended the front
                if self.engine.model != self.model:
                    await self._go_back()
                await self._release(self.policy_version)

    async def _go_back(self) -> None:
        """Starts the engine on the last version's model. Ends the front if that fails."""
        try:
            await self.engine.serve(self.model)
        except ServiceError as problem:
            self.end(
                f"the engine does not start on {self.model} any more, which it has served before: "
                f"{problem}",
                problem.exit_code,
            )
            raise Refused(self.broken, 503) from problem

    # --------------------------------------------------------------------------- requests passed on

    async def _forward(self, request: Request, send) -> None:
        """Passes on one request. If its client goes away it is dropped, and the engine stops
        working for it."""
        try:
            body = await request.body()  # all of it, because a disconnect is seen only behind it
        except ClientDisconnect:
            return
        request.state.answered = False
        work = self._pass_on(request, body, send)
        task = await while_connected(work, request.receive, self.ended)
        if task is None:
            return
        try:
            task.result()
            return
        except aiohttp.ClientError as problem:
            await asyncio.wait({self.ended}, timeout=WHY_WITHIN)
            reason = self.broken or f"the engine broke the connection off ({problem!r})"
        except (asyncio.CancelledError, Refused):
            reason = self.broken
        # A connection is cut if its answer has begun: the client sees that it is not whole.
        if not request.state.answered:
            await error(503, reason)(request.scope, request.receive, send)

    async def _pass_on(self, request: Request, body: bytes, send) -> None:
        path = request.scope["path"]
        if self.sessions.is_call(path):  # a hold stops new sessions, and no calls of others
            EVALUATION.set(self.sessions.evaluation_of(path))
        else:
            await self.until_admitted(request)
        await self.until_open()
        version = self.policy_version  # it cannot change while a request is in flight
        self.in_flight += 1
        try:
            async with self.engine.session.request(
                request.method,
                self._engine_url(request),
                data=body or None,
                headers=_passed_on(request),
                allow_redirects=False,
            ) as reply:
                request.state.answered = True
                headers = _passed_back(reply, version)
                await send(
                    {"type": "http.response.start", "status": reply.status, "headers": headers}
                )
                async for chunk in reply.content.iter_any():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                evaluation = EVALUATION.get()
                if evaluation is not None and reply.status == 200:
                    self.evaluations.note(evaluation, (version, version))
        finally:
            self.in_flight -= 1

    def _engine_url(self, request: Request) -> URL:
        url = self.engine.url + request.scope["raw_path"].decode()
        query = request.scope["query_string"].decode()
        if query:
            url += f"?{query}"
        return URL(url, encoded=True)

    # -------------------------------------------------------------------------------- start and end

    async def supervise(self) -> None:
        """Starts the engine and watches over it."""
        try:
            async with self.changing:
                await self.engine.serve(self.model)
                await self._release(0)
            sys.stderr.write(os.environ.get(READY_VARIABLE, ""))
            while True:
                if self.engine.model is not None:  # otherwise a restart looks after it
                    # in a thread: it may have to end what a killed guard left
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
        if self.broken is not None:
            return
        self.broken = reason
        self.exit_code = exit_code or 1
        self.ended.set_result(None)
        loop = asyncio.get_running_loop()
        loop.call_later(LEAVE_GRACE, self.server.leave)


def _passed_on(request: Request) -> CIMultiDict:
    """Returns the headers of a request that the engine gets."""
    headers = CIMultiDict()
    for name, value in request.headers.items():
        if name not in NOT_PASSED_ON:
            headers.add(name, value)
    return headers


def _passed_back(reply: aiohttp.ClientResponse, version: int) -> list[tuple[bytes, bytes]]:
    """Returns the headers of a response that the client gets, with the front's policy version in
    place of the engine's."""
    headers = []
    for name, value in reply.raw_headers:
        if name.lower() == b"x-policy-version":
            value = f"{version}-{version}".encode()
        if name.lower() not in NOT_PASSED_BACK:
            headers.append((name, value))
    return headers


class _Server(uvicorn.Server):
    """Makes the front answer the requests that it holds as soon as a signal comes, instead of
    waiting for them."""

    def __init__(self, front: Front, host: str, port: int) -> None:
        config = uvicorn.Config(
            front,
            host,
            port,
            # Clients drop idle connections earlier than this. If the server did, a request could
            # meet a closing one.
            timeout_keep_alive=600,
            timeout_graceful_shutdown=1,
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            date_header=False,
            ws="none",
            lifespan="off",
        )
        super().__init__(config)
        self._front = front
        self.interrupted = False

    def leave(self) -> None:
        """Makes `serve` return."""
        self.should_exit = True

    def handle_exit(self, sig, frame) -> None:
        """Takes SIGINT and SIGTERM."""
        self.interrupted = True
        loop = asyncio.get_running_loop()
        loop.call_soon_threadsafe(self._front.end, "the server was asked to shut down")
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
            front.engine.stop()  # blocks the loop, which has nothing left to do
            await asyncio.sleep(2 * LOG_POLL)  # the end of the log is shown meanwhile
            log.cancel()
            if front.server.interrupted:  # else the reason for the end names the log
                shutil.rmtree(front.engine.log.parent)
        return front.broken, front.exit_code


def main(argv: list[str] | None = None) -> None:
    """Parses the command line, and serves until the end."""
    parser = build_parser()
    parser.prog = "trl-atropos serve --vllm_mode restart"
    default = "default: %(default)s"
    parser.add_argument("--host", default=DEFAULTS["--host"], help=default)
    parser.add_argument("--port", type=int, default=int(DEFAULTS["--port"]), help=default)
    seed = "of sampling; one more at each restart (default: 0)"
    parser.add_argument("--seed", type=int, default=0, help=seed)
    drain = "seconds that a publish waits for requests in flight (default: %(default)s)"
    parser.add_argument("--drain_timeout", type=float, default=600.0, help=drain)
    options, flags = parser.parse_known_args(argv)
    flags += ["--numerics", options.numerics]
    url = url_of(options.host, options.port)
    try:
        require_free_port(url, "the server", "Give another one with `--port`.")
    except AtroposTrainingError as problem:
        sys.exit(fitted(f"trl-atropos serve: {problem}"))
    install_handlers()
    protocol.hide_token()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    reason, exit_code = asyncio.run(run(options, flags))
    sys.stderr.write(fitted(f"trl-atropos serve: {reason}\n"))
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
