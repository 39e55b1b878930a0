"""Before training, the model is tried: may rollouts share a row, and from which length on may they
not?

The measure is the model's own forward pass of each rollout alone. Every rollout of a packed row
must get the same log-probabilities, and must keep them when any other rollout of the row changes.
That finds states, convolutions and masks that run across the borders in either direction. It cannot
find what begins at thousands of tokens, which would take too long to compute, so two more things
are looked up: the window of each mask that the model makes for itself (`watched_attention`), and
rotary embeddings that change with the longest rollout (`longest_alike`).

The trainer calls this on all ranks, which compute the same and come to the same verdict.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trl_atropos.batches.packing import (
    ATTENTION,
    FLASH,
    How,
    Layout,
    has_experts,
    use_own_attention,
)

# Tokens of the rollouts that a model is tried with, as they come: in the row they stand by length,
# and attention takes those of the same length at once.
TRIED = (17, 24, 5, 17)
SHARED_PROMPT = 12  # tokens, where they share a prompt
# tokens of a window: the longest rollout is made longer than the narrowest one up to this
WIDEST_TRIED = 128
# between the ids of neighbouring tokens: a prime larger than most steps between special tokens
STRIDE = 7919


class Bound(NamedTuple):
    """What log-probabilities may differ by, in nats: on any token, and in the mean. Rounding goes
    with the size of the logits, and so does the bound where those of different tokens are less than
    one nat apart."""

    most: float
    mean: float


# Another rollout of the row has changed, but no length: the same kernels compute the same numbers.
LEAK = Bound(1e-6, 1e-7)
# But with experts, whose products round in another way if other tokens reach them; by the bytes of
# a number.
LEAK_OF_EXPERTS = {2: Bound(0.2, 2e-2), 4: Bound(1e-4, 1e-5), 8: LEAK}
# A rollout alone may be computed by other kernels.
ALONE = {2: Bound(0.6, 0.1), 4: Bound(1e-3, 1e-4), 8: Bound(1e-5, 1e-6)}


@torch.no_grad()
def why_padded(model: Any, policy: PreTrainedModel, how: How) -> str | None:
    """Why rollouts of this model cannot share a row; `None` if they can. `policy` is `model`
    without wrappers."""
    implementation = policy.config._attn_implementation
    if implementation != how.attention or implementation not in (ATTENTION, *FLASH):
        return f"its attention is computed by `{implementation}`"
    try:
        with own_attention(policy, how) as name, watched_attention(name) as calls:
            _own_logprobs(model, _tokens(policy, how, TRIED)[0])
        windows = [call.passed for call in calls if call.passed and call.passed <= WIDEST_TRIED]
        longest = max([*TRIED, *(window + 8 for window in windows)])
        lengths = [longest if length == max(TRIED) else length for length in TRIED]
        return (
            (_why_not_rebuilt(calls) if how.attention == ATTENTION else None)
            or _why_not_alike(model, policy, how, _tokens(policy, how, 2 * lengths), 1)
            or _why_not_known(policy.config.get_text_config(), calls)
        )
    except Exception as error:  # noqa: BLE001 - whatever a model's own code raises
        return f"packed, it fails ({type(error).__name__}: {error})"


@torch.no_grad()
def why_unshared(model: Any, policy: PreTrainedModel, how: How) -> str | None:
    """Why rollouts of this model, which can be packed, cannot share their prompt; `None` if they
    can."""
    if how.attention != ATTENTION:
        return f"its attention is computed by `{how.attention}`"
    prompt, *completions = _tokens(policy, how, [SHARED_PROMPT, *TRIED, *TRIED])
    rollouts = [torch.cat([prompt, completion]) for completion in completions]
    try:
        return _why_not_alike(model, policy, how._replace(shares=True), rollouts, len(prompt))
    except Exception as error:  # noqa: BLE001 - whatever a model's own code raises
        return f"with a shared prompt, it fails ({type(error).__name__}: {error})"


def longest_alike(config: PreTrainedConfig) -> float:
    """
    Returns how many tokens a rollout may have without changing how others are computed.

    With `rope_type: longrope`, a batch whose longest sequence is longer is rotated by other
    frequencies (Phi-3, PhiMoE). With `dynamic`, the frequencies of a longer sequence stay for later
    ones (`modeling_rope_utils.py`).
    """
    text = config.get_text_config()
    # nor has every model a rotary embedding
    parameters = getattr(text, "rope_parameters", None) or {}
    # some have one for each layer type
    of_layers = [each for each in parameters.values() if isinstance(each, dict)]
    limits = [math.inf]
    for each in of_layers or [parameters]:
        if each.get("rope_type") == "longrope":
            limits.append(each["original_max_position_embeddings"])
        elif "dynamic" in each.get("rope_type", ""):
            limits.append(text.max_position_embeddings)
    return min(limits)


# ----------------------------------------------------------------------------------- how it attends


class Call(NamedTuple):
    """One call of attention: the window of its mask, and the one that it is passed, in tokens.
    None: no window."""

    masked: int | None
    passed: int | None
    knows_mask: bool  # whether the mask is one that Transformers made


@contextmanager
def own_attention(policy: PreTrainedModel, how: How) -> Iterator[str]:
    """Has the model compute as it does without this package, by the attention whose name this
    yields."""
    use_own_attention(policy)
    try:
        yield policy.config._attn_implementation
    finally:
        policy.set_attn_implementation(how.attention)


@contextmanager
def watched_attention(name: str) -> Iterator[list[Call]]:
    """Collects the calls of the attention registered as `name`, all with a mask: it is left out of
    short rows."""
    calls: list[Call] = []
    # by address; kept, so that no other one gets the address
    masks: dict[int, tuple[torch.Tensor, int | None]] = {}
    make_mask = ALL_MASK_ATTENTION_FUNCTIONS[name]
    attend = ALL_ATTENTION_FUNCTIONS[name]

    def watched_mask(
        *args: Any, local_size: int | None = None, **options: Any
    ) -> torch.Tensor | None:
        options["allow_is_causal_skip"] = False
        mask = make_mask(*args, local_size=local_size, **options)
        if isinstance(mask, torch.Tensor):
            masks[mask.data_ptr()] = mask, local_size
        return mask

    def watched(module: Any, query: Any, key: Any, value: Any, *args: Any, **options: Any):
        mask = args[0] if args else options.get("attention_mask")
        address = None if mask is None else mask.data_ptr()
        _, window = masks.get(address, (None, None))
        calls.append(Call(window, options.get("sliding_window"), mask is None or address in masks))
        return attend(module, query, key, value, *args, **options)

    AttentionMaskInterface.register(name, watched_mask)
    AttentionInterface.register(name, watched)
    try:
        yield calls
    finally:
        AttentionMaskInterface.register(name, make_mask)
        AttentionInterface.register(name, attend)


def _why_not_rebuilt(calls: Sequence[Call]) -> str | None:
    """Packed attention makes masks of its own, of the borders and of the window that a layer passes
    to it."""
    if not all(call.knows_mask for call in calls):
        return "its layers change the mask of their attention"
    differing = [call for call in calls if call.masked != call.passed]
    if differing:
        masked, passed, _ = differing[0]
        return (
            f"{len(differing)} of {len(calls)} layers have a window of {masked} tokens in their "
            f"mask, and pass one of {passed} to their attention"
        )
    return None


def _why_not_known(config: PreTrainedConfig, calls: Sequence[Call]) -> str | None:
    """What a few short rollouts may not show: too little of it, or nothing yet."""
    if calls and len(calls) < config.num_hidden_layers:
        others = config.num_hidden_layers - len(calls)
        return (
            f"{others} of its {config.num_hidden_layers} layers mix tokens by other means than "
            "attention"
        )
    if getattr(config, "attn_temperature_tuning", None):  # Llama 4's, from thousands of tokens on
        return "it scales attention by a token's place in the row"
    return None


# --------------------------------------------------------------------------------- what it computes


def _tokens(policy: PreTrainedModel, how: How, lengths: Sequence[int]) -> Sequence[torch.Tensor]:
    """Sequences of so many tokens, all different."""
    vocabulary = policy.config.get_text_config().vocab_size - 1
    ids = torch.arange(1, 1 + sum(lengths), device=how.device) * STRIDE % vocabulary
    return ids.split(list(lengths))


def _why_not_alike(
    model: Any, policy: PreTrainedModel, how: How, sequences: Sequence[torch.Tensor], prompt: int
) -> str | None:
    """Tries the first half of the sequences as rollouts with prompts of so many tokens. One by one,
    those of the second half, which are as long, take their places."""
    number = len(sequences) // 2
    rollouts = sequences[:number]
    others = sequences[number:]
    with own_attention(policy, how):
        alone = [_own_logprobs(model, rollout, prompt) for rollout in rollouts]
    together = _packed_logprobs(model, how, rollouts, prompt)
    leaks = []
    for changed in range(number):
        row = [*rollouts[:changed], others[changed], *rollouts[changed + 1 :]]
        again = _packed_logprobs(model, how, row, prompt)
        leaks += [again[i] - together[i] for i in range(number) if i != changed]
    apart = [mine - own for mine, own in zip(together, alone, strict=True)]
    size = 2 if _rounds_to_tf32(how) else how.dtype.itemsize
    spread = min(1.0, torch.cat(alone).std().item())
    if not _within(leaks, LEAK_OF_EXPERTS[size] if has_experts(policy) else LEAK, spread):
        return "its layers carry something from one rollout of a row to another"
    if not _within(apart, ALONE[size], spread):
        return "a rollout in a row of several is not computed as it is alone"
    return None


def _rounds_to_tf32(how: How) -> bool:
    return how.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"


def _within(differences: Sequence[torch.Tensor], bound: Bound, spread: float) -> bool:
    """False for NaN."""
    size = torch.cat(list(differences)).abs()
    return bool(size.max() <= spread * bound.most and size.mean() <= spread * bound.mean)


def _own_logprobs(model: Any, rollout: torch.Tensor, prompt: int = 1) -> torch.Tensor:
    """(C, 2) for the tokens of a completion, by the model's own forward pass; see `_logprobs`."""
    with torch.compiler.set_stance("force_eager"):
        logits = model(input_ids=rollout[None], use_cache=False).logits[0]
    return _logprobs(logits, rollout, torch.arange(prompt, len(rollout), device=rollout.device))


def _packed_logprobs(
    model: Any, how: How, rollouts: Sequence[torch.Tensor], prompt: int
) -> list[torch.Tensor]:
    """The same of each rollout of a row."""
    completions = [len(rollout) - prompt for rollout in rollouts]
    prompts = [prompt] * len(rollouts)
    alike = [0] * len(rollouts)  # where the prompts may be shared at all
    layout = Layout.of(prompts, completions, prompt, max(completions), how, alike)
    row = torch.nn.utils.rnn.pad_sequence(list(rollouts), batch_first=True).flatten()[layout.tokens]
    with torch.compiler.set_stance("force_eager"):
        logits = model(input_ids=row, **layout.inputs, use_cache=False).logits[0]
    logprobs = _logprobs(logits, row[0], layout.predicts + 1)
    padded = logprobs.new_zeros(len(rollouts) * max(completions), 2).index_copy(
        0, layout.columns, logprobs
    )
    columns = padded.view(len(rollouts), -1, 2)
    return [column[:length] for column, length in zip(columns, completions, strict=True)]


def _logprobs(logits: torch.Tensor, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """(N, 2) in float64: of the tokens at N places of a row, at the place before each, where they
    are predicted, and at their own, which shows what reaches the last token of a rollout. Logits
    are (T, V), ids (T,)."""
    logprobs = logits.double().log_softmax(-1)
    tokens = ids[places]
    return torch.stack([logprobs[places - 1, tokens], logprobs[places, tokens]], dim=1)
