"""What environments ask of the inference server: requests go through to the engine, and are held while it is paused.

A request that arrives during a pause begins with the next policy version. Each is counted with the version and the
adapter that it began with, because an adapter's place may be overwritten only when no request uses it. The `recorder`
does both for every route of the server, and notes in the `ledger` which versions have sampled what.
"""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from vllm.lora.request import LoRARequest

from trl_atropos.protocol import ADAPTER_NAME
from trl_atropos.server import compat
from trl_atropos.server.generate import BadRequest, NotANumber, NotFinished, generate
from trl_atropos.server.ledger import History, Ledger
from trl_atropos.server.recorder import Recorder
from trl_atropos.server.routes import disconnected, error

logger = logging.getLogger("vllm.trl_atropos")

# Of vLLM's routes that sample, those that take any model name here. The others want one that vLLM knows; what they
# sample from is the policy, too.
OPENAI_ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate")


class Broken(RuntimeError):
    """Nothing may be sampled any more."""


class Sampling:
    """
    Attributes:
        policy_version (`int`): What requests sample from.
        adapter (`LoRARequest`, *optional*): What they sample from, if it is not the model itself.
        broken (`str`, *optional*): Why nothing may be sampled any more.
        in_flight (`Counter`): Unfinished requests by adapter id.
        history (`History`): What was served when.
        ledger (`Ledger`): Which versions have sampled each completion.
    """

    def __init__(self) -> None:
        self.policy_version = 0
        self.adapter: LoRARequest | None = None
        self.broken: str | None = None
        self.in_flight: Counter[int] = Counter()
        self.history = History()
        self.ledger = Ledger()
        self._recorder: Recorder | None = None
        self._versions_in_flight: Counter[int] = Counter()  # by the version that they began with
        self._open = asyncio.Event()
        self._open.set()

    @property
    def paused(self) -> bool:
        return not self._open.is_set()

    @property
    def oldest_version_in_flight(self) -> int:
        busy = [version for version, count in self._versions_in_flight.items() if count]
        return min(busy, default=self.policy_version)

    def recorder(self, engine) -> Recorder:
        """The one below every route of the server; put there at the first call."""
        if self._recorder is None:
            self._recorder = Recorder(engine, self.history, self.ledger, self.until_open, self._policy)
        return self._recorder

    def hold(self) -> None:
        """From here on, requests wait."""
        self._open.clear()

    def let_go(self) -> None:
        self._open.set()

    async def until_open(self) -> None:
        while self.paused:  # it may be held again between the event and this task's turn
            await self._open.wait()
        if self.broken is not None:
            raise Broken(self.broken)

    def serve(self, policy_version: int, adapter: LoRARequest | None) -> None:
        """What requests sample from once they are let go."""
        self.policy_version, self.adapter = policy_version, adapter
        self.history.publish(policy_version, None if adapter is None else adapter.lora_int_id)

    def register(self, served: dict[str, LoRARequest]) -> None:
        """Makes the adapter's name in vLLM's `served` mean what `/generate` samples from."""
        if self.adapter is None:
            served.pop(ADAPTER_NAME, None)
        else:
            served[ADAPTER_NAME] = self.adapter

    async def generate(self, request: Request, send) -> None:
        """`POST /generate`. Raises what a handler of the whole server must know: that the engine is dead."""
        scope, receive = request.scope, request.receive
        recorder = self.recorder(scope["app"].state.engine_client)
        task = asyncio.create_task(generate(recorder, await request.body()))
        gone = asyncio.create_task(disconnected(receive))
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not task.done():  # the client went away: let the engine stop working for it
            task.cancel()
            await asyncio.wait({task})
            return None
        await self._answer(task)(scope, receive, send)

    def _answer(self, task: asyncio.Task) -> Response:
        try:
            response, spans = task.result()
            versions = f"{min(begun for begun, _ in spans)}-{max(ended for _, ended in spans)}"
            return JSONResponse(response, headers={"x-policy-version": versions})
        except BadRequest as problem:
            logger.warning("refused a /generate request: %s", problem)
            return error(400, str(problem))
        except (Broken, NotFinished) as problem:
            return error(503, str(problem))
        except NotANumber as problem:
            logger.error("a /generate request failed: %s", problem)
            return error(500, str(problem))
        except compat.EngineDeadError:
            raise
        except Exception as problem:  # the boundary of the process: the client is told, and the log has the traceback
            logger.exception("a /generate request failed")
            cause = problem.__cause__ or problem  # vLLM's own says nothing
            return error(500, f"{type(cause).__name__}: {cause}")

    async def openai(self, request: Request, send, app) -> None:
        """vLLM's own routes, under any model name."""
        body = await request.body()
        try:
            await self.until_open()  # as the recorder does, whose errors these routes would tell as their own
        except Broken as problem:
            return await error(503, str(problem))(request.scope, request.receive, send)
        return await app(request.scope, _with_model_name(request, body), send)

    @contextmanager
    def _policy(self) -> Iterator[LoRARequest | None]:
        """The adapter that is sampled from, if it is one. Counts a request as in flight."""
        version, adapter = self.policy_version, self.adapter
        self._versions_in_flight[version] += 1
        if adapter is not None:
            self.in_flight[adapter.lora_int_id] += 1
        try:
            yield adapter
        finally:
            self._versions_in_flight[version] -= 1
            if adapter is not None:
                self.in_flight[adapter.lora_int_id] -= 1


def _with_model_name(request: Request, body: bytes):
    """Environments keep one model name whatever is served, so any name means the policy of this server."""
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
