"""Batches as no environment should send them: `malformed_bodies` draws the bytes of a reply of `GET
/batch`.

A good batch is made and then broken: values of the wrong type or size anywhere, entries too many or
too few, lists within lists, fields dropped, emptied or doubled, text cut off or overwritten. Some
come out as good as before.
"""

import copy
import json
import math
import random
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

PER_TOKEN = (
    "tokens",
    "masks",
    "inference_logprobs",
    "advantages",
    "distill_token_ids",
    "distill_logprobs",
)
FIELDS = (
    *PER_TOKEN,
    "scores",
    "overrides",
    "group_overrides",
    "generation_params",
    "images",
    "env_id",
    "messages",
)
NUMBERS = [
    0,
    1,
    -1,
    7,
    -100,
    255,
    256,
    2**31 - 1,
    2**31,
    2**32 + 7,
    2**63 - 1,
    2**63,
    2**64,
    -(2**63) - 1,
    10**30,
]
NUMBERS += [
    10**400,
    -(10**400),
    5.0,
    7.0,
    -100.0,
    -0.0,
    0.5,
    1e-320,
    -1e-320,
    1e38,
    3.5e38,
    -3.5e38,
    1e39,
    1e308,
]
NUMBERS += [1e12, -1e12, 1.2e12, 1e15, -9999.0, -10001.0, -1e9]
JUNK = [
    *NUMBERS,
    math.nan,
    math.inf,
    -math.inf,
    True,
    False,
    None,
    "",
    "5",
    "[",
    "\\u005b",
    '"',
    "é✓😀",
    "\ud83d",
    "\x00",
]
JUNK += [[], [1], [[1]], [None], {}, {"a": [1]}, {"[": "]"}, [[], [7, 8]]]

PARTS = {"a": 1.0, "pass@1": False, "none": None}

Group = dict[str, Any]


def junk(rng: random.Random, *others: Any) -> Any:
    """Something else each time: what one fault puts into a group, another one changes."""
    return copy.deepcopy(rng.choice([*others, *JUNK]))


def good_group(rng: random.Random) -> Group:
    """Everything that the protocol has, each field there or not."""
    sizes = [rng.randint(1, 6) for _ in range(rng.randint(1, 4))]
    tokens = [[rng.randrange(256) for _ in range(size)] for size in sizes]
    group: Group = {
        "tokens": tokens,
        "masks": [
            [token if rng.random() < 0.6 else -100 for token in sequence] for sequence in tokens
        ],
        "scores": [rng.choice([0, 1, round(rng.gauss(0, 3), 3)]) for _ in sizes],
        "env_id": rng.choice([0, 1, None]),
    }
    if rng.random() < 0.8:
        choices = [-0.5, -1.25, -17, 0, 1.0, -1e-7]
        group["inference_logprobs"] = [
            [rng.choice(choices) for _ in sequence] for sequence in tokens
        ]
    if rng.random() < 0.3:
        group["advantages"] = [[round(rng.gauss(0, 1), 2) for _ in sequence] for sequence in tokens]
    if rng.random() < 0.3:
        counts = [[rng.randrange(4) for _ in sequence] for sequence in tokens]
        group["distill_token_ids"] = [
            [[rng.randrange(256) for _ in range(k)] for k in one] for one in counts
        ]
        group["distill_logprobs"] = [
            [[-rng.random() for _ in range(k)] for k in one] for one in counts
        ]
    if rng.random() < 0.3:
        group["messages"] = [
            [{"role": "user", "content": rng.choice(["hi [1]", "é\\u005b", '"', ""])}]
            for _ in sizes
        ]
    if rng.random() < 0.3:
        group["overrides"] = [
            rng.choice(
                [{}, None, {"set_advantage_to_zero": True}, {"sft": True}, {"rewards": PARTS}]
            )
            for _ in sizes
        ]
    if rng.random() < 0.2:
        group["group_overrides"] = rng.choice(
            [{}, {"sft": True}, {"temperature": 1.0}, {"teacher_top_k": 5}, {"rewards": {"a": 3}}]
        )
    if rng.random() < 0.2:
        group["generation_params"] = rng.choice([{}, {"temperature": 1}, {"max_tokens": 5}])
    for name in rng.sample(FIELDS[3:], 2):
        group.setdefault(name, rng.choice([None, [], {}]))
    return group


# ------------------------------------------------------------------------------------- of one group


def _a_list_in(rng: random.Random, value: Any) -> list | None:
    """A list somewhere in `value`, mostly deep down."""
    while isinstance(value, list) and value and isinstance(value[0], list) and rng.random() < 0.8:
        value = rng.choice(value)
    return value if isinstance(value, list) else None


def _count(group: Group) -> int:
    return len(group["scores"]) if isinstance(group.get("scores"), list) else 2


def put_junk(rng: random.Random, group: Group) -> None:
    entries = _a_list_in(rng, group.get(rng.choice(FIELDS)))
    if entries:
        entries[rng.randrange(len(entries))] = junk(rng)


def put_number(rng: random.Random, group: Group) -> None:
    entries = _a_list_in(rng, group.get(rng.choice(PER_TOKEN)))
    if entries:
        entries[rng.randrange(len(entries))] = rng.choice(
            [*NUMBERS, math.nan, math.inf, -math.inf, True]
        )


def put_token_everywhere(rng: random.Random, group: Group) -> None:
    """So that the mask agrees with a token that is none."""
    if isinstance(group.get("tokens"), list) and isinstance(group.get("masks"), list):
        value = junk(rng)
        for name in ("tokens", "masks"):
            if group[name] and isinstance(group[name][0], list) and group[name][0]:
                group[name][0][-1] = value


def lengthen_or_shorten(rng: random.Random, group: Group) -> None:
    entries = _a_list_in(rng, group.get(rng.choice(FIELDS)))
    if entries is not None and rng.random() < 0.5:
        entries.append(junk(rng, entries[-1] if entries else 0))
    elif entries:
        entries.pop(rng.randrange(len(entries)))


def nest(rng: random.Random, group: Group) -> None:
    """Keeps the number of entries, of numbers, or both."""
    entries = _a_list_in(rng, group.get(rng.choice(PER_TOKEN)))
    if not entries:
        return
    how = rng.randrange(4)
    if how == 0:
        entries[:] = [[entry] for entry in entries]
    elif how == 1:
        entries[:] = [list(entries)]
    elif how == 2:
        entries[rng.randrange(len(entries))] = [entries[0]]
    elif len(entries) > 1:
        entries[-2:] = [[], entries[-2:]]


def change_field(rng: random.Random, group: Group) -> None:
    group[rng.choice(FIELDS)] = junk(rng, [[]] * 2, [{}] * 2, [["x"]])


def drop_field(rng: random.Random, group: Group) -> None:
    group.pop(rng.choice(FIELDS), None)


def set_override(rng: random.Random, group: Group) -> None:
    setting = {
        rng.choice(["sft", "set_advantage_to_zero", "temperature", "other"]): junk(
            rng, 1.0, 0.7, True
        )
    }
    if rng.random() < 0.3:
        name = rng.choice(["a", "b c", " ", "\n", "\ud83d", "é", "x" * 101])
        setting = {"rewards": junk(rng, PARTS, {name: 1.0}, {name: junk(rng), "b": junk(rng)})}
    where = rng.choice(["overrides", "group_overrides", "generation_params"])
    group[where] = (
        [dict(setting) for _ in range(_count(group))] if where == "overrides" else setting
    )


def flip_masks(rng: random.Random, group: Group) -> None:
    for mask in group["masks"] if isinstance(group.get("masks"), list) else []:
        if isinstance(mask, list):
            mask[:] = [-100 if rng.random() < 0.5 else entry for entry in mask]


def add_unknown(rng: random.Random, group: Group) -> None:
    deep: Any = junk(rng)
    for _ in range(rng.choice([1, 30, 300])):
        deep = [deep]
    group[rng.choice(["new", "[", "images", "ref_logprobs", "messages"])] = deep


def send_placeholders(rng: random.Random, group: Group) -> None:
    size = rng.randint(1, 4)
    group["tokens"] = [list(range(size)) for _ in range(_count(group))]
    group["masks"] = [[-100, *range(1, size)] for _ in group["tokens"]]


GROUP_FAULTS: list[Callable[[random.Random, Group], None]] = [
    put_junk, put_junk, put_number, put_number, put_token_everywhere, lengthen_or_shorten, nest, change_field,
    drop_field, set_override, flip_masks, add_unknown, send_placeholders,
]  # fmt: skip


# -------------------------------------------------------------------------------------- of the text


def cut(rng: random.Random, body: bytes) -> bytes:
    return body[: rng.randrange(len(body) + 1)]


def overwrite(rng: random.Random, body: bytes) -> bytes:
    at = rng.randrange(len(body) + 1)
    piece = rng.choice(
        [b"\xff", b"\x00", b"[", b"]", b",", b'"', b"\\", b"NaN", b"1e999", b" ", b"{", b"}", b"-"]
    )
    return body[:at] + piece + body[at + rng.randrange(2) :]


def double_a_field(rng: random.Random, body: bytes) -> bytes:
    name = rng.choice(FIELDS)
    field = json.dumps({name: rng.choice([[[1, 2]], [[[1]]], None, [0, 1], [[], []]])})[1:-1]
    return body.replace(b'{"', f'{{{field},"'.encode(), rng.randint(1, 2))


def escape_brackets(rng: random.Random, body: bytes) -> bytes:
    name = rng.choice([b'"tokens"', b'"\\u0074okens"'])
    return body.replace(b"[1]", b"\\u005b1]").replace(b'"tokens"', name)


def add_after_the_batch(rng: random.Random, body: bytes) -> bytes:
    more = rng.choice([b"{}", b"]", b',{"tokens":', b" ", b"\xef\xbb\xbf"])
    return rng.choice(
        [body + more, more + body, body[:-1] + b',"status":"error"}', body[:-1] + b',"batch":[]}']
    )


TEXT_FAULTS = [cut, overwrite, overwrite, double_a_field, escape_brackets, add_after_the_batch]


def build_body(
    seed: int, faults: list[tuple[int, int]], text_faults: list[tuple[int, int]]
) -> bytes:
    """
    Args:
        seed: of the good batch.
        faults: which of `GROUP_FAULTS`, and a seed for each.
        text_faults: the same of `TEXT_FAULTS`.
    """
    rng = random.Random(seed)
    groups: list[Any] = [good_group(rng) for _ in range(rng.randint(1, 3))]
    for which, fault_seed in faults:
        fault_rng = random.Random(fault_seed)
        GROUP_FAULTS[which](fault_rng, fault_rng.choice(groups))
    if rng.random() < 0.02:
        groups[0] = junk(rng)
    # Two in three as the API writes it.
    separators = rng.choice([(",", ":"), (",", ":"), (" , ", " : ")])
    body = json.dumps({"batch": groups}, separators=separators, ensure_ascii=rng.random() < 0.5)
    encoded = body.encode("utf-8", "surrogatepass")
    for which, fault_seed in text_faults:
        encoded = TEXT_FAULTS[which](random.Random(fault_seed), encoded)
    return encoded


def _faults(kinds: int, most: int) -> st.SearchStrategy:
    return st.lists(st.tuples(st.integers(0, kinds - 1), st.integers(0, 2**16)), max_size=most)


malformed_bodies = st.builds(
    build_body, st.integers(0, 2**20), _faults(len(GROUP_FAULTS), 3), _faults(len(TEXT_FAULTS), 1)
)
