"""Refuses a model that a run cannot begin with, by its config alone.

`recipe_checks.check_files` calls `require_causal_model`, and for an adapter `require_untied`, on
every rank, before anything that takes long.
"""

from typing import Any

import transformers
from transformers import AutoConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from trl import ModelConfig

from trl_atropos.errors import RecipeError, reason_of
from trl_atropos.weights.adapters import EMBEDDING, HEAD, require_whole_model


def require_causal_model(model: ModelConfig, trusted: bool) -> None:
    """Raises `RecipeError` if the model cannot be loaded and trained. If it is `trusted`, code that
    comes with it may run."""
    name = model.model_name_or_path
    require_whole_model(name)
    try:
        config = AutoConfig.from_pretrained(
            name, revision=model.model_revision, trust_remote_code=trusted
        )
    # not there, or of an architecture that transformers does not know
    except (OSError, ValueError) as error:
        raise RecipeError(
            f"The model {name!r} cannot be loaded: {reason_of(error)}",
            seen=f"model_name_or_path: {name}",
            fix="Set `model_name_or_path` to a folder with a config.json (the quickstart's is made "
            "by `python recipes/quickstart/make_model.py FOLDER`), or to a Hub name that this "
            "machine can download or has cached.",
            code="model",
        ) from error
    quantised = getattr(config, "quantization_config", None)  # only quantised checkpoints have it
    if config.is_encoder_decoder:
        problem = f"{config.model_type} has an encoder, and rollouts are for a decoder alone"
        fix = "Take a causal language model."
    elif quantised is not None and not model.use_peft:
        problem = (
            f"its weights are quantised ({quantised.get('quant_method', '4 or 8 bits')}), and "
            "take no gradient"
        )
        fix = (
            "Take the checkpoint that it was made from, or train an adapter beside them "
            "(`use_peft: true`)."
        )
    elif not config.architectures:
        problem = "its config.json names no architecture"
        fix = 'Add `"architectures"`, such as ["Qwen3ForCausalLM"].'
    else:
        problem, fix = _missing_class(config, name, model.model_revision, trusted)
    if problem:
        what = f"The model {name!r} cannot be trained: {problem}"
        raise RecipeError(what, seen=f"model_name_or_path: {name}", fix=fix, code="model")


def require_untied(model: ModelConfig, trusted: bool) -> None:
    """Raises `RecipeError` for an adapter on one of two tied embeddings, which a server holds as
    one tensor."""
    targets = model.lora_target_modules or []
    if isinstance(targets, str):
        targets = [targets]
    modules = {*targets, *(model.lora_modules_to_save or [])}
    ends = sorted({EMBEDDING, HEAD} & modules)
    if not ends:
        return
    config = AutoConfig.from_pretrained(
        model.model_name_or_path, revision=model.model_revision, trust_remote_code=trusted
    )
    if config.tie_word_embeddings:
        raise RecipeError(
            f"The adapter is on {ends[0]!r}, which is one tensor with the other embedding of this "
            "model (`tie_word_embeddings`), and would train one of them alone",
            seen=f"lora_target_modules, lora_modules_to_save: {', '.join(ends)}",
            fix=f"Remove {ends[0]!r} there. From Python, "
            f"`LoraConfig(modules_to_save=['{EMBEDDING}'], ensure_weight_tying=True)` trains "
            "both as one, with `vllm_mode: server`.",
            code="adapter",
        )


def _missing_class(config: Any, name: str, revision: str | None, trusted: bool) -> tuple[str, str]:
    """Returns which of the model's classes cannot be loaded, and a fix; two empty texts if all
    can."""
    in_transformers = hasattr(transformers, config.architectures[0])
    # a class that the checkpoint brings
    code = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    try:
        if in_transformers and config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            problem = (
                f"transformers has no causal language model for {config.model_type}, and no "
                "processor of images is with it"
            )
            fix = "Take the whole checkpoint, or one of the language model alone."
            # TRL's trainer needs that of images
            transformers.AutoProcessor.from_pretrained(name, revision=revision)
        elif code is not None and trusted and not in_transformers:
            problem = (
                "the code that comes with it does not run with transformers "
                f"{transformers.__version__}"
            )
            fix = "Take a model whose class transformers has."
            get_class_from_dynamic_module(code, name, revision=revision)
    except (ImportError, OSError, ValueError, AttributeError) as error:
        return f"{problem} ({reason_of(error)})", fix
    return "", ""
