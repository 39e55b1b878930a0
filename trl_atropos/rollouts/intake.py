"""From groups to rollouts that the trainer can use. What cannot be used is left out and counted.

`feed.Feed` and `ReplaySource` each have one `Intake`. A `RejectedGroup` is dropped and
counted: one bad group must not end a run of days. If most groups of an environment are rejected for
a reason that only the user can correct, a `RolloutError` ends the run.
"""

import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from trl_atropos.errors import RolloutError
from trl_atropos.rollouts.api import label_of
from trl_atropos.rollouts.drop_reasons import (
    EVALUATION,
    INTAKE_REASONS,
    JOINED,
    REJECTED,
    TOO_LONG,
    UNTRAINED,
)
from trl_atropos.rollouts.episodes import join_rows
from trl_atropos.rollouts.reward_parts import NamedNumbers
from trl_atropos.rollouts.rollout import Rollout, group_statistics
from trl_atropos.rollouts.row import make_rollout
from trl_atropos.rollouts.versions import settings_differ
from trl_atropos.rollouts.wire import ScoredGroup
from trl_atropos.rollouts.wire_values import RejectedGroup, ScoredPath

logger = logging.getLogger(__name__)

SingleRowGroups = Literal["refuse", "raw", "zero"]

# of an environment; if most of them are rejected for one reason, its settings are wrong
LAST_GROUPS = 32
ENOUGH_GROUPS = 8  # fewer say nothing

MOST_OVERRIDES = 32  # that the log names, if nobody knows them
UNKNOWN_OVERRIDE = "It has no effect: correct its name, or update trl_atropos."

NO_NAMES: Mapping[int, str] = {}


@dataclass(eq=False)
class Intake:
    """
    Turns groups into rollouts. One thread may admit groups while another asks for the metrics.

    Args:
        max_sequence_length: longest prompt plus completion that the trainer takes, in tokens.
        temperature: the sampling temperature by which the trainer divides its logits.
        single_row_groups: what to do with a group of one, which has no mean to compare with:
            `"refuse"` raises, `"raw"` takes the score as the advantage, `"zero"` sets the advantage
            to 0.
        vocab_size: how many token ids the model knows; None = token ids are not checked.
    """

    max_sequence_length: int
    temperature: float
    single_row_groups: SingleRowGroups
    vocab_size: int | None = None

    def __post_init__(self):
        self._next_group = 0  # number of the next group
        # For the last groups of each environment: the kind of a rejection that may end the run, and
        # "" for any other group.
        self._recent: defaultdict[int | None, deque[str]] = defaultdict(_last_groups)
        self._warned: set[str] = set()
        self._unknown_overrides: set[str] = set()  # that the log has named
        # Of the whole run: dropped rollouts by reason, rejected groups, trained tokens, and tokens
        # of unknown log-probability.
        self._counts: Counter[str] = Counter()
        self._reported: Counter[str] = Counter()  # `_counts` at the last call of `metrics`
        self._parts = NamedNumbers("part of a reward", "rollouts/parts_dropped")

    @property
    def total_dropped(self) -> Counter[str]:
        """Number of rollouts that were dropped so far, by reason, and of rows that were joined to
        others."""
        reasons = (*INTAKE_REASONS, JOINED)
        return Counter({reason: self._counts[reason] for reason in reasons})

    def admit(
        self,
        groups: Iterable[ScoredGroup | RejectedGroup],
        names: Mapping[int, str] = NO_NAMES,
        first_group: int | None = None,
    ) -> list[Rollout]:
        """
        Returns the usable rollouts of `groups`, in order. Drops and counts a bad group, and warns
        about it once per kind.

        Args:
            groups: of one batch.
            names: of environments by their numbers.
            first_group: number of the first usable group; by default, that after the last.

        Raises:
            RolloutError: most groups of an environment are bad for one reason that the user has to
                correct.
        """
        if first_group is not None:
            self._next_group = first_group
        rollouts: list[Rollout] = []
        for group in groups:
            label = label_of(group.env_id, names)
            rejection = None
            try:
                if isinstance(group, RejectedGroup):  # by `wire.py`
                    raise group
                if group.group_overrides.evaluation:
                    self._counts[EVALUATION] += group.size
                    continue
                rollouts += self._admit_group(group, label, names.get(group.env_id))
            except RejectedGroup as error:
                rejection = error
                self._counts["groups"] += 1
                self._counts[REJECTED] += group.size
                message = "Dropped a group that cannot be trained on: %s (environment %s)."
                self._warn_once(error.kind, message, error, label)
            self._end_if_most_are_rejected(group.env_id, rejection, label)
        return rollouts

    def _admit_group(
        self, group: ScoredGroup, label: str, environment: str | None
    ) -> list[Rollout]:
        self._name_unknown_overrides(group, label)
        rollouts, dropped = self.rollouts_of(group, label)
        self._counts.update(dropped)
        if dropped[TOO_LONG]:
            message = (
                "Dropped a rollout of %d tokens from environment %s: at most %d fit. Sample "
                "shorter ones."
            )
            longest = max(_longest_path(group.paths(i)) for i in range(group.size))
            self._warn_once("too long", message, longest, label, self.max_sequence_length)
        if dropped[UNTRAINED]:
            message = "Dropped a rollout from environment %s: its mask leaves no token to train on."
            self._warn_once("untrained", message, label)
        for rollout in rollouts:
            rollout.group = self._next_group
            rollout.arrived = time.time()
            rollout.environment = environment
            if not rollout.sft:
                logprobs = rollout.logprobs[rollout.mask]
                self._counts["tokens"] += len(logprobs)
                self._counts["unknown"] += int(np.isnan(logprobs).sum())
        if rollouts:
            self._next_group += 1
        return rollouts

    def _name_unknown_overrides(self, group: ScoredGroup, label: str) -> None:
        """Warns once of each override that has no effect, up to `MOST_OVERRIDES` of them."""
        for key in group.unknown_overrides:
            if key in self._unknown_overrides or len(self._unknown_overrides) >= MOST_OVERRIDES:
                continue
            self._unknown_overrides.add(key)
            message = "Environment %s sent the override %s, which this version does not know. %s"
            logger.warning(message, label, key, UNKNOWN_OVERRIDE)

    def _end_if_most_are_rejected(
        self, env_id: int | None, rejection: RejectedGroup | None, label: str
    ) -> None:
        """Notes a group that came in. Raises `RolloutError` if most of the environment's last
        groups were rejected for the same reason. A single one is an accident."""
        recent = self._recent[env_id]
        if rejection is None or not rejection.fix:
            recent.append("")
            return
        recent.append(rejection.kind)
        count = recent.count(rejection.kind)
        if len(recent) < ENOUGH_GROUPS or 2 * count <= len(recent):
            return
        what = (
            f"Of the last {len(recent)} groups of environment {label}, {count} cannot be trained on"
        )
        raise RolloutError(f"{what}: {rejection}", fix=rejection.fix)

    def rollouts_of(self, group: ScoredGroup, label: str) -> tuple[list[Rollout], Counter[str]]:
        """
        Returns the usable rollouts of one group, in its order, and the number of the others by
        reason: they are too long, have no trained token, or are rows of an episode that another
        row of it stands for. The score of each episode counts once in the group's mean and standard
        deviation. Messages call the environment `label`.

        Raises:
            RejectedGroup: this group cannot be trained on: unknown token ids, another temperature,
                images, placeholder tokens, rows of an episode that do not agree, or a group of one
                under `"refuse"`.
        """
        _refuse_images(group, label)
        _refuse_placeholders(group, label)
        _refuse_unknown_tokens(group, label, self.vocab_size)
        _refuse_other_temperatures(group, label, self.temperature)
        num_rows = group.size
        group = join_rows(group)
        needs_other_rollouts = _lacks_a_mean(group)
        if needs_other_rollouts and self.single_row_groups == "refuse":
            raise _group_of_one(group, label)
        mean, std = group_statistics(group.scores)
        rollouts = []
        dropped: Counter[str] = Counter()
        if group.size < num_rows:
            dropped[JOINED] = num_rows - group.size
        for i in range(group.size):
            if _longest_path(group.paths(i)) > self.max_sequence_length:
                dropped[TOO_LONG] += 1
                continue
            rollout = make_rollout(group, i, mean, std)
            if rollout is None:
                dropped[UNTRAINED] += 1
                continue
            if needs_other_rollouts:
                self._set_advantage_of_one(rollout)
            rollout.rewards = self._rewards_of(group, i, label)
            rollouts.append(rollout)
        return rollouts, dropped

    def _rewards_of(self, group: ScoredGroup, i: int, label: str) -> dict[str, float] | None:
        """Returns the parts of a rollout's reward: those of its group and its own, which win."""
        parts = {}
        for overrides in (group.group_overrides, group.overrides[i]):
            if overrides.rewards is not None:
                parts |= self._parts.admit(overrides.rewards, label)
        return parts or None

    def _set_advantage_of_one(self, rollout: Rollout) -> None:
        """Sets the advantage of a group of one as `single_row_groups` says."""
        if self.single_row_groups == "raw":
            rollout.raw_advantage = True
            rollout.group_mean = 0.0
        else:
            rollout.zero_advantage = True

    def _warn_once(self, kind: str, message: str, *values: object) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning(message + " Later ones are only counted in the metrics.", *values)

    def metrics(self) -> dict[str, float]:
        """Returns counts since the last call: `rollouts/rejected_groups`; of rollouts,
        `rollouts/dropped_rejected`, `_too_long`, `_untrained` and `_evaluation`;
        `rollouts/joined_rows`, if any rows were joined to others of their episode;
        `rollouts/unknown_logprobs`, the share of trained tokens whose log-probability the
        environment did not send (left out when no token came in); and of parts of rewards,
        `rollouts/parts_dropped_REASON` (left out if none was ever dropped for it)."""
        counts = self._counts.copy()
        new = counts - self._reported
        self._reported = counts
        metrics = {"rollouts/rejected_groups": float(new["groups"])}
        for reason in INTAKE_REASONS:
            metrics[f"rollouts/dropped_{reason}"] = float(new[reason])
        if counts[JOINED]:
            metrics["rollouts/joined_rows"] = float(new[JOINED])
        if new["tokens"]:
            metrics["rollouts/unknown_logprobs"] = new["unknown"] / new["tokens"]
        metrics |= self._parts.metrics()
        return metrics


def _last_groups() -> deque[str]:
    return deque(maxlen=LAST_GROUPS)


def _lacks_a_mean(group: ScoredGroup) -> bool:
    """Returns whether this is a group of one whose score would have to be compared with others.
    Token-level advantages are final, and a supervised rollout has none: these need no mean."""
    if group.size > 1 or group.asks("sft", 0):
        return False
    return all(path.advantages is None for path in group.paths(0))


def _longest_path(paths: list[ScoredPath]) -> int:
    return max(path.length for path in paths)


def _group_of_one(group: ScoredGroup, label: str) -> RejectedGroup:
    reason = (
        f"environment {label} sent a group of 1 rollout, which has no group mean to "
        f"compare its score ({group.scores[0]}) with"
    )
    fix = (
        "Set `single_row_groups` to 'raw' (the score is the advantage) or 'zero' (do not "
        "learn from it), or give the environment a `group_size` of at least 2."
    )
    return RejectedGroup(reason, "group of one", fix)


# ---------------------------------- groups that are well-formed, and that nobody could train on


def _refuse_images(group: ScoredGroup, label: str) -> None:
    if _has_content(group.images):
        reason = (
            f"environment {label} sent `images`, and training is text only: the policy would "
            "not see them"
        )
        raise RejectedGroup(reason, "images", "Use an environment that sends no images.")


def _has_content(images: Any) -> bool:
    """Returns whether `images` has anything but empty lists, at any depth."""
    pending = [images]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending += value
        elif value:
            return True
    return False


def _refuse_placeholders(group: ScoredGroup, label: str) -> None:
    """Refuses tokens 0, 1, 2, ... on every path of every rollout: Atropos sends these if the
    inference server gives it no token ids."""
    length = len(group.tokens[0])
    if group.size == 1 or length <= 1:
        return
    for i in range(group.size):
        if len(group.tokens[i]) != length and not group.branches[i]:
            return
        if not all(map(_counts_tokens, group.paths(i))):
            return
    reason = (
        f"environment {label} sent placeholder tokens (0 to {length - 1}) in all its rollouts: "
        "its inference server gives no token ids"
    )
    fix = (
        "Sample through a managed server with `--openai.server_type vllm`, and unset "
        "ATROPOS_ALLOW_DUMMY_MANAGED_SERVER."
    )
    raise RejectedGroup(reason, "placeholder tokens", fix)


def _counts_tokens(path: ScoredPath) -> bool:
    """Returns whether the path's own tokens are the numbers of their places in it."""
    return np.array_equal(path.tokens, np.arange(path.at, path.length))


def _refuse_unknown_tokens(group: ScoredGroup, label: str, vocab_size: int | None) -> None:
    """Refuses token ids beyond the model's embedding, at which torch would end the trainer."""
    if vocab_size is None:
        return
    highest = 0
    for i in range(group.size):
        for path in group.paths(i):
            highest = max(highest, _highest(path.tokens), _highest(path.distill_ids))
    if highest < vocab_size:
        return
    reason = (
        f"environment {label} sent token id {highest}, and the model knows {vocab_size} "
        f"ids (0 to {vocab_size - 1})"
    )
    fix = (
        "The environment's tokenizer is not the model's: start the environment on the "
        "tokenizer of the trained model (`--env.tokenizer_name`)."
    )
    raise RejectedGroup(reason, "unknown tokens", fix)


def _highest(ids: np.ndarray | None) -> int:
    """Returns the highest id, or 0 if there is none."""
    if ids is None:
        return 0
    return int(ids.max(initial=0))


def _refuse_other_temperatures(group: ScoredGroup, label: str, temperature: float) -> None:
    """Refuses a group of which the environment says that it was sampled at another temperature. A
    single override may be an accident; a temperature for all requests ends the run."""
    trainer = f"and the trainer computes log-probabilities at temperature {temperature}"
    for overrides in (group.group_overrides, *group.overrides):
        sampled = overrides.temperature
        if sampled is not None and settings_differ(sampled, temperature):
            reason = (
                f"environment {label} sampled at temperature {sampled} (an override), {trainer}"
            )
            raise RejectedGroup(reason, "temperature")
    sampled = group.generation_params.temperature
    if sampled is not None and settings_differ(sampled, temperature):
        reason = f"environment {label} sampled at temperature {sampled}, {trainer}"
        fix = (
            f"Set `temperature: {sampled}` in the recipe, or sample at {temperature} in the "
            "environment."
        )
        raise RejectedGroup(reason, "temperature in `generation_params`", fix)
