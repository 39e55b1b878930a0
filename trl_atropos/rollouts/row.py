"""From the paths of a scored rollout to its row, which TRL trains on: each token once.

`intake.py` calls `make_rollout`. `tree.py` describes the parts of a row.
"""

import numpy as np

from trl_atropos.rollouts.episodes import concatenated, cut_out
from trl_atropos.rollouts.rollout import Rollout
from trl_atropos.rollouts.tree import NO_PARENT, Tree, make_tree
from trl_atropos.rollouts.wire import ScoredGroup
from trl_atropos.rollouts.wire_values import ScoredPath


def make_rollout(group: ScoredGroup, i: int, mean: float, std: float) -> Rollout | None:
    """
    Returns rollout `i` of the group, or None if it has no token to train on.

    The completion begins at the first trained token and ends at the last. For example, if tokens 2
    and 4 of tokens 0 to 5 are trained, the prompt is tokens 0 and 1, the completion is tokens 2 to
    4, and its mask is `[True, False, True]`. Token 5 changes no loss, and TRL would take a
    completion that does not end in EOS for a truncated one.

    If the rollout has branches, each path becomes a part of the row, without the tokens behind its
    last trained one that no other part continues. The prompt is then the beginning of the first
    part, or all of it if nothing in it is trained.
    """
    parts, tree = _parts(group.paths(i))
    if not parts:
        return None
    begin = len(parts[0].tokens)
    if parts[0].trained.any():
        begin = max(1, int(parts[0].trained.argmax()))
    row = concatenated(parts, NO_PARENT, 0)
    roots = [0] if tree is None else tree.roots
    row.trained[roots] = False
    completion = slice(begin, None)
    mask = row.trained[completion]
    sft = group.asks("sft", i)

    logprobs = np.full(len(mask), np.nan, np.float32)
    if row.logprobs is not None and not sft:
        logprobs = np.where(mask, row.logprobs[completion], np.float32(np.nan))

    token_advantages = None
    if row.advantages is not None and not sft:
        token_advantages = row.advantages[completion].astype(np.float32)

    distill_ids = None
    distill_logprobs = None
    if row.distill_ids is not None and (row.distill_ids[completion] >= 0).any():
        distill_ids = row.distill_ids[completion]
        distill_logprobs = row.distill_logprobs[completion]

    return Rollout(
        prompt_ids=row.tokens[:begin],
        completion_ids=row.tokens[completion],
        mask=mask,
        logprobs=logprobs,
        score=group.scores[i],
        group_mean=mean,
        group_std=std,
        token_advantages=token_advantages,
        zero_advantage=group.asks("set_advantage_to_zero", i),
        env_id=group.env_id,
        sft=sft,
        distill_ids=distill_ids,
        distill_logprobs=distill_logprobs,
        messages=group.messages[i],
        tree=tree,
    )


def _parts(paths: list[ScoredPath]) -> tuple[list[ScoredPath], Tree | None]:
    """
    Returns the parts of the row, and how they hang together.

    A part ends at its last trained token, or where the last of its children leaves it, whichever is
    later. A path that trains nothing and that no other path continues becomes no part.
    """
    lengths = [len(path.tokens) for path in paths]
    tree = make_tree(lengths, [path.of for path in paths], [path.at for path in paths])
    ends = _needed_tokens(paths, tree)
    kept = np.flatnonzero(ends)
    parts = []
    for number in kept.tolist():
        parts.append(cut_out(paths[number], slice(ends[number])))
    if tree is None or not parts:
        return parts, None
    numbers = {NO_PARENT: NO_PARENT}  # new numbers of the parts, by those of the paths
    for place, number in enumerate(kept.tolist()):
        numbers[number] = place
    parents = [numbers[parent] for parent in tree.parents[kept].tolist()]
    return parts, make_tree(ends[kept], parents, tree.shared[kept])


def _needed_tokens(paths: list[ScoredPath], tree: Tree | None) -> np.ndarray:
    """Returns how many of its own tokens each path needs, `(n,)`; 0 if nobody needs it."""
    ends = np.zeros(len(paths), np.int64)
    for number, path in enumerate(paths):
        trained = np.flatnonzero(path.trained)
        if path.at == 0:
            trained = trained[trained > 0]  # A context's first token has nothing before it.
        if len(trained):
            ends[number] = trained[-1] + 1
    if tree is None:
        return ends
    for number in reversed(range(len(paths))):
        parent = tree.parents[number]
        if ends[number] and parent != NO_PARENT:
            needed = tree.shared[number] - tree.shared[parent]
            ends[parent] = max(ends[parent], needed)
    return ends
