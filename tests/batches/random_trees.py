"""Episodes that branch, drawn at random, and their scores by the model's own forward pass of each
path alone."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tests.rollout_factory import make_rollout
from trl_atropos.rollouts.rollout import Rollout
from trl_atropos.rollouts.tree import NO_PARENT, make_tree

VOCABULARY = 250


def tokens(rng: random.Random, most: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(rng.randint(0, most))]


def random_episode(
    rng: random.Random,
    *,
    begin: Sequence[int] = (1,),
    parts: int = 6,
    depth: int = 6,
    end: int | None = None,
    **fields: Any,
) -> Rollout:
    """
    An episode of up to `parts` further calls.

    Args:
        begin: of its prompt.
        depth: most calls that go on from one another.
        end: token with which half of the calls end.
        fields: of the rollout.
    """
    prompt = [*begin, *tokens(rng, 5)]
    first = _sampled(rng, end) or [2]
    row, mask = [*prompt, *first], [False] * len(prompt) + [True] * len(first)
    lengths, parents, shared, depths = [len(row)], [NO_PARENT], [0], [1]
    path_lengths = [len(row)]
    for _ in range(rng.randint(0, parts)):
        parent = rng.choice([part for part, deep in enumerate(depths) if deep < depth])
        whole = path_lengths[parent]
        at = rng.choice([0, rng.randint(1, len(prompt)), rng.randint(0, whole), whole])
        context = tokens(rng, 4) or [1] * (at == 0)  # a context of its own begins with a token
        sampled = _sampled(rng, end)
        tail = tokens(rng, 2) * rng.randint(0, 1)  # a tool's answer that nobody goes on from
        own = [*context, *sampled, *tail]
        if not own:
            continue
        row += own
        mask += [False] * len(context) + [True] * len(sampled) + [False] * len(tail)
        lengths.append(len(own))
        parents.append(parent)
        shared.append(at)
        depths.append(depths[parent] + 1 if at else 1)
        path_lengths.append(at + len(own))
    return _rollout(row, mask, len(prompt), lengths, parents, shared, fields)


def chain(turns: int, visible: int, stripped: int, seed: int = 0, **fields: Any) -> Rollout:
    """An agent whose template strips what it thought: each turn goes on from what was visible."""
    rng = np.random.default_rng(seed)
    row: list[int] = []
    mask: list[bool] = []
    lengths, parents, shared = [], [], []
    for turn in range(turns):
        own = visible + stripped + visible
        row += rng.integers(0, VOCABULARY, own).tolist()
        mask += [False] * visible + [True] * (own - visible)
        lengths.append(own)
        parents.append(turn - 1)
        # of the turn before: what it saw, and then its own visible tokens
        shared.append(visible * turn)
    return _rollout(row, mask, visible, lengths, parents, shared, fields)


def _sampled(rng: random.Random, end: int | None) -> list[int]:
    sampled = tokens(rng, 8)
    if end is not None and sampled and rng.random() < 0.5:
        sampled.append(end)
    return sampled


def _rollout(row, mask, prompt_length, lengths, parents, shared, fields) -> Rollout:
    ids = np.array(row, np.int32)
    trained = np.array(mask[prompt_length:])
    return make_rollout(
        ids[:prompt_length],
        ids[prompt_length:],
        mask=trained,
        logprobs=np.where(trained, -1.0, np.nan).astype(np.float32),
        tree=make_tree(lengths, parents, shared),
        **fields,
    )


def paths_of(rollout: Rollout) -> list[np.ndarray]:
    """The path of each part, followed from part to part (places in the row)."""
    if rollout.tree is None:
        return [np.arange(len(rollout.row))]
    tree = rollout.tree
    ends = tree.lengths.cumsum()
    paths: list[list[int]] = []
    for part, end in enumerate(ends):
        path = list(range(end - tree.lengths[part], end))
        if tree.parents[part] != NO_PARENT:
            path = paths[tree.parents[part]][: tree.shared[part]] + path
        paths.append(path)
    return [np.array(path) for path in paths]


def own_places(rollout: Rollout, part: int) -> np.ndarray:
    """Places in the row of the tokens that a part trains."""
    trained = np.concatenate([np.zeros(len(rollout.prompt_ids), bool), rollout.mask])
    length = len(rollout.row) if rollout.tree is None else rollout.tree.lengths[part]
    path = paths_of(rollout)[part]
    own = path[len(path) - length :]
    return own[trained[own]]


def padded(rollouts: Sequence[Rollout]) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Ids and mask as TRL pads them, (B, P + C), and P and C."""
    prompt_width = max(len(rollout.prompt_ids) for rollout in rollouts)
    width = max(len(rollout.completion_ids) for rollout in rollouts)
    ids = torch.zeros(len(rollouts), prompt_width + width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for number, rollout in enumerate(rollouts):
        begin = prompt_width - len(rollout.prompt_ids)
        place = slice(begin, begin + len(rollout.row))
        ids[number, place] = torch.from_numpy(rollout.row.astype(np.int64))
        mask[number, place] = 1
    return ids, mask, prompt_width, width


def logprobs_alone(
    model: Any, rollouts: Sequence[Rollout], width: int, with_entropies: bool = False
) -> Any:
    """Log-probabilities of the trained tokens, (B, C), by the model's own forward pass of the path
    of each part alone; 0 for all others. With their entropies if these are asked for."""
    shape = (len(rollouts), width)
    values, entropies = torch.zeros(shape), torch.zeros(shape)
    for number, rollout in enumerate(rollouts):
        for part, path in enumerate(paths_of(rollout)):
            own = own_places(rollout, part)
            if not len(own):
                continue
            ids = torch.from_numpy(rollout.row[path].astype(np.int64))
            logits = model(input_ids=ids[None]).logits[0, :-1].float()
            logprobs = logits.log_softmax(-1)
            of_path = logprobs.gather(1, ids[1:, None])[:, 0]
            entropy = -(logprobs.exp() * logprobs).sum(-1)
            predicts = np.searchsorted(path, own) - 1
            columns = torch.from_numpy(own - len(rollout.prompt_ids))
            place = (torch.full_like(columns, number), columns)
            values = values.index_put(place, of_path[predicts])
            entropies = entropies.index_put(place, entropy[predicts])
    if with_entropies:
        return values, entropies
    return values
