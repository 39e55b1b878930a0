"""Says in the last line of an environment's log why its process ends, and where.

    environment: KeyError: 'weight' (/home/me/environment.py:31 in setup)

A traceback ends with the line of a library as often as not, and what follows it may be anything.
`trl_atropos.services.service_log` reads the line. `sitecustomize.py` calls `explain_end` after an
exception, `run.py` calls `explain_exit`. Standard library only, and nothing newer than Python 3.10.
"""

import os
import sys
import sysconfig
import traceback

PREFIX = "environment: "
HERE = os.path.dirname(os.path.abspath(__file__))
LIBRARY_PATHS = {
    sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")
}
LIBRARIES = ("<frozen", f"{HERE}{os.sep}", *LIBRARY_PATHS)
# A virtual environment may take packages from the folder of another one.
PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
LONGEST = 200  # characters of an exception's text
NORMAL_END = "pydantic_cli"  # the package whose `sys.exit` ends every `.cli()`


def describe(error):
    """Returns kind and text of an exception. Of tenacity's `RetryError`, those of the last try."""
    attempt = getattr(error, "last_attempt", None)
    if attempt is not None:
        error = attempt.exception() or error
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:LONGEST]}"


def place_of(error):
    """Returns the innermost line of a traceback that is of no library, as `FILE:LINE in FUNCTION`.
    If the error knows a better place (`environment_contract.py`, a syntax error), returns that."""
    place = getattr(error, "environment_place", None)
    if place is not None:
        return place
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno} in <module>"
    frames = traceback.extract_tb(error.__traceback__)
    own_frames = [frame for frame in frames if not _is_library(frame.filename)]
    innermost = (own_frames or frames)[-1]
    return f"{innermost.filename}:{innermost.lineno} in {innermost.name}"


def explain_end(error):
    """Says which exception ends the process."""
    say(f"{describe(error)} ({place_of(error)})")


def explain_exit(end):
    """Says where `sys.exit` was called, unless Atropos called it after an error that is said
    already."""
    innermost = traceback.extract_tb(end.__traceback__)[-1].filename
    if NORMAL_END not in innermost:
        text = " ".join(str(end.code).split())
        say(f"its code called sys.exit({text[:LONGEST]}) ({place_of(end)})")
    elif not end.code:
        say("Atropos ended it after its last step (`total_steps`)")


def say(text):
    """Writes a last line."""
    try:
        # It must not follow a progress bar in its line.
        sys.stdout.flush()
        sys.stderr.write(f"\n{PREFIX}{text}\n")
        sys.stderr.flush()
    except (OSError, ValueError):  # the disk is full, or the stream closed
        pass


def _is_library(filename):
    return filename.startswith(LIBRARIES) or any(part in filename for part in PACKAGES)
