"""The shape of the package: which part may import which, and how long a function may be. `make
house` also prints how large the package is, which nothing bounds: a bound on lines is met by
putting more on each line."""

import ast
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests import ROOT
from tests.house.style import measure

PACKAGE = ROOT / "trl_atropos"
# Of the last run of each tier, in seconds, as tests/conftest.py leaves it.
TIERS = {
    "make test": ("not slow", 15 * 60),
    "make test-slow": ("slow", 25 * 60),
    "make test-all": ("all", 38 * 60),
}
LONGEST_FUNCTION = 79  # lines

# A room is a folder of the package, or a module beside the folders. What each may import, from the
# top down; `activity`, `errors`, `flags`, `logging`, `modes`, `privacy`, `protocol`, `terminal` and
# the package's own names may be imported everywhere.
EVERYBODYS = {
    *("trl_atropos", "activity", "errors", "flags", "logging", "modes", "privacy", "protocol"),
    "terminal",
}
MAY_IMPORT = {
    "cli": {"check", "commands", "train", "report", "front", "server"},
    "commands": {
        "check",
        "environment_entry",
        "recipe",
        "rollouts",
        "run_messages",
        "server_client",
        "services",
        "session_client",
        "train",
        "weights",
    },
    "embedded": {"recipe", "services", "train"},
    "run_messages": {"config", "recipe", "weights"},
    "check": {
        "agents",
        "batches",
        "config",
        "environment_entry",
        "environment_kinds",
        "recipe",
        "recipe_checks",
        "recipe_files",
        "report",
        "rollouts",
        "server",
        "server_client",
        "services",
        "weights",
    },
    "train": {
        "recipe",
        "recipe_checks",
        "run_messages",
        "services",
        "trainer",
        "config",
        "distributed",
        "report",
        "weights",
    },
    "trainer": {
        "batches",
        "config",
        "distributed",
        "metrics",
        "report",
        "rollouts",
        "services",
        "training",
        "weights",
    },
    "training": {
        "batches",
        "config",
        "distributed",
        "metrics",
        "report",
        "rollouts",
        "services",
        "weights",
    },
    "agents": {
        "environment_kinds",
        "environment_verifiers",
        "rollouts",
        "services",
        "session_client",
    },
    "recipe": {
        "config",
        "environment_entry",
        "recipe_checks",
        "recipe_files",
        "rollouts",
        "services",
    },
    "recipe_files": {"config"},
    "recipe_checks": {
        "config",
        "distributed",
        "environment_entry",
        "rollouts",
        "services",
        "weights",
    },
    "report": {"config", "metrics", "rollouts", "services"},
    "weights": {"config", "distributed", "metrics", "server_client", "services", "tensors"},
    "front": {"server", "services"},
    "server": {"tensors"},
    "config": {"metrics"},
    "metrics": {"batches", "distributed", "rollouts"},
    "services": {"environment_entry", "metrics", "rollouts", "server_client"},
    "batches": {"distributed", "rollouts"},
    "rollouts": {"server_client"},
    "server_client": {"distributed"},
    "distributed": set(),
    "session_client": set(),
    "tensors": set(),
    "environment_entry": {"environment_kinds", "environment_verifiers"},
    "environment_verifiers": {"environment_kinds"},
    "verifiers_site": set(),
    "environment_kinds": set(),
    "environment_site": set(),
    **{name: set() for name in EVERYBODYS},
}


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the package by its name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(
            path.read_text()
        )
    return found


def names_imported(node: ast.AST) -> Iterator[str]:
    """What a module imports, in functions too, but not for type checkers alone."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute here"
        for alias in node.names:
            whole = f"{node.module}.{alias.name}"
            yield whole if whole in modules() else node.module
    if_typing = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    for child in node.orelse if if_typing else ast.iter_child_nodes(node):
        yield from names_imported(child)


@cache
def imports() -> dict[str, set[str]]:
    """The modules of the package that each of them imports."""
    return {name: set(names_imported(tree)) & modules().keys() for name, tree in modules().items()}


def room_of(module: str) -> str:
    return module.split(".")[min(1, module.count("."))]


def circles() -> list[str]:
    """Modules that import themselves through others."""

    def reached(start: str) -> set[str]:
        seen, pending = set(), [start]
        while pending:
            new = imports()[pending.pop()] - seen
            seen |= new
            pending += new
        return seen

    return [name for name in imports() if name in reached(name)]


def arrows_up() -> list[str]:
    """Imports from one room into another that the table does not have."""
    return [
        f"{name} -> {other}"
        for name, others in imports().items()
        for other in sorted(others)
        if room_of(other) not in MAY_IMPORT.get(room_of(name), set()) | EVERYBODYS | {room_of(name)}
    ]


def longest_function() -> tuple[int, str]:
    """Lines and name of the longest function."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return max(
        (node.end_lineno - node.lineno + 1, f"{name}.{node.name}")
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, kinds)
    )


def lines_in(folder: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in folder.rglob("*.py"))


def files_at_the_top() -> int:
    return len(list(PACKAGE.glob("*.py")))


def test_modules_have_no_circular_imports():
    assert circles() == []


def test_rooms_import_none_above_them():
    assert {room_of(name) for name in modules()} == MAY_IMPORT.keys()
    assert arrows_up() == []


def importers_of(room: str) -> set[str]:
    """Returns the rooms of which a module imports one of `room`."""
    return {
        room_of(name)
        for name, others in imports().items()
        if any(room_of(other) == room for other in others)
    }


def test_rollouts_and_weights_do_not_know_each_other():
    assert "weights" not in importers_of("rollouts")
    assert "rollouts" not in importers_of("weights")


@pytest.mark.parametrize("room", ["train", "check"])
def test_top_rooms_are_imported_by_entry_points_only(room):
    assert importers_of(room) <= {room, "cli", "commands", "embedded"}


def test_functions_fit_one_screen():
    assert longest_function()[0] <= LONGEST_FUNCTION


def class_named(module: str, name: str) -> ast.ClassDef:
    (found,) = [
        node
        for node in modules()[module].body
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    return found


def attributes_of_the_trainer() -> set[str]:
    """Returns what `AtroposGRPOTrainer` writes on `self`."""
    trainer = class_named("trl_atropos.trainer", "AtroposGRPOTrainer")
    return {
        node.attr
        for node in ast.walk(trainer)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) == "self"
    }


def settings() -> list[str]:
    """Returns the names of the fields that `AtroposGRPOConfig` adds to TRL's."""
    config = class_named("trl_atropos.config", "AtroposGRPOConfig")
    return [node.target.id for node in config.body if isinstance(node, ast.AnnAssign)]


def reading_figures() -> dict[str, str]:
    """Returns how much a reader of the package has to hold, by the figure's name."""
    style = measure(sorted(PACKAGE.rglob("*.py")))
    per_1000_lines = {
        "`a, b = x, y`": "packed_assignments",
        "conditional expressions": "conditional_expressions",
        "comprehensions": "comprehensions",
        "lambdas": "lambdas",
    }
    figures = {
        "syntax nodes": f"{style.nodes:,}",
        "lines of code": f"{style.code_lines:,}",
        "nodes in a line of code": f"{style.nodes_per_line:.2f}",
    }
    for label, count in per_1000_lines.items():
        figures[f"{label} in 1,000 lines of code"] = f"{style.per_1000(count):.1f}"
    borrowed = f"{style.borrowed_docstrings} of {style.docstrings:,}"
    figures["docstrings that open with What, Whether, Of, How, As, ..."] = borrowed
    figures["attributes that the trainer writes on `self`"] = len(attributes_of_the_trainer())
    figures["settings"] = len(settings())
    return figures


def durations() -> dict[str, str]:
    """Returns how long each tier of the tests took the last time."""
    figures = {}
    for name, (tier, most) in TIERS.items():
        path = ROOT / ".pytest_cache/v" / "seconds" / tier
        seconds = f"{json.loads(path.read_text()):.0f}" if path.exists() else "-"
        figures[name] = f"{seconds} seconds (at most {most} on two idle cores)"
    return figures


def main() -> None:
    length, function = longest_function()
    figures = {
        "modules": len(modules()),
        "lines": lines_in(PACKAGE),
        "lines of tests": lines_in(ROOT / "tests"),
        "files at the top": files_at_the_top(),
        f"lines of the longest function, {function}": f"{length} (at most {LONGEST_FUNCTION})",
        "circles": " ".join([str(len(circles())), *circles()]),
        "arrows up": " ".join([str(len(arrows_up())), *arrows_up()]),
    }
    figures |= reading_figures() | durations()
    for name, value in figures.items():
        print(f"{name:<62} {value}")


if __name__ == "__main__":
    main()
