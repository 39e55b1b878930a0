"""The example of docs/agents.md, as files in a recipe's folder."""

from pathlib import Path
from typing import Any

import yaml

from tests.house.docs_pages import Page

PAGE = "docs/agents.md"


def write_example(folder: Path) -> dict[str, Any]:
    """Writes the agent, its tasks and its score into a folder. Returns what the recipe has for
    them."""
    page = Page(PAGE)
    agent, score = [block.text for block in page.blocks_of("python")]
    (tasks,) = [block.text for block in page.blocks_of("json")]
    (folder / "my_agent.py").write_text(agent)
    (folder / "score.py").write_text(score)
    for name in ("tasks.jsonl", "test.jsonl"):
        (folder / name).write_text(tasks)
    return yaml.safe_load(page.blocks_of("yaml")[0].text)
