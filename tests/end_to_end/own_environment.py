"""Runs the recipe of `recipes/own_environment` on another environment, with a tiny model."""

import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.forge import FORKED_ENGINES
from tests.launching import ROOT, Run, make_model

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
    recipe = yaml.safe_load((ROOT / "recipes/own_environment/cpu.yaml").read_text())
    recipe |= {"environments": [environment], "logging_steps": 1, **settings}
    del recipe["evaluations"]
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    model = make_model(folder / "model")
    # pytest's own folders are too long for sockets
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        env = {"TMPDIR": short}
        if not on_gpu:
            env |= FORKED_ENGINES
        with Run(folder / "run", model, recipe=str(path), env=env, on_gpu=on_gpu) as run:
            try:
                run.child.wait(WITHIN)
            except subprocess.TimeoutExpired:
                pytest.fail(f"the run takes more than {WITHIN} s:\n{run.output[-3000:]}")
    assert run.exit_code() == 0, run.output[-3000:]
    return run
