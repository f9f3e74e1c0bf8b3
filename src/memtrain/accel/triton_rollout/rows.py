"""Rows and the sums of their squares: how a norm is folded into the product that reads them.

A norm's gain lies in the weights (`InferenceStack` puts it there), so that a product reads its
rows as they are and applies the norm's scale of each row to the result. For that it sums the rows'
squares on the way (PARTS 0), or reads the sums (PARTS, R) that the product which made the rows
has left (MEASURE), one of each block of its columns: with many rows the registers are worth more.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Rows(NamedTuple):
    """Rows (R, I) and, where the product that made them has left them, parts (P, R) of the sums of
    their squares."""

    values: Tensor
    squares: Tensor | None = None

    def split(self, size: int) -> list["Rows"]:
        """Pieces of so many rows; of squares, which must be in one part, each its own."""
        values = self.values.split(size)
        if self.squares is None:
            return [Rows(piece) for piece in values]
        return [Rows(*both) for both in zip(values, self.squares.split(size, dim=1), strict=True)]


@triton.jit
def source_rows(row, rows, length, kept, first):
    """Where kept rows stand among all; of rows that are not there the first, to need no mask."""
    row = tl.where(row < rows, row, 0)
    return ((row // kept) * length + first + row % kept).to(tl.int64)


@triton.jit
def sums_of_squares(part):
    """Sums of squares along the last dimension."""
    wide = part.to(tl.float32)
    return tl.sum(wide * wide, len(part.shape) - 1)


@triton.jit
def squares_before(x_at, inner, INNER: tl.constexpr, BI: tl.constexpr):
    """The rows' sums of squares, in a loop of their own.

    For rows that a product takes as they are. What a loop reads for a product and for something
    else, Triton 3.6 gives one buffer too few: it is filled anew while the product still runs.
    """
    first = tl.load(x_at, mask=(inner < INNER)[None, :], other=0.0)
    total = sums_of_squares(first)
    for start in range(BI, INNER, BI):
        inside = (start + inner < INNER)[None, :]
        total += sums_of_squares(tl.load(x_at + start, mask=inside, other=0.0))
    return total


@triton.jit
def sum_of_parts(squares, row, rows, PARTS: tl.constexpr):
    """The rows' sums of squares from those that the product before this one has left."""
    total = tl.load(squares + row)
    for part in tl.static_range(1, PARTS):
        total += tl.load(squares + part * rows + row)
    return total
