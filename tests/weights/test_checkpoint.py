"""A run goes on with the weights of its checkpoint, under whatever names its family saves them."""

import errno
import json
import logging
import operator
import os
import re
import resource
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.rollout_factory import arguments, make_group, record, step_logs
from tests.weights.architectures import FAMILIES, change, make_model
from trl_atropos import AtroposGRPOConfig, AtroposGRPOTrainer
from trl_atropos.errors import CheckpointError, SaveError
from trl_atropos.weights.checkpoint import disk_errors, load_weights, require_whole
from trl_atropos.weights.masters import MasterOptimizer


def llama(folder: Path) -> PreTrainedModel:
    make_model(FAMILIES["Llama"], folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_of_family_load_in_place(name, tmp_path):
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


# whose files have other names than their modules
@pytest.mark.parametrize("name", ["GPT-NeoX", "Mixtral"])
def test_resumed_run_of_family_equals_unbroken_one(name, tiny_model, tmp_path):
    family = FAMILIES[name]
    make_model(family, tmp_path / "model")
    recording = record(
        tmp_path / "recorded.jsonl", *([make_group(tiny_model, 4, seed)] * 2 for seed in range(4))
    )

    def trainer(folder: str) -> AtroposGRPOTrainer:
        saving = {
            "max_steps": 4,
            "save_strategy": "steps",
            "save_steps": 2,
            "replay_paths": [recording],
        }
        config = AtroposGRPOConfig(**arguments(tmp_path / folder, **saving))
        return AtroposGRPOTrainer(str(tmp_path / "model"), args=config)

    whole, resumed = trainer("whole"), trainer("resumed")
    whole.train()
    (checkpoint,) = (tmp_path / "whole").rglob("checkpoint-2")
    resumed.train(resume_from_checkpoint=str(checkpoint))
    losses = [
        [(log["loss"], log["grad_norm"]) for log in step_logs(one)[2:]] for one in (whole, resumed)
    ]
    assert len(losses[0]) == 2 and losses[0] == losses[1]
    assert all(
        torch.equal(a, b)
        for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
    )


def test_checkpoint_lacking_one_weight_is_refused(tmp_path):
    model = llama(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"lacks weights of the model.*: model\.norm\.weight\. It is"
    ):
        load_weights(model, str(tmp_path))


def test_checkpoint_of_other_size_is_refused(tmp_path):
    model = llama(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    other = type(FAMILIES["Llama"])("llama", FAMILIES["Llama"].fields | {"intermediate_size": 64})
    make_model(other, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) != config
    with pytest.raises(CheckpointError, match=r"has them in other shapes: .*mlp.* and 3 more"):
        load_weights(model, str(tmp_path))


def test_missing_folder_is_not_sought_on_hub():
    with pytest.raises(
        CheckpointError,
        match=r"no checkpoint in no such folder, which is no folder\. Check `resume_from_checkpoint`",
    ):
        require_whole("no such folder")


@pytest.mark.parametrize("damage", ["absent", "cut"])
def test_unreadable_weights_are_refused(damage, tmp_path):
    model = llama(tmp_path / "base")
    model.save_pretrained(tmp_path / "saved")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    file = tmp_path / "saved" / "model.safetensors"
    if damage == "absent":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"cannot be read .*Resume from another"):
        load_weights(model, str(tmp_path / "saved"))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


# ------------------------------------------------------------------- torn, of another run, in force


@pytest.fixture(scope="module")
def recording(tiny_model, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("recorded")
    return record(
        folder / "recorded.jsonl", *([make_group(tiny_model, 4, seed)] * 2 for seed in range(6))
    )


@pytest.fixture(scope="module")
def run(tiny_model, recording):
    """Makes a trainer of up to 4 steps in a folder, with a checkpoint after every step."""

    def make(folder: Path, peft: bool = False, **settings) -> AtroposGRPOTrainer:
        usual = {
            "max_steps": 4,
            "save_strategy": "steps",
            "save_steps": 1,
            "replay_paths": [recording],
        }
        config = AtroposGRPOConfig(**arguments(folder, **(usual | settings)))
        adapter = LoraConfig(r=2, target_modules=["q_proj"]) if peft else None
        return AtroposGRPOTrainer(str(tiny_model), args=config, peft_config=adapter)

    return make


@pytest.fixture(scope="module")
def saved(run, tmp_path_factory) -> Path:
    """A checkpoint after two steps, with a constant learning rate."""
    folder = tmp_path_factory.mktemp("saved")
    run(folder, max_steps=2, save_steps=2, lr_scheduler_type="constant").train()
    return folder / "checkpoint-2"


@pytest.fixture
def checkpoint(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run" / saved.name))


def resume(trainer: AtroposGRPOTrainer, checkpoint: Path) -> AtroposGRPOTrainer:
    trainer.train(resume_from_checkpoint=str(checkpoint))
    return trainer


def test_optimizer_settings_given_on_resume_apply(run, checkpoint, caplog):
    caplog.set_level(logging.INFO, "trl_atropos")
    given = {
        "learning_rate": 5e-4,
        "weight_decay": 0.25,
        "adam_beta2": 0.9,
        "lr_scheduler_type": "linear",
    }
    trainer = resume(run(checkpoint.parent, max_steps=4, **given), checkpoint)
    rates = [log["learning_rate"] for log in step_logs(trainer)]
    assert rates == pytest.approx([2e-3, 2e-3, 5e-4 * 2 / 4, 5e-4 * 1 / 4])
    decays, betas = zip(
        *((group["weight_decay"], group["betas"]) for group in trainer.optimizer.param_groups)
    )
    assert decays == (0.25, 0.0) and set(betas) == {(0.9, 0.9)}
    assert "Resuming with learning_rate 0.0005 in place of the checkpoint's 0.002." in caplog.text


def test_resumed_masters_step_at_given_learning_rate(run, tmp_path):
    settings = {"model_init_kwargs": {"dtype": "bfloat16"}, "lr_scheduler_type": "constant"}
    run(tmp_path, max_steps=1, **settings).train()
    trainer = resume(
        run(tmp_path, max_steps=2, learning_rate=5e-4, **settings), tmp_path / "checkpoint-1"
    )
    masters = trainer.optimizer.optimizer
    assert isinstance(masters, MasterOptimizer)
    assert {group["lr"] for group in masters.inner.param_groups} == {5e-4}


def test_log_and_save_intervals_may_change_on_resume(run, checkpoint):
    trainer = resume(run(checkpoint.parent, max_steps=6, save_steps=3, logging_steps=2), checkpoint)
    assert sorted(path.name for path in checkpoint.parent.glob("checkpoint-*")) == [
        "checkpoint-2",
        "checkpoint-3",
        "checkpoint-6",
    ]
    assert [log["step"] for log in step_logs(trainer)] == [1, 2, 4, 6]


@pytest.mark.parametrize("optim", ["sgd", "adafactor"])
def test_state_of_other_optimizer_is_refused(run, checkpoint, optim):
    with pytest.raises(
        CheckpointError, match=rf"is not that of `optim: {optim}` .* in place of .* begin anew"
    ):
        resume(run(checkpoint.parent, optim=optim), checkpoint)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_torn_checkpoint_file_is_named(run, checkpoint, name):
    torn = checkpoint / name
    os.truncate(torn, torn.stat().st_size // 2)
    with pytest.raises(
        CheckpointError, match=rf"{torn} cannot be read .* Resume from another checkpoint"
    ):
        resume(run(checkpoint.parent), checkpoint)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt"])
def test_missing_checkpoint_file_is_named(run, checkpoint, name):
    (checkpoint / name).unlink()
    with pytest.raises(
        CheckpointError, match=rf"but no {name}: it was damaged\. Resume from another"
    ):
        resume(run(checkpoint.parent), checkpoint)


def test_model_only_checkpoint_tells_new_optimizer(run, tmp_path, caplog):
    run(tmp_path, max_steps=1, save_only_model=True).train()
    assert resume(run(tmp_path, max_steps=2), tmp_path / "checkpoint-1").state.global_step == 2
    assert re.search(r"checkpoint-1 holds no state of the optimizer .* begin anew", caplog.text)


def test_16_bit_adapter_keeps_masters_through_resume(run, tmp_path):
    """As the server computes it: PEFT would have it in float32."""
    half = {
        "model_init_kwargs": {"dtype": "bfloat16"},
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
    }

    def adapter_of(trainer: AtroposGRPOTrainer) -> list[torch.nn.Parameter]:
        return [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]

    whole = run(tmp_path / "whole", peft=True, **half)
    begin = [parameter.detach().clone() for parameter in adapter_of(whole)]
    whole.train()
    resumed = run(tmp_path / "whole", peft=True, **half)
    before = adapter_of(resumed)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole/checkpoint-2"))
    for trainer in (whole, resumed):
        assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.bfloat16}
        masters = trainer.optimizer.optimizer.state_dict()["masters"]
        assert any(not torch.equal(one, one.bfloat16().float()) for one in masters)
        assert all(map(torch.equal, adapter_of(trainer), [one.bfloat16() for one in masters]))
    assert all(map(operator.is_, adapter_of(resumed), before))  # which publisher and optimizer know
    assert any(not torch.equal(*pair) for pair in zip(begin, adapter_of(whole)))
    assert all(
        map(
            torch.equal,
            *(trainer.optimizer.optimizer.state_dict()["masters"] for trainer in (whole, resumed)),
        )
    )
    without = run(tmp_path / "without", peft=True, master_weights=False, **half)
    assert {parameter.dtype for parameter in adapter_of(without)} == {torch.float32}


def test_adapter_and_model_checkpoints_do_not_mix(run, checkpoint, tmp_path):
    with pytest.raises(
        CheckpointError,
        match=r"of a whole model, and this run trains an adapter\. Leave `use_peft`",
    ):
        resume(run(checkpoint.parent, peft=True), checkpoint)
    run(tmp_path / "adapter", peft=True, max_steps=1).train()
    adapter = tmp_path / "adapter/checkpoint-1"
    with pytest.raises(
        CheckpointError, match=r"of an adapter, and this run trains the whole model\. Set `use_peft"
    ):
        resume(run(tmp_path / "adapter"), adapter)
    os.truncate(adapter / "adapter_model.safetensors", 100)
    with pytest.raises(
        CheckpointError, match=r"The weights of the checkpoint in .*/checkpoint-1 cannot be read"
    ):
        resume(run(tmp_path / "adapter", peft=True), adapter)


QUOTA = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


@pytest.mark.parametrize("written", [QUOTA, RuntimeError("PytorchStreamWriter failed writing")])
def test_quota_of_the_disk_is_named_with_its_command(written, tmp_path, monkeypatch):
    """Torch only says that it cannot write. The disk then tells the reason, at the latest when a
    file is on it for sure."""

    def refuse(_descriptor: int) -> None:
        raise QUOTA

    monkeypatch.setattr(os, "fsync", refuse)
    with (
        pytest.raises(
            SaveError, match=r"quota exceeded: this user's share .* `quota -s` shows\. .*Make room"
        ),
        disk_errors(tmp_path, "The model"),
    ):
        raise written
    assert list(tmp_path.iterdir()) == []


def test_full_disk_is_named_and_leaves_no_checkpoint(run, tmp_path):
    """As it is with a full disk, of torch's file no more than a part is taken."""
    trainer = run(tmp_path, max_steps=2, save_steps=2)
    size = 150_000  # between those of the weights and of the optimizer's state
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        with pytest.raises(
            SaveError,
            match=r"could not be written to .*/checkpoint-2: File too large\. .* Make room .* resume",
        ):
            trainer.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "checkpoint-2").exists()
    run(tmp_path, max_steps=2, save_steps=2).train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-2"]
