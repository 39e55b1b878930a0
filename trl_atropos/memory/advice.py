"""What to change in a run that does not fit, in order of what it costs, each with what it saves."""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from trl import get_peft_config

from trl_atropos.memory.case import Case
from trl_atropos.memory.estimate import Estimate, estimate_case
from trl_atropos.memory.plan import GIB
from trl_atropos.memory.server import smallest_cache

Change = Callable[[Case], Case]


def findings(found: Estimate) -> list[str]:
    """One of a server without room for its KV cache, and one of a run that does not fit."""
    case, plan, texts = found.case, found.case.plan, []
    cache = 0 if found.server is None else found.server.items.get("KV cache", 0)
    if found.server is not None and cache < smallest_cache(case):
        texts.append(
            f"The server has {cache / GIB:.2f} GiB left for its KV cache, but one sequence of `--max-model-len` "
            f"({case.server.max_model_len}) tokens takes {smallest_cache(case) / GIB:.2f}. Raise "
            "`--gpu-memory-utilization` in `vllm_args`, or lower `--max-model-len`."
        )
    if found.fits:
        return texts
    parts = [f"the trainer {found.trainer.total / GIB:.2f}"]
    if found.server is not None:
        parts.append(f"the server {found.server.total / GIB:.2f}")
    what = "device" if plan.device == "cuda" else "machine"
    texts.append(
        f"The run takes {found.total / GIB:.2f} GiB of memory ({', '.join(parts)}), but the {what} has "
        f"{plan.total / GIB:.2f}. {_way_out(found)}"
    )
    return texts


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
    case, plan, flags = found.case, found.case.plan, found.case.server
    cache = found.server.items.get("KV cache", 0)
    wanted = max(smallest_cache(case), cache // 4, cache - (found.total - plan.total))
    if wanted >= cache:
        return
    if flags.kv_cache_bytes is None:
        share = math.floor(100 * (found.server.total - cache + wanted) / plan.total) / 100
        text, changed = f"`--gpu-memory-utilization {share:.2f}` in `vllm_args`", replace(flags, utilization=share)
    elif plan.device == "cpu" and wanted >= GIB:
        size = wanted // GIB
        text, changed = f"`VLLM_CPU_KVCACHE_SPACE: {size}` under `env`", replace(flags, kv_cache_bytes=size * GIB)
    else:
        text, changed = f"`--kv-cache-memory-bytes {wanted}` in `vllm_args`", replace(flags, kv_cache_bytes=wanted)
        if plan.device == "cpu":  # vLLM lets the variable, in whole GiB, come first
            text += " and no `VLLM_CPU_KVCACHE_SPACE`"
    yield text, lambda one: replace(one, server=changed)


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
