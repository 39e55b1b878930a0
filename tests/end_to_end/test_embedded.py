"""Runs inside of a Python program: the quickstart's notebook, from top to bottom in a real kernel,
and what happens to the signals of the program."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import trl_atropos
from tests import ROOT
from tests.forge import FORKED_ENGINES
from trl_atropos import embedded
from trl_atropos.errors import RecipeError
from trl_atropos.services import mps
from trl_atropos.services.signals import Interrupted, handlers

NOTEBOOK = ROOT / "recipes/quickstart/quickstart.ipynb"


@pytest.mark.server
@pytest.mark.slow(120)
def test_notebook_runs_from_top_to_bottom(tmp_path):
    """In a copy of the repository's folders that it uses, as somebody opens it, with fewer steps:
    `test_quickstart.py` sees this recipe learn."""
    folder = tmp_path / "recipes/quickstart"
    shutil.copytree(NOTEBOOK.parent, folder)
    notebook = nbformat.read(folder / NOTEBOOK.name, as_version=4)
    (trains,) = [cell for cell in notebook.cells if "max_steps=60," in cell.source]
    trains.source = trains.source.replace("max_steps=60,", "max_steps=12,")
    client = NotebookClient(
        notebook,
        timeout=400,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute(env=os.environ | FORKED_ENGINES)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    texts = ["".join(output.get("text", "") for output in cell.outputs) for cell in cells]
    assert "Mean reward" in texts[1]
    assert any("image/png" in output.get("data", {}) for output in cells[2].outputs)
    # So young a model also writes line ends.
    assert texts[3].startswith("cab=")
    assert "\nhag=" in texts[3]
    steps = [line.split()[0] for line in texts[4].splitlines() if line[:1].isdigit()]
    assert steps == ["1", "2", "3", "4", "5"]
    assert Path(tmp_path, "runs/notebook/model.safetensors").exists()


def test_settings_of_a_call_are_checked_like_a_recipe(tmp_path):
    with pytest.raises(RecipeError, match="Did you mean `max_steps`"):
        trl_atropos.run(ROOT / "recipes/quickstart/colocate.yaml", max_step=3)
    with (
        pytest.raises(RecipeError, match=r"no/such\.yaml"),
        trl_atropos.start_services("no/such.yaml"),
    ):
        pass


def test_keyword_arguments_replace_any_setting(tiny_model, tmp_path, monkeypatch):
    """Also lists and paths, and those that an overlay may not have."""
    monkeypatch.chdir(ROOT)
    environment = Path("tests/end_to_end/one_by_one_environment.py")
    recipe = embedded._parse(
        "recipes/quickstart/colocate.yaml",
        {
            "model_name_or_path": tiny_model,
            "output_dir": tmp_path,
            "environments": [environment, {"path": environment, "name": "another"}],
            "evaluations": [{"path": environment, "problems": 4}],
            "vllm_args": ("--max-model-len", "256"),
            "max_steps": 20,
        },
    )
    assert [spec.name for spec in recipe.environments] == ["one_by_one_environment", "another"]
    assert [spec.problems for spec in recipe.evaluations] == [4]
    assert recipe.training.max_steps == 20
    assert recipe.training.output_dir == str(tmp_path)
    assert recipe.services.vllm_args == ["--max-model-len", "256"]


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ({"max_steps": [1]}, r"the keyword arguments: `max_steps` is \[1\]\. .* a whole number"),
        ({"rollout_timeout": -2}, r"with the keyword arguments: `rollout_timeout` is -2"),
        ({"environments": ["no/such.py"]}, r"there is no script 'no/such\.py'"),
        ({"env": {"A": 1}}, r"`env` cannot be among .*`os\.environ`"),
    ],
)
def test_wrong_keyword_argument_is_named(tiny_model, tmp_path, setting, told):
    needed = {"model_name_or_path": tiny_model, "output_dir": tmp_path}
    with pytest.raises(RecipeError, match=told):
        trl_atropos.run(ROOT / "recipes/quickstart/colocate.yaml", **(needed | setting))


@pytest.mark.parametrize("setting", [{"mps": True}, {}])
def test_mps_of_recipe_and_call_is_started(tmp_path, monkeypatch, setting):
    """Before anything uses CUDA, and thus before the recipe is checked."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"mps: {str(not setting).lower()}\noutput_dir: {tmp_path}/run\n")
    started = []
    monkeypatch.setattr(mps, "start_mps", started.append)
    with pytest.raises(RecipeError, match="`max_steps` is -1"):
        trl_atropos.run(recipe, **setting)
    assert started == [f"{tmp_path}/run/logs"]
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    with (
        pytest.warns(UserWarning, match=r"used CUDA before\. Start it again"),
        pytest.raises(RecipeError, match="`max_steps` is -1"),
    ):
        trl_atropos.run(recipe, **setting)
    assert len(started) == 1


def test_handlers_of_the_program_are_back_after_a_run():
    usual = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(Interrupted), handlers():
        signal.raise_signal(signal.SIGTERM)
    assert [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)] == usual
    with pytest.raises(RecipeError):
        trl_atropos.run("no/such.yaml")
    assert [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)] == usual


def test_run_outside_the_main_thread_is_refused():
    errors: list[RuntimeError] = []

    def call() -> None:
        try:
            trl_atropos.run("no/such.yaml")
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])


def test_import_of_the_names_is_quick():
    """Nothing of torch is imported before a recipe is run."""
    program = "import sys, trl_atropos; trl_atropos.run, trl_atropos.start_services; "
    program += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
