"""Holds all that depends on vLLM's version (0.26 to 0.32; 0.33 was read, and not run), and the
places where vLLM is patched. Those of log-probabilities are in `sampled_logprobs.py`.

`tests/server/vllm_seam.py` lists the names of vLLM that it does not promise to keep. Tests look for
each of them, and for each name that is imported, in the installed vLLM, and `make seams
VLLM=0.33.0` in the source of another.
"""

import logging
import os
import runpy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from importlib.metadata import entry_points
from typing import Any

import uvloop
import vllm
from packaging.version import Version
from torch import nn
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
# Older versions tell cached prefixes of adapters apart by the adapter's name alone.
PREFIXES_KEYED_BY_ADAPTER_PATH = NEW
UNMARKED = "default"  # vLLM's mark of tokens that were sampled before the first publish


def run_server() -> None:
    """Runs vLLM's own API server, which parses `sys.argv`."""
    try:
        from vllm.entrypoints.launchers.api_server.entry import main
    except ImportError:  # 0.26, where it is a script
        main = partial(runpy.run_module, "vllm.entrypoints.openai.api_server", run_name="__main__")
    main()  # outside: no error of the server shall have this one for its cause


def note_signals(noted: list[int]) -> None:
    """Appends each signal that vLLM's event loop handles to `noted`. By vLLM's own end, nobody can
    tell that a signal asked for it.

    After a signal, vLLM logs no traceback of the engine any more: Ctrl-C ends it at the same time.
    """
    add_handler = uvloop.Loop.add_signal_handler

    def add_noting_handler(
        loop: uvloop.Loop, signum: int, callback: Callable[..., Any], *args: Any
    ) -> None:
        def note_and_call() -> None:
            noted.append(signum)
            callback(*args)

        add_handler(loop, signum, note_and_call)

    def is_wanted(record: logging.LogRecord) -> bool:
        return not noted or record.exc_info is None

    uvloop.Loop.add_signal_handler = add_noting_handler
    logging.getLogger("vllm.v1.engine.async_llm").addFilter(is_wanted)


async def pause(engine, clear_cache: bool) -> None:
    """Stops scheduling after the running step and keeps the requests in flight.

    With `clear_cache`, these recompute their KV cache with the new weights on resume.
    `AsyncLLM.pause_generation` does the same and then sleeps 20 ms.
    """
    await engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear_cache)


class _CachedBlocks:
    """A pool's blocks of KV cache. A loop over them sees only those in the prefix cache."""

    def __init__(self, blocks: list, cached: list):
        self._blocks = blocks
        self._cached = cached

    def __getitem__(self, index: int):
        return self._blocks[index]

    def __iter__(self) -> Iterator:
        return iter(self._cached)


def reset_only_cached_blocks() -> None:
    """Makes a reset of the prefix cache walk over the blocks in it, not over all blocks, in this
    process. With a small model on a large GPU, all blocks are millions, which take half a second of
    every publish. The second call does nothing."""
    from vllm.v1.core.block_pool import BlockPool

    walk = BlockPool.reset_prefix_cache
    if walk.__module__ == __name__:
        return

    def reset_prefix_cache(self) -> bool:
        blocks = self.blocks
        cached = []
        for entry in self.cached_block_hash_to_block._cache.values():
            if isinstance(entry, dict):  # several blocks have this hash
                cached.extend(entry.values())
            else:
                cached.append(entry)
        self.blocks = _CachedBlocks(blocks, cached)
        try:
            return walk(self)
        finally:
            self.blocks = blocks

    BlockPool.reset_prefix_cache = reset_prefix_cache


def leave_logprobs_without_text() -> None:
    """Leaves out the text of tokens in the log-probabilities of requests with `flat_logprobs`, in
    this process. vLLM's own routes never set that. Decoding tokens one by one takes longer than all
    else that the API server does with a token, and bounded sampling at 10,000 tokens per second."""
    from vllm.v1.engine.logprobs import LogprobsProcessor

    from_new_request = LogprobsProcessor.from_new_request.__func__

    def without_text(cls, tokenizer, request):
        params = request.sampling_params
        if params is not None and params.flat_logprobs:
            tokenizer = None
        return from_new_request(cls, tokenizer, request)

    LogprobsProcessor.from_new_request = classmethod(without_text)


def logits_processors(config) -> tuple[str, ...]:
    """Returns the names of logits processors that are not vLLM's own and that this server applies
    to every request: of `--logits-processors`, and of packages that are installed for vLLM."""
    names = []
    for processor in config.model_config.logits_processors or ():
        if isinstance(processor, str):
            names.append(processor)
        else:
            names.append(f"{processor.__module__}:{processor.__qualname__}")
    for plugin in entry_points(group="vllm.logits_processors"):
        names.append(plugin.value)
    return tuple(f"the server's logits processor {name}" for name in names)


def dies_of_seeds() -> bool:
    """Returns whether a seeded prompt that is computed in parts ends the engine: the runner sets
    the generator back, which torch's generators for the CPU cannot do (vLLM 0.32,
    `vllm/v1/worker/gpu_model_runner.py`, line 3502)."""
    return current_platform.is_cpu()


def is_batch_invariant() -> bool:
    """Returns whether this process computes a token alike whatever else is in its batch."""
    return bool(int(os.environ.get("VLLM_BATCH_INVARIANT", "0")))


def keep_batch_invariant() -> None:
    """Closes two gaps of vLLM's batch-invariant mode, in this process.

    From 256 tokens on, norms that add a residual sum in another order
    (github.com/vllm-project/vllm/issues/48271). If all queries of a batch are short, FlashAttention
    3 divides the keys into other tiles (issues/51902).
    """
    # not above: builds for the CPU cannot import it
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
    """Makes the engine mark the tokens that it samples from now on. Call it only in a pause."""
    if NEW:
        await engine.update_weight_version(str(publishes))


def marks_of(completion: CompletionOutput) -> tuple[int, int] | None:
    """Returns after how many publishes the first and the last token of a whole completion were
    sampled, or `None` if it is not marked."""
    marks = completion.weight_versions if NEW else None
    if not marks:
        return None
    return _publishes_of(marks[0].version), _publishes_of(marks[-1].version)


def _publishes_of(version: str) -> int:
    return 0 if version == UNMARKED else int(version)


def marks_of_tokens(state) -> list[tuple[int, int, int]] | None:
    """Returns the stretches of the tokens that vLLM's state of a request has so far, as (publishes,
    start, end): after how many publishes they were sampled. `None` if they are not marked."""
    spans = state._weight_version_spans() if NEW else None
    if not spans:
        return None
    return [(_publishes_of(span.version), span.start, span.end) for span in spans]


# vLLM's states of the requests that sessions watch, by the id that the server gave them. Each
# completion of a request has a state.
_states: dict[str, list] = {}


def watch_request(request_id: str) -> list:
    """Returns the list that gets vLLM's state of each completion of a request that begins now.

    vLLM forgets the states of a request whose client goes away before anybody else learns of it.
    """
    states: list = []
    _states[request_id] = states
    return states


def forget_request(request_id: str) -> None:
    """Ends what `watch_request` began."""
    del _states[request_id]


def keep_watched_states() -> None:
    """Makes vLLM's output processor tell of the states that it makes, in this process. The second
    call does nothing."""
    from vllm.v1.engine.output_processor import OutputProcessor

    add = OutputProcessor.add_request
    if add.__module__ == __name__:
        return

    @wraps(add)
    def add_request(processor, request, *args, **options):
        add(processor, request, *args, **options)
        states = _states.get(request.external_req_id)
        if states is not None:
            states.append(processor.request_states[request.request_id])

    add_request.__module__ = __name__
    OutputProcessor.add_request = add_request


def client_error(message: str) -> Exception:
    """Returns an exception that vLLM's routes answer with status 400."""
    return VLLMClientError(message)


def cpu_experts() -> type | None:
    """Returns vLLM's class that computes experts on the CPU. `None` before 0.30: 0.26 and 0.27 have
    functions in its place, and the class of 0.28 and 0.29 also routes the tokens."""
    if Version("0.30") > VLLM_VERSION:
        return None
    try:
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    except ImportError:
        return None
    return CPUUnquantizedExperts


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Removes vLLM's LoRA layers from around the base layers for a while: some versions do not find
    a checkpoint's names behind them."""
    from vllm.lora.layers import BaseLayerWithLoRA

    wrapped = []
    for parent in model.modules():
        for name, child in parent.named_children():
            if not isinstance(child, BaseLayerWithLoRA):
                continue
            if isinstance(getattr(child, "base_layer", None), nn.Module):
                wrapped.append((parent, name, child))
    for parent, name, child in wrapped:
        setattr(parent, name, child.base_layer)
    try:
        yield
    finally:
        for parent, name, child in wrapped:
            setattr(parent, name, child)


@contextmanager
def as_if_empty(adapters, slot: int) -> Iterator[None]:
    """Makes vLLM's manager of adapters take one into `slot` as if it had none, and forgets that one
    afterwards."""
    registered = adapters._registered_adapters
    active = adapters._active_adapters
    ids_by_slot = adapters.lora_index_to_id
    slots = adapters.lora_slots
    adapters._registered_adapters = type(registered)(slots, _forget)
    adapters._active_adapters = type(active)(slots, _forget)
    # the slots before it count as taken
    adapters.lora_index_to_id = [-1] * slot + [None] * (slots - slot)
    try:
        yield
    finally:
        adapters._registered_adapters = registered
        adapters._active_adapters = active
        adapters.lora_index_to_id = ids_by_slot


def _forget(_adapter_id: int) -> None:
    """Takes the place of what vLLM does when an adapter leaves its cache."""


def adapter_name_mapper(model: nn.Module):
    """Returns a mapper that renames modules of an adapter as vLLM's model does, without joining
    those that vLLM packs, or `None` if it renames none."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)  # as vLLM asks for it: most models have none
    if mapper is None:
        return None
    if hasattr(mapper, "get_rename_mapper"):
        return mapper.get_rename_mapper()
    return mapper.get_unstacked_mapper()  # 0.26
