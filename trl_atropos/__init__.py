"""Train language models with TRL's GRPO on rollouts from Atropos environments.

Names are imported on first use, so that the command line, the inference server and the launcher's
signal handling do not wait for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from trl_atropos import logging, privacy

if TYPE_CHECKING:
    from trl_atropos.config import AtroposGRPOConfig
    from trl_atropos.embedded import RunningServices, run, start_services
    from trl_atropos.rollouts.episodes import episode, session_episode
    from trl_atropos.rollouts.replay import ReplaySource
    from trl_atropos.rollouts.source import AtroposSource, RolloutSource
    from trl_atropos.trainer import AtroposGRPOTrainer
    from trl_atropos.weights.publisher import NullPublisher, PolicyPublisher

privacy.close_if_asked()

__version__ = "0.1.0"

__all__ = [
    "AtroposGRPOConfig",
    "AtroposGRPOTrainer",
    "AtroposSource",
    "NullPublisher",
    "PolicyPublisher",
    "ReplaySource",
    "RolloutSource",
    "RunningServices",
    "__version__",
    "episode",
    "logging",
    "run",
    "session_episode",
    "start_services",
]

_MODULES = {
    "AtroposGRPOConfig": "config",
    "AtroposGRPOTrainer": "trainer",
    "AtroposSource": "rollouts.source",
    "NullPublisher": "weights.publisher",
    "PolicyPublisher": "weights.publisher",
    "ReplaySource": "rollouts.replay",
    "RolloutSource": "rollouts.source",
    "RunningServices": "embedded",
    "episode": "rollouts.episodes",
    "run": "embedded",
    "session_episode": "rollouts.episodes",
    "start_services": "embedded",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
