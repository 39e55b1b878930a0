"""Fingerprints of weights: trainer and server compute them, each from its own memory, and compare.

A parameter is a matrix here: the trainer's last dimension counts the columns, all others together count the rows. Its
fingerprint is the sum, modulo 2**64, of

    (bits of the element + 1) * weight of its row * weight of its column

over all elements; weights are odd numbers of 32 bits, hashed from their position. So an element that changed, moved,
is missing or is there twice changes the sum, and the parts of a parameter (shards, pieces of a fused tensor) add up to
the whole one's. Two tensors that differ have the same fingerprint once in about 2**31 cases, and never if it is one
element that differs.

On a GPU, one kernel reads all parts at the speed of the memory. On the CPU, torch computes the same.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # builds of torch for the CPU do without
    triton = None

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
COLUMN = 0x9E3779B9  # what the positions of columns are hashed with; those of rows: 0
AT_ONCE = 1 << 16  # elements that the CPU widens to 64 bits
ROWS, COLUMNS = 64, 1024  # of a part that one program of the kernel reads
FIELDS = 9  # of a program's entry in its table


class Part(NamedTuple):
    """Where elements stand in a contiguous parameter: a view of it, in elements."""

    offset: int
    size: list[int]
    stride: list[int]

    @classmethod
    def of(cls, view: torch.Tensor) -> "Part":
        return cls(view.storage_offset(), list(view.size()), list(view.stride()))

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Part":
        return cls.of(torch.empty(shape, device="meta"))

    def moved(self, offset: int) -> "Part":
        return self._replace(offset=self.offset + offset)


class Rectangle(NamedTuple):
    """Elements of a parameter, two-dimensional, and the rows and columns at which they stand in it."""

    values: torch.Tensor
    row: int
    row_step: int
    column: int
    column_step: int


def rectangles(values: torch.Tensor, part: Part, shape: Sequence[int]) -> Iterator[Rectangle]:
    """
    Args:
        values: elements of a parameter, of any strides.
        part: where they stand in the parameter, dimension by dimension.
        shape: of the whole parameter.
    """
    width = shape[-1] if len(shape) else 1
    row, column = divmod(part.offset, width)
    if not values.numel():
        return
    dims = [dim for dim in zip(part.size, part.stride, values.stride(), strict=True) if dim[0] != 1]
    crossing = [dim for dim in dims if dim[1] % width and column + (dim[0] - 1) * dim[1] >= width]
    if crossing:  # a run of elements over several rows: the end of a row, whole rows, and the beginning of another
        if len(dims) > 1 or crossing[0][1] != 1:
            raise ValueError(f"elements at {part} cross the rows of a parameter of the shape {tuple(shape)}")
        flat = values.flatten()
        head = -column % width
        whole_rows = (len(flat) - head) // width
        pieces = flat.split([head, whole_rows * width, len(flat) - head - whole_rows * width])
        for begin, piece in zip((0, head, head + len(pieces[1])), (pieces[0], pieces[1].view(-1, width), pieces[2])):
            yield from rectangles(piece, Part.whole(piece.shape).moved(part.offset + begin), shape)
        return
    rows = _merged([(size, step // width, stride) for size, step, stride in dims if step % width == 0])
    columns = _merged([dim for dim in dims if dim[1] % width])
    (row_count, row_step, row_stride), *more_rows = rows or [(1, 0, 0)]
    (column_count, column_step, column_stride), *more_columns = columns or [(1, 0, 0)]
    for indices in itertools.product(*(range(size) for size, _, _ in (*more_rows, *more_columns))):
        along_rows = list(zip(indices, more_rows))
        along_columns = list(zip(indices[len(more_rows) :], more_columns))
        offset = sum(index * stride for index, (_, _, stride) in (*along_rows, *along_columns))
        place = (row_count, column_count), (row_stride, column_stride), values.storage_offset() + offset
        yield Rectangle(
            values.as_strided(*place),
            row + sum(index * step for index, (_, step, _) in along_rows),
            row_step,
            column + sum(index * step for index, (_, step, _) in along_columns),
            column_step,
        )


def _merged(dims: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Dimensions (size, step in the parameter, stride in memory), the largest first, after joining those that lie
    within each other on both sides."""
    found: list[tuple[int, int, int]] = []
    for size, step, stride in sorted(dims, key=lambda dim: -dim[1]):
        if found and found[-1][1] == size * step and found[-1][2] == size * stride:
            size *= found.pop()[0]
        found.append((size, step, stride))
    return sorted(found, key=lambda dim: -dim[0])


class Fingerprints:
    """
    The fingerprints of parameters whose memory stays where it is.

    Args:
        parts: for each part its elements, where they stand, the whole parameter's shape, and the number of the
            fingerprint that it belongs to.
        count: of fingerprints.
    """

    def __init__(self, parts: Iterable[tuple[torch.Tensor, Part, Sequence[int], int]], count: int):
        self.count = count
        self.rectangles = [
            (number, one) for values, part, shape, number in parts for one in rectangles(values, part, shape)
        ]
        self.device = next((one.values.device for _, one in self.rectangles), torch.device("cpu"))
        self._tables = _tables_of(self.rectangles) if self.device.type == "cuda" else {}

    @torch.no_grad()
    def compute(self) -> torch.Tensor:
        """Int64 (count,), on the device of the parameters, which it is only queued on."""
        sums = torch.zeros(self.count, dtype=torch.int64, device=self.device)
        if self.device.type == "cuda":
            for (itemsize, packed), table in self._tables.items():
                _add_parts[(len(table),)](table, sums, 8 * itemsize, packed, COLUMNS, COLUMN, FIELDS)
            return sums
        for number, rectangle in self.rectangles:
            sums[number] += _sum(rectangle)
        return sums


class Assembly:
    """
    How the parts that a server's workers keep make up the parameters. Two workers may keep the same part.

    Args:
        shapes: of the parameters, by name.
        workers: for each worker, the parts of each parameter.

    Attributes:
        refused: why a parameter cannot be put together, by name.
    """

    def __init__(self, shapes: dict[str, Sequence[int]], workers: Sequence[Sequence[Sequence[Part]]]):
        self.refused: dict[str, str] = {}
        self.names = list(shapes)
        # Of each parameter, for each different part, which fingerprints are of it: whose, and the how many-th.
        self._places: list[list[list[tuple[int, int]]]] = []
        counters = [itertools.count() for _ in workers]
        for number, (name, shape) in enumerate(shapes.items()):
            places: dict[str, list[tuple[int, int]]] = {}
            found = 0
            for worker, parts in enumerate(workers):
                for part in parts[number]:
                    same = places.setdefault(repr(list(part)), [])
                    found += 0 if same else math.prod(part[1])
                    same.append((worker, next(counters[worker])))
            if found != math.prod(shape):
                self.refused[name] = f"{found} of its {math.prod(shape)} elements are kept"
            self._places.append(list(places.values()))

    def sum(self, fingerprints: Sequence[Sequence[int]]) -> list[int | None]:
        """The fingerprint of each parameter, from what each worker found of its parts. `None` where two workers keep
        the same part with different values, and for what is refused."""
        sums: list[int | None] = []
        for name, places in zip(self.names, self._places, strict=True):
            found = [{fingerprints[worker][number] for worker, number in same} for same in places]
            known = name not in self.refused and all(len(values) == 1 for values in found)
            sums.append(sum(value for values in found for value in values) % 2**64 if known else None)
        return sums


def fingerprint(values: torch.Tensor) -> torch.Tensor:
    """Of a whole parameter."""
    return Fingerprints([(values, Part.whole(values.shape), values.shape, 0)], 1).compute()[0]


def unsigned(sums: torch.Tensor) -> list[int]:
    """Fingerprints as numbers from 0 to 2**64 - 1, as they are sent."""
    return [one % 2**64 for one in sums.tolist()]


def _sum(rectangle: Rectangle) -> torch.Tensor:
    values, row, row_step, column, column_step = rectangle
    of_rows = _weights(row, row_step, values.shape[0], 0)
    of_columns = _weights(column, column_step, values.shape[1], COLUMN)
    total = of_rows.sum() * of_columns.sum()
    rows_at_once = max(1, AT_ONCE // values.shape[1])
    bits = values.view(BITS[values.element_size()])
    for begin in range(0, values.shape[0], rows_at_once):
        some = slice(begin, begin + rows_at_once)
        total += (bits[some].long() @ of_columns * of_rows[some]).sum()
    return total


def _weights(first: int, step: int, count: int, salt: int) -> torch.Tensor:
    """Odd numbers of 32 bits, with a sign, by position: `lowbias32` of github.com/skeeto/hash-prospector (public
    domain), computed in 64 bits."""
    mask = 0xFFFFFFFF
    x = (torch.arange(count) * step + first + salt) & mask
    x = (x ^ x >> 16) * 0x21F0AAAD & mask
    x = (x ^ x >> 15) * 0xD35A2D97 & mask
    x = (x ^ x >> 15) | 1
    return x - (x >> 31 << 32)


def _tables_of(found: list[tuple[int, Rectangle]]) -> dict[tuple[int, bool], torch.Tensor]:
    """By bytes of an element, and whether rows can be read 16 bytes at a time: for each program of the kernel where it
    reads, and what that counts for."""
    entries: dict[tuple[int, bool], list[list[int]]] = {}
    for number, (values, row, row_step, column, column_step) in found:
        (rows, columns), (row_stride, column_stride), itemsize = values.shape, values.stride(), values.element_size()
        packed = column_stride == 1 and not (values.data_ptr() | row_stride * itemsize | columns * itemsize) % 16
        for i, j in itertools.product(range(0, rows, ROWS), range(0, columns, COLUMNS)):
            address = values.data_ptr() + (i * row_stride + j * column_stride) * itemsize
            place = [row + i * row_step, row_step, column + j * column_step, column_step]
            part = [min(ROWS, rows - i) << 32 | min(COLUMNS, columns - j), row_stride, column_stride]
            entries.setdefault((itemsize, packed), []).append([address, *part, *place, number])
    device = found[0][1].values.device if found else "cpu"
    return {kind: torch.tensor(table, device=device) for kind, table in entries.items()}


if triton is not None:

    @triton.jit
    def _weight(position, salt: tl.constexpr):
        x = (position + salt).to(tl.uint32)
        x = (x ^ (x >> 16)) * 0x21F0AAAD
        x = (x ^ (x >> 15)) * 0xD35A2D97
        return ((x ^ (x >> 15)) | 1).to(tl.int32, bitcast=True)

    @triton.jit
    def _add_parts(
        table,
        sums,
        BITS: tl.constexpr,
        PACKED: tl.constexpr,
        COLUMNS: tl.constexpr,
        COLUMN: tl.constexpr,
        FIELDS: tl.constexpr,
    ):
        entry = table + tl.program_id(0).to(tl.int64) * FIELDS
        address = tl.load(entry)
        counts = tl.load(entry + 1)
        rows, columns = (counts >> 32).to(tl.int32), (counts & 0xFFFFFFFF).to(tl.int32)
        row_stride, column_stride = tl.load(entry + 2), tl.load(entry + 3)
        row, row_step = tl.load(entry + 4), tl.load(entry + 5)
        column, column_step = tl.load(entry + 6), tl.load(entry + 7)
        number = tl.load(entry + 8)
        if BITS == 8:
            start = address.to(tl.pointer_type(tl.int8))
        elif BITS == 16:
            start = address.to(tl.pointer_type(tl.int16))
        elif BITS == 32:
            start = address.to(tl.pointer_type(tl.int32))
        else:
            start = address.to(tl.pointer_type(tl.int64))
        if PACKED:  # which lets the compiler read 16 bytes at a time
            start = tl.multiple_of(start, 16)
            columns = tl.multiple_of(columns, 128 // BITS)
            row_stride, column_stride = tl.multiple_of(row_stride, 128 // BITS), 1
        j = tl.arange(0, COLUMNS)
        inside = j < columns
        total = tl.zeros([COLUMNS], dtype=tl.int64)
        ones = tl.zeros([1], dtype=tl.int64)
        for i in range(rows):
            bits = tl.load(start + i * row_stride + j * column_stride, mask=inside, other=0)
            of_row = _weight(row + i * row_step, 0)
            total += bits.to(tl.int64) * of_row.to(tl.int64)
            ones += of_row.to(tl.int64)
        of_columns = tl.where(inside, _weight(column + j * column_step, COLUMN).to(tl.int64), 0)
        tl.atomic_add(sums + number, tl.sum((total + ones) * of_columns), sem="relaxed")
