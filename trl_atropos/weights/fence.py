"""`ServerPublisher`: the life of a publish, written once for every mode.

    hold -> (a checkpoint may be loaded) -> begin -> [pause -> send -> version + n -> resume -> probe]*

The fence is around `optimizer.step` itself, because only that is left on every path, also when the step raises;
callbacks and torch's step hooks would skip the resume. What moves between pause and resume is the `Transfer`'s
business.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from trl_atropos.errors import AttachError, ProbeError, ServerError
from trl_atropos.metrics.timing import PUBLISH
from trl_atropos.protocol import tokenizer_fingerprint
from trl_atropos.services.signals import deferred
from trl_atropos.weights import ranks
from trl_atropos.weights.probe import Probe, Schedule, Tolerance, num_positions
from trl_atropos.weights.publisher import PolicyPublisher
from trl_atropos.weights.transfer import Moved, Transfer, base_model

logger = logging.getLogger(__name__)


@dataclass
class PublishTimes:
    """Where the time of the last publish went, in milliseconds."""

    pause_ms: float = 0.0
    transfer_ms: float = 0.0  # of the bytes
    apply_ms: float = 0.0  # in the server
    resume_ms: float = 0.0
    moved: Moved = field(default_factory=Moved)


class ServerPublisher(PolicyPublisher):
    """
    Args:
        transfer (`Transfer`): How the mode moves the bytes.
        probe_every_n_steps (`int`, *optional*): Publishes between two probes; 0 for none. By default, every one on the
            CPU, and on a GPU as many as take at most 2 % of the time.
        sync_every_n_steps (`int`): Optimizer steps between two publishes.
        sleep_level (`int`): vLLM's sleep level while the trainer computes; 0 for none.

    Attributes:
        times (`PublishTimes`): Of the last publish.
    """

    def __init__(
        self,
        transfer: Transfer,
        probe_every_n_steps: int | None = None,
        sync_every_n_steps: int = 1,
        sleep_level: int = 0,
    ):
        super().__init__()
        self.transfer = transfer
        self.servers = transfer.servers
        self.probe_every_n_steps = probe_every_n_steps
        self.sync_every_n_steps = sync_every_n_steps
        self.sleep_level = sleep_level
        self.times = PublishTimes()
        self._steps = 0  # of the optimizer, from the beginning of the run: the version that the trainer has
        self._paused = False
        self._asleep = False
        self._writes_when_held: int | None = None
        self._probe: Probe | None = None
        self._schedule = Schedule(probe_every_n_steps)
        self._looked_far = False

    # ------------------------------------------------------------------------------------------------------- attach

    @property
    def trainer_version(self) -> int:
        return self._steps

    def load(self, model: Any, args: Any, peft_config: Any = None) -> Any:
        self.transfer, model = self.transfer.load(model, args, peft_config)
        self.servers = self.transfer.servers
        info = self.servers.info
        self.policy_version = info.policy_version
        if info.logprobs_mode != "processed_logprobs":
            raise AttachError(
                f"The server returns {info.logprobs_mode}, which ignore the sampling temperature. Start it with "
                "`--logprobs-mode processed_logprobs`, or by `trl-atropos serve`, which sets it."
            )
        if args.max_sequence_length is not None and args.max_sequence_length > info.max_model_len:
            raise AttachError(
                f"`max_sequence_length` is {args.max_sequence_length}, but the server's max_model_len is "
                f"{info.max_model_len}: lower it, or start the server with `--max-model-len "
                f"{args.max_sequence_length}`."
            )
        if self.sleep_level and self.transfer.steps_in_place:
            raise AttachError(
                "`vllm_enable_sleep_mode` needs a server whose weights are copied: memory that a trainer shares "
                "cannot be given back. Start the server with `--enable-sleep-mode`."
            )
        if self.sleep_level and not info.sleep:
            raise AttachError("`vllm_enable_sleep_mode` is set: start the server with `--enable-sleep-mode`.")
        return model

    def attach(self, trainer: Any) -> None:
        info, tokenizer = self.servers.info, trainer.processing_class
        comparable = isinstance(tokenizer, PreTrainedTokenizerBase) and info.tokenizer_fingerprint is not None
        if comparable and tokenizer_fingerprint(tokenizer.get_vocab()) != info.tokenizer_fingerprint:
            raise AttachError(
                f"The trainer's tokenizer ({tokenizer.name_or_path}) and that of the server ({info.model}) have "
                "different vocabularies, so the same ids mean different text. Give both the same tokenizer."
            )
        self.servers.hold_leases()
        self.transfer.attach(trainer)
        self._trainer = trainer
        if self.probe_every_n_steps != 0:
            compute = torch.bfloat16 if trainer.args.bf16 or trainer.args.fp16 else torch.float32
            base = base_model(trainer.model)
            dtypes = (compute, getattr(torch, info.dtype), next(trainer.model.parameters()).dtype)
            self._probe = Probe(
                self.servers,
                trainer.args.temperature,
                Tolerance.of(info.device, *dtypes),
                info.block_size,
                info.max_model_len,
                info.vocab_size,
                base,
                self.transfer.steps_in_place,
            )
            self._schedule.device = info.device
            asked, most = trainer.args.max_sequence_length, num_positions(base.config)
            self._longest = int(min(asked or info.max_model_len, info.max_model_len, most))

    def server_max_length(self) -> int:
        return self.servers.info.max_model_len

    def why_silent(self) -> str:
        told = [] if self._paused or self._asleep else self.servers.silence()
        return "" if self._paused or self._asleep else " ".join(told)  # it may have been paused since

    # -------------------------------------------------------------------------------------------------- each publish

    def hold(self) -> None:
        self.servers.hold_leases()  # again, where `close` has ended a former training
        self._writes_when_held = self._writes()
        if self.transfer.steps_in_place:
            with deferred():
                self._pause()

    def begin(self, optimizer: Any, policy_version: int) -> None:
        self._steps = policy_version
        self._schedule.publishes = 0
        self._publish(lambda: None)
        self._look_far()
        self._writes_when_held = None  # an optimizer's kernels may write what nothing counts
        step = optimizer.step

        def fenced(*args, **kwargs):
            if not optimizer.gradient_state.sync_gradients:
                return step(*args, **kwargs)
            due = (self._steps + 1) % self.sync_every_n_steps == 0
            return self._publish(lambda: step(*args, **kwargs), optimizer, due)

        self._wrap_step(optimizer, fenced)

    def computing(self) -> None:
        """Called when the trainer has a batch and will compute until the next publish: the server may sleep."""
        if self.sleep_level and not self._asleep:
            with deferred(), self.stopwatch.part(PUBLISH):
                self._pause()
                self.servers.each(lambda client: client.sleep(self.sleep_level))
                self._asleep = True

    def _publish(self, step: Callable[[], Any], optimizer: Any = None, due: bool = True) -> Any:
        with deferred():  # Ctrl-C must leave no weights half written, nor a server paused that would take them for it
            if self.transfer.steps_in_place:
                with self.stopwatch.part(PUBLISH):
                    self._pause()
                    self.on_pause()
            result = step()
            # A gradient scaler that found no finite gradient skips the step: then nothing is new.
            if optimizer is not None and not optimizer.step_was_skipped:
                self._steps += 1
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # the step is only queued on the device, which publishing must not overtake
            if due or self._paused:
                with self.stopwatch.part(PUBLISH):
                    self._send()
        if due:
            with self.stopwatch.part(PUBLISH):
                self._run_probe()
        return result

    def _pause(self) -> None:
        if not self._paused:
            ranks.together(self.transfer.check)
            started = time.perf_counter()
            self.transfer.pause()
            self._paused = True
            self.times.pause_ms = _since(started)

    def _send(self) -> None:
        self._pause()
        self.on_pause()
        started = time.perf_counter()
        if self._asleep:
            self.servers.each(lambda client: client.wake("weights"))
        moved = self.transfer.send(self._steps)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # copies into the server's memory are only queued, too
        if self._asleep:
            self.servers.each(lambda client: client.wake("kv_cache"))
            self._asleep = False
        self.times.transfer_ms = _since(started) - moved.apply_ms
        self.times.apply_ms, self.times.moved = moved.apply_ms, moved
        started = time.perf_counter()
        self.transfer.resume(self._steps)
        self.times.resume_ms = _since(started)
        self._paused = False
        self.policy_version = self._steps
        self.transfer.published(self._steps)

    def _run_probe(self) -> None:
        if self._probe is None:
            return
        args, done = self._trainer.args, self._trainer.state.global_step + 1
        last = done + self.sync_every_n_steps > args.max_steps
        if ranks.on_main(lambda: self._schedule.due(time.perf_counter(), last)):
            began = time.perf_counter()
            result = self.probe()
            self._schedule.ran(began, time.perf_counter())
            self._note("policy/probe_max_abs_diff", result)
            self._note("time/probe", self._schedule.seconds)

    def _look_far(self) -> None:
        """Once, before the first step: the run's longest sequences, as far as both sides can take them."""
        if self._probe is None or self._looked_far:
            return
        self._looked_far = True
        model = self._trainer.model
        seconds = ranks.on_main(lambda: self._schedule.seconds)  # all must look at the same lengths
        with self._trainer.accelerator.autocast():
            wrong = self._probe.run_far(model, self.policy_version, self._longest, seconds)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # no step may need as much, and the server is on the same device
        if wrong is not None and self._trainer.args.max_sequence_length is not None:  # such rollouts are wanted
            raise ProbeError(wrong)
        if wrong is not None:
            logger.warning("%s", wrong)

    def probe(self) -> float:
        """
        Largest difference between what the servers sample and what the trainer has, in nats. Runs on every rank.

        Raises:
            ProbeError: It is beyond what the dtypes allow.
        """
        with self._trainer.accelerator.autocast():
            result = self._probe.run(self._trainer.model, self.policy_version)
        self.probe_max_abs_diff = max(self.probe_max_abs_diff or 0.0, result.max_abs_diff)
        return result.max_abs_diff

    def close(self) -> None:
        """Releases the leases. A server that is paused then goes on with whole weights, and leaves with torn ones."""
        if self._paused and self.transfer.steps_in_place and self._writes() == self._writes_when_held:
            self._paused = False  # nothing was written since `hold`: the weights are whole
            for client in self.servers.clients:
                try:
                    client.resume(self.policy_version)
                except ServerError as error:  # the end of the lease tells it enough, if it lives
                    logger.warning("%s", error)
        self._paused = self._asleep = False
        self.servers.release_leases()
        super().close()

    def _writes(self) -> int:
        """Counts in-place writes to the parameters, to tell whether loading a checkpoint got as far as writing."""
        return sum(parameter._version for parameter in self._trainer.model.parameters())


def _since(started: float) -> float:
    return (time.perf_counter() - started) * 1e3
