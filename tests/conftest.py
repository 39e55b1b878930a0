"""The tiny model that every test of the trainer uses, an environment off the network, and which
file comes first."""

import gc
import hashlib
import math
import os
import subprocess
import time

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.pop("TRL_ATROPOS_TOKEN", None)  # a user has not set one where a run starts its servers
os.environ.pop("TRL_ATROPOS_VERBOSITY", None)
# pytest-xdist sets it for its workers. A shell does not hand it on, and what commands print into a
# file is not broken into lines.
os.environ.pop("COLUMNS", None)

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from trl_atropos import protocol

gc.disable()  # a fifth of what the imports of all tests take; until the tests are collected
BEGAN = pytest.StashKey[float]()
BEGUN: set[Path] = set()  # files of which a slow test has run in this process
TESTS = Path(__file__).parent
# Seconds of the files that take longest, as `make test-all PYTEST_ARGS=--durations=0` adds up. Of
# others, the marks of their tests say how long they take, up to `UNMEASURED` a file.
LONGEST = {
    "weights/test_modes.py": 260,
    "end_to_end/test_as_users.py": 140,
    "check/test_memory.py": 130,
    "end_to_end/test_quickstart.py": 130,
    "house/test_wheel.py": 115,
    "front/test_serve.py": 85,
    "weights/test_several_servers.py": 110,
    "weights/test_versions.py": 70,
    "weights/test_faults.py": 83,
    "trainer/test_equal_to_trl.py": 80,
    "end_to_end/test_bench.py": 73,
    "end_to_end/test_embedded.py": 70,
    "batches/test_packing.py": 65,
    "end_to_end/test_recipes.py": 60,
    "recipe/test_wrong_inputs.py": 55,
    "recipe/test_mistakes.py": 55,
    "end_to_end/test_agents.py": 50,
    "weights/test_fingerprints.py": 50,
    "trainer/test_equal_processes.py": 45,
    "weights/test_gather.py": 45,
    "services/test_restarts.py": 42,
    "trainer/test_trees.py": 41,
    "weights/test_sharded_publish.py": 40,
    "commands/test_mistakes.py": 36,
    "check/test_check.py": 35,
}
UNMEASURED = 34
FULL = os.environ.get("TRL_ATROPOS_FULL") == "1"
# Seconds since the epoch, after which no file begins with slow tests. Continuous integration ends in
# time with it on a machine that is too slow for all.
SLOW_UNTIL = float(os.environ.get("TRL_ATROPOS_SLOW_UNTIL", "inf"))
GRACE = 150.0  # seconds that a file which has begun may go on, because its servers run
TIME_ENDS = math.isfinite(SLOW_UNTIL)
NO_TIME = "no time was left, `make test-slow` runs it"
# What users do, and what nothing else would tell: weights and log-probabilities that are equal bit
# for bit.
FIRST = [
    "tests/weights/test_modes.py",
    "tests/end_to_end/test_as_users.py",
    "tests/server/test_sampled_logprobs.py",
]


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[BEGAN] = time.monotonic()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Notes how long a whole tier took, or all of them in one go, for `make house`. What is frozen
    would not be taken apart, and some libraries complain of that."""
    gc.unfreeze()
    config = session.config
    tier = config.option.markexpr or ("matrix" if FULL else "all")
    is_part = config.option.keyword or TIME_ENDS
    chosen = is_part or config.args_source is pytest.Config.ArgsSource.ARGS
    if not chosen and not hasattr(config, "workerinput"):
        config.cache.set(f"seconds/{tier}", time.monotonic() - config.stash[BEGAN])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not FULL:
        for item in items:
            if item.get_closest_marker("full"):
                item.add_marker(pytest.mark.skip(reason="needs TRL_ATROPOS_FULL=1"))
    order(items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Every `train()` collects garbage, which would look through all of torch again and again."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if not item.get_closest_marker("slow"):
        return
    ends = SLOW_UNTIL + GRACE if item.path in BEGUN else SLOW_UNTIL
    if time.time() > ends:
        pytest.skip(NO_TIME)
    BEGUN.add(item.path)


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
    seconds: Counter[Path] = Counter()
    for item in items:
        marks = {mark.name: mark for mark in item.iter_markers()}
        if "slow" in marks:
            takes = (marks["slow"].args or (30,))[0]
        elif "seconds" in marks:
            takes = marks["seconds"].args[0]
        else:
            takes = 5 if "server" in marks else 1
        seconds[item.path] += 0 if "skip" in marks else takes
    for path in seconds:
        name = path.relative_to(TESTS).as_posix()
        is_measured = name in LONGEST
        seconds[path] = LONGEST[name] if is_measured else min(seconds[path], UNMEASURED)
    items.sort(key=lambda item: (-seconds[item.path], item.path))


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def place_in_draw(file: str, commit: str) -> tuple[int, str]:
    if file in FIRST:
        return FIRST.index(file), ""
    return len(FIRST), hashlib.sha256(f"{commit} {file}".encode()).hexdigest()


def commit_of_checkout() -> str:
    """An empty string if this is no checkout of git."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return found.stdout.strip()


@pytest.fixture(autouse=True)
def no_kept_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in this process keeps its control token, which no other test may find."""
    monkeypatch.setattr(protocol, "_kept_token", "")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a byte-level Qwen3 with random weights."""
    from tests.rollout_factory import make_tiny_model
    from trl_atropos import trainer  # noqa: F401 - everything heavy is imported now

    gc.freeze()
    return make_tiny_model(tmp_path_factory.mktemp("model"))
