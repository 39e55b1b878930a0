"""The books of a run: what became of every row that the environments produced for it."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

STALE = "stale"
ZERO_VARIANCE = "zero_variance"
RESUMED_MID_BATCH = "resumed_mid_batch"


@dataclass
class Books:
    """
    Rows that were handed out, dropped by reason, or lost with an API that was restarted. Their sum is the number of
    rows that were produced up to the last one handed out: each was trained once, or is in one of the other counts.
    """

    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    lost_with_api: int = 0

    @property
    def produced(self) -> int:
        return self.trained + self.dropped.total() + self.lost_with_api

    def unfinished(self, rows: int) -> None:
        """Rows that were handed out, and not trained before the checkpoint from which the run goes on."""
        self.trained -= rows
        if rows:
            self.dropped[RESUMED_MID_BATCH] += rows

    def as_json(self) -> dict[str, Any]:
        return {"trained": self.trained, "dropped": dict(self.dropped), "lost_with_api": self.lost_with_api}

    @classmethod
    def from_json(cls, books: dict[str, Any]) -> "Books":
        return cls(books["trained"], Counter(books["dropped"]), books["lost_with_api"])
