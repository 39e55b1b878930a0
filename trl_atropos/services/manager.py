"""The services of a run: the Atropos API, the inference server and the environments, started and
stopped with the run.

`trl_atropos.train` makes one `Services` on rank 0 and starts the API, the server and the
environments in that order. Each runs under a guard (`guard.py`) and writes a log of its own. An
error quotes the end of that log (`service_log.py`). Leaving the `with` block stops the services in
reverse order. If the trainer is killed outright, the guards do.
"""

import contextlib
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trl_atropos.activity import Pacer, activity
from trl_atropos.errors import ServiceError
from trl_atropos.privacy import CLOSED_VARIABLE
from trl_atropos.services.addresses import trouble_at
from trl_atropos.services.environment_metrics import FILE_VARIABLE, metrics_file
from trl_atropos.services.guard import KILL_DEADLINE, SharedFiles, end_service
from trl_atropos.services.machine import SCRATCH, killed_for_memory
from trl_atropos.services.service_log import cause_of_crash, cause_of_end, end_of, tail, tell_work
from trl_atropos.services.stacks import FOLDER_VARIABLE

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
# Variable of the file of one word in which an environment notes how far it has come.
STAGE_VARIABLE = "TRL_ATROPOS_STAGE"

# What `accelerate launch` sets for its workers. A server that inherited
# TORCHELASTIC_USE_AGENT_STORE would wait at the launcher's store for its process group, for ever.
LAUNCHER_VARIABLE = re.compile(
    r"(MASTER_ADDR|MASTER_PORT|ROLE_NAME|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE))$|TORCHELASTIC_|ACCELERATE_|FSDP_"
)


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
    block stops them. With `closed`, they close themselves to other processes of the same user
    (`privacy.py`)."""

    def __init__(self, log_dir: str | Path, closed: bool = False) -> None:
        self.log_dir = Path(log_dir)
        self._closed = closed
        # where environments write down where their code stands: see `stacks.py`
        self.stacks_dir = self.log_dir.absolute() / "stacks"
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
        """Starts a service under a guard, which ends with the thread that starts it.

        Parameters:
            env: Added to the trainer's variables without the launcher's.
            health_url: Answers 200 once the service is ready.
            restarts: How often within an hour the service is started again when it ends.
            settled: Seconds that it must have lived for that.
            scratch: Gives it a temporary folder, which is removed with it: vLLM leaves sockets and
                files there. Compiled kernels are kept.
            ends: Whether it ends by itself, and somebody asks for its `exit_code`. The others are
                expected to live until they are stopped.
        """
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
        variables = _variables_without_launcher()
        # what a program prints is in its log at once, also if it is killed
        variables.setdefault("PYTHONUNBUFFERED", "1")
        variables[FOLDER_VARIABLE] = str(self.stacks_dir)
        metrics = metrics_file(log_path.absolute())
        metrics.unlink(missing_ok=True)  # of an earlier run, whose log has them
        variables[FILE_VARIABLE] = str(metrics)
        if self._closed:
            variables[CLOSED_VARIABLE] = "1"
        folder = ""
        if scratch:
            folder = tempfile.mkdtemp(prefix=SCRATCH)
            variables["TMPDIR"] = folder
            variables.setdefault("TORCHINDUCTOR_CACHE_DIR", _kernel_folder())
            options += ["--scratch", folder]
            stage = os.path.join(folder, "stage")
            variables[STAGE_VARIABLE] = stage
            options += ["--stage", stage]
        variables.update(env or {})
        with open(log_path, "ab") as log:
            log_start = log.tell()
            now = time.strftime("%Y-%m-%d %H:%M:%S")
            log.write(f"--- {now} {shlex.join(command)}\n".encode())
            log.flush()
            guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(GUARD), *options, "--", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=cwd,
                pass_fds=(report,),
                env=variables,
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
        pacer = Pacer()
        while not service.stopping:
            self.check()
            trouble = None
            if service.health_url is not None:
                trouble = trouble_at(service.health_url)
            waited = time.monotonic() - began
            if trouble is None:
                logger.info("%s is healthy after %.1f s", name, waited)
                return
            if waited >= timeout:
                what = (
                    f"{name} did not become healthy: {service.health_url} gave no 200 within "
                    f"{timeout:g} s (last: {trouble})"
                )
                end = end_of(service.log_path, service.log_start)
                fix = f"Give it longer if its log shows progress.\n{end}"
                raise ServiceError(what, fix=fix)
            if pacer.is_due(waited):
                tell_work(service, f"{name} is starting, {waited:.0f} s")
            time.sleep(min(POLL, timeout - waited))
        raise ServiceError(f"{name} was stopped before it was healthy")

    def check(self) -> None:
        """Raises `ServiceError` if a service has died since it was started."""
        for service in self.running():
            code = self.exit_code(service)
            if code is not None and not service.stopping and not service.ends:
                raise _death_of(service, code)

    def watch(
        self,
        on_death: Callable[[ServiceError], None],
        on_end: Callable[[Service], None] | None = None,
    ) -> None:
        """Watches all services from a thread, also later ones. Calls `on_death` once, as soon as
        one dies for good without `stop`, and `on_end` when one has ended and is about to be started
        again."""
        threading.Thread(
            target=self._watch, args=(on_death, on_end), name="service-watch", daemon=True
        ).start()

    @property
    def restarts(self) -> int:
        """Restarts of all services so far."""
        return sum(service.restarts for service in self.running())

    def running(self) -> list[Service]:
        """Returns the services that were started and not stopped, in that order. Their fields
        change as they are watched."""
        return list(self._services.values())

    def await_death(self, timeout: float) -> None:
        """Gives a failing service `timeout` seconds to die. `watch` then reports the death, and its
        error says more."""
        deadline = time.monotonic() + timeout
        while self._services and time.monotonic() < deadline:
            time.sleep(POLL)

    def stop(self) -> None:
        """Stops the services in reverse order, and returns when nothing of them is left. You may
        call it again, also after a call that was interrupted."""
        services = self.running()[::-1]
        for service in services:
            service.stopping = True
        with activity("Stopping the services"):
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
        """Returns the exit code of a service, `None` while it runs. Ends what a killed guard left
        behind."""
        with self._reaping:
            if service.exit_code is None:
                code = service.guard.poll()
                if code is not None and code < 0:
                    end_service(service.guard.pid, GRACE, service.shared)
                    if service.scratch:
                        shutil.rmtree(service.scratch, ignore_errors=True)
                    code = 128 - code
                service.exit_code = code
            return service.exit_code

    def _watch(
        self,
        on_death: Callable[[ServiceError], None],
        on_end: Callable[[Service], None] | None,
    ) -> None:
        while not self._nothing_left.wait(POLL):
            for service in self.running():
                self._read_reports(service, on_end)
            try:
                self.check()
            except ServiceError as error:
                on_death(error)
                return

    def _read_reports(self, service: Service, on_end: Callable[[Service], None] | None) -> None:
        """Notes and logs what the guard of a service did since the last look."""
        with self._reaping:
            if service.stopping:  # `stop` is about to close the pipe, or has closed it
                return
            try:
                lines = os.read(service.reports, 65536).decode().splitlines()
            except BlockingIOError:  # nothing new
                return
        for line in lines:
            if line == "started":
                service.down = False
                service.started = time.monotonic()
                service.restarts += 1
                continue
            _ended, code, lived, wait = line.split()
            logger.warning(
                "%s ended with %s after %.0f s; it is started again in %s s. The end of its "
                "log:\n%s",
                service.name,
                _describe(int(code)),
                float(lived),
                wait,
                tail(service.log_path, 5),
            )
            service.down = True
            if on_end is not None:
                on_end(service)


def _variables_without_launcher() -> dict[str, str]:
    """Returns the variables of this process, without those that `accelerate launch` sets."""
    variables = {}
    for name, value in os.environ.items():
        if not LAUNCHER_VARIABLE.match(name):
            variables[name] = value
    return variables


def _kernel_folder() -> str:
    """Returns where torch's inductor keeps compiled kernels, if no variable says otherwise."""
    return f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}"


def _death_of(service: Service, code: int) -> ServiceError:
    """Returns the error for a service that has ended with an exit code."""
    what = f"{service.name} ended with {_describe(code)}"
    if service.restarts:
        what += f", after {service.restarts} restarts,"
    what += " while the run needs it"
    # Most signals leave no time to log a cause.
    read_cause = cause_of_end if code < 128 else cause_of_crash
    cause = read_cause(service.log_path, service.log_start)
    what += cause
    fix = "Fix what its log shows and start the run again."
    if code == 0 and not cause:
        fix = (
            "It must run until the run stops it: look for a place where its code ends the process, "
            "such as `os._exit`."
        )
    fix += f"\n{end_of(service.log_path, service.log_start)}"
    killed = killed_for_memory() - service.killed_for_memory
    if killed and code == 128 + signal.SIGKILL:
        fix = (
            f"Since it was started, the kernel of this machine has killed {killed} processes "
            "because its memory or a container's was used up: add some, or use less (`trl-atropos "
            f"check` estimates it). {fix}"
        )
    error = ServiceError(what, fix=fix)
    error.exit_code = code
    return error


def _describe(code: int) -> str:
    """Returns an exit code in words, such as `exit code 137 (SIGKILL)`."""
    for signum in signal.Signals:
        if code == 128 + signum:
            return f"exit code {code} ({signum.name})"
    return f"exit code {code}"
