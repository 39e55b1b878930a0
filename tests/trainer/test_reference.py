"""The loss and its gradient against the formulas of the papers, written out here without TRL and
without padding.

Each sequence goes alone through a plain forward of the model, in double precision, and only its
trained tokens are looked at. Most runs take two steps on one batch: at the first the policy is the
one that old log-probabilities are of, at the second it has moved, so that ratios, clipping and the
KL term have something to show. A run of one step makes no pass for old log-probabilities.

Formulas: GRPO 2402.03300, DAPO 2503.14476, Dr. GRPO 2503.20783, CISPO 2506.13585, GSPO 2507.18071,
SAPO 2511.20347, LUSPO 2602.05261, VESPO 2602.10693, two-sided clipping 2505.07291; the normalisers
are those that TRL 1.16 documents.
"""

import copy
import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, TrainerCallback

from tests.rollout_factory import (
    Group,
    load_policy,
    make_group,
    make_trainer,
    mixed_batch,
    step_logs,
    uniform_batch,
)
from trl_atropos import AtroposGRPOConfig
from trl_atropos.config import IMPORTANCE_SAMPLING_MODES, LOSS_TYPES

ROWS = 16
# A band that about a third of the ratios, of tokens as of sequences, leaves on either side.
BAND = {"vllm_importance_sampling_clip_min": 0.9, "vllm_importance_sampling_clip_max": 1.1}
MODES = ("off", *IMPORTANCE_SAMPLING_MODES)
ALLOWED = [
    (loss, mode)
    for loss in LOSS_TYPES
    for mode in MODES
    if loss != "vespo" or not mode.startswith("sequence")
]


def covering(pairs: list[tuple], every: int) -> list:
    """One pair in `every` as a test of its own, so that each of either side is in some; the others
    are `full`."""
    firsts, seconds = ([*dict.fromkeys(pair[side] for pair in pairs)] for side in (0, 1))
    return [
        pair
        if (firsts.index(pair[0]) + seconds.index(pair[1])) % every == 0
        else pytest.param(*pair, marks=pytest.mark.full)
        for pair in pairs
    ]


ZERO_FOR_THREE = [{"set_advantage_to_zero": i < 3} for i in range(8)]

BATCHES = {
    "one size": lambda model: uniform_batch(model, 4, 4, 1),
    "sizes 4 and 8"
    "": lambda model: [make_group(model, size, 20 + i) for i, size in enumerate((4, 8, 4))],
    "holes": lambda model: [make_group(model, 8, 30 + i, turns=3) for i in range(2)],
    "token-level advantages"
    "": lambda model: [make_group(model, 8, 40 + i, token_advantages=True) for i in range(2)],
    "advantages of one group": lambda model: [
        make_group(model, 8, 50 + i, turns=2, token_advantages=i == 0) for i in range(2)
    ],
    "some log-probs missing"
    "": lambda model: [make_group(model, 8, 60 + i, logprobs="some") for i in range(2)],
    "no log-probs"
    "": lambda model: [make_group(model, 8, 70 + i, logprobs=("none", "absent")[i]) for i in range(2)],
    "advantages set to zero": lambda model: [
        make_group(model, 8, 80 + i, token_advantages=i == 1, overrides=ZERO_FOR_THREE)
        for i in range(2)
    ],
}  # fmt: skip


# ------------------------------------------------------------------------------------ the reference


@dataclass
class Trained:
    """The `T` trained tokens of one sequence."""

    logp: torch.Tensor  # (T,) under the policy, with gradient
    old: torch.Tensor  # (T,) under the policy that the batch was scored with
    ref: torch.Tensor | None  # (T,) under the reference policy, if there is a KL term
    sampler: torch.Tensor  # (T,) as the environment sent them, NaN = not sent
    advantage: torch.Tensor  # (T,)


def log_probabilities(
    policy: PreTrainedModel, tokens: list[int], at: list[int], temperature: float
) -> torch.Tensor:
    logits = policy(torch.tensor([tokens])).logits[0] / temperature
    return torch.stack([logits[t - 1].log_softmax(-1)[tokens[t]] for t in at])


def advantages(groups: list[Group], scale: str) -> list[list[float]]:
    """One advantage per sequence and group."""
    everyone = torch.tensor(
        [score for group in groups for score in group["scores"]], dtype=torch.float64
    )
    result = []
    for group in groups:
        scores = torch.tensor(group["scores"], dtype=torch.float64)
        by = {"group": scores.std() + 1e-4, "batch": everyone.std() + 1e-4, "none": 1.0}[scale]
        result.append(((scores - scores.mean()) / by).tolist())
    return result


def trained_tokens(
    groups, policy, old_policy, ref_policy, config: AtroposGRPOConfig
) -> list[Trained]:
    sequences = []
    for group, of_group in zip(groups, advantages(groups, config.scale_rewards), strict=True):
        for i, (tokens, mask) in enumerate(zip(group["tokens"], group["masks"])):
            at = [t for t, entry in enumerate(mask) if entry != -100]
            sent = group.get("inference_logprobs", [[1.0] * len(tokens)] * len(group["tokens"]))[i]
            if group.get("overrides", [{}] * len(group["tokens"]))[i].get("set_advantage_to_zero"):
                advantage = [0.0] * len(at)
            elif "advantages" in group:
                advantage = [group["advantages"][i][t] for t in at]
            else:
                advantage = [of_group[i]] * len(at)
            with torch.no_grad():
                old = log_probabilities(old_policy, tokens, at, config.temperature)
                ref = (
                    log_probabilities(ref_policy, tokens, at, config.temperature)
                    if config.beta
                    else None
                )
            logp = log_probabilities(policy, tokens, at, config.temperature)
            sampler = torch.tensor(
                [math.nan if sent[t] > 0 else sent[t] for t in at], dtype=torch.float64
            )
            sequences.append(
                Trained(logp, old, ref, sampler, torch.tensor(advantage, dtype=torch.float64))
            )
    return sequences


def correction(s: Trained, config: AtroposGRPOConfig) -> torch.Tensor:
    """`(T,)` weights for the difference between the sampler and the policy; 1 where the sampler's
    side is unknown."""
    if not config.vllm_importance_sampling_correction:
        return torch.ones_like(s.old)
    level, kind = config.vllm_importance_sampling_mode.split("_")
    difference = (s.old - s.sampler).nan_to_num(nan=0.0)
    ratio = difference.exp() if level == "token" else difference.sum().exp().expand_as(difference)
    low, high = config.vllm_importance_sampling_clip_min, config.vllm_importance_sampling_clip_max
    return (
        ratio.clamp(low, high)
        if kind == "truncate"
        else torch.where((ratio < low) | (ratio > high), 0.0, ratio)
    )


def token_losses(s: Trained, config: AtroposGRPOConfig) -> torch.Tensor:
    """`(T,)` losses of the tokens of one sequence, before they are averaged."""
    log_ratio = s.logp - s.old
    ratio = (
        log_ratio.exp()
        if config.importance_sampling_level == "token"
        else log_ratio.mean().exp().expand_as(log_ratio)
    )
    weight = correction(s, config)
    low = 1 - config.epsilon
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    a = s.advantage
    if config.loss_type == "cispo":
        loss = -weight * ratio.clamp(max=high).detach() * a * s.logp
    elif config.loss_type == "sapo":
        sharpness = torch.where(a > 0, config.sapo_temperature_pos, config.sapo_temperature_neg)
        loss = -weight * torch.sigmoid(sharpness * (ratio - 1)) * 4 / sharpness * a
    elif config.loss_type == "vespo":
        # the correction is part of w
        log_w = log_ratio.sum() + weight.log().clamp(min=math.log(1e-8)).sum()
        log_w = log_w.clamp(math.log(1e-8), 20).detach()
        k = torch.where(a >= 0, config.vespo_k_pos, config.vespo_k_neg)
        lam = torch.where(a >= 0, config.vespo_lambda_pos, config.vespo_lambda_neg)
        loss = -torch.exp(lam + k * log_w - lam * log_w.exp()) * a * s.logp
    else:
        unclipped = ratio if config.delta is None else ratio.clamp(max=config.delta)
        loss = -weight * torch.minimum(unclipped * a, ratio.clamp(low, 1 + high) * a)
    if config.beta:
        kl = (s.ref - s.logp).exp() - (s.ref - s.logp) - 1
        loss = loss + config.beta * (kl * ratio if config.use_bias_correction_kl else kl)
    return loss


def batch_loss(sequences: list[Trained], config: AtroposGRPOConfig) -> torch.Tensor:
    losses = [token_losses(s, config) for s in sequences]
    if config.loss_type in ("grpo", "sapo"):
        return torch.stack([loss.mean() for loss in losses]).mean()
    if config.loss_type == "luspo":
        return torch.stack([loss.sum() for loss in losses]).mean()
    if config.loss_type == "dr_grpo":
        return torch.cat(losses).sum() / (len(losses) * config.max_completion_length)
    return torch.cat(losses).mean()


def loss_and_gradient_norm(groups, policy, old_policy, ref_policy, config) -> tuple[float, float]:
    loss = batch_loss(trained_tokens(groups, policy, old_policy, ref_policy, config), config)
    gradients = torch.autograd.grad(loss, [p for p in policy.parameters() if p.requires_grad])
    return loss.item(), torch.cat([g.flatten() for g in gradients]).norm().item()


# --------------------------------------------------------------------------------------- comparison


class KeepPolicies(TrainerCallback):
    """Keeps the policy as it was before every step, in double precision."""

    def __init__(self):
        self.policies = []

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        policy = load_policy(Path(model.config._name_or_path))
        policy = copy.deepcopy(policy).double()
        policy.load_state_dict(model.state_dict())
        self.policies.append(policy)


def compare(
    model: Path, folder: Path, groups: list[Group], mode: str, steps: int = 2, **settings: Any
) -> None:
    """Checks loss and gradient norm of every step, all on `groups`."""
    on = mode != "off"
    kept = KeepPolicies()
    trainer = make_trainer(
        model,
        folder,
        groups,
        callbacks=[kept],
        **BAND
        | {
            "max_steps": steps,
            "num_iterations": steps,
            "per_device_train_batch_size": ROWS,
            "vllm_importance_sampling_correction": on,
            "vllm_importance_sampling_mode": mode if on else "token_truncate",
        }
        | settings,
    )
    trainer.train()
    first = kept.policies[0]
    for log, policy in zip(step_logs(trainer), kept.policies, strict=True):
        loss, norm = loss_and_gradient_norm(groups, policy, first, first, trainer.args)
        assert log["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-5)
        assert log["grad_norm"] == pytest.approx(norm, rel=1e-5, abs=1e-6)
        assert norm > 1e-4


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize(("loss_type", "mode"), covering(ALLOWED, 3))
def test_losses_with_corrections_equal_formula(tiny_model, tmp_path, loss_type, mode, steps):
    compare(tiny_model, tmp_path, mixed_batch(tiny_model), mode, steps, loss_type=loss_type)


# Of the ways to make one number of a batch: means of sequences, sums of tokens, products over
# sequences. All losses on all kinds of rows at once are above.
@pytest.mark.parametrize(
    ("loss_type", "batch"), covering(list(itertools.product(["grpo", "dapo", "vespo"], BATCHES)), 2)
)
def test_losses_on_kinds_of_batches_equal_formula(tiny_model, tmp_path, loss_type, batch):
    compare(tiny_model, tmp_path, BATCHES[batch](tiny_model), "token_truncate", loss_type=loss_type)


@pytest.mark.parametrize(
    ("loss_type", "unbiased"), covering(list(itertools.product(LOSS_TYPES, [True, False])), 2)
)
def test_kl_term_equals_formula(tiny_model, tmp_path, loss_type, unbiased):
    settings = {"loss_type": loss_type, "beta": 0.3, "use_bias_correction_kl": unbiased}
    compare(tiny_model, tmp_path, mixed_batch(tiny_model), "token_truncate", **settings)


@pytest.mark.parametrize(
    ("loss_type", "mode"),
    [*(("grpo", mode) for mode in MODES), ("luspo", "token_truncate"), ("sapo", "sequence_mask")],
)
def test_sequence_level_ratios_equal_formula(tiny_model, tmp_path, loss_type, mode):
    settings = {
        "loss_type": loss_type,
        "importance_sampling_level": "sequence",
        "learning_rate": 5e-4,
    }
    compare(tiny_model, tmp_path, mixed_batch(tiny_model), mode, **settings)


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_reward_scaling_equals_formula(tiny_model, tmp_path, scale_rewards):
    groups = [make_group(tiny_model, size, 90 + i) for i, size in enumerate((8, 4, 4))]
    compare(tiny_model, tmp_path, groups, "token_truncate", scale_rewards=scale_rewards)


def test_two_sided_clipping_equals_formula(tiny_model, tmp_path):
    settings = {"loss_type": "grpo", "delta": 1.25, "epsilon": 0.1, "epsilon_high": 0.15}
    compare(tiny_model, tmp_path, mixed_batch(tiny_model), "sequence_truncate", **settings)


def test_logprobs_are_at_sampling_temperature(tiny_model, tmp_path):
    compare(tiny_model, tmp_path, mixed_batch(tiny_model), "token_truncate", temperature=0.6)


@pytest.mark.parametrize("loss_type", [name for name in LOSS_TYPES if name != "bnpo"])
def test_accumulation_equals_whole_batch_formula(tiny_model, tmp_path, loss_type):
    """Not so for bnpo, which divides by the tokens of each micro-batch."""
    accumulated = {
        "per_device_train_batch_size": ROWS // 4,
        "gradient_accumulation_steps": 4,
        "num_iterations": 1,
    }
    compare(
        tiny_model,
        tmp_path,
        mixed_batch(tiny_model),
        "token_mask",
        steps=1,
        loss_type=loss_type,
        **accumulated,
    )


# ------------------------------------------------------------- the comparison can tell things apart


def test_mixed_batch_exercises_whole_formula(tiny_model):
    policy = copy.deepcopy(load_policy(tiny_model)).double()
    config = AtroposGRPOConfig(
        output_dir="unused", max_steps=1, use_cpu=True, per_device_train_batch_size=ROWS, **BAND
    )
    sequences = trained_tokens(mixed_batch(tiny_model), policy, policy, policy, config)
    known = torch.cat([s.old - s.sampler for s in sequences])
    unknown = known.isnan().double().mean()
    assert 0.1 < unknown < 0.5
    for ratio in (
        known[~known.isnan()].exp(),
        torch.stack([(s.old - s.sampler).nansum().exp() for s in sequences]),
    ):
        inside = (ratio > 0.9) & (ratio < 1.1)
        assert (ratio > 1.1).any() and (ratio < 0.9).any() and inside.any()
    assert any(s.advantage.unique().numel() > 1 for s in sequences)


def test_second_step_clips_on_both_sides(tiny_model, tmp_path):
    trainer = make_trainer(
        tiny_model,
        tmp_path,
        mixed_batch(tiny_model),
        max_steps=2,
        num_iterations=2,
        per_device_train_batch_size=ROWS,
    )
    trainer.train()
    second = step_logs(trainer)[1]
    assert second["clip_ratio/low_mean"] > 0.01
    assert second["clip_ratio/high_mean"] > 0.01
    assert second["clip_ratio/region_mean"] < 0.9
