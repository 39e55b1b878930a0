"""What a run says of an environment whose code hangs: the line where it does. Real environments, in
processes of their own."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests import ROOT
from tests.forge import WITHOUT_TORCH
from trl_atropos.environment_entry import EnvironmentSpec
from trl_atropos.services.manager import Service, Services
from trl_atropos.services.stacks import places_of, where_is

ENVIRONMENT = "tests/services/hanging_environment.py"
WAIT = 120.0  # seconds


def line_of(way: str) -> int:
    """Returns the line in which the environment hangs."""
    lines = (ROOT / ENVIRONMENT).read_text().splitlines()
    marker = f"# LINE {way}"
    return next(number for number, line in enumerate(lines, start=1) if line.endswith(marker))


def start_hanging(services: Services, ways: list[str], model: Path, folder: Path) -> Service:
    spec = EnvironmentSpec(path=ENVIRONMENT, env=WITHOUT_TORCH)
    nobody = {"base_url": "http://127.0.0.1:9/v1", "api_key": "none", "model_name": "none"}
    env = {
        "ways": ways,
        "total_steps": len(ways),
        "max_num_workers": len(ways),
        "use_wandb": False,
        "tokenizer_name": str(model),
        "data_path_to_save_groups": str(folder / "groups.jsonl"),
    }
    config = folder / "config.json"
    config.write_text(json.dumps({"env": env, "openai": [nobody]}))
    command = spec.groups_command("process", {"python": sys.executable})
    command += ["--config", str(config)]
    return services.start("environment", command, env=spec.variables(), cwd=ROOT, ends=True)


def await_places(services: Services, service: Service, expected: set[str]) -> set[str]:
    """Returns the places that are named of a service, as soon as all `expected` are among them, or
    else those that are named after a long while."""
    deadline = time.monotonic() + WAIT
    places: set[str] = set()
    while not expected <= places and time.monotonic() < deadline:
        assert services.exit_code(service) is None, service.log_path.read_text()
        time.sleep(0.2)
        places = set(where_is(service, services.stacks_dir).removeprefix("in ").split(", in "))
    return places


@pytest.mark.slow(30)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("ways", "expected"),
    [
        (
            # In one process, tasks may wait beside one that does not let them go on.
            ["awaits", "awaits", "sleeps in a thread", "sleeps"],
            [
                f"score_later, {ENVIRONMENT}:{line_of('awaits')} (2 times)",
                f"score, {ENVIRONMENT}:{line_of('sleeps')} (2 times)",
            ],
        ),
        (
            ["holds the interpreter"],
            [f"score, {ENVIRONMENT}:{line_of('holds the interpreter')}"],
        ),
    ],
)
def test_hang_is_named_by_its_line(ways, expected, tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    with Services(tmp_path / "logs") as services:
        service = start_hanging(services, ways, tiny_model, tmp_path)
        places = await_places(services, service, set(expected))
        assert set(expected) <= places
        # A second question gets an answer, too, and the process lives on.
        assert where_is(service, services.stacks_dir)
        assert services.exit_code(service) is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_process_without_handler_is_not_asked(tmp_path, monkeypatch):
    """The signal would end it."""
    with Services(tmp_path) as services:
        program = "import os, time; open(os.path.join(os.environ['TRL_ATROPOS_STACKS'], str(os.getpid())), 'w'); time.sleep(600)"
        services.stacks_dir.mkdir()
        service = services.start("environment-plain", [sys.executable, "-c", program], ends=True)
        deadline = time.monotonic() + WAIT
        while not list(services.stacks_dir.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.05)
        (file,) = services.stacks_dir.iterdir()
        assert os.getsid(int(file.name)) == service.guard.pid
        assert where_is(service, services.stacks_dir) == ""
        time.sleep(0.5)
        assert services.exit_code(service) is None


AT_WORK = """
import threading
import environment_stacks

def count_down(number):
    return number and count_down(number - 1)

def work():
    while True:
        count_down(50)
        sum(number for number in range(200))

environment_stacks.install()
for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
work()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_process_at_work_outlives_questions(tmp_path):
    """`faulthandler`, which reads stacks that change meanwhile, crashes it within a few dozens."""
    program = tmp_path / "at_work.py"
    program.write_text(AT_WORK)
    with Services(tmp_path / "logs") as services:
        variables = {"PYTHONPATH": str(ROOT / "trl_atropos/environment_site")}
        command = [sys.executable, str(program)]
        service = services.start("environment-busy", command, env=variables, ends=True)
        deadline = time.monotonic() + WAIT
        while not where_is(service, services.stacks_dir) and time.monotonic() < deadline:
            time.sleep(0.05)
        for _ in range(200):
            assert str(program) in where_is(service, services.stacks_dir)
        assert services.exit_code(service) is None


@pytest.mark.skipif(sys.platform != "linux", reason="has no real-time signals")
@pytest.mark.parametrize("name", ["SIGUSR2", "SIGRTMAX"])
def test_environment_that_uses_a_signal_keeps_it(name, tmp_path):
    site = Path(ROOT, "trl_atropos/environment_site")
    program = f"""
import signal, sys
sys.path.insert(0, {str(site)!r})
signal.signal(signal.{name}, print)
import environment_stacks
environment_stacks.install()
assert signal.getsignal(signal.{name}) is print
"""
    child = os.spawnle(
        os.P_WAIT,
        sys.executable,
        sys.executable,
        "-c",
        program,
        {"TRL_ATROPOS_STACKS": str(tmp_path)},
    )
    assert child == 0
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(getattr(signal, name)) is signal.SIG_DFL  # of this process


def test_stacks_of_libraries_have_no_place():
    answer = """Thread 0x00007f (most recent call first):
  File "/usr/lib/python3.11/selectors.py", line 468 in select
  File "/usr/lib/python3.11/asyncio/base_events.py", line 604 in run_forever
  File "/home/me/environment.py", line 99 in <module>

Task (most recent call first):
  File "/venv/lib/python3.11/site-packages/httpx/_client.py", line 12 in send
  File "/home/me/environment.py", line 40 in collect_trajectories
  File "/venv/lib/python3.11/site-packages/atroposlib/envs/base.py", line 700 in handle_env
Task (most recent call first):
  File "/venv/lib/python3.11/site-packages/atroposlib/envs/base.py", line 900 in env_manager
end of answer
"""
    assert places_of(answer) == ["collect_trajectories, /home/me/environment.py:40"]
