"""Rollouts end to end in one row, so that nothing is computed on padding.

A micro-batch of TRL's, (B, P + C) with padding on both sides, becomes one row of T tokens whose
positions begin anew with every rollout, and the scores go back to their columns. Attention stops at
the borders between rollouts: on GPUs in one kernel for variable lengths (16 bits), elsewhere by
torch's own attention, rollout by rollout. Rollouts with the same prompt may share it: it stands in
the row once, and the keys and values of all of them begin with its own.

Not every model can be packed: layers that carry a state from token to token run across borders. So
a model is tried
before the first batch (`trial.py`), and padded as before (`micro_batches.without_padding`) if it
    fails.
"""

import inspect
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer

from trl_atropos.batches.micro_batches import Scores
from trl_atropos.rollouts.rollout import Rollout

# `attn_implementation` of a model that is packed; as `sdpa` for any other input
ATTENTION = "sdpa_packed"
FLASH = ("flash_attention_2", "flash_attention_3")  # these find the borders by themselves
VARLEN = frozenset(inspect.signature(varlen_attn).parameters)  # torch's versions differ in them
# What some models pass to their attention beside query, key and value, which changes what it
# computes: which keys a query sees, what is added to its scores, and a cap on them.
NOT_PACKED = ("indices", "block_indices", "position_bias", "s_aux", "softcap")
# of the tokens of a row: as many are not computed because rollouts share prompts
WORTH_SHARING = 1 / 8
# parameters: below, a run may end before it has won back the time of compiling
WORTH_COMPILING = 50_000_000
# Else a norm's gradient is compiled in one way for long rows and in another for short ones, of half
# a dozen lengths: a row of new length would stop training for ten seconds.
FOR_ALL_LENGTHS = {"triton.mix_order_reduction_non_strict_mode": True}
Ints = Sequence[int] | np.ndarray


class Layout(NamedTuple):
    """Where the tokens of a padded micro-batch stand in what the model computes: in R rows of T
    tokens, which is one row if they are packed. Indices are int64 on the model's device."""

    tokens: torch.Tensor  # (R, T), into the flattened (B, P + C)
    scored: torch.Tensor  # (R, T): 1 where a token of a completion stands
    # (N,), into the flattened rows: the token before each token of a completion
    predicts: torch.Tensor
    columns: torch.Tensor  # (N,), into the flattened (B, C)
    inputs: dict[str, Any]  # what the model gets beside the rows

    @classmethod
    def of(
        cls,
        prompts: Ints,
        completions: Ints,
        prompt_width: int,
        width: int,
        how: "How",
        alike: Ints | None = None,
    ) -> "Layout":
        """
        Args:
            prompts: tokens of each prompt, at least 1; `completions`: of each completion.
            prompt_width: P; `width`: C.
            alike: a number for each rollout, the same for those with the same prompt. They share it
            where that pays.
        """
        prompts = np.asarray(prompts)
        whole = prompts + completions
        givers, giver_of, shared = _sharing(prompts, whole, alike if how.shares else None)
        # By length, because attention takes neighbours of the same lengths at once.
        order = np.lexsort((whole, shared))
        # Parts of the row: shared prompts without their last token, then what else there is of each
        # rollout.
        rollouts = np.append(givers, order)
        shared = np.append(0 * givers, shared[order])
        lengths = np.append(prompts[givers] - 1, whole[order] - shared[len(givers) :])
        begins = lengths.cumsum() - lengths
        part = np.repeat(np.arange(len(lengths)), lengths)
        rollout = rollouts[part]
        position = np.arange(len(part)) - (begins - shared)[part]
        column = position - prompts[rollout]  # of the completion; below 0 in the prompt
        tokens = rollout * (prompt_width + width) + prompt_width + column
        scored = np.flatnonzero(column >= 0)
        columns = (rollout * width + column)[scored]
        tail = -len(tokens) % how.multiple  # tokens of no rollout, which fill the row
        if tail:
            tokens, position = (np.append(array, np.arange(tail)) for array in (tokens, position))
            begins = np.append(begins, len(part))
            lengths = np.append(lengths, tail)
            shared = np.append(shared, 0)
        row = np.zeros(len(tokens), dtype=np.int64)
        row[scored] = 1
        keys = np.zeros(0, dtype=np.int64)
        if len(givers):
            giver_of = np.concatenate(
                [np.arange(len(givers)), giver_of[order], [0] * bool(tail)]
            ).astype(int)
            keys = _keys(begins, lengths, shared, begins[giver_of])
        # One copy to the device: each would have the device wait for the host.
        parts = torch.from_numpy(
            np.concatenate([tokens, row, position, scored - 1, columns, keys])
        ).to(how.device)
        sizes = [len(row)] * 3 + [len(scored)] * 2 + [len(keys)]
        tokens, row, position, predicts, columns, keys = parts.split(sizes)
        inputs = how.inputs(position[None], lengths, keys if len(givers) else None, shared)
        return cls(tokens[None], row[None], predicts, columns, inputs)

    @classmethod
    def padded(
        cls, prompt_mask: torch.Tensor, completion_mask: torch.Tensor, multiple: int = 1
    ) -> "Layout":
        """
        One row for each rollout, which begins in its first column: the position of a token is its
        column, also for models that learn positions. (TRL pads prompts on the left, and passes no
        positions.)

        Args:
            prompt_mask: (B, P), ones on the right; `completion_mask`: (B, C), ones on the left.
            multiple: of the width of the rows.
        """
        count, prompt_width = prompt_mask.shape
        width = completion_mask.size(1)
        prompts = prompt_mask.sum(1, keepdim=True)
        lengths = prompts + completion_mask.sum(1, keepdim=True)
        longest = -(-int(lengths.max()) // multiple) * multiple
        positions = torch.arange(longest, device=prompt_mask.device).expand(count, -1)
        inside = positions < lengths
        rollouts = torch.arange(count, device=prompt_mask.device)[:, None]
        column = positions - prompts  # of the completion; below 0 in the prompt
        tokens = rollouts * (prompt_width + width) + prompt_width + column
        # padding repeats the first token, which the mask hides
        tokens = tokens.where(inside, tokens[:, :1])
        scored = inside & (column >= 0)
        predicts = scored.flatten().nonzero()[:, 0] - 1
        columns = (rollouts * width + column)[scored]
        return cls(tokens, scored.long(), predicts, columns, {"attention_mask": inside.long()})


def alike(rollouts: Sequence[Rollout]) -> np.ndarray:
    """(B,): a number for each rollout, the same for those with the same prompt."""
    numbers: dict[bytes, int] = {}
    return np.array(
        [numbers.setdefault(rollout.prompt_ids.tobytes(), len(numbers)) for rollout in rollouts]
    )


def _sharing(prompts: np.ndarray, whole: np.ndarray, alike: Ints | None) -> tuple[np.ndarray, ...]:
    """The rollouts whose prompt others take; for each rollout, which of these it takes from, and
    how many tokens."""
    nobody = np.zeros(0, dtype=np.int64), np.zeros_like(prompts), np.zeros_like(prompts)
    if alike is None:
        return nobody
    _, first, group, number = np.unique(
        alike, return_index=True, return_inverse=True, return_counts=True
    )
    gives = (number > 1) & (prompts[first] > 1)
    # The last token of a prompt predicts another token in each rollout, and stays with it.
    shared = np.where(gives[group], prompts - 1, 0)
    givers = first[gives]
    if shared.sum() - shared[givers].sum() < WORTH_SHARING * whole.sum():
        return nobody
    return givers, np.where(gives, gives.cumsum() - 1, 0)[group], shared


def _keys(
    begins: np.ndarray, lengths: np.ndarray, shared: np.ndarray, prompts: np.ndarray
) -> np.ndarray:
    """Where in the row the keys of each part are: first the `shared` tokens of a prompt that begins
    at `prompts`."""
    numbers = lengths + shared
    part = np.repeat(np.arange(len(numbers)), numbers)
    key = np.arange(len(part)) - (numbers.cumsum() - numbers)[part]
    return np.where(key < shared[part], prompts[part], (begins - shared)[part]) + key


class How(NamedTuple):
    """What a packed row is computed with."""

    attention: str  # `attn_implementation`
    device: torch.device
    dtype: torch.dtype
    multiple: int = 1  # of the row's length
    shares: bool = False  # prompts among rollouts

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        device: torch.device,
        autocast: torch.dtype | None,
        multiple: int,
    ) -> "How":
        dtype = autocast or next(parameter.dtype for parameter in model.parameters())
        return cls(model.config._attn_implementation, device, dtype, multiple)

    def inputs(
        self,
        positions: torch.Tensor,
        lengths: np.ndarray,
        keys: torch.Tensor | None = None,
        shared: Any = 0,
    ) -> dict[str, Any]:
        """What the model gets beside the row: names of Transformers' own for rows of several
        sequences. `keys` are the places of all parts' keys in the row, if some of a part are
        `shared` ones that stand elsewhere."""
        inputs: dict[str, Any] = {"position_ids": positions, "attention_mask": None}
        if keys is not None:
            inputs["rollout_keys"] = keys
        # of queries and of keys
        numbers = torch.from_numpy(np.stack([lengths, lengths + shared]).astype(np.int32))
        longest = numbers.amax(1).tolist()
        if self.attention == ATTENTION:
            # A mask of four dimensions is taken as it is: none is made, which would wait for the
            # device.
            inputs["attention_mask"] = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)
            if self.device.type != "cuda" or self.dtype not in (torch.float16, torch.bfloat16):
                return inputs | {"rollout_lengths": numbers}
            # Few different numbers, each of which may be compiled anew.
            longest = [1 << (number - 1).bit_length() for number in longest]
        borders = torch.nn.functional.pad(numbers.cumsum(1, dtype=torch.int32), (1, 0)).to(
            self.device
        )
        for side, border, most in zip("qk", borders, longest, strict=True):
            inputs |= {f"cu_seq_lens_{side}": border, f"max_length_{side}": most}
        return inputs


def score_packed(
    forward: Callable[..., Scores], model: Any, ids: torch.Tensor, keep: int, layout: Layout
) -> Scores:
    """
    Scores a padded micro-batch as one row.

    Args:
        forward: TRL's `_get_per_token_logps_and_entropies`.
        ids: (B, P + C).
        keep: C.

    Returns:
        Log-probabilities and entropies, (B, C) each, 0 on padding, and no auxiliary loss.
    """

    def packed(input_ids, attention_mask, **options):
        return model(input_ids=input_ids, **layout.inputs, **options)

    row = ids.flatten()[layout.tokens]
    # TRL scores what its mask leaves, which here the model does not see.
    logprobs, entropies, _ = forward(packed, row, layout.scored, row.size(1) - 1)

    def back(values: torch.Tensor | None) -> torch.Tensor | None:
        if values is None:
            return None
        padded = values.new_zeros(len(ids) * keep).index_copy(
            0, layout.columns, values[0, layout.predicts]
        )
        return padded.view(len(ids), keep)

    return back(logprobs), back(entropies), None


def score_all(
    forward: Callable[..., Scores],
    model: Any,
    ids: torch.Tensor,
    mask: torch.Tensor,
    keep: int,
    micro_batches: Sequence[slice],
    how: How,
    alike: np.ndarray | None = None,
) -> Scores:
    """As `score_packed`, for each micro-batch of a batch whose attention mask (B, P + C) is
    given."""
    widths = ids.size(1) - keep, keep
    lengths = torch.stack([part.sum(1) for part in mask.split(widths, dim=1)]).cpu().numpy()
    layouts = [
        Layout.of(*lengths[:, part], *widths, how, None if alike is None else alike[part])
        for part in micro_batches
    ]
    scored = [
        score_packed(forward, model, ids[part], keep, layout)
        for part, layout in zip(micro_batches, layouts)
    ]
    logprobs, entropies, _ = zip(*scored)
    return torch.cat(logprobs), torch.cat(entropies) if entropies[0] is not None else None, None


# ---------------------------------------------------------------------------------------- attention


def use_packed_attention(model: PreTrainedModel) -> None:
    """Has a model that computes torch's attention stop at the borders of packed rollouts."""
    if model.config._attn_implementation == "sdpa":
        AttentionInterface.register(ATTENTION, attend)
        AttentionMaskInterface.register(ATTENTION, sdpa_mask)
        model.set_attn_implementation(ATTENTION)


def use_own_attention(model: PreTrainedModel) -> None:
    """Undoes `use_packed_attention`. Some families choose keys themselves only where their
    attention is named `sdpa` (DeepSeek-V3.2, GLM-5): under another name they compute another
    model."""
    if model.config._attn_implementation == ATTENTION:
        model.set_attn_implementation("sdpa")


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    rollout_keys: torch.Tensor | None = None,
    rollout_lengths: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Query: (1, heads, T, head_dim). Returns (1, T, heads, head_dim), and no weights. The first
    five arguments have the names of Transformers' own functions for attention, because some models
    pass them by name."""
    if rollout_lengths is None and cu_seq_lens_q is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if changed := [name for name in NOT_PACKED if options.get(name) is not None]:
        raise NotImplementedError(
            f"its attention takes `{changed[0]}`, which packed rollouts do not have"
        )
    if rollout_keys is not None:
        key, value = (_SharedKeys.apply(tensor, rollout_keys) for tensor in (key, value))
    if rollout_lengths is not None:
        return _each_rollout(module, query, key, value, rollout_lengths, **options), None
    return _varlen(query, key, value, cu_seq_lens_q, **options), None


class _SharedKeys(torch.autograd.Function):
    """`index_select` along the row, (1, heads, T, head_dim). A shared prompt's gradient is summed
    over its rollouts in float32: torch would round it to 16 bits after each of them."""

    @staticmethod
    def forward(ctx, row, places):
        ctx.save_for_backward(places)
        ctx.length = row.size(2)
        return row.index_select(2, places)

    @staticmethod
    def backward(ctx, gradient):
        (places,) = ctx.saved_tensors
        exact = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        shape = (*gradient.shape[:2], ctx.length, gradient.size(3))
        sums = exact.new_zeros(shape).index_add_(2, places, exact)
        return sums.to(gradient.dtype), None


@torch.compiler.disable
def _each_rollout(
    module, query, key, value, lengths, sliding_window=None, **options
) -> torch.Tensor:
    """Rollouts of the same lengths that stand side by side are a batch."""
    runs = [(*pair, len(list(same))) for pair, same in groupby(zip(*lengths.tolist()))]
    of_queries, of_keys = ([run[side] * run[2] for run in runs] for side in (0, 1))
    parts = zip(
        query.split(of_queries, dim=2), key.split(of_keys, dim=2), value.split(of_keys, dim=2)
    )
    attended = []
    for (length, key_length, number), part in zip(runs, parts, strict=True):
        batch = (tensor[0].unflatten(1, (number, -1)).transpose(0, 1) for tensor in part)
        mask = _mask(length, key_length, sliding_window, query.device)
        attended.append(sdpa_attention_forward(module, *batch, mask, **options)[0].flatten(0, 1))
    return (attended[0] if len(attended) == 1 else torch.cat(attended))[None]


def _mask(
    length: int, key_length: int, sliding_window: int | None, device: torch.device
) -> torch.Tensor | None:
    """None: each query sees the keys up to its own."""
    narrow = sliding_window is not None and key_length > sliding_window
    if length == key_length and not narrow:
        return None
    distance = torch.arange(key_length - length, key_length, device=device)[:, None]
    distance = distance - torch.arange(key_length, device=device)
    return ((distance >= 0) & (distance < (sliding_window if narrow else key_length)))[None, None]


def _varlen(
    query,
    key,
    value,
    borders,
    cu_seq_lens_k,
    max_length_q,
    max_length_k,
    scaling=None,
    sliding_window=None,
    **_,
) -> torch.Tensor:
    window = -1 if sliding_window is None else sliding_window - 1
    options: dict[str, Any] = {"scale": scaling, "window_size": (window, 0)}
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and "enable_gqa" in VARLEN:
        options["enable_gqa"] = True
    elif groups > 1:
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    query, key, value = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    return varlen_attn(
        query, key, value, borders, cu_seq_lens_k, max_length_q, max_length_k, **options
    )[None]


# ------------------------------------------------------------------------------------------- layers


def compile_layers(model: PreTrainedModel) -> None:
    """Each decoder layer becomes a few kernels, when it is first used: of norms, rotary embedding
    and activations."""
    layers = [
        module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    for layer in layers:
        layer.compile(dynamic=True, options=FOR_ALL_LENGTHS)
    if layers and any(parameter.requires_grad for parameter in layers[0].parameters()):
        # Else an adapter's first layer is compiled for itself; with `enable_input_require_grads`,
        # it is for scores.
        embeddings = model.get_input_embeddings()
        embeddings.register_forward_hook(
            lambda *call: call[-1].requires_grad_() if torch.is_grad_enabled() else None
        )


def worth_compiling(model: PreTrainedModel, device: torch.device) -> bool:
    """Measured on GPUs, for dense models of 0.3 M to 8 B parameters."""
    return (
        device.type == "cuda"
        and not has_experts(model)
        and model.num_parameters() >= WORTH_COMPILING
    )


def has_experts(model: PreTrainedModel) -> bool:
    """Some families have experts in a module's name, Granite in that of its class only."""
    names = (name + type(module).__name__ for name, module in model.named_modules())
    return any("expert" in name.lower() for name in names)
