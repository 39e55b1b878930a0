"""A real Atropos API on a free loopback port, and groups to send it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests

from tests.server_process import free_port
from trl_atropos.rollouts.intake import Intake
from trl_atropos.rollouts.rollout import Rollout
from trl_atropos.rollouts.source import RunInfo
from trl_atropos.rollouts.tree import Tree
from trl_atropos.rollouts.wire import parse_group
from trl_atropos.rollouts.wire_values import RejectedGroup

DATA = Path(__file__).parent / "data"
START_TIMEOUT = 60.0  # seconds; importing the API takes a few on a loaded machine


class Api:
    """The Atropos API as a subprocess."""

    def __init__(self, port: int, module: str = "atroposlib.cli.run_api"):
        self.url = f"http://127.0.0.1:{port}"
        self._command = [sys.executable, "-m", module, "--host", "127.0.0.1", "--port", str(port)]

    def start(self) -> None:
        self._process = subprocess.Popen(
            self._command,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + START_TIMEOUT
        while time.monotonic() < deadline:
            try:
                requests.get(self.url, timeout=1)
                return
            except (requests.ConnectionError, requests.Timeout):
                assert self._process.poll() is None, (
                    f"the Atropos API exited with {self._process.returncode}"
                )
                time.sleep(0.1)
        raise TimeoutError(f"the Atropos API did not answer at {self.url} within {START_TIMEOUT} s")

    def stop(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(timeout=10)

    def deliver(self, *groups: dict[str, Any]) -> None:
        """What an environment does with scored groups."""
        requests.post(f"{self.url}/scored_data_list", json=groups, timeout=10).raise_for_status()

    def deliver_text(self, body: str) -> None:
        """Deliver a group that only a lenient JSON writer can express, such as one with a NaN."""
        headers = {"Content-Type": "application/json"}
        requests.post(
            f"{self.url}/scored_data", data=body, headers=headers, timeout=10
        ).raise_for_status()

    def get(self, path: str) -> Any:
        return requests.get(self.url + path, timeout=10).json()

    def post(self, path: str, body: Any) -> Any:
        return requests.post(self.url + path, json=body, timeout=10).json()

    def reset(self) -> None:
        requests.get(f"{self.url}/reset_data", timeout=10).raise_for_status()


@pytest.fixture(scope="session")
def shared_api() -> Iterator[Api]:
    api = Api(free_port())
    api.start()
    yield api
    api.stop()


@pytest.fixture
def api(shared_api: Api) -> Api:
    """An Atropos API that holds no trainer, no environment and no group."""
    shared_api.reset()
    return shared_api


@pytest.fixture
def restartable_api() -> Iterator[Api]:
    """An Atropos API of the test's own, never registered at, to stop and start."""
    api = Api(free_port())
    api.start()
    yield api
    api.stop()


@pytest.fixture
def naming_api() -> Iterator[Api]:
    """The API as a run starts it, which tells the environments' names."""
    api = Api(free_port(), "trl_atropos.rollouts.api")
    api.start()
    yield api
    api.stop()


def make_group(*scores: float, **fields: Any) -> dict[str, Any]:
    """A group of one sequence per score: prompt 7, 8 and a completion of two tokens, the first
    telling the score."""
    tokens = [[7, 8, 10 + int(score), 9] for score in scores]
    group = {
        "tokens": tokens,
        "masks": [[-100, -100, *sequence[2:]] for sequence in tokens],
        "scores": list(scores),
        "inference_logprobs": [[1.0, 1.0, -0.5, -0.25] for _ in scores],
        "env_id": 0,
    }
    return group | fields


def text_of(group: Any) -> bytes:
    """As it stands in the reply of an API."""
    return json.dumps(group).encode()


def admitted(group: Any, **settings: Any) -> list[Rollout]:
    """What the door makes of a group: as Python objects and as the bytes that the API sends, which
    must agree."""
    asked = {
        "max_sequence_length": 64,
        "temperature": 1.0,
        "single_row_groups": "refuse",
    } | settings
    outcomes: list[list[Rollout] | RejectedGroup] = []
    for raw in (group, text_of(group)):
        try:
            rollouts, _ = Intake(**asked).rollouts_of(parse_group(raw), "0")
            outcomes.append(rollouts)
        except RejectedGroup as refusal:
            outcomes.append(refusal)
    first, second = outcomes
    if isinstance(first, Exception):
        assert type(first) is type(second), f"{first!r} as objects, {second!r} as bytes"
        raise first
    assert not isinstance(second, Exception), f"only as bytes: {second}"
    assert_same_rows(first, second)
    return second


def assert_same_rows(
    some: list[Rollout], others: list[Rollout], *, but: tuple[str, ...] = ()
) -> None:
    """All fields are equal, to the bit, and of the types that `Rollout` promises; `but` names
    exceptions."""
    assert len(some) == len(others)
    for one, other in zip(some, others):
        for name in (field.name for field in fields(Rollout) if field.name not in but):
            mine, theirs = getattr(one, name), getattr(other, name)
            if isinstance(mine, Tree) and isinstance(theirs, Tree):
                assert same_trees(mine, theirs), name
            elif isinstance(mine, np.ndarray):
                assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape), name
                assert np.array_equal(mine, theirs, equal_nan=mine.dtype.kind == "f"), name
            else:
                assert mine == theirs, name


def same_trees(some: Tree, other: Tree) -> bool:
    names = [field.name for field in fields(Tree)]
    return all(np.array_equal(getattr(some, name), getattr(other, name)) for name in names)


@pytest.fixture
def run_info(tmp_path: Path) -> Callable[..., RunInfo]:
    def make(**changes: Any) -> RunInfo:
        fields: dict[str, Any] = {
            "batch_size": 4,
            "max_sequence_length": 64,
            "temperature": 1.0,
            "starting_step": 0,
            "max_steps": 10,
            "output_dir": str(tmp_path / "run"),
            "save_steps": 5,
            "run_name": "test",
        }
        return RunInfo(**(fields | changes))

    return make
