"""Verbosity of the package on stderr, with the names that transformers uses.

`TRL_ATROPOS_VERBOSITY` (debug, info, warning, error or critical) sets it from the start. The
default is the root logger's level, and info in runs of `trl_atropos.train`. If your program has
given Python's root logger a handler, that gets the records instead, until `disable_propagation()`.
"""

import logging
import os
import sys
from functools import partial
from logging import CRITICAL, DEBUG, ERROR, INFO, WARNING

from trl_atropos.terminal import fitted

VARIABLE = "TRL_ATROPOS_VERBOSITY"
LEVELS = {"debug": DEBUG, "info": INFO, "warning": WARNING, "error": ERROR, "critical": CRITICAL}

ACTIVITY = "trl_atropos.activity"  # name of the logger of what takes long

_root = logging.getLogger("trl_atropos")


def _says_something(record: logging.LogRecord) -> bool:
    """Hides a warning with which DeepSpeed would open every command on a machine without a GPU,
    whether or not DeepSpeed is used."""
    return not record.getMessage().startswith("Setting accelerator to CPU.")


logging.getLogger("DeepSpeed").addFilter(_says_something)


class _Console(logging.Handler):
    """Writes to stderr, above progress bars."""

    def emit(self, record: logging.LogRecord) -> None:
        if _root.propagate and logging.getLogger().handlers:
            return  # the root logger's handlers show it
        from tqdm.auto import tqdm  # slow to import

        try:
            tqdm.write(fitted(self.format(record)), file=sys.stderr)
        except Exception:  # noqa: BLE001 - as Python's own handlers: a full disk under stderr ends no training
            self.handleError(record)


def get_verbosity() -> int:
    """Returns the level of the package's logger."""
    return _root.getEffectiveLevel()


def set_verbosity(level: int) -> None:
    """Hides records below `level`, one of Python's levels such as `logging.INFO`."""
    _root.setLevel(level)
    logging.getLogger(ACTIVITY).setLevel(logging.NOTSET)


set_verbosity_debug = partial(set_verbosity, DEBUG)
set_verbosity_info = partial(set_verbosity, INFO)
set_verbosity_warning = partial(set_verbosity, WARNING)
set_verbosity_error = partial(set_verbosity, ERROR)


def speak() -> None:
    """Has a command say what takes long (`activity.py`), unless `TRL_ATROPOS_VERBOSITY` hides it.
    Holds until `set_verbosity` is called."""
    logging.getLogger(ACTIVITY).setLevel(verbosity_of_environment() or INFO)


def disable_propagation() -> None:
    """Lets the package write to stderr itself, whether or not the root logger has handlers."""
    _root.propagate = False


def enable_propagation() -> None:
    """Gives the records to the root logger's handlers, if it has any, and else to stderr. This is
    the default."""
    _root.propagate = True


def verbosity_of_environment() -> int | None:
    """Returns the level that `TRL_ATROPOS_VERBOSITY` names, or `None`."""
    name = os.environ.get(VARIABLE, "")
    return LEVELS.get(name.lower())


_console = _Console()
_console.setFormatter(logging.Formatter("[trl_atropos] %(message)s"))
_root.addHandler(_console)
_level = verbosity_of_environment()
if _level is not None:
    set_verbosity(_level)
elif os.environ.get(VARIABLE):
    _message = "%s is %r, which is no level. Set it to one of: %s."
    _root.warning(_message, VARIABLE, os.environ[VARIABLE], ", ".join(LEVELS))
