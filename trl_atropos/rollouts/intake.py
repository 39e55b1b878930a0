"""The door: checked groups come in, rollouts that the trainer can use go out, and what was left out is counted.

`AtroposSource` and `ReplaySource` each own one `Intake`. An error here is one of two kinds. `RejectedGroup` is one bad
group: it is dropped, counted, and the run goes on. `RolloutError` is a setting that makes every group wrong, which
only the user can correct: the run stops.
"""

import logging
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import numpy as np

from trl_atropos.errors import RolloutError
from trl_atropos.rollouts.advantages import group_statistics
from trl_atropos.rollouts.api import label_of
from trl_atropos.rollouts.row import Rollout
from trl_atropos.rollouts.wire import RejectedGroup, ScoredGroup

logger = logging.getLogger(__name__)

SingleRowGroups = Literal["refuse", "raw", "zero"]

TEMPERATURE_TOLERANCE = 1e-6
LAST_GROUPS = 32  # of an environment, among which most may not have unknown tokens,
ENOUGH_GROUPS = 8  # once there are as many
UNKNOWN_TOKENS = "unknown tokens"
REJECTED, TOO_LONG, UNTRAINED = "rejected", "too_long", "untrained"
"""Why a rollout is left out: its group is malformed, it has too many tokens, its mask leaves none to train on."""


class Intake:
    """
    Turns groups into rollouts with the run's settings, which `rollouts_of` explains. One thread may admit groups while
    another asks for the metrics.

    `total_dropped` counts the rollouts that were left out so far, by reason; `next_group` is the number that the
    rollouts of the next group get.
    """

    def __init__(
        self,
        max_sequence_length: int,
        temperature: float,
        single_row_groups: SingleRowGroups,
        *,
        vocab_size: int | None = None,
        names: Callable[[], Mapping[int, str]] = dict,
    ):
        self.total_dropped: Counter[str] = Counter()
        self.next_group = 0
        self._settings = {
            "max_sequence_length": max_sequence_length,
            "temperature": temperature,
            "single_row_groups": single_row_groups,
            "vocab_size": vocab_size,
        }
        self._max_sequence_length = max_sequence_length
        self._look_up = names
        self._names: Mapping[int, str] = {}  # of environments, by number, when the batch came in
        # By environment, of the last groups: whether they had tokens that the model does not know.
        self._unknown: defaultdict[int | None, deque[bool]] = defaultdict(lambda: deque(maxlen=LAST_GROUPS))
        self._warned: set[str] = set()
        self._counts: Counter[str] = Counter()  # since the last `metrics()`
        self._counting = threading.Lock()

    def admit(self, groups: Iterable[ScoredGroup | RejectedGroup]) -> list[Rollout]:
        """
        The usable rollouts of `groups`, in order. A bad group is dropped, counted, and warned about once per kind.

        Raises:
            RolloutError: a group shows a setting that makes every group wrong (see `rollouts_of`), or most groups of
                an environment have tokens that the model does not know.
        """
        rollouts: list[Rollout] = []
        self._names = self._look_up()
        for group in groups:
            try:
                if isinstance(group, RejectedGroup):
                    raise group
                rollouts += self._known(group)
            except RejectedGroup as rejection:
                size = len(group.tokens) if isinstance(group, ScoredGroup) else group.size
                self._count({"groups": 1}, {REJECTED: size})
                message = "Dropped a group that cannot be trained on: %s (environment %s)."
                self._warn_once(rejection.kind, message, rejection, label_of(group.env_id, self._names))
        return rollouts

    def _known(self, group: ScoredGroup) -> list[Rollout]:
        """One group with tokens that the model does not know is a slip; most of them are another tokenizer."""
        recent = self._unknown[group.env_id]
        try:
            rollouts = self._rollouts(group)
        except RejectedGroup as rejection:
            recent.append(rejection.kind == UNKNOWN_TOKENS)
            if len(recent) >= ENOUGH_GROUPS and 2 * sum(recent) > len(recent):
                raise RolloutError(
                    f"Of the last {len(recent)} groups of environment {label_of(group.env_id, self._names)}, "
                    f"{sum(recent)} had tokens that the model does not know (the last time, {rejection}): the "
                    "environment's tokenizer is not the model's. Start the environment on the tokenizer of the "
                    "trained model (`--env.tokenizer_name`)."
                ) from rejection
            raise
        recent.append(False)
        return rollouts

    def _rollouts(self, group: ScoredGroup) -> list[Rollout]:
        name = label_of(group.env_id, self._names)
        rollouts = rollouts_of(group, name, **self._settings)
        too_long = sum(len(tokens) > self._max_sequence_length for tokens in group.tokens)
        untrained = len(group.tokens) - len(rollouts) - too_long
        if too_long:
            message = "Dropped a rollout of %d tokens from environment %s: at most %d fit. Sample shorter ones."
            self._warn_once("too long", message, max(map(len, group.tokens)), name, self._max_sequence_length)
        if untrained:
            message = "Dropped a rollout from environment %s: its mask leaves no token to train on."
            self._warn_once("untrained", message, name)
        if group.has_ref_logprobs:
            self._warn_once("ref", "Environment %s sends `ref_logprobs`; they are not used.", name)
        arrived = time.monotonic()
        tokens = unknown = 0
        for rollout in rollouts:
            rollout.group, rollout.arrived, rollout.environment = (
                self.next_group,
                arrived,
                self._names.get(group.env_id),
            )
            if not rollout.sft:
                tokens += int(rollout.mask.sum())
                unknown += int(np.isnan(rollout.logprobs[rollout.mask]).sum())
        self.next_group += bool(rollouts)
        self._count({"tokens": tokens, "unknown": unknown}, {TOO_LONG: too_long, UNTRAINED: untrained})
        return rollouts

    def _count(self, counts: dict[str, int], dropped: dict[str, int]) -> None:
        with self._counting:
            self._counts.update(counts | dropped)
            self.total_dropped.update(dropped)

    def _warn_once(self, kind: str, message: str, *values: object) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning(message + " Later ones are only counted in the metrics.", *values)

    def dropped(self) -> str:
        """What was left out since the last `metrics()`, for a run that waits for rollouts; empty if nothing was."""
        with self._counting:
            counts = self._counts.copy()
        rollouts = counts[TOO_LONG] + counts[UNTRAINED]
        if not (counts["groups"] or rollouts):
            return ""
        return (
            f"Rollouts arrive, but since the last step {counts['groups']} groups and {rollouts} further rollouts "
            f"were dropped because they cannot be trained on ({counts[TOO_LONG]} of them are longer than "
            f"{self._max_sequence_length} tokens): the warnings in this log name the reasons."
        )

    def metrics(self) -> dict[str, float]:
        """
        Counts since the last call: `rollouts/rejected_groups`; of rollouts, `rollouts/dropped_rejected`,
        `rollouts/dropped_too_long` and `rollouts/dropped_untrained`; and `rollouts/unknown_logprobs`, the share of
        trained tokens whose log-probability the environment did not send (left out when no token came in).
        """
        with self._counting:
            counts, self._counts = self._counts, Counter()
        metrics = {"rollouts/rejected_groups": float(counts["groups"])}
        metrics |= {f"rollouts/dropped_{reason}": float(counts[reason]) for reason in (REJECTED, TOO_LONG, UNTRAINED)}
        if counts["tokens"]:
            metrics["rollouts/unknown_logprobs"] = counts["unknown"] / counts["tokens"]
        return metrics


# ---------------------------------------------------------------------------------------------- one group to rollouts


def rollouts_of(
    group: ScoredGroup,
    label: str,
    *,
    max_sequence_length: int,
    temperature: float,
    single_row_groups: SingleRowGroups,
    vocab_size: int | None = None,
) -> list[Rollout]:
    """
    Turn one group into rollouts, in the group's order.

    Those longer than `max_sequence_length` tokens and those without a trained token are left out; their scores still
    count in the group's mean and standard deviation, as the environment meant them to.

    Args:
        label: what messages call the environment.
        max_sequence_length: longest prompt plus completion that the trainer takes, in tokens.
        temperature: the sampling temperature that the trainer divides its logits by.
        single_row_groups: what a group of one means, since it has no mean to compare with: `"refuse"` raises, `"raw"`
            takes the score itself as the advantage, `"zero"` an advantage of 0.
        vocab_size: how many token ids the model knows, if that is to be checked.

    Raises:
        RejectedGroup: token ids that the model does not know, an override that says that another temperature was
            sampled at, or statistics that are not finite.
        RolloutError: images, placeholder tokens, another temperature in `generation_params`, or a group of one under
            `"refuse"`.
    """
    _refuse(group, label, temperature, vocab_size)
    # Token-level advantages are final, and supervised rollouts have none, so a group of one with them needs no mean.
    single = len(group.tokens) == 1 and group.advantages[0] is None and not group.asks("sft", 0)
    if single and single_row_groups == "refuse":
        raise RolloutError(
            f"Environment {label} sent a group of 1 rollout, which has no group mean to compare its score "
            f"({group.scores[0]}) with. Set `single_row_groups` to 'raw' (the score is the advantage) or 'zero' (do "
            "not learn from it) instead of 'refuse', or give the environment a `group_size` of at least 2."
        )
    mean, std = group_statistics(group.scores)
    if not np.isfinite([mean, std]).all():
        extremes = f"scores between {min(group.scores)} and {max(group.scores)}"
        raise RejectedGroup(f"{extremes} overflow float32: mean {mean}, standard deviation {std}")
    fitting = [i for i, tokens in enumerate(group.tokens) if len(tokens) <= max_sequence_length]
    rollouts = [one for one in (_rollout(group, i, mean, std) for i in fitting) if one is not None]
    if single:
        for one in rollouts:
            one.raw_advantage = single_row_groups == "raw"
            one.group_mean = 0.0 if one.raw_advantage else mean
            one.zero_advantage |= single_row_groups == "zero"
    return rollouts


def _rollout(group: ScoredGroup, i: int, mean: float, std: float) -> Rollout | None:
    """Rollout `i` of the group, or None if it has no token to train on."""
    trained = np.flatnonzero(group.trained[i])
    if not len(trained) or trained[-1] == 0:  # the first token has nothing before it to be predicted from
        return None
    first = max(1, int(trained[0]))
    # A masked tail changes no loss, and TRL would take a completion that does not end in EOS for a truncated one.
    part = slice(first, int(trained[-1]) + 1)
    mask = group.trained[i][part]
    sft = group.asks("sft", i)
    logprobs, advantages, teacher = group.logprobs[i], group.advantages[i], group.teachers[i]
    distill = teacher.padded(part) if teacher is not None else None
    unknown = logprobs is None or sft
    return Rollout(
        prompt_ids=group.tokens[i][:first],
        completion_ids=group.tokens[i][part],
        mask=mask,
        logprobs=np.where(mask, np.float32(np.nan) if unknown else logprobs[part], np.float32(np.nan)),
        score=group.scores[i],
        group_mean=mean,
        group_std=std,
        token_advantages=advantages[part].astype(np.float32) if advantages is not None and not sft else None,
        zero_advantage=group.asks("set_advantage_to_zero", i),
        env_id=group.env_id,
        sft=sft,
        distill_ids=distill[0] if distill else None,
        distill_logprobs=distill[1] if distill else None,
        messages=group.messages[i],
    )


def _refuse(group: ScoredGroup, label: str, ours: float, vocab_size: int | None) -> None:
    """What a well-formed group may ask for that this trainer does not do; `ours` is the trainer's temperature."""
    if _has_content(group.images):
        raise RolloutError(
            f"Environment {label} sent `images`, and training is text only: the policy would be trained on "
            "prompts without the pictures they were sampled with. Use an environment that sends no images."
        )
    # Atropos sends 0, 1, 2, ... for every rollout when the inference server gives it no token ids.
    length = len(group.tokens[0])
    placeholder = np.arange(length)
    if len(group.tokens) > 1 and length > 1 and all(np.array_equal(ids, placeholder) for ids in group.tokens):
        raise RolloutError(
            f"Environment {label} sent placeholder tokens (0 to {length - 1} in each of {len(group.tokens)} rollouts) "
            "instead of what was sampled: its inference server gives no token ids. Sample through a managed server "
            "with `--openai.server_type vllm`, and unset ATROPOS_ALLOW_DUMMY_MANAGED_SERVER so that this cannot "
            "happen unseen."
        )
    of_teachers = [teacher.ids for teacher in group.teachers if teacher is not None]
    highest = max((int(ids.max()) for ids in [*group.tokens, *of_teachers] if len(ids)), default=0)
    if vocab_size is not None and highest >= vocab_size:  # beyond the embedding, it would end the trainer inside torch
        known = f"the model knows {vocab_size} ids (0 to {vocab_size - 1})"
        raise RejectedGroup(f"environment {label} sent token id {highest}, and {known}", UNKNOWN_TOKENS)
    # The ratio between trainer and sampler is only right if both divide their logits by the same temperature.
    trainer = f"and the trainer computes log-probabilities at temperature {ours}"
    for seen in (one.temperature for one in (group.group_overrides, *group.overrides)):
        if seen is not None and abs(seen - ours) > TEMPERATURE_TOLERANCE:
            reason = f"environment {label} sampled at temperature {seen} (an override), {trainer}"
            raise RejectedGroup(reason, "temperature")
    seen = group.generation_params.temperature
    if seen is not None and abs(seen - ours) > TEMPERATURE_TOLERANCE:
        raise RolloutError(
            f"Environment {label} sampled at temperature {seen}, {trainer}. Set `temperature: {seen}` in the recipe, "
            f"or sample at {ours} in the environment."
        )


def _has_content(images: Any) -> bool:
    """Whether anything but empty lists is in `images`, to any depth."""
    left = [images]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif value:
            return True
    return False
