"""Bodies that no environment should send, and some that environments do send, at the door of
`/generate`: each gets an answer that says what is wrong with it, and nobody else's request
notices."""

import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from vllm import SamplingParams

from tests.server_process import Server
from tests.tiers import FULL

pytestmark = pytest.mark.server
BODIES = 5000 if FULL else 300
SERVED_WITHIN = 20.0  # seconds, for a request of four tokens beside the malformed ones

# A value of the wrong type each: vLLM's engine process cannot decode it, and hears nothing more
# from then on.
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
VALUES = [
    *(
        None,
        True,
        False,
        0,
        1,
        2,
        -1,
        -2,
        7,
        255,
        256,
        511,
        512,
        2**31,
        2**32,
        -(2**31) - 1,
        2**63,
        2**64,
        -(2**70),
    ),
    *(
        0.0,
        -0.0,
        0.5,
        1.0,
        1.5,
        12.0,
        -1.0,
        1e-9,
        1e300,
        -1e300,
        float("nan"),
        float("inf"),
        -float("inf"),
    ),
    *(
        "",
        "a",
        "=",
        "1",
        "x" * 300,
        "\u0000",
        "\ud800",
        "[a-",
        "(a|b)+",
        "root ::= ",
        '{"type": "object"}',
    ),
    *(
        [],
        [0],
        [5],
        [256],
        [-1],
        [True],
        [1.0],
        ["a"],
        ["a", ""],
        ["a", 3],
        [None],
        [[1]],
        [2**31],
        [2**64],
        [[]],
    ),
    *(
        {},
        {"a": 1},
        {"5": 1.0},
        {"5": float("nan")},
        {"5": float("inf")},
        {"-1": 1.0},
        {"256": 1},
        {"5": True},
    ),
    *(
        {"5": "1"},
        {"regex": "a+"},
        {"regex": "[a-"},
        {"choice": ["a", "b"]},
        {"choice": []},
        {"choice": [1]},
    ),
    *(
        {"json": {"type": "object"}},
        {"json": "{"},
        {"json": {"type": 5}},
        {"grammar": "root ::="},
        {"json_object": 1},
    ),
    *(
        {"regex": "a", "_backend": "x", "_backend_was_auto": True},
        {"structural_tag": "a"},
        {"max_pattern_size": 2**40},
    ),
    *(
        {"max_pattern_size": 2, "min_count": 2},
        {"max_pattern_size": 2.0, "min_count": 2},
        {"json_object": True},
    ),
]
RIGHT = {  # values that the server takes, most of them
    "allowed_token_ids": [[5, 6]],
    "bad_words": [["a"], ["ab", "="]],
    "detokenize": [False],
    "extra_args": [{"a": [1]}],
    "flat_logprobs": [True],
    "frequency_penalty": [-1, 0.5],
    "ignore_eos": [True],
    "include_stop_str_in_output": [True],
    "logit_bias": [{"5": 1.0}, {"5": -100, "6": 100}],
    "logprobs": [1, 5, None],
    "max_tokens": [1, 8, None],
    "min_p": [0.1],
    "min_tokens": [0, 2, 4],
    "n": [1, 2, 4],
    "presence_penalty": [-1, 0.5],
    "prompt_logprobs": [0, 1],
    "repetition_detection": [{"max_pattern_size": 2, "min_count": 2}],
    "repetition_penalty": [0.5, 1.1],
    "seed": [0, -1, 7, -(2**63), 2**63, 2**64 - 1],
    "skip_special_tokens": [False],
    "stop": ["a", ["b", "="], []],
    "stop_token_ids": [[5, 6]],
    "structured_outputs": [{"regex": "a+"}, {"choice": ["a", "b"]}, {"json": {"type": "object"}}],
    "temperature": [0, 0.7, 2],
    "top_k": [1, 5, -1, 2**31, 2**62],
    "top_p": [0.5, 1],
}
CONSTRAINTS = ("allowed_token_ids", "bad_words", "logit_bias", "structured_outputs")
PROMPTS = [
    *(
        *VALUES,
        {"prompt_token_ids": []},
        {"prompt_token_ids": "abc"},
        {"prompt_token_ids": [64] * 512},
    ),
    *({"prompt_token_ids": [value]} for value in VALUES),
]


def bodies(count: int) -> list[bytes]:
    """Valid bodies of which some values, or some bytes, have been replaced."""
    rng = random.Random(0)
    fields = [*SamplingParams.__struct_fields__, "model", "stream", "temprature"]
    made = []
    for number in range(count):
        body = {"prompt": {"prompt_token_ids": [64, 65, 66]}, "max_tokens": 4, "logprobs": 0}
        if number < len(FATAL):
            name = list(FATAL)[number]
            body[name] = FATAL[name]
        else:
            for _ in range(rng.choice([0, 1, 2, 4])):
                name = rng.choice(list(RIGHT))
                body[name] = rng.choice(RIGHT[name])
            for _ in range(rng.choice([0, 1, 1, 2])):
                body[rng.choice(fields)] = rng.choice(VALUES)
        if rng.random() < 0.1:
            body["prompt"] = rng.choice(PROMPTS)
        text = json.dumps(body).encode()
        if rng.random() < 0.05:
            place = rng.randrange(len(text))
            text = (
                text[:place]
                + rng.choice([b"", b"\xff", b"[" * 3000, b"1e999", text])
                + text[place + 1 :]
            )
        made.append(text)
    return made


def contradicts_itself(body: bytes) -> bool:
    """Whether it may leave no token to sample, which the engine finds out when it samples."""
    given = [
        name
        for name in (*CONSTRAINTS, "min_tokens", "stop_token_ids")
        if f'"{name}"'.encode() in body
    ]
    constraints = [name for name in given if name in CONSTRAINTS]
    # Before `min_tokens`, no stop token may be sampled.
    return len(constraints) + ({"min_tokens", "stop_token_ids"} <= set(given)) > 1


def answer(server: Server, body: bytes) -> tuple[int, str]:
    reply = requests.post(f"{server.url}/generate", data=body, timeout=60)
    return reply.status_code, reply.text


class Client(threading.Thread):
    """Asks for four tokens again and again, and remembers how long the slowest answer took."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self.server, self.stop, self.slowest, self.served = server, threading.Event(), 0.0, 0
        self.failure: str | None = None

    def run(self) -> None:
        while not self.stop.is_set() and self.failure is None:
            began = time.monotonic()
            body = {"prompt": "abc=", "max_tokens": 4, "logprobs": 0}
            try:
                reply = requests.post(
                    f"{self.server.url}/generate", json=body, timeout=SERVED_WITHIN
                )
            except requests.RequestException as problem:
                self.failure = repr(problem)
                return
            if reply.status_code != 200:
                self.failure = reply.text
            self.served += 1
            self.slowest = max(self.slowest, time.monotonic() - began)


@pytest.mark.parametrize("name", FATAL)
def test_value_of_wrong_type_is_refused_by_name(server, name):
    status, text = answer(
        server, json.dumps({"prompt": "abc=", "max_tokens": 4, name: FATAL[name]}).encode()
    )
    assert status == 400
    assert f"`{name}" in json.loads(text)["error"]


def test_malformed_bodies_disturb_no_other_client(server):
    client = Client(server)
    client.start()
    sent = bodies(BODIES)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda body: answer(server, body), sent))
    client.stop.set()
    client.join(SERVED_WITHIN)
    for body, (status, text) in zip(sent, answers, strict=True):
        assert status in (200, 400) or contradicts_itself(body), (body, status, text)
        assert status == 200 or json.loads(text)["error"], body
    assert client.failure is None
    assert client.served >= BODIES // 50, "the client was hardly served"
    counts = {status: [status for status, _ in answers].count(status) for status in (200, 400)}
    assert min(counts.values()) > BODIES // 20, counts  # both kinds were tried
    print(
        f"{BODIES} bodies: {counts}; the client beside was served {client.served} times, "
        f"{client.slowest:.1f} s"
    )
