"""The tiny model that every test of the trainer uses, and an environment off the network. Which
tests run, and in what order, is in `tiers.py`."""

import gc
import os
import time

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.pop("TRL_ATROPOS_TOKEN", None)  # a user has not set one where a run starts its servers
os.environ.pop("TRL_ATROPOS_VERBOSITY", None)
# pytest-xdist sets it for its workers. A shell does not hand it on, and what commands print into a
# file is not broken into lines.
os.environ.pop("COLUMNS", None)

from pathlib import Path

import pytest

from tests.tiers import (
    FULL,
    TIME_ENDS,
    order,
    pytest_runtest_setup,  # noqa: F401 - pytest looks for it here
    pytest_terminal_summary,  # noqa: F401
)
from trl_atropos import protocol

gc.disable()  # a fifth of what the imports of all tests take; until the tests are collected
BEGAN = pytest.StashKey[float]()


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[BEGAN] = time.monotonic()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Notes how long a whole tier took, or all of them in one go, for `make house`. What is frozen
    would not be taken apart, and some libraries complain of that."""
    gc.unfreeze()
    config = session.config
    tier = config.option.markexpr or ("matrix" if FULL else "all")
    is_part = config.option.keyword or TIME_ENDS
    chosen = is_part or config.args_source is pytest.Config.ArgsSource.ARGS
    if not chosen and not hasattr(config, "workerinput"):
        config.cache.set(f"seconds/{tier}", time.monotonic() - config.stash[BEGAN])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not FULL:
        for item in items:
            if item.get_closest_marker("full"):
                item.add_marker(pytest.mark.skip(reason="needs TRL_ATROPOS_FULL=1"))
    order(items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Every `train()` collects garbage, which would look through all of torch again and again."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def no_kept_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in this process keeps its control token, which no other test may find."""
    monkeypatch.setattr(protocol, "_kept_token", "")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a byte-level Qwen3 with random weights."""
    from tests.rollout_factory import make_tiny_model
    from trl_atropos import trainer  # noqa: F401 - everything heavy is imported now

    gc.freeze()
    return make_tiny_model(tmp_path_factory.mktemp("model"))
