"""The reply of `GET /batch`: from bytes to groups of arrays, checked for type and shape.

`AtroposClient.batch` calls `decode_reply`, `ReplaySource` calls `read_group`, and `intake.py` makes
rollouts of the result. Nothing is cast: neither `true` nor `5.0` is a token, and `"5"` is not a
score.
"""

import json
import math
import re
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from reprlib import repr as short
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct

MASKED = -100
INT32_MAX = 2**31 - 1
FLOAT32_MAX = float(np.finfo(np.float32).max)
# Of scores and advantages. Norms, standard deviations and Adam add up squares: float32 holds 2**48
# squares of this.
LARGEST = 2.0**40
# Nats. vLLM writes -9999 for a probability of 0; float32 sums with lower values lose what the
# others add.
LOWEST_LOGPROB = -1e4
MAX_MESSAGE_BYTES = 64 * 1024  # of one rollout's messages

TokenId = Annotated[int, Meta(ge=0, le=INT32_MAX)]
Number = float | int  # a big integer stays exact until it is checked
# Atropos' collectors send empty lists and objects for what they do not have.
Nothing = Annotated[dict[str, Any], Meta(max_length=0)] | None
Empty = Annotated[list[Any], Meta(max_length=0)] | None


class Sampling(Struct):
    """How the group was sampled, as far as the environment says."""

    # finite
    temperature: Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)] | None = None


class Overrides(Sampling):
    """What an environment may ask for one rollout or for a whole group. Other keys are ignored."""

    set_advantage_to_zero: bool | None = None
    sft: bool | None = None
    evaluation: bool | None = None


class Group(Struct):
    """A scored group of `n` rollouts as it is sent: prompt and completion together, one entry per
    token."""

    tokens: list[list[TokenId]]
    masks: list[list[int]]
    scores: list[Number]
    inference_logprobs: list[list[Number | None] | Nothing] | Nothing = None
    advantages: list[list[Number] | Nothing] | Nothing = None
    distill_token_ids: list[list[list[TokenId] | Nothing] | Nothing] | Nothing = None
    distill_logprobs: list[list[list[Number | None] | Nothing] | Nothing] | Nothing = None
    overrides: list[Overrides | Empty] | Nothing = None
    group_overrides: Overrides | Empty = None
    generation_params: Sampling | Empty = None
    env_id: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
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
        """Whether rollout `i` or its whole group has `override`, a Boolean field of `Overrides`."""
        return any(
            getattr(asked, override) is True for asked in (self.group_overrides, self.overrides[i])
        )


DECODE_GROUP = msgspec.json.Decoder(Group).decode
# How atroposlib 0.4 writes a reply.
HEAD = b'{"batch":['
NEXT = b',{"tokens":'
TAIL = b"]}"
UNREADABLE = "unreadable"


def decode_reply(body: bytes) -> BatchReply:
    """The groups of a reply, each a `ScoredGroup` or a `RejectedGroup`: one that cannot be read
    costs no other. Raises `ValueError` if the body is not the JSON of such a reply."""
    groups: list[ScoredGroup | RejectedGroup] = []
    if body.startswith(HEAD) and body.endswith(TAIL):
        # Reading group by group takes much less memory. If the cuts are wrong, some part is not
        # JSON by itself.
        cuts = [len(HEAD) - 1, *_ends_of_groups(body), len(body) - len(TAIL)]
        groups = [read_group(body[before + 1 : after]) for before, after in pairwise(cuts)]
        if not any(
            isinstance(group, RejectedGroup) and group.kind == UNREADABLE for group in groups
        ):
            return BatchReply(groups)
    try:
        reply = msgspec.convert(json.loads(body), BatchReply)
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        if all(isinstance(group, RejectedGroup) for group in groups):
            raise ValueError(str(error)) from error
        return BatchReply(groups)
    return BatchReply(
        None if reply.batch is None else list(map(read_group, reply.batch)), reply.status
    )


def _ends_of_groups(body: bytes) -> Iterator[int]:
    """Where a group ends that another follows. Looks for one character: `find` is several times
    slower with more."""
    end = body.find(b"}") + 1
    while end:
        if body.startswith(NEXT, end):
            yield end
        end = body.find(b"}", end) + 1


def read_group(raw: object) -> ScoredGroup | RejectedGroup:
    """As `parse_group`, but returns the error."""
    try:
        return parse_group(raw)
    except RejectedGroup as error:
        rejected = RejectedGroup(str(error), error.kind)
    with suppress(RejectedGroup):
        sent = _plain(raw)
        if isinstance(sent, dict):
            env_id = sent.get("env_id")
            tokens = sent.get("tokens")
            rejected.env_id = env_id if type(env_id) is int else None
            rejected.size = len(tokens) if isinstance(tokens, list) else 0
    return rejected


def parse_group(raw: object) -> ScoredGroup:
    """Reads a group as text (`bytes`) or as `json` gives it. Raises `RejectedGroup` with what is
    wrong, and where."""
    try:
        if isinstance(raw, bytes) and not raw.isascii():
            raw.decode()  # msgspec does not look at the text of fields that it leaves out
        group = DECODE_GROUP(raw) if isinstance(raw, bytes) else msgspec.convert(raw, Group)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        # `json` takes what msgspec does not (NaN, 1e999, half a surrogate pair), and has the value
        # for the message.
        sent = _plain(raw)
        try:
            group = _converted(sent)
        except msgspec.ValidationError as error:
            raise RejectedGroup(_explained(sent, str(error))) from None
    return _checked(group)


def _converted(sent: Any) -> Group:
    try:
        return msgspec.convert(sent, Group)
    except UnicodeEncodeError:  # of half a surrogate pair in the key of an object
        return msgspec.convert(json.loads(_dumps(sent)), Group)


def _plain(raw: object) -> Any:
    """The group as Python objects."""
    if not isinstance(raw, bytes):
        return raw
    try:
        return json.loads(raw)
    # also for text that is not UTF-8, and integers of 4301 digits
    except (ValueError, RecursionError) as error:
        reason = f"the group is not JSON that can be read ({type(error).__name__}: {error})"
        raise RejectedGroup(reason, UNREADABLE) from None


def _explained(sent: Any, error: str) -> str:
    """msgspec's "Expected `int`, got `bool` - at `$.tokens[0][1]`", with the value seen."""
    expected, _, path = error.partition(" - at `$")
    value = sent
    for field, index in re.findall(r"\.(\w+)|\[(\d+)\]", path):
        value = value[field or int(index)]
    return f"{path[1:-1] or 'the group'} is {short(value)}: {expected[:1].lower()}{expected[1:]}"


def _checked(group: Group) -> ScoredGroup:
    size = len(group.tokens)
    if not size:
        raise RejectedGroup("tokens is empty: a group has at least 1 rollout")
    tokens = [np.fromiter(ids, np.int32, len(ids)) for ids in group.tokens]
    teachers = _teachers(group, [len(ids) for ids in tokens])
    return ScoredGroup(
        tokens=tokens,
        trained=[
            _trained(i, *pair)
            for i, pair in enumerate(zip(_sized("masks", group.masks, size), tokens))
        ],
        scores=_finite("scores", _sized("scores", group.scores, size)).tolist(),
        logprobs=_per_token("inference_logprobs", group.inference_logprobs, tokens, _logprobs),
        advantages=_per_token("advantages", group.advantages, tokens, _finite),
        distill_ids=[ids for ids, _ in teachers],
        distill_logprobs=[logprobs for _, logprobs in teachers],
        overrides=[
            one or Overrides()
            for one in _sized("overrides", group.overrides or [None] * size, size)
        ],
        group_overrides=group.group_overrides or Overrides(),
        generation_params=group.generation_params or Sampling(),
        messages=_messages(group.messages, size),
        images=group.images,
        env_id=group.env_id,
    )


def _sized(name: str, entries: Sequence, size: int, of: str = "rollouts") -> Sequence:
    if len(entries) != size:
        raise RejectedGroup(f"{name} has {len(entries)} entries for {size} {of}")
    return entries


def _trained(i: int, mask: list[int], tokens: np.ndarray) -> np.ndarray:
    """Which tokens the mask marks. An entry is -100, or the token itself."""
    _sized(f"masks[{i}]", mask, len(tokens), "tokens")
    try:
        entries = np.fromiter(mask, np.int32, len(mask))
    except OverflowError:
        entries = np.array(mask, dtype=object)
    trained = entries != MASKED
    good = (entries == tokens) | ~trained
    if not good.all():
        wrong = int(np.argmin(good))
        raise RejectedGroup(
            f"masks[{i}][{wrong}] is {short(mask[wrong])}, neither {MASKED} nor the token id "
            f"{tokens[wrong]}"
        )
    return trained


Check = Callable[[str, list], np.ndarray]


def _per_token(
    name: str, value: Any, tokens: list[np.ndarray], check: Check
) -> list[np.ndarray | None]:
    entries = _sized(name, value or [None] * len(tokens), len(tokens))
    return [
        check(f"{name}[{i}]", _sized(f"{name}[{i}]", one, len(ids), "tokens")) if one else None
        for i, (one, ids) in enumerate(zip(entries, tokens))
    ]


def _floats(entries: list) -> np.ndarray:
    """float64, NaN for null. An integer that float64 cannot hold becomes infinite, whatever its
    sign."""
    try:
        with suppress(TypeError):  # of a null; where there is none, this is faster
            return np.fromiter(entries, np.float64, len(entries))
        return np.array(entries, dtype=np.float64)
    except OverflowError:
        return np.array(
            [math.inf if e is not None and abs(e) > FLOAT32_MAX else e for e in entries], np.float64
        )


def _finite(name: str, entries: list) -> np.ndarray:
    """`(length,)` float64. Rejects what float32 cannot hold the squares of."""
    values = _floats(entries)
    good = np.abs(values) <= LARGEST
    if not good.all():
        wrong = int(np.argmin(good))
        reason = (
            f"{name}[{wrong}] is {short(entries[wrong])}, not a finite number of at most "
            f"{LARGEST:.3g}"
        )
        raise RejectedGroup(f"{reason}, beyond which sums of squares overflow float32")
    return values


def _logprobs(name: str, entries: list) -> np.ndarray:
    """`(length,)` float32, NaN where there is none: null, below the lowest, or above 0, as Atropos
    pads with 1.0."""
    values = _floats(entries)
    return np.where((values <= 0.0) & (values >= LOWEST_LOGPROB), values, np.nan).astype(np.float32)


def _teachers(
    group: Group, lengths: list[int]
) -> list[tuple[np.ndarray, np.ndarray] | tuple[None, None]]:
    sent = {name: getattr(group, name) for name in ("distill_token_ids", "distill_logprobs")}
    absent = [name for name, value in sent.items() if not value]
    if len(absent) == 1:
        raise RejectedGroup(
            f"{next(name for name in sent if name not in absent)} came without {absent[0]}"
        )
    entries = [
        _sized(name, value or [None] * len(lengths), len(lengths)) for name, value in sent.items()
    ]
    return [_teacher(i, *of_one) for i, of_one in enumerate(zip(*entries, lengths))]


def _teacher(
    i: int, ids: Any, logprobs: Any, length: int
) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
    if not ids and not logprobs:
        return None, None
    ids = [entry or [] for entry in _sized(f"distill_token_ids[{i}]", ids or [], length, "tokens")]
    logprobs = [
        entry or [] for entry in _sized(f"distill_logprobs[{i}]", logprobs or [], length, "tokens")
    ]
    for position, (some, others) in enumerate(zip(ids, logprobs)):
        _sized(f"distill_logprobs[{i}][{position}]", others, len(some), "token ids")
    counts = np.array([len(entry) for entry in ids], dtype=np.int64)
    present = np.arange(counts.max(initial=0)) < counts[:, None]
    padded_ids = np.full(present.shape, -1, dtype=np.int32)
    padded_ids[present] = list(chain.from_iterable(ids))
    padded_logprobs = np.full(present.shape, np.nan, dtype=np.float32)
    padded_logprobs[present] = _logprobs("", list(chain.from_iterable(logprobs)))
    padded_ids[np.isnan(padded_logprobs)] = -1
    return padded_ids, padded_logprobs


def _messages(value: Any, size: int) -> list[str | None]:
    """The JSON text of each rollout's messages, at most 64 KiB: longer conversations lose their
    last messages. They are for human readers only, so no shape of them is an error."""
    if not isinstance(value, list) or len(value) != size:
        return [None] * size
    return [_message_text(messages) if messages else None for messages in value]


def _message_text(messages: Any) -> str | None:
    try:
        text = _dumps(messages)
    except RecursionError:  # nested too deeply to be read by anybody
        return None
    total = len(text.encode())
    if total <= MAX_MESSAGE_BYTES:
        return text
    entries = messages if isinstance(messages, list) else [messages]
    ends = list(accumulate(len(_dumps(entry).encode()) + 2 for entry in entries))
    kept = entries[: bisect_right(ends, MAX_MESSAGE_BYTES - 200)]  # 200 for the note
    left_out = f"{len(entries) - len(kept)} more messages; {total} bytes in all"
    return _dumps([*kept, {"role": "note", "content": left_out}])


def _dumps(value: Any) -> str:
    """JSON. Half a surrogate pair, which UTF-8 cannot hold, becomes a question mark."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace").decode()
