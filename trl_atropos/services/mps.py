"""Starts NVIDIA's Multi-Process Service (`mps: true`), under which the trainer and the servers of a
GPU compute at the same time.
"""

import os
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping
from typing import Any

from trl_atropos.activity import activity
from trl_atropos.errors import ServiceError
from trl_atropos.services.manager import Services
from trl_atropos.services.service_log import tail

# variables that NVIDIA's Multi-Process Service and its processes read
MPS_FOLDER = "CUDA_MPS_PIPE_DIRECTORY"
MPS_SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
MPS_TIMEOUT = 30.0  # seconds until the first process of NVIDIA's MPS has begun
# In a folder of its own, where no other program gets to it.
MPS_COMMAND = (
    "CUDA_MPS_PIPE_DIRECTORY=$TMPDIR CUDA_MPS_LOG_DIRECTORY=$TMPDIR exec nvidia-cuda-mps-control -f"
)
BEGIN_CUDA = """import ctypes
cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
result = cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
raise SystemExit(min(255, result))"""


def prepare_mps(stated: Mapping[str, Any]) -> None:
    """Starts NVIDIA's Multi-Process Service if the `stated` settings have `mps: true`, and gives
    this process its place under it, below the server. Warns if CUDA has begun without it, and if
    this process may have only a share of the GPU."""
    os.environ.setdefault("CUDA_MPS_CLIENT_PRIORITY", "1")
    share = os.environ.get(MPS_SHARE, "")
    if share not in ("", "100"):
        warnings.warn(
            f"`{MPS_SHARE}` gives the trainer {share} % of the GPU under NVIDIA's MPS. With 75 and "
            "85 on an H200 (driver 580), a forward pass computed other numbers each time, or NaN. "
            "Unset it",
            stacklevel=1,
        )
    if str(stated.get("mps")).lower() not in ("", "1", "t", "true", "y", "yes"):
        return
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        warnings.warn(
            "the run goes on without NVIDIA's MPS (`mps: true`): this program has used CUDA "
            "before. Start it again (in a notebook: restart the kernel), and use CUDA only after "
            "the run has begun",
            stacklevel=1,
        )
        return
    log_dir = os.path.join(str(stated.get("output_dir", "trainer_output")), "logs")
    start_mps(log_dir)


def start_mps(log_dir: str) -> None:
    """Starts NVIDIA's Multi-Process Service for this process and its services, unless one runs.

    It ends with this process. CUDA looks for it only once, when it begins, so this comes before.
    Warns if the service cannot be started, and the run goes on without it.
    """

    if mps_runs():
        return
    services = Services(log_dir)
    variables = os.environ.copy()
    try:
        with activity("Starting NVIDIA's MPS"):
            _start_mps(services)
    except (ServiceError, OSError, subprocess.TimeoutExpired) as error:
        services.stop()
        os.environ.pop(MPS_FOLDER, None)
        os.environ.update(variables)
        warnings.warn(f"the run goes on without NVIDIA's MPS (`mps: true`): {error}", stacklevel=1)


def _start_mps(services: Services) -> None:
    """Raises `ServiceError`, `OSError` or `TimeoutExpired` if CUDA does not begin under MPS."""

    deadline = time.monotonic() + MPS_TIMEOUT
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1:
        what = "with several processes it must be started before the run, to outlive each of them"
        raise ServiceError(what, f"{processes} processes", "Run `nvidia-cuda-mps-control -d`.")
    service = services.start("mps", ["sh", "-c", MPS_COMMAND], scratch=True)
    os.environ[MPS_FOLDER] = service.scratch
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        # its processes count from 0 what it sees
        numbers = range(len(visible.split(",")))
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, numbers))
    while not mps_runs():
        if services.exit_code(service) is not None or time.monotonic() > deadline:
            raise ServiceError(
                f"it did not start. The end of {service.log_path}:\n{tail(service.log_path, 1)}"
            )
        time.sleep(0.05)
    begin = [sys.executable, "-I", "-S", "-c", BEGIN_CUDA]
    code = subprocess.run(begin, stderr=subprocess.DEVNULL, timeout=MPS_TIMEOUT).returncode
    if code:
        raise ServiceError(f"CUDA does not begin under it (error {code})")


def mps_runs() -> bool:
    """Returns whether NVIDIA's Multi-Process Service runs: whether the pipe is there through which
    its processes are reached."""
    folder = os.environ.get(MPS_FOLDER, "/tmp/nvidia-mps")
    return os.path.exists(os.path.join(folder, "control"))
