"""`trl-atropos check`: everything that can be known to be wrong with a recipe, before anything is started.

The recipe is parsed as the main job parses it, with the same checks. Then every module of `trl_atropos.checks` looks
at what it knows of, and yields findings. Here they are put together and printed.
"""

import contextlib
import json
import os
import sys
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from trl_atropos.checks.finding import ERROR, WARNING, WRONG_USE, Finding, from_message

HELP = """usage: trl-atropos check --config recipe.yaml [--json] [--any_field value]

Finds what is wrong with a recipe before it is run, and says what to do about each. Starts nothing. Takes the command
line of `trl_atropos.train`, and some options of `accelerate launch`. What is checked:

  recipe          every key and value, and those that must fit each other; settings that have no effect
  versions        what is installed fits, and packages that a setting needs are there
  files           model, checkpoint, recordings; the output folder can be written, and its disk takes what is saved
  ports           those of the services that the recipe starts are free; those that it does not start, and that
                  answer already, are the run's; a server that it starts has room for its sockets and shared memory
  GPUs            processes, servers and what a server is spread over fit each other and the devices
  text            tokenizers and chat templates of environments and server are the model's; lengths fit
  environments    program, script and folder exist; batch size and group size fit; the Atropos API, the temperature and
                  the servers are the run's; and, by asking its Python and reading its script without running it:
                  - atroposlib is installed there, and knows the flags of its command
                  - `config_init` returns a list of servers (of a single one, Atropos ignores the URL)
                  - no token ids from `apply_chat_template` with transformers 5, which returns something else
  memory          trainer and server at their peaks, estimated from the model's config, fit the device

options:
  --json                  one JSON object on the standard output: ok, findings, memory, versions
  --device_memory_gb N    plan for a GPU of N GiB (or, with `use_cpu`, a machine) that is not this one
  --devices N             plan for machines of N GPUs
  --config_file FILE      as `accelerate launch` will be given it: how many processes there are, and how they shard
  --num_processes N       as `accelerate launch` will be given it: of all machines together
  --num_machines N        as `accelerate launch` will be given it

Only the script that is started is read, not what it imports. Errors would end the run, or train on something else than
is meant; with warnings it goes on, and loses something. Exit code: 0 without errors, 1 with some, 2 for a command line
that is wrong.
"""

RED, YELLOW, GREEN, PLAIN = "\033[31m", "\033[33m", "\033[32m", "\033[0m"
WIDTH = 110


@dataclass
class Report:
    """
    Attributes:
        findings: Errors first.
        memory: The estimate: `table`, the lines for people, and if there is one the bytes of both processes by item,
            `total`, `available` and `fits`.
        versions: Of what is installed.
    """

    findings: list[Finding]
    memory: dict[str, Any] = field(default_factory=lambda: {"table": []})
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def errors(self) -> list[Finding]:
        return [one for one in self.findings if one.level == ERROR]

    @property
    def exit_code(self) -> int:
        if any(one.name in WRONG_USE for one in self.errors):
            return 2
        return 1 if self.errors else 0


def main(argv: list[str]) -> None:
    """Prints what was found, and exits with the code that `HELP` tells."""
    if not argv or {"-h", "--help"} & set(argv):
        sys.stdout.write(HELP)
        sys.exit(0 if argv else 2)
    from trl_atropos.train import apply_recipe_environment

    apply_recipe_environment(argv)
    warnings.filterwarnings("ignore", message="TRL currently supports vLLM versions")  # as `trl_atropos.train` does
    with contextlib.redirect_stdout(sys.stderr):  # where DeepSpeed, for one, says what it found
        report = examine(argv)
    if "--json" in argv:
        told = {"ok": not report.errors, "findings": [asdict(one) for one in report.findings]}
        told |= {"memory": report.memory, "versions": report.versions}
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
    else:
        colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        sys.stdout.write("".join(f"{line}\n" for line in _lines(report, colours)))
    sys.exit(report.exit_code)


def check(argv: list[str]) -> list[str]:
    """What is wrong with the run that these arguments of the main job describe; empty if nothing is."""
    return [str(one) for one in examine(argv).findings]


def examine(argv: list[str]) -> Report:
    """The same, in parts that can be told apart."""
    from trl_atropos.checks import settings, versions
    from trl_atropos.checks.launch import Launch, options

    machine, argv = options().parse_known_args(argv)
    launch, stated = Launch.of(machine), settings.stated_settings(argv)
    recipe, found = settings.read(argv, stated, launch)
    found = [*found, *launch.findings, *versions.versions()]
    memory = {"table": []}
    if recipe is not None:  # without one that can be read there is nothing more to look at
        urls = settings.of_files(argv).get("vllm_server_base_url") or []
        written = urls.split(",") if isinstance(urls, str) else [str(url) for url in urls]
        more, memory = _of_recipe(recipe, launch, stated, written)
        found += more
    found.sort(key=lambda one: one.level != ERROR)
    return Report(found, memory, versions.installed())


def _of_recipe(recipe, launch, stated: dict[str, Any], written: list[str]) -> tuple[list[Finding], dict[str, Any]]:
    from trl_atropos.checks import disk, environments, faults, running, settings, text, versions
    from trl_atropos.checks.launch import layout
    from trl_atropos.checks.memory import case_of_run, memory, plan_of_run

    found = []
    try:
        plan = plan_of_run(recipe, launch)
    except (OSError, ValueError) as error:  # a file that accelerate's names
        plan, fix = None, "Correct it, or name the file that `accelerate launch` will be given."
        found.append(Finding("launch-file", "`--config_file` cannot be followed", str(error), fix))
    case = case_of_run(recipe, plan)
    known = list(environments.of_recipe(recipe))
    found += [*versions.packages(recipe, launch.sharding), *versions.reports(recipe, stated), *_files(recipe, stated)]
    found += [*running.ports(recipe), *running.room(recipe, launch), *running.running(recipe, launch)]
    found += layout(recipe, launch)
    found += text.tokenizers(recipe, known)
    if case is not None:
        found += [*text.lengths(recipe, case, stated, known), *disk.disk(recipe, case, launch.elsewhere)]
    for one in known:
        found += faults.faults(one, recipe, written)
    found += [*faults.together(known), *settings.dead(recipe, stated)]
    too_much, estimate = memory(recipe, plan)
    return found + too_much, estimate


def _files(recipe, stated: dict[str, Any]) -> Iterator[Finding]:
    from trl_atropos.errors import AtroposTrainingError
    from trl_atropos.recipe import RecipeError
    from trl_atropos.train import check_files

    folder = recipe.training.output_dir
    was_there = os.path.isdir(folder)
    try:
        check_files(recipe)
    except (AtroposTrainingError, RecipeError) as error:
        yield from_message(error, stated)
    finally:
        if not was_there and os.path.isdir(folder) and not os.listdir(folder):
            os.rmdir(folder)


def _lines(report: Report, colours: bool) -> Iterator[str]:
    def painted(text: str, colour: str) -> str:
        return f"{colour}{text}{PLAIN}" if colours else text

    for number, one in enumerate(report.findings, start=1):
        colour = RED if one.level == ERROR else YELLOW
        yield f"{number}. {painted(one.level, colour)} [{one.name}]"
        yield from _wrapped("", f"{one.what}.")
        yield from _wrapped("seen  ", one.seen)
        yield from _wrapped("fix   ", one.fix)
        yield ""
    errors, rest = len(report.errors), len(report.findings) - len(report.errors)
    if errors:
        yield painted(f"{_counted(errors, ERROR)}, {_counted(rest, WARNING)}.", RED)
    elif rest:
        yield painted(f"No error, {_counted(rest, WARNING)}.", YELLOW)
    else:
        yield painted("Nothing wrong was found.", GREEN)
    if report.memory["table"]:
        yield from ["", *report.memory["table"]]


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _wrapped(title: str, text: str) -> Iterator[str]:
    indent = " " * 3
    yield from textwrap.wrap(
        title + text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + " " * len(title),
        break_long_words=False,
        break_on_hyphens=False,
    )
