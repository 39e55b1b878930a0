"""No optimizer step is taken on a gradient that is not finite, whatever overflows, and the run says
what did.

Run as a module, this file is one of two processes of a trainer (`main` below).
"""

import json
import logging
import math
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.rollout_factory import arguments, record, step_logs, uniform_batch
from tests.sharded import forget_sharding, launch, sharding_arguments
from trl_atropos import AtroposGRPOConfig, AtroposGRPOTrainer, ReplaySource
from trl_atropos.errors import GradientError
from trl_atropos.metrics.gradients import LARGEST_NORM, GradientCheck
from trl_atropos.weights.masters import MasterOptimizer

ROWS = 8
BAD = 1  # batch, of those numbered from 0
CONSTANT = {"lr_scheduler_type": "constant", "max_steps": 3, "per_device_train_batch_size": ROWS}


class Overflowing(ReplaySource):
    """Replays rollouts; one of one batch has token advantages as no environment can send them."""

    advantage = 0.0
    number = -1

    def poll(self, num_rows, timeout):
        rows = super().poll(num_rows, timeout)
        self.number += 1
        for row in rows[:1] if self.number == BAD and self.advantage else []:
            row.token_advantages = np.full(len(row.completion_ids), self.advantage, np.float32)
        return rows


def make(
    model: Any, folder: Path, advantage: float = 0.0, seeds=(0, 1, 2), **settings: Any
) -> AtroposGRPOTrainer:
    folder.mkdir(parents=True, exist_ok=True)
    path = model if isinstance(model, Path) else Path(model.name_or_path)
    recording = record(
        folder / "rollouts.jsonl", *[uniform_batch(path, 4, ROWS // 4, seed) for seed in seeds]
    )
    source = Overflowing([recording])
    source.advantage = advantage
    args = AtroposGRPOConfig(
        **arguments(folder / "run", replay_paths=[recording], **CONSTANT | settings)
    )
    model = str(model) if isinstance(model, Path) else model
    return AtroposGRPOTrainer(model, args=args, rollout_source=source)


def weights_of(trainer: AtroposGRPOTrainer) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in trainer.model.named_parameters()}


OVERFLOWS: dict[str, tuple[float, dict[str, Any], str]] = {
    "advantages that are clipped": (3.3e38, {}, r"loss -?inf|loss nan|advantage 3\.3e\+38"),
    "advantages without clipping": (1e20, {"max_grad_norm": 0.0}, r"advantage 1e\+20"),
    "two accumulated micro-batches": (
        1e30, {"gradient_accumulation_steps": 2, "per_device_train_batch_size": ROWS // 2}, r"advantage 1e\+30",
    ),
    "the k3 divergence of a policy that diverged": (
        0.0, {"beta": 0.1, "learning_rate": 10.0}, r"log-ratio to the reference policy [1-9]\S* nats",
    ),
    "masters of bfloat16": (1e30, {"dtype": torch.bfloat16}, r"advantage 1e\+30"),
}  # fmt: skip


@pytest.mark.parametrize("name", OVERFLOWS)
def test_destructive_step_is_not_taken(name, tiny_model, tmp_path):
    advantage, settings, seen = OVERFLOWS[name]
    settings = dict(settings)
    model = tiny_model
    if dtype := settings.pop("dtype", None):
        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=dtype)
    trainer = make(model, tmp_path, advantage, save_strategy="steps", save_steps=1, **settings)
    with pytest.raises(
        GradientError, match=rf"^Step 2: the .*gradient is not finite.* \(norm .*{seen}"
    ) as refused:
        trainer.train()
    assert "warning_thresholds: {gradient_not_finite: N}" in refused.value.fix
    assert isinstance(trainer.optimizer.optimizer, MasterOptimizer) == (dtype is not None)
    assert trainer.state.global_step == 1
    saved = load_file(tmp_path / "run" / "checkpoint-1" / "model.safetensors")
    for parameter, value in weights_of(trainer).items():
        if parameter in saved:  # a tied head is saved once
            assert value.isfinite().all() and torch.equal(
                value, saved[parameter].to(value.dtype)
            ), parameter
    assert not (tmp_path / "run" / "checkpoint-2").exists()


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_left_out_step_changes_nothing_and_is_logged(optim, dtype, tiny_model, tmp_path):
    """The run ends with the weights of one that never had the batch."""
    models = [AutoModelForCausalLM.from_pretrained(tiny_model, dtype=dtype) for _ in range(2)]
    settings = {"warning_thresholds": {"gradient_not_finite": 1}, "optim": optim}
    with_bad = make(models[0], tmp_path / "bad", 3.3e38, **settings)
    with_bad.train()
    without = make(models[1], tmp_path / "good", seeds=(0, 2), **settings | {"max_steps": 2})
    without.train()
    expected = weights_of(without)
    for name, value in weights_of(with_bad).items():
        assert torch.equal(value, expected[name]), name
    losses = [log["loss"] for log in step_logs(with_bad)]
    assert math.isfinite(losses[0]) and not math.isfinite(losses[1]) and math.isfinite(losses[2])
    assert [log["health/gradient_not_finite"] for log in step_logs(with_bad)] == [0, 1, 1]


def test_damaged_weights_are_named(tiny_model, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    trainer = make(model, tmp_path, padding_free=False)
    seen = r"log-probabilities of the policy that are not finite\)\. The weights were damaged"
    with pytest.raises(GradientError, match=rf"^Step 1: .*{seen}"):
        trainer.train()


# --------------------------------------------------------------------------- float16's loss scaling


def scaled(scale: float) -> SimpleNamespace:
    """What `GradientCheck` asks of an accelerator in float16, with torch's own scaler."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale(torch.zeros(()))  # which makes its scale
    return SimpleNamespace(mixed_precision="fp16", scaler=scaler, distributed_type="NO")


@pytest.mark.parametrize(
    ("scale", "loss", "stops"),
    [
        (65536.0, 0.5, False),
        (1.0, 0.5, False),
        (0.5, 0.5, True),
        (65536.0, math.inf, True),
        (65536.0, math.nan, True),
    ],
)
def test_healable_overflow_does_not_stop_run(scale, loss, stops, caplog):
    check = GradientCheck(0)
    check.note_loss(torch.tensor(loss))
    caplog.set_level(logging.WARNING, logger="trl_atropos.metrics.gradients")
    if stops:
        with pytest.raises(GradientError, match=r"^Step 7: the gradient is not finite \(norm inf"):
            check.allows_step(math.inf, 7, scaled(scale))
    else:
        assert not check.allows_step(math.inf, 7, scaled(scale))
        assert check.left_out == 0 and "Step 7 is left out" in caplog.text


@pytest.mark.parametrize(
    ("norm", "fine"),
    [
        (0.0, True),
        (1e19, True),
        (LARGEST_NORM, True),
        (2e19, False),
        (math.inf, False),
        (math.nan, False),
        (-1, False),
    ],
)
def test_norm_is_fine_while_float32_holds_its_square(norm, fine):
    plain = SimpleNamespace(mixed_precision="no", scaler=None, distributed_type="NO")
    assert GradientCheck(1).allows_step(norm, 1, plain) is fine
    assert math.isfinite(np.float32(abs(norm)) * np.float32(abs(norm))) is fine or norm == -1


# ------------------------------------------------------------------------------------ two processes


def main(kind: str, model: str, folder: str) -> None:
    """What each of the two processes does: one of them has a rollout that overflows."""
    settings = sharding_arguments(kind) | {
        "per_device_train_batch_size": ROWS // 2,
        "max_grad_norm": 0.0,
    }
    if kind == "ddp":
        settings["max_grad_norm"] = 1.0
    trainer = make(Path(model), Path(folder, f"rank{os.environ['RANK']}"), 3.3e38, **settings)
    told: dict[str, Any] = {}
    try:
        trainer.train()
    except GradientError as error:
        told = {"error": str(error), "step": trainer.state.global_step}
    rank = trainer.args.process_index
    Path(folder, f"told{rank}.json").write_text(json.dumps(told))
    forget_sharding()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "zero2", "zero3"])
def test_processes_all_stop_at_same_step(kind, tiny_model, tmp_path):
    launch(kind, 2, "tests.metrics.test_gradients", kind, str(tiny_model), str(tmp_path))
    told = [json.loads((tmp_path / f"told{rank}.json").read_text()) for rank in (0, 1)]
    assert told[0] == told[1] and told[0]["step"] == 1
    assert re.search(r"^Step 2: the .*gradient is not finite.* \(norm ", told[0]["error"])
    assert "advantage 3.3e+38" in told[0]["error"]
    # DeepSpeed leaves a step out by itself if its norm is not finite. In stage 3, that is computed
    # in float64.
    assert ("DeepSpeed has taken" in told[0]["error"]) == (kind == "zero3")
