"""One, two and four processes take the same steps on the same recorded rollouts, whatever is
sharded between them, and however the rows are laid out in micro-batches; with a teacher, too, whose
forward is a collective where parameters are sharded; and with episodes that branch.

`main` is what each process does: all of `RUNS`, one after the other, because starting a process
takes longer than they do. What they are compared with is one process that takes each batch as a
whole, padded as TRL does, or that computes each path of an episode alone.
"""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.rollout_factory import (
    AsDrawnConfig,
    Group,
    PaddedTrainer,
    arguments,
    make_group,
    mixed_batch,
    record,
    step_logs,
)
from tests.rollouts.trees import group_of, item_of, random_episode, trained_by
from tests.sharded import KINDS, forget_sharding, launch, sharding_arguments
from tests.tiers import FULL
from tests.trainer.test_distillation import taught
from tests.trainer.test_trees import AloneTrainer
from tests.trainer.test_two_processes import PLAIN_STEPS
from trl_atropos import AtroposGRPOConfig, AtroposGRPOTrainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

STEPS = 3
ROWS = 16  # of a generation batch
TEACHER = "dapo with a teacher"
BRANCHES = ("dapo with branches", "grpo with branches")
POLICIES: dict[str, dict[str, Any]] = {
    "dapo": {"loss_type": "dapo"},
    "grpo": {"loss_type": "grpo"},
    TEACHER: {"loss_type": "dapo", "distillation_coef": 0.5},
    BRANCHES[0]: {"loss_type": "dapo"},
    BRANCHES[1]: {"loss_type": "grpo"},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "padded": {"padded": True, "config_class": AsDrawnConfig, "gradient_accumulation_steps": 2},
    "as drawn": {"config_class": AsDrawnConfig, "gradient_accumulation_steps": 2},
    "by length": {"gradient_accumulation_steps": 2},
    "by tokens": {"max_tokens_per_micro_batch": 128},
}
RUNS = {
    f"{policy}, {layout}": (policy, layout) for policy in ("dapo", "grpo") for layout in LAYOUTS
}
RUNS |= {f"{TEACHER}, {layout}": (TEACHER, layout) for layout in ("by length", "by tokens")}
RUNS |= {
    f"{policy}, {layout}": (policy, layout)
    for policy in BRANCHES
    for layout in ("as drawn", "by length", "by tokens")
}
OURS = [name for name, (_, layout) in RUNS.items() if layout != "padded"]  # that is TRL's own
# Sharding, processes, and how many of these divide a row.
# Two processes of DDP: `test_two_processes.py`. Four take minutes.
COVERING = [("zero3", 2, 1), ("fsdp2", 2, 1)]
ALL = [(kind, processes, 1) for kind in KINDS for processes in (2, 4)]
ALL += [("ddp", 4, 2), ("zero2", 2, 2), ("zero3", 2, 2), ("zero3", 4, 2), ("fsdp2", 2, 2)]
CASES = ALL if FULL else COVERING
COMPARED = ("loss", "grad_norm", "reward", "distillation/kl")
TOLERANCE = 1e-4  # of a loss, and as a share of a gradient norm


def steps(
    model: str,
    folder: Path,
    recording: str,
    shares: int,
    padded: bool = False,
    trainer_class: type[AtroposGRPOTrainer] = AtroposGRPOTrainer,
    config_class: type[AtroposGRPOConfig] = AtroposGRPOConfig,
    **settings: Any,
) -> list[dict[str, Any]]:
    """What was logged at each step of a run, whose batches are divided into `shares`. `padded` as
    TRL does; `settings` may be any of the configuration."""
    rows = ROWS // shares // settings.get("gradient_accumulation_steps", 1)
    usual = {
        "max_steps": STEPS,
        "per_device_train_batch_size": rows,
        "replay_paths": [recording],
        **PLAIN_STEPS,
    }
    if padded:
        trainer_class = PaddedTrainer
    trainer = trainer_class(model, args=config_class(**arguments(folder, **usual | settings)))
    assert trainer._batch.num_shares == shares
    trainer.train()
    return [{name: log[name] for name in COMPARED if name in log} for log in step_logs(trainer)]


def settings_of(name: str) -> dict[str, Any]:
    policy, layout = RUNS[name]
    return POLICIES[policy] | LAYOUTS[layout]


def recording_of(name: str, folder: Path) -> str:
    """The rollouts that a run replays."""
    policy, _ = RUNS[name]
    return str(folder / ("branches.jsonl" if policy in BRANCHES else "rollouts.jsonl"))


def main(kind: str, shares: str, model: str, folder: str) -> None:
    told = {}
    for name in OURS:
        settings = settings_of(name) | sharding_arguments(kind)
        told[name] = steps(
            model,
            Path(folder, kind, name),
            recording_of(name, Path(folder)),
            int(shares),
            **settings,
        )
        forget_sharding()
    # every process the same: what is logged is of all
    Path(folder, "told.json").write_text(json.dumps(told))


@pytest.fixture(scope="module")
def recordings(tiny_model, tmp_path_factory) -> Path:
    """The folder of two recordings. In every batch of the first, some rows have a teacher; in the
    second batch so few that whole micro-batches of a rank have none."""
    first, *others = mixed_batch(tiny_model, 1)
    groups = [make_group(tiny_model, size, 70 + size, turns=2) for size in (2, 6, 8)]
    batches = [
        [taught(first, 1), *others],
        [taught(groups[0], 2), *groups[1:]],
        [taught(first, 3, k=3), *others],
    ]
    folder = tmp_path_factory.mktemp("equal")
    record(folder / "rollouts.jsonl", *batches)
    rng = random.Random(0)
    branching = [[group_of_episodes(rng, size) for size in (4, 4, 8)] for _ in range(STEPS)]
    record(folder / "branches.jsonl", *branching)
    return folder


def group_of_episodes(rng: random.Random, size: int) -> Group:
    items = []
    while len(items) < size:
        paths = random_episode(rng)
        if trained_by(paths):
            items.append(item_of(paths))
    return group_of(items)


@pytest.fixture(scope="module")
def expected(tiny_model, recordings, tmp_path_factory) -> dict[str, list[dict[str, Any]]]:
    """Of each policy, in one process and one micro-batch."""
    folder = tmp_path_factory.mktemp("whole")
    logs = {}
    for policy, settings in POLICIES.items():
        whole = {"padded": True, "config_class": AsDrawnConfig}
        recording = "rollouts.jsonl"
        if policy in BRANCHES:
            whole = {"trainer_class": AloneTrainer, "config_class": AsDrawnConfig}
            recording = "branches.jsonl"
        logs[policy] = steps(
            str(tiny_model), folder, str(recordings / recording), 1, **settings, **whole
        )
    return logs


def compare(
    told: dict[str, list[dict[str, Any]]], expected: dict[str, list[dict[str, Any]]]
) -> None:
    for name, logs in told.items():
        reference = expected[RUNS[name][0]]
        assert len(logs) == len(reference) == STEPS, name
        for step, (log, one) in enumerate(zip(logs, reference), start=1):
            assert log["loss"] == pytest.approx(one["loss"], abs=TOLERANCE), (name, step)
            assert log["grad_norm"] == pytest.approx(one["grad_norm"], rel=TOLERANCE), (name, step)
            assert log["reward"] == pytest.approx(one["reward"], rel=1e-6), (name, step)
            assert one["grad_norm"] > 0.01
            assert log.keys() == one.keys(), (name, step)
            if "distillation/kl" in one:
                assert log["distillation/kl"] == pytest.approx(
                    one["distillation/kl"], rel=TOLERANCE
                ), (name, step)


def test_one_process_takes_same_steps_in_all_layouts(tiny_model, recordings, expected, tmp_path):
    told = {}
    for name in RUNS:
        recording = recording_of(name, recordings)
        told[name] = steps(str(tiny_model), tmp_path, recording, 1, **settings_of(name))
    compare(told, expected)


@pytest.mark.parametrize(("kind", "processes", "sp_size"), CASES)
def test_several_processes_take_steps_of_one(
    kind, processes, sp_size, tiny_model, recordings, expected, tmp_path
):
    shutil.copytree(recordings, tmp_path, dirs_exist_ok=True)
    module, where = "tests.trainer.test_equal_processes", (str(tiny_model), str(tmp_path))
    shares = str(processes // sp_size)
    launch(kind, processes, module, kind, shares, *where, timeout=300, sp_size=sp_size)
    compare(json.loads((tmp_path / "told.json").read_text()), expected)
