"""Faults in the middle of a publish: where they hit, what they do to which process, and what
clients see meanwhile.

A point of a publish is "in /ROUTE" (while the server has that call), "after /ROUTE" (it has
answered), "step" (the optimizer writes), "sending" (no byte of the weights has been sent) or
"sending on" (one of two messages has).
"""

import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import requests
import torch
from peft import LoraConfig

from tests.server_process import Server
from tests.weights import trainers
from tests.weights.live import MODES, Weights, disturb, publish, snapshot
from tests.weights.watched import Sampled, sample, score
from trl_atropos import AtroposGRPOTrainer
from trl_atropos.errors import ServerError
from trl_atropos.server_client import Reply, ServerClient, Servers
from trl_atropos.weights.publisher import ServerPublisher, transfer_of

SETUP_TIMEOUT = 60.0  # seconds: of all calls before the fault, on a machine that may be busy
SMALL_CHUNK = 1 << 16  # bytes: makes several messages of the tests' model
FIRST_VERSION = 7  # of the publishes here: neither the server's first nor the trainer's

UNKNOWN = -1  # version of what came by a route that does not say

HAS_ADAPTER = {mode.transfer: mode.lora for mode in MODES.values()}  # by the name of the transfer

Act = Callable[[], None]


# --------------------------------------------------------------------------- a trainer with a point


class PointClient(ServerClient):
    """Acts at one call of a publish."""

    when, route = "", ""
    act: Act

    def _send(self, method: str, path: str, *rest: Any, **options: Any) -> Reply:
        here = bool(self.route) and path.endswith(self.route)
        if here and self.when == "in":
            self._once()
        response = super()._send(method, path, *rest, **options)
        if here and self.when == "after":
            self._once()
        return response

    def _once(self) -> None:
        self.route = ""
        self.act()


def make_trainer(server: Server, mode: str, recording: str, folder: Path) -> AtroposGRPOTrainer:
    chosen = MODES[mode]
    servers = Servers([server.url], SETUP_TIMEOUT, server.token, PointClient)
    transfer = transfer_of(chosen.vllm_mode, servers, chosen.transport, str(folder))
    if mode == "server over gloo":
        transfer.chunk_bytes = SMALL_CHUNK
    adapter = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear") if chosen.lora else None
    trainer = trainers.make_trainer(
        ServerPublisher(transfer, probe_every_n_steps=1),
        recording,
        server.model,
        folder,
        mode=chosen.vllm_mode,
        peft_config=adapter,
    )
    assert type(trainer.policy_publisher.transfer).__name__ == chosen.transfer
    return trainer


def publish_first(trainer: AtroposGRPOTrainer) -> Weights:
    """Publishes `FIRST_VERSION`, and returns it: for a full model its own weights, else an adapter
    that does much."""
    publisher = trainer.policy_publisher
    publisher.hold()
    publisher._trainer_version = FIRST_VERSION - 1
    lora = HAS_ADAPTER[type(publisher.transfer).__name__]
    publish(trainer, lambda: disturb(trainer.model, 0.3) if lora else None)
    return snapshot(trainer.model)


def publish_next(trainer: AtroposGRPOTrainer, point: str, act: Act) -> None:
    """Publishes the next version, with `act` at `point`, and has the probe judged."""
    publisher = trainer.policy_publisher
    (client,) = publisher.servers.clients
    if point.startswith("sending"):
        channel = publisher.transfer._channel
        send, acts = channel.send, iter([act] if point == "sending" else [int, act])
        channel.send = lambda buffer: (next(acts, int)(), send(buffer))[1]
    elif point != "step":
        client.act = act
        client.when, client.route = point.split(" ")

    def step() -> None:
        if point == "step":
            act()
        disturb(trainer.model, 0.3 if HAS_ADAPTER[type(publisher.transfer).__name__] else 0.02)

    publish(trainer, step)
    publisher.judge_last_publish()


# --------------------------------------------------------------------------- the server's processes


@dataclass(frozen=True)
class Processes:
    """Of a running server."""

    api: psutil.Process
    engine: psutil.Process

    @classmethod
    def of(cls, server: Server) -> "Processes":
        return cls(server.api, server.engine)

    def do(self, way: str, during: bool) -> None:
        """Kills or freezes, as `way` says. `during`: a kill comes while the call that follows is
        under way."""
        kind, _, who = way.partition(" ")
        targets = (
            [self.api, self.engine]
            if who == "both"
            else [{"api": self.api, "engine": self.engine}[who]]
        )
        if kind == "freeze":
            for target in targets:
                target.suspend()
        elif during:
            self.engine.suspend()  # so that the call does not end before
            threading.Timer(0.3, lambda: [target.kill() for target in targets]).start()
        else:
            for target in targets:
                target.kill()
            psutil.wait_procs(targets, 5)

    def thaw(self) -> None:
        for process in (self.api, self.engine):
            with suppress(psutil.NoSuchProcess):  # it may be ending right now
                process.resume()


def settle(server: Server, seconds: float) -> str:
    """Waits until a server whose trainer is gone serves again ("lives"), or is gone ("leaves")."""
    client = ServerClient(server.url, 5, server.token)
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        try:
            info = client.info()
        except ServerError as error:
            if "cannot be reached" in str(error):
                return "leaves"
            assert "HTTP 503" in str(error) or "did not answer" in str(error), error
        else:
            if not info.paused and not info.lease_held:
                return "lives"
        time.sleep(0.05)
    raise AssertionError(f"after {seconds:.0f} s the server neither serves nor is gone")


# ---------------------------------------------------------------------------------- what is sampled


def complete(server: Server, prompt: list[int], num_tokens: int) -> Sampled:
    """The same as `sample`, by vLLM's own route."""
    body = {
        "model": "any",
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 1.0,
        "ignore_eos": True,
    }
    body |= {"logprobs": 0, "return_tokens_as_token_ids": True}
    reply = requests.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200, f"HTTP {reply.status_code}: {reply.text}"
    logprobs = reply.json()["choices"][0]["logprobs"]
    tokens = [int(token.removeprefix("token_id:")) for token in logprobs["tokens"]]
    return Sampled(prompt, tokens, torch.tensor(logprobs["token_logprobs"]), UNKNOWN, UNKNOWN)


def errors(model: torch.nn.Module, samples: list[Sampled], *versions: Weights) -> float:
    """Nats: largest difference between a sampled log-probability and that of the nearest of some
    versions."""
    if not samples:
        return 0.0
    sampled = torch.cat([one.logprobs for one in samples])
    scored = torch.stack([torch.cat(score(model, weights, samples)) for weights in versions])
    return (scored - sampled).abs().amin(0).max().item()


def fresh_samples(server: Server) -> list[Sampled]:
    """Some by each route."""
    generator = random.Random(0)
    prompts = [[generator.randrange(256) for _ in range(6 + i)] for i in range(4)]
    return [route(server, prompt, 6) for prompt in prompts for route in (sample, complete)]


@dataclass
class Samplers:
    """Two threads that sample all the time, one by each route, and note what they get.

    Attributes:
        failures: Each after the name of its route, `sample` or `complete`. A thread whose request
            failed asks again.
    """

    server: Server
    samples: list[Sampled] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def __enter__(self) -> "Samplers":
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(route,)) for route in (sample, complete)
        ]
        for thread in self._threads:
            thread.start()
        return self

    def wait_for_samples(self) -> None:
        began = time.monotonic()
        while len(self.samples) < 4:
            assert time.monotonic() - began < 60, f"nothing is sampled: {self.failures}"
            time.sleep(0.01)

    def __exit__(self, *_) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a client still waits for its answer"

    def _run(self, route: Callable[[Server, list[int], int], Sampled]) -> None:
        generator = random.Random(1)
        while not self._stop.is_set():
            prompt = [generator.randrange(256) for _ in range(generator.randrange(4, 20))]
            try:
                self.samples.append(route(self.server, prompt, generator.randrange(8, 40)))
            except Exception as error:  # noqa: BLE001 - whatever it is, a thread would lose it
                self.failures.append(f"{route.__name__}: {type(error).__name__}: {error}")
                time.sleep(0.05)


# --------------------------------------------------------------------------- a trainer to be killed

# torch and the rest are imported once for all of them
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload([__name__])


@dataclass
class TrainerProcess:
    """A trainer in a process of its own that has published `FIRST_VERSION`, and waits to be told to
    go on."""

    process: multiprocessing.process.BaseProcess
    pipe: Any
    old: Weights  # of `FIRST_VERSION`

    def reach(self, point: str) -> None:
        """Lets it publish the next version up to its point, where it waits again."""
        self.pipe.send("go on")
        assert self.pipe.poll(60) and self.pipe.recv() == point, (
            f"the trainer does not come to {point!r}"
        )

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(10)

    def go_on(self) -> str:
        """How the publish ended: `"published"`, or its error."""
        self.pipe.send("go on")
        assert self.pipe.poll(60), "the trainer does not go on"
        return self.pipe.recv()


@contextmanager
def trainer_at(
    server: Server,
    mode: str,
    point: str,
    recording: str,
    folder: Path,
    timeout: float = SETUP_TIMEOUT,
) -> Iterator[TrainerProcess]:
    here, there = context.Pipe()
    arguments = (
        there,
        replace(server, api=None, log=None, process=None),
        mode,
        point,
        recording,
        folder,
        timeout,
    )
    process = context.Process(target=_train, args=arguments, daemon=True)
    process.start()
    there.close()
    try:
        assert here.poll(180) and here.recv() == "published", "the trainer does not publish"
        yield TrainerProcess(process, here, torch.load(folder / "old.pt"))
    finally:
        process.kill()
        process.join(10)


def _train(
    pipe: Any, server: Server, mode: str, point: str, recording: str, folder: Path, timeout: float
) -> None:
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    trainer = make_trainer(server, mode, recording, folder)
    torch.save(publish_first(trainer), folder / "old.pt")
    publisher = trainer.policy_publisher
    limit(publisher, timeout)
    pipe.send("published")
    pipe.recv()

    def wait() -> None:
        pipe.send(point)
        pipe.recv()

    try:
        publish_next(trainer, point, wait)
        pipe.send("published")
    except ServerError as error:
        pipe.send(str(error))
    finally:
        publisher.close()


def limit(publisher: ServerPublisher, timeout: float) -> None:
    """From here on, the servers have `timeout` seconds for any one call."""
    publisher.servers.timeout = timeout
    for client in publisher.servers.clients:
        client.timeout = timeout
