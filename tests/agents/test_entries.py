"""An entry of an agent: its keys, and what is missing for it, told before anything runs."""

import os
from pathlib import Path
from typing import Any

import pytest

from trl_atropos.agents.agent_environment import filled_in
from trl_atropos.check.services import agent_findings
from trl_atropos.environment_entry import EnvironmentSpec, EvaluationSpec, parse_entries
from trl_atropos.environment_kinds import AgentEntry
from trl_atropos.errors import AtroposTrainingError, RecipeError

AGENT = {
    "command": ["python", "my_agent.py", "{task}"],
    "tasks": "tasks.jsonl",
    "score": "score.py:score",
}


@pytest.fixture
def folder(tmp_path) -> Path:
    """A recipe's folder, with agent, tasks and score."""
    (tmp_path / "my_agent.py").write_text("")
    (tmp_path / "tasks.jsonl").write_text("{}\n")
    (tmp_path / "score.py").write_text("async def score(*_):\n    return 1\n")
    return tmp_path


def spec_of(folder: Path, **agent: Any) -> EnvironmentSpec:
    (spec,) = parse_entries(
        "environments", [{"agent": AGENT | agent}], EnvironmentSpec, str(folder)
    )
    return spec


def test_paths_are_seen_from_the_folder_of_the_recipe(folder):
    agent = spec_of(folder, python="venv/bin/python").agent
    assert agent.command == ["python", f"{folder}/my_agent.py", "{task}"]
    assert agent.tasks == f"{folder}/tasks.jsonl"
    assert agent.score == f"{folder}/score.py:score"
    assert agent.python == f"{folder}/venv/bin/python"
    assert spec_of(folder, command="./run.sh -v {task}").agent.command[0] == f"{folder}/run.sh"


def test_entry_is_run_as_a_script_of_the_package(folder):
    spec = spec_of(folder, group_size=4)
    assert spec.name == "agent"
    assert Path(spec.path).is_file()
    assert spec.config["group_size"] == 4
    assert AgentEntry.model_validate(spec.config["entry"]) == spec.agent


def test_evaluation_samples_each_task_so_often(folder):
    entry = {"agent": AGENT, "problems": 3, "samples": 2}
    (spec,) = parse_entries("evaluations", [entry], EvaluationSpec, str(folder))
    assert spec.config["group_size"] == 2


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"agent": {"comand": "x"}}, "Did you mean `command`?"),
        ({"agent": AGENT | {"command": "a {tsk}"}}, "{tsk} is no placeholder"),
        ({"agent": AGENT | {"score": "score.py"}}, "write `file.py:function`"),
        ({"agent": AGENT | {"timeout": 0}}, "timeout: Input should be greater than 0"),
        ({"agent": AGENT | {"env": {"TRL_ATROPOS_TOKEN": "inherit"}}}, "is the run's own"),
        ({"agent": AGENT | {"env": {"OPENAI_API_KEY": "x"}}}, "each episode gets"),
        ({"agent": AGENT, "python": "x"}, "`python` does not go with `agent`"),
        ({"agent": AGENT, "path": "x.py"}, "has path and agent"),
    ],
)
def test_mistake_in_entry_is_told(folder, entry, message):
    with pytest.raises(RecipeError) as caught:
        parse_entries("environments", [entry], EnvironmentSpec, str(folder))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ({"command": "no_such_program {task}"}, "there is no program 'no_such_program'"),
        ({"command": "./no_script"}, "there is no program"),
        ({"python": "no/python"}, "there is no program"),
        ({"tasks": "nowhere.jsonl"}, "there is no file"),
        ({"tasks": "score.py:tasks"}, "has no function 'tasks'. It has: score."),
        ({"score": "score.py:reward"}, "has no function 'reward'. It has: score."),
        ({"score": "nowhere.py:score"}, "there is no file"),
        ({"env": {"NO_SUCH_VARIABLE": "inherit"}}, "inherits the variable NO_SUCH_VARIABLE"),
        ({"user": "nobody_at_all"}, "there is no user 'nobody_at_all'"),
    ],
)
def test_what_is_missing_is_told(folder, agent, message):
    with pytest.raises(RecipeError) as caught:
        spec_of(folder, **agent).agent.require("Environment 'agent'")
    assert message in str(caught.value)


def test_whole_entry_misses_nothing(folder):
    spec_of(folder).agent.require("Environment 'agent'")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can name users")
def test_url_is_not_on_a_command_line_that_other_users_read(folder):
    spec_of(folder, user="60001-60004").agent.require("E")
    agent = spec_of(folder, user="60001-60004", command="python my_agent.py {base_url}").agent
    assert agent.users == ["60001", "60002", "60003", "60004"]
    with pytest.raises(RecipeError, match="OPENAI_BASE_URL"):
        agent.require("E")


def test_variables_are_those_that_are_listed(folder):
    agent = spec_of(folder, env={"MODE": "fast", "NUMBER": 1, "KEY": "inherit"}).agent
    run = {"PATH": "/bin", "HOME": "/root", "HF_TOKEN": "secret", "KEY": "mine", "MODE": "slow"}
    assert agent.variables(run) == {
        "PYTHONUNBUFFERED": "1",
        "PATH": "/bin",
        "HOME": "/root",
        "MODE": "fast",
        "NUMBER": "1",
        "KEY": "mine",
    }
    agent = spec_of(folder, python="venv/bin/python").agent
    assert agent.variables(run)["PATH"] == f"{folder}/venv/bin:/bin"


@pytest.mark.parametrize(
    ("word", "filled"),
    [
        ("{task}", '{"question": "Why?", "more": [1]}'),
        ("--q={task[question]}", "--q=Why?"),
        ("{task[more]}", "[1]"),
        ("{{task}} ${HOME} {} {folder}/x", "{task} ${HOME} {} /episode/x"),
        ('{"a": "{base_url}"}', '{"a": "http://here/v1"}'),
    ],
)
def test_placeholders_are_filled_in(word, filled):
    values = {"base_url": "http://here/v1", "folder": "/episode"}
    assert filled_in(word, {"question": "Why?", "more": [1]}, values) == filled


def test_entry_that_a_task_does_not_have_is_told():
    with pytest.raises(AtroposTrainingError, match="A task has no entry 'question'"):
        filled_in("{task[question]}", "a text", {})


@pytest.mark.parametrize(
    ("agent", "tasks", "message"),
    [
        ({"command": "python nowhere.py"}, "{}", "names a script that is not there"),
        ({}, "{}\n{", "Line 2 of"),
        ({}, "\n", "it has no tasks"),
        ({"command": "python my_agent.py {task[q]}"}, '{"p": 1}', "its tasks have no entry 'q'"),
        ({"command": "python my_agent.py {task[q]}"}, '"a text"', "its tasks have no entry 'q'"),
        ({"command": "python my_agent.py {task[q]}"}, '{"q": 1}', None),
    ],
)
def test_check_reads_tasks_and_command(folder, agent, tasks, message):
    (folder / "tasks.jsonl").write_text(tasks)
    spec = spec_of(folder, **agent)
    findings = [finding.what for finding in agent_findings(spec, spec.agent)]
    if message is None:
        assert findings == []
    else:
        (what,) = findings
        assert message in what
