"""Agents in real runs: the example of docs/agents.md, as it stands there, and one that resumes."""

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.agents.page_example import write_example
from tests.end_to_end.own_environment import WITHIN, run_with, starting
from trl_atropos.agents.episode_environment import TaskOrder

pytestmark = [pytest.mark.server, pytest.mark.slow(60)]
STEPS = 2
BATCH = 8


def test_agent_of_the_page_trains(tmp_path):
    (entry,) = write_example(tmp_path)["environments"]
    run_with(tmp_path, entry, {"max_steps": STEPS, "per_device_train_batch_size": BATCH})
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


AGENT = """
import json, os, sys, urllib.request

with open(os.environ["ASKED"], "a") as asked:
    asked.write(sys.argv[1] + "\\n")
body = {"model": "any", "messages": [{"role": "user", "content": sys.argv[1]}], "max_tokens": 8}
urllib.request.urlopen(
    urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
)
"""


def test_killed_run_resumes_with_the_next_task(tmp_path):
    """The trainer is killed after its first checkpoint, and nothing of the run is left."""
    tasks = [f"task {number}" for number in range(200)]
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    (tmp_path / "score.py").write_text(
        "def score(task, folder, output, episode):\n    return 1.0\n"
    )
    entry = {
        "command": ["python", "agent.py", "{task}"],
        "tasks": "tasks.jsonl",
        "score": "score.py:score",
        "group_size": 4,
        "env": {"ASKED": str(tmp_path / "asked")},
    }
    settings = {
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 1,
        "per_device_train_batch_size": BATCH,
    }
    state = tmp_path / "run/environments/agent.state"
    with starting(tmp_path, {"agent": entry}, settings) as run:
        # the first is whole when the second begins
        run.until((tmp_path / "run/checkpoint-2").exists, "a second checkpoint begins")
        os.killpg(run.child.pid, signal.SIGKILL)
        wait_for(lambda: not processes_with(run.marker))
    given = int(state.read_text())
    (tmp_path / "asked").unlink()
    resumes = ("--resume_from_checkpoint", "true")
    with starting(tmp_path, {"agent": entry}, settings, *resumes) as run:
        run.child.wait(WITHIN)
    assert run.exit_code() == 0, run.output[-3000:]
    order = TaskOrder(tasks, 42, None)  # the run's seed, by default
    all_tasks = [order.next() for _ in range(int(state.read_text()))]
    asked = set((tmp_path / "asked").read_text().splitlines())
    assert given >= 2
    assert asked
    assert asked <= set(all_tasks[given:])
    assert all_tasks[given] in asked


def processes_with(marker: str) -> list[int]:
    """Returns the processes whose variables have the marker of a run."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and marker.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def wait_for(condition, seconds: float = 200.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def logs_of(folder: Path) -> list[dict[str, float]]:
    records = map(json.loads, (folder / "run_log.jsonl").read_text().splitlines())
    return [record["logs"] for record in records if "logs" in record]


def summed(logs: list[dict[str, float]], name: str) -> float:
    return sum(log.get(name, 0.0) for log in logs)
