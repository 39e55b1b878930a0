"""What stays on disk where the writing of a checkpoint is interrupted or fails, in one process and
in two.

Run as a module, this file is one of two processes of a trainer (`main` below).
"""

import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launching import launch_two
from tests.rollout_factory import arguments, make_trainer, record, uniform_batch
from trl_atropos import AtroposGRPOConfig, AtroposGRPOTrainer
from trl_atropos.errors import SaveError
from trl_atropos.weights.checkpoint import whole_checkpoints

ROWS = 16


@pytest.fixture
def trainer(tiny_model, tmp_path):
    def make(**settings: Any) -> AtroposGRPOTrainer:
        batches = [uniform_batch(tiny_model, 8, 2, seed) for seed in range(6)]
        usual = {"save_strategy": "steps", "per_device_train_batch_size": ROWS}
        return make_trainer(tiny_model, tmp_path, *batches, **(usual | settings))

    return make


def whole(folder: Path) -> list[int]:
    return sorted(whole_checkpoints(str(folder)))


def test_checkpoint_of_same_step_is_wholly_replaced(trainer, tmp_path):
    old = tmp_path / "run/checkpoint-2"
    old.mkdir(parents=True)
    (old / "model-00001-of-00002.safetensors").write_text("of another run")
    trainer(max_steps=2, save_steps=2).train()
    assert not (old / "model-00001-of-00002.safetensors").exists()
    assert whole(tmp_path / "run") == [2]


def test_unwritable_checkpoint_ends_training(trainer, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoint-2").write_text("in the way")
    run = trainer(max_steps=6, save_steps=2)
    with pytest.raises(
        SaveError, match=r"could not be written to .*/run/checkpoint-2: .*exists.*resume"
    ):
        run.train()
    assert run.state.global_step == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_interrupted_checkpoint_leaves_nothing(trainer, tmp_path, error):
    run = trainer(max_steps=2, save_steps=2)

    def fail(*_) -> None:
        assert (tmp_path / "run/checkpoint-2/model.safetensors").exists()
        raise error("while saving")

    run._save_rng_state = fail
    with pytest.raises((error, SaveError), match="while saving"):
        run.train()
    assert not (tmp_path / "run/checkpoint-2").exists()


# ------------------------------------------------------------------------- in the middle of a batch

IN_THE_MIDDLE: list[tuple[dict[str, Any], str | None]] = [
    ({"save_steps": 1}, None),
    ({"steps_per_generation": 4, "save_steps": 4}, None),
    ({"steps_per_generation": 2, "gradient_accumulation_steps": 2, "save_steps": 1}, None),
    (
        {"steps_per_generation": 4, "save_steps": 2},
        "step 2 .* 8 of its 16 rollouts. .* a multiple of 4",
    ),
    (
        {"steps_per_generation": 4, "save_steps": 3},
        "step 3 .* 4 of its 16 rollouts. .* a multiple of 4",
    ),
    (
        {"num_iterations": 2, "save_steps": 1},
        "step 1 .* the last 1 of its 2 passes .* a multiple of 2",
    ),
    (
        {"num_iterations": 2, "steps_per_generation": 2, "save_steps": 1},
        "step 1 .* 4 of its 8 rollouts and the last 1.5 of its 2 passes .* a multiple of 4",
    ),
    (
        {"num_iterations": 2, "steps_per_generation": 2, "save_steps": 3},
        "step 3 .* train the last 0.5 of its 2 passes",
    ),
]


@pytest.mark.parametrize(("settings", "said"), IN_THE_MIDDLE)
def test_mid_batch_save_warns_once_of_untrained_part(trainer, caplog, settings, said):
    caplog.set_level(logging.WARNING, logger="trl_atropos.batches.schedule")
    trainer(max_steps=4, **{"per_device_train_batch_size": 4} | settings).train()
    told = [
        entry.getMessage()
        for entry in caplog.records
        if "middle of a generation batch" in entry.getMessage()
    ]
    assert len(told) == (said is not None)
    assert said is None or re.search(said, told[0]), told


def test_mid_batch_resume_warns_of_untrained_part(trainer, tmp_path, caplog):
    settings = {"steps_per_generation": 2, "per_device_train_batch_size": 4, "save_steps": 1}
    trainer(max_steps=1, **settings).train()
    caplog.set_level(logging.WARNING, logger="trl_atropos.training.supply")
    trainer(max_steps=2, **settings).train(
        resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1")
    )
    assert "middle of a generation batch: 4 rollouts of it are not trained" in caplog.text


# ------------------------------------------------------------------------------------ two processes


def main(model: Path, folder: Path) -> None:
    """What each of the two processes does."""

    def run(name: str) -> AtroposGRPOTrainer:
        given = {
            "max_steps": 4,
            "save_strategy": "steps",
            "save_steps": 2,
            "per_device_train_batch_size": ROWS // 2,
        }
        settings = arguments(folder / name, **given, replay_paths=[str(folder / "rollouts.jsonl")])
        return AtroposGRPOTrainer(str(model), AtroposGRPOConfig(**settings))

    trainer = run("run")
    trainer.train()
    told: dict[str, Any] = {}
    if trainer.accelerator.is_main_process:
        (folder / "blocked").mkdir(exist_ok=True)  # the other process may have made it for its run
        (folder / "blocked/checkpoint-2").write_text("in the way")
    try:
        run("blocked").train()
    except SaveError as error:
        told["error"] = str(error)
    (folder / f"rank{trainer.args.process_index}.json").write_text(json.dumps(told))
    # threads of a process group that is still there abort a process that ends
    trainer.accelerator.end_training()


@pytest.mark.slow
def test_two_ranks_share_checkpoint_and_save_error(tiny_model, tmp_path):
    record(
        tmp_path / "rollouts.jsonl", *[uniform_batch(tiny_model, 8, 2, seed) for seed in range(6)]
    )
    launch_two(tmp_path, __name__, tiny_model)
    assert whole(tmp_path / "run") == [2, 4]
    names = {path.name for path in (tmp_path / "run/checkpoint-4").iterdir()}
    assert {"model.safetensors", "optimizer.pt", "rng_state_0.pth", "rng_state_1.pth"} <= names
    for rank in (0, 1):
        assert (
            "blocked/checkpoint-2: "
            in json.loads((tmp_path / f"rank{rank}.json").read_text())["error"]
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
