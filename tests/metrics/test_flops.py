"""The operations of training are those that torch counts, and each token of a tree counts once."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    Gemma4TextConfig,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    MambaConfig,
    MistralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
)

from tests.batches.random_trees import chain, paths_of
from tests.rollout_factory import load_policy
from trl_atropos.metrics.flops import AttentionFlops, BatchFlops, flops_per_token, peak_flops

LENGTH = 40


def test_flops_of_forward_pass_are_those_that_torch_counts(tiny_model):
    """Torch leaves out the embedding, and counts all pairs of queries and keys."""
    settings = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(tiny_model, **settings)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.ones(1, LENGTH, dtype=torch.int64))
    counted = counter.get_flop_counts()["Global"]
    (per_pair,) = AttentionFlops.of(model.config).per_pair.values()
    of_attention = counted.pop(torch.ops.aten.bmm)
    assert of_attention == per_pair / 3 * LENGTH**2
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    tied = model.get_input_embeddings().weight is model.lm_head.weight
    size = sum(matrix.numel() for matrix in matrices)
    if not tied:
        size -= model.get_input_embeddings().weight.numel()
    assert sum(counted.values()) == 2 * size * LENGTH
    norms = sum(parameter.numel() for parameter in model.parameters()) - size
    assert flops_per_token(model) == 6 * (size + norms)


def brute_force(rollout, window: int | None) -> int:
    """Pairs of a query and a key that it sees, each query once."""
    seen = {}
    for path in paths_of(rollout):
        for position, place in enumerate(path):
            first = 0 if window is None else max(0, position - window + 1)
            seen[int(place)] = position - first + 1
    return sum(seen.values())


@pytest.mark.parametrize("turns", [1, 5])
def test_token_of_tree_attends_once_to_its_path(turns):
    rollout = chain(turns=turns, visible=4, stripped=3)
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = Qwen3Config(
        hidden_size=32,
        num_hidden_layers=3,
        layer_types=kinds,
        sliding_window=6,
        use_sliding_window=True,
        **sizes,
    )
    of_layer = 6 * 4 * (8 + 8)
    found = AttentionFlops.of(config).of_rollouts([rollout, rollout])
    expected = brute_force(rollout, None) + 2 * brute_force(rollout, 6)
    assert found == 2 * of_layer * expected


def test_windows_are_those_of_configuration():
    assert AttentionFlops.of(MistralConfig(sliding_window=7)).per_pair.keys() == {7}
    assert AttentionFlops.of(MistralConfig(sliding_window=None)).per_pair.keys() == {None}
    assert AttentionFlops.of(Qwen3NextConfig()) is None  # most of its layers have linear attention
    assert AttentionFlops.of(MambaConfig()) is None
    assert AttentionFlops.of(Gemma4TextConfig()) is None  # its layers have heads of two sizes


def test_attention_comes_on_top_of_weights(tiny_model):
    rollout = chain(turns=3, visible=4, stripped=3)
    flops = BatchFlops.of(load_policy(tiny_model)).of_rollouts([rollout])
    assert flops["mfu"] == len(rollout.row) * flops_per_token(load_policy(tiny_model))
    assert flops["mfu_with_attention"] > flops["mfu"]


def test_flops_per_token_are_those_of_weights(tiny_model):
    model = load_policy(tiny_model)
    number = sum(parameter.numel() for parameter in model.parameters())
    assert flops_per_token(model) == 6 * number
    frozen = next(model.parameters())
    frozen.requires_grad_(False)
    try:
        assert flops_per_token(model) == 6 * number - 2 * frozen.numel()
    finally:
        frozen.requires_grad_(True)
    with torch.device("meta"):
        sizes = {
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        }
        experts = [
            Qwen3MoeForCausalLM(
                Qwen3MoeConfig(**sizes, vocab_size=64, num_experts=4, moe_intermediate_size=32)
            ),
            # Its experts are known by the class of their module alone.
            GraniteMoeForCausalLM(GraniteMoeConfig(**sizes, vocab_size=64, num_local_experts=4)),
        ]
    for model in experts:
        assert flops_per_token(model) is None  # a token passes only some
    assert peak_flops(torch.device("cpu")) is None
