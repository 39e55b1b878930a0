"""`POST /generate` and the OpenAI routes on a real server: the contract that Atropos environments
sample by."""

import asyncio
import http.server
import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
import torch
from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from atroposlib.envs.server_handling.vllm_server import VLLMServer
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.ingest_roles import replying
from tests.environment_site import site_module
from trl_atropos.protocol import ANSWER_HEADER, NUMBERS, completion_key
from trl_atropos.rollouts.versions import VersionBook
from trl_atropos.weights.tolerance import Tolerance

pytestmark = pytest.mark.server
PROMPT = [64, 65, 66, 28]
environment_sampling = site_module("environment_sampling")


@pytest.fixture(scope="module")
def reference(server_model):
    return AutoModelForCausalLM.from_pretrained(server_model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tolerance(server) -> float:
    """Nats by which the server and the reference, both in float32, may differ on one token."""
    device = server.control("GET", "/info").json()["device"]
    return Tolerance.of(device, torch.float32).max_abs


@torch.no_grad()
def logps(model, prompt, tokens, temperature=1.0):
    ids = torch.tensor([prompt + tokens], device=model.device)
    logits = model(ids).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].cpu()


def sampled(reply):
    return [
        [next(iter(entry[0].values())) for entry in completion] for completion in reply["logprobs"]
    ]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_at_sampling_temperature(server, reference, temperature, tolerance):
    reply = server.generate(
        prompt={"prompt_token_ids": PROMPT}, n=3, max_tokens=12, temperature=temperature
    ).json()
    for tokens, values in zip(reply["token_ids"], sampled(reply), strict=True):
        expected = logps(reference, PROMPT, tokens, temperature)
        assert torch.allclose(torch.tensor(values), expected, atol=tolerance)


def test_n_completions_come_back_in_every_list(server):
    reply = server.generate(prompt={"prompt_token_ids": PROMPT}, n=5, max_tokens=6).json()
    assert {len(reply[key]) for key in ("text", "finish_reasons", "logprobs", "token_ids")} == {5}
    assert reply["prompt_token_ids"] == PROMPT
    assert all(
        int(next(iter(e[0]))) == t
        for e, t in zip(reply["logprobs"][0], reply["token_ids"][0], strict=True)
    )


def ask_for_numbers(server, **body) -> requests.Response:
    headers = {ANSWER_HEADER: NUMBERS}
    return requests.post(f"{server.url}/generate", json=body, headers=headers, timeout=60)


def test_answer_of_numbers_says_the_same_without_text(server, tolerance):
    body = {"prompt": {"prompt_token_ids": PROMPT}, "max_tokens": 12, "temperature": 0.0}
    whole = server.generate(**body)
    numbers = ask_for_numbers(server, logprobs=0, **body)
    assert numbers.headers["x-policy-version"] == whole.headers["x-policy-version"]
    expected = whole.json()
    answer = numbers.json()
    (values,) = answer.pop("sampled_logprobs")
    assert values == pytest.approx(sampled(expected)[0], abs=tolerance)
    for name in ("text", "prompt", "logprobs"):
        del expected[name]
    assert answer == expected


def test_answer_of_numbers_knows_stop_strings(server, server_model):
    fields = {"max_tokens": 40, "stop": ["a"], "temperature": 2.0}
    answer = ask_for_numbers(server, prompt="abc=", n=32, **fields).json()
    assert set(answer["finish_reasons"]) == {"stop", "length"} and "text" not in answer
    assert "sampled_logprobs" not in answer  # nobody asked for them
    tokenizer = AutoTokenizer.from_pretrained(server_model)
    texts = tokenizer.batch_decode(answer["token_ids"], skip_special_tokens=True)
    assert any(text.endswith("a") for text in texts)
    assert not any("a" in text[:-1] for text in texts)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="only vLLM's engine for the CPU ends by seeds"
)
def test_seeded_requests_do_not_end_engine(server):
    """Their prompts are longer together than what the engine computes in one step, so that some are
    cut."""

    def ask(number: int):
        prompt = [number, *range(64, 64 + 60)] * 7
        return server.generate(
            prompt={"prompt_token_ids": prompt}, max_tokens=2, seed=7, temperature=1.0
        )

    with ThreadPoolExecutor(64) as pool:
        replies = list(pool.map(ask, range(64)))
    assert [reply.status_code for reply in replies] == [200] * 64
    assert "leaves out the seeds of all requests" in server.log.read_text()
    same = server.generate(prompt={"prompt_token_ids": PROMPT}, n=4, max_tokens=8, seed=7).json()[
        "token_ids"
    ]
    assert len({tuple(tokens) for tokens in same}) > 1


def test_several_logprobs_still_tell_sampled_token(server, reference, tolerance):
    reply = server.generate(
        prompt={"prompt_token_ids": PROMPT}, max_tokens=12, temperature=2.0, logprobs=3
    ).json()
    expected = logps(reference, PROMPT, reply["token_ids"][0], 2.0)
    assert torch.allclose(torch.tensor(sampled(reply)[0]), expected, atol=tolerance)


def test_openai_route_tells_texts_of_logprobs(server):
    body = {
        "model": "any",
        "prompt": "abc=",
        "max_tokens": 2,
        "logprobs": 0,
        "logit_bias": {"65": 100},
    }
    (choice,) = requests.post(f"{server.url}/v1/completions", json=body, timeout=60).json()[
        "choices"
    ]
    assert choice["logprobs"]["tokens"] == list(choice["text"]) and len(choice["text"]) == 2


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        ("completions", {"prompt": "abc=", "logprobs": 0}),
        ("chat/completions", {"messages": [{"role": "user", "content": "hi"}], "logprobs": True}),
    ],
)
def test_openai_routes_tell_same_logprobs_whole_and_in_parts(server, route, fields):
    """Whole answers are encoded in another way than parts of a stream."""
    body = {"model": "any", "max_tokens": 9, "temperature": 0, "ignore_eos": True, **fields}
    url = f"{server.url}/v1/{route}"
    (choice,) = requests.post(url, json=body, timeout=60).json()["choices"]
    parts = []
    with requests.post(url, json=body | {"stream": True}, stream=True, timeout=60) as reply:
        for line in reply.iter_lines():
            if line.startswith(b"data: {"):
                (part,) = json.loads(line.removeprefix(b"data: "))["choices"]
                parts.append(part.get("logprobs") or {})
    for field, values in choice["logprobs"].items():
        joined = [value for part in parts for value in part.get(field, [])]
        assert joined == values and len(joined) == 9


def test_stop_string_or_length_ends_completion(server):
    reply = server.generate(prompt="abc=", n=32, max_tokens=40, stop=["a"], temperature=2.0).json()
    assert set(reply["finish_reasons"]) == {"stop", "length"}
    for text, reason in zip(reply["text"], reply["finish_reasons"], strict=True):
        assert reason == "stop" or "a" not in text


def test_repetitive_completion_finishes_as_stop(server):
    detection = {"max_pattern_size": 2, "min_count": 2}
    always = {"temperature": 0, "logit_bias": {"5": 100.0}, "repetition_detection": detection}
    reply = server.generate(
        prompt={"prompt_token_ids": [64, 65, 66]}, max_tokens=20, **always
    ).json()
    assert reply["finish_reasons"] == ["stop"]
    assert set(reply["token_ids"][0]) == {5} and len(reply["token_ids"][0]) < 20


def test_prompt_logprobs_are_flat_floats(server, reference, tolerance):
    reply = server.generate(
        prompt={"prompt_token_ids": PROMPT}, max_tokens=1, prompt_logprobs=1
    ).json()
    assert reply["prompt_logprobs"][0] is None
    values = [
        entry[str(token)]
        for entry, token in zip(reply["prompt_logprobs"][1:], PROMPT[1:], strict=True)
    ]
    assert torch.allclose(
        torch.tensor(values), logps(reference, PROMPT[:1], PROMPT[1:]), atol=tolerance
    )


def config_of(url: str, model: str) -> APIServerConfig:
    return APIServerConfig(
        model_name="any name",
        tokenizer_name=model,
        base_url=f"{url}/v1",
        api_key="x",
        server_type="vllm",
    )


class ReadingLists(VLLMServer):
    """Atropos' client in the process of an environment that has a `path`."""


environment_sampling.read_lists(ReadingLists)


def test_client_of_lists_asks_with_header_that_server_knows():
    asked = (environment_sampling.ANSWER_HEADER, environment_sampling.NUMBERS)
    assert asked == (ANSWER_HEADER, NUMBERS)


@pytest.mark.parametrize("client_class", [VLLMServer, ReadingLists])
def test_atroposlib_client_gets_tokens_and_logprobs(
    server, server_model, reference, tolerance, client_class
):
    async def ask():
        client = client_class(config_of(server.url, server_model))
        completion = await client.tokens_and_logprobs_completion(
            prompt="abc=", n=4, max_tokens=8, temperature=1.0
        )
        scores = await client.get_logprobs(input_ids=PROMPT, top_k=2)
        return completion, scores

    (prompt, tokens, values, reasons), scores = asyncio.run(ask())
    assert len(tokens) == len(values) == len(reasons) == 4
    for ids, lps in zip(tokens, values, strict=True):
        assert torch.allclose(torch.tensor(lps), logps(reference, prompt, ids), atol=tolerance)
    assert scores["prompt_tokens"] == PROMPT
    assert {type(token) for ids in tokens for token in ids} == {int}
    assert set(reasons) <= {"stop", "length"}
    # so that each is known by its values: what samples it is noted under them
    keys = [completion_key(prompt, *each) for each in zip(tokens, values, strict=True)]
    query = {"keys": [key.hex() for key in keys]}
    assert all(server.control("POST", "/versions", query).json()["versions"])


def test_client_of_lists_reads_servers_that_do_not_know_them(server, server_model):
    """As a server of another program answers: whatever the header says."""
    body = {"prompt": {"prompt_token_ids": PROMPT}, "n": 2, "max_tokens": 6}
    usual = server.generate(**body)

    class Usual(replying(usual.content)):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

    with http.server.HTTPServer(("127.0.0.1", 0), Usual) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{other.server_address[1]}"
        client = ReadingLists(config_of(url, server_model))
        read = asyncio.run(client.tokens_and_logprobs_completion(input_ids=PROMPT, n=2))
        other.shutdown()
    answer = usual.json()
    assert read == (PROMPT, answer["token_ids"], sampled(answer), answer["finish_reasons"])


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt": "a", "temprature": 1.0}, "temprature"),
        # tokens that nothing samples
        ({"prompt": "a", "trace_decode_token_ids": [5]}, "trace_decode_token_ids"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ({"prompt": {"prompt_token_ids": [1] * 600}}, "512"),
    ],
)
def test_wrong_request_is_refused_with_reason(server, body, words):
    reply = server.generate(**body)
    assert reply.status_code == 400
    assert words in reply.json()["error"]


def test_request_of_departed_client_is_dropped(server):
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "abc=", "n": 64, "max_tokens": 500, "ignore_eos": True})
    request = f"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    before = server.metric("generation_tokens_total")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        client.sendall(request.encode())
        _wait_for(lambda: server.metric("num_requests_running") > 0, "the request to run")
    _wait_for(lambda: server.metric("num_requests_running") == 0, "the request to be dropped")
    assert 0 < server.metric("generation_tokens_total") - before < 64 * 500


def test_openai_routes_answer_under_any_model_name(server):
    text = {"model": "whatever", "prompt": "abc=", "max_tokens": 4}
    chat = {"model": "whatever", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    for route, body in (("completions", text), ("chat/completions", chat)):
        reply = requests.post(f"{server.url}/v1/{route}", json=body, timeout=30)
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["completion_tokens"] <= 4


def test_text_and_token_prompts_are_equal(server, server_model):
    tokenizer = AutoTokenizer.from_pretrained(server_model)
    replies = [
        server.generate(prompt=prompt, max_tokens=1, prompt_logprobs=0).json()["prompt_logprobs"]
        for prompt in ("abc=", {"prompt_token_ids": tokenizer.encode("abc=")})
    ]
    assert replies[0] == replies[1]


def _wait_for(condition, what: str, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.05)


def test_refusals_are_counted_by_reason_and_told(server):
    def refused() -> tuple[int, int]:
        told = server.control("GET", "/refusals").json()
        return told["total"], sum(
            reason["count"] for reason in told["latest"] if "512" in reason["message"]
        )

    total, too_long = refused()
    for _ in range(20):
        assert server.generate(prompt={"prompt_token_ids": [64] * 600}).status_code == 400
    body = {"model": "any", "prompt": [64] * 601, "max_tokens": 4}
    assert requests.post(f"{server.url}/v1/completions", json=body, timeout=30).status_code == 400
    assert refused() == (total + 21, too_long + 21)
    told = VersionBook([server.url], server.token, timeout=10).refusals()
    assert f"has refused {total + 21} requests since it was started (" in told
    assert "times, the last time 0 s ago" in told
    assert "601" in told


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({"structured_outputs": {"regex": "[ab]{4}"}}, r"[ab]{4}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"logit_bias": {"97": 100.0}}, "."),
    ],
)
def test_sampling_obeys_constraints(server, fields, allowed):
    reply = server.generate(prompt="abc=", max_tokens=8, **fields)
    assert reply.status_code == 200, reply.text
    if "structured_outputs" in fields:
        assert re.fullmatch(allowed, reply.json()["text"][0])
    else:
        assert set(reply.json()["token_ids"][0]) == {97}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"structured_outputs": {"regex": "[a-"}}, "regex"),
        ({"structured_outputs": {"json": "{"}}, "Invalid JSON"),
        ({"structured_outputs": "a+"}, "`structured_outputs` is 'a+'"),
        ({"logit_bias": {"a": 1.0}}, "`logit_bias`"),
        ({"logit_bias": {"5": "much"}}, "`logit_bias"),
    ],
)
def test_invalid_constraint_is_refused_with_reason(server, fields, words):
    reply = server.generate(prompt="abc=", max_tokens=8, **fields)
    assert reply.status_code == 400
    assert words in reply.json()["error"]
