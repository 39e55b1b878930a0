"""What is used of TRL, Transformers and torch without a promise. A failure here means that a
library moved it: read its new source (for TRL, `grpo_trainer.py`), adapt `trl_atropos/trainer.py`,
and then `tests/trainer/test_equal_to_trl.py` tells whether it still fits.
"""

import importlib
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
from tqdm.auto import tqdm
from transformers import PreTrainedModel, Trainer, TrainerState
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from trl import GRPOConfig, GRPOTrainer, TrlParser
from trl.trainer.utils import nanstd

from tests.rollout_factory import arguments, make_trainer, mixed_batch, uniform_batch
from trl_atropos import AtroposGRPOTrainer

SOURCE = inspect.getsource(GRPOTrainer)
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


LIBRARIES = ("transformers", "accelerate", "peft")


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


# What `trl_atropos/weights` and `trl_atropos/tensors` touch without a promise: `module:class`, or
# `module:` -> attributes, and functions with the arguments that are given to them.
OF_WEIGHTS: dict[str, tuple[str, ...]] = {
    "torch:Tensor": ("_version", "grad_dtype"),
    "torch:UntypedStorage": ("_cdata",),
    "torch:": ("_foreach_copy_", "_foreach_mul", "_foreach_div_"),
    "torch.nn:Module": ("_non_persistent_buffers_set",),
    "torch.optim.lr_scheduler:LambdaLR": ("_last_lr", "base_lrs", "lr_lambdas"),
    "torch.distributed:ProcessGroupGloo": ("_Options", "create_device"),
    "torch.distributed.distributed_c10d:ProcessGroupGloo._Options": ("_timeout", "_devices"),
    "torch.multiprocessing.reductions:": ("reduce_tensor", "rebuild_cuda_tensor"),
    "torch.utils._python_dispatch:": ("TorchDispatchMode",),
    "transformers:Trainer": (
        "_get_output_dir(trial)",
        "optimizer_cls_and_kwargs",
        "get_optimizer_cls_and_kwargs",
    ),
    "transformers:TrainingArguments": ("_setup_devices",),
    "transformers.modeling_utils:": ("remove_tied_weights_from_state_dict(state_dict, model)",),
    "transformers.trainer_callback:": ("ExportableState",),
    "transformers:PreTrainedModel": ("all_tied_weights_keys",),
    "transformers:PreTrainedConfig": ("_attn_implementation",),
    "transformers.core_model_loading:": ("revert_weight_conversion(model, state_dict)",),
    "accelerate.state:GradientState": ("_set_sync_gradients(sync_gradients)",),
    "accelerate.optimizer:AcceleratedOptimizer": ("gradient_state", "step_was_skipped"),
    "peft.tuners.lora:LoraLayer": (
        "merged_adapters",
        "_caches",
        "scaling",
        "lora_bias",
        "get_base_layer",
    ),
    "peft.tuners.tuners_utils:": ("BaseTunerLayer",),
    "peft.utils:": ("AuxiliaryTrainingWrapper", "ModulesToSaveWrapper"),
    "peft:": (
        "get_peft_model_state_dict(model, state_dict, adapter_name, save_embedding_layers)",
        "set_peft_model_state_dict(model, peft_model_state_dict, adapter_name)",
        *("load_peft_weights(model_id, device)", "PeftMixedModel"),
    ),
    "peft:PeftModel": ("active_adapters", "peft_config"),
    "trl.trainer.utils:": ("create_model_from_path(model_id)",),
    "vllm.distributed.device_communicators.pynccl_wrapper:NCCLLibrary": (
        *(
            "ncclGetUniqueId",
            "unique_id_from_bytes(data)",
            "ncclCommInitRank(world_size, unique_id, rank)",
        ),
        "ncclBroadcast(sendbuff, recvbuff, count, datatype, root, comm, stream)",
    ),
}


def is_set_in(cls: type, attribute: str) -> bool:
    """Whether a method of the class sets the attribute."""
    own = [parent for parent in cls.__mro__ if parent.__module__.startswith(("torch.", *LIBRARIES))]
    return any(
        re.search(rf"self\.{attribute}\b[^=\n]*=|\"{attribute}\"", inspect.getsource(one))
        for one in own
    )


@pytest.mark.parametrize(
    ("place", "name"), [(place, name) for place, names in OF_WEIGHTS.items() for name in names]
)
def test_private_name_used_by_weights_exists(place, name):
    module, _, owner = place.partition(":")
    found = importlib.import_module(module)
    for part in filter(None, owner.split(".")):
        found = getattr(found, part)
    attribute, _, arguments = name.rstrip(")").partition("(")
    assert hasattr(found, attribute) or is_set_in(found, attribute), f"{place} has no {attribute}"
    if arguments:
        assert set(arguments.split(", ")) <= set(parameters(getattr(found, attribute))), (
            f"{place}.{attribute}"
        )


def test_generate_and_score_takes_inputs_alone():
    assert parameters(GRPOTrainer._generate_and_score_completions) == ["self", "inputs"]
    assert "generation_batch = self._generate_and_score_completions(generation_batch)" in SOURCE


OVERRIDDEN = [
    "train", "get_train_dataloader", "create_optimizer", "create_scheduler", "_generate_and_score_completions",
    "_prepare_inputs", "_get_per_token_logps_and_entropies", "compute_loss", "training_step", "_clip_grad_norm",
    "_get_grad_norm", "_maybe_log_save_evaluate", "evaluate", "_save_checkpoint", "_save", "_load_from_checkpoint",
    "_load_best_model", "_load_optimizer_and_scheduler", "create_model_card", "init_hf_repo", "push_to_hub",
    "_finish_current_push", "_push_from_checkpoint",
]  # fmt: skip


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


# Everything without a promise that `trainer.py`, `training/`, `train.py`, `recipe.py` and
# `config.py` reach into, by owner. What a constructor sets is looked for in its source.
PRIVATE = {
    GRPOTrainer: ["_generate_and_score_completions", "_prepare_inputs", "_get_per_token_logps_and_entropies", "_name",
                  "_tag_names", "_save_checkpoint"],
    Trainer: ["_get_output_dir", "_save", "_load_from_checkpoint", "_load_optimizer_and_scheduler",
              "_finish_current_push", "_push_from_checkpoint", "_clip_grad_norm", "_get_grad_norm",
              "_maybe_log_save_evaluate", "_load_best_model"],
    TrainerState: ["compute_steps"],
    PreTrainedModel: ["should_save_on_this_rank"],
    GRPOConfig: ["_VALID_DICT_FIELDS"],
    TrlParser: ["set_defaults_with_config", "parse_args_and_config", "error"],
    torch.distributed.distributed_c10d: ["_set_pg_timeout"],
    tqdm: ["_instances"],
}  # fmt: skip
SET = {
    GRPOTrainer: ["_buffered_inputs", "_step", "_metrics", "_logs", "aux_loss_enabled", "num_generations", "use_vllm",
                  "rollout_func", "_last_loaded_step"],
    Trainer: ["push_in_progress"],
    TrainerState: ["stateful_callbacks"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("owner", "name"), [(owner, name) for owner, names in PRIVATE.items() for name in names]
)
def test_private_name_still_exists(owner, name):
    assert hasattr(owner, name), f"{owner.__name__} has no {name} any more"


@pytest.mark.parametrize(
    ("owner", "name"), [(owner, name) for owner, names in SET.items() for name in names]
)
def test_private_attribute_is_still_set(owner, name):
    assert f"self.{name} = " in inspect.getsource(owner), (
        f"{owner.__name__} sets no {name} any more"
    )


def test_model_classes_are_found_in_transformers():
    assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["qwen3"] == "Qwen3ForCausalLM"
    assert parameters(get_class_from_dynamic_module)[:2] == [
        "class_reference",
        "pretrained_model_name_or_path",
    ]


def test_scoring_is_chunked_only_before_training():
    theirs, ours = (
        parameters(cls._get_per_token_logps_and_entropies)
        for cls in (GRPOTrainer, AtroposGRPOTrainer)
    )
    assert (
        theirs[:6]
        == ours[:6]
        == ["self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size"]
    )
    score = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    assert (
        score.count("batch_size=batch_size")
        == score.count("_get_per_token_logps_and_entropies(")
        == 3
    )
    train = inspect.getsource(GRPOTrainer._compute_loss)
    assert train.count("_get_per_token_logps_and_entropies(") == 1 and "batch_size" not in train


def test_generation_batch_is_shuffled_split_and_kept():
    body = inspect.getsource(GRPOTrainer._prepare_inputs)
    lines = [
        "generation_batch = shuffle_sequence_dict(generation_batch)",
        "generation_batches = split_tensor_dict(generation_batch, self.args.steps_per_generation)",
        "self._buffered_inputs = [unsplit_pixel_values_by_grid(batch) for batch in "
        "generation_batches]",
        "inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]",
    ]
    places = [body.index(line) for line in lines]
    assert places == sorted(places)


def test_constructor_has_expected_arguments():
    assert parameters(GRPOTrainer.__init__) == [
        "self", "model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class",
        "reward_processing_classes", "callbacks", "optimizers", "quantization_config", "peft_config", "tools",
        "rollout_func", "environment_factory",
    ]  # fmt: skip


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


def test_attributes_are_read_in_expected_places():
    generate = inspect.getsource(GRPOTrainer._generate)
    assert "if self.use_vllm and self.state.global_step != self._last_loaded_step:" in generate
    assert "output = self.rollout_func(prompts, self)" in generate
    assert 'required_keys = {"prompt_ids", "completion_ids", "logprobs"}' in generate
    assert 'tool_mask = extra_fields.pop("env_mask", None)' in generate
    score = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    assert (
        'num_generations = self.num_generations if mode == "train" else self.num_generations_eval'
        in score
    )
    assert "self.vllm_generation" not in score
    for body in (score, inspect.getsource(GRPOTrainer._compute_loss)):
        assert "if self.use_vllm and self.vllm_importance_sampling_correction" in body


def test_whole_step_batch_is_scored_only_for_vllm():
    body = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    assert "generate_every = self.args.steps_per_generation * self.num_iterations" in body
    condition = """
            if self.args.gradient_accumulation_steps % generate_every != 0 or (
                self.use_vllm and self.vllm_importance_sampling_correction
            ):
                old_per_token_logps, _, _ = self._get_per_token_logps_and_entropies("""
    assert condition in body and body.count("self.use_vllm") == 4
    known = """
        if sampling_per_token_logps is not None:
            output["sampling_per_token_logps"] = sampling_per_token_logps"""
    assert known in body, "the sampler's log-probabilities come only with a correction"


def test_loss_reads_ratio_after_forward_pass():
    assert "return self._compute_loss(model, inputs)" in inspect.getsource(GRPOTrainer.compute_loss)
    body = inspect.getsource(GRPOTrainer._compute_loss)
    forward, *reads = (body.index(text) for text in (
        "self._get_per_token_logps_and_entropies(",
        'old_per_token_logps = inputs.get("old_per_token_logps")',
        "old_per_token_logps = per_token_logps.detach() if old_per_token_logps is None else "
        "old_per_token_logps",
        'importance_sampling_ratio=inputs.get("importance_sampling_ratio")',
        'per_token_loss = per_token_loss * inputs["importance_sampling_ratio"]',
    ))  # fmt: skip
    assert forward < min(reads) and body.count("importance_sampling_ratio") == 3


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


def test_rewards_are_scaled_by_nanstd_of_trl():
    assert parameters(nanstd) == ["tensor", "dim", "keepdim"], "TRL's nanstd takes other arguments"
    assert "std_rewards = nanstd(" in SOURCE, (
        "TRL no longer scales rewards by its nanstd: adapt `rollouts/rollout.py`"
    )


def test_losses_are_scaled_for_accumulation_once():
    assert AtroposGRPOTrainer.loss_is_scaled_for_ga is True


def test_step_count_in_micro_batches_selects_rows(
    theirs,
):
    assert theirs._step == 0
    assert "self._step += 1" in inspect.getsource(GRPOTrainer.training_step)
    prepare = inspect.getsource(GRPOTrainer._prepare_inputs)
    assert "generate_every = self.args.steps_per_generation * self.num_iterations" in prepare
    assert "self._buffered_inputs[self._step % self.args.steps_per_generation]" in prepare


def test_checkpoint_folder_is_determined_at_save():
    theirs = inspect.getsource(Trainer._save_checkpoint)
    assert "run_dir = self._get_output_dir(trial=trial)" in theirs
    assert "output_dir = os.path.join(run_dir, checkpoint_folder)" in theirs
    assert "rotate_checkpoints(\n                output_dir=run_dir," in theirs
    assert "self.args.output_dir" not in theirs
    assert (
        "os.path.join(self._get_output_dir(trial=trial), checkpoint_folder)" in SOURCE
    )  # of the entropy's coefficient


def test_memory_estimate_finds_library_internals():
    """`trl_atropos/check/memory.py`."""
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

    from trl_atropos.check.memory import TILE

    assert TILE[0] == chunked_logprob.TOKEN_CHUNK_SIZE, (
        "TRL's head takes other tiles: see `_head_bytes`"
    )


def test_push_uploads_folder_by_shared_client():
    """`trl_atropos/report/hub.py` replaces it, to leave out what is not the model's."""
    assert "hf_api().upload_folder(" in inspect.getsource(Trainer.push_to_hub), (
        "transformers uploads in another way"
    )
    assert "hf_api().upload_folder(" in inspect.getsource(Trainer._push_from_checkpoint)


def test_progress_bar_is_updated_on_step_end():
    from transformers import ProgressCallback

    steps = inspect.getsource(ProgressCallback.on_step_end)
    assert "self.training_bar.update(state.global_step - self.current_step)" in steps, (
        "the bar counts in another way"
    )
