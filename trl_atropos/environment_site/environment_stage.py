"""Notes how far an environment's process has come, for the guard of its service.

The variable `TRL_ATROPOS_STAGE` names a file of one word: `starting` from the first line on, and
`registered` once the environment has registered at the Atropos API, also in its later lives. A
process that ends before that has a mistake in its code, its settings or its data, which another
start would only repeat: `trl_atropos/services/guard.py` does not start it again.

`run.py` and `sitecustomize.py` call these functions. Standard library only.
"""

import contextlib
import os

PATH = os.environ.get("TRL_ATROPOS_STAGE")
STARTING = "starting"
REGISTERED = "registered"


def begin():
    """Notes that the process is starting, unless an earlier life has registered."""
    if PATH and not os.path.exists(PATH):
        _write(STARTING)


def note_registration():
    if PATH:
        _write(REGISTERED)


def _write(word):
    # Without the file, the guard goes by the clock alone.
    with contextlib.suppress(OSError), open(PATH, "w") as file:
        file.write(word)
