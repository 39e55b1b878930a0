"""The control routes on a real server: who may call them, what a pause holds, and what a lease is
good for."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import requests

from tests.server_process import Server
from trl_atropos.errors import ServerError
from trl_atropos.server_client import ServerClient

pytestmark = pytest.mark.server

HOLD_LEASE = """
import sys, time
from trl_atropos.server_client import ServerClient
client = ServerClient(sys.argv[1], 30, sys.argv[2])
client.hold_lease()
if sys.argv[3] == "paused":
    client.pause()
print("ready", flush=True)
time.sleep(600)
"""


@contextmanager
def lease_holder(server: Server, state: str) -> Iterator[subprocess.Popen]:
    """A process that holds the lease of a server that is `running` or `paused`."""
    arguments = [sys.executable, "-c", HOLD_LEASE, server.url, server.token, state]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()


def kill(process: subprocess.Popen) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def wait_for(condition, what: str, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.05)


@pytest.fixture
def client(server) -> Iterator[ServerClient]:
    """Holds the lease of the shared server, and leaves it as it was."""
    client = ServerClient(server.url, 30, server.token)
    client.hold_lease()
    yield client
    client.release_lease()
    wait_for(lambda: not client.info().lease_held and not client.info().paused, "the lease's end")


def test_server_with_hung_engine_is_unhealthy(server):
    engine = server.engine
    engine.suspend()
    try:
        reply = requests.get(f"{server.url}/health", timeout=30)
        assert reply.status_code == 503
        assert (
            "the engine has not answered for 10 s, though its process is alive"
            in reply.json()["error"]
        )
        # sooner than another 10 s: it is the same question
        assert requests.get(f"{server.url}/health", timeout=8).status_code == 503
    finally:
        engine.resume()
    wait_for(
        lambda: requests.get(f"{server.url}/health", timeout=30).status_code == 200,
        "the engine to answer again",
    )


# -------------------------------------------------------------------------------- who may call them


@pytest.mark.parametrize("route", ["/info", "/pause", "/resume", "/attach", "/lease", "/anything"])
def test_control_routes_need_token(server, route):
    for method in ("GET", "POST"):
        assert server.control(method, route, token="wrong").status_code == 401


def test_vllm_control_routes_are_absent(server):
    for route in (
        "/collective_rpc",
        "/pause",
        "/update_weights",
        "/reset_prefix_cache",
        "/server_info",
    ):
        assert requests.post(server.url + route, json={}, timeout=10).status_code in (404, 405)


def test_server_listens_on_one_loopback_address(server):
    port = int(server.url.rsplit(":", 1)[1])
    with pytest.raises(OSError):  # a server on 0.0.0.0 would answer on every address
        socket.create_connection(("127.0.0.2", port), timeout=2)


ADAPTER = {"tensors": [], "config": {}}
NEED_A_LEASE = {
    "/attach": {"parameters": []},
    "/pause": {},
    "/channel": {"kind": "memory"},
    "/adapter/setup": ADAPTER,
    "/sleep": {"level": 1},
}
NEED_A_PAUSE = {
    "/weights/load": {"tensors": []},
    "/weights/again": {"messages": [0]},
    "/weights/finish": {},
    "/adapter/load": {},
    "/wake": {"tags": ["weights"]},
}


@pytest.mark.parametrize("route", [*NEED_A_LEASE, *NEED_A_PAUSE])
def test_server_changes_need_lease(server, route):
    reply = server.control("POST", route, {**NEED_A_LEASE, **NEED_A_PAUSE}[route])
    assert reply.status_code == 409
    assert (
        "needs a lease, or nothing would notice if the trainer died: open it first"
        in reply.json()["error"]
    )


@pytest.mark.parametrize("route", NEED_A_PAUSE)
def test_weight_changes_need_pause(server, client, route):
    reply = server.control("POST", route, NEED_A_PAUSE[route])
    assert reply.status_code == 409
    assert (
        "needs a pause, or requests would sample from weights in the making"
        in reply.json()["error"]
    )


def test_resume_without_pause_is_refused(server, client):
    version = client.info().policy_version
    reply = server.control("POST", "/resume", {"policy_version": version + 1})
    assert reply.status_code == 409
    assert reply.json()["error"] == "resume without a pause"
    assert client.info().policy_version == version


def test_lease_of_second_trainer_is_refused(server, client):
    second = ServerClient(server.url, 30, server.token)
    with pytest.raises(
        ServerError, match="another trainer holds this server: stop it, or start a server for this"
    ):
        second.hold_lease()


# ------------------------------------------------------------------------------- what a pause holds


def complete(server: Server, stream: bool) -> requests.Response:
    """A streamed reply is returned as soon as it has begun."""
    body = {"model": "any", "prompt": "abc=", "max_tokens": 2, "stream": stream}
    return requests.post(f"{server.url}/v1/completions", json=body, stream=stream, timeout=60)


def test_request_in_pause_waits_for_next_version(server, client):
    """The engine would hold them as well; but what they sample from is looked up before they come
    to it."""
    version = client.info().policy_version
    client.pause()
    with ThreadPoolExecutor() as pool:
        held = pool.submit(server.generate, prompt="abc=", n=64, max_tokens=200, ignore_eos=True)
        through_openai = [pool.submit(complete, server, stream) for stream in (False, True)]
        time.sleep(0.5)
        answered = any(one.done() for one in (held, *through_openai))
        client.resume(version + 1)
        oldest, in_flight = client.info().oldest_version_in_flight, not held.done()
        assert not answered
        assert in_flight, "the request was too short to be seen in flight"
        assert oldest == version + 1
        assert held.result().headers["x-policy-version"] == f"{version + 1}-{version + 1}"
        assert [one.result().status_code for one in through_openai] == [200, 200]


def test_held_requests_wait_while_others_are_served(server, client):
    """Of a run that is strictly on-policy: environments begin the next batch when it may be
    sampled."""
    with ThreadPoolExecutor() as pool:
        begun = pool.submit(server.generate, prompt="abc=", n=16, max_tokens=100, ignore_eos=True)
        wait_for(
            lambda: server.metric("num_requests_running") > 0 or begun.done(), "a request to begin"
        )
        client.hold(True, 0.0)
        try:
            waiting = [pool.submit(server.generate, prompt="abc=", max_tokens=2)]
            waiting += [pool.submit(complete, server, stream) for stream in (False, True)]
            assert len(client.sample([97, 98], 4, 1.0)) == 1
            assert begun.result().ok
            wait_for(lambda: server.waiting() == 3, "the requests to be held")
            assert not any(one.done() for one in waiting)
        finally:
            client.hold(False, 1.0)
        assert all(one.result().status_code == 200 for one in waiting)
        client.hold(True, 0.0)
        several = []
        for _ in range(4):
            several.append(pool.submit(server.generate, prompt="abc=", max_tokens=2))
            wait_for(lambda: server.waiting() == len(several), "the request to be held")
        client.hold(True, 0.5)  # those that came first
        assert [one.result().ok for one in several[:2]] == [True, True]
        assert server.waiting() == 2
        assert [one.done() for one in several[2:]] == [False, False]
        client.hold(True, 1.0)
        assert [one.result().ok for one in several[2:]] == [True, True]
        held = pool.submit(server.generate, prompt="abc=", max_tokens=2)
        wait_for(lambda: server.waiting() == 1, "the request to be held")
        assert not held.done()
        with pytest.raises(requests.Timeout):
            requests.post(f"{server.url}/generate", json={"prompt": "abc="}, timeout=0.5)
        client.release_lease()  # also when the trainer dies
        assert held.result().ok
    assert "ClientDisconnect" not in server.log.read_text()
    client.hold_lease()


def sample_for(server: Server, key: str, route: str = "/generate", **body) -> requests.Response:
    usual = {"prompt": "abc=", "ignore_eos": True} | (
        {} if route == "/generate" else {"model": "any"}
    )
    headers = {"authorization": f"Bearer {key}"}
    return requests.post(server.url + route, json=usual | body, headers=headers, timeout=60)


def test_server_notes_versions_of_evaluation(server, client):
    version = client.info().policy_version
    wait_for(
        lambda: server.metric("num_requests_running") == 0, "the requests of other tests to end"
    )
    assert client.evaluation("evaluation-a").oldest is None
    assert sample_for(server, "evaluation-a", max_tokens=2).ok
    assert sample_for(server, "evaluation-b", "/v1/completions", max_tokens=2).ok
    with ThreadPoolExecutor() as pool:
        long = pool.submit(sample_for, server, "evaluation-b", n=64, max_tokens=400)
        wait_for(lambda: server.metric("num_requests_running") > 0, "the request to run")
        client.pause()
        client.resume(version + 1)
        assert long.result().headers["x-policy-version"] == f"{version}-{version + 1}"
    client.hold(True, 0.0)  # which concerns the environments that are trained on
    try:
        assert sample_for(server, "evaluation-c", max_tokens=2).ok
    finally:
        client.hold(False, 1.0)
    sampled = {name: client.evaluation(f"evaluation-{name}") for name in "abc"}
    spans = {name: (reply.oldest, reply.newest) for name, reply in sampled.items()}
    assert spans == {
        "a": (version, version),
        "b": (version, version + 1),
        "c": (version + 1, version + 1),
    }


def test_server_tells_oldest_version_in_flight(server, client):
    version = client.info().policy_version
    wait_for(
        lambda: server.metric("num_requests_running") == 0, "the requests of other tests to end"
    )
    with ThreadPoolExecutor() as pool:
        long = pool.submit(server.generate, prompt="abc=", n=64, max_tokens=500, ignore_eos=True)
        wait_for(lambda: server.metric("num_requests_running") > 0, "the request to run")
        client.pause()
        client.resume(version + 1)
        during = client.info()
        begun, ended = long.result().headers["x-policy-version"].split("-")
    assert (int(begun), int(ended)) == (version, version + 1), (
        "the publish did not fall into the request"
    )
    assert (during.policy_version, during.oldest_version_in_flight) == (version + 1, version)
    assert client.info().oldest_version_in_flight == version + 1


# ------------------------------------------------------------------------- what a lease is good for
# Where the weights may be half written when it ends: `tests/weights/test_faults.py`.


def test_trainer_death_outside_pause_frees_server(server):
    client = ServerClient(server.url, 30, server.token)
    with lease_holder(server, "running") as holder:
        kill(holder)
        wait_for(lambda: not client.info().lease_held, "the end of a dead trainer's lease", 5)
    client.hold_lease()
    client.release_lease()
    assert server.generate(prompt="a", max_tokens=1).status_code == 200


def test_trainer_death_in_pause_resumes_server(server):
    client = ServerClient(server.url, 30, server.token)
    version = client.info().policy_version
    replies = []
    with lease_holder(server, "paused") as holder:
        held = threading.Thread(
            target=lambda: replies.append(server.generate(prompt="abc=", max_tokens=2))
        )
        held.start()
        assert client.info().paused
        kill(holder)
        held.join(20)
    assert [reply.headers.get("x-policy-version") for reply in replies] == [f"{version}-{version}"]
    assert not client.info().paused
