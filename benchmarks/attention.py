"""`trl-atropos bench attention`: how fast the kernels that could attend to a long rollout are, each
by itself."""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import Any

from benchmarks.models import config_fields, dtype
from benchmarks.options import (
    add_rounds,
    aligned,
    give_result,
    list_of,
    model_size,
    new_parser,
    one_of,
)
from trl_atropos import __version__

DESCRIPTION = """\
Measure kernels that attend to a row of one rollout, forward and backward, each by itself.

  kernel      torch: what this package uses, FlashAttention 2 on a GPU in 16 bits, else torch's SDPA; FA3, FA4: libraries
              that `attention_kernel` knows, if they are installed; cudnn: what it uses with `attention_kernel: cudnn`;
              cudnn_alone: torch's SDPA by cuDNN, called directly; flex: FlexAttention, compiled
  forward     milliseconds, the median of the rounds
  backward    the same
  first       milliseconds of both in the first round, in which a kernel is compiled or planned for the length
  tflops      of both: 12 * heads * head_dim operations for each pair of a query and a key that it sees
  of_best     that, as a share of the fastest kernel's on that length
  error       largest difference of results and gradients from those of torch's kernel
"""
COLUMNS = {
    "tokens": "{:,}",
    "kernel": "{}",
    "forward_ms": "{:.2f}",
    "backward_ms": "{:.2f}",
    "first_ms": "{:,.0f}",
    "tflops_per_s": "{:.3f}",
    "of_best": "{:.2f}",
    "error": "{:.1e}",
    "why_not": "{}",
}
KERNELS = ("torch", "FA3", "FA4", "cudnn", "cudnn_alone", "flex")
WARM_UP = 2  # rounds that do not count in the medians


def build_parser() -> argparse.ArgumentParser:
    parser = new_parser("attention", DESCRIPTION)
    add = parser.add_argument
    add(
        "--params",
        type=model_size,
        default="1.7B",
        metavar="SIZE",
        help="of the model whose heads are meant, such as 20M or 4B (default: %(default)s)",
    )
    add(
        "--tokens",
        type=list_of(_length),
        default="4096,16384,65536",
        metavar="LIST",
        help="of the row (default: %(default)s)",
    )
    add(
        "--kernels",
        type=list_of(one_of(KERNELS)),
        default=",".join(KERNELS),
        metavar="LIST",
        help="which to run (default: %(default)s)",
    )
    add_rounds(parser, 5)
    return parser


def main(argv: list[str] | None = None) -> None:
    options = build_parser().parse_args(argv)
    give_result(run, options, table)


def _length(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is no length of 2 tokens or more")
    return int(text)


def run(options: argparse.Namespace) -> dict:
    """Measures. Returns `header` and `rows`, one for each length and kernel."""
    import torch

    cuda = torch.cuda.is_available()
    rows = []
    for tokens in options.tokens:
        rows += measure(options, tokens, torch.device("cuda" if cuda else "cpu"))
    return {
        "header": {
            "trl_atropos": __version__,
            "torch": version("torch"),
            "device": torch.cuda.get_device_name() if cuda else "cpu",
            "dtype": dtype(),
            "params": options.params,
        },
        "rows": rows,
    }


@dataclass
class Runs:
    """What one kernel did with a row."""

    durations: list[tuple[float, float]] = field(default_factory=list)  # seconds, of both passes
    results: list | None = None  # of the last run, with gradients
    why_not: str | None = None  # the reason why it cannot run


def measure(options: argparse.Namespace, tokens: int, device: Any) -> list[dict]:
    """Returns a row of the table for each kernel."""
    import torch

    from trl_atropos.batches.attention_kernels import AttentionShape, Row

    fields = config_fields(options.params)
    shape = AttentionShape(
        heads=fields["num_attention_heads"],
        key_heads=fields["num_key_value_heads"],
        head_dim=fields["head_dim"],
        value_dim=fields["head_dim"],
        window=None,
        scaling=None,
    )
    row = Row.of(shape, [(tokens, tokens)], device, getattr(torch, dtype()))
    runs = _in_turns(options.kernels, WARM_UP + options.rounds, row)
    expected = None
    if "torch" in runs:
        expected = runs["torch"].results
    pairs = tokens * (tokens + 1) / 2
    flops = 12 * shape.heads * shape.head_dim * pairs
    measured = []
    for name, own in runs.items():
        described = {"tokens": tokens, "kernel": name}
        if own.why_not is None:
            described |= _figures(own, flops, expected)
        else:
            described["why_not"] = own.why_not
        measured.append(described)
    best = max((one.get("tflops_per_s", 0.0) for one in measured), default=0.0)
    for one in measured:
        if "tflops_per_s" in one:
            one["of_best"] = one["tflops_per_s"] / best
    return measured


def _in_turns(names: Sequence[str], rounds: int, row: Any) -> dict[str, Runs]:
    """Runs each kernel once a round, so that all of them meet the same noise."""
    import torch

    gradient = torch.randn_like(row.states[0].transpose(1, 2))
    kernels: dict[str, Callable[..., Any]] = {}
    runs = {name: Runs() for name in names}
    for _ in range(rounds):
        for name, own in runs.items():
            if own.why_not is not None:
                continue
            try:
                if name not in kernels:
                    kernels[name] = _kernel(name, row)
                seconds, own.results = timed(name, kernels[name], row, gradient)
            except Exception as error:  # noqa: BLE001 - whatever a kernel or its absence raises
                own.why_not = str(error).strip().partition("\n")[0][:60]
                continue
            own.durations.append(seconds)
    return runs


def _figures(runs: Runs, flops: float, expected: list | None) -> dict[str, Any]:
    """Returns what the table says of a kernel that ran, for so many operations in both passes."""
    counted = runs.durations[WARM_UP:]
    forward = statistics.median(seconds for seconds, _ in counted)
    backward = statistics.median(seconds for _, seconds in counted)
    return {
        "forward_ms": forward * 1e3,
        "backward_ms": backward * 1e3,
        "first_ms": sum(runs.durations[0]) * 1e3,
        "tflops_per_s": flops / (forward + backward) / 1e12,
        "error": _difference(runs.results, expected),
    }


def timed(
    name: str, attend: Callable[..., Any], row: Any, gradient: Any
) -> tuple[tuple[float, float], list]:
    """Returns the seconds of a forward and of a backward pass, and what they computed: results and
    gradients."""
    import torch

    from trl_atropos.batches.attention_kernels import activated

    wait = torch.get_device_module(row.states[0].device).synchronize
    with activated(name):
        wait()
        began = time.perf_counter()
        output = attend(*row.states)
        wait()
        halfway = time.perf_counter()
        gradients = torch.autograd.grad(output, row.states, gradient)
        wait()
        ended = time.perf_counter()
    return (halfway - began, ended - halfway), [output.detach(), *gradients]


def _kernel(name: str, row: Any) -> Callable[..., Any]:
    """Returns the function of (1, heads, T, head_dim) to (1, T, heads, head_dim)."""
    from torch.nn.attention import SDPBackend
    from torch.nn.functional import scaled_dot_product_attention

    from trl_atropos.batches.attention_kernels import CUDNN, MODULES, require_installed
    from trl_atropos.batches.long_attention import attend_in_turn
    from trl_atropos.batches.packed_attention import attend_at_once

    if name == CUDNN:
        return lambda *states: attend_in_turn(*states, row.counts[0], None)
    if name == "cudnn_alone":
        return partial(_by_backend, SDPBackend.CUDNN_ATTENTION)
    if name == "flex":
        return _flex(row)
    if row.states[0].device.type == "cuda":
        if name in MODULES:
            require_installed(name)
        return lambda *states: attend_at_once(*states, None, **row.options)
    if name != "torch":
        raise RuntimeError("needs a CUDA device")
    return lambda *states: scaled_dot_product_attention(
        *states, is_causal=True, enable_gqa=True
    ).transpose(1, 2)


def _by_backend(backend: Any, *states: Any) -> Any:
    from torch.nn.attention import sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    with sdpa_kernel(backend):
        output = scaled_dot_product_attention(*states, is_causal=True, enable_gqa=True)
    return output.transpose(1, 2)


def _flex(row: Any) -> Callable[..., Any]:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    tokens = row.states[0].size(2)
    device = row.states[0].device
    if device.type != "cuda":
        raise RuntimeError("has no backward pass on the CPU")

    def is_seen(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return query >= key

    compiled_mask = torch.compile(create_block_mask)
    mask = compiled_mask(is_seen, None, None, tokens, tokens, device=device)
    compiled = torch.compile(flex_attention)

    def attend(*states: Any) -> Any:
        return compiled(*states, block_mask=mask, enable_gqa=True).transpose(1, 2)

    return attend


def _difference(found: Sequence[Any], expected: Sequence[Any] | None) -> float | None:
    if expected is None:
        return None
    pairs = zip(found, expected, strict=True)
    return max((mine.float() - other.float()).abs().max().item() for mine, other in pairs)


def table(result: dict) -> str:
    """The result as lines of text."""
    lines = [" ".join(f"{name}={value}" for name, value in result["header"].items()), ""]
    return "\n".join([*lines, *aligned(result["rows"], COLUMNS), ""])
