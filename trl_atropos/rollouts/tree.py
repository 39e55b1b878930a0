"""Describes how the parts of a rollout that branches hang together.

An agent's episode need not be one growing sequence of tokens. A template may strip earlier
reasoning from the context, a subagent may begin a context of its own, and several calls may go on
from one context. What was sampled is then a tree. `intake.py` makes such a rollout of what an
environment sends, and `batches/packing.py` computes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

NO_PARENT = -1


@dataclass(frozen=True, eq=False)
class Tree:
    """
    Says which tokens of a rollout precede which. The tokens of its `n` parts stand one after the
    other in the rollout's row (prompt, then completion), each once. A part continues the *path* of
    its parent, which stands before it in the row. The path of a part is everything that the model
    sees when it samples the part's last token, and that token.

    For example, a call saw `a b` and sampled `c d`. Another one saw `a b x` and sampled `y`. A
    subagent saw `e` and sampled `f`:

        row        a b c d | x y | e f
        lengths    4         2     2
        parents   -1         0    -1        -1: a part that begins a context of its own
        shared     0         2     0        tokens of the parent's path that the part continues
        paths      0 1 2 3;  0 1 4 5;  6 7  places in the row

    A part leaves its parent behind one of the parent's own tokens: `shared[part]` is larger than
    `shared[parents[part]]`, and at most the length of the parent's path. A part without a parent
    shares nothing. Its first token has nothing before it, and is never trained.
    """

    lengths: np.ndarray  # (n,) int64, at least 1
    parents: np.ndarray  # (n,) int64, each below its own index
    shared: np.ndarray  # (n,) int64

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def begins(self) -> np.ndarray:
        """The place in the row of each part's first token, (n,)."""
        return self.lengths.cumsum() - self.lengths

    @cached_property
    def path_lengths(self) -> np.ndarray:
        """Tokens of each part's path, (n,)."""
        return self.shared + self.lengths

    @cached_property
    def paths(self) -> list[np.ndarray]:
        """The places in the row of each part's path, `n` arrays of `(path_lengths[part],)`."""
        paths: list[np.ndarray] = []
        for begin, length, parent, shared in zip(
            self.begins.tolist(),
            self.lengths.tolist(),
            self.parents.tolist(),
            self.shared.tolist(),
        ):
            own = np.arange(begin, begin + length)
            if parent != NO_PARENT:
                own = np.concatenate([paths[parent][:shared], own])
            paths.append(own)
        return paths

    @cached_property
    def continued(self) -> np.ndarray:
        """`(n,)` bool: another part continues the part behind its last token."""
        continued = np.zeros(len(self), dtype=bool)
        has_parent = self.parents != NO_PARENT
        parents = self.parents[has_parent]
        at_the_end = self.shared[has_parent] == self.path_lengths[parents]
        continued[parents[at_the_end]] = True
        return continued

    @property
    def whole_paths(self) -> list[np.ndarray]:
        """The paths of the parts that no other part continues: each token of the row is on one of
        them, and no path is the beginning of another."""
        paths = []
        for path, continued in zip(self.paths, self.continued.tolist()):
            if not continued:
                paths.append(path)
        return paths

    @property
    def roots(self) -> np.ndarray:
        """The places in the row at which a context begins."""
        return self.begins[self.parents == NO_PARENT]

    def origin(self, part: int) -> str:
        """Returns where a part comes from, for people: `2: leaves 0 after 14 tokens`."""
        parent = int(self.parents[part])
        if parent == NO_PARENT:
            return f"{part}: a new context"
        return f"{part}: leaves {parent} after {self.shared[part]} tokens"

    def renumbered(self, order: Sequence[int]) -> "Tree":
        """Returns the tree with its parts in another order, in which parents stay before their
        children."""
        order_array = np.asarray(order)
        numbers = np.empty_like(order_array)
        numbers[order_array] = np.arange(len(order_array))
        parents = self.parents[order_array]
        new_parents = np.where(parents == NO_PARENT, NO_PARENT, numbers[parents])
        return Tree(self.lengths[order_array], new_parents, self.shared[order_array])


def make_tree(lengths: Sequence[int], parents: Sequence[int], shared: Sequence[int]) -> Tree | None:
    """Returns the tree of parts with these lengths, or None for a single part, which is no tree.

    A part that shares no more than its parent does leaves one of the parent's own ancestors. It
    becomes a child of that: if part 1 shares 3 tokens with part 0, then a part that shares 2 tokens
    with part 1 shares them with part 0.
    """
    if len(lengths) == 1:
        return None
    nearest: list[int] = []
    for parent, number in zip(parents, shared, strict=True):
        if number == 0:
            parent = NO_PARENT
        while parent != NO_PARENT and number <= shared[parent]:
            parent = nearest[parent]
        nearest.append(parent)
    return Tree(
        lengths=np.array(lengths, np.int64),
        parents=np.array(nearest, np.int64),
        shared=np.array(shared, np.int64),
    )
