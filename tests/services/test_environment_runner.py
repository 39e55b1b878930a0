"""What an environment that has a `path` does otherwise than one that has a `command`: what the
package's runner, `environment_site/run.py`, changes in Atropos."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import ContentTypeError, web
from aiohttp.typedefs import Handler

from tests.environment_site import site_module
from tests.forge import WITHOUT_TORCH
from trl_atropos.environment_entry import SITE, EnvironmentSpec
from trl_atropos.services.addresses import port_of


def variables(**own: str) -> dict[str, str]:
    """Of the process of an environment that a run starts."""
    return os.environ | EnvironmentSpec(path="environment.py", env=own).variables()


def test_own_sitecustomize_of_environment_is_loaded(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('its own')")
    env = variables(PYTHONPATH=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", ""], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == ("its own\n", "")


def test_retry_error_names_last_try_and_calling_line(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import sitecustomize, tenacity\n@tenacity.retry(stop=tenacity.stop_after_attempt(2))\ndef "
        "ask():\n    raise ValueError('400, Bad\\nRequest')\ndef collect():\n    ask()\ntry:\n    "
        "collect()\nexcept Exception as e:\n    print(sitecustomize.describe(e), "
        "sitecustomize.place_of(e), sep=' | ')\n"
    )
    command = [sys.executable, str(tmp_path / "mine.py")]
    env = variables()
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"ValueError: 400, Bad Request | {tmp_path}/mine.py:6 in collect\n"


def printed(program: str, entry: str) -> str:
    """What a program prints that changes Atropos' class only if `entry` is `path`."""
    command = [sys.executable, "-c", program, entry]
    env = variables(**WITHOUT_TORCH)
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=120, check=True
    ).stdout


LOOKS = """
import asyncio, run, sys, types
from atroposlib.envs.base import BaseEnv

async def nothing(*_):
    pass

async def note(delay, result=None):
    waits.append(delay)

class Env(BaseEnv):
    setup = setup_wandb = register_env = get_server_info = env_step_checks = add_train_workers = nothing
    evaluate = get_next_item = nothing
    last_loop_time, mainloop_timings, max_num_workers, derived_batch_size = None, [], 1, 8
    config = types.SimpleNamespace(
        group_size=8, batch_size=8, total_steps=9, max_batches_offpolicy=1, min_batch_allocation=None, worker_timeout=0
    )

    def __init__(self):
        self.looks = 0

    async def get_status(self):
        self.looks += 1
        self.workers = {"at work"} if 7 <= self.looks < 9 else set()
        self.status_dict = {"current_step": 10 * (self.looks == 12), "queue_size": 0}

waits, asyncio.sleep = [], note
if "path" in sys.argv:
    run.shorten_sleeps(BaseEnv)
env = Env()
env.workers = set()
asyncio.run(env.env_manager())
print(waits)
"""


SHORT_WAITS = [1.5] + 4 * [0.02] + 2 * [0.1] + 2 * [0.1] + 3 * [0.02]  # idle, at work, idle again


@pytest.mark.parametrize(("entry", "waits"), [("path", SHORT_WAITS), ("command", [5] + 11 * [0.1])])
def test_runner_alone_shortens_waits_of_main_loop(entry, waits):
    """After it has sent a batch, an environment that has a `path` looks again soon."""
    assert printed(LOOKS, entry) == f"{waits}\n"


RUNNING = """
import asyncio, run, sys, types
from atroposlib.envs.base import BaseEnv

class Env(BaseEnv):
    evaluate = None
    config = types.SimpleNamespace(group_size=8, max_batches_offpolicy=2, min_batch_allocation=None)
    eval_runner, derived_batch_size, max_num_workers, curr_step = None, 16, 256, 1

    def __init__(self):
        self.workers, self.running_items, self.backlog, self.workers_added_list = set(), {}, [], []

    async def get_next_item(self):
        return "problem"

    async def handle_env(self, uuid):
        await asyncio.sleep(3600)

async def main():
    env = Env()
    for queued in (0, 2, 1):  # groups of the same four, as the API counts them
        env.status_dict = {"queue_size": queued, "self_queue_size": queued}
        await env.add_train_workers()
        await asyncio.sleep(0)
        print(len(env.workers), len(env.running_items), len(env.backlog), end="; ")

if "path" in sys.argv:
    run.keep_running_groups(BaseEnv)
asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("entry", "counts"), [("path", "4 4 0; 4 4 0; 4 4 0; "), ("command", "4 4 0; 2 2 2; 3 3 1; ")]
)
def test_runner_alone_keeps_groups_that_are_being_sampled(entry, counts):
    """Atropos ends two of four if the API has counted two that also count as being sampled."""
    assert printed(RUNNING, entry) == counts


SENT = """
import run, sys
from atroposlib.envs.base import BaseEnv

class Session:
    def post(self, url, data, headers):
        print(headers.get("Content-Encoding"))

if "path" in sys.argv:
    run.send_quickly(BaseEnv)
groups = {"tokens": [[1] * 10000]}, [{"tokens": [[1] * 10000]}]
for payload in groups:
    BaseEnv._post_json_with_compression(None, Session(), "http://api", payload)
"""


@pytest.mark.parametrize(("entry", "encoding"), [("path", "None\n"), ("command", "gzip\n")])
def test_runner_alone_sends_groups_as_they_are(entry, encoding):
    assert printed(SENT, entry) == 2 * encoding


ENCODED = """
import json, math, random, run
import numpy as np

draw = random.Random(0)
numbers = [draw.uniform(-30, 0) for _ in range(20000)]
numbers += [draw.uniform(-1, 1) * 10.0 ** draw.randint(-320, 300) for _ in range(20000)]
numbers += [0.0, -0.0, 1e16, 1e22, 5e-324, 2**31, -(2**63), 2**80, math.inf, -math.inf, math.nan]
groups = [
    {},
    {"tokens": [[1, 2], []], "inference_logprobs": [numbers], "scores": [0.5, True], "sft": None},
    {"messages": [[{"content": "\\ud800 \\u00e9"}]], "advantages": [[1, None]], "masks": []},
    {"a \\u00e9 b": [[np.float64(0.1)]], 5: [[1]], "tokens": [(1, 2)], "masks": [[True]]},
]
for group in groups:
    read = json.loads(run.encoded(group))
    expected = json.loads(json.dumps(group))
    assert read.keys() == expected.keys()
    for name, value in expected.items():
        assert repr(read[name]) == repr(value), name
refused = [{1}], [[{1}]], [[b"1"]], [np.float32(1)], [[np.int64(1)]], np.zeros(1)
for value in refused:
    try:
        run.encoded({"tokens": value})
    except TypeError as error:
        assert "is not JSON serializable" in str(error)
    else:
        raise AssertionError(value)
print(len(refused))
"""


def test_group_is_encoded_as_by_atropos():
    assert printed(ENCODED, "path") == "6\n"


@pytest.mark.parametrize("runner", ["run.py", "groups.py"])
def test_environment_with_path_reads_lists_of_numbers(runner, tmp_path):
    script = tmp_path / "mine.py"
    method = "VLLMServer._tokens_and_logprobs_completion_wrapper"
    script.write_text(
        "from atroposlib.envs.server_handling.vllm_server import VLLMServer\n"
        f"print(hasattr({method}, '__wrapped__'))\n"
    )
    command = [sys.executable, f"{SITE}/{runner}", script, "process", "--config", tmp_path / "none"]
    env = variables(**WITHOUT_TORCH)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout == "True\n", done.stderr


# ------------------------------------------------------------------------------------- connections


connections = site_module("environment_connections")


@asynccontextmanager
async def served(answer: Handler, port: int = 0) -> AsyncIterator[str]:
    """A server on loopback that answers every GET with `answer`. Yields its URL."""
    app = web.Application()
    app.router.add_get("/{name:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        host, port = runner.addresses[0]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


class Counting:
    """Answers a request with the number of the connection that it came by: of two to `/both` the
    first when the second is there, and one to `/last` as the last of its connection."""

    def __init__(self):
        self._transports = []
        self._both = asyncio.Barrier(2)

    async def __call__(self, request: web.Request) -> web.Response:
        if request.transport not in self._transports:
            self._transports.append(request.transport)
        if request.path == "/both":
            await self._both.wait()
        response = web.Response(text=str(self._transports.index(request.transport)))
        if request.path == "/last":
            response.force_close()
        return response


async def asked(url: str) -> int:
    """Asks as Atropos does, with a session for one request. Returns the connection's number."""
    aiohttp = connections.KeptConnections()
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return int(await answer.text())


def test_requests_take_connections_that_are_idle():
    async def ask() -> tuple[list[int], list[int], int]:
        async with served(Counting()) as url:
            one_by_one = [await asked(url) for _ in range(3)]
            at_once = await asyncio.gather(asked(f"{url}/both"), asked(f"{url}/both"))
            return one_by_one, sorted(at_once), await asked(url)

    one_by_one, at_once, later = asyncio.run(ask())
    assert one_by_one == [0, 0, 0]
    assert at_once == [0, 1]
    assert later in at_once


def test_connection_that_was_idle_for_long_is_not_taken(monkeypatch):
    """The server may be closing it."""
    monkeypatch.setattr(connections, "IDLE", 0.2)

    async def ask() -> tuple[int, int]:
        async with served(Counting()) as url:
            before = await asked(url)
            await asyncio.sleep(0.5)
            return before, await asked(url)

    assert asyncio.run(ask()) == (0, 1)


def test_connection_that_the_server_ends_is_not_taken():
    async def ask() -> tuple[int, int]:
        async with served(Counting()) as url:
            return await asked(f"{url}/last"), await asked(url)

    assert asyncio.run(ask()) == (0, 1)


def test_server_that_was_started_anew_is_asked():
    """As with `vllm_mode: restart`: the connection that is kept leads to the server that ended."""

    async def ask() -> list[int]:
        counting = Counting()
        async with served(counting) as url:
            numbers = [await asked(url)]
        async with served(counting, port_of(url)):
            numbers.append(await asked(url))
        return numbers

    assert asyncio.run(ask()) == [0, 1]


def test_each_event_loop_has_connections_of_its_own():
    async def ask() -> int:
        async with served(Counting()) as url:
            return await asked(url)

    assert [asyncio.run(ask()), asyncio.run(ask())] == [0, 0]


UNIQUE = """
import asyncio, run, sys
from aiohttp import web
from atroposlib.envs.base import BaseEnv

async def status(request):
    transports.append(request.transport)
    return web.json_response({"env_weight": 1.0})

class Weights:
    servers = [None]

    async def update_weight(self, weight):
        pass

class Env(BaseEnv):
    evaluate = get_next_item = None
    env_id, server = 0, Weights()

    def __init__(self, url):
        self.config = type("Config", (), {"rollout_server_url": url, "max_num_workers": 1})

async def main():
    app = web.Application()
    app.router.add_get("/status-env", status)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    env = Env("http://%s:%d" % runner.addresses[0])
    for _ in range(4):
        await env.get_status()
    await runner.cleanup()

transports = []
if "path" in sys.argv:
    run.keep_connections(BaseEnv)
asyncio.run(main())
print(len(set(map(id, transports))))
"""


@pytest.mark.parametrize(("entry", "number"), [("path", "1\n"), ("command", "4\n")])
def test_runner_alone_keeps_connections_to_api(entry, number):
    assert printed(UNIQUE, entry) == number


def test_answer_that_is_not_called_json_is_not_read():
    """As with Atropos' own client."""
    client = site_module("environment_sampling")._Client()

    async def give(_request: web.Request) -> web.Response:
        return web.Response(text='{"sampled_logprobs": []}')

    async def ask() -> None:
        async with (
            served(give) as url,
            client.ClientSession() as session,
            session.get(url) as answer,
        ):
            await answer.json()

    with pytest.raises(ContentTypeError, match="text/plain"):
        asyncio.run(ask())
