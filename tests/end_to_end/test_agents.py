"""Agents in real runs: the example of docs/agents.md, as it stands there, and a run that is killed
and resumes, whose agents look around."""

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests import ROOT
from tests.agents.page_example import write_example
from tests.end_to_end import prying_agent
from tests.end_to_end.own_environment import run_with
from tests.forge import FORKED_ENGINES
from tests.launching import Run, free_urls, make_model
from trl_atropos.agents.episode_environment import TaskOrder
from trl_atropos.protocol import session_token

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


# Processes of a run, by a part of their command lines. The first that fits is it.
KINDS = {
    "guard": "/services/guard.py",
    "launcher": "/trl-atropos train ",
    "trainer": "-m trl_atropos.train ",
    "server": "trl_atropos.server.launch ",
    "engine": "VLLM::EngineCore",
    "helper of the server": "multiprocessing.resource_tracker",
    "API": "trl_atropos.rollouts.api ",
    "environment": "/environment_site/run.py",
    "score": "/agents/function_worker.py",
    "agent": "prying_agent.py ",
    "program of an agent": " ".join(prying_agent.CHILD),
}
CHILD = "program of an agent"
ALL_WAYS = [*prying_agent.WAYS]
OPEN = {"agent", "program of an agent", "helper of the server"}  # says docs/agents.md


@dataclass
class KilledRun:
    """A run whose trainer was killed after its first checkpoint, and what its agents saw."""

    folder: Path  # of the recipe
    tasks: list[str]
    token: str
    seen: list[dict]  # the lines that `prying_agent.py` wrote
    given: int  # tasks until then
    left: list[str]  # of the run, afterwards


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> KilledRun:
    """The run is of a user who is not root, with agents that look around. Its server spawns the
    engine: a forked one would be closed as the server is."""
    folder = tmp_path_factory.mktemp("killed")
    tasks = [f"task {number}" for number in range(200)]
    shutil.copy(prying_agent.__file__, folder)
    (folder / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    (folder / "score.py").write_text("def score(task, folder, output, episode):\n    return 1.0\n")
    entry = {
        "command": ["python", "prying_agent.py", "{task}"],
        "tasks": "tasks.jsonl",
        "score": "score.py:score",
        "group_size": 4,
        "env": {"ASKED": str(folder / "asked"), "PRIED": str(folder / "pried")},
    }
    recipe = yaml.safe_load((ROOT / "recipes/own_environment/cpu.yaml").read_text())
    atropos_url, vllm_url = free_urls(2)
    recipe |= {
        "model_name_or_path": str(folder / "model"),
        "output_dir": str(folder / "run"),
        "atropos_url": atropos_url,
        "vllm_server_base_url": vllm_url,
        "environments": [{"agent": entry}],
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 1,
        "per_device_train_batch_size": BATCH,
    }
    del recipe["evaluations"]
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    make_model(folder / "model")
    with run_of(folder, {}) as run:
        run.until((folder / "pried").exists, "an agent looks around")
        token = run.token()
        # the first is whole when the second begins
        run.until((folder / "run/checkpoint-2").exists, "a second checkpoint begins")
        os.killpg(run.child.pid, signal.SIGKILL)
        wait_for(lambda: not processes_with(run.marker))
        left = run.left()
    seen = [json.loads(line) for line in (folder / "pried").read_text().splitlines()]
    # the agents' own program has lived too short to be noticed
    known = [*run.all_processes()]
    own = [process["pid"] for process in seen if kind_of(process["command"]) == CHILD]
    seen = [process for process in seen if process["pid"] in known + own]
    given = int((folder / "run/environments/agent.state").read_text())
    return KilledRun(folder, tasks, token, seen, given, left)


@contextlib.contextmanager
def run_of(folder: Path, variables: dict[str, str], *flags: str) -> Iterator[Run]:
    """Runs the recipe of a folder, as a user who is not root."""
    # pytest's own folders are too long for sockets
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        env = {"TMPDIR": short} | variables
        python = sys.executable
        script = str(Path(python).with_name("trl-atropos"))
        recipe = str(folder / "recipe.yaml")
        command = [python, "-m", "tests.unprivileged", python, script, "train", recipe, *flags]
        with Run(folder / "run", folder / "model", command=command, env=env) as run:
            yield run


def test_killed_run_resumes_with_the_next_task(killed):
    """The trainer is killed after its first checkpoint, and nothing of the run is left."""
    assert killed.left == []
    (killed.folder / "asked").unlink()
    flags = ("--resume_from_checkpoint", "true")
    with run_of(killed.folder, FORKED_ENGINES, *flags) as run:
        run.child.wait(400)
    assert run.exit_code() == 0, run.output[-3000:]
    order = TaskOrder(killed.tasks, 42, None)  # the run's seed, by default
    given = int((killed.folder / "run/environments/agent.state").read_text())
    all_tasks = [order.next() for _ in range(given)]
    asked = set((killed.folder / "asked").read_text().splitlines())
    assert killed.given >= 2
    assert asked
    assert asked <= set(all_tasks[killed.given :])
    assert all_tasks[killed.given] in asked


def test_agent_of_same_user_reads_only_what_the_page_lists(killed):
    """Everybody's command line is readable; of the rest, only what docs/agents.md names."""
    ways: dict[str, list[list[str]]] = {kind: [] for kind in KINDS}
    for process in killed.seen:
        kind = kind_of(process["command"])
        assert kind is not None, process["command"]
        ways[kind].append(process["open"])
    assert [kind for kind in KINDS if not ways[kind]] == []
    for kind in KINDS:
        expected = ALL_WAYS if kind in OPEN else []
        assert all(found == expected for found in ways[kind]), (kind, ways[kind])


def test_agent_of_same_user_finds_no_token(killed):
    """Neither in what it can read of processes nor in the run's files."""
    assert len(killed.token) > 20
    secrets = (killed.token, session_token(killed.token))
    for process in killed.seen:
        for secret in secrets:
            assert secret not in process["command"] + process["variables"], process["command"]
    files = [path for path in (killed.folder / "run").rglob("*") if path.is_file()]
    assert any(path.suffix == ".log" for path in files)
    for path in files:
        content = path.read_bytes()
        assert not any(secret.encode() in content for secret in secrets), path


def kind_of(command: str) -> str | None:
    """Returns what a process of a run is, by its command line."""
    for kind, part in KINDS.items():
        if part in command:
            return kind
    return None


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
