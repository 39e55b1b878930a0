"""Two runs in one output folder: no run starts from the other's checkpoints, or saves its own
beside them."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.rollout_factory import arguments, make_group, record
from trl_atropos import AtroposGRPOConfig, AtroposGRPOTrainer
from trl_atropos.errors import CheckpointError, RecipeError
from trl_atropos.weights.run_path import is_past

LAST = 3  # optimizer steps of the earlier run
NEW = 1e-3  # learning rate, by which another run is another model


@pytest.fixture(scope="module")
def make(tiny_model, tmp_path_factory):
    """Makes a trainer with a checkpoint after every step."""
    groups = [[make_group(tiny_model, 4, seed)] * 2 for seed in range(6)]
    recording = record(tmp_path_factory.mktemp("recorded") / "recorded.jsonl", *groups)

    def trainer(folder: Path, **settings) -> AtroposGRPOTrainer:
        usual = {
            "max_steps": LAST,
            "save_strategy": "steps",
            "save_steps": 1,
            "replay_paths": [recording],
        }
        config = AtroposGRPOConfig(**arguments(folder, **(usual | settings)))
        return AtroposGRPOTrainer(str(tiny_model), args=config)

    return trainer


@pytest.fixture(scope="module")
def earlier(make, tmp_path_factory) -> Path:
    """The folder of a run of `LAST` steps."""
    folder = tmp_path_factory.mktemp("earlier")
    make(folder).train()
    return folder


@pytest.fixture
def used(earlier, tmp_path) -> Path:
    return Path(shutil.copytree(earlier, tmp_path / "run"))


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "model.safetensors")


def equal(one: Path, other: Path) -> bool:
    of_other = weights(other)
    return all(torch.equal(tensor, of_other[name]) for name, tensor in weights(one).items())


def steps_in(folder: Path) -> list[int]:
    return sorted(
        int(path.name.removeprefix("checkpoint-")) for path in folder.glob("checkpoint-*")
    )


def forget_run(checkpoint: Path) -> None:
    """Leaves the checkpoint as a version without paths wrote it."""
    file = checkpoint / "trainer_state.json"
    state = json.loads(file.read_text())
    del state["stateful_callbacks"]["RunPath"]
    file.write_text(json.dumps(state))


def test_new_run_beside_old_checkpoints_is_refused(make, used, earlier):
    with pytest.raises(RecipeError) as refused:
        make(used, max_steps=1, learning_rate=NEW).train()
    assert "checkpoints of an earlier run (checkpoint-3, checkpoint-2, checkpoint-1)" in str(
        refused.value
    )
    for way_out in (
        "another folder",
        "`move_checkpoints_aside: true`",
        "`resume_from_checkpoint: true`",
    ):
        assert way_out in refused.value.fix
    assert all(
        equal(used / f"checkpoint-{step}", earlier / f"checkpoint-{step}") for step in (1, 2, 3)
    )


def test_run_moving_checkpoints_aside_is_resumed(make, used, earlier):
    make(used, max_steps=1, learning_rate=NEW, move_checkpoints_aside=True).train()
    assert steps_in(used) == [1] and steps_in(used / "checkpoints-before-1") == [1, 2, 3]
    assert equal(used / "checkpoints-before-1/checkpoint-3", earlier / "checkpoint-3")
    resumed = make(used, max_steps=2, learning_rate=NEW)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.log_history[0]["step"] == 1 and steps_in(used) == [1, 2]
    assert not equal(used / "checkpoint-2", earlier / "checkpoint-2")
    make(used, max_steps=1, move_checkpoints_aside=True).train()
    assert steps_in(used) == [1] and steps_in(used / "checkpoints-before-2") == [1, 2]


def test_resume_skips_higher_checkpoint_of_other_run(make, tmp_path, earlier, caplog):
    make(tmp_path, max_steps=1, learning_rate=NEW).train()
    shutil.copytree(earlier / "checkpoint-3", tmp_path / "checkpoint-3")
    with caplog.at_level(logging.INFO, "trl_atropos"):
        make(tmp_path, max_steps=2, learning_rate=NEW).train(resume_from_checkpoint=True)
    (run, _), _resumed = json.loads((tmp_path / ".run.json").read_text())["path"]
    assert f"Resuming from {tmp_path}/checkpoint-1, step 1 of the run {run}." in caplog.messages
    assert f"Passed over {tmp_path}/checkpoint-3: it is of another run." in caplog.messages
    with pytest.raises(
        CheckpointError, match=f"holds that of another one, {run}.*folder of the other run or a new"
    ):
        make(tmp_path, max_steps=9).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    shutil.rmtree(tmp_path / "checkpoint-1")
    shutil.rmtree(tmp_path / "checkpoint-2")
    with pytest.raises(
        RecipeError, match=r"no checkpoint in .* of the run that used it last \(checkpoint-3: of"
    ):
        make(tmp_path, max_steps=9).train(resume_from_checkpoint=True)


def test_resume_skips_steps_abandoned_by_going_back(make, used, caplog):
    back = make(used, max_steps=2, save_steps=4, learning_rate=NEW)
    back.train(resume_from_checkpoint=str(used / "checkpoint-1"))  # saves at the end, step 2
    assert steps_in(used) == [1, 2, 3]
    resumed = make(used, max_steps=4, save_steps=4, learning_rate=NEW)
    resumed.train(resume_from_checkpoint=True)
    assert (
        f"Passed over {used}/checkpoint-3: the run went back to an earlier step after it."
        in caplog.messages
    )
    assert (
        resumed.args.max_steps == 4
        and len([log for log in resumed.state.log_history if "loss" in log]) == 4
    )
    path = json.loads((used / ".run.json").read_text())["path"]
    assert [step for _, step in path] == [0, 1, 2]
    assert len({name for name, _ in path}) == 3


def test_folder_without_run_name_resumes_single_run(make, used, tmp_path):
    (used / ".run.json").unlink()
    make(used, max_steps=4).train(resume_from_checkpoint=True)
    assert steps_in(used) == [1, 2, 3, 4]
    (used / ".run.json").unlink()
    make(tmp_path / "other", max_steps=1).train()
    shutil.copytree(tmp_path / "other/checkpoint-1", used / "checkpoint-9")
    with pytest.raises(
        CheckpointError, match=r"checkpoints of 2 runs \(checkpoint-9, .* by its path"
    ):
        make(used, max_steps=12).train(resume_from_checkpoint=True)


def test_checkpoint_without_run_name_warns_on_resume(make, used, caplog):
    for step in (1, 2, 3):
        forget_run(used / f"checkpoint-{step}")
    (used / ".run.json").unlink()
    make(used, max_steps=4).train(resume_from_checkpoint=True)
    message = f"Resuming from {used}/checkpoint-3, step 3, which does not say which run saved it"
    assert any(
        record.levelname == "WARNING" and message in record.message for record in caplog.records
    )
    path = json.loads((used / ".run.json").read_text())["path"]
    assert [step for _, step in path] == [3]
    shutil.rmtree(used / "checkpoint-4")  # the run crashed before it saved
    resumed = make(used, max_steps=4)
    resumed.train(resume_from_checkpoint="true")
    assert resumed.state.global_step == 4


@pytest.mark.parametrize("max_steps", [LAST, LAST - 1])
def test_resume_without_steps_left_is_refused(make, used, max_steps):
    with pytest.raises(
        RecipeError, match=f"`max_steps` is {max_steps}, .*checkpoint-3 has 3 steps.* above 3"
    ):
        make(used, max_steps=max_steps).train(resume_from_checkpoint=True)


def test_torn_checkpoint_does_not_block_new_run(make, tmp_path):
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1/model.safetensors").write_text("torn")
    make(tmp_path, max_steps=1).train()
    assert weights(tmp_path / "checkpoint-1")


A, B, C = ["a", 0], ["b", 100], ["c", 120]


@pytest.mark.parametrize(
    ("path", "step", "run", "past"),
    [
        ([A], 50, [A], True),
        ([A], 100, [A, B], True),
        ([A], 150, [A, B], False),  # abandoned
        ([A, B], 150, [A, B], True),
        ([A, B], 150, [A, ["b2", 100]], False),
        ([A, B], 120, [A, B, C], True),
        ([A, B], 110, [A], False),  # a folder that an older state was put back into
        ([["z", 0]], 50, [A], False),
        ([], 50, [A], False),  # of a version without paths, before a new run
        ([], 100, [["n", 100]], True),
        ([], 150, [["n", 100]], False),
    ],
)
def test_past_of_run_follows_its_branches(path, step, run, past):
    assert is_past(path, step, run) is past
