"""The names of vLLM that are used without a promise, in the installed version
(`tests/server/vllm_seam.py` lists them). A failure here means that vLLM moved one: read the new
source, adapt `trl_atropos/server/compat.py` and who uses the name, and then the tests of a real
server tell whether it still fits.
"""

import os
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM
from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP

from tests.forge import SERVER
from tests.house.seam import Names, what_moved
from tests.server import vllm_seam
from trl_atropos.protocol import RESHAPING_FIELDS, SamplingSettings
from trl_atropos.server import compat
from trl_atropos.server.processes import ENGINE_PROCESS
from trl_atropos.server.vllm_flags import SOURCES

ROWS = [row for row in vllm_seam.ROWS if isinstance(row, Names)]
NAMES = [
    (row.place, name)
    for row in ROWS
    if not row.needs_cuda and (row.library != "vllm" or row.holds_in(compat.VLLM_VERSION))
    for name in row.names
]


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


@pytest.mark.parametrize(("place", "name"), NAMES, ids=str)
def test_vllm_has_listed_name(place, name):
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


def test_front_end_of_every_version_is_read_for_flags():
    rows = [row for row in vllm_seam.FLAGS if getattr(row, "names", None) == ("FrontendArgs",)]
    assert len(rows) == 3
    for row in rows:
        path = row.place.removeprefix("vllm.").removesuffix(":").replace(".", "/")
        assert f"{path}.py" in SOURCES


@pytest.mark.parametrize("version", ["0.26", "0.28.1", "0.29"])
def test_experts_of_older_vllm_are_not_taken_for_ours(version, monkeypatch):
    monkeypatch.setattr(compat, "VLLM_VERSION", Version(version))
    assert compat.cpu_experts() is None


def test_marks_of_vllm_are_those_of_compat():
    sources = [line for row in vllm_seam.SOURCE for line in row.lines]
    assert f'else "{ENGINE_PROCESS}"' in sources
    assert f'self._weight_version = "{compat.UNMARKED}"' in sources


LOADS = """
import sys
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from trl_atropos.server import compat, extension, shared_arena

address = f"file://{sys.argv[1]}/rendezvous"
torch.accelerator.empty_cache = lambda: None  # as on a machine with an accelerator


def load(folder):
    arguments = EngineArgs(folder, dtype="float32", enforce_eager=True, load_format=shared_arena.LOAD_FORMAT)
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
    kept = any(getattr(method, "experts_cls", None) is shared_arena.InPlaceExperts for method in methods)
    print("found", kept, extension.needs_reload(config, torch.device("cuda")), shared_arena.packed_layers)
    for kind in ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod"):
        usual = getattr(shared_arena, kind)
        setattr(shared_arena, kind, Moved)
        load(folder)
        setattr(shared_arena, kind, usual)
        print("moved", kind, len(shared_arena.packed_layers) > 0, shared_arena.refusal_of_packed_layers())
        shared_arena.packed_layers.clear()
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
