"""Which row is where, whatever happens to a reply: the numbers of the batches that an Atropos API assembles.

The API cuts its whole queue into batches at once, raises its step by their number, and hands them out newest first;
it does so only when it holds none. `BatchPuller` tells `Delivery` what it sees, and gets every batch's place in the
order in which the rows were produced. A batch that the API has popped and nobody received leaves its place open, which
is found out, to the row, as soon as the API is known to hold none: when it says so, or when its step rises.
"""

from dataclasses import dataclass, replace

from trl_atropos.rollouts.spool import Region

Batch = list[object]  # groups as delivered

LOST_IN_DELIVERY = "lost_in_delivery"
LOST_WITH_API = "lost_with_api"


@dataclass(frozen=True)
class Arrival:
    """A batch and its place, or (`batch` None) rows of which it is now known that they will never come."""

    start: int
    size: int
    region: Region  # after it
    batch: Batch | None = None
    reason: str = ""


class Delivery:
    """
    Args:
        batch_size: rows of every batch to come. One that resumes may have had another.
        region: the one being delivered; `region.step` is the API's step when it was last asked.
        begin: index of the next row, where that is beyond the region, as when files of the spool were deleted.
    """

    def __init__(self, batch_size: int, region: Region, begin: int):
        self._batch_size = batch_size
        self.region = region
        if not self.left and self.end < begin:
            self.region = replace(region, base=begin, batches=0)

    @property
    def left(self) -> int:
        """Batches that have been assembled and not received."""
        return self.region.left

    @property
    def end(self) -> int:
        """Index after everything that has been assembled."""
        return self.region.base + self.region.batches * self.region.batch_size

    @property
    def complete_until(self) -> int:
        """Below this index, nothing more will come."""
        return self.region.base if self.left else self.end

    def place(self, batch: Batch) -> Arrival:
        """`batch` is the newest that is left."""
        size, left = self.region.batch_size, self.left - 1
        self.region = replace(self.region, left=left)
        return Arrival(self.region.base + left * size, size, self.region, batch)

    def open(self, batches: int, step: int) -> list[Arrival]:
        """The API, at `step`, had nothing left of the region so far, and has `batches` new ones."""
        lost = self.settle(LOST_IN_DELIVERY)
        self.region = Region(self.region.registration, step, self.end, self._batch_size, batches, batches)
        return lost

    def settle(self, reason: str) -> list[Arrival]:
        """The API holds nothing: what is left was lost."""
        if not self.left:
            return []
        size, self.region = self.left * self.region.batch_size, replace(self.region, left=0)
        return [Arrival(self.region.base, size, self.region, reason=reason)]

    def join(self, registration: str, step: int) -> list[Arrival]:
        """From now on, the rows come from an API that knows this run as `registration`, and is at `step`."""
        lost = self.settle(LOST_WITH_API)
        self.region = Region(registration, step, self.end, self._batch_size, 0, 0)
        return lost
