"""The recipes of published agents: their entries are read, and the files that they name are there.
The agents themselves are not installed here (docs/other-environments.md says how they ran)."""

import ast
from pathlib import Path

import pytest
import yaml

from tests import ROOT
from trl_atropos.environment_entry import EnvironmentSpec, parse_entries
from trl_atropos.environment_kinds import AgentEntry

FOLDER = ROOT / "recipes/agents"
RECIPES = sorted(path.name for path in FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_of_an_agent_is_read(recipe):
    content = (FOLDER / recipe).read_text()
    settings = yaml.safe_load(content)
    (spec,) = parse_entries("environments", settings["environments"], EnvironmentSpec, str(FOLDER))
    venv = Path(spec.kind.python).parents[1].relative_to(ROOT)
    assert f"python -m venv {venv} " in content
    assert f"trl-atropos train recipes/agents/{recipe}" in content
    if isinstance(spec.kind, AgentEntry):
        without_python = spec.kind.model_copy(update={"python": None, "command": ["{python}"]})
        without_python.require("The recipe's agent")
    assert settings["per_device_train_batch_size"] % spec.kind.group_size == 0


@pytest.mark.parametrize("script", sorted(path.name for path in FOLDER.glob("*.py")))
def test_script_of_a_recipe_is_python(script):
    ast.parse((FOLDER / script).read_text())
