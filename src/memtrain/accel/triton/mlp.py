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

from memtrain.accel.triton.common import gelu, gelu_slope
from memtrain.accel.triton.launch import Launch, on_hopper

# A program has BR rows of BO columns. Programs that follow each other take the same rows, which are
# then read from memory once. (Weights that stay in shared memory while rows go by are no faster;
# but see `hopper.products`.)


@triton.jit
def _up(
    x,
    weight,
    bias,
    before,
    after,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
    BR: tl.constexpr,
    BI: tl.constexpr,
    BO: tl.constexpr,
    KEEP: tl.constexpr,
):
    """before = x W^T + b, if it is to be kept, and after = GELU(before), with W (OUTER, INNER)."""
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
    gradient,
    gradient_at,
    weight,
    before_at,
    out,
    sums,
    rows,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
    BR: tl.constexpr,
    BI: tl.constexpr,
    BO: tl.constexpr,
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
    tile = tl.program_id(0) // column_tiles
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


# ---------------------------------------------------------------------------------------- launch


def tiles(rows: int, inner: int, element_size: int, backward: bool) -> dict[str, int]:
    """Sizes of a tile and how it is run.

    Large products are bound by memory: two programs share a processor (up to 128 registers a
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


def run_up(x: Tensor, weight: Tensor, bias: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
    """x W^T + b, if it is to be kept, and GELU of it, (R, O)."""
    after = x.new_empty(len(x), len(weight))
    before = torch.empty_like(after) if keep else after
    if on_hopper(x, weight, len(weight)):
        import memtrain.accel.hopper.mlp as hopper_mlp

        hopper_mlp.run_up(x, weight, bias, before if keep else None, after)
        return before, after
    launch = Launch(x, len(weight), tiles(*x.shape, x.element_size(), backward=False))
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


def run_down_backward(gradient: Tensor, weight: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """(g W) * GELU'(before), (R, O), and shares of the columns' sums of it and of g, (_, O + I) in
    fp32, to be added up."""
    out = torch.empty_like(before)
    # Each 256 columns' programs add up a quarter of the columns of g. With few rows it is slower.
    wide, long = weight.shape[1] >= 1024, len(gradient) >= 8192
    if wide and long and on_hopper(gradient, weight, weight.shape[1]):
        import memtrain.accel.hopper.mlp as hopper_mlp

        return out, hopper_mlp.run_down_backward(gradient, weight, before, out)
    tile = tiles(*gradient.shape, gradient.element_size(), backward=True)
    launch = Launch(gradient, weight.shape[1], tile)
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
