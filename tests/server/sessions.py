"""A client of a session, which knows its URL alone, and what its server has kept, read strictly."""

import json

import requests
import torch
from transformers import PreTrainedModel

from tests.server_process import Server
from trl_atropos.protocol import SessionReply

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "Name a colour."}]
# nats, both sides in float32: the worst of 12,000 tokens was 2.6e-6, at temperature 0.05 3.8e-6
TOLERANCE = 1e-5


class Client:
    """A session of a server, and a client that knows its URL alone."""

    def __init__(self, server: Server, **query) -> None:
        reply = server.control("POST", "/sessions", query)
        assert reply.status_code == 200, reply.text
        self.server = server
        self.opened = reply.json()
        self.id = self.opened["id"]
        self.url = self.opened["anthropic"]

    def post(self, route: str = CHAT, timeout: float = 60.0, **body) -> requests.Response:
        if route == CHAT:
            body = {"messages": MESSAGES} | body
        body = {"model": "any", "max_tokens": 8} | body
        return requests.post(f"{self.url}{route}", json=body, timeout=timeout)

    def kept(self) -> SessionReply:
        """What the session has kept, read strictly."""
        return self._read("GET")

    def delete(self) -> SessionReply:
        return self._read("DELETE")

    def _read(self, method: str) -> SessionReply:
        reply = self.server.control(method, f"/sessions/{self.id}")
        assert reply.status_code == 200, reply.text
        return SessionReply.model_validate_json(reply.content)


def paths(reply: SessionReply) -> list[list[int]]:
    """The whole path of each segment, as the contract has it."""
    found: list[list[int]] = []
    for segment in reply.segments:
        before = [] if segment.parent < 0 else found[segment.parent][: segment.at]
        assert len(before) == segment.at
        found.append(before + segment.tokens)
    return found


def sampled(reply: SessionReply) -> list[list[int]]:
    stretches = []
    for segment in reply.segments:
        ((start, end),) = segment.sampled
        assert end == len(segment.tokens) and len(segment.logprobs) == end - start > 0
        assert segment.versions[0][1] == start and segment.versions[-1][2] == end
        stretches.append(segment.tokens[start:end])
    return stretches


@torch.no_grad()
def logprobs_of(
    model: PreTrainedModel, path: list[int], count: int, temperature: float = 1.0
) -> torch.Tensor:
    """Returns what Transformers computes for the last `count` tokens of a path, which it computes
    alone and as a whole."""
    ids = torch.tensor([path])
    logits = model(ids, use_cache=False).logits[0, -count - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, ids[0, -count:, None])[:, 0]


def worst_difference(
    model: PreTrainedModel,
    reply: SessionReply,
    temperature: float = 1.0,
    only: int | None = None,
) -> float:
    """Nats by which a sampled token's log-probability differs most from the model's, in all
    segments or in one."""
    worst = 0.0
    for number, path in enumerate(paths(reply)):
        if only not in (None, number):
            continue
        kept = torch.tensor(reply.segments[number].logprobs)
        expected = logprobs_of(model, path, len(kept), temperature)
        worst = max(worst, (expected - kept).abs().max().item())
    return worst


def request_of(path: str, body: dict, *headers: str) -> bytes:
    content = json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", *headers]
    head.append(f"content-length: {len(content)}")
    return "\r\n".join(head).encode() + b"\r\n\r\n" + content
