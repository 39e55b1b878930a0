"""The reply of `GET /batch`: from bytes to groups of arrays, checked for type and shape.

`AtroposClient.batch` calls `decode_reply`, `ReplaySource` calls `read_group`, and `intake.py` makes
rollouts of the result. Nothing is cast: neither `true` nor `5.0` is a token, and `"5"` is not a
score. Past this file, groups are trusted.

What a group may have stands in `wire_format.py`, what its values may be in `wire_values.py`.
"""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from reprlib import repr as short
from typing import Any

import msgspec
import numpy as np

from trl_atropos.rollouts.tree import NO_PARENT
from trl_atropos.rollouts.wire_format import (
    BatchReply,
    Branch,
    Group,
    KnownGroup,
    Overrides,
    RolloutOverrides,
    Sampling,
    unknown_overrides,
)
from trl_atropos.rollouts.wire_messages import dumps, message_texts
from trl_atropos.rollouts.wire_values import (
    Check,
    RejectedGroup,
    ScoredPath,
    finite,
    log_probabilities,
    per_token,
    require_size,
    teacher,
    trained_tokens,
)


@dataclass(frozen=True, eq=False)
class ScoredGroup:
    """A group of `n` rollouts. Entry `i` of each per-token array is about token `i`; None: nothing
    was sent."""

    tokens: list[np.ndarray]  # n of (length,) int32
    trained: list[np.ndarray]  # n of (length,) bool, False where the mask is -100
    scores: list[float]  # n, at most `LARGEST`
    logprobs: list[np.ndarray | None]  # n of (length,) float32, NaN = unknown
    advantages: list[np.ndarray | None]  # n of (length,) float64
    # n of (length, k) int32, a teacher's tokens at each token; -1 = absent
    distill_ids: list[np.ndarray | None]
    distill_logprobs: list[np.ndarray | None]  # n of (length, k) float32; NaN = absent
    branches: list[list[ScoredPath]]  # n lists of further paths; path 0 is in the lists above
    overrides: list[RolloutOverrides]  # n
    group_overrides: Overrides
    generation_params: Sampling
    messages: list[str | None]  # n JSON texts, see `_messages`
    images: Any
    env_id: int | None
    unknown_overrides: list[str]  # keys of overrides that this version does not know, sorted

    @property
    def size(self) -> int:
        return len(self.tokens)

    def paths(self, i: int) -> list[ScoredPath]:
        """Returns all paths of rollout `i`, the first one first."""
        first = ScoredPath(
            of=NO_PARENT,
            at=0,
            tokens=self.tokens[i],
            trained=self.trained[i],
            logprobs=self.logprobs[i],
            advantages=self.advantages[i],
            distill_ids=self.distill_ids[i],
            distill_logprobs=self.distill_logprobs[i],
        )
        return [first, *self.branches[i]]

    def asks(self, override: str, i: int) -> bool:
        """Returns whether rollout `i` or its whole group has `override`, a Boolean field of
        `Overrides`."""
        if getattr(self.group_overrides, override):
            return True
        return bool(getattr(self.overrides[i], override))


DECODE_GROUP = msgspec.json.Decoder(Group).decode
DECODE_KNOWN_GROUP = msgspec.json.Decoder(KnownGroup).decode
# atroposlib 0.4 writes a reply as HEAD, a group, NEXT, the rest of a group, ..., TAIL.
HEAD = b'{"batch":['
NEXT = b',{"tokens":'
TAIL = b"]}"
UNREADABLE = "unreadable"


def decode_reply(body: bytes) -> BatchReply:
    """Returns the groups of a reply, each a `ScoredGroup` or a `RejectedGroup`: one that cannot be
    read costs no other. Raises `ValueError` if the body is not the JSON of such a reply."""
    groups = []
    if body.startswith(HEAD) and body.endswith(TAIL):
        # Reading group by group takes much less memory.
        groups = _read_piecewise(body)
        if not any(_is_unreadable(group) for group in groups):
            return BatchReply(groups)
    # The cuts may be wrong: then some part is not JSON by itself.
    try:
        reply = msgspec.convert(json.loads(body), BatchReply)
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        if all(isinstance(group, RejectedGroup) for group in groups):
            raise ValueError(str(error)) from error
        return BatchReply(groups)
    if reply.batch is not None:
        reply.batch = [read_group(group) for group in reply.batch]
    return reply


def _read_piecewise(body: bytes) -> list[ScoredGroup | RejectedGroup]:
    """
    Reads each group of a reply by itself.

    For example, `{"batch":[{A},{B}]}` has three cuts: the `[`, the comma between the groups, and
    the `]`. Each group stands between two cuts.
    """
    first_cut = len(HEAD) - 1
    last_cut = len(body) - len(TAIL)
    cuts = [first_cut, *_ends_of_groups(body), last_cut]
    groups = []
    for left, right in pairwise(cuts):
        text = body[left + 1 : right]
        groups.append(read_group(text))
    return groups


def _ends_of_groups(body: bytes) -> Iterator[int]:
    """Yields where a group ends that another follows. Looks for one character: `find` is several
    times slower with more."""
    end = body.find(b"}") + 1
    while end:
        if body.startswith(NEXT, end):
            yield end
        end = body.find(b"}", end) + 1


def _is_unreadable(group: ScoredGroup | RejectedGroup) -> bool:
    return isinstance(group, RejectedGroup) and group.kind == UNREADABLE


def read_group(raw: object) -> ScoredGroup | RejectedGroup:
    """Reads a group as `parse_group` does, but returns the error."""
    try:
        return parse_group(raw)
    except RejectedGroup as error:
        rejected = RejectedGroup(str(error), error.kind)
    with suppress(RejectedGroup):
        sent = _plain(raw)
        if isinstance(sent, dict):
            env_id = sent.get("env_id")
            if type(env_id) is int:
                rejected.env_id = env_id
            tokens = sent.get("tokens")
            if isinstance(tokens, list):
                rejected.size = len(tokens)
    return rejected


def parse_group(raw: object) -> ScoredGroup:
    """Reads a group as text (`bytes`) or as `json` gives it. Raises `RejectedGroup`, which says
    where it is wrong."""
    known_group = _known_group(raw)
    if known_group is not None:
        return _checked(known_group, unknown_overrides=[])
    sent = raw
    try:
        if isinstance(raw, bytes):
            _require_text(raw)
            group = DECODE_GROUP(raw)
        else:
            group = msgspec.convert(raw, Group)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        # `json` takes what msgspec does not (NaN, 1e999, half a surrogate pair), and has the value
        # for the message.
        sent = _plain(raw)
        try:
            group = _converted(sent)
        except msgspec.ValidationError as error:
            raise RejectedGroup(_explained(sent, str(error))) from None
    unknown = []
    if group.overrides or group.group_overrides:
        unknown = unknown_overrides(sent)
    return _checked(group, unknown)


def _known_group(raw: object) -> KnownGroup | None:
    """Returns a group that came as text, or None if it is not such as most groups are."""
    if not isinstance(raw, bytes):
        return None
    try:
        _require_text(raw)
        return DECODE_KNOWN_GROUP(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return None


def _require_text(raw: bytes) -> None:
    """Raises `UnicodeError` if the group is not UTF-8: msgspec does not look at the text of fields
    that it leaves out."""
    if not raw.isascii():
        raw.decode()


def _plain(raw: object) -> Any:
    """Returns the group as Python objects."""
    if not isinstance(raw, bytes):
        return raw
    try:
        return json.loads(raw)
    # also for text that is not UTF-8, and integers of 4301 digits
    except (ValueError, RecursionError) as error:
        reason = f"the group is not JSON that can be read ({type(error).__name__}: {error})"
        raise RejectedGroup(reason, UNREADABLE) from None


def _converted(sent: Any) -> Group:
    try:
        return msgspec.convert(sent, Group)
    except UnicodeEncodeError:  # of half a surrogate pair in the key of an object
        return msgspec.convert(json.loads(dumps(sent)), Group)


def _explained(sent: Any, error: str) -> str:
    """Returns an error with the value seen: "tokens[0][1] is True: expected `int`, got `bool`" for
    msgspec's "Expected `int`, got `bool` - at `$.tokens[0][1]`"."""
    expected, _, path = error.partition(" - at `$")
    value = sent
    steps = re.findall(r"\.(\w+)|\[(\d+)\]", path)  # ("tokens", ""), ("", "0"), ("", "1")
    for field, index in steps:
        value = value[field or int(index)]
    place = path[1:-1] or "the group"
    reason = expected[:1].lower() + expected[1:]
    return f"{place} is {short(value)}: {reason}"


# ------------------------------------------------------------------- shapes and values of a group


def _checked(group: Group, unknown_overrides: list[str]) -> ScoredGroup:
    """Returns the group as arrays. Raises `RejectedGroup` if a shape or a value is wrong."""
    size = len(group.tokens)
    if not size:
        raise RejectedGroup("tokens is empty: a group has at least 1 rollout")
    tokens = [np.fromiter(ids, np.int32, len(ids)) for ids in group.tokens]
    distill_ids, distill_logprobs = _teachers(group, tokens)
    require_size("masks", group.masks, size)
    trained = []
    for i, mask in enumerate(group.masks):
        trained.append(trained_tokens(f"masks[{i}]", mask, tokens[i]))
    require_size("scores", group.scores, size)
    scores = finite("scores", group.scores)
    name = "inference_logprobs"
    logprobs = _per_rollout(name, group.inference_logprobs, tokens, log_probabilities)
    advantages = _per_rollout("advantages", group.advantages, tokens, finite)
    overrides = group.overrides or [None] * size
    require_size("overrides", overrides, size)
    overrides = [sent or RolloutOverrides() for sent in overrides]
    branches = []
    for i, sent in enumerate(overrides):
        if logprobs[i] is None:
            name = f"overrides[{i}].inference_logprobs"
            values = sent.inference_logprobs
            logprobs[i] = per_token(name, values, len(tokens[i]), log_probabilities)
        branches.append(_branches(f"overrides[{i}].branches", sent.branches or [], len(tokens[i])))
        # They are arrays now. The lists take ten times the memory.
        sent.branches = None
        sent.inference_logprobs = None
    scored_group = ScoredGroup(
        tokens=tokens,
        trained=trained,
        scores=scores.tolist(),
        logprobs=logprobs,
        advantages=advantages,
        distill_ids=distill_ids,
        distill_logprobs=distill_logprobs,
        branches=branches,
        overrides=overrides,
        group_overrides=group.group_overrides or Overrides(),
        generation_params=group.generation_params or Sampling(),
        messages=message_texts(group.messages, size),
        images=group.images,
        env_id=group.env_id,
        unknown_overrides=unknown_overrides,
    )
    for i in range(size):
        _require_all_advantages(i, scored_group.paths(i))
    return scored_group


def _per_rollout(
    name: str, value: Any, tokens: list[np.ndarray], check: Check
) -> list[np.ndarray | None]:
    """Returns the checked values of each rollout, None if it has none."""
    if not value:
        return [None] * len(tokens)
    require_size(name, value, len(tokens))
    checked = []
    for i, entries in enumerate(value):
        checked.append(per_token(f"{name}[{i}]", entries, len(tokens[i]), check))
    return checked


def _teachers(
    group: Group, tokens: list[np.ndarray]
) -> tuple[list[np.ndarray | None], list[np.ndarray | None]]:
    """Returns the teacher's token ids and log-probabilities of each rollout."""
    size = len(tokens)
    if not group.distill_token_ids and not group.distill_logprobs:
        return [None] * size, [None] * size
    if not group.distill_token_ids:
        raise RejectedGroup("distill_logprobs came without distill_token_ids")
    if not group.distill_logprobs:
        raise RejectedGroup("distill_token_ids came without distill_logprobs")
    require_size("distill_token_ids", group.distill_token_ids, size)
    require_size("distill_logprobs", group.distill_logprobs, size)
    all_ids = []
    all_logprobs = []
    sent = zip(group.distill_token_ids, group.distill_logprobs, tokens)
    for i, (sent_ids, sent_logprobs, rollout) in enumerate(sent):
        ids, logprobs = teacher(
            f"distill_token_ids[{i}]",
            sent_ids,
            f"distill_logprobs[{i}]",
            sent_logprobs,
            len(rollout),
        )
        all_ids.append(ids)
        all_logprobs.append(logprobs)
    return all_ids, all_logprobs


# --------------------------------------------------------------------------- branches of a rollout


def _branches(place: str, branches: list[Branch], length: int) -> list[ScoredPath]:
    """Returns the branches of a rollout whose first path has `length` tokens. Raises
    `RejectedGroup` if one is wrong; `place` is where they stand."""
    lengths = [length]
    paths = []
    for j, branch in enumerate(branches):
        path = _branch(f"{place}[{j}]", branch, lengths)
        lengths.append(path.length)
        paths.append(path)
    return paths


def _branch(place: str, branch: Branch, lengths: list[int]) -> ScoredPath:
    """Returns one branch. `lengths` are those of the paths before it."""
    last = len(lengths) - 1
    if not 0 <= branch.of <= last:
        raise RejectedGroup(
            f"{place}.of is {short(branch.of)}, and the paths before this branch are 0 to {last}"
        )
    if not 0 <= branch.at <= lengths[branch.of]:
        raise RejectedGroup(
            f"{place}.at is {short(branch.at)}, and path {branch.of} has {lengths[branch.of]} "
            "tokens"
        )
    if not branch.tokens:
        raise RejectedGroup(f"{place}.tokens is empty: a branch has at least 1 token of its own")
    length = len(branch.tokens)
    tokens = np.fromiter(branch.tokens, np.int32, length)
    name = f"{place}.inference_logprobs"
    logprobs = per_token(name, branch.inference_logprobs, length, log_probabilities)
    advantages = per_token(f"{place}.advantages", branch.advantages, length, finite)
    distill_ids, distill_logprobs = teacher(
        f"{place}.distill_token_ids",
        branch.distill_token_ids,
        f"{place}.distill_logprobs",
        branch.distill_logprobs,
        length,
    )
    return ScoredPath(
        of=branch.of,
        at=branch.at,
        tokens=tokens,
        trained=trained_tokens(f"{place}.masks", branch.masks, tokens),
        logprobs=logprobs,
        advantages=advantages,
        distill_ids=distill_ids,
        distill_logprobs=distill_logprobs,
    )


def _require_all_advantages(i: int, paths: list[ScoredPath]) -> None:
    """Raises `RejectedGroup` if some of a rollout's paths have token-level advantages, and others
    with trained tokens do not."""
    lacking = []
    for j, path in enumerate(paths):
        if path.advantages is None and path.trained.any():
            lacking.append(j)
    if not lacking or all(path.advantages is None for path in paths):
        return
    name = f"advantages[{i}]"
    if lacking[0] > 0:
        name = f"overrides[{i}].branches[{lacking[0] - 1}].advantages"
    raise RejectedGroup(
        f"{name} is missing, and other paths of the rollout have token-level advantages"
    )
