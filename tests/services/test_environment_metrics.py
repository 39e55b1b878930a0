"""The metrics that an environment logs by `wandb_log`: how its process writes them down, and how
the run reads them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from trl_atropos.environment_entry import SITE
from trl_atropos.rollouts.reward_parts import MOST_NAMES
from trl_atropos.services import environment_metrics
from trl_atropos.services.environment_metrics import (
    FILE_VARIABLE,
    EnvironmentMetrics,
    metrics_file,
)
from trl_atropos.services.manager import Services

LOGGING = """
import asyncio, sys
sys.path.insert(0, {site!r})
from environment_site_metrics import record_metrics

class Base:
    async def wandb_log(self, wandb_metrics=None):
        self.got = wandb_metrics

class Table:
    def __float__(self):
        raise RuntimeError("a table")

record_metrics(Base)
environment = Base()
for metrics in ({{"share": 0.25, "step": True, "table": Table(), "text": "1"}}, {{}}, None,
                {{"share": 0.75, "broken": float("inf"), 5: 10**400}}):
    asyncio.run(environment.wandb_log(metrics))
    assert environment.got is metrics
"""


@pytest.fixture
def metrics(tmp_path) -> EnvironmentMetrics:
    return EnvironmentMetrics(tmp_path / "metrics.jsonl", "mine")


def append(metrics: EnvironmentMetrics, text: str) -> None:
    with metrics._path.open("a") as file:
        file.write(text)


def logged_to(path: str) -> subprocess.CompletedProcess:
    variables = os.environ | {FILE_VARIABLE: path}
    command = [sys.executable, "-c", LOGGING.format(site=SITE)]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)


def test_numbers_that_environment_logs_are_read(metrics):
    done = logged_to(str(metrics._path))
    assert (done.returncode, done.stderr) == (0, "")
    assert metrics._path.read_text().splitlines() == [
        '{"share": 0.25, "step": 1.0}',
        '{"share": 0.75, "broken": "inf"}',
    ]
    assert metrics.read() == {
        "environment/mine/share": 0.5,
        "environment/mine/step": 1.0,
        "services/metrics_dropped_env_mine_not_a_number": 1.0,
    }
    assert metrics.read() == {"services/metrics_dropped_env_mine_not_a_number": 0.0}


def test_file_that_cannot_be_written_ends_no_environment(tmp_path):
    done = logged_to(str(tmp_path / "none" / "metrics.jsonl"))
    assert done.returncode == 0
    assert "metrics cannot be written to" in done.stderr and "No such file" in done.stderr


def test_line_counts_once_it_is_whole(metrics):
    assert metrics.read() == {}  # there is no file yet
    append(metrics, '{"x": 1}\n{"x": 2')
    assert metrics.read() == {"environment/mine/x": 1.0}
    assert metrics.read() == {}
    append(metrics, '2}\n{"y": 3}\n')
    assert metrics.read() == {"environment/mine/x": 22.0, "environment/mine/y": 3.0}


@pytest.mark.parametrize("line", ["no JSON", "[1]", "1", "[" * 100_000, "\x00\x85"])
def test_line_that_is_no_metrics_is_dropped_and_counted(metrics, line, caplog):
    append(metrics, f'{line}\n{{"x": 1}}\n')
    assert metrics.read() == {
        "environment/mine/x": 1.0,
        "services/metrics_dropped_env_mine_not_a_mapping": 1.0,
    }
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("Dropped a metric from environment mine: ") and len(warning) < 400


def test_only_so_many_names_and_bytes_are_taken(metrics, monkeypatch):
    monkeypatch.setattr(environment_metrics, "MOST_BYTES", 4096)
    append(metrics, "".join(f'{{"task {number}": 1}}\n' for number in range(MOST_NAMES + 5)))
    read = metrics.read()
    assert read.pop("services/metrics_dropped_env_mine_too_many_names") == 5.0
    assert list(read) == [f"environment/mine/task {number}" for number in range(MOST_NAMES)]
    append(metrics, "x" * 10_000 + '\n{"task 0": 2}\n')
    for _ in range(3):
        read = metrics.read()
    assert read["environment/mine/task 0"] == 2.0


def test_service_begins_with_new_metrics(tmp_path):
    program = (
        f"import os; print(os.environ[{FILE_VARIABLE!r}], flush=True); import time; time.sleep(99)"
    )
    with Services(tmp_path / "logs") as services:
        left = metrics_file(tmp_path / "logs" / "environment-a.b.log")
        left.parent.mkdir()
        left.write_text('{"x": 1}\n')
        service = services.start("environment-a.b", [sys.executable, "-c", program], cwd=ROOT)
        assert not left.exists()
        expected = str(Path(tmp_path, "logs", "environment-a.b.metrics.jsonl"))
        assert metrics_file(service.log_path) == left == Path(expected)
