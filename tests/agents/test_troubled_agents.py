"""An agent crashes, hangs, floods its output, forks, calls in parallel or never calls: each is told
apart and counted, nothing is left running, and each sampled token is accounted for."""

import asyncio
import json
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from atroposlib.envs.base import APIServerConfig

from tests.server_process import Server
from trl_atropos.agents import episode_environment
from trl_atropos.agents.agent_environment import AgentEnvironment
from trl_atropos.agents.episode_environment import EpisodeConfig
from trl_atropos.environment_kinds import AgentEntry
from trl_atropos.protocol import TOKEN_VARIABLE, SessionsReply
from trl_atropos.rollouts.wire import parse_group
from trl_atropos.services.environment_metrics import ALL_FAILED, COUNTS, FILE_VARIABLE

pytestmark = [pytest.mark.server, pytest.mark.seconds(15)]
HERE = Path(__file__).parent

# What becomes of each behaviour. One that fails is tried twice: a group here has one episode.
OUTCOMES = {
    "fine": "ended",
    "parallel": "ended",
    "orphans": "ended",
    "walk away": "ended",
    "silent": "no_call",
    "broken": "failed",
    "crash": "failed",
    "hang": "timeout",
    "flood": "flooded",
    "bad score": "score_failed",
}


def environment(server: Server, mark: str, key: str = "none", **settings: Any) -> AgentEnvironment:
    """The environment of an entry with the troubled agent, as a run would start it."""
    entry = {
        "command": ["{python}", str(HERE / "troubled_agent.py"), "{task}"],
        "tasks": f"{HERE / 'nowhere.py'}:tasks",
        "score": f"{HERE / 'troubled_score.py'}:score",
        "group_size": 1,
        "timeout": 20.0,  # a busy machine starts a Python in several seconds
        "env": {"MARK": mark},
    } | settings
    entry = AgentEntry.model_validate(entry).model_dump(mode="json")
    config, _ = AgentEnvironment.config_init()
    config = EpisodeConfig.model_validate(
        config.model_dump()
        | {
            "tokenizer_name": server.model,
            "entry": entry,
            "group_size": entry["group_size"],
            "max_num_workers": 1,
        }
    )
    place = APIServerConfig(
        base_url=f"{server.url}/v1", model_name=server.model, server_type="vllm", api_key=key
    )
    return AgentEnvironment(config, [place, place], slurm=False)


def processes_with(mark: str) -> list[str]:
    """Command lines of the processes whose variables have the mark."""
    lines = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes():
                lines.append((entry / "cmdline").read_bytes().decode())
        except OSError:  # it has just ended
            continue
    return lines


def session_counts(server: Server) -> Counter:
    reply = server.control("GET", "/sessions")
    return Counter(SessionsReply.model_validate_json(reply.content).counts)


async def try_all(env: AgentEnvironment, tasks: list[str]) -> list[Any]:
    """Collects a group of each task, side by side. Returns the groups and errors."""
    env.read_tasks = lambda: _value(tasks)
    await env.setup()
    calls = [env.collect_trajectories(task) for task in tasks]
    groups = await asyncio.gather(*calls, return_exceptions=True)
    await env.score.close()
    return groups


async def _value(value: Any) -> Any:
    return value


@pytest.mark.slow
@pytest.mark.parametrize(
    "times", [3, pytest.param(71, marks=[pytest.mark.full, pytest.mark.timeout(3000)])]
)
def test_trouble_is_told_apart_and_accounted_for(server, tmp_path, monkeypatch, times):
    """With 3 of each behaviour, there are 42 episodes; with 71, 994."""
    metrics = tmp_path / "metrics.jsonl"
    monkeypatch.setenv(FILE_VARIABLE, str(metrics))
    monkeypatch.setenv(TOKEN_VARIABLE, server.token)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    mark = uuid.uuid4().hex
    before = session_counts(server)
    env = environment(server, mark)
    tasks = [*OUTCOMES] * times
    groups = asyncio.run(try_all(env, tasks))

    expected = Counter()
    for outcome in OUTCOMES.values():
        tries = 1 if outcome == "ended" else 2
        expected[f"episodes/{outcome}"] += tries * times
    counts = Counter()
    for line in metrics.read_text().splitlines():
        counts.update(json.loads(line)[COUNTS])
    assert counts == env.accounting.totals
    episodes = {name: count for name, count in counts.items() if name.startswith("episodes/")}
    assert episodes == dict(expected)

    for task, group in zip(tasks, groups):
        if OUTCOMES[task] == "ended":
            (score,) = group[0]["scores"]
            calls = {"parallel": 4, "walk away": 2}.get(task, 1)
            assert score == calls
            assert "rewards" in group[0]["overrides"][0]
        else:
            assert f"2 {OUTCOMES[task]}" in str(group)

    assert processes_with(mark) == []
    assert not list(tmp_path.glob("episodes-*/*"))
    after = session_counts(server)
    assert after["opened"] - before["opened"] == expected.total()
    assert counts["tokens/sampled"] == after["tokens"] - before["tokens"]
    explained = 0
    for name, count in counts.items():
        if name == "tokens/sent" or name.startswith("tokens/dropped_"):
            explained += count
    assert counts["tokens/sampled"] == explained
    sent = 0
    for group in groups:
        if isinstance(group, tuple):
            (overrides,) = group[0]["overrides"]
            sent += sum(token != -100 for token in group[0]["masks"][0])
            for branch in overrides["branches"]:
                sent += sum(token != -100 for token in branch["masks"])
    assert counts["tokens/sent"] == sent > 0


@pytest.mark.parametrize("key", ["none", "evaluation-of-a-test"])
def test_failures_may_have_the_score_0(server, tmp_path, monkeypatch, caplog, key):
    """With `score_0`, an agent that fails is trained, and the log says if all fail. An evaluation
    counts one that never called, too: its task is not solved."""
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "metrics.jsonl"))
    monkeypatch.setenv(TOKEN_VARIABLE, server.token)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    on_failure = "score_0" if key == "none" else "drop"
    env = environment(server, uuid.uuid4().hex, key, on_failure=on_failure)
    tasks = ["crash", "silent", "bad score", "fine"]
    crash, silent, bad_score, fine = asyncio.run(try_all(env, tasks))
    assert crash[0]["scores"] == [0.0]
    assert any(token != -100 for token in crash[0]["masks"][0])
    assert "2 score_failed" in str(bad_score)
    assert "troubled_score.py:" in bad_score.environment_place
    assert fine[0]["scores"] == [1.0]
    if key == "none":
        assert "2 no_call" in str(silent)
        assert "does it read OPENAI_BASE_URL" in str(silent)
        assert silent.environment_place == "its entry in the recipe"
    else:
        assert silent[0]["scores"] == [0.0]
        group = parse_group(silent[0])
        assert not group.trained[0].any()
    if key == "none":
        assert ALL_FAILED not in caplog.text
        monkeypatch.setattr(episode_environment, "FIRST_EPISODES", 2)
        env = environment(server, uuid.uuid4().hex, key, on_failure=on_failure)
        asyncio.run(try_all(env, ["crash"] * 4))
        (line,) = [text for text in caplog.messages if text.startswith(ALL_FAILED)]
        assert "2 of 2, and has the score 0 (`on_failure: score_0`). The last one: " in line
        assert "exit code" in line
    told = json.loads(json.dumps(fine[0]["messages"][0]))
    roles = [message["role"] for message in told]
    assert roles == ["episode", "call 1"]
