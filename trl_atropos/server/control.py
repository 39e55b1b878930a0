"""Control plane of the inference server: an ASGI middleware (`--middleware
trl_atropos.server.control.Control`).

It adds `POST /generate` for the environments (`sampling.py`), and routes under `/trl_atropos/` for
the trainer, which need the token in `TRL_ATROPOS_TOKEN`. Every other request goes to vLLM. One
instance lives in the API server process.

A publish is `pause -> (the weights change) -> resume`. A trainer holds a lease (one response that
stays open), whose end tells the server that the trainer is gone. If the trainer dies while the
weights may be half written, the server answers 503 from then on, and exits; if it dies in a pause
without that, the server resumes.
"""

import asyncio
import contextlib
import logging
import multiprocessing
import os
import re
import signal
import sys
import threading
import time

import psutil
from starlette.requests import ClientDisconnect, Request
from vllm.lora.request import LoRARequest

from trl_atropos import protocol
from trl_atropos.protocol import ADAPTER_NAME, ROUTE_PREFIX, SESSION_PREFIX, TOKEN_VARIABLE
from trl_atropos.server import compat, sampled_logprobs
from trl_atropos.server.launch import NUMERICS_VARIABLE, READY_VARIABLE
from trl_atropos.server.plane import (
    EVALUATION,
    Change,
    ControlPlane,
    Refusals,
    Refused,
    error,
)
from trl_atropos.server.processes import ENGINE_PROCESS
from trl_atropos.server.sampling import Sampling
from trl_atropos.server.session_door import Door
from trl_atropos.server.sessions import CALL, Sessions
from trl_atropos.tensors.fingerprint import Assembly

logger = logging.getLogger("vllm.trl_atropos")

LEAVE_GRACE = 2.0  # seconds between asking vLLM to shut down and exiting all the same
ANSWER_GRACE = 0.5  # seconds in which clients that wait get the reason why the server exits
HEALTH_DEADLINE = 10.0  # seconds that the engine may take to answer a question that needs no work
CLOSED_WITHIN = 60.0  # seconds; a first request of a server may take long to compute
# seconds to finish what a dead trainer has begun; a worker may wait for it and never come back
RECOVERY = 30.0
REAPED = 0.5  # seconds between a process's end and its exit code, at most
NOTED = 0.1  # seconds in which vLLM's own thread notes the exit code of an engine
READY_AFTER = 0.5  # seconds after which the last lines of uvicorn's start are out
# vLLM's own sampling routes
OPENAI_ROUTES = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/inference/v1/generate",
)
# vLLM's routes for adapters, each under two names, which the mode `lora` opens
ADAPTER_ROUTES = re.compile(r"/(v1/(un)?load_lora_adapter|adapters(/[^/]*)?)$")
NEEDS_TOKEN = (
    "this route changes what is sampled: send `Authorization: Bearer TOKEN` with that in "
    f"{TOKEN_VARIABLE}"
)
# ids that vLLM gives to no adapter of files: those count from 1
MEMORY_ADAPTERS = (1 << 30, (1 << 30) + 1)


class Control(ControlPlane):
    """Sits between uvicorn and vLLM's app, in the API server's process. One instance per server."""

    def __init__(self, app) -> None:
        super().__init__()
        self.app = app
        self.open.set()
        # this, the engine and its models are known from the first request on
        self.sampling: Sampling | None = None
        self.sessions = Sessions(self, self._abort)
        self.door = Door(self.sessions, self._longest, self._serve_session)
        self.answer_about_sessions = self.sessions.control
        self.refusals = Refusals()
        self.asleep = 0  # vLLM's sleep level
        # the weights may be half written, or not those of the version that the server names
        self.torn = False
        self.description: dict | None = None  # the part of `info` that never changes
        self.closing: asyncio.Task | None = None  # begins with the first session
        # the id of the adapter that is loaded and waits for `resume`
        self.next_adapter: int | None = None
        self.adapters_loaded = 0
        # for "weights" and "adapter": how the workers' parts make up the parameters
        self.assemblies: dict[str, Assembly] = {}
        self.traced: dict[str, dict] = {}  # the bodies of the requests that made them
        # the last question of `/health` to the engine, and when it was asked
        self.health_question: asyncio.Task | None = None
        self.health_asked_at = 0.0
        self.questions = {
            ("GET", "/info"): self.info,
            ("POST", "/versions"): self.versions,
            ("POST", "/evaluation"): self.evaluations.answer,
            ("GET", "/load"): self.load,
            ("GET", "/versions"): lambda body: {"keys": self.ledger.keys()},  # for the front
            ("GET", "/refusals"): lambda body: self.refusals.answer(),
            # for the front, which keeps sessions while it restarts this server
            ("GET", "/front/sessions"): lambda body: self.sessions.freeze(),
            ("POST", "/front/session"): self.session,
            ("POST", "/front/open"): self.open_session,
            ("POST", "/front/summary"): lambda body: self.sessions.summary(),
            ("POST", "/front/begin"): self.begin,
        }
        self.changes = {
            "/attach": Change(self.attach, lease=True),
            "/hold": Change(self.hold, lease=True),
            "/pause": Change(self.pause, lease=True),
            "/resume": Change(self.resume),
            "/channel": Change(self.open_channel, lease=True),
            "/weights/load": Change(self.load_weights, lease=True, pause=True),
            "/weights/again": Change(self.load_weights_again, lease=True, pause=True),
            "/weights/finish": Change(self.finish_weights, lease=True, pause=True),
            "/adapter/setup": Change(self.set_up_adapter, lease=True),
            "/adapter/load": Change(self.load_adapter, lease=True, pause=True),
            "/fingerprints/trace": Change(self.trace),
            "/fingerprints": Change(self.fingerprints),
            "/sleep": Change(self.sleep, lease=True),
            "/wake": Change(self.wake, lease=True, pause=True),
        }

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                self.sessions.hide(scope)
            await self.app(scope, receive, _announcing(send))
            return
        self.sessions.hide(scope)  # before any answer, because uvicorn logs the path
        CALL.set(None)
        if self.sampling is None:
            self._meet_engine(scope["app"].state)
        try:
            if await self._serves(scope, receive, send):
                return
        except Refused as problem:
            await error(problem.status, str(problem))(scope, receive, send)
            return
        except ClientDisconnect:  # it was held back for longer than its client waits
            return
        # vLLM itself would notice within five seconds, and then wait for its clients
        except compat.EngineDeadError:
            await asyncio.sleep(REAPED)  # if a signal has ended the engine, the watch says which
            self._leave("vLLM's EngineCore process died")
            await error(503, self.broken)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _meet_engine(self, state) -> None:
        """Takes from the app's state what vLLM has put there before the first request."""
        self.engine = state.engine_client
        self.models = state.openai_serving_models
        self.server = state.server
        self.sampling = Sampling(self.engine, self)
        self._watch_engines()
        self._announcement = asyncio.create_task(self._announce_logprobs())

    async def _announce_logprobs(self) -> None:
        """Says in the log which way the log-probabilities of sampled tokens take."""
        try:
            refusal = await sampled_logprobs.refusal(self.engine)
        except compat.EngineDeadError:
            return  # vLLM and `_watch_engines` say so
        if refusal is None:
            logger.info("Log-probabilities of sampled tokens take the fast way (one vector a step)")
        else:
            logger.warning("Log-probabilities of sampled tokens take vLLM's own way: %s", refusal)

    async def _serves(self, scope, receive, send) -> bool:
        """Serves control requests and requests for samples. Returns `False` for all others, which
        vLLM's app gets as they are. Raises `Refused` for those that it must not get."""
        request = Request(scope, receive)
        path = scope["path"]
        if path.startswith(f"{ROUTE_PREFIX}/"):
            await self.control(request, send, (compat.EngineDeadError,))
            return True
        if self.broken is not None:
            raise Refused(self.broken, 503)
        if path.startswith(f"{SESSION_PREFIX}/"):
            await self.door(scope, receive, send)
            return True
        samples = path == "/generate" or path in OPENAI_ROUTES
        if samples and scope["method"] == "POST":
            await self.until_admitted(request)
            watched = self.refusals.watched(send)
            if path == "/generate":
                await self.sampling.generate(request, watched)
            else:
                # the engine client waits, too, but a stream would begin with 200
                await self.until_open()
                await self.app(scope, receive, watched)
            return True
        if ADAPTER_ROUTES.search(path) and not self.has_token(request):
            raise Refused(NEEDS_TOKEN, 401)
        if path == "/health":
            await self._require_health()
        return False

    async def _serve_session(self, scope, receive, send) -> None:
        """Answers a call that the door has let in, at one of vLLM's routes. A hold does not stop
        it: the session has begun."""
        EVALUATION.set(None)  # what evaluates is noted by session
        await self.until_open()
        await self.app(scope, receive, self.refusals.watched(send))

    def _longest(self) -> int:
        return self.engine.model_config.max_model_len

    async def _abort(self, request_ids: list[str]) -> None:
        await self.engine.abort(request_ids)

    async def _require_health(self) -> None:
        """Raises `Refused` if the engine does not answer although its process is alive. Does
        nothing while a trainer's call is being served, which may take long: then the trainer has a
        deadline."""
        if self.lease.locked() and self.changing.locked():
            return
        await self.engine.check_health()
        if self.health_question is None or self.health_question.done():
            self.health_asked_at = time.monotonic()
            self.health_question = asyncio.create_task(self.engine.is_sleeping())
        question = self.health_question
        asked_at = self.health_asked_at
        left = asked_at + HEALTH_DEADLINE - time.monotonic()
        await asyncio.wait({question}, timeout=max(0.0, left))
        if question.done():
            return
        silent = time.monotonic() - asked_at
        raise Refused(
            f"the engine has not answered for {silent:.0f} s, though its process is alive: "
            "restart this server",
            503,
        )

    async def close(self) -> None:
        """Closes this process, which has the token and the sessions, and those that have weights on
        the CPU. Those with weights on a GPU stay open, because others open their memory."""
        if self.closing is None:
            self.closing = asyncio.create_task(self._close())
        await asyncio.shield(self.closing)

    async def _close(self) -> None:
        await super().close()
        try:
            async with asyncio.timeout(CLOSED_WITHIN):
                await self._workers("close")
        except TimeoutError:
            self.closing = None  # the next session tries again
            what = f"the engine has not closed its memory within {CLOSED_WITHIN:g} s"
            raise Refused(f"{what}, without which no session is opened", 503) from None

    # ------------------------------------------------------------------------------------ questions

    async def info(self, _body: dict) -> dict:
        """Returns the fields of `ServerInfo`."""
        if self.description is None:
            self.description = await self._describe()
        return protocol.ServerInfo(
            **self.description,
            policy_version=self.sampling.policy_version,
            oldest_version_in_flight=self.sampling.oldest_version_in_flight,
            paused=self.paused,
            lease_held=self.lease.locked(),
        ).model_dump()

    async def _describe(self) -> dict:
        """Returns the part of `info` that never changes. Called once: the fingerprint of a large
        vocabulary takes long enough to hold up sampling."""
        model = self.engine.model_config
        tokenizer = None
        if not model.skip_tokenizer_init:
            vocabulary = self.engine.get_tokenizer().get_vocab()
            tokenizer = protocol.tokenizer_fingerprint(vocabulary)
        workers = await self._workers("describe")  # those of the first replica, as for every call
        uuids = [worker.pop("device_uuid") for worker in workers]
        description = workers[0]
        replicas = self.engine.vllm_config.parallel_config.data_parallel_size
        description["num_workers"] *= replicas
        if replicas > 1:
            description["refusals"].append(
                f"it has {replicas} copies of the model (start a server with --data-parallel-size "
                "1 for each device)"
            )
        return {
            **description,
            "device_uuids": [uuid for uuid in uuids if uuid is not None],
            "protocol": protocol.PROTOCOL_VERSION,
            "instance": self.instance,
            "machine": protocol.machine_id(),
            "vllm_version": str(compat.VLLM_VERSION),
            "model": model.model,
            "dtype": str(model.dtype).removeprefix("torch."),
            "max_model_len": model.max_model_len,
            "vocab_size": model.get_vocab_size(),
            "tokenizer_fingerprint": tokenizer,
            "logprobs_mode": model.logprobs_mode,
            "numerics": os.environ.get(NUMERICS_VARIABLE, "default"),
            "prefixes_by_path": compat.PREFIXES_KEYED_BY_ADAPTER_PATH,
        }

    def versions(self, body: dict) -> dict:
        """Returns the versions and settings of completions, by their keys."""
        query = protocol.VersionsQuery.model_validate(body)
        notes = self.ledger.find(query.keys)
        return protocol.VersionsReply.of(notes).model_dump()

    def load(self, _body: dict) -> dict:
        """Returns the fields of `LoadReply`."""
        in_flight = self.sampling.in_flight.total()
        reply = protocol.LoadReply(
            in_flight=in_flight,
            sessions=self.sessions.num_open,
            counts=dict(self.sessions.counts),
        )
        return reply.model_dump()

    # ----------------------------------------------------------------- questions of the front alone

    async def open_session(self, body: dict) -> dict:
        """Returns the id of a new session."""
        query = protocol.SessionQuery.model_validate(body)
        return {"id": await self.sessions.open(query)}

    async def session(self, body: dict) -> dict:
        """Returns what a session has kept, or `None` if there is no such session."""
        return {"session": await self.sessions.content(body["id"], body["ends"])}

    async def begin(self, body: dict) -> dict:
        """Makes requests sample from `policy_version`, and takes in the `sessions` that the front
        has kept, if it has. Only while nothing is in flight."""
        self.sampling.begin(int(body["policy_version"]))
        if body["sessions"] is not None:
            await self.close()
            self.sessions.thaw(body["sessions"])
        return {}

    # ------------------------------------------------------------------------------------ a publish

    async def attach(self, body: dict) -> dict:
        """Returns the fields of `Attachment`. Only a server of one worker is attached to."""
        (attachment,) = await self._workers("attach", body["parameters"])
        return attachment

    async def pause(self, body: dict) -> None:
        """Stops sampling. With `in_place`, the trainer writes into this server's memory until
        `resume`."""
        self.torn |= bool(body.get("in_place"))
        # before the engine has stopped: what arrives now begins with the next version
        self.open.clear()
        # If the table holds another adapter at `resume`, it came in this pause, and not late from a
        # dead trainer.
        self.models.lora_requests.pop(ADAPTER_NAME, None)
        if self.sampling.adapter is not None:
            self.models.lora_requests[ADAPTER_NAME] = self.sampling.adapter
        clear_cache = bool(body.get("clear_cache", True))
        await compat.pause(self.engine, clear_cache=clear_cache)

    async def resume(self, body: dict) -> dict:
        """Makes requests sample from `policy_version`, with the adapter that came in this pause if
        one did."""
        version = int(body["policy_version"])
        if not self.paused:
            raise Refused("resume without a pause")
        if self.asleep:
            raise Refused(f"resume while asleep (level {self.asleep}): wake first")
        self.torn = False
        self.sampling.serve(version, self._adapter_of(version))
        await compat.mark_tokens(self.engine, self.sampling.history.publishes)
        await self._release()
        return {"policy_version": version}

    def _adapter_of(self, version: int) -> LoRARequest | None:
        """Returns the adapter that was loaded in this pause, or `None` if none was: a former
        trainer's adapter is not the policy."""
        served = self.models.lora_requests
        from_files = served.get(ADAPTER_NAME)  # vLLM's own route puts it there
        if self.next_adapter is not None:
            adapter_id = self.next_adapter
            path = None
        elif from_files is not None and from_files is not self.sampling.adapter:
            adapter_id = from_files.lora_int_id
            path = from_files.lora_path
        else:
            return None
        # vLLM tells the adapters of a batch apart by these names, and cached prefixes too: each
        # version needs its own, also a version that an earlier training had.
        self.adapters_loaded += 1
        name = f"{ADAPTER_NAME}-v{version}-{self.adapters_loaded}"
        adapter = LoRARequest(name, adapter_id, path or f"mem://{name}")
        served[ADAPTER_NAME] = adapter
        self.next_adapter = None
        return adapter

    async def open_channel(self, body: dict) -> None:
        """Makes the workers join the trainer's channel."""
        await self._workers("open_channel", dict(body))

    async def load_weights(self, body: dict) -> None:
        """Makes the workers receive one message of weights."""
        self.torn = True
        await self._workers("load_weights", body["tensors"])

    async def load_weights_again(self, body: dict) -> None:
        """Makes the workers receive messages that they know."""
        self.torn = True
        await self._workers("load_weights_again", body["messages"])

    async def finish_weights(self, _body: dict) -> dict:
        """Returns the names of the parameters that some worker's loader was given nothing for."""
        missing = await self._workers("finish_weights")
        return {"missing": sorted(set().union(*missing))}

    async def set_up_adapter(self, body: dict) -> dict:
        """Returns the first reason of a worker why such an adapter cannot be served, if any."""
        reasons = await self._workers("set_up_adapter", body["tensors"], body["config"])
        reasons = [reason for reason in reasons if reason is not None]
        return {"refused": reasons[0] if reasons else None}

    async def load_adapter(self, _body: dict) -> None:
        """Loads the next version into the one of two ids that new requests do not use. They use it
        from `resume` on."""
        adapter_id, other_id = MEMORY_ADAPTERS
        served = self.sampling.adapter
        if served is not None and served.lora_int_id == adapter_id:
            adapter_id = other_id
        if self.sampling.in_flight[adapter_id]:
            # These requests began two versions ago. They go on with the new weights, and recompute
            # what they cached.
            await self.engine.reset_prefix_cache(reset_running_requests=True)
        try:
            await self._workers("load_adapter", adapter_id)
        except compat.EngineDeadError:
            raise
        except Exception as problem:  # from a worker, whose errors all arrive as one type
            self.torn |= self.sampling.in_flight[adapter_id] > 0
            raise Refused(str(problem)) from problem
        self.next_adapter = adapter_id

    async def trace(self, body: dict) -> dict:
        """Finds where the trainer's parameters are kept, or those of the adapter that is served."""
        query = protocol.TraceQuery.model_validate(body)
        adapter = self._served_adapter(query.of)
        workers = await self._workers("trace", query.of, body["parameters"], adapter)
        shapes = {spec.name: spec.shape for spec in query.parameters}
        assembly = Assembly(shapes, [worker["parts"] for worker in workers])
        self.assemblies[query.of] = assembly
        self.traced[query.of] = body
        refused = dict(assembly.refused)
        for worker in workers:
            refused |= worker["refused"]
        replicas = self.engine.vllm_config.parallel_config.data_parallel_size
        if replicas > 1:
            refused[f"copies 2 to {replicas} of the model"] = (
                "only the first of --data-parallel-size is looked into"
            )
        return {"refused": refused}

    async def fingerprints(self, body: dict) -> dict:
        """Returns the fields of `FingerprintsReply`."""
        of = body["of"]
        if of not in self.assemblies:
            raise Refused("fingerprints of what was not traced")
        changed: set[str] = set()
        if of == "weights":
            workers = await self._workers("inspect")
            for worker in workers:
                changed.update(worker["changed"])
            # what was traced is no longer what is computed with
            if any(worker["moved"] for worker in workers):
                await self.trace(self.traced[of])
        assembly = self.assemblies[of]
        if of == "adapter" and self.sampling.adapter is None:
            fingerprints = [None] * len(assembly.names)
        else:
            adapter = self._served_adapter(of)
            fingerprints = assembly.sum(await self._workers("fingerprints", of, adapter))
        reply = protocol.FingerprintsReply(
            policy_version=self.sampling.policy_version,
            fingerprints=fingerprints,
            changed=sorted(changed),
        )
        return reply.model_dump()

    def _served_adapter(self, of: str) -> list | None:
        """Returns the arguments of the served adapter's `LoRARequest`, or `None` for weights."""
        if of != "adapter":
            return None
        adapter = self.sampling.adapter
        if adapter is None:
            raise Refused("no adapter is served")
        return [adapter.lora_name, adapter.lora_int_id, adapter.lora_path]

    async def sleep(self, body: dict) -> None:
        """Gives the device's memory back until `wake`. Requests in flight stay, and new ones
        wait."""
        self.open.clear()
        self.asleep = int(body["level"])
        self.torn |= self.asleep > 1  # level 2 forgets the weights
        await self.engine.sleep(self.asleep, mode="keep")

    async def wake(self, body: dict) -> None:
        """Takes memory again, by `tags`: `weights` or `kv_cache`."""
        await self.engine.wake_up(body["tags"])
        if "kv_cache" in body["tags"]:
            self.asleep = 0

    async def _workers(self, method: str, *arguments) -> list:
        """Returns the results of a method of `extension.py`, by worker."""
        return await self.engine.collective_rpc(f"trl_atropos_{method}", args=arguments)

    async def _release(self) -> None:
        await self.engine.resume_generation()
        self.open.set()

    # --------------------------------------------------------------- trainers and engines that end

    async def trainer_left(self) -> None:
        """Goes on with the weights if they are whole, and exits if they are not."""
        if not self.torn:
            try:
                # the trainer's last call may still be at work, and may tear the weights
                async with asyncio.timeout(RECOVERY), self.changing:
                    if self.paused and not self.torn:
                        await self._resume_alone()
            # also when time is up: a server that stays paused helps nobody
            except Exception as problem:
                logger.exception("resuming failed")
                if self.paused:
                    self._leave(
                        f"the trainer left in a pause, and the server cannot resume ({problem!r})"
                    )
        if self.torn:
            self._leave(
                "the trainer left in the middle of a publish: the weights may be half written"
            )

    async def _resume_alone(self) -> None:
        """Resumes the version that was sampled from before the pause."""
        version = self.sampling.policy_version
        logger.warning("the trainer left while the server was paused; resuming version %d", version)
        self.next_adapter = None
        if self.asleep:
            await self.wake({"tags": ["weights", "kv_cache"]})
        await self._release()

    def _watch_engines(self) -> None:
        """Watches for signals that end an engine, also while no request comes."""
        loop = asyncio.get_running_loop()

        def watch(engine: multiprocessing.Process) -> None:
            engine.join()
            time.sleep(NOTED)  # vLLM's own thread may have been first
            signum = -(engine.exitcode or 0)
            # vLLM and the guard end it by SIGTERM or SIGINT
            if signum <= 0 or signum in (signal.SIGTERM, signal.SIGINT):
                return
            name = signal.Signals(signum).name
            reason = f"vLLM's {engine.name} (process {engine.pid}) was killed by the signal {name}"
            # a loop that has ended raises; then this process ends, too
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._leave, reason, 128 + signum)

        for child in multiprocessing.active_children():
            if child.name.startswith(ENGINE_PROCESS):
                threading.Thread(target=watch, args=(child,), daemon=True).start()

    def _leave(self, reason: str, exit_code: int | None = None) -> None:
        """Answers only the reason from now on, and ends the process, whatever connections are still
        open."""
        if self.broken is not None:
            return
        self.broken = f"{reason}. This server is shutting down: start it again"
        logger.error("%s", self.broken)
        self.hold_back(False, 1.0)  # requests that wait get the reason
        self.open.set()
        grace = LEAVE_GRACE if exit_code is None else ANSWER_GRACE
        arguments = (grace, exit_code or 1)
        threading.Thread(target=_exit_after, args=arguments, daemon=True).start()
        if exit_code is None:  # vLLM may shut down in order, but exits with a code of its own
            os.kill(os.getpid(), signal.SIGTERM)


def _exit_after(seconds: float, exit_code: int) -> None:
    """Ends this process and its children. Frozen requests would keep vLLM's own shutdown waiting
    for ever."""
    time.sleep(seconds)
    for child in psutil.Process().children(recursive=True):
        child.kill()
    os._exit(exit_code)


def _announcing(send):
    """Returns a `send` for lifespan messages that prints the text of `READY_VARIABLE` when startup
    is complete."""

    async def announcing(message) -> None:
        await send(message)
        if message["type"] == "lifespan.startup.complete":
            text = os.environ.get(READY_VARIABLE, "")
            asyncio.get_running_loop().call_later(READY_AFTER, sys.stderr.write, text)

    return announcing
