"""What the Python of an environment does first: a run that starts environments has this folder in their `PYTHONPATH`.

Of an exception in an environment's code, Atropos logs `str(error)` alone: of `KeyError("weight")` that is `'weight'`.
Here its log lines get the kind of the exception and its place in the environment's code, and the first one of each
place the traceback. `trl_atropos.services.environments` reads them.

The environment may have a Python of its own: standard library only, and nothing newer than Python 3.10.
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
NOTHING = "handle_env: No trajectories collected"
REGISTERED = "Initialized env with id"
LIBRARIES = ("<frozen", *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
LONGEST = 200  # characters of an exception's text

_make_record = logging.getLogRecordFactory()
_known_places = set()
_succeeded = False


def _explained(*args, **kwargs):
    """The log record that Python makes, with what it leaves out."""
    global _succeeded
    record = _make_record(*args, **kwargs)
    if not record.pathname.endswith(ATROPOS):
        return record
    text, error = str(record.msg), sys.exc_info()[1]
    if text.startswith(SUCCESS):
        _succeeded = True
    elif text.startswith((NOTHING, REGISTERED)):  # at levels that logs show or not, as it happens
        record.levelno, record.levelname = logging.WARNING, "WARNING"
    elif record.levelno >= logging.ERROR and error is not None:
        place = _place(error)
        never = "; no group was collected before" if not _succeeded and _sees_successes() else ""
        record.msg = "{} [{}, {}{}]".format(" ".join(record.getMessage().split()), _describe(error), place, never)
        record.args = ()
        if place not in _known_places:
            _known_places.add(place)
            record.exc_info = sys.exc_info()
    return record


def _sees_successes():
    return logging.getLogger("atroposlib.envs.base").isEnabledFor(logging.DEBUG)


def _describe(error):
    """Kind and text. Of tenacity's `RetryError`, those of the last try."""
    attempt = getattr(error, "last_attempt", None)
    error = error if attempt is None else attempt.exception() or error
    return f"{type(error).__name__}: {' '.join(str(error).split())[:LONGEST]}"


def _place(error):
    """Where it happened: the innermost line that is of no library."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)]
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}"


def _load_the_one_that_this_hides():
    """Python loads only the first `sitecustomize`, and the environment's Python may have one."""
    here = os.path.dirname(os.path.abspath(__file__))
    others = [path for path in sys.path if os.path.abspath(path) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


logging.setLogRecordFactory(_explained)
_load_the_one_that_this_hides()
