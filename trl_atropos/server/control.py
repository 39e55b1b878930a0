"""The control plane of the inference server: an ASGI middleware (`--middleware trl_atropos.server.control.Control`).

It adds `POST /generate` for the environments (`sampling.py`), and routes under `/trl_atropos/` for the trainer, which
need the token in `TRL_ATROPOS_TOKEN`. Everything else goes through to vLLM. One instance lives in the API server
process.

A publish is `pause -> (the weights change) -> resume`. While a trainer may be writing to the weights, the server must
not answer from them: a trainer holds a lease (one response that stays open), so that its death is noticed at once. If
it dies while the weights may be half written, the server answers 503 from then on, and leaves; if it dies in a pause
without that, the server resumes.
"""

import asyncio
import contextlib
import functools
import logging
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import threading
import time
import uuid

import psutil
from starlette.requests import Request
from vllm.lora.request import LoRARequest

from trl_atropos.protocol import (
    ADAPTER_NAME,
    ATTACH_METHOD,
    DESCRIBE_METHOD,
    FINISH_WEIGHTS_METHOD,
    LOAD_ADAPTER_METHOD,
    LOAD_WEIGHTS_METHOD,
    OPEN_CHANNEL_METHOD,
    PROTOCOL_VERSION,
    ROUTE_PREFIX,
    SET_UP_ADAPTER_METHOD,
    TOKEN_VARIABLE,
    LoadReply,
    ParameterSpec,
    ServerInfo,
    machine_id,
    tokenizer_fingerprint,
)
from trl_atropos.server import compat
from trl_atropos.server.ready import say_when_started
from trl_atropos.server.refusals import Refusals
from trl_atropos.server.routes import ControlError, Lease, answer, error, has_token
from trl_atropos.server.sampling import OPENAI_ROUTES, Sampling

logger = logging.getLogger("vllm.trl_atropos")

LEAVE_GRACE = 2.0  # seconds between asking vLLM to shut down and leaving all the same
HEALTH_DEADLINE = 10.0  # seconds that the engine may take to answer a question that needs no work
STOPS = (signal.SIGTERM, signal.SIGINT)
REAPED = 1.0  # seconds between a process's end and its exit code, at most
ANSWER_GRACE = 0.5  # seconds in which those who wait get the reason why the server leaves
# vLLM's, each under two names, which the mode `lora` opens.
ADAPTER_ROUTES = re.compile(r"/(v1/(un)?load_lora_adapter|adapters(/[^/]*)?)$")
NEEDS_TOKEN = (
    "this route changes what is sampled, so it needs the control token: send `Authorization: Bearer TOKEN` with that "
    f"in {TOKEN_VARIABLE}"
)
MEMORY_ADAPTERS = (1 << 30, (1 << 30) + 1)  # ids that vLLM gives to no adapter of files: those count from 1
RECOVERY = 30.0  # seconds to end what a trainer has begun that is gone; a worker may wait for it and never come back


class Control:
    def __init__(self, app):
        self.app = app
        self.token = os.environ[TOKEN_VARIABLE]
        self.instance = uuid.uuid4().hex
        self.sampling = Sampling()
        self.refusals = Refusals()
        self.lease = Lease()
        self.engines: list[multiprocessing.Process] | None = None  # known once vLLM has started them
        self.asleep = 0  # vLLM's sleep level
        self.torn = False  # the weights may be half written, or not those of the version that the server names
        self.changing = asyncio.Lock()  # held by each call of the trainer, and by the recovery after the last
        self.fixed: dict | None = None  # the part of `info` that never changes
        self.next_adapter: int | None = None  # its id is loaded and waits for `resume`
        self.adapters_loaded = 0
        self.asked: tuple[float, asyncio.Task] | None = None  # what `/health` last asked the engine, and when
        self.routes = {
            ("GET", "/info"): self.info,
            ("POST", "/attach"): self.attach,
            ("POST", "/pause"): self.pause,
            ("POST", "/resume"): self.resume,
            ("POST", "/channel"): self.open_channel,
            ("POST", "/weights/load"): self.load_weights,
            ("POST", "/weights/finish"): self.finish_weights,
            ("POST", "/adapter/setup"): self.set_up_adapter,
            ("POST", "/adapter/load"): self.load_adapter,
            ("POST", "/sleep"): self.sleep,
            ("POST", "/wake"): self.wake,
            ("POST", "/versions"): self.versions,
            ("GET", "/versions"): self.noted,
            ("GET", "/refusals"): self.refused,
        }

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self.app(scope, receive, say_when_started(send))
        request = Request(scope, receive)
        path, posts = scope["path"], scope["method"] == "POST"
        self.sampling.recorder(scope["app"].state.engine_client)  # before any route has sampled
        if self.engines is None:
            self._watch_engines()
        try:
            if path.startswith(ROUTE_PREFIX + "/"):
                return await self._control(request, path.removeprefix(ROUTE_PREFIX), send)
            if self.sampling.broken is not None:
                return await error(503, self.sampling.broken)(scope, receive, send)
            if path == "/generate" and posts:
                return await self.sampling.generate(request, self.refusals.watched(send))
            if path in OPENAI_ROUTES and posts:
                return await self.sampling.openai(request, self.refusals.watched(send), self.app)
            if ADAPTER_ROUTES.search(path) and not has_token(request, self.token):
                return await error(401, NEEDS_TOKEN)(scope, receive, send)
            if path == "/health" and (silence := await self._silence(request.app.state.engine_client)):
                return await error(503, silence)(scope, receive, send)
        except compat.EngineDeadError:  # vLLM itself would notice within five seconds, and then wait for its clients
            self._engine_died()
            return await error(503, self.sampling.broken)(scope, receive, send)
        return await self.app(scope, receive, send)

    async def _silence(self, engine) -> str | None:
        """
        What is wrong if the engine does not answer, though its process is alive. `None` while a trainer's call is
        under way, which may take long: then the trainer has a deadline.
        """
        if self.lease.held and self.changing.locked():
            return None
        await engine.check_health()
        now = asyncio.get_running_loop().time()
        if self.asked is None or self.asked[1].done():
            self.asked = now, asyncio.create_task(engine.is_sleeping())
        since, question = self.asked
        await asyncio.wait({question}, timeout=max(0.0, since + HEALTH_DEADLINE - now))
        if question.done():
            return None
        silent = asyncio.get_running_loop().time() - since
        return f"the engine has not answered for {silent:.0f} s, though its process is alive: restart this server"

    async def _control(self, request: Request, path: str, send) -> None:
        scope, receive = request.scope, request.receive
        if not has_token(request, self.token):
            return await error(401, "the control token is missing or wrong")(scope, receive, send)
        if self.sampling.broken is not None:
            return await error(503, self.sampling.broken)(scope, receive, send)
        if (request.method, path) == ("POST", "/lease"):
            return await self._lease(scope, receive, send)
        routes = {route: functools.partial(handler, scope["app"]) for route, handler in self.routes.items()}
        asks = request.method == "GET" or path == "/versions"
        async with contextlib.nullcontext() if asks else self.changing:
            response = await answer(request, path, routes, through=compat.EngineDeadError)
        await response(scope, receive, send)

    async def _lease(self, scope, receive, send) -> None:
        """Open for the trainer's whole life: when it ends, the trainer is gone."""
        app = scope["app"]
        await self.lease.hold(scope, receive, send, app.state.server, at_end=lambda: self._left(app))

    async def _left(self, app) -> None:
        """What a trainer leaves behind is put in order before another may come."""
        if not self.torn:
            try:
                async with asyncio.timeout(RECOVERY), self.changing:  # its last call decides what is whole
                    if self.sampling.paused and not self.torn:
                        await self._recover(app)
            except TimeoutError:
                if self.sampling.paused:
                    self._leave(f"the trainer left in a pause, and the engine did not answer for {RECOVERY:.0f} s")
        if self.torn:
            self._leave("the trainer left in the middle of a publish: the weights may be half written")

    async def info(self, app, body: dict) -> dict:
        if self.fixed is None:
            self.fixed = await self._describe(app.state.engine_client)
        now = {
            "policy_version": self.sampling.policy_version,
            "oldest_version_in_flight": self.sampling.oldest_version_in_flight,
            "paused": self.sampling.paused,
            "lease_held": self.lease.held,
        }
        return ServerInfo(**self.fixed, **now).model_dump()

    async def _describe(self, engine) -> dict:
        """Made once: the fingerprint of a large vocabulary takes long enough to hold up sampling."""
        model = engine.model_config
        tokenizer = None if model.skip_tokenizer_init else engine.get_tokenizer()
        workers = await engine.collective_rpc(DESCRIBE_METHOD)  # of the first replica, as of every call
        uuids = [worker.pop("device_uuid") for worker in workers]
        replicas = engine.vllm_config.parallel_config.data_parallel_size
        workers[0]["num_workers"] *= replicas
        if replicas > 1:
            workers[0]["refusals"].append(
                f"it has {replicas} copies of the model (start a server with --data-parallel-size 1 for each device)"
            )
        return {
            **workers[0],
            "device_uuids": [uuid for uuid in uuids if uuid is not None],
            "protocol": PROTOCOL_VERSION,
            "instance": self.instance,
            "machine": machine_id(),
            "vllm_version": str(compat.VLLM_VERSION),
            "model": model.model,
            "dtype": str(model.dtype).removeprefix("torch."),
            "max_model_len": model.max_model_len,
            "vocab_size": model.get_vocab_size(),
            "tokenizer_fingerprint": None if tokenizer is None else tokenizer_fingerprint(tokenizer.get_vocab()),
            "logprobs_mode": model.logprobs_mode,
            "prefixes_by_path": compat.PREFIXES_KEYED_BY_ADAPTER_PATH,
        }

    async def attach(self, app, body: dict) -> dict:
        self._require_lease("attach")
        specs = [ParameterSpec.model_validate(spec).model_dump() for spec in body["parameters"]]
        (attachment,) = await app.state.engine_client.collective_rpc(ATTACH_METHOD, args=(specs,))
        return attachment

    async def pause(self, app, body: dict) -> dict:
        """With `in_place`, the trainer writes into this server's memory until `resume`."""
        self._require_lease("pause")
        self.torn = self.torn or bool(body.get("in_place", False))
        self.sampling.hold()  # before the engine has stopped: who arrives now begins with the next version
        # What is under the name at `resume` came in this pause, and not late from a trainer that is gone.
        self.sampling.register(app.state.openai_serving_models.lora_requests)
        await compat.pause(app.state.engine_client, clear_cache=bool(body.get("clear_cache", True)))
        return {}

    async def resume(self, app, body: dict) -> dict:
        version = int(body["policy_version"])
        if not self.sampling.paused:
            raise ControlError("resume without a pause")
        if self.asleep:
            raise ControlError(f"resume while asleep (level {self.asleep}): wake first")
        self.torn = False
        served = app.state.openai_serving_models.lora_requests
        adapter = served.get(ADAPTER_NAME)  # one that came from files was put there by vLLM's own route
        if self.next_adapter is not None or (adapter is not None and adapter is not self.sampling.adapter):
            # vLLM tells the adapters of a batch apart by these names, and cached prefixes too: each version needs its
            # own, also one that a former training had.
            self.adapters_loaded += 1
            name = f"{ADAPTER_NAME}-v{version}-{self.adapters_loaded}"
            if self.next_adapter is not None:
                adapter = LoRARequest(name, self.next_adapter, f"mem://{name}")
            else:
                adapter = LoRARequest(name, adapter.lora_int_id, adapter.lora_path)
            served[ADAPTER_NAME], self.next_adapter = adapter, None
        else:  # none came in this pause, and a former trainer's is not this one's policy
            adapter = None
        self.sampling.serve(version, adapter)
        await compat.mark_tokens(app.state.engine_client, self.sampling.history.publishes)
        await self._let_go(app)
        return {"policy_version": version}

    async def _let_go(self, app) -> None:
        await compat.resume(app.state.engine_client)
        self.sampling.let_go()

    async def open_channel(self, app, body: dict) -> dict:
        self._require_lease("opening a channel")
        await app.state.engine_client.collective_rpc(OPEN_CHANNEL_METHOD, args=(body,))
        return {}

    async def load_weights(self, app, body: dict) -> dict:
        self._require_pause("loading weights")
        self.torn = True
        tensors = [ParameterSpec.model_validate(tensor).model_dump() for tensor in body["tensors"]]
        replies = await app.state.engine_client.collective_rpc(LOAD_WEIGHTS_METHOD, args=(tensors,))
        return _slowest(replies)

    async def finish_weights(self, app, body: dict) -> dict:
        self._require_pause("finishing the weights")
        missing = await app.state.engine_client.collective_rpc(FINISH_WEIGHTS_METHOD)
        return {"missing": sorted(set().union(*missing))}

    async def set_up_adapter(self, app, body: dict) -> dict:
        self._require_lease("setting up an adapter")
        tensors = [ParameterSpec.model_validate(tensor).model_dump() for tensor in body["tensors"]]
        arguments = (tensors, body["config"])
        refused = await app.state.engine_client.collective_rpc(SET_UP_ADAPTER_METHOD, args=arguments)
        return {"refused": next((reason for reason in refused if reason is not None), None)}

    async def load_adapter(self, app, body: dict) -> dict:
        """Loads into the one of two ids that new requests do not use; `resume` makes it the one they use."""
        self._require_pause("loading an adapter")
        engine = app.state.engine_client
        adapter = self.sampling.adapter
        first, second = MEMORY_ADAPTERS
        adapter_id = second if adapter is not None and adapter.lora_int_id == first else first
        if self.sampling.in_flight[adapter_id]:
            # They began two versions ago. They go on with the new weights, and recompute what they cached before.
            await compat.drop_caches(engine)
        try:
            replies = await engine.collective_rpc(LOAD_ADAPTER_METHOD, args=(adapter_id,))
        except compat.EngineDeadError:
            raise
        except Exception as problem:  # of a worker, whose errors all come as one type
            self.torn = self.torn or bool(self.sampling.in_flight[adapter_id])
            raise ControlError(str(problem)) from problem
        self.next_adapter = adapter_id
        return _slowest(replies)

    async def sleep(self, app, body: dict) -> dict:
        """Gives the device's memory back until `wake`. Requests in flight stay; new ones wait."""
        self._require_lease("sleep")
        self.sampling.hold()
        self.asleep = int(body["level"])
        self.torn = self.torn or self.asleep > 1  # level 2 forgets the weights
        await app.state.engine_client.sleep(self.asleep, mode="keep")
        return {}

    async def wake(self, app, body: dict) -> dict:
        """`tags`: which memory to take again, `weights` or `kv_cache`."""
        self._require_pause("wake")
        await app.state.engine_client.wake_up(body["tags"])
        if "kv_cache" in body["tags"]:
            self.asleep = 0
        return {}

    async def versions(self, app, body: dict) -> dict:
        """Answers at any time, also while a publish is under way."""
        return self.sampling.ledger.answer(body)

    async def noted(self, app, body: dict) -> dict:
        """The keys of all completions that `versions` knows, for who will outlive this server."""
        return {"keys": self.sampling.ledger.keys()}

    async def refused(self, app, body: dict) -> dict:
        """What environments have asked for in vain, for a trainer that waits for their rollouts."""
        return self.refusals.told()

    def _require_lease(self, what: str) -> None:
        if not self.lease.held:
            raise ControlError(f"{what} needs a lease, or nothing would notice if the trainer died: open it first")

    def _require_pause(self, what: str) -> None:
        self._require_lease(what)
        if not self.sampling.paused:
            raise ControlError(f"{what} needs a pause, or requests would sample from weights in the making")

    async def _recover(self, app) -> None:
        """The trainer is gone, the weights are whole: goes on with them."""
        logger.warning(
            "the trainer left while the server was paused; resuming version %d", self.sampling.policy_version
        )
        self.next_adapter = None
        try:
            if self.asleep:
                await app.state.engine_client.wake_up(["weights", "kv_cache"])
                self.asleep = 0
            await self._let_go(app)
        except Exception as problem:  # whatever it is, a server that stays paused helps nobody
            logger.exception("resuming failed")
            self._leave(f"the trainer left while the server was paused, and it cannot resume ({problem})")

    def _watch_engines(self) -> None:
        """An engine that is killed is noticed at once, also while nobody asks for anything."""
        self.engines = [child for child in multiprocessing.active_children() if child.name.startswith("EngineCore")]
        loop = asyncio.get_running_loop()

        def watch() -> None:
            multiprocessing.connection.wait([engine.sentinel for engine in self.engines])
            if self._killed_engine() is not None:
                with contextlib.suppress(RuntimeError):  # the loop has ended, and so does this process
                    loop.call_soon_threadsafe(self._engine_died)

        threading.Thread(target=watch, name="engine-watch", daemon=True).start()

    def _killed_engine(self) -> multiprocessing.Process | None:
        """One that a signal has ended, if there is one; not by SIGTERM, by which vLLM and the guard end it."""
        for engine in self.engines:
            if multiprocessing.connection.wait([engine.sentinel], timeout=0):
                engine.join(REAPED)
                if (engine.exitcode or 0) < 0 and -engine.exitcode not in STOPS:
                    return engine
        return None

    def _engine_died(self) -> None:
        """Where a signal ended it, this process ends with the exit code of that."""
        engine = self._killed_engine()
        if engine is None:
            return self._leave("vLLM's EngineCore process died")
        signum = signal.Signals(-engine.exitcode)
        reason = f"vLLM's {engine.name} (process {engine.pid}) was killed by the signal {signum.name}"
        self._leave(reason, exit_code=128 + signum)

    def _leave(self, reason: str, exit_code: int | None = None) -> None:
        """Answers nothing from now on and ends the process, whatever connections are still open."""
        if self.sampling.broken is not None:
            return
        self.sampling.broken = f"{reason}. This server is shutting down: start it again"
        logger.error("%s", self.sampling.broken)
        self.sampling.let_go()  # those who wait get the reason
        if exit_code is None:
            threading.Thread(target=_exit_within, args=(LEAVE_GRACE, 1), daemon=True).start()
            os.kill(os.getpid(), signal.SIGTERM)
        else:  # vLLM would end with a code of its own
            threading.Thread(target=_exit_within, args=(ANSWER_GRACE, exit_code), daemon=True).start()


def _slowest(replies: list[dict]) -> dict:
    """The reply of the worker that took longest."""
    parsed = [LoadReply.model_validate(reply) for reply in replies]
    return max(parsed, key=lambda reply: reply.receive_ms + reply.apply_ms).model_dump()


def _exit_within(seconds: float, exit_code: int) -> None:
    """Frozen requests keep vLLM's shutdown waiting for ever, so there is an end to the patience."""
    time.sleep(seconds)
    for child in psutil.Process().children(recursive=True):
        child.kill()
    os._exit(exit_code)
