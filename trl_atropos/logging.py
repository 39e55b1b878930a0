"""How much the package says on stderr: verbosity with the names that transformers uses.

The environment variable `TRL_ATROPOS_VERBOSITY` (debug, info, warning, error or critical) sets it from the start. The
default is the root logger's level, which is warning where nobody changed it, and info in runs of `trl_atropos.train`.
Lines appear above progress bars. A program that has given Python's root logger a handler gets the records there
instead, until `disable_propagation()`.
"""

import logging
import os
import sys
from logging import CRITICAL, DEBUG, ERROR, INFO, WARNING

VARIABLE = "TRL_ATROPOS_VERBOSITY"
LEVELS = {"debug": DEBUG, "info": INFO, "warning": WARNING, "error": ERROR, "critical": CRITICAL}

_root = logging.getLogger("trl_atropos")


class _Console(logging.Handler):
    """Stderr, without tearing a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        if _root.propagate and logging.getLogger().handlers:
            return  # those show it
        from tqdm.auto import tqdm  # not before there is something to say

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


def set_verbosity_debug() -> None:
    set_verbosity(DEBUG)


def set_verbosity_info() -> None:
    set_verbosity(INFO)


def set_verbosity_warning() -> None:
    set_verbosity(WARNING)


def set_verbosity_error() -> None:
    set_verbosity(ERROR)


def disable_propagation() -> None:
    """The package writes to stderr itself, whatever handlers the root logger has."""
    _root.propagate = False


def enable_propagation() -> None:
    """The root logger's handlers, if it has any, get the records in place of stderr. The default."""
    _root.propagate = True


def verbosity_of_environment() -> int | None:
    """The level that `TRL_ATROPOS_VERBOSITY` names, if it names one."""
    return LEVELS.get(os.environ.get(VARIABLE, "").lower())


def _configure() -> None:
    console = _Console()
    console.setFormatter(logging.Formatter("[trl_atropos] %(message)s"))
    _root.addHandler(console)
    asked = verbosity_of_environment()
    if asked is not None:
        set_verbosity(asked)
    name = os.environ.get(VARIABLE)
    if name and name.lower() not in LEVELS:
        _root.warning("%s is %r, which is no level. Set it to one of: %s.", VARIABLE, name, ", ".join(LEVELS))


_configure()
