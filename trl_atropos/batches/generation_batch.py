"""One generation batch, from its rollouts to the scores that training finds.

`AtroposGRPOTrainer` makes a `GenerationBatch` of the rollouts that it takes, and its overrides of
TRL's methods call it in this order:

    regroup            divides the rollouts into micro-batches of similar length, if that is allowed
    prompts, columns   what TRL's `_generate` takes and returns
    score              a forward pass, before training (the whole batch) or in it (one micro-batch)
    loss_inputs        what TRL's loss takes beside TRL's own tensors
    micro_batches      what each training step trains on
    computing_loss_of  marks the micro-batch whose loss TRL computes, for `score` and `correct`

All ranks hold the same rollouts in the same order. Each trains on its own share of them.
"""

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn import Module

from trl_atropos.batches import inputs, packing
from trl_atropos.batches.micro_batches import (
    Batch,
    Plan,
    Scores,
    join,
    lengths_of,
    plan,
    take,
    trim,
    without_padding,
)
from trl_atropos.batches.packed_attention import RowFormat
from trl_atropos.batches.packing import Layout
from trl_atropos.batches.sequence_parallel import SequenceGroup
from trl_atropos.batches.sharing import BatchTokens, RolloutTokens
from trl_atropos.batches.truncation import completion_metrics, uncut_mask
from trl_atropos.rollouts.rollout import Rollout

if TYPE_CHECKING:
    from trl_atropos.config import AtroposGRPOConfig

# optimizer steps after which the draw of a run with the next seed would begin
NUM_SEEDS = 1_000_003


class GenerationBatch:
    """
    Holds the rollouts of one generation batch, and the tensors and micro-batches made of them.

    Args:
        rollouts: of all ranks, in the order in which they came.
        args: the settings of the run.
        accelerator: gives this rank's number, and gathers from the others.
        packs: the format of packed rows; None if rollouts are padded.
        multiple: the width of what the model gets is a multiple of this.
        end_tokens: ids that end a completion which was not cut off.

    Attributes:
        rollouts: of all ranks, all of rank 0 first.
        plan: the division into micro-batches; None if TRL draws them.
        current_micro_batch: whose loss is computed now; None outside a training pass.
        scores_of_passes: this rank's (B, C) tensors, in the order of `own_rollouts`, with the
            log-probabilities that the training passes found so far as `old_per_token_logps`. None
            if TRL scores the batch before training, or nothing corrects for the sampler.
    """

    def __init__(
        self,
        rollouts: list[Rollout],
        args: "AtroposGRPOConfig",
        accelerator: Accelerator,
        packs: RowFormat | None,
        multiple: int = 1,
        end_tokens: Collection[int] = (),
    ):
        self.rollouts = rollouts
        self.plan: Plan | None = None
        self.current_micro_batch: Batch | None = None
        self.scores_of_passes: Batch | None = None
        self._args = args
        self._accelerator = accelerator
        self._packs = packs
        self._multiple = multiple
        self._end_tokens = end_tokens
        self._max_tokens: int | None = None  # of a planned micro-batch

    # ------------------------------------------------------------------------------------- rollouts

    @property
    def num_shares(self) -> int:
        """Shares of the rollouts. Ranks that divide rows among them have the same share."""
        return self._accelerator.num_processes // self._args.sp_size

    @property
    def own_slice(self) -> slice:
        """Place of this rank's share in `rollouts`."""
        size = len(self.rollouts) // self.num_shares
        begin = self._accelerator.process_index // self._args.sp_size * size
        return slice(begin, begin + size)

    @property
    def own_rollouts(self) -> list[Rollout]:
        """This rank's share."""
        return self.rollouts[self.own_slice]

    @property
    def has_messages(self) -> bool:
        """True if any rollout brings the conversation that it is from."""
        return any(rollout.messages is not None for rollout in self.rollouts)

    @property
    def branches(self) -> bool:
        """True if any rollout, on whatever rank, is of an episode that branches."""
        return _any_branches(self.rollouts)

    @property
    def num_tokens(self) -> int:
        """Tokens of all ranks' rollouts, prompts included."""
        return sum(_length(rollout) for rollout in self.rollouts)

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens that the policy sampled. The others are of tools, or of a user."""
        return _num_sampled(self.rollouts)

    def regroup(self, step: int, max_tokens: int | None) -> None:
        """Plans micro-batches of at most `max_tokens` tokens, and puts the rollouts into their
        order. `step` is the optimizer step, by which the plan of each batch is drawn anew."""
        args = self._args
        self._max_tokens = max_tokens
        shares = self._packs is not None and self._packs.shares
        tokens = BatchTokens(self.rollouts, shares)
        self.plan = plan(
            tokens.lengths,
            self.num_shares,
            args.steps_per_generation,
            together=math.gcd(args.steps_per_generation, args.gradient_accumulation_steps),
            max_tokens=max_tokens,
            seed=args.seed * NUM_SEEDS + step,
            packed=self._packs is not None,
            sharing=tokens if shares else None,
        )
        self.rollouts = [self.rollouts[index] for index in self.plan.order]

    # ------------------------------------------------------------- what TRL takes for a whole batch

    def prompts(self, processing_class: Any) -> list[dict[str, str]]:
        """Returns the items that TRL's `_generate_and_score_completions` takes."""
        prompt_ids = [rollout.prompt_ids for rollout in self.own_rollouts]
        texts = processing_class.batch_decode(prompt_ids)
        return [{"prompt": text} for text in texts]

    def columns(self, with_messages: bool) -> dict[str, list]:
        """Returns the columns of TRL's `rollout_func` hook. `env_mask` becomes TRL's tool mask;
        other columns go to the reward function. If any rollout branches, and the run masks what was
        cut off, it is masked here: TRL knows one end of each rollout."""
        columns = inputs.columns(self.own_rollouts)
        if self.branches and self._args.mask_truncated_completions:
            masks = [uncut_mask(rollout, self._end_tokens) for rollout in self.own_rollouts]
            columns["env_mask"] = [mask.astype(np.int64) for mask in masks]
        if with_messages:
            columns["messages"] = [rollout.messages for rollout in self.own_rollouts]
        return columns

    def completion_metrics(self) -> dict[str, float]:
        """Returns TRL's metrics of completions if any rollout branches; otherwise TRL's are
        right."""
        if not self.branches:
            return {}
        return completion_metrics(self.rollouts, self._end_tokens)

    def loss_inputs(self, output: Batch) -> Batch:
        """Returns what TRL's loss takes beside `output`, this rank's tensors of TRL: advantages,
        the teacher's distributions if there are any, and `row_index`, because TRL shuffles the
        batch next."""
        count, length = output["completion_ids"].shape
        device = self._accelerator.device
        added = {"advantages": self.advantages(length).to(device)}
        if self._args.distillation_coef:
            added |= inputs.distillation_inputs(
                self.rollouts, self.own_slice, output, self._accelerator
            )
        added["row_index"] = torch.arange(count, device=device)
        return added

    def advantages(self, completion_length: int) -> Tensor:
        """Returns `(B,)` or `(B, completion_length)` float32; see `inputs.advantage_tensor`."""
        return inputs.advantage_tensor(
            self.rollouts, self.own_slice, self._args.scale_rewards, completion_length
        )

    def keep_scores_of_passes(self, output: Batch) -> None:
        """Has the training passes leave their log-probabilities in `scores_of_passes`."""
        sampled = output["sampling_per_token_logps"]
        self.scores_of_passes = {
            "completion_mask": output["completion_mask"],
            "tool_mask": output["tool_mask"],
            "sampling_per_token_logps": sampled,
            "old_per_token_logps": torch.zeros_like(sampled),
        }

    # ------------------------------------------------------------------------ what a step trains on

    def micro_batches(self, batches: list[Batch]) -> list[Batch]:
        """Returns what each training step trains on: a micro-batch, or several of them under the
        name `micro_batches`. `batches` are those that TRL has drawn, which have all of this rank's
        rollouts."""
        if self.plan is None:
            if self._packs is not None and self._packs.sequence_group is not None:
                batches = _drawn_by_first(batches, self._packs.sequence_group)
            return [self._drawn(batch) for batch in batches]
        batch = join(batches)
        batch = take(batch, batch["row_index"].argsort())
        lengths = lengths_of(batch)
        steps = []
        for slices in self.plan.micro_batches():
            planned = [self._planned(batch, lengths, part) for part in slices]
            if len(planned) == 1:
                steps.append(planned[0])
            else:
                steps.append({"micro_batches": planned})
        return steps

    def _drawn(self, batch: Batch) -> Batch:
        """Returns a micro-batch that TRL has drawn from this rank's rollouts."""
        own_rollouts = self.own_rollouts
        numbers = batch["row_index"].tolist()
        rollouts = [own_rollouts[number] for number in numbers]
        return self._trimmed(batch, lengths_of(batch), rollouts)

    def _planned(self, batch: Batch, lengths: np.ndarray, part: slice) -> Batch:
        """Returns the planned micro-batch of this rank's rollouts `part`. TRL's means of it are
        over `trained_tokens` tokens. It `exceeds_budget` if an episode that branches, which stays
        in one micro-batch, has more tokens than that may have."""
        rollouts = self.own_rollouts[part]
        micro_batch = self._trimmed(take(batch, part), lengths[part], rollouts)
        micro_batch["trained_tokens"] = _num_sampled(rollouts)
        is_too_large = (
            self._max_tokens is not None and computed_tokens(micro_batch) > self._max_tokens
        )
        micro_batch["exceeds_budget"] = is_too_large and _any_branches(rollouts)
        return micro_batch

    def _trimmed(self, micro_batch: Batch, lengths: np.ndarray, rollouts: list[Rollout]) -> Batch:
        """Returns a micro-batch without the padding that all of its rollouts have. It has the
        `layout` of its rows, unless its rollouts are padded and none of them branches."""
        micro_batch = trim(micro_batch, lengths, self._multiple)
        if self._packs is not None or _any_branches(rollouts):
            micro_batch["layout"] = self._layout(micro_batch, lengths, rollouts)
        return micro_batch

    def _layout(self, micro_batch: Batch, lengths: np.ndarray, rollouts: list[Rollout]) -> Layout:
        """Returns the layout of a micro-batch with these `lengths_of` rollouts."""
        tokens = _tokens_of(rollouts, lengths)
        prompt_width = micro_batch["prompt_ids"].size(1)
        completion_width = micro_batch["completion_ids"].size(1)
        return self._layout_of(tokens, prompt_width, completion_width)

    def _layout_of(
        self, tokens: list[RolloutTokens], prompt_width: int, completion_width: int
    ) -> Layout:
        if self._packs is not None:
            return Layout.of(tokens, prompt_width, completion_width, self._packs)
        return Layout.padded(
            tokens, prompt_width, completion_width, self._accelerator.device, self._multiple
        )

    # ------------------------------------------------------------------------------------- its loss

    @contextmanager
    def computing_loss_of(self, micro_batch: Batch) -> Iterator[None]:
        """Marks the micro-batch whose loss is computed within, because TRL does not pass it on to
        `score`."""
        self.current_micro_batch = micro_batch
        try:
            yield
        finally:
            self.current_micro_batch = None

    def score(
        self,
        forward: Callable[..., Scores],
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None,
    ) -> Scores:
        """
        Scores rollouts in micro-batches without their padding.

        Args:
            forward: TRL's `_get_per_token_logps_and_entropies`.
            input_ids: (B, P + C); attention_mask: (B, P + C).
            logits_to_keep: C.
            batch_size: of the chunks in which TRL scores a batch before training. Planned
                micro-batches take their place. None in a training pass.

        Returns:
            Log-probabilities and entropies, (B, C) each, and the mean auxiliary loss.
        """
        if self.current_micro_batch is not None and "layout" in self.current_micro_batch:
            layout = self.current_micro_batch["layout"]
            return packing.score_packed(forward, model, input_ids, logits_to_keep, layout)
        parts = self._parts_to_score(len(input_ids), batch_size)
        # Without a `batch_size`, it is not this batch that is scored.
        rollouts = None
        if batch_size is not None:
            rollouts = self.own_rollouts
        if self._packs is None and not _any_branches(rollouts or []):
            forward = partial(forward, model)
            return without_padding(
                forward, input_ids, attention_mask, logits_to_keep, parts, self._multiple
            )
        prompt_width = input_ids.size(1) - logits_to_keep
        prompt_mask, completion_mask = attention_mask.split((prompt_width, logits_to_keep), dim=1)
        lengths = lengths_of({"prompt_mask": prompt_mask, "completion_mask": completion_mask})
        tokens = _tokens_of(rollouts, lengths)
        # all before the first forward pass, because copies to the device wait for it
        layouts = [self._layout_of(tokens[part], prompt_width, logits_to_keep) for part in parts]
        return packing.score_all(forward, model, input_ids, logits_to_keep, parts, layouts)

    def _parts_to_score(self, count: int, batch_size: int | None) -> list[slice]:
        """Returns the micro-batches in which `count` rollouts are scored: planned ones, or
        `batch_size` rollouts each, or all at once."""
        parts: list[slice] = []
        if self.plan is not None and batch_size is not None:
            for slices in self.plan.micro_batches():
                parts += slices
            return parts
        size = batch_size or count
        for begin in range(0, count, size):
            parts.append(slice(begin, begin + size))
        return parts

    def correct(self, logprobs: Tensor) -> None:
        """Keeps the `(B, C)` log-probabilities that a training pass found, and puts their ratio to
        the sampler's into the micro-batch, from where TRL's loss takes it."""
        if self.scores_of_passes is None:
            return
        logprobs = logprobs.detach().float()
        rows = self.current_micro_batch["row_index"]
        self.scores_of_passes["old_per_token_logps"][rows, : logprobs.size(1)] = logprobs
        ratio = inputs.importance_ratio(logprobs, self.current_micro_batch, self._args)
        self.current_micro_batch["importance_sampling_ratio"] = ratio

    def distillation_loss(
        self, model: Module, micro_batch: Batch, training_steps: int
    ) -> tuple[Tensor, float]:
        """Returns the distillation term of a micro-batch and the divergence from the teacher; see
        `inputs.distillation_loss`. `training_steps`: how many make an optimizer step."""
        layout = micro_batch.get("layout")
        if layout is None:
            rollouts = [self.own_rollouts[number] for number in micro_batch["row_index"].tolist()]
            layout = self._layout(micro_batch, lengths_of(micro_batch), rollouts)
        return inputs.distillation_loss(
            model,
            micro_batch,
            layout,
            self._accelerator,
            self._args.steps_per_generation,
            training_steps,
        )


def _drawn_by_first(batches: list[Batch], group: SequenceGroup) -> list[Batch]:
    """Returns the batches that the first rank of the group has drawn. TRL draws on each rank by
    itself, but ranks that divide rows among them must have the same rollouts in each."""
    drawn = join(batches)
    arrived = take(drawn, drawn["row_index"].argsort())
    order = group.of_first(drawn["row_index"])
    sizes = [len(batch["row_index"]) for batch in batches]
    return [take(arrived, numbers) for numbers in order.split(sizes)]


def computed_tokens(micro_batch: Batch) -> int:
    """Returns how many tokens the model computes for a micro-batch, padding included."""
    if "layout" in micro_batch:
        return micro_batch["layout"].tokens.numel()
    return micro_batch["prompt_ids"].numel() + micro_batch["completion_ids"].numel()


def _any_branches(rollouts: list[Rollout]) -> bool:
    return any(rollout.tree is not None for rollout in rollouts)


def _tokens_of(rollouts: list[Rollout] | None, lengths: np.ndarray) -> list[RolloutTokens]:
    """Returns what the model has to know of rollouts with these `lengths_of`. TRL leaves no token
    of a completion that it masks as truncated. Of unknown rollouts (`None`), the lengths are all
    that is known."""
    tokens = []
    for number, (prompt, completion) in enumerate(lengths.tolist()):
        if rollouts is None:
            tokens.append(RolloutTokens(prompt, prompt + completion))
        else:
            tokens.append(RolloutTokens.of(rollouts[number], is_empty=completion == 0))
    return tokens


def _length(rollout: Rollout) -> int:
    return len(rollout.prompt_ids) + len(rollout.completion_ids)


def _num_sampled(rollouts: list[Rollout]) -> int:
    return sum(int(rollout.mask.sum()) for rollout in rollouts)
