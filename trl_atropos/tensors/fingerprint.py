"""Computes fingerprints of weights. Trainer and server each compute them from their own memory, and
compare.

A parameter of the trainer is read as a matrix of entries (`rectangles.py`), each a signed integer
of 8 or 16 bits. A fingerprint is a pair of sums, each modulo the prime P = 2**31 - 1, with weights
of its own, of

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

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trl_atropos.tensors.rectangles import Part, Rectangle, rectangles

try:
    import triton
    import triton.language as tl
except ImportError:  # builds of torch for the CPU do without
    triton = None

P = (1 << 31) - 1
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


class PlacedPart(NamedTuple):
    """Holds elements of a parameter, with their place in it."""

    values: Tensor
    part: Part
    shape: Sequence[int]  # of the whole parameter
    number: int  # of the fingerprint that it belongs to

    @classmethod
    def whole(cls, values: Tensor, number: int) -> "PlacedPart":
        return cls(values, Part.whole(values.shape), values.shape, number)


class Fingerprints:
    """
    Computes the fingerprints of parameters whose memory stays where it is.

    Args:
        parts: of all parameters.
        count: of fingerprints.
    """

    def __init__(self, parts: Iterable[PlacedPart], count: int):
        self.count = count
        self.device = torch.device("cpu")
        # with the number of the fingerprint that it belongs to
        self.rectangles: list[tuple[int, Rectangle]] = []
        for values, part, shape, number in parts:
            for rectangle in rectangles(values, part, shape):
                self.device = values.device
                self.rectangles.append((number, rectangle))
        self._tables: dict[_Kind, Tensor] = {}
        if self.device.type == "cuda":
            self._tables = _tables_of(self.rectangles, self.device)

    @torch.no_grad()
    def compute(self) -> Tensor:
        """Returns int64 (count, 2), on the device of the parameters, where it is only queued."""
        sums = torch.zeros(self.count, 2, dtype=torch.int64, device=self.device)
        for kind, table in self._tables.items():
            programs = (len(table),)
            _add_parts[programs](table, sums, *kind)
        if not self._tables:
            for number, rectangle in self.rectangles:
                sums[number] += _sums(rectangle)
        return sums % P


def fingerprint(values: Tensor) -> Tensor:
    """Returns the fingerprint of a whole parameter, int64 (2,)."""
    fingerprints = Fingerprints([PlacedPart.whole(values, 0)], count=1)
    return fingerprints.compute()[0]


def joined(sums: Tensor) -> list[int]:
    """Returns fingerprints, int64 (count, 2), as one number each, as they are sent. The sums may be
    those of several parts, added up without heed to the modulus."""
    pairs = (sums % P).tolist()
    return [first << 32 | second for first, second in pairs]


def added(fingerprints: Iterable[int]) -> int:
    """Returns the fingerprint of a whole from those of its parts, each as one number."""
    first = 0
    second = 0
    for number in fingerprints:
        first += number >> 32
        second += number & 0xFFFFFFFF
    return first % P << 32 | second % P


# Fingerprints of one and the same part: of each its worker, and its number among the worker's.
_Copies = list[tuple[int, int]]
_PartsOfWorker = Sequence[Sequence[Part]]  # for each parameter


class Assembly:
    """
    Puts together the fingerprints of parameters from those of the parts that a server's workers
    keep. Two workers may keep the same part.

    Args:
        shapes: of the parameters, by name.
        workers: for each worker, the parts of each parameter.

    Attributes:
        names: of the parameters.
        refused: why a parameter cannot be put together, by name.
    """

    def __init__(self, shapes: dict[str, Sequence[int]], workers: Sequence[_PartsOfWorker]):
        self.refused: dict[str, str] = {}
        self.names = list(shapes)
        self._parts: dict[str, list[_Copies]] = {}  # of each parameter, without duplicates
        counts = [0] * len(workers)  # fingerprints of each worker so far
        for number, (name, shape) in enumerate(shapes.items()):
            copies: dict[str, _Copies] = defaultdict(list)  # of each different part
            missing = math.prod(shape)  # elements
            for worker, parts in enumerate(workers):
                for offset, size, stride in parts[number]:
                    part = f"{offset} {size} {stride}"
                    if part not in copies:
                        missing -= math.prod(size)
                    copies[part].append((worker, counts[worker]))
                    counts[worker] += 1
            if missing:
                elements = math.prod(shape)
                self.refused[name] = f"{elements - missing} of its {elements} elements are kept"
            self._parts[name] = list(copies.values())

    def sum(self, fingerprints: Sequence[Sequence[int]]) -> list[int | None]:
        """Returns the fingerprint of each parameter, given what each worker found of its parts.
        `None` stands for a refused parameter, and for one of which two workers keep the same part
        with different values."""
        sums = []
        for name, parts in self._parts.items():
            total = None
            if name not in self.refused:
                total = _sum_of_parts(parts, fingerprints)
            sums.append(total)
        return sums


def _sum_of_parts(parts: Sequence[_Copies], fingerprints: Sequence[Sequence[int]]) -> int | None:
    """Returns the fingerprint of all parts together, or `None` if the copies of one differ."""
    of_parts = []
    for copies in parts:
        values = {fingerprints[worker][number] for worker, number in copies}
        if len(values) > 1:
            return None
        of_parts += values
    return added(of_parts)


# -------------------------------------------------------------------------------------- on the CPU


def _sums(rectangle: Rectangle) -> Tensor:
    """Returns both sums of a rectangle on the CPU, int64 (2,)."""
    values, row, row_step, column, column_step = rectangle
    rows, columns = values.shape
    of_rows = _weights_of_both(row, row_step, rows, ROW_SALTS)  # (2, rows)
    of_columns = _weights_of_both(column, column_step, columns, COLUMN_SALTS)  # (2, columns)
    offsets = of_rows.sum(1, keepdim=True) % P * OFFSET  # (2, 1), of a whole column
    factors = of_rows.double()
    sums = torch.zeros(2, dtype=torch.int64)
    for left in range(0, columns, COLUMNS_AT_ONCE):
        right = left + COLUMNS_AT_ONCE
        band = values[:, left:right]
        by_column = offsets + _sums_by_column(factors, band)
        products = by_column % P * of_columns[:, left:right]
        products %= P
        sums += products.sum(1)
    return sums % P


def _sums_by_column(factors: Tensor, values: Tensor) -> Tensor:
    """Returns the sum over the rows of each column, each entry times its row's weight for the first
    and the second sum, int64 (2, columns).

    Args:
        factors: weights of the rows, float64 (2, rows).
        values: entries, (rows, columns).
    """
    rows, columns = values.shape
    rows_at_once = max(1, AT_ONCE // columns)
    rows_at_once = min(EXACT_ROWS, rows_at_once)
    sums = torch.zeros(2, columns, dtype=torch.int64)
    for count, top in enumerate(range(0, rows, rows_at_once), start=1):
        bottom = top + rows_at_once
        entries = values[top:bottom].double()
        products = factors[:, top:bottom] @ entries
        sums += products.long()
        if count % REMAINDER_AFTER == 0:
            sums %= P
    return sums


def _weights_of_both(first: int, step: int, count: int, salts: tuple[int, int]) -> Tensor:
    """Returns the weights of positions for the first and the second sum, int64 (2, count)."""
    return torch.stack([_weights(first, step, count, salt) for salt in salts])


def _weights(first: int, step: int, count: int, salt: int) -> Tensor:
    """Returns a hash of each position, int64 (count,), from 1 to 2**30. No two positions below
    2**30 share one, because each step (xor with a shifted copy, product with an odd number) can be
    undone. The multipliers are those of `lowbias32` of github.com/skeeto/hash-prospector (public
    domain), in 30 bits."""
    positions = torch.arange(count) * step + first
    x = positions + salt & POSITIONS
    x = x ^ x >> 15
    x = x * 0x21F0AAAD & POSITIONS
    x = x ^ x >> 14
    x = x * 0x135A2D97 & POSITIONS
    x = x ^ x >> 15
    return x + 1


# --------------------------------------------------------------------------------------- on a GPU


class _Kind(NamedTuple):
    """Names a variant of the kernel, which is compiled for itself."""

    bits: int  # of an entry
    packed: bool  # rows can be read 16 bytes at a time
    width: int  # columns that a program reads


def _tables_of(
    rectangles: Sequence[tuple[int, Rectangle]], device: torch.device
) -> dict[_Kind, Tensor]:
    """Returns a table for each kind of program, int64 (programs, `FIELDS`): where each reads, and
    what that counts for."""
    entries = defaultdict(list)
    for number, rectangle in rectangles:
        kind = _kind_of(rectangle.values)
        entries[kind] += _entries(rectangle, number, kind.width)
    tables = {}
    for kind, table in entries.items():
        tables[kind] = torch.tensor(table, device=device)
    return tables


def _kind_of(values: Tensor) -> _Kind:
    itemsize = values.element_size()
    columns = values.shape[1]
    row_stride, column_stride = values.stride()
    distance = row_stride * itemsize  # from one row to the next, in bytes
    length = columns * itemsize
    # Has a bit below 16 if a row begins or ends beside a multiple of 16 bytes.
    borders = values.data_ptr() | distance | length
    packed = column_stride == 1 and borders % 16 == 0
    width = NARROW if columns % WIDE else WIDE
    return _Kind(8 * itemsize, packed, width)


def _entries(rectangle: Rectangle, number: int, width: int) -> Iterator[list[int]]:
    """Yields the entry of each program that reads some of a rectangle: `ROWS` rows and `width`
    columns, or what is left of them."""
    values, row, row_step, column, column_step = rectangle
    rows, columns = values.shape
    row_stride, column_stride = values.stride()
    for top in range(0, rows, ROWS):
        for left in range(0, columns, width):
            elements = top * row_stride + left * column_stride
            row_count = min(ROWS, rows - top)
            column_count = min(width, columns - left)
            yield [
                values.data_ptr() + elements * values.element_size(),
                row_count << 32 | column_count,
                row_stride,
                column_stride,
                row + top * row_step,
                row_step,
                column + left * column_step,
                column_step,
                number,
            ]


if triton is not None:
    _FIELDS = tl.constexpr(FIELDS)
    _P = tl.constexpr(P)
    _OFFSET = tl.constexpr(OFFSET)
    _POSITIONS = tl.constexpr(POSITIONS)
    _ROW_SALT = tl.constexpr(ROW_SALTS[0])
    _ROW_SALT_2 = tl.constexpr(ROW_SALTS[1])
    _COLUMN_SALT = tl.constexpr(COLUMN_SALTS[0])
    _COLUMN_SALT_2 = tl.constexpr(COLUMN_SALTS[1])

    @triton.jit
    def _weight(position, salt: tl.constexpr):
        """Returns `_weights` of int64 positions, as int64."""
        x = (position + salt).to(tl.uint32) & _POSITIONS
        x = x ^ (x >> 15)
        x = (x * 0x21F0AAAD) & _POSITIONS
        x = x ^ (x >> 14)
        x = (x * 0x135A2D97) & _POSITIONS
        x = x ^ (x >> 15)
        weight = x + 1
        return weight.to(tl.int32).to(tl.int64)

    @triton.jit
    def _folded(x):
        """Returns a number below 2**31 + 2**(n - 31) that is equal to `x`, from 0 to 2**n - 1,
        modulo 2**31 - 1."""
        return (x & _P) + (x >> 31)

    @triton.jit
    def _add_sum(result, total, ones, of_columns):
        """Adds one of both sums to `result`: of the entries of each column, and of 1 for each
        row."""
        by_column = _folded(total + ones * _OFFSET)
        products = _folded(by_column * of_columns)
        tl.atomic_add(result, _folded(tl.sum(products)), sem="relaxed")

    @triton.jit
    def _add_parts(
        table,
        sums,
        BITS: tl.constexpr,
        PACKED: tl.constexpr,
        COLUMNS: tl.constexpr,
    ):
        """Adds what one entry of the table says to the two sums of its fingerprint."""
        program = tl.program_id(0).to(tl.int64)
        entry = table + program * _FIELDS
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
        if BITS == 8:
            start = address.to(tl.pointer_type(tl.int8))
        else:
            start = address.to(tl.pointer_type(tl.int16))
        if PACKED:  # which lets the compiler read 16 bytes at a time
            start = tl.multiple_of(start, 16)
            columns = tl.multiple_of(columns, 128 // BITS)
            row_stride = tl.multiple_of(row_stride, 128 // BITS)
            column_stride = 1
        j = tl.arange(0, COLUMNS)
        inside = j < columns
        # Sums of each column over all rows are at most ROWS * 2**16 * 2**30, so that no remainder
        # is due before the end.
        total = tl.zeros([COLUMNS], dtype=tl.int64)
        total_2 = tl.zeros([COLUMNS], dtype=tl.int64)
        ones = tl.zeros([1], dtype=tl.int64)
        ones_2 = tl.zeros([1], dtype=tl.int64)
        for i in range(rows):
            places = start + i * row_stride + j * column_stride
            entries = tl.load(places, mask=inside, other=0)
            entries = entries.to(tl.int64)
            row_position = row + i * row_step
            of_row = _weight(row_position, _ROW_SALT)
            of_row_2 = _weight(row_position, _ROW_SALT_2)
            total += entries * of_row
            total_2 += entries * of_row_2
            ones += of_row
            ones_2 += of_row_2
        position = column + j * column_step
        of_columns = tl.where(inside, _weight(position, _COLUMN_SALT), 0)
        of_columns_2 = tl.where(inside, _weight(position, _COLUMN_SALT_2), 0)
        first = sums + 2 * number
        _add_sum(first, total, ones, of_columns)
        _add_sum(first + 1, total_2, ones_2, of_columns_2)
