"""Reads from the package's own source which names of libraries it imports, reads, calls and
overrides, so that `tests/house/seams.py` can look them up in a release."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests import ROOT

LIBRARIES = ("vllm", "trl", "transformers", "peft", "accelerate", "uvicorn")
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Use:
    """
    One name of a library that the package uses.

    Attributes:
        module: that it is imported from.
        name: qualified, such as `BlockPool.reset_prefix_cache`. Empty for the module itself.
        file: of ours, from the repository's root.
        optional: the import stands in a `try` that goes on without the name.
        keywords: the named arguments of a call, and `None` if it is not called.
        positional: number of the call's other arguments. `None` if that is only known at run time.
    """

    module: str
    name: str
    file: str
    optional: bool = False
    keywords: tuple[str, ...] | None = None
    positional: int | None = None


@dataclass(frozen=True)
class Override:
    """A method of one of our classes, and the library's class that it may override one of."""

    module: str
    base: str
    method: str
    file: str
    named: tuple[str, ...]  # parameters
    takes_more: bool  # `*args` or `**kwargs`


def files() -> Iterator[Path]:
    """Yields the files of the package and of the benchmarks."""
    for folder in ("trl_atropos", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "recipes" not in path.relative_to(ROOT).parts:  # they import nothing of ours
                yield path


@cache
def trees() -> dict[str, ast.Module]:
    """Returns the syntax trees of `files()`, by their paths from the repository's root."""
    trees = {}
    for path in files():
        name = path.relative_to(ROOT).as_posix()
        trees[name] = ast.parse(path.read_bytes())
    return trees


@cache
def uses_and_overrides() -> tuple[list[Use], list[Override]]:
    """Returns every use of a library's name in `files()`, each once, and every override."""
    uses = {}
    overrides = []
    for file, tree in trees().items():
        reader = _Reader(file)
        reader.read(tree)
        uses.update(dict.fromkeys(reader.uses))
        overrides.extend(reader.overrides)
    return list(uses), overrides


class _Reader(ast.NodeVisitor):
    """Collects the uses of one file."""

    def __init__(self, file: str):
        self.file = file
        self.uses: list[Use] = []
        self.overrides: list[Override] = []
        self.bound: dict[str, tuple[str, str]] = {}  # our name -> module and name

    def read(self, tree: ast.Module) -> None:
        optional = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Try) and _goes_on(node):
                optional.update(ast.walk(node))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom | ast.Import):
                self._bind(node, node in optional)
        self.visit(tree)

    def _bind(self, node: ast.Import | ast.ImportFrom, optional: bool) -> None:
        for alias in node.names:
            module = alias.name
            name = ""
            if isinstance(node, ast.ImportFrom):
                module = node.module or ""
                name = alias.name
            if module.partition(".")[0] not in LIBRARIES:
                continue
            self.uses.append(Use(module, name, self.file, optional))
            if not optional:
                self.bound[alias.asname or alias.name] = (module, name)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        place = self._place(node)
        if place is None:
            self.generic_visit(node)
        else:
            self.uses.append(Use(*place, self.file))

    def visit_Call(self, node: ast.Call) -> None:
        place = self._place(node.func)
        if place is None:
            self.generic_visit(node)
            return
        keywords = tuple(argument.arg for argument in node.keywords if argument.arg)
        unpacked = any(isinstance(argument, ast.Starred) for argument in node.args)
        unpacked = unpacked or len(keywords) < len(node.keywords)
        positional = None if unpacked else len(node.args)
        self.uses.append(Use(*place, self.file, False, keywords, positional))
        for argument in (*node.args, *node.keywords):
            self.visit(argument)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for base in node.bases:
            place = self._place(base)
            if place is None:
                continue
            for method in node.body:
                if isinstance(method, FUNCTIONS) and method.name != "__init__":
                    self.overrides.append(self._override(*place, method))
        self.generic_visit(node)

    def _override(self, module: str, base: str, method: ast.AST) -> Override:
        arguments = method.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        named = tuple(argument.arg for argument in every)
        takes_more = arguments.vararg is not None or arguments.kwarg is not None
        return Override(module, base, method.name, self.file, named, takes_more)

    def _place(self, node: ast.AST) -> tuple[str, str] | None:
        """Returns module and name of an expression such as `transformers.Trainer.train`."""
        parts = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return None
        # `import transformers.utils` binds a dotted name
        names = [node.id, *parts]
        for length in range(len(names), 0, -1):
            bound = self.bound.get(".".join(names[:length]))
            if bound is None:
                continue
            rest = []
            for part in names[length:]:
                if part.startswith("__"):
                    break
                rest.append(part)
            module, name = bound
            return module, ".".join(filter(None, [name, *rest]))
        return None


def _goes_on(node: ast.Try) -> bool:
    """Returns whether a failed import is no error: no handler of it ends with `raise`."""
    for handler in node.handlers:
        if handler.type is not None and "ImportError" in ast.unparse(handler.type):
            return not isinstance(handler.body[-1], ast.Raise)
    return False
