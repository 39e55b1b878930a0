"""The tiny model that every test of the trainer uses, and an environment that stays off the network."""

import gc
import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder of a byte-level Qwen3 with random weights."""
    from tests.rollout_factory import make_tiny_model
    from trl_atropos import trainer  # noqa: F401 - everything heavy is imported now

    gc.freeze()  # every `train()` collects garbage, which would look through all of torch again and again
    yield make_tiny_model(tmp_path_factory.mktemp("model"))
    gc.unfreeze()
