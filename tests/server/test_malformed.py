"""Values of the wrong type at the door of `/generate`, which some environments send: each is refused by its name."""

import pytest

pytestmark = pytest.mark.server

# A value of the wrong type each: vLLM's engine process cannot decode it, and hears nothing more from then on.
FATAL = {
    "max_tokens": 12.0,
    "seed": 1.0,
    "logprobs": 0.0,
    "min_tokens": 1.0,
    "n": True,
    "top_p": True,
    "ignore_eos": "x",
    "repetition_detection": 5,
    "allowed_token_ids": ["5"],
    "stop_token_ids": [True],
}


@pytest.mark.parametrize("name", FATAL)
def test_a_value_of_the_wrong_type_is_refused_by_its_name(server, name):
    reply = server.generate(prompt="abc=", **{"max_tokens": 4, name: FATAL[name]})
    assert reply.status_code == 400
    assert f"`{name}" in reply.json()["error"]
