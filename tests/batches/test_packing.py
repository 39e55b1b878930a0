"""Rollouts in one row are scored as each of them alone, for every family of models, or the family
is padded."""

import contextlib
import gc
import math
import time
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from transformers import AutoModelForCausalLM, Qwen3Config
from trl import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from benchmarks.models import make_model as write_model
from tests.batches.compiling import compile_by
from tests.batches.exact_attention import attend_to_parts
from tests.rollout_factory import arguments, make_trainer, record, step_logs, uniform_batch
from tests.weights.architectures import FAMILIES, make_model
from trl_atropos import AtroposGRPOConfig, AtroposGRPOTrainer
from trl_atropos.batches import packed_attention, packing, trial
from trl_atropos.batches.compiled_layers import compile_layers, worth_compiling
from trl_atropos.batches.generation_batch import GenerationBatch
from trl_atropos.batches.micro_batches import without_padding
from trl_atropos.batches.packing import Layout
from trl_atropos.batches.sharing import RolloutTokens
from trl_atropos.weights.model_setup import keep_soft_cap, prepare_model

CPU = torch.device("cpu")
# Tokens. Two rollouts side by side are as long; the longest are longer than the window of
# `Ministral`.
PROMPTS, COMPLETIONS = [7, 3, 3, 1, 6], [40, 12, 12, 25, 1]
P, C = max(PROMPTS), max(COMPLETIONS)
LEAKS = "carry something from one rollout"
PADDED = {  # families that cannot be packed, and why
    **dict.fromkeys(
        ("Gemma 2", "GPT-J", "GPT-OSS", "BLOOM", "Mamba", "Mamba 2"), "computed by `eager`"
    ),
    "Falcon": "computed by `sdpa`",  # its own, which cannot be told another
    **dict.fromkeys(("StableLM", "Nemotron"), LEAKS),  # they do not pass the borders on
    **dict.fromkeys(("Qwen3-Next", "Granite 4 (hybrid)", "Granite 4 (hybrid, experts)"), LEAKS),
    **dict.fromkeys(("Nemotron-H", "Zamba 2", "Falcon-H1", "LFM2-MoE"), LEAKS),
    "Llama 4": "2 of 2 layers have a window of 128 tokens in their mask, and pass one of None",
}


class NoTrainer:
    class accelerator:
        autocast = staticmethod(contextlib.nullcontext)


# TRL's own scoring, of which only autocast needs a trainer.
FORWARD = partial(
    GRPOTrainer._get_per_token_logps_and_entropies.__wrapped__, NoTrainer(), compute_entropy=True
)


def load(folder) -> torch.nn.Module:
    """As the trainer has it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    keep_soft_cap(model)
    prepare_model(model, warn=False)
    packed_attention.use_packed_attention(model)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model


@pytest.fixture(scope="module")
def policy(tiny_model):
    return load(tiny_model)


def padded(vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask of rollouts as TRL pads them, (5, P + C)."""
    ids = torch.randint(
        vocabulary, (len(PROMPTS), P + C), generator=torch.Generator().manual_seed(0)
    )
    columns = torch.arange(P + C)
    prompts, completions = torch.tensor(PROMPTS)[:, None], torch.tensor(COMPLETIONS)[:, None]
    mask = ((columns >= P - prompts) & (columns < P + completions)).long()
    return ids * mask, mask


def padded_alike(vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first, second and last rollout begin with the same seven tokens."""
    ids, mask = padded(vocabulary)
    mask[:, :P] = torch.arange(P) >= P - torch.tensor([7, 7, 3, 1, 7])[:, None]
    ids[[1, 4], :P] = ids[0, :P]
    return ids, mask


def tokens_of(ids, mask) -> list[RolloutTokens]:
    """Of padded rollouts, (B, P + C)."""
    prompts = mask[:, :P].sum(1).tolist()
    rows = [row[kept.bool()].cpu().numpy() for row, kept in zip(ids, mask)]
    return [RolloutTokens(prompt, len(row), row) for prompt, row in zip(prompts, rows)]


def lengths_only(prompts, completions) -> list[RolloutTokens]:
    return [RolloutTokens(p, p + c) for p, c in zip(prompts, completions, strict=True)]


def score_all(model, ids, mask, parts, row_format):
    rollouts = tokens_of(ids, mask)
    layouts = [Layout.of(rollouts[part], P, C, row_format) for part in parts]
    return packing.score_all(FORWARD, model, ids, C, parts, layouts)


def row_format_of(model, multiple: int = 1) -> packed_attention.RowFormat:
    return packed_attention.RowFormat.of(model, CPU, None, multiple)


@pytest.mark.parametrize("name", FAMILIES)
def test_family_is_scored_alike_or_padded(name, tmp_path):
    make_model(FAMILIES[name], tmp_path, "float32")
    model = load(tmp_path)
    why = trial.why_padded(model, model, row_format_of(model))
    assert (why is None) == (name not in PADDED), why
    if why is not None:
        assert PADDED[name] in why
        return
    ids, mask = padded(model.config.get_text_config().vocab_size - 1)
    parts = [slice(0, 2), slice(2, 5)]
    scored_as_apart(model, ids, mask, row_format_of(model), parts)
    assert trial.why_unshared(model, model, row_format_of(model)) is None
    ids, mask = padded_alike(model.config.get_text_config().vocab_size - 1)
    scored_as_apart(model, ids, mask, row_format_of(model)._replace(shares=True), [slice(0, 5)])


def scored_as_apart(model, ids, mask, row_format, parts) -> None:
    packed = score_all(model, ids, mask, parts, row_format)
    apart = without_padding(partial(FORWARD, model), ids, mask, C, [slice(0, 4), slice(4, 5)])
    for mine, other in zip(packed[:2], apart[:2], strict=True):
        assert (mine - other).abs().max() <= 1e-5
    model.zero_grad()
    packed[0].sum().backward()
    mine = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    apart[0].sum().backward()
    for one, parameter in zip(mine, model.parameters(), strict=True):
        if one is not None:
            torch.testing.assert_close(one, parameter.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("multiple", [1, 16, 512])  # 512: more than (B, P + C) has
def test_row_holds_tokens_once_and_returns_scores(policy, multiple):
    ids, mask = padded(250)
    seen = []

    def model(**inputs):
        seen.append(inputs)

    def forward(model, input_ids, attention_mask, logits_to_keep):
        model(input_ids=input_ids, attention_mask=attention_mask)
        scored_ids = input_ids * attention_mask
        scores = scored_ids[:, 1:].float()  # of a token where the one before it stands
        return scores, -scores, None

    rollouts = lengths_only(PROMPTS, COMPLETIONS)
    layout = Layout.of(rollouts, P, C, row_format_of(policy, multiple))
    scores, entropies, auxiliary = packing.score_packed(forward, model, ids, C, layout)
    assert torch.equal(scores, (ids * mask)[:, P:].float())
    assert torch.equal(entropies, -scores)
    assert auxiliary is None
    (inputs,) = seen
    lengths = [p + c for p, c in zip(PROMPTS, COMPLETIONS)]
    useful = sum(lengths)
    assert inputs["input_ids"].shape == (1, math.ceil(useful / multiple) * multiple)
    # neighbours of the same length are one batch
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    assert torch.equal(
        inputs["input_ids"][0, :useful], torch.cat([ids[one][mask[one].bool()] for one in order])
    )
    positions = torch.cat([torch.arange(lengths[one]) for one in order])
    assert torch.equal(inputs["position_ids"][0, :useful], positions)
    assert int(inputs["rollout_lengths"][0].sum()) == inputs["input_ids"].size(1)


def test_comment_examples_are_true():
    """Of rollouts `. a | b .` and `c d | e f`, then of `c d | b .` and `c d | e f`."""
    row_format = packed_attention.RowFormat(packed_attention.ATTENTION, CPU, torch.float32)
    rollouts = lengths_only([1, 2], [1, 2])
    packed = Layout.of(rollouts, 2, 2, row_format)
    assert packed.tokens.tolist() == [[1, 2, 4, 5, 6, 7]]
    assert packed.inputs["position_ids"].tolist() == [[0, 1, 0, 1, 2, 3]]
    assert packed.is_scored.tolist() == [[0, 1, 0, 0, 1, 1]]
    assert packed.predicts.tolist() == [0, 3, 4]
    assert packed.columns.tolist() == [0, 2, 3]

    padded = Layout.padded(rollouts, 2, 2, CPU)
    assert padded.tokens.tolist() == [[1, 2, 1, 1], [4, 5, 6, 7]]
    assert padded.is_scored.tolist() == [[0, 1, 0, 0], [0, 0, 1, 1]]
    assert padded.predicts.tolist() == [0, 5, 6]
    assert padded.columns.tolist() == [0, 2, 3]

    c, d, b, e, f = 3, 4, 2, 5, 6
    rows = [np.array([c, d, b]), np.array([c, d, e, f])]
    rollouts = [RolloutTokens(2, len(row), row) for row in rows]
    shared = Layout.of(rollouts, 2, 2, row_format._replace(shares=True))
    assert shared.tokens.tolist() == [[0, 1, 2, 5, 6, 7]]
    assert shared.inputs["position_ids"].tolist() == [[0, 1, 2, 1, 2, 3]]
    assert shared.inputs["rollout_keys"].tolist() == [0, 1, 2, 0, 3, 4, 5]
    assert shared.inputs["rollout_lengths"].tolist() == [[3, 3], [3, 4]]
    assert shared.predicts.tolist() == [1, 3, 4]
    assert packed_attention._mask(2, 4, 2, CPU).int().tolist() == [[[[0, 1, 1, 0], [0, 0, 1, 1]]]]


def four_with_prompts() -> list[RolloutTokens]:
    """Of which all but the third have the same prompt, of four tokens."""
    prompt = [1, 2, 3, 4]
    rows = [[*prompt, 5, 6, 7], [*prompt, 8, 9], [2, 3, 4, 5, 6, 7, 8], [*prompt, 9, 9, 9]]
    prompts = [4, 4, 2, 4]
    return [RolloutTokens(prompt, len(row), np.array(row)) for prompt, row in zip(prompts, rows)]


@pytest.mark.parametrize("multiple", [1, 16])
def test_shared_prompt_stands_once_in_row(policy, multiple):
    """But for its last token, which predicts another one in each of them."""
    row_format = row_format_of(policy, multiple)._replace(shares=True)
    layout = Layout.of(four_with_prompts(), 4, 5, row_format)
    places = torch.arange(4 * 9).view(4, 9)  # into the flattened (B, P + C)
    first, third = places[0, :7], places[2, 2:]
    rest = [places[1, 3:6], places[3, 3:7]]  # the shorter one first
    useful = torch.cat([first, third, *rest])
    assert torch.equal(layout.tokens[0, : len(useful)], useful)
    positions = layout.inputs["position_ids"][0, : len(useful)]
    assert positions.tolist() == [*range(7), *range(7), 3, 4, 5, 3, 4, 5, 6]
    assert layout.inputs["rollout_lengths"][:, :4].tolist() == [[7, 7, 3, 4], [7, 7, 6, 7]]
    shared = range(3)
    keys = [*range(7), *range(7, 14)]
    keys += [*shared, *range(14, 17), *shared, *range(17, 21)]
    assert layout.inputs["rollout_keys"].tolist()[: len(keys)] == keys
    assert len(layout.inputs["rollout_keys"]) == int(layout.inputs["rollout_lengths"][1].sum())
    assert layout.tokens.size(1) == math.ceil(len(useful) / multiple) * multiple


@pytest.mark.parametrize("window", [None, 4])
def test_kernel_gets_keys_of_each_rollout(policy, window, monkeypatch):
    """What `varlen_attn` gets on GPUs, computed here by its definition: queries are at the end of
    their keys."""

    def kernel(
        query, key, value, *, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size, enable_gqa
    ):
        assert max_q == int(cu_seq_q.diff().max())
        assert max_k == int(cu_seq_k.diff().max())
        assert enable_gqa
        attended = []
        for begin, end, first, last in zip(cu_seq_q, cu_seq_q[1:], cu_seq_k, cu_seq_k[1:]):
            distance = torch.arange(last - first - (end - begin), last - first)[
                :, None
            ] - torch.arange(last - first)
            seen = (distance >= 0) & (distance <= (window_size[0] if window else distance))
            q, k, v = (
                query[begin:end],
                key[first:last].repeat_interleave(2, 1),
                value[first:last].repeat_interleave(2, 1),
            )
            scores = (
                (torch.einsum("qhd,khd->hqk", q, k) * scale)
                .masked_fill(~seen, -math.inf)
                .softmax(-1)
            )
            attended.append(torch.einsum("hqk,khd->qhd", scores, v))
        return torch.cat(attended)

    row_format = row_format_of(policy)._replace(shares=True)
    layout = Layout.of(four_with_prompts(), 4, 5, row_format)
    draw = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, layout.tokens.numel(), 8, generator=draw) for heads in (4, 2, 2)
    )
    keys, lengths = layout.inputs["rollout_keys"], layout.inputs["rollout_lengths"]
    options = {"scaling": 0.3, "sliding_window": window}
    layer = policy.model.layers[0].self_attn
    monkeypatch.setattr(layer, "num_key_value_groups", 2)
    apart, _ = packed_attention.attend(
        layer, query, key, value, None, keys, lengths, dropout=0.0, **options
    )
    borders, key_borders = torch.nn.functional.pad(lengths.cumsum(1, dtype=torch.int32), (1, 0))
    options |= {"cu_seq_lens_q": borders, "cu_seq_lens_k": key_borders}
    options |= {"max_length_q": int(lengths[0].max()), "max_length_k": int(lengths[1].max())}
    monkeypatch.setattr(packed_attention, "varlen_attn", kernel)
    at_once, _ = packed_attention.attend(
        layer, query, key, value, None, keys, dropout=0.0, **options
    )
    torch.testing.assert_close(at_once, apart)


@torch.library.custom_op("trl_atropos::tested_attention", mutates_args=())
def kernel_of_parts(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    borders: torch.Tensor,
    key_borders: torch.Tensor,
) -> torch.Tensor:
    """Keeps query, key and value for its backward pass, as the GPU's kernel does."""
    return attend_to_parts(query, key, value, borders, key_borders)


def _gradient_of_parts(context, gradient):
    *states, borders, key_borders = context.saved_tensors
    with torch.enable_grad():
        states = [state.detach().requires_grad_() for state in states]
        attended = attend_to_parts(*states, borders, key_borders)
        return *torch.autograd.grad(attended, states, gradient), None, None


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


kernel_of_parts.register_fake(lambda query, *_: torch.empty_like(query))
kernel_of_parts.register_autograd(_gradient_of_parts, setup_context=_keep)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow(20))])
def test_copied_keys_are_not_kept(compiled, policy, monkeypatch):
    """30 rollouts of one prompt: their keys are ten times as many as the row's tokens."""
    prompt = np.arange(100)
    rollouts = [RolloutTokens(100, 101, np.append(prompt, 100 + n)) for n in range(30)]
    row_format = row_format_of(policy)._replace(shares=True)
    layout = Layout.of(rollouts, 100, 1, row_format)
    lengths, keys = layout.inputs["rollout_lengths"], layout.inputs["rollout_keys"]
    assert len(keys) > 10 * layout.tokens.numel()
    draw = torch.Generator().manual_seed(0)
    states = [
        torch.randn(1, heads, layout.tokens.numel(), 8, generator=draw).requires_grad_()
        for heads in (4, 2, 2)
    ]
    layer = policy.model.layers[0].self_attn
    monkeypatch.setattr(layer, "num_key_value_groups", 2)
    apart, _ = packed_attention.attend(layer, *states, None, keys, lengths, dropout=0.0)
    expected = torch.autograd.grad(apart.square().sum(), states)
    copies = []

    def kernel(query, key, value, *, cu_seq_q, cu_seq_k, **_):
        if not torch.compiler.is_compiling():
            copies.extend([weakref.ref(key), weakref.ref(value)])
        return kernel_of_parts(query, key, value, cu_seq_q, cu_seq_k)

    monkeypatch.setattr(packed_attention, "varlen_attn", kernel)
    borders, key_borders = torch.nn.functional.pad(lengths.cumsum(1, dtype=torch.int32), (1, 0))
    options = {"cu_seq_lens_k": key_borders, "max_length_q": 128, "max_length_k": 128}

    def attend(*states):
        return packed_attention.attend(
            layer, *states, None, keys, cu_seq_lens_q=borders, dropout=0.0, **options
        )[0]

    kept = []
    if compiled:
        with torch.autograd.graph.saved_tensors_hooks(
            lambda saved: kept.append(saved.shape) or saved, lambda saved: saved
        ):
            attended = torch.compile(attend, dynamic=True)(*states)
        assert kept
        as_long = [shape for shape in kept if shape[:1] == keys.shape]
        assert as_long == [keys.shape] * len(as_long)  # the places of the copies, and no copies
    else:
        attended = attend(*states)
        assert [copy() for copy in copies] == [None, None]
    found = torch.autograd.grad(attended.square().sum(), states)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other)


def test_masks_are_made_once_for_all_layers_of_a_row(policy, monkeypatch):
    made = []

    def mask(*arguments):
        made.append(arguments[:3])
        return mask_of_parts(*arguments)

    mask_of_parts = packed_attention._mask
    monkeypatch.setattr(packed_attention, "_mask", mask)
    ids, mask_of_rows = padded_alike(policy.config.vocab_size - 1)
    row_format = row_format_of(policy)._replace(shares=True)
    for rows in (1, 2):  # the same rollouts in a row of its own: nothing of the first one is kept
        score_all(policy, ids, mask_of_rows, [slice(0, 5)], row_format)[0].sum().backward()
        assert len(made) == rows * len(set(made)) > 1
    assert policy.config.num_hidden_layers > 1


def test_shared_prompt_gradient_adds_in_float32(policy):
    """With queries of 0, all keys that a token sees have the same weight."""
    count = 2000
    rollouts = []
    for number in range(count):
        rollouts.append(RolloutTokens(4, 5, np.array([1, 2, 3, 4, 5 + number])))
    row_format = row_format_of(policy)._replace(shares=True)
    layout = Layout.of(rollouts, 4, 1, row_format)
    # three tokens of the prompt, and its last one and a completion of each rollout
    length = layout.tokens.numel()
    assert length == 3 + 2 * count
    query, key, value = (
        torch.zeros(1, heads, length, 8, dtype=torch.bfloat16) for heads in (2, 1, 1)
    )
    value.requires_grad_()
    places = layout.inputs["rollout_keys"], layout.inputs["rollout_lengths"]
    attended, _ = packed_attention.attend(
        policy.model.layers[0].self_attn, query, key, value, None, *places, dropout=0.0
    )
    attended.sum().backward()
    of_each_rollout = 1 / 4 + 1 / 5  # from its two tokens, which see four and five keys
    of_the_prompt = torch.tensor([1 + 1 / 2 + 1 / 3, 1 / 2 + 1 / 3, 1 / 3])
    expected = 2 * (of_the_prompt + count * of_each_rollout)  # two heads of queries
    torch.testing.assert_close(value.grad[0, 0, :3, 0].float(), expected, rtol=1e-2, atol=0)


@pytest.mark.parametrize(
    ("shared", "length"),
    [(0, 9), (1, 9), (2, 20)],  # in common, of all: to share 1 of 40 tokens is not worth it
)
def test_prompts_stay_unshared_without_gain(policy, shared, length):
    row_format = row_format_of(policy)._replace(shares=True)
    rollouts = []
    for number in range(2):
        row = np.arange(length) + 100 * number
        row[:shared] = 0
        rollouts.append(RolloutTokens(3, length, row))
    assert "rollout_keys" not in Layout.of(rollouts, 3, length, row_format).inputs


def test_step_is_equal_with_shared_prompts(tiny_model, tmp_path, monkeypatch):
    # with prompts of 3 to 7 tokens
    groups, steps, tokens = uniform_batch(tiny_model, 4, 8, 0), [], [0, 0]
    trimmed = GenerationBatch._trimmed
    for number, shares in enumerate((True, False)):
        settings = {"per_device_train_batch_size": 16, "max_steps": 2, "share_prompts": shares}
        trainer = make_trainer(tiny_model, tmp_path / str(shares), groups, **settings)

        def counted(*args, number=number):
            micro_batch = trimmed(*args)
            tokens[number] += micro_batch["layout"].tokens.numel()
            return micro_batch

        monkeypatch.setattr(GenerationBatch, "_trimmed", counted)
        trainer.train()
        steps.append(step_logs(trainer))
    assert tokens[0] < 0.85 * tokens[1]
    for name in ("loss", "grad_norm", "entropy"):
        mine, other = ([step[name] for step in one] for one in steps)
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-6)


def test_fully_masked_completions_are_not_scored(policy):
    ids, mask = padded(250)
    mask[1:3, P:] = 0
    scores = score_all(policy, ids, mask, [slice(0, 5)], row_format_of(policy))[0]
    apart = without_padding(partial(FORWARD, policy), ids, mask, C, [slice(0, 5)])[0]
    assert (scores - apart).abs().max() <= 1e-5
    assert not scores[1:3].any()
    none = score_all(policy, ids[1:3], mask[1:3], [slice(0, 2)], row_format_of(policy))[0]
    assert none.shape == (2, C)
    assert not none.any()


def test_16_bit_gpu_model_gets_kernel_borders(policy):
    """What `varlen_attn` takes: the CPU has no such kernel."""
    inputs = (
        row_format_of(policy)
        ._replace(attention="flash_attention_2")
        .inputs(torch.arange(3)[None], torch.tensor([2, 1]).numpy())
    )
    assert inputs["cu_seq_lens_q"].tolist() == inputs["cu_seq_lens_k"].tolist() == [0, 2, 3]
    assert inputs["max_length_q"] == inputs["max_length_k"] == 2
    assert inputs["attention_mask"] is None
    assert inputs["cu_seq_lens_q"].dtype == torch.int32


def test_unpackable_model_is_padded_with_reason(tiny_model, tmp_path, caplog):
    batch = uniform_batch(tiny_model, 4, 4, 0)
    settings = {"per_device_train_batch_size": 16, "max_steps": 1}
    steps = []
    for attention in ("eager", "sdpa"):
        init = {"dtype": "float32", "attn_implementation": attention}
        trainer = make_trainer(
            tiny_model, tmp_path / attention, batch, model_init_kwargs=init, **settings
        )
        trainer.train()
        assert (trainer.computation.packs is None) == (attention == "eager")
        steps.append(step_logs(trainer)[0])
    said = [
        record.getMessage() for record in caplog.records if "padding_free" in record.getMessage()
    ]
    assert len(said) == 1
    assert said[0].endswith("because of this model: its attention is computed by `eager`.")
    assert steps[0]["loss"] == pytest.approx(steps[1]["loss"], rel=1e-4, abs=1e-6)
    assert steps[0]["grad_norm"] == pytest.approx(steps[1]["grad_norm"], rel=1e-4)


def test_layers_are_compiled_only_where_worthwhile():
    from transformers import Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {
        "vocab_size": 250,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    }
    with torch.device("meta"):
        large = Qwen3ForCausalLM(Qwen3Config(**sizes, hidden_size=2048, intermediate_size=6144))
        small = Qwen3ForCausalLM(Qwen3Config(**sizes, hidden_size=64, intermediate_size=64))
        experts = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(**sizes, hidden_size=2048, intermediate_size=6144)
        )
    gpu = torch.device("cuda")
    assert worth_compiling(large, gpu)
    assert not worth_compiling(large, CPU)
    assert not worth_compiling(small, gpu)
    assert not worth_compiling(experts, gpu)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shares", [False, True], ids=["own prompts", "shared prompts"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["Qwen3", "Llama", "Ministral", "GPT-2"])
def test_row_on_gpu_is_scored_like_its_rollouts(name, dtype, compiled, shares, tmp_path):
    make_model(FAMILIES[name], tmp_path, "float32")
    alone, packed = load(tmp_path).cuda(), load(tmp_path).to("cuda", dtype)
    row_format = packed_attention.RowFormat.of(packed, torch.device("cuda"), None, 1)
    assert trial.why_padded(packed, packed, row_format) is None
    if compiled:
        compile_layers(packed)
    assert trial.why_unshared(packed, packed, row_format) is None
    ids, mask = padded_alike(250) if shares else padded(250)
    ids, mask, parts = (
        ids.cuda(),
        mask.cuda(),
        [slice(0, 5)] if shares else [slice(0, 4), slice(4, 5)],
    )
    scores = score_all(packed, ids, mask, parts, row_format._replace(shares=shares))[0]
    apart = without_padding(partial(FORWARD, alone), ids, mask, C, [slice(0, 4), slice(4, 5)])[0]
    rounding = 0.05 if dtype == torch.bfloat16 else 5e-3  # of the embeddings' 250 tokens; TF32
    assert (scores - apart).abs().max() <= rounding
    for each in (scores, apart):
        each.sum().backward()
    for one, other in zip(packed.parameters(), alone.parameters(), strict=True):
        if other.grad is not None:
            scale = other.grad.norm()
            assert (one.grad.float() - other.grad).norm() <= 0.1 * scale


@pytest.mark.slow
def test_compiled_layers_take_same_steps(tiny_model, tmp_path):
    batches = [uniform_batch(tiny_model, 4, 4, seed) for seed in range(3)]
    settings = {
        "per_device_train_batch_size": 16,
        "max_steps": 3,
        "max_tokens_per_micro_batch": 128,
    }
    found = []
    for compiled in (False, True):
        trainer = make_trainer(
            tiny_model, tmp_path / str(compiled), *batches, compile_layers=compiled, **settings
        )
        trainer.train()
        assert all(
            (layer._compiled_call_impl is not None) == compiled
            for layer in trainer.model.model.layers
        )
        found.append([(entry["loss"], entry["grad_norm"]) for entry in step_logs(trainer)])
    assert found[1] == [pytest.approx(step, rel=1e-4, abs=1e-6) for step in found[0]]


def test_compiled_layers_take_numbers_as_constants(tiny_model, monkeypatch):
    """Those that they took as tensors would be on the CPU, on a machine with GPUs, too: torch would
    compile C++ for them."""
    taken = []

    def backend(graph, inputs, **_):
        taken.extend(inputs)
        return graph

    compile_by(backend, monkeypatch)
    model = load(tiny_model)
    with torch._dynamo.config.patch(specialize_float=False):  # torch's default
        compile_layers(model)
        model(input_ids=torch.ones(1, 5, dtype=torch.int64))
    kinds = {value.dtype for value in taken if isinstance(value, torch.Tensor)}
    assert kinds <= {torch.float32, torch.int64, torch.bool}
    assert torch.float32 in kinds


on_a_gpu = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
)


ROWS = {  # lengths of rollouts; torch compiles for the CPU anew below 1,025 tokens and above 4,096
    "cpu": [[900, 200], [1100], [1000, 107], [600] * 2, [2030], [450] * 5, [10] * 140],
    "cuda": [
        [900, 60],
        [1],
        [100, 7],
        [300] * 2,
        [1030] * 2,
        [2600],
        [450] * 10,
        [16] * 400,
        [1500] * 10,
    ],
}


@torch.library.custom_op("trl_atropos::tested_varlen", mutates_args=())
def kernel_of_any_lengths(
    query: torch.Tensor, keys: torch.Tensor, borders: torch.Tensor, most: int, most_keys: int
) -> torch.Tensor:
    return query.clone()


kernel_of_any_lengths.register_fake(lambda query, *_: torch.empty_like(query))
kernel_of_any_lengths.register_autograd(
    lambda context, gradient: (gradient, None, None, None, None)
)


@pytest.mark.parametrize(
    ("device", "width"),
    [
        pytest.param("cpu", 64, marks=pytest.mark.slow(20)),
        pytest.param("cuda", 1024, marks=on_a_gpu),
    ],
)
@pytest.mark.parametrize("adapter", [False, True])
def test_layers_are_compiled_once_for_any_length(device, width, adapter, monkeypatch):
    """On the CPU, with what layers get on a GPU and a kernel in place of the GPU's."""
    from torch._dynamo.utils import counters
    from transformers import Qwen3ForCausalLM

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
    config = Qwen3Config(
        vocab_size=250, hidden_size=width, intermediate_size=96, num_hidden_layers=2, **heads
    )
    config.use_cache = False
    model = Qwen3ForCausalLM(config)
    if adapter:
        inject_adapter_in_model(LoraConfig(target_modules="all-linear"), model)
    model.to(device, torch.bfloat16)
    packed_attention.use_packed_attention(model)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    row_format = packed_attention.RowFormat.of(model, torch.device(device), None, 1)
    if device == "cpu":
        row_format = row_format._replace(attention="flash_attention_2")

        def kernel(query, key, _value, *, cu_seq_q, max_q, max_k, **_):
            return kernel_of_any_lengths(query, key, cu_seq_q, max_q, max_k)

        monkeypatch.setattr(packed_attention, "varlen_attn", kernel)
    compile_layers(model)
    before, compiled = counters["stats"]["unique_graphs"], []
    for lengths in ROWS[device]:
        rollouts = lengths_only([1] * len(lengths), lengths)
        layout = Layout.of(rollouts, 1, max(lengths), row_format)
        layout.inputs["attention_mask"] = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
        ids = torch.ones(len(lengths), 1 + max(lengths), dtype=torch.int64, device=device)
        packing.score_packed(FORWARD, model, ids, max(lengths), layout)[0].sum().backward()
        compiled.append(counters["stats"]["unique_graphs"] - before)
    assert compiled == [1] * len(compiled)
    with torch.no_grad():  # once more for scores alone, and not for each kind of input
        packing.score_packed(FORWARD, model, ids, max(lengths), layout)
    assert counters["stats"]["unique_graphs"] - before == 2


@pytest.mark.parametrize(
    ("params", "rollouts", "longest", "steps", "exact_steps"),
    [
        pytest.param("0.5M", 16, 64, 6, 3, marks=pytest.mark.slow(20)),
        pytest.param("0.44B", 128, 1024, 100, 8, marks=on_a_gpu),
    ],
)
def test_real_sized_steps_differ_by_rounding_alone(
    params, rollouts, longest, steps, exact_steps, tmp_path
):
    """Packed and compiled, as shipped, beside padded and eager. Both may be off by as much as
    bfloat16 makes of the loss, which float32 tells on the first of these steps; so they may differ
    by twice as much."""
    write_model(tmp_path / "model", params, "bfloat16")
    generator = np.random.default_rng(0)

    def sequence(prompt: int = 4) -> dict[str, list]:
        length = min(longest, int(generator.geometric(3 / longest)))
        tokens = generator.integers(0, 256, prompt + length).tolist()
        logprobs = [1.0] * prompt + (-np.log(258) - abs(generator.normal(0, 0.3, length))).tolist()
        return {
            "tokens": tokens,
            "masks": [-100] * prompt + tokens[prompt:],
            "inference_logprobs": logprobs,
        }

    def group(size: int = 8) -> dict[str, list]:
        rows = [sequence() for _ in range(size)]
        return {key: [row[key] for row in rows] for key in rows[0]} | {
            "scores": generator.normal(size=size).tolist()
        }

    recording = record(
        tmp_path / "rollouts.jsonl",
        *([group() for _ in range(rollouts // 8)] for _ in range(steps)),
    )

    def losses(name: str, number: int, dtype: str = "bfloat16", **settings) -> np.ndarray:
        usual = arguments(
            tmp_path / name, replay_paths=[recording], max_steps=number, learning_rate=1e-6
        )
        usual |= {"per_device_train_batch_size": rollouts, "max_completion_length": longest}
        usual |= {"lr_scheduler_type": "constant"}
        usual |= {
            "model_init_kwargs": {"dtype": dtype},
            "vllm_importance_sampling_mode": "token_truncate",
        }
        usual |= {"use_cpu": not torch.cuda.is_available(), "logging_nan_inf_filter": False}
        trainer = AtroposGRPOTrainer(str(tmp_path / "model"), AtroposGRPOConfig(**usual | settings))
        began = time.monotonic()
        trainer.train()
        print(f"{name}: {number} steps in {time.monotonic() - began:.0f} s")
        found = np.array([entry["loss"] for entry in step_logs(trainer)])
        del trainer
        gc.collect()
        torch.cuda.empty_cache()
        return found

    padded = {"padding_free": False, "compile_layers": False}
    exact, plain = (
        losses("float32", exact_steps, "float32", **padded),
        losses("padded", steps, **padded),
    )
    rounding = np.abs(plain[:exact_steps] - exact).max()
    apart = np.abs(losses("shipped", steps) - plain)
    print(
        f"losses of {np.abs(plain).mean():.1e} in the mean; bfloat16 is off by {rounding:.1e} at "
        f"most, packed and padded differ by {apart.max():.1e} at most and {apart.mean():.1e} in "
        "the mean"
    )
    assert apart.max() <= 2 * rounding
