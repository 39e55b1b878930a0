"""Signals, sent to real Python processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import ROOT
from trl_atropos.services.signals import _runs_launcher

WITHIN = 15.0

START = """
import os, signal, sys, threading, time
from trl_atropos.services.signals import Interrupted, deferred, die_with_launcher, install_handlers
from trl_atropos.services.signals import interrupt_main_with
def me(signum): os.kill(os.getpid(), signum)
def say(*words): print(*words, flush=True)
"""

PATIENT = """
die_with_launcher()
install_handlers()
try:
    say(os.getpid())
    time.sleep(60)
finally:
    open("cleaned", "w").close()
"""

STEPPING = """
die_with_launcher()
install_handlers()
try:
    with deferred():
        say(os.getpid())
        time.sleep(3)  # longer than the launcher lives after a Ctrl-C
        open("stepped", "w").close()
finally:
    time.sleep(1)
    open("cleaned", "w").close()
"""


def start(program: str, cwd: Path, **options) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    (cwd / "program.py").write_text(START + program)
    command = options.pop("command", [sys.executable, "program.py"])
    return subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, text=True, **options
    )


def outcome(program: str, cwd: Path, **options) -> tuple[int, list[str]]:
    """Exit code and lines printed by a program."""
    process = start(program, cwd, **options)
    output, _ = process.communicate(timeout=WITHIN)
    return process.returncode, output.splitlines()


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_raises_and_sets_exit_code(tmp_path, signum, code):
    program = f"""
install_handlers()
try:
    me({int(signum)})
    time.sleep(60)
except Interrupted as error:
    say("clean-up after", error.signum.name)
    raise
"""
    assert outcome(program, tmp_path) == (code, [f"clean-up after {signal.Signals(signum).name}"])


def test_sigint_ignored_at_start_is_handled(tmp_path):
    process = start(
        "install_handlers()\nsay('ready')\ntime.sleep(60)",
        tmp_path,
        command=["sh", "-c", f"trap '' INT; exec {sys.executable} program.py"],
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=WITHIN)
    assert process.returncode == 130


def test_further_signals_do_not_disturb_clean_up(tmp_path):
    program = """
install_handlers()
try:
    me(signal.SIGINT)
finally:
    me(signal.SIGTERM)
    me(signal.SIGINT)
    say("clean")
"""
    assert outcome(program, tmp_path) == (130, ["clean"])


@pytest.mark.parametrize("place", ["a finalizer", "a callback of the garbage collector"])
def test_signal_is_not_lost_where_nothing_can_be_raised(tmp_path, place):
    """It raises soon after, and a deferred block that has begun by then is still whole."""
    program = f"""
import gc
class Late:
    def __del__(self): me(signal.SIGINT)
def callback(phase, _):
    if phase == "start":
        gc.callbacks.remove(callback)
        me(signal.SIGINT)
def drop():
    if {place == "a finalizer"}:
        Late()
    else:
        gc.callbacks.append(callback)
        gc.collect()
install_handlers()
try:
    drop()
    with deferred():
        time.sleep(0.5)
        say("the step is whole")
    time.sleep(60)
finally:
    me(signal.SIGINT)
    say("clean")
"""
    ended = outcome(program, tmp_path, stderr=subprocess.PIPE)
    assert ended == (130, ["the step is whole", "clean"])


def test_signal_in_deferred_block_waits_for_its_end(tmp_path):
    program = """
install_handlers()
with deferred():
    with deferred():
        me(signal.SIGINT)
    say("the step is whole")
say("not reached")
"""
    assert outcome(program, tmp_path) == (130, ["the step is whole"])


def test_echo_of_signal_spares_deferred_block(tmp_path):
    program = """
install_handlers()
with deferred():
    me(signal.SIGINT)
    me(signal.SIGTERM)
    say("the step is whole")
"""
    assert outcome(program, tmp_path) == (130, ["the step is whole"])


def test_second_signal_breaks_hung_deferred_block(tmp_path):
    program = """
from trl_atropos.services import signals
signals.ECHO_SECONDS = 0.1
install_handlers()
with deferred():
    me(signal.SIGINT)
    time.sleep(0.3)
    me(signal.SIGTERM)
    say("not reached")
"""
    assert outcome(program, tmp_path) == (143, [])


def test_signals_raise_at_once_after_deferred_block(tmp_path):
    program = """
install_handlers()
with deferred():
    say("quiet")
me(signal.SIGINT)
say("not reached")
"""
    assert outcome(program, tmp_path) == (130, ["quiet"])


def test_ctrl_c_without_handlers_waits_for_block(tmp_path):
    program = """
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test runner in the background has it ignored
try:
    with deferred():
        me(signal.SIGINT)
        say("done")
except KeyboardInterrupt:
    say("interrupted")
try:
    me(signal.SIGINT)
    time.sleep(5)
except KeyboardInterrupt:
    say("at once again")
"""
    assert outcome(program, tmp_path) == (0, ["done", "interrupted", "at once again"])


def test_second_ctrl_c_without_handlers_breaks_block(tmp_path):
    program = """
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test runner in the background has it ignored
try:
    with deferred():
        me(signal.SIGINT)
        me(signal.SIGINT)
        say("not reached")
except KeyboardInterrupt:
    say("interrupted")
"""
    assert outcome(program, tmp_path) == (0, ["interrupted"])


def test_deferred_does_nothing_outside_main_thread(tmp_path):
    program = """
install_handlers()
def work():
    with deferred():
        say("in the thread")
        entered.set()
        time.sleep(1)
entered = threading.Event()
threading.Thread(target=work, daemon=True).start()
entered.wait()
try:
    me(signal.SIGINT)
    say("not reached")
except Interrupted:
    say("raised while the thread was in its block")
"""
    assert outcome(program, tmp_path) == (
        0,
        ["in the thread", "raised while the thread was in its block"],
    )


def test_thread_exception_reaches_blocked_main_thread(tmp_path):
    program = """
install_handlers()
threading.Timer(0.3, interrupt_main_with, [RuntimeError("the server died")]).start()
try:
    time.sleep(60)
except RuntimeError as error:
    me(signal.SIGTERM)
    say("caught:", error)
"""
    assert outcome(program, tmp_path) == (0, ["caught: the server died"])


def test_thread_exception_waits_for_deferred_block(tmp_path):
    program = """
install_handlers()
try:
    with deferred():
        thread = threading.Thread(target=interrupt_main_with, args=[RuntimeError("the server died")])
        thread.start()
        thread.join()
        say("the step is whole")
except RuntimeError as error:
    say("caught:", error)
"""
    assert outcome(program, tmp_path) == (0, ["the step is whole", "caught: the server died"])


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + WITHIN
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.05)


ACCELERATE = [
    *(
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--cpu",
        "--num_processes",
        "1",
        "--num_machines",
        "1",
    ),
    *("--mixed_precision", "no", "--dynamo_backend", "no"),
]
TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--nproc_per_node",
    "1",
    "--master_port",
    "0",
]
LAUNCHERS = pytest.mark.parametrize(
    "launcher", [ACCELERATE, TORCHRUN], ids=["accelerate", "torchrun"]
)


@LAUNCHERS
def test_trainer_cleans_up_after_killed_launcher(tmp_path, launcher):
    process = start(PATIENT, tmp_path, command=[*launcher, "program.py"])
    assert process.stdout.readline().strip().isdigit()
    process.kill()
    process.wait()
    process.stdout.close()
    wait_for(tmp_path / "cleaned")


@LAUNCHERS
def test_terminal_ctrl_c_spares_step_and_clean_up(tmp_path, launcher):
    process = start(STEPPING, tmp_path, command=[*launcher, "program.py"], start_new_session=True)
    assert process.stdout.readline().strip().isdigit()
    os.killpg(process.pid, signal.SIGINT)
    process.stdout.close()
    wait_for(tmp_path / "cleaned")
    process.wait(WITHIN)
    assert (tmp_path / "stepped").exists()


@pytest.mark.parametrize(
    "command",
    [
        "/usr/bin/python3 /opt/bin/accelerate launch train.py",
        "python3.12 -u -X utf8 -m accelerate.commands.launch train.py",
        "python3 /opt/bin/torchrun train.py",
        "python3 -m torch.distributed.run train.py",
        "python3 /lib/python3/site-packages/torch/distributed/launch.py train.py",
    ],
)
def test_launchers_are_known_by_command_line(command):
    assert _runs_launcher(command.split())


@pytest.mark.parametrize(
    "command",
    [
        "python3 run.py",
        "python3 -m trl_atropos.train --log accelerate",
        "bash /home/me/accelerate/run.sh",
        "",
    ],
)
def test_other_parents_are_no_launchers(command):
    assert not _runs_launcher(command.split(" "))


def test_trainer_without_launcher_outlives_parent(tmp_path):
    shell = start(PATIENT, tmp_path, command=["sh", "-c", f"{sys.executable} program.py & wait"])
    trainer = int(shell.stdout.readline())
    shell.kill()
    shell.wait()
    shell.stdout.close()
    time.sleep(1)
    assert not (tmp_path / "cleaned").exists()
    os.kill(trainer, signal.SIGTERM)
    wait_for(tmp_path / "cleaned")
