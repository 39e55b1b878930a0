"""Rows of the lists of names that libraries do not promise to keep (`tests/server/vllm_seam.py`,
`tests/trainer/trl_seam.py`). The lists import no library."""

import importlib
import inspect
import re
from dataclasses import dataclass

from packaging.version import Version


class Row:
    """A row holds from one version of its library on, and until another one. `used_in` names the
    files of the package that need what it lists."""

    place: str
    used_in: tuple[str, ...]
    since: str
    until: str

    @property
    def library(self) -> str:
        return self.place.partition(":")[0].partition(".")[0]

    def holds_in(self, version: Version) -> bool:
        base = Version(version.base_version)
        if self.since and base < Version(self.since):
            return False
        return not self.until or base < Version(self.until)


@dataclass(frozen=True)
class Names(Row):
    """
    Names of one class or module.

    Attributes:
        place: `module:Class`, or `module:`.
        names: attributes, and functions with the arguments that are given to them: for instance
            `wake_up(tags)`, or `wake_up()` if none are.
        since, until: the first version that has the names, and the first that lacks them.
        exact: a function of ours takes the place of theirs, or is called by them. It breaks if they
            pass one more argument.
        needs_cuda: only vLLM's build for CUDA can import the module.
    """

    place: str
    names: tuple[str, ...]
    used_in: tuple[str, ...]
    since: str = ""
    until: str = ""
    exact: bool = False
    needs_cuda: bool = False


@dataclass(frozen=True)
class Lines(Row):
    """
    Lines of one function, class or module.

    Attributes:
        place: `module:Class.function`.
        reason: what relies on the lines.
        in_order: whether their order matters.
        times: how often each of them stands there, if that matters.
        absent: texts that must not stand there.
    """

    place: str
    lines: tuple[str, ...]
    reason: str
    used_in: tuple[str, ...]
    since: str = ""
    until: str = ""
    in_order: bool = True
    times: int | None = None
    absent: tuple[str, ...] = ()


def split(name: str) -> tuple[str, list[str]]:
    """Returns the attribute and the arguments of `attribute(first, second)`."""
    attribute, _, arguments = name.rstrip(")").partition("(")
    return attribute, arguments.split(", ") if arguments else []


# -------------------------------------------------------------------------- in the installed version


def what_moved(place: str, name: str) -> str | None:
    """Imports what a row of `Names` names. Returns what the installed library lacks of it, or
    `None`."""
    module, _, owner = place.partition(":")
    try:
        value = importlib.import_module(module)
    except ImportError as error:
        return f"there is no module {module} ({error})"
    for part in filter(None, owner.split(".")):
        if not hasattr(value, part):
            return f"{module} has no {part}"
        value = getattr(value, part)
    attribute, arguments = split(name)
    if not _has(value, attribute):
        return f"{place} has no {attribute}"
    if arguments:
        parameters = inspect.signature(getattr(value, attribute)).parameters
        missing = set(arguments) - parameters.keys()
        if missing:
            return f"{place}.{attribute} takes no {', '.join(sorted(missing))}"
    return None


def _has(owner, name: str) -> bool:
    """Returns whether a class or module has an attribute, if only because a method of the class
    sets it, or because the class lists its name."""
    if hasattr(owner, name) or not inspect.isclass(owner):
        return hasattr(owner, name)
    sets = re.compile(rf"self\.{name}\b[^=\n]*=|\"{name}\"")
    for parent in owner.__mro__:
        if name in getattr(parent, "__annotations__", {}):
            return True
        if sets.search(_source_of(parent)):
            return True
    return False


def _source_of(owner: type) -> str:
    try:
        return inspect.getsource(owner)
    except (OSError, TypeError):  # written in C
        return ""
