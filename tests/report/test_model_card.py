"""The model card of a run: what it says of a run that was resumed, and what it leaves out."""

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.rollout_factory import make_trainer, uniform_batch
from trl_atropos.report.model_card import (
    _first_and_last,
    correct_adapter_card,
    earlier_settings,
    hub_base,
)

BASE = "Qwen/Qwen3-0.6B"


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


def folder_that_names(folder: Path, file: str, name: str | list[str]) -> Path:
    """Makes the folder of a model that says in a file what it was made from."""
    folder.mkdir(parents=True)
    contents = {
        "config.json": json.dumps({"model_type": "qwen3", "_name_or_path": name}),
        "adapter_config.json": json.dumps({"base_model_name_or_path": name}),
        "README.md": f"---\nbase_model: {json.dumps(name)}\ntags: [trl]\n---\n# A model\n",
    }
    (folder / file).write_text(contents[file])
    return folder


@pytest.mark.parametrize("file", ["config.json", "adapter_config.json", "README.md"])
def test_folder_names_its_model_on_the_hub(tmp_path, file):
    assert hub_base(str(folder_that_names(tmp_path / "model", file, BASE))) == BASE


@pytest.mark.parametrize(
    "name", ["/gone/model", "./model-2", "model-2", "a/b/c", "", ["one/model", "another/model"]]
)
def test_name_that_the_hub_does_not_have_is_no_base(tmp_path, name):
    assert hub_base(str(folder_that_names(tmp_path / "model", "README.md", name))) is None


def test_folders_are_followed_to_the_first_model(tmp_path, monkeypatch):
    """An adapter names a folder as it was seen from where its run was started."""
    folder_that_names(tmp_path / "runs/first", "README.md", [BASE])
    second = folder_that_names(tmp_path / "runs/second", "adapter_config.json", "runs/first")
    monkeypatch.chdir(tmp_path)
    assert hub_base("runs/second") == BASE
    monkeypatch.chdir("/")
    assert hub_base(str(second)) == BASE


def test_folders_that_name_each_other_are_followed_to_an_end(tmp_path):
    folder_that_names(tmp_path / "one", "README.md", str(tmp_path / "two"))
    folder_that_names(tmp_path / "two", "README.md", str(tmp_path / "one"))
    assert hub_base(str(tmp_path / "one")) is None


def test_folder_in_the_hubs_cache_is_known_by_its_path(tmp_path):
    snapshot = tmp_path / "hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de289a0"
    folder_that_names(snapshot, "README.md", "Qwen/Qwen3-0.6B-Base")
    (tmp_path / "model").symlink_to(snapshot)
    assert hub_base(str(tmp_path / "model")) == BASE


def test_damaged_files_name_no_base(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"_name_or')
    (folder / "adapter_config.json").write_text("[]")
    (folder / "README.md").write_text("---\nbase_model: [\n---\n")
    assert hub_base(str(folder)) is None


@pytest.mark.parametrize("is_known", [True, False])
def test_peft_card_names_no_folder(tiny_model, tmp_path, is_known):
    base = tmp_path / "base"
    shutil.copytree(tiny_model, base)
    if is_known:
        (base / "README.md").write_text(f"---\nbase_model: {BASE}\n---\n")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig())
    model.save_pretrained(tmp_path / "adapter")
    card = tmp_path / "adapter/README.md"
    assert str(base) in card.read_text()
    correct_adapter_card(tmp_path / "adapter", str(base))
    assert str(base) not in card.read_text()
    data = ModelCard.load(card).data
    assert data.get("base_model") == (BASE if is_known else None)
    assert (f"base_model:adapter:{BASE}" in data.tags) is is_known and "lora" in data.tags


def test_card_names_both_settings_of_a_resumed_run_and_no_licence(tiny_model, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    (model / "README.md").write_text(f"---\nbase_model: {BASE}\n---\n")
    batches = []
    for step, part in enumerate((0.25, 1.0)):
        overrides = [{"rewards": {"format": part}}, {}, {"rewards": {"a b": 2}}, {}]
        batches.append(uniform_batch(tiny_model, 4, 2, step, overrides=overrides))
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    make_trainer(model, tmp_path, *batches, **settings, learning_rate=1e-3).train()
    again = make_trainer(model, tmp_path, *batches, **settings, learning_rate=1e-5)
    again.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-1"))
    again.create_model_card()
    card = (tmp_path / "run/README.md").read_text()
    assert "\nlearning_rate: 1.0e-05\n" in card
    assert "- step 1: `learning_rate: 0.001`" in card
    assert "licence" not in card
    assert f"\nbase_model: {BASE}\n" in card and str(model) not in card
    assert f"a fine-tuned version of [{BASE}](https://huggingface.co/{BASE})" in card
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
