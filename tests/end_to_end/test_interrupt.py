"""The quickstart, interrupted at every stage in every way, and with services that die: nothing may
be left behind.

All 30 combinations of stage and way take a quarter of an hour and run with TRL_ATROPOS_FULL=1;
otherwise those in `COVERING` run. What a signal does to the trainer alone is in `test_signals.py`.
"""

import contextlib
import os
import re
import signal
import sys
import time

import pytest

from tests.forge import FORKED_ENGINES
from tests.launching import SLOW, Run, ask, command_of, make_model

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(
        sys.platform != "linux",
        reason="reads /proc, and the kernel's parent-death signal is Linux'",
    ),
]

GONE_WITHIN = 80.0  # seconds, on a machine that runs other tests beside it
CTRL_C = "\x03"

# Stage -> how to launch a run that surely gets there and stays a while.
STAGES = {
    "starting the API": {},
    "starting the server": {},
    "waiting for rollouts": {"flags": ("--per_device_train_batch_size", "65536")},
    "training": {},
    "inside a pause": {"entry": "tests.launching", "env": {SLOW: "step"}},
    "saving": {
        "entry": "tests.launching",
        "env": {SLOW: "save"},
        "flags": ("--save_strategy", "steps", "--save_steps", "1"),
    },
}
WAYS = [
    "Ctrl-C",
    "SIGINT to the launcher",
    "SIGTERM to the launcher",
    "kill the launcher",
    "kill the trainer",
]
COVERING = {
    ("inside a pause", "kill the trainer"),
}
CASES = [
    pytest.param(
        stage,
        way,
        id=f"{stage}-{way}".replace(" ", "_"),
        marks=() if (stage, way) in COVERING else pytest.mark.full,
    )
    for stage in STAGES
    for way in WAYS
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("quickstart") / "model")


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "way"), CASES)
def test_interrupted_run_leaves_nothing_behind(stage, way, model, tmp_path):
    setup = {"flags": (), **STAGES[stage]}
    setup["flags"] = ("--max_steps", "100000", *setup["flags"])
    if stage != "starting the server":  # there, the engine is started as vLLM does it
        setup["env"] = setup.get("env", {}) | FORKED_ENGINES
    with Run(tmp_path / "out", model, terminal=way == "Ctrl-C", **setup) as run:
        wait_for(stage, run)
        output_before = len(run.output)
        interrupt(way, run)
        seconds = until_gone(run)
        code = run.exit_code()
        print(f"{stage} | {way} | {seconds:.1f} s | exit code {code}")
        print(run.output[output_before:])
    assert code != 0
    if way in ("Ctrl-C", "SIGTERM to the launcher"):
        # accelerate ends with a KeyboardInterrupt, which nothing of ours can prevent.
        tracebacks = re.findall(r"^Traceback .*\n(.*)", run.output[output_before:], re.MULTILINE)
        assert all("/accelerate" in first_line for first_line in tracebacks)


@pytest.mark.full  # as `test_services.py` and `test_wrong_inputs.py` see it
@pytest.mark.slow
@pytest.mark.parametrize("service", ["vllm", "environment-quickstart"])
def test_dead_service_ends_run_with_end_of_its_log(service, model, tmp_path):
    flags = ("--max_steps", "100000")
    with Run(tmp_path / "out", model, flags=flags, env=FORKED_ENGINES) as run:
        wait_for("training", run)
        output_before = len(run.output)
        if service == "vllm":
            os.kill(engine(run), signal.SIGKILL)
        else:
            end_for_good(run, service)
        seconds = until_gone(run)
        code = run.exit_code()
        said = run.output[output_before:]
        print(f"{service} dies | {seconds:.1f} s | exit code {code}")
        print(said)
    assert code == 1
    assert said.count("error:") == 1, said
    assert f"error: {service} ended with exit code" in said
    assert f"The last lines of {tmp_path}/out/logs/{service}.log:\n" in said
    assert "Traceback" not in said.partition("The last lines of")[0]
    if service == "vllm":
        assert "vllm ended with exit code 137 (SIGKILL) while" in said


def end_for_good(run: Run, service: str) -> None:
    """Kills a service until it is not started again: an environment that ends within 30 seconds of
    its start ends the run."""
    guard = run.guard(service)
    deadline = time.monotonic() + GONE_WITHIN
    while guard in run.processes():
        assert time.monotonic() < deadline, run.output[-3000:]
        for pid in run.children(guard):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.5)


def wait_for(stage: str, run: Run) -> None:
    run.until(reached(stage, run), stage)


def reached(stage: str, run: Run):
    """A condition that tells from outside whether a run is at a stage."""
    log = run.folder / "logs" / "atropos.log"
    return {
        "starting the API": lambda: log.exists() and ask(run.atropos_url) is None,
        "starting the server": lambda: (
            "Started environment-" in run.output
            and engine(run)
            and "vllm is healthy" not in run.output
        ),
        "waiting for rollouts": lambda: (
            (ask(f"{run.atropos_url}/status") or {}).get("queue_size", 0) >= 10
        ),
        "training": lambda: run.info().get("policy_version", 0) >= 3,
        "inside a pause": lambda: paused_at(run) >= 1 and (time.sleep(1), paused_at(run) >= 1)[1],
        "saving": lambda: (run.folder / "checkpoint-1" / "model.safetensors").exists(),
    }[stage]


def paused_at(run: Run) -> int:
    """The policy version at which the server is paused, or -1."""
    info = run.info()
    return info["policy_version"] if info.get("paused") else -1


def engine(run: Run) -> int | None:
    """Process of the vLLM engine: the child of the API server that does its work."""
    servers = run.children(run.guard("vllm"))
    born = [pid for server in servers for pid in run.children(server)]
    return next((pid for pid in born if "resource_tracker" not in command_of(pid)), None)


def interrupt(way: str, run: Run) -> None:
    if way == "Ctrl-C":
        run.type(CTRL_C)
        return
    pid = run.trainer if way == "kill the trainer" else run.launcher
    os.kill(
        pid,
        {"SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM}.get(way.split()[0], signal.SIGKILL),
    )


def until_gone(run: Run) -> float:
    """Seconds until nothing of a run is left."""
    began = time.monotonic()
    while left := run.left():
        assert time.monotonic() - began < GONE_WITHIN, f"still there: {left}\n{run.output[-3000:]}"
        time.sleep(0.1)
    return time.monotonic() - began
