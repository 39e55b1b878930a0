"""Every way in which weights reach a server, against a real server."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import requests
import torch
from peft import LoraConfig

from tests import ROOT
from tests.launching import free_urls
from tests.rollout_factory import step_logs
from tests.tiers import FULL
from tests.weights import trainers
from tests.weights.live import (
    ADAPTERS,
    FULL_WEIGHTS,
    MODES,
    Live,
    assert_proven,
    disturb,
    publish,
    snapshot,
)
from tests.weights.trainers import tolerance
from tests.weights.watched import (
    Clients,
    Publish,
    Request,
    Sampled,
    WatchedPublisher,
    sample,
    score,
    wait_for_requests,
)
from trl_atropos import AtroposSource, ReplaySource, RolloutSource
from trl_atropos.services.manager import Services
from trl_atropos.weights.publisher import NullPublisher

pytestmark = [pytest.mark.server, pytest.mark.slow]

BATCHES = 3  # from the environment
PUBLISHES = 50 if FULL else BATCHES
WHOLE_REQUESTS = 30  # of the clients, that are compared token by token
# `nccl_lora` sends the same adapter the same way; that the base is shared with it is seen by the
# other tests.
SEEN_ELSEWHERE = "colocate with an adapter"
AGREEING = [
    pytest.param(name, marks=pytest.mark.full) if name == SEEN_ELSEWHERE else name for name in MODES
]
LONG_PROMPT = [64, 65, 66, 28] * 40
LONG_COMPLETION = 400  # tokens: seconds, in which weights are published
ATTEMPTS = 5  # at a publish in the midst of a request: a busy machine may be too slow


class FewBatches(AtroposSource):
    """
    The environment's batches, and when `BATCHES` have come, the same ones again. Without those
    whose scores are all equal, as one in ten is in the beginning: if it were the first, its step
    would change no weight.
    """

    def start(self, run):
        super().start(run)
        self.kept, self.polled = [], 0

    def poll(self, num_rows, timeout):
        if self.polled < BATCHES:
            rows = super().poll(num_rows, timeout)
            if rows is None or len({row.score for row in rows}) == 1:
                return None
            self.kept.append(rows)
        self.polled += 1
        return self.kept[(self.polled - 1) % BATCHES]


@contextmanager
def rollouts(live: Live, folder: Path) -> Iterator[RolloutSource]:
    """Yields recorded rollouts, or with TRL_ATROPOS_FULL=1 those of a real environment. Its requests
    take the routes of `Clients`; `test_as_users.py` and `test_quickstart.py` train on them."""
    if FULL:
        with environment(live, folder) as atropos:
            yield FewBatches(atropos)
    else:
        yield ReplaySource(live.recording, loop=True)


@contextmanager
def environment(live: Live, folder: Path) -> Iterator[str]:
    """The quickstart's environment, sampling from the server. Yields the URL of its Atropos API."""
    (atropos,) = free_urls(1)
    script = str(ROOT / "recipes/quickstart/environment.py")
    with Services(folder / "logs") as services:
        port = atropos.rpartition(":")[2]
        api = [
            sys.executable,
            "-m",
            "atroposlib.cli.run_api",
            "--host",
            "127.0.0.1",
            "--port",
            port,
        ]
        services.start("atropos", api, health_url=f"{atropos}/")
        services.wait_healthy("atropos", 60)
        # fmt: off
        services.start("environment", [
            sys.executable, script, "serve", "--slurm", "false", "--env.rollout_server_url", atropos,
            "--env.tokenizer_name", live.server.model, "--env.max_new_tokens", "24",
            "--openai.base_url", f"{live.server.url}/v1", "--openai.model_name", live.server.model,
        ])
        # fmt: on
        yield atropos


@pytest.mark.timeout(1800 if FULL else 1200)  # a minute on two idle cores
@pytest.mark.parametrize("live", AGREEING, indirect=True)
def test_server_and_trainer_agree_under_load(live: Live, tmp_path):
    restarts = live.mode.vllm_mode == "restart"
    every = 1
    steps = PUBLISHES
    if restarts and not FULL:  # a restart takes as long as a start
        every = BATCHES
        steps = BATCHES
    publisher = live.publisher(WatchedPublisher, sync_every_n_steps=every)
    # Adapters need more to move at all. With 1e-2, they make the residual stream of some tokens
    # nearly cancel, where float32 rounds off more than the tolerance.
    settings = {
        "max_steps": steps,
        "learning_rate": 2e-3 if live.mode.lora else 5e-4,
        "temperature": 1.0,
    }
    settings |= {
        "per_device_train_batch_size": 32,
        "loss_type": "dr_grpo",
        "lr_scheduler_type": "constant",
        "logging_steps": 25,
        "rollout_timeout": 120,
    }
    with rollouts(live, tmp_path) as source, live.trainer(publisher, **settings) as trainer:
        trainer.rollout_source = source
        with Clients(live.server, publisher.publishes) as clients:
            trainer.train()
        sampled = [request for request in clients.requests if request.sampled is not None]
        first = publisher.seen[0]
        later = [request.sampled for request in sampled if request.began > first.ended]
        check_whole(publisher, trainer.model, later)
    published = [one.version for one in publisher.seen]
    assert published == sorted({*range(0, steps + 1, every), steps})
    check_versions(publisher, set(range(0, BATCHES + 1, every)))
    assert [request.failure for request in clients.requests if request.failure] == []
    assert {request.route for request in clients.requests} == {"/generate", "/v1/completions"}
    others = publisher.seen[1:]  # before the first, nobody asked
    if restarts:
        check_waited(others, sampled)
        return
    quiet = []
    for one in others:
        if not one.crossed and not any(crosses(request, one) for request in sampled):
            quiet.append(one.version)
    assert quiet == []


def check_versions(publisher: WatchedPublisher, least: set[int]) -> None:
    """Of every version that was compared, `least` among them, the server and the trainer computed
    the same, and no two neighbours did."""
    compared = [one for one in publisher.seen if one.error is not None]
    assert {one.version for one in compared} >= least
    wrong = [(one.version, one.error) for one in compared if one.error > tolerance(publisher)]
    assert wrong == []
    visible = max(1e-3, 2 * tolerance(publisher))
    unchanged = [(one.version, one.change) for one in compared[1:] if one.change <= visible]
    assert unchanged == []


def check_waited(publishes: list[Publish], sampled: list[Request]) -> None:
    """At a restart, what was in flight has finished before, and what came meanwhile has waited."""
    for one in publishes:
        assert any(r.began < one.began < r.ended < one.ended for r in sampled), one
        assert any(one.began < r.began < one.ended < r.ended for r in sampled), one


def check_whole(
    publisher: WatchedPublisher, model: torch.nn.Module, samples: list[Sampled]
) -> None:
    """Requests that end with the version that they began with have it in every token, whatever was
    published."""
    whole = sorted(
        (row for row in samples if row.begun == row.ended), key=lambda row: len(row.tokens)
    )
    assert whole, "no request ended with the version that it began with"
    for row in whole[-WHOLE_REQUESTS:]:
        difference = (row.logprobs - score(model, publisher.weights[row.begun], [row])[0]).abs()
        assert difference.max() <= tolerance(publisher), (
            row.begun,
            len(row.prompt),
            difference.tolist(),
        )


def crosses(request: Request, one: Publish) -> bool:
    """Whether the request was in flight at the publish, as its client saw it."""
    before, after = request.sampled.begun < one.version, request.sampled.ended >= one.version
    return before and (after or (request.began < one.began and one.ended < request.ended))


def sample_across(trainer, live: Live, publishes: int) -> tuple[Sampled, list[torch.Tensor]]:
    """One long request with some publishes in its midst, and the log-probabilities that each
    version gives to it."""
    for _ in range(ATTEMPTS):
        trainer.policy_publisher.hold()
        publish(trainer, lambda: None)
        versions = [snapshot(trainer.model)]
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(sample, live.server, LONG_PROMPT, LONG_COMPLETION)
            wait_for_requests(live.server, 1, reply)
            for _ in range(publishes):
                publish(trainer, lambda: disturb(trainer.model, 0.3 if live.mode.lora else 0.02))
                versions.append(snapshot(trainer.model))
            in_midst = not reply.done()
            sampled = reply.result()
        if in_midst:
            return sampled, [score(trainer.model, weights, [sampled])[0] for weights in versions]
    pytest.fail(f"{ATTEMPTS} times, the request was over before the last publish")


def matches(sampled: Sampled, scored: torch.Tensor, publisher) -> torch.Tensor:
    """Which tokens were sampled by the version that has scored them."""
    return (sampled.logprobs - scored).abs() <= tolerance(publisher)


@pytest.mark.parametrize("live", FULL_WEIGHTS, indirect=True)
def test_request_in_flight_switches_to_new_weights(
    live: Live,
):
    publisher = live.publisher(probe_every_n_steps=0)
    with live.trainer(publisher) as trainer:
        sampled, (old, new) = sample_across(trainer, live, publishes=1)
        version = publisher.policy_version
    is_old, is_new = (matches(sampled, scored, publisher) for scored in (old, new))
    switch = int(is_old.long().argmin())
    assert 0 < switch < len(sampled.tokens), "the publish did not fall into the request"
    assert is_new[switch:].all()
    assert (sampled.begun, sampled.ended) == (version - 1, version)


@pytest.mark.parametrize("live", ADAPTERS, indirect=True)
def test_request_in_flight_keeps_its_adapter(live: Live):
    publisher = live.publisher(probe_every_n_steps=0)
    with live.trainer(publisher) as trainer:
        sampled, (old, new) = sample_across(trainer, live, publishes=1)
        version = publisher.policy_version
    assert matches(sampled, old, publisher).all()
    assert not matches(sampled, new, publisher).all()
    assert (sampled.begun, sampled.ended) == (version - 1, version - 1)


@pytest.mark.parametrize("live", ["nccl_lora", "colocate with an adapter"], indirect=True)
def test_request_of_overwritten_adapter_skips_version(
    live: Live,
):
    publisher = live.publisher(probe_every_n_steps=0)
    with live.trainer(publisher) as trainer:
        sampled, (old, between, new) = sample_across(trainer, live, publishes=2)
        version = publisher.policy_version
    is_old, is_between, is_new = (
        matches(sampled, scored, publisher) for scored in (old, between, new)
    )
    switch = int(is_old.long().argmin())
    assert 0 < switch < len(sampled.tokens), "the second publish did not fall into the request"
    assert is_new[switch:].all()
    assert not is_between[switch:].all()
    assert (sampled.begun, sampled.ended) == (version - 2, version)


@pytest.mark.parametrize("live", ["lora"], indirect=True)
def test_request_keeps_file_adapter_over_two_publishes(live: Live):
    publisher = live.publisher(probe_every_n_steps=0)
    with live.trainer(publisher) as trainer:
        sampled, (old, _, new) = sample_across(trainer, live, publishes=2)
        version = publisher.policy_version
    assert matches(sampled, old, publisher).all()
    assert not matches(sampled, new, publisher).all()
    assert (sampled.begun, sampled.ended) == (version - 2, version - 2)


@pytest.mark.parametrize("live", [name for name in MODES if name != "restart"], indirect=True)
def test_second_training_sees_no_cache_of_first(
    live: Live,
):
    publisher = live.publisher()
    with live.trainer(publisher, max_steps=2) as trainer:
        trainer.train()
        trainer.train()
    assert publisher.policy_version == 2
    assert 0 < publisher.probe_max_abs_diff <= tolerance(publisher)


@pytest.mark.parametrize("live", ["server over memory"], indirect=True)
def test_run_begins_with_its_own_weights_on_used_server(live: Live):
    """The last run has left its weights in the server's memory."""
    first = live.publisher()
    with live.trainer(first, max_steps=2, learning_rate=1e-3) as trainer:
        trainer.train()
        first.close()
        second = live.publisher()
        again = trainers.make_trainer(
            second, live.recording, live.server.model, live.folder, mode="server", max_steps=2
        )
        try:
            again.train()
            assert not second.transfer.in_place
            assert_proven(second, publishes=3)
            assert 0 < second.probe_max_abs_diff <= tolerance(second)
        finally:
            second.close()


# ------------------------------------------------ the same rollouts give the same run in every mode

EQUAL_STEPS = {"max_steps": 6, "learning_rate": 1e-3}


@dataclass
class Run:
    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, torch.Tensor]  # of the trained parameters


@torch.no_grad()
def train(trainer) -> Run:
    """Trains from the same adapter, if there is one, whatever was drawn before."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in trainer.model.named_parameters():
        if "lora_" in name:
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    with torch.enable_grad():
        trainer.train()
    logs = step_logs(trainer)
    trained = {
        name: p.detach().cpu().clone()
        for name, p in trainer.model.named_parameters()
        if p.requires_grad
    }
    return Run([log["loss"] for log in logs], [log["grad_norm"] for log in logs], trained)


@pytest.fixture(scope="module")
def alone(server_model, recording, tmp_path_factory) -> dict[bool, Run]:
    """The runs that publish nothing, without and with an adapter."""
    runs = {}
    for lora in (False, True):
        folder: Path = tmp_path_factory.mktemp("alone")
        peft_config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear") if lora else None
        runs[lora] = train(
            trainers.make_trainer(
                NullPublisher(),
                recording,
                server_model,
                folder,
                peft_config=peft_config,
                **EQUAL_STEPS,
            )
        )
    return runs


# A restart leaves the trainer alone: what it serves afterwards is seen above.
EQUAL_RUNS = [
    pytest.param(name, marks=pytest.mark.full) if name == "restart" else name for name in MODES
]


@pytest.mark.parametrize("live", EQUAL_RUNS, indirect=True)
def test_run_is_equal_in_every_mode(live: Live, alone):
    publisher = live.publisher(sync_every_n_steps=3 if live.mode.vllm_mode == "restart" else 1)
    with live.trainer(publisher, **EQUAL_STEPS) as trainer:
        run = train(trainer)
    expected = alone[live.mode.lora]
    assert publisher.policy_version == len(run.losses) == 6
    assert 0 < publisher.probe_max_abs_diff <= trainers.tolerance(publisher)
    assert run.losses == pytest.approx(expected.losses, rel=1e-4, abs=1e-6)
    assert run.grad_norms == pytest.approx(expected.grad_norms, rel=1e-4)
    assert run.weights.keys() == expected.weights.keys()
    for name, weight in run.weights.items():
        torch.testing.assert_close(weight, expected.weights[name], rtol=1e-4, atol=1e-6)


CHAT = [{"role": "user", "content": "say something"}]
GREEDY = {"model": "any", "temperature": 0.0}


def say(live: Live, route: str, **body) -> str:
    """What the server says by one of vLLM's routes, most likely tokens only."""
    reply = requests.post(f"{live.server.url}/v1/{route}", json=GREEDY | body, timeout=60)
    assert reply.status_code == 200, reply.text
    said = reply.json()
    return (
        said["choices"][0]["message"]["content"]
        if "choices" in said
        else said["output"][-1]["content"][0]["text"]
    )


@pytest.mark.parametrize("live", ADAPTERS, indirect=True)
def test_all_routes_sample_from_trained_adapter(live: Live):
    with live.trainer(live.publisher(probe_every_n_steps=0)) as trainer:
        trainer.policy_publisher.hold()
        publish(trainer, lambda: None)
        before = say(live, "chat/completions", messages=CHAT, max_tokens=40)
        publish(trainer, lambda: disturb(trainer.model, 0.3))
        after = say(live, "chat/completions", messages=CHAT, max_tokens=40)
        assert after != before, "the publish changed too little"
        assert say(live, "responses", input="say something", max_output_tokens=40) == after
        # what some routes take for the model without the adapter
        base = {"model": live.server.model}
        assert say(live, "responses", input="say something", max_output_tokens=40, **base) == after


@pytest.mark.parametrize("live", ["lora"], indirect=True)
def test_adapter_routes_need_token(live: Live):
    calls = [
        ("POST", "/v1/load_lora_adapter", {"lora_name": "nobody", "lora_path": "/tmp"}),
        ("POST", "/v1/unload_lora_adapter", {"lora_name": "nobody"}),
        ("POST", "/adapters", {"name": "nobody", "src": "/tmp"}),
        ("DELETE", "/adapters/nobody", None),
    ]
    for method, route, body in calls:
        reply = requests.request(method, live.server.url + route, json=body, timeout=10)
        assert reply.status_code == 401, (route, reply.text)
        token = {"authorization": f"Bearer {live.server.token}"}
        known = requests.request(
            method, live.server.url + route, json=body, headers=token, timeout=10
        )
        assert known.status_code in (400, 404), known.text  # vLLM's own answer
