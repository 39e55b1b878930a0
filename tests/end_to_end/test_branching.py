"""Episodes whose template strips reasoning branch, and train, in a real run."""

import json
import tempfile

import numpy as np
import pytest
import yaml

from tests.forge import FORKED_ENGINES, WITHOUT_TORCH
from tests.launching import ROOT, Run, make_model
from trl_atropos.rollouts.spool import read_rollouts

pytestmark = [pytest.mark.server, pytest.mark.slow(60)]
STEPS = 3
BATCH = 8


def test_environment_with_stripped_reasoning_trains(tmp_path):
    """Each turn leaves the one before inside of its prompt, and all of its tokens know their
    version."""
    recipe = yaml.safe_load((ROOT / "recipes/own_environment/cpu.yaml").read_text())
    recipe |= {
        "environments": [
            {"path": str(ROOT / "tests/end_to_end/branching_environment.py"), "env": WITHOUT_TORCH}
        ],
        "max_steps": STEPS,
        "logging_steps": 1,
        "per_device_train_batch_size": BATCH,
    }
    del recipe["evaluations"]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    make_model(tmp_path / "model")
    # pytest's own folders are too long for sockets
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        env = {"TMPDIR": short} | FORKED_ENGINES
        path = str(tmp_path / "recipe.yaml")
        with Run(tmp_path / "run", tmp_path / "model", recipe=path, env=env) as run:
            run.child.wait(500)
    assert run.exit_code() == 0, run.output[-3000:]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["steps"] == STEPS
    assert summary["probe_max_abs_diff"] <= 1e-4
    episodes = []
    for path in (tmp_path / "run/rollouts").glob("rows-*.arrow"):
        episodes += read_rollouts(path)
    assert len(episodes) >= STEPS * BATCH
    for episode in episodes:
        assert episode.tree.parents.tolist() == [-1, 0, 1]
        assert not np.isnan(episode.logprobs[episode.mask]).any()
        assert episode.policy_version is not None
