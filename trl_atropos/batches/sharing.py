"""Finds what the rollouts of a micro-batch have in common, so that it is computed once.

The model computes *paths*: sequences of tokens, each of which sees all tokens before it. A rollout
is one path, or several if its episode branches (`rollouts/tree.py`). Paths that begin with the same
tokens may share these, whichever rollouts they are of: a group's prompt, the system prompt of
several groups, or what two branches of an episode have in common.

Only the tokens matter here. Which of them are trained, and how often each counts in the loss, is
the rollouts' own affair.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from trl_atropos.rollouts.rollout import Rollout
from trl_atropos.rollouts.tree import Tree

# A micro-batch shares tokens if that saves at least this share of them.
WORTH_SHARING = 1 / 8
# Computing a token takes as long as copying the keys and values of so many tokens. (A layer of
# Qwen3-0.6B takes 94 million operations for a token, and moves 20 KiB for a copied key.)
KEYS_PER_TOKEN = 40


class RolloutTokens(NamedTuple):
    """Describes one rollout to the model."""

    prompt_length: int
    length: int  # of prompt and completion
    ids: np.ndarray | None = None  # (length,); None = unknown, so that nothing is shared
    tree: Tree | None = None

    @classmethod
    def of(cls, rollout: Rollout, is_empty: bool = False) -> "RolloutTokens":
        """Returns the tokens of a rollout, or of its prompt alone (`is_empty`)."""
        prompt_length = len(rollout.prompt_ids)
        if is_empty:
            return cls(prompt_length, prompt_length, rollout.prompt_ids)
        row = rollout.row
        return cls(prompt_length, len(row), row, rollout.tree)

    def paths(self, number: int) -> list["Path"]:
        """Returns the paths of the rollout, which is the `number`-th of a micro-batch. Together
        they score each token of the completion once, but for the first token of a context."""
        if self.tree is None:
            places = np.arange(self.length)
            return [Path(number, places, np.arange(self.prompt_length, self.length), self.ids)]
        is_left = np.arange(self.length) >= self.prompt_length
        is_left[self.tree.roots] = False
        paths = []
        for places in self.tree.whole_paths:
            scored = np.flatnonzero(is_left[places])
            is_left[places] = False
            paths.append(Path(number, places, scored, self.ids[places]))
        return paths


@dataclass(frozen=True, slots=True, eq=False)
class Path:
    """A sequence of `n` tokens of one rollout."""

    rollout: int  # its number in the micro-batch
    places: np.ndarray  # (n,), in the rollout's row: its prompt, then its completion
    scored: np.ndarray  # (s,), the tokens on the path whose scores are wanted
    ids: np.ndarray | None  # (n,)

    def __len__(self) -> int:
        return len(self.places)


class Sharing(NamedTuple):
    """
    Lists the tokens that each of `n` paths has from another.

    The paths `c d b`, `a` and `c d e f`:

        order       1  0  2      in the alphabet of token ids
        previous   -1 -1  0      by path
        lengths     0  0  1      `c`; each path computes its own `d`

    Where two paths part, the token before stands in both of them. So in a row that has what each
    path computes, every token stands right before the one that it predicts.
    """

    order: np.ndarray  # (n,), such that each path stands behind the one that it shares with
    previous: np.ndarray  # (n,), the path that it shares with; -1 = none
    lengths: np.ndarray  # (n,), tokens that it shares, from its first

    @classmethod
    def nothing(cls, count: int) -> "Sharing":
        """Returns that none of `count` paths shares anything."""
        order = np.arange(count)
        return cls(order, np.full(count, -1), np.zeros(count, dtype=np.int64))


def share(paths: Sequence[np.ndarray]) -> Sharing:
    """
    Returns what paths of these token ids share: nothing if that saves less than an eighth of all
    tokens (`WORTH_SHARING`).

    A path that shares tokens has the keys and values of all its tokens copied, those that it
    computes itself, too. It shares only if that costs less than computing what it shares
    (`KEYS_PER_TOKEN`).
    """
    sharing = share_all(paths)
    saved = sharing.lengths.sum()
    total = sum(len(path) for path in paths)
    if not saved or not is_worth_sharing(saved, total):
        return Sharing.nothing(len(paths))
    return sharing


def is_worth_sharing(saved: int | np.ndarray, total: int | np.ndarray) -> bool | np.ndarray:
    """Returns whether sharing that saves so many of all tokens of a micro-batch pays."""
    return saved >= WORTH_SHARING * total


def share_all(paths: Sequence[np.ndarray]) -> Sharing:
    """Returns what paths of these token ids share, however little it saves in all."""
    order = alphabetical(paths)
    previous = np.full(len(paths), -1)
    lengths = np.zeros(len(paths), dtype=np.int64)
    for before, path in pairwise(order):
        # In this order, no other path before has more in common with it.
        length = _shared_length(paths[before], paths[path])
        if length * KEYS_PER_TOKEN > len(paths[path]):
            previous[path] = before
            lengths[path] = length
    return Sharing(np.array(order, dtype=np.int64), previous, lengths)


def alphabetical(paths: Sequence[np.ndarray]) -> list[int]:
    """Returns the numbers of the paths in the alphabetical order of their token ids, in which those
    that begin alike are neighbours."""
    keys = [path.astype(">u4").tobytes() for path in paths]
    return sorted(range(len(paths)), key=keys.__getitem__)


def _shared_length(before: np.ndarray, path: np.ndarray) -> int:
    """Returns how many tokens a path need not compute behind another: all that they have in common
    but the last, or all of the path if the other has all of it."""
    length = min(len(before), len(path))
    differs = before[:length] != path[:length]
    common = int(differs.argmax()) if differs.any() else length
    if common == len(path):
        return common
    return max(0, common - 1)


class BatchTokens:
    """
    Counts the tokens that rollouts take in a micro-batch, for its planning.

    Args:
        rollouts: of the generation batch.
        shares: paths share what they have in common.
    """

    def __init__(self, rollouts: Sequence[Rollout], shares: bool):
        self._shares = shares
        self._paths = []  # the token ids of each rollout's paths
        for rollout in rollouts:
            paths = RolloutTokens.of(rollout).paths(0)
            self._paths.append([path.ids for path in paths])
        # by rollout; of the same group, the same number
        self.groups = np.array([rollout.group for rollout in rollouts])
        self.lengths = np.array([self._count(paths) for paths in self._paths])

    @cached_property
    def places(self) -> np.ndarray:
        """The place of each rollout in an order in which those that begin alike are neighbours."""
        order = alphabetical([paths[0] for paths in self._paths])
        places = np.empty(len(order), dtype=np.int64)
        places[order] = np.arange(len(order))
        return places

    def added_by(self, rollout: int, before: int) -> int:
        """Returns how many tokens a rollout adds to a micro-batch that has the rollout `before`."""
        before_paths = self._paths[before]
        both = self._count(before_paths + self._paths[rollout])
        return both - int(self.lengths[before])

    def _count(self, paths: list[np.ndarray]) -> int:
        """Returns how many tokens paths of these ids take together."""
        total = sum(len(path) for path in paths)
        if not self._shares:
            return total
        return total - int(share_all(paths).lengths.sum())
