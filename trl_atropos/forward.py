"""What makes the trainer's forward pass compute what the server computes: soft caps kept, dropout and noise off."""

import logging
import re

import torch
from transformers import PretrainedConfig, PreTrainedModel

from trl_atropos.weights.transfer import base_model

logger = logging.getLogger(__name__)

NOISE = re.compile("dropout|pdrop|layerdrop|jitter")  # in names of modules' attributes and of a config's fields
NO_NOISE = re.compile("classifier|summary")  # of heads that a language model does not have


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


def silence(model: torch.nn.Module) -> dict[str, float]:
    """
    Sets every probability of dropout, of the model and of its adapters, and all noise of a router to 0. Returns those
    that were not, by name.

    The server samples without: with them, training would compute other log-probabilities than any policy has.
    """
    found: dict[str, float] = {}
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout) and module.p:
            found[path.removesuffix(".default").rpartition(".")[2]] = module.p  # an adapter's has its name at the end
            module.p = 0.0
    configs = [model.config, model.config.get_text_config()]  # some forwards read them
    for place in [*model.modules(), *configs]:
        for name, value in list(vars(place).items()):
            if isinstance(value, float) and value and NOISE.search(name) and not NO_NOISE.search(name):
                found[name] = value
                setattr(place, name, 0.0)
    return found


def prepare_model(model: torch.nn.Module, *, warn: bool = True) -> None:
    """Sets up a model, with its adapter, for training on what the server samples."""
    policy = base_model(model)
    if policy.base_model is policy:  # Llama 4 names a backbone that it does not have; TRL scores from its states
        policy.base_model_prefix = "model"
    found = silence(model)
    if found and warn:
        shown = ", ".join(f"{name} {value:g}" for name, value in found.items())
        logger.warning(
            "Dropout and noise are set to 0 for training (%s): the server samples without, so that they would make "
            "trainer and sampler differ.",
            shown,
        )
