"""An entry `verifiers` talks to a worker in another interpreter, which tells mistakes apart.

CI has no verifiers, which needs other versions of what we need. With the variable
`TRL_ATROPOS_VERIFIERS_PYTHON`, the Python of a virtual environment with `verifiers` 0.4 and `uv`, the
other tests play a taskset of it, too.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.server_process import Server
from trl_atropos.agents.line_process import LineProcess, ProcessEnded
from trl_atropos.agents.verifiers_environment import VerifiersEnvironment
from trl_atropos.environment_entry import EnvironmentSpec, EvaluationSpec, parse_entries
from trl_atropos.environment_verifiers import WORKER, VerifiersEntry
from trl_atropos.errors import RecipeError
from trl_atropos.rollouts.episodes import session_episode
from trl_atropos.session_client import SessionClient

HERE = Path(__file__).parent
PYTHON_VARIABLE = "TRL_ATROPOS_VERIFIERS_PYTHON"
PYTHON = os.environ.get(PYTHON_VARIABLE, "")
TASKSET = "letters_taskset"  # beside this file

needs_verifiers = pytest.mark.skipif(
    not PYTHON, reason=f"{PYTHON_VARIABLE} names no interpreter with verifiers 0.4"
)


def entry_of(**settings: Any) -> VerifiersEntry:
    """An entry whose interpreter finds the taskset beside this file."""
    variables = {"PYTHONPATH": str(HERE)}
    if "SSL_CERT_FILE" in os.environ:  # `uv` downloads what verifiers' harness needs
        variables["SSL_CERT_FILE"] = "inherit"
    entry = {"id": TASKSET, "python": PYTHON or sys.executable, "env": variables, "timeout": 60}
    return VerifiersEntry.model_validate(entry | settings)


def answer_of(request: dict, **variables: str) -> dict:
    """The worker's answer to a request, in our own interpreter."""
    ended = subprocess.run(
        [sys.executable, WORKER],
        input=json.dumps(request) + "\n",
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], **variables},
        check=True,
    )
    return json.loads(ended.stdout)


# ---------------------------------------------------------------------------- without verifiers


def test_missing_verifiers_is_reported_with_its_installation():
    answer = answer_of({"id": 7, **entry_of().opening(peek=True)})
    assert answer["id"] == 7
    refusal = answer["refusal"]
    assert refusal["what"] == f"verifiers is not installed for {sys.executable}"
    assert f"{sys.executable} -m pip install 'verifiers>=0.4,<0.5'" in refusal["fix"]


def test_older_verifiers_is_reported_with_its_version(tmp_path):
    folder = tmp_path / "verifiers-0.1.14.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: verifiers\nVersion: 0.1.14\n")
    request = {"id": 1, **entry_of().opening(peek=True)}
    refusal = answer_of(request, PYTHONPATH=str(tmp_path))["refusal"]
    assert "verifiers 0.1.14 is installed" in refusal["what"]
    assert "pip install" in refusal["fix"]


def test_check_and_start_refuse_an_interpreter_without_verifiers():
    with pytest.raises(RecipeError, match="Environment 'mine': verifiers is not installed") as seen:
        entry_of(python=sys.executable).probe("Environment 'mine'")
    assert seen.value.code == "verifiers"


def test_worker_that_cannot_start_is_reported(tmp_path):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho no libpython >&2\nexit 127\n")
    program.chmod(0o755)
    with pytest.raises(RecipeError, match="no libpython") as seen:
        entry_of(python=str(program)).probe("Environment 'mine'")
    assert seen.value.seen == "exit code 127"


def test_entry_is_read_as_seen_from_the_recipe(tmp_path):
    settings = {"id": "wordle", "args": {"agent": {"max_turns": 4}}, "python": "venv/bin/python"}
    (spec,) = parse_entries(
        "environments", [{"verifiers": settings}], EnvironmentSpec, str(tmp_path)
    )
    assert spec.name == "verifiers"
    assert spec.verifiers.python == f"{tmp_path}/venv/bin/python"
    assert spec.line == 'verifiers: wordle agent={"max_turns": 4}'
    assert spec.config["entry"]["args"] == {"agent": {"max_turns": 4}}


def test_evaluation_takes_the_same_entry():
    entry = {"verifiers": {"id": "wordle"}, "problems": 20, "samples": 2}
    (spec,) = parse_entries("evaluations", [entry], EvaluationSpec)
    assert spec.config["group_size"] == 2


def test_unknown_setting_of_the_entry_is_reported():
    entry = {"verifiers": {"id": "wordle", "arguments": {}}}
    with pytest.raises(RecipeError, match="verifiers: arguments") as seen:
        parse_entries("environments", [entry], EnvironmentSpec)
    assert "`args`" in seen.value.fix


ECHO = """
import json, sys, time
lines = []
for line in sys.stdin:
    request = json.loads(line)
    if request["text"] == "hang":
        time.sleep(60)
    if request["text"] == "end":
        sys.exit(3)
    lines.append(request)
    if len(lines) == 2:  # in the other order
        for request in reversed(lines):
            print(json.dumps(request), flush=True)
"""


def ask_echo(*texts: str, timeout: float = 30.0) -> list:
    """Answers, or errors, of a program that is asked several things at once."""

    async def ask() -> list:
        variables = {"PATH": os.environ["PATH"]}
        process = await LineProcess.start([sys.executable, "-c", ECHO], variables, str(HERE))
        calls = [process.ask({"text": text}, timeout) for text in texts]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        await process.end()
        return answers

    return asyncio.run(ask())


def test_answers_reach_their_requests_in_any_order():
    first, second = ask_echo("one", "two")
    assert first == {"id": 1, "text": "one"}
    assert second == {"id": 2, "text": "two"}


def test_end_of_a_program_ends_its_calls():
    for error in ask_echo("one", "end"):
        assert isinstance(error, ProcessEnded)
        assert "exit code 3" in str(error)


def test_hanging_program_is_ended():
    for error in ask_echo("one", "hang", timeout=2.0):
        assert isinstance(error, ProcessEnded)


# ------------------------------------------------------------------------------- with verifiers

MISTAKES = {
    "an unknown id": ({"id": "no_such_taskset"}, "There is no taskset 'no_such_taskset'"),
    "a module that is no taskset": ({"id": "json"}, "'json' is no taskset of verifiers 0.4"),
    "a missing package": (
        {"args": {"taskset": {"needs": "no_such_module"}}},
        "no_such_module",
    ),
    "an unknown argument": ({"args": {"taskset": {"wrods": 3}}}, "taskset.wrods"),
    "an unknown agent": ({"args": {"player": {}}}, "player"),
    "a wrong value": ({"args": {"taskset": {"words": "many"}}}, "taskset.words"),
    "no tasks": ({"select": {"skip": 100}}, "has no tasks"),
    "a wrong selection": ({"select": {"limits": 3}}, "`select` is wrong: limits"),
    "commands of the model on this machine": (
        {"args": {"agent": {"harness": {"id": "bash"}}}},
        "has no `runtime`",
    ),
    "an unknown harness": (
        {"args": {"agent": {"harness": {"id": "bahs"}}}},
        "no harness 'bahs'",
    ),
    "a harness that needs a container": (
        {"args": {"agent": {"harness": {"id": "codex"}, "runtime": {"type": "subprocess"}}}},
        "needs a container runtime",
    ),
    "two agents in one session": ({"args": {"id": "user_sim"}}, "2 agents without a `client`"),
}


@needs_verifiers
@pytest.mark.full
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_told_apart(mistake):
    settings, said = MISTAKES[mistake]
    with pytest.raises(RecipeError, match="Environment 'mine'") as seen:
        entry_of(**settings).probe("Environment 'mine'")
    assert said in str(seen.value)
    assert seen.value.fix


@needs_verifiers
@pytest.mark.full
@pytest.mark.server
def test_episodes_come_back_with_reward_metrics_and_tokens(server: Server):
    async def play() -> None:
        environment = VerifiersEnvironment.__new__(VerifiersEnvironment)
        environment.entry = entry_of(args={"agent": {"max_turns": 1}})
        await environment.open()
        assert await environment.read_tasks() == [0, 1, 2]
        sessions = SessionClient([server.url], server.token)
        settings = {"temperature": 1.0, "max_tokens": 8}

        async def episode(task: int) -> None:
            async with sessions.session(settings=settings) as session:
                result = await environment.run_episode(task, session)
            reply = await session.end()
            assert result.outcome == "ended", result.reason
            assert result.score == pytest.approx(2 * result.parts["short"])
            assert result.parts["length"] == len(result.messages[-1]["content"])
            assert session_episode(reply) is not None

        await asyncio.gather(episode(0), episode(1))
        ended = environment.process
        for process in psutil.Process().children(recursive=True):
            if process.cmdline()[-1:] == [WORKER] and process.cmdline()[0] == PYTHON:
                process.send_signal(signal.SIGKILL)
        while ended.is_alive:
            await asyncio.sleep(0.1)
        await episode(2)
        assert environment.process is not ended
        await environment.process.end()

    asyncio.run(play())
