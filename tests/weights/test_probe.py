"""When the probe runs, how far it looks, and what its first look changes. What it sees on a live
server is in `test_colocate.py`."""

import math
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from tests.rollout_factory import make_trainer, uniform_batch
from trl_atropos.weights.model_setup import num_positions
from trl_atropos.weights.probe import Probe
from trl_atropos.weights.probe_schedule import LEAST_APART, LONG_EVERY, MAX_SHARE, Schedule
from trl_atropos.weights.tolerance import (
    ProbeResult,
    RoundingWarnings,
    Tolerance,
    rounding_limit,
)


def probed(every: int | None, step: float, probe: float, steps: int) -> tuple[list[int], float]:
    """Publishes that are probed in a run whose steps and probes take so many seconds, and the share
    of the probes."""
    schedule, now, found = Schedule(every), 100.0, []
    for publish in range(steps + 1):  # the first one is before the first step
        now += step if publish else 0.0
        if schedule.count_publish(now, last=publish == steps):
            now += probe
            schedule.ran(probe, now)
            found.append(publish)
    return found, probe * (len(found) - 1) / (now - 100.0)  # nobody waits for a step at the first


@pytest.mark.parametrize("step", [0.02, 0.6, 4.5, 30.0])
def test_probes_keep_time_share_but_run_first_and_last(step):
    found, share = probed(None, step, probe=0.107, steps=2000)
    assert (found[0], found[-1]) == (0, 2000)
    last_one = 0.107 / (2000 * step)  # which is run in any case
    assert share <= MAX_SHARE + last_one
    # Nor less often than they may.
    assert len(found) > 2 and (
        share > 0.5 * MAX_SHARE or found[:-1] == list(range(0, 2000, LEAST_APART))
    )


def test_next_probe_waits_for_publishes_and_time():
    schedule = Schedule(None)
    assert schedule.count_publish(0.0, last=False)
    schedule.ran(1.0, 1.0)
    for _ in range(LEAST_APART - 1):
        assert not schedule.count_publish(1.0 + 1.01 / MAX_SHARE, last=False)
    assert not schedule.count_publish(1.0 + 0.99 / MAX_SHARE, last=False)
    assert schedule.count_publish(1.0 + 1.01 / MAX_SHARE, last=False)


def test_fixed_probe_interval_is_kept():
    assert probed(1, step=0.01, probe=0.1, steps=20)[0] == list(range(21))
    assert probed(4, step=0.01, probe=0.1, steps=10)[0] == [0, 4, 8, 10]
    assert probed(0, step=0.01, probe=0.1, steps=10)[0] == []


def test_first_probe_only_tightens_bounds():
    allowed = Tolerance.of("cuda", torch.bfloat16)
    assert allowed.after(ProbeResult(0.07, 0.02)) == Tolerance(max_abs=3 * 0.07, mean_abs=3 * 0.02)
    assert allowed.after(ProbeResult(0.01, 1e-4)) == Tolerance(max_abs=0.2, mean_abs=3e-2)
    assert allowed.after(ProbeResult(0.59, 0.14)) == allowed
    exact = Tolerance.of("cpu", torch.float32)
    assert exact.after(ProbeResult(9e-5, 9e-5)) == exact


def test_16_bit_dtype_widens_bounds():
    assert Tolerance.of("cpu", torch.float32, torch.bfloat16) == Tolerance.of("cpu", torch.bfloat16)
    assert Tolerance.of("cuda", torch.float16).max_abs > Tolerance.of("cuda", torch.float32).max_abs


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        (AutoConfig.for_model("gpt2", n_positions=512), 512),
        (AutoConfig.for_model("llama", max_position_embeddings=512), 512),
        (
            AutoConfig.for_model(
                "llama",
                max_position_embeddings=512,
                rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
            ),
            2048,
        ),
        (
            AutoConfig.for_model(
                "llama",
                max_position_embeddings=512,
                rope_parameters={
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                    "rope_theta": 5e5,
                },
            ),
            512,
        ),
        (
            AutoConfig.for_model(
                "qwen3",
                max_position_embeddings=512,
                rope_parameters={
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 128,
                    "rope_theta": 1e6,
                },
            ),
            512,
        ),
        (AutoConfig.for_model("bloom"), math.inf),
        (AutoConfig.for_model("gemma3", text_config={"max_position_embeddings": 256}), 256),
    ],
    ids=["learned", "rotary", "dynamic", "llama3", "yarn", "alibi", "text of a vision model"],
)
def test_model_positions_are_read_from_config(config, positions):
    assert num_positions(config) == positions


def test_first_publish_of_new_training_is_probed():
    schedule = Schedule(None)
    assert schedule.count_publish(0.0, last=False)
    schedule.ran(1.0, 1.0)
    schedule.publishes = schedule.probed = 0  # as when a training begins
    assert schedule.count_publish(1.5, last=False)
    assert not schedule.count_publish(2.0, last=False)


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("dtypes", "first_mean", "limit"),
    [
        # Twice what was seen of each healthy run, at least. First probe -> later, in nats in the
        # mean:
        ({BF16}, 0.002, 0.1),  # the quickstart on a GPU: 0.005 after 120 steps
        ({BF16}, 0.006, 0.1),  # the arithmetic recipe on the CPU: 0.013 after 150 steps
        ({BF16}, 0.02, 0.2),  # random weights of the 0.6B shape
        ({BF16}, 0.06, 0.3),  # random weights of the 8B shape
        ({BF16}, 0.149, 0.3),  # the most that a first probe may show on a GPU
        ({FP16, FP32}, 0.001, 0.1),
        ({FP32, BF16}, 0.02, 0.2),
        ({FP32}, 1e-5, 5e-3),  # a GPU that multiplies in TF32
        ({FP32}, 1e-3, 1e-2),
        ({FP32}, 2e-3, 2e-2),  # the most that a first probe may show
    ],
)
def test_rounding_limit_is_tenfold_first_probe(dtypes, first_mean, limit):
    assert rounding_limit(dtypes, first_mean) == pytest.approx(limit, rel=1e-12)


def test_mean_of_half_nat_exceeds_any_rounding_limit():
    assert max(rounding_limit({BF16}, first / 1000) for first in range(151)) < 0.45


@pytest.mark.parametrize(
    ("means", "mentioned"),
    [
        ([0.04, 0.05, 0.06], [0.04]),
        ([0.04, 0.05, 0.09, 0.2], [0.04, 0.09, 0.2]),
        ([0.25, 0.24, 0.05, 0.06, 0.2], [0.25, 0.05, 0.2]),  # a large one hides no smaller one
        ([0.25, None, 0.2], [0.25, 0.2]),  # None: a probe within the tolerance
        ([0.04, None, None, 0.04], [0.04, 0.04]),
    ],
)
def test_changed_unusual_difference_is_told_again(means, mentioned):
    warnings, found = RoundingWarnings(), []
    for mean in means:
        if mean is None:
            warnings.agreed()
        elif warnings.is_new(mean):
            found.append(mean)
    assert found == mentioned


def test_eighth_probe_is_long_within_time_share():
    schedule, now, kinds, spent = Schedule(None), 0.0, [], 0.0
    for publish in range(4000):
        now += 1.0
        if schedule.count_publish(now, last=False):
            kinds.append(schedule.long)
            seconds = 5.0 if schedule.long else 0.1
            spent += seconds if publish else 0.0
            now += seconds
            schedule.ran(seconds, now)
    assert kinds[:16] == ([False] * (LONG_EVERY - 1) + [True]) * 2
    assert spent / now <= MAX_SHARE * 1.05


@pytest.mark.parametrize(("runs", "rows"), [(1, 1), (2, 4)], ids=["as in training", "each sample"])
def test_probe_alternates_training_and_trl_scoring(tiny_model, tmp_path, runs, rows):
    batch = uniform_batch(tiny_model, 4, 4, 0)
    trainer = make_trainer(tiny_model, tmp_path, batch, per_device_train_batch_size=16)
    trainer.train()
    seen = []
    trainer.model.model.register_forward_pre_hook(
        lambda module, inputs, options: seen.append(options["input_ids"].size(0)), with_kwargs=True
    )
    prompt = torch.arange(2, 25)
    tokens = torch.arange(30, 62).view(4, 8)
    scored = Probe._score(SimpleNamespace(_trainer=trainer, _runs=runs), prompt.tolist(), tokens)
    assert seen == [rows]
    whole = torch.cat([prompt.expand(4, -1), tokens], dim=1)
    with torch.no_grad():
        logprobs = trainer.model.double()(whole).logits.log_softmax(-1)
    own = logprobs[:, len(prompt) - 1 : -1].gather(2, tokens[..., None])[..., 0]
    torch.testing.assert_close(scored, own, rtol=0, atol=1e-5)
