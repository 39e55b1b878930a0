"""Processes that divide rows take the steps of one process that has whole rows: the same gradients,
for every loss, of rollouts that branch. What they log counts each rollout once.

`main` is what each process does: all of its settings, one after the other, because starting a
process takes longer than they do.
"""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from recipes.quickstart.make_model import make_model
from tests import ROOT
from tests.rollout_factory import AsDrawnConfig, arguments, mixed_batch, record, step_logs
from tests.sharded import forget_sharding, launch, sharding_arguments
from tests.trainer.test_equal_processes import TOLERANCE, group_of_episodes, steps
from tests.trainer.test_trees import (
    SETTINGS,
    Gradients,
    require_equal,
    taught,
    train,
    tree_batches,
)
from trl_atropos import AtroposGRPOConfig, AtroposGRPOTrainer
from trl_atropos.batches.sequence_parallel import require_shared_heads
from trl_atropos.errors import RecipeError
from trl_atropos.services.addresses import free_port

STEPS = 2
MANY_STEPS = 25  # of 8 episodes each
CHECKPOINTED = "layers computed again"
ALL = {name: settings for name, settings in SETTINGS.items() if "padding_free" not in settings}
ALL[CHECKPOINTED] = {"gradient_checkpointing": True}
TAUGHT = "a teacher and advantages of tokens"
ALL[TAUGHT] = {"distillation_coef": 0.5}
MANY = "many trees"
ALL[MANY] = {}
LOSSES = [name for name in ALL if name.startswith("loss ")]
COVERING = ("loss dapo", "loss grpo", "loss bnpo")
UNPACKED = {"attn_implementation": "eager"}
LAUNCHED = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_SP_SIZE": "2"}
TIMES = ("time/", "speed/", "step_time")  # begin the names of what no two runs have alike

# gradients of each step, logs, the completions table, whether prompts are shared
Outcome = tuple[list[Gradients], list[dict[str, Any]], dict[str, list], bool]


def outcome_of(model: Path, folder: Path, name: str, shares: int, **settings: Any) -> Outcome:
    """Of a run whose batches are divided into `shares`."""
    batches = tree_batches(model, MANY_STEPS if name == MANY else STEPS)
    if name == TAUGHT:
        batches = [[taught(rollout, i) for i, rollout in enumerate(batch)] for batch in batches]
    size = len(batches[0]) // shares
    usual = {"vllm_mode": "server", "per_device_train_batch_size": size}
    gradients, trainer = train(model, folder, batches, **usual | ALL[name] | settings)
    table = {column: list(trainer._logs[column]) for column in ("completion", "advantages")}
    return gradients, step_logs(trainer), table, trainer.computation.packs.shares


def refusal_of(model: Path, folder: Path, **settings: Any) -> str:
    with pytest.raises(RecipeError) as refusal:
        train(
            model,
            folder,
            tree_batches(model, 1),
            vllm_mode="server",
            model_init_kwargs=UNPACKED,
            **settings,
        )
    return str(refusal.value)


def main(kind: str, model: str, folder: str, shares: str, *names: str) -> None:
    if kind != "ddp":  # whose gradients no rank has
        logs = losses_of(model, Path(folder), shares=int(shares), **sharding_arguments(kind))
        Path(folder, "logs.json").write_text(json.dumps(logs))
        return
    outcomes = {}
    for name in names:
        place = Path(folder, name)
        sharding = sharding_arguments("ddp")
        outcomes[name] = outcome_of(Path(model), place, name, int(shares), **sharding)
        forget_sharding()
    refusal = refusal_of(Path(model), Path(folder, "unpacked"), **sharding_arguments("ddp"))
    if os.environ["RANK"] == "0":
        torch.save((outcomes, refusal), Path(folder, "outcomes.pt"))


def losses_of(model: str, folder: Path, shares: int, **settings: Any) -> dict[str, list[dict]]:
    """What runs with each loss log at their steps, on episodes that branch."""
    logs = {}
    for name in LOSSES:
        logs[name] = steps(
            model,
            folder / name,
            str(folder / "branches.jsonl"),
            shares,
            config_class=AsDrawnConfig,
            **ALL[name],
            **settings,
        )
        forget_sharding()
    return logs


def require_equal_logs(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for log, other in zip(found, expected, strict=True):
        assert log.keys() == other.keys()
        for name, value in log.items():
            if not name.startswith(TIMES):
                assert value == pytest.approx(other[name], rel=1e-4, abs=1e-5), name


def require_steps_of_one(
    model: Path, folder: Path, processes: int, sp_size: int, *names: str
) -> str:
    """Returns what the processes say of a model that cannot be packed."""
    shares = processes // sp_size
    where = ["ddp", str(model), str(folder), str(shares), *names]
    launch("ddp", processes, __name__, *where, timeout=500, sp_size=sp_size)
    outcomes, refusal = torch.load(folder / "outcomes.pt", weights_only=False)
    assert outcomes.keys() == set(names)
    for name, (gradients, logs, table, shares_prompts) in outcomes.items():
        one = outcome_of(model, folder / "one" / name, name, 1)
        expected_gradients, expected_logs, expected_table, expected_sharing = one
        require_equal(gradients, expected_gradients)
        if shares == 1:  # some logs are means of means otherwise
            require_equal_logs(logs, expected_logs)
        assert table["completion"] == expected_table["completion"]
        assert table["advantages"] == pytest.approx(expected_table["advantages"])
        assert shares_prompts == expected_sharing
    return refusal


@pytest.mark.slow
def test_rows_of_two_processes_give_gradients_of_one(tiny_model, tmp_path):
    refusal = require_steps_of_one(tiny_model, tmp_path, 2, 2, *COVERING)
    assert "`sp_size` divides packed rows among processes" in refusal
    assert "its attention is computed by `eager`" in refusal


@pytest.fixture(scope="module")
def three_key_heads(tmp_path_factory) -> Path:
    """A model whose key heads neither 2 nor 4 processes divide."""
    folder = tmp_path_factory.mktemp("three_key_heads")
    make_model(
        str(folder),
        0,
        hidden_size=48,
        intermediate_size=48,
        num_attention_heads=12,
        num_key_value_heads=3,
        head_dim=4,
        initializer_range=0.2,
    )
    return folder


@pytest.mark.full
@pytest.mark.slow(400)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sp_size", [2, 4])
def test_every_loss_of_divided_rows_is_that_of_one_process(sp_size, three_key_heads, tmp_path):
    require_steps_of_one(three_key_heads, tmp_path, sp_size, sp_size, *ALL)


@pytest.mark.full
@pytest.mark.slow(400)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["zero3", "fsdp2"])
def test_every_loss_of_divided_rows_and_weights_is_that_of_one_process(kind, tiny_model, tmp_path):
    rng = random.Random(0)
    batches = [[group_of_episodes(rng, size) for size in (4, 4, 8)] for _ in range(3)]
    record(tmp_path / "branches.jsonl", *batches)
    launch(kind, 2, __name__, kind, str(tiny_model), str(tmp_path), "1", timeout=500, sp_size=2)
    found = json.loads((tmp_path / "logs.json").read_text())
    expected = losses_of(str(tiny_model), tmp_path, shares=1)
    assert found.keys() == expected.keys() == set(LOSSES)
    for name, logs in found.items():
        for log, other in zip(logs, expected[name], strict=True):
            assert log["loss"] == pytest.approx(other["loss"], abs=TOLERANCE), name
            assert log["grad_norm"] == pytest.approx(other["grad_norm"], rel=TOLERANCE), name
            assert other["grad_norm"] > 1e-3


@pytest.mark.full
@pytest.mark.slow(100)
def test_groups_of_processes_are_data_parallel(three_key_heads, tmp_path):
    require_steps_of_one(three_key_heads, tmp_path, 4, 2, "loss dapo", "loss grpo")


# ------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("processes", "settings", "seen"),
    [
        (3, {}, "sp_size: 2, 3 processes"),
        (2, {"padding_free": False}, "sp_size: 2, padding_free: false"),
        (2, {"numerics": "bitwise"}, "sp_size: 2, numerics: bitwise"),
        (2, {"vllm_mode": "colocate"}, "sp_size: 2, vllm_mode: colocate"),
    ],
)
def test_settings_that_need_whole_rows_are_refused(
    processes, settings, seen, monkeypatch, tmp_path
):
    for name, value in (LAUNCHED | {"WORLD_SIZE": str(processes)}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RecipeError) as refusal:
        AtroposGRPOConfig(**arguments(tmp_path, **{"vllm_mode": "server"} | settings))
    assert refusal.value.seen == seen


def test_other_parallelism_of_launcher_is_refused(monkeypatch, tmp_path):
    for name, value in (LAUNCHED | {"PARALLELISM_CONFIG_TP_SIZE": "2"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RecipeError, match="knows `sp_size` alone"):
        AtroposGRPOConfig(**arguments(tmp_path))


@pytest.mark.parametrize(
    ("sp_size", "fix"), [(9, "Launch with `sp_size` 6."), (5, "Launch with `sp_size` 4.")]
)
def test_heads_that_cannot_be_shared_out_are_refused(sp_size, fix, three_key_heads):
    config = make_config(three_key_heads)
    for size in (1, 2, 3, 4, 6, 12):
        require_shared_heads(config, size)
    with pytest.raises(RecipeError) as refusal:
        require_shared_heads(config, sp_size)
    assert refusal.value.seen == f"sp_size: {sp_size}, num_attention_heads: 12"
    assert refusal.value.fix == fix


def make_config(model: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model)


# ------------------------------------------------------------------------------------------- launched


@pytest.mark.slow
def test_launched_processes_divide_rows_and_leave_ordinary_checkpoint(tiny_model, tmp_path):
    """`accelerate launch` with the repository's own file; one process goes on from its
    checkpoint."""
    batches = [mixed_batch(tiny_model, number) for number in range(3)]
    recipe = arguments(
        tmp_path / "run",
        replay_paths=[record(tmp_path / "rollouts.jsonl", *batches)],
        max_steps=3,
        per_device_train_batch_size=16,
        save_strategy="steps",
        save_steps=2,
    )
    (tmp_path / "recipe.yaml").write_text(
        yaml.safe_dump({"model_name_or_path": str(tiny_model)} | recipe)
    )
    command = [
        str(Path(sys.executable).with_name("accelerate")), "launch", "--quiet",
        "--config_file", "configs/accelerate/sp2.yaml", "--main_process_port", str(free_port()),
        "-m", "trl_atropos.train", "--config", str(tmp_path / "recipe.yaml"),
    ]  # fmt: skip
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    begin, *_ = (tmp_path / "run" / "run_log.jsonl").read_text().splitlines()
    launched = json.loads(begin)
    assert launched["devices"] == "2 x CPU"
    assert launched["config"]["generation_batch_size"] == 16  # each rollout once
    logs = logs_of(tmp_path / "run" / "checkpoint-3")

    whole = AtroposGRPOTrainer(
        str(tiny_model), args=AtroposGRPOConfig(**recipe | {"output_dir": str(tmp_path / "one")})
    )
    whole.train()
    require_equal_logs(logs, step_logs(whole))
    resumed = AtroposGRPOTrainer(str(tiny_model), args=AtroposGRPOConfig(**recipe))
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    require_equal_logs(step_logs(resumed)[2:], logs[2:])


def logs_of(checkpoint: Path) -> list[dict[str, Any]]:
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    return [entry for entry in state["log_history"] if "loss" in entry]
