"""The estimate of a run: both processes' peak memory, as a table, and what to change if it does not fit.

`trl-atropos check` calls `estimate` and prints `table`; what `findings` returns are findings like its others.
"""

from dataclasses import dataclass, field

from trl_atropos.memory.case import Case, Process, case_of
from trl_atropos.memory.plan import GIB, Plan
from trl_atropos.memory.server import server_memory
from trl_atropos.memory.tracing import ACTIVATIONS, GRADIENTS, HEAD
from trl_atropos.memory.trainer import trainer_memory
from trl_atropos.recipe import Recipe

PASSING = (ACTIVATIONS, HEAD, GRADIENTS, "temporaries")  # items that are gone when a step is over


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
        elif case.server is not None:
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
    server = server_memory(case, traces) if case.starts_server else None
    return Estimate(case, trainer_memory(case, traces), server, traces)
