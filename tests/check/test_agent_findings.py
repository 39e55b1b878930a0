"""What `check` says of an agent's tasks and command, which it reads and does not run."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from trl_atropos.check.services import agent_findings
from trl_atropos.environment_entry import EvaluationSpec, parse_entries
from trl_atropos.errors import RecipeError

TASKS = [{"letter": letter} for letter in "abc"]


def findings_of(folder: Path, lines: list[str], **keys: Any) -> list[str]:
    """What is found, of an evaluation that asks for three problems unless `keys` say otherwise."""
    (folder / "tasks.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (folder / "score.py").write_text("def score(*_):\n    return 1\n")
    command = keys.pop("command", ["sh", "-c", "echo {task[letter]}"])
    agent = {"command": command, "tasks": "tasks.jsonl", "score": "score.py:score"}
    entry = {"agent": agent, "problems": 3, **keys}
    (spec,) = parse_entries("evaluations", [entry], EvaluationSpec, folder)
    return [f"{finding.what}. {finding.fix}" for finding in agent_findings(spec, spec.agent)]


def test_right_agent_has_no_finding(tmp_path):
    assert findings_of(tmp_path, [json.dumps(task) for task in TASKS]) == []


@pytest.mark.parametrize(
    ("lines", "keys", "message"),
    [
        (["{letter: a}"], {}, "Line 1 of "),
        ([], {}, "it has no tasks"),
        (["{}"], {"problems": 1}, "its tasks have no entry 'letter', which its command names"),
        (
            ['{"letter": "a"}'],
            {},
            "it asks for 3 problems, and there are 1 tasks. Set `problems: 1`",
        ),
        (
            ['{"letter": "a"}'],
            {"problems": 1, "command": ["sh", "missing.sh"]},
            "its command names a script that is not there",
        ),
    ],
)
def test_mistake_of_an_agents_entry_is_found(tmp_path, lines, keys, message):
    (finding,) = findings_of(tmp_path, lines, **keys)
    assert message in finding


def all_of(error: RecipeError) -> list[str]:
    """Returns what `check` lists of an entry."""
    return [mistake.what.split(": ", 1)[1] for mistake in (error, *error.further)]


def test_all_that_an_entry_misses_is_told_at_once(tmp_path):
    agent = {
        "command": "no_such_program {base_url}",
        "tasks": "nowhere.jsonl",
        "score": "nowhere.py:score",
        "python": "no/python",
        "env": {"NO_SUCH_VARIABLE": "inherit"},
        "user": ["nobody_at_all", "nobody_either"],
    }
    entry = {"agent": agent, "problems": 3}
    (spec,) = parse_entries("evaluations", [entry], EvaluationSpec, str(tmp_path))
    with pytest.raises(RecipeError) as caught:
        spec.agent.require("Evaluation 'agent'")
    beginnings = [
        "it inherits the variable NO_SUCH_VARIABLE",
        f"there is no program '{tmp_path}/no/python'",
        "there is no program 'no_such_program'",
        f"there is no file {tmp_path}/nowhere.py for `score`",
        f"there is no file {tmp_path}/nowhere.jsonl for `tasks`",
        "there is no user 'nobody_at_all'",
        "there is no user 'nobody_either'",
        "everybody on the machine can read",
    ]
    if os.geteuid() != 0:
        beginnings.insert(-1, "only root can run agents as other users")
    told = all_of(caught.value)
    assert len(told) == len(beginnings)
    for text, beginning in zip(told, beginnings):
        assert text.startswith(beginning)


@pytest.mark.parametrize(
    ("agent", "beginnings"),
    [
        # of a misspelt key, not that the right one is missing
        (
            {"comand": "x", "tasks": "t.jsonl", "score": "score.py", "timeout": 0},
            [
                "agent: comand: Extra inputs",
                "agent: timeout: Input",
                "agent: score: 'score.py' names",
            ],
        ),
        ({"command": "x"}, ["agent: tasks: Field required", "agent: score: Field required"]),
        (
            # one for `tasks`, which may be of two types
            {"command": "a {tsk}", "tasks": 5, "score": "s.py:score"},
            ["agent: command: {tsk} is no placeholder", "agent: tasks: "],
        ),
    ],
)
def test_all_that_is_wrong_in_an_entry_is_told_at_once(tmp_path, agent, beginnings):
    entry = {"agent": agent, "problems": 3}
    with pytest.raises(RecipeError) as caught:
        parse_entries("evaluations", [entry], EvaluationSpec, str(tmp_path))
    told = all_of(caught.value)
    assert len(told) == len(beginnings), told
    for text, beginning in zip(told, beginnings):
        assert text.startswith(beginning), told
