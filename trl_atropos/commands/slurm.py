"""`trl-atropos slurm RECIPE --nodes N`: a batch script for a run over several nodes of a SLURM cluster.

The first nodes train, the others serve, with as many servers as their GPUs give. The script does what
docs/multi-node.md does by hand. It is to be read, and completed with what a cluster wants (account, partition).
"""

import argparse
import os
import re
import shlex
import sys
from itertools import takewhile
from pathlib import Path
from typing import Any

from trl_atropos.commands import with_recipe
from trl_atropos.errors import AtroposTrainingError, RecipeError
from trl_atropos.protocol import ADAPTER_MODES, parallel, served_rank, server_flags, stated_settings, values_of

DESCRIPTION = """\
Writes a batch script for a run over several nodes of a SLURM cluster: the first
nodes train, the others serve. The trainer's settings are the recipe's, with the
flags that are given here; the servers' flags are its `vllm_args`, and where it
has none those of the `trl-atropos serve` in its first lines. All nodes must
share the folder in which the script is submitted, and `output_dir`.

  trl-atropos slurm recipes/gsm8k/zero3_72b.yaml --nodes 3 --output job.sh
  sbatch job.sh"""

OWN = ("--host", "--port", "--vllm_mode")  # flags of a server that the script sets
TEMPLATE = Path(__file__).with_name("slurm.sh")  # with @NAME@ where something is filled in
PATIENCE = 3600  # seconds until the last server must answer


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trl-atropos slurm",
        usage="trl-atropos slurm RECIPE --nodes N [--output FILE] [--SETTING VALUE ...]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add, head = parser.add_argument, "default: what the recipe's first lines launch with"
    add("--nodes", type=int, required=True, metavar="N", help="of the job, at least 2")
    add("--trainer_nodes", type=int, metavar="N", help=f"of these, nodes that train; {head}, or 1")
    add("--gpus_per_node", type=int, default=8, metavar="N", help="default: %(default)s")
    add("--config_file", metavar="FILE", help=f"accelerate's, for the trainer; {head}, or DDP")
    add("--output", type=Path, metavar="FILE", help="where to write the script; default: the terminal")
    return parser


def main(words: list[str]) -> None:
    """Prints the script, or writes it to `--output`."""
    if not words:
        build_parser().print_help()
        sys.exit(2)
    options, settings = build_parser().parse_known_args(words)
    try:
        script = render(options, with_recipe(settings), shlex.join(["trl-atropos", "slurm", *words]))
        if options.output is None:
            sys.stdout.write(script)
            return
        options.output.write_text(script, encoding="utf-8")
    except AtroposTrainingError as error:
        sys.exit(f"trl-atropos slurm: {error}")
    except OSError as error:
        sys.exit(f"trl-atropos slurm: {options.output} cannot be written ({error.strerror}). Name another --output.")
    sys.stdout.write(f"Wrote {options.output}. Next: add your cluster's lines, then: sbatch {options.output}\n")


def render(options: argparse.Namespace, words: list[str], made_by: str) -> str:
    """The script for the recipe and the settings in `words`. Raises `RecipeError` if such a run cannot be."""
    recipe = next(iter(values_of("--config", words)[0]), "")
    if not recipe:
        raise RecipeError("No recipe", fix="Name it first: `trl-atropos slurm RECIPE --nodes N`.")
    if not os.path.isfile(recipe):
        raise RecipeError(f"The recipe {recipe!r} does not exist (looked in {os.getcwd()})", recipe, "Correct it.")
    quoted, words = values_of("--vllm_args", words)  # which are for the servers alone
    settings, head = stated_settings(words) | ({"vllm_args": quoted[-1]} if quoted else {}), _commands(recipe)
    launched = next((line for line in head if "launch" in line), [])
    trainers = options.trainer_nodes or int(next(iter(values_of("--num_machines", launched)[0]), 1))
    mode, model = settings.get("vllm_mode", "colocate"), str(settings.get("model_name_or_path"))
    flags = _server_flags(settings, next((line for line in head if "serve" in line), []))
    each, gpus = parallel(flags)[0], options.gpus_per_node
    if mode == "colocate":
        fix = "Set `vllm_mode: server`, or with an adapter `vllm_mode: nccl_lora`."
        raise RecipeError("With `vllm_mode: colocate`, trainer and server share a device, not a cluster", mode, fix)
    if not 0 < trainers < options.nodes:
        what = f"Of --nodes {options.nodes}, {trainers} train, and some must train and some serve"
        raise RecipeError(what, fix="Change `--nodes` or `--trainer_nodes`.")
    if each > gpus:
        what = f"A server of {each} GPUs does not fit on a node of {gpus} (`--gpus_per_node`)"
        raise RecipeError(what, fix="Lower its `--tensor-parallel-size`, or write its part of the script by hand.")
    launch = [f"--num_machines {trainers} --num_processes {trainers * gpus}"]
    file = options.config_file or next(iter(values_of("--config_file", launched)[0]), None)
    sharded = f"--config_file {shlex.quote(file)}" if file else "--multi_gpu --mixed_precision no --dynamo_backend no"
    if trainers > 1:
        launch += ['--machine_rank "$SLURM_NODEID" --main_process_ip "$HEAD" --main_process_port 29500']
    output_dir = str(settings.get("output_dir"))
    values = {"nodes": options.nodes, "gpus": gpus, "trainers": trainers, "serving": options.nodes - trainers}
    values |= {"each": each, "servers": gpus // each, "made_by": made_by, "patience": PATIENCE}
    values |= {"name": shlex.quote(str(settings.get("run_name") or Path(output_dir).name))}
    values |= {"bin": shlex.quote(str(Path(sys.executable).parent)), "output_dir": shlex.quote(output_dir)}
    values |= {"serve": shlex.join(["trl-atropos", "serve", model, "--vllm_mode", mode, *flags])}
    values |= {"launch": " \\\n    ".join([sharded, *launch]), "train": shlex.join(words)}
    return re.sub(r"@(\w+)@", lambda found: str(values[found[1]]), TEMPLATE.read_text(encoding="utf-8"))


def _commands(recipe: str) -> list[list[str]]:
    """The commands in a recipe's first lines, as words."""
    lines = Path(recipe).read_text(encoding="utf-8").splitlines()
    head = "\n".join(line.lstrip("#").strip() for line in takewhile(lambda line: line.startswith("#"), lines))
    commands = []
    for line in head.replace("\\\n", " ").splitlines():
        if line.startswith(("accelerate launch ", "trl-atropos ")):
            commands.append(shlex.split(line, comments=True))
    return commands


def _server_flags(settings: dict[str, Any], served: list[str]) -> list[str]:
    """Flags of each server, without those that the script sets."""
    given = settings.get("vllm_args") or served[3:]
    flags = shlex.split(given) if isinstance(given, str) else [str(word) for word in given]
    for name in OWN:
        flags = values_of(name, flags)[1]
    stated, longest = server_flags(flags), settings.get("max_sequence_length")
    if longest and "--max-model-len" not in stated:
        flags += ["--max-model-len", str(longest)]
    if settings.get("vllm_mode") in ADAPTER_MODES and "--max-lora-rank" not in stated:
        flags += ["--max-lora-rank", str(served_rank(int(settings.get("lora_r") or 16)))]  # peft's default
    return flags
