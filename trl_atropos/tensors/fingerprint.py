"""Fingerprints of weights: trainer and server compute them, each from its own memory, and compare.

A parameter is a matrix here: the trainer's last dimension counts the columns, all others together
count the rows. An element of four or eight bytes is two or four columns, so that every entry is a
signed integer of 8 or 16 bits. A fingerprint is a pair of sums, each modulo the prime P = 2**31 -
1, with weights of its own, of

    (entry + 2**15 + 1) * weight of its row * weight of its column

over all entries. So an element that changed, moved, is missing or is there twice changes the sums,
and the parts of a parameter (shards, pieces of a fused tensor) add up to the whole one's.

Modulo a prime, no product of factors other than 0 is 0: no bit of an element counts for less than
another, as the highest would modulo a power of two, where an even number of changed signs cancels.
The weights are from 1 to 2**30 and differ between any two rows, and any two columns, below 2**30.
Hence one element of up to four bytes that differs is always seen, and so are two entries of one row
or of one column in each other's place. Any other two tensors have the same fingerprint once in
about 2**62 cases. docs/exactness.md says the same for users.

On a GPU, one kernel reads all parts at the speed of the memory. On the CPU, torch computes the
same.
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

P = (1 << 31) - 1
INTEGERS = {1: torch.int8, 2: torch.int16}  # entries, by bytes of an element
OFFSET = (1 << 15) + 1  # makes every entry positive, so that entries that are missing are seen
POSITIONS = (1 << 30) - 1  # the mask of the positions that have weights of their own
# Added to the positions of rows and of columns before they are hashed, for the first and the second
# sum.
ROW_SALTS = (0x00000000, 0x25A19C35)
COLUMN_SALTS = (0x1E3779B9, 0x0F39CC06)
# On the CPU, float64 multiplies and adds exactly up to 2**53: that many rows of 15 bits and a sign,
# times 30 bits.
EXACT_ROWS = 1 << (53 - 15 - 30)
REMAINDER_AFTER = 1 << 9  # sums below 2**53, which int64 adds exactly
AT_ONCE = 1 << 17  # entries that the CPU converts to float64
COLUMNS_AT_ONCE = 1 << 11
ROWS = 64  # of a part that one program of the kernel reads
# Its columns. Wide ones have fewer instructions for an element, but lanes beyond the last column do
# nothing.
WIDE = 2048
NARROW = 1024
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
    """Entries of a parameter, two-dimensional, and the rows and columns at which they stand in
    it."""

    values: torch.Tensor
    row: int
    row_step: int
    column: int
    column_step: int


def rectangles(values: torch.Tensor, part: Part, shape: Sequence[int]) -> Iterator[Rectangle]:
    """
    Yields the entries of elements, as views of their memory.

    Args:
        values: elements of a parameter, of any strides.
        part: where they stand in the parameter, dimension by dimension.
        shape: of the whole parameter.
    """
    width = shape[-1] if len(shape) else 1
    if values.element_size() <= 2:
        yield from _rectangles(values.view(INTEGERS[values.element_size()]), part, width)
        return
    # An element is a row of entries, which lie next to each other in memory and in the parameter.
    per_element = values.element_size() // 2
    entries = values.unsqueeze(-1).view(torch.int16)
    stride = [step * per_element for step in part.stride]
    split = Part(part.offset * per_element, [*part.size, per_element], [*stride, 1])
    yield from _rectangles(entries, split, width * per_element)


def _rectangles(values: torch.Tensor, part: Part, width: int) -> Iterator[Rectangle]:
    """The same of entries, in a parameter whose rows are `width` entries long."""
    row, column = divmod(part.offset, width)
    if not values.numel():
        return
    dims = [dim for dim in zip(part.size, part.stride, values.stride(), strict=True) if dim[0] != 1]
    if any(step % width and column + (size - 1) * step >= width for size, step, _ in dims):
        # A run of entries over several rows: the end of a row, whole rows, and the beginning of
        # another.
        run = _merged(dims)
        if len(run) > 1 or run[0][1:] != (1, 1):
            raise ValueError(
                f"elements at {part} cross the rows of a parameter, which are {width} entries long"
            )
        flat = values.flatten()
        head = -column % width
        whole_rows = (len(flat) - head) // width
        pieces = flat.split([head, whole_rows * width, len(flat) - head - whole_rows * width])
        for begin, piece in zip(
            (0, head, head + len(pieces[1])), (pieces[0], pieces[1].view(-1, width), pieces[2])
        ):
            yield from _rectangles(piece, Part.whole(piece.shape).moved(part.offset + begin), width)
        return
    rows = _merged(
        [(size, step // width, stride) for size, step, stride in dims if step % width == 0]
    )
    columns = _merged([dim for dim in dims if dim[1] % width])
    (row_count, row_step, row_stride), *more_rows = rows or [(1, 0, 0)]
    (column_count, column_step, column_stride), *more_columns = columns or [(1, 0, 0)]
    for indices in itertools.product(*(range(size) for size, _, _ in (*more_rows, *more_columns))):
        along_rows = list(zip(indices, more_rows))
        along_columns = list(zip(indices[len(more_rows) :], more_columns))
        offset = sum(index * stride for index, (_, _, stride) in (*along_rows, *along_columns))
        place = (
            (row_count, column_count),
            (row_stride, column_stride),
            values.storage_offset() + offset,
        )
        yield Rectangle(
            values.as_strided(*place),
            row + sum(index * step for index, (_, step, _) in along_rows),
            row_step,
            column + sum(index * step for index, (_, step, _) in along_columns),
            column_step,
        )


def _merged(dims: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Dimensions (size, step in the parameter, stride in memory), the largest first, after joining
    those that lie within each other on both sides."""
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
        parts: for each part its elements, where they stand, the whole parameter's shape, and the
            number of the fingerprint that it belongs to.
        count: of fingerprints.
    """

    def __init__(self, parts: Iterable[tuple[torch.Tensor, Part, Sequence[int], int]], count: int):
        self.count = count
        self.rectangles = [
            (number, one)
            for values, part, shape, number in parts
            for one in rectangles(values, part, shape)
        ]
        self.device = next((one.values.device for _, one in self.rectangles), torch.device("cpu"))
        self._tables = _tables_of(self.rectangles) if self.device.type == "cuda" else {}

    @torch.no_grad()
    def compute(self) -> torch.Tensor:
        """Int64 (count, 2), on the device of the parameters, which it is only queued on."""
        sums = torch.zeros(self.count, 2, dtype=torch.int64, device=self.device)
        if self.device.type == "cuda":
            for (itemsize, packed, width), table in self._tables.items():
                _add_parts[(len(table),)](table, sums, 8 * itemsize, packed, width, FIELDS)
            return sums % P
        for number, rectangle in self.rectangles:
            sums[number] += _sums(rectangle)
        return sums % P


class Assembly:
    """
    How the parts that a server's workers keep make up the parameters. Two workers may keep the same
    part.

    Args:
        shapes: of the parameters, by name.
        workers: for each worker, the parts of each parameter.

    Attributes:
        refused: why a parameter cannot be put together, by name.
    """

    def __init__(
        self, shapes: dict[str, Sequence[int]], workers: Sequence[Sequence[Sequence[Part]]]
    ):
        self.refused: dict[str, str] = {}
        self.names = list(shapes)
        # Of each parameter, for each different part, which fingerprints are of it: whose, and the
        # how many-th.
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
        """The fingerprint of each parameter, from what each worker found of its parts. `None` where
        two workers keep the same part with different values, and for what is refused."""
        sums: list[int | None] = []
        for name, places in zip(self.names, self._places, strict=True):
            found = [{fingerprints[worker][number] for worker, number in same} for same in places]
            known = name not in self.refused and all(len(values) == 1 for values in found)
            sums.append(added(value for values in found for value in values) if known else None)
        return sums


def fingerprint(values: torch.Tensor) -> torch.Tensor:
    """Int64 (2,): of a whole parameter."""
    return Fingerprints([(values, Part.whole(values.shape), values.shape, 0)], 1).compute()[0]


def joined(sums: torch.Tensor) -> list[int]:
    """Fingerprints, int64 (count, 2), as one number each, as they are sent. The sums may be those
    of several parts, added up without heed to the modulus."""
    return [first << 32 | second for first, second in (sums % P).tolist()]


def added(fingerprints: Iterable[int]) -> int:
    """The fingerprint of what consists of parts with these fingerprints, each as one number."""
    first = 0
    second = 0
    for number in fingerprints:
        first += number >> 32
        second += number & 0xFFFFFFFF
    return first % P << 32 | second % P


def _sums(rectangle: Rectangle) -> torch.Tensor:
    """Int64 (2,): both sums of a rectangle on the CPU."""
    values, row, row_step, column, column_step = rectangle
    rows, columns = values.shape
    of_rows = torch.stack([_weights(row, row_step, rows, salt) for salt in ROW_SALTS])
    of_columns = torch.stack(
        [_weights(column, column_step, columns, salt) for salt in COLUMN_SALTS]
    )
    factors = of_rows.double()
    all_rows = of_rows.sum(1, keepdim=True) % P
    sums = torch.zeros(2, dtype=torch.int64)
    for left in range(0, columns, COLUMNS_AT_ONCE):
        band = values[:, left : left + COLUMNS_AT_ONCE]
        rows_at_once = min(EXACT_ROWS, max(1, AT_ONCE // band.shape[1]))
        by_column = (all_rows * OFFSET).repeat(1, band.shape[1])
        for count, top in enumerate(range(0, rows, rows_at_once), start=1):
            some = slice(top, top + rows_at_once)
            by_column += (factors[:, some] @ band[some].double()).long()
            if count % REMAINDER_AFTER == 0:
                by_column %= P
        sums += (by_column % P * of_columns[:, left : left + COLUMNS_AT_ONCE] % P).sum(1)
    return sums % P


def _weights(first: int, step: int, count: int, salt: int) -> torch.Tensor:
    """Int64 (count,), from 1 to 2**30: a hash of each position. No two positions below 2**30 share
    one, because each step (xor with a shifted copy, product with an odd number) can be undone. The
    multipliers are those of `lowbias32` of github.com/skeeto/hash-prospector (public domain), in 30
    bits."""
    x = torch.arange(count) * step + first + salt & POSITIONS
    x = (x ^ x >> 15) * 0x21F0AAAD & POSITIONS
    x = (x ^ x >> 14) * 0x135A2D97 & POSITIONS
    return (x ^ x >> 15) + 1


def _tables_of(found: list[tuple[int, Rectangle]]) -> dict[tuple[int, bool, int], torch.Tensor]:
    """By bytes of an element, whether rows can be read 16 bytes at a time, and the columns that a
    program reads: for each program of the kernel where it reads, and what that counts for."""
    entries: dict[tuple[int, bool, int], list[list[int]]] = {}
    for number, (values, row, row_step, column, column_step) in found:
        (rows, columns), (row_stride, column_stride), itemsize = (
            values.shape,
            values.stride(),
            values.element_size(),
        )
        packed = (
            column_stride == 1
            and not (values.data_ptr() | row_stride * itemsize | columns * itemsize) % 16
        )
        width = NARROW if columns % WIDE else WIDE
        for i, j in itertools.product(range(0, rows, ROWS), range(0, columns, width)):
            address = values.data_ptr() + (i * row_stride + j * column_stride) * itemsize
            place = [row + i * row_step, row_step, column + j * column_step, column_step]
            part = [min(ROWS, rows - i) << 32 | min(width, columns - j), row_stride, column_stride]
            entries.setdefault((itemsize, packed, width), []).append(
                [address, *part, *place, number]
            )
    device = found[0][1].values.device if found else "cpu"
    return {kind: torch.tensor(table, device=device) for kind, table in entries.items()}


if triton is not None:
    _P = tl.constexpr(P)
    _OFFSET = tl.constexpr(OFFSET)
    _POSITIONS = tl.constexpr(POSITIONS)
    _ROW_SALT, _ROW_SALT_2 = (tl.constexpr(salt) for salt in ROW_SALTS)
    _COLUMN_SALT, _COLUMN_SALT_2 = (tl.constexpr(salt) for salt in COLUMN_SALTS)

    @triton.jit
    def _weight(position, salt: tl.constexpr):
        """`_weights` of int64 positions, as int64."""
        x = (position + salt).to(tl.uint32) & _POSITIONS
        x = ((x ^ (x >> 15)) * 0x21F0AAAD) & _POSITIONS
        x = ((x ^ (x >> 14)) * 0x135A2D97) & _POSITIONS
        return ((x ^ (x >> 15)) + 1).to(tl.int32).to(tl.int64)

    @triton.jit
    def _folded(x):
        """Less than 2**31 + 2**(n - 31), and equal to `x`, from 0 to 2**n - 1, modulo 2**31 - 1."""
        return (x & _P) + (x >> 31)

    @triton.jit
    def _add_parts(
        table,
        sums,
        BITS: tl.constexpr,
        PACKED: tl.constexpr,
        COLUMNS: tl.constexpr,
        FIELDS: tl.constexpr,
    ):
        entry = table + tl.program_id(0).to(tl.int64) * FIELDS
        address = tl.load(entry)
        counts = tl.load(entry + 1)
        rows = (counts >> 32).to(tl.int32)
        columns = (counts & 0xFFFFFFFF).to(tl.int32)
        row_stride = tl.load(entry + 2)
        column_stride = tl.load(entry + 3)
        row = tl.load(entry + 4)
        row_step = tl.load(entry + 5)
        column = tl.load(entry + 6)
        column_step = tl.load(entry + 7)
        number = tl.load(entry + 8)
        start = address.to(tl.pointer_type(tl.int8) if BITS == 8 else tl.pointer_type(tl.int16))
        if PACKED:  # which lets the compiler read 16 bytes at a time
            start = tl.multiple_of(start, 16)
            columns = tl.multiple_of(columns, 128 // BITS)
            row_stride = tl.multiple_of(row_stride, 128 // BITS)
            column_stride = 1
        j = tl.arange(0, COLUMNS)
        inside = j < columns
        # Of each column over all rows: at most ROWS * 2**16 * 2**30, so that no remainder is due
        # before the end.
        total = tl.zeros([COLUMNS], dtype=tl.int64)
        total_2 = tl.zeros([COLUMNS], dtype=tl.int64)
        ones = tl.zeros([1], dtype=tl.int64)
        ones_2 = tl.zeros([1], dtype=tl.int64)
        for i in range(rows):
            bits = tl.load(start + i * row_stride + j * column_stride, mask=inside, other=0).to(
                tl.int64
            )
            of_row = _weight(row + i * row_step, _ROW_SALT)
            of_row_2 = _weight(row + i * row_step, _ROW_SALT_2)
            total += bits * of_row
            total_2 += bits * of_row_2
            ones += of_row
            ones_2 += of_row_2
        position = column + j * column_step
        of_columns = tl.where(inside, _weight(position, _COLUMN_SALT), 0)
        of_columns_2 = tl.where(inside, _weight(position, _COLUMN_SALT_2), 0)
        products = _folded(_folded(total + ones * _OFFSET) * of_columns)
        products_2 = _folded(_folded(total_2 + ones_2 * _OFFSET) * of_columns_2)
        tl.atomic_add(sums + 2 * number, _folded(tl.sum(products)), sem="relaxed")
        tl.atomic_add(sums + 2 * number + 1, _folded(tl.sum(products_2)), sem="relaxed")
