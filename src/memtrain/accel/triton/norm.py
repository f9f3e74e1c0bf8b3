"""The residual stream between products: sum and RMSNorm in one kernel, and so their gradient.

Every row is read once and written once each way. An update that waits to be added comes to the
next norm beside the stream; on the way back, the stream's gradient is added where the norm's is
made, and the one result serves both. The reference is in `nn.blocks.Block`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from memtrain.accel.triton.launch import processors
from memtrain.models.layers import RMS_EPSILON

EPSILON = tl.constexpr(RMS_EPSILON)

# A tile holds BR whole rows. What is read is not read again soon: it need not stay in the cache,
# where the next product will look for what is written.


@triton.jit(do_not_specialize=["rows"])
def _forward(
    x,
    update,
    weight,
    total,
    normed,
    rows,
    WIDTH: tl.constexpr,
    BW: tl.constexpr,
    BR: tl.constexpr,
    ADD: tl.constexpr,
):
    """total = x + update, rounded as the stream is, and normed = total / rms(total) * weight."""
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
def _backward(
    total,
    weight,
    normed_gradient,
    total_gradient,
    out,
    sums,
    rows,
    step,
    WIDTH: tl.constexpr,
    BW: tl.constexpr,
    BR: tl.constexpr,
    ADD: tl.constexpr,
    TURNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """out = the gradient of `total`, by itself and through its norm; sums = that of the weight.

    The weight is rounded as it was forward: to the norm's precision, which its gradient has too.

    A program takes TURNS tiles, `step` apart, and adds up its own share of the weight's gradient.
    """
    kind = out.dtype.element_ty
    rounded = normed_gradient.dtype.element_ty
    column = tl.arange(0, BW)
    w = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(rounded).to(tl.float32)
    weight_gradient = tl.zeros((BR, BW), tl.float32)
    for turn in tl.range(TURNS, num_stages=STAGES):
        row = (tl.program_id(0) + turn * step) * BR + tl.arange(0, BR)
        at = row[:, None].to(tl.int64) * WIDTH + column[None, :]
        there = (row[:, None] < rows) & (column[None, :] < WIDTH)
        s = tl.load(total + at, mask=there, other=0.0, eviction_policy="evict_first")
        g = tl.load(normed_gradient + at, mask=there, other=0.0, eviction_policy="evict_first")
        if ADD:
            d = tl.load(total_gradient + at, mask=there, other=0.0, eviction_policy="evict_first")
        s, g = s.to(tl.float32), g.to(tl.float32)
        # Two sums that do not wait for each other.
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


# ---------------------------------------------------------------------------------------- launch


def tiles(rows: int, width: int, processors: int, backward: bool) -> dict[str, int]:
    """Rows of a tile and how it is run; backward, `per_processor` programs take turns.

    A warp has a row of 256 to itself, 16 bytes a thread. Bound by memory: forward, as many programs
    as registers allow; backward, fewer, whose loads run ahead by STAGES turns. With few rows, small
    tiles fill the device.
    """
    columns = triton.next_power_of_2(width)
    size = max(1, 4096 // columns)
    while size > max(1, 1024 // columns) and rows < 4 * processors * size:
        size //= 2
    if not backward:
        return {"BR": size, "num_warps": 4}
    warps = 8 if size * columns >= 2048 else 4
    stages = 3 if columns <= 4096 else 1  # which lie in shared memory
    return {"BR": size, "num_warps": warps, "per_processor": 3, "STAGES": stages}


class Launch:
    """Which programs run over (R, W) rows, and what each is told."""

    def __init__(self, x: Tensor, backward: bool) -> None:
        rows, width = x.shape
        there = processors(x.device)
        tile = tiles(rows, width, there, backward)
        self.programs = row_tiles = max(1, triton.cdiv(rows, tile["BR"]))
        if backward:
            turns = triton.cdiv(row_tiles, tile.pop("per_processor") * there)
            self.programs = triton.cdiv(row_tiles, turns)
            tile |= {"TURNS": turns, "STAGES": min(tile["STAGES"], turns)}
        self.grid = (self.programs,)
        self.constants = {"WIDTH": width, "BW": triton.next_power_of_2(width), **tile}


def run_forward(
    x: Tensor, update: Tensor | None, weight: Tensor, kind: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """x + update, where there is one, and its norm, (R, W), in a wider precision if asked for."""
    launch = Launch(x, backward=False)
    normed = torch.empty_like(x, dtype=kind)
    total = x if update is None else torch.empty_like(normed)
    _forward[launch.grid](
        x,
        x if update is None else update,
        weight,
        total,
        normed,
        len(x),
        ADD=update is not None,
        **launch.constants,
    )
    return total, normed


def run_backward(
    total: Tensor,
    weight: Tensor,
    normed_gradient: Tensor,
    total_gradient: Tensor | None,
    kind: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradient of the sum (R, W), in another precision if asked for, and shares of the
    weight's, (_, W) in fp32, to add up."""
    launch = Launch(total, backward=True)
    out = torch.empty_like(total, dtype=kind)
    sums = total.new_empty(launch.programs, total.shape[1], dtype=torch.float32)
    _backward[launch.grid](
        total,
        weight,
        normed_gradient,
        normed_gradient if total_gradient is None else total_gradient,
        out,
        sums,
        len(total),
        launch.programs,
        ADD=total_gradient is not None,
        **launch.constants,
    )
    return out, sums
