"""Runs the recipe of `recipes/own_environment` on another environment, with a tiny model.

On a CPU, the main job and its server are forks: `test_wheel.py` runs this recipe as a user does.
"""

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import ROOT
from tests.forge import FORKED_ENGINES
from tests.launching import Run, make_model
from tests.server_process import running_server
from trl_atropos.protocol import TOKEN_VARIABLE

WITHIN = 800.0  # seconds


def run_with(
    folder: Path,
    environment: str | dict[str, Any],
    settings: Mapping[str, Any],
    on_gpu: bool = False,
) -> Run:
    """
    Trains a tiny model until the run's end, which must be a good one.

    Args:
        folder: for the run (`run`), its recipe and its model.
        environment: the entry of the recipe.
        settings: that the recipe has in place of its own.
        on_gpu: on the first GPU, in place of the CPU.
    """
    with starting(folder, environment, settings, on_gpu=on_gpu) as run:
        try:
            run.child.wait(WITHIN)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the run takes more than {WITHIN} s:\n{run.output[-3000:]}")
    assert run.exit_code() == 0, run.output[-3000:]
    return run


@contextlib.contextmanager
def starting(
    folder: Path,
    environment: str | dict[str, Any],
    settings: Mapping[str, Any],
    *flags: str,
    on_gpu: bool = False,
) -> Iterator[Run]:
    """Starts the run of `run_with`. Nothing of it is left in its TMPDIR at the end."""
    recipe = yaml.safe_load((ROOT / "recipes/own_environment/cpu.yaml").read_text())
    recipe |= {"environments": [environment], "logging_steps": 1, **settings}
    del recipe["evaluations"]
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    model = folder / "model"
    if not model.exists():
        make_model(model)
    # pytest's own folders are too long for sockets
    with tempfile.TemporaryDirectory(dir="/tmp") as short, contextlib.ExitStack() as stack:
        env = {"TMPDIR": short}
        if not on_gpu:
            server = stack.enter_context(running_server(model, folder / "server"))
            flags += ("--start_vllm", "false", "--vllm_server_base_url", server.url)
            env |= FORKED_ENGINES | {TOKEN_VARIABLE: server.token}
        run = Run(
            folder / "run",
            model,
            recipe=str(path),
            flags=flags,
            env=env,
            on_gpu=on_gpu,
            forked=not on_gpu,
        )
        with run:
            yield run
        assert list(Path(short).glob("ta*")) == []
