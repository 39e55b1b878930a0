"""What `check` says of an agent's tasks and command, which it reads and does not run."""

import json
from pathlib import Path
from typing import Any

import pytest

from trl_atropos.check.services import agent_findings
from trl_atropos.environment_entry import EvaluationSpec, parse_entries

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
