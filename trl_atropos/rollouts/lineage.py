"""How old a row is, also across resumes: versions count optimizer steps, and a resumed run counts some of them again.

A run that resumes from the checkpoint of version c abandons the versions above c that it had reached, and makes other
ones of the same numbers. So a version is a number on a *branch*, and the path of a run is the list of its branches,
each with the version from which it began. `AtroposSource` keeps the path in its state and in every file of the spool.
"""

import uuid
from dataclasses import dataclass

ABANDONED = "abandoned"  # branch of a version that this path has not reached yet, and nobody says which it was


@dataclass(frozen=True)
class Lineage:
    """`path` is `((branch, version that it began from), ...)`, oldest first."""

    path: tuple[tuple[str, int], ...]

    @classmethod
    def begin(cls, version: int) -> "Lineage":
        return cls(((uuid.uuid4().hex[:8], version),))

    def resume(self, version: int) -> "Lineage":
        """The path of a run that goes on from the checkpoint at `version` of this one."""
        return Lineage((*self.path, (uuid.uuid4().hex[:8], version)))

    def as_json(self) -> list[list]:
        return [list(branch) for branch in self.path]

    @classmethod
    def from_json(cls, path: list[list]) -> "Lineage":
        return cls(tuple((str(branch), int(version)) for branch, version in path))

    def seen(self, version: int, now: int) -> "Lineage":
        """
        The path of `version`, when it is heard of while this path is at `now`. A number that lies in the future was
        sampled by what the last resume abandoned.
        """
        if version <= now:
            return self
        return Lineage((*self.path[:-1], (ABANDONED, self.path[-1][1])))

    def distance(self, version: int, other: "Lineage", now: int) -> int:
        """Optimizer steps between `version` of this path and `now` of `other`, by way of what they have in common."""
        common = 0
        while common < min(len(self.path), len(other.path)) and self.path[common] == other.path[common]:
            common += 1
        parted = [began for _, began in (*self.path[common:], *other.path[common:])]
        shared = min([version, now, *parted])
        return (version - shared) + (now - shared)
