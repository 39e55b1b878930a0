"""`trl-atropos bench long`: whole runs on long rollouts, of which each process computes a part.

The rollouts are drawn once and given to the trainer at each step. All else is as in a run: `accelerate
launch` starts the trainers (`long_trainer.py`), which send an adapter to a real server after each
step and compare what both compute.
"""

import argparse
import json
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.models import config_fields, dtype, make_model
from benchmarks.options import (
    aligned,
    give_result,
    list_of,
    model_size,
    new_parser,
    positive,
    visible_gpus,
)
from benchmarks.processes import launched, run_to_end, run_variables
from trl_atropos import __version__
from trl_atropos.protocol import TOKEN_VARIABLE
from trl_atropos.services.addresses import free_port
from trl_atropos.services.signals import install_handlers

DESCRIPTION = """\
Measure whole runs on long rollouts: on one process, and on several that divide each rollout (`sp_size`), with rollouts
that are as many times as long.

An adapter is trained with gradient checkpointing, and sent over NCCL (gloo on the CPU) after each step to a server,
whose log-probabilities are compared with the trainer's. Rollouts are random, and the same at each step. The first two
steps do not count: kernels are compiled, and memory is taken.

  processes  that divide each rollout
  tokens     of a rollout
  step, computing, publish   medians of the steps; computing is forward and backward
  tokens_per_s   of all rollouts, over the time of a step
  mfu        of computing, with attention of causal pairs, as a share of the peak of these GPUs in bfloat16; and by the
             formula that prime-rl has
  of_first   operations per second and process over those of the first row, with attention
  memory     most that the trainer had taken of a GPU (with one that a server shares: the trainer alone)
  probe      largest difference between trainer and server, in nats
"""
COLUMNS = {  # of the table: field, and how it is written
    "processes": "{}",
    "tokens": "{:,}",
    "rollouts": "{}",
    "step_s": "{:.2f}",
    "computing_s": "{:.2f}",
    "publish_ms": "{:.1f}",
    "tokens_per_s": "{:,.0f}",
    "mfu_with_attention": "{:.1%}",
    "mfu_by_prime_rl": "{:.1%}",
    "of_first": "{:.2f}",
    "memory_gb": "{:.1f}",
    "probe": "{:.0e}",
}
PROMPT = 16  # tokens
WARM_UP = 2  # steps that do not count
STACKS_BEFORE = 10  # seconds before the trainers' time is over


def build_parser() -> argparse.ArgumentParser:
    parser = new_parser("long", DESCRIPTION)
    add = parser.add_argument

    def number(name: str, default: int, help: str) -> None:
        text = f"{help} (default: %(default)s)"
        add(name, type=positive, default=default, metavar="N", help=text)

    add(
        "--params",
        type=model_size,
        default="2M",
        metavar="SIZE",
        help="of the model, such as 4B (default: %(default)s)",
    )
    add(
        "--processes",
        type=list_of(positive),
        default=[1, 2],
        metavar="LIST",
        help="that divide a rollout, one run for each (default: 1,2)",
    )
    number("--tokens", 512, "of a rollout, for each of these processes")
    number("--rollouts", 2, "of a step")
    number("--steps", 5, "of a run")
    number("--lora_r", 16, "rank of the adapter")
    add("--selective", action="store_true", help="of `gradient_checkpointing_kwargs`")
    add("--attention_kernel", default="auto", metavar="NAME", help="as in training arguments")
    add(
        "--gpus",
        metavar="LIST",
        help="as in CUDA_VISIBLE_DEVICES; the server is on the last one (default: all)",
    )
    add(
        "--gpu_memory_utilization",
        type=float,
        default=0.35,
        metavar="X",
        help="of the server (default: %(default)s)",
    )
    number(
        "--timeout",
        1800,
        "seconds for the trainers of a run, which say where they are before it is over",
    )
    return parser


def main(argv: list[str] | None = None) -> None:
    parser = build_parser()
    options = parser.parse_args(argv)
    heads = config_fields(options.params)["num_attention_heads"]
    for processes in options.processes:
        if heads % processes:
            parser.error(f"--processes {processes} does not divide the model's {heads} heads")
    if options.tokens <= PROMPT:
        parser.error(f"--tokens {options.tokens} leaves no completion after {PROMPT} of the prompt")
    if options.rollouts % 2:
        parser.error(f"--rollouts {options.rollouts}: two of them are a group, so it must be even")
    if options.steps <= WARM_UP:
        parser.error(f"--steps {options.steps}: {WARM_UP} do not count, so there must be more")
    options.gpus = visible_gpus(options.gpus)
    most = max(options.processes)
    if options.gpus and len(options.gpus) < most:
        parser.error(f"--processes {most} needs as many GPUs, and there are {len(options.gpus)}")
    give_result(run, options, table)


def run(options: argparse.Namespace) -> dict:
    """Measures. Returns versions, sizes, and a row for each number of processes."""
    from benchmarks.step_trainers import device_name

    install_handlers()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="trl_atropos_bench_") as name:
        model = Path(name, "model")
        longest = options.tokens * max(options.processes)
        make_model(model, options.params, dtype(), positions=longest)
        for processes in options.processes:
            folder = Path(name, f"processes-{processes}")
            folder.mkdir()
            rows.append(_measure(folder, model, processes, options))
            sys.stderr.write("\n".join(aligned(rows[-1:], COLUMNS)) + "\n")
    for row in rows:
        row["of_first"] = row["flops_per_process_s"] / rows[0]["flops_per_process_s"]
    return {
        "trl_atropos": __version__,
        **{package: version(package) for package in ("torch", "trl", "transformers")},
        "device": device_name(),
        "params": options.params,
        "lora_r": options.lora_r,
        "steps": options.steps,
        "rows": rows,
    }


def _measure(
    folder: Path, model: Path, processes: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Returns the row of a run whose trainers are `processes`."""
    from benchmarks.publish import running_server

    tokens = options.tokens * processes
    gpus = options.gpus
    server = {"CUDA_VISIBLE_DEVICES": gpus[-1]} if gpus else {}
    flags = ["--max-model-len", str(tokens), "--max-num-seqs", "8", "--enforce-eager"]
    memory = options.gpu_memory_utilization
    ranks = [options.lora_r]
    with running_server(
        model, folder / "server", "nccl_lora", ranks, dtype(), memory, server, flags
    ) as servers:
        settings = {
            "model": str(model),
            "url": servers.urls[0],
            "tokens": tokens,
            "prompt": PROMPT,
            "rollouts": options.rollouts,
            "steps": options.steps,
            "lora_r": options.lora_r,
            "selective": options.selective,
            "attention_kernel": options.attention_kernel,
            "stacks_at": time.time() + options.timeout - STACKS_BEFORE,
        }
        (folder / "settings.json").write_text(json.dumps(settings))
        variables = run_variables() | {TOKEN_VARIABLE: servers.token}
        _train(folder, processes, gpus[:processes], variables, options.timeout)
    result = json.loads((folder / "result.json").read_text())
    return {"processes": processes, "tokens": tokens, "rollouts": options.rollouts, **result}


def _train(
    folder: Path, processes: int, gpus: list[str], variables: dict[str, str], timeout: int
) -> None:
    """Runs the trainers to their end, on these GPUs or on the CPU."""
    words = ["-m", "benchmarks.long_trainer", str(folder)]
    config = "single_gpu.yaml" if gpus else "cpu.yaml"
    if processes > 1:
        config = "sp2.yaml"
        number = str(processes)
        words = ["--num_processes", number, "--parallelism_config_sp_size", number, *words]
        words = ["--main_process_port", str(free_port()), *words]
    run_to_end(
        "trl-atropos bench long: the trainers",
        launched(config, *words, gpus=gpus),
        folder / "trainers.log",
        timeout,
        variables,
        folder,
    )


def table(result: dict) -> str:
    """The result as lines of text."""
    header = {name: value for name, value in result.items() if name != "rows"}
    lines = [" ".join(f"{name}={value}" for name, value in header.items()), ""]
    lines += aligned(result["rows"], COLUMNS)
    return "\n".join([*lines, ""])
