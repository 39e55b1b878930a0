"""Random episodes, as an environment has them: a list of paths, of which each goes on from an
earlier one.

`random_episode` makes one, `item_of` writes it with branches, `rows_of` as rows, and `trained_by`
says which tokens are trained, each in which context. A token counts once for each time that it
is trained.
"""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trl_atropos.rollouts.rollout import Rollout
from trl_atropos.rollouts.wire_values import MASKED

VOCABULARY = 6  # small, so that tokens are often equal by chance

Trained = Counter[tuple[tuple[int, ...], int, float]]


@dataclass(frozen=True)
class Path:
    """What a path adds to the first `at` tokens of path `of`. Each token has a log-probability of
    its own."""

    of: int
    at: int
    tokens: list[int]
    trained: list[bool]
    logprobs: list[float]


def random_episode(rng: random.Random, depth: int = 6, most: int = 6) -> list[Path]:
    """Paths that branch in prompts, within calls and behind them, or begin a context of their own.
    Some train nothing."""
    paths: list[Path] = []
    lengths: list[int] = []
    depths: list[int] = []
    for number in range(rng.randint(1, most + 1)):
        of, at = 0, 0
        parents = [i for i in range(number) if depths[i] < depth]
        if parents and rng.random() < 0.8:
            of = rng.choice(parents)
            at = rng.choice([rng.randint(0, lengths[of]), lengths[of]])
        stretches = [(False, 4), (True, 5), (False, 2), (True, 3), (False, 2)]
        trained: list[bool] = []
        for is_trained, longest in stretches:
            trained += [is_trained] * rng.randint(0, longest) * (rng.random() < 0.7)
        trained = trained or [rng.random() < 0.5]
        tokens = [rng.randrange(VOCABULARY) for _ in trained]
        logprobs = [-rng.randint(1, 4000) / 512 for _ in trained]
        paths.append(Path(of, at, tokens, trained, logprobs))
        lengths.append(at + len(tokens))
        depths.append(depths[of] + 1 if at else 1)
    return paths


def permuted(rng: random.Random, paths: Sequence[Path]) -> list[Path]:
    """The same episode with its branches in another order; the first path stays the first."""
    order = [0]
    left = list(range(1, len(paths)))
    while left:
        ready = [number for number in left if paths[number].of in order]
        number = rng.choice(ready)
        order.append(number)
        left.remove(number)
    places = {number: place for place, number in enumerate(order)}
    return [replace(paths[number], of=places[paths[number].of]) for number in order]


def masks_of(path: Path) -> list[int]:
    return [t if trained else MASKED for t, trained in zip(path.tokens, path.trained)]


def item_of(paths: Sequence[Path]) -> dict[str, Any]:
    """The fields of one rollout of a group."""
    items = []
    for path in paths:
        items.append(
            {
                "of": path.of,
                "at": path.at,
                "tokens": path.tokens,
                "masks": masks_of(path),
                "inference_logprobs": path.logprobs,
            }
        )
    first, *branches = items
    del first["of"], first["at"]
    return first | {"overrides": {"branches": branches}}


def group_of(items: Iterable[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """A group of such rollouts."""
    group: dict[str, Any] = {"scores": [], "env_id": 0}
    for number, item in enumerate(items):
        for name, value in item.items():
            group.setdefault(name, []).append(value)
        group["scores"].append(float(number))
    return group | fields


def whole(paths: Sequence[Path]) -> list[Path]:
    """Each path with the tokens that it shares, which it does not train."""
    complete: list[Path] = []
    for path in paths:
        shared = complete[path.of] if path.at else None
        before = path.at
        complete.append(
            Path(
                path.of,
                path.at,
                (shared.tokens[:before] if shared else []) + path.tokens,
                [False] * before + path.trained,
                (shared.logprobs[:before] if shared else []) + path.logprobs,
            )
        )
    return complete


def trained_by(paths: Sequence[Path]) -> Trained:
    """Context, token and log-probability of each trained token."""
    trained: Trained = Counter()
    for path in whole(paths):
        for place in range(1, len(path.tokens)):
            if path.trained[place]:
                context = tuple(path.tokens[:place])
                trained[context, path.tokens[place], path.logprobs[place]] += 1
    return trained


def trained_in(rollout: Rollout) -> Trained:
    """The same, of a rollout."""
    row = rollout.row.tolist()
    num_prompt = len(rollout.prompt_ids)
    paths = [np.arange(len(row))]
    shared = [0]
    if rollout.tree is not None:
        paths = rollout.tree.paths
        shared = rollout.tree.shared.tolist()
    trained: Trained = Counter()
    for path, num_shared in zip(paths, shared):
        tokens = [row[place] for place in path]
        for at in range(num_shared, len(path)):
            column = path[at] - num_prompt
            if column >= 0 and rollout.mask[column]:
                trained[tuple(tokens[:at]), tokens[at], float(rollout.logprobs[column])] += 1
    return trained
