"""Services, with real processes under them."""

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import uuid
import warnings
from contextlib import nullcontext
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import ROOT
from tests.rollouts.conftest import Api
from tests.server_process import free_port
from trl_atropos import activity
from trl_atropos.errors import ServiceError
from trl_atropos.recipe import parse
from trl_atropos.rollouts.api import UNREGISTERED
from trl_atropos.services import manager
from trl_atropos.services.addresses import port_of, require_free_port
from trl_atropos.services.guard import members
from trl_atropos.services.machine import (
    SCRATCH,
    VMSTAT,
    killed_for_memory,
    require_shared_memory,
    require_sockets,
)
from trl_atropos.services.manager import Services
from trl_atropos.services.mps import MPS_SHARE, prepare_mps, start_mps
from trl_atropos.services.service_log import tail
from trl_atropos.services.starting import start_services
from trl_atropos.train import apply_recipe_environment

GONE_WITHIN = 15.0
REGISTRATION = {
    "wandb_group": "g",
    "wandb_project": "p",
    "batch_size": 8,
    "max_token_len": 64,
    "checkpoint_dir": "",
}
REGISTRATION |= {"save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 9}
FOREVER = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
FAILING = [sys.executable, "-c", "import sys; print('no GPU found', flush=True); sys.exit(3)"]
# As vLLM 0.26 writes it on a GPU: the reason first, then two more tracebacks of where it was
# noticed.
VLLM_TRACEBACK = """
import sys
def traceback(prefix, error):
    print(prefix + "Traceback (most recent call last):")
    for i in range(25):
        print(f'{prefix}  File "/site/vllm/module_{i}.py", line {i}, in call_{i}')
        print(prefix + "    return func(*args, **kwargs)")
        print(prefix + "           ^^^^^^^^^^^^^^^^^^^^^")
    print(prefix + error)
traceback("(EngineCore pid=7) ERROR 11-21 14:12:53 [core.py:1330] ", "RuntimeError: CUDA error: out of memory")
traceback("(APIServer pid=5) ", "RuntimeError: Engine core initialization failed. See root cause above.")
sys.exit(1)
"""


@pytest.fixture
def services(tmp_path):
    with Services(tmp_path / "logs") as services:
        yield services


@pytest.fixture
def free_url():
    return f"http://127.0.0.1:{free_port()}"


def guard_of(services: Services, name: str) -> int:
    return services._services[name].guard.pid


def until_printed(services: Services, name: str, end: str) -> None:
    """Waits until the log of a service ends like this."""
    log = services.log_dir / f"{name}.log"
    deadline = time.monotonic() + GONE_WITHIN
    while not log.read_text().endswith(end):
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def running(services: Services, name: str) -> int:
    """The one process of a service, once it has said in its log that it is up."""
    until_printed(services, name, "\nup\n")
    [pid] = members(guard_of(services, name))
    return pid


STARTING = """
import time
print("(APIServer pid=5) INFO 11-23 13:30:18 [loader.py:501] Loading weights took 0.01 seconds")
print("Capturing CUDA graphs:  10%|#  |", end="\\r")
print("  Capturing CUDA graphs:  35%|###|", flush=True)
print("/site/dispatcher.py:139: FutureWarning: `reduce_op` is deprecated")
print("  wrapper = lookup(kernel)")
print("  ---", flush=True)
time.sleep(600)
"""


def test_slow_service_is_told_with_its_last_action(services, monkeypatch, caplog):
    monkeypatch.setattr(activity, "FIRST_MESSAGE", 0.6)
    monkeypatch.setenv("COLUMNS", "80")
    caplog.set_level("INFO", "trl_atropos")
    services.start(
        "vllm",
        [sys.executable, "-c", STARTING],
        health_url=f"http://127.0.0.1:{free_port()}/health",
    )
    until_printed(services, "vllm", "---\n")
    with pytest.raises(ServiceError, match="did not become healthy"):
        services.wait_healthy("vllm", timeout=3)
    told = [
        record.getMessage() for record in caplog.records if "is starting" in record.getMessage()
    ]
    assert len(told) >= 2 and re.fullmatch(
        r"vllm is starting, [123] s: Capturing CUDA graphs: 35%\|###\|", told[-1]
    )


def test_service_dying_at_start_is_told_with_log(services, free_url):
    services.start("inference server", FAILING, health_url=f"{free_url}/health")
    began = time.monotonic()
    with pytest.raises(
        ServiceError, match=r"inference server ended with exit code 3 (.|\n)*no GPU found"
    ):
        services.wait_healthy("inference server", timeout=600)
    assert time.monotonic() - began < GONE_WITHIN


def test_vllm_traceback_shows_innermost_frames_only(services, free_url):
    services.start("vllm", [sys.executable, "-c", VLLM_TRACEBACK], health_url=f"{free_url}/health")
    said = r"needs it: RuntimeError: CUDA error: out of memory\. Fix "
    said += r"(.|\n)*module_24.py(.|\n)*CUDA error: out of memory\n(.|\n)*root cause above"
    with pytest.raises(ServiceError, match=said):
        services.wait_healthy("vllm", timeout=600)


@pytest.mark.parametrize("killed", [0, 1])
def test_killed_service_is_told_with_signal_and_oom(services, killed, monkeypatch, tmp_path):
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("nr_free_pages 70\noom_kill 3\n")
    monkeypatch.setattr("trl_atropos.services.machine.VMSTAT", vmstat)
    services.start("vllm", FOREVER)
    pid = running(services, "vllm")
    vmstat.write_text(f"nr_free_pages 7\noom_kill {3 + killed}\n")
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(
        ServiceError, match=r"vllm ended with exit code 137 \(SIGKILL\) while"
    ) as told:
        services._services["vllm"].guard.wait(GONE_WITHIN)
        services.check()
    assert (
        "kernel of this machine has killed 1 processes because its memory" in str(told.value)
    ) == bool(killed)


def test_kernel_kill_count_can_be_read():
    assert f"oom_kill {killed_for_memory()}\n" in VMSTAT.read_text()


def test_silent_service_is_told_with_url_and_log(services, free_url):
    services.start("api", FOREVER, health_url=f"{free_url}/health")
    running(services, "api")
    with pytest.raises(
        ServiceError,
        match=r"/health gave no 200 within 1 s (.|\n)*refused(.|\n)*api\.log:\n(.|\n)*up",
    ):
        services.wait_healthy("api", timeout=1)


def test_service_without_health_url_need_only_live(services):
    services.start("environment", FOREVER)
    services.wait_healthy("environment", timeout=1)


def test_check_raises_after_death_of_service(services):
    services.start("environment", FOREVER)
    pid = running(services, "environment")
    services.check()
    os.kill(pid, signal.SIGKILL)
    services._services["environment"].guard.wait(GONE_WITHIN)
    with pytest.raises(ServiceError, match=r"environment ended with exit code 137 \(SIGKILL\)"):
        services.check()


def test_watch_reports_death_once(services):
    deaths, seen = [], threading.Event()
    services.start("api", FOREVER)
    services.start("environment", FOREVER)
    services.watch(lambda error: (deaths.append(error), seen.set()))
    os.kill(running(services, "environment"), signal.SIGKILL)
    assert seen.wait(GONE_WITHIN)
    os.kill(running(services, "api"), signal.SIGKILL)
    time.sleep(1)
    assert [type(error) for error in deaths] == [ServiceError]
    assert "environment" in str(deaths[0])


def test_watch_ignores_stopped_services(services):
    deaths = []
    services.start("api", FOREVER)
    services.watch(deaths.append)
    services.stop()
    time.sleep(1)
    assert deaths == []


def test_services_are_stopped_in_reverse_order(services, tmp_path):
    noting = "import atexit, signal, sys, time\n" + (
        "def leave(*_):\n    open('order', 'a').write(sys.argv[1])\n    sys.exit()\n"
        "signal.signal(signal.SIGTERM, leave)\nprint('up', flush=True)\ntime.sleep(600)"
    )
    for name in "abc":
        services.start(name, [sys.executable, "-c", noting, name], cwd=tmp_path)
        running(services, name)
    services.stop()
    assert (tmp_path / "order").read_text() == "cba"


def test_stop_is_quick_and_may_be_repeated(services):
    services.start("api", FOREVER)
    guard = guard_of(services, "api")
    running(services, "api")
    services.stop()
    assert members(guard) == []
    began = time.monotonic()
    services.stop()
    assert time.monotonic() - began < GONE_WITHIN


def test_stop_does_not_raise_for_dead_service(services):
    services.start("api", FAILING)
    services._services["api"].guard.wait(GONE_WITHIN)
    services.stop()
    services.check()


def test_service_ignoring_sigterm_is_killed(services, monkeypatch):
    monkeypatch.setattr(manager, "GRACE", 1.0)
    stubborn = (
        "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); "
        "time.sleep(600)"
    )
    services.start("environment", [sys.executable, "-c", stubborn])
    guard = guard_of(services, "environment")
    running(services, "environment")
    services.stop()
    assert members(guard) == []


def test_leftovers_of_killed_guard_are_ended(services, monkeypatch):
    monkeypatch.setattr(manager, "GRACE", 1.0)
    parent = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', sys.argv[1]]); "
        "p.wait()"
    )
    child = (
        "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); "
        "time.sleep(600)"
    )
    services.start("environment", [sys.executable, "-c", parent, child])
    guard = guard_of(services, "environment")
    log = services.log_dir / "environment.log"
    deadline = time.monotonic() + GONE_WITHIN
    while "\nup" not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    os.kill(guard, signal.SIGKILL)
    services._services["environment"].guard.wait(GONE_WITHIN)
    with pytest.raises(ServiceError, match="SIGKILL"):
        services.check()
    assert members(guard) == []


def test_services_start_only_in_main_thread(services):
    failures = []

    def start() -> None:
        try:
            services.start("api", FOREVER)
        except AssertionError as error:
            failures.append(str(error))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert failures == ["services are started from the main thread"]


def test_service_gets_own_but_no_launcher_variables(services, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("GROUP_SIZE", "8")
    report = (
        "import os; "
        "print({name: os.environ.get(name) for name in ('RANK', 'GROUP_SIZE', 'MINE')}, "
        "flush=True);"
    )
    report += "print(any(name.startswith('TORCHELASTIC') for name in os.environ), flush=True)"
    services.start("environment", [sys.executable, "-c", report], env={"MINE": "1"})
    services._services["environment"].guard.wait(GONE_WITHIN)
    log = tail(services.log_dir / "environment.log", 2)
    assert log == "{'RANK': None, 'GROUP_SIZE': '8', 'MINE': '1'}\nFalse"


def test_what_service_prints_is_in_its_log_at_once(services, monkeypatch):
    """As an author looks for a `print` in the environment's log."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    services.start(
        "environment", [sys.executable, "-c", "import time; print('up'); time.sleep(60)"]
    )
    assert running(services, "environment")


def test_atropos_api_becomes_healthy_and_stops(services, free_url):
    port = port_of(free_url)
    command = [
        sys.executable,
        "-m",
        "atroposlib.cli.run_api",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    services.start("Atropos API", command, health_url=f"{free_url}/info")
    services.wait_healthy("Atropos API", timeout=60)
    with pytest.raises(ServiceError, match="already in use"):
        require_free_port(free_url, "the Atropos API", "use another")
    guard = guard_of(services, "Atropos API")
    services.stop()
    assert members(guard) == []
    require_free_port(free_url, "the Atropos API", "use another")


def start_trainer(script: str, folder: Path) -> subprocess.Popen:
    """Starts a Python script in `folder` that has services, with this checkout's package."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_services_are_gone_after_trainer_is_killed(tmp_path):
    trainer = (
        "import sys, time\nfrom trl_atropos.services.manager import Services\nservices = "
        "Services('logs')\nfor name in 'ab':\n    services.start(name, [sys.executable, '-c', "
        "'import time; time.sleep(600)'])\nprint(*(service.guard.pid for service in "
        "services._services.values()), flush=True)\ntime.sleep(600)\n"
    )
    process = start_trainer(trainer, tmp_path)
    guards = [int(pid) for pid in process.stdout.readline().split()]
    process.kill()
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + GONE_WITHIN
    while any(Path(f"/proc/{guard}").exists() or members(guard) for guard in guards):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _draw_ports(number: int) -> list[int]:
    random.seed(42)  # as every trainer does
    return [free_port() for _ in range(number)]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_of_one_seed_draw_own_ports(method):
    mine = _draw_ports(5)
    with get_context(method).Pool(2) as pool:
        theirs = pool.map(_draw_ports, [5, 5], chunksize=1)
    drawn = [*mine, *theirs[0], *theirs[1], *_draw_ports(5)]
    assert len(set(mine)) == 5
    # Each process has a place of its own among 10,000 ports; that two of three meet has a
    # probability of 0.3 %.
    assert len(set(drawn)) >= len(drawn) - 5


def test_port_in_use_is_named_with_fix():
    fix = "Stop what runs there, or use it with `start_atropos: false`."
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServiceError) as caught:
            require_free_port(f"http://127.0.0.1:{port}", "the Atropos API", fix)
    assert str(caught.value) == (
        f"port {port} on 127.0.0.1 is already in use, the Atropos API cannot be started there. "
        f"{fix}"
    )


def test_port_of_other_machine_is_refused():
    with pytest.raises(ServiceError, match=r"cannot be listened on"):
        require_free_port("http://192.0.2.1:8000", "the Atropos API", "set `start_atropos: false`")


def test_url_without_port_is_refused():
    with pytest.raises(ServiceError, match="names no port"):
        port_of("http://127.0.0.1")


def test_tail_gives_last_lines_of_file(tmp_path):
    (tmp_path / "log").write_text("".join(f"line {n}\n" for n in range(100_000)))
    assert tail(tmp_path / "log", 2) == "line 99998\nline 99999"


def test_health_check_bypasses_proxy(services, free_url, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://192.0.2.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    assert urllib.request.getproxies()["http"] == "http://192.0.2.1:1"
    server = (
        "import sys; from http.server import *; HTTPServer(('127.0.0.1', int(sys.argv[1])), "
        "SimpleHTTPRequestHandler).serve_forever()"
    )
    services.start(
        "server", [sys.executable, "-c", server, str(port_of(free_url))], health_url=free_url
    )
    services.wait_healthy("server", timeout=30)


@pytest.mark.parametrize(
    ("length", "refused"),
    [
        (59, nullcontext()),
        (60, pytest.raises(ServiceError, match=r"`TMPDIR`.* 60 bytes; at most 59 .* such as /tmp")),
    ],
)
def test_folder_too_long_for_socket_name_is_refused(length, refused, monkeypatch):
    # pytest's own folders are too long for the first
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        folder = Path(short, "x" * (length - len(short) - 1))
        folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        with refused:
            require_sockets()
        kernel = nullcontext() if length == 59 else pytest.raises(OSError, match="path too long")
        with socket.socket(socket.AF_UNIX) as listener, kernel:
            listener.bind(f"{tempfile.mkdtemp(prefix=SCRATCH)}/{uuid.uuid4()}")


def test_scarce_shared_memory_is_named_with_fix(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=64 << 20))
    require_shared_memory(1)
    with pytest.raises(
        ServiceError, match=r"/dev/shm has 64 MiB free.* 2 worker processes needs 256.*--shm-size"
    ):
        require_shared_memory(2)


@pytest.mark.parametrize("killed", [None, "service", "guard"])
def test_scratch_of_service_is_removed_at_any_end(services, killed, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = (
        "import os, tempfile, time; tempfile.mkstemp(); print(os.getpid(), flush=True); "
        "time.sleep(600)"
    )
    services.start("server", [sys.executable, "-c", code], scratch=True)
    [service] = services.running()
    deadline = time.monotonic() + GONE_WITHIN
    while not (told := tail(service.log_path, 1)).isdigit():
        assert time.monotonic() < deadline, told
    assert len(os.listdir(service.scratch)) == 1 and Path(service.scratch).parent == tmp_path
    if killed:
        os.kill(service.guard.pid if killed == "guard" else int(told), signal.SIGKILL)
        service.guard.wait(GONE_WITHIN)
    services.stop()
    assert not list(tmp_path.glob(f"{SCRATCH}*"))


STARTS_MPS = "from trl_atropos.services.mps import start_mps; start_mps('logs')\n"


def started_mps(folder: Path, code: str, **variables: str) -> subprocess.CompletedProcess:
    """What a process says that starts MPS, and then runs `code`."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CUDA_MPS")} | variables
    command = [sys.executable, "-c", STARTS_MPS + "import os\n" + code]
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    ("daemon", "says"),
    [
        (
            "",
            "it did not start. The end of logs/mps.log:\nsh: 1: exec: nvidia-cuda-mps-control: not "
            "found",
        ),
        ("echo no GPU; exit 3", "no GPU"),
        ("touch $CUDA_MPS_PIPE_DIRECTORY/control; exec sleep 600", "CUDA does not begin under it"),
    ],
)
def test_run_goes_on_without_mps(tmp_path, daemon, says):
    path = tmp_path / "bin/nvidia-cuda-mps-control"
    path.parent.mkdir()
    # and no others: a machine with a GPU has the real one beside them
    for tool in ("sh", "sleep", "touch"):
        path.with_name(tool).symlink_to(shutil.which(tool))
    if daemon:
        path.write_text(f"#!/bin/sh\n{daemon}\n")
        path.chmod(0o755)
    ended = started_mps(
        tmp_path, "print(os.environ.get('CUDA_MPS_PIPE_DIRECTORY'))", PATH=str(path.parent)
    )
    assert ended.returncode == 0 and ended.stdout == "None\n", ended.stderr
    assert "goes on without NVIDIA's MPS" in ended.stderr and says in ended.stderr


def test_mps_is_not_started_for_several_processes(tmp_path):
    assert "must be started before the run" in started_mps(tmp_path, "", WORLD_SIZE="2").stderr


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which("nvidia-cuda-mps-control") is None, reason="needs NVIDIA's driver")
def test_started_mps_serves_process_until_its_end(tmp_path):
    code = """import subprocess, torch
torch.ones(1, device="cuda")
asked = subprocess.run("nvidia-cuda-mps-control", input="get_server_list", capture_output=True, text=True)
print(os.environ["CUDA_MPS_PIPE_DIRECTORY"], *asked.stdout.split())"""
    ended = started_mps(tmp_path, code)
    folder, *servers = ended.stdout.split()
    assert len(servers) == 1, ended.stderr
    deadline = time.monotonic() + GONE_WITHIN
    while Path(folder).exists() or Path("/proc", servers[0]).exists():
        assert time.monotonic() < deadline, "MPS goes on"
        time.sleep(0.1)


def test_recipe_settings_are_known_before_parsing(tmp_path, monkeypatch):
    recipe, overlay = tmp_path / "recipe.yaml", tmp_path / "overlay.yaml"
    recipe.write_text("mps: false\nenv: {TRL_ATROPOS_TESTED: 1}\noutput_dir: runs/a\n")
    overlay.write_text("mps: true\n")
    monkeypatch.setenv("TRL_ATROPOS_TESTED", "0")
    assert apply_recipe_environment([f"--config={recipe}"])["mps"] is False
    assert os.environ["TRL_ATROPOS_TESTED"] == "1"
    stated = apply_recipe_environment(
        ["--config", str(recipe), "--overlay", str(overlay), "--output_dir=runs/b"]
    )
    assert stated["mps"] is True and stated["output_dir"] == "runs/b"
    # as argparse reads it: true
    assert apply_recipe_environment(["--config", str(recipe), "--mps"])["mps"] == ""
    # What reads the variables when it is imported is not imported before.
    code = f"""import sys
from trl_atropos.train import apply_recipe_environment
apply_recipe_environment(["--config", {str(recipe)!r}])
print({{"numpy", "torch", "huggingface_hub"}} & set(sys.modules))"""
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
        == "set()\n"
    )


def test_api_is_reset_before_environments_register(services, tmp_path):
    """Otherwise they would register, and end when the trainer resets it."""
    api = Api(free_port())
    api.start()
    try:
        api.post("/register", REGISTRATION)
        api.get("/batch")  # the former trainer, which lets environments in at once
        environment = [
            {"name": "mine", "command": f"{sys.executable} -c 'import time; time.sleep(600)'"}
        ]
        recipe = {
            "model_name_or_path": "m",
            "output_dir": str(tmp_path / "run"),
            "max_steps": 1,
            "use_cpu": True,
        }
        recipe |= {"atropos_url": api.url, "reset_atropos": True, "environments": environment}
        (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
        start_services(parse(["--config", str(tmp_path / "recipe.yaml")]), services)
        assert api.get("/info")["batch_size"] == UNREGISTERED
    finally:
        api.stop()


def test_mps_without_writable_log_is_skipped():
    with pytest.warns(UserWarning, match="goes on without NVIDIA's MPS .*nowhere"):
        start_mps("/proc/nowhere/logs")


def test_share_of_the_gpu_is_warned_of(monkeypatch):
    monkeypatch.setenv("CUDA_MPS_CLIENT_PRIORITY", "1")  # `prepare_mps` sets it otherwise
    monkeypatch.setenv(MPS_SHARE, "75")
    with pytest.warns(UserWarning, match=f"{MPS_SHARE}` gives the trainer 75 % .* Unset it"):
        prepare_mps({"mps": False})
    monkeypatch.setenv(MPS_SHARE, "100")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare_mps({"mps": False})
