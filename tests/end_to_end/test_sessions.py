"""The environment of docs/sessions.md, as it stands there, in a real run."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.target import PROTOCOL
from benchmarks.target_sides import differing_logprobs
from recipes.quickstart.make_model import make_model
from tests import ROOT
from tests.end_to_end.own_environment import run_with
from tests.house.docs_pages import Page
from tests.launching import MODEL_SEED
from trl_atropos.rollouts.spool import read_rollouts

pytestmark = [pytest.mark.server, pytest.mark.slow(60)]
STEPS = 4


def test_environment_of_the_page_trains(tmp_path):
    environment = write_page(tmp_path / "my_task")
    run_with(tmp_path, environment, {"max_steps": STEPS, "per_device_train_batch_size": 16})
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
    settings = PROTOCOL.bitwise | {
        "max_steps": 30,
        "per_device_train_batch_size": 128,
        "max_completion_length": 64,
        "dtype": "bfloat16",
    }
    environment = write_page(tmp_path / "my_task", max_tokens=64)
    # the kernels for GPUs are made for heads as wide as those of real models
    make_model(str(tmp_path / "model"), MODEL_SEED, head_dim=128)
    run_with(tmp_path, environment, settings, on_gpu=True)
    counted = differing_logprobs(tmp_path / "run")
    print(f"\nsessions: {counted}")
    assert counted["tokens"] >= 100_000
    assert counted["differ"] == 0


def write_page(folder: Path, max_tokens: int = 16) -> str:
    """Writes the page's environment. Returns its path."""
    folder.mkdir()
    template = (ROOT / "recipes/own_environment/environment.py").read_text().splitlines()
    assert template[-2] == 'if __name__ == "__main__":'
    (block,) = Page("docs/sessions.md").blocks_of("python")
    assert "max_tokens=16" in block.text
    code = block.text.replace("max_tokens=16", f"max_tokens={max_tokens}")
    script = folder / "environment.py"
    script.write_text("\n".join([*template[:-2], code]))
    return str(script)


def _versions_in(folder: Path) -> list[int | None]:
    """The version of each rollout that the run got."""
    versions = []
    for path in (folder / "rollouts").glob("rows-*.arrow"):
        versions += [rollout.policy_version for rollout in read_rollouts(path)]
    return versions
