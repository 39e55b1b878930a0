"""Episodes whose template strips reasoning branch, and train, in a real run."""

import json

import numpy as np
import pytest

from tests import ROOT
from tests.end_to_end.own_environment import run_with
from tests.forge import WITHOUT_TORCH
from trl_atropos.rollouts.spool import read_rollouts

pytestmark = [pytest.mark.server, pytest.mark.slow(60)]
STEPS = 3
BATCH = 8


def test_environment_with_stripped_reasoning_trains(tmp_path):
    """Each turn leaves the one before inside of its prompt, and all of its tokens know their
    version."""
    script = ROOT / "tests/end_to_end/branching_environment.py"
    entry = {"path": str(script), "env": WITHOUT_TORCH}
    run_with(tmp_path, entry, {"max_steps": STEPS, "per_device_train_batch_size": BATCH})
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
