"""From rows to an episode. A row is a whole sequence of tokens, as a server saw it in one call; the
rows of an episode begin alike, and an episode has each token once.

Authors of environments call `episode`, or `session_episode` for what a session of the server has
kept. `intake.py` calls `join_rows`, for environments that send the rows themselves. None of them
needs torch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trl_atropos.errors import RolloutError
from trl_atropos.protocol import SessionReply
from trl_atropos.rollouts.wire import ScoredGroup
from trl_atropos.rollouts.wire_format import RolloutOverrides
from trl_atropos.rollouts.wire_values import MASKED, RejectedGroup, ScoredPath

NO_LOGPROB = 1.0  # what Atropos writes for tokens that were not sampled
NEVER_TRAINED = ("unseen", "NaN")  # reasons of a session's call: nobody saw it, or it is no number
FIELDS = ("tokens", "masks", "inference_logprobs", "advantages")  # of a row, in this order


@dataclass(eq=False)
class Path:
    """One path of an episode, made of rows."""

    of: int  # number of the earlier path that it continues
    at: int  # how many tokens of that path it shares
    tokens: np.ndarray  # (length,), with the shared ones
    trained: np.ndarray  # (length,) bool; a shared token is trained if the earlier path trains it
    # Stretches of rows whose values are those of the path from `at` on: row, begin, end.
    sources: list[tuple[int, int, int]]


def paths_of_rows(tokens: Sequence[np.ndarray], trained: Sequence[np.ndarray]) -> list[Path]:
    """
    Returns the paths of an episode, the first one first.

    A row leaves an earlier path where its tokens first differ, but never within a call, which is a
    stretch of tokens that both train: two calls that begin alike are two calls. A token that an
    earlier row trains is not trained again. For example, of the rows

        a b C D        capitals: trained
        a b C D e F    becomes the rest of the first path: e F
        a b C X        leaves the first path behind b: C X

    Args:
        tokens: of each row, `(length,)`.
        trained: of each row, `(length,)` bool.
    """
    paths: list[Path] = []
    for number, (row, marks) in enumerate(zip(tokens, trained, strict=True)):
        source = (number, 0, len(row))
        if not paths:
            paths.append(Path(of=0, at=0, tokens=row, trained=marks, sources=[source]))
            continue
        of, at = _longest_beginning(paths, row, marks)
        if at == len(row):
            continue  # Nothing in it is new.
        parent = paths[of]
        source = (number, at, len(row))
        all_marks = np.concatenate([parent.trained[:at], marks[at:]])
        if at == len(parent.tokens) and not _begins_a_call(parent, marks, at):
            parent.tokens = row
            parent.trained = all_marks
            parent.sources.append(source)
        else:
            paths.append(Path(of=of, at=at, tokens=row, trained=all_marks, sources=[source]))
    return paths


def _longest_beginning(paths: list[Path], row: np.ndarray, marks: np.ndarray) -> tuple[int, int]:
    """Returns the path that the row continues, and how many of its tokens the row shares."""
    best_path = 0
    most_shared = 0
    for number, path in enumerate(paths):
        shared = _shared_tokens(path, row, marks)
        if shared > most_shared:
            best_path = number
            most_shared = shared
    return best_path, most_shared


def _shared_tokens(path: Path, row: np.ndarray, marks: np.ndarray) -> int:
    """Returns how many tokens of the path the row shares."""
    length = min(len(path.tokens), len(row))
    differs = path.tokens[:length] != row[:length]
    shared = length
    if differs.any():
        shared = int(differs.argmax())
    both_train = path.trained[:length] & marks[:length]
    if 0 < shared < length and both_train[shared - 1] and both_train[shared]:
        # The tokens differ within a call: go back to its first token.
        earlier = np.flatnonzero(~both_train[:shared])
        shared = 0
        if len(earlier):
            shared = int(earlier[-1]) + 1
    # What only the row trains must be in the row's own path.
    only_row_trains = marks[:shared] & ~path.trained[:shared]
    if only_row_trains.any():
        shared = int(only_row_trains.argmax())
    return shared


def _begins_a_call(path: Path, marks: np.ndarray, at: int) -> bool:
    """Returns whether the row begins a call right behind the path's last call. For example, a
    search goes on from the half of a call: then the two must not become one trained stretch."""
    if not at or not marks[at] or not path.trained[at - 1]:
        return False
    return not marks[at - 1]


# -------------------------------------------------------------------- for authors of environments


def episode(rows: Iterable[Any]) -> dict[str, Any]:
    """
    Returns one item of a group that stands for all rows of an episode.

    For example, an Atropos environment has the nodes of a managed server, and adds them to a group:

        item = trl_atropos.episode(managed.get_state()["nodes"])
        for field, value in item.items():
            group.setdefault(field, []).append(value)
        group["scores"].append(score)

    Each token that a row trains is trained once, and the order of the rows does not matter. Rows do
    not tell everything: two calls that sampled exactly the same tokens in the same context are one
    call here. To train both, write `branches` yourself (docs/concepts.md).

    Args:
        rows: `(tokens, masks, inference_logprobs)` or `(tokens, masks, inference_logprobs,
            advantages)`, as a group has them for one rollout; or objects with `tokens`,
            `masked_tokens` and `logprobs`, which are the nodes of Atropos' managed server.

    Returns:
        `tokens`, `masks`, `inference_logprobs` and, if the rows have them, `advantages` of the
        first path, and `overrides` with the `branches`.

    Raises:
        RolloutError: there is no row, or the lists of a row do not fit each other.
    """
    sent = []
    for number, row in enumerate(rows):
        sent.append(_lists_of(number, row))
    if not sent:
        what = "`episode` got no rows"
        fix = "Give it one row for each call of the episode."
        raise RolloutError(what, "rows: []", fix)
    sizes = sorted({len(lists) for lists in sent})
    if len(sizes) > 1:
        what = "Some rows of the episode have advantages, and others have none"
        fix = "Give all rows advantages, or none."
        raise RolloutError(what, f"rows of {sizes[0]} and of {sizes[1]} lists", fix)
    tokens = [np.array(lists[0], np.int64) for lists in sent]
    trained = [np.array(lists[1], np.int64) != MASKED for lists in sent]
    items = []
    for path in paths_of_rows(tokens, trained):
        fields: dict[str, Any] = {"of": path.of, "at": path.at}
        for place, name in enumerate(FIELDS[: sizes[0]]):
            values = []
            for row, begin, end in path.sources:
                values += sent[row][place][begin:end]
            fields[name] = values
        items.append(fields)
    first = items[0]
    del first["of"], first["at"]
    return first | {"overrides": {"branches": items[1:]}}


def _lists_of(number: int, row: Any) -> list[list]:
    """Returns the lists of a row, in the order of `FIELDS`. Raises `RolloutError` if they do not
    fit each other."""
    if hasattr(row, "masked_tokens"):
        row = (row.tokens, row.masked_tokens, row.logprobs)
    values = list(row)
    if len(values) not in (3, 4):
        what = f"Row {number} of the episode has {len(values)} lists"
        fix = "A row is (tokens, masks, inference_logprobs) or (..., advantages)."
        raise RolloutError(what, fix=fix)
    lists = [_as_list(entries) for entries in values]
    length = len(lists[0])
    for name, entries in zip(FIELDS, lists):
        if len(entries) != length:
            what = f"`{name}` of row {number} of the episode has {len(entries)} entries"
            fix = f"Give it one for each of the row's {length} tokens."
            raise RolloutError(what, fix=fix)
    tokens, masks, *_ = lists
    for place, (token, mask) in enumerate(zip(tokens, masks)):
        if mask not in (token, MASKED):
            what = f"masks[{place}] of row {number} of the episode is {mask!r}"
            fix = f"It must be the token itself, {token}, or {MASKED} for a token of the context."
            raise RolloutError(what, fix=fix)
    return lists


def _as_list(entries: Any) -> list:
    """Returns plain numbers, also of an array or a tensor: JSON knows no others."""
    if hasattr(entries, "tolist"):
        return entries.tolist()
    return list(entries)


def session_episode(reply: SessionReply, train_marked: bool = False) -> dict[str, Any] | None:
    """
    Returns one item of a group that stands for all that a session has sampled (docs/sessions.md).

        item = trl_atropos.session_episode(await session.read())
        for field, value in item.items():
            group.setdefault(field, []).append(value)

    Tokens whose log-probabilities the trainer cannot compute again (`SessionCall.reason`) are
    context: they are not trained, unless you say `train_marked`.

    Returns:
        `tokens`, `masks`, `inference_logprobs` and `overrides`, or None if nothing can be trained.
    """
    usable = set()
    for call in reply.calls:
        is_wanted = train_marked and call.reason not in NEVER_TRAINED
        if call.reason is None or is_wanted:
            usable.add(call.segment)
    paths = []
    for number, segment in enumerate(reply.segments):
        masks = [MASKED] * len(segment.tokens)
        logprobs = [NO_LOGPROB] * len(segment.tokens)
        for start, end in segment.sampled:
            logprobs[start:end] = segment.logprobs
            if number in usable:
                masks[start:end] = segment.tokens[start:end]
        paths.append(
            {
                "of": max(0, segment.parent),
                "at": segment.at,
                "tokens": segment.tokens,
                "masks": masks,
                "inference_logprobs": logprobs,
            }
        )
    if all(token == MASKED for path in paths for token in path["masks"]):
        return None
    first, *branches = paths
    del first["of"], first["at"]
    return first | {"overrides": {"branches": branches}}


# -------------------------------------------------------------------------------- rows sent as rows


def join_rows(group: ScoredGroup) -> ScoredGroup:
    """Returns the group with one rollout for the rows that have the same `episode` in their
    overrides, in the place of the first. Raises `RejectedGroup` if such rows do not agree."""
    episodes: dict[object, list[int]] = {}
    for i, overrides in enumerate(group.overrides):
        key: object = (i,)  # a rollout of its own
        if overrides.episode is not None:
            key = overrides.episode
        episodes.setdefault(key, []).append(i)
    if len(episodes) == group.size:
        return group
    rollouts = []
    for rows in episodes.values():
        if len(rows) > 1:
            _require_agreement(group, rows)
        rollouts.append(_joined(group, rows))
    first_rows = [rows[0] for rows in episodes.values()]
    first_paths = [paths[0] for paths in rollouts]
    return replace(
        group,
        tokens=[path.tokens for path in first_paths],
        trained=[path.trained for path in first_paths],
        scores=[group.scores[i] for i in first_rows],
        logprobs=[path.logprobs for path in first_paths],
        advantages=[path.advantages for path in first_paths],
        distill_ids=[path.distill_ids for path in first_paths],
        distill_logprobs=[path.distill_logprobs for path in first_paths],
        branches=[paths[1:] for paths in rollouts],
        overrides=[_overrides_of(group, rows) for rows in episodes.values()],
        messages=[_messages_of(group, rows) for rows in episodes.values()],
    )


def _require_agreement(group: ScoredGroup, rows: list[int]) -> None:
    """Raises `RejectedGroup` if the rows of an episode cannot be one rollout."""
    first = rows[0]
    name = group.overrides[first].episode
    for i in rows:
        if group.branches[i]:
            reason = (
                f"overrides[{i}] has both `branches` and an `episode` of {len(rows)} rows "
                f"({name!r}): send one of the two"
            )
            raise RejectedGroup(reason, "rows of an episode")
        values = {
            f"scores[{i}]": (group.scores[i], group.scores[first]),
            f"`sft` of overrides[{i}]": (group.asks("sft", i), group.asks("sft", first)),
            f"`set_advantage_to_zero` of overrides[{i}]": (
                group.asks("set_advantage_to_zero", i),
                group.asks("set_advantage_to_zero", first),
            ),
            f"the presence of advantages[{i}]": (
                group.advantages[i] is not None,
                group.advantages[first] is not None,
            ),
        }
        for place, (value, expected) in values.items():
            if value != expected:
                reason = (
                    f"{place} is {value}, but {expected} for row {first} of the same episode "
                    f"({name!r}): the rows of an episode are one rollout"
                )
                raise RejectedGroup(reason, "rows of an episode")


def _joined(group: ScoredGroup, rows: list[int]) -> list[ScoredPath]:
    """Returns the paths of the rollout that some rows of a group are."""
    if len(rows) == 1:
        return group.paths(rows[0])
    tokens = [group.tokens[i] for i in rows]
    trained = [group.trained[i] for i in rows]
    paths = []
    for path in paths_of_rows(tokens, trained):
        pieces = []
        for row, begin, end in path.sources:
            sent = group.paths(rows[row])[0]
            pieces.append(cut_out(sent, slice(begin, end)))
        paths.append(concatenated(pieces, of=path.of, at=path.at))
    return paths


def _overrides_of(group: ScoredGroup, rows: list[int]) -> RolloutOverrides:
    """Returns the overrides of an episode: those of its first row, with the named parts of the
    score that any row brings."""
    overrides = group.overrides[rows[0]]
    for i in rows:
        if overrides.rewards is None:
            overrides.rewards = group.overrides[i].rewards
    return overrides


def _messages_of(group: ScoredGroup, rows: list[int]) -> str | None:
    """Returns the longest messages of an episode's rows."""
    messages = [group.messages[i] for i in rows if group.messages[i] is not None]
    return max(messages, key=len, default=None)


# ---------------------------------------------------------------------------------- values of paths


def cut_out(path: ScoredPath, tokens: slice) -> ScoredPath:
    """Returns a path with some of its own tokens."""
    values = {}
    for name in ("tokens", "trained", "logprobs", "advantages", "distill_ids", "distill_logprobs"):
        value = getattr(path, name)
        values[name] = None if value is None else value[tokens]
    return replace(path, **values)


def concatenated(paths: Sequence[ScoredPath], of: int, at: int) -> ScoredPath:
    """Returns a path with the own tokens of all `paths`, one after the other. If some of them lack
    values that others have, these values are unknown. The array `trained` is a new one."""
    if len(paths) == 1:
        return replace(paths[0], of=of, at=at, trained=paths[0].trained.copy())
    return ScoredPath(
        of=of,
        at=at,
        tokens=np.concatenate([path.tokens for path in paths]),
        trained=np.concatenate([path.trained for path in paths]),
        logprobs=_filled([path.logprobs for path in paths], paths, np.nan),
        advantages=_filled([path.advantages for path in paths], paths, 0.0),
        distill_ids=_filled([path.distill_ids for path in paths], paths, -1),
        distill_logprobs=_filled([path.distill_logprobs for path in paths], paths, np.nan),
    )


def _filled(
    values: list[np.ndarray | None], paths: Sequence[ScoredPath], filler: float
) -> np.ndarray | None:
    """Returns the values of all tokens, `(length,)` or `(length, k)` with the largest `k`, or None
    if nothing was sent."""
    sent = [value for value in values if value is not None]
    if not sent:
        return None
    k = max(value.shape[1:] for value in sent)
    filled = []
    for value, path in zip(values, paths):
        whole = np.full((len(path.tokens), *k), filler, sent[0].dtype)
        if value is not None and value.ndim == 2:
            whole[:, : value.shape[1]] = value
        elif value is not None:
            whole[:] = value
        filled.append(whole)
    return np.concatenate(filled)
