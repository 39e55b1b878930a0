"""What `trl-atropos bench sampling` asks: processes that each have the same model."""

import asyncio
import json
import os
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import psutil
import requests

from benchmarks.models import dtype
from benchmarks.sampling_load import measure
from benchmarks.sampling_roles import ANSWER, prompt_of
from trl_atropos.protocol import TOKEN_VARIABLE
from trl_atropos.server.processes import FAST_LOGPROBS_VARIABLE, SERVER_VARIABLE
from trl_atropos.services.addresses import free_port
from trl_atropos.services.manager import Services
from trl_atropos.services.service_log import tail
from trl_atropos.session_client import SessionClient

START_TIMEOUT = 600.0  # seconds
ANSWER_TIMEOUT = 600.0  # seconds
# Each of four engines gets as much of a GPU. Given by size, it is not measured: engines that start
# side by side would see each other's.
MEMORY_FLAGS = ["--gpu-memory-utilization", "0.15", "--kv-cache-memory-bytes", "8G"]
VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
# One thread for each engine: they would wait for their second ones by spinning.
CPU_VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
ENGINE_FLAGS = ["--distributed-executor-backend", "uni"]
ENGINE_FLAGS += ["--worker-extension-cls", "trl_atropos.server.extension.WorkerExtension"]
ENGINE_FLAGS += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]


@dataclass(frozen=True)
class Question:
    """One row of the table: who is asked, and for what."""

    name: str
    target: str  # a key of `start_targets`
    fields: dict  # of the request
    route: str | None = None  # None for an engine without a server
    without: str | None = None  # the row that asks the same for no log-probabilities
    in_session: bool = False  # each client has a session, and asks below its URL
    plain: str | None = None  # the row whose processor time this one's is compared with
    headers: dict[str, str] = field(default_factory=dict)  # of the request


def start_targets(
    stack: ExitStack, folder: Path, model: Path, clients: int, tokens: int, names: set[str]
) -> dict[str, "Target"]:
    """Starts the processes of these names side by side, and waits until they answer. Leaving
    `stack` ends them."""
    import torch

    cuda = torch.cuda.is_available()
    flags = ["--max-model-len", str(64 + tokens), "--max-num-seqs", str(max(256, clients))]
    flags += ["--dtype", dtype()]
    flags += MEMORY_FLAGS if cuda else ["--enforce-eager"]
    services = stack.enter_context(Services(folder))
    targets: dict[str, Target] = {}
    for prefix, fast in (("", "1"), ("vLLM's ", "0")):
        variables = VARIABLES | {FAST_LOGPROBS_VARIABLE: fast, SERVER_VARIABLE: "1"}
        if not cuda:
            variables |= CPU_VARIABLES
        if f"{prefix}engine" in names:
            engine = Engine(folder / f"{prefix}engine.log", model, flags, variables)
            stack.callback(engine.close)
            targets[f"{prefix}engine"] = engine
        if f"{prefix}server" in names:
            service = "server" if fast == "1" else "server-of-vllm"
            targets[f"{prefix}server"] = Server(services, service, model, flags, variables)
    if "echo" in names:
        targets["echo"] = Echo(services, tokens)
    for target in targets.values():
        target.wait_ready()
    return targets


class Target:
    """A process with an API, and mostly an engine's process below it."""

    process: psutil.Process  # that has the API

    def wait_ready(self) -> None:
        """Returns when the process answers."""
        raise NotImplementedError

    def measure(self, question: Question, clients: int, tokens: int) -> dict[str, float | None]:
        """Keeps `clients` requests in flight. Returns the figures of `sampling_load.measure`."""
        raise NotImplementedError


class Engine(Target):
    """vLLM's engine without a server, asked over a pipe."""

    def __init__(self, log: Path, model: Path, flags: list[str], variables: dict[str, str]) -> None:
        self._log = log
        command = [sys.executable, "-m", "benchmarks.sampling_roles", "engine", str(model)]
        with open(log, "wb") as stderr:
            self._popen = subprocess.Popen(
                [*command, *flags, *ENGINE_FLAGS],
                env=os.environ | variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )
        self.process = psutil.Process(self._popen.pid)
        self.is_fast = variables[FAST_LOGPROBS_VARIABLE] == "1"

    def wait_ready(self) -> None:
        refusal = self._answer()["refusal"]
        if (refusal is None) != self.is_fast:
            raise SystemExit(f"trl-atropos bench sampling: the wrong way is on: {refusal}")

    def measure(self, question: Question, clients: int, tokens: int) -> dict[str, float | None]:
        line = json.dumps({"clients": clients, "tokens": tokens, "fields": question.fields})
        with suppress(BrokenPipeError):  # it has ended, and `_answer` says why
            self._popen.stdin.write(f"{line}\n")
            self._popen.stdin.flush()
        return self._answer()

    def _answer(self) -> dict:
        for line in self._popen.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        code = self._popen.wait()
        raise SystemExit(
            f"trl-atropos bench sampling: an engine ended with exit code {code}. The end of its "
            f"log:\n{tail(self._log)}"
        )

    def close(self) -> None:
        """Ends the process, by the end of its input."""
        with suppress(BrokenPipeError):  # of what `measure` could not write
            self._popen.stdin.close()
        try:
            self._popen.wait(30)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()


class Server(Target):
    """`trl-atropos serve`."""

    def __init__(
        self, services: Services, name: str, model: Path, flags: list[str], variables: dict
    ) -> None:
        self._services = services
        self._name = name
        self._token = secrets.token_urlsafe(24)
        self.url = f"http://127.0.0.1:{free_port()}"
        self.model = str(model)
        command = [sys.executable, "-m", "trl_atropos.server.launch", str(model), *flags]
        command += ["--port", self.url.rpartition(":")[2]]
        env = variables | {TOKEN_VARIABLE: self._token}
        self._service = services.start(name, command, env=env, health_url=f"{self.url}/health")

    def wait_ready(self) -> None:
        self._services.wait_healthy(self._name, START_TIMEOUT)
        guard = psutil.Process(self._service.guard.pid)
        (self.process,) = guard.children()

    def info(self) -> dict:
        """Returns what the server says of itself."""
        headers = {"authorization": f"Bearer {self._token}"}
        reply = requests.get(f"{self.url}/trl_atropos/info", headers=headers, timeout=60)
        reply.raise_for_status()
        return reply.json()

    def measure(self, question: Question, clients: int, tokens: int) -> dict[str, float | None]:
        return asyncio.run(self._measure(question, clients, tokens))

    async def _measure(self, question: Question, clients: int, tokens: int) -> dict:
        timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT)
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            self._urls(question, clients) as urls,
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
        ):

            async def ask(client: int, tokens: int) -> None:
                body = self._body(question, client, tokens)
                await _post(session, f"{urls[client]}{question.route}", body, question.headers)

            return await measure(ask, clients, tokens, self.process)

    @asynccontextmanager
    async def _urls(self, question: Question, clients: int) -> AsyncIterator[list[str]]:
        """Yields each client's URL, without `/v1`: the server's, or that of a session, which ends
        behind the block."""
        if not question.in_session:
            yield [self.url] * clients
            return
        sessions = SessionClient([self.url], self._token)
        async with AsyncExitStack() as stack:
            urls = []
            for _ in range(clients):
                session = await stack.enter_async_context(sessions.session())
                urls.append(session.anthropic)
            yield urls

    def _body(self, question: Question, client: int, tokens: int) -> bytes:
        prompt = prompt_of(client)
        body = {"max_tokens": tokens, "temperature": 1.0, "ignore_eos": True, **question.fields}
        if question.route == "/generate":
            body["prompt"] = {"prompt_token_ids": prompt}
        elif question.route == "/v1/completions":
            body |= {"model": self.model, "prompt": prompt}
        else:
            messages = [{"role": "user", "content": f"client {client}"}]
            body |= {"model": self.model, "messages": messages}
        return json.dumps(body).encode()


class Echo(Server):
    """A route that answers without an engine."""

    def __init__(self, services: Services, tokens: int) -> None:
        self._services = services
        self._name = "echo"
        self.model = ""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "benchmarks.sampling_roles", "echo"]
        command += [str(port), str(tokens)]
        self._service = services.start("echo", command, health_url=f"{self.url}/health")


async def _post(
    session: aiohttp.ClientSession, url: str, body: bytes, headers: dict[str, str]
) -> None:
    headers = {"content-type": "application/json"} | headers
    async with session.post(url, data=body, headers=headers) as reply:
        content = await reply.read()
        if reply.status != 200:
            raise RuntimeError(f"{url} answered {reply.status}: {content[:500]!r}")
