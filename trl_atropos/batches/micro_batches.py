"""Divides a generation batch into micro-batches: which rollouts share one, on which rank, and how
padding is left out of those that are padded.

TRL pads a generation batch to its longest rollout and splits it afterwards, so that most of the
computation is on padding. Here rollouts of similar length share a micro-batch, if that does not
change the gradient of the optimizer step, and every rank gets about as many tokens. If rollouts
share what they have in common (`sharing.py`), those that begin alike share a micro-batch instead.

`GenerationBatch` calls `plan` when it has new rollouts. It then cuts TRL's tensors into
the planned micro-batches with `join`, `take` and `trim`, and scores padded ones with
`without_padding`. TRL's tensors of a batch have shape (B, P) for prompts, padded on the left, and
(B, C) for completions, padded on the right.
"""

import math
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from trl_atropos.batches.sharing import is_worth_sharing

if TYPE_CHECKING:
    from trl_atropos.batches.sharing import BatchTokens
    from trl_atropos.config import AtroposGRPOConfig

# What one more micro-batch costs beside its tokens, as a share of `max_tokens_per_micro_batch`.
MICRO_BATCH_OVERHEAD = 1 / 16

# If the configuration sets no bound, a GPU's micro-batches have `FIRST_TOKENS` in the first step.
# From then on, they have as many as fit into `SHARE` of the free memory. `MOST_TOKENS` bounds
# them, because larger ones are no faster. The rest is for gaps among blocks of many sizes: on an
# H100, torch held a fifth on top of what was allocated, and could use none of it.
FIRST_TOKENS = 4096
MOST_TOKENS = 16384
SHARE = 0.6

Batch = dict[str, Tensor]
# log-probabilities, entropies, auxiliary loss
Scores = tuple[Tensor, Tensor | None, Tensor | None]
# of (input_ids, attention_mask, logits_to_keep)
Forward = Callable[[Tensor, Tensor, int], Scores]


# ----------------------------------------------------------------------------------------- planning


@dataclass(frozen=True)
class Plan:
    """The division of a generation batch. The same on every rank."""

    # indices into the generation batch: all of rank 0, of rank 1, ..., each in micro-batch order
    order: list[int]
    sizes: list[list[int]]  # rollouts in each micro-batch, by training step; the same on every rank

    def micro_batches(self) -> list[list[slice]]:
        """Returns the slice of a rank's own rollouts that each micro-batch has, by training step.
        Sizes [[1, 2], [3]] give rollouts 0:1 and 1:3 for the first step and 3:6 for the second."""
        slices = []
        begin = 0
        for sizes in self.sizes:
            of_step = []
            for size in sizes:
                of_step.append(slice(begin, begin + size))
                begin += size
            slices.append(of_step)
        return slices

    def undo(self, column: MutableSequence) -> None:
        """Puts the last entries of `column`, one per rollout in this order, into the order in which
        the rollouts came."""
        arrived = {}
        for index in reversed(self.order):
            arrived[index] = column.pop()
        for index in sorted(arrived):
            column.append(arrived[index])


def plan(
    lengths: Sequence[int],
    ranks: int,
    steps: int,
    together: int,
    max_tokens: int | None = None,
    seed: int = 0,
    packed: bool = False,
    sharing: "BatchTokens | None" = None,
) -> Plan:
    """
    Returns the plan for rollouts of these lengths.

    Args:
        lengths: tokens of each rollout of the generation batch, a multiple of `ranks * steps`
            rollouts.
        steps: training steps (forward and backward) that the batch is for.
        together: number of consecutive training steps that always belong to one optimizer step.
            Rollouts are moved within these only: which optimizer step trains on a rollout is drawn
            at random, as in TRL.
        max_tokens: that a micro-batch may have, padding included; a longer rollout has a
            micro-batch of its own. None makes each training step one micro-batch.
        packed: whether a micro-batch has no padding (`packing.py`).
        sharing: counts what rollouts have in common, if they share it. Then rollouts that begin
            alike are neighbours, and groups stay on one rank. Otherwise those of similar length are
            neighbours.
    """
    num_tokens = np.asarray(lengths)
    indices = np.arange(len(num_tokens))
    if steps > together:
        generator = torch.Generator().manual_seed(seed)
        indices = torch.randperm(len(num_tokens), generator=generator).numpy()
    sort_key = -num_tokens  # longest first
    if sharing is not None:
        sort_key = sharing.places
    hands_of_steps = []
    for window in indices.reshape(steps // together, -1):
        ordered = window[np.argsort(sort_key[window], kind="stable")]
        loads = [0] * ranks
        for block in ordered.reshape(together, -1):
            if sharing is None:
                hands = _deal(block, num_tokens, loads)
            else:
                hands = _deal_groups(block, num_tokens, loads, sharing)
            hands_of_steps.append(hands)
    order = []
    for rank in range(ranks):
        for hands in hands_of_steps:
            order.extend(hands[rank])
    if max_tokens is None:
        per_step = len(num_tokens) // (ranks * steps)
        return Plan(order, [[per_step] for _ in hands_of_steps])
    sizes = [_sizes(hands, num_tokens, max_tokens, packed, sharing) for hands in hands_of_steps]
    return Plan(order, sizes)


def _deal(block: np.ndarray, num_tokens: np.ndarray, loads: list[int]) -> list[list[int]]:
    """Deals a training step's rollouts to the ranks, the same number to each. Returns a list per
    rank, and adds the rank's tokens to its entry of `loads`. The next rollout goes to the rank with
    the fewest tokens, so that all work on similar lengths at the same time: sharded ranks wait for
    each other in every layer."""
    per_rank = len(block) // len(loads)
    hands = [[] for _ in loads]
    with_room = list(range(len(loads)))  # ranks
    for index in block:
        rank = min(with_room, key=loads.__getitem__)
        loads[rank] += num_tokens[index]
        hands[rank].append(int(index))
        if len(hands[rank]) == per_rank:
            with_room.remove(rank)
    return hands


def _deal_groups(
    block: np.ndarray, num_tokens: np.ndarray, loads: list[int], sharing: "BatchTokens"
) -> list[list[int]]:
    """Deals a training step's rollouts as `_deal` does, but a group at a time, because the rollouts
    of a group share their prompt. A group that no rank has room for is divided."""
    per_rank = len(block) // len(loads)
    hands = [[] for _ in loads]
    last_of_runs = np.flatnonzero(np.diff(sharing.groups[block])) + 1
    runs = np.split(block, last_of_runs)  # of rollouts of one group, side by side
    runs.sort(key=len, reverse=True)
    while runs:
        run = runs.pop(0)
        room = [per_rank - len(hand) for hand in hands]
        fitting = [rank for rank, free in enumerate(room) if free >= len(run)]
        if fitting:
            rank = min(fitting, key=loads.__getitem__)
        else:
            rank = room.index(max(room))
            runs.append(run[room[rank] :])
            run = run[: room[rank]]
        loads[rank] += int(num_tokens[run].sum())
        hands[rank].extend(run.tolist())
    places = sharing.places
    for hand in hands:
        hand.sort(key=places.__getitem__)
    return hands


def _sizes(
    hands: list[list[int]],
    num_tokens: np.ndarray,
    max_tokens: int,
    packed: bool,
    sharing: "BatchTokens | None",
) -> list[int]:
    """Returns how many rollouts each micro-batch of a training step has. All ranks cut at the same
    positions, because TRL gathers a value per rollout in every micro-batch."""
    longest = np.max([num_tokens[hand] for hand in hands], axis=0)
    added = None
    if sharing is not None:
        added = np.max([_added_tokens(hand, sharing) for hand in hands], axis=0)
    return _cut(longest, max_tokens, packed, added)


def _added_tokens(hand: list[int], sharing: "BatchTokens") -> np.ndarray:
    """Returns how many tokens each rollout of a rank adds to a micro-batch that has the rollout
    before it."""
    added = [int(sharing.lengths[hand[0]])]
    for before, rollout in pairwise(hand):
        added.append(sharing.added_by(rollout, before))
    return np.array(added)


def _cut(
    lengths: np.ndarray, max_tokens: int, packed: bool, added: np.ndarray | None = None
) -> list[int]:
    """Cuts rollouts, in this order, into micro-batches of at most `max_tokens` tokens, at the least
    total cost: the tokens, padding included, and the overhead of every micro-batch. Returns how
    many rollouts each has. `added` are the tokens that each rollout adds to a micro-batch that has
    the rollout before it, if they share tokens.

    For example, `max_tokens` 32 has an overhead of 2. Lengths 9, 5, 3, 2, padded, become [1, 1, 2]:
    9 + 5 + 6 tokens and three overheads cost 26. The sizes [2, 2] would cost 18 + 6 + 4 = 28.
    """
    overhead = max_tokens * MICRO_BATCH_OVERHEAD
    cost = np.zeros(len(lengths) + 1)  # the least one of the rollouts up to each
    sizes = [[]]  # by which these have it
    for end, length in enumerate(lengths, start=1):
        tokens = _tokens_from_each(lengths[:end], packed)
        if added is not None:
            shared = _shared_tokens_from_each(lengths[:end], added[:end])
            tokens = np.where(is_worth_sharing(tokens - shared, tokens), shared, tokens)
        total = cost[:end] + tokens + overhead
        total[tokens > max(max_tokens, length)] = np.inf
        begin = int(total.argmin())
        cost[end] = total[begin]
        sizes.append([*sizes[begin], end - begin])
    return sizes[-1]


def _tokens_from_each(lengths: np.ndarray, packed: bool) -> np.ndarray:
    """Returns the tokens of the micro-batch that begins with each rollout and goes to the last one.
    Lengths 9, 5, 3, 2 give 19, 10, 5, 2 if packed; padded to the first rollout, 36, 15, 6, 2."""
    if packed:
        return lengths[::-1].cumsum()[::-1]
    rollouts = len(lengths) - np.arange(len(lengths))
    return rollouts * lengths


def _shared_tokens_from_each(lengths: np.ndarray, added: np.ndarray) -> np.ndarray:
    """Returns what `_tokens_from_each` does if rollouts share tokens. Lengths 9, 5, 3 of which the
    last two add 2 and 1 to the one before give 12, 6, 3."""
    added_behind = added[::-1].cumsum()[::-1] - added
    return lengths + added_behind


def loss_share(args: "AtroposGRPOConfig", num_rollouts: int) -> float:
    """Returns the factor for TRL's loss of a micro-batch of `num_rollouts`, such that the sum over
    an optimizer step is the loss with `per_device_train_batch_size` rollouts in each. With `dapo`,
    `cispo` and `vespo` TRL divides by the tokens of the generation batch, with the others by the
    rollouts of the micro-batch. (`bnpo` is never regrouped.)"""
    if args.loss_type in ("dapo", "cispo", "vespo"):
        return 1.0
    return num_rollouts / args.per_device_train_batch_size


# ----------------------------------------------------------------------------------- memory of GPUs


class TokenBudget:
    """
    Most tokens of a micro-batch, if each generation batch is for whole optimizer steps.

    Args:
        device: of this rank.
        gradients: bytes of all gradients, which do not exist between two steps.
    """

    def __init__(self, device: torch.device, gradients: int):
        self.measures = False  # now: in the first generation batch
        self._tokens: int | None = None
        self._device = device
        self._gradients = gradients
        self._per_token = 0.0  # bytes

    @contextmanager
    def measured(self, tokens: int) -> Iterator[None]:
        """Measures the memory of the forward and backward pass of a micro-batch of so many tokens,
        which runs within. The gradients must exist already."""
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        yield
        peak = torch.cuda.max_memory_allocated(self._device)
        per_token = (peak - before) / tokens
        self._per_token = max(self._per_token, per_token)

    def of_next_batch(self, gather: Callable[[Tensor], Tensor]) -> int:
        """Returns the bound for the next generation batch. Call it on every rank between two steps:
        all take as many tokens as the rank with the least memory can."""
        if self._tokens is None and not self.measures:
            self.measures = True
            return FIRST_TOKENS
        if self.measures:
            fitting = tokens_that_fit(self._free_bytes(), self._per_token)
            of_ranks = gather(torch.tensor([fitting], device=self._device))
            self._tokens = int(of_ranks.min())
            self.measures = False
        return self._tokens

    def _free_bytes(self) -> int:
        # blocks of the first step's sizes would be in the way of larger ones
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        reserved = torch.cuda.memory_reserved(self._device)
        allocated = torch.cuda.memory_allocated(self._device)
        # see `leave_room`
        share = torch.cuda.get_per_process_memory_fraction(self._device.index)
        may_reserve = int(share * total)
        more = min(free, may_reserve - reserved)
        unused = reserved - allocated
        return more + unused - self._gradients


def tokens_that_fit(free: int, per_token: float) -> int:
    """Returns how many tokens a micro-batch gets if so many bytes are free and each token takes
    `per_token` of them (0: not known)."""
    if not per_token:
        return FIRST_TOKENS
    fitting = int(SHARE * free / per_token)
    return min(MOST_TOKENS, max(FIRST_TOKENS, fitting))


# ------------------------------------------------------------------------------------------ tensors


def take(batch: Batch, which: slice | Tensor) -> Batch:
    """Returns those rollouts of every tensor. A tensor without dimensions is about all of them and
    stays."""
    taken = {}
    for name, value in batch.items():
        taken[name] = value[which] if value.ndim else value
    return taken


def join(batches: Sequence[Batch]) -> Batch:
    """Returns one batch of several that were split from one. Tensors without dimensions are the
    same in all."""
    joined = {}
    for name, value in batches[0].items():
        if value.ndim:
            values = [batch[name] for batch in batches]
            value = torch.cat(values)
        joined[name] = value
    return joined


def lengths_of(batch: Batch) -> np.ndarray:
    """Returns (B, 2): tokens of each prompt and of each completion. Waits for the device."""
    prompts = batch["prompt_mask"].sum(1)
    completions = batch["completion_mask"].sum(1)
    lengths = torch.stack([prompts, completions], dim=1)
    return lengths.cpu().numpy()


def trim(batch: Batch, lengths: np.ndarray, multiple: int = 1) -> Batch:
    """Returns a micro-batch without the columns that are padding in all of its rollouts, whose
    `lengths_of` are given. Widths stay multiples of `multiple`. Tensors have shapes (B,), (B, 1),
    (B, C), (B, C, ...), or, if their name begins with `prompt_`, (B, P)."""
    longest_prompt, longest_completion = lengths.max(0).tolist()
    P = batch["prompt_mask"].size(1)
    C = batch["completion_mask"].size(1)
    prompt_width = min(P, _rounded_up(longest_prompt, multiple))
    completion_width = min(C, _rounded_up(longest_completion, multiple))
    trimmed = {}
    for name, value in batch.items():
        if name.startswith("prompt_"):
            value = value[:, P - prompt_width :]
        elif value.ndim > 1 and value.size(1) == C:
            value = value[:, :completion_width]
        trimmed[name] = value
    return trimmed


def _rounded_up(length: int, multiple: int) -> int:
    """Returns the next multiple, at least one: 5 tokens become 8 with the multiple 4, and 0 become
    4."""
    multiples = math.ceil(length / multiple)
    return max(1, multiples) * multiple


def without_padding(
    forward: Forward,
    input_ids: Tensor,
    attention_mask: Tensor,
    logits_to_keep: int,
    micro_batches: Sequence[slice],
    multiple: int = 1,
) -> Scores:
    """
    Calls `forward` on each micro-batch of a batch, without its padding.

    Args:
        forward: scores the last `logits_to_keep` columns of its input.
        input_ids: (B, P + C), prompts padded on the left, completions on the right.
        attention_mask: (B, P + C), for each rollout one run of ones that begins within the prompt.
        logits_to_keep: C.
        micro_batches: rollouts of each, together all of them in their order.
        multiple: the width of the input of `forward` is a multiple of this.

    Returns:
        (B, C) each, 0 on padding, and the mean auxiliary loss of the micro-batches.
    """
    scored = []
    for part in micro_batches:
        scores = _forward_without_padding(
            forward, input_ids[part], attention_mask[part], logits_to_keep, multiple
        )
        scored.append(scores)
    return join_scores(scored)


def join_scores(scored: Sequence[Scores]) -> Scores:
    """Returns the scores of a batch from those of its micro-batches, with their mean auxiliary
    loss."""
    logprobs, entropies, losses = zip(*scored)
    all_entropies = None
    if entropies[0] is not None:
        all_entropies = torch.cat(entropies)
    mean_loss = None
    if losses[0] is not None:
        mean_loss = torch.stack(losses).mean()
    return torch.cat(logprobs), all_entropies, mean_loss


def _forward_without_padding(
    forward: Forward,
    input_ids: Tensor,
    attention_mask: Tensor,
    logits_to_keep: int,
    multiple: int,
) -> Scores:
    """Moves prompt and completion together to the left, and the scores back to their columns.

    With P = 3 and C = 2, two rollouts become rows of 4, of which the last 3 columns are scored
    (`s` is the score of a `c`):

        input_ids    rows       scores     in their columns
        _ _ p|c _    p c _ _      s . .    s 0
        _ p p|c c    p p c c      . s s    s s
    """
    total_width = input_ids.size(1)
    prompt_width = total_width - logits_to_keep
    prompts = attention_mask[:, :prompt_width].sum(1, keepdim=True)  # (B, 1) tokens
    lengths = attention_mask.sum(1, keepdim=True)
    # one wait for the device
    shortest_and_longest = [prompts.min(), lengths.min(), lengths.max()]
    shortest_prompt, shortest, longest = torch.stack(shortest_and_longest).tolist()
    if shortest_prompt == prompt_width and shortest == total_width:
        return forward(input_ids, attention_mask, logits_to_keep)  # there is no padding
    width = max(longest, shortest_prompt + 1)  # at least one column is scored
    width = _rounded_up(width, multiple)
    columns = torch.arange(width, device=input_ids.device)
    mask = columns < lengths
    source = columns + prompt_width - prompts
    source = source.clamp(max=total_width - 1)
    rows = input_ids.gather(1, source)
    mask = mask.to(attention_mask.dtype)
    scored_width = width - shortest_prompt
    logprobs, entropies, loss = forward(rows, mask, scored_width)

    completions = torch.arange(logits_to_keep, device=input_ids.device)
    scored = completions < lengths - prompts
    target = completions + prompts - shortest_prompt
    target = target.clamp(max=scored_width - 1)

    def in_its_columns(values: Tensor) -> Tensor:
        return values.gather(1, target).masked_fill(~scored, 0.0)

    if entropies is not None:
        entropies = in_its_columns(entropies)
    return in_its_columns(logprobs), entropies, loss
