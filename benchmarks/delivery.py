"""`trl-atropos bench delivery`: how long a batch takes from the answers of a server to the trainer.

The environment is the quickstart's, started as a run starts it, and so is the Atropos API. A route
stands in for the inference server: it holds the requests of a batch, and then answers all of them
at once, as an engine does whose completions end together. The trainer is the client that a run
pulls with.
"""

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import yaml
from aiohttp import web

from benchmarks.models import VOCABULARY, byte_tokenizer
from benchmarks.options import (
    add_batch_size,
    add_rounds,
    aligned,
    give_result,
    new_parser,
    require_whole,
)
from benchmarks.sampling_load import processor_seconds
from trl_atropos import __version__
from trl_atropos.environment_entry import SITE, EnvironmentSpec
from trl_atropos.protocol import ANSWER_HEADER, NUMBERS
from trl_atropos.rollouts.api import AtroposClient, NoAnswer, Registration, join
from trl_atropos.services.addresses import free_port, port_of
from trl_atropos.services.manager import Services
from trl_atropos.services.signals import install_handlers

DESCRIPTION = """\
Measure how long a batch takes from the answers of an inference server, which end all at once, to the trainer's rows:
through the environment's process, JSON, the Atropos API, and the client that a run pulls with. There is no engine.

  answer          usual: as every server of `server_type: vllm` answers, a dictionary for each log-probability, and text;
                  numbers: as this package's server answers an environment with a `path`
  seconds         from the answers to the rows, the median of the rounds, which take turns
  us_a_token      the same for one token, in microseconds
  environment_us  processor time of the environment's process, in microseconds a token
"""
COLUMNS = {
    "answer": "{}",
    "seconds": "{:.2f}",
    "us_a_token": "{:.2f}",
    "environment_us": "{:.2f}",
}
ANSWERS = ("usual", "numbers")
ENVIRONMENT = Path(__file__).parents[1] / "recipes/quickstart/environment.py"
TIMEOUT = 300.0  # seconds for a batch, the start of the environment included
POLL = 0.01  # seconds between two requests of the trainer
WORDS = 30_000  # of the tokenizer


def build_parser() -> argparse.ArgumentParser:
    parser = new_parser("delivery", DESCRIPTION)
    add_batch_size(parser, sequences=128, tokens=1024)
    add_rounds(parser, 5)
    return parser


def main(argv: list[str] | None = None) -> None:
    parser = build_parser()
    options = parser.parse_args(argv)
    require_whole(parser, options, "group_size")
    give_result(run, options, table)


def run(options: argparse.Namespace) -> dict:
    """Measures. Returns the versions, the sizes, and a row for each kind of answer."""
    install_handlers()
    with tempfile.TemporaryDirectory(prefix="trl_atropos_bench_") as name:
        folder = Path(name)
        byte_tokenizer(WORDS).save_pretrained(folder / "model")
        server = HeldAnswers(options)
        with Services(folder / "logs") as services:
            client = _start(services, folder, server, options)
            rows = _measure(services, client, server, options)
    return {
        "trl_atropos": __version__,
        "sequences": options.sequences,
        "tokens": options.tokens,
        "rows": rows,
    }


class HeldAnswers:
    """A server of `/generate` in a thread. It answers a batch of requests at once, when it is told
    to."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self._groups = options.sequences // options.group_size
        self._bodies = {}
        for answer in ANSWERS:
            self._bodies[answer] = _body_of(answer, options.group_size, options.tokens)
        self._loop = asyncio.new_event_loop()
        self._waiting: asyncio.Queue[asyncio.Future] = asyncio.Queue()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        port = port_of(self.url)
        options = {"print": None, "handle_signals": False, "loop": self._loop}
        web.run_app(app, host="127.0.0.1", port=port, **options)

    async def _generate(self, request: web.Request) -> web.Response:
        turn = self._loop.create_future()
        await self._waiting.put(turn)
        answer = await turn
        if request.headers.get(ANSWER_HEADER) != NUMBERS:
            answer = "usual"
        return web.Response(body=self._bodies[answer], content_type="application/json")

    def answer_batch(self, answer: str) -> float:
        """Waits until a batch of requests is there, and answers it. Returns when that was, by the
        monotonic clock."""
        task = asyncio.run_coroutine_threadsafe(self._answer_batch(answer), self._loop)
        return task.result(TIMEOUT)

    async def _answer_batch(self, answer: str) -> float:
        turns = [await self._waiting.get() for _ in range(self._groups)]
        for turn in turns:
            turn.set_result(answer)
        return time.monotonic()


def _body_of(answer: str, completions: int, tokens: int) -> bytes:
    """Returns the answer to a request, as `server/sampling.py` describes it. Its tokens are words,
    which are as frequent as in a language: the tenth comes 10^-1.5 times as often as the first."""
    draw = random.Random(0)
    token_ids = []
    logprobs = []
    for _ in range(completions):
        ranks = [min(int(draw.paretovariate(0.5)), WORDS) for _ in range(tokens)]
        token_ids.append([VOCABULARY + rank - 1 for rank in ranks])
        logprobs.append([-3 * draw.random() for _ in range(tokens)])
    body: dict[str, Any] = {
        "finish_reasons": ["length"] * completions,
        "prompt_token_ids": [1, 2, 3, 4],
        "token_ids": token_ids,
        "cached_tokens": 0,
    }
    if answer == "numbers":
        body["sampled_logprobs"] = logprobs
        return msgspec.json.encode(body)
    entries = []
    for ids, values in zip(token_ids, logprobs, strict=True):
        entries.append([[{str(token): value}] for token, value in zip(ids, values, strict=True)])
    body |= {"text": ["four" * tokens] * completions, "prompt": "", "logprobs": entries}
    return msgspec.json.encode(body)


def _start(
    services: Services, folder: Path, server: HeldAnswers, options: argparse.Namespace
) -> AtroposClient:
    """Starts the API and the environment. Returns a registered client."""
    url = f"http://127.0.0.1:{free_port()}"
    port = str(port_of(url))
    api = [sys.executable, "-m", "trl_atropos.rollouts.api", "--host", "127.0.0.1", "--port", port]
    services.start("atropos", api, health_url=f"{url}/")
    services.wait_healthy("atropos", TIMEOUT)
    client = AtroposClient(url, request_timeout=TIMEOUT, batch_timeout=TIMEOUT)
    length = options.tokens + 8
    registration = Registration(
        wandb_group="bench",
        wandb_project="bench",
        batch_size=options.sequences,
        max_token_len=length,
        checkpoint_dir="",
        save_checkpoint_interval=0,
        starting_step=0,
        num_steps=10**6,
    )
    join(client, registration, reset=False)
    client.batch()  # environments register once the trainer has asked
    settings = {
        "tokenizer_name": str(folder / "model"),
        "rollout_server_url": url,
        "total_steps": 10**6,
        "batch_size": options.sequences,
        "group_size": options.group_size,
        "max_token_length": length,
        "max_new_tokens": options.tokens,
        "max_batches_offpolicy": 1,
        "max_num_workers": 4096,
        "use_wandb": False,
        "wandb_name": "bench",
    }
    inference = {
        "base_url": f"{server.url}/v1",
        "model_name": str(folder / "model"),
        "api_key": "none",
        "server_type": "vllm",
        "health_check": False,
    }
    config = folder / "environment.yaml"
    config.write_text(yaml.safe_dump({"env": settings, "openai": [inference]}))
    command = [sys.executable, f"{SITE}/run.py", str(ENVIRONMENT), "serve", "--config", str(config)]
    services.start("environment", command, env=EnvironmentSpec(path=str(ENVIRONMENT)).variables())
    return client


def _measure(
    services: Services, client: AtroposClient, server: HeldAnswers, options: argparse.Namespace
) -> list[dict]:
    """Returns a row for each kind of answer. The kinds take turns, and the first round, in which
    the environment starts, does not count."""
    guard = next(each.guard for each in services.running() if each.name == "environment")
    seconds: dict[str, list[float]] = {answer: [] for answer in ANSWERS}
    processor: dict[str, list[float]] = {answer: [] for answer in ANSWERS}
    for number in range(1 + options.rounds):
        for answer in ANSWERS:
            answered = server.answer_batch(answer)
            before = _worked(guard.pid)
            _await_batch(client, services)
            if number:
                seconds[answer].append(time.monotonic() - answered)
                processor[answer].append(_worked(guard.pid) - before)
    tokens = options.sequences * options.tokens
    rows = []
    for answer in ANSWERS:
        median = statistics.median(seconds[answer])
        rows.append(
            {
                "answer": answer,
                "seconds": median,
                "us_a_token": median / tokens * 1e6,
                "environment_us": statistics.median(processor[answer]) / tokens * 1e6,
            }
        )
    return rows


def _await_batch(client: AtroposClient, services: Services) -> None:
    """Pulls until a batch comes."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        with contextlib.suppress(NoAnswer):
            if client.batch().batch:
                return
        services.check()
        time.sleep(POLL)
    raise SystemExit(f"trl-atropos bench delivery: no batch has come in {TIMEOUT:.0f} s")


def _worked(guard: int) -> float:
    """Returns the processor time of a guard's program, in seconds."""
    return sum(map(processor_seconds, psutil.Process(guard).children()))


def table(result: dict) -> str:
    """The result as lines of text."""
    lines = [
        f"trl_atropos={result['trl_atropos']} {result['sequences']} sequences of "
        f"{result['tokens']} tokens",
        "",
        *aligned(result["rows"], COLUMNS),
    ]
    return "\n".join(lines) + "\n"
