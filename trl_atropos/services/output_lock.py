"""One run at a time in an `output_dir`: two would delete each other's checkpoints and write the
same rollouts.

`trl_atropos.train` holds the folder from before it starts a service, `AtroposGRPOTrainer.train` for
a trainer that is used by itself; both on rank 0.

The kernel knows whether the process that locked a file still lives, but a network file system may
not carry locks to other machines. So the holder also writes its name into the file, and refreshes
the file's time every `BEAT` seconds. If the lock is refused, the folder is held. If it is granted
and the last holder was on this machine, the folder is free. Else the time decides: a holder that
has not refreshed it for `DEAD` seconds is dead.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from trl_atropos.errors import AtroposTrainingError

logger = logging.getLogger(__name__)

NAME = ".run.lock"
BEAT = 5.0  # seconds
DEAD = 60.0  # seconds
POLL = 0.5  # seconds between two looks at another machine's lock
# the file system does not know any
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)

_held: set[Path] = set()  # by this process


@contextlib.contextmanager
def locked(output_dir: str | Path) -> Iterator[None]:
    """Holds the folder, which may not exist yet. Raises `AtroposTrainingError` if a run that is
    alive holds it."""
    folder = Path(output_dir).resolve()
    if folder in _held:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    file = _open(path)
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    ended = threading.Event()
    beat = threading.Thread(target=_beat, args=(file, ended), name="output-lock", daemon=True)
    try:
        _take(file, path)
        _write(
            file,
            {
                "process": str(os.getpid()),
                "host": socket.gethostname(),
                "boot": _boot(),
                "since": since,
            },
        )
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


def _open(path: Path) -> int:
    """Returns the descriptor of the lock's file, which is made if missing. Raises
    `AtroposTrainingError` if this is no file that the run may write to: through a symbolic link, it
    would overwrite somebody's file elsewhere."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        is_link = error.errno == errno.ELOOP
        reason = f"it is a symbolic link to {os.readlink(path)}" if is_link else error.strerror
        what = f"{path} cannot be locked for this run: {reason}"
        fix = "Remove it if no run uses the folder, or set `output_dir` to another folder."
        raise AtroposTrainingError(what, fix=fix, code="output-dir") from error


def _take(file: int, path: Path) -> None:
    """Returns when this process may write its name into the file."""
    knows_locks = True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _taken(path, _read(path)) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        knows_locks = False
    holder = _read(path)
    if not holder or (knows_locks and holder["boot"] == _boot()):
        return
    last_beat = _last_beat(path)
    silent = _silence(path)
    if silent < DEAD:
        message = (
            "%s was last used by %s, %.0f s ago. Waiting up to %.0f s to see whether that "
            "run is dead."
        )
        logger.warning(message, path.parent, _named(holder), silent, DEAD - silent)
    while silent < DEAD:
        time.sleep(POLL)
        if _last_beat(path) != last_beat:
            raise _taken(path, holder)
        silent = _silence(path)
    message = "%s was used by %s, which is dead: it wrote nothing for %.0f s."
    logger.warning(message, path.parent, _named(holder), silent)


def _taken(path: Path, holder: dict[str, str]) -> AtroposTrainingError:
    what = f"`output_dir` is {str(path.parent)!r}, which another run is using: {_named(holder)}"
    fix = "Set `output_dir` to another folder, or end that run first."
    return AtroposTrainingError(what, fix=fix, code="output-dir-taken")


def _named(holder: dict[str, str]) -> str:
    if not holder:
        return "one that has just begun"
    return f"process {holder['process']} on {holder['host']}, since {holder['since']}"


def _boot() -> str:
    """The same for all processes of this machine, containers too, until it is started again."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _read(path: Path) -> dict[str, str]:
    """The last holder; empty if its run has ended, or is about to write its name."""
    with contextlib.suppress(ValueError):
        return json.loads(path.read_text(encoding="utf-8"))
    return {}


def _write(file: int, holder: dict[str, str]) -> None:
    text = json.dumps(holder).encode()
    os.pwrite(file, text, 0)
    os.ftruncate(file, len(text))


def _beat(file: int, ended: threading.Event) -> None:
    while not ended.wait(BEAT):
        # where a file server is away, others cannot see the time either
        with contextlib.suppress(OSError):
            os.utime(file)


def _last_beat(path: Path) -> int:
    with open(path, "rb") as file:  # opening makes a network file system ask its server
        return os.fstat(file.fileno()).st_mtime_ns


def _silence(path: Path) -> float:
    """Seconds since the last beat, by the clock of the file system, which machines share."""
    with tempfile.TemporaryFile(dir=path.parent) as now:
        now.write(b".")
        now.flush()
        os.fsync(now.fileno())
        return (os.fstat(now.fileno()).st_mtime_ns - _last_beat(path)) / 1e9
