"""`trl-atropos check`: everything that can be known to be wrong with a recipe, before anything is started.

The recipe is parsed as the main job parses it, with the same checks. Then every module of this folder looks at what it
knows of, and yields findings: `AtroposTrainingError`s, as a run would raise them. Here they are put together and
printed.
"""

import contextlib
import json
import os
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from trl_atropos.errors import ERROR, WARNING
from trl_atropos.errors import AtroposTrainingError as Finding

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
  environments    program, script and folder exist, and atroposlib is installed for its Python; what the recipe states
                  of its settings fits the run: batch and group size, temperature, Atropos API, servers
  memory          trainer and server at their peaks, estimated from the model's config, fit the device

options:
  --json                  one JSON object on the standard output: ok, findings, memory, versions
  --device_memory_gb N    plan for a GPU of N GiB (or, with `use_cpu`, a machine) that is not this one
  --devices N             plan for machines of N GPUs
  --config_file FILE      as `accelerate launch` will be given it: how many processes there are, and how they shard
  --num_processes N       as `accelerate launch` will be given it: of all machines together
  --num_machines N        as `accelerate launch` will be given it

Errors would end the run, or train on something else than is meant; with warnings it goes on, and loses something. Exit
code: 0 without errors, 1 with some, 2 for a command line that is wrong.
"""

RED, YELLOW, GREEN, PLAIN = "\033[31m", "\033[33m", "\033[32m", "\033[0m"
WIDTH = 110
WRONG_USE = ("no-recipe", "unknown-flag")  # codes of findings about the command line itself
ELSEWHERE = 80 << 30  # bytes of a GPU of which nothing is known, where its size does not matter
NO_GPU = "Memory: no GPU is here. `--device_memory_gb N` plans for one of N GiB."


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
        if any(one.code in WRONG_USE for one in self.errors):
            return 2
        return 1 if self.errors else 0

    def as_json(self) -> str:
        parts = ("what", "seen", "fix", "level")
        told = [{"name": one.code} | {part: getattr(one, part) for part in parts} for one in self.findings]
        whole = {"ok": not self.errors, "findings": told, "memory": self.memory, "versions": self.versions}
        return json.dumps(whole, indent=2) + "\n"


def main(argv: list[str]) -> None:
    """Prints what was found, and exits with the code that `HELP` tells."""
    if not argv or {"-h", "--help"} & set(argv):
        sys.stdout.write(HELP)
        sys.exit(0 if argv else 2)
    from trl_atropos.train import apply_recipe_environment

    apply_recipe_environment(argv)
    with contextlib.redirect_stdout(sys.stderr):  # where DeepSpeed, for one, says what it found
        report = examine([word for word in argv if word != "--json"])
    if "--json" in argv:
        sys.stdout.write(report.as_json())
    else:
        colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        sys.stdout.write("".join(f"{line}\n" for line in _lines(report, colours)))
    sys.exit(report.exit_code)


def check(argv: list[str]) -> list[str]:
    """What is wrong with the run that these arguments of the main job describe; empty if nothing is."""
    return [str(one) for one in examine(argv).findings]


def examine(argv: list[str]) -> Report:
    """The same, in parts that can be told apart."""
    from trl_atropos.check import settings
    from trl_atropos.check.launch import Launch, options

    machine, argv = options().parse_known_args(argv)
    found = []
    try:
        launch = Launch(**vars(machine))
    except Finding as error:
        found.append(error)
        launch = Launch(**{**vars(machine), "config_file": None})
    stated = settings.stated_settings(argv)
    recipe, wrong = settings.read(argv, stated, launch)
    found += [*wrong, *settings.versions()]
    memory = {"table": []}
    if recipe is not None:  # without one that can be read there is nothing more to look at
        urls = settings.of_files(argv).get("vllm_server_base_url") or []
        written = urls.split(",") if isinstance(urls, str) else [str(url) for url in urls]
        more, memory = _of_recipe(recipe, launch, stated, written)
        found += more
    found.sort(key=lambda one: one.level != ERROR)
    return Report(found, memory, settings.installed())


def _of_recipe(recipe, launch, stated: dict[str, Any], written: list[str]) -> tuple[list[Finding], dict[str, Any]]:
    from trl_atropos.check.environments import environments, lengths, tokenizers
    from trl_atropos.check.fit import disk
    from trl_atropos.check.launch import Plan, layout, plan_of, services
    from trl_atropos.check.memory import case_of
    from trl_atropos.check.settings import dead, packages

    found = [*packages(recipe, launch), *_files(recipe), *services(recipe, launch), *layout(recipe, launch)]
    found += tokenizers(recipe)
    try:
        plan = plan_of(recipe.training, launch)
    except Finding as error:  # a file that accelerate's names
        plan, found = None, [*found, error]
    with contextlib.suppress(Exception):  # what a model's own code and somebody else's flags raise: `_memory` tells it
        case = case_of(recipe, plan or Plan("cuda", ELSEWHERE))
        found += [*lengths(recipe, case, stated), *disk(case, launch.elsewhere)]
    found += [*environments(recipe, written), *dead(recipe, stated)]
    too_much, estimate = _memory(recipe, plan)
    return found + too_much, estimate


def _files(recipe) -> Iterator[Finding]:
    """What the run reads and writes, and what it reports to."""
    from trl_atropos.train import check_files, check_reports

    folder = recipe.training.output_dir
    was_there = os.path.isdir(folder)
    for look in (lambda: check_files(recipe), lambda: check_reports(recipe.training)):
        try:
            look()
        except Finding as error:
            yield error
    if not was_there and os.path.isdir(folder) and not os.listdir(folder):
        os.rmdir(folder)


def _memory(recipe, plan) -> tuple[list[Finding], dict[str, Any]]:
    """What does not fit; and the estimate, with the lines of its table, or why there is none."""
    from trl_atropos.check.fit import estimate, findings

    if plan is None:
        return [], {"table": [NO_GPU]}
    try:
        found = estimate(recipe, plan)
        told, table = findings(found), found.table()
    except Exception as error:  # noqa: BLE001 - any model's own code may fail on tensors without data
        reason = " ".join(str(error).split())[:200]
        if recipe.model.use_peft and "arget modules" in reason:  # peft's own words
            what, fix = (
                "The adapter does not go with the model, and peft ends the run",
                "Correct `lora_target_modules`",
            )
            seen = f"lora_target_modules: {recipe.model.lora_target_modules}"
            wrong = [Finding(what, seen, f"{fix}, or set it to `all-linear`.", "adapter")]
            return wrong, {"table": [f"Memory: no estimate ({reason})."]}
        needs = "which needs the model's config and a model that runs by it"
        return [], {"table": [f"Memory: no estimate, {needs} ({reason})."]}
    parts = {one.name: one.items for one in (found.trainer, found.server) if one is not None}
    return told, {"table": table, "bytes": parts, "total": found.total, "available": plan.total, "fits": found.fits}


def _lines(report: Report, colours: bool) -> Iterator[str]:
    def painted(text: str, colour: str) -> str:
        return f"{colour}{text}{PLAIN}" if colours else text

    for number, one in enumerate(report.findings, start=1):
        colour = RED if one.level == ERROR else YELLOW
        yield f"{number}. {painted(one.level, colour)} [{one.code}]"
        for title, text in (("", f"{one.what.rstrip('.')}."), ("seen  ", one.seen), ("fix   ", one.fix)):
            yield from _wrapped(title, text) if text else ()
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
