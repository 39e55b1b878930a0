"""Two processes measure, warn, stop, distil and supervise like one with the whole batch.

The two are real: `accelerate launch` runs this file, with gloo between them (`main` below is what
they run). One launch does all the runs, because starting one takes longer than they do.
"""

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pandas
import pytest

from tests.launching import launch_two
from tests.rollout_factory import arguments, make_group, record, step_logs
from tests.trainer.test_distillation import taught
from tests.trainer.test_two_processes import PLAIN_STEPS, ROWS
from trl_atropos import AtroposGRPOConfig, AtroposGRPOTrainer
from trl_atropos.errors import AtroposTrainingError

pytestmark = pytest.mark.slow

STEPS = 3
RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sequence_mask": {"vllm_importance_sampling_mode": "sequence_mask"},
    "distillation": {"distillation_coef": 0.5},
    "distillation, accumulated": {
        "distillation_coef": 0.5,
        "gradient_accumulation_steps": 2,
        "loss_type": "dr_grpo",
    },
}
# The probabilities of whole sequences multiply the rounding of their tokens.
TOLERANCE = {"sequence_mask": 1e-4}


def recordings(model: Path) -> list[list[dict]]:
    """Groups across the border between the two processes, of all kinds; in the second batch, only
    rank 1's rows have a teacher and messages; in the last, scores without variance."""
    spoken = {"messages": [[{"role": "assistant", "content": "yes"}]] * 4}
    mixed = [
        taught(make_group(model, 4, 1, turns=2, logprobs="some"), 1),
        make_group(model, 8, 2, token_advantages=True),
        make_group(model, 4, 3, group_overrides={"sft": True}),
    ]
    one_sided = [make_group(model, 12, 4), taught(make_group(model, 4, 5, **spoken), 2, k=3)]
    return [mixed, one_sided, [make_group(model, 16, 6, scores=[0.5] * 16)]]


def train(
    model: Path, folder: Path, recording: str, per_device: int, settings: dict[str, Any]
) -> AtroposGRPOTrainer:
    rows = per_device // settings.get("gradient_accumulation_steps", 1)
    run = {
        "max_steps": STEPS,
        "per_device_train_batch_size": rows,
        "log_completions": True,
        **PLAIN_STEPS,
        **settings,
    }
    trainer = AtroposGRPOTrainer(
        str(model), args=AtroposGRPOConfig(**arguments(folder, replay_paths=[recording], **run))
    )
    trainer.train()
    return trainer


class Messages(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts: list[str] = []
        logging.getLogger("trl_atropos.metrics.health").addHandler(self)

    def emit(self, entry):
        self.texts.append(entry.getMessage())


def main(model: Path, folder: Path) -> None:
    """What each of the two processes does."""
    told: dict[str, Any] = {"runs": {}}
    recording = str(folder / "rollouts.jsonl")
    heard = Messages()
    for name, settings in RUNS.items():
        trainer = train(model, folder / "two" / name, recording, ROWS // 2, settings)
        column = list(trainer._logs["extra"]["messages"])
        told["runs"][name] = {"log": step_logs(trainer), "messages": column}
    told["warnings"] = heard.texts
    try:
        stop = {
            "stop_on_warnings": ["constant_rewards"],
            "warning_thresholds": {"constant_rewards": 0},
        }
        train(model, folder / "stopped", recording, ROWS // 2, stop)
    except AtroposTrainingError as error:
        told["error"] = str(error)
    rank = trainer.accelerator.process_index
    (folder / f"rank{rank}.json").write_text(json.dumps(told))


@pytest.fixture(scope="module")
def recorded(tiny_model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("two-ranks")
    record(folder / "rollouts.jsonl", *recordings(tiny_model))
    return folder


@pytest.fixture(scope="module")
def ranks(tiny_model, recorded) -> list[dict[str, Any]]:
    """What the two processes told."""
    launch_two(recorded, __name__, tiny_model)
    return [json.loads((recorded / f"rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_step_and_measure_like_one(tiny_model, recorded, tmp_path, ranks, name):
    alone = step_logs(
        train(tiny_model, tmp_path, str(recorded / "rollouts.jsonl"), ROWS, RUNS[name])
    )
    assert len(alone) == STEPS
    together = ranks[0]["runs"][name]["log"]
    compared = {"loss", "grad_norm"} | {
        metric
        for log in alone
        for metric in log
        if metric.startswith(("health/", "sampling/logprob_gap", "distill"))
    }
    for log, reference in zip(together, alone, strict=True):
        assert compared & log.keys() == compared & reference.keys()
        for metric in compared & reference.keys():
            expected = pytest.approx(reference[metric], rel=TOLERANCE.get(name, 1e-5), abs=1e-6)
            assert log[metric] == expected, metric
    assert any(log["health/logprob_gap"] > 0.05 for log in alone)
    assert ("distillation/kl" in alone[0]) is name.startswith("distillation")


def test_warnings_come_from_rank_0_alone(ranks):
    assert len(ranks[0]["warnings"]) > 0
    assert ranks[1]["warnings"] == []


def test_stop_reaches_all_ranks(ranks):
    for told in ranks:
        assert told["error"].endswith(
            "The run stops, because `stop_on_warnings` lists 'constant_rewards'."
        )


def test_messages_column_stays_for_rows_without_any(ranks, recorded):
    """Only the last rows of the second batch have messages, and all of these are rank 1's."""
    tables = sorted((recorded / "two/plain/completions").glob("*.parquet"))
    assert len(tables) == STEPS
    texts = pandas.read_parquet(tables[1])["messages"].tolist()
    assert len(texts) == ROWS
    assert all(pandas.isna(text) for text in texts[:-4])
    assert all("yes" in str(text) for text in texts[-4:])
    last = ranks[0]["runs"]["plain"]["messages"]
    assert last == [None] * ROWS  # the column has stayed


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
