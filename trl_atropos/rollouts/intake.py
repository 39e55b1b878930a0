"""The same door for every source: groups as delivered come in, rows go out, and what was left out is counted.

`AtroposSource` and `ReplaySource` each own one `Intake`, and report its counts in their metrics. One thread may admit
while another asks for the metrics.
"""

import logging
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable

import numpy as np

from trl_atropos.errors import RolloutError
from trl_atropos.rollouts.environment_names import EnvironmentNames
from trl_atropos.rollouts.refusals import UNKNOWN_TOKENS
from trl_atropos.rollouts.schema import RejectedGroup, Row, ScoredGroup, SingleRowGroups, parse_group, rows_of

logger = logging.getLogger(__name__)

LAST_GROUPS = 32  # of an environment, among which most may not have unknown tokens,
ENOUGH_GROUPS = 8  # once there are as many
REJECTED, TOO_LONG, UNTRAINED = "rejected", "too_long", "untrained"
"""Why a sequence is left out: its group is malformed, it has too many tokens, its mask leaves none to train on."""


class Intake:
    """
    Turns delivered groups into rows with the run's settings. Messages call environments by their `names`.

    `total_dropped` counts the sequences that were left out, by reason, for ever; `next_group` is the number that the
    rows of the next group get.
    """

    def __init__(
        self,
        max_sequence_length: int,
        temperature: float,
        single_row_groups: SingleRowGroups,
        *,
        vocab_size: int | None = None,
        names: EnvironmentNames | None = None,
    ):
        self.total_dropped: Counter[str] = Counter()
        self.next_group = 0
        self._vocab_size = vocab_size
        self._names = names or EnvironmentNames()
        self._max_sequence_length = max_sequence_length
        self._temperature = temperature
        self._single_row_groups = single_row_groups
        # By environment, of the last groups: whether they had tokens that the model does not know.
        self._unknown: defaultdict[int | None, deque[bool]] = defaultdict(lambda: deque(maxlen=LAST_GROUPS))
        self._warned: set[str] = set()
        self._counts: Counter[str] = Counter()  # since the last `metrics()`
        self._counting = threading.Lock()

    def admit(self, groups: Iterable[object]) -> list[Row]:
        """
        The usable rows of `groups`, in order. A bad group is dropped, counted, and warned about once per kind.

        Raises:
            RolloutError: a group shows a setting that makes every group wrong (see `schema.rows_of`), or most of an
                environment have tokens that the model does not know.
        """
        rows: list[Row] = []
        for raw in groups:
            try:
                group = parse_group(raw, self._names)
                rows += self._known(group)
            except RejectedGroup as rejection:
                self._count({"groups": 1}, {REJECTED: _num_sequences(raw)})
                message = "Dropped a group that cannot be trained on: %s (environment %s)."
                self._warn_once(rejection.kind, message, rejection, self._label(raw))
        return rows

    def _known(self, group: ScoredGroup) -> list[Row]:
        """`_rows_of`; one group with tokens that the model does not know is a slip, most of them are a tokenizer."""
        recent = self._unknown[group.env_id]
        try:
            rows = self._rows_of(group)
        except RejectedGroup as rejection:
            recent.append(rejection.kind == UNKNOWN_TOKENS)
            if len(recent) >= ENOUGH_GROUPS and 2 * sum(recent) > len(recent):
                raise RolloutError(
                    f"Of the last {len(recent)} groups of environment {group.label}, {sum(recent)} had tokens that "
                    f"the model does not know (the last time, {rejection}): the environment's tokenizer is not the "
                    "model's. Start the environment on the tokenizer of the trained model (`--env.tokenizer_name`)."
                ) from rejection
            raise
        recent.append(False)
        return rows

    def _rows_of(self, group: ScoredGroup) -> list[Row]:
        rows = rows_of(
            group,
            max_sequence_length=self._max_sequence_length,
            temperature=self._temperature,
            single_row_groups=self._single_row_groups,
            vocab_size=self._vocab_size,
        )
        too_long = sum(len(tokens) > self._max_sequence_length for tokens in group.tokens)
        untrained = len(group.tokens) - len(rows) - too_long
        if too_long:
            longest = max(map(len, group.tokens))
            message = "Dropped a sequence of %d tokens from environment %s: at most %d fit. Sample shorter ones."
            self._warn_once("too long", message, longest, group.label, self._max_sequence_length)
        if untrained:
            message = "Dropped a sequence from environment %s: its mask leaves no token to train on."
            self._warn_once("untrained", message, group.label)
        if group.has_ref_logprobs:
            self._warn_once("ref", "Environment %s sends `ref_logprobs`; they are not used.", group.label)
        arrived = time.monotonic()
        tokens = unknown = 0
        for row in rows:
            row.group, row.arrived = self.next_group, arrived
            if not row.sft:
                tokens += int(row.mask.sum())
                unknown += int(np.isnan(row.logprobs[row.mask]).sum())
        self.next_group += bool(rows)
        self._count({"tokens": tokens, "unknown": unknown}, {TOO_LONG: too_long, UNTRAINED: untrained})
        return rows

    def _label(self, raw: object) -> str:
        """What messages call the environment of a group that may be anything."""
        env_id = raw.get("env_id") if isinstance(raw, dict) else None
        return self._names.label(env_id if isinstance(env_id, int) else None)

    def _count(self, counts: dict[str, int], dropped: dict[str, int]) -> None:
        with self._counting:
            self._counts.update(counts | dropped)
            self.total_dropped.update(dropped)

    def _warn_once(self, kind: str, message: str, *values: object) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning(message + " Later ones are only counted in the metrics.", *values)

    def dropped(self) -> str:
        """What was left out since the last `metrics()`, for a run that waits for rows; empty if nothing was."""
        with self._counting:
            counts = self._counts.copy()
        rows = counts[TOO_LONG] + counts[UNTRAINED]
        if not (counts["groups"] or rows):
            return ""
        return (
            f"Rollouts arrive, but since the last step {counts['groups']} groups and {rows} further sequences "
            f"were dropped because they cannot be trained on ({counts[TOO_LONG]} of them are longer than "
            f"{self._max_sequence_length} tokens): the warnings in this log name the reasons."
        )

    def metrics(self) -> dict[str, float]:
        """
        Counts since the last call: `rollouts/rejected_groups`; of sequences, `rollouts/dropped_rejected`,
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


def _num_sequences(raw: object) -> int:
    """Of a group that may be anything. The Atropos API lets none pass whose tokens are not a list of lists."""
    tokens = raw.get("tokens") if isinstance(raw, dict) else None
    return len(tokens) if isinstance(tokens, list) else 0
