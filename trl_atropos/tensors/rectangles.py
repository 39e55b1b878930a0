"""Finds where elements of a parameter stand in it, as rectangles of rows and columns.

Here a parameter is a matrix: its last dimension counts the columns, all others together count the
rows. An element of four or eight bytes is two or four columns, so that every entry is a signed
integer of 8 or 16 bits.
"""

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

INTEGERS = {1: torch.int8, 2: torch.int16}  # entries, by bytes of an element


class Part(NamedTuple):
    """Tells where some elements stand in a contiguous parameter: as a view of it, in elements."""

    offset: int
    size: list[int]
    stride: list[int]

    @classmethod
    def of(cls, view: Tensor) -> "Part":
        return cls(view.storage_offset(), list(view.size()), list(view.stride()))

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Part":
        return cls.of(torch.empty(shape, device="meta"))

    def moved(self, offset: int) -> "Part":
        return self._replace(offset=self.offset + offset)


class Rectangle(NamedTuple):
    """Holds entries of a parameter as a matrix, and the rows and columns that they stand in."""

    values: Tensor
    row: int
    row_step: int
    column: int
    column_step: int


def rectangles(values: Tensor, part: Part, shape: Sequence[int]) -> Iterator[Rectangle]:
    """
    Yields the entries of elements, as views of their memory.

    Args:
        values: elements of a parameter, of any strides.
        part: where they stand in the parameter, dimension by dimension.
        shape: of the whole parameter.
    """
    width = shape[-1] if len(shape) else 1
    itemsize = values.element_size()
    if itemsize <= 2:
        yield from _rectangles(values.view(INTEGERS[itemsize]), part, width)
        return
    # The entries of an element lie next to each other in memory and in the parameter: they are one
    # more dimension.
    per_element = itemsize // 2
    entries = values.unsqueeze(-1).view(torch.int16)
    size = [*part.size, per_element]
    stride = [step * per_element for step in part.stride]
    place = Part(part.offset * per_element, size, [*stride, 1])
    yield from _rectangles(entries, place, width * per_element)


class _Dim(NamedTuple):
    """Describes one dimension of entries."""

    size: int
    step: int  # from one index to the next in the parameter
    stride: int  # the same in memory

    def fills_step_of(self, outer: "_Dim") -> bool:
        """Returns whether the next index of `outer` goes on right behind this dimension's last."""
        step = self.size * self.step
        stride = self.size * self.stride
        return step == outer.step and stride == outer.stride


_NO_DIM = _Dim(1, 0, 0)


def _rectangles(values: Tensor, part: Part, width: int) -> Iterator[Rectangle]:
    """
    Yields entries of a parameter whose rows are `width` entries long.

    The view `[:, 0, 1:3]` of a (2, 2, 4) parameter has the offset 1, the size (2, 2) and the steps
    (8, 1). In rows of 4, a step of 8 is two rows, and a step of 1 is one column. So the view is the
    rectangle of rows 0 and 2, and columns 1 and 2:

        .  a  b  .
        .  .  .  .
        .  c  d  .
        .  .  .  .
    """
    if not values.numel():
        return
    first_row, first_column = divmod(part.offset, width)
    dims = []
    for size, step, stride in zip(part.size, part.stride, values.stride(), strict=True):
        if size != 1:
            dims.append(_Dim(size, step, stride))
    if _cross_rows(dims, first_column, width):
        yield from _split_at_rows(values, dims, part, width)
        return
    row_dims = []
    column_dims = []
    for dim in dims:
        if dim.step % width:
            column_dims.append(dim)
        else:
            rows_on = dim.step // width
            row_dims.append(dim._replace(step=rows_on))
    rows, *more_rows = _merged(row_dims) or [_NO_DIM]
    columns, *more_columns = _merged(column_dims) or [_NO_DIM]
    size = (rows.size, columns.size)
    stride = (rows.stride, columns.stride)
    for rows_on, row_offset in _offsets(more_rows):
        row = first_row + rows_on
        for columns_on, column_offset in _offsets(more_columns):
            column = first_column + columns_on
            offset = values.storage_offset() + row_offset + column_offset
            matrix = values.as_strided(size, stride, offset)
            yield Rectangle(matrix, row, rows.step, column, columns.step)


def _cross_rows(dims: Sequence[_Dim], column: int, width: int) -> bool:
    """Returns whether a dimension that begins in this column leads into another row, by a step that
    is not of whole rows."""
    for dim in dims:
        last = column + (dim.size - 1) * dim.step
        if dim.step % width and last >= width:
            return True
    return False


def _split_at_rows(
    values: Tensor, dims: Sequence[_Dim], part: Part, width: int
) -> Iterator[Rectangle]:
    """
    Yields a run of entries over several rows in up to three rectangles: the end of a row, whole
    rows, and the beginning of another. A run of 9 that begins in column 2 of rows of 4 has

        .  .  a  b      an end of 2 entries,
        c  d  e  f      one whole row,
        g  h  i  .      and a beginning of 3.
    """
    flat = values.flatten()
    if _merged(dims) != [_Dim(len(flat), step=1, stride=1)]:
        raise ValueError(
            f"elements at {part} cross the rows of a parameter, which are {width} entries long"
        )
    end = -part.offset % width  # -2 % 4 = 2
    beginning = (len(flat) - end) % width  # (9 - 2) % 4 = 3
    whole = len(flat) - end - beginning
    first, middle, last = flat.split([end, whole, beginning])
    rows = middle.view(-1, width)
    offset = part.offset
    for piece in (first, rows, last):
        place = Part.whole(piece.shape).moved(offset)
        yield from _rectangles(piece, place, width)
        offset += piece.numel()


def _merged(dims: Sequence[_Dim]) -> list[_Dim]:
    """Returns dimensions, the largest first, after joining those that lie within each other on both
    sides. Sizes 2 and 4 with steps and strides of 4 and 1 become the size 8 with 1."""
    merged = []
    for dim in sorted(dims, key=attrgetter("step"), reverse=True):
        if merged and dim.fills_step_of(merged[-1]):
            outer = merged.pop()
            dim = dim._replace(size=dim.size * outer.size)
        merged.append(dim)
    return sorted(merged, key=attrgetter("size"), reverse=True)


def _offsets(dims: Sequence[_Dim]) -> Iterator[tuple[int, int]]:
    """Yields, for all indices into these dimensions, how far they lead in the parameter and in
    memory. Without dimensions, that is (0, 0) once."""
    if not dims:
        yield 0, 0
        return
    outer, *inner = dims
    for index in range(outer.size):
        for on, offset in _offsets(inner):
            outer_on = index * outer.step
            outer_offset = index * outer.stride
            yield outer_on + on, outer_offset + offset
