"""Adapters of PEFT: what can be trained and reaches the servers does, everything else is refused in
a sentence; and a checkpoint brings back every adapter by its name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from peft import (
    IA3Config,
    LoraConfig,
    PeftConfig,
    PeftMixedModel,
    PeftModel,
    PromptTuningConfig,
    TrainableTokensConfig,
    get_peft_model,
)
from peft.tuners.lora.config import BdLoraConfig, KasaConfig, MontecloraConfig, VeloraConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM, TrainerCallback

from tests.rollout_factory import arguments, make_group, record
from tests.sharded import forget_sharding, launch, sharding_arguments
from trl_atropos import AtroposGRPOConfig, AtroposGRPOTrainer
from trl_atropos.errors import CheckpointError, RecipeError
from trl_atropos.weights import adapters
from trl_atropos.weights.checkpoint_adapters import require_adapter_loaded
from trl_atropos.weights.gather import iter_adapter_parameters, iter_full_parameters

QV = {"r": 2, "target_modules": ["q_proj", "v_proj"]}
ALL = {"merged", "alone"}  # the ways to a server
ALONE = {"alone"}
EVERYWHERE = {None, *ALL}

# What every field of `LoraConfig` that changes what is computed asks for, and other types of PEFT.
# config -> (how to make it, the ways in which it is refused, the setting that the refusal names)
CONFIGS: dict[str, tuple[Callable[[], PeftConfig], set, str]] = {
    "LoRA": (lambda: LoraConfig(**QV), set(), ""),
    "rsLoRA with patterns": (
        lambda: LoraConfig(
            **QV, use_rslora=True, rank_pattern={"q_proj": 4}, alpha_pattern={"v_proj": 3}
        ),
        set(),
        "",
    ),
    "all-linear but one": (
        lambda: LoraConfig(r=2, target_modules="all-linear", exclude_modules=["q_proj"]),
        set(),
        "",
    ),
    "one layer": (lambda: LoraConfig(**QV, layers_to_transform=[1]), set(), ""),
    "MiCA": (lambda: LoraConfig(**QV, init_lora_weights="mica"), set(), ""),
    "VeLoRA": (lambda: LoraConfig(**QV, velora_config=VeloraConfig()), set(), ""),
    "DoRA": (lambda: LoraConfig(**QV, use_dora=True), ALONE, "use_dora"),
    "a bias in B": (lambda: LoraConfig(**QV, lora_bias=True), ALONE, "lora_bias"),
    "all biases": (lambda: LoraConfig(**QV, bias="all"), ALONE, "bias"),
    "biases of its layers": (lambda: LoraConfig(**QV, bias="lora_only"), ALONE, "bias"),
    "whole modules": (
        lambda: LoraConfig(**QV, modules_to_save=["norm", "embed_tokens"]),
        ALONE,
        "modules_to_save",
    ),
    "PiSSA": (lambda: LoraConfig(**QV, init_lora_weights="pissa"), ALONE, "init_lora_weights"),
    "fast PiSSA": (
        lambda: LoraConfig(**QV, init_lora_weights="pissa_niter_4"),
        ALONE,
        "init_lora_weights",
    ),
    "OLoRA": (lambda: LoraConfig(**QV, init_lora_weights="olora"), ALONE, "init_lora_weights"),
    "KaSA": (lambda: LoraConfig(**QV, kasa_config=KasaConfig()), ALONE, "kasa_config"),
    "QALoRA": (lambda: LoraConfig(**QV, use_qalora=True), ALONE, "use_qalora"),
    "BD-LoRA": (
        lambda: LoraConfig(
            **QV,
            use_bdlora=BdLoraConfig(
                target_modules_bd_a=["q_proj"], target_modules_bd_b=["v_proj"], nblocks=2
            ),
        ),
        ALONE,
        "use_bdlora",
    ),
    "single tokens": (
        lambda: LoraConfig(**QV, trainable_token_indices=[1, 65]),
        ALL,
        "trainable_token_indices",
    ),
    "aLoRA": (
        lambda: LoraConfig(**QV, alora_invocation_tokens=[1, 2]),
        EVERYWHERE,
        "alora_invocation_tokens",
    ),
    "repeated layers": (
        lambda: LoraConfig(**QV, layer_replication=[(0, 2), (1, 2)]),
        EVERYWHERE,
        "layer_replication",
    ),
    "MonteCLoRA": (
        lambda: LoraConfig(**QV, monteclora_config=MontecloraConfig()),
        EVERYWHERE,
        "monteclora_config",
    ),
    "the head": (
        lambda: LoraConfig(r=2, target_modules=["q_proj", "lm_head"]),
        EVERYWHERE,
        "target_modules",
    ),
    "Megatron's layers": (
        lambda: LoraConfig(**QV, megatron_config={"a": 1}),
        EVERYWHERE,
        "megatron_config",
    ),
    "IA3": (
        lambda: IA3Config(
            target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
        ),
        ALL,
        "type IA3",
    ),
    "tokens alone": (
        lambda: TrainableTokensConfig(token_indices=[1, 65]),
        ALL,
        "type TRAINABLE_TOKENS",
    ),
    "a prompt": (
        lambda: PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
        ALL,
        "type PROMPT_TUNING",
    ),
}


@pytest.mark.parametrize("way", [None, "merged", "alone"])
@pytest.mark.parametrize("name", CONFIGS)
def test_config_is_refused_only_where_unsupported(name, way):
    make, refused, setting = CONFIGS[name]
    if way not in refused:
        adapters.require_supported(make(), way)
        return
    with pytest.raises(RecipeError) as caught:
        adapters.require_supported(make(), way)
    assert setting in str(caught.value) and caught.value.fix and "rank" not in str(caught.value)
    sends_merged = "`vllm_mode: server`" in caught.value.fix
    assert sends_merged == ("merged" not in refused)


def small_model() -> Qwen3ForCausalLM:
    """With biases below the adapters, and embeddings that are not tied."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "head_dim": 16,
    }
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen3Config(
        **sizes, **heads, attention_bias=True, tie_word_embeddings=False, initializer_range=0.2
    )
    return Qwen3ForCausalLM(config)


MERGED = [name for name, (_, refused, _) in CONFIGS.items() if "merged" not in refused]


@pytest.mark.parametrize("name", MERGED)
def test_merged_weights_compute_like_trained_adapter(name):
    model = get_peft_model(small_model(), CONFIGS[name][0]()).train()
    adapters.require_served(model, "merged")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
        ids = torch.arange(24)[None]
        expected = model(input_ids=ids).logits
        before = small_model()(input_ids=ids).logits
        plain = small_model()
        plain.load_state_dict(dict(iter_full_parameters(model, Accelerator(cpu=True))))
        merged = plain(input_ids=ids).logits
    assert (merged - expected).abs().max() < 1e-4 < (before - expected).abs().max()


def test_lora_bias_without_layer_bias_is_not_merged(tiny_model):
    config = LoraConfig(**QV, lora_bias=True)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model), config)
    with pytest.raises(RecipeError, match=r"bias \(`lora_bias`\), and the layer 'q_proj' has none"):
        adapters.require_served(model, "merged")
    adapters.require_served(model, None)


# ------------------------------------------------------------------------------- models from Python


@pytest.mark.parametrize(
    "name", [name for name, (_, refused, _) in CONFIGS.items() if None not in refused]
)
def test_adapter_is_ready_unless_frozen(name):
    model = get_peft_model(small_model(), CONFIGS[name][0](), adapter_name="mine")
    adapters.require_trainable_adapter(model, 0.0)
    model.requires_grad_(False)
    with pytest.raises(RecipeError, match="Nothing of the adapter 'mine' is trainable"):
        adapters.require_trainable_adapter(model, 0.0)


@pytest.fixture(scope="module")
def recording(tiny_model, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("recorded")
    return record(
        folder / "recorded.jsonl", *([make_group(tiny_model, 4, seed)] * 2 for seed in range(6))
    )


def base_of(tiny_model: Path, dtype: torch.dtype = torch.float32) -> Qwen3ForCausalLM:
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=dtype)


@pytest.fixture(scope="module")
def adapter(tiny_model, tmp_path_factory) -> str:
    """A trained adapter on disk: neither A nor B is 0."""
    folder = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(3)
    get_peft_model(base_of(tiny_model), LoraConfig(**QV, init_lora_weights=False)).save_pretrained(
        folder
    )
    return str(folder)


@pytest.fixture(scope="module")
def run(recording):
    """Makes a trainer of up to 4 steps of a model, with a checkpoint after every step."""

    def make(
        model: Any, folder: Path, peft_config=None, optimizers=(None, None), **settings
    ) -> AtroposGRPOTrainer:
        usual = {
            "max_steps": 4,
            "save_strategy": "steps",
            "save_steps": 1,
            "replay_paths": [recording],
        }
        config = AtroposGRPOConfig(**arguments(folder, **(usual | settings)))
        return AtroposGRPOTrainer(
            model, args=config, peft_config=peft_config, optimizers=optimizers
        )

    return make


def trainable(tiny_model, adapter, dtype=torch.float32, **options) -> PeftModel:
    return PeftModel.from_pretrained(
        base_of(tiny_model, dtype), adapter, is_trainable=True, **options
    )


def untied_of(tiny_model: Path) -> Qwen3ForCausalLM:
    model = base_of(tiny_model)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.config.tie_word_embeddings = False
    return model


def two_active(tiny_model, adapter) -> PeftModel:
    model = trainable(tiny_model, adapter)
    model.load_adapter(adapter, "second")
    model.base_model.set_adapter(["default", "second"])
    return model


def with_embeddings(tiny_model, adapter) -> PeftModel:
    model = trainable(tiny_model, adapter)
    model.get_input_embeddings().requires_grad_(True)
    return model


def second_trainable(tiny_model, adapter) -> PeftModel:
    model = trainable(tiny_model, adapter)
    model.load_adapter(adapter, "second", is_trainable=True)
    return model


def with_reference(tiny_model, adapter) -> PeftModel:
    model = trainable(tiny_model, adapter)
    model.load_adapter(adapter, "ref")
    return model


def injected(tiny_model, adapter) -> Qwen3ForCausalLM:
    model = base_of(tiny_model)
    model.add_adapter(LoraConfig(**QV))
    return model


# how the model comes -> (its maker, beta, what is told, the fix)
NOT_READY = {
    "loaded frozen": (
        lambda m, a: PeftModel.from_pretrained(base_of(m), a),
        0.0,
        "Nothing of the adapter 'default' is trainable",
        "is_trainable=True",
    ),
    "loaded frozen, with a reference": (
        lambda m, a: PeftModel.from_pretrained(base_of(m), a),
        0.1,
        "Nothing of the adapter 'default' is trainable",
        "is_trainable=True",
    ),
    "two active": (
        two_active,
        0.0,
        r"2 adapters are active \(default, second\)",
        "model.set_adapter",
    ),
    "the other one trainable": (
        second_trainable,
        0.0,
        "'second' is trainable, but 'default' is the active",
        "set_adap",
    ),
    "another name with a reference": (
        lambda m, a: trainable(m, a, adapter_name="policy"),
        0.1,
        "a copy of the adapter `default`, but 'policy' is trained",
        "without `adapter_name`",
    ),
    "more than the adapter": (
        with_embeddings,
        0.0,
        r"1 parameters outside of the adapter are trainable \(first: '.*embed_tokens\.weight'\), and PEFT does not",
        "`modules_to_save`",
    ),
    "a reference of its own": (
        with_reference,
        0.1,
        "`ref`, and the model has another one",
        "delete_adapter",
    ),
    "added by Transformers": (
        injected,
        0.0,
        "has layers of an adapter, but is no `PeftModel`",
        "`peft_config`",
    ),
    "the name of its folder": (
        lambda m, a: a,
        0.0,
        "is the folder of an adapter, without the model",
        "is_trainable=Tr",
    ),
    "single tokens of a head": (
        lambda m, a: get_peft_model(base_of(m), LoraConfig(**QV, trainable_token_indices=[1, 65])),
        0.0,
        "single tokens of an embedding that is also the head",
        "`modules_to_save`",
    ),
    "mixed": (
        lambda m, a: PeftMixedModel(base_of(m), LoraConfig(**QV)),
        0.0,
        "is a `PeftMixedModel`",
        "without `mixed=True`",
    ),
    "a frozen whole model": (
        lambda m, a: base_of(m).requires_grad_(False),
        0.0,
        r"None of the [\d,]+ parameters of the model is trainable",
        "requires_grad_",
    ),
}


@pytest.mark.parametrize("name", NOT_READY)
def test_untrainable_model_is_refused(tiny_model, adapter, run, tmp_path, name):
    make, beta, told, fix = NOT_READY[name]
    with pytest.raises(RecipeError, match=told) as caught:
        run(make(tiny_model, adapter), tmp_path, beta=beta)
    assert fix in caught.value.fix


@pytest.mark.parametrize("setting", [{"init_lora_weights": "pissa"}, {"bias": "all"}])
def test_reference_of_other_model_is_refused(tiny_model, run, tmp_path, setting):
    with pytest.raises(RecipeError, match=r"and `beta` is 0\.1: the reference would"):
        run(str(tiny_model), tmp_path, LoraConfig(**QV, **setting), beta=0.1)


def in_vain(parameters) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(one.detach().clone()) for one in parameters]


@pytest.mark.parametrize(
    "held",
    [
        lambda parameters: parameters[1:],
        in_vain,
        lambda parameters: [*parameters, *in_vain(parameters[:1])],
    ],
    ids=["one lacking", "copies", "one too many"],
)
def test_optimizer_of_other_parameters_is_refused(tiny_model, adapter, run, tmp_path, held):
    model = trainable(tiny_model, adapter)
    own = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(held(own))
    trainer = run(model, tmp_path, optimizers=(optimizer, None))
    with pytest.raises(
        RecipeError, match="must hold exactly the 8 trainable parameters of the model"
    ):
        trainer.train()


def tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


COMES = {
    "peft_config": lambda m, a: (str(m), LoraConfig(**QV)),
    "get_peft_model": lambda m, a: (get_peft_model(base_of(m), LoraConfig(**QV)), None),
    "from_pretrained": lambda m, a: (trainable(m, a), None),
    "another name": lambda m, a: (trainable(m, a, adapter_name="policy"), None),
    "a second one, frozen": lambda m, a: (with_reference(m, a), None),
    "on the embedding": lambda m, a: (
        str(m),
        LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"]),
    ),
    "on single tokens": lambda m, a: (
        untied_of(m),
        LoraConfig(**QV, trainable_token_indices=[1, 65]),
    ),
    "IA3": lambda m, a: (str(m), CONFIGS["IA3"][0]()),
}


@pytest.mark.parametrize("name", COMES)
def test_adapter_trains_alone_and_resumes_exactly(tiny_model, adapter, run, tmp_path, name):
    model, config = COMES[name](tiny_model, adapter)
    trainer = run(model, tmp_path, config, max_steps=2, save_only_model=True)
    before = tensors(trainer.model)
    active = trainer.model.active_adapter
    trainer.train()
    after = tensors(trainer.model)
    moved = {key for key, value in after.items() if not torch.equal(value, before[key])}
    assert moved and all(f".{active}" in key for key in moved)
    model, config = COMES[name](tiny_model, adapter)
    resumed = run(model, tmp_path, config, max_steps=2)
    resumed._load_from_checkpoint(str(tmp_path / "checkpoint-2"))
    assert all(torch.equal(value, after[key]) for key, value in tensors(resumed.model).items())


# -------------------------------------------------------------------------- resume with a reference


def policy_in(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The trained adapter in a checkpoint, as safetensors has it, by the names of the model's
    parameters."""
    saved = load_file(checkpoint / "adapter_model.safetensors")
    return {name.replace(".weight", ".default.weight"): value for name, value in saved.items()}


def is_in(model: torch.nn.Module, expected: dict[str, torch.Tensor]) -> bool:
    parameters = tensors(model)
    return all(
        torch.equal(parameters[name], value.to(parameters[name].dtype))
        for name, value in expected.items()
    )


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def referenced(request, tiny_model, adapter, run, tmp_path_factory) -> tuple[Path, torch.dtype]:
    """The folder of a run with a reference adapter, of which checkpoint-2 has the best metric."""
    folder, dtype = tmp_path_factory.mktemp("referenced"), request.param
    run(trainable(tiny_model, adapter, dtype), folder, beta=0.1, max_steps=3).train()
    return folder, dtype


def test_resume_loads_policy_and_reference_of_files(referenced, tiny_model, adapter, run, tmp_path):
    folder, dtype = referenced
    trainer = run(trainable(tiny_model, adapter, dtype), tmp_path, beta=0.1, max_steps=3)
    parameters = dict(trainer.model.named_parameters())
    trained = policy_in(folder / "checkpoint-2")
    assert not is_in(trainer.model, trained)
    trainer._load_from_checkpoint(str(folder / "checkpoint-2"))
    assert len(trained) == 8 and is_in(trainer.model, trained)
    reference = load_file(folder / "checkpoint-2" / "ref" / "adapter_model.safetensors")
    assert is_in(
        trainer.model,
        {name.replace(".weight", ".ref.weight"): value for name, value in reference.items()},
    )
    assert all(
        torch.equal(value, reference[name])
        for name, value in load_file(f"{adapter}/adapter_model.safetensors").items()
    )
    now = dict(trainer.model.named_parameters())
    # which optimizer and servers know
    assert all(now[name] is parameter for name, parameter in parameters.items())
    assert {now[name].dtype for name in trained} == {dtype}
    assert {name for name, one in now.items() if one.requires_grad} == trained.keys()


def test_run_with_reference_resumes_as_if_unbroken(referenced, tiny_model, adapter, run, tmp_path):
    folder, dtype = referenced
    resumed = run(trainable(tiny_model, adapter, dtype), tmp_path, beta=0.1, max_steps=3)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert is_in(resumed.model, policy_in(folder / "checkpoint-3"))


def test_best_model_beside_reference_is_saved_one(referenced, tiny_model, adapter, run, tmp_path):
    folder, dtype = referenced
    trainer = run(trainable(tiny_model, adapter, dtype), tmp_path, beta=0.1, max_steps=3)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert is_in(trainer.model, policy_in(tmp_path / "checkpoint-3"))
    trainer.state.best_model_checkpoint = str(folder / "checkpoint-1")
    trainer._load_best_model()
    assert is_in(trainer.model, policy_in(folder / "checkpoint-1"))


def rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


OTHERS: dict[str, tuple[Callable[[Path], PeftModel | str], dict[str, Any], str]] = {
    "other target modules": (
        {"target_modules": ["q_proj"]},
        {},
        "has tensors for the adapter 'default' that",
    ),
    "further target modules": (
        {"target_modules": ["q_proj", "v_proj", "k_proj"]},
        {},
        "lacks tensors of the adapter",
    ),
    "another rank": (
        {"r": 4},
        {},
        r"'default' in other shapes: .* \(\[2, 32\] there, \[4, 32\] here\)",
    ),
    "another alpha": (
        {"lora_alpha": 16},
        {},
        "saved with `lora_alpha: 8`, and this run has `lora_alpha: 16`",
    ),
    "another scaling": (
        {"use_rslora": True},
        {},
        "saved with `use_rslora: False`, and this run has `use_rslora: Tr",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_adapter_of_other_settings_is_not_loaded(referenced, tiny_model, run, tmp_path, name):
    settings, _, told = OTHERS[name]
    trainer = run(str(tiny_model), tmp_path, LoraConfig(**QV | settings))
    before = tensors(trainer.model)
    with pytest.raises(CheckpointError, match=told):
        trainer._load_from_checkpoint(str(referenced[0] / "checkpoint-2"))
    assert is_in(trainer.model, before)


def test_adapter_missing_in_checkpoint_is_named(referenced, tiny_model, adapter, run, tmp_path):
    checkpoint = shutil.copytree(referenced[0] / "checkpoint-2", tmp_path / "checkpoint-2")
    trainer = run(trainable(tiny_model, adapter, adapter_name="policy"), tmp_path)
    with pytest.raises(
        CheckpointError, match=r"lacks the adapter 'policy' .* \(seen: .*: default, ref\)"
    ):
        trainer._load_from_checkpoint(str(checkpoint))
    shutil.rmtree(checkpoint / "ref")
    trainer = run(trainable(tiny_model, adapter, referenced[1]), tmp_path, beta=0.1)
    with pytest.raises(CheckpointError, match=r"lacks the adapter 'ref' .* the same `beta`"):
        trainer._load_from_checkpoint(str(checkpoint))


def test_missing_optimizer_is_named_beside_reference(
    referenced, tiny_model, adapter, run, tmp_path
):
    checkpoint = shutil.copytree(referenced[0] / "checkpoint-2", tmp_path / "checkpoint-2")
    (checkpoint / "optimizer.pt").unlink()
    trainer = run(trainable(tiny_model, adapter, referenced[1]), tmp_path, beta=0.1)
    with pytest.raises(CheckpointError, match=r"but no optimizer\.pt: it was damaged"):
        trainer.train(resume_from_checkpoint=str(checkpoint))


def test_reference_copies_whole_adapter(tiny_model, run, tmp_path):
    config = LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"], init_lora_weights=False)
    trainer = run(get_peft_model(base_of(tiny_model), config), tmp_path, beta=0.1)
    parameters = tensors(trainer.model)
    of_policy = {name: value for name, value in parameters.items() if ".default" in name}
    assert any("lora_embedding_A" in name for name in of_policy)
    assert all(
        torch.equal(value, parameters[name.replace(".default", ".ref")])
        for name, value in of_policy.items()
    )


# ------------------------------------------------------------------------------------------ sharded


@pytest.mark.slow(20)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("zero2", marks=pytest.mark.full),
        "zero3",
        pytest.param("fsdp2", marks=pytest.mark.full),
    ],
)
def test_sharded_resume_with_reference_loads_policy(kind, tiny_model, adapter, recording, tmp_path):
    launch(
        kind,
        2,
        "tests.weights.test_adapters",
        kind,
        str(tiny_model),
        adapter,
        recording,
        str(tmp_path),
    )


def main(kind: str, tiny_model: str, adapter: str, recording: str, folder: str) -> None:
    """One of the processes of `test_sharded_resume_with_reference_loads_policy`."""

    def build(output: str) -> AtroposGRPOTrainer:
        settings = arguments(
            Path(folder, output), max_steps=2, save_strategy="steps", save_steps=1, beta=0.1
        )
        settings |= sharding_arguments(kind) | {
            "per_device_train_batch_size": 4,
            "replay_paths": [recording],
        }
        return AtroposGRPOTrainer(
            trainable(Path(tiny_model), adapter), args=AtroposGRPOConfig(**settings)
        )

    build("first").train()
    forget_sharding()
    trainer = build("second")
    held: dict[str, torch.Tensor] = {}

    class Look(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            named = iter_adapter_parameters(trainer.model, trainer.accelerator)
            held.update((name, tensor.detach().clone()) for name, tensor in named)

    trainer.add_callback(Look())
    trainer.train(resume_from_checkpoint=str(Path(folder, "first", "checkpoint-1")))
    saved = load_file(Path(folder, "first", "checkpoint-1", "adapter_model.safetensors"))
    begun = load_file(Path(adapter, "adapter_model.safetensors"))
    assert held.keys() == saved.keys()
    assert all(torch.equal(value, saved[name].to(value.dtype)) for name, value in held.items())
    assert any(not torch.equal(value, begun[name]) for name, value in saved.items())
    with pytest.raises(
        CheckpointError, match="tensors of the adapter 'default' are not those of its file"
    ):
        require_adapter_loaded(trainer.model, trainer.accelerator, adapter)
