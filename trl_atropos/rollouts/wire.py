"""The reply of `GET /batch`: from bytes to groups of arrays, checked for type and shape.

`AtroposClient.batch` calls `decode_reply`, `ReplaySource` calls `read_group`, and `intake.py` makes
rollouts of the result. Nothing is cast: neither `true` nor `5.0` is a token, and `"5"` is not a
score. Past this file, groups are trusted.
"""

import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, pairwise
from reprlib import repr as short
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct

MASKED = -100
INT32_MAX = 2**31 - 1
FLOAT32_MAX = float(np.finfo(np.float32).max)
# Largest score or advantage. Norms, standard deviations and Adam add up squares: float32 holds
# 2**48 squares of this.
LARGEST = 2.0**40
# Nats. vLLM writes -9999 for a probability of 0; float32 sums with lower values lose what the
# others add.
LOWEST_LOGPROB = -1e4
MAX_MESSAGE_BYTES = 64 * 1024  # of one rollout's messages

MAX_FLOAT = sys.float_info.max
TokenId = Annotated[int, Meta(ge=0, le=INT32_MAX)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Finite = Annotated[float, Meta(ge=-MAX_FLOAT, le=MAX_FLOAT)]
Number = float | int  # a big integer stays exact until it is checked
# Atropos' collectors send empty lists and objects for what they do not have.
Nothing = Annotated[dict[str, Any], Meta(max_length=0)] | None
Empty = Annotated[list[Any], Meta(max_length=0)] | None
T = TypeVar("T")
PerRollout = list[T | Nothing] | Nothing
"""One entry for each rollout of a group, if anything was sent."""


class Sampling(Struct):
    """The sampling settings of the group, as far as the environment says."""

    temperature: Finite | None = None


class Overrides(Sampling):
    """Requests of an environment for one rollout or for a whole group. Other keys are ignored."""

    set_advantage_to_zero: bool | None = None
    sft: bool | None = None
    evaluation: bool | None = None
    rewards: Any = None  # named parts of the score, which `reward_parts.py` checks


class Group(Struct):
    """A scored group of `n` rollouts as it is sent: prompt and completion together, one entry per
    token."""

    tokens: list[list[TokenId]]
    masks: list[list[int]]
    scores: list[Number]
    inference_logprobs: PerRollout[list[Number | None]] = None
    advantages: PerRollout[list[Number]] = None
    distill_token_ids: PerRollout[list[list[TokenId] | Nothing]] = None
    distill_logprobs: PerRollout[list[list[Number | None] | Nothing]] = None
    overrides: list[Overrides | Empty] | Nothing = None
    group_overrides: Overrides | Empty = None
    generation_params: Sampling | Empty = None
    env_id: Int64 | None = None
    messages: Any = None
    images: Any = None


class BatchReply(Struct):
    """`batch` is None while no batch can be assembled; `status` is "error" when no trainer is
    registered."""

    batch: list[Any] | None
    status: Literal["error"] | None = None


class RejectedGroup(ValueError):
    """One group cannot be used; the message has the value seen. In a batch, it stands for its
    group.

    Args:
        reason: what is wrong with it.
        kind: each kind is warned about once.
        fix: what to change if most groups of the environment are so, which ends the run. Empty for
        accidents.
    """

    def __init__(self, reason: str, kind: str = "malformed", fix: str = ""):
        super().__init__(reason)
        self.kind = kind
        self.fix = fix
        self.env_id: int | None = None
        self.size = 0  # rollouts


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
    overrides: list[Overrides]  # n
    group_overrides: Overrides
    generation_params: Sampling
    messages: list[str | None]  # n JSON texts, see `_messages`
    images: Any
    env_id: int | None

    @property
    def size(self) -> int:
        return len(self.tokens)

    def asks(self, override: str, i: int) -> bool:
        """Returns whether rollout `i` or its whole group has `override`, a Boolean field of
        `Overrides`."""
        if getattr(self.group_overrides, override):
            return True
        return bool(getattr(self.overrides[i], override))


DECODE_GROUP = msgspec.json.Decoder(Group).decode
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
    try:
        if isinstance(raw, bytes):
            if not raw.isascii():
                raw.decode()  # msgspec does not look at the text of fields that it leaves out
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
    return _checked(group)


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
        return msgspec.convert(json.loads(_dumps(sent)), Group)


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


def _checked(group: Group) -> ScoredGroup:
    """Returns the group as arrays. Raises `RejectedGroup` if a shape or a value is wrong."""
    size = len(group.tokens)
    if not size:
        raise RejectedGroup("tokens is empty: a group has at least 1 rollout")
    tokens = [np.fromiter(ids, np.int32, len(ids)) for ids in group.tokens]
    distill_ids, distill_logprobs = _teachers(group, tokens)
    _require_size("masks", group.masks, size)
    trained = []
    for i, mask in enumerate(group.masks):
        trained.append(_trained(i, mask, tokens[i]))
    _require_size("scores", group.scores, size)
    scores = _finite("scores", group.scores)
    logprobs = _per_token("inference_logprobs", group.inference_logprobs, tokens, _logprobs)
    advantages = _per_token("advantages", group.advantages, tokens, _finite)
    overrides = group.overrides or [None] * size
    _require_size("overrides", overrides, size)
    return ScoredGroup(
        tokens=tokens,
        trained=trained,
        scores=scores.tolist(),
        logprobs=logprobs,
        advantages=advantages,
        distill_ids=distill_ids,
        distill_logprobs=distill_logprobs,
        overrides=[sent or Overrides() for sent in overrides],
        group_overrides=group.group_overrides or Overrides(),
        generation_params=group.generation_params or Sampling(),
        messages=_messages(group.messages, size),
        images=group.images,
        env_id=group.env_id,
    )


def _require_size(name: str, entries: Sequence, size: int, of: str = "rollouts") -> None:
    """Raises `RejectedGroup` if there are not `size` entries."""
    if len(entries) != size:
        raise RejectedGroup(f"{name} has {len(entries)} entries for {size} {of}")


def _trained(i: int, mask: list[int], tokens: np.ndarray) -> np.ndarray:
    """Returns the tokens of rollout `i` that the mask marks, `(length,)` bool. An entry is -100, or
    the token itself: `[-100, 5, 6]` marks the last two of `[4, 5, 6]`."""
    _require_size(f"masks[{i}]", mask, len(tokens), "tokens")
    try:
        entries = np.fromiter(mask, np.int32, len(mask))
    except OverflowError:
        entries = np.array(mask, dtype=object)
    trained = entries != MASKED
    good = (entries == tokens) | ~trained
    if not good.all():
        wrong = int(np.argmin(good))
        seen = short(mask[wrong])
        token = tokens[wrong]
        raise RejectedGroup(
            f"masks[{i}][{wrong}] is {seen}, neither {MASKED} nor the token id {token}"
        )
    return trained


Check = Callable[[str, list], np.ndarray]


def _per_token(
    name: str, value: Any, tokens: list[np.ndarray], check: Check
) -> list[np.ndarray | None]:
    """Returns the checked values of each rollout, None if it has none."""
    if not value:
        return [None] * len(tokens)
    _require_size(name, value, len(tokens))
    checked = []
    for i, entries in enumerate(value):
        if not entries:
            checked.append(None)
            continue
        name_of_entry = f"{name}[{i}]"
        _require_size(name_of_entry, entries, len(tokens[i]), "tokens")
        checked.append(check(name_of_entry, entries))
    return checked


def _floats(entries: list) -> np.ndarray:
    """Returns float64, NaN for null. An integer that float64 cannot hold becomes infinite, whatever
    its sign."""
    try:
        with suppress(TypeError):  # of a null; where there is none, this is faster
            return np.fromiter(entries, np.float64, len(entries))
        return np.array(entries, dtype=np.float64)
    except OverflowError:
        return np.array([_representable(entry) for entry in entries], np.float64)


def _representable(entry: Number | None) -> Number | None:
    if entry is not None and abs(entry) > FLOAT32_MAX:
        return math.inf
    return entry


def _finite(name: str, entries: list) -> np.ndarray:
    """Returns `(length,)` float64. Rejects numbers of which float32 cannot hold the squares."""
    values = _floats(entries)
    good = np.abs(values) <= LARGEST
    if not good.all():
        wrong = int(np.argmin(good))
        raise RejectedGroup(
            f"{name}[{wrong}] is {short(entries[wrong])}, not a finite number of at most "
            f"{LARGEST:.3g}, beyond which sums of squares overflow float32"
        )
    return values


def _logprobs(name: str, entries: list) -> np.ndarray:
    """Returns `(length,)` float32, NaN for entries that are no log-probability: null, below the
    lowest, or above 0, as Atropos pads with 1.0."""
    values = _floats(entries)
    is_logprob = (values <= 0.0) & (values >= LOWEST_LOGPROB)
    values[~is_logprob] = np.nan
    return values.astype(np.float32)


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
    _require_size("distill_token_ids", group.distill_token_ids, size)
    _require_size("distill_logprobs", group.distill_logprobs, size)
    all_ids = []
    all_logprobs = []
    sent = zip(group.distill_token_ids, group.distill_logprobs, tokens)
    for i, (sent_ids, sent_logprobs, rollout) in enumerate(sent):
        ids, logprobs = _teacher(i, sent_ids, sent_logprobs, len(rollout))
        all_ids.append(ids)
        all_logprobs.append(logprobs)
    return all_ids, all_logprobs


def _teacher(
    i: int, ids: Any, logprobs: Any, length: int
) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
    """
    Returns what the teacher sent for rollout `i`, `(length, k)` each, padded with -1 and NaN.

    For example, ids `[[], [8], [11, 12], [9]]` for four tokens become
    `[[-1, -1], [8, -1], [11, 12], [9, -1]]`.
    """
    if not ids and not logprobs:
        return None, None
    ids = _lists(f"distill_token_ids[{i}]", ids, length)
    logprobs = _lists(f"distill_logprobs[{i}]", logprobs, length)
    counts = np.zeros(length, dtype=np.int64)
    for position in range(length):
        count = len(ids[position])
        name = f"distill_logprobs[{i}][{position}]"
        _require_size(name, logprobs[position], count, "token ids")
        counts[position] = count
    k = counts.max(initial=0)
    present = np.arange(k) < counts[:, None]  # (length, k)
    flat_ids = np.array(list(chain.from_iterable(ids)), np.int32)
    flat_logprobs = _logprobs("", list(chain.from_iterable(logprobs)))
    flat_ids[np.isnan(flat_logprobs)] = -1
    padded_ids = _padded(present, flat_ids, -1)
    padded_logprobs = _padded(present, flat_logprobs, np.nan)
    return padded_ids, padded_logprobs


def _padded(present: np.ndarray, values: np.ndarray, filler: float) -> np.ndarray:
    """Returns an array like `present` with the values where that is true: 5 and 6 at the true ones
    of `[[False, True], [True, False]]` are `[[-1, 5], [6, -1]]` with the filler -1."""
    padded = np.full(present.shape, filler, values.dtype)
    padded[present] = values
    return padded


def _lists(name: str, value: Any, length: int) -> list[list]:
    """Returns one list per token, an empty one for null."""
    entries = value or []
    _require_size(name, entries, length, "tokens")
    return [entry or [] for entry in entries]


# ----------------------------------------------------------------------- messages for human readers


def _messages(value: Any, size: int) -> list[str | None]:
    """Returns the JSON text of each rollout's messages, at most 64 KiB: longer conversations lose
    their last messages. They are for human readers only, so no shape of them is an error."""
    is_per_rollout = isinstance(value, list) and len(value) == size
    if not is_per_rollout:
        return [None] * size
    return [_message_text(messages) for messages in value]


def _message_text(messages: Any) -> str | None:
    if not messages:
        return None
    try:
        text = _dumps(messages)
    except RecursionError:  # nested too deeply to be read by anybody
        return None
    total = len(text.encode())
    if total <= MAX_MESSAGE_BYTES:
        return text
    entries = [messages]
    if isinstance(messages, list):
        entries = messages
    kept = []
    left = MAX_MESSAGE_BYTES - 200  # for the note
    for entry in entries:
        text = _dumps(entry)
        left -= len(text.encode()) + len(", ")
        if left < 0:
            break
        kept.append(entry)
    left_out = len(entries) - len(kept)
    note = {"role": "note", "content": f"{left_out} more messages; {total} bytes in all"}
    return _dumps([*kept, note])


def _dumps(value: Any) -> str:
    """Returns JSON. Half a surrogate pair, which UTF-8 cannot hold, becomes a question mark."""
    text = json.dumps(value, ensure_ascii=False)
    return text.encode("utf-8", "replace").decode()
