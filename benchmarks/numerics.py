"""`trl-atropos bench numerics`: by how much trainer and server disagree with each setting of
`numerics`, and its cost.

For each setting, a real server samples completions of many lengths, as many at once as
`--requests`, while the trainer publishes other weights. Those that one policy version has sampled
from the first token to the last are scored by the trainer with the weights of that version, in
packed rows, as in training.
"""

import argparse
import queue
import random
import sys
import tempfile
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import requests

from benchmarks.models import dtype, make_model
from benchmarks.options import (
    aligned,
    give_result,
    list_of,
    model_size,
    new_parser,
    one_of,
    positive,
)
from trl_atropos import __version__
from trl_atropos.protocol import NUMERICS
from trl_atropos.services.signals import install_handlers

LONGEST_PROMPT = 400  # tokens
SCORED_AT_ONCE = 32  # rollouts
KV_CACHE = 8 << 30  # bytes of the server's on a GPU
CHANGE = 0.01  # of each weight at a publish, in standard deviations of its tensor
PATIENCE = 300.0  # seconds for the completions of one policy version
COLUMNS = {
    "numerics": "{}",
    "tokens": "{:,}",
    "differ": "{:,}",
    "mean": "{:.1e}",
    "p99": "{:.1e}",
    "max": "{:.1e}",
    "sampled_per_s": "{:,.0f}",
    "trained_per_s": "{:,.0f}",
}


class Sample(NamedTuple):
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]  # nats
    versions: str  # of the first and the last token


DESCRIPTION = """\
Measure by how much the log-probabilities of trainer and server differ (nats), with each setting of
`numerics`, and how many tokens per second server and trainer compute with it.
"""


def main(argv: list[str] | None = None) -> dict:
    parser = new_parser("numerics", DESCRIPTION)
    add = parser.add_argument
    add(
        "--numerics",
        type=list_of(one_of(NUMERICS)),
        default=",".join(NUMERICS),
        metavar="LIST",
        help="default: %(default)s",
    )
    add(
        "--params",
        type=model_size,
        default="0.6B",
        metavar="SIZE",
        help="of a Qwen3 with random weights (default: %(default)s)",
    )
    add("--model", type=Path, metavar="FOLDER", help="a model to measure in place of that")
    add("--publishes", type=positive, default=50, metavar="N", help="default: %(default)s")
    add(
        "--requests",
        type=positive,
        default=64,
        metavar="N",
        help="at the same time (default: %(default)s)",
    )
    add(
        "--completions",
        type=positive,
        default=32,
        metavar="N",
        help="of each version (default: %(default)s)",
    )
    add(
        "--tokens",
        type=positive,
        default=256,
        metavar="N",
        help="most of a completion (default: %(default)s)",
    )
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of the weights (default: bfloat16 on a GPU, else float32)",
    )
    options = parser.parse_args(argv)
    return give_result(run, options, table)


def run(options: argparse.Namespace) -> dict:
    import torch

    install_handlers()
    options.dtype = options.dtype or dtype()
    with tempfile.TemporaryDirectory(prefix="trl_atropos_bench_") as name:
        folder = Path(name)
        model = options.model
        if model is None:
            model = folder / "model"
            make_model(model, options.params, options.dtype)
        rows = []
        for numerics in options.numerics:
            rows.append(_measure(model, folder / numerics, numerics, options))
            sys.stderr.write(f"{rows[-1]}\n")
    return {
        "trl_atropos": __version__,
        **{package: version(package) for package in ("torch", "trl", "transformers")},
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "model": str(options.model or options.params),
        "dtype": options.dtype,
        "publishes": options.publishes,
        "rows": rows,
    }


def _measure(
    model: Path, folder: Path, numerics: str, options: argparse.Namespace
) -> dict[str, Any]:
    import torch
    from accelerate.optimizer import AcceleratedOptimizer

    from benchmarks.publish import make_trainer, running_server
    from trl_atropos.weights.publisher import ServerPublisher, transfer_of

    mode = "server" if numerics == "float16" else "colocate"
    cuda = torch.cuda.is_available()
    flags = ["--numerics", numerics, "--max-model-len", str(LONGEST_PROMPT + options.tokens)]
    flags += ["--kv-cache-memory-bytes", str(KV_CACHE)] if cuda else []
    served, trained = (
        ("float16", "float32") if numerics == "float16" else (options.dtype, options.dtype)
    )
    with running_server(model, folder, mode, [], served, 0.3, {}, flags) as servers:
        transport = "memory" if mode == "server" else "auto"
        publisher = ServerPublisher(
            transfer_of(mode, servers, transport, str(folder)), probe_every_n_steps=0
        )
        trainer = make_trainer(model, folder, mode, None, trained, publisher, numerics=numerics)
        try:
            publisher.hold()
            publisher.begin(wrapped := AcceleratedOptimizer(_change(trainer.model)), 0)
            trainer.computation.packs = trainer.computation.how_packed()
            trainer._batch = trainer._batch_of([])
            clients = _Clients(servers, trainer.model.config.vocab_size, options)
            row = _Scores(trainer)
            sampled_per_s = clients.burst()
            with clients:
                for number in range(options.publishes):
                    wrapped.step()
                    publisher.judge_last_publish()
                    row.add(clients.of_version(f"{number + 1}-{number + 1}"))
            return {
                "numerics": numerics,
                **row.gaps(),
                "sampled_per_s": sampled_per_s,
                "trained_per_s": row.speed(),
            }
        finally:
            publisher.close()
            del trainer


def _change(model: Any):
    """An optimizer that gives every weight another value, in place."""
    import torch

    class Change(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure=None) -> None:
            for parameter in self.param_groups[0]["params"]:
                spread = parameter.float().std().nan_to_num() if parameter.dim() > 1 else 0.1
                change = torch.randn_like(parameter, dtype=torch.float32) * spread * CHANGE
                parameter.add_(change.to(parameter.dtype))

    return Change(model.parameters(), {})


class _Clients:
    """Threads that ask for completions, each for one after the other, while in the context."""

    def __init__(self, servers: Any, vocabulary: int, options: argparse.Namespace):
        self.url = servers.clients[0].url
        self.vocabulary = vocabulary
        self.options = options
        self.samples: queue.Queue[Sample | Exception] = queue.Queue()
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(i,), daemon=True)
            for i in range(options.requests)
        ]

    def __enter__(self) -> "_Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self._over.is_set():
            prompt = [rng.randrange(self.vocabulary) for _ in range(rng.randint(1, LONGEST_PROMPT))]
            try:
                self.samples.put(self._ask(prompt, rng.randint(1, self.options.tokens)))
            except Exception as error:  # noqa: BLE001 - raised where samples are waited for
                self.samples.put(error)
                return

    def _ask(self, prompt: list[int], tokens: int) -> Sample:
        body = {
            "prompt": {"prompt_token_ids": prompt},
            "max_tokens": tokens,
            "ignore_eos": True,
            "logprobs": 0,
        }
        reply = requests.post(f"{self.url}/generate", json=body, timeout=PATIENCE)
        reply.raise_for_status()
        (ids,), (entries,) = (reply.json()[key] for key in ("token_ids", "logprobs"))
        logprobs = [next(iter(entry[0].values())) for entry in entries]
        return Sample(prompt, ids, logprobs, reply.headers["x-policy-version"])

    def burst(self) -> float:
        """Tokens per second of as many requests at once, each of the most tokens. The first such
        burst warms up."""
        for _ in range(2):
            threads = [
                threading.Thread(target=self._ask, args=([1], self.options.tokens))
                for _ in self._threads
            ]
            began = time.monotonic()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return len(threads) * self.options.tokens / (time.monotonic() - began)

    def of_version(self, versions: str) -> list[Sample]:
        """Completions of one version, from the first token to the last."""
        found: list[Sample] = []
        while len(found) < self.options.completions:
            sample = self.samples.get(timeout=PATIENCE)
            if isinstance(sample, Exception):
                raise sample
            found += [sample] if sample.versions == versions else []
        return found


class _Scores:
    """What the trainer makes of samples."""

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.gaps_of_tokens = []
        self.last = []

    def _score(self, samples: list[Sample]) -> Any:
        """Log-probabilities (samples, most tokens), and which of them are of tokens."""
        import torch

        before, after = (max(len(sample[i]) for sample in samples) for i in (0, 1))
        ids, mask = (torch.zeros(len(samples), before + after, dtype=torch.long) for _ in range(2))
        for row, (prompt, tokens, *_) in enumerate(samples):
            place = slice(before - len(prompt), before + len(tokens))
            ids[row, place], mask[row, place] = torch.tensor(prompt + tokens), 1
        ids, mask = (tensor.to(self.trainer.accelerator.device) for tensor in (ids, mask))
        score = self.trainer._get_per_token_logps_and_entropies
        return score(self.trainer.model, ids, mask, after)[0], mask[:, before:].bool()

    def add(self, samples: list[Sample]) -> None:
        import torch

        for begin in range(0, len(samples), SCORED_AT_ONCE):
            part = samples[begin : begin + SCORED_AT_ONCE]
            with torch.no_grad():
                scored, mask = self._score(part)
            theirs = torch.cat(
                [torch.tensor(sample.logprobs, dtype=torch.float32) for sample in part]
            )
            self.gaps_of_tokens.append((scored[mask].cpu() - theirs).abs())
        self.last = samples

    def gaps(self) -> dict[str, float]:
        import torch

        gaps = torch.cat(self.gaps_of_tokens)
        rank = max(1, round(0.99 * len(gaps)))
        numbers = {"mean": gaps.mean(), "p99": gaps.kthvalue(rank).values, "max": gaps.max()}
        counts = {"tokens": len(gaps), "differ": int((gaps != 0).sum())}
        return counts | {name: value.item() for name, value in numbers.items()}

    def speed(self) -> float | None:
        """Tokens per second, prompts included, of a forward and a backward pass. The first warms
        up. `None` where the gradients do not fit into the memory beside the server."""
        import torch

        samples = self.last[:SCORED_AT_ONCE]
        try:
            for _ in range(2):
                began = time.monotonic()
                scored, mask = self._score(samples)
                scored[mask].sum().backward()
                scored[mask].sum().item()  # waits for the device
                self.trainer.model.zero_grad()
        except torch.OutOfMemoryError:
            return None
        return sum(len(sample.prompt) + len(sample.tokens) for sample in samples) / (
            time.monotonic() - began
        )


def table(result: dict) -> str:
    names = ("trl_atropos", "torch", "trl", "transformers", "device")
    lines = [
        " ".join(f"{name}={result[name]}" for name in names),
        f"{result['model']} in {result['dtype']}",
        "",
    ]
    lines += aligned(result["rows"], COLUMNS)
    return "\n".join(lines) + "\n"
