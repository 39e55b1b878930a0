"""Packs the rollouts of a micro-batch into one row, so that nothing is computed on padding.

In come the lengths of a micro-batch of TRL's, (B, P + C) with padding on both sides. Out comes a
`Layout`: one row of T tokens whose positions begin anew with every rollout, and the way back of
the scores to their columns. `trainer.py` makes a layout for every micro-batch and scores by it.

Attention stops at the borders between rollouts: on GPUs in one kernel for variable lengths (16
bits), elsewhere by torch's own attention, rollout by rollout. Rollouts with the same prompt may
share it. It then stands in the row once, and the keys and values of all of them begin with its own.

Not every model can be packed, because layers that carry a state from token to token run across
borders. So a model is tried before the first batch (`trial.py`). If it fails, its rollouts are
padded (`micro_batches.without_padding`).
"""

import inspect
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer

from trl_atropos.batches.micro_batches import Scores
from trl_atropos.rollouts.rollout import Rollout

# `attn_implementation` of a packed model. It computes any other input as `sdpa` does.
ATTENTION = "sdpa_packed"
FLASH = ("flash_attention_2", "flash_attention_3")  # these find the borders by themselves
# Torch's versions differ in the parameters of their kernel for variable lengths.
VARLEN_PARAMETERS = frozenset(inspect.signature(varlen_attn).parameters)
# Some models pass these to their attention beside query, key and value. They change what it
# computes: which keys a query sees, what is added to its scores, and a cap on them.
NOT_PACKED = ("indices", "block_indices", "position_bias", "s_aux", "softcap")
# Prompts are shared if that saves at least this share of the tokens.
WORTH_SHARING = 1 / 8
# parameters: a run of a smaller model may end before it has won back the time of compiling
WORTH_COMPILING = 50_000_000
# Without this option, a norm's gradient is compiled in one way for long rows and in another for
# short ones, of half a dozen lengths: a row of a new length would stop training for ten seconds.
FOR_ALL_LENGTHS = {"triton.mix_order_reduction_non_strict_mode": True}
Ints = Sequence[int] | np.ndarray


class Layout(NamedTuple):
    """
    Maps a padded micro-batch to the model's input, which is R rows of T tokens, and back. A packed
    micro-batch has one row. Indices are int64 on the model's device.

    An example with P = 2, C = 2 and N = 3 tokens of completions, packed. A dot is padding:

        rollout 0    .  a | b  .     in (B, P + C) flattened, these are the places 0 1 2 3
        rollout 1    c  d | e  f                                           and 4 5 6 7

        row          a  b  c  d  e  f
        positions    0  1  0  1  2  3
        tokens       1  2  4  5  6  7
        scored       0  1  0  0  1  1
        predicts     0  3  4            in the row: `a` predicts `b`, `d` predicts `e`, and so on
        columns      0  2  3            of `b`, `e` and `f` in (B, C) flattened
    """

    tokens: Tensor  # (R, T), into the flattened (B, P + C)
    scored: Tensor  # (R, T): 1 for a token of a completion, else 0
    # (N,), into the flattened rows: the token before each token of a completion
    predicts: Tensor
    columns: Tensor  # (N,), into the flattened (B, C)
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
        Returns the layout of one packed row.

        Args:
            prompts: (B,), tokens of each prompt, at least 1.
            completions: (B,), tokens of each completion.
            prompt_width: P.
            width: C.
            how: what the row is computed with.
            alike: (B,), a number for each rollout, the same for those with the same prompt. They
                share it if that pays.
        """
        prompts = np.asarray(prompts)
        lengths = prompts + completions  # (B,)
        sharing = _share_prompts(prompts, lengths, alike if how.shares else None)
        parts = _Parts.of(prompts, lengths, sharing)
        part, number = _count_within(parts.lengths)
        rollout = parts.rollouts[part]  # (T,)
        position = parts.shared[part] + number  # (T,), in the rollout
        column = position - prompts[rollout]  # (T,), in the completion; below 0 in the prompt
        padded_begin = rollout * (prompt_width + width)  # (T,), of the rollout in (B, P + C)
        tokens = padded_begin + prompt_width + column
        scored = np.flatnonzero(column >= 0)  # (N,), in the row
        completion_begin = rollout * width  # (T,), of the rollout in (B, C)
        columns = (completion_begin + column)[scored]

        filling = -len(tokens) % how.multiple
        if filling:
            # tokens of no rollout, which only fill the row
            tokens = np.append(tokens, np.arange(filling))
            position = np.append(position, np.arange(filling))
            parts = parts.with_filling(filling)
        is_scored = np.zeros(len(tokens), dtype=np.int64)  # (T,)
        is_scored[scored] = 1
        shares = len(sharing.owners) > 0
        keys = parts.keys() if shares else np.zeros(0, dtype=np.int64)

        arrays = [tokens, is_scored, position, scored - 1, columns, keys]
        tensors = _copied_at_once(arrays, how.device)
        tokens, is_scored, position, predicts, columns, keys = tensors
        inputs = how.inputs(position[None], parts.lengths, keys if shares else None, parts.shared)
        return cls(tokens[None], is_scored[None], predicts, columns, inputs)

    @classmethod
    def padded(cls, prompt_mask: Tensor, completion_mask: Tensor, multiple: int = 1) -> "Layout":
        """
        Returns a layout of one row for each rollout, which begins in its first column. So the
        position of a token is its column, also for models that learn positions. (TRL pads prompts
        on the left, and passes no positions.)

        The example of the class, padded:

            rows         a  b  a  a  |  c  d  e  f
            tokens       1  2  1  1  |  4  5  6  7      padding repeats the first token
            scored       0  1  0  0  |  0  0  1  1
            predicts     0  5  6
            columns      0  2  3

        Args:
            prompt_mask: (B, P), ones on the right.
            completion_mask: (B, C), ones on the left.
            multiple: of the width of the rows.
        """
        count, prompt_width = prompt_mask.shape
        width = completion_mask.size(1)
        device = prompt_mask.device
        prompts = prompt_mask.sum(1, keepdim=True)  # (B, 1)
        lengths = prompts + completion_mask.sum(1, keepdim=True)  # (B, 1)
        longest = int(lengths.max())
        row_width = longest + -longest % multiple  # T
        position = torch.arange(row_width, device=device).expand(count, -1)  # (B, T)
        is_inside = position < lengths
        rollout = torch.arange(count, device=device)[:, None]  # (B, 1)
        column = position - prompts  # (B, T), in the completion; below 0 in the prompt
        padded_begin = rollout * (prompt_width + width)  # (B, 1), in (B, P + C)
        tokens = padded_begin + prompt_width + column
        # padding repeats the first token, which the mask hides
        first_token = tokens[:, :1]
        tokens = tokens.where(is_inside, first_token)
        is_scored = is_inside & (column >= 0)
        scored = is_scored.flatten().nonzero()[:, 0]  # (N,), in the rows
        predicts = scored - 1
        completion_begin = rollout * width  # (B, 1), in (B, C)
        columns = (completion_begin + column)[is_scored]
        inputs = {"attention_mask": is_inside.long()}
        return cls(tokens, is_scored.long(), predicts, columns, inputs)

    def in_columns(self, values: Tensor, count: int, width: int) -> Tensor:
        """Returns values of the completions' tokens, (N, ...), as (B, C, ...), with 0 on
        padding."""
        _, *shape = values.shape
        padded = values.new_zeros(count * width, *shape)
        padded = padded.index_copy(0, self.columns, values)
        return padded.view(count, width, *shape)


def alike(rollouts: Sequence[Rollout]) -> np.ndarray:
    """Returns a number for each rollout, (B,): the same for those with the same prompt."""
    known: dict[bytes, int] = {}
    numbers = []
    for rollout in rollouts:
        prompt = rollout.prompt_ids.tobytes()
        number = known.setdefault(prompt, len(known))
        numbers.append(number)
    return np.array(numbers)


class _Sharing(NamedTuple):
    """Lists the G prompts that stand in the row once, each for several rollouts."""

    owners: np.ndarray  # (G,): for each shared prompt, a rollout that begins with it
    # (B,): the shared prompt of each rollout, from 0 to G - 1; any number if it shares no token
    prompt: np.ndarray
    shared: np.ndarray  # (B,): tokens that each rollout shares, or 0


def _share_prompts(prompts: np.ndarray, lengths: np.ndarray, alike: Ints | None) -> _Sharing:
    """
    Returns the prompts to share: none if that saves too little.

    Rollouts with the prompts `c d`, `a` and `c d`, which are `alike` as 5, 3 and 5 say:

        group        1  0  1      of each rollout
        first        1  0         of the rollouts of groups 0 and 1
        sizes        1  2         of groups 0 and 1, in rollouts
        is_shared    0  1         for groups 0 and 1
        number      -1  0         of groups 0 and 1 among those that share
        owners       0            rollout 0 has the one shared prompt
        shared       1  0  1      token `c`; `d` stays with each rollout
    """
    nothing = _Sharing(np.zeros(0, dtype=np.int64), np.zeros_like(prompts), np.zeros_like(prompts))
    if alike is None:
        return nothing
    _, first, group, sizes = np.unique(
        alike, return_index=True, return_inverse=True, return_counts=True
    )
    is_shared = (sizes > 1) & (prompts[first] > 1)
    owners = first[is_shared]
    # The last token of a prompt predicts another token in each rollout, and stays with it.
    shared = np.where(is_shared[group], prompts - 1, 0)
    saved = shared.sum() - shared[owners].sum()
    if saved < WORTH_SHARING * lengths.sum():
        return nothing
    number = is_shared.cumsum() - 1
    return _Sharing(owners, number[group], shared)


class _Parts(NamedTuple):
    """
    Lists the runs of tokens that make up a row, in its order: the shared prompts without their last
    token, then what else there is of each rollout. All arrays are (parts,).

    Rollouts `c d | b` and `c d | e f`, which share their prompt:

        row          c | d  b | d  e  f
        part         0 | 1  1 | 2  2  2
        position     0 | 1  2 | 1  2  3
        keys         0 | 0  1  2 | 0  3  4  5
        rollouts     0  0  1
        lengths      1  2  3
        shared       0  1  1
        prompt       0  0  0
    """

    rollouts: np.ndarray  # whose tokens they are
    lengths: np.ndarray  # tokens of the part itself
    shared: np.ndarray  # tokens of a shared prompt that precede the part in its rollout
    prompt: np.ndarray  # the part that is this shared prompt

    @classmethod
    def of(cls, prompts: np.ndarray, lengths: np.ndarray, sharing: _Sharing) -> "_Parts":
        """Returns the parts of rollouts whose `prompts` and whole `lengths` are given, (B,)."""
        owners, prompt, shared = sharing
        # By shared tokens, then by length, because attention takes neighbours of the same lengths
        # at once. (`lexsort` takes its main key last.)
        order = np.lexsort((lengths, shared))  # (B,)
        return cls(
            rollouts=np.append(owners, order),
            lengths=np.append(prompts[owners] - 1, (lengths - shared)[order]),
            shared=np.append(np.zeros_like(owners), shared[order]),
            prompt=np.append(np.arange(len(owners)), prompt[order]),
        )

    def with_filling(self, length: int) -> "_Parts":
        """Returns the parts and one more of that length, which belongs to no rollout."""
        return _Parts(
            rollouts=np.append(self.rollouts, 0),
            lengths=np.append(self.lengths, length),
            shared=np.append(self.shared, 0),
            prompt=np.append(self.prompt, 0),
        )

    def keys(self) -> np.ndarray:
        """Returns the places in the row of the keys that each part sees, part after part: first
        those of its shared prompt, then its own."""
        part, position = _count_within(self.shared + self.lengths)
        begins = _begins(self.lengths)  # (parts,), in the row
        prompt = self.prompt[part]
        shared = self.shared[part]
        in_prompt = begins[prompt] + position
        in_part = begins[part] + position - shared
        return np.where(position < shared, in_prompt, in_part)


def _count_within(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns of each token its part and its number in the part. Lengths `1 3` give `0 1 1 1` and
    `0 0 1 2`."""
    parts = np.arange(len(lengths))
    part = np.repeat(parts, lengths)  # (T,)
    places = np.arange(len(part))
    begin = _begins(lengths)[part]  # (T,)
    return part, places - begin


def _begins(lengths: np.ndarray) -> np.ndarray:
    """Returns where parts begin that stand end to end. Lengths `1 3 2` give `0 1 4`."""
    ends = lengths.cumsum()
    return ends - lengths


def _copied_at_once(arrays: Sequence[np.ndarray], device: torch.device) -> Sequence[Tensor]:
    """Copies arrays to the device in one piece: with each copy, the device waits for the host."""
    joined = torch.from_numpy(np.concatenate(arrays)).to(device)
    sizes = [len(array) for array in arrays]
    return joined.split(sizes)


class How(NamedTuple):
    """Tells by which attention, device and dtype a packed row is computed."""

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
        dtype = autocast or next(model.parameters()).dtype
        return cls(model.config._attn_implementation, device, dtype, multiple)

    def inputs(
        self,
        positions: Tensor,
        lengths: np.ndarray,
        keys: Tensor | None = None,
        shared: Any = 0,
    ) -> dict[str, Any]:
        """
        Returns what the model gets beside the row, by the names that Transformers has for rows of
        several sequences.

        The lengths 1, 2 and 3, of which the last two begin with 1 shared token, become

            rollout_lengths  1 2 3 | 1 3 4             for torch's attention, rollout by rollout
            cu_seq_lens      0 1 3 6 | 0 1 4 8         for a kernel

        of queries and of keys.

        Args:
            positions: (1, T), of each token in its rollout.
            lengths: (parts,), tokens of each part of the row.
            keys: places of all parts' keys in the row, if prompts are shared.
            shared: (parts,), tokens of each part's keys that stand elsewhere.
        """
        inputs: dict[str, Any] = {"position_ids": positions, "attention_mask": None}
        if keys is not None:
            inputs["rollout_keys"] = keys
        counts = np.stack([lengths, lengths + shared])  # (2, parts): of queries, of keys
        counts = torch.from_numpy(counts.astype(np.int32))
        longest_query, longest_key = counts.amax(1).tolist()
        if self.attention == ATTENTION:
            # A mask of four dimensions is taken as it is. To make one would wait for the device.
            inputs["attention_mask"] = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)
            is_half = self.dtype in (torch.float16, torch.bfloat16)
            if self.device.type != "cuda" or not is_half:
                inputs["rollout_lengths"] = counts
                return inputs
            # Each different number may be compiled anew, so there are few of them.
            longest_query = _power_of_two(longest_query)
            longest_key = _power_of_two(longest_key)
        borders = torch.nn.functional.pad(counts.cumsum(1, dtype=torch.int32), (1, 0))
        query_borders, key_borders = borders.to(self.device)
        inputs["cu_seq_lens_q"] = query_borders
        inputs["max_length_q"] = longest_query
        inputs["cu_seq_lens_k"] = key_borders
        inputs["max_length_k"] = longest_key
        return inputs


def _power_of_two(number: int) -> int:
    """Returns the smallest power of two that is not below `number`: 8 for 5."""
    return 1 << (number - 1).bit_length()


# ------------------------------------------------------------------------------------------ scoring


def score_packed(
    forward: Callable[..., Scores], model: Any, ids: Tensor, keep: int, layout: Layout
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

    count = len(ids)
    row = ids.flatten()[layout.tokens]  # (1, T)
    # TRL scores the tokens that its mask leaves. The model does not see this mask. Scores are
    # (1, T - 1), each in the place of the token before.
    logprobs, entropies, _ = forward(packed, row, layout.scored, row.size(1) - 1)
    logprobs = layout.in_columns(logprobs[0, layout.predicts], count, keep)
    if entropies is not None:
        entropies = layout.in_columns(entropies[0, layout.predicts], count, keep)
    return logprobs, entropies, None


def score_all(
    forward: Callable[..., Scores],
    model: Any,
    ids: Tensor,
    mask: Tensor,
    keep: int,
    micro_batches: Sequence[slice],
    how: How,
    alike: np.ndarray | None = None,
) -> Scores:
    """
    Scores a batch as `score_packed` does each of its micro-batches.

    Args:
        mask: (B, P + C), the attention mask.
        micro_batches: rollouts of each; together, all of the batch in its order.
        alike: (B,), as in `Layout.of`.
    """
    prompt_width = ids.size(1) - keep
    prompt_mask, completion_mask = mask.split((prompt_width, keep), dim=1)
    lengths = torch.stack([prompt_mask.sum(1), completion_mask.sum(1)])
    prompts, completions = lengths.cpu().numpy()  # (B,) each
    layouts = []
    for part in micro_batches:
        part_alike = None if alike is None else alike[part]
        layout = Layout.of(prompts[part], completions[part], prompt_width, keep, how, part_alike)
        layouts.append(layout)
    logprobs = []
    entropies = []
    for part, layout in zip(micro_batches, layouts):
        scores = score_packed(forward, model, ids[part], keep, layout)
        logprobs.append(scores[0])
        entropies.append(scores[1])
    if entropies[0] is None:
        return torch.cat(logprobs), None, None
    return torch.cat(logprobs), torch.cat(entropies), None


# ---------------------------------------------------------------------------------------- attention


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


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    rollout_keys: Tensor | None = None,
    rollout_lengths: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """
    Computes attention as Transformers' own functions do, and stops at the borders of rollouts if
    `How.inputs` has given them. The first five arguments have Transformers' names, because some
    models pass them by name.

    Args:
        query: (1, heads, T, head_dim).

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
    if rollout_keys is not None:
        key = _SharedKeys.apply(key, rollout_keys)
        value = _SharedKeys.apply(value, rollout_keys)
    if rollout_lengths is not None:
        return _each_rollout(module, query, key, value, rollout_lengths, **options), None
    return _varlen(query, key, value, cu_seq_lens_q, **options), None


class _SharedKeys(torch.autograd.Function):
    """Selects places of the row, (1, heads, T, head_dim). A shared prompt's gradient is summed over
    its rollouts in float32: torch would round it to 16 bits after each of them."""

    @staticmethod
    def forward(ctx, row, places):
        ctx.save_for_backward(places)
        ctx.length = row.size(2)
        return row.index_select(2, places)

    @staticmethod
    def backward(ctx, gradient):
        (places,) = ctx.saved_tensors
        _, heads, _, head_dim = gradient.shape
        exact = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        sums = exact.new_zeros(1, heads, ctx.length, head_dim)
        sums = sums.index_add_(2, places, exact)
        return sums.to(gradient.dtype), None


@torch.compiler.disable
def _each_rollout(module, query, key, value, lengths, sliding_window=None, **options) -> Tensor:
    """Attends rollout by rollout. Rollouts of the same lengths that stand side by side are a
    batch."""
    runs = _runs(lengths)
    query_sizes = [run.queries * run.count for run in runs]
    key_sizes = [run.keys * run.count for run in runs]
    queries = query.split(query_sizes, dim=2)
    keys = key.split(key_sizes, dim=2)
    values = value.split(key_sizes, dim=2)
    attended = []
    for run, q, k, v in zip(runs, queries, keys, values, strict=True):
        batch = [_as_batch(states, run.count) for states in (q, k, v)]
        mask = _mask(run.queries, run.keys, sliding_window, query.device)
        output, _ = sdpa_attention_forward(module, *batch, mask, **options)
        attended.append(output.flatten(0, 1))
    if len(attended) == 1:
        return attended[0][None]
    return torch.cat(attended)[None]


class _Run(NamedTuple):
    """Counts parts that stand side by side and have the same numbers of queries and keys."""

    queries: int
    keys: int
    count: int


def _runs(lengths: Tensor) -> list[_Run]:
    """Returns the runs of lengths (2, parts). `3 4 4 | 3 7 7` give (3, 3, 1) and (4, 7, 2)."""
    runs = []
    for (queries, keys), same in groupby(lengths.T.tolist()):
        runs.append(_Run(queries, keys, len(list(same))))
    return runs


def _as_batch(states: Tensor, count: int) -> Tensor:
    """Returns states (1, heads, count * length, head_dim) as (count, heads, length, head_dim)."""
    batch = states[0].unflatten(1, (count, -1))  # (heads, count, length, head_dim)
    return batch.transpose(0, 1)


def _mask(
    length: int, key_length: int, sliding_window: int | None, device: torch.device
) -> Tensor | None:
    """
    Returns which keys each query sees, (1, 1, queries, keys), or `None` if it sees all up to its
    own. The queries are those of the last keys. With 2 queries, 4 keys and a window of 2:

        distance    2  1  0 -1        seen    0  1  1  0
                    3  2  1  0                0  0  1  1
    """
    reach = key_length
    if sliding_window is not None:
        reach = min(sliding_window, key_length)
    if length == key_length and reach == key_length:
        return None
    key_places = torch.arange(key_length, device=device)
    query_places = torch.arange(key_length - length, key_length, device=device)
    distance = query_places[:, None] - key_places
    seen = (distance >= 0) & (distance < reach)
    return seen[None, None]


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
) -> Tensor:
    """Attends to all rollouts in one kernel, which finds them by the borders."""
    window = -1 if sliding_window is None else sliding_window - 1
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
    attended = varlen_attn(
        _tokens_first(query),
        _tokens_first(key),
        _tokens_first(value),
        borders,
        cu_seq_lens_k,
        max_length_q,
        max_length_k,
        **options,
    )
    return attended[None]


def _tokens_first(states: Tensor) -> Tensor:
    """Returns states (1, heads, T, head_dim) as (T, heads, head_dim)."""
    return states[0].transpose(0, 1).contiguous()


# ------------------------------------------------------------------------------------------- layers


def compile_layers(model: PreTrainedModel) -> None:
    """Compiles each decoder layer when it is first used: its norms, rotary embedding and
    activations become a few kernels."""
    layers = [
        module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    for layer in layers:
        layer.compile(dynamic=True, options=FOR_ALL_LENGTHS)
    if not layers:
        return
    if any(parameter.requires_grad for parameter in layers[0].parameters()):
        # Otherwise an adapter's first layer is compiled for itself. Transformers'
        # `enable_input_require_grads` would have it compiled once more for scores.
        model.get_input_embeddings().register_forward_hook(_require_gradients)


def _require_gradients(embedding: torch.nn.Module, inputs: tuple, embedded: Tensor) -> Tensor:
    if torch.is_grad_enabled():
        embedded.requires_grad_()
    return embedded


def worth_compiling(model: PreTrainedModel, device: torch.device) -> bool:
    """Returns whether compiling pays, as measured on GPUs for dense models of 0.3 M to 8 B
    parameters."""
    if device.type != "cuda" or has_experts(model):
        return False
    return model.num_parameters() >= WORTH_COMPILING


def has_experts(model: PreTrainedModel) -> bool:
    """Returns whether the model is a mixture of experts. Some families have experts in a module's
    name, Granite in that of its class only."""
    for name, module in model.named_modules():
        if "expert" in (name + type(module).__name__).lower():
            return True
    return False
