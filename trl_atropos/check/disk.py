"""Tells whether the disk has room for what a run saves: its checkpoints, the model at its end, and
what the server restarts on.

`check/__init__.py` calls `disk`, which reads the sizes of the model without data (`shadow.py`).
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trl_atropos.check.launch import GIB, Case
from trl_atropos.check.shadow import Sizes, shadow_model
from trl_atropos.errors import ERROR, WARNING
from trl_atropos.errors import AtroposTrainingError as Finding
from trl_atropos.weights.masters import HALF
from trl_atropos.weights.optimizer_state import state_bytes
from trl_atropos.weights.savable import free_bytes

RESTART_COPIES = 3  # the version that is served, the one before, and the one that is being written


def disk(case: Case, elsewhere: bool) -> Iterator[Finding]:
    """Yields a finding if what the run saves does not fit on the disk. If the run will be
    `elsewhere`, this machine's disk is a hint only."""
    args = case.training
    model, _mode = shadow_model(case, case.dtype, case.peft_config)
    sizes = Sizes.of(model)
    final = sizes.weights if case.peft_config is None else sizes.trained_bytes
    checkpoint = final
    if not args.save_only_model:
        checkpoint += _saved_state(case, sizes)
    number = checkpoints(args)
    restarts = RESTART_COPIES * sizes.weights if args.mode.restarts_engine else 0
    needed = number * checkpoint + final + restarts

    folder = Path(args.output_dir).absolute()
    while not folder.is_dir():
        folder = folder.parent
    free = free_bytes(folder)
    if needed <= free:
        return
    what = "What the run saves does not fit on the disk of `output_dir`"
    level = ERROR
    if elsewhere:
        what += " of this machine"
        level = WARNING
    parts = f"{number} checkpoints of {_gib(checkpoint)}"
    if restarts:
        parts += f", {_gib(restarts)} for the server's restarts"
    seen = f"{_gib(needed)} GiB ({parts}), free are {_gib(free)}"
    fix = (
        "Set `save_total_limit`, save less often (`save_steps`) or without the optimizer "
        "(`save_only_model`), or set `output_dir` to a larger disk."
    )
    yield Finding(what, seen, fix, "disk", level)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}"


def _saved_state(case: Case, sizes: Sizes) -> int:
    """Returns the bytes of the optimizer's state in a checkpoint, masters included."""
    args = case.training
    has_masters = case.trains_with_masters
    if case.peft_config is None:
        has_masters |= args.master_weights or case.plan.sharding.startswith("zero")
    has_masters &= case.dtype in HALF
    state = state_bytes(args.optim, sizes.trained, has_masters, sizes.embeddings)
    if has_masters:
        state += 4 * sizes.values
    return state


def checkpoints(training: Any) -> int:
    """Returns how many checkpoints there are at once. An old one is removed when the new one is
    there."""
    if training.save_strategy == "no":
        return 0
    number = 1
    if training.save_strategy == "steps":
        every = training.save_steps
        if every < 1:  # a share of the run
            every = math.ceil(every * training.max_steps) or training.max_steps
        number = math.ceil(training.max_steps / every)  # the last step's, too
        number = max(1, number)
    if training.save_total_limit is not None:
        number = min(number, training.save_total_limit + 1)
    return number
