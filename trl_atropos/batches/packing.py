"""Lays the rollouts of a micro-batch out in the rows that the model computes.

In come the lengths of a micro-batch of TRL's, (B, P + C) with padding on both sides. Out comes a
`Layout`: the rows, and the way back of the scores to their columns. A packed micro-batch is one
row of T tokens whose positions begin anew with every path (`sharing.py`), so that nothing is
computed on padding. What several paths have in common may stand in the row once.
`packed_attention.py` keeps paths apart within the row. `generation_batch.py` makes a layout for
every micro-batch and scores by it.

Not every model can be packed, because layers that carry a state from token to token run across
borders. So a model is tried before the first batch (`trial.py`). If it fails, its rollouts are
padded: by `micro_batches.without_padding`, or by `Layout.padded` if one of them branches.

Index arithmetic follows one convention. A table has a plural name and an entry for each rollout or
path: `lengths[2]` is the length of path 2. An index has a singular name and an entry for each token
of the row: `path[5]` is the path of the token at place 5. So `lengths[path]` has an entry for each
token, the length of its path. Results are exempt: the fields of `Layout` (`tokens`, `predicts`,
`columns`) and `keys` have plural names, and an entry for each token or key.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trl_atropos.batches.micro_batches import Scores, join_scores
from trl_atropos.batches.packed_attention import RowFormat, copied_at_once
from trl_atropos.batches.sequence_parallel import SequenceGroup
from trl_atropos.batches.sharing import Path, RolloutTokens, Sharing, share


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
    # ranks that divide the row; None = this one has all of it
    sequence_group: SequenceGroup | None = None

    @classmethod
    def of(
        cls,
        rollouts: Sequence[RolloutTokens],
        prompt_width: int,
        completion_width: int,
        row_format: RowFormat,
    ) -> "Layout":
        """
        Returns the layout of one packed row.

        Args:
            rollouts: B of them, in the order of the micro-batch.
            prompt_width: P.
            completion_width: C.
            row_format: how the row is computed.
        """
        paths = _paths_of(rollouts)
        sharing = Sharing.nothing(len(paths))
        if row_format.shares and all(path.ids is not None for path in paths):
            sharing = share([path.ids for path in paths])
        row = _Row.of(paths, sharing)
        columns_of = _Columns(rollouts, prompt_width, completion_width)

        tokens = columns_of.padded(row.own_places(paths))
        position = row.positions()
        predicts, columns = columns_of.scores(paths, row.places)

        # Up to the next multiple, a part of no rollout fills the row: 2 tokens follow 6 if the
        # multiple is 4. Any tokens will do. These are the first of (B, P + C), which repeat if
        # there are too few.
        lengths = row.lengths
        shared_lengths = row.shared_lengths
        key_places = row.key_places()
        filling = -len(tokens) % row_format.multiple
        if filling:
            filling_position = np.arange(filling)
            key_places.append(len(tokens) + filling_position)
            padded_size = len(rollouts) * (prompt_width + completion_width)
            tokens = np.append(tokens, filling_position % padded_size)
            position = np.append(position, filling_position)
            lengths = np.append(lengths, filling)
            shared_lengths = np.append(shared_lengths, 0)
        is_scored = np.zeros(len(tokens), dtype=np.int64)  # (T,)
        is_scored[predicts + 1] = 1
        keys = np.zeros(0, dtype=np.int64)
        if shared_lengths.any():
            keys = np.concatenate(key_places)

        arrays = [tokens, is_scored, position, predicts, columns, keys]
        tensors = copied_at_once(arrays, row_format.device)
        tokens, is_scored, position, predicts, columns, keys = tensors
        inputs = row_format.inputs(position[None], lengths, shared_lengths, keys)
        group = row_format.sequence_group
        return cls(tokens[None], is_scored[None], predicts, columns, inputs, group)

    @classmethod
    def padded(
        cls,
        rollouts: Sequence[RolloutTokens],
        prompt_width: int,
        completion_width: int,
        device: torch.device,
        multiple: int = 1,
    ) -> "Layout":
        """
        Returns a layout of one row for each path, which begins in its first column. So the position
        of a token is its column, also for models that learn positions. (TRL pads prompts on the
        left, and passes no positions.)

        The example of the class, padded:

            rows         a  b  a  a  |  c  d  e  f
            tokens       1  2  1  1  |  4  5  6  7      padding repeats the first token
            is_scored    0  1  0  0  |  0  0  1  1
            predicts     0  5  6
            columns      0  2  3

        Args:
            multiple: of the width of the rows.
        """
        paths = _paths_of(rollouts)
        lengths = np.array([len(path) for path in paths])  # (R,)
        longest = int(lengths.max())
        row_width = longest + -longest % multiple  # T
        columns_of = _Columns(rollouts, prompt_width, completion_width)
        begins = np.arange(len(paths)) * row_width  # in the flattened rows
        places = [begin + np.arange(len(path)) for begin, path in zip(begins, paths)]
        predicts, columns = columns_of.scores(paths, places)

        is_inside = np.arange(row_width) < lengths[:, None]  # (R, T)
        own = columns_of.padded([(path.rollout, path.places) for path in paths])
        tokens = np.empty(is_inside.shape, dtype=np.int64)
        tokens[is_inside] = own
        first = np.broadcast_to(tokens[:, :1], tokens.shape)
        tokens = np.where(is_inside, tokens, first)  # the mask hides the padding
        is_scored = np.zeros(is_inside.size, dtype=np.int64)
        is_scored[predicts + 1] = 1

        mask = is_inside.astype(np.int64).ravel()
        arrays = [tokens.ravel(), is_scored, predicts, columns, mask]
        tensors = copied_at_once(arrays, device)
        tokens, is_scored, predicts, columns, mask = tensors
        shape = is_inside.shape
        inputs = {"attention_mask": mask.view(shape)}
        return cls(tokens.view(shape), is_scored.view(shape), predicts, columns, inputs)

    def in_columns(self, values: Tensor, count: int, completion_width: int) -> Tensor:
        """Returns values of the completions' tokens, (N, ...), as (B, C, ...), with 0 on padding.
        `count` is B, and `completion_width` is C."""
        _, *shape = values.shape
        padded = values.new_zeros(count * completion_width, *shape)
        padded = padded.index_copy(0, self.columns, values)
        return padded.view(count, completion_width, *shape)


def _paths_of(rollouts: Sequence[RolloutTokens]) -> list[Path]:
    """Returns the paths of all rollouts of a micro-batch, rollout by rollout."""
    paths = []
    for number, rollout in enumerate(rollouts):
        paths += rollout.paths(number)
    return paths


class _Columns:
    """Finds a rollout's tokens in a padded micro-batch, whose prompts end at column P."""

    def __init__(self, rollouts: Sequence[RolloutTokens], prompt_width: int, completion_width: int):
        self._prompt_lengths = [rollout.prompt_length for rollout in rollouts]
        self._prompt_width = prompt_width
        self._completion_width = completion_width

    def padded(self, pieces: Sequence[tuple[int, np.ndarray]]) -> np.ndarray:
        """Returns where tokens stand in the flattened (B, P + C). Each piece is the number of a
        rollout and places in its row."""
        padded_width = self._prompt_width + self._completion_width
        tokens = []
        for rollout, places in pieces:
            begin = rollout * padded_width + self._prompt_width - self._prompt_lengths[rollout]
            tokens.append(begin + places)
        return np.concatenate(tokens)

    def scores(
        self, paths: Sequence[Path], places: Sequence[np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns `predicts` and `columns` of `Layout`. `places` are those of each path's tokens in
        the flattened rows."""
        predicts = []
        columns = []
        for path, row_places in zip(paths, places, strict=True):
            predicts.append(row_places[path.scored - 1])
            begin = path.rollout * self._completion_width - self._prompt_lengths[path.rollout]
            columns.append(begin + path.places[path.scored])
        all_predicts = np.concatenate(predicts)
        order = all_predicts.argsort(kind="stable")
        return all_predicts[order], np.concatenate(columns)[order]


class _Row(NamedTuple):
    """
    Lists the parts that make up a packed row. A part is what one path computes itself. All arrays
    are in the order of the row.

    Paths `c d b`, `a` and `c d e f`, of which the last has `c` from the first:

        row               a | c  d  b | d  e  f
        position          0 | 0  1  2 | 1  2  3
        paths             1   0         2
        lengths           1   3         3
        shared_lengths    0   0         1
        places            path 0: 1 2 3    path 1: 0    path 2: 1 4 5 6
    """

    paths: np.ndarray  # (parts,)
    lengths: np.ndarray  # (parts,), tokens of the part
    shared_lengths: np.ndarray  # (parts,), tokens of its path that precede the part
    places: list[np.ndarray]  # of each path's tokens in the row, by path

    @classmethod
    def of(cls, paths: Sequence[Path], sharing: Sharing) -> "_Row":
        path_lengths = np.array([len(path) for path in paths])
        # By shared tokens, then by length, because attention takes neighbours of the same lengths
        # at once. (`lexsort` takes its main key last.)
        order = np.lexsort((path_lengths, sharing.lengths))
        own_lengths = path_lengths - sharing.lengths
        order = order[own_lengths[order] > 0]  # a path that another has whole has no part
        lengths = own_lengths[order]
        begins = np.zeros(len(paths), dtype=np.int64)  # by path
        begins[order] = lengths.cumsum() - lengths
        places: list[np.ndarray] = [np.zeros(0, dtype=np.int64)] * len(paths)
        for path in sharing.order.tolist():
            own = np.arange(begins[path], begins[path] + own_lengths[path])
            shared_length = sharing.lengths[path]
            if shared_length:
                shared = places[sharing.previous[path]][:shared_length]
                own = np.concatenate([shared, own])
            places[path] = own
        return cls(order, lengths, sharing.lengths[order], places)

    def own_places(self, paths: Sequence[Path]) -> list[tuple[int, np.ndarray]]:
        """Returns each part's tokens: the number of their rollout, and their places in its row."""
        pieces = []
        for path, shared_length in zip(self.paths.tolist(), self.shared_lengths.tolist()):
            pieces.append((paths[path].rollout, paths[path].places[shared_length:]))
        return pieces

    def positions(self) -> np.ndarray:
        """Returns the position of each token on its path, (T,)."""
        parts = zip(self.lengths.tolist(), self.shared_lengths.tolist())
        return np.concatenate([np.arange(shared, shared + length) for length, shared in parts])

    def key_places(self) -> list[np.ndarray]:
        """Returns the places in the row of the keys that each part sees: all of its path."""
        return [self.places[path] for path in self.paths.tolist()]


# ------------------------------------------------------------------------------------------ scoring


def score_packed(
    forward: Callable[..., Scores],
    model: Any,
    ids: Tensor,
    completion_width: int,
    layout: Layout,
) -> Scores:
    """
    Scores a padded micro-batch by the rows of its layout.

    Args:
        forward: TRL's `_get_per_token_logps_and_entropies`.
        ids: (B, P + C).
        completion_width: C.

    Returns:
        Log-probabilities and entropies, (B, C) each, 0 on padding, and the auxiliary loss of the
        rows if there is one.
    """

    def laid_out_model(input_ids, attention_mask, **options):
        """Stands in for the model. `layout.inputs` take the place of TRL's mask."""
        group = layout.sequence_group
        if group is not None:
            return group.score(model, input_ids, **layout.inputs, **options)
        return model(input_ids=input_ids, **layout.inputs, **options)

    def in_columns(scores: Tensor) -> Tensor:
        # (R, T - 1): the score of a token stands in the place of the token before it.
        row = layout.predicts // row_width
        place = layout.predicts % row_width
        completion_scores = scores[row, place]  # (N,)
        return layout.in_columns(completion_scores, len(ids), completion_width)

    rows = ids.flatten()[layout.tokens]  # (R, T)
    row_width = rows.size(1)
    # TRL scores the tokens that its mask leaves, and the model does not see this mask.
    logprobs, entropies, auxiliary_loss = forward(
        laid_out_model,
        input_ids=rows,
        attention_mask=layout.is_scored,
        logits_to_keep=row_width - 1,
    )
    if entropies is not None:
        entropies = in_columns(entropies)
    return in_columns(logprobs), entropies, auxiliary_loss


def score_all(
    forward: Callable[..., Scores],
    model: Any,
    ids: Tensor,
    completion_width: int,
    micro_batches: Sequence[slice],
    layouts: Sequence[Layout],
) -> Scores:
    """
    Scores a batch as `score_packed` does each of its micro-batches.

    Args:
        ids: (B, P + C).
        micro_batches: rollouts of each; together, all of the batch in its order.
        layouts: of each micro-batch, for these widths.
    """
    scored = []
    for rollouts, layout in zip(micro_batches, layouts, strict=True):
        scores = score_packed(forward, model, ids[rollouts], completion_width, layout)
        scored.append(scores)
    return join_scores(scored)
