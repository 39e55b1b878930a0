"""`trl-atropos check`: everything that can be known to be wrong with a recipe, before anything is
started.

The recipe is parsed as the main job parses it, with the same checks. Then every module of this
folder looks at what it knows of, and yields findings: `AtroposTrainingError`s, as a run would raise
them. This module prints them.
"""

import argparse
import contextlib
import json
import os
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from trl_atropos.errors import ERROR, WARNING
from trl_atropos.errors import AtroposTrainingError as Finding
from trl_atropos.logging import columns

DESCRIPTION = """\
Finds what is wrong with a recipe before it is run, and says what to do about
each. Starts nothing. Takes the command line of `trl-atropos train`: the
settings, and some options of `accelerate launch`. What is checked:

  recipe        every key and value, and those that must fit each other;
                settings that have no effect
  versions      of what is installed; the optimizer's package
  files         model, checkpoint, recordings, output folder, and the disk for
                what is saved
  services      ports, sockets and shared memory for those that the recipe
                starts; what answers where it starts none
  GPUs          processes and servers against each other and the devices
  environments  program, script, atroposlib and tokenizer; settings that the
                recipe states and that must fit the run
  memory        trainer and server at their peaks, estimated from the model's
                config"""

EPILOG = """\
Errors would end the run, or train on something else than is meant; with
warnings it goes on, and loses something. Exit code: 0 without errors, 1 with
some, 2 for a command line that is wrong."""

RED = "\033[31m"
YELLOW = "\033[33m"
GREEN = "\033[32m"
PLAIN = "\033[0m"
WIDTH = 110  # columns at most
WRONG_USE = {"no-recipe", "unknown-flag"}  # codes of findings about the command line itself
ELSEWHERE = 80 << 30  # bytes of a GPU of which nothing is known, where its size does not matter


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trl-atropos check",
        usage="trl-atropos check RECIPE [--json] [--SETTING VALUE ...]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object: ok, findings, memory, versions"
    )
    add = parser.add_argument
    given = "as `accelerate launch` will be given it"
    text = "plan for a GPU of N GiB (or, with `use_cpu`, a machine) that is not this one"
    add("--device_memory_gb", type=float, metavar="N", help=text)
    add(
        "--host_memory_gb",
        type=float,
        metavar="N",
        help="plan for machines with N GiB of memory besides",
    )
    add("--devices", type=int, metavar="N", help="plan for machines of N GPUs")
    add("--config_file", metavar="FILE", help=f"accelerate's, {given}: processes and sharding")
    add("--num_processes", type=int, metavar="N", help=f"{given}: of all machines together")
    add("--num_machines", type=int, metavar="N", help=given)
    return parser


@dataclass
class Report:
    findings: list[Finding]  # errors first
    # `table` for people; the bytes of both processes by item, `total`, `available` and `fits`
    memory: dict[str, Any]
    versions: dict[str, str]  # of what is installed

    @property
    def exit_code(self) -> int:
        codes = {one.code for one in self.findings if one.level == ERROR}
        return 2 if codes & WRONG_USE else 1 if codes else 0

    def as_json(self) -> str:
        parts = ("what", "seen", "fix", "level")
        listed = [
            {"name": one.code} | {part: getattr(one, part) for part in parts}
            for one in self.findings
        ]
        whole = {
            "ok": not self.exit_code,
            "findings": listed,
            "memory": self.memory,
            "versions": self.versions,
        }
        return json.dumps(whole, indent=2) + "\n"


def main(argv: list[str]) -> None:
    """Prints what was found, and exits with the code that the help text names."""
    if not argv or {"-h", "--help"} & set(argv):
        build_parser().print_help()
        sys.exit(0 if argv else 2)
    with contextlib.redirect_stdout(sys.stderr):  # where DeepSpeed, for one, says what it found
        report = examine(argv)
    if "--json" in argv:
        sys.stdout.write(report.as_json())
    else:
        colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        sys.stdout.write("".join(f"{line}\n" for line in _lines(report, colours)))
    sys.exit(report.exit_code)


def examine(argv: list[str]) -> Report:
    """What is wrong with the run that these arguments of the main job describe."""
    from trl_atropos.check.launch import Launch, packages, read, refused
    from trl_atropos.flags import stated_settings
    from trl_atropos.report.run_log import versions

    options, argv = build_parser().parse_known_args(argv)
    del options.json
    launch = Launch(**vars(options))
    recipe = None
    memory = {"table": []}
    found = list(refused(lambda: launch.content))
    if found:
        launch = replace(launch, config_file=None)
    stated = stated_settings(argv)
    try:
        recipe = read(argv, stated, launch)
        more, memory = _of_recipe(recipe, launch, stated)
        found += more
    except Finding as error:  # without a recipe that can be read there is nothing more to look at
        found.append(error)
    found += packages(recipe)
    found.sort(key=lambda one: one.level != ERROR)
    return Report(found, memory, versions())


def _of_recipe(recipe, launch, stated: dict[str, Any]) -> tuple[list[Finding], dict[str, Any]]:
    from trl_atropos.check.fit import estimate, findings
    from trl_atropos.check.launch import Plan, case_of, dead, layout, plan_of, refused, saves
    from trl_atropos.check.memory import disk
    from trl_atropos.check.services import environments, lengths, services
    from trl_atropos.recipe import check_files, check_reports

    memory = {"table": ["Memory: no GPU is here. `--device_memory_gb N` plans for one of N GiB."]}
    folder = recipe.training.output_dir
    was_there = os.path.isdir(recipe.training.output_dir)
    found = [
        *refused(lambda: check_files(recipe)),
        *refused(lambda: check_reports(recipe.training)),
    ]
    if not was_there and os.path.isdir(folder) and not os.listdir(folder):
        os.rmdir(folder)
    found += [
        *services(recipe, launch),
        *layout(recipe, launch),
        *environments(recipe),
        *dead(recipe, stated),
    ]
    found += saves(recipe, launch, stated)
    if any(one.code == "model" for one in found):  # to ask for it again would take as long
        return found, {
            "table": ["Memory: no estimate, because the model cannot be loaded or trained."]
        }
    try:
        plan = plan_of(recipe.training, launch)
        case = case_of(recipe, plan or Plan("cuda", ELSEWHERE))
        found += lengths(recipe, case)
        found += disk(case, launch.elsewhere)
        if plan is not None:
            fit = estimate(case)
            found += findings(fit)
            memory = {"table": fit.table(), "bytes": {one.name: one.items for one in fit.processes}}
            memory |= {"total": fit.total, "available": plan.total, "fits": fit.fits}
            memory |= {"host": fit.host, "host_available": plan.host}
    except Exception as error:  # noqa: BLE001 - any model's own code may fail on tensors without data
        reason = " ".join(str(error).split())[:200]
        if recipe.model.use_peft and "arget modules" in reason:  # peft's own words
            what = "peft cannot put the adapter into the model"
            seen = f"{recipe.model.lora_target_modules}"
            fix = "Correct `lora_target_modules`, or set it to `all-linear`."
            found.append(Finding(what, f"lora_target_modules: {seen}", fix, "adapter"))
        memory = {
            "table": [f"Memory: no estimate, because the model does not run without data: {reason}"]
        }
    return found, memory


def _lines(report: Report, colours: bool) -> Iterator[str]:
    def painted(text: str, colour: str) -> str:
        return f"{colour}{text}{PLAIN}" if colours else text

    for number, one in enumerate(report.findings, start=1):
        yield f"{number}. {painted(one.level, RED if one.level == ERROR else YELLOW)} [{one.code}]"
        for title, text in (
            ("   ", f"{one.what.rstrip('.')}."),
            ("   seen  ", one.seen),
            ("   fix   ", one.fix),
        ):
            yield from wrapped(text, title)
        yield ""
    count = Counter(one.level for one in report.findings)
    counts = [f"{count[level]} {level}{'s' * (count[level] != 1)}" for level in (ERROR, WARNING)]
    if count[ERROR]:
        yield painted(f"{', '.join(counts)}.", RED)
    elif count[WARNING]:
        yield painted(f"No error, {counts[1]}.", YELLOW)
    else:
        yield painted("Nothing wrong was found.", GREEN)
    if report.memory["table"]:
        yield ""
        for line in report.memory["table"]:  # of which only what is no figure is long
            yield from textwrap.wrap(line, width(), drop_whitespace=False)


def width() -> int:
    """Columns that a line may take."""
    return min(WIDTH, columns() or WIDTH)


def wrapped(text: str, title: str = "") -> list[str]:
    """The lines of a text beside its title. What people copy stays whole."""
    indent = {"initial_indent": title, "subsequent_indent": " " * len(title)}
    return textwrap.wrap(text, width(), break_long_words=False, break_on_hyphens=False, **indent)
