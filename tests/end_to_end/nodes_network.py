"""Machines in miniature: network namespaces with addresses of their own, joined by a bridge in one
more.

Needs root and iproute2. Nothing of it can be reached from outside, nor reaches anything outside. A
process belongs to the node in whose namespace it was started, and can be found by it; leaving the
context kills what is left in them.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator

CLONE_NEWNET = 0x40000000
INTERFACE = "eth0"  # of each node
DEADLINE = 10.0  # seconds for processes that were killed

_libc = ctypes.CDLL(None, use_errno=True)


def why_not() -> str | None:
    """Why there can be no `Network` here, or `None`."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no `ip` command: install iproute2"
    name = f"ta{os.getpid()}-try"
    tried = subprocess.run(
        ["ip", "netns", "add", name], capture_output=True, text=True, timeout=10, check=False
    )
    if tried.returncode:
        return f"`ip netns add` is refused: {tried.stderr.strip()}"
    _ip("netns", "del", name)
    return None


class Network:
    """
    A context manager.

    Args:
        nodes: Names of the machines.

    Attributes:
        address: IPv4 address of each, by name.
    """

    def __init__(self, *nodes: str):
        self.address = {node: f"10.77.0.{number}" for number, node in enumerate(nodes, start=1)}
        self._made: list[str] = []

    def __enter__(self) -> "Network":
        try:
            self._make("switch")
            _ip("-n", self._namespace("switch"), "link", "add", "name", "bridge", "type", "bridge")
            _ip("-n", self._namespace("switch"), "link", "set", "dev", "bridge", "up")
            for node in self.address:
                self._join(node)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _join(self, node: str) -> None:
        """A namespace whose interface is a cable to the bridge."""
        self._make(node)
        here, switch = self._namespace(node), self._namespace("switch")
        _ip(
            "-n",
            switch,
            "link",
            "add",
            "name",
            node,
            "type",
            "veth",
            "peer",
            "name",
            INTERFACE,
            "netns",
            here,
        )
        _ip("-n", switch, "link", "set", "dev", node, "master", "bridge", "up")
        _ip("-n", here, "address", "add", f"{self.address[node]}/24", "dev", INTERFACE)
        _ip("-n", here, "link", "set", "dev", "lo", "up")
        _ip("-n", here, "link", "set", "dev", INTERFACE, "up")

    def _make(self, node: str) -> None:
        _ip("netns", "add", self._namespace(node))
        self._made.append(node)

    def _namespace(self, node: str) -> str:
        return f"ta{os.getpid()}-{node}"

    @contextlib.contextmanager
    def inside(self, node: str) -> Iterator[None]:
        """This thread's sockets, and the processes that it starts, belong to a node."""
        with (
            open("/proc/thread-self/ns/net") as home,
            open(f"/run/netns/{self._namespace(node)}") as there,
        ):
            _set_namespace(there.fileno())
            try:
                yield
            finally:
                _set_namespace(home.fileno())

    def processes(self, node: str) -> list[int]:
        """Every process on a node."""
        return [int(pid) for pid in _ip("netns", "pids", self._namespace(node)).split()]

    def kill(self, node: str) -> None:
        """`kill -9` of everything on a node. Returns when it is gone."""
        deadline = time.monotonic() + DEADLINE
        while pids := [pid for pid in self.processes(node) if pid != os.getpid()]:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            assert time.monotonic() < deadline, f"processes {pids} on {node} survive SIGKILL"
            time.sleep(0.05)

    def unplug(self, node: str) -> None:
        """Nobody hears of a node any more, not even that its processes end."""
        _ip("-n", self._namespace("switch"), "link", "set", "dev", node, "down")

    def plug_in(self, node: str) -> None:
        _ip("-n", self._namespace("switch"), "link", "set", "dev", node, "up")

    def _remove(self) -> None:
        for node in list(reversed(self._made)):
            self.kill(node)
            _ip("netns", "del", self._namespace(node))
            self._made.remove(node)


def _set_namespace(descriptor: int) -> None:
    if _libc.setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def _ip(*arguments: str) -> str:
    done = subprocess.run(
        ["ip", *arguments], capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr.strip()}"
    return done.stdout
