"""Checks whether a machine has what services need."""

import contextlib
import os
import re
import shutil
import tempfile
from pathlib import Path

from trl_atropos.errors import ServiceError
from trl_atropos.services.guard import SHM

SCRATCH = "ta"  # how the names of services' temporary folders begin
# bytes: in that folder, vLLM gives a socket a UUID for its name
SOCKET_NAME = len(f"/{SCRATCH}12345678/") + 36
LONGEST_SOCKET_FOLDER = 107 - SOCKET_NAME  # bytes; the path of a Unix socket may have 107
# bytes: several workers have a queue between them
SHARED_BY_ONE = 16 << 20
SHARED_BY_SEVERAL = 256 << 20
VMSTAT = Path("/proc/vmstat")


def require_sockets() -> None:
    """Raises `ServiceError` if the path of the sockets through which vLLM's processes talk would be
    too long."""
    variable = "VLLM_RPC_BASE_PATH"
    folder = os.environ.get(variable)
    if not folder:
        variable = "TMPDIR"
        folder = tempfile.gettempdir()
    length = len(os.fsencode(folder))
    if length > LONGEST_SOCKET_FOLDER:
        what = (
            f"vLLM makes Unix sockets in {folder} (`{variable}`), whose path has {length} bytes; "
            f"at most {LONGEST_SOCKET_FOLDER} leave room for names"
        )
        fix = f"Set `{variable}` to a folder with a shorter path, such as /tmp."
        raise ServiceError(what, folder, fix, "sockets")


def require_shared_memory(processes: int) -> None:
    """Raises `ServiceError` if /dev/shm is too small for a vLLM server of that many worker
    processes."""
    needed = SHARED_BY_ONE if processes == 1 else SHARED_BY_SEVERAL
    free = shutil.disk_usage(SHM).free
    if free < needed:
        what = (
            f"{SHM} has {free >> 20} MiB free, and a vLLM server of {processes} worker processes "
            f"needs {needed >> 20}"
        )
        fix = (
            "Set docker's `--shm-size=2g` (Kubernetes: an `emptyDir` of `medium: Memory`), or "
            "make room there."
        )
        raise ServiceError(what, f"{free >> 20} MiB", fix, "shared-memory")


def killed_for_memory() -> int:
    """Returns how many processes the kernel has killed on this machine, since its start, because
    memory was used up."""
    with contextlib.suppress(FileNotFoundError):  # some containers hide it
        counters = VMSTAT.read_text(encoding="ascii")
        count = re.search(r"^oom_kill (\d+)$", counters, re.MULTILINE)
        if count is not None:
            return int(count[1])
    return 0
