"""Whole parameters come out of every kind of trainer, and gathering them leaves the trainer as it
was.

`main` is what each of two processes does: for every case it trains two steps, gathering after each,
and saves what it saw. One launch per kind of sharding does all the cases, because starting one
takes longer than they do.
"""

import copy
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from peft import LoHaConfig, LoraConfig, get_peft_model, get_peft_model_state_dict
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitNetQuantConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    TrainerCallback,
)
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

from tests.rollout_factory import arguments, load_policy, mixed_batch, record
from tests.sharded import KINDS, forget_sharding, launch, sharding_arguments
from trl_atropos import AtroposGRPOConfig, AtroposGRPOTrainer
from trl_atropos.errors import GatherError
from trl_atropos.protocol import ParameterSpec
from trl_atropos.weights.gather import (
    iter_adapter_parameters,
    iter_full_parameters,
    shapes_of,
    sharding_of,
)
from trl_atropos.weights.lora import _scales_of

ROWS = 16  # of a generation batch
LAYERS = {"r": 4, "target_modules": ["q_proj", "down_proj"]}
CASES: dict[str, dict[str, Any] | None] = {
    "full": None,
    "lora": LAYERS,
    "lora and whole modules": LAYERS
    | {"modules_to_save": ["embed_tokens", "norm"], "ensure_weight_tying": True},
}
ADAPTED = [case for case in CASES if case != "full"]
NAMES = {"plain": "none", "ddp": "ddp", "zero2": "zero1/2", "zero3": "zero3", "fsdp2": "fsdp2"}

# Adam divides small gradients by their own size, which would turn the rounding of a sum in another
# order into a step.
PLAIN_STEPS = {"optim": "sgd", "learning_rate": 0.05, "max_steps": 2}


class Stopped(Exception):
    """The consumer's own failure."""


def make_trainer(
    model: str, recording: str, folder: Path, case: str, **settings: Any
) -> AtroposGRPOTrainer:
    config = AtroposGRPOConfig(
        **arguments(folder, replay_paths=[recording], **PLAIN_STEPS, **settings)
    )
    layers = CASES[case]
    return AtroposGRPOTrainer(model, config, peft_config=LoraConfig(**layers) if layers else None)


# ------------------------------------------------------------------------- in each of the processes


def main(kind: str, model: str, recording: str, folder: str) -> None:
    told = {case: look(kind, model, recording, Path(folder), case) for case in CASES}
    rank = torch.distributed.get_rank()
    if kind == "fsdp2":
        told["fsdp1"] = refusal_of_fsdp1()
    torch.save(told, f"{folder}/{kind}-{rank}.pt")


def look(kind: str, model: str, recording: str, folder: Path, case: str) -> dict[str, Any]:
    """Trains with a gathering after each step, and gathers once more, in every way and on the
    watch."""
    sharded = sharding_arguments(kind) if kind != "plain" else {}
    rows = ROWS if kind == "plain" else ROWS // 2
    trainer = make_trainer(
        model, recording, folder / case, case, **{"per_device_train_batch_size": rows} | sharded
    )
    trainer.add_callback(GatherAfterStep(trainer))
    trainer.train()
    wrapped, accelerator = trainer.model_wrapped, trainer.accelerator
    inner = accelerator.unwrap_model(wrapped)
    before = local_parts(inner)
    told = {
        "sharding": sharding_of(accelerator),
        "processes": accelerator.num_processes,
        "elements here": sum(part.numel() for part in before.values()),
        "raw": gather_naively(inner),
    }
    forward_without_backward(wrapped)
    told["shapes"] = list(shapes_of(wrapped, accelerator).items())
    told["as bfloat16"] = {
        dtype for _, dtype in shapes_of(wrapped, accelerator, torch.bfloat16).values()
    }
    told["full"], told["most bytes"] = watched(
        inner, lambda: iter_full_parameters(wrapped, accelerator)
    )
    halves = dict(clones(iter_full_parameters(wrapped, accelerator, torch.bfloat16)))
    told["converted"] = all(
        halves[name].equal(whole.bfloat16()) for name, whole in told["full"].items()
    )
    told["after exhaustion"] = changed(before, inner)
    told["after an error"] = changed(before, inner, abandon(wrapped, accelerator, by_error=True))
    told["after a close"] = changed(before, inner, abandon(wrapped, accelerator, by_error=False))
    if case == "lora":
        told["adapter"] = dict(clones(iter_adapter_parameters(wrapped, accelerator)))
        told["after the adapter"] = changed(before, inner)
    forget_sharding()
    return told


class GatherAfterStep(TrainerCallback):
    """What a publisher does, and what one does whose server dies: training must not notice."""

    def __init__(self, trainer: AtroposGRPOTrainer):
        self.trainer = trainer

    def on_step_end(self, *_: Any, **__: Any) -> None:
        wrapped, accelerator = self.trainer.model_wrapped, self.trainer.accelerator
        for _name, _tensor in iter_full_parameters(wrapped, accelerator):
            pass
        abandon(wrapped, accelerator, by_error=True)


def abandon(wrapped: torch.nn.Module, accelerator: Accelerator, by_error: bool) -> None:
    """Leaves the iterator where an adapted layer was the last, on all ranks."""
    iterator = iter_full_parameters(wrapped, accelerator)
    try:
        for name, _ in iterator:
            if name.endswith("layers.0.mlp.down_proj.weight"):
                if by_error:
                    raise Stopped
                iterator.close()
    except Stopped:
        pass


def clones(iterator: Any) -> Any:
    return ((name, tensor.clone()) for name, tensor in iterator)


def local_parts(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of what this process holds of each parameter."""
    parts = {}
    for name, parameter in model.named_parameters():
        part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        parts[name] = getattr(parameter, "ds_tensor", part).detach().clone()
    return parts


def changed(before: dict[str, torch.Tensor], model: torch.nn.Module, _: None = None) -> list[str]:
    """Parameters whose part here is not bit for bit what it was, or that lie here as a whole."""
    after = local_parts(model)
    assert list(after) == list(before)
    differing = [name for name in before if not after[name].equal(before[name])]
    whole = [
        name for name, p in model.named_parameters() if hasattr(p, "ds_tensor") and p.data.numel()
    ]
    marked = [
        name for name, module in model.named_modules() if getattr(module, "merged_adapters", None)
    ]
    return differing + whole + marked


def gather_naively(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All parameters at once, adapters apart, by their names in this very model."""
    if any(hasattr(parameter, "ds_tensor") for parameter in model.parameters()):
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            return {
                name: parameter.detach().clone() for name, parameter in model.named_parameters()
            }
    return {
        name: (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter)
        .detach()
        .clone()
        for name, parameter in model.named_parameters()
    }


def forward_without_backward(wrapped: torch.nn.Module) -> None:
    """As when a probe is scored. FSDP2 keeps some parameters whole after it, for a backward that
    never comes."""
    wrapped.eval()
    with torch.no_grad():
        wrapped(input_ids=torch.arange(12)[None])
    if isinstance(wrapped, FSDPModule):
        assert not all(isinstance(parameter, DTensor) for parameter in wrapped.parameters())
    wrapped.train()


def watched(
    model: torch.nn.Module, iterate: Callable[[], Any]
) -> tuple[dict[str, torch.Tensor], int]:
    """What is yielded, and the most bytes beyond the model's that were alive at a yield, save for
    the copies kept."""
    gc.collect()
    # what is there now is looked at no more: only tensors made from here on, and the model's own
    gc.freeze()
    usual = bytes_besides(model, set())
    seen, most = {}, 0
    try:
        for name, tensor in iterate():
            copies = {kept.untyped_storage().data_ptr() for kept in seen.values()}
            beyond = bytes_besides(model, copies) - usual
            # what stays: not a cycle, nor what gloo's thread holds for a moment after a collective
            if beyond > most:
                time.sleep(0.02)
                gc.collect()
                most = max(most, bytes_besides(model, copies) - usual)
            seen[name] = tensor.clone()
            del tensor
    finally:
        gc.unfreeze()
    return seen, most


def bytes_besides(model: torch.nn.Module, copies: set[int]) -> int:
    """Of the model and of all tensors made since the collector was frozen, but those at these
    addresses."""
    tensors = [item for item in gc.get_objects() if isinstance(item, torch.Tensor)]
    tensors += [getattr(parameter, "_local_tensor", parameter) for parameter in model.parameters()]
    plain = [tensor.untyped_storage() for tensor in tensors if not isinstance(tensor, DTensor)]
    return sum(
        {each.data_ptr(): each.nbytes() for each in plain if each.data_ptr() not in copies}.values()
    )


def refusal_of_fsdp1() -> str:
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=1))
    with pytest.raises(GatherError) as refusal:
        iter_full_parameters(torch.nn.Linear(1, 1), accelerator)
    return str(refusal.value)


# -------------------------------------------------------------------------- sharded or not, trained


@pytest.fixture(scope="module")
def recording(tiny_model, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("gather")
    return record(folder / "rollouts.jsonl", mixed_batch(tiny_model, 1), mixed_batch(tiny_model, 2))


SHARDED = [pytest.param(kind, marks=pytest.mark.slow(25)) for kind in KINDS]


@pytest.fixture(scope="module", params=["plain", *SHARDED])
def ranks(request, tiny_model, recording, tmp_path_factory) -> list[dict[str, Any]]:
    """What each process of one kind told."""
    kind, folder = request.param, tmp_path_factory.mktemp(request.param)
    if kind == "plain":
        return [
            {case: look(kind, str(tiny_model), recording, folder, case) for case in CASES}
            | {"kind": kind}
        ]
    launch(kind, 2, "tests.weights.test_gather", kind, str(tiny_model), recording, str(folder))
    return [torch.load(folder / f"{kind}-{rank}.pt") | {"kind": kind} for rank in (0, 1)]


@pytest.fixture(scope="module")
def alone(tiny_model, recording, tmp_path_factory) -> dict[str, dict[str, torch.Tensor]]:
    """For each case, the parameters after one process took the steps and gathered nothing."""
    states = {}
    for case in CASES:
        folder = tmp_path_factory.mktemp("alone")
        trainer = make_trainer(
            str(tiny_model), recording, folder, case, per_device_train_batch_size=ROWS
        )
        trainer.train()
        states[case] = {
            name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()
        }
    return states


def adapted(tiny_model: Path, case: str, raw: dict[str, torch.Tensor]) -> torch.nn.Module:
    """A model in one process, with an adapter, that has the parameters `raw`."""
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(**CASES[case], task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(raw[name])
    return model


def test_processes_have_stated_sharding(ranks):
    kind = ranks[0]["kind"]
    whole = sum(tensor.numel() for tensor in ranks[0]["full"]["raw"].values())
    for told in ranks:
        assert (told["full"]["sharding"], told["full"]["processes"]) == (NAMES[kind], len(ranks))
        expected = whole / 2 if kind in ("zero3", "fsdp2") else whole
        assert told["full"]["elements here"] == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("case", CASES)
def test_names_and_order_match_plain_model(tiny_model, ranks, case):
    plain = [
        (name, (p.shape, torch.float32)) for name, p in load_policy(tiny_model).named_parameters()
    ]
    for told in ranks:
        assert told[case]["shapes"] == plain
        assert [(name, (t.shape, t.dtype)) for name, t in told[case]["full"].items()] == plain


@pytest.mark.parametrize("case", CASES)
def test_training_steps_are_unchanged_by_gathering(ranks, alone, case):
    for told in ranks:
        assert told[case]["raw"].keys() == alone[case].keys()
        for name, reference in alone[case].items():
            torch.testing.assert_close(told[case]["raw"][name], reference, rtol=0, atol=1e-6)


def test_full_parameters_equal_trained_ones(tiny_model, ranks):
    start = dict(load_policy(tiny_model).named_parameters())
    for told in ranks:
        for name, tensor in told["full"]["full"].items():
            assert tensor.equal(told["full"]["raw"][name])
            assert (tensor - start[name]).abs().max() > 1e-5


@pytest.mark.parametrize("case", ADAPTED)
def test_merged_parameters_equal_merge_and_unload(tiny_model, ranks, case):
    start = dict(load_policy(tiny_model).named_parameters())
    for told in ranks:
        merged = dict(
            adapted(tiny_model, case, told[case]["raw"]).merge_and_unload().named_parameters()
        )
        assert merged.keys() == told[case]["full"].keys()
        for name, tensor in told[case]["full"].items():
            assert tensor.equal(merged[name]), name
        trained = [
            name for name, tensor in told[case]["full"].items() if not tensor.equal(start[name])
        ]
        assert {name.split(".")[-2] for name in trained} >= {"q_proj", "down_proj"}
        assert ("model.embed_tokens.weight" in trained) == (case != "lora")


def test_gathered_adapter_is_whole_with_peft_names(tiny_model, ranks):
    for told in ranks:
        state = get_peft_model_state_dict(adapted(tiny_model, "lora", told["lora"]["raw"]))
        assert told["lora"]["adapter"].keys() == state.keys() and "lora_A.weight" in next(
            iter(state)
        )
        assert all(told["lora"]["adapter"][name].equal(tensor) for name, tensor in state.items())


@pytest.mark.parametrize("case", CASES)
def test_model_is_unchanged_however_gathering_ends(ranks, case):
    for told in ranks:
        for end in ("after exhaustion", "after an error", "after a close"):
            assert told[case][end] == [], end
        assert told[case].get("after the adapter", []) == []


@pytest.mark.parametrize("case", CASES)
def test_gathering_holds_one_extra_tensor_at_most(ranks, case):
    for told in ranks:
        largest = max(tensor.nbytes for tensor in told[case]["full"].values())
        one_process_has_no_copies = ranks[0]["kind"] not in ("zero3", "fsdp2") and case == "full"
        assert told[case]["most bytes"] <= (0 if one_process_has_no_copies else largest)


@pytest.mark.parametrize("case", CASES)
def test_tensors_have_requested_dtype(ranks, case):
    for told in ranks:
        assert told[case]["converted"] and told[case]["as bfloat16"] == {torch.bfloat16}


def test_fsdp1_is_refused(ranks):
    if ranks[0]["kind"] != "fsdp2":
        pytest.skip("this launch asks for no FSDP")
    for told in ranks:
        assert "FSDP version 1" in told["fsdp1"]
        assert "`fsdp_version: 2`" in told["fsdp1"]


# ---------------------------------------------------------------------------- adapters of all kinds


SMALL = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16}
DENSE = {"target_modules": ["q_proj", "down_proj"]}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": DENSE,
    "rank-stabilised": DENSE | {"use_rslora": True, "lora_alpha": 32},
    "dora": DENSE | {"use_dora": True},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "embedding, dora": {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True},
    "bias": {"target_modules": ["q_proj"], "lora_bias": True},
    "base's bias": {"target_modules": ["q_proj"], "bias": "lora_only"},
    "experts": {
        "target_modules": ["q_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
}


def make_adapted(
    layers: dict[str, Any], dtype: torch.dtype = torch.float32, tied: bool = False
) -> torch.nn.Module:
    """A model of Qwen's with an adapter that changes something."""
    torch.manual_seed(0)
    if "target_parameters" in layers:
        base = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, **EXPERTS, tie_word_embeddings=tied))
    else:
        base = Qwen2ForCausalLM(Qwen2Config(**SMALL, tie_word_embeddings=tied))  # has biases
    return get_peft_model(
        base.to(dtype), LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM", **layers)
    )


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_variant_merges_like_peft_and_stays_intact(variant, dtype):
    model, accelerator = make_adapted(VARIANTS[variant], dtype), Accelerator(cpu=True)
    before, parameters = state(model), list(model.parameters())
    reference = copy.deepcopy(model).merge_and_unload()
    gathered = dict(clones(iter_full_parameters(model, accelerator)))
    assert list(gathered) == [name for name, _ in reference.named_parameters()]
    assert all(gathered[name].equal(parameter) for name, parameter in reference.named_parameters())
    untouched = copy.deepcopy(model).unload().state_dict()
    assert any(not tensor.equal(untouched[name]) for name, tensor in gathered.items())
    assert list(shapes_of(model, accelerator)) == list(gathered)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())
    assert not any(getattr(module, "_caches", None) for module in model.modules())
    # If anything said that adapters are merged, this would merge none.
    assert all(
        gathered[name].equal(tensor) for name, tensor in model.merge_and_unload().named_parameters()
    )


def test_conversion_spares_float32_of_family():
    fields = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "pad_token_id": 0,
    }
    config = AutoConfig.for_model(
        "ernie4_5_moe", **fields, moe_num_experts=4, moe_k=2, num_attention_heads=4
    )
    model, accelerator = (
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16),
        Accelerator(cpu=True),
    )
    kept = {
        name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32
    }
    gathered = dict(iter_full_parameters(model, accelerator, torch.float16))
    assert (
        kept
        and {name for name, tensor in gathered.items() if tensor.dtype == torch.float32} == kept
    )
    assert {tensor.dtype for name, tensor in gathered.items() if name not in kept} == {
        torch.float16
    }
    shapes = shapes_of(model, accelerator, torch.float16)
    assert shapes == {name: (tensor.shape, tensor.dtype) for name, tensor in gathered.items()}


def test_names_survive_activation_checkpointing():
    """As FSDP2 applies it, that is by modules around the layers."""
    accelerator, plain, wrapped = Accelerator(cpu=True), make_adapted(DENSE), make_adapted(DENSE)
    apply_activation_checkpointing(
        wrapped, check_fn=lambda module: isinstance(module, Qwen2DecoderLayer)
    )
    assert any("_checkpoint_wrapped_module" in name for name, _ in wrapped.named_modules())
    for iterate in (iter_full_parameters, iter_adapter_parameters):
        expected = dict(iterate(plain, accelerator))
        seen = dict(iterate(wrapped, accelerator))
        assert list(seen) == list(expected) != []
        assert all(tensor.equal(expected[name]) for name, tensor in seen.items())


def test_failed_merge_leaves_model_unchanged():
    with pytest.warns(UserWarning):  # `o_proj` has no bias that could take the adapter's
        model = make_adapted({"target_modules": ["q_proj", "o_proj"], "lora_bias": True})
    before, parameters = state(model), list(model.parameters())
    with pytest.raises(RuntimeError, match="Impossible to merge"):
        dict(iter_full_parameters(model, Accelerator(cpu=True)))
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    "layers", [{"target_modules": ["embed_tokens"]}, DENSE | {"modules_to_save": ["embed_tokens"]}]
)
def test_adapter_on_one_of_tied_weights_is_refused(layers):
    with pytest.warns(UserWarning):  # PEFT's own, which is easily missed
        model = make_adapted(layers, tied=True)
    with pytest.raises(
        GatherError, match="`modules_to_save=\\['embed_tokens'\\]` with `ensure_weight_tying=True`"
    ):
        iter_full_parameters(model, Accelerator(cpu=True))


def test_non_lora_adapters_are_refused():
    loha = get_peft_model(
        Qwen2ForCausalLM(Qwen2Config(**SMALL)), LoHaConfig(target_modules=["q_proj"])
    )
    tokens = make_adapted(DENSE | {"trainable_token_indices": [1, 2]})
    for model, seen in ((loha, "LOHA"), (tokens, "TrainableTokens")):
        with pytest.raises(GatherError, match=seen):
            iter_full_parameters(model, Accelerator(cpu=True))


def test_quantised_model_is_refused(tiny_model):
    config = AutoConfig.from_pretrained(tiny_model)
    # a quantiser that needs no library of its own
    config.quantization_config = BitNetQuantConfig().to_dict()
    model = AutoModelForCausalLM.from_pretrained(tiny_model, config=config)
    with pytest.raises(GatherError, match="quantised"):
        iter_full_parameters(model, Accelerator(cpu=True))


def test_lora_scales_are_found_below_wrappers():
    """FSDP's activation checkpointing wraps layers when training begins, under another name for
    each module."""
    adapter = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    model = get_peft_model(Qwen2ForCausalLM(Qwen2Config(**SMALL)), adapter)
    tensors = [
        ParameterSpec.of(n, p.shape, p.dtype)
        for n, p in iter_adapter_parameters(model, Accelerator())
    ]
    before = _scales_of(model, tensors)
    apply_activation_checkpointing(
        model, check_fn=lambda module: isinstance(module, Qwen2DecoderLayer)
    )
    assert _scales_of(model, tensors) == before and set(before.values()) == {2.0}


if __name__ == "__main__":
    main(*sys.argv[1:])
