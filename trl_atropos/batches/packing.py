"""Packs the rollouts of a micro-batch into one row, so that nothing is computed on padding.

In come the lengths of a micro-batch of TRL's, (B, P + C) with padding on both sides. Out comes a
`Layout`: one row of T tokens whose positions begin anew with every rollout, and the way back of
the scores to their columns. `generation_batch.py` makes a layout for every micro-batch and scores
by it. Rollouts with the same prompt may share it. `packed_attention.py` keeps rollouts apart within
the row.

Not every model can be packed, because layers that carry a state from token to token run across
borders. So a model is tried before the first batch (`trial.py`). If it fails, its rollouts are
padded (`micro_batches.without_padding`).

Index arithmetic follows one convention. A table has a plural name and an entry for each rollout,
part or group: `lengths[2]` is the length of rollout 2. An index has a singular name and an entry
for each token of the row: `rollout[5]` is the rollout of the token at place 5. So
`lengths[rollout]` has an entry for each token, the length of its rollout. Results are exempt: the
fields of `Layout` (`tokens`, `predicts`, `columns`) and `keys` have plural names, and an entry for
each token or key.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trl_atropos.batches.micro_batches import Scores
from trl_atropos.batches.packed_attention import RowFormat
from trl_atropos.rollouts.rollout import Rollout

# Prompts are shared if that saves at least this share of the tokens.
WORTH_SHARING = 1 / 8
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
        is_scored    0  1  0  0  1  1
        predicts     0  3  4            in the row: `a` predicts `b`, `d` predicts `e`, and so on
        columns      0  2  3            of `b`, `e` and `f` in (B, C) flattened
    """

    tokens: Tensor  # (R, T), into the flattened (B, P + C)
    is_scored: Tensor  # (R, T): 1 for a token of a completion, else 0
    # (N,), into the flattened rows: the token before each token of a completion
    predicts: Tensor
    columns: Tensor  # (N,), into the flattened (B, C)
    inputs: dict[str, Any]  # what the model gets beside the rows

    @classmethod
    def of(
        cls,
        prompt_lengths: Ints,
        completion_lengths: Ints,
        prompt_width: int,
        completion_width: int,
        row_format: RowFormat,
        prompt_numbers: Ints | None = None,
    ) -> "Layout":
        """
        Returns the layout of one packed row.

        Args:
            prompt_lengths: (B,), tokens of each prompt, at least 1.
            completion_lengths: (B,), tokens of each completion.
            prompt_width: P.
            completion_width: C.
            row_format: how the row is computed.
            prompt_numbers: (B,), the same number for rollouts with the same prompt. They share it
                if that pays.
        """
        prompt_lengths = np.asarray(prompt_lengths)
        lengths = prompt_lengths + completion_lengths  # (B,)
        if not row_format.shares:
            prompt_numbers = None
        sharing = _share_prompts(prompt_lengths, lengths, prompt_numbers)
        parts = _Parts.of(prompt_lengths, lengths, sharing)

        # (T,) each, in the example of the class, where nothing is shared:
        part, place = _count_within(parts.lengths)
        rollout = parts.rollouts[part]  # 0  0  1  1  1  1
        position = parts.shared_lengths[part] + place  # 0  1  0  1  2  3: in the rollout
        column = position - prompt_lengths[rollout]  # -1  0 -2 -1  0  1: in the completion
        padded_width = prompt_width + completion_width
        padded_begin = rollout * padded_width  # 0  0  4  4  4  4: in (B, P + C)
        tokens = padded_begin + prompt_width + column  # 1  2  4  5  6  7
        completion_begin = rollout * completion_width  # 0  0  2  2  2  2: in (B, C)

        scored_places = np.flatnonzero(column >= 0)  # (N,), in the row
        columns = (completion_begin + column)[scored_places]

        # Up to the next multiple, a part of no rollout fills the row: 2 tokens follow 6 if the
        # multiple is 4. Any tokens will do. These are the first of (B, P + C), which repeat if
        # there are too few.
        filling = -len(tokens) % row_format.multiple
        if filling:
            filling_position = np.arange(filling)
            filling_tokens = filling_position % (len(lengths) * padded_width)
            tokens = np.append(tokens, filling_tokens)
            position = np.append(position, filling_position)
            parts = parts.with_filling(filling)
        is_scored = np.zeros(len(tokens), dtype=np.int64)  # (T,)
        is_scored[scored_places] = 1
        keys = np.zeros(0, dtype=np.int64)
        if len(sharing.owners):
            keys = parts.keys()

        arrays = [tokens, is_scored, position, scored_places - 1, columns, keys]
        tensors = _copied_at_once(arrays, row_format.device)
        tokens, is_scored, position, predicts, columns, keys = tensors
        inputs = row_format.inputs(position[None], parts.lengths, parts.shared_lengths, keys)
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
            is_scored    0  1  0  0  |  0  0  1  1
            predicts     0  5  6
            columns      0  2  3

        Args:
            prompt_mask: (B, P), ones on the right.
            completion_mask: (B, C), ones on the left.
            multiple: of the width of the rows.
        """
        count, prompt_width = prompt_mask.shape
        completion_width = completion_mask.size(1)
        device = prompt_mask.device
        prompt_lengths = prompt_mask.sum(1, keepdim=True)  # (B, 1)
        lengths = prompt_lengths + completion_mask.sum(1, keepdim=True)  # (B, 1)
        longest = int(lengths.max())
        row_width = longest + -longest % multiple  # T
        position = torch.arange(row_width, device=device).expand(count, -1)  # (B, T)
        is_inside = position < lengths
        rollout = torch.arange(count, device=device)[:, None]  # (B, 1)
        column = position - prompt_lengths  # (B, T), in the completion; below 0 in the prompt
        padded_begin = rollout * (prompt_width + completion_width)  # (B, 1), in (B, P + C)
        tokens = padded_begin + prompt_width + column
        # padding repeats the first token, which the mask hides
        first_token = tokens[:, :1]
        tokens = tokens.where(is_inside, first_token)
        is_scored = is_inside & (column >= 0)
        scored_places = is_scored.flatten().nonzero()[:, 0]  # (N,), in the flattened rows
        predicts = scored_places - 1
        completion_begin = rollout * completion_width  # (B, 1), in (B, C)
        columns = (completion_begin + column)[is_scored]
        inputs = {"attention_mask": is_inside.long()}
        return cls(tokens, is_scored.long(), predicts, columns, inputs)

    def in_columns(self, values: Tensor, count: int, completion_width: int) -> Tensor:
        """Returns values of the completions' tokens, (N, ...), as (B, C, ...), with 0 on padding.
        `count` is B, and `completion_width` is C."""
        _, *shape = values.shape
        padded = values.new_zeros(count * completion_width, *shape)
        padded = padded.index_copy(0, self.columns, values)
        return padded.view(count, completion_width, *shape)


def number_prompts(rollouts: Sequence[Rollout]) -> np.ndarray:
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

    owners: np.ndarray  # (G,), for each shared prompt a rollout that begins with it
    # (B,), the shared prompt of each rollout, from 0 to G - 1. A rollout that shares no token has
    # any number, even -1: `_Parts.keys` discards what it finds there.
    prompts: np.ndarray
    shared_lengths: np.ndarray  # (B,), tokens that each rollout shares, or 0


def _share_prompts(
    prompt_lengths: np.ndarray, lengths: np.ndarray, prompt_numbers: Ints | None
) -> _Sharing:
    """
    Returns the prompts to share: none if that saves too little.

    Three rollouts have the prompts `c d`, `a` and `c d`, whose `prompt_numbers` are 5, 3 and 5. So
    `a` is group 0, and `c d` is group 1. An entry for each group:

        group              0   1
        firsts             1   0      its first rollout
        sizes              1   2      its rollouts
        is_shared          0   1
        numbers           -1   0      its number among the groups that share their prompt

    An entry for each rollout:

        rollout            0   1   2
        groups             1   0   1
        shared_lengths     1   0   1      `c`; `d` stays with each of them

    The only shared prompt is that of rollout 0, so `owners` is [0].
    """
    zeros = np.zeros_like(prompt_lengths)
    nothing = _Sharing(owners=np.zeros(0, dtype=np.int64), prompts=zeros, shared_lengths=zeros)
    if prompt_numbers is None:
        return nothing
    _, firsts, groups, sizes = np.unique(
        prompt_numbers,
        return_index=True,
        return_inverse=True,
        return_counts=True,
    )
    is_shared = (sizes > 1) & (prompt_lengths[firsts] > 1)
    numbers = is_shared.cumsum() - 1
    owners = firsts[is_shared]
    # The last token of a prompt predicts another token in each rollout, and stays with it.
    shared_lengths = np.where(is_shared[groups], prompt_lengths - 1, 0)
    saved = shared_lengths.sum() - shared_lengths[owners].sum()
    if saved < WORTH_SHARING * lengths.sum():
        return nothing
    return _Sharing(owners, numbers[groups], shared_lengths)


class _Parts(NamedTuple):
    """
    Lists the runs of tokens that make up a row, in its order: the shared prompts without their last
    token, then what else there is of each rollout. All arrays are (parts,).

    Rollouts `c d | b` and `c d | e f`, which share their prompt:

        row               c | d  b | d  e  f
        part              0 | 1  1 | 2  2  2
        position          0 | 1  2 | 1  2  3
        rollouts          0  0  1
        lengths           1  2  3
        shared_lengths    0  1  1
        prompt_parts      0  0  0
    """

    rollouts: np.ndarray  # whose tokens they are
    lengths: np.ndarray  # tokens of the part itself
    shared_lengths: np.ndarray  # tokens of a shared prompt that precede the part in its rollout
    prompt_parts: np.ndarray  # the part that is this shared prompt

    @classmethod
    def of(cls, prompt_lengths: np.ndarray, lengths: np.ndarray, sharing: _Sharing) -> "_Parts":
        """Returns the parts of rollouts with these lengths of prompts, and of all, (B,)."""
        owners = sharing.owners
        shared_lengths = sharing.shared_lengths
        # By shared tokens, then by length, because attention takes neighbours of the same lengths
        # at once. (`lexsort` takes its main key last.)
        order = np.lexsort((lengths, shared_lengths))  # (B,)
        rest = lengths - shared_lengths  # (B,), tokens that are not shared
        return cls(
            rollouts=np.append(owners, order),
            lengths=np.append(prompt_lengths[owners] - 1, rest[order]),
            shared_lengths=np.append(np.zeros_like(owners), shared_lengths[order]),
            prompt_parts=np.append(np.arange(len(owners)), sharing.prompts[order]),
        )

    def with_filling(self, length: int) -> "_Parts":
        """Returns the parts and one more of that length, which belongs to no rollout."""
        return _Parts(
            rollouts=np.append(self.rollouts, 0),
            lengths=np.append(self.lengths, length),
            shared_lengths=np.append(self.shared_lengths, 0),
            prompt_parts=np.append(self.prompt_parts, 0),
        )

    def keys(self) -> np.ndarray:
        """
        Returns the places in the row of the keys that each part sees, part after part: first those
        of its shared prompt, then its own. In the example of the class, one entry for each key:

            part      0 | 1  1  1 | 2  2  2  2
            place     0 | 0  1  2 | 0  1  2  3      among the keys of its part
            begin     0 | 1  1  1 | 3  3  3  3      of its part in the row
            keys      0 | 0  1  2 | 0  3  4  5
        """
        part, place = _count_within(self.shared_lengths + self.lengths)
        begins = _begins(self.lengths)
        begin = begins[part]
        shared = self.shared_lengths[part]
        prompt_begin = begins[self.prompt_parts[part]]
        return np.where(place < shared, prompt_begin + place, begin + place - shared)


def _count_within(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the part of each token, and its place in the part. Lengths `1 3` give `0 1 1 1` and
    `0 0 1 2`."""
    parts = np.arange(len(lengths))
    part = np.repeat(parts, lengths)  # (T,)
    row_place = np.arange(len(part))
    begin = _begins(lengths)[part]
    return part, row_place - begin


def _begins(lengths: np.ndarray) -> np.ndarray:
    """Returns where parts begin that stand end to end. Lengths `1 3 2` give `0 1 4`."""
    ends = lengths.cumsum()
    return ends - lengths


def _copied_at_once(arrays: Sequence[np.ndarray], device: torch.device) -> Sequence[Tensor]:
    """Copies arrays to the device in one piece: with each copy, the device waits for the host."""
    joined = torch.from_numpy(np.concatenate(arrays)).to(device)
    sizes = [len(array) for array in arrays]
    return joined.split(sizes)


# ------------------------------------------------------------------------------------------ scoring


def score_packed(
    forward: Callable[..., Scores],
    model: Any,
    ids: Tensor,
    completion_width: int,
    layout: Layout,
) -> Scores:
    """
    Scores a padded micro-batch as one row.

    Args:
        forward: TRL's `_get_per_token_logps_and_entropies`.
        ids: (B, P + C).
        completion_width: C.

    Returns:
        Log-probabilities and entropies, (B, C) each, 0 on padding, and no auxiliary loss.
    """

    def packed_model(input_ids, attention_mask, **options):
        """Stands in for the model. `layout.inputs` take the place of TRL's mask."""
        return model(input_ids=input_ids, **layout.inputs, **options)

    def in_columns(scores: Tensor) -> Tensor:
        completion_scores = scores[0, layout.predicts]  # (N,)
        return layout.in_columns(completion_scores, len(ids), completion_width)

    row = ids.flatten()[layout.tokens]  # (1, T)
    # TRL scores the tokens that its mask leaves, and the model does not see this mask. Scores are
    # (1, T - 1): the score of a token stands in the place of the token before it.
    logprobs, entropies, _ = forward(
        packed_model,
        input_ids=row,
        attention_mask=layout.is_scored,
        logits_to_keep=row.size(1) - 1,
    )
    if entropies is not None:
        entropies = in_columns(entropies)
    return in_columns(logprobs), entropies, None


def score_all(
    forward: Callable[..., Scores],
    model: Any,
    ids: Tensor,
    mask: Tensor,
    completion_width: int,
    micro_batches: Sequence[slice],
    row_format: RowFormat,
    prompt_numbers: np.ndarray | None = None,
) -> Scores:
    """
    Scores a batch as `score_packed` does each of its micro-batches.

    Args:
        mask: (B, P + C), the attention mask.
        micro_batches: rollouts of each; together, all of the batch in its order.
        prompt_numbers: (B,), as in `Layout.of`.
    """
    prompt_width = ids.size(1) - completion_width
    prompt_mask, completion_mask = mask.split((prompt_width, completion_width), dim=1)
    lengths = torch.stack([prompt_mask.sum(1), completion_mask.sum(1)])
    prompt_lengths, completion_lengths = lengths.cpu().numpy()  # (B,) each
    layouts = []  # all before the first forward pass, because copies to the device wait for it
    for rollouts in micro_batches:
        numbers = prompt_numbers
        if prompt_numbers is not None:
            numbers = prompt_numbers[rollouts]
        layout = Layout.of(
            prompt_lengths[rollouts],
            completion_lengths[rollouts],
            prompt_width,
            completion_width,
            row_format,
            numbers,
        )
        layouts.append(layout)
    logprobs = []
    entropies = []
    for rollouts, layout in zip(micro_batches, layouts):
        scores = score_packed(forward, model, ids[rollouts], completion_width, layout)
        logprobs.append(scores[0])
        entropies.append(scores[1])
    if entropies[0] is None:
        return torch.cat(logprobs), None, None
    return torch.cat(logprobs), torch.cat(entropies), None
