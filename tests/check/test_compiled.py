"""What compiled layers are estimated to keep, beside what torch's compiler has them keep."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from trl_atropos.batches.compiled_layers import FOR_ALL_LENGTHS
from trl_atropos.check.compiled import LayerCalls, _kept_by_graph, _kept_for_backward

ROWS, LENGTH = 2, 96
AUTOCAST = {None: nullcontext, torch.bfloat16: partial(torch.autocast, "cpu", torch.bfloat16)}


def calls_of_layers(model) -> LayerCalls:
    calls = LayerCalls(model)
    model(input_ids=torch.ones(ROWS, LENGTH, dtype=torch.long), use_cache=False)
    calls.close()
    return calls


@pytest.mark.slow(25)
@pytest.mark.parametrize(
    ("dtype", "autocast", "adapts"),
    [
        (torch.bfloat16, None, False),
        (torch.bfloat16, None, True),
        (torch.float32, torch.bfloat16, False),
    ],
    ids=["bfloat16", "an adapter", "autocast"],
)
def test_estimate_is_what_compiled_layer_keeps(dtype, autocast, adapts, tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=dtype).train()
    if adapts:
        adapter = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, adapter).base_model.model.to(dtype)
    *_, call = calls_of_layers(model)._calls.values()
    within = AUTOCAST[autocast]
    estimated = _kept_by_graph(call, within)
    assert estimated < 0.9 * _kept_for_backward(call, within)
    torch.compiler.reset()  # a class whose layers other tests have compiled too often is left as it is
    call.layer.compile(dynamic=True, options=FOR_ALL_LENGTHS)
    assert estimated == pytest.approx(_kept_for_backward(call, within), rel=0.1)


def test_layer_that_cannot_be_traced_spares_nothing(tiny_model, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    calls = calls_of_layers(model)
    whole = calls.spared_bytes(nullcontext, {})
    assert len(whole) == model.config.num_hidden_layers and min(whole) > 0
    layer_class = type(model.model.layers[0])
    forward = layer_class.forward

    def looks_at_values(self, hidden_states, *args, **kwargs):
        assert hidden_states.sum().item() is not None
        return forward(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(layer_class, "forward", looks_at_values)
    with FakeTensorMode():
        assert calls.spared_bytes(nullcontext, {}) == [0] * len(whole)


def test_layers_that_are_alike_are_looked_at_once(tiny_model):
    calls = calls_of_layers(AutoModelForCausalLM.from_pretrained(tiny_model))
    known = {}
    spared = calls.spared_bytes(nullcontext, known)
    ((kind, size),) = known.items()
    assert spared == [size] * len(spared) and len(spared) > 1
    # for the model's next settings, too
    assert calls.spared_bytes(nullcontext, {kind: size + 1}) == [size + 1] * len(spared)
