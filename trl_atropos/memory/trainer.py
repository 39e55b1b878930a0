"""The trainer's memory at its peak, per device, item by item."""

from dataclasses import dataclass

import torch
from peft import PeftModel

from trl_atropos.memory.case import Case, Process
from trl_atropos.memory.optimizers import state_bytes, step_bytes
from trl_atropos.memory.plan import GIB, Plan
from trl_atropos.memory.tracing import GRADIENTS, Setup, shadow_model, trace_backward

# What a process takes before it has a model. CUDA: context and the workspaces of cuBLAS. CPU: the libraries.
RUNTIME = {"cuda": int(0.7 * GIB), "cpu": int(0.75 * GIB)}
BUCKET = 500_000_000  # values in DeepSpeed's `reduce_bucket_size`, of which `overlap_comm` has two

Traces = dict[tuple, tuple[dict[str, int], "Sizes"]]


@dataclass(frozen=True)
class Sizes:
    """Of the model that is trained, adapter included. Bytes, unless they say otherwise."""

    weights: int
    own: int  # of them, those that are not the base under an adapter
    trained: list[torch.Tensor]  # without data
    embeddings: set[int]  # `id`s of the trained ones that are embeddings
    gathered: int  # whole at once where parameters are sharded

    @classmethod
    def of(cls, model: torch.nn.Module) -> "Sizes":
        parameters = list(model.parameters())
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
        plain = model.get_base_model() if isinstance(model, PeftModel) else model
        blocks = [m for m in model.modules() if type(m).__name__ in (plain._no_split_modules or ())]
        inside = [sum(p.nbytes for p in block.parameters()) for block in blocks]
        weights = sum(p.nbytes for p in parameters)
        # FSDP2 keeps what is outside of the blocks whole from forward to backward, and fetches one block ahead.
        gathered = weights - sum(inside) + 2 * max(inside, default=0)
        return cls(weights, sum(p.nbytes for p in trained), trained, embeddings, gathered)


def trainer_memory(case: Case, traces: Traces) -> Process:
    """`traces` keeps what was traced, because most changes to a recipe leave that as it is."""
    args, plan = case.training, case.plan
    half = case.dtype in (torch.bfloat16, torch.float16)
    # As `AtroposGRPOTrainer._set_up_masters`; PEFT keeps adapters in float32.
    exact = args.master_weights and half and case.peft_config is None and plan.sharding == "none"
    peak, sizes = _traced(case, _setup(case, exact), traces)
    constant, host = _state(case, sizes, exact)
    gradients = sum(one.numel() * (4 if exact else one.itemsize) for one in sizes.trained)
    if plan.sharding in ("zero2", "zero3", "fsdp"):
        gradients //= plan.processes
        peak = peak | {GRADIENTS: min(peak[GRADIENTS], gradients)}
    step = {GRADIENTS: gradients}
    if "optimizer state" not in host:
        step["temporaries"] = step_bytes(args.optim, sizes.trained, exact, plan.device) // _parts(plan)
    phases = {"forward and backward": constant | peak, "the optimizer's step": constant | step}
    if plan.device == "cpu":  # which is the host
        phases = {when: _joined(items, host) for when, items in phases.items()}
        # The checkpoint is loaded before it is exchanged for the server's memory.
        phases["loading"] = {"runtime": RUNTIME["cpu"], "weights": sizes.weights}
        host = {}
    when = max(phases, key=lambda name: sum(phases[name].values()))
    return Process("trainer", {name: size for name, size in phases[when].items() if size}, host, when)


def _setup(case: Case, exact: bool) -> Setup:
    args, plan = case.training, case.plan
    autocast = plan.mixed_precision if plan.mixed_precision != case.dtype else None
    return Setup(
        rows=case.rows,
        length=case.length,
        dtype=case.dtype,
        autocast=autocast,
        checkpointing=args.gradient_checkpointing,
        exact_gradients=exact,
        accumulates=args.gradient_accumulation_steps > 1 or case.several_micro_batches,
        kernels=plan.device == "cuda",
        # CUDA's kernels for float32 know no groups of heads, which transformers leaves to them where rows are as long
        # as each other (transformers/integrations/sdpa_attention.py, `use_gqa_in_sdpa`).
        plain_attention=plan.device == "cuda" and (autocast or case.dtype) == torch.float32 and case.groups_heads,
        distills=args.distillation_coef > 0,
    )


def _state(case: Case, sizes: Sizes, exact: bool) -> tuple[dict[str, int], dict[str, int]]:
    """What is there from step to step, on the device and in host memory."""
    args, plan = case.training, case.plan
    whole_weights = plan.sharding not in ("zero3", "fsdp")
    items = {"runtime": RUNTIME[plan.device]}
    if case.shares_weights:  # the base model's are the server's
        items["weights"] = sizes.own if case.peft_config is not None else 0
    else:
        items["weights"] = sizes.weights // (1 if whole_weights else plan.processes)
    host = {}
    if plan.offloads_weights:
        host["weights"] = items.pop("weights")
    if not whole_weights:
        items["gathered weights"] = min(sizes.gathered, sizes.weights)
    if args.beta != 0 and case.peft_config is None:  # TRL loads the model once more
        items["reference model"] = sizes.weights // (1 if whole_weights else plan.processes)
    items |= _buckets(case, sizes)

    number = sum(one.numel() for one in sizes.trained)
    # DeepSpeed has its own for 16-bit parameters (ZeRO, arXiv:1910.02054, section 3.1).
    masters = exact or (plan.sharding.startswith("zero") and case.dtype.itemsize == 2)
    of_optimizer = {
        "master weights": 4 * number // _parts(plan) if masters else 0,
        "optimizer state": state_bytes(args.optim, sizes.trained, masters, sizes.embeddings) // _parts(plan),
    }
    if (exact and args.offload_master_weights) or plan.offloads:
        host |= of_optimizer
        if plan.device == "cuda":
            host["gradients for the step"] = 4 * number // _parts(plan)
        return items, host
    if "paged" in args.optim:  # the driver moves it to the host when the device is full
        host["optimizer state"] = of_optimizer.pop("optimizer state")
    return items | of_optimizer, host


def _parts(plan: Plan) -> int:
    """Among how many processes the optimizer's state is divided."""
    return 1 if plan.sharding == "none" else plan.processes


def _traced(case: Case, setup: Setup, traces: Traces) -> tuple[dict[str, int], Sizes]:
    key = (setup, repr(case.peft_config))
    if key not in traces:
        model, mode = shadow_model(case.config, case.dtype, case.peft_config, **case.model_settings)
        traces[key] = (trace_backward(model, mode, setup), Sizes.of(model))
    return traces[key]


def _joined(items: dict[str, int], more: dict[str, int]) -> dict[str, int]:
    return {name: items.get(name, 0) + more.get(name, 0) for name in items | more}


def _buckets(case: Case, sizes: Sizes) -> dict[str, int]:
    """What gradients are reduced in."""
    plan, number = case.plan, sum(one.numel() for one in sizes.trained)
    if plan.processes == 1 or plan.sharding == "fsdp":
        return {}
    if plan.sharding == "none":  # DDP has a copy of all (torch's `gradient_as_bucket_view` is off)
        return {"buckets of DDP": sum(one.nbytes for one in sizes.trained)}
    return {"buckets of DeepSpeed": 2 * min(number, BUCKET) * case.dtype.itemsize}
