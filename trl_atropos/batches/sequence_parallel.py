"""Divides a packed row among several ranks, each of which computes a slice of its tokens.

A model computes token by token, but for its attention. Around that, the ranks exchange heads
(DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509). A row of 4 tokens and a model of 4 heads:

             all but attention         attention
    rank 0   a b, heads 0 1 2 3   ->   a b c d, heads 0 1
    rank 1   c d, heads 0 1 2 3   <-   a b c d, heads 2 3

So attention has whole rows: its borders, windows and shared prompts are those of one rank. The
log-probabilities are joined, so that all ranks of the group have those of the whole row, and
compute the same loss of it, whatever kind of loss that is.

The setting is `sp_size` of accelerate's `ParallelismConfig`. TRL refuses it, and accelerate gives
it to DeepSpeed, whose way would cost more than the two exchanges that it brings. It needs
DeepSpeed's engine, even if DDP or FSDP2 would do. It replaces the attention of every model of the
process, even if that scores whole rows. It slices the batches of a data loader, but our rows are
made after TRL has padded what rank 0 received. And its loss is a mean over tokens, which is none of
GRPO's.

`training/computation.py` makes the `SequenceGroup`. `packing.py` scores rows by it, and
`packed_attention.attend` exchanges heads by it.
"""

import math
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedConfig

from trl_atropos.errors import RecipeError

NOT_SCORED = -100  # label of a token without a score, in Transformers and TRL


def require_shared_heads(config: PreTrainedConfig, sp_size: int) -> None:
    """Raises `RecipeError` if a model's query heads cannot be shared out to `sp_size` ranks. Key
    heads can always be (`SequenceGroup.by_heads`)."""
    # A model without heads has no attention that could be divided: its trial says so.
    heads = getattr(config.get_text_config(), "num_attention_heads", None)
    if sp_size == 1 or not isinstance(heads, int) or heads % sp_size == 0:
        return
    fitting = [size for size in range(2, sp_size) if heads % size == 0]
    fix = "Launch without `sp_size`."
    if fitting:
        fix = f"Launch with `sp_size` {fitting[-1]}."
    raise RecipeError(
        f"The {heads} attention heads of the model cannot be shared out to {sp_size} processes, "
        "each of which computes the attention of some",
        f"sp_size: {sp_size}, num_attention_heads: {heads}",
        fix,
    )


class RankHeads(NamedTuple):
    """Stands in for an attention module if this rank has some of its heads. Transformers' functions
    read these two of it."""

    num_key_value_groups: int  # query heads that share a key head
    is_causal: bool = True


class SequenceGroup:
    """
    Connects this rank with those that compute the other slices of its rows.

    Groups are neighbours: with a `size` of 2, ranks 0 and 1 share their rollouts, and so do 2 and
    3. Make it on all ranks together.

    Args:
        size (`int`): Ranks of a group, which divides the number of all ranks.
        timeout (`float`): Seconds that a rank waits for the others.

    Attributes:
        size (`int`): As above.
        index (`int`): Number of this rank in its group, and of its slice in a row.
    """

    def __init__(self, size: int, timeout: float):
        self.size = size
        self.index = dist.get_rank() % size
        group, _ = dist.new_subgroups(size, timeout=timedelta(seconds=timeout))
        self._group = group

    # ------------------------------------------------------------------------------- row and slices

    def own(self, row: Tensor) -> Tensor:
        """Returns this rank's slice of a row: (1, T / size, ...) of (1, T, ...)."""
        slices = row.chunk(self.size, dim=1)
        return slices[self.index]

    def joined(self, values: Tensor) -> Tensor:
        """Returns the values of a row, (1, T, ...), of which each rank passes those of its slice,
        (1, T / size, ...)."""
        return _Joined.apply(values, self)

    def of_first(self, values: Tensor) -> Tensor:
        """Returns the values of the group's first rank. All ranks pass as many."""
        first, *_ = self.all_gather(values)
        return first

    def score(self, model: Any, input_ids: Tensor, labels: Tensor, **inputs: Any) -> Any:
        """
        Calls a model that has TRL's fused head on this rank's slice of a row.

        Args:
            input_ids: (1, T).
            labels: (1, T), the tokens that are scored; -100 elsewhere.

        Returns:
            The outputs of the head. `log_probs` and `entropy` are those of the whole row,
            (1, T - 1): the score of a token stands in the place of the token before it.
        """
        # The last token of a slice predicts the first one of the next slice.
        next_labels = pad(labels[:, 1:], (0, 1), value=NOT_SCORED)
        outputs = model(
            input_ids=self.own(input_ids),
            shift_labels=self.own(next_labels),
            **inputs,
        )
        log_probs = self.joined(outputs.log_probs)
        outputs.log_probs = log_probs[:, :-1]
        if outputs.entropy is not None:  # the reference model's head computes none
            entropy = self.joined(outputs.entropy)
            outputs.entropy = entropy[:, :-1]
        return outputs

    # ------------------------------------------------------------------------------------ attention

    @torch.compiler.disable
    def by_heads(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """
        Returns queries, keys and values of the whole row, for this rank's share of the heads.

        Key heads that are too few to be shared out are repeated first. With 4 query heads, 1 key
        head and 2 ranks, the key head becomes 2, each for 2 query heads.

        Args:
            query: (1, heads, T / size, head_dim).
            key: (1, key_heads, T / size, head_dim), and so is `value`.

        Returns:
            (1, heads / size, T, head_dim) of each.

        Raises:
            ValueError: `size` does not divide the number of query heads.
        """
        if query.size(1) % self.size:
            raise ValueError(f"{query.size(1)} heads cannot be shared out to {self.size} processes")
        key_heads = key.size(1)
        repeats = math.lcm(key_heads, self.size) // key_heads
        if repeats > 1:
            key = key.repeat_interleave(repeats, dim=1)
            value = value.repeat_interleave(repeats, dim=1)
        all_states = [query, key, value]
        shares = [self._shares(states) for states in all_states]
        widths = [share.size(-1) for share in shares]
        message = torch.cat(shares, dim=-1)  # (size, T / size, all widths)
        received = _Exchanged.apply(message, self)
        row = received.flatten(0, 1)  # (T, all widths)
        whole = []
        for states, columns in zip(all_states, row.split(widths, dim=-1)):
            head_dim = states.size(-1)
            by_token = columns.unflatten(-1, (-1, head_dim))  # (T, heads / size, head_dim)
            by_head = by_token.transpose(0, 1)
            whole.append(by_head[None])
        return whole

    @torch.compiler.disable
    def by_tokens(self, attended: Tensor) -> Tensor:
        """Returns what attention found for this rank's slice, (1, T / size, heads, head_dim), from
        what it found for this rank's heads, (1, T, heads / size, head_dim)."""
        slices = attended[0].unflatten(0, (self.size, -1))  # (size, T / size, heads / size, ...)
        by_rank = _Exchanged.apply(slices, self)
        by_token = by_rank.transpose(0, 1)
        of_slice = by_token.flatten(1, 2)  # (T / size, heads, head_dim)
        return of_slice[None]

    def _shares(self, states: Tensor) -> Tensor:
        """Returns each rank's share of the heads, (size, T / size, heads / size * head_dim)."""
        # A message has the dtype in which attention computes.
        device = states.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            states = states.to(dtype)
        by_head = states[0].unflatten(0, (self.size, -1))  # (size, heads / size, T / size, ...)
        by_token = by_head.transpose(1, 2)
        return by_token.flatten(2)

    # ---------------------------------------------------------------------------------- collectives

    def all_to_all(self, parts: Tensor) -> Tensor:
        """Sends part `r` of (size, ...) to rank `r` of the group. Returns what came from each rank,
        (size, ...)."""
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=self._group)
        return received

    def all_gather(self, values: Tensor) -> list[Tensor]:
        """Returns the values of each rank of the group, which have one shape."""
        values = values.contiguous()
        received = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(received, values, group=self._group)
        return received


class _Exchanged(torch.autograd.Function):
    """Exchanges parts with the other ranks, and in the backward pass their gradients."""

    @staticmethod
    def forward(ctx, parts, group):
        ctx.group = group
        return group.all_to_all(parts)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.group.all_to_all(gradient), None


class _Joined(torch.autograd.Function):
    """
    Joins the ranks' slices of a row.

    All ranks of the group compute the same loss from the joined row. Each takes the gradient of its
    own slice, so that the gradient of the weights is the sum of what the ranks find. But gradients
    are averaged over all ranks, by DDP as by DeepSpeed and FSDP: each slice counts `size` times.
    """

    @staticmethod
    def forward(ctx, values, group):
        ctx.group = group
        slices = group.all_gather(values)
        return torch.cat(slices, dim=1)

    @staticmethod
    def backward(ctx, gradient):
        own_gradient = ctx.group.own(gradient)
        return own_gradient * ctx.group.size, None
