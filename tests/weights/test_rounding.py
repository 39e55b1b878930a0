"""How far the gradients of 16-bit weights and adapters are from float64, at the same weights and on
the same rollouts.

In 16 bits a log-probability is about .01 nats off. Where a loss clips or masks, that may put a
token or a rollout on the other side of a bound, and no limit holds for what one of them has in a
gradient of few. Here, every ratio is far from every bound, on one side or on the other, so that
both precisions decide alike.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from tests.rollout_factory import Group, arguments, make_group, record
from tests.trainer.test_reference import batch_loss, trained_tokens
from tests.weights.architectures import FAMILIES, make_model
from trl_atropos import AtroposGRPOConfig, AtroposGRPOTrainer
from trl_atropos.weights.masters import use_masters

ROWS = 16
USUAL = 0.05  # what docs/exactness.md states
# a bound on ratios; nats that an unlikely token's ratio is beyond: exp(5) is 148
EDGE, SHIFT = 10.0, 5.0
CLEAR = {
    "vllm_importance_sampling_clip_min": 0.0,
    "vllm_importance_sampling_clip_max": EDGE,
    "epsilon": 0.9,
}


@dataclass
class Case:
    """`lora` is None where the whole model is trained. `steps` are taken on one batch."""

    settings: dict[str, Any]
    lora: dict[str, Any] | None = None
    steps: int = 1
    family: str | None = None  # of `FAMILIES`; the tiny model otherwise


def corrected(mode: str, **settings: Any) -> dict[str, Any]:
    return {"vllm_importance_sampling_mode": mode, **settings}


ALL = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
CASES = {
    "adapter, dapo": Case(corrected("token_truncate", loss_type="dapo", share_prompts=True), ALL),
    "adapter, cispo, small micro-batches": Case(
        corrected("token_mask", loss_type="cispo", epsilon_high=3.0, max_tokens_per_micro_batch=40),
        ALL,
    ),
    "adapter of rank 1, grpo": Case(
        corrected("sequence_mask", loss_type="grpo"),
        {"r": 1, "lora_alpha": 32, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]},
    ),
    "adapter, sapo with KL, twice": Case(
        corrected("token_truncate", loss_type="sapo", beta=0.1), ALL, steps=2
    ),
    # At the first step and uncorrected: else its weights are products over rollouts, which multiply
    # the rounding.
    "adapter of rank 16, vespo, padded": Case(
        {"loss_type": "vespo", "vllm_importance_sampling_correction": False, "padding_free": False},
        {"r": 16, "lora_alpha": 8, "target_modules": ["o_proj", "down_proj"]},
    ),
    "adapter, luspo of whole sequences, twice": Case(
        corrected("token_mask", loss_type="luspo", importance_sampling_level="sequence"),
        ALL,
        steps=2,
    ),
    "adapter, dr_grpo, accumulated": Case(
        corrected(
            "sequence_truncate",
            loss_type="dr_grpo",
            gradient_accumulation_steps=2,
            gradient_checkpointing=True,
            temperature=0.7,
        ),
        ALL,
    ),
    "adapter of a Llama, bnpo": Case(
        corrected("token_mask", loss_type="bnpo"), ALL, family="Llama"
    ),
    "model, dapo, twice, small micro-batches": Case(
        corrected("token_truncate", loss_type="dapo", max_tokens_per_micro_batch=40), steps=2
    ),
    "GPT-2, cispo": Case(
        corrected("token_mask", loss_type="cispo", epsilon_high=3.0), family="GPT-2"
    ),
}


def rollouts(model: Path) -> list[Group]:
    """Four groups of four. Each third rollout has tokens that its sampler found far less likely
    than the policy."""
    groups = [make_group(model, 4, seed, turns=1 + seed % 2) for seed in range(ROWS // 4)]
    sampled = [row for group in groups for row in group["inference_logprobs"]]
    for row in sampled[::3]:
        row[-3:] = [value - SHIFT for value in row[-3:]]
    return groups


@dataclass
class Step:
    """A step's weights and gradients by name, and these as they came out of the backward passes,
    added in float64."""

    weights: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    came: dict[str, torch.Tensor] = field(default_factory=dict)


class Watched(AtroposGRPOTrainer):
    """Notes each optimizer step."""

    steps: list[Step]

    def training_step(self, model, *args, **kwargs):
        if not self.watching:
            self.steps.append(
                Step({name: value.clone() for name, value in model.state_dict().items()}, {})
            )
            self.watching = [self._watch(name, value) for name, value in trained(model).items()]
        loss = super().training_step(model, *args, **kwargs)
        if self.accelerator.sync_gradients:
            for hook in self.watching:
                hook.remove()
            self.watching = []
            self.steps[-1].gradients = {
                name: value.grad.clone() for name, value in trained(model).items()
            }
        return loss

    def _watch(self, name: str, parameter: torch.nn.Parameter):
        came = self.steps[-1].came
        came[name] = torch.zeros_like(parameter, dtype=torch.float64)

        def add(gradient: torch.Tensor) -> None:
            came[name] += gradient

        return parameter.register_hook(add)


def trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }


def train(case: Case, model: Path, folder: Path, groups: list[Group]) -> Watched:
    accumulated = case.settings.get("gradient_accumulation_steps", 1)
    settings = {
        "max_steps": case.steps,
        "num_iterations": case.steps,
        "per_device_train_batch_size": ROWS // accumulated,
        "learning_rate": 1e-4,
        "max_grad_norm": 0.0,
        "model_init_kwargs": {"dtype": "bfloat16"},
        **CLEAR,
        **case.settings,
    }
    recording = record(folder / "rollouts.jsonl", groups)
    args = AtroposGRPOConfig(**arguments(folder / "run", replay_paths=[recording], **settings))
    adapter = {} if case.lora is None else {"peft_config": LoraConfig(**case.lora)}
    torch.manual_seed(0)
    trainer = Watched(str(model), args=args, **adapter)
    with torch.no_grad():  # at first B is 0, and so is the gradient of A
        for name, parameter in trained(trainer.model).items():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    trainer.steps, trainer.watching = [], []
    trainer.train()
    return trainer


def in_float64(model: Path, case: Case, weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    if case.lora is not None:
        policy = get_peft_model(policy, LoraConfig(**case.lora))
    policy = policy.double().eval()
    policy.load_state_dict({name: value.double() for name, value in weights.items()})
    return policy


def relative_error(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    difference = torch.cat([(found[name] - value).flatten() for name, value in exact.items()])
    norm = torch.cat([value.flatten() for value in exact.values()]).norm()
    return (difference.norm() / norm).item()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_gradients_in_16_bits_stay_near_float64(tiny_model, tmp_path, name):
    case, model = CASES[name], tiny_model
    groups = rollouts(tiny_model)
    if case.family is not None:
        model = tmp_path / "model"
        make_model(FAMILIES[case.family], model)
    trainer = train(case, model, tmp_path, groups)
    first = trainer.steps[0].weights
    without_adapter = {
        name: 0 * value if "lora_B" in name else value for name, value in first.items()
    }
    old, reference = (in_float64(model, case, weights) for weights in (first, without_adapter))
    for step in trainer.steps:
        policy = in_float64(model, case, step.weights)
        loss = batch_loss(
            trained_tokens(groups, policy, old, reference, trainer.args), trainer.args
        )
        parameters = trained(policy)
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        exact = dict(zip(parameters, gradients, strict=True))
        error = relative_error(step.gradients, exact)
        print(f"{name}: {error:.4f}")
        assert 1e-4 < error < USUAL
        assert {gradient.dtype for gradient in step.gradients.values()} == {torch.float32}
        # added over micro-batches in float32
        assert relative_error(step.gradients, step.came) < 1e-6


# What torch's kernels for the CPU would add in 16 bits: an embedding, layer norms, and the biases
# of experts.
@pytest.mark.parametrize("family", ["Qwen3", "GPT-2", "GPT-NeoX", "GPT-OSS"])
def test_gradients_of_many_tokens_add_in_float32(tmp_path, family):
    make_model(FAMILIES[family], tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    exact = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64).double()
    exact.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    if family == "GPT-OSS":
        exact.set_experts_implementation("eager")  # the other ones have no float64
    trainer = Trainer(model, TrainingArguments(str(tmp_path), use_cpu=True, report_to="none"))
    use_masters(trainer)
    trainer.create_optimizer()
    draw = torch.Generator().manual_seed(0)
    rows = torch.randint(250, (64, 32), generator=draw)
    rows[torch.rand(rows.shape, generator=draw) < 0.5] = 32  # as frequent as a space
    for one in (model, exact):
        logits = one(input_ids=rows).logits[:, :-1]
        logprobs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        logprobs.gather(2, rows[:, 1:, None]).mean().neg().backward()
    for (name, parameter), (_, other) in zip(
        model.named_parameters(), exact.named_parameters(), strict=True
    ):
        error = (parameter.grad - other.grad).norm() / other.grad.norm()
        assert error < 0.05, name
