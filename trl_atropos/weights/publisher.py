"""Publishing: how a new policy reaches the servers that sample from it, the same for every mode.

    hold -> (a checkpoint may be loaded) -> begin -> [step -> publish] -> [step -> publish] -> close

A publish pauses the servers, sends the weights, lets the servers resume, and begins to prove that
they have the trainer's weights: `Proof` compares fingerprints, and `Probe` log-probabilities. The
servers resume, and compute their part of the proof, in the background. So a publish is judged only
before the next backward pass (`judge_last_publish`), which raises if the publish went wrong.

If servers and trainer share memory (`Transfer.steps_in_place`), the optimizer's step writes into
the servers' weights. So the servers pause before the step. In all other modes, they pause after it.

The trainer calls its publisher on every rank, as `policy_publisher.py` describes. `Phase` lists the
states of the servers, and the methods of `ServerPublisher` that change them stand together. A
`Transfer`, one for each `vllm_mode`, moves the weights between pause and resume.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from enum import Enum, auto
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.modeling_layers import GradientCheckpointingLayer

from trl_atropos.activity import activity
from trl_atropos.config import AtroposGRPOConfig
from trl_atropos.distributed import on_main, together
from trl_atropos.errors import AttachError, ServerError
from trl_atropos.metrics.timing import PUBLISH
from trl_atropos.modes import MODES, AdapterWay
from trl_atropos.protocol import ServerInfo, tokenizer_fingerprint
from trl_atropos.server_client import Servers
from trl_atropos.services.signals import deferred
from trl_atropos.weights.colocate import Colocate
from trl_atropos.weights.fingerprints import Proof
from trl_atropos.weights.full_weights import FullWeights, Restart
from trl_atropos.weights.lora import FileLora, MemoryLora
from trl_atropos.weights.policy_publisher import NullPublisher, PolicyPublisher, do_nothing
from trl_atropos.weights.probe import Probe
from trl_atropos.weights.transfer import Transfer, leave_room, shares_gpu

logger = logging.getLogger(__name__)


def publisher_of(args: AtroposGRPOConfig) -> PolicyPublisher:
    """Returns the policy publisher that the configuration names."""
    if args.replay_paths is not None:
        return NullPublisher()
    servers = Servers(args.vllm_server_urls, args.publish_timeout)
    transfer = transfer_of(args.vllm_mode, servers, args.weight_transport, args.output_dir)
    sleep_level = args.vllm_sleep_level if args.vllm_enable_sleep_mode else 0
    return ServerPublisher(transfer, args.probe_every_n_steps, args.sync_every_n_steps, sleep_level)


def transfer_of(mode: str, servers: Servers, transport: str, output_dir: str) -> Transfer:
    """Returns the transfer of a `vllm_mode`. Modes that write files write below `output_dir`."""
    match mode:
        case "colocate":
            return Colocate(servers)
        case "server":
            return FullWeights(servers, transport)
        case "nccl_lora":
            return MemoryLora(servers, transport)
        case "lora":
            return FileLora(servers, f"{output_dir}/adapters")
        case "restart":
            return Restart(servers, f"{output_dir}/policies")
    raise AttachError(
        f"`vllm_mode` is {mode!r}", f"vllm_mode: {mode}", f"Set it to one of: {', '.join(MODES)}."
    )


class Phase(Enum):
    """
    State of the servers, as this trainer has left them. Each arrow is a method of
    `ServerPublisher`::

        SAMPLING --before_step or _pause--> PAUSING --_pause--> PAUSED (or HELD, if `hold` pauses)
        PAUSED --let_servers_sleep--> ASLEEP
        PAUSED, HELD or ASLEEP --_resume--> RESUMING --_await_resumed--> SAMPLING
        any --close--> SAMPLING

    If a server fails to pause or to resume, the state is SAMPLING too, though some servers may be
    paused: we know nothing of them, so `close` must not resume them. Any other error keeps the
    state. `close` first resumes servers that are PAUSING, or HELD with unchanged weights. A server
    that is still paused when `close` ends its lease decides by itself: it exits if its weights may
    be torn.
    """

    SAMPLING = auto()  # or unknown, after a server has failed
    PAUSING = auto()  # in the background, while the device computes the last gradients
    HELD = auto()  # paused by `hold`: nothing is written, unless a checkpoint is loaded
    PAUSED = auto()  # the trainer writes to the weights
    ASLEEP = auto()  # paused, and without the memory of its weights and its KV cache
    RESUMING = auto()  # in the background, while the trainer goes on

    @property
    def is_paused(self) -> bool:
        """True if the servers sample nothing until they are resumed."""
        return self in (Phase.HELD, Phase.PAUSED, Phase.ASLEEP)


class ServerPublisher(PolicyPublisher):
    """
    Publishes to vLLM servers.

    Args:
        transfer (`Transfer`): Moves the weights as the mode does.
        probe_every_n_steps (`int`, *optional*): Publishes between two probes, which compare server
            and trainer; 0: no probes. By default as many as take at most 2 % of the time.
        sync_every_n_steps (`int`): Optimizer steps between two publishes.
        sleep_level (`int`): vLLM's sleep level while the trainer computes; 0 for none.
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
        self._trainer_version = 0  # optimizer steps since the run began
        self._phase = Phase.SAMPLING
        # In PAUSING and RESUMING: done when all servers have paused or resumed.
        self._call: Future | None = None
        self._writes_when_held = 0  # see `_count_writes`
        self._backward_ends: torch.cuda.Event | None = None
        self._probe: Probe | None = None
        self._proof = Proof(self.servers, [])  # compares nothing until `attach`

    @property
    def adapter_way(self) -> AdapterWay:
        return self.transfer.mode.adapter_way

    @property
    def memory_is_opened(self) -> bool:
        return self.transfer.memory_is_opened

    @property
    def trainer_version(self) -> int:
        return self._trainer_version

    def load(self, model: Any, args: Any, peft_config: Any = None) -> Any:
        self.transfer, model = self.transfer.load(model, args, peft_config)
        info = self.servers.info
        self.policy_version = info.policy_version
        _require_settings(info, args)
        if self.sleep_level and not info.sleep:
            raise AttachError(
                "`vllm_enable_sleep_mode` is set: start the server with `--enable-sleep-mode`."
            )
        return model

    def attach(self, trainer: Any) -> None:
        _require_vocabulary(self.servers.info, trainer.processing_class)
        self.servers.hold_leases()
        device = trainer.accelerator.device
        # A server that sleeps makes room by itself.
        if shares_gpu(self.servers, device) and not self.sleep_level:
            leave_room(device)
        self.transfer.attach(trainer)
        self._trainer = trainer
        self._proof = Proof(self.servers, self.transfer.fingerprinted())
        in_place = self.transfer.steps_in_place
        if self.probe_every_n_steps != 0:
            self._probe = Probe(
                self.servers,
                trainer,
                self.probe_every_n_steps,
                in_place,
                prove=self._proof.compare_all_anew,
            )
        if in_place and device.type == "cuda":
            self._backward_ends = _end_of_backward(trainer.model)

    def server_max_length(self) -> int:
        return self.servers.info.max_model_len

    def why_silent(self) -> str:
        if self._phase.is_paused:
            return ""
        # This takes seconds. A publish may pause the servers meanwhile, and then silence is right.
        problems = self.servers.silence()
        if self._phase.is_paused:
            return ""
        return " ".join(problems)

    def begin(self, optimizer: Any, first_version: int) -> None:
        self._trainer_version = first_version
        self._proof.forget()
        if self._probe is not None:
            self._probe.forget()
        with activity("Publishing the first policy, and comparing it with the server's"):
            self._publish(do_nothing)
            self._judge_weights()
        if self._probe is not None:
            with activity("Comparing server and trainer on long sequences"):
                self._probe.run_longest()
        step = optimizer.step

        def step_and_publish(*args, **kwargs):
            if not optimizer.gradient_state.sync_gradients:
                return step(*args, **kwargs)

            def make_version() -> Any:
                result = step(*args, **kwargs)
                # A gradient scaler that found no finite gradient skips the step.
                if not optimizer.step_was_skipped:
                    self._trainer_version += 1
                return result

            next_version = self._trainer_version + 1
            due = next_version % self.sync_every_n_steps == 0 or self._is_last()
            return self._publish(make_version, due)

        self._wrap_step(optimizer, step_and_publish)

    def replace(self, load: Callable[[], None]) -> None:
        """Calls `load`. Servers that share the trainer's memory are paused meanwhile; others go on
        with the weights of the last step."""
        if self.transfer.steps_in_place:
            self._publish(load)
        else:
            load()

    def judge_last_publish(self) -> None:
        """Judges the last publish: raises if the servers did not resume, have other weights than
        the trainer, or compute other log-probabilities."""
        with self.stopwatch.part(PUBLISH):
            self._judge_weights()
            self._judge_probe()

    def probe(self) -> float:
        """Returns the largest difference between server and trainer in a new probe, in nats, on
        every rank."""
        self._probe.begin(self.policy_version)
        return self._judge_probe()

    def _publish(self, change_weights: Callable[[], Any], due: bool = True) -> Any:
        """Calls `change_weights` and publishes the new weights if that is `due`. Also publishes if
        the servers are paused: a pause must end in a publish. Returns what `change_weights`
        returns."""
        self.judge_last_publish()
        steps_in_place = self.transfer.steps_in_place
        # Ctrl-C must not leave weights half written, nor a server paused: it would take its weights
        # for torn and exit.
        with deferred():
            if steps_in_place:
                with self.stopwatch.part(PUBLISH):
                    self._pause_for_publish()
            result = change_weights()
            # The device may still be at it, and the publish must not overtake it.
            _synchronize()
            if due or self._phase.is_paused:
                with self.stopwatch.part(PUBLISH):
                    if not steps_in_place:
                        self._pause_for_publish()
                    self._send()
                    self._resume()
        if due:
            with self.stopwatch.part(PUBLISH):
                self._prove()
        return result

    def _pause_for_publish(self) -> None:
        self._pause()
        self.on_pause()

    def _is_last(self) -> bool:
        """Returns whether the step that is being taken is the run's last. `begin` publishes before
        any step: there this is already true if one step is left, which changes nothing, because
        `begin` judges its publish at once anyway."""
        return self._trainer.state.global_step + 1 >= self._trainer.args.max_steps

    # ---------------------------------------------------------------- the arrows between two phases

    def _enter(self, phase: Phase, call: Future | None = None) -> None:
        """Enters a phase. `call` is what the servers do meanwhile, in the background."""
        self._call = call
        self._phase = phase

    def hold(self) -> None:
        self.servers.hold_leases()  # again, if `close` has ended an earlier training
        if self.transfer.steps_in_place:
            self._writes_when_held = self._count_writes()
            with deferred():
                self._pause(Phase.HELD)

    def _count_writes(self) -> int:
        """Returns how often torch has written parameters in place. If the count has risen since
        `hold`, a checkpoint was loaded. Do not count an optimizer's steps by it: its kernels may
        write uncounted."""
        return sum(parameter._version for parameter in self._trainer.model.parameters())

    def before_step(self) -> None:
        """Lets the servers pause while the device still computes the gradients of the first
        layers."""
        if self.transfer.steps_in_place and self._phase is Phase.SAMPLING:
            if self._backward_ends is not None:
                self._backward_ends.synchronize()
            self._enter(Phase.PAUSING, self.transfer.pause())

    def _pause(self, phase: Phase = Phase.PAUSED) -> None:
        """Returns when the servers have paused. Enters `phase`, unless they were paused before."""
        if self._phase.is_paused:
            return
        together(self.transfer.check)
        if self._phase is not Phase.PAUSING:
            self._enter(Phase.PAUSING, self.transfer.pause())
        try:
            together(self._call.result)
        except BaseException:
            # Some servers may be paused. `close` must not resume them: see `Phase`.
            self._enter(Phase.SAMPLING)
            raise
        self._enter(phase)

    def let_servers_sleep(self) -> None:
        """Lets the servers sleep: the trainer computes until the next publish, which wakes them up.
        Servers that can sleep share no memory with the trainer: `steps_in_place` is false."""
        if self.sleep_level and self._phase is not Phase.ASLEEP:
            with deferred(), self.stopwatch.part(PUBLISH):
                self.judge_last_publish()
                self._pause()
                self.servers.each(lambda client: client.sleep(self.sleep_level))
                self._enter(Phase.ASLEEP)

    def _send(self) -> None:
        """Sends the trainer's weights to the paused servers, which wake up for it."""
        asleep = self._phase is Phase.ASLEEP
        if asleep:
            self.servers.each(lambda client: client.wake("weights"))
        self.transfer.send(self._trainer_version)
        _synchronize()  # copies into the server's memory are only queued, too
        if asleep:
            self.servers.each(lambda client: client.wake("kv_cache"))

    def _resume(self) -> None:
        """Lets the servers sample from the new version, in the background."""
        self._enter(Phase.RESUMING, self.transfer.resume(self._trainer_version))
        self.policy_version = self._trainer_version

    def _await_resumed(self) -> None:
        """Returns when the servers sample again. Raises if one fails to."""
        if self._phase is Phase.RESUMING:
            resuming = self._call
            self._enter(Phase.SAMPLING)  # also if it fails
            together(resuming.result)

    def close(self) -> None:
        """Ends publishing and releases the leases. A server that is paused then goes on with whole
        weights, and exits with torn ones."""
        # Servers that `hold` has paused have whole weights unless a checkpoint was loaded since.
        is_unwritten = False
        if self._phase is Phase.HELD:
            is_unwritten = self._count_writes() == self._writes_when_held
        if self._phase is Phase.PAUSING or is_unwritten:
            self._enter(Phase.RESUMING, self.transfer.resume(self.policy_version))
        if self._phase is Phase.RESUMING:
            try:
                self._call.result()
            except ServerError as error:  # if the server lives, the end of the lease lets it decide
                logger.warning("%s", error)
        self._enter(Phase.SAMPLING)
        self.servers.release_leases()
        super().close()

    # ------------------------------------------------------------------------------------ the proof

    def _prove(self) -> None:
        """Begins to compare fingerprints and, if one is due, a probe. Both are judged before the
        next backward pass, or at once if none follows."""
        self._proof.begin(self.policy_version)
        if self._proof.begun and self._is_last():
            self._judge_weights()
        if self._probe is not None:
            self._run_probe()

    def _judge_weights(self) -> None:
        """Raises unless the servers sample again, from the trainer's weights."""
        self._await_resumed()
        self._proof.judge()

    def _run_probe(self) -> None:
        """Begins a probe if the schedule finds one due after this publish. Judges it at once after
        the first publish and the last."""
        schedule = self._probe.schedule
        is_last = self._is_last()

        def decide() -> tuple[bool, bool, bool]:
            due = schedule.count_publish(time.perf_counter(), is_last)
            is_first = schedule.publishes == 1
            return due, is_first or is_last, schedule.long

        # Rank 0 decides: clocks of ranks differ, and only its schedule counts publishes.
        due, at_once, long = on_main(decide)
        if due:
            self._probe.begin(self.policy_version, long)
            if at_once:
                self._judge_probe()

    def _judge_probe(self) -> float | None:
        """Judges a probe that has begun. Returns its largest difference in nats, or `None` without
        a probe."""
        if self._probe is None or not self._probe.begun:
            return None
        began = time.perf_counter()
        result = self._probe.judge()
        ended = time.perf_counter()
        seconds = ended - began
        self._probe.schedule.ran(seconds, ended)
        # Two readers: the summary of the run takes its worst probe, and the log takes each. The log
        # repeats the first probe's difference, because rounding is judged in proportion to it.
        self.probe_max_abs_diff = max(self.probe_max_abs_diff or 0.0, result.max_abs_diff)
        for name, value in result._asdict().items():
            self._metrics[f"policy/probe_{name}"].append(value)
        self._metrics["policy/probe_first_mean_abs_diff"].append(self._probe.first.mean_abs_diff)
        self._metrics["time/probe"].append(seconds)
        return result.max_abs_diff


def _require_settings(info: ServerInfo, args: Any) -> None:
    """Raises `AttachError` if the server was not started for this configuration."""
    if info.logprobs_mode != "processed_logprobs":
        raise AttachError(
            f"The server returns {info.logprobs_mode}, which ignore the sampling temperature. "
            "Start it with `--logprobs-mode processed_logprobs`, or by `trl-atropos serve`, "
            "which sets it."
        )
    if info.numerics != args.numerics:
        raise AttachError(
            f"The server computes with `--numerics {info.numerics}` and the trainer with "
            f"`numerics: {args.numerics}`: start the server by `trl-atropos serve --numerics "
            f"{args.numerics}`."
        )
    if args.numerics == "bitwise" and info.num_workers > 1:
        raise AttachError(
            "`numerics: bitwise` needs a server with one worker, and this one has "
            f"{info.num_workers}, which add up sums in parts: start one without "
            "`--tensor-parallel-size` and `--data-parallel-size`."
        )
    longest = args.max_sequence_length
    if longest is not None and longest > info.max_model_len:
        raise AttachError(
            f"`max_sequence_length` is {longest}, but the server's max_model_len is "
            f"{info.max_model_len}: lower it, or start the server with `--max-model-len "
            f"{longest}`."
        )


def _require_vocabulary(info: ServerInfo, tokenizer: Any) -> None:
    """Raises `AttachError` if the server's tokenizer has another vocabulary than the trainer's."""
    if info.tokenizer_fingerprint is None or not isinstance(tokenizer, PreTrainedTokenizerBase):
        return
    if tokenizer_fingerprint(tokenizer.get_vocab()) != info.tokenizer_fingerprint:
        raise AttachError(
            f"The trainer's tokenizer ({tokenizer.name_or_path}) and that of the server "
            f"({info.model}) have different vocabularies, so the same ids mean different text. "
            "Give both the same tokenizer."
        )


def _end_of_backward(model: torch.nn.Module) -> torch.cuda.Event:
    """Returns an event that the device reaches milliseconds before a backward pass ends: the
    gradient of the third layer."""
    event = torch.cuda.Event()

    def record(_: torch.Tensor) -> None:
        event.record()

    layers = [
        module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    parameters = list(model.parameters())
    if len(layers) > 2:
        parameters = [*layers[2].parameters(), *parameters]
    trained = next(parameter for parameter in parameters if parameter.requires_grad)
    trained.register_post_accumulate_grad_hook(record)
    return event


def _synchronize() -> None:
    """Returns when the device has done what is queued on it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
