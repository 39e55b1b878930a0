"""Reads the scripts of environments with the Python that will run them, and runs nothing of them.

`services.py` calls `mistakes` for each script, and asks the same Python what is installed there. A
script may be written for a newer Python than this one, and import what is installed there only: so
that Python compiles it, and looks for the modules that it imports.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trl_atropos.environment_entry import EnvironmentSpec
from trl_atropos.errors import AtroposTrainingError as Finding

DEADLINE = 60.0  # seconds; a cold start from a network disk takes some

# Prints the mistakes of a script as JSON. It looks at imports that the script makes in any case:
# those at its top, which are in no `try` and no `if`.
READER = """
import ast, importlib.util, json, os, sys
path = os.path.abspath(sys.argv[1])
sys.path.insert(0, os.path.dirname(path))
mistakes = []
try:
    with open(path, "rb") as file:
        tree = compile(file.read(), path, "exec", ast.PyCF_ONLY_AST)
        compile(tree, path, "exec")
except SyntaxError as error:
    mistakes.append(["syntax", error.lineno or 1, error.msg])
    tree = ast.Module(body=[], type_ignores=[])
except ValueError as error:  # null bytes
    mistakes.append(["syntax", 1, str(error)])
    tree = ast.Module(body=[], type_ignores=[])
for node in tree.body:
    names = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.level == 0:
        names = [node.module]
    for name in names:
        package = name.partition(".")[0]
        try:
            missing = package not in sys.modules and importlib.util.find_spec(package) is None
        except (ImportError, ValueError):
            missing = True
        if missing:
            mistakes.append(["import", node.lineno, package])
print(json.dumps(mistakes))
"""


def mistakes(spec: EnvironmentSpec, python: str, script: Path) -> Iterator[Finding]:
    """Yields the syntax error of a script, or the modules that it imports and `python` does not
    have. Yields nothing if that Python does not start, which `services.py` reports."""
    try:
        found = ask_python(spec, python, READER, str(script.absolute()))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return
    for kind, line, text in found:
        place = f"{script}:{line}"
        if kind == "syntax":
            what = f"Environment {spec.name!r}: its script is no Python that {python} understands"
            yield Finding(what, f"{place}: {text}", "Correct it there.", "environment-syntax")
        else:
            what = f"Environment {spec.name!r}: its script imports `{text}`, which is not there"
            fix = (
                f"Install it for {python}, correct the import, or name another `python` in its "
                "entry."
            )
            yield Finding(what, place, fix, "environment-import")


def ask_python(spec: EnvironmentSpec, python: str, program: str, *words: str) -> Any:
    """Runs a program of ours with an environment's Python, and returns the JSON that it prints.

    Raises `OSError`, `SubprocessError`, `ValueError` or `IndexError` if that does not work.
    """
    variables = dict(os.environ)
    for name, value in spec.env.items():
        variables[name] = str(value)
    answer = subprocess.run(
        [python, "-", *words],
        input=program,
        capture_output=True,
        text=True,
        env=variables,
        cwd=spec.cwd,
        timeout=DEADLINE,
        check=True,
    )
    return json.loads(answer.stdout.splitlines()[-1])
