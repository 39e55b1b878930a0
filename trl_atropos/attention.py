"""Which of transformers' implementations of attention compute what a model says, as vLLM does."""

import logging

from transformers import PretrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)


def drops_soft_cap(config: PretrainedConfig, implementation: str) -> bool:
    """Whether the model caps its attention scores (Gemma 2) and torch's own attention, which cannot, would be used."""
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None)  # few families have it
    return capped is not None and "sdpa" in implementation


def keep_soft_cap(model: PreTrainedModel) -> None:
    """Lets a model whose attention scores are capped compute the cap, which transformers' default leaves out."""
    if not drops_soft_cap(model.config, model.config._attn_implementation):
        return
    logger.warning(
        "%s caps its attention scores at %s (`attn_logit_softcapping`), which vLLM does and `attn_implementation: %s` "
        "does not: the trainer computes with `eager`. On a GPU, `attn_implementation: flash_attention_2` has the cap, "
        "too, and takes less memory.",
        type(model).__name__,
        model.config.get_text_config().attn_logit_softcapping,
        model.config._attn_implementation,
    )
    model.set_attn_implementation("eager")
