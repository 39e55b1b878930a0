"""Micro-batches: which rollouts share one, on which rank, and what of their padding is left out.

TRL pads a generation batch to its longest rollout and splits it afterwards; with real lengths, most multiply-adds are
then padding. Here rollouts of like length share a micro-batch, wherever that leaves the gradient of the optimizer step
as it was, and every rank gets as many tokens. `AtroposGRPOTrainer` calls `plan_rows` before TRL pads a generation
batch, `trim` on each micro-batch, and goes through `without_padding` in a forward.

TRL's tensors of a batch have shape (B, P) for prompts, padded on the left, and (B, C) for completions, padded on the
right.
"""

import math
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch

from trl_atropos.rollouts.row import Row

if TYPE_CHECKING:
    from trl_atropos.config import AtroposGRPOConfig

# What a further micro-batch costs beside its tokens, as a share of `max_tokens_per_micro_batch`.
MICRO_BATCH_OVERHEAD = 1 / 16


@dataclass(frozen=True)
class Plan:
    """How a generation batch is laid out. The same on every rank."""

    # Indices into the generation batch: the first rank's rows, then the second one's, each micro-batch by micro-batch.
    order: list[int]
    sizes: list[list[int]]  # rows of each micro-batch, by training step; every rank has as many

    def micro_batches(self) -> list[list[slice]]:
        """Which of a rank's own rows each micro-batch has, by training step."""
        flat = [size for step in self.sizes for size in step]
        slices = iter([slice(end - size, end) for size, end in zip(flat, accumulate(flat))])
        return [[next(slices) for _ in step] for step in self.sizes]

    def undo(self, column: MutableSequence) -> None:
        """Brings the last entries of `column`, one per row in this order, into that of the generation batch."""
        planned = [column.pop() for _ in self.order][::-1]
        arrived = dict(zip(self.order, planned, strict=True))
        column.extend(arrived[index] for index in range(len(planned)))


def regroups(args: "AtroposGRPOConfig", has_auxiliary_loss: bool) -> bool:
    """Whether rows may be put into other micro-batches than TRL draws. If not, only the padding goes."""
    return args.group_by_length and not (args.loss_depends_on_micro_batches or has_auxiliary_loss)


def row_share(args: "AtroposGRPOConfig", num_rows: int) -> float:
    """
    What TRL's loss of a micro-batch of `num_rows` is multiplied by, so that all of an optimizer step's add up to the
    loss with `per_device_train_batch_size` rows in each.

    TRL divides by the tokens of the generation batch with `dapo`, `cispo` and `vespo`, where sums add up, and by the
    rows of the micro-batch with the others (`bnpo`, which does neither, is never regrouped).
    """
    adds_up = args.loss_type in ("dapo", "cispo", "vespo")
    return 1.0 if adds_up else num_rows / args.per_device_train_batch_size


def chunks(num_rows: int, size: int) -> list[slice]:
    """`num_rows` in runs of `size`, the last of which may be shorter."""
    return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


def plan_rows(rows: Sequence[Row], args: "AtroposGRPOConfig", ranks: int, seed: int) -> Plan:
    """The plan for a generation batch, from the settings of the run. `seed` draws which optimizer step takes a row."""
    lengths = [len(row.prompt_ids) + len(row.completion_ids) for row in rows]
    together = math.gcd(args.steps_per_generation, args.gradient_accumulation_steps)
    return plan(lengths, ranks, args.steps_per_generation, together, args.max_tokens_per_micro_batch, seed)


def plan(
    lengths: Sequence[int], ranks: int, steps: int, together: int, max_tokens: int | None = None, seed: int = 0
) -> Plan:
    """
    Args:
        lengths: tokens of each row of the generation batch, in any order; a multiple of `ranks * steps` of them.
        ranks: number of processes.
        steps: training steps (forward and backward) that the batch is for.
        together: how many consecutive ones of them are sure to belong to one optimizer step. Rows are moved among
            these only: which optimizer step a row comes to is drawn at random, as in TRL.
        max_tokens: padded tokens that a micro-batch may have (a longer row has one of its own). Without, each training
            step is one micro-batch. With, it is as many as it takes, with as many rows on every rank.
        seed: of the draw.
    """
    indices = np.arange(len(lengths))
    if steps > together:
        indices = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed)).numpy()
    sizes_of = np.asarray(lengths)
    per_step = len(lengths) // (ranks * steps)
    order: list[list[int]] = [[] for _ in range(ranks)]
    sizes: list[list[int]] = []
    for window in indices.reshape(steps // together, -1):
        longest_first = window[np.argsort(-sizes_of[window], kind="stable")]
        blocks = longest_first.reshape(together, -1)
        for step in _deal(blocks, sizes_of, ranks):
            # All ranks cut at the same rows: they meet in each micro-batch, where TRL gathers a value of each row.
            longest = np.max([sizes_of[rows] for rows in step], axis=0)
            sizes.append([per_step] if max_tokens is None else _cut(longest, max_tokens))
            for rank in range(ranks):
                order[rank] += step[rank]
    return Plan([int(index) for rank in order for index in rank], sizes)


def _deal(blocks: np.ndarray, lengths: np.ndarray, ranks: int) -> list[list[list[int]]]:
    """
    Each block's rows to the ranks, equally many to each: `[block][rank]`, longest first.

    The longest row left goes to the rank with the fewest tokens. All ranks take rows of like length at the same time,
    because sharded ranks wait for each other in every layer.
    """
    tokens, dealt = np.zeros(ranks), []
    for block in blocks:
        hands: list[list[int]] = [[] for _ in range(ranks)]
        room = np.full(ranks, len(block) // ranks)
        for row in block:
            rank = int(np.where(room > 0, tokens, np.inf).argmin())
            hands[rank].append(row)
            tokens[rank] += lengths[row]
            room[rank] -= 1
        dealt.append(hands)
    return dealt


def _cut(lengths: np.ndarray, max_tokens: int) -> list[int]:
    """
    Cuts rows, longest first, into runs of at most `max_tokens` padded tokens, so that the padded tokens and the price
    of every run together are least.
    """
    number = len(lengths)
    price, begin = np.zeros(number + 1), np.zeros(number + 1, dtype=int)
    for end in range(1, number + 1):
        padded = (end - np.arange(end)) * lengths[:end]  # of the run that begins at each row before
        padded = np.where(padded <= max(max_tokens, lengths[end - 1]), padded, np.inf)
        total = price[:end] + padded + max_tokens * MICRO_BATCH_OVERHEAD
        begin[end] = total.argmin()
        price[end] = total[begin[end]]
    sizes, end = [], number
    while end:
        sizes.append(int(end - begin[end]))
        end = begin[end]
    return sizes[::-1]


# ------------------------------------------------------------------------------------------------------------- padding

Batch = dict[str, torch.Tensor]
# (input_ids, attention_mask, logits_to_keep) -> (log-probabilities, entropies or None, auxiliary loss or None)
Forward = Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]]


def take(batch: Batch, rows: slice | torch.Tensor) -> Batch:
    """Those rows of every tensor that has rows."""
    return {name: value[rows] if value.ndim else value for name, value in batch.items()}


def join(batches: Sequence[Batch]) -> Batch:
    """The opposite of a split along the rows. Of what has no rows, all have the same."""
    first = batches[0]
    return {name: torch.cat([one[name] for one in batches]) if first[name].ndim else first[name] for name in first}


def trim(batch: Batch, multiple: int = 1) -> Batch:
    """
    A micro-batch without the columns that are padding in all of its rows.

    Args:
        batch: `prompt_mask` (B, P), `completion_mask` (B, C) and any tensors of shapes (B,), (B, P), (B, 1), (B, C) or
            (B, C, ...). Of width P are those whose name begins with `prompt_`.
        multiple: widths stay multiples of this, as far as they were.
    """
    prompts, completions = batch["prompt_mask"], batch["completion_mask"]
    P, C = prompts.size(1), completions.size(1)
    longest = torch.stack([prompts.sum(1).max(), completions.sum(1).max()]).tolist()
    prompt, completion = (
        min(width, max(1, -(-length // multiple) * multiple)) for width, length in zip((P, C), longest)
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
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """
    Calls `forward` on each micro-batch of a batch, without its padding.

    Args:
        forward: what scores the last `logits_to_keep` columns of rows that it is given.
        input_ids: (B, P + C), prompts padded on the left, completions on the right.
        attention_mask: (B, P + C), in each row a run of ones, from within the prompt on.
        logits_to_keep: C.
        micro_batches: rows of each, together all rows in their order.
        multiple: the width of what `forward` is given is a multiple of this.

    Returns:
        (B, C) each, and a mean over the micro-batches, as from one forward over the whole. On padding: 0.
    """
    scored = [
        _forward_one(forward, input_ids[rows], attention_mask[rows], logits_to_keep, multiple)
        for rows in micro_batches
    ]
    logprobs, entropies, losses = zip(*scored)
    return (
        torch.cat(logprobs),
        torch.cat(entropies) if entropies[0] is not None else None,
        torch.stack(losses).mean() if losses[0] is not None else None,
    )


def _forward_one(forward, input_ids, attention_mask, logits_to_keep, multiple):
    prompt_width = input_ids.size(1) - logits_to_keep
    prompts = attention_mask[:, :prompt_width].sum(1)  # (B,) tokens
    lengths = attention_mask.sum(1)
    shortest_prompt, shortest, longest = torch.stack([prompts.min(), lengths.min(), lengths.max()]).tolist()
    if shortest_prompt == prompt_width and shortest == input_ids.size(1):
        return forward(input_ids, attention_mask, logits_to_keep)  # there is none
    width = max(longest, shortest_prompt + 1)  # one column at least is scored
    width = -(-width // multiple) * multiple
    columns = torch.arange(width, device=input_ids.device)
    there = columns < lengths[:, None]
    source = (columns + (prompt_width - prompts)[:, None]).clamp(max=input_ids.size(1) - 1)
    ids = input_ids.gather(1, source)
    scored_width = width - shortest_prompt
    logprobs, entropies, loss = forward(ids, there.to(attention_mask.dtype), scored_width)

    completions = torch.arange(logits_to_keep, device=input_ids.device)
    scored = completions < (lengths - prompts)[:, None]
    target = (completions + (prompts - shortest_prompt)[:, None]).clamp(max=scored_width - 1)

    def back(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values.gather(1, target).masked_fill(~scored, 0.0)

    return back(logprobs), back(entropies), loss
