"""Services that are started again: by real guards, with real processes, a real Atropos API and real
environments."""

import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.forge import FORKED_ENGINES, WITHOUT_TORCH
from tests.launching import Run, make_model
from tests.rollouts.bare_trainer import BareTrainer
from tests.server_process import free_port
from tests.services.test_services import start_trainer
from trl_atropos.environment_entry import EnvironmentSpec
from trl_atropos.errors import ServiceError
from trl_atropos.rollouts.source import AtroposSource, RunInfo
from trl_atropos.services.environments import HOPELESS, Disconnector, Supervisor
from trl_atropos.services.guard import members
from trl_atropos.services.manager import ATROPOS, Services
from trl_atropos.services.manager import SETTLED as SETTLED_BY_DEFAULT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

SOON = 15.0
SETTLED = 0.3
FOREVER = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
PLAIN_ENVIRONMENT = str(Path(__file__).parents[1] / "rollouts" / "plain_environment.py")


@pytest.fixture
def services(tmp_path):
    with Services(tmp_path / "logs") as services:
        yield services


def until(condition: Callable, what: str, seconds: float = SOON):
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"late: {what}"
        time.sleep(0.02)
    return result


def process_of(services: Services, name: str) -> int:
    """The process that a service's guard started."""
    return until(lambda: members(services._services[name].guard.pid), f"{name} runs")[0]


def start(
    services: Services, name: str, command: list[str], settled: float = SETTLED, **arguments
) -> int:
    """Start a service and wait until it says that it is up, and has lived for longer than `settled`
    seconds. Returns its process."""
    services.start(name, command, settled=settled, **arguments)
    log = services.log_dir / f"{name}.log"
    until(lambda: "\nup\n" in log.read_text(), f"{name} is up")
    time.sleep(2 * settled)
    return process_of(services, name)


def kill_and_see_again(services: Services, name: str, seconds: float = SOON) -> float:
    """Kill a service. Returns how long it took until it was there again."""
    pid = process_of(services, name)
    before, began = services._services[name].restarts, time.monotonic()
    os.kill(pid, signal.SIGKILL)
    until(lambda: services._services[name].restarts > before, f"{name} is started again", seconds)
    until(lambda: process_of(services, name) != pid, f"{name} runs again")
    return time.monotonic() - began


def test_ended_service_is_restarted_and_counted(services, caplog):
    deaths = []
    pid = start(services, "environment-one", FOREVER, restarts=3)
    services.watch(deaths.append)
    with caplog.at_level(logging.WARNING):
        os.kill(pid, signal.SIGKILL)
        until(lambda: services.restarts == 1, "the restart is counted")
    assert process_of(services, "environment-one") != pid
    assert deaths == []
    assert re.search(
        r"environment-one ended with exit code 137 \(SIGKILL\) after \d s; .* again in 1 s",
        caplog.text,
    )


def test_waits_before_restarts_double(services):
    start(services, "environment-one", FOREVER, restarts=3)
    services.watch(lambda error: None)
    waited = []
    for _ in range(3):
        waited.append(kill_and_see_again(services, "environment-one"))
        time.sleep(2 * SETTLED)
    log = (services.log_dir / "environment-one.log").read_text()
    told = [int(wait) for wait in re.findall(r"starting it again in (\d+) s", log)]
    assert told == [1, 2, 4]
    assert all(wait >= least for wait, least in zip(waited, told, strict=True))


def test_death_after_last_allowed_restart_ends_run(services):
    deaths, seen = [], threading.Event()
    start(services, "environment-one", FOREVER, restarts=1)
    services.watch(lambda error: (deaths.append(error), seen.set()))
    kill_and_see_again(services, "environment-one")
    time.sleep(2 * SETTLED)
    os.kill(process_of(services, "environment-one"), signal.SIGKILL)
    assert seen.wait(SOON)
    assert (
        "environment-one ended with exit code 137 (SIGKILL), after 1 restarts, while the run needs "
        "it" in str(deaths)
    )


def test_service_dying_at_restart_ends_run_with_log(services, tmp_path):
    """Like an environment whose data has gone: it starts well once, and never again."""
    once = "test -e gone && echo no data found && exit 1; echo up; touch gone; exec sleep 600"
    deaths, seen = [], threading.Event()
    # A shell ends within two seconds on the busiest machine, which an interpreter may not.
    pid = start(
        services, "environment-one", ["sh", "-c", once], settled=2.0, restarts=3, cwd=tmp_path
    )
    services.watch(lambda error: (deaths.append(error), seen.set()))
    os.kill(pid, signal.SIGKILL)
    assert seen.wait(SOON)
    assert "ended with exit code 1, after 1 restarts," in str(deaths[0])
    assert "no data found" in str(deaths[0])


def test_service_failing_at_start_is_not_restarted(services):
    services.start(
        "environment-one",
        [sys.executable, "-c", "import sys; sys.exit('no module found')"],
        restarts=3,
    )
    services._services["environment-one"].guard.wait(SOON)
    with pytest.raises(ServiceError, match=r"ended with exit code 1 while(.|\n)*no module found"):
        services.check()


@pytest.mark.parametrize(("word", "comes_back"), [("starting", False), ("registered", True)])
def test_environment_that_never_registered_is_not_restarted(word, comes_back, services):
    """However long it lived: its set-up would fail again."""
    program = f"""
import os, sys, time
open(os.environ["TRL_ATROPOS_STAGE"], "w").write({word!r})
time.sleep({2 * SETTLED})
sys.exit("no data found")
"""
    command = [sys.executable, "-c", program]
    options = {"restarts": 1, "settled": SETTLED, "scratch": True}
    service = services.start("environment-one", command, **options)
    service.guard.wait(SOON)
    log = service.log_path.read_text()
    assert ("starting it again" in log) is comes_back
    assert log.count("\nno data found") == 1 + comes_back
    assert ("ended before it had ever registered" in log) is not comes_back


def test_stop_during_restart_wait_starts_nothing(services):
    start(services, "environment-one", FOREVER, restarts=3)
    services.watch(lambda error: None)
    guard = services._services["environment-one"].guard.pid
    log = services.log_dir / "environment-one.log"
    kill_and_see_again(services, "environment-one")
    until(lambda: log.read_text().count("\nup\n") == 2, "it is up again")
    time.sleep(2 * SETTLED)
    os.kill(process_of(services, "environment-one"), signal.SIGKILL)
    until(lambda: "starting it again in 2 s" in log.read_text(), "the guard waits")
    services.stop()  # a stop that waited for the 2 seconds would find a third process
    assert members(guard) == [] and not Path(f"/proc/{guard}").exists()
    assert log.read_text().count("\nup\n") == 2


def test_restarted_service_has_no_old_processes(services):
    parent = (
        "import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', 'import time; "
        "time.sleep(600)'])\n"
    )
    parent += "print('up', flush=True)\ntime.sleep(600)"
    start(services, "environment-one", [sys.executable, "-c", parent], restarts=3)
    guard = services._services["environment-one"].guard.pid
    before = until(
        lambda: (pids := members(guard)) and len(pids) == 2 and pids, "both processes run"
    )
    services.watch(lambda error: None)
    os.kill(before[0], signal.SIGKILL)
    until(lambda: services.restarts == 1, "it is started again")
    after = until(
        lambda: (pids := members(guard)) and len(pids) == 2 and pids, "both processes run again"
    )
    assert not set(before) & set(after)


def test_trainer_killed_during_wait_leaves_no_guard(tmp_path):
    trainer = (
        "import os, sys, time\nfrom trl_atropos.services.manager import Services\nservices = "
        "Services('logs')\nservice = [sys.executable, '-c', 'import time; print(\"up\", "
        "flush=True); time.sleep(0.5)']\nservices.start('a', service, restarts=9, settled=0.1)\n"
        "print(services._services['a'].guard.pid, flush=True)\ntime.sleep(600)\n"
    )
    process = start_trainer(trainer, tmp_path)
    guard = int(process.stdout.readline())
    log = tmp_path / "logs" / "a.log"
    until(lambda: "again in 2 s" in log.read_text(), "the guard waits")
    process.kill()
    process.wait()
    process.stdout.close()
    until(lambda: not Path(f"/proc/{guard}").exists(), "the guard is gone")
    assert log.read_text().count("\nup\n") == 2  # and it has not been started a third time


# -------------------------------------------------------------------- with the API and environments


class Loop:
    """An API and environments as services, and a trainer's puller."""

    def __init__(self, services: Services, model: Path):
        self.services, self.model = services, model
        self.url = f"http://127.0.0.1:{free_port()}"
        port = self.url.rpartition(":")[2]
        api = [
            sys.executable,
            "-m",
            "atroposlib.cli.run_api",
            "--host",
            "127.0.0.1",
            "--port",
            port,
        ]
        services.start(ATROPOS, api, health_url=f"{self.url}/", restarts=3, settled=SETTLED)
        services.wait_healthy(ATROPOS, 60)
        self.deaths: list[ServiceError] = []
        services.watch(self.deaths.append, Disconnector(services, self.url).ended)

    def join(self) -> None:
        self.trainer = BareTrainer(self.url)
        self.client = self.trainer.client

    def start_environment(self, name: str, *flags: str) -> None:
        command = [
            sys.executable,
            PLAIN_ENVIRONMENT,
            self.url,
            str(self.model),
            "--offpolicy",
            "4",
            *flags,
        ]
        env = EnvironmentSpec(path=PLAIN_ENVIRONMENT, env=WITHOUT_TORCH).variables()
        self.services.start(f"environment-{name}", command, env=env, restarts=3, settled=SETTLED)

    def pull(self, batches: int) -> None:
        for _ in range(batches):
            self.trainer.pull_batch(90)
            assert self.deaths == []


@pytest.fixture
def loop(services, tiny_model):
    return Loop(services, tiny_model)


@pytest.mark.slow
def test_killed_environment_is_replaced_at_api(loop):
    loop.join()
    loop.start_environment("one", "--minimum", "0.5")
    loop.pull(3)
    kill_and_see_again(loop.services, "environment-one")
    until(lambda: (loop.pull(1), len(loop.client.environments()) == 2)[1], "it registers again", 60)
    until(lambda: loop.client.environment(1).env_weight == 1.0, "the dead one's weight is gone")
    assert loop.client.environment(1).unallocated_fraction == 0.5
    loop.pull(3)


@pytest.mark.full
@pytest.mark.slow
def test_dead_environment_of_two_is_known_by_its_log(loop):
    loop.start_environment("one")  # both wait for the trainer, which makes them log what they do
    loop.start_environment("two", "--minimum", "0.5")
    for name in ("one", "two"):
        log = loop.services.log_dir / f"environment-{name}.log"
        until(
            lambda log=log: "Waiting to register" in log.read_text(),
            f"{name} wants to register",
            60,
        )
    loop.join()
    until(
        lambda: (loop.pull(1), len(loop.client.environments()) == 2)[1], "both have registered", 60
    )
    loop.pull(3)
    assert len(loop.client.environments()) == 2
    supervisor = Supervisor(loop.services, lambda error: None)
    names = supervisor.names()
    assert (set(names), set(names.values())) == ({0, 1}, {"one", "two"})
    kill_and_see_again(loop.services, "environment-two")
    until(lambda: (loop.pull(1), loop.client.environment(2))[1], "it registers again", 60)
    until(lambda: supervisor.names() == names | {2: "two"}, "its log shows the new number")
    until(
        lambda: loop.client.environment(2).env_weight == 0.5, "only the dead one's weight is gone"
    )
    assert loop.client.environment(2).unallocated_fraction == 0.5
    loop.pull(3)


@pytest.mark.slow
def test_killed_api_comes_back_with_environments(loop):
    loop.join()
    loop.start_environment("one")
    loop.pull(3)
    os.kill(process_of(loop.services, ATROPOS), signal.SIGKILL)
    loop.pull(3)
    assert loop.trainer.restarts == 1
    assert [one.restarts for one in loop.services.running()] == [1, 1]
    assert len(loop.client.environments()) == 1
    assert loop.client.environment(0).env_weight == 1.0


@pytest.mark.slow
def test_diagnosis_and_metrics_name_own_environments(loop, tmp_path, caplog):
    run = RunInfo(
        batch_size=4,
        max_sequence_length=64,
        temperature=1.0,
        starting_step=0,
        max_steps=10,
        output_dir=str(tmp_path / "run"),
        save_steps=0,
        run_name="test",
    )
    failures = []
    source = AtroposSource(loop.url, environments=Supervisor(loop.services, failures.append))
    source.start(run)
    try:
        source.poll(4, 0.1)  # lets environments in
        loop.start_environment("one", "--faults", "constant scores")
        loop.start_environment("two", "--faults", "cannot score", "--seconds", "0.5")
        until(
            lambda: failures and "environment-one: " in source.diagnose(), "groups were dropped", 90
        )
        told = source.diagnose()
        metrics = source.metrics()
    finally:
        source.close()
    assert "has 2 environments, but its queue is empty" in told
    for sign in (
        "one: [0-9]+ times it dropped a group because its scores are all equal: set "
        "`--env.ensure_scores_are_not_same",
        "two: [0-9]+ times it failed to collect a group; the last error was KeyError: 'weight' .* "
        "in score",
    ):
        # An environment at work may say where its code stands.
        state = r"It has been running for \d+ s(, and its code is in .*)?\. Its log: \S+\.log\."
        account = rf"environment-{sign}.* {state}.* The Atropos API"
        assert re.search(account, told), told
    (failure,) = failures
    count = re.match(
        r"environment-two failed on each of its first (\d+) groups\. The last error was Key",
        str(failure),
    )
    assert int(count[1]) >= HOPELESS
    (warning,) = [
        record.getMessage() for record in caplog.records if "failed on a group" in record.message
    ]
    log = loop.services.log_dir / "environment-two.log"
    assert re.match(
        r"environment-two failed on a group: KeyError: 'weight' \(.*plain_environment.py:", warning
    )
    assert warning.endswith(f"the traceback is in its log, {log}.")
    assert log.read_text().count("Traceback (most recent call last)") == 1
    assert metrics["services/restarts"] == 0.0 and "rollouts/waiting_rows" in metrics


# ------------------------------------------------------------------------------------- the main job


@pytest.mark.full  # whose parts are above, and in `rollouts/test_source_faults.py`
@pytest.mark.slow
@pytest.mark.server
def test_run_survives_death_of_api_and_environment(tmp_path):
    model = make_model(tmp_path / "model")
    flags = (
        "--max_steps",
        "100000",
        "--per_device_train_batch_size",
        "16",
        "--rollout_timeout",
        "120",
    )
    with Run(tmp_path / "out", model, flags=flags, env=FORKED_ENGINES) as run:

        def trains_beyond(step: int) -> None:
            run.until(lambda: run.info().get("policy_version", 0) > step, f"step {step}")

        trains_beyond(3)
        time.sleep(SETTLED_BY_DEFAULT)  # then it is started again
        os.kill(run.children(run.guard("atropos"))[0], signal.SIGKILL)
        run.until(lambda: "atropos ended with exit code 137" in run.output, "it is told")
        trains_beyond(run.info()["policy_version"] + 20)
        assert "error:" not in run.output
