"""Trainers on recorded rollouts that publish to a real server, for the tests of every mode."""

from pathlib import Path
from typing import Any

import torch

from tests.server_process import Server
from trl_atropos import AtroposGRPOConfig, AtroposGRPOTrainer, ReplaySource
from trl_atropos.server_client import Servers
from trl_atropos.weights.publisher import ServerPublisher, transfer_of
from trl_atropos.weights.tolerance import Tolerance


def make_publisher(
    server: Server,
    folder: Path,
    mode: str = "colocate",
    transport: str = "auto",
    timeout: float = 30,
    **settings: Any,
) -> ServerPublisher:
    """The publisher of a mode to one server; probes every publish. `folder` is for the modes that
    write files."""
    servers = Servers([server.url], timeout, server.token)
    return ServerPublisher(
        transfer_of(mode, servers, transport, str(folder)), **{"probe_every_n_steps": 1} | settings
    )


def make_trainer(
    publisher: ServerPublisher,
    recording: str,
    model: Any,
    folder: Path,
    mode: str = "colocate",
    peft_config: Any = None,
    **settings: Any,
) -> AtroposGRPOTrainer:
    """A trainer that replays `recording` and writes to `folder`."""
    usual = {
        "max_steps": 4,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 8,
        "max_completion_length": 32,
        "gradient_checkpointing": False,
        "use_cpu": not torch.cuda.is_available(),
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
    }
    args = AtroposGRPOConfig(output_dir=str(folder), vllm_mode=mode, **usual | settings)
    source = ReplaySource(recording, loop=True)
    return AtroposGRPOTrainer(
        model, args, rollout_source=source, policy_publisher=publisher, peft_config=peft_config
    )


def tolerance(publisher: ServerPublisher) -> float:
    """Nats by which the server and a trainer in float32 may differ on one token."""
    return Tolerance.of(publisher.servers.info.device, torch.float32).max_abs
