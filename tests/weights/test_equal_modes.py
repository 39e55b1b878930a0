"""How the weights reach the server changes nothing in training: the same rollouts give the same run in every mode."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from peft import LoraConfig

from tests.rollout_factory import step_logs
from tests.weights import trainers
from tests.weights.live import MODES, Live
from trl_atropos.weights.publisher import NullPublisher

pytestmark = [pytest.mark.server, pytest.mark.slow]

SETTINGS = {"max_steps": 6, "learning_rate": 1e-3}


@dataclass
class Run:
    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, torch.Tensor]  # of the trained parameters


@torch.no_grad()
def train(trainer) -> Run:
    """Trains from the same adapter, if there is one, whatever was drawn before."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in trainer.model.named_parameters():
        if "lora_" in name:
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    with torch.enable_grad():
        trainer.train()
    logs = step_logs(trainer)
    trained = {name: p.detach().cpu().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    return Run([log["loss"] for log in logs], [log["grad_norm"] for log in logs], trained)


@pytest.fixture(scope="module")
def alone(server_model, recording, tmp_path_factory) -> dict[bool, Run]:
    """The runs that publish nothing, without and with an adapter."""
    runs = {}
    for lora in (False, True):
        folder: Path = tmp_path_factory.mktemp("alone")
        peft_config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear") if lora else None
        runs[lora] = train(
            trainers.make_trainer(
                NullPublisher(), recording, server_model, folder, peft_config=peft_config, **SETTINGS
            )
        )
    return runs


@pytest.mark.parametrize("live", MODES, indirect=True)
def test_a_run_is_the_same_whatever_carries_its_weights(live: Live, alone):
    publisher = live.publisher(sync_every_n_steps=3 if live.mode.vllm_mode == "restart" else 1)
    with live.trainer(publisher, **SETTINGS) as trainer:
        run = train(trainer)
    expected = alone[live.mode.lora]
    assert publisher.policy_version == len(run.losses) == 6
    assert 0 < publisher.probe_max_abs_diff <= trainers.tolerance(publisher)
    assert run.losses == pytest.approx(expected.losses, rel=1e-4, abs=1e-6)
    assert run.grad_norms == pytest.approx(expected.grad_norms, rel=1e-4)
    assert run.weights.keys() == expected.weights.keys()
    for name, weight in run.weights.items():
        torch.testing.assert_close(weight, expected.weights[name], rtol=1e-4, atol=1e-6)
