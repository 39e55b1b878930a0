"""Reads an environment's script without running it: the names of its settings, and what its
requests ask for.

`recipe.py` compares the names under `config:` with those of the script, because Atropos silently
drops a misspelt one. `check` looks at the requests. If the script alone does not tell the names,
nothing is said here: the environment's own
process compares them once it has imported everything (`environment_site/run.py`).
"""

import ast
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from trl_atropos.protocol import RESHAPING_FIELDS, SamplingSettings

BASE_MODULE = "atroposlib.envs.base"
BASE_CONFIG = "BaseEnvConfig"
BASE_ENVIRONMENT = "BaseEnv"
# Other names by which the OpenAI routes of vLLM take what becomes `structured_outputs`.
GRAMMARS = ("response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar")


class Request(NamedTuple):
    """A setting that the script gives to a request as a literal."""

    line: int
    text: str  # as the script has it, `top_p=0.9`


def parse_script(path: Path) -> ast.Module | None:
    """Returns the syntax tree of a script, or None if there is none: no file, or no Python of this
    version."""
    try:
        return ast.parse(path.read_text("utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None


# ----------------------------------------------------------------------------------------- settings


def setting_names(path: Path) -> set[str] | None:
    """Returns the names of all settings that the environments of a script have, or None if a class
    that they come from is not in the script."""
    tree = parse_script(path)
    if tree is None:
        return None
    imported = _imported_from_atropos(tree)
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    environments = [
        node for node in classes.values() if _descends(node, BASE_ENVIRONMENT, classes, imported)
    ]
    if not environments:
        return None
    names = _base_names()
    for config in set().union(*map(_config_classes, environments)):
        if imported.get(config) == BASE_CONFIG:
            continue
        while imported.get(config) != BASE_CONFIG:
            node = classes.get(config)
            if node is None or len(node.bases) != 1 or _is_open(node):
                return None
            names = names | _fields(node)
            config = _name(node.bases[0])
    return names


@cache
def _base_names() -> set[str]:
    """Returns the settings that Atropos itself has for every environment."""
    package = importlib.util.find_spec("atroposlib")
    path = Path(package.submodule_search_locations[0], "envs", "base.py")
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ClassDef) and node.name == BASE_CONFIG:
            return _fields(node)
    raise AssertionError(f"{path} has no {BASE_CONFIG}")


def _imported_from_atropos(tree: ast.Module) -> dict[str, str]:
    """Returns what the script calls the names that it imports from Atropos' base module: by its
    own, theirs."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == BASE_MODULE:
            for alias in node.names:
                found[alias.asname or alias.name] = alias.name
    return found


def _descends(
    node: ast.ClassDef, ancestor: str, classes: dict[str, ast.ClassDef], imported: dict[str, str]
) -> bool:
    """Returns whether a class has an ancestor of Atropos' base module, through classes of the
    script alone."""
    bases = [_name(base) for base in node.bases]
    if ancestor in (imported.get(base) for base in bases):
        return True
    return any(
        base in classes
        and classes[base] is not node
        and _descends(classes[base], ancestor, classes, imported)
        for base in bases
    )


def _config_classes(environment: ast.ClassDef) -> set[str]:
    """Returns the classes that an environment's settings may be of: its `env_config_cls`, and what
    `config_init` makes whose name ends as Atropos' own does."""
    found = set()
    for node in ast.walk(environment):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if "env_config_cls" in map(_name, targets) and node.value is not None:
                found.add(_name(node.value))
        elif isinstance(node, ast.FunctionDef) and node.name == "config_init":
            calls = [_name(call.func) for call in ast.walk(node) if isinstance(call, ast.Call)]
            found.update(name for name in calls if name.endswith("EnvConfig"))
    return found or {BASE_CONFIG}


def _is_open(config: ast.ClassDef) -> bool:
    """Returns whether a class says itself how unknown settings are taken, or has other names for
    some."""
    own = {getattr(node, "name", "") for node in config.body}
    own |= {
        _name(target)
        for node in config.body
        if isinstance(node, ast.Assign)
        for target in node.targets
    }
    return bool(own & {"Config", "model_config"}) or "alias" in ast.unparse(config)


def _fields(config: ast.ClassDef) -> set[str]:
    return {_name(node.target) for node in config.body if isinstance(node, ast.AnnAssign)}


def _name(node: ast.AST) -> str:
    """Returns the last part of a dotted name, or an empty text for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


# ----------------------------------------------------------------------------------------- requests


def reshaping_requests(path: Path) -> list[Request]:
    """Returns the literals in a script that would have the server sample from another distribution
    than the policy's. Functions for evaluations, whose names have `eval` in them, may ask for
    anything."""
    tree = parse_script(path)
    return [] if tree is None else sorted(_requests_in(tree))


def _requests_in(node: ast.AST) -> Iterator[Request]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and "eval" in node.name:
        return
    pairs: list[tuple[str | None, ast.expr]] = []
    if isinstance(node, ast.Call) and _name(node.func) != "Field":
        pairs = [(word.arg, word.value) for word in node.keywords]
    elif isinstance(node, ast.Dict):
        pairs = [(getattr(key, "value", None), value) for key, value in zip(node.keys, node.values)]
    for name, value in pairs:
        if _reshapes(name, value):
            yield Request(value.lineno, f"{name}={ast.unparse(value)}")
    for child in ast.iter_child_nodes(node):
        yield from _requests_in(child)


def _reshapes(name: str | None, value: ast.expr) -> bool:
    usual = SamplingSettings().numbers()
    # of that, `config:` and the server's notes say more
    if name in usual and name != "temperature":
        number = getattr(value, "value", None)
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        return is_number and number != usual[name] and (name, number) != ("top_k", -1)
    if name == "min_tokens":
        return bool(getattr(value, "value", None))
    is_nothing = isinstance(value, ast.Constant) and value.value is None
    return name in (*RESHAPING_FIELDS, *GRAMMARS) and not is_nothing
