"""Tensors as a checkpoint has them, made from parameters one at a time: compared with what
transformers saves."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from trl_atropos.weights.checkpoint_plan import CheckpointPlan
from trl_atropos.weights.gather import buffers_of

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
MODELS = {
    "llama": {},
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    # balances its router by a buffer
    "glm4_moe": {"n_routed_experts": 4, "first_k_dense_replace": 1},
    "hrm_text": {},  # stores gate and up, and all of the attention, in one tensor each
}


def make(model_type: str) -> PreTrainedModel:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **SIZES, **heads, **MODELS[model_type])
    )


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("loaded", [False, True], ids=["made", "loaded"])
def test_tensors_equal_saved_checkpoint(model_type, loaded, tmp_path):
    model = make(model_type)
    model.save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    if loaded:
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
    whole = dict([*model.named_parameters(), *buffers_of(model)])
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in whole.items()}
    tensors = dict(CheckpointPlan(model, shapes).tensors(whole.items()))
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
def test_parts_of_one_parameter_are_no_copies(model_type):
    model = make(model_type)
    memory = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    for name, tensor in CheckpointPlan(model).tensors(model.named_parameters()):
        assert tensor.untyped_storage().data_ptr() in memory, name


@pytest.mark.parametrize(("model_type", "most"), [("llama", 1), ("mixtral", 1), ("hrm_text", 4)])
def test_parameters_wait_only_for_one_tensor(model_type, most):
    model = make(model_type)
    taken = []

    def source():
        for name, parameter in model.named_parameters():
            taken.append(name)
            yield name, parameter

    waiting = []
    for _ in CheckpointPlan(model).tensors(source()):
        waiting.append(len(taken))
        taken.clear()
    assert max(waiting) == most


def test_specs_describe_views_of_tensors():
    model = make("mixtral")
    tensors = dict(CheckpointPlan(model).tensors(model.named_parameters()))
    parameters = dict(model.named_parameters())
    for spec in CheckpointPlan(model).specs():
        for piece in spec.pieces:
            view = parameters[spec.name].as_strided(piece.size, piece.stride, piece.offset)
            assert torch.equal(view, tensors.pop(piece.name))
    assert not tensors


def test_joined_parameter_has_no_own_piece():
    specs = {spec.name: spec.pieces for spec in CheckpointPlan(make("hrm_text")).specs()}
    joined = [name for name, pieces in specs.items() if pieces == []]
    assert any("q_proj" in name for name in joined)
    assert not any("embed_tokens" in name for name in joined)


def test_incomplete_tensor_at_end_raises():
    model = make("hrm_text")
    parameters = [(name, value) for name, value in model.named_parameters() if "k_proj" not in name]
    with pytest.raises(ValueError, match=r"q_proj.*never came"):
        list(CheckpointPlan(model).tensors(parameters))


def test_given_shapes_stand_for_absent_parameters():
    model = make("mixtral")
    expected = {
        name: tensor.clone()
        for name, tensor in CheckpointPlan(model).tensors(model.named_parameters())
    }
    whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.data = torch.empty(0)
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in whole.items()}
    for name, tensor in CheckpointPlan(model, shapes).tensors(whole.items()):
        assert torch.equal(tensor, expected.pop(name)), name
    assert not expected
