"""Many copies at once, again and again between the same places, as a publish makes them.

On a GPU, one kernel makes all that move runs of whole 16 bytes. To queue a copy for each tensor takes the CPU longer
than the device needs for small models: 2.8 ms for the 310 tensors of the shape of Qwen3-0.6B on an H100, of which the
copying is 0.9 ms. Copies that convert, move a few bytes at a time, or go from one device to another are torch's.
"""

from collections.abc import Iterable

import numpy as np
import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # builds of torch for the CPU do without
    triton = None

WORD, UNIT = 4, 16  # bytes that the kernel counts in, and that it moves at a time
SHORTEST = 1024  # bytes of a run, of which a program of the kernel moves at most `MOST`
MOST, AT_ONCE = 1 << 15, 1 << 13  # words


class Copies:
    """
    Args:
        pairs: of tensors of equal shapes, the target first. Both stay where they are.
    """

    def __init__(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]):
        self._kept = list(pairs)  # so that no memory in the table is freed
        runs = [runs_of(target, source) if target.is_cuda else None for target, source in self._kept]
        rest = [pair for pair, run in zip(self._kept, runs, strict=True) if run is None]
        self._rest = [list(side) for side in zip(*rest)]
        self._tables = {  # by device
            device: torch.from_numpy(np.concatenate(found)).to(device)
            for device in {target.device for target, _ in self._kept}
            if (found := [run for (to, _), run in zip(self._kept, runs) if run is not None and to.device == device])
        }

    def __call__(self) -> None:
        """Makes the copies, which on a GPU are only queued."""
        for device, table in self._tables.items():
            with torch.cuda.device(device):
                _copy_runs[(len(table),)](table, MOST, AT_ONCE, num_warps=8)
        if self._rest:
            torch._foreach_copy_(*self._rest)


def runs_of(target: torch.Tensor, source: torch.Tensor) -> np.ndarray | None:
    """Where the kernel reads and writes to copy a tensor, and how many words: (runs, 3), or `None` if it cannot."""
    if target.dtype != source.dtype or target.device != source.device or not target.numel():
        return None
    length, outer = 1, []
    for size, to, of in reversed(list(zip(target.shape, target.stride(), source.stride(), strict=True))):
        if not outer and (size == 1 or to == of == length):
            length *= size
        else:
            outer.append((size, to, of))
    begins = np.array([[source.data_ptr(), target.data_ptr()]])
    for size, to, of in outer:
        steps = np.arange(size)[:, None] * np.array([of, to]) * target.element_size()
        begins = (begins[:, None] + steps).reshape(-1, 2)
    num_bytes = length * target.element_size()
    if num_bytes % UNIT or num_bytes < SHORTEST or (begins % UNIT).any():
        return None
    offsets = np.arange(0, num_bytes // WORD, MOST)
    counts = np.minimum(MOST, num_bytes // WORD - offsets)
    places = (begins[:, None] + offsets[:, None] * WORD).reshape(-1, 2)
    return np.column_stack([places, np.tile(counts, len(begins))])


if triton is not None:

    @triton.jit
    def _copy_runs(table, MOST: tl.constexpr, AT_ONCE: tl.constexpr):
        entry = table + tl.program_id(0).to(tl.int64) * 3
        # Multiples, which let the compiler move 16 bytes at a time.
        source = tl.multiple_of(tl.load(entry).to(tl.pointer_type(tl.int32)), 16)
        target = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(tl.int32)), 16)
        count = tl.multiple_of(tl.load(entry + 2).to(tl.int32), 4)
        for begin in range(0, MOST, AT_ONCE):
            words = begin + tl.arange(0, AT_ONCE)
            tl.store(target + words, tl.load(source + words, mask=words < count), mask=words < count)
