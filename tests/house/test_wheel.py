"""What `python -m build` makes: it has what it needs, and runs the quickstart outside of the
checkout."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from importlib.metadata import distribution
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.launching import ROOT, free_urls

pytestmark = pytest.mark.slow

DISTRIBUTED = (
    "CONTRIBUTING.md",
    "LICENSE",
    "MANIFEST.in",
    "README.md",
    "pyproject.toml",
    "setup.cfg",
)
FOLDERS = ("benchmarks", "configs", "docs", "recipes", "tests", "trl_atropos")
RECIPE = "recipes/quickstart/colocate.yaml"
COMMANDS = ("train", "check", "try", "init", "serve", "report", "slurm", "bench")


def run(*command: str | Path, cwd: Path, timeout: float) -> subprocess.CompletedProcess:
    """Runs a command in a folder with nothing of the checkout on its path."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout
    )


def succeed(*command: str | Path, cwd: Path, timeout: float) -> str:
    """As `run`; returns what it printed."""
    done = run(*command, cwd=cwd, timeout=timeout)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the wheel and the sources. Built from a copy, because building writes beside
    setup.cfg."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in DISTRIBUTED:
        shutil.copy(ROOT / name, folder)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    succeed(sys.executable, "-m", "build", "--no-isolation", cwd=folder, timeout=200)
    return folder / "dist"


def test_wheel_has_package_files_and_nothing_else(built):
    (wheel,) = built.glob("trl_atropos-*-py3-none-any.whl")
    names = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    needed = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "trl_atropos").rglob("*")
        if path.suffix in (".py", ".html", ".css", ".js", ".sh", ".typed")
        and "__pycache__" not in path.parts
    }
    template = [
        *(ROOT / "recipes/own_environment").glob("*.*"),
        ROOT / "recipes/quickstart/make_model.py",
    ]
    needed |= {f"trl_atropos/{path.relative_to(ROOT).as_posix()}" for path in template}
    assert {"trl_atropos/py.typed", "trl_atropos/report/page.html"} < needed == names


def test_source_distribution_has_recipes_but_no_tests(built):
    (sdist,) = built.glob("trl_atropos-*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {RECIPE, "configs/accelerate/cpu.yaml", "trl_atropos/report/page.js", "LICENSE"} <= names
    assert not any(
        name.startswith(("tests/", "benchmarks/", "runs/")) or name.endswith(".pyc")
        for name in names
    )


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs of a new environment with the wheel. What it depends on comes from this one, but not
    the checkout."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(folder, with_pip=False)
    python, (wheel,) = folder / "bin" / "python", built.glob("*.whl")
    install = ["pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel]
    succeed(sys.executable, "-m", *install, cwd=folder, timeout=120)
    (site,) = folder.glob("lib/python*/site-packages")
    # As a line of a .pth file, a folder is searched, but its own .pth files are not read: they have
    # the checkout.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = "import trl_atropos; print(trl_atropos.__file__)"
    assert succeed(python, "-c", where, cwd=folder, timeout=240).startswith(str(site))
    return folder / "bin"


@pytest.fixture(scope="module")
def elsewhere(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the quickstart, whose paths are relative to where it is run."""
    folder = tmp_path_factory.mktemp("elsewhere")
    shutil.copytree(ROOT / "recipes/quickstart", folder / "recipes/quickstart")
    make_model = ["recipes/quickstart/make_model.py", "runs/quickstart/model"]
    succeed(installed / "python", *make_model, cwd=folder, timeout=120)
    return folder


def test_command_help_lists_all_commands(installed, tmp_path):
    told = succeed(installed / "trl-atropos", "--help", cwd=tmp_path, timeout=240)
    commands = re.findall(r"^ +(\w+) ", told, re.MULTILINE)
    assert set(COMMANDS) <= set(commands)
    version = distribution("trl_atropos").version
    assert (
        succeed(installed / "trl-atropos", "--version", cwd=tmp_path, timeout=240).split()[-1]
        == version
    )


def test_benchmarks_need_checkout(installed, tmp_path):
    done = run(installed / "trl-atropos", "bench", "step", cwd=tmp_path, timeout=240)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert (
        "has no folder `benchmarks`" in done.stderr and "`pip install --editable .`" in done.stderr
    )


def test_wheel_writes_environment_and_batch_script(installed, tmp_path):
    succeed(installed / "trl-atropos", "init", "mine", cwd=tmp_path, timeout=120)
    written = (tmp_path / "mine/environment.py").read_text()
    assert (
        written.partition('"""\n')[2]
        == (ROOT / "recipes/own_environment/environment.py").read_text().partition('"""\n')[2]
    )
    script = [
        "slurm",
        "mine/colocate.yaml",
        "--nodes",
        "2",
        "--vllm_mode",
        "server",
        "--output",
        "job.sh",
    ]
    succeed(installed / "trl-atropos", *script, cwd=tmp_path, timeout=240)
    assert f"export PATH={installed}:$PATH" in (tmp_path / "job.sh").read_text()


@pytest.mark.server
def test_quickstart_runs_from_wheel(installed, elsewhere):
    atropos, vllm = free_urls(2)
    recipe = [
        "--config",
        RECIPE,
        "--max_steps",
        "3",
        "--atropos_url",
        atropos,
        "--vllm_server_base_url",
        vllm,
    ]
    succeed(installed / "trl-atropos", "check", *recipe, cwd=elsewhere, timeout=200)
    # Neither a configuration of accelerate nor anything else of the checkout is needed.
    succeed(installed / "trl-atropos", "train", *recipe, cwd=elsewhere, timeout=800)
    run = elsewhere / "runs/quickstart"
    assert json.loads((run / "summary.json").read_text())["steps"] == 3
    assert (run / "model.safetensors").is_file()
    assert "3 steps" in succeed(
        installed / "trl-atropos", "report", run, cwd=elsewhere, timeout=120
    )
    assert (run / "report.html").is_file()
