"""Which tests are left out where time ends, and in what order the others run."""

import os
import subprocess
import sys
import time

import pytest

from tests import ROOT
from tests.tiers import FIRST, LONGEST, place_in_draw

FILES = [path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("tests/*/test_*.py"))]
SAMPLE = """
import time
import pytest
import tests.tiers

@pytest.mark.slow
def test_whole_run():
    tests.tiers.SLOW_UNTIL = time.time() - 1

@pytest.mark.slow
def test_another_of_its_server():
    tests.tiers.SLOW_UNTIL -= tests.tiers.GRACE

@pytest.mark.slow
def test_late_one():
    pass

def test_function():
    pass
"""


@pytest.mark.parametrize(
    ("left", "told"),
    [
        (3600.0, "3 passed, 1 skipped"),
        (-1.0, "1 passed, 3 skipped"),
    ],
)
def test_slow_tests_begin_only_while_time_is_left(tmp_path, left, told):
    (tmp_path / "test_sample.py").write_text(SAMPLE)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    options = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), str(tmp_path)]
    variables = os.environ | {"TRL_ATROPOS_SLOW_UNTIL": str(time.time() + left)}
    ended = subprocess.run(
        [*command, *options], cwd=ROOT, env=variables, capture_output=True, text=True, check=True
    )
    *others, last = ended.stdout.splitlines()
    assert told in last
    left_out = told.partition(", ")[2].split()[0]
    (named,) = [line for line in others if line.endswith("test_sample.py")]
    assert named.split()[0] == left_out


def test_files_that_are_named_are_there():
    assert {*FIRST, *LONGEST} <= {*FILES}


def test_every_file_has_its_turn_among_commits():
    """Of the first quarter of the files, all are in that of some commit."""
    quarter = len(FILES) // 4
    begun = set()
    for commit in map(str, range(40)):
        drawn = sorted(FILES, key=lambda file: place_in_draw(file, commit))
        assert drawn[: len(FIRST)] == FIRST
        begun.update(drawn[:quarter])
    assert begun == set(FILES)
