"""The tiny model that every test of the trainer uses, and an environment that stays off the network."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a byte-level Qwen3 with random weights."""
    from tests.rollout_factory import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model"))
