"""Commands of `trl-atropos` around a run: `train`, `eval`, `try`, `init` and `slurm`.

`cli.py` calls one with the words behind its name. `rehearsal.py` does the work of `try`,
`batch_script.py` renders the script of `slurm`, and `sessions.py` is the command `sessions`.
"""

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_atropos.activity import activity
from trl_atropos.commands.batch_script import render, slurm_parser
from trl_atropos.errors import AtroposTrainingError, EvaluationError
from trl_atropos.flags import stated_settings
from trl_atropos.privacy import close_to_others
from trl_atropos.services.signals import install_handlers
from trl_atropos.terminal import CommandParser, fitted

if TYPE_CHECKING:
    from trl_atropos.recipe import Recipe

POLL = 0.1  # seconds
RECIPES = Path(__file__).parents[1] / "recipes"  # a link in a checkout, files in a wheel
# flags of accelerate that are settings, too, and here only that
OF_BOTH = {"debug", "gradient_accumulation_steps"}
NAME = re.compile(r"[\w./-]+")  # of a new folder: it becomes a part of recipes and of commands


def with_recipe(words: list[str]) -> list[str]:
    """Returns `RECIPE --flag ...` as `--config RECIPE --flag ...`."""
    if not words or words[0].startswith("-"):
        return words
    return ["--config", *words]


def _make_parser(command: str, arguments: str, description: str) -> argparse.ArgumentParser:
    """Returns the parser of a command's own flags. All others are settings of the recipe."""
    return CommandParser(
        f"trl-atropos {command}",
        f"trl-atropos {command} {arguments}",
        description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def require_words(
    parser: argparse.ArgumentParser,
    words: list[str],
    missing: str = "a recipe, a YAML file such as recipes/quickstart/colocate.yaml",
) -> None:
    """Exits with 2, and says what is missing, if a command got no words."""
    if not words:
        parser.error(f"name {missing}; `{parser.prog} --help` says more")


# -------------------------------------------------------------------------------------------- train


def train(words: list[str]) -> None:
    """Runs accelerate's launcher in this process, on `trl_atropos.train`. Exits with its code, or
    130 after Ctrl-C. Unlike `accelerate launch`, it waits until the trainer has cleaned up."""
    from trl_atropos.run_messages import print_help
    from trl_atropos.train import apply_recipe_environment

    arguments = "RECIPE [accelerate's flags] [--SETTING VALUE ...]"
    require_words(_make_parser("train", arguments, ""), words)
    if {"-h", "--help"} & set(words):
        print_help(f"trl-atropos train {arguments}")
        sys.exit(0)
    # The terminal sends them to the trainer, too, and this process waits for that.
    interrupts: list[int] = []

    def note_interrupt(signum: int, _frame: object) -> None:
        interrupts.append(signum)

    signal.signal(signal.SIGINT, note_interrupt)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
    stated = apply_recipe_environment(with_recipe(words))
    if _names_agents(stated):
        close_to_others()
    with activity("Importing accelerate's launcher"):
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
        sys.exit(fitted(f"trl-atropos train: {error}"))
    except SignalException as error:
        sys.exit(128 + error.sigval)
    except ChildFailedError:  # which has said why
        sys.exit(130 if interrupts else 1)
    except SystemExit:
        if interrupts:
            sys.exit(130)
        raise


def _names_agents(stated: Mapping[str, Any]) -> bool:
    """Returns whether settings, as they are written, have entries such as `agent`. See
    `Recipe.runs_agents`."""
    from trl_atropos.environment_entry import EnvironmentSpec

    entries = []
    for setting in ("environments", "evaluations"):
        value = stated.get(setting)
        if isinstance(value, list):
            entries += value
    return any(
        isinstance(entry, dict) and entry.keys() & EnvironmentSpec.KINDS for entry in entries
    )


def divide(words: list[str]) -> tuple[list[str], list[str]]:
    """Returns the flags of accelerate's launcher with their values, by its own parser, and the
    other words, which are settings."""
    from accelerate.commands.launch import launch_command_parser

    takes_value = {}
    for action in launch_command_parser()._actions:
        if action.dest not in OF_BOTH:
            for flag in action.option_strings:
                takes_value[flag] = action.nargs != 0
    launcher = []
    settings = []
    rest = iter(words)
    for word in rest:
        flag, equals, _value = word.partition("=")
        if flag not in takes_value:
            settings.append(word)
            continue
        launcher.append(word)
        if takes_value[flag] and not equals:
            launcher += islice(rest, 1)
    return launcher, settings


def _defaults(launcher: list[str], settings: list[str]) -> list[str]:
    """Returns flags for what accelerate would warn of, or guess, without a configuration: one
    process, on the first GPU or the CPU."""
    from accelerate.commands.config import default_config_file

    stated = set()
    for word in launcher:
        if word.startswith("-"):
            stated.add(word.partition("=")[0].replace("-", "_").lstrip("_"))
    if "config_file" in stated or os.path.isfile(default_config_file):
        return []
    usual = {"num_machines": ["1"], "mixed_precision": ["no"], "dynamo_backend": ["no"]}
    if not stated & {"num_processes", "multi_gpu", "use_deepspeed", "use_fsdp"}:
        usual["num_processes"] = ["1"]
        usual |= _usual_device(settings)
    flags = []
    for name, values in usual.items():
        if name not in stated:
            flags += [f"--{name}", *values]
    return flags


def _usual_device(settings: list[str]) -> dict[str, list[str]]:
    """Returns the flags, with their values, by which one process uses the first GPU, or the CPU if
    there is none or the settings say so."""
    import psutil
    import torch

    wants_cpu = str(stated_settings(settings).get("use_cpu")).lower() == "true"
    if not wants_cpu and torch.cuda.is_available():
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
        return {"gpu_ids": gpus[:1]}
    # Accelerate takes as many threads, and says so in a warning.
    cores = psutil.cpu_count(logical=False) or 1
    threads = os.environ.get("OMP_NUM_THREADS", str(cores))
    return {"cpu": [], "num_cpu_threads_per_process": [threads]}


# --------------------------------------------------------------------------------------------- eval

EVAL = """\
Makes the `evaluations` of a recipe, without training: of a checkpoint, or of
the model that the recipe begins with. With `start_vllm: true`, it starts the
inference server for it; otherwise it evaluates what the running one serves."""


def evaluate(words: list[str]) -> None:
    """Prints a line for each evaluation. Exits with 1 after an error."""
    usage = "RECIPE [--checkpoint FOLDER] [--SETTING VALUE ...]"
    parser = _make_parser("eval", usage, EVAL)
    parser.add_argument("--checkpoint", metavar="FOLDER", help="default: the recipe's model")
    require_words(parser, words)
    options, settings = parser.parse_known_args(words)
    install_handlers()
    with activity("Importing PyTorch, Transformers and TRL"):
        from trl_atropos.protocol import hide_token
        from trl_atropos.recipe import parse

    hide_token()
    try:
        with activity("Reading the recipe"):
            recipe = parse(settings)
        _evaluate(recipe, options.checkpoint)
    except AtroposTrainingError as error:
        sys.exit(fitted(f"\ntrl-atropos eval: {error}"))


def _evaluate(recipe: "Recipe", checkpoint: str | None) -> None:
    """Evaluates a checkpoint, or the model that the recipe begins with, with servers of its own or
    those that run."""
    from trl_atropos.services.evaluation_results import results_of
    from trl_atropos.services.manager import Services
    from trl_atropos.services.starting import require_room, start_servers
    from trl_atropos.train import evaluator_of, set_up_logging
    from trl_atropos.weights.checkpoint import merged_model, step_of

    training = recipe.training
    config = recipe.services
    set_up_logging(training)
    if not recipe.evaluations:
        fix = "List some: docs/evaluation.md shows how."
        raise EvaluationError("The recipe has no `evaluations`", fix=fix)
    if checkpoint is not None and not config.start_vllm:
        what = (
            "`--checkpoint` needs a server that this command starts, and the recipe has "
            "`start_vllm: false`"
        )
        fix = "Start a server on it, and leave `--checkpoint` out."
        raise EvaluationError(what, f"checkpoint: {checkpoint}", fix)
    if checkpoint is not None:
        _require_model(checkpoint)
    model = checkpoint or recipe.model.model_name_or_path
    step = step_of(checkpoint)
    name = os.path.basename(os.path.abspath(model))  # also of "." or ".."
    folder = os.path.join(training.output_dir, "eval", name)
    recipe = replace(recipe, services=replace(config, start_atropos=False))
    if recipe.runs_agents:
        close_to_others()
    with (
        tempfile.TemporaryDirectory() as scratch,
        Services(os.path.join(folder, "logs"), recipe.runs_agents) as services,
    ):
        require_room(recipe)
        mode = "server" if training.mode.restarts_engine else training.vllm_mode
        with activity(f"Merging the adapter {model} into its base"):
            served = merged_model(model, scratch)
        names = start_servers(recipe, services, mode, served)
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
                if names:  # the servers that this command started serve the checkpoint
                    result = replace(result, versions=(step, step))
                sys.stdout.write(fitted(f"{model}: {result.line()}\n", sys.stdout))
                sys.stdout.flush()
            time.sleep(POLL)
    sys.stdout.write(fitted(f"Answers and results: {folder}\n", sys.stdout))


def _require_model(checkpoint: str) -> None:
    """Raises `EvaluationError` for a checkpoint that no server could load, before one is
    started."""
    seen = f"--checkpoint {checkpoint}"
    folder = Path(checkpoint)
    if not folder.is_dir():
        what = f"There is no checkpoint {checkpoint!r} (looked in {os.getcwd()})"
        raise EvaluationError(what, seen, "Name the folder of one.", "checkpoint")
    configs = [folder / "config.json", folder / "adapter_config.json"]
    if not any(config.is_file() for config in configs):
        what = f"The folder {checkpoint!r} holds neither a model nor an adapter"
        fix = "Name a checkpoint: a folder with a config.json or an adapter_config.json in it."
        inner = sorted(folder.glob("checkpoint-*"))
        if inner:
            fix += f" It has {inner[-1]}."
        raise EvaluationError(what, seen, fix, "checkpoint")


# ---------------------------------------------------------------------------------------------- try

TRY = """\
Takes each environment of a recipe through one problem: starts the server if the
recipe does (or uses the one that runs), lets the environment sample and score a
group, checks it as a run would, and shows the rollouts. An exception of the
environment is shown with its traceback. Trains nothing; what it writes is in
the folder `try` of the recipe's `output_dir`.

Exit codes: 0 when a run would train on every group, 1 otherwise, 2 after wrong
use."""


def rehearse(words: list[str]) -> None:
    """Shows one group of each environment. Exits with the code that the help names."""
    usage = "RECIPE [accelerate's flags] [--SETTING VALUE ...]"
    parser = _make_parser("try", usage, TRY)
    require_words(parser, words)
    parser.parse_known_args(words)  # prints the help
    install_handlers()
    from trl_atropos.train import apply_recipe_environment

    launcher, settings = divide(words)
    settings = with_recipe(settings)  # the recipe may stand behind accelerate's flags
    apply_recipe_environment(settings)
    with activity("Importing PyTorch, Transformers and TRL"):
        from trl_atropos.commands.rehearsal import main

    main(launcher, settings)


# --------------------------------------------------------------------------------------------- init

INIT = """\
Writes the folder NAME with an environment to change, two recipes that train on
it, a tiny model for the one without a GPU, the script of that, and a README.
The environment works as it stands: the tiny model learns its task in minutes."""
README = """\
Run every command from the folder that contains `{name}`:

```bash
{commands}
```

The environment asks to continue a row of letters, such as `cccccccc`, and a
tiny random model learns that without a GPU.

1. Change `environment.py` at its marks (1) to (4), then `try` it again. `try`
   shows the rollouts of one group, or your code's traceback.
2. `trl-atropos check {name}/cpu.yaml` finds what is wrong with a recipe.
3. `cpu.yaml` trains the model in `model`, which `make_model.py` has made. It
   cannot read: to see it learn, give its first answers partial credit.
4. With a GPU, `colocate.yaml` trains a real model on the same environment.
"""


def init(words: list[str]) -> None:
    """Writes the template of an environment into a new folder."""
    parser = _make_parser("init", "NAME", INIT)
    parser.add_argument("folder", metavar="NAME", help="a folder that does not exist")
    require_words(parser, words, "a new folder")
    options = parser.parse_args(words)
    folder = Path(options.folder)
    name = options.folder.rstrip("/")
    if not NAME.fullmatch(name) or folder.name in ("", ".."):
        message = f"trl-atropos init: {name!r} is no name for a folder here."
        sys.exit(fitted(f"{message} Use letters, digits and any of - _ . /"))
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        message = f"trl-atropos init: the folder {name} cannot be made ({error.strerror})."
        sys.exit(fitted(f"{message} Name another one."))
    try:
        _write_template(folder, name)
    except OSError as error:
        shutil.rmtree(folder)
        message = f"trl-atropos init: the folder {name} cannot be filled ({error.strerror}), and is"
        sys.exit(fitted(f"{message} removed again. Make room, or name a folder on another disk."))
    command = [sys.executable, folder / "make_model.py", folder / "model"]
    with activity("Making a tiny model"):
        process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        message = f"trl-atropos init: the model could not be made:\n{process.stderr}"
        sys.exit(fitted(message))
    content = ", ".join(sorted(os.listdir(folder)))
    lines = [f"Wrote {name}/: {content}.", "Next:"]
    for step in _first_commands(name):
        lines.append(f"  {step}")
    lines.append(f"What to change then: {name}/README.md")
    message = "\n".join(lines)
    sys.stdout.write(fitted(f"{message}\n", sys.stdout))


def _write_template(folder: Path, name: str) -> None:
    """Writes the files of the template. Raises `OSError` if the disk does not take them."""
    template = RECIPES / "own_environment"
    files = [template / "environment.py", *template.glob("*.yaml")]
    files.append(RECIPES / "quickstart" / "make_model.py")
    for path in files:
        text = _renamed(path.read_text(encoding="utf-8"), name)
        (folder / path.name).write_text(text, encoding="utf-8")
    commands = "\n".join(_first_commands(name))
    readme = README.format(name=name, commands=commands)
    (folder / "README.md").write_text(readme, encoding="utf-8")


def _first_commands(name: str) -> list[str]:
    """Returns the commands to type after `init`, each with what it does as the shell's comment."""
    commands = {
        f"trl-atropos try {name}/cpu.yaml": "see one group",
        f"trl-atropos train {name}/cpu.yaml": "two minutes",
        f"trl-atropos report runs/{Path(name).name}-cpu": "its page",
    }
    longest = max(map(len, commands))
    return [f"{command:{longest}}  # {text}" for command, text in commands.items()]


def _renamed(text: str, name: str) -> str:
    """Returns the text of a file of the template, with the names that its files have in the new
    folder."""
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
    for old, new in names.items():
        text = text.replace(old, new)
    return text


# -------------------------------------------------------------------------------------------- slurm


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
