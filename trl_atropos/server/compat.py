"""What differs between the vLLM versions that are supported (0.26 to 0.32). Nothing else looks at a version."""

from collections.abc import Callable

import vllm
from packaging.version import Version
from vllm.v1.engine.exceptions import EngineDeadError as EngineDeadError

try:  # later versions have a class for what the client got wrong
    from vllm.exceptions import VLLMClientError
except ImportError:
    VLLMClientError = ValueError

VLLM_VERSION = Version(Version(vllm.__version__).base_version)
CLIENT_ERRORS = (VLLMClientError, ValueError)  # for instance a prompt that does not fit


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
