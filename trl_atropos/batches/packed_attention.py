"""Prepares a model for packed rows: its attention stops at the borders between rollouts.

`training/computation.py` calls `use_packed_attention` before training. `packing.py` makes the rows,
and passes `RowFormat.inputs` to the model with each. The model hands them on to `attend` in every
layer. On GPUs and in 16 bits, one kernel for variable lengths computes all rollouts. Elsewhere
torch's own attention computes them one by one.

Paths that begin alike may share their beginning (`sharing.py`). It then stands in the row once, and
the keys and values of each of these paths begin with copies of that.
"""

import inspect
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from trl_atropos.batches.long_attention import are_long, attend_in_turn
from trl_atropos.batches.sequence_parallel import RankHeads, SequenceGroup

# `attn_implementation` of a packed model. It computes any other input as `sdpa` does.
ATTENTION = "sdpa_packed"
FLASH = ("flash_attention_2", "flash_attention_3")  # these find the borders by themselves
# Torch's versions differ in the parameters of their kernel for variable lengths.
VARLEN_PARAMETERS = frozenset(inspect.signature(varlen_attn).parameters)
# Some models pass these to their attention beside query, key and value. They change what it
# computes: which keys a query sees, what is added to its scores, and a cap on them.
NOT_PACKED = ("indices", "block_indices", "position_bias", "s_aux", "softcap")


class RowFormat(NamedTuple):
    """Describes how a packed row is computed: by which attention, on which device, in which
    dtype."""

    attention: str  # `attn_implementation`
    device: torch.device
    dtype: torch.dtype
    multiple: int = 1  # of the row's length
    shares: bool = False  # prompts among rollouts
    # ranks that divide the row; None = this one has all of it
    sequence_group: SequenceGroup | None = None
    long_in_turn: bool = False  # long rollouts that share nothing are computed one after the other

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        device: torch.device,
        autocast: torch.dtype | None,
        multiple: int,
        sequence_group: SequenceGroup | None = None,
    ) -> "RowFormat":
        dtype = autocast or next(model.parameters()).dtype
        if sequence_group is not None:
            multiple = math.lcm(multiple, sequence_group.size)
        attention = model.config._attn_implementation
        return cls(attention, device, dtype, multiple, sequence_group=sequence_group)

    @property
    def has_one_kernel(self) -> bool:
        """True if one kernel computes attention over all rollouts of a row."""
        is_half = self.dtype in (torch.float16, torch.bfloat16)
        return self.attention == ATTENTION and self.device.type == "cuda" and is_half

    def inputs(
        self,
        positions: Tensor,
        lengths: np.ndarray,
        shared_lengths: np.ndarray | int = 0,
        keys: Tensor | None = None,
    ) -> dict[str, Any]:
        """
        Returns what the model gets beside the row, by the names that Transformers has for rows of
        several sequences.

        The lengths 1, 2 and 3, of which the last two begin with 1 shared token, become

            rollout_lengths  1 2 3 | 1 3 4             for torch's attention, part by part
            cu_seq_lens      0 1 3 6 | 0 1 4 8         for a kernel

        of queries and of keys.

        Args:
            positions: (1, T), of each token in its rollout.
            lengths: (parts,), tokens of each part of the row.
            shared_lengths: (parts,), tokens of each part's keys that stand elsewhere.
            keys: places of all parts' keys in the row; none if no prompt is shared.
        """
        inputs: dict[str, Any] = {"position_ids": positions, "attention_mask": None}
        if self.sequence_group is not None:
            inputs["position_ids"] = self.sequence_group.own(positions)
            inputs["sequence_group"] = self.sequence_group
        if keys is not None and len(keys):
            inputs["rollout_keys"] = keys
        counts = np.stack([lengths, lengths + shared_lengths])  # (2, parts): of queries, of keys
        counts = torch.from_numpy(counts.astype(np.int32))
        if self.attention == ATTENTION:
            # A mask of four dimensions is taken as it is. To make one would wait for the device.
            inputs["attention_mask"] = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)
            in_turn = self.long_in_turn and "rollout_keys" not in inputs and are_long(lengths)
            if in_turn:
                inputs["in_turn"] = True
            if in_turn or not self.has_one_kernel:
                inputs["rollout_lengths"] = counts
                return inputs
        return inputs | self._kernel_inputs(counts)

    def _kernel_inputs(self, counts: Tensor) -> dict[str, Any]:
        """Returns the borders of queries and keys, and their longest parts. `counts` is
        (2, parts)."""
        longest_query, longest_key = counts.amax(1).tolist()
        if self.attention == ATTENTION:
            # Each different number may be compiled anew, so there are few of them.
            longest_query = _power_of_two(longest_query)
            longest_key = _power_of_two(longest_key)
        ends = counts.cumsum(1, dtype=torch.int32)
        borders = torch.nn.functional.pad(ends, (1, 0))
        # Not as the two rows of a tensor. One rollout alone has two borders as well: torch takes
        # the equal numbers for a rule, and would compile layers anew for other rows.
        query_borders, key_borders = copied_at_once(borders.numpy(), self.device)
        return {
            "cu_seq_lens_q": query_borders,
            "max_length_q": longest_query,
            "cu_seq_lens_k": key_borders,
            "max_length_k": longest_key,
        }


def _power_of_two(number: int) -> int:
    """Returns the smallest power of two that is not below `number`: 8 for 5."""
    return 1 << (number - 1).bit_length()


def copied_at_once(arrays: Sequence[np.ndarray], device: torch.device) -> Sequence[Tensor]:
    """Copies arrays to the device in one piece: with each copy, the device waits for the host."""
    joined = torch.from_numpy(np.concatenate(arrays)).to(device)
    sizes = [len(array) for array in arrays]
    return joined.split(sizes)


def use_packed_attention(model: PreTrainedModel) -> None:
    """Makes a model that computes torch's attention stop at the borders of packed rollouts."""
    if model.config._attn_implementation == "sdpa":
        AttentionInterface.register(ATTENTION, attend)
        AttentionMaskInterface.register(ATTENTION, sdpa_mask)
        model.set_attn_implementation(ATTENTION)


def use_own_attention(model: PreTrainedModel) -> None:
    """Undoes `use_packed_attention`. Some families choose keys themselves only if their attention
    is named `sdpa` (DeepSeek-V3.2, GLM-5): under another name they compute another model."""
    if model.config._attn_implementation == ATTENTION:
        model.set_attn_implementation("sdpa")


# ---------------------------------------------------------------------------------------- attention


def attend(
    module: torch.nn.Module | RankHeads,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    rollout_keys: Tensor | None = None,
    rollout_lengths: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    sequence_group: SequenceGroup | None = None,
    in_turn: bool = False,
    **options: Any,
) -> tuple[Tensor, None]:
    """
    Computes attention as Transformers' own functions do, and stops at the borders of rollouts if
    `RowFormat.inputs` has given them. The first five arguments have Transformers' names, because
    some models pass them by name.

    Args:
        query: (1, heads, T, head_dim).
        key: (1, key_heads, T, head_dim), and so is `value`.
        rollout_keys: places in the row of each part's keys, if prompts are shared.
        rollout_lengths: (2, parts), tokens of each part's queries and keys. Then torch's attention
            computes part by part.
        cu_seq_lens_q: (parts + 1,), borders of the queries. Then one kernel computes all parts. It
            finds `cu_seq_lens_k`, `max_length_q` and `max_length_k` among the options.
        sequence_group: ranks that divide the row. Then T is the length of this rank's slice, and
            all lengths, borders and places are those of the whole row.
        in_turn: rollouts are long, and each is computed by a kernel of its own.

    Returns:
        (1, T, heads, head_dim), and no weights.
    """
    if rollout_lengths is None and cu_seq_lens_q is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    for name in NOT_PACKED:
        if options.get(name) is not None:
            raise NotImplementedError(
                f"its attention takes `{name}`, which packed rollouts do not have"
            )
    if sequence_group is not None:
        query, key, value = sequence_group.by_heads(query, key, value)
        module = RankHeads(query.size(1) // key.size(1))
    if in_turn:
        attended = attend_in_turn(query, key, value, rollout_lengths, options.get("scaling"))
    elif rollout_lengths is not None:
        if rollout_keys is not None:
            key = _tokens_second(_Copied.apply(_tokens_first(key), rollout_keys))
            value = _tokens_second(_Copied.apply(_tokens_first(value), rollout_keys))
        attended = _attend_part_by_part(module, query, key, value, rollout_lengths, **options)
    else:
        attended = attend_at_once(
            query, key, value, rollout_keys, cu_seq_lens_q=cu_seq_lens_q, **options
        )
    if sequence_group is not None:
        attended = sequence_group.by_tokens(attended)
    return attended, None


class _Copied(torch.autograd.Function):
    """Copies places of a row, (T, heads, head_dim), each as often as it is named. The gradients of
    its copies are summed in float32: torch would round the sum to 16 bits after each of them."""

    @staticmethod
    def forward(ctx, row, places):
        ctx.save_for_backward(places)
        ctx.length = row.size(0)
        # Compiled layers copy again in the backward pass, where that takes less memory: torch does
        # so for indexing, but not for `index_select`.
        return row[places]

    @staticmethod
    def backward(ctx, gradient):
        (places,) = ctx.saved_tensors
        exact = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        sums = exact.new_zeros(ctx.length, *exact.shape[1:])
        sums = sums.index_add_(0, places, exact)
        return sums.to(gradient.dtype), None


class _CopiesForgotten(torch.autograd.graph.saved_tensors_hooks):
    """
    Has the backward pass copy keys and values again, in place of keeping the copies: a row of 30
    thousand tokens whose paths have four times as many takes 0.5 GB for each layer of Qwen3-1.7B.

    Args:
        rows: (T, heads, head_dim) each.
        copies: what `_Copied` made of each of them.
        places: of the copies in the row.
    """

    def __init__(self, rows: Sequence[Tensor], copies: Sequence[Tensor], places: Tensor):
        self._rows = {copy.data_ptr(): row.detach() for row, copy in zip(rows, copies)}
        self._size = copies[0].shape
        self._places = places
        super().__init__(self._pack, self._unpack)

    def _pack(self, saved: Tensor) -> Tensor | tuple[Tensor]:
        row = self._rows.get(saved.data_ptr())
        if row is None or saved.shape != self._size:
            return saved
        return (row,)

    def _unpack(self, packed: Tensor | tuple[Tensor]) -> Tensor:
        if isinstance(packed, tuple):
            (row,) = packed
            return row[self._places]
        return packed


# ---------------------------------------------------------------- torch's attention, on any device


@torch.compiler.disable
def _attend_part_by_part(
    module: torch.nn.Module | RankHeads,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    sliding_window: int | None = None,
    **options: Any,
) -> Tensor:
    """Attends to each part of the row by itself. Parts of the same lengths that stand side by side
    are one batch."""
    batches = _batches(lengths)
    masks = _Masks.of_row(lengths, query.device)
    query_sizes = [batch.queries * batch.count for batch in batches]
    key_sizes = [batch.keys * batch.count for batch in batches]
    queries = query.split(query_sizes, dim=2)
    keys = key.split(key_sizes, dim=2)
    values = value.split(key_sizes, dim=2)
    attended = []
    for batch, q, k, v in zip(batches, queries, keys, values, strict=True):
        output, _ = sdpa_attention_forward(
            module,
            _stacked(q, batch.count),
            _stacked(k, batch.count),
            _stacked(v, batch.count),
            masks.of(batch.queries, batch.keys, sliding_window),
            **options,
        )
        attended.append(output.flatten(0, 1))
    if len(attended) == 1:
        return attended[0][None]
    return torch.cat(attended)[None]


class _Batch(NamedTuple):
    """Counts parts that stand side by side and have the same numbers of queries and keys."""

    queries: int  # of each part
    keys: int  # of each part
    count: int  # of the parts


def _batches(lengths: Tensor) -> list[_Batch]:
    """Returns the batches in `lengths`, (2, parts). `3 4 4 | 3 7 7` give (3, 3, 1) and
    (4, 7, 2)."""
    batches = []
    for (queries, keys), same in groupby(lengths.T.tolist()):
        count = len(list(same))
        batches.append(_Batch(queries, keys, count))
    return batches


def _stacked(states: Tensor, count: int) -> Tensor:
    """Returns states (1, heads, count * length, head_dim) as (count, heads, length, head_dim)."""
    parts = states[0].unflatten(1, (count, -1))  # (heads, count, length, head_dim)
    return parts.transpose(0, 1)


class _Masks:
    """Keeps the masks of the last row: all its layers have the same, in the backward pass, too."""

    _last: "_Masks | None" = None

    def __init__(self, lengths: Tensor, device: torch.device):
        self._lengths = lengths
        self._device = device
        self._masks: dict[tuple[int, int, int | None], Tensor | None] = {}

    @classmethod
    def of_row(cls, lengths: Tensor, device: torch.device) -> "_Masks":
        """Returns those of the row whose parts have these lengths, as long as the same tensor holds
        them."""
        last = cls._last
        if last is None or last._lengths is not lengths or last._device != device:
            cls._last = cls(lengths, device)
        return cls._last

    def of(self, num_queries: int, num_keys: int, sliding_window: int | None) -> Tensor | None:
        key = (num_queries, num_keys, sliding_window)
        if key not in self._masks:
            self._masks[key] = _mask(num_queries, num_keys, sliding_window, self._device)
        return self._masks[key]


def _mask(
    num_queries: int, num_keys: int, sliding_window: int | None, device: torch.device
) -> Tensor | None:
    """
    Returns which keys each query sees, (1, 1, queries, keys), or `None` if it sees all up to its
    own. The queries are those of the last keys. With 2 queries, 4 keys and a window of 2:

        distance    2  1  0 -1        seen    0  1  1  0
                    3  2  1  0                0  0  1  1
    """
    reach = num_keys
    if sliding_window is not None:
        reach = min(sliding_window, num_keys)
    if num_queries == num_keys and reach == num_keys:
        return None
    key_places = torch.arange(num_keys, device=device)
    query_places = key_places[num_keys - num_queries :]
    distance = query_places[:, None] - key_places
    seen = (distance >= 0) & (distance < reach)
    return seen[None, None]


# ----------------------------------------------------------------------------- one kernel, on GPUs


def attend_at_once(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    places: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor,
    max_length_q: int,
    max_length_k: int,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> Tensor:
    """Attends to all rollouts in one kernel, which finds them by the borders. `places` are those of
    each part's keys, if any are shared."""
    window = -1
    if sliding_window is not None:
        window = sliding_window - 1
    options: dict[str, Any] = {"scale": scaling, "window_size": (window, 0)}
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and "enable_gqa" in VARLEN_PARAMETERS:
        options["enable_gqa"] = True
    elif groups > 1:
        key = key.repeat_interleave(groups, dim=1)
        value = value.repeat_interleave(groups, dim=1)
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query = query.to(dtype)
        key = key.to(dtype)
        value = value.to(dtype)
    rows = [_tokens_first(key), _tokens_first(value)]
    copies = rows
    forgets: AbstractContextManager = nullcontext()
    if places is not None:
        copies = [_Copied.apply(row, places) for row in rows]
        if not torch.compiler.is_compiling():
            forgets = _CopiesForgotten(rows, copies, places)
    with forgets:
        attended = varlen_attn(
            _tokens_first(query),
            *copies,
            cu_seq_q=cu_seq_lens_q,
            cu_seq_k=cu_seq_lens_k,
            max_q=max_length_q,
            max_k=max_length_k,
            **options,
        )
    return attended[None]


def _tokens_first(states: Tensor) -> Tensor:
    """Returns states (1, heads, T, head_dim) as (T, heads, head_dim)."""
    return states[0].transpose(0, 1).contiguous()


def _tokens_second(states: Tensor) -> Tensor:
    """Returns states (T, heads, head_dim) as (1, heads, T, head_dim)."""
    return states.transpose(0, 1)[None]
