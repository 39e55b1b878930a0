"""`numerics`: a forward pass by other kernels has their values and the ordinary gradients, and what
is refused.

vLLM's own kernels need a GPU: `tests/weights/test_gpu.py` compares those. Here, torch's take their
place.
"""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.utils.import_utils import enable_tf32
from trl.trainer.utils import add_fused_lm_head

from tests.batches import families
from tests.batches.test_packing import FORWARD, lengths_only
from tests.rollout_factory import make_trainer, uniform_batch
from trl_atropos import AtroposGRPOConfig
from trl_atropos.batches import numerics, packed_attention
from trl_atropos.batches.model_checks import Row, check_head
from trl_atropos.batches.numerics import Exact, replaced, use, use_float32_head
from trl_atropos.batches.packed_attention import RowFormat
from trl_atropos.batches.packing import Layout, score_all
from trl_atropos.errors import RecipeError
from trl_atropos.flags import server_flags
from trl_atropos.server.launch import vllm_arguments

CPU = torch.device("cpu")
FAMILIES = {
    "Qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
    "Qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "Llama": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
}
PROMPTS, COMPLETIONS = [3, 4, 2, 1], [30, 5, 17, 33]
P, C = max(PROMPTS), max(COMPLETIONS)


class TorchKernels:
    """What `Kernels` has, by torch. Attention reads keys and values from the pages."""

    def __init__(self, config):
        head_dim = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        frequencies = config.rope_parameters["rope_theta"] ** (
            -torch.arange(0, head_dim, 2) / head_dim
        )
        angles = torch.outer(torch.arange(config.max_position_embeddings).float(), frequencies)
        self.angles = torch.cat([angles.cos(), angles.sin()], dim=-1)

    def linear(self, x, weight, bias):
        return linear(x, weight, bias)

    def norm(self, x, weight, eps):
        return rms_norm(x, weight.shape, weight, eps)

    def rotate(self, positions, query, key):
        cosines, sines = (half.repeat(1, 2) for half in self.angles[positions].chunk(2, dim=-1))
        return apply_rotary_pos_emb(query, key, cosines, sines)

    def gate(self, gate, up):
        return silu(gate) * up

    def attend(self, query, key, value, pages):
        found = []
        for begin, length, table in zip(
            pages.borders.tolist(), pages.lengths.tolist(), pages.table.tolist()
        ):
            kept = [pages.filled(states)[table].flatten(0, 1)[:length] for states in (key, value)]
            parts = (
                states.transpose(0, 1)[None] for states in (query[begin : begin + length], *kept)
            )
            found.append(
                scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)[0].transpose(
                    0, 1
                )
            )
        return torch.cat(found)

    def logprobs(self, logits, tokens):
        return logits.float().log_softmax(-1).gather(1, tokens[:, None])[:, 0]


def make_model(family: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config, model, own = FAMILIES[family]
    shape = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    made = model(config(**shape, **heads, **own)).train()
    packed_attention.use_packed_attention(made)
    add_fused_lm_head(made, outputs=("log_probs", "entropy"))
    return made


def scores(model: torch.nn.Module, packed: bool = True) -> torch.Tensor:
    ids = torch.randint(97, (len(PROMPTS), P + C), generator=torch.Generator().manual_seed(1))
    if packed:
        parts = [slice(0, 2), slice(2, 4)]
        tokens = lengths_only(PROMPTS, COMPLETIONS)
        row_format = RowFormat.of(model, CPU, None, 1)
        layouts = [Layout.of(tokens[part], P, C, row_format) for part in parts]
        return score_all(FORWARD, model, ids, C, parts, layouts)[0]
    return FORWARD(model, ids, torch.ones_like(ids), C)[0]  # all as long, as in the probe


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_forward_pass_and_gradients_match_model(family, packed, checkpointing):
    found = []
    for exact in (False, True):
        model = make_model(family)
        if exact:
            Exact(model, RowFormat.of(model, CPU, None, 1), TorchKernels(model.config)).install()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        logprobs = scores(model, packed)
        (logprobs * torch.linspace(-1, 1, C)).sum().backward()
        found.append((logprobs, [parameter.grad for parameter in model.parameters()]))
    (expected, gradients), (logprobs, own) = found
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)
    for one, other in zip(gradients, own, strict=True):
        torch.testing.assert_close(other, one, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kernel", ["linear", "norm", "rotate", "gate", "attend", "logprobs"])
def test_every_value_comes_from_kernel(kernel, monkeypatch):
    """A kernel that rounds changes the scores as much as if the model rounded there."""
    model = make_model("Qwen3")
    kernels = TorchKernels(model.config)
    Exact(model, RowFormat.of(model, CPU, None, 1), kernels).install()
    before, compute = scores(model), getattr(kernels, kernel)

    def rounded(*arguments):
        result = compute(*arguments)
        parts = [
            part.bfloat16().to(part.dtype) for part in (result if kernel == "rotate" else [result])
        ]
        return parts if kernel == "rotate" else parts[0]

    monkeypatch.setattr(kernels, kernel, rounded)
    after = scores(model)
    assert not torch.equal(after, before)
    torch.testing.assert_close(after, before, atol=0.1, rtol=0)
    if kernel == "logprobs":
        assert torch.equal(after, before.bfloat16().float())


def test_example_of_pages_is_true(monkeypatch):
    monkeypatch.setattr(numerics, "PAGE", 2)
    lengths = torch.tensor([[3, 2], [3, 2]], dtype=torch.int32)
    pages = numerics.Pages(torch.tensor([0, 1, 2, 0, 1]), {"rollout_lengths": lengths})
    assert pages.count == 4
    assert pages.slots.tolist() == [0, 1, 2, 4, 5]
    assert pages.table.tolist() == [[0, 1], [2, 3]]


def test_values_are_replaced_while_gradients_stay():
    ordinary, exact = torch.randn(5, requires_grad=True), torch.randn(5)
    result = replaced(2 * ordinary, exact)
    result.sum().backward()
    assert torch.equal(result, exact) and torch.equal(ordinary.grad, torch.full((5,), 2.0))


@pytest.mark.parametrize("tied", [False, True])
def test_float32_head_rounds_no_logits(tied):
    torch.manual_seed(0)
    shape = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    model = Qwen3ForCausalLM(Qwen3Config(**shape, **heads, tie_word_embeddings=tied))
    model.lm_head.weight.data *= 50  # logits of more than 1, which 16 bits round
    model = model.bfloat16()
    packed_attention.use_packed_attention(model)
    ids = torch.randint(97, (2, 12))
    states = model.model(input_ids=ids).last_hidden_state[:, -9:-1].double()
    logits = states @ model.lm_head.weight.double().t() / 0.7
    expected = logits.log_softmax(-1).gather(2, ids[:, -8:, None])[..., 0].float()
    add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy"))
    rounded, _, _ = FORWARD(model, ids, torch.ones_like(ids), 8)
    use_float32_head(model, 0.7)
    logprobs, entropies, _ = FORWARD(model, ids, torch.ones_like(ids), 8)
    assert (logprobs - expected).abs().max() < 1e-4 < 1e-3 < (rounded - expected).abs().max()
    (logprobs.sum() + entropies.sum()).backward()
    weight = model.lm_head.weight
    assert weight.dtype is weight.grad.dtype is torch.bfloat16 and weight.grad.abs().max() > 0
    assert (model.model.embed_tokens.weight is weight) == tied


# Models that do something to their logits, or to what their head takes, and what that is.
SCALED = {
    "cohere": {"logit_scale": 0.3},
    "falcon_h1": {"lm_head_multiplier": 0.3},
    "gemma2": {"final_logit_softcapping": 2.0},
    "gemma3n_text": {"final_logit_softcapping": 2.0},
    "gemma4_text": {"final_logit_softcapping": 2.0},
    "gptj": {},  # its head has a bias
    "granite": {"logits_scaling": 3.0},
    "granitemoehybrid": {"logits_scaling": 3.0},
    "hyperclovax": {"logits_scaling": 3.0},
    "minicpm3": {"dim_model_base": 32},
    "nanochat": {**families.BASE, "final_logit_softcapping": 2.0},
    "phi": {},  # its head has a bias
    "phimoe": {"lm_head_bias": True},
    "vaultgemma": {"final_logit_softcapping": 2.0},
}
NOT_KNOWN_TO_TRL = {
    "recurrent_gemma": {"logits_soft_cap": 2.0},
    "inkling_text": {"logits_mup_width_multiplier": 3.0},
    "llama": {"logit_scale": 0.3},  # which Llama does not apply
    "xlstm": {
        "hidden_size": 64,
        "num_heads": 2,
        "num_hidden_layers": 2,
        "output_logit_soft_cap": 2.0,
    },
}


def family_with_head(name: str, numerics: str, dtype: torch.dtype) -> tuple[torch.nn.Module, Row]:
    """A model with the head that the trainer gives it, whose logits reach 10 or so."""
    changed = (SCALED | NOT_KNOWN_TO_TRL)[name]
    fields = families.FAMILIES[name].fields if name in families.FAMILIES else {}
    tokens = {"vocab_size": 259, "eos_token_id": 258, "pad_token_id": 257, "bos_token_id": None}
    config = AutoConfig.for_model(name, **{**tokens, **fields, **changed})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
        head = model.get_output_embeddings()
        head.weight *= 3
        if head.bias is not None:
            head.bias += torch.randn_like(head.bias)
    model = model.to(dtype)
    add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy"))
    if numerics == "float32_head":
        use_float32_head(model, 0.7)
    return model, Row(config, 256, CPU, nullcontext, dtype, temperature=0.7)


@pytest.mark.parametrize("numerics", ["default", "float32_head"])
@pytest.mark.parametrize("name", SCALED)
def test_logit_scaling_of_family_applies_in_training(name, numerics):
    model, row = family_with_head(name, numerics, torch.float32)
    with torch.no_grad():
        logits = model.eval()(row.ids, use_cache=False).logits[:, :-1] / 0.7
    expected = logits.log_softmax(-1).gather(-1, row.ids[:, 1:, None])[..., 0]
    scored = row.outputs(model, labels=row.ids, fused_lm_head=True).log_probs
    assert (scored - expected).abs().max() < 1e-4
    check_head(model, row)


@pytest.mark.parametrize("numerics", ["default", "float32_head"])
@pytest.mark.parametrize(
    "name, dtype",
    [
        *((name, torch.float32) for name in NOT_KNOWN_TO_TRL),
        # which fails in 16 bits on a CPU
        *((name, torch.bfloat16) for name in NOT_KNOWN_TO_TRL if name != "xlstm"),
    ],
)
def test_family_with_logits_unlike_trl_is_refused(name, numerics, dtype):
    model, row = family_with_head(name, numerics, dtype)
    with pytest.raises(
        RecipeError, match=f"for models of the family {name} than their own forward"
    ):
        check_head(model, row)


@pytest.mark.parametrize("numerics", ["default", "float32_head"])
@pytest.mark.parametrize("name", ["cohere", "gemma4_text", "phi"])
def test_rounding_to_16_bits_refuses_no_family(name, numerics):
    check_head(*family_with_head(name, numerics, torch.bfloat16))


def test_reference_model_logits_are_checked_too(tiny_model, tmp_path):
    trainer = make_trainer(tiny_model, tmp_path, uniform_batch(tiny_model, 4, 2, 0), beta=0.1)
    trainer.computation.check()
    # as if its configuration had one that the model does not apply
    trainer.ref_model.config.logit_scale = 0.5
    add_fused_lm_head(trainer.ref_model, outputs=("log_probs", "entropy"))
    with pytest.raises(RecipeError, match="for models of the family qwen3 than their own forward"):
        trainer.train()


def settings(**given) -> AtroposGRPOConfig:
    return AtroposGRPOConfig(
        output_dir="run", max_steps=1, use_cpu=True, bf16=False, report_to="none", **given
    )


@pytest.mark.parametrize(
    ("given", "dtype", "sharded", "told"),
    [
        ({"numerics": "bitwise"}, torch.bfloat16, False, "without a Hopper GPU"),
        ({"numerics": "float32_head"}, torch.bfloat16, True, "for a sharded trainer"),
        (
            {"numerics": "float16", "vllm_mode": "server"},
            torch.bfloat16,
            False,
            "only with `dtype: float32`",
        ),
    ],
)
def test_unsupported_model_or_machine_is_refused(given, dtype, sharded, told):
    with pytest.raises(RecipeError, match=told):
        use(settings(**given), make_model("Qwen3").to(dtype), CPU, sharded)


@pytest.fixture
def given_back():
    """Puts torch's settings for the product of matrices back."""
    everywhere = torch.backends.fp32_precision
    of_matrices = torch.backends.cuda.matmul.fp32_precision
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.fp32_precision = everywhere
    torch.backends.cuda.matmul.fp32_precision = of_matrices


def by_default() -> None:
    pass


SET_PRECISION = {
    "ieee": [
        by_default,
        partial(torch.set_float32_matmul_precision, "highest"),
        partial(enable_tf32, False),
    ],
    "tf32": [
        partial(torch.set_float32_matmul_precision, "high"),
        partial(enable_tf32, True),  # which `tf32: true` calls
    ],
}


@pytest.mark.parametrize(
    ("precision", "set_precision"),
    [(name, one) for name, ways in SET_PRECISION.items() for one in ways],
)
def test_precision_is_known_however_it_was_set(precision, set_precision, given_back):
    set_precision()
    cuda = torch.device("cuda")
    assert numerics.float32_precision(cuda) == precision
    assert numerics.float32_precision(torch.device("cpu")) == "ieee"
    assert numerics.is_slow(cuda, torch.float32) is (precision == "ieee")
    assert not numerics.is_slow(cuda, torch.bfloat16)
    assert not numerics.is_slow(torch.device("cpu"), torch.float32)


def test_bitwise_compiles_no_layers():
    assert settings(numerics="bitwise").compile_layers is False


def test_server_flags_follow_numerics():
    assert '{"head_dtype": "float32"}' in vllm_arguments(
        "m", [], cpu=False, numerics="float32_head"
    )
    for cpu in (False, True):  # on the CPU, float32 is the default
        flags = server_flags(vllm_arguments("m", [], cpu=cpu, mode="server", numerics="float16"))
        assert flags["--dtype"] == "float16"
    assert any(
        '"mode": 0' in word for word in vllm_arguments("m", [], cpu=False, numerics="bitwise")
    )
    with pytest.raises(ValueError, match="needs a GPU"):
        vllm_arguments("m", [], cpu=True, numerics="bitwise")
    with pytest.raises(ValueError, match="--dtype bfloat16: this server needs `--dtype float16`"):
        vllm_arguments("m", ["--dtype", "bfloat16"], cpu=False, numerics="float16")
