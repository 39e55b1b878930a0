"""The wire: one scored group exactly as the Atropos API delivers it, checked for type and shape.

`intake.py` calls `parse_group` on every group of a pulled batch and hands the result to `schema.rows_of`. Lists of
numbers come as `decode.py` made them, arrays already, or as `json` reads them, from recordings and wherever something
else than numbers is among them. Nothing is cast on the way: `true` is no token, `5.0` neither, and `"5"` no score.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from trl_atropos.rollouts.decode import Unreadable
from trl_atropos.rollouts.environment_names import EnvironmentNames
from trl_atropos.rollouts.messages import messages_of
from trl_atropos.rollouts.teacher import Teacher, teachers
from trl_atropos.rollouts.values import (
    RejectedGroup,
    finite_floats,
    is_absent,
    list_of,
    log_probabilities,
    reject,
    short,
    token_ids,
)

__all__ = ["MASKED", "RejectedGroup", "ScoredGroup", "parse_group"]

MASKED = -100
INT64 = {"ge": -(2**63), "lt": 2**63}

Check = Callable[[str, Any], np.ndarray]
AbsentIfEmpty = BeforeValidator(lambda value: None if is_absent(value) else value)
Temperature = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class Sampling(BaseModel):
    """How the group was sampled, as far as the environment tells."""

    temperature: Temperature | None = None


class Overrides(Sampling):
    """What an environment may ask for one sequence or for a whole group. Its other keys are its own business."""

    set_advantage_to_zero: Annotated[bool, Field(strict=True)] | None = None
    sft: Annotated[bool, Field(strict=True)] | None = None


class _Settings(BaseModel):
    """The small fields of a group. An empty list or object means absent."""

    generation_params: Annotated[Sampling | None, AbsentIfEmpty] = None
    overrides: Annotated[list[Annotated[Overrides | None, AbsentIfEmpty]] | None, AbsentIfEmpty] = None
    group_overrides: Annotated[Overrides | None, AbsentIfEmpty] = None
    env_id: Annotated[int, Field(strict=True, **INT64)] | None = None


@dataclass(frozen=True, eq=False)
class ScoredGroup:
    """
    One group of `n` sequences, prompt and completion together. Per-token arrays are not shifted: entry `i` of each is
    about token `i`. None for a sequence: the environment sent nothing.
    """

    tokens: list[np.ndarray]  # n of (length,) int32
    trained: list[np.ndarray]  # n of (length,) bool, False where the mask is -100
    scores: list[float]  # n, which float32 can hold
    logprobs: list[np.ndarray | None]  # n of (length,) float32, NaN = unknown
    advantages: list[np.ndarray | None]  # n of (length,) float32
    teachers: list[Teacher | None]  # n
    overrides: list[Overrides | None]  # n
    group_overrides: Overrides | None
    generation_params: Sampling | None
    messages: list[str | None]  # n JSON texts, see `messages.py`
    images: Any
    env_id: int | None
    environment: str | None  # its name, where that is known
    label: str  # what a message calls the environment, see `EnvironmentNames.label`
    has_ref_logprobs: bool  # which nothing uses

    def asks(self, override: str, i: int) -> bool:
        """Whether sequence `i` or its whole group has `override`, a field of `Overrides` that is true or not."""
        asked = (self.group_overrides, self.overrides[i])
        return any(getattr(one, override) is True for one in asked if one is not None)


def parse_group(raw: object, names: EnvironmentNames | None = None) -> ScoredGroup:
    """One group as delivered. Raises `RejectedGroup` with what is wrong, where, and the value seen."""
    names = names or EnvironmentNames()
    if isinstance(raw, Unreadable):
        reject(f"the group is not JSON that can be read ({raw.reason})")
    if not isinstance(raw, dict):
        reject(f"the group is {short(raw)}, not an object")
    tokens = [token_ids(f"tokens[{i}]", entry) for i, entry in enumerate(list_of("tokens", raw.get("tokens")))]
    if not tokens:
        reject("tokens is empty: a group has at least 1 sequence")
    size = len(tokens)
    settings = _settings(raw)
    return ScoredGroup(
        tokens=tokens,
        trained=[_trained(i, *pair) for i, pair in enumerate(zip(_sized("masks", raw.get("masks"), size), tokens))],
        scores=finite_floats("scores", _sized("scores", raw.get("scores"), size)).tolist(),
        logprobs=_per_token("inference_logprobs", raw, tokens, log_probabilities),
        advantages=_per_token("advantages", raw, tokens, finite_floats),
        teachers=teachers(raw.get("distill_token_ids"), raw.get("distill_logprobs"), [len(ids) for ids in tokens]),
        overrides=_sized("overrides", settings.overrides or [None] * size, size),
        group_overrides=settings.group_overrides,
        generation_params=settings.generation_params,
        messages=messages_of(raw.get("messages"), size),
        images=raw.get("images"),
        env_id=settings.env_id,
        environment=names.name(settings.env_id),
        label=names.label(settings.env_id),
        has_ref_logprobs=not is_absent(raw.get("ref_logprobs")),
    )


def _settings(raw: dict[str, Any]) -> _Settings:
    try:
        return _Settings.model_validate({name: raw.get(name) for name in _Settings.model_fields})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        reject(f"{'.'.join(map(str, first['loc']))}: {first['msg']} (got {short(first['input'])})")


def _sized(name: str, value: Any, size: int) -> list:
    entries = list_of(name, value)
    if len(entries) != size:
        reject(f"{name} has {len(entries)} entries for {size} sequences")
    return entries


def _trained(i: int, mask: Any, tokens: np.ndarray) -> np.ndarray:
    """Which tokens the mask marks. An entry is -100, or the token itself."""
    name = f"masks[{i}]"
    entries = mask if isinstance(mask, np.ndarray) else list_of(name, mask)
    _check_length(name, entries, tokens)
    if isinstance(entries, np.ndarray):
        trained = entries != MASKED
        good = (entries == tokens) | ~trained
        wrong = None if good.all() else int(np.argmin(good))
    else:
        good = [type(entry) is int and entry in (MASKED, token) for entry, token in zip(entries, tokens.tolist())]
        wrong = None if all(good) else good.index(False)
        trained = np.array([entry != MASKED for entry in entries], dtype=bool)
    if wrong is not None:
        value = short(entries[wrong].item() if isinstance(entries, np.ndarray) else entries[wrong])
        reject(f"{name}[{wrong}] is {value}, neither {MASKED} nor the token id {tokens[wrong]}")
    return trained


def _per_token(name: str, raw: dict[str, Any], tokens: list[np.ndarray], check: Check) -> list[np.ndarray | None]:
    value = raw.get(name)
    if is_absent(value):
        return [None] * len(tokens)
    checked: list[np.ndarray | None] = []
    for i, (entries, ids) in enumerate(zip(_sized(name, value, len(tokens)), tokens)):
        if is_absent(entries):
            checked.append(None)
            continue
        checked.append(check(f"{name}[{i}]", entries))
        _check_length(f"{name}[{i}]", entries, ids)
    return checked


def _check_length(name: str, entries: list | np.ndarray, tokens: np.ndarray) -> None:
    if len(entries) != len(tokens):
        reject(f"{name} has {len(entries)} entries for {len(tokens)} tokens")
