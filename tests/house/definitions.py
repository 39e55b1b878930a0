"""Follows names through the source of releases to their definitions: through imports from one module
to the next, and from a class to its bases."""

import ast
import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

from tests.house.releases import MissingError, Release, UnresolvedError

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
DEFINITIONS = FUNCTIONS | ast.ClassDef
ASSIGNMENTS = ast.Assign | ast.AnnAssign
STAR = re.compile(r"^\s*from (\.*)([\w.]*) import \*", re.MULTILINE)
DEEPEST = 30  # imports from module to module, and bases of a class


class OutsideError(UnresolvedError):
    """A name comes from a library whose source was not given."""


@dataclass(frozen=True)
class Definition:
    """A class, function, assignment, or whole module (`ast.Module`), and the module that it stands
    in."""

    module: str
    node: ast.AST


class Libraries:
    """
    Follows names through the releases of several libraries.

    Args:
        releases: one of each library. Names of other libraries raise `OutsideError`.
    """

    def __init__(self, releases: list[Release]):
        self.releases = {release.library: release for release in releases}
        self._members: dict[ast.ClassDef, dict[str, ast.AST]] = {}
        self._absent: set[tuple[str, str]] = set()  # names that `import *` does not bring

    def release_of(self, module: str) -> Release:
        library = module.partition(".")[0]
        if library not in self.releases:
            raise OutsideError(library)
        return self.releases[library]

    def module(self, module: str) -> Definition:
        return Definition(module, self.release_of(module).tree(module))

    def find(self, module: str, qualified_name: str) -> Definition:
        """Returns the definition of a name such as `Trainer` or `Trainer.train`; of the module for
        an empty name. Raises `MissingError`, `OutsideError` or `UnreadableError`."""
        definition = self.module(module)
        for name in filter(None, qualified_name.split(".")):
            definition = self.attribute(definition, name)
        return definition

    def find_or_none(self, module: str, qualified_name: str) -> Definition | None:
        """Returns the definition of a name, and `None` if its release does not have it."""
        try:
            return self.find(module, qualified_name)
        except UnresolvedError:
            return None

    def attribute(self, owner: Definition, name: str) -> Definition:
        """Returns the definition of a module's or a class' attribute."""
        if isinstance(owner.node, ast.Module):
            return self._in_module(owner.module, name, 0)
        if isinstance(owner.node, ast.ClassDef):
            return self._in_class(owner, name)
        if isinstance(owner.node, ASSIGNMENTS):
            raise OutsideError(f"the value of {ast.unparse(owner.node)[:60]}")
        raise MissingError(f"{owner.module}:{owner.node.name} has no {name}")

    def _in_module(self, module: str, name: str, depth: int) -> Definition:
        release = self.release_of(module)
        tree = release.tree(module)
        if depth > DEEPEST:
            raise MissingError(f"{module} imports {name} in a circle")
        failure = MissingError(f"{module} has no {name}")
        fallback = None
        for node in bindings(tree, name):
            if isinstance(node, DEFINITIONS):
                return Definition(module, node)
            if isinstance(node, ASSIGNMENTS):
                fallback = fallback or self._assigned(module, node, name, depth)
                continue
            try:
                return self._imported(module, node, name, depth)
            except (MissingError, OutsideError) as error:
                failure = error
        if fallback is not None:
            return fallback
        if f"{module}.{name}" in release.readers:
            return self.module(f"{module}.{name}")
        raise failure

    def _assigned(self, module: str, node: ast.AST, name: str, depth: int) -> Definition:
        """Follows `name = another`."""
        if isinstance(node.value, ast.Name) and node.value.id != name:
            with contextlib.suppress(MissingError, OutsideError):
                return self._in_module(module, node.value.id, depth + 1)
        return Definition(module, node)

    def _imported(self, module: str, node: ast.AST, name: str, depth: int) -> Definition:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname == name:
                    return self.module(alias.name)
            return self.module(name)
        source = self._source_of(module, node)
        for alias in node.names:
            if (alias.asname or alias.name) == name:
                return self._in_module(source, alias.name, depth + 1)
        return self._starred(source, name, depth + 1)

    def _starred(self, module: str, name: str, depth: int) -> Definition:
        """Follows `from module import *`. Most such modules do not have the name, and need no
        parsing."""
        if (module, name) in self._absent:
            raise MissingError(f"{module} has no {name}")
        text = self.release_of(module).readers.get(module, bytes)()
        if name.encode() in text:
            with contextlib.suppress(MissingError):
                return self._in_module(module, name, depth)
        for level, source in STAR.findall(text.decode("utf-8", errors="replace")):
            node = ast.ImportFrom(source or None, [], len(level))
            with contextlib.suppress(MissingError, OutsideError):
                return self._starred(self._source_of(module, node), name, depth + 1)
        self._absent.add((module, name))
        raise MissingError(f"{module} has no {name}")

    def _source_of(self, module: str, node: ast.ImportFrom) -> str:
        """Returns the absolute name of the module that a statement imports from."""
        if node.level == 0:
            return node.module
        above = node.level
        if module in self.release_of(module).packages:
            above -= 1  # one dot is the package itself
        parts = module.split(".")
        parts = parts[: len(parts) - above]
        if node.module:
            parts.append(node.module)
        return ".".join(parts)

    def classes(self, owner: Definition) -> Iterator[Definition]:
        """Yields a class and its bases, as far as their sources are there."""
        pending = [owner]
        seen = set()
        while pending and len(seen) < DEEPEST:
            definition = pending.pop(0)
            if definition in seen or not isinstance(definition.node, ast.ClassDef):
                continue
            seen.add(definition)
            yield definition
            for base in definition.node.bases:
                with contextlib.suppress(MissingError, OutsideError):
                    pending.append(self._base(definition.module, base))

    def _base(self, module: str, base: ast.expr) -> Definition:
        if isinstance(base, ast.Subscript):  # `Base[Type]`
            base = base.value
        return self.find(module, ast.unparse(base))

    def text(self, module: str, qualified_name: str) -> str:
        """Returns the source of a function or class, or of the whole module."""
        definition = self.find(module, qualified_name)
        whole = self.release_of(definition.module).text(definition.module)
        if isinstance(definition.node, ast.Module):
            return whole
        lines = whole.split("\n")
        first = definition.node.lineno - 1
        end = definition.node.end_lineno
        return "\n".join(lines[first:end])

    def fields(self, owner: Definition) -> tuple[str, ...]:
        """Returns the annotated attributes of a class and its bases: the arguments of a dataclass'
        constructor."""
        names = {}
        for definition in self.classes(owner):
            for node in statements(definition.node.body):
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    names[node.target.id] = None
        return tuple(names)

    def has_other_bases(self, owner: Definition) -> bool:
        """Returns whether a class has a base whose source is not there, for instance torch's."""
        for definition in self.classes(owner):
            for base in definition.node.bases:
                try:
                    self._base(definition.module, base)
                except OutsideError as error:
                    if str(error) not in ("abc", "enum", "typing", "dataclasses"):
                        return True
                except MissingError:  # of Python itself, such as `Exception`
                    return True
        return False

    def _in_class(self, owner: Definition, name: str) -> Definition:
        for definition in self.classes(owner):
            node = definition.node
            if node not in self._members:
                self._members[node] = members(node)
            if name in self._members[node]:
                return Definition(definition.module, self._members[node][name])
        raise MissingError(f"{owner.module}:{owner.node.name} has no {name}")


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements of a module or class, those in `if`, `try` and `with` too."""
    for node in body:
        yield node
        if not isinstance(node, DEFINITIONS):
            for part in ("body", "handlers", "orelse", "finalbody"):
                inner = getattr(node, part, [])
                yield from statements(inner)


def bindings(tree: ast.Module, name: str) -> Iterator[ast.stmt]:
    """Yields the statements that may bind a name of a module. `from x import *` comes last."""
    stars = []
    for node in statements(tree.body):
        if isinstance(node, DEFINITIONS):
            bound = [] if _is_overload(node) else [node.name]
        elif isinstance(node, ASSIGNMENTS):
            bound = _targets(node)
        elif isinstance(node, ast.Import):
            bound = [alias.asname or alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            bound = [alias.asname or alias.name for alias in node.names]
        else:
            continue
        if name in bound:
            yield node
        elif "*" in bound:
            stars.append(node)
    yield from stars


def members(owner: ast.ClassDef) -> dict[str, ast.AST]:
    """Returns what defines the attributes of a class: methods, and assignments in the class and to
    `self`."""
    defined = {}
    for node in statements(owner.body):
        if isinstance(node, DEFINITIONS) and not _is_overload(node):
            defined.setdefault(node.name, node)
        elif isinstance(node, ASSIGNMENTS):
            for name in _targets(node):
                defined.setdefault(name, node)
    for node in ast.walk(owner):
        if isinstance(node, ASSIGNMENTS):
            for name in _targets(node):
                if name.startswith("self."):
                    defined.setdefault(name.removeprefix("self."), node)
    return defined


def differ(first: ast.AST, second: ast.AST) -> bool:
    """Returns whether two functions differ in more than their docstrings."""
    return _without_docstring(first) != _without_docstring(second)


def _without_docstring(node: ast.AST) -> list[str]:
    body = node.body if ast.get_docstring(node) is None else node.body[1:]
    return [ast.dump(node.args), *(ast.dump(statement) for statement in body)]


def _targets(node: ast.AST) -> list[str]:
    """Returns what an assignment binds: `name`, and `self.name` for an attribute."""
    pending = list(node.targets) if isinstance(node, ast.Assign) else [node.target]
    names = []
    for target in pending:
        if isinstance(target, ast.Tuple):
            pending.extend(target.elts)
        elif isinstance(target, ast.Name):
            names.append(target.id)
        elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
            names.append(f"{target.value.id}.{target.attr}")
    return names


def _is_overload(node: ast.AST) -> bool:
    names = [ast.unparse(decorator) for decorator in node.decorator_list]
    return any(name.rpartition(".")[2] == "overload" for name in names)


def is_static(node: ast.AST) -> bool:
    return any(ast.unparse(decorator) == "staticmethod" for decorator in node.decorator_list)
