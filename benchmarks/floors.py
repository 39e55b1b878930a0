"""What the machine allows: the time of one bare copy of as many bytes over the link that a publish
takes.

`gloo` and `nccl`: a broadcast over the package's own channel (`tensors/channel.py`) to a second
process that does nothing with it. `memory`: a copy on the device that the weights are on. `file`:
writing a file and reading it again in the folder that adapters and checkpoints go to, which may all
happen in the system's cache, as in a publish.

Run as a module, this file is that second process.
"""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from trl_atropos.tensors.channel import ChannelError, open_group, open_receiver

ROUNDS = 5  # of which the best counts
TIMEOUT = 120.0  # seconds for one of them


class Floors:
    """
    Measures once per link and number of bytes. A context manager: leaving it ends what it started.

    Args:
        folder (`Path`): Where files go.
        device (`torch.device`): The trainer's.
        environment (`dict[str, str]`): Of the servers, so that the second process is where they
            are.
    """

    def __init__(self, folder: Path, device: torch.device, environment: dict[str, str]):
        self.folder = folder
        self.device = device
        self.environment = environment
        self.measured: dict[tuple[str, int], float] = {}  # ms, by link and bytes
        self._receivers: dict[str, _Receiver] = {}

    def __enter__(self) -> "Floors":
        return self

    def __exit__(self, *_: object) -> None:
        for receiver in self._receivers.values():
            receiver.close()

    def ms(self, link: str | None, num_bytes: int) -> float:
        """Milliseconds of one bare copy; 0 where nothing moves (`link` is `None`)."""
        if link is None or num_bytes == 0:
            return 0.0
        key = (link, num_bytes)
        if key not in self.measured:
            device = "cpu" if link in ("gloo", "file") else self.device
            copy = self._copy_over(link, torch.ones(num_bytes, dtype=torch.uint8, device=device))
            copy()  # allocates
            self.measured[key] = min(_time(copy) for _ in range(ROUNDS))
        return self.measured[key]

    def gigabytes_per_second(self) -> dict[str, float]:
        """Of each link that was measured, at the largest number of bytes."""
        largest = dict(sorted(self.measured))
        return {
            link: num_bytes / self.measured[link, num_bytes] / 1e6
            for link, num_bytes in largest.items()
        }

    def _copy_over(self, link: str, source: torch.Tensor) -> Callable[[], object]:
        if link == "memory":
            target = torch.empty_like(source)
            return lambda: target.copy_(source)
        if link == "file":
            path = self.folder / "floor"
            content = source.cpu().numpy()
            return lambda: (path.write_bytes(content), path.read_bytes(), path.unlink())
        if link not in self._receivers:
            self._receivers[link] = _Receiver(link, self.device, self.environment)
        return lambda: self._receivers[link].send(source)


def _time(copy: Callable[[], object]) -> float:
    started = time.perf_counter()
    copy()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1e3


class _Receiver:
    """The second process of a link, which says when it has received something."""

    def __init__(self, link: str, device: torch.device, environment: dict[str, str]):
        self.process: subprocess.Popen | None = None
        self.environment = {**os.environ, **environment}
        try:
            self.channel = open_group(link, device, [("127.0.0.1", 1, self._start)], TIMEOUT)
        # also on Ctrl-C: the second process would wait for its input for ever
        except BaseException:
            self.close()
            raise

    def _start(self, specification: dict) -> None:
        command = [sys.executable, "-m", __name__, json.dumps(specification)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self.environment, bufsize=0
        )

    def send(self, source: torch.Tensor) -> None:
        """Returns when the other process has it all."""
        self.process.stdin.write(f"{source.numel()}\n".encode())
        self.channel.send(source)
        ready, _, _ = select.select([self.process.stdout], [], [], TIMEOUT)
        if not ready or self.process.stdout.read(1) != b".":
            raise ChannelError(
                f"a broadcast of {source.numel()} bytes did not arrive within {TIMEOUT:.0f} s"
            )

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def _receive(specification: dict) -> None:
    """Ends with the first process, which closes our input."""
    device = torch.device("cuda:0" if specification["kind"] == "nccl" else "cpu")
    channel = open_receiver(specification, 0, device)
    for line in sys.stdin:
        channel.receive(int(line))
        sys.stdout.write(".")
        sys.stdout.flush()


if __name__ == "__main__":
    _receive(json.loads(sys.argv[1]))
