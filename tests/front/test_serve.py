"""The front of `vllm_mode: restart` with a real engine behind it: what environments see while that
is away."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import requests
import torch
from transformers import AutoModelForCausalLM

from tests.forge import FORKED_ENGINES
from tests.server.sessions import COMPLETIONS, TOLERANCE, Client, worst_difference
from tests.server_process import ENVIRONMENT, MAX_MODEL_LEN, Server, free_port, make_tiny_model
from tests.weights.versions import wait_for
from trl_atropos.protocol import (
    EVALUATION_KEY,
    TOKEN_VARIABLE,
    SamplingSettings,
    SessionReply,
    VersionsReply,
    completion_key,
)
from trl_atropos.services.addresses import port_of
from trl_atropos.services.manager import Services

pytestmark = [pytest.mark.server, pytest.mark.slow]

PROMPT = [64, 65, 66, 28]
GONE_WITHIN = 15.0
DRAIN_TIMEOUT = 20.0
START_WITHIN = 240.0
NEW_VERSION = 7


def front_command(model: str, port: int) -> list[str]:
    command = [
        sys.executable,
        "-m",
        "trl_atropos.server.launch",
        model,
        "--vllm_mode",
        "restart",
        "--port",
        str(port),
    ]
    command += ["--drain_timeout", str(DRAIN_TIMEOUT), "--max-model-len", str(MAX_MODEL_LEN)]
    return command + (["--gpu-memory-utilization", "0.1"] if torch.cuda.is_available() else [])


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[str]:
    """Two checkpoints of one architecture with other weights."""
    return [make_tiny_model(tmp_path_factory.mktemp(f"model_{seed}"), seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def references(models) -> dict[str, torch.nn.Module]:
    return {
        model: AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        for model in models
    }


@pytest.fixture(scope="module")
def front(models, tmp_path_factory) -> Iterator[Server]:
    port, token = free_port(), uuid.uuid4().hex
    url = f"http://127.0.0.1:{port}"
    with Services(tmp_path_factory.mktemp("front_logs")) as services:
        environment = {**ENVIRONMENT, **FORKED_ENGINES, TOKEN_VARIABLE: token}
        services.start(
            "front", front_command(models[0], port), env=environment, health_url=f"{url}/health"
        )
        services.wait_healthy("front", START_WITHIN)
        guard = services.running()[0].guard
        (api,) = psutil.Process(guard.pid).children()
        yield Server(url, token, models[0], api, process=guard)


@contextmanager
def lease(server) -> Iterator[None]:
    """The trainer's lease; its end is the trainer's death, as the kernel shows it to the server."""
    reply = requests.post(
        f"{server.url}/trl_atropos/lease", headers=authorization(server), stream=True, timeout=30
    )
    assert reply.status_code == 200, reply.text
    try:
        yield
    finally:
        reply.close()


def authorization(server) -> dict[str, str]:
    return {"authorization": f"Bearer {server.token}"}


def restart(server, model: str) -> requests.Response:
    body = {"model": model}
    url = f"{server.url}/trl_atropos/restart"
    return requests.post(url, json=body, headers=authorization(server), timeout=2 * START_WITHIN)


def info(server) -> dict:
    return server.control("GET", "/info").json()


def sample(server, num_tokens: int = 6, **fields) -> requests.Response:
    body = {
        "prompt": {"prompt_token_ids": PROMPT},
        "logprobs": 0,
        "max_tokens": num_tokens,
        "ignore_eos": True,
    }
    return requests.post(f"{server.url}/generate", json={**body, **fields}, timeout=START_WITHIN)


def complete(server) -> requests.Response:
    body = {"model": "any name", "prompt": "abc=", "max_tokens": 6}
    return requests.post(f"{server.url}/v1/completions", json=body, timeout=START_WITHIN)


def seed_of_engine(server) -> str:
    commands = [process.cmdline() for process in server.api.children(recursive=True)]
    (seed,) = {command[command.index("--seed") + 1] for command in commands if "--seed" in command}
    return seed


@torch.no_grad()
def error_against(model: torch.nn.Module, reply: requests.Response) -> float:
    """Largest difference between a reply's log-probabilities and a model's, in nats."""
    (tokens,), (entries,) = reply.json()["token_ids"], reply.json()["logprobs"]
    logits = model(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    sampled = torch.tensor([next(iter(entry[0].values())) for entry in entries])
    return (sampled - expected).abs().max().item()


class Call(threading.Thread):
    """Calls `work` in the background; `result()` is what it returned or raised, `ended` when."""

    def __init__(self, work) -> None:
        super().__init__(daemon=True)
        self._work = work
        self._value = None
        self._error: Exception | None = None
        self.ended: float | None = None
        self.start()

    def run(self) -> None:
        try:
            self._value = self._work()
        except Exception as error:  # noqa: BLE001 - raised again in the thread that asks for the result
            self._error = error
        self.ended = time.monotonic()

    def result(self, timeout: float = 2 * START_WITHIN):
        self.join(timeout)
        assert not self.is_alive(), f"no result within {timeout} s"
        if self._error is not None:
            raise self._error
        return self._value


@dataclass
class Publish:
    """One publish onto the second model under load, and what every client got."""

    replies: dict[str, list[requests.Response]] = field(
        default_factory=lambda: {"sample": [], "complete": []}
    )
    in_flight: Call | None = None  # a request that the pause met
    health: set[int] = field(default_factory=set)
    infos: list[dict] = field(default_factory=list)
    paused_from: float = 0.0
    paused_at: float = 0.0
    answer: dict = field(default_factory=dict)  # of /restart
    seeds: list[str] = field(default_factory=list)  # of the two engines
    session: Client | None = None  # that began before, and goes on behind the publish
    deleted: Client | None = None  # that was deleted while the engine was away
    kept_meanwhile: list[SessionReply] = field(default_factory=list)  # of the two


@pytest.fixture(scope="module")
def publish(front, models) -> Publish:
    publish = Publish()
    with load_on(front, publish):
        wait_for(lambda: all(publish.replies.values()) and publish.infos, "replies of every kind")
        publish_second_model(front, models, publish)
    return publish


@contextmanager
def load_on(front: Server, publish: Publish) -> Iterator[None]:
    """Asks for samples without an end, and looks at the front, until the block ends: whatever
    happens in it, nobody asks any more behind it."""
    stop = threading.Event()

    def load(work, replies: list) -> None:
        while not stop.is_set():
            replies.append(work(front))

    def watch() -> None:
        while not stop.is_set():
            publish.health.add(requests.get(f"{front.url}/health", timeout=10).status_code)
            publish.infos.append(info(front))
            time.sleep(0.2)

    calls = [
        Call(lambda: load(sample, publish.replies["sample"])),
        Call(lambda: load(complete, publish.replies["complete"])),
        Call(watch),
    ]
    try:
        yield
    finally:
        stop.set()
        deadline = time.monotonic() + START_WITHIN
        for call in calls:
            call.join(max(0.0, deadline - time.monotonic()))
    for call in calls:
        call.result()


def request_beside_two(front: Server) -> Call:
    """A request that runs beside one of each kind."""
    deadline = time.monotonic() + START_WITHIN
    while time.monotonic() < deadline:
        call = Call(lambda: sample(front, num_tokens=400))
        while call.is_alive():  # on a busy machine, it may end before this is seen
            if front.metric("num_requests_running") == 3:
                return call
        call.result()
    pytest.fail(f"in {START_WITHIN} s, no request ran beside the other two")


def publish_second_model(front: Server, models: list[str], publish: Publish) -> None:
    """Publishes while sessions go on, and waits for replies by the new version."""
    publish.session = Client(front, evaluation=f"{EVALUATION_KEY}front", max_calls=2)
    publish.deleted = Client(front)
    for client in (publish.session, publish.deleted):
        reply = client.post(COMPLETIONS, prompt=[64], max_tokens=4, ignore_eos=True)
        assert reply.status_code == 200
    with lease(front):
        publish.in_flight = request_beside_two(front)
        publish.paused_from = time.monotonic()
        assert front.control("POST", "/pause", {"clear_cache": True}).status_code == 200
        publish.paused_at = time.monotonic()
        publish.seeds.append(seed_of_engine(front))
        reply = restart(front, models[1])
        assert reply.status_code == 200, reply.text
        publish.answer = reply.json()
        publish.kept_meanwhile = [publish.session.kept(), publish.deleted.delete()]
        continued = Call(lambda: publish.session.post(COMPLETIONS, prompt=[64, 65], max_tokens=6))
        publish.seeds.append(seed_of_engine(front))
        before = {kind: len(replies) for kind, replies in publish.replies.items()}
        front.control("POST", "/resume", {"policy_version": NEW_VERSION})
    assert continued.result().status_code == 200
    wait_for(
        lambda: (
            all(len(replies) >= before[kind] + 2 for kind, replies in publish.replies.items())
            and publish.infos[-1]["policy_version"] == NEW_VERSION
        ),
        "replies of every kind by the new version",
    )


def test_clients_see_no_error_across_restart(publish):
    assert {reply.status_code for replies in publish.replies.values() for reply in replies} == {200}
    assert publish.health == {200}
    assert publish.answer["restart_s"] > 1  # it did go away
    for replies in publish.replies.values():
        assert max(reply.elapsed.total_seconds() for reply in replies) > publish.answer["restart_s"]


def test_answers_come_from_weights_of_their_version(publish, models, references):
    model_of = {"0-0": models[0], f"{NEW_VERSION}-{NEW_VERSION}": models[1]}
    versions = [reply.headers["x-policy-version"] for reply in publish.replies["sample"]]
    first_new = versions.index(f"{NEW_VERSION}-{NEW_VERSION}")
    assert versions == ["0-0"] * first_new + [f"{NEW_VERSION}-{NEW_VERSION}"] * (
        len(versions) - first_new
    )
    for reply in publish.replies["sample"][max(0, first_new - 10) : first_new + 10]:
        for model, reference in references.items():
            right = model == model_of[reply.headers["x-policy-version"]]
            assert (error_against(reference, reply) < 1e-4) == right


def test_completion_versions_outlive_their_engine(publish, front):
    replies = [*publish.replies["sample"], publish.in_flight.result()]
    keys, versions = [], []
    for reply in replies:
        (tokens,), (entries,) = reply.json()["token_ids"], reply.json()["logprobs"]
        logprobs = [next(iter(entry[0].values())) for entry in entries]
        keys.append(completion_key(PROMPT, tokens, logprobs).hex())
        versions.append([int(version) for version in reply.headers["x-policy-version"].split("-")])
    assert {tuple(span) for span in versions} == {(0, 0), (NEW_VERSION, NEW_VERSION)}
    told = front.control("POST", "/versions", {"keys": [*keys, "00"]}).json()
    assert told["versions"] == [*versions, None]
    assert VersionsReply.model_validate(told).settings == [SamplingSettings()]
    assert told["sampled_with"] == [0] * len(keys) + [None]


def test_request_in_flight_finishes_on_old_weights(publish, models, references):
    reply = publish.in_flight.result()
    assert publish.paused_from < publish.in_flight.ended <= publish.paused_at + 0.5
    assert reply.headers["x-policy-version"] == "0-0"
    assert error_against(references[models[0]], reply) < 1e-4


def test_model_name_stays_while_version_follows(publish, front, models):
    assert requests.get(f"{front.url}/v1/models", timeout=10).json()["data"][0]["id"] == models[0]
    assert {(told["policy_version"], told["paused"]) for told in publish.infos} >= {
        (0, False),
        (0, True),
        (NEW_VERSION, False),
    }
    assert len({told["instance"] for told in publish.infos}) == 1


def test_sessions_outlive_their_engine(publish, front, references, models):
    first, second = publish.kept_meanwhile
    assert [len(first.segments), len(second.segments)] == [1, 1]
    assert (first.ended, second.ended) == (None, "deleted")
    assert publish.deleted.post().status_code == 410
    reply = publish.session.kept()
    assert reply.segments[0] == first.segments[0]
    assert [segment.versions for segment in reply.segments] == [
        [(0, 1, 5)],
        [(NEW_VERSION, *reply.segments[1].sampled[0])],
    ]
    for number, model in enumerate(models):
        assert worst_difference(references[model], reply, only=number) < TOLERANCE
    assert publish.session.post().status_code == 429  # its bounds outlive the engine, too
    answer = front.control("POST", "/evaluation", {"key": f"{EVALUATION_KEY}front"}).json()
    assert answer == {"oldest": 0, "newest": NEW_VERSION}
    assert front.control("GET", "/sessions").json()["counts"]["opened"] == 2
    assert front.control("GET", f"/sessions/{publish.session.id}x").status_code == 404


def test_engine_starts_use_different_seeds(publish):
    assert len(set(publish.seeds)) == 2


@pytest.mark.full
def test_unservable_checkpoint_is_named_and_undone(front, models, references, tmp_path):
    before = info(front)
    broken = Path(shutil.copytree(models[1], tmp_path / "broken"))
    weights = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with lease(front):
        front.control("POST", "/pause")
        held = Call(lambda: sample(front))
        reply = restart(front, str(broken))
        assert reply.status_code == 409
        assert str(broken) in reply.json()["error"]
        assert f"is back on {before['model']}" in reply.json()["error"]
        assert "SafetensorError" in reply.json()["error"]  # the reason in the engine's log
        assert held.is_alive()
        assert (
            front.control(
                "POST", "/resume", {"policy_version": before["policy_version"]}
            ).status_code
            == 200
        )
    assert held.result().status_code == 200
    assert error_against(references[before["model"]], held.result()) < 1e-4


def test_trainer_death_in_restart_keeps_last_version(front, models, references):
    before = info(front)
    other = next(model for model in models if model != before["model"])
    with lease(front):
        front.control("POST", "/pause")
        held = Call(lambda: sample(front))
        Call(lambda: restart(front, other))
        time.sleep(2)
        assert held.is_alive()
    reply = held.result()
    assert reply.status_code == 200
    assert (
        reply.headers["x-policy-version"]
        == f"{before['policy_version']}-{before['policy_version']}"
    )
    assert error_against(references[before["model"]], reply) < 1e-4
    assert info(front) == before


def test_answer_is_streamed_while_made(front):
    body = {"model": "any", "prompt": "abc=", "max_tokens": 480, "ignore_eos": True, "stream": True}
    began = time.monotonic()
    with requests.post(f"{front.url}/v1/completions", json=body, stream=True, timeout=60) as reply:
        arrivals = [time.monotonic() - began for line in reply.iter_lines(chunk_size=1) if line]
    assert len(arrivals) > 100
    assert arrivals[0] < arrivals[-1] / 2


def test_trainer_death_in_pause_frees_clients(front):
    before = info(front)
    with lease(front):
        front.control("POST", "/pause")
        held = Call(lambda: sample(front))
        time.sleep(0.5)
        assert held.is_alive()
    assert held.result(10).status_code == 200
    assert info(front) == before


@contextmanager
def frozen_engine(front: Server) -> Iterator[None]:
    """An engine that does not go on with its requests during the block."""
    (engine,) = [
        process
        for process in front.api.children(recursive=True)
        if "EngineCore" in " ".join(process.cmdline())
    ]
    engine.suspend()
    try:
        yield
    finally:
        engine.resume()


def test_pause_gives_up_on_endless_requests(front):
    body = json.dumps({"prompt": "abc=", "n": 2048, "max_tokens": 500, "ignore_eos": True})
    request = f"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    with lease(front):
        with socket.create_connection(("127.0.0.1", port_of(front.url)), timeout=10) as client:
            client.sendall(request.encode())
            time.sleep(0.5)
            with frozen_engine(front):  # it would take a core for as long as the front waits
                reply = front.control("POST", "/pause")
            assert reply.status_code == 409
            assert (
                f"1 requests were still in flight after {DRAIN_TIMEOUT:g} s"
                in reply.json()["error"]
            )
            assert not info(front)["paused"]
        assert sample(front).status_code == 200
        # a client that went away is waited for no more
        assert front.control("POST", "/pause").status_code == 200
        front.control("POST", "/resume", {"policy_version": info(front)["policy_version"]})


@pytest.mark.parametrize(
    "route", ["/info", "/lease", "/pause", "/restart", "/resume", "/attach", "/anything"]
)
def test_control_routes_need_token(front, route):
    for method in ("GET", "POST"):
        assert front.control(method, route, token="wrong").status_code == 401


def test_lease_of_second_trainer_is_refused(front):
    with lease(front):
        reply = front.control("POST", "/lease")
        assert reply.status_code == 409
        assert "another trainer" in reply.json()["error"]


def test_trainer_mistake_is_refused_with_reason(front, models, tmp_path):
    def refused(status: int, route: str, body: dict, words: str) -> None:
        reply = front.control("POST", route, body)
        assert (reply.status_code, words in reply.json()["error"]) == (status, True), reply.text

    refused(409, "/pause", {}, "lease")
    refused(409, "/restart", {"model": models[0]}, "pause")
    refused(409, "/resume", {"policy_version": 1}, "pause")
    refused(409, "/attach", {"parameters": []}, "--vllm_mode restart")
    refused(400, "/restart", {"path": models[0]}, "model")
    assert info(front)["refusals"]  # whoever would share its memory is told before
    with lease(front):
        front.control("POST", "/pause")
        refused(
            409, "/restart", {"model": str(tmp_path)}, f"{tmp_path} is not the folder of a model"
        )


@pytest.fixture
def doomed(
    models, tmp_path
) -> Iterator[tuple[Server, subprocess.Popen, list[psutil.Process], Path]]:
    """A front to be ended, outside of any guard; with every process behind it: the engine's guard
    comes first."""
    port, token, log = free_port(), uuid.uuid4().hex, tmp_path / "front.log"
    server = Server(f"http://127.0.0.1:{port}", token, models[0])
    environment = {**os.environ, **ENVIRONMENT, **FORKED_ENGINES, TOKEN_VARIABLE: token}
    with open(log, "wb") as stderr:
        process = subprocess.Popen(
            front_command(models[0], port),
            env=environment,
            stderr=stderr,
            stdout=stderr,
            start_new_session=True,
        )
    try:
        assert sample(retried(server)).status_code == 200  # held until the engine is there
        behind = psutil.Process(process.pid).children(recursive=True)
        yield server, process, behind, log
    finally:
        process.kill()
        process.wait()
        (engine_log,) = re.findall(r"log: (\S+/engine\.log)", log.read_text())
        # it stays where the front did not end in order
        shutil.rmtree(Path(engine_log).parent, ignore_errors=True)


def retried(server: Server) -> Server:
    deadline = time.monotonic() + START_WITHIN
    while True:
        try:
            requests.get(f"{server.url}/health", timeout=10)
            return server
        except requests.ConnectionError:
            assert time.monotonic() < deadline, "the front does not listen"
            time.sleep(0.1)


def assert_gone(processes: list[psutil.Process], since: float) -> None:
    _gone, left = psutil.wait_procs(
        processes, timeout=max(0.0, since + GONE_WITHIN - time.monotonic())
    )
    assert left == []


def test_engine_death_is_reported_and_ends_front(doomed):
    server, process, behind, log = doomed
    in_flight = Call(lambda: sample(server, num_tokens=500, n=64))
    wait_for(lambda: server.metric("num_requests_running") > 0, "the request to begin")
    began = time.monotonic()
    (engine,) = behind[0].children()
    engine.kill()
    reply = in_flight.result(GONE_WITHIN)
    assert reply.status_code == 503
    assert "engine ended with exit code 137 (SIGKILL)" in reply.json()["error"]
    assert (late := complete(server)).status_code == 503 and "exit code 137" in late.json()["error"]
    assert requests.get(f"{server.url}/health", timeout=10).status_code == 503
    assert "exit code 137" in server.control("GET", "/info").json()["error"]
    # by which a run tells the signal, and asks for memory
    assert process.wait(GONE_WITHIN) == 128 + signal.SIGKILL
    assert_gone(behind, began)
    assert "trl-atropos serve: engine ended with exit code 137 (SIGKILL)" in log.read_text()


@pytest.mark.full  # `tests/services/test_guard.py` has others that do not
def test_engine_dies_with_killed_front(doomed):
    _server, process, behind, _log = doomed
    began = time.monotonic()
    process.kill()
    process.wait()
    assert_gone(behind, began)


def test_sigterm_ends_front_despite_open_requests(front):
    """Comes last, because it ends what the tests above share."""
    behind = front.api.children(recursive=True)
    with lease(front):
        in_flight = Call(lambda: sample(front, num_tokens=500, n=64))
        wait_for(lambda: front.metric("num_requests_running") > 0, "the request to begin")
        Call(lambda: front.control("POST", "/pause"))
        wait_for(lambda: info(front)["paused"], "the pause to begin")
        held = Call(lambda: sample(front))
        time.sleep(0.2)
        began = time.monotonic()
        front.api.send_signal(signal.SIGTERM)
        for call in (in_flight, held):
            assert call.result(5).status_code == 503
            assert "shut down" in call.result().json()["error"]
        assert front.process.wait(GONE_WITHIN) == 128 + signal.SIGTERM
        assert_gone(behind, began)
