"""The residual stream between products: sum and RMSNorm in one kernel, and so their gradient.

Every row is read once and written once each way. An update that waits to be added comes to the
next norm beside the stream; on the way back, the stream's gradient is added where the norm's is
made, and the one result serves both. The reference is `nn.blocks.Block.add_norm`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from memtrain.nn.blocks import RMS_EPSILON
from memtrain.nn.kernels.mlp import processors
from memtrain.nn.kernels.sums import column_sums

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

    A program takes TURNS tiles, `step` apart, and adds up its own share of the weight's gradient.
    """
    kind = out.dtype.element_ty
    column = tl.arange(0, BW)
    w = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(kind).to(tl.float32)
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


def run_forward(x: Tensor, update: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
    """x + update, where there is one, and its norm, (R, W)."""
    launch = Launch(x, backward=False)
    normed = torch.empty_like(x)
    total = x if update is None else torch.empty_like(x)
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
    total: Tensor, weight: Tensor, normed_gradient: Tensor, total_gradient: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradients of the sum (R, W) and of the weight (W), this one in fp32."""
    launch = Launch(total, backward=True)
    out = torch.empty_like(total)
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
    return out, column_sums(sums)


# ------------------------------------------------------------------------------- torch operators


@torch.library.custom_op("memtrain::add_norm", mutates_args=())
def add_norm(x: Tensor, update: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """x + update and its norm, (R, W)."""
    return run_forward(x, update, weight)


@add_norm.register_fake
def _(x: Tensor, update: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


@torch.library.custom_op("memtrain::norm", mutates_args=())
def norm(x: Tensor, weight: Tensor) -> Tensor:
    """`add_norm` where there is nothing to add."""
    return run_forward(x, None, weight)[1]


@norm.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("memtrain::norm_backward", mutates_args=())
def norm_backward(
    total: Tensor, weight: Tensor, normed_gradient: Tensor, total_gradient: Tensor | None
) -> tuple[Tensor, Tensor]:
    return run_backward(total, weight, normed_gradient, total_gradient)


@norm_backward.register_fake
def _(
    total: Tensor, weight: Tensor, normed_gradient: Tensor, total_gradient: Tensor | None
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(total), weight.new_empty(weight.shape, dtype=torch.float32)


def _add_context(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[0], inputs[2])


def _add_gradient(ctx, total_gradient, normed_gradient):
    if normed_gradient is None:
        return total_gradient, total_gradient, None
    total, weight = ctx.saved_tensors
    if total_gradient is not None:
        total_gradient = total_gradient.contiguous()
    out, weight_gradient = norm_backward(
        total, weight, normed_gradient.contiguous(), total_gradient
    )
    return out, out, weight_gradient.to(weight.dtype)


def _norm_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _norm_gradient(ctx, gradient):
    x, weight = ctx.saved_tensors
    out, weight_gradient = norm_backward(x, weight, gradient.contiguous(), None)
    return out, weight_gradient.to(weight.dtype)


add_norm.register_autograd(_add_gradient, setup_context=_add_context)
norm.register_autograd(_norm_gradient, setup_context=_norm_context)


class KernelNorm:
    """What `nn.blocks.Block` calls in the place of its sums and norms."""

    def __call__(
        self, layer: nn.RMSNorm, x: Tensor, update: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        # The weight is rounded as the stream is, inside; its gradient is not.
        if update is None:
            return x, norm(_rows(x), layer.weight).view(x.shape)
        kind = torch.promote_types(x.dtype, update.dtype)
        total, normed = add_norm(_rows(x.to(kind)), _rows(update.to(kind)), layer.weight)
        return total.view(x.shape), normed.view(x.shape)


def _rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2).contiguous()
