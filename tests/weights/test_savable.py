"""What the saving of a checkpoint would refuse is found before the first step, and nothing else is
refused."""

import json
import re
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.trainer_callback import ExportableState

from tests.rollout_factory import arguments, record, uniform_batch
from trl_atropos import AtroposGRPOConfig, AtroposGRPOTrainer
from trl_atropos import trainer as trainer_module
from trl_atropos.errors import RecipeError
from trl_atropos.weights import savable

Usage = namedtuple("Usage", "total used free")


class Stateful(TrainerCallback, ExportableState):
    """A callback whose state no JSON can hold."""

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"value": object()}}


def parts(model: Path, folder: Path, **settings: Any) -> dict[str, Any]:
    """The arguments of a trainer that saves its first step."""
    dtype = settings.pop("dtype", torch.float32)
    recording = record(folder / "rollouts.jsonl", uniform_batch(model, 4, 2, 0))
    usual = {"save_strategy": "steps", "save_steps": 1, "replay_paths": [recording]}
    return {
        "model": AutoModelForCausalLM.from_pretrained(model, dtype=dtype),
        "args": AtroposGRPOConfig(**arguments(folder / "run", **usual | settings)),
        "processing_class": AutoTokenizer.from_pretrained(model),
    }


def sample_greedily(given: dict[str, Any]) -> None:
    given["model"].generation_config.do_sample = False
    given["model"].generation_config.temperature = 0.6


def search_without_beams(given: dict[str, Any]) -> None:
    given["model"].generation_config.length_penalty = 0.5


def share_undeclared(given: dict[str, Any]) -> None:
    first, second = (layer.mlp.down_proj for layer in given["model"].model.layers[:2])
    size, width = first.weight.numel(), first.weight.shape[1]
    memory = torch.randn(size + width)
    first.weight = torch.nn.Parameter(memory[:size].view_as(first.weight))
    second.weight = torch.nn.Parameter(memory[width:].view_as(first.weight))


def put_object_into_tokenizer(given: dict[str, Any]) -> None:
    given["processing_class"].init_kwargs["extra"] = object()


def put_function_into_arguments(given: dict[str, Any]) -> None:
    given["args"].note = lambda: None


def put_object_into_config(given: dict[str, Any]) -> None:
    given["model"].config.extra = object()


def add_stateful_callback(given: dict[str, Any]) -> None:
    given["callbacks"] = [Stateful()]


UNSAVABLE: dict[str, tuple[Callable[[dict[str, Any]], None], str, str]] = {
    "a temperature without sampling": (sample_greedily, "The generation config", "do_sample"),
    "a length penalty without beams": (search_without_beams, "The generation config", "remove"),
    "a config with an object": (put_object_into_config, "The model's config", "config.json"),
    "weights that overlap": (share_undeclared, "Weights that share memory", "memory of its own"),
    "a tokenizer with an object": (
        put_object_into_tokenizer,
        "The tokenizer",
        "`processing_class`",
    ),
    "settings with a function": (
        put_function_into_arguments,
        "The settings of the run",
        "functions",
    ),
    "a callback with an object": (
        add_stateful_callback,
        "The state of the callback Stateful",
        "`state\\(\\)`",
    ),
}


@pytest.mark.parametrize("name", UNSAVABLE)
def test_unsavable_part_is_refused_before_first_step(name, tiny_model, tmp_path, monkeypatch):
    spoil, what, fix = UNSAVABLE[name]
    given = parts(tiny_model, tmp_path)
    spoil(given)
    with pytest.raises(RecipeError, match=rf"{what}\b.* cannot be saved: ") as refused:
        AtroposGRPOTrainer(**given)
    assert re.search(fix, refused.value.fix)
    assert list((tmp_path / "run").glob(".trial-save-*")) == []
    # Without the check, the first checkpoint fails.
    monkeypatch.setattr(trainer_module, "require_savable", lambda trainer: None)
    trainer = AtroposGRPOTrainer(**given)
    with pytest.raises(Exception):  # noqa: B017 - whatever the libraries raise
        trainer.train()
    assert trainer.state.global_step <= 1


def test_unwritable_output_folder_is_refused_early(tiny_model, tmp_path):
    given = parts(tiny_model, tmp_path)
    (tmp_path / "run").write_text("a file")
    with pytest.raises(
        RecipeError, match=r"`output_dir` is .*/run', where nothing can be written \(File exists\)"
    ):
        AtroposGRPOTrainer(**given)


SIZED: dict[str, dict[str, Any]] = {
    "float32": {},
    "masters of bfloat16": {"dtype": torch.bfloat16},
    "the model only": {"save_only_model": True},
    "SGD": {"optim": "sgd"},
    "an adapter": {"peft_config": LoraConfig(r=64, target_modules="all-linear")},
}


@pytest.mark.parametrize("name", SIZED)
def test_disk_needs_room_for_exactly_one_checkpoint(name, tiny_model, tmp_path, monkeypatch):
    """Compared with what a checkpoint takes: its tensors, as files have them."""
    settings = dict(SIZED[name])
    peft_config = settings.pop("peft_config", None)
    given = parts(tiny_model, tmp_path, **settings)
    AtroposGRPOTrainer(**given, peft_config=peft_config).train()
    names = ("model.safetensors", "adapter_model.safetensors", "optimizer.pt")
    files = [tmp_path / "run/checkpoint-1" / name for name in names]
    taken = sum(file.stat().st_size for file in files if file.exists())
    shutil.rmtree(tmp_path / "run")

    def trainer_with(free: float) -> AtroposGRPOTrainer:
        monkeypatch.setattr(savable.shutil, "disk_usage", lambda _: Usage(0, 0, int(free)))
        return AtroposGRPOTrainer(
            **parts(tiny_model, tmp_path, **settings), peft_config=peft_config
        )

    trainer_with(taken)
    with pytest.raises(RecipeError, match="too little room for one checkpoint") as refused:
        trainer_with(0.8 * taken)
    assert refused.value.code == "disk"


def test_existing_checkpoints_count_as_room(tiny_model, tmp_path, monkeypatch):
    old = tmp_path / "run" / "checkpoint-7"
    old.mkdir(parents=True)
    (old / "model.safetensors").write_bytes(bytes(10 << 20))
    monkeypatch.setattr(savable.shutil, "disk_usage", lambda _: Usage(0, 0, 0))
    AtroposGRPOTrainer(**parts(tiny_model, tmp_path))


@pytest.mark.parametrize("merges", [False, True])
def test_generation_config_matters_only_when_merged(merges, tiny_model, tmp_path):
    """With `restart`, the server gets a whole model."""
    given = parts(tiny_model, tmp_path, **{"vllm_mode": "restart"} if merges else {})
    sample_greedily(given)
    build = lambda: AtroposGRPOTrainer(**given, peft_config=LoraConfig(target_modules="all-linear"))  # noqa: E731
    if merges:
        with pytest.raises(RecipeError, match="generation config"):
            build()
    else:
        build().train()
        assert (
            json.loads((tmp_path / "run/checkpoint-1/adapter_config.json").read_text())["peft_type"]
            == "LORA"
        )
