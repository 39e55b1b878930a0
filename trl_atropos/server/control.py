"""The control plane of the inference server: an ASGI middleware (`--middleware trl_atropos.server.control.Control`).

It adds `POST /generate` for the environments, and routes under `/trl_atropos/` for the trainer, which need the token
in `TRL_ATROPOS_TOKEN`. Everything else goes through to vLLM. One instance lives in the API server process.

A publish is `pause -> (the weights change) -> resume`. While a trainer may be writing to the weights, the server must
not answer from them: a trainer holds a lease (one response that stays open), so that its death is noticed at once. If
it dies while the server is paused, the weights may be half written: the server answers 503 from then on, and leaves.
"""

import asyncio
import hmac
import json
import logging
import os
import signal
import threading
import time

import psutil
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from trl_atropos.protocol import (
    ATTACH_METHOD,
    DESCRIBE_METHOD,
    PROTOCOL_VERSION,
    ROUTE_PREFIX,
    TOKEN_VARIABLE,
    ParameterSpec,
    ServerInfo,
    tokenizer_fingerprint,
)
from trl_atropos.server import compat
from trl_atropos.server.generate import BadRequest, NotFinished, generate

logger = logging.getLogger("vllm.trl_atropos")

LEAVE_GRACE = 2.0  # seconds between asking vLLM to shut down and leaving all the same
OPENAI_ROUTES = ("/v1/completions", "/v1/chat/completions")


class ControlError(RuntimeError):
    """A control request that cannot be done now; the message goes to the trainer."""


class Control:
    def __init__(self, app):
        self.app = app
        self.token = os.environ[TOKEN_VARIABLE]
        self.policy_version = 0
        self.paused = False
        self.lease_held = False
        self.broken: str | None = None  # why nothing may be sampled any more
        self.fixed: dict | None = None  # the part of `info` that never changes
        self.routes = {
            ("GET", "/info"): self.info,
            ("POST", "/attach"): self.attach,
            ("POST", "/pause"): self.pause,
            ("POST", "/resume"): self.resume,
        }

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        request = Request(scope, receive)
        path = scope["path"]
        if path.startswith(ROUTE_PREFIX + "/"):
            return await self._control(request, path.removeprefix(ROUTE_PREFIX), send)
        if self.broken is not None:
            return await _error(503, self.broken)(scope, receive, send)
        if path == "/generate" and request.method == "POST":
            return await self._generate(request, send)
        if path in OPENAI_ROUTES and request.method == "POST":
            receive = await self._any_model_name(request)
        return await self.app(scope, receive, send)

    # ------------------------------------------------------------------------------------------- for environments

    async def _generate(self, request: Request, send) -> None:
        scope, receive = request.scope, request.receive
        try:
            body = json.loads(await request.body())
            if not isinstance(body, dict):
                raise BadRequest("the body must be a JSON object")
        except ValueError as error:
            return await _error(400, f"bad request: {error}")(scope, receive, send)
        # A request that arrives during a pause begins with the next version.
        begun = self.policy_version + (1 if self.paused else 0)
        task = asyncio.create_task(generate(scope["app"].state.engine_client, body))
        gone = asyncio.create_task(_disconnected(receive))
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not task.done():  # the client went away: let the engine stop working for it
            task.cancel()
            await asyncio.wait({task})
            return None
        try:
            response = JSONResponse(task.result())
            response.headers["x-policy-version"] = f"{begun}-{self.policy_version}"
        except BadRequest as error:
            logger.warning("refused a /generate request: %s", error)
            response = _error(400, str(error))
        except NotFinished as error:
            response = _error(503, str(error))
        except compat.EngineDeadError:
            response = self._engine_died()
        except Exception as error:
            logger.exception("a /generate request failed")
            response = _error(500, f"{type(error).__name__}: {error}")
        await response(scope, receive, send)

    async def _any_model_name(self, request: Request):
        """Environments keep one model name whatever is served, so any name means the model of this server."""
        body = await request.body()
        try:
            parsed = json.loads(body)
            parsed["model"] = request.scope["app"].state.openai_serving_models.base_model_paths[0].name
            body = json.dumps(parsed).encode()
        except (ValueError, TypeError):
            pass  # not a JSON object: vLLM answers with its own message
        headers = [(k, v) for k, v in request.scope["headers"] if k != b"content-length"]
        request.scope["headers"] = [*headers, (b"content-length", str(len(body)).encode())]
        first = True

        async def receive():
            nonlocal first
            if first:
                first = False
                return {"type": "http.request", "body": body, "more_body": False}
            return await request.receive()

        return receive

    # ----------------------------------------------------------------------------------------------- for the trainer

    async def _control(self, request: Request, path: str, send) -> None:
        scope, receive = request.scope, request.receive
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
            return await _error(401, "the control token is missing or wrong")(scope, receive, send)
        if self.broken is not None:
            return await _error(503, self.broken)(scope, receive, send)
        if (request.method, path) == ("POST", "/lease"):
            return await self._lease(scope, receive, send)
        handler = self.routes.get((request.method, path))
        if handler is None:
            return await _error(404, f"no control route {request.method} {path}")(scope, receive, send)
        try:
            body = json.loads(await request.body() or b"{}")
            result = await handler(scope["app"], body)
            response: Response = JSONResponse(result)
        except ControlError as error:
            response = _error(409, str(error))
        except ValueError as error:
            response = _error(400, str(error))
        except compat.EngineDeadError:
            response = self._engine_died()
        except Exception as error:
            logger.exception("control request %s failed", path)
            response = _error(500, f"{type(error).__name__}: {error}")
        await response(scope, receive, send)

    async def info(self, app, body: dict) -> dict:
        if self.fixed is None:
            self.fixed = await self._describe(app.state.engine_client)
        now = {"policy_version": self.policy_version, "paused": self.paused, "lease_held": self.lease_held}
        return ServerInfo(**self.fixed, **now).model_dump()

    async def _describe(self, engine) -> dict:
        """Made once: the fingerprint of a large vocabulary takes long enough to hold up sampling."""
        model = engine.model_config
        tokenizer = None if model.skip_tokenizer_init else engine.get_tokenizer()
        return {
            **(await engine.collective_rpc(DESCRIBE_METHOD))[0],
            "protocol": PROTOCOL_VERSION,
            "vllm_version": str(compat.VLLM_VERSION),
            "model": model.model,
            "dtype": str(model.dtype).removeprefix("torch."),
            "max_model_len": model.max_model_len,
            "vocab_size": model.get_vocab_size(),
            "tokenizer_fingerprint": None if tokenizer is None else tokenizer_fingerprint(tokenizer.get_vocab()),
            "logprobs_mode": model.logprobs_mode,
        }

    async def attach(self, app, body: dict) -> dict:
        if not self.lease_held:
            raise ControlError("attach needs a lease: open POST /trl_atropos/lease first")
        specs = [ParameterSpec.model_validate(spec).model_dump() for spec in body["parameters"]]
        (attachment,) = await app.state.engine_client.collective_rpc(ATTACH_METHOD, args=(specs,))
        return attachment

    async def pause(self, app, body: dict) -> dict:
        if not self.lease_held:
            raise ControlError("pause needs a lease: nothing would resume the server if the trainer died")
        self.paused = True  # before the engine has stopped: who arrives now begins with the next version
        await compat.pause(app.state.engine_client, clear_cache=bool(body.get("clear_cache", True)))
        return {}

    async def resume(self, app, body: dict) -> dict:
        version = int(body["policy_version"])
        if not self.paused:
            raise ControlError("resume without a pause")
        self.policy_version = version
        self.paused = False
        await compat.resume(app.state.engine_client)
        return {"policy_version": version}

    async def _lease(self, scope, receive, send) -> None:
        """Stays open for the trainer's whole life: when the kernel closes the connection, the trainer is gone."""
        for _ in range(20):  # a former trainer's connection may be closing at this very moment
            if not self.lease_held:
                break
            await asyncio.sleep(0.05)
        else:
            return await _error(409, "another trainer holds this server: stop it, or start a server for this run")(
                scope, receive, send
            )
        self.lease_held = True
        headers = [(b"content-type", b"text/plain")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"held\n", "more_body": True})
        gone = asyncio.create_task(_disconnected(receive))
        server = scope["app"].state.server  # uvicorn's, which waits for open responses when it shuts down
        while not gone.done() and not server.should_exit:
            await asyncio.wait({gone}, timeout=0.5)
        gone.cancel()
        self.lease_held = False
        if self.paused:
            self._leave("the trainer left while the server was paused: its weights may be half written")
        return None

    def _engine_died(self) -> Response:
        """vLLM itself would notice within five seconds, and then wait for its clients."""
        self._leave("vLLM's EngineCore process died")
        return _error(503, self.broken)

    def _leave(self, reason: str) -> None:
        """Answers nothing from now on and ends the process, whatever connections are still open."""
        if self.broken is not None:
            return
        self.broken = f"{reason}. This server is shutting down: start it again"
        logger.error("%s", self.broken)
        threading.Thread(target=_exit_within, args=(LEAVE_GRACE,), daemon=True).start()
        os.kill(os.getpid(), signal.SIGTERM)


def _exit_within(seconds: float) -> None:
    """Frozen requests keep vLLM's shutdown waiting for ever, so there is an end to the patience."""
    time.sleep(seconds)
    for child in psutil.Process().children(recursive=True):
        child.kill()
    os._exit(1)


async def _disconnected(receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": message}, status)
