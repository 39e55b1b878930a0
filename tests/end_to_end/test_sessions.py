"""The environment of docs/sessions.md, as it stands there, in a real run."""

import json
import tempfile
from pathlib import Path

import pytest
import yaml

from tests.forge import FORKED_ENGINES
from tests.house.docs_pages import Page
from tests.launching import ROOT, Run, make_model
from trl_atropos.rollouts.spool import read_rollouts

pytestmark = [pytest.mark.server, pytest.mark.slow(60)]
STEPS = 4


def test_environment_of_the_page_trains(tmp_path):
    task = tmp_path / "my_task"
    task.mkdir()
    template = (ROOT / "recipes/own_environment/environment.py").read_text().splitlines()
    assert template[-2] == 'if __name__ == "__main__":'
    (block,) = Page("docs/sessions.md").blocks_of("python")
    (task / "environment.py").write_text("\n".join([*template[:-2], block.text]))
    recipe = yaml.safe_load((ROOT / "recipes/own_environment/cpu.yaml").read_text())
    recipe |= {
        "environments": [str(task / "environment.py")],
        "max_steps": STEPS,
        "logging_steps": 1,
    }
    recipe |= {"per_device_train_batch_size": 16}
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
    records = map(json.loads, (tmp_path / "run/run_log.jsonl").read_text().splitlines())
    logs = [record["logs"] for record in records if "logs" in record]
    counted = [log.get("sessions/tokens", 0.0) for log in logs]
    assert sum(counted) > 0
    assert sum(log.get("sessions/ended_deleted", 0.0) for log in logs) >= STEPS * 16
    versions = _versions_in(tmp_path / "run")
    assert len(versions) >= STEPS * 16
    assert None not in versions and max(versions) > 0


def _versions_in(folder: Path) -> list[int | None]:
    """The version of each rollout that the run got."""
    versions = []
    for path in (folder / "rollouts").glob("rows-*.arrow"):
        versions += [rollout.policy_version for rollout in read_rollouts(path)]
    return versions
