"""Programs that import much, as forks of a process that has imported it: `TRAINER` (TRL) and
`SERVER` (vLLM).

    process = TRAINER.fork(["-m", "tests.my_module", "one"], os.environ | {"RANK": "0"}, log)

does what `subprocess.Popen([sys.executable, "-m", "tests.my_module", "one"], ...)` does, in a
session of its own and with both outputs in `log`, 15 seconds of a CPU earlier (a server 25). Each
worker of pytest has one such process of each kind, from the first call on. A program that reads the
environment while it imports something sees that of the process that it is forked from: `Run` in
`tests/launching.py` starts the main job, with its server, as a user does.
"""

import atexit
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
READY_WITHIN = 180.0  # seconds
TRL = """
from trl_atropos.train import without_vllm
with without_vllm():
    import trl_atropos.trainer, trl_atropos.recipe, transformers.models.qwen3.modeling_qwen3
"""
VLLM = f"""
import runpy
import trl_atropos.server.control, trl_atropos.server.extension, trl_atropos.server.launch
import vllm.entrypoints.openai.api_server, vllm.v1.engine.core_client
runpy.run_path({str(ROOT / "tests/site/sitecustomize.py")!r})
"""
# For the environment of a program: every vLLM server that it starts forks its engine, 14 seconds of
# a CPU earlier.
FORKED_ENGINES = {
    "PYTHONPATH": os.pathsep.join(
        [str(ROOT / "tests/site"), *os.environ.get("PYTHONPATH", "").split()]
    )
}
PROGRAM = """
import ctypes, gc, json, os, runpy, select, signal, sys
gc.freeze()  # the forks would otherwise copy what they only look at

def say(**what):
    os.write(1, json.dumps(what).encode() + b"\\n")

def run(job, parent):
    os.setsid()
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
    os.chdir(job["cwd"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    log = os.open(job["log"], os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()
    os.environ.update(job["env"])
    _, module, *rest = job["argv"]
    sys.argv[:] = [module, *rest]
    gc.unfreeze()
    runpy.run_module(module, run_name="__main__", alter_sys=True)

say(ready=True)
rest = b""
while True:
    if select.select([0], [], [], 0.02)[0]:
        read = os.read(0, 65536)
        if not read:
            break
        *lines, rest = (rest + read).split(b"\\n")
        for line in lines:
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                run(json.loads(line), parent)
                sys.exit(0)
            say(started=pid)
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if not pid:
            break
        say(ended=pid, code=os.waitstatus_to_exitcode(status))
"""


class Forked:
    """What is needed of `subprocess.Popen`."""

    def __init__(self, pid: int):
        self.pid = pid
        self.returncode: int | None = None
        self._ended = threading.Event()

    def end(self, code: int) -> None:
        self.returncode = code
        self._ended.set()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return self.returncode


class Forge:
    """`imports` is what the process executes first, with `env` on top of this process's
    environment."""

    def __init__(self, imports: str, env: Mapping[str, str] | None = None) -> None:
        self._imports, self._env = imports, dict(env or {})
        self._process: subprocess.Popen | None = None
        self._forked: dict[int, Forked] = {}
        self._changed = threading.Condition()
        self._ready = False
        self._started: list[Forked] = []
        self._one_at_a_time = threading.Lock()

    def fork(
        self, argv: Sequence[str], env: Mapping[str, str], log: Path, cwd: Path = ROOT
    ) -> Forked:
        """Runs `argv`, of the form `["-m", module, *arguments]`, with `env` as its whole
        environment."""
        log.touch()
        job = {"argv": list(argv), "env": dict(env), "log": str(log), "cwd": str(cwd)}
        with self._one_at_a_time, self._changed:
            if self._process is None:
                self._start()
            self._wait(lambda: self._ready)
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
            self._wait(lambda: self._started)
            return self._started.pop()

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(READY_WITHIN)

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", self._imports + PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
            env=os.environ | self._env,
            start_new_session=True,
        )
        threading.Thread(target=self._read, name="forge", daemon=True).start()
        atexit.register(self.close)

    def _wait(self, condition) -> None:
        deadline = time.monotonic() + READY_WITHIN
        while not condition():
            alive = self._process.poll() is None
            assert alive and time.monotonic() < deadline, (
                "the process that forks others does not answer"
            )
            self._changed.wait(0.5)

    def _read(self) -> None:
        for line in self._process.stdout:
            told = json.loads(line)
            with self._changed:
                if "ready" in told:
                    self._ready = True
                elif "started" in told:
                    self._forked[told["started"]] = child = Forked(told["started"])
                    self._started.append(child)
                else:
                    self._forked.pop(told["ended"]).end(told["code"])
                self._changed.notify_all()


TRAINER = Forge(TRL)
SERVER = Forge(VLLM, {"VLLM_LOGGING_LEVEL": "WARNING", "TORCHDYNAMO_DISABLE": "1"})
