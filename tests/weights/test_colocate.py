"""Single-copy weights on a real server: one memory, fenced steps, and a probe that sees when either breaks."""

import contextlib
import threading
import time

import pytest
import requests
import torch
from transformers import TrainerCallback

from tests.server_process import running_server
from tests.weights.faults import settle
from tests.weights.trainers import make_publisher, tolerance
from trl_atropos.errors import AttachError, CheckpointError, ProbeError

pytestmark = pytest.mark.server


def probe(trainer) -> float:
    """Largest difference that one probe sees, in nats."""
    return trainer.policy_publisher.probe()


def allowed(trainer) -> float:
    return tolerance(trainer.policy_publisher)


@torch.no_grad()
def disturb(trainer, scale: float = 0.05) -> None:
    """Changes every weight in place, as an optimizer would but without a fence."""
    for parameter in trainer.model.parameters():
        parameter.add_(scale * torch.randn_like(parameter))


class Detach(TrainerCallback):
    """Gives one parameter a memory of its own in mid-run, as a wrapper or a careless `.data =` would."""

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == 2:
            weight = model.model.layers[0].mlp.down_proj.weight
            weight.data = weight.data.clone()


def test_the_trainers_parameters_are_the_servers_memory(make_trainer):
    trainer = make_trainer()
    disturb(trainer)  # nothing is sent, nothing was cached yet
    assert probe(trainer) <= allowed(trainer)


def test_a_tied_head_stays_tied_to_the_shared_embedding(make_trainer):
    model = make_trainer().model
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_every_publish_leaves_both_sides_equal_while_requests_are_in_flight(make_trainer, server):
    """Fifty publishes under load: the probe runs after each, and no client sees an error."""
    trainer = make_trainer(max_steps=50, learning_rate=1e-3)
    failures, served, stop = [], [0], threading.Event()

    def load(prompt: str) -> None:
        while not stop.is_set():
            reply = server.generate(prompt=prompt, n=4, max_tokens=60, temperature=1.0)
            served[0] += 1
            if reply.status_code != 200:
                failures.append(reply.text)

    clients = [threading.Thread(target=load, args=(text * 40,)) for text in ("abc=", "hgf=")]
    for client in clients:
        client.start()
    trainer.train()
    stop.set()
    for client in clients:
        client.join(60)
    publisher = trainer.policy_publisher
    assert failures == []
    assert served[0] > 10
    assert publisher.policy_version == 50
    assert 0 < publisher.probe_max_abs_diff <= tolerance(publisher)


def test_log_probabilities_of_a_request_in_flight_match_the_weights_on_either_side_of_the_publish(
    make_trainer, server
):
    """A completion begun before a publish and ended after it has every token scored by the old or the new weights."""
    trainer = make_trainer()
    client, model = trainer.policy_publisher.servers.clients[0], trainer.model
    prompt, replies = [64, 65, 66, 28] * 40, []
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    request = {"prompt": {"prompt_token_ids": prompt}, "max_tokens": 300, "ignore_eos": True}
    thread = threading.Thread(target=lambda: replies.append(server.generate(**request)))
    server.metric("num_requests_running")  # the first look takes long
    thread.start()
    deadline = time.monotonic() + 30
    while server.metric("num_requests_running") == 0:
        assert time.monotonic() < deadline, "the request does not run"
    client.pause()
    disturb(trainer, 0.02)
    version = trainer.policy_publisher.policy_version
    client.resume(version + 1)
    thread.join(60)
    assert replies[0].headers["x-policy-version"] == f"{version}-{version + 1}"
    reply = replies[0].json()
    (tokens,), (entries,) = reply["token_ids"], reply["logprobs"]
    sampled = torch.tensor([next(iter(entry[0].values())) for entry in entries])
    new = _score(model, prompt, tokens)
    after = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    _load(model, before)
    old = _score(model, prompt, tokens)
    _load(model, after)
    is_old = (sampled - old).abs() <= allowed(trainer)
    is_new = (sampled - new).abs() <= allowed(trainer)
    assert (is_old | is_new).all()
    switch = int(is_old.long().argmin())
    assert 0 < switch < len(tokens), "the publish did not fall into the request"
    assert is_new[switch:].all()


def test_a_trainer_can_train_twice(make_trainer):
    trainer = make_trainer(max_steps=2)
    trainer.train()
    trainer.train()
    assert trainer.policy_publisher.policy_version == 2
    assert 0 < trainer.policy_publisher.probe_max_abs_diff <= allowed(trainer)


def test_the_probe_sees_caches_that_outlive_the_weights(make_trainer):
    trainer = make_trainer()
    publisher = trainer.policy_publisher
    publisher.transfer.clear_cache = False
    assert probe(trainer) <= allowed(trainer)  # fills the cache
    publisher.transfer.pause()
    disturb(trainer)
    publisher.transfer.resume(publisher.policy_version)
    with pytest.raises(ProbeError, match="does not sample from the weights"):
        probe(trainer)


def test_the_same_publish_with_the_caches_dropped_passes_the_probe(make_trainer):
    trainer = make_trainer()
    publisher = trainer.policy_publisher
    assert probe(trainer) <= allowed(trainer)
    publisher.transfer.pause()
    disturb(trainer)
    publisher.transfer.resume(publisher.policy_version)
    assert probe(trainer) <= allowed(trainer)


class Misround:
    """Lets the trainer be wrong about one position of the probe's rows, the next `times` that it scores them."""

    def __init__(self, trainer, times: int) -> None:
        self.times = times
        self.prompt = len(trainer.policy_publisher._probe.prompt_ids)
        trainer.model.register_forward_hook(self)

    def __call__(self, model, args, output):
        if self.times:
            self.times -= 1
            logits = output.logits.clone()
            logits[0, self.prompt, ::2] += 1e-3  # whichever token was sampled: half a thousandth of a nat
            output.logits = logits
        return output


def test_the_probe_looks_again_before_it_takes_rounding_for_other_weights(make_trainer, caplog):
    trainer = make_trainer()
    Misround(trainer, times=1)
    with caplog.at_level("WARNING"):
        difference = probe(trainer)
    assert allowed(trainer) < difference < 10 * allowed(trainer)
    assert trainer.policy_publisher.probe_max_abs_diff == difference  # nothing is hidden
    assert "so this is rounding" in caplog.text


def test_single_tokens_that_differ_twice_stop_the_run(make_trainer):
    trainer = make_trainer()
    Misround(trainer, times=2)
    with pytest.raises(ProbeError, match="does not sample from the weights") as caught:
        probe(trainer)
    assert caught.value.result.mean_abs_diff < allowed(trainer) < caught.value.result.max_abs_diff


def test_a_run_whose_caches_are_not_dropped_stops(make_trainer):
    trainer = make_trainer(max_steps=20, learning_rate=1e-2)
    trainer.policy_publisher.transfer.clear_cache = False
    with pytest.raises(ProbeError):
        trainer.train()


def test_the_probe_sees_a_weight_that_only_the_trainer_has(make_trainer):
    trainer = make_trainer()
    layer = trainer.model.model.layers[0].mlp.down_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach() + 0.05 * torch.randn_like(layer.weight))
    with pytest.raises(ProbeError):
        probe(trainer)


def test_a_run_that_loses_a_parameter_stops_and_names_it(make_trainer):
    trainer = make_trainer()
    trainer.add_callback(Detach())
    with pytest.raises(AttachError, match=r"layers\.0\.mlp\.down_proj\.weight"):
        trainer.train()


def test_the_probe_sees_a_step_that_was_not_published(make_trainer):
    trainer = make_trainer()
    assert probe(trainer) <= allowed(trainer)
    disturb(trainer)  # a step without its fence: the caches are stale
    with pytest.raises(ProbeError):
        probe(trainer)


def test_the_probe_sees_a_version_that_never_reached_the_server(make_trainer):
    trainer = make_trainer()
    trainer.policy_publisher.policy_version += 1
    with pytest.raises(ProbeError, match="policy version"):
        probe(trainer)


def test_a_step_that_raises_leaves_a_server_that_nobody_can_sample_from(make_trainer, server_model, tmp_path):
    with running_server(server_model, tmp_path / "logs") as doomed:
        trainer = make_trainer(make_publisher(doomed, tmp_path))

        class Fail(TrainerCallback):
            def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
                def broken(*args, **kwargs):
                    raise RuntimeError("half of the weights are written")

                optimizer.optimizer.step = broken

        trainer.add_callback(Fail())
        with pytest.raises(RuntimeError, match="half of the weights"):
            trainer.train()
        with contextlib.suppress(requests.ConnectionError):  # it may have left already
            assert doomed.generate(prompt="a", max_tokens=1).status_code == 503
        assert settle(doomed, 10) == "leaves"
    assert "This server is shutting down" in (tmp_path / "logs" / "vllm.log").read_text()


def test_a_run_that_fails_before_it_writes_leaves_the_server_as_it_was(make_trainer, server):
    trainer = make_trainer()
    with pytest.raises(CheckpointError, match="no checkpoint in no such folder"):
        trainer.train(resume_from_checkpoint="no such folder")
    assert server.generate(prompt="a", max_tokens=1).status_code == 200


@torch.no_grad()
def _score(model, prompt, tokens) -> torch.Tensor:
    ids = torch.tensor([prompt + tokens], device=model.device)
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].cpu()


@torch.no_grad()
def _load(model, values) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(values[name])
