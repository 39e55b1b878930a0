"""Tries a model before training: may rollouts share a row, and up to which length?

The measure is the model's own forward pass of each rollout alone. Every rollout of a packed row
must get the same log-probabilities, and must keep them when any other rollout of the row changes.
That finds states, convolutions and masks that run across the borders in either direction.

A trial cannot find what begins at thousands of tokens, which would take too long to compute. So two
more things are looked up: the window of each mask that the model makes for itself
(`watched_attention`), and rotary embeddings that change with the longest rollout (`longest_alike`).

The trainer calls this on all ranks, which compute the same and come to the same verdict.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trl_atropos.batches.attention_kernels import AttentionShape, watched_shapes
from trl_atropos.batches.compiled_layers import has_experts
from trl_atropos.batches.numerics import float32_precision
from trl_atropos.batches.packed_attention import ATTENTION, FLASH, RowFormat, use_own_attention
from trl_atropos.batches.packing import Layout
from trl_atropos.batches.sharing import RolloutTokens

# Tokens of the rollouts that a model is tried with, in the order of the batch. The row sorts them
# by length, and attention takes those of the same length at once.
TRIED = (17, 24, 5, 17)
SHARED_PROMPT = 12  # tokens of the prompt, when they share one
# tokens: the longest rollout of a trial is longer than any window up to this
WIDEST_TRIED = 128
# between the ids of neighbouring tokens: a prime larger than most steps between special tokens
STRIDE = 7919


class Bound(NamedTuple):
    """
    Limits the nats that log-probabilities may differ by: on any token, and in the mean.

    Rounding goes with the size of the logits. So if those of different tokens are less than one nat
    apart, the bound is smaller in proportion.
    """

    most: float
    mean: float


# If another rollout of the row changes, but no length, the same kernels compute the same numbers.
LEAK = Bound(1e-6, 1e-7)
# With experts they do not: products round in another way if other tokens reach an expert. The keys
# here and below are bytes of a number.
LEAK_OF_EXPERTS = {2: Bound(0.2, 2e-2), 4: Bound(1e-4, 1e-5), 8: LEAK}
# A rollout alone may be computed by other kernels.
ALONE = {2: Bound(0.6, 0.1), 4: Bound(1e-3, 1e-4), 8: Bound(1e-5, 1e-6)}


@torch.no_grad()
def why_padded(model: Any, policy: PreTrainedModel, row_format: RowFormat) -> str | None:
    """
    Returns why rollouts of this model cannot share a row, or `None` if they can.

    Args:
        model: what the trainer calls.
        policy: `model` without wrappers.
    """
    implementation = policy.config._attn_implementation
    if implementation != row_format.attention or implementation not in (ATTENTION, *FLASH):
        return f"its attention is computed by `{implementation}`"
    try:
        with own_attention(policy, row_format) as name, watched_attention(name) as calls:
            rollout, *_ = _tokens(policy, row_format, TRIED)
            _own_logprobs(model, rollout)
        lengths = _lengths_beyond_windows(calls)
        sequences = _tokens(policy, row_format, 2 * lengths)
        reason = None
        if row_format.attention == ATTENTION:
            reason = _why_not_rebuilt(calls)
        if reason is None:
            reason = _why_not_alike(model, policy, row_format, sequences, prompt=1)
        if reason is None:
            reason = _why_not_known(policy.config.get_text_config(), calls)
        return reason
    except Exception as error:  # noqa: BLE001 - whatever a model's own code raises
        return f"packed, it fails ({type(error).__name__}: {error})"


@torch.no_grad()
def why_unshared(model: Any, policy: PreTrainedModel, row_format: RowFormat) -> str | None:
    """Returns why rollouts of this model, which can be packed, cannot share their prompt, or `None`
    if they can."""
    if row_format.attention != ATTENTION:
        return f"its attention is computed by `{row_format.attention}`"
    lengths = [SHARED_PROMPT, *TRIED, *TRIED]
    prompt, *completions = _tokens(policy, row_format, lengths)
    # A row that shares is ordered by its tokens. A rollout that changes keeps its place if its
    # first token stays; in another order, a GPU's kernels would round otherwise.
    number = len(TRIED)
    for completion, other in zip(completions[:number], completions[number:], strict=True):
        other[0] = completion[0]
    rollouts = [torch.cat([prompt, completion]) for completion in completions]
    sharing = row_format._replace(shares=True)
    try:
        return _why_not_alike(model, policy, sharing, rollouts, len(prompt))
    except Exception as error:  # noqa: BLE001 - whatever a model's own code raises
        return f"with a shared prompt, it fails ({type(error).__name__}: {error})"


@torch.no_grad()
def attention_shapes(
    model: Any, policy: PreTrainedModel, row_format: RowFormat
) -> set[AttentionShape]:
    """Returns the shapes of the attention in the layers of a model that can be packed."""
    rollouts = _tokens(policy, row_format, TRIED)
    with watched_shapes() as shapes:
        _packed_logprobs(model, row_format, rollouts, prompt=1)
    return shapes


def longest_alike(config: PreTrainedConfig) -> float:
    """
    Returns how many tokens a rollout may have without changing how others are computed.

    With `rope_type: longrope`, a batch whose longest sequence is longer is rotated by other
    frequencies (Phi-3, PhiMoE). With `dynamic`, the frequencies of a longer sequence stay for later
    ones (`modeling_rope_utils.py`).
    """
    text = config.get_text_config()
    # Some models have no rotary embedding, some have one for each layer type.
    rope = getattr(text, "rope_parameters", None) or {}
    of_layer_types = [value for value in rope.values() if isinstance(value, dict)]
    limits = [math.inf]
    for parameters in of_layer_types or [rope]:
        rope_type = parameters.get("rope_type", "")
        if rope_type == "longrope":
            limits.append(parameters["original_max_position_embeddings"])
        elif "dynamic" in rope_type:
            limits.append(text.max_position_embeddings)
    return min(limits)


# ----------------------------------------------------------------------------------- how it attends


class Call(NamedTuple):
    """Records one call of attention: the window of its mask, and the window that the layer passes
    to it, in tokens. `None` stands for no window."""

    masked: int | None
    passed: int | None
    knows_mask: bool  # the mask is one that Transformers made, or there is none


@contextmanager
def own_attention(policy: PreTrainedModel, row_format: RowFormat) -> Iterator[str]:
    """Makes the model compute as it does without this package. Yields the name of its
    attention."""
    use_own_attention(policy)
    try:
        yield policy.config._attn_implementation
    finally:
        policy.set_attn_implementation(row_format.attention)


@contextmanager
def watched_attention(name: str) -> Iterator[list[Call]]:
    """Collects the calls of the attention registered as `name`. All of them have a mask, which
    Transformers otherwise leaves out of short rows."""
    calls = []
    windows = {}  # of the masks, by their address
    masks = []  # kept, so that no other mask gets the address of one
    make_mask = ALL_MASK_ATTENTION_FUNCTIONS[name]
    attend = ALL_ATTENTION_FUNCTIONS[name]

    def watched_mask(*args: Any, local_size: int | None = None, **options: Any) -> Tensor | None:
        options["allow_is_causal_skip"] = False
        mask = make_mask(*args, local_size=local_size, **options)
        if isinstance(mask, Tensor):
            masks.append(mask)
            windows[mask.data_ptr()] = local_size
        return mask

    def watched(module: Any, query: Any, key: Any, value: Any, *args: Any, **options: Any):
        mask = args[0] if args else options.get("attention_mask")
        address = None if mask is None else mask.data_ptr()
        call = Call(
            masked=windows.get(address),
            passed=options.get("sliding_window"),
            knows_mask=mask is None or address in windows,
        )
        calls.append(call)
        return attend(module, query, key, value, *args, **options)

    AttentionMaskInterface.register(name, watched_mask)
    AttentionInterface.register(name, watched)
    try:
        yield calls
    finally:
        AttentionMaskInterface.register(name, make_mask)
        AttentionInterface.register(name, attend)


def _lengths_beyond_windows(calls: Sequence[Call]) -> list[int]:
    """Returns `TRIED`, with the longest rollout longer than the windows that layers pass, up to
    `WIDEST_TRIED`: a window of 64 tokens makes 24 tokens 72."""
    lengths = list(TRIED)
    longest = lengths.index(max(lengths))
    for call in calls:
        if call.passed and call.passed <= WIDEST_TRIED:
            lengths[longest] = max(lengths[longest], call.passed + 8)
    return lengths


def _why_not_rebuilt(calls: Sequence[Call]) -> str | None:
    """Returns why packed attention, which makes masks of its own, would not make the model's. It
    knows the borders, and the window that a layer passes to it."""
    if not all(call.knows_mask for call in calls):
        return "its layers change the mask of their attention"
    differing = [call for call in calls if call.masked != call.passed]
    if not differing:
        return None
    masked, passed, _ = differing[0]
    return (
        f"{len(differing)} of {len(calls)} layers have a window of {masked} tokens in their mask, "
        f"and pass one of {passed} to their attention"
    )


def _why_not_known(config: PreTrainedConfig, calls: Sequence[Call]) -> str | None:
    """Returns a reason that a few short rollouts may not show: they show too little of it, or
    nothing yet."""
    layers = config.num_hidden_layers
    others = layers - len(calls)
    if calls and others > 0:
        return f"{others} of its {layers} layers mix tokens by other means than attention"
    if getattr(config, "attn_temperature_tuning", None):  # Llama 4's, from thousands of tokens on
        return "it scales attention by a token's place in the row"
    return None


# --------------------------------------------------------------------------------- what it computes


def _tokens(
    policy: PreTrainedModel, row_format: RowFormat, lengths: Sequence[int]
) -> Sequence[Tensor]:
    """Returns sequences of these lengths, whose tokens are all different. The lengths 2 and 1 with
    10,000 tokens in the vocabulary give [7919, 5839] and [3759]."""
    config = policy.config.get_text_config()
    count = sum(lengths)
    numbers = torch.arange(1, 1 + count, device=row_format.device)
    ids = numbers * STRIDE % (config.vocab_size - 1)
    return ids.split(list(lengths))


def _why_not_alike(
    model: Any,
    policy: PreTrainedModel,
    row_format: RowFormat,
    sequences: Sequence[Tensor],
    prompt: int,
) -> str | None:
    """
    Returns why rollouts are not computed in a row as each of them alone, or `None` if they are.

    Args:
        sequences: the rollouts, then as many others of the same lengths. One by one, those take the
            place of a rollout.
        prompt: tokens of each rollout's prompt.
    """
    number = len(sequences) // 2
    rollouts = sequences[:number]
    others = sequences[number:]
    with own_attention(policy, row_format):
        alone = [_own_logprobs(model, rollout, prompt) for rollout in rollouts]
    together = _packed_logprobs(model, row_format, rollouts, prompt)
    leaks = []
    for changed in range(number):
        row = [*rollouts]
        row[changed] = others[changed]
        again = _packed_logprobs(model, row_format, row, prompt)
        for unchanged in range(number):
            if unchanged != changed:
                leaks.append(again[unchanged] - together[unchanged])
    alone_logprobs = torch.cat(alone)
    differences = torch.cat(together) - alone_logprobs
    has_tf32 = float32_precision(row_format.device) == "tf32"
    size = 2 if has_tf32 else row_format.dtype.itemsize
    may_leak = LEAK_OF_EXPERTS[size] if has_experts(policy) else LEAK
    spread = min(1.0, alone_logprobs.std().item())
    if not _are_within(may_leak, torch.cat(leaks), spread):
        return "its layers carry something from one rollout of a row to another"
    if not _are_within(ALONE[size], differences, spread):
        return "a rollout in a row of several is not computed as it is alone"
    return None


def _are_within(bound: Bound, differences: Tensor, spread: float) -> bool:
    """Returns whether the differences keep to the bound, which is scaled by `spread`. NaN does
    not."""
    sizes = differences.abs()
    most = sizes.max().item()
    mean = sizes.mean().item()
    return most <= spread * bound.most and mean <= spread * bound.mean


def _own_logprobs(model: Any, rollout: Tensor, prompt: int = 1) -> Tensor:
    """Returns `_logprobs` of a completion, (C, 2), by the model's own forward pass."""
    logits = _logits(model, input_ids=rollout[None])
    places = torch.arange(prompt, len(rollout), device=rollout.device)
    return _logprobs(logits, rollout, places)


def _packed_logprobs(
    model: Any, row_format: RowFormat, rollouts: Sequence[Tensor], prompt: int
) -> Sequence[Tensor]:
    """Returns the same of each rollout of a row."""
    completions = [len(rollout) - prompt for rollout in rollouts]
    tokens = []
    for rollout in rollouts:
        ids = rollout.cpu().numpy()
        tokens.append(RolloutTokens(prompt, len(ids), ids))
    layout = Layout.of(tokens, prompt, max(completions), row_format)
    padded = torch.nn.utils.rnn.pad_sequence(list(rollouts), batch_first=True)
    row = padded.flatten()[layout.tokens]  # (1, T)
    group = layout.sequence_group
    if group is None:
        logits = _logits(model, input_ids=row, **layout.inputs)
    else:
        own_logits = _logits(model, input_ids=group.own(row), **layout.inputs)
        logits = group.joined(own_logits[None])[0]
    logprobs = _logprobs(logits, row[0], layout.predicts + 1)  # (N, 2)
    in_batch_order = logprobs[layout.columns.argsort()]
    return in_batch_order.split(completions)


def _logits(model: Any, **inputs: Any) -> Tensor:
    """Returns the logits of a row, (T, V)."""
    with torch.compiler.set_stance("force_eager"):
        output = model(**inputs, use_cache=False)
    return output.logits[0]


def _logprobs(logits: Tensor, ids: Tensor, places: Tensor) -> Tensor:
    """
    Returns two log-probabilities in float64, (N, 2), of the tokens at N places of a row: at the
    place before each, where it is predicted, and at its own, which shows what reaches the last
    token of a rollout.

    Args:
        logits: (T, V).
        ids: (T,).
        places: (N,).
    """
    logprobs = logits.double().log_softmax(-1)
    tokens = ids[places]
    predicted = logprobs[places - 1, tokens]
    own = logprobs[places, tokens]
    return torch.stack([predicted, own], dim=1)
