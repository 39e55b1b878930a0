"""The wire: one scored group exactly as the Atropos API delivers it, typed and checked for shape.

`intake.py` calls `parse_group` on every group of a pulled batch and hands the result to `schema.rows_of`.
"""

from typing import Annotated, Any

import torch
from pydantic import BaseModel, BeforeValidator, Field, ValidationError

MASKED = -100


class RejectedGroup(ValueError):
    """One group cannot be used. `kind` is a short constant to count by, the message has the values seen."""

    def __init__(self, kind: str, reason: str):
        super().__init__(reason)
        self.kind = kind


def _absent_if_empty(value: Any) -> Any:
    return None if isinstance(value, list | dict) and not value else value


FLOAT32_MAX = torch.finfo(torch.float32).max
AbsentIfEmpty = BeforeValidator(_absent_if_empty)
Token = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
MaskEntry = Annotated[int, Field(strict=True, ge=MASKED, lt=2**31)]
Finite32 = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=-FLOAT32_MAX, le=FLOAT32_MAX)]
Logprobs = Annotated[list[Annotated[float, Field(strict=True)] | None] | None, AbsentIfEmpty]
TokenAdvantages = Annotated[list[Finite32] | None, AbsentIfEmpty]


class Sampling(BaseModel):
    """How the group was sampled, as far as the environment tells."""

    temperature: float | None = None


class Overrides(Sampling):
    """What an environment may ask for one sequence or for a whole group. Its other keys are its own business."""

    set_advantage_to_zero: bool | None = None
    sft: bool | None = None


class ScoredGroup(BaseModel):
    """
    One group of `n` sequences, as one element of `GET /batch` holds it. An empty list or dict means absent.

    `tokens`, `masks`, `inference_logprobs` and `advantages` are `[n][length]`, unpadded, prompt and completion
    together, not shifted: entry `i` of each is about token `i`. `messages` is for human readers and is not read.
    """

    tokens: list[list[Token]] = Field(min_length=1)
    masks: list[list[MaskEntry]]
    scores: list[Finite32]
    advantages: Annotated[list[TokenAdvantages] | None, AbsentIfEmpty] = None
    inference_logprobs: Annotated[list[Logprobs] | None, AbsentIfEmpty] = None
    generation_params: Annotated[Sampling | None, AbsentIfEmpty] = None
    overrides: Annotated[list[Overrides | None] | None, AbsentIfEmpty] = None
    group_overrides: Annotated[Overrides | None, AbsentIfEmpty] = None
    images: Any = None
    env_id: int | None = None
    ref_logprobs: Annotated[Any, AbsentIfEmpty] = None
    distill_token_ids: Annotated[Any, AbsentIfEmpty] = None
    distill_logprobs: Annotated[Any, AbsentIfEmpty] = None


def parse_group(raw: object) -> ScoredGroup:
    """Validate one group off the wire. Raises `RejectedGroup` with what is wrong and where."""
    try:
        group = ScoredGroup.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the group"
        value = repr(first["input"])[:80]
        raise RejectedGroup("malformed", f"{where}: {first['msg']} (got {value})") from None
    for name in ("masks", "scores", "advantages", "inference_logprobs", "overrides"):
        per_sequence = getattr(group, name)
        if per_sequence is not None and len(per_sequence) != len(group.tokens):
            sizes = f"{len(per_sequence)} entries for {len(group.tokens)} sequences"
            raise RejectedGroup("malformed", f"{name} has {sizes}")
    for i, tokens in enumerate(group.tokens):
        _check_sequence(group, i, len(tokens))
    return group


def _check_sequence(group: ScoredGroup, i: int, length: int) -> None:
    """Raises `RejectedGroup` if a per-token list of sequence `i` does not fit its tokens."""
    for name in ("masks", "advantages", "inference_logprobs"):
        lists = getattr(group, name)
        if lists is not None and lists[i] is not None and len(lists[i]) != length:
            raise RejectedGroup("malformed", f"{name}[{i}] has {len(lists[i])} entries for {length} tokens")
    for position, (token, mask) in enumerate(zip(group.tokens[i], group.masks[i])):
        if mask not in (MASKED, token):
            expected = f"neither {MASKED} nor the token id {token}"
            raise RejectedGroup("malformed", f"masks[{i}][{position}] is {mask}, {expected}")
