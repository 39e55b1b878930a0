"""Says what takes long: a line after ten seconds, then ever fewer, and one at the end.

    with activity("Loading the model Qwen/Qwen3-8B"):
        ...

prints nothing if that takes less than ten seconds, and otherwise

    [trl_atropos] Loading the model Qwen/Qwen3-8B: 10 s
    [trl_atropos] Loading the model Qwen/Qwen3-8B: 20 s
    [trl_atropos] Loading the model Qwen/Qwen3-8B took 34 s

If the number of parts is known, `advance` counts them. On a terminal they are a bar then, and
elsewhere they stand in the lines. Rank 0 alone speaks. The lines are records of the package's
logger, which writes them above progress bars (`logging.py`). Loops that poll for something ask a
`Pacer` when to speak instead.
"""

import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_atropos.terminal import columns, cut

if TYPE_CHECKING:
    from tqdm import tqdm

logger = logging.getLogger(__name__)

FIRST_MESSAGE = 10.0  # seconds after which something is long
LONGEST_PAUSE = 300.0  # seconds between two messages
IN_MINUTES = 120.0  # seconds from which on a time is given in minutes
JOIN_TIMEOUT = 1.0  # seconds; a terminal may be stopped while a line is written
LINE_IN_FILE = 500  # characters
PREFIX = "[trl_atropos] "

# Those that are going on, the outermost first. The innermost speaks.
_going_on: "list[Activity]" = []


class Pacer:
    """Decides when the next message about something long is due: after 10 s, 20, 40 and so on, at
    last every 5 minutes."""

    def __init__(self) -> None:
        self.next = FIRST_MESSAGE

    def is_due(self, seconds: float) -> bool:
        """Returns whether to speak of something that has gone on for so many seconds."""
        if seconds < self.next:
            return False
        self.next = seconds + min(seconds, LONGEST_PAUSE)
        return True


class Activity(AbstractContextManager):
    """
    Something that may take long. `activity` makes one that has begun when its block does.

    Args:
        doing: what it is, such as "Loading the model Qwen/Qwen3-8B".
        total: number of its parts, if that is known.
        detail: returns what is known of it now, such as "3.2 GB written". It is called in another
            thread.
    """

    def __init__(
        self, doing: str, total: int | None = None, detail: Callable[[], str] | None = None
    ) -> None:
        self.doing = doing
        self.total = total
        self.done = 0
        self._detail = detail
        self._bar: tqdm | None = None
        self._has_spoken = False
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.restart()

    def __enter__(self) -> "Activity":
        self.begin()
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        self.end(failed=kind is not None)

    def begin(self) -> None:
        self.done = 0
        self._has_spoken = False
        self._ended.clear()
        self.restart()
        if os.environ.get("RANK", "0") != "0" or not logger.isEnabledFor(logging.INFO):
            return
        _going_on.append(self)
        self._thread = threading.Thread(target=self._watch, name="activity", daemon=True)
        self._thread.start()

    def end(self, failed: bool = False) -> None:
        """Says how long it took, if it has been mentioned and has not `failed`. May be called
        twice."""
        if self._thread is None:
            return
        _going_on.remove(self)
        thread = self._thread
        self._thread = None
        self._ended.set()
        thread.join(JOIN_TIMEOUT)
        if self._bar is not None:
            self._bar.close()
        if self._has_spoken and not failed:
            self._log(self.last_words(time.monotonic() - self.began))

    def advance(self, parts: int = 1) -> None:
        """Counts parts that are done."""
        self.done += parts
        bar = self._bar
        if bar is not None:
            bar.update(self.done - bar.n)

    def restart(self) -> None:
        """Measures from now on."""
        self.began = time.monotonic()
        self.pacer = Pacer()

    def words(self, seconds: float) -> str:
        """Returns the message after so many seconds; an empty one if there is nothing to say."""
        facts = []
        if self.total is not None:
            facts.append(f"{self.done:,} of {self.total:,}")
        if self._detail is not None:
            facts.append(self._detail())
        facts.append(duration(seconds))
        return shortened(self.doing, f": {', '.join(facts)}")

    def last_words(self, seconds: float) -> str:
        """Returns the message at the end; an empty one for none."""
        return shortened(self.doing, f" took {duration(seconds)}")

    def _watch(self) -> None:
        pause = FIRST_MESSAGE
        while not self._ended.wait(pause):
            seconds = time.monotonic() - self.began
            pacer = self.pacer
            if pacer.is_due(seconds) and _going_on[-1:] == [self]:
                self._speak(seconds)
            pause = max(0.0, pacer.next - (time.monotonic() - self.began))

    def _speak(self, seconds: float) -> None:
        if self._bar is None:
            self._bar = bar_of(self.doing, self.total, seconds)
        if self._bar is not None:
            self.advance(0)
            self._has_spoken = True
            return
        words = self.words(seconds)
        if words:
            self._log(words)
            self._has_spoken = True

    def _log(self, words: str) -> None:
        if words:
            logger.info("%s", words)


def activity(
    doing: str, total: int | None = None, detail: Callable[[], str] | None = None
) -> Activity:
    """Returns a context that says what its block does if it takes long, see `Activity`."""
    return Activity(doing, total, detail)


@contextmanager
def importing(what: str) -> Iterator[None]:
    """Says what its block imports if that takes long. Python looks for no garbage meanwhile:
    imports leave little, and a seventh of their time would go into it."""
    collects = gc.isenabled()
    gc.disable()
    try:
        with activity(f"Importing {what}"):
            yield
    finally:
        if collects:
            gc.enable()


def bar_of(doing: str, total: int | None, seconds: float) -> "tqdm | None":
    """Returns a bar for something of `total` parts that began so many seconds ago. Returns `None`
    if the total is not known, or if there is no terminal."""
    if total is None or not sys.stderr.isatty():
        return None
    from tqdm.auto import tqdm  # slow to import

    bar = tqdm(total=total, desc=doing, leave=False, dynamic_ncols=True, file=sys.stderr)
    bar.start_t -= seconds
    return bar


def duration(seconds: float) -> str:
    """Returns a time in words: "34 s", "12 min"."""
    if seconds < IN_MINUTES:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min"


def shortened(doing: str, facts: str) -> str:
    """Returns both texts in one line of the terminal, the first one without its middle if it is too
    long: paths are."""
    room = (columns() or LINE_IN_FILE) - len(PREFIX) - len(facts)
    return cut(doing, room) + facts


def written(folder: str | Path) -> str:
    """Returns how much is in a folder, such as "3.2 GB written"."""
    num_bytes = 0
    for path, _folders, files in os.walk(folder):
        for file in files:
            try:
                num_bytes += os.stat(os.path.join(path, file)).st_size
            except OSError:  # it was a draft, and has another name now
                continue
    return f"{num_bytes / 1e9:.1f} GB written"
