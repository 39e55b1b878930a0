"""Checkpoints that reach the disk while training goes on (`save_in_background`).

`AtroposGRPOTrainer._save_checkpoint` hands over the writing of a checkpoint. It goes to a private folder in memory,
where `_get_output_dir` points meanwhile; then a thread of rank 0 moves it to the disk, one at a time. The trainer's
state comes last and in one piece: a checkpoint that has it is whole, and nothing takes another one for a checkpoint.
"""

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints

from trl_atropos import distributed as ranks
from trl_atropos.errors import SaveError
from trl_atropos.guard import SHM
from trl_atropos.signals import deferred
from trl_atropos.staging import Staging, saved_bytes, shortage
from trl_atropos.timing import SAVE_BACKGROUND
from trl_atropos.weights.checkpoint import disk_errors, written_whole

logger = logging.getLogger(__name__)

CHUNK = 32 << 20  # bytes between two syncs: what is dirty stays little, and a wait sees that it goes on
NICER = 5  # than the training, which comes first on the CPU, without stopping the copy where it leaves none idle
POLL_SECONDS = 1.0  # how often waiting ranks hear from rank 0, well below any process group's timeout
STALLED_SECONDS = 300.0  # without a chunk on disk, after which a wait ends
SECONDS = f"time/{SAVE_BACKGROUND}"


class BackgroundSaver:
    """
    Of one trainer, on each of its ranks. As a context manager around training, it sees to it that what is in memory
    reaches the disk after an error and after Ctrl-C, too.
    """

    def __init__(self, trainer: Any):
        self.folder: str | None = None  # where checkpoints are written to at this moment, if not to `output_dir`
        self._trainer = trainer
        self._move: _Move | None = None
        self._warned = False

    def save(self, write: Callable[[], None]) -> None:
        """Called on every rank. `write` writes a checkpoint below what `_get_output_dir` returns."""
        if not self._trainer.args.save_in_background:
            return self._write_whole(write)
        self.wait()
        staging, self.folder = self._stage()
        if self.folder is None:
            return self._write_whole(write)
        try:
            ranks.together(write)
        except BaseException:  # also on Ctrl-C
            if staging is not None:
                staging.remove()
            raise
        finally:
            self.folder = None
        if staging is not None:
            with deferred():
                self._move = _Move(staging, self._trainer.args)
                self._move.start()

    def _write_whole(self, write: Callable[[], None]) -> None:
        """While the training waits. With DeepSpeed and FSDP, ranks write together: errors stay apart."""
        trainer = self._trainer
        folder = Path(trainer._get_output_dir(None), f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}")
        ranks.on_main(lambda: shutil.rmtree(folder, ignore_errors=True))  # of an earlier life of the run

        def said() -> None:
            with disk_errors(folder, "The checkpoint"):
                write()

        with written_whole(folder):
            said() if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled else ranks.together(said)

    def wait(self) -> None:
        """Called on every rank: until the last checkpoint is on disk. Raises what kept it from there."""
        while self._trainer.args.save_in_background and not ranks.on_main(lambda: self.check(POLL_SECONDS)):
            pass

    def check(self, seconds: float = 0.0) -> bool:
        """
        Whether nothing is on its way to the disk any more; waits `seconds` for that. On rank 0.

        Raises:
            SaveError: the checkpoint is not on disk, and will not be.
        """
        move = self._move
        if move is None:
            return True
        move.join(seconds)
        if move.is_alive():
            if seconds:
                move.require_progress()
            return False
        self._move = None
        if move.error is not None:
            raise move.error
        logger.info("%s is on disk, %.1f s after it was in memory.", move.target.name, move.seconds)
        self._trainer._metrics["train"][SECONDS].append(move.seconds)
        return True

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: object) -> None:
        if self._move is None:
            return
        logger.warning("The training has ended. %s is still moved to the disk first.", self._move.target.name)
        try:
            while not self.check(POLL_SECONDS):
                pass
        except SaveError as own:  # what ended the training is raised
            logger.error("%s", own)

    def _stage(self) -> tuple[Staging | None, str | None]:
        """On rank 0 the folder; on every rank its path, None where there cannot be one, which is said once."""
        staging: list[Staging] = []

        def make() -> tuple[str | None, str]:
            obstacle = self._obstacle()
            if obstacle:
                return None, obstacle
            staging.append(Staging())
            return str(staging[0].path), ""

        path, obstacle = ranks.on_main(make)
        if path is not None and all(gather_object([os.path.isdir(path)])):
            return (staging[0] if staging else None), path
        if staging:
            staging[0].remove()
        if self._trainer.accelerator.is_main_process and not self._warned:
            self._warned = True
            logger.warning(
                "`save_in_background`, but the training waits while a checkpoint is written, because %s, or leave "
                "`save_in_background` out.",
                obstacle or f"the trainer's processes do not share one {SHM}: train on one machine",
            )
        return None, None

    def _obstacle(self) -> str:
        """What is in the way, and the way out; empty if nothing is."""
        trainer = self._trainer
        if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
            return "DeepSpeed and FSDP write by themselves: train without them"
        optimizer = None if trainer.args.save_only_model else trainer.optimizer
        return shortage(saved_bytes(trainer.accelerator.unwrap_model(trainer.model), optimizer))


class _Move(threading.Thread):
    """Moves the checkpoint in `staging` to the disk, and removes those that are then too many."""

    def __init__(self, staging: Staging, args: Any):
        super().__init__(name="trl_atropos-checkpoint", daemon=True)
        (self._source,) = staging.path.iterdir()
        self.target = Path(args.output_dir, self._source.name)
        self.error: Exception | None = None
        self.seconds = 0.0
        self._staging = staging
        self._limit = args.save_total_limit
        self._moved_at = time.monotonic()
        self._moved = 0  # bytes

    def run(self) -> None:
        thread = threading.get_native_id()  # a priority of its own is Linux'
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICER)
        began = time.monotonic()
        try:
            self._copy()
            self._rotate()
        except OSError as error:
            self.error = SaveError(
                f"The checkpoint could not be written to {self.target}: {error.strerror or error} (after "
                f"{self._moved / 2**20:.1f} MiB). Those before it are whole. Make room (or lower `save_total_limit`), "
                "or let this user write there, and resume."
            )
            self.error.__cause__ = error
            if not (self.target / TRAINER_STATE_NAME).exists():
                shutil.rmtree(self.target, ignore_errors=True)  # makes room
        except Exception as error:  # noqa: BLE001 - raised in the main thread, by `check`
            self.error = error
        finally:
            self._staging.remove()
        self.seconds = time.monotonic() - began

    def require_progress(self) -> None:
        quiet = time.monotonic() - self._moved_at
        if quiet > STALLED_SECONDS:
            raise SaveError(
                f"The checkpoint is not on disk: nothing has been written to {self.target} for {quiet:.0f} s, after "
                f"{self._moved / 2**20:.1f} MiB. See whether that disk answers, and resume from the checkpoint before."
            )

    def _copy(self) -> None:
        state = self.target / TRAINER_STATE_NAME
        if self.target.exists():  # the run was resumed from an earlier one, or that one was never whole
            state.unlink(missing_ok=True)
            shutil.rmtree(self.target)
        self.target.mkdir(parents=True)
        for folder, _, files in os.walk(self._source):
            place = self.target / Path(folder).relative_to(self._source)
            place.mkdir(exist_ok=True)
            for name in files:
                if place / name != state:
                    self._copy_file(Path(folder, name), place / name)
            _sync(place)
        part = state.with_suffix(".part")
        self._copy_file(self._source / TRAINER_STATE_NAME, part)
        os.replace(part, state)
        _sync(self.target)
        _sync(self.target.parent)

    def _copy_file(self, path: Path, place: Path) -> None:
        buffer = memoryview(bytearray(min(CHUNK, path.stat().st_size)))
        with open(path, "rb", buffering=0) as source, open(place, "wb") as target:
            while number := source.readinto(buffer):
                target.write(buffer[:number])
                target.flush()
                os.fdatasync(target.fileno())
                self._moved += number
                self._moved_at = time.monotonic()
        shutil.copymode(path, place)
        path.unlink()  # gives its memory back

    def _rotate(self) -> None:
        """As Transformers does, but what a killed run has left half written is not counted, and goes first."""
        if self._limit is not None and self._limit > 0:
            found = [Path(path) for path in sort_checkpoints(str(self.target.parent), use_mtime=True)]
            whole = [path for path in found if (path / TRAINER_STATE_NAME).exists()]
            for path in set(found) - set(whole[-self._limit :]):
                shutil.rmtree(path, ignore_errors=True)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
