"""The trainers that `trl-atropos bench step` compares, and the batches that they train on."""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, PrinterCallback, TrainerCallback
from transformers.utils.logging import disable_progress_bar
from trl import GRPOConfig, GRPOTrainer

from benchmarks.models import dtype, make_model
from benchmarks.packed_loop import PackedLoop
from trl_atropos import AtroposGRPOConfig, AtroposGRPOTrainer
from trl_atropos.batches.inputs import columns
from trl_atropos.batches.micro_batches import plan
from trl_atropos.metrics.flops import AttentionFlops, flops_per_token
from trl_atropos.rollouts.intake import Intake
from trl_atropos.rollouts.rollout import Rollout
from trl_atropos.rollouts.source import RolloutSource
from trl_atropos.rollouts.wire import read_group
from trl_atropos.trainer import atropos_score

BATCHES = 1000  # of the table of ranks
STEPS = 2  # that each trainer takes; the last is measured
# The plain loop takes more: torch compiles again when the second step finds gradients to add to.
LOOP_STEPS = 4
COMPILATIONS = 64  # of the code of a layer, in all rounds together
PACKED_LOOP = "packed_loop"  # is no trainer
VOCABULARY = 256


class StepTime(TrainerCallback):
    """
    Attributes:
        step (`float`): Seconds of the last optimizer step, forward passes before it included.
        training_pass (`float`): Of these, from the first forward with gradients to the optimizer.
        tokens (`int`): That the training pass works on, padding included.
        kernels (`int`): That a step starts on a GPU.
    """

    def watch(self, model: torch.nn.Module) -> None:
        model.register_forward_pre_hook(self._on_forward, with_kwargs=True)

    def _on_forward(self, module, arguments, options):
        if not torch.is_grad_enabled():
            return
        if not self.tokens:
            self._pass_began = _now()
        self.tokens += options["input_ids"].numel()

    kernels = 0

    def on_step_begin(self, args, state, control, **kwargs):
        self.tokens = 0
        if state.global_step == STEPS:  # one more, which is not timed
            self._counted = ExitStack()
            self._count = self._counted.enter_context(kernels())
        self._began = _now()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step < STEPS:
            self.training_pass = _now() - self._pass_began

    def on_step_end(self, args, state, control, **kwargs):
        seconds = _now() - self._began
        if state.global_step <= STEPS:
            self.step = seconds
        else:
            self._counted.close()
            self.kernels = self._count()


@contextmanager
def kernels() -> Iterator[Callable[[], int]]:
    """Counts what is started on the GPU. Yields what says, after the context, how many that
    were."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        yield lambda: sum(
            event.device_type() == DeviceType.CUDA
            for event in profiler.profiler.kineto_results.events()
        )
        if torch.cuda.is_available():
            torch.cuda.synchronize()


class InStep(TrainerCallback):
    """Has TRL believe that vLLM has its weights."""

    def __init__(self, trainer: GRPOTrainer):
        self._trainer = trainer

    def on_step_begin(self, args, state, control, **kwargs):
        self._trainer._last_loaded_step = state.global_step


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def lengths_of(
    generator: np.random.Generator, shape: str, number: int, options: argparse.Namespace
) -> np.ndarray:
    """Completion lengths of `number` rows, in tokens."""
    longest = options.longest - options.prompt
    if shape == "equal":
        return np.full(number, min(longest, options.median))
    drawn = np.exp(generator.normal(np.log(options.median), options.sigma, number))
    return np.clip(np.rint(drawn), 1, longest).astype(int)


def make_rows(shape: str, options: argparse.Namespace) -> list[Rollout]:
    """A batch as it comes from the API, with scores that differ within each group."""
    generator = np.random.default_rng(0)
    prompt = options.prompt
    lengths = lengths_of(generator, shape, options.rows, options)
    groups = []
    for completions in lengths.reshape(-1, options.group_size):
        start = generator.integers(0, VOCABULARY, prompt).tolist()
        sequences = [
            start + generator.integers(0, VOCABULARY, length).tolist() for length in completions
        ]
        groups.append(
            {
                "tokens": sequences,
                "masks": [[-100] * prompt + tokens[prompt:] for tokens in sequences],
                "scores": generator.normal(size=options.group_size).tolist(),
                "inference_logprobs": [
                    [1.0] * prompt + (-5 - generator.random(len(tokens) - prompt)).tolist()
                    for tokens in sequences
                ],
            }
        )
    return Intake(options.longest, 1.0, "refuse").admit(map(read_group, groups))


class OneBatch(RolloutSource):
    """Hands out the same rollouts whenever it is asked."""

    def __init__(self, rows: list[Rollout]):
        self._rows = rows

    def start(self, run: Any) -> None:
        pass

    def poll(self, num_rows: int, timeout: float) -> list[Rollout]:
        assert num_rows == len(self._rows)
        return self._rows


def _settings(
    folder: Path, name: str, rows: list[Rollout], options: argparse.Namespace
) -> dict[str, Any]:
    micro_batch = options.micro_batch
    accumulate = options.rows // options.micro_batch
    if name == "tokens":
        micro_batch = options.rows
        accumulate = 1
    cuda = torch.cuda.is_available()
    return {
        "output_dir": str(folder / name),
        # The first warms up: kernels, memory, the optimizer's state.
        "max_steps": STEPS + cuda,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": accumulate,
        "gradient_checkpointing": options.gradient_checkpointing,
        "max_completion_length": options.longest,
        "learning_rate": 1e-6,
        "model_init_kwargs": {"dtype": dtype()},
        "vllm_importance_sampling_mode": "token_truncate",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": not cuda,
        "bf16": False,
        "disable_tqdm": True,
    }


def _make_trainer(
    name: str, model: Path, folder: Path, rows: list[Rollout], options: argparse.Namespace
) -> GRPOTrainer:
    settings = _settings(folder, name, rows, options)
    adapter = None
    if options.lora_r:
        adapter = LoraConfig(r=options.lora_r, target_modules="all-linear", task_type="CAUSAL_LM")
    if name != "trl":
        config = AtroposGRPOConfig(
            **settings,
            gradient_checkpointing_kwargs={"selective": True} if options.selective else None,
            attention_kernel=options.attention_kernel,
            replay_paths=["given as rollout_source"],
            max_tokens_per_micro_batch=_budget(rows, options) if name == "tokens" else None,
            share_prompts=options.share_prompts and options.share_prompts == "true",
            master_weights=options.master_weights,
        )
        return AtroposGRPOTrainer(
            str(model), args=config, rollout_source=OneBatch(rows), peft_config=adapter
        )
    trainer = GRPOTrainer(
        str(model),
        reward_funcs=[atropos_score],
        args=GRPOConfig(**settings, num_generations=options.group_size, shuffle_dataset=False),
        train_dataset=Dataset.from_dict({"prompt": [""] * len(rows)}),
        rollout_func=lambda prompts, trainer: columns(rows),
        peft_config=adapter,
    )
    # TRL corrects for the sampler only where it believes that vLLM sampled, to which it would send
    # its weights.
    trainer.use_vllm = True
    trainer.add_callback(InStep(trainer))
    return trainer


def measure_shape(shape: str, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Lets the trainers take turns on one batch."""
    model = folder / "model"
    if not model.exists():
        make_model(model, options.params, dtype())
    disable_progress_bar()  # of the weights that are loaded
    rows = make_rows(shape, options)
    clocks: dict[str, list[StepTime]] = {name: [] for name in options.trainers}
    loss = {}
    of_token = 0.0
    for _ in range(options.rounds):
        for name in options.trainers:
            train = _run_loop if name == PACKED_LOOP else _run_trainer
            clock, loss[name], of_token = train(name, model, folder, rows, options)
            clocks[name].append(clock)
            gc.collect()  # cycles hold the model's memory, which the next one needs
    config = AutoConfig.from_pretrained(model)
    return [
        _result(shape, name, clocks[name], rows, loss[name], of_token, config)
        for name in options.trainers
    ]


def _run_trainer(
    name: str, model: Path, folder: Path, rows: list[Rollout], options: argparse.Namespace
) -> tuple[StepTime, float, float | None]:
    """The times of the second step, the loss of the first, and the operations that the weights take
    for a token."""
    trainer = _make_trainer(name, model, folder, rows, options)
    clock = StepTime()
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(clock)
    clock.watch(trainer.model)
    trainer.train()
    return clock, trainer.state.log_history[0]["loss"], flops_per_token(trainer.model)


def _run_loop(
    name: str, model: Path, folder: Path, rows: list[Rollout], options: argparse.Namespace
) -> tuple[StepTime, None, float | None]:
    """As `_run_trainer`. The loop has no loss to compare."""
    # Torch gives up after compiling the code of a layer eight times. Trainers of all rounds count
    # towards it, and each round has another model.
    torch._dynamo.config.recompile_limit = COMPILATIONS
    loop = PackedLoop(model, rows, _budget(rows, options), options.gradient_checkpointing)
    clock = StepTime()
    for _ in range(LOOP_STEPS):
        began = _now()
        loop.train()
        clock.training_pass = _now() - began
        loop.step()
        clock.step = _now() - began
    if torch.cuda.is_available():
        with kernels() as count:
            loop.train()
            loop.step()
        clock.kernels = count()
    clock.tokens = sum(row.ids.numel() for row in loop.rows)
    return clock, None, flops_per_token(loop.model)


def _budget(rows: list[Rollout], options: argparse.Namespace) -> int:
    """Tokens of a micro-batch."""
    return options.max_tokens or max(
        options.micro_batch * (options.prompt + options.median), *_lengths(rows)
    )


def _result(
    shape: str,
    name: str,
    clocks: list[StepTime],
    rows: list[Rollout],
    loss: float | None,
    of_token: float,
    config: Any,
) -> dict[str, Any]:
    useful = sum(_lengths(rows))
    step = statistics.median(clock.step for clock in clocks)
    training_pass = statistics.median(clock.training_pass for clock in clocks)
    return {
        "shape": shape,
        "trainer": name,
        "padding": clocks[0].tokens / useful,
        "step_ms": step * 1e3,
        "pass_ms": training_pass * 1e3,
        "tokens_per_s": useful / step,
        "kernels_per_token": clocks[0].kernels / useful if clocks[0].kernels else None,
        "loss": loss,
        "tflops_per_s": of_token * useful / training_pass / 1e12,
        **_flops_with_attention(rows, of_token * useful, config, training_pass),
    }


def _flops_with_attention(
    rows: list[Rollout], of_weights: float, config: Any, seconds: float
) -> dict[str, float]:
    """Operations per second with attention: of causal pairs, as ours are counted, and of all pairs,
    as prime-rl counts them."""
    lengths = _lengths(rows)
    attention = AttentionFlops.of(config).of_rollouts(rows)
    of_prime_rl = prime_rl_flops(config, lengths)
    return {
        "tflops_with_attention": (of_weights + attention) / seconds / 1e12,
        "tflops_by_prime_rl": of_prime_rl / seconds / 1e12,
    }


def prime_rl_flops(config: Any, lengths: Sequence[int]) -> float:
    """
    Returns the operations of a pass over rows of these lengths by the formula that prime-rl's
    `PerfCounter` has (src/prime_rl/trainer/perf.py at 0e6c67f), for a dense model whose weights are
    all trained.

    They are 6 for each weight of a matrix that multiplies a token (no embedding and no norm, but
    the head), and in each layer `12 * hidden_size` for each pair of tokens of a row, masked pairs
    included.
    """
    heads = config.num_attention_heads * config.head_dim
    key_heads = config.num_key_value_heads * config.head_dim
    attention = config.hidden_size * (2 * heads + 2 * key_heads)
    mlp = 3 * config.hidden_size * config.intermediate_size
    head = config.vocab_size * config.hidden_size
    matrices = config.num_hidden_layers * (attention + mlp) + head
    pairs = sum(length**2 for length in lengths)
    of_attention = 12 * config.num_hidden_layers * config.hidden_size * pairs
    return float(6 * matrices * sum(lengths) + of_attention)


def _lengths(rows: list[Rollout]) -> list[int]:
    return [len(row.prompt_ids) + len(row.completion_ids) for row in rows]


def measure_balance(options: argparse.Namespace) -> list[dict[str, Any]]:
    """By how much the rank with the most tokens has more than the mean, in our order and in that of
    arrival."""
    generator = np.random.default_rng(1)
    excess = {"ours": [], "trl": []}
    steps = options.rows // options.micro_batch
    for _ in range(BATCHES):
        lengths = options.prompt + lengths_of(
            generator, "spread", options.ranks * options.rows, options
        )
        ordered = lengths[plan(lengths, options.ranks, steps, steps).order]
        for name, order in (("ours", ordered), ("trl", lengths)):
            load = order.reshape(options.ranks, -1).sum(1)
            excess[name].append(load.max() / load.mean() - 1)
    return [
        {
            "order": name,
            "ranks": options.ranks,
            "median": float(np.median(values)),
            "p95": float(np.quantile(values, 0.95)),
        }
        for name, values in excess.items()
    ]
