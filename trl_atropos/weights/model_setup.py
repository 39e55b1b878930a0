"""Sets up the trainer's model so that it computes what the server computes: without dropout and
other noise, with capped attention scores if the family has them.

`prepare_model` is called once the trainer is built, `restore_what_changes` when training begins.
`check` calls the functions that need no weights.
"""

import logging
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial, wraps
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedConfig, PreTrainedModel

from trl_atropos.distributed import on_main
from trl_atropos.weights.gather import base_model

logger = logging.getLogger(__name__)

# in names of modules' attributes and of a config's fields
DROPOUT = re.compile("dropout|pdrop|layerdrop")
JITTER = re.compile("jitter")  # in names of routers' attributes
# in `gradient_checkpointing_kwargs`; all others but TRL's `selective` are torch's
OF_TRANSFORMERS = {"every_n_layers", "offload"}
# `selective` keeps what these compute: on GPUs in 16 bits, in 32, by cuDNN, on the CPU, and for
# packed rows on GPUs.
ATTENTION_OPERATORS = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "torch_attn::_varlen_attn",
)
# Rotary embeddings whose `factor` stretches `max_position_embeddings`. With others (`llama3`,
# `yarn`, `longrope`), that is the stretched length, as Transformers and vLLM take it.
STRETCHING = ("linear", "dynamic")
NO_NOISE = re.compile("classifier|summary")  # of heads that a language model does not have


@dataclass
class Noise:
    """Attributes that make a model random in training, all of one name such as
    `attention_dropout`."""

    value: float = 0.0  # of the last one
    # object, attribute, and its value before it became 0
    places: list[tuple[Any, str, float]] = field(default_factory=list)

    def off(self) -> None:
        for place, attribute, _ in self.places:
            setattr(place, attribute, 0.0)

    def restore(self) -> None:
        for place, attribute, value in self.places:
            setattr(place, attribute, value)


def checkpoint_layers(policy: PreTrainedModel, options: dict[str, Any] | None) -> None:
    """Has layers computed again in the backward pass. `options` are
    `gradient_checkpointing_kwargs`: two of them are Transformers', and the others torch's, as
    `transformers.Trainer` divides them. A model that `prepare_model` has set up knows `selective`,
    too."""
    of_torch = dict(options or {})
    every_n_layers = of_torch.pop("every_n_layers", 1)
    offload = of_torch.pop("offload", False)
    policy.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs=of_torch or None,
        every_n_layers=every_n_layers,
        offload=offload,
    )


def prepare_model(model: torch.nn.Module, *, warn: bool = True) -> dict[str, Noise]:
    """Sets up a model, with its adapter, for training on what the server samples. Returns the noise
    that it turned off, by name."""
    policy = base_model(model)
    name_backbone(policy)
    if policy.supports_gradient_checkpointing:
        offer_selective_checkpointing(policy)
    silenced = silence(model)
    if silenced and warn:
        values = [f"{name} {noise.value:g}" for name, noise in silenced.items()]
        logger.warning(
            "Dropout and noise are off for training (%s), because the server samples without.",
            ", ".join(values),
        )
    return silenced


def offer_selective_checkpointing(policy: PreTrainedModel) -> None:
    """
    Teaches a model's `gradient_checkpointing_enable` the option `selective` of TRL's `SFTTrainer`:
    what attention computes is kept, and the rest of a layer is computed again.

    Attention is most of the work on long rollouts, and its result is one row of hidden states.
    TRL's own function does not know the attention of packed rows. It is the model that learns the
    option because TRL and Transformers switch checkpointing on in places of their own.
    """
    enable = policy.gradient_checkpointing_enable

    @wraps(enable)
    def enable_with_option(
        gradient_checkpointing_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> None:
        of_torch = dict(gradient_checkpointing_kwargs or {})
        if of_torch.pop("selective", False):
            of_torch["use_reentrant"] = False
            of_torch["context_fn"] = partial(create_selective_checkpoint_contexts, _keeps_attention)
        enable(gradient_checkpointing_kwargs=of_torch or None, **options)

    policy.gradient_checkpointing_enable = enable_with_option


def _keeps_attention(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if is_attention(operator):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


@cache
def is_attention(operator: Any) -> bool:
    """Returns whether an operator computes attention: one of torch's, or of the library
    `flash-attn`, which gives its operators another namespace in each version."""
    name = operator.name()
    return name in ATTENTION_OPERATORS or "flash_attn" in name


def name_backbone(policy: PreTrainedModel) -> None:
    """Corrects a class that names a backbone which it does not have (Llama 4): TRL scores from its
    hidden states."""
    if policy.base_model is policy:
        policy.base_model_prefix = "model"


def silence(model: torch.nn.Module) -> dict[str, Noise]:
    """Sets all dropout of the model and its adapters to 0, and keeps noisy routers in evaluation
    mode: the server samples without noise. Returns what it changed, by name."""
    silenced: dict[str, Noise] = {}

    def noise_of(name: str, value: float) -> Noise:
        noise = silenced.setdefault(name, Noise())
        noise.value = value
        return noise

    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout) and module.p:
            # an adapter's has its name at the end
            name = path.removesuffix(".default").rpartition(".")[2]
            noise_of(name, module.p).places.append((module, "p", module.p))
        for name, value in _numbers(module, JITTER):
            # A value of 0 would be wrong: to PhiMoE's routers, it is a threshold in evaluation
            # mode, too.
            noise_of(name, value)
            keep_evaluating(module)
    config = model.config
    text_config = config.get_text_config()
    places = [*model.modules(), config]  # some forwards read the configuration
    if text_config is not config:
        places.append(text_config)
    for place in places:
        for name, value in _numbers(place, DROPOUT):
            noise_of(name, value).places.append((place, name, value))
    for noise in silenced.values():
        noise.off()
    return silenced


def _numbers(place: Any, pattern: re.Pattern) -> list[tuple[str, float]]:
    """Returns the attributes of a module or a configuration whose names match and whose values are
    floats other than 0."""
    numbers = []
    for name, value in vars(place).items():
        is_number = isinstance(value, float) and value != 0
        is_noise = pattern.search(name) and not NO_NOISE.search(name)
        if is_number and is_noise:
            numbers.append((name, value))
    return numbers


def keep_evaluating(module: torch.nn.Module) -> None:
    """Keeps a module, but not its children, in evaluation mode when the model is set to another
    mode."""
    module.training = False
    module.train = partial(_train_children, module)


def _train_children(module: torch.nn.Module, mode: bool = True) -> torch.nn.Module:
    for child in module.children():
        child.train(mode)
    return module


def restore_what_changes(
    silenced: dict[str, Noise], score: Callable[[], torch.Tensor], warn: bool = True
) -> None:
    """
    Restores, with a warning, those of the silenced attributes that change what a model computes in
    evaluation mode.

    Args:
        silenced: from `silence`.
        score: computes a tensor in evaluation mode, such as logits. Every rank calls it as often,
            because the forward pass of a sharded model is one of all ranks.
    """
    zeroed = {name: noise for name, noise in silenced.items() if noise.places}
    if not zeroed:
        return
    for noise in zeroed.values():
        noise.restore()
    loaded = score()
    # Not always 0 on GPUs, where kernels are tuned in the first pass, and some add up in any order.
    between_passes = (score() - loaded).abs().max()
    for name, noise in zeroed.items():
        noise.off()
        difference = (score() - loaded).abs().max()
        is_needed = on_main(lambda difference=difference: bool(difference > between_passes))
        if not is_needed:
            continue
        noise.restore()
        if warn:
            logger.warning(
                "`%s` stays at %g: with 0, the model would compute something else where it is "
                "sampled from, too (logits that differ by up to %.2g).",
                name,
                noise.value,
                difference.item(),
            )


def num_positions(config: PreTrainedConfig) -> float:
    """Returns the most tokens that a model has positions for."""
    text_config = config.get_text_config()
    positions = getattr(text_config, "max_position_embeddings", None)
    if positions is None:  # ALiBi and state-space models
        return math.inf
    rope = getattr(text_config, "rope_parameters", None) or {}  # not every model has rotary ones
    if rope.get("rope_type") not in STRETCHING:
        return positions
    return positions * max(1.0, rope.get("factor") or 1.0)


def drops_soft_cap(config: PreTrainedConfig, implementation: str) -> bool:
    """Returns whether the model caps its attention scores (Gemma 2) and torch's own attention,
    which cannot, would be used."""
    # few families have it
    cap = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    return cap is not None and "sdpa" in implementation


def keep_soft_cap(model: PreTrainedModel) -> None:
    """Switches a model that caps its attention scores to an attention that computes the cap, which
    Transformers' default leaves out."""
    implementation = model.config._attn_implementation
    if drops_soft_cap(model.config, implementation):
        logger.warning(
            "The trainer computes with `attn_implementation: eager`: %s caps its attention scores, "
            "which `%s` cannot. On a GPU, `flash_attention_2` has the cap, too, and takes less "
            "memory.",
            type(model).__name__,
            implementation,
        )
        model.set_attn_implementation("eager")
