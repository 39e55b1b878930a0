"""What a session keeps of a policy that moves while it samples: each token's log-probability is the
one that Transformers computes with the weights of the version that is noted for the token."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.server.sessions import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    TOLERANCE,
    Client,
    logprobs_of,
    paths,
)
from tests.weights.versions import Call, MovingPolicy
from trl_atropos.protocol import SessionReply

pytestmark = pytest.mark.server

IN_FLIGHT = 12  # publishes that must fall into a completion: others may come between two calls
ROUNDS = 3  # of all calls: the policy moves until the last has ended, however slow the machine
TOKENS = 150  # of a completion, more than a block of the engine's cache
LENGTH = {"max_tokens": TOKENS, "max_output_tokens": TOKENS, "ignore_eos": True}
CALLS = [
    (COMPLETIONS, {"prompt": "abc=", "n": 3}),
    (COMPLETIONS, {"prompt": ["ab", "cd"], "stream": True, "logprobs": 2}),
    (CHAT, {"n": 2}),
    (CHAT, {"stream": True, "logprobs": True, "top_logprobs": 1}),
    ("/v1/responses", {"input": "Hello"}),
    ("/v1/responses", {"input": "Hello", "stream": True}),
    ("/v1/messages", {"messages": MESSAGES}),
    ("/v1/messages", {"messages": MESSAGES, "stream": True}),
]


@pytest.fixture
def policy(server) -> Iterator[MovingPolicy]:
    """The shared server's weights, which are put back."""
    policy = MovingPolicy(server)
    yield policy
    policy.put_back()


def make_calls(client: Client) -> int:
    """Makes all calls at once, in a few rounds. In those after the first, there is also a turn that
    follows the longest completion, of whose tokens the engine has cached a block. Returns how many
    calls it made."""
    calls = list(CALLS)
    count = 0
    for _ in range(ROUNDS):
        with ThreadPoolExecutor(len(calls)) as pool:
            replies = [
                pool.submit(client.post, route, **LENGTH | fields) for route, fields in calls
            ]
        statuses = [reply.result().status_code for reply in replies]
        assert statuses == [200] * len(calls)
        count += len(calls)
        if len(calls) == len(CALLS):
            turn = max(paths(client.kept()), key=len) + [65]
            calls.append((COMPLETIONS, {"prompt": turn, "n": 2}))
    return count


def test_each_token_is_of_the_version_that_is_noted_for_it(policy):
    """Publishes in flight, of weights so different that a log-probability tells the version."""
    client = Client(policy.server)
    calls = Call(lambda: make_calls(client))
    policy.publish_during(calls)
    num_calls = calls.result()
    reply = client.delete()
    assert reply.counts["calls"] == num_calls > len(CALLS)
    assert all(call.versions_known and call.reason is None for call in reply.calls)
    assert any(segment.at > TOKENS for segment in reply.segments)
    assert len(publishes_in_flight(reply)) >= IN_FLIGHT
    under_its_version, under_the_one_before = differences(policy, reply)
    assert under_its_version.max() < TOLERANCE
    # Otherwise the comparison could not tell two versions apart.
    assert (under_the_one_before > TOLERANCE).float().mean() > 0.95


def publishes_in_flight(reply: SessionReply) -> set[int]:
    """The versions that began in the midst of a completion."""
    versions = set()
    for segment in reply.segments:
        for version, _, _ in segment.versions[1:]:
            versions.add(version)
    return versions


def differences(policy: MovingPolicy, reply: SessionReply) -> tuple[torch.Tensor, torch.Tensor]:
    """By how many nats each kept log-probability differs from the one under the token's version,
    and from the one under the version before, if the completion has one."""
    right = []
    wrong = []
    for segment, path in zip(reply.segments, paths(reply), strict=True):
        kept = torch.tensor(segment.logprobs)
        begin = len(segment.tokens) - len(kept)
        before = None
        for version, start, end in segment.versions:
            stretch = slice(start - begin, end - begin)
            expected = logprobs_of(policy.of_version[version], path, len(kept))
            right.append((expected - kept)[stretch].abs())
            if before is not None:
                wrong.append((before - kept)[stretch].abs())
            before = expected
    assert sum(map(len, right)) == reply.counts["tokens"]
    return torch.cat(right), torch.cat(wrong)
