"""`trl-atropos bench target`: GPU-seconds until a policy solves held-out problems, beside TRL's own
`GRPOTrainer`.

`PROTOCOL` fixes everything before the first run: task, target, when it is evaluated, settings of
both sides, seeds and budget. Each side is one process (`target_sides.py`) that keeps its vLLM for
all seeds and begins everything else anew for each: model, optimizer, and on our side the Atropos
API and the environment. The sides take turns, and a finished run is a line of a file at once, so
that a benchmark which was cut off goes on where it was.
"""

import argparse
import contextlib
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.options import Parser, aligned, positive, see_one_gpu, writable
from benchmarks.processes import ROOT, run_variables
from trl_atropos.services.service_log import tail
from trl_atropos.services.signals import install_handlers


@dataclass(frozen=True)
class Protocol:
    """
    Attributes:
        recipe: Our side's recipe; both sides take the environment's settings from it.
        size: Of the model that `recipes/arithmetic/make_model.py` makes.
        model_seed: Of its pre-training.
        seeds: Of the runs: problems, and sampling as far as a side has a seed for it.
        target: Share of the held-out problems that a sampled answer must solve.
        problems: How many of the test split are asked, always the same.
        first_evaluation: Optimizer step after which the target is first looked for.
        evaluate_every: Optimizer steps between two looks.
        training: Settings that both trainers get. `max_steps` is the budget of a run.
        ours: What our side changes in its recipe.
        bitwise: What the side `bitwise` changes besides: it is strictly on-policy.
        trl: What TRL's side gets besides `training`. All else is TRL's default.
        is_rehearsal: True if the numbers mean nothing.
    """

    recipe: str
    size: str
    model_seed: int
    seeds: tuple[int, ...]
    target: float
    problems: int
    first_evaluation: int
    evaluate_every: int
    training: dict[str, Any]
    ours: dict[str, Any]
    bitwise: dict[str, Any]
    trl: dict[str, Any]
    is_rehearsal: bool = False

    @property
    def id(self) -> str:
        """A hash of all of it and of the recipe, which every row has."""
        text = json.dumps(asdict(self), sort_keys=True) + (ROOT / self.recipe).read_text()
        return hashlib.sha256(text.encode()).hexdigest()[:12]


PROTOCOL = Protocol(
    recipe="recipes/arithmetic/gpu.yaml",
    size="gpu",
    model_seed=42,
    seeds=(1, 2, 3, 4, 5, 6),
    target=0.98,
    problems=500,
    first_evaluation=20,
    evaluate_every=5,
    training={
        "max_steps": 100,
        "per_device_train_batch_size": 256,  # rollouts of a step, in one micro-batch
        "gradient_accumulation_steps": 1,
        "max_completion_length": 128,
        "learning_rate": 5e-5,
        "lr_scheduler_type": "linear",
        "warmup_steps": 10,
        "loss_type": "dr_grpo",
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    },
    ours={"evaluations": []},
    bitwise={
        "numerics": "bitwise",
        "vllm_mode": "colocate",
        "max_staleness": 0,
        # no `--compilation-config`: the server sets its own
        "vllm_args": ["--max-model-len", "512", "--max-num-seqs", "256", "--dtype", "bfloat16"]
        + ["--disable-uvicorn-access-log", "--kv-cache-memory-bytes", "4G"]
        + ["--gpu-memory-utilization", "0.1"],
    },
    trl={
        "num_generations": 8,
        "bf16": True,  # float32 weights under autocast, TRL's default
        # On one GPU, TRL's vLLM has to be in its process. It compiles and captures graphs there.
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": 512,
        "vllm_gpu_memory_utilization": 0.1,  # its cache then holds twenty times what is in flight
    },
)
CPU_TRAINING = {"per_device_train_batch_size": 32, "max_completion_length": 48}
COLUMNS = {  # of the table: field, and how it is written
    "side": "{}",
    "seed": "{}",
    "reached": "{}",
    "seconds": "{:.1f}",
    "steps": "{}",
    "pass@1": "{:.3f}",
    "evaluation_s": "{:.1f}",
    "run_start_s": "{:.1f}",
    "process_start_s": "{:.1f}",
    "staleness": "{:.2f}",
    "tokens": "{:,}",
    "differ": "{:,}",
}
SIDES = ("ours", "trl", "bitwise")
START_TIMEOUT = 400.0  # seconds for a side's vLLM
MODEL_TIMEOUT = 590.0  # seconds for the pre-training
LEAVE_TIMEOUT = 60.0  # seconds for a side to end
LOOK_EVERY = 0.1  # seconds
DESCRIPTION = """\
Measure seconds on one GPU until the policy solves 98 % of 500 held-out problems of the arithmetic recipe, beside TRL's
own GRPOTrainer with vLLM in its process. Task, settings of both sides, six seeds and the budget are fixed in
benchmarks/target.py.

  seconds        from the first request for a sample to the end of the optimizer step after which the target is reached.
                 A run that does not reach it counts with its whole budget of 100 steps. One GPU: they are GPU-seconds
  evaluation_s   apart from them. After every fifth step from the twentieth on, each side samples one answer to each
                 problem in its process, by the same code; our servers are paused meanwhile, so that nothing is sampled
                 for free
  run_start_s    apart, too: from the order to run a seed to its first request
  process_start_s
                 apart, and once for all seeds of a process: until vLLM is ready
  tokens, differ of the side `bitwise` (`numerics: bitwise`, strictly on-policy): trained tokens, and how many have
                 another log-probability under the trainer than the server gave

The sides take turns on one machine, in the other order for every second seed. Each finished run is added to the file
`--output` at once; runs that are there are not repeated, so `--seeds 1,2` and later `--seeds 3,4` make one result.
"""


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="trl-atropos bench target",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--seeds", metavar="LIST", help="of the fixed six, such as 1,2 (default: all)")
    add(
        "--sides", default="ours,trl", metavar="LIST", help="ours, trl, bitwise (default: ours,trl)"
    )
    add(
        "--folder",
        type=Path,
        metavar="FOLDER",
        default=Path("runs/target"),
        help="of what the runs write (default: %(default)s)",
    )
    add(
        "--model",
        type=Path,
        metavar="MODEL",
        help="folder of the model, which is made if it is missing (default: FOLDER/model)",
    )
    add("--output", type=writable, metavar="FILE", help="of rows (default: FOLDER/rows.jsonl)")
    add(
        "--timeout",
        type=positive,
        default=300,
        metavar="SECONDS",
        help="of a run (default: %(default)s)",
    )
    add("--rehearse", action="store_true", help="run both sides with a budget of four steps")
    add("--only_model", action="store_true", help="make the model, and nothing else")
    add("--summary", action="store_true", help="run nothing, only sum up the file")
    add("--json", action="store_true", help="print one JSON object in place of the table")
    return parser


def main(argv: list[str] | None = None) -> None:
    parser = build_parser()
    options = parser.parse_args(argv)
    protocol = rehearsal() if options.rehearse else PROTOCOL
    try:
        seeds = _chosen(options.seeds, protocol.seeds)
        sides = _chosen(options.sides, SIDES)
    except ValueError as error:
        parser.error(str(error))
    if not (options.rehearse or options.summary or has_gpu()):
        parser.error("it needs a GPU; `--rehearse` tries both sides on the CPU")
    folder = options.folder.absolute()
    if protocol.is_rehearsal:
        folder /= "rehearsal"
    output = options.output or folder / "rows.jsonl"
    try:
        rows = read_rows(output, protocol)
    except ValueError as error:
        parser.error(f"--output {output}: {error}")
    if not options.summary:
        folder.mkdir(parents=True, exist_ok=True)
        see_one_gpu()
        install_handlers()
        with contextlib.redirect_stdout(sys.stderr):
            model = (options.model or folder / "model").absolute()
            if not (model / "config.json").exists():
                make_model(model, folder, protocol)
            if not options.only_model:
                rows += run(folder, model, output, rows, seeds, sides, protocol, options.timeout)
    result = summary(rows, protocol)
    sys.stdout.write(json.dumps(result, indent=2) + "\n" if options.json else table(result))


def rehearsal() -> Protocol:
    """Returns the protocol of `--rehearse`, for the GPU or the CPU that is here."""
    tiny = replace(
        PROTOCOL,
        seeds=(0, 1),
        problems=16,
        first_evaluation=2,
        evaluate_every=2,
        training={**PROTOCOL.training, "max_steps": 4},
        is_rehearsal=True,
    )
    if has_gpu():
        return tiny
    trl = {"num_generations": 8, "bf16": False, "use_cpu": True}
    # The modes that the sides have on a GPU. `numerics: bitwise` computes on a Hopper GPU only.
    ours = {**PROTOCOL.ours, "vllm_mode": "server"}
    bitwise = {"vllm_mode": "colocate", "max_staleness": 0}
    training = {**tiny.training, **CPU_TRAINING}
    recipe = "recipes/arithmetic/colocate.yaml"
    return replace(
        tiny,
        recipe=recipe,
        size="cpu",
        training=training,
        ours=ours,
        bitwise=bitwise,
        trl=trl,
    )


def has_gpu() -> bool:
    """Returns whether torch finds a GPU. CUDA does not begin in this process."""
    import torch

    return torch.cuda.is_available()


def _chosen(text: str | None, known: Sequence[Any]) -> list[Any]:
    """Returns the items of `known` that a comma-separated text names, in the order of the text; all
    of them without a text. Raises `ValueError` for another name."""
    if text is None:
        return list(known)
    by_name = {str(item): item for item in known}
    chosen = []
    for name in text.split(","):
        if name not in by_name:
            raise ValueError(f"{name!r} is none of {', '.join(by_name)}")
        chosen.append(by_name[name])
    return chosen


# --------------------------------------------------------------------------------------------- rows


def read_rows(path: Path, protocol: Protocol) -> list[dict[str, Any]]:
    """Returns the rows of finished runs. Raises `ValueError` if they are of another protocol."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines():
        rows.append(json.loads(line))
    others = {row["protocol"] for row in rows} - {protocol.id}
    if others:
        raise ValueError(
            f"it has runs of protocol {', '.join(sorted(others))}, and this one is {protocol.id}: "
            "name another file"
        )
    return rows


def summary(rows: list[dict[str, Any]], protocol: Protocol) -> dict[str, Any]:
    """Returns the rows, and the seconds of each side by seed with their median. `ratio` is of our
    median to TRL's, over the seeds that both have run."""
    seconds: dict[str, dict[int, float]] = {}
    for row in rows:
        seconds.setdefault(row["side"], {})[row["seed"]] = row["seconds"]
    missing = {}
    for side in seconds:
        missing[side] = sorted(set(protocol.seeds) - set(seconds[side]))
    medians = {side: statistics.median(by_seed.values()) for side, by_seed in seconds.items()}
    pairs = sorted(set(seconds.get("ours", ())) & set(seconds.get("trl", ())))
    ratio = None
    if pairs:
        ours = statistics.median(seconds["ours"][seed] for seed in pairs)
        theirs = statistics.median(seconds["trl"][seed] for seed in pairs)
        ratio = ours / theirs
    return {
        "protocol": asdict(protocol),
        "rows": rows,
        "seconds": seconds,
        "medians": medians,
        "missing": missing,
        "pairs": pairs,
        "machines": sorted({row["machine"] for row in rows}),
        "models": sorted({row["model"] for row in rows}),
        "ratio": ratio,
    }


def table(result: dict[str, Any]) -> str:
    """The result as lines of text."""
    protocol = result["protocol"]
    lines = []
    if protocol["is_rehearsal"]:
        lines += ["A rehearsal: these numbers mean nothing.", ""]
    lines.append(
        f"target {protocol['target']} of {protocol['problems']} held-out problems, budget "
        f"{protocol['training']['max_steps']} steps"
    )
    lines.append(f"machines {', '.join(result['machines'])}; models {', '.join(result['models'])}")
    lines += ["", *aligned(result["rows"], COLUMNS), ""]
    for side, by_seed in result["seconds"].items():
        listed = ", ".join(f"{seconds:.1f}" for _, seconds in sorted(by_seed.items()))
        line = f"{side}: median {result['medians'][side]:.1f} s of {listed}"
        if result["missing"][side]:
            line += f"; not run: seeds {', '.join(map(str, result['missing'][side]))}"
        lines.append(line)
    if result["ratio"] is not None:
        seeds = ", ".join(map(str, result["pairs"]))
        lines.append(f"ours / trl, seeds {seeds}: {result['ratio']:.3f}")
    return "\n".join(lines) + "\n"


# --------------------------------------------------------------------------------------------- runs


def make_model(model: Path, folder: Path, protocol: Protocol) -> None:
    """Pre-trains the model that all runs begin with."""
    began = time.monotonic()
    with Side("model", folder, model, protocol) as side:
        side.wait_for(model / "config.json", MODEL_TIMEOUT)
    sys.stderr.write(f"made {model} in {time.monotonic() - began:.0f} s\n")


def run(
    folder: Path,
    model: Path,
    output: Path,
    rows: list[dict[str, Any]],
    seeds: list[int],
    sides: list[str],
    protocol: Protocol,
    timeout: float,
) -> list[dict[str, Any]]:
    """Makes the runs that no row tells of, and adds each to the file `output`. Returns their
    rows."""
    done = {(row["side"], row["seed"]) for row in rows}
    pending = []
    for number, seed in enumerate(seeds):
        order = sides if number % 2 == 0 else sides[::-1]
        pending += [(side, seed) for side in order if (side, seed) not in done]
    added = []
    with contextlib.ExitStack() as stack:
        processes: dict[str, Side] = {}
        for number, (name, seed) in enumerate(pending):
            if name not in processes:
                processes[name] = stack.enter_context(Side(name, folder, model, protocol))
                processes[name].wait_for(folder / name / "ready", START_TIMEOUT)
            row = {"protocol": protocol.id, **processes[name].train(seed, timeout)}
            added.append(row)
            with output.open("a") as file:
                file.write(json.dumps(row) + "\n")
            sys.stderr.write("\n".join(aligned([row], COLUMNS)) + "\n")
            still_needed = {later for later, _ in pending[number + 1 :]}
            if name not in still_needed:
                processes[name].close()
    return added


class Side:
    """
    The process of one side, `ours`, `trl` or `bitwise`, or `model`, which pre-trains.

    It reads seeds from its standard input, and writes a file for each run. `folder` is that of the
    benchmark; the side's own is below it.
    """

    def __init__(self, name: str, folder: Path, model: Path, protocol: Protocol):
        self._name = name
        self._folder = folder / name
        if name == "model":
            self._folder = folder / "made"
        self._folder.mkdir(exist_ok=True)
        (self._folder / "ready").unlink(missing_ok=True)
        settings = {
            "started_at": time.time(),
            "model": str(model),
            "protocol": asdict(protocol),
        }
        (self._folder / "settings.json").write_text(json.dumps(settings))
        self._log = self._folder / "log.txt"
        command = [sys.executable, "-m", "benchmarks.target_sides", name, str(self._folder)]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                env=os.environ | run_variables(),
            )

    def __enter__(self) -> "Side":
        return self

    def __exit__(self, error_type: type | None, *error: object) -> None:
        if error_type is not None:
            self._process.terminate()
        self.close()

    def train(self, seed: int, timeout: float) -> dict[str, Any]:
        """Runs a seed. Returns its row, without the protocol's id."""
        path = self._folder / f"seed-{seed}.json"
        path.unlink(missing_ok=True)
        self._process.stdin.write(f"{seed}\n")
        self._process.stdin.flush()
        self.wait_for(path, timeout)
        return json.loads(path.read_text())

    def wait_for(self, path: Path, timeout: float) -> None:
        """Returns when the process has written `path`. Exits if it ends or takes too long."""
        deadline = time.monotonic() + timeout
        while not path.exists():
            code = self._process.poll()
            if code is not None and not path.exists():
                sys.exit(
                    f"trl-atropos bench target: {self._name} ended with exit code {code} before it "
                    f"wrote {path}. The end of {self._log}:\n{tail(self._log)}"
                )
            if time.monotonic() > deadline:
                sys.exit(
                    f"trl-atropos bench target: {self._name} did not write {path} within "
                    f"{timeout:.0f} s. The end of {self._log}:\n{tail(self._log)}"
                )
            time.sleep(LOOK_EVERY)

    def close(self) -> None:
        """Ends the process, which ends by itself when nothing more is asked of it."""
        if self._process.poll() is None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            try:
                self._process.wait(LEAVE_TIMEOUT)
            except subprocess.TimeoutExpired:
                self._process.terminate()
                self._process.wait()
