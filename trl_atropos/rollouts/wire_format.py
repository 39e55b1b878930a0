"""A scored group as an environment sends it: its fields and their types, and the keys of its
overrides that nobody here knows.

`wire.py` reads groups by these types.
"""

import json
import sys
from reprlib import repr as short
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

from trl_atropos.rollouts.wire_values import Number

INT32_MAX = 2**31 - 1

MAX_FLOAT = sys.float_info.max
TokenId = Annotated[int, Meta(ge=0, le=INT32_MAX)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Finite = Annotated[float, Meta(ge=-MAX_FLOAT, le=MAX_FLOAT)]
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
    """Requests of an environment for one rollout or for a whole group. Other keys have no effect,
    and are named once (`ScoredGroup.unknown_overrides`)."""

    set_advantage_to_zero: bool | None = None
    sft: bool | None = None
    evaluation: bool | None = None
    rewards: Any = None  # named parts of the score, which `reward_parts.py` checks
    group_size: Any = None  # of a group, for Atropos itself


class Branch(Struct):
    """A further path of a rollout: the first `at` tokens of the rollout's path `of`, then `tokens`.
    Path 0 is the rollout's own tokens, path 1 its first branch. With `at` 0, it is a context of its
    own. The other fields are those of `Group`, for one path."""

    of: int
    at: int
    tokens: list[TokenId]
    masks: list[int]
    inference_logprobs: list[Number | None] | Nothing = None
    advantages: list[Number] | Nothing = None
    distill_token_ids: list[list[TokenId] | Nothing] | Nothing = None
    distill_logprobs: list[list[Number | None] | Nothing] | Nothing = None


class RolloutOverrides(Overrides):
    """Requests for one rollout, and what a group's own fields have no place for."""

    branches: list[Branch] | None = None
    # Rows of a group with the same value are one rollout (`episodes.py`).
    episode: str | int | None = None
    # of the first path, if the group has none: Atropos' `collect_trajectories` drops them
    inference_logprobs: list[Number | None] | Nothing = None


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
    overrides: list[RolloutOverrides | Empty] | Nothing = None
    group_overrides: Overrides | Empty = None
    generation_params: Sampling | Empty = None
    env_id: Int64 | None = None
    messages: Any = None
    images: Any = None


class KnownOverrides(Overrides, forbid_unknown_fields=True):
    """Overrides of which each key is known."""


class KnownBranch(Branch, forbid_unknown_fields=True):
    """A branch of which each key is known."""


class KnownRolloutOverrides(RolloutOverrides, forbid_unknown_fields=True):
    """Overrides of one rollout of which each key is known."""

    branches: list[KnownBranch] | None = None


class KnownGroup(Group):
    """A group in whose overrides each key is known. Most groups are such. To read them as such
    costs nothing, and to look through the keys of the others takes half as long as to read them."""

    overrides: list[KnownRolloutOverrides | Empty] | Nothing = None
    group_overrides: KnownOverrides | Empty = None


class BatchReply(Struct):
    """`batch` is None while no batch can be assembled; `status` is "error" when no trainer is
    registered."""

    batch: list[Any] | None
    status: Literal["error"] | None = None


# ------------------------------------------------------------------- keys that nobody here knows


class Keys(Struct):
    """The overrides of a group, by their keys."""

    overrides: list[dict[str, Raw] | list | None] | dict | None = None
    group_overrides: dict[str, Raw] | list | None = None


DECODE_KEYS = msgspec.json.Decoder(Keys).decode
DECODE_BRANCHES = msgspec.json.Decoder(list[dict[str, Raw]] | None).decode
KNOWN_OF_GROUP = {*Overrides.__struct_fields__}
KNOWN_OF_ROLLOUT = {*RolloutOverrides.__struct_fields__}
KNOWN_OF_BRANCH = {*Branch.__struct_fields__}


def unknown_overrides(sent: Any) -> list[str]:
    """Returns the keys of a group's overrides that have no effect, such as `brnaches` and
    `branches[].logprobs`. `sent` is the group as text (`bytes`) or as Python objects."""
    if isinstance(sent, bytes):
        try:
            keys = DECODE_KEYS(sent)
            return _keys_beyond_ours(keys.overrides, keys.group_overrides)
        except (msgspec.MsgspecError, UnicodeError):  # of half a surrogate pair in a key
            sent = json.loads(sent)
    return _keys_beyond_ours(sent.get("overrides"), sent.get("group_overrides"))


def _keys_beyond_ours(overrides: Any, group_overrides: Any) -> list[str]:
    unknown: set[str] = set()
    if group_overrides:
        unknown.update(group_overrides.keys() - KNOWN_OF_GROUP)
    for fields in overrides or []:
        if not fields:
            continue
        unknown.update(fields.keys() - KNOWN_OF_ROLLOUT)
        branches = fields.get("branches")
        if isinstance(branches, Raw):
            branches = DECODE_BRANCHES(branches)
        for branch in branches or []:
            keys_of_branch = branch.keys() - KNOWN_OF_BRANCH
            unknown.update(f"branches[].{key}" for key in keys_of_branch)
    return sorted(short(key) for key in unknown)
