"""The source's state in the trainer's checkpoints: real trainer, real Atropos API. Nobody samples
the policy."""

import json
from pathlib import Path

import pytest

from tests.rollout_factory import arguments, uniform_batch
from tests.rollouts.conftest import Api
from trl_atropos import AtroposGRPOConfig, AtroposGRPOTrainer
from trl_atropos.rollouts.rollout import Rollout
from trl_atropos.rollouts.source import AtroposSource
from trl_atropos.rollouts.spool import oldest_cursor

ROWS = 8  # of a generation batch


class Noted(AtroposSource):
    """Notes the index of every row that it hands out."""

    def __init__(self, url: str):
        super().__init__(url)
        self.indexes: list[list[int]] = []

    def poll(self, num_rows: int, timeout: float) -> list[Rollout] | None:
        rows = super().poll(num_rows, timeout)
        if rows is not None:
            self.indexes.append([row.index for row in rows])
        return rows


@pytest.fixture
def run(api: Api, tiny_model: Path, tmp_path: Path):
    """Trains in one output folder: call it again for the next life. Returns what was handed out."""
    groups: list[dict] = []

    class Delivered(Noted):
        def start(self, run):
            super().start(run)
            if groups:
                # only now: an API that takes any before a trainer has registered is spoiled
                api.deliver(*groups)
            groups.clear()

    def train(resume: int | None = None, deliver: bool = False, **settings) -> list[list[int]]:
        if deliver or resume is None:
            groups.extend(
                group for seed in range(6) for group in uniform_batch(tiny_model, 4, 2, seed)
            )
        source = Delivered(api.url)
        options = {
            "max_steps": 4,
            "save_strategy": "steps",
            "save_steps": 1,
            "replay_paths": ["given"],
        }
        options |= {"rollout_timeout": 30.0} | settings
        config = AtroposGRPOConfig(**arguments(tmp_path / "run", **options))
        trainer = AtroposGRPOTrainer(str(tiny_model), args=config, rollout_source=source)
        checkpoint = None if resume is None else str(tmp_path / "run" / f"checkpoint-{resume}")
        trainer.train(resume_from_checkpoint=checkpoint)
        return source.indexes

    return train


def saved(tmp_path: Path, step: int) -> dict:
    state = json.loads((tmp_path / "run" / f"checkpoint-{step}" / "trainer_state.json").read_text())
    return state["stateful_callbacks"]["RolloutState"]["attributes"]


def batches(*numbers: int) -> list[list[int]]:
    return [list(range(number * ROWS, (number + 1) * ROWS)) for number in numbers]


def test_resume_goes_on_at_checkpoint_cursor(run, tmp_path):
    assert run() == batches(0, 1, 2, 3)
    assert saved(tmp_path, 2)["source"]["cursor"] == 2 * ROWS
    assert run(resume=2, max_steps=6) == batches(2, 3, 4, 5)
    assert saved(tmp_path, 6)["source"]["books"] == {
        "trained": 6 * ROWS,
        "dropped": {},
        "lost_with_api": 0,
    }


@pytest.mark.parametrize(
    ("iterations", "unfinished"), [(1, {1: 4, 2: 0, 3: 4}), (2, {1: 4, 2: 0, 3: 0, 4: 0})]
)
def test_mid_batch_checkpoint_knows_untrained_rows(run, tmp_path, iterations, unfinished):
    options = {
        "per_device_train_batch_size": 4,
        "steps_per_generation": 2,
        "num_iterations": iterations,
    }
    run(**options)
    assert {step: saved(tmp_path, step)["unfinished_rows"] for step in unfinished} == unfinished
    run(resume=1, **options)
    books = saved(tmp_path, 4)["source"]["books"]
    assert books["dropped"] == {"resumed_mid_batch": 4}
    assert books["trained"] + 4 == saved(tmp_path, 4)["source"]["cursor"]


def test_run_resumes_without_rollout_state(run, tmp_path):
    run(max_steps=2)
    path = tmp_path / "run" / "checkpoint-2" / "trainer_state.json"
    state = json.loads(path.read_text())
    del state["stateful_callbacks"]["RolloutState"]
    path.write_text(json.dumps(state))
    assert run(resume=2, deliver=True) == batches(0, 1)  # of a spool of its own
    assert saved(tmp_path, 4)["source"]["cursor"] == 2 * ROWS


def test_restored_callbacks_keep_resume_position(run, tmp_path):
    run(max_steps=2)
    assert run(resume=2, restore_callback_states_from_checkpoint=True) == batches(2, 3)
    assert saved(tmp_path, 4)["source"]["cursor"] == 4 * ROWS


def test_oldest_own_checkpoint_limits_removal(tmp_path):
    for step, spool, cursor in ((2, "another", 0), (4, "ours", 16), (6, "ours", 32)):
        attributes = {"source": {"spool": spool, "cursor": cursor}, "unfinished_rows": 0}
        state = {"stateful_callbacks": {"RolloutState": {"args": {}, "attributes": attributes}}}
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps(state))
    assert oldest_cursor(tmp_path, "ours") == 16
