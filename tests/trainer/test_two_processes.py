"""Two processes of half a batch take the steps of one process with the whole, on the same recorded
rollouts.

The two are real: `accelerate launch` runs this file, with gloo between them (`main` below is what
they run). One launch does all the runs, because starting one takes longer than they do.
"""

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launching import launch_two
from tests.rollout_factory import arguments, make_group, mixed_batch, record, step_logs
from tests.services.test_evaluation import tokens_of_a_run
from trl_atropos import AtroposGRPOConfig, AtroposGRPOTrainer
from trl_atropos.errors import RolloutError

pytestmark = pytest.mark.slow

STEPS = 3
ROWS = 16  # of a generation batch

# Adam divides small gradients by their own size, which would turn the rounding of a sum in another
# order into a step.
PLAIN_STEPS = {"optim": "sgd", "learning_rate": 0.05}

RUNS: dict[str, dict[str, Any]] = {
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo"},
    "grpo": {"loss_type": "grpo"},
    "vespo": {"loss_type": "vespo"},
    "dapo, sequence_mask": {"loss_type": "dapo", "vllm_importance_sampling_mode": "sequence_mask"},
    "grpo, kl, scale batch": {"loss_type": "grpo", "beta": 0.1, "scale_rewards": "batch"},
    "cispo, accumulated": {"loss_type": "cispo", "gradient_accumulation_steps": 2},
    "dapo, two iterations": {"loss_type": "dapo", "num_iterations": 2},
}

# multiply the ratios of all tokens, and so their rounding
PRODUCTS = ("vespo", "dapo, sequence_mask")


def recordings(model: Path) -> list[list[dict]]:
    """Groups that lie across the border between the two processes (after row 8), and across two
    batches."""
    straddling = []
    for i, size in enumerate((4, 8, 8, 6, 6)):
        overrides = [{"rewards": {"first": j / 8, f"of group {i}": 1 - j}} for j in range(size)]
        straddling.append(make_group(model, size, 900 + i, turns=2, overrides=overrides))
    return [mixed_batch(model, 1), straddling]


def train(
    model: Path, folder: Path, recording: str, per_device: int, settings: dict[str, Any]
) -> AtroposGRPOTrainer:
    rows = per_device // settings.get("gradient_accumulation_steps", 1)
    run = {"max_steps": STEPS, "per_device_train_batch_size": rows, **PLAIN_STEPS, **settings}
    config = AtroposGRPOConfig(**arguments(folder, replay_paths=[recording], **run))
    trainer = AtroposGRPOTrainer(str(model), args=config)
    trainer.train()
    return trainer


def main(model: Path, folder: Path) -> None:
    """What each of the two processes does."""
    place = folder / f"run-{os.environ['RANK']}"
    place.mkdir()
    told: dict[str, Any] = {"runs": {}, "tokens": tokens_of_a_run(model, place)}
    for name, settings in RUNS.items():
        trainer = train(
            model, folder / "two" / name, str(folder / "rollouts.jsonl"), ROWS // 2, settings
        )
        told["runs"][name] = {
            "log": step_logs(trainer),
            "advantages": list(trainer._logs["advantages"]),
        }
    state = trainer.accelerator.state
    told |= {"processes": state.num_processes, "backend": state.backend}
    try:
        train(model, folder / "short", str(folder / "short.jsonl"), ROWS // 2, {})
    except RolloutError as error:
        told["error"] = str(error)
    (folder / f"rank{state.process_index}.json").write_text(json.dumps(told))


@pytest.fixture(scope="module")
def recorded(tiny_model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("two-processes")
    record(folder / "rollouts.jsonl", *recordings(tiny_model))
    record(folder / "short.jsonl", mixed_batch(tiny_model))
    return folder


@pytest.fixture(scope="module")
def ranks(tiny_model, recorded) -> list[dict[str, Any]]:
    """What the two processes told."""
    launch_two(recorded, __name__, tiny_model)
    return [json.loads((recorded / f"rank{rank}.json").read_text()) for rank in (0, 1)]


def test_two_processes_run_over_gloo(ranks):
    assert [(told["processes"], told["backend"]) for told in ranks] == [(2, "gloo"), (2, "gloo")]


def test_processes_of_run_share_server_token(ranks):
    tokens = {token for told in ranks for token in told["tokens"]}
    assert len(tokens) == 1 and len(tokens.pop()) > 20


def parts_of(log: dict[str, float]) -> dict[str, float]:
    return {metric: value for metric, value in log.items() if metric.startswith("reward/")}


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_train_and_log_like_one(tiny_model, recorded, tmp_path, ranks, name):
    alone = train(tiny_model, tmp_path, str(recorded / "rollouts.jsonl"), ROWS, RUNS[name])
    expected = step_logs(alone)
    assert len(expected) == STEPS
    tolerance = 3e-5 if name in PRODUCTS else 1e-6
    for rank in ranks:
        for log, reference in zip(rank["runs"][name]["log"], expected, strict=True):
            for metric in ("loss", "grad_norm", "reward", "reward_std", "frac_reward_zero_std"):
                if metric in reference:
                    assert log[metric] == pytest.approx(
                        reference[metric], rel=tolerance, abs=2e-7
                    ), metric
            assert abs(reference["loss"]) > 1e-4 and math.isfinite(reference["loss"])
        # The table of completions has the rows of all ranks, in the order in which they came.
        assert rank["runs"][name]["advantages"] == pytest.approx(list(alone._logs["advantages"]))
    # The first rank logs the parts of the rewards of all ranks.
    logged = [parts_of(log) for log in ranks[0]["runs"][name]["log"]]
    assert logged == [parts_of(log) for log in expected]
    assert max(map(len, logged)) > 2


def test_polling_error_on_rank_0_reaches_all_ranks(ranks):
    for told in ranks:
        assert told["error"].startswith("The recording is used up: it has 16 rollouts")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
