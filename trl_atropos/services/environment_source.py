"""Reads an environment's script without running it: the names of its settings, and what its
requests ask for.

`recipe_checks.py` compares the names under `config:` with those of the script (`setting_names`),
because Atropos silently drops a misspelt one. `check` looks at the requests (`reshaping_requests`),
and at what a script imports (`imports_from`).
If the script alone does not tell the names, nothing is said here: the environment's own process
compares them once it has imported everything (`environment_site/run.py`).
"""

import ast
import importlib.util
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from trl_atropos.protocol import RESHAPING_FIELDS, SamplingSettings

BASE_MODULE = "atroposlib.envs.base"
BASE_CONFIG = "BaseEnvConfig"
BASE_ENVIRONMENT = "BaseEnv"
# Other names by which the OpenAI routes of vLLM take what becomes `structured_outputs`.
GRAMMARS = ("response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar")


def parse_script(path: Path) -> ast.Module | None:
    """Returns the syntax tree of a script. Returns None if there is no file, or if it is no Python
    of this version."""
    try:
        return ast.parse(path.read_text("utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None


def imports_from(path: Path, modules: Iterable[str]) -> bool:
    """Returns whether a script imports one of these modules, or anything in it."""
    tree = parse_script(path)
    if tree is None:
        return False
    imported = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imported += [f"{node.module}.{alias.name}" for alias in node.names]
    prefixes = tuple(f"{module}." for module in modules)
    return any(f"{name}.".startswith(prefixes) for name in imported)


# ----------------------------------------------------------------------------------------- settings


def setting_names(path: Path) -> set[str] | None:
    """Returns the names of all settings that the environments of a script have. Returns None if a
    class that they come from is not in the script."""
    tree = parse_script(path)
    if tree is None:
        return None
    script = _Classes(tree)
    configs = set()
    for node in script.classes.values():
        if script.is_environment(node):
            configs |= _config_classes(node)
    if not configs:
        return None
    names = set(_base_names())
    for config in configs:
        further = script.settings_of(config)
        if further is None:
            return None
        names |= further
    return names


class _Classes:
    """Classes of a script by name, and the names that it imports from Atropos' base module."""

    def __init__(self, tree: ast.Module) -> None:
        self.classes: dict[str, ast.ClassDef] = {}
        self._imported: dict[str, str] = {}  # {"Base": "BaseEnv"} for `import BaseEnv as Base`
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                self.classes[node.name] = node
            elif isinstance(node, ast.ImportFrom) and node.module == BASE_MODULE:
                for alias in node.names:
                    name = alias.asname or alias.name
                    self._imported[name] = alias.name

    def is_environment(self, node: ast.ClassDef) -> bool:
        """Returns whether a class descends from Atropos' `BaseEnv`, through classes of the script
        alone."""
        visited = set()
        pending = [node]
        while pending:
            for base in map(_name, pending.pop().bases):
                if self._imported.get(base) == BASE_ENVIRONMENT:
                    return True
                if base in self.classes and base not in visited:
                    visited.add(base)
                    pending.append(self.classes[base])
        return False

    def settings_of(self, config: str) -> set[str] | None:
        """Returns the settings that the class `config` adds to Atropos' `BaseEnvConfig`. Returns
        None if the script does not tell them all."""
        names = set()
        visited = set()
        while self._imported.get(config) != BASE_CONFIG:
            node = self.classes.get(config)
            if node is None or config in visited:
                return None
            if len(node.bases) != 1 or _is_open(node):
                return None
            visited.add(config)
            names |= _fields(node)
            config = _name(node.bases[0])
        return names


@cache
def _base_names() -> set[str]:
    """Returns the settings that Atropos itself has for every environment."""
    package = importlib.util.find_spec("atroposlib")
    path = Path(package.submodule_search_locations[0], "envs", "base.py")
    base = _Classes(parse_script(path))
    return _fields(base.classes[BASE_CONFIG])


def _config_classes(environment: ast.ClassDef) -> set[str]:
    """Returns the classes that an environment's settings may be of: its `env_config_cls`, and the
    classes that `config_init` calls whose names end as Atropos' own does."""
    configs = set()
    for node in ast.walk(environment):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            is_config = "env_config_cls" in _assigned_names(node)
            if is_config and node.value is not None:
                configs.add(_name(node.value))
        elif isinstance(node, ast.FunctionDef) and node.name == "config_init":
            configs |= _configs_called_in(node)
    return configs or {BASE_CONFIG}


def _configs_called_in(node: ast.FunctionDef) -> set[str]:
    configs = set()
    for call in ast.walk(node):
        if isinstance(call, ast.Call):
            name = _name(call.func)
            if name.endswith("EnvConfig"):
                configs.add(name)
    return configs


def _is_open(config: ast.ClassDef) -> bool:
    """Returns whether a class says itself how unknown settings are taken, or has other names for
    some."""
    for node in config.body:
        names = set()
        if isinstance(node, ast.ClassDef):
            names = {node.name}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names = _assigned_names(node)
        if names & {"Config", "model_config"}:
            return True
    return "alias" in ast.unparse(config)


def _fields(config: ast.ClassDef) -> set[str]:
    """Returns the names that a class annotates."""
    names = set()
    for node in config.body:
        if isinstance(node, ast.AnnAssign):
            names.add(_name(node.target))
    return names


def _assigned_names(node: ast.Assign | ast.AnnAssign) -> set[str]:
    """Returns the names that an assignment assigns to."""
    if isinstance(node, ast.Assign):
        return {_name(target) for target in node.targets}
    return {_name(node.target)}


def _name(node: ast.AST) -> str:
    """Returns the last part of a dotted name, or an empty text for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    return ""


# ----------------------------------------------------------------------------------------- requests


class Request(NamedTuple):
    """A setting that the script gives to a request as a literal."""

    line: int
    text: str  # as the script has it, `top_p=0.9`


def reshaping_requests(path: Path) -> list[Request]:
    """Returns the literals in a script that would make the server sample from another distribution
    than the policy's. Functions for evaluations, whose names have `eval` in them, may ask for
    anything."""
    tree = parse_script(path)
    if tree is None:
        return []
    return sorted(_requests_in(tree))


def _requests_in(node: ast.AST) -> Iterator[Request]:
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    if is_function and "eval" in node.name:
        return
    for name, value in _settings_in(node):
        if _reshapes(name, value):
            text = f"{name}={ast.unparse(value)}"
            yield Request(value.lineno, text)
    for child in ast.iter_child_nodes(node):
        yield from _requests_in(child)


def _settings_in(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yields what may be settings of a request: keywords of a call, and pairs of a dictionary."""
    if isinstance(node, ast.Call) and _name(node.func) != "Field":
        for keyword in node.keywords:
            if keyword.arg is not None:  # None: `**settings`
                yield keyword.arg, keyword.value
    elif isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values):
            if isinstance(key, ast.Constant):
                yield key.value, value


def _reshapes(name: str, value: ast.expr) -> bool:
    """Returns whether a request that sets `name` to `value` samples from another distribution."""
    is_literal = isinstance(value, ast.Constant)
    literal = value.value if is_literal else None
    usual = SamplingSettings().numbers()
    # `config:` and the server's notes say more about the temperature.
    if name in usual and name != "temperature":
        is_number = type(literal) in (int, float)
        return is_number and literal != usual[name]
    if name == "min_tokens":
        return bool(literal)
    if is_literal and literal is None:
        return False
    return name in RESHAPING_FIELDS or name in GRAMMARS
