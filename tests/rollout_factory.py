"""Recorded rollouts in Atropos's wire format, sampled (so the log-probabilities say) from a tiny
byte-level Qwen3.

`make_group` builds one scored group as `GET /batch` delivers it, `record` writes batches for
`ReplaySource`, and `make_trainer` builds a trainer that replays them. The tests of the trainer
import these; the model is the session fixture `tiny_model` of `conftest.py`.
"""

import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM
from trl import GRPOTrainer

from recipes.quickstart.make_model import make_model
from trl_atropos import AtroposGRPOConfig, AtroposGRPOTrainer
from trl_atropos.rollouts.rollout import Rollout
from trl_atropos.rollouts.wire_values import MASKED

SENTINEL = 1.0  # what Atropos writes where there is no log-probability
# nats between the sampler's log-probabilities and the policy's, so that corrections have work to do
NOISE = 0.1

Group = dict[str, Any]
KnownLogprobs = Literal["all", "some", "none", "absent"]


def make_tiny_model(folder: Path) -> Path:
    """A Qwen3 of 30 thousand parameters. Its wide initialisation makes tokens differ in
    probability."""
    make_model(
        str(folder),
        0,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    return folder


@cache
def load_policy(folder: Path) -> Qwen3ForCausalLM:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@cache
def end_token(folder: Path) -> int:
    return load_policy(folder).config.eos_token_id


def make_group(
    model: Path,
    size: int,
    seed: int,
    *,
    turns: int = 1,
    logprobs: KnownLogprobs = "all",
    token_advantages: bool = False,
    **fields: Any,
) -> Group:
    """
    One scored group of `size` sequences that share a prompt.

    Args:
        turns: how many trained stretches a sequence has, with masked feedback of the environment
        between them. logprobs: `"some"` has the sentinel at a third of the trained tokens, `"none"`
        everywhere, `"absent"` has no
            `inference_logprobs` at all.
        token_advantages: whether the environment sends `advantages`.
        fields: further fields of the group, or others in place of those made here.
    """
    rng = random.Random(seed)
    prompt = [rng.randrange(256) for _ in range(rng.randint(3, 7))]
    tokens, masks = zip(*(_sequence(rng, prompt, turns, end_token(model)) for _ in range(size)))
    group: Group = {
        "tokens": list(tokens),
        "masks": list(masks),
        "scores": [round(rng.random(), 3) for _ in range(size)],
        "env_id": 0,
    }
    if logprobs != "absent":
        missing = {"all": 0.0, "some": 1 / 3, "none": 1.0}[logprobs]
        group["inference_logprobs"] = [
            _sampler_logprobs(rng, model, *sequence, missing) for sequence in zip(tokens, masks)
        ]
    if token_advantages:
        group["advantages"] = [[round(rng.gauss(0, 1), 3) for _ in sequence] for sequence in tokens]
    return group | fields


def _sequence(
    rng: random.Random, prompt: list[int], turns: int, end: int
) -> tuple[list[int], list[int]]:
    tokens, mask = list(prompt), [MASKED] * len(prompt)
    for turn in range(turns):
        said = [rng.randrange(256) for _ in range(rng.randint(2, 9))] + [end]
        feedback = (
            [rng.randrange(256) for _ in range(rng.randint(1, 4))] if turn < turns - 1 else []
        )
        tokens += said + feedback
        mask += said + [MASKED] * len(feedback)
    return tokens, mask


def _sampler_logprobs(
    rng: random.Random, model: Path, tokens: list[int], mask: list[int], missing: float
) -> list[float]:
    return [
        SENTINEL if m == MASKED or rng.random() < missing else min(0.0, value + rng.gauss(0, NOISE))
        for m, value in zip(mask, policy_logprobs(model, tuple(tokens)))
    ]


@cache  # most tests use the same few groups
@torch.no_grad()
def policy_logprobs(model: Path, tokens: tuple[int, ...]) -> list[float]:
    """Of each token of a sequence; 0 for the first one, which nothing stands before."""
    logits = load_policy(model)(torch.tensor([tokens])).logits[0, :-1]
    following = torch.tensor(tokens[1:])[:, None]
    return [0.0, *logits.log_softmax(-1).gather(1, following)[:, 0].tolist()]


def make_rollout(prompt: np.ndarray, completion: np.ndarray, **fields: Any) -> Rollout:
    """A rollout of one trained stretch, with a score of its own."""
    usual = {
        "mask": np.ones(len(completion), bool),
        "logprobs": np.full(len(completion), -1, np.float32),
        "score": 1.0,
        "group_mean": 0.0,
        "group_std": 1.0,
        "token_advantages": None,
        "zero_advantage": False,
        "env_id": 0,
        "group": 0,
    }
    return Rollout(prompt.astype(np.int32), completion.astype(np.int32), **usual | fields)


def uniform_batch(model: Path, size: int, groups: int, seed: int, **options: Any) -> list[Group]:
    """`groups` groups of `size` sequences, single and multi-turn in alternation."""
    return [
        make_group(model, size, 100 * seed + i, turns=1 + i % 2, **options) for i in range(groups)
    ]


def mixed_batch(model: Path, seed: int = 0) -> list[Group]:
    """16 sequences with everything that rollouts may bring: sizes 4 and 8, holes, advantages,
    unknown log-probs."""
    return [
        make_group(model, 4, 100 * seed, turns=2, logprobs="some"),
        make_group(model, 8, 100 * seed + 1, turns=3, token_advantages=True),
        make_group(model, 4, 100 * seed + 2, logprobs="absent"),
    ]


def record(path: Path, *batches: Sequence[Group]) -> str:
    """Writes the batches to `path`, a JSON lines file. Returns it in the form `replay_paths`
    takes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps({"batch": list(batch)}) + "\n" for batch in batches)
    return str(path)


def arguments(folder: Path, **settings: Any) -> dict[str, Any]:
    """Arguments that TRL's configuration and ours have in common, for a short run on the CPU that
    logs every step."""
    usual = {
        "output_dir": str(folder),
        "max_steps": 1,
        "per_device_train_batch_size": 8,
        "learning_rate": 2e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "max_completion_length": 16,
    }
    return usual | settings


class AsDrawnConfig(AtroposGRPOConfig):
    """With the micro-batches that TRL draws, whatever the loss."""

    loss_depends_on_micro_batches = True


class PaddedTrainer(AtroposGRPOTrainer):
    """With the micro-batches that TRL draws, padded as TRL does."""

    _prepare_inputs = GRPOTrainer._prepare_inputs

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        scores = GRPOTrainer._get_per_token_logps_and_entropies(self, *args, **kwargs)
        self._note_scores_of_pass(scores)
        return scores


def make_trainer(
    model: Path,
    folder: Path,
    *batches: Sequence[Group],
    callbacks: list | None = None,
    config_class: type[AtroposGRPOConfig] = AtroposGRPOConfig,
    **settings: Any,
) -> AtroposGRPOTrainer:
    """A trainer that replays `batches`, with `folder` for its recording and its output."""
    recording = record(folder / "rollouts.jsonl", *batches)
    config = config_class(**arguments(folder / "run", replay_paths=[recording], **settings))
    return AtroposGRPOTrainer(str(model), args=config, callbacks=callbacks)


def step_logs(trainer: Any) -> list[dict[str, Any]]:
    """What was logged at each optimizer step."""
    return [entry for entry in trainer.state.log_history if "loss" in entry]
