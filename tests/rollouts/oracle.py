"""What the door must make of a group, said a second time: plain Python, value by value, nothing of
the package.

`test_fuzz.py` compares the two. `judge` takes a group as `json.loads` reads it and returns the rows
as dicts of plain lists, or why there are none.
"""

import json
import math
import struct
import sys
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
    positions = []
    for value in (ids, logprobs):
        demand(isinstance(value, list) and len(value) == length)
    for some_ids, some_logprobs in zip(ids, logprobs):
        some_ids, some_logprobs = (
            [] if absent(entry) else entry for entry in (some_ids, some_logprobs)
        )
        demand(isinstance(some_ids, list) and isinstance(some_logprobs, list))
        demand(len(some_ids) == len(some_logprobs) and all(map(is_token, some_ids)))
        positions.append([(i, value) for i, value in zip(some_ids, map(logprob, some_logprobs))])
    return positions


def judge(
    group: Any, *, longest: int, sampled_at: float, single: str, vocabulary: int
) -> list[dict[str, Any]]:
    """The rows. Raises `Rejected`."""
    demand(isinstance(group, dict))
    tokens = group.get("tokens")
    demand(isinstance(tokens, list) and len(tokens) > 0)
    count = len(tokens)
    for sequence in tokens:
        demand(isinstance(sequence, list) and all(map(is_token, sequence)))
    masks, scores = (
        per_sequence(group.get("masks"), count),
        per_sequence(group.get("scores"), count),
    )
    for mask, sequence in zip(masks, tokens):
        demand(isinstance(mask, list) and len(mask) == len(sequence))
        for entry, token in zip(mask, sequence):
            demand(is_integer(entry) and (entry == -100 or entry == token))
    demand(all(map(is_bounded, scores)))
    known = [
        per_token(v, len(t)) for v, t in zip(optional(group, "inference_logprobs", count), tokens)
    ]
    known = [None if values is None else [logprob(value) for value in values] for values in known]
    advantages = [
        per_token(v, len(t)) for v, t in zip(optional(group, "advantages", count), tokens)
    ]
    for values in advantages:
        demand(values is None or all(map(is_bounded, values)))
    ids, given = group.get("distill_token_ids"), group.get("distill_logprobs")
    demand(absent(ids) == absent(given))
    pairs = zip(
        optional(group, "distill_token_ids", count),
        optional(group, "distill_logprobs", count),
        tokens,
    )
    teachers = [teacher(i, v, len(sequence)) for i, v, sequence in pairs]
    asked = [override(value) for value in optional(group, "overrides", count)]
    of_group = override(group.get("group_overrides"))
    params = {} if absent(group.get("generation_params")) else group["generation_params"]
    demand(isinstance(params, dict))
    temperature(params)
    env_id = group.get("env_id")
    demand(env_id is None or (is_integer(env_id) and -(2**63) <= env_id < 2**63))

    rejected = any(differs(value, sampled_at) for value in [of_group, *asked])
    mean = math.fsum(map(to_float32, scores)) / count
    squares = math.fsum((to_float32(score) - mean) ** 2 for score in scores)
    spoilt = (
        shows_something(group.get("images"))
        or (
            count > 1
            and len(tokens[0]) > 1
            and all(sequence == list(range(len(tokens[0]))) for sequence in tokens)
        )
        or any(token >= vocabulary for sequence in tokens for token in sequence)
        or any(i >= vocabulary for one in teachers if one for position in one for i, _ in position)
        or differs(params, sampled_at)
    )
    sft = [bool(of_group.get("sft")) or bool(own.get("sft")) for own in asked]
    alone = count == 1 and advantages[0] is None and not sft[0]
    spoilt = spoilt or (alone and single == "refuse")
    demand(not spoilt and not rejected)

    rows = []
    for i, sequence in enumerate(tokens):
        last = max((at for at in range(len(sequence)) if masks[i][at] != -100), default=0)
        if len(sequence) > longest or last == 0:
            continue
        first = 1
        while masks[i][first] == -100:
            first += 1
        if masks[i][0] != -100:
            first = 1
        places = range(first, last + 1)
        trained = [masks[i][at] != -100 for at in places]
        unknown = known[i] is None or sft[i]
        rows.append(
            {
                "prompt_ids": sequence[:first],
                "completion_ids": [sequence[at] for at in places],
                "mask": trained,
                "logprobs": [
                    known[i][at] if t and not unknown else math.nan
                    for at, t in zip(places, trained)
                ],
                "score": float(scores[i]),
                "group_mean": 0.0 if alone and single == "raw" else mean,
                "group_std": math.sqrt(squares / (count - 1)) if count > 1 else 0.0,
                "token_advantages": (
                    None
                    if advantages[i] is None or sft[i]
                    else [to_float32(advantages[i][at]) for at in places]
                ),
                "zero_advantage": any(
                    one.get("set_advantage_to_zero") for one in (of_group, asked[i])
                )
                or (alone and single == "zero"),
                "raw_advantage": alone and single == "raw",
                "sft": sft[i],
                "rewards": {**parts(of_group), **parts(asked[i])} or None,
                "env_id": env_id,
                "distill": None
                if teachers[i] is None
                else [pairs_of(teachers[i][at]) for at in places],
                "messages": messages_of(group.get("messages"), i, count),
            }
        )
    return rows


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
