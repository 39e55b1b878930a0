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

from environment_words import describe, explain_end, place_of

ATROPOS = os.path.join("atroposlib", "envs", "base.py")
SUCCESS = "handle_env: Collected"
REGISTERED = "Initialized env with id"
ALWAYS_SHOWN = ("handle_env: No trajectories collected", REGISTERED)
LOST_TASK = "A task failed that nobody awaits"

_make_record = logging.getLogRecordFactory()
_show_exception = sys.excepthook
_known_places = set()
_succeeded = False  # the environment has collected a group


def _make_explained_record(*args, **kwargs):
    """Returns the log record that Python makes, with the kind and place of the exception that is
    being handled."""
    global _succeeded
    record = _make_record(*args, **kwargs)
    if record.name == "asyncio" and record.exc_info and record.exc_info[1] is not None:
        _explain_lost_task(record, record.exc_info[1])
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
        if text.startswith(REGISTERED):
            _note_registration()
    elif record.levelno >= logging.ERROR and error is not None:
        _explain(record, error)
    return record


def _close_to_others():
    """Closes this process to others of the same user: agents run beside it, and its variables have
    a token that opens sessions. As `trl_atropos/privacy.py`."""
    import ctypes  # takes a while, and most runs have no agents

    pr_set_dumpable = 4
    ctypes.CDLL(None).prctl(pr_set_dumpable, 0, 0, 0, 0)


def _answer_runs():
    """Makes this process tell where its code stands: it is an environment, and no tool that one
    has started."""
    # here, because every Python below an environment loads this file
    import environment_stacks
    import environment_stage

    environment_stacks.install()
    environment_stage.begin()


def _note_registration():
    import environment_stage

    environment_stage.note_registration()


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


def _explain_lost_task(record, error):
    """Makes one line of asyncio's report on an exception that nobody will ever see."""
    record.msg = f"{LOST_TASK} [{describe(error)}, {place_of(error)}]"
    record.args = ()


def _show_exception_and_place(kind, error, trace):
    """Takes the place of `sys.excepthook`. Only an environment's process has imported Atropos."""
    _show_exception(kind, error, trace)
    if "atroposlib" in sys.modules:
        explain_end(error)


def _run_hidden_sitecustomize():
    """Runs the `sitecustomize` that the environment's Python would have run. Python loads only the
    first one in its path, which is this file."""
    here = os.path.dirname(os.path.abspath(__file__))
    other_folders = [path for path in sys.path if os.path.abspath(path) != here]
    hidden = importlib.machinery.PathFinder.find_spec("sitecustomize", other_folders)
    if hidden is not None:
        hidden.loader.exec_module(importlib.util.module_from_spec(hidden))


if os.environ.get("TRL_ATROPOS_CLOSED"):
    _close_to_others()
logging.setLogRecordFactory(_make_explained_record)
sys.excepthook = _show_exception_and_place
_run_hidden_sitecustomize()
