"""`trl-atropos init`: what a new folder holds."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from trl_atropos.commands import init as init_command
from trl_atropos.recipe import parse


def run_in_this_process(command: list[str | Path], **_options) -> subprocess.CompletedProcess:
    """Runs a script here, where everything that takes long is imported."""
    _python, script, *arguments = map(str, command)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script, *arguments])
        runpy.run_path(script, run_name="__main__")
    return subprocess.CompletedProcess(command, 0)


def test_new_folder_holds_recipes_that_can_be_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    # `tests/house/test_docs.py` runs it in a process of its own
    monkeypatch.setattr(init_command.subprocess, "run", run_in_this_process)
    init_command.init(["tasks/mine"])
    folder = tmp_path / "tasks/mine"
    assert {path.name for path in folder.iterdir()} == {
        "README.md",
        *("colocate.yaml", "cpu.yaml", "environment.py", "make_model.py", "model"),
    }
    assert (folder / "model/config.json").exists()
    readme = (folder / "README.md").read_text()
    assert len(readme.splitlines()) <= 20 and max(map(len, readme.splitlines())) <= 80
    texts = [path.read_text() for path in folder.iterdir() if path.is_file()]
    assert not any(
        word in text
        for text in texts
        for word in ("recipes/", "runs/quickstart", "own-environment", "docs/")
    )
    for name in ("cpu.yaml", "colocate.yaml"):
        recipe = parse(
            ["--config", f"tasks/mine/{name}", "--model_name_or_path", "m", "--use_cpu", "true"]
        )
        assert [(spec.path, spec.name) for spec in recipe.environments] == [
            ("tasks/mine/environment.py", "mine")
        ]
        assert (
            recipe.training.output_dir
            == {"cpu.yaml": "runs/mine-cpu", "colocate.yaml": "runs/mine"}[name]
        )
        assert f"#   trl-atropos train tasks/mine/{name}\n" in (folder / name).read_text()
    assert (
        yaml.safe_load((folder / "cpu.yaml").read_text())["model_name_or_path"]
        == "tasks/mine/model"
    )
    printed = capsys.readouterr().out
    for command in ("try tasks/mine/cpu.yaml", "train tasks/mine/cpu.yaml", "report runs/mine-cpu"):
        assert f"trl-atropos {command}" in printed
        assert f"trl-atropos {command}" in readme
    assert "What to change then: tasks/mine/README.md" in printed


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("there", "cannot be made (File exists)"),
        ("a b", "is no name"),
        ("/", "is no name"),
        ("x,y", "is no name"),
        ("..", "is no name"),
    ],
)
def test_impossible_folder_name_is_refused(name, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    with pytest.raises(SystemExit, match=r"trl-atropos init: ") as error:
        init_command.init([name])
    assert told in str(error.value)
    assert list(tmp_path.rglob("*")) == [tmp_path / "there"]
