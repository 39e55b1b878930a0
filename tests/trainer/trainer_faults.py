"""The faults of `tests/rollouts/source_faults.py`, with the whole trainer in the place of the
consumer.

It trains a tiny model on what the real API delivers, and saves as transformers does. No server:
nothing samples.
"""

import contextlib
import json
import logging
import os
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState

from tests.rollout_factory import arguments, make_tiny_model
from tests.rollouts import source_faults
from tests.rollouts.source_faults import (
    BATCH,
    KEPT,
    MAX_LENGTH,
    PATIENCE,
    SAVE_EVERY,
    Orders,
    after,
    context,
    ids_of,
    stages,
    watch,
)
from trl_atropos import AtroposGRPOConfig, AtroposGRPOTrainer, AtroposSource
from trl_atropos.errors import RolloutError
from trl_atropos.rollouts.spool import source_state
from trl_atropos.weights.checkpoint import whole_checkpoints
from trl_atropos.weights.publisher import NullPublisher

context.set_forkserver_preload([source_faults.__name__, __name__])

KINDS = (
    *(f"kill when {stage}" for stage in source_faults.STAGES if stage != "registered"),
    "kill at any time",
    "kill the API",
    "kill the API and the consumer",
    "cut reply",
    "duplicate request",
)
DRAINED = 1.5  # seconds without a batch when there are none left


def train(pipe: Any, port: int, folder: str, orders: Orders) -> None:
    """Trains from the last checkpoint on, and sends every step's number. With nothing to train
    left, it ends."""
    logging.disable()
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        _train(pipe, port, Path(folder), orders)


def _train(pipe: Any, port: int, folder: Path, orders: Orders) -> None:
    draining = orders.stage == "drain"
    source = AtroposSource(
        f"http://127.0.0.1:{port}",
        poll_interval=0.005,
        request_timeout=5,
        start_timeout=10,
        api_down_timeout=20,
    )
    reach = stages(orders, source)
    after(source, "poll", lambda rows: rows and reach("handed out"))
    settings = arguments(
        folder,
        max_steps=10**6,
        per_device_train_batch_size=BATCH,
        save_strategy="steps",
        save_steps=SAVE_EVERY,
        save_total_limit=KEPT,
        max_sequence_length=MAX_LENGTH,
        rollout_timeout=DRAINED if draining else PATIENCE,
    )
    model = folder.parent / "model"
    publisher = NullPublisher()
    args = AtroposGRPOConfig(**settings)
    trainer = AtroposGRPOTrainer(
        str(model), args, rollout_source=source, policy_publisher=publisher
    )
    trainer.add_callback(TrainedRows(trainer, pipe, reach, draining))
    write_state = TrainerState.save_to_json
    TrainerState.save_to_json = lambda state, path: (reach("saving"), write_state(state, path))
    with contextlib.suppress(RolloutError):  # drained
        trainer.train(resume_from_checkpoint=last_whole_checkpoint(folder))


class TrainedRows(TrainerCallback, ExportableState):
    """Keeps in each checkpoint the ids of the rows that its weights have been trained on."""

    def __init__(self, trainer: AtroposGRPOTrainer, pipe: Any, reach: Any, saves_all: bool):
        self.trainer, self.pipe, self.reach, self.saves_all = trainer, pipe, reach, saves_all
        self.ids: list[int] = []

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"ids": self.ids}}

    def on_train_begin(self, args, state, control, **kwargs):
        watch(self.trainer.rollout_source, self.reach)
        saved = state.stateful_callbacks.get("TrainedRows")
        self.ids = list(saved["attributes"]["ids"]) if saved else []
        state.stateful_callbacks["TrainedRows"] = self.state()

    def on_step_end(self, args, state, control, **kwargs):
        self.ids += ids_of(self.trainer._batch.own_rollouts)
        self.reach("trained")
        self.pipe.send(state.global_step)
        control.should_save |= self.saves_all

    def on_save(self, args, state, control, **kwargs):
        self.reach("saved")


def last_whole_checkpoint(folder: Path) -> str | None:
    steps = whole_checkpoints(str(folder))
    return str(folder / f"checkpoint-{max(steps)}") if steps else None


def load(folder: Path) -> tuple[int, list[int], dict | None]:
    """Step, trained ids and the source's state of the last whole checkpoint."""
    path = last_whole_checkpoint(folder)
    if path is None:
        return 0, [], None
    saved = json.loads(Path(path, "trainer_state.json").read_text())
    callbacks = saved["stateful_callbacks"]
    return (
        saved["global_step"],
        callbacks["TrainedRows"]["attributes"]["ids"],
        source_state(callbacks)[0],
    )


class Run(source_faults.Run):
    work = staticmethod(train)
    load = staticmethod(load)

    def __init__(self, folder: Path, seed: int) -> None:
        if not (folder.parent / "model").exists():
            make_tiny_model(folder.parent / "model")
        super().__init__(folder, seed)
        # A run without a checkpoint cannot be resumed: it begins anew.
        assert self.consumer.steps(SAVE_EVERY + 1), "the trainer has died"

    def drain(self) -> None:
        self.end_consumer()
        self.start_consumer(Orders("drain"))
        self.consumer.process.join(4 * PATIENCE)
        self.end_consumer()
