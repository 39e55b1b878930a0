"""How a new policy reaches the servers that sample from it: the life of a publish, written once for
every mode.

    hold -> (a checkpoint may be loaded) -> begin -> [pause -> send -> version + n -> resume ->
    (probe begins)]*

The trainer calls its `PolicyPublisher` on every rank: `load` and `attach` while it is built,
`hold`, `begin` and `close` around training. `begin` wraps `optimizer.step` itself: callbacks and
torch's step hooks are skipped when it raises. What moves between pause and resume is the business
of a `Transfer`, one for each `vllm_mode`.
"""

import functools
import itertools
import logging
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.modeling_layers import GradientCheckpointingLayer

from trl_atropos.config import AtroposGRPOConfig
from trl_atropos.distributed import on_main, together
from trl_atropos.errors import AttachError, ServerError
from trl_atropos.metrics.timing import PUBLISH, Stopwatch
from trl_atropos.protocol import tokenizer_fingerprint
from trl_atropos.server_client import Servers
from trl_atropos.services.signals import deferred
from trl_atropos.weights.adapters import Way
from trl_atropos.weights.colocate import Colocate
from trl_atropos.weights.fingerprints import Proof
from trl_atropos.weights.full_weights import FullWeights, Restart
from trl_atropos.weights.lora import FileLora, MemoryLora
from trl_atropos.weights.probe import Probe
from trl_atropos.weights.transfer import Transfer, leave_room, shares_gpu

logger = logging.getLogger(__name__)


class PolicyPublisher:
    """
    By itself, counts versions and publishes nothing.

    Attributes:
        policy_version (`int`): Version of the weights that the server samples from: one per
            optimizer step.
        probe_max_abs_diff (`float`, *optional*): Largest difference between server and trainer that
            any probe has seen, in nats (natural logarithm of a probability).
        stopwatch (`Stopwatch`): The trainer's. All but the optimizer's step must be in its part
            `publish`.
        on_pause (`Callable`): Called on every rank once in a publish, while the servers are paused:
            requests that come now begin with the next version.
    """

    def __init__(self):
        self.policy_version = 0
        self.probe_max_abs_diff: float | None = None
        self.stopwatch = Stopwatch()
        self.on_pause: Callable[[], None] = lambda: None
        self._unwrap: Callable[[], None] = lambda: None
        self._metrics: dict[str, list[float]] = defaultdict(list)

    @property
    def adapter_way(self) -> Way:
        """How an adapter reaches the servers."""
        return None

    @property
    def trainer_version(self) -> int:
        """Version of the weights that the trainer has: a batch that it gets now is trained at this
        version."""
        return self.policy_version

    def load(self, model: Any, args: Any, peft_config: Any = None) -> Any:
        """Called with the trainer's arguments before it is built. Returns the model that it shall
        use."""
        return model

    def attach(self, trainer: Any) -> None:
        """Called once `trainer`, the `AtroposGRPOTrainer`, is built."""

    def hold(self) -> None:
        """From here to `begin`, nothing may be sampled: a checkpoint may be loaded into the
        weights."""

    def begin(self, optimizer: Any, policy_version: int) -> None:
        """Publishes the weights that training starts with, and wraps `optimizer.step` to publish
        all that follow."""
        self.policy_version = policy_version
        step = optimizer.step

        def counted(*args, **kwargs):
            result = step(*args, **kwargs)
            if optimizer.gradient_state.sync_gradients and not optimizer.step_was_skipped:
                self.policy_version += 1
            return result

        self._wrap_step(optimizer, counted)

    def computing(self) -> None:
        """Called when the trainer has a batch and needs no samples before the next publish."""

    def before_backward(self) -> None:
        """Called on every rank before a backward pass, in which DeepSpeed changes the weights."""

    def before_step(self) -> None:
        """Called on every rank when all that comes before an optimizer step is queued on the
        device."""

    def replace(self, load: Callable[[], None]) -> None:
        """Has `load` replace the trainer's weights after the last step."""
        load()

    def close(self) -> None:
        """Called on every way out, also after an error; may be called twice."""
        self._unwrap()
        self._unwrap = self.on_pause = lambda: None

    def server_max_length(self) -> int | None:
        """Most tokens that a rollout of the server can have, or `None` if there is no server."""
        return None

    def why_silent(self) -> str:
        """What is wrong with servers that sample nothing. Called on rank 0, from any thread, when
        no rollouts come."""
        return ""

    def pop_metrics(self) -> dict[str, float]:
        """Mean of each metric since the last call."""
        means = {name: sum(values) / len(values) for name, values in self._metrics.items()}
        self._metrics.clear()
        return means

    def _wrap_step(self, optimizer: Any, wrapper: Callable[..., Any]) -> None:
        """Puts `wrapper` in place of `optimizer.step` until `close`."""
        step = optimizer.step
        # Keeps the mark by which torch's schedulers recognise a step that they count.
        optimizer.step = functools.update_wrapper(wrapper, step)
        self._unwrap = lambda: setattr(optimizer, "step", step)


class NullPublisher(PolicyPublisher):
    """For a policy that nothing samples from (recorded rollouts, say): counts versions and
    publishes nothing."""


def publisher_of(args: AtroposGRPOConfig) -> PolicyPublisher:
    """The policy publisher that the configuration names."""
    if args.replay_paths is not None:
        return NullPublisher()
    servers = Servers(args.vllm_server_urls, args.publish_timeout)
    transfer = transfer_of(args.vllm_mode, servers, args.weight_transport, args.output_dir)
    sleep_level = args.vllm_sleep_level if args.vllm_enable_sleep_mode else 0
    return ServerPublisher(transfer, args.probe_every_n_steps, args.sync_every_n_steps, sleep_level)


def transfer_of(mode: str, servers: Servers, transport: str, output_dir: str) -> Transfer:
    """The transfer of a `vllm_mode`. `output_dir` is for modes that write files."""
    return {
        "colocate": lambda: Colocate(servers),
        "server": lambda: FullWeights(servers, transport),
        "nccl_lora": lambda: MemoryLora(servers, transport),
        "lora": lambda: FileLora(servers, f"{output_dir}/adapters"),
        "restart": lambda: Restart(servers, f"{output_dir}/policies"),
    }[mode]()


class ServerPublisher(PolicyPublisher):
    """
    Args:
        transfer (`Transfer`): How the mode moves the bytes.
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
        self._steps = 0  # of the optimizer since the run began: the version that the trainer has
        self._paused = self._asleep = False
        self._pausing: Future | None = None  # since `before_step`
        self._resuming: Future | None = None  # since the last publish
        self._backward_ends: torch.cuda.Event | None = None
        self._writes_when_held: int | None = None
        self._probe: Probe | None = None
        self._proof = Proof(self.servers, [])  # of nothing, until `attach`

    @property
    def adapter_way(self) -> Way:
        return self.transfer.adapter_way

    @property
    def trainer_version(self) -> int:
        return self._steps

    def load(self, model: Any, args: Any, peft_config: Any = None) -> Any:
        self.transfer, model = self.transfer.load(model, args, peft_config)
        info = self.servers.info
        self.policy_version = info.policy_version
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
        if self.sleep_level and not info.sleep:  # a server that sleeps never shares its memory
            raise AttachError(
                "`vllm_enable_sleep_mode` is set: start the server with `--enable-sleep-mode`."
            )
        return model

    def attach(self, trainer: Any) -> None:
        info = self.servers.info
        tokenizer = trainer.processing_class
        comparable = (
            isinstance(tokenizer, PreTrainedTokenizerBase)
            and info.tokenizer_fingerprint is not None
        )
        if (
            comparable
            and tokenizer_fingerprint(tokenizer.get_vocab()) != info.tokenizer_fingerprint
        ):
            raise AttachError(
                f"The trainer's tokenizer ({tokenizer.name_or_path}) and that of the server "
                f"({info.model}) have different vocabularies, so the same ids mean different text. "
                "Give both the same tokenizer."
            )
        self.servers.hold_leases()
        # what sleeps makes room
        if shares_gpu(self.servers, trainer.accelerator.device) and not self.sleep_level:
            leave_room(trainer.accelerator.device)
        self.transfer.attach(trainer)
        self._trainer = trainer
        self._proof = Proof(self.servers, self.transfer.fingerprinted())
        if self.probe_every_n_steps != 0:
            one_memory = self.transfer.steps_in_place
            self._probe = Probe(
                self.servers, trainer, self.probe_every_n_steps, one_memory, self._proof.again
            )
        if self.transfer.steps_in_place and trainer.accelerator.device.type == "cuda":
            self._backward_ends = _end_of_backward(trainer.model)

    def server_max_length(self) -> int:
        return self.servers.info.max_model_len

    def why_silent(self) -> str:
        wrong = "" if self._paused or self._asleep else " ".join(self.servers.silence())
        return "" if self._paused or self._asleep else wrong  # a publish may have begun meanwhile

    def hold(self) -> None:
        self.servers.hold_leases()  # again, where `close` has ended an earlier training
        self._writes_when_held = self._writes()
        if self.transfer.steps_in_place:
            with deferred():
                self._pause()

    def begin(self, optimizer: Any, policy_version: int) -> None:
        self._steps = policy_version
        self._proof.forget()
        if self._probe is not None:
            self._probe.forget()
        self._publish(lambda: None)
        self._judge_weights()
        if self._probe is not None:
            self._probe.run_longest()
        self._writes_when_held = None  # an optimizer's kernels may write without being counted
        step = optimizer.step

        def published(*args, **kwargs):
            if not optimizer.gradient_state.sync_gradients:
                return step(*args, **kwargs)
            due = (self._steps + 1) % self.sync_every_n_steps == 0 or self._is_last()
            return self._publish(lambda: step(*args, **kwargs), optimizer, due)

        self._wrap_step(optimizer, published)

    def computing(self) -> None:
        """The trainer will compute until the next publish: the server may sleep."""
        if self.sleep_level and not self._asleep:
            with deferred(), self.stopwatch.part(PUBLISH):
                self.before_backward()
                self._pause()
                self.servers.each(lambda client: client.sleep(self.sleep_level))
                self._asleep = True

    def before_backward(self) -> None:
        with self.stopwatch.part(PUBLISH):
            self._judge_weights()
            self._judge_probe()

    def before_step(self) -> None:
        """Has the servers pause while the device is still at the gradients of the first layers."""
        if self.transfer.steps_in_place and self._pausing is None:
            if self._backward_ends is not None:
                self._backward_ends.synchronize()
            self._pausing = self.transfer.pause()

    def _judge_weights(self) -> None:
        """That the servers sample again, and from the trainer's weights."""
        resuming = self._resuming
        self._resuming = None
        if resuming is not None:
            together(resuming.result)
        self._proof.judge()

    def _publish(self, step: Callable[[], Any], optimizer: Any = None, due: bool = True) -> Any:
        self.before_backward()
        # Ctrl-C must not leave weights half written, nor a server paused, which would take its
        # weights for torn.
        with deferred():
            if self.transfer.steps_in_place:
                with self.stopwatch.part(PUBLISH):
                    self._pause()
                    self.on_pause()
            result = step()
            # A gradient scaler that found no finite gradient skips the step: then nothing is new.
            if optimizer is not None and not optimizer.step_was_skipped:
                self._steps += 1
            # the step is only queued on the device, and publishing must not overtake it
            _synchronize()
            if due or self._paused:
                with self.stopwatch.part(PUBLISH):
                    self._send()
        if due:
            with self.stopwatch.part(PUBLISH):
                self._proof.begin(self.policy_version)
                if self._proof.begun and self._is_last():
                    self._judge_weights()
                self._run_probe()
        return result

    def _is_last(self) -> bool:
        """Whether no publish comes after this one."""
        return self._trainer.state.global_step + 1 >= self._trainer.args.max_steps

    def replace(self, load: Callable[[], None]) -> None:
        """Other servers go on with the weights of the last step. Those that share the memory are
        paused."""
        self._publish(load) if self.transfer.steps_in_place else load()

    def _pause(self) -> None:
        if not self._paused:
            together(self.transfer.check)
            pausing = self._pausing or self.transfer.pause()
            self._pausing = None
            together(pausing.result)
            self._paused = True

    def _send(self) -> None:
        self._pause()
        if not self.transfer.steps_in_place:
            self.on_pause()
        if self._asleep:
            self.servers.each(lambda client: client.wake("weights"))
        self.transfer.send(self._steps)
        _synchronize()  # copies into the server's memory are only queued, too
        if self._asleep:
            self.servers.each(lambda client: client.wake("kv_cache"))
            self._asleep = False
        self._resuming = self.transfer.resume(self._steps)
        self._paused = False
        self.policy_version = self._steps

    def close(self) -> None:
        """Releases the leases. A server that is paused then goes on with whole weights, and exits
        with torn ones."""
        # Nothing was written if the optimizer's step has not begun, or since `hold`: the weights
        # are whole.
        held = (
            self._paused
            and self.transfer.steps_in_place
            and self._writes() == self._writes_when_held
        )
        if held or self._pausing is not None:
            self._resuming = self.transfer.resume(self.policy_version)
        if self._resuming is not None:
            try:
                self._resuming.result()
            except ServerError as error:  # if the server lives, the end of the lease lets it decide
                logger.warning("%s", error)
        self._paused = False
        self._asleep = False
        self._pausing = None
        self._resuming = None
        self.servers.release_leases()
        super().close()

    def _writes(self) -> int:
        """Counts in-place writes to the parameters, to tell whether loading a checkpoint has
        written any."""
        return sum(parameter._version for parameter in self._trainer.model.parameters())

    def probe(self) -> float:
        """Largest difference between what the servers sample and what the trainer computes, in
        nats, on every rank."""
        self._probe.begin(self.policy_version)
        return self._judge_probe()

    def _run_probe(self) -> None:
        """Begins a probe if one is due. It is judged before the next publish, and at once where
        none will come."""
        if self._probe is None:
            return
        schedule = self._probe.schedule
        last = self._is_last()
        # Rank 0 decides: the others' clocks differ, and their schedules do not count.
        due, at_once, long = on_main(
            lambda: (
                schedule.due(time.perf_counter(), last),
                last or schedule.publishes == 1,
                schedule.long,
            )
        )
        if due:
            self._probe.begin(self.policy_version, long)
            if at_once:
                self._judge_probe()

    def _judge_probe(self) -> float | None:
        if self._probe is None or not self._probe.begun:
            return None
        began = time.perf_counter()
        result = self._probe.judge()
        difference = result.max_abs_diff
        ended = time.perf_counter()
        self._probe.schedule.ran(ended - began, ended)
        self.probe_max_abs_diff = max(self.probe_max_abs_diff or 0.0, difference)
        for name, value in result._asdict().items():
            self._metrics[f"policy/probe_{name}"].append(value)
        self._metrics["policy/probe_first_mean_abs_diff"].append(self._probe.first.mean_abs_diff)
        self._metrics["time/probe"].append(ended - began)
        return difference


def _end_of_backward(model: torch.nn.Module) -> torch.cuda.Event:
    """What the device comes to milliseconds before the end of a backward pass: the gradient of the
    third layer."""
    event = torch.cuda.Event()
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    parameters = itertools.chain(*(layer.parameters() for layer in layers[2:3]), model.parameters())
    trained = next(parameter for parameter in parameters if parameter.requires_grad)
    trained.register_post_accumulate_grad_hook(lambda _: event.record())
    return event


def _synchronize() -> None:
    """Waits for what is queued on the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
