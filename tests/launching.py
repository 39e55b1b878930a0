"""Starts the quickstart as a user does, and watches all of its processes from outside.

Run as a module (`accelerate launch -m tests.launching ...`), it is the main job with a long
optimizer step or a long save, as the variable `TEST_SLOW` says, so that a signal surely lands
inside.
"""

import contextlib
import fcntl
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import termios
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from tests import ROOT
from tests.forge import TRAINER, Forked
from tests.sharded import run_ranks
from trl_atropos.protocol import ROUTE_PREFIX, TOKEN_VARIABLE
from trl_atropos.services.addresses import free_port

RECIPE = "recipes/quickstart/colocate.yaml"
MODEL_SEED = 42  # by default, of the script that makes the model
MARKER = "TEST_RUN"
SLOW = "TEST_SLOW"
SLOW_STEP_SECONDS = 4.0
SLOW_SAVE_SECONDS = 60.0
LOOK_EVERY = 0.2
COLUMNS = 500  # of a terminal on which no message takes two lines
SHM = Path("/dev/shm")
# What `accelerate launch --config_file configs/accelerate/cpu.yaml` tells the main job.
LAUNCHED_ON_CPU = {"ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "no"}

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def make_model(folder: Path) -> Path:
    """The quickstart's model."""
    from recipes.quickstart import make_model as script  # which imports torch

    script.make_model(str(folder), MODEL_SEED)
    return folder


def free_urls(number: int) -> list[str]:
    """URLs on this machine where nobody listens, all different."""
    ports: set[int] = set()
    while len(ports) < number:
        ports.add(free_port())
    return [f"http://127.0.0.1:{port}" for port in ports]


def launch_two(folder: Path, module: str, model: Path) -> None:
    """Runs `module` in two processes with gloo between them, on `model` and `folder`. It must
    succeed."""
    with mock.patch.dict(os.environ, ACCELERATE_USE_CPU="true", ACCELERATE_MIXED_PRECISION="no"):
        run_ranks(["-m", module, str(model), str(folder)], 2, timeout=600)


def ask(url: str, token: str = "") -> Any:
    """The JSON that a URL answers, or `None`."""
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {token}"})
    with contextlib.suppress(OSError, ValueError), _opener.open(request, timeout=2.0) as answer:
        return json.loads(answer.read() or b"{}")
    return None


def status_of(pid: int) -> tuple[str, int, int, int] | None:
    """State, parent, session and start time of a process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[19])


def command_of(pid: int) -> str:
    try:
        return (
            Path(f"/proc/{pid}/cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode(errors="replace")
            .strip()
        )
    except OSError:
        return ""


def shared_inodes() -> dict[str, int]:
    """Files in /dev/shm and their inodes."""
    with os.scandir(SHM) as entries:
        return {entry.name: entry.inode() for entry in entries}


def users_environment() -> dict[str, str]:
    """The variables of this process without those that the package reads: nobody has set them for a
    user."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith("TRL_ATROPOS_")
    }


class Run:
    """One run of the main job. A context manager: whatever it left behind is killed at the end.

    Args:
        folder: For the output, made if it is not there.
        model: Folder of the model.
        flags: Further flags of the main job.
        entry: Module to launch.
        env: Variables of the run.
        terminal: Type the command into an interactive shell on a pseudo-terminal.
        recipe: Path of the recipe, seen from the repository's root.
        on_gpu: On the first GPU that `CUDA_VISIBLE_DEVICES` names, in place of the CPU.
        command: What to start instead of the recipe in accelerate's launcher.
        forked: Fork the main job of a process that has imported what it needs, 14 seconds of a CPU
            earlier. It has no launcher, and ends when it loses the process that it is forked from.
        shell: All variables of the shell that it is started from, by default `users_environment()`.
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        *,
        flags: tuple[str, ...] = (),
        entry: str = "trl_atropos.train",
        env: dict[str, str] | None = None,
        terminal: bool = False,
        recipe: str = RECIPE,
        on_gpu: bool = False,
        command: list[str] | None = None,
        forked: bool = False,
        shell: dict[str, str] | None = None,
    ):
        self.folder = folder
        self.entry = entry
        self.marker = uuid.uuid4().hex
        self.atropos_url, self.vllm_url = free_urls(2)
        self.shm_before = shared_inodes()
        accelerate = [str(Path(sys.executable).with_name("accelerate"))]
        device = ["--config_file", "configs/accelerate/cpu.yaml"]
        if on_gpu:
            accelerate = [sys.executable, "-m", "accelerate.commands.accelerate_cli"]
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
            device = ["--config_file", "configs/accelerate/single_gpu.yaml"]
            device += ["--gpu_ids", visible.split(",")[0]]  # accelerate would take the first
        # fmt: off
        job = [
            "-m", entry, "--config", recipe,
            "--output_dir", str(folder), "--model_name_or_path", str(model),
            "--atropos_url", self.atropos_url, "--vllm_server_base_url", self.vllm_url, *flags,
        ]
        # fmt: on
        launched = [*accelerate, "launch", "--quiet", *device, *job]
        self.command = command or (job if forked else launched)
        variables = users_environment() if shell is None else shell
        self.env = {**variables, **(env or {}), MARKER: self.marker}
        self.terminal = terminal
        self.forked = forked
        self._seen: dict[int, int] = {}  # process id -> start time
        self._mapped: set[int] = set()  # inodes of files in /dev/shm
        self._output = bytearray()
        self._done = threading.Event()
        self._log: Path | None = None  # of a fork, which writes into a file
        self.child: subprocess.Popen | Forked

    def __enter__(self) -> "Run":
        if self.forked:
            self._fork()
        elif self.terminal:
            self._master, slave = pty.openpty()
            termios.tcsetwinsize(slave, (50, COLUMNS))
            self.child = subprocess.Popen(
                ["bash", "--norc", "--noprofile", "-i"],
                stdin=slave,
                stdout=slave,
                stderr=slave,
                cwd=ROOT,
                env={**self.env, "PS1": "$ ", "HISTFILE": ""},
                start_new_session=True,
                preexec_fn=lambda: (heed_ctrl_c(), fcntl.ioctl(0, termios.TIOCSCTTY, 0)),
            )
            os.close(slave)
            self.type(shlex.join(self.command) + "\n")
        else:
            self._master, write_end = os.pipe()
            self.child = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                cwd=ROOT,
                env=self.env,
                start_new_session=True,
                preexec_fn=heed_ctrl_c,
            )
            os.close(write_end)
        works = [self._watch] if self.forked else [self._read, self._watch]
        self._threads = [threading.Thread(target=work, daemon=True) for work in works]
        for thread in self._threads:
            thread.start()
        return self

    def _fork(self) -> None:
        """Starts the main job as `accelerate launch` starts it on a CPU."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self._log = self.folder.with_name(f"{self.folder.name}-{self.marker}.log")
        self.child = TRAINER.fork(self.command, LAUNCHED_ON_CPU | self.env, self._log)
        # its marker is in the variables of the programs that it starts, and not in its own
        self._seen[self.child.pid] = status_of(self.child.pid)[3]

    def __exit__(self, *_: object) -> None:
        for pid in self.processes():
            # the guards know what else there is to remove
            if pid == self.child.pid or f" -m {self.entry} " in command_of(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 15
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.child.send_signal(signal.SIGKILL)
        self.child.wait()
        self._done.set()
        for thread in self._threads:
            thread.join(5)
        if not self.forked:
            os.close(self._master)

    # -------------------------------------------------------------------------------- what it shows

    @property
    def output(self) -> str:
        """What a user has seen so far."""
        if self._log is not None:
            return self._log.read_text(errors="replace").replace("\r\n", "\n")
        return self._output.decode(errors="replace").replace("\r\n", "\n")

    def type(self, text: str) -> None:
        """Type into the terminal."""
        os.write(self._master, text.encode())

    def info(self) -> dict:
        """What the server says of itself; empty while it is not up."""
        return ask(f"{self.vllm_url}{ROUTE_PREFIX}/info", self.token()) or {}

    def token(self) -> str:
        """The control token that the run has made up, from the variables of its server."""
        for pid in self.processes():
            with contextlib.suppress(OSError):
                variables = Path(f"/proc/{pid}/environ").read_bytes()
                if found := re.search(rf"(?:^|\0){TOKEN_VARIABLE}=([^\0]+)".encode(), variables):
                    return found[1].decode()
        return ""

    def until(self, condition: Callable[[], Any], what: str, seconds: float = 400.0) -> Any:
        """Wait for a condition, as long as the run lives; returns what it returned."""
        deadline, look_at = time.monotonic() + seconds, time.monotonic() + 1
        while not (result := condition()):
            assert time.monotonic() < deadline, f"late: {what}\n{self.output[-6000:]}"
            if time.monotonic() > look_at:
                # Asked again: it may have come true, and the run have ended, since it was asked.
                assert self._lives() or condition(), f"the run ended: {what}\n{self.output[-6000:]}"
                look_at = time.monotonic() + 1
            time.sleep(0.02)
        return result

    def _lives(self) -> bool:
        # the launcher, or a shell that has not started it
        return bool(self.processes()) or len(self._seen) <= 1

    # ---------------------------------------------------------------------------------- whose it is

    def processes(self) -> list[int]:
        """Every living process of the run."""
        self._look()
        alive = []
        for pid, started in list(self._seen.items()):
            status = status_of(pid)
            if (
                status is not None
                and status[3] == started
                and status[0] not in "ZX"
                and pid != self._shell
            ):
                alive.append(pid)
        return alive

    def all_processes(self) -> set[int]:
        """Every process of the run so far."""
        return set(self._seen)

    @property
    def _shell(self) -> int | None:
        return self.child.pid if self.terminal else None

    @property
    def launcher(self) -> int:
        if not self.terminal:
            return self.child.pid
        return self.until(lambda: self.children(self.child.pid), "the shell starts the launcher")[0]

    @property
    def trainer(self) -> int:
        if self.forked:
            return self.child.pid

        def started() -> list[int]:
            return [
                pid
                for pid in self.children(self.launcher)
                if f" -m {self.entry} " in command_of(pid)
            ]

        return self.until(started, "the launcher starts the trainer")[0]

    def children(self, parent: int) -> list[int]:
        return [pid for pid in self.processes() if (status_of(pid) or ("", 0))[1] == parent]

    def guard(self, service: str) -> int:
        """Process of the guard that keeps a service."""
        found = self.until(
            lambda: re.search(rf"Started {re.escape(service)} \(process (\d+)\)", self.output),
            f"{service} starts",
        )
        return int(found[1])

    def shared_files(self) -> list[str]:
        """Files in /dev/shm which were not there before and which a process of the run had
        mapped."""
        self._look()
        return sorted(name for name, inode in shared_inodes().items() if inode in self._mapped)

    def _look_at_maps(self) -> None:
        """Notes new files in /dev/shm as the run's. By inode: a semaphore is mapped under a name
        that is gone."""
        known = self._mapped | set(self.shm_before.values())
        if known.issuperset(shared_inodes().values()):
            return
        for pid in list(self._seen):
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
                self._mapped |= {
                    int(line.split()[4]) for line in lines if " /dev/shm/" in line
                } - known

    def left(self) -> list[str]:
        """Processes and shared files that are still there."""
        return [f"{pid} {command_of(pid)[:100]}" for pid in self.processes()] + self.shared_files()

    def exit_code(self) -> int:
        """Of the launcher, as the shell sees it."""
        if not self.terminal:
            code = self.child.wait(30)
            return code if code >= 0 else 128 - code
        self.type("echo exit=$?\n")
        deadline = time.monotonic() + 30
        while not (found := re.search(r"exit=(\d+)", self.output)):
            assert time.monotonic() < deadline, self.output[-3000:]
            time.sleep(0.05)
        return int(found[1])

    def _look(self) -> None:
        marker = f"{MARKER}={self.marker}".encode()
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            status = status_of(pid)
            if status is None or self._seen.get(pid) == status[3]:
                continue
            _state, parent, session, started = status
            # A process that sets its title overwrites its environment, so the family counts as
            # well.
            mine = self._is_seen(parent) or (session != pid and self._is_seen(session))
            if not mine:
                with contextlib.suppress(OSError):
                    mine = marker in Path(f"/proc/{pid}/environ").read_bytes()
            if mine:
                self._seen[pid] = started
        self._look_at_maps()

    def _is_seen(self, pid: int) -> bool:
        return pid in self._seen and (status_of(pid) or (0, 0, 0, None))[3] == self._seen[pid]

    def _watch(self) -> None:
        while not self._done.wait(LOOK_EVERY):
            self._look()

    def _read(self) -> None:
        # how a pseudo-terminal says that nobody is at its other end
        with contextlib.suppress(OSError):
            while data := os.read(self._master, 65536):
                self._output += data


def heed_ctrl_c() -> None:
    """In a child: a shell's `&` may have left SIGINT ignored for these tests, and what is ignored
    is inherited."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _slow_train() -> None:
    from trl_atropos import train

    real = train.train

    def slow(*run: Any) -> Any:
        import torch
        import transformers

        step, save = torch.optim.AdamW.step, transformers.PreTrainedModel.save_pretrained

        def slow_step(self, *args, **kwargs):
            time.sleep(SLOW_STEP_SECONDS / 2)
            result = step(self, *args, **kwargs)
            time.sleep(SLOW_STEP_SECONDS / 2)
            return result

        def slow_save(self, *args, **kwargs):
            save(self, *args, **kwargs)
            time.sleep(SLOW_SAVE_SECONDS)

        if os.environ[SLOW] == "step":
            torch.optim.AdamW.step = slow_step
        else:
            transformers.PreTrainedModel.save_pretrained = slow_save
        return real(*run)

    train.train = slow
    train.main()


if __name__ == "__main__":
    _slow_train()
