"""Training on episodes that branch takes the steps that their paths alone would give, for every
loss, and counts each sampled token once."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from tests.batches.random_trees import logprobs_alone, own_places, paths_of, random_episode
from tests.rollout_factory import arguments, end_token, load_policy, make_rollout
from tests.rollouts.trees import Path as SentPath
from tests.rollouts.trees import group_of, item_of, masks_of, permuted, trained_by, whole
from tests.rollouts.trees import random_episode as random_paths
from trl_atropos import (
    AtroposGRPOConfig,
    AtroposGRPOTrainer,
    PolicyPublisher,
    RolloutSource,
    episode,
)
from trl_atropos.batches.truncation import cut_parts
from trl_atropos.config import LOSS_TYPES
from trl_atropos.rollouts.intake import Intake
from trl_atropos.rollouts.rollout import Rollout, group_statistics
from trl_atropos.rollouts.wire import read_group

GROUP_SIZE = 4
BATCH = 8
NOISE = 0.1  # nats between the sampler's log-probabilities and the policy's
Gradients = dict[str, torch.Tensor]

# Of the settings that read what a rollout is: its mask, its length, its end, its sums and means.
SETTINGS: dict[str, dict[str, Any]] = {
    **{f"loss {name}": {"loss_type": name} for name in LOSS_TYPES},
    "ratios of sequences": {"importance_sampling_level": "sequence", "num_iterations": 2},
    "luspo, ratios of sequences": {
        "loss_type": "luspo",
        "importance_sampling_level": "sequence",
    },
    "two iterations": {"num_iterations": 2, "steps_per_generation": 2},
    "token_mask": {"vllm_importance_sampling_mode": "token_mask"},
    "sequence_truncate": {"vllm_importance_sampling_mode": "sequence_truncate"},
    "sequence_mask": {
        "vllm_importance_sampling_mode": "sequence_mask",
        "vllm_importance_sampling_clip_max": 2.0,
    },
    "reference": {"beta": 0.3, "loss_type": "grpo"},
    "entropy bonus": {"entropy_coef": 0.1},
    "high entropy": {"top_entropy_quantile": 0.5},
    "off-policy mask": {"off_policy_mask_threshold": 0.5},
    "truncated masked": {"mask_truncated_completions": True, "loss_type": "grpo"},
    "small micro-batches": {"max_tokens_per_micro_batch": 60},
    "scale batch": {"scale_rewards": "batch"},
    "unshared": {"share_prompts": False},
    "padded": {"padding_free": False},
    "padded in the micro-batches of TRL": {"padding_free": False, "loss_type": "bnpo"},
}


class Given(RolloutSource):
    """Hands out the same batches to every trainer."""

    def __init__(self, batches: Sequence[list[Rollout]]):
        self.batches = iter(batches)

    def start(self, run: Any) -> None:
        pass

    def poll(self, num_rollouts: int, timeout: float) -> list[Rollout]:
        return next(self.batches)


class AloneTrainer(AtroposGRPOTrainer):
    """Scores each path by the model's own forward pass."""

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, **options
    ):
        rollouts = self._batch.own_rollouts
        micro_batch = self._batch.current_micro_batch
        if micro_batch is not None:
            rollouts = [rollouts[number] for number in micro_batch["row_index"].tolist()]
        scores = logprobs_alone(model, rollouts, logits_to_keep, with_entropies=True)
        scores = (*scores, None)
        self._note_scores_of_pass(scores)
        return scores


class Keep(TrainerCallback):
    """Keeps the gradient of each optimizer step."""

    def __init__(self):
        self.steps: list[Gradients] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        gradients = {}
        for name, parameter in model.named_parameters():
            gradients[name] = parameter.grad.detach().clone()
        self.steps.append(gradients)


def train(
    model: Path,
    folder: Path,
    batches: Sequence[list[Rollout]],
    kind: type[AtroposGRPOTrainer] = AtroposGRPOTrainer,
    **settings: Any,
) -> tuple[list[Gradients], AtroposGRPOTrainer]:
    """The gradient of each step, and the trainer. The weights hardly move."""
    usual = arguments(
        folder,
        optim="sgd",
        learning_rate=1e-9,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        per_device_train_batch_size=len(batches[0]),
        max_steps=len(batches),
    )
    usual |= settings
    steps = usual.get("steps_per_generation", 1) * usual.get("num_iterations", 1)
    usual["max_steps"] *= steps
    usual["per_device_train_batch_size"] //= usual.get("steps_per_generation", 1)
    keep = Keep()
    trainer = kind(
        str(model),
        args=AtroposGRPOConfig(**usual),
        rollout_source=Given(batches),
        policy_publisher=PolicyPublisher(),
        callbacks=[keep],
    )
    trainer.train()
    return keep.steps, trainer


def require_equal(found: list[Gradients], expected: list[Gradients], bound: float = 1e-5) -> None:
    """Within `bound` of the largest gradient of each step."""
    assert len(found) == len(expected)
    for step, (mine, other) in enumerate(zip(found, expected)):
        most = max(gradient.abs().max() for gradient in other.values())
        assert most > 0
        for name, gradient in mine.items():
            difference = (gradient - other[name]).abs().max()
            assert difference <= bound * most, (step, name, difference / most)


@cache
def tree_batches(model: Path, count: int, seed: int = 0) -> list[list[Rollout]]:
    """Of two groups each, which the policy has sampled but for some noise."""
    policy = load_policy(model)
    rng = random.Random(seed)
    batches = []
    for number in range(count):
        batch = []
        for group in (2 * number, 2 * number + 1):
            batch += _group(policy, end_token(model), rng, group)
        batches.append(batch)
    return batches


@torch.no_grad()
def _group(policy: Any, end: int, rng: random.Random, group: int) -> list[Rollout]:
    scores = [rng.random() for _ in range(GROUP_SIZE)]
    mean, std = group_statistics(scores)
    prompt = [rng.randrange(250) for _ in range(4)]
    rollouts = []
    for score in scores:
        rollout = random_episode(
            rng,
            begin=prompt,
            end=end,
            group=group,
            score=score,
            group_mean=mean,
            group_std=std,
            staleness=0,
        )
        logprobs = logprobs_alone(policy, [rollout], len(rollout.mask))[0].numpy()
        noise = np.random.default_rng(len(logprobs)).normal(0, NOISE, len(logprobs))
        sampled = np.minimum(logprobs + noise, 0)
        rollout.logprobs = np.where(rollout.mask, sampled, np.nan).astype(np.float32)
        rollouts.append(rollout)
    return rollouts


def rows_of(rollouts: Sequence[Rollout]) -> Iterator[Rollout]:
    """Each path that trains something as a rollout of its own, with its episode's group mean."""
    for rollout in rollouts:
        prompt_length = len(rollout.prompt_ids)
        for part, path in enumerate(paths_of(rollout)):
            own = own_places(rollout, part)
            if not len(own):
                continue
            trained = np.isin(path, own)
            begin = int(trained.argmax())
            end = len(path) - int(trained[::-1].argmax())
            mask = trained[begin:end]
            columns = (
                path[begin:end] - prompt_length
            )  # below 0: of the prompt, which is not trained
            yield replace(
                rollout,
                tree=None,
                prompt_ids=rollout.row[path[:begin]],
                completion_ids=rollout.row[path[begin:end]],
                mask=mask,
                logprobs=chosen(rollout.logprobs, columns, mask, np.nan),
                token_advantages=chosen(rollout.token_advantages, columns, mask, 0.0),
                distill_ids=chosen(rollout.distill_ids, columns, mask, -1),
                distill_logprobs=chosen(rollout.distill_logprobs, columns, mask, np.nan),
            )


def chosen(values: Any, columns: np.ndarray, mask: np.ndarray, untrained: float) -> Any:
    """The values of some columns of a completion; `untrained` where the mask is False."""
    if values is None:
        return None
    found = values[columns].copy()
    found[~mask] = untrained
    return found


def filled_up(rows: list[Rollout], size: int) -> list[Rollout]:
    """With rollouts that train nothing, because each batch of a run has as many."""
    untrained = make_rollout(np.array([1]), np.array([1]), mask=np.array([False]), staleness=0)
    return rows + [untrained] * (size - len(rows))


@pytest.mark.slow
def test_tokens_of_trees_count_once_like_rows(tiny_model, tmp_path):
    """500 episodes in 63 steps, beside their paths as rollouts that do not branch."""
    batches = tree_batches(tiny_model, 63)
    rows = [list(rows_of(batch)) for batch in batches]
    largest = 2 * math.ceil(max(map(len, rows)) / 2)
    found, _ = train(tiny_model, tmp_path / "trees", batches)
    filled = [filled_up(batch, largest) for batch in rows]
    expected, _ = train(tiny_model, tmp_path / "rows", filled)
    require_equal(found, expected)


def taught(rollout: Rollout, number: int) -> Rollout:
    """With an advantage for each token, or a teacher for most of the trained ones."""
    draw = np.random.default_rng(number)
    count = len(rollout.mask)
    if number % 2:
        return replace(rollout, token_advantages=draw.normal(size=count).astype(np.float32))
    ids = draw.integers(0, 250, (count, 3)).astype(np.int32)
    ids[~rollout.mask | (draw.random(count) < 0.3)] = -1
    logprobs = np.where(ids < 0, np.nan, draw.normal(-2, 1, ids.shape)).astype(np.float32)
    return replace(rollout, distill_ids=ids, distill_logprobs=logprobs)


@pytest.mark.parametrize("share_prompts", [True, False])
def test_teacher_and_token_advantages_follow_branches(share_prompts, tiny_model, tmp_path):
    batches = []
    for batch in tree_batches(tiny_model, 2):
        batches.append([taught(rollout, number) for number, rollout in enumerate(batch)])
    rows = [list(rows_of(batch)) for batch in batches]
    largest = 2 * math.ceil(max(map(len, rows)) / 2)
    filled = [filled_up(batch, largest) for batch in rows]
    settings = {"distillation_coef": 0.5, "share_prompts": share_prompts}
    found, _ = train(tiny_model, tmp_path / "trees", batches, **settings)
    expected, _ = train(tiny_model, tmp_path / "rows", filled, **settings)
    require_equal(found, expected)


@pytest.mark.parametrize("name", SETTINGS)
def test_loss_of_trees_is_that_of_their_paths(name, tiny_model, tmp_path, caplog):
    batches = tree_batches(tiny_model, 3)
    settings = SETTINGS[name]
    found, _ = train(tiny_model, tmp_path / "trees", batches, **settings)
    expected, _ = train(tiny_model, tmp_path / "alone", batches, AloneTrainer, **settings)
    require_equal(found, expected)
    warned = [entry for entry in caplog.records if "all calls of an episode" in entry.message]
    assert len(warned) == 2 * ("sequence" in name)  # once for each trainer


def admitted(episodes: Sequence[list[SentPath]], as_rows: bool = False) -> list[Rollout]:
    """One group of these episodes, as it comes from the wire."""
    items = []
    for paths in episodes:
        if not as_rows:
            items.append(item_of(paths))
            continue
        rows = [(row.tokens, masks_of(row), row.logprobs) for row in whole(paths)]
        items.append(episode(rows))
    group = group_of(items)
    return Intake(1000, 1.0, "refuse").admit([read_group(group)])


@pytest.mark.parametrize("as_rows", [False, True])
def test_order_of_branches_does_not_matter(as_rows, tiny_model, tmp_path):
    """As they are sent, or given to `episode` as rows."""
    rng = random.Random(5)
    episodes = []
    while len(episodes) < BATCH:
        paths = random_paths(rng)
        calls_differ = max(trained_by(paths).values(), default=0) == 1
        if len(paths) > 2 and calls_differ:
            episodes.append(paths)
    orders = [episodes, [permuted(rng, paths) for paths in episodes]]
    assert orders[0] != orders[1]
    found = []
    for number, order in enumerate(orders):
        batch = admitted(order, as_rows)
        steps, _ = train(tiny_model, tmp_path / str(number), [batch])
        found.append(steps)
    require_equal(*found, bound=1e-6)


def test_table_and_lengths_know_branches(tiny_model, tmp_path):
    (batch,) = tree_batches(tiny_model, 1)
    _, trainer = train(tiny_model, tmp_path, [batch], log_completions=True)
    texts = list(trainer._logs["completion"])
    for rollout, text in zip(batch, texts, strict=True):
        branches = 0 if rollout.tree is None else len(rollout.tree) - 1
        assert text.count(": leaves ") + text.count(": a new context") == branches
    entry = trainer.state.log_history[0]
    assert entry["completions/max_length"] == max(rollout.mask.sum() for rollout in batch)
    ends = [end_token(tiny_model)]
    cut = np.mean([cut_parts(rollout, ends).any() for rollout in batch])
    assert cut > 0
    assert entry["completions/clipped_ratio"] == pytest.approx(cut)


class CountingTrainer(AtroposGRPOTrainer):
    """Counts the forward passes of the first layer, those of backward passes, too."""

    def train(self, *args, **kwargs):
        self.passes = 0
        self.model.model.layers[0].register_forward_pre_hook(self._count)
        return super().train(*args, **kwargs)

    def _count(self, *_):
        self.passes += torch.is_grad_enabled()


def test_episode_larger_than_micro_batch_is_computed_again(tiny_model, tmp_path, caplog):
    caplog.set_level("INFO", logger="trl_atropos")
    batches = tree_batches(tiny_model, 2)
    large, usual = (
        train(
            tiny_model,
            tmp_path / str(max_tokens),
            batches,
            CountingTrainer,
            max_tokens_per_micro_batch=max_tokens,
        )
        for max_tokens in (20, 10_000)
    )
    require_equal(large[0], usual[0])
    assert usual[1].passes == len(batches)
    rollouts = BATCH * len(batches)  # each in a micro-batch of its own
    branching = sum(rollout.tree is not None for batch in batches for rollout in batch)
    assert rollouts < large[1].passes <= rollouts + branching
    said = [entry for entry in caplog.records if "to save memory" in entry.getMessage()]
    assert len(said) == 1
