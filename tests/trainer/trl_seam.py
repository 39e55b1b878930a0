"""The names and lines of TRL, Transformers, PEFT, accelerate and torch that the package uses without
a promise. `tests/trainer/test_trl_seam.py` looks for them in the installed versions, and `make seams
TRL=... TRANSFORMERS=...` in the source of any other, but for torch, much of which is no Python. This
list imports no library.

If a name of TRL moved, read its `grpo_trainer.py`, adapt `trl_atropos/trainer.py` and the files
named with it, and `tests/trainer/test_equal_to_trl.py` tells whether it still fits.
"""

from tests.house.seam import Lines, Names

GRPO = "trl.trainer.grpo_trainer:GRPOTrainer"
TRAINER = ("trainer.py",)
CHECKPOINT = ("weights/checkpoint.py",)
CHECKPOINT_ADAPTERS = ("weights/checkpoint_adapters.py",)
CHECKPOINT_OPTIMIZER = ("weights/checkpoint_optimizer.py",)
MASTERS = ("weights/masters.py",)
ADAPTERS = ("weights/adapters.py",)
GATHER = ("weights/gather.py",)
CHANNEL = ("tensors/channel.py",)
SHADOW = ("check/shadow.py",)
BATCH = ("batches/generation_batch.py",)
SLICES = ("batches/sequence_parallel.py",)
COMPUTATION = ("training/computation.py",)

# In the order of `AtroposGRPOTrainer`.
OVERRIDDEN = [
    "train", "get_train_dataloader", "create_optimizer", "create_scheduler", "_generate_and_score_completions",
    "_prepare_inputs", "_get_per_token_logps_and_entropies", "compute_loss", "training_step", "_clip_grad_norm",
    "_get_grad_norm", "_maybe_log_save_evaluate", "evaluate", "_save_checkpoint", "_save", "_load_from_checkpoint",
    "_load_best_model", "_load_optimizer_and_scheduler", "create_model_card", "init_hf_repo", "push_to_hub",
    "_finish_current_push", "_push_from_checkpoint",
]  # fmt: skip
CONSTRUCTOR = (
    "model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class",
    "reward_processing_classes", "callbacks", "optimizers", "quantization_config", "peft_config", "tools",
    "rollout_func", "environment_factory",
)  # fmt: skip

# ----------------------------------------------------------------------------------------------- TRL

TRL = [
    Names("trl:GRPOTrainer", tuple(OVERRIDDEN), TRAINER),
    Names("trl:GRPOTrainer", (f"__init__({', '.join(CONSTRUCTOR)})",), TRAINER, exact=True),
    Names("trl:GRPOTrainer", ("_generate_and_score_completions(inputs)",), TRAINER, exact=True),
    Names(
        "trl:GRPOTrainer",
        (
            "_get_per_token_logps_and_entropies(model, input_ids, attention_mask, logits_to_keep, "
            "batch_size)",
            "_name",
            "_tag_names",
            "_buffered_inputs",
            "_step",
            "_metrics",
            "_logs",
            "aux_loss_enabled",
            "num_generations",
            "use_vllm",
            "rollout_func",
            "_last_loaded_step",
            "mask_truncated_completions",
            "eos_token_ids",
        ),
        TRAINER,
    ),
    Names("trl:GRPOConfig", ("_VALID_DICT_FIELDS",), ("config.py",)),
    Names(
        "trl:TrlParser",
        ("set_defaults_with_config", "parse_args_and_config"),
        ("recipe.py",),
    ),
    Names("trl.trainer.utils:", ("create_model_from_path(model_id)",), ("weights/colocate.py",)),
    Names("trl.trainer.utils:", ("nanstd(tensor, dim, keepdim)",), ("rollouts/rollout.py",)),
    Names("trl.trainer.utils:", ("add_fused_lm_head",), ("batches/numerics.py",)),
    Names("trl.trainer.utils:FusedCausalLMOutput", ("log_probs", "entropy"), SLICES),
    Names("trl.trainer.grpo_trainer:", ("gather(tensor)", "gather_object(object)"), COMPUTATION),
    # `check/shadow.py` has its size in `TILE`
    Names("trl.kernels.chunked_logprob:", ("TOKEN_CHUNK_SIZE",), ()),
]

# -------------------------------------------------------------------------- Transformers, accelerate

HUGGING_FACE = [
    Names(
        "transformers:Trainer",
        (
            "_save",
            "_load_from_checkpoint",
            "_load_optimizer_and_scheduler",
            "_push_from_checkpoint",
            "_clip_grad_norm",
            "_get_grad_norm",
            "_maybe_log_save_evaluate",
            "_load_best_model",
        ),
        TRAINER,
    ),
    Names("transformers:Trainer", ("_get_output_dir(trial)",), CHECKPOINT),
    Names(
        "transformers:Trainer",
        ("optimizer_cls_and_kwargs", "get_optimizer_cls_and_kwargs"),
        MASTERS,
    ),
    Names("transformers:Trainer", ("push_in_progress",), ("training/saving.py",)),
    Names("transformers:TrainerState", ("compute_steps",), TRAINER),
    Names("transformers:TrainerState", ("stateful_callbacks",), ("training/supply.py",)),
    Names("transformers:TrainingArguments", ("_setup_devices",), ("weights/colocate.py",)),
    Names(
        "transformers.modeling_utils:",
        ("remove_tied_weights_from_state_dict(state_dict, model)",),
        ("weights/savable.py",),
    ),
    Names("transformers.trainer_callback:", ("ExportableState",), ("weights/savable.py",)),
    Names("transformers:PreTrainedModel", ("all_tied_weights_keys",), GATHER),
    Names("transformers:PreTrainedModel", ("_from_config",), ("benchmarks/models.py",)),
    Names("transformers:PreTrainedModel", ("_no_split_modules",), SHADOW),
    Names("transformers:PreTrainedModel", ("should_save_on_this_rank",), ("training/saving.py",)),
    Names(
        "transformers:PreTrainedConfig",
        ("_attn_implementation",),
        ("batches/packed_attention.py",),
    ),
    Names(
        "transformers.core_model_loading:",
        ("revert_weight_conversion(model, state_dict)",),
        ("weights/checkpoint_plan.py",),
    ),
    Names(
        "transformers.models.auto.modeling_auto:",
        ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",),
        ("weights/trainable.py",),
    ),
    Names(
        "transformers.dynamic_module_utils:",
        ("get_class_from_dynamic_module(class_reference, pretrained_model_name_or_path)",),
        ("weights/trainable.py",),
    ),
    Names(
        "transformers:ProgressCallback",
        ("training_bar", "current_step"),
        ("report/progress.py",),
    ),
    Names("accelerate.utils.other:", ("is_deepspeed_available",), COMPUTATION),
    Names("accelerate.accelerator:", ("gather(tensor)",), COMPUTATION),
    Names("accelerate.state:GradientState", ("_set_sync_gradients(sync_gradients)",), MASTERS),
    Names(
        "accelerate.optimizer:AcceleratedOptimizer",
        ("gradient_state", "step_was_skipped"),
        ("weights/publisher.py", "weights/masters.py"),
    ),
]

# ---------------------------------------------------------------------------------------------- PEFT

PEFT = [
    Names("peft.tuners.lora:LoraLayer", ("merged_adapters", "_caches"), GATHER),
    Names("peft.tuners.lora:LoraLayer", ("lora_bias", "get_base_layer"), ADAPTERS),
    Names("peft.tuners.lora:LoraLayer", ("scaling",), ("weights/lora.py",)),
    Names("peft.tuners.tuners_utils:", ("BaseTunerLayer",), ADAPTERS),
    Names("peft.utils:", ("AuxiliaryTrainingWrapper", "ModulesToSaveWrapper"), ADAPTERS),
    Names(
        "peft:",
        ("get_peft_model_state_dict(model, state_dict, adapter_name, save_embedding_layers)",),
        ADAPTERS,
    ),
    Names("peft:", ("PeftMixedModel",), ADAPTERS),
    Names(
        "peft:",
        (
            "set_peft_model_state_dict(model, peft_model_state_dict, adapter_name)",
            "load_peft_weights(model_id, device)",
        ),
        CHECKPOINT_ADAPTERS,
    ),
    Names("peft:PeftModel", ("active_adapters", "peft_config"), ADAPTERS + GATHER),
]

# --------------------------------------------------------------- torch, only in the installed version

TORCH = [
    Names("torch:Tensor", ("_version", "grad_dtype"), MASTERS),
    Names("torch:UntypedStorage", ("_cdata",), SHADOW),
    Names("torch:", ("_foreach_copy_", "_foreach_div_"), MASTERS),
    Names("torch:", ("_foreach_mul",), ("weights/lora.py",)),
    Names("torch:", ("_foreach_mul_",), ("benchmarks/publish.py",)),
    Names("torch:", ("_dynamo",), ("benchmarks/step_trainers.py", "batches/compiled_layers.py")),
    Names("torch.nn:Module", ("_non_persistent_buffers_set",), GATHER),
    Names("torch.nn:Module", ("_apply",), SHADOW),
    Names(
        "torch.optim.lr_scheduler:LambdaLR",
        ("_last_lr", "base_lrs", "lr_lambdas"),
        CHECKPOINT_OPTIMIZER,
    ),
    Names("torch.distributed:ProcessGroupGloo", ("_Options", "create_device"), CHANNEL),
    Names(
        "torch.distributed.distributed_c10d:ProcessGroupGloo._Options",
        ("_timeout", "_devices"),
        CHANNEL,
    ),
    Names("torch.distributed.distributed_c10d:", ("_set_pg_timeout",), ("train.py",)),
    Names(
        "torch.multiprocessing.reductions:",
        ("reduce_tensor", "rebuild_cuda_tensor"),
        ("tensors/shared_memory.py",),
    ),
    Names("torch.utils._python_dispatch:", ("TorchDispatchMode",), SHADOW),
    Names(
        "torch.utils._python_dispatch:TorchDispatchMode",
        ("__torch_dispatch__(func, types, args, kwargs)",),
        ("server/layout.py",),
    ),
    Names(
        "torch.nn.modules.module:",
        ("register_module_parameter_registration_hook(hook)",),
        ("server/layout.py",),
    ),
    Names("tqdm.auto:tqdm", ("_instances",), ("run_messages.py",)),
]

# --------------------------------------------------------------------------------- lines of TRL's source

GENERATE = [
    Lines(
        f"{GRPO}._generate",
        ("if self.use_vllm and self.state.global_step != self._last_loaded_step:",),
        "TRL loads no weights into a vLLM of its own, because we set `_last_loaded_step`",
        TRAINER,
    ),
    Lines(
        f"{GRPO}._generate",
        (
            "output = self.rollout_func(prompts, self)",
            'required_keys = {"prompt_ids", "completion_ids", "logprobs"}',
        ),
        "rollouts come through `rollout_func`, in these columns",
        TRAINER,
    ),
    Lines(
        f"{GRPO}._generate",
        ('tool_mask = extra_fields.pop("env_mask", None)',),
        "the mask of what was not sampled comes in the column `env_mask`",
        BATCH,
    ),
    Lines(
        f"{GRPO}._prepare_inputs",
        ("generate_every = self.args.steps_per_generation * self.num_iterations",),
        "a batch serves this many training steps",
        TRAINER,
    ),
    Lines(
        f"{GRPO}._prepare_inputs",
        (
            "generation_batch = self._generate_and_score_completions(generation_batch)",
            "generation_batch = shuffle_sequence_dict(generation_batch)",
            "generation_batches = split_tensor_dict(generation_batch, self.args.steps_per_generation)",
            "self._buffered_inputs = [unsplit_pixel_values_by_grid(batch) for batch in "
            "generation_batches]",
            "inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]",
        ),
        "TRL shuffles a batch, splits it and keeps the parts",
        TRAINER,
    ),
    Lines(
        f"{GRPO}.training_step",
        ("self._step += 1",),
        "`_step` counts training steps, and selects the part of the batch",
        TRAINER,
    ),
]

SCORE = f"{GRPO}._generate_and_score_completions"
SCORING = [
    Lines(
        SCORE,
        ("batch_size=batch_size", "_get_per_token_logps_and_entropies("),
        "scoring before training is done in chunks",
        TRAINER,
        times=3,
    ),
    Lines(
        SCORE,
        (
            'num_generations = self.num_generations if mode == "train" else '
            "self.num_generations_eval",
        ),
        "TRL takes the group size from an attribute that we set for each batch",
        TRAINER,
        absent=("self.vllm_generation",),
    ),
    Lines(
        SCORE,
        ("if self.use_vllm and self.vllm_importance_sampling_correction",),
        "the sampler's log-probabilities are used only with a correction",
        TRAINER,
    ),
    Lines(SCORE, ("self.use_vllm",), "nothing else of it depends on `use_vllm`", TRAINER, times=4),
    Lines(
        SCORE,
        (
            "generate_every = self.args.steps_per_generation * self.num_iterations",
            """
            if self.args.gradient_accumulation_steps % generate_every != 0 or (
                self.use_vllm and self.vllm_importance_sampling_correction
            ):
                old_per_token_logps, _, _ = self._get_per_token_logps_and_entropies(""",
        ),
        "TRL scores a whole batch before training if it serves several steps, or for vLLM",
        TRAINER,
    ),
    Lines(
        SCORE,
        (
            """
        if sampling_per_token_logps is not None:
            output["sampling_per_token_logps"] = sampling_per_token_logps""",
        ),
        "the sampler's log-probabilities come only with a correction",
        TRAINER,
    ),
    Lines(
        "trl.trainer.grpo_trainer:GRPOTrainer",
        ("std_rewards = nanstd(",),
        "`rollouts/rollout.py` scales rewards as TRL does, by its `nanstd`",
        ("rollouts/rollout.py",),
    ),
]

LOSS = [
    Lines(
        f"{GRPO}.compute_loss",
        ("return self._compute_loss(model, inputs)",),
        "the loss of a micro-batch is this method's",
        TRAINER,
    ),
    Lines(
        f"{GRPO}._compute_loss",
        ("_get_per_token_logps_and_entropies(",),
        "a training pass computes all its rows at once",
        TRAINER,
        times=1,
        absent=("batch_size",),
    ),
    Lines(
        f"{GRPO}._compute_loss",
        ("if self.use_vllm and self.vllm_importance_sampling_correction",),
        "the ratio is read only with a correction",
        TRAINER,
    ),
    *(
        Lines(
            f"{GRPO}._compute_loss",
            ("self._get_per_token_logps_and_entropies(", line),
            "what the forward pass puts into the inputs is read after it",
            TRAINER,
        )
        for line in (
            'old_per_token_logps = inputs.get("old_per_token_logps")',
            "old_per_token_logps = per_token_logps.detach() if old_per_token_logps is None else "
            "old_per_token_logps",
            'importance_sampling_ratio=inputs.get("importance_sampling_ratio")',
            'per_token_loss = per_token_loss * inputs["importance_sampling_ratio"]',
        )
    ),
    Lines(
        f"{GRPO}._compute_loss",
        ("importance_sampling_ratio",),
        "the ratio is read nowhere else",
        TRAINER,
        times=3,
    ),
]

# ---------------------------------------------------------------------------- lines of Transformers'

SAVING = [
    Lines(
        "transformers:Trainer._save_checkpoint",
        (
            "run_dir = self._get_output_dir(trial=trial)",
            "output_dir = os.path.join(run_dir, checkpoint_folder)",
            "rotate_checkpoints(\n                output_dir=run_dir,",
        ),
        "`_get_output_dir` alone determines the folder of checkpoints",
        CHECKPOINT,
        absent=("self.args.output_dir",),
    ),
    Lines(
        f"{GRPO}._save_checkpoint",
        ("os.path.join(self._get_output_dir(trial=trial), checkpoint_folder)",),
        "TRL saves the coefficient of the entropy beside it",
        CHECKPOINT,
    ),
    *(
        Lines(
            f"transformers:Trainer.{method}",
            ("hf_api().upload_folder(",),
            "we replace this client's method, to upload only what is the model's",
            ("report/hub.py",),
        )
        for method in ("push_to_hub", "_push_from_checkpoint")
    ),
    Lines(
        "transformers:ProgressCallback.on_step_end",
        ("self.training_bar.update(state.global_step - self.current_step)",),
        "our progress bar counts as theirs does",
        ("report/progress.py",),
    ),
]

ROWS = [*TRL, *HUGGING_FACE, *PEFT, *TORCH, *GENERATE, *SCORING, *LOSS, *SAVING]
