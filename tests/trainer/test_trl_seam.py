"""The names of TRL, Transformers, PEFT, accelerate and torch that are used without a promise, in the
installed versions (`tests/trainer/trl_seam.py` lists them; `tests/house/test_seams.py` looks for the
listed lines). A failure here means that a library moved one: read its new source (for TRL,
`grpo_trainer.py`), adapt `trl_atropos/trainer.py`, and then `tests/trainer/test_equal_to_trl.py`
tells whether it still fits.
"""

import importlib.util
import inspect
import os
import re
import subprocess
import sys
from collections import defaultdict, deque
from importlib.metadata import version

import pytest
import torch
from datasets import Dataset
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from trl import GRPOConfig, GRPOTrainer

from tests.house.seam import Names, what_moved
from tests.rollout_factory import arguments, make_trainer, mixed_batch, uniform_batch
from tests.trainer.trl_seam import OVERRIDDEN, ROWS
from trl_atropos import AtroposGRPOTrainer

NAMES = [(row.place, name) for row in ROWS if isinstance(row, Names) for name in row.names]
TENSORS = {
    "prompt_ids": torch.int64,
    "prompt_mask": torch.int64,
    "completion_ids": torch.int64,
    "completion_mask": torch.int64,
    "tool_mask": torch.int64,
    "advantages": torch.float32,
    "num_items_in_batch": torch.int64,
    "old_per_token_logps": torch.float32,
    "sampling_per_token_logps": torch.float32,
    "importance_sampling_ratio": torch.float32,
    "ref_per_token_logps": torch.float32,
    "row_index": torch.int64,
}
OF_SCORING = ("old_per_token_logps", "importance_sampling_ratio")


def parameters(method) -> list[str]:
    return list(inspect.signature(method).parameters)


def plain_trainer(model, folder, **hooks) -> GRPOTrainer:
    """TRL's own trainer, on a dataset with nothing in it."""
    return GRPOTrainer(
        str(model),
        reward_funcs=[lambda score, **kwargs: score],
        args=GRPOConfig(**arguments(folder, num_generations=4)),
        train_dataset=Dataset.from_dict({"prompt": [""] * 8}),
        **hooks,
    )


@pytest.fixture
def theirs(tiny_model, tmp_path) -> GRPOTrainer:
    return plain_trainer(tiny_model, tmp_path)


def test_installed_trl_has_expected_version():
    assert re.fullmatch(r"1\.16\.\d+", version("trl"))


@pytest.mark.slow
def test_rank_imports_no_vllm_but_may_later():
    program = """
import importlib.util, os, sys
from trl_atropos.train import without_vllm
with without_vllm():
    import trl_atropos.recipe, trl_atropos.trainer
    import trl.generation.vllm_generation
print([name for name in sys.modules if name.split(".")[0] == "vllm"], "VLLM_LOGGING_LEVEL" in os.environ)
print(importlib.util.find_spec("vllm") is not None)
"""
    environment = {
        name: value for name, value in os.environ.items() if name != "VLLM_LOGGING_LEVEL"
    }
    told = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert told.stdout.splitlines() == [
        "[] False",
        str(importlib.util.find_spec("vllm") is not None),
    ]
    assert "TRL currently supports" not in told.stderr


@pytest.mark.parametrize(("place", "name"), NAMES, ids=str)
def test_private_name_still_exists(place, name):
    assert what_moved(place, name) is None


def test_overridden_methods_are_listed_and_counted():
    methods = [
        name for name, value in vars(AtroposGRPOTrainer).items() if inspect.isfunction(value)
    ]
    overridden = [name for name in methods if hasattr(GRPOTrainer, name) and name != "__init__"]
    assert overridden == OVERRIDDEN, "the list is in the order of the class"
    first_sentence = inspect.getmodule(AtroposGRPOTrainer).__doc__.partition(".")[0]
    assert f"overrides {len(OVERRIDDEN)} methods of TRL's" in first_sentence


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_override_takes_arguments_of_trl(name):
    theirs, ours = (parameters(getattr(cls, name)) for cls in (GRPOTrainer, AtroposGRPOTrainer))
    named = [parameter for parameter in ours if parameter not in ("args", "kwargs")]
    assert named == (theirs if named == ours else theirs[: len(named)])


def test_model_classes_are_found_in_transformers():
    assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["qwen3"] == "Qwen3ForCausalLM"


def test_new_trainer_has_expected_attributes(theirs):
    assert theirs.rollout_func is None
    assert theirs.num_generations == 4
    assert theirs.use_vllm is False
    assert theirs.vllm_importance_sampling_correction is True
    assert theirs.scale_rewards == "group"
    assert theirs.environment_factories is None and not theirs.tools
    assert not hasattr(theirs, "vllm_generation") and not hasattr(theirs, "_last_loaded_step")


def test_metrics_are_lists_by_mode_and_name(theirs):
    assert set(theirs._metrics) == {"train", "eval"}
    assert isinstance(theirs._metrics["train"], defaultdict)
    assert theirs._metrics["train"]["new"] == []


def test_logs_are_queues_of_generation_batch_length(theirs):
    assert set(theirs._logs) == {"images", "prompt", "completion", "rewards", "advantages", "extra"}
    assert isinstance(theirs._logs["advantages"], deque)
    assert theirs._logs["advantages"].maxlen == theirs.args.generation_batch_size == 8


@pytest.mark.parametrize("missing", ["prompt_ids", "completion_ids", "logprobs"])
def test_rollouts_without_needed_column_are_refused(tiny_model, tmp_path, missing):
    columns = {"prompt_ids": [[1]], "completion_ids": [[2]], "logprobs": [[-1.0]]}
    del columns[missing]
    trainer = plain_trainer(tiny_model, tmp_path, rollout_func=lambda prompts, trainer: columns)
    with pytest.raises(ValueError, match=missing):
        trainer._generate([""])


def test_generate_hands_on_masks_and_scores(tiny_model, tmp_path):
    columns = {
        "prompt_ids": [[1], [1]],
        "completion_ids": [[2, 3], [4]],
        "logprobs": [[-1.0, -2.0], [-3.0]],
        "env_mask": [[1, 0], [1]],
        "score": [0.5, 1.0],
    }
    trainer = plain_trainer(
        tiny_model, tmp_path, rollout_func=lambda prompts, trainer: dict(columns)
    )
    prompts, completions, mask, _texts, logprobs, extra, images, tool_images = trainer._generate(
        ["", ""]
    )
    assert (prompts, completions, logprobs) == (
        columns["prompt_ids"],
        columns["completion_ids"],
        columns["logprobs"],
    )
    assert mask == columns["env_mask"]
    assert extra == {"score": columns["score"]}
    assert images is None and not tool_images


@pytest.mark.parametrize(("iterations", "scored"), [(1, False), (2, True)])
def test_batch_has_tensors_for_loss(tiny_model, tmp_path, iterations, scored):
    settings = {"per_device_train_batch_size": 16, "num_iterations": iterations, "beta": 0.1}
    trainer = make_trainer(tiny_model, tmp_path, mixed_batch(tiny_model), **settings)
    trainer._begin(trainer.create_optimizer())
    trainer.model.train()
    batch = trainer._generate_and_score_completions([{"prompt": ""}])
    assert trainer.use_vllm
    expected = (
        TENSORS if scored else {name: TENSORS[name] for name in TENSORS if name not in OF_SCORING}
    )
    assert {name: value.dtype for name, value in batch.items()} == expected
    rows, length = batch["completion_ids"].shape
    assert rows == 16
    for name in set(expected) - {"prompt_ids", "prompt_mask", "num_items_in_batch", "row_index"}:
        assert batch[name].shape == (rows, length), name
    assert batch["num_items_in_batch"] == (batch["completion_mask"] * batch["tool_mask"]).sum()


def test_scoring_restores_num_generations_and_logs(tiny_model, tmp_path):
    trainer = make_trainer(
        tiny_model, tmp_path, uniform_batch(tiny_model, 4, 4, 0), per_device_train_batch_size=16
    )
    trainer._begin(trainer.create_optimizer())
    trainer.model.train()
    trainer._generate_and_score_completions([{"prompt": ""}])
    assert trainer.num_generations == trainer.args.num_generations == 8
    assert len(trainer._logs["advantages"]) == len(trainer._logs["prompt"]) == 16
    assert len(trainer._metrics["train"]["frac_reward_zero_std"]) == 1


@pytest.mark.parametrize("correction", [True, False])
def test_correction_follows_its_setting(tiny_model, tmp_path, correction):
    settings = {"vllm_importance_sampling_correction": correction, "num_iterations": 2}
    trainer = make_trainer(tiny_model, tmp_path, uniform_batch(tiny_model, 4, 2, 0), **settings)
    assert trainer.use_vllm is correction
    trainer._begin(trainer.create_optimizer())
    trainer.model.train()
    assert (
        "importance_sampling_ratio" in trainer._generate_and_score_completions([{"prompt": ""}])
    ) is correction


def test_losses_are_scaled_for_accumulation_once():
    assert AtroposGRPOTrainer.loss_is_scaled_for_ga is True


def test_new_trainer_counts_steps_from_zero(theirs):
    assert theirs._step == 0


def test_memory_estimate_finds_library_internals():
    """`trl_atropos/check/shadow.py`."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from transformers import PreTrainedModel

    linear = torch.nn.Linear(2, 3)
    assert set(linear._parameters) == {"weight", "bias"} and linear._buffers == {}, (
        "torch keeps parameters elsewhere"
    )
    assert issubclass(FakeTensorMode, TorchDispatchMode), (
        "fake tensors are not made by dispatch any more"
    )
    assert tree_leaves([1, (2, {"a": 3})]) == [1, 2, 3], (
        "results of operators are taken apart in another way"
    )
    assert isinstance(torch.ones(1).untyped_storage()._cdata, int), "storages have another address"
    assert hasattr(PreTrainedModel, "_no_split_modules"), (
        "transformers names the blocks of a model elsewhere"
    )


def test_trl_head_tiles_match_memory_estimate():
    from trl.kernels import chunked_logprob

    from trl_atropos.check.shadow import TILE

    assert TILE[0] == chunked_logprob.TOKEN_CHUNK_SIZE, (
        "TRL's head takes other tiles: see `_head_bytes`"
    )
