"""Train language models with TRL's GRPO on rollouts from Atropos environments.

Names are imported on first use, so that the command line, the inference server and the launcher's signal handling do
not wait for torch.
"""

import importlib

__version__ = "0.1.0"

_EXPORTS = {
    "AtroposGRPOConfig": "config",
    "AtroposGRPOTrainer": "trainer",
    "AtroposSource": "rollouts.source",
    "NullPublisher": "weights.publisher",
    "PolicyPublisher": "weights.publisher",
    "ReplaySource": "rollouts.replay",
    "RolloutSource": "rollouts.source",
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str):
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
