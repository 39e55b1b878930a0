"""All that depends on vLLM's version (0.26 to 0.32). `tests/server/test_vllm_seam.py` lists the
names of vLLM that it does not promise to keep, and looks for each, and for each name that is
imported, in the installed vLLM."""

import os
import runpy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import entry_points

import torch
import vllm
from packaging.version import Version
from vllm.outputs import CompletionOutput
from vllm.platforms import current_platform
from vllm.v1.engine.exceptions import EngineDeadError as EngineDeadError

from trl_atropos.protocol import LONGEST_QUERY

try:  # later versions have a class for what the client got wrong
    from vllm.exceptions import VLLMClientError
except ImportError:
    VLLMClientError = ValueError

VLLM_VERSION = Version(Version(vllm.__version__).base_version)
NEW = Version("0.32") <= VLLM_VERSION
CLIENT_ERRORS = (VLLMClientError, ValueError)  # for instance a prompt that does not fit
# cached prefixes of an adapter; before, they were keyed by its name alone
PREFIXES_KEYED_BY_ADAPTER_PATH = NEW
UNMARKED = "default"  # how vLLM marks the tokens that it samples before the first publish
ENGINE_PROCESS = "EngineCore"  # what the names of the engine's processes begin with


def run_server() -> None:
    """Runs vLLM's own API server, which parses `sys.argv`."""
    try:
        from vllm.entrypoints.launchers.api_server.entry import main
    except ImportError:  # 0.26, where it is a script
        main = partial(runpy.run_module, "vllm.entrypoints.openai.api_server", run_name="__main__")
    main()  # outside: no error of the server shall have this one for its cause


async def pause(engine, clear_cache: bool) -> None:
    """Stops scheduling after the running step and keeps the requests in flight. With `clear_cache`,
    these recompute their KV cache with the new weights on resume. `AsyncLLM.pause_generation` does
    the same and then sleeps 20 ms."""
    await engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear_cache)


class _CachedBlocks:
    """A pool's blocks of KV cache, of which a loop sees those that are in the prefix cache."""

    def __init__(self, blocks: list, cached: list):
        self._blocks = blocks
        self._cached = cached

    def __getitem__(self, index: int):
        return self._blocks[index]

    def __iter__(self) -> Iterator:
        return iter(self._cached)


def reset_only_cached_blocks() -> None:
    """In this process, resetting the prefix cache walks over what is in it, not over all blocks:
    with a small model on a large GPU these are millions, which take half a second of every
    publish."""
    from vllm.v1.core.block_pool import BlockPool

    walk = BlockPool.reset_prefix_cache

    def reset_prefix_cache(self) -> bool:
        blocks = self.blocks
        found = self.cached_block_hash_to_block._cache.values()
        cached = [
            block for one in found for block in (one.values() if isinstance(one, dict) else (one,))
        ]
        self.blocks = _CachedBlocks(blocks, cached)
        try:
            return walk(self)
        finally:
            self.blocks = blocks

    BlockPool.reset_prefix_cache = reset_prefix_cache


def leave_logprobs_without_text() -> None:
    """In this process, the log-probabilities of requests with `flat_logprobs`, which vLLM's own
    routes never set, come without the text of their tokens. Decoding them one by one takes longer
    than all else that the API server does with a token, and bounded sampling at 10,000 tokens per
    second."""
    from vllm.v1.engine.logprobs import LogprobsProcessor

    from_new_request = LogprobsProcessor.from_new_request.__func__

    def without_text(cls, tokenizer, request):
        params = request.sampling_params
        return from_new_request(
            cls, None if params is not None and params.flat_logprobs else tokenizer, request
        )

    LogprobsProcessor.from_new_request = classmethod(without_text)


def logits_processors(config) -> tuple[str, ...]:
    """Returns the names of logits processors that are not vLLM's own and that this server applies
    to every request: of `--logits-processors`, and of packages that are installed for vLLM."""
    stated = config.model_config.logits_processors or ()
    names = [
        name if isinstance(name, str) else f"{name.__module__}:{name.__qualname__}"
        for name in stated
    ]
    installed = [plugin.value for plugin in entry_points(group="vllm.logits_processors")]
    return tuple(f"the server's logits processor {name}" for name in [*names, *installed])


def dies_of_seeds() -> bool:
    """Returns whether a seeded prompt that is computed in parts ends the engine: the runner sets
    the generator back, which torch's generators for the CPU cannot do (vLLM 0.32,
    `vllm/v1/worker/gpu_model_runner.py`, line 3502)."""
    return current_platform.is_cpu()


def is_batch_invariant() -> bool:
    """Whether this process computes a token alike whatever else is in its batch."""
    return bool(int(os.environ.get("VLLM_BATCH_INVARIANT", "0")))


def keep_batch_invariant() -> None:
    """In this process, closes two gaps of vLLM's batch-invariant mode: from 256 tokens on, norms
    that add a residual sum in another order (github.com/vllm-project/vllm/issues/48271), and if all
    queries of a batch are short, FlashAttention 3 divides the keys in other tiles
    (issues/51902)."""
    # which builds for the CPU cannot import
    import vllm.v1.attention.backends.flash_attn as flash_attn
    from vllm.model_executor.layers import layernorm

    norm = layernorm.rms_norm_batch_invariant
    attention = flash_attn.flash_attn_varlen_func

    def rms_norm(input, weight, eps=1e-6, residual=None):
        if residual is None:
            return norm(input, weight, eps)
        residual = input + residual
        return norm(residual, weight, eps), residual

    def varlen(*args, max_seqlen_q, **options):
        return attention(*args, max_seqlen_q=max(max_seqlen_q, LONGEST_QUERY), **options)

    layernorm.rms_norm_batch_invariant = rms_norm
    flash_attn.flash_attn_varlen_func = varlen


async def mark_tokens(engine, publishes: int) -> None:
    """Has the engine mark what it samples from now on. Only while it is paused."""
    if NEW:
        await engine.update_weight_version(str(publishes))


def marks_of(completion: CompletionOutput) -> tuple[int, int] | None:
    """After how many publishes the first and the last token of a whole completion were sampled, if
    it is marked."""
    marks = completion.weight_versions if NEW else None
    if not marks:
        return None
    first, last = (
        0 if mark.version == UNMARKED else int(mark.version) for mark in (marks[0], marks[-1])
    )
    return first, last


def cpu_experts() -> type | None:
    """vLLM's class that computes experts on the CPU. None for 0.26, which has functions in its
    place."""
    try:
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    except ImportError:
        return None
    return CPUUnquantizedExperts


@contextmanager
def without_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Takes vLLM's LoRA layers from around the base layers, where some versions do not find a
    checkpoint's names."""
    from vllm.lora.layers import BaseLayerWithLoRA

    wrapped = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, BaseLayerWithLoRA)
        and isinstance(getattr(child, "base_layer", None), torch.nn.Module)
    ]
    for parent, name, child in wrapped:
        setattr(parent, name, child.base_layer)
    try:
        yield
    finally:
        for parent, name, child in wrapped:
            setattr(parent, name, child)


@contextmanager
def as_if_empty(adapters, slot: int) -> Iterator[None]:
    """Lets vLLM's manager of adapters take one into `slot` as if it had none, and forgets it
    afterwards."""
    names = ("_registered_adapters", "_active_adapters", "lora_index_to_id")
    kept = {name: getattr(adapters, name) for name in names}
    for name in names[:2]:
        setattr(adapters, name, type(kept[name])(adapters.lora_slots, lambda _: None))
    adapters.lora_index_to_id = [-1] * slot + [None] * (adapters.lora_slots - slot)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(adapters, name, value)


def adapter_name_mapper(model: torch.nn.Module):
    """Renames modules of an adapter as vLLM's model does, without joining those that vLLM packs; or
    None."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)  # as vLLM asks for it: most models have none
    if mapper is None:
        return None
    return (
        mapper.get_rename_mapper()
        if hasattr(mapper, "get_rename_mapper")
        else mapper.get_unstacked_mapper()
    )
