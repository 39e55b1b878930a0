"""`trl-atropos check`: everything that can be known to be wrong with a recipe before it is run.

The recipe is parsed as the main job parses it, with the same checks. Then every module of this
folder looks at what it knows of, and yields findings: `AtroposTrainingError`s, as a run would raise
them. This module collects and prints them.
"""

import argparse
import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trl_atropos.activity import activity, importing
from trl_atropos.errors import ERROR, WARNING
from trl_atropos.errors import AtroposTrainingError as Finding
from trl_atropos.terminal import CommandParser, columns, lines_within

if TYPE_CHECKING:
    from trl_atropos.check.launch import Launch
    from trl_atropos.recipe import Recipe

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
ELSEWHERE = 80 << 30  # bytes: stands for the GPU of another machine if its size does not matter


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
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
    given = "as you will give it to `accelerate launch`"
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
    """Result of a check."""

    findings: list[Finding]  # errors first
    # `table` for people; the bytes of both processes by item, `total`, `available` and `fits`
    memory: dict[str, Any]
    versions: dict[str, str]  # of what is installed

    @property
    def exit_code(self) -> int:
        codes = {finding.code for finding in self.findings if finding.level == ERROR}
        if codes & WRONG_USE:
            return 2
        return 1 if codes else 0

    def as_json(self) -> str:
        findings = [
            {
                "name": finding.code,
                "what": finding.what,
                "seen": finding.seen,
                "fix": finding.fix,
                "level": finding.level,
            }
            for finding in self.findings
        ]
        content = {
            "ok": not self.exit_code,
            "findings": findings,
            "memory": self.memory,
            "versions": self.versions,
        }
        return json.dumps(content, indent=2) + "\n"


def main(argv: list[str]) -> None:
    """Prints the findings, and exits with the code that the help text names."""
    parser = build_parser()
    if not argv:
        parser.error(f"name a recipe, a YAML file; `{parser.prog} --help` says more")
    if {"-h", "--help"} & set(argv):
        parser.print_help()
        sys.exit(0)
    with contextlib.redirect_stdout(sys.stderr):  # libraries such as DeepSpeed write to stdout
        report = examine(argv)
    if "--json" in argv:
        sys.stdout.write(report.as_json())
    else:
        colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        for line in _lines(report, colours):
            sys.stdout.write(f"{line}\n")
    sys.exit(report.exit_code)


def examine(argv: list[str]) -> Report:
    """Examines the run that these arguments of the main job describe."""
    with importing("PyTorch, Transformers and TRL"):
        from trl_atropos.check.launch import Launch, refused
        from trl_atropos.check.settings import packages, read
        from trl_atropos.report.run_log import versions
    from trl_atropos.flags import stated_settings

    options, argv = build_parser().parse_known_args(argv)
    del options.json
    launch = Launch(**vars(options))
    findings = list(refused(lambda: launch.content))
    if findings:
        launch = replace(launch, config_file=None)
    stated = stated_settings(argv)
    recipe = None
    memory = {"table": []}
    try:
        with activity("Reading the recipe"):
            recipe = read(argv, stated, launch)
        recipe_findings, memory = _examine_recipe(recipe, launch, stated)
        findings += recipe_findings
    except Finding as error:  # without a recipe that can be read there is nothing more to look at
        findings += [error, *error.further]
    findings += packages(recipe)
    findings.sort(key=lambda finding: finding.level != ERROR)
    return Report(findings, memory, versions())


def _examine_recipe(
    recipe: "Recipe", launch: "Launch", stated: dict[str, Any]
) -> tuple[list[Finding], dict[str, Any]]:
    """Returns the findings about a recipe, and `Report.memory`."""
    from trl_atropos.check.launch import layout, refused
    from trl_atropos.check.services import environments, services
    from trl_atropos.check.settings import dead, saves
    from trl_atropos.recipe_checks import check_reports

    with activity("Checking the model and the checkpoints"):
        findings = _examine_files(recipe)
    with activity("Checking the services"):
        findings += refused(lambda: check_reports(recipe.training))
        findings += services(recipe, launch)
        findings += layout(recipe, launch)
        findings += refused(lambda: _require_divisible_rows(recipe, launch))
    with activity("Checking the environments"):
        findings += environments(recipe)
    findings += dead(recipe, stated)
    findings += saves(recipe, launch, stated)
    # To look again for a model that is not there would take as long as the first time.
    if any(finding.code == "model" for finding in findings):
        what = "Memory: no estimate, because the model cannot be loaded or trained."
        return findings, {"table": [what]}
    try:
        return findings, _examine_memory(recipe, launch, findings)
    except Exception as error:  # noqa: BLE001 - any model's own code may fail on tensors without data
        reason = " ".join(str(error).split())[:200]
        if recipe.model.use_peft and "arget modules" in reason:  # peft's own words
            what = "peft cannot put the adapter into the model"
            seen = f"lora_target_modules: {recipe.model.lora_target_modules}"
            fix = "Correct `lora_target_modules`, or set it to `all-linear`."
            findings.append(Finding(what, seen, fix, "adapter"))
        what = f"Memory: no estimate, because the model does not run without data: {reason}"
        return findings, {"table": [what]}


def _require_divisible_rows(recipe: "Recipe", launch: "Launch") -> None:
    """Raises `RecipeError`, as the run does, if processes cannot divide rows (`sp_size`)."""
    processes = launch.processes or launch.sp_size
    recipe.training.require_divisible_rows(launch.sp_size, processes)


def _examine_files(recipe: "Recipe") -> list[Finding]:
    """Returns the findings about files. Leaves no output folder behind, which the checks make."""
    from trl_atropos.check.launch import refused
    from trl_atropos.recipe_checks import check_files

    folder = recipe.training.output_dir
    was_there = os.path.isdir(folder)
    findings = list(refused(lambda: check_files(recipe)))
    if not was_there and os.path.isdir(folder) and not os.listdir(folder):
        os.rmdir(folder)
    return findings


def _examine_memory(recipe: "Recipe", launch: "Launch", findings: list[Finding]) -> dict[str, Any]:
    """Adds the findings about lengths, disk and memory. Returns `Report.memory`."""
    from trl_atropos.batches.sequence_parallel import require_shared_heads
    from trl_atropos.check import fit, sessions
    from trl_atropos.check.disk import disk
    from trl_atropos.check.launch import Plan, case_of, plan_of, refused
    from trl_atropos.check.lengths import deadlines, lengths
    from trl_atropos.check.settings import precision

    plan = plan_of(recipe.training, launch)
    case = case_of(recipe, plan or Plan("cuda", ELSEWHERE))
    findings += lengths(recipe, case)
    findings += deadlines(recipe)
    findings += precision(case)
    findings += sessions.findings(recipe, case)
    findings += refused(lambda: require_shared_heads(case.config, launch.sp_size))
    findings += disk(case, launch.elsewhere)
    if plan is None:
        what = "Memory: no GPU is here. `--device_memory_gb N` plans for one of N GiB."
        return {"table": [what]}
    with activity("Estimating the memory"):
        estimate = fit.estimate(case)
    # Each change of the settings is estimated anew, which takes minutes for a model of many layers.
    with activity("Looking for settings with which the run fits"):
        findings += fit.findings(estimate)
    return {
        "table": estimate.table(),
        "bytes": {process.name: process.items for process in estimate.processes},
        "total": estimate.total,
        "available": plan.total,
        "fits": estimate.fits,
        "host": estimate.host,
        "host_available": plan.host,
    }


def _lines(report: Report, colours: bool) -> Iterator[str]:
    """Yields the report for people."""
    for number, finding in enumerate(report.findings, start=1):
        level = _painted(finding.level, RED if finding.level == ERROR else YELLOW, colours)
        yield f"{number}. {level} [{finding.code}]"
        yield from wrapped(f"{finding.what.rstrip('.')}.", "   ")
        yield from wrapped(finding.seen, "   seen  ")
        yield from wrapped(finding.fix, "   fix   ")
        yield ""
    levels = Counter(finding.level for finding in report.findings)
    warnings = _counted(levels[WARNING], WARNING)
    if levels[ERROR]:
        yield _painted(f"{_counted(levels[ERROR], ERROR)}, {warnings}.", RED, colours)
    elif levels[WARNING]:
        yield _painted(f"No error, {warnings}.", YELLOW, colours)
    else:
        yield _painted("Nothing wrong was found.", GREEN, colours)
    if report.memory["table"]:
        yield ""
        for line in report.memory["table"]:  # sentences are long, lines of figures are not
            yield from lines_within(line, width())


def _painted(text: str, colour: str, colours: bool) -> str:
    return f"{colour}{text}{PLAIN}" if colours else text


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def width() -> int:
    """Returns the columns that a line may take."""
    return min(WIDTH, columns() or WIDTH)


def wrapped(text: str, title: str = "") -> list[str]:
    """Returns the lines of a text beside its title. What people copy stays whole."""
    if not text:
        return []
    start = len(title) - len(title.lstrip())
    beside_title = " " * (len(title) - start)
    line = " ".join(text.split("\n"))
    return lines_within(f"{title}{line}", width(), beside_title)
