"""Agents that do everything wrong, each in a session of its own: they are killed in the midst of a
call, stop reading, call in parallel, call after the end, exceed every bound. Whatever they do, what a
session has kept is what the engine has delivered for it, to the token."""

import random
import socket
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import requests

from tests.server.sessions import CHAT, COMPLETIONS, MESSAGES, Client, request_of
from tests.server_process import Server
from trl_atropos.protocol import SessionReply

LONG = {"max_tokens": 400, "ignore_eos": True}
SPOKEN = {"messages": MESSAGES, "model": "any"}
AT_ONCE = 12


def connection_to(server: Server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def is_killed(client: Client, rng: random.Random) -> None:
    """Sends a call and goes away without a word."""
    body = SPOKEN | LONG | {"n": rng.choice([1, 2]), "stream": rng.random() < 0.3}
    with connection_to(client.server) as connection:
        connection.sendall(request_of(f"/s/{client.id}{CHAT}", body))
        time.sleep(rng.random() * 0.3)


def freezes(client: Client, rng: random.Random) -> None:
    """Reads nothing of a stream for a while, and then goes away."""
    with connection_to(client.server) as connection:
        connection.sendall(request_of(f"/s/{client.id}{CHAT}", SPOKEN | LONG | {"stream": True}))
        time.sleep(0.3 + rng.random() * 0.3)


def aborts_a_stream(client: Client, rng: random.Random) -> None:
    """Reads a few events."""
    with requests.post(
        f"{client.url}{CHAT}", json=SPOKEN | LONG | {"stream": True}, stream=True, timeout=60
    ) as reply:
        for _, _line in zip(range(rng.randrange(1, 20)), reply.iter_lines()):
            pass


def calls_in_parallel(client: Client, rng: random.Random) -> None:
    """Makes more calls at a time than it may, of several dialects."""
    with ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            pool.submit(client.post, rng.choice([CHAT, "/v1/messages"]), messages=MESSAGES)


def calls_after_the_end(client: Client, rng: random.Random) -> None:
    """Is ended in the midst of a call, and goes on."""
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(client.post, **LONG)
        time.sleep(rng.random() * 0.2)
        client.delete()
        assert call.result().status_code in (200, 410)
    assert client.post().status_code == 410


def exceeds_bounds(client: Client, rng: random.Random) -> None:
    """Asks for too much, in too many calls, of too many bytes."""
    client.post(n=400)
    client.post(COMPLETIONS, prompt="x" * 600)
    client.post(user="x" * (4 << 20))
    for _ in range(6):
        client.post(max_tokens=2)


def behaves(client: Client, rng: random.Random) -> None:
    """Holds a conversation, with a retry."""
    messages = list(MESSAGES)
    for _ in range(3):
        reply = client.post(messages=messages, max_tokens=6)
        content = reply.json()["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": content or ""}, MESSAGES[0]]
    client.post(messages=messages[:1], max_tokens=6)


FAULTS: list[Callable[[Client, random.Random], None]] = [
    is_killed,
    freezes,
    aborts_a_stream,
    calls_in_parallel,
    calls_after_the_end,
    exceeds_bounds,
    behaves,
]


def inflict(server: Server, count: int) -> tuple[list[SessionReply], int]:
    """Runs that many agents, `AT_ONCE` at a time. Returns what their sessions have kept, and how
    many tokens vLLM says that it has generated meanwhile."""
    before = server.metric("generation_tokens_total")

    def work(number: int) -> Client:
        rng = random.Random(number)
        client = Client(server, max_tokens=1500, max_calls=5, max_in_flight=3)
        with suppress(requests.RequestException, ConnectionError):
            FAULTS[number % len(FAULTS)](client, rng)
        return client

    with ThreadPoolExecutor(AT_ONCE) as pool:
        clients = list(pool.map(work, range(count)))
    replies = [client.delete() for client in clients]
    deadline = time.monotonic() + 20
    while server.metric("num_requests_running") and time.monotonic() < deadline:
        time.sleep(0.05)
    return replies, int(server.metric("generation_tokens_total") - before)


def kinds(replies: list[SessionReply]) -> Counter[str]:
    """How often calls ended in each way, and how often something was refused for each reason."""
    counts: Counter[str] = Counter()
    for reply in replies:
        counts.update(call.finish for call in reply.calls)
        for name, count in reply.counts.items():
            if name.startswith("refused/"):
                counts[name] += count
    return counts
