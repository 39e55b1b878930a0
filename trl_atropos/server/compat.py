"""What differs between the vLLM versions that are supported (0.26 to 0.32). Nothing else looks at a version."""

from collections.abc import Callable

import vllm
from packaging.version import Version
from vllm.outputs import CompletionOutput
from vllm.v1.engine.exceptions import EngineDeadError as EngineDeadError

try:  # later versions have a class for what the client got wrong
    from vllm.exceptions import VLLMClientError
except ImportError:
    VLLMClientError = ValueError

VLLM_VERSION = Version(Version(vllm.__version__).base_version)
CLIENT_ERRORS = (VLLMClientError, ValueError)  # for instance a prompt that does not fit
MARKS_TOKENS = Version("0.32") <= VLLM_VERSION
UNMARKED = "default"  # how vLLM marks what it samples before it was told anything


def server_main() -> Callable[[], None]:
    """vLLM's own API server entry point, which parses `sys.argv`. The module moved after 0.26."""
    try:
        from vllm.entrypoints.launchers.api_server.entry import main
    except ImportError:
        return _server_main_0_26
    return main


def _server_main_0_26() -> None:
    import uvloop
    from vllm.entrypoints.openai.api_server import run_server
    from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    parser = make_arg_parser(FlexibleArgumentParser(description="vLLM OpenAI-Compatible RESTful API server."))
    args = parser.parse_args()
    validate_parsed_serve_args(args)
    uvloop.run(run_server(args))


async def pause(engine, clear_cache: bool) -> None:
    """
    Stops scheduling after the running step and keeps the requests in flight.

    With `clear_cache`, cached prefixes are dropped and the frozen requests are preempted, so that on resume they
    recompute their KV cache with the new weights. `AsyncLLM.pause_generation` does the same and then sleeps 20 ms.
    """
    await engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear_cache)


async def resume(engine) -> None:
    await engine.resume_generation()


async def mark_tokens(engine, publishes: int) -> None:
    """Lets the engine mark what it samples from now on. Only while it is paused."""
    if MARKS_TOKENS:
        await engine.update_weight_version(str(publishes))


def marks_of(completion: CompletionOutput) -> tuple[int, int] | None:
    """After how many publishes the first and the last token of an ended completion were sampled, if it is marked."""
    marks = completion.weight_versions if MARKS_TOKENS else None
    if not marks:
        return None
    first, last = (0 if mark.version == UNMARKED else int(mark.version) for mark in (marks[0], marks[-1]))
    return first, last


async def drop_caches(engine) -> None:
    """Drops cached prefixes, and the KV cache of paused requests, which recompute it when they go on."""
    await engine.reset_prefix_cache(reset_running_requests=True)


def begin_reload(model) -> None:
    """From here to `finish_reload`, loaded weights are kept until a layer is whole, then processed as at the start."""
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    initialize_layerwise_reload(model)


def finish_reload(model, model_config) -> None:
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    finalize_layerwise_reload(model, model_config)


def adapter_name_mapper(model):
    """Renames modules of an adapter as vLLM's model does, without joining those that vLLM packs; or nothing."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)  # as vLLM asks for it: most models have none
    if mapper is None:
        return None
    return mapper.get_rename_mapper() if hasattr(mapper, "get_rename_mapper") else mapper.get_unstacked_mapper()


# From which version on cached prefixes of an adapter are told apart by its path; before, only by its name.
PREFIXES_KEYED_BY_ADAPTER_PATH = Version("0.32") <= VLLM_VERSION
