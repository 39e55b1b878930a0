"""The model card of a run: what it says of a run that was resumed, and what it leaves out."""

import json
from pathlib import Path

from tests.rollout_factory import make_trainer, uniform_batch
from trl_atropos.report.model_card import _first_and_last, earlier_settings


def write_log(folder: Path, *begins: tuple[int, dict]) -> None:
    lines = [json.dumps({"begin": step, "config": config}) for step, config in begins]
    lines.insert(1, json.dumps({"logs": {"loss": 0.5}}))
    (folder / "run_log.jsonl").write_text("\n".join(lines) + '\n{"begin": 9, "con')


def test_settings_of_earlier_parts_are_listed_by_their_steps(tmp_path):
    usual = {"learning_rate": 1e-3, "beta": 0.0, "output_dir": "there", "hub_token": "secret"}
    second = usual | {"learning_rate": 1e-4, "resume_from_checkpoint": "true"}
    last = second | {"beta": 0.1, "output_dir": "here", "hub_token": None}
    write_log(tmp_path, (0, usual), (4, second), (8, last))
    assert earlier_settings(tmp_path) == [
        "steps 1 to 4: `learning_rate: 0.001`, `beta: 0.0`",
        "steps 5 to 8: `beta: 0.0`",
    ]


def test_part_without_steps_that_stayed_is_left_out(tmp_path):
    """It was begun again from the same checkpoint."""
    write_log(tmp_path, (0, {"beta": 0.0}), (0, {"beta": 0.1}), (4, {"beta": 0.1}))
    assert earlier_settings(tmp_path) == []


def test_run_that_was_not_resumed_has_no_earlier_settings(tmp_path):
    assert earlier_settings(tmp_path) == []
    write_log(tmp_path, (0, {"beta": 0.0}))
    assert earlier_settings(tmp_path) == []


def test_card_names_both_settings_of_a_resumed_run_and_no_licence(tiny_model, tmp_path):
    batches = []
    for step, part in enumerate((0.25, 1.0)):
        overrides = [{"rewards": {"format": part}}, {}, {"rewards": {"a b": 2}}, {}]
        batches.append(uniform_batch(tiny_model, 4, 2, step, overrides=overrides))
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    make_trainer(tiny_model, tmp_path, *batches, **settings, learning_rate=1e-3).train()
    again = make_trainer(tiny_model, tmp_path, *batches, **settings, learning_rate=1e-5)
    again.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-1"))
    again.create_model_card()
    card = (tmp_path / "run/README.md").read_text()
    assert "\nlearning_rate: 1.0e-05\n" in card
    assert "- step 1: `learning_rate: 0.001`" in card
    assert "licence" not in card
    assert (
        "Mean parts of the reward:\n\n- `a b`: 2 at the first log, 2 at the last\n"
        "- `format`: 0.25 at the first log, 1 at the last\n"
    ) in card
    assert "environments logged" not in card


def test_metrics_of_environments_are_listed_in_order():
    logs = [{"environment/b/x": 1.0, "reward": 0.5}, {"environment/a/x": 2.0, "step": 2}]
    assert _first_and_last([*logs, {"environment/b/x": 1 / 3}], "environment/") == [
        "`a/x`: 2 at the first log, 2 at the last",
        "`b/x`: 1 at the first log, 0.3333 at the last",
    ]
