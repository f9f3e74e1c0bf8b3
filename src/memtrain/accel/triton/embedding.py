"""The gradient of a table of few symbols: a product of one-hot rows that are never written.

The reference is `nn.embedding._Lookup.backward`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from memtrain.accel.triton.column_sum import column_sums
from memtrain.accel.triton.common import HIDE
from memtrain.accel.triton.launch import processors


@triton.jit(do_not_specialize=["rows", "turns"])
def _table_gradient(
    tokens, gradient, sums, rows, turns, SYMBOLS: tl.constexpr, WIDTH: tl.constexpr,
    BV: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """What a share of the rows adds to BV symbols of the table. `turns` is TURNS (see HIDE)."""
    symbol = tl.program_id(1) * BV + tl.arange(0, BV)
    column = tl.program_id(2) * BW + tl.arange(0, BW)
    there = (column < WIDTH)[None, :]
    total = tl.zeros((BV, BW), tl.float32)
    for turn in range(turns if HIDE else TURNS):
        row = (tl.program_id(0) * TURNS + turn) * BR + tl.arange(0, BR)
        token = tl.load(tokens + row, mask=row < rows, other=-1)
        at = row[:, None].to(tl.int64) * WIDTH + column[None, :]
        part = tl.load(gradient + at, mask=there & (row < rows)[:, None], other=0.0)
        hot = (symbol[:, None] == token[None, :]).to(part.dtype)
        total = tl.dot(hot, part, total)
    at = (tl.program_id(0) * SYMBOLS + symbol)[:, None] * WIDTH + column[None, :]
    tl.store(sums + at, total, mask=there & (symbol < SYMBOLS)[:, None])


def table_gradient(tokens: Tensor, gradient: Tensor, symbols: int) -> Tensor:
    """The sums of the gradient's rows, (R, W), by token: (V, W)."""
    rows, width = gradient.shape
    tile = {"BV": 128, "BR": 64, "BW": min(256, max(16, triton.next_power_of_2(width)))}
    tiles = triton.cdiv(symbols, tile["BV"]), triton.cdiv(width, tile["BW"])
    row_tiles = max(1, triton.cdiv(rows, tile["BR"]))
    shares = max(1, 2 * processors(gradient.device) // (tiles[0] * tiles[1]))
    turns = triton.cdiv(row_tiles, shares)
    shares = triton.cdiv(row_tiles, turns)
    sums = gradient.new_empty(shares, symbols * width, dtype=torch.float32)
    _table_gradient[shares, *tiles](
        tokens.int(),
        gradient.contiguous(),
        sums,
        rows,
        turns,
        SYMBOLS=symbols,
        WIDTH=width,
        **tile,
        TURNS=turns,
        num_warps=8,
        num_stages=3,
    )
    return column_sums(sums).view(symbols, width).to(gradient.dtype)
