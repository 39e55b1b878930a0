"""The names of vLLM that the package uses without a promise. `tests/server/test_vllm_seam.py` looks
for them in the installed vLLM, and `make seams VLLM=...` in the source of any other. This list
imports no library.

If a name moved, adapt `trl_atropos/server/compat.py` and the files named with it. Give the old row
its `until`, and the new one its `since`.
"""

from tests.house.seam import Lines, Names

LAYERS = "vllm.model_executor.layers"
LAUNCHERS = "vllm.entrypoints.launchers"
FAST_LOGPROBS = ("server/sampled_logprobs.py",)
OPENAI_LOGPROBS = ("server/openai_logprobs.py",)
COMPAT = ("server/compat.py",)
CONTROL = ("server/control.py",)
SAMPLING = ("server/sampling.py",)
SESSIONS = ("server/session_capture.py",)
LAYOUT = ("server/layout.py",)
SHARED_ARENA = ("server/shared_arena.py",)
EXTENSION = ("server/extension.py",)
WEIGHTS = ("server/weight_receiver.py",)
ADAPTERS = ("server/adapter_receiver.py",)
CHANNEL = ("tensors/channel.py",)
NUMERICS = ("batches/numerics.py",)

# ---------------------------------------------------------------------- the engine and its requests

ENGINE = [
    Names(
        "vllm.entrypoints.openai.models.serving:OpenAIServingModels", ("lora_requests",), CONTROL
    ),
    Names(
        "vllm.envs:",
        ("VLLM_SKIP_MODEL_NAME_VALIDATION", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
        ("server/launch.py",),
    ),
    Names("vllm.envs:", ("VLLM_BATCH_INVARIANT",), ("server/launch.py", "server/compat.py")),
    Names(
        "vllm.envs:",
        ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_API_KEY"),
        ("server/launch.py",),
    ),
    Names(
        "vllm.envs:",
        ("VLLM_LOGGING_LEVEL", "VLLM_NO_USAGE_STATS"),
        ("benchmarks/publish.py",),
    ),
    Names("vllm.envs:", ("VLLM_CPU_OMP_THREADS_BIND",), ("benchmarks/sampling_targets.py",)),
    Names("vllm.envs:", ("VLLM_PLUGINS",), FAST_LOGPROBS),
    Names(
        "vllm.envs:",
        ("VLLM_CPU_KVCACHE_SPACE", "VLLM_ALLOW_LONG_MAX_MODEL_LEN", "VLLM_RPC_BASE_PATH"),
        ("check/launch.py", "check/lengths.py", "services/machine.py"),
    ),
    Names(
        "vllm.v1.engine.async_llm:AsyncLLM",
        (
            "model_config",
            "vllm_config",
            "get_tokenizer()",
            "check_health()",
            "is_sleeping()",
            "generate(prompt, sampling_params, request_id, lora_request)",
            "collective_rpc(method, args)",
            "resume_generation()",
            "reset_prefix_cache(reset_running_requests)",
            "sleep(level, mode)",
            "wake_up(tags)",
            "abort(request_id)",
        ),
        ("server/control.py", "server/sampling.py"),
    ),
    Names("vllm.v1.engine.async_llm:AsyncLLM", ("engine_core",), COMPAT),
    # 0.27 to 0.31 mark batches, but not the tokens of a completion
    Names(
        "vllm.v1.engine.async_llm:AsyncLLM",
        ("update_weight_version(new_version)",),
        COMPAT,
        since="0.27",
    ),
    Names("vllm.outputs:CompletionOutput", ("weight_versions",), COMPAT, since="0.32"),
    Names(
        "vllm.v1.engine.core_client:AsyncMPClient",
        ("pause_scheduler_async(mode, clear_cache)",),
        COMPAT,
    ),
    Names(
        "vllm.outputs:RequestOutput",
        ("num_cached_tokens", "outputs", "prompt_token_ids", "prompt_logprobs"),
        SAMPLING,
    ),
    Names(
        "vllm.outputs:CompletionOutput",
        ("index", "text", "token_ids", "logprobs", "finish_reason"),
        SAMPLING,
    ),
    Names(
        "vllm.lora.request:LoRARequest",
        ("lora_name", "lora_int_id", "lora_path"),
        CONTROL,
    ),
    Names("vllm.sampling_params:SamplingParams", ("flat_logprobs", "clone()"), SAMPLING),
    Names("vllm.logprobs:FlatLogprobs", ("start_indices", "logprobs"), SAMPLING),
    Names("vllm.exceptions:", ("VLLMClientError",), COMPAT, since="0.27"),
    Names(f"{LAUNCHERS}.api_server.entry:", ("main()",), COMPAT, since="0.29"),
    Names("vllm.entrypoints.openai.api_server:", ("run_server",), COMPAT, until="0.29"),
]

# --------------------------------------------------------------------------------- what compat wraps

WRAPPED = [
    Names(
        "vllm.v1.engine.logprobs:LogprobsProcessor",
        ("from_new_request(tokenizer, request)",),
        COMPAT,
        exact=True,
    ),
    Names("vllm.v1.engine:EngineCoreRequest", ("sampling_params",), COMPAT),
    Names("vllm.v1.engine:EngineCoreRequest", ("external_req_id", "request_id"), COMPAT),
    Names(
        "vllm.v1.engine.output_processor:OutputProcessor",
        ("add_request(request)", "request_states"),
        COMPAT,
    ),
    Names(
        "vllm.v1.engine.output_processor:RequestState",
        ("_weight_version_spans()",),
        COMPAT,
        since="0.32",
    ),
    Names("vllm.outputs:WeightVersionSpan", ("version", "start", "end"), COMPAT, since="0.32"),
    Names(
        "vllm.v1.engine.output_processor:RequestState",
        ("request_index", "prompt_token_ids", "detokenizer", "logprobs_processor"),
        SESSIONS,
    ),
    Names("vllm.v1.engine.logprobs:LogprobsProcessor", ("logprobs",), SESSIONS),
    Names(
        "vllm.v1.engine.detokenizer:IncrementalDetokenizer",
        ("output_token_ids",),
        SESSIONS,
    ),
    Names(
        "vllm.sampling_params:SamplingParams",
        ("logprob_token_ids", "prompt_logprobs", "flat_logprobs"),
        SESSIONS,
    ),
    Names("vllm.v1.core.block_pool:BlockPool", ("blocks", "cached_block_hash_to_block"), COMPAT),
    Names("vllm.v1.core.block_pool:BlockPool", ("reset_prefix_cache()",), COMPAT, exact=True),
    Names("vllm.v1.core.block_pool:BlockHashToBlockMap", ("_cache",), COMPAT),
    Names(
        f"{LAYERS}.layernorm:",
        ("rms_norm_batch_invariant(input, weight, eps, residual)",),
        COMPAT,
        exact=True,
    ),
    Names(
        "vllm.v1.attention.backends.flash_attn:",
        ("flash_attn_varlen_func",),
        COMPAT,
        needs_cuda=True,
    ),
]

# These carry the log-probabilities of sampled tokens from the engine to the answer of a request. A
# wrapper of one of them passes on arguments that it does not know: they grow with the versions.
SAMPLED_LOGPROBS = [
    Names(
        "vllm.v1.core.sched.scheduler:Scheduler",
        ("update_from_output(scheduler_output, model_runner_output)", "requests"),
        FAST_LOGPROBS,
    ),
    Names(
        "vllm.v1.engine.output_processor:OutputProcessor",
        ("process_outputs(engine_core_outputs)", "request_states"),
        FAST_LOGPROBS,
    ),
    Names(
        "vllm.v1.engine.output_processor:RequestState",
        (
            "from_new_request(tokenizer, request)",
            "detokenizer",
            "logprobs_processor",
            "output_kind",
        ),
        FAST_LOGPROBS,
    ),
    Names(
        "vllm.v1.engine.logprobs:LogprobsProcessor",
        (
            *("logprobs", "cumulative_logprob", "num_logprobs", "prompt_logprobs", "tokenizer"),
            "_correct_decoded_token(token_id, context_token_ids)",
        ),
        FAST_LOGPROBS,
    ),
    Names(
        "vllm.v1.engine.detokenizer:IncrementalDetokenizer",
        (
            *("output_token_ids", "num_output_tokens()", "update(new_token_ids, stop_terminated)"),
            "get_next_output_text(finished, delta)",
        ),
        FAST_LOGPROBS,
    ),
    Names("vllm.v1.engine.detokenizer:BaseIncrementalDetokenizer", ("stop",), FAST_LOGPROBS),
    Names(
        "vllm.v1.engine.logprobs:LogprobsProcessor",
        ("_update_sample_logprobs(logprobs_lists)",),
        ("benchmarks/sampling_equality.py",),
    ),
    Names(
        "vllm.v1.engine:EngineCoreOutput",
        ("request_id", "new_token_ids", "new_logprobs"),
        FAST_LOGPROBS,
    ),
    Names("vllm.v1.engine:EngineCoreOutputs", ("outputs",), FAST_LOGPROBS),
    Names("vllm.v1.outputs:ModelRunnerOutput", ("logprobs", "req_id_to_index"), FAST_LOGPROBS),
    Names(
        "vllm.v1.outputs:LogprobsLists",
        ("logprob_token_ids", "logprobs", "sampled_token_ranks", "cu_num_generated_tokens"),
        FAST_LOGPROBS,
    ),
    Names(
        "vllm.v1.engine.core_client:AsyncMPClient",
        ("call_utility_async(method)",),
        FAST_LOGPROBS,
    ),
    Names(
        "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat",
        (
            "_create_chat_logprobs(token_ids, top_logprobs, logprob_token_ids, return_as_token_id)",
            "create_chat_completion(request)",
            "return_tokens_as_token_ids",
        ),
        OPENAI_LOGPROBS,
    ),
    Names(
        "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionLogProbsContent",
        ("token", "logprob", "bytes", "top_logprobs"),
        OPENAI_LOGPROBS,
    ),
    Names(
        "vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion",
        (
            "_create_completion_logprobs(token_ids, top_logprobs, logprob_token_ids, "
            "initial_text_offset, return_as_token_id)",
            "create_completion(request)",
            "return_tokens_as_token_ids",
        ),
        OPENAI_LOGPROBS,
    ),
    Names(
        "vllm.entrypoints.openai.completion.protocol:CompletionLogProbs",
        ("text_offset", "token_logprobs", "tokens", "top_logprobs"),
        OPENAI_LOGPROBS,
    ),
]

# ------------------------------------------------------------------------------------ configurations

CONFIGS = [
    Names(
        "vllm.config:VllmConfig",
        ("model_config", "parallel_config", "lora_config", "cache_config", "load_config"),
        EXTENSION + WEIGHTS + ADAPTERS,
    ),
    Names(
        "vllm.config:ModelConfig",
        ("model", "dtype", "max_model_len", "skip_tokenizer_init", "logprobs_mode"),
        CONTROL,
    ),
    Names("vllm.config:ModelConfig", ("get_vocab_size()",), CONTROL),
    Names(
        "vllm.config:ModelConfig",
        ("quantization", "use_mla", "enable_sleep_mode", "get_num_experts()"),
        EXTENSION + WEIGHTS,
    ),
    Names("vllm.config:ModelConfig", ("logits_processors",), COMPAT),
    Names("vllm.config:ParallelConfig", ("data_parallel_size",), CONTROL),
    Names(
        "vllm.config:ParallelConfig",
        (
            "data_parallel_index",
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "world_size",
        ),
        EXTENSION + ADAPTERS,
    ),
    Names(
        "vllm.config:LoRAConfig", ("lora_dtype", "max_lora_rank", "max_loras"), EXTENSION + ADAPTERS
    ),
    Names("vllm.config:CacheConfig", ("block_size",), EXTENSION),
    Names("vllm.config:LoadConfig", ("load_format", "model_loader_extra_config"), SHARED_ARENA),
]

# --------------------------------------------------------------------------- workers and their layers

WORKER = [
    Names(
        "vllm.v1.worker.worker_base:WorkerBase",
        ("vllm_config", "rank", "device", "model_runner", "add_lora(lora_request)"),
        EXTENSION + ADAPTERS,
    ),
    Names(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner",
        ("get_model()", "lora_manager"),
        EXTENSION + ADAPTERS,
    ),
    # the runner of most models on a GPU
    Names(
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner",
        ("get_model()", "lora_manager"),
        EXTENSION + ADAPTERS,
    ),
    Names(
        "vllm.lora.worker_manager:LRUCacheWorkerLoRAManager",
        ("_adapter_manager", "lora_config", "vocab_size"),
        ADAPTERS,
    ),
    Names(
        "vllm.lora.model_manager:LRUCacheLoRAModelManager",
        (
            "model",
            "capacity",
            "lora_index_to_id",
            "add_adapter(lora)",
            "activate_adapter(lora_id)",
            "remove_adapter(adapter_id)",
            "remove_oldest_adapter()",
        ),
        ADAPTERS,
    ),
    Names("vllm.lora.model_manager:LRUCacheLoRAModelManager", ("modules",), LAYOUT),
    Names(
        "vllm.lora.model_manager:LRUCacheLoRAModelManager",
        ("lora_slots", "_registered_adapters", "_active_adapters"),
        COMPAT,
    ),
    Names("vllm.lora.layers:ColumnParallelLinearWithLoRA", ("base_layer",), COMPAT),
    # `server/layout.py` finds them by parts of their names
    Names(
        "vllm.lora.layers:ColumnParallelLinearWithLoRA",
        ("lora_a_stacked", "lora_b_stacked"),
        (),
    ),
    Names(
        "vllm.lora.lora_model:LoRAModel",
        (
            "from_lora_tensors(lora_model_id, tensors, peft_helper, device, dtype, "
            "model_vocab_size, weights_mapper, skip_prefixes)",
        ),
        ADAPTERS,
    ),
    Names(
        "vllm.lora.peft_helper:PEFTHelper",
        ("from_dict(config_dict)", "validate_legal(lora_config)"),
        ADAPTERS,
    ),
    Names(
        "vllm.model_executor.models.utils:WeightsMapper",
        ("get_rename_mapper()",),
        COMPAT,
        since="0.29",
    ),
    Names(
        "vllm.model_executor.models.utils:WeightsMapper",
        ("get_unstacked_mapper()",),
        COMPAT,
        until="0.29",
    ),
    Names(
        "vllm.model_executor.model_loader.default_loader:DefaultModelLoader",
        ("load_weights(model, model_config)",),
        SHARED_ARENA,
        exact=True,
    ),
    Names(
        f"{LAYERS}.linear:UnquantizedLinearMethod",
        ("process_weights_after_loading(layer)",),
        SHARED_ARENA,
        exact=True,
    ),
    Names(
        f"{LAYERS}.vocab_parallel_embedding:UnquantizedEmbeddingMethod",
        ("process_weights_after_loading(layer)",),
        SHARED_ARENA,
        exact=True,
    ),
    Names(f"{LAYERS}.attention:Attention", ("impl",), LAYOUT),
    Names(f"{LAYERS}.fused_moe:UnquantizedFusedMoEMethod", ("experts_cls",), SHARED_ARENA),
    Names(f"{LAYERS}.fused_moe.routed_experts:RoutedExperts", ("quant_method",), SHARED_ARENA),
    Names(f"{LAYERS}.fused_moe.activation:MoEActivation", ("SWIGLUOAI",), SHARED_ARENA),
    # 0.26 and 0.27 have functions in its place, and that of 0.28 and 0.29 also routes the tokens
    Names(
        f"{LAYERS}.fused_moe.experts.cpu_moe:",
        ("CPUUnquantizedExperts",),
        COMPAT,
        since="0.30",
    ),
    Names(
        f"{LAYERS}.fused_moe.experts.cpu_moe:CPUUnquantizedExperts",
        (
            "process_weights_after_loading(layer)",
            "apply(output, hidden_states, w1, w2, topk_weights, topk_ids, activation, "
            "apply_router_weight_on_input)",
            "w1_bias",
            "w2_bias",
            "activation(activation, output, input)",
        ),
        SHARED_ARENA,
        since="0.30",
    ),
]

# ------------------------------------------------------------------------- flags, and their defaults

FLAGS = [
    Names(
        "vllm.entrypoints.openai.cli_args:",
        ("FrontendArgs",),
        ("server/vllm_flags.py",),
        until="0.29",
    ),
    Names(
        f"{LAUNCHERS}.cli_args:",
        ("FrontendArgs",),
        ("server/vllm_flags.py",),
        since="0.29",
        until="0.33",
    ),
    Names(
        "vllm.entrypoints.common.cli_args:",
        ("FrontendArgs",),
        ("server/vllm_flags.py",),
        since="0.33",
    ),
    Lines(
        "vllm.engine.arg_utils:",
        (
            '"--load-format"',
            '"--generation-config"',
            '"--logprobs-mode"',
            '"--distributed-executor-backend"',
            '"--worker-extension-cls"',
            '"--enable-lora"',
            '"--max-loras"',
            '"--max-lora-rank"',
            '"--max-cpu-loras"',
        ),
        "the server is started with these flags",
        ("server/launch.py",),
        in_order=False,
    ),
    Lines(
        "vllm.config.model:",
        ("default_max_len = 2048\n",),
        "the estimate of a server's memory takes this length (`LENGTH_WITHOUT_POSITIONS`)",
        ("check/launch.py",),
    ),
    Lines(
        "vllm.config.cache:",
        ("gpu_memory_utilization: float = Field(default=0.92, gt=0, le=1)",),
        "the estimate of a server's memory takes this share (`UTILIZATION`)",
        ("check/launch.py",),
    ),
    # `check/launch.py` does the same without vLLM
    Names("vllm.engine.arg_utils:", ("human_readable_int",), ()),
    Names("vllm.config.model:", ("_STR_DTYPE_TO_TORCH_DTYPE",), ()),
]

# ------------------------------------------------------------------- what the trainer takes of vLLM

TRAINER = [
    Names(
        "vllm.distributed.device_communicators.pynccl_wrapper:NCCLLibrary",
        (
            "ncclGetUniqueId()",
            "unique_id_from_bytes(data)",
            "ncclCommInitRank(world_size, unique_id, rank)",
            "ncclBroadcast(sendbuff, recvbuff, count, datatype, root, comm, stream)",
        ),
        CHANNEL,
    ),
    Names("vllm.utils.nccl:", ("unpinned_nccl_env()",), CHANNEL, since="0.32"),
    # `numerics: bitwise` refuses to run with others: their kernels were not compared.
    Names(f"{LAYERS}:", ("batch_invariant",), NUMERICS, until="0.29"),
    Names(
        f"{LAYERS}.batch_invariant:",
        ("linear_batch_invariant", "rms_norm_batch_invariant"),
        NUMERICS,
        until="0.29",
    ),
    Names(
        "vllm._custom_ops:",
        ("rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox)",),
        NUMERICS,
    ),
    Names(f"{LAYERS}.rotary_embedding:RotaryEmbedding", ("cos_sin_cache",), NUMERICS),
]

# -------------------------------------------------------------------------------- lines of its source

APP_STATE = (
    "state.engine_client = engine_client",
    "state.openai_serving_models = OpenAIServingModels(",
)
MIDDLEWARE = "the middleware reads it from the application's state"
SOURCE = [
    Lines(f"{LAUNCHERS}.api_server.app_state:", APP_STATE, MIDDLEWARE, CONTROL, since="0.29"),
    Lines("vllm.entrypoints.openai.api_server:", APP_STATE, MIDDLEWARE, CONTROL, until="0.29"),
    Lines(
        f"{LAUNCHERS}.launcher:",
        ("app.state.server = server",),
        MIDDLEWARE,
        CONTROL,
        since="0.29",
    ),
    Lines(
        "vllm.entrypoints.launcher:",
        ("app.state.server = server",),
        MIDDLEWARE,
        CONTROL,
        until="0.29",
    ),
    *(
        Lines(
            f"vllm.entrypoints.openai.{route}.api_router:",
            (
                f"generator = await handler.create_{route}(request, raw_request)",
                "return JSONResponse(\n            content=generator.model_dump(),\n"
                "            headers=",
            ),
            "the route encodes a whole answer by its `JSONResponse`, in the handler's task",
            OPENAI_LOGPROBS,
        )
        for route in ("chat_completion", "completion")
    ),
    Lines(
        "vllm.v1.engine.utils:",
        ('else "EngineCore"',),
        "the server watches for the death of processes named so (`ENGINE_PROCESS`)",
        ("server/processes.py",),
    ),
    Lines(
        "vllm.v1.engine.core:",
        ('self._weight_version = "default"',),
        "tokens that were sampled before any publish have this mark (`UNMARKED`)",
        COMPAT,
        since="0.27",
    ),
    Lines(
        "vllm.model_executor.layers.utils:",
        ("return layer.cpu_linear(x, weight, bias)",),
        "a linear layer on the CPU computes with the function that we put there",
        SHARED_ARENA,
    ),
    Lines(
        "vllm.v1.core.kv_cache_utils:",
        ('return [("lora", lora_request.lora_name, lora_request.lora_path)]',),
        "cached prefixes of adapters are told apart by their paths "
        "(`PREFIXES_KEYED_BY_ADAPTER_PATH`)",
        COMPAT,
        since="0.31",
    ),
    Lines(
        "vllm.v1.worker.gpu_model_runner:",
        ("gen.set_offset(gen.get_offset() - 4)",),
        "a seeded prompt that is computed in parts ends the CPU engine (`dies_of_seeds`). If the "
        "line is gone, seeds may be let in again",
        COMPAT,
    ),
    Lines(
        "vllm.v1.sample.logits_processor:",
        ('LOGITSPROCS_GROUP = "vllm.logits_processors"',),
        "the server names the logits processors of this entry point",
        COMPAT,
    ),
]

# ------------------------------------------------------------------------------------------- uvicorn

UVICORN = [
    Names("uvicorn:Server", ("handle_exit(sig, frame)",), ("front/serve.py",), exact=True),
    Names("uvicorn:Server", ("should_exit", "server_state"), ("server/plane.py",)),
    Names("uvicorn.server:ServerState", ("connections",), ("server/plane.py",)),
    Names(
        "uvicorn.protocols.http.httptools_impl:HttpToolsProtocol",
        ("transport",),
        ("server/plane.py",),
    ),
]

ROWS = [
    *ENGINE,
    *WRAPPED,
    *SAMPLED_LOGPROBS,
    *CONFIGS,
    *WORKER,
    *FLAGS,
    *TRAINER,
    *SOURCE,
    *UVICORN,
]
