"""What the Python of an environment runs first: this folder is in the `PYTHONPATH` of environments
that a run starts.

Of an exception in an environment's code, Atropos logs `str(error)` alone: of `KeyError("weight")`
that is `'weight'`. This adds the exception's kind and place to the line, and the traceback to the
first line of each place. `trl_atropos.services.environments` reads the lines. It also shortens two
waits of Atropos' main loop. Standard library only, and nothing newer than Python 3.10: the
environment may have a Python of its own.
"""

import asyncio
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
LIBRARIES = (
    "<frozen",
    *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")},
)
LONGEST = 200  # characters of an exception's text
# seconds
FIRST = 1.5
LOOK_EVERY = 0.1
# seconds between the first looks after the last group was sent
SOON = 0.02
QUICK_LOOKS = 4

_make_record = logging.getLogRecordFactory()
_sleep = asyncio.sleep
_known_places = set()
_succeeded = False
_idle_looks = 0


def _explained(*args, **kwargs):
    """The log record that Python makes, with what it leaves out."""
    global _succeeded
    record = _make_record(*args, **kwargs)
    if not record.pathname.endswith(ATROPOS):
        return record
    text = str(record.msg)
    error = sys.exc_info()[1]
    if text.startswith(SUCCESS):
        _succeeded = True
    elif text.startswith(ALWAYS_SHOWN):  # Atropos logs them at levels that may be hidden
        record.levelno = logging.WARNING
        record.levelname = "WARNING"
    elif record.levelno >= logging.ERROR and error is not None:
        place = place_of(error)
        sees_successes = logging.getLogger("atroposlib.envs.base").isEnabledFor(logging.DEBUG)
        never = "; no group was collected before" if sees_successes and not _succeeded else ""
        record.msg = "{} [{}, {}{}]".format(
            " ".join(record.getMessage().split()), describe(error), place, never
        )
        record.args = ()
        if place not in _known_places:
            _known_places.add(place)
            record.exc_info = sys.exc_info()
    return record


def describe(error):
    """Kind and text. Of tenacity's `RetryError`, those of the last try."""
    attempt = getattr(error, "last_attempt", None)
    error = error if attempt is None else attempt.exception() or error
    return f"{type(error).__name__}: {' '.join(str(error).split())[:LONGEST]}"


def place_of(error):
    """The innermost line that is of no library."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = ([frame for frame in frames if not frame.filename.startswith(LIBRARIES)] or frames)[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}"


async def _sleep_less(delay, result=None):
    """As `asyncio.sleep`. Before its first look at the API, Atropos' main loop waits 5 seconds for
    other environments, which look every second whether the trainer is there. When it has sent the
    last group of a batch, the trainer takes the batch at once if it was waiting."""
    global _idle_looks
    caller = sys._getframe(1)  # what awaits this
    if caller.f_code.co_name == "env_manager" and caller.f_code.co_filename.endswith(ATROPOS):
        if delay > LOOK_EVERY:
            return await _sleep(min(delay, FIRST), result)
        _idle_looks = 0 if caller.f_locals["self"].workers else _idle_looks + 1
        delay = SOON if 0 < _idle_looks <= QUICK_LOOKS else delay
    return await _sleep(delay, result)


logging.setLogRecordFactory(_explained)
asyncio.sleep = _sleep_less
# Python loads only the first `sitecustomize`; the environment's Python may have one that this file
# hides.
_here = os.path.dirname(os.path.abspath(__file__))
_others = [path for path in sys.path if os.path.abspath(path) != _here]
_hidden = importlib.machinery.PathFinder.find_spec("sitecustomize", _others)
if _hidden is not None:
    _hidden.loader.exec_module(importlib.util.module_from_spec(_hidden))
