"""The step of a plain loop on the same rollouts: what a trainer could reach at most, for
`trl-atropos bench step`.

Rollouts stand end to end in rows of up to `max_tokens`, without padding. Attention stops at their
borders. On GPUs, whole decoder layers are compiled, and so is the head, whose log-probabilities are
computed in chunks; on the CPU, nothing is (`compiles` says which). There is one pass with
gradients, and AdamW: no TRL, no groups, no statistics, and of a loss only importance ratios.
"""

import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from trl_atropos.rollouts.rollout import Rollout

CHUNK = 4096  # tokens whose logits are in memory at the same time


def compiles() -> bool:
    """Returns whether the loop compiles its layers here: on the CPU, compiling takes longer than
    the whole benchmark."""
    return torch.cuda.is_available()


class Row:
    """Rollouts end to end: `ids`, `positions` and `weights` (1 where the next token is trained) are
    `(1, T)`."""

    def __init__(self, rollouts: Sequence[Rollout], device: str):
        parts = [np.concatenate([one.prompt_ids, one.completion_ids]) for one in rollouts]
        weights = [np.zeros(len(part), np.float32) for part in parts]
        for one, weight in zip(rollouts, weights, strict=True):
            weight[len(one.prompt_ids) - 1 : -1] = one.mask
        lengths = torch.tensor([len(part) for part in parts])
        self.longest = int(lengths.max())
        self.borders = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int().to(device)
        self.ids = torch.from_numpy(np.concatenate(parts).astype(np.int64))[None].to(device)
        self.positions = torch.cat([torch.arange(length) for length in lengths])[None].to(device)
        self.weights = torch.from_numpy(np.concatenate(weights))[None].to(device)


class PackedLoop:
    """
    Args:
        model (`Path`): Its folder.
        rollouts (`Sequence[Rollout]`): Of one step.
        max_tokens (`int`): Of one row.
        checkpointing (`bool`): Recompute the layers in the backward pass.
    """

    def __init__(
        self, model: Path, rollouts: Sequence[Rollout], max_tokens: int, checkpointing: bool
    ):
        cuda = torch.cuda.is_available()
        # which finds the borders by the positions
        attention = _register_varlen() if cuda else "sdpa"
        self.model = AutoModelForCausalLM.from_pretrained(
            model, dtype="auto", attn_implementation=attention
        )
        self.model.to("cuda" if cuda else "cpu").train()
        if checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self._score = _logprobs
        if compiles():
            # Once for rows of all lengths.
            self._score = torch.compile(_logprobs, dynamic=True)
            for layer in self.model.model.layers:
                layer.compile(dynamic=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)
        self.rows = [Row(row, self.model.device.type) for row in _packed(rollouts, max_tokens)]
        self.trained = sum(int(row.weights.sum()) for row in self.rows)  # tokens

    def train(self) -> None:
        """The forward and backward passes."""
        for row in self.rows:
            logprobs = self._logprobs(row)
            ratios = (logprobs - logprobs.detach()).exp()
            (-(ratios * row.weights[0, :-1]).sum() / self.trained).backward()

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _logprobs(self, row: Row) -> torch.Tensor:
        """`(T - 1,)` float32: of each token after the first. Those across a border mean nothing,
        and weigh nothing."""
        options = {
            "position_ids": row.positions,
            "use_cache": False,
            "borders": row.borders,
            "longest": row.longest,
        }
        hidden = self.model.model(input_ids=row.ids, **options).last_hidden_state[0, :-1]
        tokens = row.ids[0, 1:]
        head = self.model.lm_head.weight
        chunks = zip(hidden.split(CHUNK), tokens.split(CHUNK), strict=True)
        return torch.cat(
            [checkpoint(self._score, *chunk, head, use_reentrant=False) for chunk in chunks]
        )


def _logprobs(hidden: torch.Tensor, tokens: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    return -torch.nn.functional.cross_entropy((hidden @ head.T).float(), tokens, reduction="none")


def _packed(rollouts: Sequence[Rollout], max_tokens: int) -> Iterator[list[Rollout]]:
    """First fit, the longest first."""
    rows: list[list[Rollout]] = []
    free: list[int] = []
    for rollout in sorted(rollouts, key=_length, reverse=True):
        at = next((i for i, space in enumerate(free) if space >= _length(rollout)), len(rows))
        if at == len(rows):
            rows.append([])
            free.append(max_tokens)
        rows[at].append(rollout)
        free[at] -= _length(rollout)
    return iter(rows)


def _length(rollout: Rollout) -> int:
    return len(rollout.prompt_ids) + len(rollout.completion_ids)


def _register_varlen() -> str:
    """Torch's attention over rows of several sequences, as an `attn_implementation`. Returns its
    name."""
    from torch.nn.attention.varlen import varlen_attn
    from transformers import AttentionInterface, AttentionMaskInterface

    # Torch has renamed the argument.
    causal = (
        {"is_causal": True}
        if "is_causal" in inspect.signature(varlen_attn).parameters
        else {"window_size": (-1, 0)}
    )

    def attend(module, query, key, value, mask, borders, longest, scaling=None, dropout=0.0, **_):
        groups = query.shape[1] // key.shape[1]
        # (T, heads, head_dim)
        query, key, value = (it[0].transpose(0, 1) for it in (query, key, value))
        if groups > 1:
            key, value = (it.repeat_interleave(groups, 1) for it in (key, value))
        three = (it.contiguous() for it in (query, key, value))
        return varlen_attn(*three, borders, borders, longest, longest, scale=scaling, **causal)[
            None
        ], None

    AttentionInterface.register("packed_loop", attend)
    AttentionMaskInterface.register("packed_loop", lambda *args, **kwargs: None)
    return "packed_loop"
