"""Compares what the package uses of a library with what a release of it defines.

The package's uses are the rows of the two lists, and what `tests/house/uses.py` finds by itself:
imports, calls of imported functions and classes, and overridden methods.
"""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from packaging.version import Version

from tests.house.definitions import (
    FUNCTIONS,
    Definition,
    Libraries,
    OutsideError,
    differ,
    is_static,
)
from tests.house.releases import MissingError, UnreadableError, UnresolvedError
from tests.house.seam import Lines, Names, Row, split
from tests.house.uses import Override, Use, uses_and_overrides

FAILURES = ("gone", "moved", "breaks", "unreadable")


@dataclass(frozen=True)
class Finding:
    """
    The result for one name.

    Attributes:
        differs: from the code in the installed version.
        status: `there`; `changed` (another signature, which breaks no call of ours); `not yet` or
            `no longer` (another row holds in this version); or one of `FAILURES`.
    """

    status: str
    name: str
    text: str = ""
    used_in: tuple[str, ...] = ()
    differs: bool = False

    @property
    def fails(self) -> bool:
        return self.status in FAILURES


@dataclass(frozen=True)
class Signature:
    """The parameters of a function, without `self` or `cls`."""

    names: tuple[str, ...]
    required: tuple[str, ...]
    positional: int  # how many can be given without their names
    takes_any_positional: bool
    takes_any_keyword: bool

    def __str__(self) -> str:
        parts = []
        for name in self.names:
            parts.append(name if name in self.required else f"{name}=")
        if self.takes_any_positional:
            parts.append("*")
        if self.takes_any_keyword:
            parts.append("**")
        return f"({', '.join(parts)})"


def signature_of(definition: Definition, in_class: bool) -> Signature | None:
    """Returns the signature of a function or method, and `None` for anything else."""
    node = definition.node
    if not isinstance(node, FUNCTIONS):
        return None
    arguments = node.args
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    required = positional[: len(positional) - len(arguments.defaults)]
    if in_class and not is_static(node):
        positional = positional[1:]
        required = required[1:]
    names = list(positional)
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        names.append(argument.arg)
        if default is None:
            required.append(argument.arg)
    return Signature(
        tuple(names),
        tuple(required),
        len(positional),
        arguments.vararg is not None,
        arguments.kwarg is not None,
    )


def examine(
    library: str, rows: Iterable[Row], libraries: Libraries, base: Libraries | None = None
) -> list[Finding]:
    """Looks up all that the package uses of one of the libraries. `base` are the libraries whose
    signatures it was written for. Failures come first."""
    version = libraries.releases[library].version
    lookup = Lookup(libraries, base)
    findings = []
    elsewhere = set()
    for row in rows:
        if row.library != library:
            continue
        if not row.holds_in(version):
            findings.extend(other_version(row, version))
            elsewhere.update(names_in(row))
            continue
        if isinstance(row, Lines):
            findings.append(lookup.lines(row))
        else:
            findings.extend(lookup.names(row))
    uses, overrides = uses_and_overrides()
    findings.extend(lookup.uses(library, uses, elsewhere))
    findings.extend(lookup.overrides(library, overrides))
    findings.sort(key=order)
    return findings


def order(finding: Finding) -> tuple[bool, str]:
    return not finding.fails, finding.status


def other_version(row: Row, version: Version) -> Iterator[Finding]:
    """Yields the names of a row that does not hold in this version."""
    status = "no longer"
    text = f"until {row.until}"
    if row.since and version < Version(row.since):
        status = "not yet"
        text = f"from {row.since} on"
    for name in names_in(row):
        yield Finding(status, name, text, row.used_in)


def names_in(row: Row) -> list[str]:
    """Returns `module:Class.attribute` for each name of a row."""
    if isinstance(row, Lines):
        return [f"{row.place} {row.lines[0].strip()}"]
    return [joined(row.place, split(name)[0]) for name in row.names]


def joined(place: str, attribute: str) -> str:
    return place + attribute if place.endswith(":") else f"{place}.{attribute}"


class Lookup:
    """Looks up names and lines in `libraries`."""

    def __init__(self, libraries: Libraries, base: Libraries | None):
        self.libraries = libraries
        self.base = base

    def names(self, row: Names) -> Iterator[Finding]:
        for name in row.names:
            yield self._name(row, *split(name))

    def _name(self, row: Names, attribute: str, arguments: list[str]) -> Finding:
        module, _, owner = row.place.partition(":")
        name = joined(row.place, attribute)
        qualified = f"{owner}.{attribute}" if owner else attribute
        try:
            definition = self.libraries.find(module, qualified)
        except UnresolvedError as error:
            return self._not_found(name, module, qualified, error, row.used_in)
        signature = signature_of(definition, bool(owner))
        if signature is None:
            return Finding("there", name, "", row.used_in)
        trouble = argument_trouble(signature, arguments, row.exact)
        if trouble is not None:
            return Finding("breaks", name, trouble, row.used_in)
        old = None
        if self.base is not None:
            old = self.base.find_or_none(module, qualified)
        if old is None or not isinstance(old.node, FUNCTIONS):
            return Finding("there", name, "", row.used_in)
        changed = differ(old.node, definition.node)
        old_signature = signature_of(old, bool(owner))
        if old_signature == signature:
            return Finding("there", name, "", row.used_in, changed)
        new = [part for part in signature.required if part not in old_signature.names]
        status = "breaks" if new and arguments else "changed"
        text = difference(old_signature, signature)
        return Finding(status, name, text, row.used_in, changed)

    def _not_found(self, name: str, module: str, qualified: str, error, used_in) -> Finding:
        if isinstance(error, UnreadableError):
            return Finding("unreadable", name, str(error), used_in)
        if isinstance(error, OutsideError):
            return Finding("there", name, f"defined outside, in {error}", used_in)
        missing = qualified
        for part in qualified.split("."):
            if self.libraries.find_or_none(module, part) is None:
                missing = part  # the class itself, perhaps
                break
        wanted = missing.rpartition(".")[2]
        places = []
        for place in self.libraries.release_of(module).places_of(wanted):
            if place != module:
                places.append(f"{place}:{wanted}")
        if not places:
            return Finding("gone", name, str(error), used_in)
        text = f"{error}; perhaps now {', '.join(places[:3])}"
        return Finding("moved", name, text, used_in)

    # ------------------------------------------------------------------------------- lines of source

    def lines(self, row: Lines) -> Finding:
        name = f"{row.place} {row.lines[0].strip()}"
        module, _, owner = row.place.partition(":")
        try:
            text = self.libraries.text(module, owner)
        except UnresolvedError as error:
            return self._lines_elsewhere(row, name, str(error), row.lines[0])
        position = 0
        for line in row.lines:
            position = text.find(line, position if row.in_order else 0)
            if position < 0:
                trouble = "in another place" if line in text else "no more"
                return self._lines_elsewhere(row, name, f"has {line.strip()!r} {trouble}", line)
            if row.times is not None and text.count(line) != row.times:
                trouble = f"has {line!r} {text.count(line)} times, not {row.times}: {row.reason}"
                return Finding("breaks", name, trouble, row.used_in)
        for line in row.absent:
            if line in text:
                trouble = f"has {line!r} now, but {row.reason}"
                return Finding("breaks", name, trouble, row.used_in)
        return Finding("there", name, "", row.used_in)

    def _lines_elsewhere(self, row: Lines, name: str, trouble: str, line: str) -> Finding:
        own = row.place.partition(":")[0]
        places = []
        for module, read in self.libraries.releases[row.library].readers.items():
            if module != own and line.encode() in read():
                places.append(module)
        text = f"{trouble} ({row.reason})"
        if not places:
            return Finding("gone", name, text, row.used_in)
        return Finding("moved", name, f"{text}; stands in {', '.join(places[:3])}", row.used_in)

    # ------------------------------------------------------------------- what the package's code says

    def uses(self, library: str, uses: list[Use], elsewhere: set[str]) -> Iterator[Finding]:
        """Looks up imports, attributes and calls. Names of rows that hold in other versions may be
        missing, and what is imported in a `try` that goes on without it."""
        for use in uses:
            name = f"{use.module}:{use.name}"
            if use.module.partition(".")[0] != library or use.optional:
                continue
            parts = name.split(".")
            above = {".".join(parts[: length + 1]) for length in range(len(parts))}
            if above & elsewhere:
                continue
            finding = self._use(use, name)
            if finding is not None:
                yield finding

    def _use(self, use: Use, name: str) -> Finding | None:
        owner = use.name.rpartition(".")[0]
        try:
            definition = self.libraries.find(use.module, use.name)
        except UnresolvedError as error:
            is_missing = isinstance(error, MissingError)
            if is_missing and owner and self._may_inherit(use.module, owner):
                return None
            return self._not_found(name, use.module, use.name, error, (use.file,))
        if use.keywords is None:
            return Finding("there", name, "", (use.file,))
        signature, is_method = self._called(definition, bool(owner))
        if signature is None:
            return Finding("there", name, "", (use.file,))
        trouble = call_trouble(signature, use, is_method)
        if trouble is not None:
            return Finding("breaks", f"{name}()", trouble, (use.file,))
        return Finding("there", f"{name}()", "", (use.file,))

    def _may_inherit(self, module: str, owner: str) -> bool:
        """Returns whether a class may have an attribute from a base whose source is not there."""
        definition = self.libraries.find_or_none(module, owner)
        if definition is None or not isinstance(definition.node, ast.ClassDef):
            return False
        return self.libraries.has_other_bases(definition)

    def _called(self, definition: Definition, in_class: bool) -> tuple[Signature | None, bool]:
        """Returns what a call gives its arguments to, and whether that is a method called on its
        class, whose `self` may be given."""
        if not isinstance(definition.node, ast.ClassDef):
            return signature_of(definition, in_class), in_class
        try:
            constructor = self.libraries.attribute(definition, "__init__")
        except MissingError:
            fields = self.libraries.fields(definition)
            if not fields:
                return None, False
            return Signature(fields, (), len(fields), False, False), False
        return signature_of(constructor, True), False

    def overrides(self, library: str, overrides: list[Override]) -> Iterator[Finding]:
        """Looks up the methods that classes of ours override."""
        for override in overrides:
            if override.module.partition(".")[0] != library:
                continue
            qualified = f"{override.base}.{override.method}"
            definition = self.libraries.find_or_none(override.module, qualified)
            if definition is None or not isinstance(definition.node, FUNCTIONS):
                continue  # a method of ours; a class that is missing is found by its import
            signature = signature_of(definition, True)
            name = f"{override.module}:{qualified} (overridden)"
            trouble = override_trouble(signature, override)
            if trouble is not None:
                yield Finding("breaks", name, trouble, (override.file,))
            else:
                yield Finding("there", name, "", (override.file,))


def argument_trouble(signature: Signature, arguments: list[str], exact: bool) -> str | None:
    """Returns what of a row's arguments a function does not take, or `None`."""
    missing = [name for name in arguments if name not in signature.names]
    if missing and not signature.takes_any_keyword:
        return f"takes no {', '.join(missing)}: {signature}"
    if exact and list(signature.names) != arguments:
        return f"takes {signature}, and what stands in its place ({', '.join(arguments)})"
    return None


def difference(old: Signature, new: Signature) -> str:
    """Returns how a signature changed: whole, unless it is long."""
    if len(old.names) <= 6:
        return f"{old} is now {new}"
    gained = [name for name in new.names if name not in old.names]
    lost = [name for name in old.names if name not in new.names]
    if not gained and not lost:
        return "its parameters have another order, other defaults, or other `*` and `**`"
    parts = []
    if gained:
        parts.append(f"takes {', '.join(gained)} too")
    if lost:
        parts.append(f"no longer takes {', '.join(lost)}")
    return " and ".join(parts)


def call_trouble(signature: Signature, use: Use, is_method: bool) -> str | None:
    """Returns why a call of ours would raise `TypeError`, or `None`."""
    unknown = [name for name in use.keywords if name not in signature.names]
    if unknown and not signature.takes_any_keyword:
        return f"takes no {', '.join(unknown)}: {signature}"
    if use.positional is None:
        return None
    most = signature.positional + is_method
    if use.positional > most and not signature.takes_any_positional:
        return f"takes at most {most} arguments without names: {signature}"
    given = {*signature.names[: use.positional], *use.keywords}
    missing = [name for name in signature.required if name not in given]
    if missing:
        return f"needs {', '.join(missing)} too: {signature}"
    return None


def override_trouble(signature: Signature, override: Override) -> str | None:
    """Returns why calls of a library's method would not fit ours, or `None`."""
    ours = override.named[1:]
    missing = [name for name in signature.required if name not in ours]
    extra = [name for name in signature.names if name not in ours]
    if (missing or extra) and not override.takes_more:
        return f"takes {signature}, and ours ({', '.join(ours)})"
    common = [name for name in ours if name in signature.names]
    if common != [name for name in signature.names if name in ours]:
        return f"takes {signature} in another order than ours ({', '.join(ours)})"
    return None
