"""Reads the tasks of an entry: from a file of JSON lines, a data set, or a function."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trl_atropos.agents.function_pool import LOAD_TIMEOUT, FunctionPool
from trl_atropos.environment_kinds import FUNCTION, AgentEntry, TaskDataset
from trl_atropos.errors import AtroposTrainingError


async def read_tasks(entry: AgentEntry, env: Mapping[str, str]) -> list[Any]:
    """Returns the tasks of an entry. `env` has the variables of a function that makes them. Raises
    `AtroposTrainingError` if there are none, or if JSON does not have them."""
    if isinstance(entry.tasks, TaskDataset):
        tasks = await asyncio.to_thread(_rows_of, entry.tasks)
    elif FUNCTION.fullmatch(entry.tasks):
        function = FunctionPool(entry.tasks, entry.python, env)
        await function.start()
        try:
            tasks = await function.call({"call": "tasks"}, LOAD_TIMEOUT)
        finally:
            await function.close()
    else:
        tasks = lines_of(Path(entry.tasks))
    if not tasks:
        what = "An agent has no tasks"
        fix = "Correct `tasks`, or put a task into each line of the file."
        raise AtroposTrainingError(what, f"tasks: {entry.tasks}", fix)
    return tasks


def lines_of(path: Path) -> list[Any]:
    """Returns the tasks in a file of JSON lines. Raises `AtroposTrainingError` for a line that is
    none."""
    tasks = []
    # not by `splitlines`, which also splits at characters that JSON has within its texts
    lines = path.read_text("utf-8").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            tasks.append(json.loads(line))
        except ValueError as error:
            what = f"Line {number} of {path} is no JSON: {error}"
            fix = 'Write one task a line, such as {"question": "1 + 1?", "answer": "2"}.'
            raise AtroposTrainingError(what, line[:100], fix) from error
    return tasks


def _rows_of(place: TaskDataset) -> list[dict[str, Any]]:
    """Returns the rows of a data set."""
    from datasets import load_dataset

    rows = load_dataset(place.dataset, place.config, split=place.split).to_list()
    try:
        json.dumps(rows)
    except (TypeError, ValueError) as error:
        what = f"A task must be something that JSON has, and a row of {place.dataset} is not"
        fix = "Have a function (`tasks: tasks.py:tasks`) make tasks of the rows."
        raise AtroposTrainingError(what, str(error), fix) from error
    return rows
