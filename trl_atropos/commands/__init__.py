"""Commands of `trl-atropos` around a run: `train`, `eval`, `try` (with `rehearsal.py`), `init` and
`slurm`."""

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_atropos.errors import AtroposTrainingError, EvaluationError, RecipeError
from trl_atropos.protocol import (
    ADAPTER_MODES,
    parallel,
    served_rank,
    server_flags,
    stated_settings,
    values_of,
)
from trl_atropos.services.signals import install_handlers

if TYPE_CHECKING:
    from trl_atropos.recipe import Recipe

POLL = 0.1  # seconds
RECIPES = Path(__file__).parents[1] / "recipes"  # a link in a checkout, files in a wheel
# flags of accelerate that are settings, too, and here only that
OF_BOTH = {"debug", "gradient_accumulation_steps"}
NAME = re.compile(r"[\w./-]+")  # of a new folder: it becomes a part of recipes and of commands


def with_recipe(words: list[str]) -> list[str]:
    """`RECIPE --flag ...` as `--config RECIPE --flag ...`."""
    return words if not words or words[0].startswith("-") else ["--config", *words]


# -------------------------------------------------------------------------------------------- train


def train(words: list[str]) -> None:
    """Runs accelerate's launcher in this process, on `trl_atropos.train`. Exits with its code, or
    130 after Ctrl-C. Unlike `accelerate launch`, it waits until the trainer has cleaned up."""
    from trl_atropos.train import apply_recipe_environment, print_help

    if {"-h", "--help"} & set(words) or not words:
        print_help("trl-atropos train RECIPE [accelerate's flags] [--SETTING VALUE ...]")
        sys.exit(0 if words else 2)
    # the terminal sends them to the trainer, too, and this waits for that
    interrupts: list[int] = []
    signal.signal(signal.SIGINT, lambda signum, _frame: interrupts.append(signum))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
    apply_recipe_environment(with_recipe(words))
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    launcher, settings = divide(words)
    settings = with_recipe(settings)
    launcher += _defaults(launcher, settings)
    options = [*launcher, "--quiet", "--module", "trl_atropos.train", *settings]
    try:
        launch_command(launch_command_parser().parse_args(options))
    except (ValueError, FileNotFoundError) as error:  # how accelerate refuses its flags
        sys.exit(f"trl-atropos train: {error}")
    except SignalException as error:
        sys.exit(128 + error.sigval)
    except ChildFailedError:  # which has said why
        sys.exit(130 if interrupts else 1)
    except SystemExit:
        if interrupts:
            sys.exit(130)
        raise


def divide(words: list[str]) -> tuple[list[str], list[str]]:
    """Flags of accelerate's launcher with their values, by its own parser; and the others, which
    are settings."""
    from accelerate.commands.launch import launch_command_parser

    known = {flag: one for one in launch_command_parser()._actions for flag in one.option_strings}
    known = {flag: one for flag, one in known.items() if one.dest not in OF_BOTH}
    launcher = []
    settings = []
    rest = iter(words)
    for word in rest:
        flag, is_whole, _ = word.partition("=")
        if flag not in known:
            settings.append(word)
            continue
        launcher.append(word)
        if known[flag].nargs != 0 and not is_whole:
            launcher += islice(rest, 1)
    return launcher, settings


def _defaults(launcher: list[str], settings: list[str]) -> list[str]:
    """What accelerate would warn of, or guess, without a configuration: one process, on the first
    GPU or the CPU."""
    import psutil
    import torch
    from accelerate.commands.config import default_config_file

    stated = {
        word.partition("=")[0].replace("-", "_").lstrip("_")
        for word in launcher
        if word.startswith("-")
    }
    if "config_file" in stated or os.path.isfile(default_config_file):
        return []
    usual = {"num_machines": ["1"], "mixed_precision": ["no"], "dynamo_backend": ["no"]}
    if not stated & {"num_processes", "multi_gpu", "use_deepspeed", "use_fsdp"}:
        gpu = {"gpu_ids": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[:1]}
        cores = psutil.cpu_count(logical=False) or 1
        # as accelerate does, which says so in a warning
        threads = os.environ.get("OMP_NUM_THREADS", str(cores))
        cpu = {"cpu": [], "num_cpu_threads_per_process": [threads]}
        uses_cpu = (
            str(stated_settings(settings).get("use_cpu")).lower() == "true"
            or not torch.cuda.is_available()
        )
        usual |= {"num_processes": ["1"]} | (cpu if uses_cpu else gpu)
    return [
        word
        for name, value in usual.items()
        if name not in stated
        for word in (f"--{name}", *value)
    ]


# --------------------------------------------------------------------------------------------- eval

EVALUATE = """usage: trl-atropos eval RECIPE [--checkpoint FOLDER] [--SETTING VALUE ...]

Makes the `evaluations` of a recipe, without training: of a checkpoint, or of
the model that the recipe begins with. With `start_vllm: true`, it starts the
inference server for it; otherwise it evaluates what the running one serves.
"""


def evaluate(words: list[str]) -> None:
    """Prints a line for each evaluation, and exits with 1 after an error."""
    if not words or {"-h", "--help"} & set(words):
        sys.stdout.write(EVALUATE)
        sys.exit(0 if words else 2)
    install_handlers()
    from trl_atropos.recipe import parse

    checkpoints, words = values_of("--checkpoint", words)
    try:
        _evaluate(parse(words), checkpoints[-1] if checkpoints else None)
    except AtroposTrainingError as error:
        sys.exit(f"\ntrl-atropos eval: {error}")


def _evaluate(recipe: "Recipe", checkpoint: str | None) -> None:
    """Evaluates a checkpoint, or the model that the recipe begins with, by servers of its own or
    those that run."""
    from trl_atropos.services.evaluations import results_of
    from trl_atropos.services.manager import Services
    from trl_atropos.train import evaluator_of, require_room, set_up_logging, start_servers
    from trl_atropos.weights.checkpoint import merged_model, step_of

    training = recipe.training
    config = recipe.services
    set_up_logging(training)
    if not recipe.evaluations:
        raise EvaluationError(
            "The recipe has no `evaluations`", fix="List some: docs/evaluation.md shows how."
        )
    if checkpoint is not None and not config.start_vllm:
        what = (
            "`--checkpoint` needs a server that this command starts, and the recipe has "
            "`start_vllm: false`"
        )
        raise EvaluationError(
            what, f"checkpoint: {checkpoint}", "Start a server on it, and leave `--checkpoint` out."
        )
    model = checkpoint or recipe.model.model_name_or_path
    step = step_of(checkpoint)
    name = os.path.basename(os.path.abspath(model))  # also of "." or ".."
    folder = os.path.join(training.output_dir, "eval", name)
    recipe = replace(recipe, services=replace(config, start_atropos=False))
    with (
        tempfile.TemporaryDirectory() as scratch,
        Services(os.path.join(folder, "logs")) as services,
    ):
        require_room(recipe)
        mode = "server" if training.vllm_mode == "restart" else training.vllm_mode
        names = start_servers(recipe, services, mode, merged_model(model, scratch))
        evaluator = evaluator_of(recipe, services, folder, needed=True)
        evaluator.start(0)
        for name in names:
            services.wait_healthy(name, config.service_timeout)
        evaluator.results = results_of(training.output_dir, step=0) if step else []
        evaluator.ready(step, first=True, last=True)
        evaluator.begin(step, first=True, last=True)
        while evaluator.busy():
            services.check()
            evaluator.tell_progress()
            for result in evaluator.poll():
                result = replace(result, versions=(step, step)) if names else result
                sys.stdout.write(f"{model}: {result.line()}\n")
                sys.stdout.flush()
            time.sleep(POLL)
    sys.stdout.write(f"Answers and results: {folder}\n")


# ---------------------------------------------------------------------------------------------- try

TRY = """usage: trl-atropos try RECIPE [accelerate's flags] [--SETTING VALUE ...]

Takes each environment of a recipe through one problem: starts the server if the
recipe does (or uses the one that runs), lets the environment sample and score a
group, checks it as a run would, and shows the rollouts. An exception of the
environment is shown with its traceback. Trains nothing; what it writes is in
the folder `try` of the recipe's `output_dir`.

Exit codes: 0 when a run would train on every group, 1 otherwise, 2 after wrong
use.
"""


def rehearse(words: list[str]) -> None:
    """Exits with the code that the help text names."""
    if not words or {"-h", "--help"} & set(words):
        sys.stdout.write(TRY)
        sys.exit(0 if words else 2)
    install_handlers()
    from trl_atropos.train import apply_recipe_environment

    launcher, settings = divide(words)
    # the recipe may stand behind accelerate's flags
    apply_recipe_environment(settings := with_recipe(settings))
    from trl_atropos.commands.rehearsal import main

    main(launcher, settings)


# --------------------------------------------------------------------------------------------- init

INIT = """usage: trl-atropos init NAME

Writes the folder NAME with an environment to change, two recipes that train on
it, a tiny model for the one without a GPU, the script of that, and a README.
"""
README = """\
1. Change `environment.py` at its marks (1) to (4); it asks for sentences of so many words.
2. Without a GPU, `cpu.yaml` trains the tiny random model that
   `python {name}/make_model.py {name}/model` has made.
3. `trl-atropos try {name}/cpu.yaml` runs one group and shows its rollouts, or your code's
   traceback.
4. `trl-atropos check {name}/cpu.yaml` finds what is wrong, `trl-atropos train {name}/cpu.yaml`
   trains.
5. With a GPU: the same with `{name}/colocate.yaml`. All paths are seen from the folder that has
   `{name}` in it.
"""


def init(words: list[str]) -> None:
    """Writes the template of an environment into a new folder."""
    if len(words) != 1 or words[0].startswith("-"):
        (sys.stdout if {"-h", "--help"} & set(words) else sys.stderr).write(INIT)
        sys.exit(0 if {"-h", "--help"} & set(words) else 2)
    name = words[0].rstrip("/")
    folder = Path(words[0])
    if not NAME.fullmatch(name) or folder.name in ("", ".."):
        sys.exit(
            f"trl-atropos init: {name!r} is no name for a folder here. Use letters, digits and any "
            "of - _ . /"
        )
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        sys.exit(
            f"trl-atropos init: the folder {name} cannot be made ({error.strerror}). Name another "
            "one."
        )
    template = RECIPES / "own_environment"
    for path in (
        template / "environment.py",
        *template.glob("*.yaml"),
        RECIPES / "quickstart" / "make_model.py",
    ):
        (folder / path.name).write_text(
            _renamed(path.read_text(encoding="utf-8"), name), encoding="utf-8"
        )
    (folder / "README.md").write_text(README.format(name=name), encoding="utf-8")
    command = [sys.executable, folder / "make_model.py", folder / "model"]
    if (made := subprocess.run(command, capture_output=True, text=True)).returncode:
        sys.exit(f"trl-atropos init: the model could not be made:\n{made.stderr}")
    sys.stdout.write(
        f"Wrote {name}/: {', '.join(sorted(os.listdir(folder)))}.\nNext: read {name}/README.md\n"
    )


def _renamed(text: str, name: str) -> str:
    """The template's files as they are called in the new folder."""
    text = re.sub(
        r"(?s)accelerate launch .*?-m trl_atropos\.train --config (\S+)",
        r"trl-atropos train \1",
        text,
    )
    names = {
        "recipes/quickstart/make_model.py": f"{name}/make_model.py",
        "runs/quickstart/model": f"{name}/model",
        "recipes/own_environment": name,
        "runs/own-environment": f"runs/{Path(name).name}",
    }
    for before, after in names.items():
        text = text.replace(before, after)
    return text


# -------------------------------------------------------------------------------------------- slurm

SLURM = """\
Writes a batch script for a run over several nodes of a SLURM cluster: the first
nodes train, the others serve. The trainer's settings are the recipe's, with the
flags that are given here; the servers' flags are its `vllm_args`, and where it
has none those of the `trl-atropos serve` in its first lines. All nodes must
share the folder in which the script is submitted, and `output_dir`.

  trl-atropos slurm recipes/gsm8k/zero3_72b.yaml --nodes 3 --output job.sh
  sbatch job.sh"""

STARTS = ("accelerate launch ", "trl-atropos ")  # of a command in the first lines of a recipe
OWN = ("--host", "--port", "--vllm_mode")  # flags of a server that the script sets
TEMPLATE = Path(__file__).with_name("slurm.sh")  # with @NAME@ where something is filled in
PATIENCE = 3600  # seconds until the last server of a job must answer


def slurm_parser() -> argparse.ArgumentParser:
    usage = "trl-atropos slurm RECIPE --nodes N [--output FILE] [--SETTING VALUE ...]"
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "trl-atropos slurm", usage, SLURM, formatter_class=formatter, allow_abbrev=False
    )
    add = parser.add_argument
    head = "default: what the recipe's first lines launch with"
    add("--nodes", type=int, required=True, metavar="N", help="of the job, at least 2")
    add("--trainer_nodes", type=int, metavar="N", help=f"of these, nodes that train; {head}, or 1")
    add("--gpus_per_node", type=int, default=8, metavar="N", help="default: %(default)s")
    add("--config_file", metavar="FILE", help=f"accelerate's, for the trainer; {head}, or DDP")
    add(
        "--output",
        type=Path,
        metavar="FILE",
        help="where to write the script; default: the terminal",
    )
    return parser


def slurm(words: list[str]) -> None:
    """Prints the batch script, or writes it to `--output`."""
    if not words:
        slurm_parser().print_help()
        sys.exit(2)
    options, settings = slurm_parser().parse_known_args(words)
    try:
        script = render(
            options, with_recipe(settings), shlex.join(["trl-atropos", "slurm", *words])
        )
        if options.output is None:
            sys.stdout.write(script)
            return
        options.output.write_text(script, encoding="utf-8")
    except AtroposTrainingError as error:
        sys.exit(f"trl-atropos slurm: {error}")
    except OSError as error:
        sys.exit(
            f"trl-atropos slurm: {options.output} cannot be written ({error.strerror}). Name "
            "another --output."
        )
    sys.stdout.write(
        f"Wrote {options.output}. Next: add your cluster's lines, then: sbatch {options.output}\n"
    )


def render(options: argparse.Namespace, words: list[str], made_by: str) -> str:
    """The script for the recipe and the settings in `words`, which does what docs/multi-node.md
    does by hand. It is to be read, and completed with what a cluster wants (account, partition).
    Raises `RecipeError` if such a run cannot be."""
    recipe = next(iter(values_of("--config", words)[0]), "")
    if not recipe:
        raise RecipeError("No recipe", fix="Name it first: `trl-atropos slurm RECIPE --nodes N`.")
    if not os.path.isfile(recipe):
        raise RecipeError(
            f"The recipe {recipe!r} does not exist (looked in {os.getcwd()})", recipe, "Correct it."
        )
    quoted, words = values_of("--vllm_args", words)  # which are for the servers alone
    settings = stated_settings(words) | ({"vllm_args": quoted[-1]} if quoted else {})
    head = _commands(recipe)
    launched = next((line for line in head if "launch" in line), [])
    trainers = options.trainer_nodes or int(next(iter(values_of("--num_machines", launched)[0]), 1))
    mode = settings.get("vllm_mode", "colocate")
    model = str(settings.get("model_name_or_path"))
    flags = _server_flags(settings, next((line for line in head if "serve" in line), []))
    each = parallel(flags)[0]
    gpus = options.gpus_per_node
    if mode == "colocate":
        fix = "Set `vllm_mode: server`, or with an adapter `vllm_mode: nccl_lora`."
        raise RecipeError(
            "With `vllm_mode: colocate`, trainer and server share a device, not a cluster",
            mode,
            fix,
        )
    if not 0 < trainers < options.nodes:
        what = f"Of --nodes {options.nodes}, {trainers} train, and some must train and some serve"
        raise RecipeError(what, fix="Change `--nodes` or `--trainer_nodes`.")
    if each > gpus:
        what = f"A server of {each} GPUs does not fit on a node of {gpus} (`--gpus_per_node`)"
        raise RecipeError(
            what, fix="Lower its `--tensor-parallel-size`, or write its part of the script by hand."
        )
    launch = [f"--num_machines {trainers} --num_processes {trainers * gpus}"]
    file = options.config_file or next(iter(values_of("--config_file", launched)[0]), None)
    sharded = (
        f"--config_file {shlex.quote(file)}"
        if file
        else "--multi_gpu --mixed_precision no --dynamo_backend no"
    )
    if trainers > 1:
        launch += [
            '--machine_rank "$SLURM_NODEID" --main_process_ip "$HEAD" --main_process_port 29500'
        ]
    output_dir = str(settings.get("output_dir"))
    values = {
        "nodes": options.nodes,
        "gpus": gpus,
        "trainers": trainers,
        "serving": options.nodes - trainers,
    }
    values |= {"each": each, "servers": gpus // each, "made_by": made_by, "patience": PATIENCE}
    values |= {"name": shlex.quote(str(settings.get("run_name") or Path(output_dir).name))}
    values |= {
        "bin": shlex.quote(str(Path(sys.executable).parent)),
        "output_dir": shlex.quote(output_dir),
    }
    values |= {"serve": shlex.join(["trl-atropos", "serve", model, "--vllm_mode", mode, *flags])}
    values |= {"launch": " \\\n    ".join([sharded, *launch]), "train": shlex.join(words)}
    return re.sub(
        r"@(\w+)@", lambda found: str(values[found[1]]), TEMPLATE.read_text(encoding="utf-8")
    )


def _commands(recipe: str) -> list[list[str]]:
    """The commands in a recipe's first lines, as words."""
    lines = Path(recipe).read_text(encoding="utf-8").splitlines()
    head = "\n".join(
        line.lstrip("#").strip() for line in takewhile(lambda line: line.startswith("#"), lines)
    )
    commands = [line for line in head.replace("\\\n", " ").splitlines() if line.startswith(STARTS)]
    return [shlex.split(command, comments=True) for command in commands]


def _server_flags(settings: dict[str, Any], served: list[str]) -> list[str]:
    """Flags of each server, without those that the script sets."""
    given = settings.get("vllm_args") or served[3:]
    flags = shlex.split(given) if isinstance(given, str) else [str(word) for word in given]
    for name in OWN:
        flags = values_of(name, flags)[1]
    stated = server_flags(flags)
    longest = settings.get("max_sequence_length")
    if longest and "--max-model-len" not in stated:
        flags += ["--max-model-len", str(longest)]
    if settings.get("vllm_mode") in ADAPTER_MODES and "--max-lora-rank" not in stated:
        # peft's default
        flags += ["--max-lora-rank", str(served_rank(int(settings.get("lora_r") or 16)))]
    return flags
