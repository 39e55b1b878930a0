"""How much the package says on stderr: verbosity with the names that transformers uses.

`TRL_ATROPOS_VERBOSITY` (debug, info, warning, error or critical) sets it from the start. The
default is the root logger's level, and info in runs of `trl_atropos.train`. A program that has
given Python's root logger a handler gets the records there instead, until `disable_propagation()`.
"""

import logging
import os
import shutil
import sys
from functools import partial
from logging import CRITICAL, DEBUG, ERROR, INFO, WARNING

VARIABLE = "TRL_ATROPOS_VERBOSITY"
LEVELS = {"debug": DEBUG, "info": INFO, "warning": WARNING, "error": ERROR, "critical": CRITICAL}

_root = logging.getLogger("trl_atropos")


class _Console(logging.Handler):
    """Writes to stderr, above progress bars."""

    def emit(self, record: logging.LogRecord) -> None:
        if _root.propagate and logging.getLogger().handlers:
            return  # those show it
        from tqdm.auto import tqdm  # slow to import

        try:
            tqdm.write(self.format(record), file=sys.stderr)
        except Exception:  # noqa: BLE001 - as Python's own handlers: a full disk under stderr ends no training
            self.handleError(record)


def get_verbosity() -> int:
    """The level of the package's logger."""
    return _root.getEffectiveLevel()


def set_verbosity(level: int) -> None:
    """Records below `level`, one of Python's levels such as `logging.INFO`, are not shown."""
    _root.setLevel(level)


set_verbosity_debug = partial(set_verbosity, DEBUG)
set_verbosity_info = partial(set_verbosity, INFO)
set_verbosity_warning = partial(set_verbosity, WARNING)
set_verbosity_error = partial(set_verbosity, ERROR)


def disable_propagation() -> None:
    """The package writes to stderr itself, whether or not the root logger has handlers."""
    _root.propagate = False


def enable_propagation() -> None:
    """The root logger's handlers, if it has any, get the records instead of stderr. The default."""
    _root.propagate = True


def verbosity_of_environment() -> int | None:
    """The level that `TRL_ATROPOS_VERBOSITY` names, if it names one."""
    return LEVELS.get(os.environ.get(VARIABLE, "").lower())


def columns() -> int | None:
    """Width of the terminal that stdout is, or what `COLUMNS` says. `None` for a file, where lines
    may be long."""
    known = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return shutil.get_terminal_size().columns if known else None


def cut(text: str, room: int) -> str:
    """The text, without its middle if it is longer than `room` characters."""
    kept = max(2, room) - 1
    return (
        text if len(text) <= room else f"{text[: kept - kept // 2]}…{text[len(text) - kept // 2 :]}"
    )


_console = _Console()
_console.setFormatter(logging.Formatter("[trl_atropos] %(message)s"))
_root.addHandler(_console)
if verbosity_of_environment() is not None:
    _root.setLevel(verbosity_of_environment())
elif os.environ.get(VARIABLE):
    _wrong = "%s is %r, which is no level. Set it to one of: %s."
    _root.warning(_wrong, VARIABLE, os.environ[VARIABLE], ", ".join(LEVELS))
