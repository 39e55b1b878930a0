"""Lets one run at a time use an `output_dir`. Two would delete each other's checkpoints and write
the same rollouts.

`trl_atropos.train` holds the folder from before it starts a service. `AtroposGRPOTrainer.train`
holds it for a trainer that is used by itself. Both do so on rank 0.

The kernel knows whether the process that locked a file still lives (`filelock`), but a network file
system may not carry locks to other machines. So the holder also writes its name into the file, and
refreshes the file's time every `BEAT` seconds. If the lock is refused, the folder is held. If it is
granted and the last holder was on this machine, the folder is free. Otherwise the time decides: a
holder that has not refreshed it for `DEAD` seconds is dead.
"""

import contextlib
import errno
import json
import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from trl_atropos.errors import AtroposTrainingError

logger = logging.getLogger(__name__)

NAME = ".run.lock"
BEAT = 5.0  # seconds
DEAD = 60.0  # seconds
POLL = 0.5  # seconds between two looks at another machine's lock
# errors of a file system that knows no locks
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)

_held: set[Path] = set()  # by this process


@contextlib.contextmanager
def locked(output_dir: str | Path) -> Iterator[None]:
    """Holds the folder, which may not exist yet. Raises `AtroposTrainingError` if a living run
    holds it."""
    folder = Path(output_dir).resolve()
    if folder in _held:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    # A file system without locks must not turn it into a lock by the file's mere existence.
    lock = FileLock(path, blocking=False, fallback_to_soft=False)
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    file = _open(path, lock)
    ended = threading.Event()
    beat = threading.Thread(target=_beat, args=(file, ended), name="output-lock", daemon=True)
    try:
        _require_free(path, lock)
        holder = {
            "process": str(os.getpid()),
            "host": socket.gethostname(),
            "boot": _boot(),
            "since": since,
        }
        _write(file, holder)
        beat.start()
        _held.add(folder)
        try:
            yield
        finally:
            _held.remove(folder)
            ended.set()
            beat.join()
            _write(file, {})
    finally:
        os.close(file)
        lock.release()


def _open(path: Path, lock: FileLock) -> int:
    """Locks the file, if its file system knows locks, and returns a descriptor of it. Makes the
    file if it is missing. Raises `AtroposTrainingError` if another process has locked it, or if the
    run may not write to it: through a symbolic link, it would overwrite somebody's file."""
    try:
        try:
            lock.acquire()
        except Timeout:
            raise _taken(path, _read(path)) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError as error:
        reason = error.strerror
        if error.errno == errno.ELOOP:
            reason = f"it is a symbolic link to {os.readlink(path)}"
        what = f"{path} cannot be locked for this run: {reason}"
        fix = "Remove it if no run uses the folder, or set `output_dir` to another folder."
        raise AtroposTrainingError(what, fix=fix, code="output-dir") from error


def _require_free(path: Path, lock: FileLock) -> None:
    """Returns when this process may write its name into the file. Raises `AtroposTrainingError` if
    the last holder is alive on a machine whose locks do not reach this one."""
    holder = _read(path)
    if not holder or (lock.is_locked and holder["boot"] == _boot()):
        return
    last_beat = _last_beat(path)
    silence = _silence(path)
    if silence < DEAD:
        logger.warning(
            "%s was last used by %s, %.0f s ago. Waiting up to %.0f s to see whether that run is "
            "dead.",
            path.parent,
            _describe(holder),
            silence,
            DEAD - silence,
        )
    while silence < DEAD:
        time.sleep(POLL)
        if _last_beat(path) != last_beat:
            raise _taken(path, holder)
        silence = _silence(path)
    message = "%s was used by %s, which is dead: it wrote nothing for %.0f s."
    logger.warning(message, path.parent, _describe(holder), silence)


def _taken(path: Path, holder: dict[str, str]) -> AtroposTrainingError:
    what = f"`output_dir` is {str(path.parent)!r}, which another run is using: {_describe(holder)}"
    fix = "Set `output_dir` to another folder, or end that run first."
    return AtroposTrainingError(what, fix=fix, code="output-dir-taken")


def _describe(holder: dict[str, str]) -> str:
    if not holder:
        return "one that has just begun"
    return f"process {holder['process']} on {holder['host']}, since {holder['since']}"


def _boot() -> str:
    """Returns an id of this machine's present boot, equal in all its processes and containers."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _read(path: Path) -> dict[str, str]:
    """Returns the last holder. It is empty if its run has ended, or is about to write its name."""
    with contextlib.suppress(ValueError):
        return json.loads(path.read_text(encoding="utf-8"))
    return {}


def _write(file: int, holder: dict[str, str]) -> None:
    text = json.dumps(holder).encode()
    os.pwrite(file, text, 0)
    os.ftruncate(file, len(text))


def _beat(file: int, ended: threading.Event) -> None:
    while not ended.wait(BEAT):
        # If a file server is away, others cannot see the time either.
        with contextlib.suppress(OSError):
            os.utime(file)


def _last_beat(path: Path) -> int:
    """Returns the time of the last beat, in nanoseconds."""
    with open(path, "rb") as file:  # opening makes a network file system ask its server
        return os.fstat(file.fileno()).st_mtime_ns


def _silence(path: Path) -> float:
    """Returns the seconds since the last beat, by the clock of the file system, which machines
    share."""
    with tempfile.TemporaryFile(dir=path.parent) as probe:
        probe.write(b".")
        probe.flush()
        os.fsync(probe.fileno())
        now = os.fstat(probe.fileno()).st_mtime_ns
    return (now - _last_beat(path)) / 1e9
