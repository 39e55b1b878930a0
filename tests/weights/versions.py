"""A policy that changes on a real server while it samples, and the truth about every token: its
log-probability tells which version's weights it was sampled from."""

import json
import threading
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import requests
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.server_process import Server
from tests.weights.live import disturb, restore, snapshot
from trl_atropos.rollouts.rollout import Rollout
from trl_atropos.server_client import ServerClient
from trl_atropos.weights.checkpoint_plan import CheckpointPlan
from trl_atropos.weights.colocate import replace
from trl_atropos.weights.transfer import open_views

# of a change between two versions: nearly every log-probability changes by more than the tolerance
SCALE = 0.05
# nats; a float32 server and a float32 reference have never differed by more than 6e-6
TOLERANCE = 2e-5
KEPT = 80  # versions that a completion may be of

Result = TypeVar("Result")


class MovingPolicy:
    """The server's weights, shared, and a copy of them for each version."""

    def __init__(self, server: Server):
        self.server = server
        self.client = ServerClient(server.url, 30, server.token)
        self.client.hold_lease()
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            server.model, dtype=torch.float32
        ).eval()
        specs = CheckpointPlan(self.model).specs()
        self.version = self.client.info().policy_version
        self.of_version = {self.version: deepcopy(self.model)}
        views, refused = open_views(self.model.named_parameters(), self.client.attach(specs))
        assert not refused
        replace(self.model, views)
        self._original = snapshot(self.model)

    def publish(self, version: int) -> None:
        self.client.pause(in_place=True)
        restore(self.model, self._original)  # or they would drift to where float32 is coarse
        disturb(self.model, SCALE)
        self.of_version[version] = deepcopy(self.of_version[self.version])
        restore(self.of_version[version], snapshot(self.model))
        self.client.resume(version)
        self.version = version
        if len(self.of_version) > KEPT:
            del self.of_version[min(self.of_version)]

    def publish_during(self, call: "Call") -> None:
        """Often at first, so that the shortest call meets publishes, then ever less, so that the
        longest call meets no more versions than are kept."""
        wait = 0.05
        while call.is_alive():
            self.publish(self.version + 1)
            call.join(wait)
            wait *= 1.07  # 80 of them are 160 s, more than a call may take

    def publish_the_same_weights(self, version: int) -> None:
        self.client.pause()
        self.of_version[version] = self.of_version[self.version]
        self.client.resume(version)
        self.version = version

    def renew_lease(self) -> None:
        """Ends the lease, as a run does when it ends: the server lets in all requests that wait.
        Then takes another."""
        self.client.release_lease()
        self.client.hold_lease()

    def put_back(self) -> None:
        self.client.pause()
        restore(self.model, self._original)
        self.client.resume(0)
        self.client.release_lease()

    @torch.no_grad()
    def samplers(self, completions: list["Completion"]) -> list[list[set[int]]]:
        """For each token of each completion the versions that give it the log-probability that it
        came with. The completions have prompts of one length and one number of tokens."""
        ids = torch.tensor([completion.prompt + completion.tokens for completion in completions])
        sampled = torch.tensor([completion.logprobs for completion in completions])  # (n, tokens)
        num_tokens = sampled.shape[1]
        found: list[list[set[int]]] = [[set() for _ in range(num_tokens)] for _ in completions]
        for version, model in self.of_version.items():
            logits = model(ids, use_cache=False).logits[:, -num_tokens - 1 : -1]
            expected = logits.log_softmax(-1).gather(2, ids[:, -num_tokens:, None])[:, :, 0]
            for i, position in torch.nonzero((expected - sampled).abs() < TOLERANCE).tolist():
                found[i][position].add(version)
        return found


@dataclass
class Completion:
    """Token ids and log-probabilities of one completion, as a client reads them."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


def row_of(*turns: Completion) -> Rollout:
    """One row of all turns, through JSON, with what lies between two turns as context."""
    last = turns[-1]
    sequence = last.prompt + last.tokens
    begin = len(turns[0].prompt)
    logprobs, mask = [np.nan] * len(sequence), [False] * len(sequence)
    for turn in json.loads(json.dumps([vars(turn) for turn in turns])):
        place = slice(len(turn["prompt"]), len(turn["prompt"]) + len(turn["tokens"]))
        assert sequence[: place.stop] == turn["prompt"] + turn["tokens"]
        logprobs[place], mask[place] = turn["logprobs"], [True] * len(turn["tokens"])
    return Rollout(
        prompt_ids=np.array(sequence[:begin], np.int32),
        completion_ids=np.array(sequence[begin:], np.int32),
        mask=np.array(mask[begin:]),
        logprobs=np.array(logprobs[begin:], np.float32),
        score=0.0,
        group_mean=0.0,
        group_std=0.0,
        token_advantages=None,
        zero_advantage=False,
        env_id=0,
    )


# ------------------------------------------------------------------------- the routes of the server


def generate(
    server: Server, prompt: list[int], num_tokens: int, n: int = 1, **fields
) -> list[Completion]:
    body = {
        "prompt": {"prompt_token_ids": prompt},
        "n": n,
        "max_tokens": num_tokens,
        "ignore_eos": True,
        **fields,
    }
    reply = server.generate(**body).json()
    return [
        Completion(prompt, tokens, [next(iter(entry[0].values())) for entry in entries])
        for tokens, entries in zip(reply["token_ids"], reply["logprobs"], strict=True)
    ]


def openai(
    server: Server, route: str, num_tokens: int, n: int = 1, stream: bool = False, **fields
) -> list[Completion]:
    """By `/v1/completions` or `/v1/chat/completions`, whole or in parts."""
    body = {
        "model": "any",
        "n": n,
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "temperature": 1.0,
    }
    body |= {"return_token_ids": True, "stream": stream, **fields}
    if route == "completions":
        body |= {"prompt": "abc=", "logprobs": 0}
    else:
        body |= {
            "messages": [{"role": "user", "content": "say something"}],
            "logprobs": True,
            "top_logprobs": 0,
        }
    reply = requests.post(f"{server.url}/v1/{route}", json=body, timeout=60, stream=stream)
    assert reply.status_code == 200, reply.text
    # one, if it comes whole
    lines = (line.removeprefix(b"data: ") for line in reply.iter_lines() if line)
    parts = [json.loads(line) for line in lines if line != b"[DONE]"]
    completions = [Completion([], [], []) for _ in range(n)]
    for part in parts:
        for choice in part["choices"]:
            completion = completions[choice["index"]]
            completion.prompt = (
                part.get("prompt_token_ids") or choice.get("prompt_token_ids") or completion.prompt
            )
            completion.tokens += choice.get("token_ids") or []  # the first chunk of a chat has none
            values = choice.get("logprobs") or {}
            completion.logprobs += values.get("token_logprobs") or []
            completion.logprobs += [entry["logprob"] for entry in values.get("content") or []]
    return completions


class Call(threading.Thread, Generic[Result]):
    """Runs `work` in the background."""

    def __init__(self, work: Callable[[], Result]):
        super().__init__(daemon=True)
        self._work = work
        self._result: Result | None = None
        self.start()

    def run(self) -> None:
        self._result = self._work()

    def result(self) -> Result:
        self.join(120)
        assert self._result is not None, "the request failed or did not end within 120 s"
        return self._result


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.01)
