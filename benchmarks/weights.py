"""`trl-atropos bench weights`: how long a publish takes, for every mode, model size and adapter
rank.

For each mode and size it starts the real server in a process of its own, and publishes with the
real publisher (`publish.py`). What it compares with is measured in the same run (`floors.py`). A
configuration that fails becomes a row with an `error`; the others go on.
"""

import argparse
import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.models import PRESETS, make_model
from benchmarks.options import (
    aligned,
    give_result,
    list_of,
    model_size,
    new_parser,
    one_of,
    positive,
)
from trl_atropos import __version__
from trl_atropos.errors import AtroposTrainingError
from trl_atropos.services.signals import install_handlers

if TYPE_CHECKING:  # it imports torch
    from benchmarks.floors import Floors

logger = logging.getLogger(__name__)

LORA_MODES = ("colocate_lora", "nccl_lora", "lora")
MODES = ("colocate", "server", *LORA_MODES, "restart")
LARGEST_RANK = 512
DESCRIPTION = """\
Measure how long it takes to bring new weights to the server, for every mode, model size and adapter rank.

A publish is: pause, change the trained weights in place, send the bytes and put them in place, resume. Times
are medians, in milliseconds, on a server without requests; the first publishes, which set things up, do not count. A
probe compares server and trainer after the first publish and after the last.

  publish   what it takes to bring the bytes there and put them in place
  floor     one bare copy of the same bytes over the same link, measured in the same run: a broadcast between two
            processes (gloo, nccl), a copy in the device's memory (memory), a file written and read (lora, restart)
  ratio     publish / floor
"""
EPILOG = f"""\
modes:
  colocate        the trainer's parameters are the server's memory: nothing moves
  colocate_lora   the same for the base of an adapter, which goes through shared memory
  server          all weights go to the running server
  nccl_lora       a LoRA adapter goes from memory to memory
  lora            a LoRA adapter goes as a directory, over vLLM's own routes
  restart         a checkpoint is saved and the server is started again (at most 2 of the repeats)

Models are Qwen3 with random weights, made in a temporary folder (in TMPDIR, else /tmp). Sizes are like 1M, 20M or
1.5B, or the real shapes of Qwen3 where that has this name ({", ".join(PRESETS)}). Runs on the GPU if there is one.

  trl-atropos bench weights --modes colocate,server --params 1M,200M
  trl-atropos bench weights --modes nccl_lora,lora --params 0.6B --ranks 8,32,64 --json --output lora.json
"""
COLUMNS = {  # of the table: field, and how it is written
    "mode": "{}",
    "model": "{}",
    "rank": "{}",
    "transport": "{}",
    "bytes": "{:,}",
    "pause_ms": "{:.2f}",
    "resume_ms": "{:.2f}",
    "publish_ms": "{:.2f}",
    "floor_ms": "{:.2f}",
    "ratio": "{:.1f}",
    "total_ms": "{:.2f}",
    "first_publish_ms": "{:.1f}",
    "probe_max_abs_diff": "{:.0e}",
}


def build_parser() -> argparse.ArgumentParser:
    parser = new_parser("weights", DESCRIPTION, EPILOG)
    add = parser.add_argument
    add(
        "--modes",
        type=list_of(one_of(MODES)),
        default="colocate,server,nccl_lora,lora,restart",
        metavar="LIST",
        help="default: %(default)s",
    )
    add(
        "--params",
        type=list_of(model_size),
        default="1M,20M,200M",
        metavar="LIST",
        help="default: %(default)s",
    )
    add(
        "--ranks",
        type=list_of(_rank),
        default="8,32",
        metavar="LIST",
        help="of the adapters (default: %(default)s)",
    )
    add(
        "--repeats",
        type=positive,
        default=5,
        metavar="N",
        help="publishes that count (default: %(default)s)",
    )
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the weights (default: float32, and bfloat16 for the real shapes on a GPU)",
    )
    add(
        "--transport",
        choices=("auto", "nccl", "gloo", "memory"),
        default="auto",
        help="of the modes 'server' and 'nccl_lora' (default: %(default)s)",
    )
    add(
        "--gpu_memory_utilization",
        type=float,
        default=0.3,
        metavar="X",
        help="of the server (default: %(default)s)",
    )
    add(
        "--server_gpu",
        metavar="INDEX",
        help="GPU of the server (default: the trainer's); NCCL needs another one",
    )
    return parser


def _rank(text: str) -> int:
    if positive(text) > LARGEST_RANK:
        raise argparse.ArgumentTypeError(
            f"{text}: vLLM serves adapters of ranks up to {LARGEST_RANK}"
        )
    return int(text)


def main(argv: list[str] | None = None) -> None:
    options = build_parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")
    logger.setLevel(logging.INFO)
    install_handlers()  # SIGTERM as well ends the servers and removes the models
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    result = give_result(run, options, table)
    sys.exit(1 if any("error" in row for row in result["rows"]) else 0)


def run(options: argparse.Namespace) -> dict:
    """Measures everything that `options` names. Returns `{"header": {...}, "rows": [...]}`."""
    import torch  # here and below: after the help text and the errors, which should not wait for it

    from benchmarks.floors import Floors

    cuda = torch.cuda.is_available()
    device = torch.device("cuda:0" if cuda else "cpu")
    environment = {} if options.server_gpu is None else {"CUDA_VISIBLE_DEVICES": options.server_gpu}
    rows = []
    with tempfile.TemporaryDirectory(prefix="trl_atropos_bench_") as name:
        folder = Path(name)
        with Floors(folder, device, environment) as floors:
            for size in options.params:
                dtype = options.dtype or ("bfloat16" if cuda and size in PRESETS else "float32")
                model = folder / f"model-{size}"
                count = make_model(model, size, dtype)
                for mode in options.modes:
                    logger.info("measuring %s at %s parameters", mode, size)
                    for row in _rows_of(
                        mode, model, dtype, folder / f"{mode}-{size}", environment, floors, options
                    ):
                        rows.append(
                            {"mode": mode, "model": size, "params": count, "dtype": dtype, **row}
                        )
                        # not lost if the rest is interrupted
                        logger.info("%s", json.dumps(rows[-1]))
            header = {
                "trl_atropos": __version__,
                # builds of it have other names
                "vllm": version(packages_distributions()["vllm"][0]),
                **{
                    package: version(package)
                    for package in ("torch", "transformers", "trl", "peft")
                },
                "device": torch.cuda.get_device_name() if cuda else "cpu",
                "cpus": len(os.sched_getaffinity(0)),
                "link_gb_per_s": floors.gigabytes_per_second(),
            }
    return {"header": header, "rows": rows}


def _rows_of(
    mode: str,
    model: Path,
    dtype: str,
    folder: Path,
    environment: dict[str, str],
    floors: "Floors",
    options: argparse.Namespace,
) -> Iterator[dict]:
    """One row per rank, or one in all where there is no adapter, from one server."""
    from benchmarks.publish import measure, running_server

    ranks = options.ranks if mode in LORA_MODES else []
    left = ranks or [None]
    memory = options.gpu_memory_utilization
    try:
        with running_server(model, folder, mode, ranks, dtype, memory, environment) as servers:
            while left:
                yield measure(
                    mode,
                    model,
                    servers,
                    folder,
                    left[0],
                    dtype,
                    options.transport,
                    options.repeats,
                    floors,
                )
                left = left[1:]
    except Exception as error:
        logger.error(
            "%s at %s: %s",
            mode,
            model.name,
            error,
            exc_info=not isinstance(error, AtroposTrainingError),
        )
        for rank in left:
            yield {"rank": rank, "error": f"{type(error).__name__}: {error}"}


def table(result: dict) -> str:
    """The result as lines of text: the header, then a line per row."""
    header = dict(result["header"])
    links = ", ".join(f"{link} {speed:.2f}" for link, speed in header.pop("link_gb_per_s").items())
    lines = [
        " ".join(f"{name}={value}" for name, value in header.items()),
        f"links in GB/s: {links or 'not used'}",
        "",
    ]
    lines += aligned(result["rows"], COLUMNS)
    for row in result["rows"]:
        if "error" in row:
            lines += ["", f"{row['mode']} at {row['model']} failed: {row['error']}"]
    return "\n".join(lines) + "\n"
