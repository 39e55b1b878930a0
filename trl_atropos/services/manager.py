"""The services of a run: the Atropos API, the inference server and the environments, started and
stopped with the run.

`trl_atropos.train` makes one `Services` on rank 0 and starts the API, the server and the
environments in that order.
Each runs under a guard (`guard.py`) and writes a log of its own, whose end an error quotes. Leaving
the `with` block stops the services in reverse order; if the trainer is killed outright, the guards
do.
"""

import contextlib
import errno
import functools
import http.client
import itertools
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
import textwrap
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import SystemRandom
from urllib.parse import urlsplit

from trl_atropos.errors import ServiceError
from trl_atropos.logging import columns
from trl_atropos.services.guard import KILL_DEADLINE, SHM, SharedFiles, end_service

logger = logging.getLogger(__name__)

ATROPOS = "atropos"  # name of the service that is the Atropos API
ENVIRONMENT = "environment-"  # how the names of environments' services begin
GUARD = Path(__file__).resolve().with_name("guard.py")

# seconds; a service that lived less than that has a mistake that a restart would only repeat
SETTLED = 30.0
# seconds between SIGTERM and SIGKILL; with KILL_DEADLINE this stays below the 15 s that are
# promised
GRACE = 5.0
POLL = 0.2  # seconds
TOLD_EVERY = 15.0  # seconds; what a service does that is not healthy yet
SCRATCH = "ta"  # how the names of services' temporary folders begin

# variable that NVIDIA's Multi-Process Service and its processes read
MPS_FOLDER = "CUDA_MPS_PIPE_DIRECTORY"
FREE_PORTS = range(20_000, 30_000)
# bytes: in that folder, vLLM gives a socket a UUID for its name
SOCKET_NAME = len(f"/{SCRATCH}12345678/") + 36
LONGEST_SOCKET_FOLDER = 107 - SOCKET_NAME  # bytes; the path of a Unix socket may have 107
# bytes: several workers have a queue between them
SHARED_BY_ONE = 16 << 20
SHARED_BY_SEVERAL = 256 << 20
VMSTAT = Path("/proc/vmstat")

TAIL_LINES = 20
TAIL_BYTES = 64 * 1024
TAIL_WIDTH = 500  # characters
# Some fifty lines of triton's bindings at the end of a vLLM process; the reason for its end is
# above them.
NOISE = re.compile(r"nanobind: | - leaked | - \.\.\. skipped |See https://nanobind\.")
# What vLLM writes before each line of its processes, also of their tracebacks.
VLLM_PREFIX = re.compile(r"^\(\w+ pid=\d+\) ([A-Z]+ \d\d-\d\d [\d:]+ \[[^\]]+\] )?")
ERROR_LINE = re.compile(r"([A-Za-z_]\w*\.)*[A-Z]\w*(Error|Exception): \S")
# by vLLM's API server: the engine's own error stands above
RELAYED = "Engine core initialization failed"

# What `accelerate launch` sets for its workers. A server that inherited
# TORCHELASTIC_USE_AGENT_STORE would wait at the launcher's store for its process group, for ever.
LAUNCHER_VARIABLE = re.compile(
    r"(MASTER_ADDR|MASTER_PORT|ROLE_NAME|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE))$|TORCHELASTIC_|ACCELERATE_|FSDP_"
)

# a proxy does not know our 127.0.0.1
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass
class Service:
    """A service that was started, and the guard that keeps it."""

    name: str  # in messages
    log_path: Path
    log_start: int  # where the output of this start begins in the log, in bytes
    health_url: str | None  # answers 200 when the service is ready; None if there is nothing to ask
    scratch: str  # the service's own temporary folder; empty if it has none
    guard: subprocess.Popen  # its exit code is the service's
    reports: int  # file descriptor from which the guard's reports are read
    started: float = field(default_factory=time.monotonic)  # the last time
    killed_for_memory: int = field(default_factory=lambda: killed_for_memory())  # at the start
    # used if the guard is killed, which keeps its own
    shared: SharedFiles = field(default_factory=SharedFiles)
    restarts: int = 0
    down: bool = False  # it has ended and is about to be started again
    exit_code: int | None = None  # None while it runs
    stopping: bool = False  # expected to exit: not a failure
    ends: bool = False  # by itself, with an exit code for who asks


class Services(contextlib.AbstractContextManager):
    """Starts, watches and stops services, each with a log `<name>.log` in `log_dir`. Leaving the
    block stops them."""

    def __init__(self, log_dir: str | Path) -> None:
        self.log_dir = Path(log_dir)
        self._services: dict[str, Service] = {}
        self._nothing_left = threading.Event()
        self._reaping = threading.Lock()

    def __exit__(self, *_) -> None:
        self.stop()

    def start(
        self,
        name: str,
        command: list[str],
        *,
        env: Mapping[str, str] | None = None,
        health_url: str | None = None,
        cwd: str | Path | None = None,
        restarts: int = 0,
        settled: float = SETTLED,
        scratch: bool = False,
        ends: bool = False,
    ) -> Service:
        """Starts a service under a guard, which ends with the thread that starts it: the main
        thread. `env` is added to the trainer's variables without the launcher's. A service that
        lived for `settled` seconds is started again when it ends, `restarts` times within an hour.
        With `scratch`, it gets a temporary folder, which is removed with it: vLLM leaves sockets
        and files there. Compiled kernels are kept. One that `ends` by itself is asked for its
        `exit_code`; the others are expected to live until they are stopped."""
        assert threading.current_thread() is threading.main_thread(), (
            "services are started from the main thread"
        )
        assert name not in self._services, f"service {name!r} is already running"
        self.log_dir.mkdir(parents=True, exist_ok=True)
        log_path = self.log_dir / f"{name}.log"
        reports, report = os.pipe()
        os.set_blocking(reports, False)
        options = ["--parent", str(os.getpid()), "--grace", str(GRACE), "--restarts", str(restarts)]
        options += ["--settled", str(settled), "--report", str(report)]
        variables = dict(env or {})
        folder = ""
        if scratch:
            kernels = os.environ.get(
                "TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}"
            )
            folder = tempfile.mkdtemp(prefix=SCRATCH)
            variables = {"TMPDIR": folder, "TORCHINDUCTOR_CACHE_DIR": kernels} | variables
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
                env={k: v for k, v in os.environ.items() if not LAUNCHER_VARIABLE.match(k)}
                | variables,
                # a terminal's Ctrl-C must not reach it: we stop services in our own order
                start_new_session=True,
            )
        os.close(report)
        service = Service(name, log_path, log_start, health_url, folder, guard, reports, ends=ends)
        self._services[name] = service
        self._nothing_left.clear()
        logger.info("Started %s (process %d), log: %s", name, guard.pid, log_path)
        return service

    def wait_healthy(self, name: str, timeout: float) -> None:
        """Waits until a service's health URL, if it has one, answers 200. Raises `ServiceError`
        when `timeout` seconds are over, and at once if any service dies."""
        service = self._services[name]
        began = time.monotonic()
        told = 0.0
        while not service.stopping:
            self.check()
            trouble = service.health_url and trouble_at(service.health_url)
            waited = time.monotonic() - began
            if trouble is None:
                logger.info("%s is healthy after %.1f s", name, waited)
                return
            if waited >= timeout:
                what = f"{service.health_url} gave no 200 within {timeout:g} s (last: {trouble})"
                fix = (
                    "Give it longer if its log shows "
                    f"progress.\n{_cause_and_end_of(service.log_path)[1]}"
                )
                raise ServiceError(f"{name} did not become healthy: {what}", fix=fix)
            if waited - told >= TOLD_EVERY:
                told = waited
                tell_work(service, f"{name} is starting, {waited:.0f} s")
            time.sleep(min(POLL, timeout - waited))
        raise ServiceError(f"{name} was stopped before it was healthy")

    def check(self) -> None:
        """Raises `ServiceError` if a service has died since it was started."""
        for service in self.running():
            code = self.exit_code(service)
            if code is None or service.stopping or service.ends:
                continue
            again = f", after {service.restarts} restarts," if service.restarts else ""
            memory = ""
            killed = killed_for_memory() - service.killed_for_memory
            if killed and code == 128 + signal.SIGKILL:
                memory = (
                    f"Since it was started, the kernel of this machine has killed {killed} "
                    "processes because its memory or a container's was used up: add some, or use "
                    "less (`trl-atropos check` estimates it). "
                )
            cause, end = _cause_and_end_of(service.log_path)
            cause = cause if code < 128 else ""  # a signal leaves no time for one
            error = ServiceError(
                f"{service.name} ended with {_describe(code)}{again} while the run needs "
                f"it{cause}. {memory}Fix what its log shows and start the run again.\n{end}"
            )
            error.exit_code = code
            raise error

    def watch(
        self,
        on_death: Callable[[ServiceError], None],
        on_end: Callable[[Service], None] = lambda service: None,
    ) -> None:
        """Watches all services from a thread, also later ones. Calls `on_death` once, as soon as
        one dies for good without `stop`, and `on_end` when one has ended and is about to be started
        again."""
        threading.Thread(
            target=self._watch, args=(on_death, on_end), name="service-watch", daemon=True
        ).start()

    @property
    def restarts(self) -> int:
        return sum(service.restarts for service in self.running())

    def running(self) -> list[Service]:
        """The services that were started and not stopped, in that order. Their fields change as
        they are watched."""
        return list(self._services.values())

    def await_death(self, timeout: float) -> None:
        """Gives a failing service `timeout` seconds to die: `watch` then reports the death, which
        says more."""
        deadline = time.monotonic() + timeout
        while self._services and time.monotonic() < deadline:
            time.sleep(POLL)

    def stop(self) -> None:
        """Stops the services in reverse order. Returns when nothing of them is left. May be called
        again, and after a call that was interrupted."""
        services = self.running()[::-1]
        for service in services:
            service.stopping = True
        for service in services:
            self.end(service)
        self._nothing_left.set()

    def end(self, service: Service) -> None:
        """Stops a service, if it has not ended, and forgets it."""
        service.stopping = True
        if self.exit_code(service) is None:
            began = time.monotonic()
            service.guard.send_signal(signal.SIGTERM)
            try:
                service.guard.wait(GRACE + KILL_DEADLINE + 2.0)
            except subprocess.TimeoutExpired:
                logger.warning(
                    "The guard of %s does not end; killing it and its service", service.name
                )
                service.guard.kill()
                service.guard.wait()
            self.exit_code(service)
            logger.info("Stopped %s in %.1f s", service.name, time.monotonic() - began)
        with self._reaping:
            os.close(self._services.pop(service.name).reports)

    def exit_code(self, service: Service) -> int | None:
        """Exit code of a service, `None` while it runs. Ends what a killed guard left behind."""
        with self._reaping:
            code = service.guard.poll() if service.exit_code is None else service.exit_code
            if code is not None and code < 0:
                end_service(service.guard.pid, GRACE, service.shared)
                if service.scratch:
                    shutil.rmtree(service.scratch, ignore_errors=True)
                code = 128 - code
            service.exit_code = code
        return code

    def _watch(
        self, on_death: Callable[[ServiceError], None], on_end: Callable[[Service], None]
    ) -> None:
        while not self._nothing_left.wait(POLL):
            for service in self.running():
                self._read_reports(service, on_end)
            try:
                self.check()
            except ServiceError as error:
                on_death(error)
                return

    def _read_reports(self, service: Service, on_end: Callable[[Service], None]) -> None:
        """Notes and logs what the guard of a service did since the last look."""
        with self._reaping:
            if service.stopping:  # `stop` is about to close the pipe, or has closed it
                return
            try:
                lines = os.read(service.reports, 65536).decode().splitlines()
            except BlockingIOError:  # nothing new
                return
        for word, *numbers in map(str.split, lines):
            if word == "started":
                service.down, service.started = False, time.monotonic()
                service.restarts += 1
                continue
            code, lived, wait = numbers
            what = (
                "%s ended with %s after %.0f s; it is started again in %s s. The end of its "
                "log:\n%s"
            )
            end = tail(service.log_path, 5)
            logger.warning(what, service.name, _describe(int(code)), float(lived), wait, end)
            service.down = True
            on_end(service)


def trouble_at(url: str) -> str | None:
    """What a URL does instead of answering 200; `None` if it answers 200."""
    try:
        with _opener.open(url, timeout=2.0) as answer:
            return None if answer.status == 200 else f"HTTP status {answer.status}"
    except (OSError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__


def port_of(url: str) -> int:
    """Port of a URL, as `--port` of the service that is to answer there."""
    with contextlib.suppress(ValueError):  # no number, or above 65,535
        if port := urlsplit(url).port:
            return port
    raise ServiceError(
        f"{url!r} names no port", url, "Write it like http://127.0.0.1:8000.", "port"
    )


def mps_runs() -> bool:
    """Whether NVIDIA's Multi-Process Service runs, by the pipe that its processes are reached
    through."""
    return os.path.exists(os.path.join(os.environ.get(MPS_FOLDER, "/tmp/nvidia-mps"), "control"))


def free_port(host: str = "127.0.0.1") -> int:
    """A port where nobody listens now. Hardly any other process takes it before it is bound: the
    kernel gives it to no connection by itself, and each process tries ports in an order of its
    own."""
    for port in itertools.islice(_ports_of(os.getpid()), len(FREE_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    raise ServiceError(
        f"all ports from {FREE_PORTS[0]} to {FREE_PORTS[-1]} on {host} are in use: end what uses "
        "them"
    )


@functools.cache
def _ports_of(process: int) -> Iterator[int]:
    # By process, because a forked one must not go on where its parent is. Not from `random`, which
    # trainers seed.
    return itertools.cycle(SystemRandom().sample(FREE_PORTS, len(FREE_PORTS)))


def require_free_port(url: str, what: str, fix: str) -> None:
    """Raises `ServiceError`, with `fix`, if the service `what`, such as "the Atropos API", cannot
    listen at `url`."""
    host = urlsplit(url).hostname
    port = port_of(url)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # as uvicorn: old connections do not count
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        used = error.errno == errno.EADDRINUSE
        problem = "is already in use" if used else f"cannot be listened on ({error.strerror})"
        seen = f"port {port} on {host} {problem}"
        raise ServiceError(
            f"{seen}, {what} cannot be started there", seen, fix, "port-taken"
        ) from error


def require_sockets() -> None:
    """Raises `ServiceError` if the path of the sockets through which vLLM's processes talk would be
    too long."""
    variable = "VLLM_RPC_BASE_PATH" if os.environ.get("VLLM_RPC_BASE_PATH") else "TMPDIR"
    folder = os.environ.get("VLLM_RPC_BASE_PATH") or tempfile.gettempdir()
    length = len(os.fsencode(folder))
    if length > LONGEST_SOCKET_FOLDER:
        what = f"vLLM makes Unix sockets in {folder} (`{variable}`), whose path has {length} bytes"
        fix = f"Set `{variable}` to a folder with a shorter path, such as /tmp."
        raise ServiceError(
            f"{what}; at most {LONGEST_SOCKET_FOLDER} leave room for names", folder, fix, "sockets"
        )


def require_shared_memory(processes: int) -> None:
    """Raises `ServiceError` if /dev/shm is too small for a vLLM server of that many worker
    processes."""
    needed = SHARED_BY_ONE if processes == 1 else SHARED_BY_SEVERAL
    free = shutil.disk_usage(SHM).free
    if free < needed:
        wanted = f"a vLLM server of {processes} worker processes needs {needed >> 20}"
        fix = (
            "Set docker's `--shm-size=2g` (Kubernetes: an `emptyDir` of `medium: Memory`), or "
            "make room there."
        )
        raise ServiceError(
            f"{SHM} has {free >> 20} MiB free, and {wanted}",
            f"{free >> 20} MiB",
            fix,
            "shared-memory",
        )


def killed_for_memory() -> int:
    """How many processes the kernel has killed on this machine, since its start, because memory was
    used up."""
    with contextlib.suppress(FileNotFoundError):  # some containers hide it
        if found := re.search(
            r"^oom_kill (\d+)$", VMSTAT.read_text(encoding="ascii"), re.MULTILINE
        ):
            return int(found[1])
    return 0


def _describe(code: int) -> str:
    names = {128 + signum: f" ({signum.name})" for signum in signal.Signals}
    return f"exit code {code}{names.get(code, '')}"


def tail(path: str | Path, lines: int = TAIL_LINES, start: int = 0) -> str:
    """The last lines of a log file from byte `start` on, without `NOISE`; empty if it does not
    exist."""
    text = ""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        file.seek(max(start, os.fstat(file.fileno()).st_size - TAIL_BYTES))
        text = file.read().decode(errors="replace")
    return "\n".join([line for line in text.splitlines() if not NOISE.match(line)][-lines:])


def tell_work(service: Service, doing: str) -> None:
    """Says in one line of the terminal's width what a service is doing: `doing`, and the last line
    in words of its log, of a progress bar where that stands."""
    lines = tail(service.log_path, 10 * TAIL_LINES, service.log_start).splitlines()[1:]
    texts = (VLLM_PREFIX.sub("", line).strip() for line in lines[::-1])
    work = next((text for text in texts if re.search("[a-z]{3}", text)), "no output yet")
    room = (columns() or TAIL_WIDTH) - len("[trl_atropos] ")
    logger.info(textwrap.shorten(f"{doing}: {work}", room, placeholder=" …"))


def _cause_and_end_of(log_path: Path) -> tuple[str, str]:
    """Of a service's log, the error that ended the service (a colon and one sentence, or empty),
    and the last lines, of tracebacks only the innermost frames."""
    cause = ""
    lines = []
    frame = []
    validation = False
    for line in tail(log_path, 10 * TAIL_LINES).splitlines():
        text = VLLM_PREFIX.sub("", line)
        if validation:
            cause = text.strip()  # the first line of pydantic's error says nothing
        elif ERROR_LINE.match(text) and RELAYED not in text:
            cause = text
        validation = not validation and cause is text and "validation error" in text
        line = line if len(line) <= TAIL_WIDTH else line[:TAIL_WIDTH] + " ..."
        if text.startswith('  File "'):
            frame = [line]
        elif frame and text.startswith("    "):
            frame.append(line)
        else:
            lines += [*frame, line]
            frame = []
    cause = f": {cause.split('. ')[0].rstrip('.')[:TAIL_WIDTH]}" if cause else ""
    return cause, f"The last lines of {log_path}:\n" + "\n".join([*lines, *frame][-TAIL_LINES:])
