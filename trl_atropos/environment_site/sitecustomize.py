"""Adds to Atropos' log where an exception came from. The Python of every environment that a run
starts loads this file first: its folder is in the `PYTHONPATH`.

Of an exception in an environment's code, Atropos logs `str(error)` alone: of `KeyError("weight")`
that is `'weight'`. This adds the exception's kind and place to the line, and the traceback to the
first line of each place. `trl_atropos.services.environments` reads the lines. Standard library
only, and nothing newer than Python 3.10: the environment may have a Python of its own.
"""

import importlib.machinery
import importlib.util
import logging
import os
import sys
import sysconfig
import traceback

ATROPOS = os.path.join("atroposlib", "envs", "base.py")
SUCCESS = "handle_env: Collected"
ALWAYS_SHOWN = ("handle_env: No trajectories collected", "Initialized env with id")
LIBRARY_PATHS = {
    sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")
}
LIBRARIES = ("<frozen", *LIBRARY_PATHS)
LONGEST = 200  # characters of an exception's text

_make_record = logging.getLogRecordFactory()
_known_places = set()
_succeeded = False  # the environment has collected a group


def _make_explained_record(*args, **kwargs):
    """Returns the log record that Python makes, with the kind and place of the exception that is
    being handled."""
    global _succeeded
    record = _make_record(*args, **kwargs)
    if not record.pathname.endswith(ATROPOS):
        return record
    _answer_runs()
    text = str(record.msg)
    error = sys.exc_info()[1]
    if text.startswith(SUCCESS):
        _succeeded = True
    elif text.startswith(ALWAYS_SHOWN):  # Atropos logs them at levels that may be hidden
        record.levelno = logging.WARNING
        record.levelname = "WARNING"
    elif record.levelno >= logging.ERROR and error is not None:
        _explain(record, error)
    return record


def _answer_runs():
    """Makes this process tell where its code stands: it is an environment, and no tool that one
    has started."""
    import environment_stacks  # here, because every Python below an environment loads this file

    environment_stacks.install()


def _explain(record, error):
    """Appends to an error's line, for example, `[KeyError: 'weight', env.py:7 in score]`."""
    place = place_of(error)
    explanation = f"{describe(error)}, {place}"
    sees_successes = logging.getLogger("atroposlib.envs.base").isEnabledFor(logging.DEBUG)
    if sees_successes and not _succeeded:
        explanation += "; no group was collected before"
    message = " ".join(record.getMessage().split())
    record.msg = f"{message} [{explanation}]"
    record.args = ()
    if place not in _known_places:
        _known_places.add(place)
        record.exc_info = sys.exc_info()


def describe(error):
    """Returns kind and text of an exception. Of tenacity's `RetryError`, those of the last try."""
    attempt = getattr(error, "last_attempt", None)
    if attempt is not None:
        error = attempt.exception() or error
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:LONGEST]}"


def place_of(error):
    """Returns the innermost line of a traceback that is of no library, as `FILE:LINE in
    FUNCTION`."""
    frames = traceback.extract_tb(error.__traceback__)
    own_frames = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)]
    innermost = (own_frames or frames)[-1]
    return f"{innermost.filename}:{innermost.lineno} in {innermost.name}"


def _run_hidden_sitecustomize():
    """Runs the `sitecustomize` that the environment's Python would have run. Python loads only the
    first one in its path, which is this file."""
    here = os.path.dirname(os.path.abspath(__file__))
    other_folders = [path for path in sys.path if os.path.abspath(path) != here]
    hidden = importlib.machinery.PathFinder.find_spec("sitecustomize", other_folders)
    if hidden is not None:
        hidden.loader.exec_module(importlib.util.module_from_spec(hidden))


logging.setLogRecordFactory(_make_explained_record)
_run_hidden_sitecustomize()
