"""What an environment's log says: the only place that knows the lines which Atropos 0.4 writes.

`EnvironmentLog` follows the log of an environment that the run started. Its lines have more to them than Atropos
writes, see `environment_site/sitecustomize.py`; without, as in a container with a Python that does not heed
`PYTHONPATH`, the same is told with less detail.
"""

import re
import threading
from collections import Counter
from pathlib import Path

SITE = str(Path(__file__).resolve().parent / "environment_site")
"""Folder that comes first in the `PYTHONPATH` of environments."""

CONSTANT_SCORES = "Scores are the same in a group, skipping"
TOO_LONG = "Token length is too long in a group, skipping"
WRONG_SIZE = "Group structure invalid, or token count mismatch"
SEND_FAILED = "Failed to send"
COLLECT_FAILED = "Error in collect_trajectories"
POSTPROCESS_FAILED = "Scoring exception"
DELIVERY_FAILED = "Error in handle_send_to_api"
NOTHING = "handle_env: No trajectories collected"  # after each exception, too
FAILURES = (COLLECT_FAILED, POSTPROCESS_FAILED, DELIVERY_FAILED)
MEANINGS = {
    COLLECT_FAILED: "failed to collect a group",
    POSTPROCESS_FAILED: "failed in `postprocess_histories`",
    DELIVERY_FAILED: "failed to deliver a group that it had collected, because something in it is missing or wrong",
    NOTHING: "sampled a group and returned none: most environments do where all scores of a group are alike. Give the "
    "model easier or harder prompts or a finer reward, or let its code return such groups, too, which the trainer "
    "counts",
    CONSTANT_SCORES: "dropped a group because its scores are all equal: set `--env.ensure_scores_are_not_same false`, "
    "or give the model easier or harder prompts",
    TOO_LONG: "dropped a group that has a sequence over the length limit: let it sample fewer tokens, or raise "
    "`max_sequence_length`",
    WRONG_SIZE: "dropped a group that is not of its `group_size`: correct what it collects",
    SEND_FAILED: "could not deliver a group: the API refused it or did not answer",
}
SIGN = re.compile("|".join(map(re.escape, MEANINGS)))
EXPLAINED = re.compile(r"\[(\w+: .*), ([^,]+:\d+ in [^;\]]+)(; no group was collected before)?\]$")
REGISTERED = re.compile(r"Initialized env with id (\d+)")
BEGINS_A_LIFE = re.compile(r"(--- \d{4}-|guard: .* starting it again in )")
LONGEST = 300  # characters of an exception that are quoted


class EnvironmentLog:
    """
    Args:
        path (`str`): Of the log.
        start (`int`): Where in it the run's own part begins, in bytes.

    Attributes:
        counts (`Counter`): How often each of `MEANINGS` has happened since the environment was last started.
        failures (`int`): How often an exception of its own was among them.
        error (`str`): The last exception: kind, text and place, as far as they are known.
        place (`str`): File, line and function of it; empty if not known.
        never_succeeded (`bool`): No group had been collected before the last exception, for certain.
        number (`int`, *optional*): Under which the API knows the environment that runs now.
        former_number (`int`, *optional*): Under which it knew the one before, if that was started again.
    """

    def __init__(self, path: str, start: int = 0):
        self._path, self._read_to = path, start
        self._reading = threading.Lock()
        self.number: int | None = None
        self._begin()

    def _begin(self) -> None:
        self.counts: Counter[str] = Counter()
        self.failures, self.error, self.place, self.never_succeeded = 0, "", "", False
        self.former_number, self.number = self.number, None

    def read(self) -> "EnvironmentLog":
        """Takes in what was written since the last call."""
        with self._reading, open(self._path, "rb") as log:
            log.seek(self._read_to)
            for line in log:
                if not line.endswith(b"\n"):
                    break
                self._read_to += len(line)
                self._take(line.decode(errors="replace").rstrip())
        return self

    def _take(self, line: str) -> None:
        if BEGINS_A_LIFE.match(line):
            self._begin()
        elif found := REGISTERED.search(line):
            self.number = int(found[1])
        elif found := SIGN.search(line):
            self.counts[found[0]] += 1
            if found[0] in FAILURES:
                self.failures += 1
                self._take_failure(line[found.end() :].strip(": "))

    def _take_failure(self, text: str) -> None:
        explained = EXPLAINED.search(text)
        self.place = explained[2] if explained else ""
        self.error = f"{explained[1][:LONGEST].rstrip(': ')} ({self.place})" if explained else text[:LONGEST]
        self.never_succeeded = bool(explained and explained[3])

    def told(self) -> list[str]:
        """What it says of groups that were never delivered: first of exceptions, then what happened most."""
        counts = self.counts.copy()
        counts[NOTHING] -= counts[COLLECT_FAILED] + counts[POSTPROCESS_FAILED]
        found = sorted((sign for sign in MEANINGS if counts[sign] > 0), key=lambda s: (s not in FAILURES, -counts[s]))
        told = [f"{counts[sign]} times it {MEANINGS[sign]}" for sign in found]
        if self.failures:
            told[0] += f"; the last error was {self.error}" if self.error else ""
        return told
