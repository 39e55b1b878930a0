"""Patches vLLM in the process of its engine: an entry point of the group `vllm.general_plugins`.

vLLM loads it in each of its processes, those of other servers too: TRL's own, for instance. It does
something only in the engine of a server that `launch.py` has started.
"""

import multiprocessing
import os

from trl_atropos.server.processes import ENGINE_PROCESS, SERVER_VARIABLE


def load() -> None:
    """Patches this process if it is an engine of this package's server. vLLM calls it."""
    is_engine = multiprocessing.current_process().name.startswith(ENGINE_PROCESS)
    if is_engine and os.environ.get(SERVER_VARIABLE):
        patch_engine()


def patch_engine() -> None:
    """Patches what schedules requests, in this process. The second call does nothing."""
    from trl_atropos.server import compat, sampled_logprobs

    compat.reset_only_cached_blocks()
    sampled_logprobs.install()
