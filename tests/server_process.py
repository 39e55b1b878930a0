"""Real inference servers for the tests: a pytest plugin with one shared server, and a way to start others."""

import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import requests
import torch

from trl_atropos.protocol import TOKEN_VARIABLE
from trl_atropos.services.manager import Services, free_port

MAX_MODEL_LEN = 512  # four KV blocks of the CPU backend
ENVIRONMENT = {
    "CXX": "no-such-compiler",  # a machine without one must do
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True)
class Server:
    url: str
    token: str
    model: str
    services: Services

    def control(self, method: str, route: str, body: dict | None = None, token: str | None = None):
        headers = {"authorization": f"Bearer {token or self.token}"}
        return requests.request(method, f"{self.url}/trl_atropos{route}", json=body, headers=headers, timeout=30)

    def generate(self, **body):
        return requests.post(f"{self.url}/generate", json={"logprobs": 0, **body}, timeout=60)

    def metric(self, name: str) -> float:
        """One of vLLM's own numbers, such as `num_requests_running`."""
        lines = requests.get(f"{self.url}/metrics", timeout=10).text.splitlines()
        (line,) = [line for line in lines if line.startswith(f"vllm:{name}{{")]
        return float(line.rsplit(" ", 1)[1])


@contextmanager
def running_server(
    model: str | Path, log_dir: Path, *flags: str, port: int | None = None, token: str | None = None
) -> Iterator[Server]:
    """A vLLM server on `model`, in processes of its own; stopped at the end. Another one may take its place later."""
    port, token = port or free_port(), token or uuid.uuid4().hex
    command = [sys.executable, "-m", "trl_atropos.server.launch", str(model), "--port", str(port)]
    command += ["--max-model-len", str(MAX_MODEL_LEN), *flags]
    if torch.cuda.is_available() and "--gpu-memory-utilization" not in flags:  # several share the device
        command += ["--gpu-memory-utilization", "0.1"]
    url = f"http://127.0.0.1:{port}"
    with Services(log_dir) as services:
        environment = {**ENVIRONMENT, TOKEN_VARIABLE: token}
        services.start("vllm", command, env=environment, health_url=f"{url}/health")
        services.wait_healthy("vllm", 180)
        yield Server(url, token, str(model), services)


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
