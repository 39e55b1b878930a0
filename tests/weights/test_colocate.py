"""Single-copy weights on a real server: one memory, fenced steps, and a probe that sees when either
breaks."""

import contextlib
import json
import math
import re
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait

import pytest
import requests
import torch
from transformers import TrainerCallback

from tests.server_process import running_server
from tests.tiers import FULL
from tests.weights.faults import settle
from tests.weights.trainers import make_publisher, tolerance
from trl_atropos.errors import AttachError, CheckpointError, ProbeError, ServerError
from trl_atropos.weights.probe_schedule import LONG_EVERY
from trl_atropos.weights.tolerance import Tolerance

pytestmark = pytest.mark.server


def probe(trainer) -> float:
    """Largest difference that one probe sees, in nats."""
    return trainer.policy_publisher.probe()


PUBLISHES = 50 if FULL else 25  # under load


def allowed(trainer) -> float:
    return tolerance(trainer.policy_publisher)


@torch.no_grad()
def disturb(trainer, scale: float = 0.05) -> None:
    """Changes every weight in place, as an optimizer would but without a fence."""
    for parameter in trainer.model.parameters():
        parameter.add_(scale * torch.randn_like(parameter))


class Detach(TrainerCallback):
    """Gives one parameter a memory of its own in mid-run, as a wrapper or a careless `.data =`
    would."""

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == 2:
            weight = model.model.layers[0].mlp.down_proj.weight
            weight.data = weight.data.clone()


def test_trainer_parameters_are_server_memory(make_trainer):
    trainer = make_trainer()
    disturb(trainer)  # nothing is sent, nothing was cached yet
    assert probe(trainer) <= allowed(trainer)


def test_tied_head_stays_tied_to_shared_embedding(make_trainer):
    model = make_trainer().model
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_publishes_under_load_leave_both_sides_equal(make_trainer, server):
    """The probe runs after each, and no client sees an error."""
    trainer = make_trainer(max_steps=PUBLISHES, learning_rate=1e-3)
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
    assert publisher.policy_version == PUBLISHES
    assert 0 < publisher.probe_max_abs_diff <= tolerance(publisher)


def paused_in_midst(server, client, request: dict) -> Future:
    """A request that has sampled some tokens, and that the server's pause keeps from the rest. On a
    busy machine a request may end before it is seen to run, or before the pause: then the next one
    is tried."""
    version = client.info().policy_version
    deadline = time.monotonic() + 60
    pool = ThreadPoolExecutor(1)
    while time.monotonic() < deadline:
        reply = pool.submit(server.generate, **request)
        while not reply.done() and server.metric("num_requests_running") == 0:
            pass
        client.pause()
        _answered, in_flight = wait([reply], timeout=0.5)  # an answer on its way arrives
        if in_flight:
            return reply
        client.resume(version)
    pytest.fail("in 60 s, no request was caught in its midst")


def test_request_across_publish_matches_old_then_new(make_trainer, server):
    """A completion begun before a publish and ended after it has every token scored by the old or
    the new weights."""
    trainer = make_trainer()
    client, model = trainer.policy_publisher.servers.clients[0], trainer.model
    prompt = [64, 65, 66, 28] * 40
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    request = {"prompt": {"prompt_token_ids": prompt}, "max_tokens": 300, "ignore_eos": True}
    in_flight = paused_in_midst(server, client, request)
    disturb(trainer, 0.02)
    version = trainer.policy_publisher.policy_version
    client.resume(version + 1)
    answer = in_flight.result(60)
    assert answer.headers["x-policy-version"] == f"{version}-{version + 1}"
    reply = answer.json()
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


def test_trainer_trains_twice(make_trainer):
    trainer = make_trainer(max_steps=2)
    trainer.train()
    trainer.train()
    assert trainer.policy_publisher.policy_version == 2
    assert 0 < trainer.policy_publisher.probe_max_abs_diff <= allowed(trainer)


def test_server_paused_for_missing_step_resumes(make_trainer, server):
    """The weights are whole: it must not take them for torn when the trainer leaves."""
    publisher = make_trainer().policy_publisher
    publisher.before_step()
    publisher._call.result()
    assert server.control("GET", "/info").json()["paused"]
    publisher.close()
    assert server.generate(prompt="abc=", max_tokens=2).ok


def test_probe_sees_stale_caches(make_trainer):
    trainer = make_trainer()
    publisher = trainer.policy_publisher
    publisher.transfer.clear_cache = False
    assert probe(trainer) <= allowed(trainer)  # fills the cache
    publisher.transfer.pause().result()
    disturb(trainer)
    publisher.transfer.resume(publisher.policy_version)
    with pytest.raises(ProbeError, match="does not sample from the weights"):
        probe(trainer)


def test_probe_passes_with_dropped_caches(make_trainer):
    trainer = make_trainer()
    publisher = trainer.policy_publisher
    assert probe(trainer) <= allowed(trainer)
    publisher.transfer.pause().result()
    disturb(trainer)
    publisher.transfer.resume(publisher.policy_version)
    assert probe(trainer) <= allowed(trainer)


def test_probe_is_judged_only_before_next_publish(make_trainer):
    trainer = make_trainer()
    publisher = trainer.policy_publisher
    assert probe(trainer) <= allowed(trainer)
    (client,) = publisher.servers.clients
    scored = []
    handle = trainer.model.register_forward_pre_hook(
        lambda *_: scored.append(publisher.policy_version)
    )
    try:
        publisher._probe.begin(publisher.policy_version)
        assert publisher._probe.begun and not scored
        publisher._publish(lambda: None)  # of no step: neither weights nor version change
        assert scored and not publisher._probe.begun
        publisher.pop_metrics()

        publisher._probe.begin(publisher.policy_version)
        publisher._probe._samples.result(60)
        with torch.no_grad():  # the weights of another version, which the samples are not of
            disturb(trainer)
        with pytest.raises(ProbeError, match="does not sample from the weights"):
            publisher._publish(lambda: pytest.fail("the step was taken"))
        assert not client.info().paused
    finally:
        handle.remove()


class Wrong:
    """
    Lets the trainer be wrong by `size` nats about the tokens `positions` of the first of the
    sampled rows, in sequences of at least `beyond` tokens, the next `times` that it scores some.
    """

    def __init__(self, trainer, size=5e-4, positions=slice(1, 2), times=math.inf, beyond=0) -> None:
        self.size, self.positions, self.times, self.beyond = size, positions, times, beyond
        self.lengths: list[int] = []  # of the sequences that were scored
        probe = trainer.policy_publisher._probe
        self._score, probe._score = probe._score, self

    def __call__(self, prompt_ids: list[int], tokens: torch.Tensor) -> torch.Tensor:
        """Takes the place of `Probe._score`."""
        logprobs = self._score(prompt_ids, tokens)
        self.lengths.append(len(prompt_ids) + tokens.shape[1])
        if self.times > 0 and self.lengths[-1] >= self.beyond:
            self.times -= 1
            logprobs[0, self.positions] += self.size
        return logprobs


def test_probe_looks_twice_before_blaming_weights(make_trainer, caplog):
    trainer = make_trainer()
    Wrong(trainer, times=1)
    with caplog.at_level("WARNING"):
        difference = probe(trainer)
    assert allowed(trainer) < difference < 10 * allowed(trainer)
    assert trainer.policy_publisher.probe_max_abs_diff == difference  # nothing is hidden
    assert "One in thousands may, where rounding errors are multiplied" in caplog.text


def test_differing_tokens_are_warned_of_at_doublings(make_trainer, caplog):
    trainer = make_trainer()
    wrong = Wrong(trainer, times=0)
    with caplog.at_level("WARNING"):
        for _ in range(5):
            wrong.times = 1
            probe(trainer)
    warnings = [
        record.message for record in caplog.records if "A token of the probe" in record.message
    ]
    counts = [re.search(r"so in (\d) of (\d) probes", warning).groups() for warning in warnings]
    assert counts == [("1", "1"), ("2", "2"), ("4", "4")]
    assert "Try, in this order" in warnings[0]


def test_single_token_differing_twice_stops_run(make_trainer):
    trainer = make_trainer()
    probe(trainer)
    Wrong(trainer, times=2)
    with pytest.raises(ProbeError, match="does not sample from the weights") as caught:
        probe(trainer)
    assert caught.value.result.mean_abs_diff < allowed(trainer) < caught.value.result.max_abs_diff


def test_difference_at_start_blames_implementations(
    make_trainer,
):
    trainer = make_trainer()
    Wrong(trainer, size=0.05, positions=slice(None))
    message = r"max difference \d.\d\de-02.*equal bit for bit: it is vLLM and Transformers that.*Try, in this order"
    with pytest.raises(ProbeError, match=message) as caught:
        trainer.train()
    assert "do not trust rollouts" not in str(caught.value)
    assert trainer.state.global_step == 0


def test_nan_in_trainer_is_named(make_trainer):
    trainer = make_trainer()
    probe(trainer)
    Wrong(trainer, size=math.nan, positions=slice(None))
    with pytest.raises(
        ProbeError, match="The trainer's own model computes NaN: its weights are not finite"
    ):
        probe(trainer)


def test_bounds_tighten_after_first_probe(make_trainer):
    """On a GPU in 16 bits the bounds are wide until the model has shown its own rounding."""
    trainer = make_trainer()
    looks = trainer.policy_publisher._probe
    looks.tolerance = Tolerance.of("cuda", torch.bfloat16)
    probe(trainer)
    assert looks.tolerance == Tolerance(max_abs=0.2, mean_abs=3e-2)
    Wrong(trainer, size=0.16, positions=slice(None))
    with pytest.raises(ProbeError) as caught:
        probe(trainer)
    assert (
        3e-2 < caught.value.result.mean_abs_diff < 0.15 and caught.value.result.max_abs_diff < 0.6
    )


def test_longest_sequences_are_probed_once_at_start(make_trainer, server):
    trainer = make_trainer(max_steps=2)
    scored = Wrong(trainer, times=0).lengths
    trainer.train()
    longest = trainer.policy_publisher.servers.info.max_model_len
    usual = len(trainer.policy_publisher._probe.prompt_ids) + 8
    assert (scored[0], scored[-3:]) == (usual, [longest, usual, usual])
    trainer.train()
    assert scored.count(longest) == 1


class After(TrainerCallback):
    """Calls something at the end of every step."""

    def __init__(self, call):
        self.call = call

    def on_step_end(self, args, state, control, **kwargs):
        self.call()


def test_eighth_probe_sees_fault_in_long_sequences(
    make_trainer,
):
    trainer = make_trainer(max_steps=20)
    wrong = Wrong(trainer, positions=slice(None), times=0, beyond=300)
    trainer.add_callback(After(lambda: setattr(wrong, "times", math.inf)))  # in mid-run
    with pytest.raises(ProbeError, match="the server and the trainer disagree"):
        trainer.train()
    longest = trainer.policy_publisher.servers.info.max_model_len
    usual = len(trainer.policy_publisher._probe.prompt_ids) + 8
    # all lengths up to it, before the first step
    assert wrong.lengths[0] == usual and longest in wrong.lengths
    later = wrong.lengths[wrong.lengths.index(longest) + 1 :]
    assert later == [usual] * (LONG_EVERY - 2) + [longest]
    assert trainer.policy_publisher.policy_version == LONG_EVERY - 1


def test_length_of_first_difference_is_warned_of(make_trainer, caplog):
    trainer = make_trainer(max_steps=1)
    Wrong(trainer, positions=slice(None), beyond=300)
    with caplog.at_level("WARNING"):
        trainer.train()
    (warning,) = [
        record.message for record in caplog.records if "agree on sequences" in record.message
    ]
    agreed, beyond = map(
        int, re.search(r"up to (\d+) tokens, but not from (\d+)", warning).groups()
    )
    assert agreed < 300 <= beyond <= agreed + 32
    assert (
        f"Set `max_sequence_length: {agreed}`" in warning
        and f"`--max-model-len {agreed}`" in warning
    )
    assert trainer.state.global_step == 1


def test_requested_length_with_difference_is_refused(make_trainer):
    trainer = make_trainer(max_sequence_length=400)
    scored = Wrong(trainer, positions=slice(None), beyond=300).lengths
    with pytest.raises(ProbeError, match=r"but not from 3\d\d tokens on \(at most 400 may come\)"):
        trainer.train()
    assert trainer.state.global_step == 0
    assert max(scored) == 400


def test_nan_on_server_is_named(make_trainer, server):
    trainer = make_trainer()
    with torch.no_grad():
        trainer.model.model.norm.weight.fill_(math.nan)
    reply = server.generate(prompt="abc", max_tokens=2)
    assert reply.status_code == 500
    assert reply.json()["error"].startswith("the model computed NaN as a log-probability")
    with pytest.raises(
        ServerError, match=r"while sampling the probe \(HTTP 500\): the model computed NaN"
    ):
        probe(trainer)


def test_first_and_last_publish_are_always_probed(server, make_trainer, tmp_path):
    publisher = make_publisher(server, tmp_path, probe_every_n_steps=1000)
    trainer = make_trainer(publisher, max_steps=3)
    lengths = Wrong(trainer, times=0).lengths
    trainer.train()
    usual = len(publisher._probe.prompt_ids) + 8
    assert [length for length in lengths if length == usual] == [usual] * 2
    assert lengths[-1] == usual


def test_run_with_stale_caches_stops(make_trainer):
    trainer = make_trainer(max_steps=20, learning_rate=1e-2)
    trainer.policy_publisher.transfer.clear_cache = False
    with pytest.raises(ProbeError):
        trainer.train()


def test_probe_sees_detached_trainer_weight(make_trainer):
    trainer = make_trainer()
    layer = trainer.model.model.layers[0].mlp.down_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach() + 0.05 * torch.randn_like(layer.weight))
    with pytest.raises(ProbeError):
        probe(trainer)


def test_lost_parameter_stops_run_and_is_named(make_trainer):
    trainer = make_trainer()
    trainer.add_callback(Detach())
    with pytest.raises(AttachError, match=r"layers\.0\.mlp\.down_proj\.weight"):
        trainer.train()


def test_probe_sees_unpublished_step(make_trainer):
    trainer = make_trainer()
    assert probe(trainer) <= allowed(trainer)
    disturb(trainer)  # a step without its fence: the caches are stale
    with pytest.raises(ProbeError):
        probe(trainer)


def test_probe_sees_undelivered_version(make_trainer):
    trainer = make_trainer()
    trainer.policy_publisher.policy_version += 1
    with pytest.raises(ProbeError, match="policy version"):
        probe(trainer)


@pytest.mark.slow
def test_server_refuses_to_sample_after_failed_step(make_trainer, server_model, tmp_path):
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


def test_run_failing_before_write_spares_server(make_trainer, server, tmp_path):
    trainer = make_trainer()
    checkpoint = tmp_path / "checkpoint-1"
    checkpoint.mkdir()
    (checkpoint / "trainer_state.json").write_text(
        json.dumps({"global_step": 1, "stateful_callbacks": {}})
    )
    (checkpoint / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="cannot be read into this model"):
        trainer.train(resume_from_checkpoint=str(checkpoint))
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
