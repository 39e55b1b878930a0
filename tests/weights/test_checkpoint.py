"""A run goes on with the weights of its checkpoint, under whatever names its family saves them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.rollout_factory import arguments, make_group, record, step_logs
from tests.weights.architectures import FAMILIES, change, make_model
from trl_atropos import AtroposGRPOConfig, AtroposGRPOTrainer
from trl_atropos.errors import CheckpointError
from trl_atropos.weights.checkpoint import load_weights


def llama(folder: Path) -> PreTrainedModel:
    make_model(FAMILIES["Llama"], folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_weight_of_the_family_comes_back_to_where_it_was(name, tmp_path):
    make_model(FAMILIES[name], tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    change(dict(model.named_parameters()), seed=2)
    model.save_pretrained(tmp_path / "saved")
    saved = {key: value.detach().clone() for key, value in model.named_parameters()}
    places = {key: value.data_ptr() for key, value in model.named_parameters()}
    change(dict(model.named_parameters()), seed=3)
    load_weights(model, str(tmp_path / "saved"))
    for key, value in model.named_parameters():
        assert torch.equal(value, saved[key]) and value.data_ptr() == places[key], key


@pytest.mark.parametrize("name", ["GPT-NeoX", "Mixtral"])  # whose files have other names than their modules
def test_a_resumed_run_of_the_family_goes_on_as_if_it_had_not_stopped(name, tiny_model, tmp_path):
    family = FAMILIES[name]
    make_model(family, tmp_path / "model")
    recording = record(tmp_path / "recorded.jsonl", *([make_group(tiny_model, 4, seed)] * 2 for seed in range(4)))

    def trainer(folder: str) -> AtroposGRPOTrainer:
        saving = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "replay_paths": [recording]}
        config = AtroposGRPOConfig(**arguments(tmp_path / folder, **saving))
        return AtroposGRPOTrainer(str(tmp_path / "model"), args=config)

    whole, resumed = trainer("whole"), trainer("resumed")
    whole.train()
    (checkpoint,) = (tmp_path / "whole").rglob("checkpoint-2")
    resumed.train(resume_from_checkpoint=str(checkpoint))
    losses = [[(log["loss"], log["grad_norm"]) for log in step_logs(one)[2:]] for one in (whole, resumed)]
    assert len(losses[0]) == 2 and losses[0] == losses[1]
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True))


def test_a_checkpoint_that_lacks_a_weight_is_refused(tmp_path):
    model = llama(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks weights of the model.*: model\.norm\.weight\. It is"):
        load_weights(model, str(tmp_path))


def test_a_checkpoint_of_another_size_is_refused(tmp_path):
    model = llama(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    other = type(FAMILIES["Llama"])("llama", FAMILIES["Llama"].fields | {"intermediate_size": 64})
    make_model(other, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) != config
    with pytest.raises(CheckpointError, match=r"has them in other shapes: .*mlp.* and 3 more"):
        load_weights(model, str(tmp_path))


def test_a_folder_that_is_not_there_is_not_looked_for_on_the_hub(tmp_path):
    model = llama(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"no checkpoint in no such folder, which is no folder: check `resume_from_checkpoint`"
    ):
        load_weights(model, "no such folder")


@pytest.mark.parametrize("damage", ["absent", "cut"])
def test_weights_that_cannot_be_read_are_refused(damage, tmp_path):
    model = llama(tmp_path / "base")
    model.save_pretrained(tmp_path / "saved")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    file = tmp_path / "saved" / "model.safetensors"
    if damage == "absent":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"cannot be read \(.*resume from another one"):
        load_weights(model, str(tmp_path / "saved"))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
