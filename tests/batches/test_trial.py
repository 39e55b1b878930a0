"""Before training, a model is tried: rollouts share a row only if each is computed as the model
computes it alone."""

import itertools
import math
from functools import partial

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, masking_utils, modeling_utils
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.batches.test_packing import LEAKS, lengths_only, row_format_of
from tests.rollout_factory import make_trainer, step_logs, uniform_batch
from tests.weights.architectures import (
    BASE,
    EXPERTS,
    FAMILIES,
    LATENT,
    MAMBA,
    WITH_HEAD_DIM,
    Family,
    change,
    make_model,
)
from trl_atropos.batches import packed_attention, packing, trial
from trl_atropos.errors import RecipeError
from trl_atropos.weights.model_setup import prepare_model

QWEN2_MOE = {**BASE, **EXPERTS, "shared_expert_intermediate_size": 64, "use_sliding_window": True}
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
PACKED = {  # with windows that rollouts of a trial are longer than, and one that they are not
    "Qwen2": Family(
        "qwen2", {**BASE, "use_sliding_window": True, "sliding_window": 48, "max_window_layers": 1}
    ),
    "Mistral": Family("mistral", {**BASE, "sliding_window": 16}),
    "Mistral, window of 4096": Family("mistral", {**BASE, "sliding_window": 4096}),
    "Mixtral": Family("mixtral", {**BASE, **MIXTRAL, "sliding_window": 16}),
    "Phi-3": Family("phi3", {**BASE, "sliding_window": 16}),
    "StarCoder 2": Family("starcoder2", {**BASE, "sliding_window": 16}),
    "Gemma 3": Family(
        "gemma3_text", {**WITH_HEAD_DIM, "query_pre_attn_scalar": 32, "sliding_window": 16}
    ),
    "Ministral 3": Family("ministral3", WITH_HEAD_DIM),  # scales queries by their position
    "OPT": FAMILIES["OPT"],  # positions begin at 2
    "BioGPT": Family("biogpt", BASE),
}
REFUSED = {
    "RecurrentGemma": (
        Family("recurrent_gemma", {**WITH_HEAD_DIM, "num_hidden_layers": 3, "lru_width": 128}),
        LEAKS,
    ),
    "Bamba": (Family("bamba", {**BASE, **MAMBA, "attn_layer_indices": [1]}), LEAKS),
    "MiniMax": (Family("minimax", {**WITH_HEAD_DIM, **MIXTRAL, "block_size": 16}), LEAKS),
    "LFM2": (Family("lfm2", {**BASE, "layer_types": ["conv", "full_attention"]}), LEAKS),
    "Falcon-H1": (FAMILIES["Falcon-H1"], LEAKS),
    "Qwen2-MoE, window of 48": (
        Family("qwen2_moe", {**QWEN2_MOE, "sliding_window": 48, "max_window_layers": 2}),
        "1 of 2 layers have a window of 48 tokens in their mask, and pass one of None",
    ),
    "Qwen2-MoE, window of 4096": (
        Family("qwen2_moe", {**QWEN2_MOE, "sliding_window": 4096, "max_window_layers": 2}),
        "1 of 2 layers have a window of 4096 tokens in their mask, and pass one of None",
    ),
    "Llama 4, chunks of 8192": (
        Family("llama4_text", FAMILIES["Llama 4"].fields | {"attention_chunk_size": 8192}),
        "2 of 2 layers have a window of 8192 tokens in their mask, and pass one of None",
    ),
    "Llama 4 without chunks": (
        Family("llama4_text", FAMILIES["Llama 4"].fields | {"layer_types": ["full_attention"] * 2}),
        "scales attention by a token's place in the row",  # from 8192 tokens on
    ),
    "DeepSeek-V3.2": (
        Family(
            "deepseek_v32", {**LATENT, "index_topk": 16, "index_head_dim": 64, "index_n_heads": 2}
        ),
        "change the mask of their attention",  # not where attention has another name than `sdpa`
    ),
}


def made(family: Family, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """A tiny model with random weights, as the trainer has it."""
    torch.manual_seed(0)
    ids = {"vocab_size": 300, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family.model_type, **ids | family.fields)
    )
    change(dict(model.named_parameters()), seed=1, scale=0.05 if dtype is torch.float32 else 0.02)
    prepare_model(model.to(dtype).train(), warn=False)
    packed_attention.use_packed_attention(model)
    return model


def why_padded(model: torch.nn.Module) -> str | None:
    return trial.why_padded(model, model, row_format_of(model))


def own(model: torch.nn.Module, rollout: torch.Tensor) -> torch.Tensor:
    """(T - 1,), by nothing but Transformers."""
    packed_attention.use_own_attention(model)
    logprobs = model(rollout[None], use_cache=False).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, rollout[1:, None])[:, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", REFUSED)
def test_unpackable_family_is_refused(name, dtype):
    family, reason = REFUSED[name]
    assert reason in why_padded(made(family, dtype))


def test_rows_that_share_differ_in_tokens_alone(monkeypatch):
    """On GPUs, another order would round otherwise, and look like a leak."""
    shapes = []
    layout_of = packing.Layout.of

    def recorded(*args):
        layout = layout_of(*args)
        shapes.append(layout.inputs["rollout_lengths"].tolist())
        return layout

    monkeypatch.setattr(trial.Layout, "of", recorded)
    model = made(FAMILIES["Qwen3"])
    assert trial.why_unshared(model, model, row_format_of(model)) is None
    assert len(shapes) == 1 + len(trial.TRIED)
    assert all(shape == shapes[0] for shape in shapes)


@pytest.mark.parametrize("name", PACKED)
def test_packed_rollouts_are_scored_as_alone(name):
    model = made(PACKED[name])
    assert why_padded(model) is None
    assert trial.why_unshared(model, model, row_format_of(model)) is None
    rollouts = torch.randint(2, 300, (224,), generator=torch.Generator().manual_seed(0)).split(
        [60, 7, 90, 7, 60]
    )
    completions = [len(rollout) - 1 for rollout in rollouts]
    tokens = lengths_only([1] * 5, completions)
    layout = packing.Layout.of(tokens, 1, max(completions), row_format_of(model))
    ids = torch.nn.utils.rnn.pad_sequence(rollouts, batch_first=True)

    def forward(packed_model, input_ids, attention_mask, logits_to_keep):
        logits = packed_model(input_ids, attention_mask, use_cache=False).logits[:, :-1]
        logprobs = logits.log_softmax(-1)
        return logprobs.gather(2, input_ids[:, 1:, None])[..., 0], None, None

    with torch.no_grad():
        scored = packing.score_packed(forward, model, ids, max(completions), layout)[0]
        for row, length, rollout in zip(scored, completions, rollouts, strict=True):
            torch.testing.assert_close(row[:length], own(model, rollout), rtol=0, atol=2e-5)


SIZE = 0.02  # of a leak, where states are around 1


def moved(states: torch.Tensor, places: int) -> torch.Tensor:
    """States that many places to the right, and zeros where none came from."""
    rolled = states.roll(places, dims=1)
    rolled[:, 0 if places > 0 else -1] = 0
    return rolled


LEAKY = {  # what a layer adds to its output, and how the trial calls it
    "the sum of what stands before": (lambda states: states.cumsum(1), LEAKS),
    "the sum of what comes behind": (lambda states: states.flip(1).cumsum(1).flip(1), LEAKS),
    "the mean of the row": (lambda states: states.mean(1, keepdim=True).expand_as(states), LEAKS),
    "the token before": (lambda states: moved(states, 1), LEAKS),
    "the token behind": (lambda states: moved(states, -1), LEAKS),
    "the place in the row": (
        lambda states: (
            torch.arange(states.size(1))[:, None] * torch.linspace(-1, 1, states.size(2)).to(states)
        ),
        "not computed as it is alone",
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["Qwen3", "Qwen3-MoE"])
@pytest.mark.parametrize("leak", LEAKY)
def test_leaking_layer_is_refused(leak, family, dtype):
    added, reason = LEAKY[leak]
    model = made(FAMILIES[family], dtype)
    assert why_padded(model) is None
    # experts in 16 bits may round by as much as the smaller
    size = SIZE if dtype is torch.float32 else 50 * SIZE
    model.model.layers[0].register_forward_hook(
        lambda module, inputs, states: states + size * added(states)
    )
    assert reason in why_padded(model)


@pytest.mark.parametrize("lengths", itertools.permutations((5, 17, 24)))
def test_verdict_is_independent_of_rollout_order(lengths, monkeypatch):
    monkeypatch.setattr(trial, "TRIED", lengths)
    model = made(FAMILIES["Qwen3"])
    assert why_padded(model) is None
    added, reason = LEAKY["the sum of what stands before"]
    model.model.layers[0].register_forward_hook(
        lambda module, inputs, states: states + SIZE * added(states)
    )
    assert reason in why_padded(model)


def test_leak_into_shared_prompt_is_found():
    """What `why_padded` cannot see: here a layer treats tokens in another way where keys are
    shared."""
    model = made(FAMILIES["Qwen3"])
    attention = model.model.layers[0].self_attn
    whole = attention.forward

    def leaky(*args, rollout_keys=None, **options):
        states, weights = whole(*args, rollout_keys=rollout_keys, **options)
        return (
            states if rollout_keys is None else states + SIZE * states.mean(1, keepdim=True)
        ), weights

    attention.forward = leaky
    assert why_padded(model) is None
    assert LEAKS in trial.why_unshared(model, model, row_format_of(model))
    attention.forward = lambda *args, rollout_keys=None, **options: (
        whole(*args, rollout_keys=rollout_keys, **options)[0]
        * (1 if rollout_keys is None else 1 + SIZE),
        None,
    )
    assert "not computed as it is alone" in trial.why_unshared(model, model, row_format_of(model))


def test_trial_restores_model_and_transformers():
    model = made(FAMILIES["Qwen3"])
    registries = (
        modeling_utils.ALL_ATTENTION_FUNCTIONS,
        masking_utils.ALL_MASK_ATTENTION_FUNCTIONS,
    )
    before = [dict(registry) for registry in registries]
    for error in (None, ZeroDivisionError("one")):
        if error is not None:
            model.model.layers[0].register_forward_pre_hook(lambda *_: 1 / 0)
        why = why_padded(model)
        assert (why is None) == (error is None) and (
            "ZeroDivisionError" in (why or "ZeroDivisionError")
        )
        assert [dict(registry) for registry in registries] == before
        assert model.config._attn_implementation == packed_attention.ATTENTION


def test_refused_model_is_padded_with_own_attention(tiny_model, tmp_path, caplog):
    trainer = make_trainer(
        tiny_model, tmp_path, uniform_batch(tiny_model, 4, 4, 0), per_device_train_batch_size=16
    )
    layer = trainer.model.model.layers[0]
    layer.register_forward_hook(lambda module, inputs, states: states + SIZE * states.cumsum(1))
    trainer.train()
    assert trainer.computation.packs is None
    assert trainer.model.config._attn_implementation == "sdpa"
    assert LEAKS in caplog.text
    assert math.isfinite(step_logs(trainer)[0]["loss"])


def test_reference_model_is_tried_too(tiny_model, tmp_path, caplog):
    batch = uniform_batch(tiny_model, 4, 4, 0)
    trainer = make_trainer(tiny_model, tmp_path, batch, per_device_train_batch_size=16, beta=0.1)
    trainer.ref_model.set_attn_implementation("eager")
    trainer.train()
    assert trainer.computation.packs is None
    assert "computed by `eager`" in caplog.text


# ----------------------------------------------------------------------- lengths that change others

ROPE = {"rope_theta": 1e4}
LONG = ROPE | {"rope_type": "longrope", "original_max_position_embeddings": 64}
LONG |= {"short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
STRETCHED = {"dynamic": {"factor": 4.0}, "longrope": LONG, "linear": {"factor": 4.0}}
STRETCHED |= {"yarn": {"factor": 4.0}, "proportional": {"factor": 4.0}}
STRETCHED |= {"llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}}
ORIGINAL = {"original_max_position_embeddings": 64}


def with_rope(kind: str) -> torch.nn.Module:
    rope = ROPE | {"rope_type": kind} | ({} if kind == "dynamic" else ORIGINAL) | STRETCHED[kind]
    positions = 64 if kind == "dynamic" else 256
    return made(
        Family("llama", BASE | {"rope_parameters": rope, "max_position_embeddings": positions})
    )


def logprobs_of(model, ids, mask) -> torch.Tensor:
    return model(input_ids=ids, attention_mask=mask, use_cache=False).logits.log_softmax(-1)


@pytest.mark.parametrize("kind", sorted(ROPE_INIT_FUNCTIONS))
def test_length_limit_is_known_for_every_rope_kind(kind):
    """All that Transformers has: one that is new there is missing in `STRETCHED`."""
    model = with_rope(kind)
    limit = trial.longest_alike(model.config)
    assert limit == (64 if kind in ("dynamic", "longrope") else math.inf)
    ids = torch.randint(2, 300, (2, 200), generator=torch.Generator().manual_seed(0))

    def short(longest: int) -> torch.Tensor:
        """Of the first 40 tokens, beside a rollout of another length; padded on the right, as the
        trainer does."""
        mask = torch.arange(longest) < torch.tensor([[40], [longest]])
        return logprobs_of(model, ids[:, :longest], mask.long())[0, :40]

    with torch.no_grad():
        alone = logprobs_of(model, ids[:1, :40], None)[0]
        torch.testing.assert_close(short(64), alone, rtol=0, atol=2e-5)
        changed = (short(65) - alone).abs().max()
    assert (changed > 1e-3) == math.isfinite(limit)


@pytest.mark.parametrize(
    ("kind", "fields", "limit"),
    [
        ("phi3", {"rope_parameters": LONG | {"partial_rotary_factor": 1.0}}, 64),
        ("gpt2", {}, math.inf),
        ("bloom", {}, math.inf),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": LONG, "sliding_attention": ROPE}},
            64,
        ),
    ],
)
def test_length_limit_is_found_in_config(kind, fields, limit):
    config = AutoConfig.for_model(kind)
    for name, value in fields.items():
        setattr(config, name, value)
    assert trial.longest_alike(config) == limit


@pytest.mark.parametrize("padding_free", [True, False])
def test_rollouts_beyond_length_limit_are_refused(tmp_path, padding_free):
    rope = LONG | {"partial_rotary_factor": 1.0}
    folder = tmp_path / "model"
    make_model(Family("phi3", BASE | ORIGINAL | {"rope_parameters": rope}), folder)
    batch = uniform_batch(folder, 4, 4, 0)
    make = partial(
        make_trainer,
        folder,
        tmp_path,
        batch,
        padding_free=padding_free,
        per_device_train_batch_size=16,
    )
    with pytest.raises(
        RecipeError,
        match=r"may have 256 tokens.* more than 64 changes .*Set `max_sequence_length: 64`",
    ):
        make()
    with pytest.raises(RecipeError, match="may have 65 tokens"):
        make(max_sequence_length=65)
    assert make(max_sequence_length=64).rollout_source is not None
