"""The order of batches within a burst. `BatchPuller` asks it what is complete after every pull."""

Batch = list[object]  # groups as delivered


class Burst:
    """
    Puts batches back in order. The API cuts its whole queue into n batches at once, raises its step by n, and hands
    them out newest first. So a pull that raised the step by n began a burst, and the n-1 pulls after it complete it.
    Anything else is what an earlier trainer left behind; it is complete when a burst begins or nothing more comes.
    """

    def __init__(self) -> None:
        self._newest_first: list[Batch] = []
        self._left = 0  # batches of this burst that the API still holds

    @property
    def is_open(self) -> bool:
        return self._left > 0

    def add(self, batch: Batch | None, begun: int) -> list[Batch]:
        """Take one pull: its batch (None if lost), and by how much it raised the step. Returns what is complete."""
        ready = self.close() if begun > 0 else []
        self._left += begun
        if batch is not None:
            self._newest_first.append(batch)
        if self.is_open:
            self._left -= 1
            if not self.is_open:
                ready += self.close()
        return ready

    def close(self) -> list[Batch]:
        """No more of it will come. Returns what there is, oldest first."""
        ready = self._newest_first[::-1]
        self._newest_first, self._left = [], 0
        return ready
