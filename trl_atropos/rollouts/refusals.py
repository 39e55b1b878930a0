"""What a well-formed group may ask for that this trainer does not do. `schema.rows_of` calls each on every group.

One unusual group raises `RejectedGroup` and is dropped; a setting that makes every group wrong raises `RolloutError`.
"""

from typing import Any

from trl_atropos.errors import RolloutError
from trl_atropos.rollouts.wire import RejectedGroup, ScoredGroup

TEMPERATURE_TOLERANCE = 1e-6


def refuse_sft(group: ScoredGroup) -> None:
    asked = [group.group_overrides, *(group.overrides or [])]
    if any(override is not None and override.sft for override in asked):
        raise RejectedGroup("sft", f"environment {group.env_id} asks for a supervised step (the `sft` override)")


def _has_content(images: Any) -> bool:
    return any(map(_has_content, images)) if isinstance(images, list) else bool(images)


def refuse_images(group: ScoredGroup) -> None:
    if _has_content(group.images):
        raise RolloutError(
            f"Environment {group.env_id} sent `images`, and training is text only: the policy would be trained on "
            "prompts without the pictures they were sampled with. Use an environment that sends no images."
        )


def refuse_placeholder_tokens(group: ScoredGroup) -> None:
    """Atropos sends 0, 1, 2, ... for every sequence when the inference server gives it no token ids."""
    first = group.tokens[0]
    same = len(group.tokens) > 1 and all(tokens == first for tokens in group.tokens)
    if same and len(first) > 1 and first == list(range(len(first))):
        raise RolloutError(
            f"Environment {group.env_id} sent placeholder tokens (0 to {len(first) - 1} in each of "
            f"{len(group.tokens)} sequences) instead of what was sampled: its inference server gives no token ids. "
            "Sample through a managed server with `--openai.server_type vllm`, and unset "
            "ATROPOS_ALLOW_DUMMY_MANAGED_SERVER so that this cannot happen unseen."
        )


def refuse_unknown_tokens(group: ScoredGroup, vocab_size: int | None) -> None:
    """An id beyond the embedding would end the trainer inside torch. It comes from the tokenizer of another model."""
    highest = max(map(max, filter(None, group.tokens)), default=0)
    if vocab_size is not None and highest >= vocab_size:
        raise RolloutError(
            f"Environment {group.env_id} sent token id {highest}, and the model knows {vocab_size} ids (0 to "
            f"{vocab_size - 1}): the environment's tokenizer is not the model's. Start the environment on the "
            "tokenizer of the model that is trained (`--env.tokenizer_name`)."
        )


def refuse_other_temperature(group: ScoredGroup, temperature: float) -> None:
    """The ratio between trainer and sampler is only right if both divide their logits by the same temperature."""
    asked = [group.generation_params, group.group_overrides, *(group.overrides or [])]
    for source in asked:
        if source is None or source.temperature is None:
            continue
        if not abs(source.temperature - temperature) <= TEMPERATURE_TOLERANCE:
            raise RolloutError(
                f"Environment {group.env_id} sampled at temperature {source.temperature}, and the trainer computes "
                f"log-probabilities at temperature {temperature}. Set `temperature: {source.temperature}` in the "
                f"recipe, or sample at {temperature} in the environment."
            )
