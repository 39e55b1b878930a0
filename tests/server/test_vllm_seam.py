"""What `trl_atropos/server` touches of vLLM without a promise. A failure here means that vLLM moved
it: read the new source, adapt `trl_atropos/server/compat.py` and who uses the name, and then the
tests of a real server tell whether it still fits.
"""

import ast
import importlib
import inspect
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP

import trl_atropos
from tests.forge import SERVER
from trl_atropos.protocol import RESHAPING_FIELDS, SamplingSettings
from trl_atropos.server import compat
from trl_atropos.server.compat import NEW

MODULES = "vllm.model_executor"
PRIVATE_NAMES: dict[str, tuple[str, ...]] = {
    # `module:class`, or `module:` -> attributes, and functions with the arguments that are given to
    # them.
    "vllm.entrypoints.openai.models.serving:OpenAIServingModels": ("lora_requests",),
    "vllm.envs:": ("VLLM_SKIP_MODEL_NAME_VALIDATION", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
    "vllm.v1.engine.async_llm:AsyncLLM": (
        *(
            "engine_core",
            "model_config",
            "vllm_config",
            "get_tokenizer()",
            "check_health()",
            "is_sleeping()",
        ),
        *(
            "generate(prompt, sampling_params, request_id, lora_request)",
            "collective_rpc(method, args)",
        ),
        *(
            "resume_generation()",
            "reset_prefix_cache(reset_running_requests)",
            "sleep(level, mode)",
            "wake_up(tags)",
        ),
        *(("update_weight_version(new_version)",) if NEW else ()),
    ),
    "vllm.v1.engine.core_client:AsyncMPClient": ("pause_scheduler_async(mode, clear_cache)",),
    "vllm.outputs:RequestOutput": ("num_cached_tokens",),
    "vllm.outputs:CompletionOutput": (
        "index",
        "token_ids",
        "finish_reason",
        *(("weight_versions",) if NEW else ()),
    ),
    "vllm.lora.request:LoRARequest": ("lora_name", "lora_int_id", "lora_path"),
    "vllm.config:ModelConfig": (
        *(
            "model",
            "dtype",
            "max_model_len",
            "skip_tokenizer_init",
            "logprobs_mode",
            "quantization",
            "use_mla",
        ),
        *("enable_sleep_mode", "get_vocab_size()", "get_num_experts()", "logits_processors"),
    ),
    "vllm.config:ParallelConfig": (
        *(
            "data_parallel_size",
            "data_parallel_index",
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "world_size",
        ),
    ),
    "vllm.config:LoRAConfig": ("lora_dtype", "max_lora_rank", "max_loras"),
    "vllm.config:CacheConfig": ("block_size",),
    "vllm.v1.engine.logprobs:LogprobsProcessor": ("from_new_request(tokenizer, request)",),
    "vllm.sampling_params:SamplingParams": ("flat_logprobs", "clone()"),
    "vllm.v1.sample.logits_processor:": ("LOGITSPROCS_GROUP",),
    "vllm.logprobs:FlatLogprobs": ("start_indices", "logprobs"),
    "vllm.v1.core.block_pool:BlockPool": (
        "blocks",
        "cached_block_hash_to_block",
        "reset_prefix_cache()",
    ),
    "vllm.v1.core.block_pool:BlockHashToBlockMap": ("_cache",),
    "vllm.config:LoadConfig": ("load_format", "model_loader_extra_config"),
    "vllm.v1.worker.worker_base:WorkerBase": (
        *("vllm_config", "rank", "device", "model_runner", "add_lora(lora_request)"),
    ),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": ("get_model()", "lora_manager"),
    "vllm.lora.worker_manager:LRUCacheWorkerLoRAManager": (
        "_adapter_manager",
        "lora_config",
        "vocab_size",
    ),
    "vllm.lora.model_manager:LRUCacheLoRAModelManager": (
        *(
            "model",
            "capacity",
            "lora_index_to_id",
            "add_adapter(lora)",
            "activate_adapter(lora_id)",
        ),
        *("modules", "lora_slots", "_registered_adapters", "_active_adapters"),
        *("remove_adapter(adapter_id)", "remove_oldest_adapter()"),
    ),
    "vllm.lora.layers:ColumnParallelLinearWithLoRA": (
        "base_layer",
        "lora_a_stacked",
        "lora_b_stacked",
    ),
    "vllm.lora.lora_model:LoRAModel": (
        "from_lora_tensors(lora_model_id, tensors, peft_helper, device, dtype, model_vocab_size, "
        "weights_mapper, skip_prefixes)",
    ),
    "vllm.lora.peft_helper:PEFTHelper": ("from_dict(config_dict)", "validate_legal(lora_config)"),
    f"{MODULES}.models.utils:WeightsMapper": (
        "get_rename_mapper()" if NEW else "get_unstacked_mapper()",
    ),
    f"{MODULES}.model_loader.default_loader:DefaultModelLoader": (
        "load_weights(model, model_config)",
    ),
    f"{MODULES}.layers.linear:UnquantizedLinearMethod": ("process_weights_after_loading(layer)",),
    f"{MODULES}.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod": (
        "process_weights_after_loading(layer)",
    ),
    f"{MODULES}.layers.attention:Attention": ("impl",),
    f"{MODULES}.layers.rotary_embedding:RotaryEmbedding": ("cos_sin_cache",),
    f"{MODULES}.layers.layernorm:": ("rms_norm_batch_invariant(input, weight, eps, residual)",),
    f"{MODULES}.layers.fused_moe:UnquantizedFusedMoEMethod": ("experts_cls",),
    f"{MODULES}.layers.fused_moe.routed_experts:RoutedExperts": ("quant_method",),
    f"{MODULES}.layers.fused_moe.activation:MoEActivation": ("SWIGLUOAI",),
}
if NEW:
    PRIVATE_NAMES[f"{MODULES}.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts"] = (
        "process_weights_after_loading(layer)",
        "apply(output, hidden_states, w1, w2, topk_weights, topk_ids, activation, "
        "apply_router_weight_on_input)",
        *("w1_bias", "w2_bias", "activation(activation, output, input)"),
    )
# of uvicorn and torch, used in `plane.py`, `front/serve.py`, `layout.py` and `extension.py`
OTHERS = {
    "uvicorn:Server": ("handle_exit(sig, frame)", "should_exit", "server_state"),
    "uvicorn.server:ServerState": ("connections",),
    "uvicorn.protocols.http.httptools_impl:HttpToolsProtocol": ("transport",),
    "torch.nn.modules.module:": ("register_module_parameter_registration_hook(hook)",),
    "torch.utils._python_dispatch:TorchDispatchMode": (
        "__torch_dispatch__(func, types, args, kwargs)",
    ),
    "torch:": ("_foreach_copy_",),
}
NAMES = [(place, name) for place, names in (PRIVATE_NAMES | OTHERS).items() for name in names]


def arguments_of(function) -> set[str]:
    return set(inspect.signature(function).parameters)


def has(owner, name: str) -> bool:
    """Whether a class or module has an attribute, if only because a method of the class sets it."""
    if hasattr(owner, name) or not inspect.isclass(owner):
        return hasattr(owner, name)
    own = [parent for parent in owner.__mro__ if parent.__module__.startswith(("vllm", "uvicorn"))]
    declared = any(name in getattr(parent, "__annotations__", {}) for parent in own)
    return declared or any(
        re.search(rf"self\.{name}\b[^=\n]*=", inspect.getsource(parent)) for parent in own
    )


# Of a request, what changes neither which tokens may come nor how likely they are.
NOT_RESHAPING = {
    *("n", "seed", "max_tokens", "stop", "stop_token_ids", "ignore_eos", "repetition_detection"),
    *(
        "logprobs",
        "prompt_logprobs",
        "prompt_logprob_token_ids",
        "prompt_logprob_start",
        "logprob_token_ids",
    ),
    *("flat_logprobs", "detokenize", "skip_special_tokens", "spaces_between_special_tokens"),
    *(
        "include_stop_str_in_output",
        "output_kind",
        "stream_interval",
        "skip_clone",
        "output_text_buffer_length",
    ),
    *("skip_reading_prefix_cache", "routed_experts_prompt_start", "trace_decode_token_ids"),
    "extra_args",  # for logits processors of the server, which are noted by themselves
}


def test_all_sampling_fields_are_classified():
    fields = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    reshaping = SamplingSettings().numbers().keys() | set(RESHAPING_FIELDS)
    assert fields - reshaping - NOT_RESHAPING == set()
    assert not reshaping & NOT_RESHAPING


def test_logits_processors_of_server_are_named():
    stated = SimpleNamespace(
        model_config=SimpleNamespace(logits_processors=["a.b:Mask", SimpleNamespace])
    )
    assert [name.rpartition(" ")[2] for name in compat.logits_processors(stated)] == [
        "a.b:Mask",
        "types:SimpleNamespace",
    ]
    nothing = SimpleNamespace(model_config=SimpleNamespace(logits_processors=None))
    assert compat.logits_processors(nothing) == ()
    assert LOGITSPROCS_GROUP == "vllm.logits_processors"


def test_cache_reset_visits_only_cached_blocks():
    pool = BlockPool(num_gpu_blocks=1000, enable_caching=True, hash_block_size=16)
    walked = BlockPool.reset_prefix_cache
    compat.reset_only_cached_blocks()
    try:
        blocks = pool.get_new_blocks(3)
        keys = [make_block_hash_with_group_id(BlockHash(bytes([i])), 0) for i in range(3)]
        # two of them are alike
        for block, key in zip(blocks, [keys[0], keys[1], keys[1]], strict=True):
            pool._insert_block_hash(key, block, num_tokens=16)
        assert not pool.reset_prefix_cache()  # while a request uses them
        pool.free_blocks(blocks)
        every = pool.blocks
        assert pool.reset_prefix_cache()
        assert pool.blocks is every
        assert all(block.block_hash is None for block in every)
        assert all(pool.cached_block_hash_to_block.get_one_block(key) is None for key in keys)
        pool.blocks = None  # there is nothing to walk over now
        assert pool.reset_prefix_cache()
    finally:
        BlockPool.reset_prefix_cache = walked


def test_flat_logprobs_alone_lose_token_texts(monkeypatch):
    monkeypatch.setattr(
        LogprobsProcessor, "from_new_request", LogprobsProcessor.__dict__["from_new_request"]
    )
    compat.leave_logprobs_without_text()
    for flat in (False, True):
        params = SamplingParams(logprobs=0, flat_logprobs=flat)
        found = LogprobsProcessor.from_new_request(
            "tokenizer", SimpleNamespace(sampling_params=params)
        )
        assert found.tokenizer == (None if flat else "tokenizer")
        assert isinstance(found.logprobs, FlatLogprobs) == flat


def what_moved(place: str, name: str) -> str | None:
    module, _, owner = place.partition(":")
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        return f"there is no module {module} ({error})"
    if owner:
        if not hasattr(found, owner):
            return f"{module} has no {owner}"
        found = getattr(found, owner)
    attribute, _, arguments = name.rstrip(")").partition("(")
    if attribute and not has(found, attribute):
        return f"{place} has no {attribute}"
    missing = (
        set(arguments.split(", ")) - arguments_of(getattr(found, attribute)) if arguments else set()
    )
    return f"{place}.{attribute} takes no {', '.join(sorted(missing))}" if missing else None


@pytest.mark.parametrize(("place", "name"), NAMES, ids=str)
def test_vllm_has_listed_name(place, name):
    assert what_moved(place, name) is None


def imports_of_vllm() -> list[tuple[str, str]]:
    """Module and name of all that `trl_atropos` imports of vLLM, but for what other versions have,
    in a `try`."""
    found = set()
    for path in Path(trl_atropos.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        tried = {
            node
            for parent in ast.walk(tree)
            if isinstance(parent, ast.Try)
            for node in ast.walk(parent)
        }
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.ImportFrom)
                and node.module.partition(".")[0] == "vllm"
                and node not in tried
            ):
                found |= {(f"{node.module}:", alias.name) for alias in node.names}
    return sorted(found)


@pytest.mark.parametrize(("place", "name"), imports_of_vllm(), ids=str)
def test_vllm_has_imported_name(place, name):
    assert what_moved(place, name) is None


@dataclass
class Left:
    """A class that looks like one of vLLM's from another version."""

    stays: int

    def call(self, first):
        self.later = first


Left.__module__ = "vllm.left"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("stays", None),
        ("later", None),
        ("call(first)", None),
        ("gone", "has no gone"),
        ("call(first, second)", "Left.call takes no second"),
    ],
)
def test_moved_name_is_told(name, told, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.left", sys.modules[__name__])
    found = what_moved("vllm.left:Left", name)
    assert (found is None) if told is None else (told in found)
    assert "no module vllm.gone" in what_moved("vllm.gone:Left", name)
    assert "vllm.left has no Right" in what_moved("vllm.left:Right", name)


@pytest.mark.skipif(not NEW, reason="the lines are those of vLLM 0.32")
@pytest.mark.parametrize(
    ("module", "line"),
    [
        # The application's state, which the middleware reads.
        ("vllm.entrypoints.launchers.api_server.app_state", "state.engine_client = engine_client"),
        (
            "vllm.entrypoints.launchers.api_server.app_state",
            "state.openai_serving_models = OpenAIServingModels(",
        ),
        ("vllm.entrypoints.launchers.launcher", "app.state.server = server"),
        # The process whose death is watched for, and the mark of a token that was sampled before
        # any publish.
        ("vllm.v1.engine.utils", f'else "{compat.ENGINE_PROCESS}"'),
        ("vllm.v1.engine.core", f'self._weight_version = "{compat.UNMARKED}"'),
        # What a linear layer on the CPU computes with.
        ("vllm.model_executor.layers.utils", "return layer.cpu_linear(x, weight, bias)"),
    ],
)
def test_vllm_source_has_expected_line(module, line):
    assert line in inspect.getsource(importlib.import_module(module))


LOADS = """
import sys
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from trl_atropos.server import compat, extension, layout

address = f"file://{sys.argv[1]}/rendezvous"
torch.accelerator.empty_cache = lambda: None  # as on a machine with an accelerator


def load(folder):
    arguments = EngineArgs(folder, dtype="float32", enforce_eager=True, load_format=layout.LOAD_FORMAT)
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, address, 0, "gloo")
            initialize_model_parallel()
        return get_model(vllm_config=config), config


class Moved:
    "As if vLLM kept a kind of layers in another class."


for folder in sys.argv[2:]:
    model, config = load(folder)
    methods = [getattr(module, "quant_method", None) for module in model.modules()]
    kept = any(getattr(method, "experts_cls", None) is layout.InPlaceExperts for method in methods)
    print("found", kept, extension.needs_reload(config, torch.device("cuda")), layout.packed_layers)
    for kind in ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod"):
        usual = getattr(layout, kind)
        setattr(layout, kind, Moved)
        load(folder)
        setattr(layout, kind, usual)
        print("moved", kind, len(layout.packed_layers) > 0, layout.refusal_of_packed_layers())
        layout.packed_layers.clear()
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[str]:
    """A model with experts in each of its two layers, and one without any."""
    folder = tmp_path_factory.mktemp("models")
    size = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "vocab_size": 256,
        "head_dim": 32,
    }
    size |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256}
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "decoder_sparse_step": 1,
    }
    for name, kind, fields in (("experts", "qwen3_moe", size | experts), ("dense", "qwen3", size)):
        AutoModelForCausalLM.from_config(
            AutoConfig.for_model(kind, **fields), dtype=torch.float32
        ).save_pretrained(folder / name)
    return [str(folder / "experts"), str(folder / "dense")]


def test_layers_compute_in_place_or_are_refused(models, tmp_path):
    """If vLLM kept layers in classes that are not looked for, it would sample from the first
    weights for ever."""
    (tmp_path / "layers_of_vllm.py").write_text(LOADS)
    log = tmp_path / "log"
    command = ["-m", "layers_of_vllm", str(tmp_path), *models]
    assert SERVER.fork(command, os.environ, log, tmp_path).wait(600) == 0, log.read_text()[-3000:]
    told = [
        line.split(maxsplit=3)
        for line in log.read_text().splitlines()
        if line.startswith(("found", "moved"))
    ]
    assert [line[1:] for line in told if line[0] == "found"] == [
        ["True", "True", "[]"],
        ["False", "False", "[]"],
    ]
    moved = [(kind, refused) for word, kind, refused, _ in told if word == "moved"]
    layers = ["UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"]
    assert moved == [(kind, "True") for kind in [*layers, "UnquantizedFusedMoEMethod", *layers]] + [
        ("UnquantizedFusedMoEMethod", "False")  # the dense model has none
    ]
