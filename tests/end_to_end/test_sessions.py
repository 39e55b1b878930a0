"""The environment of docs/sessions.md, as it stands there, in a real run."""

import json
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
import yaml

from benchmarks.target import PROTOCOL
from benchmarks.target_sides import differing_logprobs
from tests.forge import FORKED_ENGINES
from tests.house.docs_pages import Page
from tests.launching import ROOT, Run, make_model
from trl_atropos.rollouts.spool import read_rollouts

pytestmark = [pytest.mark.server, pytest.mark.slow(60)]
STEPS = 4
TAKES = 300  # seconds at most


def test_environment_of_the_page_trains(tmp_path):
    recipe = yaml.safe_load((ROOT / "recipes/own_environment/cpu.yaml").read_text())
    recipe |= {"max_steps": STEPS, "logging_steps": 1, "per_device_train_batch_size": 16}
    run = run_page(tmp_path, recipe, FORKED_ENGINES)
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.timeout(900)
def test_gpu_computes_the_logprobs_of_sessions(tmp_path):
    """Prints how many log-probabilities of sessions differ from the trainer's with `numerics:
    bitwise`. There must be none, of at least 100,000."""
    recipe = yaml.safe_load((ROOT / "recipes/own_environment/cpu.yaml").read_text())
    recipe |= PROTOCOL.bitwise
    recipe |= {
        "max_steps": 20,
        "logging_steps": 1,
        "per_device_train_batch_size": 128,
        "max_completion_length": 64,
        "dtype": "bfloat16",
    }
    run = run_page(tmp_path, recipe, {}, max_tokens=64, on_gpu=True)
    assert run.exit_code() == 0, run.output[-3000:]
    counted = differing_logprobs(tmp_path / "run")
    print(f"\nsessions: {counted}")
    assert counted["tokens"] >= 100_000
    assert counted["differ"] == 0


def run_page(
    folder: Path, recipe: dict, env: dict[str, str], max_tokens: int = 16, on_gpu: bool = False
) -> Run:
    """Trains a tiny model on the page's environment. Returns the run, which has ended."""
    task = folder / "my_task"
    task.mkdir()
    template = (ROOT / "recipes/own_environment/environment.py").read_text().splitlines()
    assert template[-2] == 'if __name__ == "__main__":'
    (block,) = Page("docs/sessions.md").blocks_of("python")
    assert "max_tokens=16" in block.text
    code = block.text.replace("max_tokens=16", f"max_tokens={max_tokens}")
    (task / "environment.py").write_text("\n".join([*template[:-2], code]))
    recipe = recipe | {"environments": [str(task / "environment.py")]}
    recipe.pop("evaluations", None)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    make_model(folder / "model")
    # pytest's own folders are too long for sockets
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        env = {"TMPDIR": short} | env
        path = str(folder / "recipe.yaml")
        run = Run(folder / "run", folder / "model", recipe=path, env=env, on_gpu=on_gpu)
        with run:
            try:
                run.child.wait(TAKES)
            except subprocess.TimeoutExpired:
                pytest.fail(f"the run takes more than {TAKES} s:\n{run.output[-3000:]}")
    return run


def _versions_in(folder: Path) -> list[int | None]:
    """The version of each rollout that the run got."""
    versions = []
    for path in (folder / "rollouts").glob("rows-*.arrow"):
        versions += [rollout.policy_version for rollout in read_rollouts(path)]
    return versions
