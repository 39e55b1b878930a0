"""Folders in memory (`/dev/shm`) for checkpoints on their way to the disk: whose they are, and whether there is room.

`saving.py` makes them. A process that is killed leaves its own, which the next trainer on this machine removes.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import psutil
import torch
from peft import PeftModel

from trl_atropos.guard import SHM

PREFIX = "trl_atropos-checkpoint-"
RESERVE = 2 << 30  # bytes that stay free: vLLM and NCCL use /dev/shm too, and are killed where it is full


class Staging:
    """A folder in memory, locked as long as this process lives: one without its owner is removed by `sweep`."""

    def __init__(self) -> None:
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=SHM))
            with contextlib.suppress(FileNotFoundError):  # a sweep came before the lock: another folder
                self._lock = _locked(self.path, fcntl.LOCK_EX)
                return

    def remove(self) -> None:
        shutil.rmtree(self.path)
        os.close(self._lock)


def _locked(folder: Path, how: int) -> int:
    """A descriptor that holds the lock. Raises `FileNotFoundError` if the folder went while it was waited for."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, how)
        os.stat(folder)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def sweep() -> None:
    """Removes what killed processes of this user have left in memory."""
    for folder in Path(SHM).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # in use, gone meanwhile, or another user's
            lock = _locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def saved_bytes(model: torch.nn.Module, optimizer: Any) -> int:
    """At least what a checkpoint takes. Of adapters, the embeddings may be saved beside them."""
    saved = list(model.parameters())
    if isinstance(model, PeftModel):
        embeddings = [one.weight for one in model.modules() if isinstance(one, torch.nn.Embedding)]
        saved = [one for one in saved if one.requires_grad] + 2 * embeddings
    state = optimizer.state_dict() if optimizer is not None else None
    return int(1.1 * (_bytes(saved) + _bytes(state)))


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(map(_bytes, value.values()))
    return sum(map(_bytes, value)) if isinstance(value, list | tuple) else 0


def shortage(checkpoint: int) -> str:
    """What keeps that many bytes from being held in memory, and the way out; empty if nothing does."""
    needed = checkpoint + RESERVE
    told = f"it takes {needed / 2**30:.1f} GiB, with what stays free for vLLM and NCCL, and"
    room = shutil.disk_usage(SHM).free if os.path.isdir(SHM) else 0
    if room < needed:
        return f"{told} {SHM} has {room / 2**30:.1f} free: enlarge that (docker's `--shm-size`)"
    memory = _free_memory()
    if memory < needed:
        return f"{told} {memory / 2**30:.1f} of memory are free: give the run more"
    return ""


def _free_memory() -> int:
    """Bytes, of the machine or of this container: what is in /dev/shm is in its memory."""
    free = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError, KeyError):  # there is no limit
        limit = int((group / "memory.max").read_text())
        use = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        kept = int((group / "memory.current").read_text()) - int(use["file"]) + int(use["shmem"])
        free = min(free, limit - kept)
    return free
