"""One, two and four processes take the same steps on the same recorded rollouts, whatever is sharded between them, and
however the rows are laid out in micro-batches.

`main` is what each process does: all of `RUNS`, one after the other, because starting a process takes longer than they
do. What they are compared with is one process that takes each batch as a whole, padded as TRL does.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.rollout_factory import PaddedTrainer, arguments, mixed_batch, record, step_logs
from tests.sharded import KINDS, forget_sharding, launch, sharding_arguments
from tests.test_two_processes import PLAIN_STEPS
from trl_atropos import AtroposGRPOConfig, AtroposGRPOTrainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

STEPS = 3
ROWS = 16  # of a generation batch
LOSSES = ("dapo", "grpo")
LAYOUTS: dict[str, dict[str, Any]] = {
    "padded": {"padded": True, "group_by_length": False, "gradient_accumulation_steps": 2},
    "as drawn": {"group_by_length": False, "gradient_accumulation_steps": 2},
    "by length": {"group_by_length": True, "gradient_accumulation_steps": 2},
    "by tokens": {"max_tokens_per_micro_batch": 128},
}
RUNS = {f"{loss}, {name}": {"loss_type": loss} | layout for loss in LOSSES for name, layout in LAYOUTS.items()}
FULL = os.environ.get("TRL_ATROPOS_FULL") == "1"
CASES = [(kind, processes) for kind in KINDS for processes in (2, 4) if FULL or kind == "ddp" or processes == 4]
TOLERANCE = 1e-4  # of a loss, and as a share of a gradient norm


def steps(
    model: str, folder: Path, recording: str, processes: int, padded: bool = False, **settings: Any
) -> list[dict[str, Any]]:
    """What was logged at each step of a run. `padded` as TRL does; `settings` may be any of the configuration."""
    rows = ROWS // processes // settings.get("gradient_accumulation_steps", 1)
    usual = {"max_steps": STEPS, "per_device_train_batch_size": rows, "replay_paths": [recording], **PLAIN_STEPS}
    trainer_class = PaddedTrainer if padded else AtroposGRPOTrainer
    trainer = trainer_class(model, args=AtroposGRPOConfig(**arguments(folder, **usual | settings)))
    assert trainer.accelerator.num_processes == processes
    trainer.train()
    return [{name: log[name] for name in ("loss", "grad_norm", "reward")} for log in step_logs(trainer)]


def main(kind: str, processes: str, model: str, folder: str) -> None:
    told = {}
    for name, settings in RUNS.items():
        sharding = sharding_arguments(kind)
        place = Path(folder, kind, name)
        told[name] = steps(model, place, f"{folder}/rollouts.jsonl", int(processes), **settings | sharding)
        forget_sharding()
    Path(folder, "told.json").write_text(json.dumps(told))  # every process the same: what is logged is of all


@pytest.fixture(scope="module")
def recording(tiny_model, tmp_path_factory) -> str:
    batches = [mixed_batch(tiny_model, seed) for seed in range(1, STEPS + 1)]
    return record(tmp_path_factory.mktemp("equal") / "rollouts.jsonl", *batches)


@pytest.fixture(scope="module")
def expected(tiny_model, recording, tmp_path_factory) -> dict[str, list[dict[str, Any]]]:
    """Of each loss, in one process and one micro-batch."""
    folder = tmp_path_factory.mktemp("whole")
    whole = {"padded": True, "group_by_length": False}
    return {loss: steps(str(tiny_model), folder, recording, 1, loss_type=loss, **whole) for loss in LOSSES}


def compare(told: dict[str, list[dict[str, Any]]], expected: dict[str, list[dict[str, Any]]]) -> None:
    for name, logs in told.items():
        reference = expected[RUNS[name]["loss_type"]]
        assert len(logs) == len(reference) == STEPS, name
        for step, (log, one) in enumerate(zip(logs, reference), start=1):
            assert log["loss"] == pytest.approx(one["loss"], abs=TOLERANCE), (name, step)
            assert log["grad_norm"] == pytest.approx(one["grad_norm"], rel=TOLERANCE), (name, step)
            assert log["reward"] == pytest.approx(one["reward"], rel=1e-6), (name, step)
            assert one["grad_norm"] > 0.01


def test_one_process_takes_the_same_steps_in_every_layout(tiny_model, recording, expected, tmp_path):
    told = {name: steps(str(tiny_model), tmp_path, recording, 1, **settings) for name, settings in RUNS.items()}
    compare(told, expected)


@pytest.mark.parametrize(("kind", "processes"), CASES)
def test_several_processes_take_the_steps_of_one(kind, processes, tiny_model, recording, expected, tmp_path):
    (tmp_path / "rollouts.jsonl").write_bytes(Path(recording).read_bytes())
    module, where = "tests.test_equal_processes", (str(tiny_model), str(tmp_path))
    launch(kind, processes, module, kind, str(processes), *where, timeout=300)
    compare(json.loads((tmp_path / "told.json").read_text()), expected)
