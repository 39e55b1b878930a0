"""Whether what the run saves fits on the disk of `output_dir`."""

import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trl_atropos.checks.finding import ERROR, WARNING, Finding
from trl_atropos.memory.plan import GIB

RESTART_COPIES = 3  # the version that is served, the one before, and the one that is being written


def disk(recipe, case: Any, elsewhere: bool) -> Iterator[Finding]:
    """`case` is what memory is estimated from (`trl_atropos.memory.case`). Of a run that will be `elsewhere`, this
    machine's disk is a hint only."""
    try:
        whole, checkpoint, final = _sizes(case)
    except Exception:  # noqa: BLE001 - as with memory: any model's own code may fail on tensors without data
        return
    number = _checkpoints(recipe.training)
    restarts = RESTART_COPIES * whole if recipe.training.vllm_mode == "restart" else 0
    needed = number * checkpoint + final + restarts
    folder = os.path.abspath(recipe.training.output_dir)
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    # Those that are there count as what is needed, and are replaced one by one.
    there = sum(file.stat().st_size for file in Path(folder).glob("checkpoint-*/**/*") if file.is_file())
    free = shutil.disk_usage(folder).free + there
    if needed <= free:
        return
    copies = f", {restarts / GIB:.1f} for the server's restarts" if restarts else ""
    yield Finding(
        "disk",
        "What the run saves does not fit on the disk of `output_dir`" + " of this machine" * elsewhere,
        f"{needed / GIB:.1f} GiB ({number} checkpoints of {checkpoint / GIB:.1f}{copies}), free are {free / GIB:.1f}",
        "Set `save_total_limit`, save less often (`save_steps`) or without the optimizer (`save_only_model: true`), "
        "or set `output_dir` to a larger disk.",
        WARNING if elsewhere else ERROR,
    )


def _sizes(case: Any) -> tuple[int, int, int]:
    """Bytes of the whole model, of one checkpoint, and of what is saved at the end."""
    from trl_atropos.memory.optimizers import state_bytes
    from trl_atropos.memory.tracing import shadow_model
    from trl_atropos.memory.trainer import Sizes

    model, _mode = shadow_model(case.config, case.dtype, case.peft_config, **case.model_settings)
    sizes, training = Sizes.of(model), case.training
    saved = sizes.own if case.peft_config is not None else sizes.weights
    if training.save_only_model:
        return sizes.weights, saved, saved
    half = case.dtype.itemsize == 2 and case.peft_config is None
    masters = half and (training.master_weights or case.plan.sharding.startswith("zero"))
    number = sum(one.numel() for one in sizes.trained)
    state = state_bytes(training.optim, sizes.trained, masters, sizes.embeddings) + (4 * number if masters else 0)
    return sizes.weights, saved + state, saved


def _checkpoints(training: Any) -> int:
    """How many there are at once: an old one is removed when the new one is there."""
    if training.save_strategy == "no":
        return 0
    steps = training.max_steps
    every = training.save_steps if training.save_steps >= 1 else math.ceil(training.save_steps * steps) or steps
    number = max(1, math.ceil(steps / every)) if training.save_strategy == "steps" else 1  # the last step's, too
    return number if training.save_total_limit is None else min(number, training.save_total_limit + 1)
