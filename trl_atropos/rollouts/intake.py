"""The same door for every source: groups as delivered come in, rows go out, and what was left out is counted.

`AtroposSource` and `ReplaySource` each own one `Intake`, and report its counts in their metrics.
"""

import logging
import math
from collections.abc import Iterable

from trl_atropos.rollouts.schema import RejectedGroup, Row, ScoredGroup, SingleRowGroups, parse_group, rows_of

logger = logging.getLogger(__name__)


class Intake:
    """Turns delivered groups into rows with the run's settings, and counts since the last `metrics()`."""

    def __init__(
        self,
        max_sequence_length: int,
        temperature: float,
        single_row_groups: SingleRowGroups,
        *,
        vocab_size: int | None = None,
    ):
        self._vocab_size = vocab_size
        self._max_sequence_length = max_sequence_length
        self._temperature = temperature
        self._single_row_groups = single_row_groups
        self._warned: set[str] = set()
        self._start_counting()

    def _start_counting(self) -> None:
        self._rejected_groups = 0
        self._too_long_rows = 0
        self._untrained_rows = 0
        self._trained_tokens = 0
        self._unknown_logprobs = 0

    def admit(self, groups: Iterable[object]) -> list[Row]:
        """
        The usable rows of `groups`, in order. A bad group is dropped, counted, and warned about once per kind.

        Raises:
            RolloutError: a group shows a setting that makes every group wrong (see `schema.rows_of`).
        """
        rows: list[Row] = []
        for raw in groups:
            try:
                rows += self._rows_of(parse_group(raw))
            except RejectedGroup as rejection:
                self._rejected_groups += 1
                self._warn_once(rejection.kind, "Dropped a group that cannot be trained on: %s.", rejection)
        return rows

    def _rows_of(self, group: ScoredGroup) -> list[Row]:
        rows = rows_of(
            group,
            max_sequence_length=self._max_sequence_length,
            temperature=self._temperature,
            single_row_groups=self._single_row_groups,
            vocab_size=self._vocab_size,
        )
        longest = max(map(len, group.tokens))
        too_long = sum(len(tokens) > self._max_sequence_length for tokens in group.tokens)
        untrained = len(group.tokens) - len(rows) - too_long
        if too_long:
            message = "Dropped a sequence of %d tokens from environment %s: at most %d fit. Sample shorter ones."
            self._warn_once("too long", message, longest, group.env_id, self._max_sequence_length)
        if untrained:
            message = "Dropped a sequence from environment %s: its mask leaves no token to train on."
            self._warn_once("untrained", message, group.env_id)
        for name in ("ref_logprobs", "distill_token_ids", "distill_logprobs"):
            if getattr(group, name) is not None:
                self._warn_once(name, "Environment %s sends `%s`; they are not used.", group.env_id, name)
        self._too_long_rows += too_long
        self._untrained_rows += untrained
        for row in rows:
            trained = sum(row.mask)
            self._trained_tokens += trained
            self._unknown_logprobs += sum(map(math.isnan, row.logprobs)) - (len(row.mask) - trained)
        return rows

    def _warn_once(self, kind: str, message: str, *values: object) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning(message + " Later ones are only counted in the metrics.", *values)

    def dropped(self) -> str:
        """What was left out since the last `metrics()`, for a run that waits for rows; empty if nothing was."""
        rows = self._too_long_rows + self._untrained_rows
        if not (self._rejected_groups or rows):
            return ""
        return (
            f"Rollouts arrive, but since the last step {self._rejected_groups} groups and {rows} further sequences "
            f"were dropped because they cannot be trained on ({self._too_long_rows} of them are longer than "
            f"{self._max_sequence_length} tokens): the warnings in this log name the reasons."
        )

    def metrics(self) -> dict[str, float]:
        """
        Counts since the last call: `rollouts/rejected_groups`, `rollouts/dropped_rows` (its parts are
        `rollouts/too_long_rows` and `rollouts/untrained_rows`), and `rollouts/unknown_logprobs`, the share of trained
        tokens whose log-probability the environment did not send (left out when no token came in).
        """
        counts = {
            "rollouts/rejected_groups": float(self._rejected_groups),
            "rollouts/dropped_rows": float(self._too_long_rows + self._untrained_rows),
            "rollouts/too_long_rows": float(self._too_long_rows),
            "rollouts/untrained_rows": float(self._untrained_rows),
        }
        if self._trained_tokens:
            counts["rollouts/unknown_logprobs"] = self._unknown_logprobs / self._trained_tokens
        self._start_counting()
        return counts
