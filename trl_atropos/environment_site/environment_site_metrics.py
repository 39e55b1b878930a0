"""Writes down the metrics that an environment logs by Atropos' `wandb_log`.

An environment may override `wandb_log`, add numbers of its own, and pass them on to Atropos'
`BaseEnv.wandb_log`. That one gives them to Weights & Biases alone, and only with `use_wandb`. Here
it also appends them to the file that the variable `TRL_ATROPOS_METRICS` names, as one line:

    {"train/percent_correct": 0.25, "train/loss": "nan"}

A number that JSON does not have is a text. Tables, pictures and texts of the environment are left
out. `trl_atropos.services.environment_metrics` reads the file. `run.py` of this folder calls
`record_metrics`. Standard library only.
"""

import json
import logging
import math
import os

FILE = "TRL_ATROPOS_METRICS"
LONGEST = 60  # characters of a value that is no number

logger = logging.getLogger(__name__)


def record_metrics(base):
    """Makes `base`, Atropos' `BaseEnv`, write down what its `wandb_log` gets."""
    path = os.environ.get(FILE)
    if not path:
        return
    log = base.wandb_log

    async def wandb_log(self, wandb_metrics=None):
        numbers = _numbers_in(wandb_metrics or {})
        if numbers:
            _append(path, numbers)
        await log(self, wandb_metrics)

    base.wandb_log = wandb_log


def _numbers_in(metrics):
    numbers = {}
    for name, value in metrics.items():
        if not isinstance(value, str) and _is_number(value):
            numbers[str(name)] = plain_number(value)
    return numbers


def _is_number(value):
    try:
        float(value)
    except Exception:  # noqa: BLE001 - of somebody else's type
        return False
    return True


def plain_number(value):
    """Returns a number that JSON has, whatever type it was of, or a text that describes the value
    if there is none. Leaves texts and None as they are."""
    if value is None or isinstance(value, str):
        return value
    try:
        number = float(value)
    except Exception:  # noqa: BLE001 - of somebody else's type
        return repr(value)[:LONGEST]
    if math.isfinite(number):
        return number
    return str(number)


def _append(path, numbers):
    try:
        with open(path, "a") as file:
            file.write(json.dumps(numbers) + "\n")
    except OSError as error:  # a metric is no reason to end an environment
        logger.warning("Its metrics cannot be written to %s (%s).", path, error.strerror)
