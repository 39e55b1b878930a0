"""What tests see of a live server from outside: samples and their exact scores, clients, and every
publish.

`test_modes.py` wraps a training in `Clients` and gives it a `WatchedPublisher`.
"""

import random
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import requests
import torch
from torch.func import functional_call

from tests.server_process import Server
from tests.weights.live import Weights, snapshot
from trl_atropos import AtroposGRPOTrainer
from trl_atropos.weights.publisher import Phase, ServerPublisher

NUM_SEQUENCES = 24
LONG_SEQUENCES = 4  # of them: longer than two KV blocks
LONG_PROMPTS = 0.2  # share of the clients' requests
EVERY_VERSION_UNTIL = 10  # all of these are compared in full, then every fifth
SAMPLING_TIMEOUT = 300.0  # seconds; a request waits while a server restarts


@dataclass
class Sampled:
    """What `/generate` answered."""

    prompt: list[int]
    tokens: list[int]
    logprobs: torch.Tensor  # nats, shape (num_tokens,)
    begun: int  # policy version
    ended: int


def sample(server: Server, prompt: list[int], num_tokens: int) -> Sampled:
    body = {
        "prompt": {"prompt_token_ids": prompt},
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "logprobs": 0,
    }
    reply = requests.post(f"{server.url}/generate", json=body, timeout=SAMPLING_TIMEOUT)
    assert reply.status_code == 200, reply.text
    (tokens,), (entries,) = reply.json()["token_ids"], reply.json()["logprobs"]
    logprobs = torch.tensor([next(iter(entry[0].values())) for entry in entries])
    begun, ended = map(int, reply.headers["x-policy-version"].split("-"))
    return Sampled(prompt, tokens, logprobs, begun, ended)


def wait_for_requests(server: Server, number: int, reply: Future | None = None) -> None:
    """Returns when the engine has that many requests at work, or when the `reply` to the only one
    has come: on a busy machine, it may end before it is seen."""
    deadline, running = time.monotonic() + 30, 0.0
    while running < number:
        if reply is not None and reply.done():
            return
        assert time.monotonic() < deadline, (
            f"the engine has {running:.0f} requests at work, not {number}"
        )
        metrics = requests.get(f"{server.url}/metrics", timeout=10).text.splitlines()
        (line,) = [line for line in metrics if line.startswith("vllm:num_requests_running{")]
        running = float(line.rsplit(" ", 1)[1])


@torch.no_grad()
def score(model: torch.nn.Module, weights: Weights, samples: list[Sampled]) -> list[torch.Tensor]:
    """Log-probabilities of the sampled tokens if `model` had `weights`: nats, one tensor
    (num_tokens,) per sample."""
    # those of like length together: padding costs as much as tokens
    if len(samples) > LONG_SEQUENCES:
        return score(model, weights, samples[:LONG_SEQUENCES]) + score(
            model, weights, samples[LONG_SEQUENCES:]
        )
    rows = [row.prompt + row.tokens for row in samples]
    longest = max(map(len, rows))
    ids = torch.tensor(
        [row + [0] * (longest - len(row)) for row in rows], device=next(model.parameters()).device
    )
    training = model.training
    model.eval()
    try:
        # Causal, so that padding on the right changes nothing before it.
        logits = functional_call(model, weights, (), {"input_ids": ids, "use_cache": False}).logits
    finally:
        model.train(training)
    scores = []
    for row, sampled, row_logits in zip(ids, samples, logits):
        start, end = len(sampled.prompt), len(sampled.prompt) + len(sampled.tokens)
        chosen = row_logits[start - 1 : end - 1].log_softmax(-1).gather(1, row[start:end, None])
        scores.append(chosen[:, 0].cpu())
    return scores


@dataclass
class Publish:
    """What was seen at one publish."""

    version: int
    began: float  # seconds, `time.monotonic`: of the pause
    ended: float  # the server has resumed
    # right after that, it had an unfinished request which had begun with an earlier version
    crossed: bool
    # nats: largest difference between server and trainer, where it was looked for
    error: float | None = None
    # nats: largest difference between the server and the trainer's version before
    change: float | None = None


class WatchedPublisher(ServerPublisher):
    """
    Waits for requests in flight before every publish. After it, lets the server continue random
    prompts, and scores that with this version and the last.
    """

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self.publishes = threading.Event()  # set from before a publish until it is proven
        self.seen: list[Publish] = []
        self.weights: dict[int, Weights] = {}  # by version

    def attach(self, trainer: AtroposGRPOTrainer) -> None:
        super().attach(trainer)
        (client,) = self.servers.clients
        self._server = Server(client.url, client.token, "")
        block, generator = self.servers.info.block_size, random.Random(0)
        # The same ones at every publish: their blocks are in the prefix cache, and must not survive
        # there.
        lengths = [2 * block + i if i < LONG_SEQUENCES else 3 + i for i in range(NUM_SEQUENCES)]
        self._prompts = [[generator.randrange(256) for _ in range(length)] for length in lengths]

    def before_step(self) -> None:
        # a server that has paused begins no request
        if self.transfer.steps_in_place and self._phase is Phase.SAMPLING:
            self._await_requests()
        super().before_step()

    def _pause(self, phase: Phase = Phase.PAUSED) -> None:
        if self._phase is Phase.SAMPLING:
            self._await_requests()
        super()._pause(phase)

    def _await_requests(self) -> None:
        self.publishes.set()
        # some may end before the pause takes hold, on a busy machine
        wait_for_requests(self._server, 3)
        self._began = time.monotonic()

    def _resume(self) -> None:
        super()._resume()
        crossed = self.servers.clients[0].info().oldest_version_in_flight < self.policy_version
        self.seen.append(Publish(self.policy_version, self._began, time.monotonic(), crossed))

    def _prove(self) -> None:
        super()._prove()
        now = snapshot(self._trainer.model)
        before = self.weights[self.seen[-2].version] if len(self.seen) > 1 else None
        self.weights[self.policy_version] = now
        if self.policy_version <= EVERY_VERSION_UNTIL or self.policy_version % 5 == 0:
            self._compare(before, now)
        self.publishes.clear()

    def _compare(self, before: Weights | None, now: Weights) -> None:
        with ThreadPoolExecutor(NUM_SEQUENCES) as pool:
            lengths = [4 + i % 5 for i in range(NUM_SEQUENCES)]
            samples = list(
                pool.map(lambda asked: sample(self._server, *asked), zip(self._prompts, lengths))
            )
        assert {(row.begun, row.ended) for row in samples} == {
            (self.policy_version, self.policy_version)
        }
        model, seen = self._trainer.model, self.seen[-1]
        seen.error = largest_difference(model, now, samples)
        if before is not None:
            seen.change = largest_difference(model, before, samples)


def largest_difference(model: torch.nn.Module, weights: Weights, samples: list[Sampled]) -> float:
    """Between what was sampled and what `model` with `weights` gives to it, in nats."""
    sampled = torch.cat([row.logprobs for row in samples])
    return (sampled - torch.cat(score(model, weights, samples))).abs().max().item()


@dataclass
class Request:
    route: str
    began: float  # seconds, `time.monotonic`
    ended: float
    failure: str | None
    sampled: Sampled | None  # where the route says which version it began and ended with


@dataclass
class Clients:
    """Threads that keep requests of 60 to 400 tokens in flight while weights are published, as
    environments do. What they asked while the trainer computes would prove nothing, and takes the
    processor from it."""

    server: Server
    publishes: threading.Event
    requests: list[Request] = field(default_factory=list)

    def __enter__(self) -> "Clients":
        self._stop = threading.Event()
        routes = ("/generate", "/generate", "/generate", "/v1/completions")
        self._threads = [
            threading.Thread(target=self._run, args=(i, route)) for i, route in enumerate(routes)
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive(), "a client still waits for its answer"

    def _run(self, seed: int, route: str) -> None:
        generator = random.Random(seed)
        while not self._stop.is_set():
            if not self.publishes.wait(0.1):
                continue
            # with an adapter, vLLM's CPU backend copies its weights for each token of a prompt
            most = 300 if generator.random() < LONG_PROMPTS else 40
            prompt = [generator.randrange(256) for _ in range(generator.randrange(4, most))]
            num_tokens = generator.randrange(60, 400)
            began, failure, sampled = time.monotonic(), None, None
            try:
                if route == "/generate":
                    sampled = sample(self.server, prompt, num_tokens)
                else:
                    self._complete(prompt, num_tokens)
            except (AssertionError, requests.RequestException) as error:
                failure = repr(error)
            self.requests.append(Request(route, began, time.monotonic(), failure, sampled))

    def _complete(self, prompt: list[int], num_tokens: int) -> None:
        body = {
            "prompt": prompt,
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "model": "what-the-environment-calls-it",
        }
        reply = requests.post(
            f"{self.server.url}/v1/completions", json=body, timeout=SAMPLING_TIMEOUT
        )
        assert reply.status_code == 200, reply.text
