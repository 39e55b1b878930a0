"""What the door of sessions makes of a body, and what the page says about it. Without a server: what
one does with a call is in `test_sessions.py`."""

import json
import re

import pytest

from tests.house.docs_pages import Page
from trl_atropos.protocol import SessionQuery
from trl_atropos.server.plane import Refused
from trl_atropos.server.session_door import (
    DROPPED_FIELDS,
    MAX_BODY,
    METHODS,
    REFUSED_FIELDS,
    CallRefused,
    asked_for,
    has_token_ids,
    parse,
)
from trl_atropos.server.sessions import query_in

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize(
    ("body", "route", "asked"),
    [
        ({}, CHAT, (1, 512)),  # whatever fits
        ({"max_tokens": 9}, CHAT, (1, 9)),
        ({"max_tokens": 9, "max_completion_tokens": 12}, CHAT, (1, 12)),
        ({"max_tokens": 9000, "n": 3}, CHAT, (3, 512)),
        ({"max_tokens": 0, "n": 0}, CHAT, (1, 1)),
        ({"max_output_tokens": 7}, "/v1/responses", (1, 7)),
        ({"prompt": "ab"}, COMPLETIONS, (1, 16)),
        ({"prompt": ["a", "b"], "n": 2, "max_tokens": 5}, COMPLETIONS, (4, 5)),
        ({"prompt": [1, 2, 3], "max_tokens": 5}, COMPLETIONS, (1, 5)),
        ({"prompt": [[1, 2], [3]], "max_tokens": 5}, COMPLETIONS, (2, 5)),
    ],
)
def test_call_asks_for_at_most_so_many_tokens(body, route, asked):
    assert asked_for(body, route, 512) == asked


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [(None, False), ("ab", False), (["a", "b"], False), ([1, 2], True), ([[1], "a"], True)],
)
def test_prompt_of_token_ids_is_known(prompt, expected):
    assert has_token_ids(prompt) == expected


@pytest.mark.parametrize("value", ["5", 5.0, True, [5]])
@pytest.mark.parametrize("name", ["n", "max_tokens"])
def test_bound_that_is_no_integer_is_refused(name, value):
    """vLLM would take some of them for numbers."""
    with pytest.raises(CallRefused, match=f"`{name}` must be an integer") as refused:
        asked_for({name: value}, CHAT, 512)
    assert refused.value.status == 400


def test_fields_by_which_clients_could_meet_are_left_out():
    fields = dict.fromkeys(DROPPED_FIELDS, "x")
    assert parse(json.dumps({"model": "m", **fields}).encode()) == {"model": "m"}


@pytest.mark.parametrize("name", REFUSED_FIELDS)
def test_field_that_a_session_does_not_take_is_named(name):
    assert parse(json.dumps({name: None}).encode()) == {name: None}
    for value in (True, 1, "true", "x", []):
        with pytest.raises(CallRefused, match=name):
            parse(json.dumps({name: value}).encode())
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in name)
    with pytest.raises(CallRefused, match=name):
        parse(f'{{"{name}": false, "{escaped}": true}}'.encode())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"reus": true}', "`reus`: Extra inputs are not permitted (seen: True)"),
        (b'{"settings": {"top_k": -1}}', "`settings.top_k`: Input should be greater than or equal"),
        (b"[]", "the body: "),
        (b"{", "the body: Invalid JSON"),
    ],
)
def test_mistake_in_a_new_session_is_named(content, message):
    with pytest.raises(Refused) as refused:
        query_in(content)
    assert message in str(refused.value)
    assert "A session has the fields settings, reuse, evaluation" in str(refused.value)
    assert refused.value.status == 400
    assert query_in(b'{"reuse": true}').reuse


def test_page_has_the_bounds_and_the_fields():
    page = Page("docs/sessions.md")
    prose = page.prose
    fields = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", prose, re.MULTILINE)
    defaults = {name: shown.strip() for name, shown in fields}
    assert defaults.keys() >= SessionQuery.model_fields.keys()
    for name, default in SessionQuery().model_dump().items():
        if isinstance(default, bool):
            assert defaults[name] == json.dumps(default), name
        elif isinstance(default, int | float):
            assert int(defaults[name].replace(",", "")) == default, name
    assert f"{MAX_BODY >> 20} MiB" in prose
    for name in (*DROPPED_FIELDS, *REFUSED_FIELDS):
        # `data_parallel_rank` and `ec_transfer_params` are vLLM's own, which no client knows
        assert name in prose or name in ("data_parallel_rank", "ec_transfer_params")
    for route in METHODS:
        assert route.removeprefix("/v1") in prose
