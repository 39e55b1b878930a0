"""Whether a run fits into memory: what it takes as a table, and what to change where that is too
much."""

import copy
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from trl import get_peft_config

from trl_atropos.check.launch import GIB, Case
from trl_atropos.check.memory import Process, server_memory, smallest_cache, trainer_memory
from trl_atropos.errors import AtroposTrainingError as Finding


@dataclass(frozen=True)
class Estimate:
    case: Case
    trainer: Process
    # `None` where the run starts none, so that its flags and devices are not known
    server: Process | None

    @property
    def processes(self) -> list[Process]:
        return [self.trainer] if self.server is None else [self.trainer, self.server]

    @property
    def servers(self) -> int:
        """How many of the servers that the run starts are on the trainer's device; on the CPU, on
        the machine."""
        each_its_own = (
            self.case.plan.device == "cuda" and self.case.training.vllm_mode == "colocate"
        )
        return 1 if each_its_own else len(self.case.training.vllm_server_urls)

    @property
    def total(self) -> int:
        """Bytes that the trainer's device needs; on the CPU, the machine."""
        # where all processes share one memory
        plan = self.case.plan
        on_cpu = self.case.plan.device == "cpu"
        total = self.trainer.total * (plan.processes if on_cpu else 1)
        if self.server is None:
            return total
        runtime, served = (
            size * self.servers for size in (self.server.items["runtime"], self.server.total)
        )
        # either computes while the other rests
        if self.case.training.vllm_enable_sleep_mode and not on_cpu:
            return max(total + runtime, self.trainer.resting + served)
        return total + served

    @property
    def host(self) -> int:
        """Bytes of host memory that the processes of one machine need. 0 on the CPU, where `total`
        has them."""
        servers = (
            len(self.case.training.vllm_server_urls) * sum(self.server.host.values())
            if self.server
            else 0
        )
        return self.case.plan.local * sum(self.trainer.host.values()) + servers

    @property
    def cache(self) -> int:
        """Bytes of the server's KV cache."""
        return self.server.items.get("KV cache", 0)

    def shortage(self, spare: float = 0.0) -> int:
        """Bytes that are missing of host memory, and on the device if this share of it is to stay
        free."""
        plan = self.case.plan
        return max(0, self.total - int((1 - spare) * plan.total)) + max(
            0, self.host - (plan.host or self.host)
        )

    @property
    def fits(self) -> bool:
        return not self.shortage()

    def table(self) -> list[str]:
        case = self.case
        plan = self.case.plan
        where, name = (
            ("device", "the device") if plan.device == "cuda" else ("process", "the machine")
        )
        size = f"micro-batches of {case.rollouts} x {case.length} tokens"
        lines = [f"Peak memory per {where} in GiB, estimated ({size}):"]
        for process in self.processes:
            servers = "server" if self.servers == 1 else f"server, each of {self.servers}"
            title = servers if process is self.server else f"trainer, in {process.when}"
            lines.append(_line(f"  {title}", process.total))
            items = process.items | {
                f"{name} (host memory)": size for name, size in process.host.items()
            }
            lines += [_line(f"    {name}", size) for name, size in items.items() if size]
        if self.server is None and case.flags is not None:
            lines.append("  The server is not started by this run, and not estimated.")
        if case.shares_weights:
            lines.append("  The trainer's base weights are the server's.")
        who = "the trainer" if self.server is None else "both" if self.servers == 1 else "all"
        lines.append(_line(f"  {who}, of {plan.total / GIB:.2f} that {name} has", self.total))
        if self.host:
            has = (
                "of a machine"
                if plan.host is None
                else f"of {plan.host / GIB:.2f} that the machine has"
            )
            lines.append(_line(f"  host memory, {has}", self.host))
        return lines


def _line(title: str, size: int) -> str:
    return f"{title:<44}{size / GIB:>8.2f}"


def estimate(case: Case) -> Estimate:
    """Loads nothing but the model's config."""
    starts = case.flags is not None and case.recipe.services.start_vllm
    return Estimate(case, trainer_memory(case), server_memory(case) if starts else None)


# -------------------------------------------------------------------------------- what does not fit


def findings(found: Estimate) -> Iterator[Finding]:
    """One if the server has no room for its KV cache, and one if the run does not fit, with that
    room."""
    case = found.case
    plan = found.case.plan
    run = "The run"
    here = f"{plan.total / GIB:.2f}"
    if found.server is not None and found.cache < smallest_cache(case):
        what = (
            f"The server has {found.cache / GIB:.2f} GiB left for its KV cache, but one rollout of "
            f"`--max-model-len` ({case.max_model_len}) tokens takes "
            f"{smallest_cache(case) / GIB:.2f}"
        )
        own = found.server.total
        [(flag, value)] = _with_cache(found, smallest_cache(case)).items()
        fix = f"Raise `{flag}` in `vllm_args` to at least {value}, or lower `--max-model-len`."
        if flag == "--gpu-memory-utilization" and float(value) >= 1:
            fix = (
                "Divide the server over more GPUs (`--tensor-parallel-size` in `vllm_args`), or "
                "take a smaller model."
            )
        else:
            found = estimate(_changed(case, {flag: value}))
            run = "With that, the run"
        yield Finding(what, f"{own / GIB:.2f} of {here} GiB for the server", fix, "kv-cache")
    if not found.fits:
        missing = []
        seen = []
        if found.total > plan.total:
            total = f"{found.total / GIB:.2f}"
            parts = (f"the {p.name} {p.total / GIB:.2f}" for p in found.processes)
            device = "device" if plan.device == "cuda" else "machine"
            missing.append(
                f"takes {total} GiB of memory ({', '.join(parts)}), but the {device} has {here}"
            )
            seen.append(f"{total} of {here} GiB")
        if plan.host is not None and found.host > plan.host:
            takes = f"{found.host / GIB:.2f}"
            has = f"{plan.host / GIB:.2f}"
            missing.append(f"takes {takes} GiB of host memory, but the machine has {has}")
            seen.append(f"{takes} of {has} GiB of host memory")
        yield Finding(f"{run} {', and '.join(missing)}", ", ".join(seen), _way_out(found), "memory")


SPARE = 0.05  # of the device, which the advice leaves free: estimates are not exact
WORTH = 0.005  # of the device, which a change saves at least, unless it is enough
CACHE_FLAGS = {"--gpu-memory-utilization", "--kv-cache-memory-bytes"}
ADAPTER = {"use_peft": True, "lora_target_modules": "all-linear"}


def _way_out(found: Estimate) -> str:
    """The changes with which the run fits; and an adapter, with the changes that it still needs."""
    case = found.case
    ways = []
    if (
        found.server is None
        and case.flags is not None
        and case.training.max_sequence_length is None
    ):
        reason = f"Rollouts of {case.length} tokens are expected, as many as the model takes"
        ways.append(f"{reason}: set `max_sequence_length` to the server's `--max-model-len`.")
    changed, then = _enough(found, _changes(found))
    texts = (
        [f"Change, what costs least first: {_listed(found, changed)}. {_takes(then)}"]
        if changed
        else []
    )
    if case.peft_config is None:
        adapted = estimate(_changed(case, ADAPTER))
        more, less = _enough(adapted, _changes(adapted))
        offer = f"an adapter: {_listed(found, [ADAPTER, *more])}. {_takes(less)}"
        if then.fits:
            texts += [f"Or train {offer}"] if less.fits else []
        elif less.shortage() < then.shortage() - SPARE * case.plan.total:
            texts = [f"Train {offer}"]
            then = less
    if not then.fits:
        texts.append(
            "Take a smaller model, or shard the trainer over more devices (ZeRO-3, FSDP2)."
        )
    return " ".join([*ways, *texts])


def _enough(
    found: Estimate, changes: Iterable[dict[str, Any]]
) -> tuple[list[dict[str, Any]], Estimate]:
    """As many of the changes as it takes until the run fits with room to spare, without those that
    later ones make needless; and what the run takes with them. All that help, where it does not
    fit."""
    taken = []
    now = found
    for settings in changes:
        if not now.shortage(SPARE):
            break
        tried = estimate(_changed(now.case, settings))
        saved = now.shortage(SPARE) - tried.shortage(SPARE)
        if saved > WORTH * found.case.plan.total or not tried.shortage(SPARE):
            taken = [*taken, settings]
            now = tried
    for settings in reversed([] if now.shortage(SPARE) else taken[:-1]):
        fewer = [one for one in taken if one is not settings and not one.keys() <= CACHE_FLAGS]
        tried = estimate(reduce(_changed, fewer, found.case))
        if tried.shortage(SPARE) and tried.server is not None and (less := _smaller_cache(tried)):
            fewer = [less, *fewer]  # as much less as these leave to do
            tried = estimate(reduce(_changed, fewer, found.case))
        if not tried.shortage(SPARE):
            taken = fewer
            now = tried
    # of those to the same settings, the last
    return list({tuple(one): one for one in taken}.values()), now


def _listed(found: Estimate, changes: list[dict[str, Any]]) -> str:
    """The changes as text, and what each saves on top of those before it."""
    texts = []
    now = found
    for settings in changes:
        then = estimate(_changed(now.case, settings))
        # which would come first
        besides = " and no `VLLM_CPU_KVCACHE_SPACE`" if now.case.plan.device == "cpu" else ""
        flags = [
            f"`{name} {value}` in `vllm_args`{besides}"
            for name, value in settings.items()
            if "--" in name
        ]
        before = vars(now.case.training) | vars(now.case.recipe.model)
        different = {name: value for name, value in settings.items() if value != before.get(name)}
        written = [
            f"`{name}: {str(getattr(value, 'value', value)).lower()}`"
            for name, value in different.items()
        ]
        saved = now.total - then.total
        more = then.host - now.host
        effects = [f"saves {saved / GIB:.2f}"] if saved > 0 else []
        verb = "takes" if more > 0 else "and" if effects else "saves"
        effects += [f"{verb} {abs(more) / GIB:.2f} of host memory"] if more else []
        texts.append(
            " and ".join(flags or written) + (f" ({', '.join(effects)})" if effects else "")
        )
        now = then
    return "; ".join(texts)


def _takes(found: Estimate) -> str:
    host = f", and {found.host / GIB:.2f} of host memory" if found.host > GIB else ""
    return f"It then {'takes' if found.fits else 'still takes'} {found.total / GIB:.2f}{host}."


def _changes(found: Estimate) -> Iterator[dict[str, Any]]:
    """Settings, or a flag of the server; the cheapest change first."""
    case = found.case
    args = found.case.training
    if found.server is not None and (smaller := _smaller_cache(found)):
        yield smaller
    if not args.gradient_checkpointing:
        yield {"gradient_checkpointing": True}
    by_tokens = args.max_tokens_per_micro_batch is not None or case.chooses_token_budget
    rollouts = case.rollouts
    while rollouts > 1:
        rollouts //= 2
        if by_tokens:
            yield {"max_tokens_per_micro_batch": rollouts * case.length}
        # so that as many rollouts as before make an optimizer step
        elif case.rollouts % rollouts == 0:
            steps = args.gradient_accumulation_steps * case.rollouts // rollouts
            yield {"per_device_train_batch_size": rollouts, "gradient_accumulation_steps": steps}
    # on the CPU, the host's memory is the device's, and bitsandbytes is for GPUs
    if case.plan.device == "cuda":
        # bitsandbytes steps on a GPU
        if "8bit" not in args.optim and not args.offload_master_weights:
            yield {"optim": "adamw_bnb_8bit"}
        yield {"offload_master_weights": not args.offload_master_weights, "optim": args.optim}


def _smaller_cache(found: Estimate) -> dict[str, str]:
    """As much less KV cache as is needed, but no less than a quarter, nor than one rollout
    needs."""
    wanted = max(smallest_cache(found.case), found.cache // 4, found.cache - found.shortage(SPARE))
    return _with_cache(found, wanted) if wanted < found.cache else {}


def _with_cache(found: Estimate, size: int) -> dict[str, str]:
    """The flag that gives the server a KV cache of so many bytes."""
    if found.case.kv_cache_bytes is not None:
        return {"--kv-cache-memory-bytes": str(size)}
    share = 100 * (found.server.total - found.cache + size) / found.case.plan.total
    percent = math.floor(share) if size < found.cache else math.ceil(share)
    return {"--gpu-memory-utilization": f"{percent / 100:.2f}"}


def _changed(case: Case, settings: dict[str, Any]) -> Case:
    training = copy.copy(case.training)
    model = copy.copy(case.recipe.model)
    flags = case.flags
    for name, value in settings.items():
        if name.startswith("--"):
            flags = flags | {name: value}
        else:
            setattr(model if hasattr(model, name) else training, name, value)
    recipe = replace(case.recipe, training=training, model=model)
    return replace(case, recipe=recipe, flags=flags, peft_config=get_peft_config(model))
