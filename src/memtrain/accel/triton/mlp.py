"""The block's MLP with GELU fused into its products: one kernel forward, one backward.

As kernels of their own, GELU and its gradient would move as much memory as the products around
them, and take longer. Here the first product ends in bias and GELU; in the backward pass, the
product with the second matrix ends in GELU's derivative and in the column sums that are the biases'
gradients. The other products are torch's. The reference is `models.layers.Block.mlp`.

Tiles are loaded and stored through tensor descriptors made on the host, which a captured graph
keeps by value: elements outside a tensor are read as zero and not written.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from memtrain.accel.triton.common import MatmulLaunch, gelu, gelu_slope, hopper_serves_matmul

# A program computes BR rows of BO columns. Consecutive programs share their rows, which are then
# read from memory once. (Keeping weights in shared memory while looping over rows is no faster in
# Triton; `hopper.layout` does it in Gluon.)


@triton.jit
def _up(
    x, weight, bias, before, after,
    INNER: tl.constexpr, OUTER: tl.constexpr, BR: tl.constexpr, BI: tl.constexpr,
    BO: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """before = x W^T + b (stored if KEEP) and after = GELU(before), with W (OUTER, INNER)."""
    column_tiles: tl.constexpr = (OUTER + BO - 1) // BO
    first = tl.program_id(0) % column_tiles * BO
    column = first + tl.arange(0, BO)
    row = tl.program_id(0) // column_tiles * BR
    b = tl.load(bias + column, mask=column < OUTER, other=0.0).to(tl.float32)
    if BI >= INNER:
        total = tl.dot(x.load([row, 0]), weight.load([first, 0]).T)
    else:
        total = tl.zeros((BR, BO), tl.float32)
        for start in range(0, INNER, BI):
            total = tl.dot(x.load([row, start]), weight.load([first, start]).T, total)
    total += b[None, :]
    if KEEP:
        before.store([row, first], total.to(before.dtype))
    after.store([row, first], gelu(total).to(after.dtype))


@triton.jit(do_not_specialize=["rows"])
def _down_backward(
    gradient, gradient_at, weight, before_at, out, sums, rows,
    INNER: tl.constexpr, OUTER: tl.constexpr, BR: tl.constexpr, BI: tl.constexpr,
    BO: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """out = (g W) * GELU'(before), with W (INNER, OUTER); and the column sums of out and g.

    Each program sums its own columns of `out`, and a slice of the columns of g.
    """
    column_tiles: tl.constexpr = (OUTER + BO - 1) // BO
    column_tile = tl.program_id(0) % column_tiles
    first = column_tile * BO
    column = first + tl.arange(0, BO)
    inner = column_tile * SLICE + tl.arange(0, SLICE)
    column_there, inner_there = column < OUTER, inner < INNER
    tile = tl.program_id(0) // column_tiles
    # Plain loads are issued before the product, to overlap with it.
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
        total = tl.dot(gradient.load([tile * BR, 0]), weight.load([0, first]))
    else:
        total = tl.zeros((BR, BO), tl.float32)
        for start in range(0, INNER, BI):
            total = tl.dot(gradient.load([tile * BR, start]), weight.load([start, first]), total)
    total *= gelu_slope(before.to(tl.float32))
    out.store([tile * BR, first], total.to(out.dtype))
    sums += tile * (OUTER + INNER)
    tl.store(sums + column, tl.sum(total, 0), mask=column_there)
    tl.store(sums + OUTER + inner, tl.sum(some.to(tl.float32), 0), mask=inner_there)


def mlp_tiles(rows: int, inner: int, element_size: int, backward: bool) -> dict[str, int]:
    """Tile sizes and launch options.

    Large products are limited by memory: two programs share a processor (up to 128 registers per
    thread), so that one computes while the other waits. With few rows, small tiles fill the device.
    """
    most = 64 if element_size == 2 else 32
    size = min(most, max(16, triton.next_power_of_2(inner)))
    tile = {"BI": size, "num_warps": 4, "num_stages": 3}
    if rows <= 4096 or element_size > 2:
        return tile | {"BR": 64, "BO": 64 if backward else 128}
    if backward:
        return tile | {"BR": 64, "BO": 128, "num_stages": 2, "maxnreg": 128}
    return tile | {"BR": 128, "BO": 128, "num_warps": 8, "maxnreg": 128}


def run_mlp_up(x: Tensor, weight: Tensor, bias: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
    """x W^T + b, (R, O) (meaningless unless `keep`), and its GELU."""
    after = x.new_empty(len(x), len(weight))
    before = torch.empty_like(after) if keep else after
    if hopper_serves_matmul(x, weight, len(weight)):
        from memtrain.accel.hopper.linear import hopper_mlp_up

        hopper_mlp_up(x, weight, bias, before if keep else None, after)
        return before, after
    tile = mlp_tiles(*x.shape, x.element_size(), backward=False)
    launch = MatmulLaunch(x, len(weight), tile)
    _up[launch.grid](
        TensorDescriptor.from_tensor(x, [launch.BR, launch.BI]),
        TensorDescriptor.from_tensor(weight, [launch.BO, launch.BI]),
        bias,
        TensorDescriptor.from_tensor(before, [launch.BR, launch.BO]),
        TensorDescriptor.from_tensor(after, [launch.BR, launch.BO]),
        KEEP=keep,
        **launch.constants,
    )
    return before, after


def run_mlp_down_backward(
    gradient: Tensor, weight: Tensor, before: Tensor
) -> tuple[Tensor, Tensor]:
    """(g W) * GELU'(before), (R, O), and partial column sums of it and of g, (_, O + I) in fp32, to
    be added up."""
    out = torch.empty_like(before)
    # On Hopper, programs of each 256 columns sum a quarter of g's columns. Few rows are slower.
    wide, long = weight.shape[1] >= 1024, len(gradient) >= 8192
    if wide and long and hopper_serves_matmul(gradient, weight, weight.shape[1]):
        from memtrain.accel.hopper.linear import hopper_mlp_down_backward

        return out, hopper_mlp_down_backward(gradient, weight, before, out)
    tile = mlp_tiles(*gradient.shape, gradient.element_size(), backward=True)
    launch = MatmulLaunch(gradient, weight.shape[1], tile)
    sums = gradient.new_empty(launch.row_tiles, launch.outer + launch.inner, dtype=torch.float32)
    _down_backward[launch.grid](
        TensorDescriptor.from_tensor(gradient, [launch.BR, launch.BI]),
        gradient,
        TensorDescriptor.from_tensor(weight, [launch.BI, launch.BO]),
        before,
        TensorDescriptor.from_tensor(out, [launch.BR, launch.BO]),
        sums,
        launch.rows,
        **launch.constants,
        SLICE=max(16, triton.next_power_of_2(triton.cdiv(launch.inner, launch.column_tiles))),
    )
    return out, sums
