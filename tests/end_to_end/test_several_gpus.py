"""The main job on several GPUs of one machine: every layout trains, and its servers sample from the
trainer's weights.

A model of 0.4 billion parameters (Qwen3-0.6B's shape with an alphabet of bytes), the quickstart's
environment, and the files in `configs/accelerate` as they are. Every run probes its servers after
every publish, and stops if they differ.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml

from benchmarks.models import PRESETS
from recipes.quickstart.make_model import make_model
from tests import ROOT
from tests.launching import RECIPE, free_urls
from trl_atropos.protocol import TOKEN_VARIABLE
from trl_atropos.services.manager import Services

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.timeout(600),
]
four_gpus = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four CUDA devices")

STEPS = 8
LIMIT = 0.2  # nats, of bfloat16
SERVED = ("--max-model-len", "512", "--enforce-eager", "--gpu-memory-utilization", "0.4")
ADAPTER = {"use_peft": True, "lora_r": 32, "lora_alpha": 64, "lora_target_modules": "all-linear"}


@dataclass(frozen=True)
class Served:
    """A server on GPUs of its own."""

    url: str
    token: str


def write_model(folder: Path, **changes: int) -> Path:
    shape = {name: value for name, value in PRESETS["0.6B"].items() if name != "vocab_size"}
    make_model(str(folder), 0, **shape | changes, dtype="bfloat16")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def narrow_model(tmp_path_factory) -> Path:
    """The server's warm-up of adapters fails in vLLM 0.26 where the vocabulary is smaller than the
    hidden size."""
    return write_model(tmp_path_factory.mktemp("narrow_model"), hidden_size=256)


@contextlib.contextmanager
def serving(
    model: Path, folder: Path, mode: str, devices: list[str], *flags: str
) -> Iterator[list[Served]]:
    """A server for each of `devices` (`CUDA_VISIBLE_DEVICES`), as `trl-atropos serve` starts
    them."""
    urls, token = free_urls(len(devices)), uuid.uuid4().hex
    with Services(folder / "servers") as services:
        for url, visible in zip(urls, devices, strict=True):
            command = [
                sys.executable,
                "-m",
                "trl_atropos.cli",
                "serve",
                str(model),
                "--vllm_mode",
                mode,
                *SERVED,
            ]
            command += ["--dtype", "bfloat16", "--port", url.rpartition(":")[2], *flags]
            services.start(
                f"vllm-{visible}",
                command,
                env={TOKEN_VARIABLE: token, "CUDA_VISIBLE_DEVICES": visible},
                health_url=f"{url}/health",
            )
        for visible in devices:
            services.wait_healthy(f"vllm-{visible}", 240)
        yield [Served(url, token) for url in urls]


@pytest.fixture(scope="module")
def pair(model, tmp_path_factory) -> Iterator[list[Served]]:
    """One server over two GPUs (tensor parallel)."""
    flags = ("--tensor-parallel-size", "2")
    with serving(model, tmp_path_factory.mktemp("pair"), "server", ["2,3"], *flags) as served:
        yield served


def train(
    folder: Path, model: Path, config: str, visible: str, token: str, **settings
) -> list[dict]:
    """Runs the main job on the GPUs `visible`. Returns what it logged, step by step."""
    atropos, launcher = free_urls(2)
    recipe = yaml.safe_load((ROOT / RECIPE).read_text())
    recipe["env"].pop("VLLM_CPU_KVCACHE_SPACE")
    recipe |= {
        "model_name_or_path": str(model),
        "output_dir": str(folder / "run"),
        "atropos_url": atropos,
    }
    recipe |= {
        "max_steps": STEPS,
        "per_device_train_batch_size": 32,
        "logging_steps": 1,
        "learning_rate": 1e-5,
    }
    recipe |= {"report_to": "none", "save_strategy": "steps", "save_steps": STEPS} | settings
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    count = str(len(visible.split(",")))
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--quiet",
        "--num_processes",
        count,
    ]
    command += [
        "--config_file",
        f"configs/accelerate/{config}.yaml",
        "--main_process_port",
        launcher.rpartition(":")[2],
    ]
    command += ["-m", "trl_atropos.train", "--config", str(folder / "recipe.yaml")]
    env = {**os.environ, TOKEN_VARIABLE: token, "CUDA_VISIBLE_DEVICES": visible}
    with (folder / "output.txt").open("w+") as output:
        child = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = child.wait(400)
        except subprocess.TimeoutExpired:
            child.terminate()  # the launcher's end is the trainers'
            child.wait(60)
            code = "timeout"
    told = (folder / "output.txt").read_text()
    assert code == 0, told[-6000:]
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert 0 < summary["probe_max_abs_diff"] <= LIMIT
    lines = (folder / "run" / "run_log.jsonl").read_text().splitlines()
    logs = [
        line["logs"] for line in map(json.loads, lines) if "time/publish" in line.get("logs", {})
    ]
    assert any(log["grad_norm"] > 0 for log in logs)  # or there would be nothing new to send
    publish = statistics.median(log["time/publish"] for log in logs) * 1e3
    step = statistics.median(log["time/step"] for log in logs) * 1e3
    print(
        f"{config} {settings}: probe {summary['probe_max_abs_diff']:.3f}, step {step:.0f} ms, "
        f"publish {publish:.1f} ms"
    )
    return logs


def test_replicas_train_weights_of_their_servers(model, tmp_path):
    urls = free_urls(2)
    settings = {"vllm_args": [*SERVED, "--disable-uvicorn-access-log"], "dtype": "bfloat16"}
    train(tmp_path, model, "ddp", "0,1", uuid.uuid4().hex, vllm_server_base_url=urls, **settings)


@pytest.mark.parametrize("mode", ["server", "nccl_lora"])
def test_trainer_sends_to_server_on_other_gpu(model, narrow_model, tmp_path, mode):
    served, adapter = (narrow_model, ADAPTER) if mode == "nccl_lora" else (model, {})
    settings = {
        "vllm_mode": mode,
        "start_vllm": False,
        "vllm_args": [],
        "dtype": "bfloat16",
        **adapter,
    }
    with serving(served, tmp_path, mode, ["1"]) as (server,):
        train(
            tmp_path,
            served,
            "single_gpu",
            "0",
            server.token,
            vllm_server_base_url=[server.url],
            **settings,
        )


# Before `pair` starts, which keeps the GPUs 2 and 3 to the end of the module.
@four_gpus
def test_two_trainers_send_adapter_to_two_servers(narrow_model, tmp_path):
    settings = {
        "vllm_mode": "nccl_lora",
        "start_vllm": False,
        "vllm_args": [],
        "dtype": "bfloat16",
        **ADAPTER,
    }
    with serving(
        narrow_model, tmp_path, "nccl_lora", ["2", "3"], "--max-lora-rank", "32"
    ) as served:
        urls = [server.url for server in served]
        train(
            tmp_path,
            narrow_model,
            "ddp",
            "0,1",
            served[0].token,
            vllm_server_base_url=urls,
            **settings,
        )


@four_gpus
@pytest.mark.parametrize("config", ["ddp", "zero2", "zero3", "fsdp2"])
def test_two_trainers_send_weights_to_two_gpu_server(model, tmp_path, pair, config):
    (server,) = pair
    settings = {"vllm_mode": "server", "start_vllm": False, "vllm_args": [], "bf16": True}
    train(
        tmp_path, model, config, "0,1", server.token, vllm_server_base_url=[server.url], **settings
    )
