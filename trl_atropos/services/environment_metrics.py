"""Reads the metrics that an environment logs by Atropos' `wandb_log`.

The environment's process appends them to a file (`environment_site/environment_site_metrics.py`),
one JSON object a line. `manager.py` names the file to it by a variable, and `Supervisor.metrics`
reads what is new for every generation batch. Environments of this package also append counts
(`agents/accounting.py`).

The file is somebody else's output: what cannot be a metric is dropped and counted.
"""

import json
from collections import Counter, defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

from trl_atropos.rollouts.reward_parts import ENVIRONMENT, Count, NamedNumbers

FILE_VARIABLE = "TRL_ATROPOS_METRICS"  # as in `environment_site_metrics.py`
COUNTS = "counts"  # key of a line whose numbers are counts: {"counts": {"episodes/ended": 8}}
# Begins what an environment of this package logs if none of its first episodes ended well.
ALL_FAILED = "Every episode has failed"
MOST_BYTES = 1 << 20  # that are read at once; a longer line is no line of metrics


def metrics_file(log_path: Path) -> Path:
    """Returns the file for the metrics of an environment, beside its log."""
    return log_path.with_suffix(".metrics.jsonl")


class EnvironmentMetrics:
    """Follows the metrics of one environment: `path` is their file, and `name` its name."""

    def __init__(self, path: Path, name: str):
        self._path = path
        self._name = name
        self._read_to = 0
        self._numbers = NamedNumbers("metric", f"services/metrics_dropped_env_{name}")

    def read(self) -> dict[str, float]:
        """Returns each metric that was logged since the last call as `environment/NAME/METRIC`, the
        mean if it was logged several times, and the sum if it is a count. Also returns how many
        were dropped."""
        values = defaultdict(list)
        counts = Counter()
        for line in self._new_lines():
            content = _parsed(line)
            if isinstance(content, dict) and isinstance(content.get(COUNTS), dict):
                counts.update(self._numbers.admit(content[COUNTS], self._name))
                continue
            numbers = self._numbers.admit(content, self._name)
            for metric, value in numbers.items():
                values[metric].append(value)
        metrics = self._numbers.metrics()
        for metric, logged in values.items():
            metrics[f"{ENVIRONMENT}{self._name}/{metric}"] = fmean(logged)
        for metric, count in counts.items():
            metrics[f"{ENVIRONMENT}{self._name}/{metric}"] = Count(count)
        return metrics

    def _new_lines(self) -> list[bytes]:
        """Returns the whole lines since the last call, at most `MOST_BYTES`."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read_to)
                content = file.read(MOST_BYTES)
        except FileNotFoundError:  # it has logged nothing yet
            return []
        end = content.rfind(b"\n") + 1
        if not end and len(content) == MOST_BYTES:
            end = MOST_BYTES
        self._read_to += end
        return content[:end].splitlines()


def _parsed(line: bytes) -> Any:
    """Returns the JSON of a line, or, if it is none, its beginning as text."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return line[:100].decode(errors="replace")
