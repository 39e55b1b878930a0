"""Which adapters of PEFT can be trained and can reach the servers, as their configs say, before
anything starts.

`recipe.py` calls `require_supported` for the adapter of a recipe. The trainer's constructor calls
it for any adapter that comes from Python, with `require_trainable` before TRL wraps the model, and
`require_served` after.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from peft import PeftConfig, PeftMixedModel, PeftModel, PeftType, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME

from trl_atropos.errors import RecipeError

# How an adapter reaches the servers: merged into the weights, or alone, as an adapter. None: there
# are no servers.
Way = Literal["merged", "alone"] | None

EMBEDDING = "embed_tokens"  # as most families name their embeddings, and as PEFT knows them
HEAD = "lm_head"
REFERENCE = "ref"  # TRL's name of the copy that `beta` compares a trained adapter with
REFERENCED = "default"  # the adapter that TRL copies
IN_RECIPES = {"target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save"}
# Initialisations that also take something out of the base's weights.
OF_BASE = ("pissa", "olora", "corda", "loftq")
MERGE = "use `vllm_mode: server`, which sends merged weights"


class Limit(NamedTuple):
    """One thing that an adapter's config may ask for and that does not work everywhere."""

    setting: str  # of PEFT's config
    asked: Callable[[PeftConfig], Any]  # returns what the config has there, or something false
    ways: tuple[Way, ...]  # in which it is refused
    why: str


def _stated(setting: str) -> Callable[[PeftConfig], Any]:
    return lambda config: getattr(config, setting, None)  # older versions of PEFT lack some


def _base_init(config: PeftConfig) -> str:
    """Returns the initialisation, if it changes the base's weights."""
    name = str(config.init_lora_weights).lower()
    return name if name.startswith(OF_BASE) else ""


def _bias(config: PeftConfig) -> str:
    return "" if config.bias == "none" else config.bias


def _head(config: PeftConfig) -> str:
    """Returns the target modules, if the head is one."""
    targets = config.target_modules or ()
    named = (
        [targets] if isinstance(targets, str) else sorted(targets, key=lambda name: name == HEAD)
    )
    return ", ".join(named) if HEAD in named else ""


EVERYWHERE: tuple[Way, ...] = (None, "merged", "alone")
SERVERS: tuple[Way, ...] = ("merged", "alone")
LIMITS = (  # of a `LoraConfig`
    Limit(
        "target_modules",
        _head,
        EVERYWHERE,
        "TRL computes log-probabilities from the weight of `lm_head` itself, and would not train "
        "an adapter on it",
    ),
    Limit(
        "alora_invocation_tokens",
        _stated("alora_invocation_tokens"),
        EVERYWHERE,
        "an adapter that begins at some tokens of a prompt cannot be merged, vLLM does not serve "
        "it, and rollouts without those tokens do not train it",
    ),
    Limit(
        "layer_replication",
        _stated("layer_replication"),
        EVERYWHERE,
        "the trained model has other layers than its config and the servers' model",
    ),
    Limit(
        "monteclora_config",
        _stated("monteclora_config"),
        EVERYWHERE,
        "the trainer's forward pass draws noise that no server samples with",
    ),
    Limit(
        "arrow_config",
        _stated("arrow_config"),
        EVERYWHERE,
        "it routes each token among several adapters, and one adapter is trained",
    ),
    Limit(
        "megatron_config",
        _stated("megatron_config"),
        EVERYWHERE,
        "it is for layers of Megatron, and models are loaded by Transformers",
    ),
    Limit(
        "trainable_token_indices",
        _stated("trainable_token_indices"),
        SERVERS,
        "single rows of an embedding are neither part of what vLLM serves as an adapter nor merged "
        "for a server",
    ),
    Limit("use_dora", _stated("use_dora"), ("alone",), "vLLM does not serve DoRA"),
    Limit(
        "lora_bias", _stated("lora_bias"), ("alone",), "vLLM does not serve adapters with a bias"
    ),
    Limit(
        "bias",
        _bias,
        ("alone",),
        "the biases that are trained are the base's, which a server does not get",
    ),
    Limit(
        "use_bdlora", _stated("use_bdlora"), ("alone",), "vLLM does not serve block-diagonal LoRA"
    ),
    Limit("use_qalora", _stated("use_qalora"), ("alone",), "vLLM does not serve QALoRA"),
    Limit("kasa_config", _stated("kasa_config"), ("alone",), "vLLM does not serve KaSA"),
    Limit(
        "init_lora_weights",
        _base_init,
        ("alone",),
        "it takes a part out of the base's weights, and the servers' base still has it",
    ),
    Limit(
        "modules_to_save",
        _stated("modules_to_save"),
        ("alone",),
        "it trains whole modules besides the adapter, which a vLLM server cannot take with it",
    ),
)
OF_REFERENCE = (  # of a `LoraConfig`, where `beta` compares with the model without its adapter
    Limit("bias", _bias, EVERYWHERE, "the reference would have the trained biases"),
    Limit(
        "init_lora_weights",
        _base_init,
        EVERYWHERE,
        "the reference would lack what the adapter took from the base",
    ),
    Limit(
        "kasa_config",
        _stated("kasa_config"),
        EVERYWHERE,
        "the reference would lack what was taken from the base",
    ),
)


def require_supported(config: PeftConfig, way: Way, in_recipe: bool = False) -> None:
    """Raises `RecipeError` for an adapter that cannot be trained, or not reach the servers, as its
    config says. The
    message names the settings of a recipe, if it comes from one (`in_recipe`)."""
    kind = config.peft_type.value
    if config.peft_type != PeftType.LORA:
        if way is not None:
            verb = "merged into the servers' weights" if way == "merged" else "served by vLLM"
            what = f"An adapter of type {kind} cannot be {verb}"
            raise RecipeError(what, f"peft_type: {kind}", "Use a `LoraConfig`.", "adapter")
        return
    for limit in LIMITS:
        value = limit.asked(config)
        if value and way in limit.ways:
            setting = IN_RECIPES.get(limit.setting, limit.setting) if in_recipe else limit.setting
            _refuse(limit, setting, value)


def _refuse(limit: Limit, setting: str, value: Any) -> None:
    shown = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    remove = (
        f"Remove {HEAD!r} from `{setting}`" if limit.asked is _head else f"Leave `{setting}` out"
    )
    fix = f"{remove}." if "merged" in limit.ways else f"{remove}, or {MERGE}."
    what = (
        f"The adapter has `{setting}: {shown}`, which does not work in this `vllm_mode`: "
        f"{limit.why}"
    )
    if None in limit.ways:
        what = f"The adapter has `{setting}: {shown}`, which cannot be trained: {limit.why}"
    raise RecipeError(what, f"{setting}: {shown}", fix, "adapter")


def require_reference(config: PeftConfig, beta: float) -> None:
    """Raises `RecipeError` if the model without its new adapter would not be the reference that
    `beta` asks for."""
    if beta == 0.0 or config.peft_type != PeftType.LORA:
        return
    for limit in OF_REFERENCE:
        if value := limit.asked(config):
            what = (
                f"The adapter has `{limit.setting}` ({value}), and `beta` is {beta:g}: {limit.why}"
            )
            fix = f"Set `beta: 0`, or leave `{limit.setting}` out."
            raise RecipeError(what, f"{limit.setting}: {value}, beta: {beta:g}", fix, "adapter")


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


def require_trainable(model: Any, beta: float) -> None:
    """Raises `RecipeError` for a model whose adapters are not ready to be trained."""
    if isinstance(model, str):
        require_whole_model(model)
    if isinstance(model, PeftMixedModel):
        what = (
            "The model is a `PeftMixedModel`, whose adapters of several types are not one "
            "policy to publish"
        )
        raise RecipeError(
            what, "PeftMixedModel", "Make it by `get_peft_model` without `mixed=True`.", "adapter"
        )
    if not isinstance(model, PeftModel):
        return
    active = model.active_adapters
    if len(active) != 1:
        what = (
            f"{len(active)} adapters are active ({', '.join(active)}), and one is trained and "
            "published"
        )
        raise RecipeError(
            what, str(active), "Activate that one alone: `model.set_adapter(NAME)`.", "adapter"
        )
    name = active[0]
    own = _parameters_of(model, name)
    trained = {key: one for key, one in model.named_parameters() if one.requires_grad}
    if not any(id(one) in own for one in trained.values()):
        raise RecipeError(
            f"Nothing of the adapter {name!r} is trainable: PEFT loads adapters frozen",
            seen=f"adapter {name!r}, {len(trained)} trainable parameters elsewhere",
            fix="Load it by `PeftModel.from_pretrained(base, folder, is_trainable=True)`, or call "
            f"`model.set_adapter({name!r})` before you build the trainer.",
            code="adapter",
        )
    for other in model.peft_config.keys() - {name}:
        theirs = _parameters_of(model, other)
        if any(id(one) in theirs for one in trained.values()):
            what = (
                f"The adapter {other!r} is trainable, but {name!r} is the active one: it would "
                "not be trained"
            )
            fix = (
                f"Call `model.set_adapter({other!r})` to train it, or load it without "
                "`is_trainable`."
            )
            raise RecipeError(what, f"adapter {other!r}", fix, "adapter")
    outside = [key for key, one in trained.items() if id(one) not in own]
    if outside:
        what = (
            f"{len(outside)} parameters outside of the adapter are trainable (first: "
            f"{outside[0]!r}), and PEFT "
        )
        what += "does not save them"
        fix = (
            "Freeze them (`requires_grad_(False)`), or name their modules in the adapter's "
            "`modules_to_save`."
        )
        raise RecipeError(what, outside[0], fix, "adapter")
    if beta != 0.0:
        _require_referenced(model, name, beta)


def _parameters_of(model: PeftModel, name: str) -> set[int]:
    """Returns the ids of an adapter's parameters."""
    if model.peft_config[name].is_prompt_learning:  # PEFT saves what it computes from them
        return {id(parameter) for parameter in model.prompt_encoder[name].parameters()}
    return {id(tensor) for tensor in tensors_of(model, name).values()}


def _require_referenced(model: PeftModel, name: str, beta: float) -> None:
    """TRL copies the adapter `default` to one that it names `ref`."""
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
        raise RecipeError(
            what, seen, 'Call `model.delete_adapter("ref")` before, or set `beta=0.0`.', "adapter"
        )
    config = model.peft_config[name]
    if config.peft_type == PeftType.LORA and _bias(config):
        what = (
            "With `beta`, TRL adds a copy of the adapter, and PEFT has several adapters only "
            "without `bias`"
        )
        raise RecipeError(what, f"{seen}, bias: {config.bias}", "Set `beta=0.0`.", "adapter")


def require_served(model: torch.nn.Module, way: Way) -> None:
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
        raise RecipeError(
            what, "trainable_token_indices, tie_word_embeddings: True", fix, "adapter"
        )
    for path, module in model.named_modules():
        if isinstance(module, BaseTunerLayer) and not isinstance(model, PeftModel):
            what = (
                f"The model, a {type(model).__name__}, has layers of an adapter, but is no "
                "`PeftModel`"
            )
            fix = (
                "Pass the plain model and a `peft_config`, or load it by "
                "`PeftModel.from_pretrained(base, folder, "
            )
            fix += "is_trainable=True)`."
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
    """Makes TRL's reference a copy of the whole adapter: TRL leaves out embeddings and single
    tokens, whose names end with the adapter's."""
    places = tensors_of(model, REFERENCE)
    for key, tensor in tensors_of(model, REFERENCED).items():
        places[key].copy_(tensor)


# ------------------------------------------------------------------------------------ the optimizer


def require_all_optimized(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    """Raises `RecipeError` unless the optimizer holds exactly the trainable parameters."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    named = dict(model.named_parameters())
    trained = {name: one for name, one in named.items() if one.requires_grad}
    lacking = [name for name, one in trained.items() if id(one) not in held]
    others = len(held - {id(one) for one in trained.values()})
    if lacking or others:
        example = f" (first: {lacking[0]!r})" if lacking else ""
        raise RecipeError(
            f"The optimizer must hold exactly the {len(trained)} trainable parameters of the "
            f"model, but it lacks {len(lacking)} of them{example}, and has {others} that are "
            "frozen or not the model's",
            seen=f"{type(optimizer).__name__} of {len(held)} parameters",
            fix="Name an optimizer with `optim` in place of `optimizers`, or give `optimizers` one "
            "of `[p for p in model.parameters() if p.requires_grad]`, of the very model that "
            "the trainer gets.",
            code="optimizer",
        )
