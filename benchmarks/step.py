"""`trl-atropos bench step`: useful tokens per second of a training step, beside TRL's own trainer
on the same rows.

Lengths are log-normal, as those of completions are, and drawn with a fixed seed. TRL's
`GRPOTrainer` gets the rows by its own `rollout_func`, ours by a `RolloutSource`; model, loss and
settings are the same. `step_trainers.py` trains.
"""

import argparse
import os
import tempfile
from importlib.metadata import version
from pathlib import Path

from benchmarks.options import (
    add_rounds,
    aligned,
    give_result,
    list_of,
    model_size,
    new_parser,
    one_of,
    positive,
)
from trl_atropos import __version__

DESCRIPTION = """\
Measure how many useful tokens a training step works off in a second, beside TRL's own GRPOTrainer.

On each shape of batch, the trainers take turns, from the same weights on the same rows; of two optimizer steps, the
second is measured (of the plain loop's, the fourth), and the first one's loss is compared. Times are medians of the
rounds.

  shape       spread: lengths of completions are log-normal; equal: all of them are as long
  trainer     trl: TRL's GRPOTrainer; rows: ours, with a fixed number of rows per micro-batch; tokens: ours, with
              `max_tokens_per_micro_batch`; packed_loop: no trainer but a plain loop without padding, on GPUs with
              whole decoder layers compiled (on the CPU with none, as the first line says): what this model and
              machine can do
  padding     tokens that the training pass works on, for each useful one
  tokens      useful ones per second; one counts once, however many passes it goes through
  speedup     over TRL on that shape
  of_loop     tokens per second as a share of packed_loop's, if that was measured
  kernels     started on the GPU, for each useful token
  loss        of the first step; all trainers must have the same (the plain loop has none)
  pass        of the step: the forward and backward that train, without the passes before and the optimizer
  tflops      of the model in that pass: 6 per parameter and useful token (4 for one that is not trained), nothing for
              attention or recomputation
  mfu         that, as a share of the GPU's peak in bfloat16, where that is known; with attention (of causal pairs); and
              by the formula that prime-rl has, which counts masked pairs, too, and no embedding

A second table is computed, not timed: over 1,000 batches on several ranks, by how much the tokens of the slowest rank
exceed the mean.
"""
COLUMNS = {  # of the table: field, and how it is written
    "shape": "{}",
    "trainer": "{}",
    "padding": "{:.2f}",
    "step_ms": "{:.0f}",
    "tokens_per_s": "{:.0f}",
    "speedup": "{:.2f}",
    "of_loop": "{:.2f}",
    "kernels_per_token": "{:.2f}",
    "loss": "{:.6f}",
    "pass_ms": "{:.0f}",
    "tflops_per_s": "{:.3f}",
    "mfu": "{:.1%}",
    "mfu_with_attention": "{:.1%}",
    "mfu_by_prime_rl": "{:.1%}",
}


MFU = {  # of a row: the share of the peak, and what it is a share of
    "mfu": "tflops_per_s",
    "mfu_with_attention": "tflops_with_attention",
    "mfu_by_prime_rl": "tflops_by_prime_rl",
}


def build_parser() -> argparse.ArgumentParser:
    parser = new_parser("step", DESCRIPTION)
    add = parser.add_argument
    add(
        "--params",
        type=model_size,
        default="2M",
        metavar="SIZE",
        help="of the model, such as 20M, 0.6B or 8B (default: %(default)s)",
    )
    add(
        "--rows",
        type=positive,
        default=64,
        metavar="N",
        help="per optimizer step (default: %(default)s)",
    )
    add(
        "--micro_batch",
        type=positive,
        default=8,
        metavar="N",
        help="rows of one (default: %(default)s)",
    )
    add(
        "--prompt",
        type=positive,
        default=16,
        metavar="N",
        help="tokens of each prompt (default: %(default)s)",
    )
    add(
        "--group_size",
        type=positive,
        default=8,
        metavar="N",
        help="rows with the same prompt (default: %(default)s)",
    )
    add(
        "--median",
        type=positive,
        default=96,
        metavar="N",
        help="tokens of a completion (default: %(default)s)",
    )
    add(
        "--sigma",
        type=float,
        default=1.0,
        metavar="X",
        help="of the log-normal spread (default: %(default)s)",
    )
    add(
        "--longest",
        type=positive,
        default=4096,
        metavar="N",
        help="row in tokens; others are cut (default: 4096)",
    )
    add(
        "--max_tokens",
        type=positive,
        metavar="N",
        help="per micro-batch (default: of a usual micro-batch, or the longest row)",
    )
    add(
        "--ranks",
        type=positive,
        default=8,
        metavar="N",
        help="of the second table (default: %(default)s)",
    )
    add_rounds(parser, 3)
    add(
        "--shapes",
        type=list_of(one_of(("spread", "equal"))),
        default="spread,equal",
        metavar="LIST",
        help="which to run (default: %(default)s)",
    )
    add(
        "--trainers",
        type=list_of(one_of(("trl", "rows", "tokens", "packed_loop"))),
        default="trl,rows,tokens",
        metavar="LIST",
        help="which to run (default: %(default)s)",
    )
    add("--gradient_checkpointing", action="store_true", help="as in training arguments")
    add(
        "--selective",
        action="store_true",
        help="of `gradient_checkpointing_kwargs`: ours attend once (TRL's GRPO has no such option)",
    )
    add("--attention_kernel", default="auto", metavar="NAME", help="as in training arguments")
    add(
        "--lora_r",
        type=positive,
        metavar="N",
        help="train an adapter of this rank on all linear layers, not all weights",
    )
    add("--share_prompts", choices=("true", "false"), help="as in training arguments")
    add(
        "--master_weights",
        action="store_true",
        help="as in training arguments, for ours: TRL and the plain loop have none",
    )
    return parser


def main(argv: list[str] | None = None) -> None:
    parser = build_parser()
    options = parser.parse_args(argv)
    if options.lora_r and "packed_loop" in options.trainers:
        parser.error("--lora_r: the plain loop has no adapter, so leave packed_loop out")
    for name in ("micro_batch", "group_size"):
        if options.rows % getattr(options, name):
            parser.error(
                f"--rows {options.rows} is not a multiple of --{name} {getattr(options, name)}"
            )
    if not 0 <= options.sigma < 3:
        parser.error(f"--sigma is {options.sigma}: set it to 0 or more, and below 3")
    if options.longest <= options.prompt:
        parser.error(
            f"--longest {options.longest} leaves no completion after --prompt {options.prompt}"
        )
    give_result(run, options, table)


def run(options: argparse.Namespace) -> dict:
    """Measures. Returns `header`, `rows` (one per shape and trainer) and `ranks`."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    import torch

    from benchmarks.packed_loop import compiles
    from benchmarks.step_trainers import PACKED_LOOP, device_name, measure_balance, measure_shape
    from trl_atropos.metrics.flops import peak_flops

    with tempfile.TemporaryDirectory(prefix="trl_atropos_bench_") as folder:
        rows = [
            row for shape in options.shapes for row in measure_shape(shape, Path(folder), options)
        ]
    device = device_name()
    peak = peak_flops(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    for row in rows:
        for mfu, tflops in MFU.items():
            row[mfu] = row[tflops] * 1e12 / peak if peak else None
        row["speedup"] = _ratio(row, rows, "trl")
        row["of_loop"] = _ratio(row, rows, PACKED_LOOP)
    loop = {}
    if PACKED_LOOP in options.trainers:
        loop[PACKED_LOOP] = "compiled" if compiles() else "not_compiled"
    packages = ("torch", "trl", "transformers")
    return {
        "header": {
            "trl_atropos": __version__,
            **{package: version(package) for package in packages},
            "device": device,
            **loop,
            "cpus": len(os.sched_getaffinity(0)),
            "params": options.params,
            "rows": options.rows,
            "micro_batch": options.micro_batch,
            "sigma": options.sigma,
        },
        "rows": rows,
        "ranks": measure_balance(options),
    }


def _ratio(row: dict, rows: list[dict], trainer: str) -> float | None:
    """Returns the tokens per second of `row` over those of `trainer` on the same shape, or `None`
    if that was not measured."""
    for other in rows:
        if other["shape"] == row["shape"] and other["trainer"] == trainer:
            return row["tokens_per_s"] / other["tokens_per_s"]
    return None


def table(result: dict) -> str:
    """The result as lines of text."""
    lines = [" ".join(f"{name}={value}" for name, value in result["header"].items()), ""]
    lines += aligned(result["rows"], COLUMNS)
    lines += [
        "",
        "tokens of the slowest of "
        f"{result['ranks'][0]['ranks']} ranks over the mean, 1,000 batches",
    ]
    lines.append("order    median    95 %")
    lines += [
        f"{one['order']:<7} {one['median']:7.1%} {one['p95']:7.1%}" for one in result["ranks"]
    ]
    return "\n".join([*lines, ""])
