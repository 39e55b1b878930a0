"""What `python -m build` makes: it has what it needs, and all that a newcomer types works in an empty
folder."""

import contextlib
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import termios
import threading
import venv
from dataclasses import dataclass, field
from importlib.metadata import distribution
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests import ROOT
from tests.launching import free_urls
from trl_atropos.cli import COMMANDS

pytestmark = pytest.mark.slow(150)

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
COLUMNS = 80
STEPS = 150  # the recipe's own; after 100, the reward of 16 runs was between 0.46 and 0.85
TASK = "a_rather_long_name"  # so that messages with its paths take several lines
FOREIGN = ("PYTHONPATH", "COLUMNS")  # variables of this process that a newcomer does not have
# The slow starts that `test_quickstart.py` and `test_as_users.py` make as users do.
SOONER = {"PYTHONPATH": str(ROOT / "tests/site")}
CONTROL = re.compile(r"\x1b\[[\d;]*[A-Za-z]")


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
    folders = [path for path in sys.path if path.endswith("site-packages")]
    (site / "dependencies.pth").write_text("\n".join([*folders, ""]))
    where = "import trl_atropos; print(trl_atropos.__file__)"
    assert succeed(python, "-c", where, cwd=folder, timeout=240).startswith(str(site))
    return folder / "bin"


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


# -------------------------------------------------------------------- in an empty folder, 80 columns


@dataclass
class Newcomer:
    """Somebody who types the first commands into a terminal, and what each of them showed."""

    folder: Path
    screens: dict[str, str] = field(default_factory=dict)

    def type(self, *command: str | Path, timeout: float) -> None:
        """Types a command. It must succeed."""
        master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (24, COLUMNS))
        env = {name: value for name, value in os.environ.items() if name not in FOREIGN} | SOONER
        process = subprocess.Popen(
            list(map(str, command)),
            cwd=self.folder,
            env=env,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        written = bytearray()

        def read() -> None:
            with contextlib.suppress(OSError):  # EIO when nobody writes any more
                while part := os.read(master, 1 << 16):
                    written.extend(part)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            code = process.wait(timeout)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # the guards then end the services
        reader.join(10)
        os.close(master)
        screen = written.decode(errors="replace")
        assert code == 0, screen[-6000:]
        self.screens[command[1]] = screen

    def lines(self, command: str) -> list[str]:
        """Everything that was ever a line on the screen, also each state of a progress bar."""
        return re.split(r"[\r\n]+", CONTROL.sub("", self.screens[command]))


@pytest.fixture(scope="module")
def newcomer(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Newcomer:
    person = Newcomer(tmp_path_factory.mktemp("empty"))
    atropos, vllm = free_urls(2)
    urls = ["--atropos_url", atropos, "--vllm_server_base_url", vllm]
    command = installed / "trl-atropos"
    person.type(command, "init", TASK, timeout=200)
    recipe = [f"{TASK}/cpu.yaml", *urls]
    person.type(command, "try", *recipe, timeout=400)
    person.type(command, "train", *recipe, timeout=800)
    person.type(command, "report", f"runs/{TASK}-cpu", timeout=200)
    return person


@pytest.mark.server
def test_template_learns_its_task(newcomer):
    """Without a configuration of accelerate, or anything else of the checkout."""
    run = newcomer.folder / f"runs/{TASK}-cpu"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert summary["reward_first"] <= 0.1
    assert summary["reward_last"] >= 0.5
    scores = [result["avg@4"] for result in summary["evaluations"]]
    assert len(scores) == 2 and scores[0] <= 0.1 and scores[1] >= 0.5
    assert (run / "model.safetensors").is_file()
    assert (run / "reward_curve.png").is_file()
    assert f"{STEPS} steps" in newcomer.screens["report"]
    assert (run / "report.html").is_file()


@pytest.mark.server
def test_nothing_wraps_on_terminal_of_80_columns(newcomer):
    for command in newcomer.screens:
        assert [line for line in newcomer.lines(command) if len(line) > COLUMNS] == [], command
    shown = newcomer.lines("train")
    assert any(line.startswith("step ") for line in shown)
    assert any("%|" in line for line in shown)
    # Lines end between words, so a path that fits a line stands in one.
    for service in ("vllm", f"environment-{TASK}"):
        path = f"runs/{TASK}-cpu/logs/{service}.log"
        assert any(path in line for line in shown), path


def test_wheel_writes_environment_and_batch_script(installed, newcomer):
    written = (newcomer.folder / TASK / "environment.py").read_text()
    template = (ROOT / "recipes/own_environment/environment.py").read_text()
    assert written.partition('"""\n')[2] == template.partition('"""\n')[2]
    script = ["slurm", f"{TASK}/colocate.yaml", "--nodes", "2", "--vllm_mode", "server"]
    command = [installed / "trl-atropos", *script, "--output", "job.sh"]
    succeed(*command, cwd=newcomer.folder, timeout=240)
    assert f"export PATH={installed}:$PATH" in (newcomer.folder / "job.sh").read_text()
