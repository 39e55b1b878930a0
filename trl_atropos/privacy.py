"""Closes this process to others of the same user: an agent that runs what a model wrote is one, if
its entry names no `user`.

The kernel then refuses them our variables, memory and open files (`/proc/PID/environ`, `mem`,
`maps`, `fd`), and debuggers. Only root still gets them. `docs/agents.md` says which processes close
themselves and when. A process that others open by these files or by `pidfd_getfd` must not: torch
opens GPU memory of another process so, if `expandable_segments` are on.
"""

import ctypes
import os

PR_SET_DUMPABLE = 4  # of Linux' prctl(2); a program is open again once it is executed
# In a run with agents it is set for the services: a process with it closes itself as soon as it
# imports this package, or loads `environment_site/sitecustomize.py`.
CLOSED_VARIABLE = "TRL_ATROPOS_CLOSED"


def close_if_asked() -> None:
    """Closes this process if `CLOSED_VARIABLE` is set."""
    if os.environ.get(CLOSED_VARIABLE):
        close_to_others()


def close_to_others() -> None:
    """Closes this process to all but root, and processes that it forks from now on. The second call
    does nothing."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_DUMPABLE, 0): {os.strerror(number)}")
