"""Sums over rows or columns: RMSNorm with its residual addition, column sums, and the gradient of
an embedding table.

The norm reads and writes every row once in each direction. The update to add arrives next to the
stream; in the backward pass the gradients of stream and norm are added in the same kernel, and
their sum is the gradient of both inputs. The reference is in `models.layers.Block`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from memtrain.accel.triton.common import HIDE, processors
from memtrain.models.layers import RMS_EPSILON

EPSILON = tl.constexpr(RMS_EPSILON)

# A tile holds BR whole rows. Inputs are not read again soon, so they leave the cache first: the
# next product reads the results from there.


@triton.jit(do_not_specialize=["rows"])
def _norm(
    x, update, weight, total, normed, rows,
    WIDTH: tl.constexpr, BW: tl.constexpr, BR: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """total = x + update, in the stream's precision, and normed = total / rms(total) * weight."""
    kind = normed.dtype.element_ty
    column = tl.arange(0, BW)
    w = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(kind).to(tl.float32)
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    at = row[:, None].to(tl.int64) * WIDTH + column[None, :]
    there = (row[:, None] < rows) & (column[None, :] < WIDTH)
    s = tl.load(x + at, mask=there, other=0.0, eviction_policy="evict_first").to(tl.float32)
    if ADD:
        u = tl.load(update + at, mask=there, other=0.0, eviction_policy="evict_first")
        rounded = (s + u.to(tl.float32)).to(kind)
        tl.store(total + at, rounded, mask=there)
        s = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(s * s, 1) / WIDTH + EPSILON)
    tl.store(normed + at, (s * scale[:, None] * w[None, :]).to(kind), mask=there)


@triton.jit(do_not_specialize=["rows", "step"])
def _norm_backward(
    total, weight, normed_gradient, total_gradient, out, sums, rows, step,
    WIDTH: tl.constexpr, BW: tl.constexpr, BR: tl.constexpr, ADD: tl.constexpr,
    ITERATIONS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out = the gradient of `total`, its own and through the norm; sums = that of the weight.

    The weight is rounded as in the forward pass: to the precision of the norm and its gradient. A
    program takes ITERATIONS tiles, `step` apart, and sums its part of the weight's gradient.
    """
    kind = out.dtype.element_ty
    rounded = normed_gradient.dtype.element_ty
    column = tl.arange(0, BW)
    w = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(rounded).to(tl.float32)
    weight_gradient = tl.zeros((BR, BW), tl.float32)
    for iteration in tl.range(ITERATIONS, num_stages=STAGES):
        row = (tl.program_id(0) + iteration * step) * BR + tl.arange(0, BR)
        at = row[:, None].to(tl.int64) * WIDTH + column[None, :]
        there = (row[:, None] < rows) & (column[None, :] < WIDTH)
        s = tl.load(total + at, mask=there, other=0.0, eviction_policy="evict_first")
        g = tl.load(normed_gradient + at, mask=there, other=0.0, eviction_policy="evict_first")
        if ADD:
            d = tl.load(total_gradient + at, mask=there, other=0.0, eviction_policy="evict_first")
        s, g = s.to(tl.float32), g.to(tl.float32)
        # Two sums that are independent of each other.
        scale = tl.rsqrt(tl.sum(s * s, 1) / WIDTH + EPSILON)
        along = tl.sum(g * w[None, :] * s, 1) / WIDTH
        unit = s * scale[:, None]
        through = (g * w[None, :] - unit * (along * scale)[:, None]) * scale[:, None]
        if ADD:
            through += d.to(tl.float32)
        tl.store(out + at, through.to(kind), mask=there)
        weight_gradient += g * unit
    share = tl.sum(weight_gradient, 0)
    tl.store(sums + tl.program_id(0) * WIDTH + column, share, mask=column < WIDTH)


def norm_tiles(rows: int, width: int, processors: int, backward: bool) -> dict[str, int]:
    """Rows per tile and launch options; in the backward pass, `per_processor` programs loop.

    A warp has a row of 256 to itself, 16 bytes per thread. The kernels are limited by memory:
    forward, as many programs run as registers allow; backward, fewer, which prefetch STAGES
    iterations. With few rows, small tiles fill the device.
    """
    columns = triton.next_power_of_2(width)
    size = max(1, 4096 // columns)
    while size > max(1, 1024 // columns) and rows < 4 * processors * size:
        size //= 2
    if not backward:
        return {"BR": size, "num_warps": 4}
    warps = 8 if size * columns >= 2048 else 4
    stages = 3 if columns <= 4096 else 1  # they lie in shared memory
    return {"BR": size, "num_warps": warps, "per_processor": 3, "STAGES": stages}


def _norm_launch(x: Tensor, backward: bool) -> tuple[int, dict[str, int]]:
    """The number of programs and their constants, for (R, W) rows."""
    rows, width = x.shape
    available = processors(x.device)
    tile = norm_tiles(rows, width, available, backward)
    programs = row_tiles = max(1, triton.cdiv(rows, tile["BR"]))
    if backward:
        iterations = triton.cdiv(row_tiles, tile.pop("per_processor") * available)
        programs = triton.cdiv(row_tiles, iterations)
        tile |= {"ITERATIONS": iterations, "STAGES": min(tile["STAGES"], iterations)}
    return programs, {"WIDTH": width, "BW": triton.next_power_of_2(width), **tile}


def run_norm(
    x: Tensor, update: Tensor | None, weight: Tensor, kind: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """x + update (just x without one) and its norm, (R, W), the latter in precision `kind`."""
    programs, constants = _norm_launch(x, backward=False)
    normed = torch.empty_like(x, dtype=kind)
    total = x if update is None else torch.empty_like(normed)
    _norm[programs,](
        x, x if update is None else update, weight, total, normed, len(x),
        ADD=update is not None, **constants,
    )  # fmt: skip
    return total, normed


def run_norm_backward(
    total: Tensor,
    weight: Tensor,
    normed_gradient: Tensor,
    total_gradient: Tensor | None,
    kind: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradient of the sum, (R, W), in precision `kind`, and partial sums of the weight's, (_,
    W) in fp32, to be added up."""
    programs, constants = _norm_launch(total, backward=True)
    out = torch.empty_like(total, dtype=kind)
    sums = total.new_empty(programs, total.shape[1], dtype=torch.float32)
    _norm_backward[programs,](
        total, weight, normed_gradient,
        normed_gradient if total_gradient is None else total_gradient,
        out, sums, len(total), programs,
        ADD=total_gradient is not None, **constants,
    )  # fmt: skip
    return out, sums


# ----------------------------------------------------------------------------------- column sums


@triton.jit(do_not_specialize=["rows"])
def _column_sums(
    x, out, rows,
    WIDTH: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, ITERATIONS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BC + tl.arange(0, BC)
    there = (column < WIDTH)[None, :]
    total = tl.zeros((BR, BC), tl.float32)
    for iteration in range(ITERATIONS):
        row = iteration * BR + tl.arange(0, BR)
        at = row[:, None] * WIDTH + column[None, :]
        total += tl.load(x + at, mask=there & (row < rows)[:, None], other=0.0)
    tl.store(out + column, tl.sum(total, 0), mask=column < WIDTH)


def column_sums(x: Tensor) -> Tensor:
    """The sums over the rows of (R, W) in fp32, in a fixed order. torch's take three times as
    long."""
    rows, width = x.shape
    out = x.new_empty(width)
    size, columns = min(512, max(16, triton.next_power_of_2(rows))), 16
    _column_sums[triton.cdiv(width, columns),](
        x, out, rows,
        WIDTH=width, BR=size, BC=columns, ITERATIONS=triton.cdiv(rows, size),
        num_warps=max(1, size // 64),
    )  # fmt: skip
    return out


# ------------------------------------------------------------------------------------- embedding


@triton.jit(do_not_specialize=["rows", "iterations"])
def _table_gradient(
    tokens, gradient, sums, rows, iterations, SYMBOLS: tl.constexpr, WIDTH: tl.constexpr,
    BV: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr, ITERATIONS: tl.constexpr,
):  # fmt: skip
    """The sum over a part of the rows, for BV symbols. `iterations` is ITERATIONS (see HIDE)."""
    symbol = tl.program_id(1) * BV + tl.arange(0, BV)
    column = tl.program_id(2) * BW + tl.arange(0, BW)
    there = (column < WIDTH)[None, :]
    total = tl.zeros((BV, BW), tl.float32)
    for iteration in range(iterations if HIDE else ITERATIONS):
        row = (tl.program_id(0) * ITERATIONS + iteration) * BR + tl.arange(0, BR)
        token = tl.load(tokens + row, mask=row < rows, other=-1)
        at = row[:, None].to(tl.int64) * WIDTH + column[None, :]
        part = tl.load(gradient + at, mask=there & (row < rows)[:, None], other=0.0)
        hot = (symbol[:, None] == token[None, :]).to(part.dtype)
        total = tl.dot(hot, part, total)
    at = (tl.program_id(0) * SYMBOLS + symbol)[:, None] * WIDTH + column[None, :]
    tl.store(sums + at, total, mask=there & (symbol < SYMBOLS)[:, None])


def table_gradient(tokens: Tensor, gradient: Tensor, symbols: int) -> Tensor:
    """Sum the gradient's rows, (R, W), by token: (V, W). For tables of few symbols.

    A product with one-hot rows that exist in registers only. The reference is
    `models.embedding.table_gradient`.
    """
    rows, width = gradient.shape
    tile = {"BV": 128, "BR": 64, "BW": min(256, max(16, triton.next_power_of_2(width)))}
    tiles = triton.cdiv(symbols, tile["BV"]), triton.cdiv(width, tile["BW"])
    row_tiles = max(1, triton.cdiv(rows, tile["BR"]))
    shares = max(1, 2 * processors(gradient.device) // (tiles[0] * tiles[1]))
    iterations = triton.cdiv(row_tiles, shares)
    shares = triton.cdiv(row_tiles, iterations)
    sums = gradient.new_empty(shares, symbols * width, dtype=torch.float32)
    _table_gradient[shares, *tiles](
        tokens.int(), gradient.contiguous(), sums, rows, iterations,
        SYMBOLS=symbols, WIDTH=width, **tile, ITERATIONS=iterations, num_warps=8, num_stages=3,
    )  # fmt: skip
    return column_sums(sums).view(symbols, width).to(gradient.dtype)
