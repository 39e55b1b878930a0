"""What a well-formed group may ask for that this trainer does not do. `schema.rows_of` calls each on every group.

One unusual group raises `RejectedGroup` and is dropped; a setting that makes every group wrong raises `RolloutError`.
"""

from typing import Any

import numpy as np

from trl_atropos.errors import RolloutError
from trl_atropos.rollouts.values import RejectedGroup
from trl_atropos.rollouts.wire import Sampling, ScoredGroup

UNKNOWN_TOKENS = "unknown tokens"
TEMPERATURE_TOLERANCE = 1e-6


def _has_content(images: Any) -> bool:
    """Whether anything but empty lists is in `images`, to any depth."""
    left = [images]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif value:
            return True
    return False


def refuse_images(group: ScoredGroup) -> None:
    if _has_content(group.images):
        raise RolloutError(
            f"Environment {group.label} sent `images`, and training is text only: the policy would be trained on "
            "prompts without the pictures they were sampled with. Use an environment that sends no images."
        )


def refuse_placeholder_tokens(group: ScoredGroup) -> None:
    """Atropos sends 0, 1, 2, ... for every sequence when the inference server gives it no token ids."""
    first = group.tokens[0]
    placeholder = np.arange(len(first))
    if len(group.tokens) > 1 and len(first) > 1 and all(np.array_equal(ids, placeholder) for ids in group.tokens):
        raise RolloutError(
            f"Environment {group.label} sent placeholder tokens (0 to {len(first) - 1} in each of "
            f"{len(group.tokens)} sequences) instead of what was sampled: its inference server gives no token ids. "
            "Sample through a managed server with `--openai.server_type vllm`, and unset "
            "ATROPOS_ALLOW_DUMMY_MANAGED_SERVER so that this cannot happen unseen."
        )


def refuse_unknown_tokens(group: ScoredGroup, vocab_size: int | None) -> None:
    """An id beyond the embedding would end the trainer inside torch."""
    of_teachers = [teacher.ids.values for teacher in group.teachers if teacher is not None]
    highest = max((int(ids.max()) for ids in [*group.tokens, *of_teachers] if len(ids)), default=0)
    if vocab_size is not None and highest >= vocab_size:
        raise RejectedGroup(
            UNKNOWN_TOKENS,
            f"environment {group.label} sent token id {highest}, and the model knows {vocab_size} ids (0 to "
            f"{vocab_size - 1})",
        )


def refuse_other_temperature(group: ScoredGroup, temperature: float) -> None:
    """The ratio between trainer and sampler is only right if both divide their logits by the same temperature."""
    for overrides in (group.group_overrides, *group.overrides):
        other = _other_temperature(overrides, temperature)
        if other is not None:
            raise RejectedGroup(
                "temperature",
                f"environment {group.label} sampled at temperature {other} (an override), and the trainer computes "
                f"log-probabilities at temperature {temperature}",
            )
    other = _other_temperature(group.generation_params, temperature)
    if other is not None:
        raise RolloutError(
            f"Environment {group.label} sampled at temperature {other}, and the trainer computes "
            f"log-probabilities at temperature {temperature}. Set `temperature: {other}` in the recipe, or sample at "
            f"{temperature} in the environment."
        )


def _other_temperature(sampling: Sampling | None, temperature: float) -> float | None:
    asked = sampling.temperature if sampling is not None else None
    return None if asked is None or abs(asked - temperature) <= TEMPERATURE_TOLERANCE else asked
