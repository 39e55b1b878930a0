"""The services of a run: the Atropos API, the inference server and the environments, started and stopped with it.

`trl_atropos.train` makes one `Services` on rank 0 and starts the API, the server and the environments in that order.
Each runs under a guard (`guard.py`) and writes a log of its own; a death is reported with the end of that log. A
service that may be restarted is started again by its guard, and `watch` says so in the run's log. Leaving the `with`
block stops them in reverse order. Should the trainer be killed outright, the guards stop them. Services that run
elsewhere are used by their URLs and never appear here.
"""

import contextlib
import errno
import http.client
import logging
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import SystemRandom
from types import TracebackType
from urllib.parse import urlsplit

from trl_atropos.errors import ServiceError
from trl_atropos.services.guard import KILL_DEADLINE, SHM, SharedFiles, end_service

logger = logging.getLogger(__name__)

ATROPOS = "atropos"  # name of the service that is the Atropos API
ENVIRONMENT = "environment-"  # what the names of environments' services begin with

GUARD = Path(__file__).resolve().with_name("guard.py")

SETTLED = 30.0  # seconds; a service that lived less than that has a mistake that a restart would only repeat
GRACE = 5.0  # seconds between SIGTERM and SIGKILL; with KILL_DEADLINE this stays below the 15 s that are promised
GUARD_MARGIN = 2.0  # seconds that a guard may take on top of its grace and the kernel's work
POLL = 0.2
TAIL_LINES = 20
SHOWN_AT_RESTART = 5  # lines
TAIL_BYTES = 64 * 1024
TAIL_WIDTH = 500
SOCKET_PATH = 107  # bytes that the path of a Unix socket may have
SCRATCH = "ta"  # what the names of services' own temporary folders begin with
SOCKET_NAME = len(f"/{SCRATCH}12345678/") + 36  # bytes: in that folder, vLLM gives a socket a UUID for its name
SHARED_BY_ONE = 16 << 20  # bytes
SHARED_BY_SEVERAL = 256 << 20  # bytes: the queue between an engine and its workers
FREE_PORTS = range(20_000, 30_000)
VMSTAT = Path("/proc/vmstat")
MEMORY = (
    "Since it was started, the kernel of this machine has killed {} processes because its memory, or that of a "
    "container, was used up (`oom_kill` in /proc/vmstat): give the machine or the container more, or use less "
    "(`trl-atropos check` estimates it). "
)
NOISE = re.compile(r"nanobind: | - leaked | - \.\.\. skipped |See https://nanobind\.")
"""What triton's bindings say in some fifty lines when a vLLM process ends; the reason for its end is above them."""
VLLM_PREFIX = re.compile(r"^\(\w+ pid=\d+\) ([A-Z]+ \d\d-\d\d [\d:]+ \[[^\]]+\] )?")
"""What vLLM writes before each line of its processes, also of their tracebacks."""

ERROR_LINE = re.compile(r"([A-Za-z_]\w*\.)*[A-Z]\w*(Error|Exception): \S")
RELAYED = "Engine core initialization failed"
"""In what vLLM's API server raises when its engine has died: the engine's own error stands above."""

LAUNCHER_VARIABLES = {"MASTER_ADDR", "MASTER_PORT", "ROLE_NAME"} | {
    f"{scope}{name}" for scope in ("", "LOCAL_", "GROUP_", "ROLE_") for name in ("RANK", "WORLD_SIZE")
}
LAUNCHER_PREFIXES = ("TORCHELASTIC_", "ACCELERATE_", "FSDP_")
"""What `accelerate launch` sets for its workers. A server that inherited TORCHELASTIC_USE_AGENT_STORE would look for
its process group at the launcher's store and wait there for ever."""

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy does not know our 127.0.0.1


@dataclass
class Service:
    """A service that was started, and the guard that keeps it.

    Attributes:
        name: What messages call it.
        command: Program and arguments.
        log_path: Where its output goes; appended to, each start with a line that shows the command.
        log_start: Where in that the output of this start begins, in bytes.
        env: Variables set on top of the trainer's.
        health_url: Answers 200 when the service is ready; `None` if there is nothing to ask.
        grace: Seconds between SIGTERM and SIGKILL when it is stopped.
        guard: The guard process; its exit code is the service's.
        reports: File descriptor from which the guard's reports are read.
        started: `time.monotonic()` when it was last started.
        killed_for_memory: `killed_for_memory()` at that time.
        scratch: Its temporary folder, where it has one of its own.
        restarts: How often it has been started again.
        down: It has ended and is about to be started again.
        shared: Files in /dev/shm of a service whose guard is killed; the guard keeps its own list.
        exit_code: `None` while it runs.
        stopping: Its end is wanted, and no reason to raise.
    """

    name: str
    command: list[str]
    log_path: str
    log_start: int
    env: dict[str, str]
    health_url: str | None
    grace: float
    guard: subprocess.Popen
    reports: int
    started: float
    killed_for_memory: int
    scratch: str = ""
    restarts: int = 0
    down: bool = False
    shared: SharedFiles = field(default_factory=SharedFiles, repr=False)
    exit_code: int | None = None
    stopping: bool = False


class Services:
    """Starts, watches and stops services. A context manager: leaving it stops what it started.

    Args:
        log_dir: Folder for the log files, one `<name>.log` each; made if it is not there.
    """

    def __init__(self, log_dir: str | Path) -> None:
        self.log_dir = Path(log_dir)
        self._services: dict[str, Service] = {}
        self._nothing_left = threading.Event()
        self._reaping = threading.Lock()
        self._on_end: Callable[[Service], None] = lambda service: None

    def __enter__(self) -> "Services":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(
        self,
        name: str,
        command: list[str],
        *,
        env: Mapping[str, str] | None = None,
        health_url: str | None = None,
        cwd: str | Path | None = None,
        grace: float = GRACE,
        restarts: int = 0,
        settled: float = SETTLED,
        scratch: bool = False,
    ) -> None:
        """Start a service under a guard. From the main thread only: a guard lives as long as the thread it came from.

        Args:
            env: Set on top of the trainer's environment without the variables of the launcher.
            restarts: How often within an hour it is started again when it ends, see `trl_atropos.services.guard`.
            settled: Seconds that it must have lived for that.
            scratch: Give it a temporary folder of its own, which is removed with it: vLLM leaves sockets and files in
                `TMPDIR`, wandb folders. Compiled kernels are kept beside it for the next run.
        """
        assert threading.current_thread() is threading.main_thread(), "services are started from the main thread"
        assert name not in self._services, f"service {name!r} is already running"
        self.log_dir.mkdir(parents=True, exist_ok=True)
        log_path = self.log_dir / f"{name}.log"
        reports, report = os.pipe()
        os.set_blocking(reports, False)
        options = ["--parent", str(os.getpid()), "--grace", str(grace), "--restarts", str(restarts)]
        options += ["--settled", str(settled), "--report", str(report)]
        own, folder = dict(env or {}), ""
        if scratch:
            kernels = f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}"
            kernels = os.environ.get("TORCHINDUCTOR_CACHE_DIR", kernels)
            folder = tempfile.mkdtemp(prefix=SCRATCH)
            own = {"TMPDIR": folder, "TORCHINDUCTOR_CACHE_DIR": kernels} | own
            options += ["--scratch", folder]
        with open(log_path, "ab") as log:
            log_start = log.tell()
            log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {shlex.join(command)}\n".encode())
            log.flush()
            guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(GUARD), *options, "--", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=cwd,
                pass_fds=(report,),
                env={**_own_environment(), **own},
                start_new_session=True,  # out of reach of the terminal's Ctrl-C: the order of stopping is ours
            )
        os.close(report)
        now, killed = time.monotonic(), killed_for_memory()
        self._services[name] = Service(
            name, command, str(log_path), log_start, own, health_url, grace, guard, reports, now, killed, folder
        )
        self._nothing_left.clear()
        logger.info("Started %s (process %d), log: %s", name, guard.pid, log_path)

    def wait_healthy(self, name: str, timeout: float) -> None:
        """Wait until a service's health URL answers 200; one without a URL only has to be alive.

        Raises:
            ServiceError: At once if the service dies, or when `timeout` seconds are over.
        """
        service = self._services[name]
        began = time.monotonic()
        while True:
            self.check()  # of all: what another one's log shows need not wait for this one
            if service.health_url is None:
                return
            answer = _ask(service.health_url)
            waited = time.monotonic() - began
            if answer is None:
                logger.info("%s is healthy after %.1f s", name, waited)
                return
            if waited >= timeout:
                raise ServiceError(
                    f"{name} did not become healthy: {service.health_url} gave no 200 within {timeout:g} s (last: "
                    f"{answer}). Give it longer if its log shows progress.\n{_end_of_log(service)}"
                )
            time.sleep(min(POLL, timeout - waited))

    def check(self) -> None:
        """Raise `ServiceError` if a service has died since it was started."""
        for service in list(self._services.values()):
            self._check_one(service)

    def watch(
        self, on_death: Callable[[ServiceError], None], on_end: Callable[[Service], None] = lambda service: None
    ) -> None:
        """Watch all services, those that are started later too, from a thread.

        Args:
            on_death: Called once, as soon as a service dies for good that `stop` was not called for.
            on_end: Called when a service has ended and is about to be started again.
        """
        self._on_end = on_end
        threading.Thread(target=self._watch, args=(on_death,), name="service-watch", daemon=True).start()

    @property
    def restarts(self) -> int:
        """How many restarts there were so far, of all services."""
        return sum(service.restarts for service in list(self._services.values()))

    def running(self) -> list[Service]:
        """Those that were started and not stopped, in that order. Their fields change as they are watched."""
        return list(self._services.values())

    def await_death(self, timeout: float) -> None:
        """Give a service `timeout` seconds to die of what it suffers from: `watch` raises as soon as it has."""
        deadline = time.monotonic() + timeout
        while self._services and time.monotonic() < deadline:
            time.sleep(POLL)

    def stop(self, order: Iterable[str] | None = None) -> None:
        """Stop the services, by default in reverse order of their start. Returns when nothing of them is left.

        May be called any number of times; goes on where a call that was interrupted ended.

        Args:
            order: Names of the services to stop, the first one first; those not named stay.
        """
        names = list(reversed(self._services)) if order is None else [name for name in order if name in self._services]
        for name in names:
            self._services[name].stopping = True
        for name in names:
            self._stop_one(self._services[name])
            with self._reaping:
                os.close(self._services.pop(name).reports)
        if not self._services:
            self._nothing_left.set()

    def _stop_one(self, service: Service) -> None:
        if self._exit_code(service) is not None:
            return
        began = time.monotonic()
        service.guard.send_signal(signal.SIGTERM)
        try:
            service.guard.wait(service.grace + KILL_DEADLINE + GUARD_MARGIN)
        except subprocess.TimeoutExpired:
            logger.warning("The guard of %s does not end; killing it and all it guards", service.name)
            service.guard.kill()
            service.guard.wait()
        self._exit_code(service)
        logger.info("Stopped %s in %.1f s", service.name, time.monotonic() - began)

    def _exit_code(self, service: Service) -> int | None:
        """Exit code of a service, `None` while it runs. Ends what a killed guard left behind."""
        with self._reaping:
            code = service.guard.poll() if service.exit_code is None else service.exit_code
            if code is not None and code < 0:
                end_service(service.guard.pid, service.grace, service.shared)
                if service.scratch:
                    shutil.rmtree(service.scratch, ignore_errors=True)
                code = 128 - code
            service.exit_code = code
        return code

    def _check_one(self, service: Service) -> None:
        code = self._exit_code(service)
        if code is not None and not service.stopping:
            again = f", after {service.restarts} restarts," if service.restarts else ""
            killed = killed_for_memory() - service.killed_for_memory
            memory = MEMORY.format(killed) if killed and code == 128 + signal.SIGKILL else ""
            cause = _last_error(service.log_path) if code < 128 else ""  # a signal leaves no time for one
            raise ServiceError(
                f"{service.name} ended with {_describe(code)}{again} while the run needs it{cause}. {memory}Fix what "
                f"its log shows and start the run again.\n{_end_of_log(service)}"
            )

    def _read_reports(self, service: Service) -> None:
        """Note and log what the guard of a service did since the last look."""
        with self._reaping:
            if service.stopping:  # `stop` is about to close it, or has
                return
            try:
                told = os.read(service.reports, 65536).decode()
            except BlockingIOError:  # nothing new
                return
        for word, *numbers in map(str.split, told.splitlines()):
            if word == "ended":
                code, lived, wait = numbers
                logger.warning(
                    "%s ended with %s after %.0f s; it is started again in %s s. The end of its log:\n%s",
                    service.name,
                    _describe(int(code)),
                    float(lived),
                    wait,
                    tail(service.log_path, SHOWN_AT_RESTART),
                )
                service.down = True
                self._on_end(service)
            else:
                service.down, service.started = False, time.monotonic()
                service.restarts += 1

    def _watch(self, on_death: Callable[[ServiceError], None]) -> None:
        while not self._nothing_left.wait(POLL):
            for service in self.running():
                self._read_reports(service)
            try:
                self.check()
            except ServiceError as error:
                on_death(error)
                return


HOW_TO_WRITE = "Write it like http://127.0.0.1:8000."


def port_of(url: str) -> int:
    """Port of a URL, as `--port` of the service that is to answer there."""
    try:
        port = urlsplit(url).port
    except ValueError as error:
        raise ServiceError(f"{url!r} has no valid port ({error})", url, HOW_TO_WRITE, "port") from error
    if port is None:
        raise ServiceError(f"{url!r} names no port", url, HOW_TO_WRITE, "port")
    return port


def free_port(host: str = "127.0.0.1") -> int:
    """
    A port where nobody listens now. Another process may take it before it is bound, which is made unlikely: it is one
    that the kernel gives to no connection by itself, and each process goes through them from a place of its own.
    """
    for port in _next_ports():
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    raise ServiceError(f"all ports from {FREE_PORTS[0]} to {FREE_PORTS[-1]} on {host} are in use: end what uses them")


_last_port: dict[int, int] = {}  # index into FREE_PORTS, by process: a forked one must not go on where its parent is


def _next_ports() -> Iterator[int]:
    """All of `FREE_PORTS`, once."""
    process = os.getpid()
    # Not from `random`, which trainers seed: processes with one seed would all draw the same ports.
    _last_port.setdefault(process, SystemRandom().randrange(len(FREE_PORTS)))
    for _ in FREE_PORTS:
        _last_port[process] = (_last_port[process] + 1) % len(FREE_PORTS)
        yield FREE_PORTS[_last_port[process]]


def require_free_port(url: str, what: str, fix: str) -> None:
    """Raise `ServiceError` if a service cannot listen where its URL says.

    Args:
        url: URL of the service that is about to be started.
        what: What is to be started, such as "the Atropos API".
        fix: What to do instead; ends the message.
    """
    host, port = urlsplit(url).hostname, port_of(url)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as uvicorn: old connections do not count
            probe.bind(address)
            probe.listen()
    except OSError as error:
        used = error.errno == errno.EADDRINUSE
        problem = "is already in use" if used else f"cannot be listened on ({error.strerror})"
        seen = f"port {port} on {host} {problem}"
        raise ServiceError(f"{seen}, {what} cannot be started there", seen, fix, "port-taken") from error


def require_sockets() -> None:
    """Raise `ServiceError` if the path of the sockets through which vLLM's processes talk would be too long."""
    variable = "VLLM_RPC_BASE_PATH" if os.environ.get("VLLM_RPC_BASE_PATH") else "TMPDIR"
    folder = os.environ.get("VLLM_RPC_BASE_PATH") or tempfile.gettempdir()
    length, longest = len(os.fsencode(folder)), SOCKET_PATH - SOCKET_NAME
    if length > longest:
        raise ServiceError(
            f"vLLM makes Unix sockets in {folder} (`{variable}`), whose path has {length} bytes; at most {longest} "
            "leave room for their names",
            seen=folder,
            fix=f"Set `{variable}` to a folder with a shorter path, such as /tmp.",
            code="sockets",
        )


def require_shared_memory(processes: int, folder: str = SHM) -> None:
    """Raise `ServiceError` if /dev/shm is too small for a vLLM server of that many worker processes."""
    needed = SHARED_BY_ONE if processes == 1 else SHARED_BY_SEVERAL
    free = shutil.disk_usage(folder).free if os.path.isdir(folder) else needed  # another system than Linux
    if free < needed:
        raise ServiceError(
            f"{folder} has {free >> 20} MiB free, and a vLLM server of {processes} worker processes needs "
            f"{needed >> 20}",
            seen=f"{free >> 20} MiB",
            fix="Set docker's `--shm-size=2g` (Kubernetes: an `emptyDir` of `medium: Memory`), or remove what others "
            "left there.",
            code="shared-memory",
        )


def tail(path: str | Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log file, without `NOISE`; empty if it does not exist."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join([line for line in text.splitlines() if not NOISE.match(line)][-lines:])


def _own_environment() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHER_VARIABLES and not name.startswith(LAUNCHER_PREFIXES)
    }


def _ask(url: str) -> str | None:
    """`None` if a URL answers 200, else what it did instead."""
    try:
        with _opener.open(url, timeout=2.0) as answer:
            return None if answer.status == 200 else f"HTTP status {answer.status}"
    except (OSError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__


def killed_for_memory() -> int:
    """How many processes the kernel has killed on this machine, since its start, because memory was used up."""
    try:
        counts = dict(line.split() for line in VMSTAT.read_text(encoding="ascii").splitlines())
    except FileNotFoundError:  # another system than Linux
        return 0
    return int(counts.get("oom_kill", 0))


def _describe(code: int) -> str:
    try:
        return f"exit code {code} ({signal.Signals(code - 128).name})"
    except ValueError:
        return f"exit code {code}"


def _last_error(path: str) -> str:
    """Of the end of a log, what ended the service: a colon and one sentence, or nothing."""
    lines = [VLLM_PREFIX.sub("", line) for line in tail(path, 10 * TAIL_LINES).splitlines()]
    found = ""
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if ERROR_LINE.match(line) and RELAYED not in line:
            found = following.strip() if "validation error" in line else line  # pydantic's first line says nothing
    return f": {found.split('. ')[0].rstrip('.')[:TAIL_WIDTH]}" if found else ""


def _end_of_log(service: Service) -> str:
    lines: list[str] = []
    frame: list[str] = []  # of a traceback, only the innermost is shown: the others push out what is to be read
    for line in tail(service.log_path, lines=10 * TAIL_LINES).splitlines():
        line = line if len(line) <= TAIL_WIDTH else line[:TAIL_WIDTH] + " ..."
        text = VLLM_PREFIX.sub("", line)
        if text.startswith('  File "'):
            frame = [line]
        elif frame and text.startswith("    "):
            frame.append(line)
        else:
            lines += [*frame, line]
            frame = []
    return f"The last lines of {service.log_path}:\n" + "\n".join([*lines, *frame][-TAIL_LINES:])
