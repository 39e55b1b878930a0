"""Runs `trl-atropos slurm`: renders the batch script of a run on a SLURM cluster.

The script is `slurm.sh` for several nodes and `slurm_one_node.sh` for one, with values of the
recipe and of the command's flags filled in. The first does what docs/multi-node.md does by hand.
"""

import argparse
import difflib
import os
import re
import shlex
import sys
from itertools import takewhile
from pathlib import Path
from typing import Any

from trl_atropos.commands.words import command_parser, require_words, with_recipe
from trl_atropos.errors import AtroposTrainingError, RecipeError
from trl_atropos.flags import parallel, served_rank, server_flags, stated_settings, values_of
from trl_atropos.modes import MODES, Mode
from trl_atropos.terminal import fitted

SLURM = """\
Writes a batch script for a run on a SLURM cluster. With one node, it is
`trl-atropos train` with the flags that are given here. With several nodes, the
first ones train and the others serve: the servers' flags are the recipe's
`vllm_args`, and if it has none those of the `trl-atropos serve` in its first
lines. All nodes must share the folder in which the script is submitted, and
`output_dir`. Before its time limit, the job is requeued, and it goes on from
its last checkpoint.

  trl-atropos slurm recipes/gsm8k/colocate.yaml --nodes 1 --output job.sh
  trl-atropos slurm recipes/gsm8k/zero3_72b.yaml --nodes 3 --output job.sh
  sbatch job.sh"""

EXAMPLE = "recipes/gsm8k/colocate.yaml"
STARTS = ("accelerate launch ", "trl-atropos ")  # of a command in the first lines of a recipe
OWN_FLAGS = ("--host", "--port", "--vllm_mode")  # of a server, which the script sets
# with @NAME@ where something is filled in
SEVERAL_NODES = Path(__file__).with_name("slurm.sh")
ONE_NODE = Path(__file__).with_name("slurm_one_node.sh")
REQUEUE = Path(__file__).with_name("slurm_requeue.sh")  # a part of both
WAIT = Path(__file__).with_name("slurm_wait.sh")  # the end of both
PATIENCE = 3600  # seconds until the last server of a job must answer


def slurm(words: list[str]) -> None:
    """Prints the batch script, or writes it to `--output`."""
    parser = slurm_parser()
    require_words(parser, words)
    options, settings = parser.parse_known_args(words)
    made_by = shlex.join(["trl-atropos", "slurm", *words])
    try:
        script = render(options, with_recipe(settings), made_by)
        if options.output is None:
            sys.stdout.write(script)
            return
        options.output.write_text(script, encoding="utf-8")
    except AtroposTrainingError as error:
        sys.exit(fitted(f"trl-atropos slurm: {error}"))
    except OSError as error:
        message = f"trl-atropos slurm: {options.output} cannot be written ({error.strerror})."
        sys.exit(fitted(f"{message} Name another --output."))
    message = f"Wrote {options.output}. Next: add your cluster's lines, then:\n"
    sys.stdout.write(fitted(message, sys.stdout) + f"  sbatch {options.output}\n")


def slurm_parser() -> argparse.ArgumentParser:
    usage = "RECIPE --nodes N [--output FILE] [--SETTING VALUE ...]"
    parser = command_parser("slurm", usage, SLURM)
    add = parser.add_argument
    head = "default: what the recipe's first lines launch with"
    add("--nodes", type=int, required=True, metavar="N", help="of the job")
    add("--trainer_nodes", type=int, metavar="N", help=f"of these, nodes that train; {head}, or 1")
    add("--gpus_per_node", type=int, metavar="N", help="default: 8, and 1 with --nodes 1")
    add("--container", metavar="IMAGE", help="run in it, by pyxis' flags of srun")
    add("--config_file", metavar="FILE", help=f"accelerate's, for the trainer; {head}, or DDP")
    add(
        "--output",
        type=Path,
        metavar="FILE",
        help="where to write the script; default: the terminal",
    )
    return parser


def render(options: argparse.Namespace, words: list[str], made_by: str) -> str:
    """Returns the script for the recipe and the settings in `words`. You read it, and complete it
    with what your cluster wants (account, partition). Raises `RecipeError` if such a run cannot
    be."""
    recipe = _existing_recipe(words)
    if options.nodes == 1:
        return _fill_in(ONE_NODE, _values_of_one_node(options, words, made_by))
    return _fill_in(SEVERAL_NODES, _values_of_several_nodes(options, recipe, words, made_by))


def _fill_in(template: Path, values: dict[str, Any]) -> str:
    def value(mark: re.Match) -> str:
        return str(values[mark[1]])

    return re.sub(r"@(\w+)@", value, template.read_text(encoding="utf-8"))


def _values_of_one_node(
    options: argparse.Namespace, words: list[str], made_by: str
) -> dict[str, Any]:
    if options.trainer_nodes is not None:
        raise RecipeError("--trainer_nodes is for several nodes", fix="Leave it out.")
    recipe, *rest = words[1:]  # behind `--config`
    if options.config_file:
        rest = ["--config_file", options.config_file, *rest]
    values = _values_of_both(options, stated_settings(words), made_by)
    return values | {"gpus": options.gpus_per_node or 1, "train": shlex.join([recipe, *rest])}


def _values_of_both(
    options: argparse.Namespace, settings: dict[str, Any], made_by: str
) -> dict[str, Any]:
    """Returns what both scripts have."""
    output_dir = str(settings.get("output_dir"))
    run_name = str(settings.get("run_name") or Path(output_dir).name)
    container = ""
    if options.container:
        image = shlex.quote(f"--container-image={options.container}")
        container = f'{image} --container-mounts="$PWD:$PWD" --container-workdir="$PWD" '
    return {
        "made_by": made_by,
        "name": shlex.quote(run_name),
        "bin": shlex.quote(str(Path(sys.executable).parent)),
        "output_dir": shlex.quote(output_dir),
        "container": container,
        "requeue": REQUEUE.read_text(encoding="utf-8"),
        "wait": WAIT.read_text(encoding="utf-8"),
    }


def _values_of_several_nodes(
    options: argparse.Namespace, recipe: str, words: list[str], made_by: str
) -> dict[str, Any]:
    # These are for the servers alone.
    server_words, words = values_of("--vllm_args", words)
    settings = stated_settings(words)
    if server_words:
        settings["vllm_args"] = server_words[-1]
    commands = _commands_in(recipe)
    launched = _first_with("launch", commands)
    trainers = options.trainer_nodes or int(_value_of("--num_machines", launched) or 1)
    mode = _mode_of(settings)
    flags = _server_flags(settings, _first_with("serve", commands))
    each, _flags = parallel(flags)
    gpus = options.gpus_per_node or 8
    if mode.shares_memory:
        what = "With `vllm_mode: colocate`, trainer and server share a device, not a cluster"
        fix = (
            "Set `vllm_mode: server`, or with an adapter `vllm_mode: nccl_lora`; or take one node "
            "(`--nodes 1`)."
        )
        raise RecipeError(what, f"vllm_mode: {mode.name}", fix)
    if not 0 < trainers < options.nodes:
        what = f"Of --nodes {options.nodes}, {trainers} train, and some must train and some serve"
        raise RecipeError(what, fix="Change `--nodes` or `--trainer_nodes`.")
    if each > gpus:
        what = f"A server of {each} GPUs does not fit on a node of {gpus} (`--gpus_per_node`)"
        fix = "Lower its `--tensor-parallel-size`, or write its part of the script by hand."
        raise RecipeError(what, fix=fix)
    config_file = options.config_file or _value_of("--config_file", launched)
    model = str(settings.get("model_name_or_path"))
    return _values_of_both(options, settings, made_by) | {
        "nodes": options.nodes,
        "gpus": gpus,
        "trainers": trainers,
        "serving": options.nodes - trainers,
        "each": each,
        "servers": gpus // each,
        "patience": PATIENCE,
        "serve": shlex.join(["trl-atropos", "serve", model, "--vllm_mode", mode.name, *flags]),
        "launch": _launcher_flags(config_file, trainers, gpus),
        "train": shlex.join(words),
    }


def _existing_recipe(words: list[str]) -> str:
    recipe = _value_of("--config", words)
    if not recipe:
        raise RecipeError("No recipe", fix="Name it first: `trl-atropos slurm RECIPE --nodes N`.")
    if not os.path.isfile(recipe):
        what = f"The recipe {recipe!r} does not exist (looked in {os.getcwd()})"
        if os.path.isdir(recipe):
            what = f"The recipe {recipe!r} is a folder, not a YAML file"
        fix = (
            f"Name the recipe's file first, as in `trl-atropos slurm {_example(recipe)} --nodes N`."
        )
        raise RecipeError(what, recipe, fix, "no-recipe")
    return recipe


def _example(recipe: str) -> str:
    """Returns the path of a recipe that may be meant by one that does not exist: a file in its
    folder whose name is alike, or one of the repository's."""
    path = Path(recipe)
    folder = path if path.is_dir() else path.parent
    names = sorted(file.name for file in folder.glob("*.yaml"))
    close = difflib.get_close_matches(path.name, names, n=1)
    if path.is_dir():
        close = names[:1]
    if not close:
        return EXAMPLE
    return str(folder / close[0])


def _mode_of(settings: dict[str, Any]) -> Mode:
    """Returns the properties of the recipe's `vllm_mode`. Raises `RecipeError` if there is no such
    mode."""
    name = str(settings.get("vllm_mode", "colocate"))
    if name not in MODES:
        fix = f"Set it to one of: {', '.join(MODES)}."
        raise RecipeError(f"`vllm_mode` is {name!r}", f"vllm_mode: {name}", fix)
    return MODES[name]


def _value_of(flag: str, words: list[str]) -> str | None:
    values, _rest = values_of(flag, words)
    return values[0] if values else None


def _commands_in(recipe: str) -> list[list[str]]:
    """Returns the commands in a recipe's first lines, as words. A command may go on behind a
    backslash."""
    lines = Path(recipe).read_text(encoding="utf-8").splitlines()
    comments = [line.lstrip("#").strip() for line in takewhile(_is_comment, lines)]
    commands = []
    for line in "\n".join(comments).replace("\\\n", " ").splitlines():
        if line.startswith(STARTS):
            commands.append(shlex.split(line, comments=True))
    return commands


def _is_comment(line: str) -> bool:
    return line.startswith("#")


def _first_with(word: str, commands: list[list[str]]) -> list[str]:
    return next((command for command in commands if word in command), [])


def _server_flags(settings: dict[str, Any], served: list[str]) -> list[str]:
    """Returns the flags of each server, without those that the script sets. `served` is the
    `trl-atropos serve MODEL ...` of the recipe's first lines."""
    words = settings.get("vllm_args") or served[3:]
    if isinstance(words, str):
        words = shlex.split(words)
    flags = [str(word) for word in words]
    for name in OWN_FLAGS:
        _values, flags = values_of(name, flags)
    stated = server_flags(flags)
    longest = settings.get("max_sequence_length")
    if longest and "--max-model-len" not in stated:
        flags += ["--max-model-len", str(longest)]
    if _mode_of(settings).needs_adapter and "--max-lora-rank" not in stated:
        rank = int(settings.get("lora_r") or 16)  # PEFT's default
        flags += ["--max-lora-rank", str(served_rank(rank))]
    return flags


def _launcher_flags(config_file: str | None, trainers: int, gpus: int) -> str:
    """Returns the flags of accelerate's launcher, one line of the script for each group."""
    lines = ["--multi_gpu --mixed_precision no --dynamo_backend no"]
    if config_file:
        lines = [f"--config_file {shlex.quote(config_file)}"]
    lines.append(f"--num_machines {trainers} --num_processes {trainers * gpus}")
    if trainers > 1:
        lines.append(
            '--machine_rank "$SLURM_NODEID" --main_process_ip "$HEAD" --main_process_port 29500'
        )
    return " \\\n    ".join(lines)
