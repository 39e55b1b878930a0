"""Tells whether a run fits into memory, and which settings to change if it does not.

A `Case` (`launch.py`) comes in. `memory.py` estimates its trainer and its server. `check` prints
the `table` of an `Estimate`, and its `findings`.
"""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from trl import get_peft_config

from trl_atropos.batches.micro_batches import MOST_TOKENS
from trl_atropos.check.launch import GIB, Case, Plan
from trl_atropos.check.memory import Process, server_memory, smallest_cache, trainer_memory
from trl_atropos.check.shadow import ACTIVATIONS
from trl_atropos.errors import AtroposTrainingError as Finding

Settings = dict[str, Any]  # of the recipe by name, and flags of the server (`--...`)


def estimate(case: Case) -> "Estimate":
    """Returns what the run takes. Loads nothing but the model's config."""
    server = None
    if case.flags is not None and case.recipe.services.start_vllm:
        server = server_memory(case)
    return Estimate(case, trainer_memory(case), server)


@dataclass(frozen=True)
class Estimate:
    """Holds what the processes of a run take, and compares it with what there is."""

    case: Case
    trainer: Process
    # `None` if the run does not start it, so that its flags and devices are not known
    server: Process | None

    @property
    def plan(self) -> Plan:
        return self.case.plan

    @property
    def processes(self) -> list[Process]:
        if self.server is None:
            return [self.trainer]
        return [self.trainer, self.server]

    @property
    def servers(self) -> int:
        """Number of servers on the trainer's device, or on the CPU, on the machine."""
        training = self.case.training
        if self.plan.device == "cuda" and training.mode.shares_memory:
            return 1  # each has a device of its own, and a trainer's process beside it
        return len(training.vllm_server_urls)

    @property
    def total(self) -> int:
        """Bytes that the trainer's device needs, or on the CPU, the machine."""
        on_cpu = self.plan.device == "cpu"
        trainer = self.trainer.total
        if on_cpu:
            trainer *= self.plan.processes  # which share the machine's memory
        if self.server is None:
            return trainer
        served = self.servers * self.server.total
        if on_cpu or not self.case.training.vllm_enable_sleep_mode:
            return trainer + served
        runtimes = self.servers * self.server.items["runtime"]
        while_training = trainer + runtimes
        while_sampling = self.trainer.resting + served
        return max(while_training, while_sampling)

    @property
    def host(self) -> int:
        """Bytes of host memory that one machine needs. 0 on the CPU, where `total` includes it."""
        needed = self.plan.local * self.trainer.host_total
        if self.server is not None:
            servers = len(self.case.training.vllm_server_urls)
            needed += servers * self.server.host_total
        return needed

    @property
    def cache(self) -> int:
        """Bytes of the server's KV cache."""
        return self.server.items.get("KV cache", 0)

    def shortage(self, spare: float = 0.0) -> int:
        """Returns the missing bytes, of the device and of host memory together. Of the device, the
        share `spare` stays free."""
        available = int((1 - spare) * self.plan.total)
        missing = max(0, self.total - available)
        if self.plan.host is not None:
            missing += max(0, self.host - self.plan.host)
        return missing

    @property
    def fits(self) -> bool:
        return self.shortage() == 0

    def changed(self, settings: Settings) -> "Estimate":
        """Returns the estimate of the run with other settings, or flags of the server (`--...`)."""
        training = copy.copy(self.case.training)
        model = copy.copy(self.case.recipe.model)
        flags = self.case.flags
        for name, value in settings.items():
            if name.startswith("--"):
                flags = flags | {name: value}
            elif hasattr(model, name):
                setattr(model, name, value)
            else:
                setattr(training, name, value)
        recipe = replace(self.case.recipe, training=training, model=model)
        adapter = get_peft_config(model)
        case = replace(self.case, recipe=recipe, flags=flags, peft_config=adapter)
        return estimate(case)

    def table(self) -> list[str]:
        """Returns lines with the items of each process, and below them the sums."""
        case = self.case
        plan = self.plan
        unit = "process"
        memory = "the machine"
        if plan.device == "cuda":
            unit = "device"
            memory = "the device"
        size = f"micro-batches of {case.rollouts} x {case.length} tokens"
        if plan.sp_size > 1:
            size += f", a slice of {case.slice_length} in each"
        lines = [f"Peak memory per {unit} in GiB, estimated ({size}):"]
        lines += _process_lines(f"trainer, in {self.trainer.when}", self.trainer)
        subject = "the trainer"
        if self.server is not None and self.servers == 1:
            lines += _process_lines("server", self.server)
            subject = "both"
        elif self.server is not None:
            lines += _process_lines(f"server, each of {self.servers}", self.server)
            subject = "all"
        elif case.flags is not None:
            lines.append("  The server is not started by this run, and not estimated.")
        if case.shares_weights:
            lines.append("  The trainer's base weights are the server's.")
        title = f"  {subject}, of {_gib(plan.total)} that {memory} has"
        lines.append(_line(title, self.total))
        if self.host and plan.host is None:
            lines.append(_line("  host memory, of a machine", self.host))
        elif self.host:
            title = f"  host memory, of {_gib(plan.host)} that the machine has"
            lines.append(_line(title, self.host))
        return lines


def _process_lines(title: str, process: Process) -> list[str]:
    lines = [_line(f"  {title}", process.total)]
    for name, size in process.items.items():
        lines.append(_line(f"    {name}", size))
    for name, size in process.host.items():
        if size:
            lines.append(_line(f"    {name} (host memory)", size))
    return lines


def _line(title: str, size: int) -> str:
    return f"{title:<44}{_gib(size):>8}"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"


# -------------------------------------------------------------------------------- what does not fit


def findings(fit: Estimate) -> Iterator[Finding]:
    """Yields a finding if the server has no room for its KV cache, and one if the run, with that
    room, does not fit."""
    run = "The run"
    smallest = smallest_cache(fit.case)
    if fit.server is not None and fit.cache < smallest:
        settings = _cache_of(fit, smallest)
        [(flag, value)] = settings.items()
        if flag == "--gpu-memory-utilization" and float(value) >= 1:
            fix = (
                "Divide the server over more GPUs (`--tensor-parallel-size` in `vllm_args`), or "
                "take a smaller model."
            )
            yield _cache_finding(fit, fix)
        else:
            fix = f"Raise `{flag}` in `vllm_args` to at least {value}, or lower `--max-model-len`."
            yield _cache_finding(fit, fix)
            fit = fit.changed(settings)
            run = "With that, the run"
    if not fit.fits:
        yield _memory_finding(fit, run)


def _cache_finding(fit: Estimate, fix: str) -> Finding:
    smallest = smallest_cache(fit.case)
    what = (
        f"The server has {_gib(fit.cache)} GiB left for its KV cache, but one rollout of "
        f"`--max-model-len` ({fit.case.max_model_len}) tokens takes {_gib(smallest)}"
    )
    granted = _gib(fit.server.total)
    seen = f"{granted} of {_gib(fit.plan.total)} GiB for the server"
    return Finding(what, seen, fix, "kv-cache")


def _memory_finding(fit: Estimate, run: str) -> Finding:
    plan = fit.plan
    device = "device" if plan.device == "cuda" else "machine"
    missing = []
    seen = []
    if fit.total > plan.total:
        needed = _gib(fit.total)
        available = _gib(plan.total)
        parts = f"the trainer {_gib(fit.trainer.total)}"
        if fit.server is not None:
            parts += f", the server {_gib(fit.server.total)}"
        missing.append(f"takes {needed} GiB of memory ({parts}), but the {device} has {available}")
        seen.append(f"{needed} of {available} GiB")
    if plan.host is not None and fit.host > plan.host:
        needed = _gib(fit.host)
        available = _gib(plan.host)
        missing.append(f"takes {needed} GiB of host memory, but the machine has {available}")
        seen.append(f"{needed} of {available} GiB of host memory")
    return Finding(
        what=f"{run} {', and '.join(missing)}",
        seen=", ".join(seen),
        fix=_advice(fit),
        code="memory",
    )


# --------------------------------------------------------------------------------------- the advice

SPARE = 0.05  # of the device, which the advice leaves free: estimates are not exact
CACHE_FLAGS = {"--gpu-memory-utilization", "--kv-cache-memory-bytes"}
ADAPTER = {"use_peft": True, "lora_target_modules": "all-linear"}


def _advice(fit: Estimate) -> str:
    """Returns the changes with which the run fits, and an adapter with the changes it needs."""
    case = fit.case
    sentences = []
    by_hand = fit.server is None and case.flags is not None
    if by_hand and case.training.max_sequence_length is None:
        sentences.append(
            f"Rollouts of {case.length} tokens are expected, as many as the model takes: set "
            "`max_sequence_length` to the server's `--max-model-len`."
        )
    changes = _enough(fit)
    changed = _all_changed(fit, changes)
    offers = []
    if changes:
        offers.append(f"Change, what costs least first: {_described(fit, changes)}")
    if case.peft_config is None:
        changes = [ADAPTER, *_enough(fit.changed(ADAPTER))]
        adapted = _all_changed(fit, changes)
        if changed.fits and adapted.fits:
            offers.append(f"Or train an adapter: {_described(fit, changes)}")
        elif changed.shortage() - adapted.shortage() > SPARE * fit.plan.total:
            offers = [f"Train an adapter: {_described(fit, changes)}"]
            changed = adapted
    sentences += offers
    if not changed.fits:
        sentences.append(_last_resort(changed))
    return " ".join(sentences)


def _last_resort(fit: Estimate) -> str:
    """Returns what is left if no setting is enough."""
    activations = fit.trainer.items.get(ACTIVATIONS, 0)
    if activations > fit.trainer.total / 2:
        return (
            "Divide rows among more devices (`sp_size`: docs/long-rollouts.md), or take shorter "
            "rollouts or a smaller model."
        )
    return "Take a smaller model, or shard the trainer over more devices (ZeRO-3, FSDP2)."


def _levers(fit: Estimate) -> Iterator[Settings]:
    """Yields the changes that save memory, what costs least first: a smaller KV cache, recomputed
    activations, micro-batches of one rollout, and masters in host memory, or out of it; then what
    long rollouts keep of each layer in host memory."""
    case = fit.case
    args = case.training
    if fit.server is not None:
        size = max(smallest_cache(case), fit.cache // 4)
        yield _cache_of(fit, size)
    if not args.gradient_checkpointing:
        yield {"gradient_checkpointing": True}
    if args.max_tokens_per_micro_batch is not None or case.chooses_token_budget:
        yield {"max_tokens_per_micro_batch": case.length}
    else:
        # As many rollouts as before make an optimizer step.
        steps = args.gradient_accumulation_steps * case.rollouts
        yield {"per_device_train_batch_size": 1, "gradient_accumulation_steps": steps}
    if fit.plan.device == "cuda":  # on the CPU, host memory is the device's
        yield {"offload_master_weights": not args.offload_master_weights}
        options = args.gradient_checkpointing_kwargs or {}
        tokens = case.rollouts * case.slice_length
        if tokens > MOST_TOKENS and not options.get("offload"):
            waiting = {"gradient_checkpointing_kwargs": options | {"offload": True}}
            if not args.gradient_checkpointing:
                waiting["gradient_checkpointing"] = True
            yield waiting


def _enough(fit: Estimate) -> list[Settings]:
    """Returns levers with which the run fits, none of them needless. Returns all that help if it
    does not fit."""
    changes = []
    best = fit
    for settings in _levers(fit):
        if not best.shortage(SPARE):
            break
        changed = best.changed(settings)
        if changed.shortage(SPARE) < best.shortage(SPARE):
            changes.append(settings)
            best = changed
    if best.shortage(SPARE):
        return changes
    for settings in reversed(changes):
        others = [other for other in changes if other is not settings]
        if not _all_changed(fit, others).shortage(SPARE):
            changes = others
    if changes and changes[0].keys() <= CACHE_FLAGS:
        # It is as small as is useful: give back what is not needed.
        with_whole_cache = _all_changed(fit, changes[1:])
        size = with_whole_cache.cache - with_whole_cache.shortage(SPARE)
        changes[0] = _cache_of(with_whole_cache, size)
    return changes


def _all_changed(fit: Estimate, changes: list[Settings]) -> Estimate:
    settings = {}
    for change in changes:
        settings |= change
    return fit.changed(settings)


def _cache_of(fit: Estimate, size: int) -> dict[str, str]:
    """Returns the flag that gives the server a KV cache of `size` bytes."""
    if fit.case.kv_cache_bytes is not None:
        return {"--kv-cache-memory-bytes": str(size)}
    needed = fit.server.total - fit.cache + size
    percent = 100 * needed / fit.plan.total
    # The flag has two digits: a smaller cache may be smaller still, a larger one larger still.
    rounded = math.ceil(percent)
    if size < fit.cache:
        rounded = math.floor(percent)
    return {"--gpu-memory-utilization": f"{rounded / 100:.2f}"}


def _described(fit: Estimate, changes: list[Settings]) -> str:
    """Returns the changes with what each saves on top of those before it, and what the run takes
    then."""
    texts = []
    for settings in changes:
        changed = fit.changed(settings)
        written = _written(settings, fit.case)
        texts.append(f"{written} ({_effect(fit, changed)})")
        fit = changed
    takes = "takes" if fit.fits else "still takes"
    needed = _gib(fit.total)
    if fit.host > GIB:
        needed += f", and {_gib(fit.host)} of host memory"
    return f"{'; '.join(texts)}. It then {takes} {needed}."


def _written(settings: Settings, case: Case) -> str:
    """Returns settings as a recipe has them, and flags as `vllm_args` has them."""
    texts = []
    for name, value in settings.items():
        if not name.startswith("--"):
            text = f"`{name}: {str(value).lower()}`"
        else:
            text = f"`{name} {value}` in `vllm_args`"
            if case.plan.device == "cpu":  # the variable would come first
                text += " and no `VLLM_CPU_KVCACHE_SPACE`"
        texts.append(text)
    return " and ".join(texts)


def _effect(fit: Estimate, changed: Estimate) -> str:
    changes = {"": changed.total - fit.total, " of host memory": changed.host - fit.host}
    saved = []
    taken = []
    for kind, size in changes.items():
        if size < 0:
            saved.append(f"saves {_gib(-size)}{kind}")
        elif size > 0:
            taken.append(f"takes {_gib(size)}{kind}")
    return ", ".join(saved + taken)
