"""Tasks come from files, functions and data sets, and keep their place over a restart."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from trl_atropos.agents.agent_tasks import read_tasks
from trl_atropos.agents.episode_environment import TaskOrder
from trl_atropos.environment_kinds import AgentEntry
from trl_atropos.errors import AtroposTrainingError

TASKS = [{"letter": letter} for letter in "abcde"]


def entry_with(folder: Path, tasks: object) -> AgentEntry:
    fields = {"command": "true", "tasks": tasks, "score": "score.py:score"}
    return AgentEntry.model_validate(fields, context={"folder": str(folder)})


def tasks_of(folder: Path, tasks: object) -> list:
    variables = {"PATH": os.environ["PATH"]}
    return asyncio.run(read_tasks(entry_with(folder, tasks), variables))


def write_lines(path: Path) -> None:
    path.write_text("\n".join(map(json.dumps, TASKS)) + "\n\n")


def test_tasks_are_lines_of_a_file(tmp_path):
    write_lines(tmp_path / "mine.jsonl")
    assert tasks_of(tmp_path, "mine.jsonl") == TASKS


def test_task_may_have_a_line_separator_in_its_text(tmp_path):
    """JSON has such characters as they are, and Python's `splitlines` splits there."""
    text = "one\u2028two\x85three"
    line = json.dumps({"text": text}, ensure_ascii=False)
    (tmp_path / "mine.jsonl").write_text(f"{line}\r\n{line}\n", "utf-8")
    assert tasks_of(tmp_path, "mine.jsonl") == [{"text": text}] * 2


@pytest.mark.parametrize("word", ["return", "yield from"])
def test_tasks_are_made_by_a_function(tmp_path, word):
    (tmp_path / "mine.py").write_text(f"def make():\n    {word} {TASKS!r}\n")
    assert tasks_of(tmp_path, "mine.py:make") == TASKS


def test_tasks_are_rows_of_a_data_set(tmp_path):
    (tmp_path / "data").mkdir()
    write_lines(tmp_path / "data/test.jsonl")
    assert tasks_of(tmp_path, {"dataset": "./data", "split": "test"}) == TASKS


def test_line_that_is_no_task_is_told(tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"letter": "a"}\n{letter: b}\n')
    with pytest.raises(AtroposTrainingError, match=r"Line 2 of .*mine.jsonl is no JSON"):
        tasks_of(tmp_path, "mine.jsonl")


def test_no_tasks_are_told(tmp_path):
    (tmp_path / "mine.jsonl").write_text("\n")
    with pytest.raises(AtroposTrainingError, match="An agent has no tasks"):
        tasks_of(tmp_path, "mine.jsonl")


def test_each_pass_has_each_task_in_an_order_of_its_own():
    order = TaskOrder([*range(20)], 7, None)
    passes = [[order.next() for _ in range(20)] for _ in range(3)]
    assert all(sorted(tasks) == [*range(20)] for tasks in passes)
    assert len({tuple(tasks) for tasks in passes}) == 3
    again = TaskOrder([*range(20)], 7, None)
    assert [again.next() for _ in range(20)] == passes[0]


def test_evaluation_has_tasks_as_they_are():
    order = TaskOrder([*range(5)], None, None)
    assert [order.next() for _ in range(7)] == [0, 1, 2, 3, 4, 0, 1]


@pytest.mark.parametrize("given", [0, 3, 5, 12])
def test_tasks_keep_their_place_over_a_restart(tmp_path, given):
    state = str(tmp_path / "agent.state")
    order = TaskOrder(TASKS, 1, state)
    for _ in range(given):
        order.next()
    whole = TaskOrder(TASKS, 1, None)
    expected = [whole.next() for _ in range(given + 8)][given:]
    resumed = TaskOrder(TASKS, 1, state)
    assert [resumed.next() for _ in range(8)] == expected
