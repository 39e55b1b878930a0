"""Every mistake of `mistakes.py` is answered with its cause, its place and a fix.

The processes are those of a run and of `trl-atropos try`, forked from one that has done the slow
imports. All of them run side by side, before the first test.
"""

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.check.desk import Desk
from tests.commands.mistakes import FATAL, LOST, SURVIVED, TYPED, Mistake, line_of
from tests.forge import TRAINER, WITHOUT_TORCH, Forge, Forked
from tests.rollouts.bare_trainer import PAUSE, BareTrainer
from tests.rollouts.conftest import Api
from tests.server_process import free_port
from trl_atropos import cli
from trl_atropos.commands import rehearsal
from trl_atropos.environment_entry import SITE, EnvironmentSpec
from trl_atropos.errors import RolloutError, ServiceError
from trl_atropos.services.environments import EnvironmentLog
from trl_atropos.services.manager import Service, Services
from trl_atropos.services.signals import handlers

WAIT = 30.0  # seconds
PATH = os.pathsep.join([SITE, WITHOUT_TORCH["PYTHONPATH"]])
FORGE = Forge("import atroposlib.envs.base, transformers", {"PYTHONPATH": PATH})
NOBODY = {"base_url": "http://127.0.0.1:9/v1", "api_key": "none", "model_name": "none"}


@dataclass
class Process:
    """The process of an environment with a mistake."""

    mistake: Mistake
    script: Path
    log: Path
    groups: Path  # what `groups.py` writes
    forked: Forked

    def await_end(self) -> int:
        """Returns the exit code, as a guard passes it on."""
        code = self.forked.wait(WAIT)
        return code if code >= 0 else 128 - code

    def requires(self, message: str) -> None:
        """Requires that a message has the mistake's cause, place and fix."""
        print(message)  # `pytest -rP` shows all messages
        mistake = self.mistake
        place = ""
        if mistake.place:
            line = line_of(self.script.read_text())
            place = re.escape(f"{self.script.name}:{line} in {mistake.place}")
        for fragment in (mistake.cause, place, mistake.fix):
            assert re.search(fragment, message), f"{fragment!r} is not in:\n{message}"


@pytest.fixture(scope="module")
def processes(tiny_model, tmp_path_factory) -> Iterator[dict[str, Process]]:
    """The processes of all mistakes, by their names."""
    folder = tmp_path_factory.mktemp("environments")
    api = Api(free_port())
    api.start()
    trainer = BareTrainer(api.url, batch_size=8)
    ended = threading.Event()
    pulling = threading.Thread(target=pull_until, args=(ended, trainer), daemon=True)
    pulling.start()  # environments register once it has asked
    started = {}
    try:
        for table, module in ((FATAL, "run"), (LOST, "run"), (SURVIVED, "groups")):
            for name, mistake in table.items():
                place = folder / str(len(started))
                started[name] = start(mistake, module, place, tiny_model, api.url)
        yield started
    finally:
        for process in started.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.forked.pid, signal.SIGKILL)
        ended.set()
        pulling.join()
        trainer.close()
        api.stop()


def pull_until(ended: threading.Event, trainer: BareTrainer) -> None:
    """Takes batches. Those of a mistake that comes late would otherwise be so many that all other
    environments wait, before they come to their own."""
    while not ended.wait(PAUSE):
        trainer.pull()


def start(mistake: Mistake, module: str, folder: Path, model: Path, url: str) -> Process:
    folder.mkdir()
    script = folder / "environment.py"
    script.write_text(mistake.source())
    settings = {
        "tokenizer_name": str(model),
        "rollout_server_url": url,
        "total_steps": 1 if module == "groups" else 1000,
        "batch_size": 8,
        "wandb_name": "mine",
        "use_wandb": False,
        "ensure_scores_are_not_same": False,
        "data_path_to_save_groups": str(folder / "groups.jsonl"),
    }
    settings |= dict(mistake.config)
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump({"env": settings, "openai": [NOBODY, NOBODY]}))
    kind = "process" if module == "groups" else "serve"
    words = ["-m", module, str(script), kind, "--config", str(config)]
    variables = EnvironmentSpec(path=str(script)).variables(TRL_ATROPOS_STACKS=str(folder))
    log = folder / "log"
    forked = FORGE.fork(words, os.environ | variables, log)
    return Process(mistake, script, log, folder / "groups.jsonl", forked)


def death_of(process: Process, folder: Path) -> str:
    """Returns what a run says as the process of its environment has ended."""
    code = process.await_end()
    # A guard passes on how its service ended; this one has no service to end any more.
    guard = subprocess.Popen(["sh", "-c", f"exit {code}"])
    guard.wait()
    reports, report = os.pipe()
    os.close(report)
    with Services(folder) as services:
        service = Service("environment-mine", process.log, 0, None, "", guard, reports)
        services._services[service.name] = service
        with pytest.raises(ServiceError) as death:
            services.check()
    return str(death.value)


@pytest.mark.parametrize("name", LOST)
def test_mistake_that_atropos_hides_is_in_its_log(name, processes):
    process = processes[name]
    log = EnvironmentLog(process.log)
    deadline = time.monotonic() + WAIT
    while not log.read().failures:
        assert time.monotonic() < deadline, process.log.read_text()
        assert process.forked.poll() is None, process.log.read_text()
        time.sleep(0.1)
    os.killpg(process.forked.pid, signal.SIGKILL)  # it would fail on and on
    process.requires(log.undelivered()[0])


@pytest.mark.parametrize("name", FATAL)
def test_mistake_that_ends_environment_is_named(name, processes, tmp_path):
    process = processes[name]
    process.requires(death_of(process, tmp_path))


@pytest.mark.parametrize("name", SURVIVED)
def test_mistake_in_group_is_shown_by_try(name, processes):
    process = processes[name]
    assert process.await_end() == 0, process.log.read_text()
    line = json.loads(process.groups.read_text())
    spec = EnvironmentSpec(path=str(process.script))
    with pytest.raises(RolloutError) as refused:
        list(rehearsal._shown(None, spec, line, process.log, 1.0))
    process.requires(str(refused.value))


@pytest.fixture
def desk(tiny_model, tmp_path, monkeypatch) -> Iterator[Desk]:
    monkeypatch.setenv("COLUMNS", "400")  # no sentence is broken into lines
    with handlers():
        yield Desk(tmp_path, tiny_model, monkeypatch)


@pytest.mark.parametrize("name", TYPED)
def test_typed_mistake_is_answered(name, desk, capsys):
    typed = TYPED[name]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        typed.plant(desk)
        with pytest.raises(SystemExit) as ended:
            cli._run(typed.words.split())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)  # pytest may write to a file itself
    output = "".join(capsys.readouterr())
    code = ended.value.code
    if isinstance(code, str):  # which Python prints
        output += code
        code = 1
    message = " ".join(output.split())
    print(message)
    for fragment in (typed.cause, typed.place, typed.fix):
        assert re.search(fragment, message), f"{fragment!r} is not in:\n{message}"
    assert code == typed.code
    assert "Traceback" not in output


# What Ctrl-C says of a run while its first service starts: by whether there is a checkpoint.
INTERRUPTED = {
    False: r"Interrupted \(SIGINT\)\. Nothing is saved: .*`save_steps`",
    True: r"Interrupted .* last checkpoint is .*run/checkpoint-7, .* with "
    "`--resume_from_checkpoint true` goes on there",
}


@pytest.mark.parametrize("has_checkpoint", INTERRUPTED)
def test_ctrl_c_says_what_is_saved(has_checkpoint, desk):
    settings = {"start_atropos": True, "atropos_url": desk.free_url()}
    words = desk.recipe(**settings)
    if has_checkpoint:
        words = desk.with_checkpoint("a", resume_from_checkpoint=True, **settings)
    log = desk.folder / "log"
    variables = {"ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "no"}
    argv = ["-m", "trl_atropos.train", *words]
    job = TRAINER.fork(argv, os.environ | variables, log, cwd=desk.folder)
    try:
        deadline = time.monotonic() + WAIT
        while "Started atropos" not in log.read_text():
            assert time.monotonic() < deadline and job.poll() is None, log.read_text()
            time.sleep(0.05)
        os.kill(job.pid, signal.SIGINT)
        assert job.wait(WAIT) == 130
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(job.pid, signal.SIGKILL)
    message = " ".join(log.read_text().split())
    assert re.search(INTERRUPTED[has_checkpoint], message), message
    assert "Traceback" not in message
