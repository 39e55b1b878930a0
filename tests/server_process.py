"""Real inference servers for the tests: a pytest plugin with one shared server, and a way to start
others."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil
import pytest
import requests

from tests.forge import FORKED_ENGINES, SERVER, Forked
from trl_atropos.protocol import TOKEN_VARIABLE
from trl_atropos.services.addresses import free_port
from trl_atropos.services.guard import SharedFiles, end_service, members

MAX_MODEL_LEN = 512  # four KV blocks of the CPU backend
READY_WITHIN = 180.0  # seconds
READY_ON_GPU_WITHIN = 600.0  # CUDA graphs with adapters take minutes
GRACE = 5.0  # seconds to end after SIGTERM
ENVIRONMENT = {
    "CXX": "no-such-compiler",  # a machine without one must do
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # of vLLM's own servers: ours have a default
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


@cache
def on_gpu() -> bool:
    import torch  # here, because xdist's controller loads this plugin, too, and needs no torch

    return torch.cuda.is_available()


@dataclass(frozen=True)
class Server:
    url: str
    token: str
    model: str
    api: psutil.Process | None = None  # the first of the server's processes
    log: Path | None = None
    process: Forked | subprocess.Popen | None = None  # `api`, whose exit code it knows

    @property
    def engine(self) -> psutil.Process:
        """The process that holds the weights."""
        children = self.api.children()
        (engine,) = [
            child for child in children if "resource_tracker" not in " ".join(child.cmdline())
        ]
        return engine

    def control(self, method: str, route: str, body: dict | None = None, token: str | None = None):
        headers = {"authorization": f"Bearer {token or self.token}"}
        return requests.request(
            method, f"{self.url}/trl_atropos{route}", json=body, headers=headers, timeout=30
        )

    def generate(self, **body):
        return requests.post(f"{self.url}/generate", json={"logprobs": 0, **body}, timeout=60)

    def waiting(self) -> int:
        """How many requests for samples are held back. Only while they are, and under a lease."""
        return self.control("POST", "/hold", {"held": True, "let_in": 0.0}).json()["waiting"]

    def metric(self, name: str) -> float:
        """One of vLLM's own numbers, such as `num_requests_running`."""
        lines = requests.get(f"{self.url}/metrics", timeout=10).text.splitlines()
        (line,) = [line for line in lines if line.startswith(f"vllm:{name}{{")]
        return float(line.rsplit(" ", 1)[1])


@contextmanager
def running_server(
    model: str | Path,
    log_dir: Path,
    *flags: str,
    port: int | None = None,
    token: str | None = None,
    forked: bool = True,
) -> Iterator[Server]:
    """A vLLM server on `model`, in processes of its own; stopped at the end. Another one may take
    its place later. A `forked` one, which there is on the CPU only, starts sooner, and its memory
    is shared with the process that it is forked from."""
    port, token = port or free_port(), token or uuid.uuid4().hex
    command = ["-m", "trl_atropos.server.launch", str(model), "--port", str(port)]
    command += ["--max-model-len", str(MAX_MODEL_LEN), *flags]
    # several share the device
    if on_gpu() and "--gpu-memory-utilization" not in flags:
        command += ["--gpu-memory-utilization", "0.1"]
    log_dir.mkdir(parents=True, exist_ok=True)
    url, log, shared = f"http://127.0.0.1:{port}", log_dir / "vllm.log", SharedFiles()
    environment = os.environ | ENVIRONMENT | {TOKEN_VARIABLE: token}
    del environment["VLLM_CPU_KVCACHE_SPACE"]
    if forked and not on_gpu():
        # for the engines that the mode `restart` starts
        process = SERVER.fork(command, environment | FORKED_ENGINES, log)
    else:
        process = _start(command, environment, log)
    try:
        deadline = time.monotonic() + (READY_ON_GPU_WITHIN if on_gpu() else READY_WITHIN)
        while not _healthy(url):
            assert process.poll() is None and time.monotonic() < deadline, (
                f"no server:\n{log.read_text()[-5000:]}"
            )
            time.sleep(0.1)
        shared.note([process.pid, *members(process.pid)])
        yield Server(url, token, str(model), psutil.Process(process.pid), log, process)
    finally:
        shared.note([process.pid, *members(process.pid)])
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait(GRACE)
        end_service(process.pid, GRACE, shared)


def _start(command: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen:
    with open(log, "wb") as file:
        return subprocess.Popen(
            [sys.executable, *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


def _healthy(url: str) -> bool:
    try:
        return requests.get(f"{url}/health", timeout=2).ok
    except requests.RequestException:
        return False


def make_tiny_model(folder: Path, seed: int = 0) -> str:
    """The quickstart's model."""
    from recipes.quickstart.make_model import make_model

    make_model(str(folder), seed)
    return str(folder)


@pytest.fixture(scope="session")
def server_model(tmp_path_factory) -> str:
    return make_tiny_model(tmp_path_factory.mktemp("server_model"))


@pytest.fixture(scope="session")
def server(server_model, tmp_path_factory) -> Iterator[Server]:
    """The server that tests share. Who changes its weights puts them back."""
    with running_server(server_model, tmp_path_factory.mktemp("server_logs")) as running:
        yield running
