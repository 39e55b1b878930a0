"""`trl-atropos slurm RECIPE --nodes N`: a batch script for a run over several nodes of a SLURM cluster.

The first nodes train, the others serve, with as many servers as their GPUs give. The script does what
docs/multi-node.md does by hand. It is to be read, and completed with what a cluster wants (account, partition).
"""

import argparse
import os
import shlex
import sys
from itertools import takewhile
from pathlib import Path
from typing import Any

from trl_atropos.errors import AtroposTrainingError, RecipeError
from trl_atropos.protocol import ADAPTER_MODES, LORA_RANKS, parallel, server_flags, stated_settings, values_of

DESCRIPTION = """\
Writes a batch script for a run over several nodes of a SLURM cluster: the first
nodes train, the others serve. The trainer's settings are the recipe's, with the
flags that are given here; the servers' flags are its `vllm_args`, and where it
has none those of the `trl-atropos serve` in its first lines. All nodes must
share the folder in which the script is submitted, and `output_dir`.

  trl-atropos slurm recipes/gsm8k/zero3_72b.yaml --nodes 3 --output job.sh
  sbatch job.sh"""

OWN = ("--host", "--port", "--vllm_mode")  # flags of a server that the script sets
SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={gpus}
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log

# Made by: {made_by}
# Nodes that train: {trainers}. Nodes that serve: {serving}, each with {servers} server(s) of {each} GPU(s).
# Add the lines that your cluster wants, such as --account and --partition. Then, in a folder that all nodes share and
# where the recipe's paths begin: sbatch FILE. `trl-atropos check` says before whether the recipe is right.

set -euo pipefail
export PATH={bin}:$PATH  # where this script was made

TRAINERS={trainers} SERVERS_PER_NODE={servers} GPUS_PER_SERVER={each}
OUTPUT={output_dir}
mkdir -p "$OUTPUT"
mapfile -t NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

# Runs a command on so many nodes, which a list names, beside what else runs there.
on() {{ srun --overlap --cpu-bind=none --nodes="$1" --ntasks="$1" --nodelist="$2" "${{@:3}}"; }}

# A node's first address. If it has several networks, choose the one that the nodes reach each other by.
address() {{ on 1 "$1" hostname -I | awk '{{ print $1 }}'; }}

# One token for servers and trainer, in a file that only you can read. It goes with the job.
TOKEN_FILE=$(realpath "$OUTPUT")/token-$SLURM_JOB_ID
export TOKEN_FILE
(umask 077 && od -An -N24 -tx1 /dev/urandom | tr -d ' \\n' > "$TOKEN_FILE")
STEPS=()
trap 'rm -f "$TOKEN_FILE"; kill "${{STEPS[@]}}" 2> /dev/null || true' EXIT

# ------------------------------------------------------------------------------------------------------------- servers

URLS=()
for node in "${{NODES[@]:TRAINERS}}"; do
    HOST=$(address "$node")
    for ((i = 0; i < SERVERS_PER_NODE; i++)); do
        PORT=$((9001 + i))
        DEVICES=$(seq -s, $((i * GPUS_PER_SERVER)) $(((i + 1) * GPUS_PER_SERVER - 1)))
        export HOST PORT DEVICES
        on 1 "$node" bash -s > "$OUTPUT/server-$node-$i.log" 2>&1 <<'SERVER' &
TRL_ATROPOS_TOKEN=$(< "$TOKEN_FILE")
export TRL_ATROPOS_TOKEN CUDA_VISIBLE_DEVICES=$DEVICES
exec {serve} \\
    --host "$HOST" --port "$PORT" < /dev/null
SERVER
        STEPS+=($!)
        URLS+=("http://$HOST:$PORT")
    done
done

for url in "${{URLS[@]}}"; do
    until curl --silent --fail --noproxy '*' --output /dev/null "$url/health"; do
        for step in "${{STEPS[@]}}"; do
            kill -0 "$step" 2> /dev/null || {{ echo "A server has ended: see $OUTPUT/server-*.log" >&2; exit 1; }}
        done
        ((SECONDS < {patience})) || {{ echo "No server at $url: see $OUTPUT/server-*.log" >&2; exit 1; }}
        sleep 5
    done
    echo "A server is ready at $url after $SECONDS s"
done

# ------------------------------------------------------------------------------------------------------------- trainer

HEAD=$(address "${{NODES[0]}}")
SERVERS=$(IFS=, && echo "${{URLS[*]}}")
no_proxy=${{no_proxy:+$no_proxy,}}127.0.0.1,$(sed 's#http://##g; s#:[0-9]*##g' <<< "$SERVERS")
export HEAD SERVERS no_proxy
on "$TRAINERS" "$(IFS=, && echo "${{NODES[*]:0:TRAINERS}}")" bash -s <<'TRAINER'
TRL_ATROPOS_TOKEN=$(< "$TOKEN_FILE")
export TRL_ATROPOS_TOKEN
exec accelerate launch --quiet {launch} \\
    -m trl_atropos.train {train} \\
    --start_vllm false --vllm_server_base_url "$SERVERS" < /dev/null
TRAINER
"""
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
        script = render(options, settings, shlex.join(["trl-atropos", "slurm", *words]))
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
    if not os.path.isfile(recipe):
        raise RecipeError(f"The recipe {recipe!r} does not exist (looked in {os.getcwd()})", recipe, "Correct it.")
    settings, head = stated_settings(words), _commands(recipe)
    launched = next((line for line in head if "launch" in line), [])
    trainers = options.trainer_nodes or int(next(iter(values_of("--num_machines", launched)[0]), 1))
    mode, model = settings.get("vllm_mode", "colocate"), str(settings.get("model_name_or_path"))
    flags = _server_flags(settings, next((line for line in head if "serve" in line), []))
    each, gpus = parallel(flags)[0], options.gpus_per_node
    if mode == "colocate":
        fix = "Set `vllm_mode: server`, or with an adapter `vllm_mode: nccl_lora`."
        raise RecipeError("With `vllm_mode: colocate`, trainer and server share a device, not a cluster", mode, fix)
    if not 0 < trainers < options.nodes:
        seen, fix = f"--nodes {options.nodes}, {trainers} of them to train", "Raise `--nodes`."
        raise RecipeError("A run needs at least one node that trains and one that serves", seen, fix)
    if each > gpus:
        seen, fix = f"a server of {each} GPUs, --gpus_per_node {gpus}", "Lower it, or start this one by hand."
        raise RecipeError("A server is larger than a node", seen, fix)
    launch = [f"--num_machines {trainers} --num_processes {trainers * gpus}"]
    file = options.config_file or next(iter(values_of("--config_file", launched)[0]), None)
    sharded = f"--config_file {shlex.quote(file)}" if file else "--multi_gpu --mixed_precision no --dynamo_backend no"
    if trainers > 1:
        launch += ['--machine_rank "$SLURM_NODEID" --main_process_ip "$HEAD" --main_process_port 29500']
    output_dir = str(settings.get("output_dir"))
    return SCRIPT.format(
        **{"name": shlex.quote(str(settings.get("run_name") or Path(output_dir).name)), "nodes": options.nodes},
        **{"gpus": gpus, "made_by": made_by, "trainers": trainers, "serving": options.nodes - trainers, "each": each},
        **{"servers": gpus // each, "bin": shlex.quote(str(Path(sys.executable).parent)), "patience": PATIENCE},
        output_dir=shlex.quote(output_dir),
        serve=shlex.join(["trl-atropos", "serve", model, "--vllm_mode", mode, *flags]),
        launch=" \\\n    ".join([sharded, *launch]),
        train=shlex.join(words),
    )


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
        rank = int(settings.get("lora_r") or 16)  # peft's default
        flags += ["--max-lora-rank", str(next((one for one in LORA_RANKS if one >= rank), rank))]
    return flags
