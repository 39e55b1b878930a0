"""What `trl-atropos bench weights` measures: a real server, a real trainer with its publisher, and
some publishes.

A publish is what happens at every optimizer step: pause, change the trained weights in place, send,
resume. There are no gradients, and the optimizer's own work is left out: the change is one
multiplication of every trained weight.
"""

import functools
import gc
import statistics
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from peft import LoraConfig

from benchmarks.floors import Floors
from trl_atropos import AtroposGRPOConfig, AtroposGRPOTrainer, ReplaySource
from trl_atropos.flags import LORA_RANKS
from trl_atropos.protocol import TOKEN_VARIABLE
from trl_atropos.server_client import Servers
from trl_atropos.services.addresses import free_port
from trl_atropos.services.manager import Services
from trl_atropos.weights.colocate import Colocate
from trl_atropos.weights.full_weights import Restart
from trl_atropos.weights.lora import FileLora
from trl_atropos.weights.publisher import ServerPublisher, transfer_of
from trl_atropos.weights.transfer import Transfer, choose_transport

# publishes before those that count: the first goes a slower way, with adapters one in each of two
# places
WARM_UP = 2
RESOLUTION_MS = 0.05  # of sending: below, what is measured is the interpreter
RESTARTS = 2  # that count in the mode 'restart', where one takes as long as starting a server
START_TIMEOUT = 900.0  # seconds
PUBLISH_TIMEOUT = 300.0
MAX_MODEL_LEN = 512  # tokens
SERVER_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


@contextmanager
def running_server(
    model: Path,
    log_dir: Path,
    mode: str,
    ranks: list[int],
    dtype: str,
    memory: float,
    environment: dict[str, str],
    flags: Sequence[str] = ("--max-model-len", str(MAX_MODEL_LEN), "--enforce-eager"),
) -> Iterator[Servers]:
    """A server for a mode of the benchmark, in processes of its own."""
    port = free_port()
    token = uuid.uuid4().hex
    url = f"http://127.0.0.1:{port}"
    command = [
        sys.executable,
        "-m",
        "trl_atropos.server.launch",
        str(model),
        "--port",
        str(port),
        "--dtype",
        dtype,
    ]
    command += ["--vllm_mode", vllm_mode_of(mode), *flags]
    if ranks:
        served = next(rank for rank in LORA_RANKS if rank >= max(ranks))
        command += ["--enable-lora", "--max-lora-rank", str(served)]
    if torch.cuda.is_available():
        command += ["--gpu-memory-utilization", str(memory)]
    with Services(log_dir) as services:
        environment = {**SERVER_ENVIRONMENT, **environment, TOKEN_VARIABLE: token}
        services.start("vllm", command, env=environment, health_url=f"{url}/health")
        services.wait_healthy("vllm", START_TIMEOUT)
        yield Servers([url], PUBLISH_TIMEOUT, token)


def vllm_mode_of(mode: str) -> str:
    """The benchmark has a name of its own for `colocate` with an adapter."""
    return mode.removesuffix("_lora") if mode == "colocate_lora" else mode


def measure(
    mode: str,
    model: Path,
    servers: Servers,
    folder: Path,
    rank: int | None,
    dtype: str,
    transport: str,
    repeats: int,
    floors: Floors,
) -> dict:
    """
    One row: times in milliseconds (medians of `repeats` publishes), bytes of one publish, and what
    they compare with.

    Raises:
        AtroposTrainingError: The mode does not work here; a `ProbeError` if the server got other
        weights.
    """
    transfer = transfer_of(vllm_mode_of(mode), servers, transport, str(folder))
    # the first publish, and the last below
    publisher = ServerPublisher(transfer, probe_every_n_steps=sys.maxsize)
    trainer = make_trainer(model, folder, vllm_mode_of(mode), rank, dtype, publisher)
    try:
        optimizer = _Change(
            [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
        )
        wrapped = AcceleratedOptimizer(optimizer)
        phases = _Phases(publisher.transfer)
        publisher.hold()
        publisher.begin(wrapped, 0)
        publishes = [dict(phases.ms)]
        if mode == "restart":
            warm_up = 1
            repeats = min(repeats, RESTARTS)
        else:
            warm_up = WARM_UP
        for _ in range(warm_up - 1 + repeats):
            wrapped.step()
            publishes.append(dict(phases.ms))
        publisher.probe()
        link = _link_of(publisher, trainer)
        num_bytes = phases.num_bytes
    finally:
        publisher.close()
        del trainer
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    row = {
        name: statistics.median(times[name] for times in publishes[warm_up:])
        for name in publishes[0]
    }
    row["publish_ms"] = max(row["publish_ms"], RESOLUTION_MS)
    row["total_ms"] = row["pause_ms"] + row["publish_ms"] + row["resume_ms"]
    floor = floors.ms(link, num_bytes)
    return {
        "rank": rank,
        "transport": link,
        "bytes": num_bytes,
        **row,
        "first_publish_ms": publishes[0]["publish_ms"],
        "floor_ms": floor,
        "ratio": row["publish_ms"] / floor if floor else None,
        "repeats": repeats,
        "probe_max_abs_diff": publisher.probe_max_abs_diff,
        "device": servers.info.device,
        "dtype": servers.info.dtype,
    }


def make_trainer(
    model: Path,
    folder: Path,
    mode: str,
    rank: int | None,
    dtype: str,
    publisher: ServerPublisher,
    **settings: Any,
) -> AtroposGRPOTrainer:
    args = AtroposGRPOConfig(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=2,
        max_steps=sys.maxsize,  # none of them is the last one, which is probed
        use_cpu=not torch.cuda.is_available(),
        vllm_mode=mode,
        model_init_kwargs={"dtype": dtype},
        gradient_checkpointing=False,
        master_weights=False,  # they belong to the optimizer, whose work is not measured
        report_to="none",
        **settings,
    )
    adapter = None
    if rank is not None:
        # With a B that is not zero, or the probe would not see whether the adapter arrived.
        adapter = LoraConfig(
            r=rank, lora_alpha=rank, target_modules="all-linear", init_lora_weights=False
        )
    # Nothing is trained, so the source is never read.
    return AtroposGRPOTrainer(
        str(model),
        args,
        rollout_source=ReplaySource([]),
        policy_publisher=publisher,
        peft_config=adapter,
    )


class _Change(torch.optim.Optimizer):
    """Makes other weights of the trained ones, in place, as fast as an optimizer can."""

    def __init__(self, parameters: list[torch.nn.Parameter]):
        super().__init__(parameters, {})
        self.parameters = parameters

    @torch.no_grad()
    def step(self, closure=None) -> None:
        torch._foreach_mul_(self.parameters, 1.01)


class _Phases:
    """Measures the phases of each publish by a transfer, in milliseconds."""

    def __init__(self, transfer: Transfer):
        self.num_bytes = 0  # that the last publish moved
        self.ms: dict[str, float] = {}  # of the last publish
        for name, method in (
            ("pause_ms", "pause"),
            ("publish_ms", "send"),
            ("resume_ms", "resume"),
        ):
            setattr(
                transfer, method, functools.partial(self._timed, name, getattr(transfer, method))
            )

    def _timed(self, name: str, call: Callable, *args):
        started = time.perf_counter()
        result = call(*args)
        if isinstance(result, Future):  # a publish waits for the pause, and for no resume
            result.result()
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # copies into the server's memory are only queued
        self.ms[name] = (time.perf_counter() - started) * 1e3
        if name == "publish_ms":
            self.num_bytes = result
        return result


def _link_of(publisher: ServerPublisher, trainer: AtroposGRPOTrainer) -> str | None:
    """What carries the bytes. Asked of the transfer that is in use, which may be what `colocate`
    fell back to."""
    transfer = publisher.transfer
    if isinstance(transfer, Colocate):
        return None
    if isinstance(transfer, FileLora | Restart):
        return "file"
    return choose_transport(transfer.transport, publisher.servers, trainer.accelerator.device)
