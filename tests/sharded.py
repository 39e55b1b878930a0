"""Runs a function of a test module in several processes, with the parameters sharded as on GPUs, on
the CPU.

    launch("zero3", 2, "tests.my_module", "one", "two")

starts two processes with gloo between them; each calls `tests.my_module.main("one", "two")`. In
there, trainers are made with `**sharding_arguments("zero3")` among the arguments of their
configuration, and `forget_sharding()` between two of them. accelerate refuses DeepSpeed and FSDP2
without an accelerator; `_allow_on_cpu` talks it out of that, in the children only.
"""

import contextlib
import importlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.forge import TRAINER, Forked
from trl_atropos.services.addresses import free_port

KINDS = ("ddp", "zero2", "zero3", "fsdp2")
SHOWN = 4000  # characters of each process's output in a failure message


def sharding_arguments(kind: str) -> dict[str, Any]:
    """The arguments of `TrainingArguments` (and so of `AtroposGRPOConfig`) that shard as `kind`
    says."""
    if kind == "ddp":
        return {"use_cpu": True}
    if kind == "fsdp2":
        return {"use_cpu": False, "fsdp": True, "fsdp_config": {"version": 2}}
    stage = int(kind.removeprefix("zero"))
    return {
        "use_cpu": False,
        "deepspeed": {
            # DeepSpeed would not shard parameters as small as those of the tests.
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
        },
    }


def launch(
    kind: str,
    processes: int,
    module: str,
    *arguments: str,
    timeout: float = 200.0,
    sp_size: int = 1,
) -> None:
    """
    Runs `module.main(*arguments)` in every process. Returns when all have ended well. `sp_size` of
    them divide rows, as `accelerate launch` says.

    Raises `AssertionError` with what they wrote if one fails, which ends the others, or if they
    take longer than `timeout` seconds.
    """
    divided = {}
    if sp_size > 1:
        divided["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
        divided["PARALLELISM_CONFIG_SP_SIZE"] = str(sp_size)
    argv = ["-m", "tests.sharded", kind, module, *arguments]
    run_ranks(argv, processes, timeout, **divided)


def run_ranks(argv: Sequence[str], processes: int, timeout: float, **variables: str) -> None:
    """Runs `python *argv` as every rank of a group of processes on the CPU, as `launch` says.
    `variables` are added to their environment."""
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    what = f"{processes} processes of {' '.join(argv)}"
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        outputs = [Path(folder, f"rank{rank}") for rank in range(processes)]
        children = []
        for rank, output in enumerate(outputs):
            child = TRAINER.fork(
                argv, os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, output
            )
            children.append(child)
            stack.callback(_end, child)
        ended = _wait(children, time.monotonic() + timeout)
        codes = [child.poll() for child in children]  # None: was still running
        told = "\n".join(
            f"--- rank {i}\n{o.read_text(errors='replace')[-SHOWN:]}" for i, o in enumerate(outputs)
        )
        assert ended, f"{what} took more than {timeout} s\n{told}"
        assert not any(codes) and None not in codes, f"{what} ended with {codes}\n{told}"


def _wait(children: list[Forked], deadline: float) -> bool:
    """Until all have ended, or one has failed. False at the deadline."""
    while time.monotonic() < deadline:
        codes = [child.poll() for child in children]
        if None not in codes or any(codes):
            return True
        time.sleep(0.05)
    return False


def _end(child: Forked) -> None:
    if child.poll() is None:  # its group is its own for as long as it is not waited for
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.killpg(child.pid, signal.SIGKILL)
    child.wait()


# ---------------------------------------------------------------------------------- in the children


def forget_sharding() -> None:
    """Before another trainer is made in this process: accelerate remembers the plugin of the
    first."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def _allow_on_cpu(kind: str) -> None:
    import torch
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    if kind == "ddp":
        return
    # accelerate turns the first into FSDP where it is asked for; DeepSpeed takes either.
    distributed = DistributedType.MULTI_GPU if kind == "fsdp2" else DistributedType.MULTI_CPU
    PartialState._prepare_backend = lambda *_, **__: ("gloo", distributed)
    PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))
    if kind != "fsdp2":
        # By its name among the modules: the attribute `torch` of `deepspeed.comm` is torch itself.
        communication = importlib.import_module("deepspeed.comm.torch")
        # would compile C++ for a minute, where there is a compiler
        communication.build_shm_op = lambda: None


def _run(kind: str, module: str, *arguments: str) -> None:
    _allow_on_cpu(kind)
    importlib.import_module(module).main(*arguments)
    import torch.distributed

    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _run(*sys.argv[1:])
