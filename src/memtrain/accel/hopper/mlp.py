"""The MLP's products with GELU on Hopper: what `kernels.mlp` does, in Gluon (see `products`)."""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from memtrain.accel.hopper.matmul import (
    COLUMNS,
    GROUPS,
    INNER,
    NUMBERS,
    PANEL,
    PART,
    PARTS,
    REGISTERS,
    ROWS,
    begin,
    descriptor,
    fetch,
    finish,
    in_panels,
    inner_part,
    lanes,
    new_barriers,
    new_buffers,
    new_panels,
    no_sums,
    options,
    part_descriptor,
    program_column,
    program_rows,
    put,
    write,
)
from memtrain.accel.triton.common import gelu, gelu_slope

STAGES = 2
"""Tiles of x at once. Those of g leave room for one: `before` takes it."""

# ----------------------------------------------------------------------------------------------- up


@gluon.jit
def _finish_up(
    before, after, biases, buffers, panels, group: gl.constexpr, rows,
    OUTER: gl.constexpr, KEEP: gl.constexpr,
):  # fmt: skip
    """A warpgroup's turns."""
    column = program_column(OUTER)
    first, step = program_rows(OUTER)
    phase = 0
    for row in range(first + group * step, rows, GROUPS * step):
        total = begin(buffers, 0, no_sums(), group, phase)
        parts = in_panels(finish(buffers, total, group, phase))
        phase ^= 1
        for part in gl.static_range(PARTS):
            bias = biases.slice(part * PART, PART).load(gl.SliceLayout(0, PANEL))
            total = parts[part] + gl.expand_dims(bias, 0)
            at = column + part * PART
            if KEEP:
                put(before, row, at, total, panels, 2 * part)
                put(after, row, at, gelu(total), panels, 2 * part + 1)
            else:
                put(after, row, at, gelu(total), panels, part)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows"])
def _up(
    x, weight, bias, before, after, rows,
    OUTER: gl.constexpr, KEEP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """before = x W^T + b, if it is to be kept, and after = GELU(before), with W (OUTER, INNER)."""
    columns = gl.arange(0, COLUMNS, gl.BlockedLayout([2], [32], [4], [0]))
    b = gl.load(bias + program_column(OUTER) + columns).to(gl.float32)
    biases = gl.allocate_shared_memory(gl.float32, [COLUMNS], NUMBERS, b)
    buffers = new_buffers(weight, STAGES)
    panels = new_panels(PARTS // STAGES), new_panels(PARTS // STAGES)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_finish_up, (before, after, biases, buffers, panels[0], 0, rows, OUTER, KEEP)),
            (_finish_up, (before, after, biases, buffers, panels[1], 1, rows, OUTER, KEEP)),
            (fetch, (x, weight, buffers, rows, OUTER, STAGES)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )


def run_up(x: Tensor, weight: Tensor, bias: Tensor, before: Tensor | None, after: Tensor) -> None:
    """Write x W^T + b, if there is room for it, and GELU of it, (R, O)."""
    outer = len(weight)
    _up[lanes(x, outer) * (outer // COLUMNS.value),](
        part_descriptor(x),
        descriptor(weight, [COLUMNS.value, PART.value]),
        bias,
        part_descriptor(after if before is None else before),
        part_descriptor(after),
        len(x),
        KEEP=before is not None,
        **options(outer, STAGES),
    )


# ----------------------------------------------------------------------------------- down, backward

# `before` comes to where `out` leaves from. Panel by panel, so that a thread need not hold all of
# it beside the product's sums, and those of the columns over all its rows.


LINES = gl.constexpr(gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0]))
"""A warp has whole rows of a part."""


@gluon.jit
def _thread_sums(x):
    """A panel's rows as far as each thread can add them up alone: (warps, 8, PART)."""
    one, other = gl.split(gl.permute(gl.reshape(x, (4, 2, 8, PART)), (0, 2, 3, 1)))
    return one + other


@gluon.jit
def _inner_sums(part):
    """The same of a part of the rows that came: (warps, PART)."""
    sums = gl.sum(gl.reshape(part.load(LINES).to(gl.float32), (16, 4, PART)), 0)
    return gl.convert_layout(sums, LINES, assert_trivial=True)


@gluon.jit
def _store_sums(x, sums, first, WIDTH: gl.constexpr):
    """Write what each warp has added up."""
    layout: gl.constexpr = x.type.layout
    warp = gl.arange(0, 4, gl.SliceLayout(1, layout))
    column = gl.arange(0, PART, gl.SliceLayout(0, layout)) + first
    gl.store(sums + gl.expand_dims(warp, 1) * WIDTH + gl.expand_dims(column, 0), x)


@gluon.jit
def _bring(before, places, panel: gl.constexpr, row, column, rows):
    """Have a panel of `before` brought in."""
    panels, came = places
    at = [row, column + panel * PART]
    mbarrier.expect(came[panel], ROWS * PART * 2, pred=row < rows)
    tma.async_copy_global_to_shared(before, at, came[panel], panels[panel], pred=row < rows)


@gluon.jit
def _finish_panel(total, places, panel: gl.constexpr, phase, out, row, column):
    """A panel of `out` instead of that of `before`, and its columns' sums."""
    panels, came = places
    mbarrier.wait(came[panel], phase)
    total *= gelu_slope(panels[panel].load(PANEL).to(gl.float32))
    panels[panel].store(total.to(gl.bfloat16))
    write(out, row, column + panel * PART, panels[panel])
    return _thread_sums(total)


@gluon.jit
def _finish_down(
    before, out, sums, buffers, places, group: gl.constexpr, rows, OUTER: gl.constexpr
):
    """A warpgroup's turns."""
    _, _, tiles, _, _, _ = buffers
    column = program_column(OUTER)
    first, step = program_rows(OUTER)
    first += group * step
    step *= GROUPS
    for panel in gl.static_range(PARTS):
        _bring(before, places, panel, first, column, rows)
    empty = _thread_sums(gl.zeros((ROWS, PART), gl.float32, PANEL))
    sums_0, sums_1, sums_2, sums_3 = empty, empty, empty, empty
    inner_sums = gl.zeros((4, PART), gl.float32, LINES)
    phase = 0
    for row in range(first, rows, step):
        total = begin(buffers, 0, no_sums(), group, phase)
        inner_sums += _inner_sums(tiles.index(0))
        total = finish(buffers, total, group, phase)
        part_0, part_1, part_2, part_3 = in_panels(total)
        # When a panel has been read out, what comes next is brought to its place.
        sums_0 += _finish_panel(part_0, places, 0, phase, out, row, column)
        sums_1 += _finish_panel(part_1, places, 1, phase, out, row, column)
        tma.store_wait(1)
        _bring(before, places, 0, row + step, column, rows)
        sums_2 += _finish_panel(part_2, places, 2, phase, out, row, column)
        tma.store_wait(1)
        _bring(before, places, 1, row + step, column, rows)
        sums_3 += _finish_panel(part_3, places, 3, phase, out, row, column)
        tma.store_wait(1)
        _bring(before, places, 2, row + step, column, rows)
        tma.store_wait(0)
        _bring(before, places, 3, row + step, column, rows)
        phase ^= 1
    width: gl.constexpr = OUTER + INNER
    sums += (gl.program_id(0) // (OUTER // COLUMNS) * GROUPS + group) * 4 * width
    _store_sums(gl.sum(sums_0, 1), sums, column, width)
    _store_sums(gl.sum(sums_1, 1), sums, column + PART, width)
    _store_sums(gl.sum(sums_2, 1), sums, column + 2 * PART, width)
    _store_sums(gl.sum(sums_3, 1), sums, column + 3 * PART, width)
    _store_sums(inner_sums, sums, OUTER + inner_part(0, OUTER), width)


@gluon.jit(do_not_specialize=["rows"])
def _down_backward(
    gradient, weight, before, out, sums, rows, OUTER: gl.constexpr, STAGES: gl.constexpr
):
    """out = (g W) * GELU'(before), with W (INNER, OUTER); and the columns' sums of out and of g.

    Each warp adds up its own columns of `out`, and a part of those of g.
    """
    buffers = new_buffers(weight, STAGES)
    places = (new_panels(PARTS), new_barriers()), (new_panels(PARTS), new_barriers())
    fence_async_shared()
    gl.warp_specialize(
        [
            (_finish_down, (before, out, sums, buffers, places[0], 0, rows, OUTER)),
            (_finish_down, (before, out, sums, buffers, places[1], 1, rows, OUTER)),
            (fetch, (gradient, weight, buffers, rows, OUTER, STAGES)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )


def run_down_backward(gradient: Tensor, weight: Tensor, before: Tensor, out: Tensor) -> Tensor:
    """Write (g W) * GELU'(before), (R, O), and return shares of the columns' sums of it and of g,
    (_, O + I) in fp32, to be added up."""
    outer, count = weight.shape[1], lanes(gradient, weight.shape[1])
    shares = count * GROUPS.value * 4
    sums = gradient.new_empty(shares, outer + INNER.value, dtype=torch.float32)
    _down_backward[count * (outer // COLUMNS.value),](
        part_descriptor(gradient),
        descriptor(weight, [PART.value, COLUMNS.value]),
        part_descriptor(before),
        part_descriptor(out),
        sums,
        len(gradient),
        **options(outer, 1),
    )
    return sums
