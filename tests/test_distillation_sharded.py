"""With the parameters sharded over two processes, where every forward is a collective, the distillation term is that
of one process: also in a micro-batch in which one of them has no row with a teacher."""

import json
from pathlib import Path

import pytest

from tests.rollout_factory import arguments, record, step_logs
from tests.sharded import launch, sharding_arguments
from tests.test_health_ranks import ROWS, recordings
from tests.test_health_ranks import train as train_alone
from tests.test_two_processes import PLAIN_STEPS
from trl_atropos import AtroposGRPOConfig, AtroposGRPOTrainer

SETTINGS = {"distillation_coef": 0.5, "gradient_accumulation_steps": 2}
COMPARED = ("loss", "grad_norm", "distillation/kl")


def main(kind: str, model: str, folder: str) -> None:
    """What each of the two processes does."""
    run = {"max_steps": 2, "per_device_train_batch_size": ROWS // 4, **PLAIN_STEPS, **SETTINGS}
    given = arguments(Path(folder, kind), replay_paths=[f"{folder}/rollouts.jsonl"], **run)
    trainer = AtroposGRPOTrainer(model, args=AtroposGRPOConfig(**given | sharding_arguments(kind)))
    trainer.train()
    Path(folder, f"{trainer.accelerator.process_index}.json").write_text(json.dumps(step_logs(trainer)))


@pytest.mark.parametrize("kind", ["zero3", "fsdp2"])
def test_a_sharded_policy_follows_the_teacher_like_a_whole_one(tiny_model, tmp_path, kind):
    recording = record(tmp_path / "rollouts.jsonl", *recordings(tiny_model))
    launch(kind, 2, "tests.test_distillation_sharded", kind, str(tiny_model), str(tmp_path))
    alone = step_logs(train_alone(tiny_model, tmp_path / "alone", recording, ROWS, SETTINGS | {"max_steps": 2}))
    together = json.loads((tmp_path / "0.json").read_text())
    for log, reference in zip(together, alone, strict=True):
        assert {name: log[name] for name in COMPARED} == pytest.approx(
            {name: reference[name] for name in COMPARED}, rel=1e-4
        )
