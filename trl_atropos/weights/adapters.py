"""Refuses adapters of PEFT that cannot be trained, or cannot reach the servers, before anything
starts.

`recipe_checks.py` calls `require_supported` for the adapter of a recipe. The trainer's constructor
calls it for any adapter that comes from Python, with `require_trainable_adapter` before TRL wraps
the model, and `require_served` after.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import PeftConfig, PeftMixedModel, PeftModel, PeftType, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME

from trl_atropos.errors import RecipeError
from trl_atropos.modes import AdapterWay

EMBEDDING = "embed_tokens"  # as most families name their embeddings, and as PEFT knows them
HEAD = "lm_head"
REFERENCE = "ref"  # TRL's name of the copy that `beta` compares a trained adapter with
REFERENCED = "default"  # the adapter that TRL copies
IN_RECIPES = {"target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save"}
# Initialisations that also take something out of the base's weights.
OF_BASE = ("pissa", "olora", "corda", "loftq")
MERGE = "use `vllm_mode: server`, which sends merged weights"


EVERYWHERE: tuple[AdapterWay, ...] = (None, "merged", "alone")
SERVERS: tuple[AdapterWay, ...] = ("merged", "alone")
ALONE: tuple[AdapterWay, ...] = ("alone",)


def _head(config: PeftConfig) -> str:
    """Returns the target modules, if the head is one, which then comes last."""
    targets = config.target_modules or []
    if isinstance(targets, str):
        targets = [targets]
    if HEAD not in targets:
        return ""
    return ", ".join(sorted(targets, key=lambda name: name == HEAD))


def _bias(config: PeftConfig) -> str:
    return "" if config.bias == "none" else config.bias


def _base_init(config: PeftConfig) -> str:
    """Returns the initialisation, if it changes the base's weights."""
    name = str(config.init_lora_weights).lower()
    return name if name.startswith(OF_BASE) else ""


class Limit(NamedTuple):
    """One setting of an adapter's config that does not work everywhere."""

    setting: str
    ways: tuple[AdapterWay, ...]  # in which it is refused
    reason: str
    # returns its value, or something false if that value works everywhere
    read: Callable[[PeftConfig], Any] | None = None

    def value_in(self, config: PeftConfig) -> Any:
        if self.read is not None:
            return self.read(config)
        return getattr(config, self.setting, None)  # older versions of PEFT lack some


LIMITS = (  # of a `LoraConfig`
    Limit(
        "target_modules",
        EVERYWHERE,
        "TRL computes log-probabilities from the weight of `lm_head` itself, and would not train "
        "an adapter on it",
        _head,
    ),
    Limit(
        "alora_invocation_tokens",
        EVERYWHERE,
        "an adapter that begins at some tokens of a prompt cannot be merged, vLLM does not serve "
        "it, and rollouts without those tokens do not train it",
    ),
    Limit(
        "layer_replication",
        EVERYWHERE,
        "the trained model has other layers than its config and the servers' model",
    ),
    Limit(
        "monteclora_config",
        EVERYWHERE,
        "the trainer's forward pass draws noise that no server samples with",
    ),
    Limit(
        "arrow_config",
        EVERYWHERE,
        "it routes each token among several adapters, and one adapter is trained",
    ),
    Limit(
        "megatron_config",
        EVERYWHERE,
        "it is for layers of Megatron, and models are loaded by Transformers",
    ),
    Limit(
        "trainable_token_indices",
        SERVERS,
        "single rows of an embedding are neither part of what vLLM serves as an adapter nor merged "
        "for a server",
    ),
    Limit("use_dora", ALONE, "vLLM does not serve DoRA"),
    Limit("lora_bias", ALONE, "vLLM does not serve adapters with a bias"),
    Limit(
        "bias",
        ALONE,
        "the biases that are trained are the base's, which a server does not get",
        _bias,
    ),
    Limit("use_bdlora", ALONE, "vLLM does not serve block-diagonal LoRA"),
    Limit("use_qalora", ALONE, "vLLM does not serve QALoRA"),
    Limit("kasa_config", ALONE, "vLLM does not serve KaSA"),
    Limit(
        "init_lora_weights",
        ALONE,
        "it takes a part out of the base's weights, and the servers' base still has it",
        _base_init,
    ),
    Limit(
        "modules_to_save",
        ALONE,
        "it trains whole modules besides the adapter, which a vLLM server cannot take with it",
    ),
)
OF_REFERENCE = (  # of a `LoraConfig`, if `beta` compares with the model without its adapter
    Limit("bias", EVERYWHERE, "the reference would have the trained biases", _bias),
    Limit(
        "init_lora_weights",
        EVERYWHERE,
        "the reference would lack what the adapter took from the base",
        _base_init,
    ),
    Limit("kasa_config", EVERYWHERE, "the reference would lack what was taken from the base"),
)


def require_supported(config: PeftConfig, way: AdapterWay, in_recipe: bool = False) -> None:
    """Raises `RecipeError` for an adapter that cannot be trained, or cannot reach the servers.

    The message names the settings of a recipe, if the config comes from one (`in_recipe`).
    """
    kind = config.peft_type.value
    if config.peft_type != PeftType.LORA:
        if way is not None:
            verb = "merged into the servers' weights" if way == "merged" else "served by vLLM"
            what = f"An adapter of type {kind} cannot be {verb}"
            raise RecipeError(what, f"peft_type: {kind}", "Use a `LoraConfig`.", "adapter")
        return
    for limit in LIMITS:
        value = limit.value_in(config)
        if not value or way not in limit.ways:
            continue
        setting = limit.setting
        if in_recipe:
            setting = IN_RECIPES.get(setting, setting)
        _refuse(limit, setting, value)


def _refuse(limit: Limit, setting: str, value: Any) -> None:
    if isinstance(value, list | tuple):
        value = ", ".join(map(str, value))
    seen = f"{setting}: {value}"
    fix = f"Leave `{setting}` out"
    if limit.setting == "target_modules":
        fix = f"Remove {HEAD!r} from `{setting}`"
    if "merged" not in limit.ways:
        fix += f", or {MERGE}"
    what = f"The adapter has `{seen}`, which does not work in this `vllm_mode`: {limit.reason}"
    if None in limit.ways:
        what = f"The adapter has `{seen}`, which cannot be trained: {limit.reason}"
    raise RecipeError(what, seen, f"{fix}.", "adapter")


def require_reference(config: PeftConfig, beta: float) -> None:
    """Raises `RecipeError` if the model without its new adapter would not be the reference that
    `beta` asks for."""
    if beta == 0.0 or config.peft_type != PeftType.LORA:
        return
    for limit in OF_REFERENCE:
        value = limit.value_in(config)
        if not value:
            continue
        setting = limit.setting
        what = f"The adapter has `{setting}` ({value}), and `beta` is {beta:g}: {limit.reason}"
        seen = f"{setting}: {value}, beta: {beta:g}"
        raise RecipeError(what, seen, f"Set `beta: 0`, or leave `{setting}` out.", "adapter")


# --------------------------------------------------------------------- models that come from Python


def require_whole_model(name: str) -> None:
    """Raises `RecipeError` for a folder that has an adapter alone."""
    if Path(name, ADAPTER_CONFIG_NAME).exists() and not Path(name, CONFIG_NAME).exists():
        raise RecipeError(
            f"{name!r} is the folder of an adapter, without the model below it",
            seen=f"model_name_or_path: {name}",
            fix="Merge it into its base "
            "(`AutoPeftModelForCausalLM.from_pretrained(folder).merge_and_unload()`) and save "
            "that; or from Python, pass `PeftModel.from_pretrained(base, folder, "
            "is_trainable=True)`.",
            code="model",
        )


def require_trainable_adapter(model: Any, beta: float) -> None:
    """Raises `RecipeError` for a model whose adapters are not ready to be trained."""
    if isinstance(model, str):
        require_whole_model(model)
    if isinstance(model, PeftMixedModel):
        what = (
            "The model is a `PeftMixedModel`, whose adapters of several types are not one "
            "policy to publish"
        )
        fix = "Make it by `get_peft_model` without `mixed=True`."
        raise RecipeError(what, "PeftMixedModel", fix, "adapter")
    if not isinstance(model, PeftModel):
        return
    active = model.active_adapters
    if len(active) != 1:
        what = (
            f"{len(active)} adapters are active ({', '.join(active)}), and one is trained and "
            "published"
        )
        fix = "Activate that one alone: `model.set_adapter(NAME)`."
        raise RecipeError(what, str(active), fix, "adapter")
    _require_trained_alone(model, active[0])
    if beta != 0.0:
        _require_referenced(model, active[0], beta)


def _require_trained_alone(model: PeftModel, name: str) -> None:
    """Raises `RecipeError` unless the trainable parameters are those of the adapter `name`."""
    adapter_ids = _parameters_of(model, name)
    trained = {}
    for key, parameter in model.named_parameters():
        if parameter.requires_grad:
            trained[key] = id(parameter)
    if adapter_ids.isdisjoint(trained.values()):
        raise RecipeError(
            f"Nothing of the adapter {name!r} is trainable: PEFT loads adapters frozen",
            seen=f"adapter {name!r}, {len(trained)} trainable parameters elsewhere",
            fix="Load it by `PeftModel.from_pretrained(base, folder, is_trainable=True)`, or call "
            f"`model.set_adapter({name!r})` before you build the trainer.",
            code="adapter",
        )
    for other in model.peft_config.keys() - {name}:
        if not _parameters_of(model, other).isdisjoint(trained.values()):
            what = (
                f"The adapter {other!r} is trainable, but {name!r} is the active one: it would "
                "not be trained"
            )
            fix = (
                f"Call `model.set_adapter({other!r})` to train it, or load it without "
                "`is_trainable`."
            )
            raise RecipeError(what, f"adapter {other!r}", fix, "adapter")
    outside = [key for key, identity in trained.items() if identity not in adapter_ids]
    if outside:
        what = (
            f"{len(outside)} parameters outside of the adapter are trainable (first: "
            f"{outside[0]!r}), and PEFT does not save them"
        )
        fix = (
            "Freeze them (`requires_grad_(False)`), or name their modules in the adapter's "
            "`modules_to_save`."
        )
        raise RecipeError(what, outside[0], fix, "adapter")


def _parameters_of(model: PeftModel, name: str) -> set[int]:
    """Returns the ids of an adapter's parameters."""
    if model.peft_config[name].is_prompt_learning:  # PEFT saves what it computes from them
        return {id(parameter) for parameter in model.prompt_encoder[name].parameters()}
    return {id(tensor) for tensor in tensors_of(model, name).values()}


def _require_referenced(model: PeftModel, name: str, beta: float) -> None:
    """Raises `RecipeError` unless TRL can copy the adapter `default` to one that it names `ref`."""
    seen = f"beta: {beta:g}, adapters: {', '.join(model.peft_config)}"
    if name != REFERENCED:
        what = (
            f"With `beta`, TRL compares with a copy of the adapter `default`, but {name!r} is "
            "trained"
        )
        fix = "Load the adapter without `adapter_name`, or set `beta=0.0`."
        raise RecipeError(what, seen, fix, "adapter")
    if REFERENCE in model.peft_config:
        what = (
            "With `beta`, TRL names its copy of the trained adapter `ref`, and the model has "
            "another one there"
        )
        fix = 'Call `model.delete_adapter("ref")` before, or set `beta=0.0`.'
        raise RecipeError(what, seen, fix, "adapter")
    config = model.peft_config[name]
    if config.peft_type == PeftType.LORA and _bias(config):
        what = (
            "With `beta`, TRL adds a copy of the adapter, and PEFT has several adapters only "
            "without `bias`"
        )
        raise RecipeError(what, f"{seen}, bias: {config.bias}", "Set `beta=0.0`.", "adapter")


def require_served(model: torch.nn.Module, way: AdapterWay) -> None:
    """Raises `RecipeError` for layers whose adapter a server, a checkpoint or the loss would not
    get whole."""
    head = model.get_output_embeddings()
    if isinstance(head, AuxiliaryTrainingWrapper) and not isinstance(head, ModulesToSaveWrapper):
        what = (
            "The adapter trains single tokens of an embedding that is also the head, whose "
            "weight TRL reads itself"
        )
        fix = (
            "Leave `trainable_token_indices` out, or set `modules_to_save` and "
            "`ensure_weight_tying=True`."
        )
        seen = "trainable_token_indices, tie_word_embeddings: True"
        raise RecipeError(what, seen, fix, "adapter")
    for path, module in model.named_modules():
        if isinstance(module, BaseTunerLayer) and not isinstance(model, PeftModel):
            what = (
                f"The model, a {type(model).__name__}, has layers of an adapter, but is no "
                "`PeftModel`"
            )
            fix = (
                "Pass the plain model and a `peft_config`, or load it by "
                "`PeftModel.from_pretrained(base, folder, is_trainable=True)`."
            )
            raise RecipeError(what, type(model).__name__, fix, "adapter")
        has_bias = isinstance(module, LoraLayer) and any(module.lora_bias.values())
        if way == "merged" and has_bias and module.get_base_layer().bias is None:
            layer = path.rpartition(".")[2]
            what = (
                f"The adapter has a bias (`lora_bias`), and the layer {layer!r} has none to "
                "merge it into"
            )
            raise RecipeError(what, "lora_bias: True", "Leave `lora_bias` out.", "adapter")


def tensors_of(model: PeftModel, name: str) -> dict[str, torch.Tensor]:
    """Returns the model's own tensors of an adapter, by the names that PEFT saves them under."""
    return get_peft_model_state_dict(
        model, model.state_dict(keep_vars=True), name, save_embedding_layers=False
    )


def trained_adapter(model: PeftModel) -> str:
    """Returns the name of the adapter that is trained, which is the active one."""
    (name,) = model.active_adapters
    return name


@torch.no_grad()
def complete_reference(model: PeftModel) -> None:
    """Makes TRL's reference a copy of the whole adapter. TRL's own copy lacks embeddings and single
    tokens, because their names end with the adapter's."""
    places = tensors_of(model, REFERENCE)
    for key, tensor in tensors_of(model, REFERENCED).items():
        places[key].copy_(tensor)


# ------------------------------------------------------------------------------------ the optimizer


def require_all_optimized(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    """Raises `RecipeError` unless the optimizer holds exactly the trainable parameters."""
    optimized = set()
    for group in optimizer.param_groups:
        optimized.update(id(parameter) for parameter in group["params"])
    trained = set()
    lacking = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        trained.add(id(parameter))
        if id(parameter) not in optimized:
            lacking.append(name)
    others = len(optimized - trained)
    if lacking or others:
        example = f" (first: {lacking[0]!r})" if lacking else ""
        raise RecipeError(
            f"The optimizer must hold exactly the {len(trained)} trainable parameters of the "
            f"model, but it lacks {len(lacking)} of them{example}, and has {others} that are "
            "frozen or not the model's",
            seen=f"{type(optimizer).__name__} of {len(optimized)} parameters",
            fix="Name an optimizer with `optim` in place of `optimizers`, or give `optimizers` one "
            "of `[p for p in model.parameters() if p.requires_grad]`, of the very model that "
            "the trainer gets.",
            code="optimizer",
        )
