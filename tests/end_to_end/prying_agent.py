"""An agent that makes one call, and notes what it can read of the processes of this machine.

    python prying_agent.py TASK

It appends its task to the file `ASKED`. The first of several writes to the file `PRIED` a line of
JSON for each process: its id, command line, and which of `WAYS` the kernel let it go, with what it
read of the variables. Standard library only.
"""

import contextlib
import ctypes
import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

CHILD = ["sleep", "61.5"]  # an agent's own program
PIDFD_GETFD = 438  # system call: takes a descriptor of another process


def read_variables(pid: int) -> str:
    return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")


def open_files(pid: int) -> None:
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            os.readlink(f"/proc/{pid}/fd/{descriptor}")


def read_maps(pid: int) -> None:
    Path(f"/proc/{pid}/maps").read_bytes()


def open_memory(pid: int) -> None:
    with open(f"/proc/{pid}/mem", "r+b", buffering=0):
        pass


def take_descriptor(pid: int) -> None:
    process = os.pidfd_open(pid)
    taken = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, process, 2, 0)
    number = ctypes.get_errno()
    os.close(process)
    if taken < 0:
        raise OSError(number, os.strerror(number))
    os.close(taken)


WAYS = {
    "environ": read_variables,
    "fd": open_files,
    "maps": read_maps,
    "mem": open_memory,
    "pidfd_getfd": take_descriptor,
}


def look_at(pid: int) -> dict:
    """Returns what this process can read of another one."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    open_ways = []
    variables = ""
    for name, look in WAYS.items():
        with contextlib.suppress(PermissionError):
            read = look(pid)
            variables = read or variables
            open_ways.append(name)
    return {
        "pid": pid,
        "command": command.decode(errors="replace"),
        "open": open_ways,
        "variables": variables,
    }


def pry(path: str) -> None:
    """Writes what there is to read of all processes, one of which is this agent's own child. Does
    nothing if another agent has begun to."""
    try:
        os.mkdir(f"{path}.begun")
    except FileExistsError:
        return
    child = subprocess.Popen(CHILD)
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    lines = []
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            lines.append(json.dumps(look_at(pid)))
    child.kill()
    child.wait()
    Path(f"{path}.new").write_text("\n".join(lines))
    os.rename(f"{path}.new", path)


def ask(question: str) -> None:
    body = {"model": "any", "messages": [{"role": "user", "content": question}], "max_tokens": 8}
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    headers = {"Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers))


def main() -> None:
    with open(os.environ["ASKED"], "a") as asked:
        asked.write(f"{sys.argv[1]}\n")
    ask(sys.argv[1])
    pry(os.environ["PRIED"])


if __name__ == "__main__":
    main()
