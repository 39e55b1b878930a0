"""Whether a run fits: its estimated memory as a table, what to change where it is too much, and what it saves on disk.

Changes are told in order of what they cost, each with what it saves.
"""

import copy
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trl import get_peft_config

from trl_atropos.check.activations import ACTIVATIONS, GRADIENTS, shadow_model
from trl_atropos.check.launch import GIB, Plan
from trl_atropos.check.memory import (
    Case,
    Process,
    Sizes,
    case_of,
    server_memory,
    smallest_cache,
    state_bytes,
    trainer_memory,
)
from trl_atropos.errors import ERROR, WARNING
from trl_atropos.errors import AtroposTrainingError as Finding
from trl_atropos.recipe import Recipe

RESTART_COPIES = 3  # on disk: the version that is served, the one before, and the one that is being written
PASSING = (ACTIVATIONS, GRADIENTS, "temporaries")  # items that are gone when a step is over


@dataclass(frozen=True)
class Estimate:
    """
    Attributes:
        server: `None` where the run starts none: recorded rollouts are replayed, or the server has flags, and perhaps
            devices, that the recipe does not know.
        traces: What was found by running the model without data, for estimates of changed recipes.
    """

    case: Case
    trainer: Process
    server: Process | None
    traces: dict = field(repr=False)

    @property
    def total(self) -> int:
        """Bytes that the trainer's device needs; on the CPU, the machine."""
        args, plan = self.case.training, self.case.plan
        on_cpu = plan.device == "cpu"  # where all processes share one memory
        total = self.trainer.total * (plan.processes if on_cpu else 1)
        if self.server is None:
            return total
        if args.vllm_enable_sleep_mode and not on_cpu:  # either computes while the other rests
            resting = sum(size for name, size in self.trainer.items.items() if name not in PASSING)
            return max(total + self.server.items["runtime"], resting + self.server.total)
        return total + self.server.total * (len(args.vllm_server_urls) if on_cpu else 1)

    @property
    def fits(self) -> bool:
        return self.total <= self.case.plan.total

    def table(self) -> list[str]:
        case, plan = self.case, self.case.plan
        where, name = ("device", "the device") if plan.device == "cuda" else ("process", "the machine")
        rows = f"micro-batches of {case.rows} x {case.length} tokens"
        lines = [f"Memory per {where} at the peak, estimated from the model's config, in GiB ({rows}):"]
        lines += _lines(self.trainer, f"trainer, in {self.trainer.when}")
        if self.server is not None:
            lines += _lines(self.server, "server")
        elif case.flags is not None:
            lines.append("  The server is not started by this run, and not estimated.")
        if case.shares_weights:
            lines.append("  The trainer's base weights are the server's.")
        both = "both" if self.server is not None else "the trainer"
        lines.append(_line(f"  {both}, of {plan.total / GIB:.2f} that {name} has", self.total))
        return lines


def _lines(process: Process, title: str) -> list[str]:
    host = {f"{name} (host memory)": size for name, size in process.host.items()}
    items = [_line(f"    {name}", size) for name, size in (process.items | host).items() if size]
    return [_line(f"  {title}", process.total), *items]


def _line(title: str, size: int) -> str:
    return f"{title:<44}{size / GIB:>8.2f}"


def estimate(recipe: Recipe, plan: Plan) -> Estimate:
    """
    Loads nothing but the model's config.

    Raises:
        OSError, ValueError: There is no such config, or none that transformers knows.
    """
    return estimate_case(case_of(recipe, plan), {})


def estimate_case(case: Case, traces: dict) -> Estimate:
    """`traces` is that of another estimate of a like run, or empty."""
    starts = case.flags is not None and case.recipe.services.start_vllm
    return Estimate(case, trainer_memory(case, traces), server_memory(case, traces) if starts else None, traces)


# ------------------------------------------------------------------------------------------------- what does not fit

Change = Callable[[Case], Case]


def findings(found: Estimate) -> list[Finding]:
    """One of a server without room for its KV cache, and one of a run that does not fit."""
    case, plan, told = found.case, found.case.plan, []
    seen = f"{found.total / GIB:.2f} of {plan.total / GIB:.2f} GiB"
    cache = 0 if found.server is None else found.server.items.get("KV cache", 0)
    if found.server is not None and cache < smallest_cache(case):
        what = (
            f"The server has {cache / GIB:.2f} GiB left for its KV cache, but one sequence of `--max-model-len` "
            f"({case.max_model_len}) tokens takes {smallest_cache(case) / GIB:.2f}"
        )
        fix = "Raise `--gpu-memory-utilization` in `vllm_args`, or lower `--max-model-len`."
        told.append(Finding(what, seen, fix, "kv-cache"))
    if found.fits:
        return told
    parts = [f"the {one.name} {one.total / GIB:.2f}" for one in (found.trainer, found.server) if one is not None]
    device = "device" if plan.device == "cuda" else "machine"
    what = f"The run takes {found.total / GIB:.2f} GiB of memory ({', '.join(parts)}), but the {device} has "
    return [*told, Finding(f"{what}{plan.total / GIB:.2f}", seen, _way_out(found), "memory")]


def _way_out(found: Estimate) -> str:
    """Changes, each on top of those before it, until it fits."""
    case, total, ways = found.case, found.total, []
    for text, change in _changes(found):
        changed = change(case)
        less = estimate_case(changed, found.traces).total
        if less < total:
            ways.append(f"{text} (saves {(total - less) / GIB:.2f})")
            case, total = changed, less
        if total <= case.plan.total:
            break
    told = f"Change, what costs least first: {'; '.join(ways)}. It then takes {total / GIB:.2f}." if ways else ""
    if total > case.plan.total:
        told += " Take a smaller model, or shard the trainer over more devices (ZeRO-3, FSDP2)."
    return told.strip()


def _changes(found: Estimate) -> Iterator[tuple[str, Change]]:
    """What to write, and what that makes of a case; the cheapest change first."""
    case, args = found.case, found.case.training
    if found.server is not None:
        yield from _smaller_cache(found)
    if not args.gradient_checkpointing:
        yield _setting(gradient_checkpointing=True)
    if args.max_tokens_per_micro_batch is not None and case.rows > 1:
        yield _setting(max_tokens_per_micro_batch=args.max_tokens_per_micro_batch // 2)
    elif case.rows > 1:
        # A divisor, so that as many rows as before make an optimizer step.
        rows = max(rows for rows in range(1, case.rows // 2 + 1) if case.rows % rows == 0)
        steps = args.gradient_accumulation_steps * case.rows // rows
        yield _setting(per_device_train_batch_size=rows, gradient_accumulation_steps=steps)
    if case.plan.device == "cuda":  # on the CPU, the host's memory is the device's, and bitsandbytes is for GPUs
        if "8bit" not in args.optim:
            yield _setting(optim="adamw_bnb_8bit")
        if not args.offload_master_weights:
            yield _setting(offload_master_weights=True)
    if case.peft_config is None:
        yield "`use_peft: true` with `lora_target_modules: all-linear`", _with_adapter


def _smaller_cache(found: Estimate) -> Iterator[tuple[str, Change]]:
    """As much less KV cache as is needed, but no less than a quarter, nor than one sequence needs."""
    case, plan = found.case, found.case.plan
    cache = found.server.items.get("KV cache", 0)
    wanted = max(smallest_cache(case), cache // 4, cache - (found.total - plan.total))
    if wanted >= cache:
        return
    flag, value = "--kv-cache-memory-bytes", wanted
    if case.kv_cache_bytes is None:
        share = (found.server.total - cache + wanted) / plan.total
        flag, value = "--gpu-memory-utilization", math.floor(100 * share) / 100
        text = f"`{flag} {value:.2f}` in `vllm_args`"
    elif plan.device == "cpu" and wanted >= GIB:
        value = wanted // GIB * GIB
        text = f"`VLLM_CPU_KVCACHE_SPACE: {value // GIB}` under `env`"
    else:
        text = f"`{flag} {value}` in `vllm_args`"
        if plan.device == "cpu":  # vLLM lets the variable, in whole GiB, come first
            text += " and no `VLLM_CPU_KVCACHE_SPACE`"
    yield text, lambda one: replace(one, flags=one.flags | {flag: str(value)})


def _setting(**settings) -> tuple[str, Change]:
    def change(case: Case) -> Case:
        training = copy.copy(case.training)
        for name, value in settings.items():
            setattr(training, name, value)
        return replace(case, recipe=replace(case.recipe, training=training))

    written = {name: "true" if value is True else value for name, value in settings.items()}
    return " and ".join(f"`{name}: {value}`" for name, value in written.items()), change


def _with_adapter(case: Case) -> Case:
    model = copy.copy(case.recipe.model)
    model.use_peft, model.lora_target_modules = True, "all-linear"
    return replace(case, recipe=replace(case.recipe, model=model), peft_config=get_peft_config(model))


# ----------------------------------------------------------------------------------------------------------- the disk


def disk(case: Case, elsewhere: bool) -> Iterator[Finding]:
    """Whether what the run saves fits on the disk. If the run will be `elsewhere`, this machine's is a hint only."""
    args = case.training
    model, _mode = shadow_model(case.config, case.dtype, case.peft_config, **case.model_settings)
    sizes = Sizes.of(model)
    final = sizes.own if case.peft_config is not None else sizes.weights
    half = case.dtype.itemsize == 2 and case.peft_config is None
    masters = half and (args.master_weights or case.plan.sharding.startswith("zero"))
    state = state_bytes(args.optim, sizes.trained, masters, sizes.embeddings) + (4 * sizes.number if masters else 0)
    checkpoint = final + (0 if args.save_only_model else state)
    number = checkpoints(args)
    restarts = RESTART_COPIES * sizes.weights if args.vllm_mode == "restart" else 0
    needed = number * checkpoint + final + restarts
    folder = Path(args.output_dir).absolute()
    while not folder.is_dir():
        folder = folder.parent
    # Those that are there count as what is needed, and are replaced one by one.
    there = sum(file.stat().st_size for file in folder.glob("checkpoint-*/**/*") if file.is_file())
    free = shutil.disk_usage(folder).free + there
    if needed > free:
        copies = f", {restarts / GIB:.1f} for the server's restarts" if restarts else ""
        saved = f"{needed / GIB:.1f} GiB ({number} checkpoints of {checkpoint / GIB:.1f}{copies})"
        yield Finding(
            "What the run saves does not fit on the disk of `output_dir`" + " of this machine" * elsewhere,
            f"{saved}, free are {free / GIB:.1f}",
            "Set `save_total_limit`, save less often (`save_steps`) or without the optimizer (`save_only_model: "
            "true`), or set `output_dir` to a larger disk.",
            "disk",
            WARNING if elsewhere else ERROR,
        )


def checkpoints(training: Any) -> int:
    """How many there are at once: an old one is removed when the new one is there."""
    if training.save_strategy == "no":
        return 0
    steps = training.max_steps
    every = training.save_steps if training.save_steps >= 1 else math.ceil(training.save_steps * steps) or steps
    number = max(1, math.ceil(steps / every)) if training.save_strategy == "steps" else 1  # the last step's, too
    return number if training.save_total_limit is None else min(number, training.save_total_limit + 1)
