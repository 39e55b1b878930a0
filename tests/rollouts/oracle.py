"""What the door must make of a group, said a second time: plain Python, value by value, nothing of
the package.

`test_fuzz.py` compares the two. `judge` takes a group as `json.loads` reads it and returns the rows
as dicts of plain lists, or why there are none.
"""

import json
import math
import struct
import sys
from dataclasses import dataclass
from typing import Any

LARGEST = 1099511627776  # of scores and advantages, whose squares float32 must be able to add up
LOWEST = -10000  # nats of a log-probability that is known


class Rejected(Exception):
    """The group must be left out, and the run goes on."""


def demand(condition: bool) -> None:
    if not condition:
        raise Rejected


def absent(value: Any) -> bool:
    return value is None or value == [] or value == {}


def to_float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return is_integer(value) or isinstance(value, float)


def is_bounded(value: Any) -> bool:
    return is_number(value) and -LARGEST <= value <= LARGEST  # false for NaN


def is_token(value: Any) -> bool:
    return is_integer(value) and 0 <= value < 2**31


def logprob(value: Any) -> float:
    demand(value is None or is_number(value))
    known = value is not None and LOWEST <= value <= 0
    return to_float32(value) if known else math.nan


def override(value: Any) -> dict[str, Any]:
    if absent(value):
        return {}
    demand(isinstance(value, dict))
    for name in ("set_advantage_to_zero", "sft"):
        demand(value.get(name) is None or isinstance(value.get(name), bool))
    temperature(value)
    return value


def temperature(value: dict[str, Any]) -> float | None:
    asked = value.get("temperature")
    demand(asked is None or (is_number(asked) and abs(asked) <= sys.float_info.max))
    return asked


def parts(value: dict[str, Any]) -> dict[str, float]:
    """The parts of a reward that can be metrics."""
    sent = value.get("rewards")
    if not isinstance(sent, dict):
        return {}
    return {name: float(part) for name, part in sent.items() if is_part(name, part)}


def is_part(name: str, part: Any) -> bool:
    letters = [letter.isalnum() or letter == "_" for letter in name]
    marks = [letter in " ./@%+:=()-" for letter in name]
    named = 0 < len(name) <= 100 and letters[0] and all(map(max, letters, marks))
    return named and (isinstance(part, bool) or is_bounded(part))


def per_sequence(value: Any, count: int) -> list:
    demand(isinstance(value, list) and len(value) == count)
    return value


def per_token(value: Any, length: int) -> list | None:
    if absent(value):
        return None
    demand(isinstance(value, list) and len(value) == length)
    return value


def optional(group: dict, name: str, count: int) -> list:
    return [None] * count if absent(group.get(name)) else per_sequence(group[name], count)


def teacher(ids: Any, logprobs: Any, length: int) -> list[list[tuple[int, float]]] | None:
    if absent(ids) and absent(logprobs):
        return None
    for values in (ids, logprobs):
        demand(isinstance(values, list) and len(values) == length)
    positions = []
    for some_ids, some_logprobs in zip(ids, logprobs):
        some_ids = [] if absent(some_ids) else some_ids
        some_logprobs = [] if absent(some_logprobs) else some_logprobs
        demand(isinstance(some_ids, list) and isinstance(some_logprobs, list))
        demand(len(some_ids) == len(some_logprobs) and all(map(is_token, some_ids)))
        positions.append(list(zip(some_ids, map(logprob, some_logprobs))))
    return positions


@dataclass
class Sequence:
    """What a group says of one of its sequences. What it does not say is None, and an override
    without entries."""

    tokens: list[int]
    mask: list[int]
    score: float
    logprobs: list[float] | None
    advantages: list[float] | None
    teacher: list[list[tuple[int, float]]] | None
    overrides: list[dict[str, Any]]  # of the group and its own
    messages: str | None

    def asks(self, name: str) -> bool:
        return any(override.get(name) for override in self.overrides)

    def completion(self) -> range | None:
        """The places of its completion: from the first trained token to the last one. A sequence
        whose first token is trained has that token alone as its prompt."""
        trained = [place for place, entry in enumerate(self.mask) if entry != -100]
        if not trained or trained[-1] == 0:
            return None
        first = max(trained[0], 1)
        return range(first, trained[-1] + 1)


def judge(
    group: Any, *, longest: int, sampled_at: float, single: str, vocabulary: int
) -> list[dict[str, Any]]:
    """
    Returns the rows of a group. Raises `Rejected` if it must be left out.

    Args:
        longest: tokens that a row may have.
        sampled_at: the temperature of the trainer.
        single: what becomes of a group of one: "raw", "zero" or "refuse".
        vocabulary: the number of tokens.
    """
    demand(isinstance(group, dict))
    env_id = group.get("env_id")
    demand(env_id is None or (is_integer(env_id) and -(2**63) <= env_id < 2**63))
    of_group = override(group.get("group_overrides"))
    sequences = read_sequences(group, of_group)
    demand_temperature(group, sequences, sampled_at)
    demand(not shows_something(group.get("images")))
    demand(not are_placeholders(sequences))
    for sequence in sequences:
        demand_vocabulary(sequence, vocabulary)
    first = sequences[0]
    alone = len(sequences) == 1 and first.advantages is None and not first.asks("sft")
    demand(not (alone and single == "refuse"))

    scores = [to_float32(sequence.score) for sequence in sequences]
    mean = math.fsum(scores) / len(scores)
    std = 0.0
    if len(scores) > 1:
        squares = math.fsum((score - mean) ** 2 for score in scores)
        std = math.sqrt(squares / (len(scores) - 1))
    shared = {
        "group_mean": 0.0 if alone and single == "raw" else mean,
        "group_std": std,
        "raw_advantage": alone and single == "raw",
        "env_id": env_id,
    }
    rows = []
    for sequence in sequences:
        places = sequence.completion()
        if places is None or len(sequence.tokens) > longest:
            continue
        row = row_of(sequence, places) | shared
        if alone and single == "zero":
            row["zero_advantage"] = True
        rows.append(row)
    return rows


def read_sequences(group: dict, of_group: dict[str, Any]) -> list[Sequence]:
    tokens = group.get("tokens")
    demand(isinstance(tokens, list) and len(tokens) > 0)
    count = len(tokens)
    masks = per_sequence(group.get("masks"), count)
    scores = per_sequence(group.get("scores"), count)
    logprobs = optional(group, "inference_logprobs", count)
    advantages = optional(group, "advantages", count)
    demand(absent(group.get("distill_token_ids")) == absent(group.get("distill_logprobs")))
    teacher_ids = optional(group, "distill_token_ids", count)
    teacher_logprobs = optional(group, "distill_logprobs", count)
    overrides = optional(group, "overrides", count)
    sequences = []
    for i in range(count):
        demand(isinstance(tokens[i], list) and all(map(is_token, tokens[i])))
        length = len(tokens[i])
        sequence = Sequence(
            tokens=tokens[i],
            mask=masks[i],
            score=scores[i],
            logprobs=per_token(logprobs[i], length),
            advantages=per_token(advantages[i], length),
            teacher=teacher(teacher_ids[i], teacher_logprobs[i], length),
            overrides=[of_group, override(overrides[i])],
            messages=messages_of(group.get("messages"), i, count),
        )
        demand_values(sequence)
        sequences.append(sequence)
    return sequences


def demand_values(sequence: Sequence) -> None:
    mask = sequence.mask
    demand(isinstance(mask, list) and len(mask) == len(sequence.tokens))
    for entry, token in zip(mask, sequence.tokens):
        demand(is_integer(entry) and entry in (-100, token))
    demand(is_bounded(sequence.score))
    if sequence.logprobs is not None:
        sequence.logprobs = [logprob(value) for value in sequence.logprobs]
    if sequence.advantages is not None:
        demand(all(map(is_bounded, sequence.advantages)))


def demand_temperature(group: dict, sequences: list[Sequence], sampled_at: float) -> None:
    params = group.get("generation_params")
    if absent(params):
        params = {}
    demand(isinstance(params, dict))
    temperature(params)
    demand(not differs(params, sampled_at))
    for sequence in sequences:
        for asked in sequence.overrides:
            demand(not differs(asked, sampled_at))


def demand_vocabulary(sequence: Sequence, vocabulary: int) -> None:
    demand(all(token < vocabulary for token in sequence.tokens))
    for position in sequence.teacher or []:
        demand(all(token < vocabulary for token, _ in position))


def are_placeholders(sequences: list[Sequence]) -> bool:
    """Whether all have the tokens 0, 1, 2, ..., which Atropos sends for a server without tokens."""
    length = len(sequences[0].tokens)
    if len(sequences) == 1 or length <= 1:
        return False
    return all(sequence.tokens == list(range(length)) for sequence in sequences)


def row_of(sequence: Sequence, places: range) -> dict[str, Any]:
    trained = [sequence.mask[place] != -100 for place in places]
    sft = sequence.asks("sft")
    logprobs = [math.nan] * len(places)
    if sequence.logprobs is not None and not sft:
        for i, place in enumerate(places):
            if trained[i]:
                logprobs[i] = sequence.logprobs[place]
    advantages = None
    if sequence.advantages is not None and not sft:
        advantages = [to_float32(sequence.advantages[place]) for place in places]
    distill = None
    if sequence.teacher is not None:
        distill = [pairs_of(sequence.teacher[place]) for place in places]
    rewards = {}
    for override in sequence.overrides:
        rewards |= parts(override)
    return {
        "prompt_ids": sequence.tokens[: places.start],
        "completion_ids": sequence.tokens[places.start : places.stop],
        "mask": trained,
        "logprobs": logprobs,
        "score": float(sequence.score),
        "token_advantages": advantages,
        "zero_advantage": sequence.asks("set_advantage_to_zero"),
        "sft": sft,
        "rewards": rewards or None,
        "distill": distill,
        "messages": sequence.messages,
    }


def differs(value: dict[str, Any], sampled_at: float) -> bool:
    return value.get("temperature") is not None and abs(value["temperature"] - sampled_at) > 1e-6


def shows_something(images: Any) -> bool:
    if isinstance(images, list):
        return any(shows_something(image) for image in images)
    return bool(images)


def pairs_of(position: list[tuple[int, float]]) -> list[tuple[int, float]]:
    return [(i, value) for i, value in position if not math.isnan(value)]


def messages_of(messages: Any, i: int, count: int) -> Any:
    there = isinstance(messages, list) and len(messages) == count and not absent(messages[i])
    return json.dumps(messages[i]) if there else None
