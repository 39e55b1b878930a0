"""The modes, a running server of one, and trainers on it.

The fixture `live` of `conftest.py` starts the servers, each once for all tests of `test_modes.py`.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig

from tests.server_process import Server
from tests.weights import trainers
from trl_atropos import AtroposGRPOTrainer
from trl_atropos.server_client import Servers
from trl_atropos.weights.publisher import Phase, ServerPublisher, transfer_of

PUBLISH_TIMEOUT = 60.0  # seconds
CUDA = torch.cuda.is_available()
# Of servers of small models that start beside others: vLLM cannot measure what others use
# meanwhile.
GPU_FLAGS = (
    "--kv-cache-memory-bytes",
    str(1 << 30),
    "--gpu-memory-utilization",
    "0.1",
    "--enforce-eager",
)
# NCCL refuses two processes on one device unless it takes them for two machines; then it goes
# through sockets, which is slow and proves the same.
TWO_MACHINES = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
}


def all_gpus() -> int:
    """How many this machine has, also those that `CUDA_VISIBLE_DEVICES` hides from a trainer
    here."""
    return len(
        subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=True).stdout.splitlines()
    )


@dataclass(frozen=True)
class Mode:
    """`flags` are the server's. `transfer` is the class that must move the weights: no mode may
    fall back unseen."""

    vllm_mode: str
    transfer: str
    transport: str = "auto"
    lora: bool = False
    flags: tuple[str, ...] = ()
    sync_every_n_steps: int = 1


MODES = {
    "colocate": Mode("colocate", "Colocate"),
    "server over gloo": Mode("server", "FullWeights", transport="gloo"),
    "server over memory": Mode("server", "FullWeights", transport="memory"),
    "nccl_lora": Mode("nccl_lora", "MemoryLora", lora=True),
    "colocate with an adapter": Mode("colocate", "MemoryLora", lora=True, flags=("--enable-lora",)),
    "lora": Mode("lora", "FileLora", lora=True),
    "restart": Mode("restart", "Restart", sync_every_n_steps=10),
}
FULL_WEIGHTS = [name for name, mode in MODES.items() if not mode.lora and name != "restart"]
ADAPTERS = [name for name, mode in MODES.items() if mode.lora]


def act_as(machine: str) -> None:
    """Processes that start now, and this one, are of that machine to NCCL."""
    os.environ.update({**TWO_MACHINES, "NCCL_HOSTID": machine})


@dataclass
class Live:
    """A running server of a mode, and what its trainers need."""

    mode: Mode
    server: Server
    recording: str  # path of recorded rollouts
    folder: Path

    def publisher(
        self, kind: type[ServerPublisher] = ServerPublisher, **settings: Any
    ) -> ServerPublisher:
        servers = Servers([self.server.url], PUBLISH_TIMEOUT, self.server.token)
        transfer = transfer_of(self.mode.vllm_mode, servers, self.mode.transport, str(self.folder))
        return kind(transfer, **{"sync_every_n_steps": self.mode.sync_every_n_steps} | settings)

    @contextmanager
    def trainer(self, publisher: ServerPublisher, **settings: Any) -> Iterator[AtroposGRPOTrainer]:
        """A trainer on the recorded rollouts. At the end the server gets back the weights that it
        started with."""
        trainer = trainers.make_trainer(
            publisher,
            self.recording,
            self.server.model,
            self.folder,
            mode=self.mode.vllm_mode,
            peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
            if self.mode.lora
            else None,
            **settings,
        )
        assert type(publisher.transfer).__name__ == self.mode.transfer
        # written straight into the server's memory, or sent
        if self.mode.transfer == "FullWeights":
            assert publisher.transfer.in_place == (self.mode.transport == "memory")
        original = snapshot(trainer.model)
        try:
            yield trainer
            # the others never touch what a trainer attaches to
            if self.mode.transfer in ("Colocate", "FullWeights"):
                transfer, version = publisher.transfer, publisher.policy_version
                publisher.servers.hold_leases()
                transfer.pause().result()
                restore(trainer.model, original)
                transfer.send(version)
                transfer.resume(version).result()
        finally:
            publisher.close()


def publish(trainer: AtroposGRPOTrainer, step) -> None:
    """One publish without an optimizer: `step` changes the weights."""
    publisher = trainer.policy_publisher

    def counted() -> None:
        step()
        publisher._trainer_version += 1

    publisher._publish(counted)
    if publisher._phase is Phase.RESUMING:
        publisher._call.result()


def assert_proven(
    publisher: ServerPublisher, publishes: int, left_out: tuple[str, ...] = ()
) -> None:
    """So many publishes were compared bit for bit, each parameter in each, and only `left_out` was
    not. On ranks with servers."""
    proof = publisher._proof
    for subject in proof.subjects:
        assert proof._compared[subject.of] == min(publishes, subject.times or publishes)
        for client in publisher.servers.clients:
            assert tuple(proof._refused[client.url, subject.of]) == left_out
    assert proof.complete == (not left_out)


Weights = dict[str, torch.Tensor]  # by parameter name


def snapshot(model: torch.nn.Module) -> Weights:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@torch.no_grad()
def restore(model: torch.nn.Module, weights: Weights) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])


@torch.no_grad()
def disturb(model: torch.nn.Module, scale: float) -> None:
    """Changes every trained parameter in place, as an optimizer would."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(scale * torch.randn_like(parameter))
