"""The block's MLP with GELU inside its products: one kernel forward, one backward.

Written by themselves, GELU and its gradient read and write as much as the products around them,
and take longer. Here the first product ends in bias and GELU; on the way back, the product with
the second matrix ends in GELU's derivative and in the sums that are the biases' gradients. The
other products are plain. The reference is `nn.blocks.Block.mlp`.

Tiles come and go through tensor descriptors made by the host, which a captured graph keeps by
value: what lies outside is read as zero and not written.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from memtrain.nn.kernels.functions import gelu, gelu_slope

# A program owns BO columns and takes TURNS row tiles, `step` apart. Where a tile holds all of the
# inner dimension (BI >= INNER), the columns' weights are read once and stay in shared memory.
# Programs that follow each other take the same rows, which are then read from memory once.


@triton.jit(do_not_specialize=["step"])
def _up(
    x,
    weight,
    bias,
    before,
    after,
    step,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
    BR: tl.constexpr,
    BI: tl.constexpr,
    BO: tl.constexpr,
    TURNS: tl.constexpr,
    KEEP: tl.constexpr,
):
    """before = x W^T + b, if it is to be kept, and after = GELU(before), with W (OUTER, INNER)."""
    column_tiles: tl.constexpr = (OUTER + BO - 1) // BO
    first = tl.program_id(0) % column_tiles * BO
    column = first + tl.arange(0, BO)
    b = tl.load(bias + column, mask=column < OUTER, other=0.0).to(tl.float32)
    if BI >= INNER:
        w = weight.load([first, 0])
    for turn in range(TURNS):
        row = (tl.program_id(0) // column_tiles + turn * step) * BR
        if BI >= INNER:
            total = tl.dot(x.load([row, 0]), w.T)
        else:
            total = tl.zeros((BR, BO), tl.float32)
            for start in range(0, INNER, BI):
                part = weight.load([first, start])
                total = tl.dot(x.load([row, start]), part.T, total)
        total += b[None, :]
        if KEEP:
            before.store([row, first], total.to(before.dtype))
        after.store([row, first], gelu(total).to(after.dtype))


@triton.jit(do_not_specialize=["rows", "step"])
def _down_backward(
    gradient,
    gradient_at,
    weight,
    before_at,
    out,
    sums,
    rows,
    step,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
    BR: tl.constexpr,
    BI: tl.constexpr,
    BO: tl.constexpr,
    TURNS: tl.constexpr,
    SLICE: tl.constexpr,
):
    """out = (g W) * GELU'(before), with W (INNER, OUTER); and the columns' sums of out and of g.

    Each program adds up its own columns of `out`, and a slice of those of g.
    """
    column_tiles: tl.constexpr = (OUTER + BO - 1) // BO
    column_tile = tl.program_id(0) % column_tiles
    first = column_tile * BO
    column = first + tl.arange(0, BO)
    inner = column_tile * SLICE + tl.arange(0, SLICE)
    column_there, inner_there = column < OUTER, inner < INNER
    sum_out = tl.zeros((BO,), tl.float32)
    sum_gradient = tl.zeros((SLICE,), tl.float32)
    if BI >= INNER:
        w = weight.load([0, first])
    for turn in range(TURNS):
        tile = tl.program_id(0) // column_tiles + turn * step
        # Plain loads before the product: under way while it is taken.
        row = tile * BR + tl.arange(0, BR)
        row_there = row[:, None] < rows
        at = row[:, None].to(tl.int64)
        before = tl.load(
            before_at + at * OUTER + column, mask=row_there & column_there[None, :], other=0.0
        )
        some = tl.load(
            gradient_at + at * INNER + inner, mask=row_there & inner_there[None, :], other=0.0
        )
        if BI >= INNER:
            total = tl.dot(gradient.load([tile * BR, 0]), w)
        else:
            total = tl.zeros((BR, BO), tl.float32)
            for start in range(0, INNER, BI):
                part = weight.load([start, first])
                total = tl.dot(gradient.load([tile * BR, start]), part, total)
        total *= gelu_slope(before.to(tl.float32))
        out.store([tile * BR, first], total.to(out.dtype))
        sum_out += tl.sum(total, 0)
        sum_gradient += tl.sum(some.to(tl.float32), 0)
    sums += tl.program_id(0) // column_tiles * (OUTER + INNER)
    tl.store(sums + column, sum_out, mask=column_there)
    tl.store(sums + OUTER + inner, sum_gradient, mask=inner_there)


# ---------------------------------------------------------------------------------------- launch


def tiles(rows: int, inner: int, element_size: int, backward: bool) -> dict[str, int]:
    """Sizes of a tile and how it is run; `per_processor` programs stay, 0: one for each tile.

    Large products are bound by memory: two programs share a processor (up to 128 registers a
    thread), so that one computes while the other waits. With few rows, small tiles fill the device.
    """
    most = 64 if element_size == 2 else 32
    size = min(most, max(16, triton.next_power_of_2(inner)))
    tile = {"BI": size, "per_processor": 0, "num_warps": 4, "num_stages": 3}
    if rows <= 4096 or element_size > 2:
        return tile | {"BR": 64, "BO": 64 if backward else 128}
    if backward:
        return tile | {"BR": 64, "BO": 128, "num_stages": 2, "maxnreg": 128}
    return tile | {"BR": 128, "BO": 128, "num_warps": 8, "maxnreg": 128}


class Launch:
    """Which programs run over an (R, I) by (I, O) product, and what each is told."""

    def __init__(self, x: Tensor, outer: int, tile: dict[str, int]) -> None:
        self.rows, self.inner = x.shape
        self.outer = outer
        tile = dict(tile)
        per_processor = tile.pop("per_processor")
        self.BR, self.BI, self.BO = tile["BR"], tile["BI"], tile["BO"]
        self.row_tiles = triton.cdiv(self.rows, self.BR)
        self.column_tiles = triton.cdiv(outer, self.BO)
        self.step = self.row_tiles
        if per_processor:
            there = per_processor * processors(x.device) // self.column_tiles
            self.step = max(1, min(self.row_tiles, there))
        self.grid = (self.step * self.column_tiles,)
        turns = triton.cdiv(self.row_tiles, self.step)
        self.constants = {"INNER": self.inner, "OUTER": outer, "TURNS": turns, **tile}


def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; the interpreter stands for two."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def run_up(x: Tensor, weight: Tensor, bias: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
    """x W^T + b, if it is to be kept, and GELU of it, (R, O)."""
    launch = Launch(x, len(weight), tiles(*x.shape, x.element_size(), backward=False))
    after = x.new_empty(launch.rows, launch.outer)
    before = torch.empty_like(after) if keep else after
    _up[launch.grid](
        TensorDescriptor.from_tensor(x, [launch.BR, launch.BI]),
        TensorDescriptor.from_tensor(weight, [launch.BO, launch.BI]),
        bias,
        TensorDescriptor.from_tensor(before, [launch.BR, launch.BO]),
        TensorDescriptor.from_tensor(after, [launch.BR, launch.BO]),
        launch.step,
        KEEP=keep,
        **launch.constants,
    )
    return before, after


def run_down_backward(gradient: Tensor, weight: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """(g W) * GELU'(before), (R, O), and shares of the columns' sums of it and of g, (_, O + I) in
    fp32, to be added up."""
    tile = tiles(*gradient.shape, gradient.element_size(), backward=True)
    launch = Launch(gradient, weight.shape[1], tile)
    out = torch.empty_like(before)
    sums = gradient.new_empty(launch.step, launch.outer + launch.inner, dtype=torch.float32)
    _down_backward[launch.grid](
        TensorDescriptor.from_tensor(gradient, [launch.BR, launch.BI]),
        gradient,
        TensorDescriptor.from_tensor(weight, [launch.BI, launch.BO]),
        before,
        TensorDescriptor.from_tensor(out, [launch.BR, launch.BO]),
        sums,
        launch.rows,
        launch.step,
        **launch.constants,
        SLICE=max(16, triton.next_power_of_2(triton.cdiv(launch.inner, launch.column_tiles))),
    )
    return out, sums
