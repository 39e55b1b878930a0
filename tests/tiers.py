"""Which tests run, and in what order.

Continuous integration has 40 minutes, and cores of a shared machine may be three times slower on
one day than on another. So `TRL_ATROPOS_SLOW_UNTIL` says when the last slow tests begin, in seconds
since the epoch. Those that are left out differ from commit to commit, and are named at the end.
"""

import hashlib
import math
import os
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT

# Seconds of the files that take longest, as `make test-all PYTEST_ARGS=--durations=0` adds up. Of
# others, the marks of their tests say how long they take, up to `UNMEASURED` a file.
LONGEST = {
    "tests/weights/test_modes.py": 260,
    "tests/end_to_end/test_as_users.py": 140,
    "tests/check/test_memory.py": 130,
    "tests/end_to_end/test_quickstart.py": 130,
    "tests/house/test_wheel.py": 115,
    "tests/front/test_serve.py": 85,
    "tests/weights/test_several_servers.py": 110,
    "tests/weights/test_versions.py": 70,
    "tests/weights/test_faults.py": 83,
    "tests/trainer/test_equal_to_trl.py": 80,
    "tests/end_to_end/test_bench.py": 73,
    "tests/end_to_end/test_embedded.py": 70,
    "tests/batches/test_packing.py": 65,
    "tests/end_to_end/test_recipes.py": 60,
    "tests/recipe/test_wrong_inputs.py": 55,
    "tests/recipe/test_mistakes.py": 55,
    "tests/end_to_end/test_agents.py": 50,
    "tests/weights/test_fingerprints.py": 50,
    "tests/trainer/test_equal_processes.py": 45,
    "tests/weights/test_gather.py": 45,
    "tests/services/test_restarts.py": 42,
    "tests/trainer/test_trees.py": 41,
    "tests/weights/test_sharded_publish.py": 40,
    "tests/commands/test_mistakes.py": 36,
    "tests/check/test_check.py": 35,
}
UNMEASURED = 34
FULL = os.environ.get("TRL_ATROPOS_FULL") == "1"
SLOW_UNTIL = float(os.environ.get("TRL_ATROPOS_SLOW_UNTIL", "inf"))
TIME_ENDS = math.isfinite(SLOW_UNTIL)
GRACE = 150.0  # seconds that a file which has begun may go on, because its servers run
NO_TIME = "no time was left, `make test-slow` runs it"
# What users do, and what nothing else would tell: weights and log-probabilities that are equal bit
# for bit.
FIRST = [
    "tests/weights/test_modes.py",
    "tests/end_to_end/test_as_users.py",
    "tests/server/test_sampled_logprobs.py",
]
_begun: set[Path] = set()  # files of which a slow test has run in this process


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if not item.get_closest_marker("slow"):
        return
    ends = SLOW_UNTIL + GRACE if item.path in _begun else SLOW_UNTIL
    if time.time() > ends:
        pytest.skip(NO_TIME)
    _begun.add(item.path)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Names the files of which a test was left out for want of time."""
    skipped = terminalreporter.stats.get("skipped", [])
    left_out = [report.nodeid for report in skipped if NO_TIME in str(report.longrepr)]
    if left_out:
        terminalreporter.section(f"{len(left_out)} slow tests were left out: {NO_TIME}")
        for name, number in Counter(map(file_of, left_out)).items():
            terminalreporter.write_line(f"{number:4} of {name}")


def order(items: list[pytest.Item]) -> None:
    """
    The files that take longest come first: a worker that begins with one at the end would leave
    the others idle.

    If time ends, there is another order for each commit, so that every file has its turn. Those of
    `FIRST` always come first.
    """
    if TIME_ENDS:
        commit = commit_of_checkout()
        items.sort(key=lambda item: place_in_draw(file_of(item.nodeid), commit))
        return
    seconds: Counter[str] = Counter()
    for item in items:
        marks = {mark.name: mark for mark in item.iter_markers()}
        if "slow" in marks:
            takes = (marks["slow"].args or (30,))[0]
        elif "seconds" in marks:
            takes = marks["seconds"].args[0]
        else:
            takes = 5 if "server" in marks else 1
        seconds[file_of(item.nodeid)] += 0 if "skip" in marks else takes
    for file in seconds:
        seconds[file] = LONGEST.get(file, min(seconds[file], UNMEASURED))
    items.sort(key=lambda item: (-seconds[file_of(item.nodeid)], item.path))


def file_of(nodeid: str) -> str:
    """`tests/house/test_tiers.py` of `tests/house/test_tiers.py::test_every_file_has_its_turn`."""
    return nodeid.partition("::")[0]


def place_in_draw(file: str, commit: str) -> tuple[int, str]:
    if file in FIRST:
        return FIRST.index(file), ""
    return len(FIRST), hashlib.sha256(f"{commit} {file}".encode()).hexdigest()


def commit_of_checkout() -> str:
    """An empty string if this is no checkout of git."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return found.stdout.strip()
