"""What a model is taught before it trains. `tests/batches/test_trial.py` has what is silenced."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from tests.rollout_factory import make_trainer, uniform_batch
from trl_atropos.batches import packed_attention
from trl_atropos.batches.compiled_layers import compile_layers
from trl_atropos.batches.packing import Layout
from trl_atropos.batches.sharing import RolloutTokens
from trl_atropos.weights.model_setup import checkpoint_layers, is_attention, prepare_model

ROLLOUTS = (40, 25, 9)  # tokens


class CountedAttention(TorchDispatchMode):
    """Counts how often attention is computed, also by kernels that compiled layers call."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.calls += is_attention(operator)
        return operator(*args, **(kwargs or {}))


def gradients(model, row_format, options: dict | None) -> tuple[int, list[torch.Tensor]]:
    """Returns how often attention was computed in a forward and a backward pass, and the gradients
    of all weights."""
    model.gradient_checkpointing_disable()
    if options is not None:
        checkpoint_layers(model, options)
    ids = torch.arange(sum(ROLLOUTS), device=row_format.device) % 250
    rollouts = []
    for part in ids.cpu().split(ROLLOUTS):
        rollouts.append(RolloutTokens(1, len(part), part.numpy()))
    layout = Layout.of(rollouts, 1, max(ROLLOUTS), row_format)
    model.zero_grad()
    with CountedAttention() as counted:
        logits = model(input_ids=ids[None], use_cache=False, **layout.inputs).logits
        logits.float().log_softmax(-1)[0, :, 7].sum().backward()
    return counted.calls, [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow(20))])
@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.float32),
        # in 32 bits, torch has no kernel for GPUs that knows groups of heads
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
def test_selective_checkpointing_attends_once(device, dtype, compiled, tiny_model):
    """Checkpointed layers attend again in the backward pass. With `selective` they do not, and the
    gradients stay the same, bit for bit."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=dtype).to(device).train()
    prepare_model(model, warn=False)
    packed_attention.use_packed_attention(model)
    row_format = packed_attention.RowFormat.of(model, torch.device(device), None, 1)
    if compiled:
        compile_layers(model)
    usual, expected = gradients(model, row_format, None)
    assert usual >= model.config.num_hidden_layers  # of torch's attention, one call a rollout
    calls = {}
    for name, options in {"plain": {}, "selective": {"selective": True}}.items():
        calls[name], found = gradients(model, row_format, options)
        for mine, other in zip(found, expected, strict=True):
            assert torch.equal(mine, other)
    assert calls == {"plain": 2 * usual, "selective": usual}


def test_selective_checkpointing_is_refused_where_it_cannot_be(tiny_model, tmp_path):
    options = {"selective": True, "use_reentrant": True}
    settings = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": options}
    with pytest.raises(ValueError, match="`selective`, which needs `use_reentrant: false`"):
        make_trainer(tiny_model, tmp_path, uniform_batch(tiny_model, 4, 4, 0), **settings)
