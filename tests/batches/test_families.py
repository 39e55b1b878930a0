"""Every causal family that both Transformers and vLLM know takes a step, packed and padded, as its
own forward pass computes it, or is refused in a sentence."""

import ast
import importlib.util
import random
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

from tests.batches.families import FAMILIES, LEFT_OUT, WITHOUT_GRADIENT
from tests.rollout_factory import arguments, record, step_logs
from tests.weights.architectures import Family as Saved
from tests.weights.architectures import make_model
from trl_atropos import AtroposGRPOConfig, AtroposGRPOTrainer
from trl_atropos.errors import AtroposTrainingError

PROMPT = 6
LENGTHS = (40, 26, 26, 9)  # tokens; most are longer than the windows of `tests/batches/families.py`
APART = 1e-5  # nats
# In how they attend, route, carry a state, and make logits. All others run with TRL_ATROPOS_FULL=1.
DIFFERENT = (
    *("afmoe", "phimoe", "deepseek_v32", "deepseek_v4", "gemma3n_text", "gemma4_text"),
    *("inkling_text", "llama4_text", "minicpm3", "mamba", "ministral3", "qwen4_exp_text"),
)


class Recording(AtroposGRPOTrainer):
    """Keeps the log-probabilities that the training passes found, by rollout."""

    def _note_scores_of_pass(self, scores):
        micro_batch = self._batch.current_micro_batch
        if micro_batch is not None:
            for index, logprobs in zip(
                micro_batch["row_index"].tolist(), scores[0].detach(), strict=True
            ):
                self.found[index] = logprobs
        super()._note_scores_of_pass(scores)


def save(name: str, folder: Path) -> None:
    """Random weights, and a tokenizer of 259 tokens. Its size belongs to the text model's
    configuration."""
    fields = dict(FAMILIES[name].fields)
    if "text_config" in fields:
        tokens = {"vocab_size": 259, "eos_token_id": 258, "pad_token_id": 257, "bos_token_id": None}
        fields["text_config"] = tokens | fields["text_config"]
    make_model(Saved(name, fields), folder)


def group(folder: Path) -> str:
    draw = random.Random(0)
    prompt = [draw.randrange(256) for _ in range(PROMPT)]
    tokens = [prompt + [draw.randrange(256) for _ in range(length - PROMPT)] for length in LENGTHS]
    masks = [[-100] * PROMPT + row[PROMPT:] for row in tokens]
    rollouts = {"tokens": tokens, "masks": masks, "scores": [0.0, 1.0, 0.4, 0.7]}
    return record(folder / "rollouts.jsonl", [rollouts])


@torch.no_grad()
def own_logprobs(model: torch.nn.Module, prompt: list[int], completion: list[int]) -> torch.Tensor:
    ids = torch.tensor([[*prompt, *completion]])
    logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]


def take_a_step(model: Path, folder: Path, **settings) -> tuple[Recording, dict[str, torch.Tensor]]:
    given = arguments(
        folder,
        replay_paths=[group(folder)],
        per_device_train_batch_size=len(LENGTHS),
        learning_rate=1e-3,
        max_completion_length=max(LENGTHS),
        **settings,
    )
    tokenizer = AutoTokenizer.from_pretrained(model)  # TRL would look for a processor of images
    trainer = Recording(str(model), AtroposGRPOConfig(**given), processing_class=tokenizer)
    trainer.found = {}
    before = {
        name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()
    }
    trainer.train()
    return trainer, before


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize(
    "name",
    [
        name if name in DIFFERENT else pytest.param(name, marks=pytest.mark.full)
        for name in FAMILIES
    ],
)
def test_family_steps_by_its_own_forward_pass(name, packed, tmp_path):
    family = FAMILIES[name]
    save(name, tmp_path / "model")
    own = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    # A load-balancing loss has rollouts padded.
    settings = {"router_aux_loss_coef": 0.0} if packed else family.settings
    run = partial(
        take_a_step, tmp_path / "model", tmp_path / "run", padding_free=packed, **settings
    )
    if family.refused is not None:
        with pytest.raises((AtroposTrainingError, ValueError), match=family.refused):
            run()
        return
    trainer, before = run()
    assert (trainer.computation.packs is not None) == (packed and family.packs)
    assert sorted(trainer.found) == list(range(len(LENGTHS)))
    for index, logprobs in trainer.found.items():
        rollout = trainer._batch.own_rollouts[index]
        expected = own_logprobs(own, rollout.prompt_ids.tolist(), rollout.completion_ids.tolist())
        assert (logprobs[: len(expected)] - expected).abs().max() <= APART
    (logged,) = step_logs(trainer)
    assert 0 < logged["grad_norm"] < float("inf")
    after = dict(trainer.model.named_parameters())
    still = [name for name, parameter in after.items() if parameter.equal(before[name])]
    assert [name for name in still if not any(part in name for part in WITHOUT_GRADIENT)] == []


def classes_of_vllm() -> set[str]:
    """Names of the classes that vLLM's registry lists as models that generate, in small letters."""
    tables = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS")
    path = Path(
        importlib.util.find_spec("vllm").submodule_search_locations[0],
        "model_executor/models/registry.py",
    )
    found = set()
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.Assign) and statement.targets[0].id in tables:
            found |= {key.value.lower() for key in statement.value.keys}
    return found


def test_table_has_families_of_transformers_and_vllm():
    vllm = classes_of_vllm()
    assert {"llamaforcausallm", "gemma3forconditionalgeneration", "olmo2forcausallm"} <= vllm
    known = {name for name, made in CLASSES.items() if made.lower() in vllm}
    assert known - set(FAMILIES) - set(LEFT_OUT) == set()
    assert len(known) > 90
