"""What `trl_atropos.memory` tells of a recipe, as findings, as lines for people, and for scripts."""

from typing import Any

from trl_atropos.checks.finding import Finding, from_message
from trl_atropos.checks.launch import Launch
from trl_atropos.memory.plan import GIB, Plan

ELSEWHERE = 80 * GIB  # stands for a GPU of which nothing is known, where its size does not matter
NO_GPU = "Memory: no GPU is here. `--device_memory_gb N` plans for one of N GiB."


def plan_of_run(recipe, launch: Launch) -> Plan | None:
    """`None` if the run is for a GPU that is not here."""
    from trl_atropos.memory.plan import plan_of

    return plan_of(recipe.training, launch.device_memory_gb, launch.config_file, launch.processes)


def case_of_run(recipe, plan: Plan | None) -> Any:
    """What the estimates are made from; `None` if it cannot be had: `memory` says why."""
    from trl_atropos.memory.case import case_of

    try:
        return case_of(recipe, plan or Plan("cuda", ELSEWHERE))
    except Exception:  # noqa: BLE001 - what a model's config and somebody else's flags may raise has no bound
        return None


def memory(recipe, plan: Plan | None) -> tuple[list[Finding], dict[str, Any]]:
    """What does not fit; and the estimate, with the lines of its table, or why there is none."""
    from trl_atropos.memory.advice import findings
    from trl_atropos.memory.estimate import estimate

    if plan is None:
        return [], {"table": [NO_GPU]}
    try:
        found = estimate(recipe, plan)
        texts, table = findings(found), found.table()
    except Exception as error:  # noqa: BLE001 - any model's own code may fail on tensors without data
        reason = " ".join(str(error).split())[:200]
        if recipe.model.use_peft and "arget modules" in reason:  # peft's own words
            seen = f"lora_target_modules: {recipe.model.lora_target_modules}"
            fix = "Correct `lora_target_modules`, or set it to `all-linear`."
            wrong = Finding("adapter", "The adapter does not go with the model, and peft ends the run", seen, fix)
            return [wrong], {"table": [f"Memory: no estimate ({reason})."]}
        needs = "which needs the model's config and a model that runs by it"
        return [], {"table": [f"Memory: no estimate, {needs} ({reason})."]}
    told = []
    for text in texts:
        name = "kv-cache" if "KV cache, but" in text else "memory"
        told.append(from_message(text, {}, name=name, seen=f"{found.total / GIB:.2f} of {plan.total / GIB:.2f} GiB"))
    parts = {one.name: one.items for one in (found.trainer, found.server) if one is not None}
    return told, {"table": table, "bytes": parts, "total": found.total, "available": plan.total, "fits": found.fits}
