"""Tells whose checkpoints an output folder holds, and from which one a run may start.

Every start of a run begins a *branch*. The *path* of a run is the list of its branches, oldest
first, each `[name, optimizer step at which it began]`: `[["3f2a90c1", 0]]` for a new run, and one
branch more for each resume. A checkpoint has the path of the run that saved it, in
`trainer_state.json`; `.run.json` in the output folder has that of the run which used the folder
last. The checkpoint of step 150 on `[[a, 0]]` is not in the past of a run on `[[a, 0], [b, 100]]`,
which went back to step 100.

`trl_atropos.recipe_checks.check_files` calls `starting_checkpoint` before a service is started, and
so does `AtroposGRPOTrainer.train`, which then calls `move_aside` or `say_which`. The callback
`RunPath` writes the path.
"""

import json
import logging
import os
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from trl_atropos.distributed import on_main, together
from trl_atropos.errors import CheckpointError, RecipeError
from trl_atropos.weights.checkpoint import (
    checkpoint_folders,
    disk_errors,
    state_of,
    step_of,
    whole_checkpoints,
)

logger = logging.getLogger(__name__)

FILE = ".run.json"
# begins the names of the folders to which earlier runs' checkpoints are moved
ASIDE = "checkpoints-before"
RUN_PATH = "RunPath"  # of the callback below, in the `stateful_callbacks` of a checkpoint's state
SHOWN = 3  # checkpoints that a message names

Branches = list[list]  # a path, as above


class RunPath(TrainerCallback, ExportableState):
    """Begins a branch when training begins, and saves the run's path in every checkpoint."""

    def __init__(self) -> None:
        # before training begins, that of the checkpoint which the run resumes from
        self.path: Branches = []

    def on_train_begin(self, args, state, control, **kwargs):
        branch = on_main(lambda: [uuid.uuid4().hex[:8], state.global_step])
        self.path = [*self.path, branch]
        together(lambda: write_path(args, self.path))
        # The checkpoint of a version without paths has no such entry, and without one, nothing is
        # saved.
        state.stateful_callbacks.setdefault(RUN_PATH, self.state())

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"path": self.path}}


def path_of(checkpoint: str | Path | None) -> Branches:
    """Returns the path of the run that saved a checkpoint; an empty one if the checkpoint does not
    have any."""
    if checkpoint is None:
        return []
    state = state_of(checkpoint) or {}
    callbacks = state.get("stateful_callbacks", {})
    if not callbacks.get(RUN_PATH):
        return []
    return callbacks[RUN_PATH]["attributes"]["path"]


def write_path(args: Any, path: Branches) -> None:
    """Notes in the output folder which run uses it, if this rank saves. Raises `SaveError` if the
    disk refuses."""
    if not args.should_save:
        return
    file = Path(args.output_dir, FILE)
    with disk_errors(args.output_dir, "The run's name"):
        draft = file.with_name(f"{FILE}.tmp")
        draft.unlink(missing_ok=True)
        with draft.open("x", encoding="utf-8") as text:
            json.dump({"path": path}, text)
        draft.replace(file)


def last_path(output_dir: str) -> Branches | None:
    """Returns the path of the run which used the folder last; `None` if the folder does not say
    it."""
    with suppress(OSError, ValueError, KeyError, TypeError):  # no such file, or torn by a power cut
        text = Path(output_dir, FILE).read_text(encoding="utf-8")
        return json.loads(text)["path"]
    return None


def is_past(path: Branches, step: int, run: Branches) -> bool:
    """Returns whether the checkpoint of `step` on `path` is in the past of `run`.

    The run `[[a, 0], [b, 100]]` has the checkpoint of step 50 on `[[a, 0]]` in its past, and that
    of step 150 not. An empty path is that of a version without paths: of those checkpoints, only
    the one that the run began from is in its past.
    """
    if run[: len(path)] != path:
        return False
    later = run[len(path) :]
    if not later:
        return True
    _name, began_at = later[0]
    return step <= began_at


def starting_checkpoint(args: Any, resume_from_checkpoint: Any) -> str | None:
    """
    Returns the checkpoint that a run resumes from, `None` for a new run. All ranks call this.

    Raises:
        RecipeError: There is no such checkpoint, nothing is left to train after it, or the run is
            new and its output folder holds checkpoints.
        CheckpointError: The checkpoint is of another run than the one that used the output folder
            last.
    """
    checkpoint = checkpoint_of(resume_from_checkpoint, args.output_dir)
    if checkpoint is None:
        if not args.move_checkpoints_aside:
            together(lambda: require_no_checkpoints(args.output_dir))
        return None
    together(lambda: require_own(checkpoint, args.output_dir))
    together(lambda: require_steps_left(checkpoint, args.max_steps))
    return checkpoint


def checkpoint_of(resume_from_checkpoint: Any, output_dir: str) -> str | None:
    """Returns the folder to resume from, `None` for none. All ranks call this.

    `true` means the last checkpoint of the run that used `output_dir` last, of those that are whole
    on every machine.
    """
    path = str(resume_from_checkpoint or "")
    if path.lower() in ("false", "none", ""):
        return None
    others: list[int] = []
    if path.lower() == "true":
        past, others = together(lambda: own_checkpoints(output_dir))
        steps = set.intersection(*gather_object([set(past)]))
        path = ""
        if steps:
            path = os.path.join(output_dir, f"{PREFIX_CHECKPOINT_DIR}-{max(steps)}")
    if not all(gather_object([os.path.isdir(path)])):
        setting = f"resume_from_checkpoint: {resume_from_checkpoint}"
        what = f"`{setting}`, but there is no checkpoint in {path or output_dir}"
        if others:
            what += f" of the run that used it last ({_named(others)}: of another one)"
        raise RecipeError(
            what,
            seen=setting,
            fix="Leave it out to begin anew, or name a folder `checkpoint-N`. On several machines, "
            "all must see it: put `output_dir` on a file system that they share, or train with "
            "`save_on_each_node: true`.",
            code="checkpoint",
        )
    return path


def own_checkpoints(output_dir: str) -> tuple[list[int], list[int]]:
    """Returns the steps of the whole checkpoints in the past of the run that used the folder last,
    and of the others.

    Raises `CheckpointError` if the folder does not say which run that was, and has checkpoints of
    several.
    """
    paths = {step: path_of(_folder(output_dir, step)) for step in whole_checkpoints(output_dir)}
    run = last_path(output_dir)
    if run is None:  # checkpoints alone were copied here, or a version without paths saved them
        _require_one_run(paths, output_dir)
        return list(paths), []
    past = []
    others = []
    for step, path in paths.items():
        if is_past(path, step, run):
            past.append(step)
        else:
            others.append(step)
    others.sort()
    for step in others:
        path = paths[step]
        reason = "it is of another run"
        if path and path[0] == run[0]:
            reason = "the run went back to an earlier step after it"
        logger.warning("Passed over %s: %s.", _folder(output_dir, step), reason)
    return past, others


def _require_one_run(paths: dict[int, Branches], output_dir: str) -> None:
    runs = {path[0][0] for path in paths.values() if path}
    if len(runs) > 1:
        what = f"{output_dir} has checkpoints of {len(runs)} runs ({_named(paths)})"
        raise CheckpointError(what, fix="Resume from one of them by its path.", code="checkpoint")


def require_no_checkpoints(output_dir: str) -> None:
    """Raises `RecipeError` if a new run would save its checkpoints beside those of an earlier
    one."""
    steps = [
        step for step, folder in checkpoint_folders(output_dir) if state_of(folder) is not None
    ]
    if not steps:
        return
    raise RecipeError(
        f"`output_dir` is {output_dir!r}, which has checkpoints of an earlier run "
        f"({_named(steps)}), and this run begins anew: a later resume could take the other run's "
        "model",
        seen=f"output_dir: {output_dir}",
        fix="Set `output_dir` to another folder, or `move_checkpoints_aside: true`, which keeps "
        f"them in a folder `{ASIDE}-N` there. To go on with the earlier run, set "
        "`resume_from_checkpoint: true`.",
        code="output-dir-used",
    )


def require_own(checkpoint: str, output_dir: str) -> None:
    """Raises `CheckpointError` if a checkpoint is of another run than the output folder's."""
    path = path_of(checkpoint)
    run = last_path(output_dir)
    if path and run is not None and path[0] != run[0]:
        what = (
            f"{checkpoint} is of the run {path[0][0]}, and {output_dir} holds that of another "
            f"one, {run[0][0]}"
        )
        fix = (
            "Resume from a checkpoint of this run, or set `output_dir` to the folder of the "
            "other run or a new one."
        )
        raise CheckpointError(what, f"resume_from_checkpoint: {checkpoint}", fix, "checkpoint")


def require_steps_left(checkpoint: str, max_steps: int) -> None:
    """Raises `RecipeError` if the checkpoint has as many optimizer steps as the run is to have, or
    more."""
    step = step_of(checkpoint)
    if step < max_steps:
        return
    raise RecipeError(
        f"`max_steps` is {max_steps}, and the checkpoint in {checkpoint} has {step} steps already: "
        "nothing is left to train",
        seen=f"max_steps: {max_steps}",
        fix=f"Set `max_steps` above {step}, or resume from an earlier checkpoint. The model of "
        f"step {step} is in that folder.",
        code="checkpoint",
    )


def move_aside(args: Any) -> None:
    """Moves the checkpoints of earlier runs out of the way of a new one. All ranks call this,
    within the lock."""
    together(lambda: _move_aside(args))


def _move_aside(args: Any) -> None:
    if not args.should_save:
        return
    output_dir = args.output_dir
    folders = [folder for _, folder in checkpoint_folders(output_dir)]
    # those that are not whole are written anew
    if not any(state_of(folder) is not None for folder in folders):
        return
    number = 1
    while Path(output_dir, f"{ASIDE}-{number}").exists():
        number += 1
    aside = Path(output_dir, f"{ASIDE}-{number}")
    with disk_errors(aside, "The earlier run's checkpoints"):
        aside.mkdir()
        for folder in folders:
            folder.rename(aside / folder.name)
    message = "%s had %d checkpoints of an earlier run: now in %s."
    logger.warning(message, output_dir, len(folders), aside)


def say_which(checkpoint: str) -> None:
    """Logs which checkpoint a run resumes from, and warns if nothing tells whose it is."""
    path = path_of(checkpoint)
    step = step_of(checkpoint)
    if path:
        name, _ = path[0]
        logger.info("Resuming from %s, step %d of the run %s.", checkpoint, step, name)
    else:
        message = (
            "Resuming from %s, step %d, which does not say which run saved it: an earlier "
            "version did."
        )
        logger.warning(message, checkpoint, step)


def _folder(output_dir: str, step: int) -> Path:
    return Path(output_dir, f"{PREFIX_CHECKPOINT_DIR}-{step}")


def _named(steps: Iterable[int]) -> str:
    """Returns the names of the last checkpoints, and how many more there are."""
    latest_first = sorted(steps, reverse=True)
    text = ", ".join(f"{PREFIX_CHECKPOINT_DIR}-{step}" for step in latest_first[:SHOWN])
    if len(latest_first) > SHOWN:
        text += f" and {len(latest_first) - SHOWN} more"
    return text
