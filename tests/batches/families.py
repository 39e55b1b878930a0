"""A tiny configuration of every causal family that both Transformers and vLLM know, and how it is
trained.

Windows, chunks and numbers of selected keys are smaller than the test's rollouts, and scalings
differ from 1, so that what leaves one out computes something else.
"""

from dataclasses import dataclass, field
from typing import Any

from tests.weights.architectures import (
    BARE_LOSS,
    BASE,
    EXPERTS,
    LATENT,
    MAMBA,
    ROUTED,
    WITH_HEAD_DIM,
)
from tests.weights.architectures import FAMILIES as ATTACHED

WINDOW = 16  # tokens
# Parts of names of parameters that no gradient reaches: of selections, of first states, and of what
# sees images.
WITHOUT_GRADIENT = (
    *("indexer.", "expert_bias", "e_score_correction_bias", "z_L_init"),
    *("vision_tower.", "multi_modal_projector."),
)
OTHER_HEAD = "TRL's fused head computes other log-probabilities"


@dataclass(frozen=True)
class Family:
    """
    Args:
        fields: of the configuration.
        settings: of the trainer, beside the test's own.
        packs: whether its rollouts share a row; why not, `tests/batches/test_packing.py` says.
        refused: why the family is not trained, in the trainer's words, or `None` if it is.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    packs: bool = True
    refused: str | None = None


BARE = BARE_LOSS["settings"]
LATENT_SMALL = {
    **LATENT,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
LINEAR = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
HYBRID = {**WITH_HEAD_DIM, **LINEAR, "layer_types": ["linear_attention", "full_attention"]}
ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
SPARSE = {**LATENT_SMALL, "index_topk": 8, "index_head_dim": 32, "index_n_heads": 16}
RATES = {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}
MULTIPLIED = {
    "embedding_multiplier": 2.0,
    "logits_scaling": 3.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.3,
}

FAMILIES: dict[str, Family] = {
    "afmoe": Family({**WITH_HEAD_DIM, **EXPERTS, **ALTERNATING, "num_shared_experts": 1}),
    "apertus": Family(BASE),
    "arcee": Family(BASE),
    "axk1": Family(LATENT_SMALL),
    "bloom": Family({"hidden_size": 64, "n_layer": 2, "n_head": 4}, packs=False),
    "cohere": Family({**BASE, "logit_scale": 0.3}),
    "cohere2": Family({**BASE, **ALTERNATING, "logit_scale": 0.3}),
    "cohere2_moe": Family({**WITH_HEAD_DIM, **EXPERTS, **ALTERNATING, "logit_scale": 0.3}),
    "cwm": Family({**WITH_HEAD_DIM, **ALTERNATING, "bos_token_id": 1}),
    "dbrx": Family(
        {
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 256,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {
                "ffn_hidden_size": 64,
                "moe_num_experts": 4,
                "moe_top_k": 2,
                "hidden_size": 64,
            },
        }
    ),
    "deepseek_v2": Family(LATENT_SMALL),
    "deepseek_v3": Family(LATENT_SMALL),
    "deepseek_v32": Family(SPARSE, packs=False),
    "deepseek_v4": Family(
        {
            **WITH_HEAD_DIM,
            **ROUTED,
            "sliding_window": WINDOW,
            "index_topk": 4,
            "index_n_heads": 16,
            "compress_rates": RATES,
        },
        BARE,
        packs=False,
    ),
    "dots1": Family({**WITH_HEAD_DIM, **ROUTED}),
    "ernie4_5": Family(WITH_HEAD_DIM),
    "ernie4_5_moe": Family(ATTACHED["ERNIE 4.5 MoE"].fields),
    "exaone4": Family({**WITH_HEAD_DIM, **ALTERNATING}),
    "exaone_moe": Family({**WITH_HEAD_DIM, **EXPERTS, **ALTERNATING}),
    "falcon": Family(ATTACHED["Falcon"].fields, packs=False),
    "falcon_h1": Family(
        {**BASE, **MAMBA, "mamba_d_ssm": 256, "lm_head_multiplier": 0.3}, packs=False
    ),
    "falcon_mamba": Family(
        {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}, packs=False
    ),
    "flex_olmo": Family({**BASE, "num_experts": 4, "num_experts_per_tok": 2}),
    "gemma": Family(WITH_HEAD_DIM),
    "gemma2": Family({**WITH_HEAD_DIM, **ALTERNATING, "final_logit_softcapping": 2.0}, packs=False),
    "gemma3_text": Family({**WITH_HEAD_DIM, **ALTERNATING, "final_logit_softcapping": 2.0}),
    "gemma3n_text": Family(
        {
            **WITH_HEAD_DIM,
            **ALTERNATING,
            "vocab_size_per_layer_input": 259,
            "hidden_size_per_layer_input": 16,
            "laurel_rank": 8,
            "num_kv_shared_layers": 0,
            "activation_sparsity_pattern": [0.0, 0.0],
            "final_logit_softcapping": 2.0,
        }
    ),
    "gemma4_text": Family(
        {
            **WITH_HEAD_DIM,
            **ALTERNATING,
            "vocab_size_per_layer_input": 259,
            "hidden_size_per_layer_input": 16,
            "final_logit_softcapping": 2.0,
        }
    ),
    "glm": Family(WITH_HEAD_DIM),
    "glm4": Family(WITH_HEAD_DIM),
    "glm4_moe": Family({**WITH_HEAD_DIM, **ROUTED}),
    "glm4_moe_lite": Family(LATENT_SMALL),
    "glm_moe_dsa": Family(SPARSE, packs=False),
    "gpt-sw3": Family(GPT2),
    "gpt2": Family(GPT2),
    "gpt_bigcode": Family(GPT2),
    "gpt_neox": Family({**BASE, "num_key_value_heads": 4}),
    "gpt_oss": Family(
        {**WITH_HEAD_DIM, **ALTERNATING, "num_local_experts": 4, "num_experts_per_tok": 2},
        packs=False,
    ),
    "gptj": Family({**GPT2, "rotary_dim": 16}, packs=False),
    "granite": Family({**BASE, **MULTIPLIED}),
    "granite_swa": Family({**BASE, **MULTIPLIED, **ALTERNATING}, packs=False),
    "granitemoe": Family(
        {**BASE, **MULTIPLIED, "num_local_experts": 4, "num_experts_per_tok": 2}, BARE
    ),
    "granitemoe_swa": Family(
        {**BASE, **MULTIPLIED, **ALTERNATING, "num_local_experts": 4, "num_experts_per_tok": 2},
        BARE,
        packs=False,
    ),
    "granitemoehybrid": Family(
        ATTACHED["Granite 4 (hybrid, experts)"].fields | {"logits_scaling": 3.0}, BARE, packs=False
    ),
    "granitemoeshared": Family(
        {
            **BASE,
            **MULTIPLIED,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 64,
        },
        BARE,
    ),
    "hrm_text": Family(WITH_HEAD_DIM),
    "hunyuan_v1_dense": Family(WITH_HEAD_DIM),
    "hunyuan_v1_moe": Family({**WITH_HEAD_DIM, "num_experts": 4, "moe_topk": 2}),
    "hy_v3": Family({**WITH_HEAD_DIM, **EXPERTS}),
    "hy_v4": Family({**SPARSE, "head_dim": 32}, packs=False),
    "hyperclovax": Family({**BASE, **MULTIPLIED}),
    "inkling_text": Family(
        {
            **WITH_HEAD_DIM,
            **ROUTED,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 32,
            "sliding_window_size": WINDOW,
            "d_rel": 8,
            "rel_extent": 64,
        },
        refused=OTHER_HEAD,
    ),
    "jais2": Family(BASE),
    "jamba": Family(
        {
            **BASE,
            "num_experts": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 8,
            "use_mamba_kernels": False,
        },
        packs=False,
    ),
    "kimi_linear": Family(
        {**LATENT_SMALL, "num_local_experts": 4, "linear_head_dim": 16, "linear_num_heads": 4},
        packs=False,
    ),
    "laguna": Family(
        {**WITH_HEAD_DIM, **EXPERTS, **ALTERNATING, "shared_expert_intermediate_size": 64}
    ),
    "lfm2": Family({**BASE, "layer_types": ["conv", "full_attention"]}, packs=False),
    "lfm2_moe": Family(ATTACHED["LFM2-MoE"].fields, packs=False),
    "llama": Family(BASE),
    "llama4_text": Family(
        ATTACHED["Llama 4"].fields | {"attention_chunk_size": WINDOW}, BARE, packs=False
    ),
    "longcat_flash": Family(
        {
            **LATENT_SMALL,
            "num_layers": 1,
            "ffn_hidden_size": 64,
            "head_dim": 16,
            "moe_topk": 2,
            "zero_expert_num": 2,
            "expert_ffn_hidden_size": 32,
        }
    ),
    "mamba": Family({"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}, packs=False),
    "mamba2": Family(ATTACHED["Mamba 2"].fields, packs=False),
    "mellum": Family({**WITH_HEAD_DIM, **EXPERTS, **ALTERNATING}),
    "mimo_v2_flash": Family(
        {**WITH_HEAD_DIM, **ROUTED, **ALTERNATING, "v_head_dim": 16}, packs=False
    ),
    "minicpm3": Family({**LATENT_SMALL, "dim_model_base": 32}),
    "minimax_m2": Family(
        {**WITH_HEAD_DIM, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}
    ),
    "ministral": Family({**WITH_HEAD_DIM, "sliding_window": WINDOW}),
    "ministral3": Family(
        {
            **WITH_HEAD_DIM,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        }
    ),
    "mistral": Family({**BASE, "sliding_window": WINDOW}),
    "mixtral": Family(
        {
            **BASE,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "router_jitter_noise": 0.1,
            "sliding_window": WINDOW,
        }
    ),
    "nemotron": Family(WITH_HEAD_DIM, packs=False),
    "nemotron_h": Family(ATTACHED["Nemotron-H"].fields, packs=False),
    "olmo": Family(BASE),
    "olmo2": Family(BASE),
    "olmo3": Family({**BASE, **ALTERNATING}),
    "olmo_hybrid": Family(
        {**BASE, **LINEAR, "layer_types": ["linear_attention", "full_attention"]}, packs=False
    ),
    "olmoe": Family({**BASE, "num_experts": 4, "num_experts_per_tok": 2}),
    "opt": Family(ATTACHED["OPT"].fields),
    "phi": Family({**BASE, "num_key_value_heads": 4}),
    "phi3": Family({**BASE, "sliding_window": WINDOW}),
    "phimoe": Family(
        {**BASE, "num_local_experts": 4, "num_experts_per_tok": 2, "lm_head_bias": True}, BARE
    ),
    "qwen2": Family(BASE),
    "qwen2_moe": Family({**BASE, **EXPERTS, "shared_expert_intermediate_size": 64}),
    "qwen3": Family(WITH_HEAD_DIM),
    "qwen3_5_moe_text": Family(
        {**HYBRID, **EXPERTS, "shared_expert_intermediate_size": 64}, packs=False
    ),
    "qwen3_5_text": Family(HYBRID, packs=False),
    "qwen3_moe": Family({**WITH_HEAD_DIM, **EXPERTS}),
    "qwen3_next": Family({**HYBRID, **EXPERTS, "shared_expert_intermediate_size": 64}, packs=False),
    "qwen4_exp_text": Family(
        {
            **HYBRID,
            **EXPERTS,
            "shared_expert_intermediate_size": 64,
            "hc_count": 2,
            "hc_lowrank": 8,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 32,
            "indexer_budget": 8,
            "indexer_compress_ratio": 4,
        },
        packs=False,
    ),
    "recurrent_gemma": Family(
        {
            **WITH_HEAD_DIM,
            "num_hidden_layers": 3,
            "num_key_value_heads": 1,
            "lru_width": 128,
            "attention_window_size": WINDOW,
        },
        refused=OTHER_HEAD,
    ),
    "seed_oss": Family(WITH_HEAD_DIM),
    "smollm3": Family(BASE),
    "stablelm": Family(BASE, packs=False),
    "starcoder2": Family({**BASE, "sliding_window": WINDOW}),
    "vaultgemma": Family(
        {**WITH_HEAD_DIM, **ALTERNATING, "final_logit_softcapping": 2.0}, packs=False
    ),
    "zamba2": Family(ATTACHED["Zamba 2"].fields, packs=False),
}

VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
PATCHES = {"image_size": 28, "patch_size": 14}


def with_images(text: str, vision: dict[str, Any] | None, **fields: Any) -> Family:
    """A family of models that see, too, around the text model of another one."""
    parts = {"text_config": FAMILIES[text].fields, "vision_config": vision}
    return Family({**parts, **fields}, packs=FAMILIES[text].packs, settings=FAMILIES[text].settings)


FAMILIES |= {
    "gemma3": Family(
        {
            # With images, Transformers' own head has no cap, and one in the configuration is
            # refused.
            "text_config": FAMILIES["gemma3_text"].fields | {"final_logit_softcapping": None},
            "vision_config": {**VISION, **PATCHES},
            "mm_tokens_per_image": 4,
        }
    ),
    "gemma4": with_images("gemma4_text", None, audio_config=None),
    "gemma4_unified": with_images("gemma4_text", None, audio_config=None),
    "llama4": with_images("llama4_text", {**VISION, **PATCHES, "vision_output_dim": 32}),
    "qwen3_5": with_images("qwen3_5_text", {"depth": 1, "hidden_size": 32, "num_heads": 2}),
    "qwen3_5_moe": with_images("qwen3_5_moe_text", {"depth": 1, "hidden_size": 32, "num_heads": 2}),
    "qwen4_exp": with_images("qwen4_exp_text", {"depth": 1, "hidden_size": 32, "num_heads": 2}),
}
# Known to both, but not in the table, and why.
LEFT_OUT = {
    "gemma3n": "its image tower is one of timm, which is not installed here; `gemma3n_text` is in "
    "the table",
}
