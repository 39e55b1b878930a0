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
from tests.forge import FORKED_ENGINES
from tests.launching import ROOT
from trl_atropos.errors import RecipeError
from trl_atropos.services.signals import Interrupted, handlers

NOTEBOOK = ROOT / "recipes/quickstart/quickstart.ipynb"


@pytest.mark.server
@pytest.mark.slow(120)
def test_notebook_runs_from_top_to_bottom(tmp_path):
    """In a copy of the repository's folders that it uses, as somebody opens it."""
    folder = tmp_path / "recipes/quickstart"
    shutil.copytree(NOTEBOOK.parent, folder)
    notebook = nbformat.read(folder / NOTEBOOK.name, as_version=4)
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
    assert [line[:4] for line in texts[3].splitlines()] == ["cab=", "hag="]
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
