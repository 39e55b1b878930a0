"""Sessions on a real server: what clients in any dialect sample below a URL of their own is kept,
token for token, and nothing else is reached from there."""

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import anthropic
import openai
import pytest
import requests
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.server.session_faults import inflict, kinds
from tests.server.sessions import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    TOLERANCE,
    Client,
    paths,
    request_of,
    sampled,
    worst_difference,
)
from tests.server_process import Server
from trl_atropos.protocol import (
    EVALUATION_KEY,
    Note,
    SamplingSettings,
    SessionReply,
    SessionsReply,
    VersionsReply,
    completion_key,
    session_token,
)
from trl_atropos.server_client import ServerClient

pytestmark = pytest.mark.server
ATTEMPTS = 5  # to go away from a call that runs a second: a busy machine may be too slow


def wait_for(condition, what: str, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def reference(server_model):
    return AutoModelForCausalLM.from_pretrained(server_model, dtype=torch.float32).eval()


# ------------------------------------------------------------------------------- what is answered

VOLATILE = ("id", "created", "created_at", "request_id", "item_id", "completed_at")


def steady(value):
    """An answer without what differs between two equal requests."""
    if isinstance(value, dict):
        return {key: steady(part) for key, part in value.items() if key not in VOLATILE}
    return [steady(part) for part in value] if isinstance(value, list) else value


def answer(url: str, route: str, body: dict):
    """Status and content of an answer. Of a stream, the text and the kinds of fields."""
    reply = requests.post(f"{url}{route}", json=body, timeout=60)
    if "event-stream" not in reply.headers["content-type"]:
        return reply.status_code, steady(reply.json())
    events = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in json.loads(event).get("choices", [])]
    texts = [c.get("text") or c.get("delta", {}).get("content") or "" for c in choices]
    logprobs = sum("logprobs" in choice and choice["logprobs"] is not None for choice in choices)
    return reply.status_code, "".join(texts), logprobs > 0


GREEDY = {"model": "any", "temperature": 0, "max_tokens": 6}
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
ASKED = [
    (CHAT, {"messages": MESSAGES}),
    (CHAT, {"messages": MESSAGES, "stream": True}),
    (CHAT, {"messages": MESSAGES, "stream": True, "logprobs": True, "top_logprobs": 2}),
    (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 3}),
    (CHAT, {"messages": MESSAGES, "logprobs": True}),
    (CHAT, {"messages": MESSAGES, "logprobs": True, "logprob_token_ids": [5, 6]}),
    (CHAT, {"messages": MESSAGES, "prompt_logprobs": 1}),
    (CHAT, {"messages": MESSAGES, "stop": ["e"], "echo": True}),
    (
        CHAT,
        {
            "messages": MESSAGES,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": SCHEMA},
            },
        },
    ),
    (CHAT, {"messages": "nothing"}),
    (COMPLETIONS, {"prompt": ["ab", "cd"]}),
    (COMPLETIONS, {"prompt": "ab", "echo": True, "logprobs": 1}),
    (COMPLETIONS, {"prompt": "ab", "stream": True}),
    (COMPLETIONS, {"prompt": [64] * 600}),
    ("/v1/responses", {"input": "Hello", "max_output_tokens": 6}),
    ("/v1/messages", {"messages": MESSAGES}),
    ("/v1/messages/count_tokens", {"messages": MESSAGES}),
]


def test_answers_are_those_of_the_plain_routes(server):
    client = Client(server)
    for route, fields in ASKED:
        body = GREEDY | fields
        if "max_output_tokens" in body:
            del body["max_tokens"]
        assert answer(client.url, route, body) == answer(server.url, route, body), (route, fields)
    models = [requests.get(f"{url}/v1/models", timeout=10) for url in (client.url, server.url)]
    assert [model["id"] for model in models[0].json()["data"]] == [
        model["id"] for model in models[1].json()["data"]
    ]
    reply = client.delete()
    # all but the two that are refused and the count; one of them has two prompts
    assert reply.counts["completions"] == len(ASKED) - 3 + 1
    assert reply.counts["tokens"] == sum(map(len, sampled(reply))) > 60
    assert {call.reason for call in reply.calls} == {"temperature 0"}
    assert reply.counts["refused/HTTP 400"] == 2


TALK = [
    {"role": "user", "content": "Hi."},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "Go on."},
]


def test_one_conversation_is_one_path_in_every_dialect(server):
    """OpenAI's and Anthropic's own clients, which know the URL of the session alone."""
    client = Client(server, settings={"temperature": 0})
    chat = openai.OpenAI(base_url=client.opened["openai"], api_key="any")
    claude = anthropic.Anthropic(base_url=client.opened["anthropic"], api_key="any")
    common = {"model": "any"}
    parts = [turn | {"content": [{"type": "text", "text": turn["content"]}]} for turn in TALK]
    chat.chat.completions.create(messages=TALK, max_tokens=6, **common)
    chat.chat.completions.create(messages=parts, max_completion_tokens=6, **common)
    stream = chat.chat.completions.create(messages=TALK, max_tokens=6, stream=True, **common)
    assert len(list(stream)) > 1
    chat.responses.create(input=TALK, max_output_tokens=6, **common)
    claude.messages.create(messages=TALK, max_tokens=6, **common)
    with claude.messages.stream(messages=TALK, max_tokens=6, **common) as events:
        assert events.get_final_message().usage.output_tokens == 6
    rendered = paths(client.kept())[0]
    text = AutoTokenizer.from_pretrained(server.model).decode(rendered[:-6])
    assert text == "u:Hi.a:Yes?<|end|>u:Go on.a:"
    chat.completions.create(prompt=text, max_tokens=6, **common)
    reply = client.delete()
    assert paths(reply) == [rendered] * 7
    # the prompt is kept once
    assert [segment.parent for segment in reply.segments] == [-1, *[0] * 6]
    assert reply.counts["tokens"] == 7 * 6
    assert reply.counts["context"] == len(rendered) - 6
    assert [call.route for call in reply.calls] == [
        *[CHAT] * 3,
        "/v1/responses",
        *["/v1/messages"] * 2,
        COMPLETIONS,
    ]


def test_kept_logprobs_are_those_of_the_model(server, reference):
    """Whatever the client asked for: the session samples at its own temperature, without seeds."""
    client = Client(server, settings={"temperature": 0.8, "top_p": 1.0, "max_tokens": 5})
    client.post(n=3, temperature=0.3, seed=7, top_p=0.5)
    client.post(stream=True, temperature=0.0, logprobs=True, top_logprobs=4)
    client.post(COMPLETIONS, prompt=["ab", "cd"], max_tokens=3, n=2, seed=7, echo=True)
    client.post("/v1/responses", input="Hello", max_output_tokens=100)
    reply = client.delete()
    most = [5, 5, 5, 5, 3, 3, 3, 3, 5]
    for tokens, bound, call in zip(sampled(reply), most, reply.calls, strict=True):
        # one token in 258 is the end
        assert len(tokens) == bound or (0 < len(tokens) < bound and call.finish == "stop")
    assert len({tuple(tokens) for tokens in sampled(reply)[:3]}) > 1, "a seed was used"
    assert worst_difference(reference, reply, temperature=0.8) < TOLERANCE
    assert {call.settings["temperature"] for call in reply.calls} == {0.8}
    assert {call.reason for call in reply.calls} == {None}
    assert {call.finish for call in reply.calls} <= {"length", "stop"}
    assert [call.call for call in reply.calls] == [0, 0, 0, 1, 2, 2, 2, 2, 3]


def test_answer_that_comes_back_shortened_branches_behind_its_prompt(server):
    """As with a template that strips reasoning: the next turn has another text in its place."""
    client = Client(server)
    client.post()
    for shortened in ("x", "y", ""):
        turns = [*MESSAGES, {"role": "assistant", "content": shortened}, *MESSAGES]
        assert client.post(messages=turns).status_code == 200
    reply = client.delete()
    ((prompt_length, _),) = reply.segments[0].sampled
    assert [segment.parent for segment in reply.segments[1:]] == [0, 0, 0]
    places = [segment.at for segment in reply.segments[1:]]
    # one of the letters may be what was sampled
    assert min(places) == prompt_length and max(places) <= prompt_length + 1
    assert reply.counts["tokens"] == sum(map(len, sampled(reply)))


def test_trainer_finds_versions_of_kept_completions(server):
    """By the same key as those of other requests, also of a completion whose client went away."""
    version = current_version(server)
    client = Client(server, settings={"temperature": 0.5})
    client.post(n=2)
    reply = client.delete()
    keys = []
    for segment, path in zip(reply.segments, paths(reply), strict=True):
        length = len(segment.logprobs)
        keys.append(completion_key(path[:-length], path[-length:], segment.logprobs).hex())
    answer = server.control("POST", "/versions", {"keys": keys}).json()
    notes = VersionsReply.model_validate(answer).notes()
    assert notes == [Note((version, version), SamplingSettings(temperature=0.5))] * 2


def test_turn_that_begins_with_a_path_continues_it(server):
    client = Client(server)
    four = {"max_tokens": 4, "ignore_eos": True}  # one token in 258 would be the end
    seen = [64, 65, 66]
    for added in ([67], [68, 69]):
        client.post(COMPLETIONS, prompt=seen, **four)
        seen = paths(client.kept())[-1] + added
    client.post(COMPLETIONS, prompt=seen, **four)
    client.post(COMPLETIONS, prompt=[64, 65, 70], **four)
    reply = client.delete()
    places = [(segment.parent, segment.at) for segment in reply.segments]
    assert places == [(-1, 0), (0, 7), (1, 12), (0, 2)]
    assert reply.segments[1].tokens[0] == 67


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"temperature": 0}, "temperature 0"),
        ({"logit_bias": {"65": 5}}, "logit_bias"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"presence_penalty": 1.0}, "presence_penalty"),
        ({"frequency_penalty": 1.0}, "frequency_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"top_p": 0.5}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"bad_words": ["a"]}, "bad_words"),
        ({"allowed_token_ids": [65, 66, 67]}, "allowed_token_ids"),
        ({"structured_outputs": {"regex": "[ab]{4}"}}, "structured_outputs"),
        ({"response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"temperature": 0.7, "ignore_eos": True, "stop": ["x"]}, None),
    ],
)
def test_tokens_that_a_trainer_cannot_recompute_are_marked(server, fields, reason):
    client = Client(server)
    assert client.post(**fields).status_code == 200
    reply = client.delete()
    assert [call.reason for call in reply.calls] == [reason]
    if reason is not None:
        assert reply.counts[f"marked/{reason}"] == reply.counts["tokens"] > 0


def test_token_that_nobody_sees_is_marked(server):
    """With `echo` and no tokens, vLLM samples one and drops it."""
    client = Client(server)
    client.post(COMPLETIONS, prompt="ab", echo=True, max_tokens=0)
    reply = client.delete()
    assert [call.reason for call in reply.calls] == ["unseen"]
    assert reply.counts["marked/unseen"] == 1


# ----------------------------------------------------------------------------- clients that go away


@contextmanager
def sent(server: Server, path: str, *bodies: dict) -> Iterator[socket.socket]:
    """Requests in one packet of a connection, which is closed behind the block."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(b"".join(request_of(path, body) for body in bodies))
        yield connection


def abandoned(server: Server, route: str, body: dict) -> tuple[SessionReply, float]:
    """Goes away from a call that has begun. Returns what its session has kept, and how many tokens
    the engine has delivered."""
    client = Client(server)
    before = server.metric("generation_tokens_total")
    with sent(server, f"/s/{client.id}{route}", body):
        wait_for(lambda: server.metric("generation_tokens_total") > before, "the first token")
    wait_for(lambda: not client.kept().counts["in_flight"], "the abort")
    reply = client.delete()
    return reply, server.metric("generation_tokens_total") - before


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        (CHAT, {}),
        (CHAT, {"n": 2}),
        (CHAT, {"stream": True}),
        (COMPLETIONS, {"prompt": ["ab", "cd"]}),
    ],
)
def test_aborted_call_keeps_all_that_the_engine_delivered(server, reference, route, fields):
    body = {"model": "any", "messages": MESSAGES, "max_tokens": 480, "ignore_eos": True} | fields
    for _ in range(ATTEMPTS):
        reply, delivered = abandoned(server, route, body)
        assert reply.counts["tokens"] == delivered > 0
        assert worst_difference(reference, reply) < TOLERANCE
        assert all(call.versions_known for call in reply.calls)
        if {call.finish for call in reply.calls} == {"abort"}:
            return
    pytest.fail(f"{ATTEMPTS} times, the call was over before its client went away")


def test_deleted_session_aborts_its_calls_and_refuses_later_ones(server):
    client = Client(server)
    before = server.metric("generation_tokens_total")
    completions = 64  # so many that they take seconds, also if this process is slow to see them
    with ThreadPoolExecutor(2) as pool:
        whole = pool.submit(client.post, max_tokens=480, ignore_eos=True, n=completions)
        stream = pool.submit(client.post, max_tokens=480, ignore_eos=True, stream=True)
        wait_for(
            lambda: server.metric("num_requests_running") > completions or whole.done(), "the calls"
        )
        reply = client.delete()
        assert whole.result().status_code == 410
        assert "deleted" in whole.result().json()["error"]["message"]
        assert stream.result().status_code in (200, 410)
    assert {call.finish for call in reply.calls} == {"abort"}
    assert len(reply.calls) == completions + 1
    assert reply.counts["tokens"] == server.metric("generation_tokens_total") - before > 0
    assert reply.ended == "deleted"
    late = client.post()
    assert late.status_code == 410
    assert late.headers["x-should-retry"] == "false"
    again = client.delete()
    assert again.segments == reply.segments and again.counts["refused/ended"] >= 1


# ------------------------------------------------------------------------------------------ bounds


def test_bounds_refuse_a_call_before_it_samples(server):
    client = Client(server, max_tokens=40, max_calls=3)
    before = server.metric("generation_tokens_total")
    too_many = [
        {"n": 10},
        {"max_tokens": 41},
        {"n": 41, "max_tokens": 1},
        {"max_tokens": 1, "max_completion_tokens": 41},
        {"max_tokens": None},
    ]
    for fields in too_many:
        reply = client.post(**fields)
        assert reply.status_code == 429, fields
        assert "40 of 40 left" in reply.json()["error"]["message"]
    prompts = client.post(COMPLETIONS, prompt=["a"] * 41, max_tokens=1)
    token_lists = client.post(COMPLETIONS, prompt=[[5]] * 41, max_tokens=1)
    assert prompts.status_code == token_lists.status_code == 429
    for fields in ({"n": "2000"}, {"max_tokens": 8.0}, {"max_completion_tokens": True}):
        assert client.post(**fields).status_code == 400
    assert server.metric("generation_tokens_total") == before
    for _ in range(3):
        assert client.post(max_tokens=10).status_code == 200
    assert "all of its 3 calls" in client.post().json()["error"]["message"]
    counts = client.delete().counts
    assert (counts["refused/tokens"], counts["refused/calls"], counts["calls"]) == (7, 1, 3)


def test_large_body_is_refused_unread(server):
    client = Client(server)
    reply = client.post(user="x" * (4 << 20))
    assert reply.status_code == 413
    assert client.delete().counts["refused/body"] == 1


def test_calls_at_a_time_are_bounded(server):
    client = Client(server, max_in_flight=2)
    with ThreadPoolExecutor(6) as pool:
        replies = list(pool.map(lambda _: client.post(max_tokens=60), range(6)))
    statuses = sorted(reply.status_code for reply in replies)
    assert statuses[:2] == [200, 200] and set(statuses) == {200, 429}
    refused = [reply for reply in replies if reply.status_code == 429]
    assert {reply.headers["x-should-retry"] for reply in refused} == {"true"}
    reply = client.delete()
    assert reply.counts["refused/calls at a time"] == len(refused)
    assert len(reply.calls) == statuses.count(200)


# ------------------------------------------------------------------------- who reaches what, and how


def raw(server: Server, data: bytes) -> tuple[int, bytes]:
    """The status and the whole answer of bytes that are sent as they are."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(data)
        reply = b""
        with suppress(TimeoutError, ConnectionError):
            while b"\r\n\r\n" not in reply:
                part = connection.recv(65536)
                if not part:
                    break
                reply += part
    return int(reply.split()[1]) if reply else 0, reply


def test_no_path_leads_elsewhere_or_to_another_session(server):
    client = Client(server)
    other = Client(server)
    body = {"model": "any", "messages": MESSAGES, "max_tokens": 2}
    wrong = [
        *(f"/s/{client.id}{CHAT}/", f"/s/{client.id}//v1/chat/completions", f"/s/{client.id}"),
        *(f"/s/{client.id}/", f"/s//{client.id}{CHAT}", f"//s/{client.id}{CHAT}", "/s", "/s/"),
        *(f"/s/{client.id[:-1]}{CHAT}", f"/s/{client.id}x{CHAT}", f"/s/{client.id.upper()}{CHAT}"),
        *(f"/s/{client.id[:16]}{CHAT}", f"/s/*{CHAT}", f"/s/SESSION{CHAT}", f"/s/{CHAT}"),
        *(f"/s/{client.id}/v1/../v1/chat/completions", f"/s/{client.id}/generate"),
        *(f"/s/{client.id}/v1/load_lora_adapter", f"/s/{client.id}/trl_atropos/pause"),
        *(f"/s/{client.id}/../../trl_atropos/pause", f"/s/{client.id}/v1/../../trl_atropos/info"),
        *(f"/s/{client.id}/%2e%2e/%2e%2e/metrics", f"/s/{client.id}/v1/responses/resp_1"),
        *(f"/s/{client.id}/v1/responses/resp_1/cancel", f"/s/{client.id}/v1/embeddings"),
        *(f"/s/{client.id}/tokenize", f"/s/{client.id}/inference/v1/generate"),
        *(f"/s/{client.id};x{CHAT}", f"/s/{client.id}%00{CHAT}", f"/s/{client.id}\u00e9{CHAT}"),
        *(f"/s/{client.id}/v1/chat%2fcompletions%2f", f"/s/{client.id}/s/{other.id}{CHAT}"),
    ]
    for path in wrong:
        status, reply = raw(server, request_of(path, body))
        assert status in (400, 404), (path, reply)
    for method in ("GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS"):
        reply = requests.request(method, f"{client.url}{CHAT}", timeout=10)
        assert reply.status_code == 404, method
    for path in (f"/trl_atropos/sessions/{client.id}", "/trl_atropos/sessions"):
        for headers in ({}, {"authorization": f"Bearer {client.id}"}):
            assert requests.get(server.url + path, headers=headers, timeout=10).status_code == 401
    assert not client.delete().segments and not other.delete().segments


def test_token_of_sessions_does_nothing_else(server):
    client = Client(server)
    token = session_token(server.token)

    def asked(method: str, route: str) -> int:
        return server.control(method, route, {}, token=token).status_code

    assert asked("GET", "/load") == asked("GET", f"/sessions/{client.id}") == 200
    opened = server.control("POST", "/sessions", {}, token=token).json()["id"]
    assert (
        asked("DELETE", f"/sessions/{opened}") == asked("DELETE", f"/sessions/{client.id}") == 200
    )
    for method, route in (
        ("GET", "/sessions"),
        ("GET", "/info"),
        ("POST", "/front/begin"),
        ("POST", "/lease"),
        ("POST", "/pause"),
        ("GET", "/front/sessions"),
        ("POST", "/front/open"),
        ("GET", "/sessionsx"),
    ):
        assert asked(method, route) == 401, route


def test_fields_and_headers_of_a_call_reach_no_other_client(server):
    client = Client(server)
    other = Client(server)
    refused = [
        ({"use_beam_search": True}, CHAT),
        ({"use_beam_search": "true"}, CHAT),
        ({"use_beam_search": 1, "n": 2, "prompt": "a"}, COMPLETIONS),
        ({"background": True, "input": "a"}, "/v1/responses"),
        ({"previous_response_id": "resp_1", "input": "a"}, "/v1/responses"),
        ({"prompt_embeds": "aaaa", "prompt": None}, COMPLETIONS),
    ]
    for fields, route in refused:
        reply = client.post(route, **fields)
        assert reply.status_code == 400, fields
        assert "a session does not take" in reply.json()["error"]["message"]
    escaped = b'{"model": "m", "prompt": "a", "use_beam_\\u0073earch": true, "n": 2}'
    for content in (escaped, b"[]", b"{", b"", b"\xff", b'"a"', b"[" * 100000, b"null"):
        reply = requests.post(f"{client.url}{COMPLETIONS}", data=content, timeout=10)
        assert reply.status_code == 400, content[:20]
    body = {
        "model": "any",
        "messages": MESSAGES,
        "max_tokens": 2,
        "priority": -5,
        "request_id": "x",
    }
    body |= {"session_id": other.id, "cache_salt": "x", "vllm_xargs": {"session_id": "x"}}
    body |= {"kv_transfer_params": {"do_remote_prefill": True}, "store": True}
    headers = {
        "authorization": f"Bearer {EVALUATION_KEY}x",
        "x-request-id": "mine",
        "x-session-id": other.id,
        "x-data-parallel-rank": "7",
    }
    for _ in range(2):
        reply = requests.post(f"{client.url}{CHAT}", json=body, headers=headers, timeout=30)
        assert reply.status_code == 200, reply.text
        assert "mine" not in reply.json()["id"]
    evaluated = server.control("POST", "/evaluation", {"key": f"{EVALUATION_KEY}x"}).json()
    assert evaluated == {"oldest": None, "newest": None}
    claude = client.post("/v1/messages", messages=MESSAGES, n="x").json()
    assert claude["type"] == "error" and claude["error"]["type"] == "invalid_request_error"
    assert len(client.delete().calls) == 2 and not other.delete().calls


def test_pipelined_plain_request_is_not_kept(server):
    """It begins in a copy of the context of the request before it."""
    client = Client(server)
    body = {"model": "any", "messages": MESSAGES, "max_tokens": 3}
    plain = request_of(CHAT, body)
    with sent(server, f"/s/{client.id}{CHAT}", body) as connection:
        connection.sendall(plain + plain)
        reply = b""
        while reply.count(b"HTTP/1.1 200") < 3 or not reply.endswith(b"}"):
            reply += connection.recv(65536)
    assert len(client.delete().calls) == 1


def test_no_id_is_ever_logged(server):
    """After all the calls and refusals above, and some more."""
    clients = [Client(server), Client(server, max_calls=1)]
    for client in clients:
        assert client.post().status_code == 200
        client.post(), client.post(user="x" * (4 << 20))
        requests.get(f"{client.url}/v1/models?key={client.id}", timeout=10)
        requests.get(f"{server.url}/health/{client.id}/x", timeout=10)
        requests.get(f"{server.url}/trl_atropos/sessions/{client.id}/x", timeout=10)
        server.control("POST", f"/sessions/{client.id}")
        handshake = ["upgrade: websocket", "connection: upgrade", "sec-websocket-version: 13"]
        handshake.append("sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==")
        request = f"GET /s/{client.id}/v1/realtime HTTP/1.1\r\nhost: x\r\n"
        raw(server, (request + "\r\n".join(handshake) + "\r\n\r\n").encode())
        client.delete()
        client.post()
    sessions = SessionsReply.model_validate(server.control("GET", "/sessions").json())
    log = server.log.read_text()
    assert "/s/SESSION" in log or "INFO" not in log
    assert not [session.id for session in sessions.sessions if session.id in log]
    assert len(sessions.sessions) > 2 and sessions.in_flight == 0
    assert sessions.counts["opened"] >= 2 and sessions.counts["ended/deleted"] >= 2


# ------------------------------------------------------------------------- a trainer beside sessions


def current_version(server) -> int:
    """Other tests publish to the shared server too, in any order."""
    return ServerClient(server.url, 30, server.token).info().policy_version


@pytest.fixture
def trainer(server) -> Iterator[ServerClient]:
    """Holds the lease of the shared server, and leaves it as it was."""
    client = ServerClient(server.url, 30, server.token)
    client.hold_lease()
    yield client
    client.release_lease()
    wait_for(lambda: not client.info().lease_held, "the lease's end")


def test_hold_stops_new_sessions_and_no_calls_of_others(server, trainer):
    begun = Client(server)
    trainer.hold(True, 0.0)
    assert begun.post().status_code == 200
    evaluation = Client(server, evaluation=f"{EVALUATION_KEY}held")
    assert evaluation.post().status_code == 200
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(Client, server)
        wait_for(lambda: server.waiting() == 1, "the new session")
        assert not waiting.done()
        # one whose client does not wait leaves no session behind
        with suppress(requests.Timeout):
            headers = {"authorization": f"Bearer {server.token}"}
            url = f"{server.url}/trl_atropos/sessions"
            requests.post(url, json={}, headers=headers, timeout=0.3)
        opened = server.control("GET", "/sessions").json()["counts"]["opened"]
        wait_for(lambda: server.waiting() == 1, "the client to leave")
        trainer.hold(False, 1.0)
        waiting.result().delete()
    assert server.control("GET", "/sessions").json()["counts"]["opened"] == opened + 1
    begun.delete()
    evaluation.delete()
    answer = server.control("POST", "/evaluation", {"key": f"{EVALUATION_KEY}held"}).json()
    version = trainer.info().policy_version
    assert answer == {"oldest": version, "newest": version}


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({"settings": {"temperatur": 1}}, "temperatur"),
        ({"settings": {"temperature": -1}}, "temperature"),
        ({"evaluation": "mine"}, "evaluation"),
        ({"deadline": 0}, "deadline"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_wrong_session_is_refused_by_field(server, query, words):
    reply = server.control("POST", "/sessions", query)
    assert reply.status_code == 400
    assert words in reply.json()["error"]


def test_session_ends_at_its_deadline_with_what_it_has(server):
    # the first deadline may pass before a busy machine has sampled anything
    for deadline in (0.2, 0.4, 0.8, 1.6, 3.2):
        late = Client(server, deadline=deadline)
        call = late.post(max_tokens=480, ignore_eos=True, n=60)
        reply = late.delete()
        assert reply.ended == "deadline"
        assert reply.counts["tokens"] == sum(map(len, sampled(reply)))
        assert call.status_code == 410 and late.post().status_code == 410
        if reply.counts["tokens"] > 0:
            return
    pytest.fail(f"within {deadline} s, the call sampled no token")


def test_session_ends_after_a_silence(server):
    silent = Client(server, silence=0.5)
    wait_for(lambda: silent.kept().ended, "the end of the silence")
    assert silent.delete().ended == "silence"
    assert silent.post().status_code == 410


@pytest.mark.parametrize(
    "count", [70, pytest.param(1000, marks=[pytest.mark.full, pytest.mark.slow(200)])]
)
def test_kept_tokens_are_those_that_vllm_counts(server, count):
    """Whatever agents do: delivered tokens are kept, to the token."""
    replies, generated = inflict(server, count)
    tokens = sum(reply.counts["tokens"] for reply in replies)
    assert tokens == generated > 10 * count
    for reply in replies:
        assert reply.counts["in_flight"] == 0
        assert reply.counts["tokens"] == sum(map(len, sampled(reply)))
        marked = sum(n for name, n in reply.counts.items() if name.startswith("marked/"))
        assert marked == 0
    seen = kinds(replies)
    wanted = {"length", "abort", "refused/ended", "refused/tokens", "refused/calls", "refused/body"}
    assert wanted <= seen.keys(), seen
