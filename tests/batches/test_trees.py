"""Episodes that branch are scored and trained as their paths alone."""

import contextlib
import random
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from tests.batches.random_trees import chain, logprobs_alone, padded, paths_of, random_episode
from tests.rollout_factory import make_rollout
from trl_atropos.batches import packed_attention, packing
from trl_atropos.batches.packing import Layout
from trl_atropos.batches.sharing import BatchTokens, RolloutTokens, share_all
from trl_atropos.batches.truncation import completion_metrics, cut_parts, uncut_mask
from trl_atropos.rollouts.rollout import Rollout
from trl_atropos.rollouts.tree import make_tree
from trl_atropos.weights.model_setup import keep_soft_cap, prepare_model

CPU = torch.device("cpu")
END = 249
# TRL's own scoring, of which only autocast needs a trainer.
NO_TRAINER = SimpleNamespace(accelerator=SimpleNamespace(autocast=contextlib.nullcontext))
FORWARD = partial(
    GRPOTrainer._get_per_token_logps_and_entropies.__wrapped__, NO_TRAINER, compute_entropy=True
)
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
MODELS = {
    "heads": {"num_attention_heads": 2, "num_key_value_heads": 2},
    "grouped heads": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "windows": {
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "use_sliding_window": True,
        "sliding_window": 7,
        "layer_types": LAYERS,
    },
}


def make_policy(**settings) -> torch.nn.Module:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        head_dim=16,
        initializer_range=0.2,
        **settings,
    )
    model = Qwen3ForCausalLM(config).train()
    keep_soft_cap(model)
    prepare_model(model, warn=False)
    packed_attention.use_packed_attention(model)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model


def episodes(seed: int) -> list[Rollout]:
    """One to four of a group, which have the same prompt or only its beginning; sometimes two that
    sampled the same."""
    rng = random.Random(seed)
    first = random_episode(rng)
    made = [first]
    prompt = first.prompt_ids.tolist()
    for _ in range(seed % 4):
        begin = prompt if seed % 3 else prompt[:3]
        made.append(random_episode(rng, begin=begin))
    if seed % 5 == 0:
        made.append(first)
    return made


def layouts_of(rollouts: list[Rollout], model) -> dict[str, Layout]:
    _, _, prompt_width, width = padded(rollouts)
    tokens = [RolloutTokens.of(rollout) for rollout in rollouts]
    row_format = packed_attention.RowFormat.of(model, CPU, None, 1)
    shares = row_format._replace(shares=True, multiple=3)
    return {
        "shared": Layout.of(tokens, prompt_width, width, shares),
        "packed": Layout.of(tokens, prompt_width, width, row_format),
        "padded": Layout.padded(tokens, prompt_width, width, CPU, 2),
    }


def gradients(model, loss: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("name", MODELS)
def test_tree_is_scored_like_each_path_alone(name):
    model = make_policy(**MODELS[name])
    for seed in range(24):
        rollouts = episodes(seed)
        ids, _, _, width = padded(rollouts)
        mask = torch.zeros(len(rollouts), width)
        for row, rollout in zip(mask, rollouts):
            row[: len(rollout.mask)] = torch.from_numpy(rollout.mask)
        alone = logprobs_alone(model, rollouts, width)
        weights = torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed)) * mask
        expected = gradients(model, (alone * weights).sum())
        most = max(gradient.abs().max() for gradient in expected)
        for way, layout in layouts_of(rollouts, model).items():
            scores, entropies, _ = packing.score_packed(FORWARD, model, ids, width, layout)
            assert (scores * mask - alone).abs().max() < 1e-5, (seed, way)
            assert ((entropies > 0) >= (mask > 0)).all(), (seed, way)
            found = gradients(model, (scores * weights).sum())
            for mine, other in zip(found, expected, strict=True):
                assert (mine - other).abs().max() <= 1e-5 * most, (seed, way)


def test_row_has_each_common_beginning_once():
    """An agent of 20 turns whose template strips half of what it says."""
    rollout = chain(turns=20, visible=24, stripped=24)
    assert len(rollout.tree) == 20
    assert len(rollout.row) == 20 * 72
    rows = sum(len(path) for path in paths_of(rollout))
    tokens = BatchTokens([rollout], shares=True)
    assert tokens.lengths.tolist() == [20 * 72 + 19]  # each turn repeats one token
    assert BatchTokens([rollout], shares=False).lengths.tolist() == [rows]
    assert tokens.lengths[0] < 0.25 * rows
    assert tokens.added_by(0, 0) == 0


def test_token_of_tree_is_scored_once():
    rng = random.Random(3)
    for _ in range(50):
        rollout = random_episode(rng)
        scored = np.concatenate(
            [path.places[path.scored] for path in RolloutTokens.of(rollout).paths(0)]
        )
        expected = set(range(len(rollout.prompt_ids), len(rollout.row)))
        if rollout.tree is not None:
            expected -= set(rollout.tree.roots.tolist())
        assert sorted(scored.tolist()) == sorted(expected)


def test_unshared_row_without_branches_ignores_ids():
    model = make_policy(**MODELS["heads"])
    row_format = packed_attention.RowFormat.of(model, CPU, None, 4)
    rng = random.Random(0)
    rollouts = [random_episode(rng, parts=0) for _ in range(9)]
    _, _, prompt_width, width = padded(rollouts)
    known = [RolloutTokens.of(rollout) for rollout in rollouts]
    unknown = [tokens._replace(ids=None) for tokens in known]
    layouts = [Layout.of(tokens, prompt_width, width, row_format) for tokens in (known, unknown)]
    for one, other in zip(*layouts):
        if isinstance(one, torch.Tensor):
            assert torch.equal(one, other)
    assert layouts[0].inputs.keys() == layouts[1].inputs.keys()


def test_example_of_sharing_is_true():
    a, b, c, d, e, f = range(1, 7)
    # one of three tokens is worth its copied keys
    sharing = share_all([np.array([c, d, b]), np.array([a]), np.array([c, d, e, f])])
    assert sharing.order.tolist() == [1, 0, 2]
    assert sharing.previous.tolist() == [-1, -1, 0]
    assert sharing.lengths.tolist() == [0, 0, 1]
    long_path = np.arange(100)
    barely = np.append(long_path[:3], 100 + np.arange(97))
    assert share_all([long_path, barely]).lengths.tolist() == [0, 0]


def test_example_of_tree_is_true():
    tree = make_tree([4, 2, 2], [-1, 0, 1], [0, 2, 0])
    assert [path.tolist() for path in tree.paths] == [[0, 1, 2, 3], [0, 1, 4, 5], [6, 7]]
    assert tree.parents.tolist() == [-1, 0, -1]
    assert tree.roots.tolist() == [0, 6]
    assert tree.path_lengths.tolist() == [4, 4, 2]
    assert len(tree.whole_paths) == 3
    chained = make_tree([4, 2, 1], [-1, 0, 1], [0, 2, 2])
    assert chained.parents.tolist() == [-1, 0, 0]
    continued = make_tree([4, 2], [-1, 0], [0, 4])
    assert [path.tolist() for path in continued.whole_paths] == [[0, 1, 2, 3, 4, 5]]
    assert make_tree([4], [-1], [0]) is None
    assert tree.renumbered([2, 0, 1]).parents.tolist() == [-1, -1, 1]


def episode_of_four_calls() -> Rollout:
    """`5 6 | 7 END`, then `5 6 | 8`, which was cut off, then a new context `5 | 9`, from whose end
    another call sampled `END`."""
    row = [5, 6, 7, END, 8, 5, 9, END]
    mask = [True, True, True, False, True, True]
    return make_rollout(
        np.array(row[:2]),
        np.array(row[2:]),
        mask=np.array(mask),
        tree=make_tree([4, 1, 2, 1], [-1, 0, -1, 2], [0, 2, 0, 2]),
    )


def test_cut_calls_of_episode_are_found():
    rollout = episode_of_four_calls()
    assert cut_parts(rollout, [END]).tolist() == [False, True, False, False]
    assert uncut_mask(rollout, [END]).tolist() == [True, True, False, False, True, True]
    metrics = completion_metrics([rollout, random_episode(random.Random(0), parts=0)], [END])
    assert metrics["completions/clipped_ratio"] == 1.0
    assert metrics["completions/max_length"] >= 5
    assert metrics["completions/mean_terminated_length"] == 0.0
