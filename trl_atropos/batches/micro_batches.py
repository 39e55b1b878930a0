"""Micro-batches: which rollouts share one, on which rank, and how padding is left out of those that
are padded.

TRL pads a generation batch to its longest rollout and splits it afterwards, so that most of the
computation is on padding. Here rollouts of similar length share a micro-batch, wherever that does
not change the gradient of the optimizer step, and every rank gets about as many tokens.

TRL's tensors of a batch have shape (B, P) for prompts, padded on the left, and (B, C) for
completions, padded on the right.
"""

import math
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch

from trl_atropos.rollouts.rollout import Rollout

if TYPE_CHECKING:
    from trl_atropos.config import AtroposGRPOConfig

# What one more micro-batch costs beside its tokens, as a share of `max_tokens_per_micro_batch`.
MICRO_BATCH_OVERHEAD = 1 / 16

# Where the configuration sets no bound, a GPU's micro-batches have `FIRST` tokens in the first
# step, and from then on as many as fit into `SHARE` of the free memory, up to `MOST`, above which
# nothing is won. The rest is for gaps among blocks of many sizes: on an H100, torch held a fifth on
# top of what was allocated, and could use none of it.
FIRST = 4096
MOST = 16384
SHARE = 0.6


class TokenBudget:
    """
    Most tokens of a micro-batch, where each generation batch is for whole optimizer steps.

    Args:
        device: of this rank.
        gradients: bytes of all gradients, which are not there between two steps.
    """

    def __init__(self, device: torch.device, gradients: int):
        self.measures = False  # now: in the first generation batch
        self._tokens: int | None = None
        self._device = device
        self._gradients = gradients
        self._per_token = 0.0  # bytes

    def measure(self, tokens: int, forward_and_backward: Callable[[], None]) -> None:
        """Calls that, for a micro-batch of so many tokens, when gradients are there already."""
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        forward_and_backward()
        peak = torch.cuda.max_memory_allocated(self._device)
        self._per_token = max(self._per_token, (peak - before) / tokens)

    def of_next_batch(self, gather: Callable[[torch.Tensor], torch.Tensor]) -> int:
        """Called on every rank between two steps. All take what the one with the least memory
        can."""
        if self._tokens is None and not self.measures:
            self.measures = True
            return FIRST
        if self.measures:
            # blocks of the first step's sizes would be in the way of larger ones
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info(self._device)
            held = torch.cuda.memory_reserved(self._device)
            allocated = torch.cuda.memory_allocated(self._device)
            # see `leave_room`
            may_hold = torch.cuda.get_per_process_memory_fraction(self._device.index) * total
            usable = min(free, int(may_hold) - held) + held - allocated
            tokens = tokens_that_fit(usable - self._gradients, self._per_token)
            self._tokens = int(gather(torch.tensor([tokens], device=self._device)).min())
            self.measures = False
        return self._tokens


def tokens_that_fit(free: int, per_token: float) -> int:
    """How many tokens a micro-batch gets where so many bytes are free, and each takes so many (0:
    not known)."""
    return min(MOST, max(FIRST, int(SHARE * free / per_token))) if per_token else FIRST


@dataclass(frozen=True)
class Plan:
    """How a generation batch is laid out. The same on every rank."""

    # indices into the generation batch: all of rank 0, of rank 1, ..., each in micro-batch order
    order: list[int]
    sizes: list[list[int]]  # rollouts in each micro-batch, by training step; the same on every rank

    def micro_batches(self) -> list[list[slice]]:
        """Which of a rank's own rollouts each micro-batch has, by training step."""
        ends = accumulate(size for step in self.sizes for size in step)
        return [[slice(end - size, end) for size, end in zip(step, ends)] for step in self.sizes]

    def undo(self, column: MutableSequence) -> None:
        """Reorders the last entries of `column`, one per rollout in this order, as in the
        generation batch."""
        arrived = {index: column.pop() for index in reversed(self.order)}
        column.extend(arrived[index] for index in sorted(arrived))


def loss_share(args: "AtroposGRPOConfig", num_rollouts: int) -> float:
    """The factor for TRL's loss of a micro-batch of `num_rollouts`, such that the sum over an
    optimizer step is the loss with `per_device_train_batch_size` rollouts in each. With `dapo`,
    `cispo` and `vespo` TRL divides by the tokens of the generation batch, with the others by the
    rollouts of the micro-batch. (`bnpo` is never regrouped.)"""
    adds_up = args.loss_type in ("dapo", "cispo", "vespo")
    return 1.0 if adds_up else num_rollouts / args.per_device_train_batch_size


def plan_rollouts(
    rollouts: Sequence[Rollout],
    args: "AtroposGRPOConfig",
    ranks: int,
    seed: int,
    packed: bool,
    max_tokens: int | None,
    alike: np.ndarray | None = None,
) -> Plan:
    """The plan for a generation batch, from the settings of the run; see `plan`."""
    lengths = [len(rollout.prompt_ids) + len(rollout.completion_ids) for rollout in rollouts]
    together = math.gcd(args.steps_per_generation, args.gradient_accumulation_steps)
    return plan(
        lengths, ranks, args.steps_per_generation, together, max_tokens, seed, packed, alike
    )


def plan(
    lengths: Sequence[int],
    ranks: int,
    steps: int,
    together: int,
    max_tokens: int | None = None,
    seed: int = 0,
    packed: bool = False,
    alike: np.ndarray | None = None,
) -> Plan:
    """
    Args:
        lengths: tokens of each rollout of the generation batch, a multiple of `ranks * steps`
        rollouts. steps: training steps (forward and backward) that the batch is for. together:
        number of consecutive training steps that always belong to one optimizer step. Rollouts are
        moved
            within these only: which optimizer step trains on a rollout is drawn at random, as in
            TRL.
        max_tokens: that a micro-batch may have, padding included; a longer rollout has a
            micro-batch of its own. None makes each training step one micro-batch.
        packed: whether a micro-batch has no padding (`packing.py`).
        alike: a number for each rollout, the same for those that may share their prompt. With one
            rank they stay together; several ranks get rollouts of similar length, whatever their
            prompts.
    """
    indices = np.arange(len(lengths))
    if steps > together:
        indices = torch.randperm(
            len(lengths), generator=torch.Generator().manual_seed(seed)
        ).numpy()
    sizes_of = np.asarray(lengths)
    per_step = len(lengths) // (ranks * steps)
    dealt: list[list[list[int]]] = []  # of each training step, to each rank
    sizes: list[list[int]] = []
    for window in indices.reshape(steps // together, -1):
        by = -sizes_of if alike is None or ranks > 1 else alike
        ordered = window[np.argsort(by[window], kind="stable")]
        for hands in _deal(ordered.reshape(together, -1), sizes_of, ranks):
            # All ranks cut at the same positions, because TRL gathers a value per rollout in every
            # micro-batch.
            longest = np.max([sizes_of[hand] for hand in hands], axis=0)
            sizes.append([per_step] if max_tokens is None else _cut(longest, max_tokens, packed))
            dealt.append(hands)
    return Plan([int(index) for rank in zip(*dealt) for hand in rank for index in hand], sizes)


def _deal(blocks: np.ndarray, lengths: np.ndarray, ranks: int) -> Iterator[list[list[int]]]:
    """Deals each block's rollouts to the ranks, the same number to each: a list per rank, longest
    first. The longest that is left goes to the rank with the fewest tokens, so that all work on
    similar lengths at the same time: sharded ranks wait for each other in every layer."""
    tokens = [0] * ranks
    for block in blocks:
        hands: list[list[int]] = [[] for _ in range(ranks)]
        for index in block:
            with_room = (rank for rank in range(ranks) if len(hands[rank]) < len(block) // ranks)
            rank = min(with_room, key=tokens.__getitem__)
            hands[rank].append(index)
            tokens[rank] += lengths[index]
        yield hands


def _cut(lengths: np.ndarray, max_tokens: int, packed: bool) -> list[int]:
    """Cuts rollouts, longest first, into micro-batches of at most `max_tokens` tokens, at the least
    total cost: the tokens, padding included, and the overhead of every micro-batch."""
    # of the rollouts up to each
    cost = np.zeros(len(lengths) + 1)
    sizes = [[]]
    for end in range(1, len(lengths) + 1):
        # Of the micro-batch from each earlier rollout to `end`.
        tokens = (
            lengths[:end][::-1].cumsum()[::-1] if packed else (end - np.arange(end)) * lengths[:end]
        )
        tokens = np.where(tokens <= max(max_tokens, lengths[end - 1]), tokens, np.inf)
        total = cost[:end] + tokens + max_tokens * MICRO_BATCH_OVERHEAD
        begin = int(total.argmin())
        cost[end] = total[begin]
        sizes.append([*sizes[begin], end - begin])
    return sizes[-1]


Batch = dict[str, torch.Tensor]
# log-probabilities, entropies, auxiliary loss
Scores = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
# of (input_ids, attention_mask, logits_to_keep)
Forward = Callable[[torch.Tensor, torch.Tensor, int], Scores]


def take(batch: Batch, which: slice | torch.Tensor) -> Batch:
    """Those rollouts of every tensor; a tensor without dimensions is about all of them and
    stays."""
    return {name: value[which] if value.ndim else value for name, value in batch.items()}


def join(batches: Sequence[Batch]) -> Batch:
    """One batch of several that were split from one. Tensors without dimensions are the same in
    all."""
    first = batches[0]
    return {
        name: torch.cat([each[name] for each in batches]) if first[name].ndim else first[name]
        for name in first
    }


def lengths_of(batch: Batch) -> np.ndarray:
    """(B, 2): tokens of each prompt and of each completion. Waits for the device."""
    return (
        torch.stack([batch["prompt_mask"].sum(1), batch["completion_mask"].sum(1)], dim=1)
        .cpu()
        .numpy()
    )


def trim(batch: Batch, lengths: np.ndarray, multiple: int = 1) -> Batch:
    """A micro-batch without the columns that are padding in all of its rollouts, whose `lengths_of`
    are given. Widths stay multiples of `multiple`. Tensors have shapes (B,), (B, 1), (B, C), (B, C,
    ...), or, if their name begins with `prompt_`, (B, P)."""
    P = batch["prompt_mask"].size(1)
    C = batch["completion_mask"].size(1)
    prompt, completion = (
        min(width, max(1, -(-int(length) // multiple) * multiple))
        for width, length in zip((P, C), lengths.max(0))
    )

    def cut(name: str, value: torch.Tensor) -> torch.Tensor:
        if name.startswith("prompt_"):
            return value[:, P - prompt :]
        return value[:, :completion] if value.ndim > 1 and value.size(1) == C else value

    return {name: cut(name, value) for name, value in batch.items()}


def without_padding(
    forward: Forward,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
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
    inputs = ((input_ids[part], attention_mask[part], logits_to_keep) for part in micro_batches)
    scored = [_forward_without_padding(forward, *each, multiple) for each in inputs]
    logprobs, entropies, losses = zip(*scored)
    return (
        torch.cat(logprobs),
        torch.cat(entropies) if entropies[0] is not None else None,
        torch.stack(losses).mean() if losses[0] is not None else None,
    )


def _forward_without_padding(
    forward, input_ids, attention_mask, logits_to_keep, multiple
) -> Scores:
    prompt_width = input_ids.size(1) - logits_to_keep
    prompts = attention_mask[:, :prompt_width].sum(1)  # (B,) tokens
    lengths = attention_mask.sum(1)
    shortest_prompt, shortest, longest = torch.stack(
        [prompts.min(), lengths.min(), lengths.max()]
    ).tolist()
    if shortest_prompt == prompt_width and shortest == input_ids.size(1):
        return forward(input_ids, attention_mask, logits_to_keep)  # there is no padding
    # Prompt and completion are moved together to the left, and scores are moved back to their
    # columns.
    width = max(longest, shortest_prompt + 1)  # at least one column is scored
    width = -(-width // multiple) * multiple
    columns = torch.arange(width, device=input_ids.device)
    mask = columns < lengths[:, None]
    source = (columns + (prompt_width - prompts)[:, None]).clamp(max=input_ids.size(1) - 1)
    scored_width = width - shortest_prompt
    logprobs, entropies, loss = forward(
        input_ids.gather(1, source), mask.to(attention_mask.dtype), scored_width
    )

    completions = torch.arange(logits_to_keep, device=input_ids.device)
    scored = completions < (lengths - prompts)[:, None]
    target = (completions + (prompts - shortest_prompt)[:, None]).clamp(max=scored_width - 1)

    def back(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values.gather(1, target).masked_fill(~scored, 0.0)

    return back(logprobs), back(entropies), loss
