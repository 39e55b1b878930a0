"""The version that a row is tagged with is that of the weights which sampled it, on a server that
is published to in the middle of its requests. Each test leaves the policy at another version; none
asks for a certain one."""

import asyncio
import dataclasses
import itertools
import json
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
import requests
from atroposlib.envs.server_handling.managed_server import ManagedServer
from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from atroposlib.envs.server_handling.vllm_server import VLLMServer

from recipes.own_environment.environment import end_turn
from tests.rollouts.conftest import Api
from tests.server.sessions import Client
from tests.server_process import Server
from tests.weights.versions import (
    KEPT,
    Call,
    Completion,
    MovingPolicy,
    generate,
    openai,
    row_of,
    wait_for,
)
from trl_atropos import episode
from trl_atropos.errors import RolloutError
from trl_atropos.protocol import completion_key
from trl_atropos.rollouts.intake import Intake
from trl_atropos.rollouts.rollout import Rollout
from trl_atropos.rollouts.source import AtroposSource, RunInfo
from trl_atropos.rollouts.versions import VersionBook
from trl_atropos.rollouts.wire import read_group
from trl_atropos.services.addresses import free_port

pytestmark = [pytest.mark.server, pytest.mark.slow]
PROMPT = [64, 65, 66, 28]


@pytest.fixture(scope="module")
def policy(server) -> Iterator[MovingPolicy]:
    policy = MovingPolicy(server)
    yield policy
    policy.put_back()


@pytest.fixture(scope="module")
def book(server) -> VersionBook:
    return VersionBook([server.url], server.token, timeout=10)


def tagged(book: VersionBook, *rows: Rollout) -> list[tuple[int | None, int | None]]:
    book.tag(list(rows))
    return [(row.policy_version, row.newest_version) for row in rows]


def assert_true(
    policy: MovingPolicy, book: VersionBook, completions: list[Completion]
) -> list[tuple[int, int]]:
    """Each completion is tagged with the versions whose weights gave its first and its last token.
    Returns those. The completions have prompts of one length and one number of tokens."""
    tags = tagged(book, *map(row_of, completions))
    ambiguous = 0
    for tag, samplers in zip(tags, policy.samplers(completions), strict=True):
        assert all(samplers), "a token has the log-probability of no version"
        assert (tag[0] in samplers[0], tag[1] in samplers[-1]) == (True, True), (
            tag,
            samplers[0],
            samplers[-1],
        )
        ambiguous += (len(samplers[0]) > 1) + (len(samplers[-1]) > 1)
    # Of a few completions one may be ambiguous by chance.
    assert ambiguous <= 2 + 0.1 * 2 * len(completions), (
        "the versions are too much alike to tell them apart"
    )
    return tags


def test_rows_are_tagged_with_sampling_versions(policy, book, server):
    rng = random.Random(0)
    long = Call(lambda: generate(server, PROMPT, 300, n=8))
    # by the version after whose publish they were asked for
    short: dict[int, list[Completion]] = {}
    while long.is_alive() and len(short) < KEPT // 2:  # or the first of them would be forgotten
        # a trainer that publishes seldom skips some
        policy.publish(policy.version + rng.choice([1, 1, 3]))
        prompt = [rng.randrange(256) for _ in range(rng.randint(3, 200))]
        short[policy.version] = generate(server, prompt, rng.randint(1, 20), n=4)
    for version, completions in short.items():
        assert assert_true(policy, book, completions) == [(version, version)] * 4
    for begun, ended in assert_true(policy, book, long.result()):
        assert len([version for version in short if begun < version <= ended]) >= 2


def test_queued_completion_is_as_new_as_first_token(policy, book, server):
    for _ in range(5):  # on a busy machine, the first and the last may begin between two publishes
        call = Call(lambda: generate(server, PROMPT, 20, n=200))  # the CPU server runs 128 at once
        policy.publish_during(call)
        tags = assert_true(policy, book, call.result())
        if len({begun for begun, _ in tags}) > 1:
            return
    pytest.fail("five times, no publish fell between the first and the last")


@pytest.mark.parametrize(("route", "stream"), [("completions", True), ("chat/completions", False)])
def test_completions_of_openai_routes_are_known(policy, book, server, route, stream):
    call = Call(lambda: openai(server, route, 400, n=8, stream=stream))
    policy.publish_during(call)
    assert all(begun < ended for begun, ended in assert_true(policy, book, call.result()))
    later = openai(server, route, 5, n=2, stream=stream)
    assert assert_true(policy, book, later) == [(policy.version, policy.version)] * 2


def test_multi_turn_row_is_as_old_as_oldest_turn(policy, book, server):
    old = policy.version
    (first,) = generate(server, PROMPT, 8)
    policy.publish(old + 1)
    (second,) = generate(server, first.prompt + first.tokens + [7, 8, 9], 8)
    policy.publish(old + 2)
    assert_true(policy, book, [first])
    assert_true(policy, book, [second])
    assert tagged(book, row_of(first, second)) == [(old, old + 1)]
    forged = Completion(second.prompt, second.tokens, [-9.0, *second.logprobs[1:]])
    assert tagged(book, row_of(first, forged)) == [(None, None)]


def test_branches_are_as_old_as_oldest_call_and_as_new_as_newest(policy, book, server):
    """In whatever order the row has them: here the last call comes first."""
    old = policy.version
    (first,) = generate(server, PROMPT, 8)
    policy.publish(old + 1)
    (branch,) = generate(server, [*PROMPT[:2], 5, 6, 7], 8)  # leaves the prompt, then goes on
    (alone,) = generate(server, [9, 10, 11], 8)
    policy.publish(old + 2)
    (last,) = generate(server, first.prompt + first.tokens + [7, 8, 9], 8)
    rows = []
    for call in (last, first, branch, alone):
        length = len(call.prompt)
        tokens = call.prompt + call.tokens
        rows.append((tokens, [-100] * length + call.tokens, [1.0] * length + call.logprobs))
    item = episode(rows)
    assert len(item["overrides"]["branches"]) == 3
    group = {name: [value] for name, value in item.items()} | {"scores": [1.0]}
    (row,) = Intake(512, 1.0, "raw").admit([read_group(json.loads(json.dumps(group)))])
    assert tagged(book, row) == [(old, old + 2)]
    row.logprobs[-1] -= 1
    assert tagged(book, row) == [(None, None)]


def test_managed_server_rows_are_known_over_turns(policy, book, server):
    old = policy.version
    client = VLLMServer(
        APIServerConfig(
            model_name="any",
            tokenizer_name=server.model,
            base_url=f"{server.url}/v1",
            api_key="x",
            server_type="vllm",
        )
    )

    async def converse() -> list:
        managed = ManagedServer(client, tokenizer=client.tokenizer)
        messages = [{"role": "user", "content": "say a"}]
        for turn in range(3):
            sampling = {"max_tokens": 6, "temperature": 1.0, "n": 1}
            reply = await managed.chat_completion(messages=messages, **sampling)
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
            messages.append({"role": "user", "content": "again"})
            if turn < 2:
                await asyncio.to_thread(policy.publish, old + turn + 1)
        others = ManagedServer(client, tokenizer=client.tokenizer)
        await others.chat_completion(
            messages=[{"role": "user", "content": "say b"}], **sampling | {"n": 4}
        )
        return managed.get_state()["nodes"][-1:] + others.get_state()["nodes"]

    nodes = asyncio.run(converse())
    group = {
        "tokens": [node.tokens for node in nodes],
        "masks": [node.masked_tokens for node in nodes],
        "inference_logprobs": [node.logprobs for node in nodes],
        "scores": [float(i) for i, _ in enumerate(nodes)],
    }
    rows = Intake(512, 1.0, "refuse").admit([read_group(json.loads(json.dumps(group)))])
    assert np.diff(rows[0].mask).sum() == 4, "the first row should have three turns"
    assert tagged(book, *rows) == [(old, old + 2)] + [(old + 2, old + 2)] * 4


# Opens the reasoning in the prompt, and strips all but the end of earlier answers, as templates of
# thinking models strip their reasoning.
STRIPPING = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{{ message['content'][-2:] if message['role'] == 'assistant' else message['content'] }}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)


def test_nodes_of_managed_server_become_an_episode(policy, book, server):
    """By one line, on a template that strips what was sampled. The server knows every call."""
    client = VLLMServer(
        APIServerConfig(
            model_name="any",
            tokenizer_name=server.model,
            base_url=f"{server.url}/v1",
            api_key="x",
            server_type="vllm",
        )
    )
    client.tokenizer.chat_template = STRIPPING

    async def converse() -> list:
        managed = ManagedServer(client, tokenizer=client.tokenizer)
        messages = [{"role": "user", "content": "say a"}]
        for _ in range(3):
            reply = await managed.chat_completion(
                messages=messages, max_tokens=8, temperature=1.0, n=1
            )
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
            messages.append({"role": "user", "content": "again"})
        return managed.get_state()["nodes"]

    nodes = asyncio.run(converse())
    assert len(nodes) == 3
    item = episode(nodes)
    assert len(item["overrides"]["branches"]) == 2
    group = {name: [value] for name, value in item.items()} | {"scores": [1.0]}
    (row,) = Intake(512, 1.0, "raw").admit([read_group(json.loads(json.dumps(group)))])
    assert row.mask.sum() == sum(mask != -100 for node in nodes for mask in node.masked_tokens)
    assert len(row.row) < sum(len(node.tokens) for node in nodes)
    assert tagged(book, row) == [(policy.version, policy.version)]


@pytest.mark.parametrize("helped", [True, False])
def test_end_turn_avoids_doubled_end_token(server, helped):
    """`end_turn` of the template. Without it, Atropos has the token of the model and that of the
    chat template."""
    client = VLLMServer(
        APIServerConfig(
            model_name="any",
            tokenizer_name=server.model,
            base_url=f"{server.url}/v1",
            api_key="x",
            server_type="vllm",
        )
    )
    end = client.tokenizer.eos_token_id

    async def converse() -> list[int]:
        managed = ManagedServer(client, tokenizer=client.tokenizer)
        messages = [{"role": "user", "content": "say a"}]
        only_end = {"logit_bias": {str(end): 100.0}}
        for sampling in (only_end, {}):
            reply = await managed.chat_completion(
                messages=messages, max_tokens=3, temperature=1.0, n=1, **sampling
            )
            if helped:
                end_turn(managed, client.tokenizer)
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
            messages.append({"role": "user", "content": "again"})
        (node,) = managed.get_state()["nodes"]
        assert len(node.tokens) == len(node.masked_tokens) == len(node.logprobs)
        return node.tokens

    tokens = asyncio.run(converse())
    text = client.tokenizer.decode(tokens)
    assert text.startswith(
        "u:say aa:<|end|>u:againa:" if helped else "u:say aa:<|end|><|end|>u:againa:"
    )


def test_equal_completions_count_as_oldest(policy, book, server):
    """Nothing tells them apart, so that a row is never taken for newer than it is."""
    old = policy.version
    (first,) = generate(server, PROMPT, 8, temperature=0.0)
    policy.publish_the_same_weights(old + 1)
    (second,) = generate(server, PROMPT, 8, temperature=0.0)
    assert first == second
    assert tagged(book, row_of(first), row_of(second)) == [(old, old)] * 2


def test_changed_row_is_unknown(policy, book, server):
    (completion,) = generate(server, PROMPT, 8)
    row = row_of(completion)
    assert tagged(book, row) == [(policy.version, policy.version)]
    changed = [row_of(completion) for _ in range(5)]
    changed[0].logprobs[3] = np.nextafter(row.logprobs[3], np.float32(-100))
    changed[1].completion_ids[3] += 1
    changed[2].prompt_ids[0] += 1
    changed[3].logprobs[3] = np.nan
    changed[4].mask[0] = False
    for other in changed:
        other.policy_version = other.newest_version = 5  # of an earlier tagging
    assert tagged(book, *changed) == [(None, None)] * 5


def test_aborted_request_leaves_nothing_behind(policy, server):
    def noted() -> int:
        return len(server.control("GET", "/versions").json()["keys"])

    before = noted()
    body = {"prompt": "abc=", "n": 64, "max_tokens": 500, "ignore_eos": True, "logprobs": 0}
    with pytest.raises(requests.Timeout):
        requests.post(f"{server.url}/generate", json=body, timeout=0.3)
    wait_for(lambda: server.metric("num_requests_running") == 0, "the request to be dropped")
    assert noted() == before


def test_versions_are_told_in_pause(policy, book, server):
    (completion,) = generate(server, PROMPT, 4)
    policy.client.pause()
    try:
        began = time.monotonic()
        assert tagged(book, row_of(completion)) == [(policy.version, policy.version)]
        # seconds; a request that waits does so until the pause ends
        assert time.monotonic() - began < 20
    finally:
        policy.client.resume(policy.version)


def test_versions_route_needs_token_and_valid_keys(server):
    body = {"keys": [completion_key([1], [2], [-1.0]).hex()]}
    assert server.control("POST", "/versions", body, token="wrong").status_code == 401
    nothing = {"versions": [None], "settings": [], "sampled_with": [None]}
    assert server.control("POST", "/versions", body).json() == nothing
    for wrong in ({"keys": ["xyz"]}, {"keys": "00"}, {}):
        assert server.control("POST", "/versions", wrong).status_code == 400


def test_unreachable_server_is_named_once(policy, server, caplog):
    (completion,) = generate(server, PROMPT, 4)
    nowhere = f"http://127.0.0.1:{free_port()}"
    both = VersionBook([nowhere, server.url], server.token, timeout=10)
    assert (
        tagged(both, row_of(completion))
        == tagged(both, row_of(completion))
        == [(policy.version,) * 2]
    )
    assert caplog.text.count(f"The server at {nowhere} does not tell which policy versions") == 1
    wrong = VersionBook([server.url], "wrong", timeout=10)
    assert tagged(wrong, row_of(completion)) == [(None, None)]
    assert "refused the control token" in caplog.text


# ---------------------------------------------------------------------- what rows were sampled with


def test_all_rows_at_other_temperature_end_run(policy, server):
    rows = [row_of(completion) for completion in generate(server, PROMPT, 8, n=4, temperature=0.8)]
    book = VersionBook([server.url], server.token, timeout=10, temperature=1.0)
    with pytest.raises(
        RolloutError,
        match=r"Environment 0 sampled at temperature 0\.8.*log-probabilities at temp.* 1\.",
    ):
        book.tag(rows)
    VersionBook([server.url], server.token, timeout=10, temperature=0.8).tag(rows)


def test_other_settings_warn_once_per_environment(policy, server, caplog):
    settings = {
        "top_p": 0.5,
        "top_k": 20,
        "min_p": 0.01,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.1,
    }
    settings["frequency_penalty"] = 0.25
    rows = [row_of(completion) for completion in generate(server, PROMPT, 8, n=4, **settings)]
    book = VersionBook([server.url], server.token, timeout=10, temperature=1.0)
    book.tag([row_of(completion) for completion in generate(server, PROMPT, 8, n=4, top_k=-1)])
    assert "sampled some rollouts with" not in caplog.text
    book.tag(rows)
    book.tag(rows)
    assert caplog.text.count("Environment 0 sampled some rollouts with") == 1
    assert all(f"{name} {value:g}" in caplog.text for name, value in settings.items())


RESHAPING = {
    "structured_outputs": {"choice": ["ab", "ba"]},
    "logit_bias": {"65": -5.0},
    "allowed_token_ids": list(range(60, 90)),
    "bad_words": ["a"],
    "min_tokens": 4,
}


@pytest.mark.parametrize("field", RESHAPING)
def test_reshaping_fields_are_warned_about(policy, server, caplog, field):
    """The server's log-probabilities of such tokens are not the policy's."""
    book = VersionBook([server.url], server.token, timeout=10, temperature=1.0)
    book.tag([row_of(completion) for completion in generate(server, PROMPT, 6, top_p=0.9)])
    rows = [
        row_of(completion)
        for completion in generate(server, PROMPT, 6, n=4, **{field: RESHAPING[field]})
    ]
    assert tagged(book, *rows) == [(policy.version,) * 2] * 4
    book.tag(rows)
    assert (
        caplog.text.count(
            "Environment 0 sampled some rollouts with top_p 0.9, where the trainer scores"
        )
        == 1
    )
    assert (
        caplog.text.count(
            f"Environment 0 sampled some rollouts with {field}, where the trainer scores"
        )
        == 1
    )


def test_neutral_fields_are_not_warned_about(policy, server, caplog):
    neutral = {
        "stop_token_ids": [3],
        "min_tokens": 0,
        "ignore_eos": True,
        "logit_bias": {},
        "bad_words": [],
    }
    book = VersionBook([server.url], server.token, timeout=10, temperature=1.0)
    book.tag([row_of(completion) for completion in generate(server, PROMPT, 6, **neutral)])
    assert "sampled some rollouts with" not in caplog.text


def test_grammar_of_openai_route_is_warned_about(policy, server, caplog):
    book = VersionBook([server.url], server.token, timeout=10, temperature=1.0)
    response_format = {
        "type": "json_schema",
        "json_schema": {"name": "digit", "schema": {"type": "integer"}},
    }
    book.tag([row_of(*openai(server, "chat/completions", 4, response_format=response_format))])
    assert "Environment 0 sampled some rollouts with structured_outputs" in caplog.text


def test_few_rows_at_other_temperature_only_warn(policy, server, caplog):
    """An environment may mean it, and a run of hours should not end for it."""
    book = VersionBook([server.url], server.token, timeout=10, temperature=1.0)
    book.tag([row_of(completion) for completion in generate(server, PROMPT, 8)])
    book.tag([row_of(completion) for completion in generate(server, PROMPT, 8, temperature=0.0)])
    assert (
        "Environment 0 sampled some rollouts with temperature 0, where the trainer scores every "
        "token" in caplog.text
    )


# ---------------------------------------------------------------------------- rows that are too old


@contextmanager
def environment(
    server: Server, api: Api, ahead: int | None = None, second: int = 24
) -> Iterator[Callable[[], bool]]:
    """Sends groups of four without a pause, as far ahead of the trainer as it gets; or, like
    Atropos, with at most `ahead` batches of two groups in flight and at the API. The completions of
    every second batch have `second` tokens, those of the others 24. Yields what tells, while
    requests are held, whether all that it may ask for is asked for, and what has begun has ended:
    it is at the API, or held."""
    stop, rng, lock, most = threading.Event(), random.Random(0), threading.Lock(), 2 * (ahead or 1)
    begun, in_flight = itertools.count(), []

    def begins() -> int | None:
        with lock:
            if ahead is not None and len(in_flight) + api.get("/status")["queue_size"] >= most:
                return None
            in_flight.append(1)
            return 24 if next(begun) % most < 2 else second

    def rests() -> bool:
        return api.get("/status")["queue_size"] + server.waiting() == most

    def work() -> None:
        while not stop.is_set():
            if (length := begins()) is None:
                time.sleep(0.01)
                continue
            completions = generate(server, [rng.randrange(256) for _ in range(20)], length, n=4)
            group = {
                "tokens": [completion.prompt + completion.tokens for completion in completions],
                "masks": [
                    [-100] * len(completion.prompt) + completion.tokens
                    for completion in completions
                ],
                "inference_logprobs": [
                    [1.0] * len(completion.prompt) + completion.logprobs
                    for completion in completions
                ],
                "scores": [rng.random() for _ in completions],
            }
            api.deliver(group)
            in_flight.pop()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(most)]
    for thread in threads:
        thread.start()
    try:
        yield rests
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)


def completion_of(row: Rollout) -> Completion:
    return Completion(row.prompt_ids.tolist(), row.completion_ids.tolist(), row.logprobs.tolist())


def pulled_ahead(source: AtroposSource) -> int:
    """Rows that were pulled and not handed out when the last ones were."""
    state = source.state()
    return state["pulled"] - state["cursor"]


def run_info(policy: MovingPolicy, folder: Path) -> RunInfo:
    return RunInfo(
        batch_size=8,
        max_sequence_length=512,
        temperature=1.0,
        starting_step=policy.version,
        max_steps=1000,
        output_dir=str(folder),
        save_steps=0,
        run_name="staleness",
        policy_version=lambda: policy.version,
    )


@pytest.fixture
def api() -> Iterator[Api]:
    api = Api(free_port())
    api.start()
    yield api
    api.stop()


def test_diagnosis_tells_refusals_of_server(policy, book, server, api, tmp_path):
    for _ in range(3):
        assert server.generate(prompt={"prompt_token_ids": [64] * 600}).status_code == 400
    with closing(AtroposSource(api.url, versions=book)) as source:
        source.start(run_info(policy, tmp_path))
        assert re.search(
            r"The server at http.* has refused \d+ requests .*\b512\b.*--max-model-len",
            source.diagnose(),
        )


def test_sessions_before_a_run_are_not_counted_in_it(policy, server, api, tmp_path):
    Client(server).delete()
    book = VersionBook([server.url], server.token, timeout=10)
    with closing(AtroposSource(api.url, versions=book)) as source:
        source.start(run_info(policy, tmp_path))
        Client(server).delete()
        book.sessions.read()
        metrics = source.metrics()
        assert metrics["sessions/opened"] == metrics["sessions/ended_deleted"] == 1


def test_strict_on_policy_run_drops_no_rollouts(policy, book, server, api, tmp_path):
    """What the environment asks for while the trainer trains waits at the server, until the next
    version is there."""
    wanted = []
    with closing(AtroposSource(api.url, versions=book, max_staleness=0)) as source:
        source.start(
            dataclasses.replace(run_info(policy, tmp_path), when_wanted_soon=wanted.append)
        )
        dropped = 0.0
        with environment(server, api, ahead=1) as rests:
            for _ in range(5):
                rows = source.poll(8, timeout=180)
                assert rows is not None, source.diagnose()
                assert {row.staleness for row in rows} == {0}
                wait_for(rests, "the environment to have asked for the next groups", seconds=60)
                dropped += source.metrics()["rollouts/dropped_stale"]
                policy.publish(policy.version + 1)
                wanted[0]()
            source.close()
            policy.renew_lease()  # or the environment would wait
        assert dropped == 0
    # nothing is held any more
    assert server.generate(prompt={"prompt_token_ids": PROMPT}, max_tokens=1).ok


@pytest.mark.parametrize("second", [240, 24])
def test_held_requests_bound_mean_staleness_by_one(policy, book, server, api, tmp_path, second):
    """What waited begins with the next policy, also where a batch is complete then and taken at
    once. Where two are complete at the same time, as where all completions are as long as they may
    be, the environment asks for two anew: one begins with each policy, and is sampled while the
    trainer trains."""
    wanted, ages = [], []
    with closing(AtroposSource(api.url, versions=book, hold_requests=True)) as source:
        source.start(
            dataclasses.replace(run_info(policy, tmp_path), when_wanted_soon=wanted.append)
        )
        with environment(server, api, 2, second) as rests:
            for _ in range(6):
                rows = source.poll(8, timeout=180)
                assert rows is not None, source.diagnose()
                ages.append([row.staleness for row in rows])
                wait_for(rests, "the environment to have asked for the next groups", seconds=60)
                policy.publish(policy.version + 1)
                wanted[0]()
            source.close()
            policy.renew_lease()  # or the environment would wait
        assert 0.4 <= np.mean(ages) <= 1  # without holding, it is above 1.5
        # On a busy machine, a group may be late and be sampled by the next policy.
        assert second > 24 or np.mean(np.equal(ages[1:], 1)) >= 0.8
    # nothing is held any more
    assert server.generate(prompt={"prompt_token_ids": PROMPT}, max_tokens=1).ok


def test_max_staleness_0_hands_out_no_older_rows(policy, book, server, api, tmp_path):
    with closing(
        AtroposSource(api.url, versions=book, max_staleness=0, prefetch_batches=2)
    ) as source:
        source.start(run_info(policy, tmp_path))
        with environment(server, api, ahead=4):
            for _ in range(6):
                rows = source.poll(8, timeout=180)
                assert rows is not None, source.diagnose()
                for row, samplers in zip(
                    rows, policy.samplers([completion_of(row) for row in rows]), strict=True
                ):
                    assert row.policy_version == row.newest_version == policy.version
                    assert [policy.version in token for token in samplers] == [True] * len(samplers)
                wait_for(
                    lambda: pulled_ahead(source) >= 8, "the environment to get ahead", seconds=60
                )
                policy.publish(policy.version + 1)
            metrics = source.metrics()
        assert metrics["rollouts/dropped_stale"] > 0
        assert metrics["rollouts/share_unknown_version"] == 0
