"""The control routes on a real server: who may call them, and what a lease is good for."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import requests

from tests.server_process import running_server
from trl_atropos.errors import ServerError
from trl_atropos.server.launch import vllm_arguments
from trl_atropos.weights.client import ServerClient

pytestmark = pytest.mark.server

HOLD_LEASE = """
import sys, time
from trl_atropos.weights.client import ServerClient
client = ServerClient(sys.argv[1], 30, sys.argv[2])
client.hold_lease()
if sys.argv[3] == "paused":
    client.pause()
print("ready", flush=True)
time.sleep(600)
"""


def lease_holder(server, state: str) -> subprocess.Popen:
    """A process that holds the lease, paused or not."""
    arguments = [sys.executable, "-c", HOLD_LEASE, server.url, server.token, state]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("route", ["/info", "/pause", "/resume", "/attach", "/lease", "/anything"])
def test_control_routes_need_the_token(server, route):
    for method in ("GET", "POST"):
        assert server.control(method, route, token="wrong").status_code == 401


def test_vllms_own_control_routes_are_not_there(server):
    for route in ("/collective_rpc", "/pause", "/update_weights", "/reset_prefix_cache", "/server_info"):
        assert requests.post(server.url + route, json={}, timeout=10).status_code in (404, 405)


def test_the_server_listens_on_one_loopback_address_only(server):
    port = int(server.url.rsplit(":", 1)[1])
    with pytest.raises(OSError):  # a server on 0.0.0.0 would answer on every address
        socket.create_connection(("127.0.0.2", port), timeout=2)


def test_a_pause_needs_a_lease(server):
    reply = server.control("POST", "/pause")
    assert reply.status_code == 409
    assert "lease" in reply.json()["error"]


def test_only_one_trainer_holds_the_server(server):
    first, second = ServerClient(server.url, 30, server.token), ServerClient(server.url, 30, server.token)
    first.hold_lease()
    try:
        with pytest.raises(ServerError, match="another trainer holds this server"):
            second.hold_lease()
    finally:
        first.release_lease()


def test_a_trainer_that_dies_between_publishes_leaves_the_server_to_the_next(server):
    holder = lease_holder(server, "running")
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    client = ServerClient(server.url, 30, server.token)
    deadline = time.monotonic() + 5
    while client.info().lease_held:
        assert time.monotonic() < deadline, "the lease of a dead trainer is still held"
        time.sleep(0.05)
    client.hold_lease()
    client.release_lease()
    assert server.generate(prompt="a", max_tokens=1).status_code == 200


def test_a_trainer_that_dies_in_a_pause_makes_the_server_refuse_and_leave(server_model, tmp_path):
    with running_server(server_model, tmp_path) as doomed:
        holder = lease_holder(doomed, "paused")
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        deadline, answers = time.monotonic() + 15, []
        while time.monotonic() < deadline:
            try:
                answers.append(doomed.generate(prompt="a", max_tokens=1).status_code)
            except requests.RequestException:
                break  # it is gone
            time.sleep(0.05)
        else:
            pytest.fail(f"the server still answers: {answers[-1]}")
        assert set(answers) <= {503}


def test_a_flag_that_would_bias_the_correction_is_refused():
    with pytest.raises(ValueError, match="--logprobs-mode processed_logprobs"):
        vllm_arguments("m", ["--logprobs-mode", "raw_logprobs"], cpu=True)


def test_flags_of_the_user_win_over_our_defaults():
    arguments = vllm_arguments("m", ["--port", "1234", "--host=0.0.0.0"], cpu=True)
    assert arguments.count("--port") == 1
    assert "--host" not in arguments
    assert "--host=0.0.0.0" in arguments
