"""Nothing lost and nothing twice, whatever dies: see `source_faults.py`. `make test-faults` runs
2,000."""

import os
import subprocess
import sys

import pytest

from tests import ROOT

FAULTS = 35  # each kind once
TRAINER_FAULTS = 14  # each kind once


@pytest.mark.slow(100)
@pytest.mark.timeout(900)
@pytest.mark.skipif(sys.platform != "linux", reason="follows files by what Linux shows of them")
@pytest.mark.parametrize(
    ("faults", "flags"),
    [(FAULTS, []), pytest.param(TRAINER_FAULTS, ["--trainer"], marks=pytest.mark.full)],
)
def test_rows_are_accounted_for_after_every_fault(faults, flags):
    # In a process of its own, whose children fork from one that has imported nothing but what they
    # need.
    command = [
        sys.executable,
        "-m",
        "tests.rollouts.run_source_faults",
        "--faults",
        str(faults),
        *flags,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=850
    )
    print(run.stdout)
    assert run.returncode == 0, run.stderr[-5000:]
    assert f"{faults} faults" in run.stdout and "the books balance" in run.stdout
