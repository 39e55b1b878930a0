"""Padded tensors in, the same without what they do not need out.

TRL's tensors of a batch have shape (B, P) for prompts, padded on the left, and (B, C) for completions, padded on the
right. `trim` cuts a micro-batch to its own longest prompt and completion. `without_padding` goes around a forward: in
it each row begins in the first column and its completion follows its prompt at once, so that a micro-batch is as wide
as its longest row, and every token has the position that it had when it was sampled.
"""

from collections.abc import Callable, Sequence

import torch

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
