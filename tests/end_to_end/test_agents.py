"""The example of docs/agents.md, as it stands there, in a real run."""

import json
import tempfile
from pathlib import Path

import pytest
import yaml

from tests.forge import FORKED_ENGINES
from tests.house.docs_pages import Page
from tests.launching import ROOT, Run, make_model

pytestmark = [pytest.mark.server, pytest.mark.slow(60)]
STEPS = 3
BATCH = 8


def test_agent_of_the_page_trains(tmp_path):
    page = Page("docs/agents.md")
    agent, score = [block.text for block in page.blocks_of("python")]
    (tasks,) = [block.text for block in page.blocks_of("json")]
    entry = yaml.safe_load(page.blocks_of("yaml")[0].text)
    (tmp_path / "my_agent.py").write_text(agent)
    (tmp_path / "score.py").write_text(score)
    (tmp_path / "tasks.jsonl").write_text(tasks)
    recipe = yaml.safe_load((ROOT / "recipes/own_environment/cpu.yaml").read_text())
    recipe |= entry
    recipe |= {
        "max_steps": STEPS,
        "logging_steps": 1,
        "per_device_train_batch_size": BATCH,
    }
    del recipe["evaluations"]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    make_model(tmp_path / "model")
    # pytest's own folders are too long for sockets
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        path = str(tmp_path / "recipe.yaml")
        env = {"TMPDIR": short} | FORKED_ENGINES
        run = Run(tmp_path / "run", tmp_path / "model", recipe=path, env=env)
        with run:
            run.child.wait(400)
        assert list(Path(short).glob("ta*")) == []
    assert run.exit_code() == 0, run.output[-3000:]
    logs = logs_of(tmp_path / "run")
    assert summed(logs, "environment/agent/episodes/ended") >= STEPS * BATCH
    sampled = summed(logs, "environment/agent/tokens/sampled")
    assert sampled > 0
    explained = summed(logs, "environment/agent/tokens/sent")
    for name in {name for log in logs for name in log}:
        if name.startswith("environment/agent/tokens/dropped_"):
            explained += summed(logs, name)
    assert sampled == explained
    assert any("reward/length" in log for log in logs)
    given = int((tmp_path / "run/environments/agent.state").read_text())
    assert given >= STEPS * BATCH // 8


def logs_of(folder: Path) -> list[dict[str, float]]:
    records = map(json.loads, (folder / "run_log.jsonl").read_text().splitlines())
    return [record["logs"] for record in records if "logs" in record]


def summed(logs: list[dict[str, float]], name: str) -> float:
    return sum(log.get(name, 0.0) for log in logs)
