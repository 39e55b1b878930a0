"""Programs that import much, as forks of a process that has imported it: `TRAINER` (TRL) and
`SERVER` (vLLM).

    process = TRAINER.fork(["-m", "tests.my_module", "one"], os.environ | {"RANK": "0"}, log)

does what `subprocess.Popen([sys.executable, "-m", "tests.my_module", "one"], ...)` does, in a
session of its own and with both outputs in `log`, 15 seconds of a CPU earlier (a server 25). There
is one such process of each kind for all workers of a pytest run: the first that needs it starts it,
and it ends when nobody is connected to it any more. A program that reads the environment while it
imports something sees that of the process that it is forked from, and a crash while Python takes
itself apart is not seen: `Run` in `tests/launching.py` starts the main job, with its server, as a
user does.
"""

import atexit
import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests import ROOT

READY_WITHIN = 180.0  # seconds
ENDED_WITHIN = 5.0  # seconds, after the last has left
# Shared by the workers of one run of pytest; any other process has its own.
RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID") or f"process {os.getpid()}"
TRL = """
import tests
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
# a CPU earlier, and every environment that has a `path` starts without torch, 3 seconds earlier.
FORKED_ENGINES = {
    "PYTHONPATH": os.pathsep.join(
        [str(ROOT / "tests/site"), *os.environ.get("PYTHONPATH", "").split()]
    )
}
# For the environment of an Atropos environment that needs a tokenizer only: 3 of its 6 seconds of a
# CPU are for torch.
WITHOUT_TORCH = {"PYTHONPATH": str(ROOT / "tests/no_torch")}
BEGINNING = """
import gc
gc.disable()  # a fifth of what the imports take
"""
PROGRAM = """
import atexit, ctypes, json, os, runpy, select, signal, socket, struct, sys, tempfile, threading
gc.freeze()  # the forks would otherwise copy what they only look at
gc.enable()
given = int(sys.argv[1])  # as high as a test process has files open, and select takes no 1024
listener = socket.socket(fileno=os.dup(given))
os.close(given)
clients = {}  # connection -> the beginning of a line
children = {}  # process -> connection of who asked for it

def say(connection, **what):
    try:
        connection.sendall(json.dumps(what).encode() + b"\\n")
    except OSError:
        pass  # it has left, and will be seen to have

def accept():
    connection, _ = listener.accept()
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    if struct.unpack("3i", credentials)[1] == os.getuid():
        clients[connection] = b""
    else:
        connection.close()

def leave(connection):
    del clients[connection]
    connection.close()
    for pid, owner in children.items():
        if owner is connection:
            os.kill(pid, signal.SIGTERM)

def run(job, parent):
    os.setsid()
    for each in (listener, *clients):
        each.close()
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
    os.chdir(job["cwd"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "log"), (2, "errors")):
        os.dup2(os.open(job[name], os.O_WRONLY | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(job["env"])
    tempfile.tempdir = None  # else that of this process, whatever TMPDIR says
    _, module, *rest = job["argv"]
    sys.argv[:] = [module, *rest]
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
        if isinstance(error, KeyboardInterrupt):
            code = 130
    leave_at_once(code)

# As Python ends, but for taking apart everything that was imported, which takes a second of a CPU.
def leave_at_once(code):
    threading._shutdown()  # waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            pass
    os._exit(code)

while True:
    heard = select.select([listener, *clients], [], [], 0.02)[0]
    if not heard and not clients:
        break
    for ready in heard:
        if ready is listener:
            accept()
            continue
        try:
            received = ready.recv(65536)
        except OSError:
            received = b""
        if not received:
            leave(ready)
            continue
        *lines, clients[ready] = (clients[ready] + received).split(b"\\n")
        for line in lines:
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                run(json.loads(line), parent)
            children[pid] = ready
            say(ready, started=pid)
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            break
        say(children.pop(pid), ended=pid, code=os.waitstatus_to_exitcode(status))
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

    def send_signal(self, number: int) -> None:
        """Sends a signal, if the process is there: its exit code comes a moment after its end."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return self.returncode


class Forge:
    """`imports` is what the process executes first, with `env` on top of this process's
    environment."""

    def __init__(self, imports: str, env: Mapping[str, str] | None = None) -> None:
        self._imports = imports
        self._env = dict(env or {})
        self._process: subprocess.Popen | None = None  # if it was started here
        self._connection: socket.socket | None = None
        self._lost = False
        self._forked: dict[int, Forked] = {}
        self._started: list[Forked] = []
        self._changed = threading.Condition()
        self._one_at_a_time = threading.Lock()

    def run(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        timeout: float = 240.0,
    ) -> subprocess.CompletedProcess[str]:
        """Does what `subprocess.run([sys.executable, *argv], capture_output=True, text=True, ...)`
        does, in a fork."""
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder, "output")
            errors = Path(folder, "errors")
            child = self.fork(argv, os.environ if env is None else env, output, cwd, errors)
            try:
                code = child.wait(timeout)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                raise
            texts = [path.read_text(errors="replace") for path in (output, errors)]
        return subprocess.CompletedProcess(list(argv), code, *texts)

    def fork(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        cwd: Path = ROOT,
        errors: Path | None = None,
    ) -> Forked:
        """Runs `argv`, of the form `["-m", module, *arguments]`, with `env` as its whole
        environment. What it writes to stderr goes to `errors`, or else to `log`, too."""
        errors = errors or log
        log.touch()
        errors.touch()
        job = {"argv": list(argv), "env": dict(env), "cwd": str(cwd)}
        job |= {"log": str(log), "errors": str(errors)}
        with self._one_at_a_time, self._changed:
            if self._connection is None:
                self._connect()
            self._connection.sendall(json.dumps(job).encode() + b"\n")
            deadline = time.monotonic() + READY_WITHIN
            while not self._started:
                assert not self._lost and time.monotonic() < deadline, (
                    "the process that forks others does not answer"
                )
                self._changed.wait(0.5)
            return self._started.pop()

    def close(self) -> None:
        """Leaves the process, which ends what it has forked for this one."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):  # others may be connected still
                self._process.wait(ENDED_WITHIN)

    def _connect(self) -> None:
        deadline = time.monotonic() + READY_WITHIN
        kind = f"{RUN}\0{ROOT}\0{self._imports}\0{self._env}"
        digest = hashlib.sha256(kind.encode()).hexdigest()
        address = f"\0trl_atropos-forge-{digest}"  # without a file
        connection = socket.socket(socket.AF_UNIX)
        while True:
            try:
                connection.connect(address)
                break
            except ConnectionRefusedError:
                assert time.monotonic() < deadline, "nobody listens where a forge began"
            with socket.socket(socket.AF_UNIX) as listener:
                try:
                    listener.bind(address)
                except OSError:  # another worker starts it, and does not listen yet
                    time.sleep(0.01)
                    continue
                listener.listen()
                self._start(listener)
        self._connection = connection
        threading.Thread(target=self._read, name="forge", daemon=True).start()
        atexit.register(self.close)

    def _start(self, listener: socket.socket) -> None:
        number = listener.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-c", BEGINNING + self._imports + PROGRAM, str(number)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
            env=os.environ | self._env,
            pass_fds=[number],
            start_new_session=True,
        )

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            for line in self._connection.makefile("rb"):
                self._take(json.loads(line))
        with self._changed:
            self._lost = True
            self._changed.notify_all()

    def _take(self, message: dict[str, int]) -> None:
        with self._changed:
            if "started" in message:
                child = Forked(message["started"])
                self._forked[child.pid] = child
                self._started.append(child)
            else:
                self._forked.pop(message["ended"]).end(message["code"])
            self._changed.notify_all()


TRAINER = Forge(TRL)
SERVER = Forge(VLLM, {"VLLM_LOGGING_LEVEL": "WARNING", "TORCHDYNAMO_DISABLE": "1"})
